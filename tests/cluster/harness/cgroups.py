"""The cgroup of all pods, in every hierarchy of the machine (one with cgroup v2)."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tests.cluster.harness.places import CGROUP

ROOT = Path("/sys/fs/cgroup")
# By default all pods together weigh as much as one single process of the host. Four times that:
# they make progress, and so do the tests that run at the same time.
SHARES = 4096
WEIGHT = 400  # the same, in cgroup v2's measure
CONTROLLERS = {"cpu", "cpuset", "io", "memory", "pids"}  # of cgroup v2, which the kubelet uses


def is_unified() -> bool:
    return (ROOT / "cgroup.controllers").exists()


def find_hierarchies() -> list[Path]:
    return [ROOT] if is_unified() else [folder for folder in ROOT.iterdir() if folder.is_dir()]


def make_cgroups() -> None:
    if is_unified():
        for controller in CONTROLLERS.intersection(
            (ROOT / "cgroup.controllers").read_text().split()
        ):
            (ROOT / "cgroup.subtree_control").write_text(f"+{controller}")
    for hierarchy in find_hierarchies():
        (hierarchy / CGROUP).mkdir(exist_ok=True)
        # A v1 cpuset starts empty, and no process can be put into an empty one.
        for name in ("cpuset.cpus", "cpuset.mems") if not is_unified() else ():
            if (hierarchy / name).exists():
                (hierarchy / CGROUP / name).write_text((hierarchy / name).read_text())
        for name, value in (("cpu.shares", SHARES), ("cpu.weight", WEIGHT)):
            if (hierarchy / CGROUP / name).exists():
                (hierarchy / CGROUP / name).write_text(str(value))


def cgroup_folders() -> Iterator[Path]:
    """Yield the harness's cgroups, the deepest first."""
    for hierarchy in find_hierarchies():
        for folder, _, _ in os.walk(hierarchy / CGROUP, topdown=False):
            yield Path(folder)


def member_pids() -> set[int]:
    pids: set[int] = set()
    for folder in cgroup_folders():
        with suppress(OSError):
            pids.update(map(int, (folder / "cgroup.procs").read_text().split()))
    return pids


def remove_cgroups(timeout_s: float = 10) -> None:
    """Kill what is left in the cgroups and remove them. Raises RuntimeError if one stays."""
    deadline = time.monotonic() + timeout_s
    while remaining := list(cgroup_folders()):
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"these cgroups cannot be removed: {', '.join(map(str, remaining))}; in them: "
                f"{member_pids()}"
            )
        for pid in member_pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in remaining:
            with suppress(OSError):  # busy until the last process has left
                folder.rmdir()
        if any(folder.exists() for folder in remaining):
            time.sleep(0.05)
