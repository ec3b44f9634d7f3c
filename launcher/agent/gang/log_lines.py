"""How an agent in a pod speaks to whoever reads the Kubernetes API: words in its log, and a termination message.

No pod holds a token, so this is all that leaves it. Writer's format and reader's parse lie here, once. Pure.

A word is one line of host 0's log, `jaxlaunch: KIND JSON`; a program's own lines begin with `[rank] `, so that none can
be mistaken for one. Every word has `at` (Unix time), `attempt` and `generation`. Beside them:

past     at the start of a later generation. First one without `verdict`: `attempts` (how many came before), `ends` (of
         them, by cause), `unknown` (why that is not known, or null). Then one for each of the last three: `verdict`,
         `seconds`, `first_committed`, `last_committed`, `ended`; `attempt` and `generation` are then its own.
tail     after these, the end of a rank's log of the generations before: `rank`, `lines`. The failing rank comes first;
         ranks beyond launcher.agent.memory.TAIL_BYTES are left out.
beat     `stage` (of STAGES), `missing` (hosts not here, the first MAX_LISTED; how many is `missing_count`), `refused`,
         `step` (complete on every rank), `phase` (of most ranks) and `since` (it lasts), `phases` ({phase: the first
         MAX_LISTED ranks}), `counts` ({phase: ranks}), `committed`, `committed_at` (null: before these pods),
         `seconds` and `restarts` (by cause), `overdue` (which budget was missed, or null), `metrics` (rank 0's newest).
verdict  `verdict`, as launcher.agent.verdict writes it. Another attempt may follow in these pods: the next beat tells.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

PREFIX = "jaxlaunch: "
KINDS = ("past", "tail", "beat", "verdict")
STAGES = ("gather", "run", "kill", "leave")
MAX_LISTED = 16  # hosts or ranks that a beat names
MAX_MESSAGE = 3_900  # bytes; the kubelet cuts a termination message at 4,096
MAX_CUT = 100  # a text this short is not worth cutting
VERSION = 1  # of the termination message, and its mark

TERMINATION_LOG = "/dev/termination-log"  # Kubernetes' default terminationMessagePath


def word(kind: str, said: Mapping[str, Any]) -> str:
    """The line that says it."""
    return f"{PREFIX}{kind} {_json(said)}"


def parse(line: str) -> tuple[str, dict[str, Any]] | None:
    """The kind of a word and what it says; None for any other line, one that was cut short included."""
    if not line.startswith(PREFIX):
        return None
    kind, _, text = line[len(PREFIX) :].partition(" ")
    said = _object(text)
    return None if said is None or kind not in KINDS else (kind, said)


def is_word(line: str) -> bool:
    """Whether a line is for programs to read, whole or cut short."""
    return any(line.startswith(f"{PREFIX}{kind} ") for kind in KINDS)


def farewell(verdict: Mapping[str, Any], host: int | None, generation: int, attempt: int) -> str:
    """The termination message of an agent, as JSON: the verdict, its longest texts cut to fit."""
    cut = dict(verdict)
    while True:
        said = {"jaxlaunch": VERSION, "verdict": cut, "host": host, "generation": generation, "attempt": attempt}
        text = _json(said)
        if len(text) <= MAX_MESSAGE:  # JSON in ASCII: characters are bytes
            return text
        trace, message = cut.get("traceback") or "", str(cut["message"])
        if len(trace) > MAX_CUT:
            cut["traceback"] = trace[len(trace) // 4 :]  # the last lines say what was raised
        else:
            cut["message"] = message[: len(message) * 3 // 4]


def parse_farewell(message: str | None) -> dict[str, Any] | None:
    """What a termination message says; None when it is not an agent's, but a log's end or another program's."""
    said = _object(message or "")
    return said if said is not None and said.get("jaxlaunch") == VERSION and "verdict" in said else None


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), default=str)


def _object(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
