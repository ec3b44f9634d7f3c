"""The built-in models: their keys, presets and checks. Never imports jax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0.0)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]


class Block(BaseModel):
    """A mapping with fixed keys: an unknown key is an error, and a value cannot change after it was read."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


# Sizes by name, as published: Touvron et al. 2023 and the Llama 3.1 and 3.2 model cards; Radford et al. 2019 (GPT-2);
# Dosovitskiy et al. 2021 and Touvron et al. 2021 (ViT).
_LLAMA3: Mapping[str, Any] = {"kind": "decoder", "kv_heads": 8, "vocab": 128256, "length": 2048, "rope_theta": 500000.0}
_GPT2: Mapping[str, Any] = {"kind": "gpt2", "vocab": 50257, "length": 1024, "positions": 1024}
_VIT: Mapping[str, Any] = {"kind": "vit", "patch": 16, "image": [224, 224], "classes": 1000}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama-1b": {
        **_LLAMA3,
        "layers": 16,
        "width": 2048,
        "heads": 32,
        "hidden": 8192,
        "tied": True,
        "rope_scaling": {"factor": 32.0, "original_length": 8192},
    },
    "llama-8b": {
        **_LLAMA3,
        "layers": 32,
        "width": 4096,
        "heads": 32,
        "hidden": 14336,
        "rope_scaling": {"factor": 8.0, "original_length": 8192},
    },
    "gpt2-124m": {**_GPT2, "layers": 12, "width": 768, "heads": 12},
    "gpt2-355m": {**_GPT2, "layers": 24, "width": 1024, "heads": 16},
    "gpt2-774m": {**_GPT2, "layers": 36, "width": 1280, "heads": 20},
    "gpt2-1.5b": {**_GPT2, "layers": 48, "width": 1600, "heads": 25},
    "vit-s16": {**_VIT, "layers": 12, "width": 384, "heads": 6},
    "vit-b16": {**_VIT, "layers": 12, "width": 768, "heads": 12},
    "vit-l16": {**_VIT, "layers": 24, "width": 1024, "heads": 16},
}


def _is_folder(path: str) -> str:
    if not path.strip() or "://" in path:
        raise ValueError("is not a folder: download the weights first, or mount them")
    return path


class Published(Block):
    """A model that others have trained: sizes by name, weights from their files."""

    kind: str = Field(description="this model")
    preset: str | None = Field(None, description="sizes by name, below the keys given here")
    init_from: Annotated[str, AfterValidator(_is_folder)] | None = Field(
        None, description="a Hugging Face folder, config.json and safetensors, to start from; null: random weights"
    )
    scan: bool = Field(True, description="layers are one loop: compiles fast; false: written out, runs faster")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, raw: Any) -> Any:
        """The preset's sizes, below the keys that are given."""
        sizes = PRESETS.get(str(raw.get("preset"))) if isinstance(raw, Mapping) else None
        return raw if sizes is None or sizes["kind"] != cls.model_fields["kind"].default else {**sizes, **raw}


class MLP(Block):
    """A multi-layer perceptron over flattened examples."""

    kind: Literal["mlp"] = Field("mlp", description="this model")
    layers: Positive = Field(2, description="hidden layers")
    width: Positive = Field(512, description="units of a hidden layer")
    classes: Positive = Field(10, description="labels are 0 to classes - 1")


class RopeScaling(Block):
    """Llama 3's stretching of slow rotary frequencies, so that a model reads further than it was trained."""

    factor: Rate = Field(description="by which the slow frequencies are divided")
    low_freq_factor: Rate = Field(1.0, description="turns within original_length below which a frequency is slow")
    high_freq_factor: Rate = Field(4.0, description="turns above which it is left alone; between, both are blended")
    original_length: Positive = Field(description="tokens of an example before the stretching")

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            low, high = self.low_freq_factor, self.high_freq_factor
            raise ValueError(f"high_freq_factor = {high:g} is not above low_freq_factor = {low:g}")
        return self


class Decoder(Published):
    """A Llama-style decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    kind: Literal["decoder"] = Field("decoder", description="this model")
    preset: Literal["llama-1b", "llama-8b"] | None = Field(None, description="sizes by name, below the keys given here")
    layers: Positive = Field(4, description="transformer blocks")
    width: Positive = Field(256, description="size of the residual stream")
    heads: Positive = Field(4, description="query heads; must divide width")
    kv_heads: Positive | None = Field(None, description="key and value heads; default heads; must divide heads")
    hidden: Positive | None = Field(None, description="units of the SwiGLU; default 8/3 of width, rounded up to 64")
    vocab: Positive = Field(256, description="token ids are 0 to vocab - 1; 256 for bytes")
    length: Positive = Field(256, description="tokens of an example")
    rope_theta: Rate = Field(10000.0, description="base of the rotary position angles")
    rope_scaling: RopeScaling | None = Field(None, description="Llama 3's, for long examples; null: none")
    norm_eps: Rate = Field(1e-5, description="added to the mean square in RMSNorm")
    tied: bool = Field(False, description="the output matrix is the embedding")

    @model_validator(mode="after")
    def _divides(self) -> Decoder:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(f"width = {self.width} does not split into heads = {self.heads} heads of even size")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads = {self.kv_heads} does not divide heads = {self.heads}")
        return self

    @property
    def groups(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def units(self) -> int:
        """Hidden units of the SwiGLU."""
        return self.hidden or -(-8 * self.width // (3 * 64)) * 64


class GPT2(Published):
    """GPT-2: LayerNorm first, learned positions, tanh GELU, tied embeddings."""

    kind: Literal["gpt2"] = Field("gpt2", description="this model")
    preset: Literal["gpt2-124m", "gpt2-355m", "gpt2-774m", "gpt2-1.5b"] | None = Field(
        None, description="sizes by name, below the keys given here"
    )
    layers: Positive = Field(4, description="transformer blocks")
    width: Positive = Field(256, description="size of the residual stream")
    heads: Positive = Field(4, description="attention heads; must divide width")
    hidden: Positive | None = Field(None, description="units of the MLP; default 4 × width")
    vocab: Positive = Field(256, description="token ids are 0 to vocab - 1; 256 for bytes")
    length: Positive = Field(256, description="tokens of an example")
    positions: Positive | None = Field(None, description="rows of the position table; default length")
    norm_eps: Rate = Field(1e-5, description="added to the variance in LayerNorm")
    dropout: Fraction = Field(0.0, description="share of the numbers a layer adds that training leaves out")
    drop_path: Fraction = Field(0.0, description="share of examples that skip the last layer; earlier ones less")

    @model_validator(mode="after")
    def _fits(self) -> GPT2:
        _check_heads(self.width, self.heads)
        if self.length > (self.positions or self.length):
            raise ValueError(f"length = {self.length} is more than positions = {self.positions}")
        return self

    @property
    def rows(self) -> int:
        """Rows of the position table."""
        return self.positions or self.length

    @property
    def units(self) -> int:
        """Hidden units of the MLP."""
        return self.hidden or 4 * self.width


class ViT(Published):
    """A vision transformer: patches, learned positions, LayerNorm first, exact GELU."""

    kind: Literal["vit"] = Field("vit", description="this model")
    preset: Literal["vit-s16", "vit-b16", "vit-l16"] | None = Field(
        None, description="sizes by name, below the keys given here"
    )
    layers: Positive = Field(6, description="transformer blocks")
    width: Positive = Field(192, description="size of the residual stream")
    heads: Positive = Field(3, description="attention heads; must divide width")
    hidden: Positive | None = Field(None, description="units of the MLP; default 4 × width")
    image: list[Positive] = Field([32, 32], description="height and width of an image; both a multiple of patch")
    channels: Positive = Field(3, description="of an image, its last axis; 1: none")
    patch: Positive = Field(4, description="height and width of a patch")
    classes: Positive = Field(10, description="labels are 0 to classes - 1")
    pool: Literal["cls", "mean"] = Field("cls", description="what is classified: a token of its own, or the mean")
    norm_eps: Rate = Field(1e-12, description="added to the variance in LayerNorm")
    dropout: Fraction = Field(0.0, description="share of the numbers a layer adds that training leaves out")
    drop_path: Fraction = Field(0.0, description="share of examples that skip the last layer; earlier ones less")
    pixel_mean: list[float] | None = Field(
        None, description="of each channel, taken from the pixels; null: each image is standardized by itself"
    )
    pixel_std: list[Rate] | None = Field(None, description="of each channel, then divided by; goes with pixel_mean")

    @model_validator(mode="after")
    def _fits(self) -> ViT:
        _check_heads(self.width, self.heads)
        if len(self.image) != 2 or any(side % self.patch for side in self.image):
            raise ValueError(f"image = {self.image} is not a height and a width that patch = {self.patch} divides")
        if (self.pixel_mean is None) != (self.pixel_std is None):
            raise ValueError("pixel_mean and pixel_std go together")
        for key, values in (("pixel_mean", self.pixel_mean), ("pixel_std", self.pixel_std)):
            if values is not None and len(values) != self.channels:
                raise ValueError(f"{key} = {values} is not one number for each of channels = {self.channels}")
        return self

    @property
    def units(self) -> int:
        """Hidden units of the MLP."""
        return self.hidden or 4 * self.width

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return self.image[0] // self.patch * (self.image[1] // self.patch)


def _check_heads(width: int, heads: int) -> None:
    if width % heads:
        raise ValueError(f"width = {width} does not split into heads = {heads} heads")


class CustomModel(BaseModel):
    """A model of the user's: `kind: module:Name`, an nnx module built as Name(**other keys, rngs=rngs)."""

    model_config = ConfigDict(extra="allow", frozen=True)
    kind: Annotated[
        str, Field(pattern=r"^[\w.]+:[\w.]+$", description="module:Name of the class; other keys are its arguments")
    ]


def _tag(value: Any) -> str:
    name = value.get("kind", "mlp") if isinstance(value, Mapping) else getattr(value, "kind", "mlp")
    return "custom" if isinstance(name, str) and ":" in name else str(name)


Model = Annotated[
    Annotated[MLP, Tag("mlp")]
    | Annotated[Decoder, Tag("decoder")]
    | Annotated[GPT2, Tag("gpt2")]
    | Annotated[ViT, Tag("vit")]
    | Annotated[CustomModel, Tag("custom")],
    Discriminator(_tag),
]


def named(model: Any) -> Any:
    """A model block that gives a preset and no kind, with the kind the preset is of."""
    if not isinstance(model, Mapping) or "kind" in model or str(model.get("preset")) not in PRESETS:
        return model
    return {"kind": PRESETS[str(model["preset"])]["kind"], **model}
