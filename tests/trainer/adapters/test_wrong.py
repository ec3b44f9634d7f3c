"""Jobs and folders of adapters that are refused in a sentence, with 64, before anything compiles."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from safetensors.numpy import load_file, save_file

from jaxlaunch import contract
from jaxlaunch.trainer.adapters import frozen_base, peft
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.errors import CheckpointError, SpecError
from jaxlaunch.trainer.huggingface import load
from jaxlaunch.trainer.loop.driver import Loop
from jaxlaunch.trainer.loop.training import RunContext
from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.spec import Lora, PublishedModel
from jaxlaunch.trainer.start.distributed import Stop
from jaxlaunch.trainer.start.preflight import describe_changes
from jaxlaunch.trainer.tasks.lm import NextToken
from jaxlaunch.trainer.train import BuiltInTraining
from tests.trainer import references, tiny
from tests.trainer.adapters import folders

CASE = "lora_qwen2_tiny"


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (["q", "w_proj"], "train.lora.targets: w_proj matches no linear layer of"),
        (["embedding"], "embedding matches no linear layer"),
        (["c_attn"], "there are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"),
        (["attention_norm"], "attention_norm matches no linear layer"),
    ],
)
def test_a_target_that_matches_nothing_is_refused(targets: list[str], says: str) -> None:
    with pytest.raises(SpecError, match=says) as raised:
        tiny.build(tiny.Counting(), lora={"targets": targets})
    assert raised.value.code == contract.BAD_SPEC


@pytest.mark.parametrize(
    ("task", "lora", "says"),
    [
        (tiny.Digits(), {}, "lora\n.*applies to a decoder or gpt2, and train.model.kind = mlp"),
        (tiny.Pictures(), {}, "train.model.kind = vit"),
        (tiny.Counting(), {"targets": []}, "lora.targets\n.*at least 1 item"),
        (tiny.Counting(), {"rank": 0}, "lora.rank\n.*greater than 0"),
        (tiny.Counting(), {"alpha": 0.0}, "lora.alpha\n.*greater than 0"),
        (tiny.Counting(), {"dropout": 1.0}, "lora.dropout\n.*less than 1"),
        (tiny.Counting(), {"base": "int4"}, "lora.base\n.*'bf16' or 'int8'"),
        (tiny.Counting(), {"r": 8}, "lora.r\n.*Extra inputs"),
    ],
)
def test_a_wrong_block_is_refused(task: Any, lora: dict[str, Any], says: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=says):
        tiny.train_spec(task, lora=lora)


@pytest.mark.parametrize(
    ("changed", "lora", "says"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type = IA3 is not LORA"),
        ({"use_dora": True}, {}, "use_dora = True is not supported"),
        ({"bias": "all", "rank_pattern": {"q_proj": 2}}, {}, "bias = all, rank_pattern"),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"ensure_weight_tying": True}, {}, "ensure_weight_tying = True is not supported"),
        (
            {"megatron_config": {"hidden_size": 64}},
            {},
            "megatron_config = .'hidden_size': 64. is not supported",
        ),
        ({"layers_to_transform": 1}, {}, "layers_to_transform = 1 is not supported"),
        ({"a_key_of_tomorrow": 0.5}, {}, "a_key_of_tomorrow = 0.5 is not supported.*remove a key"),
        ({"r": 0}, {}, "adapter_config.json: .*greater than 0"),
        ({"target_modules": ["q_proj", "wq"]}, {}, "adapter_config.json: target_modules: wq"),
        ({"target_modules": "q_proj"}, {}, "adapter_config.json: target_modules: q_proj matches"),
        ({"target_modules": "*"}, {}, "adapter_config.json: target_modules = .* is not a regular"),
        ({"target_modules": ["layers.0.mlp.up_proj"]}, {}, "matches blocks.mlp.up in 1 of 2"),
        ({"target_modules": 5}, {}, "target_modules = 5 is neither a list of names nor a regular"),
        ({"target_modules": [1, "q_proj"]}, {}, "is neither a list of names"),
        ({"target_modules": None}, {}, "is neither a list of names"),
        ({}, {"targets": ["wq"]}, "train.lora.targets: wq matches no linear layer"),
        ({"lora_alpha": None}, {}, "adapter_config.json: lora_alpha = None: Input should be a"),
        ({"r": "4"}, {}, "adapter_config.json: r = 4: Input should be a valid integer"),
        ({}, {"rank": 8}, "another adapter than train.lora: rank is 4 there and 8 here"),
        ({}, {"alpha": 1.0}, "alpha is 8.0 there and 1.0 here"),
        ({}, {"rslora": True}, "rslora is False there and True here"),
        ({}, {"targets": ["q", "v"]}, "targets is .* there and .'q', 'v'. here"),
        (
            {"r": 8},
            {},
            r"does not match train.lora: .*lora_A.weight is \[4, 64\], train.lora makes "
            r"it \[8, 64\]",
        ),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights = pissa is not supported"),
        ({"task_type": "SEQ_CLS"}, {}, "task_type = SEQ_CLS is not supported"),
        ({"target_modules": ["q_proj"]}, {}, "lora_A.weight is not used by train.lora"),
        (
            {"target_modules": ["q_proj", "v_proj", "down_proj", "o_proj"]},
            {},
            "o_proj.lora_A.weight is missing",
        ),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(
    changed: dict[str, Any], lora: dict[str, Any], says: str, tmp_path: Path
) -> None:
    folders.start(CASE, tmp_path / "peft", **changed)
    with pytest.raises(SpecError, match=says):
        folders.step(CASE, tmp_path, lora=lora).init_state()


def test_what_a_folder_says_of_its_base_and_its_training_changes_nothing(tmp_path: Path) -> None:
    training = {"lora_dropout": 0.1, "init_lora_weights": "gaussian", "eva_config": {"rho": 2.0}}
    folders.start(CASE, tmp_path / "peft", **training, revision="main", a_key_of_tomorrow=False)
    folders.step(CASE, tmp_path).init_state()


def test_each_key_that_peft_writes_is_read_or_says_nothing_or_is_refused_by_name(
    tmp_path: Path,
) -> None:
    written = folders.config(CASE)[
        "adapter_config"
    ]  # all keys of a LoraConfig, most with peft's default
    model = folders.train_spec(CASE, tmp_path).model
    assert isinstance(model, PublishedModel)
    for key in written.keys() - peft.READ_KEYS:
        for value in (True, 2, 0.5, "other", ["q_proj"], {"q_proj": 2}):
            (tmp_path / "peft" / "adapter_config.json").write_text(
                json.dumps(written | {key: value})
            )
            if key in peft.IGNORED_KEYS or value in peft.PLAIN_VALUES.get(key, ()):
                peft.read_lora_config(str(tmp_path / "peft"), model)
                continue
            with pytest.raises(SpecError, match=rf"{key} = .* is not supported"):
                peft.read_lora_config(str(tmp_path / "peft"), model)


def test_the_same_targets_in_other_words_are_no_difference(tmp_path: Path) -> None:
    found = folders.train_spec(
        CASE, tmp_path, lora={"targets": ["down", "query", "self_attn.v_proj"]}
    ).lora
    assert found is not None and (found.rank, found.alpha) == (4, 8.0)


def test_a_folder_of_gpt2_sets_targets_that_the_job_left_out(tmp_path: Path) -> None:
    folders.start(CASE, tmp_path / "peft", target_modules=["c_attn"])
    asked = {"init_from": str(tmp_path / "peft")}
    found = peft.resolve_lora(tiny.train_spec(tiny.Counting(), model=tiny.GPT2, lora=asked)).lora
    assert found is not None and found.targets == ["c_attn"]


def test_a_folder_s_regular_expression_is_of_whole_names_and_its_dropout_is_not_the_job_s(
    tmp_path: Path,
) -> None:
    text = r"model\.layers\.\d+\.(self_attn\.[qv]|mlp\.down)_proj"
    folders.start(CASE, tmp_path / "peft", target_modules=text, lora_dropout=0.5)
    found = folders.train_spec(CASE, tmp_path).lora
    assert found == folders.train_spec(CASE, tmp_path, lora={"targets": ["q", "v", "down"]}).lora
    assert found is not None and found.dropout == 0.0
    assert found.targets == ["blocks.attention.query", "blocks.attention.value", "blocks.mlp.down"]


@pytest.mark.parametrize("what", ["no config", "no weights", "no folder", "broken"])
def test_a_folder_that_cannot_be_read_is_refused(what: str, tmp_path: Path) -> None:
    at = folders.start(CASE, tmp_path / "peft")
    if what in ("no config", "no folder"):
        (at / "adapter_config.json").unlink()
    if what in ("no weights", "no folder"):
        (at / "adapter_model.safetensors").unlink()
    if what == "broken":
        (at / "adapter_model.safetensors").write_bytes(b"no header")
    with pytest.raises(SpecError, match=r"train\.lora\.init_from"):
        folders.step(CASE, tmp_path).init_state()


def test_weights_of_another_dtype_are_cast(tmp_path: Path) -> None:
    at = folders.start(CASE, tmp_path / "peft")
    file = at / "adapter_model.safetensors"
    halves = {name: array.astype(np.float16) for name, array in load_file(file).items()}
    save_file(halves, file)
    params = folders.step(CASE, tmp_path).init_state().params
    name = "blocks.attention.query.lora_a"
    theirs = halves["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert np.array_equal(params[name][0], theirs.T.astype(np.float32))


@pytest.mark.parametrize(
    ("then", "now", "says"),
    [
        (None, Lora(), "train.lora was null, the job says given"),
        (Lora(), None, "train.lora was given, the job says null"),
        (Lora(), Lora(rank=8), "train.lora.rank was 16, the job says 8"),
        (Lora(), Lora(targets=["q"]), "train.lora.targets was ['q', 'v'], the job says ['q']"),
        (Lora(), Lora(alpha=1.0), ""),
    ],
)
def test_a_checkpoint_of_other_adapters_is_told_in_the_job_s_words(
    then: Any, now: Any, says: str
) -> None:
    def meta(lora: Lora | None) -> dict[str, Any]:
        train = tiny.train_spec(tiny.Counting()).model_copy(update={"lora": lora})
        return json.loads(
            train.model_dump_json(include={"model", "optimizer", "precision", "lora"})
        )

    assert describe_changes(meta(then), meta(now)) == says


def training(at: Path, weights: Path | None) -> BuiltInTraining:
    """A training of two steps on these weights, or on drawn ones; nothing of it is compiled."""
    keys = {
        "data": {"source": "synthetic", "examples": 64},
        "batch": 8,
        "mesh": {"dp": 8},
        "steps": 2,
    }
    train = references.train_spec(folders.BASES[CASE], weights, lora={"rank": 2}, **keys)
    return BuiltInTraining(train, NextToken(), RunContext(str(at)), Progress(None))


@pytest.mark.parametrize(
    ("then", "now", "says"),
    [
        (True, False, "adapters of the weights of .*/hf with digest .*; without"),
        (False, True, "adapters of weights that were drawn from train.seed, not those of"),
    ],
)
def test_a_run_goes_on_with_no_other_base_than_it_began_with(
    then: bool, now: bool, says: str, tmp_path: Path
) -> None:
    weights = folders.base(CASE, tmp_path / "hf")
    first = training(tmp_path, weights if then else None)
    first.step.builder.base = {"init_from": str(weights), "digest": "0" * 32} if then else None
    state = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), first.step.abstract
    )
    store = Store(first.folder, keep=1, uid="mine")
    store.claim()
    store.save(1, first.to_tree(state), first.checkpoint_meta())
    store.close()
    next_one = training(tmp_path, weights if now else None)
    with pytest.raises(CheckpointError, match=f"step 1 of .*checkpoints holds {says}"):
        tiny.run_to_an_error(Loop(next_one, RunContext(str(tmp_path)), Stop(), next_one.report))


def test_the_digest_of_a_base_is_that_of_its_folder_in_whatever_dtype(tmp_path: Path) -> None:
    found = []
    for lora in ({}, {"base": "int8"}, {"base": "bf16"}):
        step = folders.step(CASE, tmp_path, lora=lora)
        step.builder._read_base()
        assert step.builder.base is not None
        found.append(step.builder.base)
    assert {each["digest"] for each in found} == {
        frozen_base.record_base(step.builder._spec.model, found[0])["digest"]
    }
    (other,) = (dict(each, digest="of another folder") for each in found[:1])
    with pytest.raises(
        CheckpointError, match="name the folder that they were trained on as train.model.init_from"
    ):
        frozen_base.check_digest(other, found[1], "step 3 of here")


def test_one_parameter_of_an_int8_base_is_read_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, seen = load.read_parameter, []

    def watched(*arguments: Any) -> Any:
        assert not seen or seen[-1]() is None, "the parameter before this one is still held"
        array = read(*arguments)
        seen.append(weakref.ref(array))
        return array

    step = folders.step(CASE, tmp_path, lora={"base": "int8"})
    monkeypatch.setattr(load, "read_parameter", watched)
    step.builder._read_base()
    kept = len(seen)
    assert (
        kept
        and frozen_base.record_base(step.builder._spec.model, step.builder.base or {})
        and len(seen) == 2 * kept
    )
