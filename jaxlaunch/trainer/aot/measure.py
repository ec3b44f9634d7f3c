"""Times what the devices that are here do: a train step, and the products and passes over memory that it is made of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlaunch.trainer.aot.step_time import Rates
from jaxlaunch.trainer.step.train_state import Batch
from jaxlaunch.trainer.step.train_step import Step

_FIRST = 2  # steps that are not counted
_LEAST = 5  # steps that are
_SECONDS = 2.0  # that a measurement takes, or longer where _LEAST steps do
_SIDE = 512  # of the matrices of a product
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
    """What each of the devices reaches while all of them work: FLOP/s of products in `dtype`, bytes a second that a
    pass over float32 reads and writes, and the seconds that an operation and a collective take of almost nothing.
    Devices that share cores, as those of a CPU do, share what they reach.
    """
    mesh, split = Mesh(np.array(devices), ("devices",)), PartitionSpec("devices")

    def seconds(body: Callable[[Array], Array], turns: int, *shape: int, of: Any = np.float32) -> float:
        """Of one of the turns of `body`, which gets an array of this shape and dtype on each device."""
        loop: Any = partial(jax.lax.fori_loop, 0, turns, lambda _, found: body(found))
        run = jax.jit(jax.shard_map(loop, mesh=mesh, in_specs=split, out_specs=split))
        array = np.zeros((len(devices) * shape[0], *shape[1:]), of)
        return _median(partial(run, jax.device_put(array, NamedSharding(mesh, split))), _SECONDS / 4) / turns

    to_next = [(at, (at + 1) % len(devices)) for at in range(len(devices))]
    return Rates(
        flops=2 * _SIDE**3 / seconds(lambda found: found @ found, 8, _SIDE, _SIDE, of=dtype),
        memory=2 * _ARRAY * 4 / seconds(_pass, 2, _ARRAY),
        start=seconds(_pass, 256, 1),
        meeting=seconds(lambda found: jax.lax.ppermute(found, "devices", to_next), 32, 1),
    )


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
