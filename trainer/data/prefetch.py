"""Batches read ahead of their use by one thread; the consumer may wait for them with a time limit."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class _Raised(NamedTuple):
    error: BaseException


class Prefetcher(Iterator[T]):
    """`read(step)` for each of `steps` in order, `ahead` of them before they are asked for.

    What `read` raises comes out of `get` and `next` in its turn, and ends the iteration.
    """

    def __init__(self, read: Callable[[int], T], steps: Iterator[int], *, ahead: int) -> None:
        self._read, self._steps = read, steps
        self._done: queue.SimpleQueue[T | _Raised] = queue.SimpleQueue()
        self._wanted = threading.Semaphore(ahead)
        self._is_asked = False
        self._end: BaseException | None = None
        self._is_closed = False
        # A daemon: a read that never returns must not hold the process back when it leaves.
        threading.Thread(target=self._run, name="data-prefetch", daemon=True).start()

    def get(self, timeout_s: float | None = None) -> T | None:
        """The next batch, or None when it is not there in time; ask again for the same one.

        Raises StopIteration after the last, and whatever reading raised.
        """
        if self._end is not None:
            raise self._end
        if not self._is_asked:
            self._is_asked = True
            self._wanted.release()
        try:
            item = self._done.get(timeout=timeout_s)
        except queue.Empty:
            return None
        self._is_asked = False
        if isinstance(item, _Raised):
            self._end = item.error
            raise item.error
        return item

    def __next__(self) -> T:
        batch = self.get()
        assert batch is not None, "a wait without a limit ends with a batch"
        return batch

    def close(self) -> None:
        """Ends the reading after the batch in progress."""
        self._is_closed = True
        self._wanted.release()

    def _run(self) -> None:
        while True:
            self._wanted.acquire()
            if self._is_closed:
                return
            try:
                self._done.put(self._read(next(self._steps)))
            except BaseException as error:  # handed over whole: it is raised where the batch is asked for
                self._done.put(_Raised(error))
                return
