"""Statuses of all ranks of an attempt, with counts that are updated incrementally.

A gang of 80,000 ranks sends thousands of heartbeats per second. Therefore no message may cost a
pass over all ranks, and ranks with equal statuses share one `Status` object.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxlaunch.launcher.agent.gang.progress import Status, format_rank_range, parse_rank_range
from jaxlaunch.launcher.agent.io.link import HEARTBEAT_S

# The ranks of a gang reach the same statuses one after another. This many recent statuses are kept
# to be shared, with this many successors of each.
MAX_SHARED, MAX_SUCCESSORS = 128, 16

# Largest age of the newest report of a rank: a heartbeat interval, and time for the messages from
# the program to its agent and from the agent to the leader.
REPORT_AGE_S = HEARTBEAT_S + 0.5

Counted = TypeVar("Counted", int, str)
Key = TypeVar("Key")
Value = TypeVar("Value")


class RankStatuses:
    """Newest status of every rank.

    Attributes:
        ranks_by_host: Ranks of each host, from 0 on without a gap.
        by_rank: Statuses by rank number. A list, because the statuses of a host are read and
            replaced as one slice.
        alive_count: Number of ranks that have not ended.
        unfinished_count: Number of ranks whose program runs, or ended with an error.
        unclean_count: Number of ranks that have not ended cleanly.
        undone_count: Number of ranks that have not reported that they are done.
        committed: Newest step on storage, restored or committed by any rank.
        first_committed: First step that this attempt committed.
        versions: Number of ranks by version of JAX.
    """

    def __init__(self, ranks_by_host: Mapping[int, range]) -> None:
        self.ranks_by_host = ranks_by_host
        count = sum(map(len, ranks_by_host.values()))
        self.by_rank = [Status()] * count
        self.alive_count = self.unfinished_count = self.unclean_count = self.undone_count = count
        self.committed: int | None = None
        self.first_committed: int | None = None
        self.versions: dict[str, int] = {}
        self._steps: dict[int, int] = {}
        # Pairs of a monotonic time and the step of the foremost rank at that time.
        self._foremost_steps: deque[tuple[float, int | None]] = deque()
        self._host_keys = {
            host: format_rank_range(ranks[0], ranks[-1]) for host, ranks in ranks_by_host.items()
        }
        self._shared_statuses = SharedStatuses()

    @property
    def first_step(self) -> int | None:
        """Newest step of the rank that is furthest behind, among those that report steps."""
        return min(self._steps, default=None)

    @property
    def trained_step(self) -> int | None:
        """First step that the attempt trains, the one after the restored step."""
        return self.by_rank[0].first_step if self.by_rank else None

    @property
    def last_step(self) -> int | None:
        """Newest step of the foremost rank."""
        return max(self._steps, default=None)

    def settled_step(self, now: float) -> int:
        """Return the step that the foremost rank had reported REPORT_AGE_S ago, 0 if none.

        A rank is behind if it has not reached this step. It must not be compared with the newest
        step of the foremost rank, because its own newest report may be REPORT_AGE_S old. This must
        be called regularly; `now` is in monotonic seconds.
        """
        self._foremost_steps.append((now, self.last_step))
        while len(self._foremost_steps) > 1 and self._foremost_steps[1][0] <= now - REPORT_AGE_S:
            self._foremost_steps.popleft()
        # Until a rank has reported a step, no rank is behind.
        return self._foremost_steps[0][1] or 0

    def running_statuses(self) -> dict[int, Status]:
        """Return the statuses of ranks that have not ended and do not wait for others to end."""
        return {rank: status for rank, status in enumerate(self.by_rank) if not status.is_ending}

    def find_host(self, rank: int) -> int:
        """Return the host that holds a rank."""
        return next(host for host, ranks in self.ranks_by_host.items() if rank in ranks)

    def update(self, statuses: Mapping[int, Status]) -> None:
        """Replace the statuses of some ranks."""
        for rank, status in statuses.items():
            self.set_range(range(rank, rank + 1), status)

    def merge_changes(self, host: int, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Apply the changes in a beat of a host, as `progress.StatusChanges` wrote them.

        Raises:
            ValueError, TypeError: A key or a field is malformed.
        """
        # A spare has no ranks, and its beats have no changes.
        for key, fields in changes.items():
            ranks = self.ranks_by_host[host]
            if key != self._host_keys[host]:
                ranks = parse_rank_range(key, ranks)
            statuses = self.by_rank[ranks.start : ranks.stop]
            # The ranks of a host nearly always have the same status.
            if statuses.count(statuses[0]) == len(statuses):
                self.set_range(ranks, self._shared_statuses.apply_changes(statuses[0], fields))
                continue
            for rank, status in zip(ranks, statuses, strict=True):
                self.set_range(
                    range(rank, rank + 1), self._shared_statuses.apply_changes(status, fields)
                )

    def set_range(self, ranks: range, new_status: Status) -> None:
        """Replace the status of consecutive ranks, which must all have had the same one."""
        old_status, count = self.by_rank[ranks.start], len(ranks)
        if new_status is old_status:
            return
        self.by_rank[ranks.start : ranks.stop] = [new_status] * count
        if new_status.step != old_status.step:
            _move_count(self._steps, old_status.step, new_status.step, count)
        if new_status.jax != old_status.jax:
            _move_count(self.versions, old_status.jax, new_status.jax, count)
        committed, first = new_status.committed, new_status.first_committed
        if committed is not None and (self.committed is None or committed > self.committed):
            self.committed = committed
        if first is not None and (self.first_committed is None or first < self.first_committed):
            self.first_committed = first
        if new_status.done is not old_status.done:
            self.undone_count += count * (old_status.done - new_status.done)
        has_ended = new_status.exit is not None or old_status.exit is not None
        if has_ended or new_status.is_ending is not old_status.is_ending:
            self.alive_count += count * ((new_status.exit is None) - (old_status.exit is None))
            self.unfinished_count += count * (old_status.has_finished - new_status.has_finished)
            self.unclean_count += count * (
                old_status.has_ended_cleanly - new_status.has_ended_cleanly
            )


class SharedStatuses:
    """Cache of `Status` objects, so that ranks with equal statuses share one object."""

    def __init__(self) -> None:
        # By the id of the old status, which the entry keeps alive: the changes that were applied to
        # it, each with the resulting status.
        self._successors: dict[int, tuple[Status, list[tuple[Mapping[str, Any], Status]]]] = {}
        self._recent: dict[tuple[str | None, int | None], Status] = {}

    def apply_changes(self, old_status: Status, fields: Mapping[str, Any]) -> Status:
        """Return the status with these changes. Raises MalformedError for a wrong field."""
        entry = self._successors.get(id(old_status))
        if entry is not None:
            for changes, new_status in entry[1]:
                if changes == fields:
                    return new_status
        new_status = self._find_equal(old_status.with_changes(fields))
        if entry is None:
            _cache_value(self._successors, id(old_status), (old_status, [(fields, new_status)]))
        elif len(entry[1]) < MAX_SUCCESSORS:
            entry[1].append((fields, new_status))
        return new_status

    def _find_equal(self, status: Status) -> Status:
        """Return a recent status that is equal, if there is one."""
        phase_and_step = status.phase, status.step
        if (recent_status := self._recent.get(phase_and_step)) == status:
            return recent_status
        _cache_value(self._recent, phase_and_step, status)
        return status


def _cache_value(cache: dict[Key, Value], key: Key, value: Value) -> None:
    cache[key] = value
    if len(cache) > MAX_SHARED:
        del cache[next(iter(cache))]


def _move_count(
    counts: dict[Counted, int], old_key: Counted | None, new_key: Counted | None, rank_count: int
) -> None:
    """Move a number of ranks from one count to another; a count of 0 has no entry."""
    if new_key is not None:
        counts[new_key] = counts.get(new_key, 0) + rank_count
    if old_key is not None:
        counts[old_key] -= rank_count
        if not counts[old_key]:
            del counts[old_key]
