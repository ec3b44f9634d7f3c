"""Reads the stacks that faulthandler wrote of every rank, groups them, and finds the rank that the others wait for."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping

from jaxlaunch.launcher.agent.gang.progress import Status

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
_WAITS = re.compile(r"/(jax|jaxlib)/")  # a rank whose innermost Python frame is JAX's waits for the device or its peers
MAX_CHARS = 16_000  # of one rank's stacks, in messages and in the summary


@dataclasses.dataclass(frozen=True)
class Frame:
    """One frame of a stack."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.file.rpartition('/')[2]}:{self.line})"


def innermost(text: str) -> list[Frame]:
    """The innermost frame of every thread that has one; the main thread's comes last, as faulthandler writes it."""
    return [frame for _, _, frame in _threads(text)]


def cut(text: str) -> str:
    """The stacks with the innermost frame of every thread alone."""
    return "".join(f"{header}\n{line}\n" for header, line, _ in _threads(text))


def _threads(text: str) -> list[tuple[str, str, Frame]]:
    """The first line of every thread that has a frame, and the line of its innermost frame."""
    found: list[tuple[str, str, Frame]] = []
    header: str | None = None
    for line in text.splitlines():
        if line.endswith("(most recent call first):"):
            header = line
        elif header is not None and (match := _FRAME.match(line)):
            found.append((header, line, Frame(match["file"], int(match["line"]), match["name"])))
            header = None
    return found


def describe(statuses: Mapping[int, Status], stacks: Mapping[int, str]) -> str:
    """Where the ranks are, the largest group first.

    For example "3 ranks in step in _value (array.py:632), rank 7 in data in read (tasks.py:12)".
    """
    groups: dict[str, list[int]] = {}
    for rank in sorted(statuses):
        groups.setdefault(_place(statuses[rank], stacks.get(rank, "")), []).append(rank)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    return ", ".join(f"{_names(ranks)} {place}" for place, ranks in ordered)


def suspect(statuses: Mapping[int, Status], stacks: Mapping[int, str], first: int) -> int:
    """The rank the others most likely wait for; `first` is the one whose timeout passed first.

    In this order: a process that cannot even dump its stacks; one that is not inside JAX while others are; the odd one
    out; the one furthest behind; the one with a thread that no other rank has.
    """
    frames = {rank: innermost(stacks.get(rank, "")) for rank in statuses}
    at = {rank: _place(statuses[rank], stacks.get(rank, "")) for rank in statuses}
    places = Counter(at.values())
    threads = Counter(str(frame) for of_rank in frames.values() for frame in set(of_rank))

    def order(rank: int) -> tuple[bool, bool, int, int, int, bool]:
        own = frames[rank]
        return (
            bool(own),
            bool(own) and bool(_WAITS.search(own[-1].file)),
            places[at[rank]],
            statuses[rank].step or 0,
            -sum(threads[str(frame)] == 1 and not _WAITS.search(frame.file) for frame in own),
            rank != first,
        )

    return min(statuses, key=order)


def _place(status: Status, text: str) -> str:
    frames = innermost(text)
    phase = f"in {status.phase} " if status.phase else ""
    return f"{phase}in {frames[-1]}" if frames else f"{phase}without a stack"


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
