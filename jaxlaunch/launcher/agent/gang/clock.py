"""Clocks that assign every second of a run, and of a restart, to one cause.

The caller passes the time in monotonic seconds, so only `process_age_s` reads a clock. Steps are
kept until a commit covers them: if the attempt fails first, their seconds move from "step" to
"lost_work".
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Mapping

from jaxlaunch import contract

# Steps since the last commit whose time is kept.
MAX_UNCOMMITTED_STEPS = 4096
# A step is overdue after this many times the median of the newest steps, and this long in addition.
# Collections, checkpoints in the background and recompilations delay single steps.
OVERDUE_FACTOR, OVERDUE_FLOOR_S = 3.0, 2.0
_RECENT_STEPS, _MIN_RECENT_STEPS = 32, 3


class RestartClock:
    """Measures a restart by cause of contract.RESTART_CAUSES, until the first step of the attempt.

    Only host 0 measures, with its own clock and that of its rank 0.
    """

    def __init__(self) -> None:
        # Seconds of the attempt that ended last.
        self.last_seconds: Mapping[str, float] = {}
        self._seconds: dict[str, float] = {}
        # None before the first attempt, and empty after the first step of an attempt.
        self._cause: str | None = None
        self._since = 0.0

    def begin(self, cause: str, fault_at: float, unseen_s: float, now: float) -> None:
        """Begin a restart at the end of an attempt.

        The fault was seen at `fault_at`, `unseen_s` after the last sign of life. The time from the
        fault until `now` was spent on `cause`.
        """
        self.last_seconds = self.seconds_by_cause(now)
        self._seconds = {"detect": unseen_s, cause: max(0.0, now - fault_at)}
        self._cause, self._since = "end", now

    def enter_cause(self, cause: str, now: float) -> None:
        """Count seconds for `cause` from `now` on, unless the first step is complete."""
        # The first attempt has no fault before it.
        if cause == "start" and self._cause is None:
            self._seconds, self._cause, self._since = {}, cause, now
        elif self._cause and cause in contract.RESTART_CAUSES:
            self._add_elapsed(now)
            self._cause = cause

    def complete_first_step(self, now: float) -> None:
        """End the restart, because the first step is complete."""
        self._add_elapsed(now)
        self._cause = None if self._cause is None else ""

    def seconds_by_cause(self, now: float) -> dict[str, float]:
        """Return the seconds by cause so far, in the order of contract.RESTART_CAUSES."""
        self._add_elapsed(now)
        causes = [cause for cause in contract.RESTART_CAUSES if cause in self._seconds]
        return {cause: round(self._seconds[cause], 3) for cause in causes}

    def _add_elapsed(self, now: float) -> None:
        if self._cause:
            self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + now - self._since
            self._since = now


class Clock:
    """Goodput clock, which assigns every second to one cause of contract.CLOCK_CAUSES.

    It follows one rank, because the ranks of a gang step together.
    """

    def __init__(self, now: float) -> None:
        self.restart = RestartClock()
        self._seconds = dict.fromkeys(contract.CLOCK_CAUSES, 0.0)
        self._cause = "rendezvous"
        self._since = self.started_at = now
        # Pairs of a step and the seconds of stepping until it was complete.
        self._uncommitted_steps: deque[tuple[int, float]] = deque(maxlen=MAX_UNCOMMITTED_STEPS)
        # Seconds of stepping that are committed.
        self._committed_s = 0.0
        # Seconds of stepping until the newest report of a step, and between the newest reports.
        self._reported_s = 0.0
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        # When the step began that is not complete; None during saves, evaluations and starts.
        self._busy_since: float | None = None

    def add_earlier_seconds(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds by cause of earlier attempts and generations."""
        for cause, spent_s in seconds.items():
            if cause in self._seconds:
                self._seconds[cause] += spent_s
        self._committed_s += seconds.get("step", 0.0)
        self._reported_s = self._seconds["step"]

    def enter_cause(self, cause: str, now: float) -> None:
        """Count seconds for `cause` from `now` on, if it is in contract.CLOCK_CAUSES."""
        self._add_elapsed(now)
        if cause in self._seconds:
            self._cause = cause
        if cause not in ("step", "data"):
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now

    def record_step(self, step: int, now: float) -> None:
        """Record that `step` was complete at `now`."""
        self._add_elapsed(now)
        self._uncommitted_steps.append((step, self._seconds["step"]))
        self._recent_s.append(self._seconds["step"] - self._reported_s)
        self._busy_since = now
        self._reported_s = self._seconds["step"]

    def record_commit(self, step: int) -> None:
        """Record that `step` is on storage, so that the seconds of steps until it are committed."""
        while self._uncommitted_steps and self._uncommitted_steps[0][0] <= step:
            self._committed_s = self._uncommitted_steps.popleft()[1]

    def end_failed_attempt(self, now: float) -> None:
        """End an attempt that failed: its seconds since the last commit become lost work."""
        lost_s = self.uncommitted_s(now)
        self._seconds["step"] -= lost_s
        self._seconds["lost_work"] += lost_s
        self._uncommitted_steps.clear()
        self._recent_s.clear()
        self._busy_since = None
        self._reported_s = self._seconds["step"]
        self._cause = "down"

    def end_finished_attempt(self, now: float) -> None:
        """End an attempt that finished: all of its steps count."""
        self._add_elapsed(now)
        self._committed_s = self._seconds["step"]
        self._cause = "down"

    def uncommitted_s(self, now: float) -> float:
        """Return the seconds of steps since the last commit, which a failure would lose."""
        self._add_elapsed(now)
        return max(0.0, self._seconds["step"] - self._committed_s)

    def seconds_by_cause(self, now: float) -> dict[str, float]:
        """Return the seconds by cause until `now`.

        The seconds by which a step is overdue are lost work until it is complete: they are those of
        a hang, during which goodput would rise if they counted as a step.
        """
        self._add_elapsed(now)
        seconds, overdue_s = dict(self._seconds), self._overdue_s()
        seconds["step"] -= overdue_s
        seconds["lost_work"] += overdue_s
        return seconds

    def _overdue_s(self) -> float:
        """Return how long the step that is not complete takes beyond what is usual."""
        if self._cause != "step" or len(self._recent_s) < _MIN_RECENT_STEPS:
            return 0.0
        return max(0.0, self._seconds["step"] - self._reported_s - self._usual_s())

    def overdue_since(self, now: float) -> float | None:
        """Return since when the step takes that is overdue, in monotonic seconds, else None."""
        if self._busy_since is None or len(self._recent_s) < _MIN_RECENT_STEPS:
            return None
        is_overdue = now - self._busy_since > self._usual_s()
        return self._busy_since if is_overdue else None

    def _usual_s(self) -> float:
        return OVERDUE_FACTOR * statistics.median(self._recent_s) + OVERDUE_FLOOR_S

    def _add_elapsed(self, now: float) -> None:
        self._seconds[self._cause] += now - self._since
        self._since = now


def process_age_s() -> float:
    """Return the seconds since this process started, because its imports are part of the run.

    Returns 0 on systems other than Linux.
    """
    try:
        with open("/proc/self/stat") as file:
            # Field 22, starttime, of proc_pid_stat(5).
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
