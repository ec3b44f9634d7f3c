"""Tables of the names and layouts of our models' parameters in Hugging Face's files.

A parameter of ours is a stack of tensors of theirs, each with its axes permuted and grouped.
`Leaf("ldhk", "hk d", "model.layers.{l}.self_attn.q_proj.weight")` means: our parameter has the axes
layer, D, heads, head size, and for every layer there is one tensor, [heads × head size, D].
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError

# Names of the places along the axis t.
QKV = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The layout of one of our parameters in their files."""

    ours: str  # a letter for each axis
    # A word for each axis: the letters of our axes in it, the last one fastest; 1 for size one.
    theirs: str
    name: str  # of a tensor; {letter} stands for the index along that axis of ours
    # Layer number of each index along the axis l; None: the index itself.
    layers: tuple[int, ...] | None = None

    @property
    def stacked_axes(self) -> str:
        """The axes of ours along which each index is a tensor of its own."""
        return "".join(letter for letter in self.ours if "{" + letter + "}" in self.name)

    @property
    def axis_order(self) -> list[int]:
        """The transposition of a tensor from their axes to ours, without the stacked axes."""
        letters, stacked = "".join(self.theirs.split()).replace("1", ""), self.stacked_axes
        return [letters.index(axis) for axis in self.ours if axis not in stacked]

    def stacked_indexes(self, span: Mapping[str, slice]) -> Iterator[dict[str, int]]:
        """Yield the indexes along the stacked axes within `span`, for each tensor."""
        ranges = [range(span[axis].start, span[axis].stop) for axis in self.stacked_axes]
        for places in itertools.product(*ranges):
            yield dict(zip(self.stacked_axes, places, strict=True))

    def full_span(self, shape: tuple[int, ...]) -> dict[str, slice]:
        """Return the span of a whole parameter of this shape."""
        return {axis: slice(0, size) for axis, size in zip(self.ours, shape, strict=True)}

    def tensor_shapes(self, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the tensors of a parameter with this shape."""
        sizes = dict(zip(self.ours, shape, strict=True)) | {"1": 1}
        theirs = tuple(math.prod(map(sizes.__getitem__, group)) for group in self.theirs.split())
        for places in self.stacked_indexes(self.full_span(shape)):
            yield self.tensor_name(places), theirs

    def tensor_name(self, places: Mapping[str, int]) -> str:
        """Return the name of the tensor at these indexes of the stacked axes."""
        names: dict[str, str | int] = dict(places)
        if "l" in places and self.layers is not None:
            names["l"] = self.layers[places["l"]]
        if "t" in places:
            names["t"] = QKV[places["t"]]
        return self.name.format(**names)


# Their names of a layer's norms by the position of ours. The same name means another norm in
# another family.
NORM_NAMES: Mapping[str, Mapping[str, str]] = {
    "before": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "after": {
        "attention_out_norm": "post_attention_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
    "both": {
        "attention_norm": "input_layernorm",
        "attention_out_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_out_norm": "post_feedforward_layernorm",
    },
}


def _decoder_leaves(
    model: spec.Decoder, layer: str = "model.layers.{l}."
) -> Iterator[tuple[str, Leaf]]:
    yield "embedding", Leaf("vd", "v d", "model.embed_tokens.weight")
    yield "norm.scale", Leaf("d", "d", "model.norm.weight")
    if not model.tied:
        yield "head", Leaf("dv", "v d", "lm_head.weight")
    for stack, numbers in model.layer_stacks.items():
        mlp = _expert_leaves if stack == "blocks" and model.experts else _mlp_leaves
        for ours, leaf in (*_attention_leaves(model, layer), *mlp(model, layer)):
            yield ours.replace("blocks", stack, 1), dataclasses.replace(leaf, layers=numbers)


def _attention_leaves(model: spec.Decoder, layer: str) -> Iterator[tuple[str, Leaf]]:
    for ours, theirs in NORM_NAMES[model.norms].items():
        yield f"blocks.{ours}.scale", Leaf("ld", "d", f"{layer}{theirs}.weight")
    for ours, theirs in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
        yield f"blocks.attention.{ours}", Leaf("ldhk", "hk d", f"{layer}self_attn.{theirs}.weight")
        if "qkv" in model.biases:
            bias = Leaf("lhk", "hk", f"{layer}self_attn.{theirs}.bias")
            yield f"blocks.attention.{ours}_bias", bias
    yield "blocks.attention.out", Leaf("lhkd", "d hk", layer + "self_attn.o_proj.weight")
    if "out" in model.biases:
        yield "blocks.attention.out_bias", Leaf("ld", "d", layer + "self_attn.o_proj.bias")
    for ours, theirs in (("query_norm", "q_norm"), ("key_norm", "k_norm")) if model.qk_norm else ():
        axes = ("lk", "k") if model.qk_norm == "head" else ("lhk", "hk")
        yield f"blocks.attention.{ours}.scale", Leaf(*axes, f"{layer}self_attn.{theirs}.weight")


def _mlp_leaves(model: spec.Decoder, layer: str) -> Iterator[tuple[str, Leaf]]:
    for ours, axes in (("gate", ("ldf", "f d")), ("up", ("ldf", "f d")), ("down", ("lfd", "d f"))):
        yield f"blocks.mlp.{ours}", Leaf(*axes, f"{layer}mlp.{ours}_proj.weight")
        if "mlp" in model.biases:
            out = axes[1][0]
            yield f"blocks.mlp.{ours}_bias", Leaf("l" + out, out, f"{layer}mlp.{ours}_proj.bias")


def _expert_leaves(model: spec.Decoder, layer: str) -> Iterator[tuple[str, Leaf]]:
    # Mixtral's names, or those of Qwen 3, which has norms of queries and keys.
    is_mixtral = model.family == "mixtral" or (model.family is None and model.qk_norm is None)
    layer += "block_sparse_moe." if is_mixtral else "mlp."
    theirs = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    yield "blocks.mlp.router", Leaf("lde", "e d", f"{layer}gate.weight")
    for ours, name in zip(("gate", "up", "down"), theirs, strict=True):
        axes = ("lefd", "d f") if ours == "down" else ("ledf", "f d")
        yield f"blocks.mlp.{ours}", Leaf(*axes, f"{layer}experts.{{e}}.{name}.weight")


def _gpt2_leaves(layer: str = "transformer.h.{l}.") -> Iterator[tuple[str, Leaf]]:
    yield "embedding", Leaf("vd", "v d", "transformer.wte.weight")
    yield "positions", Leaf("nd", "n d", "transformer.wpe.weight")
    yield from _norm_leaves("norm", "transformer.ln_f", "")
    yield from _norm_leaves("blocks.attention_norm", layer + "ln_1", "l")
    yield from _norm_leaves("blocks.mlp_norm", layer + "ln_2", "l")
    theirs = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    yield from _block_kernels(layer, theirs, "thk", is_torch=False)


def _vit_leaves(layer: str = "vit.encoder.layer.{l}.") -> Iterator[tuple[str, Leaf]]:
    yield "patches", Leaf("yxcd", "d c y x", "vit.embeddings.patch_embeddings.projection.weight")
    yield "patches_bias", Leaf("d", "d", "vit.embeddings.patch_embeddings.projection.bias")
    yield "cls", Leaf("d", "1 1 d", "vit.embeddings.cls_token")
    yield "positions", Leaf("nd", "1 n d", "vit.embeddings.position_embeddings")
    yield from _norm_leaves("norm", "vit.layernorm", "")
    yield from _head_leaves("classifier")
    yield from _norm_leaves("blocks.attention_norm", layer + "layernorm_before", "l")
    yield from _norm_leaves("blocks.mlp_norm", layer + "layernorm_after", "l")
    attention = ("attention.attention.{t}", "attention.output.dense")
    theirs = (*attention, "intermediate.dense", "output.dense")
    yield from _block_kernels(layer, theirs, "hk", is_torch=True)


def _block_kernels(
    layer: str, theirs: tuple[str, str, str, str], qkv: str, *, is_torch: bool
) -> Iterator[tuple[str, Leaf]]:
    """Yield kernels and biases of attention and MLP; kernels are [out, in] in torch."""
    attention = (("attention.qkv", "d", "thk", qkv), ("attention.out", "hk", "d", "d"))
    kernels = (*attention, ("mlp.up", "d", "f", "f"), ("mlp.down", "f", "d", "d"))
    for (ours, inputs, outputs, word), name in zip(kernels, theirs, strict=True):
        axes = f"{word} {inputs}" if is_torch else f"{inputs} {word}"
        yield f"blocks.{ours}", Leaf(f"l{inputs}{outputs}", axes, f"{layer}{name}.weight")
        yield f"blocks.{ours}_bias", Leaf(f"l{outputs}", word, f"{layer}{name}.bias")


def _resnet_leaves(model: spec.ResNet) -> Iterator[tuple[str, Leaf]]:
    for ours, theirs in _normalized_convolutions(model):
        yield f"{ours}.convolution.kernel", Leaf("yxio", "o i y x", f"{theirs}.convolution.weight")
        yield from _norm_leaves(f"{ours}.norm", f"{theirs}.normalization", "")
        yield f"{ours}.norm.mean", Leaf("d", "d", f"{theirs}.normalization.running_mean")
        yield f"{ours}.norm.variance", Leaf("d", "d", f"{theirs}.normalization.running_var")
    yield from _head_leaves("classifier.1")


def _normalized_convolutions(model: spec.ResNet) -> Iterator[tuple[str, str]]:
    """Yield our and their names of the convolutions with a batch normalization."""
    yield "stem", "resnet.embedder.embedder"
    input_width = model.stem_width
    for stage, (depth, width) in enumerate(zip(model.depths, model.widths, strict=True)):
        for block_number in range(depth):
            ours = f"stages.{stage}.{block_number}"
            theirs = f"resnet.encoder.stages.{stage}.layers.{block_number}"
            for number in range(2 if model.block == "basic" else 3):
                yield f"{ours}.branch.{number}", f"{theirs}.layer.{number}"
            if block_number == 0 and (stage or input_width != width):
                yield f"{ours}.shortcut", f"{theirs}.shortcut"
        input_width = width


def _convnext_leaves(model: spec.ConvNeXt) -> Iterator[tuple[str, Leaf]]:
    yield from _convolution_leaves("patches", "convnext.embeddings.patch_embeddings")
    yield from _norm_leaves("patches_norm", "convnext.embeddings.layernorm", "")
    for stage, depth in enumerate(model.depths):
        theirs = f"convnext.encoder.stages.{stage}."
        if stage:
            yield from _norm_leaves(f"stages.{stage}.norm", theirs + "downsampling_layer.0", "")
            yield from _convolution_leaves(f"stages.{stage}.half", theirs + "downsampling_layer.1")
        for block_number in range(depth):
            ours, block = f"stages.{stage}.blocks.{block_number}", f"{theirs}layers.{block_number}."
            yield from _convolution_leaves(ours, block + "dwconv")
            yield from _norm_leaves(f"{ours}.norm", block + "layernorm", "")
            yield f"{ours}.up", Leaf("df", "f d", block + "pwconv1.weight")
            yield f"{ours}.up_bias", Leaf("f", "f", block + "pwconv1.bias")
            yield f"{ours}.down", Leaf("fd", "d f", block + "pwconv2.weight")
            yield f"{ours}.down_bias", Leaf("d", "d", block + "pwconv2.bias")
            yield f"{ours}.layer_scale", Leaf("d", "d", block + "layer_scale_parameter")
    yield from _norm_leaves("norm", "convnext.layernorm", "")
    yield from _head_leaves("classifier")


def _convolution_leaves(ours: str, theirs: str) -> Iterator[tuple[str, Leaf]]:
    yield f"{ours}.kernel", Leaf("yxio", "o i y x", f"{theirs}.weight")
    yield f"{ours}.bias", Leaf("o", "o", f"{theirs}.bias")


def _head_leaves(theirs: str) -> Iterator[tuple[str, Leaf]]:
    yield "head", Leaf("dv", "v d", f"{theirs}.weight")
    yield "head_bias", Leaf("v", "v", f"{theirs}.bias")


def _norm_leaves(ours: str, theirs: str, stacked: str) -> Iterator[tuple[str, Leaf]]:
    yield f"{ours}.scale", Leaf(stacked + "d", "d", f"{theirs}.weight")
    yield f"{ours}.bias", Leaf(stacked + "d", "d", f"{theirs}.bias")


# Suffixes of tensors that are not parameters, and the prefix that names lack in files without the
# head.
_UNREAD_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "decoder": ("rotary_emb.inv_freq",),
    "gpt2": (".attn.bias", ".attn.masked_bias"),
    "vit": ("pooler.dense.weight", "pooler.dense.bias"),
    "resnet": (".num_batches_tracked",),
    "convnext": (),
}
NAME_PREFIXES: Mapping[str, str] = {
    **{kind: f"{kind}." for kind in ("vit", "resnet", "convnext")},
    "decoder": "model.",
    "gpt2": "transformer.",
}
# Our name for the second tensor of a tied matrix, which is compared and not loaded.
TIED_HEAD = "tied head"
# The parameters of the head of an image model.
HEAD_PARAMETERS = ("head", "head_bias")


def unread_suffixes(model: spec.PublishedModel) -> tuple[str, ...]:
    """Return the suffixes of tensors that this model's files may contain and that are not read."""
    suffixes = _UNREAD_SUFFIXES[model.kind]
    return (*suffixes, *(parameter_leaves(model)[name].name for name in new_parameters(model)))


def tied_head(model: spec.PublishedModel) -> Leaf | None:
    """Return the leaf of a head that is the embedding, None for a model with a head of its own.

    Some repositories publish the matrix under this name too, or under this name alone.
    """
    is_tied = isinstance(model, spec.GPT2) or (isinstance(model, spec.Decoder) and model.tied)
    return Leaf("vd", "v d", "lm_head.weight") if is_tied else None


def new_parameters(model: spec.PublishedModel) -> tuple[str, ...]:
    """Return the parameters of a new head, which are initialized at random instead of loaded."""
    return HEAD_PARAMETERS if isinstance(model, spec.ImageModel) and model.new_head else ()


def batch_counts(model: spec.PublishedModel) -> dict[str, Leaf]:
    """Return the leaves of the batch counters of norms, which exist only in their files."""
    if not isinstance(model, spec.ResNet):
        return {}
    return {
        f"{ours}.norm.count": Leaf("", "", f"{theirs}.normalization.num_batches_tracked")
        for ours, theirs in _normalized_convolutions(model)
    }


def parameter_leaves(model: spec.PublishedModel) -> dict[str, Leaf]:
    """Return the leaves of a model's parameters by name, and of the running statistics of a ResNet.

    Raises SpecError for unsupported options: pooling of a ViT, another stem or epsilon of a ResNet.
    """
    if faults := model.unpublished_options:
        raise SpecError("; ".join(faults))
    match model:
        case spec.ResNet():
            return dict(_resnet_leaves(model))
        case spec.ConvNeXt():
            return dict(_convnext_leaves(model))
        case spec.Decoder():
            return dict(_decoder_leaves(model))
        case spec.GPT2():
            return dict(_gpt2_leaves())
    return dict(_vit_leaves())
