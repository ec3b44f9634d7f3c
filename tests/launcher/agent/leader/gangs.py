"""A leader without a loop, and the sockets of its hosts, for one message at a time."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.gang import config
from jaxlaunch.launcher.agent.gang.clock import Clock
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.gang.protocol import Hello, HostHandshake
from jaxlaunch.launcher.agent.io.loop import Timer
from jaxlaunch.launcher.agent.leader.publishers import PodLog
from jaxlaunch.launcher.agent.leader.server import Server
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs.run_folder import RunFolder

RANKS = 2  # of a host
UID = "the-uid-of-the-run"
PATIENCE_S = 30.0
STEPPING = Status(phase="step", step=3, stepped=True, jax="0.10.2")


class Turns:
    """A loop that calls back when the test says so."""

    def __init__(self) -> None:
        self.ready: dict[int, Callable[[int], None]] = {}
        self.ticks: list[Callable[[], None]] = []

    def watch(self, fd: int, mask: int, ready: Callable[[int], None]) -> None:
        self.ready[fd] = ready

    def unwatch(self, fd: int) -> None:
        self.ready.pop(fd, None)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        return Timer(callback)

    def call_every(self, seconds: float, callback: Callable[[], None]) -> None:
        self.ticks.append(callback)

    def pause_between_polls(self, seconds: float) -> None:
        pass


class Gang:
    """A leader and the sockets of its hosts, of which `joined` have joined, by default all."""

    def __init__(
        self,
        hosts: int,
        folder: Path,
        joined: int | None = None,
        job: AgentJob | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        job = job or AgentJob("t", ("true",), processes_per_host=RANKS, in_place_limit=0)
        environ = {contract.LEADER: "127.0.0.1:0", contract.HOSTS: str(hosts), contract.INDEX: "0"}
        environ |= {contract.JOB: job.to_json(), contract.UID: UID, **(variables or {})}
        self.place: Config = config.read_config(environ)
        self.loop = Turns()
        self.messages: list[str] = []
        self.verdicts: list[Verdict] = []
        self.hello = Hello.from_config(self.place, 9400)
        self.leader = Server(
            self.place,
            self.loop,  # type: ignore[arg-type]
            self.hello,
            Clock(0.0),
            RunFolder(folder, self.messages.append),
            PodLog(0, None),
            say=self.messages.append,
            finish=lambda verdict, alone: self.verdicts.append(verdict),
        )
        self.leader.start_waiting()
        (self.listener,) = self.loop.ready
        with socket.socket(fileno=os.dup(self.listener)) as listening:
            self.address = listening.getsockname()
        self.hosts: dict[int, tuple[socket.socket, int]] = {}
        self.sockets: list[socket.socket] = []
        self.numbers: dict[int, int] = {}
        self.epoch = ""
        for host in range(hosts if joined is None else joined):
            self.join(host)

    @property
    def has_started(self) -> bool:
        return any("starting attempt 1" in text for text in self.messages)

    def fail(self, host: int, message: str = "boom", **fields: Any) -> int:
        return self.event(host, "error", error={"type": "ValueError", "message": message}, **fields)

    def join(self, host: int, key: bytes = UID.encode(), **changes: Any) -> int:
        """Connect a host and answer the challenge; return the opcodes of the leader."""
        side = HostHandshake(key)
        cost = self.raw(host, self.greeting(side, host, self.connect(host), **changes))
        if not self.epoch:
            self.epoch = side.open_answer(
                json.loads(self.hosts[host][0].recv(65536).splitlines()[0])
            )["epoch"]
        return cost

    def greeting(
        self, side: HostHandshake, host: int, challenge: dict[str, Any], **changes: Any
    ) -> bytes:
        """The line of a host's hello."""
        hello = dataclasses.replace(self.hello, host=host, pod=f"pod-{host}").to_wire()
        fields = side.answer_challenge(challenge, hello | changes)
        return json.dumps({"type": "hello", **fields}).encode() + b"\n"

    def connect(self, host: int) -> dict[str, Any]:
        """Connects a host; returns the leader's challenge."""
        previous = set(self.loop.ready)
        sock = socket.create_connection(self.address)
        self.sockets.append(sock)
        self.read(self.listener)
        (fd,) = set(self.loop.ready) - previous
        self.hosts[host], self.numbers[host] = (sock, fd), 0
        result: dict[str, Any] = json.loads(sock.recv(65536))
        return result

    def send(self, host: int, kind: str, /, **fields: Any) -> int:
        """Sends a message of a host; returns the opcodes that the leader ran for it."""
        stamp = {"epoch": self.epoch, "n": self.numbers[host]}
        message = {"type": kind, "attempt": 1, **fields, **stamp}
        self.numbers[host] += 1
        return self.raw(host, json.dumps(message).encode() + b"\n")

    def raw(self, host: int, data: bytes) -> int:
        sock, fd = self.hosts[host]
        sock.sendall(data)
        return self.read(fd)

    def read(self, fd: int) -> int:
        """Has the leader read what a host sent; returns the opcodes that it ran."""
        select.select([fd], [], [], PATIENCE_S)
        return opcodes(lambda: self.loop.ready[fd](1))

    def beat(self, host: int, **changes: Any) -> int:
        ranks = self.place.host_ranks(host)
        fields = {key: value for key, value in STEPPING.to_wire().items()} | changes
        return self.send(host, "beat", ranks={f"{ranks[0]}-{ranks[-1]}": fields}, metrics=None)

    def event(self, host: int, kind: str, /, **fields: Any) -> int:
        rank = self.place.host_ranks(host)[0]
        return self.send(host, "event", kind=kind, rank=rank, status=STEPPING.to_wire(), **fields)

    def close(self, host: int) -> int:
        sock, fd = self.hosts.pop(host)
        sock.close()
        return self.read(fd)


def reset(sock: socket.socket) -> None:
    """Closes a connection at once, as a host does that is killed."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def opcodes(call: Callable[[], Any]) -> int:
    """How many opcodes of Python `call` runs: what it costs on any machine."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count
