"""The memory of a container and the count of the OOM killer, in both cgroup versions."""

import os
from pathlib import Path

import pytest

from jaxlaunch.launcher.agent.io import resources
from jaxlaunch.runs import host_load

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\n"
MACHINE = {"in_use": 600 * 1024.0, "limit": 1000 * 1024.0}
V1, V2 = "4:memory:/pods/a\n0::/\n", "0::/pods/a\n"


def write_files(root: Path, cgroup: str, **files: str) -> Path:
    paths = {"proc/self/cgroup": cgroup, "proc/meminfo": MEMINFO, **files}
    for path, text in paths.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def cgroup_v2(folder: str, limit: str) -> dict[str, str]:
    return {
        f"{folder}/memory.current": "5000\n",
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.stat": "anon 7\ninactive_file 2000\nactive_file 9\n",
    }


def cgroup_v1(folder: str, limit: str) -> dict[str, str]:
    return {
        f"{folder}/memory.usage_in_bytes": "5000\n",
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.stat": "inactive_file 1\ntotal_inactive_file 2000\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (V2, cgroup_v2("sys/fs/cgroup/pods/a", "8000")),
        (V2, cgroup_v2("sys/fs/cgroup", "8000")),  # what a container sees of itself
        (V1, cgroup_v1("sys/fs/cgroup/memory/pods/a", "8000")),
        (V1, cgroup_v1("sys/fs/cgroup/memory", "8000")),
    ],
)
def test_page_cache_is_not_memory_in_use(
    cgroup: str, files: dict[str, str], tmp_path: Path
) -> None:
    assert host_load.read_memory(write_files(tmp_path, cgroup, **files)) == {
        "in_use": 3000.0,
        "limit": 8000.0,
    }


@pytest.mark.parametrize(
    ("cgroup", "files"),
    [
        (V2, cgroup_v2("sys/fs/cgroup/pods/a", "max")),
        (V1, cgroup_v1("sys/fs/cgroup/memory/pods/a", "9223372036854771712")),
        (V2, {}),
    ],
)
def test_memory_limit_is_the_machine_without_a_cgroup_limit(
    cgroup: str, files: dict[str, str], tmp_path: Path
) -> None:
    assert host_load.read_memory(write_files(tmp_path, cgroup, **files)) == MACHINE


def test_memory_is_unknown_without_proc(tmp_path: Path) -> None:
    assert host_load.read_memory(tmp_path) == {"in_use": None, "limit": None}


OOM_V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
OOM_V2 = "low 0\nhigh 0\nmax 31\noom 4\noom_kill 3\noom_group_kill 0\n"


@pytest.mark.parametrize(
    ("text", "kills"),
    [(OOM_V1, 2), (OOM_V2, 3), ("oom_kill_disable 0\nunder_oom 0\n", 0), (None, 0)],
)
def test_oom_kills_are_counted(
    text: str | None, kills: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "count").write_text(text)
    monkeypatch.setattr(
        resources, "OOM_COUNTERS", (str(tmp_path / "absent"), str(tmp_path / "count"))
    )
    assert resources.count_oom_kills() == kills


def test_load_is_the_share_of_busy_ticks_since_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    stat, meminfo = tmp_path / "proc" / "stat", tmp_path / "proc" / "meminfo"
    meminfo.write_text(f"MemTotal: {8 * 2**20} kB\nMemAvailable: {6 * 2**20} kB\n")
    stat.write_text("cpu  100 0 50 800 50 0 0 0 9 9\ncpu0 1 1 1 1\n")
    load = host_load.HostLoad(tmp_path)
    # 60 of 200 ticks were busy: 40 of a user and 20 of the system.
    stat.write_text("cpu  140 0 70 900 90 0 0 0 9 9\n")
    assert load.read_numbers() == {"host_gib": 2.0, "host_limit_gib": 8.0, "host_cpu": 0.3}
    assert load.read_numbers()["host_cpu"] is None


def test_load_is_unknown_without_proc(tmp_path: Path) -> None:
    numbers = host_load.HostLoad(tmp_path).read_numbers()
    assert numbers == {"host_gib": None, "host_limit_gib": None, "host_cpu": None}


def test_peak_of_a_process_is_read(tmp_path: Path) -> None:
    status = tmp_path / "proc" / "7" / "status"
    status.parent.mkdir(parents=True)
    status.write_text("Name:\tpython\nVmPeak:\t  9000 kB\nVmHWM:\t  2048 kB\nVmRSS:\t  1024 kB\n")
    assert host_load.read_peak_bytes(7, tmp_path) == 2 << 20
    # A process that has ended has no memory any more.
    status.write_text("Name:\tpython\nState:\tZ (zombie)\n")
    assert host_load.read_peak_bytes(7, tmp_path) is None
    assert host_load.read_peak_bytes(8, tmp_path) is None
    own_bytes = host_load.read_peak_bytes(os.getpid())
    assert own_bytes is not None and own_bytes > 1 << 20
