"""The verdict on an attempt: which of many symptoms is the cause. Pure.

When a rank dies its peers fail within milliseconds too, with broken connections and aborts. So events are ranked by how
close they can be to a cause; among equals the first to arrive wins.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.records import checked
from jaxlaunch.records.checked import Exit, Seconds, Whole
from jaxlaunch.records.verdict import (
    ExceptionFacts,
    Failure,
    FailureKind,
    HangFacts,
    LostHost,
    StopFacts,
    StopOutcome,
    StopReason,
    Verdict,
    verdict_for_code,
)

# How a peer's death appears on the surviving ranks (jax 0.10 and 0.11; Gloo, NCCL, gRPC, the coordination service).
# Phrases, not a pattern: when a host dies thousands of ranks send 16,000 characters each.
ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "gloo",
    "nccl",
    "coordination service",
    "coordinationservice",
    "distributed service detected fatal errors",
    "heartbeat",
    "barrier",
)
# As gRPC writes them; "Fatal Python error: Aborted" is said of every abort.
STATUSES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")
BANNER = re.compile(r"\[Gloo\] Rank \d+ is connected to .*")  # printed at every start: no fault
# A program that ended itself says so before it aborts; JAX, when it aborts a peer, does not.
ASSERTED = ("assertion failed", "' failed.", "assertionerror", "check failed", "terminate called", "panicked at")
TRACEBACK = "Traceback (most recent call last)"
LAST_LINES = 5  # of the output of a program without a traceback
# Whose exceptions can be an echo before the first step, when a user's own words may be any: the OS's of a connection,
# and with such words JAX's and any of the OS. What Gloo says comes as a ValueError.
OF_A_CONNECTION = frozenset(
    """ConnectionError ConnectionAbortedError ConnectionRefusedError ConnectionResetError BrokenPipeError
    TimeoutError""".split()
)
OF_JAX_OR_OS = OF_A_CONNECTION | {"JaxRuntimeError", "XlaRuntimeError", "OSError"}
OF_GLOO = re.compile(r"^Gloo [\w-]+ (failed|timed out)|/gloo/transport/")
# The rank that JAX's coordination service misses, in the output of those that it aborts for that.
MISSED = re.compile(r"tasks are unhealthy \(stopped sending heartbeats\):\s*(\d+)")
# As the operating system, Python and storage clients write them.
FULL_DISK = re.compile(r"no space left on device|disk quota exceeded|\b(ENOSPC|EDQUOT)\b", re.IGNORECASE)
ERRNO = re.compile(r"\[Errno (\d{1,4})\]")
LAST_SIGNAL = 64  # of Linux: SIGRTMAX
NOT_FOUND = (126, 127)  # a shell's exit codes of a command that it cannot start
MESSAGE_CHARS = 500  # of the first line of an exception
TAIL_CHARS = 8_000  # of a traceback or a log's end, kept in a verdict
WHOLE, CUT_CHARS = 64, 500  # events of each closeness that are kept whole; characters that are kept of the others


class Kind(str, enum.Enum):
    """Which symptom it is."""

    ERROR = "error"  # a rank reported an exception
    EXIT = "exit"  # a rank's process ended
    LEFT = "left"  # a rank's program ended by itself while others went on
    LOST = "lost"  # the connection to a host's agent is lost
    HANG = "hang"  # a phase of a rank exceeded its timeout
    UNSTARTABLE = "unstartable"  # the command could not be started


class Closeness(enum.IntEnum):
    """How far an event can be from the cause; the smallest wins."""

    CAUSE = 0
    HOST = 1
    ABORT = 2  # JAX aborts the peers of a host that died, and may do so without a message
    EXIT = 3  # an exit code alone: a peer's program that reports nothing ends with one too
    LEFT = 4
    HANG = 5
    ECHO = 6


# Seconds to wait for something closer to the cause before an event is believed.
SETTLE_S: Mapping[Closeness, float] = {
    Closeness.CAUSE: 0.0,
    Closeness.HOST: 0.5,  # a dying host may still have sent the exception of its rank
    Closeness.ABORT: 0.0,  # once every other host has sent a message
    Closeness.EXIT: 0.5,  # what broke the connections of a peer is reported at the same time
    Closeness.LEFT: 1.0,
    Closeness.HANG: 0.0,  # the leader has collected the stacks by then
    Closeness.ECHO: 2.0,
}


@dataclasses.dataclass(frozen=True)
class Event:
    """One symptom, as it reached the leader."""

    kind: Kind
    host: Whole
    rank: Whole
    status: Status = Status()
    exit: Exit = 0  # EXIT: exit code, or minus the signal
    oom: bool = False  # EXIT: the OOM killer sent the signal
    error: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # ERROR: type, message, traceback, code
    text: str = ""  # EXIT: the last lines of output; UNSTARTABLE: why
    lost: LostHost | None = None  # LOST
    hang: HangFacts | None = None  # HANG
    peers: Failure | None = None  # HANG: how the peers failed that gave up waiting for the rank
    unseen_s: Seconds = 0.0  # HANG, LOST: since the last sign of life
    is_alone: bool = False  # the process has no peers, whose death it could echo

    @classmethod
    def from_wire(cls, host: int, fields: Mapping[str, Any]) -> Event:
        """The event in a message of `host`. Raises Malformed when it is not one."""
        return checked.read(cls, {**fields, "host": host, "is_alone": False})

    def cut(self) -> Event:
        """The event without most of its texts."""
        error = {name: value[-CUT_CHARS:] if isinstance(value, str) else value for name, value in self.error.items()}
        return dataclasses.replace(self, text=self.text[-CUT_CHARS:], error=error)


def echoes(text: str) -> bool:
    """Whether a text reads as the death of a peer."""
    lowered = text.lower()
    return any(phrase in lowered for phrase in ECHOES) or any(status in text for status in STATUSES)


def _asserts(text: str) -> bool:
    lowered = text.lower()
    return any(phrase in lowered for phrase in ASSERTED)


def closeness(event: Event) -> Closeness | None:
    """How close `event` can be to the cause; None when it is not a fault."""
    if event.kind is Kind.LOST:
        return Closeness.HOST
    if event.kind is Kind.HANG:
        return Closeness.HANG
    if event.kind is Kind.UNSTARTABLE:
        return Closeness.CAUSE
    if event.kind is Kind.ERROR:
        return _closeness_of_error(event)
    if event.kind is Kind.LEFT or (event.exit == 0 and not event.status.trainer):
        return Closeness.LEFT
    if dataclasses.replace(event.status, exit=event.exit).ended_clean:
        return None
    if event.is_alone:
        return Closeness.CAUSE
    if event.exit in (-signal.SIGABRT, 128 + signal.SIGABRT):  # the second as a shell passes it on
        text = BANNER.sub("", event.text)
        if echoes(text):
            return Closeness.ECHO
        return Closeness.CAUSE if _asserts(text) else Closeness.ABORT
    return _closeness_of_code(event) if event.exit > 0 else Closeness.CAUSE


def _closeness_of_code(event: Event) -> Closeness:
    """Of a program that ended with an exit code and without a report of why."""
    status = event.status
    if (status.trainer and event.exit in contract.OUTCOMES) or is_signals(event.exit):
        return Closeness.CAUSE
    if _reports(status):
        return Closeness.EXIT  # our hook would have reported an exception
    words = _last_words(event.text)
    if echoes(words):
        return Closeness.ECHO
    return Closeness.CAUSE if words.startswith(TRACEBACK) or _asserts(words) else Closeness.EXIT


def is_signals(code: int) -> bool:
    """Whether an exit code is one with which a shell passes a signal on; 255 is `exit(-1)`."""
    return 128 < code <= 128 + LAST_SIGNAL


def settle_s(event: Event, close: Closeness) -> float:
    """Seconds to wait for something closer to the cause. A program that reports nothing may have any reason."""
    return SETTLE_S[Closeness.ECHO if close is Closeness.EXIT and not _reports(event.status) else close]


def _reports(status: Status) -> bool:
    """Whether the program has our hook, as far as what it reported tells."""
    return status.trainer or status.phase is not None or status.jax is not None


def _last_words(text: str) -> str:
    """The last traceback in the output of a program, or its last lines."""
    text = BANNER.sub("", text)
    trace = text.rfind(TRACEBACK)
    return text[trace:] if trace >= 0 else "\n".join(text.splitlines()[-LAST_LINES:])


def _closeness_of_error(event: Event) -> Closeness | None:
    code = event.error.get("code")
    if code == contract.PREEMPTED:
        return None  # so the trainer ends after a SIGTERM
    if code in (None, contract.STARTUP, contract.CRASH) and _is_echo(event):
        return Closeness.ECHO
    if code == contract.STORAGE and not event.is_alone and "barrier" in str(event.error.get("message", "")):
        return Closeness.ECHO  # of a save that all ranks take part in: another may have died
    return Closeness.CAUSE


def _is_echo(event: Event) -> bool:
    """Whether an exception can tell of a peer's death."""
    kind, message = event.error.get("type"), str(event.error.get("message", ""))
    if event.is_alone or not echoes(message):
        return False
    return event.status.stepped or kind in OF_JAX_OR_OS or OF_GLOO.search(message) is not None


class Symptoms:
    """The events of an attempt by closeness: the nearest is found without a look at all of them."""

    def __init__(self) -> None:
        self._events: dict[Closeness, list[tuple[float, Event]]] = {close: [] for close in Closeness}
        self._passed = dict.fromkeys(Closeness, 0)  # at the front of each list: explained by an exception
        self._raised: set[int] = set()
        self._count = 0

    def add(self, event: Event, now: float) -> None:
        """Takes in an event that arrived at `now`; one that is no fault is left out."""
        close = closeness(event)
        if close is None:
            return
        if event.kind is Kind.ERROR:
            self._raised.add(event.rank)
        self._count += 1
        of_its_kind = self._events[close]
        of_its_kind.append((now, event if len(of_its_kind) < WHOLE else event.cut()))

    def any_but(self, close: Closeness) -> bool:
        """Whether there is an event of another closeness."""
        return any(events for other, events in self._events.items() if other is not close)

    def of(self, *close: Closeness) -> list[Event]:
        """All events of these closenesses, the nearest first."""
        return [event for each in sorted(close) for _, event in self._events[each]]

    def nearest(
        self, is_withdrawn: Callable[[Event], bool] = lambda event: False, *, but: Closeness | None = None
    ) -> tuple[float, Event, Closeness] | None:
        """The event that explains the others, when it arrived and how close it is; None when there is none.

        Events of closeness `but` are left out, and for good those that turn out to be withdrawn.
        """
        if not self._count:
            return None
        for close, events in self._events.items():
            at = self._passed[close]
            while at < len(events) and (self._is_explained(events[at][1]) or is_withdrawn(events[at][1])):
                at += 1
            self._passed[close] = at
            if close is not but and at < len(events):
                return *events[at], close
        return None

    def _is_explained(self, event: Event) -> bool:
        """Whether an exception of the same rank explains how it ended."""
        return event.kind is Kind.EXIT and event.rank in self._raised


def decide(events: Sequence[Event]) -> tuple[Event, Closeness] | None:
    """The event that explains the others, or None when nothing went wrong. `events` in order of arrival."""
    symptoms = Symptoms()
    for event in events:
        symptoms.add(event, 0.0)
    found = symptoms.nearest()
    return None if found is None else found[1:]


def verdict_of(event: Event) -> Verdict:
    """Return the verdict for the event that explains an attempt's end."""
    facts = failure_of(event)
    where: dict[str, Any] = {"rank": event.rank, "host": event.host, "step": event.status.step}
    if facts.kind is FailureKind.HEARTBEATS_MISSED:
        where |= {"rank": facts.rank, "host": None}
    trace = _tail(event.error.get("traceback") if event.kind is Kind.ERROR else event.text)
    if event.kind in (Kind.LOST, Kind.HANG, Kind.UNSTARTABLE) or facts.kind is FailureKind.LEFT_EARLY:
        trace = None
    return verdict_for_code(_code(event, facts), facts, traceback=trace, **where)


def failure_of(event: Event) -> Failure:
    """Return what happened to the rank or the host of an event."""
    facts = _kind_facts(event)
    if facts.kind in (FailureKind.HOST_LOST, FailureKind.HEARTBEATS_MISSED):
        return facts
    status = event.status
    phase = "" if status.phase is None or (status.phase == "step" and status.stepped) else status.phase
    return dataclasses.replace(facts, rank=event.rank, phase=phase, step=status.step if status.stepped else None)


def _kind_facts(event: Event) -> Failure:
    """Return the failure without the rank and its place."""
    if event.kind is Kind.LOST:
        return Failure(FailureKind.HOST_LOST, lost_hosts=() if event.lost is None else (event.lost,))
    if event.kind is Kind.HANG:
        return Failure(FailureKind.HANG, hang=event.hang, cause=event.peers)
    if event.kind is Kind.UNSTARTABLE:
        return Failure(FailureKind.NOT_STARTED, detail=event.text)
    if event.kind is Kind.ERROR:
        is_sentence = event.error.get("code") not in _CRASHED
        kind = FailureKind.TRAINER_ERROR if is_sentence else FailureKind.EXCEPTION
        return Failure(kind, exception=_exception_facts(event.error, is_sentence=is_sentence))
    if closeness(event) is Closeness.LEFT:
        return Failure(FailureKind.LEFT_EARLY)
    if closeness(event) is Closeness.ECHO and (missed := MISSED.search(event.text)):
        return Failure(FailureKind.HEARTBEATS_MISSED, rank=int(missed[1]))
    if event.oom:
        return Failure(FailureKind.OOM_KILLED, signal=signal.SIGKILL)
    if event.exit < 0:
        return Failure(FailureKind.SIGNAL, signal=-event.exit)
    if event.exit == 0:
        has_begun = event.status.jax is not None or event.status.stepped
        return Failure(FailureKind.ENDED_EARLY if has_begun else FailureKind.NO_TRAINER)
    if _is_not_found(event):
        last_line = event.text.strip().rpartition("\n")[2]
        return Failure(FailureKind.NOT_STARTED, exit_code=event.exit, detail=last_line)
    return Failure(FailureKind.EXIT_CODE, exit_code=event.exit)


def _exception_facts(error: Mapping[str, Any], *, is_sentence: bool) -> ExceptionFacts:
    """Return an exception as facts; `is_sentence`: its message is the trainer's, for a person."""
    name, text = str(error.get("type", "an error")), str(error.get("message", "")).strip()
    first_line = text.splitlines()[0][:MESSAGE_CHARS] if text else ""
    message = contract.in_one_line(text) if is_sentence else first_line
    is_echo = name in OF_JAX_OR_OS and echoes(message)
    errno = ERRNO.search(message)
    return ExceptionFacts(
        name,
        message,
        errno=None if errno is None else int(errno[1]),
        may_pass=is_echo or name in OF_A_CONNECTION or OF_GLOO.search(message) is not None,
        is_storage_full=FULL_DISK.search(message) is not None,
    )


def of_lost_leader(
    reason: str, rank: int, own: Sequence[Status], committed: int | None, *, is_stopping: bool
) -> Verdict:
    """The verdict of a host that has lost host 0, with `rank`, by the statuses of its `own` ranks.

    `committed` is the newest step on storage that host 0 has told of.
    """
    lost = Failure(FailureKind.HOST_LOST, lost_hosts=(LostHost(0, reason),))
    steps = [status.step for status in own if status.step is not None]
    step = min(steps, default=None)
    if not is_stopping:
        return verdict_for_code(contract.LOST, lost, rank=rank, host=0, step=step)
    reports = [status.stopped for status in own if status.stopped is not None]
    if any(stopped.get("saved") for stopped in reports):
        saved_step = max(int(stopped.get("step") or 0) for stopped in reports)
        stop = StopFacts(StopReason.OUTSIDE, StopOutcome.SAVED, saved_step=saved_step)
        facts = dataclasses.replace(lost, kind=FailureKind.STOPPED, stop=stop)
    else:
        newest = max((step for step in (committed, *(status.committed for status in own)) if step), default=None)
        stop = StopFacts(StopReason.OUTSIDE, StopOutcome.NOT_SAVED, committed_step=newest)
        facts = Failure(FailureKind.STOPPED, stop=stop, cause=lost)
    return verdict_for_code(contract.PREEMPTED, facts, rank=rank, host=0, step=step)


_CODES = {
    FailureKind.HOST_LOST: contract.LOST,
    FailureKind.HANG: contract.HANG,
    FailureKind.HEARTBEATS_MISSED: contract.HANG,
    FailureKind.NOT_STARTED: contract.STARTUP,
}


def _code(event: Event, facts: Failure) -> int:
    """Return the gang's exit code: the trainer's where it is of the contract, 70 or 83 for any other program."""
    if facts.kind in _CODES:
        return _CODES[facts.kind]
    if facts.signal is not None:
        return 128 + facts.signal
    own = event.error.get("code") if event.kind is Kind.ERROR else event.exit
    crash = contract.STARTUP if event.status.phase is not None and not event.status.stepped else contract.CRASH
    if closeness(event) is Closeness.ECHO and own != contract.STORAGE:
        return contract.CRASH  # what broke the connection may be temporary
    if event.status.trainer and isinstance(own, int) and own in contract.OUTCOMES and own != contract.DONE:
        return own
    return crash


def _is_not_found(event: Event) -> bool:
    """Whether a shell did not find its command, or could not execute it: no attempt will."""
    return event.kind is Kind.EXIT and event.exit in NOT_FOUND and not _reports(event.status)


_CRASHED = (None, contract.STARTUP, contract.CRASH)  # the code of an error that is no sentence of the trainer's


def _tail(text: Any) -> str | None:
    return str(text)[-TAIL_CHARS:] or None if text else None
