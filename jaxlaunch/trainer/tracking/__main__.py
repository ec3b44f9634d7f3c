"""Sends the metrics of a run to its tracker: `python -m jaxlaunch.trainer.tracking JSON`.

It follows the journals, the reported pictures and texts, and the classification in the run folder,
and sends each step once, even across restarts: `tracker.json` stores the id of the run and the last
step that was sent from each source. If a step is trained again after a restart, only its first line
is sent.
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
from jaxlaunch.trainer.tracking.media import Media, MediaReader

LOCK_FILE = ".tracker.lock"
# Name of the journal with samples; the other journals have numbers.
SAMPLES = "samples"
POLL_S = 0.5
# Time in which the agent writes the last numbers that a program reported.
LAST_ROW_S = 5.0
# The training has priority over this program.
NICENESS = 10


def main() -> None:
    """Send lines until the training ends, and then the remaining lines."""
    settings = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        # This program ends when the training does, not on a signal.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    lifecycle = _Lifecycle()
    threading.Thread(target=_watch_training, args=(lifecycle, settings), daemon=True).start()
    with open(os.path.join(settings["folder"], LOCK_FILE), "w") as lock:
        # The program of an earlier attempt may still be sending its last lines.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _send_rows(settings, lifecycle)
    if lifecycle.is_late.is_set():
        sys.exit(LATE_CODE)


class _Lifecycle:
    """The events of a run that both threads of this program wait for."""

    def __init__(self) -> None:
        # The training has ended.
        self.is_over = threading.Event()
        # The tracker is open.
        self.is_open = threading.Event()
        # No time is left to send more lines.
        self.is_late = threading.Event()
        # The last step that the program reported. The agent writes its row a moment later.
        self.last_step = -1
        self.ended_at = math.inf

    def has_row(self, newest_step: int) -> bool:
        """Return whether the row of the last step is written, or no longer expected."""
        return newest_step >= self.last_step or time.monotonic() > self.ended_at + LAST_ROW_S


def _watch_training(lifecycle: _Lifecycle, limits: Mapping[str, Any]) -> None:
    """Wait until the training ends, and end this program if the tracker does not open or return."""
    # The loop does not use stdin's buffer, because Python aborts if a thread holds it at exit.
    text = b""
    # The training writes a line when it ends, because its forks, such as workers that read data,
    # may keep the pipe open. If it is killed, it writes nothing, and the pipe closes.
    while b"\n" not in text and (part := os.read(sys.stdin.fileno(), 1 << 16)):
        text += part
    lifecycle.last_step, lifecycle.ended_at = int(text.strip() or -1), time.monotonic()
    lifecycle.is_over.set()
    if not lifecycle.is_open.wait(limits["opens_s"]):
        os._exit(NOT_OPENED_CODE)
    time.sleep(limits["ends_s"])
    # The main thread checks this event between two lines, because a line that was sent and not
    # recorded would be sent again.
    lifecycle.is_late.set()
    time.sleep(limits["closes_s"])
    os._exit(LATE_CODE)


def _send_rows(settings: Mapping[str, Any], lifecycle: _Lifecycle) -> None:
    """Open the tracker, and send each row that appears until the training ends or time runs out."""
    folder = settings["folder"]
    state = _TrackerState(
        folder,
        settings["tracker"],
        settings["uid"],
        _name_project(settings),
        feed_id=settings.get("feed_id"),
    )
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
    lifecycle.is_open.set()
    files = layout.JOURNALS | ({} if built_in is None else {SAMPLES: layout.SAMPLES})
    may_merge = bool(settings.get("is_reported"))
    readers = {
        name: _JournalReader(os.path.join(folder, file), may_merge=may_merge)
        for name, file in files.items()
    }
    media_reader = None if built_in is None else MediaReader(folder)
    is_last = False
    while True:
        rows: list[tuple[int, str, Any]] = _read_rows(readers, is_last=is_last)
        if media_reader is not None:
            newest_step = readers["metrics"].newest_step
            rows += media_reader.read_media(state.sent, newest_step, is_last=is_last)
        # Rows of the same step stay in the order of `readers`, followed by the media.
        for step, source, row in sorted(rows, key=lambda row: row[0]):
            if step <= state.sent.get(source, -1) or lifecycle.is_late.is_set():
                continue
            _send_row(tracker, source, step, row)
            state.record_step(source, step)
        state.sync_file()
        if is_last:
            return tracker.close()
        # One more round sends the lines that were written before the training ended.
        is_last = lifecycle.is_over.wait(POLL_S) and lifecycle.has_row(
            readers["metrics"].newest_step
        )
        if may_merge and lifecycle.is_over.is_set():
            time.sleep(POLL_S)


def _read_rows(
    readers: Mapping[str, _JournalReader], *, is_last: bool
) -> list[tuple[int, str, dict[str, Any]]]:
    """Return the step, the journal and the values of the new rows of all journals."""
    rows_by_journal = {
        journal: [(row.pop(STEP), journal, row) for row in reader.read_rows(is_last=is_last)]
        for journal, reader in readers.items()
    }
    # A step's metrics are written before its evaluation, but may have been read too early. Trackers
    # such as W&B drop what comes after a later step.
    last_step = max((step for rows in rows_by_journal.values() for step, _, _ in rows), default=-1)
    rows_by_journal["metrics"] += [
        (row.pop(STEP), "metrics", row)
        for row in readers["metrics"].read_rows(is_last=is_last, max_step=last_step)
    ]
    return [row for rows in rows_by_journal.values() for row in rows]


def _send_row(
    tracker: trackers.Tracker, source: str, step: int, row: dict[str, Any] | Media
) -> None:
    if isinstance(row, Media):
        if isinstance(tracker, trackers.BuiltInTracker):
            tracker.log_media(step, row)
        return
    if source == SAMPLES and isinstance(tracker, trackers.BuiltInTracker):
        samples = [item for item in row.get("samples", ()) if isinstance(item, dict)]
        if samples:
            tracker.log_samples(step, samples)
        return
    row.pop("time", None)
    # Trackers get the names of the TensorBoard events.
    values = {
        f"{layout.JOURNAL_PREFIXES[source]}/{name}": float(value)
        for name, value in row.items()
        if isinstance(value, int | float)
    }
    tracker.log(step, values)


def _name_project(settings: Mapping[str, Any]) -> str:
    """Return the project of a new run: the job's key, the tracker's variable, or the default."""
    variable = trackers.PROJECT_VARIABLES.get(settings["tracker"])
    project = settings.get("project") or (variable and os.environ.get(variable))
    return str(project or settings.get("default_project") or settings["name"])


class _TrackerState:
    """State that survives restarts: the run's id and project, and the last step sent."""

    def __init__(
        self, folder: str, tracker: str, uid: str, project: str, *, feed_id: str | None = None
    ) -> None:
        self._path = Path(folder, layout.TRACKER)
        state: Mapping[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(self._path.read_text())
        # The state of another tracker does not apply.
        state = state if state.get("tracker") == tracker else {}
        # If no id is stored, for example because the run folder was lost with a pod, the id follows
        # from the uid of the job, which is the same in all pods.
        self._tracker, self._feed_id = tracker, feed_id
        self.id = str(state.get("id") or uuid.uuid5(uuid.NAMESPACE_OID, uid).hex)
        # A run stays in the project in which it began.
        self.project = str(state.get("project") or project)
        self.sent: dict[str, int] = dict(state.get("sent") or {})
        self._place: Mapping[str, str] = {}
        self._write_file(is_synced=True)

    def record_step(self, journal: str, step: int) -> None:
        """Record that the line of this step was sent, even if this process is killed now."""
        self.sent[journal] = step
        # A sync for each line would often take longer than the tracker, and the last lines must be
        # sent in 30 s.
        self._write_file(is_synced=False)

    def record_place(self, place: trackers.Place) -> None:
        """Record where the run can be viewed."""
        self._place = place._asdict()
        self._write_file(is_synced=True)

    def sync_file(self) -> None:
        """Sync the file if it has changed."""
        if self._is_unsynced:
            self._write_file(is_synced=True)

    def _write_file(self, *, is_synced: bool) -> None:
        state = {
            "tracker": self._tracker,
            "id": self.id,
            "project": self.project,
            "place": self._place,
            "feed_id": self._feed_id,
            "sent": self.sent,
        }
        atomic_file.write_file(self._path, json.dumps(state).encode(), is_synced=is_synced)
        self._is_unsynced = not is_synced


class _JournalReader:
    """A reader that follows a growing journal and returns its new complete lines.

    With `may_merge`, numbers may still be added to the newest line, so it is returned only when the
    next line exists, or at the end.
    """

    def __init__(self, path: str, *, may_merge: bool) -> None:
        self._path, self._may_merge = path, may_merge
        self._offset, self.newest_step = 0, -1
        self._file: FileIO | None = None

    def read_rows(self, *, is_last: bool, max_step: float = math.inf) -> Iterator[dict[str, Any]]:
        """Yield the rows of the new lines up to `max_step`, and skip invalid lines."""
        if self._file is None:
            try:
                # The file stays open until the program ends. A buffer would keep the old content of
                # a line that changes.
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
            if is_row and row[STEP] > max_step:
                return
            if is_row:
                self.newest_step = row[STEP]
            if self._may_merge and number == len(lines) and not is_last:
                return
            self._offset += len(line) + 1
            if is_row:
                yield row


if __name__ == "__main__":
    main()
