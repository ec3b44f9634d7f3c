"""The room for a job's checkpoints, as far as this machine can tell: a folder here, scratch space of a known size."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path, PurePosixPath

from jaxlaunch.launcher.job.types import Bucket, Claim, Ephemeral, Volume
from jaxlaunch.launcher.kubernetes.resources import parse_quantity
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.manifests.jobset import ResolvedJob


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes for checkpoints, those that the folder already holds included; None where that is not known here."""

    folder: str
    bytes: int | None
    says: str


def of(job: ResolvedJob, base: Path) -> Room:
    """The room in the checkpoint folder of a job whose file is in `base`; of `launcher run`'s where it names none."""
    if job.storage.checkpoints is None:
        return _local(str(run_folders.HOME / job.spec.name / "checkpoints"), Path())
    if "://" in job.storage.checkpoints:
        return Room(job.storage.checkpoints, None, "a bucket")
    match volume_of(job):
        case Claim(claim=name):
            return Room(job.storage.checkpoints, None, f"on claim {name}, whose size `launcher doctor` compares")
        case Ephemeral(ephemeral=quantity):
            return Room(job.storage.checkpoints, int(parse_quantity(quantity)), f"of the volume's {quantity}")
        case Bucket():
            return Room(job.storage.checkpoints, None, "a bucket")
    return _local(job.storage.checkpoints, base)


def volume_of(job: ResolvedJob) -> Volume | None:
    """The volume that the checkpoint folder is on: of nested ones the innermost."""
    folder = PurePosixPath(job.storage.checkpoints or "")
    on = [volume for volume in job.storage.volumes if folder.is_relative_to(volume.path)]
    return max(on, key=lambda volume: len(PurePosixPath(volume.path).parts), default=None)


def _local(folder: str, base: Path) -> Room:
    """A folder of this machine, which may not be there yet."""
    path = (base / folder).absolute()
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    return Room(folder, shutil.disk_usage(there).free + _held(path), "free here")


def _held(folder: Path) -> int:
    """Bytes of the checkpoints in a folder: they are deleted as newer ones come."""
    steps = [child for child in folder.glob("[0-9]*") if child.name.isdecimal()] if folder.is_dir() else []
    files = (os.path.join(top, name) for step in steps for top, _, names in os.walk(step) for name in names)
    return sum(os.lstat(file).st_size for file in files)
