"""Client of the Kubernetes API server, with plain objects and a time limit for every call.

The official client reads the kubeconfig and keeps the connections. Its models and retries are not
used: its GET has no timeout, its POST is never retried, and its watch does not report how it ended.
"""

from __future__ import annotations

import contextlib
import datetime
import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxlaunch.launcher.errors import ApiError, ClusterError, UnreachableError
from jaxlaunch.launcher.kubernetes import kubeconfig
from jaxlaunch.launcher.kubernetes.kinds import ACCESS_REVIEWS, PODS, Kind
from jaxlaunch.launcher.kubernetes.objects import parse_http_date
from jaxlaunch.launcher.kubernetes.watch import Event, Watch
from jaxlaunch.records.log_lines import LineSplitter

if TYPE_CHECKING:
    from jaxlaunch.launcher.kubernetes.transport import Transport

__all__ = ["ApiError", "Cluster", "UnreachableError", "connect_as_viewer", "ignore_forbidden"]

# Field manager of the fields that jaxlaunch sets.
FIELD_MANAGER = "jaxlaunch"
# A program may be silent for a long time, and a dead connection looks the same.
_LOG_TIMEOUT_S = 300.0
# A token of a list is valid for five minutes, in which a working server sends all pages.
_MAX_LIST_RESTARTS = 3
# A longer line of a log is split. An agent's own lines are far shorter.
_MAX_LINE_BYTES = 1024 * 1024

Object = dict[str, Any]
# An alias, because the method `list` below hides the builtin.
Objects = list[Object]


@contextlib.contextmanager
def ignore_forbidden() -> Iterator[None]:
    """Suppress the API server's error 403 (Forbidden)."""
    try:
        yield
    except ApiError as error:
        if error.status != 403:
            raise


class Cluster:
    """The cluster and namespace of one kubeconfig context.

    Calls raise ApiError if the server rejects a request, UnreachableError if it does not answer.
    """

    def __init__(self, transport: Transport, namespace: str) -> None:
        self._transport = transport
        # Default namespace of the context.
        self.namespace = namespace
        self.context, self.server = transport.name, transport.server

    @classmethod
    def connect(
        cls, context: str | None = None, say: Callable[[str], None] | None = None
    ) -> Cluster:
        """Return the cluster of a context, without sending a request.

        Args:
            context: Name of the context. The default is the current one, or in a pod without a
                kubeconfig the pod's own cluster.
            say: Called with a message if the server does not answer for some seconds.

        Raises:
            ClusterError: If the kubeconfig has no such context or cannot be used, or this Python
                has no module ssl.
        """
        name, namespace = kubeconfig.read_context(context)
        # Together with the client this import takes a quarter of a second.
        from jaxlaunch.launcher.kubernetes.transport import Transport

        return cls(Transport(lambda: kubeconfig.open_access(context), name, say), namespace)

    @property
    def silent_s(self) -> float:
        """Seconds since the server's last answer that was not a server error."""
        return self._transport.silent_s

    def limit_call_time(self, total_s: float = 5.0) -> None:
        """Limit the duration of later calls, after a user has pressed Ctrl-C."""
        self._transport.total_s = total_s

    # --- objects ----------------------------------------------------------------------------------

    def get(self, kind: Kind, name: str, namespace: str | None = None) -> Object | None:
        """Return the object, or None if it does not exist."""
        return self._send_or_none("GET", kind.path(namespace or self.namespace, name))

    def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        limit: int = 500,
        pages: int | None = None,
        trim: Callable[[Object], Object] = lambda obj: obj,
    ) -> Objects:
        """Return at most `pages` pages of `limit` objects, each reduced by `trim`."""
        return self.list_with_version(kind, namespace, labels, fields, limit, pages, trim)[0]

    def list_with_version(
        self,
        kind: Kind,
        namespace: str | None,
        labels: str = "",
        fields: str = "",
        limit: int = 500,
        pages: int | None = None,
        trim: Callable[[Object], Object] = lambda obj: obj,
    ) -> tuple[Objects, str]:
        """Return the objects as `list` does, and the resource version from which to watch them.

        The managedFields, which are half of the bytes, are removed.
        """
        path = kind.path(namespace)
        selectors = {**_selector_query(labels, fields), "limit": str(limit)}
        objects: Objects = []
        query = selectors
        pages_read = restarts = 0
        while True:
            try:
                page = self._send_json("GET", path, query)
            except ApiError as error:
                if error.status != 410 or query is selectors or restarts == _MAX_LIST_RESTARTS:
                    raise
                # The continue token has expired, so the list begins again.
                objects, query, pages_read = [], selectors, 0
                restarts += 1
                continue
            for obj in page.get("items") or []:
                obj["metadata"].pop("managedFields", None)
                objects.append(trim(obj))
            pages_read += 1
            if not (continue_token := page["metadata"].get("continue")) or pages_read == pages:
                return objects, page["metadata"].get("resourceVersion", "")
            query = {**selectors, "continue": continue_token}

    def create(self, kind: Kind, obj: Object, *, dry_run: bool = False) -> Object:
        """Create the object and return it as the server stores it. Unknown fields are rejected.

        The request is retried only if the server did not process it. After any other error the
        object may exist.
        """
        query = _write_query() | ({"dryRun": "All"} if dry_run else {})
        path = kind.path(obj["metadata"].get("namespace") or self.namespace)
        return self._send_json("POST", path, query, obj, is_idempotent=dry_run)

    def apply(self, kind: Kind, obj: Object, manager: str) -> Object:
        """Apply the fields of `obj` on the server. Fields of another manager are a conflict."""
        metadata, content_type = obj["metadata"], "application/apply-patch+yaml"
        path = kind.path(metadata.get("namespace") or self.namespace, metadata["name"])
        query = _write_query(manager)
        return self._send_json("PATCH", path, query, obj, content_type=content_type)

    def merge_patch(self, kind: Kind, name: str, namespace: str, patch: Object) -> Object:
        """Apply a JSON merge patch and return the object."""
        path, content_type = kind.path(namespace, name), "application/merge-patch+json"
        return self._send_json("PATCH", path, _write_query(), patch, content_type=content_type)

    def delete(
        self,
        kind: Kind,
        name: str,
        namespace: str,
        *,
        uid: str | None = None,
        propagation: str = "Background",
    ) -> bool:
        """Start the deletion of an object with this `uid`. Return False if it does not exist."""
        options: Object = {"apiVersion": "v1", "kind": "DeleteOptions"}
        options["propagationPolicy"] = propagation
        if uid is not None:
            options["preconditions"] = {"uid": uid}
        return self._send_or_none("DELETE", kind.path(namespace, name), options) is not None

    def watch(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        labels: str = "",
        fields: str = "",
        since: str = "",
        objects: Iterable[Object] = (),
        limit_s: float | None = None,
    ) -> Generator[Event, None, None]:
        """Yield ADDED, MODIFIED and DELETED events, each change once, for `limit_s` seconds.

        Without a resource version in `since`, all existing objects come first as ADDED. The watch
        continues after lost connections and expired versions. `objects` are those that existed at
        `since`: if it has expired, only the differences to them are yielded.
        """
        selectors = _selector_query(labels, fields)
        return Watch(
            lambda: self.list_with_version(kind, namespace, labels, fields),
            lambda query, silence_s: self._transport.stream(
                kind.path(namespace), {**selectors, **query}, silence_s
            ),
            since,
            objects,
            limit_s,
        ).iter_events()

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
        timeout_s: float | None = None,
    ) -> Generator[str, None, None]:
        """Yield the lines of a container's log; `since` is a time in RFC 3339.

        Lines over 1 MiB come in pieces.

        Raises:
            UnreachableError: If a followed log sends nothing for five minutes, or the node does not
                answer within `timeout_s`. The caller continues from the last line.
        """
        options = {
            "container": container,
            "follow": "true" if follow else None,
            "sinceSeconds": since_s,
            "sinceTime": since or None,
            "tailLines": tail,
            "limitBytes": limit_bytes,
            "timestamps": "true" if timestamps else None,
        }
        query = {key: str(value) for key, value in options.items() if value is not None}
        lines = LineSplitter(_MAX_LINE_BYTES)
        path, silence_s = PODS.path(namespace, pod, "log"), timeout_s or _LOG_TIMEOUT_S
        for data in self._transport.stream(path, query, silence_s, timeout_s):
            yield from (line.decode(errors="replace") for line in lines.feed(data))
        yield from (line.decode(errors="replace") for line in lines.finish())

    def open_websocket(
        self,
        namespace: str,
        pod: str,
        subresource: str,
        query: Sequence[tuple[str, str]],
        protocols: Sequence[str],
    ) -> Any:
        """Open the WebSocket of a pod's subresource, for the functions of `streams`."""
        path = PODS.path(namespace, pod, subresource)
        return self._transport.open_websocket(path, query, protocols)

    # --- the server -------------------------------------------------------------------------------

    def is_allowed(
        self, verb: str, kind: Kind, namespace: str | None = None, *, subresource: str = ""
    ) -> bool:
        """Return whether the user of this context has the permission."""
        attributes = {"verb": verb, "group": kind.group, "resource": kind.plural}
        attributes["subresource"] = subresource
        if kind.namespaced and namespace is not None:
            attributes["namespace"] = namespace
        review: Object = {"apiVersion": ACCESS_REVIEWS.api_version, "kind": ACCESS_REVIEWS.kind}
        review["spec"] = {"resourceAttributes": attributes}
        status = self._send_json("POST", ACCESS_REVIEWS.path(), None, review)["status"]
        return bool(status.get("allowed"))

    def served_versions(self, group: str) -> Sequence[str]:
        """Return the served versions of an API group, the preferred one first, if it is served."""
        answer = self._send_or_none("GET", f"/apis/{group}")
        return [] if answer is None else [version["version"] for version in answer["versions"]]

    def server_version(self) -> str:
        """Return the server's version, such as `v1.35.4`."""
        return str(self._send_json("GET", "/version")["gitVersion"])

    def server_time(self) -> datetime.datetime | None:
        """Return the server's clock, to the second, or None if its answer has no valid date."""
        return parse_http_date(self._transport.send("GET", "/version").headers.get("Date"))

    def current_time(self) -> datetime.datetime:
        """Return the current time, corrected to the server's clock if the two differ much."""
        skew = datetime.timedelta(seconds=self._transport.skew_s)
        return datetime.datetime.now(datetime.UTC) - skew

    def is_ready(self) -> bool:
        """Return whether the server reports at /readyz that it is ready."""
        try:
            self._transport.send("GET", "/readyz")
        except ApiError as error:
            if error.status < 500:
                raise
            return False
        return True

    def _send_or_none(self, method: str, path: str, body: Object | None = None) -> Object | None:
        """Return the answer, or None if the server answers 404."""
        try:
            return self._send_json(method, path, None, body)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def _send_json(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        *,
        content_type: str = "application/json",
        is_idempotent: bool = True,
    ) -> Object:
        response = self._transport.send(
            method, path, query, body, content_type=content_type, is_idempotent=is_idempotent
        )
        with contextlib.suppress(ValueError):
            answer = json.loads(response.body)
            if isinstance(answer, dict):
                return answer
        raise ClusterError(
            f"{self.server}{path}: the answer is not from a Kubernetes API server.",
            "check the server's address in the kubeconfig.",
        )


def connect_as_viewer(token: str, namespace: str) -> Cluster:
    """Return this pod's cluster with a viewer's token. Raises ClusterError outside a pod."""
    from jaxlaunch.launcher.kubernetes.transport import Transport

    transport = Transport(lambda: kubeconfig.open_viewer_access(token), "in-cluster")
    return Cluster(transport, namespace)


def _write_query(manager: str = FIELD_MANAGER) -> dict[str, str]:
    return {"fieldManager": manager, "fieldValidation": "Strict"}


def _selector_query(labels: str, fields: str) -> dict[str, str]:
    return {
        key: text for key, text in (("labelSelector", labels), ("fieldSelector", fields)) if text
    }
