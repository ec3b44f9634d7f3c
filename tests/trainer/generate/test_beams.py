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


def every_text(ends: tuple[int, ...]) -> list[tuple[int, ...]]:
    """All that end before the limit, and all of that many tokens that do not end earlier."""
    found = set()
    for ids in itertools.product(range(SMALL.vocab), repeat=LONGEST):
        stop = next((at + 1 for at, token in enumerate(ids) if token in ends), LONGEST)
        found.add(ids[:stop])
    return sorted(found)


@pytest.mark.parametrize("ends", [(), (4,)], ids=["of one length", "that end"])
def test_beams_find_the_best_of_all_texts(ends: tuple[int, ...]) -> None:
    made = generator(SMALL, ends)
    found = made.generate(PROMPTS, Sampling(max_tokens=LONGEST, beams=25, n=8))
    texts = every_text(ends)
    for prompt, samples in zip(PROMPTS, found, strict=True):
        logprobs = made.compute_logprobs([[*prompt, *ids] for ids in texts])
        means = [float(each[len(prompt) - 1 :].mean()) for each, _ in logprobs]
        order = np.argsort(means)[::-1][: len(samples)]
        whole = [tuple(sample.ids) + (ends if sample.ended else ()) for sample in samples]
        assert whole == [texts[at] for at in order]
        np.testing.assert_allclose(
            [sample.score for sample in samples], [means[at] for at in order], atol=1e-5
        )
