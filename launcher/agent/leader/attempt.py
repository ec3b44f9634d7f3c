"""One start of all children as the leader sees it, and when it has heard enough to decide. Knows no socket or clock."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping

from launcher.agent import stacks
from launcher.agent.progress import Status
from launcher.agent.verdict import SETTLE_S, Closeness, Event, Kind, Verdict, closeness, decide, of_code, verdict_of
from trainer import contract

BARRIER_PATIENCE_S = contract.SHUTDOWN_TIMEOUT_S - 2.0  # less than JAX waits: after that all ranks abort alike
_OF_A_DEATH = (Closeness.ABORT, Closeness.ECHO)  # how the death of one host reads on the others
ON_ITS_WAY_S = 0.2  # what is heard within this may have been sent before
STACKS_S = 4.0  # every rank's stacks come within this, or never


class Attempt:
    """Told of every symptom; `verdict` is asked again whenever something was told or time has passed."""

    def __init__(self, number: int, ranks: Mapping[int, range]) -> None:
        self.number = number
        self.statuses = {rank: Status() for of_host in ranks.values() for rank in of_host}
        self.stacks: dict[int, str] = {}
        self.first_committed: int | None = None
        self._ranks = ranks
        self._events: list[tuple[float, Event]] = []
        self._overdue: tuple[float, Event] | None = None
        self._stop_by: float | None = None
        self._is_killed = False

    # --- what is told -------------------------------------------------------------------------------------------------

    def see(self, statuses: Mapping[int, Status]) -> None:
        """What ranks newly say of themselves."""
        self.statuses |= statuses
        if self.first_committed is None:
            self.first_committed = self.committed

    def hear(self, event: Event, now: float) -> None:
        if event.rank is not None:
            self.see({event.rank: event.status})
        if event.kind is Kind.HANG:
            self._overdue = self._overdue or (now, event)
        elif closeness(event) is not None:
            self._events.append((now, event))

    def lost(self, host: int, reason: str, now: float) -> None:
        ranks = self._ranks[host]
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"
        text = f"host {host} ({names}) was lost: {reason}"
        self._events.append((now, Event(Kind.LOST, host, ranks[0], self.statuses[ranks[0]], text=text)))

    def stop(self, deadline_s: float, now: float) -> None:
        """Told to stop from outside: whatever follows is part of that."""
        if self._stop_by is None:
            self._stop_by = now + deadline_s

    def kill(self, now: float) -> None:
        """Told twice: nobody waits any longer."""
        self._stop_by, self._is_killed = now, True

    # --- what follows -------------------------------------------------------------------------------------------------

    @property
    def wants_stacks(self) -> bool:
        return self._overdue is not None

    @property
    def overdue(self) -> str | None:
        """The budget that was missed, in words."""
        return None if self._overdue is None else self._overdue[1].text

    @property
    def committed(self) -> int | None:
        return max(
            (status.committed for status in self.statuses.values() if status.committed is not None), default=None
        )

    @property
    def step(self) -> int | None:
        """Steps complete on every rank that reports."""
        return min((status.step for status in self.statuses.values() if status.step is not None), default=None)

    def verdict(self, now: float, heard_at: Mapping[int, float]) -> Verdict | None:
        """How the attempt ends, or None: it goes on, or a symptom may still find its cause.

        `heard_at` says of every host whose agent was not lost when it last spoke.
        """
        everyone_ended = all(status.exit is not None for status in self.statuses.values())
        if self._stop_by is not None:
            if everyone_ended or now >= self._stop_by:
                return self._stopped(everyone_ended)
            return None
        if all(status.ended_clean for status in self.statuses.values()):
            return self._ended()
        mixed = self._mixed_versions()
        if mixed is not None:
            return mixed
        found = decide(self._faults(now))
        if found is None:
            return None
        event, close = found
        if close is Closeness.LEFT and not self._peers_went_on(event, now):
            return None
        arrived = next((at for at, known in self._events if known is event), now)
        others = [at for host, at in heard_at.items() if host != event.host]
        if close in _OF_A_DEATH and any(at <= arrived + ON_ITS_WAY_S for at in others):
            return None  # a host that is silent since then may be the one that died
        return verdict_of(event) if now - arrived >= SETTLE_S[close] else None

    # --- how it gets there --------------------------------------------------------------------------------------------

    def _mixed_versions(self) -> Verdict | None:
        """Two versions of JAX in one gang: the agents' own may agree where the programs bring other interpreters."""
        first: tuple[int, str] | None = None
        for rank, status in self.statuses.items():
            if status.jax is None:
                continue
            first = first or (rank, status.jax)
            if status.jax != first[1]:
                message = f"rank {rank} imported jax {status.jax}, rank {first[0]} {first[1]}"
                return of_code(contract.BAD_SPEC, message, rank=rank)
        return None

    def _faults(self, now: float) -> list[Event]:
        everyone_left = all(status.left or status.exit is not None for status in self.statuses.values())
        events = [event for _, event in self._events]
        if everyone_left:  # the end of the program: who left first means nothing
            events = [event for event in events if closeness(event) is not Closeness.LEFT]
        hang = self._hang(now)
        return events if hang is None else [*events, hang]

    def _peers_went_on(self, event: Event, now: float) -> bool:
        """A rank may end before its peers. It is a fault once they fail of it, or hold it in JAX's barrier too long."""
        if any(closeness(other) is not Closeness.LEFT for _, other in self._events) or self._hang(now) is not None:
            return True
        arrived = next(at for at, known in self._events if known is event)
        assert event.rank is not None, "only a rank leaves"
        status = self.statuses[event.rank]
        return status.waits and status.exit is None and now - arrived >= BARRIER_PATIENCE_S

    def _hang(self, now: float) -> Event | None:
        """The hang, once every living rank's stacks have come or are not to come any more."""
        if self._overdue is None:
            return None
        since, event = self._overdue
        alive = {rank for rank, status in self.statuses.items() if status.exit is None}
        if not alive <= self.stacks.keys() and now - since < STACKS_S:
            return None
        assert event.rank is not None, "only a rank is overdue"
        living = {rank: self.statuses[rank] for rank in sorted(alive)} or {event.rank: event.status}
        first = event.rank if event.rank in living else min(living)
        culprit = stacks.suspect(living, self.stacks, first)
        host = next(host for host, ranks in self._ranks.items() if culprit in ranks)
        status = living[culprit]
        own = f"rank {culprit} makes no progress {status.where}".rstrip()
        text = f"{own} ({event.text}): {stacks.describe(living, self.stacks)}"
        return dataclasses.replace(event, rank=culprit, host=host, status=status, text=text)

    def _ended(self) -> Verdict:
        if any(status.exit == contract.PREEMPTED for status in self.statuses.values()):
            return self._stopped(True)
        message = "every process finished" if len(self.statuses) > 1 else "the process finished"
        return of_code(contract.DONE, message, step=self.step)

    def _stopped(self, everyone_ended: bool) -> Verdict:
        statuses = self.statuses.values()
        if all(status.exit == contract.DONE and status.done for status in statuses):
            return self._ended()
        return of_code(contract.PREEMPTED, f"stopped from outside: {self._saved(everyone_ended)}", step=self.step)

    def _saved(self, everyone_ended: bool) -> str:
        """What became of the work: "saved at step 37", or who held it up."""
        told = [status.stopped for status in self.statuses.values() if status.stopped is not None]
        if told and (everyone_ended or len(told) == len(self.statuses)):
            if any(stopped.get("saved") for stopped in told):
                return f"saved at step {max(int(stopped.get('step', 0)) for stopped in told)}"
            return next((str(stopped["note"]) for stopped in told if stopped.get("note")), "not saved")
        if everyone_ended and all(status.phase is None for status in self.statuses.values()):
            return "the program did not say whether it saved"
        own = (Closeness.CAUSE, Closeness.ABORT)
        faults = [event for _, event in self._events if closeness(event) in own]
        found = decide([event for event in faults if event.exit != -signal.SIGTERM])
        if found is not None and not self._is_killed:
            return f"not saved: {verdict_of(found[0]).message}"
        return f"not saved: {self._who_holds_up()}" + (", killed" if self._is_killed else "")

    def _who_holds_up(self) -> str:
        """The ranks that did not come to the common stop: those outside a step, if others wait for them inside one."""
        late = {rank: status for rank, status in self.statuses.items() if status.stopped is None}
        outside = {rank: status for rank, status in late.items() if status.phase not in ("step", "done")}
        phases: dict[str, list[int]] = {}
        for rank, status in (outside or late).items():
            phases.setdefault(status.phase or "its program", []).append(rank)
        return ", ".join(f"{_named(ranks)} in {phase}" for phase, ranks in phases.items())


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
