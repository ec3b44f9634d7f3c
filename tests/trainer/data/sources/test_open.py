from pathlib import Path
from typing import Any

import pytest

from trainer.data import sources
from trainer.data.source import Source, called
from trainer.errors import DataError, SpecError
from trainer.spec import TrainSpec


def spec(data: dict[str, Any], model: dict[str, Any] | None = None) -> TrainSpec:
    return TrainSpec.model_validate({"task": "mine:Task", "data": data, "model": model or {"kind": "mlp"}})


DECODER = {"kind": "decoder", "length": 16, "vocab": 256}


def test_text_is_cut_to_the_model_s_length(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(1000))
    source = sources.open(spec({"source": "text", "path": f"{tmp_path}/*"}, DECODER), "train")
    assert source is not None and source[0]["tokens"].shape == (17,)
    assert isinstance(source, Source) and "text" in called(source)


def test_text_needs_a_model_with_a_length_and_a_vocabulary_of_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(1000))
    text = {"source": "text", "path": f"{tmp_path}/*"}
    with pytest.raises(SpecError, match="data.source = text needs train.model.length"):
        sources.open(spec(text), "train")
    with pytest.raises(SpecError, match="train.model.vocab = 100 is less than the 256"):
        sources.open(spec(text, {**DECODER, "vocab": 100}), "train")


def test_synthetic_gives_what_the_model_takes() -> None:
    data = {"source": "synthetic", "examples": 5, "eval_examples": 0}
    tokens, images = (sources.open(spec(data, model), "train") for model in (DECODER, None))
    assert tokens is not None and tokens[0]["tokens"].shape == (17,)
    assert images is not None and images[0]["image"].shape == (28, 28)
    assert sources.open(spec(data), "eval") is None


def test_a_map_style_dataset_evaluates_only_with_arguments_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ranges.py").write_text("class Range(list):\n    def __init__(self, n): super().__init__(range(n))\n")
    monkeypatch.syspath_prepend(tmp_path)
    data = {"source": "torch", "dataset": "ranges:Range", "args": {"n": 3}}
    train = sources.open(spec(data), "train")
    assert train is not None and len(train) == 3
    assert sources.open(spec(data), "eval") is None
    with pytest.raises(DataError, match="the eval split of torch has no examples"):
        sources.open(spec({**data, "eval_args": {"n": 0}}), "eval")


def test_the_bigram_baseline_is_counted_only_when_asked_for(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"some text, " * 20)
    for asked, names in ((True, ["bigram_bits_per_byte"]), (False, [])):
        job = spec({"source": "text", "path": f"{tmp_path}/*", "bigram": asked}, DECODER)
        train, held_out = sources.open(job, "train"), sources.open(job, "eval")
        assert train is not None
        assert list(sources.baselines(job, train, held_out)) == names
