"""Cluster address and credentials from kubeconfig files, or in a pod from its service account."""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlaunch.launcher.errors import ClusterError

if TYPE_CHECKING:
    from jaxlaunch.launcher.kubernetes.transport import Access

_LOCAL_HINT = (
    "`launcher run JOB_FILE` trains on this machine without a cluster; `launcher list`, `launcher "
    "status NAME` and `launcher logs NAME` show those runs, from the folder runs/."
)
_REPAIR_HINT = (
    f"`kubectl config view` must print it; set KUBECONFIG=FILE to use another one. {_LOCAL_HINT}"
)
# Every pod has this folder, and every namespace has the CA certificate (kube-root-ca.crt).
_SERVICE_ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CA_FILE = _SERVICE_ACCOUNT_FOLDER / "ca.crt"


def has_kubeconfig() -> bool:
    """Return whether a kubeconfig exists or KUBECONFIG names one, even if it is invalid."""
    return bool(os.environ.get("KUBECONFIG")) or Path("~/.kube/config").expanduser().exists()


def _require_ssl() -> None:
    """Raise ClusterError if this Python was built without OpenSSL, which every request needs."""
    try:
        import ssl  # noqa: F401
    except ImportError as error:
        raise ClusterError(
            f"The Python at {sys.executable} has no module ssl ({error}), so it cannot connect to "
            "a cluster.",
            f"install jaxlaunch with a Python that was built with OpenSSL. {_LOCAL_HINT}",
        ) from None


def _find_kubeconfig() -> str | None:
    """Return the kubeconfig's paths in the format of KUBECONFIG, or None in a pod without one."""
    setting = os.environ.get("KUBECONFIG") or "~/.kube/config"
    paths = [Path(path).expanduser() for path in setting.split(os.pathsep) if path]
    if any(path.is_file() for path in paths):
        return setting
    if "KUBERNETES_SERVICE_HOST" in os.environ and (_SERVICE_ACCOUNT_FOLDER / "token").is_file():
        return None
    problem = "is not a file" if any(path.exists() for path in paths) else "does not exist"
    raise ClusterError(
        f"There is no kubeconfig: {setting} {problem}, and this is not a pod of a cluster.",
        f"to use a cluster, set KUBECONFIG=FILE. {_LOCAL_HINT}",
    )


def read_context(context_name: str | None) -> tuple[str, str]:
    """Return the name and namespace of a context, by default of the current one.

    Raises ClusterError if it does not exist, or this Python has no module ssl.
    """
    paths = _find_kubeconfig()
    _require_ssl()
    if paths is None:
        return "in-cluster", (_SERVICE_ACCOUNT_FOLDER / "namespace").read_text().strip()
    with _report_malformed(f"{paths} is not a kubeconfig"):
        name, context = _find_context(_merge_files(paths), context_name)
        return name, str(context.get("namespace") or "default")


@contextlib.contextmanager
def _report_malformed(problem: str) -> Iterator[None]:
    """Raise ClusterError, which begins with `problem`, instead of the official client's errors."""
    import yaml
    from kubernetes.config import ConfigException

    malformed = (yaml.YAMLError, OSError, ValueError, TypeError, AttributeError, LookupError)
    try:
        yield
    except (ConfigException, *malformed) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, ConfigException):
            # What follows may be an entry with its credentials.
            reason = reason.partition(" in ")[0]
        message = f"{problem}: {reason.removesuffix('.')}."
        raise ClusterError(message, _REPAIR_HINT) from None


def _merge_files(paths: str) -> Any:
    """Return the merged files of the kubeconfig."""
    from kubernetes.config.kube_config import KubeConfigMerger

    kubeconfig = KubeConfigMerger(paths).config
    if kubeconfig is None:
        raise ClusterError(f"{paths} is not a kubeconfig: it is empty.", _REPAIR_HINT)
    return kubeconfig


def _find_context(kubeconfig: Any, context_name: str | None) -> tuple[str, Mapping[str, Any]]:
    """Return the name and fields of a context, by default of the current one."""
    contexts = {
        entry["name"]: entry.value.get("context") or {}
        for entry in kubeconfig.value.get("contexts") or []
    }
    name = context_name or kubeconfig.value.get("current-context")
    if name in contexts:
        return name, contexts[name]
    choices = (
        f"its contexts are {', '.join(sorted(contexts))}" if contexts else "it has no contexts"
    )
    message = "The kubeconfig has no current-context, and --context names none."
    if name:
        message = f"The kubeconfig has no context {name}."
    raise ClusterError(message, f"{choices}. {_LOCAL_HINT}")


def open_access(context_name: str | None) -> Access:
    """Return connections to a context's server with the kubeconfig's current credentials.

    Raises ClusterError when the kubeconfig cannot be used or its credential plugin fails.
    """
    import kubernetes.client
    from kubernetes.config import load_incluster_config
    from kubernetes.config.kube_config import KubeConfigLoader

    from jaxlaunch.launcher.kubernetes.transport import Access

    configuration = kubernetes.client.Configuration()
    # Many logs are followed at once.
    configuration.connection_pool_maxsize = 64
    impersonation: dict[str, str] = {}
    paths = _find_kubeconfig()
    source = f"kubeconfig {paths}" if paths else f"service account in {_SERVICE_ACCOUNT_FOLDER}"
    with _report_malformed(f"The {source} cannot be used"):
        if paths is None:
            load_incluster_config(configuration)
        else:
            kubeconfig = _merge_files(paths)
            name, context = _find_context(kubeconfig, context_name)
            clusters = {
                entry["name"]: entry.value.get("cluster") for entry in kubeconfig.value["clusters"]
            }
            cluster_name = context.get("cluster")
            cluster = clusters.get(cluster_name) or {}
            if not isinstance(server := cluster.get("server"), str) or not server:
                message = f"{paths}: the cluster of context {name} is {cluster_name or 'missing'}, "
                message += f"and its server {server!r}."
                raise ClusterError(message, "write its server, such as https://10.0.0.1:6443.")
            impersonation = _resolve_user(kubeconfig, context, cluster)
            KubeConfigLoader(kubeconfig, name, config_base_path=None).load_and_set(configuration)
            if "proxy-url" in cluster:
                # Some versions of the official client ignore it.
                configuration.proxy = cluster["proxy-url"]
        pool = kubernetes.client.ApiClient(configuration).rest_client.pool_manager

    def auth_headers() -> dict[str, str]:
        settings = configuration.auth_settings().values()
        headers = {
            str(setting["key"]): str(setting["value"]) for setting in settings if setting["value"]
        }
        return headers | impersonation

    return Access(pool, configuration.host.rstrip("/"), auth_headers)


def _resolve_user(
    kubeconfig: Any, context: Mapping[str, Any], cluster: Mapping[str, Any]
) -> dict[str, str]:
    """Run the user's credential plugin, and return the headers for impersonation (`as:`).

    The official loader runs a plugin without a timeout, logs its failure and continues without
    credentials. It also ignores `as:`.
    """
    entries = (entry for entry in kubeconfig.value["users"] if entry["name"] == context.get("user"))
    entry = next(entries, None)
    if entry is None or not isinstance(user := entry.value.get("user"), dict):
        return {}
    plugin = user.pop("exec", None)
    if isinstance(plugin, dict) and not {"token", "tokenFile"} & user.keys():
        user.update(run_credential_plugin(plugin, cluster, Path(entry.path).absolute().parent))
    if user.get("as-groups") or user.get("as-user-extra"):
        raise ClusterError(
            "The kubeconfig's as-groups and as-user-extra are not supported.",
            "use that user's own credentials.",
        )
    headers = {"Impersonate-User": user.get("as"), "Impersonate-Uid": user.get("as-uid")}
    return {key: str(value) for key, value in headers.items() if value}


# --- credential plugins (`users[].user.exec`) -----------------------------------------------------
#
# https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins

# A plugin answers within a second unless it waits for a login.
PLUGIN_TIMEOUT_S = 15.0
# Characters of its stderr that an error message shows.
_MAX_STDERR_CHARS = 300
_CLUSTER_INFO_KEYS = (
    "server",
    "tls-server-name",
    "insecure-skip-tls-verify",
    "certificate-authority-data",
    "proxy-url",
)


def run_credential_plugin(
    plugin: Mapping[str, Any], cluster: Mapping[str, Any], folder: Path
) -> dict[str, Any]:
    """Run a credential plugin and return its answer as a `user` block of a kubeconfig.

    Args:
        plugin: The `exec` block of the kubeconfig.
        cluster: The `cluster` block of the kubeconfig.
        folder: Folder of the kubeconfig, in which the plugin runs.

    Raises:
        ClusterError: If the plugin is missing, fails, takes too long or returns no credentials. Its
            message never contains the plugin's output, which is secret.
    """
    command = [str(plugin.get("command", "")), *map(str, plugin.get("args") or ())]

    def plugin_error(problem: str, hint: str) -> ClusterError:
        return ClusterError(f"The kubeconfig's credential plugin {command[0]} {problem}.", hint)

    try:
        process = subprocess.run(
            command,
            env=_plugin_environment(plugin, cluster),
            cwd=folder,
            timeout=PLUGIN_TIMEOUT_S,
            stdin=None if sys.stdin.isatty() else subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        hint = "run it in a terminal: it may wait for a login."
        raise plugin_error(f"gave no answer within {PLUGIN_TIMEOUT_S:.0f} s", hint) from None
    except OSError as error:
        hint = plugin.get("installHint") or f"install {command[0]}, or put it on PATH."
        raise plugin_error(f"cannot be run: {error.strerror}", str(hint).strip()) from None
    if process.returncode:
        stderr = process.stderr.decode(errors="replace").strip()[-_MAX_STDERR_CHARS:]
        raise plugin_error(f"ended with exit code {process.returncode}: {stderr}", "log in again.")
    try:
        status = json.loads(process.stdout)["status"]
        if token := status.get("token"):
            return {"token": str(token)}
        pems = {
            "client-certificate-data": status["clientCertificateData"],
            "client-key-data": status["clientKeyData"],
        }
        return {field: base64.b64encode(pem.encode()).decode() for field, pem in pems.items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        hint = "check its apiVersion in the kubeconfig."
        raise plugin_error("answered without a token or a certificate", hint) from None


def _plugin_environment(plugin: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, str]:
    spec: dict[str, Any] = {"interactive": sys.stdin.isatty()}
    if plugin.get("provideClusterInfo"):
        spec["cluster"] = {key: cluster[key] for key in _CLUSTER_INFO_KEYS if key in cluster}
        for extension in cluster.get("extensions") or ():
            if (
                isinstance(extension, dict)
                and extension.get("name") == "client.authentication.k8s.io/exec"
            ):
                spec["cluster"]["config"] = extension.get("extension")
    info = {"apiVersion": plugin.get("apiVersion"), "kind": "ExecCredential", "spec": spec}
    variables = {
        str(variable["name"]): str(variable.get("value") or "")
        for variable in plugin.get("env") or ()
    }
    return {**os.environ, **variables, "KUBERNETES_EXEC_INFO": json.dumps(info)}


# --- access from a pod with the token of a viewer, and never with the pod's own -------------------


def pod_server_url() -> str:
    """Return the URL of this pod's API server. Raises ClusterError outside a pod."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not (host and port and CA_FILE.is_file()):
        raise ClusterError(
            "This is not a pod of a cluster: KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT "
            f"is not set, or {CA_FILE} does not exist.",
            "on your own machine, leave out --in-cluster; in a cluster, install the chart with "
            "webDashboard.enabled.",
        )
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


def open_viewer_access(token: str) -> Access:
    """Return connections with this token and no other credentials. Raises ClusterError."""
    from jaxlaunch.launcher.kubernetes.transport import Access

    return Access(_shared_pool(), pod_server_url(), lambda: {"Authorization": f"Bearer {token}"})


@functools.cache
def _shared_pool() -> Any:
    """Return connections without credentials, which each request adds to its headers."""
    # Imported here, so that commands without a cluster start faster.
    import urllib3

    return urllib3.PoolManager(maxsize=32, ca_certs=str(CA_FILE))
