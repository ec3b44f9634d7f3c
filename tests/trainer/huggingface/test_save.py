import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import config_json, save
from jaxlaunch.trainer.huggingface.tensor_files import INDEX_FILE
from tests.trainer import made_up, peaks
from tests.trainer.huggingface.test_load import have_equal_arrays, read_parameters
from tests.trainer.references import folder, step, tensors, train_spec

MODEL = train_spec("llama3_tiny", None).model


@pytest.fixture(scope="module")
def params(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    source = folder("llama3_tiny", tmp_path_factory.mktemp("hf") / "in")
    return step("llama3_tiny", source).init_state().params


def test_large_models_are_sharded_with_an_index(params: dict[str, Any], tmp_path: Path) -> None:
    names = save.save_model(str(tmp_path / "out"), MODEL, params, file_bytes=2**16)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == names and len(files) > 5
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    weights = tensors("llama3_tiny", "weights")
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in weights.values())
    assert set(index["weight_map"].values()) == set(files)
    assert have_equal_arrays(read_parameters(tmp_path / "out"), weights)
    assert have_equal_arrays(step("llama3_tiny", tmp_path / "out").init_state().params, params)


class Halting(dict[str, Any]):
    """Parameters of which the last cannot be read."""

    def __getitem__(self, name: str) -> Any:
        if name == list(self)[-1]:
            raise OSError("the disk is gone")
        return super().__getitem__(name)


def test_folder_is_written_atomically(params: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the disk is gone"):
        save.save_model(str(tmp_path / "out"), MODEL, Halting(params))
    assert list(tmp_path.iterdir()) == []


def test_files_are_synced_before_the_rename(
    params: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[bool] = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append((tmp_path / "out").exists()) or real(fd)
    )
    save.save_model(str(tmp_path / "out"), MODEL, params, file_bytes=2**16)
    assert synced == [False] * len(list((tmp_path / "out").iterdir()))


def test_only_empty_folders_are_written(params: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    save.save_model(str(tmp_path / "out"), MODEL, params)
    saved = (tmp_path / "out" / "config.json").read_bytes()
    with pytest.raises(SpecError, match="out already exists; name a new folder or an empty one"):
        save.save_model(str(tmp_path / "out"), MODEL, params)
    assert (tmp_path / "out" / "config.json").read_bytes() == saved
    with pytest.raises(SpecError, match="gs://bucket/out is not a local folder"):
        save.save_model("gs://bucket/out", MODEL, params)


class Counted:
    """A parameter that counts how much of it is asked for at once."""

    def __init__(self, array: np.ndarray, requests: list[int]) -> None:
        self.shape, self.dtype, self._array, self._asked = array.shape, array.dtype, array, requests

    def __getitem__(self, key: Any) -> np.ndarray:
        part = self._array[key]
        self._asked.append(part.nbytes)
        return part


def test_parameters_are_read_tensor_by_tensor(params: dict[str, Any], tmp_path: Path) -> None:
    requests: list[int] = []
    counted = {name: Counted(np.asarray(x), requests) for name, x in params.items()}
    save.save_model(str(tmp_path / "out"), MODEL, counted)
    weights = tensors("llama3_tiny", "weights").values()
    assert sorted(requests) == sorted(array.nbytes for array in weights)


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (
            spec.ViT(kind="vit", pool="mean"),
            {},
            "train.model.pool = mean: Hugging Face's ViT knows only cls",
        ),
        (MODEL, {"mine.kernel": np.ones(1)}, "Hugging Face has no counterpart of mine.kernel"),
        (MODEL, {}, "also needs parameters that it does not have: embedding, norm.scale"),
    ],
)
def test_unsupported_models_are_rejected(
    model: Any, inputs: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as error:
        save.save_model(str(tmp_path / "out"), model, inputs)
    assert message in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_small_gpt2_has_no_end_token() -> None:
    assert config_json.render_config(spec.GPT2(kind="gpt2", vocab=256))["eos_token_id"] is None
    gpt2 = spec.GPT2(kind="gpt2", preset="gpt2-124m")
    assert "eos_token_id" not in config_json.render_config(gpt2)


def test_saving_needs_at_most_twice_the_largest_tensor(tmp_path: Path) -> None:
    """`python -m tests.trainer.made_up` does the same with 8 B parameters, and plans them."""
    model = spec.Decoder(layers=4, width=256, heads=4, vocab=65536, length=256, tied=False)
    item = made_up.params(model, np.float32)
    arguments = model.model_dump_json(), str(tmp_path / "out")
    peak = peaks.growth(made_up.PREPARE, "save.save_model(sys.argv[2], model, each)", *arguments)
    assert made_up.largest(item) == 65536 * 256 * 4
    assert peak <= 2 * made_up.largest(item) + 8e6
