"""Numbers of a run (means, speeds, counts, memory, step times) and their export to Prometheus.

The loop splits its time into parts, measured on the host at about one microsecond per step. Steps
are asynchronous, so the parts tell what the loop waited for, not what the device did: `device` is
the wait for the previous step, and `host` is the time that no other part accounts for.

The agent of the process gets all numbers as one Prometheus text over a Unix socket. A separate
thread reads them at each scrape, so they cost the loop nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
import statistics
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import jax
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from jaxlaunch.contract import PROMETHEUS, Key, Metric
from jaxlaunch.runs import host_load
from jaxlaunch.trainer.counts import Counter, Labels, read_totals

TOKENS, TARGETS = Counter("jaxlaunch_tokens_total"), Counter("jaxlaunch_targets_total")
SPEEDS = (Key.EXAMPLES_PER_S, Key.TOKENS_PER_S, Key.TARGETS_PER_S, Key.MFU)
# Means of a step that are not the task's.
STEP_KEYS = (Key.GRAD_NORM, Key.LEARNING_RATE, Key.LOSS_SCALE)
# Prometheus name of each number that is also one of a line of metrics.jsonl.
GAUGES = {row.key: row.name for row in PROMETHEUS if row.key is not None and row.type == "gauge"}

# Upper bounds of the step time histogram, in seconds: 1 ms to 10 minutes, about two to a decade.
STEP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
# The first dispatch of an attempt fills the pipeline without waiting, the second waits for a cold
# device.
WARMUP_DISPATCHES = 2
# Seconds of steps in one report of a process's own time. Shorter ones differ by chance.
OWN_PERIOD_S = 2.0
# Number of steps over which the median is taken.
RECENT_STEPS = 100


class LoopPart:
    """Seconds spent in one part of the loop, as a reusable context manager. Parts do not nest.

    The scraping thread reads while the loop writes, so the seconds and the start of the current
    visit are one tuple, which is replaced atomically.
    """

    __slots__ = ("_spent",)

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget the time spent so far."""
        self._spent: tuple[float, float | None] = (0.0, None)

    @property
    def seconds(self) -> float:
        """Seconds of the visits that have ended."""
        return self._spent[0]

    def seconds_until(self, now: float) -> float:
        """Return the seconds including the current visit until `now`. They never decrease."""
        seconds, began = self._spent
        return seconds if began is None else seconds + max(0.0, now - began)

    def __enter__(self) -> None:
        self._spent = (self._spent[0], perf_counter())

    def __exit__(self, *raised: object) -> None:
        self._spent = (self.seconds_until(perf_counter()), None)


class Interval(NamedTuple):
    """Times and speed between two calls of `StepTimer.end_interval`.

    Attributes:
        seconds: Wall time.
        parts: Seconds by part, which add up to `seconds`.
        steps_per_s: Speed without evaluation and saves; None during the warm-up.
    """

    seconds: float
    parts: dict[str, float]
    steps_per_s: float | None


class Mark(NamedTuple):
    """A moment between two steps."""

    steps: int
    time_s: float
    paused_s: float  # seconds of evaluation and saves until then


class StepTimer:
    """Counts steps and splits the time between them."""

    def __init__(self) -> None:
        self._parts = {name: LoopPart() for name in ("data", "device", "save", "eval")}
        self.steps = self._dispatches = 0
        # Steps by time; the last bin is for those above every bound.
        self.counts = [0] * (len(STEP_BOUNDS_S) + 1)
        # Sum over all counted steps.
        self.seconds = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        # Seconds by part at the last call of `own_share`.
        self._shared_parts: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """Start the clock of the loop, which excludes the time of restoring and compiling."""
        for part in self._parts.values():
            part.clear()
        self._began = perf_counter()
        self._host = 0.0
        self._last = Mark(self.steps, self._began, 0.0)
        # The speed of the next interval is measured from this mark.
        self._warm: Mark | None = None
        self._last_part_seconds = self._shared_parts = self.part_seconds()

    def get_part(self, name: str) -> LoopPart:
        """Return the part `name` (data, device, save, eval) for a `with` statement."""
        return self._parts[name]

    def end_step(self, count: int = 1) -> None:
        """Count one completed step, or `count` of them in one dispatch."""
        previous = self._last
        now, paused = perf_counter(), self._parts["save"].seconds + self._parts["eval"].seconds
        seconds = now - previous.time_s - (paused - previous.paused_s)
        self.steps += count
        self._dispatches += 1
        self._last = Mark(self.steps, now, paused)
        self.counts[bisect_left(STEP_BOUNDS_S, seconds / count)] += count
        self.seconds += seconds
        if self._dispatches > WARMUP_DISPATCHES:
            self._recent.append(seconds / count)
        elif self._dispatches == WARMUP_DISPATCHES:
            self._warm = self._last

    def end_interval(self, share: float = 1.0) -> Interval:
        """Return this share of the time since the last call, and leave the rest to the next."""
        previous_s, current_s = self._last_part_seconds, self.part_seconds()
        parts = {name: (seconds - previous_s[name]) * share for name, seconds in current_s.items()}
        self._last_part_seconds = {name: previous_s[name] + parts[name] for name in parts}
        if share == 1.0:
            self._last_part_seconds = current_s
        steps_per_s = None
        if self._warm is not None and self._last.steps > self._warm.steps:
            paused_s = self._last.paused_s - self._warm.paused_s
            busy_s = self._last.time_s - self._warm.time_s - paused_s
            steps_per_s = (self._last.steps - self._warm.steps) / busy_s
            self._warm = self._last
        return Interval(sum(parts.values()), parts, steps_per_s)

    def median_s(self) -> float | None:
        """Return the median time of the recent steps after the warm-up, if there are any."""
        return statistics.median(self._recent) if self._recent else None

    def own_share(self) -> float | None:
        """Return the share of the last steps that this process spent on data and on the host.

        All processes of a gang take the same time for a step, because each waits for the slowest
        one in `device`. What differs between them is what each of them does by itself. The answer
        is None until OWN_PERIOD_S of steps have passed since the last one.
        """
        current_s, earlier_s = self.part_seconds(), self._shared_parts
        spent = {part: current_s[part] - earlier_s[part] for part in ("data", "host", "device")}
        total_s = sum(spent.values())
        if total_s < OWN_PERIOD_S:
            return None
        is_warm = self._dispatches > WARMUP_DISPATCHES and self._shared_parts["device"] > 0
        self._shared_parts = current_s
        return 1 - spent["device"] / total_s if is_warm else None

    def part_seconds(self) -> dict[str, float]:
        """Return seconds by part since the start, never decreasing; `host` is all other time."""
        now = perf_counter()
        seconds = {name: part.seconds_until(now) for name, part in self._parts.items()}
        self._host = max(self._host, now - self._began - sum(seconds.values()))
        return seconds | {"host": self._host}


@dataclasses.dataclass(frozen=True)
class Workload:
    """Amount of work in a run.

    Attributes:
        total_steps: Steps of the whole run.
        examples_per_step: Size of the global batch.
        has_targets: Whether the weight of a loss counts targets of rows of tokens.
        dataset_examples: Examples of the training set, if known.
        epochs: Passes over each part of a mixture after a number of examples.
    """

    total_steps: int
    examples_per_step: int
    has_targets: bool = True
    dataset_examples: int | None = None
    epochs: Callable[[int], Mapping[str, float]] | None = None

    def epoch_at(self, step: int) -> float | None:
        """Return the number of passes over the training set after `step` steps."""
        if not self.dataset_examples:
            return None
        return step * self.examples_per_step / self.dataset_examples


class Throughput:
    """Speeds of all ranks in the last interval."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.flops_per_step: float | None = None
        self.peak_flops: float | None = None
        self.speeds: dict[str, float | None] = dict.fromkeys(SPEEDS)
        # Tokens and targets of each step since the last interval.
        self._recent: list[tuple[float, float]] = []

    def count_step(self, tokens: float, targets: float) -> None:
        """Count the tokens and targets of a step."""
        TOKENS.add(tokens)
        if self._workload.has_targets:
            TARGETS.add(targets)
        self._recent.append((tokens, targets))

    def end_interval(self, steps_per_s: float | None) -> None:
        """Compute the speeds of an interval; `steps_per_s` None keeps the old ones."""
        if steps_per_s is not None:
            work, count = self._workload, len(self._recent)
            self.speeds = dict.fromkeys(SPEEDS)
            if work.examples_per_step:
                self.speeds[Key.EXAMPLES_PER_S] = work.examples_per_step * steps_per_s
            if count:
                tokens, targets = (
                    sum(column) / count for column in zip(*self._recent, strict=True)
                )
                self.speeds[Key.TOKENS_PER_S] = tokens * steps_per_s
                if work.has_targets:
                    self.speeds[Key.TARGETS_PER_S] = targets * steps_per_s
            if self.flops_per_step is not None and self.peak_flops is not None:
                self.speeds[Key.MFU] = self.flops_per_step * steps_per_s / self.peak_flops
        self._recent.clear()


class Histogram(NamedTuple):
    """Counts of observations by upper bound, the last above every bound, and their sum."""

    bounds: Sequence[float]
    counts: Sequence[int]
    sum: float


Value = float | None | Mapping[Labels, float | None] | Histogram


class Counters:
    """The numbers of one process. The loop writes them, and the thread of a scrape reads them."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.timer = workload, StepTimer()
        self.throughput = Throughput(workload)
        # The newest complete step on storage, and when it was complete.
        self.checkpoint_step: int | None = None
        self.committed_at = time.monotonic()
        # Number of steps that were complete when the loop began.
        self.first_step = 0
        self.train_means: dict[str, float] = {}
        self.eval_means: dict[str, float] = {}
        self.device_bytes = read_device_bytes()

    def prometheus_values(self) -> dict[str, Value]:
        """Return the values of the trainer's rows in contract.PROMETHEUS, for a scrape."""
        timer, work, speed = self.timer, self.workload, self.throughput
        step, steps = self.first_step + timer.steps, timer.steps
        task: dict[Labels, float | None] = {(split, Key.LOSS): None for split in ("train", "eval")}
        trained = {name: mean for name, mean in self.train_means.items() if name not in STEP_KEYS}
        for split, means in (("train", trained), ("eval", self.eval_means)):
            task |= {(split, name): value for name, value in means.items()}
        numbers = self.train_means | speed.speeds | {Key.STEP: step, Key.EPOCH: work.epoch_at(step)}
        values: dict[str, Value] = {**read_totals()}
        values |= {name: numbers.get(key) for key, name in GAUGES.items()}
        part_seconds = timer.part_seconds().items()
        return values | {
            "jaxlaunch_target_step": work.total_steps,
            "jaxlaunch_steps_total": steps,
            "jaxlaunch_step_seconds": Histogram(STEP_BOUNDS_S, tuple(timer.counts), timer.seconds),
            "jaxlaunch_part_seconds_total": {(part,): seconds for part, seconds in part_seconds},
            "jaxlaunch_examples_total": work.examples_per_step * steps,
            "jaxlaunch_model_flops_per_step": speed.flops_per_step,
            "jaxlaunch_task_metric": task,
            "jaxlaunch_resident_memory_bytes": host_load.read_resident_bytes(),
            "jaxlaunch_device_memory_bytes": self.device_bytes,
            "jaxlaunch_checkpoint_step": self.checkpoint_step,
            "jaxlaunch_checkpoint_age_seconds": time.monotonic() - self.committed_at,
        }


def read_device_bytes() -> dict[Labels, float | None]:
    """Return bytes by (device, kind); None on platforms that do not count them, such as CPU."""
    kinds = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
    sizes: dict[Labels, float | None] = {}
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        sizes |= {(str(device.id), kind): stats.get(key) for kind, key in kinds.items()}
    return sizes


def memory_numbers(
    device_bytes: Mapping[Labels, float | None], host: host_load.HostLoad
) -> dict[str, float | None]:
    """Return the memory of the fullest device, of this process and of the host, and its load."""
    numbers = {Key.PROCESS_GIB: host_load.to_gib(host_load.read_resident_bytes())}
    for key, kind in ((Key.DEVICE_GIB, "peak"), (Key.DEVICE_LIMIT_GIB, "limit")):
        sizes = [size for (_, name), size in device_bytes.items() if name == kind and size]
        if sizes:
            numbers[key] = host_load.to_gib(max(sizes))
    return numbers | host.read_numbers()


# --- the export -----------------------------------------------------------------------------------

METRIC_ROWS = tuple(metric for metric in PROMETHEUS if metric.exporter == "trainer")
# Timeout for a reader that connects but does not read.
PATIENCE_S = 5.0


class RankCollector(Collector):
    """Collector of the trainer's rows in contract.PROMETHEUS; `read` returns their values."""

    def __init__(self, rank: int, read: Callable[[], Mapping[str, Value]]) -> None:
        self._rank, self._read = str(rank), read

    def collect(self) -> Iterable[Family]:
        """Yield one family for each row, with NaN for unknown values."""
        values = self._read()
        for row in METRIC_ROWS:
            yield self._make_family(row, values[row.name])

    def _make_family(self, row: Metric, value: Value) -> Family:
        if isinstance(value, Histogram):
            histogram = HistogramMetricFamily(row.name, row.help, labels=row.labels)
            bounds = [*map(str, value.bounds), "+Inf"]
            cells = list(zip(bounds, itertools.accumulate(value.counts), strict=True))
            histogram.add_metric([self._rank], cells, value.sum)
            return histogram
        kind = CounterMetricFamily if row.type == "counter" else GaugeMetricFamily
        family = kind(row.name, row.help, labels=row.labels)
        for labels, number in (value if isinstance(value, Mapping) else {(): value}).items():
            family.add_metric([self._rank, *labels], float("nan") if number is None else number)
        return family


class Exporter:
    """Answers every connection to the Unix socket `path` with one scrape. Raises OSError."""

    def __init__(self, path: str, rank: int, read: Callable[[], Mapping[str, Value]]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(RankCollector(rank, read))
        self._path = path
        if os.path.exists(path):
            # A killed attempt leaves its socket behind.
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve_scrapes, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread and remove the socket, which may already be gone."""
        with contextlib.suppress(OSError):
            # The shutdown wakes accept.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * PATIENCE_S)
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)

    def _serve_scrapes(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # The reader may have disconnected.
            with connection, contextlib.suppress(OSError):
                connection.settimeout(PATIENCE_S)
                connection.sendall(generate_latest(self._registry))
