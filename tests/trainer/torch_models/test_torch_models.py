"""Models of transformers: what needs no torch."""

from __future__ import annotations

import importlib.metadata
import json
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch.trainer.adapters import peft
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import folder as folders
from jaxlaunch.trainer.spec import Lora, TrainSpec, TransformersModel, model_sizes
from jaxlaunch.trainer.torch_models import (
    adapters,
    axes,
    build,
    checked,
    compare,
    modules,
    network,
    operators,
    weights,
)
from jaxlaunch.trainer.torch_models.attention import masked_attention

CONFIG = {
    "model_type": "olmo3",
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def lm_spec(model):
    return TrainSpec(task="lm", model=model, data={"source": "synthetic"})


def test_folder_stands_for_kind_and_init_from(folder):
    spec = lm_spec({"transformers": folder, "length": 32})
    assert isinstance(spec.model, TransformersModel)
    assert spec.model.init_from == folder

    resolved = folders.resolve_spec(spec)

    sizes = model_sizes(resolved.model)
    assert (sizes.vocab, sizes.layers, sizes.width, sizes.heads, sizes.length) == (
        1000,
        8,
        64,
        8,
        32,
    )


def test_length_is_at_most_that_of_the_folder(folder):
    spec = lm_spec({"kind": "transformers", "init_from": folder})
    assert folders.resolve_spec(spec).model.length == 2048


def test_other_sizes_than_the_folder_are_refused_with_both(folder):
    spec = lm_spec({"transformers": folder, "layers": 4})
    with pytest.raises(SpecError, match=r"layers is 8, train.model.layers makes it 4"):
        folders.resolve_spec(spec)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"kind": "transformers"}, "needs a folder"),
        ({"transformers": "a", "init_from": "b"}, "transformers = a and init_from = b"),
    ],
)
def test_block_without_one_folder_is_refused(model, message):
    with pytest.raises(ValueError, match=message):
        TransformersModel(**model)


def test_architecture_without_built_in_model_names_the_extra(folder, monkeypatch):
    monkeypatch.setattr(folders, "_has_transformers", lambda: False)
    spec = lm_spec({"init_from": folder})
    with pytest.raises(SpecError, match=r"olmo3.*\[transformers\]: install it with"):
        folders.resolve_spec(spec)


def test_architecture_without_built_in_model_uses_the_extra(folder, monkeypatch):
    monkeypatch.setattr(folders, "_has_transformers", lambda: True)
    spec = lm_spec({"init_from": folder, "length": 64})
    resolved = folders.resolve_spec(spec).model
    assert (resolved.kind, resolved.vocab, resolved.length) == ("transformers", 1000, 64)


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, "needs torch, which is not installed here"),
        ({"torch": "2.15.0"}, "torch from 2.10 to before 2.11, and 2.15.0 is installed"),
        ({"torch": "2.10.1+cpu", "torchax": "0.0.12"}, "torchax from 0.0.13 .* and 0.0.12"),
    ],
)
def test_versions_that_do_not_work_are_named(monkeypatch, versions, message):
    def find_version(name):
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(importlib.metadata, "version", find_version)
    with pytest.raises(SpecError, match=message):
        modules.check_versions()


def fake_module(shapes, tensor_plan, expert_plan=None):
    parameters = [(name, SimpleNamespace(shape=shape)) for name, shape in shapes.items()]
    return SimpleNamespace(
        named_parameters=lambda: parameters,
        named_buffers=list,
        _tp_plan=tensor_plan,
        _ep_plan=expert_plan,
    )


def test_plan_becomes_axes():
    shapes = {
        "model.embed_tokens.weight": (128, 64),
        "model.layers.0.self_attn.q_proj.weight": (64, 64),
        "model.layers.0.self_attn.q_proj.bias": (64,),
        "model.layers.11.self_attn.o_proj.weight": (64, 64),
        "model.layers.11.self_attn.o_proj.bias": (64,),
        "model.layers.0.mlp.experts.gate_up_proj": (4, 64, 64),
        "model.layers.0.norm.weight": (64,),
        "lm_head.weight": (128, 64),
        "model.layers.1.self_attn.q_proj.base_layer.weight": (64, 64),
        "model.layers.1.self_attn.q_proj.lora_A.default.weight": (4, 64),
        "lm_head.modules_to_save.default.weight": (128, 64),
    }
    plan = {
        "model.embed_tokens": "embedding_rowwise",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "lm_head": "colwise_gather_output",
    }
    experts = {"model.layers.*.mlp.experts.gate_up_proj": "grouped_gemm"}

    found = axes.parameter_axes(fake_module(shapes, plan, experts))

    assert list(found.values()) == [
        ("vocab", "embed"),
        ("hidden", "embed"),
        ("hidden",),
        ("embed", "hidden"),
        (None,),
        ("experts", "hidden", "embed"),
        (None,),
        ("vocab", "embed"),
        ("hidden", "embed"),
        (None, None),
        ("vocab", "embed"),
    ]


def test_parameters_keep_their_names_with_adapters():
    names = {
        "layers.0.q_proj.base_layer.weight": "layers.0.q_proj.weight",
        "layers.0.q_proj.lora_A.default.weight": "layers.0.q_proj.lora_A.weight",
        "layers.0.q_proj.lora_magnitude_vector.default.weight": (
            "layers.0.q_proj.lora_magnitude_vector.weight"
        ),
        "lm_head.original_module.weight": "lm_head.weight",
        "lm_head.modules_to_save.default.weight": "lm_head.modules_to_save.weight",
    }
    published = adapters.parameter_names(fake_module(dict.fromkeys(names, (4, 4)), {}))

    assert published == names
    assert [peft.is_adapter(name) for name in published.values()] == [
        False,
        True,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("source", "is_ignored"),
    [
        ("bert.embeddings.position_ids", True),
        ("model.layers.3.self_attn.rotary_emb.inv_freq", True),
        ("gpt_neox.layers.0.attention.masked_bias", True),
        ("gpt_neox.layers.0.attention.dense.bias", False),
        ("model.layers.3.self_attn.position_ids.weight", False),
    ],
)
def test_tensors_that_transformers_ignores_are_ignored(source, is_ignored):
    module = SimpleNamespace(_keys_to_ignore_on_load_unexpected={"attention.masked_bias"})
    assert weights.is_ignored(module, source) == is_ignored


def position_table(rows, **keys):
    return SimpleNamespace(num_embeddings=rows, padding_idx=None, **keys)


@pytest.mark.parametrize(
    ("name", "table", "limit"),
    [
        ("transformer.wpe", position_table(8), 8),
        ("decoder.embed_positions", position_table(10, offset=2), 8),
        ("embeddings.position_embeddings", SimpleNamespace(num_embeddings=9, padding_idx=0), 8),
        ("embeddings.x_position_embeddings", position_table(2), None),
        ("rotary.position_embeddings", SimpleNamespace(), None),
    ],
)
def test_length_is_at_most_the_learned_positions(name, table, limit):
    config = SimpleNamespace()
    config.get_text_config = lambda: config
    module = SimpleNamespace(config=config, named_modules=lambda: [(name, table)])
    build.check_positions(TransformersModel(transformers="f", length=8), module)
    longer = TransformersModel(transformers="f", length=9)
    if limit is None:
        build.check_positions(longer, module)
        return
    with pytest.raises(SpecError, match=f"length = 9, and f has {limit} positions"):
        build.check_positions(longer, module)


def test_only_the_tower_of_images_is_unused():
    names = ("model.vision.weight", "model.text.weight", "score.weight")
    parameters = {name: object() for name in names}
    decoder = SimpleNamespace(parameters=lambda: [parameters["model.text.weight"]])
    base = SimpleNamespace(parameters=lambda: [parameters[name] for name in names[:2]])
    module = SimpleNamespace(
        config=SimpleNamespace(get_text_config=SimpleNamespace),
        base_model=base,
        get_decoder=lambda: decoder,
        named_parameters=parameters.items,
    )
    assert network.list_unused(module) == {"model.vision.weight"}


def test_trained_module_with_a_tied_weight_is_not_merged():
    adapters.check_saved_ties(["embed.weight", "head.base_layer.weight"])
    with pytest.raises(SpecError, match=r"head\.weight of .*modules_to_save cannot be merged"):
        adapters.check_saved_ties(["embed.weight", "head.original_module.weight"])


def test_module_with_a_buffer_in_its_files_is_not_saved_whole():
    def make_layer(*buffers):
        return SimpleNamespace(
            named_buffers=lambda prefix: [(f"{prefix}.{name}", None) for name in buffers]
        )

    layers = {"mlp.gate": make_layer("bias"), "mlp.up": make_layer(), "rope": make_layer("freq")}
    module = SimpleNamespace(
        named_modules=layers.items,
        state_dict=lambda: {"mlp.gate.bias": None, "mlp.up.weight": None},
    )
    adapters.check_saved_modules(module, ["up", "rope"])
    with pytest.raises(SpecError, match="gate has the buffer mlp.gate.bias, which is not trained"):
        adapters.check_saved_modules(module, ["gate"])
    with pytest.raises(SpecError, match="the model has no module head"):
        adapters.check_saved_modules(module, ["head"])


@pytest.mark.parametrize(
    ("model", "lora", "message"),
    [
        ({}, {"base": "int8"}, "base: int8 applies to built-in models; use bf16"),
        ({"weights": "random"}, {}, "trains adapters of a folder's weights, and model.weights"),
        ({"transformers": None, "kind": "decoder"}, {"dora": True}, "dora needs train.model.kind"),
    ],
)
def test_adapters_that_a_model_cannot_have_are_refused(folder, model, lora, message):
    keys = {"model": {"transformers": folder, **model}, "lora": lora}
    if keys["model"]["transformers"] is None:
        del keys["model"]["transformers"]
    with pytest.raises(ValueError, match=message):
        TrainSpec(task="lm", data={"source": "synthetic"}, **keys)


PEFT = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 16,
    "use_dora": True,
    "rank_pattern": {"o_proj": 2},
    "target_modules": ["o_proj", "q_proj"],
    "modules_to_save": None,
}


def test_folder_of_peft_sets_the_adapters_of_a_model_of_transformers(folder, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT))
    block = {"init_from": str(tmp_path)}
    spec = TrainSpec(
        task="lm", model={"transformers": folder}, lora=block, data={"source": "synthetic"}
    )
    lora = peft.resolve_lora(spec).lora
    assert (lora.rank, lora.alpha, lora.dora, lora.rank_pattern) == (4, 16, True, {"o_proj": 2})
    assert (lora.targets, lora.modules_to_save) == (["o_proj", "q_proj"], [])

    other = spec.model_copy(update={"lora": Lora(**block, dora=False)})
    with pytest.raises(SpecError, match="dora is True there and False here"):
        peft.resolve_lora(other)
    (tmp_path / "adapter_config.json").write_text(json.dumps({**PEFT, "target_modules": ".*q"}))
    with pytest.raises(SpecError, match="is a regular expression; write a list"):
        peft.resolve_lora(spec)


def f32(array):
    return jnp.asarray(array, jnp.float32)


def reference_attention(query, key, value, mask, scale, cap, sinks):
    """Attention in float64, one query after the other."""
    batch, length, heads, _ = query.shape
    groups = key.shape[2]
    mixed = np.zeros((batch, length, heads, value.shape[-1]))
    for b, q, h in np.ndindex(batch, length, heads):
        group = h * groups // heads
        scores = scale * key[b, :, group].astype(np.float64) @ query[b, q, h].astype(np.float64)
        if cap is not None:
            scores = cap * np.tanh(scores / cap)
        scores = np.where(mask[b, 0, q], scores, -np.inf)
        shift = max(scores.max(), sinks[h])
        weights = np.exp(scores - shift)
        total = weights.sum() + np.exp(sinks[h] - shift)
        mixed[b, q, h] = (weights / total) @ value[b, :, group].astype(np.float64)
    return mixed


@pytest.mark.parametrize("cap", [None, 2.0])
def test_attention_with_sinks_and_other_value_size(cap):
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 5, 4, 8)), rng.normal(size=(2, 5, 2, 8))
    value, sinks = rng.normal(size=(2, 5, 2, 6)), rng.normal(size=4)
    mask = np.broadcast_to(np.tri(5, dtype=bool), (2, 1, 5, 5)) & (rng.random((2, 1, 5, 5)) > 0.3)
    mask |= np.eye(5, dtype=bool)
    mixed = masked_attention(
        f32(query), f32(key), f32(value), jnp.asarray(mask), 0.5, cap, f32(sinks)
    )

    expected = reference_attention(query, key, value, mask, 0.5, cap, sinks)
    np.testing.assert_allclose(mixed, expected, atol=1e-5)


def test_attention_drops_weights_and_keeps_their_mean():
    query = key = jnp.zeros((1, 2, 1, 4))
    value = jnp.ones((1, 2, 1, 512))
    keys = jax.random.split(jax.random.key(0), 400)
    mixed = jax.vmap(
        lambda key_: masked_attention(query, key, value, None, dropout=0.25, dropout_key=key_)[
            0, 0, 0, 0
        ]
    )(keys)
    assert {round(float(share), 4) for share in mixed} <= {0.0, 0.6667, 1.3333}
    assert abs(float(mixed.mean()) - 1) < 0.1


def test_grouped_product_multiplies_each_group_with_its_matrix():
    rows, matrices = np.arange(12.0).reshape(4, 3), np.arange(18.0).reshape(3, 3, 2)
    product = operators.grouped_product(
        jnp.asarray(rows), jnp.asarray(matrices), jnp.array([1, 1, 4])
    )
    np.testing.assert_allclose(product[0], rows[0] @ matrices[0])
    np.testing.assert_allclose(product[1:], rows[1:] @ matrices[2])


@pytest.mark.parametrize("padding", [0, 3])
def test_convolution_along_a_sequence_is_a_sum_of_products(padding):
    rng = np.random.default_rng(0)
    x, weight, bias = rng.normal(size=(2, 5, 9)), rng.normal(size=(5, 1, 4)), rng.normal(size=5)
    convolved = operators.depthwise_convolution(
        pytest.fail, f32(x), f32(weight), f32(bias), [1], [padding], [1], False, [0], 5
    )
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding)))
    expected = [
        [np.correlate(row[c], weight[c, 0]) + bias[c] for c in range(len(bias))] for row in padded
    ]
    np.testing.assert_allclose(convolved, expected, atol=1e-5)


def test_other_convolutions_are_those_of_torchax():
    arguments = f32(np.ones((2, 4, 8))), f32(np.ones((4, 1, 3))), None, [2], [0], [1], False, [0], 4
    assert operators.depthwise_convolution(lambda *same: same, *arguments) == arguments


def test_tiny_config_keeps_what_defines_the_architecture():
    tiny = compare.shrink_config(
        {
            **CONFIG,
            "layer_types": ["window"] * 7 + ["full"],
            "sliding_window": 4096,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
            "quantization_config": {"bits": 8},
        }
    )
    assert tiny["num_hidden_layers"] == len(tiny["layer_types"]) == 4
    assert set(tiny["layer_types"]) == {"window", "full"}
    assert (tiny["num_attention_heads"], tiny["num_key_value_heads"]) == (4, 2)
    assert tiny["sliding_window"] < compare.LENGTH
    assert (tiny["rope_theta"], tiny["tie_word_embeddings"]) == (5e5, True)
    assert "quantization_config" not in tiny


def comparison(**values):
    row = {"architecture": "A", "model_type": "a", "parameter": "w"}
    return compare.Comparison(**{**row, "logits": 0.0, "gradient": 0.0, "packed": 0.0, **values})


@pytest.mark.parametrize(
    ("values", "is_equal", "packs_rows"),
    [
        ({"logits": 1e-6, "gradient": 1e-5, "packed": 1e-6}, True, True),
        ({"logits": 1e-4}, False, True),
        ({"gradient": 1e-2}, False, True),
        ({"gradient": 3e-4, "rounding": 2e-4}, True, True),
        ({"gradient": 5e-4, "rounding": 2e-4}, False, True),
        ({"gradient": 1.0, "rounding": 1.0}, False, True),
        ({"packed": 0.1}, True, False),
        ({"logits": math.nan}, False, True),
        ({"gradient": math.nan}, False, True),
    ],
)
def test_comparison_judges_its_numbers(values, is_equal, packs_rows):
    result = comparison(**values)
    assert (result.is_equal, result.packs_rows) == (is_equal, packs_rows)


def test_architectures_are_required_to_be_compared(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(checked, "library_versions", lambda: {"torch": "2.10.0"})
    monkeypatch.setattr(checked, "read_table", lambda: {"known": comparison()})

    assert checked.require_checked("f", "known", is_allowed=False).is_equal
    with pytest.raises(SpecError, match="launcher model check f "):
        checked.require_checked("f", "new", is_allowed=False)
    assert not checked.require_checked("f", "new", is_allowed=True).packs_rows

    checked.store_comparison(comparison(model_type="new", packed=1.0))
    assert checked.require_checked("f", "new", is_allowed=False) == (True, False, "w", 0.0)
    checked.store_comparison(comparison(model_type="new", gradient=0.5))
    with pytest.raises(SpecError, match="the gradient of w differs by 0.5"):
        checked.require_checked("f", "new", is_allowed=False)
    assert not checked.require_checked("f", "new", is_allowed=True).is_equal


def test_table_of_the_package_can_be_read():
    for name, row in checked.read_table().items():
        assert row.model_type == name
        assert math.isfinite(row.logits)
