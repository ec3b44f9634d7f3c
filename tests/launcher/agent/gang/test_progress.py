"""The state of one process from its reports, and when its silence is a hang."""

from __future__ import annotations

from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.progress import RankProgress

DEFAULTS = contract.TIMEOUTS_S


def progress(*lines: tuple[float, dict[str, Any]], phase: str | None = None) -> RankProgress:
    made = RankProgress(0.0, phase)
    for now, line in lines:
        made.take_message(line, now)
    return made


def test_a_program_that_never_reports_never_hangs() -> None:
    assert not progress().is_overdue(DEFAULTS, 1e9)
    assert not progress((1.0, {"hello": "site"})).is_overdue(DEFAULTS, 1e9)


def test_a_phase_has_its_timeout_and_a_job_may_set_it() -> None:
    reading = progress((10.0, {"phase": "data", "step": 3}))
    assert not reading.is_overdue(DEFAULTS, 609.0) and reading.is_overdue(DEFAULTS, 611.0)
    assert reading.is_overdue(DEFAULTS | {"data": 5.0}, 16.0)
    assert not reading.is_overdue(DEFAULTS | {"data": None}, 1e9)


def test_the_step_timeout_is_learned_and_never_below_a_minute() -> None:
    quick = progress(*((float(step), {"phase": "step", "step": step}) for step in range(10)))
    assert quick.timeout_s(DEFAULTS) == 60.0
    slow = progress(*((20.0 * step, {"phase": "step", "step": step}) for step in range(10)))
    assert slow.timeout_s(DEFAULTS) == 200.0
    assert slow.timeout_s(DEFAULTS | {"step": 5.0}) == 5.0
    many_at_once = progress(
        *((20.0 * number, {"phase": "step", "step": 100 * number}) for number in range(10))
    )
    assert many_at_once.timeout_s(DEFAULTS) == 200.0


def test_a_program_that_is_done_may_go_on_and_the_trainer_must_leave() -> None:
    done = (1.0, {"phase": "done", "step": 9})
    assert not progress(done).is_overdue(DEFAULTS, 1e9)
    assert progress(done).is_overdue(DEFAULTS | {"done": 5.0}, 7.0)
    assert progress(done, phase="init").is_overdue(DEFAULTS, 302.0)


def test_the_first_steps_may_take_as_long_as_a_compile() -> None:
    assert progress((0.0, {"phase": "step", "step": 0})).timeout_s(DEFAULTS) == 1800.0


def test_a_save_between_two_steps_is_no_steps_time() -> None:
    lines = [(float(step), {"phase": "step", "step": step}) for step in range(5)]
    lines += [(5.0, {"phase": "save", "step": 5}), (900.0, {"phase": "step", "step": 5})]
    assert progress(*lines).timeout_s(DEFAULTS) == 60.0


def test_a_repeated_line_is_no_progress() -> None:
    stuck = progress(*((float(second), {"phase": "data", "step": 3}) for second in range(700)))
    assert stuck.is_overdue(DEFAULTS, 700.0)


def test_committed_steps_only_grow() -> None:
    of = progress((0.0, {"committed": 20}), (1.0, {"committed": 10}))
    assert (of.status.committed, of.status.step) == (20, None)


def waiting_for_data(
    before: float, wait: float, step_s: float, count: int
) -> list[tuple[float, dict[str, Any]]]:
    """What a trainer reports whose every step waits for its batch."""
    lines: list[tuple[float, dict[str, Any]]] = []
    for step in range(count):
        lines += [
            (before, {"phase": "data", "step": step}),
            (before + wait, {"phase": "step", "step": step}),
        ]
        before += wait + step_s
    return lines


def test_a_job_that_waits_for_data_before_every_step_learns_its_steps() -> None:
    quick = progress(*waiting_for_data(0.0, 5.0, 1.0, count=6))
    assert quick.timeout_s(DEFAULTS) == 60.0
    slow = progress(*waiting_for_data(0.0, 5.0, 20.0, count=6))
    assert slow.timeout_s(DEFAULTS) == 200.0  # the wait is no part of the step


def test_a_wait_for_data_within_the_count_of_steps_is_no_steps_time() -> None:
    lines: list[tuple[float, dict[str, Any]]] = []
    for step in range(
        6
    ):  # a program that counts a step when its batch was used, and reports the wait in between
        at = 100.0 * step
        lines += [(at, {"phase": "step", "step": step}), (at + 20.0, {"phase": "data"})]
        lines += [(at + 90.0, {"phase": "step"})]
    assert progress(*lines).timeout_s(DEFAULTS) == 300.0


def test_an_evaluation_or_a_save_after_every_step_does_not_keep_it_from_being_learned() -> None:
    lines: list[tuple[float, dict[str, Any]]] = []
    for step in range(6):
        lines += [
            (40.0 * step, {"phase": "step", "step": step}),
            (40.0 * step + 2.0, {"phase": "save", "step": step + 1}),
        ]
    lines.append((240.0, {"phase": "step", "step": 6}))
    assert progress(*lines).timeout_s(DEFAULTS) == 60.0


def test_what_was_restored_is_saved_but_not_committed_by_this_attempt() -> None:
    progress = RankProgress(0.0)
    progress.take_message({"found": 40}, 1.0)
    assert (progress.status.committed, progress.status.first_step) == (40, None)
    progress.take_message({"restored": 40}, 1.0)
    assert (progress.status.committed, progress.status.first_committed) == (40, None)
    progress.take_message({"committed": 60}, 2.0)
    progress.take_message({"committed": 80}, 3.0)
    assert (progress.status.committed, progress.status.first_committed) == (80, 60)
