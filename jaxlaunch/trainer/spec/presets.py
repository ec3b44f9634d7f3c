"""Published models: the keys that their blocks share, and presets of their sizes.

Never imports jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from jaxlaunch.trainer.spec.block import Block, Place, Unset

Sizes = Mapping[str, Any]

# Sources: Touvron et al. 2023 and the Llama 3.1 and 3.2 model cards; Radford et al. 2019 (GPT-2);
# Dosovitskiy et al. 2021 and Touvron et al. 2021 (ViT); He et al. 2016 (ResNet); Liu et al. 2022
# (ConvNeXt); the model cards of Qwen 2.5 and 3, Mistral, Mixtral, Gemma 2 and 3, OLMo 2.
_DECODER: Sizes = {"kind": "decoder", "length": 2048}
_LLAMA3: Sizes = {**_DECODER, "family": "llama", "vocab": 128256, "rope_theta": 500000.0}
_LLAMA3 = {**_LLAMA3, "positions": 131072}
_QWEN: Sizes = {**_DECODER, "rope_theta": 1e6, "norm_eps": 1e-6, "vocab": 151936}
_QWEN2: Sizes = {**_QWEN, "family": "qwen2", "biases": ["qkv"], "positions": 32768}
_QWEN3: Sizes = {**_QWEN, "family": "qwen3", "head_size": 128, "qk_norm": "head"}
_QWEN3 = {**_QWEN3, "positions": 40960}
_MISTRAL: Sizes = {**_DECODER, "family": "mistral", "rope_theta": 1e6, "kv_heads": 8}
_GEMMA: Sizes = {
    **_DECODER,
    "norms": "both",
    "norm_from_one": True,
    "norm_eps": 1e-6,
    "activation": "gelu_tanh",
    "embedding_scale": True,
    "query_scalar": 256.0,
    "head_size": 256,
    "tied": True,
}
_GEMMA2: Sizes = {
    **_GEMMA,
    "family": "gemma2",
    "vocab": 256000,
    "window": 4096,
    "pattern": ["window", "full"],
    "score_cap": 50.0,
    "logit_cap": 30.0,
    "positions": 8192,
}
_GEMMA3: Sizes = {
    **_GEMMA,
    "family": "gemma3_text",
    "vocab": 262144,
    "window": 512,
    "pattern": ["window"] * 5 + ["full"],
    "qk_norm": "head",
    "rope_theta": 1e6,
    "rope_local_theta": 1e4,
    "positions": 32768,
}
_OLMO2: Sizes = {
    **_DECODER,
    "family": "olmo2",
    "vocab": 100352,
    "rope_theta": 500000.0,
    "norm_eps": 1e-6,
    "norms": "after",
    "qk_norm": "whole",
    "positions": 4096,
}
_MIXTRAL: Sizes = {**_DECODER, "family": "mixtral", "rope_theta": 1e6}
_MIXTRAL = {**_MIXTRAL, "experts": 8, "experts_per_token": 2}
_QWEN3_MOE: Sizes = {**_QWEN3, "family": "qwen3_moe", "experts": 128, "experts_per_token": 8}
_GPT2: Sizes = {"kind": "gpt2", "vocab": 50257, "length": 1024, "positions": 1024}
# Channels of a ResNet's stages.
_BASIC, _BOTTLENECK = [64, 128, 256, 512], [256, 512, 1024, 2048]
_VIT: Sizes = {"kind": "vit", "patch": 16, "image": [224, 224], "classes": 1000}
_RESNET: Sizes = {"kind": "resnet", "classes": 1000}
_CONVNEXT: Sizes = {"kind": "convnext", "classes": 1000}


def _decoder_sizes(
    base: Sizes, layers: int, width: int, heads: int, kv_heads: int, hidden: int, **keys: Any
) -> Sizes:
    sizes = {"layers": layers, "width": width, "heads": heads}
    return {**base, **sizes, "kv_heads": kv_heads, "hidden": hidden, **keys}


def _llama3_scaling(factor: float) -> Sizes:
    return {"rope_scaling": {"factor": factor, "original_length": 8192}}


PRESETS: Mapping[str, Sizes] = {
    "llama-1b": _decoder_sizes(_LLAMA3, 16, 2048, 32, 8, 8192, tied=True, **_llama3_scaling(32.0)),
    "llama-3b": _decoder_sizes(_LLAMA3, 28, 3072, 24, 8, 8192, tied=True, **_llama3_scaling(32.0)),
    "llama-8b": _decoder_sizes(_LLAMA3, 32, 4096, 32, 8, 14336, **_llama3_scaling(8.0)),
    "llama-70b": _decoder_sizes(_LLAMA3, 80, 8192, 64, 8, 28672, **_llama3_scaling(8.0)),
    "qwen2.5-0.5b": _decoder_sizes(_QWEN2, 24, 896, 14, 2, 4864, tied=True),
    "qwen2.5-1.5b": _decoder_sizes(_QWEN2, 28, 1536, 12, 2, 8960, tied=True, positions=131072),
    "qwen2.5-3b": _decoder_sizes(_QWEN2, 36, 2048, 16, 2, 11008, tied=True),
    "qwen2.5-7b": _decoder_sizes(_QWEN2, 28, 3584, 28, 4, 18944, vocab=152064, positions=131072),
    "qwen2.5-14b": _decoder_sizes(
        _QWEN2, 48, 5120, 40, 8, 13824, vocab=152064, norm_eps=1e-5, positions=131072
    ),
    "qwen2.5-32b": _decoder_sizes(
        _QWEN2, 64, 5120, 40, 8, 27648, vocab=152064, norm_eps=1e-5, positions=131072
    ),
    "qwen2.5-72b": _decoder_sizes(
        _QWEN2, 80, 8192, 64, 8, 29568, vocab=152064, norm_eps=1e-5, positions=131072
    ),
    "qwen3-0.6b": _decoder_sizes(_QWEN3, 28, 1024, 16, 8, 3072, tied=True),
    "qwen3-1.7b": _decoder_sizes(_QWEN3, 28, 2048, 16, 8, 6144, tied=True),
    "qwen3-4b": _decoder_sizes(_QWEN3, 36, 2560, 32, 8, 9728, tied=True),
    "qwen3-8b": _decoder_sizes(_QWEN3, 36, 4096, 32, 8, 12288),
    "qwen3-14b": _decoder_sizes(_QWEN3, 40, 5120, 40, 8, 17408),
    "qwen3-32b": _decoder_sizes(_QWEN3, 64, 5120, 64, 8, 25600),
    "mistral-7b": _decoder_sizes(_MISTRAL, 32, 4096, 32, 8, 14336, vocab=32768, positions=32768),
    "mistral-nemo-12b": _decoder_sizes(
        _MISTRAL, 40, 5120, 32, 8, 14336, head_size=128, vocab=131072, positions=131072
    ),
    "gemma2-2b": _decoder_sizes(_GEMMA2, 26, 2304, 8, 4, 9216),
    "gemma2-9b": _decoder_sizes(_GEMMA2, 42, 3584, 16, 8, 14336),
    "gemma2-27b": _decoder_sizes(
        _GEMMA2, 46, 4608, 32, 16, 36864, head_size=128, query_scalar=144.0
    ),
    "gemma3-270m": _decoder_sizes(_GEMMA3, 18, 640, 4, 1, 2048),
    "gemma3-1b": _decoder_sizes(_GEMMA3, 26, 1152, 4, 1, 6912),
    "olmo2-1b": _decoder_sizes(_OLMO2, 16, 2048, 16, 16, 8192),
    "olmo2-7b": _decoder_sizes(_OLMO2, 32, 4096, 32, 32, 11008),
    "olmo2-13b": _decoder_sizes(_OLMO2, 40, 5120, 40, 40, 13824),
    "olmo2-32b": _decoder_sizes(_OLMO2, 64, 5120, 40, 8, 27648),
    "mixtral-8x7b": _decoder_sizes(_MIXTRAL, 32, 4096, 32, 8, 14336, vocab=32000, positions=32768),
    "mixtral-8x22b": _decoder_sizes(_MIXTRAL, 56, 6144, 48, 8, 16384, vocab=32000, positions=65536),
    "qwen3-30b-a3b": _decoder_sizes(_QWEN3_MOE, 48, 2048, 32, 4, 6144, expert_hidden=768),
    "qwen3-235b-a22b": _decoder_sizes(_QWEN3_MOE, 94, 4096, 64, 4, 12288, expert_hidden=1536),
    "gpt2-124m": {**_GPT2, "layers": 12, "width": 768, "heads": 12},
    "gpt2-355m": {**_GPT2, "layers": 24, "width": 1024, "heads": 16},
    "gpt2-774m": {**_GPT2, "layers": 36, "width": 1280, "heads": 20},
    "gpt2-1.5b": {**_GPT2, "layers": 48, "width": 1600, "heads": 25},
    "vit-s16": {**_VIT, "layers": 12, "width": 384, "heads": 6},
    "vit-b16": {**_VIT, "layers": 12, "width": 768, "heads": 12},
    "vit-l16": {**_VIT, "layers": 24, "width": 1024, "heads": 16},
    **{
        f"resnet-{layers}": {**_RESNET, "block": block, "depths": depths, "widths": widths}
        for layers, block, depths, widths in (
            (18, "basic", [2, 2, 2, 2], _BASIC),
            (34, "basic", [3, 4, 6, 3], _BASIC),
            (50, "bottleneck", [3, 4, 6, 3], _BOTTLENECK),
            (101, "bottleneck", [3, 4, 23, 3], _BOTTLENECK),
            (152, "bottleneck", [3, 8, 36, 3], _BOTTLENECK),
        )
    },
    **{
        f"convnext-{name}": {**_CONVNEXT, "depths": depths, "widths": widths}
        for name, depths, widths in (
            ("tiny", [3, 3, 9, 3], [96, 192, 384, 768]),
            ("small", [3, 3, 27, 3], [96, 192, 384, 768]),
            ("base", [3, 3, 27, 3], [128, 256, 512, 1024]),
            ("large", [3, 3, 27, 3], [192, 384, 768, 1536]),
        )
    },
}


if TYPE_CHECKING:
    DecoderPreset = str | None
    GPT2Preset = str | None
    ViTPreset = str | None
    ResNetPreset = str | None
    ConvNeXtPreset = str | None
else:

    def _preset(kind: str) -> Any:
        names = tuple(name for name, sizes in PRESETS.items() if sizes["kind"] == kind)
        description = "a preset of sizes by name; keys given here override it"
        field = Field(description=description, json_schema_extra=Unset("none"))
        return Annotated[Literal[names] | None, field]

    DecoderPreset, GPT2Preset, ViTPreset = map(_preset, ("decoder", "gpt2", "vit"))
    ResNetPreset, ConvNeXtPreset = map(_preset, ("resnet", "convnext"))


class PublishedModel(Block):
    """A published model: sizes by name, weights from files."""

    # Keys that determine the sizes. With init_from, the folder sets those that the job leaves out.
    SIZES: ClassVar[frozenset[str]] = frozenset({"layers", "width", "heads"})
    # The only values of these keys for which Hugging Face has a model of this kind.
    PUBLISHED_VALUES: ClassVar[Mapping[str, Any]] = {}

    kind: str = Field(description="this model")
    preset: str | None = Field(
        None,
        description="a preset of sizes by name; keys given here override it",
        json_schema_extra=Unset("none"),
    )
    init_from: Place | None = Field(
        None,
        description="a Hugging Face folder or gs://, s3:// URL to start from, which also sets "
        "the sizes",
        json_schema_extra=Unset("random weights"),
    )

    @property
    def is_partial(self) -> bool:
        """Return whether the folder of init_from sets some of the sizes."""
        return self.init_from is not None and not self.model_fields_set.issuperset(self.SIZES)

    @property
    def unpublished_options(self) -> list[str]:
        """Return a sentence for each key with which the model has no equivalent in Hugging Face."""
        return [
            f"train.model.{key} = {getattr(self, key)}: Hugging Face's {type(self).__name__} knows "
            f"only {value}"
            for key, value in self.PUBLISHED_VALUES.items()
            if getattr(self, key) != value
        ]

    @model_validator(mode="before")
    @classmethod
    def _fill_preset(cls, raw: Any) -> Any:
        sizes = PRESETS.get(str(raw.get("preset"))) if isinstance(raw, Mapping) else None
        if sizes is None or sizes["kind"] != cls.model_fields["kind"].default:
            return raw
        return {**sizes, **raw}


class LayeredModel(PublishedModel):
    """A published model of equal layers."""

    scan: bool = Field(
        True,
        description="run the layers as one loop (scan): compiles fast; false: unrolled, "
        "runs faster",
    )
