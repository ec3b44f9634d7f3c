"""The agent's own streams, whose reader may be slow, gone, or late."""

from __future__ import annotations

import errno
import math
import os
import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxlaunch.launcher.agent.io.loop import Loop, ReadyCallback, Timer
from jaxlaunch.launcher.agent.io.output import FINAL_BYTES, MAX_QUEUED_BYTES, OutputStream, RankLog
from jaxlaunch.runs.layout import log_path

LINES, WIDTH = 40_000, 257  # of a fast writer: 10 MB, more than are kept


class Idle(Loop):
    """A loop that is not run: the test calls back, and flush() writes the rest."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        self.due.append(callback)
        return Timer(callback)

    def watch(self, fd: int, mask: int, ready: ReadyCallback) -> None:
        pass

    def unwatch(self, fd: int) -> None:
        pass


class Pipe:
    """A pipe, and all that was read from it once somebody began to read."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self.write_end, False)
        self._data = bytearray()
        self._reader = threading.Thread(target=self._read)

    def read(self) -> None:
        self._reader.start()

    def _read(self) -> None:
        while data := os.read(self._read_end, 65536):
            self._data += data

    def close(self) -> list[str]:
        """The lines that came."""
        os.close(self.write_end)
        if self._reader.ident is not None:
            self._reader.join()
        else:
            self._data += os.read(self._read_end, 1 << 20)
        os.close(self._read_end)
        assert self._data.endswith(b"\n")
        return self._data.decode().splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    yield Pipe()


def make_line(number: int) -> bytes:
    return b"%d " % number + b"x" * (WIDTH - len(str(number)) - 2)


def read_numbers(lines: list[str]) -> tuple[list[int], int]:
    """Return the numbers of the lines that came, and the count of dropped lines."""
    notices = [re.match(r"\((\d+) lines were dropped here", line) for line in lines]
    came = [
        int(line.split(" ")[0])
        for line, notice in zip(lines, notices, strict=True)
        if notice is None
    ]
    return came, sum(int(notice[1]) for notice in notices if notice)


def test_oldest_lines_are_dropped_and_counted(pipe: Pipe) -> None:
    stream = OutputStream(Idle(), pipe.write_end)
    for number in range(LINES):
        stream.write_line(make_line(number))
    pipe.read()
    stream.flush(60.0)
    came, dropped = read_numbers(pipe.close())
    assert came[-1] == LINES - 1 and came == sorted(came)
    assert dropped > 0 and dropped + len(came) == LINES
    assert (LINES - dropped) * WIDTH > MAX_QUEUED_BYTES - 2 * WIDTH


def test_flush_keeps_last_lines_and_count_for_a_late_reader(pipe: Pipe) -> None:
    stream = OutputStream(Idle(), pipe.write_end)
    for number in range(1000):
        stream.write_line(make_line(number))
    stream.flush(0.0)  # its time is over
    pipe.read()
    stream.flush(60.0)
    came, dropped = read_numbers(pipe.close())
    assert came[-1] == 999 and dropped > 0 and dropped + len(came) == 1000
    assert len(came) * WIDTH < 4 * FINAL_BYTES


def test_patient_stream_waits_for_its_reader(pipe: Pipe) -> None:
    stream, room = OutputStream(Idle(), pipe.write_end, patience_s=math.inf), threading.Event()
    stream.on_room = room.set
    lines = iter(range(LINES))
    while not stream.is_behind:
        stream.write_line(make_line(next(lines)))
    room.clear()
    for number in lines:
        stream.write_line(make_line(number))
    assert not room.is_set()
    pipe.read()
    stream.flush(0.0)
    assert room.is_set() and read_numbers(pipe.close()) == (list(range(LINES)), 0)


def test_patience_ends_and_returns_with_the_reader(pipe: Pipe) -> None:
    loop, room = Idle(), threading.Event()
    stream, lines = OutputStream(loop, pipe.write_end, patience_s=1.0), iter(range(LINES))
    while not stream.is_behind:
        stream.write_line(make_line(next(lines)))
    stream.on_room = room.set
    while stream.is_behind:
        time.sleep(0.01)
    assert not room.is_set()
    loop.due.pop()()
    assert room.is_set()
    for number in lines:
        stream.write_line(make_line(number))
    pipe.read()
    stream.flush(0.0)
    came, dropped = read_numbers(pipe.close())
    assert came[-1] == LINES - 1 and dropped > 0 and dropped + len(came) == LINES


def test_partially_written_line_is_never_dropped(pipe: Pipe) -> None:
    stream = OutputStream(Idle(), pipe.write_end)
    stream.write_line(b"0 " + b"y" * (1 << 20))  # the pipe takes some of it
    for number in range(1, LINES):
        stream.write_line(make_line(number))
    pipe.read()
    stream.flush(60.0)
    came, dropped = read_numbers(pipe.close())
    assert came[0] == 0 and came[-1] == LINES - 1 and dropped + len(came) == LINES


@pytest.mark.parametrize(("has_reader", "number"), [(False, errno.ENXIO), (True, errno.EINVAL)])
def test_fifo_in_place_of_a_log_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_reader: bool, number: int
) -> None:
    path = log_path(tmp_path, 0)
    path.parent.mkdir()
    os.mkfifo(path)
    if has_reader:
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("a FIFO is opened to be read"))
    faults: list[OSError] = []
    log = RankLog(tmp_path, 0, 1 << 20, faults.append)
    log.write_line(b"a")
    log.write_line(b"b")
    assert [fault.errno for fault in faults] == [number]
    if has_reader:
        os.close(reader)


@pytest.mark.parametrize("kept_bytes", [1 << 20, 4], ids=["write", "rotation"])
def test_log_that_cannot_be_written_is_reported_once(tmp_path: Path, kept_bytes: int) -> None:
    faults: list[OSError] = []
    log = RankLog(tmp_path, 0, kept_bytes, faults.append)
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may grow any more, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, previous[1]))
    try:
        log.write_line(b"the buffer of the file holds this line")
        # It does not hold this one.
        log.write_line(b"a" * 100_000)
        log.flush()
        log.write_line(b"b")
        log.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
    assert [fault.errno for fault in faults] == [errno.EFBIG]
