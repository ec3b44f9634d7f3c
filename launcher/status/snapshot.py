"""What was seen of one job on a cluster, as plain data, and what follows at once. Pure; launcher.world looks."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from functools import cached_property

from launcher import hosts, placement, testimony
from launcher.hosts import Host
from launcher.jobset import OWN_LABEL
from launcher.objects import Obj
from launcher.testimony import Testimony, Word


@dataclasses.dataclass(frozen=True)
class World:
    """The objects of one job, cut down to what is asked of them; what is None was not there or not looked for."""

    namespace: str
    name: str
    now: datetime
    jobset: Obj | None = None
    jobs: tuple[Obj, ...] = ()
    pods: tuple[Obj, ...] = ()  # as launcher.slim leaves them
    events: tuple[Obj, ...] = ()  # folded, the newest first
    workload: Obj | None = None
    local_queue: Obj | None = None
    cluster_queue: Obj | None = None
    nodes: tuple[Obj, ...] | None = None
    words: tuple[Word, ...] = ()
    neighbours: tuple[str, ...] = ()  # names of the namespace's JobSets, where this one is not among them
    unread: tuple[str, ...] = ()  # what could not be looked at, and why

    @cached_property
    def hosts(self) -> list[Host]:
        """The hosts of the last generation that has pods."""
        return [] if self.jobset is None else hosts.newest(self.jobset, self.pods)

    @cached_property
    def told(self) -> Testimony:
        return testimony.fold(self.words, self.hosts)

    @property
    def wanted(self) -> int:
        return 0 if self.jobset is None else hosts.wanted(self.jobset)

    @property
    def is_ours(self) -> bool:
        return self.jobset is not None and OWN_LABEL in self.jobset["metadata"].get("labels", {})

    @property
    def queue(self) -> str | None:
        """The LocalQueue it waits or waited in."""
        labels = {} if self.jobset is None else self.jobset["metadata"].get("labels", {})
        return labels.get(placement.QUEUE)

    @property
    def restarts(self) -> int:
        """Generations that ended before the one of now; JobSet counts them."""
        return 0 if self.jobset is None else int(self.jobset.get("status", {}).get("restarts", 0))

    @property
    def is_suspended(self) -> bool:
        return self.jobset is not None and bool(self.jobset.get("spec", {}).get("suspend"))

    def said(self, *reasons: str, kind: str = "") -> Obj | None:
        """The newest event with one of these reasons, about objects of that kind."""
        return next((one for one in self.events if one["reason"] in reasons and kind in ("", one["kind"])), None)
