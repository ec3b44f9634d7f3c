"""The metrics in a run's folder: JSON lines, and TensorBoard events. Standard library only.

Each step is in a file once, whatever happened in between: a run that resumes at step r drops the lines after it.
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxlaunch import atomic_file, regular_files

STEP = "step"
MAX_LINE = 1024 * 1024  # characters: of a longer one no piece is a line of ours


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with None for every float that is not finite: JSON has no such numbers."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


class Journal:
    """A file of JSON lines, one object a line, each with its `step`. Raises OSError like any file."""

    def __init__(self, path: str, start: int) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        kept = {step: line for step, line in _lines(path) if step <= start}
        if os.path.exists(path):
            atomic_file.write(Path(path), "".join(kept.values()).encode())
        self._last = max(kept, default=-1)
        self._row: dict[str, Any] | None = None  # the last line, where this journal wrote it, and where it begins
        self._at = 0
        self._file = open(path, "a", opener=regular_files.opener)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one line and flushes it to the system. A step that is in the file already is not written again."""
        if step > self._last:
            self._last, self._at = step, self._file.tell()
            self._row = {STEP: step, **finite(values)}
            self._file.write(json.dumps(self._row) + "\n")
            self._file.flush()

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one line; where the last one is of this step, its numbers join it."""
        if step == self._last and self._row is not None:
            self._file.truncate(self._at)
            self._last, values = -1, {**self._row, **values}
        self.write(step, values)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """The lines of `path` with their steps, without those that a kill or a bad disk left unreadable."""
    if not os.path.exists(path):
        return
    with open(path, errors="replace", opener=regular_files.opener) as file:
        for line in iter(lambda: file.readline(MAX_LINE), ""):
            try:
                step = json.loads(line)[STEP]
            except (ValueError, TypeError, KeyError):
                continue
            if isinstance(step, int) and line.endswith("\n"):
                yield step, line


class TensorBoard:
    """Scalars as TensorBoard events: one record a call, written to the system when it returns.

    An event is a message of event.proto: its time (1), step (2), version (3), summary (5), session (7).
    """

    def __init__(self, folder: str, start: int) -> None:
        os.makedirs(folder, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(os.path.join(folder, name), "ab", buffering=0)
        self._record(_now() + _bytes(3, b"brain.Event:2"))
        # A session that starts (SessionLog.START) hides what an earlier attempt wrote from here on.
        self._record(_now() + _number(2, start + 1) + _bytes(7, _number(1, 1)))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """One event with every value that is a number."""
        known = {name: value for name, value in values.items() if isinstance(value, int | float)}
        summary = b"".join(
            _bytes(1, _bytes(1, name.encode()) + struct.pack("<Bf", 2 << 3 | 5, _single(value)))
            for name, value in known.items()
        )
        self._record(_now() + _number(2, step) + _bytes(5, summary))

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _record(self, event: bytes) -> None:
        size = struct.pack("<Q", len(event))
        checksums = [struct.pack("<I", _masked_crc32c(part)) for part in (size, event)]
        self._file.write(size + checksums[0] + event + checksums[1])


# --- protocol buffers -------------------------------------------------------------------------------------------------


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _now() -> bytes:
    return struct.pack("<Bd", 1 << 3 | 1, time.time())


def _single(value: float) -> float:
    """A number that 32 bits can hold; beyond them it is infinite."""
    return float(value) if abs(value) <= 3.4028235e38 or value != value else math.copysign(math.inf, value)


def _table() -> Iterator[int]:
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # CRC-32C, Castagnoli; RFC 3720, appendix B.4
        yield byte


_CRC = tuple(_table())


def _masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
