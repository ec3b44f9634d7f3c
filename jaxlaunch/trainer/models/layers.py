"""Options, layers and stacks of equal layers for all models.

Parameters name their axes. Activations take the dtype of the weights.

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
    """The options of a model's computation and loss. Its sizes are in its own block of the spec."""

    attention: str = "auto"
    remat: Remat = "none"
    output: jnp.dtype = jnp.dtype("float32")  # of the logits
    loss: Loss = Loss()

    @classmethod
    def from_spec(cls, spec: TrainSpec) -> ModelOptions:
        """Return the options that a train block asks for."""
        output = precision.resolve_precision(spec.precision).output
        return cls(spec.attention, spec.remat, output, spec.loss)


DEFAULT_OPTIONS = ModelOptions()


def init_weight(rngs: nnx.Rngs, shape: tuple[int, ...], axes: Axes, std: float) -> nnx.Param[Array]:
    """Return a float32 parameter, normal with deviation `std`, with named axes."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes=axes)


def init_bias(shape: tuple[int, ...], axes: Axes) -> nnx.Param[Array]:
    """Return a float32 parameter of zeros, its axes named for sharding."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes)


def gather_sequence(x_BLD: Array) -> Array:
    """Put all positions of an example of the stream on one device, as products over mp read it."""
    return constrain(x_BLD, "batch", "length", "embed")


def split_sequence(x_BLD: Array) -> Array:
    """Split the positions over mp, so that each device keeps its part of the sum.

    Norms, dropout and what remat keeps are then split too. Korthikanti et al. 2022, "sequence
    parallelism".
    """
    return constrain(x_BLD, "batch", "sequence", "embed")


class Kernel(Protocol):
    """A kernel with an adapter, in place of an array in `product`."""

    def product(self, x: Array, axes: int, /) -> Array:
        """Multiply like the function of this name, without a bias."""


def apply_kernel(
    x: Array, kernel: Array | Kernel, axes: int = 1, bias: nnx.Param[Array] | None = None
) -> Array:
    """Multiply x [B, L, ..., I] with kernel [I, ..., O] over `axes` axes, and add a bias.

    On CPU devices B and L are merged for the product: the kernel's gradient would sum over two
    axes, for which XLA's CPU compiler transposes its operand in memory. On other devices they stay
    apart: if the rows of a sum over mp are one axis, XLA's GPU compiler emits an all-reduce instead
    of a reduce-scatter along L.
    """
    if isinstance(kernel, Array):
        rows = x.reshape(-1, *x.shape[2:]) if platform() == "cpu" else x
        outputs = jnp.tensordot(rows, kernel, axes).reshape(*x.shape[:-axes], *kernel.shape[axes:])
    else:
        outputs = kernel.product(x, axes)
    return outputs if bias is None else outputs + bias[...][None, None]


def platform() -> str:
    """Return the platform that a trace is compiled for: cpu, gpu or tpu; cpu without a mesh."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "cpu" if device is None else str(device.platform)


def recompute_in_backward(function: Callable[..., Array]) -> Callable[..., Array]:
    """Recompute `function`, elementwise or a norm, from its arguments in the backward pass.

    The arguments are in memory in any case; the intermediates, some in float32, need not be.
    """
    return jax.checkpoint(function, prevent_cse=False)


def gated_activation(activation: Callable[[Array], Array], gate: Array, up: Array) -> Array:
    """Return the input of the last product of a gated MLP: activation(gate) * up."""
    return recompute_in_backward(lambda gate, up: activation(gate) * up)(gate, up)


class Linear(nnx.Module):
    """x_BI -> x · kernel + bias. Variance 2 / inputs (He et al. 2015, for ReLUs)."""

    def __init__(self, inputs: int, outputs: int, axes: tuple[str, str], rngs: nnx.Rngs) -> None:
        self.kernel = init_weight(rngs, (inputs, outputs), axes, std=(2 / inputs) ** 0.5)
        self.bias = init_bias((outputs,), axes[1:])

    def __call__(self, x_BI: Array) -> Array:
        """Return the outputs, [B, O]."""
        kernel_IO = self.kernel[...]
        return x_BI.astype(kernel_IO.dtype) @ kernel_IO + self.bias[...][None, :]


class RMSNorm(nnx.Module):
    """x over its root mean square along its last axes, times a scale; float32 inside.

    `from_one`: times 1 + scale, which starts at 0 and is added in float32. Zhang and Sennrich 2019.
    """

    def __init__(
        self, shape: Shape, eps: float, axes: Axes = ("embed",), *, from_one: bool = False
    ) -> None:
        start = jnp.zeros if from_one else jnp.ones
        self.scale = nnx.Param(start(shape, jnp.float32), axes=axes)
        self.eps, self.from_one = eps, from_one

    def __call__(self, x: Array) -> Array:
        """Normalize x along its last axes."""
        normalize = partial(_root_mean_square, eps=self.eps, from_one=self.from_one)
        return recompute_in_backward(normalize)(x, self.scale[...])


def _root_mean_square(x: Array, scale: Array, eps: float, *, from_one: bool) -> Array:
    axes, wide = tuple(range(-scale.ndim, 0)), x.astype(jnp.float32)
    scale = scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
    normal = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=axes, keepdims=True) + eps)
    if from_one:
        return (normal * (1.0 + scale.astype(jnp.float32))).astype(x.dtype)
    return normal.astype(x.dtype) * scale


class LayerNorm(nnx.Module):
    """x less its mean over its deviation, scaled and shifted; float32 inside. Ba et al. 2016."""

    def __init__(self, width: int, eps: float) -> None:
        self.scale = nnx.Param(jnp.ones(width, jnp.float32), axes=("embed",))
        self.bias = init_bias((width,), ("embed",))
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Normalize x along its last axis."""
        normalize = partial(_layer_norm, eps=self.eps)
        return recompute_in_backward(normalize)(x, self.scale[...], self.bias[...])


def _layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
    wide, last = x.astype(jnp.float32), (1,) * (x.ndim - 1) + (-1,)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normal = (centred * jax.lax.rsqrt(variance + eps)).astype(x.dtype)
    return normal * scale.reshape(last) + bias.reshape(last)


def gelu(x: Array) -> Array:
    """Return the exact GELU, float32 inside. Hendrycks and Gimpel 2016.

    By erf, not by erfc as in jax.nn: a polynomial without cases, at a small share of erfc's cost on
    a CPU.
    """
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1.0 + jax.lax.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def apply_rope(
    x_BLHK: Array, theta: float, scaling: RopeScaling | None = None, places_BL: Array | None = None
) -> Array:
    """Rotate the channel pairs (k, k + K/2) by position. Su et al. 2021, section 3.4.2."""
    length, size = x_BLHK.shape[1], x_BLHK.shape[3]
    frequency_K = jnp.asarray(_rope_frequencies(size, theta, scaling), jnp.float32)
    places_BL = jnp.arange(length)[None, :] if places_BL is None else places_BL
    angle_BLK = places_BL.astype(jnp.float32)[:, :, None] * frequency_K[None, None, :]
    cos, sin = jnp.cos(angle_BLK)[:, :, None, :], jnp.sin(angle_BLK)[:, :, None, :]
    first, second = jnp.split(x_BLHK.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    if scaling is not None and scaling.kind == "yarn":
        growth = 0.1 * math.log(max(scaling.factor, 1.0))
        turned = turned * (scaling.attention_factor or growth + 1.0)
    return turned.astype(x_BLHK.dtype)


def _rope_frequencies(size: int, theta: float, scaling: RopeScaling | None) -> Frequencies:
    frequency_K: Frequencies = theta ** (-np.arange(0, size, 2) / size)
    if scaling is None:
        return frequency_K
    unscaled_K = _unscaled_share(scaling, frequency_K, size, theta)
    return frequency_K * (unscaled_K + (1 - unscaled_K) / scaling.factor)


def _unscaled_share(
    scaling: RopeScaling, frequency_K: Frequencies, size: int, theta: float
) -> Frequencies:
    """Return the share of each frequency that is not stretched, by Llama 3.1 or YaRN.

    Peng et al. 2023 (YaRN), section 3.2, with the ends of the ramp in channels, as their code has
    them.
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
    """Dropout of a residual branch, scaled up to the same mean.

    It drops single numbers (Srivastava et al. 2014), or all of an example's branch (stochastic
    depth, Huang et al. 2016).
    """

    def __init__(self, rate: float, has_paths: bool, rngs: nnx.Rngs) -> None:
        self.rate = rate
        self.draw = rngs.dropout.fork() if rate or has_paths else None
        self.deterministic = False  # nnx's name for evaluation

    def __call__(self, x: Array, path: Array | None = None) -> Array:
        """Drop numbers of the branch, and the whole branch for the share `path`."""
        if self.draw is None or self.deterministic:
            return x
        if self.rate:
            x = _drop_and_scale(x, 1.0 - self.rate, x.shape, self.draw())
        if path is not None:
            x = _drop_and_scale(x, 1.0 - path, (x.shape[0], *[1] * (x.ndim - 1)), self.draw())
        return x


def _drop_and_scale(x: Array, share: float | Array, shape: tuple[int, ...], key: Array) -> Array:
    is_kept = jax.random.bernoulli(key, share, shape)
    # In bfloat16 0.9 is 0.8984: dividing by that would make the mean of the kept numbers too large.
    scaled = (x.astype(jnp.float32) / jnp.asarray(share, jnp.float32)).astype(x.dtype)
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
    """Apply `x = apply(layer, x, *shared, *slices)` to each layer and its `per_layer`.

    The parameters of the layers are stacked: [layers, ...]. A scan compiles one layer and keeps the
    residuals of its backward pass in arrays over all layers. Unrolled layers are slower to compile
    and faster to run.

    Several functions take turns over the layers. A scan then has as many layers in its body, and
    the remaining layers follow it.
    """
    turns = apply if isinstance(apply, tuple) else (apply,)
    if scanned and len(turns) == 1:
        axes = (0, nnx.Carry, *[None] * len(shared), *[0] * len(per_layer))
        return nnx.scan(turns[0], in_axes=axes, out_axes=nnx.Carry)(layers, x, *shared, *per_layer)
    graph, state = nnx.split(layers)

    def apply_unrolled(x: Array, stacked: PyTree) -> tuple[Array, PyTree]:
        """Return x after some layers, and the state of their random streams, stacked."""
        drawn = []
        leaves, structure = jax.tree.flatten(stacked)
        for index, slices in enumerate(zip(*map(jnp.unstack, leaves), strict=True)):
            own_state, layer_inputs = jax.tree.unflatten(structure, slices)
            layer = nnx.merge(graph, own_state)
            x = turns[index % len(turns)](layer, x, *shared, *layer_inputs)
            drawn.append(nnx.state(layer, nnx.RngState))
        return x, jax.tree.map(lambda *counts: jnp.stack(counts), *drawn)

    stacked = state, per_layer
    rounds = _stack_depth(state) // len(turns) if scanned else 0
    if not rounds:
        x, drawn = apply_unrolled(x, stacked)
    else:
        # Scan over rounds of all turns, then run the remaining layers.
        by_round = jax.tree.map(
            lambda leaf: leaf[: rounds * len(turns)].reshape(rounds, len(turns), *leaf.shape[1:]),
            stacked,
        )
        x, drawn = jax.lax.scan(apply_unrolled, x, by_round)
        drawn = jax.tree.map(lambda counts: counts.reshape(-1, *counts.shape[2:]), drawn)
        remaining = jax.tree.map(lambda leaf: leaf[rounds * len(turns) :], stacked)
        if _stack_depth(remaining):
            x, last = apply_unrolled(x, remaining)
            drawn = jax.tree.map(lambda *parts: jnp.concatenate(parts), drawn, last)
    # A scan leaves the random streams in this state, too.
    nnx.update(layers, drawn)
    return x


def slice_stack(layers: Any, start: int, stop: int) -> Any:
    """Return the layers from `start` to `stop` of a stack."""
    graph, state = nnx.split(layers)
    if stop - start == _stack_depth(state):
        return layers
    return nnx.merge(graph, jax.tree.map(lambda leaf: leaf[start:stop], state))


def _stack_depth(stacked: PyTree) -> int:
    return int(jax.tree.leaves(stacked)[0].shape[0])
