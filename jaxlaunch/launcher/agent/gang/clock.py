"""Clocks that assign every second of a run, and of a restart, to one cause.

The caller passes the time in monotonic seconds, so only `process_age_s` reads a clock. Steps are kept until a commit
covers them: if the attempt fails first, their seconds move from "step" to "lost_work".
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping

from jaxlaunch import contract

# Steps since the last commit whose time is kept.
SAMPLES = 4096


class RestartClock:
    """Measures a restart by cause of contract.RESTART, until the first step of the attempt.

    Only host 0 measures, with its own clock and that of its rank 0.
    """

    def __init__(self) -> None:
        # Seconds of the attempt that ended last.
        self.last: Mapping[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._cause: str | None = None
        self._since = 0.0

    def begin(self, cause: str, fault_at: float, unseen_s: float, now: float) -> None:
        """Begin a restart at the end of an attempt.

        The fault was seen at `fault_at`, `unseen_s` after the last sign of life. The time from the fault until `now`
        was spent on `cause`.
        """
        self.last = self.seconds(now)
        self._seconds = {"detect": unseen_s, cause: max(0.0, now - fault_at)}
        self._cause, self._since = "end", now

    def enter(self, cause: str, now: float) -> None:
        """Count seconds for `cause` from `now` on, unless the first step is complete."""
        # The first attempt has no fault before it.
        if cause == "start" and self._cause is None:
            self._seconds, self._cause, self._since = {}, cause, now
        elif self._cause and cause in contract.RESTART:
            self._settle(now)
            self._cause = cause

    def stepped(self, now: float) -> None:
        """End the restart: the first step is complete."""
        self._settle(now)
        self._cause = None if self._cause is None else ""

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds by cause so far, in the order of contract.RESTART."""
        self._settle(now)
        return {cause: round(self._seconds[cause], 3) for cause in contract.RESTART if cause in self._seconds}

    def _settle(self, now: float) -> None:
        if self._cause:
            self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + now - self._since
            self._since = now


class Clock:
    """Goodput clock, which assigns every second to one cause of contract.CLOCK.

    It follows one rank, because the ranks of a gang step together.
    """

    def __init__(self, now: float) -> None:
        self.restart = RestartClock()
        self._seconds = dict.fromkeys(contract.CLOCK, 0.0)
        self._cause = "rendezvous"
        self._since = self.began = now
        # Pairs of a step and the seconds of stepping until it was complete.
        self._reached: deque[tuple[int, float]] = deque(maxlen=SAMPLES)
        # Seconds of stepping that are committed.
        self._safe_s = 0.0

    def carry(self, seconds: Mapping[str, float]) -> None:
        """Add the seconds by cause of earlier attempts and generations."""
        for cause, spent in seconds.items():
            if cause in self._seconds:
                self._seconds[cause] += spent
        self._safe_s += seconds.get("step", 0.0)

    def enter(self, cause: str, now: float) -> None:
        """Count seconds for `cause` from `now` on; a cause outside contract.CLOCK, such as `done`, changes nothing."""
        self._settle(now)
        if cause in self._seconds:
            self._cause = cause

    def reached(self, step: int, now: float) -> None:
        """Record that `step` was complete at `now`."""
        self._settle(now)
        self._reached.append((step, self._seconds["step"]))

    def committed(self, step: int) -> None:
        """Record that `step` is on storage: the seconds until it can no longer be lost."""
        while self._reached and self._reached[0][0] <= step:
            self._safe_s = self._reached.popleft()[1]

    def died(self, now: float) -> None:
        """End an attempt that failed: its seconds of stepping since the last commit become lost work."""
        lost = self.unsafe_s(now)
        self._seconds["step"] -= lost
        self._seconds["lost_work"] += lost
        self._reached.clear()
        self._cause = "down"

    def ended(self, now: float) -> None:
        """End an attempt that finished: all of its steps count."""
        self._settle(now)
        self._safe_s = self._seconds["step"]
        self._cause = "down"

    def unsafe_s(self, now: float) -> float:
        """Return the seconds of stepping since the last commit, which are lost if the attempt fails now."""
        self._settle(now)
        return max(0.0, self._seconds["step"] - self._safe_s)

    def seconds(self, now: float) -> dict[str, float]:
        """Return the seconds by cause until `now`."""
        self._settle(now)
        return dict(self._seconds)

    def _settle(self, now: float) -> None:
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
