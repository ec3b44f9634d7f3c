"""The frozen base of adapters, or the reference of preferences: read from its folder, and known by a digest.

A checkpoint does not hold it, but says which it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch.trainer.adapters import targets
from jaxlaunch.trainer.adapters.kernel import quantized
from jaxlaunch.trainer.errors import CheckpointError
from jaxlaunch.trainer.huggingface import load
from jaxlaunch.trainer.huggingface.tensors import KEY
from jaxlaunch.trainer.spec import Published

Named = dict[str, Any]
Sums = Mapping[str, Any]  # parameter -> two numbers
ADAPTERS, COMPARED = "adapters of", "a model compared with"  # what a checkpoint holds, before the name of the base


def read(model: Published, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[Named, dict[str, Any]]:
    """The frozen parameters `wanted` from the model's folder, by name, and what a checkpoint says of them.

    One parameter after the other, each in its folder's dtype until it is cast or quantized: the digest is the same
    whatever the base is kept in. Raises SpecError as load.each does.
    """
    inputs = {kernel.name: len(kernel.inputs) for kernel in targets.kernels(model)}
    stored = {name: like for name, like in wanted.items() if not name.endswith(targets.SCALE)}
    params, sums = {}, {}
    for name, array in load.each(model, stored, is_cast=False):
        sums[name] = _sums(array)
        if (scale := name + targets.SCALE) in wanted:
            where = wanted[name].sharding, wanted[scale].sharding
            make = jax.jit(partial(quantized, inputs=inputs[name]), out_shardings=where)
            params[name], params[scale] = make(array)
        else:
            params[name] = array.astype(wanted[name].dtype)
        del array  # before the next is read
    return params, {
        "init_from": model.init_from,
        "shapes": {name: list(like.shape) for name, like in stored.items()},
        "digest": _digest(sums),
    }


def check_origin(then: Mapping[str, Any] | None, model: Published, whose: str, holds: str = ADAPTERS) -> None:
    """Raises CheckpointError where of the base of `whose` checkpoint and that of `model` one was read from a folder and
    the other is drawn; `then` is None of a drawn one, `holds` what the checkpoint holds. Reads nothing."""
    if then is not None and model.init_from is None:
        raise CheckpointError(
            f"{whose} holds {holds} the weights of {then['init_from']} with digest {then['digest']}; without {KEY} "
            f"the weights are drawn from train.seed: name the folder that they were trained on as {KEY}"
        )
    if then is None and model.init_from is not None:
        raise CheckpointError(
            f"{whose} holds {holds} weights that were drawn from train.seed, not those of {KEY} = "
            f"{model.init_from}: leave it out, or start a new run from the folder"
        )


def check(then: Mapping[str, Any], now: Mapping[str, Any], whose: str, key: str = KEY, holds: str = ADAPTERS) -> None:
    """Raises CheckpointError where the base that is read now is not the one of `whose` checkpoint; `key` is what names
    its folder."""
    if then["digest"] != now["digest"]:
        raise CheckpointError(
            f"{whose} holds {holds} the weights of {then['init_from']} with digest {then['digest']}; those of "
            f"{now['init_from']} have {now['digest']}: name the folder that they were trained on as {key}"
        )


def found(model: Published, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint's `recorded` base would say of the folder of `model`: the whole is read once, an array at a
    time, by this process alone."""
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    wanted = {
        name: jax.ShapeDtypeStruct(tuple(shape), jnp.float32, sharding=here)
        for name, shape in recorded["shapes"].items()
    }
    sums = {}
    for name, array in load.each(model, wanted, is_cast=False):
        sums[name] = _sums(array)
        del array  # before the next is read
    return {**recorded, "init_from": model.init_from, "digest": _digest(sums)}


def _digest(sums: Sums) -> str:
    """One number for all parameters, whatever mesh they lie on."""
    text = json.dumps({name: [int(each) for each in np.asarray(pair)] for name, pair in sums.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _sums(array: Array) -> Array:
    """Two sums, modulo 2^32, over every number's bits mixed with its place: each device adds up its own part."""
    everywhere = None
    if isinstance(array.sharding, NamedSharding):
        everywhere = NamedSharding(array.sharding.mesh, PartitionSpec())
    summed: Array = jax.jit(_summed, out_shardings=everywhere)(array)
    return summed


def _summed(array: Array) -> Array:
    bits = jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)
    place = jnp.zeros(array.shape, jnp.uint32)
    for axis, size in enumerate(array.shape):
        place = place * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
    mixed = _mixed(bits ^ _mixed(place))
    return jnp.stack([mixed.sum(dtype=jnp.uint32), _mixed(mixed ^ jnp.uint32(0x9E3779B9)).sum(dtype=jnp.uint32)])


def _mixed(bits: Array) -> Array:
    """Every bit spread over all 32: the last steps of MurmurHash3, Appleby 2011."""
    bits = (bits ^ (bits >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    last: Array = bits ^ (bits >> jnp.uint32(16))
    return last
