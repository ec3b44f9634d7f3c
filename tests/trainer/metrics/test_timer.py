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


def test_the_parts_of_an_interval_add_up_to_its_time() -> None:
    timer = StepTimer()
    run(timer, 20)
    took = timer.end_interval()
    assert set(took.parts) == {"data", "host", "device", "save", "eval"}
    assert took.seconds == sum(took.parts.values())
    assert took.parts["device"] > 0 and took.parts["data"] > 0 and took.parts["save"] == 0


def test_an_interval_counts_only_what_came_after_the_last() -> None:
    timer = StepTimer()
    run(timer, 20)
    first, second = timer.end_interval(), timer.end_interval()
    assert second.seconds < first.seconds and second.parts["data"] == 0


def test_steps_of_one_dispatch_share_its_time() -> None:
    timer = StepTimer()
    run(timer, 20)
    waited = timer.part_seconds()["data"]
    shares = [timer.end_interval(1 / left).parts["data"] for left in (4, 3, 2, 1)]
    assert shares == pytest.approx([waited / 4] * 4) and timer.end_interval().parts["data"] == 0


def test_there_is_no_speed_before_the_warm_up_is_over_or_without_a_new_step() -> None:
    timer = StepTimer()
    run(timer, WARMUP_DISPATCHES)
    assert timer.end_interval().steps_per_s is None and timer.median_s() is None
    run(timer, 1)
    speed, median = timer.end_interval().steps_per_s, timer.median_s()
    assert (
        speed is not None and median is not None and speed * median > 0.999
    )  # one step: the same thing
    assert timer.end_interval().steps_per_s is None


def test_evaluation_and_saves_are_not_part_of_a_step() -> None:
    slow, plain = StepTimer(), StepTimer()
    for timer in (slow, plain):
        run(timer, 10)
        for part in ("save", "eval") if timer is slow else ():
            with timer.get_part(part):
                sum(range(2_000_000))
        timer.end_step()
    assert max(slow._recent) < slow.get_part("save").seconds
    assert slow.end_interval().parts["eval"] > max(slow._recent)


def test_every_step_is_in_the_histogram() -> None:
    timer = StepTimer()
    run(timer, 30)
    assert sum(timer.counts) == timer.steps == 30 and len(timer.counts) == len(STEP_BOUNDS_S) + 1
    assert list(STEP_BOUNDS_S) == sorted(STEP_BOUNDS_S)


def test_what_came_before_the_start_is_no_steps_time() -> None:
    timer = StepTimer()
    with timer.get_part("save"):
        sum(range(3_000_000))
    compiling = timer.get_part("save").seconds
    timer.start()
    run(timer, 3)
    assert timer.seconds < compiling and timer.end_interval().seconds < compiling


def test_a_wait_that_lasts_is_counted_where_it_is_and_no_part_ever_falls() -> None:
    timer = StepTimer()
    seen = [timer.part_seconds()]
    with timer.get_part("data"):
        until = perf_counter() + 0.01
        while perf_counter() < until:
            seen.append(timer.part_seconds())
    seen.append(timer.part_seconds())
    assert 0 < seen[-2]["data"] <= seen[-1]["data"]
    assert all(before[part] <= after[part] for before, after in pairwise(seen) for part in before)
