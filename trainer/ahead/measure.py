"""Times what the devices that are here do: a train step, and the products and passes over memory that it is made of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlaunch.trainer.ahead.timeline import Rates
from jaxlaunch.trainer.step.train_step import Batch, Step

_FIRST = 2  # steps that are not counted
_LEAST = 5  # steps that are
_SECONDS = 2.0  # that a measurement takes, or longer where _LEAST steps do
_SIDE = 512  # of the matrices of a product
_PRODUCTS = 8  # one after the other, so that starting the program takes a small share
_ARRAY = 2**21  # elements of a pass, more than a core's own caches hold


def seconds(step: Step, batch: Batch) -> float:
    """The median time of a train step on rows of zeros; `step` is compiled for batches like this one."""
    rows = step.put({name: _rows(name, each) for name, each in batch.items()})
    state = step.init()

    def run() -> Any:
        nonlocal state
        state, metrics = step.train(state, rows)
        return state, metrics

    return _median(run, _SECONDS)


def rates(devices: Sequence[jax.Device], dtype: jnp.dtype) -> Rates:
    """What each of the devices reaches while all of them work: FLOP/s of products in `dtype`, and bytes a second that a
    pass over an array of it reads and writes. Devices that share cores, as those of a CPU do, share what they reach.
    """
    every = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec("devices"))
    matrices = jax.device_put(np.zeros((len(devices), _SIDE, _SIDE), dtype), every)
    array = jax.device_put(np.zeros((len(devices), _ARRAY), dtype), every)
    products, passes = jax.jit(_products), jax.jit(_pass)
    of_products = _median(lambda: products(matrices), _SECONDS / 4)
    of_passes = _median(lambda: passes(array), _SECONDS / 4)
    return Rates(_PRODUCTS * 2 * _SIDE**3 / of_products, 2 * array.nbytes / len(devices) / of_passes)


def _products(matrices: Array) -> Array:
    """One matrix product of a device after the other."""
    found: Array = jax.lax.fori_loop(0, _PRODUCTS, lambda _, found: found @ matrices, matrices)
    return found


def _pass(array: Array) -> Array:
    """Reads every element and writes as many."""
    return 2 * array + 1


def _median(run: Callable[[], Any], least: float) -> float:
    """The median time of the runs that so many seconds have room for."""
    taken: list[float] = []
    began = time.monotonic()
    while len(taken) < _FIRST + _LEAST or time.monotonic() - began < least:
        started = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[_FIRST:])


def _rows(name: str, each: jax.ShapeDtypeStruct) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Weights of one, since a step without weight changes nothing; everything else is zero."""
    return np.ones(each.shape, each.dtype) if name == "weight" else np.zeros(each.shape, each.dtype)
