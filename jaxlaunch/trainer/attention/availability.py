"""Choice of the attention implementation: the one that a job names, or for auto the fastest that is available.

If the named implementation is unavailable, xla is used instead. A note reports this, and what auto
selects on an accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.trainer.attention import implementations
from jaxlaunch.trainer.attention.implementations import Keys
from jaxlaunch.trainer.numerics import precision
from jaxlaunch.trainer.spec import GPT2, Decoder, Model, TrainSpec, ViT

PORTABLE = ("auto", "xla")
KERNELS: Mapping[str, str] = {
    "cuda": "cudnn",
    "tpu": "splash",
}  # platform -> implementation that auto uses
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities


class Accelerator(NamedTuple):
    """The properties of a device that decide which kernels are available."""

    platform: str  # cuda, tpu, cpu, or another platform of JAX
    capability: tuple[int, int] | None = None  # compute capability of a CUDA device, if known

    @classmethod
    def from_device(cls, device: jax.Device) -> Accelerator:
        """Describe a device; a ROCm device keeps JAX's platform name, gpu."""
        if not _is_cuda(device):
            return cls(device.platform)
        # Only CUDA devices have this attribute, and JAX's type does not declare it.
        return cls("cuda", parse_capability(getattr(device, "compute_capability", None)))


def _is_cuda(device: jax.Device) -> bool:
    # In ahead-of-time compilation the client does not identify CUDA, but the name of the GPU does.
    names = f"{device.client.platform_version} {device.device_kind}".lower()
    return device.platform == "gpu" and ("cuda" in names or "nvidia" in names)


def parse_capability(text: str | None) -> tuple[int, int] | None:
    """Parse a compute capability: `8.0` becomes (8, 0)."""
    if text is None:
        return None
    major, _, minor = str(text).partition(".")
    return int(major), int(minor or 0)


class Shape(NamedTuple):
    """Sizes of a model's attention, and the options of its scores."""

    length: int  # tokens
    heads: int  # query heads
    groups: int  # key and value heads
    size: int  # channels per head
    is_causal: bool
    window: int | None = None  # of the layers that have one
    cap: float | None = None


def resolve_attention(spec: TrainSpec, device: jax.Device) -> tuple[TrainSpec, str | None]:
    """Return the spec with an attention that works on `device`, and a note if that differs from the spec."""
    if spec.attention == "auto":
        return _resolve_auto(spec, device)
    reason = unavailable_reason(spec, device)
    if reason is None:
        return spec, None
    note = f"train.attention = {spec.attention} is unavailable here: {reason}. Using xla"
    return _with_attention(spec, "xla"), note


def _resolve_auto(spec: TrainSpec, device: jax.Device) -> tuple[TrainSpec, str | None]:
    """Return the spec with the choice of auto on `device`, and a note if the device has a kernel of its own."""
    kernel = KERNELS.get(Accelerator.from_device(device).platform)
    if kernel is None or attention_shape(spec.model) is None:
        return spec, None
    kernel_spec = _with_attention(spec, kernel)
    reason = _auto_fault(kernel_spec) or unavailable_reason(kernel_spec, device, is_masked=True)
    if reason is None:
        return kernel_spec, f"train.attention = auto: using {kernel}"
    return _with_attention(
        spec, "xla"
    ), f"train.attention = auto: using xla; {kernel} is unavailable here: {reason}"


def resolve_for_plan(spec: TrainSpec, accelerator: Accelerator | None = None) -> TrainSpec:
    """Return the spec for tracing without its devices, with `fused` in place of an available kernel, or else xla.

    Without an accelerator a named kernel counts as available, and auto is xla.
    """
    name = (
        KERNELS.get(accelerator.platform, "xla")
        if spec.attention == "auto" and accelerator is not None
        else spec.attention
    )
    kernel_spec, shape = _with_attention(spec, name), attention_shape(spec.model)
    if (
        shape is None
        or name in PORTABLE
        or (spec.attention == "auto" and _auto_fault(kernel_spec) is not None)
    ):
        return _with_attention(spec, "xla")
    return _with_attention(
        spec, implementations.FUSED if _has_kernel(kernel_spec, shape, accelerator) else "xla"
    )


def _has_kernel(spec: TrainSpec, shape: Shape, accelerator: Accelerator | None) -> bool:
    """Return whether an accelerator has the named kernel. cuDNN's own checks need a GPU, those of splash do not."""
    if accelerator is not None and KERNELS.get(accelerator.platform) != spec.attention:
        return False
    if spec.attention == "splash":
        return (
            _kernel_refusal("splash", shape, precision.resolve_precision(spec.precision).compute)
            is None
        )
    gpu_capability = None if accelerator is None else accelerator.capability
    largest = 256 if gpu_capability is None or gpu_capability >= HOPPER else 128
    return (
        shape.size % 8 == 0
        and shape.size <= largest
        and shape.cap is None
        and _cudnn_fault(spec, gpu_capability) is None
    )


def unavailable_reason(
    spec: TrainSpec, device: jax.Device, *, is_masked: bool = False
) -> str | None:
    """Return why the named attention is unavailable on `device`, or None if it is available or not needed.

    Args:
        spec: Spec of the training.
        device: One of its devices.
        is_masked: Whether to check also for examples that hide some keys from some queries.
    """
    shape, name = attention_shape(spec.model), spec.attention
    if shape is None or name in (*PORTABLE, implementations.FUSED):
        return None
    accelerator = Accelerator.from_device(device)
    if name == "cudnn" and accelerator.platform != "cuda":
        return f"there is no CUDA device, the devices are {accelerator.platform}"
    if name == "cudnn" and (fault := _cudnn_fault(spec, accelerator.capability)):
        return fault
    if name == "splash" and accelerator.platform != "tpu":
        return f"it is a kernel for TPU, the devices are {device.platform}"
    compute = precision.resolve_precision(spec.precision).compute
    return _kernel_refusal(name, shape, compute) or (
        _kernel_refusal(name, shape, compute, is_masked=True) if is_masked else None
    )


def _cudnn_fault(spec: TrainSpec, gpu_capability: tuple[int, int] | None) -> str | None:
    """Return why cuDNN's kernel cannot run the spec on a GPU with this compute capability, if known."""
    if precision.resolve_precision(spec.precision).compute == jnp.float32:
        return "cuDNN's kernel reads float16 and bfloat16, and train.precision computes in float32"
    if gpu_capability is not None and gpu_capability < AMPERE:
        return (
            "cuDNN's kernel needs compute capability 8.0 (Ampere), the GPU has "
            f"{gpu_capability[0]}.{gpu_capability[1]}"
        )
    return None


def _auto_fault(spec: TrainSpec) -> str | None:
    """Return why auto does not select a kernel that a job may name.

    On a TPU, float32 products are left to the compiler. cuDNN's windows have not been tested on a
    GPU.
    """
    if (
        spec.attention == "splash"
        and precision.resolve_precision(spec.precision).compute != jnp.bfloat16
    ):
        return "auto uses it for bfloat16 only, and train.precision computes in another type"
    shape = attention_shape(spec.model)
    if (
        spec.attention == "cudnn"
        and shape is not None
        and shape.window is not None
        and shape.window < shape.length
    ):
        return f"auto uses it only without a window, and train.model.window = {shape.window}"
    return None


def _with_attention(spec: TrainSpec, name: str) -> TrainSpec:
    return spec.model_copy(update={"attention": name})


def attention_shape(model: Model) -> Shape | None:
    """Return the attention sizes of a built-in model; None without attention and for custom models."""
    match model:
        case Decoder():
            window = model.window if "window" in model.attention_spans else None
            return Shape(
                model.length,
                model.heads,
                model.kv_head_count,
                model.head_channels,
                True,
                window,
                model.score_cap,
            )
        case GPT2():
            return Shape(model.length, model.heads, model.heads, model.width // model.heads, True)
        case ViT():
            tokens = model.patch_count + (model.pool == "cls")
            return Shape(tokens, model.heads, model.heads, model.width // model.heads, False)
    return None


def _kernel_refusal(
    name: str, shape: Shape, dtype: jnp.dtype, *, is_masked: bool = False
) -> str | None:
    """Return why JAX refuses to train with this kernel (a cap, head size, cuDNN's version, the device), or None."""
    abstract_array = partial(jax.ShapeDtypeStruct, dtype=dtype)
    query = abstract_array((1, shape.length, shape.heads, shape.size))
    key = abstract_array((1, shape.length, shape.groups, shape.size))
    segments = jax.ShapeDtypeStruct((1, shape.length), jnp.int32)
    attend = implementations.ATTENTION[name]
    scores = implementations.Scores(shape.is_causal, shape.window, shape.cap)

    def sum_output(query: Array, key: Array, value: Array, segments: Array) -> Array:
        keys: Keys = implementations.Visible(segments_BL=segments) if is_masked else None
        return attend(query, key, value, keys, scores).astype(jnp.float32).sum()

    try:
        jax.eval_shape(jax.grad(sum_output, argnums=(0, 1, 2)), query, key, key, segments)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).splitlines()[0].rstrip(".")
    return None
