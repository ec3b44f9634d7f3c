"""JAX implementations of torch operators for which torchax has no rule.

E experts, N rows, I inputs, O outputs.
"""

from __future__ import annotations

import functools
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
    environment.override_op_definition(
        torch.ops.aten._grouped_mm.default, functools.partial(interop.call_jax, grouped_product)
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
