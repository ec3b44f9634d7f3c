"""The model and the size of images that `launcher data` proposes for a folder of images.

The proposal is a place to start that trains on one device: a residual network whose strides fit the
images, with as many parameters as so many images can determine.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data.augment import Size

# Sides that are proposed for images of several or large sizes. Images are rarely enlarged: the
# pixels that a network would see more of are not in the file.
SIDES = (32, 48, 64, 96, 128, 160, 192, 224)
# Equal images of up to this many pixels keep their size and their proportions.
MAX_EXACT_PIXELS = 256 * 256
# Below this side, a stem of stride 4 would leave too few places.
SMALL_SIDE = 64
# The last stage sees a side of at least this many places.
MIN_PLACES = 4
# Modes of Pillow without colour.
GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"})
# Images of the training from which a deeper, a wider and a published large network is proposed.
DEEP_IMAGES, WIDE_IMAGES, LARGE_IMAGES = 1_000, 20_000, 200_000
# Many classes need more features.
MANY_CLASSES = 50
# A pass over the training set takes at least this many steps, with a batch of at least the other.
MIN_STEPS_PER_EPOCH, MIN_BATCH, DEFAULT_BATCH = 8, 8, 128


def propose_size(sizes_N2: npt.NDArray[Any]) -> Size:
    """Return the height and width to train on, from those of all images, [N, 2] with N above 0."""
    height, width = map(int, sizes_N2[0])
    if (sizes_N2 == sizes_N2[0]).all() and height * width <= MAX_EXACT_PIXELS:
        return height, width
    short = int(np.median(sizes_N2.min(1)))
    side = max((side for side in SIDES if side <= short), default=short)
    return side, side


def propose_model(size: Size, images: int, classes: int, channels: int) -> dict[str, Any]:
    """Return the model block for so many training images of a size and number of channels."""
    short, is_wide = min(size), images >= WIDE_IMAGES or classes >= MANY_CLASSES
    about = {"classes": classes, **({} if channels == 3 else {"channels": channels})}
    if short >= SMALL_SIDE:
        if images >= LARGE_IMAGES or is_wide:
            preset = "resnet-50" if images >= LARGE_IMAGES else "resnet-18"
            return {"kind": "resnet", "preset": preset, **about}
        depth, widths = (2 if images >= DEEP_IMAGES else 1), [32, 64, 128, 256]
        return {
            "kind": "resnet",
            "stem_width": widths[0],
            "depths": [depth] * 4,
            "widths": widths,
            **about,
        }
    # As ResNet-20 for 32 pixels (He et al. 2016, section 4.2); each stage but the first halves the
    # sides.
    stages = sum(short >= MIN_PLACES << stage for stage in range(3)) or 1
    depth, width = (3 if images >= DEEP_IMAGES else 1), (64 if is_wide else 16)
    return {
        "kind": "resnet",
        "stem": "small",
        "stem_width": width,
        "depths": [depth] * stages,
        "widths": [width << stage for stage in range(stages)],
        **about,
    }


def propose_training(
    sizes_N2: npt.NDArray[Any], modes: Collection[str], images: int, classes: int
) -> dict[str, Any]:
    """Return the keys of a train block: `model`, `data` with size and channels, perhaps `batch`.

    Args:
        sizes_N2: Height and width of each image that can be decoded; may be empty.
        modes: Pillow's modes of these images.
        images: Number of images to train on.
        classes: Number of classes.
    """
    if not len(sizes_N2):
        return {"model": {"classes": classes}, "data": {}}
    size, is_grey = propose_size(sizes_N2), all(mode in GREY_MODES for mode in modes)
    height, width = size
    data: dict[str, Any] = {"size": height if height == width else list(size)}
    if is_grey:
        data["channels"] = 1
    model = propose_model(size, images, classes, 1 if is_grey else 3)
    proposal: dict[str, Any] = {"model": model, "data": data}
    batch = MIN_BATCH
    while batch < DEFAULT_BATCH and 2 * batch * MIN_STEPS_PER_EPOCH <= images:
        batch *= 2
    return proposal if batch == DEFAULT_BATCH else {**proposal, "batch": batch}
