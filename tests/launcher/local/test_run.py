"""A run on this machine, short of starting one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.cli import run as cli_run
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.jobs.logs.lines import Line
from jaxlaunch.launcher.local import agents, run
from jaxlaunch.launcher.local.held_output import HeldOutput
from jaxlaunch.launcher.local.run_folders import hold_lock
from jaxlaunch.records.summary import AttemptProgress, Summary
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs import history
from jaxlaunch.runs.layout import Holder, find_holder
from jaxlaunch.runs.run_folder import RunFolder, RunStarts
from tests.launcher.invoke import launcher

JOB = "name: t\nhosts: 1\naccelerator: {type: cpu, per_host: 1}\ncommand: [true]\n"


def test_too_many_hosts_for_memory_are_rejected(
    tmp_path: Path,
) -> None:
    job = jobs.parse_job(JOB.replace("hosts: 1", "hosts: 100000"))
    with pytest.raises(
        UserError,
        match="100000 hosts are 200000 processes here, and this machine's .* hold at most",
    ):
        run.run_job(job, run.LocalRun(tmp_path / "run", tmp_path), print, print)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("code", "status"),
    [(0, "done"), (77, "stopped"), (80, "stopped"), (81, "failed"), (70, "failed")],
)
def test_exit_status_follows_from_verdict(code: int, status: str) -> None:
    summary = Summary(
        verdict_for_code(code, "it ended"),
        step=None,
        seconds=history.sum_seconds([], 0.0),
        restarts={},
    )
    assert summary.to_json()["status"] == status


@pytest.mark.parametrize(
    ("text", "volumes"),
    [("secrets: {TOKEN_OF_T: {name: s, key: k}}\n", {}), ("", {"data": Path("data")})],
)
def test_errors_before_the_start_leave_no_run_folder(
    tmp_path: Path, text: str, volumes: dict[str, Path]
) -> None:
    (tmp_path / "job.yaml").write_text(JOB + text)
    local = run.LocalRun(tmp_path / "run", tmp_path, volumes)
    with pytest.raises(UserError):
        run.run_job(jobs.load_job(tmp_path / "job.yaml", ()), local, print, print)
    assert not (tmp_path / "run").exists()


def test_first_signal_stops_and_second_kills(tmp_path: Path) -> None:
    messages: list[str] = []
    sent: list[int] = []

    class Recorded:
        def send_signal(self, number: int) -> None:
            sent.append(number)

    with hold_lock(tmp_path) as lock, run.Signals(messages.append, lock) as signals:
        signals.gang = Recorded()  # type: ignore[assignment]
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert find_holder(tmp_path) == Holder(os.getpid(), is_stopping=True)
    assert sent == [signal.SIGTERM, signal.SIGKILL] and signals.count == 2
    assert messages == [
        "saving and stopping; a second signal kills",
        "killing the agents and their processes",
    ]


TRAIN = "name: t\nhosts: 1\naccelerator: {type: cpu, per_host: 1}\ntrain: {task: 'a:B'}\n"


def test_deleted_run_folder_gets_job_and_summary_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.yaml").write_text(TRAIN)
    home = tmp_path / "run"

    def generations(
        job: object, folder: RunFolder, checkpoints: object, environ: Mapping[str, str], *_: object
    ) -> Summary:
        shutil.rmtree(home)
        record = Summary(
            verdict_for_code(64, "it ended", rank=0),
            step=None,
            seconds={},
            restarts={},
            of=AttemptProgress(environ[contract.UID], 0, 1, 3.0, 4.0),
        )
        RunStarts(folder, environ[contract.UID]).write_summary(record)
        return record

    messages: list[str] = []
    monkeypatch.setattr(run, "run_generations", generations)
    end = run.run_job(
        jobs.load_job(tmp_path / "job.yaml"),
        run.LocalRun(home, tmp_path),
        lambda line: None,
        messages.append,
    )
    assert (end.code, end.reached_step) == (64, None) and "was deleted during the run" in messages[
        -1
    ]
    for folder in (home, home / "starts" / "1"):
        assert json.loads((folder / "summary.json").read_text())["verdict"]["code"] == 64
        assert "a:B" in (folder / "job.yaml").read_text()


def test_lines_are_shown_and_verdict_ends_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_job(
        job: object, local: object, show: Callable[[Line], None], *_: object, **__: object
    ) -> run.RunEnd:
        show(Line(0, 0, "trainer: saved (exit 64)"))
        verdict = verdict_for_code(contract.BAD_DATA, "no data", rank=0)
        return run.RunEnd(
            contract.BAD_DATA,
            Summary(verdict, step=3, seconds={"step": 0.0}, restarts={}).to_json(),
            57,
        )

    (tmp_path / "job.yaml").write_text(TRAIN)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    monkeypatch.setattr(cli_run, "run_job", run_job)
    process = launcher(
        capsys, monkeypatch, "run", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "run")
    )
    assert (process.code, process.out) == (contract.BAD_DATA, "[0] trainer: saved (exit 64)\n")
    assert "failed; the run is at step 57: no data (exit 65); see " in process.err


def test_agent_with_unknown_exit_code_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "agent.py"
    # Host 0's ends, with the gang's verdict, when host 1's has been started again.
    agent.write_text(
        "import os, pathlib, sys, time\n"
        f"first, again = (pathlib.Path({str(tmp_path)!r}) / name for name in ('first', 'again'))\n"
        "if os.environ['JOB_COMPLETION_INDEX'] == '0':\n"
        "    while not again.exists():\n"
        "        time.sleep(0.01)\n"
        "    sys.exit(0)\n"
        "is_first = not first.exists()\n"
        "(first if is_first else again).touch()\n"
        "sys.exit(1 if is_first else 0)\n"
    )
    monkeypatch.setattr(agents, "pack_agent", lambda otherwise: agent)
    messages: list[str] = []
    with hold_lock(tmp_path) as lock:
        gang = agents.Gang(
            dict(os.environ), jobs.parse_job(JOB.replace("hosts: 1", "hosts: 2")), 0, lock
        )
        output = HeldOutput(print, hides_echoes=False)
        assert gang.follow_output(output, messages.append) == [0, 0]
    assert messages == ["starting another agent for host 1"]
