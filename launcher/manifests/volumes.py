"""The volumes of a job as pods mount them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from jaxlaunch.launcher.job.defaults import CacheClaim, Checkpoint, CheckpointUrl
from jaxlaunch.launcher.job.volumes import Bucket, Claim, ConfigFiles, Ephemeral, SecretFiles, Volume
from jaxlaunch.launcher.kube.quantity import amount

SCRATCH = "/tmp"
SHM = "/dev/shm"
GCS_FUSE = "gcsfuse.csi.storage.gke.io"


def mounted(given: Sequence[Volume], *own: tuple[Checkpoint | CacheClaim | None, str | None]) -> tuple[Volume, ...]:
    """The job's volumes, and each of the cluster's `own` claims whose folder the job uses and mounts nothing for."""
    found = list(given)
    for claim, used in own:
        folder = PurePosixPath(used or "")
        if claim is None or isinstance(claim, CheckpointUrl) or not folder.is_relative_to(claim.path):
            continue
        if not any(folder.is_relative_to(volume.path) for volume in found):
            found.append(Claim(claim=claim.claim, path=claim.path))
    return tuple(found)


def patch(volumes: Sequence[Volume], *, has_shared_memory: bool, shm: str | None, user: int) -> dict[str, Any]:
    """The pod template's part of it; `shm` is the size of the shared memory, `user` who owns a bucket's files.

    The root is read-only, so there is always scratch space.
    """
    listed: list[dict[str, Any]] = [] if _has_own_scratch(volumes) else [{"name": "tmp", "emptyDir": {}}]
    if has_shared_memory:
        size = {} if shm is None else {"sizeLimit": shm}
        listed.append({"name": "shm", "emptyDir": {"medium": "Memory", **size}})
    listed += [{"name": _name(place), **_source(volume, user)} for place, volume in enumerate(volumes)]
    template: dict[str, Any] = {"spec": {"volumes": listed}}
    if any(isinstance(volume, Bucket) for volume in volumes):
        template["metadata"] = {"annotations": {"gke-gcsfuse/volumes": "true"}}
    return template


def mounts(volumes: Sequence[Volume], *, has_shared_memory: bool) -> list[dict[str, Any]]:
    """The mounts of these volumes, for every container of the pod."""
    listed: list[dict[str, Any]] = [] if _has_own_scratch(volumes) else [{"name": "tmp", "mountPath": SCRATCH}]
    if has_shared_memory:
        listed.append({"name": "shm", "mountPath": SHM})
    for place, volume in enumerate(volumes):
        is_read_only = isinstance(volume, SecretFiles | ConfigFiles) or getattr(volume, "read_only", False)
        listed.append({"name": _name(place), "mountPath": volume.path} | ({"readOnly": True} if is_read_only else {}))
    return listed


def on_disk(volumes: Sequence[Volume]) -> dict[str, int | None]:
    """The folders of a pod that its node's disk holds, and the limit of each in bytes, where it has one."""
    found: dict[str, int | None] = {} if _has_own_scratch(volumes) else {SCRATCH: None}
    return found | {one.path: int(amount(one.ephemeral)) for one in volumes if isinstance(one, Ephemeral)}


def _has_own_scratch(volumes: Sequence[Volume]) -> bool:
    return any(PurePosixPath(volume.path) == PurePosixPath(SCRATCH) for volume in volumes)


def _name(place: int) -> str:
    return f"volume-{place}"


def _source(volume: Volume, user: int) -> dict[str, Any]:
    match volume:
        case Claim():
            source: dict[str, Any] = {"claimName": volume.claim}
            return {"persistentVolumeClaim": source | ({"readOnly": True} if volume.read_only else {})}
        case Bucket():
            return {"csi": _gcs_fuse(volume, user)}
        case Ephemeral():
            return {"emptyDir": {"sizeLimit": volume.ephemeral}}
        case SecretFiles():
            return {"secret": {"secretName": volume.secret}}
        case ConfigFiles():
            return {"configMap": {"name": volume.configmap}}


def _gcs_fuse(volume: Bucket, user: int) -> dict[str, Any]:
    options = ["implicit-dirs", f"uid={user}", f"gid={user}"]
    if folder := volume.bucket.partition("://")[2].partition("/")[2].strip("/"):
        options.append(f"only-dir={folder}")
    attributes = {"bucketName": volume.name, "mountOptions": ",".join(options)}
    return {"driver": GCS_FUSE, **({"readOnly": True} if volume.read_only else {}), "volumeAttributes": attributes}
