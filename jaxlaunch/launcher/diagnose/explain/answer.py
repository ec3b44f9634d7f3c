"""The answer of `explain`, and what several causes need for it. Pure functions.

An object that could not be read may exist, so an answer never treats it as absent. Its headline
says instead what is not known and why.
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
        headline: Predicate of a sentence whose subject is the job, such as "waits: …".
        evidence: Lines that support the headline.
        next_step: What to do, or None for the next step of the situation.
        clause: The headline as a clause that fits after "waits for host 1 to come back: ", or None
            if the headline itself fits.
    """

    situation: str
    headline: Text
    evidence: Evidence = ()
    next_step: NextStep | None = None
    clause: Text | None = None

    def append_to_headline(self, end: Text) -> Answer:
        """Return the answer with `end` at the end of its headline."""
        clause = None if self.clause is None else self.clause + end
        return dataclasses.replace(self, headline=self.headline + end, clause=clause)


def waiting_answer(
    situation: str, reason: Text, evidence: Evidence = (), next_step: NextStep | None = None
) -> Answer:
    """Return an answer that the job waits for this reason."""
    return Answer(situation, Text("waits: {reason}", reason=reason), evidence, next_step, reason)


# A cause returns None if it does not apply to the job.
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
    """Return the command that shows how the last attempt ended, or None if its log is lost.

    The log of the newest pods has all attempts in these pods. Host 0's log also begins with the
    last lines of the pods before.
    """
    last_end = snapshot.report.last_end
    started_hosts = [host for host in snapshot.hosts if host.has_started]
    if started_hosts and (last_end is None or last_end.generation >= started_hosts[0].generation):
        return launcher_command("logs", JOB_NAME)
    if last_end is not None and any(host.number == 0 for host in started_hosts):
        return launcher_command("logs", JOB_NAME, "--previous")
    if hosts.has_run_volume(snapshot.jobset):
        return launcher_command("logs", JOB_NAME, "--from-volume")
    return None


def advise_reading_logs(snapshot: Snapshot) -> NextStep:
    """Return the advice to read the log of the last attempt, or to wait if the log is lost."""
    if (command := find_end_log(snapshot)) is None:
        return advise_wait("wait: no log is left of the pods that ended.")
    return advise_run("{logs} shows how it ended.", logs=command)


# --- unread objects -------------------------------------------------------------------------------


def explain_unread_pods(snapshot: Snapshot) -> Answer | None:
    """Explain that the state of the job is unknown, because its pods could not be read."""
    if (reason := snapshot.unread_reasons.get("pods")) is None:
        return None
    reasons = ("FailedCreate", "FailedScheduling", "BackOff", "Failed", "FailedMount")
    evidence = describe_event(snapshot.find_event(*reasons))
    return Answer("unread", Text("is in an unknown state: {why}", why=reason), evidence)


def unread_answer(snapshot: Snapshot, kind: str, headline: Text) -> Answer:
    """Return an answer with this headline, and why objects of `kind` could not be read."""
    return Answer("unread", headline + describe_unread_kinds(snapshot, kind))


def describe_unread_kinds(snapshot: Snapshot, *kinds: str) -> Text:
    """Return the end of a headline if objects of one of these kinds are unread, else no text."""
    for kind in kinds:
        if (reason := snapshot.unread_reasons.get(kind)) is not None:
            return Text("; why is unknown: {why}", why=reason)
    return EMPTY_TEXT
