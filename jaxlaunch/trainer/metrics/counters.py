"""Numbers of a run (means, speeds, counts, memory, step times) and their export to Prometheus.

The loop splits its time into parts. Steps are asynchronous, so a part is the time that the loop
waited, not what the device did: `device` is the wait for the previous step, and `host` is all time
that is in no other part. The measurement takes about one microsecond per step.

At each scrape, a separate thread sends all numbers to the agent of the process, as one Prometheus
text over a Unix socket.
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
# Prometheus names of the gauges that are also in lines of metrics.jsonl, by their keys there.
GAUGES = {row.key: row.name for row in PROMETHEUS if row.key is not None and row.type == "gauge"}

# Upper bounds of the step time histogram: 1 ms to 10 minutes.
STEP_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
# The first dispatch of an attempt does not wait for a previous one, and the second waits for a cold
# device.
WARMUP_DISPATCHES = 2
# The shortest period for which a process reports its own share of the time. In shorter periods the
# shares of equal processes differ by chance.
OWN_PERIOD_S = 2.0
# Number of steps over which the median is taken.
RECENT_STEPS = 100


class LoopPart:
    """Measures the seconds that the loop spends in one part, as a reusable context manager.

    Parts do not nest. The thread of a scrape reads while the loop writes, so the seconds and the
    start of the current visit are in one tuple, which is replaced atomically.
    """

    __slots__ = ("_seconds_and_start",)

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Reset the time to zero."""
        self._seconds_and_start: tuple[float, float | None] = (0.0, None)

    @property
    def seconds(self) -> float:
        """Seconds of all visits except the current one."""
        return self._seconds_and_start[0]

    def seconds_until(self, now: float) -> float:
        """Return the seconds of all visits, with those of the current one until `now`."""
        seconds, start = self._seconds_and_start
        return seconds if start is None else seconds + max(0.0, now - start)

    def __enter__(self) -> None:
        self._seconds_and_start = (self.seconds, perf_counter())

    def __exit__(self, *exception_info: object) -> None:
        self._seconds_and_start = (self.seconds_until(perf_counter()), None)


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
    """A moment between two steps.

    Attributes:
        steps: Steps that were complete.
        time_s: The time of `perf_counter`.
        paused_s: Seconds of evaluation and saves so far.
    """

    steps: int
    time_s: float
    paused_s: float


class StepTimer:
    """Counts steps, and measures their times and the parts of the loop.

    Attributes:
        steps: Steps that were completed.
        counts: Steps by the bounds of the histogram. The last count is of those above every bound.
        seconds: Time of all counted steps.
    """

    def __init__(self) -> None:
        self._parts = {name: LoopPart() for name in ("data", "device", "save", "eval")}
        self.steps = self._dispatches = 0
        self.counts = [0] * (len(STEP_BOUNDS_S) + 1)
        self.seconds = 0.0
        # Seconds of each of the last steps after the warm-up.
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self.start()

    def start(self) -> None:
        """Start the clock of the loop, after restoring and compiling."""
        for part in self._parts.values():
            part.clear()
        self._start_s = perf_counter()
        self._host_s = 0.0
        self._last_step = Mark(self.steps, self._start_s, 0.0)
        # The mark from which the speed of the next interval is measured, once the loop is warm.
        self._interval_start: Mark | None = None
        # Seconds by part at the last `end_interval`, and at the last result of `own_share`.
        self._interval_parts: dict[str, float] = self.part_seconds()
        self._own_share_parts: dict[str, float] = self._interval_parts

    def get_part(self, name: str) -> LoopPart:
        """Return the part `name` (data, device, save, eval) for a `with` statement."""
        return self._parts[name]

    def end_step(self, count: int = 1) -> None:
        """Count one completed step, or `count` of them in one dispatch."""
        previous, now = self._last_step, perf_counter()
        paused_s = self._parts["save"].seconds + self._parts["eval"].seconds
        seconds = now - previous.time_s - (paused_s - previous.paused_s)
        self.steps += count
        self._dispatches += 1
        self._last_step = Mark(self.steps, now, paused_s)
        self.counts[bisect_left(STEP_BOUNDS_S, seconds / count)] += count
        self.seconds += seconds
        if self._dispatches > WARMUP_DISPATCHES:
            self._recent.append(seconds / count)
        elif self._dispatches == WARMUP_DISPATCHES:
            self._interval_start = self._last_step

    def end_interval(self, share: float = 1.0) -> Interval:
        """End an interval, to which this share of the time since the last one belongs."""
        previous_s, current_s = self._interval_parts, self.part_seconds()
        parts = {name: (seconds - previous_s[name]) * share for name, seconds in current_s.items()}
        self._interval_parts = {name: previous_s[name] + parts[name] for name in parts}
        if share == 1.0:
            # The sums above may have rounding errors.
            self._interval_parts = current_s
        steps_per_s = None
        start, end = self._interval_start, self._last_step
        if start is not None and end.steps > start.steps:
            busy_s = end.time_s - start.time_s - (end.paused_s - start.paused_s)
            steps_per_s = (end.steps - start.steps) / busy_s
            self._interval_start = end
        return Interval(sum(parts.values()), parts, steps_per_s)

    def median_s(self) -> float | None:
        """Return the median time of the last steps; None during the warm-up."""
        return statistics.median(self._recent) if self._recent else None

    def own_share(self) -> float | None:
        """Return the share of the step time that this process spent on its own data and host work.

        A slow process shows by this share. Its steps take as long as those of all others, because
        each process waits in `device` for the slowest one. The result is for the time since the
        last result, and None while that is shorter than OWN_PERIOD_S.
        """
        current_s, previous_s = self.part_seconds(), self._own_share_parts
        spent_s = {part: current_s[part] - previous_s[part] for part in ("data", "host", "device")}
        total_s = sum(spent_s.values())
        if total_s < OWN_PERIOD_S:
            return None
        is_warm = self._dispatches > WARMUP_DISPATCHES and previous_s["device"] > 0
        self._own_share_parts = current_s
        return 1 - spent_s["device"] / total_s if is_warm else None

    def part_seconds(self) -> dict[str, float]:
        """Return seconds by part since the start, never decreasing; `host` is all other time."""
        now = perf_counter()
        seconds = {name: part.seconds_until(now) for name, part in self._parts.items()}
        self._host_s = max(self._host_s, now - self._start_s - sum(seconds.values()))
        return seconds | {"host": self._host_s}


@dataclasses.dataclass(frozen=True)
class Workload:
    """The amount of work of a run.

    Attributes:
        total_steps: Steps of the whole run.
        examples_per_step: Size of the global batch.
        has_targets: Whether the weight of a loss is the number of target tokens.
        dataset_examples: Examples of the training set, if known.
        epochs: A function from a number of examples to passes over each part of a mixture.
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
    """Computes the speeds of all ranks together in the last interval.

    Attributes:
        flops_per_step: Model FLOPs of a step, if known.
        peak_flops: Peak FLOP/s of all devices, if known.
        speeds: Examples, tokens and targets per second, and MFU.
    """

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
        """Compute the speeds of an interval; without `steps_per_s` they do not change."""
        if steps_per_s is not None:
            workload, count = self._workload, len(self._recent)
            self.speeds = dict.fromkeys(SPEEDS)
            if workload.examples_per_step:
                self.speeds[Key.EXAMPLES_PER_S] = workload.examples_per_step * steps_per_s
            if count:
                tokens, targets = (
                    sum(column) / count for column in zip(*self._recent, strict=True)
                )
                self.speeds[Key.TOKENS_PER_S] = tokens * steps_per_s
                if workload.has_targets:
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
    """The numbers of one process, which the loop writes and the thread of a scrape reads."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.timer = workload, StepTimer()
        self.throughput = Throughput(workload)
        # The newest committed step, and the time of its commit.
        self.checkpoint_step: int | None = None
        self.committed_at = time.monotonic()
        # Steps that were complete when the loop started.
        self.first_step = 0
        self.train_means: dict[str, float] = {}
        self.eval_means: dict[str, float] = {}
        self.device_bytes = read_device_bytes()

    def prometheus_values(self) -> dict[str, Value]:
        """Return the values of the trainer's rows in contract.PROMETHEUS, for a scrape."""
        timer, workload, throughput = self.timer, self.workload, self.throughput
        step = self.first_step + timer.steps
        task_metrics: dict[Labels, float | None] = {
            (split, Key.LOSS): None for split in ("train", "eval")
        }
        task_means = {key: mean for key, mean in self.train_means.items() if key not in STEP_KEYS}
        for split, means in (("train", task_means), ("eval", self.eval_means)):
            task_metrics |= {(split, name): value for name, value in means.items()}
        numbers = self.train_means | throughput.speeds
        numbers |= {Key.STEP: step, Key.EPOCH: workload.epoch_at(step)}
        values: dict[str, Value] = {**read_totals()}
        values |= {name: numbers.get(key) for key, name in GAUGES.items()}
        part_seconds = timer.part_seconds().items()
        return values | {
            "jaxlaunch_target_step": workload.total_steps,
            "jaxlaunch_steps_total": timer.steps,
            "jaxlaunch_step_seconds": Histogram(STEP_BOUNDS_S, tuple(timer.counts), timer.seconds),
            "jaxlaunch_part_seconds_total": {(part,): seconds for part, seconds in part_seconds},
            "jaxlaunch_examples_total": workload.examples_per_step * timer.steps,
            "jaxlaunch_model_flops_per_step": throughput.flops_per_step,
            "jaxlaunch_task_metric": task_metrics,
            "jaxlaunch_resident_memory_bytes": host_load.read_resident_bytes(),
            "jaxlaunch_device_memory_bytes": self.device_bytes,
            "jaxlaunch_checkpoint_step": self.checkpoint_step,
            "jaxlaunch_checkpoint_age_seconds": time.monotonic() - self.committed_at,
        }


def read_device_bytes() -> dict[Labels, float | None]:
    """Return bytes by (device, kind), None on platforms without these counts, such as CPUs."""
    kinds = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
    sizes: dict[Labels, float | None] = {}
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        sizes |= {(str(device.id), kind): stats.get(key) for kind, key in kinds.items()}
    return sizes


def memory_numbers(
    device_bytes: Mapping[Labels, float | None], host: host_load.HostLoad
) -> dict[str, float | None]:
    """Return the memory of the fullest device and of this process, and the load of the host."""
    numbers = {Key.PROCESS_GIB: host_load.to_gib(host_load.read_resident_bytes())}
    for key, kind in ((Key.DEVICE_GIB, "peak"), (Key.DEVICE_LIMIT_GIB, "limit")):
        sizes = [size for (_, name), size in device_bytes.items() if name == kind and size]
        if sizes:
            numbers[key] = host_load.to_gib(max(sizes))
    return numbers | host.read_numbers()


# --- the export -----------------------------------------------------------------------------------

METRIC_ROWS = tuple(metric for metric in PROMETHEUS if metric.exporter == "trainer")
# Timeout for a reader that connects but does not read.
SCRAPE_TIMEOUT_S = 5.0


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
            # The shutdown makes `accept` return.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * SCRAPE_TIMEOUT_S)
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
                connection.settimeout(SCRAPE_TIMEOUT_S)
                connection.sendall(generate_latest(self._registry))
