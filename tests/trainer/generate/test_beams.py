"""Beam search with room for every text finds what trying every text finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.generate.decoding import Sampling
from tests.trainer.generate.generators import generator

SMALL = spec.Decoder(layers=1, width=16, heads=2, hidden=16, vocab=5, length=8)
LONGEST, PROMPTS = 3, [[1, 2, 3], [4]]


def all_texts(ends: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All that end before the limit, and all of that many tokens that do not end earlier."""
    actual = set()
    for ids in itertools.product(range(SMALL.vocab), repeat=LONGEST):
        stop = next((index + 1 for index, token in enumerate(ids) if token in ends), LONGEST)
        actual.add(ids[:stop])
    return sorted(actual)


@pytest.mark.parametrize("ends", [(), (4,)], ids=["of one length", "that end"])
def test_beam_search_finds_the_best_texts(ends: tuple[int, ...]) -> None:
    outputs = generator(SMALL, ends)
    actual = outputs.generate(PROMPTS, Sampling(max_tokens=LONGEST, beams=25, n=8))
    texts = all_texts(ends)
    for prompt, samples in zip(PROMPTS, actual, strict=True):
        logprobs = outputs.compute_logprobs([[*prompt, *ids] for ids in texts])
        means = [float(item[len(prompt) - 1 :].mean()) for item, _ in logprobs]
        order = np.argsort(means)[::-1][: len(samples)]
        whole = [tuple(sample.ids) + (ends if sample.ended else ()) for sample in samples]
        assert whole == [texts[index] for index in order]
        scores = [sample.score for sample in samples]
        np.testing.assert_allclose(scores, [means[index] for index in order], atol=1e-5)
