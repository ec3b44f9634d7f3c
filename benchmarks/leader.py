"""The cost of thousands of hosts for host 0's agent: CPU, memory, and the delay of a verdict.

`python -m benchmarks.leader [--seconds 20] [HOSTSxRANKS ...]`. The leader is the product's, started
as in a pod. The other hosts are made up: a few processes hold a connection for each, and speak the
product's protocol over loopback. They dial as agents do: one that the leader turns away, or does
not answer, connects again. Every host beats once in launcher/agent/io/link.py's BEAT_S, as agents
do, and every rank is a step further in each beat. Then one rank raises; every host answers the
verdict with the end of each of its processes, as agents do.
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

SIZES = ((1_000, 8), (2_500, 8), (4_000, 1))  # the share of a core has a bound at the first alone
MOST_SHARE, MOST_S, MOST_MB = 0.10, 1.0, 200
FAKES = 2  # processes that hold the made-up hosts
WARM_S, RETRY_S = 2.0, 0.1
DEATH_S = (
    0.2,
    1.0,
)  # what the processes of a host take to end; a real host's are not on this machine
CONNECTS = 64  # at once, by each of these processes
OUTPUT = "the last lines of a program that was killed\n" * 40


class FakeHost:
    """A fake host: its connection, its ranks, and when it got the verdict."""

    def __init__(self, fakes: Fakes, place: Config, hello: Hello, ranks: range) -> None:
        self._fakes, self._place, self._hello, self._ranks = fakes, place, hello, ranks
        self._dialer = Dialer(
            fakes.loop, place.leader_address, say=lambda text: None, on_connected=self._connected
        )
        self._status = Status(phase="init", jax="0.10.2")
        self._changes = StatusChanges()
        self._attempt = 0
        self.judged_at: float | None = None

    def dial(self) -> None:
        """Connect, and retry as an agent does until the leader answers."""
        self._dialer.dial()

    def raise_error(self) -> None:
        """Report an exception of the first rank."""
        error = {"type": "ValueError", "message": "boom", "traceback": "Traceback", "code": None}
        self._event(EventKind.ERROR, self._ranks[0], error=error)

    def end(self) -> None:
        """Report the end of its processes, which takes a while."""
        self._fakes.loop.call_later(random.uniform(*DEATH_S), self._end)

    def _connected(self, sock: socket.socket) -> None:
        try:
            link = self._link = Link(self._fakes.loop, sock, self._message, self._lost)
        except OSError:  # the leader closed meanwhile
            sock.close()
            self._dialer.dial(RETRY_S)
            return
        self._side = HostHandshake(self._place.handshake_key)
        self._unanswered = self._fakes.loop.call_later(
            CHALLENGE_TIMEOUT_S, lambda: self._lost(link, "no challenge")
        )

    def _message(self, link: Link, message: Message) -> None:
        kind = message["type"]
        self._unanswered.cancel()
        if kind == "challenge":
            link.send("hello", **self._side.answer_challenge(message, self._hello.to_wire()))
        elif kind == "welcome":
            link.epoch = self._side.open_answer(message)["epoch"]
            self._fakes.loop.call_later(random.uniform(0.0, HEARTBEAT_S), self._beat)
        elif kind == "start":
            self._attempt = message["attempt"]
            self._status = dataclasses.replace(self._status, phase="step", step=0)
            self._fakes.started()
        elif kind == "verdict":
            self.judged_at = time.monotonic()
            self._fakes.judged()
        elif kind == "leave":
            link.close()
            self._fakes.left()

    def _lost(self, link: Link, reason: str) -> None:
        self._unanswered.cancel()
        # Once all have ended, the leader gives up a host that does not read for long.
        if self.judged_at is not None:
            self._fakes.left()
            return
        if link.epoch is not None:
            raise SystemExit(f"{self._hello.description} lost the leader: {reason}")
        link.close()
        self._fakes.turned_away += 1
        self._dialer.dial(RETRY_REFUSED_S)

    def _beat(self) -> None:
        if self._link.is_open and not self._fakes.has_judged:
            self._fakes.loop.call_later(HEARTBEAT_S, self._beat)
            self._status = dataclasses.replace(
                self._status, step=(self._status.step or 0) + 1, stepped=True
            )
            self._report()

    def _report(self) -> None:
        changes = self._changes.take_changes(dict.fromkeys(self._ranks, self._status))
        self._link.send("beat", attempt=self._attempt, ranks=changes, metrics=None)
        self._fakes.beats += 1

    def _end(self) -> None:
        self._status = dataclasses.replace(self._status, exit=-9)
        for rank in self._ranks:
            self._report()
            self._event(EventKind.EXIT, rank, exit=-9, oom=False, text=OUTPUT)
        self._link.send("gone", attempt=self._attempt)

    def _event(self, kind: EventKind, rank: int, **fields: Any) -> None:
        event = {"attempt": self._attempt, "rank": rank, "status": self._status.to_wire()}
        self._link.send("event", kind=kind.value, **event, **fields)


class Fakes:
    """The fake hosts of one process. On "fail" from stdin, the first rank of all raises."""

    def __init__(self, hosts: range) -> None:
        self.loop = Loop()
        self.beats = self.turned_away = 0
        self._place = config.read_config(os.environ)
        self._started = 0
        self._judged = 0
        self._left = 0
        self._dialed_at = 0.0
        self._failed_at: float | None = None
        resources.allow_connections(len(hosts))
        hello, members = Hello.from_config(self._place, 9400), self._place.members
        self._hosts = [
            FakeHost(
                self,
                self._place,
                dataclasses.replace(hello, host=host, pod=f"pod-{host}"),
                members.ranks_of(host),
            )
            for host in hosts
        ]

    def run(self) -> None:
        """Run until every host may leave, then print when each had the verdict."""
        self._begin()
        self.loop.watch(0, READ, lambda mask: self._told())
        self.loop.run()
        judged = [host.judged_at for host in self._hosts if host.judged_at is not None]
        write_line(
            failed_at=self._failed_at, judged=len(judged), judged_at=max(judged, default=None)
        )

    def started(self) -> None:
        """Record that a host was told to start."""
        self._started += 1
        if self._started == len(self._hosts):
            write_line(
                dialed_at=self._dialed_at, started_at=time.monotonic(), turned_away=self.turned_away
            )

    @property
    def has_judged(self) -> bool:
        """Return whether a host has the verdict, after which none sends beats.

        The leader reads nothing until it has sent the last verdict, and making beats would keep
        this process from reading when the verdicts came.
        """
        return self._judged > 0

    def judged(self) -> None:
        """Record that a host has the verdict. The processes end once all have it."""
        self._judged += 1
        if self._judged == len(self._hosts):
            for host in self._hosts:
                host.end()

    def left(self) -> None:
        """Record that a host may exit."""
        self._left += 1
        if self._left == len(self._hosts):
            self.loop.stop()

    def _begin(self) -> None:
        try:
            socket.create_connection(self._place.leader_address).close()
        except ConnectionRefusedError:
            self.loop.call_later(RETRY_S, self._begin)
        else:
            self._dialed_at = time.monotonic()
            self._dial(0)

    def _dial(self, first: int) -> None:
        for host in self._hosts[first : first + CONNECTS]:
            host.dial()
        if first + CONNECTS < len(self._hosts):
            self.loop.call_later(0.0, lambda: self._dial(first + CONNECTS))

    def _told(self) -> None:
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
class Measured:
    """The cost of one gang."""

    hosts: int
    ranks: int  # of a host
    join_s: float  # from the first host's connection until all were told to start
    turned_away: int  # connections that were closed before their host had joined
    share: float  # of a core, by the leader
    beats_per_s: float  # that it received
    verdict_s: float  # from the exception until the last host had the verdict
    peak_mb: float  # of the leader's memory

    def rows(self) -> list[Row]:
        """Return the rows of the table."""
        gang = f"leader, {self.hosts:,} hosts × {self.ranks}"
        bound = MOST_SHARE if (self.hosts, self.ranks) == SIZES[0] else None
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
                MOST_S,
                f"{self.verdict_s:.2f} s",
            ),
            Row(
                f"{gang}: memory over 200 MB",
                self.peak_mb / MOST_MB,
                1.0,
                f"{self.peak_mb:.0f} MB at its peak",
            ),
        ]


def measure_gang(hosts: int, ranks: int, seconds: float, folder: pathlib.Path) -> Measured:
    """Run one gang and watch its beats for `seconds`; its logs are in `folder`."""
    job = AgentJob("leader", ("sleep", "86400"), processes_per_host=ranks, in_place_limit=0)
    environ = os.environ | {
        contract.LEADER: f"127.0.0.1:{choose_free_port()}",
        contract.HOSTS: str(hosts),
        contract.INDEX: "0",
        contract.UID: "benchmark",
        contract.NODE: "node",  # as in a pod: it writes the lines for programs
        contract.JOB: job.to_json(),
        contract.RUN_DIR: str(folder / "run"),
    }
    with (folder / "leader.log").open("wb") as written:
        leader = subprocess.Popen(
            [sys.executable, "-m", "jaxlaunch.launcher.agent"],
            env=environ,
            stdout=written,
            stderr=written,
        )
    share = [*range(1, hosts, max(1, -(-(hosts - 1) // FAKES))), hosts]
    fakes = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.leader", "--fake", str(first), str(end)],
            cwd=pathlib.Path(__file__).parents[1],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for first, end in zip(share, share[1:], strict=False)
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
) -> Measured:
    starts = [_read_answer(fake) for fake in fakes]
    join_s = max(start["started_at"] for start in starts) - min(
        start["dialed_at"] for start in starts
    )
    time.sleep(WARM_S)
    cpu_before, beats_before, started_at = _cpu_s(leader.pid), _count_beats(fakes), time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - started_at
    spent, beats = _cpu_s(leader.pid) - cpu_before, _count_beats(fakes) - beats_before
    peak_mb = _peak_mb(leader.pid)
    _send_word(fakes[0], "fail")
    reports = [_read_answer(fake) for fake in fakes]
    peak_mb = max(peak_mb, _peak_mb(leader.pid))
    leader.wait()
    if (
        leader.returncode != contract.CRASH
        or sum(start["judged"] for start in reports) != hosts - 1
    ):
        raise SystemExit(f"the leader ended with {leader.returncode}, the hosts with {reports}")
    verdict_s = max(start["judged_at"] for start in reports) - reports[0]["failed_at"]
    turned_away = sum(start["turned_away"] for start in starts)
    return Measured(
        hosts, ranks, join_s, turned_away, spent / took, beats / took, verdict_s, peak_mb
    )


def _peak_mb(pid: int) -> float:
    """Return the peak memory of a process without its parent's (`ru_maxrss`); 0 if it ended."""
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
