"""The counters of a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from jaxlaunch.trainer import counts
from jaxlaunch.trainer.counts import Counter

READ = "jaxlaunch_bucket_read_bytes_total"
PARTS = "jaxlaunch_part_seconds_total"


@pytest.fixture(autouse=True)
def own_totals() -> Iterator[None]:
    before = counts.take_totals()
    yield
    counts.take_totals()
    counts.add_totals(before)


def test_threads_count_together() -> None:
    def count_often() -> None:
        for _ in range(2000):
            Counter(READ).add(3)

    threads = [threading.Thread(target=count_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.read_totals()[READ] == {(): 48_000.0}


def test_labels_are_those_of_the_row() -> None:
    Counter(PARTS).add(1.5, "data")
    Counter(PARTS).add(0.5, "save")
    assert counts.read_totals()[PARTS] == {("data",): 1.5, ("save",): 0.5}
    assert counts.keyed_totals() == {"data_s": 1.5, "save_s": 0.5}
    with pytest.raises(AssertionError, match="part"):
        Counter(PARTS).add(1.0)
    for name in ("jaxlaunch_unknown_total", "jaxlaunch_loss", "jaxlaunch_restarts_total"):
        with pytest.raises(KeyError):
            Counter(name)


def test_totals_of_another_process_are_added_once() -> None:
    assert counts.read_totals()[READ] == {(): 0.0} and not counts.take_totals()
    Counter(READ).add(5)
    sent = counts.take_totals()
    assert counts.read_totals()[READ] == {(): 0.0}
    for _ in range(2):
        counts.add_totals(sent)
    assert counts.keyed_totals() == {"bucket_read_bytes": 10.0}
