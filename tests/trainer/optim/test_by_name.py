"""Optimizers of optax and of users, and chains; the bytes of an optimizer's state."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.numerics import memory
from jaxlaunch.trainer.optim import optimizers, schedules, transforms
from jaxlaunch.trainer.optim.transforms import muon_axes
from jaxlaunch.trainer.spec import OPTIMIZERS, Optimizer, Schedule
from tests.trainer.optim import simulations
from tests.trainer.tiny import Counting, Digits, build

MINE = "tests.gang.mine"
DOCS = Path(__file__).parents[3] / "docs" / "optimizers.md"
STEPS = 8


def draw_params(seed: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(random.normal(size=(4, 3)), jnp.float32),
        "b": jnp.asarray(random.normal(size=3), jnp.float32),
    }


def updates_after(transformation: optax.GradientTransformation) -> tuple[dict[str, jax.Array], Any]:
    """Return the parameters after STEPS updates, and the state."""
    params = draw_params(0)
    state, update = transformation.init(params), jax.jit(transformation.update)
    for step in range(STEPS):
        updates, state = update(draw_params(step + 1), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def by_formula(
    rule: Any, decays: dict[str, float] | None = None, rate: Any = None, **options: Any
) -> dict[str, Any]:
    """Return the parameters and states of a rule of the simulations after STEPS updates."""
    result = {}
    for name, leaf in draw_params(0).items():
        x, state = np.asarray(leaf, np.float64), {}
        for step in range(STEPS):
            g = np.asarray(draw_params(step + 1)[name], np.float64)
            now = rate(step) if rate else 0.01
            x = rule(x, g, state, step + 1, now, (decays or {}).get(name, 0.0), **options)
        result[name] = (x, state)
    return result


def assert_equal(result: dict[str, jax.Array], expected: dict[str, Any]) -> None:
    for name, (x, _) in expected.items():
        np.testing.assert_allclose(result[name], x, rtol=0, atol=5e-6, err_msg=name)


def build_transformation(**keys: Any) -> optax.GradientTransformation:
    defaults: dict[str, Any] = {"lr": 0.01, "clip": None, "schedule": Schedule(name="constant")}
    return optimizers.build_optimizer(Optimizer(**defaults | keys), STEPS)


def test_chain_applies_links_in_order() -> None:
    chain = [{"name": "optax:clip", "args": {"max_delta": 0.5}}, {"name": "adam", "b1": 0.8}]

    def rule(x: Any, g: Any, *remainder: Any, **options: Any) -> Any:
        return simulations.adam(x, np.clip(g, -0.5, 0.5), *remainder, **options)

    result = updates_after(build_transformation(chain=chain))[0]
    assert_equal(result, by_formula(rule, b1=0.8, b2=0.999, eps=1e-8))


def test_optax_name_is_refused_with_hint() -> None:
    with pytest.raises(ValueError, match=r"is written optax:rmsprop, with its options under args"):
        Optimizer(name="rmsprop")


def rmsprop(x: Any, g: Any, s: Any, t: int, rate: float, decay: float) -> Any:
    """torch.optim.RMSprop with alpha 0.99, eps 1e-8 and momentum 0.9."""
    s["v"] = 0.99 * s.get("v", 0.0) + 0.01 * g**2
    s["m"] = 0.9 * s.get("m", 0.0) + g / (np.sqrt(s["v"]) + 1e-8)
    return x - rate * s["m"]


def test_documented_chain_equals_torch_rmsprop() -> None:
    pattern = r"```yaml\n(optimizer:\n  chain:\n    - {name: \"optax:scale_by_rms.*?)```"
    shown = re.search(pattern, DOCS.read_text(), re.DOTALL)
    assert shown is not None
    decaying = {"schedule": Schedule(name="linear"), "lr": 0.01}
    expected = by_formula(rmsprop, rate=lambda step: 0.01 * (1 - step / STEPS))
    chain = build_transformation(**yaml.safe_load(shown[1])["optimizer"] | decaying)
    assert_equal(updates_after(chain)[0], expected)
    args = {"decay": 0.99, "momentum": 0.9, "eps_in_sqrt": False}
    optax_rmsprop = build_transformation(name="optax:rmsprop", args=args)
    # At one rate it is torch's.
    assert_equal(updates_after(optax_rmsprop)[0], by_formula(rmsprop))
    result = updates_after(build_transformation(name="optax:rmsprop", args=args, **decaying))[0]
    assert min(np.abs(result[name] - x).max() for name, (x, _) in expected.items()) > 1e-3


def adan(
    x: Any, g: Any, s: Any, t: int, rate: float, decay: float, weight: float, eps_root: float = 0.0
) -> Any:
    """Xie et al. 2022, algorithm 1, whose betas are 1 minus these; `weight` is b2 there."""
    change, s["g"] = g - s.get("g", g), g
    values = ("m", 0.98, g), ("v", 0.92, change), ("n", 0.99, (g + weight * change) ** 2)
    for key, b, value in values:
        s[key] = b * s.get(key, 0.0) + (1 - b) * value
    m, v, n = s["m"] / (1 - 0.98**t), s["v"] / (1 - 0.92**t), s["n"] / (1 - 0.99**t)
    return x - rate * (m + weight * v) / (np.sqrt(n + eps_root) + 1e-8)


def test_optax_adan_differs_as_documented() -> None:
    result = updates_after(build_transformation(name="optax:adan"))[0]
    assert_equal(result, by_formula(adan, weight=1 - 0.92, eps_root=1e-8))
    documented = by_formula(adan, weight=0.92).items()
    assert min(np.abs(result[name] - x).max() for name, (x, _) in documented) > 1e-2


ADAMW = {"b1": 0.8, "b2": 0.999, "eps": 1e-8}


def test_factory_gets_arguments_of_its_signature() -> None:
    keys = {"name": "optax:adamw", "args": {"b1": 0.8}, "weight_decay": 0.1, "decay_on": "matrices"}
    result = updates_after(build_transformation(**keys))[0]
    assert_equal(result, by_formula(simulations.adamw, {"w": 0.1}, **ADAMW))


@pytest.mark.parametrize(
    ("keys", "decays"),
    [
        ({}, {"w": 1e-4, "b": 1e-4}),  # optax's own default
        ({"weight_decay": 0.0}, {"w": 0.0, "b": 0.0}),
        ({"groups": [{"match": "b", "weight_decay": 0.0}]}, {"w": 1e-4, "b": 0.0}),
    ],
)
def test_factory_gets_explicit_zero_decay(keys: dict[str, Any], decays: dict[str, float]) -> None:
    # Without a gradient the decay is all that moves a parameter.
    transformation = build_transformation(name="optax:adamw", lr=1.0, **keys)
    params = draw_params(0)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = transformation.update(zeros, transformation.init(params), params)
    for name, decay in decays.items():
        np.testing.assert_allclose(updates[name], -decay * params[name], rtol=1e-6, atol=0)


def test_optax_schedule_free_evaluates_average() -> None:
    params, state = updates_after(build_transformation(name="optax:contrib.schedule_free_adamw"))
    expected = by_formula(simulations.free, b1=0.9, b2=0.999, eps=1e-8)
    average = transforms.averaged_params(state, params)
    assert_equal(average, {name: (s["x"], s) for name, (_, s) in expected.items()})
    assert transforms.averaged_params(updates_after(build_transformation())[1], params) is None


# Arrays as large as the parameters that each holds, one where it is not named; less than a
# hundredth more are counts.
HOLDS = dict.fromkeys(["adam", "adamw", "lamb", "schedule-free"], 2) | dict.fromkeys(["sgd"], 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_planned_optimizer_bytes_are_of_trained_parameters(name: str) -> None:
    groups = [{"match": r"layers\.0\..*", "freeze": True}]
    step = build(Digits(), optimizer={"name": name, "groups": groups})
    trained = step.builder.trained_params(step.abstract.params)
    assert trained.keys() == {"head.bias", "head.kernel", "layers.1.bias", "layers.1.kernel"}
    others = [trained[key] for key in trained if key != "layers.1.kernel"]
    of_muon = 1 + memory.bytes_per_device(others) / memory.bytes_per_device(trained)
    holds = of_muon if name == "muon" else HOLDS.get(name, 1)
    result = memory.bytes_per_device(step.abstract.opt) / memory.bytes_per_device(trained)
    assert holds <= result <= holds + 0.02


def test_muon_separates_layer_matrices() -> None:
    step = build(Counting())
    leaves, axes = step.abstract.params, step.builder.axes
    result = {name: muon_axes(name, leaf, axes) for name, leaf in leaves.items()}
    assert {name for name, at in result.items() if at is None} == {
        "embedding", "head", "norm.scale", "blocks.attention_norm.scale", "blocks.mlp_norm.scale",
    }  # fmt: skip
    assert result["blocks.attention.query"] == ((1,), (2, 3))
    assert result["blocks.attention.out"] == ((1, 2), (3,))
    assert result["blocks.mlp.down"] == ((1,), (2,))
    qkv = jax.ShapeDtypeStruct((2, 32, 3, 4, 8), jnp.float32)
    assert muon_axes("qkv", qkv, {"qkv": ("embed", None, "heads", "head")}) == ((1,), (3, 4))
    assert muon_axes("qkv_bias", qkv, {"qkv_bias": (None, "heads", "head")}) is None


def test_user_schedule_is_function_of_step() -> None:
    chosen = {"name": f"{MINE}:halving", "args": {"every": 5}}
    rate = schedules.build_schedule(Optimizer(lr=0.8, schedule=chosen), 20)
    np.testing.assert_allclose([rate(step) for step in (0, 4, 5, 12)], [0.8, 0.8, 0.4, 0.2])
    assert rate(jnp.int32(3)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("Net", {}, r"Net\(\) failed: TypeError"),
        ("nowhere", {}, "has no 'nowhere'"),
        ("a_list", {}, "makes a list, not an optax.GradientTransformation"),
        ("momentum", {"args": {"decoy": 1}}, r"momentum\(learning_rate, decoy\) failed: TypeError"),
        (
            "momentum",
            {"args": {"learning_rate": 1}},
            "args sets learning_rate, which comes from train.optimizer.lr",
        ),
        ("momentum", {"weight_decay": 0.1}, "takes no weight_decay; leave it out, or add"),
        (
            "momentum",
            {"groups": [{"match": "b"}, {"match": "w", "weight_decay": 0.1}]},
            "train.optimizer.groups.1.weight_decay = 0.1, but",
        ),
    ],
)
def test_invalid_factory_results_are_refused(name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_transformation(name=f"{MINE}:{name}", **keys)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a_list", "makes a list, not a schedule: a function step -> learning rate"),
        ("pairs", r"returns an array of shape \[2\] for a step, not a number"),
        ("halving", r"halving\(lr\) failed: TypeError"),
    ],
)
def test_invalid_schedules_are_refused(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        build_transformation(schedule=f"{MINE}:{name}")


def test_update_of_wrong_shape_is_refused() -> None:
    params = jax.eval_shape(lambda: draw_params(0))
    faults = {
        "summed": "arrays of other shapes",
        "forgetful": "a state with other",
        "raising": "KeyError",
    }
    for name, message in faults.items():
        with pytest.raises(SpecError, match=f"train.optimizer: the update .*{message}"):
            schedules.check_transformation(build_transformation(name=f"{MINE}:{name}"), params)
    schedules.check_transformation(build_transformation(name=f"{MINE}:momentum"), params)


def test_unused_learning_rate_is_noted() -> None:
    assert optimizers.describe_optimizer(Optimizer(name="optax:scale_by_adam"), {}, {}) == [
        "train.optimizer.lr and schedule have no effect: optax:scale_by_adam takes no learning_rate"
    ]
