"""Formats for what leaves a pod: log lines, the termination message, an annotation. Pure.

This module has the writer and the parser of all three. Pure. Host 0 writes the annotation if the
job has a service account, since other pods have no token. It tells the progress of a job that has
no pods any more. Anyone who may change the JobSet may write the annotation too, so one wrong field
invalidates all of it.

A line of host 0's log for programs is `jaxlaunch: KIND JSON`; a program's own lines begin with
`[rank] `, so that they cannot be mistaken for one. Each has `at` (Unix time), `attempt` and
`generation`, and by its kind, where there is a value:

past     at the start of a later generation. First one without `verdict`: `attempts` (how many there
         were), `ends` (how many by cause), `unknown` (why that is not known). Then one for each of
         the last three: `verdict`, `seconds`, `first_committed`, `last_committed`, `ended`;
         `attempt` and `generation` are then its own.
tail     after these, the end of a rank's log of the generations before: `rank`, `lines`, `host`
         (that held the rank in the last attempt, where that is known). The failing rank comes
         first; ranks beyond jaxlaunch.runs.run_folder.TAIL_BYTES are left out.
beat     `stage` (of STAGES), `members` (hosts that hold ranks, in the order of these:
         jaxlaunch/records/members), `missing` (of these the hosts that have not joined, the first
         MAX_LISTED), `missing_count`, `refused`, `step` (complete on every rank), `phase` (of most
         ranks) and its start `since`, `phases` ({phase: the first MAX_LISTED ranks}), `counts`
         ({phase: ranks}), `committed`, `committed_at` (none: before these pods), `seconds` and
         `restarts` (by cause), `restart` (seconds by cause until this attempt's first step),
         `preempted` (preemptions in a row without a newly committed step; none: not known),
         `overdue` (which timeout passed), `metrics` (rank 0's newest).
verdict  `verdict`, of jaxlaunch/records/verdict. Another attempt may follow in these pods: the
         next beat has its number.
start    an attempt begins. Only agents of `launcher run` write it, each to its stdout: the lines of
         its processes in this attempt follow. They write `verdict` there, too.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from jaxlaunch import contract
from jaxlaunch.records import codec
from jaxlaunch.records.codec import NonNegativeInt, Seconds, UnixTime, matches
from jaxlaunch.records.members import HostRanges
from jaxlaunch.records.run_numbers import RunNumbers, TimedNumbers, select_metrics
from jaxlaunch.records.verdict import Verdict

PREFIX = "jaxlaunch: "
STAGES = ("gather", "run", "kill", "leave")
# A beat lists at most this many hosts or ranks.
MAX_LISTED = 16

# --- the bytes of a stream ------------------------------------------------------------------------

# Precedes each further piece of a line that is too long.
CONTINUATION_MARK = "… "
_MARK = CONTINUATION_MARK.encode()


class LineSplitter:
    """Splits a stream into lines, and long lines into marked pieces of at most `limit` bytes."""

    def __init__(self, limit: int = contract.MAX_LINE) -> None:
        # The beginning of the line that has not ended yet.
        self._rest = bytearray()
        self._limit = limit
        self._is_continued = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, and the full pieces of the next line."""
        *complete_lines, self._rest = (self._rest + data).split(b"\n")
        pieces: list[bytes] = []
        for line in complete_lines:
            self._split_long(line, pieces)
            pieces.append(self._mark_piece(line))
            self._is_continued = False
        self._split_long(self._rest, pieces)
        return pieces

    def finish(self) -> list[bytes]:
        """Return the last line, if the stream ended without a newline."""
        remainder, self._rest = self._rest, bytearray()
        return [self._mark_piece(remainder)] if remainder else []

    def _split_long(self, line: bytearray, pieces: list[bytes]) -> None:
        """Move full pieces from the beginning of a line to `pieces`."""
        while len(line) > self._limit:
            # A character of UTF-8 must not be split.
            ends = range(self._limit, max(self._limit - 4, 0), -1)
            end = next((end for end in ends if line[end] & 0xC0 != 0x80), self._limit)
            pieces.append(self._mark_piece(line[:end]))
            self._is_continued = True
            del line[:end]

    def _mark_piece(self, text: bytearray) -> bytes:
        return _MARK + text if self._is_continued else bytes(text)


# --- lines for programs ---------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Line:
    at: UnixTime = 0.0
    attempt: NonNegativeInt = 0
    generation: NonNegativeInt = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PastLine(_Line):
    """Number of attempts that ended in earlier pods or, with `verdict`, the end of one of them."""

    attempts: NonNegativeInt = 0
    ends: Mapping[str, NonNegativeInt] = dataclasses.field(default_factory=dict)
    unknown: str | None = None
    verdict: Verdict | None = None
    seconds: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    first_committed: NonNegativeInt | None = None
    last_committed: NonNegativeInt | None = None
    ended: UnixTime | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TailLine(_Line):
    """The end of a rank's log of earlier pods."""

    rank: NonNegativeInt
    lines: Sequence[str]
    generation: NonNegativeInt
    host: NonNegativeInt | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BeatLine(TimedNumbers, _Line):
    """State and progress of the gang."""

    stage: str | None = None
    missing: Sequence[NonNegativeInt] = ()
    missing_count: NonNegativeInt = 0
    members: HostRanges | None = None
    refused: Sequence[str] = ()
    phase: str | None = None
    since: UnixTime | None = None
    phases: Mapping[str, Sequence[NonNegativeInt]] = dataclasses.field(default_factory=dict)
    counts: Mapping[str, NonNegativeInt] = dataclasses.field(default_factory=dict)
    committed_at: UnixTime | None = None
    restart: Mapping[str, Seconds] = dataclasses.field(default_factory=dict)
    preempted: NonNegativeInt | None = None
    overdue: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerdictLine(_Line):
    """The verdict on an attempt of these pods."""

    verdict: Verdict
    step: NonNegativeInt | None = None
    committed: NonNegativeInt | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartLine(_Line):
    """Start of an attempt on one host."""


Line = PastLine | TailLine | BeatLine | VerdictLine | StartLine
KINDS: Mapping[str, type[Line]] = dict(
    past=PastLine, tail=TailLine, beat=BeatLine, verdict=VerdictLine, start=StartLine
)
_KIND_OF = {record: kind for kind, record in KINDS.items()}


def format_line(record: Line) -> str:
    """Return the log line of a record."""
    return f"{PREFIX}{_KIND_OF[type(record)]} {_dump_compact(codec.present_fields(record))}"


def parse_line(text: str) -> Line | None:
    """Return the record in a log line, or None if it is another line, truncated or invalid."""
    if not text.startswith(PREFIX):
        return None
    kind, _, value = text[len(PREFIX) :].partition(" ")
    try:
        return codec.read_record(KINDS[kind], codec.parse_record(value)) if kind in KINDS else None
    except ValueError:
        return None


def is_for_programs(text: str) -> bool:
    """Return whether a log line is one of ours, complete or truncated."""
    return any(text.startswith(f"{PREFIX}{kind} ") for kind in KINDS)


def _dump_compact(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


# --- the termination message ----------------------------------------------------------------------

# In bytes. The kubelet truncates a termination message to 4,096 bytes.
MAX_MESSAGE_BYTES = 3_900
# A traceback of at most this many characters is not cut.
MIN_TRACEBACK_CHARS = 100
# The version of the termination message.
VERSION = 1
# The default terminationMessagePath of Kubernetes.
TERMINATION_LOG = "/dev/termination-log"


@dataclasses.dataclass(frozen=True)
class TerminationMessage:
    """The termination message of an agent."""

    verdict: Verdict
    host: NonNegativeInt | None = None
    generation: NonNegativeInt = 0
    attempt: NonNegativeInt = 0


def format_termination_message(end: TerminationMessage) -> str:
    """Return a termination message as JSON of at most MAX_MESSAGE_BYTES."""
    while True:
        text = _dump_compact({"jaxlaunch": VERSION, **codec.to_json(end)})
        # The JSON is ASCII, so characters are bytes.
        if len(text) <= MAX_MESSAGE_BYTES:
            return text
        trace, message = end.verdict.traceback or "", end.verdict.message
        if len(trace) > MIN_TRACEBACK_CHARS:
            # The exception is at the end of the traceback.
            verdict = dataclasses.replace(end.verdict, traceback=trace[len(trace) // 4 :])
        else:
            verdict = end.verdict.truncate(len(message) * 3 // 4)
        end = dataclasses.replace(end, verdict=verdict)


def parse_termination_message(message: str | None) -> TerminationMessage | None:
    """Return the termination message of an agent, or None for any other text."""
    try:
        fields = codec.parse_record(message or "")
        is_ours = fields["jaxlaunch"] == VERSION
        return codec.read_record(TerminationMessage, fields) if is_ours else None
    except (ValueError, KeyError, TypeError):
        return None


# --- the annotation -------------------------------------------------------------------------------

MAX_ANNOTATION_BYTES = 2_000
# The state of the job at the time of an annotation.
ANNOTATION_MOMENTS = {
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
# A longer message of the verdict is cut before the metrics are left out.
_MIN_MESSAGE_CHARS = 100


@dataclasses.dataclass(frozen=True)
class ProgressAnnotation(RunNumbers):
    """Progress of a job at a time. Its verdict and its metrics are shortened."""

    JSON_KEYS = {"restarts": "ends"}

    uid: str
    at: UnixTime
    when: Annotated[str, matches("|".join(ANNOTATION_MOMENTS))]
    attempt: NonNegativeInt
    generation: NonNegativeInt
    # Verdict on the newest finished attempt, without its traceback.
    verdict: Verdict | None = None

    def __post_init__(self) -> None:
        if self.verdict is not None:
            object.__setattr__(self, "verdict", shorten_verdict(self.verdict))
        if self.metrics is not None:
            object.__setattr__(self, "metrics", select_metrics(self.metrics))

    @property
    def is_end(self) -> bool:
        """Return whether the verdict is on the end of the last pods."""
        return self.when in ("stopped", "ended", "left", "volume")

    def to_json(self) -> str:
        """Return the value of the annotation, with verdict and metrics cut to fit."""
        fields, verdict = codec.present_fields(self), self.verdict
        fields["at"] = round(self.at, 1)
        if self.goodput is not None:
            fields["goodput"] = round(self.goodput, 4)
        while True:
            if verdict is not None:
                fields["verdict"] = codec.present_fields(verdict)
            text = _dump_compact(fields)
            message = "" if verdict is None else verdict.message
            if len(text) <= MAX_ANNOTATION_BYTES or not (message or "metrics" in fields):
                return text
            if verdict is None or ("metrics" in fields and len(message) <= _MIN_MESSAGE_CHARS):
                del fields["metrics"]
            else:
                verdict = verdict.truncate(len(message) * 3 // 4)

    @classmethod
    def from_json(cls, text: str, uid: str) -> ProgressAnnotation | None:
        """Return the annotation that `to_json` wrote for this JobSet, or None for anything else."""
        try:
            annotation = codec.read_record(cls, codec.parse_record(text))
        except ValueError:
            return None
        return annotation if annotation.uid == uid and len(text) <= MAX_ANNOTATION_BYTES else None


def shorten_verdict(verdict: Verdict) -> Verdict:
    """Return the verdict without traceback, with a short message of printable characters."""

    def replace_unprintable(text: str) -> str:
        return "".join(letter if letter.isprintable() else " " for letter in text)

    short = dataclasses.replace(verdict, traceback=None)
    short = short.truncate(_MAX_VERDICT_CHARS, _MAX_FACT_CHARS)
    return dataclasses.replace(
        short,
        message=replace_unprintable(short.message),
        failure=short.failure.with_texts(replace_unprintable),
    )
