"""How a run on this machine ended, from what its agents left."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.local.bookkeeping import close_summary, end_generation
from jaxlaunch.records.summary import AttemptProgress, Summary
from jaxlaunch.records.verdict import (
    ExceptionFacts,
    Failure,
    FailureKind,
    LostHost,
    StopFacts,
    StopOutcome,
    StopReason,
    verdict_for_code,
)
from jaxlaunch.runs import run_folder
from jaxlaunch.runs.run_folder import RunFolder, RunStarts


def raise_failure(text: str) -> None:
    pytest.fail(text)


def make_summary(attempt: int = 1, generation: int = 0, **fields: Any) -> Summary:
    """A run under way: ten seconds of steps, four of them since the commit of step 40."""
    now = time.time()
    seconds = dict.fromkeys(contract.CLOCK_CAUSES, 0.0) | {"step": 10.0}
    progress = AttemptProgress(
        "uid", generation, attempt, now - 10.0, now, seconds, 20, 40, unsafe_s=4.0
    )
    progress = dataclasses.replace(
        progress, **{name: fields.pop(name) for name in list(fields) if hasattr(progress, name)}
    )
    values: dict[str, Any] = {
        "step": 43,
        "seconds": seconds,
        "restarts": {},
        "committed": 40,
        "of": progress,
        **fields,
    }
    return Summary(None, **values)


def write_summary(folder: RunFolder, summary: Summary) -> None:
    """Writes it as the agents of its run do."""
    assert summary.of is not None
    RunStarts(folder, summary.of.uid).write_summary(summary)


def end_and_read(
    folder: Path, codes: list[int], generation: int = 0, **fields: Any
) -> dict[str, Any]:
    """summary.json after the agents of a generation left with `codes`."""
    options: dict[str, Any] = {"is_stopped": False, "started_at": time.time() - 60.0, **fields}
    end_generation(
        RunFolder(folder, raise_failure),
        "uid",
        generation,
        codes,
        folder / "checkpoints",
        **options,
    )
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def read_attempts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "attempts.jsonl").read_text().splitlines()]


def test_attempt_of_killed_agent_is_recorded_as_lost(tmp_path: Path) -> None:
    write_summary(RunFolder(tmp_path, raise_failure), make_summary())
    summary = end_and_read(tmp_path, [-9])
    assert (summary["status"], summary["step"], summary["saved"]) == ("failed", 43, 40)
    assert (summary["verdict"]["code"], summary["verdict"]["rank"]) == (contract.LOST, 0)
    assert "host 0's agent was killed by SIGKILL" in summary["verdict"]["message"]
    (record,) = read_attempts(tmp_path)
    assert (record["attempt"], record["cause"], record["last_committed"]) == (1, "lost", 40)
    assert record["seconds"]["step"] == 6.0 and record["seconds"]["lost_work"] == 4.0


KILLED = "(its agent was killed by SIGKILL (by the kernel because memory ran out, or by a person))"


LOST_LEADER = Failure(FailureKind.HOST_LOST, lost_hosts=(LostHost(0, "connection closed"),))
NOT_SAVED = Failure(
    FailureKind.STOPPED,
    stop=StopFacts(StopReason.OUTSIDE, StopOutcome.NOT_SAVED, committed_step=40),
    cause=LOST_LEADER,
)


@pytest.mark.parametrize(
    ("code", "facts", "message"),
    [
        (81, LOST_LEADER, f"host 0 was lost: connection closed {KILLED}"),
        (
            81,
            Failure(FailureKind.HOST_LOST, lost_hosts=(LostHost(1, "no message for 10 s", 2, 3),)),
            "host 1 (ranks 2 to 3) was lost: no message for 10 s",
        ),
        (
            80,
            NOT_SAVED,
            f"stopped from outside: not saved: host 0 was lost: connection closed {KILLED}; step "
            "40 is saved",
        ),
    ],
)
@pytest.mark.parametrize("is_written", [True, False], ids=["whole", "killed after the record"])
def test_lost_host_is_recorded_with_signal_of_its_agent(
    tmp_path: Path, code: int, facts: Failure, message: str, is_written: bool
) -> None:
    folder = RunFolder(tmp_path, raise_failure)
    verdict = verdict_for_code(code, facts, rank=0, host=0, step=43)
    written = make_summary()
    assert written.of is not None
    folder.append_record(
        run_folder.close_unfinished(dataclasses.replace(written.of, uid="another"), verdict)
    )
    folder.append_record(run_folder.close_unfinished(written.of, verdict))
    write_summary(
        folder,
        dataclasses.replace(written, verdict=verdict)
        if is_written
        else dataclasses.replace(written, step=0),
    )
    summary = end_and_read(tmp_path, [-9, code])
    assert (summary["verdict"]["message"], summary["step"]) == (message, 43)
    assert [record["verdict"]["message"] for record in read_attempts(tmp_path)] == [
        verdict.message,
        message,
    ]


@pytest.mark.parametrize(
    ("code", "facts", "message"),
    [
        (
            82,
            Failure(FailureKind.EXIT_CODE, rank=1, exit_code=3),
            "rank 1's program ended with exit code 3",
        ),
        (81, LOST_LEADER, f"host 0 was lost: connection closed {KILLED}"),
        (
            80,
            NOT_SAVED,
            f"stopped from outside: not saved: host 0 was lost: connection closed {KILLED}; step "
            "60 is saved",
        ),
    ],
)
def test_unreported_saved_step_is_recorded(
    tmp_path: Path, code: int, facts: Failure, message: str
) -> None:
    folder, written = RunFolder(tmp_path, raise_failure), make_summary(first_step=1)
    assert written.of is not None
    folder.append_record(
        run_folder.close_unfinished(
            written.of, verdict := verdict_for_code(code, facts, rank=0, host=0, step=43)
        )
    )
    write_summary(folder, dataclasses.replace(written, verdict=verdict))
    for step in (40, 60):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(step) / contract.MANIFEST).touch()
    summary = end_and_read(tmp_path, [-9, code])
    verdict_step = 43 if code == 82 else 60  # of the rank that the verdict names
    assert (summary["saved"], summary["step"], summary["verdict"]["step"]) == (60, 60, verdict_step)
    assert summary["verdict"]["message"] == message
    assert [
        (record["last_committed"], record["verdict"]["step"]) for record in read_attempts(tmp_path)
    ] == [(60, verdict_step)]


def test_all_seconds_are_counted_after_a_kill(tmp_path: Path) -> None:
    write_summary(RunFolder(tmp_path, raise_failure), make_summary())
    seconds = end_and_read(tmp_path, [-9])["goodput"]["seconds"]
    assert sum(seconds.values()) == pytest.approx(60.0, abs=1.0)
    assert (seconds["step"], seconds["lost_work"]) == (6.0, 4.0)


def test_three_killed_generations_without_commit_are_no_progress(tmp_path: Path) -> None:
    causes = []
    for generation in range(3):
        fruitless: dict[str, Any] = {
            "first_committed": None,
            "last_committed": None,
            "committed": None,
        }
        write_summary(
            RunFolder(tmp_path, raise_failure),
            make_summary(generation + 1, generation, **fruitless),
        )
        summary = end_and_read(tmp_path, [-9], generation)
        causes.append(summary["verdict"]["code"])
    assert causes == [81, 81, 79]
    assert [record["attempt"] for record in read_attempts(tmp_path)] == [1, 2, 3]
    assert summary["restarts"] == {"lost": 2}


def test_agents_that_wrote_nothing_are_lost_attempts(tmp_path: Path) -> None:
    codes = [
        end_and_read(tmp_path, [-9, -9], generation)["verdict"]["code"] for generation in range(3)
    ]
    assert codes == [81, 81, 79]
    assert (
        "every agent was killed: host 0's was killed by SIGKILL"
        in read_attempts(tmp_path)[0]["verdict"]["message"]
    )


@pytest.mark.parametrize(
    ("saved_step", "words"), [(40, "step 40 is saved"), (None, "nothing is saved")]
)
def test_run_killed_by_user_reports_saved_step(
    tmp_path: Path, saved_step: int | None, words: str
) -> None:
    write_summary(RunFolder(tmp_path, raise_failure), make_summary(committed=saved_step))
    summary = end_and_read(tmp_path, [-9], is_stopped=True)
    assert (summary["status"], summary["verdict"]["code"]) == ("stopped", contract.PREEMPTED)
    assert summary["verdict"]["message"] == f"stopped by you; {words}"


@pytest.mark.parametrize(
    ("first", "step", "last_committed"),
    [(1, 13, 13), (14, 3, None)],
    ids=["its own", "an earlier start's"],
)
def test_run_killed_during_a_save_reports_step_on_disk(
    tmp_path: Path, first: int, step: int, last_committed: int | None
) -> None:
    (tmp_path / "checkpoints" / "13").mkdir(parents=True)
    (tmp_path / "checkpoints" / "13" / contract.MANIFEST).touch()
    (tmp_path / "checkpoints" / "20").mkdir()  # is not whole
    progress = {"first_committed": None, "last_committed": None, "first_step": first}
    write_summary(
        RunFolder(tmp_path, raise_failure), make_summary(step=3, committed=None, **progress)
    )
    summary = end_and_read(tmp_path, [-9], is_stopped=True)
    assert (summary["verdict"]["message"], summary["saved"]) == (
        "stopped by you; step 13 is saved",
        13,
    )
    assert (summary["step"], summary["verdict"]["step"]) == (step, step)
    assert read_attempts(tmp_path)[0]["last_committed"] == last_committed


@pytest.mark.parametrize(
    ("remaining_step", "words"),
    [
        (None, "stopped by you; nothing is saved; step 40 was, and somebody deleted it"),
        (30, "stopped by you; step 30 is saved; step 40 was, and somebody deleted it"),
        (40, "stopped by you; step 40 is saved"),
    ],
)
def test_deleted_step_is_not_reported_as_saved(
    tmp_path: Path, remaining_step: int | None, words: str
) -> None:
    if remaining_step is not None:
        (tmp_path / "checkpoints" / str(remaining_step)).mkdir(parents=True)
        (tmp_path / "checkpoints" / str(remaining_step) / contract.MANIFEST).touch()
    write_summary(RunFolder(tmp_path, raise_failure), make_summary())
    summary = end_and_read(tmp_path, [-9], is_stopped=True, has_train_block=True)
    assert (summary["verdict"]["message"], summary["saved"]) == (words, remaining_step)


def test_step_deleted_after_the_report_is_not_reported_as_saved(
    tmp_path: Path,
) -> None:
    verdict = verdict_for_code(contract.PREEMPTED, NOT_SAVED, step=43)
    write_summary(
        RunFolder(tmp_path, raise_failure), dataclasses.replace(make_summary(), verdict=verdict)
    )
    summary = end_and_read(tmp_path, [80], is_stopped=True, has_train_block=True)
    assert (summary["saved"], summary["verdict"]["message"]) == (
        None,
        verdict.message.replace("40 is saved", "40 was saved, and somebody deleted it"),
    )


def test_unavailable_storage_leaves_the_record_unchanged(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to("x" * 300)  # an OSError for everyone, root too
    write_summary(RunFolder(tmp_path, raise_failure), make_summary())
    summary = end_and_read(tmp_path, [-9], has_train_block=True)
    assert (summary["verdict"]["code"], summary["saved"]) == (contract.LOST, 40)


def test_verdict_before_the_kill_is_kept(tmp_path: Path) -> None:
    judged = verdict_for_code(contract.CRASH, "rank 1 raised", rank=1, step=43)
    write_summary(RunFolder(tmp_path, raise_failure), make_summary(judged=judged))
    summary = end_and_read(tmp_path, [-9])
    assert summary["verdict"] == judged.to_json() and read_attempts(tmp_path)[0]["cause"] == "crash"


def test_job_result_is_final(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, raise_failure)
    done = dataclasses.replace(
        make_summary(),
        verdict=verdict_for_code(contract.DONE, "done"),
        metrics={"loss": 1.5},
        notes=["a"],
    )
    write_summary(folder, done)
    summary = end_and_read(tmp_path, [-9], is_stopped=True)
    assert (summary["status"], summary["metrics"], summary["notes"]) == (
        "done",
        {"loss": 1.5},
        ["a"],
    )
    assert not (tmp_path / "attempts.jsonl").exists()


@pytest.mark.parametrize(
    ("codes", "code"), [([-9, 83], 83), ([0, 0], 0), ([-9, -15], 81), ([1], 81), ([80], 80)]
)
def test_agents_that_cannot_write_exit_with_code_of_gang(
    tmp_path: Path, codes: list[int], code: int
) -> None:
    write_summary(RunFolder(tmp_path, raise_failure), make_summary())
    assert end_and_read(tmp_path, codes)["verdict"]["code"] == code


def test_summary_of_another_run_is_ignored(tmp_path: Path) -> None:
    write_summary(RunFolder(tmp_path, raise_failure), make_summary(uid="other"))
    summary = end_and_read(tmp_path, [-9])
    assert (summary["step"], summary["of"]["uid"]) == (None, "uid")


def test_run_killed_after_its_record_has_step_of_the_record(
    tmp_path: Path,
) -> None:
    folder, written = RunFolder(tmp_path, raise_failure), make_summary(step=0)
    assert written.of is not None
    folder.append_record(
        run_folder.close_unfinished(
            written.of, verdict_for_code(82, "rank 1 makes no progress", rank=1, host=0, step=43)
        )
    )
    write_summary(folder, written)
    close_summary(folder, tmp_path / "checkpoints")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["verdict"]["cause"]) == (
        "failed",
        43,
        "hang",
    )


def test_leader_closes_records_of_earlier_pods(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, raise_failure)
    write_summary(folder, make_summary())
    for _ in range(2):
        (record,) = run_folder.settle_records(folder, "uid")
        assert (record.attempt, record.cause, record.last_committed) == (1, "lost", 40)
    assert len(read_attempts(tmp_path)) == 1


def test_full_disk_ends_the_run_after_another_failure(tmp_path: Path) -> None:
    full = ExceptionFacts("OSError", "No space left on device", is_storage_full=True)
    for generation, exception in enumerate((ExceptionFacts("KeyError", "3"), full)):
        code = (contract.CRASH, contract.STORAGE)[generation]
        facts = Failure(FailureKind.EXCEPTION, rank=0, exception=exception)
        judged = verdict_for_code(code, facts, rank=0, step=43)
        write_summary(
            RunFolder(tmp_path, raise_failure),
            make_summary(generation + 1, generation, judged=judged, first_committed=None),
        )
        summary = end_and_read(tmp_path, [-9], generation)
    assert (
        summary["verdict"]["code"] == contract.STORAGE
        and "No space left" in summary["verdict"]["message"]
    )
