"""Times a train step on the devices that are here."""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np

from jaxlaunch.trainer.step.train_step import Batch, Step

_FIRST = 2  # steps that are not counted
_LEAST = 5  # steps that are
_SECONDS = 2.0  # that a measurement takes, or longer where _LEAST steps do


def seconds(step: Step, batch: Batch) -> float:
    """The median time of a train step on rows of zeros; `step` is compiled for batches like this one."""
    state = step.init()
    rows = step.put({name: _rows(name, each) for name, each in batch.items()})
    taken: list[float] = []
    began = time.monotonic()
    while len(taken) < _FIRST + _LEAST or time.monotonic() - began < _SECONDS:
        started = time.perf_counter()
        state, metrics = step.train(state, rows)
        jax.block_until_ready((state, metrics))
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[_FIRST:])


def _rows(name: str, each: jax.ShapeDtypeStruct) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Weights of one, since a step without weight changes nothing; everything else is zero."""
    return np.ones(each.shape, each.dtype) if name == "weight" else np.zeros(each.shape, each.dtype)
