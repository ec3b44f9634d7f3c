"""A run on this machine, short of starting one."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.verdict import of_code
from jaxlaunch.launcher.agent.leader import reported_fields
from jaxlaunch.launcher.agent.leader.run_folder import RunFolder
from jaxlaunch.launcher.agent.leader.summary import Of, Summary
from jaxlaunch.launcher.cli import run as cli_run
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.local import run
from jaxlaunch.launcher.logs.lines import Line
from tests.launcher.invoke import launcher

JOB = "name: t\nhosts: 1\naccelerator: {type: cpu, per_host: 1}\ncommand: [true]\n"


@pytest.mark.parametrize(
    ("code", "status"), [(0, "done"), (77, "stopped"), (80, "stopped"), (81, "failed"), (70, "failed")]
)
def test_the_status_follows_from_the_verdict(code: int, status: str) -> None:
    summary = Summary(of_code(code, "it ended"), step=None, seconds=reported_fields.carried([], 0.0), restarts={})
    assert summary.to_json()["status"] == status


@pytest.mark.parametrize(
    ("text", "volumes"), [("secrets: {TOKEN_OF_T: {name: s, key: k}}\n", {}), ("", {"data": Path("data")})]
)
def test_what_is_wrong_before_the_start_leaves_no_run_folder(
    tmp_path: Path, text: str, volumes: dict[str, Path]
) -> None:
    (tmp_path / "job.yaml").write_text(JOB + text)
    local = run.LocalRun(tmp_path / "run", tmp_path, volumes)
    with pytest.raises(UserError):
        run.run(jobs.load(tmp_path / "job.yaml", ()), local, print, print)
    assert not (tmp_path / "run").exists()


def test_the_first_signal_stops_and_the_second_kills(tmp_path: Path) -> None:
    said: list[str] = []
    sent: list[int] = []

    class Recorded:
        def signal(self, number: int) -> None:
            sent.append(number)

    with run.Signals(said.append) as signals:
        signals.gang = Recorded()  # type: ignore[assignment]
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert sent == [signal.SIGTERM, signal.SIGKILL] and signals.received == 2
    assert said == ["saving and stopping; a second signal kills", "killing the agents and their processes"]


TRAIN = "name: t\nhosts: 1\naccelerator: {type: cpu, per_host: 1}\ntrain: {task: 'a:B'}\n"


def after(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    code: int,
    message: str = "it ended",
    then: Callable[[Path], object] = lambda folder: None,
) -> tuple[run.Ended, list[str]]:
    """A run that ended with `code` before it did anything, in the folder of one that is done."""
    (folder / "job.yaml").write_text(text)
    home = folder / "run"
    (home / "logs").mkdir(parents=True)
    done = Summary(of_code(0, "done"), step=57, seconds={"step": 5.0}, restarts={}, of=Of("first", 0, 1, 1.0, 2.0))
    done.write(RunFolder(home, print))

    def generations(*_: object) -> Summary:
        (home / "logs" / "rank-0.log").write_text("second\n")
        then(home)
        found = Summary(
            of_code(code, message, rank=0), None, {"init": 1.0, "step": 0.0}, {}, of=Of("second", 0, 1, 3.0, 4.0)
        )
        found.write(RunFolder(home, print))
        return found

    said: list[str] = []
    monkeypatch.setattr(run, "generations", generations)
    ended = run.run(jobs.load(folder / "job.yaml", ()), run.LocalRun(home, folder), lambda line: None, said.append)
    return ended, said


@pytest.mark.parametrize("code", [64, 77, 80, 81, 83, 84])
def test_a_run_that_ends_before_its_first_step_leaves_the_record_of_a_finished_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    volume = "volumes: [{claim: data, path: /data}]\n"
    ended, _ = after(tmp_path, monkeypatch, TRAIN + volume, code)
    assert (ended.code, ended.is_restored, ended.is_refused, ended.stands_at) == (code, True, code == 64, 57)
    assert RunFolder(tmp_path / "run", print).read("summary.json")["status"] == "done"
    assert sorted(os.listdir(tmp_path / "run")) == [".lock", "logs", "summary.json"]
    assert os.listdir(tmp_path / "run" / "logs") == []


def test_a_program_of_the_job_s_own_that_failed_twice_alike_keeps_its_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, _ = after(tmp_path, monkeypatch, JOB, contract.STARTUP, "rank 0's program ended with exit code 3; so did")
    assert not ended.is_restored and (tmp_path / "run" / "logs" / "rank-0.log").read_text() == "second\n"


def test_a_refused_run_whose_folder_was_deleted_has_a_summary_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, said = after(tmp_path, monkeypatch, TRAIN, contract.STARTUP, then=shutil.rmtree)
    assert (ended.code, ended.is_restored) == (contract.STARTUP, False)
    assert "was deleted during the run" in said[-1] and (tmp_path / "run" / "job.yaml").exists()
    assert RunFolder(tmp_path / "run", print).read("summary.json")["verdict"]["code"] == contract.STARTUP


def test_a_refused_run_whose_kept_record_was_deleted_is_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, _ = after(tmp_path, monkeypatch, TRAIN, 64, then=lambda home: shutil.rmtree(home / ".earlier"))
    assert (ended.code, ended.is_restored) == (64, False)
    assert RunFolder(tmp_path / "run", print).read("summary.json")["of"]["uid"] == "second"


@pytest.mark.parametrize(
    ("kind", "text", "is_shown"),
    [
        (JOB, "trainer: saved (exit 64)", True),
        (TRAIN, "trainer: validation is over (exit 0)", True),
        (TRAIN, contract.refusal_line("no data", contract.BAD_DATA), False),
    ],
)
def test_only_what_the_verdict_repeats_is_not_shown(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    text: str,
    is_shown: bool,
) -> None:
    def run_job(job: object, local: object, show: Callable[[Line], None], *_: object, **__: object) -> run.Ended:
        show(Line(0, 0, text))
        verdict = of_code(contract.BAD_DATA, "no data", rank=0)
        return run.Ended(contract.BAD_DATA, Summary(verdict, 3, {"step": 0.0}, {}).to_json(), True, True, 57)

    (tmp_path / "job.yaml").write_text(kind)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "summary.json").write_text("{}")
    monkeypatch.setattr(cli_run, "run_job", run_job)
    left = launcher(capsys, monkeypatch, "run", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path / "run"))
    assert (left.code, text in left.out) == (contract.BAD_DATA, is_shown)
    assert "refused; the run is at step 57: no data (exit 65); " in left.err and "see " not in left.err
