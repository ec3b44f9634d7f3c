"""Adapters that do not fit a model, and peft folders that cannot be used: one sentence each."""

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
    ("targets", "message"),
    [
        (
            ["q", "w_proj"],
            "train.lora.targets: w_proj matches no linear layer of train.model.kind = decoder; "
            "there are q_p",
        ),
        (["embedding"], "embedding matches no linear layer"),
        (
            ["c_attn"],
            "there are q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, "
            "and all-linear",
        ),
        (["attention_norm"], "attention_norm matches no linear layer"),
    ],
)
def test_unmatched_target_is_rejected(targets: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message) as raised:
        tiny.build(tiny.Counting(), lora={"targets": targets})
    assert raised.value.code == contract.BAD_SPEC


@pytest.mark.parametrize(
    ("task", "lora", "message"),
    [
        (
            tiny.Digits(),
            {},
            "lora\n.*applies to a decoder, gpt2 or transformers, and train.model.kind = mlp",
        ),
        (tiny.Pictures(), {}, "train.model.kind = vit"),
        (tiny.Counting(), {"targets": []}, "lora.targets\n.*at least 1 item"),
        (tiny.Counting(), {"rank": 0}, "lora.rank\n.*greater than 0"),
        (tiny.Counting(), {"alpha": 0.0}, "lora.alpha\n.*greater than 0"),
        (tiny.Counting(), {"dropout": 1.0}, "lora.dropout\n.*less than 1"),
        (tiny.Counting(), {"base": "int4"}, "lora.base\n.*'bf16' or 'int8'"),
        (tiny.Counting(), {"r": 8}, "lora.r\n.*Extra inputs"),
    ],
)
def test_invalid_block_is_rejected(task: Any, lora: dict[str, Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        tiny.train_spec(task, lora=lora)


@pytest.mark.parametrize(
    ("changed", "lora", "message"),
    [
        ({"peft_type": "IA3"}, {}, "peft_type = IA3 is not LORA"),
        ({"use_dora": True}, {}, "use_dora = True is not supported"),
        (
            {"bias": "all", "rank_pattern": {"q_proj": 2}},
            {},
            "bias = all, rank_pattern = .'q_proj': 2. is not supp",
        ),
        ({"modules_to_save": ["lm_head"]}, {}, "modules_to_save"),
        ({"ensure_weight_tying": True}, {}, "ensure_weight_tying = True is not supported"),
        (
            {"megatron_config": {"hidden_size": 64}},
            {},
            "megatron_config = .'hidden_size': 64. is not supported",
        ),
        ({"layers_to_transform": 1}, {}, "layers_to_transform = 1 is not supported"),
        (
            {"a_key_of_tomorrow = 0.5 is not supported.*remove a key if the adapters were": 0.5},
            {},
            "a_key_of_tomorrow = 0.5 is not supported.*remove a key",
        ),
        ({"r": 0}, {}, "adapter_config.json: .*greater than 0"),
        (
            {"target_modules": ["q_proj", "wq"]},
            {},
            "adapter_config.json: target_modules: wq matches no linear layer",
        ),
        (
            {"target_modules": "q_proj"},
            {},
            "adapter_config.json: target_modules: q_proj matches no linear layer",
        ),
        (
            {"target_modules": "*"},
            {},
            "adapter_config.json: target_modules = .* is not a regular expression: nothing to",
        ),
        (
            {"target_modules": ["layers.0.mlp.up_proj"]},
            {},
            "matches blocks.mlp.up in 1 of 2 layers, not .*1.mlp.up_p",
        ),
        (
            {"target_modules": 5},
            {},
            "target_modules = 5 is neither a list of names nor a regular expression",
        ),
        ({"target_modules": [1, "q_proj"]}, {}, "is neither a list of names"),
        ({"target_modules": None}, {}, "is neither a list of names"),
        ({}, {"targets": ["wq"]}, "train.lora.targets: wq matches no linear layer"),
        (
            {"lora_alpha": None},
            {},
            "adapter_config.json: lora_alpha = None: Input should be a valid number",
        ),
        ({"r": "4"}, {}, "adapter_config.json: r = 4: Input should be a valid integer"),
        ({}, {"rank": 8}, "another adapter than train.lora: rank is 4 there and 8 here"),
        ({}, {"alpha": 1.0}, "alpha is 8.0 there and 1.0 here"),
        ({}, {"rslora": True}, "rslora is False there and True here"),
        ({}, {"targets": ["q", "v"]}, "targets is .* there and .'q', 'v'. here"),
        (
            {"r": 8},
            {},
            r"does not match train.lora: .*lora_A.weight.* are \[4, 64\], train.lora makes "
            r"it \[8, 64\]",
        ),
        ({"init_lora_weights": "pissa"}, {}, "init_lora_weights = pissa is not supported"),
        ({"task_type": "SEQ_CLS"}, {}, "task_type = SEQ_CLS is not supported"),
        ({"target_modules": ["q_proj"]}, {}, "lora_A.weight.* are not used by train.lora"),
        (
            {"target_modules": ["q_proj", "v_proj", "down_proj", "o_proj"]},
            {},
            "o_proj.lora_A.weight.* are missing",
        ),
    ],
)
def test_incompatible_folder_is_rejected(
    changed: dict[str, Any], lora: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folders.write_start(CASE, tmp_path / "peft", **changed)
    with pytest.raises(SpecError, match=message):
        folders.step(CASE, tmp_path, lora=lora).init_state()


def test_training_keys_of_a_folder_are_ignored(tmp_path: Path) -> None:
    training = {"lora_dropout": 0.1, "init_lora_weights": "gaussian", "eva_config": {"rho": 2.0}}
    training |= {"revision": "main", "a_key_of_tomorrow": False}
    folders.write_start(CASE, tmp_path / "peft", **training)
    folders.step(CASE, tmp_path).init_state()


def test_every_peft_key_is_handled(tmp_path: Path) -> None:
    # All keys of a LoraConfig, most with peft's default.
    written = folders.config(CASE)["adapter_config"]
    model = folders.train_spec(CASE, tmp_path).model
    assert isinstance(model, PublishedModel)
    for key in written.keys() - peft.READ_KEYS:
        for value in (True, 2, 0.5, "other", ["q_proj"], {"q_proj": 2}):
            text = json.dumps(written | {key: value})
            (tmp_path / "peft" / "adapter_config.json").write_text(text)
            if key in peft.IGNORED_KEYS or value in peft.PLAIN_VALUES.get(key, ()):
                peft.read_lora_config(str(tmp_path / "peft"), model)
                continue
            with pytest.raises(SpecError, match=rf"{key} = .* is not supported"):
                peft.read_lora_config(str(tmp_path / "peft"), model)


def test_equivalent_targets_agree(tmp_path: Path) -> None:
    targets = ["down", "query", "self_attn.v_proj"]
    actual = folders.train_spec(CASE, tmp_path, lora={"targets": targets}).lora
    assert actual is not None and (actual.rank, actual.alpha) == (4, 8.0)


def test_gpt2_folder_sets_the_targets(tmp_path: Path) -> None:
    folders.write_start(CASE, tmp_path / "peft", target_modules=["c_attn"])
    requests = {"init_from": str(tmp_path / "peft")}
    train = tiny.train_spec(tiny.Counting(), model=tiny.GPT2, lora=requests)
    actual = peft.resolve_lora(train).lora
    assert actual is not None and actual.targets == ["c_attn"]


def test_regular_expression_matches_whole_names(tmp_path: Path) -> None:
    text = r"model\.layers\.\d+\.(self_attn\.[qv]|mlp\.down)_proj"
    folders.write_start(CASE, tmp_path / "peft", target_modules=text, lora_dropout=0.5)
    actual = folders.train_spec(CASE, tmp_path).lora
    assert actual == folders.train_spec(CASE, tmp_path, lora={"targets": ["q", "v", "down"]}).lora
    assert actual is not None and actual.dropout == 0.0
    assert actual.targets == ["blocks.attention.query", "blocks.attention.value", "blocks.mlp.down"]


@pytest.mark.parametrize("name", ["no config", "no weights", "no folder", "broken"])
def test_unreadable_folder_is_rejected(name: str, tmp_path: Path) -> None:
    root = folders.write_start(CASE, tmp_path / "peft")
    if name in ("no config", "no folder"):
        (root / "adapter_config.json").unlink()
    if name in ("no weights", "no folder"):
        (root / "adapter_model.safetensors").unlink()
    if name == "broken":
        (root / "adapter_model.safetensors").write_bytes(b"no header")
    with pytest.raises(SpecError, match=r"train\.lora\.init_from"):
        folders.step(CASE, tmp_path).init_state()


def test_weights_of_another_dtype_are_cast(tmp_path: Path) -> None:
    root = folders.write_start(CASE, tmp_path / "peft")
    file = root / "adapter_model.safetensors"
    halves = {name: array.astype(np.float16) for name, array in load_file(file).items()}
    save_file(halves, file)
    params = folders.step(CASE, tmp_path).init_state().params
    name = "blocks.attention.query.lora_a"
    theirs = halves["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    assert np.array_equal(params[name][0], theirs.T.astype(np.float32))


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (None, Lora(), "train.lora was null, the job says given"),
        (Lora(), None, "train.lora was given, the job says null"),
        (Lora(), Lora(rank=8), "train.lora.rank was 16, the job says 8"),
        (Lora(), Lora(targets=["q"]), "train.lora.targets was ['q', 'v'], the job says ['q']"),
        (Lora(), Lora(alpha=1.0), ""),
    ],
)
def test_checkpoint_of_other_adapters_is_rejected(then: Any, now: Any, message: str) -> None:
    def meta(lora: Lora | None) -> dict[str, Any]:
        train = tiny.train_spec(tiny.Counting()).model_copy(update={"lora": lora})
        keys = {"model", "optimizer", "precision", "lora"}
        return json.loads(train.model_dump_json(include=keys))

    assert describe_changes(meta(then), meta(now)) == message


def make_loop(root: Path, weights: Path | None) -> BuiltInTraining:
    """A training of two steps on these weights, or on drawn ones; nothing of it is compiled."""
    data = {"source": "synthetic", "examples": 64}
    keys = {"data": data, "batch": 8, "mesh": {"dp": 8}, "steps": 2}
    train = references.train_spec(folders.BASES[CASE], weights, lora={"rank": 2}, **keys)
    return BuiltInTraining(train, NextToken(), RunContext(str(root)), Progress(None))


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        (
            True,
            False,
            "adapters of the weights of .*/hf with digest .*; without train.model.init_from the "
            "weights are",
        ),
        (
            False,
            True,
            "adapters of weights that were drawn from train.seed, not those of "
            "train.model.init_from = .*",
        ),
    ],
)
def test_run_resumes_only_with_its_base(
    then: bool, now: bool, message: str, tmp_path: Path
) -> None:
    weights = folders.base_folder(CASE, tmp_path / "hf")
    first = make_loop(tmp_path, weights if then else None)
    first.step.builder.base = {"init_from": str(weights), "digest": "0" * 32} if then else None
    state = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), first.step.abstract
    )
    store = Store(first.folder, keep=1, uid="mine")
    store.claim()
    store.save(1, first.to_tree(state), first.checkpoint_meta())
    store.close()
    next_one = make_loop(tmp_path, weights if now else None)
    with pytest.raises(CheckpointError, match=f"step 1 of .*checkpoints holds {message}"):
        tiny.run_to_an_error(Loop(next_one, RunContext(str(tmp_path)), Stop(), next_one.progress))


def test_digest_does_not_depend_on_the_dtype(tmp_path: Path) -> None:
    actual = []
    for lora in ({}, {"base": "int8"}, {"base": "bf16"}):
        step = folders.step(CASE, tmp_path, lora=lora)
        step.builder._read_base()
        assert step.builder.base is not None
        actual.append(step.builder.base)
    recorded = frozen_base.record_base(step.builder._spec.model, actual[0])
    assert {item["digest"] for item in actual} == {recorded["digest"]}
    (second,) = (dict(item, digest="of another folder") for item in actual[:1])
    with pytest.raises(
        CheckpointError, match="name the folder that they were trained on as train.model.init_from"
    ):
        frozen_base.check_digest(second, actual[1], "step 3 of here")


def test_int8_base_is_read_one_parameter_at_a_time(
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
    saved = len(seen)
    assert saved and frozen_base.record_base(step.builder._spec.model, step.builder.base or {})
    assert len(seen) == 2 * saved
