"""Conversion between Hugging Face's config.json and our model specs, without reading any file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pydantic

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError, pydantic_message
from jaxlaunch.trainer.huggingface.families import (
    ACTIVATIONS,
    FAMILIES,
    LOOKS,
    ROPE_BLOCK_KEYS,
    SAYING_NOTHING,
    WINDOW_KEYS,
    Family,
    key_faults,
    read_keys,
)
from jaxlaunch.trainer.spec import Model

Config = Mapping[str, Any]

# The default of transformers for the first and the last token if config.json names none.
GPT2_END = 50256
# Length of an example, in tokens, if neither the job nor a shorter model defines it.
LONGEST = 2048
# Keys of ours that a config.json does not contain, or that need not agree with it.
OWN = {"preset", "init_from", "scan", "length", "family", "dropout", "drop_path", "pool", "pixel_mean", "pixel_std"}
# The tensor of the head is the reliable source of the number of classes.
OWN |= {"classes", "new_head"}
# The positions of a ViT are interpolated for another size of image.
OWN |= {"image"}
# These keys affect training only.
OWN |= {"momentum", "running_variance", "layer_scale"}
# These keys affect training only; the folder defines the first one if the job does not.
OWN |= {"balance", "router_z", "capacity"}
# A config.json must contain these keys if the family has no default.
SIZES = ("layers", "width", "heads", "hidden", "vocab")
FLOATS = ("norm_eps", "query_scalar", "score_cap", "logit_cap", "rope_local_theta")
# Properties with the effective values of keys that may be null.
MEANT = {"kv_heads": "groups", "hidden": "units", "head_size": "size", "expert_hidden": "expert_units"}
# A null in the job means that the job does not set these keys.
DERIVED = {*MEANT, "query_scalar", "pattern"}
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
# Names of keys that no family lists, because they are not plain renames.
_SPECIAL_NAMES = {"window": "sliding_window", "dense_layers": "mlp_only_layers"}


def parse_model(config: Config) -> spec.PublishedModel:
    """Return the model that a config.json describes. Raises SpecError for invalid and unsupported keys."""
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        known = SAYING_NOTHING.union(*(read_keys(*item) for item in FAMILIES.items()))
        others = sorted(key for key, value in config.items() if key not in known and value not in (None, False, {}, []))
        hint = f"; keys that these do not have: {', '.join(others)}" if others else ""
        raise SpecError(f"model_type is {name}, and only {', '.join(FAMILIES)} are supported{hint}")
    family = FAMILIES[name]
    if faults := list(key_faults(name, family, config)):
        raise SpecError("; ".join(faults))
    if family.kind == "decoder":
        keys = _parse_decoder(name, family, config)
    else:
        keys = _parse_own_names(family, config)
        if isinstance(keys.get("image"), int):
            keys["image"] = [keys["image"]] * 2
        if family.kind != "gpt2":
            labels = config.get("id2label")
            # transformers omits id2label for two classes.
            keys["classes"] = len(labels) if labels else config.get("num_labels") or 2
        keys = {key: value for key, value in keys.items() if value is not None}
    for theirs in (theirs for theirs, ours in family.keys.items() if ours == "positions"):
        keys["length"] = min(_count(theirs, keys.get("positions") or LONGEST), LONGEST)
    try:
        model: Any = pydantic.TypeAdapter(Model).validate_python({"kind": family.kind, **keys})
    except pydantic.ValidationError as error:
        raise SpecError("; ".join(_say_in_their_names(family, fault) for fault in error.errors())) from None
    assert isinstance(model, spec.PublishedModel), "every family is of a published model"
    return model


def _say_in_their_names(family: Family, fault: Mapping[str, Any]) -> str:
    """Return a fault of pydantic with the key names of config.json instead of ours."""
    names = {ours: theirs for theirs, ours in family.keys.items()} | _SPECIAL_NAMES
    message, place = pydantic_message(fault), [str(part) for part in fault["loc"][1:]]
    if not place:
        return re.sub(r"\b(\w+)(?= (=|is|has) )", lambda word: names.get(word[1], word[1]), message)
    return f"{'.'.join([names.get(place[0], place[0]), *place[1:]])} is {json.dumps(fault['input'])}: {message}"


def differences(mine: spec.PublishedModel, theirs: spec.PublishedModel, keys: set[str] | None = None) -> list[str]:
    """Return a sentence for each key, of `keys` or of all, in which the folder's model differs from the job's."""
    compared = [key for key in type(mine).model_fields if key not in OWN and (keys is None or key in keys)]
    if mine.kind != theirs.kind and "kind" in compared:
        return [f"it holds a model of the kind {theirs.kind}, train.model.kind is {mine.kind}"]
    their_family = theirs.family if isinstance(theirs, spec.Decoder) else None
    family = FAMILIES[their_family or theirs.kind]
    names = {ours: key for key, ours in family.keys.items()} | _SPECIAL_NAMES
    names |= {"pattern": "layer_types", "activation": family.activation}
    found = []
    for key in compared:
        if keys is not None and key in DERIVED and getattr(mine, key) is None:
            continue
        if key == "positions" and (getattr(mine, key) is None or isinstance(theirs, spec.Decoder)):
            # Positions are not a parameter of a decoder.
            continue
        if key not in type(theirs).model_fields:
            found.append(f"train.model.{key} does not apply to a model of the kind {theirs.kind}")
            continue
        wanted, given = _meant_value(mine, key), _meant_value(theirs, key)
        if key == "pattern" and isinstance(mine, spec.Decoder) and isinstance(theirs, spec.Decoder):
            wanted, given = _layer_looks(mine, theirs.layers), _layer_looks(theirs, theirs.layers)
        if wanted != given:
            found.append(f"{names.get(key, key)} is {given}, train.model.{key} makes it {wanted}")
    if isinstance(mine, spec.Decoder) and mine.family and mine.family != their_family:
        found.append(f"model_type is {their_family}, train.model.family is {mine.family}")
    return found


def find_family(model: spec.PublishedModel) -> str:
    """Return the model_type for the export of a model: its own family, or the first one that matches.

    Raises SpecError with the differences to the nearest family if none matches.
    """
    if not isinstance(model, spec.Decoder):
        return model.kind
    faults: dict[str, list[str]] = {}
    for name in [model.family] if model.family else [name for name in FAMILIES if FAMILIES[name].kind == model.kind]:
        try:
            described = parse_model(_render(model, name))
            faults[name] = differences(model.model_copy(update={"family": name}), described)
        except SpecError as error:
            faults[name] = [str(error)]
    nearest = min(faults, key=lambda name: len(faults[name]))
    if faults[nearest]:
        raise SpecError(f"Hugging Face has no such decoder, {nearest} is nearest: {'; '.join(faults[nearest])}")
    return nearest


def render_config(model: spec.PublishedModel) -> dict[str, Any]:
    """Return the config.json of a model as a dict. Raises SpecError if Hugging Face has no such model."""
    return _render(model, find_family(model))


# --- theirs -> ours ---------------------------------------------------------------------------------------------------


def _value(family: Family, config: Config, key: str) -> Any:
    """Return the value of a key of theirs, or its default if the key is missing. Null counts as a value."""
    return config[key] if key in config else family.absent.get(key)


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{key} is {json.dumps(value)}, not a number")
    return float(value)


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{key} is {json.dumps(value)}, not a whole number above 0")
    return value


def _parse_own_names(family: Family, config: Config) -> dict[str, Any]:
    values = {theirs: _value(family, config, theirs) for theirs in family.keys}
    needed = [key for key, ours in family.keys.items() if ours in SIZES and key not in family.absent]
    missing = [key for key in needed if values[key] is None]
    if missing:
        raise SpecError(f"it does not say {', '.join(missing)}")
    for key in needed:
        _count(key, values[key])
    return {
        ours: _number(theirs, values[theirs])
        if ours == "norm_eps" or (ours in FLOATS and values[theirs] is not None)
        else values[theirs]
        for theirs, ours in family.keys.items()
    }


def _parse_decoder(name: str, family: Family, config: Config) -> dict[str, Any]:
    activation = str(_value(family, config, family.activation))
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise SpecError(f"{family.activation} is {activation}: of activations {known} are supported")
    keys = {**_parse_own_names(family, config), **family.fixed, "family": name, "activation": ACTIVATIONS[activation]}
    if family.has_biases:
        keys["biases"] = ["qkv", "out"] if config.get("attention_bias") else []
        keys["biases"] += ["mlp"] if config.get("mlp_bias") and name == "llama" else []
    keys |= _parse_window(family, config, keys["layers"]) | _parse_rope(family, config, keys)
    if keys["window"] is None:
        keys.pop("rope_local_theta", None)
    # The loss that balances experts is used only if the router's logits are an output.
    if "experts" in keys and config.get("output_router_logits"):
        keys["balance"] = _number("router_aux_loss_coef", config.get("router_aux_loss_coef", 0.001))
    if name == "qwen3_moe":
        step, only = _count("decoder_sparse_step", config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers")
        dense = {layer for layer in range(keys["layers"]) if (layer + 1) % step}
        if not isinstance(only or [], list) or any(type(layer) is not int for layer in only or []):
            raise SpecError(f"mlp_only_layers is {json.dumps(only)}, not a list of layers")
        keys["dense_layers"] = sorted(dense | set(only or []))
    return keys


def _parse_window(family: Family, config: Config, layers: int) -> dict[str, Any]:
    none = {"window": None, "pattern": None}
    if family.window is None:
        return none
    window = _value(family, config, "sliding_window")
    if "use_sliding_window" in WINDOW_KEYS[family.window] and not config.get("use_sliding_window"):
        window = None
    looks = []
    if "layer_types" in WINDOW_KEYS[family.window]:
        kinds = config.get("layer_types") or []
        if not isinstance(kinds, list) or any(kind not in LOOKS for kind in map(str, kinds)):
            raise SpecError(f"layer_types is {json.dumps(kinds)}: of kinds of layers {', '.join(LOOKS)} are supported")
        if kinds and len(kinds) != layers:
            raise SpecError(f"layer_types has {len(kinds)} layers, num_hidden_layers is {layers}")
        looks = [LOOKS[kind] for kind in kinds]
    if window is None and "window" in looks:
        raise SpecError("layer_types lists sliding_attention, and sliding_window or use_sliding_window says no window")
    looks = looks or _default_looks(family, config, layers)
    if window is None or "window" not in looks:
        return none
    period = next(n for n in range(1, layers + 1) if all(looks[i] == looks[i % n] for i in range(layers)))
    return {"window": window, "pattern": looks[:period]}


def _default_looks(family: Family, config: Config, layers: int) -> list[str]:
    """Return the kinds of the layers if config.json does not list them."""
    if family.window in ("all", "all_switched"):
        return ["window"] * layers
    if family.window == "switched":
        full = _number("max_window_layers", config.get("max_window_layers", 28))
        return ["full" if layer < full else "window" for layer in range(layers)]
    every = 2
    if not family.architecture.startswith("Gemma2"):
        every = _count("sliding_window_pattern", config.get("sliding_window_pattern", 6))
    return ["window" if (layer + 1) % every else "full" for layer in range(layers)]


def _parse_rope(family: Family, config: Config, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Parse rotary positions as written by transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    version_4 = _parse_rope_block(family, config, "rope_scaling")
    if not config.get("rope_parameters"):
        return version_4
    version_5 = _parse_rope_block(family, config, "rope_parameters")
    stated = version_5 if {"rope_theta", "rope_scaling"}.isdisjoint(config) else version_4
    if any({**keys, **stated}.get(key) != value for key, value in version_5.items()):
        raise SpecError(
            f"rope_parameters is {json.dumps(config['rope_parameters'])}, and rope_theta and rope_scaling say "
            "otherwise; keep those that the weights were trained with"
        )
    return version_5


def _parse_rope_block(family: Family, config: Config, name: str) -> dict[str, Any]:
    block, local, local_name = _block(name, config.get(name)), {}, f"{name}.sliding_attention"
    if name == "rope_parameters" and "rope_local_base_freq" in family.keys and "full_attention" in block:
        _check_keys(name, block, {"full_attention", "sliding_attention"})
        local = _block(local_name, block.get("sliding_attention"))
        block = _block(f"{name}.full_attention", block["full_attention"])
    _check_keys(name, block, ROPE_BLOCK_KEYS)
    _check_keys(local_name, local, ROPE_BLOCK_KEYS)
    theta = block.get("rope_theta") if name == "rope_parameters" else None
    theta = _value(family, config, "rope_theta") if theta is None else theta
    keys = {"rope_theta": _number("rope_theta", theta), "rope_scaling": _parse_scaling(name, block, config)}
    if local:
        if _parse_scaling(local_name, local, config) is not None:
            raise SpecError(f"{local_name}.rope_type is {local.get('rope_type')}: only default is supported")
        keys["rope_local_theta"] = _number(f"{local_name}.rope_theta", local.get("rope_theta"))
    return keys


def _block(key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value or {}, dict):
        raise SpecError(f"{key} is {json.dumps(value)}, not a block of keys")
    return dict(value or {})


def _check_keys(name: str, block: Mapping[str, Any], known: Collection[str]) -> None:
    if wrong := [key for key, value in block.items() if key not in known and value is not None]:
        raise SpecError(f"{name}.{wrong[0]} is {json.dumps(block[wrong[0]])}, a key that is not known here")


def _parse_scaling(name: str, block: Mapping[str, Any], config: Config) -> dict[str, Any] | None:
    kinds = [block[key] for key in ("rope_type", "type") if key in block]
    if len(set(map(str, kinds))) > 1:
        raise SpecError(f"{name}.rope_type is {kinds[0]}, and {name}.type is {kinds[1]}; keep one")
    if not kinds and block.keys() - {"rope_theta"}:
        raise SpecError(f"{name} is {json.dumps(block)}, and has no rope_type")
    kind = kinds[0] if kinds else "default"
    if kind == "default":
        return None
    if kind not in ("llama3", "linear", "yarn"):
        raise SpecError(
            f"{name}.rope_type is {kind}: of rotary scalings default, linear, llama3 and yarn are supported"
        )
    factor = _number(f"{name}.factor", block.get("factor"))
    scaling: dict[str, Any] = {"kind": kind, "factor": factor}
    if kind == "linear":
        return scaling
    length_key = "original_max_position_embeddings"
    scaling["original_length"] = block.get(length_key) or config.get("max_position_embeddings")
    if kind == "llama3":
        factors = ("low_freq_factor", "high_freq_factor")
        scaling |= {key: _number(f"{name}.{key}", block.get(key)) for key in factors}
        scaling["original_length"] = _count(f"{name}.{length_key}", block.get(length_key))
        return scaling
    scaling |= {key: _number(f"{name}.{key}", block.get(key) or plain) for key, plain in _YARN.items()}
    # An attention factor of None is the default.
    scaling |= {"truncate": block.get("truncate", True), "attention_factor": None}
    if block.get("attention_factor") is not None:
        scaling["attention_factor"] = _number(f"{name}.attention_factor", block["attention_factor"])
    elif block.get("mscale") and block.get("mscale_all_dim"):
        log = 0.1 * math.log(max(factor, 1.0))
        one, all_dim = (_number(f"{name}.{key}", block[key]) for key in ("mscale", "mscale_all_dim"))
        scaling["attention_factor"] = (one * log + 1.0) / (all_dim * log + 1.0)
    if not isinstance(scaling["truncate"], bool):
        raise SpecError(f"{name}.truncate is {json.dumps(scaling['truncate'])}, not true or false")
    return scaling


# --- ours -> theirs ---------------------------------------------------------------------------------------------------


def _meant_value(model: spec.PublishedModel, key: str) -> Any:
    """Return the value of a key in a canonical form, which is equal for equal models."""
    value = getattr(model, key)
    match key:
        case "rope_scaling":
            return None if value is None else value.model_dump()
        case "query_scalar":
            return value or float(model.head_channels) if isinstance(model, spec.Decoder) else None
        case "biases":
            return sorted(value)
    return getattr(model, MEANT.get(key, key), value)


def _layer_looks(model: spec.Decoder, layers: int) -> list[str]:
    """Return the kind of each layer, from the pattern if there is one: a job may take the window from the folder."""
    looks = model.pattern or model.attention_spans
    return [looks[layer % len(looks)] for layer in range(layers)]


def _render(model: spec.PublishedModel, name: str) -> dict[str, Any]:
    family = FAMILIES[name]
    config = {"architectures": [family.architecture], "model_type": name, **family.constant}
    for theirs, ours in family.keys.items():
        if ours == "positions":
            value: Any = model.position_rows if isinstance(model, spec.GPT2) else None
            value = model.max_positions if isinstance(model, spec.Decoder) else value
        elif ours == "query_scalar":
            value = _meant_value(model, ours)
        elif ours == "rope_local_theta" and isinstance(model, spec.Decoder):
            value = model.rope_local_theta or model.rope_theta
        else:
            value = getattr(model, MEANT.get(ours, ours))
        config[theirs] = value
    if isinstance(model, spec.Decoder):
        config |= dict(_render_decoder(model, family))
    elif isinstance(model, spec.GPT2) and model.vocab <= GPT2_END:
        config |= {"bos_token_id": None, "eos_token_id": None}
    elif isinstance(model, spec.ImageModel):
        labels = {str(label): f"LABEL_{label}" for label in range(model.classes)}
        config |= {"id2label": labels, "label2id": {name: int(label) for label, name in labels.items()}}
    return config


def _render_decoder(model: spec.Decoder, family: Family) -> Iterator[tuple[str, Any]]:
    """Yield the keys that are not plain renames of ours."""
    yield family.activation, next(theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation)
    yield "rope_theta", model.rope_theta
    yield "rope_scaling", _render_scaling(model)
    if family.has_biases:
        yield "attention_bias", {"qkv", "out"} <= set(model.biases)
    if family.architecture == "LlamaForCausalLM":
        yield "mlp_bias", "mlp" in model.biases
    if family.window is not None:
        kinds = {ours: theirs for theirs, ours in LOOKS.items()}
        looks = _layer_looks(model, model.layers)
        yield "sliding_window", model.window if "window" in looks else None
        if family.window in ("switched", "layers"):
            yield "layer_types", [kinds[look] for look in looks]
        if family.window in ("switched", "all_switched"):
            yield "use_sliding_window", "window" in looks
        if family.window == "switched":
            yield "max_window_layers", looks.index("window") if "window" in looks else model.layers
        elif "rope_local_base_freq" in family.keys and "full" in model.attention_spans:
            yield "sliding_window_pattern", model.attention_spans.index("full") + 1
    if "experts" in family.keys.values():
        if model.balance:
            yield "router_aux_loss_coef", model.balance
        yield "output_router_logits", model.balance > 0
        if "moe_intermediate_size" in family.keys:
            yield "decoder_sparse_step", 1
            yield "mlp_only_layers", sorted(set(model.dense_layers))


def _render_scaling(model: spec.Decoder) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    keys = {
        "linear": (),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    }[scaling.kind]
    rendered = {"rope_type": scaling.kind, "factor": scaling.factor}
    rendered |= {key: getattr(scaling, key) for key in keys if getattr(scaling, key) is not None}
    if scaling.original_length is not None:
        rendered["original_max_position_embeddings"] = scaling.original_length
    return rendered
