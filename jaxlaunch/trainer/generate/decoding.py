"""Choice of the next tokens: greedy decoding, sampling, and beam search.

Beam search approximates the likeliest texts with a fixed number of beams. Each step extends every
beam by every token and keeps the best of these candidates. A candidate that ends is moved to the
finished texts, whose score is the mean log-probability of their tokens, including the end token.
The search continues as long as a beam could still become one of the best finished texts. Beams that
reach the limit count as finished. This is the search of transformers with `length_penalty=1` and
`early_stopping="never"`.

B batch, K beams, C candidates of a step, R = B × K rows, P tokens of the prompts, N slots for new
tokens, E end tokens, V vocabulary.
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

# Fields of Sampling that exclude tokens from the draw.
CUTTING_FIELDS = ("top_k", "top_p", "min_p")


class SamplingOptions(TypedDict, total=False):
    """The fields of Sampling as keyword arguments, for type checking."""

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
    """Options of the choice of tokens.

    Attributes:
        max_tokens: Largest number of tokens in a sample.
        temperature: Temperature of the draw; 0 always takes the likeliest token.
        top_k: Draw from this number of likeliest tokens.
        top_p: Draw from the fewest likeliest tokens whose probabilities add up to this.
        min_p: Draw from tokens with at least this share of the largest probability.
        beams: Number of beams; with 1 there is no beam search.
        n: Number of samples for each prompt.
        seed: Seed of the draws.

    Raises:
        SpecError: A number is out of range, or it would have no effect.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    beams: int = 1
    n: int = 1
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
        """Names of the fields that are set and exclude tokens from the draw."""
        return [name for name in CUTTING_FIELDS if getattr(self, name) is not None]


class DrawParameters(NamedTuple):
    """The numbers of a Sampling as arrays, so that one compiled program serves all values."""

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
    """Return the likeliest token of each row, or the first of equally likely ones."""
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


def draw_tokens(
    logits_BV: Array, draw: DrawParameters, sample_B: Array, index: Array, *, is_cut: bool
) -> Array:
    """Draw a token for each row, independently of the other rows.

    As in transformers, top_k is applied to the logits divided by the temperature, top_p to the
    remaining tokens, and min_p to the tokens that then remain. The likeliest token always remains.

    Args:
        logits_BV: Logits of the next token.
        draw: Parameters of the draw.
        sample_B: Numbers from which the rows derive their random keys.
        index: Index of the token in its sample, from which the key is derived too.
        is_cut: Whether to apply top_k, top_p and min_p.

    Returns:
        The tokens [B].
    """
    logits_BV = logits_BV.astype(jnp.float32) / draw.temperature
    if is_cut:
        logits_BV = _cut_logits(logits_BV, draw)

    def draw_token(sample: Array, logits_V: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(draw.key, sample), index)
        return jax.random.categorical(key, logits_V)

    return jax.vmap(draw_token)(sample_B, logits_BV).astype(jnp.int32)


def _cut_logits(logits_BV: Array, draw: DrawParameters) -> Array:
    """Mask the logits of excluded tokens. Tokens as likely as the last remaining one are kept."""
    ranked_BV = jnp.flip(jnp.sort(logits_BV, axis=-1), axis=-1)
    remains_BV = jnp.arange(logits_BV.shape[1])[None, :] < draw.top_k
    prob_BV = jax.nn.softmax(jnp.where(remains_BV, ranked_BV, MASKED_SCORE))
    # A token remains if the probabilities of the likelier ones add up to less than top_p.
    remains_BV &= jnp.cumsum(prob_BV, axis=-1) - prob_BV < draw.top_p
    remains_BV &= prob_BV >= draw.min_p * prob_BV[:, :1]
    threshold_B1 = jnp.min(jnp.where(remains_BV, ranked_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_BV >= threshold_B1, logits_BV, MASKED_SCORE)


def is_end_token(token: Array, ends_E: Array) -> Array:
    """Return which tokens [...] are one of `ends_E`, as a boolean array [...]."""
    ends = ends_E.reshape((1,) * token.ndim + ends_E.shape)
    return jnp.any(token[..., None] == ends, axis=-1)


# --- beam search ----------------------------------------------------------------------------------

# The score of a beam that does not exist. It is below that of every text and can be divided.
IMPOSSIBLE_SCORE = -1e30


class Texts(NamedTuple):
    """The K best texts of each prompt, best first."""

    tokens_BKN: Array
    length_BK: Array
    score_BK: Array


class SearchState(NamedTuple):
    """State of the search.

    Attributes:
        caches: Keys and values of each layer, with a row for each beam.
        logits_RV: Logits of the next token of each beam.
        running: The beams. Their score is the sum of log-probabilities.
        finished: The best finished texts. Their score is the mean log-probability.
        token_index: Number of tokens that have been chosen.
    """

    caches: tuple[Cache, ...]
    logits_RV: Array
    running: Texts
    finished: Texts
    token_index: Array


def search_beams(
    network: Network,
    weights: Weights,
    tokens_BP: Array,
    pad_B: Array,
    limit: Array,
    ends_E: Array,
    *,
    count: int,
    slots: int,
) -> Texts:
    """Return the best continuations of each prompt.

    Args:
        network: The model.
        weights: Its weights.
        tokens_BP: Prompts, padded on the left.
        pad_B: Number of padding tokens before each prompt.
        limit: Largest number of tokens of a text, at most `slots`.
        ends_E: Tokens that end a text.
        count: Number of beams and of returned texts.
        slots: Slots for new tokens, for which the program is compiled.
    """
    (batch, start), rows = tokens_BP.shape, tokens_BP.shape[0] * count
    cache_slots = network.cache_slots(start + slots)
    logits_BV, caches = network.run_prompts(weights, tokens_BP, pad_B, cache_slots)
    caches, logits_RV, pad_R = repeat_rows((caches, logits_BV, pad_B), count)
    no_texts = Texts(
        jnp.zeros((batch, count, slots), jnp.int32),
        jnp.zeros((batch, count), jnp.int32),
        jnp.full((batch, count), IMPOSSIBLE_SCORE, jnp.float32),
    )
    # Only one beam exists at the start, because equal beams would have equal continuations.
    first_beams = no_texts._replace(score_BK=no_texts.score_BK.at[:, 0].set(0.0))

    def can_improve(state: SearchState) -> Array:
        # Log-probabilities are negative, so the best possible mean is that of a text at the limit
        # whose further tokens have probability 1.
        bound_B = state.running.score_BK[:, 0] / jnp.asarray(limit, jnp.float32)
        return (state.token_index < limit) & jnp.any(bound_B > state.finished.score_BK[:, -1])

    def extend_search(state: SearchState) -> SearchState:
        parent_BK, running, finished = _extend_beams(state, ends_E)
        row_R = (jnp.arange(batch)[:, None] * count + parent_BK).reshape(rows)
        token_BK = jnp.take(running.tokens_BKN, state.token_index, axis=2)
        caches = jax.tree.map(lambda x: jnp.take(x, row_R, axis=0), state.caches)
        logits_RV, caches = network.run_token(
            weights, token_BK.reshape(rows), start + state.token_index, pad_R, caches
        )
        logits_RV = constrain(logits_RV, "batch", "vocab")
        return SearchState(caches, logits_RV, running, finished, state.token_index + 1)

    logits_RV = constrain(logits_RV, "batch", "vocab")
    state = SearchState(caches, logits_RV, first_beams, no_texts, jnp.zeros((), jnp.int32))
    state = jax.lax.while_loop(can_improve, extend_search, state)
    score_BK = _mean_score(state.running.score_BK, state.running.length_BK)
    best = _best_texts(count, state.finished, state.running._replace(score_BK=score_BK))
    return Texts(*(constrain(array, *[None] * array.ndim) for array in best))


def repeat_rows(arrays: Any, count: int) -> Any:
    """Return the arrays with each row `count` times."""
    return jax.tree.map(lambda array: jnp.repeat(array, count, axis=0), arrays)


def _extend_beams(state: SearchState, ends_E: Array) -> tuple[Array, Texts, Texts]:
    """Extend all beams by a token.

    As in transformers, a text only finishes if it is among the K best candidates.

    Returns:
        The index [B, K] of the beam that each new beam extends, the new beams, and the finished
        texts.
    """
    (batch, count), vocab = state.running.score_BK.shape, state.logits_RV.shape[1]
    logprob_RV = jax.nn.log_softmax(state.logits_RV.astype(jnp.float32))
    scores_BKV = state.running.score_BK[:, :, None] + logprob_RV.reshape(batch, count, vocab)
    # Even if every beam can end with every end token, this includes K candidates that do not end.
    candidates = min((1 + ends_E.shape[0]) * count, count * vocab)
    score_BC, index_BC = jax.lax.top_k(scores_BKV.reshape(batch, count * vocab), candidates)
    parent_BC, token_BC = index_BC // vocab, (index_BC % vocab).astype(jnp.int32)
    tokens_BCN = jnp.take_along_axis(state.running.tokens_BKN, parent_BC[:, :, None], axis=1)
    tokens_BCN = jax.lax.dynamic_update_slice_in_dim(
        tokens_BCN, token_BC[:, :, None], state.token_index, axis=2
    )
    length_BC = jnp.take_along_axis(state.running.length_BK, parent_BC, axis=1) + 1
    is_end_BC, is_top_C = is_end_token(token_BC, ends_E), jnp.arange(candidates) < count
    mean_BC = _mean_score(score_BC, length_BC)
    finished_score_BC = jnp.where(is_end_BC & is_top_C[None, :], mean_BC, IMPOSSIBLE_SCORE)
    finished = _best_texts(count, state.finished, Texts(tokens_BCN, length_BC, finished_score_BC))
    running_score_BC = jnp.where(is_end_BC, IMPOSSIBLE_SCORE, score_BC)
    parent_BK = jnp.take_along_axis(parent_BC, jax.lax.top_k(running_score_BC, count)[1], axis=1)
    running = _best_texts(count, Texts(tokens_BCN, length_BC, running_score_BC))
    return parent_BK, running, finished


def _mean_score(score: Array, length: Array) -> Array:
    """Return the mean log-probability of a text's tokens. IMPOSSIBLE_SCORE stays as it is."""
    mean = score / jnp.maximum(length, 1).astype(jnp.float32)
    return jnp.where(score > IMPOSSIBLE_SCORE / 2, mean, IMPOSSIBLE_SCORE)


def _best_texts(count: int, *groups: Texts) -> Texts:
    texts = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *groups)
    score_BK, index_BK = jax.lax.top_k(texts.score_BK, count)
    tokens_BKN = jnp.take_along_axis(texts.tokens_BKN, index_BK[:, :, None], axis=1)
    return Texts(tokens_BKN, jnp.take_along_axis(texts.length_BK, index_BK, axis=1), score_BK)
