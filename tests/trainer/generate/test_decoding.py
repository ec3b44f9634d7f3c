"""Which tokens may be drawn, and which ways of choosing are refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch import programs
from jaxlaunch.trainer.attention.implementations import MASKED_SCORE
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.decoding import (
    CUTTING_FIELDS,
    DrawParameters,
    Sampling,
    SamplingOptions,
    _cut_logits,
)

LOGITS = np.log(np.array([[0.1, 0.4, 0.2, 0.3]], np.float32))


@pytest.mark.parametrize(
    ("how", "left"),
    [
        ({}, [0, 1, 2, 3]),
        ({"top_k": 2}, [1, 3]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.5}, [1, 3]),
        ({"top_p": 0.71}, [1, 2, 3]),
        ({"top_k": 2, "top_p": 0.57}, [1]),  # 0.4 of the 0.7 that top_k leaves
        ({"top_k": 2, "top_p": 0.58}, [1, 3]),
        ({"min_p": 0.01}, [0, 1, 2, 3]),
        ({"min_p": 0.6}, [1, 3]),
        ({"top_k": 3, "min_p": 0.2}, [1, 2, 3]),
    ],
)
def test_what_is_left_to_draw_from(how: dict[str, Any], left: list[int]) -> None:
    assert left_of(LOGITS, Sampling(temperature=1.0, **how)) == [left]


def left_of(logits_BV: np.ndarray, how: Sampling) -> list[list[int]]:
    found_BV = np.asarray(
        _cut_logits(jnp.asarray(logits_BV), DrawParameters.from_sampling(how, logits_BV.shape[1]))
    )
    return [np.flatnonzero(row > MASKED_SCORE).tolist() for row in found_BV]


@pytest.mark.parametrize("min_p", [0.003, 0.1, 0.5, 0.9, 1.0])
def test_min_p_leaves_what_is_likely_enough_beside_the_likeliest(min_p: float) -> None:
    logits_BV = np.random.default_rng(0).normal(0, 2, (8, 64)).astype(np.float32)
    logits_BV[0, :3] = 9.0  # as likely as each other
    share_BV = np.exp(logits_BV.astype(np.float64))
    share_BV /= share_BV.sum(axis=1, keepdims=True)
    likely_BV = share_BV >= min_p * share_BV.max(axis=1, keepdims=True)
    found = left_of(logits_BV, Sampling(temperature=1.0, min_p=min_p))
    assert found == [np.flatnonzero(row).tolist() for row in likely_BV]
    assert found[0][:3] == [0, 1, 2] and (min_p > 0.01 or max(map(len, found)) > 20)


def test_every_field_is_an_option_of_the_command_and_of_a_call() -> None:
    fields = {field.name: 1 for field in dataclasses.fields(Sampling)}
    assert programs.Sample(folder="f", **fields).sampling_options() == fields  # type: ignore[arg-type]
    assert SamplingOptions.__annotations__.keys() == fields.keys()
    assert [Sampling(temperature=1.0, **{name: 1}).cutting_fields for name in CUTTING_FIELDS] == [
        [name] for name in CUTTING_FIELDS
    ]  # type: ignore[arg-type]
    assert not Sampling(temperature=1.0).cutting_fields


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"max_tokens": 0}, "max_tokens = 0 is not a whole number above 0"),
        ({"temperature": -1.0}, "temperature = -1.0 is not a number from 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p = 1.5 is not above 0 and at most 1"),
        ({"n": 3}, "n = 3 samples at temperature 0 would be equal; give a temperature such as 1"),
        ({"temperature": 1.0, "min_p": 0.0}, "min_p = 0.0 is not above 0 and at most 1"),
        ({"top_p": 0.9, "min_p": 0.1}, "top_p, min_p at temperature 0 would do nothing"),
        ({"beams": 4, "min_p": 0.1}, "beams = 4 does not sample: leave min_p out"),
        ({"beams": 4, "temperature": 1.0}, "beams = 4 does not sample: leave temperature out"),
        ({"beams": 2, "n": 3}, "n = 3 is more than beams = 2, each of which gives one sample"),
        ({"seed": -1}, "seed = -1 is not a whole number from 0"),
    ],
)
def test_what_makes_no_sense_is_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as raised:
        Sampling(**how)
    assert says in str(raised.value)
