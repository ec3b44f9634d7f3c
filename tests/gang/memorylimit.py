"""A cgroup with a memory limit, for a test that fills it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests import needs

ROOT = Path("/sys/fs/cgroup")
PATIENCE_S = 300


@contextlib.contextmanager
def limit_memory(limit: int) -> Iterator[Sequence[str]]:
    """Yield a command prefix that limits a command and its children to `limit` bytes, or skip."""
    is_unified = (ROOT / "cgroup.controllers").exists()
    folder = (ROOT if is_unified else ROOT / "memory") / f"jaxlaunch-test-{os.getpid()}"
    try:
        if is_unified:
            (ROOT / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
        (folder / ("memory.max" if is_unified else "memory.limit_in_bytes")).write_text(str(limit))
    except OSError as error:
        needs.absent(f"no cgroup can be made here ({error})")
    try:
        yield ["sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "sh"]
    finally:
        remove_cgroup(folder)


def remove_cgroup(folder: Path) -> None:
    """Remove the cgroup once its processes have ended."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            return folder.rmdir()
        except OSError:  # busy until the last one is reaped
            time.sleep(0.05)
    raise AssertionError(f"{folder} is still in use")
