"""Writers of the metrics in a run folder: as lines of JSON, and as events for TensorBoard.

A file has each step only once, because a run that resumes from a step drops the lines of later
steps. The module needs only the standard library.
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
# jaxlaunch writes no longer lines. Longer ones are read in pieces, none of which is valid.
MAX_LINE_CHARS = 1024 * 1024


def replace_non_finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with None for floats that are not finite."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }


class AppendedFile:
    """A file that is appended to without a buffer.

    If the system refuses data, or accepts only a part of it, as on a full disk, the next call
    begins with the rest. So nothing that was appended is missing or torn once a write succeeds.
    """

    def __init__(self, path: str) -> None:
        self._file = open(path, "ab", buffering=0, opener=regular_files.open_regular)  # noqa: SIM115  # until close()
        self._written_bytes = self._file.tell()
        self._unwritten = bytearray()

    @property
    def size_bytes(self) -> int:
        """Size of the file, with the data that could not be written yet."""
        return self._written_bytes + len(self._unwritten)

    def append(self, data: bytes) -> None:
        """Append data. After an OSError, it is written by the next call."""
        self._unwritten += data
        while self._unwritten:
            count = self._file.write(self._unwritten) or 0
            self._written_bytes += count
            del self._unwritten[:count]

    def truncate(self, size_bytes: int) -> None:
        """Remove what was appended after `size_bytes`."""
        if size_bytes < self._written_bytes:
            self._file.truncate(size_bytes)
            self._written_bytes = size_bytes
        del self._unwritten[size_bytes - self._written_bytes :]

    def close(self) -> None:
        """Write the rest, and close the file even if that fails."""
        try:
            self.append(b"")
        finally:
            self._file.close()


class Journal:
    """Writes a file with one JSON object per line, each with its `step`.

    Args:
        path: Path of the file, whose folder is created.
        start: Step from which the run resumes. Lines of later steps are removed.

    Raises:
        OSError: The file cannot be read or written. The methods raise it, too.
    """

    def __init__(self, path: str, start: int) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        kept_lines = {step: line for step, line in _read_lines(path) if step <= start}
        if os.path.exists(path):
            atomic_file.write_file(Path(path), "".join(kept_lines.values()).encode())
        self._last_step = max(kept_lines, default=-1)
        # The last line and its offset, if this journal wrote it.
        self._row: dict[str, Any] | None = None
        self._row_offset = 0
        self._file = AppendedFile(path)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line, unless the last line has this step or a later one.

        After an OSError, the next call writes this line, too.
        """
        line = b""
        if step > self._last_step:
            row = {STEP: step, **replace_non_finite(values)}
            line = json.dumps(row).encode() + b"\n"
            self._last_step, self._row, self._row_offset = step, row, self._file.size_bytes
        self._file.append(line)

    def merge_step(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line, or add its values to the last line if both have the same step."""
        if step == self._last_step and self._row is not None:
            self._file.truncate(self._row_offset)
            self._last_step, values = -1, {**self._row, **values}
        self.write(step, values)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _read_lines(path: str) -> Iterator[tuple[int, str]]:
    """Yield the step and the text of each valid line of a file."""
    if not os.path.exists(path):
        return
    with open(path, errors="replace", opener=regular_files.open_regular) as file:
        for line in iter(lambda: file.readline(MAX_LINE_CHARS), ""):
            try:
                step = json.loads(line)[STEP]
            except (ValueError, TypeError, KeyError):
                continue
            if isinstance(step, int) and line.endswith("\n"):
                yield step, line


class TensorBoard:
    """Writes scalars and texts as events for TensorBoard, one unbuffered record per call.

    An event is a protocol buffer of event.proto with the fields wall_time (1), step (2),
    file_version (3), summary (5) and session_log (7).
    """

    def __init__(self, folder: str, start: int) -> None:
        os.makedirs(folder, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(os.path.join(folder, name))
        self._write_event(_encode_time() + _encode_bytes(3, b"brain.Event:2"))
        # After SessionLog.START, TensorBoard hides the later steps of earlier attempts.
        session = _encode_bytes(7, _encode_number(1, 1))
        self._write_event(_encode_time() + _encode_number(2, start + 1) + session)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one event with those of the values that are numbers."""
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        summary = b""
        for name, value in numbers.items():
            number = struct.pack("<Bf", 2 << 3 | 5, _clamp_float32(value))
            summary += _encode_bytes(1, _encode_bytes(1, name.encode()) + number)
        self._write_event(_encode_time() + _encode_number(2, step) + _encode_bytes(5, summary))

    def write_text(self, step: int, name: str, text: str) -> None:
        """Write one event with a text, which TensorBoard shows as Markdown."""
        # Summary.Value has tag (1), tensor (8) and metadata (9), which names the plugin. The tensor
        # has dtype (1), which is DT_STRING = 7, an empty shape (2) and string_val (8).
        metadata = _encode_bytes(1, _encode_bytes(1, b"text"))
        tensor = _encode_number(1, 7) + _encode_bytes(2, b"") + _encode_bytes(8, text.encode())
        value = _encode_bytes(1, name.encode()) + _encode_bytes(9, metadata)
        summary = _encode_bytes(1, value + _encode_bytes(8, tensor))
        self._write_event(_encode_time() + _encode_number(2, step) + _encode_bytes(5, summary))

    def write_image(self, step: int, name: str, png: bytes) -> None:
        """Write one event with a PNG file."""
        # Summary.Value has tag (1) and image (4), which has height (1), width (2), colorspace (3)
        # and encoded_image_string (4). TensorBoard reads the real colours from the file.
        # In a PNG file, both sizes follow 8 bytes of signature and 8 of the first chunk.
        width, height = struct.unpack(">II", png[16:24])
        image = _encode_number(1, height) + _encode_number(2, width) + _encode_number(3, 3)
        value = _encode_bytes(1, name.encode()) + _encode_bytes(4, image + _encode_bytes(4, png))
        event = _encode_number(2, step) + _encode_bytes(5, _encode_bytes(1, value))
        self._write_event(_encode_time() + event)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write_event(self, event: bytes) -> None:
        size = struct.pack("<Q", len(event))
        checksums = [struct.pack("<I", _masked_crc32c(part)) for part in (size, event)]
        self._file.append(size + checksums[0] + event + checksums[1])


# --- protocol buffers -----------------------------------------------------------------------------


def _encode_varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _encode_number(field: int, value: int) -> bytes:
    return _encode_varint(field << 3) + _encode_varint(value)


def _encode_bytes(field: int, value: bytes) -> bytes:
    return _encode_varint(field << 3 | 2) + _encode_varint(len(value)) + value


def _encode_time() -> bytes:
    return struct.pack("<Bd", 1 << 3 | 1, time.time())


def _clamp_float32(value: float) -> float:
    """Return infinity for values beyond the range of float32, for which `struct` raises."""
    is_outside = abs(value) > 3.4028235e38
    return math.copysign(math.inf, value) if is_outside else float(value)


def _crc_table() -> Iterator[int]:
    for byte in range(256):
        for _ in range(8):
            # CRC-32C (Castagnoli), RFC 3720, appendix B.4.
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        yield byte


_CRC = tuple(_crc_table())


def _masked_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
