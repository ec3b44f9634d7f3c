"""Lines from a pipe of a child, as they come."""

from __future__ import annotations

import os
from collections.abc import Callable

from launcher.agent.loop import READ, Loop


class LinePipe:
    """The reading end of a pipe whose lines go to `on_line`, without their end; those over `max_line` are split."""

    def __init__(self, loop: Loop, max_line: int, on_line: Callable[[bytes], None]) -> None:
        self._fd, self.write_end = os.pipe()
        os.set_blocking(self._fd, False)
        self._loop, self._max_line, self._on_line = loop, max_line, on_line
        self._buffer = bytearray()
        loop.watch(self._fd, READ, self._ready)

    def _ready(self, mask: int) -> None:
        self._read()

    def opened(self) -> None:
        """The child holds its end now; ours would keep the pipe open for ever."""
        os.close(self.write_end)

    def drain(self) -> None:
        """Reads what a child left in the pipe. Whoever else still holds it open is not waited for."""
        while self._read():
            pass

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
            if self._buffer:
                self._on_line(bytes(self._buffer))
                self._buffer.clear()

    def _read(self) -> bool:
        """Reads once; False when there is nothing (more) to read."""
        if self._fd < 0:
            return False
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return False
        if not data:
            self.close()
            return False
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        for line in lines:
            self._on_line(bytes(line))
        if len(rest) > self._max_line:
            self._on_line(bytes(rest))
            rest.clear()
        self._buffer = rest
        return True
