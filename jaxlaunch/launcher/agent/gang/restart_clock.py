"""Where the seconds of a restart went: from the fault to the first new step, by cause of contract.RESTART."""

from __future__ import annotations

from collections.abc import Mapping

from jaxlaunch import contract


class RestartClock:
    """Follows the restart that is under way, and then the attempt's first step. The caller gives the time, in monotonic
    seconds; host 0 alone measures, with its own clock and that of its rank 0."""

    def __init__(self) -> None:
        self.last: Mapping[str, float] = {}  # of the attempt that ended last
        self._seconds: dict[str, float] = {}
        self._cause: str | None = None
        self._since = 0.0

    def begin(self, cause: str, fault_at: float, unseen_s: float, now: float) -> None:
        """Takes in the end of an attempt, whose fault was seen at `fault_at`, `unseen_s` after the last sign of life.
        What came between that and `now` is of `cause`."""
        self.last = self.seconds(now)
        self._seconds = {"detect": unseen_s, cause: max(0.0, now - fault_at)}
        self._cause, self._since = "end", now

    def enter(self, cause: str, now: float) -> None:
        """Counts seconds to `cause` from `now` on, unless the first step is complete."""
        if cause == "start" and self._cause is None:  # of the first attempt
            self._seconds, self._cause, self._since = {}, cause, now
        elif self._cause and cause in contract.RESTART:
            self._settle(now)
            self._cause = cause

    def stepped(self, now: float) -> None:
        """Takes in that the first step is complete: the restart is over."""
        self._settle(now)
        self._cause = None if self._cause is None else ""

    def seconds(self, now: float) -> dict[str, float]:
        """Seconds by cause so far, in the order of contract.RESTART."""
        self._settle(now)
        return {cause: round(self._seconds[cause], 3) for cause in contract.RESTART if cause in self._seconds}

    def _settle(self, now: float) -> None:
        if self._cause:
            self._seconds[self._cause] = self._seconds.get(self._cause, 0.0) + now - self._since
            self._since = now
