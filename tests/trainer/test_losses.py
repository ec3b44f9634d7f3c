import jax
import jax.numpy as jnp
import numpy as np

from trainer.losses import cross_entropy

LOGITS = np.random.default_rng(0).normal(size=(4, 3, 7)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 7, (4, 3))
WEIGHT = np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0], [0.5, 2, 1]], np.float32)


def test_sums_are_those_of_the_definition() -> None:
    found = cross_entropy(jnp.array(LOGITS), jnp.array(LABELS), jnp.array(WEIGHT))
    wide = LOGITS.astype(np.float64)
    nats = np.log(np.exp(wide).sum(-1)) - np.take_along_axis(wide, LABELS[..., None], -1)[..., 0]
    np.testing.assert_allclose(found.nats, (nats * WEIGHT).sum(), rtol=1e-6)
    np.testing.assert_allclose(found.correct, ((LOGITS.argmax(-1) == LABELS) * WEIGHT).sum())
    assert found.weight == WEIGHT.sum()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    found = cross_entropy(jnp.array(LOGITS, jnp.bfloat16), jnp.array(LABELS), jnp.array(WEIGHT))
    assert {leaf.dtype for leaf in found} == {np.dtype("float32")}


def test_what_weighs_nothing_adds_nothing_to_sums_and_gradients() -> None:
    spoilt = jnp.array(LOGITS).at[2].set(jnp.nan)
    labels = jnp.array(LABELS).at[2].set(-100)
    sums = cross_entropy(spoilt, labels, jnp.array(WEIGHT))
    assert sums == cross_entropy(jnp.array(LOGITS), jnp.array(LABELS), jnp.array(WEIGHT))
    gradient = jax.grad(lambda logits: cross_entropy(logits, labels, jnp.array(WEIGHT)).nats)(spoilt)
    assert not gradient[2].any() and jnp.isfinite(gradient).all()


def test_a_label_outside_the_vocabulary_is_not_finite() -> None:
    for label in (-1, 7):
        labels = jnp.array(LABELS).at[0, 0].set(label)
        assert jnp.isnan(cross_entropy(jnp.array(LOGITS), labels, jnp.array(WEIGHT)).nats)


def test_labels_stored_as_bytes_do_not_wrap() -> None:
    logits = jnp.zeros((1, 300)).at[0, 255].set(9.0)
    sums = cross_entropy(logits, jnp.array([255], jnp.uint8), jnp.ones(1))
    assert sums.correct == 1 and sums.nats < 1


def test_a_small_loss_keeps_its_digits() -> None:
    found = cross_entropy(jnp.array([[1e3, 1e3 - 12.0]]), jnp.array([0]), jnp.ones(1))
    np.testing.assert_allclose(found.nats, np.log1p(np.exp(-12.0)), rtol=2e-2)
