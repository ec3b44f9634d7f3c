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
from jaxlaunch.trainer.parallel.sharding import gathered
from jaxlaunch.trainer.task import Loss

Summed = TypeVar("Summed")  # arrays that add up over positions
MANY = 100  # classes from which on the share of labels among the first five is told
LOGITS_BYTES = 2**28  # of a device's logits at a time, where the job sets no number of chunks


class Options(NamedTuple):
    """Terms that training adds to the loss."""

    z: float = 0.0  # times the squared log of the softmax's denominator: keeps logits near 0. Chowdhery et al. 2022
    smoothing: float = 0.0  # of the label's weight, spread over all classes. Szegedy et al. 2016
    focal: float = 0.0  # power of the share that the model does not give the label. Lin et al. 2017
    class_weights: tuple[float, ...] | None = None  # in the mean, as PyTorch weighs; of sigmoids, the positive terms


PLAIN = Options()


class Sums(NamedTuple):
    """Weighted sums over all positions: float32 scalars."""

    total: Array  # what is minimized: the nats and what the options add
    nats: Array
    correct: Array
    weight: Array


def cross_entropy(logits: Array, labels: Array, weight: Array, options: Options = PLAIN) -> Sums:
    """Cross-entropy and hits of `logits` [..., V] against `labels` [...] (integers), each position times `weight`.

    Positions of weight 0 add exactly 0, to the gradient too, whatever they hold. Any other position's label outside the
    vocabulary makes the sum NaN, so that it is found at the first step. Raises SpecError for shapes that do not fit:
    labels [B, 1] would broadcast to all pairs of examples.
    """
    each, counts = _each(logits, labels, weight), weight != 0.0
    if options.class_weights is None:
        total, weighed = each.nats, weight
        if options.smoothing:
            total = total + options.smoothing * (each.chosen - each.logits.mean(-1))
    else:
        by_class_V = jnp.asarray(options.class_weights, jnp.float32)
        of_label = jnp.take(by_class_V, labels, mode="clip")
        total, weighed = of_label * each.nats, weight * of_label
        if options.smoothing:
            spread = jnp.matmul(each.log_sum[..., None] - each.logits, by_class_V) / by_class_V.shape[0]
            total = (1.0 - options.smoothing) * total + options.smoothing * spread
    if options.focal:
        total = total * _unsure(each.nats, options.focal)
    if options.z:
        total = total + options.z * jnp.square(each.log_sum + each.largest)
    return Sums(
        total=jnp.where(counts, total * weight, 0.0).sum(),
        nats=jnp.where(counts, each.nats * weight, 0.0).sum(),
        correct=jnp.where(each.is_first, weight, 0.0).sum(),
        weight=weighed.sum(),
    )


def in_top(logits_BV: Array, label_B: Array, weight_B: Array, count: int) -> Array:
    """The weight of the rows whose label is among the `count` largest logits; of equal ones the first are larger."""
    places_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
    chosen_B1 = jnp.where(places_BV == label_B[:, None], logits_BV, 0.0).sum(-1, keepdims=True)
    before_BV = (logits_BV > chosen_B1) | ((logits_BV == chosen_B1) & (places_BV < label_B[:, None]))
    return jnp.where(before_BV.sum(-1) < count, weight_B, 0.0).sum()


class Labels(NamedTuple):
    """Weighted sums over rows of yes and no for each class: float32 scalars."""

    total: Array  # what is minimized: a row's mean over its classes
    right: Array  # the same of the share of classes that are said right
    both: Array  # twice the classes that are rightly said to be there,
    either: Array  # and those that are there and those said to be there: their quotient is F1
    weight: Array


def sigmoids(logits_BV: Array, label_BV: Array, weight_B: Array, options: Options = PLAIN) -> Labels:
    """Binary cross-entropy of each class; a class is said to be there where its logit is above 0.

    Rows of weight 0 add exactly 0. Raises SpecError for labels of another shape than the logits.
    """
    if label_BV.shape != logits_BV.shape:
        raise SpecError(
            f"the model makes logits of shape {list(logits_BV.shape)}, and the labels are {list(label_BV.shape)}: "
            "target: multi_label takes 0 or 1 for each of model.classes"
        )
    counts_B = weight_B != 0.0
    logits_BV = jnp.where(counts_B[:, None], logits_BV.astype(jnp.float32), 0.0)
    is_there_BV, said_BV = label_BV.astype(jnp.float32), (logits_BV > 0.0).astype(jnp.float32)
    wanted_BV = is_there_BV * (1.0 - options.smoothing) + 0.5 * options.smoothing
    positive = 1.0 if options.class_weights is None else jnp.asarray(options.class_weights, jnp.float32)[None, :]
    yes_BV, no_BV = jax.nn.softplus(-logits_BV), jax.nn.softplus(logits_BV)
    nats_BV = positive * wanted_BV * yes_BV + (1.0 - wanted_BV) * no_BV
    if options.focal:
        nats_BV = nats_BV * _unsure(jnp.where(is_there_BV > 0.5, yes_BV, no_BV), options.focal)
    is_right_BV = (said_BV == is_there_BV).astype(jnp.float32)
    both_B, either_B = 2.0 * (said_BV * is_there_BV).sum(-1), said_BV.sum(-1) + is_there_BV.sum(-1)
    is_right_B = jnp.where(counts_B, is_right_BV.mean(-1), 0.0)
    nats_B = jnp.where(counts_B, nats_BV.mean(-1), 0.0)
    return Labels(nats_B @ weight_B, is_right_B @ weight_B, both_B @ weight_B, either_B @ weight_B, weight_B.sum())


def squares(found_BK: Array, number_BK: Array, weight_B: Array) -> tuple[Array, Array]:
    """The sums of the mean squared and of the mean absolute error of each row's numbers, times its weight.

    Rows of weight 0 add exactly 0. Raises SpecError where the shapes differ.
    """
    number_BK = number_BK[:, None] if number_BK.ndim == 1 else number_BK
    if found_BK.shape != number_BK.shape:
        raise SpecError(
            f"the model makes numbers of shape {list(found_BK.shape)}, and the labels are {list(number_BK.shape)}: set "
            "model.classes to how many numbers a label is"
        )
    error_BK = found_BK.astype(jnp.float32) - number_BK.astype(jnp.float32)
    error_BK = jnp.where(weight_B[:, None] != 0.0, error_BK, 0.0)
    return jnp.square(error_BK).mean(-1) @ weight_B, jnp.abs(error_BK).mean(-1) @ weight_B


def of_target(logits_BV: Array, label: Array, weight_B: Array, block: specs.Loss) -> Loss:
    """The loss and metrics of labels that are what the loss block says, with its terms but for blending."""
    weights = None if block.class_weights is None else tuple(block.class_weights)
    options = Options(block.z, block.smoothing, block.focal, weights)
    count = weight_B.sum()
    if block.target == "regression":
        squared, absolute = squares(logits_BV, label, weight_B)
        return Loss(squared, count, {"mae": (absolute, count)})
    if block.target == "multi_label":
        said = sigmoids(logits_BV, label, weight_B, options)
        return Loss(said.total, count, {"accuracy": (said.right, count), "f1": (said.both, said.either)})
    sums = cross_entropy(logits_BV, label, weight_B, options)
    top = {"top5": (in_top(logits_BV, label, weight_B, 5), count)} if logits_BV.shape[-1] >= MANY else {}
    return Loss(sums.total, sums.weight, {"accuracy": (sums.correct, count), **top})


def _unsure(nats: Array, focal: float) -> Array:
    """The share that is not given to the label, to the power of `focal`."""
    return jnp.power(-jnp.expm1(-jnp.maximum(nats, 1e-7)), focal)  # the power has no derivative at 0


def log_probabilities(logits: Array, labels: Array, weight: Array) -> Array:
    """Log-probability of each row's `labels`, the sum over its positions, each times `weight`: [B] of [B, L, V].

    As `cross_entropy` where a position has weight 0, a label is outside the vocabulary or a shape does not fit.
    """
    return -jnp.where(weight != 0.0, _each(logits, labels, weight).nats * weight, 0.0).sum(-1)


class _Each(NamedTuple):
    """The softmax at each position, [...], of logits whose largest is taken off."""

    logits: Array  # [..., V]
    largest: Array
    chosen: Array  # the label's logit
    log_sum: Array
    nats: Array  # of the label
    is_first: Array  # the label is what argmax gives, the first of the largest


def _each(logits: Array, labels: Array, weight: Array) -> _Each:
    for name, array in (("labels", labels), ("weights", weight)):
        if array.shape != logits.shape[:-1]:
            raise SpecError(
                f"logits of shape {list(logits.shape)} go with {name} of shape {list(logits.shape[:-1])}, not "
                f"{list(array.shape)}: the loss compares the last axis of each of the model's logits with one label"
            )
    counts, labels = weight != 0.0, labels.astype(jnp.int32)
    logits = jnp.where(counts[..., None], logits.astype(jnp.float32), 0.0)
    largest = jax.lax.stop_gradient(logits.max(-1))
    logits -= largest[..., None]  # first of all: a loss near 0 keeps its digits
    # A sum over a mask, not a gather: a gather along a vocabulary split over mp would fetch all the logits.
    places = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    chosen = jnp.where(places == labels[..., None], logits, 0.0).sum(-1)
    # Not by argmax, which carries an index along; and a sum like the two others, so that XLA computes all three in one
    # pass over the logits, where `any` reads them once more.
    is_beaten = ((logits == 0.0) & (places < labels[..., None])).astype(jnp.float32).sum(-1) > 0.0
    legal = (labels >= 0) & (labels < logits.shape[-1])
    log_sum = jnp.log(jnp.exp(logits).sum(-1))
    return _Each(
        logits,
        largest,
        chosen,
        log_sum,
        jnp.where(legal, log_sum - chosen, jnp.nan),
        (chosen == 0.0) & ~is_beaten & legal,
    )


def in_chunks(
    project: Callable[[Array, Array], Array],
    head_DV: Array,
    x_BLD: Array,
    labels_BL: Array,
    weight_BL: Array,
    count: int,
    score: Callable[[Array, Array, Array], Summed],
    at_once: bool = False,
) -> Summed:
    """`score` of the logits `project(x, head)`, labels and weights, a sum over positions such as `cross_entropy`, in
    `count` parts along L: the logits of one are in memory at a time.

    The backward pass computes each part's logits again, or, `at_once`, the forward pass takes the gradients too: of a
    score that is `Sums`, of which the total alone is differentiated. The head's gradient is summed over the parts in
    float32, each device's share of it alone.
    """
    parts = tuple(_split(array, count) for array in (x_BLD, labels_BL, weight_BL))

    def of(wide_DV: Array, part: tuple[Array, Array, Array]) -> Summed:
        x, labels, weight = part
        narrow_DV = gathered(wide_DV.astype(head_DV.dtype), "embed", "vocab")
        return score(project(x, narrow_DV), labels, weight)

    summed: Any = _summed_at_once if at_once else _summed
    sums: Summed = summed(of, head_DV.astype(jnp.float32), parts)
    return sums


def _summed(of: Callable[..., Summed], wide_DV: Array, parts: tuple[Array, ...]) -> Summed:
    def add(sums: Summed, part: tuple[Array, ...]) -> tuple[Summed, None]:
        return jax.tree.map(jnp.add, sums, of(wide_DV, part)), None

    sums: Summed = jax.lax.scan(jax.checkpoint(add, prevent_cse=False), _zeros(of, wide_DV, parts), parts)[0]
    return sums


def _zeros(of: Callable[..., Summed], wide_DV: Array, parts: tuple[Array, ...]) -> Summed:
    like = jax.eval_shape(of, wide_DV, tuple(jax.ShapeDtypeStruct(part.shape[1:], part.dtype) for part in parts))
    zeros: Summed = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    return zeros


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed_at_once(of: Callable[..., Sums], wide_DV: Array, parts: tuple[Array, ...]) -> Sums:
    """As _summed, but the forward pass takes the gradients of the total as well, so no logits are computed twice."""
    return _summed(of, wide_DV, parts)


def _forward(of: Callable[..., Sums], wide_DV: Array, parts: tuple[Array, ...]) -> tuple[Sums, tuple[Array, Array]]:
    def total(wide_DV: Array, x: Array, rest: tuple[Array, ...]) -> tuple[Array, Sums]:
        """What is differentiated, and all sums."""
        sums = of(wide_DV, (x, *rest))
        return sums.total, sums

    def add(carry: tuple[Sums, Array], part: tuple[Array, ...]) -> tuple[tuple[Sums, Array], Array]:
        """The sums and the head's gradient with those of one chunk, whose other gradient stands by itself."""
        (of_head, of_x), sums = jax.grad(total, (0, 1), has_aux=True)(wide_DV, part[0], part[1:])
        return jax.tree.map(jnp.add, carry, (sums, of_head)), of_x

    (sums, of_head), of_x = jax.lax.scan(add, (_zeros(of, wide_DV, parts), jnp.zeros_like(wide_DV)), parts)
    return sums, (of_head, of_x)


def _backward(of: Callable[..., Sums], kept: tuple[Array, Array], gradient: Sums) -> tuple[Any, ...]:
    of_head, of_x = kept
    of_x = (gradient.total * of_x.astype(jnp.float32)).astype(of_x.dtype)
    return gradient.total * of_head, (of_x, None, None)


_summed_at_once.defvjp(_forward, _backward)


def chunks(length: int, logits_bytes: float, most: float = LOGITS_BYTES) -> int:
    """The fewest equal parts of `length` that keep a device's logits within `most` bytes."""
    return next(n for n in range(1, length + 1) if length % n == 0 and (logits_bytes / n <= most or n == length))


def _split(array: Array, count: int) -> Array:
    """[B, L, ...] -> [count, B, L / count, ...]: no row leaves its device."""
    batch, length, *rest = array.shape
    return array.reshape(batch, count, length // count, *rest).swapaxes(0, 1)
