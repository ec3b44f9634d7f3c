from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainer.data.torch import MapStyle
from trainer.errors import DataError, SpecError

Pair = namedtuple("Pair", ["image", "label"])


class Tensor:
    """What a tensor of torch offers here."""

    def __init__(self, value: Any) -> None:
        self.value = np.asarray(value)

    def detach(self) -> "Tensor":
        return self

    def numpy(self) -> np.ndarray:
        return self.value


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "their_datasets.py").write_text(
        "class Items:\n"
        "    def __init__(self, items, length=None):\n"
        "        self.items, self.length = items, length or len(items)\n"
        "    def __len__(self):\n"
        "        return self.length\n"
        "    def __getitem__(self, index):\n"
        "        return self.items[index]\n"
        "class Stream:\n"
        "    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return "their_datasets:Items"


@pytest.mark.parametrize(
    "item",
    [
        {"image": np.ones((2, 2)), "label": 3},
        (np.ones((2, 2)), 3),
        [Tensor(np.ones((2, 2))), Tensor(3)],
        Pair(Image.fromarray(np.ones((2, 2), np.uint8)), np.int64(3)),
    ],
)
def test_mappings_pairs_tensors_and_images_become_arrays(dataset: str, item: Any) -> None:
    example = MapStyle(dataset, {"items": [item]})[0]
    assert set(example) == {"image", "label"}
    assert np.array_equal(example["image"], np.ones((2, 2))) and int(example["label"]) == 3


def test_the_fingerprint_names_class_length_and_arguments(dataset: str) -> None:
    assert MapStyle(dataset, {"items": [1, 2]}).fingerprint() == f"{dataset}, 2 examples, args {{'items': [1, 2]}}"


def test_an_item_of_another_kind_is_refused(dataset: str) -> None:
    with pytest.raises(TypeError, match=r"a mapping or a pair \(image, label\), not tuple of 3"):
        MapStyle(dataset, {"items": [(1, 2, 3)]})[0]


def test_a_class_that_cannot_be_built_is_bad_data(dataset: str) -> None:
    with pytest.raises(DataError, match="cannot be built: TypeError: .*unexpected keyword argument 'root'"):
        MapStyle(dataset, {"root": "/data"})


def test_a_class_that_is_not_map_style_is_a_bad_spec(dataset: str) -> None:
    with pytest.raises(SpecError, match="has no __len__ and no __getitem__"):
        MapStyle("their_datasets:Stream", {})
    with pytest.raises(SpecError, match="Nothing"):
        MapStyle("their_datasets:Nothing", {})
