"""The volumes of a job as pods mount them, and where its checkpoints lie. Pure."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from launcher.profile import CheckpointClaim, CheckpointUrl, Profile
from launcher.schema import Bucket, Claim, ConfigFiles, Ephemeral, JobSpec, SecretFiles

SCRATCH = "/tmp"
SHM = "/dev/shm"
GCS_FUSE = "gcsfuse.csi.storage.gke.io"
RUN_FOLDER = ".jaxlaunch"  # below the checkpoints: what must outlive a pod

Mounted = Claim | Bucket | Ephemeral | SecretFiles | ConfigFiles


def volumes(job: JobSpec, profile: Profile) -> list[Mounted]:
    """The job's volumes, and the profile's where the checkpoints or the compiled programs lie on them."""
    given: list[Mounted] = list(job.volumes)
    kept = profile.checkpoint if isinstance(profile.checkpoint, CheckpointClaim) else None
    for own, used in ((kept, checkpoints(job, profile)), (profile.compile_cache, compile_cache(job, profile))):
        folder = PurePosixPath(used or "")
        if own is not None and folder.is_relative_to(own.path):
            if not any(folder.is_relative_to(volume.path) for volume in given):
                given.append(Claim(claim=own.claim, path=own.path))
    return given


def compile_cache(job: JobSpec, profile: Profile) -> str | None:
    """The folder of XLA's compilation cache, or a URL; None where neither job nor profile names one."""
    if job.train is None:
        return None
    own = profile.compile_cache.path if profile.compile_cache is not None else None
    return job.train.compile_cache if "compile_cache" in job.train.model_fields_set else own


def checkpoints(job: JobSpec, profile: Profile) -> str | None:
    """The folder of the job's checkpoints, or a URL; None where neither job nor profile names one."""
    if job.train is not None and job.train.checkpoint.path is not None:
        return job.train.checkpoint.path
    if profile.checkpoint is None:
        return None
    root = profile.checkpoint.url if isinstance(profile.checkpoint, CheckpointUrl) else profile.checkpoint.path
    return f"{root.rstrip('/')}/{job.name}"


def run_folder(job: JobSpec, profile: Profile) -> str | None:
    """Where agents keep what must outlive a pod; None without a folder that all hosts share."""
    folder = checkpoints(job, profile)
    return None if folder is None or "://" in folder else f"{folder.rstrip('/')}/{RUN_FOLDER}"


def patch(job: JobSpec, profile: Profile) -> dict[str, Any]:
    """The pod template's part of it. The root is read-only, so there is always scratch space."""
    listed: list[dict[str, Any]] = [] if _has_own_scratch(job) else [{"name": "tmp", "emptyDir": {}}]
    if _has_shared_memory(job):
        size = {} if job.resources.shm is None else {"sizeLimit": job.resources.shm}
        listed.append({"name": "shm", "emptyDir": {"medium": "Memory", **size}})
    mounted = volumes(job, profile)
    listed += [{"name": _name(place), **_source(volume, profile)} for place, volume in enumerate(mounted)]
    template: dict[str, Any] = {"spec": {"volumes": listed}}
    if any(isinstance(volume, Bucket) for volume in mounted):
        template["metadata"] = {"annotations": {"gke-gcsfuse/volumes": "true"}}
    return template


def mounts(job: JobSpec, profile: Profile) -> list[dict[str, Any]]:
    """What every container of the pod sees of it."""
    seen: list[dict[str, Any]] = [] if _has_own_scratch(job) else [{"name": "tmp", "mountPath": SCRATCH}]
    if _has_shared_memory(job):
        seen.append({"name": "shm", "mountPath": SHM})
    for place, volume in enumerate(volumes(job, profile)):
        is_read_only = isinstance(volume, SecretFiles | ConfigFiles) or getattr(volume, "read_only", False)
        seen.append({"name": _name(place), "mountPath": volume.path} | ({"readOnly": True} if is_read_only else {}))
    return seen


def _has_own_scratch(job: JobSpec) -> bool:
    return any(PurePosixPath(volume.path) == PurePosixPath(SCRATCH) for volume in job.volumes)


def _has_shared_memory(job: JobSpec) -> bool:
    """GPUs of one host talk through it, and a container alone has 64 MiB."""
    return job.resources.shm is not None or job.accelerator.platform == "cuda"


def _name(place: int) -> str:
    return f"volume-{place}"


def _source(volume: Mounted, profile: Profile) -> dict[str, Any]:
    match volume:
        case Claim():
            source: dict[str, Any] = {"claimName": volume.claim}
            return {"persistentVolumeClaim": source | ({"readOnly": True} if volume.read_only else {})}
        case Bucket():
            return {"csi": _gcs_fuse(volume, profile.user)}
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
