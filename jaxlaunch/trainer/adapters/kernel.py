"""A frozen kernel, in any dtype or in int8, and the adapter beside it, as a model's product meets them.

B batch, L length, I inputs, O outputs, R rank; I and O may be several axes.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer.models.layers import Drop, product
from jaxlaunch.trainer.parallel.sharding import constrain
from jaxlaunch.trainer.spec import Lora

OWN = "frozen_kernel"  # the attribute that holds what the model had: its parameter keeps its name


class FrozenKernel(nnx.Module):
    """x → x · kernel + scaling × (dropout(x) · A) · B in a model's place of `kernel`, of `inputs` axes; stacked over
    layers. Without a `lora` there is no adapter."""

    def __init__(
        self, kernel: nnx.Param[Array], inputs: int, lora: Lora | None, rngs: nnx.Rngs, *, is_int8: bool
    ) -> None:
        axes, whole = tuple(kernel.get_metadata()["axes"]), kernel[...]
        assert whole.ndim == 1 + len(axes), "a kernel is stacked over the layers"
        made, scale = quantized(whole, inputs) if is_int8 else (whole, None)
        self.frozen_kernel = nnx.Param(made, axes=axes)
        self.int8_scale = None if scale is None else nnx.Param(scale, axes=axes[inputs:])
        a, b = (None, None) if lora is None else _matrices(whole.shape, inputs, lora.rank, rngs)
        self.lora_a = None if a is None else nnx.Param(a, axes=(*axes[:inputs], "rank"))
        self.lora_b = None if b is None else nnx.Param(b, axes=("rank", *axes[inputs:]))
        self.scaling = 1.0 if lora is None else lora.scaling
        self.is_adapted = lora is not None  # False: the kernel alone, as a reference has it
        self.drop = None if lora is None or not lora.dropout else _drop(lora.dropout, rngs.split(whole.shape[0]))

    def __getitem__(self, where: Any) -> FrozenKernel:
        """Itself, where a model takes the array of its parameter to hand it to `layers.product`."""
        return self

    def product(self, x: Array, axes: int) -> Array:
        """x [B, L, I] times the kernel, and what the adapter adds: [B, L, O], in the dtype of x."""
        scale = None if self.int8_scale is None else self.int8_scale[...]
        made = frozen_product(x, self.frozen_kernel[...], scale, axes)
        if self.lora_a is None or self.lora_b is None or not self.is_adapted:
            return made
        dropped = x if self.drop is None else self.drop(x)
        low_BLR = constrain(product(dropped, self.lora_a[...], axes), "batch", "length", "rank")
        return made + self.scaling * product(low_BLR, self.lora_b[...])


def _matrices(shape: tuple[int, ...], inputs: int, rank: int, rngs: nnx.Rngs) -> tuple[Array, Array]:
    """A and B of a stacked kernel's adapter before the first step: drawn as peft draws A, and zeros."""
    layers, sizes_in, sizes_out = shape[0], shape[1 : 1 + inputs], shape[1 + inputs :]
    bound = 1 / math.sqrt(math.prod(sizes_in))  # of torch's nn.Linear
    a = jax.random.uniform(rngs.params(), (layers, *sizes_in, rank), jnp.float32, -bound, bound)
    return a, jnp.zeros((layers, rank, *sizes_out), jnp.float32)


def _drop(rate: float, rngs: nnx.Rngs) -> Drop:
    """Dropout that draws for each of the layers that `rngs` are split for."""
    drop: Drop = nnx.vmap(lambda rngs: Drop(rate, False, rngs))(rngs)
    return drop


def quantized(kernel: Array, inputs: int) -> tuple[Array, Array]:
    """A stacked kernel [layers, I, O] in int8, and the float32 factor of each output, [layers, O]: symmetric, so that
    the largest number of an output's column is 127."""
    wide = kernel.astype(jnp.float32)
    largest = jnp.abs(wide).max(tuple(range(1, 1 + inputs)), keepdims=True)
    scale = jnp.where(largest == 0, 1.0, largest / 127)
    return jnp.round(wide / scale).astype(jnp.int8), scale.reshape(scale.shape[0], *scale.shape[1 + inputs :])


def unquantized(kernel: Array, scale: Array, inputs: int) -> Array:
    """The inverse of `quantized` but for rounding, in float32."""
    return kernel.astype(jnp.float32) * jnp.expand_dims(scale, tuple(range(1, 1 + inputs)))


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def frozen_product(x: Array, kernel: Array, scale: Array | None, axes: int) -> Array:
    """x [B, L, I] times a kernel [I, O] of another dtype, and `scale` [O]: [B, L, O] in the dtype of x.

    No gradient of the kernel. The backward pass reads the kernel as it is stored: what a cast makes of it for a moment
    is kept nowhere, neither over the layers nor until then.
    """
    dtype = x.dtype
    # Of int8 the sums are up to 127 times a column's largest number too large: float16 does not hold them.
    wide = jnp.float32 if dtype == jnp.float16 and scale is not None else dtype
    made = jnp.tensordot(x, kernel.astype(dtype), axes, preferred_element_type=wide)
    return _scaled(made, scale).astype(dtype)


def _forward(x: Array, kernel: Array, scale: Array | None, axes: int) -> tuple[Array, Any]:
    return frozen_product(x, kernel, scale, axes), (kernel, scale)


def _backward(axes: int, kept: tuple[Array, Array | None], gradient: Array) -> tuple[Array, None, None]:
    kernel, scale = kept
    scaled = _scaled(gradient, scale)
    outputs = tuple(range(2, scaled.ndim)), tuple(range(axes, kernel.ndim))
    return jnp.tensordot(scaled, kernel.astype(scaled.dtype), outputs), None, None


frozen_product.defvjp(_forward, _backward)


def _scaled(made: Array, scale: Array | None) -> Array:
    return made if scale is None else (made.astype(jnp.float32) * scale[None, None]).astype(made.dtype)
