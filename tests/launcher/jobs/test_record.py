"""What is written on a JobSet of how far its job is, over what pods and the leader's log report."""

from __future__ import annotations

from jaxlaunch.contract import ANNOTATION
from jaxlaunch.launcher.cli.list import format_table
from jaxlaunch.launcher.jobs import lifecycle
from jaxlaunch.launcher.jobs.status.job_status import State, derive_status
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from tests.launcher import objects
from tests.launcher.objects import beat, farewell, jobset, over, past, pod, snapshot, workload

LAST = beat(attempt=2, generation=1, step=40, committed=37, restarts={"crash": 1})


def snapshot_without_pods(observed: Snapshot, when: str, **changes: object) -> Snapshot:
    """The job without pods, as it is read once that was written."""
    record = lifecycle.progress_record(observed, when)
    assert record is not None
    job = jobset(1, **changes)  # type: ignore[arg-type]
    job["metadata"]["annotations"][ANNOTATION] = record.to_json()
    return snapshot(job)


def test_stopped_job_keeps_numbers_and_verdict() -> None:
    ended = over(
        0,
        80,
        message=farewell(80, "saved at step 41", attempt=2, generation=1, step=41),
        generation=1,
    )
    observed = snapshot(jobset(1, suspend=True), ended, records=(past(83), LAST))
    status = derive_status(
        snapshot_without_pods(observed, "stopped", suspend=True, status={"restarts": 1})
    )
    assert (status.state, status.step, status.committed, status.goodput) == (
        State.STOPPED,
        41,
        37,
        0.9,
    )
    assert status.restarts == {"crash": 1}
    assert status.verdict is not None and status.verdict["message"] == "saved at step 41"
    assert status.as_of == {"at": "2026-11-21T12:00:00+00:00", "when": "when it was stopped"}
    _, row = format_table([("lm", [status])], with_namespace=False, is_wide=False)
    assert row.split()[:4] == ["lm", "Stopped", "1", "41"]


def test_failed_job_keeps_exit_code() -> None:
    failed = objects.ended("Failed")
    observed = snapshot(
        jobset(1, status=failed), over(0, 83, message=farewell(83, "rank 0 raised: X"))
    )
    assert derive_status(snapshot_without_pods(observed, "ended", status=failed)).code == 83


def test_earlier_verdict_is_not_final() -> None:
    """Its last pods were killed without a report."""
    failed = objects.ended("Failed", restarts=1)
    observed = snapshot(
        jobset(1, status=failed), over(0, 137, generation=1), records=(past(80), beat(generation=1))
    )
    assert derive_status(snapshot_without_pods(observed, "ended", status=failed)).verdict is None


def test_evicted_job_keeps_step() -> None:
    queue_settings = {"queue": "research", "suspend": True}
    observed = snapshot(
        jobset(1, **queue_settings), pod(0, generation=1), records=(LAST,), workload=workload()
    )  # type: ignore[arg-type]
    status = derive_status(snapshot_without_pods(observed, "queued", **queue_settings))
    assert (status.state, status.step) == (State.QUEUED, 40)


def test_pods_override_annotation() -> None:
    old = snapshot_without_pods(
        snapshot(jobset(1), pod(0), records=(beat(step=40),)), "stopped"
    ).jobset
    status = derive_status(snapshot(dict(old), pod(0), records=(beat(step=55),)))
    assert (status.step, status.as_of) == (55, None)


def test_annotation_fills_missing_numbers() -> None:
    recorded_job = snapshot_without_pods(
        snapshot(jobset(1), pod(0), records=(beat(step=40, committed=37),)), "queued"
    ).jobset
    record = lifecycle.progress_record(
        snapshot(dict(recorded_job), over(0, 80, message=farewell(80, "saved", step=41))), "stopped"
    )
    assert record is not None
    assert (record.step, record.committed, record.goodput) == (41, 37, 0.9)


def test_silent_pods_write_no_annotation() -> None:
    assert lifecycle.progress_record(snapshot(jobset(1)), "stopped") is None
    assert (
        lifecycle.progress_record(
            snapshot_without_pods(snapshot(jobset(1), pod(0), records=(beat(),)), "stopped"),
            "ended",
        )
        is None
    )
