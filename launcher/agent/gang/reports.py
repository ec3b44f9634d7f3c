"""The lines that a program writes on the progress pipe: any program, so any bytes. Pure.

A value of the wrong form is left out and becomes a note for the reader of the summary: nothing that a program writes
may end its agent, or reach the leader in a form that the leader does not expect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.progress import MAX_NUMBER
from jaxlaunch.launcher.agent.io import wire

UNSTARTABLE = "unstartable"  # key of the line with which the forked agent reports that exec failed
# How a line begins.
_BEGIN = re.compile(rb'\{"(?:hello|phase|committed|restored|metrics|stopped|profile|note|error|atexit|unstartable)": ?')
MAX_LABEL = 100  # characters of a phase or a version: they are in every beat
MAX_BEGINS = 8  # of messages in one line that are tried, the last ones: each try may cost as much as the line is long
MAX_METRICS = 32 * 1024  # bytes as JSON: a beat that carries them must fit a message between agents
MAX_SHOWN = 200  # characters of a wrong value, in a note


def read(line: bytes, rank: int) -> dict[str, Any]:
    """The message in a line of `rank`'s: known keys with values of the right form, all others in a `note`."""
    try:
        found = _whole(line)
    except ValueError:
        if _BEGIN.match(line) and wire.is_cut(line):
            return {}  # one of ours that a full pipe cut: no fault of the program's
        return {"note": f"rank {rank} wrote a line to the progress pipe that is not JSON"}
    if not isinstance(found, dict):
        return {"note": f"rank {rank} wrote {_shown(found)} to the progress pipe, which is not a JSON object"}
    message: dict[str, Any] = {}
    for key, value in found.items():
        form = _FORMS.get(key)
        if form is None:
            continue  # of a newer contract
        try:
            message[key] = form.read(value)
        except _WrongForm:
            note = f"rank {rank} wrote `{key}`: {_shown(value)} to the progress pipe; it must be {form.words}"
            message.setdefault("note", note)
    return message


def _whole(line: bytes) -> Any:
    """The value of a line, or of its end. Raises ValueError when there is none.

    A process that ends while the pipe is full leaves half a line. What the next one writes follows in the same line.
    """
    begins = [found.start() for found in _BEGIN.finditer(line, 1)]
    for start in [0, *reversed(begins[-MAX_BEGINS:])]:
        try:
            return wire.decoded(line[start:])
        except ValueError:
            continue
    raise ValueError("no value in it")


class _WrongForm(Exception):
    """A value is not what its key says."""


class _Form:
    """What the value of a key must be, in words, and how it is read."""

    def __init__(self, words: str, read: Callable[[Any], Any]) -> None:
        self.words, self.read = words, read


def _shown(value: Any) -> str:
    return repr(value)[:MAX_SHOWN]


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise _WrongForm
    return value


def _label(value: Any) -> str:
    return _text(value)[:MAX_LABEL]


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:  # a bool is no number
        raise _WrongForm
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _WrongForm
    return value


def _metrics(value: Any) -> dict[str, Any]:
    if len(json.dumps(_object(value))) > MAX_METRICS:
        raise _WrongForm
    return _object(value)


def _anything(value: Any) -> Any:
    return value


def _or_none(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else read(value)


def _error(value: Any) -> dict[str, Any]:
    fields = _object(value)
    trace, code = fields.get("traceback"), fields.get("code")
    return {
        "type": str(fields.get("type", "an error"))[:MAX_LABEL],
        "message": str(fields.get("message", ""))[: contract.MESSAGE_CHARS],
        "traceback": None if trace is None else str(trace)[-contract.TRACEBACK_CHARS :],
        "code": code if type(code) is int and 0 <= code <= 255 else None,
    }


def _stopped(value: Any) -> dict[str, Any]:
    fields = _object(value)
    return {
        "step": _number(fields.get("step", 0)),
        "saved": bool(fields.get("saved")),
        "note": str(fields.get("note", ""))[: contract.MESSAGE_CHARS],
    }


def _profile(value: Any) -> dict[str, Any]:
    fields = _object(value)
    _text(fields.get("state"))
    return fields


_FORMS: Mapping[str, _Form] = {
    "hello": _Form("a string", _label),
    "python": _Form("a string", _label),
    "jax": _Form("a string or null", _or_none(_label)),
    "pid": _Form("a number from 0 on", _number),
    "phase": _Form("a string", _label),
    "step": _Form("a number from 0 on or null", _or_none(_number)),
    "committed": _Form("a number from 0 on", _number),
    "restored": _Form("a number from 0 on", _number),
    "metrics": _Form(f"an object of at most {MAX_METRICS} bytes", _metrics),
    "stopped": _Form("an object with a number `step`", _stopped),
    "profile": _Form("an object with a string `state`", _profile),
    "note": _Form("a string", _text),
    "error": _Form("an object with `type`, `message`, `traceback` and `code`", _error),
    "atexit": _Form("true", _anything),
    "waits": _Form("true or false", bool),
    UNSTARTABLE: _Form("a string", _text),
}
