from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.data.pipeline import Evaluation, Pipeline
from jaxlaunch.trainer.data.source import DataSource
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.prepare import text as prepare
from jaxlaunch.trainer.sources import mixture, text
from jaxlaunch.trainer.sources.mixture import BLOCK_LENGTHS, Mixture
from jaxlaunch.trainer.sources.open import open_source, tokenizer_files
from jaxlaunch.trainer.spec import LM, TrainSpec
from jaxlaunch.trainer.text import build
from tests.trainer.text import corpora

BLOCK = BLOCK_LENGTHS[0]
LENGTHS = {"code": 70, "web": 1000, "books": 13}
WEIGHTS = {"code": 0.3, "web": 0.6, "books": 0.1}


class Numbers(DataSource):
    """Examples that say which part they are of, and which of it."""

    def __init__(self, part: int, length: int) -> None:
        self.part, self.length = part, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.int32(10_000 * self.part + index)}

    def fingerprint(self) -> str:
        return f"numbers {self.length}"


def mixed(weights: dict[str, float] = WEIGHTS) -> Mixture:
    return Mixture({name: Numbers(at, LENGTHS[name]) for at, name in enumerate(weights)}, weights)


def pipeline(batch: int, rows: range, shuffle: bool = True) -> Pipeline:
    how = {"batch": batch, "rows": rows, "seed": 3, "shuffle": shuffle, "prefetch": 0, "threads": 1}
    return Pipeline(mixed(), lambda raw: raw, **how)


def parts_of(found: list[int]) -> list[int]:
    ends = np.cumsum(list(LENGTHS.values()))
    return [int(np.searchsorted(ends, index, side="right")) for index in found]


@pytest.mark.parametrize(
    "weights", [WEIGHTS, {"code": 1.0, "web": 1.0, "books": 1.0}, {"code": 2, "web": 5, "books": 4}]
)
def test_every_block_holds_each_part_by_its_weight_to_an_example(weights: dict[str, float]) -> None:
    found = mixed(weights).example_indexes(0, 3 * BLOCK, seed=0, shuffle=True).tolist()
    for block in range(3):
        counted = Counter(parts_of(found[block * BLOCK : (block + 1) * BLOCK]))
        for number, weight in enumerate(weights.values()):
            assert abs(counted[number] - BLOCK * weight / sum(weights.values())) < 1
    for first in range(0, BLOCK, 100):  # and every hundred of it, nearly
        counted = Counter(parts_of(found[first : first + 100]))
        assert all(
            abs(counted[at] - 100 * w / sum(weights.values())) < 2
            for at, w in enumerate(weights.values())
        )


@pytest.mark.parametrize("shuffle", [True, False])
def test_an_example_comes_again_when_all_of_its_part_have_come(shuffle: bool) -> None:
    found = mixed().example_indexes(0, 2500, seed=0, shuffle=shuffle)
    first = 0
    for length in LENGTHS.values():
        own = found[(found >= first) & (found < first + length)] - first
        for epoch in range(len(own) // length):
            assert sorted(own[epoch * length : (epoch + 1) * length]) == list(range(length))
        assert len(set(own[len(own) // length * length :])) == len(own) % length
        first += length


def test_the_same_examples_come_on_one_two_and_four_hosts_from_any_step() -> None:
    whole = pipeline(8, range(8))
    wanted = [whole.example_ids(step) for step in range(300)]
    assert len(set(map(tuple, wanted))) == 300
    for hosts in (2, 1, 4):
        share = 8 // hosts
        each = [pipeline(8, range(host * share, (host + 1) * share)) for host in range(hosts)]
        for step in (0, 1, 124, 125, 126, 299, 17):  # a block ends within step 125
            assert sum((one.example_ids(step) for one in each), []) == wanted[step]
            together = np.concatenate([one.read_batch(step)["x"] for one in each])
            assert together.tolist() == whole.read_batch(step)["x"].tolist()


def test_the_epochs_of_each_part_are_known_at_every_position() -> None:
    whole = mixed()
    for position in (0, 1, 999, 1000, 2345):
        parts = Counter(parts_of(whole.example_indexes(0, position, seed=0, shuffle=True).tolist()))
        wanted = {name: parts[at] / length for at, (name, length) in enumerate(LENGTHS.items())}
        assert whole.epochs_by_part(position) == wanted


@pytest.mark.parametrize("hosts", [1, 2])
def test_an_evaluation_has_every_example_of_every_part_once_a_batch_of_one_part_each(
    hosts: int,
) -> None:
    share, seen = 8 // hosts, Counter[int]()
    for host in range(hosts):
        rows = range(host * share, (host + 1) * share)
        passes = Evaluation(mixed(), lambda raw: raw, batch=8, rows=rows, threads=1)
        for part, batch in zip(passes.batch_parts, passes, strict=True):
            assert {list(LENGTHS)[int(x) // 10_000] for x in batch["x"]} == {part}
            seen.update(batch["x"][batch["weight"] > 0].tolist())
        assert Counter(passes.batch_parts) == {"code": 9, "web": 125, "books": 2}
    assert set(seen.values()) == {1} and len(seen) == sum(LENGTHS.values())


@pytest.mark.parametrize(
    ("batches", "wanted"),
    [(1, (1, 1, 1)), (10, (1, 8, 1)), (68, (4, 63, 1)), (500, (9, 125, 2)), (136, (9, 125, 2))],
)
def test_a_short_evaluation_sees_all_parts(batches: int, wanted: tuple[int, ...]) -> None:
    passes = Evaluation(
        mixed(), lambda raw: raw, batch=8, rows=range(8), threads=1, batches=batches
    )
    assert Counter(passes.batch_parts) == dict(zip(LENGTHS, wanted, strict=True))
    assert len(list(passes)) == sum(wanted)


def test_the_fingerprint_follows_weights_and_parts() -> None:
    names = [mixed().fingerprint(), mixed({**WEIGHTS, "web": 0.7}).fingerprint()]
    assert len(set(names)) == 2 and "web 600: numbers 1000" in names[0]


def test_a_weight_of_less_than_one_in_a_block_is_refused() -> None:
    with pytest.raises(
        SpecError, match="parts.books.weight = 1e-06 is less than one example in 100000"
    ):
        mixed({"code": 0.5, "web": 0.5, "books": 1e-6})
    assert mixture.block_counts([1 / 3, 1 / 3, 1 / 3], BLOCK).tolist() == [334, 333, 333]


def test_a_small_weight_is_held_to_a_hundredth_of_it() -> None:
    weights = {"code": 0.9854, "web": 0.014, "books": 0.0006}
    found = mixed(weights).example_indexes(0, 10_000, seed=0, shuffle=True).tolist()
    assert Counter(parts_of(found)) == {0: 9854, 1: 140, 2: 6}
    assert mixed(weights).epochs_by_part(10_000)["books"] == 6 / 13
    assert (
        "mixture of 10000: code 9854" in mixed(weights).fingerprint()
        and "of 1000:" in mixed().fingerprint()
    )


def job(folder: Path, parts: dict[str, Any], **keys: Any) -> TrainSpec:
    data = {
        "source": "mixture",
        "tokenizer": f"{folder}/tokenizer",
        "data_dir": f"{folder}/out",
        "parts": parts,
    } | keys
    model = specs.GPT2(kind="gpt2", layers=1, width=32, heads=4, vocab=600, length=32)
    return TrainSpec.model_validate({"task": LM, "model": model, "data": data})


def test_a_mixture_of_texts_is_prepared_part_by_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text, "_run_build", lambda made, folder, *_: build.build_rows(made, folder))
    corpora.saved(tmp_path / "tokenizer")
    for name, count in (("a", 40), ("b", 20), ("c", 5)):
        corpora.lines(
            tmp_path / f"{name}.jsonl", list(filter(None, corpora.texts(count, seed=count)))
        )
    spec = job(
        tmp_path,
        {
            "a": {"weight": 3, "path": f"{tmp_path}/a.jsonl"},
            "b": {"weight": 1, "path": f"{tmp_path}/b.jsonl", "eval_split": 0.0},
            "c": {"weight": 0, "path": f"{tmp_path}/c.jsonl", "eval_split": 0.3},
        },
    )
    train, held_out = open_source(spec, "train"), open_source(spec, "eval")
    assert isinstance(train, Mixture) and isinstance(held_out, Mixture)
    assert set(train.epochs_by_part(0)) == {"a", "b"} and set(held_out.epochs_by_part(0)) == {
        "a",
        "c",
    }
    found = train.example_indexes(0, BLOCK, seed=0, shuffle=True)
    assert sum(int(index) < len(train._parts[0]) for index in found) == 750
    reports = prepare.prepare_text(spec)
    assert (
        reports[2]["rows"]["eval"] == 0 and reports[2]["documents"] == 5
    )  # all of it is evaluated on
    assert len(held_out._parts[1]) == reports[2]["rows"]["train"]
    assert len(reports) == 3 and sum(each["rows"]["train"] for each in reports[:2]) == len(train)
    assert "tokenizer.json" in tokenizer_files(spec.data)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({}, "weights that sum to 0"),
        ({"a": {"weight": 0, "path": "x"}}, "weights that sum to 0"),
        ({"a": {"weight": -1, "path": "x"}}, "greater than or equal to 0"),
        (
            {"a": {"weight": float("inf"), "path": "x"}, "b": {"weight": 1, "path": "x"}},
            "finite number",
        ),
        ({"a": {"weight": float("nan"), "path": "x"}}, "finite number"),
        ({"a": {"weight": 1}}, "Field required"),
        ({"a": {"weight": 1, "path": "http://x"}}, "cannot be read"),
        ({"a": {"weight": 1, "path": "x", "tokenizer": "bytes"}}, "a with a tokenizer of its own"),
    ],
)
def test_wrong_parts_are_refused(tmp_path: Path, parts: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        job(tmp_path, parts)
