"""Records of the run folder: summary.json, and the lines of attempts.jsonl. Pure.

Only jaxlaunch/runs/run_folder writes them: in the agent of host 0, in the agent of host 1 if host 0
is lost, and in `launcher run` at the end. The first summary of an attempt also records its start.
If the end of that attempt is not in attempts.jsonl, the attempt died with its agent.
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

# Fields of a summary and of its `of` that a table of runs does not need.
_LONG_FIELDS = {"notes", "stacks", "nccl"} | {"made_of", "restart"}
_OMITTED_IF_EMPTY = {"stacks", "nccl", "starts", "steps"}
# The message of a refused start is cut to this length.
MAX_REFUSAL_CHARS = 1_000
# Fields of `of` that are in the record of the attempt once it has ended.
_DROPPED_AT_END = {"seconds", "unsafe_s", "judged", "restart"}


@dataclasses.dataclass(frozen=True)
class AttemptRecord:
    """A finished attempt, which is a line of attempts.jsonl.

    The committed steps do not include the step that the attempt has restored.
    """

    uid: str
    generation: NonNegativeInt
    attempt: NonNegativeInt
    cause: Cause
    rank: NonNegativeInt | None
    # In this attempt.
    first_committed: NonNegativeInt | None
    last_committed: NonNegativeInt | None
    # By contract.CLOCK_CAUSES, in this attempt only.
    seconds: Mapping[str, Seconds]
    verdict: Verdict
    started: UnixTime
    ended: UnixTime
    # Seconds of the restart that led to the attempt, by contract.RESTART_CAUSES.
    restart: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    # Hosts that held the ranks. None if each host held its own, or if not known.
    members: HostRanges | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        fields: dict[str, Any] = codec.to_json(self)
        return fields


def furthest_step(*steps: int | None) -> int | None:
    """Return the highest known step, or None."""
    return max((step for step in steps if step is not None), default=None)


@dataclasses.dataclass(frozen=True)
class AttemptProgress:
    """Progress of the attempt that a summary describes, at the time of the summary."""

    uid: str
    generation: NonNegativeInt
    attempt: NonNegativeInt
    started: UnixTime
    at: UnixTime
    # By contract.CLOCK_CAUSES, in this attempt only.
    seconds: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    # In this attempt, as is the next field.
    first_committed: NonNegativeInt | None = None
    last_committed: NonNegativeInt | None = None
    # Seconds of steps since the last commit.
    unsafe_s: Seconds = 0.0
    # First step that the attempt trains, or None if it has not reported it yet.
    first_step: NonNegativeInt | None = None
    # Verdict on the attempt, until its end is on record.
    judged: Verdict | None = None
    # Seconds of the restart that led to the attempt, by contract.RESTART_CAUSES.
    restart: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    # Versions by name, and the digest of the code.
    made_of: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RestartRow:
    """A row of summary.json with the seconds by cause until the first step of an attempt."""

    attempt: NonNegativeInt
    # Cause that ended the previous attempt, or None for the first known attempt.
    after: str | None
    # By contract.RESTART_CAUSES.
    seconds: Mapping[str, Seconds]


@dataclasses.dataclass(frozen=True)
class StartRecord:
    """A row of summary.json with the progress of one start of the run."""

    # Number K, from 1.
    start: NonNegativeInt
    uid: str
    started: UnixTime
    ended: UnixTime | None = None
    # None while the start runs, or if it was killed before its agents began.
    code: NonNegativeInt | None = None
    # First step that the start trained.
    first_step: NonNegativeInt | None = None
    # Step at which the start ended.
    last_step: NonNegativeInt | None = None
    # Changed keys of the job since the last start that trained, each with its old and new value.
    changed: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    # Why the start was refused before it trained, or "". It leaves the result of the run as it was.
    refusal: Annotated[str, truncate_to(MAX_REFUSAL_CHARS)] = ""

    @property
    def has_trained(self) -> bool:
        """Return whether the start trained a step, or finished without reporting steps."""
        return self.first_step is not None or (
            self.code == contract.DONE and self.last_step is None
        )

    def with_summary(self, summary: Summary) -> StartRecord:
        """Return the row with the progress in a summary of this start."""
        code = None if summary.verdict is None else summary.verdict.code
        first_step = None if summary.of is None else summary.of.first_step
        has_stepped = (
            first_step is not None and summary.step is not None and summary.step >= first_step
        )
        # Otherwise the start is still restoring a checkpoint of its own.
        is_known = has_stepped or self.first_step is None
        has_trained = has_stepped or self.first_step is not None
        refusal = "" if has_trained else _refusal_message(summary.verdict)
        return dataclasses.replace(
            self,
            refusal=refusal[:MAX_REFUSAL_CHARS],
            ended=time.time() if code is not None else None,
            code=code,
            first_step=first_step if has_stepped and self.first_step is None else self.first_step,
            last_step=(summary.step or None) if is_known else self.last_step,
        )


def _refusal_message(verdict: Verdict | None) -> str:
    """Return the message of a verdict that refuses a start, or ""."""
    if verdict is None:
        return ""
    outcome = contract.outcome_for_code(verdict.code)
    is_refusal = outcome.is_user_fixable and not outcome.restarts
    return verdict.message if is_refusal or verdict.failure.kind is FailureKind.NOT_STARTED else ""


def newest_effective_start(rows: Sequence[StartRecord]) -> StartRecord | None:
    """Return the row of the start that a run's result is of: the newest that was not refused."""
    accepted = [row for row in rows if not row.refusal]
    return next(reversed(accepted or rows), None)


@dataclasses.dataclass(frozen=True)
class Summary(TimedNumbers):
    """The state of a run, as in summary.json."""

    JSON_KEYS = {"committed": "saved"}

    # None while the run continues.
    verdict: Verdict | None
    notes: Sequence[str] = ()
    # By rank, after a hang.
    stacks: Mapping[int, str] = dataclasses.field(default_factory=dict)
    of: AttemptProgress | None = None
    # Starts of the run, newest last. Empty in the summary that a start keeps.
    starts: Sequence[StartRecord] = ()
    # Restarts of the newest attempts, newest last.
    restart_seconds: Sequence[RestartRow] = ()
    # Answer of NCCL's RAS after a hang.
    nccl: str = ""

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
            for name in _DROPPED_AT_END:
                del fields["of"][name]
        return {
            name: value for name, value in fields.items() if value or name not in _OMITTED_IF_EMPTY
        }

    @classmethod
    def row_from_json(cls, fields: Any) -> Summary:
        """Return a summary for a table, with the outer starts and the last restart only.

        Notes, stacks and other long fields are neither included nor checked.

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
    """Return the rows of the newest start and, before it, of the newest that was not refused."""
    for index in range(len(rows) - 1, -1, -1):
        if not (isinstance(rows[index], dict) and rows[index].get("refusal")):
            return [rows[index], *rows[index + 1 :][-1:]]
    return rows[-1:]


@dataclasses.dataclass(frozen=True)
class _Goodput:
    seconds: Mapping[str, Seconds]
