"""The typed facts of how an attempt or a run ended. Decisions read them, and `messages` renders the sentence. Pure."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from jaxlaunch import contract
from jaxlaunch.records.checked import Seconds, Sparse, Whole, at_most

MAX_NUMBERS = 20  # of a Numbers that are listed
_T = TypeVar("_T")


class FailureKind(str, enum.Enum):
    """The kind of an end."""

    OTHER = "other"  # only `detail` says what, or a newer version of jaxlaunch knows this kind
    DONE = "done"
    # A process.
    EXCEPTION = "exception"  # the program raised `exception`
    TRAINER_ERROR = "trainer_error"  # the trainer ended with the sentence in `exception`
    EXIT_CODE = "exit_code"
    SIGNAL = "signal"
    OOM_KILLED = "oom_killed"
    NOT_STARTED = "not_started"  # the command could not be started
    NO_TRAINER = "no_trainer"  # exit code 0 before the trainer began
    ENDED_EARLY = "ended_early"  # exit code 0 before the last step
    LEFT_EARLY = "left_early"  # the program ended while other ranks were still running
    HANG = "hang"
    HEARTBEATS_MISSED = "heartbeats_missed"  # by JAX's coordination service
    MIXED_VERSIONS = "mixed_versions"  # of JAX, in one gang
    # A host or its agent.
    HOST_LOST = "host_lost"
    NOT_JOINED = "not_joined"  # host 0 waited in vain for `rendezvous.hosts`
    CANNOT_JOIN = "cannot_join"  # a host cannot reach host 0, or is not admitted
    REFUSED = "refused"  # host 0 does not admit a host, or a host cannot begin
    AGENT_ENDED = "agent_ended"  # host 0's agent left with `exit_code` or `signal`, and wrote nothing
    AGENTS_KILLED = "agents_killed"  # so did every other agent
    UNRECORDED = "unrecorded"  # the agents left with the gang's `exit_code`, and could not write more
    RUN_KILLED = "run_killed"  # launcher and agents were killed together
    # A run.
    STOPPED = "stopped"  # for `stop.reason`
    REPEATED = "repeated"  # `cause` came twice alike, before any progress
    NO_PROGRESS = "no_progress"  # in `count` sets of pods; `cause` was the first error
    PREEMPTED_TOO_OFTEN = "preempted_too_often"  # `count` times in a row, of `limit`; `cause` was the last

    @classmethod
    def _missing_(cls, value: object) -> FailureKind | None:
        return cls.OTHER if isinstance(value, str) else None


class StopReason(str, enum.Enum):
    """Why an attempt was stopped."""

    OUTSIDE = "outside"  # a signal: a preemption, a drained node, `launcher stop`
    USER = "user"  # of a run on this machine, which says no more
    GROWTH = "growth"  # it goes on with more hosts
    DEADLINE = "deadline"
    DISK_EXCEEDED = "disk_exceeded"  # the pod of a host has more on its node's disk than it may


class StopOutcome(str, enum.Enum):
    """What a stop left."""

    SAVED = "saved"
    NOT_SAVED = "not_saved"
    NOT_REPORTED = "not_reported"
    NOT_JOINED = "not_joined"  # it came before every host had joined
    BETWEEN_ATTEMPTS = "between_attempts"  # the attempt had already ended, for `cause`
    NO_RANK = "no_rank"  # the host was a spare


@dataclasses.dataclass(frozen=True)
class Numbers(Sparse):
    """Hosts or ranks: the first MAX_NUMBERS, since all agents receive a verdict, and a gang may have 80,000 ranks."""

    first: tuple[Whole, ...] = ()
    count: Whole = 0

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Numbers:
        """Return the record of these numbers."""
        return cls(tuple(numbers[:MAX_NUMBERS]), len(numbers))


@dataclasses.dataclass(frozen=True)
class ExceptionFacts(Sparse):
    """An exception of a program, in the program's own words."""

    type: str = ""
    message: str = ""  # its first line; of the trainer's own errors all of it, in one line
    errno: Whole | None = None  # of the operating system, as "[Errno 28]" in its message
    may_pass: bool = False  # a connection's or a peer's: the next attempt may not see it
    is_storage_full: bool = False


@dataclasses.dataclass(frozen=True)
class LostHost(Sparse):
    """A host whose agent no longer answers."""

    host: Whole
    reason: str = ""  # how the connection ended; "": its agent was killed before it could write anything
    first_rank: Whole | None = None
    last_rank: Whole | None = None
    agent_signal: Whole | None = None  # that ended its agent, which only the launcher on its machine sees


@dataclasses.dataclass(frozen=True)
class RendezvousFacts(Sparse):
    """A wait for hosts."""

    hosts: Numbers = Numbers()
    waited_s: Seconds | None = None  # None: without end
    timeout: str = ""  # the key of job.yaml
    refused: Annotated[tuple[str, ...], at_most(50)] = ()
    address: str = ""  # of host 0


@dataclasses.dataclass(frozen=True)
class HangFacts(Sparse):
    """A timeout that passed, and what was seen of the ranks then. Without `phase`: peers of the rank gave up first."""

    phase: str = ""
    limit_s: Seconds = 0.0
    elapsed_s: Seconds = 0.0
    first_rank: Whole = 0  # whose timeout passed first
    stacks: str = ""  # where the ranks are, by their stacks
    waiting: Numbers = Numbers()
    late: Numbers = Numbers()  # for which the others wait
    nccl: str = ""  # what NCCL's RAS said


@dataclasses.dataclass(frozen=True)
class DiskExcess(Sparse):
    """Ephemeral storage that a host uses beyond a limit."""

    host: Whole
    used_bytes: Whole
    limit_bytes: Whole
    folder: Annotated[str, at_most(4_000)] = ""  # of a volume with a limit of its own; "": of the whole pod


_STOP_CODES = {
    StopReason.OUTSIDE: contract.PREEMPTED,
    StopReason.USER: contract.PREEMPTED,
    StopReason.GROWTH: contract.PREEMPTED,
    StopReason.DEADLINE: contract.DEADLINE,
    StopReason.DISK_EXCEEDED: contract.STORAGE,
}


@dataclasses.dataclass(frozen=True)
class StopFacts(Sparse):
    """Why an attempt was stopped, and what is left of it."""

    reason: StopReason
    outcome: StopOutcome | None = None
    deadline_s: Seconds | None = None
    excess: DiskExcess | None = None
    hosts: Whole | None = None  # with which it goes on, after GROWTH
    hosts_before: Whole | None = None
    saved_step: Whole | None = None  # by the stop itself
    committed_step: Whole | None = None  # the newest on storage, of a stop that saved nothing
    deleted_step: Whole | None = None  # was on storage, and somebody deleted it
    late: Mapping[str, Numbers] = dataclasses.field(default_factory=dict)  # ranks that held the stop up, by phase
    was_killed: bool = False  # a second signal ended it

    @property
    def code(self) -> int:
        """Return the exit code of what is stopped for this reason."""
        return _STOP_CODES[self.reason]


@dataclasses.dataclass(frozen=True)
class Failure(Sparse):
    """How an attempt or a run ended, as facts. A field is set where it applies."""

    kind: FailureKind
    rank: Whole | None = None
    phase: str = ""  # in which the rank was; "": in a step, or not known
    step: Whole | None = None  # at which the rank was, once it had reported one in this attempt
    exception: ExceptionFacts | None = None
    exit_code: Whole | None = None
    signal: Whole | None = None
    detail: str = ""  # words of the operating system, of the program, or of another agent
    lost_hosts: tuple[LostHost, ...] = ()
    rendezvous: RendezvousFacts | None = None
    hang: HangFacts | None = None
    stop: StopFacts | None = None
    versions: Mapping[int, str] = dataclasses.field(default_factory=dict)  # of JAX, by rank
    count: Whole | None = None
    limit: Whole | None = None
    cause: Failure | None = None

    @property
    def is_storage_full(self) -> bool:
        """Whether storage failed for want of space, or a pod took too much."""
        return (
            (self.exception is not None and self.exception.is_storage_full)
            or (self.stop is not None and self.stop.reason is StopReason.DISK_EXCEEDED)
            or (self.cause is not None and self.cause.is_storage_full)
        )

    @property
    def may_pass(self) -> bool:
        """Whether the next attempt may not see it: all but a program's own exception or exit code."""
        if self.kind is FailureKind.EXCEPTION:
            return self.exception is not None and self.exception.may_pass
        return self.kind not in (FailureKind.EXIT_CODE, FailureKind.NO_TRAINER)

    @property
    def errno(self) -> int | None:
        """Return the number of the operating system's error, of this failure or of what caused it."""
        own = None if self.exception is None else self.exception.errno
        return own if own is not None or self.cause is None else self.cause.errno

    @property
    def lost_host_numbers(self) -> set[int]:
        """Return the hosts that were lost, by this failure or by what caused it."""
        own = {lost.host for lost in self.lost_hosts}
        return own if self.cause is None else own | self.cause.lost_host_numbers

    def with_lost_hosts(self, change: Callable[[LostHost], LostHost]) -> Failure:
        """Return the failure with `change` made to each lost host, also in what caused it."""
        cause = None if self.cause is None else self.cause.with_lost_hosts(change)
        return dataclasses.replace(self, lost_hosts=tuple(map(change, self.lost_hosts)), cause=cause)

    def with_stop(self, **changes: Any) -> Failure:
        """Return the failure with these changes to the facts of its stop."""
        return self if self.stop is None else dataclasses.replace(self, stop=dataclasses.replace(self.stop, **changes))

    def without_refusals(self) -> Failure:
        """Return the failure without the lines on refused hosts, also in what caused it."""
        cause = None if self.cause is None else self.cause.without_refusals()
        wait = None if self.rendezvous is None else dataclasses.replace(self.rendezvous, refused=())
        return dataclasses.replace(self, rendezvous=wait, cause=cause)

    def with_texts(self, change: Callable[[str], str]) -> Failure:
        """Return the failure with `change` made to each of its texts, also in what caused it."""
        return _with_texts(self, change)


def _with_texts(value: _T, change: Callable[[str], str]) -> _T:
    changed: Any = value
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        changed = change(value)
    elif isinstance(value, tuple):
        changed = tuple(_with_texts(item, change) for item in value)
    elif isinstance(value, Mapping):
        changed = {_with_texts(key, change): _with_texts(item, change) for key, item in value.items()}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _with_texts(getattr(value, field.name), change) for field in dataclasses.fields(value)}
        changed = type(value)(**fields)
    result: _T = changed
    return result
