"""Summaries that are written in parallel to the loop."""

from __future__ import annotations

import queue
import threading

from jaxlaunch.launcher.agent.leader.publishers import LatestWriter
from jaxlaunch.records.summary import Summary

PATIENCE_S = 30.0


class Stalled:
    """A run folder whose storage takes each file when the test lets it."""

    def __init__(self) -> None:
        self.begun: queue.Queue[int] = queue.Queue()
        self.may_end = threading.Semaphore(0)
        self.written: list[int] = []

    def keep(self, summary: Summary) -> None:
        assert summary.step is not None
        self.begun.put(summary.step)
        assert self.may_end.acquire(timeout=PATIENCE_S)
        self.written.append(summary.step)


def summary(step: int) -> Summary:
    return Summary(None, step=step, seconds={}, restarts={})


def test_stalled_storage_gets_the_newest_value_next() -> None:
    folder = Stalled()
    writer = LatestWriter[Summary](folder.keep)
    writer.enqueue(summary(1))
    assert folder.begun.get(timeout=PATIENCE_S) == 1
    for step in (2, 3, 4):
        writer.enqueue(summary(step), wait_s=0.01)
    folder.may_end.release(2)
    assert folder.begun.get(timeout=PATIENCE_S) == 4
    writer.finish()
    assert folder.written == [1, 4]


def test_writer_writes_nothing_after_finish() -> None:
    folder = Stalled()
    writer = LatestWriter[Summary](folder.keep)
    writer.enqueue(summary(1))
    assert folder.begun.get(timeout=PATIENCE_S) == 1
    writer.enqueue(summary(2))
    folder.may_end.release(1)
    writer.finish()
    assert folder.written == [1]
