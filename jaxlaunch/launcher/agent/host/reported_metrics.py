"""What rank 0 of a program reports by `jaxlaunch.report`, where the metrics of `train:` are: metrics.jsonl, TensorBoard
events, and a line on the screen now and then.

Files are written by a thread, since storage may stall for longer than a host may be silent.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxlaunch.runs import layout
from jaxlaunch.runs.journal import STEP, Journal, TensorBoard, finite

SHOWN_EVERY_S = 10.0  # between two lines on the screen
MOST_WAITING = 1000  # rows for storage that stalls; more are dropped
LAST_WORDS_S = 5.0  # for what waits when the program has ended

Row = tuple[int, Mapping[str, Any]]


class ReportedMetrics:
    """The metrics of one program after the other; `note` gets a sentence where they cannot be kept."""

    def __init__(self, folder: Path | None, say: Callable[[str], None], note: Callable[[str], object]) -> None:
        self._folder, self._say, self._note = folder, say, note
        self.unsent: Mapping[str, Any] | None = None  # the newest, until the leader has them
        self._shown_at = time.monotonic()
        self._unsaid: Row | None = None
        self._rows: queue.Queue[Row | None] | None = None
        self._writer: threading.Thread | None = None

    def add(self, step: int | None, metrics: Mapping[str, Any]) -> None:
        """Keeps the numbers of a step. Those of no step, and of a loop of ours, which keeps its own, are left out."""
        self.unsent = metrics
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float) or value is None}
        if step is None or STEP in metrics or not numbers:
            return
        if self._unsaid is not None and self._unsaid[0] == step:
            self._unsaid = step, {**self._unsaid[1], **numbers}
        else:
            self._unsaid = step, numbers
        if time.monotonic() - self._shown_at >= SHOWN_EVERY_S:
            self._show()
        if self._folder is not None:
            self._put((step, {**finite(numbers), **({} if "time" in numbers else {"time": time.time()})}))

    def end(self) -> None:
        """Shows the last numbers of a program that has ended; returns when they are written, or storage stalls."""
        self._show()
        if self._rows is not None and self._writer is not None:
            self._put(None)
            self._writer.join(LAST_WORDS_S)
        self._rows = self._writer = None

    def _show(self) -> None:
        if self._unsaid is not None:
            step, numbers = self._unsaid
            known = "  ".join(f"{name} {value:.4g}" for name, value in numbers.items() if value is not None)
            self._say(f"step {step}  {known}")
        self._unsaid, self._shown_at = None, time.monotonic()

    def _put(self, row: Row | None) -> None:
        if self._rows is None:
            self._rows = queue.Queue(MOST_WAITING)
            self._writer = threading.Thread(target=self._write, args=(self._rows,), daemon=True)
            self._writer.start()
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            pass  # the storage has not answered for minutes

    def _write(self, rows: queue.Queue[Row | None]) -> None:
        journal: Journal | None = None
        board: TensorBoard | None = None
        try:
            while (row := rows.get()) is not None:
                step, values = row
                if journal is None or board is None:
                    journal = Journal(f"{self._folder}/{layout.METRICS}", step - 1)
                    board = TensorBoard(f"{self._folder}/tensorboard", step - 1)
                journal.add(step, values)
                board.write(step, {f"train/{name}": value for name, value in values.items() if name != "time"})
        except OSError as error:
            self._note(f"no more metrics.jsonl: {error}")
        finally:
            for each in (journal, board):
                if each is not None:
                    each.close()
