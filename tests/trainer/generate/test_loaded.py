"""Models that `jaxlaunch.load` loads, and the program of `launcher sample`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from etils import epath

import jaxlaunch
from jaxlaunch import contract
from jaxlaunch.trainer import spec
from jaxlaunch.trainer.checkpoint import saved_files
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.errors import CheckpointError, SpecError
from jaxlaunch.trainer.generate import __main__ as program
from jaxlaunch.trainer.generate.decoding import Sampling
from jaxlaunch.trainer.huggingface import folder, save
from jaxlaunch.trainer.text import tokenizer as tokenizers
from tests.trainer.generate.generators import bytes_model, one_device
from tests.trainer.text import corpora

MESH = {"dp": 2, "fsdp": 1, "mp": 1, "dcn": {}}
RECORDED = {"data": {"source": "text", "tokenizer": "bytes"}, "mesh": MESH}


def make_params() -> dict[str, np.ndarray]:
    generator = bytes_model()
    params = generator.network.stack_params(generator.weights)
    return {name: np.asarray(array) for name, array in params.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints of step 2 with an average, and of step 5 without one."""
    home = tmp_path_factory.mktemp("run") / "checkpoints"
    store = Store(str(home), keep=3, uid="mine")
    store.claim()
    params, average = make_params(), {name: 2 * array for name, array in make_params().items()}
    meta = {"model": bytes_model().network.config.model_dump(mode="json"), "train": RECORDED}
    store.save(2, {"params": params, "ema": average}, meta | {"precision": "fp32"})
    meta["train"] = RECORDED | {"data": {"source": "synthetic"}}
    store.save(5, {"params": params}, meta)
    store.close()
    return home


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a Hugging Face folder."""
    target = tmp_path_factory.mktemp("hf") / "model"
    save.save_model(str(target), bytes_model().network.config, make_params())
    return target


def test_run_is_loaded_with_step_average_and_precision(trained: Path) -> None:
    loaded = jaxlaunch.load(str(trained / "2"), mesh=one_device())
    assert (loaded.step, loaded.tokenizer is None) == (2, False)
    actual = loaded.params
    assert all(np.array_equal(actual[name], expected) for name, expected in make_params().items())
    assert actual.keys() == make_params().keys()
    (sample,), (second,) = loaded.generate(["ab", [1, 2]], max_tokens=8)
    ((first_alone,),) = bytes_model().generate([[97, 98]], Sampling(max_tokens=8))
    ((second_alone,),) = loaded.generate([1, 2], max_tokens=8)
    for alone, together in ((first_alone, sample), (second_alone, second)):
        # A batch of one rounds in its own way.
        assert alone == together._replace(score=pytest.approx(together.score, rel=1e-5))
    (logprob_L,) = loaded.logprobs("abc")
    logits_LV = np.asarray(loaded.model(np.array([[97, 98, 99]])), np.float64)[0]
    shares_LV = logits_LV - np.log(np.exp(logits_LV).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprob_L, shares_LV[[0, 1], [98, 99]], rtol=0, atol=1e-5)
    average = jaxlaunch.load(str(trained), step=2, ema=True, mesh=one_device()).params
    assert np.array_equal(average["embedding"], 2 * make_params()["embedding"])


def test_sample_ends_before_a_stop_text(trained: Path) -> None:
    loaded = jaxlaunch.load(str(trained), step=2, mesh=one_device())
    ((whole,),) = loaded.generate("ab", max_tokens=40)
    text = loaded.text(whole) or ""
    ((cut,),) = loaded.generate("ab", max_tokens=40, stop=[text[3:6]])
    assert len(cut.ids) < 40 and cut.ended
    assert loaded.text(cut) == text[: text.find(text[3:6])]
    assert loaded.generate(np.array([97, 98]), max_tokens=2) == loaded.generate("ab", max_tokens=2)
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        loaded.generate("\udcff")


def test_hugging_face_folder_gives_the_same_samples(trained: Path, exported: Path) -> None:
    loaded = jaxlaunch.load(str(exported), mesh=one_device())
    of_checkpoint = jaxlaunch.load(str(trained), step=2, mesh=one_device())
    assert loaded.generate("ab", max_tokens=8) == of_checkpoint.generate("ab", max_tokens=8)


def test_all_devices_share_a_model_of_another_mesh(exported: Path) -> None:
    loaded = jaxlaunch.load(str(exported))
    assert loaded._generator.network.mesh.shape == {"dp": 1, "fsdp": 8, "ep": 1, "mp": 1}


def test_export_names_the_special_tokens(exported: Path, tmp_path: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert [config[key] for key in folder.TOKEN_KEYS] == [None] * 3
    assert json.loads((exported / folder.GENERATION_FILE).read_text()) == {}
    assert (config["max_position_embeddings"], folder.end_tokens(str(exported))) == (64, ())
    source, out = exported.parent / "source", tmp_path / "out"
    source.mkdir()
    special = {"eos_token_id": [3, 4], "temperature": 0.6}
    (source / folder.GENERATION_FILE).write_text(json.dumps(special))
    (source / "config.json").write_text('{"bos_token_id": 1, "eos_token_id": 3}')
    model = bytes_model().network.config.model_copy(update={"init_from": str(source)})
    save.save_model(str(out), model, make_params())
    config = json.loads((out / "config.json").read_text())
    assert [config[key] for key in folder.TOKEN_KEYS] == [1, [3, 4], None]
    generation = json.loads((out / folder.GENERATION_FILE).read_text())
    assert generation == {"bos_token_id": 1, **special}
    assert folder.end_tokens(str(source)) == (3, 4)


def test_export_takes_special_tokens_from_its_tokenizer(tmp_path: Path) -> None:
    files = saved_files.read_tokenizer(
        epath.Path(corpora.save_tokenizer(tmp_path, bos_token=corpora.BEGIN))
    )
    out, model = tmp_path / "out", bytes_model().network.config
    save.save_model(str(out), model, make_params(), extra_files=files)
    for name in ("config.json", folder.GENERATION_FILE):
        keys = json.loads((out / name).read_text())
        assert [keys.get(key) for key in folder.TOKEN_KEYS] == [1, 0, None], name
    damaged = {"tokenizer.json": b"no JSON", "tokenizer_config.json": b"[]"}
    assert folder.special_token_ids(damaged) == {}


def test_stream_has_one_sample(trained: Path) -> None:
    loaded = jaxlaunch.load(str(trained), step=2, mesh=one_device())
    for options in ({"beams": 2}, {"n": 2, "temperature": 1.0}):
        with pytest.raises(
            SpecError, match="stream gives one sample as it grows, not beams = .* call generate"
        ):
            next(loaded.stream("ab", **options))


def test_tokenizer_of_the_folder_is_used(tmp_path: Path) -> None:
    place = corpora.save_tokenizer(tmp_path, bos_token=corpora.BEGIN)
    files = saved_files.read_tokenizer(epath.Path(place))
    loaded = tokenizers.find_tokenizer(256, None, files, place)
    assert loaded is not None
    ids = loaded.encode("return x ** 2")
    assert (ids[0], loaded.ends, loaded.decode(ids)) == (1, (0,), "return x ** 2")
    assert tokenizers.find_tokenizer(500, {"source": "synthetic"}, {}, place) is None
    by_bytes = tokenizers.find_tokenizer(300, {"tokenizer": "bytes"}, {}, place)
    assert by_bytes is not None and by_bytes.decode([104, 105, 299]) == "hi\ufffd"


def test_unloadable_folders_are_rejected(trained: Path, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SpecError, match="is a Hugging Face folder, which holds neither steps nor a moving average"
    ):
        jaxlaunch.load(str(exported), step=3)
    with pytest.raises(CheckpointError, match="holds no finished step 7; it holds 2, 5"):
        jaxlaunch.load(str(trained), step=7)
    with pytest.raises(SpecError, match="step 5 holds no moving average"):
        jaxlaunch.load(str(trained), ema=True)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        jaxlaunch.load(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(SpecError, match="model_type is bert, and only llama"):
        jaxlaunch.load(str(tmp_path))
    loaded = jaxlaunch.load(str(trained), mesh=one_device())
    loaded.tokenizer = None
    with pytest.raises(
        SpecError, match="the prompt is text, and the model's 256 tokens have no tokenizer here"
    ):
        loaded.generate("ab")


# --- the program of `launcher sample` -------------------------------------------------------------


def run_command(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, list[Any]]:
    """The code, and the JSON objects on stdout or the lines on stderr of a refusal."""
    monkeypatch.setattr(sys, "argv", ["jaxlaunch.trainer.generate", *arguments])
    code = program.main()
    out, err = capfd.readouterr()
    return code, err.splitlines() if code else list(map(json.loads, out.splitlines()))


def test_single_sample_is_streamed(
    exported: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = partial(run_command, capfd, monkeypatch, str(exported), "--prompt=ab")
    code, (*pieces, last) = run("--max-tokens=20")
    text = "".join(item["piece"] for item in pieces)
    assert (code, text) == (0, last["samples"][0][0]["text"])
    assert len(pieces) > 1 and last["tokens"] == 20
    code, (last,) = run("--ids=1 2, 3", "-n=2", "--temperature=1.0", "--max-tokens=4")
    assert (code, [*map(len, last["samples"])], last["tokens"]) == (0, [2, 2], 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ids=1x", "--ids '1x' are not token ids; write whole numbers, such as '1 2 3'"),
        ("--ids=1,256", "prompt 1 has the token 256, the model those from 0 to 255"),
        ("--prompt=", "prompt 1 has no tokens; give at least one"),
        ("--prompt=a -n=2", "n = 2 samples at temperature 0 would be equal"),
        ("--prompt=a --step=3", "is a Hugging Face folder, which holds neither steps nor"),
    ],
)
def test_invalid_sampling_requests_are_rejected(
    arguments: str, message: str, exported: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, (line,) = run_command(capfd, monkeypatch, str(exported), *arguments.split())
    assert code == contract.BAD_SPEC and message in line


def test_training_samples_are_checked_before_the_first_step() -> None:
    from jaxlaunch.trainer.generate.text_model import TrainingSamples

    keys = {"task": "lm", "model": {"kind": "decoder", "vocab": 300, "length": 16}}
    train = spec.TrainSpec(**keys)
    for model, prompt, message in (
        (train.model, "def ", "'def ' is text, and train.data has no tokenizer; give token ids"),
        (train.model, [1, 300], "prompt 1 has the token 300, the model those from 0 to 299"),
        (spec.ViT(), [1], "train.model.kind = vit does not generate tokens"),
        (spec.GPT2(length=8), [1], "prompt 1 has 1 tokens, and max_tokens = 64 more"),
    ):
        samples, job = spec.Samples(prompts=[prompt]), train.model_copy(update={"model": model})
        with pytest.raises(SpecError, match=f"train.eval.samples: {message}"):
            TrainingSamples(job, samples, one_device())
