"""Groups of parameters: frozen, with rates and decays of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.optim import optimizers, transforms
from jaxlaunch.trainer.spec import Optimizer, Schedule
from tests.trainer.tiny import Digits, build, compiled_step

CONSTANT = Schedule(name="constant")
STEPS = 20
AXES: dict[str, Any] = {
    "stack.scale": ("embed",),
    "stack.qkv_bias": (None, "heads"),
    "stack.up": ("embed", "hidden"),
}
SHAPES = {
    "stack.up": (2, 4, 3),
    "stack.scale": (2, 4),
    "stack.qkv_bias": (2, 3, 2),
    "head": (4, 3),
    "bias": (3,),
}


def draw_params(seed: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.normal(size=SHAPES[name]), jnp.float32) for name in SHAPES}


def trajectory(
    optimizer: Optimizer, names: list[str], zero: bool = False
) -> tuple[dict[str, jax.Array], Any]:
    """Return the parameters `names` and the optimizer's state after STEPS updates."""
    built = optimizers.build_optimizer(optimizer, STEPS, AXES)
    params = {name: draw_params(0)[name] for name in names}
    state, update = built.init(params), jax.jit(built.update)
    for step in range(STEPS):
        grads = {name: draw_params(step + 1)[name] * (0.0 if zero else 1.0) for name in names}
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_each_group_has_own_optimizer() -> None:
    # The first group that matches a parameter has it.
    keys: dict[str, Any] = {"clip": None, "schedule": CONSTANT, "lr": 0.1, "weight_decay": 0.1}
    options = [
        {"match": ".*bias", "lr": 0.5, "weight_decay": 0.0},
        {"match": r"stack\..*", "lr": 0.25},
    ]
    params, state = trajectory(Optimizer(groups=options, **keys), list(draw_params(0)))
    parts = {
        ("bias", "stack.qkv_bias"): {"lr": 0.05, "weight_decay": 0.0},
        ("stack.up", "stack.scale"): {"lr": 0.025},
        ("head",): {},
    }
    for names, changed in parts.items():
        alone, _ = trajectory(Optimizer(**keys | changed), list(names))
        for name in names:
            np.testing.assert_allclose(params[name], alone[name], 1e-6, 1e-7, err_msg=name)
    groups = {label: set(part[0].mu) for label, part in state[1].items()}
    assert groups.pop("group0") == {"bias", "stack.qkv_bias"}
    assert groups == {"group1": {"stack.up", "stack.scale"}, "rest": {"head"}}


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb"])
def test_decay_on_matrices_excludes_vectors(name: str) -> None:
    optimizer = Optimizer(
        name=name, lr=0.1, weight_decay=0.1, decay_on="matrices", clip=None, schedule=CONSTANT
    )
    params, _ = trajectory(optimizer, list(draw_params(0)), zero=True)
    for key, start in draw_params(0).items():
        is_matrix = key in ("stack.up", "head")
        assert (np.abs(params[key]) < np.abs(start)).all() == is_matrix, key
        assert np.array_equal(params[key], start) != is_matrix, key


def test_scale_of_heads_is_no_matrix() -> None:
    # OLMo 2's norms of whole queries and keys have two named axes.
    name, leaf = "blocks.attention.query_norm.scale", jax.ShapeDtypeStruct((2, 4, 8), jnp.float32)
    axes = {name: ("heads", "head")}
    assert not transforms.is_matrix(name, leaf, axes)
    assert transforms.muon_axes(name, leaf, axes) is None


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({"weight_decay": 0.1}, 2),
        ({"weight_decay": 0.1, "name": "muon"}, 1),
        ({"name": "optax:adamw"}, 2),
        ({"name": "optax:adamw", "weight_decay": 0.0}, 0),
        ({}, 0),
    ],
)
def test_notes_count_decayed_arrays(keys: dict[str, Any], count: int) -> None:
    axes = {"embedding": ("vocab", "embed"), "up": ("embed", "hidden"), "scale": ("embed",)}
    params = {
        name: jax.ShapeDtypeStruct((4,) * len(names), jnp.float32) for name, names in axes.items()
    }
    notes = optimizers.describe_optimizer(Optimizer(decay_on="matrices", **keys), params, axes)
    assert notes == [f"weight decay on matrices alone: {count} of 3 arrays"] * bool(count)


def test_frozen_parameters_keep_values_without_state() -> None:
    task = Digits()
    options = [{"match": r"head\..*", "lr": 0.5}, {"match": r"layers\.0\..*", "freeze": True}]
    optimizer = {"groups": options, "weight_decay": 0.1, "ema": 0.9}
    step = compiled_step(task, optimizer=optimizer, mesh={"fsdp": 2})
    step.compile_eval(step.put_batch(task.batch(0)))
    state, losses = step.init_state(), []
    previous = {name: np.array(leaf) for name, leaf in state.params.items()}
    for number in range(STEPS):
        state, metrics = step.train(state, step.put_batch(task.batch(number)))
        losses.append(float(metrics["loss"]))
    frozen = {"layers.0.kernel", "layers.0.bias"}
    assert step.builder.frozen == frozen and losses[-1] < losses[0]
    unchanged = {name for name in previous if np.array_equal(state.params[name], previous[name])}
    assert unchanged == frozen
    tree = step.builder.to_tree(state)
    assert not [name for part in ("opt", "ema") for name in tree[part] if "layers.0." in name]
    assert {name for name in tree["opt"] if ".mu." in name} == {
        *(f"1.group0.0.mu.head.{part}" for part in ("bias", "kernel")),
        *(f"1.rest.0.mu.layers.1.{part}" for part in ("bias", "kernel")),
    }  # fmt: skip
    assert np.isfinite(step.evaluate(state, step.put_batch(task.batch(0)))[0]["loss"][0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            [{"match": r"blocks\..*", "freeze": True}],
            r"groups.0.match = blocks\\\.\.\* matches no parameter. There are: a",
        ),
        (
            [{"match": ".*"}, {"match": "a", "lr": 2.0}],
            "groups.1.match = a matches only parameters of the groups before",
        ),
        ([{"match": ".*", "freeze": True}], "freeze every parameter"),
    ],
)
def test_empty_group_is_refused(options: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        optimizers.find_frozen(Optimizer(groups=options), ["a", "b"])


def test_notes_describe_groups() -> None:
    options = [
        {"match": r"layers\..*bias", "weight_decay": 0.0},
        {"match": r"head\..*", "freeze": True},
    ]
    optimizer = {"groups": options, "decay_on": "matrices", "weight_decay": 0.1}
    step = build(Digits(), optimizer=optimizer)
    assert step.notes == [
        r"train.optimizer.groups.0 (layers\..*bias): 2 arrays, 64 numbers, lr × 1, weight decay 0",
        r"train.optimizer.groups.1 (head\..*): 2 arrays, 330 numbers, frozen",
        "weight decay on matrices alone: 2 of 4 arrays",
    ]
