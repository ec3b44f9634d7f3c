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


def make_mixture(weights: dict[str, float] = WEIGHTS) -> Mixture:
    return Mixture({name: Numbers(at, LENGTHS[name]) for at, name in enumerate(weights)}, weights)


def make_pipeline(batch: int, rows: range, shuffle: bool = True) -> Pipeline:
    how = {"batch": batch, "rows": rows, "seed": 3, "shuffle": shuffle, "prefetch": 0, "threads": 1}
    return Pipeline(make_mixture(), lambda raw: raw, **how)


def find_parts(indexes: list[int]) -> list[int]:
    ends = np.cumsum(list(LENGTHS.values()))
    return [int(np.searchsorted(ends, index, side="right")) for index in indexes]


@pytest.mark.parametrize(
    "weights", [WEIGHTS, {"code": 1.0, "web": 1.0, "books": 1.0}, {"code": 2, "web": 5, "books": 4}]
)
def test_block_has_each_part_in_proportion_to_its_weight(weights: dict[str, float]) -> None:
    result = make_mixture(weights).example_indices(0, 3 * BLOCK, seed=0, shuffle=True).tolist()
    for block in range(3):
        counted = Counter(find_parts(result[block * BLOCK : (block + 1) * BLOCK]))
        for number, weight in enumerate(weights.values()):
            assert abs(counted[number] - BLOCK * weight / sum(weights.values())) < 1
    for first in range(0, BLOCK, 100):  # and every hundred of it, nearly
        counted = Counter(find_parts(result[first : first + 100]))
        assert all(
            abs(counted[at] - 100 * w / sum(weights.values())) < 2
            for at, w in enumerate(weights.values())
        )


@pytest.mark.parametrize("shuffle", [True, False])
def test_example_repeats_only_after_its_whole_part(shuffle: bool) -> None:
    result = make_mixture().example_indices(0, 2500, seed=0, shuffle=shuffle)
    first = 0
    for length in LENGTHS.values():
        own_items = result[(result >= first) & (result < first + length)] - first
        for epoch in range(len(own_items) // length):
            assert sorted(own_items[epoch * length : (epoch + 1) * length]) == list(range(length))
        assert len(set(own_items[len(own_items) // length * length :])) == len(own_items) % length
        first += length


def test_examples_do_not_depend_on_hosts_or_start_step() -> None:
    whole = make_pipeline(8, range(8))
    expected = [whole.example_ids(step) for step in range(300)]
    assert len(set(map(tuple, expected))) == 300
    for hosts in (2, 1, 4):
        share = 8 // hosts
        readers = [
            make_pipeline(8, range(host * share, (host + 1) * share)) for host in range(hosts)
        ]
        for step in (0, 1, 124, 125, 126, 299, 17):  # a block ends within step 125
            assert sum((reader.example_ids(step) for reader in readers), []) == expected[step]
            together = np.concatenate([reader.read_batch(step)["x"] for reader in readers])
            assert together.tolist() == whole.read_batch(step)["x"].tolist()


def test_epochs_by_part_match_the_positions() -> None:
    whole = make_mixture()
    for position in (0, 1, 999, 1000, 2345):
        parts = Counter(
            find_parts(whole.example_indices(0, position, seed=0, shuffle=True).tolist())
        )
        expected = {name: parts[at] / length for at, (name, length) in enumerate(LENGTHS.items())}
        assert whole.epochs_by_part(position) == expected


@pytest.mark.parametrize("hosts", [1, 2])
def test_evaluation_reads_each_part_once_in_its_own_batches(hosts: int) -> None:
    share, observed = 8 // hosts, Counter[int]()
    for host in range(hosts):
        rows = range(host * share, (host + 1) * share)
        passes = Evaluation(make_mixture(), lambda raw: raw, batch=8, rows=rows, threads=1)
        for part, batch in zip(passes.batch_parts, passes, strict=True):
            assert {list(LENGTHS)[int(x) // 10_000] for x in batch["x"]} == {part}
            observed.update(batch["x"][batch["weight"] > 0].tolist())
        assert Counter(passes.batch_parts) == {"code": 9, "web": 125, "books": 2}
    assert set(observed.values()) == {1} and len(observed) == sum(LENGTHS.values())


@pytest.mark.parametrize(
    ("batches", "expected"),
    [(1, (1, 1, 1)), (10, (1, 8, 1)), (68, (4, 63, 1)), (500, (9, 125, 2)), (136, (9, 125, 2))],
)
def test_short_evaluation_includes_all_parts(batches: int, expected: tuple[int, ...]) -> None:
    passes = Evaluation(
        make_mixture(), lambda raw: raw, batch=8, rows=range(8), threads=1, batches=batches
    )
    assert Counter(passes.batch_parts) == dict(zip(LENGTHS, expected, strict=True))
    assert len(list(passes)) == sum(expected)


def test_fingerprint_depends_on_weights_and_parts() -> None:
    names = [make_mixture().fingerprint(), make_mixture({**WEIGHTS, "web": 0.7}).fingerprint()]
    assert len(set(names)) == 2 and "web 600: numbers 1000" in names[0]


def test_weight_below_one_example_is_refused() -> None:
    words = "parts.books.weight = 1e-06 is less than one example in 100000"
    with pytest.raises(SpecError, match=words):
        make_mixture({"code": 0.5, "web": 0.5, "books": 1e-6})
    assert mixture.block_counts([1 / 3, 1 / 3, 1 / 3], BLOCK).tolist() == [334, 333, 333]


def test_small_weight_is_rounded_by_at_most_one_percent() -> None:
    weights = {"code": 0.9854, "web": 0.014, "books": 0.0006}
    result = make_mixture(weights).example_indices(0, 10_000, seed=0, shuffle=True).tolist()
    assert Counter(find_parts(result)) == {0: 9854, 1: 140, 2: 6}
    assert make_mixture(weights).epochs_by_part(10_000)["books"] == 6 / 13
    assert "mixture of 10000: code 9854" in make_mixture(weights).fingerprint()
    assert "of 1000:" in make_mixture().fingerprint()


def make_job(folder: Path, parts: dict[str, Any], **keys: Any) -> TrainSpec:
    data = {
        "source": "mixture",
        "tokenizer": f"{folder}/tokenizer",
        "data_dir": f"{folder}/out",
        "parts": parts,
    } | keys
    model = specs.GPT2(kind="gpt2", layers=1, width=32, heads=4, vocab=600, length=32)
    return TrainSpec.model_validate({"task": LM, "model": model, "data": data})


def test_text_mixture_is_prepared_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_run_build", lambda made, folder, *_: build.build_rows(made, folder))
    corpora.save_tokenizer(tmp_path / "tokenizer")
    for name, count in (("a", 40), ("b", 20), ("c", 5)):
        corpora.write_lines(
            tmp_path / f"{name}.jsonl", list(filter(None, corpora.make_texts(count, seed=count)))
        )
    spec = make_job(
        tmp_path,
        {
            "a": {"weight": 3, "path": f"{tmp_path}/a.jsonl"},
            "b": {"weight": 1, "path": f"{tmp_path}/b.jsonl", "eval_split": 0.0},
            "c": {"weight": 0, "path": f"{tmp_path}/c.jsonl", "eval_split": 0.3},
        },
    )
    train, held_out = open_source(spec, "train"), open_source(spec, "eval")
    assert isinstance(train, Mixture) and isinstance(held_out, Mixture)
    assert set(train.epochs_by_part(0)) == {"a", "b"}
    assert set(held_out.epochs_by_part(0)) == {"a", "c"}
    result = train.example_indices(0, BLOCK, seed=0, shuffle=True)
    assert sum(int(index) < len(train._parts[0]) for index in result) == 750
    reports = prepare.prepare_text(spec)
    # All of it is evaluated on.
    assert reports[2]["rows"]["eval"] == 0 and reports[2]["documents"] == 5
    assert len(held_out._parts[1]) == reports[2]["rows"]["train"]
    assert len(reports) == 3
    assert sum(report["rows"]["train"] for report in reports[:2]) == len(train)
    assert "tokenizer.json" in tokenizer_files(spec.data)
