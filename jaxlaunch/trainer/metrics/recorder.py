"""One run's metrics and where they go: Prometheus, the run folder, the agent, and standard output.

The loop calls in at log intervals, evaluations and saves; per step it only touches `timer`. Every process exports to
Prometheus, process 0 also writes and prints. A disk or a socket that fails raises nothing here: it is noted, once.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.monitoring

from jaxlaunch.contract import PROMETHEUS, Key
from jaxlaunch.runs import layout
from jaxlaunch.trainer.metrics.journal import Journal, TensorBoard, tensorboard_installed
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.prometheus import Exporter, Histogram, Value
from jaxlaunch.trainer.metrics.timer import BOUNDS, StepTimer
from jaxlaunch.trainer.tracking import feeding

CACHE_EVENTS = "/jax/compilation_cache/cache_"  # + hits, misses: the names jax records
SPEEDS = (Key.EXAMPLES_PER_S, Key.TOKENS_PER_S, Key.TARGETS_PER_S, Key.MFU)
FLAGS = (Key.FINITE, Key.SKIPPED, Key.WEIGHT, Key.TOKENS)  # of a step, for the loop alone
OF_THE_STEP = (Key.GRAD_NORM, Key.LEARNING_RATE, Key.LOSS_SCALE)  # means that are not the task's
# Prometheus name of each number that is also one of a line of metrics.jsonl.
GAUGES = {row.key: row.name for row in PROMETHEUS if row.key is not None and row.type == "gauge"}


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
        self.timer = StepTimer()
        if run_dir is None and rank == 0 and feeding.is_asked():
            run_dir = tempfile.mkdtemp()  # the tracker follows the files of the run folder
        self._rank, self._run_dir, self._report = rank, run_dir, report
        self._total, self._dataset, self._epochs = total_steps, dataset_examples, epochs
        self._examples, self._has_tokens = examples_per_step, has_tokens
        self._has_targets = has_tokens and has_targets  # whether the weight of a loss counts them
        self._first = 0  # complete steps when the loop began
        self._flops: float | None = None
        self._peak: float | None = None
        self._trained: dict[str, float] = {}
        self._numbers: dict[str, float | None] = {}  # of the last interval, as they are written and reported
        self._evaluated: dict[str, float] = {}
        self._best: dict[str, float] = {}
        self._speeds: dict[str, float | None] = dict.fromkeys(SPEEDS)
        self._skipped = self._empty = 0
        self._targets = self._tokens = 0.0  # of all steps
        self._recent: list[tuple[float, float]] = []  # tokens and targets of each step since the last interval
        self._saves, self._blocked_s = 0, 0.0
        self._committed: int | None = None
        self._committed_at = time.monotonic()
        self._device_bytes = _device_bytes()
        self._cache = {"hits": 0, "misses": 0}
        jax.monitoring.register_event_listener(self._count)
        self._journals: dict[str, Journal] = {}
        self._board: TensorBoard | None = None
        self._feed: feeding.Feed | None = None
        self._exporter: Exporter | None = None
        if socket is not None:
            self._try("no metrics for Prometheus", lambda: self._export(socket))

    # --- called by the loop -------------------------------------------------------------------------------------------

    def start(self, step: int, *, flops_per_step: float | None = None, peak_flops: float | None = None) -> None:
        """The loop begins after `step` complete steps.

        `flops_per_step` of the whole batch, `peak_flops` per second of all devices together; None when not known.
        """
        self._first, self._flops, self._peak = step, flops_per_step, peak_flops
        self._committed = step or None  # what was restored is on storage
        if self._rank == 0 and self._run_dir is not None:
            folder = self._run_dir
            self._try("no metrics in the run folder", lambda: self._open(folder, step))
            self._try("no tracker", lambda: self._track(folder))
        self.timer.start()

    def interval(self, step: int, values: Mapping[str, float], share: float = 1.0) -> None:
        """Records the means of `step`, and this share of the time since the last call: a dispatch may hold several.

        Called once per log interval, on every process.
        """
        self._trained = {name: float(value) for name, value in values.items() if name not in FLAGS}
        took = self.timer.interval(share)
        if took.steps_per_s is not None:
            self._speeds = self._speeds_at(took.steps_per_s)
        self._recent.clear()
        self._device_bytes = _device_bytes()
        if self._rank != 0:
            return
        overall = {Key.EPOCH: self._epoch(step), Key.STEP_S: self.timer.median_s()}
        parts = {} if self._epochs is None else self._epochs(step * self._examples)
        self._numbers = {**self._trained, **self._speeds, **overall}
        self._numbers |= {f"{Key.EPOCH}/{name}": passes for name, passes in parts.items()}
        split = {Key.PART_S.format(part=part): seconds for part, seconds in took.parts.items()}
        self._write("metrics", step, {**self._numbers, **split, "wall_s": took.seconds, "time": time.time()})
        self._report_numbers(step)
        busy = {part: took.parts[part] / took.seconds for part in ("data", "save")} if took.seconds else {}
        print(interval_line(step, self._total, self._trained, self._speeds, busy), flush=True)

    def trained(self, step: int, weight: float, tokens: float = 0.0) -> None:
        """Counts the tokens of `step` and its targets, the weight of its loss. Without a target a step changes nothing,
        which is said."""
        self._targets += weight
        self._tokens += tokens
        self._recent.append((tokens, weight))
        if weight == 0:
            self._empty += 1
            if self._rank == 0:
                print(f"step {step}/{self._total}  empty: its batch has no target, nothing is changed", flush=True)

    def skipped(self, step: int, scale: float, wrong: str | None = None) -> None:
        """Counts `step`, whose gradients overflowed under this loss scale: it changed nothing but the scale.

        `wrong` says what in its batch was not finite, if anything.
        """
        self._skipped += 1
        if self._rank == 0:
            why = "float16 overflowed" if wrong is None else f"its batch is not finite: {wrong}"
            print(f"step {step}/{self._total}  skipped: {why}; loss scale {scale:g} is halved", flush=True)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Records the means over the held-out set after `step` steps, on every process."""
        self._evaluated = {name: float(value) for name, value in values.items()}
        if self._rank != 0:
            return
        self._write("eval", step, {**self._evaluated, "time": time.time()})
        self._report_numbers(step)
        print(f"step {step}/{self._total}  eval  {_formatted(self._evaluated)}", flush=True)

    def found_best(self, step: int) -> None:
        """The evaluation after `step` steps, the newest, is the best so far."""
        self._best = {Key.BEST_STEP: step}
        if self._rank == 0:
            self._report_numbers(step)

    def sampled(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Records what the model goes on with after some prompts, after `step` steps, on every process."""
        if self._rank != 0:
            return
        for sample in samples:
            print(f"step {step}/{self._total}  sample  {json.dumps(sample, ensure_ascii=False)}", flush=True)
        if self._run_dir is not None:
            path = os.path.join(self._run_dir, layout.SAMPLES)
            self._try("no samples in the run folder", lambda: self._append(path, step, samples))

    def _append(self, path: str, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        if "samples" not in self._journals:
            self._journals["samples"] = Journal(path, self._first)
        self._journals["samples"].write(step, {"samples": samples, "time": time.time()})

    def saved(self, step: int, blocking_s: float) -> None:
        """Counts a save of `step` that held up the loop for `blocking_s` seconds."""
        self._saves += 1
        self._blocked_s += blocking_s

    def committed(self, step: int) -> None:
        """Records that the checkpoint of `step` is complete on storage."""
        self._committed, self._committed_at = step, time.monotonic()

    def close(self) -> None:
        """Ends the export and closes the files. Never raises: the run is complete and saved, whatever fails here."""
        ends = [lambda: jax.monitoring.unregister_event_listener(self._count)]  # raises where the user cleared them all
        ends += [each.close for each in (self._exporter, *self._journals.values(), self._board) if each is not None]
        for end in ends:
            self._try("the metrics could not be closed", end, Exception)

    def end_tracking(self, *, stops: bool) -> None:
        """Waits until the tracker has every line of the files, which are closed; briefly where the run `stops`."""
        if self._feed is not None and (lost := self._feed.leave() if stops else self._feed.close()) is not None:
            self._report.note(lost)
            print(lost, file=sys.stderr, flush=True)

    # --- where the numbers go -----------------------------------------------------------------------------------------

    def _export(self, socket: str) -> None:
        self._exporter = Exporter(socket, self._rank, self._values)

    def _open(self, folder: str, step: int) -> None:
        for name in ("metrics", "eval"):
            self._journals[name] = Journal(os.path.join(folder, f"{name}.jsonl"), step)
        if tensorboard_installed() and not feeding.writes_events():
            self._board = TensorBoard(os.path.join(folder, layout.TENSORBOARD), step)

    def _track(self, folder: str) -> None:
        self._feed = feeding.start(folder)

    def _write(self, name: str, step: int, values: Mapping[str, float | None]) -> None:
        journal, board = self._journals.get(name), self._board
        if journal is not None and not self._try(f"no more {name}.jsonl", lambda: journal.write(step, values)):
            with contextlib.suppress(OSError):  # what waits in it cannot be written either
                self._journals.pop(name).close()
        if board is not None:
            prefix = "train" if name == "metrics" else name
            scalars = {f"{prefix}/{key}": value for key, value in values.items() if key != "time"}
            if not self._try("no more TensorBoard events", lambda: board.write(step, scalars)):
                self._board = None
                board.close()

    def _report_numbers(self, step: int) -> None:
        held_out = {f"eval_{name}": value for name, value in self._evaluated.items()}
        self._report.metrics({Key.STEP: step, **self._numbers, **held_out, **self._best})

    def _try(self, lost: str, action: Callable[[], None], kind: type[Exception] = OSError) -> bool:
        """Whether `action` succeeded; an OSError (a full disk, a taken socket) is noted, and the run goes on."""
        try:
            action()
        except kind as fault:
            self._report.note(f"{lost}: {fault}")
            print(f"{lost}: {fault}", file=sys.stderr, flush=True)
            return False
        return True

    # --- what the numbers are -----------------------------------------------------------------------------------------

    def _speeds_at(self, steps_per_s: float) -> dict[str, float | None]:
        """Examples, tokens and FLOPs per second of all ranks together; None for what is not known."""
        flops, count = self._flops, len(self._recent)
        tokens, targets = (sum(each) / count for each in zip(*self._recent, strict=True)) if count else (0.0, 0.0)
        return {
            Key.EXAMPLES_PER_S: self._examples * steps_per_s if self._examples else None,
            Key.TOKENS_PER_S: tokens * steps_per_s if self._has_tokens and count else None,
            Key.TARGETS_PER_S: targets * steps_per_s if self._has_targets and count else None,
            Key.MFU: None if flops is None or self._peak is None else flops * steps_per_s / self._peak,
        }

    def _epoch(self, step: int) -> float | None:
        return step * self._examples / self._dataset if self._dataset else None

    def _count(self, event: str, **_: object) -> None:
        kind = event.removeprefix(CACHE_EVENTS)
        if kind in self._cache:
            self._cache[kind] += 1

    def _values(self) -> dict[str, Value]:
        """The trainer's rows of contract.PROMETHEUS; called by the scraping thread."""
        timer = self.timer
        step, steps = self._first + timer.steps, timer.steps
        task: dict[tuple[str, ...], float | None] = {(split, Key.LOSS): None for split in ("train", "eval")}
        task |= {("train", name): value for name, value in self._trained.items() if name not in OF_THE_STEP}
        task |= {("eval", name): value for name, value in self._evaluated.items()}
        numbers = self._trained | self._speeds | {Key.STEP: step, Key.EPOCH: self._epoch(step)}
        values: dict[str, Value] = {name: numbers.get(key) for key, name in GAUGES.items()}
        return values | {
            "jaxlaunch_target_step": self._total,
            "jaxlaunch_steps_total": steps,
            "jaxlaunch_step_seconds": Histogram(BOUNDS, tuple(timer.counts), timer.seconds),
            "jaxlaunch_part_seconds_total": {(part,): seconds for part, seconds in timer.parts().items()},
            "jaxlaunch_examples_total": self._examples * steps,
            "jaxlaunch_tokens_total": self._tokens if self._has_tokens else 0,
            "jaxlaunch_targets_total": self._targets if self._has_targets else 0,
            "jaxlaunch_model_flops_per_step": self._flops,
            "jaxlaunch_skipped_steps_total": self._skipped,
            "jaxlaunch_empty_steps_total": self._empty,
            "jaxlaunch_task_metric": task,
            "jaxlaunch_resident_memory_bytes": _resident_bytes(),
            "jaxlaunch_device_memory_bytes": self._device_bytes,
            "jaxlaunch_checkpoint_step": self._committed,
            "jaxlaunch_checkpoint_age_seconds": time.monotonic() - self._committed_at,
            "jaxlaunch_checkpoint_saves_total": self._saves,
            "jaxlaunch_checkpoint_blocking_seconds_total": self._blocked_s,
            "jaxlaunch_compile_cache_hits_total": self._cache["hits"],
            "jaxlaunch_compile_cache_misses_total": self._cache["misses"],
        }


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


def _resident_bytes() -> float | None:
    """Host memory of this process; None where there is no /proc."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _device_bytes() -> dict[tuple[str, ...], float | None]:
    """(device, kind) -> bytes; None where a platform does not count them, as CPU does not."""
    kinds = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
    found: dict[tuple[str, ...], float | None] = {}
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        found |= {(str(device.id), kind): stats.get(key) for kind, key in kinds.items()}
    return found
