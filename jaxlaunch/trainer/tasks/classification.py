"""The report on a classification besides its means: classes, confusion, calibration, worst examples.

Examples are counted once, in NumPy. Rows of weight 0 only fill up a batch. B batch, V classes, b bins.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array

from jaxlaunch.trainer.tasks.losses import count_before

# Bins of the calibration. Guo et al. 2017.
BINS = 15
# The five of top-5.
FIRST = 5
# Classes that are listed one by one.
MOST_CLASSES = 1000
# Classes of a confusion matrix. With more, only the most confused pairs are listed.
MOST_SQUARE = 50
MOST_PAIRS = 100
WORST = 20

Numbers = npt.NDArray[Any]


class Seen(NamedTuple):
    """The results for each example of a batch, [B].

    Attributes:
        label: The class of the example.
        chosen: The class of the largest logit, the first of equal ones.
        classes_above: Number of classes that come before the label, by losses.count_before.
        confidence: The probability of the chosen class.
        nats: The cross-entropy of the label.
    """

    label: Any
    chosen: Any
    before: Any
    confidence: Any
    nats: Any


def seen(logits_BV: Array, label_B: Array) -> Seen:
    """Return the results for logits and labels, in float32 on the device."""
    logits_BV = logits_BV.astype(jnp.float32)
    log_BV = jax.nn.log_softmax(logits_BV)
    is_label_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1) == label_B[:, None]
    return Seen(
        label=label_B,
        chosen=logits_BV.argmax(-1),
        before=count_before(logits_BV, label_B),
        confidence=jnp.exp(log_BV.max(-1)),
        nats=-jnp.where(is_label_BV, log_BV, 0.0).sum(-1),
    )


class Classification:
    """Adds up batches of `Seen` over `classes` classes."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._label_V, self._chosen_V, self._both_V = (np.zeros(classes, np.int64) for _ in range(3))
        # Counts by label × V + chosen.
        self._pairs: Counter[int] = Counter()
        self._top1 = self._top5 = 0
        self._count_b, self._right_b = np.zeros(BINS, np.int64), np.zeros(BINS, np.int64)
        self._confidence_b = np.zeros(BINS)
        # A heap with the smallest loss first.
        self._worst: list[tuple[float, int, int, int, float]] = []

    def add(self, batch: Seen, weight_B: Numbers, index_B: Numbers) -> None:
        """Add the rows of weight above 0; `index_B` are their numbers in the set."""
        counts_B = np.asarray(weight_B) > 0
        label_B, chosen_B, before_B, confidence_B, nats_B = (np.asarray(array_B)[counts_B] for array_B in batch)
        confidence_B, nats_B = np.nan_to_num(confidence_B, nan=0.0), np.nan_to_num(nats_B, nan=np.inf, posinf=np.inf)
        index_B = np.asarray(index_B)[counts_B]
        is_right_B = label_B == chosen_B
        self._label_V += np.bincount(label_B, minlength=self._classes)
        self._chosen_V += np.bincount(chosen_B, minlength=self._classes)
        self._both_V += np.bincount(label_B[is_right_B], minlength=self._classes)
        self._pairs.update((label_B * self._classes + chosen_B).tolist())
        self._top1 += int((before_B < 1).sum())
        self._top5 += int((before_B < FIRST).sum())
        bin_B = np.clip(np.ceil(confidence_B * BINS).astype(int) - 1, 0, BINS - 1)
        self._count_b += np.bincount(bin_B, minlength=BINS)
        self._right_b += np.bincount(bin_B[is_right_B], minlength=BINS)
        self._confidence_b += np.bincount(bin_B, confidence_B.astype(np.float64), minlength=BINS)
        for at in np.argsort(-nats_B, kind="stable")[:WORST].tolist():
            row = (float(nats_B[at]), -int(index_B[at]), int(label_B[at]), int(chosen_B[at]), float(confidence_B[at]))
            (heapq.heappush if len(self._worst) < WORST else heapq.heappushpop)(self._worst, row)

    def record(self, names: Sequence[str], where: Callable[[int], str | None] | None) -> dict[str, Any]:
        """Return the report as JSON of bounded size; `where` gives the file of an example by its number."""
        examples = int(self._label_V.sum())
        total = max(1, examples)
        classes = [names[number] if number < len(names) else str(number) for number in range(self._classes)]
        rates = list(map(self._class_rates, range(self._classes)))
        present = [rate for rate in rates if rate["examples"]]
        macro = {
            key: float(np.mean([rate[key] or 0.0 for rate in present] or [0.0]))
            for key in ("precision", "recall", "f1")
        }
        return {
            "examples": examples,
            "top1": self._top1 / total,
            **({"top5": self._top5 / total} if self._classes > FIRST else {}),
            "macro": macro,
            "classes": self._classes,
            "per_class": [{"label": name, **rate} for name, rate in zip(classes, rates, strict=True)][:MOST_CLASSES],
            **self._confusion(classes),
            "calibration": self._calibration(total),
            # The largest loss comes first, and among equal ones the first in the set.
            "worst": [
                {
                    "example": -index,
                    "where": None if where is None else where(-index),
                    "label": classes[label],
                    "predicted": classes[chosen],
                    "confidence": confidence,
                    "loss": nats if np.isfinite(nats) else None,
                }
                for nats, index, label, chosen, confidence in sorted(self._worst, reverse=True)
            ],
        }

    def _class_rates(self, number: int) -> dict[str, Any]:
        label, chosen, both = (int(total_V[number]) for total_V in (self._label_V, self._chosen_V, self._both_V))
        return {
            "examples": label,
            "precision": both / chosen if chosen else None,
            "recall": both / label if label else None,
            "f1": 2 * both / (label + chosen) if label + chosen else None,
        }

    def _confusion(self, classes: list[str]) -> dict[str, Any]:
        """Count examples by label (rows) and prediction. With many classes, list the most confused pairs."""
        count = self._classes
        if count <= MOST_SQUARE:
            return {"confusion": [[self._pairs[row * count + at] for at in range(count)] for row in range(count)]}
        wrong = {divmod(pair, count): total for pair, total in self._pairs.items() if pair // count != pair % count}
        most = sorted(wrong, key=lambda pair: (-wrong[pair], pair))[:MOST_PAIRS]
        return {
            "confused": [
                {"label": classes[label], "predicted": classes[chosen], "examples": wrong[label, chosen]}
                for label, chosen in most
            ]
        }

    def _calibration(self, total: int) -> dict[str, Any]:
        """Compare the probability of the chosen class with the share of correct predictions."""
        error = float(np.abs(self._right_b - self._confidence_b).sum() / total)
        bins = zip(self._count_b.tolist(), self._confidence_b.tolist(), self._right_b.tolist(), strict=True)
        return {
            "ece": error,
            "bins": [
                {"examples": count, "confidence": confidence / count, "accuracy": right / count}
                if count
                else {"examples": 0}
                for count, confidence, right in bins
            ],
        }
