"""Frozen weights that are read from a folder: the base of adapters, or the reference of `dpo`.

A checkpoint does not contain the frozen weights. It records their digest, so that a resumed run can
check that it reads the same ones. For an export, adapters are merged into the base one tensor at a
time: kernel + scaling × A · B.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from jaxlaunch.trainer.adapters import base_weights, peft
from jaxlaunch.trainer.adapters.lora import REFERENCE_PREFIX, dequantize_kernel, quantize_kernel
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import CheckpointError, SpecError
from jaxlaunch.trainer.huggingface import load
from jaxlaunch.trainer.huggingface.names import Leaf
from jaxlaunch.trainer.huggingface.save import Parameter
from jaxlaunch.trainer.huggingface.tensor_files import DEFAULT_KEY, TensorFiles
from jaxlaunch.trainer.spec import Lora, PublishedModel, TransformersModel
from jaxlaunch.trainer.torch_models import adapters as module_adapters
from jaxlaunch.trainer.torch_models import build

BASE_OPTION = "--base of launcher export"
AbstractParams = Mapping[str, jax.ShapeDtypeStruct]
# The contents of a checkpoint in messages, to be followed by a description of the base.
ADAPTERS_OF, REFERENCE_OF = "adapters of", "a model compared with"


def read_base(
    model: PublishedModel, abstract_params: AbstractParams, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the frozen parameters from the model's folder, and their record for checkpoints.

    Parameters are read one at a time in the folder's dtype, and cast or quantized afterwards. The
    digest therefore does not depend on the dtype in which the base is kept in memory. Random
    weights are drawn from `seed`. Raises SpecError as base_weights.iterate_parameters does.
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

    digest = _compute_digest(model, stored, seed, store_parameter)
    shapes = {name: list(target.shape) for name, target in stored.items()}
    return params, {"init_from": model.init_from, "shapes": shapes, "digest": digest}


def record_base(
    model: PublishedModel,
    recorded: Mapping[str, Any],
    on_parameter: Callable[[str, Array], None] = lambda name, array: None,
) -> dict[str, Any]:
    """Read the whole base in the folder of `model`, and return its record.

    The names and shapes of the parameters are those in the record of the checkpoint, `recorded`.
    `on_parameter` is called with each parameter in the folder's dtype.
    """
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract_params = {
        name: jax.ShapeDtypeStruct(tuple(shape), jnp.float32, sharding=device)
        for name, shape in recorded["shapes"].items()
    }
    digest = _compute_digest(model, abstract_params, 0, on_parameter)
    return {**recorded, "init_from": model.init_from, "digest": digest}


def check_origin(
    recorded: Mapping[str, Any] | None,
    model: PublishedModel,
    owner: str,
    contents: str = ADAPTERS_OF,
) -> None:
    """Raise CheckpointError if only one of the saved and the current base is from a folder.

    No files are read.

    Args:
        recorded: Record of the base in the checkpoint, or None if its weights were drawn from the
            seed.
        model: Model of the job.
        owner: Name of the checkpoint in messages.
        contents: Contents of the checkpoint in messages.
    """
    if recorded is not None and model.init_from is None:
        raise CheckpointError(
            f"{owner} holds {contents} {_describe_base(recorded)}; without {DEFAULT_KEY} the "
            "weights are drawn from train.seed: name the folder that they were trained on as "
            f"{DEFAULT_KEY}"
        )
    if recorded is None and model.init_from is not None:
        raise CheckpointError(
            f"{owner} holds {contents} weights that were drawn from train.seed, not those of "
            f"{DEFAULT_KEY} = {model.init_from}: leave it out, or start a new run from the folder"
        )


def _describe_base(recorded: Mapping[str, Any]) -> str:
    return f"the weights of {recorded['init_from']} with digest {recorded['digest']}"


def _input_counts(model: PublishedModel) -> dict[str, int]:
    """Return the number of input axes of each kernel."""
    if isinstance(model, TransformersModel):
        return {}
    return {kernel.name: len(kernel.inputs) for kernel in peft.find_kernels(model)}


def check_digest(
    recorded: Mapping[str, Any],
    current: Mapping[str, Any],
    owner: str,
    key: str = DEFAULT_KEY,
    contents: str = ADAPTERS_OF,
) -> None:
    """Raise CheckpointError if the base differs from the saved one; `key` sets its folder."""
    if recorded["digest"] != current["digest"]:
        raise CheckpointError(
            f"{owner} holds {contents} {_describe_base(recorded)}; those of {current['init_from']} "
            f"have {current['digest']}: name the folder that they were trained on as {key}"
        )


def _compute_digest(
    model: PublishedModel, abstract_params: AbstractParams, seed: int, on_parameter: Any
) -> str:
    """Call `on_parameter(name, array)` for each parameter, and return a digest of all of them.

    The digest is made of integer sums, so it does not depend on the mesh.
    """
    sums = {}
    arrays = base_weights.iterate_parameters(model, abstract_params, seed, is_cast=False)
    for name, array in arrays:
        # Each device sums its own part, and the sums are replicated.
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
    """Return two sums modulo 2^32 over the bits of each number, mixed with its position."""
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
    """A parameter of the base merged with its adapter, which is read when it is sliced.

    Attributes:
        shape: Shape of the parameter.
        dtype: Dtype of the parameter in the folder, and of the merged one.
        leaf: Layout of the parameter in the folder.
        files: Files of the folder.
        scaling: Factor of A · B.
        a: A [layers, inputs ..., rank], or None without an adapter.
        b: B [layers, rank, outputs ...], or None without an adapter.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    leaf: Leaf
    files: TensorFiles
    scaling: float
    a: Parameter | None
    b: Parameter | None

    def __getitem__(self, key: Any) -> np.ndarray[Any, Any]:
        """Read one layer of a stacked parameter, with (int, slice, ...), or all of another one."""
        indices = key if isinstance(key, tuple) else (key,)
        spans = tuple(
            slice(index, index + 1) if isinstance(index, int) else slice(*index.indices(size)[:2])
            for index, size in zip(indices, self.shape, strict=True)
        )
        target = jax.ShapeDtypeStruct(self.shape, self.dtype)
        part = load.read_part(self.leaf, spans, target, self.files)
        # Close the files, because pages of open files count as memory of this process.
        self.files.close()
        part = part[tuple(0 if isinstance(index, int) else slice(None) for index in indices)]
        if self.a is None or self.b is None:
            return part
        a, b = (np.asarray(matrix[indices[0]], np.float32) for matrix in (self.a, self.b))
        delta = self.scaling * np.tensordot(a, b, axes=1)
        return (part.astype(np.float32) + delta).astype(self.dtype)


def merge_stored(
    model: PublishedModel,
    lora: Lora,
    recorded: Mapping[str, Any] | None,
    adapters: Mapping[str, Parameter],
    owner: str,
) -> dict[str, Parameter]:
    """Return all parameters of the merged model.

    Args:
        model: Model with the folder of the base.
        lora: Options of the adapters.
        recorded: Record of the base in the checkpoint.
        adapters: Adapters in the checkpoint.
        owner: Name of the checkpoint in messages.

    Raises:
        SpecError: There is no folder of the base.
        CheckpointError: The folder does not hold the weights that the adapters were trained on.
    """
    base = _check_folder(model, recorded, owner)
    if isinstance(model, TransformersModel):
        return _merge_modules(model, lora, base, adapters, owner)
    check_digest(base, record_base(model, base), owner, BASE_OPTION)
    folder = model.init_from or ""
    files = TensorFiles(folder)
    leaves = load.folder_leaves(model, files)
    adapted = {kernel.name for kernel in peft.select_kernels(model, lora)}
    merged: dict[str, Parameter] = {}
    for name, sizes in base["shapes"].items():
        a = b = None
        if name in adapted:
            a, b = adapters[name + peft.A_SUFFIX], adapters[name + peft.B_SUFFIX]
        shape, leaf = tuple(sizes), leaves[name]
        dtype = files.tensor_dtype(next(leaf.tensor_shapes(shape))[0])
        merged[name] = MergedParameter(shape, dtype, leaf, files, lora.scaling, a, b)
    return merged


def _merge_modules(
    model: TransformersModel,
    lora: Lora,
    recorded: Mapping[str, Any],
    adapters: Mapping[str, Parameter],
    owner: str,
) -> dict[str, Parameter]:
    """Return the parameters after the merge, which peft computes in the memory of this process."""
    params: dict[str, Any] = {**adapters}

    def store_parameter(name: str, array: Array) -> None:
        params[name] = np.asarray(array)

    check_digest(recorded, record_base(model, recorded, store_parameter), owner, BASE_OPTION)
    return module_adapters.merge_adapters(build.empty_module(model), lora, params)


def _check_folder(
    model: PublishedModel, recorded: Mapping[str, Any] | None, owner: str
) -> Mapping[str, Any]:
    """Return the record of a base. Raises SpecError if it has no folder here."""
    if recorded is None or model.init_from is None:
        raise SpecError(
            "the base of these adapters was drawn from train.seed, so there is no folder to "
            "merge them into; export them without --merged"
        )
    if not remote.is_remote(model.init_from) and not Path(model.init_from).is_dir():
        raise SpecError(
            f"{owner} holds {ADAPTERS_OF} the weights of {recorded['init_from']}, and "
            f"{model.init_from} is not a folder here: name the one that they are in now as --base "
            "of launcher export"
        )
    return recorded


class MergingParameters(dict[str, Array]):
    """The parameters of a training under the names of a model without adapters.

    A kernel is merged with its adapter when it is popped, so that at most one merged copy exists.
    """

    def __init__(
        self, params: Mapping[str, Array], model: PublishedModel, lora: Lora | None
    ) -> None:
        """Accept all parameters: adapters, the base, and the frozen reference if there is one."""
        suffixes = (peft.A_SUFFIX, peft.B_SUFFIX, peft.SCALE_SUFFIX)
        names = [name for name in params if not name.startswith(REFERENCE_PREFIX)]
        super().__init__({name: params[name] for name in names if not name.endswith(suffixes)})
        self._params, self._scaling = params, 0.0 if lora is None else lora.scaling
        self._inputs = {} if lora is None else _input_counts(model)

    def pop(self, name: str, *default: Array) -> Array:  # type: ignore[override]
        """Return the parameter; a kernel is merged with its adapter in float32."""
        kernel = super().pop(name, *default)
        suffixes = (peft.SCALE_SUFFIX, peft.A_SUFFIX, peft.B_SUFFIX)
        scale, a, b = (self._params.get(name + suffix) for suffix in suffixes)
        if name not in self._inputs or (scale is None and a is None):
            return kernel
        merged: Array = _merge_kernel(kernel, scale, a, b, self._inputs[name], self._scaling)
        return merged


@partial(jax.jit, static_argnums=(4, 5))
def _merge_kernel(
    kernel: Array, scale: Any, a: Array | None, b: Array | None, inputs: int, scaling: float
) -> Array:
    """Return kernel [layers, I, O] + scaling × A [layers, I, R] · B [layers, R, O]."""
    kernel_f32 = kernel.astype(jnp.float32)
    if scale is not None:
        kernel_f32 = dequantize_kernel(kernel, scale, inputs)
    if a is None or b is None:
        return kernel_f32
    delta = jax.vmap(partial(jnp.tensordot, axes=1))(a.astype(jnp.float32), b.astype(jnp.float32))
    return kernel_f32 + scaling * delta
