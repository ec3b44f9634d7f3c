"""Images that a source has as arrays, augmented: records, and what tensorflow-datasets prepared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from jaxlaunch.trainer.data.augment import geometry
from jaxlaunch.trainer.data.augment.geometry import Box, Pixels, Size
from jaxlaunch.trainer.data.augment.transform import Transform
from jaxlaunch.trainer.data.examples import Unusable
from jaxlaunch.trainer.data.source import DataSource, Source, as_data_source, name_of


class Held:
    """An image in memory: uint8 [H, W, C], of one channel or three."""

    def __init__(self, image: Any) -> None:
        array = np.asarray(image)
        array = array[..., None] if array.ndim == 2 else array
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[-1] not in (1, 3):
            raise Unusable(
                f"an image of {array.dtype}{list(array.shape)}; data.augment and data.size take uint8 [H, W, C] of one "
                "channel or three"
            )
        self._image: Pixels = array
        self.size: Size = (array.shape[0], array.shape[1])

    def pixels(self, box: Box | None = None, size: Size | None = None, mirrored: bool = False) -> Pixels:
        """The part in `box`, or all of it, resized to `size`, bilinear with antialiasing, left and right swapped."""
        top, left, high, wide = (0, 0, *self.size) if box is None else box
        if size is None or (top, left, high, wide) == (0, 0, *size):
            return geometry.mirrored(self._image) if mirrored else self._image
        picture = Image.fromarray(self._image[..., 0] if self._image.shape[-1] == 1 else self._image)
        part = (left, top, left + wide, top + high)
        resized = picture.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=part)
        if mirrored:
            resized = resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.asarray(resized).reshape(*size, self._image.shape[-1])


class Augmented(DataSource):
    """A source whose examples have an `image`, seen through a transform."""

    def __init__(self, source: Source, transform: Transform) -> None:
        self._source, self._transform = as_data_source(source), transform
        self.name = name_of(source)
        self.may_draw = self.takes_rng = transform.draws

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        raw = self._source[index]
        if "image" not in raw:
            raise Unusable(f"no image, which data.augment and data.size are of; it has {', '.join(sorted(raw))}")
        image = self._transform(Held(raw["image"]), rng)
        return {**raw, "image": image if np.ndim(raw["image"]) == 3 else image[..., 0]}

    @property
    def about(self) -> Mapping[str, Any]:
        """That of the source."""
        return self._source.about

    def fingerprint(self) -> str:
        """That of the source: augmentation may change when a run resumes, and is then said."""
        return self._source.fingerprint()
