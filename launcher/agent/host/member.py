"""One host of the gang: tells the leader what its processes do, and does what the leader says.

Decides nothing while the leader lives; when the leader is gone it ends its processes and says so.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher.agent import oom
from launcher.agent.child import UNSTARTABLE, Child
from launcher.agent.clock import Clock
from launcher.agent.config import Config
from launcher.agent.crew import Crew
from launcher.agent.dial import Dialer
from launcher.agent.kit import Kit
from launcher.agent.loop import Loop
from launcher.agent.output import Outlet
from launcher.agent.profiles import Profiles
from launcher.agent.progress import budgets
from launcher.agent.rendezvous import Hello
from launcher.agent.stacks import MAX_CHARS
from launcher.agent.verdict import Kind, Verdict, of_code
from launcher.agent.wire import BEAT_S, SILENCE_S, Link, Message
from trainer import contract

TICK_S = 0.2
HELLO_S = 10.0  # a Python program has loaded our hook by then
ONE_PRESS_S = 0.5  # signals closer than this are one: a terminal and a launcher may both pass a Ctrl-C on
RETRY_REFUSED_S = 2.0
STACKS_S = 2.0

Finish = Callable[[Verdict], None]


class Member:
    """Calls `finish` once, when this host may leave; `orphaned` before that, if it leaves without its leader."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        kit: Kit,
        hello: Hello,
        outlet: Outlet,
        clock: Clock | None,
        *,
        say: Callable[[str], None],
        finish: Finish,
        orphaned: Finish,
    ) -> None:
        self.gang: Mapping[str, Any] = {}  # what the leader last said of everyone
        self.heard_at = time.monotonic()
        self.budgets = budgets(config.job.budgets_s)
        self._config, self._loop, self._hello, self._clock = config, loop, hello, clock
        self._say, self._finish, self._orphaned = say, finish, orphaned
        self.crew = Crew(config, loop, kit, outlet, say=say, heard=self._heard, ended=self._child_ended)
        self.profiles = Profiles(config.job.command is None, self.crew.alive)
        self._dialer = Dialer(loop, config.leader, say=say, connected=self._connected)
        self._link: Link | None = None
        self._refusal: str | None = None  # by a leader of another generation
        self._attempt = 0
        self._has_started = False
        self._is_stopping = False
        self._verdict: Verdict | None = None
        self._signalled_at: float | None = None
        self._ticked_at = self._beat_at = time.monotonic()
        self._metrics: Mapping[str, Any] | None = None
        self._overdue: set[int] = set()  # ranks that were told of in this attempt
        self._warned: set[int] = set()  # ranks whose silence was explained
        self._oom_kills = oom.kills()
        self._stacks_until: float | None = None
        self._stacks: dict[int, str] = {}  # what was read of each rank's at the last tick
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.on_signal(number, self.told_to_stop)
        self._handlers: dict[str, Callable[[Message], None]] = {
            "welcome": self._welcomed,
            "refused": self._refused,
            "ping": self._pinged,
            "start": self._start,
            "stop": self._stop,
            "stacks": self._dump,
            "verdict": self._judged,
            "leave": self._leave,
        }

    @property
    def attempt(self) -> int:
        return self._attempt

    def begin(self) -> None:
        self._dialer.dial()
        self._loop.every(TICK_S, self._tick)
        budget = self.budgets["rendezvous"]
        if budget is not None and not self._config.is_leader:  # host 0 counts for everyone, itself included
            self._loop.after(budget, self._rendezvous_over)

    def told_to_stop(self) -> None:
        """SIGTERM or SIGINT: the leader hears of it before any process does. The second one kills."""
        now = time.monotonic()
        first, self._signalled_at = self._signalled_at, self._signalled_at or now
        if first is not None and now - first < ONE_PRESS_S:
            return
        if self._link is None or self._link.epoch is None:
            self.crew.kill()
            return self._finish(of_code(contract.PREEMPTED, "stopped from outside before the gang was complete"))
        if first is None:
            self._say("told to stop")
            return self._link.send("stop")
        self._say("told to stop again: killed")
        self._link.send("kill")
        self.crew.kill()

    # --- the leader ---------------------------------------------------------------------------------------------------

    def _connected(self, sock: socket.socket) -> None:
        self._link = Link(self._loop, sock, self._message, self._leader_lost)
        self._link.send("hello", **self._hello.to_wire())

    def _message(self, link: Link, message: Message) -> None:
        self.heard_at = time.monotonic()
        handler = self._handlers.get(message["type"])
        if handler is not None:
            handler(message)

    def _welcomed(self, message: Message) -> None:
        assert self._link is not None, "a message came over it"
        self._link.epoch = message["epoch"]

    def _refused(self, message: Message) -> None:
        assert self._link is not None, "a message came over it"
        self._say(f"refused: {message['message']}")
        self._link.close()
        self._link = None
        if message["may_retry"]:
            self._refusal = f"refused it: {message['message']}"
            self._dialer.dial(RETRY_REFUSED_S)
        else:
            self._finish(of_code(message["code"], message["message"]))

    def _pinged(self, message: Message) -> None:
        self.gang = message["gang"]

    def _leader_lost(self, link: Link, reason: str) -> None:
        self._link = None
        if self._verdict is None and not self._has_started:
            return self._dialer.dial()  # a leader that starts anew is said hello to anew
        self._abandon(f"host 0 was lost: {reason}")

    def _abandon(self, message: str) -> None:
        """Ends this host's part without a leader."""
        if self._verdict is None:
            self._say(message)
            code = contract.PREEMPTED if self._is_stopping else contract.LOST
            ranks = self._config.ranks(0)
            self._verdict = of_code(code, message, rank=ranks[0], host=0)
            self._orphaned(self._verdict)
        self.crew.kill()
        self._report_gone()

    def _rendezvous_over(self) -> None:
        is_admitted = self._link is not None and self._link.epoch is not None
        if not is_admitted and not self._has_started:
            address = ":".join(map(str, self._config.leader))
            message = f"rendezvous: host 0 never came: {address} {self._refusal or self._dialer.obstacle}"
            self._say(message)
            verdict = of_code(contract.LOST, message, rank=0, host=0)
            self._orphaned(verdict)
            self._finish(verdict)

    # --- what it says -------------------------------------------------------------------------------------------------

    def _start(self, message: Message) -> None:
        self._attempt, self._has_started, self._verdict = message["attempt"], True, None
        self._overdue.clear()
        self._warned.clear()
        self._metrics = None
        if self._clock is not None:
            self._clock.enter("init", time.monotonic())
        self.crew.start(message["attempt"], message["coordinator"])
        children = list(self.crew.children.values())
        self._loop.after(HELLO_S, lambda: self._check_hellos(children))

    def _stop(self, message: Message) -> None:
        self._is_stopping = True
        self.crew.signal(signal.SIGTERM)

    def _dump(self, message: Message) -> None:
        self.crew.dump_stacks()
        self._stacks_until, self._stacks = time.monotonic() + STACKS_S, {}

    def _judged(self, message: Message) -> None:
        self._attempt, self._verdict = message["attempt"], Verdict.from_json(message["verdict"])
        self.crew.kill()
        self._report_gone()

    def _leave(self, message: Message) -> None:
        if not self._config.is_leader:  # host 0 stays until everyone has heard
            self._finish(Verdict.from_json(message["verdict"]))

    # --- the processes ------------------------------------------------------------------------------------------------

    def _heard(self, child: Child, message: Mapping[str, Any]) -> None:
        self._count(child, message)
        if "error" in message:
            self._tell(Kind.ERROR, child, error=message["error"])
        if UNSTARTABLE in message:
            self._warned.add(child.rank)
            self._tell(Kind.UNSTARTABLE, child, text=message[UNSTARTABLE])
        if "atexit" in message:
            self._tell(Kind.LEFT, child)
        if "note" in message and self._link is not None:
            self._link.send("note", text=str(message["note"])[:2000])
        if isinstance(message.get("profile"), dict):
            self.profiles.heard(child, message["profile"])
        if "metrics" in message and child.rank == 0:
            self._metrics = message["metrics"]
        if "stopped" in message or message.get("phase") == "done":
            self._beat()
        if (
            "phase" in message
            and not self._is_stopping
            and all(each.progress.status.stepped for each in self.crew.alive())
        ):
            self.crew.keep_spares()

    def _count(self, child: Child, message: Mapping[str, Any]) -> None:
        """The clock follows rank 0."""
        if self._clock is None or child.rank != 0 or self._verdict is not None:
            return
        now, status = time.monotonic(), child.progress.status
        if "phase" in message and status.phase is not None:
            self._clock.enter(status.phase, now)
            if status.phase == "step" and status.step is not None:
                self._clock.reached(status.step, now)
        if "committed" in message and status.committed is not None:
            self._clock.committed(status.committed)

    def _child_ended(self, child: Child, code: int) -> None:
        self._check_hello(child)
        self._beat()
        self._tell(Kind.EXIT, child, exit=code, oom=self._was_for_memory(code), text=child.tail_text[-MAX_CHARS:])
        self._report_gone()

    def _was_for_memory(self, code: int) -> bool:
        """Whether the kernel sent this SIGKILL. On a machine that is no container its count is everyone's."""
        before, self._oom_kills = self._oom_kills, oom.kills()
        return code == -signal.SIGKILL and self._config.is_pod and self._oom_kills > before

    def _check_hellos(self, children: list[Child]) -> None:
        for child in children:
            self._check_hello(child)

    def _check_hello(self, child: Child) -> None:
        is_of_now = self.crew.children.get(child.rank) is child
        if child.progress.has_hello or child.rank in self._warned or not is_of_now or self._verdict is not None:
            return
        self._warned.add(child.rank)
        text = (
            f"rank {child.rank} never said hello: our hook is not loaded. With `python -I` or `-S`, or another "
            "interpreter than Python, a bare jax.distributed.initialize() does not find the gang, and neither "
            "progress nor an exception is reported"
        )
        self._say(f"warning: {text}")
        if self._link is not None:
            self._link.send("note", text=text)

    def _tell(self, kind: Kind, child: Child, **fields: Any) -> None:
        if self._link is not None:
            about = {"attempt": self._attempt, "rank": child.rank, "status": child.progress.status.to_wire()}
            self._link.send("event", kind=kind.value, **about, **fields)

    def _report_gone(self) -> None:
        """Once judged and with no process left, the leader is told; without a leader this host leaves."""
        if self._verdict is None or self.crew.alive():
            return
        if self._link is not None:
            self._link.send("gone", attempt=self._attempt)
        else:
            self._finish(self._verdict)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        away, self._ticked_at = now - self._ticked_at, now
        if away > SILENCE_S / 2:  # this process was stopped or starved: what it did not hear proves nothing
            self.heard_at += away
        if self._link is not None and self._link.epoch is not None and now - self.heard_at > SILENCE_S:
            self._link.close()
            self._leader_lost(self._link, f"no word for {SILENCE_S:.0f} s")
        if now - self._beat_at >= BEAT_S:
            self._beat()
        if self._verdict is None:
            self._check_budgets(now)
        self._send_stacks(now)
        self.crew.flush()

    def _beat(self) -> None:
        self._beat_at = time.monotonic()
        if self._link is None or self._link.epoch is None:
            return
        statuses = {rank: child.progress.status.to_wire() for rank, child in self.crew.children.items()}
        metrics, self._metrics = self._metrics, None
        self._link.send("beat", attempt=self._attempt, ranks=statuses, metrics=metrics)

    def _check_budgets(self, now: float) -> None:
        for child in self.crew.alive():
            if child.rank in self._overdue or not child.progress.overdue(self.budgets, now):
                continue
            self._overdue.add(child.rank)
            limit = child.progress.limit_s(self.budgets) or 0.0
            phase, seconds = child.progress.status.phase, child.progress.in_phase_s(now)
            text = f"{phase} budget of {limit:.0f} s was missed first by rank {child.rank}, after {seconds:.0f} s"
            self._tell(Kind.HANG, child, text=text)

    def _send_stacks(self, now: float) -> None:
        """Sends the stacks once they grow no more; a process that cannot write any has none to send."""
        if self._stacks_until is None:
            return
        before, self._stacks = self._stacks, {child.rank: _stacks(child) for child in self.crew.alive()}
        is_growing = any(not text or text != before.get(rank) for rank, text in self._stacks.items())
        if is_growing and now < self._stacks_until:
            return
        self._stacks_until = None
        for rank, text in self._stacks.items():
            status = self.crew.children[rank].progress.status.to_wire()
            if self._link is not None:
                self._link.send("stacks", attempt=self._attempt, rank=rank, status=status, text=text[-MAX_CHARS:])


def _stacks(child: Child) -> str:
    try:
        with open(child.stacks_path, errors="replace") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def hello_of(config: Config, versions: Mapping[str, str | None], metrics_port: int) -> Hello:
    """How this host introduces itself."""
    return Hello(
        host=config.host,
        uid=config.uid,
        generation=config.generation,
        pod=config.pod,
        hostname=socket.gethostname(),
        node=config.node,
        versions=versions,
        spec=config.spec,
        pid=os.getpid(),
        metrics_port=metrics_port,
        fault=config.fault,
    )
