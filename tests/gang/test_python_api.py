"""Jobs from Python: a function on four processes, and the commands of README on this machine."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jaxlaunch
from tests.compiled import quick_start_env
from tests.gang.runs import HERE, PATIENCE_S, ROOT, descendant_pids, wait_until_gone

pytestmark = pytest.mark.computes


def test_function_on_four_processes(tmp_path: Path) -> None:
    """One script: a value of 10 MB, an exception, a process that exits, and Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "called.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + PATIENCE_S
    while len(list(tmp_path.glob("asleep-*"))) < 4 and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.05)
    pids = descendant_pids(process.pid)
    process.send_signal(signal.SIGINT)
    output, messages = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, messages) == (0, "")
    answers = json.loads(output)
    assert answers["value"] == {"rank": 0, "count": 4, "bytes": 10_000_000, "is_equal": True}
    raised = answers["raise"]
    assert (raised["type"], raised["args"], raised["code"]) == ("RefusedError", ["no", 7], 83)
    assert raised["notes"][0].startswith("rank 2:\nTraceback")
    assert answers["exit"]["type"] == "JobFailedError" and answers["exit"]["code"] == 83
    assert "rank 1's program ended with exit code 9" in answers["exit"]["args"][0]
    assert answers["sleep"]["type"] == "KeyboardInterrupt"
    wait_until_gone(pids)
    assert jaxlaunch.attach(str(tmp_path / "runs" / "work")).status().state == "Stopped"


def test_example_calls_a_function_and_runs_a_job(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "from_python.py")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    value, state = done.stdout.splitlines()
    assert ast.literal_eval(value)["devices"] == 2
    assert abs(ast.literal_eval(value)["pi"] - 3.14) < 0.02
    assert state == "Done ['rank 1']"


def test_example_notebook_runs(tmp_path: Path) -> None:
    notebook = ROOT / "examples" / "from_python.ipynb"
    done = subprocess.run(
        [sys.executable, str(HERE / "notebook.py"), str(notebook)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    shown = [json.loads(line) for line in done.stdout.splitlines()]
    assert shown[0] == "hello from rank 0 of 2"
    assert shown[1].startswith("<b>from-notebook</b>: Done")
    assert shown[2] == ["[0] rank 0", "[1] rank 1"]


def test_example_of_readme_from_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in quick_start_env().items():
        monkeypatch.setenv(name, value)
    job = jaxlaunch.Job.load(ROOT / "examples" / "digits.yaml", train={"steps": 4, "epochs": None})
    lines = list[str]()
    run = job.run(on_line=lines.append)
    assert run.status().state == "Done" and run.status().step == 4
    assert any("step 4" in line for line in run.logs()) and len(lines) >= len(run.logs())
    assert run.metrics()[-1]["step"] == 4
    assert run.explain().situation == "done"
    assert jaxlaunch.attach("digits").wait().code == 0
    model = jaxlaunch.load("digits")
    assert isinstance(model, jaxlaunch.TaskModel) and model.step == 4
    assert capfd.readouterr().out == ""
