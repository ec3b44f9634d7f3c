from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from jaxlaunch.trainer.optim import loss_scale, optimizers
from jaxlaunch.trainer.optim.loss_scale import (
    GROWTH_INTERVAL,
    INITIAL_SCALE,
    MAX_SCALE,
    MIN_SCALE,
    LossScale,
)
from jaxlaunch.trainer.task import Loss
from tests.trainer.tiny import Counting, Digits, compiled_step, run


def scale(value: float, sound: int = 0) -> LossScale:
    return LossScale(jnp.float32(value), jnp.int32(sound))


@pytest.mark.parametrize(
    ("previous", "finite", "value", "sound"),
    [
        (scale(INITIAL_SCALE), True, INITIAL_SCALE, 1),
        (scale(INITIAL_SCALE, 7), False, INITIAL_SCALE / 2, 0),
        (scale(INITIAL_SCALE, GROWTH_INTERVAL - 1), True, INITIAL_SCALE * 2, 0),
        (scale(MAX_SCALE, GROWTH_INTERVAL - 1), True, MAX_SCALE, 0),
        (scale(MIN_SCALE), False, MIN_SCALE, 0),
    ],
)
def test_scale_halves_on_overflow_and_doubles_later(
    previous: LossScale, finite: bool, value: float, sound: int
) -> None:
    assert loss_scale.update_loss_scale(previous, jnp.bool(finite)) == (value, sound)


class Overflowing(Digits):
    """Digits whose gradients overflow float16 where the first row weighs 2."""

    def loss(self, model: Any, batch: dict[str, Array], rng: Array) -> Loss:
        push = jnp.where(batch["weight"][0] == 2.0, 1e6, 1.0).astype(jnp.float32)
        result = super().loss(model, batch, rng)
        return result._replace(sum=result.sum * push)

    def overflow(self, number: int) -> dict[str, Any]:
        batch = self.batch(number)
        return batch | {"weight": np.r_[2.0, batch["weight"][1:]].astype(np.float32)}


def test_overflow_skips_step_and_halves_scale() -> None:
    task = Overflowing()
    step = compiled_step(task, precision="fp16")
    state, _ = step.train(step.init_state(), step.put_batch(task.batch(0)))
    previous = jax.tree.map(np.array, state)
    batch = task.batch(1)
    state, metrics = step.train(state, step.put_batch(task.overflow(1)))
    assert metrics["skipped"] and metrics["finite"]
    assert state.scale == (INITIAL_SCALE / 2, 0) and state.step == 2
    previous = previous._replace(opt=optimizers.with_schedule_counts(previous.opt, state.opt))
    for name in ("params", "opt", "buffers"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, name), getattr(previous, name))
    state, metrics = step.train(state, step.put_batch(batch))
    assert not metrics["skipped"] and metrics["loss_scale"] == INITIAL_SCALE / 2
    assert not np.array_equal(state.params["layers.0.kernel"], previous.params["layers.0.kernel"])


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "adafactor"])
def test_schedule_counts_skipped_steps(name: str) -> None:
    schedule = {"name": "linear", "warmup": 4}
    optimizer = {"name": name, "lr": 1.0, "clip": None, "weight_decay": 0.1, "schedule": schedule}
    task = Overflowing()
    step = compiled_step(task, precision="fp16", optimizer=optimizer)
    state, batch = step.init_state(), task.batch(0)
    # The next step's rate would still be 0.
    state, metrics = step.train(state, step.put_batch(task.overflow(0)))
    assert metrics["skipped"] and metrics["learning_rate"] == 0
    previous = np.array(state.params["layers.0.kernel"])
    state, metrics = step.train(state, step.put_batch(batch))
    assert metrics["learning_rate"] == 0.25
    assert not np.array_equal(state.params["layers.0.kernel"], previous)


def test_unscaled_overflow_is_not_finite() -> None:
    step = compiled_step(Overflowing(), precision="fp16")
    state, batch = step.init_state(), Overflowing().batch(0)
    place = jax.tree.map(lambda x: x.sharding, state.scale)
    state = state._replace(scale=jax.device_put(scale(MIN_SCALE), place))
    infinite = step.put_batch(batch | {"weight": np.full(16, np.inf, np.float32)})
    _, metrics = step.train(state, infinite)
    assert metrics["skipped"] and not metrics["finite"]


@pytest.mark.parametrize(
    ("task", "options"),
    [
        (Digits(), {}),
        (Counting(), {"accumulate": 4}),
        (Counting(), {"mesh": {"dp": 2, "fsdp": 2, "mp": 2}}),
    ],
    ids=["mlp", "decoder, accumulate", "decoder, mesh"],
)
def test_float16_learns(task: Any, options: dict[str, Any]) -> None:
    # One or two of the first steps may overflow.
    losses, state = run(task, precision="fp16", **options)
    assert losses[-5:].mean() < 0.65 * losses[0]
    assert state.scale is not None and state.scale.value > MIN_SCALE


def test_scale_is_saved() -> None:
    step = compiled_step(Digits(), precision="fp16")
    state = step.init_state()
    tree = step.builder.to_tree(state)
    assert set(tree["scale"]) == {"value", "sound"}
    assert jax.tree.structure(step.builder.from_tree(tree)) == jax.tree.structure(state)
    assert "scale" not in step.builder.to_tree(compiled_step(Digits()).init_state())
