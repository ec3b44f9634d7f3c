from pathlib import Path
from typing import Any, get_args

import pytest

from jaxlaunch.trainer.data.source import Source, source_name
from jaxlaunch.trainer.errors import DataError, SpecError, StorageError
from jaxlaunch.trainer.sources import text
from jaxlaunch.trainer.sources.open import import_opener, open_source
from jaxlaunch.trainer.spec import Data, Text, TrainSpec


def make_spec(data: dict[str, Any], model: dict[str, Any] | None = None) -> TrainSpec:
    return TrainSpec.model_validate(
        {"task": "mine:Task", "data": data, "model": model or {"kind": "mlp"}}
    )


DECODER = {"kind": "decoder", "length": 16, "vocab": 256}


def test_text_windows_have_the_model_length(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(1000))
    source = open_source(make_spec({"source": "text", "path": f"{tmp_path}/*"}, DECODER), "train")
    assert source is not None and source[0]["tokens"].shape == (17,)
    assert isinstance(source, Source) and "text" in source_name(source)


@pytest.mark.parametrize(
    ("fault", "kind"),
    [(OSError(116, "Stale file handle"), StorageError), (PermissionError(13, "denied"), DataError)],
)
def test_unopenable_source_is_reported(
    fault: OSError, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def opening(*_: Any) -> Any:
        raise fault

    monkeypatch.setattr(text, "open_stream", opening)
    words = f"train.data: the train split of text cannot be opened: .*{fault.strerror}"
    with pytest.raises(kind, match=words):
        open_source(make_spec({"source": "text", "path": "a.txt"}, DECODER), "train")


def test_text_needs_model_length_and_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(1000))
    text = {"source": "text", "path": f"{tmp_path}/*"}
    with pytest.raises(SpecError, match="data.source = text needs train.model.length"):
        open_source(make_spec(text), "train")
    with pytest.raises(SpecError, match="train.model.vocab = 100 is less than the 256"):
        open_source(make_spec(text, {**DECODER, "vocab": 100}), "train")


def test_synthetic_data_matches_the_model() -> None:
    data = {"source": "synthetic", "examples": 5, "eval_examples": 0}
    tokens, images = (open_source(make_spec(data, model), "train") for model in (DECODER, None))
    assert tokens is not None and tokens[0]["tokens"].shape == (17,)
    assert images is not None and images[0]["image"].shape == (28, 28)
    assert open_source(make_spec(data), "eval") is None


def test_torch_dataset_evaluates_only_with_eval_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ranges.py").write_text(
        "class Range(list):\n    def __init__(self, n): super().__init__(range(n))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = {"source": "torch", "dataset": "ranges:Range", "args": {"n": 3}}
    train = open_source(make_spec(data), "train")
    assert train is not None and len(train) == 3
    assert open_source(make_spec(data), "eval") is None
    with pytest.raises(DataError, match="the eval split of torch has no examples"):
        open_source(make_spec({**data, "eval_args": {"n": 0}}), "eval")


def test_bigram_baseline_is_optional(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"some text, " * 20)
    for asked, names in ((True, ["bigram_bits_per_byte"]), (False, [])):
        job = make_spec({"source": "text", "path": f"{tmp_path}/*", "bigram": asked}, DECODER)
        train, held_out = open_source(job, "train"), open_source(job, "eval")
        assert train is not None
        assert list(train.baseline_metrics(held_out)) == names


def test_modules_are_imported_before_opening() -> None:
    for block in get_args(get_args(Data)[0]):
        parts = {"one": Text(source="text", path="a.txt")}  # of a mixture
        import_opener(
            block.model_construct(
                source=block.model_fields["source"].annotation.__args__[0], parts=parts
            )
        )
