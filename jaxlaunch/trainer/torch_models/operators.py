"""JAX implementations of torch operators whose rules in torchax are missing or wrong.

E experts, N rows, I inputs, O outputs, B batch, C channels, L length, K size of a kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


@functools.cache
def register_operators() -> None:
    """Register the operators with torchax, once in a process."""
    import torch
    import torchax
    from torchax import interop

    environment = torchax.default_env()
    aten = torch.ops.aten
    convolve = environment._ops[aten.convolution].func
    implementations = {
        aten._grouped_mm.default: grouped_product,
        aten.convolution.default: functools.partial(depthwise_convolution, convolve),
    }
    for operator, implementation in implementations.items():
        environment.override_op_definition(
            operator, functools.partial(interop.call_jax, implementation)
        )


def grouped_product(
    x_NI: Array,
    weights_EIO: Array,
    offs: Array | None = None,
    bias: Any = None,
    out_dtype: Any = None,
) -> Array:
    """Multiply each group of rows with the matrix of its expert; `offs` [E] are their ends."""
    if offs is None or bias is not None:
        raise NotImplementedError("torch._grouped_mm is supported with offs and without a bias")
    sizes_E = jnp.diff(offs, prepend=0).astype(jnp.int32)
    product: Array = jax.lax.ragged_dot(x_NI, weights_EIO, sizes_E)
    return product


def depthwise_convolution(
    convolve: Callable[..., Array],
    x_BCL: Array,
    weight_C1K: Array,
    bias_C: Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *options: Any,
) -> Array:
    """Compute torch's convolution; one along a sequence, channel by channel, as a sum of products.

    With jaxlib 0.10.2 the gradient of the weight of such a convolution in the layers of Mamba was
    wrong by its whole size on a mesh. `convolve`, torchax's rule, computes all other convolutions.
    """
    is_depthwise = x_BCL.ndim == 3 and weight_C1K.shape[:2] == (x_BCL.shape[1], 1)
    is_plain = [*stride, *dilation, *options[:1]] == [1, 1, False]
    if not (is_depthwise and is_plain):
        return convolve(x_BCL, weight_C1K, bias_C, stride, padding, dilation, *options)
    padded_BCL = jnp.pad(x_BCL, ((0, 0), (0, 0), (padding[0], padding[0])))
    size = weight_C1K.shape[-1]
    length = padded_BCL.shape[-1] - size + 1
    product_BCL = jnp.zeros((*x_BCL.shape[:2], length), x_BCL.dtype)
    for tap in range(size):
        product_BCL += weight_C1K[None, :, 0, tap, None] * padded_BCL[..., tap : tap + length]
    return product_BCL if bias_C is None else product_BCL + bias_C[None, :, None]
