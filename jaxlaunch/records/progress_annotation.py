"""How far a job was, in one annotation of its JobSet: what is known of it when no pod is left to ask. Pure.

The value is JSON of MAX_BYTES at most. Whoever may change the JobSet may write it, so what is read is checked by type,
range and length, and one field that is wrong makes all of it unknown.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any

from jaxlaunch.records import checked
from jaxlaunch.records.checked import Cause, Time, Whole, at_most, like, within
from jaxlaunch.records.verdict import Verdict

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
_MAX_FACT = 60  # characters of each text among its facts
_MAX_CAUSES = 20


@dataclasses.dataclass(frozen=True)
class Recorded:
    """How far a job was at a time, in Unix time. None: not known."""

    uid: str  # of its JobSet
    at: Time
    when: Annotated[str, like("|".join(WHEN))]
    attempt: Whole
    generation: Whole
    step: Whole | None = None  # complete on every rank
    committed: Whole | None = None  # the newest step whose checkpoint is complete on storage
    goodput: Annotated[float, within(0, 1)] | None = None  # the share of all seconds that went into steps that count
    ends: Annotated[Mapping[Cause, Whole], at_most(_MAX_CAUSES)] | None = None  # restarts by cause
    verdict: Verdict | None = None  # on the newest attempt that ended, without its traceback

    @property
    def is_end(self) -> bool:
        """Whether the verdict is the one that ended the last pods, rather than one on an attempt before."""
        return self.when in ("stopped", "ended", "left", "volume")

    def to_json(self) -> str:
        """The value of the annotation; the message of the verdict is cut to what fits."""
        fields = checked.fields_of(self) | {"at": round(self.at, 1)}
        fields |= {} if self.goodput is None else {"goodput": round(self.goodput, 4)}
        if self.verdict is not None:
            fields["verdict"] = checked.fields_of(shortened(self.verdict))
        verdict = None if self.verdict is None else shortened(self.verdict)
        while len(text := json.dumps(fields, separators=(",", ":"))) > MAX_BYTES and verdict and verdict.message:
            verdict = verdict.cut(len(verdict.message) * 3 // 4)
            fields["verdict"] = checked.fields_of(verdict)
        return text

    @classmethod
    def from_json(cls, text: str, uid: str) -> Recorded | None:
        """What `to_json` wrote of the JobSet with that uid; None for anything else."""
        try:
            return cls.read(checked.decoded(text), uid) if len(text) <= MAX_BYTES else None
        except ValueError:
            return None

    @classmethod
    def read(cls, fields: Any, uid: str) -> Recorded:
        """These fields, as JSON gives them. Raises ValueError unless each is what it should be, of this JobSet."""
        found = checked.read(cls, fields)
        if found.uid != uid:
            raise ValueError("it is not of this JobSet")
        return found if found.verdict is None else dataclasses.replace(found, verdict=shortened(found.verdict))


def shortened(verdict: Verdict) -> Verdict:
    """The verdict without its traceback, and with the begin of its message: on one line, without what a terminal would
    obey."""

    def printable(text: str) -> str:
        return "".join(letter if letter.isprintable() else " " for letter in text)

    cut = dataclasses.replace(verdict, traceback=None).cut(_MAX_MESSAGE, _MAX_FACT)
    return dataclasses.replace(cut, message=printable(cut.message), failure=cut.failure.with_texts(printable))
