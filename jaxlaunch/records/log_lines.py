"""Formats of what outlives a pod: lines of its log, its termination message, an annotation. Pure.

The launcher reads the state of a job from these three; this module has the writers and the parsers.

The log of host 0 has lines for programs, `jaxlaunch: KIND JSON`. The lines of the ranks begin with
`[rank] `, so that they cannot be mistaken for one. Each line for programs has `at` (Unix time),
`attempt` and `generation`, and these keys by its kind, as far as they have a value:

past     The attempts of earlier pods, at the start of a later generation. The first line has
         `attempts` (their number), `ends` (their number by cause) and `unknown` (why they are not
         known). A line follows for each of the last three, with its own `attempt` and `generation`,
         `verdict`, `seconds`, `first_committed`, `last_committed` and `ended`.
tail     After these, the end of a rank's log in earlier pods: `rank`, `lines`, and `host` (which
         held the rank in the last attempt). The failing rank comes first. Ranks for which
         jaxlaunch.runs.run_folder.TAIL_BYTES leaves no space are omitted.
beat     The state of the gang: `stage` (of STAGES), `members` (hosts that hold ranks, in the order
         of the ranks: jaxlaunch/records/members), `missing` (the first MAX_LISTED of them that have
         not joined), `missing_count`, `refused`, `step` (complete on every rank), `phase` (of most
         ranks), `since` (the start of that phase), `phases` (the first MAX_LISTED ranks by phase),
         `counts` (the number of ranks by phase), `committed`, `committed_at` (absent if it was
         before these pods), `seconds` and `restarts` (by cause), `restart` (seconds by cause until
         the first step of this attempt), `preempted` (preemptions in a row without a newly
         committed step; absent if not known), `overdue` (the timeout that passed),
         `held_until` (the end of `hold_on_failure`) and `metrics` (the newest of rank 0).
verdict  The end of an attempt: `verdict` (jaxlaunch/records/verdict), `step`, `committed`, and
         `memory` (of the rank that ended it). If another attempt follows in these pods, the next
         beat has its number.
start    The start of an attempt, before the lines of its processes. Only the agents of `launcher
         run` write it, each to its own stdout, as they do with `verdict`.

The termination message has the verdict of an agent. The annotation has the progress of a job whose
pods no longer exist. Host 0 writes it if the job has a service account, because pods without one
have no token. Anyone who may change the JobSet can write the annotation too, so one wrong field
makes all of it invalid.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from jaxlaunch import contract
from jaxlaunch.records import codec
from jaxlaunch.records.codec import NonNegativeInt, Seconds, UnixTime, matches
from jaxlaunch.records.members import HostRanges
from jaxlaunch.records.run_numbers import RunNumbers, TimedNumbers, select_metrics
from jaxlaunch.records.summary import RankMemory
from jaxlaunch.records.verdict import Verdict

PREFIX = "jaxlaunch: "
STAGES = ("gather", "run", "kill", "hold", "leave")
# The largest number of hosts or ranks that a beat lists.
MAX_LISTED = 16

# --- the bytes of a stream ------------------------------------------------------------------------

# Mark at the beginning of each piece of a long line after the first.
CONTINUATION_MARK = "… "
_MARK = CONTINUATION_MARK.encode()


class LineSplitter:
    """Splits a stream into lines, and long lines into marked pieces of at most `limit` bytes."""

    def __init__(self, limit: int = contract.MAX_LINE) -> None:
        # The bytes of a line whose end has not been received.
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
            # A piece must not end inside a character of UTF-8.
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
    """Numbers of the attempts in earlier pods or, with `verdict`, one of these attempts."""

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
    """The end of a rank's log in earlier pods."""

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
    held_until: UnixTime | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerdictLine(_Line):
    """The verdict on an attempt of these pods."""

    verdict: Verdict
    step: NonNegativeInt | None = None
    committed: NonNegativeInt | None = None
    # The memory of the rank that ended the attempt, if it is known.
    memory: RankMemory | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartLine(_Line):
    """The start of an attempt on one host."""


Line = PastLine | TailLine | BeatLine | VerdictLine | StartLine
KINDS: Mapping[str, type[Line]] = dict(
    past=PastLine, tail=TailLine, beat=BeatLine, verdict=VerdictLine, start=StartLine
)
_KIND_BY_CLASS = {line_class: kind for kind, line_class in KINDS.items()}


def format_line(line: Line) -> str:
    """Return a line for programs as text."""
    return f"{PREFIX}{_KIND_BY_CLASS[type(line)]} {_dump_compact(codec.present_fields(line))}"


def parse_line(text: str) -> Line | None:
    """Parse a line for programs. Return None for other lines, and if it is truncated or invalid."""
    if not text.startswith(PREFIX):
        return None
    kind, _, value = text[len(PREFIX) :].partition(" ")
    try:
        return codec.read_record(KINDS[kind], codec.parse_record(value)) if kind in KINDS else None
    except ValueError:
        return None


def is_for_programs(text: str) -> bool:
    """Return whether a log line is a line for programs, even if it is truncated or invalid."""
    return any(text.startswith(f"{PREFIX}{kind} ") for kind in KINDS)


def format_clock(at: float) -> str:
    """Return a Unix time such as "14:05 UTC"."""
    return time.strftime("%H:%M UTC", time.gmtime(at))


def _dump_compact(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


# --- the termination message ----------------------------------------------------------------------

# The kubelet truncates a termination message to 4,096 bytes.
MAX_MESSAGE_BYTES = 3_900
# A traceback of at most this length is not cut any further.
MIN_TRACEBACK_CHARS = 100
# Version of the format of the termination message.
VERSION = 1
# Default of terminationMessagePath in Kubernetes.
TERMINATION_LOG = "/dev/termination-log"


@dataclasses.dataclass(frozen=True)
class TerminationMessage:
    """The content of an agent's termination message."""

    verdict: Verdict
    host: NonNegativeInt | None = None
    generation: NonNegativeInt = 0
    attempt: NonNegativeInt = 0


def format_termination_message(message: TerminationMessage) -> str:
    """Return JSON of at most MAX_MESSAGE_BYTES. The traceback is cut first, then the sentence."""
    while True:
        text = _dump_compact({"jaxlaunch": VERSION, **codec.to_json(message)})
        # The JSON is ASCII, so its length is the number of bytes.
        if len(text) <= MAX_MESSAGE_BYTES:
            return text
        verdict = message.verdict
        traceback = verdict.traceback or ""
        if len(traceback) > MIN_TRACEBACK_CHARS:
            # The beginning is cut, because the exception is at the end.
            verdict = dataclasses.replace(verdict, traceback=traceback[len(traceback) // 4 :])
        else:
            verdict = verdict.truncate(len(verdict.message) * 3 // 4)
        message = dataclasses.replace(message, verdict=verdict)


def parse_termination_message(text: str | None) -> TerminationMessage | None:
    """Parse the termination message of an agent. Return None for any other text."""
    try:
        fields = codec.parse_record(text or "")
        is_known_version = fields["jaxlaunch"] == VERSION
        return codec.read_record(TerminationMessage, fields) if is_known_version else None
    except (ValueError, KeyError, TypeError):
        return None


# --- the annotation -------------------------------------------------------------------------------

MAX_ANNOTATION_BYTES = 2_000
# The moments at which the annotation may be written, with their descriptions for people.
ANNOTATION_MOMENTS = {
    "stopped": "when it was stopped",
    "queued": "when its queue suspended it",
    "ended": "when it ended",
    "left": "when its pods ended",
    "running": "while it ran",
    "volume": "by the files on its volume",
}
_MAX_VERDICT_CHARS = 600
# The limit of each text among the facts of the verdict.
_MAX_FACT_CHARS = 60
# The metrics are omitted before the message of the verdict is cut below this length.
_MIN_MESSAGE_CHARS = 100


@dataclasses.dataclass(frozen=True)
class ProgressAnnotation(RunNumbers):
    """The progress of a job at the time `at`, with a shortened verdict and few metrics."""

    JSON_KEYS = {"restarts": "ends"}

    uid: str
    at: UnixTime
    when: Annotated[str, matches("|".join(ANNOTATION_MOMENTS))]
    attempt: NonNegativeInt
    generation: NonNegativeInt
    # The verdict on the newest finished attempt, without its traceback.
    verdict: Verdict | None = None

    def __post_init__(self) -> None:
        if self.verdict is not None:
            object.__setattr__(self, "verdict", shorten_verdict(self.verdict))
        if self.metrics is not None:
            object.__setattr__(self, "metrics", select_metrics(self.metrics))

    @property
    def is_end(self) -> bool:
        """Return whether the verdict describes the end of the last pods."""
        return self.when in ("stopped", "ended", "left", "volume")

    def to_json(self) -> str:
        """Return the value of the annotation, with verdict and metrics cut to the size limit."""
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
    """Return the verdict without traceback, and with short texts of printable characters."""

    def replace_unprintable(text: str) -> str:
        return "".join(character if character.isprintable() else " " for character in text)

    short = dataclasses.replace(verdict, traceback=None)
    short = short.truncate(_MAX_VERDICT_CHARS, _MAX_FACT_CHARS)
    return dataclasses.replace(
        short,
        message=replace_unprintable(short.message),
        failure=short.failure.with_texts(replace_unprintable),
    )
