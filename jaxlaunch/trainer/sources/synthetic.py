"""Synthetic, learnable examples for smoke tests and benchmarks. Each is a function of its index.

L length, T = L + 1 tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxlaunch.trainer.data.source import DataSource, Split
from jaxlaunch.trainer.sources.open import token_sizes
from jaxlaunch.trainer.spec import Synthetic, TrainSpec, model_sizes

# Share of the tokens that do not follow the rule.
NOISE = 0.1


def open_source(data: Synthetic, split: Split, spec: TrainSpec) -> DataSource | None:
    """Open tokens for a model of tokens, and images for any other model."""
    # Evaluation uses the examples after those of training.
    first = 0 if split == "train" else data.examples
    examples = data.examples if split == "train" else data.eval_examples
    if not examples:
        return None
    if data.shape is None and model_sizes(spec.model).length is not None:
        return Tokens(examples, *token_sizes(spec), first=first)
    return Images(examples, tuple(data.shape or (28, 28)), data.classes, first=first)


class Images(DataSource):
    """A source of `image` uint8, the picture of its class with noise, and `label` int32."""

    name = "synthetic images"

    def __init__(self, examples: int, shape: tuple[int, ...], classes: int, *, first: int) -> None:
        self._examples, self._first = examples, first
        self._pictures = np.random.default_rng(0).integers(0, 256, (classes, *shape), np.int16)

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(self._first + index)
        label = rng.integers(len(self._pictures), dtype=np.int32)
        picture = self._pictures[label]
        noise = rng.integers(-64, 65, picture.shape, np.int16)
        return {"image": np.clip(picture + noise, 0, 255).astype(np.uint8), "label": label}

    def fingerprint(self) -> str:
        """Return number, shape and classes of the images, and the index of the first."""
        classes, *shape = self._pictures.shape
        return f"synthetic, {self._examples} images {shape} of {classes} classes from {self._first}"


class Tokens(DataSource):
    """A source of `tokens` int32 [T], each of which follows from the last by a rule, with noise."""

    name = "synthetic tokens"

    def __init__(self, examples: int, length: int, vocab: int, *, first: int) -> None:
        self._examples, self._length, self._first = examples, length, first
        self._next_V = np.random.default_rng(0).permutation(vocab).astype(np.int32)

    def __len__(self) -> int:
        return self._examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(self._first + index)
        tokens_T = rng.integers(len(self._next_V), size=self._length + 1, dtype=np.int32)
        is_noise_T = rng.random(self._length + 1) < NOISE
        for i in range(1, self._length + 1):
            if not is_noise_T[i]:
                tokens_T[i] = self._next_V[tokens_T[i - 1]]
        return {"tokens": tokens_T}

    def fingerprint(self) -> str:
        """Return number and length of the windows, the vocabulary, and the index of the first."""
        windows = f"{self._examples} windows of {self._length} tokens of {len(self._next_V)}"
        return f"synthetic, {windows} from {self._first}"
