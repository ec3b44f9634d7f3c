"""The files of a run folder that hold its metrics, and the tracker that follows them.

A disk that fails raises nothing here: it is noted, once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlaunch.runs import layout
from jaxlaunch.runs.journal import Journal, TensorBoard
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.tracking import feeding


class MetricsFiles:
    """Journals, TensorBoard events (where the extra `tensorboard` is installed) and the tracker of a run folder."""

    def __init__(self, folder: str, report: Progress) -> None:
        self._folder, self._report = folder, report
        self._first_step = 0
        self._journals: dict[str, Journal] = {}
        self._board: TensorBoard | None = None
        self._feed: feeding.Feed | None = None

    def open(self, step: int) -> None:
        """Open the files of a loop that begins after `step` complete steps, and start the tracker."""
        self._first_step = step
        attempt(self._report, "no metrics in the run folder", self._open)
        attempt(self._report, "no tracker", self._track)

    def _open(self) -> None:
        for name in ("metrics", "eval"):
            self._journals[name] = Journal(os.path.join(self._folder, f"{name}.jsonl"), self._first_step)
        if importlib.util.find_spec("tensorboardX") is not None and not feeding.writes_events():
            self._board = TensorBoard(os.path.join(self._folder, layout.TENSORBOARD), self._first_step)

    def _track(self) -> None:
        self._feed = feeding.start(self._folder)

    def write(self, name: str, step: int, values: Mapping[str, float | None]) -> None:
        """Write a line of the journal `name`, and its scalars as events."""
        journal, board = self._journals.get(name), self._board
        if journal is not None:
            is_written = attempt(self._report, f"no more {name}.jsonl", lambda: journal.write(step, values))
            if not is_written:
                # The lines that wait in the journal cannot be written either.
                with contextlib.suppress(OSError):
                    self._journals.pop(name).close()
        if board is not None:
            prefix = "train" if name == "metrics" else name
            scalars = {f"{prefix}/{key}": value for key, value in values.items() if key != "time"}
            if not attempt(self._report, "no more TensorBoard events", lambda: board.write(step, scalars)):
                self._board = None
                board.close()

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write a line of samples."""

        def append() -> None:
            if "samples" not in self._journals:
                self._journals["samples"] = Journal(os.path.join(self._folder, layout.SAMPLES), self._first_step)
            self._journals["samples"].write(step, {"samples": samples, "time": time.time()})

        attempt(self._report, "no samples in the run folder", append)

    def close(self) -> None:
        """Close the files. Never raises."""
        for file in (*self._journals.values(), self._board):
            if file is not None:
                attempt(self._report, "the metrics could not be closed", file.close, Exception)

    def end_tracking(self, *, stops: bool) -> None:
        """Wait until the tracker has every line of the files, which are closed; briefly where the run `stops`."""
        if self._feed is not None and (lost := self._feed.leave() if stops else self._feed.close()) is not None:
            self._report.note(lost)
            print(lost, file=sys.stderr, flush=True)


def attempt(report: Progress, lost: str, action: Callable[[], object], kind: type[Exception] = OSError) -> bool:
    """Return whether `action` succeeded. An OSError (a full disk, a taken socket) is noted, and the run goes on."""
    try:
        action()
    except kind as fault:
        report.note(f"{lost}: {fault}")
        print(f"{lost}: {fault}", file=sys.stderr, flush=True)
        return False
    return True
