"""The model and the image size that `launcher data` proposes for a folder of images.

The proposal is a starting point that trains on one device: a residual network whose strides fit the
size of the images, and whose number of parameters fits the number of images.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data.augment import Size

# Sides that are proposed for images of different or large sizes. The largest side that does not
# enlarge the median image is used, because enlarging adds no information.
SIDES = (32, 48, 64, 96, 128, 160, 192, 224)
# Equal images of up to this many pixels keep their size and their proportions.
MAX_EXACT_PIXELS = 256 * 256
# Below this side, the feature maps after a stem of stride 4 would be too small.
SMALL_SIDE = 64
# The feature maps of the last stage have at least this side.
MIN_FEATURE_SIDE = 4
# Modes of Pillow without colour.
GREY_MODES = frozenset({"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"})
# Numbers of images from which a deeper, a wider, and a published large network is proposed.
DEEP_IMAGES, WIDE_IMAGES, LARGE_IMAGES = 1_000, 20_000, 200_000
# From this number of classes a wider network is proposed.
MANY_CLASSES = 50
# An epoch has at least this many steps, unless the batch would be smaller than MIN_BATCH.
MIN_STEPS_PER_EPOCH, MIN_BATCH, DEFAULT_BATCH = 8, 8, 128


def propose_size(sizes_N2: npt.NDArray[Any]) -> Size:
    """Return the height and width to train on. `sizes_N2` are those of all images, at least one."""
    height, width = map(int, sizes_N2[0])
    if (sizes_N2 == sizes_N2[0]).all() and height * width <= MAX_EXACT_PIXELS:
        return height, width
    short = int(np.median(sizes_N2.min(1)))
    side = max((side for side in SIDES if side <= short), default=short)
    return side, side


def propose_model(size: Size, images: int, classes: int, channels: int) -> dict[str, Any]:
    """Return the model block for `images` training images of `size`."""
    short, is_wide = min(size), images >= WIDE_IMAGES or classes >= MANY_CLASSES
    shared_keys = {"classes": classes, **({} if channels == 3 else {"channels": channels})}
    if short >= SMALL_SIDE:
        if images >= LARGE_IMAGES or is_wide:
            preset = "resnet-50" if images >= LARGE_IMAGES else "resnet-18"
            return {"kind": "resnet", "preset": preset, **shared_keys}
        depth, widths = (2 if images >= DEEP_IMAGES else 1), [32, 64, 128, 256]
        return {
            "kind": "resnet",
            "stem_width": widths[0],
            "depths": [depth] * 4,
            "widths": widths,
            **shared_keys,
        }
    # The shape of ResNet-20, which has three stages for 32 pixels (He et al. 2016, section 4.2).
    # Each stage except the first halves the sides.
    stages = sum(short >= MIN_FEATURE_SIDE << stage for stage in range(3)) or 1
    depth, width = (3 if images >= DEEP_IMAGES else 1), (64 if is_wide else 16)
    return {
        "kind": "resnet",
        "stem": "small",
        "stem_width": width,
        "depths": [depth] * stages,
        "widths": [width << stage for stage in range(stages)],
        **shared_keys,
    }


def propose_training(
    sizes_N2: npt.NDArray[Any], modes: Collection[str], images: int, classes: int
) -> dict[str, Any]:
    """Return the keys of a train block: `model`, `data` with size and channels, perhaps `batch`.

    Args:
        sizes_N2: Height and width of each image that can be decoded; may be empty.
        modes: Pillow's modes of these images.
        images: Number of training images.
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
