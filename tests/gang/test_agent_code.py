"""Code that a job brings: unpacked by the agent before any process starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.manifests import archive
from tests.gang.agents import FRESH_AGENT, Gang, make_job, run_gang

SHOW = ("python3", "train.py")


@pytest.fixture
def code_env(tmp_path: Path) -> dict[str, str]:
    """Return the variables that tell the agent about the code of a small project."""
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


def test_program_starts_in_its_code(tmp_path: Path, code_env: dict[str, str]) -> None:
    gang, codes = run_gang(
        tmp_path, make_job(SHOW, workdir=code_env[contract.CODE_ROOT]), env=code_env
    )
    assert codes == [0] and f"[0] 42 in {tmp_path / 'there'}" in gang.stdout


def test_code_precedes_modules_of_the_image(tmp_path: Path, code_env: dict[str, str]) -> None:
    (tmp_path / "image" / "pkg").mkdir(parents=True)
    (tmp_path / "image" / "pkg" / "model.py").write_text("ANSWER = 41")
    path = os.pathsep.join([str(tmp_path / "image"), os.fspath(Path(__file__).parents[2])])
    command = ("python3", "-c", "import pkg.model; print(pkg.model.ANSWER)")
    gang, codes = run_gang(tmp_path, make_job(command), env={**code_env, "PYTHONPATH": path})
    assert codes == [0] and "[0] 42\n" in gang.stdout


def test_damaged_archive_is_a_permanent_failure(tmp_path: Path, code_env: dict[str, str]) -> None:
    Path(code_env[contract.CODE]).write_bytes(b"junk")
    gang, codes = run_gang(tmp_path, make_job(SHOW), env=code_env)
    assert codes == [contract.BAD_SPEC] and "code.tar.gz is damaged" in gang.stderr


def test_failure_to_unpack_is_a_storage_failure(tmp_path: Path, code_env: dict[str, str]) -> None:
    (tmp_path / "there").write_text("a file")
    gang, codes = run_gang(tmp_path, make_job(SHOW), env=code_env)
    assert codes == [contract.STORAGE] and "cannot unpack the job's code" in gang.stderr


def test_signal_before_the_agent_is_ready_is_not_lost(tmp_path: Path) -> None:
    """Check that PID 1 of a container is not killed only at the end of its grace period."""
    with Gang(tmp_path, make_job(SHOW), hosts=2, argv=FRESH_AGENT) as gang:
        agent = gang.start(0).agents[0]

        def is_blocked_or_handled() -> bool:
            status = dict(
                line.split(":\t")
                for line in Path(f"/proc/{agent.pid}/status").read_text().splitlines()
            )
            return bool((int(status["SigBlk"], 16) | int(status["SigCgt"], 16)) & 1 << 14)

        gang.wait_until("the agent is wary", is_blocked_or_handled)
        agent.terminate()
        assert gang.wait() == [contract.PREEMPTED], gang.stderr
