"""A worker process that reads examples: `python -m jaxlaunch.trainer.data.worker FD`, with FD a socket to the trainer.

It opens each source from the name of its opener and imports neither jax nor grain. It exits when the socket closes,
which happens however the trainer ends.
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

from jaxlaunch.trainer.data import order, workers
from jaxlaunch.trainer.data.source import DataSource, unreadable_example
from jaxlaunch.trainer.data.workers import Draws, Item, Request
from jaxlaunch.trainer.errors import DataError, TrainerError
from jaxlaunch.trainer.user_code import load_object

# Exceptions that pickle raises for objects that it does not support.
UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError)


def main() -> NoReturn:
    """Answer requests until the trainer exits; the first message is the trainer's sys.path."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # These signals reach the whole process group; the trainer decides when to end.
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    sources: dict[str, DataSource] = {}
    try:
        sys.path[:] = workers.receive(channel)
        while True:
            request: Request = workers.receive(channel)
            answer = read_items(request, sources)
            try:
                workers.send(channel, answer)
            except UNPICKLABLE as error:
                items = [] if isinstance(answer, TrainerError) else answer
                numbered = zip(request.index_B, items, strict=False)
                index = next((index for index, item in numbered if not _is_picklable(item)), None)
                what = "what reading raised" if index is None else f"example {index}"
                fault = f"train.data.workers: {what} cannot leave its process: {error}; return arrays and numbers"
                workers.send(channel, DataError(fault))
    except (EOFError, ConnectionError):
        os._exit(0)


def read_items(request: Request, sources: dict[str, DataSource]) -> list[Item] | TrainerError:
    """Return the requested items, or the error that ends the run; `sources` caches the open sources."""
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


def _read_item(source: DataSource, index: int, position: int, draws: Draws) -> Item:
    start = order.example_entropy(draws.seed, draws.purpose, position)
    rng = np.random.default_rng(start) if source.takes_rng else None
    try:
        with order.seed_generators(start) if draws.is_seeded else contextlib.nullcontext():
            value = source.read_example(index, rng)
            if not draws.goes_on:
                return Item(value)
            return Item(value, copy.deepcopy(rng), order.generator_states() if draws.is_seeded else None)
    except TrainerError:
        raise
    except (Exception, SystemExit) as error:
        raise unreadable_example(source, index, error) from error


def _is_picklable(item: Item) -> bool:
    try:
        pickle.dumps(item)
    except UNPICKLABLE:
        return False
    return True


def _end_with(channel: socket.socket) -> NoReturn:
    """Exit when the other side of `channel` closes, also while an item is being read."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
