"""What travels with a job beside its image: the agent, the user's code, or both, in one ConfigMap.

Its name is the digest of what it holds and it never changes, so jobs that bring the same share it.

`agent: auto` decides who brings the agent. The built-in trainer needs our package in its image, so the agent is there
too, of one version with it; the profile's image is the cluster's, made to hold it. An image that a job names for a
command of its own need not hold anything of ours: there the agent travels, and any image with a Python will do.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import posixpath
from pathlib import Path
from typing import Any

from launcher.agent import pack
from launcher.checks import MAIN_CONTAINER
from launcher.schema import JobSpec
from trainer import contract

LIMIT = 1024 * 1024  # bytes of all values of a ConfigMap: MaxSecretSize of Kubernetes' validation
MOUNT, CODE = "/jaxlaunch", "/code"
AGENT_FILE, CODE_FILE = "agent.pyz", "code.tar.gz"
INTERPRETER = "python3"  # every installation of CPython has this name; Debian's has no `python`


@dataclasses.dataclass(frozen=True)
class Bundle:
    """The files of the ConfigMap; at least one."""

    agent: bytes | None = None
    code: bytes | None = None

    @property
    def files(self) -> dict[str, bytes]:
        given = {AGENT_FILE: self.agent, CODE_FILE: self.code}
        return {name: content for name, content in given.items() if content is not None}

    @property
    def name(self) -> str:
        digest = hashlib.sha256()
        for name, content in self.files.items():
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return f"jaxlaunch-{digest.hexdigest()[:12]}"


def of(job: JobSpec, base: Path) -> Bundle | None:
    """What the job brings, or None; `base` is what its paths are relative to. Raises UserError for a folder that cannot
    travel."""
    agent = pack.pack() if injects(job) else None
    code = None
    if job.code is not None:
        from launcher import archive  # git, tar and gzip: most jobs bring no code

        code = archive.pack(base / job.code, LIMIT - len(agent or b""))
    return None if agent is None and code is None else Bundle(agent, code)


def injects(job: JobSpec) -> bool:
    """Whether the agent travels with the job rather than in its image."""
    if job.agent == "auto":
        return job.command is not None and job.image is not None
    return job.agent == "inject"


def config_map(bundle: Bundle, namespace: str | None) -> dict[str, Any]:
    """The manifest. Jobs share it, so it has the labels of none of them; each adds itself as an owner."""
    metadata: dict[str, Any] = {"name": bundle.name, "labels": {"app.kubernetes.io/managed-by": "jaxlaunch"}}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata | ({} if namespace is None else {"namespace": namespace}),
        "immutable": True,
        "binaryData": {name: base64.b64encode(content).decode() for name, content in bundle.files.items()},
    }


def workdir(job: JobSpec) -> str | None:
    """Where the program starts in a pod; None: where its image says. A relative one lies in the code."""
    if job.code is None or (job.workdir is not None and posixpath.isabs(job.workdir)):
        return job.workdir
    return posixpath.normpath(posixpath.join(CODE, posixpath.relpath(job.workdir or job.code, job.code)))


def patch(bundle: Bundle | None) -> dict[str, Any]:
    """The pod template's part of it. No init container: the agent unpacks the code before any process starts."""
    if bundle is None:
        return {}
    main: dict[str, Any] = {"name": MAIN_CONTAINER}
    mounts = [{"name": "jaxlaunch", "mountPath": MOUNT, "readOnly": True}]
    volumes: list[dict[str, Any]] = [{"name": "jaxlaunch", "configMap": {"name": bundle.name}}]
    if bundle.agent is not None:
        main["command"] = [INTERPRETER, f"{MOUNT}/{AGENT_FILE}"]
    if bundle.code is not None:
        told = {contract.CODE: f"{MOUNT}/{CODE_FILE}", contract.CODE_ROOT: CODE}
        main["env"] = [{"name": name, "value": value} for name, value in told.items()]
        mounts.append({"name": "code", "mountPath": CODE})
        volumes.append({"name": "code", "emptyDir": {}})
    return {"spec": {"containers": [main | {"volumeMounts": mounts}], "volumes": volumes}}
