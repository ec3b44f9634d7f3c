"""Conversion between the contents of Hugging Face's config.json and our model specs.

`parse_model` reads a config.json by the tables of families.py, and `render_config` writes one. A
model is rendered as the first family whose config.json, when it is parsed again, describes the same
model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pydantic

from jaxlaunch import installation
from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError, pydantic_message
from jaxlaunch.trainer.huggingface.families import (
    ACTIVATIONS,
    FAMILIES,
    IGNORED_KEYS,
    LAYER_KINDS,
    ROPE_BLOCK_KEYS,
    WINDOW_KEYS,
    Family,
    key_faults,
    key_set,
    model_keys,
)
from jaxlaunch.trainer.spec import Model

Config = Mapping[str, Any]

# The default in transformers of the tokens that begin and end a text.
GPT2_END_TOKEN = 50256
# The largest default length of an example, in tokens. A model with fewer positions has that many.
MAX_DEFAULT_LENGTH = 2048
# The end of the name of an architecture whose head has classes.
CLASSIFIER_ENDING = "ForSequenceClassification"
# Our keys that config.json does not contain, or that may differ from it. Some only affect training,
# the number of classes is checked with the head's tensor, and the positions of a ViT are
# interpolated for another size of image.
UNCOMPARED_KEYS = key_set(
    "preset init_from scan length family dropout drop_path pool pixel_mean pixel_std classes "
    "new_head image momentum running_variance layer_scale balance router_z capacity transformers "
    "weights unchecked head"
)
# Our keys whose counterparts config.json must contain unless the family has a default.
REQUIRED_SIZES = ("layers", "width", "heads", "hidden", "vocab")
FLOAT_KEYS = ("norm_eps", "query_scalar", "score_cap", "logit_cap", "rope_local_theta")
# Our keys that may be null -> the property with the effective value.
DEFAULT_PROPERTIES = {
    "kv_heads": "kv_head_count",
    "hidden": "mlp_units",
    "head_size": "head_channels",
    "expert_hidden": "expert_units",
}
# A null in the job leaves these keys to the folder.
DERIVED_KEYS = {*DEFAULT_PROPERTIES, "query_scalar", "pattern"}
# Families for which transformers 5 requires that the number of heads divides the width.
UNDIVIDED_FAMILIES = ("llama", "gemma2", "gemma3_text")
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
# Our keys of each kind of rotary scaling, in addition to its factor and original length.
SCALING_KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
}
# Names in config.json of our keys that no family lists, because they are not plain renames.
_SPECIAL_NAMES = {"window": "sliding_window", "dense_layers": "mlp_only_layers"}


def parse_model(config: Config) -> spec.PublishedModel:
    """Return the model that a config.json describes. Raises SpecError."""
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        known_keys = IGNORED_KEYS.union(*(model_keys(*item) for item in FAMILIES.items()))
        set_keys = {key for key, value in config.items() if value not in (None, False, {}, [])}
        unknown_keys = sorted(set_keys - known_keys)
        hint = f"; keys that these do not have: {', '.join(unknown_keys)}" if unknown_keys else ""
        raise SpecError(
            f"model_type is {name}, and only {', '.join(FAMILIES)} are built in{hint}. Its PyTorch "
            f"code can be trained with the extra [transformers]: "
            f"{installation.install_hint('transformers')}"
        )
    family = FAMILIES[name]
    config = _resolve_aliases(family, config)
    if faults := list(key_faults(name, family, config)):
        raise SpecError("; ".join(faults))
    if family.kind == "decoder":
        keys = _parse_decoder(name, family, config)
    else:
        keys = _parse_renamed_keys(family, config)
        if isinstance(keys.get("image"), int):
            keys["image"] = [keys["image"]] * 2
        if family.kind != "gpt2":
            labels = config.get("id2label")
            # transformers omits id2label for two classes.
            keys["classes"] = len(labels) if labels else config.get("num_labels") or 2
        keys = {key: value for key, value in keys.items() if value is not None}
    names = {ours: theirs for theirs, ours in family.keys.items()} | _SPECIAL_NAMES
    if "positions" in names:
        positions = keys.get("positions") or MAX_DEFAULT_LENGTH
        keys["length"] = min(_parse_count(names["positions"], positions), MAX_DEFAULT_LENGTH)
    try:
        model: Any = pydantic.TypeAdapter(Model).validate_python({"kind": family.kind, **keys})
    except pydantic.ValidationError as error:
        faults = [_describe_fault(names, fault) for fault in error.errors()]
        raise SpecError("; ".join(faults)) from None
    assert isinstance(model, spec.PublishedModel), "every family is of a published model"
    return model


# Names of sizes in configurations of transformers, the most common first.
_ANY_SIZE_NAMES: Mapping[str, tuple[str, ...]] = {
    "vocab": ("vocab_size",),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "width": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_key_value_heads", "num_attention_heads", "n_head", "n_heads", "num_heads"),
    "positions": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}


def is_text_classifier(config: Config) -> bool:
    """Return whether a folder has the head of a classifier of texts."""
    names = config.get("architectures") or ()
    return any(str(name).endswith(CLASSIFIER_ENDING) for name in names)


def parse_transformers_model(config: Config, folder: str) -> spec.TransformersModel:
    """Return the model of any config.json, with the sizes that it states. Raises SpecError."""
    # A model of text and images describes its language model in a block of its own.
    config = {**config, **(config.get("text_config") or {})}
    sizes = {}
    for key, names in _ANY_SIZE_NAMES.items():
        values = [config[name] for name in names if type(config.get(name)) is int]
        if values:
            sizes[key] = values[0]
    length = min(sizes.pop("positions", MAX_DEFAULT_LENGTH), MAX_DEFAULT_LENGTH)
    if "vocab" not in sizes:
        raise SpecError("vocab_size is missing, and only models of tokens are supported")
    if is_text_classifier(config):
        labels = config.get("id2label") or config.get("num_labels")
        sizes["classes"] = len(labels) if isinstance(labels, dict) else labels or 2
    try:
        return spec.TransformersModel(init_from=folder, length=length, **sizes)
    except pydantic.ValidationError as error:
        fault = error.errors()[0]
        raise SpecError(f"{'.'.join(map(str, fault['loc']))}: {pydantic_message(fault)}") from None


def _resolve_aliases(family: Family, config: Config) -> Config:
    """Return the config with aliases replaced by the keys that they stand for.

    Raises SpecError if both are set to different values.
    """
    aliases = [alias for alias in family.aliases if config.get(alias) is not None]
    for alias in aliases:
        key, value = family.aliases[alias], config[alias]
        if config.get(key, value) != value:
            raise SpecError(
                f"{alias} is {json.dumps(value)}, and {key}, another name of it, is "
                f"{json.dumps(config[key])}; keep the one that the weights were trained with"
            )
    values = {family.aliases[alias]: config[alias] for alias in aliases}
    return {key: value for key, value in config.items() if key not in family.aliases} | values


def _describe_fault(names: Mapping[str, str], fault: Mapping[str, Any]) -> str:
    """Return the message of a pydantic error, with the key names of config.json instead of ours."""
    message, path = pydantic_message(fault), [str(part) for part in fault["loc"][1:]]
    if not path:
        return re.sub(r"\b(\w+)(?= (=|is|has) )", lambda word: names.get(word[1], word[1]), message)
    key = ".".join([names.get(path[0], path[0]), *path[1:]])
    return f"{key} is {json.dumps(fault['input'])}: {message}"


def find_differences(
    job_model: spec.PublishedModel, folder_model: spec.PublishedModel, keys: set[str] | None = None
) -> list[str]:
    """Return a sentence for each key in which the models differ.

    Args:
        job_model: Model of the job.
        folder_model: Model of the folder.
        keys: Keys that the job sets, or None to compare all keys.
    """
    kind = folder_model.kind
    compared_keys = [key for key in type(job_model).model_fields if key not in UNCOMPARED_KEYS]
    if keys is not None:
        compared_keys = [key for key in compared_keys if key in keys]
    if job_model.kind != kind and "kind" in compared_keys:
        return [f"it holds a model of the kind {kind}, train.model.kind is {job_model.kind}"]
    folder_family = folder_model.family if isinstance(folder_model, spec.Decoder) else None
    names: dict[str, str] = {}
    if not isinstance(folder_model, spec.TransformersModel):
        family = FAMILIES[folder_family or kind]
        names = {ours: key for key, ours in family.keys.items()} | _SPECIAL_NAMES
        names |= {"pattern": "layer_types", "activation": family.activation}
    faults = []
    for key in compared_keys:
        is_null = getattr(job_model, key) is None
        # A null leaves the value to the folder. A decoder has no parameter for its positions, so
        # they need not agree.
        if (keys is not None and key in DERIVED_KEYS and is_null) or (
            key == "positions" and (is_null or isinstance(folder_model, spec.Decoder))
        ):
            continue
        if key not in type(folder_model).model_fields:
            faults.append(f"train.model.{key} does not apply to a model of the kind {kind}")
            continue
        layers = getattr(folder_model, "layers", 0)
        job_value = _effective_value(job_model, key, layers)
        folder_value = _effective_value(folder_model, key, layers)
        if job_value != folder_value:
            faults.append(
                f"{names.get(key, key)} is {folder_value}, train.model.{key} makes it {job_value}"
            )
    job_family = job_model.family if isinstance(job_model, spec.Decoder) else None
    if job_family and job_family != folder_family:
        faults.append(f"model_type is {folder_family}, train.model.family is {job_family}")
    return faults


def find_family(model: spec.PublishedModel) -> str:
    """Return the model_type for an export: the model's family, or the first that can express it.

    Raises SpecError if there is none, with the differences from the nearest family.
    """
    if not isinstance(model, spec.Decoder):
        return model.kind
    faults: dict[str, list[str]] = {}
    families = [name for name, family in FAMILIES.items() if family.kind == model.kind]
    for name in [model.family] if model.family else families:
        try:
            rendered_model = parse_model(_render_as_family(model, name))
            job_model = model.model_copy(update={"family": name})
            faults[name] = find_differences(job_model, rendered_model)
            faults[name] += _unloadable_values(name, model)
        except SpecError as error:
            faults[name] = [str(error)]
    nearest = min(faults, key=lambda name: len(faults[name]))
    if faults[nearest]:
        raise SpecError(
            f"Hugging Face has no such decoder, {nearest} is nearest: {'; '.join(faults[nearest])}"
        )
    return nearest


def _unloadable_values(name: str, model: spec.Decoder) -> list[str]:
    """Return a sentence for each value of config.json that transformers 5 does not load."""
    faults = []
    if name in UNDIVIDED_FAMILIES and model.width % model.heads:
        faults.append(
            f"transformers 5 loads a {name} only if train.model.heads = {model.heads} divides "
            f"width = {model.width}"
        )
    query_scalar = model.query_scalar
    if query_scalar is not None and query_scalar != int(query_scalar):
        faults.append(
            f"transformers 5 loads a {name} only if train.model.query_scalar = {query_scalar} is a "
            "whole number"
        )
    return faults


def describe_refusal(model: spec.PublishedModel) -> str | None:
    """Return a sentence that says why the model cannot be exported, or None if it can."""
    refusal = "; ".join(model.unpublished_options)
    try:
        find_family(model)
    except SpecError as error:
        refusal = str(error)
    return f"launcher export will refuse this model: {refusal}" if refusal else None


def render_config(model: spec.PublishedModel) -> dict[str, Any]:
    """Return the config.json of a model. Raises SpecError if Hugging Face has none."""
    return _render_as_family(model, find_family(model))


# --- config.json -> our model ---------------------------------------------------------------------


def _config_value(family: Family, config: Config, key: str) -> Any:
    """Return the value of a key of config.json, or its default. Null counts as a value."""
    return config[key] if key in config else family.defaults.get(key)


def _parse_number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{key} is {json.dumps(value)}, not a number")
    return float(value)


def _parse_count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{key} is {json.dumps(value)}, not a whole number above 0")
    return value


def _parse_renamed_keys(family: Family, config: Config) -> dict[str, Any]:
    values = {theirs: _config_value(family, config, theirs) for theirs in family.keys}
    sizes = [theirs for theirs, ours in family.keys.items() if ours in REQUIRED_SIZES]
    needed = [key for key in sizes if key not in family.defaults]
    if missing := [key for key in needed if values[key] is None]:
        raise SpecError(f"it lacks {', '.join(missing)}")
    for key in needed:
        _parse_count(key, values[key])
    for theirs, ours in family.keys.items():
        if ours == "norm_eps" or (ours in FLOAT_KEYS and values[theirs] is not None):
            values[theirs] = _parse_number(theirs, values[theirs])
    return {ours: values[theirs] for theirs, ours in family.keys.items()}


def _parse_decoder(name: str, family: Family, config: Config) -> dict[str, Any]:
    activation = str(_config_value(family, config, family.activation))
    if activation not in ACTIVATIONS:
        raise SpecError(
            f"{family.activation} is {activation}; supported activations are "
            f"{', '.join(ACTIVATIONS)}"
        )
    keys = {**_parse_renamed_keys(family, config), **family.fixed}
    keys |= {"family": name, "activation": ACTIVATIONS[activation]}
    if family.has_biases:
        keys["biases"] = ["qkv", "out"] if config.get("attention_bias") else []
        keys["biases"] += ["mlp"] if config.get("mlp_bias") and name == "llama" else []
    keys |= _parse_window(family, config, keys["layers"]) | _parse_rope(family, config, keys)
    if keys["window"] is None:
        keys.pop("rope_local_theta", None)
    # transformers adds the balancing loss only if the router's logits are an output.
    if "experts" in keys and config.get("output_router_logits"):
        weight = config.get("router_aux_loss_coef", 0.001)
        keys["balance"] = _parse_number("router_aux_loss_coef", weight)
    if name == "qwen3_moe":
        step = _parse_count("decoder_sparse_step", config.get("decoder_sparse_step", 1))
        dense_layers = config.get("mlp_only_layers") or []
        if not isinstance(dense_layers, list) or not {int} >= {*map(type, dense_layers)}:
            raise SpecError(f"mlp_only_layers is {json.dumps(dense_layers)}, not a list of layers")
        skipped_layers = {layer for layer in range(keys["layers"]) if (layer + 1) % step}
        keys["dense_layers"] = sorted(skipped_layers | {*dense_layers})
    return keys


def _parse_window(family: Family, config: Config, layers: int) -> dict[str, Any]:
    no_window = {"window": None, "pattern": None}
    if family.window is None:
        return no_window
    window = _config_value(family, config, "sliding_window")
    if "use_sliding_window" in WINDOW_KEYS[family.window] and not config.get("use_sliding_window"):
        window = None
    layer_types = config.get("layer_types") or []
    if "layer_types" not in WINDOW_KEYS[family.window]:
        layer_types = []
    if not isinstance(layer_types, list) or not LAYER_KINDS.keys() >= set(map(str, layer_types)):
        raise SpecError(
            f"layer_types is {json.dumps(layer_types)}: of kinds of layers "
            f"{', '.join(LAYER_KINDS)} are supported"
        )
    if layer_types and len(layer_types) != layers:
        raise SpecError(f"layer_types has {len(layer_types)} layers, num_hidden_layers is {layers}")
    layer_kinds = [LAYER_KINDS[kind] for kind in layer_types]
    if window is None and "window" in layer_kinds:
        raise SpecError(
            "layer_types lists sliding_attention, and sliding_window or use_sliding_window "
            "says no window"
        )
    layer_kinds = layer_kinds or _default_layer_kinds(family, config, layers)
    if window is None or "window" not in layer_kinds:
        return no_window
    lengths = range(1, layers + 1)
    period = next(n for n in lengths if layer_kinds == (layer_kinds[:n] * layers)[:layers])
    return {"window": window, "pattern": layer_kinds[:period]}


def _default_layer_kinds(family: Family, config: Config, layers: int) -> list[str]:
    """Return the kind of each layer of a family with windows whose config.json lists none."""
    if family.window in ("all", "all_switched"):
        return ["window"] * layers
    if family.window == "switched":
        full_layers = _parse_number("max_window_layers", config.get("max_window_layers", 28))
        return ["full" if layer < full_layers else "window" for layer in range(layers)]
    period = 2
    if not family.architecture.startswith("Gemma2"):
        period = _parse_count("sliding_window_pattern", config.get("sliding_window_pattern", 6))
    return ["window" if (layer + 1) % period else "full" for layer in range(layers)]


def _parse_rope(family: Family, config: Config, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Parse rotary positions as transformers 4 writes them, or 5, which has `rope_parameters`."""
    keys_4 = _parse_rope_block(family, config, "rope_scaling")
    if not config.get("rope_parameters"):
        return keys_4
    keys_5 = _parse_rope_block(family, config, "rope_parameters")
    # A config.json may have the keys of both versions, which must then agree.
    other_keys = keys_5 if {"rope_theta", "rope_scaling"}.isdisjoint(config) else keys_4
    if any({**keys, **other_keys}.get(key) != value for key, value in keys_5.items()):
        raise SpecError(
            f"rope_parameters is {json.dumps(config['rope_parameters'])}, and rope_theta and "
            "rope_scaling differ from it; keep the values that the weights were trained with"
        )
    return keys_5


def _parse_rope_block(family: Family, config: Config, name: str) -> dict[str, Any]:
    block = _parse_block(name, config.get(name))
    local_block, local_name = {}, f"{name}.sliding_attention"
    has_local = name == "rope_parameters" and "rope_local_base_freq" in family.keys
    if has_local and "full_attention" in block:
        _check_keys(name, block, {"full_attention", "sliding_attention"})
        local_block = _parse_block(local_name, block.get("sliding_attention"))
        block = _parse_block(f"{name}.full_attention", block["full_attention"])
    _check_keys(name, block, ROPE_BLOCK_KEYS)
    _check_keys(local_name, local_block, ROPE_BLOCK_KEYS)
    theta = block.get("rope_theta") if name == "rope_parameters" else None
    theta = _config_value(family, config, "rope_theta") if theta is None else theta
    keys: dict[str, Any] = {"rope_theta": _parse_number("rope_theta", theta)}
    keys["rope_scaling"] = _parse_scaling(name, block, config)
    if local_block:
        if _parse_scaling(local_name, local_block, config) is not None:
            kind = local_block.get("rope_type")
            raise SpecError(f"{local_name}.rope_type is {kind}: only default is supported")
        theta = local_block.get("rope_theta")
        keys["rope_local_theta"] = _parse_number(f"{local_name}.rope_theta", theta)
    return keys


def _parse_block(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value or {}, dict):
        raise SpecError(f"{key} is {json.dumps(value)}, not a block of keys")
    return dict(value or {})


def _check_keys(name: str, block: Mapping[str, Any], allowed_keys: Collection[str]) -> None:
    for key, value in block.items():
        if key not in allowed_keys and value is not None:
            raise SpecError(f"{name}.{key} is {json.dumps(value)}, a key that is not known here")


def _parse_scaling(name: str, block: Mapping[str, Any], config: Config) -> dict[str, Any] | None:
    kinds = [block[key] for key in ("rope_type", "type") if key in block]
    if len(set(map(str, kinds))) > 1:
        raise SpecError(f"{name}.rope_type is {kinds[0]}, and {name}.type is {kinds[1]}; keep one")
    if not kinds and block.keys() - {"rope_theta"}:
        raise SpecError(f"{name} is {json.dumps(block)}, and has no rope_type")
    kind = kinds[0] if kinds else "default"
    if kind == "default":
        return None
    if kind not in SCALING_KEYS:
        raise SpecError(
            f"{name}.rope_type is {kind}: the supported rotary scalings are default, linear, "
            "llama3 and yarn"
        )

    def parse_number(key: str) -> float:
        return _parse_number(f"{name}.{key}", block.get(key))

    scaling: dict[str, Any] = {"kind": kind, "factor": parse_number("factor")}
    if kind == "linear":
        return scaling
    length_key = "original_max_position_embeddings"
    if kind == "llama3":
        scaling["original_length"] = _parse_count(f"{name}.{length_key}", block.get(length_key))
        return scaling | {key: parse_number(key) for key in SCALING_KEYS[kind]}
    scaling["original_length"] = block.get(length_key) or config.get("max_position_embeddings")
    return scaling | _parse_yarn(name, block, scaling["factor"], parse_number)


def _parse_yarn(
    name: str, block: Mapping[str, Any], factor: float, parse_number: Callable[[str], float]
) -> dict[str, Any]:
    keys = {key: parse_number(key) if block.get(key) else _YARN[key] for key in _YARN}
    # An attention factor of None is the default.
    attention_factor = None
    if block.get("attention_factor") is not None:
        attention_factor = parse_number("attention_factor")
    elif block.get("mscale") and block.get("mscale_all_dim"):
        growth = 0.1 * math.log(max(factor, 1.0))
        numerator, denominator = (
            parse_number(key) * growth + 1.0 for key in ("mscale", "mscale_all_dim")
        )
        attention_factor = numerator / denominator
    truncate = block.get("truncate", True)
    if not isinstance(truncate, bool):
        raise SpecError(f"{name}.truncate is {json.dumps(truncate)}, not true or false")
    return {**keys, "truncate": truncate, "attention_factor": attention_factor}


# --- our model -> config.json ---------------------------------------------------------------------


def _effective_value(model: spec.PublishedModel, key: str, layers: int) -> Any:
    """Return the value of a key in a canonical form, for comparisons."""
    value = getattr(model, key)
    if isinstance(model, spec.Decoder):
        match key:
            case "rope_scaling":
                return None if value is None else value.model_dump()
            case "query_scalar":
                return value or float(model.head_channels)
            case "biases":
                return sorted(value)
            case "pattern":
                return _layer_kinds(model, layers)
    return getattr(model, DEFAULT_PROPERTIES.get(key, key), value)


def _layer_kinds(model: spec.Decoder, layers: int) -> list[str]:
    """Return the kind of each layer, even if a job leaves the size of its window to the folder."""
    pattern = model.pattern or model.attention_spans
    return [pattern[layer % len(pattern)] for layer in range(layers)]


def _render_as_family(model: spec.PublishedModel, name: str) -> dict[str, Any]:
    family = FAMILIES[name]
    config = {"architectures": [family.architecture], "model_type": name, **family.constant}
    for theirs, ours in family.keys.items():
        config[theirs] = getattr(model, DEFAULT_PROPERTIES.get(ours, ours))
    names = {ours: theirs for theirs, ours in family.keys.items()}
    if isinstance(model, spec.GPT2):
        config[names["positions"]] = model.position_rows
    if isinstance(model, spec.Decoder):
        values: dict[str, Any] = {"positions": model.max_positions}
        values["query_scalar"] = _whole_number(model.query_scalar or model.head_channels)
        values["rope_local_theta"] = model.rope_local_theta or model.rope_theta
        config |= {names[ours]: value for ours, value in values.items() if ours in names}
        config |= _render_decoder(model, family)
    elif isinstance(model, spec.GPT2) and model.vocab <= GPT2_END_TOKEN:
        config |= {"bos_token_id": None, "eos_token_id": None}
    elif isinstance(model, spec.ImageModel):
        config |= label_keys([f"LABEL_{label}" for label in range(model.classes)])
    if isinstance(model, spec.ConvNeXt):
        # transformers builds this many stages, whatever the lengths of depths and widths are.
        config["num_stages"] = len(model.depths)
    return config


def _whole_number(value: float) -> float:
    """Return a whole number as an int, which transformers 5 requires for some keys."""
    return int(value) if value == int(value) else value


def label_keys(classes: Sequence[str]) -> dict[str, Any]:
    """Return the keys of config.json with the names of the labels."""
    return {
        "id2label": {str(label): name for label, name in enumerate(classes)},
        "label2id": {name: label for label, name in enumerate(classes)},
    }


def _render_decoder(model: spec.Decoder, family: Family) -> dict[str, Any]:
    """Return the keys of config.json that are not plain renames of ours."""
    activation = next(name for name, ours in ACTIVATIONS.items() if ours == model.activation)
    config: dict[str, Any] = {family.activation: activation}
    config |= {"rope_theta": model.rope_theta, "rope_scaling": _render_scaling(model)}
    if family.has_biases:
        config["attention_bias"] = {"qkv", "out"} <= set(model.biases)
    if family.architecture == "LlamaForCausalLM":
        config["mlp_bias"] = "mlp" in model.biases
    if "experts" in family.keys.values():
        config |= {"router_aux_loss_coef": model.balance} if model.balance else {}
        config["output_router_logits"] = model.balance > 0
    if "moe_intermediate_size" in family.keys:
        config |= {"decoder_sparse_step": 1, "mlp_only_layers": sorted(set(model.dense_layers))}
    return config | _render_window(model, family)


def _render_window(model: spec.Decoder, family: Family) -> dict[str, Any]:
    keys = WINDOW_KEYS[family.window]
    kinds = _layer_kinds(model, model.layers)
    first_window = kinds.index("window") if "window" in kinds else None
    names = {ours: theirs for theirs, ours in LAYER_KINDS.items()}
    # transformers 4 builds the mask of Gemma's windows even if no layer has one.
    no_window = model.max_positions if family.window == "layers" else None
    config: dict[str, Any] = {
        "sliding_window": no_window if first_window is None else model.window,
        "layer_types": [names[kind] for kind in kinds],
        "use_sliding_window": first_window is not None,
        "max_window_layers": model.layers if first_window is None else first_window,
    }
    if "rope_local_base_freq" in family.keys and "full" in model.attention_spans:
        config["sliding_window_pattern"] = model.attention_spans.index("full") + 1
    return {key: value for key, value in config.items() if key in keys}


def _render_scaling(model: spec.Decoder) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    values = {key: getattr(scaling, key) for key in SCALING_KEYS[scaling.kind]}
    rendered = {"rope_type": scaling.kind, "factor": scaling.factor}
    rendered |= {key: value for key, value in values.items() if value is not None}
    if scaling.original_length is not None:
        rendered["original_max_position_embeddings"] = scaling.original_length
    return rendered
