"""The counters of this process, which any part of the trainer may count.

A counter is a row of `contract.PROMETHEUS`. The export reads its total here, and a line of
metrics.jsonl its increase where the row has a key. A worker process counts for itself; the process
that asked it adds what each of its answers brings.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping

from jaxlaunch.contract import PROMETHEUS

Labels = tuple[str, ...]  # values of a metric's labels after `rank`, in its order
Totals = Mapping[tuple[str, Labels], float]  # by the name of a row, and labels

_ROWS = {row.name: row for row in PROMETHEUS if (row.exporter, row.type) == ("trainer", "counter")}
_lock = threading.Lock()
_totals: defaultdict[tuple[str, Labels], float] = defaultdict(float)


class Counter:
    """The counter of this process for a row. Raises KeyError for a name without one."""

    def __init__(self, name: str) -> None:
        self._row = _ROWS[name]

    def add(self, amount: float = 1.0, *labels: str) -> None:
        """Add `amount`, from any thread; 0 exports labels that have no count yet."""
        assert len(labels) == len(self._row.labels) - 1, f"{self._row.name}: {self._row.labels}"
        add_totals({(self._row.name, labels): amount})


def add_totals(totals: Totals) -> None:
    """Add what another process has counted."""
    with _lock:
        for cell, amount in totals.items():
            _totals[cell] += amount


def take_totals() -> Totals:
    """Return what was counted since the last call, and count from zero."""
    with _lock:
        totals = dict(_totals)
        _totals.clear()
    return totals


def read_totals() -> dict[str, dict[Labels, float]]:
    """Return the totals of every row by labels, 0 for a row without labels and counts."""
    totals: dict[str, dict[Labels, float]] = {
        name: {(): 0.0} if len(row.labels) == 1 else {} for name, row in _ROWS.items()
    }
    with _lock:
        for (name, labels), total in _totals.items():
            totals[name][labels] = total
    return totals


def keyed_totals() -> dict[str, float]:
    """Return the totals that are not 0 by the key of their increase in metrics.jsonl."""
    return {
        row.key.format(**dict(zip(row.labels[1:], labels, strict=True))): total
        for name, cells in read_totals().items()
        for labels, total in cells.items()
        if total and (row := _ROWS[name]).key is not None
    }
