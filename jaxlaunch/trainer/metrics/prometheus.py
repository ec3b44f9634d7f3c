"""Serves this process's metrics to its agent: one connection, one Prometheus text, over a Unix socket.

Values are read at each scrape, by a thread of its own, so they cost the loop nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from jaxlaunch import contract

ROWS = tuple(metric for metric in contract.PROMETHEUS if metric.by == "trainer")
UNKNOWN = float("nan")
PATIENCE_S = 5.0  # for a reader that connects and does not read


class Histogram(NamedTuple):
    """Number of observations by upper bound, and their sum; the last count is of those above every bound."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float


Labels = tuple[str, ...]  # the values of a metric's labels after `rank`, in its order
Value = float | None | Mapping[Labels, float | None] | Histogram


class RankCollector(Collector):
    """The trainer's rows of contract.PROMETHEUS with the values that `read` returns by metric name."""

    def __init__(self, rank: int, read: Callable[[], Mapping[str, Value]]) -> None:
        self._rank = str(rank)
        self._read = read

    def collect(self) -> Iterable[Family]:
        """One family for each row; NaN for what is not known."""
        values = self._read()
        for row in ROWS:
            yield self._family(row, values[row.name])

    def _family(self, row: contract.Metric, value: Value) -> Family:
        if isinstance(value, Histogram):
            histogram = HistogramMetricFamily(row.name, row.help, labels=row.labels)
            bounds = [*(str(bound) for bound in value.bounds), "+Inf"]
            cumulative = itertools.accumulate(value.counts)
            histogram.add_metric([self._rank], list(zip(bounds, cumulative, strict=True)), value.sum)
            return histogram
        kind = CounterMetricFamily if row.type == "counter" else GaugeMetricFamily
        family = kind(row.name, row.help, labels=row.labels)
        for labels, number in (value if isinstance(value, Mapping) else {(): value}).items():
            family.add_metric([self._rank, *labels], UNKNOWN if number is None else number)
        return family


class Exporter:
    """Answers every connection to the Unix socket `path` with one scrape. Raises OSError when it cannot bind."""

    def __init__(self, path: str, rank: int, read: Callable[[], Mapping[str, Value]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(RankCollector(rank, read))
        self._path = path
        if os.path.exists(path):
            os.unlink(path)  # of an attempt that was killed
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops answering and removes the socket, which others may have removed before: its folder is temporary."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join(2 * PATIENCE_S)
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with connection:
                connection.settimeout(PATIENCE_S)
                try:
                    connection.sendall(generate_latest(self._registry))
                except OSError:
                    continue  # the reader has gone
