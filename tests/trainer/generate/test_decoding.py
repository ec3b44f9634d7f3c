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
    ("options", "left"),
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
def test_cut_leaves_the_likeliest_tokens(options: dict[str, Any], left: list[int]) -> None:
    assert remaining_tokens(LOGITS, Sampling(temperature=1.0, **options)) == [left]


def remaining_tokens(logits_BV: np.ndarray, options: Sampling) -> list[list[int]]:
    parameters = DrawParameters.from_sampling(options, logits_BV.shape[1])
    found_BV = np.asarray(_cut_logits(jnp.asarray(logits_BV), parameters))
    return [np.flatnonzero(row > MASKED_SCORE).tolist() for row in found_BV]


@pytest.mark.parametrize("min_p", [0.003, 0.1, 0.5, 0.9, 1.0])
def test_min_p_is_relative_to_the_largest_probability(min_p: float) -> None:
    logits_BV = np.random.default_rng(0).normal(0, 2, (8, 64)).astype(np.float32)
    logits_BV[0, :3] = 9.0  # as likely as each other
    share_BV = np.exp(logits_BV.astype(np.float64))
    share_BV /= share_BV.sum(axis=1, keepdims=True)
    likely_BV = share_BV >= min_p * share_BV.max(axis=1, keepdims=True)
    actual = remaining_tokens(logits_BV, Sampling(temperature=1.0, min_p=min_p))
    assert actual == [np.flatnonzero(row).tolist() for row in likely_BV]
    assert actual[0][:3] == [0, 1, 2] and (min_p > 0.01 or max(map(len, actual)) > 20)


def test_every_field_is_an_option() -> None:
    fields = {field.name: 1 for field in dataclasses.fields(Sampling)}
    assert programs.Sample(folder="f", **fields).sampling_options() == fields  # type: ignore[arg-type]
    assert SamplingOptions.__annotations__.keys() == fields.keys()
    for name in CUTTING_FIELDS:
        options: dict[str, Any] = {name: 1}
        assert Sampling(temperature=1.0, **options).cutting_fields == [name]
    assert not Sampling(temperature=1.0).cutting_fields


@pytest.mark.parametrize(
    ("options", "message"),
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
def test_invalid_sampling_is_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as raised:
        Sampling(**options)
    assert message in str(raised.value)
