from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from jaxlaunch.trainer.data.examples import Examples, ReadSettings
from jaxlaunch.trainer.data.pipeline import Pipeline
from jaxlaunch.trainer.errors import DataError, SpecError, StorageError
from jaxlaunch.trainer.sources.torch import open_dataset

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
        "class Items:\n    def __init__(self, items, length=None):\n        self.items, "
        "self.length = items, length or len(items)\n    def __len__(self):\n        return "
        "self.length\n    def __getitem__(self, index):\n        return self.items[index]\nclass "
        "Drawing(Items):\n    def __getitem__(self, index, rng):\n        return {'x': "
        "rng.integers(100, size=4)}\nclass Away(Items):\n    def __init__(self):\n        raise "
        "TimeoutError('the bucket does not answer')\nclass Nothing:\n    pass\nclass Stream:\n    "
        "begun = 0\n    def __len__(self):\n        return 10\n    def __iter__(self):\n        "
        "Stream.begun += 1\n        return ({'x': number} for number in range(10))\nclass "
        "Short(Stream):\n    def __len__(self):\n        return 11\nclass RandomSampler:\n    "
        "pass\nclass WeightedSampler:\n    pass\ndef stacked(items):\n    return items\nclass "
        "Loader:\n    batch_size = 4\n    def __init__(self, sampler, collate_fn):\n        "
        "self.dataset, self.sampler, self.collate_fn = items, sampler, collate_fn\ndef "
        "default(items):\n    return items\ndefault.__module__ = "
        "'torch.utils.data._utils.collate'\nitems = Items([(number, number % 2) for number in "
        "range(6)])\nloader = Loader(RandomSampler(), default)\nweighted = "
        "Loader(WeightedSampler(), default)\ncollating = Loader(RandomSampler(), stacked)\n"
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
def test_items_become_arrays(dataset: str, item: Any) -> None:
    example = open_dataset(dataset, {"items": [item]}, shuffle=True)[0]
    assert set(example) == {"image", "label"}
    assert np.array_equal(example["image"], np.ones((2, 2))) and int(example["label"]) == 3


def test_fingerprint_has_digests_of_the_arguments(dataset: str) -> None:
    message = open_dataset(dataset, {"items": ["s3cret", "word"]}, shuffle=True).fingerprint()
    assert message.startswith(f'{dataset}, 2 examples, args sha256 {{"items": "')
    assert "s3cret" not in message
    expected = open_dataset(dataset, {"items": ["s3cret", "word"]}, shuffle=True).fingerprint()
    assert message == expected
    assert (
        message != open_dataset(dataset, {"items": ["other", "word"]}, shuffle=True).fingerprint()
    )


def test_unsupported_item_is_refused(dataset: str) -> None:
    with pytest.raises(TypeError, match=r"a mapping or a pair \(image, label\), not tuple of 3"):
        open_dataset(dataset, {"items": [(1, 2, 3)]}, shuffle=True)[0]


def test_failing_constructor_is_a_data_error(dataset: str) -> None:
    words = "cannot be built: TypeError: .*unexpected keyword argument 'root'"
    with pytest.raises(DataError, match=words):
        open_dataset(dataset, {"root": "/data"}, shuffle=True)
    with pytest.raises(DataError, match="with args root cannot be built") as raised:
        open_dataset(dataset, {"root": "s3cret"}, shuffle=True)
    assert "s3cret" not in str(raised.value)


def test_dataset_gets_the_generator_of_the_example(dataset: str) -> None:
    examples = Examples(
        open_dataset("their_datasets:Drawing", {"items": [0] * 9}, shuffle=True),
        lambda raw, rng: raw,
        ReadSettings(3),
    )
    whole = examples.read(np.arange(9), np.arange(9, 18))["x"]
    assert len(np.unique(whole, axis=0)) == 9
    assert np.array_equal(examples.read(np.array([4]), np.array([13]))["x"], whole[4:5])
    assert not np.array_equal(examples.read(np.array([4]), np.array([22]))["x"], whole[4:5])


def test_dataset_is_cached_only_if_deterministic(dataset: str) -> None:
    class Counted(list[Any]):
        reads = 0

        def __getitem__(self, index: Any) -> Any:
            self.reads += 1
            return super().__getitem__(index)

    for deterministic, expected in ((None, 2 * 4), (False, 2 * 4), (True, 4)):
        items = Counted([{"x": 1.0}] * 4)
        examples = Examples(
            open_dataset(dataset, {"items": items}, shuffle=True),
            lambda raw: raw,
            ReadSettings(0, 0, deterministic),
        )
        earlier = items.reads
        for _ in range(2):
            examples.read(np.arange(4), np.arange(4))
        assert items.reads - earlier == expected


def test_storage_failure_of_a_constructor_is_temporary(dataset: str) -> None:
    words = "their_datasets:Away cannot be built: TimeoutError: the bucket does not"
    with pytest.raises(StorageError, match=words):
        open_dataset("their_datasets:Away", {}, shuffle=True)


def test_class_without_getitem_is_a_spec_error(dataset: str) -> None:
    with pytest.raises(SpecError, match="has no __len__ and no __getitem__"):
        open_dataset("their_datasets:Nothing", {}, shuffle=True)
    with pytest.raises(SpecError, match="Absent"):
        open_dataset("their_datasets:Absent", {}, shuffle=True)


@pytest.mark.parametrize("name", ["items", "loader"])
def test_object_or_loader_is_accepted(dataset: str, name: str) -> None:
    result = open_dataset(f"their_datasets:{name}", {}, shuffle=True)
    assert len(result) == 6 and result[3] == {"image": 3, "label": 1}


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "items",
            {"length": 3},
            "is an Items, not a class, so it takes no args; leave data.args out",
        ),
        (
            "weighted",
            {},
            "uses a WeightedSampler; here the run's seed orders the examples: leave the "
            "sampler out",
        ),
        (
            "collating",
            {},
            "has a collate_fn of its own; make each example whole in its dataset's __getitem__",
        ),
        ("Stream", {}, "is iterable: it has one order, its own.*Set data.shuffle: false"),
    ],
)
def test_custom_loader_behavior_is_refused(
    dataset: str, name: str, args: Any, message: str
) -> None:
    with pytest.raises(SpecError, match=f"{message}.*their_datasets.py:"):
        open_dataset(f"their_datasets:{name}", args, shuffle=True)


def test_iterable_dataset_resumes_by_skipping(dataset: str) -> None:
    def batches(start: int, rows: range = range(4)) -> list[list[int]]:
        stream = open_dataset("their_datasets:Stream", {}, shuffle=False)
        settings: dict[str, Any] = {"seed": 0, "shuffle": False, "prefetch": 0, "threads": 4}
        pipeline = Pipeline(stream, lambda raw: raw, batch=4, rows=rows, **settings)
        values = pipeline.iterate([range(step, step + 1) for step in range(start, 6)])
        return [batch["x"].tolist() for batch in values]

    whole = batches(0)
    actual = [number for batch in whole for number in batch]
    assert actual == [position % 10 for position in range(24)]
    assert batches(3) == whole[3:]
    assert [batch[2:] for batch in whole] == batches(0, range(2, 4))
    with pytest.raises(IndexError, match="it ended after 10 examples, and its __len__ is 11"):
        open_dataset("their_datasets:Short", {}, shuffle=False)[10]


def test_tensor_memory_is_not_copied(dataset: str) -> None:
    array = np.zeros(4)
    result = open_dataset(dataset, {"items": [{"x": Tensor(array)}]}, shuffle=True)[0]
    assert np.shares_memory(result["x"], array)
