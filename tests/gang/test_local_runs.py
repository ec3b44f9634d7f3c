"""Runs of this machine as `list`, `status`, `logs`, `explain` and `stop` show them, from another terminal."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gang.runs import Running, alive, job
from tests.launcher.invoke import Left
from tests.launcher.invoke import launcher as invoke
from tests.other_user import OtherUser

PROGRAM = """
import json, os, signal, time
def say(**message):
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\\n")
def stop(*_):
    while os.path.exists("hold"): time.sleep(0.02)
    say(stopped={"step": 7, "saved": True, "note": ""})
    os._exit(80)
signal.signal(signal.SIGTERM, stop)
say(hello="trainer")
rank = os.environ["JAX_PROCESS_ID"]
print("rank", rank, "is up", flush=True)
say(phase="step", step=7)
say(committed=5)
open("up" + rank, "w").close()
while not os.path.exists("grow"): time.sleep(0.02)
print("rank", rank, "grew", flush=True)
while True: time.sleep(0.02)
"""
DOCUMENT = job(
    command=["python", "program.py"], workdir=".", hosts=2, restarts={"in_place": 0}, grace="100s"
)


@pytest.fixture
def say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., Left]]:
    """Runs a command in the folder of the job, where there is no cluster."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield lambda *arguments: invoke(capsys, monkeypatch, *arguments)


def started(folder: Path) -> Running:
    """A run in `folder`/run that is at step 7, as its agents say."""
    running = Running(folder, DOCUMENT)
    for rank in (0, 1):
        running.until_file(folder / f"up{rank}")
    running.until("step 7", lambda: 'jaxlaunch_rank_step{rank="0"} 7' in running.scrape(0))
    running.until("step 7", lambda: 'jaxlaunch_rank_step{rank="1"} 7' in running.scrape(1))
    logs = [running.folder / "starts" / "1" / "logs" / f"rank-{rank}.log" for rank in (0, 1)]
    running.until("their lines", lambda: all(log.is_file() and log.stat().st_size for log in logs))
    return running


def test_a_run_is_seen_while_it_runs_and_two_who_stop_it_kill_nothing(
    tmp_path: Path, say: Callable[..., Left]
) -> None:
    with started(tmp_path) as running:
        row = say("list", ".").out.splitlines()[1].split()
        assert row[:4] == ["run", "Running", "2/2", "7"]
        shown = say("status", "./run").out
        assert (
            "run: Running (generation 0, attempt 1)" in shown
            and "2 of 2 ready" in shown
            and "step 7" in shown
        )
        assert say("explain", "run").out.startswith("run runs: training at step 7\n")
        found = json.loads(say("status", "run", "-o", "json").out)
        assert (found["state"], found["phase"], found["folder"]) == (
            "Running",
            "step",
            str(running.folder),
        )
        assert say("logs", "run", "--rank", "1").out == "rank 1 is up\n"
        follower = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jaxlaunch.launcher.cli.main",
                "logs",
                "./run",
                "-f",
                "--rank",
                "1",
            ],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        assert follower.stdout is not None and follower.stdout.readline() == "rank 1 is up\n"
        (tmp_path / "grow").touch()
        assert follower.stdout.readline() == "rank 1 grew\n"
        (tmp_path / "hold").touch()
        command = [
            sys.executable,
            "-m",
            "jaxlaunch.launcher.cli.main",
            "stop",
            "./run",
            "--no-wait",
        ]
        stops = [
            subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        assert [stop.communicate()[0] for stop in stops] == ["run/run stopping\n"] * 2
        assert say("status", "run").out.startswith("run: Stopping")
        assert say("stop", "run", "--timeout", "1s").code == 124
        (tmp_path / "hold").unlink()
        assert "killing" not in running.wait().stderr
        assert follower.wait() == 0
    assert say("list", ".").out.splitlines()[1].split()[:4] == ["run", "Stopped", "2", "7"]
    again = say("stop", "run")
    assert again.code == 2 and "is not running: there is nothing to stop" in again.err
    assert "`launcher run` of the same file resumes it from step" in say("explain", "run").out


def test_a_run_that_was_killed_whole_is_not_running_whoever_has_its_pid_now(
    tmp_path: Path, say: Callable[..., Left]
) -> None:
    with started(tmp_path) as running:
        tree = running.tree()
        for pid in tree:  # the launcher first
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        running.process.wait()
        while alive(tree):
            time.sleep(0.02)
        lock = running.folder / ".lock"
        assert lock.read_text().split()[0] == str(running.process.pid)
        for holder in (lock.read_text(), f"{os.getpid()} 1 a-boot-before\n", f"{os.getpid()}\n"):
            lock.write_text(holder)
            assert say("list", ".").out.splitlines()[1].split()[:2] == ["run", "Failed"]
            explained = say("explain", "run")
            assert "was interrupted" in explained.out and "killed together" in explained.out
            assert say("stop", "run").code == 2 and say("status", "run").code == 0
        assert "rank 0 is up" in say("logs", "run").out


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Make a folder that every user can enter: pytest closes those above `tmp_path` whenever another one starts."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_is_told_whose_run_it_is_and_cannot_stop_it(
    open_folder: Path, say: Callable[..., Left], monkeypatch: pytest.MonkeyPatch
) -> None:
    (open_folder / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(open_folder)
    other = OtherUser(open_folder)
    with started(open_folder) as running:
        stopped = other.launcher("stop", "./run", folder=open_folder)
        assert (
            stopped.returncode == 2 and "Run run is root's: you may not stop it." in stopped.stderr
        )
        shown = other.launcher("status", "./run", folder=open_folder)
        assert shown.returncode == 0 and "run: Running" in shown.stdout
        running.folder.chmod(0o700)
        hidden = other.launcher("status", "./run", folder=open_folder)
        assert (
            hidden.returncode == 2
            and "permission denied" in hidden.stderr
            and "it is root's" in hidden.stderr
        )
        assert running.process.poll() is None
        assert say("stop", "./run").out == "run/run stopped\n"
    assert say("logs", "./run", "--since", "1m").code == 2
