"""Generation against the plain forward pass: with a cache, padded, sharded, drawn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.generate.decoding import Sampling
from jaxlaunch.trainer.generate.generator import Sample
from tests.trainer.generate.generators import bytes_model, generator
from tests.trainer.tiny import DECODER, EXPERTS, GPT2, WIDE

ROWS = [[5, 1, 3, 9, 2, 7, 4, 6, 8], [3, 30], [11, 12, 13, 14, 15]]
LONG = 24  # tokens behind the prompts: beyond WIDE's window of 6
SPARSE = EXPERTS.model_copy(update={"capacity": 1.0})  # which generation has no use for
WIDE_GPT2 = GPT2.model_copy(update={"positions": 64})


@pytest.mark.parametrize("model", [WIDE, WIDE_GPT2, SPARSE], ids=["decoder", "gpt2", "experts"])
def test_cache_does_not_change_the_logits(model: Any) -> None:
    outputs = generator(model)
    network, weights = outputs.network, outputs.weights
    after = np.random.default_rng(1).integers(0, 32, (len(ROWS), LONG))
    tokens_BP, pad_B = outputs._pad_prompts(ROWS)

    def fed(weights: Any, tokens_BP: Any, pad_B: Any, after_BN: Any) -> Any:
        start = tokens_BP.shape[1]
        slots = network.cache_slots(start + LONG)
        first, caches = network.run_prompts(weights, tokens_BP, pad_B, slots)

        def one(caches: Any, index: Any) -> Any:
            token_B, at = after_BN[:, index], start + index
            return network.run_token(weights, token_B, at, pad_B, caches)[::-1]

        return first, jax.lax.scan(one, caches, jnp.arange(LONG))[1]

    with network.tracing_context():
        first_BV, after_NBV = jax.jit(fed)(weights, tokens_BP, pad_B, after)
        whole = np.zeros((len(ROWS), 48), np.int32)
        for row, ids in enumerate(ROWS):
            whole[row, : len(ids) + LONG] = [*ids, *after[row]]
        plain_BLV = np.asarray(jax.jit(network.compute_logits)(weights, whole))
    for row, ids in enumerate(ROWS):
        cached_LV = np.concatenate([first_BV[row][None], after_NBV[:, row]])
        plain_LV = plain_BLV[row, len(ids) - 1 : len(ids) + LONG]
        np.testing.assert_allclose(cached_LV, plain_LV, rtol=0, atol=1e-5)


@pytest.fixture(scope="module")
def alone() -> list[list[Sample]]:
    """What each row goes on with by itself."""
    outputs = generator(DECODER)
    return [outputs.generate([ids], Sampling(max_tokens=12))[0] for ids in ROWS]


def test_padding_changes_nothing_and_scores_sum_log_probabilities(
    alone: list[list[Sample]],
) -> None:
    outputs = generator(DECODER)
    together = outputs.generate(ROWS, Sampling(max_tokens=12))
    assert [row[0].ids for row in together] == [row[0].ids for row in alone]
    whole = [[*ids, *sample.ids] for ids, (sample,) in zip(ROWS, together, strict=True)]
    scores = outputs.compute_logprobs(whole)
    for ids, (sample,), (logprob_L, is_best_L) in zip(ROWS, together, scores, strict=True):
        assert is_best_L[len(ids) - 1 :].all()
        assert sample.score == pytest.approx(logprob_L[len(ids) - 1 :].sum(), abs=1e-4)


def test_generation_is_equal_on_a_mesh(alone: list[list[Sample]]) -> None:
    actual = generator(DECODER, dp=2, fsdp=2, mp=2).generate(ROWS, Sampling(max_tokens=12))
    assert [row[0].ids for row in actual] == [row[0].ids for row in alone]


def test_split_experts_generate_equally() -> None:
    for options in (Sampling(max_tokens=8), Sampling(max_tokens=5, beams=3, n=2)):
        rows = []
        for axes in ({}, {"ep": 2, "mp": 2}):
            samples = generator(EXPERTS, **axes).generate(ROWS, options)
            rows.append([[sample.ids for sample in row] for row in samples])
        assert rows[0] == rows[1]


def test_stream_grows_with_one_program(alone: list[list[Sample]]) -> None:
    outputs = generator(DECODER)
    seen = [actual[0] for actual in outputs.stream([ROWS[0]], Sampling(max_tokens=12), every=5)]
    assert [len(sample.ids) for sample in seen] == [5, 10, 12]
    assert seen[-1].ids == alone[0][0].ids
    assert outputs._loop._cache_size() == 1  # type: ignore[attr-defined]


def test_rows_end_independently(alone: list[list[Sample]]) -> None:
    end = alone[0][0].ids[4]
    stops = [ids.index(end) if end in ids else 12 for ids in (row[0].ids for row in alone)]
    actual = generator(DECODER, ends=(end,)).generate(ROWS, Sampling(max_tokens=12))
    expected = [row[0].ids[:stop] for row, stop in zip(alone, stops, strict=True)]
    assert [row[0].ids for row in actual] == expected
    assert [row[0].ended for row in actual] == [stop < 12 for stop in stops]


def test_draws_depend_on_the_seed_only() -> None:
    outputs = bytes_model()
    options = {"max_tokens": 8, "temperature": 1.5}
    first = outputs.generate([[1, 2]], Sampling(seed=3, **options))[0][0].ids
    four, second = outputs.generate([[1, 2], [7]], Sampling(seed=3, n=4, **options))
    assert four[0].ids == first
    assert len({tuple(sample.ids) for sample in (*four, *second)}) == 8
    assert outputs.generate([[1, 2]], Sampling(seed=4, **options))[0][0].ids != first
    for one_token in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        ((cut,),) = outputs.generate([[1, 2]], Sampling(**options, **one_token))
        ((greedy,),) = outputs.generate([[1, 2]], Sampling(max_tokens=8))
        assert cut.ids == greedy.ids


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {"max_tokens": 1}, "prompt 2 has no tokens; give at least one"),
        ([[1, 32]], {"max_tokens": 1}, "prompt 1 has the token 32, the model those from 0 to 31"),
        ([[1] * 10], {"max_tokens": 8}, "prompt 1 has 10 tokens, and max_tokens = 8 more: the"),
    ],
)
def test_invalid_prompts_are_rejected(
    rows: list[list[int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        generator(GPT2).generate(rows, Sampling(**options))
