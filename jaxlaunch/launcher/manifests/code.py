"""What runs in a job's pods: the image, the agent, the user's code, and where the program starts.

What travels beside the image is in one ConfigMap: the agent, the code, or both. Its name is the digest of what it holds
and it never changes, so jobs that bring the same share it.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import posixpath
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent import pack
from jaxlaunch.launcher.errors import Fault
from jaxlaunch.launcher.job.defaults import Defaults
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER, MANAGED

CODE = "/code"  # where a pod unpacks the code that a job brings
LIMIT = 1024 * 1024  # bytes of all values of a ConfigMap: MaxSecretSize of Kubernetes' validation
MOUNT = "/jaxlaunch"
AGENT_FILE, CODE_FILE = "agent.pyz", "code.tar.gz"
INTERPRETER = "python3"  # every installation of CPython has this name; Debian's has no `python`


@dataclasses.dataclass(frozen=True)
class JobCode:
    """The programs of a job's pods."""

    job: JobSpec
    image: str | None
    brings_agent: bool  # the agent travels with the job rather than in its image
    workdir: str | None  # where the program starts in a pod; None: where its image says


# --- resolve ----------------------------------------------------------------------------------------------------------


def resolve(job: JobSpec, given: Defaults) -> JobCode:
    """Settle the job's image, else the cluster's, where the agent comes from, and where the program starts."""
    # The built-in trainer needs our package in its image, and the agent with it; the image of the cluster defaults is
    # made to hold it. An image that a job names for a command of its own need not: any image with a Python will do.
    brings_agent = job.agent == "inject"
    if job.agent == "auto":
        brings_agent = job.command is not None and job.image is not None
    # A workdir that is relative, or is below an absolute `code`, is inside the code, unpacked.
    folder, workdir = job.code_folder, job.workdir
    if folder is not None:
        is_below = posixpath.isabs(folder) and PurePosixPath(workdir or "").is_relative_to(folder)
        if workdir is None or not posixpath.isabs(workdir) or is_below:
            workdir = posixpath.normpath(posixpath.join(CODE, posixpath.relpath(workdir or folder, folder)))
    return JobCode(job, job.image or given.image, brings_agent, workdir)


# --- faults -----------------------------------------------------------------------------------------------------------


def faults(code: JobCode, taken: Collection[str]) -> Iterator[Fault]:
    """What the pods could not run; `taken` are the names of containers that an init container may not have."""
    folder, workdir = code.job.code_folder, code.job.workdir
    if folder is not None and workdir is not None and not workdir.startswith("/"):
        if not PurePosixPath(code.workdir or "").is_relative_to(CODE):
            message = f"workdir = {workdir} is outside of code = {folder}, and only that folder is shipped."
            yield Fault(("workdir",), message, "give the path in the image, or a folder below the code.")
    if code.image is None:
        message = "image is missing, and the cluster defaults have none."
        yield Fault(("image",), message, "image: registry.example/train:1.4")
    seen = set(taken)
    for index, container in enumerate(code.job.init):
        name = container.get("name")
        if not isinstance(name, str):
            yield Fault(("init", index), f"init.{index} has no name.", "name: prepare")
        elif name in seen:
            yield Fault(("init", index, "name"), f"init.{index}.name = {name} is taken.", "choose another.")
        else:
            seen.add(name)


# --- patch ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bundle:
    """The files of the ConfigMap; at least one."""

    agent: bytes | None = None
    code: bytes | None = None

    @property
    def files(self) -> dict[str, bytes]:
        """Name → content."""
        given = {AGENT_FILE: self.agent, CODE_FILE: self.code}
        return {name: content for name, content in given.items() if content is not None}

    @property
    def name(self) -> str:
        """Of the ConfigMap: the digest of what it holds."""
        digest = hashlib.sha256()
        for name, content in self.files.items():
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return f"jaxlaunch-{digest.hexdigest()[:12]}"

    def config_map(self, namespace: str | None) -> dict[str, Any]:
        """The manifest. Jobs share it, so it has the labels of none of them; each adds itself as an owner."""
        metadata: dict[str, Any] = {"name": self.name, "labels": dict(MANAGED)}
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": metadata | ({} if namespace is None else {"namespace": namespace}),
            "immutable": True,
            "binaryData": {name: base64.b64encode(content).decode() for name, content in self.files.items()},
        }

    def patch(self) -> dict[str, Any]:
        """The pod template's part of it. No init container: the agent unpacks the code before any process starts."""
        main: dict[str, Any] = {"name": MAIN_CONTAINER}
        mounts = [{"name": "jaxlaunch", "mountPath": MOUNT, "readOnly": True}]
        volumes: list[dict[str, Any]] = [{"name": "jaxlaunch", "configMap": {"name": self.name}}]
        if self.agent is not None:
            main["command"] = [INTERPRETER, "-I", f"{MOUNT}/{AGENT_FILE}"]
        if self.code is not None:
            variables = {contract.CODE: f"{MOUNT}/{CODE_FILE}", contract.CODE_ROOT: CODE}
            main["env"] = [{"name": name, "value": value} for name, value in variables.items()]
            mounts.append({"name": "code", "mountPath": CODE})
            volumes.append({"name": "code", "emptyDir": {}})
        return {"spec": {"containers": [main | {"volumeMounts": mounts}], "volumes": volumes}}


def bundle(code: JobCode, base: Path) -> Bundle | None:
    """What the job brings, or None; `base` is what its paths are relative to.

    Raises UserError for a folder that cannot be packed.
    """
    agent = pack.pack() if code.brings_agent else None
    packed = None
    if code.job.code_folder is not None:
        from jaxlaunch.launcher.manifests import archive  # git, tar and gzip: most jobs bring no code

        packed = archive.pack(base / code.job.code_folder, LIMIT - len(agent or b""), code.job.code_include)
    return None if agent is None and packed is None else Bundle(agent, packed)
