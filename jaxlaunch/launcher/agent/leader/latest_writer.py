"""Writes beside the loop what outlives a pod: storage and servers may stall for longer than a host may be silent."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class LatestWriter(Generic[T]):
    """Writes values in a background thread; if several are queued, only the newest."""

    def __init__(self, write: Callable[[T], None]) -> None:
        self._write_one = write
        self._lock = threading.Lock()
        self._next: T | None = None
        self._writer: threading.Thread | None = None

    def keep(self, value: T, wait_s: float = 0.0) -> None:
        """Has `value` written after those under way; waits for that, `wait_s` seconds at most."""
        with self._lock:
            self._next = value
            if self._writer is None:
                self._writer = threading.Thread(target=self._write, daemon=True)
                self._writer.start()
            writer = self._writer
        if wait_s:
            writer.join(wait_s)

    @property
    def is_busy(self) -> bool:
        """Whether something is being written, or waits for that."""
        with self._lock:
            return self._writer is not None

    def finish(self) -> None:
        """Returns when nothing is being written; what still waits is dropped, since the last one replaces it."""
        with self._lock:
            self._next, writer = None, self._writer
        if writer is not None:
            writer.join()

    def _write(self) -> None:
        while True:
            with self._lock:
                value, self._next = self._next, None
                if value is None:
                    self._writer = None
                    return
            self._write_one(value)
