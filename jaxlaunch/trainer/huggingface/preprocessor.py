"""preprocessor_config.json: how transformers makes what a model of images reads of a picture.

Its means and deviations are of pixels times a factor, 1/255 by default; ours are of bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.spec import OfImages

FILE = "preprocessor_config.json"
BILINEAR = 2  # Pillow's number
FACTOR = 1 / 255


def pixels(text: str, where: str) -> dict[str, list[float] | None]:
    """`pixel_mean` and `pixel_std` by a file's text; neither where it names none. Raises SpecError."""
    try:
        given = json.loads(text)
        if not isinstance(given, dict):
            raise ValueError("it is not a block of keys, as transformers writes it")
        factor = float(given.get("rescale_factor", FACTOR)) if given.get("do_rescale", True) else 1.0
        if not given.get("do_normalize", True):
            given |= {"image_mean": [0.0], "image_std": [1.0]}
        if given.get("image_mean") is None or given.get("image_std") is None:
            return {}
        found = {ours: _numbers(given[key]) for ours, key in (("pixel_mean", "image_mean"), ("pixel_std", "image_std"))}
        if factor <= 0 or min(found["pixel_std"]) <= 0:
            raise ValueError("its rescale_factor and image_std must be above 0")
    except (ValueError, TypeError) as error:
        raise SpecError(f"{where} cannot be read: {error}") from None
    return {key: [each / factor for each in numbers] for key, numbers in found.items()}


def _numbers(given: Any) -> list[float]:
    found = [float(each) for each in (given if isinstance(given, list) else [given])]
    if not found or not all(map(math.isfinite, found)):
        raise ValueError(f"{given} is not a number for each channel")
    return found


def of_model(model: OfImages, found: Mapping[str, list[float] | None]) -> OfImages:
    """The model with these means and deviations. One number is that of every channel, as transformers reads it."""
    each = {key: (values or []) * (model.channels if len(values or []) == 1 else 1) for key, values in found.items()}
    return model.model_copy(update=each)


def written(model: OfImages, size: Sequence[int] | None, share: float) -> dict[str, Any] | None:
    """What an evaluation of ours does, in transformers' keys; `share` of a side is seen, in `size`, height and width.

    None where each image is standardized by itself, which transformers does not know.
    """
    if model.pixel_mean is None or model.pixel_std is None:
        return None
    keys: dict[str, Any] = {"do_rescale": True, "rescale_factor": FACTOR, "do_normalize": True}
    keys |= {"image_mean": [each * FACTOR for each in model.pixel_mean]}
    keys |= {"image_std": [each * FACTOR for each in model.pixel_std]}
    keys |= {"do_resize": size is not None, "resample": BILINEAR}
    if size is None:
        return {"image_processor_type": "ViTImageProcessor", **keys}
    sides = {"height": size[0], "width": size[1]}
    if size[0] != size[1]:  # it has no crop to the proportions of a size
        return {"image_processor_type": "ViTImageProcessor", **keys, "size": sides}
    keys |= {"size": {"shortest_edge": round(size[0] / share)}, "do_center_crop": True, "crop_size": sides}
    return {"image_processor_type": "BitImageProcessor", "do_convert_rgb": model.channels == 3, **keys}
