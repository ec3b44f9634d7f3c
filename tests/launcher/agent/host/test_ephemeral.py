"""What a pod keeps on its node's disk, against its limits."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.io import resources
from jaxlaunch.records.verdict import render_excess

MIB = 2**20


def write_file(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "block").write_bytes(os.urandom(size))


def test_excess_of_all_folders_names_the_pod_limit(tmp_path: Path) -> None:
    write_file(tmp_path / "tmp/deep/down", 2 * MIB)
    write_file(tmp_path / "code", 2 * MIB)
    scratch = {str(tmp_path / "tmp"): None, str(tmp_path / "code"): None}
    excess = resources.find_excess(AgentJob("t", scratch=scratch, ephemeral_bytes=3 * MIB), 1)
    assert excess is not None
    assert (excess.host, excess.limit_bytes, excess.folder) == (1, 3 * MIB, "")
    assert render_excess(excess) == (
        "host 1 uses 4 MiB of ephemeral storage, over its limit of 3 MiB (resources.ephemeral), "
        "for which its pod is evicted"
    )
    assert resources.find_excess(AgentJob("t", scratch=scratch, ephemeral_bytes=5 * MIB), 1) is None
    assert resources.find_excess(AgentJob("t", scratch=scratch), 1) is None


def test_excess_of_a_volume_names_its_folder(tmp_path: Path) -> None:
    write_file(tmp_path / "tmp", 2 * MIB)
    excess = resources.find_excess(AgentJob("t", scratch={str(tmp_path / "tmp"): MIB}), 0)
    assert excess is not None and (excess.limit_bytes, excess.folder) == (MIB, f"{tmp_path}/tmp")
    message = render_excess(excess)
    assert f"host 0 has 2 MiB in {tmp_path}/tmp, over that volume's limit of 1 MiB" in message
    assert "(volumes: ephemeral)" in message


def test_mounted_and_linked_folders_are_counted_once(tmp_path: Path) -> None:
    write_file(tmp_path / "tmp/scratch", 2 * MIB)
    write_file(tmp_path / "elsewhere", 4 * MIB)
    (tmp_path / "tmp/link").symlink_to(tmp_path / "elsewhere")
    scratch = {str(tmp_path / "tmp"): None, str(tmp_path / "tmp/scratch"): None}
    assert resources.find_excess(AgentJob("t", scratch=scratch, ephemeral_bytes=3 * MIB), 0) is None


def test_missing_or_huge_folder_does_not_delay_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resources.find_excess(AgentJob("t", scratch={str(tmp_path / "none"): 1}), 0) is None
    write_file(tmp_path / "tmp", MIB)
    monkeypatch.setattr(resources, "MEASURE_TIMEOUT_S", -1.0)  # the time is up
    assert resources.find_excess(AgentJob("t", scratch={str(tmp_path / "tmp"): 1}), 0) is None


def test_counting_of_a_large_folder_stops_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        (tmp_path / str(number)).write_bytes(os.urandom(MIB // 10))
    job, seconds = AgentJob("t", scratch={str(tmp_path): MIB}), itertools.count()
    assert resources.find_excess(job, 0) is not None
    monkeypatch.setattr(resources, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    monkeypatch.setattr(
        resources, "MEASURE_TIMEOUT_S", 5.0
    )  # each look at the clock takes a second
    assert resources.find_excess(job, 0) is None


def test_trailing_slash_names_the_same_folder(tmp_path: Path) -> None:
    write_file(tmp_path / "tmp/scratch", 2 * MIB)
    scratch = {f"{tmp_path}/tmp/": None, f"{tmp_path}/tmp/scratch/": None}
    assert resources.find_excess(AgentJob("t", scratch=scratch, ephemeral_bytes=3 * MIB), 0) is None


def test_hard_links_are_counted_once(tmp_path: Path) -> None:
    write_file(tmp_path / "tmp", 2 * MIB)
    (tmp_path / "tmp/again").hardlink_to(tmp_path / "tmp/block")
    assert resources.find_excess(AgentJob("t", scratch={str(tmp_path / "tmp"): 3 * MIB}), 0) is None
