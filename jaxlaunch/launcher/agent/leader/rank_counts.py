"""Counts over the statuses of all ranks, kept as they change: no message may cost a look at every rank, nor a status
of its own; and such looks, every few seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.leader.latest_writer import LatestWriter
from jaxlaunch.records.rank_history import ENDED, FILE, LETTERS, UNKNOWN, RankHistory
from jaxlaunch.runs.run_folder import RunFolder

MOST_SHARED = 128  # statuses that are remembered for the next ranks that come to them
MOST_AFTER = 16  # ... after one of them

Counted = TypeVar("Counted", int, str)
Key = TypeVar("Key")
Value = TypeVar("Value")


class RankCounts:
    """The newest status of every rank, and counts over them."""

    def __init__(self, count: int) -> None:
        self.statuses = [Status()] * count  # a list: those of a host's ranks are read and replaced at once
        self.alive = self.staying = self.unclean = count  # not ended; nor leaving; not ended clean
        self.committed: int | None = None  # the newest step on storage, of any rank
        self.first_committed: int | None = None  # the first that this attempt committed
        self.versions: dict[str, int] = {}  # of JAX
        self._steps: dict[int, int] = {}

    @property
    def first_step(self) -> int | None:
        """The step that is complete on every rank that reports one."""
        return min(self._steps, default=None)

    @property
    def last_step(self) -> int | None:
        """The step of the foremost rank."""
        return max(self._steps, default=None)

    def put(self, ranks: range, after: Status) -> None:
        """Replaces the status of ranks, which all had the same one: most ranks of a host change alike."""
        before, count = self.statuses[ranks.start], len(ranks)
        if after is before:
            return
        self.statuses[ranks.start : ranks.stop] = [after] * count
        if after.step != before.step:
            _move(self._steps, before.step, after.step, count)
        if after.jax != before.jax:
            _move(self.versions, before.jax, after.jax, count)
        if after.committed is not None and (self.committed is None or after.committed > self.committed):
            self.committed = after.committed
        first = after.first_committed
        if first is not None and (self.first_committed is None or first < self.first_committed):
            self.first_committed = first
        if after.exit is not None or before.exit is not None or after.left is not before.left:
            self.alive += count * ((after.exit is None) - (before.exit is None))
            self.staying += count * (_stays(after) - _stays(before))
            self.unclean += count * (before.ended_clean - after.ended_clean)


class SharedStatuses:
    """Makes one status for all ranks that come to the same: those of a gang step together, and beat one by one."""

    def __init__(self) -> None:
        self._after: dict[int, tuple[Status, list[tuple[Mapping[str, Any], Status]]]] = {}  # by what was changed
        self._made: dict[tuple[str | None, int | None], Status] = {}

    def changed(self, before: Status, fields: Mapping[str, Any]) -> Status:
        """`before.changed(fields)`. Raises Malformed as that does."""
        known = self._after.get(id(before))
        if known is not None:
            for given, after in known[1]:
                if given == fields:
                    return after
        after = self._share(before.changed(fields))
        if known is None:
            _remember(self._after, id(before), (before, [(fields, after)]))
        elif len(known[1]) < MOST_AFTER:
            known[1].append((fields, after))
        return after

    def _share(self, made: Status) -> Status:
        """A status equal to `made`: ranks come to one step from the same one before, or from several."""
        place = made.phase, made.step
        if (known := self._made.get(place)) == made:
            return known
        _remember(self._made, place, made)
        return made


class RankLooks:
    """Looks at the ranks every few seconds, and keeps what it saw in the run folder. Nothing waits for that."""

    def __init__(self, folder: RunFolder) -> None:
        self._history = RankHistory.from_json(folder.read(FILE))
        self._writer = LatestWriter[bytes](lambda data: folder.replace(FILE, data))
        self._kept_at = -math.inf

    def look(self, statuses: Sequence[Status], keep_every_s: float, *, is_due: bool = False) -> None:
        """Looks where it is time to, or `is_due`, and has the file written where the last time is long enough ago."""
        if not statuses or not (is_due or self._history.is_due(time.time())):
            return
        letters = (LETTERS.get(each.phase, UNKNOWN) if each.exit is None else ENDED for each in statuses)
        self._history.add(time.time(), letters, (each.step if each.stepped else None for each in statuses))
        if (now := time.monotonic()) - self._kept_at >= keep_every_s:
            self._kept_at = now
            self._writer.keep(self._history.encoded())


def _remember(known: dict[Key, Value], key: Key, value: Value) -> None:
    """Adds a value, and forgets the oldest where there are too many."""
    known[key] = value
    if len(known) > MOST_SHARED:
        del known[next(iter(known))]


def _stays(status: Status) -> bool:
    return not status.left and status.exit is None


def _move(counts: dict[Counted, int], before: Counted | None, after: Counted | None, ranks: int) -> None:
    """Counts `ranks` less at `before` and more at `after`; a count of 0 is no entry."""
    if after is not None:
        counts[after] = counts.get(after, 0) + ranks
    if before is not None:
        counts[before] -= ranks
        if not counts[before]:
            del counts[before]
