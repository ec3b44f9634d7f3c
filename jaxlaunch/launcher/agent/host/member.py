"""The member of the gang on one host, which runs the processes of the host for the leader.

A member makes no decisions while it has a leader. When it loses the leader, it kills its processes
and, in jobs that replace lost hosts, waits for the next leader. `MemberState` decides what follows
an attempt, `LeaderConnection` and `RankReports` communicate with the leader, and `Processes` owns
the processes.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxlaunch.launcher.agent.gang.clock import Clock
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.protocol import (
    AttemptVerdict,
    Hello,
    Leave,
    Ping,
    Refused,
    Start,
)
from jaxlaunch.launcher.agent.gang.root_cause import verdict_for_lost_leader
from jaxlaunch.launcher.agent.host.folders import SiteFolder
from jaxlaunch.launcher.agent.host.leader_connection import (
    RETRY_S,
    IdleAction,
    LeaderConnection,
    MemberState,
    StopRequest,
)
from jaxlaunch.launcher.agent.host.processes import Child, Processes
from jaxlaunch.launcher.agent.host.rank_reports import ProgramMetrics, RankReports
from jaxlaunch.launcher.agent.io.link import is_local_address
from jaxlaunch.launcher.agent.io.loop import Loop, Timer
from jaxlaunch.launcher.agent.io.output import OutputStream
from jaxlaunch.launcher.agent.io.resources import find_excess
from jaxlaunch.records import codec, log_lines
from jaxlaunch.records.log_lines import StartLine, VerdictLine
from jaxlaunch.records.members import parse_members
from jaxlaunch.records.verdict import (
    Failure,
    FailureKind,
    Numbers,
    RendezvousFacts,
    StopFacts,
    StopOutcome,
    StopReason,
    Verdict,
    render_excess,
    verdict_for,
    verdict_for_code,
)

TICK_S = 0.2
# JAX's coordinator listens on every interface by default, too.
EVERY_ADDRESS = "::"
# A Python program has loaded the site hook within this time.
HELLO_TIMEOUT_S = 10.0

# Called with the verdict and whether this host leaves alone.
Finish = Callable[[Verdict, bool], None]


class Member:
    """The member of the gang on this host."""

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
        on_orphaned: Callable[[Verdict], None],
        take_ranks: Callable[[range], None],
    ) -> None:
        """Create the member; `connect_to_leader` connects it.

        Args:
            config: Configuration of the agent.
            loop: Event loop of the agent.
            site_folder: Folder of the site hook.
            hello: Message with which this host joins.
            stdout: Stream for the output of all ranks.
            clock: Clock of the run on host 0, None on other hosts.
            say: Writes a message for people.
            finish: Called once, when this host may exit.
            on_orphaned: Called with the verdict, before `finish`, if the leader is lost.
            take_ranks: Called with the ranks of this host before each start.
        """
        # The newest state of all hosts that the leader sent.
        self.gang: Mapping[str, Any] = {}
        self.state = MemberState(config)
        self._config, self._loop, self._hello = config, loop, hello
        self._say, self._finish = say, finish
        self._on_orphaned, self._take_ranks = on_orphaned, take_ranks
        self._stdout = stdout
        self.processes = Processes(
            config,
            loop,
            site_folder,
            stdout,
            say=say,
            on_report=lambda child, message: self.reports.take_report(child, message),
            on_end=self._on_child_end,
            may_restart=self._may_restart_in_place,
        )
        self.leader = LeaderConnection(
            config,
            loop,
            say=say,
            hello=lambda: dataclasses.replace(
                self._hello, attempt=self.state.attempt, saved=self._saved_step()
            ),
            handlers={
                "ping": self._take_ping,
                "start": self._start_attempt,
                "stop": self._stop_processes,
                "stacks": lambda order: self.reports.dump_stacks(),
                "verdict": self._take_verdict,
                "hold": lambda order: self.processes.keep_places(),
                "leave": self._leave_gang,
            },
            on_admitted=self._on_admitted,
            on_refused=self._on_refused,
            on_lost=self._on_leader_lost,
        )

        def say_from_thread(text: str) -> None:
            loop.call_later(0.0, lambda: say(text))

        metrics = ProgramMetrics(config.run_dir, say, say_from_thread)
        self.reports = RankReports(
            config, self.state, self.processes, clock, leader=self.leader, say=say, metrics=metrics
        )
        # Expires if no new leader has appeared in time.
        self._leader_timer: Timer | None = None
        loop.on_signal(signal.SIGTERM, self.request_stop)
        # `launcher run` passes Ctrl-C on as SIGINT.
        is_launched = config.is_launched
        loop.on_signal(signal.SIGINT, lambda: self.request_stop(is_interrupt=is_launched))

    def connect_to_leader(self) -> None:
        """Begin to connect to the leader, and to check timeouts."""
        self.leader.dial()
        self._loop.call_every(TICK_S, self._on_tick)
        timeout_s = self.reports.timeouts_s["rendezvous"]
        # On host 0, the leader itself applies this timeout to all hosts.
        if timeout_s is not None and not self._config.is_leader:
            self._loop.call_later(timeout_s, self._on_rendezvous_timeout)

    def request_stop(self, *, is_interrupt: bool = False) -> None:
        """Ask the leader to stop all hosts; the second signal kills the processes."""
        request = self.state.take_signal(time.monotonic())
        if request is StopRequest.REPEATED:
            return
        excess = None
        if request is StopRequest.STOP:
            excess = find_excess(self._config.job, self._config.host)
        if not self.leader.is_admitted:
            self.processes.kill_all()
            reason = StopReason.INTERRUPT if is_interrupt else StopReason.OUTSIDE
            reason = reason if excess is None else StopReason.DISK_EXCEEDED
            stop = StopFacts(reason, StopOutcome.NOT_JOINED, excess=excess)
            verdict = verdict_for(Failure(FailureKind.STOPPED, stop=stop))
            self._finish(verdict, self._config.job.replaces and excess is None)
            return
        if request is StopRequest.STOP:
            detail = "" if excess is None else f": {render_excess(excess)}"
            self._say(f"received a signal to stop{detail}")
            self.leader.send("stop", excess=codec.to_json(excess), is_interrupt=is_interrupt)
            return
        self._say("received a second signal to stop: killing the processes")
        self.leader.send("kill")
        self.processes.kill_all()

    # --- the leader's orders ----------------------------------------------------------------------

    def _on_admitted(self) -> None:
        if self._leader_timer is not None:
            self._leader_timer.cancel()
            self._leader_timer = None

    def _on_refused(self, answer: Refused) -> None:
        self._say(f"host 0 refused this host: {answer.message}")
        facts = Failure(FailureKind.REFUSED, detail=answer.message)
        self._finish(verdict_for_code(answer.code, facts), False)

    def _take_ping(self, order: Ping) -> None:
        self.gang = codec.to_json(order.gang)

    def _report_to_launcher(self, record: log_lines.Line) -> None:
        """Write a record for `launcher run` to stdout, between the lines of the processes."""
        if self._config.is_launched:
            self._stdout.write_line(log_lines.format_line(record).encode(errors="backslashreplace"))

    def _start_attempt(self, order: Start) -> None:
        self.state.start_attempt(order.attempt)
        self._report_to_launcher(StartLine(attempt=order.attempt))
        self.reports.start_attempt()
        bind_address = self._choose_bind_address() if self._config.is_leader else None
        members = parse_members(
            order.members, self._config.job.processes_per_host, self._config.hosts
        )
        self.processes.flush_logs()
        self._take_ranks(members.ranks_of(self._config.host))
        self.processes.start_ranks(
            members, order.attempt, order.coordinator, bind_address, order.start, order.saved
        )
        children = list(self.processes.children.values())
        if not children:
            self._say("holds no rank now: it is a spare, ready to take those of a lost host")
            self.processes.keep_standbys()
        self._loop.call_later(HELLO_TIMEOUT_S, lambda: self.reports.check_hellos(children))

    def _may_restart_in_place(self) -> bool:
        """Return whether another attempt may follow in these pods, as far as this host knows."""
        job = self._config.job
        if job.in_place_limit == 0:
            return False
        # Restarts after a stop of one host, to grow, or for a requeue code are not counted.
        if job.replaces or job.requeue_codes or self.gang.get("attempt") != self.state.attempt:
            return True
        # A newly committed step gives the attempt all restarts again.
        has_committed = self.gang["of"].get("first_committed") is not None
        return has_committed or self.gang["left"].get("in_place") != 0

    def _choose_bind_address(self) -> str:
        """Return the address at which JAX's coordinator listens.

        It is the address at which other hosts reach host 0, if that is one of its interfaces.
        """
        address = self.leader.leader_address
        if is_local_address(address):
            return address
        note = (
            f"the address at which other hosts reach host 0, {address}, is not one of its "
            "interfaces: JAX's coordinator listens on all of them"
        )
        self._say(note)
        self.leader.send("note", text=note)
        return EVERY_ADDRESS

    def _stop_processes(self, order: None) -> None:
        self.state.is_stopping = True
        self.processes.stop_all()

    def _take_verdict(self, order: AttemptVerdict) -> None:
        self.state.end_attempt(order.attempt, order.verdict)
        # `launcher run` shows the traceback in the output of its rank.
        verdict = dataclasses.replace(order.verdict, traceback=None)
        self._report_to_launcher(VerdictLine(attempt=order.attempt, verdict=verdict))
        self.processes.kill_all()
        self._continue_if_idle()

    def _leave_gang(self, order: Leave) -> None:
        # Host 0 stays until every host has received this message.
        if not self._config.is_leader:
            self._finish(order.verdict, order.alone)

    # --- without a leader -------------------------------------------------------------------------

    def _on_leader_lost(self, reason: str) -> None:
        if self.state.awaits_first_start:
            self.leader.dial()
            return
        if self.state.verdict is None:
            statuses = [child.progress.status for child in self.processes.children.values()]
            committed = self.gang.get("of", {}).get("last_committed")
            verdict = verdict_for_lost_leader(
                reason, 0, statuses, committed, is_stopping=self.state.is_stopping
            )
            self.state.verdict = verdict
            self._say(verdict.message)
            self._report_to_launcher(VerdictLine(attempt=self.state.attempt, verdict=verdict))
            self._on_orphaned(verdict)
        self.processes.kill_all()
        self._continue_if_idle()

    def _saved_step(self) -> int | None:
        """Return the newest saved step, 0 if processes ran but saved none, None if none ran."""
        children = self.processes.children.values()
        steps = [child.progress.status.committed for child in children]
        steps.append(self.gang.get("of", {}).get("last_committed"))
        default = 0 if self.state.has_started else None
        return max((step for step in steps if step is not None), default=default)

    def _wait_for_leader(self, verdict: Verdict) -> None:
        """Keep this host until another pod replaces host 0, or the wait times out."""
        if self._leader_timer is not None:
            return
        timeout_s = self.reports.timeouts_s["replace"]
        self._say("keeping this host, until host 0 is replaced")
        wait = RendezvousFacts(Numbers.from_sequence([0]), timeout_s, "timeouts.replace")
        give_up_verdict = verdict.with_failure(dataclasses.replace(verdict.facts, rendezvous=wait))
        wait_s = timeout_s or math.inf
        self._leader_timer = self._loop.call_later(
            wait_s, lambda: self._leave_without_leader(give_up_verdict)
        )
        self.leader.dial(RETRY_S)

    def _on_rendezvous_timeout(self) -> None:
        if self.leader.is_admitted or self.state.has_started:
            return
        wait = RendezvousFacts(address=":".join(map(str, self._config.leader_address)))
        facts = Failure(FailureKind.CANNOT_JOIN, detail=self.leader.dial_fault, rendezvous=wait)
        self._leave_without_leader(verdict_for(facts, rank=0, host=0))

    def _leave_without_leader(self, verdict: Verdict) -> None:
        self._say(verdict.message)
        self._on_orphaned(verdict)
        self._finish(verdict, False)

    # --- the processes ----------------------------------------------------------------------------

    def _on_child_end(self, child: Child, code: int) -> None:
        self.reports.take_end(child, code)
        self._continue_if_idle()

    def _continue_if_idle(self) -> None:
        """Report, wait for a leader or exit, once there is a verdict and no process is left."""
        verdict = self.state.verdict
        if verdict is None or self.processes.alive_children():
            return
        action = self.state.idle_action(has_leader=self.leader.is_admitted)
        if action is IdleAction.REPORT:
            self.leader.send("gone", attempt=self.state.attempt)
        elif action is IdleAction.WAIT_FOR_LEADER:
            self._wait_for_leader(verdict)
        else:
            self._finish(verdict, False)

    def _on_tick(self) -> None:
        now = time.monotonic()
        self.leader.check_silence(now)
        self.reports.tick(now)
        if self.state.is_stopping:
            self.processes.stop_all()
        self.processes.flush_logs()
