"""Implementations of attention by name.

| name | where | implementation |
|---|---|---|
| xla | everywhere | the scores of all pairs of positions, with the softmax in float32 |
| cudnn | CUDA devices, float16 and bfloat16 | cuDNN's fused kernel, without an array of all pairs |
| splash | TPU, lengths that are multiples of 128 | JAX's Pallas kernel, which skips masked blocks |

availability.py replaces `auto` by one of these names; here it means xla.

B batch, L length, H query heads, G key and value heads, K head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.numerics import flops


class Visible(NamedTuple):
    """Restrictions on the keys that a query sees, in addition to causality; None means none.

    Attributes:
        mask_BL: Keys whose mask is 0 are hidden from all queries.
        segments_BL: A query sees only keys of its own segment, for rows that pack several examples.
        lengths_B: Keys at or after this position are hidden, for rows that are padded at their end.
    """

    mask_BL: Array | None = None
    segments_BL: Array | None = None
    lengths_B: Array | None = None

    def to_keys(self) -> dict[str, Array]:
        """Return the restrictions by their keys in an example."""
        restrictions = zip(("attention_mask", "segments", "length"), self, strict=True)
        return {key: array for key, array in restrictions if array is not None}

    def pairs_B1LL(self, length: int) -> Array | None:
        """Return which pairs of a query and a key are visible, or None if all are.

        The boolean mask is [B, 1, L, L], or [B, 1, 1, L] if all queries see the same keys.
        """
        masks = []
        if self.mask_BL is not None:
            masks.append((self.mask_BL != 0)[:, None, None, :])
        if self.segments_BL is not None:
            masks.append(self.segments_BL[:, None, :, None] == self.segments_BL[:, None, None, :])
        if self.lengths_B is not None:
            index_L = jnp.arange(length)
            masks.append(index_L[None, None, None, :] < self.lengths_B[:, None, None, None])
        return reduce(jnp.logical_and, masks) if masks else None

    @property
    def positions_BL(self) -> Array | None:
        """Position of each token in its segment, from 0; None without segments."""
        if self.segments_BL is None:
            return None
        index_L = jnp.arange(self.segments_BL.shape[1])
        index_BL = jnp.broadcast_to(index_L[None, :], self.segments_BL.shape)
        is_first_BL = jnp.diff(self.segments_BL, axis=1, prepend=self.segments_BL[:, :1] - 1) != 0
        return index_BL - jax.lax.cummax(jnp.where(is_first_BL, index_BL, 0), axis=1)


class Scores(NamedTuple):
    """Options of the attention scores.

    Attributes:
        is_causal: Whether a query sees only the keys up to its own position.
        window: Number of the last of these keys that it sees, including its own.
        cap: Bound of the scores, applied with a tanh.
        scale: Factor of the scores, K^-½ by default.
    """

    is_causal: bool
    window: int | None = None
    cap: float | None = None
    scale: float | None = None


# A score far below all others, which stays finite when another score is subtracted from it.
MASKED_SCORE = -1e38
# A placeholder for a fused kernel in plans. A job cannot name it.
FUSED = "fused"
# Splash attention names its own result and the residuals of its backward pass.
SPLASH = "splash"
# The name by which policies of rematerialization keep the result of attention.
ATTENTION_OUTPUT = "mixed"
# The keys that queries see: everything, a mask [B, L], or further restrictions.
Keys = Array | Visible | None
# (query_BLHK, key_BLGK, value_BLGK, keys) -> output_BLHK. Query head h reads key head h // (H / G).
# For a query that sees no key the output is the mean of some values. It is finite, so its gradient
# is 0 if the loss gives the position no weight.
Attention = Callable[[Array, Array, Array, Keys], Array]


def as_visible(keys: Keys) -> Visible:
    """Convert `keys` to a Visible; an array is a mask."""
    return keys if isinstance(keys, Visible) else Visible(keys)


def causal_attention(
    name: str, *, window: int | None = None, cap: float | None = None, scale: float | None = None
) -> Attention:
    """Return the causal implementation `name`. Raises SpecError for an unknown name."""
    attend, scores = _find_implementation(name), Scores(True, window, cap, scale)

    def attend_in_scope(query_BLHK: Array, key_BLGK: Array, value_BLGK: Array, keys: Keys) -> Array:
        # trainer/numerics/flops.py counts the operations by this scope.
        with jax.named_scope(flops.causal_scope(query_BLHK.shape[1], window)):
            return attend(query_BLHK, key_BLGK, value_BLGK, keys, scores)

    return attend_in_scope


def full_attention(name: str) -> Attention:
    """Return the implementation `name` without a causal mask. Raises SpecError."""
    return partial(_find_implementation(name), scores=Scores(False))


def _find_implementation(name: str) -> Callable[..., Array]:
    if name not in TRACED:
        raise SpecError(
            f"train.attention = {name!r} is not supported; use one of {', '.join(ATTENTION)}"
        )
    kernel = TRACED[name]

    def attend(*args: Any, **kwargs: Any) -> Array:
        mixed_BLHK: Array = kernel(*args, **kwargs)
        return mixed_BLHK if name == SPLASH else checkpoint_name(mixed_BLHK, ATTENTION_OUTPUT)

    # A profile recognizes attention by this scope.
    return jax.named_scope("attention")(attend)


def _xla_attention(
    query_BLHK: Array, key_BLGK: Array, value_BLGK: Array, keys: Keys, scores: Scores
) -> Array:
    """Compute attention with plain XLA operations.

    The heads are moved to the front, so that each is one matrix, and the scale is applied to the
    queries. On a CPU this takes half the time of jax.nn's implementation.
    """
    mask_B1LL = as_visible(keys).pairs_B1LL(key_BLGK.shape[1])
    batch, length, heads, size = query_BLHK.shape
    groups, dtype = key_BLGK.shape[2], query_BLHK.dtype
    scale = size**-0.5 if scores.scale is None else scores.scale
    operands = query_BLHK * scale, key_BLGK, value_BLGK
    # On a CPU XLA has no float16 product that accumulates in float32.
    if dtype == jnp.float16 and jax.default_backend() == "cpu":
        operands = jax.tree.map(lambda operand: operand.astype(jnp.float32), operands)
    query_BHLK, key_BGLK, value_BGLK = (operand.swapaxes(1, 2) for operand in operands)
    # R counts the queries of all heads that read the same key head.
    group_size = heads // groups
    rows = group_size * length
    query_BGRK = query_BHLK.reshape(batch, groups, rows, size)
    scores_BGRL = jnp.einsum(
        "bgrk,bglk->bgrl", query_BGRK, key_BGLK, preferred_element_type=jnp.float32
    )
    if scores.cap is not None:
        scores_BGRL = scores.cap * jnp.tanh(scores_BGRL / scores.cap)
    if scores.is_causal:
        visible_LL = jnp.tri(length, dtype=bool)
        if scores.window is not None and scores.window < length:
            visible_LL &= ~jnp.tri(length, k=-scores.window, dtype=bool)
        scores_BGRL = jnp.where(jnp.tile(visible_LL, (group_size, 1)), scores_BGRL, MASKED_SCORE)
    if mask_B1LL is not None:
        if mask_B1LL.shape[2] > 1:
            mask_B1LL = jnp.tile(mask_B1LL, (1, 1, group_size, 1))
        scores_BGRL = jnp.where(mask_B1LL, scores_BGRL, MASKED_SCORE)
    probs_BGRL = jax.nn.softmax(scores_BGRL).astype(value_BGLK.dtype)
    mixed_BGRK = jnp.einsum("bgrl,bglk->bgrk", probs_BGRL, value_BGLK)
    return mixed_BGRK.reshape(batch, heads, length, size).swapaxes(1, 2).astype(dtype)


def _cudnn_attention(
    query_BLHK: Array, key_BLGK: Array, value_BLGK: Array, keys: Keys, scores: Scores
) -> Array:
    """Compute attention with cuDNN. Raises ValueError if the scores have a cap."""
    if scores.cap is not None:
        raise ValueError("cuDNN's kernel does not support score_cap")
    visibility, length = as_visible(keys), query_BLHK.shape[1]
    # If only lengths restrict the keys, the kernel skips the keys past them without a mask.
    mask_B1LL, lengths_B = None, visibility.lengths_B
    if visibility.mask_BL is not None or visibility.segments_BL is not None:
        mask_B1LL, lengths_B = visibility.pairs_B1LL(length), None
    # JAX (0.10.2, 0.11.2) does not train with odd lengths, even without a mask, so one hidden
    # position is appended.
    pad_length = length % 2
    if pad_length and mask_B1LL is None and lengths_B is None and not scores.is_causal:
        lengths_B = jnp.full(query_BLHK.shape[0], length, jnp.int32)
    query_BLHK, key_BLGK, value_BLGK = (
        jnp.pad(operand, ((0, 0), (0, pad_length), (0, 0), (0, 0)))
        for operand in (query_BLHK, key_BLGK, value_BLGK)
    )
    if mask_B1LL is not None:
        mask_B1LL = jnp.broadcast_to(mask_B1LL, (*mask_B1LL.shape[:2], length, length))
        mask_B1LL = jnp.pad(mask_B1LL, ((0, 0), (0, 0), (0, pad_length), (0, pad_length)))
    if lengths_B is not None:
        # The softmax of a row without keys is undefined.
        lengths_B = jnp.clip(lengths_B.astype(jnp.int32), 1, length)
    window = None if scores.window is None or scores.window >= length else (scores.window - 1, 0)
    with jax.numpy_dtype_promotion("standard"):
        mixed_BLHK: Array = jax.nn.dot_product_attention(
            query_BLHK,
            key_BLGK,
            value_BLGK,
            mask=mask_B1LL,
            is_causal=scores.is_causal,
            query_seq_lengths=lengths_B,
            key_value_seq_lengths=lengths_B,
            scale=scores.scale,
            local_window_size=window,
            implementation="cudnn",
        )
    return mixed_BLHK[:, :length]


def _splash_attention(
    query_BLHK: Array, key_BLGK: Array, value_BLGK: Array, keys: Keys, scores: Scores
) -> Array:
    """Compute attention with JAX's splash kernel. Hidden keys are in a segment of their own."""
    visibility, (batch, length) = as_visible(keys), query_BLHK.shape[:2]
    segment_ids = None
    if any(restriction is not None for restriction in visibility):
        query_segments_BL = visibility.segments_BL
        if query_segments_BL is None:
            query_segments_BL = jnp.zeros((batch, length), jnp.int32)
        key_segments_BL = query_segments_BL
        is_seen_B11L = Visible(visibility.mask_BL, None, visibility.lengths_B).pairs_B1LL(length)
        if is_seen_B11L is not None:
            key_segments_BL = jnp.where(is_seen_B11L[:, 0, 0], query_segments_BL, -1)
        segment_ids = query_segments_BL.astype(jnp.int32), key_segments_BL.astype(jnp.int32)
    # Pallas takes half a second to import.
    from jaxlaunch.trainer.attention import splash

    return splash.splash_attention(
        query_BLHK, key_BLGK, value_BLGK, segment_ids, scores, name=ATTENTION_OUTPUT
    )


# --- a placeholder for a fused kernel -------------------------------------------------------------

# A plan may be traced without the devices of the kernel. Like a kernel, the placeholder is a single
# primitive: policies of rematerialization do not look inside, and the backward pass keeps the
# operands, the result and one number per row.
KERNEL = Primitive("fused_attention")
KERNEL.multiple_results = True


def fuse_attention(plain: Callable[..., Array]) -> Callable[..., Array]:
    """Wrap `plain`, an implementation of attention, in a single primitive."""

    def attend(
        query_BLHK: Array, key_BLGK: Array, value_BLGK: Array, keys: Keys, scores: Scores
    ) -> Array:
        arrays, tree = jax.tree.flatten(keys)

        def call_plain(query: Array, key: Array, value: Array, *arrays: Array) -> Array:
            return plain(query, key, value, jax.tree.unflatten(tree, arrays), scores)

        return _fused_kernel(call_plain, query_BLHK, key_BLGK, value_BLGK, arrays)

    return attend


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused_kernel(
    plain: Callable[..., Array], query: Array, key: Array, value: Array, arrays: list[Array]
) -> Array:
    result: Array = KERNEL.bind(query, key, value, *arrays, plain=plain)[0]
    return result


def _fused_kernel_forward(plain: Callable[..., Array], *operands: Any) -> Any:
    *inputs, arrays = operands
    mixed_BLHK, log_sum_BHL = KERNEL.bind(*inputs, *arrays, plain=plain)
    return mixed_BLHK, (*operands, mixed_BLHK, log_sum_BHL)


def _fused_kernel_backward(plain: Callable[..., Array], residuals: Any, cotangent: Array) -> Any:
    *operands, arrays, _, _ = residuals
    gradients = jax.vjp(lambda *operands: plain(*operands, *arrays), *operands)[1](cotangent)
    return *gradients, [None] * len(arrays)


_fused_kernel.defvjp(_fused_kernel_forward, _fused_kernel_backward)


def _kernel_shapes(query: Any, *operands: Any, plain: Callable[..., Array]) -> Any:
    *batch, length, heads, _ = query.shape
    log_sum = query.update(shape=(*batch, heads, length), dtype=jnp.dtype(jnp.float32))
    return query.update(weak_type=False), log_sum


def _compute_kernel(
    query: Array, *operands: Array, plain: Callable[..., Array]
) -> tuple[Array, Array]:
    *batch, length, heads, _ = query.shape
    return plain(query, *operands), jnp.zeros((*batch, heads, length), jnp.float32)


def _batch_kernel(
    operands: Sequence[Array], dims: Sequence[int | None], *, plain: Callable[..., Array]
) -> Any:
    """Bind the primitive for vmap, with the mapped axis of the query in front.

    A query that is not mapped is broadcast, because its shape defines that of the results.
    """
    (query, *other_operands), (axis, *axes) = operands, dims
    if axis is None:
        mapped_axes = zip(other_operands, axes, strict=True)
        size = next(other.shape[axis] for other, axis in mapped_axes if axis is not None)
        query, axis = jnp.broadcast_to(query, (size, *query.shape)), 0
    mapped = jax.vmap(plain, (0, *axes))
    return KERNEL.bind(jnp.moveaxis(query, axis, 0), *other_operands, plain=mapped), (0, 0)


KERNEL.def_abstract_eval(_kernel_shapes)
mlir.register_lowering(KERNEL, mlir.lower_fun(_compute_kernel, multiple_results=True))
batching.primitive_batchers[KERNEL] = _batch_kernel

ATTENTION: dict[str, Callable[..., Array]] = {
    "auto": _xla_attention,
    "xla": _xla_attention,
    "cudnn": _cudnn_attention,
    SPLASH: _splash_attention,
}
TRACED = {**ATTENTION, FUSED: fuse_attention(_xla_attention)}
