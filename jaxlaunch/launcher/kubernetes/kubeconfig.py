"""The cluster to use and the credentials for it: from kubeconfig files, or in a pod from its service account."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlaunch.launcher.errors import ClusterError
from jaxlaunch.launcher.kubernetes import exec_plugin

if TYPE_CHECKING:
    from jaxlaunch.launcher.kubernetes.transport import Access

_LOCAL = (
    "`launcher run JOB_FILE` trains on this machine without a cluster; `launcher list`, `launcher status NAME` and "
    "`launcher logs NAME` show those runs, from the folder runs/."
)
_REPAIR = f"`kubectl config view` must print it; set KUBECONFIG=FILE to use another one. {_LOCAL}"
_HERE = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # what a pod has
AUTHORITY = _HERE / "ca.crt"  # every namespace has it: kube-root-ca.crt


def is_named() -> bool:
    """Whether there is a kubeconfig, or KUBECONFIG names one: an error in it is no lack of a cluster."""
    return bool(os.environ.get("KUBECONFIG")) or Path("~/.kube/config").expanduser().exists()


def _files() -> str | None:
    """The kubeconfig files, as KUBECONFIG lists them; None in a pod that has none."""
    paths = os.environ.get("KUBECONFIG") or "~/.kube/config"
    if any(Path(path).expanduser().is_file() for path in paths.split(os.pathsep) if path):
        return paths
    if "KUBERNETES_SERVICE_HOST" in os.environ and (_HERE / "token").is_file():
        return None
    is_there = any(Path(path).expanduser().exists() for path in paths.split(os.pathsep) if path)
    what = "is not a file" if is_there else "does not exist"
    raise ClusterError(
        f"There is no kubeconfig: {paths} {what}, and this is not a pod of a cluster.",
        f"to use a cluster, set KUBECONFIG=FILE. {_LOCAL}",
    )


def context(wanted: str | None) -> tuple[str, str]:
    """The name and namespace of a context, by default of the current one. Raises ClusterError when there is none."""
    paths = _files()
    if paths is None:
        return "in-cluster", (_HERE / "namespace").read_text().strip()
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
        why = " ".join(str(error).split())
        raise ClusterError(f"{paths} is not a kubeconfig: {why}.", _REPAIR) from None
    if found is None:
        raise ClusterError(f"{paths} is not a kubeconfig: it is empty.", _REPAIR)
    return found


def _named(merged: Any, wanted: str | None) -> tuple[str, Mapping[str, Any]]:
    """A context by its name, or the current one."""
    contexts = {one["name"]: one.value["context"] for one in merged.value.get("contexts") or []}
    name = wanted or merged.value.get("current-context")
    if name in contexts:
        return name, contexts[name]
    known = f"its contexts are {', '.join(sorted(contexts))}. {_LOCAL}" if contexts else f"it has no contexts. {_LOCAL}"
    if name:
        raise ClusterError(f"The kubeconfig has no context {name}.", known)
    raise ClusterError("The kubeconfig has no current-context, and --context names none.", known)


def access(wanted: str | None) -> Access:
    """Connections to the server of a context, with the credentials that its kubeconfig has now.

    Raises ClusterError when the kubeconfig cannot be used or its credential plugin fails.
    """
    import kubernetes.client
    from kubernetes.config import ConfigException, load_incluster_config
    from kubernetes.config.kube_config import KubeConfigLoader

    from jaxlaunch.launcher.kubernetes.transport import Access

    configuration = kubernetes.client.Configuration()
    configuration.connection_pool_maxsize = 64  # many logs are followed at once
    own: dict[str, str] = {}
    paths = _files()
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
                configuration.proxy = cluster["proxy-url"]  # some versions of the client ignore it
        pool = kubernetes.client.ApiClient(configuration).rest_client.pool_manager
    except (ConfigException, OSError, ValueError, TypeError) as error:
        raise ClusterError(f"The kubeconfig {paths or ''} cannot be used: {error}") from None

    def headers() -> dict[str, str]:
        settings = configuration.auth_settings().values()
        return {str(one["key"]): str(one["value"]) for one in settings if one["value"]} | own

    return Access(pool, configuration.host.rstrip("/"), headers)


def _cluster(merged: Any, block: Mapping[str, Any]) -> Mapping[str, Any]:
    """The `cluster` block of a context."""
    found = (one.value.get("cluster") or {} for one in merged.value["clusters"] if one["name"] == block.get("cluster"))
    return next(found, {})


def _settle_user(merged: Any, block: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, str]:
    """Puts a credential plugin's answer into the kubeconfig, and returns the headers for impersonation (`as:`).

    The official loader runs a plugin without a time limit, logs its failure and goes on without credentials; it
    ignores `as:`.
    """
    found = next((one for one in merged.value["users"] if one["name"] == block.get("user")), None)
    if found is None or not isinstance(user := found.value.get("user"), dict):
        return {}
    if isinstance(plugin := user.pop("exec", None), dict) and not {"token", "tokenFile"} & user.keys():
        user.update(exec_plugin.credentials(plugin, cluster, Path(found.path).absolute().parent))
    if user.get("as-groups") or user.get("as-user-extra"):
        raise ClusterError(
            "The kubeconfig's as-groups and as-user-extra are not supported.", "use credentials of that user's own."
        )
    given = {"Impersonate-User": user.get("as"), "Impersonate-Uid": user.get("as-uid")}
    return {key: str(value) for key, value in given.items() if value}


# --- in a pod, for the token that somebody else brings: never with a token of the pod's own ---------------------------


def server_of_pod() -> str:
    """The server's URL. Raises ClusterError where this is not a pod, or has not the server's certificate authority."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not (host and port and AUTHORITY.is_file()):
        raise ClusterError(
            f"This is not a pod of a cluster: KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set, or"
            f" {AUTHORITY} does not exist.",
            "on your own machine, leave out --in-cluster; in a cluster, install the chart with webDashboard.enabled.",
        )
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


def viewer_access(token: str) -> Access:
    """Connections to the server that carry this token and no other credentials. Raises ClusterError."""
    from jaxlaunch.launcher.kubernetes.transport import Access

    return Access(_pool(), server_of_pod(), lambda: {"Authorization": f"Bearer {token}"})


@functools.cache
def _pool() -> Any:
    """Connections, which know nobody: each request says whose it is."""
    import urllib3  # the launcher's commands are quicker without it

    return urllib3.PoolManager(maxsize=32, ca_certs=str(AUTHORITY))
