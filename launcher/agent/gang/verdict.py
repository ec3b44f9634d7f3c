"""One verdict for many symptoms. Pure: events in, the cause out.

When a rank dies its peers fail too, of broken connections and aborts, within milliseconds. So events are weighed by how
close they can be to a cause; among equals the first to arrive wins.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from launcher.agent.progress import Status
from trainer import contract

# How a peer's death reads on the ranks that survive it (jax 0.10 and 0.11; Gloo, NCCL, gRPC, the coordination service).
ECHO = re.compile(
    r"connection (closed|reset) by peer|connection refused|broken pipe|socket closed|gloo|nccl|"
    r"coordination ?service|distributed service detected fatal errors|heartbeat|barrier|"
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|CANCELLED)\b",
    re.IGNORECASE,
)
# Whom the coordination service of JAX misses, in the last words of those that it aborts for that.
MISSED = re.compile(r"tasks are unhealthy \(stopped sending heartbeats\):\s*(\d+)")
TAIL_CHARS = 8_000  # of a traceback or a log's end, kept in a verdict


class Kind(str, enum.Enum):
    """What was noticed."""

    ERROR = "error"  # a rank said what it raised
    EXIT = "exit"  # a rank's process ended
    LEFT = "left"  # a rank's program ended by itself while others went on
    LOST = "lost"  # a host's agent is gone
    HANG = "hang"  # a rank missed its budget
    UNSTARTABLE = "unstartable"  # the command could not be started


class Closeness(enum.IntEnum):
    """How far an event can be from the cause; the smallest wins."""

    CAUSE = 0
    HOST = 1
    ABORT = 2  # JAX aborts the peers of a host that died, and its last words may be missing
    LEFT = 3
    HANG = 4
    ECHO = 5


# Seconds to wait for something closer to the cause before an event is believed.
SETTLE_S: Mapping[Closeness, float] = {
    Closeness.CAUSE: 0.0,
    Closeness.HOST: 0.5,  # a dying host may still have sent its rank's last words
    Closeness.ABORT: 0.0,  # once every other host has spoken
    Closeness.LEFT: 1.0,
    Closeness.HANG: 0.0,  # the leader has collected the stacks by then
    Closeness.ECHO: 2.0,
}


@dataclasses.dataclass(frozen=True)
class Event:
    """One symptom, as the leader heard of it."""

    kind: Kind
    host: int
    rank: int | None = None
    status: Status = Status()
    exit: int = 0  # EXIT: exit code, or minus the signal
    oom: bool = False  # EXIT: the kernel sent the signal, for want of memory
    error: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # ERROR: type, message, traceback, code
    text: str = ""  # EXIT: the last lines of output; else what to say

    @classmethod
    def from_wire(cls, host: int, fields: Mapping[str, Any]) -> Event:
        return cls(
            kind=Kind(fields["kind"]),
            host=host,
            rank=int(fields["rank"]),
            status=Status.from_wire(fields["status"]),
            exit=int(fields.get("exit", 0)),
            oom=bool(fields.get("oom", False)),
            error=fields.get("error") or {},
            text=str(fields.get("text", "")),
        )


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How an attempt or a run ended, and by whom."""

    cause: str
    code: int
    message: str
    rank: int | None = None
    host: int | None = None
    step: int | None = None
    traceback: str | None = None

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Verdict:
        return cls(**{field.name: fields.get(field.name) for field in dataclasses.fields(cls)})  # type: ignore[arg-type]


def of_code(code: int, message: str, **where: Any) -> Verdict:
    """A verdict whose cause is its code's."""
    return Verdict(contract.outcome(code).cause, code, message, **where)


def closeness(event: Event) -> Closeness | None:
    """How close `event` can be to the cause; None when it is no fault at all."""
    if event.kind is Kind.LOST:
        return Closeness.HOST
    if event.kind is Kind.HANG:
        return Closeness.HANG
    if event.kind is Kind.UNSTARTABLE:
        return Closeness.CAUSE
    if event.kind is Kind.ERROR:
        return _closeness_of_error(event)
    if event.kind is Kind.LEFT or (event.exit == 0 and not event.status.trainer):
        return Closeness.LEFT
    if dataclasses.replace(event.status, exit=event.exit).ended_clean:
        return None
    if event.exit == -signal.SIGABRT:
        return Closeness.ECHO if ECHO.search(event.text) else Closeness.ABORT
    return Closeness.CAUSE


def _closeness_of_error(event: Event) -> Closeness | None:
    code = event.error.get("code")
    if code == contract.PREEMPTED:
        return None  # the trainer's way to say that it stopped when told
    if code in (None, contract.STARTUP, contract.CRASH) and ECHO.search(str(event.error.get("message", ""))):
        return Closeness.ECHO
    return Closeness.CAUSE


def decide(events: Sequence[Event]) -> tuple[Event, Closeness] | None:
    """The event that explains the others, or None when nothing went wrong. `events` in order of arrival."""
    explained = {event.rank for event in events if event.kind is Kind.ERROR}
    best: tuple[Event, Closeness] | None = None
    for event in events:
        if event.kind is Kind.EXIT and event.rank in explained:
            continue  # it said what it raised; how it then ended says less
        close = closeness(event)
        if close is not None and (best is None or close < best[1]):
            best = event, close
    return best


def verdict_of(event: Event) -> Verdict:
    """The sentence and the code of the event that explains an attempt's end."""
    where = {"rank": event.rank, "host": event.host, "step": event.status.step}
    name, place = f"rank {event.rank}", f" {event.status.where}" if event.status.where else ""
    if event.kind is Kind.LOST:
        return of_code(contract.LOST, event.text, **where)
    if event.kind is Kind.HANG:
        return of_code(contract.HANG, event.text, **where)
    if event.kind is Kind.UNSTARTABLE:
        return of_code(contract.STARTUP, f"{name} could not be started: {event.text}", **where)
    if event.kind is Kind.ERROR:
        message = f"{name} raised{place}: {_title(event.error)}"
        return of_code(_code(event), message, traceback=_tail(event.error.get("traceback")), **where)
    if closeness(event) is Closeness.LEFT:
        return of_code(_code(event), f"{name}'s program ended, peers went on", **where)
    missed = MISSED.search(event.text)
    if closeness(event) is Closeness.ECHO and missed is not None:
        message = f"rank {missed[1]} stopped sending heartbeats to JAX, which then aborted its peers"
        return of_code(contract.HANG, message, rank=int(missed[1]), step=event.status.step, traceback=_tail(event.text))
    if event.oom:
        message = f"{name} was OOMKilled{place}: its container had no memory left"
    elif event.exit < 0:
        message = f"{name} was killed by {_signal(-event.exit)}{place}{_hint(-event.exit)}"
    elif event.exit == 0:
        message = f"{name}'s program ended{place}, before its last step"
    else:
        message = f"{name}'s program ended with exit code {event.exit}{place}"
    return of_code(_code(event), message, traceback=_tail(event.text), **where)


def _code(event: Event) -> int:
    """The exit code of the gang: the program's own where it speaks the contract, 70 or 83 where it does not."""
    if event.kind is Kind.EXIT and event.exit < 0:
        return 128 - event.exit
    said = event.error.get("code") if event.kind is Kind.ERROR else event.exit
    crash = contract.STARTUP if event.status.phase is not None and not event.status.stepped else contract.CRASH
    if closeness(event) is Closeness.ECHO:
        return contract.CRASH  # whatever broke the connection may pass
    if event.status.trainer and isinstance(said, int) and said in contract.OUTCOMES and said != contract.DONE:
        return said
    return crash


def _title(error: Mapping[str, Any]) -> str:
    kind, message = error.get("type", "an error"), str(error.get("message", "")).strip()
    first = message.splitlines()[0][:500] if message else ""
    return f"{kind}: {first}" if first else str(kind)


def _tail(text: Any) -> str | None:
    return str(text)[-TAIL_CHARS:] or None if text else None


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _hint(number: int) -> str:
    return " (by the kernel for want of memory, or by a person)" if number == signal.SIGKILL else ""
