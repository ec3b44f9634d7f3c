from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.spec import Loss as Terms
from jaxlaunch.trainer.tasks import losses
from jaxlaunch.trainer.tasks.losses import cross_entropy, sum_in_chunks
from tests.trainer.tiny import Counting, build

LOGITS = np.random.default_rng(0).normal(size=(4, 3, 7)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 7, (4, 3))
WEIGHT = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0], [0.5, 2, 1]], np.float32)


def test_cross_entropy_matches_definition() -> None:
    result = cross_entropy(jnp.array(LOGITS), jnp.array(LABELS), jnp.array(WEIGHT))
    wide = LOGITS.astype(np.float64)
    nats = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, LABELS[..., None], -1)[..., 0]
    np.testing.assert_allclose(result.nats, (nats * WEIGHT).sum(), rtol=1e-6)
    np.testing.assert_allclose(result.correct, ((LOGITS.argmax(-1) == LABELS) * WEIGHT).sum())
    assert result.weight == WEIGHT.sum()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    result = cross_entropy(jnp.array(LOGITS, jnp.bfloat16), jnp.array(LABELS), jnp.array(WEIGHT))
    assert {leaf.dtype for leaf in result} == {np.dtype("float32")}


def test_zero_weight_adds_nothing() -> None:
    spoilt = jnp.array(LOGITS).at[2].set(jnp.nan)
    labels = jnp.array(LABELS).at[2].set(-100)
    sums = cross_entropy(spoilt, labels, jnp.array(WEIGHT))
    assert sums == cross_entropy(jnp.array(LOGITS), jnp.array(LABELS), jnp.array(WEIGHT))
    gradient = jax.grad(lambda logits: cross_entropy(logits, labels, jnp.array(WEIGHT)).nats)(
        spoilt
    )
    assert not gradient[2].any() and jnp.isfinite(gradient).all()


def test_label_outside_vocabulary_is_not_finite() -> None:
    for label in (-1, 7):
        labels = jnp.array(LABELS).at[0, 0].set(label)
        assert jnp.isnan(cross_entropy(jnp.array(LOGITS), labels, jnp.array(WEIGHT)).nats)


@pytest.mark.parametrize(
    ("labels", "weight", "words"),
    [
        ((4, 1), (4,), "labels"),
        ((4,), (4, 1), "weights"),
        ((1,), (4,), "labels"),
        ((4, 7), (4,), "labels"),
    ],
)
def test_broadcasting_shapes_are_refused(labels: Any, weight: Any, words: str) -> None:
    match = rf"logits of shape \[4, 7\] go with {words} of shape \[4\], not \["
    with jax.numpy_rank_promotion("allow"), pytest.raises(SpecError, match=match):
        cross_entropy(jnp.zeros((4, 7)), jnp.zeros(labels, jnp.int32), jnp.ones(weight))


def test_byte_labels_do_not_wrap() -> None:
    logits = jnp.zeros((1, 300)).at[0, 255].set(9.0)
    sums = cross_entropy(logits, jnp.array([255], jnp.uint8), jnp.ones(1))
    assert sums.correct == 1 and sums.nats < 1


def test_small_loss_keeps_digits() -> None:
    result = cross_entropy(jnp.array([[1e3, 1e3 - 12.0]]), jnp.array([0]), jnp.ones(1))
    np.testing.assert_allclose(result.nats, np.log1p(np.exp(-12.0)), rtol=2e-2)


def test_smoothing_spreads_label_over_classes() -> None:
    arrays = jnp.array(LOGITS), jnp.array(LABELS), jnp.array(WEIGHT)
    result = cross_entropy(*arrays, Terms(smoothing=0.1))
    wide = LOGITS.astype(np.float64)
    log_p = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    target = np.full(LOGITS.shape, 0.1 / 7) + 0.9 * np.eye(7)[LABELS]
    np.testing.assert_allclose(result.total, (-(target * log_p).sum(-1) * WEIGHT).sum(), rtol=1e-6)
    assert result.nats == cross_entropy(*arrays).nats


def test_z_loss_matches_definition() -> None:
    arrays = jnp.array(LOGITS + 3.0), jnp.array(LABELS), jnp.array(WEIGHT)
    plain, pulled = (cross_entropy(*arrays, Terms(z=z)).total for z in (0.0, 1e-2))
    log_z = np.log(np.exp(LOGITS.astype(np.float64) + 3.0).sum(-1))
    np.testing.assert_allclose(pulled - plain, (1e-2 * log_z**2 * WEIGHT).sum(), rtol=1e-4)


B, L, D, V = 2, 48, 16, 64


def project(x_BLD: jax.Array, head_DV: jax.Array) -> jax.Array:
    return jnp.matmul(x_BLD, head_DV, preferred_element_type=jnp.float32)


def inputs(dtype: str) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(2)
    x, head = random.normal(size=(B, L, D)), random.normal(size=(D, V))
    labels, weight = random.integers(0, V, (B, L)), random.integers(0, 3, (B, L))
    arrays = jnp.array(x, dtype), jnp.array(head, dtype)
    return *arrays, jnp.array(labels), jnp.array(weight, jnp.float32)


@pytest.mark.parametrize("count", [2, 6, 48])
@pytest.mark.parametrize("options", [Terms(), Terms(z=1e-3, smoothing=0.1)], ids=str)
@pytest.mark.parametrize("at_once", [False, True])
def test_chunked_loss_and_gradients_are_equal(count: int, options: Terms, at_once: bool) -> None:
    x, head, labels, weight = inputs("float32")

    def whole(x: jax.Array, head: jax.Array) -> jax.Array:
        return cross_entropy(project(x, head), labels, weight, options).total / weight.sum()

    def parts(x: jax.Array, head: jax.Array) -> jax.Array:
        score = partial(cross_entropy, terms=options)
        sums = sum_in_chunks(project, head, x, labels, weight, count, score, at_once)
        return sums.total / weight.sum()

    gradients = [jax.jit(jax.value_and_grad(f, (0, 1)))(x, head) for f in (whole, parts)]
    (first, of_one), (other, of_other) = gradients
    np.testing.assert_allclose(other, first, rtol=1e-6)
    for a, b in zip(of_other, of_one, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * float(jnp.abs(b).max()))


@pytest.mark.parametrize("at_once", [False, True])
def test_head_gradient_is_summed_in_float32(at_once: bool) -> None:
    x, head, labels, weight = inputs("bfloat16")

    def loss(head: jax.Array, count: int) -> jax.Array:
        return sum_in_chunks(project, head, x, labels, weight, count, cross_entropy, at_once).total

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    first, many = (gradient(head, count).astype(jnp.float32) for count in (1, 48))
    np.testing.assert_allclose(many, first, atol=0.01 * float(jnp.abs(first).max()))


# Its logits outweigh the rest.
WIDE = spec.Decoder(layers=1, width=8, heads=2, hidden=32, vocab=128 * 1024, length=32)
SGD = {"name": "sgd", "lr": 1.0, "momentum": 0.9, "clip": None, "schedule": {"name": "constant"}}


def run_step(chunks: int) -> tuple[float, float, dict[str, jax.Array]]:
    """Return temp bytes, loss and momentum (the gradients) of a step over a large vocabulary."""
    step = build(Counting(), 1, model=WIDE, batch=B, optimizer=SGD, loss={"chunks": chunks})
    tokens = np.random.default_rng(3).integers(0, WIDE.vocab, (B, WIDE.length + 1), np.int32)
    rows = {"tokens": tokens, "mask": np.ones((B, WIDE.length), np.float32)}
    rows |= {"weight": np.ones(B, np.float32)}
    step.compile_train(step.put_batch(rows))
    state, metrics = step.train(step.init_state(), step.put_batch(rows))
    opt = step.builder.to_tree(state)["opt"]
    momentum = {name: leaf for name, leaf in opt.items() if ".trace." in name}
    temp_bytes = step.compiled_steps["train"].memory_analysis().temp_size_in_bytes
    return temp_bytes, float(metrics["loss"]), momentum


def test_chunked_step_is_equal_with_less_memory() -> None:
    (most, loss, gradients), (temp, other, of_other) = run_step(1), run_step(16)
    assert most > 2 * 4 * B * WIDE.length * WIDE.vocab, "the logits are there, and their gradient"
    assert temp <= most / 4, (temp, most)  # 0.15 of it where this was written
    np.testing.assert_allclose(other, loss, rtol=1e-6)
    assert gradients.keys() == of_other.keys() and len(gradients) == 12
    for name, gradient in gradients.items():
        limit = 1e-6 * float(jnp.abs(gradient).max())
        np.testing.assert_allclose(of_other[name], gradient, rtol=0, atol=limit, err_msg=name)


@pytest.mark.parametrize(
    ("length", "size", "count"), [(8, 1.0, 1), (8, 2.0**30, 4), (6, 2.0**30, 6), (7, 2.0**30, 7)]
)
def test_fewest_fitting_chunks_are_chosen(length: int, size: float, count: int) -> None:
    assert losses.count_chunks(length, size) == count
