"""The product of sorted rows with the matrices of their groups, against a NumPy reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from jaxlaunch.trainer.aot import step_time
from jaxlaunch.trainer.numerics import grouped
from jaxlaunch.trainer.numerics.hlo import Program

INPUTS, OUTPUTS = 12, 20
# Rows that there is room for, and the rows of each group.
CASES: dict[str, tuple[int, Sequence[int]]] = {
    "one group": (40, [40]),
    "one group, no row": (40, [0]),
    "one group, room for more": (40, [13]),
    "all of one": (64, [0, 0, 64, 0, 0, 0, 0, 0]),
    "the last alone": (64, [0, 0, 0, 5]),
    "whole blocks": (64, [8] * 8),
    "parts of blocks and room for more": (70, [3, 0, 9, 17, 1, 0, 8, 2]),
    "many groups": (100, [1, 0] * 32),
    "less room than a block": (5, [1, 0, 2, 0]),
    "many blocks": (200, [100, 0, 77]),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "_block_rows", lambda share, room, products: min(16, room))


def make_arrays(room: int, counts: Sequence[int], dtype: str = "float32") -> list[jax.Array]:
    """Rows, matrices, a gradient of the result and the rows of each group; NaN where no row is."""
    rng = np.random.default_rng(0)
    shapes = ((room, INPUTS), (len(counts), INPUTS, OUTPUTS), (room, OUTPUTS))
    x, w, gradient = map(rng.standard_normal, shapes)
    x[sum(counts) :] = gradient[sum(counts) :] = np.nan
    return [*(jnp.asarray(array, dtype) for array in (x, w, gradient)), jnp.int32(counts)]


def reference_products(
    x: jax.Array, w: jax.Array, gradient: jax.Array, counts: jax.Array
) -> list[np.ndarray]:
    """The product and the gradients of rows and of matrices, in float64."""
    x, w, gradient = (np.asarray(item, np.float64) for item in (x, w, gradient))
    outputs, of_x, of_w, begin = np.zeros((len(x), OUTPUTS)), np.zeros_like(x), np.zeros_like(w), 0
    for group, count in enumerate(counts.tolist()):
        rows = slice(begin, begin + count)
        outputs[rows], of_x[rows] = x[rows] @ w[group], gradient[rows] @ w[group].T
        of_w[group] = x[rows].T @ gradient[rows]
        begin += count
    return [outputs, of_x, of_w]


@pytest.mark.parametrize(
    ("dtype", "within"), [("float32", 1e-5), ("bfloat16", 2**-7), ("float16", 2**-9)]
)
@pytest.mark.parametrize("case", CASES)
def test_product_and_gradients_equal_a_numpy_reference(
    case: str, dtype: str, within: float
) -> None:
    x, w, gradient, counts = make_arrays(*CASES[case], dtype)
    outputs, back = jax.vjp(lambda x, w: grouped.grouped_product(x, w, counts, rows=len(x)), x, w)
    references = reference_products(x, w, gradient, counts)
    for actual, expected in zip((outputs, *back(gradient)), references, strict=True):
        assert actual.dtype == dtype
        actual, atol = np.asarray(actual, np.float64), within * max(1.0, np.abs(expected).max())
        np.testing.assert_allclose(actual, expected, rtol=within, atol=atol)


def test_mixed_dtypes_equal_ragged_dot() -> None:
    x, w, gradient, counts = make_arrays(*CASES["one group"])
    w = w.astype("bfloat16")
    with jax.numpy_dtype_promotion("standard"):
        actual, back = jax.vjp(lambda x, w: grouped.grouped_product(x, w, counts, 40), x, w)
        expected, ragged_back = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, counts), x, w)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
        for first, second in zip(back(gradient), ragged_back(gradient), strict=True):
            assert first.dtype == second.dtype


def test_remat_in_a_scan_keeps_the_gradients() -> None:
    x, w, _, counts = make_arrays(*CASES["parts of blocks and room for more"])
    x, stacked = jnp.nan_to_num(x), jnp.stack([w, -w])

    def loss(stacked: jax.Array, is_loop: bool) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            multiply = partial(grouped.grouped_product, rows=70) if is_loop else jax.lax.ragged_dot
            outputs = multiply(x, w, counts)
            return x + jnp.tanh(checkpoint_name(outputs, "gate"))[:, :INPUTS], None

        policy = jax.checkpoint_policies.save_only_these_names("gate")
        return jax.lax.scan(jax.checkpoint(layer, policy=policy), x, stacked)[0].sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    actual, expected = gradient(stacked, True), gradient(stacked, False)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "room", "shape", "is_loop"),
    [
        (4096, 16384, (1, 4096, 14336), True),  # an expert of Mixtral, of 8 devices
        (4096, 4096, (8, 4096, 14336), True),  # all of them on one device
        (16384, 16384, (128, 2048, 768), True),  # those of Qwen 3
        (4096, 4096, (1, 4096, 14336), False),  # nothing is spared
        (4096, 4096, (8, 256, 512), False),  # all of it takes less time than a turn of the loop
        (16, 16, (8, 4096, 14336), False),  # as few rows as are generated at once
    ],
)
def test_loop_is_faster_if_it_saves_more_than_its_overhead(
    rows: int, room: int, shape: tuple[int, ...], is_loop: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert grouped.is_loop_faster(rows, room, shape) == is_loop


@pytest.mark.parametrize(
    ("share", "room", "inputs", "outputs", "block"),
    [
        (4096, 16384, 4096, 14336, 1024),  # Mixtral, an expert a device
        (512, 4096, 4096, 14336, 256),  # all experts
        (
            1024,
            131072,
            2048,
            768,
            2048,
        ),  # Qwen 3, whose products take less time than a turn: one block, if it can be
        (64, 4096, 4096, 14336, 256),
        (64, 128, 4096, 14336, 128),
    ],
)
def test_block_size_depends_on_the_cost_of_rows(
    share: int, room: int, inputs: int, outputs: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert grouped._block_rows(share, room, inputs * outputs) == block


def test_compiled_program_has_expected_trip_counts() -> None:
    """Four groups of 40 rows in the mean, in blocks of 16, and of 32 for the gradient."""
    x, w, gradient, counts = make_arrays(320, [40, 40, 40, 40])

    def step(x: Any, w: Any, gradient: Any, counts: Any) -> tuple[jax.Array, ...]:
        outputs, back = jax.vjp(lambda x, w: grouped.grouped_product(x, w, counts, rows=160), x, w)
        return outputs, *back(gradient)

    compiled = jax.jit(step).lower(x, w, gradient, counts).compile()
    program = Program.from_text(compiled.as_text() or "")
    products: dict[float, float] = {}
    for name, times in program.executions.items():
        for item in program.computations[name]:
            for _, flops in step_time.matrix_products(program, item, program.computations[name]):
                products[times] = products.get(times, 0.0) + flops / (2 * INPUTS * OUTPUTS)
    assert products == {4 * (40 / 16 + 0.5): 16 + 16, 4: 32, 4 * (40 / 32 - 0.5): 32}
