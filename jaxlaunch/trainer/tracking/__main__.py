"""Sends the metrics of a run to its tracker: `python -m jaxlaunch.trainer.tracking JSON`.

It follows metrics.jsonl and eval.jsonl in the run folder, and sends each line once across restarts:
`tracker.json` stores the id of the run and the last step of each file. If a step is trained again
after a restart, its first line counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from jaxlaunch import atomic_file
from jaxlaunch.runs import layout
from jaxlaunch.runs.journal import STEP
from jaxlaunch.tracker_feed import LATE_CODE, NOT_OPENED_CODE
from jaxlaunch.trainer.tracking import trackers

LOCK_FILE = ".tracker.lock"
# The journal of samples, among those with numbers.
SAMPLES = "samples"
POLL_S = 0.5
# The agent has written the last numbers that a program reported after this time.
LAST_ROW_S = 5.0
# The training has priority.
NICENESS = 10


def main() -> None:
    """Send lines until the training ends, and then the remaining ones."""
    settings = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        # This program ends when the training does, not on a signal.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    course = _Lifecycle()
    threading.Thread(target=_watch_training, args=(course, settings), daemon=True).start()
    with open(os.path.join(settings["folder"], LOCK_FILE), "w") as lock:
        # The program of an earlier attempt may still be sending its last lines.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _hand_over(settings, course)
    if course.is_late.is_set():
        sys.exit(LATE_CODE)


class _Lifecycle:
    """Events: the training has ended, the tracker is open, no time is left for more lines."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.is_open = threading.Event()
        self.is_late = threading.Event()
        # The last step that a program reported, whose row the agent writes a moment later.
        self.last_step = -1
        self.ended_at = math.inf

    def has_row(self, newest_step: int) -> bool:
        """Return whether the row of the last step is written, or is not expected any more."""
        return newest_step >= self.last_step or time.monotonic() > self.ended_at + LAST_ROW_S


def _watch_training(course: _Lifecycle, limits: Mapping[str, Any]) -> None:
    """Wait for the end of the training, and end a tracker that does not open or does not return."""
    # The loop does not use stdin's buffer: Python aborts if a thread holds it at exit.
    text = b""
    # A program that ends writes a line: forks of it, such as workers that read data, keep the pipe
    # open. One that is killed writes nothing.
    while b"\n" not in text and (part := os.read(sys.stdin.fileno(), 1 << 16)):
        text += part
    course.last_step, course.ended_at = int(text.strip() or -1), time.monotonic()
    course.is_over.set()
    if not course.is_open.wait(limits["opens_s"]):
        os._exit(NOT_OPENED_CODE)
    time.sleep(limits["ends_s"])
    # Read between two lines: a line that was sent but not recorded would be sent again.
    course.is_late.set()
    time.sleep(limits["closes_s"])
    os._exit(LATE_CODE)


def _hand_over(settings: Mapping[str, Any], course: _Lifecycle) -> None:
    """Send each line as it appears, until the training has ended or the time is up."""
    folder = settings["folder"]
    state = _TrackerState(folder, settings["tracker"], settings["uid"], _name_project(settings))
    config = settings.get("config") or {}
    tracker = trackers.open_tracker(
        settings["tracker"],
        trackers.Run(
            id=state.id,
            name=settings["name"],
            folder=folder,
            step=max(state.sent.values(), default=0),
            project=state.project,
            group=settings.get("group"),
            labels=settings.get("labels") or {},
            config=config,
        ),
    )
    built_in = tracker if isinstance(tracker, trackers.BuiltInTracker) else None
    if built_in is not None:
        if built_in.is_complete:
            state.sent.clear()
        state.record_place(built_in.describe_place())
    course.is_open.set()
    files = layout.JOURNALS | ({} if built_in is None else {SAMPLES: layout.SAMPLES})
    may_merge = bool(settings.get("is_reported"))
    readers = {
        name: _JournalReader(os.path.join(folder, file), may_merge=may_merge)
        for name, file in files.items()
    }
    order = list(files)
    is_last = False
    while True:
        rows = [
            (row.pop(STEP), order.index(journal), row)
            for journal, reader in readers.items()
            for row in reader.read_rows(is_last=is_last)
        ]
        for step, index, row in sorted(rows, key=lambda item: item[:2]):
            journal = order[index]
            if step <= state.sent.get(journal, -1) or course.is_late.is_set():
                continue
            if built_in is not None and journal == SAMPLES:
                samples = [item for item in row.get("samples", ()) if isinstance(item, dict)]
                if samples:
                    built_in.log_samples(step, samples)
            else:
                row.pop("time", None)
                # The names are those of the TensorBoard events.
                values = {
                    f"{layout.JOURNAL_PREFIXES[journal]}/{name}": float(value)
                    for name, value in row.items()
                    if isinstance(value, int | float)
                }
                tracker.log(step, values)
            state.record_step(journal, step)
        state.sync_file()
        if is_last:
            return tracker.close()
        # One more round sends the lines that were written before the training ended.
        is_last = course.is_over.wait(POLL_S) and course.has_row(readers["metrics"].newest_step)
        if may_merge and course.is_over.is_set():
            time.sleep(POLL_S)


def _name_project(settings: Mapping[str, Any]) -> str:
    """Return the project of a new run: the job's key, the tracker's variable, or the default."""
    variable = trackers.PROJECT_VARIABLES.get(settings["tracker"])
    chosen = settings.get("project") or (variable and os.environ.get(variable))
    return str(chosen or settings.get("default_project") or settings["name"])


class _TrackerState:
    """State that survives restarts: the run's id and project, and the last step sent."""

    def __init__(self, folder: str, tracker: str, uid: str, project: str) -> None:
        self._path = Path(folder, layout.TRACKER)
        state: Mapping[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(self._path.read_text())
        # Another tracker has received nothing.
        state = state if state.get("tracker") == tracker else {}
        # The uid is the same in all pods of a job, for the case that its run folder does not
        # survive them.
        self._tracker = tracker
        self.id = str(state.get("id") or uuid.uuid5(uuid.NAMESPACE_OID, uid).hex)
        # A run stays in the project in which it began, so that it is one run there.
        self.project = str(state.get("project") or project)
        self.sent: dict[str, int] = dict(state.get("sent") or {})
        self._place: Mapping[str, str] = {}
        self._write_file(is_synced=True)

    def record_step(self, journal: str, step: int) -> None:
        """Record that the tracker has the line of this step, even if this process is killed now."""
        self.sent[journal] = step
        # A sync for each line would take longer than many trackers do, and there are only 30 s for
        # the last lines.
        self._write_file(is_synced=False)

    def record_place(self, place: trackers.Place) -> None:
        """Record where a person sees the run."""
        self._place = place._asdict()
        self._write_file(is_synced=True)

    def sync_file(self) -> None:
        """Sync the file if it has changed."""
        if self._has_news:
            self._write_file(is_synced=True)

    def _write_file(self, *, is_synced: bool) -> None:
        state = {
            "tracker": self._tracker,
            "id": self.id,
            "project": self.project,
            "place": self._place,
            "sent": self.sent,
        }
        atomic_file.write_file(self._path, json.dumps(state).encode(), is_synced=is_synced)
        self._has_news = not is_synced


class _JournalReader:
    """A reader that follows a growing journal and returns its new complete lines.

    With `may_merge` the newest line may still get more numbers of its step, so it is returned when
    the next one is there, or at the end.
    """

    def __init__(self, path: str, *, may_merge: bool) -> None:
        self._path, self._may_merge = path, may_merge
        self._offset, self.newest_step = 0, -1
        self._file: FileIO | None = None

    def read_rows(self, *, is_last: bool) -> Iterator[dict[str, Any]]:
        """Yield the objects in the new lines, without invalid ones."""
        if self._file is None:
            try:
                # It stays open until the program ends. A buffer would keep a line that changes.
                self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115
            except OSError:
                return
        self._file.seek(self._offset)
        *lines, _ = self._file.read().split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            is_row = isinstance(row, dict) and isinstance(row.get(STEP), int)
            if is_row:
                self.newest_step = row[STEP]
            if self._may_merge and number == len(lines) and not is_last:
                return
            self._offset += len(line) + 1
            if is_row:
                yield row


if __name__ == "__main__":
    main()
