"""Losses of classes, of flags for each class, and of numbers, against formulas in float64."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest

from jaxlaunch.trainer.data.examples import UnusableExampleError
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.spec import CLASSIFY, Loss, TrainSpec
from jaxlaunch.trainer.tasks import classify, losses, ranges
from tests.trainer.tiny import Digits, run

RNG = np.random.default_rng(0)
LOGITS, LABEL = RNG.normal(0, 2, (6, 4)), np.array([0, 3, 1, 1, 2, 3])
WEIGHT = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
BY_CLASS = np.array([1.0, 2.0, 0.5, 3.0])
FLAGS = RNG.integers(0, 2, (6, 4)).astype(np.float32)


def target_sums(label: np.ndarray, logits: np.ndarray = LOGITS, **keys: Any) -> Any:
    rows, weight = (jnp.asarray(array, jnp.float32) for array in (logits, WEIGHT))
    return losses.target_loss(rows, jnp.asarray(label), weight, Loss(**keys))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_match_pytorch(smoothing: float) -> None:
    nats, weights = -log_softmax(LOGITS), BY_CLASS[LABEL] * WEIGHT
    spread = WEIGHT * (nats * BY_CLASS).sum(-1) / 4
    total = (1 - smoothing) * weights * nats[np.arange(6), LABEL] + smoothing * spread
    result = target_sums(LABEL, class_weights=BY_CLASS.tolist(), smoothing=smoothing)
    np.testing.assert_allclose(result.sum / result.weight, total.sum() / weights.sum(), rtol=1e-5)
    hits, count = result.metrics["accuracy"]
    assert (hits, count) == ((LOGITS.argmax(-1) == LABEL) @ WEIGHT, 5.0)


def test_focal_loss_reduces_sure_examples() -> None:
    p = np.exp(log_softmax(LOGITS))[np.arange(6), LABEL]
    result = target_sums(LABEL, focal=2.0)
    np.testing.assert_allclose(result.sum, ((1 - p) ** 2 * -np.log(p)) @ WEIGHT, rtol=1e-5)
    terms = Loss(focal=2.0)
    sure = jax.grad(
        lambda rows: losses.target_loss(rows, jnp.zeros(1, int), jnp.ones(1), terms).sum
    )
    assert np.isfinite(sure(jnp.array([[90.0, 0.0]]))).all()


@pytest.mark.parametrize(
    "keys", [{}, {"class_weights": BY_CLASS.tolist()}, {"focal": 2.0}, {"smoothing": 0.2}], ids=str
)
def test_multi_label_loss_is_binary_cross_entropy(keys: dict[str, Any]) -> None:
    p, smoothing = 1 / (1 + np.exp(-LOGITS)), keys.get("smoothing", 0.0)
    expected = FLAGS * (1 - smoothing) + smoothing / 2
    class_weights = np.array(keys.get("class_weights", [1.0] * 4))
    nats = -class_weights * expected * np.log(p) - (1 - expected) * np.log(1 - p)
    if "focal" in keys:
        nats = nats * np.where(FLAGS > 0, 1 - p, p) ** 2
    result = target_sums(FLAGS, target="multi_label", **keys)
    np.testing.assert_allclose(result.sum / result.weight, nats.mean(-1) @ WEIGHT / 5, rtol=1e-5)
    predicted, flags = (LOGITS > 0)[:5], FLAGS[:5]
    right, count = result.metrics["accuracy"]
    np.testing.assert_allclose(right / count, (predicted == flags).mean(), rtol=1e-6)
    overlap, sizes = result.metrics["f1"]
    f1 = 2 * (predicted * flags).sum() / (predicted.sum() + flags.sum())
    np.testing.assert_allclose(overlap / sizes, f1, rtol=1e-6)


def test_regression_uses_squared_error() -> None:
    expected = RNG.normal(size=(6, 4)).astype(np.float32)
    expected[5] = np.nan
    result = target_sums(expected, target="regression")
    error = (LOGITS - expected)[:5]
    np.testing.assert_allclose(result.sum / result.weight, (error**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(result.metrics["mae"][0] / 5, np.abs(error).mean(), rtol=1e-5)
    words = r"numbers of shape \[6, 4\], and the labels have shape \[6, 1\]; set model.classes"
    with pytest.raises(SpecError, match=words):
        target_sums(expected[:, 0], target="regression")


def test_top5_is_counted() -> None:
    logits, label = RNG.normal(size=(6, 100)), np.arange(6)
    logits[:, 50:] = 0.0  # ties: the first are larger
    orders = np.argsort(-logits, axis=1, kind="stable").tolist()
    ranks = [order.index(at) for order, at in zip(orders, label, strict=True)]
    result = target_sums(label, logits)
    assert result.metrics["top5"][0] == sum(rank < 5 for rank in ranks[:5])
    assert "top5" not in target_sums(LABEL).metrics


def test_nan_logits_never_count_as_a_hit() -> None:
    labels, weight = jnp.zeros(3, jnp.int32), jnp.ones(3)
    logits = np.zeros((3, losses.TOP5_MIN_CLASSES), np.float32)
    logits[0], logits[1, 0], logits[2, 7] = np.nan, np.nan, np.nan
    metrics = losses.target_loss(jnp.array(logits), labels, weight, Loss()).metrics
    assert float(metrics["accuracy"][0]) == float(metrics["top5"][0]) == 0
    flags = np.array([[0.0, 1.0], [0.0, 1.0]])
    flag_logits = jnp.array([[np.nan, np.nan], [-1.0, np.nan]])
    block = Loss(target="multi_label")
    metrics = losses.target_loss(flag_logits, jnp.array(flags), jnp.ones(2), block).metrics
    # Of four decisions one is right; of two positive ones none, and one is positive by mistake.
    assert float(metrics["accuracy"][0]) == 0.5
    assert [float(part) for part in metrics["f1"]] == [0.0, 3.0]


def test_mixup_and_cutmix_blend_reversed_batch() -> None:
    images = jnp.asarray(RNG.normal(size=(4, 8, 10, 3)), jnp.float32)
    mixed, share = classify.mix_up(images, jnp.float32(0.3))
    np.testing.assert_allclose(mixed, 0.3 * images + 0.7 * images[::-1], rtol=1e-5)
    pasted, share = classify.cut_mix(images, jnp.float32(0.75), jnp.array([0.5, 0.95]))
    box = np.zeros((8, 10), bool)
    box[2:6, 7:10] = True  # the middle (4, 9), half sides 2 and 2: cut off at the right
    np.testing.assert_array_equal(pasted, np.where(box[None, :, :, None], images[::-1], images))
    np.testing.assert_allclose(share, 1 - box.mean(), rtol=1e-6)


@pytest.mark.parametrize(
    "loss", [{"cutmix": 1.0}, {"cutmix": 1.0, "mixup": 0.2, "class_weights": [1.0] * 10}], ids=str
)
def test_model_learns_from_blended_images(loss: dict[str, Any]) -> None:
    losses_, _ = run(Digits(), 12, loss=loss)
    assert np.isfinite(losses_).all() and losses_[-1] < losses_[0]


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        ({"focal": 2.0, "smoothing": 0.1}, "focal = 2 and smoothing = 0.1 are both set"),
        (
            {"target": "regression", "mixup": 0.2},
            "mixup applies to classes, and target is regression",
        ),
        ({"target": "multi_label", "z": 0.1}, "z applies to a softmax"),
        ({"class_weights": [1.0, 2.0]}, "class_weights has 2 numbers for model.classes = 10"),
    ],
)
def test_wrong_loss_blocks_are_refused(loss: dict[str, Any], words: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=words):
        TrainSpec.model_validate({"task": CLASSIFY, "loss": loss})


def test_focal_loss_of_language_model_is_refused() -> None:
    with pytest.raises(pydantic.ValidationError, match="focal applies to images and tables"):
        TrainSpec.model_validate({"task": "lm", "loss": {"focal": 2.0}})


def test_labels_of_another_target_are_refused() -> None:
    with pytest.raises(
        UnusableExampleError, match="target = multi_label a label is 0 or 1 for each class"
    ):
        ranges.read_flags([0, 2, 1])
    with pytest.raises(UnusableExampleError, match="not finite numbers"):
        ranges.read_numbers(["a"])
    assert ranges.read_numbers(3).dtype == np.float32
