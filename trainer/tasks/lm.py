"""Next-token prediction: examples of `tokens` [L + 1], and a `mask` [L] that is 0 where there is nothing to predict.

An example may have an `attention_mask` [L + 1] too: no position sees a token where it is 0.

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from trainer import losses
from trainer import spec as specs
from trainer.data import sources
from trainer.data.source import Source
from trainer.errors import SpecError
from trainer.models import custom
from trainer.models.decoder import Decoder
from trainer.models.gpt2 import GPT2
from trainer.models.setting import Setting
from trainer.spec import TrainSpec
from trainer.task import Loss, Split


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
        weight_BL = batch["mask"] * batch["weight"][:, None]
        masks = [batch["attention_mask"][:, :-1]] if "attention_mask" in batch else []
        sums = _sums(model, (tokens_BT[:, :-1], *masks), tokens_BT[:, 1:], weight_BL)
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
        seen = {"attention_mask": np.asarray(raw["attention_mask"], np.int32)} if "attention_mask" in raw else {}
        return {"tokens": tokens_T, "mask": mask_L, **seen}


def _sums(model: Any, inputs: tuple[Array, ...], labels_BL: Array, weight_BL: Array) -> losses.Sums:
    """The cross-entropy of `model`; a built-in one's in chunks where its logits would fill a device."""
    if not isinstance(model, Decoder | GPT2):
        return losses.cross_entropy(model(*inputs), labels_BL, weight_BL)
    options = losses.Options() if model.deterministic else losses.Options(model.loss.z, model.loss.smoothing)
    count, head_DV = _chunks(model.loss.chunks, labels_BL.shape, model.head_DV), model.head_DV
    if count == 1:
        return losses.cross_entropy(model(*inputs), labels_BL, weight_BL, options)
    return losses.in_chunks(model.project, head_DV, model.features(*inputs), labels_BL, weight_BL, count, options)


def _chunks(asked: int | str, shape: tuple[int, ...], head_DV: Array) -> int:
    if isinstance(asked, int):
        return asked
    batch, length = shape
    devices = max(1, jax.sharding.get_abstract_mesh().size)
    return losses.chunks(length, 4.0 * batch * length * head_DV.shape[1] / devices)
