import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import jaxlaunch
from jaxlaunch.trainer.data import examples as module
from jaxlaunch.trainer.data import order
from jaxlaunch.trainer.data.examples import Examples, ReadSettings, UnusableExampleError
from jaxlaunch.trainer.data.source import as_data_source, source_name
from jaxlaunch.trainer.errors import DataError, StorageError
from tests.found import shows


class Listed:
    """A source over a list; an exception in it is raised when its index is read."""

    name = "listed"

    def __init__(self, items: list[Any]) -> None:
        self.items, self.reads = items, 0

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        if isinstance(self.items[index], BaseException):
            raise self.items[index]
        return {"x": self.items[index]}

    def fingerprint(self) -> str:
        return "listed"


def keep_example(raw: dict[str, Any]) -> dict[str, Any]:
    return raw


KNOWN = ReadSettings(deterministic=True)


def read_items(items: list[Any], *, example: Any = keep_example) -> dict[str, Any]:
    return take_examples(Examples(Listed(items), example, KNOWN), np.arange(len(items)))


def take_examples(examples: Examples, index_B: Any) -> dict[str, Any]:
    """Examples under these indexes, at the positions of the same numbers."""
    return examples.read(np.asarray(index_B), np.asarray(index_B))


@pytest.fixture(params=[0, module.MAX_CACHE_BYTES], ids=["read each time", "kept"])
def cache_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(module, "MAX_CACHE_BYTES", request.param)
    return int(request.param)


def test_examples_are_stacked_in_the_requested_order(cache_bytes: int) -> None:
    examples = Examples(Listed([np.full(2, i, np.float32) for i in range(9)]), keep_example, KNOWN)
    for index in ([8, 0, 3], [3, 3], list(range(9))):
        assert take_examples(examples, np.array(index))["x"][:, 0].tolist() == index


def test_small_dataset_is_read_once() -> None:
    source = Listed([np.float32(i) for i in range(50)])
    examples = Examples(source, keep_example, KNOWN)
    take_examples(examples, np.arange(50))
    first_pass = source.reads
    take_examples(examples, np.arange(50))
    assert first_pass < 2 * 50 and source.reads == first_pass


def test_random_examples_are_not_cached() -> None:
    rng = np.random.default_rng(0)
    examples = Examples(Listed([0.0] * 8), lambda raw: {"x": rng.random(3)})
    once, repeated = (take_examples(examples, np.arange(8))["x"] for _ in range(2))
    assert not np.array_equal(once, repeated)


def test_possibly_random_examples_are_not_cached() -> None:
    values = []

    def example(raw: dict[str, Any]) -> dict[str, Any]:
        values.append(random.random() < 0.05)  # an augmentation that is hardly ever used
        return {"x": float(values[-1])}

    for seed in range(20):
        examples = Examples(Listed([0.0] * 16), example, ReadSettings(seed))
        earlier = len(values)
        for epoch in range(2):
            examples.read(np.arange(16), np.arange(16) + 16 * epoch)
        assert len(values) == earlier + 32, "each is made anew"
    assert 10 < sum(values) < 80


def draw_globally(raw: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.array([random.random(), np.random.random()])}


def draw_from_rng(raw: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"x": rng.random(2)}


@pytest.mark.parametrize("example", [draw_globally, draw_from_rng])
def test_random_numbers_depend_on_seed_and_position(example: Any) -> None:
    def made(seed: int, index: Any, position: Any, purpose: int = order.TRAIN) -> list[Any]:
        examples = Examples(Listed([0.0] * 8), example, ReadSettings(seed, purpose))
        return examples.read(np.array(index), np.array(position))["x"].tolist()

    whole = made(1, range(8), range(40, 48))
    assert len({tuple(item) for item in whole}) == 8
    assert made(1, [5, 2], [45, 42]) == [whole[5], whole[2]], "in any order, after any others"
    assert made(2, [5], [45]) != whole[5:6] and made(1, [5], [53]) != whole[5:6]
    assert made(1, [5], [45], order.EVAL) != whole[5:6]


def test_threads_do_not_share_random_numbers() -> None:
    def example(raw: dict[str, Any]) -> dict[str, Any]:
        first = random.random()
        time.sleep(1e-4)  # lets another thread run
        return {"x": np.array([first, random.random()])}

    index = np.arange(20)
    alone = Examples(Listed([0.0] * 20), example).read(index, index)["x"]
    with ThreadPoolExecutor(8) as pool:
        several = [
            Examples(Listed([0.0] * 20), example) for _ in range(4)
        ]  # as training and evaluation are
        result = list(pool.map(lambda examples: take_examples(examples, index)["x"], several * 2))
    assert all(np.array_equal(x, alone) for x in result)


def test_source_with_rng_is_read_by_several_threads() -> None:
    for seeded in (
        Examples(Listed([0.0]), draw_globally),
        Examples(Listed([0.0]), draw_from_rng),
        Examples(Drawing([0.0]), draw_globally),
    ):
        assert seeded.reader_threads(4) == 1 and "listed may use random numbers" in str(seeded.note)
    taking = Examples(Drawing([0.0]), draw_from_rng)
    assert taking.reader_threads(4) == 4
    assert taking.note is None is Examples(Listed([0.0]), draw_globally, KNOWN).note


class Drawing(Listed):
    def __getitem__(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.random()}


def test_check_runs_on_the_first_example_and_each_batch() -> None:
    def check(batch: dict[str, Any]) -> tuple[int, str] | None:
        wrong = np.flatnonzero(batch["x"] > 2)
        return (int(wrong[0]), f"x {batch['x'][wrong[0]]}") if len(wrong) else None

    examples = Examples(
        Listed([0, 1, 2, 3]), keep_example, ReadSettings(deterministic=True, check=check)
    )
    assert take_examples(examples, [2, 0])["x"].tolist() == [2, 0]
    with pytest.raises(DataError, match=r"^listed: example 3 has x 3 \(.*tests/"):
        take_examples(examples, [1, 3])
    with pytest.raises(DataError, match=r"^listed: example 0 has x 5 \(.*tests/"):
        Examples(Listed([5]), keep_example, ReadSettings(check=check))


def test_unusable_record_is_reported_with_its_index() -> None:
    def example(raw: dict[str, Any]) -> dict[str, Any]:
        if raw["x"]:
            raise UnusableExampleError("label 3.7, not a whole number")
        return raw

    words = r"^listed: example 1 has label 3.7, not a whole number \(.*tests/"
    with pytest.raises(DataError, match=words):
        read_items([0, 1], example=example)


def test_threads_fill_the_cache_together() -> None:
    examples = Examples(Listed([np.full(3, i) for i in range(200)]), keep_example, KNOWN)
    index = np.arange(200)
    with ThreadPoolExecutor(8) as pool:
        result = list(pool.map(lambda _: take_examples(examples, index)["x"], range(8)))
    assert all(np.array_equal(x[:, 0], index) for x in result)


def test_unreadable_example_does_not_break_the_cache() -> None:
    examples = Examples(Listed([0.0, ValueError("bad JPEG"), 2.0]), keep_example, KNOWN)
    assert take_examples(examples, np.array([2, 0]))["x"].tolist() == [2.0, 0.0]


def test_changing_a_batch_does_not_change_the_cache() -> None:
    examples = Examples(Listed([np.float32(1)]), keep_example, KNOWN)
    take_examples(examples, np.array([0]))["x"][:] = 5
    assert take_examples(examples, np.array([0]))["x"].tolist() == [1]


def test_64_bit_values_become_32_bit() -> None:
    assert read_items([1, 2])["x"].dtype == np.int32
    assert read_items([1.0, 2.0])["x"].dtype == np.float32
    assert read_items([True, False])["x"].dtype == np.bool_


def test_different_shape_is_refused(cache_bytes: int) -> None:
    items = [np.zeros((8, 8))] * 17 + [np.zeros((8, 9))]
    words = r"listed: example 17 has x \(8, 9\), the first \(8, 8\); pad to one shape"
    with pytest.raises(DataError, match=words):
        read_items(items)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([], "listed has no examples"),
        ([np.float32(0), np.uint8(0)], "example 1 has x of uint8, the first of float32"),
        ([1, 2**40], "example 1 has x 1099511627776, too large for the int32 it becomes"),
        (["a cat"], r"example 0 has x of <U5; the task's example\(\) must return numbers"),
        ([0.0, ValueError("bad JPEG")], "listed: example 1 cannot be read: ValueError: bad JPEG"),
        ([0.0, DataError("record 3 of f")], "^record 3 of f$"),
        ([0.0, SystemExit(0)], "listed: example 1 cannot be read: SystemExit: 0"),
        ([0.0, FileNotFoundError(2, "gone")], "example 1 cannot be read: FileNotFoundError"),
    ],
)
def test_unusable_example_is_reported(cache_bytes: int, items: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message) as raised:
        read_items(items)
    if not items:
        shows("has no examples", str(raised.value))


def test_original_exception_is_chained() -> None:
    with pytest.raises(DataError) as caught:
        read_items([0.0, ValueError("bad JPEG")])
    assert isinstance(caught.value.__cause__, ValueError)


def test_disk_failure_is_not_a_data_error() -> None:
    with pytest.raises(StorageError, match="example 1 cannot be read: OSError"):
        read_items([0.0, OSError(5, "Input/output error")])


def test_different_keys_are_refused() -> None:
    with pytest.raises(DataError, match=r"example 1 has the keys \{x, y\}, the first \{x\}"):
        read_items([0, 1], example=lambda raw: raw if raw["x"] == 0 else {**raw, "y": 0})


def test_key_weight_is_reserved() -> None:
    with pytest.raises(DataError, match="example 0 has a key weight"):
        read_items([0], example=lambda raw: {"weight": 1.0})


class Inherited(jaxlaunch.Source):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.float32(index)}

    def fingerprint(self) -> str:
        return "3 numbers"


class Drawn:
    """A source without the base class, with the optional attributes, which takes a generator."""

    name = "drawn numbers"
    is_light = True

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": np.float32(rng.integers(100))}

    def fingerprint(self) -> str:
        return "3 drawn numbers"


def test_user_source_is_adapted_with_or_without_the_base_class() -> None:
    inherited, values = as_data_source(Inherited()), as_data_source(Drawn())
    assert (source_name(inherited), source_name(values)) == ("Inherited", "drawn numbers")
    assert (inherited.is_light, values.is_light) == (False, True)
    assert (inherited.takes_rng, values.takes_rng) == (False, True)
    assert all(
        source.may_draw and source.is_user_defined and not source.workers
        for source in (inherited, values)
    )
    assert as_data_source(values) is values
    actual = values.read_example(0, np.random.default_rng(5))
    assert actual == {"x": np.float32(np.random.default_rng(5).integers(100))}
    assert inherited.read_example(2, np.random.default_rng(5)) == {"x": np.float32(2)}
    assert inherited.example_indices(0, 6, seed=0, shuffle=False).tolist() == [0, 1, 2, 0, 1, 2]
    assert (inherited.epochs_by_part(3), inherited.locate_example(0), inherited.fingerprint()) == (
        {},
        None,
        "3 numbers",
    )
