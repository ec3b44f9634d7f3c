"""How the loop spends its time: steps and their parts, measured on the host at about a microsecond a step.

Steps are asynchronous, so the parts say what the loop waited for, not what the device did: `device` is the wait for the
step before, `host` is what is left when every other part is taken away.
"""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import deque
from time import perf_counter
from typing import NamedTuple

# Upper bounds of the step time histogram, in seconds: 1 ms to 10 minutes, about two to a decade.
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# The first dispatch of an attempt fills the pipeline without waiting, the second waits for a cold device.
WARMUP = 2
RECENT = 100  # steps that the median looks back on


class Part:
    """Seconds spent in one part of the loop; a context manager, entered again and again. Parts do not nest.

    The scraping thread reads while the loop writes, so what was spent and since when it is in here change as one.
    """

    __slots__ = ("_spent",)

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forgets the time spent so far."""
        self._spent: tuple[float, float | None] = (0.0, None)

    @property
    def seconds(self) -> float:
        """Seconds of the visits that have ended."""
        return self._spent[0]

    def until(self, now: float) -> float:
        """Seconds including those of the present visit until `now`: they never fall."""
        seconds, began = self._spent
        return seconds if began is None else seconds + max(0.0, now - began)

    def __enter__(self) -> None:
        self._spent = (self._spent[0], perf_counter())

    def __exit__(self, *raised: object) -> None:
        self._spent = (self.until(perf_counter()), None)


class Interval(NamedTuple):
    """What happened between two calls of `StepTimer.interval`."""

    seconds: float  # of wall time
    parts: dict[str, float]  # seconds by part; they add up to `seconds`
    steps_per_s: float | None  # after warm-up, evaluation and saves left out; None within the warm-up


class Mark(NamedTuple):
    """A moment between two steps."""

    steps: int
    ended: float
    paused: float  # seconds of evaluation and saves until then


class StepTimer:
    """Counts steps and splits the time between them."""

    def __init__(self) -> None:
        self._parts = {"data": Part(), "device": Part(), "save": Part(), "eval": Part()}
        self._save, self._eval = self._parts["save"], self._parts["eval"]
        self.steps = self._dispatches = 0
        self.counts = [0] * (len(BOUNDS) + 1)  # of steps by time, last: longer than every bound
        self.seconds = 0.0  # of all counted steps
        self._recent: deque[float] = deque(maxlen=RECENT)
        self.start()

    def start(self) -> None:
        """The loop begins now: what came before (restore, compile) is no step's time."""
        for part in self._parts.values():
            part.clear()
        self._began = perf_counter()
        self._host = 0.0
        self._last = Mark(self.steps, self._began, 0.0)
        self._warm: Mark | None = None  # what the next interval's speed is measured from
        self._seen = self.parts()

    def part(self, name: str) -> Part:
        """The part `name` (data, device, save, eval), to be entered with `with`."""
        return self._parts[name]

    def step_done(self, count: int = 1) -> None:
        """One more step went through the loop, or `count` of them in one dispatch."""
        before = self._last
        now, paused = perf_counter(), self._save.seconds + self._eval.seconds
        seconds = now - before.ended - (paused - before.paused)
        self.steps += count
        self._dispatches += 1
        self._last = Mark(self.steps, now, paused)
        self.counts[bisect_left(BOUNDS, seconds / count)] += count
        self.seconds += seconds
        if self._dispatches > WARMUP:
            self._recent.append(seconds / count)
        elif self._dispatches == WARMUP:
            self._warm = self._last

    def interval(self, share: float = 1.0) -> Interval:
        """What happened since the last call; of the time only this share, whose rest is left for the next call."""
        before, now = self._seen, self.parts()
        parts = {name: (seconds - before[name]) * share for name, seconds in now.items()}
        self._seen = now if share == 1.0 else {name: before[name] + seconds for name, seconds in parts.items()}
        steps_per_s = None
        if self._warm is not None and self._last.steps > self._warm.steps:
            busy = self._last.ended - self._warm.ended - (self._last.paused - self._warm.paused)
            steps_per_s = (self._last.steps - self._warm.steps) / busy
            self._warm = self._last
        return Interval(sum(parts.values()), parts, steps_per_s)

    def median_s(self) -> float | None:
        """Median of the last RECENT steps after warm-up; None before there is one."""
        return statistics.median(self._recent) if self._recent else None

    def parts(self) -> dict[str, float]:
        """Seconds by part since the start; `host` is what no other part took. Counters: none of them ever falls."""
        now = perf_counter()
        named = {name: part.until(now) for name, part in self._parts.items()}
        self._host = max(self._host, now - self._began - sum(named.values()))
        return named | {"host": self._host}
