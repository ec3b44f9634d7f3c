"""The built-in models: their keys and checks. Never imports jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from jaxlaunch.trainer.spec.block import (
    USER_OBJECT,
    Block,
    Fraction,
    Ids,
    Many,
    Natural,
    Place,
    Rate,
    Tokens,
    Unset,
    Weight,
    Wide,
    at_most,
)
from jaxlaunch.trainer.spec.presets import (
    PRESETS,
    ConvNeXtPreset,
    DecoderPreset,
    GPT2Preset,
    LayeredModel,
    PublishedModel,
    ResNetPreset,
    ViTPreset,
)


class MLP(Block):
    """A multi-layer perceptron on flattened examples.

    ```yaml
    train:
      task: classify
      model: {kind: mlp, layers: 3, width: 256, classes: 10}  # any shape of example, flattened
    ```
    """

    kind: Literal["mlp"] = Field("mlp", description="this model")
    layers: Many = Field(2, description="hidden layers")
    width: Wide = Field(512, description="units of a hidden layer")
    classes: Ids = Field(10, description="labels are 0 to classes - 1")


class RopeScaling(Block):
    """Rotary frequencies scaled for a longer context than the model was trained with.

    ```yaml
    train:
      task: lm
      model:
        kind: decoder
        length: 8192
        rope_scaling: {kind: yarn, factor: 4.0, original_length: 2048}  # 2048 × 4 = 8192
    ```
    """

    kind: Literal["llama3", "linear", "yarn"] = Field(
        "llama3",
        description="how frequencies are scaled: llama3 and yarn only the low ones, linear all",
    )
    factor: Rate = Field(description="frequencies are divided by it")
    original_length: Tokens | None = Field(
        None,
        description="context length before scaling, in tokens",
        json_schema_extra=Unset("none: linear has none, the others need it"),
    )
    low_freq_factor: Rate = Field(
        1.0,
        description="llama3: frequencies with fewer rotations within original_length are divided",
    )
    high_freq_factor: Rate = Field(
        4.0,
        description="llama3: dimensions with more rotations are unchanged; those in "
        "between are interpolated",
    )
    beta_fast: Rate = Field(32.0, description="yarn: frequencies with more rotations are unchanged")
    beta_slow: Rate = Field(
        1.0,
        description="yarn: dimensions with fewer rotations are divided; those in between "
        "are interpolated",
    )
    attention_factor: Rate | None = Field(
        None,
        description="yarn: scale of the rotated queries and keys",
        json_schema_extra=Unset("0.1 × log(factor) + 1"),
    )
    truncate: bool = Field(
        True, description="yarn: round the ends of the interpolation to whole channels"
    )

    @model_validator(mode="after")
    def _check_keys(self) -> RopeScaling:
        other_keys = sorted(
            key
            for key, kinds in _SCALING_KEYS.items()
            if key in self.model_fields_set and self.kind not in kinds
        )
        if any(map(self.is_changed, other_keys)):
            raise ValueError(f"{', '.join(other_keys)} does not apply to {self.kind}")
        if self.kind != "linear" and self.original_length is None:
            meaning = "the context length before scaling"
            raise ValueError(f"{self.kind} needs original_length, {meaning}")
        for above, below in (("high_freq_factor", "low_freq_factor"), ("beta_fast", "beta_slow")):
            high, low = getattr(self, above), getattr(self, below)
            if high <= low:
                raise ValueError(f"{above} = {high:g} is not above {below} = {low:g}")
        return self


# Keys of RopeScaling with the kinds to which they apply.
_SCALING_KEYS: Mapping[str, tuple[str, ...]] = {
    "original_length": ("llama3", "yarn"),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
    **dict.fromkeys(("beta_fast", "beta_slow", "attention_factor", "truncate"), ("yarn",)),
}

# Keys that only apply to a decoder with experts.
_EXPERT_KEYS = {"experts_per_token", "expert_hidden", "experts_normalized", "dense_layers"}
_EXPERT_KEYS |= {"balance", "router_z", "capacity"}

# The tokens to which a layer attends: those of the sliding window, or all.
AttentionSpan = Literal["window", "full"]
_DenseFamily = Literal["llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2"]
DecoderFamily = Literal[_DenseFamily, "mixtral", "qwen3_moe"]
_STOCHASTIC_DEPTH = (
    "stochastic depth: probability of skipping the last block; lower for earlier blocks"
)
DropPath = Annotated[Fraction, Field(description=_STOCHASTIC_DEPTH)]


class Decoder(LayeredModel):
    """A decoder of tokens: that of Llama, unless the keys from head_size on change it.

    ```yaml
    train:
      task: lm
      model: {preset: llama-1b, length: 4096, scan: true}  # sizes of Llama 3.2 1B, random weights
      # or published weights: model: {init_from: weights/qwen3-0.6b, length: 2048}
      # or sizes of your own: model: {kind: decoder, layers: 12, width: 768, heads: 12}
    ```
    """

    kind: Literal["decoder"] = Field("decoder", description="this model")
    preset: DecoderPreset = None
    family: DecoderFamily | None = Field(
        None,
        description="model family that an export is written as",
        json_schema_extra=Unset("the first that supports these keys"),
    )
    layers: Many = Field(4, description="transformer blocks")
    width: Wide = Field(256, description="size of the residual stream")
    heads: Many = Field(4, description="query heads; must divide width, unless head_size is given")
    kv_heads: Many | None = Field(
        None, description="key and value heads; must divide heads", json_schema_extra=Unset("heads")
    )
    hidden: Wide | None = Field(
        None,
        description="units of the MLP",
        json_schema_extra=Unset("8/3 of width, rounded up to 64"),
    )
    vocab: Ids = Field(256, description="token ids are 0 to vocab - 1; 256 for bytes")
    length: Tokens = Field(256, description="tokens of an example")
    positions: Tokens | None = Field(
        None,
        description="longest sequence that an export states for the model, in tokens",
        json_schema_extra=Unset("length"),
    )
    rope_theta: Rate = Field(10000.0, description="base of the rotary position angles")
    rope_scaling: RopeScaling | None = Field(
        None,
        description="scaled rotary frequencies, for a longer context",
        json_schema_extra=Unset("none", "null:"),
    )
    norm_eps: Rate = Field(1e-5, description="added to the mean square in RMSNorm")
    tied: bool = Field(False, description="the output matrix is the embedding")
    head_size: Many | None = Field(
        None, description="channels of a head", json_schema_extra=Unset("width / heads")
    )
    biases: list[Literal["qkv", "out", "mlp"]] = Field(
        [],
        description="linear layers with a bias: queries, keys and values; attention's "
        "output; the MLP",
    )
    qk_norm: Literal["head", "whole"] | None = Field(
        None,
        description="RMSNorm of queries and keys before RoPE: per head, or over all heads",
        json_schema_extra=Unset("none", "null:"),
    )
    norms: Literal["before", "after", "both"] = Field(
        "before",
        description="RMSNorm of the inputs of attention and MLP, of their outputs, or of both",
    )
    norm_from_one: bool = Field(
        False, description="norms multiply by 1 + weight, with weights initialized to 0"
    )
    activation: Literal["silu", "gelu", "gelu_tanh"] = Field(
        "silu", description="activation function of the MLP"
    )
    embedding_scale: bool = Field(
        False, description="multiply embeddings by the square root of width"
    )
    query_scalar: Rate | None = Field(
        None,
        description="attention scores are divided by its square root",
        json_schema_extra=Unset("head_size"),
    )
    score_cap: Rate | None = Field(
        None,
        description="soft cap of attention scores: cap × tanh(score / cap)",
        json_schema_extra=Unset("none", "null:"),
    )
    logit_cap: Rate | None = Field(
        None, description="the same for the logits", json_schema_extra=Unset("none", "null:")
    )
    window: Tokens | None = Field(
        None,
        description="sliding window: tokens that a position attends to, including itself",
        json_schema_extra=Unset("no window", "null:"),
    )
    pattern: Annotated[list[AttentionSpan], Field(min_length=1)] | None = Field(
        None,
        description="layers with and without the window, repeated: [window, full]",
        json_schema_extra=Unset("all have it", "default:"),
    )
    rope_local_theta: Rate | None = Field(
        None,
        description="rope_theta of the layers with a window, which then have no rope_scaling",
        json_schema_extra=Unset("that of all layers", "null:"),
    )
    experts: Annotated[int, Field(ge=2), at_most(2**16)] | None = Field(
        None,
        description="experts (MLPs) of each layer; a router selects some of them for each token",
        json_schema_extra=Unset("one MLP", "null:"),
    )
    experts_per_token: Many = Field(2, description="how many experts a token goes to (top-k)")
    expert_hidden: Wide | None = Field(
        None, description="units of an expert", json_schema_extra=Unset("hidden")
    )
    experts_normalized: bool = Field(
        True, description="normalize a token's top-k router probabilities to sum to 1"
    )
    dense_layers: list[Natural] = Field(
        [], description="layers, from 0, with one dense MLP instead of experts"
    )
    balance: Weight = Field(
        0.0,
        description="weight of the load-balancing loss, such as 0.01; default from the folder, if "
        "it sets one",
    )
    router_z: Weight = Field(0.0, description="weight of the router's z-loss, such as 1e-3")
    capacity: Rate | None = Field(
        None,
        description="capacity factor: an expert takes the first tokens of an example, up to "
        "an even share of the row's positions × this, such as 1.25",
        json_schema_extra=Unset("all", "null:"),
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Decoder:
        if self.is_partial:
            # The block is validated again with the sizes of the folder.
            return self
        heads, has_windows = f"heads = {self.heads}", "window" in (self.pattern or ())
        if self.head_size is None and (self.width % self.heads or self.head_channels % 2):
            raise ValueError(f"width = {self.width} does not split into {heads} heads of even size")
        if self.head_channels % 2:
            problem = "is odd; rotary embeddings rotate pairs of channels"
            raise ValueError(f"head_size = {self.head_size} {problem}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide {heads}")
        if self.window is None and (has_windows or self.rope_local_theta is not None):
            key = "rope_local_theta" if self.pattern is None else "pattern"
            raise ValueError(f"{key} applies to layers with a window, and window is null")
        self._check_experts()
        return self

    def _check_experts(self) -> None:
        layers, experts = f"layers = {self.layers}", f"experts = {self.experts}"
        if self.experts is None:
            keys = ", ".join(key for key in sorted(_EXPERT_KEYS) if self.is_changed(key))
            if keys:
                raise ValueError(f"{keys} applies to experts, and experts is null")
            return
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token = {self.experts_per_token} is more than {experts}")
        if missing := [layer for layer in self.dense_layers if layer >= self.layers]:
            raise ValueError(
                f"dense_layers has {missing[0]}, and {layers} are 0 to {self.layers - 1}"
            )
        if len(set(self.dense_layers)) == self.layers:
            problem = "which leaves none with experts"
            raise ValueError(f"dense_layers has all {self.layers} layers, {problem}")
        if "mlp" in self.biases:
            raise ValueError("biases contains mlp, but experts have no biases; remove it")

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """The layers with experts."""
        if self.experts is None:
            return ()
        return tuple(layer for layer in range(self.layers) if layer not in self.dense_layers)

    @property
    def layer_stacks(self) -> dict[str, tuple[int, ...]]:
        """The layers of each stack of parameters, by the name of the stack."""
        sparse = self.sparse_layers
        dense = tuple(layer for layer in range(self.layers) if layer not in sparse)
        return {"blocks": sparse or dense} | ({"dense_blocks": dense} if sparse and dense else {})

    @property
    def expert_units(self) -> int:
        """Hidden units of an expert."""
        return self.expert_hidden or self.mlp_units

    @property
    def kv_head_count(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def head_channels(self) -> int:
        """Channels of a head."""
        return self.head_size or self.width // self.heads

    @property
    def mlp_units(self) -> int:
        """Hidden units of the MLP."""
        return self.hidden or -(-8 * self.width // (3 * 64)) * 64

    @property
    def max_positions(self) -> int:
        """The longest sequence that the model supports."""
        return max(self.positions or 0, self.length)

    @property
    def attention_spans(self) -> tuple[AttentionSpan, ...]:
        """The attention spans of the first layers. The pattern repeats over all layers."""
        if self.window is None:
            return ("full",)
        return tuple(self.pattern or ("window",))[: self.layers]


class GPT2(LayeredModel):
    """GPT-2: LayerNorm first, learned positions, tanh GELU, tied embeddings.

    ```yaml
    train:
      task: lm
      model: {preset: gpt2-124m, dropout: 0.1}  # 1024 tokens, vocab 50257
    ```
    """

    kind: Literal["gpt2"] = Field("gpt2", description="this model")
    preset: GPT2Preset = None
    layers: Many = Field(4, description="transformer blocks")
    width: Wide = Field(256, description="size of the residual stream")
    heads: Many = Field(4, description="attention heads; must divide width")
    hidden: Wide | None = Field(
        None, description="units of the MLP", json_schema_extra=Unset("4 × width")
    )
    vocab: Ids = Field(256, description="token ids are 0 to vocab - 1; 256 for bytes")
    length: Tokens = Field(256, description="tokens of an example")
    positions: Tokens | None = Field(
        None, description="rows of the position table", json_schema_extra=Unset("length")
    )
    norm_eps: Rate = Field(1e-5, description="added to the variance in LayerNorm")
    dropout: Fraction = Field(0.0, description="dropout probability on residual branches")
    drop_path: DropPath = 0.0

    @model_validator(mode="after")
    def _check_sizes(self) -> GPT2:
        if self.is_partial:
            return self
        check_heads(self.width, self.heads)
        if self.length > (self.positions or self.length):
            raise ValueError(f"length = {self.length} is more than positions = {self.positions}")
        return self

    @property
    def position_rows(self) -> int:
        """Rows of the position table."""
        return self.positions or self.length

    @property
    def mlp_units(self) -> int:
        """Hidden units of the MLP."""
        return self.hidden or 4 * self.width


# What a model of transformers computes: logits of the next tokens, of hidden tokens, or of a text.
Head = Literal["causal_lm", "masked_lm", "sequence_classification"]
CAUSAL_LM: Head = "causal_lm"
MASKED_LM: Head = "masked_lm"
SEQUENCE_CLASSIFICATION: Head = "sequence_classification"


class TransformersModel(PublishedModel):
    """A model of transformers: its PyTorch code runs as a JAX function, for any architecture.

    It needs the extra `[transformers]`. With init_from and no kind, an architecture that has no
    built-in model becomes one of these.

    ```yaml
    train:
      task: lm
      # a folder of config.json and safetensors; in short model: {transformers: weights/olmo-3-7b}
      model: {kind: transformers, init_from: weights/olmo-3-7b, length: 2048}
    ```
    """

    SIZES: ClassVar[frozenset[str]] = frozenset({"vocab"})

    kind: Literal["transformers"] = Field("transformers", description="this model")
    transformers: Place | None = Field(
        None,
        description="the folder, in place of kind and init_from",
        json_schema_extra=Unset("init_from"),
    )
    length: Tokens = Field(256, description="tokens of an example")
    vocab: Ids | None = Field(
        None,
        description="token ids are 0 to vocab - 1",
        json_schema_extra=Unset("that of the folder"),
    )
    layers: Many | None = Field(
        None, description="layers", json_schema_extra=Unset("those of the folder")
    )
    width: Wide | None = Field(
        None,
        description="size of the residual stream",
        json_schema_extra=Unset("that of the folder"),
    )
    heads: Many | None = Field(
        None,
        description="key and value heads, which mp divides",
        json_schema_extra=Unset("those of the folder"),
    )
    head: Head = Field(
        CAUSAL_LM,
        description="what the model computes; a built-in task sets its own",
    )
    classes: Ids | None = Field(
        None,
        description="classification: labels are 0 to classes - 1",
        json_schema_extra=Unset("those of a folder with a classifier"),
    )
    weights: Literal["folder", "random"] = Field(
        "folder", description="start from the folder's weights, or from random ones"
    )
    unchecked: bool = Field(
        False,
        description="allow an architecture whose results differ from PyTorch, or were not compared",
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_folder(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping) or raw.get("transformers") is None:
            return raw
        return {"init_from": raw["transformers"], **raw}

    @model_validator(mode="after")
    def _check_folder(self) -> TransformersModel:
        if self.init_from is None:
            raise ValueError("kind: transformers needs a folder: transformers: FOLDER")
        if self.transformers not in (None, self.init_from):
            raise ValueError(
                f"transformers = {self.transformers} and init_from = {self.init_from} are two "
                "folders; keep one"
            )
        return self


class ImageModel(PublishedModel):
    """Keys that the published models of images have in common."""

    channels: Many = Field(
        3, description="channels of an image, its last axis; with 1 the axis may be absent"
    )
    classes: Ids = Field(10, description="labels are 0 to classes - 1")
    new_head: bool = Field(
        False,
        description="with init_from: initialize the last layer at random, for your own classes, "
        "and read the other layers",
    )
    pixel_mean: list[float] | None = Field(
        None,
        description="mean of each channel, subtracted from the pixels",
        json_schema_extra=Unset("each image is standardized by itself", "null:"),
    )
    pixel_std: list[Rate] | None = Field(
        None,
        description="standard deviation of each channel, to divide by; goes with pixel_mean",
        json_schema_extra=Unset("none"),
    )

    @model_validator(mode="after")
    def _check_pixels(self) -> ImageModel:
        if self.new_head and self.init_from is None:
            problem = "without it, every layer is initialized at random"
            raise ValueError(f"new_head applies to init_from; {problem}")
        if self.is_partial:
            return self
        if (self.pixel_mean is None) != (self.pixel_std is None):
            raise ValueError("pixel_mean and pixel_std go together")
        for key, values in (("pixel_mean", self.pixel_mean), ("pixel_std", self.pixel_std)):
            if values is not None and len(values) != self.channels:
                requirement = f"one number for each of channels = {self.channels}"
                raise ValueError(f"{key} = {values} does not have {requirement}")
        return self


class ViT(ImageModel, LayeredModel):
    """A vision transformer: patches, learned positions, LayerNorm first, exact GELU.

    ```yaml
    train:
      task: classify
      model: {kind: vit, image: [32, 32], patch: 4, classes: 10}  # 64 patches; or preset: vit-b16
    ```
    """

    PUBLISHED_VALUES: ClassVar[Mapping[str, Any]] = {"pool": "cls"}

    kind: Literal["vit"] = Field("vit", description="this model")
    preset: ViTPreset = None
    layers: Many = Field(6, description="transformer blocks")
    width: Wide = Field(192, description="size of the residual stream")
    heads: Many = Field(3, description="attention heads; must divide width")
    hidden: Wide | None = Field(
        None, description="units of the MLP", json_schema_extra=Unset("4 × width")
    )
    image: list[Many] = Field(
        [32, 32],
        description="height and width of an image, both multiples of patch; if they differ from "
        "those of init_from, its positions are interpolated",
    )
    patch: Many = Field(4, description="height and width of a patch")
    pool: Literal["cls", "mean"] = Field(
        "cls", description="classify from a class token (cls) or from the mean of the patches"
    )
    norm_eps: Rate = Field(1e-12, description="added to the variance in LayerNorm")
    dropout: Fraction = Field(0.0, description="dropout probability on residual branches")
    drop_path: DropPath = 0.0

    @model_validator(mode="after")
    def _check_sizes(self) -> ViT:
        if self.is_partial:
            return self
        check_heads(self.width, self.heads)
        if len(self.image) != 2 or any(side % self.patch for side in self.image):
            requirement = f"a height and a width that are multiples of patch = {self.patch}"
            raise ValueError(f"image = {self.image} is not {requirement}")
        return self

    @property
    def mlp_units(self) -> int:
        """Hidden units of the MLP."""
        return self.hidden or 4 * self.width

    @property
    def patch_count(self) -> int:
        """Patches of an image."""
        return self.patch_grid[0] * self.patch_grid[1]

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image[0] // self.patch, self.image[1] // self.patch


Stages = Annotated[list[Many], Field(min_length=1)]


class Staged(ImageModel):
    """A convolutional network: stages, each of which halves the image."""

    SIZES: ClassVar[frozenset[str]] = frozenset({"depths", "widths"})

    depths: Stages = Field([2, 2, 2, 2], description="blocks of each stage")
    widths: Stages = Field([64, 128, 256, 512], description="channels of each stage")

    @model_validator(mode="after")
    def _check_stages(self) -> Staged:
        if not self.is_partial and len(self.depths) != len(self.widths):
            stages = f"depths = {self.depths} and widths = {self.widths}"
            raise ValueError(f"{stages} have different numbers of stages")
        return self


class ResNet(Staged):
    """A residual network with batch normalization: ResNet 18 to 152, PyTorch's (v1.5).

    ```yaml
    train:
      task: classify
      # or preset: resnet-50
      model: {kind: resnet, stem: small, depths: [2, 2], widths: [32, 64], classes: 10}
      batch_norm: global  # statistics of the whole batch; device: of each device's part
    ```
    """

    PUBLISHED_VALUES: ClassVar[Mapping[str, Any]] = {"stem": "imagenet", "norm_eps": 1e-5}

    kind: Literal["resnet"] = Field("resnet", description="this model")
    preset: ResNetPreset = None
    block: Literal["basic", "bottleneck"] = Field(
        "basic",
        description="two convolutions of 3 × 3, or one between two of 1 × 1 with a quarter of "
        "the channels",
    )
    stem: Literal["imagenet", "small"] = Field(
        "imagenet",
        description="layers before the stages: 7 × 7 with stride 2 and pooling; small: 3 × 3 with "
        "stride 1, for images of 32 pixels, which cannot be exported to Hugging Face",
    )
    stem_width: Many = Field(64, description="channels before the stages")
    norm_eps: Rate = Field(1e-5, description="added to the variance in batch normalization")
    momentum: Fraction = Field(
        0.1, description="share of the running statistics that a batch replaces"
    )
    running_variance: Literal["unbiased", "biased"] = Field(
        "unbiased",
        description="running variance. unbiased: the variance of a batch × n / (n - 1), as in "
        "PyTorch; biased: as in Flax",
    )

    @model_validator(mode="after")
    def _check_widths(self) -> ResNet:
        is_divided = self.block == "bottleneck" and not self.is_partial
        if is_divided and any(width % 4 for width in self.widths):
            problem = "are not multiples of 4, which block = bottleneck divides them by"
            raise ValueError(f"widths = {self.widths} {problem}")
        return self


class ConvNeXt(Staged):
    """A convolutional network in the manner of a transformer, for images of any size.

    ```yaml
    train:
      task: classify
      model: {preset: convnext-tiny, classes: 10, drop_path: 0.1}  # stochastic depth, as published
    ```
    """

    kind: Literal["convnext"] = Field("convnext", description="this model")
    preset: ConvNeXtPreset = None
    depths: Stages = Field([3, 3, 9, 3], description="blocks of each stage")
    widths: Stages = Field([96, 192, 384, 768], description="channels of each stage")
    patch: Many = Field(
        4,
        description="height and width of a patch, which the first convolution turns into one pixel",
    )
    layer_scale: Annotated[float, Field(gt=0.0)] = Field(
        1e-6, description="initial factors of each block's output, one per channel"
    )
    norm_eps: Rate = Field(
        1e-12, description="added to the variance in the last LayerNorm; it is 1e-6 in the others"
    )
    drop_path: DropPath = 0.0


def check_heads(width: int, heads: int) -> None:
    """Raise ValueError if the heads do not divide the width."""
    if width % heads:
        raise ValueError(f"width = {width} does not split into heads = {heads} heads")


class CustomModel(BaseModel):
    """A model of the user's, `kind: module:Name`: an nnx module Name(**other keys, rngs=rngs).

    ```yaml
    train:
      task: classify
      model: {kind: "my_package.models:Net", width: 32}  # Net(width=32, rngs=rngs)
    ```
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: str = Field(
        pattern=USER_OBJECT, description="module:Name of the class; other keys are its arguments"
    )


def _model_tag(value: Any) -> str:
    if isinstance(value, Mapping):
        # With init_from, the kind of the folder may replace this one later.
        default = "decoder" if "init_from" in value else "mlp"
        name = value.get("kind", "transformers" if "transformers" in value else default)
    else:
        name = value.kind if isinstance(value, MLP | PublishedModel | CustomModel) else "mlp"
    return "custom" if isinstance(name, str) and ":" in name else str(name)


Model = Annotated[
    Annotated[MLP, Tag("mlp")]
    | Annotated[Decoder, Tag("decoder")]
    | Annotated[GPT2, Tag("gpt2")]
    | Annotated[ViT, Tag("vit")]
    | Annotated[ResNet, Tag("resnet")]
    | Annotated[ConvNeXt, Tag("convnext")]
    | Annotated[TransformersModel, Tag("transformers")]
    | Annotated[CustomModel, Tag("custom")],
    Discriminator(_model_tag),
]


class Sizes(NamedTuple):
    """Sizes of a model that other blocks and estimates depend on.

    Attributes:
        layers: Number of equal layers, 1 for a model without such layers.
        width: Size of the residual stream or of a hidden layer, 0 for a model with neither.
        length: Tokens of an example.
        heads: Number of key and value heads, which mp divides.
        experts: Number of experts of a layer.
        classes: Number of classes. Labels are 0 to classes - 1.
        vocab: Size of the vocabulary. Tokens are 0 to vocab - 1.
    """

    layers: int = 1
    width: int = 0
    length: int | None = None
    heads: int | None = None
    experts: int | None = None
    classes: int | None = None
    vocab: int | None = None


def model_sizes(model: Model) -> Sizes:
    """Return a model's sizes. Those of a user's model are its arguments with these names."""
    match model:
        case Decoder():
            heads, experts = model.kv_head_count, model.experts
            sizes = Sizes(model.layers, model.width, model.length, heads, experts)
            return sizes._replace(vocab=model.vocab)
        case TransformersModel():
            sizes = Sizes(model.layers or 1, model.width or 0, model.length, model.heads)
            return sizes._replace(vocab=model.vocab, classes=model.classes)
        case GPT2():
            return Sizes(model.layers, model.width, model.length, model.heads, vocab=model.vocab)
        case ViT():
            return Sizes(model.layers, model.width, heads=model.heads, classes=model.classes)
        case MLP():
            return Sizes(model.layers, model.width, classes=model.classes)
        case ResNet() | ConvNeXt():
            return Sizes(classes=model.classes)
    arguments = model.model_extra or {}
    names = [name for name in Sizes._fields if type(arguments.get(name)) is int]
    return Sizes(**{name: arguments[name] for name in names})


def fill_preset_kind(model: Any) -> Any:
    """Return a model block with the kind that its preset or its folder implies, if any."""
    if isinstance(model, Mapping) and "transformers" in model:
        return {"kind": "transformers", **model}
    if not isinstance(model, Mapping) or str(model.get("preset")) not in PRESETS:
        return model
    return {"kind": PRESETS[str(model["preset"])]["kind"], **model}
