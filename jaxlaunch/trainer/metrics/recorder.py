"""Records a run's metrics: in Prometheus, the run folder, the agent, and standard output.

The loop calls `Metrics` at log intervals, evaluations and saves. Every process exports its numbers
to Prometheus, and process 0 also writes files and prints. If a disk or a socket fails, the run
continues, and a note says so once.
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

from jaxlaunch import reporting, tracker_feed
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

# Values of a step that the loop reads, and that are not metrics.
LOOP_KEYS = (Key.FINITE, Key.SKIPPED, Key.WEIGHT, Key.TOKENS)
SKIPPED_STEPS = Counter("jaxlaunch_skipped_steps_total")
EMPTY_STEPS = Counter("jaxlaunch_empty_steps_total")
SAVES = Counter("jaxlaunch_checkpoint_saves_total")
BLOCKING_SECONDS = Counter("jaxlaunch_checkpoint_blocking_seconds_total")
# Counters by the names of JAX's monitoring events.
CACHE_COUNTERS = {
    f"/jax/compilation_cache/cache_{kind}": Counter(f"jaxlaunch_compile_cache_{kind}_total")
    for kind in ("hits", "misses")
}


@functools.cache
def count_cache_events() -> None:
    """Start to count hits and misses of JAX's compilation cache in this process."""

    def count_event(event: str, **_: object) -> None:
        if (counter := CACHE_COUNTERS.get(event)) is not None:
            counter.add()

    jax.monitoring.register_event_listener(count_event)


class Metrics:
    """The metrics of one process.

    An instance is created before the first compilation, so that Prometheus can scrape it early.
    """

    def __init__(
        self,
        workload: Workload,
        *,
        rank: int,
        run_dir: str | None,
        socket: str | None,
        progress: Progress,
    ) -> None:
        self._workload, self._counters = workload, Counters(workload)
        self.timer = self._counters.timer
        self._is_primary, self._progress = rank == 0, progress
        if run_dir is None and self._is_primary and tracker_feed.has_tracker():
            # The tracker reads the files of the run folder.
            run_dir = tempfile.mkdtemp()
        self._files: MetricsFiles | None = None
        if self._is_primary and run_dir is not None:
            self._files = MetricsFiles(run_dir, progress)
        self._feed: tracker_feed.TrackerFeed | None = None
        # The numbers of the last interval, as they were reported.
        self._numbers: dict[str, float | None] = {}
        self._best_step: dict[str, float] = {}
        # The totals of the counters at the last interval.
        self._totals: dict[str, float] = {}
        self._host_load = HostLoad()
        count_cache_events()
        self._exporter: Exporter | None = None
        if socket is not None:
            with _note_failure(progress, "no metrics for Prometheus"):
                self._exporter = Exporter(socket, rank, self._counters.prometheus_values)

    def start(
        self, step: int, *, flops_per_step: float | None = None, peak_flops: float | None = None
    ) -> None:
        """Start the metrics of a loop that begins after `step` complete steps.

        Args:
            step: Steps that are complete.
            flops_per_step: FLOPs of a step on all devices, if known.
            peak_flops: Peak FLOP/s of all devices, if known.
        """
        counters = self._counters
        counters.first_step = step
        counters.throughput.flops_per_step = flops_per_step
        counters.throughput.peak_flops = peak_flops
        # The step that was restored is committed.
        counters.checkpoint_step = step or None
        self._totals = keyed_totals()
        if self._is_primary:
            self._progress.report_total(self._workload.total_steps)
        if self._files is not None:
            self._files.open_journals(step)
            with _note_failure(self._progress, "no tracker", (OSError, ModuleNotFoundError)):
                self._feed = tracker_feed.start_feed(self._files.folder)
        self.timer.start()

    def record_interval(self, step: int, values: Mapping[str, float], share: float = 1.0) -> None:
        """Record the means of `step`, once per log interval and on every process.

        If one dispatch contains several log intervals, `share` is this interval's share of the time
        since the last call.
        """
        counters, workload = self._counters, self._workload
        means = {name: float(value) for name, value in values.items() if name not in LOOP_KEYS}
        counters.train_means = means
        interval = self.timer.end_interval(share)
        counters.throughput.end_interval(interval.steps_per_s)
        counters.device_bytes = read_device_bytes()
        if (own_share := self.timer.own_share()) is not None:
            self._progress.report_own_time(round(1000 * own_share))
        if not self._is_primary:
            return
        speeds = counters.throughput.speeds
        overall = {Key.EPOCH: workload.epoch_at(step), Key.STEP_S: self.timer.median_s()}
        examples = step * workload.examples_per_step
        epochs_by_part = {} if workload.epochs is None else workload.epochs(examples)
        self._numbers = {**means, **speeds, **overall}
        self._numbers |= {f"{Key.EPOCH}/{name}": count for name, count in epochs_by_part.items()}
        previous, self._totals = self._totals, keyed_totals()
        increases = {key: total - previous.get(key, 0.0) for key, total in self._totals.items()}
        for part, seconds in interval.parts.items():
            increases[Key.PART_S.format(part=part)] = seconds
        memory = memory_numbers(counters.device_bytes, self._host_load)
        row = {
            **self._numbers,
            **increases,
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

    def record_skipped(self, step: int, scale: float, batch_fault: str | None = None) -> None:
        """Count `step` as skipped, because its gradients overflowed with this loss scale.

        `batch_fault` describes what is not finite in its batch, if anything.
        """
        SKIPPED_STEPS.add()
        reason = "float16 overflowed"
        if batch_fault is not None:
            reason = f"its batch is not finite: {batch_fault}"
        self._print_line(step, f"skipped: {reason}; loss scale {scale:g} is halved")

    def record_evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Record the means over the held-out set after `step` steps, on every process."""
        means = {name: float(value) for name, value in values.items()}
        self._counters.eval_means = means
        if self._is_primary:
            self._write_row("eval", step, {**means, "time": time.time()})
            self._print_line(step, f"eval  {_format_values(means)}")

    def record_best(self, step: int) -> None:
        """Record that the newest evaluation, after `step` steps, is the best so far."""
        self._best_step = {Key.BEST_STEP: step}
        if self._is_primary:
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
        """End the export and close the files. Never raises, because the run is already saved."""
        if self._exporter is not None:
            with _note_failure(self._progress, "the metrics could not be closed", Exception):
                self._exporter.close()
        if self._files is not None:
            self._files.close()

    def end_tracking(self, *, stops: bool) -> None:
        """Wait until the tracker has read every line, or only briefly if the run `stops`."""
        if self._feed is None:
            return
        # The tracker also gets the pictures that a task has just reported.
        reporting.flush_samples()
        note = self._feed.close_at_stop() if stops else self._feed.close()
        if note is not None:
            _print_note(self._progress, note)

    def _write_row(self, name: str, step: int, values: Mapping[str, float | None]) -> None:
        if self._files is not None:
            self._files.write_row(name, step, values)
        self._report_numbers(step)

    def _report_numbers(self, step: int) -> None:
        eval_values = {f"eval_{name}": value for name, value in self._counters.eval_means.items()}
        numbers = {Key.STEP: step, **self._numbers, **eval_values, **self._best_step}
        self._progress.report_metrics(numbers)

    def _print_line(self, step: int, text: str) -> None:
        if self._is_primary:
            print(f"step {step}/{self._workload.total_steps}  {text}", flush=True)


class MetricsFiles:
    """Writes the journals of a run folder and, if tensorboardX is installed, its events.

    After a failed write a file is not written any more.
    """

    def __init__(self, folder: str, progress: Progress) -> None:
        self.folder, self._progress = folder, progress
        self._first_step = 0
        self._journals: dict[str, Journal] = {}
        self._board: TensorBoard | None = None

    def open_journals(self, step: int) -> None:
        """Open the files of a loop that starts after `step` complete steps."""
        self._first_step = step
        with _note_failure(self._progress, "no metrics in the run folder"):
            for name, file in layout.JOURNALS.items():
                self._journals[name] = Journal(os.path.join(self.folder, file), step)
            has_writer = importlib.util.find_spec("tensorboardX") is not None
            if has_writer and not tracker_feed.writes_events():
                self._board = TensorBoard(os.path.join(self.folder, layout.TENSORBOARD), step)

    def write_row(self, name: str, step: int, values: Mapping[str, float | None]) -> None:
        """Write a line to the journal `name`, and its scalars as TensorBoard events."""
        if (journal := self._journals.pop(name, None)) is not None:
            with _note_failure(self._progress, f"no more {layout.JOURNALS[name]}"):
                journal.write(step, values)
                self._journals[name] = journal
            if name not in self._journals:
                # Closing it writes the rest of the line, which may fail again.
                with contextlib.suppress(OSError):
                    journal.close()
        if (board := self._board) is not None:
            prefix, self._board = layout.JOURNAL_PREFIXES[name], None
            scalars = {f"{prefix}/{key}": value for key, value in values.items() if key != "time"}
            with _note_failure(self._progress, "no more TensorBoard events"):
                board.write(step, scalars)
                self._board = board
            if self._board is None:
                with contextlib.suppress(OSError):
                    board.close()

    def write_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write a line of samples."""
        with _note_failure(self._progress, "no samples in the run folder"):
            if "samples" not in self._journals:
                path = os.path.join(self.folder, layout.SAMPLES)
                self._journals["samples"] = Journal(path, self._first_step)
            self._journals["samples"].write(step, {"samples": samples, "time": time.time()})

    def close(self) -> None:
        """Close the files. Never raises."""
        for file in (*self._journals.values(), self._board):
            if file is not None:
                with _note_failure(self._progress, "the metrics could not be closed", Exception):
                    file.close()


@contextlib.contextmanager
def _note_failure(
    progress: Progress, problem: str, kind: type[Exception] | tuple[type[Exception], ...] = OSError
) -> Iterator[None]:
    """Turn an exception of `kind`, such as an OSError for a full disk, into a note."""
    try:
        yield
    except kind as error:
        _print_note(progress, f"{problem}: {error}")


def _print_note(progress: Progress, text: str) -> None:
    progress.report_note(text)
    print(text, file=sys.stderr, flush=True)


def format_interval(
    step: int,
    total: int,
    means: Mapping[str, float],
    speeds: Mapping[str, float | None],
    shares: Mapping[str, float],
) -> str:
    """Return `step 120/600  loss 0.4321  grad 1.23  lr 3.0e-04  12.3k examples/s  data 1 %`.

    For language models the speeds are `29.1k tokens/s  1.8k targets/s`: tokens of the input, and
    predicted tokens with a loss.
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
    task_names = [name for name in values if name not in formats and "/" not in name]
    formats |= {name: f"{name} {{:.4g}}" for name in task_names}
    return "  ".join(text.format(values[name]) for name, text in formats.items() if name in values)


def format_short(number: float) -> str:
    """Format a number with three digits and a prefix: 12.3k, 1.05M."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{prefix}"
    return f"{number:.3g}"
