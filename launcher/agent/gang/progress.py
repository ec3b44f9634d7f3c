"""What one child says of itself, folded: its phase, its steps, and when its silence becomes a hang."""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from trainer import contract

# Seconds a phase may last when the job does not say. A phase ends with the next line that changes it or its step.
BUDGETS_S: Mapping[str, float | None] = {
    "rendezvous": 1800.0,
    "init": 300.0,
    "restore": 600.0,
    "compile": 1800.0,
    "step": None,  # learned
    "data": 600.0,
    "eval": 1800.0,
    "save": 1200.0,
    "done": 300.0,  # a process that has finished must also leave
}
STEP_FLOOR_S, STEP_FACTOR = 60.0, 10.0  # a learned step budget: max(60 s, 10 × median)


def budgets(given: Mapping[str, float | None]) -> dict[str, float | None]:
    """Every phase's budget in seconds: what the job gives over our defaults."""
    return {**BUDGETS_S, **given}


@dataclasses.dataclass(frozen=True)
class Status:
    """A rank's state as its agent tells it to the leader."""

    phase: str | None = None
    step: int | None = None
    committed: int | None = None
    trainer: bool = False  # the built-in trainer speaks: its exit code is the contract's
    stepped: bool = False  # it reported a step in this attempt
    left: bool = False  # its interpreter is leaving by itself
    waits: bool = False  # ... and sits in JAX's shutdown barrier
    done: bool = False
    jax: str | None = None  # the version that the program imported
    stopped: Mapping[str, Any] | None = None
    exit: int | None = None  # exit code, minus the signal; None while it lives

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Status:
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in fields.items() if name in known})

    def to_wire(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @property
    def where(self) -> str:
        """ "in data at step 20", for a sentence about the rank; in a step the step is all there is to say."""
        place = f"in {self.phase}" if self.phase and not (self.phase == "step" and self.stepped) else ""
        return " ".join(part for part in (place, f"at step {self.step}" if self.stepped else "") if part)

    @property
    def ended_clean(self) -> bool:
        if self.exit == contract.PREEMPTED:
            return self.trainer
        return self.exit == contract.DONE and (self.done or not self.trainer)


class Progress:
    """The fold. Time comes from outside, in monotonic seconds."""

    def __init__(self, now: float, phase: str | None = None) -> None:
        self.status = Status(phase=phase)
        self.first_committed: int | None = None
        self.has_hello = False
        self._since = now
        self._stepped_at: float | None = None
        self._steps_s: deque[float] = deque(maxlen=64)

    def take(self, message: Mapping[str, Any], now: float) -> None:
        """Folds one line of the progress pipe; keys it does not know are left alone."""
        if "hello" in message:
            self.has_hello = True
            is_trainer = self.status.trainer or message["hello"] == "trainer"
            self._set(trainer=is_trainer, jax=message.get("jax") or self.status.jax)
        if isinstance(message.get("phase"), str):
            self._phase(message["phase"], message.get("step"), now)
        if isinstance(message.get("committed"), int):
            step = message["committed"]
            self.first_committed = step if self.first_committed is None else self.first_committed
            self._set(committed=max(step, self.status.committed or 0))
        if isinstance(message.get("stopped"), Mapping):
            self._set(stopped=message["stopped"])
        if "atexit" in message:
            self._set(left=True, waits=bool(message.get("waits")))

    def ended(self, code: int) -> None:
        self._set(exit=code)

    def limit_s(self, budgets: Mapping[str, float | None]) -> float | None:
        """Seconds the present phase may last; None: endless, or the program never said what it is in."""
        phase = self.status.phase
        if phase is None or self.status.left or self.status.exit is not None:
            return None
        if phase != "step" or budgets.get("step") is not None:
            return budgets.get(phase)
        if len(self._steps_s) < 3:
            return budgets.get("compile")  # the first steps still connect, tune and compile
        return max(STEP_FLOOR_S, STEP_FACTOR * statistics.median(self._steps_s))

    def in_phase_s(self, now: float) -> float:
        return now - self._since

    def overdue(self, budgets: Mapping[str, float | None], now: float) -> bool:
        limit = self.limit_s(budgets)
        return limit is not None and self.in_phase_s(now) > limit

    def _phase(self, phase: str, step: Any, now: float) -> None:
        step = step if isinstance(step, int) else self.status.step
        if (phase, step) == (self.status.phase, self.status.step):
            return
        if phase == "step":
            self._learn(step, now)
        else:
            self._stepped_at = None  # what an evaluation or a save took is no step's time
        self._since = now
        stepped = self.status.stepped or phase == "step"
        self._set(phase=phase, step=step, stepped=stepped, done=self.status.done or phase == "done")

    def _learn(self, step: int | None, now: float) -> None:
        before = self.status.step
        if self._stepped_at is not None and step is not None and before is not None and step > before:
            self._steps_s.append(now - self._stepped_at)  # of one report, which may be of several steps
        self._stepped_at = now

    def _set(self, **changes: Any) -> None:
        self.status = dataclasses.replace(self.status, **changes)
