"""What training and evaluation see of an image: one function of the image and of the generator of its position.

H height, W width, C channels.
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy as np
from PIL import Image

from jaxlaunch.trainer.data.augment import colors, geometry
from jaxlaunch.trainer.data.augment.geometry import Box, Pixels, Size
from jaxlaunch.trainer.spec.vision.augment import Augment

PLAIN = Augment()


class Readable(Protocol):
    """An image that may not be decoded yet: a part of it is, in the size that is asked for."""

    size: Size

    def pixels(self, box: Box | None = None, size: Size | None = None, mirrored: bool = False) -> Pixels:
        """The part in `box`, or all of it, resized to `size`, left and right swapped: [H, W, C]."""
        ...


class Transform:
    """The pixels that a split sees of an image of `size`, or of the image's own where that is None.

    `draws`: whether it takes a generator, which every call then needs.
    """

    def __init__(self, augment: Augment | None, size: Size | None, split: Literal["train", "eval"]) -> None:
        self._asked, self._size = augment or PLAIN, size
        recipe = self._asked.model_copy(update={"eval_crop": 1.0, "preset": None, "ratio": PLAIN.ratio})
        self.draws = split == "train" and recipe != PLAIN
        self._share = self._asked.eval_crop if split == "eval" else 1.0

    def __call__(self, picture: Readable, rng: np.random.Generator | None = None) -> Pixels:
        """The pixels [H, W, C], in memory of their own where they are changed."""
        size = self._size or picture.size
        if rng is None or not self.draws:
            whole = self._share == 1.0 and size == picture.size
            return picture.pixels() if whole else picture.pixels(geometry.middle(picture.size, size, self._share), size)
        return self._changed(self._cut(picture, size, rng), rng)

    def _cut(self, picture: Readable, size: Size, rng: np.random.Generator) -> Pixels:
        if self._asked.crop is not None:
            box = geometry.random_crop(picture.size, self._asked.crop, self._asked.ratio, rng)
            return picture.pixels(box, size, self._is_flipped(rng))
        image = picture.pixels() if size == picture.size else picture.pixels(geometry.middle(picture.size, size), size)
        if most := self._asked.shift:
            down, right = (int(each) for each in rng.integers(-most, most + 1, size=2))
            image = geometry.shifted(image, down, right)
        return geometry.mirrored(image) if self._is_flipped(rng) else image

    def _is_flipped(self, rng: np.random.Generator) -> bool:
        return bool(self._asked.flip and rng.random() < self._asked.flip)

    def _changed(self, image: Pixels, rng: np.random.Generator) -> Pixels:
        asked = self._asked
        if asked.flip_vertical and rng.random() < asked.flip_vertical:
            image = image[::-1]
        if asked.randaugment or asked.augmix or asked.jitter:
            image = self._recolored(image, rng)
        image = np.ascontiguousarray(image)
        if asked.erase and rng.random() < asked.erase:
            image = image.copy()
            image[geometry.hole(image.shape[:2], rng)] = np.round(image.mean((0, 1))).astype(np.uint8)
        return image

    def _recolored(self, image: Pixels, rng: np.random.Generator) -> Pixels:
        """By the operations of Pillow, which take RGB and grey."""
        asked, picture = self._asked, Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        if asked.randaugment is not None:
            picture = colors.rand_augmented(picture, asked.randaugment, rng)
        if asked.augmix is not None:
            picture = colors.aug_mixed(picture, asked.augmix, rng)
        if asked.jitter is not None:
            picture = colors.jittered(picture, asked.jitter, rng)
        return np.asarray(picture).reshape(image.shape)
