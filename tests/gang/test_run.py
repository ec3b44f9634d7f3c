"""`launcher run` itself: the run folder, volumes, simulation, Ctrl-C, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from tests.gang.runs import HERE, Running, digits, job, launch, until_gone


def test_the_run_folder_holds_all_that_a_reader_needs(tmp_path: Path) -> None:
    result = launch(tmp_path, job(digits(steps=6, eval={"every": 3}), hosts=2, per_host=1))
    assert result.code == 0, result.stderr[-3000:]
    summary = result.summary
    assert (summary["status"], summary["step"], summary["verdict"]["cause"]) == ("done", 6, "done")
    assert set(summary) >= {"status", "step", "verdict", "metrics", "goodput", "restarts"}
    assert set(summary["verdict"]) >= {"cause", "code", "rank", "step", "message", "traceback"}
    assert 0 < summary["goodput"]["ratio"] < 1
    assert [agent["ranks"] for agent in json.loads((result.folder / "agents.json").read_text())] == [[0], [1]]
    assert yaml.safe_load((result.folder / "job.yaml").read_text())["train"]["steps"] == 6
    assert "step 6/6" in (result.folder / "logs" / "rank-0.log").read_text()
    assert [line["step"] for line in result.metrics] == list(range(1, 7))
    assert len((result.folder / "attempts.jsonl").read_text().splitlines()) == 1
    assert "[0] step 6/6" in result.stdout


def test_a_finished_run_started_again_has_nothing_to_train(tmp_path: Path) -> None:
    first = launch(tmp_path, job(digits(steps=6)))
    again = launch(tmp_path, job(digits(steps=6)))
    assert (first.code, again.code) == (0, 0)
    assert "resumed at step 6 of 6" in again.stdout
    assert again.losses == first.losses


def test_a_gpu_job_is_simulated_on_as_many_cpu_devices(tmp_path: Path) -> None:
    document = job(digits(mesh={"dp": 4, "mp": 2}), hosts=1) | {"accelerator": {"type": "h100", "per_host": 8}}
    result = launch(tmp_path, document | {"processes_per_host": 2}, "--simulate")
    assert result.code == 0, result.stderr[-3000:]
    assert [agent["ranks"] for agent in json.loads((result.folder / "agents.json").read_text())] == [[0, 1]]


def test_more_gpu_hosts_than_this_machine_are_refused_unless_simulated(tmp_path: Path) -> None:
    document = job(digits(), hosts=2) | {"accelerator": {"type": "h100", "per_host": 8}}
    result = launch(tmp_path, document)
    assert result.code == 2
    assert "--simulate" in result.stderr and "Traceback" not in result.stderr


def test_a_volume_s_paths_are_in_the_run_folder_and_that_is_said(tmp_path: Path) -> None:
    train = digits(steps=4, checkpoint={"path": "/ckpt/here"})
    result = launch(tmp_path, job(train, volumes=[{"claim": "ckpt", "path": "/ckpt"}]))
    assert result.code == 0, result.stderr[-3000:]
    assert (result.folder / "volumes/ckpt/here/4").is_dir()
    assert f"/ckpt is {result.folder}/volumes/ckpt" in result.stderr


def test_a_run_folder_in_use_is_refused(tmp_path: Path) -> None:
    with Running(tmp_path, job(digits(steps=1_000_000))) as running:
        running.until_step(2)
        second = launch(tmp_path, job(digits(steps=1)))
        assert second.code == 2
        assert f"in use by the run with pid {running.process.pid}" in second.stderr
        running.signal(signal.SIGTERM)
        assert running.wait().code == 80


def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    with Running(tmp_path, job(command=["sleep", "1000"])) as running:
        running.until("the start of the program", running.children)
        pids = running.tree()
        running.signal(signal.SIGINT)
        running.until("its answer", lambda: "once more kills" in running.text()[1])
        running.signal(signal.SIGINT)
        result = running.wait()
        until_gone(pids)
    assert result.code == 137


def test_a_deadline_stops_the_run(tmp_path: Path) -> None:
    result = launch(tmp_path, job(digits(steps=1_000_000), deadline="10s"))
    assert result.code == 80
    assert "the deadline has passed" in result.stderr


def test_an_orphaned_gang_ends(tmp_path: Path) -> None:
    with Running(tmp_path, job(digits(steps=1_000_000), hosts=2, per_host=1)) as running:
        running.until_step(3)
        pids = running.tree()[1:]
        os.kill(running.process.pid, signal.SIGKILL)
        until_gone(pids)


def test_a_job_s_own_program_gets_its_environment(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "hello.py").write_text("import os; print(os.environ['A'], os.getcwd(), os.environ['TOKEN'])")
    document = job(command=["python", "hello.py"], env={"A": "b"}, code="code")
    document["secrets"] = {"TOKEN": {"name": "s", "key": "k"}}
    assert launch(tmp_path, document).code == 2
    result = launch(tmp_path, document, env={"TOKEN": "t"})
    assert result.code == 0, result.stderr
    assert f"[0] b {tmp_path}/code t" in result.stdout


def test_on_a_terminal_rank_0_speaks_alone_below_it_a_bar(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job(digits(steps=30), hosts=2, per_host=1)))
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "launcher.cli.main", "run", str(tmp_path / "job.yaml")]
    process = subprocess.Popen(
        [*command, "--run-dir", str(tmp_path / "run")],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(HERE.parent.parent), "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    screen = b"".join(iter(lambda: _read(ours), b"")).decode(errors="replace")
    assert process.wait() == 0, screen
    assert "step 30/30" in screen and "[0]" not in screen
    assert "starting" in screen


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""
