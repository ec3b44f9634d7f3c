"""The families of published models: how the keys of config.json correspond to our options.

A family is a model type of transformers. Its table lists the keys that correspond to ours, the
defaults of missing keys, and the options that all models of the family have. A config.json may
contain keys that are read here, and keys that do not affect the computation. Any other key is an
error, although transformers ignores it, because it may belong to code that computes something else.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

Keys = Mapping[str, str]
Values = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Family:
    """A model type of Hugging Face.

    Attributes:
        architecture: Class in transformers.
        kind: Kind of model in our spec.
        keys: Key in config.json -> key in our model block.
        defaults: Values of keys that config.json omits.
        fixed: Values of our keys that all models of the family have.
        constant: Keys of config.json for which only one value is supported.
        aliases: Other name of a key -> the key that transformers reads it as.
        ignored: Keys of this family that do not affect the computation.
        activation: Key of the activation in config.json.
        window: How config.json defines the layers with a window, a key of WINDOW_KEYS.
        has_biases: Whether the family has attention_bias and mlp_bias.
    """

    architecture: str
    kind: str
    keys: Keys
    defaults: Values
    fixed: Values = dataclasses.field(default_factory=dict)
    constant: Values = dataclasses.field(default_factory=dict)
    aliases: Keys = dataclasses.field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    activation: str = "hidden_act"
    window: str | None = None
    has_biases: bool = False


def key_set(names: str) -> frozenset[str]:
    """Return the names in a text that separates them by spaces."""
    return frozenset(names.split())


# Keys of decoders and of ViT.
_BLOCKS: Keys = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "intermediate_size": "hidden",
}
_SIZES: Keys = {
    **_BLOCKS,
    "num_key_value_heads": "kv_heads",
    "vocab_size": "vocab",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
    "max_position_embeddings": "positions",
    "head_dim": "head_size",
}
_DEFAULTS: Values = {
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
_QWEN_DEFAULTS: Values = {
    "sliding_window": 4096,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
}
_GEMMA_KEYS: Keys = {
    **_SIZES,
    "query_pre_attn_scalar": "query_scalar",
    "final_logit_softcapping": "logit_cap",
}
_GEMMA_DEFAULTS: Values = {
    **_DEFAULTS,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}
_GEMMA: Values = {"norms": "both", "norm_from_one": True, "embedding_scale": True}

# Keys of image models that select features for a model of which they are the backbone.
_BACKBONE_KEYS = key_set("num_labels out_features out_indices stage_names tie_word_embeddings")
# Keys of convolutional models.
_STAGES: Keys = {"depths": "depths", "hidden_sizes": "widths", "num_channels": "channels"}

# Families by model_type. An export of a model without a family tries them in this order.
FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        "decoder",
        _SIZES,
        {**_DEFAULTS, "max_position_embeddings": 2048},
        has_biases=True,
    ),
    "mistral": Family(
        "MistralForCausalLM",
        "decoder",
        _SIZES,
        {
            **_DEFAULTS,
            "sliding_window": 4096,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
        window="all",
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        "decoder",
        _SIZES,
        {**_DEFAULTS, **_QWEN_DEFAULTS},
        {"biases": ["qkv"]},
        window="switched",
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        "decoder",
        _SIZES,
        {**_DEFAULTS, **_QWEN_DEFAULTS, "head_dim": 128},
        {"qk_norm": "head"},
        window="switched",
        has_biases=True,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "decoder",
        {**_GEMMA_KEYS, "attn_logit_softcapping": "score_cap"},
        {
            **_GEMMA_DEFAULTS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
        },
        _GEMMA,
        # hidden_activation and sliding_window are read instead.
        ignored=frozenset(["hidden_act", "sliding_window_size"]),
        activation="hidden_activation",
        window="layers",
        has_biases=True,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        "decoder",
        {**_GEMMA_KEYS, "rope_local_base_freq": "rope_local_theta"},
        {
            **_GEMMA_DEFAULTS,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "max_position_embeddings": 131072,
        },
        {**_GEMMA, "qk_norm": "head"},
        # layer_types is read instead of _sliding_window_pattern.
        ignored=frozenset(["hidden_act", "_sliding_window_pattern"]),
        activation="hidden_activation",
        window="layers",
        has_biases=True,
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        "decoder",
        {theirs: ours for theirs, ours in _SIZES.items() if ours != "head_size"},
        {**_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        {"norms": "after", "qk_norm": "whole"},
        has_biases=True,
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        "decoder",
        {**_SIZES, "num_local_experts": "experts", "num_experts_per_tok": "experts_per_token"},
        {
            **_DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        {"experts_normalized": True},
        constant={"router_jitter_noise": 0.0},
        aliases={"num_experts": "num_local_experts"},
        window="all",
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        "decoder",
        {
            **_SIZES,
            "num_experts": "experts",
            "num_experts_per_tok": "experts_per_token",
            "moe_intermediate_size": "expert_hidden",
            "norm_topk_prob": "experts_normalized",
        },
        {
            **_DEFAULTS,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "sliding_window": 4096,
        },
        {"qk_norm": "head"},
        # transformers 5 writes num_local_experts.
        aliases={"num_local_experts": "num_experts"},
        # All layers have the window, whatever max_window_layers is.
        ignored=frozenset(["max_window_layers"]),
        window="all_switched",
        has_biases=True,
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "gpt2",
        {
            "n_layer": "layers",
            "n_embd": "width",
            "n_head": "heads",
            "n_inner": "hidden",
            "vocab_size": "vocab",
            "n_positions": "positions",
            "layer_norm_epsilon": "norm_eps",
        },
        {"layer_norm_epsilon": 1e-5, "n_inner": None, "n_positions": 1024},
        constant={"activation_function": "gelu_new", "tie_word_embeddings": True},
        aliases={
            "hidden_size": "n_embd",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
        },
        # The summary keys belong to a classifier. The others only change the order of two float32
        # operations.
        ignored=key_set(
            "attn_pdrop n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout "
            "summary_last_dropout summary_proj_to_labels summary_type summary_use_proj"
        ),
    ),
    "vit": Family(
        "ViTForImageClassification",
        "vit",
        {
            **_BLOCKS,
            "image_size": "image",
            "num_channels": "channels",
            "patch_size": "patch",
            "layer_norm_eps": "norm_eps",
        },
        {"layer_norm_eps": 1e-12, "image_size": 224, "num_channels": 3, "patch_size": 16},
        constant={"hidden_act": "gelu", "qkv_bias": True},
        # Keys of the pooler and the decoder of patches, which a classifier does not have.
        ignored=key_set(
            "attention_probs_dropout_prob encoder_stride hidden_dropout_prob num_labels pooler_act "
            "pooler_output_size tie_word_embeddings"
        ),
    ),
    "resnet": Family(
        "ResNetForImageClassification",
        "resnet",
        {**_STAGES, "embedding_size": "stem_width", "layer_type": "block"},
        {
            "depths": [3, 4, 6, 3],
            "hidden_sizes": [256, 512, 1024, 2048],
            "embedding_size": 64,
            "layer_type": "bottleneck",
            "num_channels": 3,
        },
        constant={
            "hidden_act": "relu",
            "downsample_in_first_stage": False,
            "downsample_in_bottleneck": False,
        },
        ignored=_BACKBONE_KEYS,
    ),
    "convnext": Family(
        "ConvNextForImageClassification",
        "convnext",
        {**_STAGES, "patch_size": "patch", "layer_norm_eps": "norm_eps"},
        {
            "depths": [3, 3, 9, 3],
            "hidden_sizes": [96, 192, 384, 768],
            "patch_size": 4,
            "num_channels": 3,
            "layer_norm_eps": 1e-12,
        },
        constant={"hidden_act": "gelu"},
        ignored=_BACKBONE_KEYS
        | key_set("drop_path_rate image_size layer_scale_init_value num_stages"),
    ),
}

# The name of an activation or a kind of layer in config.json -> ours.
ACTIVATIONS: Keys = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
LAYER_KINDS: Keys = {"sliding_attention": "window", "full_attention": "full"}

# Keys that affect the computation. Unless the family reads the key, only this value is supported.
SUPPORTED_VALUES: Values = {
    "add_cross_attention": False,
    "attn_logit_softcapping": None,
    "compression_config": None,
    "is_causal": True,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "quantization_config": None,
    "rope_interleaved": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "transformers_weights": None,
    "use_bidirectional_attention": False,
}
# The effect of another value of these keys and of a family's constants, for messages.
EFFECTS: Keys = {
    "activation_function": "computes another function in each layer",
    "add_cross_attention": "adds attention to an encoder",
    "attn_logit_softcapping": "caps attention scores, which transformers 4 does in gemma2 alone",
    "compression_config": "says that the weights are quantized",
    "downsample_in_bottleneck": "halves the image in another convolution of a block",
    "downsample_in_first_stage": "halves the image in the first stage too",
    "hidden_act": "computes another function in each layer",
    "is_causal": "lets a token see those after it",
    "is_encoder_decoder": "adds an encoder",
    "partial_rotary_factor": "rotates a part of each head",
    "pruned_heads": "removes heads from layers",
    "qkv_bias": "removes the biases of query, key and value",
    "quantization_config": "says that the weights are quantized",
    "rope_interleaved": "rotates neighboring channels instead of halves",
    "router_jitter_noise": "adds noise to the input of the router",
    "scale_attn_by_inverse_layer_idx": "divides attention scores by the number of the layer",
    "scale_attn_weights": "leaves attention scores undivided by the root of the head size",
    "tie_word_embeddings": "gives the head weights of its own",
    "transformers_weights": "names another file of weights than model.safetensors",
    "use_bidirectional_attention": "lets a token see those after it",
}
# Keys that do not affect the computation, such as those that transformers writes for every model.
IGNORED_KEYS = key_set(
    "_attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled "
    "_name_or_path _num_labels architectures attention_dropout attn_implementation auto_map "
    "bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward "
    "classifier_dropout cross_attention_hidden_size decoder_start_token_id diversity_penalty "
    "do_sample dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id "
    "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id "
    "gradient_checkpointing id2label initializer_range is_decoder is_llama_config label2id "
    "length_penalty max_length max_position_embeddings min_length model_type name_or_path "
    "no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences "
    "output_attentions output_hidden_states output_scores pad_token_id prefix pretraining_tp "
    "problem_type remove_invalid_values repetition_penalty resid_pdrop return_dict "
    "return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature "
    "tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript "
    "transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version "
    "use_bfloat16 use_cache"
)

# Keys of our model block whose counterpart in config.json must not be null if it has a default.
COUNT_KEYS = key_set("experts experts_per_token expert_hidden head_size")
EXPERT_KEYS = frozenset({"router_aux_loss_coef", "output_router_logits"})
ROPE_KEYS = frozenset({"rope_theta", "rope_scaling", "rope_parameters"})
# Keys in a block of rotary positions. The models of YaRN's authors have `finetuned`.
ROPE_BLOCK_KEYS = key_set(
    "attention_factor beta_fast beta_slow factor finetuned high_freq_factor low_freq_factor mscale "
    "mscale_all_dim original_max_position_embeddings rope_theta rope_type truncate type"
)
# How a family defines the layers with a window -> the keys that are read. In `all` families every
# layer has one, a `switched` family can turn them off, and `layers` lists the kind of each layer.
WINDOW_KEYS: Mapping[str | None, frozenset[str]] = {
    None: key_set(""),
    "all": key_set("sliding_window"),
    "all_switched": key_set("sliding_window use_sliding_window"),
    "switched": key_set("sliding_window use_sliding_window max_window_layers layer_types"),
    "layers": key_set("sliding_window layer_types sliding_window_pattern"),
}
BOOLEAN_KEYS = key_set(
    "attention_bias mlp_bias norm_topk_prob output_router_logits tie_word_embeddings "
    "use_sliding_window"
)


def model_keys(name: str, family: Family) -> frozenset[str]:
    """Return the keys of config.json that define a model of the family."""
    keys = {*family.keys, *family.constant, family.activation}
    if family.kind == "decoder":
        keys |= ROPE_KEYS | WINDOW_KEYS[family.window]
    if family.has_biases:
        keys |= {"attention_bias"} | ({"mlp_bias"} if name == "llama" else set())
    if "experts" in family.keys.values():
        keys |= EXPERT_KEYS
    if name == "qwen3_moe":
        keys |= {"decoder_sparse_step", "mlp_only_layers"}
    return frozenset(keys)


def key_faults(name: str, family: Family, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each unknown or unsupported key of a config.json."""
    known_keys, supported_values = model_keys(name, family), {**SUPPORTED_VALUES, **family.constant}
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    head_size = None
    if isinstance(width, int) and isinstance(heads, int) and heads > 0:
        head_size = width // heads
    for key, value in config.items():
        fault = f"{key} is {json.dumps(value)}"
        if key in family.constant or (key in SUPPORTED_VALUES and key not in known_keys):
            if value != supported_values[key] and (value is not None or supported_values[key]):
                supported = json.dumps(supported_values[key])
                yield (
                    f"{fault}, which {EFFECTS[key]}: only {supported} is supported; start from "
                    "weights with that value"
                )
        elif key in known_keys:
            if key in BOOLEAN_KEYS and value is not None and not isinstance(value, bool):
                yield f"{fault}, not true or false"
            # transformers fails if such a key is null.
            is_count = family.keys.get(key) in COUNT_KEYS
            if value is None and is_count and family.defaults.get(key) is not None:
                yield f"{key} is null, not a number; leave it out for {family.defaults[key]}"
        # Other keys are accepted if they are unset. head_dim may also have its default value.
        elif (
            key not in IGNORED_KEYS | family.ignored
            and value not in (None, False, "", [], {})
            and not (key == "head_dim" and value == head_size)
        ):
            yield (
                f"{fault}, and {name} has no such key: what it changes is not known here; remove "
                "it if the weights were trained without it"
            )
