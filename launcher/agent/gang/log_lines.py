"""What an agent in a pod reports through the Kubernetes API: lines in its log, and a termination message.

Only the pods of a job with a service account hold a token, with which host 0 also writes an annotation of the JobSet
(launcher/agent/gang/recorded). Both the writer and the parser of the two formats are here. Pure.

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

from jaxlaunch.launcher.agent.gang import forms

PREFIX = "jaxlaunch: "
STAGES = ("gather", "run", "kill", "leave")
MAX_LISTED = 16  # hosts or ranks that a beat names
MAX_MESSAGE = 3_900  # bytes; the kubelet cuts a termination message at 4,096
MAX_CUT = 100  # characters; a shorter traceback is not cut
VERSION = 1  # of the termination message

_ABOUT = {"at": forms.seconds, "attempt": forms.whole, "generation": forms.whole}
_COMMITTED = {name: forms.or_none(forms.whole) for name in ("step", "committed", "first_committed", "last_committed")}
_SECONDS = {"seconds": forms.named(forms.seconds)}
_FORMS: Mapping[str, forms.Form] = {
    "past": forms.record(
        {},
        {
            **_ABOUT,
            **_COMMITTED,
            **_SECONDS,
            "attempts": forms.whole,
            "ends": forms.named(forms.whole),
            "unknown": forms.or_none(forms.text),
            "verdict": forms.VERDICT,
            "ended": forms.seconds,
        },
    ),
    "tail": forms.record({"generation": forms.whole, "rank": forms.whole, "lines": forms.each(forms.text)}, _ABOUT),
    "beat": forms.record(
        {},
        {
            **_ABOUT,
            **_COMMITTED,
            **_SECONDS,
            "stage": forms.text,
            "missing": forms.each(forms.whole),
            "missing_count": forms.whole,
            "refused": forms.each(forms.text),
            "phase": forms.or_none(forms.text),
            "since": forms.or_none(forms.seconds),
            "phases": forms.named(forms.each(forms.whole)),
            "counts": forms.named(forms.whole),
            "committed_at": forms.or_none(forms.seconds),
            "restarts": forms.named(forms.whole),
            "preempted": forms.or_none(forms.whole),
            "overdue": forms.or_none(forms.text),
            "metrics": forms.or_none(forms.named()),
        },
    ),
    "verdict": forms.record({"verdict": forms.VERDICT}, {**_ABOUT, **_COMMITTED}),
}
KINDS = tuple(_FORMS)
_TERMINATION = forms.record({"verdict": forms.VERDICT}, {**_ABOUT, "host": forms.or_none(forms.whole)})

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
    fields = forms.read(value) if kind in KINDS else None
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
    fields = forms.read(message or "")
    return fields if fields is not None and fields.get("jaxlaunch") == VERSION and _TERMINATION(fields) else None


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)
