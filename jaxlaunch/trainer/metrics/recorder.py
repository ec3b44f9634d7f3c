"""One run's metrics and where they go: Prometheus, the run folder, the agent, and standard output.

The loop calls in at log intervals, evaluations and saves; per step it only touches `timer`. Every process exports to
Prometheus, process 0 also writes and prints. A disk or a socket that fails raises nothing here: it is noted, once.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.monitoring

from jaxlaunch.contract import Key
from jaxlaunch.trainer.metrics.counters import Counters, Workload, read_device_bytes
from jaxlaunch.trainer.metrics.outputs import MetricsFiles, attempt
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.prometheus import Exporter
from jaxlaunch.trainer.tracking import feeding

# Values of a step that the loop alone reads.
FLAGS = (Key.FINITE, Key.SKIPPED, Key.WEIGHT, Key.TOKENS)


class Metrics:
    """The metrics of one process. Made before the first compile, so that every scrape has every name."""

    def __init__(
        self,
        *,
        rank: int,
        run_dir: str | None,
        socket: str | None,
        report: Progress,
        total_steps: int,
        examples_per_step: int,
        has_tokens: bool = False,
        has_targets: bool = True,
        dataset_examples: int | None = None,
        epochs: Callable[[int], Mapping[str, float]] | None = None,
    ) -> None:
        self._workload = Workload(total_steps, examples_per_step, has_tokens, has_targets, dataset_examples, epochs)
        self._counters = Counters(self._workload)
        self.timer = self._counters.timer
        self._is_first, self._report = rank == 0, report
        if run_dir is None and self._is_first and feeding.is_asked():
            # The tracker follows the files of the run folder.
            run_dir = tempfile.mkdtemp()
        self._files = MetricsFiles(run_dir, report) if self._is_first and run_dir is not None else None
        # The numbers of the last interval, as they are written and reported.
        self._numbers: dict[str, float | None] = {}
        self._best_step: dict[str, float] = {}
        jax.monitoring.register_event_listener(self._counters.count_cache_event)
        self._exporter: Exporter | None = None
        if socket is not None:
            attempt(report, "no metrics for Prometheus", lambda: self._export(socket, rank))

    def _export(self, socket: str, rank: int) -> None:
        self._exporter = Exporter(socket, rank, self._counters.prometheus)

    def start(self, step: int, *, flops_per_step: float | None = None, peak_flops: float | None = None) -> None:
        """Begin a loop after `step` complete steps.

        Args:
            step: Steps that are complete.
            flops_per_step: FLOPs of the whole batch; None when not known.
            peak_flops: FLOPs per second of all devices together; None when not known.
        """
        self._counters.first_step = step
        self._counters.throughput.flops_per_step, self._counters.throughput.peak_flops = flops_per_step, peak_flops
        # A step that was restored is on storage.
        self._counters.checkpoints.step = step or None
        if self._files is not None:
            self._files.open(step)
        self.timer.start()

    def interval(self, step: int, values: Mapping[str, float], share: float = 1.0) -> None:
        """Record the means of `step`, and this share of the time since the last call: a dispatch may hold several.

        Called once per log interval, on every process.
        """
        counters, work = self._counters, self._workload
        counters.trained = {name: float(value) for name, value in values.items() if name not in FLAGS}
        took = self.timer.interval(share)
        counters.throughput.end_interval(took.steps_per_s)
        counters.device_bytes = read_device_bytes()
        if not self._is_first:
            return
        speeds = counters.throughput.speeds
        overall = {Key.EPOCH: work.epoch(step), Key.STEP_S: self.timer.median_s()}
        parts = {} if work.epochs is None else work.epochs(step * work.examples_per_step)
        self._numbers = {**counters.trained, **speeds, **overall}
        self._numbers |= {f"{Key.EPOCH}/{name}": passes for name, passes in parts.items()}
        split = {Key.PART_S.format(part=part): seconds for part, seconds in took.parts.items()}
        self._write("metrics", step, {**self._numbers, **split, "wall_s": took.seconds, "time": time.time()})
        busy = {part: took.parts[part] / took.seconds for part in ("data", "save")} if took.seconds else {}
        print(interval_line(step, work.total_steps, counters.trained, speeds, busy), flush=True)

    def trained(self, step: int, weight: float, tokens: float = 0.0) -> None:
        """Count the tokens of `step` and its targets, the weight of its loss. A step without a target changes nothing,
        which is printed."""
        self._counters.throughput.count(tokens, weight)
        if weight == 0:
            self._counters.empty_steps += 1
            self._print(step, "empty: its batch has no target, nothing is changed")

    def skipped(self, step: int, scale: float, wrong: str | None = None) -> None:
        """Count `step`, whose gradients overflowed under this loss scale: it changed nothing but the scale.

        `wrong` says what in its batch was not finite, if anything.
        """
        self._counters.skipped_steps += 1
        why = "float16 overflowed" if wrong is None else f"its batch is not finite: {wrong}"
        self._print(step, f"skipped: {why}; loss scale {scale:g} is halved")

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Record the means over the held-out set after `step` steps, on every process."""
        means = {name: float(value) for name, value in values.items()}
        self._counters.evaluated = means
        if self._is_first:
            self._write("eval", step, {**means, "time": time.time()})
            self._print(step, f"eval  {_formatted(means)}")

    def found_best(self, step: int) -> None:
        """Record that the evaluation after `step` steps, the newest, is the best so far."""
        self._best_step = {Key.BEST_STEP: step}
        if self._is_first:
            self._report_numbers(step)

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Record what the model goes on with after some prompts, after `step` steps, on every process."""
        for sample in samples:
            self._print(step, f"sample  {json.dumps(sample, ensure_ascii=False)}")
        if self._files is not None:
            self._files.write_samples(step, samples)

    def saved(self, step: int, blocking_s: float) -> None:
        """Count a save of `step` that held up the loop for `blocking_s` seconds."""
        self._counters.checkpoints.saves += 1
        self._counters.checkpoints.blocked_s += blocking_s

    def committed(self, step: int) -> None:
        """Record that the checkpoint of `step` is complete on storage."""
        self._counters.checkpoints.step, self._counters.checkpoints.committed_at = step, time.monotonic()

    def close(self) -> None:
        """End the export and close the files. Never raises: the run is complete and saved, whatever fails here."""
        lost = "the metrics could not be closed"

        def unregister() -> None:
            # It raises where the user's program has cleared all listeners.
            jax.monitoring.unregister_event_listener(self._counters.count_cache_event)

        attempt(self._report, lost, unregister, Exception)
        if self._exporter is not None:
            attempt(self._report, lost, self._exporter.close, Exception)
        if self._files is not None:
            self._files.close()

    def end_tracking(self, *, stops: bool) -> None:
        """Wait until the tracker has every line of the files, which are closed; briefly where the run `stops`."""
        if self._files is not None:
            self._files.end_tracking(stops=stops)

    def _write(self, name: str, step: int, values: Mapping[str, float | None]) -> None:
        if self._files is not None:
            self._files.write(name, step, values)
        self._report_numbers(step)

    def _report_numbers(self, step: int) -> None:
        held_out = {f"eval_{name}": value for name, value in self._counters.evaluated.items()}
        self._report.metrics({Key.STEP: step, **self._numbers, **held_out, **self._best_step})

    def _print(self, step: int, text: str) -> None:
        if self._is_first:
            print(f"step {step}/{self._workload.total_steps}  {text}", flush=True)


def interval_line(
    step: int, total: int, trained: Mapping[str, float], speeds: Mapping[str, float | None], busy: Mapping[str, float]
) -> str:
    """`step 120/600  loss 0.4321  grad 1.23  lr 3.0e-04  12.3k examples/s  mfu 4.2 %  data 1 %  save 0 %`.

    Of tokens: `29.1k tokens/s  1.8k targets/s`, those that are read and those that are predicted and count.
    """
    words = [f"step {step}/{total}", _formatted(trained)]
    tokens, examples, mfu = (speeds.get(key) for key in (Key.TOKENS_PER_S, Key.EXAMPLES_PER_S, Key.MFU))
    speed, unit = (examples, "examples") if tokens is None else (tokens, "tokens")
    if speed is not None:
        words.append(f"{short(speed)} {unit}/s")
    if (targets := speeds.get(Key.TARGETS_PER_S)) is not None:
        words.append(f"{short(targets)} targets/s")
    if mfu is not None:
        words.append(f"mfu {mfu:.1%}".replace("%", " %"))
    words += [f"{part} {share:.0%}".replace("%", " %") for part, share in busy.items()]
    return "  ".join(words)


def _formatted(values: Mapping[str, float]) -> str:
    known = {
        Key.LOSS: "loss {:.4f}",
        Key.GRAD_NORM: "grad {:.3g}",
        Key.LEARNING_RATE: "lr {:.1e}",
        Key.LOSS_SCALE: "scale {:g}",
    }
    # One of many of a kind, as expert_load/3, is for the files.
    named = known | {name: f"{name} {{:.4g}}" for name in values if name not in known and "/" not in name}
    return "  ".join(text.format(values[name]) for name, text in named.items() if name in values)


def short(number: float) -> str:
    """Three digits and a prefix: 12.3k, 1.05M."""
    for size, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{prefix}"
    return f"{number:.3g}"
