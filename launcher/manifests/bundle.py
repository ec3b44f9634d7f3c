"""What a job brings beside its image: the agent, the user's code, or both, in one ConfigMap.

Its name is the digest of what it holds and it never changes, so jobs that bring the same share it.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent import pack
from jaxlaunch.launcher.kube.labels import MAIN_CONTAINER, MANAGED
from jaxlaunch.launcher.manifests.resolve import CODE, ResolvedJob

LIMIT = 1024 * 1024  # bytes of all values of a ConfigMap: MaxSecretSize of Kubernetes' validation
MOUNT = "/jaxlaunch"
AGENT_FILE, CODE_FILE = "agent.pyz", "code.tar.gz"
INTERPRETER = "python3"  # every installation of CPython has this name; Debian's has no `python`


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


def of(job: ResolvedJob, base: Path) -> Bundle | None:
    """What the job brings, or None; `base` is what its paths are relative to.

    Raises UserError for a folder that cannot be packed.
    """
    agent = pack.pack() if job.brings_agent else None
    code = None
    if job.spec.code_folder is not None:
        from jaxlaunch.launcher.manifests import archive  # git, tar and gzip: most jobs bring no code

        code = archive.pack(base / job.spec.code_folder, LIMIT - len(agent or b""), job.spec.code_include)
    return None if agent is None and code is None else Bundle(agent, code)


def config_map(bundle: Bundle, namespace: str | None) -> dict[str, Any]:
    """The manifest. Jobs share it, so it has the labels of none of them; each adds itself as an owner."""
    metadata: dict[str, Any] = {"name": bundle.name, "labels": dict(MANAGED)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata | ({} if namespace is None else {"namespace": namespace}),
        "immutable": True,
        "binaryData": {name: base64.b64encode(content).decode() for name, content in bundle.files.items()},
    }


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
        variables = {contract.CODE: f"{MOUNT}/{CODE_FILE}", contract.CODE_ROOT: CODE}
        main["env"] = [{"name": name, "value": value} for name, value in variables.items()]
        mounts.append({"name": "code", "mountPath": CODE})
        volumes.append({"name": "code", "emptyDir": {}})
    return {"spec": {"containers": [main | {"volumeMounts": mounts}], "volumes": volumes}}
