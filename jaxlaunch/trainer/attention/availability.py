"""Choice of the attention implementation: the one that the job names, or the fastest for `auto`.

A kernel is available if the platform has it and if JAX can trace a training step with it for the
shapes and dtype of the model, which is how kernels report their limits. If the named implementation
is unavailable, xla is used instead. A note for the user reports this, and the choice of auto on an
accelerator.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.trainer.attention import implementations
from jaxlaunch.trainer.attention.implementations import Keys
from jaxlaunch.trainer.numerics import precision
from jaxlaunch.trainer.spec import GPT2, Decoder, Model, TrainSpec, ViT

# The implementations that are available everywhere.
PORTABLE = ("auto", "xla")
# The implementation that auto uses on a platform.
KERNELS: Mapping[str, str] = {"cuda": "cudnn", "tpu": "splash"}
# Compute capabilities of CUDA devices.
AMPERE, HOPPER = (8, 0), (9, 0)


class Accelerator(NamedTuple):
    """The properties of a device that decide which kernels are available.

    Attributes:
        platform: cuda, tpu, cpu, or another platform of JAX.
        capability: Compute capability of a CUDA device, if known.
    """

    platform: str
    capability: tuple[int, int] | None = None

    @classmethod
    def from_device(cls, device: jax.Device) -> Accelerator:
        """Return the properties of a device. A ROCm device has JAX's name of its platform, gpu."""
        if not _is_cuda(device):
            return cls(device.platform)
        # Only CUDA devices have this attribute, and JAX's type does not declare it.
        return cls("cuda", parse_capability(getattr(device, "compute_capability", None)))


def _is_cuda(device: jax.Device) -> bool:
    # In ahead-of-time compilation only the name of the GPU shows that it is a CUDA device.
    names = f"{device.client.platform_version} {device.device_kind}".lower()
    return device.platform == "gpu" and ("cuda" in names or "nvidia" in names)


def parse_capability(text: str | None) -> tuple[int, int] | None:
    """Parse a compute capability: `8.0` becomes (8, 0)."""
    if text is None:
        return None
    major, _, minor = str(text).partition(".")
    return int(major), int(minor or 0)


class Shape(NamedTuple):
    """Sizes of a model's attention, and the options of its scores.

    Attributes:
        length: Number of tokens.
        heads: Number of query heads.
        groups: Number of key and value heads.
        size: Channels per head.
        is_causal: Whether a query sees only keys up to its own position.
        window: Number of keys that a query sees in the layers with a window.
        cap: Bound of the scores.
    """

    length: int
    heads: int
    groups: int
    size: int
    is_causal: bool
    window: int | None = None
    cap: float | None = None


def resolve_attention(spec: TrainSpec, device: jax.Device) -> tuple[TrainSpec, str | None]:
    """Return the spec with an attention that works on `device`, and a note for the user if any."""
    note = f"train.attention = {spec.attention}"
    if spec.attention != "auto":
        reason = unavailable_reason(spec, device)
        if reason is None:
            return spec, None
        return _with_attention(spec, "xla"), f"{note} is unavailable here: {reason}. Using xla"
    kernel = KERNELS.get(Accelerator.from_device(device).platform)
    if kernel is None or attention_shape(spec.model) is None:
        return spec, None
    kernel_spec = _with_attention(spec, kernel)
    reason = _auto_reason(kernel_spec) or unavailable_reason(kernel_spec, device, is_masked=True)
    if reason is None:
        return kernel_spec, f"{note}: using {kernel}"
    note = f"{note}: using xla; {kernel} is unavailable here: {reason}"
    return _with_attention(spec, "xla"), note


def resolve_for_plan(spec: TrainSpec, accelerator: Accelerator | None = None) -> TrainSpec:
    """Return the spec for tracing without the devices, with `fused` in place of a kernel, or xla.

    If the accelerator is not known, a named kernel counts as available, and auto becomes xla.
    """
    name: str = spec.attention
    is_auto = name == "auto"
    if is_auto and accelerator is not None:
        name = KERNELS.get(accelerator.platform, "xla")
    kernel_spec, shape = _with_attention(spec, name), attention_shape(spec.model)
    if shape is None or name in PORTABLE or (is_auto and _auto_reason(kernel_spec) is not None):
        return _with_attention(spec, "xla")
    has_kernel = _has_kernel(kernel_spec, shape, accelerator)
    return _with_attention(spec, implementations.FUSED if has_kernel else "xla")


def _has_kernel(spec: TrainSpec, shape: Shape, accelerator: Accelerator | None) -> bool:
    """Return whether an accelerator has the kernel of `spec.attention`.

    Splash attention can be traced anywhere. The limits of cuDNN are only checked on a GPU, so they
    are repeated here.
    """
    if accelerator is not None and KERNELS.get(accelerator.platform) != spec.attention:
        return False
    if spec.attention == "splash":
        return _kernel_reason("splash", shape, _compute_dtype(spec)) is None
    capability = None if accelerator is None else accelerator.capability
    max_size = 256 if capability is None or capability >= HOPPER else 128
    is_supported_size = shape.size % 8 == 0 and shape.size <= max_size
    return is_supported_size and shape.cap is None and _cudnn_reason(spec, capability) is None


def _compute_dtype(spec: TrainSpec) -> jnp.dtype:
    return precision.resolve_precision(spec.precision).compute


def unavailable_reason(
    spec: TrainSpec, device: jax.Device, *, is_masked: bool = False
) -> str | None:
    """Return why the named attention is unavailable on `device`, or None.

    Args:
        spec: Spec of the training.
        device: One of its devices.
        is_masked: Whether some examples hide keys, as padding and packing do.
    """
    shape, name = attention_shape(spec.model), spec.attention
    if shape is None or name in (*PORTABLE, implementations.FUSED):
        return None
    accelerator = Accelerator.from_device(device)
    if name == "cudnn" and accelerator.platform != "cuda":
        return f"there is no CUDA device, the devices are {accelerator.platform}"
    if name == "cudnn" and (cudnn_reason := _cudnn_reason(spec, accelerator.capability)):
        return cudnn_reason
    if name == "splash" and accelerator.platform != "tpu":
        return f"it is a kernel for TPU, the devices are {device.platform}"
    dtype = _compute_dtype(spec)
    kernel_reason = _kernel_reason(name, shape, dtype)
    if kernel_reason is None and is_masked:
        return _kernel_reason(name, shape, dtype, is_masked=True)
    return kernel_reason


def _cudnn_reason(spec: TrainSpec, capability: tuple[int, int] | None) -> str | None:
    """Return why cuDNN cannot run the spec at this compute capability, if known."""
    if _compute_dtype(spec) == jnp.float32:
        return "cuDNN's kernel reads float16 and bfloat16, and train.precision computes in float32"
    if capability is not None and capability < AMPERE:
        version = ".".join(map(str, capability))
        return f"cuDNN's kernel needs compute capability 8.0 (Ampere), the GPU has {version}"
    return None


def _auto_reason(spec: TrainSpec) -> str | None:
    """Return why auto does not select the kernel `spec.attention`, although a job may name it.

    On a TPU, float32 products are left to the compiler. Windows of cuDNN were not tested on a GPU.
    """
    if spec.attention == "splash" and _compute_dtype(spec) != jnp.bfloat16:
        return "auto uses it for bfloat16 only, and train.precision computes in another type"
    shape = attention_shape(spec.model)
    window = None if shape is None or spec.attention != "cudnn" else shape.window
    if shape is not None and window is not None and window < shape.length:
        return f"auto uses it only without a window, and train.model.window = {window}"
    return None


def _with_attention(spec: TrainSpec, name: str) -> TrainSpec:
    return spec.model_copy(update={"attention": name})


def attention_shape(model: Model) -> Shape | None:
    """Return the attention sizes of a built-in model, or None if it has no attention."""
    match model:
        case Decoder():
            sizes = model.length, model.heads, model.kv_head_count, model.head_channels
            window = model.window if "window" in model.attention_spans else None
            return Shape(*sizes, True, window, model.score_cap)
        case GPT2():
            return Shape(model.length, model.heads, model.heads, model.width // model.heads, True)
        case ViT():
            tokens = model.patch_count + (model.pool == "cls")
            return Shape(tokens, model.heads, model.heads, model.width // model.heads, False)
    return None


def _kernel_reason(
    name: str, shape: Shape, dtype: jnp.dtype, *, is_masked: bool = False
) -> str | None:
    """Return why JAX cannot trace a training step with this kernel, or None."""
    query = jax.ShapeDtypeStruct((1, shape.length, shape.heads, shape.size), dtype)
    key = jax.ShapeDtypeStruct((1, shape.length, shape.groups, shape.size), dtype)
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
