"""What a question about a job answers: the situation, what shows it, and what to do. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from launcher.hosts import Host
from launcher.objects import Obj
from launcher.seen import World
from launcher.wording import count

MAX_SHOWN = 600  # characters of another's words
MAX_HOSTS = 8


@dataclasses.dataclass(frozen=True)
class Answer:
    """`situation` is a word of launcher.causes.situations; `headline` goes on after the job's name."""

    situation: str
    headline: str
    evidence: tuple[str, ...] = ()
    next_move: str | None = None


Question = Callable[[World], Answer | None]  # None: this is not what holds it up


def first(questions: Iterable[Question], world: World) -> Answer | None:
    """The answer of the first question that has one."""
    return next((answer for question in questions if (answer := question(world)) is not None), None)


def shown(text: str) -> str:
    """Another's words on one line, bounded."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_SHOWN else f"{line[:MAX_SHOWN]}…"


def quoted(event: Obj | None) -> tuple[str, ...]:
    """An event as evidence: who said it about what, how often, and its words."""
    if event is None:
        return ()
    times = f" ({event['count']} times)" if event["count"] > 1 else ""
    return (f"{event['kind']} {event['names'][0]}: {event['reason']}{times}: {shown(event['message'])}",)


def which(hosts: Sequence[Host], wanted: int) -> str:
    """ "host 3", "hosts 2 and 5", "all 4 hosts", "17 of 64 hosts": of whom something is said."""
    if len(hosts) == wanted:
        return "all " + count(wanted, "host") if wanted > 1 else "its host" if wanted == 1 else "no host"
    numbers = [str(host.number) for host in hosts]
    if len(numbers) == 1:
        return f"host {numbers[0]}"
    if len(numbers) <= MAX_HOSTS:
        return f"hosts {', '.join(numbers[:-1])} and {numbers[-1]}"
    return f"{len(numbers)} of {count(wanted, 'host')}"
