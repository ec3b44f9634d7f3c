"""Batches drawn ahead of their use by one thread; the consumer may wait with a time limit, which grain cannot.

Like grain's threads, this one makes an exiting interpreter wait for the read in progress; the trainer exits by
os._exit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import grain

T = TypeVar("T")


class Prefetcher(Iterator[T]):
    """Yields the items of `batches` in order, `ahead` of them drawn before they are needed.

    What drawing raises is raised by `get` and `next` in its turn, and ends the iteration.
    """

    def __init__(self, batches: grain.DatasetIterator[T], *, ahead: int) -> None:
        self._batches, self._ahead = batches, ahead
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data-prefetch")
        self._drawn: deque[Future[T]] = deque()
        self._draw(ahead)

    def get(self, timeout_s: float | None = None) -> T | None:
        """The next batch, or None when it is not ready within `timeout_s`; the next call returns the same one.

        Raises StopIteration after the last, and whatever reading raised.
        """
        self._draw(max(self._ahead, 1))
        first = self._drawn[0]
        if not first.done() and wait([first], timeout_s).not_done:
            return None
        batch = first.result()  # what it raises stays in front, to be raised again
        self._drawn.popleft()
        self._draw(self._ahead)
        return batch

    def __next__(self) -> T:
        batch = self.get()
        assert batch is not None, "a wait without a limit ends with a batch"
        return batch

    def close(self) -> None:
        """Ends the reading after the batch in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._batches.close()

    def _draw(self, count: int) -> None:
        while len(self._drawn) < count:
            self._drawn.append(self._thread.submit(next, self._batches))
