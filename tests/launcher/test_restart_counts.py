"""Every surface shows the same number of restarts, of a run here and of a job on the cluster.

The run had two restarts in place, then its pods were lost, and new pods started attempt 4.
"""

from __future__ import annotations

import json
import random
import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent import metrics_server
from jaxlaunch.launcher.cli.list import format_table
from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
from jaxlaunch.launcher.jobs.status.job_status import derive_status
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.status import run_status
from jaxlaunch.launcher.report import run_files
from jaxlaunch.launcher.report.run import RunReader
from jaxlaunch.launcher.report.server import RunCatalog
from jaxlaunch.records.log_lines import ProgressAnnotation
from jaxlaunch.records.summary import AttemptProgress, AttemptRecord, StartRecord, Summary
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs import history
from jaxlaunch.runs.layout import hold_lock
from tests.launcher.invoke import launcher
from tests.launcher.objects import beat, ended, jobset, pod, snapshot
from tests.launcher.report import made_runs

RESTARTS = 3
BY_CAUSE = {"crash": 2, "lost": 1}


def record(attempt: int, generation: int, code: int) -> AttemptRecord:
    verdict = verdict_for_code(code, "it ended")
    began = made_runs.BEGAN + 10 * attempt
    place, steps = ("uid", generation, attempt, verdict.cause, 0), (None, None)
    return AttemptRecord(*place, *steps, {"step": 9.0}, verdict, began, began + 9)


RECORDS = [record(1, 0, contract.CRASH), record(2, 0, contract.CRASH), record(3, 0, contract.LOST)]
LAST = record(4, 1, contract.CRASH)


@pytest.mark.parametrize("has_ended", [False, True])
def test_all_views_of_a_local_run_show_the_same_restarts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    has_ended: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "made"
    run.mkdir(parents=True)
    records = [*RECORDS, LAST] if has_ended else RECORDS
    began, seconds = made_runs.BEGAN + 40, {"step": 9.0}
    progress = AttemptProgress("uid", 1, 4, began, at=began + 9, seconds=seconds, first_step=1)
    summary = Summary(
        LAST.verdict if has_ended else None,
        step=40,
        seconds={"step": 36.0},
        restarts=history.restarts_by_cause(records, progress.attempt),
        of=progress,
        starts=[StartRecord(1, "uid", made_runs.BEGAN)],
    )
    made_runs.write(run, summary, records)

    def show(*arguments: str) -> str:
        left = launcher(capsys, monkeypatch, *arguments)
        assert left.code == 0, left.err
        return left.out

    status = json.loads(show("status", "--local", "made", "-o", "json"))
    shown = {
        "summary": sum(json.loads((run / "summary.json").read_text())["restarts"].values()),
        "list": int(show("list", "--local").splitlines()[1].split()[4]),
        "list -o json": json.loads(show("list", "--local", "-o", "json"))[0]["restarts"]["total"],
        "status": number(show("status", "--local", "made")),
        "status -o json": status["restarts"]["total"],
        "explain": number(show("explain", "--local", "made")),
        "page": RunReader(run).read_report().to_json()["restarts"],
        "dashboard": run_files.read_brief(run).restart_count,
    }

    assert shown == dict.fromkeys(shown, RESTARTS)


# A kill, a preemption, restarts that a program asks for, a crash, a hang and a lost host.
CODES = (
    contract.KILLED,
    contract.PREEMPTED,
    contract.REQUEUED,
    contract.REQUEUED_CHARGED,
    contract.CRASH,
    contract.HANG,
    contract.LOST,
)
STATES = ("failed", "stopped", "done", "trains", "killed", "waits for its hosts")


@pytest.mark.parametrize("seed", range(30))
def test_random_runs_show_the_same_restarts(
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Starts, sets of agents and attempts at random; the reference is the list of attempts."""
    monkeypatch.chdir(tmp_path)
    rng, now = random.Random(seed), made_runs.BEGAN
    state = STATES[seed % len(STATES)]
    last_code = {"stopped": contract.PREEMPTED, "done": contract.DONE, "failed": contract.CRASH}
    records, starts = list[AttemptRecord](), list[StartRecord]()
    start_count = rng.randint(1, 3)
    for start in range(1, start_count + 1):
        generation, began_at = 0, now
        attempt_count = rng.randint(1, 5)
        for attempt in range(1, attempt_count + 1):
            generation += attempt > 1 and rng.random() < 0.4
            code = rng.choice(CODES)
            if (start, attempt) == (start_count, attempt_count):
                code = last_code.get(state, code)
            verdict, now = verdict_for_code(code, "it ended"), now + 10
            place = (f"uid {start}", generation, attempt, verdict.cause, 0)
            records.append(
                AttemptRecord(*place, None, None, {"step": 9.0}, verdict, now - 10, now - 1)
            )
        starts.append(StartRecord(start, f"uid {start}", began_at, now))
    last, waits = records[-1], state == "waits for its hosts"
    if state in ("trains", "killed"):
        records.pop()
    newest = [record for record in records if record.uid == last.uid]
    attempt = last.attempt + waits
    progress = AttemptProgress(
        last.uid, last.generation, attempt, last.started, at=now, seconds={}, first_step=1
    )
    summary = Summary(
        last.verdict if state in last_code else None,
        step=40,
        seconds={"step": 36.0},
        restarts=history.restarts_by_cause(newest, attempt),
        of=progress,
        starts=starts,
    )
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    made_runs.write(run, summary, records)

    def show(*arguments: str) -> str:
        result = launcher(capsys, monkeypatch, *arguments)
        assert result.code == 0, result.err
        return result.out

    with hold_lock(run) if state in ("trains", "waits for its hosts") else nullcontext():
        status = run_status(run_folders.open_run(run))
        (row,) = RunCatalog(run.parent, None).read_table()["runs"]
        page = RunReader(run).read_report().to_json()
        shown = {
            "list": int(show("list", "--local").splitlines()[1].split()[4]),
            "list -o json": json.loads(show("list", "--local", "-o", "json"))[0]["restarts"][
                "total"
            ],
            "status": number_or_0(show("status", "--local", "run")),
            "explain": number_or_0(show("explain", "--local", "run")),
            "by cause": sum((status.restarts or {}).values()),
            "page": page["restarts"],
            "dashboard": row["restarts"],
        }

    assert shown == dict.fromkeys(shown, attempt - 1)
    # The page has the attempts of all starts, and one that has not ended.
    assert len(page["attempts"]) == len(records) + (state not in last_code)


@pytest.mark.parametrize("told_by", ["pods", "left", "ended", "left, and the job failed"])
def test_all_views_of_a_cluster_job_show_the_same_restarts(told_by: str) -> None:
    """Its pods tell of it, and when they are gone, what the leader wrote on the JobSet."""
    counts = {"restarts": 1, "restartsCountTowardsMax": 1}
    job = jobset(1, status=ended("Failed", **counts) if "failed" in told_by else counts)
    if told_by == "pods":
        line = beat(attempt=4, generation=1, restarts=BY_CAUSE)
        observed = snapshot(job, pod(generation=1), records=(line,))
    else:
        verdict, ends = None, BY_CAUSE
        if "failed" in told_by:
            verdict, ends = LAST.verdict, {**BY_CAUSE, "crash": 3}
        place = ("1234", made_runs.BEGAN, told_by.split(",")[0], 4, 1)
        expected = ProgressAnnotation(*place, restarts=ends, verdict=verdict)
        job["metadata"].setdefault("annotations", {})[contract.ANNOTATION] = expected.to_json()
        observed = snapshot(job)
    status = derive_status(observed)

    facts = explain_job(observed).to_json()["facts"]
    shown = {
        "list": int(format_table([("lm", [status])], False, False)[1].split()[4]),
        "-o json": status.to_json()["restarts"]["total"],
        "by cause": sum(status.to_json()["restarts"]["by_cause"].values()),
        "explain": number("\n".join(facts)),
    }

    assert shown == dict.fromkeys(shown, RESTARTS)


def test_metrics_of_a_running_job_count_the_same_restarts() -> None:
    gang = {"attempt": 4, **history.metric_counters(RECORDS, 1, AgentJob("t", ("true",)))}

    text = metrics_server.render_agent_metrics(1, gang, {}, {}, 0.0, {}, 0.0)

    samples = re.findall(r"^jaxlaunch_restarts_total\{.*\} (\S+)$", text, re.MULTILINE)
    attempt = re.search(r"^jaxlaunch_attempt (\S+)$", text, re.MULTILINE)
    assert attempt is not None
    assert sum(map(float, samples)) == float(attempt[1]) - 1 == RESTARTS


def number_or_0(text: str) -> int:
    """Return the number of restarts, 0 if the text has no line about them."""
    return number(text) if "in the same pods" in text else 0


def number(text: str) -> int:
    """Return the number of restarts in a line of `status` or `explain`."""
    match = re.search(r"restarts:? +(\d+), of which", text)
    assert match is not None, text
    return int(match[1])
