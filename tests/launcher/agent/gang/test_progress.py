"""The state of one process from its reports, and when its silence is a hang."""

from __future__ import annotations

from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.progress import RankProgress

DEFAULTS = dict(contract.TIMEOUTS_S)


def progress(*lines: tuple[float, dict[str, Any]], phase: str | None = None) -> RankProgress:
    created = RankProgress(0.0, phase)
    for now, line in lines:
        created.take_message(line, now)
    return created


def is_overdue(created: RankProgress, timeouts_s: dict[str, float | None], now: float) -> bool:
    timeout = created.find_deadline(timeouts_s, now)
    return timeout is not None and timeout.left_s < 0


def test_program_without_reports_has_no_timeout() -> None:
    assert not is_overdue(progress(), DEFAULTS, 1e9)
    assert not is_overdue(progress((1.0, {"hello": "site"})), DEFAULTS, 1e9)


def test_first_step_has_a_timeout_from_the_start_of_the_program() -> None:
    timeouts = DEFAULTS | {"first_step": 30.0}
    assert not is_overdue(progress(), timeouts, 29.0) and is_overdue(progress(), timeouts, 31.0)
    # Neither another interpreter of the same process nor a phase begins it again.
    lines = [(0.0, {"hello": "site"}), (20.0, {"hello": "site"}), (25.0, {"phase": "restore"})]
    starting = progress(*lines)
    assert starting.find_deadline(timeouts, 31.0) == ("first_step", 30.0, 31.0)
    # The timeout of the phase counts, too, if it passes first.
    phase = progress(*lines).find_deadline(timeouts | {"restore": 2.0}, 28.0)
    assert phase == ("restore", 2.0, 3.0)
    assert not is_overdue(progress(*lines, (29.0, {"phase": "step", "step": 0})), timeouts, 99.0)
    assert not is_overdue(progress(*lines, (29.0, {"atexit": True})), timeouts, 99.0)


def test_phase_has_default_timeout_or_that_of_the_job() -> None:
    reading = progress((10.0, {"phase": "data", "step": 3}))
    assert not is_overdue(reading, DEFAULTS, 609.0) and is_overdue(reading, DEFAULTS, 611.0)
    assert is_overdue(reading, DEFAULTS | {"data": 5.0}, 16.0)
    assert not is_overdue(reading, DEFAULTS | {"data": None}, 1e9)


def test_step_timeout_is_learned_and_at_least_a_minute() -> None:
    quick = progress(*((float(step), {"phase": "step", "step": step}) for step in range(10)))
    assert quick.timeout_s(DEFAULTS) == 60.0
    slow = progress(*((20.0 * step, {"phase": "step", "step": step}) for step in range(10)))
    assert slow.timeout_s(DEFAULTS) == 200.0
    assert slow.timeout_s(DEFAULTS | {"step": 5.0}) == 5.0
    lines = ((20.0 * number, {"phase": "step", "step": 100 * number}) for number in range(10))
    many_at_once = progress(*lines)
    assert many_at_once.timeout_s(DEFAULTS) == 200.0


def test_done_phase_has_a_timeout_only_for_the_trainer() -> None:
    done = (1.0, {"phase": "done", "step": 9})
    assert not is_overdue(progress(done), DEFAULTS, 1e9)
    assert is_overdue(progress(done), DEFAULTS | {"done": 5.0}, 7.0)
    assert is_overdue(progress(done, phase="init"), DEFAULTS, 302.0)


def test_first_steps_have_the_compile_timeout() -> None:
    assert progress((0.0, {"phase": "step", "step": 0})).timeout_s(DEFAULTS) == 1800.0


def test_save_is_not_part_of_step_time() -> None:
    lines = [(float(step), {"phase": "step", "step": step}) for step in range(5)]
    lines += [(5.0, {"phase": "save", "step": 5}), (900.0, {"phase": "step", "step": 5})]
    assert progress(*lines).timeout_s(DEFAULTS) == 60.0


def test_repeated_report_is_not_progress() -> None:
    stuck = progress(*((float(second), {"phase": "data", "step": 3}) for second in range(700)))
    assert is_overdue(stuck, DEFAULTS, 700.0)


def test_committed_step_never_decreases() -> None:
    tracked = progress((0.0, {"committed": 20}), (1.0, {"committed": 10}))
    assert (tracked.status.committed, tracked.status.step) == (20, None)


def waiting_for_data(
    now: float, wait: float, step_s: float, count: int
) -> list[tuple[float, dict[str, Any]]]:
    """What a trainer reports whose every step waits for its batch."""
    lines: list[tuple[float, dict[str, Any]]] = []
    for step in range(count):
        lines.append((now, {"phase": "data", "step": step}))
        lines.append((now + wait, {"phase": "step", "step": step}))
        now += wait + step_s
    return lines


def test_step_timeout_is_learned_with_data_wait_before_every_step() -> None:
    quick = progress(*waiting_for_data(0.0, 5.0, 1.0, count=6))
    assert quick.timeout_s(DEFAULTS) == 60.0
    slow = progress(*waiting_for_data(0.0, 5.0, 20.0, count=6))
    assert slow.timeout_s(DEFAULTS) == 200.0  # the wait does not count


def test_data_wait_is_not_part_of_step_time() -> None:
    lines: list[tuple[float, dict[str, Any]]] = []
    # A program that counts a step when its batch was used, and reports the wait in between.
    for step in range(6):
        at = 100.0 * step
        lines += [(at, {"phase": "step", "step": step}), (at + 20.0, {"phase": "data"})]
        lines += [(at + 90.0, {"phase": "step"})]
    assert progress(*lines).timeout_s(DEFAULTS) == 300.0


def test_step_timeout_is_learned_with_evaluation_or_save_after_every_step() -> None:
    lines: list[tuple[float, dict[str, Any]]] = []
    for step in range(6):
        lines.append((40.0 * step, {"phase": "step", "step": step}))
        lines.append((40.0 * step + 2.0, {"phase": "save", "step": step + 1}))
    lines.append((240.0, {"phase": "step", "step": 6}))
    assert progress(*lines).timeout_s(DEFAULTS) == 60.0


def test_restored_step_is_saved_but_not_committed_by_the_attempt() -> None:
    progress = RankProgress(0.0)
    progress.take_message({"found": 40}, 1.0)
    assert (progress.status.committed, progress.status.first_step) == (40, None)
    progress.take_message({"restored": 40}, 1.0)
    assert (progress.status.committed, progress.status.first_committed) == (40, None)
    progress.take_message({"committed": 60}, 2.0)
    progress.take_message({"committed": 80}, 3.0)
    assert (progress.status.committed, progress.status.first_committed) == (80, 60)


def test_initialize_is_joining_until_it_ends_or_another_interpreter_begins() -> None:
    waiting = progress((0.0, {"hello": "site"}), (1.0, {"joining": True}))
    assert waiting.status.joining
    waiting.take_message({"hello": "site"}, 2.0)
    assert not waiting.status.joining
    assert not progress((1.0, {"joining": True}), (2.0, {"joining": False})).status.joining
