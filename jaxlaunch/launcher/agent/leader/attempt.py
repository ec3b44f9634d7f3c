"""One attempt, as the leader sees it: its symptoms, and when they suffice for a verdict. No socket, no clock."""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang import nccl_status, stacks
from jaxlaunch.launcher.agent.gang.progress import Status, key_of, ranks_of
from jaxlaunch.launcher.agent.gang.stacks import Stacks
from jaxlaunch.launcher.agent.gang.verdict import (
    Closeness,
    Event,
    Kind,
    Symptoms,
    closeness,
    decide,
    settle_s,
    verdict_of,
)
from jaxlaunch.launcher.agent.leader.rank_counts import RankCounts, SharedStatuses
from jaxlaunch.records.verdict import Verdict, names, of_code

BARRIER_PATIENCE_S = contract.SHUTDOWN_TIMEOUT_S - 2.0  # less than JAX waits: after that all ranks abort alike
_OF_A_LOST_HOST = (Closeness.ABORT, Closeness.ECHO)  # how the death of one host reads on the others
ON_ITS_WAY_S = 0.2  # a message that arrives within this may have been sent before
STOPPED = (contract.PREEMPTED, "stopped from outside")
WHOLE_STACKS_CHARS = 4_000_000  # of all ranks together: thousands of ranks have hundreds of megabytes
STACKS_S = 4.0  # every rank's stacks come within this, or never, and so does NCCL's answer
LOST_SAVE_S = 3.0  # after a host is lost while ranks save: none of them waits for it in vain for long
MAX_NCCL_CHARS = 40_000  # with the kernel's messages


class Attempt:
    """Collects the symptoms; call `verdict` again after each of them and as time passes."""

    def __init__(self, number: int, ranks: Mapping[int, range], platform: str = "cpu") -> None:
        """`ranks` are those of each host, from 0 on without a gap."""
        self.number = number
        self._counts = RankCounts(sum(map(len, ranks.values())))
        self.stacks: dict[int, str] = {}
        self._stack_chars = 0
        self.nccl = ""  # what NCCL's RAS said of a hang
        self._without_nccl = {host for host in ranks if nccl_status.asks_nccl(platform, host)}  # it may still come
        self._ranks = ranks
        self._whole = {host: key_of(own[0], own[-1]) for host, own in ranks.items()}  # in a message, all of a host
        self._shared = SharedStatuses()
        self._symptoms = Symptoms()
        self._overdue: tuple[float, Event] | None = None
        self._hung: Event | None = None  # ... with the rank that is to blame, once all stacks are there
        self._without_stacks: list[int] | None = None  # ranks whose stacks may still come
        self._doubted: tuple[float, list[int]] | None = None  # ranks whose stacks may show who kept the others waiting
        self._silent: tuple[float, list[int]] | None = None  # hosts without a message since then
        self._fault: tuple[float, float] | None = None  # when the first was seen, how long after the last sign of life
        self._lost = 0  # ranks that had not ended when their host was lost
        self._stop_by: float | None = None
        self._stopped_at = 0.0
        self._stopped_by = STOPPED  # the code of a stop, and its words
        self._is_killed = False

    # --- symptoms -----------------------------------------------------------------------------------------------------

    @property
    def statuses(self) -> Sequence[Status]:
        """The newest status of every rank, by its number."""
        return self._counts.statuses

    def update(self, statuses: Mapping[int, Status]) -> None:
        """Takes in the newest status of some ranks."""
        for rank, status in statuses.items():
            self._counts.put(range(rank, rank + 1), status)

    def merge(self, host: int, changes: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes in what changed on a host, as progress.Changes wrote it. Raises TypeError or ValueError for others."""
        for key, fields in changes.items():
            own = self._ranks[host]
            ranks = own if key == self._whole[host] else ranks_of(key, own)
            each = self._counts.statuses[ranks.start : ranks.stop]
            if each.count(each[0]) == len(each):  # nearly always
                self._counts.put(ranks, self._shared.changed(each[0], fields))
                continue
            for rank, before in zip(ranks, each, strict=True):
                self._counts.put(range(rank, rank + 1), self._shared.changed(before, fields))

    def add(self, event: Event, now: float) -> None:
        """Takes in an event, with the status of its rank."""
        self.update({event.rank: event.status})
        event = dataclasses.replace(event, is_alone=len(self.statuses) == 1)
        if self._fault is None and closeness(event) is not None:
            self._fault = now, event.unseen_s
        if event.kind is Kind.HANG:
            self._overdue = self._overdue or (now, event)
        else:
            self._symptoms.add(event, now)

    def add_stacks(self, rank: int, text: str) -> None:
        """Takes in the stacks of a rank; of a large gang most are cut to what the verdict needs."""
        is_much = self._stack_chars + len(text) > WHOLE_STACKS_CHARS
        self.stacks[rank] = stacks.cut(text) if is_much else text
        self._stack_chars += len(self.stacks[rank])

    def add_nccl(self, host: int, text: str) -> None:
        """Takes in what NCCL answered on a host: all know of all, but one may be cut, or silent itself."""
        self._without_nccl.discard(host)
        self.nccl = max(self.nccl, text[:MAX_NCCL_CHARS], key=len)

    def host_lost(self, host: int, reason: str, now: float, unseen_s: float = 0.0) -> None:
        """Takes in that the connection to a host's agent was lost, `unseen_s` after its last message."""
        self._fault = self._fault or (now, unseen_s)
        ranks = self._ranks[host]
        of = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        text = f"host {host} ({of}) was lost: {reason}"
        self._symptoms.add(Event(Kind.LOST, host, ranks[0], self.statuses[ranks[0]], text=text), now)
        self._lost += sum(self.statuses[rank].exit is None for rank in ranks)
        if self._stop_by is not None and self._lost and all(status.trainer for status in self.statuses):
            self._stop_by = min(self._stop_by, now + LOST_SAVE_S)  # the trainer's ranks save together or not at all

    def stop(self, deadline_s: float, now: float, by: tuple[int, str] = STOPPED) -> None:
        """Starts a stop: all later symptoms are part of it. It ends after `deadline_s`, with code and words of `by`; a
        second one may come while the gang stops to grow."""
        if self._stop_by is None:
            self._stopped_at = now
        self._stop_by = min(self._stop_by or math.inf, now + deadline_s)
        self._stopped_by = by

    def kill(self, now: float) -> None:
        """Ends a stop from outside at once, after a second signal."""
        self._stop_by, self._is_killed = now, True

    # --- the verdict --------------------------------------------------------------------------------------------------

    @property
    def wants_stacks(self) -> bool:
        """Whether a rank has exceeded a timeout, or failed as those do whose peer stands still."""
        return self._overdue is not None or bool(self._doubted and self._doubted[1])

    @property
    def overdue(self) -> str | None:
        """The timeout that was exceeded, as a message."""
        return None if self._overdue is None else self._overdue[1].text

    def ending(self, now: float) -> tuple[str, float, float]:
        """What this attempt's end was spent on until the verdict, `decide` or `save`; since when; and how long before
        that nothing was seen of what failed."""
        if self._stop_by is not None:
            return "save", self._stopped_at, 0.0
        return ("decide", *(self._fault or (now, 0.0)))

    @property
    def committed(self) -> int | None:
        """The newest step on storage: restored, or committed by any rank."""
        return self._counts.committed

    @property
    def first_committed(self) -> int | None:
        """The first step that this attempt committed; what it restored is none."""
        return self._counts.first_committed

    @property
    def last_committed(self) -> int | None:
        """The last step that this attempt committed."""
        return None if self.first_committed is None else self.committed

    @property
    def step(self) -> int | None:
        """Steps complete on every rank that reports."""
        return self._counts.first_step

    @property
    def foremost(self) -> int | None:
        """Steps complete on the rank that is furthest."""
        return self._counts.last_step

    @property
    def _reason(self) -> Callable[[float, Mapping[int, float]], Verdict | None] | None:
        """What a verdict can be of: the function that `verdict` asks. None: nothing has come yet to be judged."""
        if self._stop_by is not None:
            return self._of_stop
        if self._counts.unclean == 0:
            return self._of_end
        if len(self._counts.versions) > 1:
            return self._of_versions
        return None if self._fault is None else self._of_symptoms

    @property
    def is_calm(self) -> bool:
        """Whether nothing has come that a verdict could be of: until then there is none to ask for."""
        return self._reason is None

    def verdict(self, now: float, last_message_at: Mapping[int, float]) -> Verdict | None:
        """How the attempt ends, or None: it goes on, or the cause of a symptom may still arrive.

        `last_message_at` has the time of the last message of each host that is not lost.
        """
        reason = self._reason
        return None if reason is None else reason(now, last_message_at)

    def _of_stop(self, now: float, last_message_at: Mapping[int, float]) -> Verdict | None:
        everyone_ended = self._counts.alive == self._lost  # ranks of a lost host count as ended: nothing more comes
        has_time = self._stop_by is not None and now < self._stop_by
        return None if has_time and not everyone_ended else self._stopped(everyone_ended)

    def _of_end(self, now: float, last_message_at: Mapping[int, float]) -> Verdict:
        return self._ended()

    def _of_symptoms(self, now: float, last_message_at: Mapping[int, float]) -> Verdict | None:
        found = self._nearest(now)
        if found is None:
            return None
        arrived, event, close = found
        if close is Closeness.LEFT and not self._peers_went_on(arrived, event, now):
            return None
        if close in _OF_A_LOST_HOST and self._is_any_silent(arrived + ON_ITS_WAY_S, event.host, last_message_at):
            return None  # a host without a message since then may be the one that died
        if now - arrived < settle_s(event, close):
            return None
        if close in _OF_A_LOST_HOST:
            if self._is_in_doubt(now):
                return None  # JAX and Orbax give up waiting for a rank that stands still before its own timeout passes
            event = self._standing_still(event) or event
        return verdict_of(event)

    # --- its parts ----------------------------------------------------------------------------------------------------

    def _of_versions(self, now: float, last_message_at: Mapping[int, float]) -> Verdict | None:
        """Two versions of JAX in one gang: the agents' own may agree where the programs bring other interpreters."""
        first: tuple[int, str] | None = None
        for rank, status in enumerate(self.statuses):
            if status.jax is None:
                continue
            first = first or (rank, status.jax)
            if status.jax != first[1]:
                message = f"rank {rank} imported jax {status.jax}, rank {first[0]} imported {first[1]}"
                return of_code(contract.BAD_SPEC, message, rank=rank)
        return None

    def _nearest(self, now: float) -> tuple[float, Event, Closeness] | None:
        """The symptom nearest to the cause, and when it arrived."""
        everyone_left = self._counts.staying == 0  # the end of the program: who left first means nothing
        found = self._symptoms.nearest(self._is_withdrawn, but=Closeness.LEFT if everyone_left else None)
        hang = self._hang(now)
        return found if hang is None or (found is not None and found[2] < Closeness.HANG) else (now, *hang)

    def _is_withdrawn(self, event: Event) -> bool:
        """Whether a rank that left has come again: `sh -c` started its next Python."""
        status = self.statuses[event.rank]
        return event.kind is Kind.LEFT and not status.left and status.exit is None

    def _is_any_silent(self, since: float, but: int, last_message_at: Mapping[int, float]) -> bool:
        """Whether a host, `but` apart, has sent nothing since then. Each is looked at once, and again when it has."""
        if self._silent is None or self._silent[0] != since:
            self._silent = since, [host for host in last_message_at if host != but]
        silent = self._silent[1]
        while silent and last_message_at.get(silent[-1], math.inf) > since:
            silent.pop()
        return bool(silent)

    def _peers_went_on(self, arrived: float, event: Event, now: float) -> bool:
        """A rank may end before its peers. It is a fault once they fail of it, or keep it in JAX's barrier too long."""
        if self._symptoms.any_but(Closeness.LEFT) or self._hang(now) is not None:
            return True
        status = self.statuses[event.rank]
        return status.waits and status.exit is None and now - arrived >= BARRIER_PATIENCE_S

    def _hang(self, now: float) -> tuple[Event, Closeness] | None:
        """The hang, once every living rank's stacks and NCCL's answer have arrived or can no longer be expected."""
        if self._overdue is None:
            return None
        if self._hung is None and (now - self._overdue[0] >= STACKS_S or self._is_told_all()):
            self._hung = self._suspected(self._overdue[1])
        return None if self._hung is None else (self._hung, Closeness.HANG)

    def _is_told_all(self) -> bool:
        if self._without_stacks is None:
            self._without_stacks = list(range(len(self.statuses)))
        return self._have_stacks(self._without_stacks) and not self._without_nccl

    def _have_stacks(self, waited: list[int]) -> bool:
        """Whether the stacks of all these ranks arrived, or never will; those that did are taken from the end."""
        while waited and (waited[-1] in self.stacks or self.statuses[waited[-1]].exit is not None):
            waited.pop()
        return not waited

    def _is_in_doubt(self, now: float) -> bool:
        """Whether the stacks of the living are awaited that would show which of them does not run at all."""
        if self._doubted is None:
            self._doubted = now, [rank for rank, status in enumerate(self.statuses) if _writes_stacks(status)]
        return now - self._doubted[0] < STACKS_S and not self._have_stacks(self._doubted[1])

    def _standing_still(self, echo: Event) -> Event | None:
        """The hang of a living rank that does not even handle a signal, while its peers failed as `echo` did."""
        still = {
            rank: status
            for rank, status in enumerate(self.statuses)
            if self.stacks.get(rank) == "" and _writes_stacks(status) and rank != echo.rank
        }
        if not still:
            return None
        rank = Stacks(still, self.stacks).suspect(min(still))
        host = next(host for host, ranks in self._ranks.items() if rank in ranks)
        own = f"rank {rank} makes no progress {still[rank].where}".rstrip()
        text = f"{own}: its process stands still, and its peers gave up: {verdict_of(echo).message}"
        return Event(Kind.HANG, host, rank, still[rank], text=text)

    def _suspected(self, event: Event) -> Event:
        """The hang that `event` reported, of the rank that the others wait for."""
        living = {rank: status for rank, status in enumerate(self.statuses) if status.exit is None}
        living = living or {event.rank: event.status}
        first = event.rank if event.rank in living else min(living)
        found = Stacks(living, self.stacks)
        culprit, waiting = found.suspect(first), found.waiting
        host = next(host for host, ranks in self._ranks.items() if culprit in ranks)
        status = living[culprit]
        own = f"rank {culprit} makes no progress {status.where}".rstrip()
        text = f"{own} ({event.text}): {found.describe(culprit)}"
        if waiting and culprit not in waiting:
            late = sorted(living.keys() - waiting)
            text += f"; {names(waiting, 'rank')} {'waits' if len(waiting) == 1 else 'wait'} for {names(late, 'rank')}"
        if self.nccl and (faults := nccl_status.describe(self.nccl)):
            text += f"; NCCL: {faults}"
        return dataclasses.replace(event, rank=culprit, host=host, status=status, text=text)

    def _ended(self) -> Verdict:
        if any(status.exit == contract.PREEMPTED for status in self.statuses):
            return self._stopped(True)
        message = "every process finished" if len(self.statuses) > 1 else "the process finished"
        return of_code(contract.DONE, message, step=self.step)

    def _stopped(self, everyone_ended: bool) -> Verdict:
        if all(status.exit == contract.DONE and status.done for status in self.statuses):
            return self._ended()
        code, words = self._stopped_by
        return of_code(code, f"{words}: {self._saved(everyone_ended)}", step=self.step)

    def _saved(self, everyone_ended: bool) -> str:
        """Whether the work was saved: "saved at step 37", or which ranks or lost hosts held it up."""
        reports = [status.stopped for status in self.statuses if status.stopped is not None]
        has_all = bool(reports) and (everyone_ended or len(reports) == len(self.statuses))
        lost = [event for event in self._symptoms.of(Closeness.HOST) if self._lost]
        if any(stopped.get("saved") for stopped in reports):
            steps = [stopped.get("step") for stopped in reports]
            saved = f"saved at step {max((step for step in steps if isinstance(step, int)), default=0)}"
            late = [] if has_all else [f"{self._who_holds_up()} did not end"]
            return "; ".join([saved, *(event.text for event in lost), *late])
        if has_all and not lost:
            return next((str(stopped["note"]) for stopped in reports if stopped.get("note")), "not saved")
        if everyone_ended and not lost and all(status.phase is None for status in self.statuses):
            return "the program did not report whether it saved"
        faults = [*lost, *self._symptoms.of(Closeness.CAUSE, Closeness.ABORT, Closeness.EXIT)]
        found = decide([event for event in faults if event.exit != -signal.SIGTERM])
        if found is not None and not self._is_killed:
            before = f"; step {self.committed} is saved" if lost and self.committed else ""
            return f"not saved: {verdict_of(found[0]).message}{before}"
        return f"not saved: {self._who_holds_up()}" + (", killed" if self._is_killed else "")

    def _who_holds_up(self) -> str:
        """The ranks that did not come to the common stop: those outside a step, if others wait for them inside one."""
        late = {rank: status for rank, status in enumerate(self.statuses) if status.stopped is None}
        outside = {rank: status for rank, status in late.items() if status.phase not in ("step", "done")}
        phases: dict[str, list[int]] = {}
        for rank, status in (outside or late).items():
            phases.setdefault(status.phase or "its program", []).append(rank)
        return ", ".join(f"{names(ranks, 'rank')} in {phase}" for phase, ranks in phases.items())


def _writes_stacks(status: Status) -> bool:
    """Whether a rank's process would write its stacks if it ran: it lives and has our hook."""
    return status.jax is not None and status.exit is None and not status.left
