"""The interface between the loop and a training: `Training`, with its context and settings.

There are two implementations: the built-in training (trainer/train) and that of a program's own
step (loop/run).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax

from jaxlaunch import contract
from jaxlaunch.runs import layout
from jaxlaunch.trainer.data.pipeline import Prefetcher
from jaxlaunch.trainer.errors import NotFiniteError, SpecError
from jaxlaunch.trainer.metrics.counters import Workload
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import Metrics
from jaxlaunch.trainer.spec import Best, Profile, StopEarly, TrainSpec

# The state of a training.
S = TypeVar("S")


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The parts of a run's environment that the trainer uses.

    Attributes:
        run_dir: The path of the run folder on this host.
        run_url: The URL in a bucket to which `run_dir` is copied.
        uid: The identity of the run, equal in all of its attempts.
        socket: The path of the Unix socket that serves metrics.
        profile: The path of the file by which an agent requests profiles.
        take_over: Whether the run may take a checkpoint folder from another run.
        saved_step: The newest step that earlier attempts saved.
    """

    run_dir: str | None = None
    run_url: str | None = None
    uid: str = "local"
    socket: str | None = None
    profile: str | None = None
    take_over: bool = False
    saved_step: int = 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> RunContext:
        """Return the context that the environment variables of the contract describe."""
        return cls(
            run_dir=environ.get(contract.RUN_DIR),
            run_url=environ.get(contract.RUN_URL),
            uid=environ.get(contract.UID) or f"local-{os.getpid()}",
            socket=environ.get(contract.METRICS),
            profile=environ.get(contract.PROFILE),
            take_over=environ.get(contract.TAKE_OVER) == "1",
            saved_step=int(environ.get(contract.SAVED, 0)),
        )

    @property
    def run_folder(self) -> str | None:
        """The path or URL of the run folder, as every host sees it."""
        return self.run_url or self.run_dir

    def checkpoint_path(self, spec: TrainSpec) -> str:
        """Return the path or URL of the checkpoints. Raises SpecError without a folder."""
        if spec.checkpoint.path is not None:
            return spec.checkpoint.path
        if self.run_dir is None:
            raise SpecError(
                "train.checkpoint.path is not given and there is no run folder to keep "
                "checkpoints in"
            )
        return os.path.join(self.run_dir, layout.CHECKPOINTS)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The length of a run, and the intervals of its evaluations, saves and lines of metrics.

    Attributes:
        steps: Steps of the whole run.
        log_every: Steps between lines of metrics.
        eval_every: Steps between evaluations; None evaluates only at the end.
        save_every: Steps between saves; None saves only at the end.
        keep: Number of newest checkpoints to keep.
        steps_per_dispatch: Steps that are dispatched together.
        best: The rule for the best checkpoints to keep in addition, if any.
        stop_early: The rule that ends the run early, if any.
        profile: The steps to trace.
    """

    steps: int
    log_every: int
    eval_every: int | None
    save_every: int | None
    keep: int
    steps_per_dispatch: int = 1
    best: Best | None = None
    stop_early: StopEarly | None = None
    profile: Profile = dataclasses.field(default_factory=Profile)

    def is_due(self, interval: int | None, step: int) -> bool:
        """Return whether an action is due at `step`: at multiples of `interval` and at the end."""
        return step == self.steps or (interval is not None and step > 0 and step % interval == 0)


def describe_saved(step: int) -> str:
    """Return a clause for error messages that names the newest saved step, if any."""
    return f"step {step} is the newest saved one" if step > 0 else "no step is saved"


class Training(abc.ABC, Generic[S]):
    """A training as the loop sees it: state, steps, batches, evaluations and checkpoints.

    The constructor checks everything that can be checked before the first compilation. The loop
    calls every method on all processes, in the same order.

    Attributes:
        settings: The length of the run and its intervals.
        folder: The path or URL of the checkpoints.
        metrics: The metrics of this process.
        has_evaluation: Whether there is anything to evaluate or to sample.
        repeats_last_evaluation: Whether a completed run that is started again evaluates its last
            step, so that the record of the new start has the result.
    """

    settings: Settings
    folder: str
    metrics: Metrics
    has_evaluation: bool
    repeats_last_evaluation: ClassVar[bool] = False

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def note(self, text: str) -> None:
        """Print a note, and report it for summary.json."""
        if jax.process_index() == 0:
            print(text, flush=True)
            self.progress.report_note(text)

    def open_metrics(
        self, context: RunContext, examples_per_step: int, **workload_fields: Any
    ) -> Metrics:
        """Create the metrics of this process; `workload_fields` are further fields of Workload."""
        workload = Workload(self.settings.steps, examples_per_step, **workload_fields)
        return Metrics(
            workload,
            rank=jax.process_index(),
            run_dir=context.run_dir,
            socket=context.socket,
            progress=self.progress,
        )

    # --- the state --------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def abstract_state(self) -> S:
        """The state with a ShapeDtypeStruct with sharding in place of each array."""

    @abc.abstractmethod
    def init_state(self) -> S:
        """Return the state before the first step."""

    @abc.abstractmethod
    def to_tree(self, state: S) -> dict[str, Any]:
        """Convert a state, abstract or not, to the tree that a checkpoint holds."""

    @abc.abstractmethod
    def from_tree(self, tree: Mapping[str, Any], meta: Mapping[str, Any], step: int) -> S:
        """Convert the tree and `meta` of the checkpoint of `step` to a state."""

    @abc.abstractmethod
    def checkpoint_meta(self) -> dict[str, Any]:
        """Return the record that is saved with the state and checked at a resume."""

    @abc.abstractmethod
    def describe_difference(self, meta: Mapping[str, Any]) -> str:
        """Explain why a checkpoint's arrays may differ from this state's; "" if unknown."""

    @abc.abstractmethod
    def check_resumed(self, meta: Mapping[str, Any], step: int, is_finished: bool) -> str | None:
        """Describe the differences from the training that saved `step`; None if there are none.

        Raises SpecError, DataError or CheckpointError if this training cannot continue that one.
        """

    # --- the steps --------------------------------------------------------------------------------

    def compile_ahead(self) -> None:  # noqa: B027
        """Start to compile in a thread while the state is restored. The default does nothing."""

    @abc.abstractmethod
    def compile(self, start: int) -> float | None:
        """Compile the programs for the steps after `start`. Return the FLOPs of a step."""

    @abc.abstractmethod
    def iterate_batches(self, spans: Sequence[range]) -> Prefetcher[Any] | None:
        """Return an iterator over prefetched batches of the spans; None for steps without data."""

    @abc.abstractmethod
    def train_steps(self, state: S, batch: Any, span: range) -> tuple[S, dict[str, jax.Array]]:
        """Dispatch the steps of `span`, donating the state. Return the new state and metrics.

        The metrics include `finite`, and may include `weight` and `skipped`. For several steps each
        array has one value per step.
        """

    @abc.abstractmethod
    def not_finite_error(
        self, step: int, metrics: Mapping[str, float], saved: int
    ) -> NotFiniteError:
        """Return the error for a step that was not finite; `saved` is the last saved step."""

    @abc.abstractmethod
    def hlo_texts(self) -> list[str]:
        """Return the HLO texts of the compiled steps, for a profile."""

    def describe_wrong_batch(self, step: int) -> str | None:
        """Describe what is not finite in the batch of `step` (from 1); None if unknown."""
        # The data may be unreadable by now. The error to report is that of the step.
        with contextlib.suppress(Exception):
            return self._find_wrong_batch(step - 1)
        return None

    def _find_wrong_batch(self, number: int) -> str | None:
        """Describe what is not finite in batch `number` (from 0); None if unknown."""
        return None

    # --- the evaluations --------------------------------------------------------------------------

    @abc.abstractmethod
    def evaluate(self, state: S, between: Callable[[], None]) -> dict[str, float]:
        """Return the means over the held-out set, and call `between` between batches.

        The callback may raise Stopped.
        """

    def sample_prompts(self, state: S) -> Sequence[Mapping[str, Any]]:
        """Return the model's continuations of the job's prompts, if there are any."""
        return ()


class Spans(Sequence[range]):
    """A sequence of spans of consecutive steps: span i is from edge i to edge i + 1."""

    def __init__(self, edges: Sequence[int]) -> None:
        self._edges = edges

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, index: int) -> range:  # type: ignore[override]
        index = range(len(self))[index]
        return range(self._edges[index], self._edges[index + 1])


def cut_spans(start: int, total: int, size: int = 1, intervals: Iterable[int | None] = ()) -> Spans:
    """Cut the steps from `start` to `total` into spans that are dispatched together.

    A step of a tiny model takes less time than the host needs to dispatch it, so `size` steps are
    dispatched together. Evaluations and saves, at multiples of the `intervals`, can only take place
    between dispatches. If fewer than `size` steps remain before one, they are dispatched one by
    one, so that a run needs only two programs.
    """
    if size == 1:
        return Spans(range(start, total + 1))
    edges, pause_intervals = [start], [interval for interval in intervals if interval is not None]
    while (step := edges[-1]) < total:
        next_pauses = (step - step % interval + interval for interval in pause_intervals)
        pause = min([total, *next_pauses])
        last_full_edge = step + (pause - step) // size * size
        edges += range(step + size, last_full_edge + 1, size)
        edges += range(last_full_edge + 1, pause + 1)
    return Spans(edges)
