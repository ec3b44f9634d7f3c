"""The gang: all hosts of a job as a state machine without I/O and without a clock.

Every host keeps one connection to host 0, whose server passes events to `Gang`: a host joined, was lost or sent a
message, or time passed. The gang answers with actions, which the server performs in their order. Once enough hosts are
present, an attempt starts: each host receives the table of ranks and starts its processes. The first symptom that
suffices ends the attempt with one verdict, every host kills its processes and reports that it has none ("gone"), and
the attempt is recorded. Then the gang restarts in place, waits for a host to be replaced, or ends: every host receives
the message to leave, and host 0 leaves last.

    stage    ends when                                                    next
    GATHER   enough hosts are present                                     RUN, next attempt
             the wait timed out, the gang was refused or stopped          KILL
             host 0 is stopped and others can wait for its replacement    LEAVE, host 0 alone
    RUN      there is a verdict: a fault, a stop, every process ended     KILL
    KILL     the attempt is recorded, after all hosts are gone:
               another attempt may help and the hosts are present         RUN, next attempt
               ... a host is missing, and hosts are replaced              GATHER
               host 0 is stopped and others can wait for its replacement  LEAVE, host 0 alone
               otherwise                                                  LEAVE
    LEAVE    every other host has disconnected, or has had the time to    finished

A host may join late in RUN if hosts are replaced: it is a spare, or the gang saves and restarts with it.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Action as Outcome
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.progress import phase_timeouts
from jaxlaunch.launcher.agent.gang.protocol import Hello, Refusal, Stop, refusal
from jaxlaunch.launcher.agent.leader.attempt import FROM_OUTSIDE, Attempt
from jaxlaunch.launcher.agent.leader.membership import Gathering, Growth, Membership
from jaxlaunch.records import checked
from jaxlaunch.records.summary import Record, furthest
from jaxlaunch.records.verdict import (
    DiskExcess,
    Failure,
    FailureKind,
    StopFacts,
    StopOutcome,
    StopReason,
    Verdict,
    names,
    render_stop_reason,
    verdict_for_code,
)
from jaxlaunch.runs import history

# A process that SIGKILL does not end within this time is abandoned.
KILL_S = 10.0
# Time for the other agents to close their connections.
CLOSE_S = 3.0
# Part of the grace period that remains for killing, writing the summary and exiting.
GRACE_MARGIN_S = 5.0


class Stage(enum.Enum):
    """Stage of the gang."""

    GATHER = "waiting for hosts"
    RUN = "the processes run"
    KILL = "there is a verdict; the processes are being killed"
    LEAVE = "every host may exit"


# Until Python 3.12, looking up a member of an enum calls a function. This is on the path of every beat.
RUN = Stage.RUN
STAGES_WITH_RANKS = (Stage.RUN, Stage.KILL)


@dataclasses.dataclass(frozen=True)
class Say:
    """Write a message for people."""

    text: str


@dataclasses.dataclass(frozen=True)
class Send:
    """Send a message to hosts."""

    hosts: Sequence[int]
    kind: str
    fields: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class SendStart:
    """Tell hosts about the attempt that runs. It is their first message about it."""

    hosts: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Disconnect:
    """Close the connection of a host that the gang no longer counts as connected."""

    host: int


@dataclasses.dataclass(frozen=True)
class StartAttempt:
    """Prepare an attempt: choose the port of its coordinator, and begin its records."""

    follows_lost_attempt: bool


@dataclasses.dataclass(frozen=True)
class JudgeAttempt:
    """Write the verdict on storage before a host is told."""

    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class RecordAttempt:
    """Record the attempt, and answer with `Gang.on_attempt_recorded`."""

    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class AwaitHosts:
    """Record that the gang waits for hosts to be replaced."""


@dataclasses.dataclass(frozen=True)
class WriteEnd:
    """Write the last summary, and answer with `Gang.on_end_written`. Only host 0 leaves if `is_alone`."""

    verdict: Verdict
    is_alone: bool


@dataclasses.dataclass(frozen=True)
class PublishEnd:
    """Write the end on the JobSet, after the hosts were told."""

    verdict: Verdict
    is_alone: bool


@dataclasses.dataclass(frozen=True)
class Finish:
    """End this agent. The last action."""

    verdict: Verdict
    is_alone: bool


Action = (
    Say | Send | SendStart | Disconnect | StartAttempt | JudgeAttempt | RecordAttempt | AwaitHosts | WriteEnd
    | PublishEnd | Finish
)  # fmt: skip


class Gang:
    """State machine of all hosts. Each event appends actions, which the server performs.

    Attributes:
        actions: Actions for the server, in their order.
        members: The hosts.
        gathering: The wait for them.
        records: Finished attempts of this run, oldest first.
        stage: Stage of the gang.
        attempt_number: Number of the newest attempt.
        attempt: The newest attempt whose processes started.
        verdict: Verdict on the newest attempt in KILL, on the run in LEAVE. In GATHER, there will be no gang.
        stop_cause: Why the whole gang is being stopped.
    """

    def __init__(
        self, config: Config, hello: Hello, records: Sequence[Record], now: float, deadline_at: float | None = None
    ) -> None:
        """Begin to wait for hosts, unless the attempts of earlier pods exhausted the restarts without progress.

        Args:
            config: Place of host 0, and the job.
            hello: Hello of host 0 itself; the others must have equal versions.
            records: Finished attempts of this run.
            now: Monotonic seconds, as in all events.
            deadline_at: Time at which the job's deadline stops the run.
        """
        self._config, self._hello, self._deadline_at = config, hello, deadline_at
        self.actions: list[Action] = []
        self.members = Membership(config)
        self.gathering = Gathering(config, now)
        self.records = list(records)
        self.stage = Stage.GATHER
        self.number = records[-1].attempt if records else 0
        self.attempt = Attempt(self.number, {})
        self.stop: StopFacts | None = None
        self.growth = Growth()
        # When KILL and LEAVE end at the latest. None while an answer of the server is awaited.
        self._stage_deadline: float | None = None
        self._is_alone = False
        self.verdict = _exhausted_verdict(config, self.records)
        if self.verdict is not None:
            self.gathering.linger(now)

    # --- events -------------------------------------------------------------------------------------------------------

    def check_hello(self, hello: Hello) -> Refusal | None:
        """Return why a host may not join now."""
        previous = self.members.hellos.get(hello.host)
        present = {} if previous is None else {hello.host: previous}
        replaces = self._config.job.replaces
        reason = refusal(hello, self._hello, present, self._config.hosts, replaces=replaces)
        if replaces:
            # A host that comes late is told how the gang ended, or waits until it starts again.
            if self._is_late(hello.host):
                return Refusal(f"{hello.name} tried to join after the start", may_retry=True)
            if reason is not None and self.stage is Stage.RUN:
                # A spare that does not fit must not end a gang that runs.
                return dataclasses.replace(reason, ends_gang=False)
        elif self.stage is not Stage.GATHER and (self.verdict is None if reason is None else reason.ends_gang):
            return Refusal(f"{hello.name} tried to join after the start")
        return reason

    def host_refused(self, hello: Hello, reason: Refusal, now: float) -> None:
        """Handle a refused host. Some refusals end the gang, because it could never start with such a host."""
        if self.gathering.add_refusal(reason.message):
            self._say(f"refused: {reason.message}")
        if reason.ends_gang:
            self.gathering.arrived.add(hello.host)
            if self.verdict is None:
                rank = next(iter(self.members.table.ranks(hello.host)), None)
                self.gathering.linger(now)
                facts = Failure(FailureKind.REFUSED, detail=reason.message)
                self.verdict = verdict_for_code(contract.BAD_SPEC, facts, rank=rank, host=hello.host)
                self._broadcast("verdict", attempt=self.number + 1, verdict=self.verdict.to_json())
        previous = self.members.hellos.get(hello.host)
        is_outside = self._is_late(hello.host) or hello.host not in self.members.table
        if self._config.job.replaces and is_outside and previous is not None and previous.pod != hello.pod:
            # A Job creates a pod again only after the previous one has ended.
            self.actions.append(Disconnect(hello.host))
            self.host_lost(hello.host, "its pod was replaced", now)

    def host_joined(self, hello: Hello, now: float) -> None:
        """Handle an admitted host. An earlier connection of the same pod is dead."""
        self.members.add(hello, now)
        self.gathering.arrived.add(hello.host)
        if self.stage is Stage.RUN:
            # It has no ranks now: it is a spare, or the gang restarts with it after its next save.
            self.actions.append(SendStart([hello.host]))
            if self.growth.plan(self.members, self.attempt.ranks.committed):
                size, hosts = self.members.size, len(self.members.table)
                self._say(f"the gang grows from {hosts} to {size} hosts after its next save")
        elif self.verdict is not None:
            self._dismiss(hello.host, self.verdict, alone=False)
        else:
            self.members.not_gone.add(hello.host)
            self.number = max(self.number, hello.attempt)
            self.members.saved_step = furthest(self.members.saved_step, hello.saved)
            if self.members.can_start:
                self._start(now)

    def host_lost(self, host: int, reason: str, now: float) -> None:
        """Handle the closed connection of a host."""
        name, unseen_s = self.members.hellos[host].name, now - self.members.last_message_at[host]
        self.members.remove(host)
        if self.stage is Stage.GATHER and self.verdict is None:
            self._say(f"{name} disconnected: {reason}")
        elif self.stage is Stage.RUN:
            if host in self.members.table:
                self.attempt.add_lost_host(host, reason, now, unseen_s)
            else:
                self._say(f"{name}, a spare, disconnected: {reason}")
        self._advance(now)

    def take_beat(self, host: int, attempt: int, changes: Mapping[str, Any], now: float) -> bool:
        """Apply the status changes of a host's ranks. Return whether they are about this attempt.

        A beat without news for a decision must stay cheap, because thousands arrive each second.
        """
        if not attempt == self.number == self.attempt.number or self.stage not in STAGES_WITH_RANKS:
            return False
        self.attempt.ranks.merge(host, changes)
        if self.stage is not RUN or self.growth.after_step is not None or not self.attempt.is_calm:
            self._advance(now)
        return True

    def take_message(self, host: int, message: Mapping[str, Any], now: float) -> None:
        """Handle any other message of a host.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The message is malformed.
        """
        kind = message["type"]
        if kind == "stop":
            self._take_stop(host, checked.read(Stop, message).excess, now)
        elif kind == "kill":
            self._say(f"{self.members.hellos[host].name} received a second signal to stop")
            self.attempt.kill(now)
        elif message["attempt"] == self.number and kind == "gone":
            self.members.not_gone.discard(host)
        elif message["attempt"] == self.number == self.attempt.number and self.stage in STAGES_WITH_RANKS:
            self.attempt.take_report(host, message, now, has_verdict=self.stage is Stage.KILL)
        self._advance(now)

    def attempt_recorded(self, record: Record, now: float) -> None:
        """Continue after an attempt was recorded: start another in place, wait for a host, or end the gang."""
        self.records.append(record)
        limit, may_wait, members = self._config.job.in_place_limit, self._may_await_replacement, self.members
        has_grown = self.growth.is_stopping and self.stop is None and record.verdict.code == contract.PREEMPTED
        self.growth = Growth()
        if not has_grown:
            move = history.next_move(self.records, limit, members.can_start or may_wait)
            end = None if move.again else move.verdict
            if move.again and self.stop is not None:
                end = _stop_verdict(self.stop, StopOutcome.BETWEEN_ATTEMPTS, move.verdict)
            if end is not None:
                others_stay = bool(members.stopping and members.hellos.keys() - members.stopping)
                can_split = others_stay and may_wait and end.code == contract.PREEMPTED
                if not can_split:
                    return self._end(end)
                # The stopped hosts leave, while the others wait for their replacements.
                exhausted = history.given_up(self.records, self._config.generation, self._config.job.preempted_limit)
                if exhausted is not None:
                    return self._end(exhausted)
                leaving = self._let_go(end)
                return None if self._is_alone else self._wait(sorted({*members.missing, *leaving}), now)
            count = history.restarts_used(self.records, self._config.generation)
            self._say(
                f"restarting in place: {count} of {limit} restarts (restarts.in_place) since the last committed step"
            )
        if members.can_start:
            self._start(now)
        else:
            self._wait(members.missing, now)

    def end_written(self, now: float) -> None:
        """Let the others leave, now that the end is on storage, which may have taken long."""
        assert self.verdict is not None, "it is in the end that was written"
        self._stage_deadline = now if self._is_alone else now + CLOSE_S
        if not self._is_alone:
            self._broadcast("leave", verdict=self.verdict.to_json())
        self.actions.append(PublishEnd(self.verdict, self._is_alone))

    def tick(self, now: float) -> None:
        """Handle the passing of time."""
        self._advance(now)
        limit_s = self._config.job.deadline_s
        is_over = self._deadline_at is not None and now >= self._deadline_at
        if limit_s is not None and is_over and self.stop is None and self.stage is not Stage.LEAVE:
            self._stop(now, StopFacts(StopReason.DEADLINE, deadline_s=limit_s))

    # --- transitions --------------------------------------------------------------------------------------------------

    def _advance(self, now: float) -> None:
        """Go to the next stage if it is time."""
        deadline = self._stage_deadline
        if self.stage is Stage.GATHER:
            self._check_gathering(now)
        elif self.stage is Stage.RUN:
            self._check_attempt(now)
        elif self.verdict is None or deadline is None:
            return
        elif self.stage is Stage.KILL and (not self.members.not_gone or now > deadline):
            self._stage_deadline = None
            self.actions.append(RecordAttempt(self.verdict))
        elif self.stage is Stage.LEAVE and (self.members.have_left or now > deadline):
            self._stage_deadline = None
            self.actions.append(Finish(self.verdict, self._is_alone))

    def _check_gathering(self, now: float) -> None:
        if self.verdict is not None:
            # Hosts that join in a while must still learn that there will be no gang.
            return self._judge(self.verdict, now) if self.gathering.have_all_learned(now) else None
        if self.members.can_start:
            return self._start(now)
        full_size = self._config.sizes[-1]
        if self.gathering.may_shrink(now) and 0 < (size := self.members.size) < full_size:
            missing = names(self.members.missing)
            self._say(f"{missing} did not join in time: continuing with {size} of {full_size} hosts")
            return self._start(now)
        outcome = self.gathering.check(self.members, now)
        if isinstance(outcome, Verdict):
            self._judge(outcome, now)
        elif outcome is not None:
            self._say(outcome)

    def _check_attempt(self, now: float) -> None:
        hang, members = self.attempt.hang, self.members
        if hang.wants_stacks and not hang.is_requested:
            hang.is_requested = True
            self._broadcast("stacks")
        if self.stop is None and self.growth.begin(members, self.attempt.last_committed):
            cause = StopFacts(StopReason.GROWTH, hosts=members.size, hosts_before=len(members.table))
            self._say(render_stop_reason(cause))
            # Nobody ends these pods, so a save has its own timeout and not the grace period.
            save_s = phase_timeouts(self._config.job.timeouts_s)["save"]
            deadline_s = self._config.job.grace_s if save_s is None else save_s
            self.attempt.stop(deadline_s, now, cause)
            self._broadcast("stop")
        verdict = self.attempt.verdict(now, self.members.last_message_at)
        if verdict is not None:
            self._judge(verdict, now)

    def _start(self, now: float) -> None:
        follows_lost_attempt = self.attempt.number == self.number and bool(self.records)
        self.number += 1
        self.attempt = Attempt(self.number, self.members.regroup(), self._config.job.platform)
        self.stage, self.verdict, self.growth = Stage.RUN, None, Growth()
        counts = (self.members.table.processes, "process", "es"), (len(self.members.table), "host", "s")
        size = " on ".join(f"{count} {noun}{plural if count > 1 else ''}" for count, noun, plural in counts)
        self._say(f"starting attempt {self.number}: {size}")
        self.actions.append(StartAttempt(follows_lost_attempt))
        self.actions.append(SendStart(sorted(self.members.present)))

    def _judge(self, verdict: Verdict, now: float) -> None:
        """End the attempt: every host kills its processes and reports when none is left."""
        self.verdict = verdict
        is_final = contract.outcome(verdict.code).action in (Outcome.FAIL, Outcome.COMPLETE)
        if not (is_final and self._config.is_launched):
            self._say(f"{verdict.cause} ({verdict.code}): {verdict.message}")
        if self.stage is Stage.GATHER:
            # It counts as an attempt, although its processes never started.
            self.number += 1
        self.stage, self._stage_deadline = Stage.KILL, now + KILL_S
        # First on storage: a rank that is killed from here on has died because of this verdict.
        self.actions.append(JudgeAttempt(verdict))
        self._broadcast("verdict", attempt=self.number, verdict=verdict.to_json())

    def _end(self, verdict: Verdict, *, alone: bool = False) -> None:
        self.verdict, self.stage, self._stage_deadline, self._is_alone = verdict, Stage.LEAVE, None, alone
        self.actions.append(WriteEnd(verdict, alone))

    # --- a host that is lost, stopped or added ------------------------------------------------------------------------

    def _is_late(self, host: int) -> bool:
        """Return whether a gang that replaces hosts cannot take a host now: only spares may join while it runs."""
        is_member = host in self.members.table
        return self.stage is Stage.KILL or (self.stage is Stage.RUN and is_member) or self._is_alone

    @property
    def _may_await_replacement(self) -> bool:
        """Whether lost hosts are replaced now: once after each attempt whose processes started."""
        return self._config.job.replaces and self.attempt.number == self.number > 0

    def _wait(self, missing: Sequence[int], now: float) -> None:
        """Keep the present hosts until others replace the missing ones."""
        self.stage, self.verdict, self.stop = Stage.GATHER, None, None
        self.members.stopping.clear()
        self.gathering.begin("replace", now)
        hosts = len(self.members.table)
        self._say(f"keeping {hosts - len(missing)} of {hosts} hosts, until {names(missing)} is replaced")
        self.actions.append(AwaitHosts())

    def _take_stop(self, host: int, excess: DiskExcess | None, now: float) -> None:
        members = self.members
        if host in members.departing:
            return
        if excess is None and self._config.job.replaces:
            if host not in members.table and self.stage is Stage.RUN:
                # The gang continues without a spare.
                return self._dismiss(host, _stop_verdict(FROM_OUTSIDE, StopOutcome.NO_RANK), alone=True)
            members.stopping.add(host)
            if self.stage is Stage.GATHER and self.verdict is None:
                last = self.records[-1].verdict if self.records and self._may_await_replacement else None
                if last is None or last.code != contract.PREEMPTED:
                    outcome = StopOutcome.NOT_JOINED if last is None else StopOutcome.BETWEEN_ATTEMPTS
                    last = _stop_verdict(FROM_OUTSIDE, outcome, last)
                self._let_go(last)
                return
        self._stop(now, StopFacts(StopReason.DISK_EXCEEDED, excess=excess) if excess else FROM_OUTSIDE)

    def _stop(self, now: float, cause: StopFacts) -> None:
        if self.stop is not None:
            return
        self.stop = cause
        # A pod that is evicted for its own excess is gone within a second.
        is_evicted, reason = cause.reason is StopReason.DISK_EXCEEDED, render_stop_reason(cause)
        deadline_s = 0.0 if is_evicted else max(0.0, self._config.job.grace_s - GRACE_MARGIN_S)
        can_save = self.stage is Stage.RUN and not is_evicted
        self._say(f"{reason}: the processes have {deadline_s:.0f} s to save" if can_save else reason)
        if self.stage is Stage.GATHER and self.verdict is None:
            self._judge(_stop_verdict(cause, StopOutcome.NOT_JOINED), now)
        elif self.stage is Stage.RUN:
            self.attempt.stop(deadline_s, now, cause)
            self._broadcast("stop")

    def _let_go(self, verdict: Verdict) -> set[int]:
        """Let the stopped hosts leave, host 0 last: its replacement leads from then on."""
        leaving = self.members.stopping & self.members.hellos.keys()
        self.members.stopping.clear()
        for host in sorted(leaving - {self._config.host}):
            self._dismiss(host, verdict, alone=True)
        if self._config.host in leaving:
            self._end(verdict, alone=True)
        return leaving

    def _dismiss(self, host: int, verdict: Verdict, *, alone: bool) -> None:
        """Tell one host to leave before the others, or without them if `is_alone`."""
        self.members.departing.add(host)
        fields = {"verdict": verdict.to_json(), **({"alone": True} if alone else {})}
        self.actions.append(Send([host], "leave", fields))

    def _say(self, text: str) -> None:
        self.actions.append(Say(text))

    def _broadcast(self, kind: str, **fields: Any) -> None:
        self.actions.append(Send(sorted(self.members.present), kind, fields))


def _exhausted_verdict(config: Config, records: Sequence[Record]) -> Verdict | None:
    """Return the verdict if the attempts of earlier pods exhausted the restarts without progress."""
    job, generation = config.job, config.generation
    if job.command is None and not config.keeps_run:
        return history.given_up_unseen(generation, job.crash_limit, job.preempted_limit)
    verdict = history.given_up(records, generation, job.preempted_limit)
    if job.replaces and verdict is None:
        verdict = history.used_up(records, generation, job.in_place_limit)
    return verdict


def _stop_verdict(cause: StopFacts, outcome: StopOutcome, previous: Verdict | None = None) -> Verdict:
    """Return the verdict on a stop while no process ran, after an attempt with the previous verdict."""
    stop = dataclasses.replace(cause, outcome=outcome)
    facts = Failure(FailureKind.STOPPED, stop=stop, cause=None if previous is None else previous.facts)
    return verdict_for_code(cause.code, facts)
