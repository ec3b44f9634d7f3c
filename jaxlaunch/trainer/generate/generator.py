"""Generates tokens after prompts: one program for the prompts, one for the loop over new tokens.

Both are compiled for the shapes of a batch: rows, prompt length rounded up to an eighth of a power of two, and slots
rounded up. The loop runs on the device up to an index that is an argument: the same program streams token by token and
runs to the end.

B batch (prompts × samples), P tokens of the prompts, N tokens that fit after them, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate import beams
from jaxlaunch.trainer.generate.cache import Cache
from jaxlaunch.trainer.generate.choose import Draw, Sampling, drawn, greedy
from jaxlaunch.trainer.generate.network import Config, Network, Weights
from jaxlaunch.trainer.parallel import mesh as meshes
from jaxlaunch.trainer.parallel.sharding import constrain

LEAST = 16  # tokens of the shortest prompt that a program is compiled for
MOST = 1 << 16  # samples of a prompt, each of which draws by its prompt's number and its own
ROUND = 32  # the tokens that fit after the prompts are a multiple of it
Ids = list[int]
Stops = Callable[[Ids], bool]  # whether the tokens so far are enough


class Sample(NamedTuple):
    """The continuation of a prompt.

    - `ids`: the tokens, without an end-of-text token.
    - `score`: the sum of the log-probabilities of all drawn tokens, including the end-of-text token, in nats; with
        beams, their mean.
    - `ended`: whether it ended with an end-of-text token or a stop text, and not because of `max_tokens`.
    """

    ids: list[int]
    score: float
    ended: bool


class State(NamedTuple):
    """What the loop carries."""

    caches: tuple[Cache, ...]
    logits_BV: Array  # of the next token
    tokens_BN: Array
    score_B: Array
    length_B: Array  # tokens of a row, the one that ends it included
    done_B: Array
    pad_B: Array
    sample_B: Array  # number of a row's prompt and of its sample, by which it draws
    at: Array  # tokens that were chosen


class Generator:
    """Generates with `weights`, which may be replaced by others. `ends` are the tokens that end a text."""

    def __init__(self, network: Network, weights: Weights, ends: Sequence[int] = ()) -> None:
        self.network, self.weights, self.ends = network, weights, tuple(ends)
        self._begin = jax.jit(self._begun, static_argnames=("copies", "room"))
        self._loop = jax.jit(self._looped, static_argnames=("is_greedy", "is_cut"), donate_argnames="state")
        self._search = jax.jit(partial(beams.search, network), static_argnames=("count", "room"))
        self._score = jax.jit(self._scored)

    def generate(self, prompts: Sequence[Ids], how: Sampling, stops: Stops | None = None) -> list[list[Sample]]:
        """`how.n` samples of each prompt, in its order; of beams the best first. Raises SpecError as `stream` does."""
        if how.beams > 1:
            return self._beams(prompts, how)
        *_, found = self.stream(prompts, how, stops, every=16 if stops else how.max_tokens)
        return [found[at : at + how.n] for at in range(0, len(found), how.n)]

    def stream(
        self, prompts: Sequence[Ids], how: Sampling, stops: Stops | None = None, *, every: int = 1
    ) -> Iterator[list[Sample]]:
        """All samples so far, those of a prompt beside each other, after every so many tokens.

        `stops` is asked as often, and cuts the tokens that it did not ask for. Raises SpecError for an empty prompt, a
        token that the model does not have, and where GPT-2 has no positions for so many tokens.
        """
        check(self.network.config, prompts, how)
        tokens_BP, pad_B = self._padded(prompts, how.n)
        room = -(-how.max_tokens // ROUND) * ROUND
        with self.network.context():
            draw = Draw.of(how, self.network.config.vocab)
            ends_E = jnp.asarray(self.ends, jnp.int32)
            state = self._begin(self.weights, tokens_BP, pad_B, len(prompts), copies=how.n, room=room)
            for until in [*range(every, how.max_tokens, every), how.max_tokens]:
                state = self._loop(
                    self.weights, state=state, until=until, draw=draw, ends_E=ends_E, start=tokens_BP.shape[1],
                    is_greedy=how.temperature == 0, is_cut=how.is_cut,
                )  # fmt: skip
                samples, done_B = self._read(state, len(prompts) * how.n, stops)
                yield samples
                if done_B.all():
                    return
                if stops is not None:
                    state = state._replace(done_B=jnp.asarray(done_B))

    def logprobs(self, rows: Sequence[Ids]) -> list[tuple[np.ndarray, np.ndarray]]:
        """For each row the log-probability of every token after the first, float32 [L - 1], and whether it was the
        likeliest, bool [L - 1]. Raises SpecError as `stream` does; the last token of a row needs no position."""
        for asked in ([row[:-1] or row for row in rows], [row[-1:] for row in rows]):
            check(self.network.config, asked, Sampling(max_tokens=1))
        length = _bucket(max(map(len, rows)), 1)
        tokens_BL = np.zeros((self._rows(len(rows)), length), np.int32)
        for at, row in enumerate(rows):
            tokens_BL[at, : len(row)] = row
        with self.network.context():
            logprob_BL, is_best_BL = map(np.asarray, self._score(self.weights, tokens_BL))
        return [(logprob_BL[at, : len(row) - 1], is_best_BL[at, : len(row) - 1]) for at, row in enumerate(rows)]

    # --- programs -----------------------------------------------------------------------------------------------------

    def _begun(
        self, weights: Weights, tokens_BP: Array, pad_B: Array, prompts: Array, *, copies: int, room: int
    ) -> State:
        """The state after the prompts, each `copies` times; the rows from `prompts` on only fill the mesh."""
        slots = self.network.slots(tokens_BP.shape[1] + room)
        logits_BV, caches = self.network.prompts(weights, tokens_BP, pad_B, slots)
        caches, logits_BV, pad_B = jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), (caches, logits_BV, pad_B))
        rows = pad_B.shape[0]
        row_B = jnp.arange(rows, dtype=jnp.int32)
        return _held(
            State(
                caches,
                logits_BV,
                tokens_BN=jnp.zeros((rows, room), jnp.int32),
                score_B=jnp.zeros(rows, jnp.float32),
                length_B=jnp.zeros(rows, jnp.int32),
                done_B=row_B >= prompts * copies,
                pad_B=pad_B,
                sample_B=row_B // copies * MOST + row_B % copies,
                at=jnp.zeros((), jnp.int32),
            )
        )

    def _looped(
        self,
        weights: Weights,
        state: State,
        until: Array,
        draw: Draw,
        ends_E: Array,
        start: Array,
        *,
        is_greedy: bool,
        is_cut: bool,
    ) -> State:
        """The state when `until` tokens were chosen, or every row is done. `start` is the index of the first."""

        def is_on(state: State) -> Array:
            return (state.at < until) & ~jnp.all(state.done_B)

        def chosen(state: State) -> State:
            logits_BV, at = state.logits_BV.astype(jnp.float32), state.at
            token_B = greedy(logits_BV) if is_greedy else drawn(logits_BV, draw, state.sample_B, at, is_cut=is_cut)
            token_B = jnp.where(state.done_B, 0, token_B)
            logprob_B = jnp.take_along_axis(jax.nn.log_softmax(logits_BV), token_B[:, None], axis=1)[:, 0]
            logits_BV, caches = self.network.token(weights, token_B, start + at, state.pad_B, state.caches)
            return _held(
                state._replace(
                    caches=caches,
                    logits_BV=logits_BV,
                    tokens_BN=jax.lax.dynamic_update_slice_in_dim(state.tokens_BN, token_B[:, None], at, axis=1),
                    score_B=state.score_B + jnp.where(state.done_B, 0.0, logprob_B),
                    length_B=state.length_B + (~state.done_B).astype(jnp.int32),
                    done_B=state.done_B | beams.is_end(token_B, ends_E),
                    at=at + 1,
                )
            )

        return _held(jax.lax.while_loop(is_on, chosen, state))

    def _scored(self, weights: Weights, tokens_BL: Array) -> tuple[Array, Array]:
        logits_BLV = self.network.logits(weights, tokens_BL[:, :-1]).astype(jnp.float32)
        next_BL = tokens_BL[:, 1:]
        logprob_BL = jnp.take_along_axis(jax.nn.log_softmax(logits_BLV), next_BL[..., None], axis=2)[..., 0]
        return constrain(logprob_BL, None, None), constrain(greedy(logits_BLV) == next_BL, None, None)

    # --- on the host --------------------------------------------------------------------------------------------------

    def _beams(self, prompts: Sequence[Ids], how: Sampling) -> list[list[Sample]]:
        check(self.network.config, prompts, how)
        tokens_BP, pad_B = self._padded(prompts, how.beams)
        room = -(-how.max_tokens // ROUND) * ROUND
        with self.network.context():
            ends_E = jnp.asarray(self.ends, jnp.int32)
            found = self._search(self.weights, tokens_BP, pad_B, how.max_tokens, ends_E, count=how.beams, room=room)
            tokens_BKN, length_BK, score_BK = map(np.asarray, found)
        return [
            [
                self._sample(tokens_BKN[row, beam], int(length_BK[row, beam]), float(score_BK[row, beam]))
                for beam in range(how.n)
            ]
            for row in range(len(prompts))
        ]

    def _read(self, state: State, count: int, stops: Stops | None) -> tuple[list[Sample], np.ndarray]:
        """The first `count` rows as samples, and which rows are done."""
        tokens_BN, length_B, score_B = map(np.asarray, (state.tokens_BN, state.length_B, state.score_B))
        done_B = np.array(state.done_B)
        samples = []
        for row in range(count):
            sample = self._sample(tokens_BN[row], int(length_B[row]), float(score_B[row]))
            if stops is not None and stops(sample.ids):
                sample, done_B[row] = sample._replace(ended=True), True
            samples.append(sample)
        return samples, done_B

    def _sample(self, tokens_N: np.ndarray, length: int, score: float) -> Sample:
        ids = tokens_N[:length].tolist()
        ended = bool(ids) and ids[-1] in self.ends
        return Sample(ids[:-1] if ended else ids, score, ended)

    def _padded(self, prompts: Sequence[Ids], copies: int) -> tuple[np.ndarray, np.ndarray]:
        """The prompts with zeros on their left, and how many: rows for the mesh, columns for few programs."""
        length = _bucket(max(map(len, prompts)), 8)
        tokens_BP = np.zeros((self._rows(len(prompts)), length), np.int32)
        pad_B = np.full(len(tokens_BP), length - 1, np.int32)
        for row, ids in enumerate(prompts):
            tokens_BP[row, length - len(ids) :] = ids
            pad_B[row] = length - len(ids)
        return tokens_BP, pad_B

    def _rows(self, count: int) -> int:
        shards = meshes.shards(self.network.mesh)
        return math.ceil(count / shards) * shards


def check(config: Config, prompts: Sequence[Ids], how: Sampling) -> None:
    """Raises SpecError for an empty prompt, a token that the model does not have, and more tokens than GPT-2's
    positions."""
    if not prompts:
        raise SpecError("there is no prompt")
    for number, ids in enumerate(prompts, 1):
        if not ids:
            raise SpecError(f"prompt {number} has no tokens; give at least one")
        if wrong := [each for each in ids if not 0 <= each < config.vocab]:
            raise SpecError(f"prompt {number} has the token {wrong[0]}, the model those from 0 to {config.vocab - 1}")
        if isinstance(config, spec.GPT2) and len(ids) + how.max_tokens - 1 > config.rows:
            raise SpecError(
                f"prompt {number} has {len(ids)} tokens, and max_tokens = {how.max_tokens} more: the model has "
                f"{config.rows} positions; shorten the prompt, or lower max_tokens"
            )


def _held(state: State) -> State:
    """The state as every program takes and returns it: what the host reads is on all devices."""
    whole: dict[str, Any] = {
        name: constrain(getattr(state, name), *[None] * getattr(state, name).ndim)
        for name in ("tokens_BN", "score_B", "length_B", "done_B", "pad_B", "sample_B", "at")
    }
    return state._replace(logits_BV=constrain(state.logits_BV, "batch", "vocab"), **whole)


def _bucket(length: int, parts: int) -> int:
    """The length that a program is compiled for: few of them, and little that only fills a row.

    Rounded up to so many parts of a power of two.
    """
    step: int = max(LEAST, 2 ** math.ceil(math.log2(length)) // parts)
    return -(-length // step) * step
