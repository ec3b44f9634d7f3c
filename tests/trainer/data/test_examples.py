from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from trainer.data import examples as module
from trainer.data.examples import Examples
from trainer.errors import DataError, StorageError


class Listed:
    """A source over a list; an exception in it is raised when its index is read."""

    name = "listed"

    def __init__(self, items: list[Any]) -> None:
        self.items, self.reads = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        if isinstance(self.items[index], Exception):
            raise self.items[index]
        return {"x": self.items[index]}

    def fingerprint(self) -> str:
        return "listed"


def as_is(raw: dict[str, Any]) -> dict[str, Any]:
    return raw


def read(items: list[Any], *, example: Any = as_is) -> dict[str, Any]:
    return Examples(Listed(items), example).read(np.arange(len(items)))


@pytest.fixture(params=[0, module.KEEP_BYTES], ids=["read each time", "kept"])
def keep_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "KEEP_BYTES", request.param)
    return int(request.param)


def test_examples_are_stacked_in_the_order_asked_for(keep_bytes: int) -> None:
    examples = Examples(Listed([np.full(2, i, np.float32) for i in range(9)]), as_is)
    for index in ([8, 0, 3], [3, 3], list(range(9))):
        assert examples.read(np.array(index))["x"][:, 0].tolist() == index


def test_a_small_set_is_read_once() -> None:
    source = Listed([np.float32(i) for i in range(50)])
    examples = Examples(source, as_is)
    examples.read(np.arange(50))
    first_pass = source.reads
    examples.read(np.arange(50))
    assert first_pass < 2 * 50 and source.reads == first_pass


def test_examples_that_are_drawn_at_random_are_not_frozen() -> None:
    rng = np.random.default_rng(0)
    examples = Examples(Listed([0.0] * 8), lambda raw: {"x": rng.random(3)})
    once, again = (examples.read(np.arange(8))["x"] for _ in range(2))
    assert not np.array_equal(once, again)


def test_threads_may_fill_a_small_set_together() -> None:
    examples = Examples(Listed([np.full(3, i) for i in range(200)]), as_is)
    index = np.arange(200)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: examples.read(index)["x"], range(8)))
    assert all(np.array_equal(x[:, 0], index) for x in found)


def test_a_small_set_with_an_example_that_cannot_be_read_is_still_read() -> None:
    examples = Examples(Listed([0.0, ValueError("bad JPEG"), 2.0]), as_is)
    assert examples.read(np.array([2, 0]))["x"].tolist() == [2.0, 0.0]


def test_a_batch_may_be_changed_without_changing_the_set() -> None:
    examples = Examples(Listed([np.float32(1)]), as_is)
    examples.read(np.array([0]))["x"][:] = 5
    assert examples.read(np.array([0]))["x"].tolist() == [1]


def test_64_bits_become_32() -> None:
    assert read([1, 2])["x"].dtype == np.int32
    assert read([1.0, 2.0])["x"].dtype == np.float32
    assert read([True, False])["x"].dtype == np.bool_


def test_another_shape_is_refused_with_both(keep_bytes: int) -> None:
    items = [np.zeros((8, 8))] * 17 + [np.zeros((8, 9))]
    with pytest.raises(DataError, match=r"listed: example 17 has x \(8, 9\), the first \(8, 8\); pad to one shape"):
        read(items)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "listed has no examples"),
        ([np.float32(0), np.uint8(0)], "example 1 has x of uint8, the first of float32"),
        ([1, 2**40], "example 1 has x 1099511627776, too large for the int32 it becomes"),
        (["a cat"], r"example 0 has x of <U5; the task's example\(\) must return numbers"),
        ([0.0, ValueError("bad JPEG")], "listed: example 1 cannot be read: ValueError: bad JPEG"),
        ([0.0, DataError("record 3 of f")], "^record 3 of f$"),
        ([0.0, FileNotFoundError(2, "gone")], "example 1 cannot be read: FileNotFoundError"),
    ],
)
def test_what_cannot_be_used_is_named(keep_bytes: int, items: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(items)


def test_the_original_exception_is_chained() -> None:
    with pytest.raises(DataError) as caught:
        read([0.0, ValueError("bad JPEG")])
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_failing_disk_is_not_bad_data() -> None:
    with pytest.raises(StorageError, match="example 1 cannot be read: OSError"):
        read([0.0, OSError(5, "Input/output error")])


def test_other_keys_are_refused_with_both() -> None:
    with pytest.raises(DataError, match=r"example 1 has the keys \{x, y\}, the first \{x\}"):
        read([0, 1], example=lambda raw: raw if raw["x"] == 0 else {**raw, "y": 0})


def test_the_key_weight_is_taken() -> None:
    with pytest.raises(DataError, match="example 0 has a key weight"):
        read([0], example=lambda raw: {"weight": 1.0})
