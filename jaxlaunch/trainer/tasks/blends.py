"""Images of a batch blended with each other, on the device: mixup and CutMix. Functions of the step's random key.

Each image is blended with that in its place in the reversed batch, in one share for the whole batch.
B batch, Y and X places of an image.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.spec import Loss


def blended(images: Array, label: Array, rng: Array, block: Loss) -> tuple[Array, Array, Array]:
    """The blended images, the share that they have of their own label, and the labels [B, ...] of what is blended in.

    With both kinds a step draws one of them. Raises SpecError for CutMix of what has no height and width.
    """
    other = label[::-1]
    if not block.cutmix:
        return *mixed(images, jax.random.beta(rng, block.mixup, block.mixup)), other
    if images.ndim < 3:
        raise SpecError(f"train.loss.cutmix pastes a part of an image, and the examples have shape {images.shape[1:]}")
    of_share, of_place, of_kind = jax.random.split(rng, 3)
    place = jax.random.uniform(of_place, (2,))
    cut = pasted(images, jax.random.beta(of_share, block.cutmix, block.cutmix), place)
    if not block.mixup:
        return *cut, other
    mix = mixed(images, jax.random.beta(of_share, block.mixup, block.mixup))
    is_cut = jax.random.bernoulli(of_kind)
    return *(jnp.where(is_cut, one, two) for one, two in zip(cut, mix, strict=True)), other  # type: ignore[return-value]


def mixed(images: Array, share: Array) -> tuple[Array, Array]:
    """share × image + (1 - share) × its partner, and the share. Zhang et al. 2018, "mixup"."""
    return share * images + (1.0 - share) * images[::-1], share


def pasted(images_BYX: Array, share: Array, place: Array) -> tuple[Array, Array]:
    """Images with a rectangle of their partner, of 1 - share of the area, and the share that is left of their own.

    `place` is the middle of the rectangle, as shares of height and width; what lies outside is cut off.
    Yun et al. 2019, "CutMix".
    """
    side = jnp.sqrt(1.0 - share)
    inside = []
    for axis, at in ((1, place[0]), (2, place[1])):
        size = images_BYX.shape[axis]
        middle, half = jnp.floor(at * size), jnp.floor(0.5 * side * size)
        first, last = jnp.maximum(middle - half, 0.0), jnp.minimum(middle + half, size)
        places = jnp.arange(size, dtype=jnp.float32)
        inside.append((places >= first) & (places < last))
    is_pasted_YX = inside[0][:, None] & inside[1][None, :]
    shape = (1, *is_pasted_YX.shape, *[1] * (images_BYX.ndim - 3))
    return jnp.where(is_pasted_YX.reshape(shape), images_BYX[::-1], images_BYX), 1.0 - is_pasted_YX.mean()
