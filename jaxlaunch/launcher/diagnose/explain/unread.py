"""What a job does is not known where its objects could not be read: that is said, and never taken for their absence.

Pure.
"""

from __future__ import annotations

from jaxlaunch.launcher.diagnose.explain.answer import Answer, quoted
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot


def why(snapshot: Snapshot, plural: str) -> str:
    """The message about objects of a kind that could not be read."""
    return next((text for text in snapshot.unread if text.startswith(f"{plural} ")), "")


def pods(snapshot: Snapshot) -> Answer | None:
    """Its pods could not be read, and only they show how far it is."""
    if "pods" not in snapshot.not_read:
        return None
    event = snapshot.event("FailedCreate", "FailedScheduling", "BackOff", "Failed", "FailedMount")
    return Answer("unread", f"is in an unknown state: {why(snapshot, 'pods')}", quoted(event))


def stopped(snapshot: Snapshot) -> Answer:
    """It is stopped, and neither its pods nor its Jobs could be read, which say whether it still saves."""
    headline = f"is stopped; whether its pods have ended is unknown: {why(snapshot, 'pods')}"
    return Answer("unread", headline)


def log(snapshot: Snapshot) -> str:
    """Why it is not known what running pods do, as the end of a headline; empty where it is."""
    return f"; what they do is unknown: {why(snapshot, 'the log')}" if "log" in snapshot.not_read else ""


def because(snapshot: Snapshot, *plurals: str) -> str:
    """Why a reason may be missing, as the end of a headline; empty where these kinds were read."""
    missing = next((plural for plural in plurals if plural in snapshot.not_read), None)
    return "" if missing is None else f"; why is unknown: {why(snapshot, missing)}"


def workload(snapshot: Snapshot) -> Answer:
    """It is suspended, and its Workload could not be read, which says by whom."""
    lead = f"is suspended, by queue {snapshot.queue} or by `launcher stop`"
    return Answer("unread", f"{lead}: {why(snapshot, 'workloads')}")


def reasons(snapshot: Snapshot, plural: str, headline: str) -> Answer:
    """Something is missing, and the objects that say why could not be read."""
    return Answer("unread", f"{headline}; why is unknown: {why(snapshot, plural)}")
