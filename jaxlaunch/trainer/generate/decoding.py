"""Choice of the next tokens: the likeliest, drawn at a temperature, or by beam search.

Beam search approximates the likeliest texts with a fixed number of beams. A finished text is scored
by the mean log-probability of its tokens, including its end, as in transformers with
`length_penalty` 1 and `early_stopping="never"`: the search continues as long as a beam could still
become one of the best texts. Beams that reach the limit count as finished.

B batch, K beams, C candidates of a step, R = B × K rows, P tokens of the prompts, N tokens that
fit, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlaunch.trainer.attention.implementations import MASKED_SCORE
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.network import Cache, Network, Weights
from jaxlaunch.trainer.parallel.sharding import constrain

# Fields of Sampling that leave out tokens.
CUTTING_FIELDS = ("top_k", "top_p", "min_p")


class SamplingOptions(TypedDict, total=False):
    """The fields of Sampling, for the types of functions that pass them on."""

    max_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    beams: int
    n: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The choice of tokens. Raises SpecError for a number out of range or without an effect."""

    max_tokens: int = 128  # of a sample
    temperature: float = 0.0  # 0 always takes the likeliest token
    top_k: int | None = None  # draw from this number of likeliest tokens
    top_p: float | None = None  # draw from the fewest likeliest tokens with this probability
    min_p: float | None = None  # draw from tokens with this share of the largest probability
    beams: int = 1
    n: int = 1  # samples per prompt
    seed: int = 0

    def __post_init__(self) -> None:
        rules = [
            ("max_tokens", "a whole number above 0", self.max_tokens >= 1),
            ("temperature", "a number from 0", 0 <= self.temperature < math.inf),
            ("top_k", "a whole number above 0", self.top_k is None or self.top_k >= 1),
            ("top_p", "above 0 and at most 1", self.top_p is None or 0 < self.top_p <= 1),
            ("min_p", "above 0 and at most 1", self.min_p is None or 0 < self.min_p <= 1),
            ("beams", "a whole number above 0", self.beams >= 1),
            ("n", "a whole number from 1 to 65536", 1 <= self.n <= 1 << 16),
            ("seed", "a whole number from 0 to 2**64 - 1", 0 <= self.seed < 2**64),
        ]
        for name, valid_values, is_valid in rules:
            if not is_valid:
                raise SpecError(f"{name} = {getattr(self, name)} is not {valid_values}")
        beams, n, hint = f"beams = {self.beams}", f"n = {self.n}", "give a temperature such as 1"
        if self.beams > 1:
            drawing = [name for name in ("temperature", *CUTTING_FIELDS) if getattr(self, name)]
            if drawing:
                raise SpecError(f"{beams} does not sample: leave {', '.join(drawing)} out")
            if self.n > self.beams:
                raise SpecError(f"{n} is more than {beams}, each of which gives one sample")
        elif self.temperature == 0:
            if self.n > 1:
                raise SpecError(f"{n} samples at temperature 0 would be equal; {hint}")
            if cutting := ", ".join(self.cutting_fields):
                raise SpecError(f"{cutting} at temperature 0 would do nothing; {hint}")

    @property
    def cutting_fields(self) -> list[str]:
        """Names of the fields in use that exclude tokens from the draw."""
        return [name for name in CUTTING_FIELDS if getattr(self, name) is not None]


class DrawParameters(NamedTuple):
    """The numbers of a Sampling as device arrays, so that one program serves all of them."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    key: Array

    @classmethod
    def from_sampling(cls, sampling: Sampling, vocab: int) -> DrawParameters:
        """Convert a Sampling. The defaults top_k = V, top_p = 1 and min_p = 0 exclude no token."""
        high, low = divmod(sampling.seed, 2**32)
        key = jax.random.key(np.uint32(low))
        return cls(
            jnp.float32(sampling.temperature or 1.0),
            jnp.int32(min(sampling.top_k or vocab, vocab)),
            jnp.float32(1.0 if sampling.top_p is None else sampling.top_p),
            jnp.float32(sampling.min_p or 0.0),
            jax.random.fold_in(key, high) if high else key,
        )


def likeliest_tokens(logits_BV: Array) -> Array:
    """Return the likeliest token of each row, the first of equal ones."""
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


def draw_tokens(
    logits_BV: Array, draw: DrawParameters, sample_B: Array, at: Array, *, is_cut: bool
) -> Array:
    """Draw a token for each row, independently of the other rows.

    As in transformers, top_k is applied to the logits divided by the temperature, top_p to the
    remaining tokens, and min_p to those that are left then. The likeliest token always remains.
    Without `is_cut` all three are ignored.
    """
    logits_BV = logits_BV.astype(jnp.float32) / draw.temperature
    if is_cut:
        logits_BV = _cut_logits(logits_BV, draw)

    def draw_token(sample: Array, logits_V: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(draw.key, sample), at)
        return jax.random.categorical(key, logits_V)

    return jax.vmap(draw_token)(sample_B, logits_BV).astype(jnp.int32)


def _cut_logits(logits_BV: Array, draw: DrawParameters) -> Array:
    """Mask the logits of excluded tokens. Tokens as likely as the last remaining one are kept."""
    ranked_BV = jnp.flip(jnp.sort(logits_BV, axis=-1), axis=-1)
    is_in_BV = jnp.arange(logits_BV.shape[1])[None, :] < draw.top_k
    share_BV = jax.nn.softmax(jnp.where(is_in_BV, ranked_BV, MASKED_SCORE))
    # A token stays if the likelier ones do not reach top_p.
    is_in_BV &= jnp.cumsum(share_BV, axis=-1) - share_BV < draw.top_p
    is_in_BV &= share_BV >= draw.min_p * share_BV[:, :1]
    least_B1 = jnp.min(jnp.where(is_in_BV, ranked_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_BV >= least_B1, logits_BV, MASKED_SCORE)


def is_end_token(token: Array, ends_E: Array) -> Array:
    """Return whether a token is one of `ends_E`, in the shape of `token`."""
    wide = ends_E.reshape((1,) * token.ndim + ends_E.shape)
    return jnp.any(token[..., None] == wide, axis=-1)


# --- beam search ----------------------------------------------------------------------------------

# Below the score of every text, and finite after a division.
IMPOSSIBLE_SCORE = -1e30


class Texts(NamedTuple):
    """The K best texts of each row, best first."""

    tokens_BKN: Array
    length_BK: Array
    score_BK: Array


class SearchState(NamedTuple):
    """State of the search: running beams with summed, finished texts with mean scores."""

    caches: tuple[Cache, ...]
    logits_RV: Array
    running: Texts
    finished: Texts
    at: Array


def search_beams(
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
    """Return the `count` best texts of up to `limit` ≤ `room` tokens after each prompt."""
    (batch, start), rows = tokens_BP.shape, tokens_BP.shape[0] * count
    slots = network.cache_slots(start + room)
    logits_BV, caches = network.run_prompts(weights, tokens_BP, pad_B, slots)
    caches, logits_RV, pad_R = repeat_rows((caches, logits_BV, pad_B), count)
    no_texts = Texts(
        jnp.zeros((batch, count, room), jnp.int32),
        jnp.zeros((batch, count), jnp.int32),
        jnp.full((batch, count), IMPOSSIBLE_SCORE, jnp.float32),
    )
    # Only one beam starts, because equal beams would stay equal.
    first = no_texts._replace(score_BK=no_texts.score_BK.at[:, 0].set(0.0))

    def can_improve(state: SearchState) -> Array:
        hope_B = state.running.score_BK[:, 0] / jnp.asarray(limit, jnp.float32)
        return (state.at < limit) & jnp.any(hope_B > state.finished.score_BK[:, -1])

    def extend_search(state: SearchState) -> SearchState:
        parent_BK, running, finished = _extend_beams(state, ends_E)
        row_R = (jnp.arange(batch)[:, None] * count + parent_BK).reshape(rows)
        token_BK = jnp.take(running.tokens_BKN, state.at, axis=2)
        caches = jax.tree.map(lambda x: jnp.take(x, row_R, axis=0), state.caches)
        logits_RV, caches = network.run_token(
            weights, token_BK.reshape(rows), start + state.at, pad_R, caches
        )
        logits_RV = constrain(logits_RV, "batch", "vocab")
        return SearchState(caches, logits_RV, running, finished, state.at + 1)

    logits_RV = constrain(logits_RV, "batch", "vocab")
    state = SearchState(caches, logits_RV, first, no_texts, jnp.zeros((), jnp.int32))
    state = jax.lax.while_loop(can_improve, extend_search, state)
    score_BK = _mean_score(state.running.score_BK, state.running.length_BK)
    best = _best_texts(count, state.finished, state.running._replace(score_BK=score_BK))
    return Texts(*(constrain(array, *[None] * array.ndim) for array in best))


def repeat_rows(arrays: Any, count: int) -> Any:
    """Return the arrays with each row `count` times."""
    return jax.tree.map(lambda array: jnp.repeat(array, count, axis=0), arrays)


def _extend_beams(state: SearchState, ends_E: Array) -> tuple[Array, Texts, Texts]:
    """Return the parents of the best extended beams, these beams, and the finished texts.

    As in transformers, a text only finishes if it would be among the K best candidates.
    """
    (batch, count), vocab = state.running.score_BK.shape, state.logits_RV.shape[1]
    logprob_RV = jax.nn.log_softmax(state.logits_RV.astype(jnp.float32))
    scores_BKV = state.running.score_BK[:, :, None] + logprob_RV.reshape(batch, count, vocab)
    scores_BF = scores_BKV.reshape(batch, count * vocab)
    enough = min((1 + ends_E.shape[0]) * count, count * vocab)
    score_BC, flat_BC = jax.lax.top_k(scores_BF, enough)
    parent_BC, token_BC = flat_BC // vocab, (flat_BC % vocab).astype(jnp.int32)
    tokens_BCN = jnp.take_along_axis(state.running.tokens_BKN, parent_BC[:, :, None], axis=1)
    tokens_BCN = jax.lax.dynamic_update_slice_in_dim(
        tokens_BCN, token_BC[:, :, None], state.at, axis=2
    )
    length_BC = jnp.take_along_axis(state.running.length_BK, parent_BC, axis=1) + 1
    ends_BC, is_first_C = is_end_token(token_BC, ends_E), jnp.arange(enough) < count
    mean_BC = _mean_score(score_BC, length_BC)
    ended_BC = jnp.where(ends_BC & is_first_C[None, :], mean_BC, IMPOSSIBLE_SCORE)
    finished = _best_texts(count, state.finished, Texts(tokens_BCN, length_BC, ended_BC))
    running_BC = jnp.where(ends_BC, IMPOSSIBLE_SCORE, score_BC)
    parent_BK = jnp.take_along_axis(parent_BC, jax.lax.top_k(running_BC, count)[1], axis=1)
    return parent_BK, _best_texts(count, Texts(tokens_BCN, length_BC, running_BC)), finished


def _mean_score(score: Array, length: Array) -> Array:
    """Return the mean log-probability of a text's tokens; impossible beams stay lowest."""
    mean = score / jnp.maximum(length, 1).astype(jnp.float32)
    return jnp.where(score > IMPOSSIBLE_SCORE / 2, mean, IMPOSSIBLE_SCORE)


def _best_texts(count: int, *groups: Texts) -> Texts:
    texts = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *groups)
    score_BK, place_BK = jax.lax.top_k(texts.score_BK, count)
    tokens_BKN = jnp.take_along_axis(texts.tokens_BKN, place_BK[:, :, None], axis=1)
    return Texts(tokens_BKN, jnp.take_along_axis(texts.length_BK, place_BK, axis=1), score_BK)
