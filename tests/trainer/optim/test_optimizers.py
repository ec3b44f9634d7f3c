"""Optimizers against other people's: torch and Hugging Face (tests/fixtures), and the papers' algorithms in NumPy."""

import re
from collections.abc import Callable
from functools import partial
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
CONSTANT, LINEAR = Schedule(name="constant"), Schedule(name="linear")
STEPS = 20

Tree = dict[str, np.ndarray]
Rule = Callable[[np.ndarray, np.ndarray, dict[str, Any], int], np.ndarray]


def trajectory(transformation: optax.GradientTransformation, start: Tree, grads: Tree) -> Tree:
    """The parameters after 0, 1, ... STEPS updates, stacked."""
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


def distance(found: Tree, wanted: Tree) -> dict[str, float]:
    return {key: float(np.abs(found[key] - wanted[key]).max()) for key in wanted}


# --- torch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "optimizer"),
    [
        ("adamw", Optimizer(lr=0.01, b2=0.95, weight_decay=0.1, clip=None, schedule=CONSTANT)),
        ("sgd_momentum", Optimizer(name="sgd", lr=0.01, momentum=0.9, clip=None, schedule=CONSTANT)),
        ("sgd_nesterov", Optimizer(name="sgd", lr=0.01, momentum=0.9, nesterov=True, clip=None, schedule=CONSTANT)),
    ],
)
def test_the_trajectory_equals_torch(case: str, optimizer: Optimizer) -> None:
    found = trajectory(optimizers.build(optimizer, STEPS), fixture("init"), fixture("grads"))
    for key, wanted in fixture(case).items():
        np.testing.assert_allclose(found[key], wanted, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("case", range(8))
def test_clipping_equals_torch(case: int) -> None:
    grads, wanted = ({key: CLIPPED[f"{case}.{side}.{key}"] for key in "abc"} for side in ("in", "out"))
    # SGD at rate 1 moves by the clipped gradient, downwards.
    sgd = optimizers.build(Optimizer(name="sgd", lr=1.0, clip=1.0, schedule=CONSTANT), STEPS)
    updates, _ = jax.jit(sgd.update)(grads, sgd.init(grads), grads)
    for key, tensor in wanted.items():
        np.testing.assert_allclose(-updates[key], tensor, rtol=0, atol=2e-6 * np.abs(tensor).max())


def test_no_clip_leaves_large_gradients_alone() -> None:
    sgd = optimizers.build(Optimizer(name="sgd", lr=1.0, clip=None, schedule=CONSTANT), STEPS)
    grads = {"w": np.full(4, 1e4, np.float32)}
    updates, _ = sgd.update(grads, sgd.init(grads), grads)
    np.testing.assert_array_equal(-updates["w"], grads["w"])


# --- the papers -------------------------------------------------------------------------------------------------------


def lion(x: np.ndarray, g: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
    """Chen et al. 2023 (Symbolic Discovery of Optimization Algorithms), algorithm 2: lambda 0.1, betas 0.9 and 0.99."""
    m = state.setdefault("m", np.zeros_like(x))
    c = 0.9 * m + 0.1 * g
    state["m"] = 0.99 * m + 0.01 * g
    return x - rate(step) * (np.sign(c) + 0.1 * x)


def adafactor(x: np.ndarray, g: np.ndarray, state: dict[str, Any], step: int, b1: float = 0.0) -> np.ndarray:
    """Shazeer and Stern 2018 (Adafactor), algorithms 4 and 5 with the constants of section 9; decay 0.1 × rate.

    The squares of a tensor are factored over its last two axes when both hold 128 or more, as optax chooses.
    """
    eps1, eps2, d = 1e-30, 1e-3, 1.0
    beta2 = 1.0 - (step + 1.0) ** -0.8
    squares = g**2 + eps1
    if x.ndim >= 2 and min(x.shape[-2:]) >= 128:
        r = state["r"] = beta2 * state.get("r", 0.0) + (1 - beta2) * squares.sum(-1, keepdims=True)
        c = state["c"] = beta2 * state.get("c", 0.0) + (1 - beta2) * squares.sum(-2, keepdims=True)
        v = r * c / r.sum(-2, keepdims=True)
    else:
        v = state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * squares
    u = g / np.sqrt(v)
    u = u / max(1.0, rms(u) / d)
    move = max(eps2, rms(x)) * rate(step) * u
    state["m"] = move = b1 * state.get("m", 0.0) + (1 - b1) * move
    return x - move - 0.1 * rate(step) * x


def sgd(x: np.ndarray, g: np.ndarray, state: dict[str, Any], step: int) -> np.ndarray:
    """torch.optim.SGD: weight decay 0.1 joins the gradient, momentum 0.9."""
    state["m"] = 0.9 * state.get("m", 0.0) + g + 0.1 * x
    return x - rate(step) * state["m"]


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x**2).mean()))


def rate(step: int) -> float:
    """The linear schedule from 0.01 to 0 in STEPS."""
    return 0.01 * (1 - step / STEPS)


def reference(rule: Rule, start: Tree, grads: Tree) -> Tree:
    """The parameters after 0, 1, ... STEPS applications of `rule`, in float64."""
    found = {}
    for key, x in start.items():
        state: dict[str, Any] = {}
        points = [x.astype(np.float64)]
        for step in range(STEPS):
            points.append(rule(points[-1], grads[key][step].astype(np.float64), state, step))
        found[key] = np.stack(points)
    return found


def drawn() -> tuple[Tree, Tree]:
    """Parameters with one tensor of every treatment, one of them tiny, and gradients of very different sizes."""
    shapes = {"matrix": (128, 160), "tall": (256, 128), "stack": (2, 128, 136), "small": (8, 16), "bias": (16,)}
    random = np.random.default_rng(7)
    start = {key: random.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    start["bias"] *= 1e-5  # below adafactor's smallest scale
    grads = {}
    for key, shape in shapes.items():
        size = np.exp(random.normal(size=(STEPS,) + (1,) * len(shape)))
        grads[key] = (size * random.normal(size=(STEPS, *shape))).astype(np.float32)
    return start, grads


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        pytest.param(lion, {"name": "lion"}, id="lion"),
        pytest.param(adafactor, {"name": "adafactor"}, id="adafactor"),
        pytest.param(partial(adafactor, b1=0.9), {"name": "adafactor", "b1": 0.9}, id="adafactor with momentum"),
        pytest.param(sgd, {"name": "sgd", "momentum": 0.9}, id="sgd with weight decay"),
    ],
)
def test_the_trajectory_equals_the_paper(rule: Rule, options: dict[str, Any]) -> None:
    optimizer = Optimizer(lr=0.01, weight_decay=0.1, clip=None, schedule=LINEAR, **options)
    start, grads = drawn()
    found, wanted = trajectory(optimizers.build(optimizer, STEPS), start, grads), reference(rule, start, grads)
    for key in wanted:
        np.testing.assert_allclose(found[key], wanted[key], rtol=0, atol=1e-5, err_msg=key)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def documented(case: str) -> dict[str, list[float]]:
    """The rows of docs/optimizers.md that compare adafactor with `case`: variant -> largest difference of w and b."""
    rows = re.findall(rf"^\| {case} \| (.+?) \| (\S+) \| (\S+) \|$", DOCS.read_text(), re.MULTILINE)
    return {variant: [float(w), float(b)] for variant, w, b in rows}


@pytest.mark.parametrize("case", ["adafactor_fixed_lr", "adafactor_relative"])
def test_the_documented_distances_from_hugging_face_are_measured_here(case: str) -> None:
    ours = optimizers.build(Optimizer(name="adafactor", lr=0.01, clip=None, schedule=CONSTANT), STEPS)
    scaled = case == "adafactor_relative"
    variants = {
        "ours": ours,
        "ours, factored from 1": optax.adafactor(0.01, min_dim_size_to_factor=1),
        "ours, scaled as there": optax.adafactor(0.01, multiply_by_parameter_scale=scaled),
        "ours, factored from 1, scaled as there": optax.adafactor(
            0.01, min_dim_size_to_factor=1, multiply_by_parameter_scale=scaled
        ),
    }
    table = documented(case)
    assert table.keys() == variants.keys()
    for variant, transformation in variants.items():
        found = distance(trajectory(transformation, fixture("init"), fixture("grads")), fixture(case))
        # Below 1e-6 lies rounding, whose size is the machine's.
        np.testing.assert_allclose(list(found.values()), table[variant], rtol=0.02, atol=1e-6, err_msg=variant)


# --- what optax leaves to us ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_bfloat16_parameters_are_updated_in_float32(name: str) -> None:
    optimizer = optimizers.build(Optimizer(name=name), STEPS)
    params = {"w": jnp.ones((4, 8), jnp.bfloat16)}
    state = optimizer.init(params)
    updates, after = optimizer.update(jax.tree.map(jnp.ones_like, params), state, params)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state, after))} <= {"float32", "int32"}
    assert optax.apply_updates(params, updates)["w"].dtype == jnp.bfloat16


def test_the_moving_average_follows_the_parameters_in_float32() -> None:
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    ema = optimizers.ema_init(jax.tree.map(jnp.zeros_like, params))
    for _ in range(10):
        ema = optimizers.ema_update(ema, params, decay=0.999)
    assert ema["w"].dtype == jnp.float32
    np.testing.assert_allclose(ema["w"], 1 - 0.999**10, rtol=1e-4)


def test_the_first_average_is_a_copy_that_survives_donation() -> None:
    params = {"w": jnp.ones(3)}
    ema = optimizers.ema_init(params)
    jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + 1, tree), donate_argnums=0)(params)
    np.testing.assert_array_equal(ema["w"], np.ones(3))


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_the_state_of_a_parameter_is_split_as_the_parameter_is(name: str) -> None:
    mesh = jax.make_mesh((4, 2), ("fsdp", "mp"), axis_types=(AxisType.Auto,) * 2)
    specs = {"matrix": P("fsdp", "mp"), "stack": P(None, "mp", "fsdp"), "bias": P("mp")}
    shardings = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    params = {"matrix": jnp.ones((128, 256)), "stack": jnp.ones((2, 256, 128)), "bias": jnp.ones(8)}
    optimizer = optimizers.build(Optimizer(name=name, momentum=0.9 if name == "sgd" else None), STEPS)

    placed = optimizers.state_shardings(optimizer, params, shardings)
    state = jax.jit(optimizer.init, out_shardings=placed)(params)

    pieces = {leaf.shape: leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(state)}
    whole = {(128, 256): (32, 128), (2, 256, 128): (2, 128, 32), (8,): (4,), (): ()}
    whole |= {(3,): (3,)} if name == "muon" else {}  # its coefficients
    factored = {(8,): (4,), (128,): (32,), (256,): (128,), (2, 256): (2, 128), (2, 128): (2, 32), (1,): (1,), (): ()}
    assert pieces == (factored if name == "adafactor" else whole)
