"""The gang: all hosts of a job as a state machine without I/O and without a clock.

Every host keeps one connection to host 0, whose server passes events to `Gang`: a host joined, was
lost or sent a message, or time passed. The gang answers with actions, which the server performs in
order. Once enough hosts are present, an attempt starts: each host receives the table of ranks
and starts its processes. The first sufficient symptom ends the attempt with one verdict, every
host kills its processes and reports that none is left ("gone"), and the attempt is recorded. Then
the gang restarts in place, waits for a host to be replaced, or ends: every host receives the
message to leave, and host 0 leaves last.

    stage    ends when                                                    next
    GATHER   enough hosts are present                                     RUN, next attempt
             the wait timed out, the gang was refused or stopped          KILL
             host 0 is stopped and others can wait for its replacement    LEAVE, host 0 alone
    RUN      there is a verdict: a fault, a stop, every process ended     KILL
    KILL     the attempt is recorded, after all hosts are gone:
               another attempt may help and the hosts are present         RUN, next attempt
               ... a host is missing, and hosts are replaced              GATHER
               host 0 is stopped and others can wait for its replacement  LEAVE, host 0 alone
               the job has failed for good, and has hold_on_failure       HOLD
               otherwise                                                  LEAVE
    HOLD     the time of the hold is over, or a host is stopped           LEAVE
    LEAVE    every other host has disconnected, or the wait timed out     finished

In jobs that replace lost hosts, a host may join during RUN. It is then a spare, or the gang saves
and restarts with it.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Limit
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.protocol import Hello, Refusal, Stop, find_refusal
from jaxlaunch.launcher.agent.leader.attempt import OUTSIDE_STOP, Attempt
from jaxlaunch.launcher.agent.leader.membership import Gathering, Growth, Membership
from jaxlaunch.records import codec
from jaxlaunch.records.summary import AttemptRecord, furthest_step
from jaxlaunch.records.verdict import (
    Failure,
    FailureKind,
    StopFacts,
    StopOutcome,
    StopReason,
    Verdict,
    render_numbers,
    render_stop_reason,
    verdict_for,
    verdict_for_code,
)
from jaxlaunch.runs import history

# A process that SIGKILL does not end within this time is abandoned.
KILL_TIMEOUT_S = 10.0
# Time for the other agents to close their connections in LEAVE.
CLOSE_TIMEOUT_S = 3.0
# Part of the grace period that remains for killing, writing the summary and exiting.
GRACE_MARGIN_S = 5.0


class Stage(enum.Enum):
    """Stage of the gang."""

    GATHER = "waiting for hosts"
    RUN = "the processes run"
    KILL = "there is a verdict; the processes are being killed"
    HOLD = "the job has failed; its hosts stay for a look"
    LEAVE = "every host may exit"


# Before Python 3.12, looking up a member of an enum calls a function, which is too slow for the
# code that runs for every heartbeat.
RUN = Stage.RUN
STAGES_WITH_RANKS = (Stage.RUN, Stage.KILL)


@dataclasses.dataclass(frozen=True)
class Say:
    """Write a line to the log of the agent."""

    text: str


@dataclasses.dataclass(frozen=True)
class Send:
    """Send a message to hosts."""

    hosts: Sequence[int]
    kind: str
    fields: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class SendStart:
    """Send the running attempt to hosts that do not know of it yet."""

    hosts: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Disconnect:
    """Close the connection of a host that the gang counts as lost."""

    host: int


@dataclasses.dataclass(frozen=True)
class StartAttempt:
    """Prepare an attempt: choose the port of its coordinator, and begin its records."""

    follows_lost_attempt: bool


@dataclasses.dataclass(frozen=True)
class JudgeAttempt:
    """Write the verdict to storage, before any host receives it."""

    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class RecordAttempt:
    """Record the attempt, then call `Gang.on_attempt_recorded`."""

    verdict: Verdict


@dataclasses.dataclass(frozen=True)
class AwaitHosts:
    """Record that the gang waits for hosts to be replaced."""


@dataclasses.dataclass(frozen=True)
class WriteEnd:
    """Write the last summary, then call `Gang.on_end_written`."""

    verdict: Verdict
    leaves_alone: bool
    # How long the hosts stay after it. 0 if they leave at once.
    hold_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class PublishEnd:
    """Write the end to the annotation of the JobSet, after the message `leave` or `hold`."""

    verdict: Verdict
    leaves_alone: bool


@dataclasses.dataclass(frozen=True)
class Finish:
    """End this agent. This is the last action."""

    verdict: Verdict
    leaves_alone: bool


Action = (
    Say | Send | SendStart | Disconnect | StartAttempt | JudgeAttempt | RecordAttempt | AwaitHosts
    | WriteEnd | PublishEnd | Finish
)  # fmt: skip


class GangState:
    """State of the gang, and the actions that the server has not performed yet.

    Attributes:
        records: Finished attempts of this run, oldest first.
        attempt: The newest attempt whose processes started.
        verdict: Verdict on the newest attempt in KILL, and on the run in HOLD and LEAVE. A verdict
            in GATHER means that the gang will not start.
        stop_cause: Cause of the stop of the whole gang. None while no stop is requested.
        overdue_since: Monotonic time at which the overdue step began. None if no step is overdue.
    """

    def __init__(
        self,
        config: Config,
        hello: Hello,
        records: Sequence[AttemptRecord],
        now: float,
        deadline_at: float | None = None,
    ) -> None:
        """Begin to wait for hosts, unless earlier pods used up the restarts.

        Args:
            config: Configuration of host 0.
            hello: Hello of host 0 itself, whose versions the other hosts must have.
            records: Finished attempts of this run, oldest first.
            now: Monotonic seconds.
            deadline_at: Monotonic time at which the job's deadline passes, or None without one.
        """
        self._config, self._leader_hello, self._deadline_at = config, hello, deadline_at
        self.actions: list[Action] = []
        self.members = Membership(config)
        self.gathering = Gathering(config, now)
        self.records = list(records)
        self.stage = Stage.GATHER
        self.attempt_number = records[-1].attempt if records else 0
        self.attempt = Attempt(self.attempt_number, {})
        self.stop_cause: StopFacts | None = None
        self.overdue_since: float | None = None
        self.growth = Growth()
        # Monotonic time at which KILL, HOLD or LEAVE ends at the latest. None while the server
        # records the attempt or writes the end.
        self._stage_deadline: float | None = None
        self._leaves_alone = False
        self._hold_s = 0.0
        self.verdict = _exhausted_verdict(config, self.records)
        if self.verdict is not None:
            self.gathering.shorten_wait(now)

    def check_hello(self, hello: Hello) -> Refusal | None:
        """Return why a host may not join now."""
        previous = self.members.hellos.get(hello.host)
        joined = {} if previous is None else {hello.host: previous}
        replaces = self._config.job.replaces
        host_count = self._config.hosts
        refusal = find_refusal(hello, self._leader_hello, joined, host_count, replaces=replaces)
        if not replaces:
            if self.stage is Stage.GATHER:
                return refusal
            # After the start, a host may join only to receive the verdict, and cannot end the gang.
            is_late = self.verdict is None if refusal is None else refusal.ends_gang
            late_refusal = Refusal(f"{hello.description} tried to join after the start")
            return late_refusal if is_late else refusal
        if self._is_late(hello.host):
            # The host tries again until it learns how the gang ended, or joins the next attempt.
            return Refusal(f"{hello.description} tried to join after the start", may_retry=True)
        if refusal is not None and self.stage is Stage.RUN:
            # A spare with a different version or job must not end a running gang.
            return dataclasses.replace(refusal, ends_gang=False)
        return refusal

    def _is_late(self, host: int) -> bool:
        """Return whether a host comes too late to join. During RUN, spares may still join."""
        is_member = host in self.members.table
        return (
            self.stage is Stage.KILL
            or (self.stage is Stage.RUN and is_member)
            or self._leaves_alone
        )

    def _dismiss_host(self, host: int, verdict: Verdict, *, leaves_alone: bool) -> None:
        """Send one host the message to leave, before the others or instead of them."""
        self.members.departing_hosts.add(host)
        fields = {"verdict": verdict.to_json(), **({"alone": True} if leaves_alone else {})}
        self.actions.append(Send([host], "leave", fields))

    def _log_text(self, text: str) -> None:
        self.actions.append(Say(text))

    def _broadcast(self, kind: str, **fields: Any) -> None:
        self.actions.append(Send(sorted(self.members.present_hosts), kind, fields))


class Gang(GangState):
    """State machine of all hosts. Each event appends actions, which the server performs."""

    # --- events -----------------------------------------------------------------------------------

    def on_host_refused(self, hello: Hello, refusal: Refusal, now: float) -> None:
        """Handle a refused host. A refusal with `ends_gang` ends the gang."""
        if self.gathering.add_refusal(refusal.message):
            self._log_text(f"refused: {refusal.message}")
        if refusal.ends_gang:
            self.gathering.arrived_hosts.add(hello.host)
            if self.verdict is None:
                rank = next(iter(self.members.table.ranks_of(hello.host)), None)
                self.gathering.shorten_wait(now)
                facts = Failure(FailureKind.REFUSED, detail=refusal.message)
                code = contract.BAD_SPEC
                self.verdict = verdict_for_code(code, facts, rank=rank, host=hello.host)
                fields = {"attempt": self.attempt_number + 1, "verdict": self.verdict.to_json()}
                self._broadcast("verdict", **fields)
        previous = self.members.hellos.get(hello.host)
        is_outside = self._is_late(hello.host) or hello.host not in self.members.table
        is_new_pod = previous is not None and previous.pod != hello.pod
        if self._config.job.replaces and is_outside and is_new_pod:
            # A Job creates a pod again only after the previous one has ended.
            self.actions.append(Disconnect(hello.host))
            self.on_host_lost(hello.host, "its pod was replaced", now)

    def on_host_joined(self, hello: Hello, now: float) -> None:
        """Handle an admitted host. It replaces an earlier connection of the same pod."""
        self.members.add_host(hello, now)
        self.gathering.arrived_hosts.add(hello.host)
        if self.stage is Stage.RUN:
            # The host has no ranks in this attempt: it is a spare, or the gang restarts with it
            # after its next save.
            self.actions.append(SendStart([hello.host]))
            if self.growth.plan_growth(self.members, self.attempt.ranks.committed):
                size, current_size = self.members.next_size, len(self.members.table)
                self._log_text(
                    f"the gang grows from {current_size} to {size} hosts after its next save"
                )
        elif self.verdict is not None:
            # A pod that leaves would end the Job, and with it the hold.
            if self.stage is not Stage.HOLD:
                self._dismiss_host(hello.host, self.verdict, leaves_alone=False)
        else:
            self.members.hosts_with_processes.add(hello.host)
            self.attempt_number = max(self.attempt_number, hello.attempt)
            self.members.saved_step = furthest_step(self.members.saved_step, hello.saved)
            if self.members.can_start:
                self._start_attempt(now)

    def on_host_lost(self, host: int, reason: str, now: float) -> None:
        """Handle the closed connection of a host."""
        name = self.members.hellos[host].description
        unseen_s = now - self.members.last_message_at[host]
        self.members.remove_host(host)
        if self.stage is Stage.GATHER and self.verdict is None:
            self._log_text(f"{name} disconnected: {reason}")
        elif self.stage is Stage.RUN:
            if host in self.members.table:
                self.attempt.add_lost_host(host, reason, now, unseen_s)
            else:
                self._log_text(f"{name}, a spare, disconnected: {reason}")
        self._advance_stage(now)

    def take_beat(self, host: int, attempt: int, changes: Mapping[str, Any], now: float) -> bool:
        """Apply the status changes in a heartbeat. Return whether it is about this attempt.

        A heartbeat without news must stay cheap, because thousands arrive each second.
        """
        is_current = attempt == self.attempt_number == self.attempt.number
        if not is_current or self.stage not in STAGES_WITH_RANKS:
            return False
        self.attempt.ranks.merge_changes(host, changes)
        if self.stage is not RUN or self.growth.after_step is not None or not self.attempt.is_calm:
            self._advance_stage(now)
        return True

    def take_message(self, host: int, message: Mapping[str, Any], now: float) -> None:
        """Handle any other message of a host.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: The message is malformed.
        """
        kind, attempt_number = message["type"], self.attempt_number
        if kind == "stop":
            self._take_stop(host, codec.read_record(Stop, message), now)
        elif kind == "kill":
            name = self.members.hellos[host].description
            self._log_text(f"{name} received a second signal to stop")
            self.attempt.kill(now)
        elif message["attempt"] == attempt_number and kind == "gone":
            self.members.hosts_with_processes.discard(host)
        elif (
            message["attempt"] == attempt_number == self.attempt.number
            and self.stage in STAGES_WITH_RANKS
        ):
            self.attempt.take_report(host, message, now, has_verdict=self.stage is Stage.KILL)
        self._advance_stage(now)

    def on_attempt_recorded(self, record: AttemptRecord, now: float) -> None:
        """Start another attempt in place, wait for a host, or end the gang."""
        self.records.append(record)
        limit, may_wait = self._config.job.in_place_limit, self._may_await_replacement
        members = self.members
        is_stop = contract.outcome_for_code(record.verdict.code).is_stop
        is_growth_stop = self.growth.is_stopping and self.stop_cause is None and is_stop
        self.growth = Growth()
        if not is_growth_stop:
            preempted_limit = self._config.job.preempted_limit
            can_start = members.can_start or may_wait
            decision = history.decide_next(self.records, limit, can_start, preempted_limit)
            if not decision.should_restart:
                self._end_attempts(decision.verdict, may_wait, now)
                return
            if (cause := self.stop_cause) is not None:
                verdict = _stop_verdict(cause, StopOutcome.BETWEEN_ATTEMPTS, decision.verdict)
                self._end_attempts(verdict, may_wait, now)
                return
            self._log_text(f"restarting in place: {self._describe_count(record.verdict)}")
        if members.can_start:
            self._start_attempt(now)
        else:
            self._wait_for_hosts(members.missing_hosts, now)

    def _describe_count(self, verdict: Verdict) -> str:
        """Describe how the restart after a verdict is counted, for the log."""
        if contract.outcome_for_code(verdict.code).charged_to is not Limit.CRASH:
            return "not counted toward restarts.in_place"
        limit = self._config.job.in_place_limit
        count = history.restarts_used(self.records, self._config.generation)
        return f"{count} of {limit} restarts (restarts.in_place) since the last committed step"

    def _end_attempts(self, verdict: Verdict, may_wait: bool, now: float) -> None:
        """End the run, or let only the stopped hosts leave while the others await replacements.

        The gang of a role continues without any host, because the pods of other roles stay.
        """
        members, config = self.members, self._config
        staying_hosts = members.hellos.keys() - members.stopping_hosts
        others_stay = bool(members.stopping_hosts and (staying_hosts or config.job.is_role))
        if not (others_stay and may_wait and contract.outcome_for_code(verdict.code).is_stop):
            self._end_run(verdict, hold_s=self._choose_hold_s(verdict, now))
            return
        limit = config.job.preempted_limit
        exhausted_verdict = history.give_up_verdict(self.records, config.generation, limit)
        if exhausted_verdict is not None:
            self._end_run(exhausted_verdict)
            return
        leaving_hosts = self._release_stopped_hosts(verdict)
        if not self._leaves_alone:
            self._wait_for_hosts(sorted({*members.missing_hosts, *leaving_hosts}), now)

    def on_end_written(self, now: float) -> None:
        """Let the other hosts leave, or hold all of them, now that the end is on storage."""
        assert self.verdict is not None, "the end that was written has a verdict"
        if self.stage is Stage.HOLD:
            self._stage_deadline = now + self._hold_s
            self._broadcast("hold")
        elif self._leaves_alone:
            self._stage_deadline = now
        else:
            self._let_hosts_leave(self.verdict, now)
        self.actions.append(PublishEnd(self.verdict, self._leaves_alone))

    def _let_hosts_leave(self, verdict: Verdict, now: float) -> None:
        self.stage, self._stage_deadline = Stage.LEAVE, now + CLOSE_TIMEOUT_S
        self._broadcast("leave", verdict=verdict.to_json())

    def on_tick(self, now: float) -> None:
        """Handle the passing of time."""
        self._advance_stage(now)
        limit_s = self._config.job.deadline_s
        is_past_deadline = self._deadline_at is not None and now >= self._deadline_at
        can_stop = self.stop_cause is None and self.stage is not Stage.LEAVE
        if limit_s is not None and is_past_deadline and can_stop:
            self._stop_gang(now, StopFacts(StopReason.DEADLINE, deadline_s=limit_s))

    # --- transitions ------------------------------------------------------------------------------

    def _advance_stage(self, now: float) -> None:
        """Enter the next stage if its condition holds."""
        deadline = self._stage_deadline
        if self.stage is Stage.GATHER:
            self._check_gathering(now)
        elif self.stage is Stage.RUN:
            self._check_attempt(now)
        elif self.verdict is None or deadline is None:
            return
        elif self.stage is Stage.KILL and (not self.members.hosts_with_processes or now > deadline):
            self._stage_deadline = None
            self.actions.append(RecordAttempt(self.verdict))
        elif self.stage is Stage.HOLD and now > deadline:
            self._let_hosts_leave(self.verdict, now)
        elif self.stage is Stage.LEAVE and (
            self.members.have_others_disconnected or now > deadline
        ):
            self._stage_deadline = None
            self.actions.append(Finish(self.verdict, self._leaves_alone))

    def _check_gathering(self, now: float) -> None:
        if self.verdict is not None:
            # Hosts that join late must still learn that the gang will not start.
            if self.gathering.is_refusal_wait_over(now):
                self._judge_attempt(self.verdict, now)
            return
        if self.members.can_start:
            self._start_attempt(now)
            return
        full_size = self._config.gang_sizes[-1]
        if self.gathering.may_shrink(now) and 0 < (size := self.members.next_size) < full_size:
            missing_text = render_numbers(self.members.missing_hosts)
            sizes = f"{size} of {full_size} hosts"
            self._log_text(f"{missing_text} did not join in time: continuing with {sizes}")
            self._start_attempt(now)
            return
        outcome = self.gathering.check_wait(self.members, now)
        if isinstance(outcome, Verdict):
            self._judge_attempt(outcome, now)
        elif outcome is not None:
            self._log_text(outcome)

    def _check_attempt(self, now: float) -> None:
        hang, members = self.attempt.hang, self.members
        if hang.needs_stacks and not hang.is_requested:
            hang.is_requested = True
            self._broadcast("stacks")
        elif self.attempt.is_calm and self.attempt.early_look.update(self.overdue_since, now):
            self._broadcast("stacks")
        last_committed = self.attempt.last_committed
        if self.stop_cause is None and self.growth.begin_growth(members, last_committed):
            size, current_size = members.next_size, len(members.table)
            cause = StopFacts(StopReason.GROWTH, hosts=size, hosts_before=current_size)
            self._log_text(render_stop_reason(cause))
            # These pods are not being deleted, so the save has its own timeout instead of the grace
            # period.
            save_s = self._config.job.phase_timeouts_s["save"]
            deadline_s = self._config.job.grace_s if save_s is None else save_s
            self.attempt.begin_stop(deadline_s, now, cause)
            self._broadcast("stop")
        verdict = self.attempt.decide_verdict(now, self.members.last_message_at)
        if verdict is not None:
            self._judge_attempt(verdict, now)

    def _start_attempt(self, now: float) -> None:
        follows_lost_attempt = self.attempt.number == self.attempt_number and bool(self.records)
        self.attempt_number += 1
        ranks = self.members.assign_ranks()
        job = self._config.job
        self.attempt = Attempt(
            self.attempt_number,
            ranks,
            job.platform,
            requeue_codes=job.requeue_codes,
            grace_s=job.grace_s,
            is_independent=job.independent,
        )
        self.stage, self.verdict, self.growth = Stage.RUN, None, Growth()
        process_count, host_count = self.members.table.process_count, len(self.members.table)
        size = f"{process_count} process{'es' if process_count > 1 else ''} on {host_count} host"
        size += "s" if host_count > 1 else ""
        self._log_text(f"starting attempt {self.attempt_number}: {size}")
        self.actions.append(StartAttempt(follows_lost_attempt))
        self.actions.append(SendStart(sorted(self.members.present_hosts)))

    def _judge_attempt(self, verdict: Verdict, now: float) -> None:
        """End the attempt. Every host kills its processes and reports when none is left."""
        self.verdict = verdict
        if contract.outcome_for_code(verdict.code).restarts or not self._config.is_launched:
            previous = self.records[-1] if self.records else None
            text = f"{verdict.cause} ({verdict.code}): {verdict.message}"
            if previous is not None and history.are_alike(previous.verdict, verdict):
                # The message was logged after that attempt, and is repeated at the end of the run.
                text = f"attempt {self.attempt_number} failed as attempt {previous.attempt} did"
            self._log_text(text)
        if self.stage is Stage.GATHER:
            # A gang that could not start counts as an attempt.
            self.attempt_number += 1
        self.stage, self._stage_deadline = Stage.KILL, now + KILL_TIMEOUT_S
        # The verdict must be on storage before a host kills a rank because of it.
        self.actions.append(JudgeAttempt(verdict))
        self._broadcast("verdict", attempt=self.attempt_number, verdict=verdict.to_json())

    def _choose_hold_s(self, verdict: Verdict, now: float) -> float:
        """Return how long the hosts stay after the last attempt, 0 if they leave at once."""
        job, config = self._config.job, self._config
        has_run = self.attempt.number == self.attempt_number > 0
        if not job.hold_s or not has_run or self.stop_cause is not None:
            return 0.0
        # A role that may fail gets no new pods.
        crash_limit = 0 if job.may_fail else job.crash_limit
        if not history.fails_job(verdict, self.records, config.generation, crash_limit):
            return 0.0
        remaining_s = math.inf if self._deadline_at is None else self._deadline_at - now
        return max(0.0, min(job.hold_s, remaining_s))

    def _end_run(
        self, verdict: Verdict, *, leaves_alone: bool = False, hold_s: float = 0.0
    ) -> None:
        self.verdict, self._hold_s = verdict, hold_s
        self.stage = Stage.HOLD if hold_s else Stage.LEAVE
        self._stage_deadline = None
        self._leaves_alone = leaves_alone
        if verdict.failure.kind is FailureKind.REPEATED and not self._config.is_launched:
            self._log_text(
                f"{verdict.cause} ({verdict.code}): the same failure twice, and no new step"
            )
        self.actions.append(WriteEnd(verdict, leaves_alone, hold_s))

    # --- a host that is lost, stopped or added ----------------------------------------------------

    @property
    def _may_await_replacement(self) -> bool:
        """Return whether the gang may wait for replacements of lost hosts, once per attempt."""
        return self._config.job.replaces and self.attempt.number == self.attempt_number > 0

    def _wait_for_hosts(self, missing_hosts: Sequence[int], now: float) -> None:
        """Keep the present hosts until others replace the missing ones."""
        self.stage, self.verdict, self.stop_cause = Stage.GATHER, None, None
        self.members.stopping_hosts.clear()
        self.gathering.begin_wait("replace", now)
        host_count = len(self.members.table)
        self._log_text(
            f"keeping {host_count - len(missing_hosts)} of {host_count} hosts, until "
            f"{render_numbers(missing_hosts)} is replaced"
        )
        self.actions.append(AwaitHosts())

    def _take_stop(self, host: int, stop: Stop, now: float) -> None:
        members, excess = self.members, stop.excess
        if host in members.departing_hosts:
            return
        cause = StopFacts(StopReason.INTERRUPT) if stop.is_interrupt else OUTSIDE_STOP
        if excess is not None:
            cause = StopFacts(StopReason.DISK_EXCEEDED, excess=excess)
        elif self._config.job.replaces:
            if host not in members.table and self.stage is Stage.RUN:
                # The gang does not need its spares.
                verdict = _stop_verdict(cause, StopOutcome.NO_RANK)
                self._dismiss_host(host, verdict, leaves_alone=True)
                return
            members.stopping_hosts.add(host)
            if self.stage is Stage.GATHER and self.verdict is None:
                verdict = _stop_verdict(cause, StopOutcome.NOT_JOINED)
                if self.records and self._may_await_replacement:
                    outcome, verdict = StopOutcome.BETWEEN_ATTEMPTS, self.records[-1].verdict
                    if not contract.outcome_for_code(verdict.code).is_stop:
                        verdict = _stop_verdict(cause, outcome, verdict)
                self._release_stopped_hosts(verdict)
                return
        self._stop_gang(now, cause)

    def _stop_gang(self, now: float, cause: StopFacts) -> None:
        if self.stop_cause is not None:
            return
        self.stop_cause = cause
        # A pod that is evicted because of its disk usage is gone within a second.
        is_evicted, reason = cause.reason is StopReason.DISK_EXCEEDED, render_stop_reason(cause)
        deadline_s = 0.0 if is_evicted else max(0.0, self._config.job.grace_s - GRACE_MARGIN_S)
        if self.stage is Stage.RUN and not is_evicted:
            self._log_text(f"{reason}: the processes have {deadline_s:.0f} s to save")
        else:
            self._log_text(reason)
        if self.stage is Stage.GATHER and self.verdict is None:
            self._judge_attempt(_stop_verdict(cause, StopOutcome.NOT_JOINED), now)
        elif self.stage is Stage.RUN:
            self.attempt.begin_stop(deadline_s, now, cause)
            self._broadcast("stop")
        elif self.stage is Stage.HOLD and self.verdict is not None:
            self._let_hosts_leave(self.verdict, now)

    def _release_stopped_hosts(self, verdict: Verdict) -> set[int]:
        """Let the stopped hosts leave, host 0 last: its replacement leads from then on."""
        leaving_hosts = self.members.stopping_hosts & self.members.hellos.keys()
        self.members.stopping_hosts.clear()
        for host in sorted(leaving_hosts - {self._config.host}):
            self._dismiss_host(host, verdict, leaves_alone=True)
        if self._config.host in leaving_hosts:
            self._end_run(verdict, leaves_alone=True)
        return leaving_hosts


def _exhausted_verdict(config: Config, records: Sequence[AttemptRecord]) -> Verdict | None:
    """Return the verdict if earlier pods used up the restarts without progress."""
    job, generation = config.job, config.generation
    if job.command is None and not config.has_run_folder:
        return history.give_up_verdict_unrecorded(generation, job.crash_limit, job.preempted_limit)
    verdict = history.give_up_verdict(records, generation, job.preempted_limit)
    if job.replaces and verdict is None:
        verdict = history.used_up_verdict(records, generation, job.in_place_limit)
    return verdict


def _stop_verdict(
    cause: StopFacts, outcome: StopOutcome, previous: Verdict | None = None
) -> Verdict:
    """Return the verdict on a stop during which no process ran."""
    stop = dataclasses.replace(cause, outcome=outcome)
    previous_facts = None if previous is None else previous.facts
    return verdict_for(Failure(FailureKind.STOPPED, stop=stop, cause=previous_facts))
