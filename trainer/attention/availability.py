"""Whether the attention that a job asks for can be had here; what cannot falls back to xla, and the reason is told."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from trainer import attention, precision
from trainer.architectures import Model
from trainer.spec import GPT2, Decoder, TrainSpec, ViT

ANYWHERE = ("auto", "xla")


class Shape(NamedTuple):
    """Of a model's attention."""

    length: int
    heads: int
    groups: int
    size: int
    is_causal: bool


def fitted(spec: TrainSpec, device: jax.Device) -> tuple[TrainSpec, str | None]:
    """The spec with attention that works on such devices, and a sentence where that is not what was asked for."""
    reason = lacks(spec, device)
    if reason is None:
        return spec, None
    note = f"train.attention = {spec.attention} cannot be had here: {reason}. Using xla"
    return spec.model_copy(update={"attention": "xla"}), note


def planned(spec: TrainSpec) -> TrainSpec:
    """The spec as it is traced where its devices are not: a kernel that they may have keeps what kernels keep."""
    shape, name = of(spec.model), spec.attention
    is_fused = name not in ANYWHERE and _dtype_fault(spec) is None
    if shape is not None and name == "splash":  # which can be asked anywhere; cuDNN only where it is
        is_fused &= _refusal(name, shape, precision.policy(spec.precision).compute) is None
    return spec.model_copy(update={"attention": attention.FUSED}) if is_fused else spec


def lacks(spec: TrainSpec, device: jax.Device) -> str | None:
    """Why the named attention cannot be had, in words; None where it can, or no model of ours asks for any."""
    shape, name = of(spec.model), spec.attention
    if shape is None or name in (*ANYWHERE, attention.FUSED):
        return None
    if name == "cudnn" and not _is_cuda(device):
        return f"there is no CUDA device, the devices are {device.platform}"
    if fault := _dtype_fault(spec):
        return fault
    if name == "splash" and device.platform != "tpu":
        return f"it is a kernel for TPU, the devices are {device.platform}"
    return _refusal(name, shape, precision.policy(spec.precision).compute)


def _dtype_fault(spec: TrainSpec) -> str | None:
    if spec.attention == "cudnn" and precision.policy(spec.precision).compute == jnp.float32:
        return "cuDNN's kernel reads float16 and bfloat16, and train.precision computes in float32"
    return None


def of(model: Model) -> Shape | None:
    """The attention of a built-in model; None of one that has none, or is the user's."""
    match model:
        case Decoder():
            return Shape(model.length, model.heads, model.groups, model.width // model.heads, True)
        case GPT2():
            return Shape(model.length, model.heads, model.heads, model.width // model.heads, True)
        case ViT():
            tokens = model.patches + (model.pool == "cls")
            return Shape(tokens, model.heads, model.heads, model.width // model.heads, False)
    return None


def _is_cuda(device: jax.Device) -> bool:
    return device.platform == "gpu" and "cuda" in device.client.platform_version.lower()


def _refusal(name: str, shape: Shape, dtype: jnp.dtype) -> str | None:
    """What JAX says against training with it: head size, cuDNN's version, the device's generation."""
    described = partial(jax.ShapeDtypeStruct, dtype=dtype)
    query = described((1, shape.length, shape.heads, shape.size))
    key = described((1, shape.length, shape.groups, shape.size))
    attend = attention.ATTENTION[name]

    def summed(query: Array, key: Array, value: Array) -> Array:
        return attend(query, key, value, None, is_causal=shape.is_causal).astype(jnp.float32).sum()

    try:
        jax.eval_shape(jax.grad(summed, argnums=(0, 1, 2)), query, key, key)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).splitlines()[0].rstrip(".")
    return None
