"""Where lines go: the agent's own streams, and one bounded log per rank. Nothing here may block the loop for long."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from launcher.agent.loop import WRITE, Loop
from launcher.agent.memory import log_path

CHUNK = 4096  # PIPE_BUF: a pipe that is ready takes this much without blocking
MAX_QUEUED = 4 * 1024 * 1024  # bytes a slow reader may be behind
LOG_BYTES = 8 * 1024 * 1024  # of a rank's log; twice that with the one before it


class Outlet:
    """A stream of ours whose reader may be slow or gone. Lines that do not fit are dropped and counted.

    Blocking instead would stop heartbeats and make a paused terminal look like a lost host.
    """

    def __init__(self, loop: Loop, fd: int) -> None:
        self._loop, self._fd = loop, fd
        self._queue = bytearray()
        self._dropped = 0
        self._is_gone = False

    def line(self, text: bytes) -> None:
        if self._is_gone:
            return
        if len(self._queue) > MAX_QUEUED:
            self._dropped += 1
            return
        if self._dropped:
            self._queue += b"(%d lines were dropped: the reader was too slow)\n" % self._dropped
            self._dropped = 0
        self._queue += text + b"\n"
        self._pump()

    def flush(self, seconds: float) -> None:
        """Writes what is queued, for at most `seconds`."""
        end = time.monotonic() + seconds
        while self._queue and not self._is_gone and time.monotonic() < end:
            select.select([], [self._fd], [], 0.05)
            self._pump()

    def _pump(self) -> None:
        while self._queue and not self._is_gone and self._is_ready():
            try:
                written = os.write(self._fd, self._queue[:CHUNK])
            except BlockingIOError:
                break
            except OSError:
                self._is_gone = True
                break
            del self._queue[:written]
        if self._queue and not self._is_gone:  # never a plain file: that is always ready
            self._loop.watch(self._fd, WRITE, lambda mask: self._pump())
        else:
            self._loop.unwatch(self._fd)

    def _is_ready(self) -> bool:
        return bool(select.select([], [self._fd], [], 0)[1])


class RankLog:
    """logs/rank-N.log: the last lines of a rank over all attempts, in at most two files."""

    def __init__(self, folder: Path | None, rank: int, complain: Callable[[OSError], None]) -> None:
        self._path = None if folder is None else log_path(folder, rank)
        self._complain = complain
        self._file: BinaryIO | None = None
        self._size = 0

    def line(self, text: bytes) -> None:
        if self._path is None:
            return
        try:
            file = self._file or self._open(self._path)
            file.write(text + b"\n")
            self._size += len(text) + 1
            if self._size > LOG_BYTES:
                file.close()
                self._file = None
                self._path.replace(self._path.with_suffix(".log.1"))
        except OSError as error:
            self._path = None
            self._complain(error)

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._file, self._path = None, None
                self._complain(error)

    def _open(self, path: Path) -> BinaryIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._size = self._file.tell()
        return self._file
