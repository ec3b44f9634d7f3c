"""What the loop drives: where a run keeps its files, how long it trains, and the interface of a training.

The two trainings are the built-in one (trainer/train) and that of a program's own step (loop/run).
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar, overload

import jax

from jaxlaunch import contract
from jaxlaunch.trainer.data.pipeline import Prefetcher
from jaxlaunch.trainer.errors import NotFiniteError, SpecError
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import Metrics
from jaxlaunch.trainer.spec import Best, Profile, StopEarly, TrainSpec

S = TypeVar("S")  # the state of a training


@dataclasses.dataclass(frozen=True)
class Place:
    """A run's folder, its socket for metrics, and the file by which an agent requests profiles."""

    run_dir: str | None = None
    run_url: str | None = None  # of the bucket that `run_dir` is copied to
    uid: str = "local"
    socket: str | None = None
    profile: str | None = None
    take_over: bool = False
    saved: int = 0  # the newest step that earlier attempts saved

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Place:
        """Return the place that the environment variables of the contract describe."""
        return cls(
            run_dir=environ.get(contract.RUN_DIR),
            run_url=environ.get(contract.RUN_URL),
            uid=environ.get(contract.UID) or f"local-{os.getpid()}",
            socket=environ.get(contract.METRICS),
            profile=environ.get(contract.PROFILE),
            take_over=environ.get(contract.TAKE_OVER) == "1",
            saved=int(environ.get(contract.SAVED, 0)),
        )

    @property
    def run_folder(self) -> str | None:
        """The path or URL of the run folder, as every host sees it."""
        return self.run_url or self.run_dir

    def checkpoints(self, spec: TrainSpec) -> str:
        """Return the path or URL of the checkpoint folder. Raises SpecError without one in spec or run folder."""
        if spec.checkpoint.path is not None:
            return spec.checkpoint.path
        if self.run_dir is None:
            raise SpecError("train.checkpoint.path is not given and there is no run folder to keep checkpoints in")
        return os.path.join(self.run_dir, "checkpoints")


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long the loop trains, and how many steps lie between two evaluations, saves and lines of metrics."""

    steps: int  # of the whole run
    log_every: int
    eval_every: int | None  # None: only at the end
    save_every: int | None
    keep: int  # newest checkpoints
    steps_per_dispatch: int = 1
    best: Best | None = None
    stop_early: StopEarly | None = None
    profile: Profile = dataclasses.field(default_factory=Profile)

    def is_due(self, every: int | None, step: int) -> bool:
        """Return whether what happens `every` so many steps, and at the end, happens after `step`."""
        return step == self.steps or (every is not None and step > 0 and step % every == 0)


class Training(abc.ABC, Generic[S]):
    """A state, the step that changes it, the batches, the evaluation, and what a checkpoint holds of it.

    It is built, and everything wrong with it is reported, before the first compile. The loop calls every method on all
    processes, in the same order.

    Attributes:
        folder: The path or URL of the checkpoints.
        evaluates: Whether there is anything to evaluate or to sample.
        repeats_last_evaluation: Whether a run that was complete evaluates its last step again, so that the record of
            the new start has the result.
    """

    settings: Settings
    folder: str
    metrics: Metrics
    evaluates: bool
    repeats_last_evaluation: ClassVar[bool] = False

    def __init__(self, report: Progress) -> None:
        self.report = report

    def note(self, text: str) -> None:
        """Print a note, and report it for summary.json."""
        if jax.process_index() == 0:
            print(text, flush=True)
            self.report.note(text)

    # --- the state ----------------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def abstract(self) -> S:
        """The state with the shape, dtype and sharding of each array in its place."""

    @abc.abstractmethod
    def init(self) -> S:
        """Return the state before the first step."""

    @abc.abstractmethod
    def to_tree(self, state: S) -> dict[str, Any]:
        """Return the state, or an abstract one, as a checkpoint holds it."""

    @abc.abstractmethod
    def from_tree(self, tree: Mapping[str, Any], meta: Mapping[str, Any], step: int) -> S:
        """Return the state of a checkpoint of `step` with the record `meta`."""

    @abc.abstractmethod
    def meta(self) -> dict[str, Any]:
        """Return what is recorded with the state, by which a resumed run is checked."""

    @abc.abstractmethod
    def difference(self, meta: Mapping[str, Any]) -> str:
        """Return why the arrays of a checkpoint with this meta may differ from this state's; "" if it does not tell."""

    @abc.abstractmethod
    def check_resumed(self, meta: Mapping[str, Any], step: int, is_finished: bool) -> str | None:
        """Return what differs from the training that saved `step`, its last one if `is_finished`; None: nothing.

        Raises SpecError, DataError or CheckpointError where training on from there would not be the same run.
        """

    # --- the steps ----------------------------------------------------------------------------------------------------

    def compile_ahead(self) -> None:  # noqa: B027  # optional
        """Start to compile in a thread, before the state is restored; return at once."""

    @abc.abstractmethod
    def compile(self, start: int) -> float | None:
        """Compile what the steps after `start` need; return the FLOPs of a step where they are known."""

    @abc.abstractmethod
    def iterate(self, spans: Sequence[range]) -> Prefetcher[Any] | None:
        """Return the batch of each span of steps, made ahead of its use; None for steps without data."""

    @abc.abstractmethod
    def train(self, state: S, batch: Any, span: range) -> tuple[S, dict[str, jax.Array]]:
        """Dispatch the steps of `span`, donating the state; return the new one and the metrics of the steps.

        The metrics include `finite`, and may include `weight` and `skipped`. For several steps each array has one value
        per step.
        """

    @abc.abstractmethod
    def not_finite(self, step: int, metrics: Mapping[str, float], saved: int) -> NotFiniteError:
        """Return the error of a step that was not finite; `saved` is the last step that was handed to the store."""

    @abc.abstractmethod
    def programs(self) -> list[str]:
        """Return the HLO texts of the compiled steps, for a profile."""

    def wrong_batch(self, step: int) -> str | None:
        """Return what in the batch of `step` (from 1), made again, is not finite; None: nothing, or unknown."""
        # The data may be unreadable by now: the error to report is the step's.
        with contextlib.suppress(Exception):
            return self._wrong_batch(step - 1)
        return None

    def _wrong_batch(self, number: int) -> str | None:
        return None

    # --- the evaluations ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def evaluate(self, state: S, between: Callable[[], None]) -> dict[str, float]:
        """Return the means over the held-out set; call `between` where a stop may be heeded, on all ranks alike."""

    def sample(self, state: S) -> Sequence[Mapping[str, Any]]:
        """Return how the model continues the prompts of the job; empty where it has none."""
        return ()


class Spans(Sequence[range]):
    """Spans of consecutive steps, given by their edges: span i holds the steps from edge i to edge i + 1."""

    def __init__(self, edges: Sequence[int]) -> None:
        self._edges = edges

    def __len__(self) -> int:
        return len(self._edges) - 1

    @overload
    def __getitem__(self, index: int) -> range: ...
    @overload
    def __getitem__(self, index: slice) -> Spans: ...
    def __getitem__(self, index: int | slice) -> range | Spans:
        if isinstance(index, slice):
            raise TypeError("one span at a time")
        index = range(len(self))[index]
        return range(self._edges[index], self._edges[index + 1])


def cut_spans(start: int, total: int, size: int = 1, every: Iterable[int | None] = ()) -> Spans:
    """Return the steps from `start` to `total`, `size` or 1 at a time; a span begins at each multiple of an `every`.

    A tiny model's step is shorter than the time that the host needs to dispatch one, so several are dispatched
    together. Evaluations and saves come between dispatches: what is left before one is dispatched step by step, so that
    any run has two shapes, hence two programs.
    """
    if size == 1:
        return Spans(range(start, total + 1))
    edges, periods = [start], [period for period in every if period is not None]
    while (done := edges[-1]) < total:
        pause = min([total, *(done - done % period + period for period in periods)])
        whole = done + (pause - done) // size * size
        edges += [*range(done + size, whole + 1, size), *range(whole + 1, pause + 1)]
    return Spans(edges)
