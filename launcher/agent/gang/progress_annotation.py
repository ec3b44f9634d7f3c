"""How far a job was, in one annotation of its JobSet: what is known of it when no pod is left to ask. Pure.

The value is JSON of MAX_BYTES at most. Whoever may change the JobSet may write it, so what is read is checked by type,
range and length, and one field that is wrong makes all of it unknown.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from jaxlaunch.launcher.agent.gang.verdict import Verdict

MAX_BYTES = 2_000
WHEN = {  # what the job did when this was true
    "stopped": "when it was stopped",
    "queued": "when its queue suspended it",
    "ended": "when it ended",
    "left": "when its pods ended",
    "running": "while it ran",
    "volume": "by the files on its volume",
}
_MAX_MESSAGE = 600  # characters of a verdict's
_MAX_CAUSES = 20
_LARGEST = 2**53
_LATEST = 32_503_680_000.0  # the year 3000, in Unix time
_CAUSE = re.compile(r"[a-z_]{1,32}")


@dataclasses.dataclass(frozen=True)
class Recorded:
    """How far a job was at a time, in Unix time. None: not known."""

    uid: str  # of its JobSet
    at: float
    when: str  # a key of WHEN
    attempt: int
    generation: int
    step: int | None = None  # complete on every rank
    committed: int | None = None  # the newest step whose checkpoint is complete on storage
    goodput: float | None = None  # the share of all seconds that went into steps that count, from 0 to 1
    ends: Mapping[str, int] | None = None  # how many attempts ended, by cause
    verdict: Verdict | None = None  # on the newest attempt that ended, without its traceback

    @property
    def is_end(self) -> bool:
        """Whether the verdict is the one that ended the last pods, rather than one on an attempt before."""
        return self.when in ("stopped", "ended", "left", "volume")

    def to_json(self) -> str:
        """The value of the annotation; the message of the verdict is cut to what fits."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        fields |= {"at": round(self.at, 1)} | ({} if self.goodput is None else {"goodput": round(self.goodput, 4)})
        if self.verdict is not None:
            told = {name: value for name, value in self.verdict.to_json().items() if value is not None}
            told.pop("traceback", None)
            fields["verdict"] = told | {"message": _shown(self.verdict.message)[:_MAX_MESSAGE]}
        while len(text := json.dumps(fields, separators=(",", ":"))) > MAX_BYTES and fields["verdict"]["message"]:
            fields["verdict"]["message"] = fields["verdict"]["message"][: -len(fields["verdict"]["message"]) // 4]
        return text

    @classmethod
    def from_json(cls, text: str, uid: str) -> Recorded | None:
        """What `to_json` wrote of the JobSet with that uid; None for anything else."""
        if len(text) > MAX_BYTES:
            return None
        try:
            return cls.checked(json.loads(text), uid)
        except (ValueError, RecursionError):
            return None

    @classmethod
    def checked(cls, fields: Any, uid: str) -> Recorded:
        """These fields, as JSON gives them. Raises ValueError unless each is what it should be, of this JobSet."""
        if not isinstance(fields, dict) or fields.get("uid") != uid:
            raise ValueError("it is not of this JobSet")
        if not isinstance(fields.get("when"), str) or fields["when"] not in WHEN:
            raise ValueError("when that was is unknown")
        return cls(
            uid=uid,
            at=_number(fields.get("at"), 0.0, _LATEST),
            when=fields["when"],
            attempt=whole(fields.get("attempt")),
            generation=whole(fields.get("generation")),
            step=_whole_or_none(fields.get("step")),
            committed=_whole_or_none(fields.get("committed")),
            goodput=None if fields.get("goodput") is None else _number(fields["goodput"], 0.0, 1.0),
            ends=None if fields.get("ends") is None else _counts(fields["ends"]),
            verdict=None if fields.get("verdict") is None else verdict(fields["verdict"]),
        )


def verdict(fields: Any) -> Verdict:
    """A verdict of these fields, as JSON gives them, with the begin of its message and without its traceback.

    Raises ValueError unless each is what it should be.
    """
    if not isinstance(fields, dict) or not isinstance(fields.get("message"), str):
        raise ValueError("a verdict is an object with a message")
    where: dict[str, Any] = {name: _whole_or_none(fields.get(name)) for name in ("rank", "host", "step")}
    message = _shown(fields["message"][:_MAX_MESSAGE])
    return Verdict(_cause(fields.get("cause")), whole(fields.get("code"), 255), message, **where)


def _counts(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > _MAX_CAUSES:
        raise ValueError("counts by cause are an object")
    return {_cause(cause): whole(many) for cause, many in value.items()}


def _cause(value: Any) -> str:
    if not isinstance(value, str) or _CAUSE.fullmatch(value) is None:
        raise ValueError(f"{value!r} is not a cause")
    return value


def _whole_or_none(value: Any) -> int | None:
    return None if value is None else whole(value)


def whole(value: Any, most: int = _LARGEST) -> int:
    """A whole number from 0 to `most`, as JSON gives it. Raises ValueError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError("it is not a whole number in its range")
    return value


def _number(value: Any, least: float, most: float) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError("it is not a number")
    if not least <= value <= most:
        raise ValueError(f"{value} is not between {least} and {most}")
    return float(value)


def _shown(text: str) -> str:
    """The text on one line, without what a terminal would obey."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
