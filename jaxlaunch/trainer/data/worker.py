"""A process that reads items: `python -m jaxlaunch.trainer.data.worker FD`, FD a socket to the trainer.

It opens each source by itself, from its name, imports neither jax nor grain, and ends when the trainer does, however
that ended: the socket closes then.
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

from jaxlaunch.trainer.data import example_rng, messages
from jaxlaunch.trainer.data.examples import unreadable
from jaxlaunch.trainer.data.messages import Draws, Item, Request
from jaxlaunch.trainer.data.source import DataSource
from jaxlaunch.trainer.errors import DataError, TrainerError
from jaxlaunch.trainer.user_code import load

Sources = dict[str, DataSource]
UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError)  # what pickle raises of what it cannot take


def main() -> NoReturn:
    """Answers requests until the trainer is gone; the first message is the trainer's sys.path."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the trainer decides when to end
        signal.signal(number, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(channel,), daemon=True).start()
    sources: Sources = {}
    try:
        sys.path[:] = messages.receive(channel)
        while True:
            request: Request = messages.receive(channel)
            _reply(channel, request, answer(request, sources))
    except (EOFError, ConnectionError):
        os._exit(0)


def answer(request: Request, sources: Sources) -> list[Item] | TrainerError:
    """The items asked for, or the error that ends the run; `sources` keeps what has been opened."""
    key = repr((request.opener, request.args))
    try:
        if key not in sources:
            sources[key] = load(request.opener)(*request.args)
        source = sources[key]
        return [
            _item(source, index, position, request.draws)
            for index, position in zip(request.index_B, request.position_B, strict=True)
        ]
    except TrainerError as error:
        return error


def _item(source: DataSource, index: int, position: int, how: Draws) -> Item:
    """One item, its random numbers those of its position."""
    start = example_rng.entropy(how.seed, how.purpose, position)
    rng = np.random.default_rng(start) if source.takes_rng else None
    try:
        with example_rng.seeded(start) if how.is_seeded else contextlib.nullcontext():
            value = source.read_example(index, rng)
            if not how.goes_on:
                return Item(value)
            return Item(value, copy.deepcopy(rng), example_rng.state() if how.is_seeded else None)
    except TrainerError:
        raise
    except (Exception, SystemExit) as error:
        raise unreadable(source, index, error) from error


def _reply(channel: socket.socket, request: Request, found: list[Item] | TrainerError) -> None:
    """Sends what was found; where that cannot be pickled, which item and why."""
    try:
        messages.send(channel, found)
    except UNPICKLABLE as error:
        items = [] if isinstance(found, TrainerError) else found
        odd = [index for index, item in zip(request.index_B, items, strict=False) if not _is_picklable(item)]
        what = f"example {odd[0]}" if odd else "what reading raised"
        hint = "return arrays and numbers"
        messages.send(channel, DataError(f"train.data.workers: {what} cannot leave its process: {error}; {hint}"))


def _is_picklable(item: Item) -> bool:
    try:
        pickle.dumps(item)
    except UNPICKLABLE:
        return False
    return True


def _end_with(channel: socket.socket) -> NoReturn:
    """Ends this process when the other side of `channel` closes, also while an item is being read."""
    poll = select.poll()
    poll.register(channel, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
