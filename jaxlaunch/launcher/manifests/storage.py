"""Storage of a job's pods: volumes, checkpoints, compilation cache, scratch and shared memory. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from jaxlaunch.launcher.errors import Fault, KeyPath
from jaxlaunch.launcher.job.defaults import CheckpointUrl, Defaults
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.job.types import Bucket, Claim, ConfigFiles, Ephemeral, SecretFiles, Volume
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER
from jaxlaunch.launcher.kubernetes.resources import parse_quantity
from jaxlaunch.launcher.platforms.runtime import SHM_PLATFORMS
from jaxlaunch.launcher.platforms.table import Where
from jaxlaunch.trainer.spec import AUTO, Mixture, Text, TrainSpec

SCRATCH = "/tmp"
SHM = "/dev/shm"
GCS_FUSE = "gcsfuse.csi.storage.gke.io"
# The folder, below the checkpoints, for everything that must outlive a pod.
RUN_FOLDER = ".jaxlaunch"

_CHECKPOINTS: KeyPath = ("train", "checkpoint", "path")
_COMPILE_CACHE: KeyPath = ("train", "compile_cache")


@dataclasses.dataclass(frozen=True)
class JobStorage:
    """The volumes of a job and the folders on them. Folders may be URLs."""

    job: JobSpec
    platform: Where
    volumes: tuple[Volume, ...]
    has_shared_memory: bool
    checkpoints: str | None
    compile_cache: str | None
    # Key of the job → key of the cluster defaults that its value comes from.
    filled: Mapping[KeyPath, KeyPath]

    @property
    def run_folder(self) -> str | None:
        """The folder or URL where agents store what must outlive a pod, or None."""
        return None if self.checkpoints is None else f"{self.checkpoints.rstrip('/')}/{RUN_FOLDER}"

    @property
    def has_own_scratch(self) -> bool:
        """Whether the job mounts a volume in place of the default scratch space."""
        return any(PurePosixPath(volume.path) == PurePosixPath(SCRATCH) for volume in self.volumes)


# --- resolve ----------------------------------------------------------------------------------------------------------


def resolve(job: JobSpec, given: Defaults, where: Where) -> JobStorage:
    """Combine the job's volumes and folders with those of the cluster that it uses.

    Only the built-in trainer has a compilation cache.
    """
    train = job.train
    checkpoints = None if train is None else train.checkpoint.path
    cache = None if train is None or train.compile_cache == AUTO else train.compile_cache
    filled: dict[KeyPath, KeyPath] = {}
    if checkpoints is None and given.checkpoint is not None:
        root = given.checkpoint.url if isinstance(given.checkpoint, CheckpointUrl) else given.checkpoint.path
        checkpoints, filled[_CHECKPOINTS] = f"{root.rstrip('/')}/{job.name}", ("checkpoint",)
    if train is not None and "compile_cache" not in train.model_fields_set and given.compile_cache is not None:
        cache, filled[_COMPILE_CACHE] = given.compile_cache.path, ("compile_cache",)
    # A claim of the cluster is added if the job uses its folder and mounts nothing there.
    volumes = list(job.volumes)
    for claim, used in ((given.checkpoint, checkpoints), (given.compile_cache, cache)):
        folder = PurePosixPath(used or "")
        if claim is None or isinstance(claim, CheckpointUrl) or not folder.is_relative_to(claim.path):
            continue
        if not any(folder.is_relative_to(volume.path) for volume in volumes):
            volumes.append(Claim(claim=claim.claim, path=claim.path))
    return JobStorage(
        job=job,
        platform=where,
        volumes=tuple(volumes),
        has_shared_memory=job.resources.shm is not None or job.accelerator.platform in SHM_PLATFORMS.value,
        checkpoints=checkpoints,
        compile_cache=cache,
        filled=filled,
    )


# --- faults -----------------------------------------------------------------------------------------------------------


def faults(storage: JobStorage) -> Iterator[Fault]:
    """Yield faults for volumes that cannot be mounted, and for paths that would be lost or missing in a pod."""
    for index, volume in enumerate(storage.job.volumes):
        if isinstance(volume, Bucket) and not (storage.platform == "gke" and volume.bucket.startswith("gs://")):
            scheme = volume.bucket.partition("://")[0]
            message = f"volumes.{index}.bucket: {scheme}:// cannot be mounted on platform = {storage.platform}."
            hint = "mount a claim of a CSI driver for it, or give its URL to the trainer."
            yield Fault(("volumes", index, "bucket"), message, hint)
    if storage.job.train is not None:
        yield from _lost_checkpoints(storage, storage.checkpoints)
        yield from _relative_paths(storage.job.train)


def _lost_checkpoints(storage: JobStorage, folder: str | None) -> Iterator[Fault]:
    """Check that checkpoints outlive their pod and are visible to every host."""
    if folder is None:
        message = "train.checkpoint.path is missing, and the cluster defaults have no place for checkpoints."
        hint = "write it, below a volume or as a URL, or give the cluster defaults a checkpoint volume."
        yield Fault(_CHECKPOINTS, message, hint)
    elif folder.startswith("/"):
        holder = _holder(storage, folder)
        own = next((index for index, volume in enumerate(storage.job.volumes) if volume is holder), None)
        at: KeyPath = ("volumes", own) if own is not None and _CHECKPOINTS in storage.filled else _CHECKPOINTS
        if holder is None:
            message = f"train.checkpoint.path = {folder} is on no volume: it would be lost with its pod."
            yield Fault(_CHECKPOINTS, message, "mount a claim there: volumes: [{claim: …, path: …}].")
        elif isinstance(holder, Ephemeral) and storage.job.pod_count > 1:
            message = f"train.checkpoint.path = {folder} is on ephemeral storage, which every host has for itself."
            yield Fault(at, message, "mount a ReadWriteMany claim there.")
        elif isinstance(holder, Claim | Bucket) and holder.read_only:
            yield Fault(at, f"train.checkpoint.path = {folder} is on a read-only volume.", "mount it for writing.")


def _holder(storage: JobStorage, folder: str) -> Any:
    """Return the innermost volume that contains a folder, or the mount of `pod:` that does."""
    mounted: list[tuple[Any, Any]] = [(volume.path, volume) for volume in storage.volumes]
    for container in storage.job.pod.get("spec", {}).get("containers", []):
        mounts = container.get("volumeMounts") if container["name"] == MAIN_CONTAINER else None
        for mount in mounts if isinstance(mounts, list) else []:
            mounted.append((mount.get("mountPath") if isinstance(mount, dict) else None, mount))
    found = [
        (len(place), holder)
        for place, holder in mounted
        if isinstance(place, str) and PurePosixPath(folder).is_relative_to(place)
    ]
    return max(found, key=lambda pair: pair[0])[1] if found else None


def _relative_paths(train: TrainSpec) -> Iterator[Fault]:
    named: dict[KeyPath, Any] = {
        ("train", "data", key): getattr(train.data, key, None) for key in ("path", "eval_path", "data_dir")
    }
    if isinstance(train.data, Mixture):
        for name, part in train.data.parts.items():
            named |= {("train", "data", "parts", name, key): getattr(part, key) for key in ("path", "eval_path")}
    if isinstance(train.data, Text | Mixture) and train.data.tokenizer != "bytes":
        named[("train", "data", "tokenizer")] = train.data.tokenizer
    named[_CHECKPOINTS] = train.checkpoint.path
    named[_COMPILE_CACHE] = None if train.compile_cache == AUTO else train.compile_cache
    for block in ("model", "lora"):
        named[("train", block, "init_from")] = getattr(getattr(train, block), "init_from", None)
    for path, value in named.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None and "://" not in one and not one.startswith("/"):
                message = f"{'.'.join(map(str, path))} = {one} is relative to the job file, which a pod does not have."
                yield Fault(path, message, "write the path in the pod, below a volume or in the image.")


# --- patch ------------------------------------------------------------------------------------------------------------


def patch(storage: JobStorage, *, owner: int) -> dict[str, Any]:
    """Return the patch of the pod template with the volumes; `owner` is the user of files in buckets."""
    listed: list[dict[str, Any]] = [] if storage.has_own_scratch else [{"name": "tmp", "emptyDir": {}}]
    if storage.has_shared_memory:
        shm = storage.job.resources.shm
        listed.append({"name": "shm", "emptyDir": {"medium": "Memory"} | ({} if shm is None else {"sizeLimit": shm})})
    listed += [{"name": _name(place), **_source(volume, owner)} for place, volume in enumerate(storage.volumes)]
    template: dict[str, Any] = {"spec": {"volumes": listed}}
    if any(isinstance(volume, Bucket) for volume in storage.volumes):
        template["metadata"] = {"annotations": {"gke-gcsfuse/volumes": "true"}}
    return template


def mounts(storage: JobStorage) -> list[dict[str, Any]]:
    """Return the mounts of the volumes, for every container of the pod."""
    listed: list[dict[str, Any]] = [] if storage.has_own_scratch else [{"name": "tmp", "mountPath": SCRATCH}]
    if storage.has_shared_memory:
        listed.append({"name": "shm", "mountPath": SHM})
    for place, volume in enumerate(storage.volumes):
        is_read_only = volume.read_only if isinstance(volume, Claim | Bucket) else not isinstance(volume, Ephemeral)
        listed.append({"name": _name(place), "mountPath": volume.path} | ({"readOnly": True} if is_read_only else {}))
    return listed


def on_disk(storage: JobStorage) -> dict[str, int | None]:
    """Return the folders of a pod that are on its node's disk, with the limit of each in bytes, if any."""
    found: dict[str, int | None] = {} if storage.has_own_scratch else {SCRATCH: None}
    return found | {
        volume.path: int(parse_quantity(volume.ephemeral))
        for volume in storage.volumes
        if isinstance(volume, Ephemeral)
    }


def trained(storage: JobStorage, train: TrainSpec) -> TrainSpec:
    """Return the `train` block with the resolved folders."""
    settled: dict[str, Any] = {"checkpoint": train.checkpoint.model_copy(update={"path": storage.checkpoints})}
    if storage.compile_cache is not None:
        settled["compile_cache"] = storage.compile_cache
    return train.model_copy(update=settled)


def _name(place: int) -> str:
    return f"volume-{place}"


def _source(volume: Volume, owner: int) -> dict[str, Any]:
    match volume:
        case Claim():
            source: dict[str, Any] = {"claimName": volume.claim}
            return {"persistentVolumeClaim": source | ({"readOnly": True} if volume.read_only else {})}
        case Bucket():
            options = ["implicit-dirs", f"uid={owner}", f"gid={owner}"]
            if folder := volume.bucket.partition("://")[2].partition("/")[2].strip("/"):
                options.append(f"only-dir={folder}")
            attributes = {"bucketName": volume.name, "mountOptions": ",".join(options)}
            is_read_only = {"readOnly": True} if volume.read_only else {}
            return {"csi": {"driver": GCS_FUSE, **is_read_only, "volumeAttributes": attributes}}
        case Ephemeral():
            return {"emptyDir": {"sizeLimit": volume.ephemeral}}
        case SecretFiles():
            return {"secret": {"secretName": volume.secret}}
        case ConfigFiles():
            return {"configMap": {"name": volume.configmap}}
