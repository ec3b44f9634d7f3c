"""Storage of a job's pods: volumes, checkpoints, caches and shared memory. Pure."""

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
from jaxlaunch.trainer.spec import AUTO, TrainSpec

SCRATCH = "/tmp"
SHM = "/dev/shm"
GCS_FUSE = "gcsfuse.csi.storage.gke.io"
# The folder below the checkpoints in which agents store what must outlive a pod.
RUN_FOLDER = ".jaxlaunch"

CHECKPOINT_KEY: KeyPath = ("train", "checkpoint", "path")
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
    # Keys of the job whose values come from the cluster defaults → their keys there.
    default_keys: Mapping[KeyPath, KeyPath]

    @property
    def run_folder(self) -> str | None:
        """The folder or URL where agents store what must outlive a pod, or None.

        It is below the checkpoints, or else on the first claim that the pods may write to.
        """
        if self.checkpoints is not None:
            return f"{self.checkpoints.rstrip('/')}/{RUN_FOLDER}"
        claims = (volume for volume in self.volumes if isinstance(volume, Claim))
        path = next((claim.path for claim in claims if not claim.read_only), None)
        return None if path is None else f"{path.rstrip('/')}/{RUN_FOLDER}/{self.job.name}"

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
    default_keys: dict[KeyPath, KeyPath] = {}
    if checkpoints is None and (default := defaults.checkpoint) is not None:
        root = default.url if isinstance(default, CheckpointUrl) else default.path
        checkpoints = f"{root.rstrip('/')}/{job.name}"
        default_keys[CHECKPOINT_KEY] = ("checkpoint",)
    has_cache_key = train is None or "compile_cache" in train.model_fields_set
    if not has_cache_key and defaults.compile_cache is not None:
        cache = defaults.compile_cache.path
        default_keys[_COMPILE_CACHE_KEY] = ("compile_cache",)
    # A claim of the cluster is added if the job uses its folder and mounts nothing there.
    volumes = list(job.volumes)
    for claim, location in ((defaults.checkpoint, checkpoints), (defaults.compile_cache, cache)):
        if claim is None or isinstance(claim, CheckpointUrl):
            continue
        folder = PurePosixPath(location or "")
        is_mounted = any(folder.is_relative_to(volume.path) for volume in volumes)
        if folder.is_relative_to(claim.path) and not is_mounted:
            volumes.append(Claim(claim=claim.claim, path=claim.path))
    needs_shm = job.accelerator.platform in SHM_PLATFORMS.value
    return JobStorage(
        job=job,
        platform=platform,
        volumes=tuple(volumes),
        has_shared_memory=needs_shm or job.resources.shm is not None,
        checkpoints=checkpoints,
        compile_cache=cache,
        default_keys=default_keys,
    )


# --- faults ---------------------------------------------------------------------------------------


def find_faults(storage: JobStorage) -> Iterator[Fault]:
    """Yield faults for volumes that cannot be mounted, and paths that a pod would lose."""
    for index, volume in enumerate(storage.job.volumes):
        if not isinstance(volume, Bucket):
            continue
        scheme = volume.bucket.partition("://")[0]
        if storage.platform != "gke" or scheme != "gs":
            setting = f"volumes.{index}.bucket: {scheme}://"
            message = f"{setting} cannot be mounted on platform = {storage.platform}."
            hint = "mount a claim of a CSI driver for it, or give its URL to the trainer."
            yield Fault(("volumes", index, "bucket"), message, hint)
    if storage.job.train is not None:
        yield from _lost_checkpoint_faults(storage, storage.checkpoints)
        yield from _relative_path_faults(storage.job.train)


def _lost_checkpoint_faults(storage: JobStorage, folder: str | None) -> Iterator[Fault]:
    """Yield faults for checkpoints that would be lost with a pod, or that hosts cannot share."""
    setting = "train.checkpoint.path"
    if folder is None:
        message = f"{setting} is missing, and the cluster defaults have no place for checkpoints."
        hint = "write it, below a volume or as a URL, or give the cluster defaults a "
        yield Fault(CHECKPOINT_KEY, message, f"{hint}checkpoint volume.")
        return
    if not folder.startswith("/"):
        return
    setting, path = f"{setting} = {folder}", CHECKPOINT_KEY
    volume = _find_volume(storage, folder)
    if volume in storage.job.volumes and CHECKPOINT_KEY in storage.default_keys:
        path = ("volumes", storage.job.volumes.index(volume))
    if volume is None:
        message = f"{setting} is on no volume: it would be lost with its pod."
        hint = "mount a claim there: volumes: [{claim: …, path: …}]."
        yield Fault(CHECKPOINT_KEY, message, hint)
    elif isinstance(volume, Ephemeral) and storage.job.pod_count > 1:
        message = f"{setting} is on ephemeral storage, which every host has for itself."
        yield Fault(path, message, "mount a ReadWriteMany claim there.")
    elif isinstance(volume, Claim | Bucket) and volume.read_only:
        yield Fault(path, f"{setting} is on a read-only volume.", "mount it for writing.")


def _find_volume(storage: JobStorage, folder: str) -> Any:
    """Return the innermost volume, or mount of `pod:`, that contains a folder, or None."""
    mounted: list[tuple[Any, Any]] = [(volume.path, volume) for volume in storage.volumes]
    for container in storage.job.pod.get("spec", {}).get("containers", []):
        mounts = container.get("volumeMounts") if container["name"] == MAIN_CONTAINER else None
        for mount in mounts if isinstance(mounts, list) else []:
            mounted.append((mount.get("mountPath") if isinstance(mount, dict) else None, mount))
    is_inside = PurePosixPath(folder).is_relative_to
    pairs = [pair for pair in mounted if isinstance(pair[0], str) and is_inside(pair[0])]
    return max(pairs, key=lambda pair: len(pair[0]), default=(None, None))[1]


def _relative_path_faults(train: TrainSpec) -> Iterator[Fault]:
    for keys, value in train.locations().items():
        path = ("train", *keys)
        for item in value if isinstance(value, list) else [value]:
            if "://" not in item and not item.startswith("/"):
                setting = f"{'.'.join(map(str, path))} = {item}"
                message = f"{setting} is relative to the job file, which a pod does not have."
                hint = "write the path in the pod, below a volume or in the image."
                yield Fault(path, message, hint)


# --- patch ----------------------------------------------------------------------------------------


def patch(storage: JobStorage, *, owner: int) -> dict[str, Any]:
    """Return the patch with the volumes; `owner` is the user that owns files in buckets."""
    volumes: list[dict[str, Any]] = []
    if not storage.has_own_scratch:
        volumes.append({"name": "tmp", "emptyDir": {}})
    if storage.has_shared_memory:
        shm = storage.job.resources.shm
        limit = {} if shm is None else {"sizeLimit": shm}
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", **limit}})
    for index, volume in enumerate(storage.volumes):
        volumes.append({"name": f"volume-{index}", **_volume_source(volume, owner)})
    template: dict[str, Any] = {"spec": {"volumes": volumes}}
    if any(isinstance(volume, Bucket) for volume in storage.volumes):
        template["metadata"] = {"annotations": {"gke-gcsfuse/volumes": "true"}}
    return template


def volume_mounts(storage: JobStorage) -> list[dict[str, Any]]:
    """Return the mounts of the volumes, for every container of the pod."""
    mounts: list[dict[str, Any]] = []
    if not storage.has_own_scratch:
        mounts.append({"name": "tmp", "mountPath": SCRATCH})
    if storage.has_shared_memory:
        mounts.append({"name": "shm", "mountPath": SHM})
    for index, volume in enumerate(storage.volumes):
        mount = {"name": f"volume-{index}", "mountPath": volume.path}
        mounts.append(mount | _read_only(volume))
    return mounts


def _read_only(volume: Volume) -> dict[str, bool]:
    is_read_only = not isinstance(volume, Ephemeral)
    if isinstance(volume, Claim | Bucket):
        is_read_only = volume.read_only
    return {"readOnly": True} if is_read_only else {}


def disk_folders(storage: JobStorage) -> dict[str, int | None]:
    """Return the folders on the node's disk, each with its limit in bytes or None."""
    limits: dict[str, int | None] = {} if storage.has_own_scratch else {SCRATCH: None}
    return limits | {
        volume.path: int(parse_quantity(volume.ephemeral))
        for volume in storage.volumes
        if isinstance(volume, Ephemeral)
    }


def with_resolved_folders(storage: JobStorage, train: TrainSpec) -> TrainSpec:
    """Return the `train` block with the resolved folders."""
    updates: dict[str, Any] = {
        "checkpoint": train.checkpoint.model_copy(update={"path": storage.checkpoints})
    }
    if storage.compile_cache is not None:
        updates["compile_cache"] = storage.compile_cache
    return train.model_copy(update=updates)


def _volume_source(volume: Volume, owner: int) -> dict[str, Any]:
    match volume:
        case Claim():
            return {"persistentVolumeClaim": {"claimName": volume.claim, **_read_only(volume)}}
        case Bucket():
            options = ["implicit-dirs", f"uid={owner}", f"gid={owner}"]
            if folder := volume.bucket.partition("://")[2].partition("/")[2].strip("/"):
                options.append(f"only-dir={folder}")
            attributes = {"bucketName": volume.name, "mountOptions": ",".join(options)}
            driver = {"driver": GCS_FUSE, **_read_only(volume)}
            return {"csi": {**driver, "volumeAttributes": attributes}}
        case Ephemeral():
            return {"emptyDir": {"sizeLimit": volume.ephemeral}}
        case SecretFiles():
            return {"secret": {"secretName": volume.secret}}
        case ConfigFiles():
            return {"configMap": {"name": volume.configmap}}
