"""The goodput clock: every second of a run goes to one cause of contract.CLOCK."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from trainer import contract

SAMPLES = 4096  # steps between two commits whose time is remembered


class Clock:
    """Time comes from outside, in monotonic seconds. It follows one rank: a gang moves in step."""

    def __init__(self, now: float) -> None:
        self._seconds = dict.fromkeys(contract.CLOCK, 0.0)
        self._cause = "rendezvous"
        self._since = now
        self._reached: deque[tuple[int, float]] = deque(maxlen=SAMPLES)  # step -> seconds of stepping until it
        self._safe_s = 0.0  # seconds of stepping that are committed

    def carry(self, seconds: Mapping[str, float]) -> None:
        """Adds what earlier attempts and generations spent."""
        for cause, spent in seconds.items():
            if cause in self._seconds:
                self._seconds[cause] += spent
        self._safe_s += seconds.get("step", 0.0)

    def enter(self, cause: str, now: float) -> None:
        """From `now` on seconds go to `cause`; a cause the clock does not know (`done`) stops nothing."""
        self._settle(now)
        if cause in self._seconds:
            self._cause = cause

    def reached(self, step: int, now: float) -> None:
        self._settle(now)
        self._reached.append((step, self._seconds["step"]))

    def committed(self, step: int) -> None:
        """The seconds that led to `step` cannot be lost any more."""
        while self._reached and self._reached[0][0] <= step:
            self._safe_s = self._reached.popleft()[1]

    def died(self, now: float) -> None:
        """An attempt ended: its steps since the last commit were for nothing. Then nothing runs."""
        self._settle(now)
        lost = max(0.0, self._seconds["step"] - self._safe_s)
        self._seconds["step"] -= lost
        self._seconds["lost_work"] += lost
        self._reached.clear()
        self._cause = "down"

    def ended(self, now: float) -> None:
        """An attempt ended as it should: what it did stays."""
        self._settle(now)
        self._safe_s = self._seconds["step"]
        self._cause = "down"

    def seconds(self, now: float) -> dict[str, float]:
        self._settle(now)
        return dict(self._seconds)

    def _settle(self, now: float) -> None:
        self._seconds[self._cause] += now - self._since
        self._since = now


def ratio(seconds: Mapping[str, float]) -> float | None:
    """The share of all seconds that went into steps that count; None when no step was ever reported."""
    total = sum(seconds.values())
    return seconds["step"] / total if total > 0 and seconds["step"] > 0 else None
