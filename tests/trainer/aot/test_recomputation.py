"""The share of a step that is computed again, of programs whose products can be counted by hand."""

# ruff: noqa: E501  # the text of programs

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import Array

from jaxlaunch.trainer.aot import step_time
from jaxlaunch.trainer.numerics.hlo import Program

LAYERS, WIDTH = 6, 64


@pytest.mark.parametrize(("is_kept", "repeated"), [(True, 0.0), (False, 1 / 4)])
def test_rematerialized_layer_is_a_quarter_of_products(is_kept: bool, repeated: float) -> None:
    """Forward one product, backward two, and one again."""

    def loss(weights: Array, x: Array) -> Array:
        def layer(x: Array, weight: Array) -> tuple[Array, None]:
            return jnp.tanh(x @ weight), None

        return jax.lax.scan(layer if is_kept else jax.checkpoint(layer), x, weights)[0].sum()

    shapes = (
        jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), "float32"),
        jax.ShapeDtypeStruct((32, WIDTH), "float32"),
    )
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile().as_text()
    assert step_time.recomputed_share(Program.from_text(text or "")) == pytest.approx(
        repeated, abs=0.01
    )


def test_recomputed_share_prefers_cycles_times_trips() -> None:
    text = """HloModule step, is_scheduled=true

%body (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]{0}) parameter(0)
  %again = f32[8]{0} add(%a), metadata={op_name="x/rematted_computation/add"}, backend_config={"estimated_cycles":"10"}
}

%end (b: (s32[], f32[8])) -> pred[] {
  %b = (s32[], f32[8]{0}) parameter(0)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %first = f32[8]{0} add(%p, %p), metadata={op_name="x/add"}, backend_config={"estimated_cycles":"60"}
  %loop = (s32[], f32[8]{0}) while(%p), condition=%end, body=%body, backend_config={"known_trip_count":{"n":"4"}}
}
"""
    assert step_time.recomputed_share(Program.from_text(text)) == 40 / 100


def test_recomputed_loop_includes_its_body() -> None:
    """JAX traces what both passes call once, here `inner`, with the names of the first."""
    text = """HloModule step, is_scheduled=true

%inner (a: (s32[], f32[8])) -> (s32[], f32[8]) {
  %a = (s32[], f32[8]{0}) parameter(0)
  %in = f32[8]{0} add(%a), metadata={op_name="x/add"}, backend_config={"estimated_cycles":"10"}
}

%body (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %b = (s32[], f32[8]{0}) parameter(0)
  %in2 = (s32[], f32[8]{0}) while(%b), condition=%end, body=%inner, metadata={op_name="x/2.500_iterations/while"}
}

%end (c: (s32[], f32[8])) -> pred[] {
  %c = (s32[], f32[8]{0}) parameter(0)
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %first = f32[8]{0} add(%p, %p), metadata={op_name="x/add"}, backend_config={"estimated_cycles":"60"}
  %l = (s32[]) while(%p), condition=%end, body=%body, metadata={op_name="x/rematted_computation/4.000_iterations/while"}
}
"""
    assert step_time.recomputed_share(Program.from_text(text)) == 100 / 160
