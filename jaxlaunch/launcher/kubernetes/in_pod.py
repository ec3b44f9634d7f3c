"""The API server as a pod finds it, for the token that somebody else brings: never with a token of the pod's own."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxlaunch.launcher.errors import ClusterError

if TYPE_CHECKING:
    from jaxlaunch.launcher.kubernetes.transport import Access

AUTHORITY = Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")  # every namespace has it: kube-root-ca.crt


def server() -> str:
    """The server's URL. Raises ClusterError where this is not a pod, or has not the server's certificate authority."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{part}", "") for part in ("HOST", "PORT"))
    if not (host and port and AUTHORITY.is_file()):
        raise ClusterError(
            f"This is not a pod of a cluster: KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set, or"
            f" {AUTHORITY} does not exist.",
            "on your own machine, leave out --in-cluster; in a cluster, install the chart with webDashboard.enabled.",
        )
    return f"https://{f'[{host}]' if ':' in host else host}:{port}"


def access(token: str) -> Access:
    """Connections to the server that carry this token and no other credentials. Raises ClusterError."""
    from jaxlaunch.launcher.kubernetes.transport import Access

    return Access(_pool(), server(), lambda: {"Authorization": f"Bearer {token}"})


@functools.cache
def _pool() -> Any:
    """Connections, which know nobody: each request says whose it is."""
    import urllib3  # the launcher's commands are quicker without it

    return urllib3.PoolManager(maxsize=32, ca_certs=str(AUTHORITY))
