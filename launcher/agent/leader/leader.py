"""Host 0's second task: gathers the gang, starts attempts, decides once, and lets everyone leave together."""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from launcher.agent import history, report, wire
from launcher.agent.attempt import Attempt
from launcher.agent.clock import Clock
from launcher.agent.config import Config
from launcher.agent.herald import Herald, View
from launcher.agent.loop import READ, Loop
from launcher.agent.memory import AGENTS, SUMMARY, Memory
from launcher.agent.ports import free_port
from launcher.agent.progress import Status, budgets
from launcher.agent.rendezvous import Hello, Refusal, names, refusal
from launcher.agent.verdict import Event, Verdict, of_code
from launcher.agent.wire import BEAT_S, SILENCE_S, Link, Message
from trainer import contract

TICK_S = 0.2
SAY_S = 10.0
HELLO_S = 10.0  # a connection that has not said hello by then is closed
LINGER_S = 10.0  # hosts that are still to come may hear of a refusal within this
GONE_S = 10.0  # a process that SIGKILL cannot end by then is the kernel's
CLOSE_S = 3.0  # for agents to take their leave
GRACE_MARGIN_S = 5.0  # of the grace period, kept for killing, writing and leaving
MAX_NOTES = 50


class Stage(enum.Enum):
    GATHER = "waiting for every host"
    RUN = "the processes run"
    KILL = "decided; the processes are being ended"
    LEAVE = "everyone may go"


class Seat:
    """One host's connection."""

    def __init__(self, hello: Hello, link: Link, now: float) -> None:
        self.hello, self.link, self.heard_at = hello, link, now
        self.excused_s = 0.0  # since then: time in which the leader could not have heard it
        self.is_gone = False  # its processes of this attempt


class Leader:
    """Calls `finish` once, after every other agent was told to leave. Raises OSError when its port is taken."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        hello: Hello,
        clock: Clock,
        memory: Memory,
        herald: Herald,
        *,
        say: Callable[[str], None],
        finish: Callable[[Verdict], None],
    ) -> None:
        self._config, self._loop, self._hello = config, loop, hello
        self._clock, self._memory, self._herald, self._say, self._finish = clock, memory, herald, say, finish
        self._listener = wire.listen(*config.leader)
        self._listener.setblocking(False)
        loop.watch(self._listener.fileno(), READ, lambda mask: self._accept())
        self._epoch = secrets.token_hex(8)
        self._stage = Stage.GATHER
        self._strangers: dict[Link, float] = {}  # connections without a hello, since when
        self._seats: dict[int, Seat] = {}
        self._came: set[int] = set()  # hosts that were ever here, refused ones included
        self._refused: list[str] = []
        self._records = memory.records(config.uid)
        self._number = self._records[-1].attempt if self._records else 0
        self._attempt = Attempt(self._number, {})
        self._started = time.time()
        self._seconds_before: dict[str, float] = {}
        self._verdict: Verdict | None = None
        self._is_stopping = False
        self._has_asked_for_stacks = False
        self._notes: list[str] = []
        self._metrics: Mapping[str, Any] | None = None
        now = self._since = self._ticked_at = self._beat_at = self._said_at = time.monotonic()
        self._until = now  # when the stage ends at the latest; of KILL and LEAVE
        budget = budgets(config.job.budgets_s)["rendezvous"]
        self._gather_until = None if budget is None else now + budget

    def begin(self) -> None:
        """Remembers, and begins to wait for every host."""
        self._clock.carry(report.carried(self._records, time.time()))
        self._seconds_before = self._clock.seconds(time.monotonic())
        for record in self._records[-3:]:
            message = record.verdict["message"]
            self._say(f"before: attempt {record.attempt} of generation {record.generation}: {message}")
        self._herald.begin(self._records, self._memory, self._config.processes)
        self._memory.write(SUMMARY, self._summary("running", None))
        self._loop.every(TICK_S, self._tick)

    # --- connections --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it left before it was taken
        if len(self._strangers) > self._config.hosts + 16:
            return sock.close()
        self._strangers[Link(self._loop, sock, self._message, self._disconnected)] = time.monotonic()

    def _message(self, link: Link, message: Message) -> None:
        if link in self._strangers:
            return self._greet(link, message)
        seat = next((seat for seat in self._seats.values() if seat.link is link), None)
        if seat is None:
            return
        seat.heard_at, seat.excused_s = time.monotonic(), 0.0
        try:
            self._take(seat, message)
        except (KeyError, TypeError, ValueError) as error:
            self._say(f"{seat.hello.name} sent a message that cannot be read: {error!r}")
            link.close()
            self._disconnected(link, "it sent a message that cannot be read")

    def _greet(self, link: Link, message: Message) -> None:
        del self._strangers[link]
        try:
            hello = Hello.from_wire(message)
        except (KeyError, TypeError):
            return link.close()
        why = refusal(hello, self._hello, {host: seat.hello for host, seat in self._seats.items()}, self._config.hosts)
        if why is None and self._stage is not Stage.GATHER and self._verdict is None:
            why = Refusal(f"{hello.name} came after the start")
        if why is not None:
            return self._refuse(link, hello, why)
        before = self._seats.get(hello.host)
        if before is not None:
            before.link.close()  # the same pod came again: the old connection is half dead
        link.send("welcome", epoch=self._epoch)
        link.epoch = self._epoch
        self._seats[hello.host] = Seat(hello, link, time.monotonic())
        self._came.add(hello.host)
        if self._verdict is not None:
            self._seats[hello.host].is_gone = True
            link.send("leave", verdict=self._verdict.to_json())
        elif len(self._seats) == self._config.hosts:
            self._memory.write(AGENTS, self._addresses())
            self._start()

    def _refuse(self, link: Link, hello: Hello, why: Refusal) -> None:
        self._say(f"refused: {why.message}")
        self._refused.append(why.message)
        link.send("refused", message=why.message, code=why.code, may_retry=why.may_retry)
        self._loop.after(CLOSE_S, link.close)
        if why.ends_gang:
            self._came.add(hello.host)
            if self._verdict is None:
                rank = self._config.ranks(hello.host)[0]
                self._gather_until = time.monotonic() + LINGER_S
                self._verdict = of_code(contract.BAD_SPEC, why.message, rank=rank, host=hello.host)
                for seat in self._seats.values():
                    seat.link.send("verdict", attempt=self._number + 1, verdict=self._verdict.to_json())

    def _disconnected(self, link: Link, reason: str) -> None:
        self._strangers.pop(link, None)
        host = next((host for host, seat in self._seats.items() if seat.link is link), None)
        if host is None:
            return
        if self._stage is Stage.GATHER and self._verdict is None:
            self._say(f"{self._seats.pop(host).hello.name} went away: {reason}")
        else:
            del self._seats[host]
            if self._stage is Stage.RUN:
                self._attempt.lost(host, reason, time.monotonic())
        self._consider()

    # --- what is heard ------------------------------------------------------------------------------------------------

    def _take(self, seat: Seat, message: Message) -> None:
        now, kind, attempt = time.monotonic(), message["type"], self._attempt
        if kind == "stop":
            self._told_to_stop(now)
        elif kind == "kill":
            self._say(f"{seat.hello.name} was told to stop again")
            attempt.kill(now)
        elif kind == "note":
            self._note(message["text"])
        elif message["attempt"] != self._number:
            return  # of the attempt before: it was decided without this
        elif kind == "gone":
            seat.is_gone = True
        elif kind == "beat":
            self._metrics = message["metrics"] or self._metrics
            if self._stage is Stage.RUN:
                attempt.see({int(rank): Status.from_wire(said) for rank, said in message["ranks"].items()})
        elif kind == "stacks":
            rank = int(message["rank"])
            attempt.see({rank: Status.from_wire(message["status"])})
            attempt.stacks[rank] = message["text"]
        elif kind == "event":
            attempt.hear(Event.from_wire(seat.hello.host, message), now)
        self._consider()

    def _told_to_stop(self, now: float) -> None:
        if self._is_stopping:
            return
        self._is_stopping = True
        deadline_s = max(0.0, self._config.job.grace_s - GRACE_MARGIN_S)
        self._say(f"stopping: the processes have {deadline_s:.0f} s to save")
        if self._stage is Stage.GATHER and self._verdict is None:
            self._judge(of_code(contract.PREEMPTED, "stopped from outside before the gang was complete"))
        elif self._stage is Stage.RUN:
            self._attempt.stop(deadline_s, now)
            self._tell("stop")

    def _note(self, text: str) -> None:
        if text not in self._notes and len(self._notes) < MAX_NOTES:
            self._notes.append(text)

    # --- what follows -------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """All children start, on a port nobody has used."""
        self._number += 1
        self._attempt = Attempt(self._number, {host: self._config.ranks(host) for host in range(self._config.hosts)})
        self._stage, self._verdict, self._has_asked_for_stacks = Stage.RUN, None, False
        self._started = time.time()
        for seat in self._seats.values():
            seat.is_gone = False
        counts = (self._config.processes, "process", "es"), (self._config.hosts, "host", "s")
        size = " on ".join(f"{count} {name}{plural if count > 1 else ''}" for count, name, plural in counts)
        self._say(f"attempt {self._number}: {size}")
        coordinator = f"{_bracketed(self._config.leader[0])}:{free_port()}"
        self._tell("start", attempt=self._number, coordinator=coordinator)

    def _consider(self) -> None:
        """Takes the next step of the stage, if it is time: after every message and every tick."""
        now = time.monotonic()
        if self._stage is Stage.GATHER:
            self._gather(now)
        elif self._stage is Stage.RUN:
            self._watch(now)
        elif self._stage is Stage.KILL and (self._are_gone or now > self._until):
            self._after_all_are_gone()
        elif self._stage is Stage.LEAVE and (self._have_left or now > self._until):
            assert self._verdict is not None, "the stage is LEAVE"
            self._finish(self._verdict)

    def _watch(self, now: float) -> None:
        if self._attempt.wants_stacks and not self._has_asked_for_stacks:
            self._has_asked_for_stacks = True
            self._tell("stacks")
        verdict = self._attempt.verdict(now, {host: seat.heard_at for host, seat in self._seats.items()})
        if verdict is not None:
            self._judge(verdict)

    def _judge(self, verdict: Verdict) -> None:
        """The one decision about an attempt. Everyone ends its processes and says when they are gone."""
        self._verdict = verdict
        self._say(f"{verdict.cause} ({verdict.code}): {verdict.message}")
        if self._stage is Stage.GATHER:
            self._number += 1  # it ended before its processes started; it is remembered all the same
        self._herald.judged(verdict, self._number)
        self._stage, self._until = Stage.KILL, time.monotonic() + GONE_S
        self._tell("verdict", attempt=self._number, verdict=verdict.to_json())

    def _after_all_are_gone(self) -> None:
        """Remembers the attempt, and starts another or ends the generation."""
        assert self._verdict is not None, "the stage is KILL"
        now = time.monotonic()
        if self._verdict.code == contract.DONE:
            self._clock.ended(now)
        else:
            self._clock.died(now)
        self._remember(now)
        move = history.next_move(self._records, self._config.job.in_place_budget, self._everyone_lives)
        if not move.again:
            return self._end(move.verdict)
        if self._is_stopping:
            return self._end(of_code(contract.PREEMPTED, f"stopped from outside, after: {move.verdict.message}"))
        count = history.restarts_used(self._records, self._config.generation)
        budget = self._config.job.in_place_budget
        self._say(f"starting again in place, {count} of {budget} without a newly committed step")
        self._start()

    @property
    def _everyone_lives(self) -> bool:
        return len(self._seats) == self._config.hosts

    def _remember(self, now: float) -> None:
        assert self._verdict is not None, "an attempt is remembered with its verdict"
        seconds = self._clock.seconds(now)
        record = report.record(
            self._config,
            self._number,
            self._verdict,
            self._attempt,
            {cause: spent - self._seconds_before.get(cause, 0.0) for cause, spent in seconds.items()},
            self._started,
        )
        self._seconds_before = seconds
        self._records.append(record)
        self._memory.append(report.line(record))

    def _end(self, verdict: Verdict) -> None:
        """Everyone leaves with this verdict's code."""
        self._verdict, self._stage, self._until = verdict, Stage.LEAVE, time.monotonic() + CLOSE_S
        self._memory.write(SUMMARY, self._summary(report.status_of(verdict), verdict))
        self._herald.look(self._view, time.monotonic(), is_news=True)
        self._tell("ping", gang=self._gang(time.monotonic()))
        self._tell("leave", verdict=verdict.to_json())

    def _tell(self, kind: str, **fields: Any) -> None:
        for seat in list(self._seats.values()):
            seat.link.send(kind, **fields)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        now = time.monotonic()
        away, self._ticked_at = now - self._ticked_at, now
        if away > SILENCE_S / 2:  # this process was stopped or starved: what it did not hear proves nothing
            for seat in self._seats.values():
                seat.excused_s += away
        for link in [link for link, since in self._strangers.items() if now - since > HELLO_S]:
            del self._strangers[link]
            link.close()
        for seat in [seat for seat in self._seats.values() if now - seat.heard_at - seat.excused_s > SILENCE_S]:
            seat.link.close()
            self._disconnected(seat.link, f"no word for {SILENCE_S:.0f} s")
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self._tell("ping", gang=self._gang(now))
        self._herald.look(self._view, now)
        self._consider()

    @property
    def _are_gone(self) -> bool:
        return all(seat.is_gone for seat in self._seats.values())

    @property
    def _have_left(self) -> bool:
        return not any(seat.link.is_open for host, seat in self._seats.items() if host != self._config.host)

    @property
    def _missing(self) -> list[int]:
        return [host for host in range(self._config.hosts) if host not in self._seats]

    def _gather(self, now: float) -> None:
        missing = self._missing
        if self._verdict is not None:  # refused; those still to come are told, for a while
            if len(self._came) == self._config.hosts or (self._gather_until or 0.0) <= now:
                self._judge(self._verdict)
            return
        waited = now - self._since
        if self._gather_until is not None and now >= self._gather_until:
            refused = f"; refused: {'; '.join(dict.fromkeys(self._refused))}" if self._refused else ""
            message = f"rendezvous: {names(missing)} never came in {waited:.0f} s{refused}"
            where = {"rank": self._config.ranks(missing[0])[0], "host": missing[0]}
            return self._judge(of_code(contract.LOST, message, **where))
        if now - self._said_at >= SAY_S:
            self._said_at = now
            self._say(f"waiting for {names(missing)} of {self._config.hosts} for {waited:.0f} s")

    # --- reports ------------------------------------------------------------------------------------------------------

    def _gang(self, now: float) -> dict[str, Any]:
        """What every agent's metrics say of all."""
        steps = [status.step for status in self._attempt.statuses.values() if status.step is not None]
        heard = [seat.heard_at for host, seat in self._seats.items() if host != self._config.host]
        return {
            "attempt": self._number,
            "seconds": self._clock.seconds(now),
            "foremost": max(steps, default=None),
            "silence_s": now - min(heard, default=now),
            **report.counters(self._records, self._config.generation, self._config.job),
        }

    def _view(self) -> View:
        """What the pod's log tells of the gang."""
        has_ended = self._stage is Stage.LEAVE
        return View(
            stage=self._stage.name.lower(),
            attempt=self._number,
            missing=self._missing,
            refused=list(dict.fromkeys(self._refused[-3:])),
            step=self._attempt.step,
            committed=self._attempt.committed,
            statuses=self._attempt.statuses,
            overdue=self._attempt.overdue,
            seconds=self._clock.seconds(time.monotonic()),
            restarts=(history.restarts_by_cause if has_ended else history.ends_by_cause)(self._records),
            metrics=self._metrics,
        )

    def _summary(self, status: str, verdict: Verdict | None) -> dict[str, Any]:
        return report.summary(
            status,
            verdict,
            step=self._attempt.step,
            metrics=self._metrics,
            seconds=self._clock.seconds(time.monotonic()),
            records=self._records,
            notes=self._notes,
            stacks=self._attempt.stacks,
        )

    def _addresses(self) -> list[dict[str, Any]]:
        seats = sorted(self._seats.items())
        return [report.address(seat.hello, seat.link.peer, self._config.ranks(host)) for host, seat in seats]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
