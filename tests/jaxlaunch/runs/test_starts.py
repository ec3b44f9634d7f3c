"""The record of each start on a cluster: the job of its pods, and what changed since the last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.gang import config
from jaxlaunch.launcher.agent.leader.reporter import job_fields
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.records.summary import AttemptProgress, Summary
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs.run_folder import RunFolder, RunStarts, changed_keys


def write_start(
    folder: Path, uid: str, train: dict[str, Any], *, first: int | None = 1, hosts: int = 4
) -> RunStarts:
    """A start that trained from step `first` on, and ended."""
    job = AgentJob("t", sizes=(1, 3), timeouts_s={"step": None, "save": 90.0})
    environ = {
        contract.LEADER: "h:1",
        contract.INDEX: "0",
        contract.UID: uid,
        contract.JOB: job.to_json(),
    }
    environ |= {
        contract.HOSTS: str(hosts),
        contract.SLICES: "1",
        contract.TRAIN_SPEC: json.dumps(train),
    }
    starts = RunStarts(RunFolder(folder, pytest.fail), uid)
    starts.keep_job(job_fields(config.read_config(environ), environ))
    progress = AttemptProgress(uid, 0, 1, 1.0, 2.0, first_step=first)
    starts.write_summary(Summary(None, step=None, seconds={}, restarts={}, of=progress))
    assert read_file(folder, "summary.json")["starts"][-1]["ended"] is None
    code = contract.BAD_SPEC if first is None else contract.DONE
    starts.write_summary(
        Summary(
            verdict_for_code(code, "it ended"), step=first, seconds={}, restarts={}, of=progress
        )
    )
    return starts


def read_file(folder: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / name).read_text())
    return content


def test_starts_record_job_and_changes(tmp_path: Path) -> None:
    data = {"source": "torch", "dataset": "a:B", "args": {"token": "hf_secret"}}
    train = {"task": "classify", "batch": 24, "data": data}
    write_start(tmp_path, "a", {**train, "optimizer": {"lr": 0.1}})
    first = read_file(tmp_path, "starts/1/job.yaml")
    assert first["train"]["data"] == {**data, "args": {"token": "…"}}
    assert (first["name"], first["hosts"], first["timeouts"]) == (
        "t",
        {"min": 1, "max": 3},
        {"save": 90},
    )
    assert (
        jobs.parse_job(json.dumps(first)).train is not None
    )  # the commands that read a run's job read this
    write_start(tmp_path, "b", {**train, "optimizer": {"lr": 0.2}}, first=None)  # it was refused
    write_start(tmp_path, "a-later", {**train, "optimizer": {"lr": 0.1}, "seed": 8}, first=5)
    write_start(
        tmp_path, "a-later", {"optimizer": {"lr": 0.3}}, first=5
    )  # the next pods of the same JobSet
    rows = read_file(tmp_path, "summary.json")["starts"]
    assert [row["changed"] for row in rows] == [
        {},
        {"train.optimizer.lr": [0.1, 0.2]},
        {"train.seed": [None, 8]},
    ]
    assert read_file(tmp_path, "starts/1/job.yaml") == first
    assert read_file(tmp_path, "job.yaml") == read_file(tmp_path, "starts/3/job.yaml") != first


def test_start_after_local_start_records_no_change(tmp_path: Path) -> None:
    write_start(tmp_path, "a", {"batch": 8})
    (tmp_path / "starts" / "1" / "job.yaml").write_text("name: t\ntrain: {batch: 4}\n")
    write_start(tmp_path, "b", {"batch": 8})
    assert read_file(tmp_path, "summary.json")["starts"][1]["changed"] == {}
    environ = {
        contract.LEADER: "h:1",
        contract.INDEX: "0",
        contract.UID: "c",
        contract.JOB: AgentJob("t").to_json(),
    }
    environ |= {contract.HOSTS: "1", contract.SLICES: "1", contract.TRAIN_SPEC: "{"}
    assert "train" not in job_fields(config.read_config(environ), environ)


@pytest.mark.parametrize("code", [contract.BAD_SPEC, contract.BAD_DATA, contract.NO_CHECKPOINT])
@pytest.mark.parametrize("earlier_code", [contract.DONE, contract.CRASH])
def test_refused_start_keeps_the_result_of_the_run(
    tmp_path: Path, code: int, earlier_code: int
) -> None:
    folder = RunFolder(tmp_path, pytest.fail)
    for uid, end, step in (("a", earlier_code, 7), ("b", code, None), ("c", code, None)):
        starts, progress = RunStarts(folder, uid), AttemptProgress(uid, 0, 1, 1.0, 2.0)
        if step is not None:
            progress = AttemptProgress(uid, 0, 1, 1.0, 2.0, first_step=1)
        starts.begin_start({})
        assert read_file(tmp_path, "summary.json")["status"] == "running"
        verdict = verdict_for_code(end, f"the end of {uid}")
        starts.write_summary(Summary(verdict, step=step, seconds={}, restarts={}, of=progress))
        summary = read_file(tmp_path, "summary.json")
        assert (summary["verdict"]["message"], summary["step"]) == ("the end of a", 7)
        own = RunStarts(folder, uid).read_own_summary()
        assert own is not None and own.verdict is not None and own.verdict.code == end
    assert [(row["code"], row["refusal"]) for row in summary["starts"]] == [
        (earlier_code, ""),
        (code, "the end of b"),
        (code, "the end of c"),
    ]
    assert read_file(tmp_path, "starts/1/summary.json")["of"]["uid"] == "a"
    assert read_file(tmp_path, "starts/2/summary.json")["of"]["uid"] == "b"
    row = folder.read_summary_row()
    assert row is not None and [start.start for start in row.starts] == [1, 3]
    # A start that trains again is the run's result, whatever was refused before it.
    starts = RunStarts(folder, "d")
    progress = AttemptProgress("d", 0, 1, 1.0, 2.0, first_step=8)
    verdict = verdict_for_code(contract.CRASH, "the end of d")
    starts.write_summary(Summary(verdict, step=9, seconds={}, restarts={}, of=progress))
    assert read_file(tmp_path, "summary.json")["verdict"]["message"] == "the end of d"


def test_refused_start_does_not_touch_a_run_that_continues(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, pytest.fail)
    running = RunStarts(folder, "a")
    progress = AttemptProgress("a", 0, 1, 1.0, 2.0, first_step=1)
    running.write_summary(Summary(None, step=3, seconds={}, restarts={}, of=progress))
    second = RunStarts(folder, "b")
    second.begin_start({})
    running.write_summary(Summary(None, step=5, seconds={}, restarts={}, of=progress))
    verdict = verdict_for_code(contract.NO_CHECKPOINT, "another run owns the folder")
    of_second = AttemptProgress("b", 0, 1, 1.0, 2.0)
    second.write_summary(Summary(verdict, seconds={}, restarts={}, of=of_second))
    summary = read_file(tmp_path, "summary.json")
    assert (summary["status"], summary["step"], summary["of"]["uid"]) == ("running", 5, "a")


def test_values_of_an_added_block_that_may_be_secret_are_not_shown() -> None:
    job = {"jobs": {"trainer": {"env": {"TOKEN": "s3cret"}}}}
    role = {"env": {"TOKEN": "s3cret"}, "hosts": 2}
    other = {"jobs": {**job["jobs"], "evaluator": role}}
    for old, new in ((job, other), (other, job)):
        assert "s3cret" not in str(dict(changed_keys("", old, new)))
    assert dict(changed_keys("", job, other))["jobs.evaluator"][1]["hosts"] == 2
