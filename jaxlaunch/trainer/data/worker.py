"""A worker process that reads examples: `python -m jaxlaunch.trainer.data.worker SOCKET_FD`.

It calls the opener of each source by name, and imports neither jax nor grain. It exits when the
socket closes, which the kernel does when the trainer ends for any reason.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import select
import signal
import socket
import sys
import threading
from typing import NoReturn

import numpy as np

from jaxlaunch.trainer import counts
from jaxlaunch.trainer.data import order, workers
from jaxlaunch.trainer.data.source import DataSource, unreadable_example_error
from jaxlaunch.trainer.data.workers import Item, RandomPolicy, Request
from jaxlaunch.trainer.errors import DataError, TrainerError
from jaxlaunch.trainer.user_code import load_object

# Exceptions that pickle raises for objects that it does not support.
PICKLE_ERRORS = (pickle.PicklingError, TypeError, AttributeError)


def main() -> NoReturn:
    """Answer requests until the trainer exits. The first message is the trainer's sys.path."""
    for signal_number in (signal.SIGINT, signal.SIGTERM):
        # These signals reach the whole process group, and the trainer decides when to stop.
        signal.signal(signal_number, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_exit_on_close, args=(channel,), daemon=True).start()
    sources: dict[str, DataSource] = {}
    try:
        sys.path[:] = workers.receive_message(channel)
        while True:
            request: Request = workers.receive_message(channel)
            answer = read_items(request, sources)
            try:
                workers.send_message(channel, (answer, counts.take_totals()))
            except PICKLE_ERRORS as error:
                items = [] if isinstance(answer, TrainerError) else answer
                indexed_items = zip(request.index_B, items, strict=False)
                indexes = [index for index, item in indexed_items if not _is_picklable(item)]
                description = f"example {indexes[0]}" if indexes else "the error of reading"
                problem = f"{description} cannot be sent to the trainer: {error}"
                message = f"train.data.workers: {problem}; return arrays and numbers"
                workers.send_message(channel, (DataError(message), {}))
    except (EOFError, ConnectionError):
        os._exit(0)


def read_items(request: Request, sources: dict[str, DataSource]) -> list[Item] | TrainerError:
    """Return the requested items, or the error that ends the run; `sources` caches open sources."""
    key = repr((request.opener, request.args))
    try:
        if key not in sources:
            sources[key] = load_object(request.opener)(*request.args)
        return [
            _read_item(sources[key], index, position, request.draws)
            for index, position in zip(request.index_B, request.position_B, strict=True)
        ]
    except TrainerError as error:
        return error


def _read_item(source: DataSource, index: int, position: int, draws: RandomPolicy) -> Item:
    entropy = order.example_entropy(draws.seed, draws.purpose, position)
    rng = np.random.default_rng(entropy) if source.takes_rng else None
    try:
        with order.seed_generators(entropy) if draws.is_seeded else contextlib.nullcontext():
            value = source.read_example(index, rng)
            if not draws.returns_state:
                return Item(value)
            states = order.generator_states() if draws.is_seeded else None
            return Item(value, copy.deepcopy(rng), states)
    except TrainerError:
        raise
    except (Exception, SystemExit) as error:
        raise unreadable_example_error(source, index, error) from error


def _is_picklable(item: Item) -> bool:
    try:
        pickle.dumps(item)
    except PICKLE_ERRORS:
        return False
    return True


def _exit_on_close(channel: socket.socket) -> NoReturn:
    """Exit when the trainer closes its end of `channel`, even while an item is being read."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
