"""Which tokens may be drawn, and which ways of choosing are refused."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch.trainer.attention.implementations import UNSEEN
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.choose import Sampling, _cut

LOGITS = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))


@pytest.mark.parametrize(
    ("top_k", "top_p", "left"),
    [
        (4, 1.0, [0, 1, 2, 3]),
        (2, 1.0, [1, 3]),
        (4, 0.39, [1]),
        (4, 0.5, [1, 3]),
        (4, 0.71, [1, 2, 3]),
        (2, 0.57, [1]),  # 0.4 of the 0.7 that top_k leaves
        (2, 0.58, [1, 3]),
    ],
)
def test_what_is_left_to_draw_from(top_k: int, top_p: float, left: list[int]) -> None:
    found = np.asarray(_cut(jnp.asarray(LOGITS), jnp.int32(top_k), jnp.float32(top_p)))
    assert np.flatnonzero(found[0] > UNSEEN).tolist() == left


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"max_tokens": 0}, "max_tokens = 0 is not a whole number above 0"),
        ({"temperature": -1.0}, "temperature = -1.0 is not a number from 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p = 1.5 is not above 0 and at most 1"),
        ({"n": 3}, "n = 3 samples at temperature 0 would be equal; give a temperature such as 1"),
        ({"top_p": 0.9}, "top_p at temperature 0 would do nothing"),
        ({"beams": 4, "temperature": 1.0}, "beams = 4 does not sample: leave temperature out"),
        ({"beams": 2, "n": 3}, "n = 3 is more than beams = 2, each of which gives one sample"),
        ({"seed": -1}, "seed = -1 is not a whole number from 0"),
    ],
)
def test_what_makes_no_sense_is_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as raised:
        Sampling(**how)
    assert says in str(raised.value)
