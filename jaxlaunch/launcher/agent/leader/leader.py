"""Host 0's second task: waits for every host, starts attempts, decides how each ended, ends all hosts together."""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Action
from jaxlaunch.launcher.agent.gang import made_of
from jaxlaunch.launcher.agent.gang.clock import Clock
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.handshake import LeaderSide
from jaxlaunch.launcher.agent.gang.messages import Stop
from jaxlaunch.launcher.agent.gang.progress import Status, phase_timeouts
from jaxlaunch.launcher.agent.gang.rendezvous import Hello, Refusal, refusal
from jaxlaunch.launcher.agent.gang.verdict import Event
from jaxlaunch.launcher.agent.io import limits
from jaxlaunch.launcher.agent.io.link import BEAT_S, SILENCE_S, Link, Message, encoded
from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.launcher.agent.io.ports import bracketed, free_port
from jaxlaunch.launcher.agent.leader import jobset, reported_fields
from jaxlaunch.launcher.agent.leader.attempt import FROM_OUTSIDE, Attempt
from jaxlaunch.launcher.agent.leader.connections import Gate
from jaxlaunch.launcher.agent.leader.gathering import Gathering
from jaxlaunch.launcher.agent.leader.latest_writer import LatestWriter
from jaxlaunch.launcher.agent.leader.notifier import Notifier
from jaxlaunch.launcher.agent.leader.pod_log import PodLog, View
from jaxlaunch.launcher.agent.leader.rank_counts import RankLooks
from jaxlaunch.records import checked, messages
from jaxlaunch.records.attempt import furthest
from jaxlaunch.records.failure import Failure, FailureKind, StopFacts, StopOutcome, StopReason
from jaxlaunch.records.messages import names
from jaxlaunch.records.progress_annotation import Recorded
from jaxlaunch.records.summary import Of, Summary, ratio
from jaxlaunch.records.verdict import Verdict, verdict_for_code
from jaxlaunch.runs import history, unfinished
from jaxlaunch.runs.layout import AGENTS
from jaxlaunch.runs.run_folder import RunFolder
from jaxlaunch.runs.starts import Starts

TICK_S = 0.2
MANY, PAUSE_S = 100, 0.02  # from so many hosts on, messages are read so many seconds apart
TELL_S, TELL_MANY_S = BEAT_S, 2.0  # in which every host is told the state of all, and each of many: SILENCE_S is 10
KEEP_S = 1.0  # between two writes of the summary, on this machine
KEEP_THERE_S = 10.0  # on storage that outlives a pod, which may be slow
ANNOTATE_S = 60.0  # between two writes on the JobSet
ANNOTATE_WAIT_S = 10.0  # for the last of them
GONE_S = 10.0  # after which a process that SIGKILL does not end is given up
CLOSE_S = 3.0  # for the other agents to close their connections
GRACE_MARGIN_S = 5.0  # of the grace period, for killing, writing the summary and exiting
MAX_NOTES, NOTE_CHARS = 50, 2_000
REPORTS = frozenset({"event", "stacks", "nccl"})  # of a host's ranks, beside its beats


class Stage(enum.Enum):
    """What the leader is doing."""

    GATHER = "waiting for every host"
    RUN = "the processes run"
    KILL = "there is a job result; the processes are being killed"
    LEAVE = "every host may exit"


RUN = Stage.RUN  # for what comes with each beat: until Python 3.12 an enum calls a function to find its member
HAVE_RANKS = (Stage.RUN, Stage.KILL)


class Peer:
    """A host that has joined, and its connection."""

    def __init__(self, hello: Hello, link: Link) -> None:
        self.hello, self.link = hello, link
        self.excused_s = 0.0  # since its last message: time in which the leader could not receive


def _prepare_for_many(config: Config, loop: Loop, say: Callable[[str], None]) -> None:
    """Allows a connection of every host, and lets many messages come together."""
    most = limits.allow_connections(config.hosts)
    if most is not None:
        say(f"warning: a limit of {most} open files (ulimit -Hn) is too low for {config.hosts} hosts")
    if config.hosts >= MANY:
        loop.pause_between(PAUSE_S)


class Leader:
    """Calls `finish` once, after every other agent was sent the verdict. Raises OSError when its port is in use."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        hello: Hello,
        clock: Clock,
        run_folder: RunFolder,
        pod_log: PodLog,
        *,
        say: Callable[[str], None],
        finish: Callable[[Verdict, bool], None],
    ) -> None:
        self._config, self._loop, self._hello = config, loop, hello
        self._starts = Starts(run_folder, config.uid)
        self._summary_writer = LatestWriter[Summary](self._starts.write)
        self._annotator = jobset.writer(config, loop, say)
        self._notifier = Notifier(config.job.name, os.environ, say)
        self._clock, self._run_folder, self._pod_log, self._say, self._finish = clock, run_folder, pod_log, say, finish
        self._gate = Gate(config, loop, say=say, admitted=self._greet)
        _prepare_for_many(config, loop, say)
        self._epoch = secrets.token_hex(8)
        self._stage = Stage.GATHER
        self._peers: dict[int, Peer] = {}
        self._by_link: dict[Link, Peer] = {}
        self._heard: OrderedDict[int, float] = OrderedDict()  # when each host sent its last message, the oldest first
        self._not_gone: set[int] = set()  # hosts with processes of this attempt
        self._gathering = Gathering(config, say)
        self._records = unfinished.settle(run_folder, config.uid)
        self._number = self._records[-1].attempt if self._records else 0
        self._attempt = Attempt(self._number, {})
        self._started, self._seconds_before = time.time(), dict[str, float]()
        self._looks, self._made_of = RankLooks(run_folder), made_of.of(hello.versions, os.environ)
        self._verdict: Verdict | None = None
        self._is_stopping, self._stopped_by = False, FROM_OUTSIDE
        self._has_requested_stacks = self._is_alone = False
        self._leaving: set[int] = set()  # hosts that were told to stop
        self._departing: set[int] = set()  # hosts that were told to leave alone, and are still connected
        self._members = config.members  # of this attempt
        self._least = config.sizes[-1]  # hosts with which the next attempt starts at once
        self._grows_after: int | None = None  # the newest step on storage when hosts came that the gang may grow by
        self._is_growing = False  # it saves to start again with those hosts
        self._has_new_peers = self._have_come_late = False  # since the start, and since agents.json was written
        self._notes: list[str] = []
        self._saved_before: int | None = None  # by attempts that hosts took part in, and this leader may not know
        self._metrics: Mapping[str, Any] | None = None
        now = self._ticked_at = self._annotated_at = self._kept_at = time.monotonic()
        self._turn = 0  # of the hosts that are told the state of all at the next tick
        self._until = now  # when the stage ends at the latest; of KILL and LEAVE
        self._kept: tuple[int | None, Stage] | None = None  # of what the summary was written last
        self._coordinator = ""  # of this attempt

    def begin(self) -> None:
        """Reads the attempts of earlier pods, and starts to wait for every host."""
        now = time.monotonic()
        began = time.time() - (now - self._clock.began)
        self._clock.carry(history.carried(self._records, began, self._config.started))
        self._seconds_before = self._clock.seconds(self._clock.began)
        for record in self._records[-3:]:
            message = record.verdict.message
            self._say(f"previous attempt {record.attempt} (generation {record.generation}): {message}")
        self._tell_past()
        self._starts.keep_job(reported_fields.job(self._config, os.environ))
        self._keep_summary(now)
        self._give_up()
        self._loop.every(TICK_S, self._tick)

    def _tell_past(self) -> None:
        of = self._starts.number, self._config.job.processes_per_host, self._config.processes
        self._pod_log.begin(self._records, self._run_folder, *of)

    def _give_up(self) -> None:
        """Ends the gang at once, where the attempts of earlier pods already used up what may pass without progress."""
        generation, job = self._config.generation, self._config.job
        verdict = history.given_up(self._records, generation, job.preempted_limit)
        if job.replaces and verdict is None:
            verdict = history.used_up(self._records, generation, job.in_place_limit)
        if job.command is None and not self._config.keeps_run:
            verdict = history.given_up_unseen(generation, job.crash_limit, job.preempted_limit)
        if verdict is not None:
            self._verdict = verdict
            self._gathering.linger()

    # --- connections --------------------------------------------------------------------------------------------------

    def _message(self, link: Link, message: Message) -> None:
        peer = self._by_link.get(link)
        if peer is None:
            return
        now, host, kind = time.monotonic(), peer.hello.host, message["type"]
        self._heard[host], peer.excused_s = now, 0.0
        self._heard.move_to_end(host)
        try:
            if kind == "beat":
                self._take_beat(host, message)
            elif kind in REPORTS:
                self._take_report(host, message, now)
            else:
                self._take(peer, message, now)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._say(f"{peer.hello.name} sent an invalid message: {str(error)[:200]}")
            link.close()
            return self._disconnected(link, "it sent an invalid message")
        if kind != "beat" or self._stage is not RUN or self._grows_after is not None or not self._attempt.is_calm:
            self._consider()  # thousands of beats a second change nothing to consider

    def _greet(self, link: Link, side: LeaderSide, hello: Hello) -> None:
        """Takes in a host that has the run's key, or refuses it."""
        before = self._peers.get(hello.host)
        present = {} if before is None else {hello.host: before.hello}
        replaces = self._config.job.replaces
        why = refusal(hello, self._hello, present, self._config.hosts, replaces=replaces)
        is_late = self._stage is not Stage.GATHER
        is_spare = replaces and hello.host not in self._members
        if replaces:  # who comes late is told how the gang ended, or waits until it starts again
            is_late = self._stage is Stage.KILL or (self._stage is Stage.RUN and not is_spare) or self._is_alone
        if is_late and (replaces or (self._verdict is None if why is None else why.ends_gang)):
            why = Refusal(f"{hello.name} tried to join after the start", may_retry=replaces)
        if why is not None:
            self._refuse(link, side, hello, why)
            if (is_late or is_spare) and replaces and before is not None and before.hello.pod != hello.pod:
                before.link.close()  # a Job makes a pod again once the one before has ended
                self._disconnected(before.link, "its pod was replaced")
            return
        if before is not None:  # the same pod has connected again: the old connection is dead
            before.link.close()
            self._remove(before)
        link.send("welcome", **side.sealed("welcome", epoch=self._epoch))
        if not link.is_open:
            return  # the host was killed after its hello
        link.epoch = self._epoch
        link.on_message, link.on_close = self._message, self._disconnected
        self._peers[hello.host] = self._by_link[link] = Peer(hello, link)
        self._heard[hello.host] = time.monotonic()
        self._gathering.arrived.add(hello.host)
        self._has_new_peers = True
        if self._stage is Stage.RUN:
            return self._joined_late(link)
        if self._verdict is None:
            self._not_gone.add(hello.host)
            self._number = max(self._number, hello.attempt)
            self._saved_before = furthest(self._saved_before, hello.saved)
        if self._verdict is not None:
            link.send("leave", verdict=self._verdict.to_json())
        elif self._can_start:
            self._start()

    def _joined_late(self, link: Link) -> None:
        """Takes in a host without ranks: a spare, or one that the gang grows by after its next save."""
        self._order_start([link])
        self._have_come_late = True
        if self._size > len(self._members):
            self._grows_after = -1 if self._attempt.ranks.committed is None else self._attempt.ranks.committed
            self._say(f"the gang grows from {len(self._members)} to {self._size} hosts after its next save")

    def _refuse(self, link: Link, side: LeaderSide, hello: Hello, why: Refusal) -> None:
        self._gathering.note_refusal(why.message)
        link.send("refused", **side.sealed("refused", message=why.message, code=why.code, may_retry=why.may_retry))
        link.close()
        if why.ends_gang:
            self._gathering.arrived.add(hello.host)
            if self._verdict is None:
                rank = next(iter(self._members.ranks(hello.host)), None)
                self._gathering.linger()
                facts = Failure(FailureKind.REFUSED, detail=why.message)
                self._verdict = verdict_for_code(contract.BAD_SPEC, facts, rank=rank, host=hello.host)
                self._broadcast("verdict", attempt=self._number + 1, verdict=self._verdict.to_json())

    def _disconnected(self, link: Link, reason: str) -> None:
        peer = self._by_link.get(link)
        if peer is None:
            return
        unseen_s = time.monotonic() - self._heard[peer.hello.host]
        self._remove(peer)
        if self._stage is Stage.GATHER and self._verdict is None:
            self._say(f"{peer.hello.name} disconnected: {reason}")
        elif self._stage is Stage.RUN:
            if peer.hello.host in self._members:
                self._attempt.add_lost_host(peer.hello.host, reason, time.monotonic(), unseen_s)
            else:
                self._say(f"{peer.hello.name}, a spare, disconnected: {reason}")
        self._consider()

    def _remove(self, peer: Peer) -> None:
        """Forgets a host whose connection is closed."""
        host = peer.hello.host
        del self._peers[host], self._by_link[peer.link], self._heard[host]
        self._not_gone.discard(host)
        self._departing.discard(host)

    # --- messages -----------------------------------------------------------------------------------------------------

    def _take(self, peer: Peer, message: Message, now: float) -> None:
        kind = message["type"]
        if kind == "stop":
            excess = checked.read(Stop, message).excess
            if excess is None and self._config.job.replaces:
                if peer.hello.host not in self._members and self._stage is Stage.RUN:  # the gang goes on without it
                    return self._dismiss(peer, _stopped(FROM_OUTSIDE, StopOutcome.NO_RANK))
                self._leaving.add(peer.hello.host)
                if self._stage is Stage.GATHER and self._verdict is None:
                    self._let_go(self._stopped_while_waiting())
                    return
            by = StopFacts(StopReason.DISK_EXCEEDED, excess=excess) if excess else FROM_OUTSIDE
            self._stop_requested(now, by)
        elif kind == "kill":
            self._say(f"{peer.hello.name} received a second signal to stop")
            self._attempt.kill(now)
        elif kind == "note":
            self._note(str(message["text"])[:NOTE_CHARS])
        elif message["attempt"] == self._number and kind == "gone":
            self._not_gone.discard(peer.hello.host)

    def _take_beat(self, host: int, message: Message) -> None:
        """Takes in what has changed of a host's ranks."""
        if message["attempt"] != self._number or self._stage not in HAVE_RANKS:
            return  # of an earlier attempt, which already has its verdict
        metrics = message.get("metrics")
        if metrics is not None:
            if not isinstance(metrics, Mapping):
                raise TypeError(f"metrics are {metrics!r}")
            self._metrics = metrics or self._metrics
        self._attempt.ranks.merge(host, message["ranks"])

    def _take_report(self, host: int, message: Message, now: float) -> None:
        """Takes in what happened to a host's ranks. After the verdict their states still count, no symptom does."""
        kind, attempt = message["type"], self._attempt
        if message["attempt"] != self._number or self._stage not in HAVE_RANKS:
            return
        if kind == "nccl":
            attempt.hang.add_nccl(host, str(message["text"]))
        elif kind in ("stacks", "event"):
            rank = message["rank"]
            if rank not in self._members.ranks(host):
                raise ValueError(f"it has no rank {rank!r}")
            attempt.ranks.update({rank: Status.from_wire(message["status"])})
            if kind == "stacks":
                attempt.hang.add_stacks(rank, str(message["text"]))
            elif self._stage is Stage.RUN:
                attempt.add(Event.from_wire(host, message), now)

    def _stop_requested(self, now: float, by: StopFacts = FROM_OUTSIDE) -> None:
        if self._is_stopping:
            return
        self._is_stopping, self._stopped_by = True, by
        reason = messages.render_stop_reason(by)
        is_evicted = by.reason is StopReason.DISK_EXCEEDED  # that pod is gone in a second
        deadline_s = 0.0 if is_evicted else max(0.0, self._config.job.grace_s - GRACE_MARGIN_S)
        can_save = self._stage is Stage.RUN and not is_evicted
        self._say(f"{reason}: the processes have {deadline_s:.0f} s to save" if can_save else reason)
        if self._stage is Stage.GATHER and self._verdict is None:
            self._decide(_stopped(by, StopOutcome.NOT_JOINED))
        elif self._stage is Stage.RUN:
            self._attempt.stop(deadline_s, now, by)
            self._broadcast("stop")

    def _check_deadline(self, now: float) -> None:
        """Stops the job once its deadline has passed: the seconds of all its generations count."""
        limit_s = self._config.job.deadline_s
        if self._stage is Stage.LEAVE:
            return  # it has ended: there is nothing left to stop
        if limit_s is not None and not self._is_stopping and sum(self._clock.seconds(now).values()) >= limit_s:
            self._stop_requested(now, StopFacts(StopReason.DEADLINE, deadline_s=limit_s))

    def _note(self, text: str) -> None:
        if text not in self._notes and len(self._notes) < MAX_NOTES:
            self._notes.append(text)

    # --- attempts -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts the processes of all hosts, with a new port for JAX's coordinator."""
        if self._has_new_peers and self._attempt.number == self._number and self._records:
            self._tell_past()  # the lines of a lost pod went with it
        members = self._members = self._members.regrouped(self._present, self._size)
        self._least, self._grows_after = len(members), None
        if self._has_new_peers:
            self._list_agents()
            self._has_new_peers = False
        self._number += 1
        ranks = {host: members.ranks(host) for host in members.hosts}
        self._attempt = Attempt(self._number, ranks, self._config.job.platform)
        self._stage, self._verdict, self._has_requested_stacks = Stage.RUN, None, False
        self._started = time.time()
        self._not_gone = set(self._peers)
        counts = (members.processes, "process", "es"), (len(members), "host", "s")
        size = " on ".join(f"{count} {name}{plural if count > 1 else ''}" for count, name, plural in counts)
        self._say(f"starting attempt {self._number}: {size}")
        self._clock.restart.enter("start", time.monotonic())
        self._coordinator = f"{bracketed(self._config.leader[0])}:{free_port()}"
        self._order_start([peer.link for peer in self._peers.values()])
        self._keep_summary(time.monotonic())

    def _order_start(self, links: Sequence[Link]) -> None:
        """Tells hosts of the attempt that starts, or that they came to, and which hosts hold its ranks."""
        saved = history.saved(self._records, self._config.generation)
        if saved is None and self._starts.has_written:
            saved = 0
        message = encoded(
            "start",
            attempt=self._number,
            coordinator=self._coordinator,
            start=self._starts.number,
            members=self._members.to_wire(),
            saved=furthest(saved, self._saved_before),
        )
        for link in links:
            link.send_encoded(message)

    def _consider(self) -> None:
        """Goes to the next stage if it is time. Called after every message and every tick."""
        now = time.monotonic()
        if self._stage is Stage.GATHER:
            self._check_gathering(now)
        elif self._stage is Stage.RUN:
            self._watch(now)
        elif self._verdict is not None and self._stage is Stage.KILL and (not self._not_gone or now > self._until):
            self._after_all_are_gone(self._verdict)
        elif self._verdict is not None and self._stage is Stage.LEAVE and self._may_leave(now):
            self._finish(self._verdict, self._is_alone)

    def _watch(self, now: float) -> None:
        if self._attempt.hang.wants_stacks and not self._has_requested_stacks:
            self._has_requested_stacks = True
            self._broadcast("stacks")
        if self._grows_after is not None and not self._is_growing and not self._is_stopping:
            self._grow(now, self._grows_after)
        verdict = self._attempt.verdict(now, self._heard)
        if verdict is not None:
            self._decide(verdict)

    def _decide(self, verdict: Verdict) -> None:
        """Takes the verdict on an attempt: every host kills its processes and reports when none is left."""
        self._verdict = verdict
        is_final = contract.outcome(verdict.code).action in (Action.FAIL, Action.COMPLETE)
        if not (is_final and self._config.is_launched):
            self._say(f"{verdict.cause} ({verdict.code}): {verdict.message}")
        if self._stage is Stage.GATHER:
            self._number += 1  # it ended before its processes started, and counts as an attempt
        self._pod_log.judged(verdict, self._number)
        self._notifier.judged(verdict, self._number)
        now = time.monotonic()
        if self._attempt.number == self._number:
            self._looks.look(self._attempt.statuses, 0.0, is_due=True)
            self._clock.restart.begin(*self._attempt.end_timing(now), now)
        self._stage, self._until = Stage.KILL, now + GONE_S
        self._keep_summary(now, is_urgent=True)  # first: who is killed from here on has died of this verdict
        self._broadcast("verdict", attempt=self._number, verdict=verdict.to_json())

    def _after_all_are_gone(self, verdict: Verdict) -> None:
        """Records the attempt, then starts another or ends this generation."""
        now = time.monotonic()
        if verdict.code == contract.DONE:
            self._clock.ended(now)
        else:
            self._clock.died(now)
        self._record(verdict, now)
        limit, may_wait = self._config.job.in_place_limit, self._may_wait
        move = history.next_move(self._records, limit, self._can_start or may_wait)
        has_grown, self._is_growing = self._is_growing and not self._is_stopping, False
        if has_grown and verdict.code == contract.PREEMPTED:
            return self._start() if self._can_start else self._wait(self._missing)
        end = None if move.again else move.verdict
        if move.again and self._is_stopping:
            end = _stopped(self._stopped_by, StopOutcome.BETWEEN_ATTEMPTS, move.verdict)
        if end is not None:
            others_stay = bool(self._leaving and self._peers.keys() - self._leaving)
            parts = others_stay and may_wait and end.code == contract.PREEMPTED
            return self._part(end) if parts else self._end(end)
        count = history.restarts_used(self._records, self._config.generation)
        self._say(f"restarting in place: {count} of {limit} restarts (restarts.in_place) since the last committed step")
        if self._can_start:
            self._start()
        else:
            self._wait(self._missing)

    # --- a lost host --------------------------------------------------------------------------------------------------

    @property
    def _may_wait(self) -> bool:
        """Whether hosts that are lost now are replaced: once for each attempt whose processes started."""
        return self._config.job.replaces and self._attempt.number == self._number > 0

    def _wait(self, missing: Sequence[int]) -> None:
        """Keeps every host that is there, until others have taken the places of those that are missing."""
        self._stage, self._verdict = Stage.GATHER, None
        self._is_stopping, self._stopped_by, self._leaving = False, FROM_OUTSIDE, set()
        self._gathering.begin("replace")
        now = time.monotonic()
        self._clock.restart.enter("replace", now)
        kept = len(self._members) - len(missing)
        self._say(f"keeping {kept} of {len(self._members)} hosts, until {names(missing)} is replaced")
        self._keep_summary(now)

    def _part(self, verdict: Verdict) -> None:
        """After a stop of some hosts: they leave, the others wait for what takes their places."""
        limit = self._config.job.preempted_limit
        given_up = history.given_up(self._records, self._config.generation, limit)
        if given_up is not None:
            return self._end(given_up)
        leaving = self._let_go(verdict)
        if self._stage is not Stage.LEAVE:
            self._wait(sorted({*self._missing, *leaving}))

    def _let_go(self, verdict: Verdict) -> set[int]:
        """Lets the hosts that were told to stop leave alone, host 0 last: who takes its place leads from then on."""
        leaving, self._leaving = self._leaving & self._peers.keys(), set()
        for host in leaving - {self._config.host}:
            self._dismiss(self._peers[host], verdict)
        if self._config.host in leaving:
            self._is_alone, self._verdict, self._stage = True, verdict, Stage.LEAVE
            self._until = time.monotonic()
            self._summary_writer.finish()
            self._starts.write(self._summary(verdict))
            self._annotate("left", verdict)
        return leaving

    def _dismiss(self, peer: Peer, verdict: Verdict) -> None:
        """Lets one host leave, whose gang goes on."""
        self._departing.add(peer.hello.host)
        peer.link.send("leave", verdict=verdict.to_json(), alone=True)

    def _stopped_while_waiting(self) -> Verdict:
        last = self._records[-1].verdict if self._records and self._may_wait else None
        if last is not None and last.code == contract.PREEMPTED:
            return last
        outcome = StopOutcome.NOT_JOINED if last is None else StopOutcome.BETWEEN_ATTEMPTS
        return _stopped(FROM_OUTSIDE, outcome, last)

    # --- more or fewer hosts ------------------------------------------------------------------------------------------

    @property
    def _present(self) -> Collection[int]:
        return self._peers.keys() - self._departing if self._departing else self._peers.keys()

    @property
    def _size(self) -> int:
        """How many hosts would hold ranks in an attempt that started now; 0: there are too few.

        This host is one of them always: rank 0, at whose address the others look for JAX's coordinator, is here.
        """
        present = self._present
        many = len(present) if self._config.host in present else 0
        smaller = bisect.bisect_right(self._config.sizes, many)
        return self._config.sizes[smaller - 1] if smaller else 0

    @property
    def _can_start(self) -> bool:
        """Whether there are as many hosts as the next attempt waits for."""
        return self._size >= self._least

    def _grow(self, now: float, known: int) -> None:
        """Once the ranks have saved: has them stop, so that the gang starts again with the hosts that have come."""
        size, least = self._size, len(self._members)
        if size > least and (self._attempt.last_committed or -1) > known:
            by = StopFacts(StopReason.GROWTH, hosts=size, hosts_before=least)
            self._say(messages.render_stop_reason(by))
            self._is_growing, self._least = True, least
            save_s = phase_timeouts(self._config.job.timeouts_s)["save"]  # nobody ends these pods
            self._attempt.stop(self._config.job.grace_s if save_s is None else save_s, now, by)
            self._broadcast("stop")

    def _record(self, verdict: Verdict, now: float) -> None:
        seconds = self._clock.seconds(now)
        record = reported_fields.record(
            self._config,
            self._number,
            verdict,
            first_committed=self._attempt.ranks.first_committed,
            last_committed=self._attempt.last_committed,
            seconds=self._own(seconds),
            restart=self._clock.restart.last,
            started=self._started,
            members=self._members,
        )
        self._seconds_before = seconds
        others = self._run_folder.records(self._config.uid)
        if others and others[-1].attempt == self._number:  # host 0 stood still, and host 1 has ended the attempt
            self._records.append(others[-1])
            return
        self._records.append(record)
        self._run_folder.append(record)

    def _end(self, verdict: Verdict) -> None:
        """Has every agent exit with this verdict's code."""
        self._verdict, self._stage = verdict, Stage.LEAVE
        self._notifier.ended()
        self._summary_writer.finish()
        self._starts.write(self._summary(verdict))
        now = time.monotonic()
        self._until = now + CLOSE_S  # from here on: storage may stall
        self._pod_log.look(self._view, now, is_news=True)
        self._broadcast("ping", gang=self._gang(now))
        self._broadcast("leave", verdict=verdict.to_json())
        is_final = contract.outcome(verdict.code).action in (Action.FAIL, Action.COMPLETE)
        self._annotate("ended" if is_final else "left", verdict)

    def _broadcast(self, kind: str, **fields: Any) -> None:
        message = encoded(kind, **fields)
        for peer in list(self._peers.values()):
            peer.link.send_encoded(message)

    def _tell(self, now: float) -> None:
        """Sends the state of all hosts to those whose turn it is: to all at once would delay what is urgent."""
        many = self._config.hosts
        turns = round((TELL_S if many < MANY else TELL_MANY_S) / TICK_S)
        turn = [self._peers[host] for host in range(self._turn, many, turns) if host in self._peers]
        self._turn = (self._turn + 1) % turns
        if turn:
            message = encoded("ping", gang=self._gang(now))
            for peer in turn:
                peer.link.send_encoded(message)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        away, self._ticked_at = now - self._ticked_at, now
        if away > SILENCE_S / 2:  # this process itself was stopped or starved: it could not receive anything
            for peer in self._peers.values():
                peer.excused_s += away
        self._gate.tick(now)
        silent = itertools.takewhile(lambda host: now - self._heard[host] > SILENCE_S, self._heard)
        for peer in [self._peers[host] for host in silent]:
            if now - self._heard.get(peer.hello.host, now) - peer.excused_s > SILENCE_S:
                peer.link.close()
                self._disconnected(peer.link, f"no message for {SILENCE_S:.0f} s")
        self._tell(now)
        if self._have_come_late and self._turn == 0:  # once for all, where thousands have
            self._list_agents()
        self._pod_log.look(self._view, now)
        self._notifier.look(self._view, now)
        self._consider()
        self._check_deadline(now)
        state = self._attempt.ranks.committed, self._stage
        if self._stage is not Stage.LEAVE and (state != self._kept or now - self._kept_at >= self._keep_every_s):
            self._keep_summary(now)
        if self._stage is Stage.RUN:
            self._looks.look(self._attempt.statuses, self._keep_every_s)
        if self._stage is Stage.RUN and now - self._annotated_at >= ANNOTATE_S:
            self._annotate("running", None)

    @property
    def _have_left(self) -> bool:
        return self._peers.keys() <= {self._config.host}

    def _may_leave(self, now: float) -> bool:
        """Whether all others know the end, the JobSet and the webhook too; none is waited for without limit."""
        if self._notifier.is_busy(now):
            return False
        is_writing = self._annotator is not None and self._annotator.is_busy
        return (self._have_left or now > self._until) and not (
            is_writing and now < self._annotated_at + ANNOTATE_WAIT_S
        )

    @property
    def _missing(self) -> list[int]:
        present = self._present
        return [host for host in self._members.hosts if host not in present]

    def _check_gathering(self, now: float) -> None:
        if self._verdict is None and self._can_start:
            return self._start()
        size, full = self._size, self._config.sizes[-1]
        if self._verdict is None and self._gathering.is_enough(now) and 0 < size < full:
            self._say(f"{names(self._missing)} did not join in time: continuing with {size} of {full} hosts")
            return self._start()
        if self._verdict is None:
            verdict = self._gathering.given_up(self._members, lambda: self._missing, now)
        else:  # refused: hosts that join in a while still get to know
            verdict = self._verdict if self._gathering.all_know(now) else None
        if verdict is not None:
            self._decide(verdict)

    # --- reports ------------------------------------------------------------------------------------------------------

    def _gang(self, now: float) -> dict[str, Any]:
        """The state of all hosts, for the metrics of every agent."""
        seconds = self._clock.seconds(now)
        oldest = next((at for host, at in self._heard.items() if host != self._config.host), now)
        return {
            "attempt": self._number,
            "of": {**checked.to_json(self._of(seconds, now)), "uid": ""},  # which is the key, and never sent
            "seconds": seconds,
            "unsafe_s": self._clock.unsafe_s(now),
            "foremost": self._attempt.ranks.last_step,
            "silence_s": now - oldest,
            **history.counters(self._records, self._config.generation, self._config.job),
        }

    def _view(self) -> View:
        """The state of all hosts, for the log of the pod."""
        has_ended = self._stage is Stage.LEAVE
        return View(
            stage=self._stage.name.lower(),
            attempt=self._number,
            members=self._members.to_wire(),
            missing=self._missing,
            refused=self._gathering.newest_refusals,
            step=self._attempt.ranks.first_step
            or self._saved
            or self._attempt.ranks.first_step,  # saved ones until the attempt has its own
            committed=self._attempt.ranks.committed,
            statuses=self._attempt.statuses,
            overdue=self._attempt.hang.overdue,
            seconds=self._clock.seconds(time.monotonic()),
            restarts=(history.restarts_by_cause if has_ended else history.ends_by_cause)(self._records),
            preempted=None if self._run_folder.gap else history.preemptions_without_progress(self._records),
            metrics=self._metrics,
            restart=self._restart_seconds(time.monotonic()),
        )

    def _keep_summary(self, now: float, *, is_urgent: bool = False) -> None:
        """Writes the state of the run, from which its end is known if every agent is killed.

        Storage that stalls delays this a second at most, and only where it is urgent or the folder is on this machine.
        """
        self._kept, self._kept_at = (self._attempt.ranks.committed, self._stage), now
        self._summary_writer.keep(self._summary(None), wait_s=KEEP_S if self._config.is_local or is_urgent else 0.0)

    def _annotate(self, when: str, verdict: Verdict | None) -> None:
        """Writes on the JobSet how far the job is, where its service account may."""
        self._annotated_at = time.monotonic()
        if self._annotator is None:
            return
        view, saved = self._view(), self._summary(verdict).saved
        seconds = {"step": 0.0, **view.seconds}
        of = self._config.uid, time.time(), when, self._number, self._config.generation
        known = Recorded(*of, view.step, saved, ratio(seconds), history.ends_by_cause(self._records), verdict)
        self._annotator.keep(known)

    @property
    def _keep_every_s(self) -> float:
        """Seconds between two writes of the summary."""
        return KEEP_S if self._config.is_local else KEEP_THERE_S

    def _own(self, seconds: Mapping[str, float]) -> dict[str, float]:
        """The seconds of this attempt alone, of those of the run."""
        return {cause: spent - self._seconds_before.get(cause, 0.0) for cause, spent in seconds.items()}

    def _of(self, seconds: Mapping[str, float], now: float) -> Of:
        """The attempt that the summary is of."""
        judged = self._verdict if self._stage is Stage.KILL else None
        return Of(
            uid=self._config.uid,
            generation=self._config.generation,
            attempt=self._number + (self._stage is Stage.GATHER),
            started=self._started,
            at=time.time(),
            seconds={cause: round(spent, 3) for cause, spent in self._own(seconds).items()},
            first_committed=self._attempt.ranks.first_committed,
            last_committed=self._attempt.last_committed,
            unsafe_s=round(self._clock.unsafe_s(now), 3),
            first_step=self._attempt.statuses[0].first_step if self._attempt.statuses else None,
            judged=judged,
            restart=self._restart_seconds(now),
        )

    def _restart_seconds(self, now: float) -> Mapping[str, float]:
        """Of the attempt that the summary is of."""
        has_ended = self._stage in (Stage.KILL, Stage.LEAVE)
        return self._clock.restart.last if has_ended else self._clock.restart.seconds(now)

    @property
    def _saved(self) -> int | None:
        """The newest step on storage, by all that is known."""
        committed = (record.last_committed for record in self._records)
        return furthest(self._starts.known, *committed, self._attempt.ranks.committed)

    def _summary(self, verdict: Verdict | None) -> Summary:
        now = time.monotonic()
        seconds = self._clock.seconds(now)
        return Summary(
            verdict,
            step=self._attempt.ranks.first_step,
            saved=self._saved,
            of=dataclasses.replace(self._of(seconds, now), made_of=self._made_of),
            seconds=seconds,
            restarts=history.restarts_by_cause(self._records),
            metrics=self._metrics,
            notes=self._notes,
            stacks=self._attempt.hang.stacks,
            nccl=self._attempt.hang.nccl,
            restart_seconds=history.restarts(self._records, self._number, self._restart_seconds(now)),
        )

    def _list_agents(self) -> None:
        """Writes where each host's agent answers, and which ranks it has."""
        peers, self._have_come_late = sorted(self._peers.items()), False
        of = [reported_fields.address(peer.hello, peer.link.peer, self._members.ranks(host)) for host, peer in peers]
        self._run_folder.write(AGENTS, of)


def _stopped(by: StopFacts, outcome: StopOutcome, before: Verdict | None = None) -> Verdict:
    """Return the verdict on a stop that no process was running for, `before` being that on the attempt before it."""
    cause = None if before is None else before.facts
    facts = Failure(FailureKind.STOPPED, stop=dataclasses.replace(by, outcome=outcome), cause=cause)
    return verdict_for_code(by.code, facts)
