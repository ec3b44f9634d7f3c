"""A state small enough to save a hundred times, each step's different from every other's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

LENGTH = 512


def mesh() -> Mesh:
    """All devices, on one axis."""
    return Mesh(np.asarray(jax.devices()), ("fsdp",))


def values(step: int) -> dict[str, Any]:
    """What step `step` holds, on the host."""
    weights = np.arange(LENGTH, dtype=np.float32) * (step + 1)
    return {
        "params": {"dense": {"kernel": weights.reshape(8, -1), "bias": weights[:8] - 1}},
        "opt": {"count": np.asarray(step, np.int32), "empty": {}},
        "step": np.asarray(step, np.int32),
    }


def abstract(mesh: Mesh, width: int = LENGTH // 8) -> dict[str, Any]:
    """Return the abstract state: kernel and bias split over all devices, the rest replicated."""
    split, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("fsdp",), ()))
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    return {
        "params": {
            "dense": {
                "kernel": jax.ShapeDtypeStruct((8, width), jnp.float32, sharding=split),
                "bias": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=split),
            }
        },
        "opt": {"count": count, "empty": {}},
        "step": count,
    }


def state(step: int, mesh: Mesh) -> dict[str, Any]:
    """What step `step` holds, on the devices of all processes."""

    def place(value: np.ndarray[Any, Any], like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.make_array_from_callback(value.shape, like.sharding, lambda index: value[index])

    return jax.tree.map(place, values(step), abstract(mesh))  # type: ignore[no-any-return]


def same(tree: dict[str, Any], step: int) -> bool:
    """Whether the parts of `tree` that this process holds are those of step `step`, to the bit."""

    def equal(array: jax.Array, value: np.ndarray[Any, Any]) -> bool:
        return all(
            np.array_equal(shard.data, value[shard.index]) for shard in array.addressable_shards
        )

    return bool(jax.tree.all(jax.tree.map(equal, tree, values(step))))
