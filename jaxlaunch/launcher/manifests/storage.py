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
from jaxlaunch.launcher.platforms.table import PlatformName
from jaxlaunch.trainer.spec import AUTO, Mixture, Text, TrainSpec

SCRATCH = "/tmp"
SHM = "/dev/shm"
GCS_FUSE = "gcsfuse.csi.storage.gke.io"
# The folder, below the checkpoints, for everything that must outlive a pod.
RUN_FOLDER = ".jaxlaunch"

_CHECKPOINT_KEY: KeyPath = ("train", "checkpoint", "path")
_COMPILE_CACHE_KEY: KeyPath = ("train", "compile_cache")


@dataclasses.dataclass(frozen=True)
class JobStorage:
    """The volumes of a job and the folders on them. Folders may be URLs."""

    job: JobSpec
    platform: PlatformName
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
        """Return whether the job mounts a volume in place of the default scratch space."""
        return any(PurePosixPath(volume.path) == PurePosixPath(SCRATCH) for volume in self.volumes)


# --- resolve --------------------------------------------------------------------------------------


def resolve(job: JobSpec, defaults: Defaults, platform: PlatformName) -> JobStorage:
    """Combine the job's volumes and folders with those of the cluster that it uses.

    Only the built-in trainer has a compilation cache.
    """
    train = job.train
    checkpoints = None if train is None else train.checkpoint.path
    cache = None if train is None or train.compile_cache == AUTO else train.compile_cache
    filled: dict[KeyPath, KeyPath] = {}
    if checkpoints is None and defaults.checkpoint is not None:
        root = (
            defaults.checkpoint.url
            if isinstance(defaults.checkpoint, CheckpointUrl)
            else defaults.checkpoint.path
        )
        checkpoints, filled[_CHECKPOINT_KEY] = f"{root.rstrip('/')}/{job.name}", ("checkpoint",)
    if (
        train is not None
        and "compile_cache" not in train.model_fields_set
        and defaults.compile_cache is not None
    ):
        cache, filled[_COMPILE_CACHE_KEY] = defaults.compile_cache.path, ("compile_cache",)
    # A claim of the cluster is added if the job uses its folder and mounts nothing there.
    volumes = list(job.volumes)
    for claim, used_folder in ((defaults.checkpoint, checkpoints), (defaults.compile_cache, cache)):
        folder = PurePosixPath(used_folder or "")
        if (
            claim is None
            or isinstance(claim, CheckpointUrl)
            or not folder.is_relative_to(claim.path)
        ):
            continue
        if not any(folder.is_relative_to(volume.path) for volume in volumes):
            volumes.append(Claim(claim=claim.claim, path=claim.path))
    return JobStorage(
        job=job,
        platform=platform,
        volumes=tuple(volumes),
        has_shared_memory=job.resources.shm is not None
        or job.accelerator.platform in SHM_PLATFORMS.value,
        checkpoints=checkpoints,
        compile_cache=cache,
        filled=filled,
    )


# --- faults ---------------------------------------------------------------------------------------


def find_faults(storage: JobStorage) -> Iterator[Fault]:
    """Yield faults for volumes that cannot be mounted, and for paths that would be lost or missing in a pod."""
    for index, volume in enumerate(storage.job.volumes):
        if isinstance(volume, Bucket) and not (
            storage.platform == "gke" and volume.bucket.startswith("gs://")
        ):
            scheme = volume.bucket.partition("://")[0]
            message = (
                f"volumes.{index}.bucket: {scheme}:// cannot be mounted on platform = "
                f"{storage.platform}."
            )
            hint = "mount a claim of a CSI driver for it, or give its URL to the trainer."
            yield Fault(("volumes", index, "bucket"), message, hint)
    if storage.job.train is not None:
        yield from _lost_checkpoint_faults(storage, storage.checkpoints)
        yield from _relative_path_faults(storage.job.train)


def _lost_checkpoint_faults(storage: JobStorage, folder: str | None) -> Iterator[Fault]:
    """Check that checkpoints outlive their pod and are visible to every host."""
    if folder is None:
        message = (
            "train.checkpoint.path is missing, and the cluster defaults have no place for "
            "checkpoints."
        )
        hint = (
            "write it, below a volume or as a URL, or give the cluster defaults a "
            "checkpoint volume."
        )
        yield Fault(_CHECKPOINT_KEY, message, hint)
    elif folder.startswith("/"):
        holder = _find_holder(storage, folder)
        volume_index = next(
            (index for index, volume in enumerate(storage.job.volumes) if volume is holder), None
        )
        path: KeyPath = (
            ("volumes", volume_index)
            if volume_index is not None and _CHECKPOINT_KEY in storage.filled
            else _CHECKPOINT_KEY
        )
        if holder is None:
            message = (
                f"train.checkpoint.path = {folder} is on no volume: it would be lost with its pod."
            )
            yield Fault(
                _CHECKPOINT_KEY, message, "mount a claim there: volumes: [{claim: …, path: …}]."
            )
        elif isinstance(holder, Ephemeral) and storage.job.pod_count > 1:
            message = (
                f"train.checkpoint.path = {folder} is on ephemeral storage, which every host "
                "has for itself."
            )
            yield Fault(path, message, "mount a ReadWriteMany claim there.")
        elif isinstance(holder, Claim | Bucket) and holder.read_only:
            yield Fault(
                path,
                f"train.checkpoint.path = {folder} is on a read-only volume.",
                "mount it for writing.",
            )


def _find_holder(storage: JobStorage, folder: str) -> Any:
    """Return the innermost volume that contains a folder, or the mount of `pod:` that does."""
    mounted: list[tuple[Any, Any]] = [(volume.path, volume) for volume in storage.volumes]
    for container in storage.job.pod.get("spec", {}).get("containers", []):
        mounts = container.get("volumeMounts") if container["name"] == MAIN_CONTAINER else None
        for mount in mounts if isinstance(mounts, list) else []:
            mounted.append((mount.get("mountPath") if isinstance(mount, dict) else None, mount))
    candidates = [
        (len(place), holder)
        for place, holder in mounted
        if isinstance(place, str) and PurePosixPath(folder).is_relative_to(place)
    ]
    return max(candidates, key=lambda pair: pair[0])[1] if candidates else None


def _relative_path_faults(train: TrainSpec) -> Iterator[Fault]:
    values_of_path: dict[KeyPath, Any] = {
        ("train", "data", key): getattr(train.data, key, None)
        for key in ("path", "eval_path", "data_dir")
    }
    if isinstance(train.data, Mixture):
        for name, part in train.data.parts.items():
            values_of_path |= {
                ("train", "data", "parts", name, key): getattr(part, key)
                for key in ("path", "eval_path")
            }
    if isinstance(train.data, Text | Mixture) and train.data.tokenizer != "bytes":
        values_of_path[("train", "data", "tokenizer")] = train.data.tokenizer
    values_of_path[_CHECKPOINT_KEY] = train.checkpoint.path
    values_of_path[_COMPILE_CACHE_KEY] = (
        None if train.compile_cache == AUTO else train.compile_cache
    )
    for block in ("model", "lora"):
        values_of_path[("train", block, "init_from")] = getattr(
            getattr(train, block), "init_from", None
        )
    for path, value in values_of_path.items():
        for item in value if isinstance(value, list) else [value]:
            if item is not None and "://" not in item and not item.startswith("/"):
                message = (
                    f"{'.'.join(map(str, path))} = {item} is relative to the job file, which "
                    "a pod does not have."
                )
                yield Fault(
                    path, message, "write the path in the pod, below a volume or in the image."
                )


# --- patch ----------------------------------------------------------------------------------------


def patch(storage: JobStorage, *, owner: int) -> dict[str, Any]:
    """Return the patch of the pod template with the volumes; `owner` is the user of files in buckets."""
    volumes: list[dict[str, Any]] = (
        [] if storage.has_own_scratch else [{"name": "tmp", "emptyDir": {}}]
    )
    if storage.has_shared_memory:
        shm = storage.job.resources.shm
        volumes.append(
            {
                "name": "shm",
                "emptyDir": {"medium": "Memory"} | ({} if shm is None else {"sizeLimit": shm}),
            }
        )
    volumes += [
        {"name": _volume_name(place), **_volume_source(volume, owner)}
        for place, volume in enumerate(storage.volumes)
    ]
    template: dict[str, Any] = {"spec": {"volumes": volumes}}
    if any(isinstance(volume, Bucket) for volume in storage.volumes):
        template["metadata"] = {"annotations": {"gke-gcsfuse/volumes": "true"}}
    return template


def volume_mounts(storage: JobStorage) -> list[dict[str, Any]]:
    """Return the mounts of the volumes, for every container of the pod."""
    volume_mounts: list[dict[str, Any]] = (
        [] if storage.has_own_scratch else [{"name": "tmp", "mountPath": SCRATCH}]
    )
    if storage.has_shared_memory:
        volume_mounts.append({"name": "shm", "mountPath": SHM})
    for place, volume in enumerate(storage.volumes):
        is_read_only = (
            volume.read_only
            if isinstance(volume, Claim | Bucket)
            else not isinstance(volume, Ephemeral)
        )
        volume_mounts.append(
            {"name": _volume_name(place), "mountPath": volume.path}
            | ({"readOnly": True} if is_read_only else {})
        )
    return volume_mounts


def disk_folders(storage: JobStorage) -> dict[str, int | None]:
    """Return the folders of a pod that are on its node's disk, with the limit of each in bytes, if any."""
    limits: dict[str, int | None] = {} if storage.has_own_scratch else {SCRATCH: None}
    return limits | {
        volume.path: int(parse_quantity(volume.ephemeral))
        for volume in storage.volumes
        if isinstance(volume, Ephemeral)
    }


def with_settled_folders(storage: JobStorage, train: TrainSpec) -> TrainSpec:
    """Return the `train` block with the resolved folders."""
    updates: dict[str, Any] = {
        "checkpoint": train.checkpoint.model_copy(update={"path": storage.checkpoints})
    }
    if storage.compile_cache is not None:
        updates["compile_cache"] = storage.compile_cache
    return train.model_copy(update=updates)


def _volume_name(place: int) -> str:
    return f"volume-{place}"


def _volume_source(volume: Volume, owner: int) -> dict[str, Any]:
    match volume:
        case Claim():
            source: dict[str, Any] = {"claimName": volume.claim}
            return {
                "persistentVolumeClaim": source | ({"readOnly": True} if volume.read_only else {})
            }
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
