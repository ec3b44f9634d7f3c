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
def test_a_layer_without_products_keeps_no_more_than_what_it_reads(layer: Any, reads: int) -> None:
    """Not what it makes of it meanwhile, in float32."""

    if isinstance(layer, nnx.Module):
        nnx.update(layer, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(layer)))

    def loss(shift: jax.Array, *x: jax.Array) -> tuple[jax.Array, None]:
        return layer(*(each + shift for each in x)).astype(jnp.float32).sum(), None

    kept = memory.residual_bytes(loss, jax.ShapeDtypeStruct((1, 1, 1), jnp.bfloat16), *[X] * reads)
    read = reads * ROWS * WIDTH * 2
    assert read <= kept <= 1.1 * read


@pytest.mark.parametrize(
    ("dtype", "within"), [("float32", 1e-6), ("float16", 1e-3), ("bfloat16", 8e-3)]
)
def test_the_gradients_of_logits_are_those_of_a_product(dtype: str, within: float) -> None:
    """Against float64."""
    random = np.random.default_rng(0)
    x, head, wanted = (random.normal(size=size) for size in ((2, 8, 16), (16, 40), (2, 8, 40)))
    x, head = (np.asarray(jnp.array(each, dtype), np.float64) for each in (x, head))

    def loss(x: jax.Array, head: jax.Array) -> jax.Array:
        return (
            language_model._project_logits(x, head, jnp.dtype("float32"))
            * jnp.array(wanted, jnp.float32)
        ).sum()

    found = jax.grad(loss, (0, 1))(jnp.array(x, dtype), jnp.array(head, dtype))
    assert {each.dtype.name for each in found} == {dtype}
    exact = wanted @ head.T, np.einsum("bld,blv->dv", x, wanted)
    for one, other in zip(found, exact, strict=True):
        assert np.linalg.norm(np.asarray(one, np.float64) - other) <= within * np.linalg.norm(other)


def test_logits_of_bfloat16_are_differentiated_by_products_of_bfloat16() -> None:
    like = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((2, 8, 16), (16, 40))]

    def loss(x: jax.Array, head: jax.Array) -> jax.Array:
        return jnp.square(language_model._project_logits(x, head, jnp.dtype("float32"))).sum()

    products = [
        eqn
        for eqn in _equations(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*like).jaxpr)
        if "dot" in str(eqn)
    ]
    read = {operand.aval.dtype.name for eqn in products for operand in eqn.invars}
    assert len(products) == 3 and read == {"bfloat16"}


@pytest.mark.parametrize(("platform", "dimensions"), [("cpu", 2), ("gpu", 3)])
def test_a_product_merges_rows_on_cpu_devices_alone(platform: str, dimensions: int) -> None:
    """Of a sum over mp whose rows are one axis XLA's GPU compiler makes no reduce-scatter along the positions."""
    device = jax.sharding.AbstractDevice(platform, None, platform)
    with jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((2,), ("mp",), abstract_device=device)
    ):
        traced = jax.make_jaxpr(apply_kernel)(jnp.ones((2, 8, 16)), jnp.ones((16, 40)))
    (dot,) = (eqn for eqn in _equations(traced.jaxpr) if eqn.primitive.name == "dot_general")
    assert len(dot.invars[0].aval.shape) == dimensions
    assert traced.out_avals[0].shape == (2, 8, 40)


def _equations(jaxpr: Any) -> list[Any]:
    found = []
    for eqn in jaxpr.eqns:
        inner = list(jaxprs_in_params(eqn.params))
        found += [one for each in inner for one in _equations(each)] if inner else [eqn]
    return found
