"""Counters of this process, which any part of the trainer may increment.

Each counter is a row of `contract.PROMETHEUS`. The Prometheus exporter reads the totals, and
metrics.jsonl records the increase of each counter whose row has a key. A worker process counts
separately and sends its totals with each answer; the trainer adds them to its own.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping

from jaxlaunch.contract import PROMETHEUS

# Values of a metric's labels after `rank`, in the order of the row.
Labels = tuple[str, ...]
# Totals by the name of the row and the labels.
Totals = Mapping[tuple[str, Labels], float]

_ROWS = {row.name: row for row in PROMETHEUS if (row.exporter, row.type) == ("trainer", "counter")}
_lock = threading.Lock()
_totals: defaultdict[tuple[str, Labels], float] = defaultdict(float)


class Counter:
    """A counter of this process. Raises KeyError if no row has its name."""

    def __init__(self, name: str) -> None:
        self._row = _ROWS[name]

    def add(self, amount: float = 1.0, *labels: str) -> None:
        """Add `amount`, from any thread. An amount of 0 adds the labels to the export."""
        assert len(labels) == len(self._row.labels) - 1, f"{self._row.name}: {self._row.labels}"
        add_totals({(self._row.name, labels): amount})


def add_totals(totals: Totals) -> None:
    """Add the totals of another process."""
    with _lock:
        for key, amount in totals.items():
            _totals[key] += amount


def take_totals() -> Totals:
    """Return the totals since the last call and reset them to zero."""
    with _lock:
        totals = dict(_totals)
        _totals.clear()
    return totals


def read_totals() -> dict[str, dict[Labels, float]]:
    """Return the totals of every row by labels. A row without labels starts at 0."""
    totals: dict[str, dict[Labels, float]] = {
        name: {(): 0.0} if len(row.labels) == 1 else {} for name, row in _ROWS.items()
    }
    with _lock:
        for (name, labels), total in _totals.items():
            totals[name][labels] = total
    return totals


def keyed_totals() -> dict[str, float]:
    """Return the non-zero totals of the rows with a key, by their keys in metrics.jsonl."""
    return {
        row.key.format(**dict(zip(row.labels[1:], labels, strict=True))): total
        for name, total_by_labels in read_totals().items()
        for labels, total in total_by_labels.items()
        if total and (row := _ROWS[name]).key is not None
    }
