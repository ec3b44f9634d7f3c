"""Clocks that assign every second of a run, and of a restart, to one cause.

The time of a step counts as "step" at first. If the attempt fails before a checkpoint covers the
step, its time moves to "lost_work". The caller passes the time in monotonic seconds; only
`process_age_s` reads a clock.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Mapping

from jaxlaunch import contract

# Largest number of uncommitted steps whose times are kept.
MAX_UNCOMMITTED_STEPS = 4096
# A step is overdue after OVERDUE_FACTOR times the median of the newest steps plus OVERDUE_FLOOR_S.
# Garbage collection, checkpoints in the background and recompilation delay single steps.
OVERDUE_FACTOR, OVERDUE_FLOOR_S = 3.0, 2.0
_RECENT_STEPS, _MIN_RECENT_STEPS = 32, 3


class RestartClock:
    """Measures a restart by cause of contract.RESTART_CAUSES, until the first step of the attempt.

    Only host 0 measures: it knows its own actions and the phases of its rank 0.
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

        The leader saw the fault at `fault_at`, which was `unseen_s` after the last sign of life of
        the failed rank or host. The time from `fault_at` until `now` counts for `cause`.
        """
        self.last_seconds = self.seconds_by_cause(now)
        self._seconds = {"detect": unseen_s, cause: max(0.0, now - fault_at)}
        self._cause, self._since = "end", now

    def enter_cause(self, cause: str, now: float) -> None:
        """Count seconds for `cause` from `now` on, unless the first step is complete."""
        # No `begin` precedes the first attempt, so its "start" begins the measurement.
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
        # Pairs of a step and the value of `_seconds["step"]` when it was complete.
        self._uncommitted_steps: deque[tuple[int, float]] = deque(maxlen=MAX_UNCOMMITTED_STEPS)
        # The value of `_seconds["step"]` at the newest committed step.
        self._committed_s = 0.0
        # The value of `_seconds["step"]` at the newest report of a step.
        self._reported_s = 0.0
        # Seconds of the newest steps.
        self._recent_s: deque[float] = deque(maxlen=_RECENT_STEPS)
        # When the current step began. None during saves, evaluations and starts.
        self._step_began_at: float | None = None

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
            self._step_began_at = None
        elif self._step_began_at is None:
            self._step_began_at = now

    def record_step(self, step: int, now: float) -> None:
        """Record that `step` was complete at `now`."""
        self._add_elapsed(now)
        self._uncommitted_steps.append((step, self._seconds["step"]))
        self._recent_s.append(self._seconds["step"] - self._reported_s)
        self._step_began_at = now
        self._reported_s = self._seconds["step"]

    def record_commit(self, step: int) -> None:
        """Record that `step` is on storage, which commits the time of all steps up to it."""
        while self._uncommitted_steps and self._uncommitted_steps[0][0] <= step:
            self._committed_s = self._uncommitted_steps.popleft()[1]

    def end_failed_attempt(self, now: float) -> None:
        """End an attempt that failed: its seconds since the last commit become lost work."""
        lost_s = self.uncommitted_s(now)
        self._seconds["step"] -= lost_s
        self._seconds["lost_work"] += lost_s
        self._uncommitted_steps.clear()
        self._recent_s.clear()
        self._step_began_at = None
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

        Until an overdue step is complete, the time by which it is overdue counts as lost work: it
        may be a hang, during which goodput must not rise.
        """
        self._add_elapsed(now)
        seconds, overdue_s = dict(self._seconds), self._overdue_s()
        seconds["step"] -= overdue_s
        seconds["lost_work"] += overdue_s
        return seconds

    def _overdue_s(self) -> float:
        """Return the seconds by which the current step is overdue."""
        if self._cause != "step" or len(self._recent_s) < _MIN_RECENT_STEPS:
            return 0.0
        return max(0.0, self._seconds["step"] - self._reported_s - self._overdue_limit_s())

    def overdue_since(self, now: float) -> float | None:
        """Return the monotonic time at which the overdue step began, or None if none is overdue."""
        if self._step_began_at is None or len(self._recent_s) < _MIN_RECENT_STEPS:
            return None
        is_overdue = now - self._step_began_at > self._overdue_limit_s()
        return self._step_began_at if is_overdue else None

    def _overdue_limit_s(self) -> float:
        """Return the seconds after which a step is overdue."""
        return OVERDUE_FACTOR * statistics.median(self._recent_s) + OVERDUE_FLOOR_S

    def _add_elapsed(self, now: float) -> None:
        self._seconds[self._cause] += now - self._since
        self._since = now


def process_age_s() -> float:
    """Return the seconds since this process started, which include its imports.

    Returns 0 on systems other than Linux.
    """
    try:
        with open("/proc/self/stat") as file:
            # Field 22, starttime, of proc_pid_stat(5).
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
