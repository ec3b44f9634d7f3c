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


def fill(folder: Path, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "block").write_bytes(os.urandom(size))


def test_more_than_the_limit_in_all_folders_together_is_named_with_its_key(tmp_path: Path) -> None:
    fill(tmp_path / "tmp/deep/down", 2 * MIB)
    fill(tmp_path / "code", 2 * MIB)
    scratch = {str(tmp_path / "tmp"): None, str(tmp_path / "code"): None}
    excess = resources.find_excess(AgentJob("t", scratch=scratch, ephemeral_bytes=3 * MIB), 1)
    assert excess is not None and (excess.host, excess.limit_bytes, excess.folder) == (
        1,
        3 * MIB,
        "",
    )
    assert render_excess(excess) == (
        "host 1 uses 4 MiB of ephemeral storage, over its limit of 3 MiB (resources.ephemeral), "
        "for which its pod is evicted"
    )
    assert resources.find_excess(AgentJob("t", scratch=scratch, ephemeral_bytes=5 * MIB), 1) is None
    assert resources.find_excess(AgentJob("t", scratch=scratch), 1) is None


def test_more_than_a_volume_may_hold_is_named_with_its_folder(tmp_path: Path) -> None:
    fill(tmp_path / "tmp", 2 * MIB)
    excess = resources.find_excess(AgentJob("t", scratch={str(tmp_path / "tmp"): MIB}), 0)
    assert excess is not None and (excess.limit_bytes, excess.folder) == (MIB, f"{tmp_path}/tmp")
    message = render_excess(excess)
    assert f"host 0 has 2 MiB in {tmp_path}/tmp, over that volume's limit of 1 MiB" in message
    assert "(volumes: ephemeral)" in message


def test_what_is_mounted_below_a_folder_or_linked_from_it_is_counted_once(tmp_path: Path) -> None:
    fill(tmp_path / "tmp/scratch", 2 * MIB)
    fill(tmp_path / "elsewhere", 4 * MIB)
    (tmp_path / "tmp/link").symlink_to(tmp_path / "elsewhere")
    scratch = {str(tmp_path / "tmp"): None, str(tmp_path / "tmp/scratch"): None}
    assert resources.find_excess(AgentJob("t", scratch=scratch, ephemeral_bytes=3 * MIB), 0) is None


def test_a_folder_that_is_not_there_or_is_huge_delays_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resources.find_excess(AgentJob("t", scratch={str(tmp_path / "none"): 1}), 0) is None
    fill(tmp_path / "tmp", MIB)
    monkeypatch.setattr(resources, "MEASURE_TIMEOUT_S", -1.0)  # the time is up
    assert resources.find_excess(AgentJob("t", scratch={str(tmp_path / "tmp"): 1}), 0) is None


def test_one_folder_with_very_many_files_is_counted_only_until_the_time_is_up(
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


def test_a_path_that_ends_with_a_slash_is_the_same_folder(tmp_path: Path) -> None:
    fill(tmp_path / "tmp/scratch", 2 * MIB)
    scratch = {f"{tmp_path}/tmp/": None, f"{tmp_path}/tmp/scratch/": None}
    assert resources.find_excess(AgentJob("t", scratch=scratch, ephemeral_bytes=3 * MIB), 0) is None


def test_a_file_with_several_names_is_counted_once(tmp_path: Path) -> None:
    fill(tmp_path / "tmp", 2 * MIB)
    (tmp_path / "tmp/again").hardlink_to(tmp_path / "tmp/block")
    assert resources.find_excess(AgentJob("t", scratch={str(tmp_path / "tmp"): 3 * MIB}), 0) is None
