"""The goodput clock: every second of a run goes to one cause of contract.CLOCK."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.restart_clock import RestartClock

SAMPLES = 4096  # steps between two commits whose time is kept


class Clock:
    """Follows one rank, since a gang moves in step. The caller gives the time, in monotonic seconds."""

    def __init__(self, now: float) -> None:
        self.restart = RestartClock()
        self._seconds = dict.fromkeys(contract.CLOCK, 0.0)
        self._cause = "rendezvous"
        self._since = self.began = now
        self._reached: deque[tuple[int, float]] = deque(maxlen=SAMPLES)  # step -> seconds of stepping until it
        self._safe_s = 0.0  # seconds of stepping that are committed

    def carry(self, seconds: Mapping[str, float]) -> None:
        """Adds the seconds by cause of earlier attempts and generations."""
        for cause, spent in seconds.items():
            if cause in self._seconds:
                self._seconds[cause] += spent
        self._safe_s += seconds.get("step", 0.0)

    def enter(self, cause: str, now: float) -> None:
        """Counts seconds to `cause` from `now` on; a cause that is not in contract.CLOCK (`done`) changes nothing."""
        self._settle(now)
        if cause in self._seconds:
            self._cause = cause

    def reached(self, step: int, now: float) -> None:
        """Notes that `step` was complete at `now`."""
        self._settle(now)
        self._reached.append((step, self._seconds["step"]))

    def committed(self, step: int) -> None:
        """Notes that `step` is on storage: the seconds that led to it cannot be lost any more."""
        while self._reached and self._reached[0][0] <= step:
            self._safe_s = self._reached.popleft()[1]

    def died(self, now: float) -> None:
        """Ends an attempt that failed: its seconds of stepping since the last commit become lost work."""
        lost = self.unsafe_s(now)
        self._seconds["step"] -= lost
        self._seconds["lost_work"] += lost
        self._reached.clear()
        self._cause = "down"

    def ended(self, now: float) -> None:
        """Ends an attempt that finished: all of its steps count."""
        self._settle(now)
        self._safe_s = self._seconds["step"]
        self._cause = "down"

    def unsafe_s(self, now: float) -> float:
        """Seconds of stepping since the last commit: lost work, if the attempt died now."""
        self._settle(now)
        return max(0.0, self._seconds["step"] - self._safe_s)

    def seconds(self, now: float) -> dict[str, float]:
        """Seconds by cause, until `now`."""
        self._settle(now)
        return dict(self._seconds)

    def _settle(self, now: float) -> None:
        self._seconds[self._cause] += now - self._since
        self._since = now


def process_age_s() -> float:
    """Seconds since this process started: the imports before its first line are part of the run."""
    try:
        with open("/proc/self/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])  # proc_pid_stat(5): field 22, starttime
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0  # not Linux
