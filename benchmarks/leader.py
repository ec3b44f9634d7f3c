"""The cost of thousands of hosts for the leading agent: CPU, memory, and the delay of a verdict.

`python -m benchmarks.leader [--seconds 20] [HOSTSxRANKS ...]` starts the real leader as in a pod.
The other hosts are simulated: a few processes have one connection per host, and use the agents'
protocol over loopback. They dial as agents do, and retry if the leader closes a connection or does
not answer. Every host sends a heartbeat every HEARTBEAT_S of launcher/agent/io/link.py, with a new
step for each rank. Then one rank raises an exception, and every host answers the verdict by
reporting the end of each of its processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.table import Row, finish_benchmark, log_progress
from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.gang import config
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.progress import Status, StatusChanges
from jaxlaunch.launcher.agent.gang.protocol import Hello, HostHandshake
from jaxlaunch.launcher.agent.gang.root_cause import EventKind
from jaxlaunch.launcher.agent.host.leader_connection import (
    CHALLENGE_TIMEOUT_S,
    RETRY_REFUSED_S,
    Dialer,
)
from jaxlaunch.launcher.agent.io import resources
from jaxlaunch.launcher.agent.io.link import HEARTBEAT_S, Link, Message, choose_free_port
from jaxlaunch.launcher.agent.io.loop import READ, Loop

# Hosts and ranks per host. The share of a core only has a bound for the first size.
SIZES = ((1_000, 8), (2_500, 8), (4_000, 1))
# Bounds of the leader's share of a core, of the seconds until all have the verdict, and of memory.
MAX_SHARE, MAX_VERDICT_S, MAX_MB = 0.10, 1.0, 200
# The number of processes that simulate hosts.
FAKES = 2
WARMUP_S, RETRY_S = 2.0, 0.1
# The shortest and the longest time that the processes of a host take to end.
EXIT_S = (0.2, 1.0)
# The number of connections that each of these processes opens at a time.
CONNECTS = 64
OUTPUT = "the last lines of a program that was killed\n" * 40


class FakeHost:
    """A simulated host: its connection, its ranks, and when it received the verdict."""

    def __init__(self, fakes: Fakes, config: Config, hello: Hello, ranks: range) -> None:
        self._fakes, self._config, self._hello, self._ranks = fakes, config, hello, ranks
        self._dialer = Dialer(
            fakes.loop, config.leader_address, say=lambda text: None, on_connected=self._connected
        )
        self._status = Status(phase="init", jax="0.10.2")
        self._changes = StatusChanges()
        self._attempt = 0
        self.verdict_at: float | None = None

    def dial(self) -> None:
        """Connect to the leader, and retry as an agent does until it answers."""
        self._dialer.dial()

    def raise_error(self) -> None:
        """Report an exception of the first rank."""
        error = {"type": "ValueError", "message": "boom", "traceback": "Traceback", "code": None}
        self._send_event(EventKind.ERROR, self._ranks[0], error=error)

    def end_processes(self) -> None:
        """Report the end of its processes after a while."""
        self._fakes.loop.call_later(random.uniform(*EXIT_S), self._report_ends)

    def _connected(self, sock: socket.socket) -> None:
        try:
            link = self._link = Link(self._fakes.loop, sock, self._on_message, self._on_lost)
        except OSError:
            # The leader has closed the connection in the meantime.
            sock.close()
            self._dialer.dial(RETRY_S)
            return
        self._handshake = HostHandshake(self._config.handshake_key)
        self._challenge_timer = self._fakes.loop.call_later(
            CHALLENGE_TIMEOUT_S, lambda: self._on_lost(link, "no challenge")
        )

    def _on_message(self, link: Link, message: Message) -> None:
        kind = message["type"]
        self._challenge_timer.cancel()
        if kind == "challenge":
            link.send("hello", **self._handshake.answer_challenge(message, self._hello.to_wire()))
        elif kind == "welcome":
            link.epoch = self._handshake.open_answer(message)["epoch"]
            self._fakes.loop.call_later(random.uniform(0.0, HEARTBEAT_S), self._send_beat)
        elif kind == "start":
            self._attempt = message["attempt"]
            self._status = dataclasses.replace(self._status, phase="step", step=0)
            self._fakes.count_start()
        elif kind == "verdict":
            self.verdict_at = time.monotonic()
            self._fakes.count_verdict()
        elif kind == "leave":
            link.close()
            self._fakes.count_exit()

    def _on_lost(self, link: Link, reason: str) -> None:
        self._challenge_timer.cancel()
        # When all processes have ended, the leader closes a connection that is not read for long.
        if self.verdict_at is not None:
            self._fakes.count_exit()
            return
        if link.epoch is not None:
            raise SystemExit(f"{self._hello.description} lost the leader: {reason}")
        link.close()
        self._fakes.turned_away += 1
        self._dialer.dial(RETRY_REFUSED_S)

    def _send_beat(self) -> None:
        if self._link.is_open and not self._fakes.has_verdict:
            self._fakes.loop.call_later(HEARTBEAT_S, self._send_beat)
            self._status = dataclasses.replace(
                self._status, step=(self._status.step or 0) + 1, stepped=True
            )
            self._send_statuses()

    def _send_statuses(self) -> None:
        changes = self._changes.take_changes(dict.fromkeys(self._ranks, self._status))
        self._link.send("beat", attempt=self._attempt, ranks=changes, metrics=None)
        self._fakes.beats += 1

    def _report_ends(self) -> None:
        self._status = dataclasses.replace(self._status, exit=-9)
        for rank in self._ranks:
            self._send_statuses()
            self._send_event(EventKind.EXIT, rank, exit=-9, oom=False, text=OUTPUT)
        self._link.send("gone", attempt=self._attempt)

    def _send_event(self, kind: EventKind, rank: int, **fields: Any) -> None:
        event = {"attempt": self._attempt, "rank": rank, "status": self._status.to_wire()}
        self._link.send("event", kind=kind.value, **event, **fields)


class Fakes:
    """The simulated hosts of one process.

    The parent sends words on stdin: "fail" lets the first rank raise an exception, and "count" asks
    for the number of heartbeats.
    """

    def __init__(self, hosts: range) -> None:
        self.loop = Loop()
        self.beats = self.turned_away = 0
        self._config = config.read_config(os.environ)
        self._starts = 0
        self._verdicts = 0
        self._exits = 0
        self._dialed_at = 0.0
        self._failed_at: float | None = None
        resources.allow_connections(len(hosts))
        hello, members = Hello.from_config(self._config, 9400), self._config.members
        self._hosts = [
            FakeHost(
                self,
                self._config,
                dataclasses.replace(hello, host=host, pod=f"pod-{host}"),
                members.ranks_of(host),
            )
            for host in hosts
        ]

    def run(self) -> None:
        """Run until every host may exit, then print when the last one received the verdict."""
        self._wait_for_leader()
        self.loop.watch(0, READ, lambda mask: self._read_word())
        self.loop.run()
        verdict_times = [host.verdict_at for host in self._hosts if host.verdict_at is not None]
        write_line(
            failed_at=self._failed_at,
            verdicts=len(verdict_times),
            verdict_at=max(verdict_times, default=None),
        )

    def count_start(self) -> None:
        """Count a host that was told to start."""
        self._starts += 1
        if self._starts == len(self._hosts):
            write_line(
                dialed_at=self._dialed_at, started_at=time.monotonic(), turned_away=self.turned_away
            )

    @property
    def has_verdict(self) -> bool:
        """Whether a host has received the verdict, after which no host sends heartbeats.

        The leader reads nothing until it has sent the last verdict, and sending heartbeats would
        delay the measurement of when verdicts arrive.
        """
        return self._verdicts > 0

    def count_verdict(self) -> None:
        """Count a host that received the verdict. The processes end when all hosts have it."""
        self._verdicts += 1
        if self._verdicts == len(self._hosts):
            for host in self._hosts:
                host.end_processes()

    def count_exit(self) -> None:
        """Count a host that may exit."""
        self._exits += 1
        if self._exits == len(self._hosts):
            self.loop.stop()

    def _wait_for_leader(self) -> None:
        try:
            socket.create_connection(self._config.leader_address).close()
        except ConnectionRefusedError:
            self.loop.call_later(RETRY_S, self._wait_for_leader)
        else:
            self._dialed_at = time.monotonic()
            self._dial_hosts(0)

    def _dial_hosts(self, first: int) -> None:
        for host in self._hosts[first : first + CONNECTS]:
            host.dial()
        if first + CONNECTS < len(self._hosts):
            self.loop.call_later(0.0, lambda: self._dial_hosts(first + CONNECTS))

    def _read_word(self) -> None:
        word = os.read(0, 100).decode().strip()
        if word == "fail":
            self._failed_at = time.monotonic()
            self._hosts[0].raise_error()
        elif word == "count":
            write_line(beats=self.beats)
        else:
            self.loop.unwatch(0)


def write_line(**fields: Any) -> None:
    """Write a line for the process that started this one."""
    print(json.dumps(fields), flush=True)


@dataclasses.dataclass(frozen=True)
class GangCost:
    """The cost of one gang.

    Attributes:
        hosts: Number of hosts.
        ranks: Number of ranks per host.
        join_s: Time from the first connection of a host until all hosts were told to start.
        turned_away: Number of connections that were closed before their host had joined.
        share: Share of a core that the leader used.
        beats_per_s: Number of heartbeats that the leader received per second.
        verdict_s: Time from the exception until the last host had the verdict.
        peak_mb: Peak memory of the leader.
    """

    hosts: int
    ranks: int
    join_s: float
    turned_away: int
    share: float
    beats_per_s: float
    verdict_s: float
    peak_mb: float

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        gang = f"leader, {self.hosts:,} hosts × {self.ranks}"
        bound = MAX_SHARE if (self.hosts, self.ranks) == SIZES[0] else None
        beats = (
            f"{self.beats_per_s:,.0f} beats per second, each host one per {HEARTBEAT_S:g} s "
            "(the default)"
        )
        joined = (
            f"{self.join_s:.1f} s, from the first connection on; {self.turned_away} "
            "connections turned away"
        )
        return [
            Row(f"{gang}: seconds until all have joined", self.join_s, None, joined),
            Row(
                f"{gang}: share of a core",
                self.share,
                bound,
                f"{self.share:.1%} of a core; {beats}",
            ),
            Row(
                f"{gang}: seconds until all have the verdict",
                self.verdict_s,
                MAX_VERDICT_S,
                f"{self.verdict_s:.2f} s",
            ),
            Row(
                f"{gang}: memory over 200 MB",
                self.peak_mb / MAX_MB,
                1.0,
                f"{self.peak_mb:.0f} MB at its peak",
            ),
        ]


def measure_gang(hosts: int, ranks: int, seconds: float, folder: pathlib.Path) -> GangCost:
    """Run one gang, and count its heartbeats for `seconds`. Its logs are in `folder`."""
    job = AgentJob("leader", ("sleep", "86400"), processes_per_host=ranks, in_place_limit=0)
    environ = os.environ | {
        contract.LEADER: f"127.0.0.1:{choose_free_port()}",
        contract.HOSTS: str(hosts),
        contract.INDEX: "0",
        contract.UID: "benchmark",
        # With the name of a node the agent behaves as in a pod and writes machine-readable lines.
        contract.NODE: "node",
        contract.JOB: job.to_json(),
        contract.RUN_DIR: str(folder / "run"),
    }
    with (folder / "leader.log").open("wb") as log:
        leader = subprocess.Popen(
            [sys.executable, "-m", "jaxlaunch.launcher.agent"],
            env=environ,
            stdout=log,
            stderr=log,
        )
    bounds = [*range(1, hosts, max(1, -(-(hosts - 1) // FAKES))), hosts]
    fakes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.leader", "--fake", str(first), str(end)],
            cwd=pathlib.Path(__file__).parents[1],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first, end in zip(bounds, bounds[1:], strict=False)
    ]
    try:
        return _measure_gang(leader, fakes, hosts, ranks, seconds)
    finally:
        for process in (leader, *fakes):
            if process.returncode is None:  # type: ignore[attr-defined]
                process.kill()  # type: ignore[attr-defined]
            for stream in (process.stdin, process.stdout):  # type: ignore[attr-defined]
                if stream is not None:
                    stream.close()
            process.wait()  # type: ignore[attr-defined]


def _measure_gang(
    leader: subprocess.Popen[bytes],
    fakes: Sequence[subprocess.Popen[str]],
    hosts: int,
    ranks: int,
    seconds: float,
) -> GangCost:
    starts = [_read_answer(fake) for fake in fakes]
    join_s = max(start["started_at"] for start in starts) - min(
        start["dialed_at"] for start in starts
    )
    time.sleep(WARMUP_S)
    cpu_before, beats_before, started_at = _cpu_s(leader.pid), _count_beats(fakes), time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - started_at
    cpu_s, beats = _cpu_s(leader.pid) - cpu_before, _count_beats(fakes) - beats_before
    peak_mb = _peak_mb(leader.pid)
    _send_word(fakes[0], "fail")
    reports = [_read_answer(fake) for fake in fakes]
    peak_mb = max(peak_mb, _peak_mb(leader.pid))
    leader.wait()
    if (
        leader.returncode != contract.CRASH
        or sum(report["verdicts"] for report in reports) != hosts - 1
    ):
        raise SystemExit(f"the leader ended with {leader.returncode}, the hosts with {reports}")
    verdict_s = max(report["verdict_at"] for report in reports) - reports[0]["failed_at"]
    turned_away = sum(start["turned_away"] for start in starts)
    return GangCost(
        hosts, ranks, join_s, turned_away, cpu_s / elapsed_s, beats / elapsed_s, verdict_s, peak_mb
    )


def _peak_mb(pid: int) -> float:
    """Return the peak memory of a process, or 0 if it has ended.

    `ru_maxrss` would include the memory of its parent before exec.
    """
    match = re.search(
        r"^VmHWM:\s*(\d+) kB", pathlib.Path(f"/proc/{pid}/status").read_text(), re.MULTILINE
    )
    return 0.0 if match is None else int(match[1]) * 1024 / 1e6


def _cpu_s(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _send_word(fake: subprocess.Popen[str], word: str) -> None:
    assert fake.stdin is not None, "it is a pipe"
    fake.stdin.write(word + "\n")
    fake.stdin.flush()


def _read_answer(fake: subprocess.Popen[str]) -> dict[str, Any]:
    assert fake.stdout is not None, "it is a pipe"
    line = fake.stdout.readline()
    if not line:
        raise SystemExit(f"a process of made-up hosts ended with {fake.wait()}")
    return dict(json.loads(line))


def _count_beats(fakes: Sequence[subprocess.Popen[str]]) -> int:
    for fake in fakes:
        _send_word(fake, "count")
    return sum(_read_answer(fake)["beats"] for fake in fakes)


def main() -> int:
    """Measure every size and print the table; return 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leader", description=__doc__)
    parser.add_argument("sizes", nargs="*", metavar="HOSTSxRANKS")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--fake", nargs=2, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.fake is not None:
        Fakes(range(*arguments.fake)).run()
        return 0
    sizes = [tuple(map(int, size.split("x"))) for size in arguments.sizes] or SIZES
    rows = []
    for hosts, ranks in sizes:
        log_progress(f"leader: {hosts:,} hosts × {ranks}")
        with tempfile.TemporaryDirectory() as folder:
            rows += measure_gang(hosts, ranks, arguments.seconds, pathlib.Path(folder)).rows()
    return finish_benchmark(rows)


if __name__ == "__main__":
    sys.exit(main())
