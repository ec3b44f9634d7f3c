"""What a config.json says in the keys of our models, and the config.json of a model of ours. Reads no file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pydantic

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError, said
from jaxlaunch.trainer.huggingface import allowed_keys
from jaxlaunch.trainer.huggingface.families import ACTIVATIONS, FAMILIES, LOOKS, SAYING_NOTHING, Family
from jaxlaunch.trainer.spec import Model

Config = Mapping[str, Any]

GPT2_END = 50256  # the token that transformers takes for a beginning and an end where a config.json names none
LONGEST = 2048  # tokens of an example where neither the job nor a shorter model says how many
# Keys of ours that a config.json does not speak of, or not in a way that must agree.
OWN = {"preset", "init_from", "scan", "length", "family", "dropout", "drop_path", "pool", "pixel_mean", "pixel_std"}
OWN |= {"classes", "new_head"}  # of which the head's tensor says the first for certain
OWN |= {"image"}  # for which a ViT's positions are interpolated
OWN |= {"momentum", "running_variance", "layer_scale"}  # of training
OWN |= {"balance", "router_z", "capacity"}  # of training; a folder says the first where the job does not
SIZES = ("layers", "width", "heads", "hidden", "vocab")  # which a config.json must say, where a family has no default
FLOATS = ("norm_eps", "query_scalar", "score_cap", "logit_cap", "rope_local_theta")
# Keys that stand for another one where they are null: the property that says what is meant.
MEANT = {"kv_heads": "groups", "hidden": "units", "head_size": "size", "expert_hidden": "expert_units"}
DERIVED = {*MEANT, "query_scalar", "pattern"}  # where a job says null, it says nothing
_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}


def model(config: Config) -> spec.Published:
    """The model that a config.json describes. Raises SpecError, which says what of it is wrong or not supported."""
    name = str(config.get("model_type"))
    if name not in FAMILIES:
        raise SpecError(_of_no_family(name, config))
    family = FAMILIES[name]
    if wrong := list(allowed_keys.faults(name, family, config)):
        raise SpecError("; ".join(wrong))
    keys = _decoder(name, family, config) if family.kind == "decoder" else _other(family, config)
    for theirs in (theirs for theirs, ours in family.keys.items() if ours == "positions"):
        keys["length"] = min(_count(theirs, keys.get("positions") or LONGEST), LONGEST)
    try:
        made: Any = pydantic.TypeAdapter(Model).validate_python({"kind": family.kind, **keys})
    except pydantic.ValidationError as error:
        raise SpecError("; ".join(_said(family, each) for each in error.errors())) from None
    assert isinstance(made, spec.Published), "every family is of a published model"
    return made


def differences(mine: spec.Published, theirs: spec.Published, keys: set[str] | None = None) -> list[str]:
    """A sentence for each key, of `keys` or of all, that `mine` has and `theirs`, a folder's model, has otherwise."""
    asked = [key for key in type(mine).model_fields if key not in OWN and (keys is None or key in keys)]
    if mine.kind != theirs.kind and "kind" in asked:
        return [f"it holds a model of the kind {theirs.kind}, train.model.kind is {mine.kind}"]
    found = []
    for key in asked:
        if keys is not None and key in DERIVED and getattr(mine, key) is None:
            continue
        if key == "positions" and (getattr(mine, key) is None or isinstance(theirs, spec.Decoder)):
            continue  # a decoder has no parameter of it
        if key not in type(theirs).model_fields:
            found.append(f"train.model.{key} does not apply to a model of the kind {theirs.kind}")
            continue
        wanted, given = _meant(mine, key), _meant(theirs, key)
        if key == "pattern" and isinstance(mine, spec.Decoder) and isinstance(theirs, spec.Decoder):
            wanted, given = _looks(mine, theirs.layers), _looks(theirs, theirs.layers)
        if wanted != given:
            found.append(f"{_named(theirs, key)} is {given}, train.model.{key} makes it {wanted}")
    their_family = theirs.family if isinstance(theirs, spec.Decoder) else None
    if isinstance(mine, spec.Decoder) and mine.family and mine.family != their_family:
        found.append(f"model_type is {their_family}, train.model.family is {mine.family}")
    return found


def family(of: spec.Published) -> str:
    """The model_type as which a model is written: its own, or the first of which it is one.

    Raises SpecError where there is none, with the keys by which the nearest differs.
    """
    if not isinstance(of, spec.Decoder):
        return of.kind
    tried = [of.family] if of.family else [name for name in FAMILIES if FAMILIES[name].kind == of.kind]
    faults = {name: _faults(of, name) for name in tried}
    nearest = min(faults, key=lambda name: len(faults[name]))
    if faults[nearest]:
        raise SpecError(f"Hugging Face has no such decoder, {nearest} is nearest: {'; '.join(faults[nearest])}")
    return nearest


def config(of: spec.Published) -> dict[str, Any]:
    """The config.json of a model, as a dict. Raises SpecError where Hugging Face has no such model."""
    return _config(of, family(of))


# --- theirs -> ours ---------------------------------------------------------------------------------------------------


def _of_no_family(name: str, config: Config) -> str:
    """That a config.json is of another architecture, and which of its keys ours do not have."""
    known = SAYING_NOTHING.union(*(allowed_keys.read(*each) for each in FAMILIES.items()))
    more = sorted(key for key, value in config.items() if key not in known and value not in (None, False, {}, []))
    differ = f"; keys that these do not have: {', '.join(more)}" if more else ""
    return f"model_type is {name}, and only {', '.join(FAMILIES)} are supported{differ}"


def _value(family: Family, config: Config, key: str) -> Any:
    """A key of theirs; where it is left out, what that means. Null is a value of its own."""
    return config[key] if key in config else family.absent.get(key)


def _number(key: str, value: Any) -> float:
    """A number of theirs; `key` is what it is called in the refusal."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"{key} is {json.dumps(value)}, not a number")
    return float(value)


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise SpecError(f"{key} is {json.dumps(value)}, not a whole number above 0")
    return value


def _said(family: Family, error: Mapping[str, Any]) -> str:
    """What pydantic says of keys of ours, with the names that they have there."""
    names = {ours: theirs for theirs, ours in family.keys.items()}
    names |= {"window": "sliding_window", "dense_layers": "mlp_only_layers"}
    message, place = said(error), [str(part) for part in error["loc"][1:]]
    if not place:
        return re.sub(r"\b(\w+)(?= (=|is|has) )", lambda word: names.get(word[1], word[1]), message)
    return f"{'.'.join([names.get(place[0], place[0]), *place[1:]])} is {json.dumps(error['input'])}: {message}"


def _plain(family: Family, config: Config) -> dict[str, Any]:
    """The keys that are ours by another name."""
    found = {theirs: _value(family, config, theirs) for theirs in family.keys}
    needed = [key for key, ours in family.keys.items() if ours in SIZES and key not in family.absent]
    missing = [key for key in needed if found[key] is None]
    if missing:
        raise SpecError(f"it does not say {', '.join(missing)}")
    for key in needed:
        _count(key, found[key])
    return {
        ours: _number(theirs, found[theirs])
        if ours == "norm_eps" or (ours in FLOATS and found[theirs] is not None)
        else found[theirs]
        for theirs, ours in family.keys.items()
    }


def _decoder(name: str, family: Family, config: Config) -> dict[str, Any]:
    activation = str(_value(family, config, family.activation))
    if activation not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise SpecError(f"{family.activation} is {activation}: of activations {known} are supported")
    keys = {**_plain(family, config), **family.fixed, "family": name, "activation": ACTIVATIONS[activation]}
    if family.has_biases:
        of_attention, of_mlp = config.get("attention_bias"), config.get("mlp_bias") and name == "llama"
        keys["biases"] = (["qkv", "out"] if of_attention else []) + (["mlp"] if of_mlp else [])
    keys |= _window(family, config, keys["layers"]) | _rope(family, config, keys)
    if keys["window"] is None:
        keys.pop("rope_local_theta", None)
    return keys | (_experts(config, keys) if "experts" in keys else {})


def _experts(config: Config, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers have experts, and the weight of the loss that balances them, which counts where it is put out."""
    found: dict[str, Any] = {}
    if config.get("output_router_logits"):
        found["balance"] = _number("router_aux_loss_coef", config.get("router_aux_loss_coef", 0.001))
    if keys["family"] == "qwen3_moe":
        step, only = _count("decoder_sparse_step", config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers")
        dense = {layer for layer in range(keys["layers"]) if (layer + 1) % step}
        if not isinstance(only or [], list) or any(type(layer) is not int for layer in only or []):
            raise SpecError(f"mlp_only_layers is {json.dumps(only)}, not a list of layers")
        found["dense_layers"] = sorted(dense | set(only or []))
    return found


def _window(family: Family, config: Config, layers: int) -> dict[str, Any]:
    if family.window is None:
        return {"window": None, "pattern": None}
    window = _value(family, config, "sliding_window")
    if "use_sliding_window" in allowed_keys.OF_WINDOWS[family.window] and not config.get("use_sliding_window"):
        window = None
    listed = _listed_looks(config, layers) if "layer_types" in allowed_keys.OF_WINDOWS[family.window] else []
    if window is None and "window" in listed:
        raise SpecError("layer_types lists sliding_attention, and sliding_window or use_sliding_window says no window")
    looks = listed or _default_looks(family, config, layers)
    if window is None or "window" not in looks:
        return {"window": None, "pattern": None}
    period = next(n for n in range(1, layers + 1) if all(looks[i] == looks[i % n] for i in range(layers)))
    return {"window": window, "pattern": looks[:period]}


def _listed_looks(config: Config, layers: int) -> list[str]:
    """The kinds of the layers as config.json lists them; none where it does not."""
    kinds = config.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind not in LOOKS for kind in map(str, kinds)):
        raise SpecError(f"layer_types is {json.dumps(kinds)}: of kinds of layers {', '.join(LOOKS)} are supported")
    if kinds and len(kinds) != layers:
        raise SpecError(f"layer_types has {len(kinds)} layers, num_hidden_layers is {layers}")
    return [LOOKS[kind] for kind in kinds]


def _default_looks(family: Family, config: Config, layers: int) -> list[str]:
    """The kinds of the layers where config.json does not list them."""
    if family.window in ("all", "all_switched"):
        return ["window"] * layers
    if family.window == "switched":
        whole = _number("max_window_layers", config.get("max_window_layers", 28))
        return ["full" if layer < whole else "window" for layer in range(layers)]
    every = 2
    if not family.architecture.startswith("Gemma2"):
        every = _count("sliding_window_pattern", config.get("sliding_window_pattern", 6))
    return ["window" if (layer + 1) % every else "full" for layer in range(layers)]


def _rope(family: Family, config: Config, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions, as transformers 4 writes them (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    of_4 = _rope_of(family, config, "rope_scaling")
    if not config.get("rope_parameters"):
        return of_4
    of_5 = _rope_of(family, config, "rope_parameters")
    of_both = of_5 if {"rope_theta", "rope_scaling"}.isdisjoint(config) else of_4
    if any({**keys, **of_both}.get(key) != value for key, value in of_5.items()):
        raise SpecError(
            f"rope_parameters is {json.dumps(config['rope_parameters'])}, and rope_theta and rope_scaling say "
            "otherwise; keep those that the weights were trained with"
        )
    return of_5


def _rope_of(family: Family, config: Config, name: str) -> dict[str, Any]:
    """What the block of that name says, with the keys beside it where it leaves out theirs."""
    given, local = _block(name, config.get(name)), {}
    if name == "rope_parameters" and "rope_local_base_freq" in family.keys and "full_attention" in given:
        _only(name, given, {"full_attention", "sliding_attention"})
        local = _block(f"{name}.sliding_attention", given.get("sliding_attention"))
        given = _block(f"{name}.full_attention", given["full_attention"])
    for place, block in ((name, given), (f"{name}.sliding_attention", local)):
        _only(place, block, allowed_keys.IN_ROPE)
    theta = given.get("rope_theta", _value(family, config, "rope_theta")) if name == "rope_parameters" else None
    theta = _value(family, config, "rope_theta") if theta is None else theta
    found = {"rope_theta": _number("rope_theta", theta), "rope_scaling": _scaling(name, given, config)}
    if local:
        if _scaling(f"{name}.sliding_attention", local, config) is not None:
            raise SpecError(
                f"{name}.sliding_attention.rope_type is {local.get('rope_type')}: only default is supported"
            )
        found["rope_local_theta"] = _number(f"{name}.sliding_attention.rope_theta", local.get("rope_theta"))
    return found


def _block(key: str, value: Any) -> dict[str, Any]:
    """A block of keys; empty where there is none."""
    if not isinstance(value or {}, dict):
        raise SpecError(f"{key} is {json.dumps(value)}, not a block of keys")
    return dict(value or {})


def _only(name: str, block: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises SpecError where a block has a key that says something and is not known."""
    if wrong := [key for key, value in block.items() if key not in known and value is not None]:
        raise SpecError(f"{name}.{wrong[0]} is {json.dumps(block[wrong[0]])}, a key that is not known here")


def _scaling(name: str, given: Mapping[str, Any], config: Config) -> dict[str, Any] | None:
    """Of the block of that name."""
    kinds = [given[key] for key in ("rope_type", "type") if key in given]
    if len(set(map(str, kinds))) > 1:
        raise SpecError(f"{name}.rope_type is {kinds[0]}, and {name}.type is {kinds[1]}; keep one")
    if not kinds and given.keys() - {"rope_theta"}:
        raise SpecError(f"{name} is {json.dumps(given)}, and has no rope_type")
    kind = kinds[0] if kinds else "default"
    if kind == "default":
        return None
    if kind not in ("llama3", "linear", "yarn"):
        raise SpecError(
            f"{name}.rope_type is {kind}: of rotary scalings default, linear, llama3 and yarn are supported"
        )
    found: dict[str, Any] = {"kind": kind, "factor": _number(f"{name}.factor", given.get("factor"))}
    original = given.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if kind == "llama3":
        factors = ("low_freq_factor", "high_freq_factor")
        found |= {key: _number(f"{name}.{key}", given.get(key)) for key in factors}
        original = _count(f"{name}.original_max_position_embeddings", given.get("original_max_position_embeddings"))
    if kind == "yarn":
        found |= {key: _number(f"{name}.{key}", given.get(key) or plain) for key, plain in _YARN.items()}
        found |= {"truncate": given.get("truncate", True), "attention_factor": _attention_factor(name, given)}
        if not isinstance(found["truncate"], bool):
            raise SpecError(f"{name}.truncate is {json.dumps(found['truncate'])}, not true or false")
    return found if kind == "linear" else found | {"original_length": original}


def _attention_factor(name: str, given: Mapping[str, Any]) -> float | None:
    """What YaRN's keys make it; None: the default."""
    if given.get("attention_factor") is not None:
        return _number(f"{name}.attention_factor", given["attention_factor"])
    if given.get("mscale") and given.get("mscale_all_dim"):
        log = 0.1 * math.log(max(_number(f"{name}.factor", given["factor"]), 1.0))
        one, all_dim = (_number(f"{name}.{key}", given[key]) for key in ("mscale", "mscale_all_dim"))
        return (one * log + 1.0) / (all_dim * log + 1.0)
    return None


def _other(family: Family, config: Config) -> dict[str, Any]:
    """GPT-2 and models of images."""
    keys = _plain(family, config)
    if isinstance(keys.get("image"), int):
        keys["image"] = [keys["image"]] * 2
    if family.kind != "gpt2":
        labels = config.get("id2label")
        keys["classes"] = len(labels) if labels else config.get("num_labels") or 2  # transformers leaves out two
    return {key: value for key, value in keys.items() if value is not None}


# --- ours -> theirs ---------------------------------------------------------------------------------------------------


def _meant(of: spec.Published, key: str) -> Any:
    """The value of a key, in the one form that equal models share."""
    if key == "rope_scaling":
        scaling: spec.Published | Any = getattr(of, key)
        return None if scaling is None else scaling.model_dump()
    if key == "query_scalar":
        return getattr(of, key) or float(of.size) if isinstance(of, spec.Decoder) else None
    if key == "biases":
        return sorted(getattr(of, key))
    return getattr(of, MEANT.get(key, key), getattr(of, key))


def _looks(of: spec.Decoder, layers: int) -> list[str]:
    """What each of so many layers sees. A pattern says it by itself: a job may leave the window to the folder."""
    looks = of.pattern or of.looks
    return [looks[layer % len(looks)] for layer in range(layers)]


def _named(of: spec.Published, key: str) -> str:
    known = FAMILIES[(of.family if isinstance(of, spec.Decoder) else None) or of.kind]
    special = {"window": "sliding_window", "pattern": "layer_types", "activation": known.activation}
    special |= {"dense_layers": "mlp_only_layers"}
    back = {ours: theirs for theirs, ours in known.keys.items()} | special
    return back.get(key, key)


def _config(of: spec.Published, name: str) -> dict[str, Any]:
    known = FAMILIES[name]
    sizes = {theirs: _written(of, ours) for theirs, ours in known.keys.items()}
    extra: dict[str, Any] = {}
    if isinstance(of, spec.Decoder):
        extra = {**dict(_of_decoder(of, known)), **dict(_of_experts(of, known))}
    elif isinstance(of, spec.GPT2) and of.vocab <= GPT2_END:
        extra = {"bos_token_id": None, "eos_token_id": None}
    elif isinstance(of, spec.OfImages):
        labels = {str(label): f"LABEL_{label}" for label in range(of.classes)}
        extra = {"id2label": labels, "label2id": {name: int(label) for label, name in labels.items()}}
    return {"architectures": [known.architecture], "model_type": name, **known.constant, **sizes, **extra}


def _written(of: spec.Published, key: str) -> Any:
    if key == "positions":
        return of.rows if isinstance(of, spec.GPT2) else of.reach if isinstance(of, spec.Decoder) else None
    if key == "query_scalar":
        return _meant(of, key)
    if key == "rope_local_theta" and isinstance(of, spec.Decoder):
        return of.rope_local_theta or of.rope_theta
    return getattr(of, MEANT.get(key, key))


def _of_decoder(of: spec.Decoder, known: Family) -> Iterator[tuple[str, Any]]:
    """The keys that are not ours by another name."""
    yield known.activation, next(theirs for theirs, ours in ACTIVATIONS.items() if ours == of.activation)
    yield "rope_theta", of.rope_theta
    yield "rope_scaling", _scaling_of(of)
    if known.has_biases:
        yield "attention_bias", {"qkv", "out"} <= set(of.biases)
    if known.architecture == "LlamaForCausalLM":
        yield "mlp_bias", "mlp" in of.biases
    if known.window is not None:
        kinds = {ours: theirs for theirs, ours in LOOKS.items()}
        looks = _looks(of, of.layers)
        yield "sliding_window", of.window if "window" in looks else None
        if known.window in ("switched", "layers"):
            yield "layer_types", [kinds[look] for look in looks]
        if known.window in ("switched", "all_switched"):
            yield "use_sliding_window", "window" in looks
        if known.window == "switched":
            yield "max_window_layers", looks.index("window") if "window" in looks else of.layers
        elif "rope_local_base_freq" in known.keys and "full" in of.looks:
            yield "sliding_window_pattern", of.looks.index("full") + 1


def _of_experts(of: spec.Decoder, known: Family) -> Iterator[tuple[str, Any]]:
    if "experts" not in known.keys.values():
        return
    if of.balance:
        yield "router_aux_loss_coef", of.balance
    yield "output_router_logits", of.balance > 0
    if "moe_intermediate_size" in known.keys:
        yield "decoder_sparse_step", 1
        yield "mlp_only_layers", sorted(set(of.dense_layers))


def _scaling_of(of: spec.Decoder) -> dict[str, Any] | None:
    scaling = of.rope_scaling
    if scaling is None:
        return None
    keys = {
        "linear": (),
        "llama3": ("low_freq_factor", "high_freq_factor"),
        "yarn": ("beta_fast", "beta_slow", "attention_factor", "truncate"),
    }[scaling.kind]
    written = {"rope_type": scaling.kind, "factor": scaling.factor}
    written |= {key: getattr(scaling, key) for key in keys if getattr(scaling, key) is not None}
    if scaling.original_length is not None:
        written["original_max_position_embeddings"] = scaling.original_length
    return written


def _faults(of: spec.Decoder, name: str) -> list[str]:
    """How a model differs from what its config.json of that family describes, or why that describes none."""
    try:
        again = model(_config(of, name))
    except SpecError as error:
        return [str(error)]
    return differences(of.model_copy(update={"family": name}), again)
