"""The digits that scikit-learn contains, as a tensorflow-datasets builder: 1,797 images.

The split is fixed: every fifth image, beginning with the first, is held out (360), and the other
1,437 are trained on. Neighbouring images are often by the same writer, so the test split measures
generalization to new images, not to new writers. tensorflow-datasets requires a package for each
builder, with a module named after it.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import tensorflow_datasets as tfds
from PIL import Image

# Every fifth image is held out.
HELD_OUT_PERIOD = 5
# Largest value of a pixel in scikit-learn's copy.
MAX_VALUE = 16


class Builder(tfds.core.GeneratorBasedBuilder):  # type: ignore[misc]  # untyped in tensorflow-datasets
    """`image` uint8 [8, 8, 1], 0 to 255, stored as PNG; `label` 0 to 9."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES: ClassVar[dict[str, str]] = {"1.0.0": "Every fifth image is held out."}

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Optical recognition of handwritten digits: the test set of the UCI "
            "archive's collection.",
            features=tfds.features.FeaturesDict(
                {
                    "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
                    "label": tfds.features.ClassLabel(num_classes=10),
                }
            ),
            supervised_keys=("image", "label"),
            citation="E. Alpaydin and C. Kaynak, 1998, doi:10.24432/C50P49",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        splits = ("train", "test")
        return {split: self._generate_examples(is_test=split == "test") for split in splits}

    def _generate_examples(self, *, is_test: bool) -> Iterator[tuple[int, dict[str, Any]]]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        for index, (image_HW, label) in enumerate(zip(digits.images, digits.target, strict=True)):
            if (index % HELD_OUT_PERIOD == 0) == is_test:
                yield index, {"image": _encode_png(image_HW), "label": int(label)}


def _encode_png(image_HW: npt.NDArray[np.float64]) -> io.BytesIO:
    # tensorflow-datasets encodes arrays with TensorFlow, and accepts encoded files without it.
    encoded = io.BytesIO()
    Image.fromarray(np.rint(image_HW * (255 / MAX_VALUE)).astype(np.uint8)).save(encoded, "png")
    encoded.seek(0)
    return encoded
