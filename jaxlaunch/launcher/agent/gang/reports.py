"""The lines that a program writes on the progress pipe: any program, so any bytes. Pure.

A value of the wrong form is left out and becomes a note for the reader of the summary: nothing that a program writes
may end its agent, or reach the leader in a form that the leader does not expect.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from jaxlaunch import contract
from jaxlaunch.records import checked, wire
from jaxlaunch.records.checked import ExitCode, Malformed, Whole, cut

UNSTARTABLE = "unstartable"  # key of the line with which the forked agent reports that exec failed
# How a line begins.
_BEGIN = re.compile(
    rb'\{"(?:hello|phase|committed|found|restored|joined|metrics|stopped|profile|note|error|refusal|atexit|'
    rb'unstartable)": ?'
)
MAX_LABEL = 100  # characters of a phase or a version: they are in every beat
MAX_BEGINS = 8  # of messages in one line that are tried, the last ones: each try may cost as much as the line is long
MAX_METRICS = 32 * 1024  # bytes as JSON: a beat that carries them must fit a message between agents


def read(line: bytes, rank: int) -> dict[str, Any]:
    """The message in a line of `rank`'s: known keys with values of the right form, all others in a `note`."""
    try:
        found = _whole(line)
    except ValueError:
        if _BEGIN.match(line) and wire.is_cut(line):
            return {}  # one of ours that a full pipe cut: no fault of the program's
        return {"note": f"rank {rank} wrote a line to the progress pipe that is not JSON"}
    if not isinstance(found, dict):
        return {"note": f"rank {rank} wrote {checked.shown(found)} to the progress pipe, which is not a JSON object"}
    message: dict[str, Any] = {}
    for key, value in found.items():
        if key not in _READERS:
            continue  # of a newer contract
        try:
            message[key] = _plain(_READERS[key](value))
        except Malformed as error:
            wrong = f"rank {rank} wrote `{key}`: {checked.shown(value)} to the progress pipe"
            note = f"{wrong}; {error.field or 'it'} must be {error.needed}"
            message.setdefault("note", note)
    return message


def _plain(value: Any) -> Any:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


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


_Label = Annotated[str, cut(MAX_LABEL)]


@dataclasses.dataclass(frozen=True)
class _Error:
    type: _Label = "an error"
    message: Annotated[str, cut(contract.MESSAGE_CHARS)] = ""
    traceback: Annotated[str, cut(-contract.TRACEBACK_CHARS)] | None = None
    code: ExitCode | None = None


@dataclasses.dataclass(frozen=True)
class _Refusal:
    message: Annotated[str, cut(contract.MESSAGE_CHARS)] = ""
    code: ExitCode = contract.BAD_SPEC


@dataclasses.dataclass(frozen=True)
class _Stopped:
    step: Whole = 0
    saved: bool = False
    note: Annotated[str, cut(contract.MESSAGE_CHARS)] = ""


def _fits(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    if len(json.dumps(metrics)) > MAX_METRICS:
        raise Malformed(f"an object of at most {MAX_METRICS} bytes", metrics)
    return metrics


def _has_state(profile: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(profile.get("state"), str):
        raise Malformed("an object with a string `state`", profile)
    return profile


@dataclasses.dataclass(frozen=True)
class _Line:
    """What each key of a line may hold."""

    hello: _Label
    python: _Label
    jax: _Label | None
    pid: Whole
    phase: _Label
    step: Whole | None
    committed: Whole
    found: Whole
    restored: Whole
    joined: bool
    metrics: Annotated[Mapping[str, Any], _fits]
    of: Whole
    stopped: _Stopped
    profile: Annotated[Mapping[str, Any], _has_state]
    note: str
    error: _Error
    refusal: _Refusal
    atexit: Any
    waits: bool
    unstartable: str


_READERS = checked.readers(_Line)
