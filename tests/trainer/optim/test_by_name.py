"""Every optimizer by name is optax's, bit for bit; what it holds of each parameter; what users bring instead."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.numerics import memory
from jaxlaunch.trainer.optim import optimizers, schedules, user_optimizers
from jaxlaunch.trainer.optim.optimizers import muon_axes
from jaxlaunch.trainer.spec import OPTIMIZERS, Optimizer, Schedule
from tests.trainer.tiny import Counting, Digits, build

MINE = "tests.gang.mine"
STEPS = 3
BY_HAND: dict[str, tuple[dict[str, Any], optax.GradientTransformation]] = {
    "adam": ({"b1": 0.8}, optax.adam(0.01, b1=0.8)),
    "adamw": ({"weight_decay": 0.1}, optax.adamw(0.01, weight_decay=0.1)),
    "adafactor": ({}, optax.adafactor(0.01)),
    "lion": ({"weight_decay": 0.1}, optax.lion(0.01, weight_decay=0.1)),
    "sgd": ({"momentum": 0.9, "nesterov": True}, optax.sgd(0.01, 0.9, True)),
    "lamb": ({"weight_decay": 0.1}, optax.lamb(0.01, weight_decay=0.1)),
    "muon": ({"weight_decay": 0.1}, optax.contrib.muon(0.01, weight_decay=0.1, adam_weight_decay=0.1)),
    "schedule-free": ({"weight_decay": 0.1}, optax.contrib.schedule_free_adamw(0.01, weight_decay=0.1)),
}


def drawn(seed: int) -> dict[str, jax.Array]:
    random = np.random.default_rng(seed)
    return {
        "w": jnp.asarray(random.normal(size=(4, 3)), jnp.float32),
        "b": jnp.asarray(random.normal(size=3), jnp.float32),
    }


def after(transformation: optax.GradientTransformation) -> dict[str, jax.Array]:
    """The parameters after STEPS updates, each operation by itself: no compiler reorders them."""
    params = drawn(0)
    state = transformation.init(params)
    for step in range(STEPS):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            updates, state = transformation.update(drawn(step + 1), state, params)
            params = optax.apply_updates(params, updates)
    return params


def built(**keys: Any) -> optax.GradientTransformation:
    return optimizers.build(
        Optimizer(**{"lr": 0.01, "clip": None, "schedule": Schedule(name="constant"), **keys}), STEPS
    )


def test_every_name_is_compared() -> None:
    assert BY_HAND.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize("name", BY_HAND)
def test_an_optimizer_by_name_is_optax_s_bit_for_bit(name: str) -> None:
    options, by_hand = BY_HAND[name]
    jax.tree.map(np.testing.assert_array_equal, after(built(name=name, **options)), after(by_hand))


def test_a_chain_is_optax_s_chain() -> None:
    chain = [
        {"name": "optax:centralize"},
        {"name": "optax:clip", "args": {"max_delta": 0.5}},
        {"name": "adam", "b1": 0.8},
    ]
    by_hand = optax.chain(optax.centralize(), optax.clip(0.5), optax.adam(0.01, b1=0.8))
    jax.tree.map(np.testing.assert_array_equal, after(built(chain=chain)), after(by_hand))


def test_an_optimizer_of_optax_alone_is_refused_with_its_spelling_and_works_as_told() -> None:
    with pytest.raises(ValueError, match=r"is written optax:rmsprop, with its options under args"):
        Optimizer(name="rmsprop")
    found = after(built(name="optax:rmsprop", args={"centered": True, "momentum": 0.5}))
    by_hand = optax.rmsprop(0.01, centered=True, momentum=0.5)
    jax.tree.map(np.testing.assert_array_equal, found, after(by_hand))


def test_a_factory_gets_what_it_takes() -> None:
    link = {"name": "optax:adamw", "args": {"b1": 0.8}}
    by_hand = optax.adamw(0.01, b1=0.8, weight_decay=0.1, mask={"w": True, "b": False})
    found = after(built(**link, weight_decay=0.1, decay_on="matrices"))
    jax.tree.map(np.testing.assert_array_equal, found, after(by_hand))


@pytest.mark.parametrize(
    ("keys", "decays"),
    [
        ({}, {"w": 1e-4, "b": 1e-4}),  # optax's own default
        ({"weight_decay": 0.0}, {"w": 0.0, "b": 0.0}),
        ({"groups": [{"match": "b", "weight_decay": 0.0}]}, {"w": 1e-4, "b": 0.0}),
    ],
)
def test_a_factory_gets_a_decay_of_0_and_has_its_own_where_none_is_said(
    keys: dict[str, Any], decays: dict[str, float]
) -> None:
    found = after(built(name="optax:adamw", **keys))
    for name, decay in decays.items():
        np.testing.assert_array_equal(found[name], after(optax.adamw(0.01, weight_decay=decay))[name])


def test_schedule_free_evaluates_its_average() -> None:
    params, by_hand = drawn(0), optax.contrib.schedule_free_adamw(0.01)
    ours = built(name="schedule-free")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        states = [each.update(drawn(1), each.init(params), params)[1] for each in (ours, by_hand)]
    wanted = optax.contrib.schedule_free_eval_params(states[1], params)
    jax.tree.map(np.testing.assert_array_equal, optimizers.averaged(states[0], params), wanted)
    assert optimizers.averaged(built().init(params), params) is None


# Arrays as large as the parameters that each holds, one where it is not named; less than a hundredth more are counts.
HOLDS = dict.fromkeys(["adam", "adamw", "lamb", "schedule-free"], 2) | dict.fromkeys(["sgd"], 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_planned_bytes_are_those_of_the_trained_parameters(name: str) -> None:
    groups = [{"match": r"layers\.0\..*", "freeze": True}]
    step = build(Digits(), optimizer={"name": name, "groups": groups})
    trained = step.trained(step.abstract.params)
    assert trained.keys() == {"head.bias", "head.kernel", "layers.1.bias", "layers.1.kernel"}
    of_muon = 1 + memory.bytes_per_device([trained[key] for key in trained if key != "layers.1.kernel"]) / (
        memory.bytes_per_device(trained)
    )
    holds = of_muon if name == "muon" else HOLDS.get(name, 1)
    found = memory.bytes_per_device(step.abstract.opt) / memory.bytes_per_device(trained)
    assert holds <= found <= holds + 0.02


def test_muon_takes_each_layer_s_matrices_apart() -> None:
    step = build(Counting())
    leaves, axes = step.abstract.params, step.axes
    found = {name: muon_axes(name, leaf, axes) for name, leaf in leaves.items()}
    assert {name for name, at in found.items() if at is None} == {
        "embedding", "head", "norm.scale", "blocks.attention_norm.scale", "blocks.mlp_norm.scale",
    }  # fmt: skip
    assert found["blocks.attention.query"] == ((1,), (2, 3))
    assert found["blocks.attention.out"] == ((1, 2), (3,))
    assert found["blocks.mlp.down"] == (1, 2)
    qkv = jax.ShapeDtypeStruct((2, 32, 3, 4, 8), jnp.float32)
    assert muon_axes("qkv", qkv, {"qkv": ("embed", None, "heads", "head")}) == ((1,), (3, 4))
    assert muon_axes("qkv_bias", qkv, {"qkv_bias": (None, "heads", "head")}) is None


def test_a_schedule_of_the_user_s_is_a_function_of_the_step() -> None:
    chosen = {"name": f"{MINE}:halving", "args": {"every": 5}}
    rate = schedules.build(Optimizer(lr=0.8, schedule=chosen), 20)
    np.testing.assert_allclose([rate(step) for step in (0, 4, 5, 12)], [0.8, 0.8, 0.4, 0.2])
    assert rate(jnp.int32(3)).dtype == jnp.float32


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"name": f"{MINE}:Net"}, r"Net\(\) failed: TypeError"),
        ({"name": f"{MINE}:nowhere"}, "has no 'nowhere'"),
        ({"name": f"{MINE}:a_list"}, "makes a list, not an optax.GradientTransformation"),
        ({"name": f"{MINE}:momentum", "args": {"decoy": 1}}, r"momentum\(learning_rate, decoy\) failed: TypeError"),
        ({"name": f"{MINE}:momentum", "args": {"learning_rate": 1}}, "gets learning_rate of train.optimizer.lr"),
        ({"name": f"{MINE}:momentum", "weight_decay": 0.1}, "takes no weight_decay; leave it out, or add"),
        (
            {"name": f"{MINE}:momentum", "groups": [{"match": "b"}, {"match": "w", "weight_decay": 0.1}]},
            "train.optimizer.groups.1.weight_decay = 0.1, but",
        ),
        ({"schedule": f"{MINE}:a_list"}, "makes a list, not a schedule: a function step -> learning rate"),
        ({"schedule": f"{MINE}:pairs"}, r"gives an array of shape \[2\] for a step, not a number"),
        ({"schedule": {"name": f"{MINE}:halving"}}, r"halving\(lr\) failed: TypeError"),
    ],
)
def test_what_makes_no_optimizer_or_schedule_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        built(**keys)


def test_an_update_that_does_not_fit_the_parameters_is_refused() -> None:
    params = jax.eval_shape(lambda: drawn(0))
    for name, message in (
        ("summed", "arrays of other shapes"),
        ("forgetful", "a state of other"),
        ("raising", "KeyError"),
    ):
        with pytest.raises(SpecError, match=f"train.optimizer: the update .*{message}"):
            user_optimizers.check(built(name=f"{MINE}:{name}"), params)
    user_optimizers.check(built(name=f"{MINE}:momentum"), params)


def test_a_rate_that_reaches_nothing_is_said() -> None:
    assert optimizers.notes(Optimizer(name="optax:scale_by_adam"), {}, {}) == [
        "train.optimizer.lr and schedule have no effect: optax:scale_by_adam takes no learning_rate"
    ]
