"""Processes that read items for the trainer, started anew where one is killed.

They are spawned, not forked: JAX has threads, of which a fork keeps none. A thread of the reader (trainer/data/reader)
takes a free process, asks it for its part of a batch and waits: so parts are in order, no more are begun than there are
processes, and what a killed process had in hand is asked of the next.
"""

from __future__ import annotations

import functools
import os
import queue
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping

from jaxlaunch import isolated
from jaxlaunch.trainer.data import messages
from jaxlaunch.trainer.data.messages import Item, Request
from jaxlaunch.trainer.errors import DataError, TrainerError

TRIES = 3  # processes that may be killed while they read one example, before the run ends
# A process that reads takes one core, and no accelerator where the user's module imports jax.
ENVIRONMENT: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


class Died(Exception):
    """A process ended in the middle of a request; the text says how: `was killed by SIGKILL`."""


class Workers:
    """`count` processes, each started when it is first needed. Threads may share one."""

    def __init__(self, count: int) -> None:
        self._free: queue.LifoQueue[_Worker] = queue.LifoQueue()
        self._all = [_Worker(number) for number in range(count)]
        for worker in reversed(self._all):
            self._free.put(worker)

    @property
    def pids(self) -> list[int]:
        """The processes that run."""
        return [worker.process.pid for worker in self._all if worker.process is not None]

    def items(self, request: Request) -> list[Item]:
        """What one process answers; where it is killed, the next does.

        Raises what reading raised, and DataError that names the example at which process after process was killed.
        """
        worker = self._free.get()
        try:
            try:
                return worker.ask(request)
            except Died as died:
                _say(worker, request, died)
            # One by one, so that what kills a process is known by its index.
            return [self._one(worker, request, at) for at in range(len(request.index_B))]
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """Ends the processes that are idle, and waits for them."""
        for worker in self._all:
            worker.end()

    @staticmethod
    def _one(worker: _Worker, request: Request, at: int) -> Item:
        """The item at a place of the request, by itself. Raises DataError where it kills process after process."""
        one = request._replace(index_B=[request.index_B[at]], position_B=[request.position_B[at]])
        for tried in range(1, TRIES + 1):
            try:
                return worker.ask(one)[0]
            except Died as died:
                if tried == TRIES:
                    raise DataError(
                        f"train.data.workers: {TRIES} processes in turn that read example {one.index_B[0]} ended: the "
                        f"last {died}. Read it with train.data.workers=0 to see why; SIGKILL is often too little memory"
                    ) from None
                _say(worker, one, died)
        raise AssertionError("the last attempt returns or raises")


class _Worker:
    """One process at a time, and the socket to it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def ask(self, request: Request) -> list[Item]:
        """The answer to `request`, of a new process where none runs. Raises Died, and the TrainerError it answers."""
        try:
            if self._channel is None:
                self._start()
            assert self._channel is not None, "it was just started"
            messages.send(self._channel, request)
            answer = messages.receive(self._channel)
        except (EOFError, ConnectionError):
            raise Died(self.end()) from None
        if isinstance(answer, TrainerError):
            raise answer
        found: list[Item] = answer
        return found

    def end(self) -> str:
        """Closes the socket, at which the process ends, and says how it ended."""
        if self.process is None or self._channel is None:
            return "was never started"
        self._channel.close()
        code = self.process.wait()
        self.process = self._channel = None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                isolated.command("jaxlaunch.trainer.data.worker", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**ENVIRONMENT, **isolated.inherited(os.environ), "JAX_PLATFORMS": "cpu"},
            )
        self._channel = ours
        messages.send(ours, sys.path)


@functools.cache
def shared(count: int) -> Workers:
    """The `count` processes of this one, for training and evaluation alike; they end with it."""
    return Workers(count)


def _say(worker: _Worker, request: Request, died: Died) -> None:
    first, count = request.index_B[0], len(request.index_B)
    what = f"example {first}" if count == 1 else f"{count} examples, the first {first}"
    said = f"train.data.workers: process {worker.number} {died} while it read {what}; another process reads again"
    print(said, file=sys.stderr, flush=True)
