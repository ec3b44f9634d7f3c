"""Which part of an image is taken, and where it lies. Pure functions of numbers drawn from a generator.

H height, W width, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
Size = tuple[int, int]  # height and width
Box = tuple[float, float, float, float]  # top, left, height and width
TRIES = 10  # of a rectangle that does not fit


def random_crop(whole: Size, area: Sequence[float], ratio: Sequence[float], rng: np.random.Generator) -> Box:
    """A box of a share of the area from `area` and a width / height from `ratio`, anywhere in the image.

    Where none fits, the largest in the middle whose ratio is allowed. Szegedy et al. 2015, as torchvision draws it.
    """
    height, width = whole
    for _ in range(TRIES):
        wanted = height * width * rng.uniform(area[0], area[1])
        shape = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        wide, high = round(math.sqrt(wanted * shape)), round(math.sqrt(wanted / shape))
        if 0 < wide <= width and 0 < high <= height:
            return int(rng.integers(height - high + 1)), int(rng.integers(width - wide + 1)), high, wide
    return _allowed(whole, ratio)


def _allowed(whole: Size, ratio: Sequence[float]) -> Box:
    height, width = whole
    shape = min(max(width / height, ratio[0]), ratio[1])
    high, wide = min(height, max(1, round(width / shape))), min(width, max(1, round(height * shape)))
    return (height - high) // 2, (width - wide) // 2, high, wide


def middle(whole: Size, size: Size, share: float = 1.0) -> Box:
    """The largest box in the middle of `whole` that has the proportions of `size`, and of its sides this share."""
    scale = share * min(whole[0] / size[0], whole[1] / size[1])
    high, wide = size[0] * scale, size[1] * scale
    return (whole[0] - high) / 2, (whole[1] - wide) / 2, high, wide


def shifted(image: Pixels, down: int, right: int) -> Pixels:
    """The image so many pixels further down and to the right, either of which may be negative, zeros behind it.

    As a crop out of an image with a border of zeros.
    """
    height, width = image.shape[:2]
    moved = np.zeros_like(image)
    rows, columns = slice(max(down, 0), height + min(down, 0)), slice(max(right, 0), width + min(right, 0))
    moved[rows, columns] = image[max(-down, 0) : height - max(down, 0), max(-right, 0) : width - max(right, 0)]
    return moved


def mirrored(image: Pixels) -> Pixels:
    """The image [H, W, C] with left and right swapped, in memory of its own: a channel at a time, NumPy's fastest."""
    swapped = np.empty_like(image)
    for channel in range(image.shape[-1]):
        swapped[..., channel] = image[:, ::-1, channel]
    return swapped


def hole(
    whole: Size, rng: np.random.Generator, area: Any = (0.02, 0.33), ratio: Any = (0.3, 3.3)
) -> tuple[slice, slice]:
    """Rows and columns of a rectangle to erase, smaller than the image; none where none fits. Zhong et al. 2020."""
    height, width = whole
    for _ in range(TRIES):
        wanted = height * width * rng.uniform(*area)
        shape = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        high, wide = round(math.sqrt(wanted * shape)), round(math.sqrt(wanted / shape))
        if high < height and wide < width:
            top, left = int(rng.integers(height - high + 1)), int(rng.integers(width - wide + 1))
            return slice(top, top + high), slice(left, left + wide)
    return slice(0), slice(0)
