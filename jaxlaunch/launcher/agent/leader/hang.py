"""Analysis of a hang: which rank do the others wait for?

Once a rank exceeds a timeout, every host sends the stacks of its ranks, which faulthandler writes,
and NCCL's answer. `RankStacks` classifies the main thread of each rank by its innermost frame
outside of the standard library. A rank that waits inside JAX or Orbax depends on others, so the
suspect is a rank that does not wait, or else the odd one out or the one furthest behind. `Hang`
collects stacks and answers, and returns the result once all have arrived or the time is over.
`EarlyLook` does the same for a step that is overdue, before its timeout expires.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxlaunch.launcher.agent.gang import nccl
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.gang.root_cause import Event, EventKind, failure_for_event
from jaxlaunch.launcher.agent.leader.rank_statuses import RankStatuses
from jaxlaunch.records.rank_history import MAX_RANKS
from jaxlaunch.records.verdict import HangFacts, Numbers, render_timeout

_FRAME_LINE = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_STANDARD_LIBRARY = re.compile(r"/lib(64)?/python3[^/]*/(?!(site|dist)-packages/)|^<frozen ")
_IMPORT_SYSTEM = "<frozen importlib"
# A rank waits for the device or its peers if its innermost frame outside of the standard library is
# in JAX, unless JAX compiles. It also waits in these functions of jaxlaunch and Orbax, which call
# JAX's coordination service: its C++ code has no frames.
_JAX_FILE = re.compile(r"/(jax|jaxlib)/")
_COMPILE_FUNCTION = "backend_compile"
_COORDINATION_FILE = re.compile(
    r"/jaxhook\.py$|/trainer/start/distributed\.py$|/orbax/.*/(multihost|signaling_client)\.py$"
)
# Number of places that a message names. Running ranks may be at very many different lines.
MAX_PLACES = 8


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.file.rpartition('/')[2]}:{self.line})"


class ThreadStack:
    """Stack of one thread.

    Attributes:
        header: First line of the thread in the text of faulthandler.
        frames: Pairs of the line of a frame and the parsed frame, the innermost first.
    """

    def __init__(self, header: str) -> None:
        self.header = header
        self.frames: list[tuple[str, Frame]] = []

    @property
    def _user_frame_index(self) -> int:
        """Index of the innermost frame outside of the standard library, else 0."""
        for index, (_, frame) in enumerate(self.frames):
            if not _STANDARD_LIBRARY.search(frame.file):
                return index
        return 0

    @property
    def _module_frame_index(self) -> int:
        """Index of the innermost frame of module-level code, such as an import runs, else 0."""
        names = [frame.name for _, frame in self.frames]
        return names.index("<module>") if "<module>" in names else 0

    @property
    def short_text(self) -> str:
        """Text of the thread with only the frames that its properties use."""
        shown_indices = sorted({0, self._user_frame_index, self._module_frame_index})
        lines = [self.header, *(self.frames[index][0] for index in shown_indices)]
        return "\n".join([*lines, ""])

    @property
    def is_importing(self) -> bool:
        """Return whether the thread imports JAX, or is in the import system itself."""
        _, module = self.frames[self._module_frame_index]
        is_jax_module = module.name == "<module>" and _JAX_FILE.search(module.file) is not None
        return is_jax_module or self.frames[0][1].file.startswith(_IMPORT_SYSTEM)

    @property
    def is_waiting(self) -> bool:
        """Return whether the thread waits for the device or for other ranks."""
        _, frame = self.frames[self._user_frame_index]
        is_compiling = frame.name.startswith(_COMPILE_FUNCTION)
        is_in_jax = _JAX_FILE.search(frame.file) is not None and not is_compiling
        return self.is_coordinating or (is_in_jax and not self.is_importing)

    @property
    def is_coordinating(self) -> bool:
        """Return whether the thread waits for other ranks in JAX's coordination service."""
        return _COORDINATION_FILE.search(self.frames[self._user_frame_index][1].file) is not None

    @property
    def is_idle(self) -> bool:
        """Return whether the thread waits in the standard library, such as for a lock."""
        is_in_library = _STANDARD_LIBRARY.search(self.frames[0][1].file) is not None
        return is_in_library and not self.is_importing


def shorten_stacks(text: str) -> str:
    """Return the stacks with only the frames that `RankStacks` uses."""
    return "".join(thread.short_text for thread in _parse_threads(text))


def _is_rank_waiting(threads: Sequence[ThreadStack]) -> bool:
    """Return whether a rank waits, in its main thread or in one that the main thread waits for."""
    if not threads:
        return False
    is_coordinating = any(thread.is_coordinating for thread in threads)
    return threads[-1].is_waiting or (threads[-1].is_idle and is_coordinating)


def _parse_threads(text: str) -> list[ThreadStack]:
    """Parse every thread that has a frame. faulthandler writes the main thread last."""
    threads: list[ThreadStack] = []
    for line in text.splitlines():
        if line.endswith("(most recent call first):"):
            threads.append(ThreadStack(line))
        elif threads and (frame := _parse_frame(line)) is not None:
            threads[-1].frames.append((line, frame))
    return [thread for thread in threads if thread.frames]


@functools.lru_cache(maxsize=4096)
def _parse_frame(line: str) -> Frame | None:
    """Parse the line of a frame. Thousands of ranks have equal lines, so it is cached."""
    match = _FRAME_LINE.match(line)
    return None if match is None else Frame(match["file"], int(match["line"]), match["name"])


class RankStacks:
    """Parsed stacks of ranks, and the place of each rank by its stacks."""

    def __init__(self, statuses: Mapping[int, Status], texts: Mapping[int, str]) -> None:
        """Parse the stacks in `texts` of the ranks in `statuses`. A rank may have written none."""
        self._statuses = statuses
        self._threads = {rank: _parse_threads(texts.get(rank, "")) for rank in sorted(statuses)}
        self._places = {
            rank: _describe_place(statuses[rank], threads)
            for rank, threads in self._threads.items()
        }
        self._is_waiting = {
            rank: _is_rank_waiting(threads) for rank, threads in self._threads.items()
        }

    @property
    def waiting_ranks(self) -> list[int]:
        """Ranks that wait for the device or for others."""
        return [rank for rank, waits in self._is_waiting.items() if waits]

    def place_of(self, rank: int) -> str:
        """Return the phase of a rank and the innermost frame of its main thread, as text."""
        return self._places[rank]

    def describe_places(self, suspect: int) -> str:
        """Describe the places of the ranks: the MAX_PLACES largest groups, and that of the suspect.

        An example is "3 ranks in step in _value (array.py:632), rank 7 in data in read
        (tasks.py:12)".
        """
        groups: dict[str, list[int]] = {}
        for rank, place in self._places.items():
            groups.setdefault(place, []).append(rank)
        sorted_groups = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
        descriptions, other_ranks = [], []
        for number, (place, ranks) in enumerate(sorted_groups):
            if number < MAX_PLACES or place == self._places[suspect]:
                descriptions.append(f"{_rank_phrase(ranks)} {place}")
            else:
                other_ranks += ranks
        if other_ranks:
            descriptions.append(f"{_rank_phrase(other_ranks)} elsewhere")
        return ", ".join(descriptions)

    def find_suspect(self, first_overdue_rank: int) -> int:
        """Return the rank that the others most likely wait for.

        The criteria are, in this order: a process that cannot even write its stacks; one that does
        not wait while others do; the odd one out; the one furthest behind; the one with a thread
        that no other rank has; the one whose timeout expired first.
        """
        stacks = self._threads.items()
        frames = {rank: [thread.frames[0][1] for thread in threads] for rank, threads in stacks}
        place_counts = Counter(self._places.values())
        frame_counts = Counter(str(frame) for stack in frames.values() for frame in set(stack))

        def suspicion_key(rank: int) -> tuple[bool, bool, int, int, int, bool]:
            unique_frames = [frame for frame in frames[rank] if frame_counts[str(frame)] == 1]
            return (
                bool(frames[rank]),
                self._is_waiting[rank],
                place_counts[self._places[rank]],
                self._statuses[rank].step or 0,
                -sum(not _JAX_FILE.search(frame.file) for frame in unique_frames),
                rank != first_overdue_rank,
            )

        return min(frames, key=suspicion_key)


def _describe_place(status: Status, threads: Sequence[ThreadStack]) -> str:
    phase = f"in {status.phase} " if status.phase else ""
    if not threads:
        return f"{phase}without a stack"
    activity = "importing " if threads[-1].is_importing else ""
    return f"{phase}{activity}in {threads[-1].frames[0][1]}"


def _rank_phrase(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"


# The stacks of a rank and the answer of NCCL arrive within this time or never.
STACKS_TIMEOUT_S = 4.0
# Thousands of ranks have hundreds of megabytes of stacks. Beyond this total, stacks are shortened
# to the frames that the verdict needs.
MAX_WHOLE_STACKS_CHARS = 4_000_000
MAX_NCCL_CHARS = 40_000
# While a step is overdue, stacks are requested at this interval, up to MAX_LOOKS times in an
# attempt.
MAX_LOOKS, LOOK_INTERVAL_S = 5, 15.0


class Hang:
    """Collects stacks and NCCL's answers, and finds the rank that the others wait for."""

    def __init__(self, statuses: RankStatuses, platform: str) -> None:
        self._statuses = statuses
        self.stacks: dict[int, str] = {}
        self._stacks_chars = 0
        self.nccl = ""
        self._hosts_without_nccl = {
            host for host in statuses.ranks_by_host if nccl.should_query_nccl(platform, host)
        }
        self._first_timeout: tuple[float, Event] | None = None
        self.is_requested = False
        self._culprit_event: Event | None = None
        # Ranks whose stacks are awaited after a timeout. In this list and the next two, the last
        # rank is removed once its stacks have arrived.
        self._awaited_ranks: list[int] | None = None
        # Time of a failure that a stalled rank may have caused, and ranks whose stacks are awaited.
        self._stall_check: tuple[float, list[int]] | None = None
        # Time of a check whether the ranks wait for ended ones, and ranks whose stacks are awaited.
        self._wait_check: tuple[float, list[int]] | None = None

    @property
    def needs_stacks(self) -> bool:
        """Return whether the stacks of the ranks decide what an event means."""
        has_check = any(check and check[1] for check in (self._stall_check, self._wait_check))
        return self._first_timeout is not None or has_check

    @property
    def timeout_message(self) -> str | None:
        """Message about the exceeded timeout, or None if none was exceeded."""
        hang = None if self._first_timeout is None else self._first_timeout[1].hang
        return None if hang is None else render_timeout(hang)

    def add_timeout(self, event: Event, now: float) -> None:
        """Record the first timeout of the attempt."""
        self._first_timeout = self._first_timeout or (now, event)

    def add_stacks(self, rank: int, text: str) -> None:
        """Record the stacks of a rank, shortened if the total is too large."""
        is_cut = self._stacks_chars + len(text) > MAX_WHOLE_STACKS_CHARS
        self.stacks[rank] = shorten_stacks(text) if is_cut else text
        self._stacks_chars += len(self.stacks[rank])

    def add_nccl(self, host: int, text: str) -> None:
        """Record NCCL's answer on a host. Only the longest answer is kept."""
        self._hosts_without_nccl.discard(host)
        self.nccl = max(self.nccl, text[:MAX_NCCL_CHARS], key=len)

    def find_hang(self, now: float) -> Event | None:
        """Return the hang, once all stacks and answers of NCCL have arrived or the time is over."""
        if self._first_timeout is None:
            return None
        if self._awaited_ranks is None:
            self._awaited_ranks = list(range(len(self._statuses.by_rank)))
        is_complete = self._have_stacks(self._awaited_ranks) and not self._hosts_without_nccl
        is_over = is_complete or now - self._first_timeout[0] >= STACKS_TIMEOUT_S
        if self._culprit_event is None and is_over:
            self._culprit_event = self._find_culprit(self._first_timeout[1])
        return self._culprit_event

    def awaits_stacks(self, now: float) -> bool:
        """Return whether stacks that may still arrive can show which living rank is stalled."""
        if self._stall_check is None:
            statuses = enumerate(self._statuses.by_rank)
            self._stall_check = now, [rank for rank, status in statuses if _writes_stacks(status)]
        since, ranks = self._stall_check
        return now - since < STACKS_TIMEOUT_S and not self._have_stacks(ranks)

    def find_stalled_rank(self, echo: Event) -> Event | None:
        """Return the hang of a rank that handles no signal, which explains the failure `echo`."""
        stalled = {
            rank: status
            for rank, status in enumerate(self._statuses.by_rank)
            if self.stacks.get(rank) == "" and _writes_stacks(status) and rank != echo.rank
        }
        if not stalled:
            return None
        rank = RankStacks(stalled, self.stacks).find_suspect(min(stalled))
        host, peers = self._statuses.find_host(rank), failure_for_event(echo)
        return Event(EventKind.HANG, host, rank, stalled[rank], hang=HangFacts(), peers=peers)

    def are_all_waiting(self, now: float) -> bool | None:
        """Return whether all running ranks wait for others, or None if this is not known yet.

        The first call requests new stacks. Once it has answered, the next call begins again.
        """
        statuses = self._statuses.running_statuses()
        if self._wait_check is None:
            self._wait_check, self.is_requested = (now, list(statuses)), False
            self.stacks.clear()
        since, ranks = self._wait_check
        if not self._have_stacks(ranks) and now - since < STACKS_TIMEOUT_S:
            return None
        self._wait_check = None
        return len(RankStacks(statuses, self.stacks).waiting_ranks) == len(statuses)

    def _have_stacks(self, awaited_ranks: list[int]) -> bool:
        statuses = self._statuses.by_rank
        while awaited_ranks and (
            awaited_ranks[-1] in self.stacks or statuses[awaited_ranks[-1]].is_ending
        ):
            awaited_ranks.pop()
        return not awaited_ranks

    def _find_culprit(self, event: Event) -> Event:
        """Return the event of the timeout, with the rank that the others wait for as its rank."""
        # A rank that has finished and waits for the others does not delay them.
        living_statuses = self._statuses.running_statuses() or {event.rank: event.status}
        ended_ranks = [
            rank for rank, status in enumerate(self._statuses.by_rank) if status.is_ending
        ]
        analysis = RankStacks(living_statuses, self.stacks)
        culprit = analysis.find_suspect(
            event.rank if event.rank in living_statuses else min(living_statuses)
        )
        waiting_ranks, status = analysis.waiting_ranks, living_statuses[culprit]
        places = analysis.describe_places(culprit)
        ended = Numbers.from_sequence(ended_ranks)
        facts = event.hang or HangFacts()
        place = analysis.place_of(culprit)
        facts = dataclasses.replace(facts, stacks=places, place=place, ended=ended)
        if waiting_ranks and culprit not in waiting_ranks:
            late = Numbers.from_sequence(sorted(living_statuses.keys() - waiting_ranks))
            waiting = Numbers.from_sequence(waiting_ranks)
            facts = dataclasses.replace(facts, waiting=waiting, late=late)
        if self.nccl and (faults := nccl.describe_faults(self.nccl)):
            facts = dataclasses.replace(facts, nccl=faults)
        host = self._statuses.find_host(culprit)
        return dataclasses.replace(event, rank=culprit, host=host, status=status, hang=facts)


class Suspect(NamedTuple):
    """The rank that the others wait for during an overdue step.

    Attributes:
        rank: The rank.
        place: Its phase and its innermost frame.
        since: Monotonic time at which the overdue step began.
        has_waiting: Whether other ranks wait for it.
    """

    rank: int
    place: str
    since: float
    has_waiting: bool


class EarlyLook:
    """Finds the rank that the others wait for while a step is overdue, before a timeout expires.

    All ranks write their stacks when a step becomes overdue. If the stacks do not show for which
    rank the others wait, they are requested again after LOOK_INTERVAL_S.
    """

    def __init__(self, statuses: RankStatuses) -> None:
        self._statuses = statuses
        self._stacks: dict[int, str] = {}
        self._requested_at: float | None = None
        self._look_count = 0
        self.suspect: Suspect | None = None

    def update(self, overdue_since: float | None, now: float) -> bool:
        """Update the suspect. Return whether all ranks should write their stacks now.

        Args:
            overdue_since: Monotonic time at which the overdue step began. None if none is overdue.
            now: Monotonic time.
        """
        if overdue_since is None:
            self.suspect = self._requested_at = None
            return False
        if self.suspect is not None:
            return False
        if self._requested_at is not None:
            living_statuses = self._statuses.running_statuses()
            if (
                living_statuses.keys() <= self._stacks.keys()
                or now - self._requested_at >= STACKS_TIMEOUT_S
            ):
                self.suspect = self._find_suspect(living_statuses, overdue_since)
            if self.suspect is not None or now - self._requested_at < LOOK_INTERVAL_S:
                return False
        if self._look_count >= MAX_LOOKS or len(self._statuses.by_rank) > MAX_RANKS:
            return False
        self._look_count += 1
        self._requested_at = now
        self._stacks.clear()
        return True

    def add_stacks(self, rank: int, text: str) -> None:
        """Record the stacks of a rank."""
        self._stacks[rank] = shorten_stacks(text)

    def _find_suspect(self, living_statuses: Mapping[int, Status], since: float) -> Suspect | None:
        if not living_statuses or not self._stacks:
            return None
        analysis = RankStacks(living_statuses, self._stacks)
        rank, waiting_ranks = analysis.find_suspect(min(living_statuses)), analysis.waiting_ranks
        # If all ranks wait, or none does, the stacks do not show for whom.
        if len(living_statuses) > 1 and (not waiting_ranks or rank in waiting_ranks):
            return None
        return Suspect(rank, analysis.place_of(rank), since, bool(waiting_ranks))


def _writes_stacks(status: Status) -> bool:
    """Return whether a rank is running and can write its stacks."""
    return status.jax is not None and not status.is_ending
