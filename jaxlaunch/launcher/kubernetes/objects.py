"""What any API object reports of itself: conditions, times, and of a JobSet its state and its pods. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

Obj = Mapping[str, Any]  # an API object, as its JSON
SKEW_S = 30.0  # between this machine's clock and the server's; beyond, ages mislead


def condition(of: Obj, kind: str) -> Obj:
    """The condition of that type; an empty one where it was never set."""
    found = of.get("status", {}).get("conditions") or ()
    return next((one for one in found if one["type"] == kind), {})


def is_true(of: Obj, kind: str) -> bool:
    """Whether the condition of that type has status True."""
    return condition(of, kind).get("status") == "True"


def replicated(jobset: Obj) -> list[Obj]:
    """The replicated jobs of a JobSet."""
    return list(jobset.get("spec", {}).get("replicatedJobs") or ())


def terminal_state(jobset: Obj) -> str | None:
    """Completed or Failed; None while the JobSet may still run."""
    return jobset.get("status", {}).get("terminalState") or None


def is_suspended(jobset: Obj) -> bool:
    """Whether the JobSet is suspended: by Kueue until it admits the job, or by whoever stopped it."""
    return bool(jobset.get("spec", {}).get("suspend"))


def template(jobset: Obj) -> Obj:
    """The pod template of a JobSet's first replicated job; ours have but one."""
    first = next(iter(replicated(jobset)), {})
    found: Obj = first.get("template", {}).get("spec", {}).get("template", {})
    return found


def moment(text: str | None) -> datetime | None:
    """A time of the API: seconds in metadata, microseconds in leases and newer events."""
    return None if not text else datetime.fromisoformat(text)


def seconds_since(text: str | None, now: datetime) -> float | None:
    """How long ago that was; never negative, however the clocks differ."""
    then = moment(text)
    return None if then is None else max(0.0, (now - then).total_seconds())


def ahead_s(before: datetime, there: datetime, after: datetime) -> float:
    """How far this machine's clock is at least ahead of the server's, or behind it, then less than 0: by the server's
    time, which it gives to the second, and the time here before and after the request."""
    ahead, behind = (before - there).total_seconds() - 1, (there - after).total_seconds()
    return ahead if ahead > 0 else -max(behind, 0.0)


def age(seconds: float) -> str:
    """A span as kubectl writes ages: 95s, 3m20s, 47m, 5h10m, 3d."""
    whole = int(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if whole < 120:
        return f"{whole}s"
    if minutes < 10:
        return f"{minutes}m{whole % 60}s" if whole % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    return f"{hours}h" if hours < 48 else f"{days}d"
