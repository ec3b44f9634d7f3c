"""A ragged dot for GPUs: the product of each row with the matrix of its group.

On GPUs XLA implements `jax.lax.ragged_dot` as a product of the whole row buffer with every matrix.
Here, a loop multiplies one block of rows per iteration, and runs only for rows that are in use. The
rows are sorted by group. A block may begin at any row, and its rows of the next group are masked.
This follows MegaBlocks (Gale et al. 2022), with blocks large enough for XLA's own products.

Shapes: R rows of the buffer (its capacity), E groups, I inputs, O outputs, M rows of a block.
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

# An H100 has 295 FLOPs per byte of memory bandwidth. With fewer rows it takes longer to read a
# matrix than to multiply with it.
_MIN_BLOCK_ROWS = 256
# The overhead of an iteration, as FLOPs of an H100 in 20 µs: a few kernels are launched, and the
# host reads whether another iteration follows.
_ITERATION_FLOPS = 2e10

# The scope that `_iterations_scope` writes into the metadata of a loop.
ITERATIONS = re.compile(r'/(\d+\.\d+)_iterations/while"')


def is_loop_faster(rows: int, capacity: int, shape: tuple[int, ...]) -> bool:
    """Return whether the loop is faster than a product of the whole buffer with every matrix.

    On average `rows` of the buffer's `capacity` are in use. `shape` is that of the matrices.
    """
    groups, inputs, outputs = shape
    block = _block_rows(rows / groups, capacity, inputs * outputs)
    iterations = groups * _expected_iterations(rows / groups, block)
    saved_rows = groups * capacity - iterations * block
    return 2.0 * inputs * outputs * saved_rows >= _ITERATION_FLOPS * iterations


def grouped_product(x_RI: Array, w_EIO: Array, counts_E: Array, rows: int) -> Array:
    """Return jax.lax.ragged_dot(x_RI, w_EIO, counts_E), where `rows` rows are in use on average."""
    # Inside a shard_map both arguments must vary over the same mesh axes, so that their gradients
    # are summed over them.
    zero_x, zero_w = (jnp.zeros_like(array, shape=()) for array in (x_RI, w_EIO))
    x_RI, w_EIO = x_RI + zero_w.astype(x_RI.dtype), w_EIO + zero_x.astype(w_EIO.dtype)
    result: Array = _jitted_product(x_RI, w_EIO, counts_E, mean_rows=rows / len(counts_E))
    return result


def _call_product(x_RI: Array, w_EIO: Array, counts_E: Array, *, mean_rows: float) -> Array:
    return _loop_product(x_RI, w_EIO, counts_E, mean_rows)


# FLOPs are counted by the name of this call.
_call_product.__name__ = flops.GROUPED_PRODUCT
_jitted_product = jax.jit(_call_product, static_argnames="mean_rows")


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _loop_product(x_RI: Array, w_EIO: Array, counts_E: Array, mean_rows: float) -> Array:
    """Return the product of rows and matrices, for `mean_rows` rows per group on average."""
    return _multiply_groups(x_RI, w_EIO, counts_E, 1, mean_rows)


def _loop_product_forward(
    x_RI: Array, w_EIO: Array, counts_E: Array, mean_rows: float
) -> tuple[Array, Any]:
    return _loop_product(x_RI, w_EIO, counts_E, mean_rows), (x_RI, w_EIO, counts_E)


def _loop_product_backward(
    mean_rows: float, residuals: tuple[Array, Array, Array], gradient_RO: Array
) -> tuple[Array, Array, None]:
    x_RI, w_EIO, counts_E = residuals
    w_gradient_EIO = _sum_groups(x_RI, gradient_RO, counts_E, mean_rows)
    # The barrier puts the gradient of the rows second. The rows themselves can then be freed first.
    w_gradient_EIO, gradient_RO = jax.lax.optimization_barrier((w_gradient_EIO, gradient_RO))
    x_gradient_RI = _multiply_groups(gradient_RO, w_EIO, counts_E, 2, mean_rows)
    return x_gradient_RI.astype(x_RI.dtype), w_gradient_EIO.astype(w_EIO.dtype), None


_loop_product.defvjp(_loop_product_forward, _loop_product_backward)


def _multiply_groups(
    x_RI: Array, w_EIO: Array, counts_E: Array, axis: int, mean_rows: float
) -> Array:
    """Multiply the rows of each group with its matrix, contracting `axis` of `w_EIO`."""
    capacity, groups = len(x_RI), len(counts_E)
    block = _block_rows(mean_rows, capacity, math.prod(w_EIO.shape[1:]))
    ends_E = jnp.cumsum(counts_E)

    def multiply_group(group: Array, output_RO: Array) -> Array:
        # Without the barrier the compiler copies the matrix in every iteration of the inner loop.
        w_IO = jax.lax.optimization_barrier(w_EIO[group])
        rows = _GroupRows(ends_E[group] - counts_E[group], ends_E[group], block, capacity)

        def multiply_block(iteration: Array, output_RO: Array) -> Array:
            contracted = ((1,), (axis - 1,)), ((), ())
            product_MO = jax.lax.dot_general(rows.slice_block(x_RI, iteration), w_IO, contracted)
            old_MO = rows.slice_block(output_RO, iteration)
            new_MO = jnp.where(rows.is_own_M1(iteration), product_MO, old_MO)
            return jax.lax.dynamic_update_slice_in_dim(
                output_RO, new_MO, rows.block_start(iteration), 0
            )

        with _iterations_scope(_expected_iterations(mean_rows, block)):
            result: Array = jax.lax.fori_loop(0, rows.iterations, multiply_block, output_RO)
            return result

    # The zeros depend on the arguments, although no count is negative. Otherwise the compiler would
    # share one buffer of zeros between all products, and copy it for each of them.
    zero = jnp.where(counts_E[0] < 0, w_EIO[0, 0, 0], jnp.zeros((), w_EIO.dtype))
    zero = zero.astype(jnp.result_type(x_RI, w_EIO))
    zeros_RO = jnp.broadcast_to(zero, (capacity, w_EIO.shape[3 - axis]))
    result: Array = jax.lax.fori_loop(0, groups, multiply_group, zeros_RO)
    return result


def _sum_groups(x_RI: Array, gradient_RO: Array, counts_E: Array, mean_rows: float) -> Array:
    """Return the gradient of the matrices [E, I, O], accumulated in float32.

    The blocks have twice as many rows as in the forward pass, because each block after the first
    one reads and writes the sum.
    """
    capacity, ends_E = len(x_RI), jnp.cumsum(counts_E)
    products = x_RI.shape[1] * gradient_RO.shape[1]
    block = min(2 * _block_rows(mean_rows, capacity, products), capacity)
    dtype = jnp.result_type(x_RI, gradient_RO)
    sum_dtype = jnp.float32 if dtype.itemsize < 4 else dtype

    def sum_group(bounds: tuple[Array, Array]) -> Array:
        rows = _GroupRows(*bounds, block, capacity)

        def sum_block(iteration: int | Array) -> Array:
            is_own_M1, over_rows = rows.is_own_M1(iteration), (((0,), (0,)), ((), ()))
            x_MI, gradient_MO = (
                jnp.where(is_own_M1, rows.slice_block(array, iteration), jnp.zeros((), array.dtype))
                for array in (x_RI, gradient_RO)
            )
            return jax.lax.dot_general(
                x_MI, gradient_MO, over_rows, preferred_element_type=sum_dtype
            )

        first_IO = sum_block(0)
        with _iterations_scope(_expected_iterations(mean_rows, block) - 1.0):
            sum_IO: Array = jax.lax.fori_loop(
                1,
                rows.iterations,
                lambda iteration, sum_IO: sum_IO + sum_block(iteration),
                first_IO,
            )
        return sum_IO.astype(dtype)

    result: Array = jax.lax.map(sum_group, (ends_E - counts_E, ends_E))
    return result


class _GroupRows:
    """The rows of one group, from `begin` to `end` of the buffer, in blocks of equal size.

    The last block also has rows of the next group. At the end of the buffer it has rows of the
    previous block instead.
    """

    def __init__(self, begin: Array, end: Array, block: int, capacity: int) -> None:
        self._begin, self._end, self._block, self._capacity = begin, end, block, capacity
        self.iterations = (end - begin + block - 1) // block

    def block_start(self, iteration: int | Array) -> Array:
        return jnp.minimum(self._begin + iteration * self._block, self._capacity - self._block)

    def slice_block(self, rows_RX: Array, iteration: int | Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(rows_RX, self.block_start(iteration), self._block)

    def is_own_M1(self, iteration: int | Array) -> Array:
        """Return for each row of a block whether it is in the group and in no earlier block."""
        index_M1 = self.block_start(iteration) + jnp.arange(self._block)[:, None]
        return (index_M1 >= self._begin + iteration * self._block) & (index_M1 < self._end)


def _block_rows(mean_rows: float, capacity: int, products: int) -> int:
    """Return the number of rows in a block, a power of two unless the buffer is smaller.

    A group has `mean_rows` rows on average, and each row takes `products` multiplications. With the
    ideal size, the overhead of a group's iterations equals the cost of the half block that the
    group wastes on average. A block has at most twice the rows of a group.
    """
    ideal_rows = min(math.sqrt(mean_rows * _ITERATION_FLOPS / products), 2.0 * mean_rows)
    return min(capacity, max(_MIN_BLOCK_ROWS, 1 << math.floor(math.log2(max(ideal_rows, 1.0)))))


def _expected_iterations(mean_rows: float, block: int) -> float:
    """Return the expected number of blocks of a group, whose last one is half empty."""
    return max(1.0, mean_rows / block + 0.5)


def _iterations_scope(expected: float) -> Any:
    """Return a scope that records the expected iterations of a loop in the compiled program."""
    return jax.named_scope(f"{expected:.3f}_iterations")
