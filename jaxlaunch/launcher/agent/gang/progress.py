"""The state of one process, from its reports: its phase, its steps, and when its silence becomes a hang.

The lines that a program writes on the progress pipe: any program, so any bytes. Pure.

A value of the wrong form is left out and becomes a note for the reader of the summary: nothing that a program writes
may end its agent, or reach the leader in a form that the leader does not expect.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any

from jaxlaunch import contract
from jaxlaunch.records import checked
from jaxlaunch.records.checked import MAX_NUMBER, Exit, ExitCode, Malformed, Whole, cut

# Seconds that a phase may last, unless the job's `timeouts` say otherwise. It ends with the next line that changes the
# phase or its step.
TIMEOUTS_S: Mapping[str, float | None] = {
    "rendezvous": 1800.0,
    "prepare": 86400.0,
    "replace": 300.0,  # of a lost host, for which the others wait
    "init": 300.0,
    "restore": 600.0,
    "compile": 1800.0,
    "step": None,  # learned
    "data": 600.0,
    "eval": 1800.0,
    "save": 1200.0,
    "done": 300.0,  # a process that has finished must also leave
}
STEP_FLOOR_S, STEP_FACTOR = 60.0, 10.0  # the learned timeout of a step: max(60 s, 10 × median)


def phase_timeouts(given: Mapping[str, float | None]) -> dict[str, float | None]:
    """The timeout of every phase in seconds: `given` by the job, else the default. None: endless, or learned (step)."""
    return {**TIMEOUTS_S, **given}


@dataclasses.dataclass(frozen=True)
class Status:
    """The state of a rank, as its agent sends it to the leader."""

    phase: str | None = None
    step: Whole | None = None
    committed: Whole | None = None  # the newest step on storage, restored or committed
    first_committed: Whole | None = None  # the first that this attempt committed
    trainer: bool = False  # it is the built-in trainer, or trains as that does: its exit code is the contract's
    stepped: bool = False  # it reported a step in this attempt
    first_step: Whole | None = None  # the first that it trains: the one after what it restored
    left: bool = False  # its interpreter is exiting by itself
    waits: bool = False  # ... and is in JAX's shutdown barrier
    done: bool = False
    jax: str | None = None  # the version that the program imported
    stopped: Mapping[str, Any] | None = None
    exit: Exit | None = None  # exit code, minus the signal; None while it lives

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Status:
        """The status in a message between agents, as `changed` reads it; a field that is left out has its default."""
        return _UNKNOWN.changed(fields)

    def to_wire(self) -> dict[str, Any]:
        """The fields for a message between agents."""
        return dict(vars(self))

    def changed(self, fields: Mapping[str, Any]) -> Status:
        """The status with these fields of a message; unknown ones are ignored. Raises Malformed for a wrong one."""
        known = checked.read_some(Status, fields)
        after = object.__new__(Status)  # dataclasses.replace takes five times as long, and a leader does this all day
        vars(after).update(vars(self), **known)
        return after

    def changes_to(self, after: Status) -> dict[str, Any]:
        """The fields that `changed` needs to make `after` of this status."""
        mine = vars(self)
        return {name: value for name, value in vars(after).items() if value != mine[name]}

    @property
    def ended_clean(self) -> bool:
        """Whether the process has ended without an error, or as the trainer does when it is stopped."""
        if self.exit == contract.PREEMPTED:
            return self.trainer
        return self.exit == contract.DONE and (self.done or not self.trainer)


_UNKNOWN = Status()


class Changes:
    """What one end of a link still has to tell the other about the ranks of a host."""

    def __init__(self) -> None:
        self._told: dict[int, Status] = {}

    def told(self, rank: int, status: Status) -> None:
        """Notes that another message carried the whole status of a rank."""
        self._told[rank] = status

    def take(self, statuses: Mapping[int, Status]) -> dict[str, dict[str, Any]]:
        """The fields that differ from those last told: {"0-7": {"step": 12}} when eight ranks changed alike."""
        runs: list[tuple[int, int, dict[str, Any]]] = []
        for rank in sorted(statuses):
            fields = self._told.get(rank, _UNKNOWN).changes_to(statuses[rank])
            if not fields:
                continue
            if runs and runs[-1][1] == rank - 1 and runs[-1][2] == fields:
                runs[-1] = runs[-1][0], rank, fields
            else:
                runs.append((rank, rank, fields))
        self._told.update(statuses)
        return {key_of(first, last): fields for first, last, fields in runs}


def key_of(first: int, last: int) -> str:
    """How `Changes.take` writes the ranks from `first` to `last`."""
    return str(first) if first == last else f"{first}-{last}"


def ranks_of(key: str, own: range) -> range:
    """The ranks of a key that `Changes.take` wrote, of a host with the ranks `own`. Raises ValueError for others."""
    first, _, last = key.partition("-")
    ranks = range(int(first), int(last or first) + 1)
    if not ranks or ranks[0] not in own or ranks[-1] not in own:
        raise ValueError(f"{key} is not of ranks {own.start} to {own.stop - 1}")
    return ranks


class Progress:
    """Follows the reports of one process. The caller gives the time, in monotonic seconds.

    A process that is in a `phase` before it has said anything is the built-in trainer: one that ends without a word has
    failed as that does.
    """

    def __init__(self, now: float, phase: str | None = None) -> None:
        self.status = Status(phase=phase, trainer=phase is not None)
        self._first_phase = phase
        self.has_hello = False
        self._since = now
        self._stepping_s = 0.0  # in the phase `step` since the last step was complete
        self._steps_s: deque[float] = deque(maxlen=64)

    def take(self, message: Mapping[str, Any], now: float) -> None:
        """Takes in one line of the progress pipe; unknown keys are ignored."""
        if "hello" in message:
            if self.has_hello and message["hello"] == "site" and message.get("jax") is None:
                self._begin_again(now)
            self.has_hello = True
            is_trainer = self.status.trainer or message["hello"] == "trainer"
            first = 1 if is_trainer and self.status.first_step is None else self.status.first_step
            self._set(trainer=is_trainer, jax=message.get("jax") or self.status.jax, first_step=first)
        if isinstance(message.get("phase"), str):
            self._phase(message["phase"], message.get("step"), now)
        if isinstance(message.get("committed"), int):
            step, first = message["committed"], self.status.first_committed
            self._set(committed=max(step, self.status.committed or 0), first_committed=step if first is None else first)
        if isinstance(message.get("found"), int):
            self._set(committed=max(message["found"], self.status.committed or 0))
        if isinstance(message.get("restored"), int):
            restored = message["restored"]
            self._set(committed=max(restored, self.status.committed or 0), first_step=min(restored, MAX_NUMBER - 1) + 1)
        if isinstance(message.get("stopped"), Mapping):
            self._set(stopped=message["stopped"])
        if "atexit" in message:
            self._set(left=True, waits=bool(message.get("waits")))

    def ended(self, code: int) -> None:
        """Notes the exit code, or minus the signal."""
        self._set(exit=code)

    def timeout_s(self, timeouts_s: Mapping[str, float | None]) -> float | None:
        """Seconds that the present phase may last; None: endless, or the program never reported a phase."""
        phase = self.status.phase
        if phase is None or self.status.left or self.status.exit is not None:
            return None
        if phase == "done" and self._first_phase is None and timeouts_s.get("done") == TIMEOUTS_S["done"]:
            return None  # what a program of the user's does after its last step has no timeout but the job's own
        if phase != "step" or timeouts_s.get("step") is not None:
            return timeouts_s.get(phase)
        if len(self._steps_s) < 3:
            return timeouts_s.get("compile")  # the first steps still connect, tune and compile
        return max(STEP_FLOOR_S, STEP_FACTOR * statistics.median(self._steps_s))

    def in_phase_s(self, now: float) -> float:
        """Seconds since the phase or its step last changed."""
        return now - self._since

    def overdue(self, timeouts_s: Mapping[str, float | None], now: float) -> bool:
        """Whether the present phase has lasted longer than its timeout."""
        limit = self.timeout_s(timeouts_s)
        return limit is not None and self.in_phase_s(now) > limit

    def _begin_again(self, now: float) -> None:
        """Another interpreter took over: the next of a `sh -c`, or the program executed itself anew."""
        self._since, self._stepping_s = now, 0.0
        self._steps_s.clear()
        is_trainer = self._first_phase is not None
        self._set(phase=self._first_phase, trainer=is_trainer, left=False, waits=False, done=False, jax=None)

    def _phase(self, phase: str, step: Any, now: float) -> None:
        step = step if isinstance(step, int) else self.status.step
        if (phase, step) == (self.status.phase, self.status.step):
            return
        self._learn(step, now)
        self._since = now
        stepped = self.status.stepped or phase == "step"
        first = step if stepped and self.status.first_step is None else self.status.first_step
        self._set(phase=phase, step=step, stepped=stepped, first_step=first, done=self.status.done or phase == "done")

    def _learn(self, step: int | None, now: float) -> None:
        """Notes the time of a step, of which waits for data, evaluations and saves between two steps are no part."""
        before = self.status.step
        if self.status.phase == "step":
            self._stepping_s += now - self._since
        if step is not None and before is not None and step > before and self._stepping_s > 0:
            self._steps_s.append(self._stepping_s)  # of one report, which may be of several steps
        if step != before:
            self._stepping_s = 0.0

    def _set(self, **changes: Any) -> None:
        self.status = dataclasses.replace(self.status, **changes)


UNSTARTABLE = "unstartable"  # key of the line with which the forked agent reports that exec failed
# How a line begins.
_BEGIN = re.compile(
    rb'\{"(?:hello|phase|committed|found|restored|joined|metrics|stopped|profile|note|error|refusal|atexit|'
    rb'unstartable)": ?'
)
MAX_LABEL = 100  # characters of a phase or a version: they are in every beat
MAX_BEGINS = 8  # of messages in one line that are tried, the last ones: each try may cost as much as the line is long
MAX_METRICS = 32 * 1024  # bytes as JSON: a beat that carries them must fit a message between agents


def read_line(line: bytes, rank: int) -> dict[str, Any]:
    """The message in a line of `rank`'s: known keys with values of the right form, all others in a `note`."""
    try:
        found = _whole(line)
    except ValueError:
        if _BEGIN.match(line) and checked.is_cut(line):
            return {}  # one of ours that a full pipe cut: no fault of the program's
        return {"note": f"rank {rank} wrote a line to the progress pipe that is not JSON"}
    if not isinstance(found, dict):
        return {"note": f"rank {rank} wrote {checked.shown(found)} to the progress pipe, which is not a JSON object"}
    message: dict[str, Any] = {}
    for key, value in found.items():
        if key not in _READERS:
            continue  # of a newer contract
        try:
            message[key] = _plain(_READERS[key](value))
        except Malformed as error:
            wrong = f"rank {rank} wrote `{key}`: {checked.shown(value)} to the progress pipe"
            note = f"{wrong}; {error.field or 'it'} must be {error.needed}"
            message.setdefault("note", note)
    return message


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _whole(line: bytes) -> Any:
    """The value of a line, or of its end. Raises ValueError when there is none.

    A process that ends while the pipe is full leaves half a line. What the next one writes follows in the same line.
    """
    begins = [found.start() for found in _BEGIN.finditer(line, 1)]
    for start in [0, *reversed(begins[-MAX_BEGINS:])]:
        try:
            return checked.decode_line(line[start:])
        except ValueError:
            continue
    raise ValueError("no value in it")


_Label = Annotated[str, cut(MAX_LABEL)]


@dataclasses.dataclass(frozen=True)
class _Error:
    type: _Label = "an error"
    message: Annotated[str, cut(contract.MESSAGE_CHARS)] = ""
    traceback: Annotated[str, cut(-contract.TRACEBACK_CHARS)] | None = None
    code: ExitCode | None = None


@dataclasses.dataclass(frozen=True)
class _Refusal:
    message: Annotated[str, cut(contract.MESSAGE_CHARS)] = ""
    code: ExitCode = contract.BAD_SPEC


@dataclasses.dataclass(frozen=True)
class _Stopped:
    step: Whole = 0
    saved: bool = False
    note: Annotated[str, cut(contract.MESSAGE_CHARS)] = ""


def _fits(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    if len(json.dumps(metrics)) > MAX_METRICS:
        raise Malformed(f"an object of at most {MAX_METRICS} bytes", metrics)
    return metrics


def _has_state(profile: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(profile.get("state"), str):
        raise Malformed("an object with a string `state`", profile)
    return profile


@dataclasses.dataclass(frozen=True)
class _Line:
    """What each key of a line may hold."""

    hello: _Label
    python: _Label
    jax: _Label | None
    pid: Whole
    phase: _Label
    step: Whole | None
    committed: Whole
    found: Whole
    restored: Whole
    joined: bool
    metrics: Annotated[Mapping[str, Any], _fits]
    of: Whole
    stopped: _Stopped
    profile: Annotated[Mapping[str, Any], _has_state]
    note: str
    error: _Error
    refusal: _Refusal
    atexit: Any
    waits: bool
    unstartable: str


_READERS = checked.readers(_Line)
