"""What was trained or published, in a program's hands: `jaxlaunch.load`, and the program behind `launcher sample`."""

from __future__ import annotations

import json
import sys
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

RECORDED = {
    "data": {"source": "text", "tokenizer": "bytes"},
    "mesh": {"dp": 2, "fsdp": 1, "mp": 1, "dcn": {}},
}


def params() -> dict[str, np.ndarray]:
    made = bytes_model()
    return {
        name: np.asarray(each) for name, each in made.network.stack_params(made.weights).items()
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of checkpoints of step 2, whose average is of other numbers, and of step 5, which has none."""
    home = tmp_path_factory.mktemp("run") / "checkpoints"
    store = Store(str(home), keep=3, uid="mine")
    store.claim()
    model = bytes_model().network.config.model_dump(mode="json")
    other = {k: 2 * v for k, v in params().items()}
    store.save(
        2,
        {"params": params(), "ema": other},
        {"model": model, "train": RECORDED, "precision": "fp32"},
    )
    store.save(
        5,
        {"params": params()},
        {"model": model, "train": RECORDED | {"data": {"source": "synthetic"}}},
    )
    store.close()
    return home


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a Hugging Face folder."""
    to = tmp_path_factory.mktemp("hf") / "model"
    save.save_model(str(to), bytes_model().network.config, params())
    return to


def test_a_run_is_loaded_with_all_that_a_program_asks_for(trained: Path) -> None:
    loaded = jaxlaunch.load(str(trained / "2"), mesh=one_device())
    assert (loaded.step, loaded.tokenizer is None) == (2, False)
    found = loaded.params
    assert all(np.array_equal(found[name], wanted) for name, wanted in params().items())
    assert found.keys() == params().keys()
    (sample,), (other,) = loaded.generate(["ab", [1, 2]], max_tokens=8)
    alone = [
        bytes_model().generate([[97, 98]], Sampling(max_tokens=8)),
        loaded.generate([1, 2], max_tokens=8),
    ]
    for ((found_alone,),), together in zip(alone, (sample, other), strict=True):
        # A batch of one rounds in its own way.
        assert found_alone == together._replace(score=pytest.approx(together.score, rel=1e-5))
    (logprob_L,) = loaded.logprobs("abc")
    logits_LV = np.asarray(loaded.model(np.array([[97, 98, 99]])), np.float64)[0]
    shares_LV = logits_LV - np.log(np.exp(logits_LV).sum(-1, keepdims=True))
    np.testing.assert_allclose(logprob_L, shares_LV[[0, 1], [98, 99]], rtol=0, atol=1e-5)
    average = jaxlaunch.load(str(trained), step=2, ema=True, mesh=one_device()).params
    assert np.array_equal(average["embedding"], 2 * params()["embedding"])


def test_a_sample_ends_before_a_stop(trained: Path) -> None:
    loaded = jaxlaunch.load(str(trained), step=2, mesh=one_device())
    ((whole,),) = loaded.generate("ab", max_tokens=40)
    text = loaded.text(whole) or ""
    ((cut,),) = loaded.generate("ab", max_tokens=40, stop=[text[3:6]])
    assert len(cut.ids) < 40 and cut.ended
    assert loaded.text(cut) == text[: text.find(text[3:6])]
    assert loaded.generate(np.array([97, 98]), max_tokens=2) == loaded.generate("ab", max_tokens=2)
    with pytest.raises(SpecError, match="is not UTF-8 text"):
        loaded.generate("\udcff")


def test_a_hugging_face_folder_says_the_same(trained: Path, exported: Path) -> None:
    how = {"max_tokens": 8}
    found = jaxlaunch.load(str(exported), mesh=one_device()).generate("ab", **how)
    assert found == jaxlaunch.load(str(trained), step=2, mesh=one_device()).generate("ab", **how)


def test_all_devices_share_a_model_whose_mesh_is_not_here(exported: Path) -> None:
    loaded = jaxlaunch.load(str(exported))
    assert loaded._generator.network.mesh.shape == {"dp": 1, "fsdp": 8, "ep": 1, "mp": 1}


def test_an_export_says_which_tokens_are_special(exported: Path, tmp_path: Path) -> None:
    config = json.loads((exported / "config.json").read_text())
    assert [config[key] for key in folder.TOKEN_KEYS] == [None] * 3
    assert json.loads((exported / folder.GENERATION_FILE).read_text()) == {}
    assert (config["max_position_embeddings"], folder.end_tokens(str(exported))) == (64, ())
    (exported.parent / "source").mkdir()
    said = {"eos_token_id": [3, 4], "temperature": 0.6}
    (exported.parent / "source" / folder.GENERATION_FILE).write_text(json.dumps(said))
    (exported.parent / "source" / "config.json").write_text(
        json.dumps({"bos_token_id": 1, "eos_token_id": 3})
    )
    source = str(exported.parent / "source")
    save.save_model(
        str(tmp_path / "out"),
        bytes_model().network.config.model_copy(update={"init_from": source}),
        params(),
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert [config[key] for key in folder.TOKEN_KEYS] == [1, [3, 4], None]
    assert json.loads((tmp_path / "out" / folder.GENERATION_FILE).read_text()) == {
        "bos_token_id": 1,
        **said,
    }
    assert folder.end_tokens(source) == (3, 4)


def test_an_export_takes_special_tokens_of_the_tokenizer_that_it_carries(tmp_path: Path) -> None:
    files = saved_files.read_tokenizer(
        epath.Path(corpora.save_tokenizer(tmp_path, bos_token=corpora.BEGIN))
    )
    save.save_model(
        str(tmp_path / "out"), bytes_model().network.config, params(), extra_files=files
    )
    for name in ("config.json", folder.GENERATION_FILE):
        found = json.loads((tmp_path / "out" / name).read_text())
        assert (found["bos_token_id"], found["eos_token_id"], found.get("pad_token_id")) == (
            1,
            0,
            None,
        ), name
    assert (
        folder.special_token_ids({"tokenizer.json": b"no JSON", "tokenizer_config.json": b"[]"})
        == {}
    )


def test_a_stream_is_of_one_sample(trained: Path) -> None:
    loaded = jaxlaunch.load(str(trained), step=2, mesh=one_device())
    for how in ({"beams": 2}, {"n": 2, "temperature": 1.0}):
        with pytest.raises(
            SpecError, match="stream gives one sample as it grows, not beams = .* call generate"
        ):
            next(loaded.stream("ab", **how))


def test_a_tokenizer_beside_the_weights_is_used_and_ends_a_text(tmp_path: Path) -> None:
    place = corpora.save_tokenizer(tmp_path, bos_token=corpora.BEGIN)
    found = tokenizers.find_tokenizer(
        256, None, saved_files.read_tokenizer(epath.Path(place)), place
    )
    assert found is not None
    ids = found.encode("return x ** 2")
    assert (ids[0], found.ends, found.decode(ids)) == (1, (0,), "return x ** 2")
    assert tokenizers.find_tokenizer(500, {"source": "synthetic"}, {}, place) is None
    by_bytes = tokenizers.find_tokenizer(300, {"tokenizer": "bytes"}, {}, place)
    assert by_bytes is not None and by_bytes.decode([104, 105, 299]) == "hi\ufffd"


def test_what_cannot_be_loaded_is_refused(trained: Path, exported: Path, tmp_path: Path) -> None:
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


def said(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> tuple[int, list[Any]]:
    """The code, and the JSON objects on stdout or the lines on stderr of a refusal."""
    monkeypatch.setattr(sys, "argv", ["jaxlaunch.trainer.generate", *arguments])
    code = program.main()
    out, err = capfd.readouterr()
    return code, err.splitlines() if code else list(map(json.loads, out.splitlines()))


def test_one_sample_is_said_as_it_is_made_and_several_at_the_end(
    exported: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, (*pieces, last) = said(
        capfd, monkeypatch, str(exported), "--prompt=ab", "--max-tokens=20"
    )
    text = "".join(each["piece"] for each in pieces)
    assert (code, text) == (0, last["samples"][0][0]["text"])
    assert len(pieces) > 1 and last["tokens"] == 20
    drawing = ("-n=2", "--temperature=1.0", "--max-tokens=4")
    code, (last,) = said(capfd, monkeypatch, str(exported), "--prompt=ab", "--ids=1 2, 3", *drawing)
    assert (code, [len(of_prompt) for of_prompt in last["samples"]], last["tokens"]) == (
        0,
        [2, 2],
        16,
    )


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (
            ("--ids=1 x",),
            contract.BAD_SPEC,
            "--ids '1 x' are not token ids; write whole numbers, such as '1 2 3'",
        ),
        (("--ids=1 256",), contract.BAD_SPEC, "prompt 1 has the token 256, the model those from"),
        (("--prompt=",), contract.BAD_SPEC, "prompt 1 has no tokens; give at least one"),
        (("--prompt=a", "-n=2"), contract.BAD_SPEC, "n = 2 samples at temperature 0 would be"),
        (("--prompt=a", "--step=3"), contract.BAD_SPEC, "is a Hugging Face folder, which holds"),
    ],
)
def test_what_cannot_be_sampled_is_a_sentence(
    arguments: tuple[str, ...],
    code: int,
    says: str,
    exported: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, (line,) = said(capfd, monkeypatch, str(exported), *arguments)
    assert found == code and says in line


def test_samples_of_a_training_are_checked_before_its_first_step() -> None:
    from jaxlaunch.trainer.generate.text_model import TrainingSamples

    keys = {"task": "lm", "model": {"kind": "decoder", "vocab": 300, "length": 16}}
    train = spec.TrainSpec(**keys)
    for model, prompts, says in (
        (
            train.model,
            ["def "],
            "train.eval.samples: 'def ' is text, and train.data has no tokenizer; give token ids",
        ),
        (
            train.model,
            [[1, 300]],
            "train.eval.samples: prompt 1 has the token 300, the model those from 0 to 299",
        ),
        (spec.ViT(), [[1]], "train.eval.samples: train.model.kind = vit does not generate tokens"),
        (
            spec.GPT2(length=8),
            [[1]],
            "train.eval.samples: prompt 1 has 1 tokens, and max_tokens = 64 more",
        ),
    ):
        with pytest.raises(SpecError) as raised:
            TrainingSamples(
                train.model_copy(update={"model": model}),
                spec.Samples(prompts=prompts),
                one_device(),
            )
        assert says in str(raised.value)
