"""Which rank is to blame when the gang makes no progress, by the stacks of all ranks and by what NCCL says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from jaxlaunch.launcher.agent.gang import nccl_status, stacks
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.gang.stacks import Stacks
from jaxlaunch.launcher.agent.gang.verdict import Event, Kind, failure_of
from jaxlaunch.launcher.agent.leader.rank_statuses import RankStatuses
from jaxlaunch.records import messages
from jaxlaunch.records.failure import HangFacts, Numbers

# Every rank's stacks arrive within this time or never, and so does NCCL's answer.
STACKS_S = 4.0
# Thousands of ranks have hundreds of megabytes of stacks. Beyond this sum they are cut to what the verdict needs.
MAX_WHOLE_STACKS_CHARS = 4_000_000
MAX_NCCL_CHARS = 40_000


class Hang:
    """Collects stacks and NCCL's answers, and finds the rank that the others wait for."""

    def __init__(self, statuses: RankStatuses, platform: str) -> None:
        self._statuses = statuses
        self.stacks: dict[int, str] = {}
        self._stacks_chars = 0
        self.nccl = ""
        self._hosts_without_nccl = {host for host in statuses.ranks_by_host if nccl_status.asks_nccl(platform, host)}
        self._overdue: tuple[float, Event] | None = None
        self.is_requested = False
        self._blamed: Event | None = None
        # Ranks whose stacks are awaited, from the end of which those that arrived are dropped: after a timeout, and
        # since a failure that may come from a rank that stands still.
        self._awaited: list[int] | None = None
        self._doubt: tuple[float, list[int]] | None = None

    @property
    def wants_stacks(self) -> bool:
        """Whether a rank exceeded a timeout, or failed as ranks do whose peer stands still."""
        return self._overdue is not None or bool(self._doubt and self._doubt[1])

    @property
    def overdue(self) -> str | None:
        """The message about the timeout that was exceeded."""
        hang = None if self._overdue is None else self._overdue[1].hang
        return None if hang is None else messages.render_timeout(hang)

    def add_timeout(self, event: Event, now: float) -> None:
        """Record the first timeout of the attempt."""
        self._overdue = self._overdue or (now, event)

    def add_stacks(self, rank: int, text: str) -> None:
        """Record the stacks of a rank, cut if there are many already."""
        is_cut = self._stacks_chars + len(text) > MAX_WHOLE_STACKS_CHARS
        self.stacks[rank] = stacks.cut(text) if is_cut else text
        self._stacks_chars += len(self.stacks[rank])

    def add_nccl(self, host: int, text: str) -> None:
        """Record NCCL's answer on a host, and keep the longest: each is about all processes, but one may be cut."""
        self._hosts_without_nccl.discard(host)
        self.nccl = max(self.nccl, text[:MAX_NCCL_CHARS], key=len)

    def find(self, now: float) -> Event | None:
        """Return the hang, once every stack and NCCL's answer arrived or can no longer be expected."""
        if self._overdue is None:
            return None
        if self._awaited is None:
            self._awaited = list(range(len(self._statuses.by_rank)))
        is_complete = self._have_stacks(self._awaited) and not self._hosts_without_nccl
        if self._blamed is None and (now - self._overdue[0] >= STACKS_S or is_complete):
            self._blamed = self._blame(self._overdue[1])
        return self._blamed

    def awaits_stacks(self, now: float) -> bool:
        """Return whether stacks are awaited that would show which living rank does not run at all."""
        if self._doubt is None:
            ranks = [rank for rank, status in enumerate(self._statuses.by_rank) if _writes_stacks(status)]
            self._doubt = now, ranks
        return now - self._doubt[0] < STACKS_S and not self._have_stacks(self._doubt[1])

    def find_stalled_rank(self, echo: Event) -> Event | None:
        """Return the hang of a living rank that does not even handle a signal, while its peers failed as in `echo`."""
        stalled = {
            rank: status
            for rank, status in enumerate(self._statuses.by_rank)
            if self.stacks.get(rank) == "" and _writes_stacks(status) and rank != echo.rank
        }
        if not stalled:
            return None
        rank = Stacks(stalled, self.stacks).suspect(min(stalled))
        host = self._statuses.host_of(rank)
        return Event(Kind.HANG, host, rank, stalled[rank], hang=HangFacts(), peers=failure_of(echo))

    def _have_stacks(self, awaited: list[int]) -> bool:
        statuses = self._statuses.by_rank
        while awaited and (awaited[-1] in self.stacks or statuses[awaited[-1]].exit is not None):
            awaited.pop()
        return not awaited

    def _blame(self, event: Event) -> Event:
        """Return the timeout `event` with the rank that the others wait for."""
        living: Mapping[int, Status] = self._statuses.living() or {event.rank: event.status}
        analysis = Stacks(living, self.stacks)
        culprit = analysis.suspect(event.rank if event.rank in living else min(living))
        waiting, status = analysis.waiting, living[culprit]
        facts = dataclasses.replace(event.hang or HangFacts(), stacks=analysis.describe(culprit))
        if waiting and culprit not in waiting:
            late = sorted(living.keys() - waiting)
            facts = dataclasses.replace(facts, waiting=Numbers.of(waiting), late=Numbers.of(late))
        if self.nccl and (faults := nccl_status.describe(self.nccl)):
            facts = dataclasses.replace(facts, nccl=faults)
        host = self._statuses.host_of(culprit)
        return dataclasses.replace(event, rank=culprit, host=host, status=status, hang=facts)


def _writes_stacks(status: Status) -> bool:
    """Return whether the process has our hook and lives, so that it writes its stacks if it runs at all."""
    return status.jax is not None and status.exit is None and not status.left
