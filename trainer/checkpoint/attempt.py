"""What every attempt at a run does alike, whoever's step it calls: it reports what is saved, leaves when it is stopped,
and ends with each save committed or failed."""

from __future__ import annotations

import abc
import contextlib
from typing import Generic, NoReturn, TypeVar

import jax

from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.distributed import Stop
from jaxlaunch.trainer.errors import Stopped
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import Metrics

S = TypeVar("S")  # the state of a run


class Attempt(abc.ABC, Generic[S]):
    """The saves and the ends of an attempt. A subclass sets `folder`, `store` and `metrics`, and saves by `_save`."""

    folder: str
    store: Store
    metrics: Metrics

    def __init__(self, stop: Stop, report: Progress) -> None:
        self.stop, self.report = stop, report
        self.saved = -1  # the last step that was handed to the store
        self._committed: int | None = None

    @abc.abstractmethod
    def _save(self, done: int, state: S) -> None:
        """Starts a save of the state, which the store writes while the loop goes on."""

    def _report_commits(self) -> None:
        """Reports a newly committed step to agent and metrics. Raises StorageError when a save failed."""
        step = self.store.committed()
        if step is not None and step != self._committed:
            self._committed = step
            self.metrics.committed(step)
            self.report.committed(step)

    def _leave_if_stopped(self, done: int, state: S) -> None:
        if self.stop.poll():
            self._leave(done, state)

    def _leave(self, done: int, state: S) -> NoReturn:
        """Saves the state if it is new, and raises Stopped. Every rank is at the same step."""
        self.report.phase("save", done)
        saved = max(self.saved, 0)
        is_new, note = done > saved, f"nothing new to save after step {saved}"
        if is_new and (taken := self.store.taken(done)):  # no reason to end a run that can go on from an older step
            is_new, note = False, f"nothing new saved after step {saved}: {taken} in {self.folder} is another's"
        if is_new:
            note = f"saved step {done}"
            self._save(done, state)
        self._settle(done)
        self.report.stopped(done, is_new, note)
        raise Stopped(f"stopped from outside: {note}")

    def release(self) -> None:
        """Gives the checkpoint folder back, before the first step: a run that is refused leaves it as it was."""
        with contextlib.suppress(Exception):  # the run ends by its first error, whatever a store that is down raises
            self.store.close()

    def wait_for_saves(self) -> None:
        """Waits for a save that began before an error: it is valid, and the last of this attempt."""
        with contextlib.suppress(Exception):  # the run ends by its first error
            self.store.wait()
            self._report_commits()

    def _settle(self, done: int) -> None:
        """Waits until every save is committed or failed, and closes store and metrics."""
        self.report.phase("save", done)
        self.store.wait()
        self._report_commits()
        self.store.close()
        self.metrics.close()

    def _note(self, text: str) -> None:
        """Prints a note, and reports it for summary.json."""
        if jax.process_index() == 0:
            print(text, flush=True)
            self.report.note(text)
