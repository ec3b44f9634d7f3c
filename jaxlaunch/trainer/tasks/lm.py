"""Next-token prediction: examples of `tokens` [L + 1] and a `mask` [L], 1 for predicted tokens.

An example may also have these keys, of shape [L + 1] except for `length`:

| key | meaning |
|---|---|
| `attention_mask` | 0 for a token that is neither seen nor predicted |
| `segments` | number of the example in its row, from 1; a token sees only its own; 0 is padding |
| `length` | number of tokens; the rest is padding, neither seen nor predicted |

An attention mask can express the other two, but fused kernels are much slower with a mask.

B batch, L length, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.attention import padding
from jaxlaunch.trainer.attention.implementations import Visible
from jaxlaunch.trainer.data.examples import Batch, Examples, UnusableExampleError
from jaxlaunch.trainer.data.source import Source, Split
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.models import custom
from jaxlaunch.trainer.models.decoder import Decoder
from jaxlaunch.trainer.models.gpt2 import GPT2
from jaxlaunch.trainer.models.language_model import LanguageModel, SeparateHead
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.task import Loss, Task, checked_logits
from jaxlaunch.trainer.tasks import losses, ranges
from jaxlaunch.trainer.torch_models import build
from jaxlaunch.trainer.torch_models.network import TorchModel

# Keys of an example that restrict which tokens are seen.
TOKEN_KEYS = ("attention_mask", "segments", "length")
# The exponential of this is still finite in float64.
MAX_EXPONENT = 700.0
# The key for the number of bytes of text that the targets of an example encode.
TEXT_BYTES = "text_bytes"


class NextToken(Task):
    """The task `lm`: the cross-entropy of every token after the first, with equal weights.

    Its metrics are `accuracy` and, if the number of bytes of text behind the targets is known,
    `bits_per_byte`. Examples have `tokens` `[L + 1]`, and may have a `mask` `[L]`, which is 0 for
    targets that do not count: [text](text.md). It is used like [`Classify`](#classify).
    """

    # True if every token is a byte of text.
    are_bytes = False
    # The vocabulary of the logits, set when the loss is traced.
    _vocab: int | None = None

    def model(self, spec: TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
        """Return a model of tokens_BL, and an attention mask if any, to logits_BLV."""
        options = ModelOptions.from_spec(spec)
        match spec.model:
            case specs.Decoder() as config:
                return Decoder(config, rngs, options)
            case specs.GPT2() as config:
                return GPT2(config, rngs, options)
            case specs.TransformersModel() as config:
                return build.build_model(config, rngs, options, spec.lora)
            case specs.CustomModel() as config:
                return custom.build_model(spec, config, rngs, lambda: (self._sample_tokens(spec),))
        raise SpecError(
            f"train.model.kind = {spec.model.kind} does not predict tokens; use decoder, gpt2, "
            "transformers or module:Name"
        )

    def loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Loss:
        """Return the weighted cross-entropy of each token after the first, given those before it.

        `batch` has `tokens` int32 [B, L + 1], `mask` float32 [B, L], `weight` [B], and any of
        TOKEN_KEYS.
        """
        tokens_BT = batch["tokens"]
        inputs_BL = tokens_BT[:, :-1]
        keys = _visible_keys(model, batch)
        labels_BL = tokens_BT[:, 1:]
        weight_BL = batch["mask"] * batch["weight"][:, None]
        # Padding is not predicted, nor is the first token of an example from the previous example.
        weight_BL = weight_BL * padding.target_mask(batch).astype(weight_BL.dtype)
        if has_separate_head(model):
            self._vocab = model.head_DV.shape[1]
            features = model.read(inputs_BL, keys[0] if keys else None, padding.input_mask(batch))
            sums = _score_cross_entropy(model, features.x_BLD, labels_BL, weight_BL)
            routing = features.routing
        else:
            logits_BLV = checked_logits(model, model(inputs_BL, *keys), labels_BL)
            self._vocab = logits_BLV.shape[-1]
            terms = _training_terms(model) if isinstance(model, TorchModel) else losses.PLAIN_TERMS
            sums, routing = losses.cross_entropy(logits_BLV, labels_BL, weight_BL, terms), None
        metrics = {"accuracy": (sums.correct, sums.weight)}
        bits = sums.nats / math.log(2)
        if (bytes_B := batch.get(TEXT_BYTES)) is not None:
            metrics["bits_per_byte"] = (bits, (bytes_B * batch["weight"]).sum())
        elif self.are_bytes:
            metrics["bits_per_byte"] = (bits, sums.weight)
        return Loss(sums.total, sums.weight, metrics, routing)

    def source(self, spec: TrainSpec, split: Split) -> Source | None:
        """Return the source that `train.data` describes. Raises DataError, SpecError."""
        self.are_bytes = isinstance(spec.data, specs.Text) and not spec.data.is_prepared
        return open_source(spec, split)

    def example(self, raw: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """Return `tokens` int32 [L + 1], `mask` float32 [L], TOKEN_KEYS as int32, and TEXT_BYTES.

        Raises UnusableExampleError if tokens are missing, are not whole numbers or not a row, and
        if another key does not have its shape.
        """
        tokens_T = ranges.read_integers("tokens", ranges.get_value(raw, "tokens"))
        if tokens_T.ndim != 1 or len(tokens_T) < 2:
            raise UnusableExampleError(
                f"tokens of shape {list(tokens_T.shape)}, but an example is one row of at least 2"
            )
        example = {"tokens": tokens_T}
        if "mask" in raw:
            example["mask"] = np.asarray(raw["mask"], np.float32)
        example |= {key: ranges.read_integers(key, raw[key]) for key in TOKEN_KEYS if key in raw}
        if TEXT_BYTES in raw:
            example[TEXT_BYTES] = np.asarray(raw[TEXT_BYTES], np.float32)
        for key, value in example.items():
            length = len(tokens_T) - (key == "mask")
            expected_shape = () if key in ("length", TEXT_BYTES) else (length,)
            if value.shape != expected_shape:
                raise UnusableExampleError(
                    f"{key} of shape {list(value.shape)}, but its {len(tokens_T)} tokens go with "
                    f"{list(expected_shape)}"
                )
        if "mask" not in example:
            rows = {key: value[None] for key, value in example.items()}
            example["mask"] = padding.target_mask(rows)[0].astype(np.float32)
        return example

    def _sample_tokens(self, spec: TrainSpec) -> Array:
        """Return a batch of one row of zeros, as long as the first example's, to build a model."""
        source = self.source(spec, "train")
        if source is None:
            raise DataError("train.data has no training examples to take the tokens' length from")
        shape = Examples(source, self.example).array_specs["tokens"].shape
        return jnp.zeros((1, shape[0] - 1), jnp.int32)

    def derived(self, means: Mapping[str, float]) -> dict[str, float]:
        """Return the perplexity of an evaluation, the exponential of its mean loss."""
        return {"perplexity": math.exp(min(means["loss"], MAX_EXPONENT))} if "loss" in means else {}

    def check_batch(self, spec: TrainSpec, batch: Batch) -> tuple[int, str] | None:
        """Return the first row that is too long or has unknown tokens, and a sentence about it.

        A token that is neither seen nor predicted may have any value, such as the -100 of other
        libraries; it is replaced by 0. For a custom model only the targets are checked, and for a
        task with another loss nothing is.
        """
        if type(self).loss is not NextToken.loss:
            return None
        config, tokens_BT, vocab, is_built_in = spec.model, batch["tokens"], self._vocab, False
        built_in = specs.Decoder | specs.GPT2 | specs.TransformersModel
        if isinstance(config, built_in) and type(self).model is NextToken.model:
            is_built_in, length, vocab = True, tokens_BT.shape[1] - 1, config.vocab
            if length > config.length:
                return 0, (
                    f"{length + 1} tokens, and train.model.length = {config.length} allows "
                    f"{config.length + 1}: make the length {length}, or cut the examples"
                )
        if vocab is None or (tokens_BT.min() >= 0 and tokens_BT.max() < vocab):
            return None
        wrong_BT = (tokens_BT < 0) | (tokens_BT >= vocab)
        rows = np.flatnonzero(wrong_BT.any(1))
        counts_BT = ranges.find_counted_tokens(batch, rows, include_read=is_built_in)
        reason = f"outside 0 to {vocab - 1}, the vocabulary"
        fault = ranges.find_wrong("token", tokens_BT, wrong_BT & counts_BT, reason)
        if fault is None and is_built_in:
            tokens_BT[wrong_BT] = 0
        return fault


def _visible_keys(model: Any, batch: dict[str, Array]) -> tuple[Array | Visible, ...]:
    """Return the arguments of a model after the tokens, which restrict the keys that are seen."""
    arrays = {key: batch[key] for key in TOKEN_KEYS if key in batch}
    if not arrays:
        return ()
    mask, segments = (arrays[key][:, :-1] if key in arrays else None for key in TOKEN_KEYS[:2])
    if isinstance(model, LanguageModel | TorchModel):
        return (Visible(mask, segments, arrays.get("length")),)
    if mask is None or len(arrays) > 1:
        raise SpecError(
            "the examples have segments or a length, which a custom model does not "
            "receive; use an attention_mask instead"
        )
    return (mask,)


def has_separate_head(model: Any) -> TypeGuard[SeparateHead]:
    """Return whether the loss can compute the logits of a model in chunks."""
    if isinstance(model, TorchModel):
        return model.head_name is not None
    return isinstance(model, LanguageModel)


def _training_terms(model: SeparateHead | TorchModel) -> specs.Loss:
    """Return the terms of a cross-entropy in training; an evaluation has none."""
    if model.deterministic:
        return losses.PLAIN_TERMS
    return specs.Loss(z=model.loss.z, smoothing=model.loss.smoothing)


def _score_cross_entropy(
    model: SeparateHead, x_BLD: Array, labels_BL: Array, weight_BL: Array
) -> losses.Sums:
    """Return the cross-entropy of features, in chunks if its logits would fill a device.

    Training in bfloat16 keeps the logits in bfloat16, because in float32 they would be the largest
    array of a step. The loss is still computed in float32. Logits with a cap stay in float32,
    because bfloat16 has too few digits for the tanh.
    """
    score = partial(losses.cross_entropy, terms=_training_terms(model))
    if model.deterministic:
        return score_logits(model, x_BLD, labels_BL, weight_BL, score)
    is_narrow = x_BLD.dtype == jnp.bfloat16 and model.logit_cap is None
    logits_dtype = jnp.dtype(jnp.bfloat16) if is_narrow else model.output
    # Gradients in the forward pass lack the scale of the loss and would underflow in float16.
    return score_logits(
        model, x_BLD, labels_BL, weight_BL, score, logits_dtype, at_once=x_BLD.dtype != jnp.float16
    )


def score_logits(
    model: SeparateHead,
    x_BLD: Array,
    labels_BL: Array,
    weight_BL: Array,
    score: Callable[[Array, Array, Array], losses.Summed],
    logits_dtype: jnp.dtype | None = None,
    at_once: bool = False,
) -> losses.Summed:
    """Return `score(logits, labels, weights)` for the features of a model, summed over positions.

    The logits are computed in chunks if they are large. For the backward pass only the logits are
    kept, in `logits_dtype`, which is the model's output dtype by default. The intermediates of
    `score`, which are as large as the logits, are recomputed. With `at_once` the gradients of
    chunks are computed in the forward pass instead.
    """
    project = partial(model.project, output=logits_dtype)
    logit_bytes = jnp.dtype(logits_dtype or model.output).itemsize
    count = _choose_chunks(model.loss.chunks, labels_BL.shape, model.head_DV, logit_bytes)
    head_DV = model.head_DV
    if count == 1:
        checkpointed_score: Any = jax.checkpoint(score, prevent_cse=False)
        result: losses.Summed = checkpointed_score(project(x_BLD, head_DV), labels_BL, weight_BL)
        return result
    return losses.sum_in_chunks(
        project, head_DV, x_BLD, labels_BL, weight_BL, count, score, at_once
    )


def _choose_chunks(
    chunks: int | str, shape: tuple[int, ...], head_DV: Array, logit_bytes: int
) -> int:
    """Return the number of chunks for the logits of [B, L] positions, unless the job sets it.

    Chunks cost a second copy of the head's gradient, so there is only one chunk if the logits are
    not much larger than that. The gradient is summed over the devices once per chunk, so a large
    head has larger chunks.
    """
    if isinstance(chunks, int):
        return chunks
    (batch, length), (width, vocab), mesh = shape, head_DV.shape, jax.sharding.get_abstract_mesh()
    devices, mp = max(1, mesh.size), mesh.shape.get("mp", 1)
    # Rows of a device's logits per column of its head. mp splits the columns of both.
    rows = batch * length * mp / devices
    if rows < 2 * width:
        return 1
    # Half of the head's gradient, in bfloat16.
    head_bytes = width * vocab / mp
    logits_bytes = logit_bytes * batch * length * vocab / devices
    max_bytes = max(losses.CHUNK_LOGITS_BYTES, head_bytes)
    return losses.count_chunks(length, logits_bytes, max_bytes)
