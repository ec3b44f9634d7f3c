"""Building blocks of the built-in models: options, layers, and stacks of equal layers.

Parameters name their axes, which sharding maps to the mesh. Activations have the dtype of the
weights; norms and activation functions compute in float32.

B batch, L length, H heads, K head size, D model, I inputs, O outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxlaunch.trainer.numerics import precision
from jaxlaunch.trainer.parallel.sharding import Axes, constrain
from jaxlaunch.trainer.spec import Loss, Remat, RopeScaling, TrainSpec

PyTree = Any
Shape = int | tuple[int, ...]
# Radians per position of each channel pair, [K/2].
Frequencies = np.ndarray[tuple[int], np.dtype[np.float64]]


class ModelOptions(NamedTuple):
    """The options of a model that are outside of its `model` block.

    Attributes:
        attention: Name of the implementation of attention.
        remat: Policy of rematerialization.
        output: Dtype of the logits.
        loss: Options of the loss.
    """

    attention: str = "auto"
    remat: Remat = "none"
    output: jnp.dtype = jnp.dtype("float32")
    loss: Loss = Loss()

    @classmethod
    def from_spec(cls, spec: TrainSpec) -> ModelOptions:
        """Return the options that a train block asks for."""
        output = precision.resolve_precision(spec.precision).output
        return cls(spec.attention, spec.remat, output, spec.loss)


DEFAULT_OPTIONS = ModelOptions()


def init_weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, std: float) -> nnx.Param[Array]:
    """Return a float32 parameter with named axes, drawn from N(0, std²)."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def init_bias(shape: tuple[int, ...], axes: Axes) -> nnx.Param[Array]:
    """Return a float32 parameter of zeros with named axes."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes)


def gather_sequence(x_BLD: Array) -> Array:
    """Gather the positions of each example on one device, for products that are split over mp."""
    return constrain(x_BLD, "batch", "length", "embed")


def split_sequence(x_BLD: Array) -> Array:
    """Split the positions of each example over mp.

    The sum of a product over mp becomes a reduce-scatter, and norms, dropout and the activations
    that remat keeps are split too. Korthikanti et al. 2022, "sequence parallelism".
    """
    return constrain(x_BLD, "batch", "sequence", "embed")


class Kernel(Protocol):
    """A kernel with an adapter, which `apply_kernel` accepts in place of an array."""

    def product(self, x: Array, axes: int, /) -> Array:
        """Multiply x with the kernel as `apply_kernel` does without a bias."""


def apply_kernel(
    x: Array, kernel: Array | Kernel, axes: int = 1, bias: nnx.Param[Array] | None = None
) -> Array:
    """Multiply x [B, L, ..., I] with kernel [I, ..., O] over `axes` axes, and add a bias.

    On CPU devices B and L are merged for the product. Otherwise the kernel's gradient would sum
    over two axes, for which XLA's CPU compiler transposes its operand in memory. On other devices
    the axes stay separate: with merged axes, XLA's GPU compiler emits an all-reduce instead of a
    reduce-scatter along L for a sum over mp.
    """
    if isinstance(kernel, Array):
        rows = x.reshape(-1, *x.shape[2:]) if platform() == "cpu" else x
        outputs = jnp.tensordot(rows, kernel, axes).reshape(*x.shape[:-axes], *kernel.shape[axes:])
    else:
        outputs = kernel.product(x, axes)
    return outputs if bias is None else outputs + bias[...][None, None]


def platform() -> str:
    """Return the platform of the mesh that a trace is compiled for, or cpu without a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "cpu" if device is None else str(device.platform)


def recompute_in_backward(function: Callable[..., Array]) -> Callable[..., Array]:
    """Return `function` such that the backward pass recomputes it from its arguments.

    For norms and elementwise functions. The arguments are in memory in any case, so this saves the
    memory of the intermediates, some of which are float32.
    """
    return jax.checkpoint(function, prevent_cse=False)


def gated_activation(activation: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    """Return the input of the last product of a gated MLP: activation(gate) * up."""
    return recompute_in_backward(lambda gate, up: activation(gate) * up)(gate, up)


class Linear(nnx.Module):
    """x · kernel + bias, initialized with variance 2 / inputs for ReLUs (He et al. 2015)."""

    def __init__(self, inputs: int, outputs: int, axes: tuple[str, str], rngs: nnx.Rngs) -> None:
        self.kernel = init_weight(rngs, (inputs, outputs), axes, std=(2 / inputs) ** 0.5)
        self.bias = init_bias((outputs,), axes[1:])

    def __call__(self, x_BI: Array) -> Array:
        """Return the outputs, [B, O]."""
        kernel_IO = self.kernel[...]
        return x_BI.astype(kernel_IO.dtype) @ kernel_IO + self.bias[...][None, :]


class RMSNorm(nnx.Module):
    """x divided by its root mean square along the last axes, times a scale, in float32.

    With `from_one` the factor is 1 + scale, and the scale starts at 0. Zhang and Sennrich 2019.
    """

    def __init__(
        self, shape: Shape, eps: float, axes: Axes = ("embed",), *, from_one: bool = False
    ) -> None:
        init = jnp.zeros if from_one else jnp.ones
        self.scale = nnx.Param(init(shape, jnp.float32), axes=axes)
        self.eps, self.from_one = eps, from_one

    def __call__(self, x: Array) -> Array:
        """Normalize x along its last axes."""
        normalize = partial(_rms_norm, eps=self.eps, from_one=self.from_one)
        return recompute_in_backward(normalize)(x, self.scale[...])


def _rms_norm(x: Array, scale: Array, eps: float, *, from_one: bool) -> Array:
    axes, x32 = tuple(range(-scale.ndim, 0)), x.astype(jnp.float32)
    scale = scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
    normalized = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=axes, keepdims=True) + eps)
    if from_one:
        return (normalized * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
    return normalized.astype(x.dtype) * scale


class LayerNorm(nnx.Module):
    """(x - mean) / deviation along the last axis, scaled and shifted. Ba et al. 2016."""

    def __init__(self, width: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones(width, jnp.float32), axes=("embed",))
        self.bias = init_bias((width,), ("embed",))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Normalize x along its last axis."""
        normalize = partial(_layer_norm, eps=self.eps)
        return recompute_in_backward(normalize)(x, self.scale[...], self.bias[...])


def _layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    x32, last_axis = x.astype(jnp.float32), (1,) * (x.ndim - 1) + (-1,)
    centered = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    normalized = (centered * jax.lax.rsqrt(variance + eps)).astype(x.dtype)
    return normalized * scale.reshape(last_axis) + bias.reshape(last_axis)


def gelu(x: Array) -> Array:
    """Return the exact GELU, computed in float32. Hendrycks and Gimpel 2016.

    It uses erf, whereas jax.nn uses erfc. On a CPU erf is much faster, because it is one polynomial
    without branches.
    """
    x32 = x.astype(jnp.float32)
    return (0.5 * x32 * (1.0 + jax.lax.erf(x32 * math.sqrt(0.5)))).astype(x.dtype)


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def apply_rope(
    x_BLHK: Array,
    theta: float,
    scaling: RopeScaling | None = None,
    positions_BL: Array | None = None,
) -> Array:
    """Rotate the channel pairs (k, k + K/2) by position, by default 0 to L - 1. Su et al. 2021."""
    length, size = x_BLHK.shape[1], x_BLHK.shape[3]
    frequency_K = jnp.asarray(_rope_frequencies(size, theta, scaling), jnp.float32)
    if positions_BL is None:
        positions_BL = jnp.arange(length)[None, :]
    angle_BLK = positions_BL.astype(jnp.float32)[:, :, None] * frequency_K[None, None, :]
    cos, sin = jnp.cos(angle_BLK)[:, :, None, :], jnp.sin(angle_BLK)[:, :, None, :]
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    if scaling is not None and scaling.kind == "yarn":
        default_factor = 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
        rotated = rotated * (scaling.attention_factor or default_factor)
    return rotated.astype(x_BLHK.dtype)


def _rope_frequencies(size: int, theta: float, scaling: RopeScaling | None) -> Frequencies:
    frequency_K: Frequencies = theta ** (-np.arange(0, size, 2) / size)
    if scaling is None:
        return frequency_K
    unscaled_K = _unscaled_shares(scaling, frequency_K, size, theta)
    return frequency_K * (unscaled_K + (1 - unscaled_K) / scaling.factor)


def _unscaled_shares(
    scaling: RopeScaling, frequency_K: Frequencies, size: int, theta: float
) -> Frequencies:
    """Return the share of each frequency that is kept; the rest is divided by the factor.

    Low frequencies are scaled, high ones are kept, and a linear ramp connects them. Llama 3.1
    defines the ends of the ramp in turns per original length. YaRN (Peng et al. 2023, section 3.2)
    converts them to channels, as in its authors' code.
    """
    if scaling.kind == "linear":
        return np.zeros_like(frequency_K)
    assert scaling.original_length is not None, "the spec checks it"
    if scaling.kind == "llama3":
        turns_K = scaling.original_length * frequency_K / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        return np.clip((turns_K - low) / (high - low), 0.0, 1.0)
    circle = scaling.original_length / (2 * math.pi)
    turns = scaling.beta_fast, scaling.beta_slow
    first, last = (size * math.log(circle / turn) / (2 * math.log(theta)) for turn in turns)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    scaled_K = (np.arange(size // 2) - first) / ((last - first) or 0.001)
    unscaled_K: Frequencies = 1.0 - np.clip(scaled_K, 0.0, 1.0)
    return unscaled_K


class Drop(nnx.Module):
    """Dropout of a residual branch, with the kept values scaled up to preserve the mean.

    It drops single values (Srivastava et al. 2014), or the whole branch of an example (stochastic
    depth, Huang et al. 2016).
    """

    def __init__(self, rate: float, has_drop_path: bool, rngs: nnx.Rngs) -> None:
        self.rate = rate
        self.draw = rngs.dropout.fork() if rate or has_drop_path else None
        # nnx's train() and eval() set the attribute of this name.
        self.deterministic = False

    def __call__(self, x: Array, path_rate: Array | None = None) -> Array:
        """Drop values at the module's rate, and whole examples [B, ...] at `path_rate`."""
        if self.draw is None or self.deterministic:
            return x
        if self.rate:
            x = _drop_and_scale(x, 1.0 - self.rate, x.shape, self.draw())
        if path_rate is not None:
            path_shape = (x.shape[0], *[1] * (x.ndim - 1))
            x = _drop_and_scale(x, 1.0 - path_rate, path_shape, self.draw())
        return x


def _drop_and_scale(
    x: Array, keep_rate: float | Array, shape: tuple[int, ...], key: Array
) -> Array:
    is_kept = jax.random.bernoulli(key, keep_rate, shape)
    # In bfloat16 0.9 is 0.8984: dividing by that would make the mean of the kept values too large.
    scaled = (x.astype(jnp.float32) / jnp.asarray(keep_rate, jnp.float32)).astype(x.dtype)
    return jnp.where(is_kept, scaled, jnp.zeros((), x.dtype))


# --- stacks of equal layers -----------------------------------------------------------------------


def run_stack(
    apply: Callable[..., Array] | tuple[Callable[..., Array], ...],
    layers: Any,
    x: Array,
    *shared: PyTree,
    per_layer: tuple[PyTree, ...] = (),
    scanned: bool,
) -> Array:
    """Apply a stack of layers one after the other: x = apply(layer, x, *shared, *layer_inputs).

    A scan compiles one layer and keeps the residuals of its backward pass in arrays over all
    layers. Unrolled layers are slower to compile and faster to run.

    Args:
        apply: Function that applies a layer. Of several functions, layer i uses number i modulo
            their count. The body of a scan then holds as many layers as there are functions, and
            the layers that are left over follow the scan.
        layers: Module with stacked parameters, [layers, ...].
        x: Input of the first layer.
        shared: Further arguments, the same for all layers.
        per_layer: Further arguments, stacked [layers, ...].
        scanned: Whether to scan over the layers or to unroll them.

    Returns:
        The output of the last layer.
    """
    functions = apply if isinstance(apply, tuple) else (apply,)
    if scanned and len(functions) == 1:
        axes = (0, nnx.Carry, *[None] * len(shared), *[0] * len(per_layer))
        return nnx.scan(functions[0], in_axes=axes, out_axes=nnx.Carry)(
            layers, x, *shared, *per_layer
        )
    graph, state = nnx.split(layers)

    def apply_unrolled(x: Array, stacked: PyTree) -> tuple[Array, PyTree]:
        """Apply some layers; return x and the updated state of their random streams, stacked."""
        rng_states = []
        leaves, structure = jax.tree.flatten(stacked)
        for index, slices in enumerate(zip(*map(jnp.unstack, leaves), strict=True)):
            layer_state, layer_inputs = jax.tree.unflatten(structure, slices)
            layer = nnx.merge(graph, layer_state)
            x = functions[index % period](layer, x, *shared, *layer_inputs)
            rng_states.append(nnx.state(layer, nnx.RngState))
        return x, jax.tree.map(lambda *counts: jnp.stack(counts), *rng_states)

    stacked, period = (state, per_layer), len(functions)
    rounds = _stack_depth(state) // period if scanned else 0
    if not rounds:
        x, rng_state = apply_unrolled(x, stacked)
    else:
        by_round = jax.tree.map(
            lambda leaf: leaf[: rounds * period].reshape(rounds, period, *leaf.shape[1:]), stacked
        )
        x, rng_state = jax.lax.scan(apply_unrolled, x, by_round)
        rng_state = jax.tree.map(lambda counts: counts.reshape(-1, *counts.shape[2:]), rng_state)
        remaining = jax.tree.map(lambda leaf: leaf[rounds * period :], stacked)
        if _stack_depth(remaining):
            x, last_rng_state = apply_unrolled(x, remaining)
            rng_state = jax.tree.map(
                lambda *parts: jnp.concatenate(parts), rng_state, last_rng_state
            )
    # nnx.scan, above, updates the random streams in the same way.
    nnx.update(layers, rng_state)
    return x


def slice_stack(layers: Any, start: int, stop: int) -> Any:
    """Return the layers `start` to `stop - 1` of a stack."""
    graph, state = nnx.split(layers)
    if stop - start == _stack_depth(state):
        return layers
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[start:stop], state))


def _stack_depth(stacked: PyTree) -> int:
    return int(jax.tree.leaves(stacked)[0].shape[0])
