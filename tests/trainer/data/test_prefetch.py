import queue
import threading
from collections.abc import Callable
from typing import Any

import grain
import pytest

from jaxlaunch.trainer.data.pipeline import Prefetcher


def make_prefetcher(read: Callable[[int], Any], steps: int = 2**40) -> grain.DatasetIterator[Any]:
    here = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(grain.MapDataset.range(steps).map(read).to_iter_dataset(here))


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_batches_arrive_in_order(ahead: int) -> None:
    batches = Prefetcher(make_prefetcher(lambda step: step * 10, 4), ahead=ahead)
    assert list(batches) == [0, 10, 20, 30]
    with pytest.raises(StopIteration):
        batches.get(timeout_s=10)


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_prefetcher_reads_a_bounded_number_ahead(ahead: int) -> None:
    started: queue.Queue[int] = queue.Queue()

    def read(step: int) -> int:
        started.put(step)
        return step

    batches = Prefetcher(make_prefetcher(read), ahead=ahead)
    next(batches)
    assert [started.get(timeout=10) for _ in range(ahead + 1)] == list(range(ahead + 1))
    assert started.empty()
    batches.close()


def test_timeout_does_not_lose_the_batch() -> None:
    may_read = threading.Event()

    def read(step: int) -> int:
        may_read.wait()
        return step

    batches = Prefetcher(make_prefetcher(read), ahead=0)
    assert batches.get(timeout_s=0.01) is None
    assert batches.get(timeout_s=0.01) is None
    may_read.set()
    assert [batches.get(), batches.get()] == [0, 1]
    batches.close()


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("kind", [ValueError, TimeoutError])
def test_read_error_is_raised_in_order_and_repeated(ahead: int, kind: type[Exception]) -> None:
    def read(step: int) -> int:
        if step == 2:
            raise kind("step 2")
        return step

    batches = Prefetcher(make_prefetcher(read), ahead=ahead)
    assert [next(batches), next(batches)] == [0, 1]
    for _ in range(2):
        with pytest.raises(kind, match="step 2"):
            batches.get(timeout_s=10)


def test_close_ends_the_thread() -> None:
    earlier = set(threading.enumerate())
    steps = make_prefetcher(lambda step: step)
    batches = Prefetcher(steps, ahead=1)
    threads = set(threading.enumerate()) - earlier
    batches.close()
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    with pytest.raises(ValueError, match="closed"):
        next(steps)


def test_dropped_prefetcher_leaves_no_thread() -> None:
    earlier = set(threading.enumerate())
    next(Prefetcher(make_prefetcher(lambda step: step), ahead=1))
    for thread in set(threading.enumerate()) - earlier:
        thread.join(timeout=10)
        assert not thread.is_alive()
