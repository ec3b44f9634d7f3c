"""What the loop is given: a training, the built-in one (trainer/train) or a user's own (loop/user_training)."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax

from jaxlaunch.trainer.data.prefetch import Prefetcher
from jaxlaunch.trainer.errors import NotFiniteError
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.metrics.recorder import Metrics
from jaxlaunch.trainer.spec import Best, Profile, StopEarly

S = TypeVar("S")  # the state of a training
Tree = Any


@dataclasses.dataclass(frozen=True)
class Settings:
    """How long the loop goes on, and how many steps lie between two evaluations, saves and lines of metrics."""

    steps: int  # of the whole run
    log_every: int
    eval_every: int | None  # None: at the end alone
    save_every: int | None
    keep: int  # newest checkpoints
    steps_per_dispatch: int = 1
    best: Best | None = None
    stop_early: StopEarly | None = None
    profile: Profile = dataclasses.field(default_factory=Profile)


class Training(abc.ABC, Generic[S]):
    """A state, the step that changes it, the batches, the evaluation, and what of it is saved.

    Made before the first compile: what is wrong with it is said then. The loop calls every method on all processes, in
    the same order.
    """

    settings: Settings
    folder: str  # of the checkpoints
    metrics: Metrics
    evaluates: bool  # whether there is anything to evaluate or to sample
    # Whether a run that was complete evaluates its last step again, so that the new start's record has the result.
    repeats_last_evaluation: ClassVar[bool] = False

    def __init__(self, report: Progress) -> None:
        self.report = report

    def note(self, text: str) -> None:
        """Prints a note, and reports it for summary.json."""
        if jax.process_index() == 0:
            print(text, flush=True)
            self.report.note(text)

    # --- the state ----------------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def abstract(self) -> S:
        """The state, its arrays abstract: shape, dtype and sharding of each."""

    @abc.abstractmethod
    def init(self) -> S:
        """The state before the first step."""

    @abc.abstractmethod
    def to_tree(self, state: S) -> dict[str, Any]:
        """The state as a checkpoint holds it; an abstract one too."""

    @abc.abstractmethod
    def from_tree(self, tree: Mapping[str, Any], meta: Mapping[str, Any], step: int) -> S:
        """The state of a checkpoint of `step`, whose meta is `meta`."""

    @abc.abstractmethod
    def meta(self) -> dict[str, Any]:
        """What is saved beside the state, to judge whether a run may go on from it."""

    @abc.abstractmethod
    def difference(self, meta: Mapping[str, Any]) -> str:
        """Why the arrays of a checkpoint with this meta may be others than this state's; "" where it does not tell."""

    @abc.abstractmethod
    def check_resumed(self, meta: Mapping[str, Any], step: int, is_finished: bool) -> str | None:
        """What differs from the training that saved `step`, its last if `is_finished`; None: nothing does.

        Raises SpecError, DataError or CheckpointError where going on from there would not be the same run.
        """

    # --- the steps ----------------------------------------------------------------------------------------------------

    def compile_ahead(self) -> None:  # noqa: B027  # a training need not
        """Begins in a thread what `compile` then finds done. Called before a state is restored; returns at once."""

    @abc.abstractmethod
    def compile(self, start: int) -> float | None:
        """Compiles what the steps from `start` on need; returns the FLOPs of a step where they are known."""

    @abc.abstractmethod
    def iterate(self, spans: Sequence[range]) -> Prefetcher[Any] | None:
        """The batch of each span of steps, made ahead of its use; None for steps without data."""

    @abc.abstractmethod
    def train(self, state: S, batch: Any, span: range) -> tuple[S, dict[str, jax.Array]]:
        """Dispatches the steps of `span`, the state being donated; returns the new one and the steps' metrics.

        Among them is `finite`, and may be `weight` and `skipped`. Of several steps each array has one value a step.
        """

    @abc.abstractmethod
    def not_finite(self, step: int, metrics: Mapping[str, float], saved: int) -> NotFiniteError:
        """The error of a step that was not finite; `saved` is the last step that was handed to the store."""

    @abc.abstractmethod
    def programs(self) -> list[str]:
        """The HLO texts of the compiled steps, for a profile."""

    def wrong_batch(self, step: int) -> str | None:
        """What in the batch of `step`, the first being 1, is no finite number; None: nothing, or it is not known.

        The batch is made again, for nothing looks at those of steps that are good.
        """
        with contextlib.suppress(
            Exception
        ):  # the data may not be readable any more: the step's error is the one to say
            return self._wrong_batch(step - 1)
        return None

    def _wrong_batch(self, number: int) -> str | None:
        return None

    # --- the evaluations ----------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def evaluate(self, state: S, between: Callable[[], None]) -> dict[str, float]:
        """The means over the held-out set, empty without one. Calls `between` wherever a stop may be heeded, equally
        often on every process."""

    def sample(self, state: S) -> Sequence[Mapping[str, Any]]:
        """What the model goes on with after the prompts of the job; empty where it has none."""
        return ()
