import itertools
import queue
import threading

import pytest

from trainer.data.prefetch import Prefetcher


def test_steps_come_in_order_and_end() -> None:
    assert list(Prefetcher(lambda step: step * 10, iter(range(4)), ahead=2)) == [0, 10, 20, 30]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_it_reads_just_so_far_ahead(ahead: int) -> None:
    started: queue.Queue[int] = queue.Queue()

    def read(step: int) -> int:
        started.put(step)
        return step

    batches = Prefetcher(read, itertools.count(5), ahead=ahead)
    next(batches)
    assert [started.get(timeout=10) for _ in range(ahead + 1)] == list(range(5, 5 + ahead + 1))
    assert started.empty()
    batches.close()


def test_a_wait_that_is_too_long_returns_and_the_batch_is_not_lost() -> None:
    may_read = threading.Event()

    def read(step: int) -> int:
        may_read.wait()
        return step

    batches = Prefetcher(read, itertools.count(), ahead=0)
    assert batches.get(timeout_s=0.01) is None
    assert batches.get(timeout_s=0.01) is None
    may_read.set()
    assert [batches.get(), batches.get()] == [0, 1]
    batches.close()


def test_what_reading_raises_comes_out_in_its_turn_and_stays() -> None:
    def read(step: int) -> int:
        if step == 2:
            raise ValueError("step 2")
        return step

    batches = Prefetcher(read, itertools.count(), ahead=4)
    assert [next(batches), next(batches)] == [0, 1]
    for _ in range(2):
        with pytest.raises(ValueError, match="step 2"):
            batches.get(timeout_s=10)


def test_closing_ends_the_reading() -> None:
    before = set(threading.enumerate())
    batches = Prefetcher(lambda step: step, itertools.count(), ahead=1)
    (thread,) = set(threading.enumerate()) - before
    batches.close()
    thread.join(timeout=10)
    assert not thread.is_alive()
