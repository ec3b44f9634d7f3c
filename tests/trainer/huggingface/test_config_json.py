"""Conversion between config.json and model specs, and the agreement of a job with its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface import config_json
from jaxlaunch.trainer.huggingface.families import FAMILIES
from jaxlaunch.trainer.huggingface.folder import resolve_spec
from jaxlaunch.trainer.spec import CLASSIFY, LM, TrainSpec
from jaxlaunch.trainer.spec.presets import PRESETS
from tests.trainer.references import config

FAMILY_NAMES = "llama3 qwen2 qwen3 mistral gemma2 gemma3 olmo2 mixtral qwen3_moe gpt2 vit"
CASES = [f"{name}_tiny" for name in FAMILY_NAMES.split()] + ["mixtral_tiny_aux"]


def resolve_job(
    folder: Path, config_keys: dict[str, Any], task: str = LM, **model: Any
) -> TrainSpec:
    """The spec of a job that starts from a folder of this config.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_keys))
    return resolve_spec(TrainSpec(task=task, model={"init_from": str(folder), **model}))


def config_without(case: str, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config(case).items() if key not in keys}


@pytest.mark.parametrize("case", CASES)
def test_folder_sets_every_size_and_round_trips(case: str, tmp_path: Path) -> None:
    config_keys = config(case)
    model = resolve_job(tmp_path, config_keys, CLASSIFY if case == "vit_tiny" else LM).model
    assert model.kind == FAMILIES[config_keys["model_type"]].kind
    written = config_json.render_config(model)
    assert written["model_type"] == config_keys["model_type"]
    for key in ("layer_types", "sliding_window", "use_sliding_window", "head_dim"):
        if config_keys.get(key) is not None and key in written:
            assert written[key] == config_keys[key]
    assert config_json.find_differences(model, config_json.parse_model(written)) == []


@pytest.mark.parametrize(("name", "sizes"), PRESETS.items(), ids=list(PRESETS))
def test_presets_round_trip_through_their_family(name: str, sizes: dict[str, Any]) -> None:
    model: Any = TrainSpec(task="my:Task", model={"preset": name}).model
    written = config_json.render_config(model)
    assert written["model_type"] == sizes.get("family", sizes["kind"])
    assert config_json.find_differences(model, config_json.parse_model(written)) == []


LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = dict(rope_type="yarn", factor=4, rope_theta=7.0, mscale=1, mscale_all_dim=1)
OUR_YARN = dict(kind="yarn", factor=4.0, attention_factor=1.0, original_length=128)
QWEN2: dict[str, Any] = {"model_type": "qwen2", "sliding_window": 8}
MIXTRAL = dict(model_type="mixtral", num_local_experts=4, router_aux_loss_coef=0.5)
QWEN3_MOE = dict(
    model_type="qwen3_moe", num_hidden_layers=5, num_experts=4, num_experts_per_tok=2,
    mlp_only_layers=[1], decoder_sparse_step=2, output_router_logits=True, router_aux_loss_coef=0.5,
)  # fmt: skip
TRANSLATIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"attention_bias": True}, {"biases": ["qkv", "out"]}),
    ({"attention_bias": True, "mlp_bias": True}, {"biases": ["qkv", "out", "mlp"]}),
    ({"head_dim": 32}, {"head_size": 32}),
    ({"num_key_value_heads": None}, {"kv_heads": None, "kv_head_count": 4}),
    ({"hidden_act": "gelu_new"}, {"activation": "gelu_tanh"}),
    ({"rope_scaling": LINEAR}, {"rope_scaling": {"kind": "linear", "factor": 2.0}}),
    ({"rope_parameters": YARN}, {"rope_theta": 7.0, "rope_scaling": OUR_YARN}),
    ({"model_type": "mistral", "sliding_window": 8}, {"attention_spans": ("window",), "window": 8}),
    ({"model_type": "mistral", "sliding_window": None}, {"attention_spans": ("full",)}),
    (QWEN2, {"window": None}),
    (
        QWEN2 | {"use_sliding_window": True, "max_window_layers": 1},
        {"attention_spans": ("full", "window"), "window": 8},
    ),
    (
        MIXTRAL | {"sliding_window": 8},
        dict(experts=4, experts_per_token=2, expert_units=160, window=8, balance=0.0),
    ),
    (QWEN3_MOE, dict(sparse_layers=(3,), experts_normalized=False, balance=0.5)),
    (QWEN3_MOE, dict(expert_units=768, mlp_units=160)),
    # Other names of the same key: transformers 5 writes that of Qwen 3.
    ({"model_type": "qwen3_moe", "num_local_experts": 8}, dict(experts=8)),
    ({"model_type": "mixtral", "num_experts": 4}, dict(experts=4)),
    ({"model_type": "gemma2"}, dict(attention_spans=("window", "full"), window=4096)),
    ({"model_type": "gemma2"}, dict(head_channels=256, score_cap=50.0)),
    (
        {"model_type": "gemma3_text", "num_hidden_layers": 8},
        dict(attention_spans=("window",) * 5 + ("full",), rope_theta=1e6, rope_local_theta=1e4),
    ),
]


@pytest.mark.parametrize(("config_keys", "attributes"), TRANSLATIONS, ids=str)
def test_keys_are_translated(config_keys: dict[str, Any], attributes: dict[str, Any]) -> None:
    dropped = {"rope_scaling", "rope_theta", "head_dim", "hidden_act"} - config_keys.keys()
    keys = {key: value for key, value in config("llama_tiny").items() if key not in dropped}
    model = config_json.parse_model(keys | config_keys)
    for key, expected in attributes.items():
        actual = getattr(model, key)
        if key == "rope_scaling":
            actual = actual.model_dump(exclude_defaults=True) | {"kind": actual.kind}
        assert actual == expected, key
    rendered = config_json.render_config(model)
    assert config_json.find_differences(model, config_json.parse_model(rendered)) == []


@pytest.mark.parametrize(
    ("config_keys", "message"),
    [
        (
            {"model_type": "phi3", "resid_pdrop": 0.0, "embd_scale": 2},
            "model_type is phi3, and only llama, mistral",
        ),
        ({"model_type": "phi3", "embd_scale": 2}, "; keys that these do not have: embd_scale"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor is 0.5, which rotates a part of each head: only 1.0 is",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 1},
            "num_local_experts is 1: Input should be greater",
        ),
        (
            {"model_type": "mixtral", "num_experts_per_tok": 9},
            "num_experts_per_tok = 9 is more than num_local_experts = 8",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": 1},
            "mlp_only_layers is 1, not a list of layers",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [0, 1]},
            "mlp_only_layers has all 2 layers, which leaves",
        ),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 8},
            "num_local_experts is 8, and num_experts, another name of it, is 4; keep the one",
        ),
        ({"transformers_weights": "b.safetensors"}, "names another file of weights"),
        ({"hidden_act": "relu2"}, "hidden_act is relu2; supported activations are silu, gelu"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "rope_type is dynamic: the supported rotary scalings are default",
        ),
        ({"head_dim": 15}, "head_dim = 15 is odd"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads = 3 does not divide num_attention_heads = 4",
        ),
    ],
)
def test_unsupported_values_are_rejected(
    config_keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as error:
        resolve_job(tmp_path, config("llama_tiny") | config_keys)
    assert message in str(error.value) and str(tmp_path / "config.json") in str(error.value)


def test_job_keys_must_agree_with_the_folder(tmp_path: Path) -> None:
    gpt2 = config("gpt2_tiny")
    assert resolve_job(tmp_path, gpt2, layers=2, length=32).model.kind == "gpt2"
    with pytest.raises(SpecError, match=r"n_layer is 2, train\.model\.layers makes it 3"):
        resolve_job(tmp_path, gpt2, layers=3)
    with pytest.raises(
        SpecError, match=r"train\.model\.kv_heads does not apply to a model of the kind gpt2"
    ):
        resolve_job(tmp_path, gpt2, kv_heads=2)
    with pytest.raises(SpecError, match="kind gpt2, train.model.kind is decoder"):
        resolve_job(tmp_path, gpt2, kind="decoder")
    with pytest.raises(SpecError, match="length = 65 is more than positions = 64"):
        resolve_job(tmp_path, gpt2, length=65)
    with pytest.raises(SpecError, match=r"hidden_size is 64, train\.model\.width makes it 2048"):
        resolve_job(tmp_path, config("llama_tiny"), preset="llama-1b")


def test_missing_folder_is_allowed_if_the_job_has_every_size(tmp_path: Path) -> None:
    away = str(tmp_path / "nowhere")
    whole = TrainSpec(task=LM, model={"preset": "llama-1b", "init_from": away})
    assert resolve_spec(whole, must_exist=False) == whole
    for job, is_here in ((whole, True), (TrainSpec(task=LM, model={"init_from": away}), False)):
        with pytest.raises(SpecError, match=r"nowhere: config\.json cannot be read"):
            resolve_spec(job, must_exist=is_here)


def test_decoder_without_a_family_is_not_exported() -> None:
    odd = spec.Decoder(norms="both", qk_norm="whole")
    with pytest.raises(
        SpecError, match="Hugging Face has no such decoder, .* is nearest: .*norms is"
    ):
        config_json.render_config(odd)
    with pytest.raises(
        SpecError, match="llama is nearest: qk_norm is None, train.model.qk_norm makes it head"
    ):
        config_json.render_config(spec.Decoder(family="llama", qk_norm="head"))
    config_keys = config_json.render_config(spec.Decoder(qk_norm="head"))
    assert config_keys["architectures"] == ["Qwen3ForCausalLM"]


def test_families_that_cannot_express_a_model_are_skipped() -> None:
    # OLMo 2 has no head size of its own, and Llama's heads divide its width in transformers 5.
    thin = spec.Decoder(width=64, heads=3, kv_heads=3, head_size=24)
    assert config_json.find_family(thin) == "mistral"
    with pytest.raises(
        SpecError, match="olmo2 is nearest: hidden_size = 64 does not split into num_attention"
    ):
        config_json.find_family(thin.model_copy(update={"family": "olmo2"}))


# A key of a config.json and a value that changes what transformers 4.57.6 computes, or that it
# cannot read.
REFUSED: list[tuple[str, str, Any]] = [
    ("gpt2_tiny", "scale_attn_weights", False),
    ("gpt2_tiny", "scale_attn_weights", None),
    ("gpt2_tiny", "scale_attn_by_inverse_layer_idx", True),
    ("gpt2_tiny", "add_cross_attention", True),
    ("gpt2_tiny", "pruned_heads", {"0": [1]}),
    ("gpt2_tiny", "activation_function", "relu"),
    ("gpt2_tiny", "tie_word_embeddings", False),
    ("llama_tiny", "attention_bias", "false"),
    ("llama_tiny", "tie_word_embeddings", "false"),
    ("llama_tiny", "is_causal", False),
    ("llama_tiny", "logits_soft_cap", 30.0),
    ("llama_tiny", "qkv_bias", True),
    ("llama_tiny", "layer_types", ["sliding_attention", "full_attention"]),
    ("llama_tiny", "quantization_config", {"bits": 4}),
    ("llama_tiny", "rope_scaling", {"factor": 2.0}),
    ("llama_tiny", "rope_scaling", {"rope_type": "default", "mrope_section": [2, 3, 3]}),
    ("llama_tiny", "rope_scaling", {"rope_type": "linear", "type": "yarn", "factor": 2.0}),
    ("llama_tiny", "rope_scaling", {"rope_type": "llama3", "factor": 2.0}),
    ("llama_tiny", "rope_scaling", {"rope_type": "yarn", "factor": 2.0, "truncate": "no"}),
    (
        "llama_tiny",
        "rope_scaling",
        {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
    ),
    (
        "llama_tiny",
        "rope_parameters",
        {**LINEAR, "rope_theta": 10000.0},
    ),  # rope_theta at the top level has no scaling
    (
        "mistral_tiny",
        "layer_types",
        ["sliding_attention", "full_attention"],
    ),  # transformers gives all a window
    ("mistral_tiny", "sliding_window", True),
    ("qwen2_tiny", "attention_bias", True),
    ("qwen2_tiny", "use_sliding_window", "false"),
    ("qwen2_tiny", "layer_types", ["sliding_attention", "full_attention"]),  # without a window
    ("qwen3_tiny", "layer_types", ["full_attention"] * 3),
    ("qwen3_tiny", "head_dim", None),
    ("gemma2_tiny", "mlp_bias", True),
    ("gemma2_tiny", "use_bidirectional_attention", True),
    ("gemma3_tiny", "attn_logit_softcapping", 50.0),
    ("olmo2_tiny", "head_dim", 32),
    ("olmo2_tiny", "clip_qkv", 8.0),
    ("mixtral_tiny", "router_jitter_noise", 0.1),
    ("mixtral_tiny", "num_local_experts", None),
    ("mixtral_tiny", "shared_expert_intermediate_size", 64),
    ("qwen3_moe_tiny", "norm_topk_prob", "false"),
    ("qwen3_moe_tiny", "mlp_only_layers", ["0"]),
    ("qwen3_moe_tiny", "decoder_sparse_step", 0),
    ("qwen3_moe_tiny", "moe_intermediate_size", None),
    ("qwen3_moe_tiny", "scoring_func", "sigmoid"),
    ("vit_tiny", "qkv_bias", False),
    ("vit_tiny", "hidden_act", "relu"),
]
# One that changes nothing of it.
ACCEPTED: list[tuple[str, str, Any]] = [
    ("gpt2_tiny", "reorder_and_upcast_attn", True),
    ("gpt2_tiny", "summary_type", "mean"),
    ("gpt2_tiny", "n_ctx", 32),
    ("llama_tiny", "initializer_range", 0.5),
    ("llama_tiny", "pad_token_id", 3),
    ("llama_tiny", "problem_type", "regression"),
    ("llama_tiny", "torch_dtype", "bfloat16"),
    ("llama_tiny", "dtype", "bfloat16"),
    ("llama_tiny", "rope_scaling", {"rope_type": "default", "factor": 4.0}),
    ("llama_tiny", "rope_parameters", {"rope_type": "default", "rope_theta": 10000.0}),
    ("llama_tiny", "use_mrope", False),
    ("llama_tiny", "unsloth_fixed", True),
    ("mistral_tiny", "pretraining_tp", 1),
    ("qwen2_tiny", "sliding_window", 8),  # which use_sliding_window turns off
    ("qwen2_tiny", "attention_bias", False),
    ("gemma2_tiny", "hidden_act", "relu"),
    ("gemma3_tiny", "_sliding_window_pattern", 1),
    ("gemma3_tiny", "cache_implementation", "hybrid"),
    ("olmo2_tiny", "head_dim", 16),
    ("mixtral_tiny", "norm_topk_prob", False),
    ("qwen3_moe_tiny", "max_window_layers", 1),
    ("vit_tiny", "pooler_act", "relu"),
]


@pytest.mark.parametrize(("case", "key", "value"), REFUSED, ids=str)
def test_unknown_keys_that_change_the_model_are_rejected(case: str, key: str, value: Any) -> None:
    with pytest.raises(SpecError, match=key):
        config_json.parse_model(config(case) | {key: value})


@pytest.mark.parametrize(("case", "key", "value"), ACCEPTED, ids=str)
def test_irrelevant_keys_are_ignored(case: str, key: str, value: Any) -> None:
    model = config_json.parse_model(config(case))
    assert config_json.parse_model(config(case) | {key: value}) == model


@pytest.mark.parametrize("case", ["qwen2_tiny", "qwen3_tiny"])
def test_enabled_window_has_the_default_of_transformers(case: str) -> None:
    config_keys = config_without(case, "sliding_window", "layer_types")
    config_keys |= {"use_sliding_window": True, "max_window_layers": 1}
    model: Any = config_json.parse_model(config_keys)
    assert (model.window, model.attention_spans) == (4096, ("full", "window"))


SLIDING = {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("case", "config_keys", "message"),
    [
        ("llama_tiny", {"num_hidden_layers": ...}, "it lacks num_hidden_layers"),
        (
            "llama_tiny",
            {"num_attention_heads": ..., "vocab_size": None},
            "it lacks num_attention_heads, vocab_size",
        ),
        (
            "llama_tiny",
            {"hidden_size": ..., "intermediate_size": ...},
            "it lacks hidden_size, intermediate_size",
        ),
        ("gpt2_tiny", {"n_layer": ..., "n_embd": ...}, "it lacks n_layer, n_embd"),
        ("vit_tiny", {"hidden_size": ...}, "it lacks hidden_size"),
        (
            "llama_tiny",
            {"num_hidden_layers": "2"},
            'num_hidden_layers is "2", not a whole number above 0',
        ),
        (
            "llama_tiny",
            {"num_key_value_heads": "2"},
            'num_key_value_heads is "2": Input should be a valid integer',
        ),
        (
            "llama_tiny",
            {"max_position_embeddings": "64"},
            'max_position_embeddings is "64", not a whole number',
        ),
        (
            "llama_tiny",
            {"tie_word_embeddings": None},
            "tie_word_embeddings is null: Input should be a valid boolean",
        ),
        ("llama_tiny", {"rms_norm_eps": None}, "rms_norm_eps is null, not a number"),
        ("llama_tiny", {"rms_norm_eps": "small"}, 'rms_norm_eps is "small", not a number'),
        ("llama_tiny", {"rope_theta": None}, "rope_theta is null, not a number"),
        (
            "llama_tiny",
            {"rope_scaling": {"type": "linear"}},
            "rope_scaling.factor is null, not a number",
        ),
        ("llama_tiny", {"rope_scaling": "yarn"}, 'rope_scaling is "yarn", not a block of keys'),
        (
            "llama_tiny",
            {"rope_parameters": {"rope_type": "yarn", "factor": "4"}},
            'rope_parameters.factor is "4"',
        ),
        (
            "qwen2_tiny",
            {**SLIDING, "layer_types": ..., "max_window_layers": None},
            "max_window_layers is null",
        ),
        (
            "qwen2_tiny",
            {**SLIDING, "layer_types": ["sliding_attention"]},
            "layer_types has 1 layers, num_hidden_layers",
        ),
        (
            "qwen2_tiny",
            {**SLIDING, "layer_types": ["linear_attention"] * 2},
            "kinds of layers sliding_attention, full",
        ),
        (
            "mistral_tiny",
            {"sliding_window": "8"},
            'sliding_window is "8": Input should be a valid integer',
        ),
    ],
    ids=str,
)
def test_invalid_values_are_reported_with_their_key(
    case: str, config_keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    broken = {key: value for key, value in (config(case) | config_keys).items() if value is not ...}
    with pytest.raises(SpecError) as error:
        resolve_job(tmp_path, broken, CLASSIFY if case == "vit_tiny" else LM)
    assert message in str(error.value)
    assert str(error.value).startswith(str(tmp_path / "config.json"))


def test_job_may_repeat_keys_of_the_folder(tmp_path: Path) -> None:
    looks = ["sliding_attention"] * 5 + ["full_attention"]
    gemma = config("gemma3_tiny") | {"num_hidden_layers": 6, "sliding_window": 8}
    gemma["layer_types"] = looks
    pattern = ["window"] * 5 + ["full"]
    for output in ({"window": 8, "pattern": pattern}, {"pattern": pattern}, {"window": 8}):
        assert resolve_job(tmp_path, gemma, **output).model.attention_spans == tuple(pattern)
    with pytest.raises(SpecError, match="layer_types is .*, train.model.pattern makes it"):
        resolve_job(tmp_path, gemma, pattern=["window", "full"])
    keys = ("kv_heads", "hidden", "head_size", "query_scalar", "pattern", "positions")
    nulls = dict.fromkeys(keys)
    assert resolve_job(tmp_path, gemma, **nulls).model == resolve_job(tmp_path, gemma).model


def test_positions_of_a_decoder_come_from_the_folder(tmp_path: Path) -> None:
    config_keys = config("llama_tiny") | {"max_position_embeddings": 32768}
    model = resolve_job(tmp_path, config_keys, positions=131072).model
    assert (model.positions, model.length) == (32768, 2048)
    config_keys = config_without("llama_tiny", "max_position_embeddings")
    assert resolve_job(tmp_path, config_keys).model.length == 2048
    with pytest.raises(SpecError, match="n_positions is 64, train.model.positions makes it 128"):
        resolve_job(tmp_path, config("gpt2_tiny"), positions=128)


@pytest.mark.parametrize("missing", ["vocab", "hidden", "length"])
def test_missing_folder_is_rejected_if_a_size_is_missing(missing: str, tmp_path: Path) -> None:
    sizes = {"layers": 2, "width": 64, "heads": 4, "hidden": 160, "vocab": 97, "length": 32}
    model = {"kind": "decoder", "init_from": str(tmp_path / "nowhere"), **sizes}
    whole = TrainSpec(task=LM, model=model)
    assert resolve_spec(whole, must_exist=False) == whole
    with pytest.raises(SpecError, match=r"nowhere: config\.json cannot be read"):
        del model[missing]
        resolve_spec(TrainSpec(task=LM, model=model), must_exist=False)


def test_vit_without_labels_has_two_classes(tmp_path: Path) -> None:
    config_keys = config_without("vit_tiny", "id2label", "label2id")
    assert resolve_job(tmp_path, config_keys, CLASSIFY).model.classes == 2


GEMMA: dict[str, Any] = {"norms": "both", "norm_from_one": True, "embedding_scale": True}
GEMMA |= {"activation": "gelu_tanh", "width": 64, "heads": 4, "vocab": 97}


def test_configs_have_the_types_and_keys_of_transformers_5() -> None:
    for keys in ({"family": "gemma2"}, {"family": "gemma3_text", "qk_norm": "head"}):
        model = spec.Decoder.model_validate({**GEMMA, **keys, "query_scalar": 24.0})
        written = config_json.render_config(model)
        # transformers 5 refuses a float, and 4 a missing window.
        assert json.dumps(written["query_pre_attn_scalar"]) == "24"
        assert written["sliding_window"] == model.max_positions
        assert set(written["layer_types"]) == {"full_attention"}
        assert config_json.find_differences(model, config_json.parse_model(written)) == []
    for depth in (1, 3, 5):
        convnext = spec.ConvNeXt(depths=[1] * depth, widths=[16] * depth)
        assert config_json.render_config(convnext)["num_stages"] == depth


def test_models_that_cannot_be_exported_are_described() -> None:
    odd: dict[str, Any] = {"width": 64, "heads": 3, "kv_heads": 1, "head_size": 16}
    assert config_json.find_family(spec.Decoder(**odd)) == "mistral"
    refusals: list[tuple[spec.PublishedModel, str]] = [
        (spec.Decoder(**odd, family="llama"), "heads = 3 divides width = 64"),
        (
            spec.Decoder(**GEMMA, family="gemma2", query_scalar=14.5),
            "query_scalar = 14.5 is a whole",
        ),
        (spec.Decoder(qk_norm="whole"), "Hugging Face has no such decoder"),
        (spec.ResNet(stem="small"), "stem = small: Hugging Face's ResNet knows only imagenet"),
        (spec.ResNet(norm_eps=1e-3), "norm_eps = 0.001: Hugging Face's ResNet knows only 1e-05"),
        (spec.ViT(pool="mean"), "pool = mean: Hugging Face's ViT knows only cls"),
    ]
    for model, text in refusals:
        refusal = config_json.describe_refusal(model)
        assert refusal is not None and text in refusal
        assert refusal.startswith("launcher export will refuse this model: ")
    exportable: list[spec.PublishedModel] = [spec.Decoder(), spec.GPT2(), spec.ViT(), spec.ResNet()]
    assert [config_json.describe_refusal(model) for model in exportable] == [None] * 4
