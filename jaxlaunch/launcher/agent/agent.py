"""One agent: the event loop, this host's member of the gang, and on host 0 the leader."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Action
from jaxlaunch.launcher.agent.gang.clock import Clock, process_age_s
from jaxlaunch.launcher.agent.gang.config import Config, open_coordinator
from jaxlaunch.launcher.agent.gang.rendezvous import Hello
from jaxlaunch.launcher.agent.host.child import die_with_parent
from jaxlaunch.launcher.agent.host.member import Member
from jaxlaunch.launcher.agent.host.remote_folder import RemoteFolder
from jaxlaunch.launcher.agent.host.site_folder import SiteFolder
from jaxlaunch.launcher.agent.http import metrics
from jaxlaunch.launcher.agent.http.server import MetricsServer
from jaxlaunch.launcher.agent.io import cgroup
from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.launcher.agent.io.output import OutputStream
from jaxlaunch.launcher.agent.leader import lost_leader
from jaxlaunch.launcher.agent.leader.pod_log import PodLog
from jaxlaunch.launcher.agent.leader.server import Server
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import Termination
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import history
from jaxlaunch.runs.run_folder import RunFolder

STOPPING = (signal.SIGTERM, signal.SIGINT)
FLUSH_S = 2.0  # for slow readers of stdout and stderr, at the end
DEPUTY = 1  # the host that writes the summary when host 0 is lost


class Agent:
    """Runs until the gang ends. Raises OSError when a port is in use."""

    def __init__(self, config: Config, copied: RemoteFolder | None = None) -> None:
        """`copied` is the run folder's copy of a bucket, where it is in one."""
        self._config = config
        self._loop = Loop()
        self._site_folder = SiteFolder()
        self._stdout = OutputStream(self._loop, 1, patience=config.patience)
        self._stderr = OutputStream(self._loop, 2)
        self._verdict: Verdict | None = None
        self._is_alone = False  # it leaves, and its gang does not
        self._started = time.time()
        self._run_folder = RunFolder(config.run_dir, self._say_from_a_thread)
        clock = Clock(time.monotonic() - process_age_s()) if config.is_leader else None
        self._server = MetricsServer(
            self._loop,
            "127.0.0.1" if config.is_local else "",
            config.job.metrics_port,
            self._child_sockets,
            self._exposition,
            {
                "/profile": lambda method, query, is_local: self._member.reports.profiles.reply(
                    method, query, is_local
                ),
                **({"/output": lambda method, query, is_local: self._output(is_local)} if config.is_pod else {}),
            },
        )
        hello = Hello.of(config, self._server.port)
        self._member = Member(
            config,
            self._loop,
            self._site_folder,
            hello,
            self._stdout,
            clock,
            say=self.say,
            finish=self._finish,
            orphaned=self._orphaned,
            take=(lambda ranks: None) if copied is None else copied.take,
        )
        self._leader: Server | None = None
        if clock is not None:
            pod_log = PodLog(config.generation, self._write_log_line if config.is_pod else None)
            self._leader = Server(
                config, self._loop, hello, clock, self._run_folder, pod_log, say=self.say, finish=self._finish
            )

        if copied is not None:
            self._loop.on_end_of(copied.pid, self._copier_ended)

    def _copier_ended(self, code: int) -> None:
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self.say(
            f"the process that copies the run folder to its bucket ended with {how}: nothing new reaches the bucket"
        )

    def say(self, text: str) -> None:
        """Writes a message for people to stderr."""
        self._stderr.line(f"agent {self._config.host}: {text}".encode(errors="backslashreplace"))

    def _say_from_a_thread(self, text: str) -> None:
        """As `say`, from the thread that writes summaries too: the streams are the loop's alone."""
        if threading.current_thread() is threading.main_thread():
            return self.say(text)
        self._loop.after(0.0, lambda: self.say(text))

    def _write_log_line(self, line: str) -> None:
        self._stderr.line(line.encode(errors="backslashreplace"))

    def run(self) -> int:
        """Runs the gang's part of this host; returns the exit code of the verdict."""
        replaces = self._config.job.replaces
        if replaces and history.is_done(self._run_folder.records(self._config.uid)):
            self.say("the run has finished: there is nothing left to do")
            return contract.DONE
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # the member handles them; children inherit the mask
        self._stop_with_parent()
        if self._leader is not None:
            if (warning := open_coordinator(self._config)) is not None:
                self.say(warning)
            self._leader.begin()
        self._member.begin()
        try:
            self._loop.run()
        finally:
            self._member.processes.dismiss()
            self._member.processes.flush()
            self._stdout.flush(FLUSH_S)
            self._stderr.flush(FLUSH_S)
            self._site_folder.close()
        assert self._verdict is not None, "the loop ends with a verdict"
        if self._config.is_pod:
            write_termination_message(
                self._verdict, self._config.host, self._config.generation, self._member.state.attempt
            )
        return contract.exit_code(self._verdict.code, alone=self._is_alone) if replaces else self._verdict.code

    def _stop_with_parent(self) -> None:
        parent = os.environ.get(contract.PARENT, "")
        if parent.isdecimal() and not die_with_parent(signal.SIGTERM, int(parent)):
            self._member.request_stop()

    def _finish(self, verdict: Verdict, alone: bool) -> None:
        """Ends with the first verdict. One that fails the job for good waits for a last scrape: no later pod has it."""
        if self._verdict is not None:
            return
        self._verdict, self._is_alone = verdict, alone
        if contract.outcome(verdict.code).action is not Action.FAIL or self._member.state.signalled_at is not None:
            return self._loop.stop()
        for number in STOPPING:
            self._loop.on_signal(number, self._loop.stop)
        self._server.after_scrape(self._loop.stop)

    def _orphaned(self, verdict: Verdict) -> None:
        """Writes the record and the summary in place of the leader, which is lost."""
        if self._config.host == DEPUTY:
            member = self._member
            statuses = [child.progress.status for child in member.processes.children.values()]
            reported = lost_leader.Reported.of(member.gang, member.state.attempt, self._started)
            lost_leader.record_lost_leader(self._run_folder, self._config, reported, statuses, verdict)

    def _child_sockets(self) -> Sequence[str]:
        return [child.metrics_path for child in self._member.processes.alive()]

    def _output(self, is_local: bool) -> tuple[HTTPStatus, Mapping[str, Any]]:
        """The last lines of this host's processes, for `launcher logs`: a kubelet gives none that it has rotated."""
        if not is_local:
            return HTTPStatus.FORBIDDEN, {"error": "output is served on loopback only: connect by a port-forward"}
        return HTTPStatus.OK, {str(rank): child.last_lines for rank, child in self._member.processes.children.items()}

    def _exposition(self, texts: Sequence[str]) -> str:
        now, member = time.monotonic(), self._member
        ranks = {rank: child.progress for rank, child in member.processes.children.items()}
        silence_s = 0.0 if self._config.is_leader else now - member.leader.last_message_at
        memory = cgroup.read()
        own = metrics.own(
            self._config.generation, member.gang, ranks, member.reports.timeouts_s, silence_s, memory, now
        )
        return metrics.merge([own, *texts])


def write_termination_message(verdict: Verdict, host: int | None, generation: int, attempt: int) -> None:
    """Writes the pod's termination message into the file that the kubelet made, in place of what a program may have
    written there; an error is only logged."""
    message = log_lines.termination_message(Termination(verdict, host, generation, attempt))
    try:
        with open(log_lines.TERMINATION_LOG, "r+") as file:
            file.truncate()
            file.write(message)
    except OSError as error:
        print(f"agent: cannot write the termination message: {error}", file=sys.stderr)
