from itertools import pairwise
from time import perf_counter

import pytest

from jaxlaunch.trainer.metrics.counters import STEP_BOUNDS_S, WARMUP_DISPATCHES, StepTimer


def run(timer: StepTimer, steps: int) -> None:
    for _ in range(steps):
        with timer.get_part("data"):
            sum(range(200))
        with timer.get_part("device"):
            sum(range(2000))
        timer.end_step()


def test_parts_of_interval_add_up() -> None:
    timer = StepTimer()
    run(timer, 20)
    took = timer.end_interval()
    assert set(took.parts) == {"data", "host", "device", "save", "eval"}
    assert took.seconds == sum(took.parts.values())
    assert took.parts["device"] > 0 and took.parts["data"] > 0 and took.parts["save"] == 0


def test_interval_starts_after_previous_one() -> None:
    timer = StepTimer()
    run(timer, 20)
    first, second = timer.end_interval(), timer.end_interval()
    assert second.seconds < first.seconds and second.parts["data"] == 0


def test_steps_of_one_dispatch_share_time() -> None:
    timer = StepTimer()
    run(timer, 20)
    waited = timer.part_seconds()["data"]
    shares = [timer.end_interval(1 / left).parts["data"] for left in (4, 3, 2, 1)]
    assert shares == pytest.approx([waited / 4] * 4) and timer.end_interval().parts["data"] == 0


def test_speed_is_unknown_in_warmup_or_without_steps() -> None:
    timer = StepTimer()
    run(timer, WARMUP_DISPATCHES)
    assert timer.end_interval().steps_per_s is None and timer.median_s() is None
    run(timer, 1)
    speed, median = timer.end_interval().steps_per_s, timer.median_s()
    assert (
        speed is not None and median is not None and speed * median > 0.999
    )  # one step: the same thing
    assert timer.end_interval().steps_per_s is None


def test_step_time_excludes_evaluation_and_saves() -> None:
    slow, plain = StepTimer(), StepTimer()
    for timer in (slow, plain):
        run(timer, 10)
        for part in ("save", "eval") if timer is slow else ():
            with timer.get_part(part):
                sum(range(2_000_000))
        timer.end_step()
    assert max(slow._recent) < slow.get_part("save").seconds
    assert slow.end_interval().parts["eval"] > max(slow._recent)


def test_histogram_counts_every_step() -> None:
    timer = StepTimer()
    run(timer, 30)
    assert sum(timer.counts) == timer.steps == 30 and len(timer.counts) == len(STEP_BOUNDS_S) + 1
    assert list(STEP_BOUNDS_S) == sorted(STEP_BOUNDS_S)


def test_time_before_start_is_excluded() -> None:
    timer = StepTimer()
    with timer.get_part("save"):
        sum(range(3_000_000))
    compiling = timer.get_part("save").seconds
    timer.start()
    run(timer, 3)
    assert timer.seconds < compiling and timer.end_interval().seconds < compiling


def test_current_wait_counts_and_parts_never_fall() -> None:
    timer = StepTimer()
    values = [timer.part_seconds()]
    with timer.get_part("data"):
        until = perf_counter() + 0.01
        while perf_counter() < until:
            values.append(timer.part_seconds())
    values.append(timer.part_seconds())
    assert 0 < values[-2]["data"] <= values[-1]["data"]
    assert all(old[part] <= new[part] for old, new in pairwise(values) for part in old)


def test_own_time_is_all_but_the_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 0.1 s: 0.005 s for data, 0.015 s on the host, and 0.08 s for the device."""
    clock = [0.0]
    monkeypatch.setattr("jaxlaunch.trainer.metrics.counters.perf_counter", lambda: clock[0])
    timer = StepTimer()
    shares = []
    for step in range(1, 66):
        with timer.get_part("data"):
            clock[0] += 0.005
        clock[0] += 0.015
        with timer.get_part("device"):
            clock[0] += 0.08
        timer.end_step()
        if step % 30 == 0:
            # A save does not belong to a step.
            with timer.get_part("save"):
                clock[0] += 5.0
        if (share := timer.own_share()) is not None:
            shares.append(share)
    # The first two seconds have the pipeline's first dispatches.
    assert shares == pytest.approx([0.2, 0.2])
