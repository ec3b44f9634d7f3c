"""Formats for what leaves a pod without storage: log lines, the termination message and an annotation of the JobSet.

This module has the writer and the parser of all three. Pure. Host 0 writes the annotation if the job has a service
account, since other pods have no token. It tells the progress of a job that has no pods any more. Anyone who may change
the JobSet may write the annotation too, so one wrong field invalidates all of it.

A line of host 0's log for programs is `jaxlaunch: KIND JSON`; a program's own lines begin with `[rank] `, so that they
cannot be mistaken for one. Each has `at` (Unix time), `attempt` and `generation`, and by its kind, where there is a
value:

past     at the start of a later generation. First one without `verdict`: `attempts` (how many there were), `ends` (how
         many by cause), `unknown` (why that is not known). Then one for each of the last three: `verdict`,
         `seconds`, `first_committed`, `last_committed`, `ended`; `attempt` and `generation` are then its own.
tail     after these, the end of a rank's log of the generations before: `rank`, `lines`, `host` (that held the rank in
         the last attempt, where that is known). The failing rank comes first;
         ranks beyond jaxlaunch.runs.run_folder.TAIL_BYTES are left out.
beat     `stage` (of STAGES), `members` (hosts that hold ranks, in the order of these: jaxlaunch/records/members),
         `missing` (of these the hosts that have not joined, the first MAX_LISTED), `missing_count`, `refused`,
         `step` (complete on every rank), `phase` (of most ranks) and its start `since`, `phases` ({phase: the first
         MAX_LISTED ranks}), `counts` ({phase: ranks}), `committed`, `committed_at` (none: before these pods),
         `seconds` and `restarts` (by cause), `restart` (seconds by cause until this attempt's first step),
         `preempted` (preemptions in a row without a newly committed step; none: not known), `overdue` (which timeout
         passed), `metrics` (rank 0's newest).
verdict  `verdict`, of jaxlaunch/records/verdict. Another attempt may follow in these pods: the
         next beat has its number.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from jaxlaunch import contract
from jaxlaunch.records import checked
from jaxlaunch.records.checked import Cause, Seconds, Time, Whole, at_most, like, within
from jaxlaunch.records.members import Wire
from jaxlaunch.records.verdict import Verdict

PREFIX = "jaxlaunch: "
STAGES = ("gather", "run", "kill", "leave")
# A beat lists at most this many hosts or ranks.
MAX_LISTED = 16

# --- the bytes of a stream --------------------------------------------------------------------------------------------

# Precedes each further piece of a line that is too long.
CONTINUED = "… "
_MARK = CONTINUED.encode()


class Lines:
    """Splits a stream into lines, and long lines into pieces of at most `limit` bytes plus a mark."""

    def __init__(self, limit: int = contract.MAX_LINE) -> None:
        # The beginning of the line that has not ended yet.
        self._rest = bytearray()
        self._limit = limit
        self._is_continued = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without newlines, and the full pieces of the next line."""
        *ended, self._rest = (self._rest + data).split(b"\n")
        pieces: list[bytes] = []
        for line in ended:
            self._cut(line, pieces)
            pieces.append(self._piece(line))
            self._is_continued = False
        self._cut(self._rest, pieces)
        return pieces

    def end(self) -> list[bytes]:
        """Return the last line, if the stream ended without a newline."""
        rest, self._rest = self._rest, bytearray()
        return [self._piece(rest)] if rest else []

    def _cut(self, line: bytearray, pieces: list[bytes]) -> None:
        """Move full pieces from the beginning of a line to `pieces`."""
        while len(line) > self._limit:
            # A character of UTF-8 must not be split.
            ends = range(self._limit, max(self._limit - 4, 0), -1)
            end = next((end for end in ends if line[end] & 0xC0 != 0x80), self._limit)
            pieces.append(self._piece(line[:end]))
            self._is_continued = True
            del line[:end]

    def _piece(self, text: bytearray) -> bytes:
        return _MARK + text if self._is_continued else bytes(text)


# --- lines for programs -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Line:
    at: Time = 0.0
    attempt: Whole = 0
    generation: Whole = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Past(_Line):
    """Number of attempts that ended in earlier pods or, with `verdict`, the end of one of them."""

    attempts: Whole = 0
    ends: Mapping[str, Whole] = dataclasses.field(default_factory=dict)
    unknown: str | None = None
    verdict: Verdict | None = None
    seconds: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    first_committed: Whole | None = None
    last_committed: Whole | None = None
    ended: Time | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tail(_Line):
    """The end of a rank's log of earlier pods."""

    rank: Whole
    lines: Sequence[str]
    generation: Whole
    host: Whole | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beat(_Line):
    """State and progress of the gang."""

    stage: str | None = None
    missing: Sequence[Whole] = ()
    missing_count: Whole = 0
    members: Wire | None = None
    refused: Sequence[str] = ()
    step: Whole | None = None
    phase: str | None = None
    since: Time | None = None
    phases: Mapping[str, Sequence[Whole]] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, Whole] = dataclasses.field(default_factory=dict)
    committed: Whole | None = None
    committed_at: Time | None = None
    seconds: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    restarts: Mapping[str, Whole] | None = None
    restart: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    preempted: Whole | None = None
    overdue: str | None = None
    metrics: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged(_Line):
    """The verdict on an attempt of these pods."""

    verdict: Verdict
    step: Whole | None = None
    committed: Whole | None = None


Line = Past | Tail | Beat | Judged
KINDS: Mapping[str, type[Line]] = {"past": Past, "tail": Tail, "beat": Beat, "verdict": Judged}
_KIND_OF = {record: kind for kind, record in KINDS.items()}


def line(record: Line) -> str:
    """Return the log line of a record."""
    return f"{PREFIX}{_KIND_OF[type(record)]} {_json(checked.fields_of(record))}"


def parse(text: str) -> Line | None:
    """Return the record in a log line, or None if it is another line, truncated or invalid."""
    if not text.startswith(PREFIX):
        return None
    kind, _, value = text[len(PREFIX) :].partition(" ")
    try:
        return checked.read(KINDS[kind], checked.decode_record(value)) if kind in KINDS else None
    except ValueError:
        return None


def is_for_programs(text: str) -> bool:
    """Return whether a log line is one of ours, complete or truncated, which is not meant for people."""
    return any(text.startswith(f"{PREFIX}{kind} ") for kind in KINDS)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


# --- the termination message ------------------------------------------------------------------------------------------

# In bytes. The kubelet truncates a termination message to 4,096 bytes.
MAX_MESSAGE = 3_900
# A traceback of at most this many characters is not cut.
MAX_CUT = 100
# The version of the termination message.
VERSION = 1
# The default terminationMessagePath of Kubernetes.
TERMINATION_LOG = "/dev/termination-log"


@dataclasses.dataclass(frozen=True)
class Termination:
    """The termination message of an agent."""

    verdict: Verdict
    host: Whole | None = None
    generation: Whole = 0
    attempt: Whole = 0


def termination_message(end: Termination) -> str:
    """Return a termination message as JSON, whose longest texts are cut so that it has MAX_MESSAGE bytes at most."""
    while True:
        text = _json({"jaxlaunch": VERSION, **checked.to_json(end)})
        # The JSON is ASCII, so characters are bytes.
        if len(text) <= MAX_MESSAGE:
            return text
        trace, message = end.verdict.traceback or "", end.verdict.message
        if len(trace) > MAX_CUT:
            # The exception is at the end of the traceback.
            verdict = dataclasses.replace(end.verdict, traceback=trace[len(trace) // 4 :])
        else:
            verdict = end.verdict.cut(len(message) * 3 // 4)
        end = dataclasses.replace(end, verdict=verdict)


def parse_termination_message(message: str | None) -> Termination | None:
    """Return the termination message of an agent, or None for the end of a log or the message of another program."""
    try:
        fields = checked.decode_record(message or "")
        return checked.read(Termination, fields) if fields["jaxlaunch"] == VERSION else None
    except (ValueError, KeyError, TypeError):
        return None


# --- the annotation ---------------------------------------------------------------------------------------------------

MAX_BYTES = 2_000
# The state of the job at the time of an annotation.
WHEN = {
    "stopped": "when it was stopped",
    "queued": "when its queue suspended it",
    "ended": "when it ended",
    "left": "when its pods ended",
    "running": "while it ran",
    "volume": "by the files on its volume",
}
_MAX_VERDICT_CHARS = 600
# The limit for each text among the facts of the verdict.
_MAX_FACT_CHARS = 60
_MAX_CAUSES = 20


@dataclasses.dataclass(frozen=True)
class Recorded:
    """Progress of a job at a time. A field that is None is not known."""

    uid: str
    at: Time
    when: Annotated[str, like("|".join(WHEN))]
    attempt: Whole
    generation: Whole
    # Complete on every rank.
    step: Whole | None = None
    # Newest step whose checkpoint is complete on storage.
    committed: Whole | None = None
    # Share of all seconds that went into useful steps.
    goodput: Annotated[float, within(0, 1)] | None = None
    # Restarts by cause.
    ends: Annotated[Mapping[Cause, Whole], at_most(_MAX_CAUSES)] | None = None
    # Verdict on the newest finished attempt, without its traceback.
    verdict: Verdict | None = None

    @property
    def is_end(self) -> bool:
        """Whether the verdict is on the end of the last pods, rather than on an earlier attempt."""
        return self.when in ("stopped", "ended", "left", "volume")

    def to_json(self) -> str:
        """Return the value of the annotation. The message of the verdict is cut so that the value fits."""
        fields = checked.fields_of(self) | {"at": round(self.at, 1)}
        fields |= {} if self.goodput is None else {"goodput": round(self.goodput, 4)}
        verdict = None if self.verdict is None else shortened(self.verdict)
        while True:
            fields |= {} if verdict is None else {"verdict": checked.fields_of(verdict)}
            text = _json(fields)
            if len(text) <= MAX_BYTES or verdict is None or not verdict.message:
                return text
            verdict = verdict.cut(len(verdict.message) * 3 // 4)

    @classmethod
    def from_json(cls, text: str, uid: str) -> Recorded | None:
        """Return the annotation that `to_json` wrote for this JobSet, or None for anything else."""
        try:
            return cls.read(checked.decode_record(text), uid) if len(text) <= MAX_BYTES else None
        except ValueError:
            return None

    @classmethod
    def read(cls, fields: Any, uid: str) -> Recorded:
        """Return the record with these fields, or raise ValueError if one is invalid or it is of another JobSet."""
        recorded = checked.read(cls, fields)
        if recorded.uid != uid:
            raise ValueError("it is not of this JobSet")
        return (
            recorded if recorded.verdict is None else dataclasses.replace(recorded, verdict=shortened(recorded.verdict))
        )


def shortened(verdict: Verdict) -> Verdict:
    """Return the verdict without its traceback, and with a short message on one line without control characters."""

    def printable(text: str) -> str:
        return "".join(letter if letter.isprintable() else " " for letter in text)

    cut = dataclasses.replace(verdict, traceback=None).cut(_MAX_VERDICT_CHARS, _MAX_FACT_CHARS)
    return dataclasses.replace(cut, message=printable(cut.message), failure=cut.failure.with_texts(printable))
