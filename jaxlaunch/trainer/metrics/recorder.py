"""The metrics of a run: to Prometheus, the run folder, the agent, and standard output.

The loop calls this module at log intervals, evaluations and saves; a step only uses `timer`. Every
process exports to Prometheus, and process 0 also writes and prints. A failing disk or socket raises
no exception here, but is noted once.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.monitoring

from jaxlaunch import tracker_feed
from jaxlaunch.contract import Key
from jaxlaunch.runs import layout
from jaxlaunch.runs.host_load import HostLoad
from jaxlaunch.runs.journal import Journal, TensorBoard
from jaxlaunch.trainer.counts import Counter, keyed_totals
from jaxlaunch.trainer.metrics.counters import (
    Counters,
    Exporter,
    Workload,
    memory_numbers,
    read_device_bytes,
)
from jaxlaunch.trainer.metrics.progress import Progress

# Values of a step that the loop alone reads.
LOOP_KEYS = (Key.FINITE, Key.SKIPPED, Key.WEIGHT, Key.TOKENS)
SKIPPED_STEPS = Counter("jaxlaunch_skipped_steps_total")
EMPTY_STEPS = Counter("jaxlaunch_empty_steps_total")
SAVES = Counter("jaxlaunch_checkpoint_saves_total")
BLOCKING_SECONDS = Counter("jaxlaunch_checkpoint_blocking_seconds_total")
# The counters of JAX's events.
CACHE_EVENTS = {
    f"/jax/compilation_cache/cache_{kind}": Counter(f"jaxlaunch_compile_cache_{kind}_total")
    for kind in ("hits", "misses")
}


def count_cache_event(event: str, **_: object) -> None:
    """Count a hit or miss of JAX's compilation cache; a listener of JAX's events."""
    if (counter := CACHE_EVENTS.get(event)) is not None:
        counter.add()


@functools.cache
def count_cache_events() -> None:
    """Listen to JAX's events from now on, once: a counter is of the process."""
    jax.monitoring.register_event_listener(count_cache_event)


class Metrics:
    """The metrics of one process, created before the first compilation for the first scrape."""

    def __init__(
        self,
        workload: Workload,
        *,
        rank: int,
        run_dir: str | None,
        socket: str | None,
        report: Progress,
    ) -> None:
        self._workload, self._counters = workload, Counters(workload)
        self.timer = self._counters.timer
        self._is_first, self._report = rank == 0, report
        if run_dir is None and self._is_first and tracker_feed.has_tracker():
            # The tracker follows the files of the run folder.
            run_dir = tempfile.mkdtemp()
        self._files: MetricsFiles | None = None
        if self._is_first and run_dir is not None:
            self._files = MetricsFiles(run_dir, report)
        self._feed: tracker_feed.TrackerFeed | None = None
        # Numbers of the last interval, as written and reported.
        self._numbers: dict[str, float | None] = {}
        self._best_step: dict[str, float] = {}
        # Totals at the last interval of the counters that are written.
        self._totals: dict[str, float] = {}
        self._host_load = HostLoad()
        count_cache_events()
        self._exporter: Exporter | None = None
        if socket is not None:
            with _note_failure(report, "no metrics for Prometheus"):
                self._exporter = Exporter(socket, rank, self._counters.prometheus_values)

    def start(
        self, step: int, *, flops_per_step: float | None = None, peak_flops: float | None = None
    ) -> None:
        """Start the metrics of a loop after `step` complete steps, with FLOPs if they are known.

        `flops_per_step` are for the whole batch, `peak_flops` per second of all devices together.
        """
        counters = self._counters
        counters.first_step = step
        counters.throughput.flops_per_step = flops_per_step
        counters.throughput.peak_flops = peak_flops
        # A step that was restored is on storage.
        counters.checkpoint_step = step or None
        self._totals = keyed_totals()
        if self._is_first:
            self._report.report_total(self._workload.total_steps)
        if self._files is not None:
            self._files.open_journals(step)
            with _note_failure(self._report, "no tracker", (OSError, ModuleNotFoundError)):
                self._feed = tracker_feed.start_feed(self._files.folder)
        self.timer.start()

    def record_interval(self, step: int, values: Mapping[str, float], share: float = 1.0) -> None:
        """Record the means of `step` and this share of the time since the last call.

        Called once per log interval on every process. A dispatch may contain several intervals,
        which share its time.
        """
        counters, workload = self._counters, self._workload
        means = {name: float(value) for name, value in values.items() if name not in LOOP_KEYS}
        counters.train_means = means
        interval = self.timer.end_interval(share)
        counters.throughput.end_interval(interval.steps_per_s)
        counters.device_bytes = read_device_bytes()
        if (own := self.timer.own_share()) is not None:
            self._report.report_own_time(round(1000 * own))
        if not self._is_first:
            return
        speeds = counters.throughput.speeds
        overall = {Key.EPOCH: workload.epoch_at(step), Key.STEP_S: self.timer.median_s()}
        examples = step * workload.examples_per_step
        parts = {} if workload.epochs is None else workload.epochs(examples)
        self._numbers = {**means, **speeds, **overall}
        self._numbers |= {f"{Key.EPOCH}/{name}": passes for name, passes in parts.items()}
        previous, self._totals = self._totals, keyed_totals()
        counted = {key: total - previous.get(key, 0.0) for key, total in self._totals.items()}
        for part, seconds in interval.parts.items():
            counted[Key.PART_S.format(part=part)] = seconds
        memory = memory_numbers(counters.device_bytes, self._host_load)
        row = {
            **self._numbers,
            **counted,
            **memory,
            "wall_s": interval.seconds,
            "time": time.time(),
        }
        self._write_row("metrics", step, row)
        shares = {}
        if interval.seconds:
            shares = {part: interval.parts[part] / interval.seconds for part in ("data", "save")}
        print(format_interval(step, workload.total_steps, means, speeds, shares), flush=True)
        if self._feed is not None and (line := self._feed.announce_place()) is not None:
            print(line, flush=True)

    def record_trained(self, step: int, weight: float, tokens: float | None = None) -> None:
        """Count the tokens and targets of `step`, and print a line if it has no target."""
        if tokens is not None:
            self._counters.throughput.count_step(tokens, weight)
        if weight == 0:
            EMPTY_STEPS.add()
            self._print_line(step, "empty: its batch has no target, nothing is changed")

    def record_skipped(self, step: int, scale: float, wrong: str | None = None) -> None:
        """Count `step` as skipped, because its gradients overflowed with this loss scale.

        `wrong` names the part of its batch that was not finite, if any.
        """
        SKIPPED_STEPS.add()
        reason = "float16 overflowed" if wrong is None else f"its batch is not finite: {wrong}"
        self._print_line(step, f"skipped: {reason}; loss scale {scale:g} is halved")

    def record_evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Record the means over the held-out set after `step` steps, on every process."""
        means = {name: float(value) for name, value in values.items()}
        self._counters.eval_means = means
        if self._is_first:
            self._write_row("eval", step, {**means, "time": time.time()})
            self._print_line(step, f"eval  {_format_values(means)}")

    def record_best(self, step: int) -> None:
        """Record that the newest evaluation, after `step` steps, is the best so far."""
        self._best_step = {Key.BEST_STEP: step}
        if self._is_first:
            self._report_numbers(step)

    def record_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record the samples after `step` steps, on every process."""
        for sample in samples:
            self._print_line(step, f"sample  {json.dumps(sample, ensure_ascii=False)}")
        if self._files is not None:
            self._files.write_samples(step, samples)

    def record_saved(self, step: int, blocking_s: float) -> None:
        """Count a save of `step` that blocked the loop for `blocking_s` seconds."""
        SAVES.add()
        BLOCKING_SECONDS.add(blocking_s)

    def record_committed(self, step: int) -> None:
        """Record that the checkpoint of `step` is complete on storage."""
        self._counters.checkpoint_step, self._counters.committed_at = step, time.monotonic()

    def close(self) -> None:
        """End the export and close the files. Never raises: the run is complete and saved."""
        if self._exporter is not None:
            with _note_failure(self._report, "the metrics could not be closed", Exception):
                self._exporter.close()
        if self._files is not None:
            self._files.close()

    def end_tracking(self, *, stops: bool) -> None:
        """Wait until the tracker has every line, only briefly if the run `stops`."""
        if self._feed is None:
            return
        note = self._feed.close_at_stop() if stops else self._feed.close()
        if note is not None:
            _print_note(self._report, note)

    def _write_row(self, name: str, step: int, values: Mapping[str, float | None]) -> None:
        if self._files is not None:
            self._files.write_row(name, step, values)
        self._report_numbers(step)

    def _report_numbers(self, step: int) -> None:
        eval_values = {f"eval_{name}": value for name, value in self._counters.eval_means.items()}
        numbers = {Key.STEP: step, **self._numbers, **eval_values, **self._best_step}
        self._report.report_metrics(numbers)

    def _print_line(self, step: int, text: str) -> None:
        if self._is_first:
            print(f"step {step}/{self._workload.total_steps}  {text}", flush=True)


class MetricsFiles:
    """Journals and TensorBoard events (with the extra `tensorboard`) of a run folder."""

    def __init__(self, folder: str, report: Progress) -> None:
        self.folder, self._report = folder, report
        self._first_step = 0
        self._journals: dict[str, Journal] = {}
        self._board: TensorBoard | None = None

    def open_journals(self, step: int) -> None:
        """Open the files of a loop that starts after `step` complete steps."""
        self._first_step = step
        with _note_failure(self._report, "no metrics in the run folder"):
            for name, file in layout.JOURNALS.items():
                self._journals[name] = Journal(os.path.join(self.folder, file), step)
            has_writer = importlib.util.find_spec("tensorboardX") is not None
            if has_writer and not tracker_feed.writes_events():
                self._board = TensorBoard(os.path.join(self.folder, layout.TENSORBOARD), step)

    def write_row(self, name: str, step: int, values: Mapping[str, float | None]) -> None:
        """Write a line to the journal `name`, and its scalars as events, unless a write failed."""
        if (journal := self._journals.pop(name, None)) is not None:
            with _note_failure(self._report, f"no more {layout.JOURNALS[name]}"):
                journal.write(step, values)
                self._journals[name] = journal
            if name not in self._journals:
                # The buffered lines of the journal cannot be written either.
                with contextlib.suppress(OSError):
                    journal.close()
        if (board := self._board) is not None:
            prefix, self._board = layout.JOURNAL_PREFIXES[name], None
            scalars = {f"{prefix}/{key}": value for key, value in values.items() if key != "time"}
            with _note_failure(self._report, "no more TensorBoard events"):
                board.write(step, scalars)
                self._board = board
            if self._board is None:
                board.close()

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write a line of samples."""
        with _note_failure(self._report, "no samples in the run folder"):
            if "samples" not in self._journals:
                path = os.path.join(self.folder, layout.SAMPLES)
                self._journals["samples"] = Journal(path, self._first_step)
            self._journals["samples"].write(step, {"samples": samples, "time": time.time()})

    def close(self) -> None:
        """Close the files. Never raises."""
        for file in (*self._journals.values(), self._board):
            if file is not None:
                with _note_failure(self._report, "the metrics could not be closed", Exception):
                    file.close()


@contextlib.contextmanager
def _note_failure(
    report: Progress, problem: str, kind: type[Exception] | tuple[type[Exception], ...] = OSError
) -> Iterator[None]:
    """Note an exception of `kind`, such as an OSError for a full disk, and let the run continue."""
    try:
        yield
    except kind as error:
        _print_note(report, f"{problem}: {error}")


def _print_note(report: Progress, text: str) -> None:
    report.report_note(text)
    print(text, file=sys.stderr, flush=True)


def format_interval(
    step: int,
    total: int,
    means: Mapping[str, float],
    speeds: Mapping[str, float | None],
    shares: Mapping[str, float],
) -> str:
    """Return `step 120/600  loss 0.4321  grad 1.23  lr 3.0e-04  12.3k examples/s  data 1 %`.

    For tokens the speeds are `29.1k tokens/s  1.8k targets/s`: tokens that are read, and predicted
    tokens that count.
    """
    fields = [f"step {step}/{total}", _format_values(means)]
    keys = Key.TOKENS_PER_S, Key.EXAMPLES_PER_S, Key.MFU
    tokens, examples, mfu = map(speeds.get, keys)
    speed, unit = (examples, "examples") if tokens is None else (tokens, "tokens")
    if speed is not None:
        fields.append(f"{format_short(speed)} {unit}/s")
    if (targets := speeds.get(Key.TARGETS_PER_S)) is not None:
        fields.append(f"{format_short(targets)} targets/s")
    if mfu is not None:
        fields.append(f"mfu {100 * mfu:.1f} %")
    fields += [f"{part} {100 * share:.0f} %" for part, share in shares.items()]
    return "  ".join(fields)


def _format_values(values: Mapping[str, float]) -> str:
    formats = {
        Key.LOSS: "loss {:.4f}",
        Key.GRAD_NORM: "grad {:.3g}",
        Key.LEARNING_RATE: "lr {:.1e}",
        Key.LOSS_SCALE: "scale {:g}",
    }
    # Families of values, such as expert_load/3, are only written to the files.
    others = [name for name in values if name not in formats and "/" not in name]
    formats |= {name: f"{name} {{:.4g}}" for name in others}
    return "  ".join(text.format(values[name]) for name, text in formats.items() if name in values)


def format_short(number: float) -> str:
    """Format a number with three digits and a prefix: 12.3k, 1.05M."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{prefix}"
    return f"{number:.3g}"
