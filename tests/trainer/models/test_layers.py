"""What the backward pass of layers keeps, and how it computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from jaxlaunch.trainer.models import language_model
from jaxlaunch.trainer.models.layers import LayerNorm, RMSNorm, apply_kernel, gated_activation
from jaxlaunch.trainer.numerics import memory

ROWS, WIDTH = 64, 32
X = jax.ShapeDtypeStruct((1, ROWS, WIDTH), jnp.bfloat16)


@pytest.mark.parametrize(
    ("layer", "reads"),
    [
        (partial(gated_activation, jax.nn.silu), 2),
        (RMSNorm(WIDTH, 1e-6), 1),
        (LayerNorm(WIDTH, 1e-6), 1),
    ],
    ids=["gated", "rms", "layer"],
)
def test_elementwise_layers_keep_only_their_inputs(layer: Any, reads: int) -> None:
    if isinstance(layer, nnx.Module):
        nnx.update(layer, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(layer)))

    def loss(shift: jax.Array, *x: jax.Array) -> tuple[jax.Array, None]:
        return layer(*(item + shift for item in x)).astype(jnp.float32).sum(), None

    saved = memory.residual_bytes(loss, jax.ShapeDtypeStruct((1, 1, 1), jnp.bfloat16), *[X] * reads)
    read = reads * ROWS * WIDTH * 2
    assert read <= saved <= 1.1 * read


@pytest.mark.parametrize(
    ("dtype", "within"), [("float32", 1e-6), ("float16", 1e-3), ("bfloat16", 8e-3)]
)
def test_logit_gradients_equal_those_of_a_product(dtype: str, within: float) -> None:
    """Against float64."""
    random = np.random.default_rng(0)
    x, head, expected = (random.normal(size=size) for size in ((2, 8, 16), (16, 40), (2, 8, 40)))
    x, head = (np.asarray(jnp.array(item, dtype), np.float64) for item in (x, head))

    def loss(x: jax.Array, head: jax.Array) -> jax.Array:
        logits = language_model._project_logits(x, head, jnp.dtype("float32"))
        return (logits * jnp.array(expected, jnp.float32)).sum()

    actual = jax.grad(loss, (0, 1))(jnp.array(x, dtype), jnp.array(head, dtype))
    assert {item.dtype.name for item in actual} == {dtype}
    exact = expected @ head.T, np.einsum("bld,blv->dv", x, expected)
    for first, second in zip(actual, exact, strict=True):
        error = np.linalg.norm(np.asarray(first, np.float64) - second)
        assert error <= within * np.linalg.norm(second)


def test_bfloat16_logits_have_bfloat16_gradient_products() -> None:
    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 8, 16), (16, 40))]

    def loss(x: jax.Array, head: jax.Array) -> jax.Array:
        return jnp.square(language_model._project_logits(x, head, jnp.dtype("float32"))).sum()

    equations = _equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*like).jaxpr)
    products = [equation for equation in equations if "dot" in str(equation)]
    read = {operand.aval.dtype.name for eqn in products for operand in eqn.invars}
    assert len(products) == 3 and read == {"bfloat16"}


@pytest.mark.parametrize(("platform", "dimensions"), [("cpu", 2), ("gpu", 3)])
def test_product_merges_rows_on_cpu_only(platform: str, dimensions: int) -> None:
    """For a sum over mp with one axis of rows, XLA makes no reduce-scatter on GPUs."""
    device = jax.sharding.AbstractDevice(platform, None, platform)
    mesh = jax.sharding.AbstractMesh((2,), ("mp",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.make_jaxpr(apply_kernel)(jnp.ones((2, 8, 16)), jnp.ones((16, 40)))
    (dot,) = (eqn for eqn in _equations(traced.jaxpr) if eqn.primitive.name == "dot_general")
    assert len(dot.invars[0].aval.shape) == dimensions
    assert traced.out_avals[0].shape == (2, 8, 40)


def _equations(jaxpr: Any) -> list[Any]:
    actual = []
    for eqn in jaxpr.eqns:
        inner = list(jaxprs_in_params(eqn.params))
        actual += [first for item in inner for first in _equations(item)] if inner else [eqn]
    return actual
