"""A pool of worker processes that read examples for the trainer, and the messages between them.

The processes are spawned and not forked, because JAX has threads, which do not survive a fork. A
thread of the reader (trainer/data/pipeline) takes a free process, requests its part of a batch and
waits for the answer. Parts therefore stay in order, and the number of processes limits the parts in
memory. If a process is killed, a new one repeats its request.

Messages are sent over a pair of sockets. Large arrays follow the pickle (protocol 5) and arrive in
writable memory. Shared memory would save one copy, but a pod has only 64 MiB of it by default, and
a killed process would leak its share.
"""

from __future__ import annotations

import functools
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxlaunch import isolated
from jaxlaunch.trainer import counts
from jaxlaunch.trainer.errors import DataError, TrainerError

# Number of processes that may be killed while they read one example before the run ends.
MAX_TRIES = 3
# A worker uses one core.
ENVIRONMENT: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
# Arrays of at least this size are sent outside the pickle.
LARGE_BYTES = 4096
COUNT_FORMAT = struct.Struct("<Q")


class RandomPolicy(NamedTuple):
    """The seeds of the random numbers of examples (trainer/data/order)."""

    seed: int
    purpose: int
    # Whether the global generators are seeded for each example.
    is_seeded: bool
    # Whether the task continues to draw after the dataset, from the returned states.
    returns_state: bool


class Request(NamedTuple):
    """A request for items of the source that `opener`, a `module:function`, opens with `args`."""

    opener: str
    args: tuple[Any, ...]
    draws: RandomPolicy
    index_B: list[int]
    position_B: list[int]


class Item(NamedTuple):
    """A raw example, and the states of the generators if the task continues to draw from them."""

    value: Mapping[str, Any]
    rng: np.random.Generator | None = None
    state: Any = None


def send_message(channel: socket.socket, message: Any) -> None:
    """Send a message. Raises OSError, and the errors of pickle before anything is sent."""
    large: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= LARGE_BYTES:
            large.append(raw)
        return raw.nbytes < LARGE_BYTES

    parts = [memoryview(pickle.dumps(message, protocol=5, buffer_callback=is_small)), *large]
    header = [len(parts), *(part.nbytes for part in parts)]
    channel.sendall(struct.pack(f"<{len(header)}Q", *header))
    for part in parts:
        channel.sendall(part)


def receive_message(channel: socket.socket) -> Any:
    """Return the next message, with writable arrays. Raises EOFError, OSError."""
    (count,) = COUNT_FORMAT.unpack(_read_bytes(channel, COUNT_FORMAT.size))
    sizes = struct.unpack(f"<{count}Q", _read_bytes(channel, count * COUNT_FORMAT.size))
    body, *large = (_read_bytes(channel, size) for size in sizes)
    return pickle.loads(body, buffers=large)


def _read_bytes(channel: socket.socket, size: int) -> memoryview:
    # np.empty avoids filling the memory first.
    view = np.empty(size, np.uint8).data
    filled = 0
    while filled < size:
        received = channel.recv_into(view[filled:])
        if not received:
            raise EOFError("the other side has closed")
        filled += received
    return view


class WorkerDiedError(Exception):
    """Raised if a process ends during a request. The message is a predicate: `was killed by …`."""


class Workers:
    """A pool of `count` processes, each started on its first request. Threads may share it."""

    def __init__(self, count: int) -> None:
        self._free: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._all = [_Worker(number) for number in range(count)]
        for worker in reversed(self._all):
            self._free.put(worker)

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return [worker.process.pid for worker in self._all if worker.process is not None]

    def read_items(self, request: Request) -> list[Item]:
        """Return the items of a request, and repeat the request if a process is killed.

        Raises the error of reading, or DataError if several processes are killed at one example.
        """
        worker = self._free.get()
        try:
            try:
                return worker.request_items(request)
            except WorkerDiedError as error:
                _report_restart(worker, request, error)
            # Read one by one, so that the example that kills a process can be named.
            return [
                _read_item(worker, request._replace(index_B=[index], position_B=[position]))
                for index, position in zip(request.index_B, request.position_B, strict=True)
            ]
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Stop the idle processes and wait for them."""
        for worker in self._all:
            worker.stop()


class _Worker:
    """A slot of the pool: one process at a time, and the socket to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def request_items(self, request: Request) -> list[Item]:
        """Return the answer to a request, starting a process if none runs.

        Raises WorkerDiedError, and the TrainerError of the answer.
        """
        try:
            if self._channel is None:
                self._channel = self._start_process()
            send_message(self._channel, request)
            answer: list[Item] | TrainerError
            answer, totals = receive_message(self._channel)
        except (EOFError, ConnectionError):
            raise WorkerDiedError(self.stop()) from None
        counts.add_totals(totals)
        if isinstance(answer, TrainerError):
            raise answer
        return answer

    def stop(self) -> str:
        """Close the socket, wait until the process exits, and describe its end as a predicate."""
        if self.process is None or self._channel is None:
            return "was never started"
        self._channel.close()
        code = self.process.wait()
        self.process = self._channel = None
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"left with exit code {code}"

    def _start_process(self) -> socket.socket:
        channel, worker_channel = socket.socketpair()
        # A worker uses no accelerator, even if the user's module imports jax.
        environ = {**ENVIRONMENT, **isolated.inherited_environ(os.environ), "JAX_PLATFORMS": "cpu"}
        with worker_channel:
            self.process = subprocess.Popen(
                isolated.build_command(
                    "jaxlaunch.trainer.data.worker", str(worker_channel.fileno())
                ),
                stdin=subprocess.DEVNULL,
                pass_fds=[worker_channel.fileno()],
                env=environ,
            )
        self._channel = channel
        send_message(channel, sys.path)
        return channel


def _read_item(worker: _Worker, request: Request) -> Item:
    for attempt in range(1, MAX_TRIES + 1):
        try:
            return worker.request_items(request)[0]
        except WorkerDiedError as error:
            if attempt == MAX_TRIES:
                raise DataError(
                    f"train.data.workers: {MAX_TRIES} processes in turn that read example "
                    f"{request.index_B[0]} ended: the last {error}. Read it with "
                    "train.data.workers=0 to see why; SIGKILL is often too little memory"
                ) from None
            _report_restart(worker, request, error)
    raise AssertionError("the last attempt returns or raises")


def _report_restart(worker: _Worker, request: Request, error: WorkerDiedError) -> None:
    first, count = request.index_B[0], len(request.index_B)
    description = f"example {first}" if count == 1 else f"{count} examples, the first {first}"
    event = f"process {worker.number} {error} while it read {description}"
    message = f"train.data.workers: {event}; another process reads again"
    print(message, file=sys.stderr, flush=True)


@functools.cache
def shared_workers(count: int) -> Workers:
    """Return the pool of `count` processes, which training and evaluation share."""
    return Workers(count)
