"""What is known of a run in numbers: means of steps and evaluations, speeds, counts, memory."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping

import jax

from jaxlaunch.contract import PROMETHEUS, Key
from jaxlaunch.trainer.metrics.prometheus import Histogram, Value
from jaxlaunch.trainer.metrics.timer import BOUNDS, StepTimer

CACHE_EVENTS = "/jax/compilation_cache/cache_"  # + hits, misses: the names jax records
SPEEDS = (Key.EXAMPLES_PER_S, Key.TOKENS_PER_S, Key.TARGETS_PER_S, Key.MFU)
# Means of a step that are not the task's.
STEP_KEYS = (Key.GRAD_NORM, Key.LEARNING_RATE, Key.LOSS_SCALE)
# Prometheus name of each number that is also one of a line of metrics.jsonl.
GAUGES = {row.key: row.name for row in PROMETHEUS if row.key is not None and row.type == "gauge"}


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a run computes.

    Attributes:
        total_steps: Steps of the whole run.
        examples_per_step: Size of the global batch.
        has_tokens: Whether examples are rows of tokens.
        has_targets: Whether the weight of a loss counts targets.
        dataset_examples: Examples of the training set, if known.
        epochs: Passes over each part of a mixture after a number of examples.
    """

    total_steps: int
    examples_per_step: int
    has_tokens: bool = False
    has_targets: bool = True
    dataset_examples: int | None = None
    epochs: Callable[[int], Mapping[str, float]] | None = None

    def epoch(self, step: int) -> float | None:
        """Return the passes over the training set after `step` steps."""
        return step * self.examples_per_step / self.dataset_examples if self.dataset_examples else None


class Throughput:
    """Speeds of all ranks together in the last interval, and the tokens and targets of all steps."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self.flops_per_step: float | None = None
        self.peak_flops: float | None = None
        self.speeds: dict[str, float | None] = dict.fromkeys(SPEEDS)
        self.tokens = self.targets = 0.0
        # Tokens and targets of each step since the last interval.
        self._recent: list[tuple[float, float]] = []

    def count(self, tokens: float, targets: float) -> None:
        """Count the tokens and targets of a step."""
        self.tokens += tokens
        self.targets += targets
        self._recent.append((tokens, targets))

    def end_interval(self, steps_per_s: float | None) -> None:
        """Compute the speeds of an interval with this many steps per second; None leaves those before."""
        if steps_per_s is not None:
            work, flops, count = self._workload, self.flops_per_step, len(self._recent)
            tokens, targets = (sum(each) / count for each in zip(*self._recent, strict=True)) if count else (0.0, 0.0)
            has_tokens = work.has_tokens and count
            has_mfu = flops is not None and self.peak_flops is not None
            self.speeds = {
                Key.EXAMPLES_PER_S: work.examples_per_step * steps_per_s if work.examples_per_step else None,
                Key.TOKENS_PER_S: tokens * steps_per_s if has_tokens else None,
                Key.TARGETS_PER_S: targets * steps_per_s if has_tokens and work.has_targets else None,
                Key.MFU: flops * steps_per_s / self.peak_flops if has_mfu else None,  # type: ignore[operator]
            }
        self._recent.clear()


@dataclasses.dataclass
class CheckpointCounts:
    """Saves of this process, and the newest step that is complete on storage."""

    saves: int = 0
    blocked_s: float = 0.0
    step: int | None = None
    committed_at: float = dataclasses.field(default_factory=time.monotonic)


class Counters:
    """The numbers of one process. The loop writes them, and the thread of a scrape reads them."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.timer = workload, StepTimer()
        self.throughput, self.checkpoints = Throughput(workload), CheckpointCounts()
        # Complete steps when the loop began.
        self.first_step = 0
        self.trained: dict[str, float] = {}
        self.evaluated: dict[str, float] = {}
        self.skipped_steps = self.empty_steps = 0
        self.device_bytes = read_device_bytes()
        self._cache = {"hits": 0, "misses": 0}

    def count_cache_event(self, event: str, **_: object) -> None:
        """Count a hit or a miss of JAX's compilation cache, as a listener of its events."""
        kind = event.removeprefix(CACHE_EVENTS)
        if kind in self._cache:
            self._cache[kind] += 1

    def prometheus(self) -> dict[str, Value]:
        """Return the trainer's rows of contract.PROMETHEUS; called by the scraping thread."""
        timer, work, speed, checkpoints = self.timer, self.workload, self.throughput, self.checkpoints
        step, steps = self.first_step + timer.steps, timer.steps
        task: dict[tuple[str, ...], float | None] = {(split, Key.LOSS): None for split in ("train", "eval")}
        task |= {("train", name): value for name, value in self.trained.items() if name not in STEP_KEYS}
        task |= {("eval", name): value for name, value in self.evaluated.items()}
        numbers = self.trained | speed.speeds | {Key.STEP: step, Key.EPOCH: work.epoch(step)}
        values: dict[str, Value] = {name: numbers.get(key) for key, name in GAUGES.items()}
        return values | {
            "jaxlaunch_target_step": work.total_steps,
            "jaxlaunch_steps_total": steps,
            "jaxlaunch_step_seconds": Histogram(BOUNDS, tuple(timer.counts), timer.seconds),
            "jaxlaunch_part_seconds_total": {(part,): seconds for part, seconds in timer.parts().items()},
            "jaxlaunch_examples_total": work.examples_per_step * steps,
            "jaxlaunch_tokens_total": speed.tokens if work.has_tokens else 0,
            "jaxlaunch_targets_total": speed.targets if work.has_tokens and work.has_targets else 0,
            "jaxlaunch_model_flops_per_step": speed.flops_per_step,
            "jaxlaunch_skipped_steps_total": self.skipped_steps,
            "jaxlaunch_empty_steps_total": self.empty_steps,
            "jaxlaunch_task_metric": task,
            "jaxlaunch_resident_memory_bytes": _resident_bytes(),
            "jaxlaunch_device_memory_bytes": self.device_bytes,
            "jaxlaunch_checkpoint_step": checkpoints.step,
            "jaxlaunch_checkpoint_age_seconds": time.monotonic() - checkpoints.committed_at,
            "jaxlaunch_checkpoint_saves_total": checkpoints.saves,
            "jaxlaunch_checkpoint_blocking_seconds_total": checkpoints.blocked_s,
            "jaxlaunch_compile_cache_hits_total": self._cache["hits"],
            "jaxlaunch_compile_cache_misses_total": self._cache["misses"],
        }


def _resident_bytes() -> float | None:
    """Return the host memory of this process; None where there is no /proc."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def read_device_bytes() -> dict[tuple[str, ...], float | None]:
    """Return bytes by (device, kind); None where a platform does not count them, as CPU does not."""
    kinds = {"in_use": "bytes_in_use", "peak": "peak_bytes_in_use", "limit": "bytes_limit"}
    sizes: dict[tuple[str, ...], float | None] = {}
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        sizes |= {(str(device.id), kind): stats.get(key) for kind, key in kinds.items()}
    return sizes
