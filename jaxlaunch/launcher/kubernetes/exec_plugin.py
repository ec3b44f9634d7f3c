"""The credential plugin of a kubeconfig (`users[].user.exec`), run with a time limit.

https://kubernetes.io/docs/reference/access-authn-authz/authentication/#client-go-credential-plugins
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlaunch.launcher.errors import ClusterError

LIMIT_S = 15.0  # a plugin that needs no login answers within a second
_SHOWN = 300  # characters of its stderr when it fails
_OF_CLUSTER = ("server", "tls-server-name", "insecure-skip-tls-verify", "certificate-authority-data", "proxy-url")


def credentials(plugin: Mapping[str, Any], cluster: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The plugin's answer as a kubeconfig's `user` block: a token, or a certificate and its key.

    `plugin` is the `exec` block, `folder` the kubeconfig's. Raises ClusterError when the plugin is missing, fails,
    takes longer than LIMIT_S or gives no credentials.
    """
    command = [str(plugin.get("command", "")), *map(str, plugin.get("args") or ())]
    try:
        done = subprocess.run(
            command,
            env=_environment(plugin, cluster),
            cwd=folder,
            timeout=LIMIT_S,
            stdin=None if sys.stdin.isatty() else subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _fault(
            command, f"gave no answer within {LIMIT_S:.0f} s", "run it in a terminal: it may wait for a login."
        ) from None
    except OSError as error:
        hint = plugin.get("installHint") or f"install {command[0]}, or put it on PATH."
        raise _fault(command, f"cannot be run: {error.strerror}", str(hint).strip()) from None
    if done.returncode:
        stderr = done.stderr.decode(errors="replace").strip()[-_SHOWN:]
        raise _fault(command, f"ended with exit code {done.returncode}: {stderr}", "log in again.")
    return _user(command, done.stdout)


def _environment(plugin: Mapping[str, Any], cluster: Mapping[str, Any]) -> dict[str, str]:
    spec: dict[str, Any] = {"interactive": sys.stdin.isatty()}
    if plugin.get("provideClusterInfo"):
        about = {key: cluster[key] for key in _OF_CLUSTER if key in cluster}
        for extension in cluster.get("extensions") or ():
            if extension.get("name") == "client.authentication.k8s.io/exec":
                about["config"] = extension.get("extension")
        spec["cluster"] = about
    info = {"apiVersion": plugin.get("apiVersion"), "kind": "ExecCredential", "spec": spec}
    given = {str(one["name"]): str(one["value"]) for one in plugin.get("env") or ()}
    return {**os.environ, **given, "KUBERNETES_EXEC_INFO": json.dumps(info)}


def _user(command: list[str], answer: bytes) -> dict[str, Any]:
    """The credentials in the plugin's answer, which no message shows."""
    try:
        status = json.loads(answer)["status"]
        if token := status.get("token"):
            return {"token": str(token)}
        pair = {"client-certificate-data": "clientCertificateData", "client-key-data": "clientKeyData"}
        return {key: base64.b64encode(status[name].encode()).decode() for key, name in pair.items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise _fault(
            command, "answered without a token or a certificate", "check its apiVersion in the kubeconfig."
        ) from None


def _fault(command: list[str], what: str, hint: str) -> ClusterError:
    return ClusterError(f"The kubeconfig's credential plugin {command[0]} {what}.", hint)
