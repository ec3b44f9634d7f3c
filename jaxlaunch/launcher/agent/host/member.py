"""One host of the gang: reports its processes to the leader, and does what the leader decides.

Decides nothing itself while it has a leader; when the leader is lost it ends its processes and reports that. Where lost
hosts are replaced, it then waits for the next leader.
"""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.clock import Clock
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.handshake import HostSide, NotProven
from jaxlaunch.launcher.agent.gang.messages import FROM_LEADER, Judged, Leave, Ping, Refused, Start, Welcome
from jaxlaunch.launcher.agent.gang.nccl_status import asks_nccl
from jaxlaunch.launcher.agent.gang.progress import Changes, Status, phase_timeouts
from jaxlaunch.launcher.agent.gang.rendezvous import Hello
from jaxlaunch.launcher.agent.gang.reports import UNSTARTABLE
from jaxlaunch.launcher.agent.gang.stacks import MAX_CHARS
from jaxlaunch.launcher.agent.gang.verdict import Kind, is_signals, of_lost_leader
from jaxlaunch.launcher.agent.host import ephemeral, nccl_ras
from jaxlaunch.launcher.agent.host.child import Child
from jaxlaunch.launcher.agent.host.processes import Processes
from jaxlaunch.launcher.agent.host.profiles import Profiles
from jaxlaunch.launcher.agent.host.reported_metrics import ReportedMetrics
from jaxlaunch.launcher.agent.host.site_folder import SiteFolder
from jaxlaunch.launcher.agent.io import cgroup
from jaxlaunch.launcher.agent.io.dial import RETRY_S, Dialer
from jaxlaunch.launcher.agent.io.link import BEAT_S, SILENCE_S, Link, Message, secured
from jaxlaunch.launcher.agent.io.loop import Loop, Timer
from jaxlaunch.launcher.agent.io.output import OutputStream
from jaxlaunch.records import checked, messages
from jaxlaunch.records.checked import Malformed
from jaxlaunch.records.failure import (
    Failure,
    FailureKind,
    HangFacts,
    Numbers,
    RendezvousFacts,
    StopFacts,
    StopOutcome,
    StopReason,
)
from jaxlaunch.records.members import from_wire as members_of
from jaxlaunch.records.verdict import Verdict, verdict_for_code

TICK_S = 0.2
CHALLENGE_S = 60.0  # the leader's silence on a new connection: it may have thousands to accept before this one
HELLO_S = 10.0  # by then a Python program has loaded our site hook
ONE_PRESS_S = 0.5  # closer signals count as one: a terminal and the launcher may both pass a Ctrl-C on
RETRY_REFUSED_S = 2.0
MAX_NOTES = 50  # of a process
STACKS_S = 2.0  # for the processes to write their stacks

_OF_PHASES = {"init": "rendezvous", "step": "first_step"}  # of a phase, what a start spends its first seconds on

Finish = Callable[[Verdict, bool], None]  # with the gang's verdict, or alone


class Member:
    """Calls `finish` once, when this host may exit; `orphaned` before that, if it has lost its leader."""

    _returns: Timer | None = None  # until when the next leader has to be there
    _nccl: nccl_ras.Question | None = None  # under way: what NCCL knows of a hang

    def __init__(
        self,
        config: Config,
        loop: Loop,
        site_folder: SiteFolder,
        hello: Hello,
        stdout: OutputStream,
        clock: Clock | None,
        *,
        say: Callable[[str], None],
        finish: Finish,
        orphaned: Callable[[Verdict], None],
        take: Callable[[range], None],  # is told the ranks of this host before they start
    ) -> None:
        self.gang: Mapping[str, Any] = {}  # the leader's last report of all hosts
        self.last_message_at = time.monotonic()
        self.timeouts_s = phase_timeouts(config.job.timeouts_s)
        self._config, self._loop, self._hello, self._clock = config, loop, hello, clock
        self._say, self._finish, self._orphaned, self._take = say, finish, orphaned, take
        self.processes = Processes(
            config, loop, site_folder, stdout, say=say, on_report=self._on_report, on_end=self._child_ended
        )
        self.profiles = Profiles(config.job.command is None, self.processes.alive)
        self._dialer = Dialer(loop, config.leader, say=say, connected=self._connected)
        self._link: Link | None = None
        self._patience_s = SILENCE_S  # with the leader
        self._side = HostSide(config.key)  # of the handshake with the leader
        self._refusal: str | None = None  # why the leader that was reached last is not this host's
        self._attempt = 0
        self._has_started = self._is_stopping = False
        self._verdict: Verdict | None = None
        self._signalled_at: float | None = None
        self._ticked_at = self._beat_at = time.monotonic()
        self._reported = ReportedMetrics(config.run_dir, say, lambda text: loop.after(0.0, lambda: say(text)))
        self._changes = Changes()  # of the ranks' states, for the leader
        self._overdue: set[int] = set()  # ranks whose timeout was reported in this attempt
        self._warned_of_hook: set[int] = set()  # ranks without our site hook
        self._oom_kills = cgroup.oom_kills()
        self._stacks_until: float | None = None
        self._stacks: dict[int, str] = {}  # of each rank, as of the last tick
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.on_signal(number, self.request_stop)
        self._handlers: dict[str, Callable[[Link, Any], None]] = {
            "ping": self._pinged,
            "start": self._start,
            "stop": self._stop,
            "stacks": self._dump,
            "verdict": self._judged,
            "leave": self._leave,
        }

    @property
    def attempt(self) -> int:
        """The number of the present attempt, across generations."""
        return self._attempt

    @property
    def is_signalled(self) -> bool:
        """Whether this agent has received SIGTERM or SIGINT."""
        return self._signalled_at is not None

    def begin(self) -> None:
        """Connects to the leader."""
        self._dialer.dial()
        self._loop.every(TICK_S, self._tick)
        timeout_s = self.timeouts_s["rendezvous"]
        if timeout_s is not None and not self._config.is_leader:  # host 0's leader has this timeout for all hosts
            self._loop.after(timeout_s, self._rendezvous_timed_out)

    def request_stop(self) -> None:
        """Handles SIGTERM and SIGINT: the leader is asked to stop all hosts. The second one kills the processes."""
        now = time.monotonic()
        first, self._signalled_at = self._signalled_at, self._signalled_at or now
        if first is not None and now - first < ONE_PRESS_S:
            return
        excess = ephemeral.excess(self._config.job, self._config.host) if first is None else None
        if self._link is None or self._link.epoch is None:
            self.processes.kill()
            reason = StopReason.OUTSIDE if excess is None else StopReason.DISK_EXCEEDED
            stop = StopFacts(reason, StopOutcome.NOT_JOINED, excess=excess)
            verdict = verdict_for_code(stop.code, Failure(FailureKind.STOPPED, stop=stop))
            return self._finish(verdict, self._config.job.replaces and excess is None)
        if first is None:
            self._say("received a signal to stop" + (f": {messages.render_excess(excess)}" if excess else ""))
            return self._link.send("stop", excess=checked.to_json(excess))
        self._say("received a second signal to stop: killing the processes")
        self._link.send("kill")
        self.processes.kill()

    # --- the leader ---------------------------------------------------------------------------------------------------

    def _connected(self, sock: socket.socket) -> None:
        try:
            peer, channel = str(sock.getpeername()[0]), secured(self._config.certificates, is_server=False)
            self._link = Link(self._loop, sock, self._message, self._leader_lost, peer, channel)
        except OSError:  # the other side closed meanwhile
            sock.close()
            return self._dialer.dial(RETRY_S)
        self._side = HostSide(self._config.key)
        self.last_message_at, self._patience_s = time.monotonic(), CHALLENGE_S

    def _message(self, link: Link, message: Message) -> None:
        self.last_message_at, self._patience_s = time.monotonic(), SILENCE_S
        if link.epoch is None:
            return self._shake_hands(link, message)
        kind = message["type"]
        if (handler := self._handlers.get(kind)) is None:
            return  # of a newer host 0
        try:
            order = checked.read(FROM_LEADER[kind], message) if kind in FROM_LEADER else None
        except Malformed as error:
            link.close()
            return self._leader_lost(link, f"it sent a `{kind}` whose {error}")
        handler(link, order)

    def _shake_hands(self, link: Link, message: Message) -> None:
        """Takes the messages before this host is admitted: whoever answers may be no leader of this run."""
        try:
            if message["type"] == "challenge":
                hello = dataclasses.replace(self._hello, attempt=self._attempt, saved=self._saved)
                return link.send("hello", **self._side.hello(message, hello.to_wire()))
            fields = self._side.opened(message)
            if message["type"] == "welcome":
                link.epoch = checked.read(Welcome, fields).epoch
                if self._returns is not None:
                    self._returns.cancel()
                    self._returns = None
                return
            refused = checked.read(Refused, fields)
        except (NotProven, Malformed) as error:
            link.close()
            return self._leader_lost(link, str(error))
        self._refused(link, refused)

    def _refused(self, link: Link, answer: Refused) -> None:
        link.close()
        self._link = None
        if answer.may_retry:
            self._try_again(f"refused this host: {answer.message}")
        else:
            self._say(f"host 0 refused this host: {answer.message}")
            self._finish(verdict_for_code(answer.code, Failure(FailureKind.REFUSED, detail=answer.message)), False)

    def _try_again(self, reason: str) -> None:
        """Dials once more in a while; why is said once."""
        if reason != self._refusal:
            self._say(f"host 0 {reason}")
        self._refusal = reason
        self._dialer.dial(RETRY_REFUSED_S)

    def _pinged(self, link: Link, order: Ping) -> None:
        self.gang = checked.to_json(order.gang)

    def _leader_lost(self, link: Link, reason: str) -> None:
        self._link = None
        if link.epoch is None:
            hint = "it may belong to another run, or have another gang_secret"
            return self._try_again(f"did not admit this host: {reason}; {hint}")
        if self._verdict is None and not self._has_started:
            return self._dialer.dial()  # it may start again
        self._abandon(reason)

    def _abandon(self, reason: str) -> None:
        """Ends the processes of this host, which has lost its leader."""
        if self._verdict is None:
            own = [child.progress.status for child in self.processes.children.values()]
            rank, committed = 0, self.gang.get("of", {}).get("last_committed")
            self._verdict = of_lost_leader(reason, rank, own, committed, is_stopping=self._is_stopping)
            self._say(self._verdict.message)
            self._orphaned(self._verdict)
        self.processes.kill()
        self._report_gone()

    @property
    def _saved(self) -> int | None:
        """The newest step on storage that this host knows of; 0 where processes of the gang ran, and None before."""
        own = [child.progress.status.committed for child in self.processes.children.values()]
        steps = (self.gang.get("of", {}).get("last_committed"), *own)
        return max((step for step in steps if step is not None), default=0 if self._has_started else None)

    def _may_wait(self, verdict: Verdict) -> bool:
        """Whether a host without a leader waits for the next one after an attempt that ended like this."""
        can_go_on = contract.outcome(verdict.code).in_place or verdict.code == contract.PREEMPTED
        return self._config.job.replaces and can_go_on and not self.is_signalled and not self._config.is_leader

    def _wait(self, verdict: Verdict) -> None:
        """Keeps this host, until another pod leads from host 0's place."""
        if self._returns is not None:
            return  # it does already
        timeout_s = self.timeouts_s["replace"]
        self._say("keeping this host, until host 0 is replaced")
        wait = RendezvousFacts(Numbers.of([0]), timeout_s, "timeouts.replace")
        given_up = verdict.with_failure(dataclasses.replace(verdict.facts, rendezvous=wait))
        self._returns = self._loop.after(timeout_s or math.inf, lambda: self._given_up(given_up))
        self._dialer.dial(RETRY_S)

    def _given_up(self, verdict: Verdict) -> None:
        self._say(verdict.message)
        self._orphaned(verdict)
        self._finish(verdict, False)

    def _rendezvous_timed_out(self) -> None:
        is_admitted = self._link is not None and self._link.epoch is not None
        if not is_admitted and not self._has_started:
            wait = RendezvousFacts(address=":".join(map(str, self._config.leader)))
            facts = Failure(FailureKind.CANNOT_JOIN, detail=self._refusal or self._dialer.reason, rendezvous=wait)
            verdict = verdict_for_code(contract.LOST, facts, rank=0, host=0)
            self._say(verdict.message)
            self._orphaned(verdict)
            self._finish(verdict, False)

    # --- the leader's orders ------------------------------------------------------------------------------------------

    def _start(self, link: Link, order: Start) -> None:
        self._attempt, self._has_started, self._verdict = order.attempt, True, None
        self._is_stopping = False
        self._overdue.clear()
        self._warned_of_hook.clear()
        self._reported.unsent, self._changes = None, Changes()
        if self._clock is not None:
            self._clock.enter("init", time.monotonic())
        listens = link.peer if self._config.is_leader else None  # as the other hosts reach it
        members = members_of(order.members, self._config.job.processes_per_host, self._config.hosts)
        self.processes.flush()
        self._take(members.ranks(self._config.host))
        self.processes.start(members, order.attempt, order.coordinator, listens, order.start, order.saved)
        children = list(self.processes.children.values())
        if not children:
            self._say("holds no rank now: it is a spare, ready to take those of a lost host")
            self.processes.keep_standbys()
        self._loop.after(HELLO_S, lambda: self._check_hellos(children))

    def _stop(self, link: Link, order: None) -> None:
        self._is_stopping = True
        self.processes.stop()

    def _dump(self, link: Link, order: None) -> None:
        self.processes.dump_stacks()
        self._stacks_until, self._stacks = time.monotonic() + STACKS_S, {}
        if asks_nccl(self._config.job.platform, self._config.host):
            self._nccl = nccl_ras.Question(os.environ)

    def _judged(self, link: Link, order: Judged) -> None:
        self._attempt, self._verdict = order.attempt, order.verdict
        self.processes.kill()
        self._report_gone()

    def _leave(self, link: Link, order: Leave) -> None:
        if not self._config.is_leader:  # host 0 stays until every host has this message
            self._finish(order.verdict, order.alone)

    # --- the processes ------------------------------------------------------------------------------------------------

    def _on_report(self, child: Child, message: Mapping[str, Any]) -> None:
        self._count(child, message)
        if "error" in message and child.is_program:
            self._send_event(Kind.ERROR, child, error=message["error"])
        if UNSTARTABLE in message:
            self._warned_of_hook.add(child.rank)
            self._send_event(Kind.UNSTARTABLE, child, text=message[UNSTARTABLE])
        if "atexit" in message and (child.is_program or child.progress.status.waits):
            self._send_event(Kind.LEFT, child)
        if "note" in message:
            self._pass_on(child, str(message["note"])[:2000])
        if isinstance(message.get("profile"), dict):
            self.profiles.update(child, message["profile"])
        if "metrics" in message and child.rank == 0:
            self._reported.add(message.get("of", child.progress.status.step), message["metrics"])
        if "stopped" in message or "committed" in message or message.get("phase") == "done":
            self._beat()  # what may be the last that the leader hears
        if (
            "phase" in message
            and not self._is_stopping
            and all(each.progress.status.stepped for each in self.processes.alive())
        ):
            self.processes.keep_standbys()

    def _pass_on(self, child: Child, note: str) -> None:
        """Sends a note of a process to the leader: each once, and no more of them than the summary holds."""
        if self._link is not None and note not in child.notes and len(child.notes) < MAX_NOTES:
            child.notes.add(note)
            self._link.send("note", text=note)

    def _count(self, child: Child, message: Mapping[str, Any]) -> None:
        """Passes rank 0's phases to the clock, on host 0."""
        if self._clock is None or child.rank != 0 or self._verdict is not None:
            return
        now, status = time.monotonic(), child.progress.status
        if (reached := _reached(message, status)) is not None:
            self._clock.restart.enter(reached, now)
        if status.phase == "step" and status.step is not None and status.step >= (status.first_step or 0):
            self._clock.restart.stepped(now)
        if "phase" in message and status.phase is not None:
            self._clock.enter(status.phase, now)
            if status.phase == "step" and status.step is not None:
                self._clock.reached(status.step, now)
        if "committed" in message and status.committed is not None:
            self._clock.committed(status.committed)

    def _child_ended(self, child: Child, code: int) -> None:
        self._check_hello(child)
        if child.rank == 0:
            self._reported.end()
        self._beat()
        if child.handled is not None and code > 0 and not is_signals(code):  # its wrapper passed the failure on
            self._send_event(Kind.ERROR, child, error=child.handled)
        self._send_event(Kind.EXIT, child, exit=code, oom=self._is_oom_kill(code), text=child.tail_text[-MAX_CHARS:])
        self._report_gone()

    def _is_oom_kill(self, code: int) -> bool:
        """Whether the OOM killer sent this SIGKILL. Outside of a container its count is the whole machine's."""
        before, self._oom_kills = self._oom_kills, cgroup.oom_kills()
        return code == -signal.SIGKILL and self._config.is_pod and self._oom_kills > before

    def _check_hellos(self, children: list[Child]) -> None:
        for child in children:
            self._check_hello(child)

    def _check_hello(self, child: Child) -> None:
        is_of_now = self.processes.children.get(child.rank) is child
        if child.progress.has_hello or child.rank in self._warned_of_hook or not is_of_now or self._verdict is not None:
            return
        self._warned_of_hook.add(child.rank)
        text = (
            f"rank {child.rank} has not loaded jaxlaunch's sitecustomize.py: it runs `python -I` or `python -S`, has "
            "another PYTHONPATH, or is not Python. So jax.distributed.initialize() without arguments does not find the "
            "other processes, and neither progress nor exceptions are reported"
        )
        self._say(f"warning: {text}")
        if self._link is not None:
            self._link.send("note", text=text)

    def _send_event(self, kind: Kind, child: Child, **fields: Any) -> None:
        if self._link is not None:
            status = child.progress.status
            self._changes.told(child.rank, status)
            about = {"attempt": self._attempt, "rank": child.rank, "status": status.to_wire()}
            self._link.send("event", kind=kind.value, **about, **fields)

    def _report_gone(self) -> None:
        """Reports to the leader that no process is left after a verdict; without a leader this host exits."""
        if self._verdict is None or self.processes.alive():
            return
        if self._link is not None:
            self._link.send("gone", attempt=self._attempt)
        elif self._may_wait(self._verdict):
            self._wait(self._verdict)
        else:
            self._finish(self._verdict, False)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        away, self._ticked_at = now - self._ticked_at, now
        if away > SILENCE_S / 2:  # this process itself was stopped or starved: it could not receive anything
            self.last_message_at += away
        if self._link is not None and now - self.last_message_at > self._patience_s:
            self._link.close()
            self._leader_lost(self._link, f"no message for {self._patience_s:.0f} s")
        if now - self._beat_at >= BEAT_S:
            self._beat()
        if self._verdict is None:
            self._check_timeouts(now)
        self._send_stacks(now)
        self._send_nccl()
        if self._is_stopping:
            self.processes.stop()
        self.processes.flush()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        if self._link is None or self._link.epoch is None:
            return
        changes = self._changes.take({rank: child.progress.status for rank, child in self.processes.children.items()})
        metrics, self._reported.unsent = self._reported.unsent, None
        self._link.send("beat", attempt=self._attempt, ranks=changes, metrics=metrics)

    def _check_timeouts(self, now: float) -> None:
        for child in self.processes.alive():
            if child.rank in self._overdue or not child.progress.overdue(self.timeouts_s, now):
                continue
            if child.has_lost_reporter:
                continue
            self._overdue.add(child.rank)
            limit = child.progress.timeout_s(self.timeouts_s) or 0.0
            phase, elapsed_s = child.progress.status.phase, child.progress.in_phase_s(now)
            hang = HangFacts(phase or "", limit, elapsed_s, child.rank)
            self._send_event(Kind.HANG, child, hang=checked.to_json(hang), unseen_s=elapsed_s)

    def _send_stacks(self, now: float) -> None:
        """Sends the stacks once they are complete; a process that cannot write any sends an empty text."""
        if self._stacks_until is None:
            return
        before, self._stacks = self._stacks, {child.rank: child.stacks for child in self.processes.alive()}
        is_growing = any(not text or text != before.get(rank) for rank, text in self._stacks.items())
        if is_growing and now < self._stacks_until:
            return
        self._stacks_until = None
        for rank, text in self._stacks.items():
            status = self.processes.children[rank].progress.status
            self._changes.told(rank, status)
            if self._link is not None:
                about = {"attempt": self._attempt, "rank": rank, "status": status.to_wire()}
                self._link.send("stacks", **about, text=text[-MAX_CHARS:])

    def _send_nccl(self) -> None:
        """Sends what NCCL answered; an empty text where it did not."""
        if self._nccl is None or (text := self._nccl.answer) is None:
            return
        self._nccl = None
        if self._link is not None:
            self._link.send("nccl", attempt=self._attempt, text=text)


def _reached(message: Mapping[str, Any], status: Status) -> str | None:
    """The part of a start, of contract.RESTART, that begins with a line of rank 0's; None: the one before goes on."""
    if message.get("hello") == "site":
        return "import"
    if "joined" in message:
        return "init"
    return _OF_PHASES.get(status.phase or "", status.phase) if "phase" in message else None
