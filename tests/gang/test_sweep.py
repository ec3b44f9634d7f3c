"""A sweep that is killed, continued, stopped early by its rule, and stopped as a whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from jaxlaunch.runs import layout
from tests.gang.run_files import read_json_lines
from tests.gang.runs import (
    LAUNCHER,
    descendant_pids,
    digits_block,
    kill_processes,
    make_job,
    wait_until_gone,
)
from tests.launcher.invoke import CommandResult
from tests.launcher.invoke import launcher as invoke

# Learns to `target`, a step a file: step N + 1 waits until `go-N` is there. Continues after the
# steps it has written.
PROGRAM = """
import json, os, signal, sys, time
folder, target = os.environ["JAXLAUNCH_RUN_DIR"], float(sys.argv[1])
def say(**message):
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\\n")
path = os.path.join(folder, "metrics.jsonl")
done = len(open(path).readlines()) if os.path.exists(path) else 0
def stop(*_):
    say(stopped={"step": done, "saved": True, "note": ""})
    os._exit(80)
signal.signal(signal.SIGTERM, stop)
say(hello="trainer")
open(f"started-{os.path.basename(folder)}", "a").write(f"{done}\\n")
while done < 3:
    while not os.path.exists(f"go-{done}"): time.sleep(0.02)
    done += 1
    say(phase="step", step=done)
    row = {"step": done, "time": time.time(), "loss": target / done}
    with open(path, "a") as file: file.write(json.dumps(row) + "\\n")
say(phase="done")
"""
DOCUMENT = make_job(
    command=["python", "program.py", "1"],
    workdir=".",
    restarts={"in_place": 0, "crash": 0},
    grace="20s",
    name="s",
)
GRID = (
    "sweep",
    "job.yaml",
    "command=[python, program.py, 4],[python, program.py, 1],[python, program.py, 3]",
)


@pytest.fixture
def call_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CommandResult]:
    """Return a function that runs a command in the job's folder, without a cluster."""
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(DOCUMENT))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return lambda *arguments: invoke(capsys, monkeypatch, *arguments)


def wait_until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.02)


@contextlib.contextmanager
def start_launcher(*arguments: str):  # type: ignore[no-untyped-def]
    command = [*LAUNCHER, *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            yield process
        finally:
            kill_processes([process.pid, *descendant_pids(process.pid)])


def run_states(folder: Path) -> dict[str, str]:
    rows = read_json_lines(folder / "sweep.jsonl")
    return {row["run"]: row["state"] for row in rows if "run" in row}


@pytest.mark.extended
def test_killed_sweep_continues_and_stopped_sweep_stops_every_run(
    tmp_path: Path, call_launcher: Callable[..., CommandResult]
) -> None:
    folder = tmp_path / "runs" / "s-sweep"
    started = [tmp_path / f"started-s-sweep-00{at}" for at in range(3)]
    for step in range(3):
        (tmp_path / f"go-{step}").touch()
    with start_launcher(*GRID, "--parallel", "1", "--max", "1") as first:  # the first of them alone
        assert first.wait() == 0
    (tmp_path / "go-1").unlink()
    with start_launcher(*GRID, "--parallel", "1") as killed:
        wait_until(started[1].exists)
        pids = [killed.pid, *descendant_pids(killed.pid)]
        assert call_launcher("list", "s-sweep").out.count("Running") == 1
        kill_processes(pids)
        killed.wait()
        wait_until_gone(pids)
    with start_launcher(*GRID, "--parallel", "1") as alone:  # its run outlives it
        wait_until(lambda: len(started[1].read_text().splitlines()) == 2)
        wait_until(lambda: layout.find_holder(folder / "s-sweep-001") is not None)
        os.kill(alone.pid, signal.SIGKILL)
        alone.wait()
        with start_launcher(*GRID, "--parallel", "1") as second:
            wait_until(lambda: layout.find_holder(folder, ".sweep") is not None)
            refused = call_launcher(*GRID)
            assert refused.code == 2 and "is in use" in refused.err
            wait_until(lambda: "an earlier command" in (folder / "sweep.jsonl").read_text())
            stopped = call_launcher("stop", "s-sweep")
            assert (stopped.code, stopped.out) == (0, "sweep/s-sweep stopped\n"), stopped.err
            assert second.wait() == 80
    assert run_states(folder) == {
        "s-sweep-000": "done",
        "s-sweep-001": "stopped",
        "s-sweep-002": "waiting",
    }
    assert call_launcher("stop", "s-sweep").code == 2
    (tmp_path / "go-1").touch()
    with start_launcher(*GRID) as last:
        output = last.communicate()[0]
        assert last.returncode == 0, output
    assert set(run_states(folder).values()) == {"done"}
    # What was done began once.
    assert [len(file.read_text().splitlines()) for file in started] == [1, 3, 1]
    assert "best of 3 runs that are done: s-sweep-001, loss 0.3333\n" in output
    shown = output.splitlines()[-1].removeprefix("  cat ")
    assert yaml.safe_load((tmp_path / shown).read_text())["command"][-1] == "1"
    other = call_launcher(
        "sweep", "job.yaml", "command=[python, program.py, 9]", "--name", "s-sweep"
    )
    assert other.code == 2 and "began with other jobs" in other.err
    compared = call_launcher("compare", "s-sweep")
    assert compared.code == 0 and compared.out.count("done") == 3


def test_halving_stops_the_worse_half(
    tmp_path: Path, call_launcher: Callable[..., CommandResult]
) -> None:
    train = digits_block(steps=60, log_every=10, checkpoint={"every": 20}, eval={"every": None})
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(make_job(train, per_host=1, name="h")))
    rates = "train.optimizer.lr=1e-2,1e-5"
    result = call_launcher(
        "sweep",
        "job.yaml",
        rates,
        "--parallel",
        "1",
        "--halving",
        "--rungs",
        "10",
        "--metric",
        "loss",
    )
    assert result.code == 0, result.err
    end_states = run_states(tmp_path / "runs" / "h-sweep")
    assert end_states["h-sweep-000"] == "done" and end_states["h-sweep-001"] in ("cut", "done")
    assert "h-sweep-001: cut, loss" in result.err
