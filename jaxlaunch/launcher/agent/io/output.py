"""Output of child processes: pipes, the agent's own streams, and a bounded log per rank.

Lines arrive through `LinePipe`, and are written to an `OutputStream` and a `RankLog`. None of these
blocks the event loop for long: a stream with a slow reader drops its oldest lines.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import math
import os
import re
import termios
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from jaxlaunch import regular_files
from jaxlaunch.launcher.agent.io.loop import READ, WRITE, Loop, Timer, wait_until_ready
from jaxlaunch.records.log_lines import LineSplitter
from jaxlaunch.runs.layout import log_path

# PIPE_BUF of Linux: a pipe that is ready for writing accepts this much without blocking.
WRITE_CHUNK_BYTES = 4096
# Largest size of the queued lines of a slow reader, before the oldest are dropped.
MAX_QUEUED_BYTES = 4 * 1024 * 1024
# At the end of the agent, this much is kept of the queued lines of a slow reader.
FINAL_BYTES = 64 * 1024
# First line of a log after a rotation.
ROTATION_HEADER = b"(%d bytes of this log are before this file; logs.kept = %d bytes are kept)"
_ROTATION_HEADER_PATTERN = re.compile(
    ROTATION_HEADER.replace(b"(", rb"\(").replace(b")", rb"\)").replace(b"%d", rb"(\d{1,18})")
)


class OutputStream:
    """stdout or stderr of the agent, which drops the oldest lines for a slow reader.

    If the agent blocked instead, its heartbeats would stop, and a paused terminal would look like a
    lost host. With a patience, nothing is dropped as long as the reader has read something within
    that time; instead, programs must wait while the stream is behind.
    """

    def __init__(self, loop: Loop, fd: int, *, patience_s: float = 0.0) -> None:
        """Create the stream.

        Args:
            loop: Event loop of the agent.
            fd: Descriptor of the stream.
            patience_s: Seconds for which programs wait for a reader that reads nothing.
        """
        self._loop, self._fd, self._patience_s = loop, fd, patience_s
        # Monotonic time at which the reader last read something, or at which the first line was
        # queued after it had read everything.
        self._last_taken_at = time.monotonic()
        # Timer for the end of the patience, while the stream is behind.
        self._timer: Timer | None = None
        # Called when the stream is no longer behind.
        self.on_room: Callable[[], None] = lambda: None
        # The next bytes to write. None of them is dropped, because a line may be written in part.
        self._buffer = bytearray()
        self._lines: deque[bytes] = deque()
        # Number of bytes in `_lines`.
        self._queued_bytes = 0
        # Number of dropped lines that were not reported yet.
        self._dropped_lines = 0
        self._is_gone = False

    def write_line(self, text: bytes) -> None:
        """Queue a line, which is passed without its newline."""
        if self._is_gone:
            return
        if not self._has_more():
            self._last_taken_at = time.monotonic()
        self._lines.append(text + b"\n")
        self._queued_bytes += len(text) + 1
        if not self._is_patient:
            self._drop_oldest(MAX_QUEUED_BYTES)
        self._write_queued()

    @property
    def is_behind(self) -> bool:
        """Return whether programs must wait. This is False while lines may be dropped."""
        return self._is_patient and not self._is_gone and self._queued_bytes > MAX_QUEUED_BYTES // 4

    @property
    def _is_patient(self) -> bool:
        return time.monotonic() - self._last_taken_at < self._patience_s

    def flush(self, timeout_s: float) -> None:
        """Write the queued lines for at most `timeout_s`, after half of it only the last ones.

        With a patience, all lines are written unless the reader is gone, because the reader is
        `launcher run`, which reads everything.
        """
        if self._patience_s:
            self._write_while(lambda: True)
            return
        half_time = time.monotonic() + timeout_s / 2
        self._write_while(lambda: time.monotonic() < half_time)
        self._drop_oldest(FINAL_BYTES)
        self._write_while(lambda: time.monotonic() < half_time + timeout_s / 2)

    def _write_while(self, should_continue: Callable[[], bool]) -> None:
        while self._has_more() and should_continue():
            wait_until_ready(self._fd, WRITE, 0.05)
            self._write_queued()

    def _has_more(self) -> bool:
        return bool(self._buffer or self._lines) and not self._is_gone

    def _drop_oldest(self, max_bytes: int) -> None:
        """Drop the oldest lines until the rest fits; the newest line is always kept."""
        while self._queued_bytes > max_bytes and len(self._lines) > 1:
            self._queued_bytes -= len(self._lines.popleft())
            self._dropped_lines += 1

    def _write_queued(self) -> None:
        while self._has_more() and wait_until_ready(self._fd, WRITE, 0.0):
            self._fill_buffer()
            try:
                written_bytes = os.write(self._fd, self._buffer[:WRITE_CHUNK_BYTES])
            except BlockingIOError:
                break
            except OSError:
                self._is_gone = True
                break
            del self._buffer[:written_bytes]
            self._last_taken_at = time.monotonic()
        self._check_room()
        # A regular file is always ready, so only pipes and terminals are ever watched.
        if self._has_more():
            self._loop.watch(self._fd, WRITE, lambda mask: self._write_queued())
        else:
            self._loop.unwatch(self._fd)

    def _check_room(self) -> None:
        """Let programs continue if there is room, or check again when the patience ends."""
        if not self.is_behind:
            self.on_room()
        elif self._timer is None and self._patience_s < math.inf:
            remaining_s = self._last_taken_at + self._patience_s - time.monotonic()
            self._timer = self._loop.call_later(remaining_s, self._recheck_room)

    def _recheck_room(self) -> None:
        self._timer = None
        self._check_room()

    def _fill_buffer(self) -> None:
        """Move lines to the buffer, with a note in place of dropped lines."""
        if self._dropped_lines and self._lines:
            text = b"(%d lines were dropped here: the reader of this stream is too slow)\n"
            self._buffer += text % self._dropped_lines
            self._dropped_lines = 0
        while self._lines and len(self._buffer) < WRITE_CHUNK_BYTES:
            line = self._lines.popleft()
            self._queued_bytes -= len(line)
            self._buffer += line


class RankLog:
    """The log logs/rank-N.log of a start, with the end of a rank's output over all attempts.

    It has at most two files, and each holds at most half of the kept bytes. After a rotation,
    each new file begins with a line that says how many bytes of the log precede it, so that the
    files alone show how much was dropped.
    """

    def __init__(
        self, folder: Path | None, rank: int, kept_bytes: int, on_error: Callable[[OSError], None]
    ) -> None:
        self._path = None if folder is None else log_path(folder, rank)
        self._kept_bytes, self._on_error = kept_bytes, on_error
        self._file: BinaryIO | None = None
        self._file_bytes = 0
        # Number of bytes of the log before the current file.
        self._earlier_bytes = 0

    def write_line(self, text: bytes) -> None:
        """Append a line, which is passed without its newline. The first error ends the log."""
        if self._path is None:
            return
        try:
            file = self._file or self._open_file(self._path)
            file.write(text + b"\n")
            self._file_bytes += len(text) + 1
            if self._file_bytes > self._kept_bytes // 2:
                self._rotate_file(file, self._path)
        except OSError as error:
            self._end_log(error)

    def flush(self) -> None:
        """Flush the written lines to the file."""
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._end_log(error)

    def _end_log(self, error: OSError) -> None:
        """Write no more lines after an error, which is reported once."""
        file, self._file, self._path = self._file, None, None
        if file is not None:
            # Closing it writes the buffered lines, which may fail again.
            with contextlib.suppress(OSError):
                file.close()
        self._on_error(error)

    def _open_file(self, path: Path) -> BinaryIO:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab", opener=regular_files.open_regular)  # noqa: SIM115
        first_line, newline, _ = regular_files.read_bounded(path, 200).partition(b"\n")
        header = _ROTATION_HEADER_PATTERN.fullmatch(first_line)
        self._earlier_bytes, self._file_bytes = 0, self._file.tell()
        if header is not None:
            self._earlier_bytes = int(header[1])
            self._file_bytes -= len(first_line + newline)
        return self._file

    def _rotate_file(self, file: BinaryIO, path: Path) -> None:
        file.close()
        self._file = None
        path.replace(path.with_suffix(".log.1"))
        self._earlier_bytes += self._file_bytes
        self._file = open(path, "ab", opener=regular_files.open_regular)  # noqa: SIM115
        self._file_bytes = 0
        self._file.write(ROTATION_HEADER % (self._earlier_bytes, self._kept_bytes) + b"\n")


READ_CHUNK_BYTES = 65536


class LinePipe:
    """Pipe whose lines are passed to `on_line`. Long lines are passed in pieces."""

    def __init__(
        self,
        loop: Loop,
        max_line_bytes: int,
        on_line: Callable[[bytes], None],
        path: str | None = None,
    ) -> None:
        """Create the pipe. With a `path`, it is a named pipe that other processes may open."""
        # A named pipe is kept open for writing here. Without a writer, it would be at its end.
        self._path, self._writer = path, -1
        if path is None:
            self._fd, self.write_end = os.pipe()
        else:
            os.mkfifo(path, 0o600)
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self.write_end = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            self._writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(self._fd, False)
        self._loop, self._on_line = loop, on_line
        self._lines = LineSplitter(max_line_bytes)
        self._is_paused = False
        loop.watch(self._fd, READ, self._on_ready)

    def _on_ready(self, mask: int) -> None:
        self._read_chunk()

    def close_write_end(self) -> None:
        """Close our copy of the writing end once the child has its own."""
        os.close(self.write_end)

    def set_paused(self, is_paused: bool) -> None:
        """Stop or resume reading. The writer waits once the pipe is full."""
        if self._fd >= 0 and is_paused != self._is_paused:
            self._is_paused = is_paused
            if is_paused:
                self._loop.unwatch(self._fd)
            else:
                self._loop.watch(self._fd, READ, self._on_ready)

    def drain(self) -> None:
        """Read the bytes that are in the pipe now, but none that arrive later."""
        remaining_bytes = self._pending_bytes()
        while remaining_bytes > 0 and (count := self._read_chunk(remaining_bytes)):
            remaining_bytes -= count

    def close(self) -> None:
        """Close the reading end, after passing on a last line without a newline."""
        if self._fd >= 0:
            self._loop.unwatch(self._fd)
            os.close(self._fd)
            self._fd = -1
            if self._path is not None:
                os.close(self._writer)
                # A program may have emptied the temporary folder.
                with contextlib.suppress(OSError):
                    os.unlink(self._path)
            for line in self._lines.finish():
                self._on_line(line)

    def _pending_bytes(self) -> int:
        if self._fd < 0:
            return 0
        count = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, count)
        return count[0]

    def _read_chunk(self, max_bytes: int = READ_CHUNK_BYTES) -> int:
        """Read once, and return the number of bytes, 0 if there is nothing to read."""
        if self._fd < 0:
            return 0
        try:
            data = os.read(self._fd, min(max_bytes, READ_CHUNK_BYTES))
        except BlockingIOError:
            return 0
        if not data:
            self.close()
            return 0
        for line in self._lines.feed(data):
            self._on_line(line)
        return len(data)
