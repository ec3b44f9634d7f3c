"""What this pod keeps on its node's disk, against the limits that the job gives: the kubelet evicts a pod beyond one.

Such a pod is told as any other is, by SIGTERM, but it has a second, and no condition of it says whose fault it was.
"""

from __future__ import annotations

import os
import posixpath
import time
from collections.abc import Collection

from jaxlaunch.contract import AgentJob
from jaxlaunch.records.failure import DiskExcess

MEASURE_S = 0.4  # of the second that an evicted pod has


def excess(job: AgentJob, host: int) -> DiskExcess | None:
    """Return the limit that this host exceeds; None where it exceeds none that can be seen.

    Seen are its folders, not its log, and of a folder with very many files only a part.
    """
    end, total = time.monotonic() + MEASURE_S, 0
    scratch = {posixpath.normpath(folder): limit for folder, limit in job.scratch.items()}
    for folder, limit in scratch.items():
        if limit is None and job.ephemeral_bytes is None:
            continue
        used = _used(folder, scratch, end)
        total += used
        if limit is not None and used > limit:
            return DiskExcess(host, used, limit, folder)
    limit = job.ephemeral_bytes
    if limit is None or total <= limit:
        return None
    return DiskExcess(host, total, limit)


def _used(folder: str, scratch: Collection[str], end: float) -> int:
    """Bytes that a folder takes on its own disk, as far as they are counted by `end`, in monotonic seconds; without
    the folders of `scratch` that are mounted in it."""
    total, left = 0, [folder]
    linked: set[int] = set()  # inodes that have several names
    try:
        device = os.stat(folder).st_dev
    except OSError:
        return 0
    while left and time.monotonic() < end:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    if time.monotonic() >= end:
                        return total
                    status = entry.stat(follow_symlinks=False)
                    if status.st_dev != device or entry.path in scratch:
                        continue  # another volume is mounted there
                    is_dir = entry.is_dir(follow_symlinks=False)
                    if status.st_nlink > 1 and not is_dir:
                        if status.st_ino in linked:
                            continue
                        linked.add(status.st_ino)
                    total += 512 * status.st_blocks
                    if is_dir:
                        left.append(entry.path)
        except OSError:
            continue  # removed meanwhile, or not ours to read
    return total
