"""The verdict on an attempt or a run: its end as typed facts, and as a sentence for people. Pure.

launcher/agent/gang/root_cause reaches the verdict. It contains a Failure, whose `kind` is a row of
KINDS with the exit code and the sentence of this kind of end. The sentence is rendered from the
other facts of the failure and the texts of CATALOG. No decision may depend on these texts; a test
replaces them to ensure this.
"""

from __future__ import annotations

import dataclasses
import enum
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from jaxlaunch import contract
from jaxlaunch.contract import Requeue
from jaxlaunch.records import codec
from jaxlaunch.records.codec import Cause, ExitCode, NonNegativeInt, Seconds, Sparse, max_length

# Signals for errors of the program itself. Others have a cause outside of it: the kernel, for
# example, sends SIGKILL when memory runs out.
FAULT_SIGNALS = frozenset(
    {signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV}
    | {signal.SIGSYS}
)
# SIGRTMAX of Linux.
MAX_SIGNAL = 64
# The largest number of hosts or ranks in a Numbers record.
MAX_NUMBERS = 20
_T = TypeVar("_T")


class FailureKind(str, enum.Enum):
    """Kind of the end of an attempt or a run."""

    # `detail` is the only fact, or the kind is from a newer version of jaxlaunch.
    OTHER = "other"
    DONE = "done"

    # Ends of a process.

    # The program raised `exception`.
    EXCEPTION = "exception"
    # The trainer ended with the sentence in `exception`.
    TRAINER_ERROR = "trainer_error"
    EXIT_CODE = "exit_code"
    # The program ended with `exit_code`, which asks for another run.
    REQUEUED = "requeued"
    SIGNAL = "signal"
    OOM_KILLED = "oom_killed"
    # The program was killed or called os._exit, and its wrapper does not pass on its exit code.
    PROGRAM_GONE = "program_gone"
    # The command could not be started.
    NOT_STARTED = "not_started"
    # The program ended with exit code 0 before the trainer began.
    NO_TRAINER = "no_trainer"
    # The program ended with exit code 0 before the last step.
    ENDED_EARLY = "ended_early"
    # The program ended while other ranks, which need it, were still running.
    LEFT_EARLY = "left_early"
    # Another rank waited in JAX's shutdown barrier for longer than the program's own timeout.
    SHUTDOWN_TIMEOUT = "shutdown_timeout"
    # The program was ended inside a pipeline, whose last command ended with exit code 0.
    UNFINISHED = "unfinished"
    # `count` ranks used JAX without having joined the others.
    NEVER_JOINED = "never_joined"
    HANG = "hang"
    # JAX's coordination service missed heartbeats.
    HEARTBEATS_MISSED = "heartbeats_missed"
    # The ranks of one gang have different versions of JAX.
    MIXED_VERSIONS = "mixed_versions"

    # Ends of a host or its agent.

    HOST_LOST = "host_lost"
    # Host 0 waited in vain for `rendezvous.hosts`.
    NOT_JOINED = "not_joined"
    # A host cannot reach host 0, or is not admitted.
    CANNOT_JOIN = "cannot_join"
    # Host 0 refuses a host, or a host cannot begin.
    REFUSED = "refused"
    # The agent of host 0 ended with `exit_code` or `signal`, and wrote nothing.
    AGENT_ENDED = "agent_ended"
    # The agent of host 0 and every other agent were killed.
    AGENTS_KILLED = "agents_killed"
    # The agents ended with the `exit_code` of the gang, and could not write more.
    UNRECORDED = "unrecorded"
    # Launcher and agents were killed together.
    RUN_KILLED = "run_killed"

    # Ends of a run.

    # The attempt was stopped for `stop.reason`.
    STOPPED = "stopped"
    # Two attempts failed in the same way, without a newly committed step. `cause` is the first
    # failure.
    REPEATED = "repeated"
    # No new step was committed in `count` sets of pods. `cause` is the first error.
    NO_PROGRESS = "no_progress"
    # The run was preempted `count` times in a row, and `limit` are allowed. `cause` is the last
    # preemption.
    PREEMPTED_TOO_OFTEN = "preempted_too_often"

    @classmethod
    def _missing_(cls, value: object) -> FailureKind | None:
        return cls.OTHER if isinstance(value, str) else None


class StopReason(str, enum.Enum):
    """Reason for which an attempt was stopped."""

    # A signal from outside, as for a preemption, a drained node or `launcher stop`.
    OUTSIDE = "outside"
    # A user stopped a run on this machine.
    USER = "user"
    # A user pressed Ctrl-C.
    INTERRUPT = "interrupt"
    # The run continues with more hosts.
    GROWTH = "growth"
    DEADLINE = "deadline"
    # The pod of a host exceeded its limit of disk space on its node.
    DISK_EXCEEDED = "disk_exceeded"


class StopOutcome(str, enum.Enum):
    """Result of a stop."""

    SAVED = "saved"
    NOT_SAVED = "not_saved"
    NOT_REPORTED = "not_reported"
    # The stop came before every host had joined.
    NOT_JOINED = "not_joined"
    # The attempt had already ended, for `cause`.
    BETWEEN_ATTEMPTS = "between_attempts"
    # The host was a spare.
    NO_RANK = "no_rank"


# --- facts ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Numbers(Sparse):
    """A list of hosts or ranks, cut to MAX_NUMBERS.

    It is cut because all agents receive the verdict, and a gang may have 80,000 ranks.
    """

    first: tuple[NonNegativeInt, ...] = ()
    count: NonNegativeInt = 0

    @classmethod
    def from_sequence(cls, numbers: Sequence[int]) -> Numbers:
        """Return the record for a list of any length."""
        return cls(tuple(numbers[:MAX_NUMBERS]), len(numbers))


@dataclasses.dataclass(frozen=True)
class ExceptionFacts(Sparse):
    """An exception of a program."""

    type: str = ""
    # The first line, or the complete text without line breaks for an error of the trainer.
    message: str = ""
    # The error number of the operating system, as in "[Errno 28]".
    errno: NonNegativeInt | None = None
    # The exception is about a connection or another rank, so the next attempt may succeed.
    may_pass: bool = False
    is_storage_full: bool = False


@dataclasses.dataclass(frozen=True)
class LostHost(Sparse):
    """A host whose agent no longer answers."""

    host: NonNegativeInt
    # The end of the connection. Empty if the agent was killed before it could write anything.
    reason: str = ""
    first_rank: NonNegativeInt | None = None
    last_rank: NonNegativeInt | None = None
    # The signal that ended the agent, which only a launcher on the same machine sees.
    agent_signal: NonNegativeInt | None = None


@dataclasses.dataclass(frozen=True)
class RendezvousFacts(Sparse):
    """A wait for hosts."""

    # The hosts that did not join.
    hosts: Numbers = Numbers()
    # None if the wait had no limit.
    waited_s: Seconds | None = None
    # The key of the timeout in job.yaml.
    timeout: str = ""
    # A line for each host that was refused.
    refused: Annotated[tuple[str, ...], max_length(50)] = ()
    # The address of host 0.
    address: str = ""


@dataclasses.dataclass(frozen=True)
class HangFacts(Sparse):
    """A timeout that passed, and the state of the ranks at that time."""

    # The key of the timeout: the phase, or contract.FIRST_STEP. Empty if the other ranks failed
    # before a timeout passed.
    phase: str = ""
    limit_s: Seconds = 0.0
    elapsed_s: Seconds = 0.0
    # The rank whose timeout passed first.
    first_rank: NonNegativeInt = 0
    # The places of the ranks, from their stacks.
    stacks: str = ""
    waiting: Numbers = Numbers()
    # The ranks for which the others wait.
    late: Numbers = Numbers()
    # The answer of NCCL's RAS.
    nccl: str = ""
    # The ranks whose program had ended without an error.
    ended: Numbers = Numbers()
    # The place of the rank for which the others wait, such as "in step in read (tasks.py:12)".
    place: str = ""


@dataclasses.dataclass(frozen=True)
class DiskExcess(Sparse):
    """Ephemeral storage of a host that exceeds a limit."""

    host: NonNegativeInt
    used_bytes: NonNegativeInt
    limit_bytes: NonNegativeInt
    # The volume with this limit. Empty if the limit is for the whole pod.
    folder: Annotated[str, max_length(4_000)] = ""


@dataclasses.dataclass(frozen=True)
class StopFacts(Sparse):
    """Reason and outcome of a stop."""

    reason: StopReason
    outcome: StopOutcome | None = None
    deadline_s: Seconds | None = None
    excess: DiskExcess | None = None
    # For GROWTH, the number of hosts with which the run continues, and the number before.
    hosts: NonNegativeInt | None = None
    hosts_before: NonNegativeInt | None = None
    # The step that was saved because of the stop.
    saved_step: NonNegativeInt | None = None
    # The newest step on storage, if the stop saved none.
    committed_step: NonNegativeInt | None = None
    # A step that was on storage and that somebody has deleted.
    deleted_step: NonNegativeInt | None = None
    # The ranks that delayed the stop, by phase.
    late: Mapping[str, Numbers] = dataclasses.field(default_factory=dict)
    # A second signal ended the stop.
    was_killed: bool = False

    @property
    def verdict_code(self) -> int:
        """The exit code of a stop for this reason."""
        codes = {StopReason.DEADLINE: contract.DEADLINE, StopReason.DISK_EXCEEDED: contract.STORAGE}
        return codes.get(self.reason, contract.PREEMPTED)


@dataclasses.dataclass(frozen=True)
class Failure(Sparse):
    """The facts about the end of an attempt or a run. Only the fields that apply are set."""

    kind: FailureKind
    rank: NonNegativeInt | None = None
    # The phase of the rank. Empty in a step, or if not known.
    phase: str = ""
    # The step of the rank, if it has reported one in this attempt.
    step: NonNegativeInt | None = None
    exception: ExceptionFacts | None = None
    exit_code: NonNegativeInt | None = None
    requeue: Requeue | None = None
    signal: NonNegativeInt | None = None
    # The death of another rank may have caused the failure, so the next attempt may succeed.
    may_be_echo: bool = False
    # A text of the operating system, of the program, or of another agent.
    detail: str = ""
    lost_hosts: tuple[LostHost, ...] = ()
    rendezvous: RendezvousFacts | None = None
    hang: HangFacts | None = None
    stop: StopFacts | None = None
    # The versions of JAX by rank.
    versions: Mapping[int, str] = dataclasses.field(default_factory=dict)
    count: NonNegativeInt | None = None
    limit: NonNegativeInt | None = None
    cause: Failure | None = None

    @property
    def verdict_code(self) -> int | None:
        """The exit code of this kind of failure, or None if that of the process counts."""
        if self.signal is not None and self.kind in (FailureKind.SIGNAL, FailureKind.OOM_KILLED):
            return 128 + self.signal
        if self.requeue is not None:
            return self.requeue.code
        return KINDS[self.kind].code if self.stop is None else self.stop.verdict_code

    @property
    def is_storage_full(self) -> bool:
        """Return whether storage was full, or a pod exceeded its limit of storage."""
        return (
            (self.exception is not None and self.exception.is_storage_full)
            or (self.stop is not None and self.stop.reason is StopReason.DISK_EXCEEDED)
            or (self.cause is not None and self.cause.is_storage_full)
        )

    @property
    def may_pass(self) -> bool:
        """Return whether the next attempt may succeed, as after most failures."""
        if self.may_be_echo or self.is_storage_full:
            return True
        if self.kind is FailureKind.EXCEPTION and self.exception is not None:
            return self.exception.may_pass
        signal_number = self.signal
        if signal_number is None and self.kind is FailureKind.EXIT_CODE:
            # A shell whose command was ended by a signal adds its number to 128.
            shell_signal = (self.exit_code or 0) - contract.FIRST_SIGNAL_CODE
            if 0 < shell_signal <= MAX_SIGNAL:
                signal_number = shell_signal
        if signal_number is None:
            return KINDS[self.kind].may_pass
        return signal_number not in FAULT_SIGNALS

    @property
    def errno(self) -> int | None:
        """The error number of the operating system, from this failure or else from its cause."""
        own_errno = None if self.exception is None else self.exception.errno
        return own_errno if own_errno is not None or self.cause is None else self.cause.errno

    @property
    def lost_host_numbers(self) -> set[int]:
        """The hosts that were lost in this failure and in its cause."""
        own_hosts = {lost.host for lost in self.lost_hosts}
        return own_hosts if self.cause is None else own_hosts | self.cause.lost_host_numbers

    def with_lost_hosts(self, change: Callable[[LostHost], LostHost]) -> Failure:
        """Return the failure with `change` applied to each lost host, also in its cause."""
        cause = None if self.cause is None else self.cause.with_lost_hosts(change)
        lost_hosts = tuple(map(change, self.lost_hosts))
        return dataclasses.replace(self, lost_hosts=lost_hosts, cause=cause)

    def with_stop(self, **changes: Any) -> Failure:
        """Return the failure with `changes` to the facts of its stop, if it has any."""
        if self.stop is None:
            return self
        return dataclasses.replace(self, stop=dataclasses.replace(self.stop, **changes))

    def without_refusals(self) -> Failure:
        """Return the failure without the lines about refused hosts, also in its cause."""
        cause = None if self.cause is None else self.cause.without_refusals()
        rendezvous = self.rendezvous
        if rendezvous is not None:
            rendezvous = dataclasses.replace(rendezvous, refused=())
        return dataclasses.replace(self, rendezvous=rendezvous, cause=cause)

    def with_texts(self, change: Callable[[str], str]) -> Failure:
        """Return the failure with `change` applied to each text, also in its cause."""
        return _with_texts(self, change)


def _with_texts(value: _T, change: Callable[[str], str]) -> _T:
    changed: Any = value
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        changed = change(value)
    elif isinstance(value, tuple):
        changed = tuple(_with_texts(item, change) for item in value)
    elif isinstance(value, Mapping):
        changed = {
            _with_texts(key, change): _with_texts(item, change) for key, item in value.items()
        }
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = type(value)(**{name: _with_texts(getattr(value, name), change) for name in names})
    result: _T = changed
    return result


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The end of an attempt or a run, in files, log lines and messages between agents.

    `message` is `failure` as a sentence for people, on which no decision depends.
    """

    cause: Cause
    code: ExitCode
    message: str
    rank: NonNegativeInt | None = None
    host: NonNegativeInt | None = None
    step: NonNegativeInt | None = None
    traceback: str | None = None
    failure: Failure = Failure(FailureKind.OTHER)

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as an object of JSON."""
        fields: dict[str, Any] = codec.to_json(self)
        return fields

    @property
    def is_full_disk(self) -> bool:
        """Return whether the attempt ended because storage is full."""
        return self.code == contract.STORAGE and self.failure.is_storage_full

    @property
    def facts(self) -> Failure:
        """The failure or, if the verdict has no facts, one with the message as its `detail`."""
        if self.failure.kind is FailureKind.OTHER:
            return Failure(FailureKind.OTHER, detail=self.message)
        return self.failure

    def with_failure(self, failure: Failure) -> Verdict:
        """Return the verdict with another failure and the message for it."""
        return dataclasses.replace(self, failure=failure, message=render_failure(failure))

    def truncate(self, chars: int, fact_chars: int | None = None) -> Verdict:
        """Return the verdict with its message cut to `chars`, and each text of its facts too.

        Args:
            chars: The limit. If it is 0, the facts are omitted.
            fact_chars: A lower limit for the texts of the facts.
        """
        limit = chars if fact_chars is None else min(chars, fact_chars)
        failure = Failure(FailureKind.OTHER)
        if chars:
            # The message has the refusals, too. Up to 50 of them would leave no space for it.
            failure = self.failure.without_refusals().with_texts(lambda text: text[:limit])
        return dataclasses.replace(self, message=self.message[:chars], failure=failure)


def verdict_for(failure: Failure, **fields: Any) -> Verdict:
    """Return the verdict for a failure whose kind determines the exit code."""
    assert failure.verdict_code is not None, failure
    return verdict_for_code(failure.verdict_code, failure, **fields)


def verdict_for_code(
    code: int,
    reason: Failure | str,
    *,
    rank: int | None = None,
    host: int | None = None,
    step: int | None = None,
    traceback: str | None = None,
) -> Verdict:
    """Return the verdict for an exit code.

    Args:
        code: The exit code, which determines the cause.
        reason: The failure, or only a sentence if no decision needs more than the code.
        rank: The rank that failed.
        host: The host that failed.
        step: The step of the failure.
        traceback: The traceback of the exception.
    """
    if isinstance(reason, str):
        message, failure = reason, Failure(FailureKind.OTHER)
    else:
        message, failure = render_failure(reason), reason
    cause = contract.outcome_for_code(code).cause
    if failure.stop is not None and failure.stop.reason is StopReason.INTERRUPT:
        cause = contract.INTERRUPTED
    return Verdict(cause, code, message, rank, host, step, traceback, failure)


# --- sentences ------------------------------------------------------------------------------------

# All texts of a verdict, as templates for str.format.
CATALOG: dict[str, str] = {
    # Parts of sentences.
    "host": "host",
    "rank": "rank",
    "one": "{noun} {number}",
    "several": "{noun}s {numbers}",
    "several_cut": "{noun}s {numbers} and {more} more",
    "in_phase": "in {phase}",
    "at_step": "at step {step}",
    "signal": "signal {number}",
    "kill_hint": " (by the kernel because memory ran out, or by a person)",
    "exception": "{type}: {message}",
    "mebibytes": "{count:,.0f} MiB",
    # A process.
    "done_one": "the process finished",
    "done_all": "every process finished",
    "done_aborted": "every process reported that it had finished; after that, {cause}",
    "raised": "rank {rank} raised{place}: {exception}",
    "trainer_error": "rank {rank} ended{place}: {exception}",
    "exit_code": "rank {rank}'s program ended with exit code {code}{place}",
    "requeued": "rank {rank}'s program ended with exit code {code}{place}, which asks for another "
    "run (restarts.codes: {detail})",
    "killed": "rank {rank} was killed by {signal}{place}{hint}",
    "oom_killed": "rank {rank} was OOMKilled{place}: its container reached its memory limit",
    "program_gone": "rank {rank}'s program was killed{place}, or ended itself by os._exit, behind "
    "the process that started it",
    "not_started": "rank {rank} could not be started: {detail}",
    "not_started_code": "rank {rank} could not be started: exit code {code}",
    "no_trainer": "rank {rank}'s program ended with exit code 0 before the trainer began",
    "ended_early": "rank {rank}'s program ended{place}, before its last step",
    "left_early": "rank {rank}'s program ended while other ranks were still running",
    "shutdown_timeout": "rank {rank} had not ended when the shutdown timeout of JAX passed on "
    "another rank, and JAX aborted all of them: leave shutdown_timeout_seconds out of "
    "jax.distributed.initialize(), or raise it",
    "unfinished": "rank {rank}'s Python process ended{place} without its exit handlers, as by a "
    "signal, and its shell with exit code 0: without `set -o pipefail` a pipeline has the exit "
    "code of its last command",
    "never_joined": "the processes never joined: each of {count} ranks used JAX alone "
    "(jax.process_count() was 1). Call jax.distributed.initialize(), without arguments and before "
    "any other use of JAX; if each process shall work alone, set `independent: true` in job.yaml",
    "heartbeats": "rank {rank} stopped sending heartbeats to JAX, which then aborted its peers",
    "versions": "rank {rank} imported jax {version}, rank {first_rank} imported {first_version}",
    # A hang.
    "timeout": "the {phase} timeout of {limit_s:.0f} s passed first on rank {rank}, after "
    "{elapsed_s:.0f} s",
    "hang": "rank {rank} makes no progress{place} ({timeout}): {stacks}",
    "hang_start": "rank {rank} has not come to its first step{place} ({timeout}): {stacks}",
    "hang_report": "; a program reports a step by jaxlaunch.report(step=…)",
    "hang_wait_one": "; {waiting} waits for {late}",
    "hang_wait": "; {waiting} wait for {late}",
    "hang_ended": "; {ended} had finished. A program that works on after its last step first calls "
    'jaxlaunch.report(phase="done")',
    "hang_nccl": "; NCCL: {faults}",
    "stands_still": "rank {rank} makes no progress{place}: its process does not run, and its peers "
    "gave up: {cause}",
    # A host.
    "host_with_rank": "host {host} (rank {first})",
    "host_with_ranks": "host {host} (ranks {first} to {last})",
    "host_alone": "host {host}",
    "lost": "{host} was lost: {reason}{agent}",
    "lost_unseen": "its agent was killed before it could write how the attempt ended",
    "lost_agent": " (its agent was killed by {signal}{hint})",
    "not_joined": "rendezvous: {hosts} did not join within {waited_s:.0f} s ({timeout})",
    "not_joined_refused": "; refused: {refused}",
    "cannot_join": "rendezvous: cannot join host 0 at {address}: {detail}",
    "no_other_leader": "; no other host 0 within {waited_s:.0f} s ({timeout})",
    "agent_killed": "host 0's agent was killed by {signal}{hint}",
    "agent_exited": "host 0's agent ended with exit code {code}",
    "agents_killed": "every agent was killed: host 0's was killed by {signal}{hint}",
    "unrecorded": "{meaning}; the agents could not write more about it into the run folder",
    "run_killed": "launcher and agents were killed together, or the machine was restarted, before "
    "they could write how it ended",
    # A stop.
    "stop_outside": "stopped from outside",
    "stop_user": "stopped by you",
    "stop_interrupt": "stopped by Ctrl-C",
    "stop_growth": "stopped to continue with {hosts} hosts instead of {hosts_before}",
    "stop_deadline": "the job's deadline of {limit_s:g} s passed",
    "stop_disk": "host {host} uses {used} of ephemeral storage, over its limit of {limit} "
    "(resources.ephemeral), for which its pod is evicted",
    "stop_volume": "host {host} has {used} in {folder}, over that volume's limit of {limit} of "
    "ephemeral storage (volumes: ephemeral), for which its pod is evicted",
    "stop_not_joined": "{reason} before every host had joined",
    "stop_no_rank": "{reason}: it held no rank",
    "stop_after": "{reason}, after: {cause}",
    "stop_saved": "{reason}: saved at step {step}",
    "stop_late": "; {late} did not end",
    "stop_not_reported": "{reason}: the program did not report whether it saved",
    "stop_note": "{reason}: {note}",
    "stop_not_saved": "{reason}: not saved",
    "stop_not_saved_cause": "{reason}: not saved: {cause}",
    "stop_not_saved_killed": ", killed",
    "late_in_phase": "{ranks} in {phase}",
    "its_program": "its program",
    "nothing_saved": "; nothing is saved",
    "is_saved": "; step {step} is saved",
    "was_deleted": "; step {step} was saved, and somebody deleted it",
    "was_deleted_by_other": "; step {step} was, and somebody deleted it",
    # A run.
    "repeated": "{cause}; another attempt failed in the same way and saved no new step",
    "repeated_output": "{cause} ({detail}); another attempt failed in the same way and saved no "
    "new step",
    "no_progress": "no newly committed step in {count} sets of pods; the first error was: {cause}",
    "preempted": "no newly committed step in {count} preemptions in a row, of {limit} "
    "(restarts.preempted): {cause}",
    "requeued_often": "no newly committed step in {count} free restarts in a row, of {limit} "
    "(restarts.preempted): {cause}",
    "preempted_unseen": "no newly committed step in at least {count} preemptions in a row, of "
    "{limit} (restarts.preempted): the job keeps no checkpoints",
}


def render_phrase(name: str, **values: Any) -> str:
    """Return a text of CATALOG with these values."""
    return CATALOG[name].format(**values)


def render_failure(failure: Failure) -> str:
    """Return the sentence for people about the end of an attempt or a run."""
    sentence = KINDS[failure.kind].sentence
    text = _render_template(sentence, failure) if isinstance(sentence, str) else sentence(failure)
    rendezvous = failure.rendezvous
    has_own_sentence = failure.kind in (FailureKind.NOT_JOINED, FailureKind.CANNOT_JOIN)
    if rendezvous is not None and not has_own_sentence:
        waited_s = float("inf") if rendezvous.waited_s is None else rendezvous.waited_s
        text += render_phrase("no_other_leader", waited_s=waited_s, timeout=rendezvous.timeout)
    return text


def _render_template(name: str, failure: Failure, **values: Any) -> str:
    """Return a text of CATALOG with the facts of a failure and with `values`."""
    in_phase = f" {render_phrase('in_phase', phase=failure.phase)}" if failure.phase else ""
    at_step = "" if failure.step is None else f" {render_phrase('at_step', step=failure.step)}"
    return render_phrase(
        name,
        rank=failure.rank,
        place=in_phase + at_step,
        code=failure.exit_code,
        **_signal_values(failure.signal),
        detail=failure.detail,
        count=failure.count,
        limit=failure.limit,
        address="" if failure.rendezvous is None else failure.rendezvous.address,
        meaning=contract.outcome_for_code(failure.exit_code or 0).meaning,
        cause="" if failure.cause is None else render_failure(failure.cause),
        **values,
    )


def render_numbers(numbers: Sequence[int] | Numbers, noun: str = "host") -> str:
    """Return "host 3" or "hosts 2, 5"; a list longer than MAX_NUMBERS is cut."""
    record = numbers if isinstance(numbers, Numbers) else Numbers.from_sequence(numbers)
    word = CATALOG[noun]
    if record.count == 1:
        return render_phrase("one", noun=word, number=record.first[0])
    listed, more = ", ".join(map(str, record.first)), record.count - len(record.first)
    return render_phrase("several_cut" if more else "several", noun=word, numbers=listed, more=more)


def render_timeout(hang: HangFacts) -> str:
    """Return the phrase for the timeout that passed first."""
    times = {"limit_s": hang.limit_s, "elapsed_s": hang.elapsed_s}
    return render_phrase("timeout", phase=hang.phase, rank=hang.first_rank, **times)


def render_excess(excess: DiskExcess) -> str:
    """Return the sentence for ephemeral storage that exceeds its limit."""
    used = render_phrase("mebibytes", count=excess.used_bytes / 2**20)
    limit = render_phrase("mebibytes", count=excess.limit_bytes / 2**20)
    name = "stop_volume" if excess.folder else "stop_disk"
    return render_phrase(name, host=excess.host, used=used, limit=limit, folder=excess.folder)


def render_stop_reason(stop: StopFacts) -> str:
    """Return the phrase for the reason of a stop."""
    if stop.reason is StopReason.DEADLINE:
        return render_phrase("stop_deadline", limit_s=stop.deadline_s or 0.0)
    if stop.reason is StopReason.DISK_EXCEEDED and stop.excess is not None:
        return render_excess(stop.excess)
    if stop.reason is StopReason.GROWTH:
        return render_phrase("stop_growth", hosts=stop.hosts, hosts_before=stop.hosts_before)
    names = {StopReason.USER: "stop_user", StopReason.INTERRUPT: "stop_interrupt"}
    return render_phrase(names.get(stop.reason, "stop_outside"))


def _signal_values(number: int | None) -> dict[str, str]:
    """Return the name of a signal, and a hint for SIGKILL, as values for a template."""
    try:
        name = signal.Signals(number or 0).name
    except ValueError:
        name = render_phrase("signal", number=number)
    return {"signal": name, "hint": CATALOG["kill_hint"] if number == signal.SIGKILL else ""}


def _render_exception(failure: Failure) -> str:
    facts = failure.exception or ExceptionFacts()
    if failure.kind is FailureKind.TRAINER_ERROR:
        return _render_template("trainer_error", failure, exception=facts.message or facts.type)
    text = facts.type
    if facts.message:
        text = render_phrase("exception", type=facts.type, message=facts.message)
    return _render_template("raised", failure, exception=text)


def _render_done(failure: Failure) -> str:
    if failure.cause is not None:
        return _render_template("done_aborted", failure)
    return CATALOG["done_one" if failure.count == 1 else "done_all"]


def _render_versions(failure: Failure) -> str:
    (first_rank, first_version), (rank, version) = sorted(failure.versions.items())[:2]
    return render_phrase(
        "versions", rank=rank, version=version, first_rank=first_rank, first_version=first_version
    )


def _render_hang(failure: Failure) -> str:
    hang = failure.hang or HangFacts()
    if not hang.phase:
        return _render_template("stands_still", failure)
    name = "hang_start" if hang.phase == contract.FIRST_STEP else "hang"
    text = _render_template(name, failure, timeout=render_timeout(hang), stacks=hang.stacks)
    if hang.waiting.count:
        name = "hang_wait_one" if hang.waiting.count == 1 else "hang_wait"
        waiting, late = (render_numbers(ranks, "rank") for ranks in (hang.waiting, hang.late))
        text += render_phrase(name, waiting=waiting, late=late)
    text += render_phrase("hang_nccl", faults=hang.nccl) if hang.nccl else ""
    if hang.ended.count:
        text += render_phrase("hang_ended", ended=render_numbers(hang.ended, "rank"))
    # A program that has reported nothing, not even a phase, may be running well.
    is_silent = hang.phase == contract.FIRST_STEP and not failure.phase
    return text + (CATALOG["hang_report"] if is_silent else "")


def _render_lost_host(lost: LostHost) -> str:
    if lost.first_rank is None:
        host = render_phrase("host_alone", host=lost.host)
    else:
        name = "host_with_rank" if lost.first_rank == lost.last_rank else "host_with_ranks"
        host = render_phrase(name, host=lost.host, first=lost.first_rank, last=lost.last_rank)
    agent, reason = "", lost.reason or CATALOG["lost_unseen"]
    if lost.agent_signal is not None:
        agent = render_phrase("lost_agent", **_signal_values(lost.agent_signal))
    return render_phrase("lost", host=host, reason=reason, agent=agent)


def _render_not_joined(failure: Failure) -> str:
    facts = failure.rendezvous or RendezvousFacts()
    hosts, waited_s = render_numbers(facts.hosts), facts.waited_s or 0.0
    text = render_phrase("not_joined", hosts=hosts, waited_s=waited_s, timeout=facts.timeout)
    if facts.refused:
        text += render_phrase("not_joined_refused", refused="; ".join(facts.refused))
    return text


def _render_stop(failure: Failure) -> str:
    stop = failure.stop or StopFacts(StopReason.OUTSIDE)
    reason = render_stop_reason(stop)
    its_program = CATALOG["its_program"]
    late = ", ".join(
        render_phrase(
            "late_in_phase", ranks=render_numbers(ranks, "rank"), phase=phase or its_program
        )
        for phase, ranks in stop.late.items()
    )
    committed = _render_step("is_saved", stop.committed_step)
    if stop.outcome is StopOutcome.NOT_JOINED:
        return render_phrase("stop_not_joined", reason=reason)
    if stop.outcome is StopOutcome.NO_RANK:
        return render_phrase("stop_no_rank", reason=reason)
    if stop.outcome is StopOutcome.BETWEEN_ATTEMPTS:
        return _render_template("stop_after", failure, reason=reason)
    if stop.outcome is StopOutcome.SAVED:
        lost = "".join(f"; {_render_lost_host(lost)}" for lost in failure.lost_hosts)
        text = render_phrase("stop_saved", reason=reason, step=stop.saved_step) + lost
        return text + (render_phrase("stop_late", late=late) if late else "")
    if stop.outcome is None:
        text = reason + (committed or CATALOG["nothing_saved"])
        return text + _render_step("was_deleted_by_other", stop.deleted_step)
    if stop.outcome is StopOutcome.NOT_REPORTED:
        text = render_phrase("stop_not_reported", reason=reason)
    elif failure.cause is not None:
        text = _render_template("stop_not_saved_cause", failure, reason=reason)
    elif failure.detail:
        text = render_phrase("stop_note", reason=reason, note=failure.detail)
    elif late:
        text = render_phrase("stop_not_saved_cause", reason=reason, cause=late)
    else:
        text = render_phrase("stop_not_saved", reason=reason)
    killed = CATALOG["stop_not_saved_killed"] if stop.was_killed else ""
    return text + killed + committed + _render_step("was_deleted", stop.deleted_step)


def _render_too_often(failure: Failure) -> str:
    if failure.cause is None:
        return _render_template("preempted_unseen", failure)
    is_requeue = failure.cause.kind is FailureKind.REQUEUED
    return _render_template("requeued_often" if is_requeue else "preempted", failure)


def _render_step(name: str, step: int | None) -> str:
    return "" if step is None else render_phrase(name, step=step)


# --- kinds ----------------------------------------------------------------------------------------


class KindRow(NamedTuple):
    """The properties of a kind of end.

    Attributes:
        sentence: Name of the text in CATALOG, or a function that renders the sentence.
        code: Exit code, or None if the process or `stop.reason` determines it.
        may_pass: Whether the next attempt may succeed. For an exception, its facts determine this.
    """

    sentence: str | Callable[[Failure], str]
    code: int | None = None
    may_pass: bool = True


def _choose_by_field(field: str, template: str, empty_template: str) -> Callable[[Failure], str]:
    """Return a function that renders one of two templates, `template` if the field is set."""
    return lambda failure: _render_template(
        template if getattr(failure, field) else empty_template, failure
    )


KINDS: Mapping[FailureKind, KindRow] = {
    FailureKind.OTHER: KindRow(lambda failure: failure.detail),
    FailureKind.DONE: KindRow(_render_done, contract.DONE),
    FailureKind.EXCEPTION: KindRow(_render_exception, may_pass=False),
    FailureKind.TRAINER_ERROR: KindRow(_render_exception),
    FailureKind.EXIT_CODE: KindRow("exit_code", may_pass=False),
    FailureKind.REQUEUED: KindRow("requeued"),
    FailureKind.SIGNAL: KindRow("killed"),
    FailureKind.OOM_KILLED: KindRow("oom_killed"),
    FailureKind.PROGRAM_GONE: KindRow("program_gone", contract.KILLED),
    FailureKind.NOT_STARTED: KindRow(
        _choose_by_field("detail", "not_started", "not_started_code"), contract.STARTUP
    ),
    FailureKind.NO_TRAINER: KindRow("no_trainer", may_pass=False),
    FailureKind.ENDED_EARLY: KindRow("ended_early"),
    FailureKind.LEFT_EARLY: KindRow("left_early"),
    FailureKind.SHUTDOWN_TIMEOUT: KindRow("shutdown_timeout", may_pass=False),
    FailureKind.UNFINISHED: KindRow("unfinished"),
    FailureKind.NEVER_JOINED: KindRow("never_joined", contract.BAD_SPEC, may_pass=False),
    FailureKind.HANG: KindRow(_render_hang, contract.HANG),
    FailureKind.HEARTBEATS_MISSED: KindRow("heartbeats", contract.HANG),
    FailureKind.MIXED_VERSIONS: KindRow(_render_versions, contract.BAD_SPEC),
    FailureKind.HOST_LOST: KindRow(
        lambda failure: "; ".join(map(_render_lost_host, failure.lost_hosts)), contract.LOST
    ),
    FailureKind.NOT_JOINED: KindRow(_render_not_joined, contract.LOST),
    FailureKind.CANNOT_JOIN: KindRow("cannot_join", contract.LOST),
    FailureKind.REFUSED: KindRow(lambda failure: failure.detail),
    FailureKind.AGENT_ENDED: KindRow(
        _choose_by_field("signal", "agent_killed", "agent_exited"), contract.LOST
    ),
    FailureKind.AGENTS_KILLED: KindRow("agents_killed", contract.LOST),
    FailureKind.UNRECORDED: KindRow("unrecorded"),
    FailureKind.RUN_KILLED: KindRow("run_killed", contract.LOST),
    FailureKind.STOPPED: KindRow(_render_stop),
    FailureKind.REPEATED: KindRow(
        _choose_by_field("detail", "repeated_output", "repeated"), contract.STARTUP
    ),
    FailureKind.NO_PROGRESS: KindRow("no_progress", contract.NO_PROGRESS),
    FailureKind.PREEMPTED_TOO_OFTEN: KindRow(_render_too_often, contract.NO_PROGRESS),
}
