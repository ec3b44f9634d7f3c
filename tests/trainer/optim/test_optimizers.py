"""Optimizers against torch and Hugging Face (tests/fixtures), and what optax leaves to us."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from jaxlaunch.trainer.optim import optimizers
from jaxlaunch.trainer.spec import OPTIMIZERS, Optimizer, Schedule

FIXTURES = Path(__file__).parents[2] / "fixtures"
DOCS = Path(__file__).parents[3] / "docs" / "optimizers.md"
TRAJECTORIES = load_file(FIXTURES / "optimizers" / "optimizers.safetensors")
CLIPPED = load_file(FIXTURES / "clip" / "clip.safetensors")
CONSTANT = Schedule(name="constant")
STEPS = 20

Tree = dict[str, np.ndarray]


def trajectory(transformation: optax.GradientTransformation, start: Tree, grads: Tree) -> Tree:
    """Return the parameters after 0, 1, ... STEPS updates, stacked."""
    params = jax.tree.map(jnp.asarray, start)
    state, update = transformation.init(params), jax.jit(transformation.update)
    points = [params]
    for step in range(STEPS):
        updates, state = update({key: grad[step] for key, grad in grads.items()}, state, params)
        params = optax.apply_updates(params, updates)
        points.append(params)
    return {key: np.stack([np.asarray(point[key]) for point in points]) for key in params}


def fixture(case: str) -> Tree:
    return {key: TRAJECTORIES[f"{case}.{key}"] for key in "wb"}


def build(**keys: Any) -> optax.GradientTransformation:
    defaults: dict[str, Any] = {"clip": None, "schedule": CONSTANT}
    return optimizers.build_optimizer(Optimizer(**defaults | keys), STEPS)


# --- torch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("adamw", {"b2": 0.95, "weight_decay": 0.1}),
        ("sgd_momentum", {"name": "sgd", "momentum": 0.9}),
        ("sgd_nesterov", {"name": "sgd", "momentum": 0.9, "nesterov": True}),
    ],
)
def test_trajectory_equals_torch(case: str, keys: dict[str, Any]) -> None:
    result = trajectory(build(lr=0.01, **keys), fixture("init"), fixture("grads"))
    for key, expected in fixture(case).items():
        np.testing.assert_allclose(result[key], expected, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("case", range(8))
def test_clipping_equals_torch(case: int) -> None:
    grads, expected = (
        {key: CLIPPED[f"{case}.{side}.{key}"] for key in "abc"} for side in ("in", "out")
    )
    # SGD at rate 1 moves by the clipped gradient, downwards.
    sgd = build(name="sgd", lr=1.0, clip=1.0)
    updates, _ = jax.jit(sgd.update)(grads, sgd.init(grads), grads)
    for key, tensor in expected.items():
        np.testing.assert_allclose(-updates[key], tensor, rtol=0, atol=2e-6 * np.abs(tensor).max())


def test_large_gradients_stay_without_clip() -> None:
    sgd = build(name="sgd", lr=1.0)
    grads = {"w": np.full(4, 1e4, np.float32)}
    updates, _ = sgd.update(grads, sgd.init(grads), grads)
    np.testing.assert_array_equal(-updates["w"], grads["w"])


# --- Hugging Face ---------------------------------------------------------------------------------


def documented(case: str) -> dict[str, list[float]]:
    """Return the rows of docs/optimizers.md on `case`: variant -> differences of w and b."""
    rows = re.findall(rf"^\| {case} \| (.+?) \| (\S+) \| (\S+) \|$", DOCS.read_text(), re.MULTILINE)
    return {variant: [float(w), float(b)] for variant, w, b in rows}


@pytest.mark.parametrize("case", ["adafactor_fixed_lr", "adafactor_relative"])
def test_distances_from_hugging_face_match_docs(case: str) -> None:
    scaled = case == "adafactor_relative"
    options = {"min_dim_size_to_factor": 1, "multiply_by_parameter_scale": scaled}
    variants = {
        "ours": build(name="adafactor", lr=0.01),
        "ours, factored from 1": optax.adafactor(0.01, min_dim_size_to_factor=1),
        "ours, scaled as there": optax.adafactor(0.01, multiply_by_parameter_scale=scaled),
        "ours, factored from 1, scaled as there": optax.adafactor(0.01, **options),
    }
    table, expected = documented(case), fixture(case)
    assert table.keys() == variants.keys()
    for variant, transformation in variants.items():
        result = trajectory(transformation, fixture("init"), fixture("grads"))
        distances = [float(np.abs(result[key] - expected[key]).max()) for key in expected]
        # Differences below 1e-6 are rounding, which depends on the machine.
        np.testing.assert_allclose(distances, table[variant], 0.02, 1e-6, err_msg=variant)


# --- what optax leaves to us ----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_bfloat16_parameters_are_updated_in_float32(name: str) -> None:
    optimizer = optimizers.build_optimizer(Optimizer(name=name), STEPS)
    params = {"w": jnp.ones((4, 8), jnp.bfloat16)}
    state = optimizer.init(params)
    updates, after = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state, after))} <= {"float32", "int32"}
    assert optax.apply_updates(params, updates)["w"].dtype == jnp.bfloat16


def test_moving_average_is_float32() -> None:
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    ema = optimizers.init_ema(jax.tree.map(jnp.zeros_like, params))
    for _ in range(10):
        ema = optimizers.update_ema(ema, params, decay=0.999)
    assert ema["w"].dtype == jnp.float32
    np.testing.assert_allclose(ema["w"], 1 - 0.999**10, rtol=1e-4)


def test_initial_average_survives_donation() -> None:
    params = {"w": jnp.ones(3)}
    ema = optimizers.init_ema(params)
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(params)
    np.testing.assert_array_equal(ema["w"], np.ones(3))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_optimizer_state_is_sharded_like_parameter(name: str) -> None:
    mesh = jax.make_mesh((4, 2), ("fsdp", "mp"), axis_types=(AxisType.Auto,) * 2)
    specs = {"matrix": P("fsdp", "mp"), "stack": P(None, "mp", "fsdp"), "bias": P("mp")}
    shardings = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    params = {"matrix": jnp.ones((128, 256)), "stack": jnp.ones((2, 256, 128)), "bias": jnp.ones(8)}
    optimizer = build(name=name, lr=1.0, momentum=0.9 if name == "sgd" else None)
    placed = optimizers.state_shardings(optimizer, params, shardings)
    state = jax.jit(optimizer.init, out_shardings=placed)(params)
    pieces = {leaf.shape: leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(state)}
    whole = {(128, 256): (32, 128), (2, 256, 128): (2, 128, 32), (8,): (4,), (): ()}
    whole |= {(3,): (3,)} if name == "muon" else {}  # its coefficients
    if name == "adafactor":
        whole = {(128,): (32,), (256,): (128,), (2, 256): (2, 128), (2, 128): (2, 32)}
        whole |= {(8,): (4,), (1,): (1,), (): ()}
    assert pieces == whole
