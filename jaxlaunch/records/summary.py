"""Records of the run folder: summary.json, and the lines of attempts.jsonl. Pure.

jaxlaunch/runs/run_folder writes them: in the agent of host 0, in another agent if host 0 is lost,
and in `launcher run` at the end. summary.json has the state of the run and the progress of its
current attempt, and attempts.jsonl has a line for each attempt that ended. An attempt that is in
summary.json but has no line has died with its agents.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from jaxlaunch import contract
from jaxlaunch.records import codec
from jaxlaunch.records.codec import Cause, NonNegativeInt, Seconds, UnixTime, truncate_to
from jaxlaunch.records.members import HostRanges
from jaxlaunch.records.run_numbers import TimedNumbers
from jaxlaunch.records.verdict import FailureKind, Verdict

# Fields of a summary and of its `of` that a table of runs does not show.
_LONG_FIELDS = {"notes", "stacks", "nccl", "memory"} | {"made_of", "restart"}
_OMITTED_IF_EMPTY = {"stacks", "nccl", "starts", "steps", "memory", "held_until"}
# The message of a refused start is cut to this length.
MAX_REFUSAL_CHARS = 1_000
# Fields of `of` that are omitted after the end of the attempt, when its AttemptRecord has them.
_OMITTED_AT_END = {"seconds", "unsafe_s", "judged", "restart"}


@dataclasses.dataclass(frozen=True)
class RankMemory:
    """The most memory of a process and of its host in an attempt.

    With it, a process that ran out of memory is distinguished from one that a person has killed.
    """

    rank: NonNegativeInt
    host: NonNegativeInt
    # Most memory of the process, in GiB.
    process_gib: Seconds
    # Most memory in use on the host or in its container, and the limit. None if they are unknown.
    host_gib: Seconds | None = None
    host_limit_gib: Seconds | None = None

    @property
    def used_share(self) -> float:
        """Share of the limit that was in use on the host, 0 if it is unknown."""
        return (self.host_gib or 0.0) / self.host_limit_gib if self.host_limit_gib else 0.0

    def describe(self) -> str:
        """Return for example `process 7.1 GiB, host 3: 7.95 of 8 GiB (99 %)`."""
        process, use = f"process {self.process_gib:.3g} GiB", self.describe_use()
        return f"{process}, host {self.host}: {use}" if use else process

    def describe_use(self) -> str:
        """Return the memory in use on the host as `7.95 of 8 GiB (99 %)`, or "" if unknown."""
        if self.host_gib is None or not self.host_limit_gib:
            return ""
        used = f"{self.host_gib:.3g} of {self.host_limit_gib:.3g} GiB"
        return f"{used} ({100 * self.used_share:.0f} %)"


@dataclasses.dataclass(frozen=True)
class AttemptRecord:
    """An attempt that has ended, which is a line of attempts.jsonl.

    The committed steps do not include the step from which the attempt resumed.
    """

    uid: str
    generation: NonNegativeInt
    attempt: NonNegativeInt
    cause: Cause
    rank: NonNegativeInt | None
    # The steps that this attempt committed.
    first_committed: NonNegativeInt | None
    last_committed: NonNegativeInt | None
    # The seconds of this attempt by cause (contract.CLOCK_CAUSES).
    seconds: Mapping[str, Seconds]
    verdict: Verdict
    started: UnixTime
    ended: UnixTime
    # The seconds of the restart that led to this attempt by cause (contract.RESTART_CAUSES).
    restart: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    # The hosts that held the ranks. None if each host held the ranks of its index, or if not known.
    members: HostRanges | None = None
    # The memory of the rank that ended the attempt, if it is known.
    memory: RankMemory | None = None
    # The first step that the attempt trained, or None if it ended before that.
    first_step: NonNegativeInt | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the content of the line."""
        fields: dict[str, Any] = codec.to_json(self)
        return fields


def furthest_step(*steps: int | None) -> int | None:
    """Return the largest step that is not None, or None if there is none."""
    return max((step for step in steps if step is not None), default=None)


@dataclasses.dataclass(frozen=True)
class AttemptProgress:
    """The progress of the current attempt, at the time of a summary."""

    uid: str
    generation: NonNegativeInt
    attempt: NonNegativeInt
    started: UnixTime
    # The time of the summary.
    at: UnixTime
    # The seconds of this attempt by cause (contract.CLOCK_CAUSES).
    seconds: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    # The steps that this attempt committed.
    first_committed: NonNegativeInt | None = None
    last_committed: NonNegativeInt | None = None
    # The seconds of steps since the last commit, which a crash would lose.
    unsafe_s: Seconds = 0.0
    # The first step that the attempt trains, or None if it has not reported one yet.
    first_step: NonNegativeInt | None = None
    # The verdict on the attempt, from the decision until its end is in attempts.jsonl.
    judged: Verdict | None = None
    # The seconds of the restart that led to this attempt by cause (contract.RESTART_CAUSES).
    restart: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    # The versions of packages by name, and the digest of the code.
    made_of: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RestartRow:
    """The time from the end of an attempt to the first step of the next one."""

    # The next attempt.
    attempt: NonNegativeInt
    # The cause that ended the previous attempt, or None for the first known attempt.
    after: str | None
    # By cause (contract.RESTART_CAUSES).
    seconds: Mapping[str, Seconds]


@dataclasses.dataclass(frozen=True)
class StartRecord:
    """The progress of one start of a run."""

    # The number of the start, from 1.
    start: NonNegativeInt
    uid: str
    started: UnixTime
    ended: UnixTime | None = None
    # None while the start runs, or if it was killed before its agents began.
    code: NonNegativeInt | None = None
    # The first step that the start trained.
    first_step: NonNegativeInt | None = None
    # The step at which the start ended.
    last_step: NonNegativeInt | None = None
    # The keys of the job that changed since the last start that trained, with old and new value.
    changed: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    # The error that ended the start before it trained, or "". Such a start does not change the
    # result of the run.
    refusal: Annotated[str, truncate_to(MAX_REFUSAL_CHARS)] = ""

    @property
    def has_trained(self) -> bool:
        """Return whether the start trained a step, or finished without reporting steps."""
        return self.first_step is not None or (
            self.code == contract.DONE and self.last_step is None
        )

    def with_summary(self, summary: Summary) -> StartRecord:
        """Return the record with the progress in a summary of this start."""
        code = None if summary.verdict is None else summary.verdict.code
        attempt_first_step = None if summary.of is None else summary.of.first_step
        has_stepped = (
            attempt_first_step is not None
            and summary.step is not None
            and summary.step >= attempt_first_step
        )
        first_step, last_step = self.first_step, summary.step or None
        if first_step is None and has_stepped:
            first_step = attempt_first_step
        elif first_step is not None and not has_stepped:
            # A later attempt is still restoring a checkpoint of this start.
            last_step = self.last_step
        refusal = _refusal_message(summary.verdict) if first_step is None else ""
        return dataclasses.replace(
            self,
            refusal=refusal[:MAX_REFUSAL_CHARS],
            ended=time.time() if code is not None else None,
            code=code,
            first_step=first_step,
            last_step=last_step,
        )


def _refusal_message(verdict: Verdict | None) -> str:
    """Return the message of a verdict that counts as a refusal of the start, or ""."""
    if verdict is None:
        return ""
    outcome = contract.outcome_for_code(verdict.code)
    is_refusal = outcome.is_user_fixable and not outcome.restarts
    return verdict.message if is_refusal or verdict.failure.kind is FailureKind.NOT_STARTED else ""


def newest_effective_start(rows: Sequence[StartRecord]) -> StartRecord | None:
    """Return the start whose result is that of the run: the newest that was not refused.

    If all starts were refused, it is the newest.
    """
    accepted = [row for row in rows if not row.refusal]
    return next(reversed(accepted or rows), None)


@dataclasses.dataclass(frozen=True)
class Summary(TimedNumbers):
    """The state of a run, as in summary.json."""

    JSON_KEYS = {"committed": "saved"}

    # None while the run continues.
    verdict: Verdict | None
    notes: Sequence[str] = ()
    # The stacks by rank, after a hang.
    stacks: Mapping[int, str] = dataclasses.field(default_factory=dict)
    of: AttemptProgress | None = None
    # The starts of the run, newest last. Empty in the file of a single start.
    starts: Sequence[StartRecord] = ()
    # The newest restarts, newest last.
    restart_seconds: Sequence[RestartRow] = ()
    # The answer of NCCL's RAS after a hang.
    nccl: str = ""
    # The memory of the largest rank on each of the fullest hosts, in the newest attempt.
    memory: Sequence[RankMemory] = ()
    # Unix time until which the agents of a failed run stay for a look.
    held_until: UnixTime | None = None

    @property
    def status(self) -> str:
        """Status of the run: running, done, stopped or failed."""
        if self.verdict is None:
            return "running"
        return contract.outcome_for_code(self.verdict.code).status

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        fields: dict[str, Any] = {"status": self.status, **codec.to_json(self)}
        seconds = {cause: round(spent, 3) for cause, spent in fields.pop("seconds").items()}
        fields["goodput"] = {"ratio": self.goodput, "seconds": seconds}
        if self.of is not None and self.verdict is not None:
            for name in _OMITTED_AT_END:
                del fields["of"][name]
        return {
            name: value for name, value in fields.items() if value or name not in _OMITTED_IF_EMPTY
        }

    @classmethod
    def row_from_json(cls, fields: Any) -> Summary:
        """Return the summary with only the fields that a table of runs shows.

        It has the first start and the newest ones, and only the newest restart. Notes, stacks and
        other long fields are neither included nor checked.

        Raises:
            MalformedError: A field is wrong.
        """
        if not isinstance(fields, dict):
            return cls.from_json(fields)
        row = {name: value for name, value in fields.items() if name not in _LONG_FIELDS}
        if isinstance(starts := row.get("starts"), list):
            row["starts"] = [*starts[:1], *_last_starts(starts[1:])]
        if isinstance(restarts := row.get("restart_seconds"), list):
            row["restart_seconds"] = restarts[-1:]
        if isinstance(progress := row.get("of"), dict):
            row["of"] = {
                name: value for name, value in progress.items() if name not in _LONG_FIELDS
            }
        return cls.from_json(row)

    @classmethod
    def from_json(cls, fields: Any) -> Summary:
        """Return the summary that `to_json` wrote, or raise MalformedError if a field is wrong."""
        goodput = codec.read_record(
            _Goodput, fields.get("goodput") if isinstance(fields, dict) else None
        )
        return codec.read_record(cls, {**fields, "goodput": None, "seconds": goodput.seconds})


def _last_starts(rows: Sequence[Any]) -> Sequence[Any]:
    """Return the newest start that was not refused and, if it is another one, the newest start."""
    for index in range(len(rows) - 1, -1, -1):
        if not (isinstance(rows[index], dict) and rows[index].get("refusal")):
            return [rows[index], *rows[index + 1 :][-1:]]
    return rows[-1:]


@dataclasses.dataclass(frozen=True)
class _Goodput:
    seconds: Mapping[str, Seconds]
