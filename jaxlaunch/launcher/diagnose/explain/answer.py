"""The form of every answer about a job: the situation, its evidence, and what to do next. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.wording import count

MAX_MESSAGE = 600  # characters of an event, a condition or a log line
MAX_HOSTS = 8
LIVENESS = "Liveness probe failed"  # how the message of an event Unhealthy begins, of the kubelet


@dataclasses.dataclass(frozen=True)
class Answer:
    """`situation` is a key of SITUATIONS in situations.py; `headline` goes on after the job's name.

    `next_move` None: what the situation's row says, if anything.
    """

    situation: str
    headline: str
    evidence: tuple[str, ...] = ()
    next_move: str | None = None


Cause = Callable[[Snapshot], Answer | None]  # None: this is not what holds it up


def first(causes: Iterable[Cause], snapshot: Snapshot) -> Answer | None:
    """The answer of the first cause that applies."""
    return next((answer for cause in causes if (answer := cause(snapshot)) is not None), None)


def one_line(text: str) -> str:
    """A message on one line, cut at MAX_MESSAGE characters."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_MESSAGE else f"{line[:MAX_MESSAGE]}…"


def quoted(event: Obj | None) -> tuple[str, ...]:
    """An event as evidence: its object, reason, count and message."""
    if event is None:
        return ()
    times = f" ({event['count']} times)" if event["count"] > 1 else ""
    return (f"{event['kind']} {event['names'][0]}: {event['reason']}{times}: {one_line(event['message'])}",)


def is_liveness(event: Obj) -> bool:
    """Whether an event says that a liveness probe failed: the kubelet then stops the container."""
    return bool(event["reason"] == "Unhealthy" and event["message"].startswith(LIVENESS))


def are(hosts: Sequence[Host]) -> str:
    """The verb after which(): "is" or "are"."""
    return "is" if len(hosts) == 1 else "are"


def were(hosts: Sequence[Host]) -> str:
    """The verb after which(): "was" or "were"."""
    return "was" if len(hosts) == 1 else "were"


def which(hosts: Sequence[Host], expected: int) -> str:
    """ "host 3", "hosts 2 and 5", "all 4 hosts", "17 of 64 hosts": the hosts, of as many as the job asks for."""
    if len(hosts) == expected:
        return "all " + count(expected, "host") if expected > 1 else "its host" if expected == 1 else "no host"
    numbers = [str(host.number) for host in hosts]
    if len(numbers) == 1:
        return f"host {numbers[0]}"
    if len(numbers) <= MAX_HOSTS:
        return f"hosts {', '.join(numbers[:-1])} and {numbers[-1]}"
    return f"{len(numbers)} of {count(expected, 'host')}"
