"""What a program would fail of on this host, before it starts: device files that its user cannot open, and pinned
memory for a fast network."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.io import limits

DEV = Path("/dev")
# Limits on pinned memory that nobody chose for a fast network: Linux' own is 64 KiB, since 5.16 8 MiB, and 64 MiB is
# the most that a distribution sets for all containers (gardenlinux, pull request 170).
SMALL = 64 * 1024 * 1024


def fault(job: AgentJob, *, is_pod: bool, dev: Path = DEV) -> str | None:
    """What keeps the job's programs from their devices or their network on this host, with the fix; None: nothing.

    Files are not opened: a VFIO group is open once at a time. Raises this process's limit on pinned memory.
    """
    if job.platform == "tpu":
        limits.allow_pinning()  # libtpu pins what its chips read
        for path in _tpu_files(dev):
            if not os.access(path, os.R_OK | (os.X_OK if path.is_dir() else os.W_OK)):
                return _closed(path, job.accelerator, is_pod)
    if job.pinning is not None:
        most = limits.allow_pinning()
        if most is not None and most <= SMALL:
            return _small(job, most)
    return None


def _tpu_files(dev: Path) -> Iterator[Path]:
    """The files by which libtpu reaches chips: of VFIO, the folder first, or of Google's own driver."""
    vfio = dev / "vfio"
    if vfio.is_dir():
        yield vfio
        yield from sorted(path for path in vfio.iterdir() if re.fullmatch(r"vfio|\d+", path.name))
    yield from sorted(path for path in dev.glob("accel*") if re.fullmatch(r"accel\d+", path.name))


def _closed(path: Path, accelerator: str, is_pod: bool) -> str:
    """JAX itself says only that it found no TPU, or that the chip is in use."""
    found, uid = path.stat(), os.geteuid()
    mode = f"{stat.S_IMODE(found.st_mode):04o}"
    what = f"cannot open {path} as uid {uid}: its owner is uid {found.st_uid}, its mode {mode}"
    if not is_pod:
        return f"{what}; run as that user, or give uid {uid} the file"
    return (
        f"{what}; set users: {{{accelerator}: root}} in the cluster defaults, or "
        "device_ownership_from_security_context = true in the configuration of the nodes' containerd"
    )


def _small(job: AgentJob, most: int) -> str:
    return (
        f"network = {job.pinning} needs memory that programs pin, and this pod may pin {_amount(most)} (ulimit -l); "
        f"set LimitMEMLOCK=infinity in the unit of the nodes' containerd, or users: {{{job.accelerator}: root}} in "
        "the cluster defaults"
    )


def _amount(size: int) -> str:
    return f"{size // 1024**2} MiB" if size >= 1024**2 else f"{size / 1024:g} KiB"
