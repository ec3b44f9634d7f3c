"""Generation against the plain forward pass: with a cache, padded, sharded, drawn."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch.trainer import spec
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
def test_with_a_cache_the_logits_are_those_without(model: Any) -> None:
    made = generator(model)
    network, weights = made.network, made.weights
    after = np.random.default_rng(1).integers(0, 32, (len(ROWS), LONG))
    tokens_BP, pad_B = made._pad_prompts(ROWS)

    def fed(weights: Any, tokens_BP: Any, pad_B: Any, after_BN: Any) -> Any:
        start = tokens_BP.shape[1]
        first, caches = network.run_prompts(
            weights, tokens_BP, pad_B, network.cache_slots(start + LONG)
        )

        def one(caches: Any, at: Any) -> Any:
            logits, caches = network.run_token(weights, after_BN[:, at], start + at, pad_B, caches)
            return caches, logits

        return first, jax.lax.scan(one, caches, jnp.arange(LONG))[1]

    with network.tracing_context():
        first_BV, after_NBV = jax.jit(fed)(weights, tokens_BP, pad_B, after)
        whole = np.zeros((len(ROWS), 48), np.int32)
        for row, ids in enumerate(ROWS):
            whole[row, : len(ids) + LONG] = [*ids, *after[row]]
        plain_BLV = np.asarray(jax.jit(network.compute_logits)(weights, whole))
    for row, ids in enumerate(ROWS):
        cached_LV = np.concatenate([first_BV[row][None], after_NBV[:, row]])
        np.testing.assert_allclose(
            cached_LV, plain_BLV[row, len(ids) - 1 : len(ids) + LONG], rtol=0, atol=1e-5
        )


@pytest.fixture(scope="module")
def alone() -> list[list[Sample]]:
    """What each row goes on with by itself."""
    made = generator(DECODER)
    return [made.generate([ids], Sampling(max_tokens=12))[0] for ids in ROWS]


def test_padding_changes_nothing_and_scores_are_sums_of_log_probabilities(
    alone: list[list[Sample]],
) -> None:
    made = generator(DECODER)
    together = made.generate(ROWS, Sampling(max_tokens=12))
    assert [row[0].ids for row in together] == [row[0].ids for row in alone]
    whole = [[*ids, *sample.ids] for ids, (sample,) in zip(ROWS, together, strict=True)]
    for ids, (sample,), (logprob_L, is_best_L) in zip(
        ROWS, together, made.compute_logprobs(whole), strict=True
    ):
        assert is_best_L[len(ids) - 1 :].all()
        assert sample.score == pytest.approx(logprob_L[len(ids) - 1 :].sum(), abs=1e-4)


def test_a_mesh_generates_what_one_device_does(alone: list[list[Sample]]) -> None:
    found = generator(DECODER, dp=2, fsdp=2, mp=2).generate(ROWS, Sampling(max_tokens=12))
    assert [row[0].ids for row in found] == [row[0].ids for row in alone]


def test_experts_that_a_mesh_splits_generate_and_search_as_on_one_device() -> None:
    for how in (Sampling(max_tokens=8), Sampling(max_tokens=5, beams=3, n=2)):
        alone, found = (
            generator(EXPERTS, **axes).generate(ROWS, how) for axes in ({}, {"ep": 2, "mp": 2})
        )
        assert [[each.ids for each in row] for row in found] == [
            [each.ids for each in row] for row in alone
        ]


def test_a_stream_grows_into_the_whole_by_one_program(alone: list[list[Sample]]) -> None:
    made = generator(DECODER)
    seen = [found[0] for found in made.stream([ROWS[0]], Sampling(max_tokens=12), every=5)]
    assert [len(sample.ids) for sample in seen] == [5, 10, 12]
    assert seen[-1].ids == alone[0][0].ids
    assert made._loop._cache_size() == 1  # type: ignore[attr-defined]


def test_a_text_ends_at_its_end_while_others_go_on(alone: list[list[Sample]]) -> None:
    end = alone[0][0].ids[4]
    stops = [ids.index(end) if end in ids else 12 for ids in (row[0].ids for row in alone)]
    found = generator(DECODER, ends=(end,)).generate(ROWS, Sampling(max_tokens=12))
    assert [row[0].ids for row in found] == [
        row[0].ids[:stop] for row, stop in zip(alone, stops, strict=True)
    ]
    assert [row[0].ended for row in found] == [stop < 12 for stop in stops]


def test_what_is_drawn_depends_on_the_seed_and_on_no_other_row() -> None:
    made = bytes_model()
    how = {"max_tokens": 8, "temperature": 1.5}
    one = made.generate([[1, 2]], Sampling(seed=3, **how))[0][0].ids
    four, other = made.generate([[1, 2], [7]], Sampling(seed=3, n=4, **how))
    assert four[0].ids == one
    assert len({tuple(sample.ids) for sample in (*four, *other)}) == 8
    assert made.generate([[1, 2]], Sampling(seed=4, **how))[0][0].ids != one
    for one_token in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        cut = made.generate([[1, 2]], Sampling(temperature=1.5, max_tokens=8, **one_token))[0][
            0
        ].ids
        assert cut == made.generate([[1, 2]], Sampling(max_tokens=8))[0][0].ids


@pytest.mark.parametrize(
    ("rows", "how", "says"),
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {"max_tokens": 1}, "prompt 2 has no tokens; give at least one"),
        ([[1, 32]], {"max_tokens": 1}, "prompt 1 has the token 32, the model those from 0 to 31"),
        ([[1] * 10], {"max_tokens": 8}, "prompt 1 has 10 tokens, and max_tokens = 8 more: the"),
    ],
)
def test_a_prompt_that_does_not_fit_is_refused(
    rows: list[list[int]], how: dict[str, Any], says: str
) -> None:
    with pytest.raises(SpecError, match=says):
        generator(GPT2).generate(rows, Sampling(**how))


def test_a_model_of_images_is_refused() -> None:
    with pytest.raises(SpecError, match="kind = vit does not generate tokens; decoder and gpt2 do"):
        generator(spec.ViT())
