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


def later(seen: Snapshot, when: str, **now: object) -> Snapshot:
    """The job without pods, as it is read once that was written."""
    found = lifecycle.progress_record(seen, when)
    assert found is not None
    made = jobset(1, **now)  # type: ignore[arg-type]
    made["metadata"]["annotations"][ANNOTATION] = found.to_json()
    return snapshot(made)


def test_a_stopped_job_keeps_its_step_its_checkpoint_its_goodput_its_restarts_and_its_verdict() -> (
    None
):
    ended = over(
        0,
        80,
        message=farewell(80, "saved at step 41", attempt=2, generation=1, step=41),
        generation=1,
    )
    seen = snapshot(jobset(1, suspend=True), ended, records=(past(83), LAST))
    status = derive_status(later(seen, "stopped", suspend=True, status={"restarts": 1}))
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


def test_a_job_that_failed_keeps_its_exit_code_although_its_pods_are_gone() -> None:
    failed = objects.ended("Failed")
    seen = snapshot(jobset(1, status=failed), over(0, 83, message=farewell(83, "rank 0 raised: X")))
    assert derive_status(later(seen, "ended", status=failed)).code == 83


def test_the_verdict_of_an_attempt_before_is_not_that_of_the_end() -> None:
    """Its last pods were killed, and said nothing."""
    failed = objects.ended("Failed", restarts=1)
    seen = snapshot(
        jobset(1, status=failed), over(0, 137, generation=1), records=(past(80), beat(generation=1))
    )
    assert derive_status(later(seen, "ended", status=failed)).verdict is None


def test_a_job_that_its_queue_took_from_its_nodes_keeps_how_far_it_was() -> None:
    held = {"queue": "research", "suspend": True}
    seen = snapshot(jobset(1, **held), pod(0, generation=1), records=(LAST,), workload=workload())  # type: ignore[arg-type]
    status = derive_status(later(seen, "queued", **held))
    assert (status.state, status.step) == (State.QUEUED, 40)


def test_newer_words_of_the_pods_count_before_what_was_written() -> None:
    old = later(snapshot(jobset(1), pod(0), records=(beat(step=40),)), "stopped").jobset
    status = derive_status(snapshot(dict(old), pod(0), records=(beat(step=55),)))
    assert (status.step, status.as_of) == (55, None)


def test_what_the_pods_no_longer_say_is_kept_from_what_was_written() -> None:
    known = later(
        snapshot(jobset(1), pod(0), records=(beat(step=40, committed=37),)), "queued"
    ).jobset
    found = lifecycle.progress_record(
        snapshot(dict(known), over(0, 80, message=farewell(80, "saved", step=41))), "stopped"
    )
    assert found is not None
    assert (found.step, found.committed, found.goodput) == (41, 37, 0.9)


def test_nothing_is_written_of_a_job_whose_pods_said_nothing() -> None:
    assert lifecycle.progress_record(snapshot(jobset(1)), "stopped") is None
    assert (
        lifecycle.progress_record(
            later(snapshot(jobset(1), pod(0), records=(beat(),)), "stopped"), "ended"
        )
        is None
    )
