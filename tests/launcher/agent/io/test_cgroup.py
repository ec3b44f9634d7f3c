"""How much memory a container uses and may use, as both versions of the kernel's controller say it."""

from pathlib import Path

import pytest

from launcher.agent import footprint

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\n"
MACHINE = {"in_use": 600 * 1024.0, "limit": 1000 * 1024.0}
V1, V2 = "4:memory:/pods/a\n0::/\n", "0::/pods/a\n"


def kernel(root: Path, cgroup: str, **files: str) -> Path:
    paths = {"proc/self/cgroup": cgroup, "proc/meminfo": MEMINFO, **files}
    for path, text in paths.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def unified(folder: str, limit: str) -> dict[str, str]:
    return {
        f"{folder}/memory.current": "5000\n",
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.stat": "anon 7\ninactive_file 2000\nactive_file 9\n",
    }


def legacy(folder: str, limit: str) -> dict[str, str]:
    return {
        f"{folder}/memory.usage_in_bytes": "5000\n",
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.stat": "inactive_file 1\ntotal_inactive_file 2000\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (V2, unified("sys/fs/cgroup/pods/a", "8000")),
        (V2, unified("sys/fs/cgroup", "8000")),  # what a container sees of itself
        (V1, legacy("sys/fs/cgroup/memory/pods/a", "8000")),
        (V1, legacy("sys/fs/cgroup/memory", "8000")),
    ],
)
def test_files_the_kernel_can_drop_are_not_in_use(cgroup: str, files: dict[str, str], tmp_path: Path) -> None:
    assert footprint.read(kernel(tmp_path, cgroup, **files)) == {"in_use": 3000.0, "limit": 8000.0}


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (V2, unified("sys/fs/cgroup/pods/a", "max")),
        (V1, legacy("sys/fs/cgroup/memory/pods/a", "9223372036854771712")),
        (V2, {}),
    ],
)
def test_without_a_limit_the_machine_is_the_limit(cgroup: str, files: dict[str, str], tmp_path: Path) -> None:
    assert footprint.read(kernel(tmp_path, cgroup, **files)) == MACHINE


def test_where_there_is_no_proc_nothing_is_known(tmp_path: Path) -> None:
    assert footprint.read(tmp_path) == {"in_use": None, "limit": None}
