"""One attempt as the leader sees it, from its symptoms to the verdict.

Reports of hosts update `RankStatuses`, `Symptoms` and `Hang`, and `Attempt.decide_verdict`
evaluates these. When a host dies, its peers fail within milliseconds, so a symptom is believed only
after a symptom that is closer to the cause could have arrived. Once a stop was requested, every
symptom counts as part of the stop, and the verdict says what was saved. This module does no I/O.
"""

from __future__ import annotations

import dataclasses
import math
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.memory import GangMemory, HostMemory
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.gang.root_cause import (
    SHUTDOWN_TIMEOUT,
    Closeness,
    Event,
    EventKind,
    Symptoms,
    event_closeness,
    failure_for_event,
    find_root_cause,
    settle_s,
    shell_exit_code,
    verdict_for_event,
)
from jaxlaunch.launcher.agent.leader.hang import EarlyLook, Hang
from jaxlaunch.launcher.agent.leader.rank_statuses import RankStatuses
from jaxlaunch.records.verdict import (
    Failure,
    FailureKind,
    LostHost,
    Numbers,
    StopFacts,
    StopOutcome,
    StopReason,
    Verdict,
    verdict_for,
    verdict_for_code,
)

# A program that reports no phases has no timeouts. At this interval after a rank has finished, the
# stacks of the others are checked: all of them may wait for that rank in JAX. JAX's own shutdown
# timeout is as long.
FINISHED_WAIT_S = 300.0
# The same interval after a rank has asked for a restart. It is short, because the other ranks
# either end at the same time or wait forever.
REQUEUE_WAIT_S = 5.0
# Exit codes of a rank that JAX aborts because its peers are gone, without and with a shell.
ABORT_CODES = (-signal.SIGABRT, 128 + signal.SIGABRT)
# Failures of a program that remain failures if its wrapper or its shell ends with 0.
HIDDEN_FAILURES = (EventKind.ERROR, EventKind.UNFINISHED, EventKind.GONE)
# Closeness of the symptoms that other hosts show when a host dies.
LOST_HOST_ECHOES = (Closeness.ABORT, Closeness.ECHO)
# A message that arrives within this time after a symptom may have been sent before the symptom
# occurred.
IN_FLIGHT_S = 0.2
# When a program ends, its peers fail within this time, even if they notice only by JAX's
# heartbeats.
HANDLED_S = 2.0 * contract.HEARTBEAT_TIMEOUT_S
# If a host is lost while ranks save, the others wait for it no longer than this.
SAVE_WITHOUT_HOST_TIMEOUT_S = 3.0


OUTSIDE_STOP = StopFacts(StopReason.OUTSIDE)


@dataclasses.dataclass
class PendingStop:
    """A requested stop of the attempt.

    Attributes:
        cause: Cause of the stop.
        requested_at: Monotonic time of the request.
        deadline: Monotonic time at which the ranks must have ended.
        is_killed: Whether a second signal ended the stop early.
    """

    cause: StopFacts
    requested_at: float
    deadline: float
    is_killed: bool = False


class Attempt:
    """State of one attempt. Call `decide_verdict` after each symptom and as time passes."""

    def __init__(
        self,
        number: int,
        ranks_by_host: Mapping[int, range],
        platform: str = "cpu",
        *,
        requeue_codes: Mapping[int, contract.Requeue] | None = None,
        grace_s: float = 0.0,
        is_independent: bool = False,
    ) -> None:
        self.number = number
        self._requeue_codes, self._grace_s = requeue_codes or {}, grace_s
        self._may_run_separately = is_independent or platform == "tpu"
        self.ranks = RankStatuses(ranks_by_host)
        self.hang, self.early_look = Hang(self.ranks, platform), EarlyLook(self.ranks)
        self._symptoms = Symptoms()
        self.memory = GangMemory()
        # By rank, the end of a program that its wrapper may handle, and when the event arrived.
        self._handled_events: dict[int, tuple[float, Event]] = {}
        self._stop: PendingStop | None = None
        # When the first fault arrived, and how long the last sign of life was before it.
        self._first_fault: tuple[float, float] | None = None
        # When to check next whether the running ranks wait for those that have finished.
        self._wait_check_at: float | None = None
        # Number of ranks that had not ended when their host was lost.
        self._lost_rank_count = 0
        # A monotonic time, and the hosts that may not have sent a message since then. The last host
        # is removed once it has sent one.
        self._silent_hosts: tuple[float, list[int]] | None = None

    @property
    def statuses(self) -> Sequence[Status]:
        """Newest status of every rank, by its number."""
        return self.ranks.by_rank

    @property
    def last_committed(self) -> int | None:
        """Last step that this attempt committed itself."""
        return None if self.ranks.first_committed is None else self.ranks.committed

    def take_report(
        self, host: int, message: Mapping[str, Any], now: float, *, has_verdict: bool
    ) -> None:
        """Record a report of a host. After the verdict, an event only updates the status.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The report is malformed.
        """
        kind = message["type"]
        if kind == "nccl":
            text = str(message["text"])
            # An answer to an early look would be outdated when a timeout expires.
            if self.hang.needs_stacks:
                self.hang.add_nccl(host, text)
        elif kind == "memory":
            ranks = self.ranks.ranks_by_host.get(host, range(0))
            self.memory.take_report(host, HostMemory.from_wire(message["memory"]), ranks)
        elif kind in ("stacks", "event"):
            rank = message["rank"]
            if rank not in self.ranks.ranks_by_host.get(host, ()):
                raise ValueError(f"it has no rank {rank!r}")
            self.ranks.update({rank: Status.from_wire(message["status"])})
            if kind == "stacks":
                collector = self.hang if self.hang.needs_stacks else self.early_look
                collector.add_stacks(rank, str(message["text"]))
            elif not has_verdict:
                self.add_event(Event.from_wire(host, message), now)

    def add_event(self, event: Event, now: float) -> None:
        """Record an event, with the status of its rank."""
        self.ranks.update({event.rank: event.status})
        requeue = None
        if event.kind in (EventKind.EXIT, EventKind.LEFT):
            requeue = self._requeue_codes.get(shell_exit_code(event))
        event = dataclasses.replace(event, is_alone=len(self.statuses) == 1, requeue=requeue)
        if event.is_handled:
            self._handled_events[event.rank] = now, event
            return
        if self._first_fault is None and event_closeness(event) not in (None, Closeness.LEFT):
            self._first_fault = now, event.unseen_s
        if event.kind is EventKind.HANG:
            self.hang.add_timeout(event, now)
        else:
            self._symptoms.add(event, now)

    def add_lost_host(self, host: int, reason: str, now: float, unseen_s: float = 0.0) -> None:
        """Record that a host's agent was lost, `unseen_s` after its last message."""
        self._first_fault = self._first_fault or (now, unseen_s)
        ranks, statuses = self.ranks.ranks_by_host[host], self.statuses
        lost_host = LostHost(host, reason, ranks[0], ranks[-1])
        event = Event(EventKind.LOST, host, ranks[0], statuses[ranks[0]], lost=lost_host)
        self._symptoms.add(event, now)
        self._lost_rank_count += sum(statuses[rank].exit is None for rank in ranks)
        # The ranks of the trainer save together or not at all.
        is_trainer = all(status.trainer for status in statuses)
        if self._stop is not None and self._lost_rank_count and is_trainer:
            self._stop.deadline = min(self._stop.deadline, now + SAVE_WITHOUT_HOST_TIMEOUT_S)

    def begin_stop(self, timeout_s: float, now: float, cause: StopFacts = OUTSIDE_STOP) -> None:
        """Begin a stop that may take `timeout_s`. It replaces one that was begun for growth."""
        if self._stop is None:
            self._stop = PendingStop(cause, now, now + timeout_s)
        self._stop.deadline, self._stop.cause = min(self._stop.deadline, now + timeout_s), cause

    def kill(self, now: float) -> None:
        """End a stop at once, after a second signal."""
        if self._stop is None:
            self._stop = PendingStop(OUTSIDE_STOP, 0.0, now)
        self._stop.deadline, self._stop.is_killed = now, True

    def end_timing(self, now: float) -> tuple[str, float, float]:
        """Return the first arguments of `RestartClock.begin`: cause, fault time and unseen time."""
        if self._stop is not None:
            return "save", self._stop.requested_at, 0.0
        return ("decide", *(self._first_fault or (now, 0.0)))

    @property
    def is_calm(self) -> bool:
        """Return whether no symptom has arrived. Every heartbeat calls this, so it is cheap."""
        has_fault = self._stop is not None or self._first_fault is not None
        return not has_fault and self.ranks.unclean_count != 0 and len(self.ranks.versions) <= 1

    def decide_verdict(self, now: float, last_message_at: Mapping[int, float]) -> Verdict | None:
        """Return the verdict on the attempt, or None while it continues or a cause may arrive.

        Args:
            now: Monotonic seconds.
            last_message_at: Time of the last message of each host that is not lost.
        """
        if self._stop is not None:
            # Ranks of a lost host count as ended, because they cannot report their end.
            all_ended = self.ranks.alive_count == self._lost_rank_count
            is_over = all_ended or now >= self._stop.deadline
            return self._stop_verdict(self._stop, all_ended) if is_over else None
        if self.ranks.unclean_count == 0 and not self._has_hidden_failure:
            if any(status.exit == contract.PREEMPTED for status in self.statuses):
                return self._stop_verdict(PendingStop(OUTSIDE_STOP, now, now), True)
            return self._never_joined_verdict() or self._done_verdict()
        if len(self.ranks.versions) > 1:
            facts = _mixed_versions(self.statuses)
            return verdict_for(facts, rank=max(facts.versions))
        return self._symptoms_verdict(now, last_message_at)

    @property
    def _has_hidden_failure(self) -> bool:
        """Return whether a program has failed although its wrapper or shell ended with 0."""
        events = self._symptoms.events_at(Closeness.CAUSE, Closeness.EXIT)
        return any(event.kind in HIDDEN_FAILURES for event in events)

    def _symptoms_verdict(self, now: float, last_message_at: Mapping[int, float]) -> Verdict | None:
        nearest = self._find_nearest(now)
        if nearest is None:
            return None
        arrived_at, event, level = nearest
        is_echo = level in LOST_HOST_ECHOES
        if level is Closeness.LEFT and not self._is_finished_rank_needed(arrived_at, now):
            return None
        # A host without a message since the symptom may be the one that died.
        if is_echo and self._is_host_silent(arrived_at + IN_FLIGHT_S, event.host, last_message_at):
            return None
        if now - arrived_at < settle_s(event, level):
            return None
        if event.requeue is not None and self.ranks.alive_count > self._lost_rank_count:
            return self._requeue_verdict(event, arrived_at, now)
        echoes = self._symptoms.events_at(*LOST_HOST_ECHOES)
        if any(SHUTDOWN_TIMEOUT.search(echo.text) for echo in echoes):
            return self._shutdown_timeout_verdict()
        are_aborts = all(echo.exit in ABORT_CODES for echo in echoes)
        if self.ranks.undone_count == 0 and is_echo and are_aborts:
            # JAX aborts a rank whose peers are gone, even if all of them have finished.
            return self._aborted_verdict({echo.rank for echo in echoes})
        # JAX and Orbax stop waiting for a stalled rank before the timeout of that rank expires.
        if is_echo:
            if self.hang.awaits_stacks(now):
                return None
            event = self.hang.find_stalled_rank(event) or event
        return verdict_for_event(self._find_handled_cause(level, now) or event)

    def _find_nearest(self, now: float) -> tuple[float, Event, Closeness] | None:
        """Return the symptom closest to the cause, with its time of arrival and its closeness."""
        # If every rank is leaving or done, none of them has left the others behind.
        is_over = 0 in (self.ranks.unfinished_count, self.ranks.undone_count)
        excluded_level = Closeness.LEFT if is_over else None
        nearest = self._symptoms.find_nearest(self._is_withdrawn, excluded_level=excluded_level)
        hang = self.hang.find_hang(now)
        if hang is None or (nearest is not None and nearest[2] < Closeness.HANG):
            return nearest
        return now, hang, Closeness.HANG

    def _find_handled_cause(self, level: Closeness, now: float) -> Event | None:
        """Return the end of a program behind a wrapper that explains the failure of its peers.

        The wrapper may still run, may have ended with another code, or may have started its next
        program.
        """
        if level < Closeness.ABORT:
            return None
        events = [
            event
            for rank, (arrived_at, event) in self._handled_events.items()
            if self.statuses[rank].left or now - arrived_at < HANDLED_S
        ]
        cause = find_root_cause(events)
        return None if cause is None or cause[1] is Closeness.ECHO else cause[0]

    def _is_withdrawn(self, event: Event) -> bool:
        """Return whether a rank that left is running again: `sh -c` started its next Python."""
        if event.kind is not EventKind.LEFT:
            return False
        status = self.statuses[event.rank]
        # The program caught the SystemExit of sys.exit(CODE) and finished.
        has_continued = event.requeue is not None and status.exit == contract.DONE
        return has_continued or not status.is_ending

    def _is_host_silent(
        self, since: float, excluded_host: int, last_message_at: Mapping[int, float]
    ) -> bool:
        """Return whether a host other than `excluded_host` has sent nothing since then."""
        if self._silent_hosts is None or self._silent_hosts[0] != since:
            self._silent_hosts = since, [host for host in last_message_at if host != excluded_host]
        hosts = self._silent_hosts[1]
        while hosts and last_message_at.get(hosts[-1], math.inf) > since:
            hosts.pop()
        return bool(hosts)

    def _is_finished_rank_needed(self, arrived_at: float, now: float) -> bool:
        """Return whether the other ranks need a rank that has finished, which is then the cause.

        They need it if their connections break, or if all of them wait in JAX. Programs that report
        phases are not checked, because phases have timeouts.
        """
        if self._symptoms.has_other_than(Closeness.LEFT):
            return True
        if now < (self._wait_check_at or arrived_at + FINISHED_WAIT_S):
            return False
        if any(status.phase for status in self.ranks.running_statuses().values()):
            are_waiting: bool | None = False
        else:
            are_waiting = self.hang.are_all_waiting(now)
        if are_waiting is False:
            self._wait_check_at = now + FINISHED_WAIT_S
        return bool(are_waiting)

    def _never_joined_verdict(self) -> Verdict | None:
        """Return the verdict if several ranks used JAX, each as the only process of its job."""
        if self._may_run_separately:
            return None
        counts = [status.processes for status in self.statuses]
        count = counts.count(1)
        if count < 2 or max(counts) > 1:
            return None
        return verdict_for(Failure(FailureKind.NEVER_JOINED, count=count), rank=counts.index(1))

    def _shutdown_timeout_verdict(self) -> Verdict:
        """Return the verdict if the shutdown timeout that the program passed to JAX has expired."""
        unfinished = (rank for rank, status in enumerate(self.statuses) if not status.has_finished)
        rank = next(unfinished, 0)
        facts = Failure(FailureKind.SHUTDOWN_TIMEOUT, rank=rank)
        host, code = self.ranks.find_host(rank), contract.CRASH
        return verdict_for_code(code, facts, rank=rank, host=host, step=self.statuses[rank].step)

    def _aborted_verdict(self, aborted_ranks: Collection[int]) -> Verdict | None:
        """Return the verdict on aborted ranks, once all other ranks have ended cleanly."""
        if self.ranks.alive_count or self.ranks.unclean_count > len(aborted_ranks):
            return None
        rank = min(aborted_ranks)
        cause = Failure(FailureKind.SIGNAL, rank=rank, signal=signal.SIGABRT)
        return self._done_verdict(cause)

    def _requeue_verdict(self, event: Event, arrived_at: float, now: float) -> Verdict | None:
        """Return the verdict on a rank that asks for a restart while others are running.

        The others may still be saving before they ask for a restart, too. They have the grace
        period for this, unless all of them wait for the rank.
        """
        is_in_grace_period = now - arrived_at < self._grace_s
        if is_in_grace_period and not self._are_others_waiting(arrived_at, now):
            return None
        return verdict_for_event(event)

    def _are_others_waiting(self, arrived_at: float, now: float) -> bool:
        """Return whether all running ranks wait in JAX for a rank that asks for a restart."""
        if not self.ranks.running_statuses():
            return False
        if now < (self._wait_check_at or arrived_at + REQUEUE_WAIT_S):
            return False
        are_waiting = self.hang.are_all_waiting(now)
        if are_waiting is False:
            self._wait_check_at = now + REQUEUE_WAIT_S
        return bool(are_waiting)

    def _done_verdict(self, cause: Failure | None = None) -> Verdict:
        facts = Failure(FailureKind.DONE, count=len(self.statuses), cause=cause)
        return verdict_for(facts, step=self.ranks.first_step)

    def _stop_verdict(self, stop: PendingStop, all_ended: bool) -> Verdict:
        if all(status.exit == contract.DONE and status.done for status in self.statuses):
            return self._done_verdict()
        return verdict_for(self._stop_failure(stop, all_ended), step=self.ranks.first_step)

    def _stop_failure(self, stop: PendingStop, all_ended: bool) -> Failure:
        """Return the failure that says what was saved, or which ranks or hosts prevented it."""

        def stop_failure(
            outcome: StopOutcome, cause: Failure | None = None, **facts: Any
        ) -> Failure:
            stop_facts = dataclasses.replace(stop.cause, outcome=outcome, **facts)
            return Failure(FailureKind.STOPPED, stop=stop_facts, cause=cause)

        stopped = (status.stopped for status in self.statuses)
        reports = [report for report in stopped if report is not None]
        all_reported = bool(reports) and (all_ended or len(reports) == len(self.statuses))
        lost_events = self._symptoms.events_at(Closeness.HOST) if self._lost_rank_count else []
        if any(report.get("saved") for report in reports):
            steps = [step for report in reports if isinstance(step := report.get("step"), int)]
            step = max(steps, default=0)
            late_ranks = {} if all_reported else _late_ranks(self.statuses)
            failure = stop_failure(StopOutcome.SAVED, saved_step=step, late=late_ranks)
            lost_hosts = tuple(event.lost for event in lost_events if event.lost is not None)
            return dataclasses.replace(failure, lost_hosts=lost_hosts)
        if all_reported and not lost_events:
            note = next((str(report["note"]) for report in reports if report.get("note")), "")
            return dataclasses.replace(stop_failure(StopOutcome.NOT_SAVED), detail=note)
        if all_ended and not lost_events and all(status.phase is None for status in self.statuses):
            return stop_failure(StopOutcome.NOT_REPORTED)
        levels = Closeness.CAUSE, Closeness.ABORT, Closeness.EXIT
        faults = [*lost_events, *self._symptoms.events_at(*levels)]
        cause = find_root_cause([event for event in faults if event.exit != -signal.SIGTERM])
        outcome = StopOutcome.NOT_SAVED
        if cause is not None and not stop.is_killed:
            committed_step = (self.ranks.committed or None) if lost_events else None
            failure = failure_for_event(cause[0])
            return stop_failure(outcome, failure, committed_step=committed_step)
        return stop_failure(outcome, late=_late_ranks(self.statuses), was_killed=stop.is_killed)


def _mixed_versions(statuses: Sequence[Status]) -> Failure:
    """Return the failure with the first two ranks that have different versions of JAX."""
    versions = {rank: str(status.jax) for rank, status in enumerate(statuses) if status.jax}
    first_rank, first_version = next(iter(versions.items()))
    rank = next(rank for rank, version in versions.items() if version != first_version)
    pair = {first_rank: first_version, rank: versions[rank]}
    return Failure(FailureKind.MIXED_VERSIONS, versions=pair)


def _late_ranks(statuses: Sequence[Status]) -> dict[str, Numbers]:
    """Return the ranks that did not reach the common stop, by phase.

    The phase is "" for a program that reports none. Ranks in "step" or "done" are omitted if others
    are in another phase, since they wait for those.
    """
    ranks_by_phase: dict[str, list[int]] = {}
    for rank, status in enumerate(statuses):
        if status.stopped is None:
            ranks_by_phase.setdefault(status.phase or "", []).append(rank)
    outside_step = ranks_by_phase.keys() - {"step", "done"}
    return {
        phase: Numbers.from_sequence(ranks)
        for phase, ranks in ranks_by_phase.items()
        if phase in outside_step or not outside_step
    }
