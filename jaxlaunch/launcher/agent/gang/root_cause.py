"""Root cause of a failed attempt among many symptoms, and the verdict on it.

When a rank dies, its peers fail within milliseconds, with broken connections and aborts. Each event
therefore has a `Closeness`, which ranks how close it can be to the cause. The closest event
explains the others; of several equally close events, the first to arrive does. An event is believed
only after `settle_s`, because a closer one may still be on its way. This module does no I/O.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.records import codec
from jaxlaunch.records.codec import ExitStatus, NonNegativeInt, Seconds
from jaxlaunch.records.verdict import (
    MAX_SIGNAL,
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

# Phrases in the output of surviving ranks after a peer died (jax 0.10 and 0.11: Gloo, NCCL, gRPC,
# the coordination service). Searching for phrases is faster than a regular expression, and the
# leader may receive 16,000 characters from each of thousands of ranks.
ECHO_PHRASES = (
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
# Status codes as gRPC writes them. The comparison is case-sensitive, because every abort prints
# "Fatal Python error: Aborted".
GRPC_STATUSES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED")
# Gloo prints this at every start, so it is not a fault.
GLOO_BANNER = re.compile(r"\[Gloo\] Rank \d+ is connected to .*")
# A program that aborts because of its own fault prints one of these phrases. JAX prints none of
# them when it aborts a peer.
ASSERTION_PHRASES = (
    "assertion failed",
    "' failed.",
    "assertionerror",
    "check failed",
    "terminate called",
    "panicked at",
)
TRACEBACK_START = "Traceback (most recent call last)"
# If the output has no traceback, this many of its last lines are searched for phrases.
OUTPUT_TAIL_LINES = 5
# Before the first step, an exception counts as an echo only if it is one of JAX_OR_OS_ERRORS or a
# ValueError of Gloo, and its message has a phrase of a peer's death. The user's own exceptions may
# contain the same words.
CONNECTION_ERRORS = frozenset(
    {"ConnectionError", "ConnectionAbortedError", "ConnectionRefusedError", "ConnectionResetError"}
    | {"BrokenPipeError", "TimeoutError"}
)
JAX_OR_OS_ERRORS = CONNECTION_ERRORS | {"JaxRuntimeError", "XlaRuntimeError", "OSError"}
# Names and messages of exceptions of HTTP and storage libraries that a network or a server causes.
# Another attempt may succeed.
TRANSIENT_NAMES = re.compile(
    r"Connect|Timeout|TimedOut|Unavailable|TooManyRequests|MaxRetry|Transport|gaierror|SSLError"
    r"|IncompleteRead|RemoteDisconnected|ServerError|InternalError|RpcError|RetryError"
)
TRANSIENT_TEXT = re.compile(
    r"\b(?:429|50[0234])\b[^.]{0,40}(?:Error|Too Many|Unavailable|Gateway|Timeout)"
    r"|HTTP Error (?:429|50\d)|name resolution|timed out|temporarily unavailable"
    r"|[Uu]ncorrectable ECC",
)
TRANSIENT_ERRNOS = frozenset(
    {errno.EINTR, errno.EAGAIN, errno.EIO, errno.EPIPE, errno.ESTALE, errno.EREMOTEIO}
    | {errno.ETIMEDOUT, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.ENOTCONN}
    | {errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH}
)
GLOO_ERROR = re.compile(r"^Gloo [\w-]+ (failed|timed out)|/gloo/transport/")
# JAX's coordination service prints the rank whose heartbeats it misses, and then aborts the others.
MISSED_HEARTBEAT = re.compile(r"tasks are unhealthy \(stopped sending heartbeats\):\s*(\d+)")
# JAX's own message, which it prints on every rank before it aborts them all.
SHUTDOWN_TIMEOUT = re.compile(r"Barrier timed out\. Id: Shutdown::")
# As the operating system, Python and storage clients write them.
FULL_DISK = re.compile(
    r"no space left on device|disk quota exceeded|\b(ENOSPC|EDQUOT)\b", re.IGNORECASE
)
ERRNO = re.compile(r"\[Errno (\d{1,4})\]")
# Exit codes of a shell for a command that it cannot start.
COMMAND_NOT_FOUND_CODES = (126, 127)
# Largest length of the first line of an exception in a verdict.
MESSAGE_CHARS = 500
# Largest length of a traceback, or of the end of the output, in a verdict.
TAIL_CHARS = 8_000
# The first events of each closeness are kept whole. Texts of later ones are cut to this length.
MAX_UNCUT_EVENTS, TRUNCATED_CHARS = 64, 500


class EventKind(str, enum.Enum):
    """Kind of a symptom.

    Attributes:
        ERROR: A rank reported an exception.
        EXIT: The process of a rank ended.
        LEFT: The program of a rank ended by itself, or waits for the others to end.
        UNFINISHED: The program of a rank was ended, and the last command of its pipeline ended
            with 0.
        LOST: The connection to a host's agent was lost.
        HANG: A phase of a rank exceeded its timeout.
        GONE: The program of a rank was killed, and its wrapper continues or hides the signal.
        UNSTARTABLE: The command could not be started.
    """

    ERROR = "error"
    EXIT = "exit"
    LEFT = "left"
    UNFINISHED = "unfinished"
    LOST = "lost"
    HANG = "hang"
    GONE = "gone"
    UNSTARTABLE = "unstartable"


class Closeness(enum.IntEnum):
    """Distance of an event from the cause; the event with the smallest one explains the others."""

    CAUSE = 0
    HOST = 1
    # JAX aborts the peers of a host that died, and may do so without a message.
    ABORT = 2
    # An exit code without a report. The program of a peer may end with one, too.
    EXIT = 3
    HANG = 4
    # A rank ended without an error. This is not a fault, but it explains echoes of its peers.
    LEFT = 5
    ECHO = 6


# Seconds to wait for something closer to the cause before an event is believed.
SETTLE_S: Mapping[Closeness, float] = {
    Closeness.CAUSE: 0.0,
    # A dying host may still have sent the exception of its rank.
    Closeness.HOST: 0.5,
    # An abort is believed once every other host has sent a message.
    Closeness.ABORT: 0.0,
    # If the connections of a peer broke, the cause is reported at about the same time.
    Closeness.EXIT: 0.5,
    Closeness.LEFT: 1.0,
    # When the leader adds a hang, it has collected the stacks already.
    Closeness.HANG: 0.0,
    Closeness.ECHO: 2.0,
}


@dataclasses.dataclass(frozen=True)
class Event:
    """One symptom, as it reached the leader.

    Attributes:
        kind: Kind of the symptom.
        host: Host that reported it, or that was lost.
        rank: Rank that has the symptom.
        status: Status of the rank.
        exit: Exit code, or minus the signal (EXIT).
        oom: Whether the OOM killer sent the signal (EXIT, GONE).
        error: Type, message, traceback and code of the exception (ERROR).
        text: Last lines of output (EXIT), or why the command cannot be started (UNSTARTABLE).
        lost: The lost host (LOST).
        hang: Facts of the timeout (HANG).
        peers: Failure of the peers that gave up waiting for the rank (HANG).
        unseen_s: Seconds from the last sign of life to the event (HANG, LOST).
        is_alone: Whether the process has no peers whose death it could echo.
        requeue: Kind of restart that the job assigns to the exit code (EXIT, LEFT).
        is_handled: Whether a wrapper of the program may handle the failure (ERROR, EXIT, GONE).
            The event alone is then no fault, but it can explain faults of the peers.
    """

    kind: EventKind
    host: NonNegativeInt
    rank: NonNegativeInt
    status: Status = Status()
    exit: ExitStatus = 0
    oom: bool = False
    error: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    text: str = ""
    lost: LostHost | None = None
    hang: HangFacts | None = None
    peers: Failure | None = None
    unseen_s: Seconds = 0.0
    is_alone: bool = False
    requeue: contract.Requeue | None = None
    is_handled: bool = False

    @classmethod
    def from_wire(cls, host: int, fields: Mapping[str, Any]) -> Event:
        """Read an event from a message of a host. Raises MalformedError if it has another form."""
        return codec.read_record(cls, {**fields, "host": host, "is_alone": False, "requeue": None})

    def with_short_texts(self) -> Event:
        """Return the event with only the end of each text."""
        error = dict(self.error)
        for name, value in error.items():
            if isinstance(value, str):
                error[name] = value[-TRUNCATED_CHARS:]
        return dataclasses.replace(self, text=self.text[-TRUNCATED_CHARS:], error=error)


def describes_peer_death(text: str) -> bool:
    """Return whether a text describes the death of a peer."""
    lowered = text.lower()
    has_phrase = any(phrase in lowered for phrase in ECHO_PHRASES)
    return has_phrase or any(status in text for status in GRPC_STATUSES)


def _describes_assertion(text: str) -> bool:
    lowered = text.lower()
    return any(phrase in lowered for phrase in ASSERTION_PHRASES)


_CLOSENESS_BY_KIND = {
    EventKind.LOST: Closeness.HOST,
    EventKind.HANG: Closeness.HANG,
    EventKind.GONE: Closeness.EXIT,
    EventKind.UNSTARTABLE: Closeness.CAUSE,
    EventKind.UNFINISHED: Closeness.CAUSE,
}


def event_closeness(event: Event) -> Closeness | None:
    """Return how close an event can be to the cause, or None if it is not a fault."""
    if (closeness := _CLOSENESS_BY_KIND.get(event.kind)) is not None:
        return closeness
    if event.kind is EventKind.ERROR:
        return _error_closeness(event)
    if event.requeue is not None:
        return Closeness.CAUSE
    if event.kind is EventKind.LEFT or (event.exit == 0 and not event.status.trainer):
        return Closeness.LEFT
    if dataclasses.replace(event.status, exit=event.exit).has_ended_cleanly:
        return None
    if event.is_alone:
        return Closeness.CAUSE
    # The second code is how a shell reports the signal.
    if event.exit in (-signal.SIGABRT, 128 + signal.SIGABRT):
        text = GLOO_BANNER.sub("", event.text)
        if describes_peer_death(text):
            return Closeness.ECHO
        return Closeness.CAUSE if _describes_assertion(text) else Closeness.ABORT
    return _exit_code_closeness(event) if event.exit > 0 else Closeness.CAUSE


def _exit_code_closeness(event: Event) -> Closeness:
    """Return the closeness of an exit code that no report explains."""
    status = event.status
    if (status.trainer and event.exit in contract.OUTCOMES) or is_signal_exit_code(event.exit):
        return Closeness.CAUSE
    if _has_site_hook(status):
        # The site hook would have reported an exception.
        return Closeness.EXIT
    # The excerpt is the last traceback in the output, or else the last lines.
    excerpt = GLOO_BANNER.sub("", event.text)
    traceback_start = excerpt.rfind(TRACEBACK_START)
    if traceback_start >= 0:
        excerpt = excerpt[traceback_start:]
    else:
        excerpt = "\n".join(excerpt.splitlines()[-OUTPUT_TAIL_LINES:])
    if describes_peer_death(excerpt):
        return Closeness.ECHO
    if excerpt.startswith(TRACEBACK_START) or _describes_assertion(excerpt):
        return Closeness.CAUSE
    return Closeness.EXIT


def shell_exit_code(event: Event) -> int:
    """Return the exit code of a program as a shell reports it.

    A program that is still exiting (LEFT) has announced its code.
    """
    if event.kind is EventKind.LEFT:
        return event.status.leaving_code or 0
    return event.exit if event.exit >= 0 else contract.FIRST_SIGNAL_CODE - event.exit


def is_signal_exit_code(code: int) -> bool:
    """Return whether a shell uses this exit code for a signal. 255 is `exit(-1)`."""
    return 128 < code <= 128 + MAX_SIGNAL


def settle_s(event: Event, closeness: Closeness) -> float:
    """Return how long to wait for something closer to the cause.

    The exit code of a program without our site hook may have any reason, so it settles as slowly as
    an echo.
    """
    if closeness is Closeness.EXIT and not _has_site_hook(event.status):
        closeness = Closeness.ECHO
    return SETTLE_S[closeness]


def _has_site_hook(status: Status) -> bool:
    """Return whether the reports of a program show that it has our hook."""
    return status.trainer or status.phase is not None or status.jax is not None


def _error_closeness(event: Event) -> Closeness | None:
    code = event.error.get("code")
    if event.status.trainer and code == contract.PREEMPTED:
        # The trainer ends with this code after a SIGTERM.
        return None
    if not _is_user_fixable(event) and _is_echo(event):
        return Closeness.ECHO
    message = str(event.error.get("message", ""))
    if code == contract.STORAGE and not event.is_alone and "barrier" in message:
        # All ranks take part in a save, and another may have died.
        return Closeness.ECHO
    return Closeness.CAUSE


def _is_user_fixable(event: Event) -> bool:
    """Return whether an exception has a code of the contract that the user can fix."""
    code = event.error.get("code")
    return isinstance(code, int) and contract.outcome_for_code(code).is_user_fixable


def _is_echo(event: Event) -> bool:
    """Return whether the death of a peer can have caused an exception."""
    error_type, message = event.error.get("type"), str(event.error.get("message", ""))
    if event.is_alone or not describes_peer_death(message):
        return False
    is_connection_error = error_type in JAX_OR_OS_ERRORS or GLOO_ERROR.search(message) is not None
    return event.status.stepped or is_connection_error


class Symptoms:
    """Events of an attempt by closeness, so that the closest one is found quickly."""

    def __init__(self) -> None:
        self._events = {close: list[tuple[float, Event]]() for close in Closeness}
        # Number of events at the front of each list that are withdrawn or explained.
        self._explained_counts = dict.fromkeys(Closeness, 0)
        self._ranks_with_exception: set[int] = set()
        self._count = 0

    def add(self, event: Event, now: float) -> None:
        """Add an event that arrived at `now`, if it has an `event_closeness`."""
        level = event_closeness(event)
        if level is None:
            return
        if event.kind is EventKind.ERROR:
            self._ranks_with_exception.add(event.rank)
        self._count += 1
        level_events = self._events[level]
        if len(level_events) >= MAX_UNCUT_EVENTS:
            event = event.with_short_texts()
        level_events.append((now, event))

    def has_other_than(self, level: Closeness) -> bool:
        """Return whether there is an event of a closeness other than `level`."""
        return any(events for other, events in self._events.items() if other is not level)

    def events_at(self, *levels: Closeness) -> list[Event]:
        """Return all events of these levels of closeness, the nearest first."""
        return [event for level in sorted(levels) for _, event in self._events[level]]

    def find_nearest(
        self,
        is_withdrawn: Callable[[Event], bool] = lambda event: False,
        *,
        excluded_level: Closeness | None = None,
    ) -> tuple[float, Event, Closeness] | None:
        """Return the event that explains the others, with its time of arrival and its closeness.

        Events of the excluded level are skipped, and withdrawn events are dropped for good.
        """
        if not self._count:
            return None
        for level, events in self._events.items():
            index = self._explained_counts[level]
            while index < len(events):
                event = events[index][1]
                has_exception = event.rank in self._ranks_with_exception
                is_explained = event.kind is EventKind.EXIT and has_exception
                if not is_explained and not is_withdrawn(event):
                    break
                index += 1
            self._explained_counts[level] = index
            if level is not excluded_level and index < len(events):
                return *events[index], level
        return None


def find_root_cause(events: Sequence[Event]) -> tuple[Event, Closeness] | None:
    """Return the event that explains the others. They are passed in the order of arrival."""
    symptoms = Symptoms()
    for event in events:
        symptoms.add(event, 0.0)
    nearest = symptoms.find_nearest()
    return None if nearest is None else nearest[1:]


def verdict_for_event(event: Event) -> Verdict:
    """Return the verdict for the event that explains an attempt's end."""
    facts = failure_for_event(event)
    location: dict[str, Any] = {"rank": event.rank, "host": event.host, "step": event.status.step}
    if facts.kind is FailureKind.HEARTBEATS_MISSED:
        location |= {"rank": facts.rank, "host": None}
    kinds_with_output = EventKind.ERROR, EventKind.EXIT, EventKind.LEFT, EventKind.UNFINISHED
    has_output = event.kind in kinds_with_output
    text = event.error.get("traceback") if event.kind is EventKind.ERROR else event.text
    traceback = None
    failures_without_output = (FailureKind.LEFT_EARLY, FailureKind.REQUEUED)
    if text and has_output and facts.kind not in failures_without_output:
        traceback = str(text)[-TAIL_CHARS:]
    return verdict_for_code(_gang_exit_code(event, facts), facts, traceback=traceback, **location)


def failure_for_event(event: Event) -> Failure:
    """Return the failure that an event reports, with its rank, phase and step."""
    facts = _failure_without_rank(event)
    if facts.kind in (FailureKind.HOST_LOST, FailureKind.HEARTBEATS_MISSED):
        return facts
    status = event.status
    phase = "" if status.phase == "step" and status.stepped else status.phase or ""
    step = status.step if status.stepped else None
    return dataclasses.replace(facts, rank=event.rank, phase=phase, step=step)


def _failure_without_rank(event: Event) -> Failure:  # noqa: C901 - a branch per kind of failure
    """Return the failure that an event reports, without its rank, phase and step."""
    if event.kind is EventKind.LOST:
        lost_hosts = () if event.lost is None else (event.lost,)
        return Failure(FailureKind.HOST_LOST, lost_hosts=lost_hosts)
    if event.kind is EventKind.HANG:
        return Failure(FailureKind.HANG, hang=event.hang, cause=event.peers)
    if event.kind is EventKind.UNSTARTABLE:
        return Failure(FailureKind.NOT_STARTED, detail=event.text)
    if event.kind is EventKind.UNFINISHED:
        return Failure(FailureKind.UNFINISHED)
    if event.kind is EventKind.ERROR:
        is_sentence = _is_user_fixable(event)
        kind = FailureKind.TRAINER_ERROR if is_sentence else FailureKind.EXCEPTION
        return Failure(kind, exception=_exception_facts(event.error, is_sentence=is_sentence))
    if event.requeue is not None:
        code, requeue = shell_exit_code(event), event.requeue
        kind = FailureKind.REQUEUED
        return Failure(kind, exit_code=code, requeue=requeue, detail=requeue.value)
    closeness = event_closeness(event)
    if closeness is Closeness.LEFT:
        if event.kind is EventKind.LEFT and (code := shell_exit_code(event)) != contract.DONE:
            return Failure(FailureKind.EXIT_CODE, exit_code=code)
        return Failure(FailureKind.LEFT_EARLY)
    if closeness is Closeness.ECHO and (match := MISSED_HEARTBEAT.search(event.text)):
        return Failure(FailureKind.HEARTBEATS_MISSED, rank=int(match[1]))
    if event.kind is EventKind.GONE and not event.oom:
        return Failure(FailureKind.PROGRAM_GONE)
    if event.oom:
        return Failure(FailureKind.OOM_KILLED, signal=signal.SIGKILL)
    may_be_echo = closeness in (Closeness.ABORT, Closeness.ECHO)
    if event.exit < 0:
        return Failure(FailureKind.SIGNAL, signal=-event.exit, may_be_echo=may_be_echo)
    if event.exit == 0:
        has_begun = event.status.jax is not None or event.status.stepped
        return Failure(FailureKind.ENDED_EARLY if has_begun else FailureKind.NO_TRAINER)
    is_not_found = event.exit in COMMAND_NOT_FOUND_CODES and not _has_site_hook(event.status)
    if event.kind is EventKind.EXIT and is_not_found:
        last_line = event.text.strip().rpartition("\n")[2]
        return Failure(FailureKind.NOT_STARTED, exit_code=event.exit, detail=last_line)
    return Failure(FailureKind.EXIT_CODE, exit_code=event.exit, may_be_echo=may_be_echo)


def _exception_facts(error: Mapping[str, Any], *, is_sentence: bool) -> ExceptionFacts:
    """Return the facts about an exception.

    Args:
        error: Type, message, traceback and code of the exception.
        is_sentence: Whether the trainer wrote the message for people, so that it is kept whole.
    """
    name, text = str(error.get("type", "an error")), str(error.get("message", "")).strip()
    first_line = text.splitlines()[0][:MESSAGE_CHARS] if text else ""
    message = contract.join_lines(text) if is_sentence else first_line
    is_echo = name in JAX_OR_OS_ERRORS and describes_peer_death(message)
    match = ERRNO.search(message)
    number = None if match is None else int(match[1])
    is_network = TRANSIENT_NAMES.search(name) or TRANSIENT_TEXT.search(message)
    return ExceptionFacts(
        name,
        message,
        errno=number,
        may_pass=is_echo
        or name in CONNECTION_ERRORS
        or number in TRANSIENT_ERRNOS
        or is_network is not None
        or GLOO_ERROR.search(message) is not None,
        is_storage_full=FULL_DISK.search(message) is not None,
    )


def verdict_for_lost_leader(
    reason: str,
    rank: int,
    statuses: Sequence[Status],
    committed_step: int | None,
    *,
    is_stopping: bool,
) -> Verdict:
    """Return the verdict of a host that has lost host 0.

    Args:
        reason: Reason for the loss of the connection.
        rank: Rank for the verdict.
        statuses: Statuses of the host's own ranks.
        committed_step: Newest step on storage that host 0 has reported.
        is_stopping: Whether the gang was being stopped.
    """
    host_lost = Failure(FailureKind.HOST_LOST, lost_hosts=(LostHost(0, reason),))
    steps = [status.step for status in statuses if status.step is not None]
    step = min(steps, default=None)
    if not is_stopping:
        return verdict_for_code(contract.LOST, host_lost, rank=rank, host=0, step=step)
    stop_reports = [status.stopped for status in statuses if status.stopped is not None]
    if any(stopped.get("saved") for stopped in stop_reports):
        saved_step = max(int(stopped.get("step") or 0) for stopped in stop_reports)
        stop = StopFacts(StopReason.OUTSIDE, StopOutcome.SAVED, saved_step=saved_step)
        facts = dataclasses.replace(host_lost, kind=FailureKind.STOPPED, stop=stop)
    else:
        committed_steps = (committed_step, *(status.committed for status in statuses))
        step_on_storage = max(filter(None, committed_steps), default=None)
        outcome = StopOutcome.NOT_SAVED
        stop = StopFacts(StopReason.OUTSIDE, outcome, committed_step=step_on_storage)
        facts = Failure(FailureKind.STOPPED, stop=stop, cause=host_lost)
    return verdict_for_code(contract.PREEMPTED, facts, rank=rank, host=0, step=step)


def _gang_exit_code(event: Event, facts: Failure) -> int:
    """Return the gang's exit code: the trainer's if it is one of the contract, else a crash."""
    if facts.verdict_code is not None:
        return facts.verdict_code
    program_code = event.error.get("code") if event.kind is EventKind.ERROR else event.exit
    crash_code = contract.CRASH
    if event.status.phase is not None and not event.status.stepped:
        crash_code = contract.STARTUP
    if event_closeness(event) is Closeness.ECHO and program_code != contract.STORAGE:
        # Another attempt may succeed, because the cause of the broken connection may be temporary.
        return contract.CRASH
    # A program of the user may end with any code, but the code of an exception is the contract's.
    is_contract_code = event.status.trainer or event.kind is EventKind.ERROR
    outcome = contract.OUTCOMES.get(program_code) if isinstance(program_code, int) else None
    if is_contract_code and outcome is not None and outcome.code != contract.DONE:
        return outcome.code
    return crash_code
