"""Convolution and batch normalization of images.

B batch, Y and X places of an image, I channels in, O channels out, C channels.
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxlaunch.trainer.models.layers import weight

AXES = (None, None, None, "embed")  # of a kernel [Y, X, I, O]: under fsdp it is split by its channels out


class Convolution(nnx.Module):
    """A convolution without a bias, padded as PyTorch pads by half a kernel.

    Kernel of variance 2 / (outputs × places), as He et al. 2015 draw it by what goes out.
    """

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> None:
        self.kernel = weight(rngs, (size, size, inputs, outputs), AXES, std=(2 / (outputs * size**2)) ** 0.5)
        self.size, self.stride = size, stride

    def __call__(self, x_BYXI: Array) -> Array:
        kernel_YXIO = self.kernel[...]
        return convolved(x_BYXI.astype(kernel_YXIO.dtype), kernel_YXIO, self.stride, self.size // 2)


def convolved(x_BYXI: Array, kernel_YXIO: Array, stride: int, padding: int, groups: int = 1) -> Array:
    """x convolved with the kernel, by `groups` of channels, with so many zeros on each side."""
    made: Array = jax.lax.conv_general_dilated(
        x_BYXI,
        kernel_YXIO,
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )
    return made


class BatchNorm(nnx.Module):
    """x less the batch's mean, over its deviation, by channel, scaled and shifted; float32 inside.

    Evaluation, and training with `use_running_average`, take the running statistics, of which training replaces the
    share `momentum` with a batch's. Ioffe and Szegedy 2015.
    """

    def __init__(
        self, channels: int, eps: float, momentum: float, running_variance: Literal["unbiased", "biased"]
    ) -> None:
        self.scale = nnx.Param(jnp.ones(channels, jnp.float32), axes=("embed",))
        self.bias = nnx.Param(jnp.zeros(channels, jnp.float32), axes=("embed",))
        self.mean = nnx.BatchStat(jnp.zeros(channels, jnp.float32), axes=("embed",))
        self.variance = nnx.BatchStat(jnp.ones(channels, jnp.float32), axes=("embed",))
        self.eps, self.momentum, self.is_unbiased = eps, momentum, running_variance == "unbiased"
        self.use_running_average = False  # nnx's name, which eval() sets

    def __call__(self, x_BYXC: Array) -> Array:
        wide_BYXC = x_BYXC.astype(jnp.float32)
        if self.use_running_average:
            mean_C, variance_C = self.mean[...], self.variance[...]
        else:
            mean_C = wide_BYXC.mean((0, 1, 2))
            variance_C = jnp.square(wide_BYXC - mean_C[None, None, None, :]).mean((0, 1, 2))
            self._keep(mean_C, variance_C, x_BYXC.size // x_BYXC.shape[-1])
        scale_C = self.scale[...].astype(jnp.float32) * jax.lax.rsqrt(variance_C + self.eps)
        centred_BYXC = wide_BYXC - mean_C[None, None, None, :]
        shifted = centred_BYXC * scale_C[None, None, None, :] + self.bias[...].astype(jnp.float32)[None, None, None, :]
        return shifted.astype(x_BYXC.dtype)

    def _keep(self, mean_C: Array, variance_C: Array, count: int) -> None:
        """The running statistics after a batch of `count` numbers a channel."""
        if self.is_unbiased and count > 1:
            variance_C = variance_C * (count / (count - 1))
        for kept, new_C in ((self.mean, mean_C), (self.variance, variance_C)):
            kept[...] = (1.0 - self.momentum) * kept[...] + self.momentum * jax.lax.stop_gradient(new_C)
