"""Names and layouts of our models' parameters and sizes in Hugging Face's files, as tables. Reads no file.

A parameter of ours is a stack of tensors of theirs, each with its axes permuted and grouped. `Leaf("ldhk", "hk d",
"model.layers.{l}.self_attn.q_proj.weight")` reads: ours has the axes layer, D, heads, head size; for every layer there
is one tensor, [heads × head size, D].
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainer import spec
from trainer.errors import SpecError

GPT2_END = 50256  # the token that transformers takes for a beginning and an end where a config.json names none
# What a config.json may switch on and our models do not have.
UNSUPPORTED = {"attention_bias": "biases in attention are", "mlp_bias": "biases in the feed-forward layers are"}
QKV = ("query", "key", "value")  # what the axis t of a name counts


@dataclasses.dataclass(frozen=True)
class Leaf:
    """How one of our parameters is stored in their files."""

    ours: str  # a letter for each axis
    theirs: str  # a word for each axis: the letters of ours that it runs over, the last one fastest; 1: of size one
    name: str  # of a tensor; {letter} stands for its place along that axis of ours

    @property
    def stacked(self) -> str:
        """The axes along which every tensor of theirs is one index."""
        return "".join(letter for letter in self.ours if "{" + letter + "}" in self.name)

    @property
    def inside(self) -> str:
        """The other axes of ours, in their order."""
        return "".join(letter for letter in self.ours if letter not in self.stacked)

    @property
    def order(self) -> list[int]:
        """For each axis of `inside`, its index among the axes of their tensor: the transposition theirs -> ours."""
        letters = "".join(self.theirs.split()).replace("1", "")
        return [letters.index(axis) for axis in self.inside]

    def places(self, span: Mapping[str, slice]) -> Iterator[dict[str, int]]:
        """The indexes along the stacked axes within `span`, by axis: one tensor each."""
        ranges = [range(span[axis].start, span[axis].stop) for axis in self.stacked]
        return (dict(zip(self.stacked, places, strict=True)) for places in itertools.product(*ranges))

    def whole(self, shape: tuple[int, ...]) -> dict[str, slice]:
        """All of a parameter of this shape, as a span."""
        return {axis: slice(0, size) for axis, size in zip(self.ours, shape, strict=True)}

    def tensors(self, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The names and shapes of the tensors that make a parameter of this shape."""
        sizes = dict(zip(self.ours, shape, strict=True))
        theirs = tuple(math.prod(sizes[axis] for axis in group.strip("1")) for group in self.theirs.split())
        return ((self.tensor(places), theirs) for places in self.places(self.whole(shape)))

    def tensor(self, places: Mapping[str, int]) -> str:
        """The name of the tensor at these indexes of the stacked axes."""
        return self.name.format(**{axis: QKV[at] if axis == "t" else at for axis, at in places.items()})


def _llama(layer: str = "model.layers.{l}.") -> Iterator[tuple[str, Leaf]]:
    yield "embedding", Leaf("vd", "v d", "model.embed_tokens.weight")
    yield "norm.scale", Leaf("d", "d", "model.norm.weight")
    yield "head", Leaf("dv", "v d", "lm_head.weight")
    yield "blocks.attention_norm.scale", Leaf("ld", "d", layer + "input_layernorm.weight")
    yield "blocks.mlp_norm.scale", Leaf("ld", "d", layer + "post_attention_layernorm.weight")
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        yield f"blocks.attention.{ours}", Leaf("ldhk", "hk d", f"{layer}self_attn.{theirs}.weight")
    yield "blocks.attention.out", Leaf("lhkd", "d hk", layer + "self_attn.o_proj.weight")
    yield "blocks.mlp.gate", Leaf("ldf", "f d", layer + "mlp.gate_proj.weight")
    yield "blocks.mlp.up", Leaf("ldf", "f d", layer + "mlp.up_proj.weight")
    yield "blocks.mlp.down", Leaf("lfd", "d f", layer + "mlp.down_proj.weight")


def _gpt2(layer: str = "transformer.h.{l}.") -> Iterator[tuple[str, Leaf]]:
    """Its kernels are [in, out], other than torch's."""
    yield "embedding", Leaf("vd", "v d", "transformer.wte.weight")
    yield "positions", Leaf("nd", "n d", "transformer.wpe.weight")
    yield from _norm("norm", "transformer.ln_f", "")
    yield from _norm("blocks.attention_norm", layer + "ln_1", "l")
    yield from _norm("blocks.mlp_norm", layer + "ln_2", "l")
    yield "blocks.attention.qkv", Leaf("ldthk", "d thk", layer + "attn.c_attn.weight")
    yield "blocks.attention.qkv_bias", Leaf("lthk", "thk", layer + "attn.c_attn.bias")
    yield "blocks.attention.out", Leaf("lhkd", "hk d", layer + "attn.c_proj.weight")
    yield "blocks.attention.out_bias", Leaf("ld", "d", layer + "attn.c_proj.bias")
    yield "blocks.mlp.up", Leaf("ldf", "d f", layer + "mlp.c_fc.weight")
    yield "blocks.mlp.up_bias", Leaf("lf", "f", layer + "mlp.c_fc.bias")
    yield "blocks.mlp.down", Leaf("lfd", "f d", layer + "mlp.c_proj.weight")
    yield "blocks.mlp.down_bias", Leaf("ld", "d", layer + "mlp.c_proj.bias")


def _vit(layer: str = "vit.encoder.layer.{l}.") -> Iterator[tuple[str, Leaf]]:
    yield "patches", Leaf("yxcd", "d c y x", "vit.embeddings.patch_embeddings.projection.weight")
    yield "patches_bias", Leaf("d", "d", "vit.embeddings.patch_embeddings.projection.bias")
    yield "cls", Leaf("d", "1 1 d", "vit.embeddings.cls_token")
    yield "positions", Leaf("nd", "1 n d", "vit.embeddings.position_embeddings")
    yield from _norm("norm", "vit.layernorm", "")
    yield "head", Leaf("dv", "v d", "classifier.weight")
    yield "head_bias", Leaf("v", "v", "classifier.bias")
    yield from _norm("blocks.attention_norm", layer + "layernorm_before", "l")
    yield from _norm("blocks.mlp_norm", layer + "layernorm_after", "l")
    yield "blocks.attention.qkv", Leaf("ldthk", "hk d", layer + "attention.attention.{t}.weight")
    yield "blocks.attention.qkv_bias", Leaf("lthk", "hk", layer + "attention.attention.{t}.bias")
    yield "blocks.attention.out", Leaf("lhkd", "d hk", layer + "attention.output.dense.weight")
    yield "blocks.attention.out_bias", Leaf("ld", "d", layer + "attention.output.dense.bias")
    yield "blocks.mlp.up", Leaf("ldf", "f d", layer + "intermediate.dense.weight")
    yield "blocks.mlp.up_bias", Leaf("lf", "f", layer + "intermediate.dense.bias")
    yield "blocks.mlp.down", Leaf("lfd", "d f", layer + "output.dense.weight")
    yield "blocks.mlp.down_bias", Leaf("ld", "d", layer + "output.dense.bias")


def _norm(ours: str, theirs: str, stacked: str) -> Iterator[tuple[str, Leaf]]:
    yield f"{ours}.scale", Leaf(stacked + "d", "d", f"{theirs}.weight")
    yield f"{ours}.bias", Leaf(stacked + "d", "d", f"{theirs}.bias")


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of model as Hugging Face names it: class, tensors and keys of config.json."""

    architecture: str  # their class
    leaves: Mapping[str, Leaf]
    prefix: str  # missing from names in the files of a model without its head
    fixed: Mapping[str, Any]  # keys of their config.json with the values that our models always have
    keys: Mapping[str, str]  # key of their config.json -> key, or property, of our block
    absent: Mapping[str, Any]  # values of keys that their config.json leaves out
    unread: tuple[str, ...]  # ends of names of tensors that are not parameters


FAMILIES: Mapping[str, Family] = {
    "decoder": Family(
        architecture="LlamaForCausalLM",
        leaves=dict(_llama()),
        prefix="model.",
        fixed={"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        keys={
            "num_hidden_layers": "layers",
            "hidden_size": "width",
            "num_attention_heads": "heads",
            "num_key_value_heads": "groups",
            "intermediate_size": "units",
            "vocab_size": "vocab",
            "rms_norm_eps": "norm_eps",
            "tie_word_embeddings": "tied",
        },
        absent={"tie_word_embeddings": False, "rms_norm_eps": 1e-6, "attention_bias": False, "mlp_bias": False},
        unread=("rotary_emb.inv_freq",),
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        leaves=dict(_gpt2()),
        prefix="transformer.",
        fixed={"model_type": "gpt2", "activation_function": "gelu_new", "tie_word_embeddings": True},
        keys={
            "n_layer": "layers",
            "n_embd": "width",
            "n_head": "heads",
            "n_inner": "units",
            "vocab_size": "vocab",
            "n_positions": "rows",
            "layer_norm_epsilon": "norm_eps",
        },
        absent={"activation_function": "gelu_new", "tie_word_embeddings": True, "layer_norm_epsilon": 1e-5},
        unread=(".attn.bias", ".attn.masked_bias", "lm_head.weight"),
    ),
    "vit": Family(
        architecture="ViTForImageClassification",
        leaves=dict(_vit()),
        prefix="vit.",
        fixed={"model_type": "vit", "hidden_act": "gelu", "qkv_bias": True},
        keys={
            "num_hidden_layers": "layers",
            "hidden_size": "width",
            "num_attention_heads": "heads",
            "intermediate_size": "units",
            "image_size": "image",
            "num_channels": "channels",
            "patch_size": "patch",
            "layer_norm_eps": "norm_eps",
        },
        absent={"hidden_act": "gelu", "qkv_bias": True, "layer_norm_eps": 1e-12},
        unread=("pooler.dense.weight", "pooler.dense.bias"),
    ),
}


def family(model: spec.Published) -> Family:
    """The family of a model. Raises SpecError for a ViT whose pooling theirs does not have."""
    if isinstance(model, spec.ViT) and model.pool != "cls":
        raise SpecError(f"train.model.pool = {model.pool}: Hugging Face's ViT knows only cls")
    return FAMILIES[model.kind]


def config(model: spec.Published) -> dict[str, Any]:
    """The config.json of a model, as a dict."""
    known = family(model)
    sizes = {theirs: getattr(model, ours) for theirs, ours in known.keys.items()}
    extra: dict[str, Any] = {}
    if isinstance(model, spec.Decoder):
        extra = {"max_position_embeddings": model.length, "head_dim": model.width // model.heads, **_rope(model)}
    elif isinstance(model, spec.GPT2) and model.vocab <= GPT2_END:
        extra = {"bos_token_id": None, "eos_token_id": None}
    elif isinstance(model, spec.ViT):
        labels = {str(label): f"LABEL_{label}" for label in range(model.classes)}
        extra = {"id2label": labels, "label2id": {name: int(label) for label, name in labels.items()}}
    return {"architectures": [known.architecture], **known.fixed, **sizes, **extra}


def _rope(model: spec.Decoder) -> dict[str, Any]:
    scaling = model.rope_scaling
    return {
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling
        and {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_length,
        },
    }


def differences(model: spec.Published, given: Mapping[str, Any]) -> list[str]:
    """How a config.json differs from `model`, a sentence for each key: the same weights would give other numbers."""
    known, found = family(model), []
    for key, ours in {**dict.fromkeys(known.fixed), **known.keys}.items():
        value = given.get(key, known.absent.get(key))
        if key == "image_size" and isinstance(value, int):
            value = [value, value]
        wanted = known.fixed[key] if ours is None else getattr(model, ours)
        if value is None and key in ("n_inner", "num_key_value_heads"):  # theirs: the usual, which ours is as well
            value = 4 * given.get("n_embd", 0) if key == "n_inner" else given.get("num_attention_heads")
        if value != wanted and key in UNSUPPORTED and value:
            found.append(f"{key} is {value}: {UNSUPPORTED[key]} not supported")
        elif value != wanted:
            found.append(f"{key} is {value}, train.model makes it {wanted}")
    if isinstance(model, spec.Decoder):
        found += _rope_differences(model, given)
    return found


def _head_difference(given: Mapping[str, Any]) -> list[str]:
    """A head size of its own. One that follows from width and heads is not named: one of these two is what differs."""
    head, width, heads = (given.get(key) for key in ("head_dim", "hidden_size", "num_attention_heads"))
    if not (head and width and heads) or head * heads == width:
        return []
    return [f"head_dim is {head}, not hidden_size / num_attention_heads = {width} / {heads}: that is not supported"]


def _rope_differences(model: spec.Decoder, given: Mapping[str, Any]) -> list[str]:
    """Rotary positions, as transformers 4 writes them (rope_theta, rope_scaling) or 5 (rope_parameters)."""
    written = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
    written["rope_theta"] = written.get("rope_theta", given.get("rope_theta", 10000.0))
    written["rope_type"] = written.get("rope_type", written.pop("type", "default"))
    ours = _rope(model)
    wanted = {"rope_type": "default", **(ours["rope_scaling"] or {}), "rope_theta": ours["rope_theta"]}
    return _head_difference(given) + [
        f"{key} is {written.get(key)}, train.model makes it {value}"
        for key, value in wanted.items()
        if written.get(key) != value
    ]
