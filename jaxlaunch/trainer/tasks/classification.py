"""What an evaluation tells of a classification besides its means: classes, confusion, calibration, the worst examples.

Counts of examples in NumPy, each once: rows of weight 0 only fill a batch up. B batch, V classes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

BINS = 15  # of the calibration: Guo et al. 2017
FIRST = 5  # of top-5
MOST_CLASSES = 1000  # that are told one by one
MOST_SQUARE = 50  # classes of a confusion matrix; of more, the pairs that are confused most
MOST_PAIRS = 100
WORST = 20  # examples

Numbers = npt.NDArray[Any]


class Seen(NamedTuple):
    """What is known of each example of a batch, [B]."""

    label: Any
    chosen: Any  # the class of the largest logit, of equal ones the first
    before: Any  # classes with a larger logit than the label's, or with an equal one and a smaller number
    confidence: Any  # the probability of the chosen class
    nats: Any  # the cross-entropy of the label


def seen(logits_BV: Array, label_B: Array) -> Seen:
    """Of logits and labels, in float32 on the device."""
    logits_BV = logits_BV.astype(jnp.float32)
    log_BV = jax.nn.log_softmax(logits_BV)
    places_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
    of_label_BV = places_BV == label_B[:, None]
    own_B1 = jnp.where(of_label_BV, logits_BV, 0.0).sum(-1, keepdims=True)
    is_before_BV = (logits_BV > own_B1) | ((logits_BV == own_B1) & (places_BV < label_B[:, None]))
    return Seen(
        label=label_B,
        chosen=logits_BV.argmax(-1),
        before=is_before_BV.sum(-1),
        confidence=jnp.exp(log_BV.max(-1)),
        nats=-jnp.where(of_label_BV, log_BV, 0.0).sum(-1),
    )


class Classification:
    """Adds up batches of `Seen` over `classes` classes."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._label_V, self._chosen_V, self._both_V = (np.zeros(classes, np.int64) for _ in range(3))
        self._pairs: dict[int, int] = {}  # label × V + chosen, and how often
        self._first = self._firsts = 0
        self._count_b, self._right_b = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
        self._confidence_b = np.zeros(BINS)
        self._worst: list[tuple[float, int, int, int, float]] = []  # the least loss first

    def add(self, found: Seen, weight_B: Numbers, index_B: Numbers) -> None:
        """Adds the rows that count; `index_B` are their numbers in the set."""
        counts_B = np.asarray(weight_B) > 0
        label_B, chosen_B, before_B, confidence_B, nats_B = (np.asarray(each)[counts_B] for each in found)
        confidence_B, nats_B = np.nan_to_num(confidence_B, nan=0.0), np.nan_to_num(nats_B, nan=np.inf, posinf=np.inf)
        index_B = np.asarray(index_B)[counts_B]
        is_right_B = label_B == chosen_B
        for total_V, each_B in (
            (self._label_V, label_B),
            (self._chosen_V, chosen_B),
            (self._both_V, label_B[is_right_B]),
        ):
            total_V += np.bincount(each_B, minlength=self._classes)
        for pair, count in zip(*np.unique(label_B * self._classes + chosen_B, return_counts=True), strict=True):
            self._pairs[int(pair)] = self._pairs.get(int(pair), 0) + int(count)
        self._first += int((before_B < 1).sum())
        self._firsts += int((before_B < FIRST).sum())
        bin_B = np.clip(np.ceil(confidence_B * BINS).astype(int) - 1, 0, BINS - 1)
        self._count_b += np.bincount(bin_B, minlength=BINS)
        self._right_b += np.bincount(bin_B[is_right_B], minlength=BINS)
        self._confidence_b += np.bincount(bin_B, confidence_B.astype(np.float64), minlength=BINS)
        for at in np.argsort(-nats_B, kind="stable")[:WORST].tolist():
            row = (float(nats_B[at]), -int(index_B[at]), int(label_B[at]), int(chosen_B[at]), float(confidence_B[at]))
            (heapq.heappush if len(self._worst) < WORST else heapq.heappushpop)(self._worst, row)

    def record(self, names: Sequence[str], where: Callable[[int], str | None] | None) -> dict[str, Any]:
        """All of it as JSON of bounded size; `where` gives the file of an example by its number."""
        total = max(1, int(self._label_V.sum()))
        classes = [self._named(names, number) for number in range(self._classes)]
        rates = list(map(self._rates, range(self._classes)))
        there = [rate for rate in rates if rate["examples"]]
        macro = {
            key: float(np.mean([rate[key] or 0.0 for rate in there] or [0.0])) for key in ("precision", "recall", "f1")
        }
        found: dict[str, Any] = {"examples": int(self._label_V.sum()), "top1": self._first / total}
        found |= {"top5": self._firsts / total} if self._classes > FIRST else {}
        found |= {"macro": macro, "classes": self._classes}
        told = [{"label": name, **rate} for name, rate in zip(classes, rates, strict=True)]
        found |= {"per_class": told[:MOST_CLASSES], **self._confusion(classes)}
        return found | {"calibration": self._calibration(total), "worst": self._told(classes, where)}

    def _rates(self, number: int) -> dict[str, Any]:
        """Of a class: its examples, how many of those called so are it, and how many of it are called so."""
        label, chosen, both = (int(each[number]) for each in (self._label_V, self._chosen_V, self._both_V))
        return {
            "examples": label,
            "precision": both / chosen if chosen else None,
            "recall": both / label if label else None,
            "f1": 2 * both / (label + chosen) if label + chosen else None,
        }

    def _confusion(self, classes: list[str]) -> dict[str, Any]:
        """Examples by label (rows) and by what they are called; of many classes, the wrong pairs that are most."""
        if self._classes <= MOST_SQUARE:
            square = [
                [self._pairs.get(row * self._classes + at, 0) for at in range(self._classes)]
                for row in range(self._classes)
            ]
            return {"confusion": square}
        wrong = {pair: count for pair, count in self._pairs.items() if pair // self._classes != pair % self._classes}
        most = sorted(wrong, key=lambda pair: (-wrong[pair], pair))[:MOST_PAIRS]
        called = [(classes[pair // self._classes], classes[pair % self._classes], wrong[pair]) for pair in most]
        return {
            "confused": [{"label": label, "predicted": chosen, "examples": count} for label, chosen, count in called]
        }

    def _calibration(self, total: int) -> dict[str, Any]:
        """How far the probability of the chosen class is from the share of it that is right."""
        error = float(np.abs(self._right_b - self._confidence_b).sum() / total)
        bins = [
            {"examples": count, "confidence": confidence / count, "accuracy": right / count}
            if count
            else {"examples": 0}
            for count, confidence, right in zip(
                self._count_b.tolist(), self._confidence_b.tolist(), self._right_b.tolist(), strict=True
            )
        ]
        return {"ece": error, "bins": bins}

    def _told(self, classes: list[str], where: Callable[[int], str | None] | None) -> list[dict[str, Any]]:
        """The examples with the largest loss, the largest first; of equal ones the first in the set."""
        return [
            {
                "example": -index,
                "where": None if where is None else where(-index),
                "label": classes[label],
                "predicted": classes[chosen],
                "confidence": confidence,
                "loss": nats if np.isfinite(nats) else None,
            }
            for nats, index, label, chosen, confidence in sorted(self._worst, reverse=True)
        ]

    @staticmethod
    def _named(names: Sequence[str], number: int) -> str:
        return names[number] if number < len(names) else str(number)
