import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.layers import Drop
from tests.trainer.tiny import Counting, Digits, build, compiled_step, run, train_steps

GPT = spec.GPT2(layers=2, width=32, heads=4, vocab=32, length=16, dropout=0.1)


def test_dropout_keeps_the_mean_and_is_off_in_evaluation() -> None:
    x = jnp.ones((64, 32, 16))
    drop = Drop(0.25, False, nnx.Rngs(0))
    actual = np.unique(drop(x))
    np.testing.assert_allclose(actual, [0.0, 1 / 0.75], rtol=1e-6)
    assert abs(float(drop(x).mean()) - 1.0) < 0.02
    drop.eval()
    assert drop(x) is x


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_kept_bfloat16_numbers_are_scaled_by_the_exact_probability(rate: float) -> None:
    x = jax.random.uniform(jax.random.key(0), (512, 1024), minval=0.5, maxval=4.0)
    x = x.astype(jnp.bfloat16)
    by_number = Drop(rate, False, nnx.Rngs(0))(x)
    by_path = Drop(0.0, True, nnx.Rngs(0))(x, jnp.float32(rate))
    for dropped in (by_number, by_path):
        kept = np.asarray(dropped, np.float64)
        exact = np.asarray(x, np.float64) / (1.0 - rate)
        is_kept = kept != 0
        # The quotients themselves are rounded to 8 bits, up and down.
        assert abs(kept[is_kept].sum() / exact[is_kept].sum() - 1.0) < 1e-4
        assert np.abs(kept / exact - 1.0)[is_kept].max() < 2**-8


def test_stochastic_depth_skips_whole_examples() -> None:
    drop = Drop(0.0, True, nnx.Rngs(0))
    per_example = np.asarray(drop(jnp.ones((256, 3, 2)), jnp.float32(0.5))).reshape(256, -1)
    assert all(len(set(row)) == 1 for row in per_example.tolist())
    assert abs(float((per_example[:, 0] == 0).mean()) - 0.5) < 0.1


def test_equal_seeds_give_equal_dropout() -> None:
    alone = run(Counting(), 4, model=GPT)[0]
    mesh = {"dp": 2, "fsdp": 2, "mp": 2}
    step = compiled_step(Counting(), 4, model=GPT, mesh=mesh, remat="full")
    first, repeated = (train_steps(step, Counting(), 4)[0] for _ in range(2))
    np.testing.assert_array_equal(first, repeated)
    np.testing.assert_allclose(first, alone, rtol=1e-5)
    assert not np.allclose(first, run(Counting(), 4, model=GPT, seed=1)[0])


def test_dropout_differs_between_layers_and_steps() -> None:
    step = compiled_step(Counting(), model=GPT, optimizer={"lr": 1e-30})
    state, losses = step.init_state(), []
    for _ in range(3):
        state, metrics = step.train(state, step.put_batch(Counting().batch(0)))
        losses.append(float(metrics["loss"]))
    assert len(set(losses)) == 3


def test_model_without_dropout_has_no_random_state() -> None:
    plain = build(Counting(), model=GPT.model_copy(update={"dropout": 0.0}))
    assert set(plain.abstract.params) == set(build(Counting(), model=GPT).abstract.params)
    assert plain.abstract.buffers == build(Counting(), model=GPT).abstract.buffers == {}


def test_mixup_applies_to_training_only() -> None:
    losses = [spec.Loss(mixup=alpha, smoothing=0.1 * alpha) for alpha in (0.4, 0.0)]
    steps = [compiled_step(Digits(), 6, loss=loss) for loss in losses]
    mixed, repeated, plain = (
        train_steps(step, Digits(), 6)[0] for step in (steps[0], steps[0], steps[1])
    )
    np.testing.assert_array_equal(mixed, repeated)
    assert not np.allclose(mixed, plain)
    sums = []
    for step in steps:
        batch = step.put_batch(Digits().batch(0))
        step.compile_eval(batch)
        sums.append(jax.device_get(step.evaluate(step.init_state(), batch)[0]["loss"]))
    np.testing.assert_array_equal(*sums)


def test_chunked_loss_is_equal_on_a_mesh() -> None:
    mesh = {"dp": 2, "fsdp": 2, "mp": 2}
    chunked, _ = run(Counting(), 5, loss=spec.Loss(chunks=4), mesh=mesh)
    np.testing.assert_allclose(chunked, run(Counting(), 5)[0], rtol=1e-5)
