"""Generation of tokens after prompts, with two compiled programs.

The first program reads the prompts and fills the caches. The second one is a loop on the device,
which chooses one token per row and iteration. It stops at an index that is an argument, so that the
same program can stream a few tokens or run to the end. To limit the number of compiled programs,
the number of rows is rounded up to the mesh, the prompt length to an eighth of a power of two, and
the number of new tokens to a multiple of 32.

B batch (prompts × samples), L length, P tokens of the prompts, N slots for new tokens, E end
tokens, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.decoding import (
    DrawParameters,
    Sampling,
    draw_tokens,
    is_end_token,
    likeliest_tokens,
    repeat_rows,
    search_beams,
)
from jaxlaunch.trainer.generate.network import Cache, Network, Weights
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel.sharding import constrain

# The shortest prompt length for which a program is compiled.
MIN_PROMPT_TOKENS = 16
# The largest number of samples for a prompt. The random key of a row is derived from
# prompt number × MAX_SAMPLES + sample number.
MAX_SAMPLES = 1 << 16
# The number of slots for new tokens is a multiple of this.
SLOT_MULTIPLE = 32
Ids = list[int]
# Returns whether a sample ends, given its tokens so far.
StopCondition = Callable[[Ids], bool]


class Sample(NamedTuple):
    """The continuation of a prompt.

    - `ids`: the tokens, without an end-of-text token.
    - `score`: the sum of the log-probabilities of all drawn tokens, including the end-of-text
      token, in nats; with
        beams, their mean.
    - `ended`: whether it ended with an end-of-text token or a stop text, and not because of
      `max_tokens`.
    """

    ids: list[int]
    score: float
    ended: bool


class State(NamedTuple):
    """State of the loop over new tokens.

    Attributes:
        caches: Keys and values of each layer.
        logits_BV: Logits of the next token.
        tokens_BN: New tokens.
        score_B: Sum of the log-probabilities of the new tokens.
        length_B: Number of new tokens of a row, including the one that ends it.
        done_B: Whether a row has ended.
        pad_B: Number of padding tokens before the prompt.
        sample_B: Number of a row's prompt and sample, from which its random keys are derived.
        token_index: Number of tokens that have been chosen.
    """

    caches: tuple[Cache, ...]
    logits_BV: Array
    tokens_BN: Array
    score_B: Array
    length_B: Array
    done_B: Array
    pad_B: Array
    sample_B: Array
    token_index: Array


class Generator:
    """The compiled programs of a network, for weights that may be replaced at any time.

    Attributes:
        network: The model.
        weights: Its weights.
        ends: Tokens that end a text.
    """

    def __init__(self, network: Network, weights: Weights, ends: Sequence[int] = ()) -> None:
        self.network, self.weights, self.ends = network, weights, tuple(ends)
        self._begin = jax.jit(self._begin_state, static_argnames=("copies", "slots"))
        self._loop = jax.jit(
            self._loop_tokens, static_argnames=("is_greedy", "is_cut"), donate_argnames="state"
        )
        self._search = jax.jit(partial(search_beams, network), static_argnames=("count", "slots"))
        self._score = jax.jit(self._score_rows)

    def generate(
        self, prompts: Sequence[Ids], sampling: Sampling, stops: StopCondition | None = None
    ) -> list[list[Sample]]:
        """Return `n` samples for each prompt, with beams the best first.

        Raises SpecError as `stream` does. Beam search ignores `stops`.
        """
        n, limit = sampling.n, sampling.max_tokens
        if sampling.beams == 1:
            *_, samples = self.stream(prompts, sampling, stops, every=16 if stops else limit)
            return [samples[first : first + n] for first in range(0, len(samples), n)]
        check_prompts(self.network, prompts, limit)
        arrays = *self._pad_prompts(prompts), limit, np.asarray(self.ends, np.int32)
        slots = _round_up(limit, SLOT_MULTIPLE)
        with self.network.tracing_context():
            texts = self._search(self.weights, *arrays, count=sampling.beams, slots=slots)
            tokens_BKN, length_BK, score_BK = map(np.asarray, texts)
        return [
            [
                self._to_sample(tokens_BKN[row, beam], length_BK[row, beam], score_BK[row, beam])
                for beam in range(n)
            ]
            for row in range(len(prompts))
        ]

    def stream(
        self,
        prompts: Sequence[Ids],
        sampling: Sampling,
        stops: StopCondition | None = None,
        *,
        every: int = 1,
    ) -> Iterator[list[Sample]]:
        """Yield all samples so far, grouped by prompt, after every `every` tokens.

        Args:
            prompts: Token ids of each prompt.
            sampling: Options of the sampling, without beams.
            stops: Condition that ends a sample, checked after every `every` tokens.
            every: Number of tokens between two yields.

        Raises:
            SpecError: A prompt is empty or has an unknown token, or there are too few positions.
        """
        check_prompts(self.network, prompts, sampling.max_tokens)
        tokens_BP, pad_B = self._pad_prompts(prompts)
        slots, count = _round_up(sampling.max_tokens, SLOT_MULTIPLE), len(prompts)
        start = tokens_BP.shape[1]
        static_options = {
            "is_greedy": sampling.temperature == 0,
            "is_cut": bool(sampling.cutting_fields),
        }
        with self.network.tracing_context():
            draw = DrawParameters.from_sampling(sampling, self.network.config.vocab)
            ends_E = jnp.asarray(self.ends, jnp.int32)
            state = self._begin(
                self.weights, tokens_BP, pad_B, count, copies=sampling.n, slots=slots
            )
            for stop in [*range(every, sampling.max_tokens, every), sampling.max_tokens]:
                state = self._loop(self.weights, state, stop, draw, ends_E, start, **static_options)
                samples, done_B = self._read_samples(state, count * sampling.n, stops)
                yield samples
                if done_B.all():
                    return
                if stops is not None:
                    state = state._replace(done_B=jnp.asarray(done_B))

    def compute_logprobs(self, rows: Sequence[Ids]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Score every token after the first.

        Returns:
            Two arrays [L - 1] for each row: the log-probabilities, and whether the token is the
            likeliest.

        Raises:
            SpecError: As in `stream`, except that the last token of a row needs no position.
        """
        check_prompts(self.network, [row[:-1] or row for row in rows], max_tokens=1)
        check_prompts(self.network, [row[-1:] for row in rows], max_tokens=1)
        tokens_BL = np.zeros((self._round_rows(len(rows)), _bucket_length(rows, 1)), np.int32)
        for index, row in enumerate(rows):
            tokens_BL[index, : len(row)] = row
        with self.network.tracing_context():
            logprob_BL, is_best_BL = map(np.asarray, self._score(self.weights, tokens_BL))
        ends = [len(row) - 1 for row in rows]
        return [(logprob_BL[i, :end], is_best_BL[i, :end]) for i, end in enumerate(ends)]

    # --- programs ---------------------------------------------------------------------------------

    def _begin_state(
        self,
        weights: Weights,
        tokens_BP: Array,
        pad_B: Array,
        count: Array,
        copies: int,
        slots: int,
    ) -> State:
        """Return the state after the prompts, each repeated `copies` times.

        The rows after the first `count` prompts only fill up the mesh and are done at once.
        """
        cache_slots = self.network.cache_slots(tokens_BP.shape[1] + slots)
        logits_BV, caches = self.network.run_prompts(weights, tokens_BP, pad_B, cache_slots)
        caches, logits_BV, pad_B = repeat_rows((caches, logits_BV, pad_B), copies)
        row_B = jnp.arange(len(pad_B), dtype=jnp.int32)
        state = State(
            caches,
            logits_BV,
            tokens_BN=jnp.zeros((len(pad_B), slots), jnp.int32),
            score_B=jnp.zeros(len(pad_B), jnp.float32),
            length_B=jnp.zeros_like(row_B),
            done_B=row_B >= count * copies,
            pad_B=pad_B,
            sample_B=row_B // copies * MAX_SAMPLES + row_B % copies,
            token_index=jnp.zeros((), jnp.int32),
        )
        return _constrain_state(state)

    def _loop_tokens(
        self,
        weights: Weights,
        state: State,
        stop: Array,
        draw: DrawParameters,
        ends_E: Array,
        start: Array,
        *,
        is_greedy: bool,
        is_cut: bool,
    ) -> State:
        """Choose tokens until there are `stop` of them, or until all rows are done.

        `start` is the position of the first new token in the padded rows.
        """

        def has_more(state: State) -> Array:
            return (state.token_index < stop) & ~jnp.all(state.done_B)

        def add_token(state: State) -> State:
            update = jax.lax.dynamic_update_slice_in_dim
            logits_BV, index = state.logits_BV.astype(jnp.float32), state.token_index
            if is_greedy:
                token_B = likeliest_tokens(logits_BV)
            else:
                token_B = draw_tokens(logits_BV, draw, state.sample_B, index, is_cut=is_cut)
            token_B = jnp.where(state.done_B, 0, token_B)
            logprob_B = _token_logprobs(logits_BV, token_B)
            logits_BV, caches = self.network.run_token(
                weights, token_B, start + index, state.pad_B, state.caches
            )
            state = state._replace(
                caches=caches,
                logits_BV=logits_BV,
                tokens_BN=update(state.tokens_BN, token_B[:, None], index, axis=1),
                score_B=state.score_B + jnp.where(state.done_B, 0.0, logprob_B),
                length_B=state.length_B + (~state.done_B).astype(jnp.int32),
                done_B=state.done_B | is_end_token(token_B, ends_E),
                token_index=index + 1,
            )
            return _constrain_state(state)

        return _constrain_state(jax.lax.while_loop(has_more, add_token, state))

    def _score_rows(self, weights: Weights, tokens_BL: Array) -> tuple[Array, Array]:
        logits_BLV = self.network.compute_logits(weights, tokens_BL[:, :-1]).astype(jnp.float32)
        next_BL = tokens_BL[:, 1:]
        logprob_BL = constrain(_token_logprobs(logits_BLV, next_BL), None, None)
        return logprob_BL, constrain(likeliest_tokens(logits_BLV) == next_BL, None, None)

    # --- on the host ------------------------------------------------------------------------------

    def _read_samples(
        self, state: State, count: int, stops: StopCondition | None
    ) -> tuple[list[Sample], np.ndarray]:
        """Return the first `count` rows as samples, and which rows are done or end by `stops`."""
        rows = zip(*map(np.asarray, (state.tokens_BN, state.length_B, state.score_B)), strict=True)
        done_B = np.array(state.done_B)
        samples = []
        for row, numbers in enumerate(itertools.islice(rows, count)):
            sample = self._to_sample(*numbers)
            if stops is not None and stops(sample.ids):
                sample, done_B[row] = sample._replace(ended=True), True
            samples.append(sample)
        return samples, done_B

    def _to_sample(
        self, tokens_N: np.ndarray, length: np.integer[Any], score: np.floating[Any]
    ) -> Sample:
        ids = tokens_N[:length].tolist()
        has_ended = bool(ids) and ids[-1] in self.ends
        return Sample(ids[:-1] if has_ended else ids, float(score), has_ended)

    def _pad_prompts(self, prompts: Sequence[Ids]) -> tuple[np.ndarray, np.ndarray]:
        """Pad the prompts on the left, and add rows to fill the mesh.

        Returns:
            The tokens [B, P], and the number of padding tokens before each prompt [B].
        """
        length = _bucket_length(prompts, 8)
        tokens_BP = np.zeros((self._round_rows(len(prompts)), length), np.int32)
        pad_B = np.full(len(tokens_BP), length - 1, np.int32)
        for row, ids in enumerate(prompts):
            tokens_BP[row, length - len(ids) :] = ids
            pad_B[row] = length - len(ids)
        return tokens_BP, pad_B

    def _round_rows(self, count: int) -> int:
        return _round_up(count, meshes.count_shards(self.network.mesh))


def check_prompts(network: Network, prompts: Sequence[Ids], max_tokens: int) -> None:
    """Raise SpecError for an empty prompt, an unknown token, or more tokens than positions."""
    vocab, positions = network.config.vocab, network.position_rows
    if not prompts:
        raise SpecError("there is no prompt; give at least one")
    for number, ids in enumerate(prompts, 1):
        if not ids:
            raise SpecError(f"prompt {number} has no tokens; give at least one")
        if unknown := [token for token in ids if not 0 <= token < vocab]:
            allowed = f"the model those from 0 to {vocab - 1}"
            raise SpecError(f"prompt {number} has the token {unknown[0]}, {allowed}")
        if positions is not None and len(ids) + max_tokens - 1 > positions:
            raise SpecError(
                f"prompt {number} has {len(ids)} tokens, and max_tokens = {max_tokens} more: "
                f"the model has {positions} positions; shorten the prompt, or lower max_tokens"
            )


def _constrain_state(state: State) -> State:
    """Give the state the shardings that both programs expect.

    The caches and logits are split; arrays that the host reads are replicated.
    """
    arrays = state._asdict()
    caches, logits_BV = arrays.pop("caches"), arrays.pop("logits_BV")
    for name, array in arrays.items():
        arrays[name] = constrain(array, *[None] * array.ndim)
    return State(caches, constrain(logits_BV, "batch", "vocab"), **arrays)


def _token_logprobs(logits: Array, tokens: Array) -> Array:
    """Return the log-probabilities of tokens [...] for logits [..., V]."""
    logprobs = jax.nn.log_softmax(logits)
    return jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]


def _bucket_length(rows: Sequence[Ids], parts: int) -> int:
    """Round the length of the longest row up, to a multiple of the next power of two / `parts`.

    This limits both the number of compiled programs and the padding.
    """
    length = max(map(len, rows))
    return _round_up(length, max(MIN_PROMPT_TOKENS, 2 ** math.ceil(math.log2(length)) // parts))


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
