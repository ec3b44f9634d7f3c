"""The names and layouts of our models' parameters in Hugging Face's files.

One of our parameters is a stack of tensors in their files, whose axes may be permuted and merged. A
`Leaf` describes this. `Leaf("ldhk", "hk d", "model.layers.{l}.self_attn.q_proj.weight")` means that
our parameter has the axes layer, D, heads and head size, and that their files contain one tensor
[heads × head size, D] for every layer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError

# The names of the indexes along the axis t in tensor names.
QKV = ("query", "key", "value")


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The layout of one of our parameters in their files.

    Attributes:
        ours: The axes of our parameter, a letter for each.
        theirs: The axes of a tensor, a word for each: the letters of our axes that are merged in
            it, in row-major order, or 1 for an axis of size 1.
        name: Name of a tensor, with {letter} for the index along one of our axes.
        layers: Layer number of each index along the axis l, by default the index itself.
    """

    ours: str
    theirs: str
    name: str
    layers: tuple[int, ...] | None = None

    @property
    def stacked_axes(self) -> str:
        """Our axes along which each index is a separate tensor."""
        return "".join(letter for letter in self.ours if "{" + letter + "}" in self.name)

    @property
    def axis_order(self) -> list[int]:
        """The permutation of a tensor from their axes to ours, without the stacked axes."""
        letters, stacked = "".join(self.theirs.split()).replace("1", ""), self.stacked_axes
        return [letters.index(axis) for axis in self.ours if axis not in stacked]

    def stacked_indexes(self, span: Mapping[str, slice]) -> Iterator[dict[str, int]]:
        """Yield the indexes along the stacked axes of each tensor within `span`."""
        ranges = [range(span[axis].start, span[axis].stop) for axis in self.stacked_axes]
        for indexes in itertools.product(*ranges):
            yield dict(zip(self.stacked_axes, indexes, strict=True))

    def full_span(self, shape: tuple[int, ...]) -> dict[str, slice]:
        """Return the span of a whole parameter of this shape."""
        return {axis: slice(0, size) for axis, size in zip(self.ours, shape, strict=True)}

    def tensor_shapes(self, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the tensors of a parameter with this shape."""
        sizes = dict(zip(self.ours, shape, strict=True)) | {"1": 1}
        tensor_shape = tuple(
            math.prod(map(sizes.__getitem__, letters)) for letters in self.theirs.split()
        )
        for indexes in self.stacked_indexes(self.full_span(shape)):
            yield self.tensor_name(indexes), tensor_shape

    def tensor_name(self, indexes: Mapping[str, int]) -> str:
        """Return the name of the tensor at these indexes of the stacked axes."""
        names: dict[str, str | int] = dict(indexes)
        if "l" in indexes and self.layers is not None:
            names["l"] = self.layers[indexes["l"]]
        if "t" in indexes:
            names["t"] = QKV[indexes["t"]]
        return self.name.format(**names)


# Their names of a layer's norms, by the option `norms` of a decoder. Families use the same name for
# different norms.
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
            output_axis = axes[1][0]
            bias = Leaf(f"l{output_axis}", output_axis, f"{layer}mlp.{ours}_proj.bias")
            yield f"blocks.mlp.{ours}_bias", bias


def _expert_leaves(model: spec.Decoder, layer: str) -> Iterator[tuple[str, Leaf]]:
    # Without a family, norms of queries and keys tell Qwen 3's names from Mixtral's.
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
    """Yield the kernels and biases of attention and MLP.

    Args:
        layer: Prefix of the names of a layer's tensors.
        theirs: Names of their modules for qkv, out, up and down.
        qkv: Word for the output axis of the qkv tensors.
        is_torch: Whether kernels are [outputs, inputs] as in torch's nn.Linear.
    """
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
    """Yield our and their names of the convolutions that have a batch normalization."""
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


# Suffixes of tensors that are not parameters.
_UNREAD_SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "decoder": ("rotary_emb.inv_freq",),
    "gpt2": (".attn.bias", ".attn.masked_bias"),
    "vit": ("pooler.dense.weight", "pooler.dense.bias"),
    "resnet": (".num_batches_tracked",),
    "convnext": (),
}
# The prefix of tensor names that files without a head leave out.
NAME_PREFIXES: Mapping[str, str] = {
    **{kind: f"{kind}." for kind in ("vit", "resnet", "convnext")},
    "decoder": "model.",
    "gpt2": "transformer.",
}
# Our name for the second tensor of a tied matrix, which is only compared with the first one.
TIED_HEAD = "tied head"
# The parameters in the head of an image model.
HEAD_PARAMETERS = ("head", "head_bias")


def unread_suffixes(model: spec.PublishedModel) -> tuple[str, ...]:
    """Return the suffixes of tensors that a folder may hold in addition to those that are read."""
    suffixes = _UNREAD_SUFFIXES[model.kind]
    return (*suffixes, *(parameter_leaves(model)[name].name for name in new_parameters(model)))


def tied_head(model: spec.PublishedModel) -> Leaf | None:
    """Return the leaf of a head that is tied to the embedding, or None if the head is not tied.

    Some repositories publish the tied matrix under both names, or only under the name of the head.
    """
    is_tied = isinstance(model, spec.GPT2) or (isinstance(model, spec.Decoder) and model.tied)
    return Leaf("vd", "v d", "lm_head.weight") if is_tied else None


def new_parameters(model: spec.PublishedModel) -> tuple[str, ...]:
    """Return the parameters that are initialized at random instead of loaded: a new head's."""
    return HEAD_PARAMETERS if isinstance(model, spec.ImageModel) and model.new_head else ()


def batch_counts(model: spec.PublishedModel) -> dict[str, Leaf]:
    """Return the leaves of the batch counters of norms, for which we have no parameters."""
    if not isinstance(model, spec.ResNet):
        return {}
    return {
        f"{ours}.norm.count": Leaf("", "", f"{theirs}.normalization.num_batches_tracked")
        for ours, theirs in _normalized_convolutions(model)
    }


def parameter_leaves(model: spec.PublishedModel) -> dict[str, Leaf]:
    """Return the leaves of a model's parameters and running statistics, by name.

    Raises SpecError if the model has options that Hugging Face's does not have, such as the pooling
    of a ViT, or the stem or epsilon of a ResNet.
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
