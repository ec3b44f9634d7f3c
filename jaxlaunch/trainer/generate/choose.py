"""The next token of each row, out of the logits: the likeliest, or drawn at a temperature.

B batch, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxlaunch.trainer.attention.implementations import UNSEEN
from jaxlaunch.trainer.errors import SpecError

CUTTING = ("top_k", "top_p", "min_p")  # fields of Sampling that leave out tokens


class SamplingOptions(TypedDict, total=False):
    """The fields of Sampling, for type checkers of calls that pass them on."""

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
    """How tokens are chosen. Raises SpecError for a number that is out of its range, or that would do nothing."""

    max_tokens: int = 128
    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None  # of the likeliest tokens alone
    top_p: float | None = None  # of the fewest likeliest tokens that together are this likely
    min_p: float | None = None  # of the tokens at least this share as likely as the likeliest
    beams: int = 1
    n: int = 1  # samples of a prompt
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = [
            ("max_tokens", self.max_tokens, "a whole number above 0", self.max_tokens >= 1),
            ("temperature", self.temperature, "a number from 0", 0 <= self.temperature < math.inf),
            ("top_k", self.top_k, "a whole number above 0", self.top_k is None or self.top_k >= 1),
            ("top_p", self.top_p, "above 0 and at most 1", self.top_p is None or 0 < self.top_p <= 1),
            ("min_p", self.min_p, "above 0 and at most 1", self.min_p is None or 0 < self.min_p <= 1),
            ("beams", self.beams, "a whole number above 0", self.beams >= 1),
            ("n", self.n, "a whole number from 1 to 65536", 1 <= self.n <= 1 << 16),
            ("seed", self.seed, "a whole number from 0 to 2**64 - 1", 0 <= self.seed < 2**64),
        ]
        for name, value, wanted, is_right in wrong:
            if not is_right:
                raise SpecError(f"{name} = {value} is not {wanted}")
        if self.beams > 1:
            self._check_beams()
        elif self.temperature == 0:
            self._check_greedy()

    @property
    def is_cut(self) -> bool:
        """Whether tokens are left out of what is drawn from."""
        return any(getattr(self, name) is not None for name in CUTTING)

    def _check_beams(self) -> None:
        drawing = [name for name in ("temperature", *CUTTING) if getattr(self, name)]
        if drawing:
            raise SpecError(f"beams = {self.beams} does not sample: leave {', '.join(drawing)} out")
        if self.n > self.beams:
            raise SpecError(f"n = {self.n} is more than beams = {self.beams}, each of which gives one sample")

    def _check_greedy(self) -> None:
        if self.n > 1:
            raise SpecError(f"n = {self.n} samples at temperature 0 would be equal; give a temperature such as 1")
        if self.is_cut:
            cutting = [name for name in CUTTING if getattr(self, name) is not None]
            raise SpecError(f"{', '.join(cutting)} at temperature 0 would do nothing; give a temperature such as 1")


class Draw(NamedTuple):
    """A Sampling on the device: one program serves all of its numbers."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    key: Array

    @classmethod
    def of(cls, how: Sampling, vocab: int) -> Draw:
        """With every number given: top_k = V, top_p = 1 and min_p = 0 leave nothing out."""
        high, low = divmod(how.seed, 2**32)
        key = jax.random.key(np.uint32(low))
        return cls(
            jnp.float32(how.temperature or 1.0),
            jnp.int32(min(how.top_k or vocab, vocab)),
            jnp.float32(1.0 if how.top_p is None else how.top_p),
            jnp.float32(how.min_p or 0.0),
            jax.random.fold_in(key, high) if high else key,
        )


def greedy(logits_BV: Array) -> Array:
    """The likeliest token of each row; of equals the first."""
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


def drawn(logits_BV: Array, draw: Draw, sample_B: Array, at: Array, *, is_cut: bool) -> Array:
    """A token of each row, for its sample number and index: what a row draws does not depend on the rows beside it.

    `is_cut`: whether top_k, top_p and min_p are looked at. As in transformers, top_k is applied to the tempered logits,
    top_p to what it leaves, and min_p to what both leave, among which the likeliest token always is.
    """
    logits_BV = logits_BV.astype(jnp.float32) / draw.temperature
    if is_cut:
        logits_BV = _cut(logits_BV, draw)
    keys_B = jax.vmap(lambda sample: jax.random.fold_in(jax.random.fold_in(draw.key, sample), at))(sample_B)
    return jax.vmap(jax.random.categorical)(keys_B, logits_BV).astype(jnp.int32)


def _cut(logits_BV: Array, draw: Draw) -> Array:
    """Logits without the tokens that `draw` leaves out; tokens as likely as the last that stays, stay."""
    ranked_BV = jnp.flip(jnp.sort(logits_BV, axis=-1), axis=-1)
    is_in_BV = jnp.arange(logits_BV.shape[1])[None, :] < draw.top_k
    share_BV = jax.nn.softmax(jnp.where(is_in_BV, ranked_BV, UNSEEN))
    is_in_BV &= jnp.cumsum(share_BV, axis=-1) - share_BV < draw.top_p  # the likelier ones do not suffice
    is_in_BV &= share_BV >= draw.min_p * share_BV[:, :1]
    least_B1 = jnp.min(jnp.where(is_in_BV, ranked_BV, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits_BV >= least_B1, logits_BV, UNSEEN)
