"""The programs of a job's pods: image, agent, user code and working directory.

An injected agent and shipped code are stored in one immutable ConfigMap, named after the digest of
its contents. A ConfigMap with equal contents is shared by jobs.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import posixpath
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent import pack
from jaxlaunch.launcher.errors import Fault
from jaxlaunch.launcher.job.defaults import Defaults
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER, MANAGED_LABELS

# The folder in which a pod unpacks the shipped code.
CODE_FOLDER = "/code"
# Kubernetes' validation limits all values of a ConfigMap together by MaxSecretSize.
MAX_CONFIG_MAP_BYTES = 1024 * 1024
MOUNT_FOLDER = "/jaxlaunch"
AGENT_FILE, CODE_FILE = "agent.pyz", "code.tar.gz"
# Every installation of CPython has this name. Debian has no `python`.
INTERPRETER = "python3"


@dataclasses.dataclass(frozen=True)
class JobCode:
    """The programs of a job's pods."""

    job: JobSpec
    image: str | None
    # Whether the agent comes from a ConfigMap, because the image does not contain it.
    injects_agent: bool
    # The folder in which the program starts; None for the image's own.
    workdir: str | None


# --- resolve --------------------------------------------------------------------------------------


def resolve_code(job: JobSpec, defaults: Defaults) -> JobCode:
    """Determine the image, the origin of the agent and the working directory."""
    # The image of the cluster defaults and every image for the built-in trainer contain the package
    # jaxlaunch, and thus the agent. An image that a job names for its own command only needs
    # Python, so the agent is injected.
    injects_agent = job.agent == "inject"
    if job.agent == "auto":
        injects_agent = job.command is not None and job.image is not None
    # A workdir that is relative, or is below an absolute `code`, is inside the unpacked code.
    folder, workdir = job.code_folder, job.workdir
    if folder is not None:
        is_below = posixpath.isabs(folder) and PurePosixPath(workdir or "").is_relative_to(folder)
        if workdir is None or not posixpath.isabs(workdir) or is_below:
            relative_workdir = posixpath.relpath(workdir or folder, folder)
            workdir = posixpath.normpath(posixpath.join(CODE_FOLDER, relative_workdir))
    return JobCode(job, job.image or defaults.image, injects_agent, workdir)


# --- faults ---------------------------------------------------------------------------------------


def find_faults(code: JobCode, reserved_names: Collection[str]) -> Iterator[Fault]:
    """Yield the faults of a job's programs.

    Init containers must not have a name in `reserved_names`.
    """
    folder, workdir = code.job.code_folder, code.job.workdir
    is_in_code = PurePosixPath(code.workdir or "").is_relative_to(CODE_FOLDER)
    is_relative = workdir is not None and not workdir.startswith("/")
    if folder is not None and is_relative and not is_in_code:
        message = f"workdir = {workdir} is outside of code = {folder}"
        hint = "give the path in the image, or a folder below the code."
        yield Fault(("workdir",), f"{message}, and only that folder is shipped.", hint)
    if code.image is None:
        message = "image is missing, and the cluster defaults have none."
        yield Fault(("image",), message, "image: registry.example/train:1.4")
    container_names = set(reserved_names)
    for index, container in enumerate(code.job.init):
        name = container.get("name")
        if not isinstance(name, str):
            yield Fault(("init", index), f"init.{index} has no name.", "name: prepare")
        elif name in container_names:
            message = f"init.{index}.name = {name} is taken."
            yield Fault(("init", index, "name"), message, "choose another.")
        else:
            container_names.add(name)


# --- patch ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Bundle:
    """The files of the ConfigMap, at least one."""

    agent: bytes | None = None
    code: bytes | None = None

    @property
    def files(self) -> dict[str, bytes]:
        """The contents by file name."""
        contents = {AGENT_FILE: self.agent, CODE_FILE: self.code}
        return {name: content for name, content in contents.items() if content is not None}

    @property
    def name(self) -> str:
        """The name of the ConfigMap, a digest of its contents."""
        digest = hashlib.sha256()
        for name, content in self.files.items():
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return f"jaxlaunch-{digest.hexdigest()[:12]}"

    def config_map(self, namespace: str | None) -> dict[str, Any]:
        """Return the manifest. It has no labels of a job, because jobs share it."""
        metadata: dict[str, Any] = {"name": self.name, "labels": dict(MANAGED_LABELS)}
        if namespace is not None:
            metadata["namespace"] = namespace
        data = {name: base64.b64encode(content).decode() for name, content in self.files.items()}
        manifest = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        return {**manifest, "immutable": True, "binaryData": data}

    def patch(self) -> dict[str, Any]:
        """Return the patch of the pod template. The agent unpacks the code."""
        main: dict[str, Any] = {"name": MAIN_CONTAINER}
        mounts = [{"name": "jaxlaunch", "mountPath": MOUNT_FOLDER, "readOnly": True}]
        volumes: list[dict[str, Any]] = [{"name": "jaxlaunch", "configMap": {"name": self.name}}]
        if self.agent is not None:
            main["command"] = [INTERPRETER, "-I", f"{MOUNT_FOLDER}/{AGENT_FILE}"]
        if self.code is not None:
            archive = {"name": contract.CODE, "value": f"{MOUNT_FOLDER}/{CODE_FILE}"}
            main["env"] = [archive, {"name": contract.CODE_ROOT, "value": CODE_FOLDER}]
            mounts.append({"name": "code", "mountPath": CODE_FOLDER})
            volumes.append({"name": "code", "emptyDir": {}})
        return {"spec": {"containers": [main | {"volumeMounts": mounts}], "volumes": volumes}}


def build_bundle(
    code: JobCode, base_folder: Path, extra_files: Mapping[str, bytes] | None = None
) -> Bundle | None:
    """Pack the files that the job ships, if any. Its paths are relative to `base_folder`.

    `extra_files` are contents by name that the code has, too. Raises UserError for a folder that
    cannot be packed.
    """
    agent = pack.pack_agent() if code.injects_agent else None
    archive_bytes = None
    if code.job.code_folder is not None:
        # Imported here, since most jobs ship no code.
        from jaxlaunch.launcher.manifests import archive

        limit = MAX_CONFIG_MAP_BYTES - len(agent or b"")
        folder = base_folder / code.job.code_folder
        include = code.job.code_include
        archive_bytes = archive.pack_folder(folder, limit, include, extra_files or {})
    return None if agent is None and archive_bytes is None else Bundle(agent, archive_bytes)


def describe_code(manifests: Iterable[Mapping[str, Any]]) -> str | None:
    """Return a sentence about the code in a job's manifests, or None if it ships none."""
    from jaxlaunch.launcher.manifests import archive

    for manifest in manifests:
        if content := manifest.get("binaryData", {}).get(CODE_FILE):
            return archive.describe_archive(base64.b64decode(content))
    return None
