"""`list`, `status`, `logs`, `explain` and `stop` for local runs, from another terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.gang.agents import is_alive, poll_until
from tests.gang.runs import LAUNCHER, Running, make_job
from tests.launcher.invoke import CommandResult
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
DOCUMENT = make_job(
    command=["python", "program.py"], workdir=".", hosts=2, restarts={"in_place": 0}, grace="100s"
)


@pytest.fixture
def call_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., CommandResult]]:
    """Return a function that runs a command in the job's folder, without a cluster."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    yield lambda *arguments: invoke(capsys, monkeypatch, *arguments)


def start_run(folder: Path) -> Running:
    """Start a run in `folder`/run and wait until its agents report step 7."""
    running = Running(folder, DOCUMENT)
    for rank in (0, 1):
        running.wait_for_file(folder / f"up{rank}")
    running.wait_until("step 7", lambda: 'jaxlaunch_rank_step{rank="0"} 7' in running.scrape(0))
    running.wait_until("step 7", lambda: 'jaxlaunch_rank_step{rank="1"} 7' in running.scrape(1))
    logs = [running.folder / "starts" / "1" / "logs" / f"rank-{rank}.log" for rank in (0, 1)]
    running.wait_until(
        "their lines", lambda: all(log.is_file() and log.stat().st_size for log in logs)
    )
    return running


def test_running_job_is_shown_and_two_stops_do_not_kill_it(
    tmp_path: Path, call_launcher: Callable[..., CommandResult]
) -> None:
    with start_run(tmp_path) as running:
        row = call_launcher("list", ".").out.splitlines()[1].split()
        assert row[:4] == ["run", "Running", "2/2", "7"]
        shown = call_launcher("status", "./run").out
        assert "run: Running (generation 0, attempt 1)" in shown
        assert "2 of 2 ready" in shown
        assert "step 7" in shown
        assert call_launcher("explain", "run").out.startswith("run runs: training at step 7\n")
        status = json.loads(call_launcher("status", "run", "-o", "json").out)
        assert status["state"] == "Running"
        assert status["phase"] == "step"
        assert status["folder"] == str(running.folder)
        assert call_launcher("logs", "run", "--rank", "1").out == "rank 1 is up\n"
        follower = subprocess.Popen(
            [*LAUNCHER, "logs", "./run", "-f", "--rank", "1"],
            stdout=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
        )
        assert follower.stdout is not None and follower.stdout.readline() == "rank 1 is up\n"
        (tmp_path / "grow").touch()
        assert follower.stdout.readline() == "rank 1 grew\n"
        (tmp_path / "hold").touch()
        command = [*LAUNCHER, "stop", "./run", "--no-wait"]
        stops = [
            subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        assert [stop.communicate()[0] for stop in stops] == ["run/run stopping\n"] * 2
        assert call_launcher("status", "run").out.startswith("run: Stopping")
        assert call_launcher("stop", "run", "--timeout", "1s").code == 124
        (tmp_path / "hold").unlink()
        assert "killing" not in running.wait().stderr
        assert follower.wait() == 0
        follower.stdout.close()
    assert call_launcher("list", ".").out.splitlines()[1].split()[:4] == [
        "run",
        "Stopped",
        "2",
        "7",
    ]
    second_stop = call_launcher("stop", "run")
    assert second_stop.code == 2 and "is not running: there is nothing to stop" in second_stop.err
    explained = call_launcher("explain", "run").out
    assert re.search(r"`launcher run \S*job.yaml .*` resumes it from step", explained), explained


def test_failed_run_is_held_until_a_stop(
    tmp_path: Path, call_launcher: Callable[..., CommandResult]
) -> None:
    job = DOCUMENT | {
        "command": ["python", "-c", "raise SystemExit(3)"],
        "restarts": {"crash": 0, "in_place": 0},
        "hold_on_failure": "1h",
    }
    with Running(tmp_path, job) as running:
        running.wait_until("the hold", lambda: "held until" in running.read_output()[1])
        status = json.loads(call_launcher("status", "./run", "-o", "json").out)
        assert (status["state"], status["verdict"]["code"]) == ("Held", 83)
        held = r"^run failed: crash .* it is held until \d\d:\d\d UTC$"
        assert re.search(held, call_launcher("explain", "./run").out, re.MULTILINE)
        assert "`launcher stop run` ends it" in call_launcher("status", "./run").out
        call_launcher("stop", "./run")
        assert running.wait().code == 83
    status = json.loads(call_launcher("status", "./run", "-o", "json").out)
    assert (status["state"], status["held_until"]) == ("Failed", None)


def test_killed_run_is_not_running_if_its_pid_is_reused(
    tmp_path: Path, call_launcher: Callable[..., CommandResult]
) -> None:
    with start_run(tmp_path) as running:
        agents = running.agent_pids()
        running.kill()
        # Until the agents have ended, too, the run is stopping.
        assert poll_until(lambda: not any(map(is_alive, agents.values())))
        lock = running.folder / ".lock"
        assert lock.read_text().split()[0] == str(running.process.pid)
        for holder in (lock.read_text(), f"{os.getpid()} 1 a-boot-before\n", f"{os.getpid()}\n"):
            lock.write_text(holder)
            assert call_launcher("list", ".").out.splitlines()[1].split()[:2] == ["run", "Failed"]
            explained = call_launcher("explain", "run")
            assert "was interrupted" in explained.out and "killed together" in explained.out
            assert call_launcher("stop", "run").code == 2
            assert call_launcher("status", "run").code == 0
        assert "rank 0 is up" in call_launcher("logs", "run").out


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Make a folder that every user can enter, which those of pytest's tmp_path are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")
def test_another_user_sees_the_owner_and_cannot_stop_the_run(
    open_folder: Path, call_launcher: Callable[..., CommandResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    (open_folder / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(open_folder)
    other = OtherUser(open_folder)
    with start_run(open_folder) as running:
        stopped = other.launcher("stop", "./run", folder=open_folder)
        assert stopped.returncode == 2
        assert "Run run belongs to root, and you may not stop it." in stopped.stderr
        shown = other.launcher("status", "./run", folder=open_folder)
        assert shown.returncode == 0 and "run: Running" in shown.stdout
        running.folder.chmod(0o700)
        hidden = other.launcher("status", "./run", folder=open_folder)
        assert hidden.returncode == 2
        assert "permission denied" in hidden.stderr
        assert "it belongs to root" in hidden.stderr
        assert running.process.poll() is None
        assert call_launcher("stop", "./run").out == "run/run stopped\n"
    assert call_launcher("logs", "./run", "--since", "1m").code == 2
