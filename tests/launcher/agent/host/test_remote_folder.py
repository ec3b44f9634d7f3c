"""The process that copies the run folder to its bucket, replaced by a shell script."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.gang import config
from jaxlaunch.launcher.agent.host import folders
from jaxlaunch.launcher.agent.host.folders import FolderError, RemoteFolder
from jaxlaunch.launcher.agent.io.loop import Loop


@pytest.fixture
def copier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Starts a run folder whose copier runs these lines of sh after it is ready."""

    def start(lines: str) -> RemoteFolder:
        script = tmp_path / "python"
        script.write_text(f"#!/bin/sh\necho ready\n{lines}\n")
        script.chmod(0o755)
        monkeypatch.setattr(folders, "sys", SimpleNamespace(executable=str(script)))
        environ = {contract.LEADER: "127.0.0.1:1", contract.HOSTS: "1", contract.INDEX: "0"}
        environ[contract.UID] = "u"
        place = config.read_config(environ | {contract.JOB: AgentJob("t", ("true",)).to_json()})
        return RemoteFolder("gs://team-b/r", place)

    return start


@pytest.mark.parametrize(
    ("lines", "is_whole"), [("cat; echo done", True), ("cat", False), ("exit 84", False)]
)
def test_run_folder_is_whole_only_if_the_copier_says_so(copier, lines: str, is_whole: bool) -> None:
    assert copier(lines).close() is is_whole


def test_failed_start_of_the_copier_leaves_nothing_behind(
    copier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[str, int]] = []

    def make_folder(infix: str) -> tuple[str, int]:
        (tmp_path / infix).mkdir(exist_ok=True)
        made.append((str(tmp_path / infix), os.open(tmp_path, os.O_RDONLY)))
        return made[-1]

    monkeypatch.setattr(folders, "make_folder", make_folder)
    previous = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(folders, "READY", "never")
    with pytest.raises(FolderError, match="cannot be used"):
        copier("exit 1")
    assert set(os.listdir("/proc/self/fd")) == previous and not Path(made[0][0]).exists()
    monkeypatch.setattr(subprocess, "Popen", MagicMock(side_effect=OSError("no memory")))
    with pytest.raises(OSError, match="no memory"):
        copier("exit 1")
    assert set(os.listdir("/proc/self/fd")) == previous and not Path(made[1][0]).exists()


def test_copier_gets_new_ranks_within_a_time_limit(copier, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = copier("cat; echo done")
    copied.take_ranks(range(1))  # those that it began with
    copied.take_ranks(range(2, 3))
    assert copied.close() is True, "what it repeats is read before its last word"
    monkeypatch.setattr(folders, "MOVE_TIMEOUT_S", 0.1)
    silent = copier("cat > /dev/null; echo done")
    silent.take_ranks(range(2, 3))
    assert silent.close() is True


def test_copier_that_ended_early_is_reported(copier) -> None:
    copied = copier("exec sleep 600")
    previous = signal.getsignal(signal.SIGCHLD), signal.set_wakeup_fd(-1)
    loop = Loop()
    codes: list[int] = []

    def ended(code: int) -> None:
        codes.append(code)
        loop.stop()

    try:
        loop.on_child_exit(lambda pid: None, lambda pid, code, peak_bytes: None)
        loop.on_exit_of(copied.pid, ended)
        os.kill(copied.pid, signal.SIGKILL)
        loop.run()
    finally:
        signal.signal(signal.SIGCHLD, previous[0])
        signal.set_wakeup_fd(previous[1])
        for item in (loop._wake_read, loop._wake_write, loop._epoll):
            item.close()
    assert codes == [-9]
    assert copied.close() is False
