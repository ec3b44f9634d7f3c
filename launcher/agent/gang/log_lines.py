"""What an agent in a pod reports through the Kubernetes API: lines in its log, and a termination message.

Only the pods of a job with a service account hold a token, with which host 0 also writes an annotation of the JobSet
(launcher/agent/gang/progress_annotation). Both the writer and the parser of the two formats are here. Pure.

A line of host 0's log for programs is `jaxlaunch: KIND JSON`; a program's own lines begin with `[rank] `, so that they
cannot be mistaken for one. Each has `at` (Unix time), `attempt` and `generation`, and by its kind:

past     at the start of a later generation. First one without `verdict`: `attempts` (how many there were), `ends` (how
         many by cause), `unknown` (why that is not known, or null). Then one for each of the last three: `verdict`,
         `seconds`, `first_committed`, `last_committed`, `ended`; `attempt` and `generation` are then its own.
tail     after these, the end of a rank's log of the generations before: `rank`, `lines`. The failing rank comes first;
         ranks beyond jaxlaunch.launcher.agent.leader.run_folder.TAIL_BYTES are left out.
beat     `stage` (of STAGES), `missing` (hosts that have not joined, the first MAX_LISTED), `missing_count`, `refused`,
         `step` (complete on every rank), `phase` (of most ranks) and its start `since`, `phases` ({phase: the first
         MAX_LISTED ranks}), `counts` ({phase: ranks}), `committed`, `committed_at` (null: before these pods),
         `seconds` and `restarts` (by cause), `preempted` (preemptions in a row without a newly committed step; null:
         not known), `overdue` (which timeout passed, or null), `metrics` (rank 0's newest).
verdict  `verdict`, as launcher/agent/gang/verdict writes it. Another attempt may follow in these pods: the
         next beat has its number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jaxlaunch.launcher.agent.gang import record_checks

PREFIX = "jaxlaunch: "
STAGES = ("gather", "run", "kill", "leave")
MAX_LISTED = 16  # hosts or ranks that a beat names
MAX_MESSAGE = 3_900  # bytes; the kubelet cuts a termination message at 4,096
MAX_CUT = 100  # characters; a shorter traceback is not cut
VERSION = 1  # of the termination message

_ABOUT = {"at": record_checks.seconds, "attempt": record_checks.whole, "generation": record_checks.whole}
_COMMITTED = {
    name: record_checks.or_none(record_checks.whole)
    for name in ("step", "committed", "first_committed", "last_committed")
}
_SECONDS = {"seconds": record_checks.named(record_checks.seconds)}
_FORMS: Mapping[str, record_checks.Form] = {
    "past": record_checks.record(
        {},
        {
            **_ABOUT,
            **_COMMITTED,
            **_SECONDS,
            "attempts": record_checks.whole,
            "ends": record_checks.named(record_checks.whole),
            "unknown": record_checks.or_none(record_checks.text),
            "verdict": record_checks.VERDICT,
            "ended": record_checks.seconds,
        },
    ),
    "tail": record_checks.record(
        {
            "generation": record_checks.whole,
            "rank": record_checks.whole,
            "lines": record_checks.each(record_checks.text),
        },
        _ABOUT,
    ),
    "beat": record_checks.record(
        {},
        {
            **_ABOUT,
            **_COMMITTED,
            **_SECONDS,
            "stage": record_checks.text,
            "missing": record_checks.each(record_checks.whole),
            "missing_count": record_checks.whole,
            "refused": record_checks.each(record_checks.text),
            "phase": record_checks.or_none(record_checks.text),
            "since": record_checks.or_none(record_checks.seconds),
            "phases": record_checks.named(record_checks.each(record_checks.whole)),
            "counts": record_checks.named(record_checks.whole),
            "committed_at": record_checks.or_none(record_checks.seconds),
            "restarts": record_checks.named(record_checks.whole),
            "preempted": record_checks.or_none(record_checks.whole),
            "overdue": record_checks.or_none(record_checks.text),
            "metrics": record_checks.or_none(record_checks.named()),
        },
    ),
    "verdict": record_checks.record({"verdict": record_checks.VERDICT}, {**_ABOUT, **_COMMITTED}),
}
KINDS = tuple(_FORMS)
_TERMINATION = record_checks.record(
    {"verdict": record_checks.VERDICT}, {**_ABOUT, "host": record_checks.or_none(record_checks.whole)}
)

TERMINATION_LOG = "/dev/termination-log"  # Kubernetes' default terminationMessagePath


def line(kind: str, fields: Mapping[str, Any]) -> str:
    """The log line of a kind and its fields."""
    return f"{PREFIX}{kind} {_json(fields)}"


def parse(text: str) -> tuple[str, dict[str, Any]] | None:
    """The kind and the fields of a log line; None for any other line, one that is truncated or has a field of another
    form included."""
    if not text.startswith(PREFIX):
        return None
    kind, _, value = text[len(PREFIX) :].partition(" ")
    fields = record_checks.read(value) if kind in KINDS else None
    return (kind, fields) if fields is not None and _FORMS[kind](fields) else None


def is_for_programs(text: str) -> bool:
    """Whether a log line is one of ours, whole or truncated, that people need not see."""
    return any(text.startswith(f"{PREFIX}{kind} ") for kind in KINDS)


def termination_message(verdict: Mapping[str, Any], host: int | None, generation: int, attempt: int) -> str:
    """The termination message of an agent, as JSON: the verdict, with its longest texts cut to MAX_MESSAGE bytes."""
    cut = dict(verdict)
    while True:
        fields = {"jaxlaunch": VERSION, "verdict": cut, "host": host, "generation": generation, "attempt": attempt}
        text = _json(fields)
        if len(text) <= MAX_MESSAGE:  # JSON in ASCII: characters are bytes
            return text
        trace, message = cut.get("traceback") or "", str(cut["message"])
        if len(trace) > MAX_CUT:
            cut["traceback"] = trace[len(trace) // 4 :]  # the exception is in the last lines
        else:
            cut["message"] = message[: len(message) * 3 // 4]


def parse_termination_message(message: str | None) -> dict[str, Any] | None:
    """The fields of an agent's termination message; None for the end of a log, or another program's message."""
    fields = record_checks.read(message or "")
    return fields if fields is not None and fields.get("jaxlaunch") == VERSION and _TERMINATION(fields) else None


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)
