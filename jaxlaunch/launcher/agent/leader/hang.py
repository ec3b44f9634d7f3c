"""Reads the stacks that faulthandler wrote of every rank, groups them, and finds the rank that the others wait for.

Which rank is to blame when the gang makes no progress, by the stacks of all ranks and by what NCCL says.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from jaxlaunch.launcher.agent.gang import nccl
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.gang.root_cause import Event, Kind, failure_of
from jaxlaunch.launcher.agent.leader.rank_statuses import RankStatuses
from jaxlaunch.records.verdict import HangFacts, Numbers, render_timeout

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_STANDARD = re.compile(r"/lib(64)?/python3[^/]*/(?!(site|dist)-packages/)|^<frozen ")  # Python's own files
_IMPORTS = "<frozen importlib"
# A rank waits for the device or its peers where the innermost frame, those of Python's own files apart, is JAX's, but
# for a compilation; and in functions of ours and of Orbax that ask JAX's coordinator, which has no frames.
_JAX = re.compile(r"/(jax|jaxlib)/")
_COMPILES = "backend_compile"
_MEETS = re.compile(r"/jaxhook\.py$|/trainer/start/distributed\.py$|/orbax/.*/(multihost|signaling_client)\.py$")
MAX_CHARS = 16_000  # of one rank's stacks, in messages and in the summary
MOST_PLACES = 8  # that a message tells of: ranks that compute may be at as many as a program has lines


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.file.rpartition('/')[2]}:{self.line})"


class Thread:
    """One thread: the line that begins it, and its frames, the innermost first."""

    def __init__(self, header: str) -> None:
        self.header = header
        self.frames: list[tuple[str, Frame]] = []  # each with its line

    @property
    def _telling(self) -> int:
        """Which is the innermost frame that is not of Python's own files, else the innermost of all."""
        return next((at for at, (_, frame) in enumerate(self.frames) if not _STANDARD.search(frame.file)), 0)

    @property
    def _module(self) -> int:
        """Which is the innermost frame of a module's own code, which runs while it is imported."""
        return next((at for at, (_, frame) in enumerate(self.frames) if frame.name == "<module>"), 0)

    @property
    def cut(self) -> str:
        """The thread with the frames alone that say what it does."""
        kept = sorted({0, self._telling, self._module})
        return "".join(f"{line}\n" for line in (self.header, *(self.frames[at][0] for at in kept)))

    @property
    def imports(self) -> bool:
        """Whether it imports JAX, or the import itself is at work."""
        _, module = self.frames[self._module]
        is_of_jax = module.name == "<module>" and _JAX.search(module.file) is not None
        return is_of_jax or self.frames[0][1].file.startswith(_IMPORTS)

    @property
    def waits(self) -> bool:
        """Whether it waits for the device or for other ranks."""
        _, frame = self.frames[self._telling]
        is_in_jax = _JAX.search(frame.file) is not None and not frame.name.startswith(_COMPILES)
        return self.meets or (is_in_jax and not self.imports)

    @property
    def meets(self) -> bool:
        """Whether it waits for other ranks without their devices."""
        return _MEETS.search(self.frames[self._telling][1].file) is not None

    @property
    def is_idle(self) -> bool:
        """Whether it is in Python's own code, as one that waits for another thread."""
        return _STANDARD.search(self.frames[0][1].file) is not None and not self.imports


def cut(text: str) -> str:
    """The stacks with those frames of every thread alone that `Stacks` looks at."""
    return "".join(thread.cut for thread in _threads(text))


def _wait(threads: Sequence[Thread]) -> bool:
    return bool(threads) and (threads[-1].waits or (threads[-1].is_idle and any(each.meets for each in threads)))


def _threads(text: str) -> list[Thread]:
    """Every thread that has a frame; the main one comes last, as faulthandler writes it."""
    found: list[Thread] = []
    for line in text.splitlines():
        if line.endswith("(most recent call first):"):
            found.append(Thread(line))
        elif found and (frame := _frame(line)) is not None:
            found[-1].frames.append((line, frame))
    return [thread for thread in found if thread.frames]


@functools.lru_cache(maxsize=4096)
def _frame(line: str) -> Frame | None:
    """The frame in a line, which thousands of ranks have alike."""
    match = _FRAME.match(line)
    return None if match is None else Frame(match["file"], int(match["line"]), match["name"])


class Stacks:
    """Where ranks are, by their stacks, each read once: thousands of ranks have megabytes of them."""

    def __init__(self, statuses: Mapping[int, Status], texts: Mapping[int, str]) -> None:
        """The ranks with a status; those without a text wrote no stacks."""
        self._statuses = statuses
        self._threads = {rank: _threads(texts.get(rank, "")) for rank in sorted(statuses)}
        self._places = {rank: _place(statuses[rank], own) for rank, own in self._threads.items()}
        self._waits = {rank: _wait(own) for rank, own in self._threads.items()}

    @property
    def waiting(self) -> list[int]:
        """The ranks that wait for the device or for others: by their main thread, or one that it waits for."""
        return [rank for rank, waits in self._waits.items() if waits]

    def describe(self, suspect: int) -> str:
        """Where the ranks are: the MOST_PLACES largest groups, and that of the suspect.

        For example "3 ranks in step in _value (array.py:632), rank 7 in data in read (tasks.py:12)".
        """
        groups: dict[str, list[int]] = {}
        for rank, place in self._places.items():
            groups.setdefault(place, []).append(rank)
        ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
        said, others = [], []
        for number, (place, ranks) in enumerate(ordered):
            if number < MOST_PLACES or place == self._places[suspect]:
                said.append(f"{_names(ranks)} {place}")
            else:
                others += ranks
        return ", ".join([*said, *([f"{_names(others)} elsewhere"] if others else [])])

    def suspect(self, first: int) -> int:
        """The rank the others most likely wait for; `first` is the one whose timeout passed first.

        In this order: a process that cannot even dump its stacks; one that does not wait for others while others do;
        the odd one out; the one furthest behind; the one with a thread that no other rank has.
        """
        frames = {rank: [thread.frames[0][1] for thread in own] for rank, own in self._threads.items()}
        places = Counter(self._places.values())
        threads = Counter(str(frame) for of_rank in frames.values() for frame in set(of_rank))

        def order(rank: int) -> tuple[bool, bool, int, int, int, bool]:
            own = frames[rank]
            return (
                bool(own),
                self._waits[rank],
                places[self._places[rank]],
                self._statuses[rank].step or 0,
                -sum(threads[str(frame)] == 1 and not _JAX.search(frame.file) for frame in own),
                rank != first,
            )

        return min(frames, key=order)


def _place(status: Status, threads: Sequence[Thread]) -> str:
    phase = f"in {status.phase} " if status.phase else ""
    doing = "importing " if threads and threads[-1].imports else ""
    return f"{phase}{doing}in {threads[-1].frames[0][1]}" if threads else f"{phase}without a stack"


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"


# Every rank's stacks arrive within this time or never, and so does NCCL's answer.
STACKS_S = 4.0
# Thousands of ranks have hundreds of megabytes of stacks. Beyond this sum they are cut to what the verdict needs.
MAX_WHOLE_STACKS_CHARS = 4_000_000
MAX_NCCL_CHARS = 40_000


class Hang:
    """Collects stacks and NCCL's answers, and finds the rank that the others wait for."""

    def __init__(self, statuses: RankStatuses, platform: str) -> None:
        self._statuses = statuses
        self.stacks: dict[int, str] = {}
        self._stacks_chars = 0
        self.nccl = ""
        self._hosts_without_nccl = {host for host in statuses.ranks_by_host if nccl.asks_nccl(platform, host)}
        self._overdue: tuple[float, Event] | None = None
        self.is_requested = False
        self._blamed: Event | None = None
        # Ranks whose stacks are awaited, from the end of which those that arrived are dropped: after a timeout, and
        # since a failure that may come from a rank that stands still.
        self._awaited: list[int] | None = None
        self._doubt: tuple[float, list[int]] | None = None

    @property
    def wants_stacks(self) -> bool:
        """Whether a rank exceeded a timeout, or failed as ranks do whose peer stands still."""
        return self._overdue is not None or bool(self._doubt and self._doubt[1])

    @property
    def overdue(self) -> str | None:
        """The message about the timeout that was exceeded."""
        hang = None if self._overdue is None else self._overdue[1].hang
        return None if hang is None else render_timeout(hang)

    def add_timeout(self, event: Event, now: float) -> None:
        """Record the first timeout of the attempt."""
        self._overdue = self._overdue or (now, event)

    def add_stacks(self, rank: int, text: str) -> None:
        """Record the stacks of a rank, cut if there are many already."""
        is_cut = self._stacks_chars + len(text) > MAX_WHOLE_STACKS_CHARS
        self.stacks[rank] = cut(text) if is_cut else text
        self._stacks_chars += len(self.stacks[rank])

    def add_nccl(self, host: int, text: str) -> None:
        """Record NCCL's answer on a host, and keep the longest: each is about all processes, but one may be cut."""
        self._hosts_without_nccl.discard(host)
        self.nccl = max(self.nccl, text[:MAX_NCCL_CHARS], key=len)

    def find(self, now: float) -> Event | None:
        """Return the hang, once every stack and NCCL's answer arrived or can no longer be expected."""
        if self._overdue is None:
            return None
        if self._awaited is None:
            self._awaited = list(range(len(self._statuses.by_rank)))
        is_complete = self._have_stacks(self._awaited) and not self._hosts_without_nccl
        if self._blamed is None and (now - self._overdue[0] >= STACKS_S or is_complete):
            self._blamed = self._blame(self._overdue[1])
        return self._blamed

    def awaits_stacks(self, now: float) -> bool:
        """Return whether stacks are awaited that would show which living rank does not run at all."""
        if self._doubt is None:
            ranks = [rank for rank, status in enumerate(self._statuses.by_rank) if _writes_stacks(status)]
            self._doubt = now, ranks
        return now - self._doubt[0] < STACKS_S and not self._have_stacks(self._doubt[1])

    def find_stalled_rank(self, echo: Event) -> Event | None:
        """Return the hang of a living rank that does not even handle a signal, while its peers failed as in `echo`."""
        stalled = {
            rank: status
            for rank, status in enumerate(self._statuses.by_rank)
            if self.stacks.get(rank) == "" and _writes_stacks(status) and rank != echo.rank
        }
        if not stalled:
            return None
        rank = Stacks(stalled, self.stacks).suspect(min(stalled))
        host = self._statuses.host_of(rank)
        return Event(Kind.HANG, host, rank, stalled[rank], hang=HangFacts(), peers=failure_of(echo))

    def _have_stacks(self, awaited: list[int]) -> bool:
        statuses = self._statuses.by_rank
        while awaited and (awaited[-1] in self.stacks or statuses[awaited[-1]].exit is not None):
            awaited.pop()
        return not awaited

    def _blame(self, event: Event) -> Event:
        """Return the timeout `event` with the rank that the others wait for."""
        living: Mapping[int, Status] = self._statuses.living() or {event.rank: event.status}
        analysis = Stacks(living, self.stacks)
        culprit = analysis.suspect(event.rank if event.rank in living else min(living))
        waiting, status = analysis.waiting, living[culprit]
        facts = dataclasses.replace(event.hang or HangFacts(), stacks=analysis.describe(culprit))
        if waiting and culprit not in waiting:
            late = sorted(living.keys() - waiting)
            facts = dataclasses.replace(facts, waiting=Numbers.of(waiting), late=Numbers.of(late))
        if self.nccl and (faults := nccl.describe(self.nccl)):
            facts = dataclasses.replace(facts, nccl=faults)
        host = self._statuses.host_of(culprit)
        return dataclasses.replace(event, rank=culprit, host=host, status=status, hang=facts)


def _writes_stacks(status: Status) -> bool:
    """Return whether the process has our hook and lives, so that it writes its stacks if it runs at all."""
    return status.jax is not None and status.exit is None and not status.left
