"""The only file that talks to the API server: plain objects in and out, every call bounded.

The official client reads the kubeconfig and holds the connections. Its models and its retries are left aside:
a GET of it waits for ever, a POST is never repeated, and a watch hides how it ended.
"""

from __future__ import annotations

import datetime
import email.utils
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher import credentialplugin
from launcher.errors import ApiError, ClusterError, Unreachable
from launcher.kinds import ACCESS_REVIEWS, PODS, Kind
from launcher.logs import Lines
from launcher.watch import Event, Watch

if TYPE_CHECKING:
    from launcher.transport import Access, Transport

__all__ = ["ApiError", "Cluster", "Unreachable"]

MANAGER = "jaxlaunch"  # of the fields we set
_HERE = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # what a pod has
_LOG_SILENCE_S = 300.0  # a program may be quiet; a dead connection is so too

Object = dict[str, Any]
Objects = list[Object]  # a method below is called `list`


class Cluster:
    """One context of a kubeconfig. Calls raise ApiError when the server refuses, Unreachable when it is silent."""

    def __init__(self, transport: Transport, namespace: str) -> None:
        self._transport = transport
        self.namespace = namespace  # the context's own

    @classmethod
    def connect(cls, context: str | None = None) -> Cluster:
        """The cluster of a context, by default the current one; in a pod without a kubeconfig the pod's own.

        Asks nothing of the server yet. Raises ClusterError when there is no way to one.
        """
        from launcher.transport import Transport  # with the client it takes a quarter of a second

        name, namespace = _context(context)
        return cls(Transport(lambda: _access(context), name), namespace)

    @property
    def calls(self) -> int:
        """Requests made so far, every try counted."""
        return self._transport.calls

    @property
    def context(self) -> str:
        return self._transport.name

    @property
    def server(self) -> str:
        return self._transport.server

    def hurry(self, total_s: float = 5.0) -> None:
        """From now on no call takes longer: somebody pressed Ctrl-C and waits."""
        self._transport.total_s = total_s

    # --- objects ------------------------------------------------------------------------------------------------------

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """The object, or None when there is none of that name."""
        try:
            return self._json("GET", kind.path(namespace or self.namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        limit: int = 500,
        pages: int | None = None,
        keep: Callable[[Object], Object] = lambda one: one,
    ) -> Objects:
        """The objects of a namespace, or of all, in `pages` of `limit`; `keep` says what is kept of each."""
        return self.listed(kind, namespace, labels, fields, limit, pages, keep)[0]

    def listed(
        self,
        kind: Kind,
        namespace: str | None,
        labels: str = "",
        fields: str = "",
        limit: int = 500,
        pages: int | None = None,
        keep: Callable[[Object], Object] = lambda one: one,
    ) -> tuple[Objects, str]:
        """As list(), and the version from which a watch misses nothing.

        Their managedFields, which are half of their bytes, are left out.
        """
        path, asked = kind.path(namespace), {**_selectors(labels, fields), "limit": str(limit)}
        found: Objects = []
        query = dict(asked)
        turned = 0
        while True:
            try:
                page = self._json("GET", path, query)
            except ApiError as error:
                if error.status != 410 or "continue" not in query:
                    raise
                found, query = [], dict(asked)  # the rest of the list was forgotten meanwhile
                continue
            for one in page.get("items") or []:
                one["metadata"].pop("managedFields", None)
                found.append(keep(one))
            turned += 1
            if not (more := page["metadata"].get("continue")) or turned == pages:
                return found, page["metadata"].get("resourceVersion", "")
            query = {**asked, "continue": more}

    def create(self, kind: Kind, obj: Object, *, dry_run: bool = False) -> Object:
        """The object as the server keeps it; a field that it does not know is refused.

        Sent again only when the server has not carried it out. After any other fault whether it exists is not known.
        """
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        return self._json("POST", kind.path(self._namespace_of(obj)), query, obj, repeat=dry_run)

    def apply(self, kind: Kind, obj: Object, manager: str) -> Object:
        """Server-side apply of the fields of `obj` for a manager; a field that another one holds is refused."""
        query = {"fieldManager": manager, "fieldValidation": "Strict"}
        path = kind.path(self._namespace_of(obj), obj["metadata"]["name"])
        return self._json("PATCH", path, query, obj, content="application/apply-patch+yaml")

    def merge(self, kind: Kind, name: str, namespace: str, patch: Object) -> Object:
        """The object after a JSON merge patch."""
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        return self._json("PATCH", kind.path(namespace, name), query, patch, content="application/merge-patch+json")

    def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str,
        *,
        uid: str | None = None,
        propagation: str = "Background",
    ) -> bool:
        """Begins to delete the object, the one with this uid alone when it is given; False when there is none."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        try:
            self._json("DELETE", kind.path(namespace, name), None, options)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    def watch(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        labels: str = "",
        fields: str = "",
        since: str = "",
        limit_s: float | None = None,
    ) -> Iterator[Event]:
        """ADDED, MODIFIED and DELETED, each change once: first of what there is, unless `since` a version.

        Goes on over closed and silent connections and forgotten versions, until `limit_s` seconds are over.
        """
        selectors = _selectors(labels, fields)
        return Watch(
            lambda: self.listed(kind, namespace, labels, fields),
            lambda query, silence_s: self._transport.stream(kind.path(namespace), {**selectors, **query}, silence_s),
            since,
            limit_s,
        ).events()

    def log(
        self,
        namespace: str,
        pod: str,
        *,
        container: str = "main",
        follow: bool = False,
        since_s: int | None = None,
        since: str = "",
        tail: int | None = None,
        limit_bytes: int | None = None,
        timestamps: bool = False,
        patience_s: float | None = None,
    ) -> Iterator[str]:
        """The lines of a container's log; `since` is a moment as timestamps write it.

        Raises Unreachable when a log that is followed brings nothing for minutes: begin again from the last line. With
        `patience_s` it is raised after so long, in which a node may not have answered.
        """
        asked = {
            "container": container,
            "follow": follow,
            "sinceSeconds": since_s,
            "sinceTime": since or None,
            "tailLines": tail,
            "limitBytes": limit_bytes,
            "timestamps": timestamps,
        }
        given = {key: value for key, value in asked.items() if value is not None and value is not False}
        query = {key: "true" if value is True else str(value) for key, value in given.items()}
        query["container"] = container
        lines = Lines()
        path, silence_s = PODS.path(namespace, pod, "log"), patience_s or _LOG_SILENCE_S
        for data in self._transport.stream(path, query, silence_s, patience_s):
            yield from lines.feed(data)
        yield from lines.end()

    def through(self, namespace: str, pod: str, port: int, request: bytes) -> bytes:
        """What a port of a pod answers to a request, whole; it comes to the pod from its own loopback."""
        return self._transport.through(PODS.path(namespace, pod, "portforward"), port, request)

    # --- the server ---------------------------------------------------------------------------------------------------

    def may(self, verb: str, kind: Kind, namespace: str | None = None, *, subresource: str = "") -> bool:
        """Whether the user of this context has a right."""
        asked = {"verb": verb, "group": kind.group, "resource": kind.plural, "subresource": subresource}
        if kind.namespaced and namespace is not None:
            asked["namespace"] = namespace
        review = {
            "apiVersion": ACCESS_REVIEWS.api_version,
            "kind": ACCESS_REVIEWS.kind,
            "spec": {"resourceAttributes": asked},
        }
        return bool(self._json("POST", ACCESS_REVIEWS.path(), None, review)["status"].get("allowed"))

    def served(self, group: str) -> Sequence[str]:
        """The versions the server has of a group, the preferred one first; none when it does not know the group."""
        try:
            found = self._json("GET", f"/apis/{group}")
        except ApiError as error:
            if error.status == 404:
                return []
            raise
        return [version["version"] for version in found["versions"]]

    def server_version(self) -> str:
        """`v1.35.4`."""
        return str(self._json("GET", "/version")["gitVersion"])

    def server_time(self) -> datetime.datetime:
        """The server's clock, to the second."""
        return email.utils.parsedate_to_datetime(self._transport.send("GET", "/version").headers["Date"])

    def ready(self) -> bool:
        """Whether the server calls itself ready."""
        try:
            self._transport.send("GET", "/readyz")
        except ApiError as error:
            if error.status < 500:
                raise
            return False
        return True

    # --- within -------------------------------------------------------------------------------------------------------

    def _namespace_of(self, obj: Object) -> str:
        return str(obj["metadata"].get("namespace") or self.namespace)

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        *,
        content: str = "application/json",
        repeat: bool = True,
    ) -> Object:
        answer = self._transport.send(method, path, query, body, content=content, repeat=repeat)
        try:
            found = json.loads(answer.body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ClusterError(f"{self.server}{path} answers as no API server does.", "is the address right?")
        return found


def _selectors(labels: str, fields: str) -> dict[str, str]:
    return {key: text for key, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}


# --- the kubeconfig ---------------------------------------------------------------------------------------------------


def _kubeconfig() -> str | None:
    """The files that say how to reach a cluster; None in a pod that has none."""
    paths = os.environ.get("KUBECONFIG") or "~/.kube/config"
    if any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep) if path):
        return paths
    if "KUBERNETES_SERVICE_HOST" in os.environ and (_HERE / "token").is_file():
        return None
    raise ClusterError(f"{paths}: no such file, and this is no pod: which cluster is meant?", "KUBECONFIG=FILE")


def _context(wanted: str | None) -> tuple[str, str]:
    """The name of a context and its namespace."""
    paths = _kubeconfig()
    if paths is None:
        return "of this pod", (_HERE / "namespace").read_text().strip()
    name, block = _named(_merged(paths), wanted)
    return name, str(block.get("namespace") or "default")


def _merged(paths: str) -> Any:
    """All files of the kubeconfig as one. Raises ClusterError when one cannot be read."""
    import yaml
    from kubernetes.config import ConfigException
    from kubernetes.config.kube_config import KubeConfigMerger

    try:
        found = KubeConfigMerger(paths).config
    except (ConfigException, yaml.YAMLError, OSError, TypeError, AttributeError, KeyError) as error:
        raise ClusterError(f"{paths} is no kubeconfig: {error}") from None
    if found is None:
        raise ClusterError(f"{paths} is no kubeconfig: it is empty.")
    return found


def _named(merged: Any, wanted: str | None) -> tuple[str, Mapping[str, Any]]:
    """A context by its name, or the current one."""
    contexts = {one["name"]: one.value["context"] for one in merged.value.get("contexts") or []}
    name = wanted or merged.value.get("current-context")
    if name in contexts:
        return name, contexts[name]
    known = f"it has {', '.join(sorted(contexts)) or 'none'}."
    if name:
        raise ClusterError(f"The kubeconfig has no context {name}.", known)
    raise ClusterError("The kubeconfig names no current context.", known)


def _access(wanted: str | None) -> Access:
    """Connections to the server of a context, with the credentials its kubeconfig has now."""
    import kubernetes.client
    from kubernetes.config import ConfigException, load_incluster_config
    from kubernetes.config.kube_config import KubeConfigLoader

    from launcher.transport import Access

    configuration = kubernetes.client.Configuration()
    configuration.connection_pool_maxsize = 64  # logs are followed side by side
    own: dict[str, str] = {}
    paths = _kubeconfig()
    try:
        if paths is None:
            load_incluster_config(configuration)
        else:
            merged = _merged(paths)
            name, block = _named(merged, wanted)
            cluster = _cluster(merged, block)
            own = _settle_user(merged, block, cluster)
            KubeConfigLoader(merged, name, config_base_path=None).load_and_set(configuration)
            if "proxy-url" in cluster:
                configuration.proxy = cluster["proxy-url"]  # some versions of the client do not read it
        pool = kubernetes.client.ApiClient(configuration).rest_client.pool_manager
    except (ConfigException, OSError, ValueError, TypeError) as error:
        raise ClusterError(f"The kubeconfig {paths or ''} cannot be used: {error}") from None

    def headers() -> dict[str, str]:
        held = configuration.auth_settings().values()
        return {str(one["key"]): str(one["value"]) for one in held if one["value"]} | own

    return Access(pool, configuration.host.rstrip("/"), headers)


def _cluster(merged: Any, block: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the kubeconfig says of a context's cluster."""
    found = (one.value.get("cluster") or {} for one in merged.value["clusters"] if one["name"] == block.get("cluster"))
    return next(found, {})


def _settle_user(merged: Any, block: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, str]:
    """Puts a credential plugin's answer into the kubeconfig, and gives the headers of whom the user acts as.

    The official loader runs a plugin without a limit, logs its failure and goes on as nobody; `as:` it does not read.
    """
    user = next((one for one in merged.value["users"] if one["name"] == block.get("user")), None)
    if user is None or not isinstance(told := user.value.get("user"), dict):
        return {}
    if isinstance(asked := told.pop("exec", None), dict) and not {"token", "tokenFile"} & told.keys():
        told.update(credentialplugin.credentials(asked, cluster, Path(user.path).absolute().parent))
    given = {"Impersonate-User": told.get("as"), "Impersonate-Uid": told.get("as-uid")}
    headers = {key: str(value) for key, value in given.items() if value}
    if told.get("as-groups") or told.get("as-user-extra"):
        raise ClusterError("as-groups and as-user-extra of a kubeconfig are not supported.", "use a user of its own.")
    return headers
