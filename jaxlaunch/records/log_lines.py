"""What an agent in a pod reports through the Kubernetes API: lines in its log, and a termination message.

Only the pods of a job with a service account hold a token, with which host 0 also writes an annotation of the JobSet
(jaxlaunch/records/progress_annotation). Both the writer and the parser of the two formats are here. Pure.

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
from typing import Any

from jaxlaunch.records import checked
from jaxlaunch.records.checked import Seconds, Time, Whole
from jaxlaunch.records.members import Wire
from jaxlaunch.records.verdict import Verdict

PREFIX = "jaxlaunch: "
STAGES = ("gather", "run", "kill", "leave")
MAX_LISTED = 16  # hosts or ranks that a beat names
MAX_MESSAGE = 3_900  # bytes; the kubelet cuts a termination message at 4,096
MAX_CUT = 100  # characters; a shorter traceback is not cut
VERSION = 1  # of the termination message
TERMINATION_LOG = "/dev/termination-log"  # Kubernetes' default terminationMessagePath


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Line:
    at: Time = 0.0
    attempt: Whole = 0
    generation: Whole = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Past(_Line):
    """How many attempts ended in earlier pods, or with `verdict` how one of them did."""

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
    """How far the gang is."""

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
_KIND_OF = {of: kind for kind, of in KINDS.items()}


@dataclasses.dataclass(frozen=True)
class Termination:
    """The termination message of an agent."""

    verdict: Verdict
    host: Whole | None = None
    generation: Whole = 0
    attempt: Whole = 0


def line(record: Line) -> str:
    """The log line of a record."""
    return f"{PREFIX}{_KIND_OF[type(record)]} {_json(checked.fields_of(record))}"


def parse(text: str) -> Line | None:
    """The record in a log line; None for any other line, one that is truncated or has a wrong field included."""
    if not text.startswith(PREFIX):
        return None
    kind, _, value = text[len(PREFIX) :].partition(" ")
    try:
        return checked.read(KINDS[kind], checked.decoded(value)) if kind in KINDS else None
    except ValueError:
        return None


def is_for_programs(text: str) -> bool:
    """Whether a log line is one of ours, whole or truncated, that people need not see."""
    return any(text.startswith(f"{PREFIX}{kind} ") for kind in KINDS)


def termination_message(end: Termination) -> str:
    """The text of a termination message, as JSON: its longest texts are cut to MAX_MESSAGE bytes."""
    while True:
        text = _json({"jaxlaunch": VERSION, **checked.to_json(end)})
        if len(text) <= MAX_MESSAGE:  # JSON in ASCII: characters are bytes
            return text
        trace, message = end.verdict.traceback or "", end.verdict.message
        if len(trace) > MAX_CUT:
            cut = dataclasses.replace(end.verdict, traceback=trace[len(trace) // 4 :])  # the exception is at its end
        else:
            cut = end.verdict.cut(len(message) * 3 // 4)
        end = dataclasses.replace(end, verdict=cut)


def parse_termination_message(message: str | None) -> Termination | None:
    """What an agent's termination message says; None for the end of a log, or another program's message."""
    try:
        fields = checked.decoded(message or "")
        return checked.read(Termination, fields) if fields["jaxlaunch"] == VERSION else None
    except (ValueError, KeyError, TypeError):
        return None


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)
