"""What the trainer and the processes that read its data say to each other, over a pair of sockets.

Arrays go beside the pickle (protocol 5) and arrive in memory of their own, which may be written to. Shared memory would
save one copy of them, but what holds it in a pod is 64 MiB unless the job says otherwise, and a process that is killed
leaves its part there.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

BESIDE = 4096  # bytes of an array from which on it is sent by itself
COUNT = struct.Struct("<Q")


class Draws(NamedTuple):
    """How the examples of a set take their random numbers (trainer/data/example_rng)."""

    seed: int
    purpose: int
    is_seeded: bool  # the global generators are seeded for each
    goes_on: bool  # the task draws behind the dataset: the generators' states are wanted after each


class Request(NamedTuple):
    """Items of the source that `opener`, a `module:function`, makes of `args`: at these indexes and positions."""

    opener: str
    args: tuple[Any, ...]
    draws: Draws
    index_B: list[int]
    position_B: list[int]


class Item(NamedTuple):
    """What a source has under an index, and where the generators were left, if the task is to draw on from there."""

    value: Mapping[str, Any]
    rng: np.random.Generator | None = None
    state: Any = None


def send(channel: socket.socket, message: Any) -> None:
    """Sends `message` whole. Raises what pickle does, before anything is sent, and OSError where no one listens."""
    beside: list[memoryview] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=_large_into(beside))
    sizes = [len(body), *(part.nbytes for part in beside)]
    channel.sendall(COUNT.pack(len(sizes)) + struct.pack(f"<{len(sizes)}Q", *sizes))
    channel.sendall(body)
    for part in beside:
        channel.sendall(part)


def receive(channel: socket.socket) -> Any:
    """The next message, its arrays writable. Raises EOFError when the other side is gone, OSError likewise."""
    (count,) = COUNT.unpack(_read(channel, COUNT.size))
    sizes = struct.unpack(f"<{count}Q", _read(channel, count * COUNT.size))
    body, *beside = (_read(channel, size) for size in sizes)
    return pickle.loads(body, buffers=beside)


def _large_into(beside: list[memoryview]) -> Callable[[pickle.PickleBuffer], bool]:
    """A `buffer_callback` of pickle that keeps each large buffer in `beside`."""

    def stays(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= BESIDE:
            beside.append(raw)
        return raw.nbytes < BESIDE

    return stays


def _read(channel: socket.socket, size: int) -> memoryview:
    """The next `size` bytes, in memory that was not filled before."""
    view = np.empty(size, np.uint8).data
    done = 0
    while done < size:
        got = channel.recv_into(view[done:])
        if not got:
            raise EOFError("the other side has closed")
        done += got
    return view
