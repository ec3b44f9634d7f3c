import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

from jaxlaunch.trainer.data.pipeline import Evaluation, Pipeline
from jaxlaunch.trainer.loop.training import cut_spans
from jaxlaunch.trainer.sources.torch import MapDataset

SETTINGS: dict[str, Any] = {"prefetch": 2, "threads": 2}


class Numbers:
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.int32(index)}

    def fingerprint(self) -> str:
        return f"numbers {self.length}"


def make_pipeline(
    length: int, *, batch: int, rows: range | None = None, seed: int = 0, shuffle: bool = True
) -> Pipeline:
    settings = SETTINGS | {"seed": seed, "shuffle": shuffle}
    return Pipeline(Numbers(length), dict, batch=batch, rows=rows or range(batch), **settings)


def parts(batch: int, processes: int) -> list[range]:
    share = batch // processes
    return [range(k * share, (k + 1) * share) for k in range(processes)]


@pytest.mark.parametrize(("length", "batch"), [(10, 4), (7, 3), (3, 8), (1, 4), (12, 4)])
def test_each_example_occurs_once_per_epoch(length: int, batch: int) -> None:
    data = make_pipeline(length, batch=batch)
    used = [index for step in range(-(-3 * length // batch)) for index in data.example_ids(step)]
    for epoch in range(3):
        assert sorted(used[epoch * length : (epoch + 1) * length]) == list(range(length))


def test_batch_matches_its_ids_with_weight_one() -> None:
    data = make_pipeline(10, batch=4)
    for step in (0, 2, 9):
        batch = data.read_batch(step)
        assert batch["x"].tolist() == data.example_ids(step)
        assert batch["weight"].dtype == np.float32 and batch["weight"].tolist() == [1.0] * 4


def test_step_does_not_depend_on_the_number_of_processes() -> None:
    whole = make_pipeline(37, batch=8)
    for processes in (2, 1, 4):
        shares = [make_pipeline(37, batch=8, rows=rows) for rows in parts(8, processes)]
        for step in range(12):
            assert sum((share.example_ids(step) for share in shares), []) == whole.example_ids(step)
            assert np.array_equal(
                np.concatenate([s.read_batch(step)["x"] for s in shares]),
                whole.read_batch(step)["x"],
            )


def test_iteration_from_a_step_repeats_the_batches() -> None:
    data, fresh = make_pipeline(10, batch=4), make_pipeline(10, batch=4)
    batches = data.iterate(cut_spans(0, 9))
    observed = [next(batches)["x"].tolist() for _ in range(9)]
    batches.close()
    repeated = fresh.iterate(cut_spans(5, 9))
    assert [next(repeated)["x"].tolist() for _ in range(4)] == observed[5:]
    repeated.close()
    assert fresh.read_batch(3)["x"].tolist() == observed[3]


def test_several_steps_make_one_batch() -> None:
    data = make_pipeline(10, batch=4, rows=range(1, 4))
    batches = data.iterate(cut_spans(0, 8, 3, [7]))
    first, second, single, last = batches
    assert first["x"].shape == first["weight"].shape == (3, 3)
    assert single["x"].shape == last["x"].shape == (3,)
    actual = [first["x"][:, step].tolist() for step in range(3)]
    assert actual == [data.read_batch(step)["x"].tolist() for step in range(3)]
    assert second["x"][:, 1].tolist() == data.example_ids(4)
    assert last["x"].tolist() == data.example_ids(7)
    assert data.read_batch(3, 3)["x"].tolist() == second["x"].tolist()


def test_growing_source_keeps_its_order() -> None:
    """The length is read once, because processes may see it at different times."""
    growing = Numbers(10)
    user, torch = (
        Pipeline(dataset, dict, batch=2, rows=range(2), seed=0, shuffle=True, prefetch=1, threads=1)
        for dataset in (growing, MapDataset("numbers", {}, growing, ""))
    )
    earlier = [pipeline.example_ids(step) for pipeline in (user, torch) for step in range(9)]
    growing.length = 11
    actual = [pipeline.example_ids(step) for pipeline in (user, torch) for step in range(9)]
    assert actual == earlier


def test_examples_are_in_order_without_shuffle() -> None:
    assert make_pipeline(5, batch=4, shuffle=False).example_ids(1) == [4, 0, 1, 2]


def test_rows_outside_the_batch_raise_value_error() -> None:
    with pytest.raises(ValueError, match="not a contiguous part of a batch of 4"):
        make_pipeline(5, batch=4, rows=range(2, 6))


@pytest.mark.parametrize(("length", "batch"), [(10, 4), (3, 8), (8, 4), (1, 4)])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_evaluation_counts_each_example_once(length: int, batch: int, processes: int) -> None:
    counted: Counter[int] = Counter()
    counts = set()
    for rows in parts(batch, processes):
        batches = list(
            Evaluation(Numbers(length), lambda raw: raw, batch=batch, rows=rows, threads=1)
        )
        counts.add(len(batches))
        for result in batches:
            assert len(result["x"]) == len(rows)
            counted.update(result["x"][result["weight"] == 1.0].tolist())
            assert set(result["weight"].tolist()) <= {0.0, 1.0}
    assert counted == Counter(range(length))
    assert len(counts) == 1


@pytest.mark.parametrize("rows", [range(4), range(2), range(2, 4)], ids=str)
def test_first_non_finite_example_is_described(rows: range) -> None:
    """Position 11 is in the second epoch of 7 examples and in the step from 8 on."""

    def example(raw: dict[str, Any]) -> dict[str, Any]:
        return {"x": np.full((2, 2), [1.0, np.inf if raw["x"] == 4 else 2.0]), "label": raw["x"]}

    settings: dict[str, Any] = {"shuffle": False, "prefetch": 1, "threads": 1, "seed": 0}
    result = Pipeline(Numbers(7), example, batch=4, rows=rows, deterministic=True, **settings)
    assert result.describe_not_finite(0) is None
    place = r"\(.*test_pipeline.py:\d+\)"
    assert re.fullmatch(
        rf"\w+: example 4, at position 4, has x inf {place}", result.describe_not_finite(1) or ""
    )
    assert re.fullmatch(
        rf"\w+: example 4, at position 11, has x inf {place}", result.describe_not_finite(2) or ""
    )


def test_evaluation_may_be_limited_and_repeated() -> None:
    passes = Evaluation(Numbers(10), lambda raw: raw, batch=4, rows=range(4), batches=2, threads=1)
    assert len(passes) == 2
    for _ in range(2):
        assert [batch["x"].tolist() for batch in passes] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert list(passes.iterate(lambda batch: float(batch["weight"].sum()))) == [4.0, 4.0]
