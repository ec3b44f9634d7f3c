"""One agent assembled: the loop, this host's part, and on host 0 the leader's."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence

from launcher.agent import config as configuration
from launcher.agent import footprint, metrics, report, words
from launcher.agent.child import die_with_parent
from launcher.agent.clock import Clock
from launcher.agent.config import Config
from launcher.agent.herald import Herald
from launcher.agent.history import Record
from launcher.agent.kit import Kit
from launcher.agent.leader import Leader
from launcher.agent.loop import Loop
from launcher.agent.member import Member, hello_of
from launcher.agent.memory import SUMMARY, Memory
from launcher.agent.output import Outlet
from launcher.agent.scrape import MetricsServer
from launcher.agent.verdict import Verdict
from trainer import contract
from trainer.contract import Action

STOPPING = (signal.SIGTERM, signal.SIGINT)
FLUSH_S = 2.0  # for the readers of our streams, at the end
DEPUTY = 1  # the host that writes down how host 0 was lost


class Agent:
    """Runs until the gang ends; `run` returns the exit code. Raises OSError when a port is taken."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._loop = Loop()
        self._kit = Kit()
        self._stdout, self._stderr = Outlet(self._loop, 1), Outlet(self._loop, 2)
        self._verdict: Verdict | None = None
        self._started = time.time()
        self._memory = Memory(config.run_dir, self.say)
        clock = Clock(time.monotonic()) if config.is_leader else None
        self._server = MetricsServer(
            self._loop,
            "127.0.0.1" if config.is_local else "",
            config.job.metrics_port,
            self._child_sockets,
            self._exposition,
            lambda method, query, is_here: self._member.profiles.reply(method, query, is_here),
        )
        hello = hello_of(config, configuration.versions(), self._server.port)
        self._member = Member(
            config,
            self._loop,
            self._kit,
            hello,
            self._stdout,
            clock,
            say=self.say,
            finish=self._finish,
            orphaned=self._orphaned,
        )
        self._leader: Leader | None = None
        if clock is not None:
            herald = Herald(config.generation, self._speak if config.is_pod else None)
            self._leader = Leader(
                config, self._loop, hello, clock, self._memory, herald, say=self.say, finish=self._finish
            )

    def say(self, text: str) -> None:
        self._stderr.line(f"agent {self._config.host}: {text}".encode())

    def _speak(self, word: str) -> None:
        self._stderr.line(word.encode())

    def run(self) -> int:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)  # the member handles them; children inherit the mask
        self._outlive_no_parent()
        if self._leader is not None:
            self._leader.begin()
        self._member.begin()
        try:
            self._loop.run()
        finally:
            self._member.crew.dismiss()
            self._member.crew.flush()
            self._stdout.flush(FLUSH_S)
            self._stderr.flush(FLUSH_S)
            self._kit.close()
        assert self._verdict is not None, "the loop ends with a verdict"
        if self._config.is_pod:
            leave_behind(self._verdict, self._config.host, self._config.generation, self._member.attempt)
        return self._verdict.code

    def _outlive_no_parent(self) -> None:
        parent = os.environ.get(contract.PARENT, "")
        if parent.isdecimal() and not die_with_parent(signal.SIGTERM, int(parent)):
            self._member.told_to_stop()

    def _finish(self, verdict: Verdict) -> None:
        """Ends with the first verdict. One that fails the job for good is first shown to who scrapes: no other will."""
        if self._verdict is not None:
            return
        self._verdict = verdict
        if contract.outcome(verdict.code).action is not Action.FAIL:
            return self._loop.stop()
        for number in STOPPING:
            self._loop.on_signal(number, self._loop.stop)
        self._server.when_read(self._loop.stop)

    def _orphaned(self, verdict: Verdict) -> None:
        """Writes what the leader no longer can."""
        if self._config.host != DEPUTY:
            return
        gang, config = self._member.gang, self._config
        statuses = [child.progress.status for child in self._member.crew.children.values()]
        committed = [status.committed for status in statuses if status.committed is not None]
        record = Record(
            uid=config.uid,
            generation=config.generation,
            attempt=gang.get("attempt", 0),
            cause=verdict.cause,
            rank=verdict.rank,
            first_committed=min(committed, default=None),
            last_committed=max(committed, default=None),
            seconds={},
            verdict=verdict.to_json(),
            started=self._started,
            ended=time.time(),
        )
        records = [*self._memory.records(config.uid), record]
        self._memory.append(report.line(record))
        summary = report.summary(
            report.status_of(verdict),
            verdict,
            step=min((status.step for status in statuses if status.step is not None), default=None),
            metrics=None,
            seconds=gang.get("seconds", dict.fromkeys(contract.CLOCK, 0.0)),
            records=records,
            notes=[],
            stacks={},
        )
        self._memory.write(SUMMARY, summary)

    def _child_sockets(self) -> Sequence[str]:
        return [child.metrics_path for child in self._member.crew.alive()]

    def _exposition(self, texts: Sequence[str]) -> str:
        now, member = time.monotonic(), self._member
        ranks = {rank: child.progress for rank, child in member.crew.children.items()}
        silence_s = 0.0 if self._config.is_leader else now - member.heard_at
        memory = footprint.read()
        own = metrics.own(self._config.generation, member.gang, ranks, member.budgets, silence_s, memory, now)
        return metrics.merge([own, *texts])


def leave_behind(verdict: Verdict, host: int | None, generation: int, attempt: int) -> None:
    """The pod's termination message, for readers of the API. The kubelet made the file; without it nothing is lost."""
    message = words.farewell(verdict.to_json(), host, generation, attempt)
    try:
        with open(words.TERMINATION_LOG, "r+") as file:
            file.write(message)
    except OSError as error:
        print(f"agent: no termination message could be left: {error}", file=sys.stderr)
