"""The metrics in a run's folder: JSON lines, and TensorBoard events where tensorboardX is installed.

Each step is in a file once, whatever happened in between: a run that resumes at step r drops the lines after it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from typing import Any

from jaxlaunch import regular_files
from jaxlaunch.contract import Key
from jaxlaunch.trainer.metrics.progress import finite

MAX_LINE = 1024 * 1024  # characters: of a longer one no piece is a line of ours


class Journal:
    """A file of JSON lines, one object a line, each with its `step`. Raises OSError like any file."""

    def __init__(self, path: str, start: int) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        kept = {step: line for step, line in _lines(path) if step <= start}
        if os.path.exists(path):
            with open(f"{path}.tmp", "w") as rewritten:
                rewritten.writelines(kept.values())
            os.replace(f"{path}.tmp", path)
        self._last = max(kept, default=-1)
        self._file = open(path, "a", opener=regular_files.opener)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one line and flushes it to the system. A step that is in the file already is not written again."""
        if step > self._last:
            self._last = step
            self._file.write(json.dumps({Key.STEP: step, **finite(values)}) + "\n")
            self._file.flush()

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
                step = json.loads(line)[Key.STEP]
            except (ValueError, TypeError, KeyError):
                continue
            if isinstance(step, int) and line.endswith("\n"):
                yield step, line


class TensorBoard:
    """Scalars as TensorBoard events: one record a call, written to the system when it returns.

    Uses tensorboardX for the messages and their checksum. Its SummaryWriter makes an event of every scalar, for another
    thread, through a queue of ten that blocks: half a millisecond for a dozen, and a kill loses what waits. Its own
    flush is an fsync: 3 ms.
    """

    def __init__(self, folder: str, start: int) -> None:
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import masked_crc32c

        os.makedirs(folder, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(os.path.join(folder, name), "ab", buffering=0)
        self._event, self._checksum = event_pb2.Event, masked_crc32c
        self._record(self._event(wall_time=time.time(), file_version="brain.Event:2"))
        began = event_pb2.SessionLog(
            status=event_pb2.SessionLog.START
        )  # hides what an earlier attempt wrote from here on
        self._record(self._event(wall_time=time.time(), step=start + 1, session_log=began))

    def write(self, step: int, values: Mapping[str, float | None]) -> None:
        """One event with every value that is known."""
        event = self._event(wall_time=time.time(), step=step)
        for name, value in values.items():
            if value is not None:
                event.summary.value.add(tag=name, simple_value=value)
        self._record(event)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def _record(self, event: Any) -> None:
        data = event.SerializeToString()
        size = struct.pack("<Q", len(data))
        checksums = [struct.pack("<I", self._checksum(part)) for part in (size, data)]
        self._file.write(size + checksums[0] + data + checksums[1])


def tensorboard_installed() -> bool:
    """Whether the extra `tensorboard` is installed: if it is, events are written."""
    return importlib.util.find_spec("tensorboardX") is not None
