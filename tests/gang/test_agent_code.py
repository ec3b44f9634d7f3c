"""Code that a job brought: unpacked by the agent before any process starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.manifests import archive
from tests.gang.agents import Gang, job, launch

SHOW = ("python3", "train.py")


@pytest.fixture
def brought(tmp_path: Path) -> dict[str, str]:
    """What a pod tells the agent of the code of a small project."""
    (tmp_path / "mine" / "pkg").mkdir(parents=True)
    (tmp_path / "mine" / "pkg" / "model.py").write_text("ANSWER = 42")
    (tmp_path / "mine" / "train.py").write_text(
        "import os, pkg.model; print(pkg.model.ANSWER, 'in', os.getcwd())"
    )
    (tmp_path / "code.tar.gz").write_bytes(archive.pack_folder(tmp_path / "mine", 10_000))
    return {
        contract.CODE: str(tmp_path / "code.tar.gz"),
        contract.CODE_ROOT: str(tmp_path / "there"),
    }


def test_the_program_finds_it_and_starts_in_it(tmp_path: Path, brought: dict[str, str]) -> None:
    gang, codes = launch(tmp_path, job(SHOW, workdir=brought[contract.CODE_ROOT]), env=brought)
    assert codes == [0] and f"[0] 42 in {tmp_path / 'there'}" in gang.out


def test_it_stands_before_what_the_image_has(tmp_path: Path, brought: dict[str, str]) -> None:
    (tmp_path / "image" / "pkg").mkdir(parents=True)
    (tmp_path / "image" / "pkg" / "model.py").write_text("ANSWER = 41")
    path = os.pathsep.join([str(tmp_path / "image"), os.fspath(Path(__file__).parents[2])])
    command = ("python3", "-c", "import pkg.model; print(pkg.model.ANSWER)")
    gang, codes = launch(tmp_path, job(command), env={**brought, "PYTHONPATH": path})
    assert codes == [0] and "[0] 42\n" in gang.out


def test_a_damaged_archive_ends_the_gang_for_good(tmp_path: Path, brought: dict[str, str]) -> None:
    Path(brought[contract.CODE]).write_bytes(b"junk")
    gang, codes = launch(tmp_path, job(SHOW), env=brought)
    assert codes == [contract.BAD_SPEC] and "code.tar.gz is damaged" in gang.talk


def test_a_disk_that_takes_nothing_may_take_it_elsewhere(
    tmp_path: Path, brought: dict[str, str]
) -> None:
    (tmp_path / "there").write_text("a file")
    gang, codes = launch(tmp_path, job(SHOW), env=brought)
    assert codes == [contract.STORAGE] and "cannot unpack the job's code" in gang.talk


def test_a_signal_before_the_agent_is_ready_is_not_lost(tmp_path: Path) -> None:
    """PID 1 of a container would lose it, and be killed at the end of its grace period."""
    with Gang(tmp_path, job(SHOW), hosts=2) as gang:
        agent = gang.start(0).agents[0]

        def is_blocked_or_handled() -> bool:
            status = dict(
                line.split(":\t")
                for line in Path(f"/proc/{agent.pid}/status").read_text().splitlines()
            )
            return bool((int(status["SigBlk"], 16) | int(status["SigCgt"], 16)) & 1 << 14)

        gang.until("the agent is wary", is_blocked_or_handled)
        agent.terminate()
        assert gang.wait() == [contract.PREEMPTED], gang.talk
