"""Summaries that are written in parallel to the loop."""

from __future__ import annotations

import queue
import threading

import pytest

from jaxlaunch.launcher.agent.leader import publishers
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


def test_exception_of_a_write_is_logged_once_and_the_value_is_written_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishers, "WRITE_PAUSE_S", 0.0)
    faults, messages, written = [KeyError("HOST"), RuntimeError("no")], list[str](), list[int]()

    def write(value: int) -> None:
        if faults:
            raise faults.pop(0)
        written.append(value)

    writer = LatestWriter[int](write, "the state", messages.append)
    writer.enqueue(1, wait_s=PATIENCE_S)
    assert written == [1]
    faults.append(RuntimeError("again"))
    writer.enqueue(2, wait_s=PATIENCE_S)
    assert written == [1, 2]
    assert messages == ["the state could not be written: KeyError: 'HOST'; further attempts follow"]


def test_pause_after_an_exception_ends_with_an_urgent_value_or_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(publishers, "WRITE_PAUSE_S", 10 * PATIENCE_S)
    monkeypatch.setattr(publishers, "MAX_WRITE_PAUSE_S", 10 * PATIENCE_S)
    attempts: queue.Queue[int] = queue.Queue()
    written = list[int]()

    def write(value: int) -> None:
        attempts.put(value)
        if value % 2:
            raise RuntimeError("no")
        written.append(value)

    writer = LatestWriter[int](write)
    writer.enqueue(1)
    assert attempts.get(timeout=PATIENCE_S) == 1
    writer.enqueue(2, wait_s=PATIENCE_S)
    assert written == [2]
    writer.enqueue(3)
    assert attempts.get(timeout=PATIENCE_S) == 2
    assert attempts.get(timeout=PATIENCE_S) == 3
    writer.finish()
    assert written == [2] and attempts.empty() and not writer.is_busy
