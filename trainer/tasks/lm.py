"""Next-token prediction: examples of `tokens` [L + 1], and a `mask` [L] that is 0 where there is nothing to predict.

An example may say more of its tokens, all of it [L + 1] but the last:

| key | says |
|---|---|
| `attention_mask` | no position sees a token where it is 0 |
| `segments` | which of several examples in the row a token is of: no position sees, or predicts, another's tokens |
| `length` | how many tokens there are: those behind them fill the row up, are not seen and not predicted |

A mask may say what the others do, and costs a fused kernel most of its gain.

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from trainer import losses
from trainer import spec as specs
from trainer.attention import Visible
from trainer.data import sources
from trainer.data.source import Source
from trainer.errors import SpecError
from trainer.models import custom
from trainer.models.decoder import Decoder
from trainer.models.gpt2 import GPT2
from trainer.models.language import LanguageModel
from trainer.models.setting import Setting
from trainer.spec import TrainSpec
from trainer.task import Loss, Split

SAID = ("attention_mask", "segments", "length")  # of the tokens of an example, by the example


class NextToken:
    """Cross-entropy of every token after the first, each target weighing the same; `bits_per_byte` where a token is a
    byte, and `accuracy`."""

    def model(self, spec: TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
        """A decoder, GPT-2, or a model of the user's: tokens_BL -> logits_BLV.

        A model is given the attention mask as its second argument where the examples have one.
        """
        setting = Setting.of(spec)
        match spec.model:
            case specs.Decoder() as config:
                return Decoder(config, rngs, setting)
            case specs.GPT2() as config:
                return GPT2(config, rngs, setting)
            case specs.CustomModel() as config:
                return custom.build(spec, config, rngs)
        raise SpecError(
            f"train.model.kind = {spec.model.kind} does not predict tokens; use decoder, gpt2 or module:Name"
        )

    def loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Loss:
        tokens_BT = batch["tokens"]
        sums = _sums(model, (tokens_BT[:, :-1], *_keys(model, batch)), tokens_BT[:, 1:], _weights(batch))
        bits = sums.nats / math.log(2)
        return Loss(
            sums.total,
            sums.weight,
            {"bits_per_byte": (bits, sums.weight), "accuracy": (sums.correct, sums.weight)},
        )

    def source(self, spec: TrainSpec, split: Split) -> Source | None:
        return sources.open(spec, split)

    def example(self, raw: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        tokens_T = np.asarray(raw["tokens"], np.int32)
        mask_L = np.asarray(raw.get("mask", np.ones(len(tokens_T) - 1)), np.float32)
        said = {key: np.asarray(raw[key], np.int32) for key in SAID if key in raw}
        return {"tokens": tokens_T, "mask": mask_L, **said}


def _weights(batch: dict[str, Array]) -> Array:
    """What each target weighs, [B, L]: a token that is of another example than the one before it, nothing."""
    weight_BL = batch["mask"] * batch["weight"][:, None]
    if (segments_BT := batch.get("segments")) is not None:
        weight_BL = weight_BL * (segments_BT[:, 1:] == segments_BT[:, :-1]).astype(weight_BL.dtype)
    if (length_B := batch.get("length")) is not None:
        is_there_BL = jnp.arange(1, weight_BL.shape[1] + 1)[None, :] < length_B[:, None]
        weight_BL = weight_BL * is_there_BL.astype(weight_BL.dtype)
    return weight_BL


def _keys(model: Any, batch: dict[str, Array]) -> tuple[Array | Visible, ...]:
    """What a model is told of the keys, beside the tokens."""
    given = {key: batch[key] for key in SAID if key in batch}
    if not given:
        return ()
    if isinstance(model, LanguageModel):
        mask, segments = (given[key][:, :-1] if key in given else None for key in SAID[:2])
        return (Visible(mask, segments, given.get("length")),)
    if set(given) != {"attention_mask"}:
        raise SpecError("the examples have segments or a length, which a model of your own is not told; give it a mask")
    return (given["attention_mask"][:, :-1],)


def _sums(model: Any, inputs: tuple[Any, ...], labels_BL: Array, weight_BL: Array) -> losses.Sums:
    """The cross-entropy of `model`; a built-in one's in chunks where its logits would fill a device."""
    if not isinstance(model, LanguageModel):
        return losses.cross_entropy(model(*inputs), labels_BL, weight_BL)
    options = losses.Options() if model.deterministic else losses.Options(model.loss.z, model.loss.smoothing)
    count, head_DV = _chunks(model.loss.chunks, labels_BL.shape, model.head_DV), model.head_DV
    if count == 1:
        return losses.cross_entropy(model(*inputs), labels_BL, weight_BL, options)
    return losses.in_chunks(model.project, head_DV, model.features(*inputs), labels_BL, weight_BL, count, options)


def _chunks(asked: int | str, shape: tuple[int, ...], head_DV: Array) -> int:
    """One where the logits are not far larger than the head's gradient: its sum over chunks is an array more."""
    if isinstance(asked, int):
        return asked
    (batch, length), (width, vocab), mesh = shape, head_DV.shape, jax.sharding.get_abstract_mesh()
    devices = max(1, mesh.size)
    rows = batch * length * mesh.shape.get("mp", 1) / devices  # of a device's logits; mp splits both along V
    return 1 if rows < 2 * width else losses.chunks(length, 4.0 * batch * length * vocab / devices)
