"""A stand-in for a fused kernel where a plan is traced without the kernel's devices.

To JAX it is one operation, as a kernel is: no policy of rematerialization sees what it computes inside, and the
backward pass keeps its operands, its result and one number a row. B batch, L length, H query heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

KERNEL = Primitive("fused_attention")
KERNEL.multiple_results = True


def fused(plain: Callable[..., Array]) -> Callable[..., Array]:
    """`plain` attention as one operation; shapes, dtypes and `keys`, a tree of arrays, as those of `plain`."""
    return partial(_attend, plain)


def _attend(
    plain: Callable[..., Array], query: Array, key: Array, value: Array, keys: Any, **scores: bool | float | None
) -> Array:
    given, tree = jax.tree.flatten(keys)
    mixed_BLHK: Array = _kernel(partial(_unflattened, plain, tree, scores), query, key, value, given)
    return mixed_BLHK


def _unflattened(plain: Callable[..., Array], tree: Any, scores: Mapping[str, Any], *operands: Array) -> Array:
    query_BLHK, key_BLGK, value_BLGK, *given = operands
    return plain(query_BLHK, key_BLGK, value_BLGK, jax.tree.unflatten(tree, given), **scores)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _kernel(plain: Callable[..., Array], query: Array, key: Array, value: Array, given: list[Array]) -> Array:
    mixed_BLHK: Array = KERNEL.bind(query, key, value, *given, plain=plain)[0]
    return mixed_BLHK


def _forward(plain: Callable[..., Array], query: Array, key: Array, value: Array, given: list[Array]) -> Any:
    mixed_BLHK, log_sum_BHL = KERNEL.bind(query, key, value, *given, plain=plain)
    return mixed_BLHK, (query, key, value, given, mixed_BLHK, log_sum_BHL)


def _backward(plain: Callable[..., Array], kept: Any, cotangent: Array) -> Any:
    *operands, given, _, _ = kept
    gradients = jax.vjp(lambda *operands: plain(*operands, *given), *operands)[1](cotangent)
    return *gradients, [None] * len(given)


_kernel.defvjp(_forward, _backward)


def _shapes(query: Any, *operands: Any, plain: Callable[..., Array]) -> Any:
    *batch, length, heads, _ = query.shape
    return query.update(weak_type=False), query.update(shape=(*batch, heads, length), dtype=jnp.dtype(jnp.float32))


def _computed(query: Array, *operands: Array, plain: Callable[..., Array]) -> tuple[Array, Array]:
    *batch, length, heads, _ = query.shape
    return plain(query, *operands), jnp.zeros((*batch, heads, length), jnp.float32)


def _batched(operands: Sequence[Array], dims: Sequence[int | None], *, plain: Callable[..., Array]) -> Any:
    """The same operation with one more dimension before the others: what is mapped over, of the query at least."""
    (query, *others), (at, *places) = operands, dims
    if at is None:
        size = next(each.shape[place] for each, place in zip(others, places, strict=True) if place is not None)
        query, at = jnp.broadcast_to(query, (size, *query.shape)), 0
    mapped = jax.vmap(plain, (0, *places))
    return KERNEL.bind(jnp.moveaxis(query, at, 0), *others, plain=mapped), (0, 0)


KERNEL.def_abstract_eval(_shapes)
mlir.register_lowering(KERNEL, mlir.lower_fun(_computed, multiple_results=True))
batching.primitive_batchers[KERNEL] = _batched
