"""State of one process, from the lines that it writes to the progress pipe.

The pipe may carry any bytes, because any program may write to it. `read_line` turns a line into a
message, and replaces values of the wrong form by a note for the summary. A program can therefore
neither crash its agent nor send the leader a value of an unexpected form. `RankProgress` applies
the messages to a `Status`, and learns how long a step takes in order to detect a hang.
`StatusChanges` reduces the statuses of a host to the fields that changed since its last message.
This module does no I/O.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from jaxlaunch import contract
from jaxlaunch.records import codec
from jaxlaunch.records.codec import (
    MAX_NUMBER,
    ExitCode,
    ExitStatus,
    MalformedError,
    NonNegativeInt,
    truncate_to,
)

# The learned timeout of a step is max(60 s, 10 × median).
STEP_FLOOR_S, STEP_FACTOR = 60.0, 10.0
# Steps that must be timed before their median is used.
MIN_TIMED_STEPS = 3


@dataclasses.dataclass(frozen=True)
class Status:
    """State of a rank, as its agent sends it to the leader.

    Attributes:
        phase: Newest phase that the program reported.
        step: Newest step.
        total: Steps of the whole run.
        committed: Newest step on storage, restored or committed.
        first_committed: First step that this attempt committed.
        trainer: Whether the exit codes are the contract's: the built-in trainer, or a program that
            trains as it does.
        stepped: Whether the rank reported a step in this attempt.
        first_step: First step that the rank trains, the one after the restored step.
        left: Whether the interpreter exits by itself, and was not killed.
        joining: Whether jax.distributed.initialize waits for the other ranks.
        waits: Whether the process waits for the other ranks in JAX's shutdown barrier.
        leaving_code: Code of its last sys.exit.
        done: Whether the program has finished.
        processes: Number of processes with which the program used JAX, 0 if not yet reported.
        jax: Version of JAX that the program imported.
        own: Thousandths of its step time that the rank spends on data and host work, during which
            it does not wait for other ranks.
        stopped: Report of the rank on a requested stop: what it saved.
        exit: Exit code, or minus the signal. None while the process lives.
    """

    phase: str | None = None
    step: NonNegativeInt | None = None
    total: NonNegativeInt | None = None
    committed: NonNegativeInt | None = None
    first_committed: NonNegativeInt | None = None
    trainer: bool = False
    stepped: bool = False
    first_step: NonNegativeInt | None = None
    left: bool = False
    joining: bool = False
    waits: bool = False
    leaving_code: ExitCode | None = None
    done: bool = False
    processes: NonNegativeInt = 0
    jax: str | None = None
    own: NonNegativeInt | None = None
    stopped: Mapping[str, Any] | None = None
    exit: ExitStatus | None = None

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any]) -> Status:
        """Read the status from a message between agents; a missing field has its default."""
        return _DEFAULT_STATUS.with_changes(fields)

    def to_wire(self) -> dict[str, Any]:
        """Return the fields for a message between agents."""
        return dict(vars(self))

    def with_changes(self, fields: Mapping[str, Any]) -> Status:
        """Return the status with these fields of a message. Unknown fields are ignored.

        Raises:
            MalformedError: A field has the wrong form.
        """
        changes = codec.read_partial(Status, fields)
        # dataclasses.replace takes five times as long, and a leader does this for every heartbeat.
        changed_status = object.__new__(Status)
        vars(changed_status).update(vars(self), **changes)
        return changed_status

    def changes_to(self, other: Status) -> dict[str, Any]:
        """Return the fields that `with_changes` needs to turn this status into another."""
        current_fields = vars(self)
        return {name: value for name, value in vars(other).items() if value != current_fields[name]}

    @property
    def has_ended_cleanly(self) -> bool:
        """Return whether the process has ended without an error, or after a stop."""
        if self.exit == contract.PREEMPTED:
            return self.trainer
        return self.exit == contract.DONE and (self.done or not self.trainer)

    @property
    def has_finished(self) -> bool:
        """Return whether the program has ended without an error, as far as is known."""
        return self.left or self.waits or self.has_ended_cleanly

    @property
    def is_ending(self) -> bool:
        """Return whether the process has ended, or only waits for the others to end."""
        return self.left or self.waits or self.exit is not None


_DEFAULT_STATUS = Status()


class StatusChanges:
    """Status changes of a host's ranks that one end of a link has not sent yet."""

    def __init__(self) -> None:
        self._sent_statuses: dict[int, Status] = {}

    def mark_sent(self, rank: int, status: Status) -> None:
        """Record that another message carried the whole status of a rank."""
        self._sent_statuses[rank] = status

    def take_changes(self, statuses: Mapping[int, Status]) -> dict[str, dict[str, Any]]:
        """Return the fields that changed, such as {"0-7": {"step": 12}} for eight equal changes."""
        rank_ranges: list[tuple[int, int, dict[str, Any]]] = []
        for rank in sorted(statuses):
            fields = self._sent_statuses.get(rank, _DEFAULT_STATUS).changes_to(statuses[rank])
            if not fields:
                continue
            if rank_ranges and rank_ranges[-1][1] == rank - 1 and rank_ranges[-1][2] == fields:
                rank_ranges[-1] = rank_ranges[-1][0], rank, fields
            else:
                rank_ranges.append((rank, rank, fields))
        self._sent_statuses.update(statuses)
        return {format_rank_range(first, last): fields for first, last, fields in rank_ranges}


def format_rank_range(first: int, last: int) -> str:
    """Return the key of `StatusChanges.take_changes` for the ranks from `first` to `last`."""
    return str(first) if first == last else f"{first}-{last}"


def parse_rank_range(key: str, host_ranks: range) -> range:
    """Return the ranks of a key of `StatusChanges.take_changes`.

    Raises:
        ValueError: The key is malformed, or names ranks that the host does not have.
    """
    first, _, last = key.partition("-")
    ranks = range(int(first), int(last or first) + 1)
    if not ranks or ranks[0] not in host_ranks or ranks[-1] not in host_ranks:
        raise ValueError(f"{key} is not within ranks {host_ranks.start} to {host_ranks.stop - 1}")
    return ranks


class RunningTimeout(NamedTuple):
    """A timeout that has started: its key in the job's `timeouts`, its length and its age."""

    key: str
    limit_s: float
    elapsed_s: float

    @property
    def left_s(self) -> float:
        """Seconds until the timeout expires; negative once it has."""
        return self.limit_s - self.elapsed_s


class RankProgress:
    """State of one process by its reports. The caller passes the time in monotonic seconds.

    A process with an initial `phase` is the built-in trainer: its exit codes are those of the
    contract, even if it ends without a report.
    """

    def __init__(self, now: float, phase: str | None = None) -> None:
        self.status = Status(phase=phase, trainer=phase is not None)
        self._first_phase = phase
        self.has_hello = False
        self._started_at = self._phase_since = now
        # Seconds in the phase "step" since the last complete step.
        self._stepping_s = 0.0
        self._step_times_s: deque[float] = deque(maxlen=64)

    def take_message(self, message: Mapping[str, Any], now: float) -> None:
        """Apply one message of the progress pipe; unknown keys are ignored."""
        if "hello" in message:
            self._apply_hello(message["hello"], message.get("jax"), now)
        if isinstance(message.get("phase"), str):
            self._enter_phase(message["phase"], message.get("step"), now)
        for key in ("committed", "found", "restored"):
            if isinstance(step := message.get(key), int):
                self._update_status(committed=max(step, self.status.committed or 0))
        if isinstance(step := message.get("committed"), int):
            first_committed = self.status.first_committed
            if first_committed is None:
                first_committed = step
            self._update_status(first_committed=first_committed)
        if isinstance(step := message.get("restored"), int):
            self._update_status(first_step=min(step, MAX_NUMBER - 1) + 1)
        for name in ("joining", "stopped", "total", "own"):
            if name in message:
                self._update_status(**{name: message[name]})
        self._apply_end(message, now)

    def reset_interpreter(self, now: float) -> None:
        """Reset the progress for a new interpreter, of the same process or of another."""
        self._phase_since, self._stepping_s = now, 0.0
        self._step_times_s.clear()
        fields = {"phase": self._first_phase, "trainer": self._first_phase is not None}
        flags = dict.fromkeys(("left", "joining", "waits", "done"), False)
        self._update_status(**fields, **flags, jax=None)

    def record_exit(self, code: int) -> None:
        """Record the exit code, or minus the signal."""
        self._update_status(exit=code)

    def timeout_s(self, timeouts_s: Mapping[str, float | None]) -> float | None:
        """Return the timeout of the current phase, or None without one."""
        phase = self.status.phase
        if phase is None or self.status.is_ending:
            return None
        has_default = timeouts_s.get("done") == contract.TIMEOUTS_S["done"]
        if phase == "done" and self._first_phase is None and has_default:
            # The default timeout after the last step is for the trainer; a program of the user has
            # one only if its job sets it.
            return None
        if phase != "step" or timeouts_s.get("step") is not None:
            return timeouts_s.get(phase)
        if len(self._step_times_s) < MIN_TIMED_STEPS:
            # The first steps still connect, tune and compile.
            return timeouts_s.get("compile")
        return max(STEP_FLOOR_S, STEP_FACTOR * statistics.median(self._step_times_s))

    def find_deadline(
        self, timeouts_s: Mapping[str, float | None], now: float
    ) -> RunningTimeout | None:
        """Return the timeout that expires first: of the phase, or until the first step."""
        timeouts = []
        if (limit_s := self.timeout_s(timeouts_s)) is not None:
            elapsed_s = now - self._phase_since
            timeouts.append(RunningTimeout(self.status.phase or "", limit_s, elapsed_s))
        has_begun = self.status.stepped or self.status.is_ending
        if (limit_s := timeouts_s.get(contract.FIRST_STEP)) is not None and not has_begun:
            timeouts.append(RunningTimeout(contract.FIRST_STEP, limit_s, now - self._started_at))
        return min(timeouts, key=lambda timeout: timeout.left_s, default=None)

    def _apply_hello(self, sender: Any, jax: Any, now: float) -> None:
        """Apply the first message of an interpreter. The sender is the site hook or the trainer."""
        if self.has_hello and sender == "site" and jax is None:
            self.reset_interpreter(now)
        self.has_hello = True
        is_trainer = self.status.trainer or sender == "trainer"
        first_step = self.status.first_step
        if is_trainer and first_step is None:
            first_step = 1
        jax = jax or self.status.jax
        self._update_status(trainer=is_trainer, jax=jax, first_step=first_step)

    def _apply_end(self, message: Mapping[str, Any], now: float) -> None:
        """Apply a message of a process that ends, or that waits for the others to end."""
        if "waits" in message:
            self._phase_since = now
            self._update_status(waits=message["waits"])
        if "atexit" in message:
            # The programs of `sh -c` run one after another, and only one of them may have joined.
            processes = max(self.status.processes, message.get("processes", 0))
            code = message.get("code")
            self._update_status(left=True, processes=processes, leaving_code=code)

    def _enter_phase(self, phase: str, step: Any, now: float) -> None:
        step = step if isinstance(step, int) else self.status.step
        if (phase, step) == (self.status.phase, self.status.step):
            return
        self._record_step_time(step, now)
        self._phase_since = now
        stepped = self.status.stepped or phase == "step"
        first_step = step if stepped and self.status.first_step is None else self.status.first_step
        done = self.status.done or phase == "done"
        self._update_status(
            phase=phase, step=step, stepped=stepped, first_step=first_step, done=done
        )

    def _record_step_time(self, step: int | None, now: float) -> None:
        """Record the time of a step, without the other phases between two steps."""
        previous_step = self.status.step
        if self.status.phase == "step":
            self._stepping_s += now - self._phase_since
        has_advanced = step is not None and previous_step is not None and step > previous_step
        if has_advanced and self._stepping_s > 0:
            # One report may cover several steps.
            self._step_times_s.append(self._stepping_s)
        if step != previous_step:
            self._stepping_s = 0.0

    def _update_status(self, **changes: Any) -> None:
        self.status = dataclasses.replace(self.status, **changes)


# Key of the line with which the forked agent reports that exec failed.
UNSTARTABLE = "unstartable"
# The beginning of a message, by its first key.
_MESSAGE_START = re.compile(
    rb'\{"(?:hello|role|phase|total|committed|found|restored|joining|joined|metrics|stopped|profile|note|error|own|'
    rb'refusal|atexit|waits|child|stops|unstartable)": ?'
)
# Largest length of a phase or a version, both of which are in every heartbeat.
MAX_LABEL_CHARS = 100
# Number of possible message starts in one line that are tried, from the end of the line. Each try
# may decode the whole line.
MAX_MESSAGE_STARTS = 8
# Largest size of the metrics as JSON: a heartbeat with metrics must fit into one message.
MAX_METRICS_BYTES = 32 * 1024


def read_line(line: bytes, rank: int) -> dict[str, Any]:
    """Return the valid fields in a line of a rank, with a `note` about an invalid one."""
    try:
        decoded = _decode_line_end(line)
    except ValueError:
        if _MESSAGE_START.match(line) and codec.is_truncated(line):
            # A full pipe cut one of our own lines, which is not the program's fault.
            return {}
        return {"note": f"rank {rank} wrote a line to the progress pipe that is not JSON"}
    if not isinstance(decoded, dict):
        text = f"rank {rank} wrote {codec.truncate_repr(decoded)} to the progress pipe"
        return {"note": f"{text}, which is not a JSON object"}
    message: dict[str, Any] = {}
    for key, value in decoded.items():
        if key not in _FIELD_READERS:
            # A program with a newer jaxlaunch may send more keys.
            continue
        try:
            field = _FIELD_READERS[key](value)
            is_record = isinstance(field, _Error | _Refusal | _Stopped | _ChildEnd)
            message[key] = dataclasses.asdict(field) if is_record else field
        except MalformedError as error:
            text = f"rank {rank} wrote `{key}`: {codec.truncate_repr(value)} to the progress pipe"
            note = f"{text}; {error.field or 'it'} must be {error.needed}"
            message.setdefault("note", note)
    return message


def _decode_line_end(line: bytes) -> Any:
    """Decode a line, or the message at its end.

    A process that was killed may have left half a line, which the next message then continues.

    Raises:
        ValueError: The line contains no message.
    """
    starts = [match.start() for match in _MESSAGE_START.finditer(line, 1)]
    for start in [0, *reversed(starts[-MAX_MESSAGE_STARTS:])]:
        try:
            return codec.parse_json(line[start:], drop_huge=True)
        except ValueError:
            continue
    raise ValueError("no value in it")


_Label = Annotated[str, truncate_to(MAX_LABEL_CHARS)]


@dataclasses.dataclass(frozen=True)
class _Error:
    type: _Label = "an error"
    message: Annotated[str, truncate_to(contract.MESSAGE_CHARS)] = ""
    traceback: Annotated[str, truncate_to(-contract.TRACEBACK_CHARS)] | None = None
    code: ExitCode | None = None


@dataclasses.dataclass(frozen=True)
class _Refusal:
    message: Annotated[str, truncate_to(contract.MESSAGE_CHARS)] = ""
    code: ExitCode = contract.BAD_SPEC


@dataclasses.dataclass(frozen=True)
class _Stopped:
    step: NonNegativeInt = 0
    saved: bool = False
    note: Annotated[str, truncate_to(contract.MESSAGE_CHARS)] = ""


@dataclasses.dataclass(frozen=True)
class _ChildEnd:
    pid: NonNegativeInt
    code: ExitStatus


def _check_metrics_size(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    if len(json.dumps(metrics)) > MAX_METRICS_BYTES:
        raise MalformedError(f"an object of at most {MAX_METRICS_BYTES} bytes", metrics)
    return metrics


def _check_profile_state(profile: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(profile.get("state"), str):
        raise MalformedError("an object with a string `state`", profile)
    return profile


@dataclasses.dataclass(frozen=True)
class _Line:
    """Type of each key of a line."""

    hello: _Label
    python: _Label
    jax: _Label | None
    role: NonNegativeInt
    pid: NonNegativeInt
    pid_namespace: NonNegativeInt | None
    phase: _Label
    step: NonNegativeInt | None
    total: NonNegativeInt
    committed: NonNegativeInt
    found: NonNegativeInt
    restored: NonNegativeInt
    joining: bool
    joined: bool
    metrics: Annotated[Mapping[str, Any], _check_metrics_size]
    of: NonNegativeInt
    own: NonNegativeInt
    stopped: _Stopped
    profile: Annotated[Mapping[str, Any], _check_profile_state]
    note: str
    error: _Error
    fatal: bool
    handled: bool
    child: _ChildEnd
    stops: NonNegativeInt
    refusal: _Refusal
    atexit: Any
    waits: bool
    code: ExitCode
    processes: NonNegativeInt
    unstartable: str


_FIELD_READERS = codec.field_readers(_Line)
