"""Losses as sums and weights, in float32 whatever the logits are.

B batch, L length, V vocabulary or classes.
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

Summed = TypeVar("Summed")  # arrays that add up over positions
# With this many classes or more, top-5 accuracy is reported.
TOP5_MIN_CLASSES = 100
# Bytes of a device's logits at a time, if the job sets no number of chunks.
CHUNK_LOGITS_BYTES = 2**28


# Terms that training adds to the loss:
# z, times the squared log of the softmax's denominator: keeps logits near 0. Chowdhery et al. 2022
# smoothing of the label's weight, spread over all classes. Szegedy et al. 2016
# focal, power of the share that the model does not give the label. Lin et al. 2017
# class_weights in the mean, as PyTorch weighs; of sigmoids, the positive terms
PLAIN_TERMS = specs.Loss()


class Sums(NamedTuple):
    """Weighted sums over all positions, float32 scalars; `total` is what is minimized."""

    total: Array
    nats: Array
    correct: Array
    weight: Array


def cross_entropy(
    logits: Array, labels: Array, weight: Array, terms: specs.Loss = PLAIN_TERMS
) -> Sums:
    """Return the cross-entropy and hits of `logits` [..., V] against integers `labels` [...].

    Positions of weight 0 add exactly 0, to the gradient too, whatever they hold. Any other
    position's label outside the vocabulary makes the sum NaN, so that it is found at the first
    step. Raises SpecError for shapes that do not fit: labels [B, 1] would broadcast to all pairs of
    examples.
    """
    softmax, is_counted = _compute_softmax(logits, labels, weight), weight != 0.0
    if terms.class_weights is None:
        total, weighted = softmax.nats, weight
        if terms.smoothing:
            total = total + terms.smoothing * (softmax.chosen - softmax.logits.mean(-1))
    else:
        class_weight_V = jnp.asarray(terms.class_weights, jnp.float32)
        label_weight = jnp.take(class_weight_V, labels, mode="clip")
        total, weighted = label_weight * softmax.nats, weight * label_weight
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
        correct=jnp.where(softmax.is_first, weight, 0.0).sum(),
        weight=weighted.sum(),
    )


def count_classes_above(logits_BV: Array, label_B: Array) -> Array:
    """Count the classes with a larger logit than the label, or an equal one and a lower number.

    Of a row with a NaN these are all classes, because nothing is known about the label: it is never
    among the first.
    """
    class_BV, label_B1 = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1), label_B[:, None]
    chosen_B1 = jnp.where(class_BV == label_B1, logits_BV, 0.0).sum(-1, keepdims=True)
    is_tie_before_BV = (logits_BV == chosen_B1) & (class_BV < label_B1)
    above_B = ((logits_BV > chosen_B1) | is_tie_before_BV).sum(-1)
    return jnp.where(jnp.isnan(logits_BV).any(-1), logits_BV.shape[-1], above_B)


def multi_label_loss(
    logits_BV: Array, label_BV: Array, weight_B: Array, terms: specs.Loss = PLAIN_TERMS
) -> Loss:
    """Return the binary cross-entropy, a row's mean over its classes, with `accuracy` and `f1`.

    A class is predicted where its logit is above 0; where it is NaN, the prediction is wrong. Rows
    of weight 0 add exactly 0.
    Raises SpecError for labels of another shape than the logits.
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
    is_right_BV = (predicted_BV == is_label_BV).astype(jnp.float32)
    # F1 is twice the correctly predicted classes over the sum of the true and the predicted ones.
    overlap_B = 2.0 * (predicted_BV * is_label_BV).sum(-1)
    sizes_B = predicted_BV.sum(-1) + is_label_BV.sum(-1)
    is_right_B = jnp.where(is_counted_B, is_right_BV.mean(-1), 0.0)
    total, count = jnp.where(is_counted_B, nats_BV.mean(-1), 0.0) @ weight_B, weight_B.sum()
    f1 = (overlap_B @ weight_B, sizes_B @ weight_B)
    return Loss(total, count, {"accuracy": (is_right_B @ weight_B, count), "f1": f1})


def squared_error(output_BK: Array, number_BK: Array, weight_B: Array) -> tuple[Array, Array]:
    """Return the weighted sums of each row's mean squared and absolute error."""
    number_BK = number_BK[:, None] if number_BK.ndim == 1 else number_BK
    if output_BK.shape != number_BK.shape:
        raise SpecError(
            f"the model makes numbers of shape {list(output_BK.shape)}, and the labels are "
            f"{list(number_BK.shape)}: set model.classes to how many numbers a label is"
        )
    error_BK = output_BK.astype(jnp.float32) - number_BK.astype(jnp.float32)
    error_BK = jnp.where(weight_B[:, None] != 0.0, error_BK, 0.0)
    return jnp.square(error_BK).mean(-1) @ weight_B, jnp.abs(error_BK).mean(-1) @ weight_B


def target_loss(logits_BV: Array, label: Array, weight_B: Array, block: specs.Loss) -> Loss:
    """Return the loss and metrics for labels of the block's target, with its terms."""
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
    """Return the probability not given to the label, to the power of `focal`."""
    # The power has no derivative at 0.
    return jnp.power(-jnp.expm1(-jnp.maximum(nats, 1e-7)), focal)


def log_probabilities(logits: Array, labels: Array, weight: Array) -> Array:
    """Return the log-probability of each row's `labels`, summed over positions times `weight`.

    As `cross_entropy` where a position has weight 0, a label is outside the vocabulary or a shape
    does not fit.
    """
    nats = _compute_softmax(logits, labels, weight).nats
    return -jnp.where(weight != 0.0, nats * weight, 0.0).sum(-1)


class _Softmax(NamedTuple):
    """The softmax at each position, [...], of logits less their largest."""

    logits: Array  # [..., V]
    largest: Array
    chosen: Array  # the label's logit
    log_sum: Array
    nats: Array  # of the label
    is_first: Array  # the label is what argmax gives, the first of the largest


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
    # The subtraction comes first, so that a loss near 0 keeps its digits.
    logits -= largest[..., None]
    # This is a sum over a mask, because a gather along a vocabulary split over mp would fetch all
    # logits.
    places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    chosen = jnp.where(places == labels[..., None], logits, 0.0).sum(-1)
    # argmax would carry an index along. A sum like the two others lets XLA compute all three in one
    # pass over the logits, while `any` would read them again.
    is_beaten = ((logits == 0.0) & (places < labels[..., None])).astype(jnp.float32).sum(-1) > 0.0
    is_valid = (labels >= 0) & (labels < logits.shape[-1])
    log_sum = jnp.log(jnp.exp(logits).sum(-1))
    nats = jnp.where(is_valid, log_sum - chosen, jnp.nan)
    return _Softmax(logits, largest, chosen, log_sum, nats, (chosen == 0.0) & ~is_beaten & is_valid)


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
    """Return `score` of the logits `project(x, head)`, labels and weights, in `count` parts of L.

    The logits of one part are in memory at a time. The backward pass computes each part's logits
    again, or, `at_once`, the forward pass takes the gradients too: of a score that is `Sums`, of
    which only the total is differentiated. The head's gradient is summed over the parts in float32,
    on each device for its share.
    """

    def split_chunks(array: Array) -> Array:
        # [B, L, ...] -> [count, B, L / count, ...]: no row leaves its device.
        batch, length, *inner_shape = array.shape
        return array.reshape(batch, count, length // count, *inner_shape).swapaxes(0, 1)

    def part_sums(wide_DV: Array, part: tuple[Array, Array, Array]) -> Summed:
        x, labels, weight = part
        narrow_DV = gather_weight(wide_DV.astype(head_DV.dtype), "embed", "vocab")
        return score(project(x, narrow_DV), labels, weight)

    parts = tuple(map(split_chunks, (x_BLD, labels_BL, weight_BL)))
    sum_parts: Any = _sum_parts_at_once if at_once else _sum_parts
    result: Summed = sum_parts(part_sums, head_DV.astype(jnp.float32), parts)
    return result


def _sum_parts(
    part_sums: Callable[..., Summed], wide_DV: Array, parts: tuple[Array, ...]
) -> Summed:
    def add_part(sums: Summed, part: tuple[Array, ...]) -> tuple[Summed, None]:
        return jax.tree.map(jnp.add, sums, part_sums(wide_DV, part)), None

    checkpointed_add = jax.checkpoint(add_part, prevent_cse=False)
    return jax.lax.scan(checkpointed_add, _zero_sums(part_sums, wide_DV, parts), parts)[0]


def _zero_sums(
    part_sums: Callable[..., Summed], wide_DV: Array, parts: tuple[Array, ...]
) -> Summed:
    part = tuple(jax.ShapeDtypeStruct(array.shape[1:], array.dtype) for array in parts)
    abstract = jax.eval_shape(part_sums, wide_DV, part)
    result: Summed = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract)
    return result


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_parts_at_once(
    part_sums: Callable[..., Sums], wide_DV: Array, parts: tuple[Array, ...]
) -> Sums:
    """Sum like _sum_parts, but compute the gradients in the forward pass, with the logits."""
    return _sum_parts(part_sums, wide_DV, parts)


def _sum_parts_forward(
    part_sums: Callable[..., Sums], wide_DV: Array, parts: tuple[Array, ...]
) -> tuple[Sums, tuple[Array, Array]]:
    def part_total(wide_DV: Array, x: Array, rest: tuple[Array, ...]) -> tuple[Array, Sums]:
        sums = part_sums(wide_DV, (x, *rest))
        return sums.total, sums

    def add_part(carry: tuple[Sums, Array], part: tuple[Array, ...]) -> Any:
        gradient = jax.grad(part_total, (0, 1), has_aux=True)
        (head_gradient, x_gradient), sums = gradient(wide_DV, part[0], part[1:])
        return jax.tree.map(jnp.add, carry, (sums, head_gradient)), x_gradient

    zeros = _zero_sums(part_sums, wide_DV, parts), jnp.zeros_like(wide_DV)
    (sums, head_gradient), x_gradients = jax.lax.scan(add_part, zeros, parts)
    return sums, (head_gradient, x_gradients)


def _sum_parts_backward(
    part_sums: Callable[..., Sums], gradients: tuple[Array, Array], cotangent: Sums
) -> tuple[Any, ...]:
    head_gradient, x_gradients = gradients
    scaled = (cotangent.total * x_gradients.astype(jnp.float32)).astype(x_gradients.dtype)
    return cotangent.total * head_gradient, (scaled, None, None)


_sum_parts_at_once.defvjp(_sum_parts_forward, _sum_parts_backward)


def count_chunks(length: int, logits_bytes: float, max_bytes: float = CHUNK_LOGITS_BYTES) -> int:
    """Return the fewest equal parts of `length` that keep a device's logits within `max_bytes`."""
    sizes = (count for count in range(1, length) if length % count == 0)
    return next((count for count in sizes if logits_bytes / count <= max_bytes), length)
