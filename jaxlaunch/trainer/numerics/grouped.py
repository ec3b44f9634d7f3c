"""Products of sorted rows with the matrix of their group, for GPUs.

On GPUs XLA implements `jax.lax.ragged_dot` as a product of the whole row buffer with every matrix.
Here a loop multiplies one block of rows at a time, and runs only for the rows that exist. A block
may begin at any row; its rows of the next group are masked. This follows MegaBlocks (Gale et al.
2022), with blocks large enough for XLA's own products.

R rows of the buffer, E groups, I inputs, O outputs, M rows of a block.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.trainer.numerics import flops

# With fewer rows an H100 takes longer to read a matrix than to multiply it, at 295 FLOPs per byte.
_MIN_BLOCK = 256
# Overhead of an iteration in FLOPs: those of an H100 in 20 µs, in which a few kernels are launched
# and the host learns whether another iteration follows.
_TURN = 2e10

# Expected iterations of a loop, in the metadata of its operation. `_turns_scope` writes it.
TURNS = re.compile(r'/(\d+\.\d+)_turns/while"')


def is_loop_faster(rows: int, room: int, shape: tuple[int, ...]) -> bool:
    """Return whether the loop over a mean of `rows` is faster than a product of all `room` rows."""
    groups, inputs, outputs = shape
    block = _block_rows(rows / groups, room, inputs * outputs)
    turns = groups * _expected_turns(rows / groups, block)
    return 2.0 * inputs * outputs * (groups * room - turns * block) >= _TURN * turns


def grouped_product(x_RI: Array, w_EIO: Array, counts_E: Array, rows: int) -> Array:
    """Return jax.lax.ragged_dot(x_RI, w_EIO, counts_E) for a mean of `rows` rows."""
    # Inside a shard_map both must vary over the same axes, so that their gradients are summed.
    zero_x, zero_w = (jnp.zeros_like(array, shape=()) for array in (x_RI, w_EIO))
    x_RI, w_EIO = x_RI + zero_w.astype(x_RI.dtype), w_EIO + zero_x.astype(w_EIO.dtype)
    result: Array = _jitted_product(x_RI, w_EIO, counts_E, share=rows / len(counts_E))
    return result


def _call_product(x_RI: Array, w_EIO: Array, counts_E: Array, *, share: float) -> Array:
    return _loop_product(x_RI, w_EIO, counts_E, share)


# FLOPs are counted by the name of this call.
_call_product.__name__ = flops.GROUPED_PRODUCT
_jitted_product = jax.jit(_call_product, static_argnames="share")


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loop_product(x_RI: Array, w_EIO: Array, counts_E: Array, share: float) -> Array:
    """Return the product of rows and matrices for a mean of `share` rows per group."""
    return _multiply_groups(x_RI, w_EIO, counts_E, 1, share)


def _loop_product_forward(
    x_RI: Array, w_EIO: Array, counts_E: Array, share: float
) -> tuple[Array, Any]:
    return _loop_product(x_RI, w_EIO, counts_E, share), (x_RI, w_EIO, counts_E)


def _loop_product_backward(
    share: float, residuals: tuple[Array, Array, Array], gradient_RO: Array
) -> tuple[Array, Array, None]:
    x_RI, w_EIO, counts_E = residuals
    w_gradient_EIO = _sum_groups(x_RI, gradient_RO, counts_E, share)
    # The gradient of the rows comes second, because the rows can be freed after the gradient of the
    # matrices.
    w_gradient_EIO, gradient_RO = jax.lax.optimization_barrier((w_gradient_EIO, gradient_RO))
    x_gradient_RI = _multiply_groups(gradient_RO, w_EIO, counts_E, 2, share)
    return x_gradient_RI.astype(x_RI.dtype), w_gradient_EIO.astype(w_EIO.dtype), None


_loop_product.defvjp(_loop_product_forward, _loop_product_backward)


def _multiply_groups(x_RI: Array, w_EIO: Array, counts_E: Array, over: int, share: float) -> Array:
    """Multiply each group's rows with its matrix over the matrix axis `over`."""
    room, groups = len(x_RI), len(counts_E)
    block, ends_E = _block_rows(share, room, math.prod(w_EIO.shape[1:])), jnp.cumsum(counts_E)

    def multiply_group(group: Array, made_RO: Array) -> Array:
        # Without the barrier the compiler copies the matrix in every iteration of the inner loop.
        w_IO = jax.lax.optimization_barrier(w_EIO[group])
        rows = _GroupRows(ends_E[group] - counts_E[group], ends_E[group], block, room)

        def multiply_block(turn: Array, made_RO: Array) -> Array:
            contracted = ((1,), (over - 1,)), ((), ())
            made_MO = jax.lax.dot_general(rows.slice_block(x_RI, turn), w_IO, contracted)
            kept_MO = jnp.where(rows.is_own_M1(turn), made_MO, rows.slice_block(made_RO, turn))
            return jax.lax.dynamic_update_slice_in_dim(made_RO, kept_MO, rows.block_start(turn), 0)

        with _turns_scope(_expected_turns(share, block)):
            result: Array = jax.lax.fori_loop(0, rows.turns, multiply_block, made_RO)
            return result

    # The zeros depend on the arguments, although no count is below 0. Otherwise the compiler would
    # share one buffer of zeros between products, and copy it for each.
    zero = jnp.where(counts_E[0] < 0, w_EIO[0, 0, 0], jnp.zeros((), w_EIO.dtype))
    zero = zero.astype(jnp.result_type(x_RI, w_EIO))
    nothing_RO = jnp.broadcast_to(zero, (room, w_EIO.shape[3 - over]))
    result: Array = jax.lax.fori_loop(0, groups, multiply_group, nothing_RO)
    return result


def _sum_groups(x_RI: Array, gradient_RO: Array, counts_E: Array, share: float) -> Array:
    """Return the gradient of the matrices [E, I, O], accumulated in float32.

    The blocks have twice as many rows as in the forward pass, because every block after the first
    reads and writes the sum.
    """
    room, ends_E = len(x_RI), jnp.cumsum(counts_E)
    block = min(2 * _block_rows(share, room, x_RI.shape[1] * gradient_RO.shape[1]), room)
    dtype = jnp.result_type(x_RI, gradient_RO)
    wide = jnp.float32 if dtype.itemsize < 4 else dtype

    def sum_group(bounds: tuple[Array, Array]) -> Array:
        rows = _GroupRows(*bounds, block, room)

        def sum_block(turn: int | Array) -> Array:
            is_own_M1, over_rows = rows.is_own_M1(turn), (((0,), (0,)), ((), ()))
            x_MI, gradient_MO = (
                jnp.where(is_own_M1, rows.slice_block(array, turn), jnp.zeros((), array.dtype))
                for array in (x_RI, gradient_RO)
            )
            return jax.lax.dot_general(x_MI, gradient_MO, over_rows, preferred_element_type=wide)

        first_IO = sum_block(0)
        with _turns_scope(_expected_turns(share, block) - 1.0):
            sum_IO: Array = jax.lax.fori_loop(
                1, rows.turns, lambda turn, sum_IO: sum_IO + sum_block(turn), first_IO
            )
        return sum_IO.astype(dtype)

    result: Array = jax.lax.map(sum_group, (ends_E - counts_E, ends_E))
    return result


class _GroupRows:
    """The rows of one group, from `begin` to `end` of the buffer, in blocks.

    The last block of a group includes rows of the next one. At the end of the buffer it begins
    earlier to be complete.
    """

    def __init__(self, begin: Array, end: Array, block: int, room: int) -> None:
        self._begin, self._end, self._block, self._room = begin, end, block, room
        self.turns = (end - begin + block - 1) // block

    def block_start(self, turn: int | Array) -> Array:
        return jnp.minimum(self._begin + turn * self._block, self._room - self._block)

    def slice_block(self, rows_RX: Array, turn: int | Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(rows_RX, self.block_start(turn), self._block)

    def is_own_M1(self, turn: int | Array) -> Array:
        """Return which rows of the block belong to the group and to no earlier block."""
        at_M1 = self.block_start(turn) + jnp.arange(self._block)[:, None]
        return (at_M1 >= self._begin + turn * self._block) & (at_M1 < self._end)


def _block_rows(share: float, room: int, products: int) -> int:
    """Return the number of rows in a block, a power of two unless the buffer is smaller.

    A group has a mean of `share` rows, and each row takes `products` multiplications. The overhead
    of a group's iterations equals the cost of the half block that it wastes in the mean. A block
    has at most twice the group's rows.
    """
    ideal_rows = min(math.sqrt(share * _TURN / products), 2.0 * share)
    return min(room, max(_MIN_BLOCK, 1 << math.floor(math.log2(max(ideal_rows, 1.0)))))


def _expected_turns(share: float, block: int) -> float:
    """Return the expected blocks of a group, the last of which is half empty."""
    return max(1.0, share / block + 0.5)


def _turns_scope(expected: float) -> Any:
    """Return a scope that records the expected iterations of a loop in the compiled program."""
    return jax.named_scope(f"{expected:.3f}_turns")
