"""The frozen base of adapters, or the reference of preferences, which is read from its folder.

A checkpoint does not hold the frozen weights, only their digest, so that a resumed run can check
that it reads the same ones. For an export, adapters are merged into the base one tensor at a time:
kernel + scaling × A · B.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.adapters.lora import REFERENCE_PREFIX, dequantize_kernel, quantize_kernel
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import CheckpointError, SpecError
from jaxlaunch.trainer.huggingface import load
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.huggingface.save import Parameter
from jaxlaunch.trainer.huggingface.tensor_files import DEFAULT_KEY, TensorFiles
from jaxlaunch.trainer.spec import Lora, PublishedModel

Shapes = Mapping[str, jax.ShapeDtypeStruct]
# What a checkpoint holds, followed by the name of the base in messages.
ADAPTERS_OF, REFERENCE_OF = "adapters of", "a model compared with"


def read_base(
    model: PublishedModel, abstract_params: Shapes
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the frozen parameters from the model's folder, and their record in a checkpoint.

    Parameters are read one at a time in the folder's dtype, and cast or quantized afterwards. The
    digest therefore does not depend on the dtype in which the base is kept. Raises SpecError as
    load.iterate_parameters does.
    """
    inputs = _input_counts(model)
    scales = {name for name in abstract_params if name.endswith(peft.SCALE_SUFFIX)}
    stored = {name: target for name, target in abstract_params.items() if name not in scales}
    params: dict[str, Any] = {}

    def store_parameter(name: str, array: Array) -> None:
        if (scale := name + peft.SCALE_SUFFIX) in scales:
            shardings = abstract_params[name].sharding, abstract_params[scale].sharding
            quantize = partial(quantize_kernel, inputs=inputs[name])
            params[name], params[scale] = jax.jit(quantize, out_shardings=shardings)(array)
        else:
            params[name] = array.astype(abstract_params[name].dtype)

    digest = _compute_digest(model, stored, store_parameter)
    shapes = {name: list(target.shape) for name, target in stored.items()}
    return params, {"init_from": model.init_from, "shapes": shapes, "digest": digest}


def record_base(model: PublishedModel, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of the base in the folder of `model`, which is read completely."""
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract_params = {
        name: jax.ShapeDtypeStruct(tuple(shape), jnp.float32, sharding=device)
        for name, shape in recorded["shapes"].items()
    }
    digest = _compute_digest(model, abstract_params, lambda name, array: None)
    return {**recorded, "init_from": model.init_from, "digest": digest}


def check_origin(
    recorded: Mapping[str, Any] | None, model: PublishedModel, owner: str, holds: str = ADAPTERS_OF
) -> None:
    """Raise CheckpointError if only one of the two bases, saved and current, is from a folder.

    Reads no files. The checkpoint `owner` holds `holds`, for messages; without a record, the
    weights of its base were drawn from the seed.
    """
    if recorded is not None and model.init_from is None:
        raise CheckpointError(
            f"{owner} holds {holds} {_describe_base(recorded)}; without {DEFAULT_KEY} the weights "
            "are drawn from train.seed: name the folder that they were trained on as "
            f"{DEFAULT_KEY}"
        )
    if recorded is None and model.init_from is not None:
        raise CheckpointError(
            f"{owner} holds {holds} weights that were drawn from train.seed, not those of "
            f"{DEFAULT_KEY} = {model.init_from}: leave it out, or start a new run from the folder"
        )


def _describe_base(recorded: Mapping[str, Any]) -> str:
    return f"the weights of {recorded['init_from']} with digest {recorded['digest']}"


def _input_counts(model: PublishedModel) -> dict[str, int]:
    """Return the number of input axes of each kernel."""
    return {kernel.name: len(kernel.inputs) for kernel in peft.find_kernels(model)}


def check_digest(
    recorded: Mapping[str, Any],
    current: Mapping[str, Any],
    owner: str,
    key: str = DEFAULT_KEY,
    holds: str = ADAPTERS_OF,
) -> None:
    """Raise CheckpointError if the base differs from the saved one; `key` names its folder."""
    if recorded["digest"] != current["digest"]:
        raise CheckpointError(
            f"{owner} holds {holds} {_describe_base(recorded)}; those of {current['init_from']} "
            f"have {current['digest']}: name the folder that they were trained on as {key}"
        )


def _compute_digest(model: PublishedModel, abstract_params: Shapes, on_parameter: Any) -> str:
    """Call `on_parameter` with each parameter and return a digest, the same on every mesh."""
    sums = {}
    for name, array in load.iterate_parameters(model, abstract_params, is_cast=False):
        # Each device sums its own part.
        replicated = None
        if isinstance(array.sharding, NamedSharding):
            replicated = NamedSharding(array.sharding.mesh, PartitionSpec())
        sums[name] = jax.jit(_sum_bits, out_shardings=replicated)(array)
        on_parameter(name, array)
        # The array must be freed before the next one is read.
        del array
    numbers = {name: np.asarray(pair).tolist() for name, pair in sums.items()}
    return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:32]


def _sum_bits(array: Array) -> Array:
    """Return two sums, modulo 2^32, over the bits of every number mixed with its position."""
    bits = jax.lax.bitcast_convert_type(array.astype(jnp.float32), jnp.uint32)
    position = jnp.zeros(array.shape, jnp.uint32)
    for axis, size in enumerate(array.shape):
        index = jax.lax.broadcasted_iota(jnp.uint32, array.shape, axis)
        position = position * jnp.uint32(size % 2**32) + index
    mixed = _mix_bits(bits ^ _mix_bits(position))
    mixes = mixed, _mix_bits(mixed ^ jnp.uint32(0x9E3779B9))
    return jnp.stack([mix.sum(dtype=jnp.uint32) for mix in mixes])


def _mix_bits(bits: Array) -> Array:
    """Mix every bit into all 32 bits, with the finalizer of MurmurHash3 (Appleby 2011)."""
    bits = (bits ^ (bits >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    bits = (bits ^ (bits >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    mixed: Array = bits ^ (bits >> jnp.uint32(16))
    return mixed


# --- merged adapters ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MergedParameter:
    """A parameter of the base merged with its adapter, in the folder's dtype, read when sliced."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    leaf: Leaf
    files: TensorFiles
    scaling: float
    a: Parameter | None  # [layers, inputs ..., rank]
    b: Parameter | None  # [layers, rank, outputs ...]

    def __getitem__(self, key: Any) -> np.ndarray[Any, Any]:
        """Read one layer of a stacked parameter, (int, slice, ...), or all of another one."""
        indices = key if isinstance(key, tuple) else (key,)
        spans = tuple(
            slice(index, index + 1) if isinstance(index, int) else slice(*index.indices(size)[:2])
            for index, size in zip(indices, self.shape, strict=True)
        )
        target = jax.ShapeDtypeStruct(self.shape, self.dtype)
        part = load.read_part(self.leaf, spans, target, self.files)
        # Otherwise the pages that were read stay in this process's memory, up to the whole base.
        self.files.close()
        part = part[tuple(0 if isinstance(index, int) else slice(None) for index in indices)]
        if self.a is None or self.b is None:
            return part
        a, b = (np.asarray(matrix[indices[0]], np.float32) for matrix in (self.a, self.b))
        # The product sums over the rank.
        delta = self.scaling * np.tensordot(a, b, axes=1)
        return (part.astype(np.float32) + delta).astype(self.dtype)


def merge_stored(
    model: PublishedModel,
    lora: Lora,
    recorded: Mapping[str, Any] | None,
    adapters: Mapping[str, Parameter],
    owner: str,
) -> dict[str, Parameter]:
    """Return all parameters of the merged model; `recorded` is the checkpoint's base record.

    Raises SpecError if there is no folder to merge into, and CheckpointError if it is not the one
    of the training.
    """
    if recorded is None or model.init_from is None:
        raise SpecError(
            "the base of these adapters was drawn from train.seed: there is no folder to "
            "merge them into"
        )
    if not remote.is_remote(model.init_from) and not Path(model.init_from).is_dir():
        raise SpecError(
            f"{owner} holds {ADAPTERS_OF} the weights of {recorded['init_from']}, and "
            f"{model.init_from} is not a folder here: name the one that they are in now as --base "
            "of launcher export"
        )
    check_digest(recorded, record_base(model, recorded), owner, "--base of launcher export")
    files = TensorFiles(model.init_from)
    leaves = load.folder_leaves(model, files)
    adapted = {kernel.name for kernel in peft.select_kernels(model, lora)}
    merged: dict[str, Parameter] = {}
    for name, sizes in recorded["shapes"].items():
        a = b = None
        if name in adapted:
            a, b = adapters[name + peft.A_SUFFIX], adapters[name + peft.B_SUFFIX]
        shape, leaf = tuple(sizes), leaves[name]
        dtype = files.tensor_dtype(next(leaf.tensor_shapes(shape))[0])
        merged[name] = MergedParameter(shape, dtype, leaf, files, lora.scaling, a, b)
    return merged


class MergingParameters(dict[str, Array]):
    """The parameters of a training without adapters, each merged when it is popped."""

    def __init__(
        self, params: Mapping[str, Array], model: PublishedModel, lora: Lora | None
    ) -> None:
        """Take all parameters: the adapters, the base, and the frozen reference if any."""
        suffixes = (peft.A_SUFFIX, peft.B_SUFFIX, peft.SCALE_SUFFIX)
        names = [name for name in params if not name.startswith(REFERENCE_PREFIX)]
        super().__init__({name: params[name] for name in names if not name.endswith(suffixes)})
        self._params, self._scaling = params, 0.0 if lora is None else lora.scaling
        self._inputs = {} if lora is None else _input_counts(model)

    def pop(self, name: str, *default: Array) -> Array:  # type: ignore[override]
        """Return the parameter; a kernel is merged with its adapter in float32."""
        kernel = super().pop(name, *default)
        ends = (peft.SCALE_SUFFIX, peft.A_SUFFIX, peft.B_SUFFIX)
        scale, a, b = (self._params.get(name + end) for end in ends)
        if name not in self._inputs or (scale is None and a is None):
            return kernel
        merged: Array = _merge_kernel(kernel, scale, a, b, self._inputs[name], self._scaling)
        return merged


@partial(jax.jit, static_argnums=(4, 5))
def _merge_kernel(
    kernel: Array, scale: Any, a: Array | None, b: Array | None, inputs: int, scaling: float
) -> Array:
    """Return kernel [layers, I, O] + scaling × A [layers, I, R] · B [layers, R, O]."""
    wide = kernel.astype(jnp.float32)
    if scale is not None:
        wide = dequantize_kernel(kernel, scale, inputs)
    if a is None or b is None:
        return wide
    delta = jax.vmap(partial(jnp.tensordot, axes=1))(a.astype(jnp.float32), b.astype(jnp.float32))
    return wide + scaling * delta
