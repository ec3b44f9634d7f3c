"""Reads lines from the pipe of a child process as they arrive."""

from __future__ import annotations

import array
import fcntl
import os
import termios
from collections.abc import Callable

from jaxlaunch.launcher.agent.io.loop import READ, Loop
from jaxlaunch.records.lines import Lines

CHUNK = 65536


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

    def _read(self, most: int = CHUNK) -> int:
        """Reads once, at most `most` bytes; returns how many, 0 when there is nothing to read."""
        if self._fd < 0:
            return 0
        try:
            data = os.read(self._fd, min(most, CHUNK))
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return 0
        for line in self._lines.feed(data):
            self._on_line(line)
        return len(data)
