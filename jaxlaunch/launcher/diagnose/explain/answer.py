"""Answers about a job, and the answers about objects that could not be read. Pure.

An object that could not be read is unknown, and is never treated as absent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import ParamSpec

from jaxlaunch.launcher.diagnose.text import (
    EMPTY_TEXT,
    JOB_NAME,
    Command,
    NextStep,
    Text,
    advise_run,
    advise_wait,
    describe_event,
    launcher_command,
)
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import Obj

# Beginning of the message of a kubelet's event Unhealthy.
LIVENESS_PREFIX = "Liveness probe failed"

# A string is a line of external text, such as a traceback.
Evidence = tuple[Text | str, ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The reason why a job waits or failed, or what it does.

    Attributes:
        situation: Key of SITUATIONS in situations.py.
        headline: Text that follows the name of the job.
        evidence: Lines that prove it.
        next_step: What to do, or None for what the row of the situation says, if anything.
        clause: The headline as a clause about the hosts that wait, or None where it is one itself.
    """

    situation: str
    headline: Text
    evidence: Evidence = ()
    next_step: NextStep | None = None
    clause: Text | None = None

    def append_headline(self, end: Text) -> Answer:
        """Return the answer with `end` at the end of its headline."""
        clause = None if self.clause is None else self.clause + end
        return dataclasses.replace(self, headline=self.headline + end, clause=clause)


def waiting_answer(
    situation: str, reason: Text, evidence: Evidence = (), next_step: NextStep | None = None
) -> Answer:
    """Return an answer that the job waits for this reason."""
    return Answer(situation, Text("waits: {reason}", reason=reason), evidence, next_step, reason)


# Returns None if the cause does not apply to the job.
Cause = Callable[[Snapshot], Answer | None]


P = ParamSpec("P")


def first_answer(
    causes: Iterable[Callable[P, Answer | None]], *args: P.args, **kwargs: P.kwargs
) -> Answer | None:
    """Return the answer of the first cause that applies."""
    answers = (cause(*args, **kwargs) for cause in causes)
    return next((answer for answer in answers if answer is not None), None)


def is_liveness_failure(event: Obj) -> bool:
    """Return whether a liveness probe failed, after which the kubelet stops the container."""
    return bool(event["reason"] == "Unhealthy" and event["message"].startswith(LIVENESS_PREFIX))


# --- logs -----------------------------------------------------------------------------------------


def find_end_log(snapshot: Snapshot) -> Command | None:
    """Return the command that shows the log of the last attempt that ended, or None without one.

    The log of the newest pods has all their attempts. Host 0's log begins with the last lines of
    earlier pods, if these kept them on storage.
    """
    last, name = snapshot.report.last_end, JOB_NAME
    started = [host for host in snapshot.hosts if host.has_started]
    if started and (last is None or last.generation >= started[0].generation):
        return launcher_command("logs", name)
    if last is not None and any(host.number == 0 for host in started):
        return launcher_command("logs", name, "--previous")
    if hosts.has_run_volume(snapshot.jobset):
        return launcher_command("logs", name, "--from-volume")
    return None


def advise_reading_logs(snapshot: Snapshot) -> NextStep:
    """Return the advice to look at the end of the last attempt, or to wait without a log."""
    if (command := find_end_log(snapshot)) is None:
        return advise_wait("wait: no log is left of the pods that ended.")
    return advise_run("{logs} shows how it ended.", logs=command)


# --- unread objects -------------------------------------------------------------------------------


def explain_unread_pods(snapshot: Snapshot) -> Answer | None:
    """Explain that the pods, which show the progress of the job, could not be read."""
    if (reason := snapshot.unread_reasons.get("pods")) is None:
        return None
    reasons = ("FailedCreate", "FailedScheduling", "BackOff", "Failed", "FailedMount")
    evidence = describe_event(snapshot.find_event(*reasons))
    return Answer("unread", Text("is in an unknown state: {why}", why=reason), evidence)


def unread_answer(snapshot: Snapshot, kind: str, headline: Text) -> Answer:
    """Return an answer whose headline adds that the objects of `kind` could not be read, if so."""
    return Answer("unread", headline + unknown_reason(snapshot, kind))


def unknown_reason(snapshot: Snapshot, *kinds: str) -> Text:
    """Return the end of a headline if one of these kinds could not be read, else no text."""
    for kind in kinds:
        if (reason := snapshot.unread_reasons.get(kind)) is not None:
            return Text("; why is unknown: {why}", why=reason)
    return EMPTY_TEXT
