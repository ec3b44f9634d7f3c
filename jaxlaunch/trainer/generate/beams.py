"""Beam search: the likeliest texts, as far as so many beams at a time find them.

A text that ends is scored by the mean log-probability of its tokens, its end included, as transformers does with its
`length_penalty` of 1 and `early_stopping="never"`: the search goes on as long as a beam could still become one of the
best. Beams that reach the limit count as ended there.

B batch, K beams, C candidates of a step, R = B × K rows, P tokens of the prompts, N tokens that fit, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from jaxlaunch.trainer.generate.cache import Cache
from jaxlaunch.trainer.generate.network import Network, Weights
from jaxlaunch.trainer.parallel.sharding import constrain

NEVER = -1e30  # a score that no text has, finite after a division


class Texts(NamedTuple):
    """The K best texts of each row of a kind, the best first."""

    tokens_BKN: Array
    length_BK: Array
    score_BK: Array


class Search(NamedTuple):
    """What the search carries: running beams with summed scores, and ended texts with mean ones."""

    caches: tuple[Cache, ...]
    logits_RV: Array
    running: Texts
    ended: Texts
    at: Array


def is_end(token: Array, ends_E: Array) -> Array:
    """Whether a token is one of `ends_E`, in the shape of `token`."""
    wide = ends_E.reshape((1,) * token.ndim + ends_E.shape)
    return jnp.any(token[..., None] == wide, axis=-1)


def search(
    network: Network,
    weights: Weights,
    tokens_BP: Array,
    pad_B: Array,
    limit: Array,
    ends_E: Array,
    *,
    count: int,
    room: int,
) -> Texts:
    """The `count` best texts of up to `limit` tokens after each prompt; `room` is N, no less than `limit`."""
    (batch, start), rows = tokens_BP.shape, tokens_BP.shape[0] * count
    logits_BV, caches = network.prompts(weights, tokens_BP, pad_B, network.slots(start + room))
    caches, logits_RV, pad_R = jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), (caches, logits_BV, pad_B))
    none = Texts(
        jnp.zeros((batch, count, room), jnp.int32),
        jnp.zeros((batch, count), jnp.int32),
        jnp.full((batch, count), NEVER, jnp.float32),
    )
    first = none._replace(score_BK=none.score_BK.at[:, 0].set(0.0))  # equal beams would stay equal

    def is_on(state: Search) -> Array:
        """Whether a running beam could still become one of the best."""
        hope_B = state.running.score_BK[:, 0] / jnp.asarray(limit, jnp.float32)
        return (state.at < limit) & jnp.any(hope_B > state.ended.score_BK[:, -1])

    def step(state: Search) -> Search:
        parent_BK, running, ended = _extended(state, ends_E)
        row_R = (jnp.arange(batch)[:, None] * count + parent_BK).reshape(rows)
        token_R = jax.lax.dynamic_index_in_dim(running.tokens_BKN, state.at, axis=2, keepdims=False).reshape(rows)
        caches = jax.tree.map(lambda x: jnp.take(x, row_R, axis=0), state.caches)
        logits_RV, caches = network.token(weights, token_R, start + state.at, pad_R, caches)
        return Search(caches, constrain(logits_RV, "batch", "vocab"), running, ended, state.at + 1)

    begun = Search(caches, constrain(logits_RV, "batch", "vocab"), first, none, jnp.zeros((), jnp.int32))
    last = jax.lax.while_loop(is_on, step, begun)
    cut = last.running._replace(score_BK=_mean(last.running.score_BK, last.running.length_BK))
    found = _best(jax.tree.map(lambda *both: jnp.concatenate(both, axis=1), last.ended, cut), count)
    return Texts(*(constrain(each, *[None] * each.ndim) for each in found))


def _extended(state: Search, ends_E: Array) -> tuple[Array, Texts, Texts]:
    """The best running beams with one more token, the beam that each was, and the ended texts with those that now end.

    Only a candidate that would be among the K best ends a text, as in transformers.
    """
    (batch, count), vocab = state.running.score_BK.shape, state.logits_RV.shape[1]
    logprob_BKV = jax.nn.log_softmax(state.logits_RV.astype(jnp.float32)).reshape(batch, count, vocab)
    scores_BF = (state.running.score_BK[:, :, None] + logprob_BKV).reshape(batch, count * vocab)
    enough = min((1 + ends_E.shape[0]) * count, count * vocab)
    score_BC, flat_BC = jax.lax.top_k(scores_BF, enough)
    parent_BC, token_BC = flat_BC // vocab, (flat_BC % vocab).astype(jnp.int32)
    tokens_BCN = jnp.take_along_axis(state.running.tokens_BKN, parent_BC[:, :, None], axis=1)
    tokens_BCN = jax.lax.dynamic_update_slice_in_dim(tokens_BCN, token_BC[:, :, None], state.at, axis=2)
    length_BC = jnp.take_along_axis(state.running.length_BK, parent_BC, axis=1) + 1
    ends_BC, is_first_1C = is_end(token_BC, ends_E), (jnp.arange(enough) < count)[None, :]
    ended = Texts(tokens_BCN, length_BC, jnp.where(ends_BC & is_first_1C, _mean(score_BC, length_BC), NEVER))
    ended = _best(jax.tree.map(lambda *both: jnp.concatenate(both, axis=1), state.ended, ended), count)
    on_BC = jnp.where(ends_BC, NEVER, score_BC)
    kept_BK = jax.lax.top_k(on_BC, count)[1]
    parent_BK = jnp.take_along_axis(parent_BC, kept_BK, axis=1)
    return parent_BK, _best(Texts(tokens_BCN, length_BC, on_BC), count), ended


def _mean(score: Array, length: Array) -> Array:
    """The mean log-probability of a text's tokens; a beam that was never there stays far below all others."""
    mean = score / jnp.maximum(length, 1).astype(jnp.float32)
    return jnp.where(score > NEVER / 2, mean, NEVER)


def _best(texts: Texts, count: int) -> Texts:
    score_BK, place_BK = jax.lax.top_k(texts.score_BK, count)
    tokens_BKN = jnp.take_along_axis(texts.tokens_BKN, place_BK[:, :, None], axis=1)
    return Texts(tokens_BKN, jnp.take_along_axis(texts.length_BK, place_BK, axis=1), score_BK)
