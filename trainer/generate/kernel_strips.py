"""Kernels cut into strips of outputs, which a CPU multiplies with few rows at up to twice the speed.

A product of few rows reads each weight once. XLA's CPU kernels (YNNPACK, jaxlib 0.10) then walk down a strip of a
kernel [D, O], a cache line out of every row of O numbers; strips that lie by themselves are read from end to end.
Measured on one core with the kernels of a decoder of width 512: 27 ms as they are, 15 in strips for 8 rows, 15 and 9
for 2, 8 and 7 for 1. Many rows are worth the copy that puts a kernel together again.

R rows, D inputs, O outputs, S strips, W outputs of a strip.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

WIDTH = 16  # outputs of a strip: float32 numbers of a cache line
FEW = 32  # rows up to which strips are faster


def helps(device: jax.Device, dtype: jnp.dtype) -> bool:
    """Whether to cut kernels of this dtype on this device."""
    return bool(device.platform == "cpu" and dtype == jnp.float32)


def fits(outputs: Sequence[int]) -> bool:
    """Whether a kernel of so many outputs, over all of their axes, is a number of whole strips."""
    return math.prod(outputs) % WIDTH == 0


def cut(kernel_DO: Array) -> Array:
    """The kernel in strips, kernel_SDW."""
    return kernel_DO.reshape(len(kernel_DO), -1, WIDTH).swapaxes(0, 1)


def whole(stored: Array) -> Array:
    """kernel_DO, of the kernel that was cut; what has no three axes was not, and is itself."""
    return stored if stored.ndim != 3 else _joined(stored)


def _joined(kernel_SDW: Array) -> Array:
    return kernel_SDW.swapaxes(0, 1).reshape(kernel_SDW.shape[1], -1)


def product(x_RD: Array, kernel_SDW: Array) -> Array:
    """x times the kernel that was cut, [R, O]."""
    if len(x_RD) > FEW:
        return x_RD @ _joined(kernel_SDW)
    # Each strip has its own copy of x: a product of which only one side has several matrices, XLA turns into one with a
    # kernel put together.
    copies_SRD = jnp.broadcast_to(x_RD[None], (len(kernel_SDW), *x_RD.shape))
    made_SRW = jnp.matmul(copies_SRD, kernel_SDW)
    return made_SRW.swapaxes(0, 1).reshape(len(x_RD), -1)
