"""Losses as sums and weights, computed in float32 for logits of any dtype.

The logits of a language model with a large vocabulary are the largest array of a step, so
`sum_in_chunks` can compute them and the loss for a part of the positions at a time.

B batch, L length, D model, V vocabulary or classes, K numbers of a label.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.parallel.sharding import gather_weight
from jaxlaunch.trainer.task import Loss

# Arrays that are sums over positions.
Summed = TypeVar("Summed")
# With this many classes or more, top-5 accuracy is reported.
TOP5_MIN_CLASSES = 100
# Bytes of the logits in a chunk on a device, if the job does not set the number of chunks.
CHUNK_LOGITS_BYTES = 2**28
# No terms in addition to the loss. The options of specs.Loss add these:
# - z times the squared log of the softmax's denominator keeps logits near 0 (Chowdhery et al.
#   2022).
# - smoothing spreads this share of the label's weight over all classes (Szegedy et al. 2016).
# - focal multiplies the loss by a power of 1 - p, with p the probability of the label (Lin et al.
#   2017).
# - class_weights are those of a weighted mean, as in PyTorch. For sigmoids they weigh the positive
#   terms.
PLAIN_TERMS = specs.Loss()


class Sums(NamedTuple):
    """Weighted sums over all positions, float32 scalars.

    Attributes:
        total: Sum of the loss with its terms, which is minimized.
        nats: Sum of the plain cross-entropy.
        correct: Sum of the weights of positions whose label has the largest logit.
        weight: Divisor of the mean of `total`.
    """

    total: Array
    nats: Array
    correct: Array
    weight: Array


def cross_entropy(
    logits: Array, labels: Array, weight: Array, terms: specs.Loss = PLAIN_TERMS
) -> Sums:
    """Return the cross-entropy and the hits of `logits` [..., V] for integer `labels` [...].

    Positions of weight 0 add exactly 0 to the sums and to the gradient, for any logits and label.
    At other positions a label outside of the vocabulary makes the sum NaN, so that the error is
    noticed at the first step. Raises SpecError if the shapes differ: labels [B, 1] would broadcast
    to all pairs of examples.
    """
    softmax, is_counted = _compute_softmax(logits, labels, weight), weight != 0.0
    if terms.class_weights is None:
        total, mean_weight = softmax.nats, weight
        if terms.smoothing:
            total = total + terms.smoothing * (softmax.label_logit - softmax.logits.mean(-1))
    else:
        class_weight_V = jnp.asarray(terms.class_weights, jnp.float32)
        label_weight = jnp.take(class_weight_V, labels, mode="clip")
        total, mean_weight = label_weight * softmax.nats, weight * label_weight
        if terms.smoothing:
            spread = jnp.matmul(softmax.log_sum[..., None] - softmax.logits, class_weight_V)
            spread = spread / class_weight_V.shape[0]
            total = (1.0 - terms.smoothing) * total + terms.smoothing * spread
    if terms.focal:
        total = total * _focal_factor(softmax.nats, terms.focal)
    if terms.z:
        total = total + terms.z * jnp.square(softmax.log_sum + softmax.largest)
    return Sums(
        total=jnp.where(is_counted, total * weight, 0.0).sum(),
        nats=jnp.where(is_counted, softmax.nats * weight, 0.0).sum(),
        correct=jnp.where(softmax.is_argmax, weight, 0.0).sum(),
        weight=mean_weight.sum(),
    )


def count_classes_above(logits_BV: Array, label_B: Array) -> Array:
    """Count the classes with a larger logit than the label, or an equal one and a lower index.

    In a row with a NaN all classes count, so that its label is never among the top classes.
    """
    class_BV, label_B1 = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1), label_B[:, None]
    label_logit_B1 = jnp.where(class_BV == label_B1, logits_BV, 0.0).sum(-1, keepdims=True)
    is_earlier_tie_BV = (logits_BV == label_logit_B1) & (class_BV < label_B1)
    above_B = ((logits_BV > label_logit_B1) | is_earlier_tie_BV).sum(-1)
    return jnp.where(jnp.isnan(logits_BV).any(-1), logits_BV.shape[-1], above_B)


def multi_label_loss(
    logits_BV: Array, label_BV: Array, weight_B: Array, terms: specs.Loss = PLAIN_TERMS
) -> Loss:
    """Return the binary cross-entropy, averaged over the classes of a row, and its metrics.

    A class is predicted if its logit is above 0. For a NaN the prediction counts as wrong. Rows of
    weight 0 add exactly 0. Raises SpecError for labels of another shape than the logits.
    """
    if label_BV.shape != logits_BV.shape:
        raise SpecError(
            f"the model makes logits of shape {list(logits_BV.shape)}, and the labels are "
            f"{list(label_BV.shape)}: target: multi_label takes 0 or 1 for each of model.classes"
        )
    is_counted_B = weight_B != 0.0
    logits_BV = jnp.where(is_counted_B[:, None], logits_BV.astype(jnp.float32), 0.0)
    is_label_BV, predicted_BV = label_BV.astype(jnp.float32), (logits_BV > 0.0).astype(jnp.float32)
    predicted_BV = jnp.where(jnp.isnan(logits_BV), 1.0 - is_label_BV, predicted_BV)
    target_BV = is_label_BV * (1.0 - terms.smoothing) + 0.5 * terms.smoothing
    positive_weight = jnp.ones((1, 1), jnp.float32)
    if terms.class_weights is not None:
        positive_weight = jnp.asarray(terms.class_weights, jnp.float32)[None, :]
    true_nats_BV, false_nats_BV = jax.nn.softplus(-logits_BV), jax.nn.softplus(logits_BV)
    nats_BV = positive_weight * target_BV * true_nats_BV + (1.0 - target_BV) * false_nats_BV
    if terms.focal:
        nats_BV = nats_BV * _focal_factor(
            jnp.where(is_label_BV > 0.5, true_nats_BV, false_nats_BV), terms.focal
        )
    is_correct_BV = (predicted_BV == is_label_BV).astype(jnp.float32)
    # F1 is twice the number of correctly predicted classes over that of true and predicted classes.
    overlap_B = 2.0 * (predicted_BV * is_label_BV).sum(-1)
    sizes_B = predicted_BV.sum(-1) + is_label_BV.sum(-1)
    accuracy_B = jnp.where(is_counted_B, is_correct_BV.mean(-1), 0.0)
    total, count = jnp.where(is_counted_B, nats_BV.mean(-1), 0.0) @ weight_B, weight_B.sum()
    f1 = (overlap_B @ weight_B, sizes_B @ weight_B)
    return Loss(total, count, {"accuracy": (accuracy_B @ weight_B, count), "f1": f1})


def squared_error(output_BK: Array, number_BK: Array, weight_B: Array) -> tuple[Array, Array]:
    """Return the weighted sums over rows of their mean squared error and mean absolute error."""
    number_BK = number_BK[:, None] if number_BK.ndim == 1 else number_BK
    if output_BK.shape != number_BK.shape:
        raise SpecError(
            f"the model returns numbers of shape {list(output_BK.shape)}, and the labels have "
            f"shape {list(number_BK.shape)}; set model.classes to the numbers in a label"
        )
    error_BK = output_BK.astype(jnp.float32) - number_BK.astype(jnp.float32)
    error_BK = jnp.where(weight_B[:, None] != 0.0, error_BK, 0.0)
    return jnp.square(error_BK).mean(-1) @ weight_B, jnp.abs(error_BK).mean(-1) @ weight_B


def target_loss(logits_BV: Array, label: Array, weight_B: Array, block: specs.Loss) -> Loss:
    """Return the loss and metrics for the target and the terms of a loss block."""
    count = weight_B.sum()
    if block.target == "regression":
        squared, absolute = squared_error(logits_BV, label, weight_B)
        return Loss(squared, count, {"mae": (absolute, count)})
    if block.target == "multi_label":
        return multi_label_loss(logits_BV, label, weight_B, block)
    sums = cross_entropy(logits_BV, label, weight_B, block)
    metrics = {"accuracy": (sums.correct, count)}
    if logits_BV.shape[-1] >= TOP5_MIN_CLASSES:
        is_top5_B = count_classes_above(logits_BV, label) < 5
        metrics["top5"] = (jnp.where(is_top5_B, weight_B, 0.0).sum(), count)
    return Loss(sums.total, sums.weight, metrics)


def _focal_factor(nats: Array, focal: float) -> Array:
    """Return (1 - p) ** focal for labels of probability p = exp(-nats)."""
    # The clip avoids p = 1, where the derivative of the power may be infinite.
    return jnp.power(-jnp.expm1(-jnp.maximum(nats, 1e-7)), focal)


def log_probabilities(logits: Array, labels: Array, weight: Array) -> Array:
    """Return the log-probability of each row's `labels`, as a weighted sum over positions.

    Positions of weight 0, labels outside of the vocabulary and wrong shapes are handled as in
    `cross_entropy`.
    """
    nats = _compute_softmax(logits, labels, weight).nats
    return -jnp.where(weight != 0.0, nats * weight, 0.0).sum(-1)


class _Softmax(NamedTuple):
    """The chunks of a softmax at each position, [...].

    Attributes:
        logits: Logits [..., V] minus the largest one.
        largest: Largest logit.
        label_logit: Shifted logit of the label.
        log_sum: Log of the sum of the exponentials of the shifted logits.
        nats: Cross-entropy of the label.
        is_argmax: Whether the label is the class of the largest logit, the first of equal ones.
    """

    logits: Array
    largest: Array
    label_logit: Array
    log_sum: Array
    nats: Array
    is_argmax: Array


def _compute_softmax(logits: Array, labels: Array, weight: Array) -> _Softmax:
    for name, array in (("labels", labels), ("weights", weight)):
        if array.shape != logits.shape[:-1]:
            raise SpecError(
                f"logits of shape {list(logits.shape)} go with {name} of shape "
                f"{list(logits.shape[:-1])}, not {list(array.shape)}: the loss compares the last "
                "axis of each of the model's logits with one label"
            )
    is_counted, labels = weight != 0.0, labels.astype(jnp.int32)
    logits = jnp.where(is_counted[..., None], logits.astype(jnp.float32), 0.0)
    largest = jax.lax.stop_gradient(logits.max(-1))
    # Without this subtraction a loss near 0 would be a difference of large numbers.
    logits -= largest[..., None]
    # The label's logit is a masked sum, because a gather along a vocabulary that is split over mp
    # would fetch all logits.
    class_index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    label_logit = jnp.where(class_index == labels[..., None], logits, 0.0).sum(-1)
    # Ties are also counted by a sum, so that XLA computes all three sums in one pass over the
    # logits. `argmax` would carry an index along, and `any` would read the logits again.
    is_earlier_tie = (logits == 0.0) & (class_index < labels[..., None])
    has_earlier_tie = is_earlier_tie.astype(jnp.float32).sum(-1) > 0.0
    is_valid = (labels >= 0) & (labels < logits.shape[-1])
    log_sum = jnp.log(jnp.exp(logits).sum(-1))
    nats = jnp.where(is_valid, log_sum - label_logit, jnp.nan)
    is_argmax = (label_logit == 0.0) & ~has_earlier_tie & is_valid
    return _Softmax(logits, largest, label_logit, log_sum, nats, is_argmax)


def sum_in_chunks(
    project: Callable[[Array, Array], Array],
    head_DV: Array,
    x_BLD: Array,
    labels_BL: Array,
    weight_BL: Array,
    count: int,
    score: Callable[[Array, Array, Array], Summed],
    at_once: bool = False,
) -> Summed:
    """Return the sum of a score over positions, with the logits of one chunk in memory at a time.

    The head's gradient is summed over the chunks in float32, on each device for its part of it.

    Args:
        project: Function from features and head to logits.
        head_DV: The head.
        x_BLD: Features.
        labels_BL: Labels.
        weight_BL: Weights.
        count: Number of chunks, which divides L.
        score: Function from logits, labels and weights to sums over positions.
        at_once: Whether to compute the gradients in the forward pass, instead of computing the
            logits again in the backward pass. `score` must then return `Sums`, and only the total
            can be differentiated.
    """

    def split_chunks(array: Array) -> Array:
        # [B, L, ...] -> [count, B, L / count, ...]: no row leaves its device.
        batch, length, *inner_shape = array.shape
        return array.reshape(batch, count, length // count, *inner_shape).swapaxes(0, 1)

    def score_chunk(head_f32_DV: Array, chunk: tuple[Array, Array, Array]) -> Summed:
        x, labels, weight = chunk
        gathered_DV = gather_weight(head_f32_DV.astype(head_DV.dtype), "embed", "vocab")
        return score(project(x, gathered_DV), labels, weight)

    chunks = tuple(map(split_chunks, (x_BLD, labels_BL, weight_BL)))
    sum_chunks: Any = _sum_chunks_at_once if at_once else _sum_chunks
    result: Summed = sum_chunks(score_chunk, head_DV.astype(jnp.float32), chunks)
    return result


def _sum_chunks(
    score_chunk: Callable[..., Summed], head_f32_DV: Array, chunks: tuple[Array, ...]
) -> Summed:
    def add_chunk(sums: Summed, chunk: tuple[Array, ...]) -> tuple[Summed, None]:
        return jax.tree.map(jnp.add, sums, score_chunk(head_f32_DV, chunk)), None

    checkpointed_add = jax.checkpoint(add_chunk, prevent_cse=False)
    return jax.lax.scan(checkpointed_add, _zero_sums(score_chunk, head_f32_DV, chunks), chunks)[0]


def _zero_sums(
    score_chunk: Callable[..., Summed], head_f32_DV: Array, chunks: tuple[Array, ...]
) -> Summed:
    chunk = tuple(jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in chunks)
    abstract = jax.eval_shape(score_chunk, head_f32_DV, chunk)
    result: Summed = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_chunks_at_once(
    score_chunk: Callable[..., Sums], head_f32_DV: Array, chunks: tuple[Array, ...]
) -> Sums:
    """Compute _sum_chunks, with a forward pass that also computes the gradients."""
    return _sum_chunks(score_chunk, head_f32_DV, chunks)


def _sum_chunks_forward(
    score_chunk: Callable[..., Sums], head_f32_DV: Array, chunks: tuple[Array, ...]
) -> tuple[Sums, tuple[Array, Array]]:
    def chunk_total(head_f32_DV: Array, x: Array, *others: Array) -> tuple[Array, Sums]:
        sums = score_chunk(head_f32_DV, (x, *others))
        return sums.total, sums

    def add_chunk(carry: tuple[Sums, Array], chunk: tuple[Array, ...]) -> Any:
        gradient = jax.grad(chunk_total, (0, 1), has_aux=True)
        (head_gradient, x_gradient), sums = gradient(head_f32_DV, *chunk)
        return jax.tree.map(jnp.add, carry, (sums, head_gradient)), x_gradient

    zeros = _zero_sums(score_chunk, head_f32_DV, chunks), jnp.zeros_like(head_f32_DV)
    (sums, head_gradient), x_gradients = jax.lax.scan(add_chunk, zeros, chunks)
    return sums, (head_gradient, x_gradients)


def _sum_chunks_backward(
    score_chunk: Callable[..., Sums], gradients: tuple[Array, Array], cotangent: Sums
) -> tuple[Any, ...]:
    head_gradient, x_gradients = gradients
    scaled = (cotangent.total * x_gradients.astype(jnp.float32)).astype(x_gradients.dtype)
    return cotangent.total * head_gradient, (scaled, None, None)


_sum_chunks_at_once.defvjp(_sum_chunks_forward, _sum_chunks_backward)


def count_chunks(length: int, logits_bytes: float, max_bytes: float = CHUNK_LOGITS_BYTES) -> int:
    """Return the smallest divisor of `length` for which a chunk of logits has <= `max_bytes`."""
    divisors = (count for count in range(1, length) if length % count == 0)
    return next((count for count in divisors if logits_bytes / count <= max_bytes), length)
