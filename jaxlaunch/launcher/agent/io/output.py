"""Writes lines to the agent's own streams and to one bounded log per rank, without blocking the loop for long.

Reads lines from the pipe of a child process as they arrive.
"""

from __future__ import annotations

import array
import fcntl
import math
import os
import re
import select
import termios
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from jaxlaunch import regular_files
from jaxlaunch.launcher.agent.io.loop import READ, WRITE, Loop, Timer
from jaxlaunch.records.log_lines import Lines
from jaxlaunch.runs.layout import log_path

CHUNK = 4096  # PIPE_BUF: a pipe that is ready takes this much without blocking
MAX_QUEUED = 4 * 1024 * 1024  # bytes a slow reader may be behind before the oldest lines are dropped
LAST_BYTES = 64 * 1024  # kept of what a slow reader has not read in time at the end
ROTATED = b"(%d bytes of this log are before this file; logs.kept = %d bytes are kept)"  # its first line
_ROTATED = re.compile(ROTATED.replace(b"(", rb"\(").replace(b")", rb"\)").replace(b"%d", rb"(\d{1,18})"))


class OutputStream:
    """stdout or stderr, whose reader may be slow or gone. Of lines that do not fit the oldest are dropped, and counted.

    To block instead would stop heartbeats: a paused terminal would look like a lost host. Nothing is dropped, and who
    writes to it waits while it is behind, as long as the reader has taken something within `patience` seconds.
    """

    def __init__(self, loop: Loop, fd: int, *, patience: float = 0.0) -> None:
        self._loop, self._fd, self._patience = loop, fd, patience
        self._taken = time.monotonic()  # when the reader last took something, or something to take came
        self._timer: Timer | None = None  # until patience ends, while it is behind
        self.on_room: Callable[[], None] = lambda: None  # called when it is behind no longer
        self._writing = bytearray()  # a line may be half out: none of it is dropped
        self._lines: deque[bytes] = deque()
        self._queued = 0  # bytes in _lines
        self._dropped = 0  # lines, and not said yet
        self._is_gone = False

    def line(self, text: bytes) -> None:
        """Queues a line, given without its newline."""
        if self._is_gone:
            return
        if not self._has_more():
            self._taken = time.monotonic()
        self._lines.append(text + b"\n")
        self._queued += len(text) + 1
        if not self._is_patient:
            self._keep(MAX_QUEUED)
        self._pump()

    @property
    def is_behind(self) -> bool:
        """Whether lines have to wait before more of them come; never where it may drop them."""
        return self._is_patient and not self._is_gone and self._queued > MAX_QUEUED // 4

    @property
    def _is_patient(self) -> bool:
        return time.monotonic() - self._taken < self._patience

    def flush(self, seconds: float) -> None:
        """Writes what is queued, for at most `seconds`; of what is left after half of them, its count and its end.

        With patience all of it is written, until the reader is gone: `launcher run` itself waits for its own reader.
        """
        if self._patience:
            return self._write_while(lambda: True)
        half = time.monotonic() + seconds / 2
        self._write_while(lambda: time.monotonic() < half)
        self._keep(LAST_BYTES)
        self._write_while(lambda: time.monotonic() < half + seconds / 2)

    def _write_while(self, may: Callable[[], bool]) -> None:
        while self._has_more() and may():
            select.select([], [self._fd], [], 0.05)
            self._pump()

    def _has_more(self) -> bool:
        return bool(self._writing or self._lines) and not self._is_gone

    def _keep(self, size: int) -> None:
        """Drops the oldest lines but the last `size` bytes; the newest line is always kept."""
        while self._queued > size and len(self._lines) > 1:
            self._queued -= len(self._lines.popleft())
            self._dropped += 1

    def _pump(self) -> None:
        while self._has_more() and self._is_ready():
            self._fill()
            try:
                written = os.write(self._fd, self._writing[:CHUNK])
            except BlockingIOError:
                break
            except OSError:
                self._is_gone = True
                break
            del self._writing[:written]
            self._taken = time.monotonic()
        self._look()
        if self._has_more():  # never a plain file: that is always ready
            self._loop.watch(self._fd, WRITE, lambda mask: self._pump())
        else:
            self._loop.unwatch(self._fd)

    def _look(self) -> None:
        """Has who writes to it continue where it is behind no longer, and looks again when patience would end."""
        if not self.is_behind:
            self.on_room()
        elif self._timer is None and self._patience < math.inf:
            self._timer = self._loop.after(self._taken + self._patience - time.monotonic(), self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()

    def _fill(self) -> None:
        """Takes lines for the next write; that some were dropped is said in their place, before those that follow."""
        if self._dropped and self._lines:
            self._writing += b"(%d lines were dropped here: the reader of this stream is too slow)\n" % self._dropped
            self._dropped = 0
        while self._lines and len(self._writing) < CHUNK:
            line = self._lines.popleft()
            self._queued -= len(line)
            self._writing += line

    def _is_ready(self) -> bool:
        return bool(select.select([], [self._fd], [], 0)[1])


class RankLog:
    """logs/rank-N.log of a start's folder: the last `kept` bytes of a rank's output over all attempts, or half of them
    after a rotation.

    They are in two files at most. The second and every later one begins with a line that says how much was before it,
    so that what was dropped with the oldest is known from the files alone.
    """

    def __init__(self, folder: Path | None, rank: int, kept: int, on_error: Callable[[OSError], None]) -> None:
        self._path = None if folder is None else log_path(folder, rank)
        self._kept, self._on_error = kept, on_error
        self._file: BinaryIO | None = None
        self._size = 0  # of the file
        self._before = 0  # bytes of this log before the file

    def line(self, text: bytes) -> None:
        """Appends a line, given without its newline. The first error is passed on once and ends the log."""
        if self._path is None:
            return
        try:
            file = self._file or self._open(self._path)
            file.write(text + b"\n")
            self._size += len(text) + 1
            if self._size > self._kept // 2:
                self._rotate(file, self._path)
        except OSError as error:
            self._path = None
            self._on_error(error)

    def flush(self) -> None:
        """Has what was written reach the file."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._file, self._path = None, None
                self._on_error(error)

    def _open(self, path: Path) -> BinaryIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", opener=regular_files.opener)
        first, newline, _ = regular_files.read(path, 200).partition(b"\n")
        told = _ROTATED.fullmatch(first)
        self._before, head = (0, 0) if told is None else (int(told[1]), len(first + newline))
        self._size = self._file.tell() - head
        return self._file

    def _rotate(self, file: BinaryIO, path: Path) -> None:
        file.close()
        self._file = None
        path.replace(path.with_suffix(".log.1"))
        self._before += self._size
        self._file, self._size = open(path, "ab", opener=regular_files.opener), 0
        self._file.write(ROTATED % (self._before, self._kept) + b"\n")


CHUNK_PIPES = 65536


class LinePipe:
    """A pipe whose lines go to `on_line`, without their newline; one of more than `max_line` bytes in pieces."""

    def __init__(self, loop: Loop, max_line: int, on_line: Callable[[bytes], None]) -> None:
        self._fd, self.write_end = os.pipe()
        os.set_blocking(self._fd, False)
        self._loop, self._on_line = loop, on_line
        self._lines = Lines(max_line)
        self._is_paused = False
        loop.watch(self._fd, READ, self._ready)

    def _ready(self, mask: int) -> None:
        self._read()

    def opened(self) -> None:
        """Closes our copy of the writing end, once the child has its own: the pipe could not end otherwise."""
        os.close(self.write_end)

    def pause(self, is_paused: bool) -> None:
        """Reads no more until it is called with False: the writer waits, once the pipe is full."""
        if self._fd >= 0 and is_paused != self._is_paused:
            self._is_paused = is_paused
            if is_paused:
                self._loop.unwatch(self._fd)
            else:
                self._loop.watch(self._fd, READ, self._ready)

    def drain(self) -> None:
        """Reads what is in the pipe now, not what processes that hold it open go on to write: they may never stop."""
        left = self._size()
        while left > 0 and (count := self._read(left)):
            left -= count

    def close(self) -> None:
        """Closes the reading end; a last line without a newline is passed on first."""
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
            for line in self._lines.end():
                self._on_line(line)

    def _size(self) -> int:
        """Bytes in the pipe."""
        if self._fd < 0:
            return 0
        count = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, count)
        return count[0]

    def _read(self, most: int = CHUNK_PIPES) -> int:
        """Reads once, at most `most` bytes; returns how many, 0 when there is nothing to read."""
        if self._fd < 0:
            return 0
        try:
            data = os.read(self._fd, min(most, CHUNK_PIPES))
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return 0
        for line in self._lines.feed(data):
            self._on_line(line)
        return len(data)
