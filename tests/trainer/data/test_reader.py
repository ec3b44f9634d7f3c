import queue
import subprocess
import sys
import threading

import numpy as np
import pytest

from jaxlaunch.trainer.data import pipeline
from jaxlaunch.trainer.data.examples import Batch
from jaxlaunch.trainer.errors import DataError

ENDLESS = 2**40


def rows_of(step: int, rows: range) -> Batch:
    return {"x": np.array([step * 100 + row for row in rows])}


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_batch_has_its_rows_in_order(threads: int) -> None:
    batches = pipeline.iterate_batches(rows_of, range(3, 6), range(2, 7), threads=threads)
    expected = [[step * 100 + row for row in range(2, 7)] for step in range(3, 6)]
    assert [batch["x"].tolist() for batch in batches] == expected


def test_put_receives_whole_batches() -> None:
    def put(batch: Batch) -> tuple[int, int]:
        return threading.get_ident(), len(batch["x"])

    batches = pipeline.iterate_batches(rows_of, range(2), range(4), threads=2, put=put)
    assert list(batches) == [(threading.get_ident(), 4)] * 2


def test_threads_share_a_batch() -> None:
    together = threading.Barrier(4, timeout=30)

    def read(step: int, rows: range) -> Batch:
        together.wait()
        return rows_of(step, rows)

    (batch,) = pipeline.iterate_batches(read, range(1), range(8), threads=4)
    assert batch["x"].tolist() == list(range(8))


@pytest.mark.parametrize(("threads", "begun"), [(1, 1), (2, 4)])
def test_only_the_next_batch_is_started(threads: int, begun: int) -> None:
    started: queue.Queue[tuple[int, range]] = queue.Queue()

    def read(step: int, rows: range) -> Batch:
        started.put((step, rows))
        return rows_of(step, rows)

    batches = pipeline.iterate_batches(read, range(5, ENDLESS), range(4), threads=threads)
    next(batches)
    parts = [range(2), range(2, 4)] if threads == 2 else [range(4)]
    result = {started.get(timeout=10) for _ in range(begun)}
    batches.close()
    assert result == {
        (5 + number // len(parts), parts[number % len(parts)]) for number in range(begun)
    }
    assert started.empty()


@pytest.mark.parametrize("threads", [1, 3])
def test_read_error_is_raised_unchanged(threads: int) -> None:
    fault = DataError("step 2")

    def read(step: int, rows: range) -> Batch:
        if step == 2:
            raise fault
        return rows_of(step, rows)

    batches = pipeline.iterate_batches(read, range(ENDLESS), range(6), threads=threads)
    assert [next(batches)["x"][0] for _ in range(2)] == [0, 100]
    with pytest.raises(DataError) as caught:
        next(batches)
    assert caught.value is fault and not hasattr(fault, "__notes__")
    batches.close()


def test_interpreter_exits_silently_during_prefetch() -> None:
    script = """
import numpy as np
from jaxlaunch.trainer.data.pipeline import Prefetcher, iterate_batches
read = lambda step, rows: {"x": np.zeros(len(rows))}
batches = Prefetcher(iterate_batches(read, range(2**40), range(8), threads=2), ahead=2)
next(batches)
"""
    remaining = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120
    )
    assert (remaining.returncode, remaining.stdout, remaining.stderr) == (0, "", "")
