from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trainer.data.examples import Examples, Reading
from trainer.data.sources.torch import MapStyle
from trainer.errors import DataError, SpecError, StorageError

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
        "class Drawing(Items):\n"
        "    def __getitem__(self, index, rng):\n"
        "        return {'x': rng.integers(100, size=4)}\n"
        "class Away(Items):\n"
        "    def __init__(self):\n"
        "        raise TimeoutError('the bucket does not answer')\n"
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


def test_a_dataset_that_takes_a_generator_gets_that_of_the_example(dataset: str) -> None:
    examples = Examples(MapStyle("their_datasets:Drawing", {"items": [0] * 9}), lambda raw, rng: raw, Reading(3))
    whole = examples.read(np.arange(9), np.arange(9, 18))["x"]
    assert len(np.unique(whole, axis=0)) == 9
    assert np.array_equal(examples.read(np.array([4]), np.array([13]))["x"], whole[4:5])
    assert not np.array_equal(examples.read(np.array([4]), np.array([22]))["x"], whole[4:5])


def test_a_dataset_is_read_anew_each_time_unless_the_job_says_that_it_need_not_be(dataset: str) -> None:
    class Counted(list[Any]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    for deterministic, expected in ((None, 2 * 4), (False, 2 * 4), (True, 4)):
        items = Counted([{"x": 1.0}] * 4)
        examples = Examples(MapStyle(dataset, {"items": items}), lambda raw: raw, Reading(0, 0, deterministic))
        before = items.reads
        for _ in range(2):
            examples.read(np.arange(4), np.arange(4))
        assert items.reads - before == expected


def test_a_class_that_cannot_be_built_for_want_of_its_storage_may_be_built_later(dataset: str) -> None:
    with pytest.raises(StorageError, match="their_datasets:Away .* cannot be built: TimeoutError: the bucket does not"):
        MapStyle("their_datasets:Away", {})


def test_a_class_that_is_not_map_style_is_a_bad_spec(dataset: str) -> None:
    with pytest.raises(SpecError, match="has no __len__ and no __getitem__"):
        MapStyle("their_datasets:Stream", {})
    with pytest.raises(SpecError, match="Nothing"):
        MapStyle("their_datasets:Nothing", {})
