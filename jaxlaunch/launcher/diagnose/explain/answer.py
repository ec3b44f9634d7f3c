"""The form of every answer about a job, and the answers about objects that could not be read. Pure.

What could not be read is unknown: it is never taken for absent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from jaxlaunch.launcher.diagnose.text import NOTHING, NextStep, Text, describe_event
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import Obj

# How the message of a kubelet's event Unhealthy begins.
LIVENESS = "Liveness probe failed"

# A string is a line that somebody else wrote, such as one of a traceback.
Evidence = tuple[Text | str, ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What holds up a job, or what it does.

    Attributes:
        situation: Key of SITUATIONS in situations.py.
        headline: Goes on after the name of the job.
        evidence: Lines that prove it.
        next_step: What to do, or None for what the row of the situation says, if anything.
        clause: The headline as a clause about the hosts that wait, or None where it is one itself.
    """

    situation: str
    headline: Text
    evidence: Evidence = ()
    next_step: NextStep | None = None
    clause: Text | None = None

    def extended(self, end: Text) -> Answer:
        """Return the answer with `end` at the end of its headline."""
        clause = None if self.clause is None else self.clause + end
        return dataclasses.replace(self, headline=self.headline + end, clause=clause)


def waits(situation: str, reason: Text, evidence: Evidence = (), next_step: NextStep | None = None) -> Answer:
    """Return the answer that a job waits for this reason."""
    return Answer(situation, Text("waits: {reason}", reason=reason), evidence, next_step, reason)


# Returns None where this is not what holds up the job.
Cause = Callable[[Snapshot], Answer | None]


def first_answer(causes: Iterable[Cause], snapshot: Snapshot) -> Answer | None:
    """Return the answer of the first cause that applies."""
    return next((answer for cause in causes if (answer := cause(snapshot)) is not None), None)


def is_liveness(event: Obj) -> bool:
    """Return whether an event is about a liveness probe that failed: the kubelet then stops the container."""
    return bool(event["reason"] == "Unhealthy" and event["message"].startswith(LIVENESS))


# --- unread objects ---------------------------------------------------------------------------------------------------


def unread_pods(snapshot: Snapshot) -> Answer | None:
    """Return the answer where the pods could not be read, which alone show how far the job is."""
    if (why := snapshot.not_read.get("pods")) is None:
        return None
    event = snapshot.event("FailedCreate", "FailedScheduling", "BackOff", "Failed", "FailedMount")
    return Answer("unread", Text("is in an unknown state: {why}", why=why), describe_event(event))


def unread_reason(snapshot: Snapshot, kind: str, headline: Text) -> Answer:
    """Return the answer where something is missing, and the objects that say why could not be read."""
    return Answer("unread", headline + unknown_reason(snapshot, kind))


def unknown_reason(snapshot: Snapshot, *kinds: str) -> Text:
    """Return why a reason may be missing, as the end of a headline, or nothing where these kinds were read."""
    why = next((snapshot.not_read[kind] for kind in kinds if kind in snapshot.not_read), None)
    return NOTHING if why is None else Text("; why is unknown: {why}", why=why)
