"""Attention of transformers' modules by the implementations of jaxlaunch.

A module asks for a mask first, and hands it to attention in each of its layers. The mask here
depends on the restrictions of the batch (`Visible`): packed rows, padding. It also carries the
layer's span, causal or a sliding window, if it has no other restriction: then attention calls an
implementation of jaxlaunch, which needs no mask. The mask is not used in that case, so the compiler
removes it. All other masks (bidirectional parts, chunks) are applied as they are.

B batch, L length, H query heads, G key and value heads, K head size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlaunch.trainer.attention.implementations import (
    MASKED_SCORE,
    Visible,
    causal_attention,
    full_attention,
)

# The name of our attention in transformers' registries.
NAME = "jaxlaunch"
# Attribute of a mask for its span.
SPAN = "jaxlaunch_span"


class Span(NamedTuple):
    """The keys that a query of a layer sees within its segment.

    Attributes:
        is_causal: Whether it sees only keys up to its own position.
        window: Number of the last of these that it sees; None for all.
    """

    is_causal: bool
    window: int | None = None


class Call(NamedTuple):
    """What attention needs to know of the call of a module.

    Attributes:
        implementation: Name of the implementation of attention.
        visible: Restrictions of the batch.
    """

    implementation: str = "auto"
    visible: Visible = Visible()


PLAIN_CALL = Call()
_call: ContextVar[Call] = ContextVar("_call", default=PLAIN_CALL)


@contextlib.contextmanager
def use_attention(call: Call) -> Iterator[None]:
    """Have transformers call our masks and attention for modules that are called in this context.

    Modules whose attention is their own (`eager`) get our mask in their form, numbers to add to the
    scores.
    """
    from transformers import masking_utils, modeling_utils

    masks, attentions = (
        masking_utils.ALL_MASK_ATTENTION_FUNCTIONS,
        modeling_utils.ALL_ATTENTION_FUNCTIONS,
    )
    find_segments = masking_utils.find_packed_sequence_indices
    eager_mask = masks._global_mapping["eager"]
    token = _call.set(call)
    try:
        masks._global_mapping.update({NAME: make_mask, "eager": make_added_mask})
        attentions._global_mapping[NAME] = attend
        # It would look for packed rows in the values of the positions, which a trace does not have.
        masking_utils.find_packed_sequence_indices = lambda positions: None
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_segments
        masks._global_mapping["eager"] = eager_mask
        _call.reset(token)


def register_names() -> None:
    """Register the names of our masks and attention, so that a module can be built with them."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    **_: Any,
) -> Any:
    """Return the mask [B, 1, L, L] of a layer, True where a query sees a key."""
    from torchax import interop

    visible = _call.get().visible
    positions_BL = visible.positions_BL
    if positions_BL is None:
        positions_BL = jnp.arange(q_length)[None]
    rows_B111 = jnp.arange(positions_BL.shape[0])[:, None, None, None]
    heads_1111 = jnp.zeros((1, 1, 1, 1), jnp.int32)
    queries_B1L1, keys_B11L = positions_BL[:, None, :, None], positions_BL[:, None, None, :]
    indexes = interop.torch_view((rows_B111, heads_1111, queries_B1L1, keys_B11L))
    mask_B1LL = mask_function(*indexes)
    pairs_B1LL = visible.pairs_B1LL(kv_length)
    if pairs_B1LL is not None:
        mask_B1LL = mask_B1LL & interop.torch_view(pairs_B1LL)
    mask_B1LL = mask_B1LL.expand(batch_size, 1, q_length, kv_length)
    setattr(mask_B1LL, SPAN, find_span(mask_function, q_length, local_size))
    return mask_B1LL


def make_added_mask(*arguments: Any, dtype: Any = None, **keywords: Any) -> Any:
    """Return the mask of a layer as numbers that are added to the scores."""
    import torch

    mask_B1LL = make_mask(*arguments, **keywords)
    lowest = torch.finfo(dtype or torch.float32).min
    return torch.where(mask_B1LL, 0.0, lowest).to(dtype or torch.float32)


def find_span(
    mask_function: Callable[..., Any], length: int, local_size: int | None
) -> Span | None:
    """Return the span of a mask function, or None if it describes another set of keys.

    The function is called for some queries with all keys, and its result compared with each span.
    """
    import torch
    import torchax

    chosen = {0, 1, *np.linspace(0, length - 1, 64, dtype=int)}
    if local_size is not None:
        chosen |= {local_size - 1, local_size, local_size + 1}
    queries_Q1 = np.array(sorted(query for query in chosen if query < length))[:, None]
    keys_L = np.arange(length)
    # Arrays of JAX would need a device, and the chips of a plan are not here. No exception may
    # leave the context, because torchax would stay disabled.
    with torchax.disable_temporarily():
        zero = torch.zeros((1, 1), dtype=torch.int64)
        indexes = zero, zero, torch.from_numpy(queries_Q1), torch.from_numpy(keys_L)
        try:
            seen_QL = np.broadcast_to(mask_function(*indexes).numpy(), (len(queries_Q1), length))
        except Exception:
            # A function that depends on the batch combines its arrays with these tensors, which
            # torch and torchax refuse in different ways.
            return None
    is_past_QL = keys_L <= queries_Q1
    if np.array_equal(seen_QL, is_past_QL):
        return Span(True)
    if seen_QL.all():
        return Span(False)
    if local_size is not None and np.array_equal(
        seen_QL, is_past_QL & (keys_L > queries_Q1 - local_size)
    ):
        return Span(True, local_size)
    return None


def attend(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Any = None,
    **_: Any,
) -> tuple[Any, None]:
    """Compute attention as transformers calls it.

    The query is [B, H, L, K], key and value are [B, G, L, K]. Returns [B, L, H, K] and no weights.
    """
    from torchax import interop

    call, span = _call.get(), getattr(attention_mask, SPAN, None)
    if attention_mask is None:
        is_causal = getattr(module, "is_causal", True)
        span = Span(bool(is_causal))
    arrays = interop.jax_view((query, key, value))
    query_BLHK, key_BLGK, value_BLGK = (array.swapaxes(1, 2) for array in arrays)
    is_supported = value_BLGK.shape[-1] == query_BLHK.shape[-1] and s_aux is None and not dropout
    is_square = query_BLHK.shape[1] == key_BLGK.shape[1]
    if span is not None and is_supported and is_square and (span.is_causal or softcap is None):
        if span.is_causal:
            implementation = causal_attention(
                call.implementation, window=span.window, cap=softcap, scale=scaling
            )
        else:
            # The implementations divide by the square root of K.
            if scaling is not None:
                query_BLHK = query_BLHK * (scaling * query_BLHK.shape[-1] ** 0.5)
            implementation = full_attention(call.implementation)
        mixed_BLHK = implementation(query_BLHK, key_BLGK, value_BLGK, call.visible)
        return interop.torch_view(mixed_BLHK), None
    mask = None if attention_mask is None else interop.jax_view(attention_mask)
    if mask is None and span is not None and span.is_causal:
        length = query_BLHK.shape[1]
        mask = jnp.tri(length, dtype=bool)[None, None]
    sinks_H = None if s_aux is None else interop.jax_view(s_aux)
    rate, key_of_dropout = dropout, None
    if dropout:
        import torchax

        key_of_dropout = torchax.default_env().get_and_rotate_prng_key()
    mixed_BLHK = masked_attention(
        query_BLHK, key_BLGK, value_BLGK, mask, scaling, softcap, sinks_H, rate, key_of_dropout
    )
    return interop.torch_view(mixed_BLHK), None


def masked_attention(
    query_BLHK: Array,
    key_BLGK: Array,
    value_BLGK: Array,
    mask_B1LL: Array | None,
    scale: float | None = None,
    cap: float | None = None,
    sinks_H: Array | None = None,
    dropout: float = 0.0,
    dropout_key: Array | None = None,
) -> Array:
    """Compute attention with a mask of all pairs of positions, with the softmax in float32.

    Args:
        query_BLHK: Queries.
        key_BLGK: Keys.
        value_BLGK: Values, whose size may differ from that of the keys.
        mask_B1LL: True where a query sees a key, or numbers to add to the scores; None for all.
        scale: Factor of the scores, K^-½ by default.
        cap: Bound of the scores, applied with a tanh.
        sinks_H: A score of each head for a key without a value, which takes part in the softmax.
        dropout: Probability with which a weight is dropped.
        dropout_key: Random key of the dropout.
    """
    heads, groups = query_BLHK.shape[2], key_BLGK.shape[2]
    key_BLHK, value_BLHK = (
        jnp.repeat(operand, heads // groups, axis=2) for operand in (key_BLGK, value_BLGK)
    )
    factor = query_BLHK.shape[-1] ** -0.5 if scale is None else scale
    scores_BHLL = jnp.einsum(
        "bqhk,bshk->bhqs", query_BLHK * factor, key_BLHK, preferred_element_type=jnp.float32
    )
    if cap is not None:
        scores_BHLL = cap * jnp.tanh(scores_BHLL / cap)
    if mask_B1LL is not None:
        if mask_B1LL.dtype == jnp.bool_:
            scores_BHLL = jnp.where(mask_B1LL, scores_BHLL, MASKED_SCORE)
        else:
            scores_BHLL = scores_BHLL + mask_B1LL
    if sinks_H is not None:
        shape = (*scores_BHLL.shape[:3], 1)
        column = jnp.broadcast_to(sinks_H[None, :, None, None].astype(jnp.float32), shape)
        scores_BHLL = jnp.concatenate([scores_BHLL, column], axis=-1)
    weights_BHLL = jax.nn.softmax(scores_BHLL)
    if sinks_H is not None:
        weights_BHLL = weights_BHLL[..., :-1]
    if dropout_key is not None:
        is_kept = jax.random.bernoulli(dropout_key, 1 - dropout, weights_BHLL.shape)
        weights_BHLL = jnp.where(is_kept, weights_BHLL / (1 - dropout), 0.0)
    mixed = jnp.einsum("bhqs,bshv->bqhv", weights_BHLL.astype(value_BLHK.dtype), value_BLHK)
    return mixed.astype(query_BLHK.dtype)
