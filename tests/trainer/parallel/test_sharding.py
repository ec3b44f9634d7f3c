from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import P

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.parallel.sharding import (
    axes_by_path,
    constrain,
    constrain_value,
    gather_weight,
    state_sharding,
)


@pytest.fixture(scope="module")
def grid() -> jax.sharding.Mesh:
    return mesh.build_mesh(spec.Mesh(fsdp=4, mp=2))


@pytest.mark.parametrize(
    ("shape", "axes", "expected"),
    [
        ((16, 64), ("embed", "hidden"), P("fsdp", "mp")),
        ((64, 16), ("hidden", "embed"), P("mp", "fsdp")),
        ((3, 16, 64), ("embed", "hidden"), P(None, "fsdp", "mp")),  # stacked by nnx.vmap
        ((8, 6), None, P("fsdp", None)),  # nothing named: the largest dimension that divides
        ((6, 8), None, P(None, "fsdp")),
        ((6, 10), None, P(None, None)),  # none divides
        # embed does not divide, so fsdp comes on top of mp.
        ((6, 16), ("embed", "hidden"), P(None, ("mp", "fsdp"))),
        ((4, 6), ("layers", "embed"), P(None, None)),  # never along the layers
        ((16, 64), ("fsdp", "mp"), P("fsdp", "mp")),  # mesh axes by their own names
        ((16, 10), ("hidden", "classes"), P(("mp", "fsdp"), None)),
        ((64, 16), ("vocab", "embed"), P("mp", "fsdp")),
        ((65, 16), ("vocab", "embed"), P(None, "fsdp")),  # may stay whole
        ((16,), ("embed",), P(None)),  # a vector: more collectives than bytes
        ((3, 16), ("embed",), P(None, None)),
        ((16,), ("hidden",), P("mp")),
        ((), None, P()),
    ],
)
def test_leaf_is_split_by_names_then_fsdp(
    shape: tuple, axes: tuple | None, expected: P, grid: jax.sharding.Mesh
) -> None:
    entries = state_sharding("w", shape, axes, grid).spec
    assert [entry or None for entry in entries] == list(expected)


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        ((8, 8), ("heads", "hidden"), r"w: axes \('heads', 'hidden'\) .*two dimensions share mp"),
        ((8, 8), ("fsdp", "batch"), "two dimensions share fsdp"),
        ((8, 7), ("embed", "hidden"), "w: hidden = 7 cannot be split evenly over mp = 2 devices"),
        ((8, 8), ("embed", "hiden"), "w: unknown axis 'hiden'; name one of batch, .*, mp"),
        ((8,), ("embed", "hidden"), r"w: 2 axes .* are named for 1 dimensions \(8,\)"),
    ],
)
def test_unfitting_axes_are_refused(
    shape: tuple, axes: tuple, message: str, grid: jax.sharding.Mesh
) -> None:
    with pytest.raises(SpecError, match=message):
        state_sharding("w", shape, axes, grid)


def test_first_matching_path_rule_wins() -> None:
    model_axes = {"a.kernel": None, "b.kernel": ("embed",), "b.bias": ("embed",)}
    rules = {r"a\..*": ("hidden",), r".*\.kernel": (None, "mp")}
    named = {"a.kernel": ("hidden",), "b.kernel": (None, "mp")}
    assert axes_by_path(rules, model_axes) == model_axes | named

    def test_rule_without_match_is_refused() -> None:
        words = "rule 'kernel' matches no parameter. There are: a.bias, a.kernel"
        with pytest.raises(SpecError, match=words):
            axes_by_path({"kernel": ("embed",)}, {"a.kernel": None, "a.bias": None})


def test_activations_are_constrained_only_on_mesh(grid: jax.sharding.Mesh) -> None:
    assert constrain(jnp.ones((8, 4)), "batch", "embed").shape == (8, 4)
    with jax.set_mesh(grid):
        stored = jax.jit(lambda x: constrain(x, "batch", "hidden"))(jnp.ones((8, 4)))
    assert stored.sharding.spec == P("fsdp", "mp")


def test_gradient_of_gathered_weight_is_split(grid: jax.sharding.Mesh) -> None:
    weight, x = jnp.ones((8, 4)), jnp.ones((16, 8))

    def gather(weight: jax.Array) -> jax.Array:
        return gather_weight(weight, "embed", "hidden")

    with jax.set_mesh(grid):
        loss = jax.jit(jax.value_and_grad(lambda weight: (x @ gather(weight)).sum()))
        total, gradient = loss(weight)
        assert (total, gradient.sharding.spec) == (8 * 16 * 4, P("fsdp", "mp"))
        assert (gradient == 16.0).all()
        assert jax.jit(gather)(weight).sharding.spec == P(None, "mp")


@pytest.mark.parametrize("is_held", [True, False])
def test_weight_is_gathered_after_cast(is_held: bool, grid: jax.sharding.Mesh) -> None:
    """XLA moves a sharding through a cast to its operand, here the parameter."""

    def loss(weight: jax.Array, x: jax.Array) -> jax.Array:
        cast = weight.astype(jnp.bfloat16)
        cast = constrain_value(cast, weight_sharding) if is_held else cast
        return (x @ gather_weight(cast, "embed", "hidden")).astype(jnp.float32).sum()

    weight_sharding = jax.sharding.NamedSharding(grid, P("fsdp", "mp"))
    with jax.set_mesh(grid):
        weight = jax.device_put(jnp.ones((8, 4)), weight_sharding)
        x = jnp.ones((16, 8), jnp.bfloat16)
        text = jax.jit(loss).lower(weight, x).compile().as_text()
        gradient = jax.jit(jax.grad(loss))(weight, x)
    assert "all-gather(" in text and ("all-gather(%param" not in text) == is_held
    assert (gradient == 16.0).all()


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ([(".*", ("embed",))], "sharding is a list, not a dict of patterns"),
        ({"(": ("embed",)}, r"sharding rule '\(' is not a pattern: missing \)"),
        ({3: ("embed",)}, "sharding rule 3 is not a pattern"),
        ({".*": "embed"}, "sharding rule '.*': 'embed' is not a tuple of axes"),
        ({".*": (0,)}, r"sharding rule '.*': \(0,\) is not a tuple of axes"),
    ],
)
def test_invalid_rules_are_refused(rules: Any, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        axes_by_path(rules, {"kernel": None})
