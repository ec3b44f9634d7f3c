"""The Secret of `gang_secret: true`: random bytes by which the agents of a gang know each other.

Its name is in the JobSet; it is made by `launcher submit`, and by whoever applies what `launcher render` prints.
"""

from __future__ import annotations

import base64
import secrets
from collections.abc import Mapping
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.kube.labels import MAIN_CONTAINER

KEY = "key"  # of the Secret's data
BYTES = 32
_VOLUME, _MOUNT = "gang-secret", "/jaxlaunch-gang"


def patch(name: str) -> dict[str, Any]:
    """The pod template's part of it, for the job of this name."""
    main = {
        "name": MAIN_CONTAINER,
        "env": [{"name": contract.GANG_SECRET, "value": f"{_MOUNT}/{KEY}"}],
        "volumeMounts": [{"name": _VOLUME, "mountPath": _MOUNT, "readOnly": True}],
    }
    return {"spec": {"containers": [main], "volumes": [{"name": _VOLUME, "secret": {"secretName": _name(name)}}]}}


def made(jobset: Mapping[str, Any]) -> dict[str, Any]:
    """The Secret of a JobSet with such a gang, with bytes that no other has."""
    metadata = {key: value for key, value in jobset["metadata"].items() if key in ("namespace", "labels")}
    data = {KEY: base64.b64encode(secrets.token_bytes(BYTES)).decode()}
    named = {**metadata, "name": _name(jobset["metadata"]["name"])}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": named, "type": "Opaque", "data": data}


def instruction(name: str) -> str:
    """What a person has to make who applies the manifests of the job of this name without `launcher submit`."""
    given = f"kubectl create secret generic {_name(name)} --from-file={KEY}=/dev/stdin"
    return f"the pods wait for Secret {_name(name)}, which is not printed: `openssl rand {BYTES} | {given}`"


def _name(job: str) -> str:
    return f"{job}-gang"
