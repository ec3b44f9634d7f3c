"""Work on many items, divided over processes: what it does in Python takes turns among threads."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def divided(act: Callable[[Sequence[T]], list[R]], items: Sequence[T]) -> list[R]:
    """What `act` returns for all items, in their order: it is called with a part of them in this process, and with the
    others in a copy of it for each further core."""
    size = max(1, -(-len(items) // len(os.sched_getaffinity(0))))
    parts = [items[at : at + size] for at in range(0, len(items), size)]
    copies = [_begun(act, part) for part in parts[1:]]
    found = [act(part) for part in parts[:1]]
    found += [_ended(copy) or act(part) for copy, part in zip(copies, parts[1:], strict=True)]
    return [one for of_part in found for one in of_part]


def _begun(act: Callable[[Sequence[T]], list[R]], part: Sequence[T]) -> tuple[int, int]:
    """A copy of this process that works on a part, and the pipe on which it answers."""
    reads, writes = os.pipe()
    if pid := os.fork():
        os.close(writes)
        return pid, reads
    try:  # nothing of this process may end in its copy
        with open(writes, "wb") as pipe:
            pickle.dump(act(part), pipe, pickle.HIGHEST_PROTOCOL)
        os._exit(0)
    finally:
        os._exit(1)


def _ended(copy: tuple[int, int]) -> list[R] | None:
    """What a copy has found; None where it was killed."""
    pid, reads = copy
    with open(reads, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(pid, 0)
    return pickle.loads(answer) if status == 0 else None  # of our own copy
