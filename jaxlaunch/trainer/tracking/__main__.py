"""Hands the metrics of a run to its tracker: `python -m jaxlaunch.trainer.tracking JSON`, as feeding.py starts it.

Each line of metrics.jsonl and eval.jsonl is handed over once, whatever is restarted: `tracker.json` in the run folder
has the run's id and the last step of each. Of a step that is trained again after a restart the first line counts.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from jaxlaunch import atomic_file
from jaxlaunch.runs.journal import STEP
from jaxlaunch.trainer.tracking import trackers
from jaxlaunch.trainer.tracking.feeding import LATE, UNOPENED

STATE, LOCK = "tracker.json", ".tracker.lock"
POLL_S = 0.5
NICE = 10  # a step comes first
PREFIX = {"metrics": "train", "eval": "eval"}  # of the names, by journal


def main() -> None:
    """Hands over until the training ends, and then what is left."""
    asked = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # what ends it is the end of the training
    os.nice(NICE)
    course = _Course()
    threading.Thread(target=_watch, args=(course, asked), daemon=True).start()
    with open(os.path.join(asked["folder"], LOCK), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one of an earlier attempt may still hand over its last lines
        _hand_over(asked, course)
    if course.is_late.is_set():
        sys.exit(LATE)


class _Course:
    """How far it is: the training has ended, the tracker is open, and there is no more time for what is left."""

    def __init__(self) -> None:
        self.is_over, self.is_open, self.is_late = threading.Event(), threading.Event(), threading.Event()


def _watch(course: _Course, limits: Mapping[str, Any]) -> None:
    """Notes that the training has ended, and ends a tracker that does not open, or does not return."""
    while os.read(sys.stdin.fileno(), 1 << 16):  # not its buffer: Python aborts where a thread holds that at its end
        pass
    course.is_over.set()
    if not course.is_open.wait(limits["opens_s"]):
        os._exit(UNOPENED)
    time.sleep(limits["ends_s"])
    course.is_late.set()  # seen between two lines: one whose keeping is not noted would be handed over again
    time.sleep(limits["closes_s"])
    os._exit(LATE)


def _hand_over(asked: Mapping[str, Any], course: _Course) -> None:
    """Hands over each line as it comes, until the training has ended or time is up."""
    folder, name = asked["folder"], asked["tracker"]
    state = _State(folder, name, asked["uid"])
    known = trackers.Run(state.id, asked["name"], folder, max(state.sent.values(), default=0))
    tracker = trackers.open_tracker(name, known)
    course.is_open.set()
    files = {journal: _Followed(os.path.join(folder, f"{journal}.jsonl")) for journal in PREFIX}
    is_last = False
    while True:
        rows = [(row[STEP], journal, row) for journal, file in files.items() for row in file.rows()]
        for step, journal, row in sorted(rows, key=lambda one: (one[0], one[1] == "eval")):
            if step > state.sent.get(journal, -1) and not course.is_late.is_set():
                tracker.log(step, _named(PREFIX[journal], row))
                state.keep(journal, step)
        state.sync()
        if is_last:
            return tracker.close()
        is_last = course.is_over.wait(POLL_S)  # then once more: what was written until it ended


def _named(prefix: str, row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line, under the names that TensorBoard has."""
    numbers = {name: value for name, value in row.items() if name not in (STEP, "time")}
    return {f"{prefix}/{name}": float(value) for name, value in numbers.items() if isinstance(value, int | float)}


class _State:
    """What outlives a restart: the id of the run at its tracker, and the last step of each journal that it has."""

    def __init__(self, folder: str, tracker: str, uid: str) -> None:
        self._path = os.path.join(folder, STATE)
        found: dict[str, Any] = {}
        try:
            with open(self._path) as file:
                found = json.load(file)
        except (OSError, ValueError):
            pass
        found = found if found.get("tracker") == tracker else {}  # another tracker has none of it
        # Of all pods of a job the uid is the same, should its run folder not outlive them.
        self._tracker, self.id = tracker, str(found.get("id") or uuid.uuid5(uuid.NAMESPACE_OID, uid).hex)
        self.sent: dict[str, int] = dict(found.get("sent") or {})
        self._write(is_synced=True)

    def keep(self, journal: str, step: int) -> None:
        """Note that the tracker has the line of this step, also if this process is killed now."""
        self.sent[journal] = step
        # A sync of each line would take longer than many a tracker does, and its end has 30 s for what is left.
        self._write(is_synced=False)

    def sync(self) -> None:
        """Sync what is noted, if there is any news."""
        if self._has_news:
            self._write(is_synced=True)

    def _write(self, *, is_synced: bool) -> None:
        state = {"tracker": self._tracker, "id": self.id, "sent": self.sent}
        atomic_file.write(Path(self._path), json.dumps(state).encode(), is_synced=is_synced)
        self._has_news = not is_synced


class _Followed:
    """A journal as it grows: its whole lines since the last call."""

    def __init__(self, path: str) -> None:
        self._path, self._rest = path, b""
        self._file: BinaryIO | None = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """The objects in the lines; what is none is left out."""
        if self._file is None:
            try:
                self._file = open(self._path, "rb")
            except OSError:
                return
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get(STEP), int):
                yield row


if __name__ == "__main__":
    main()
