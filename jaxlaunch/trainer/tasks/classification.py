"""The report of an evaluation on classes: rates, confusion, calibration and the worst examples.

The device computes scores for each example of a batch. The host adds them up in NumPy, without the
rows of weight 0 that only fill up a batch.

B batch, V classes, b bins of the calibration.
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

from jaxlaunch.trainer.tasks.losses import count_classes_above

# Bins of the calibration. Guo et al. 2017.
CALIBRATION_BINS = 15
# The number of classes of top-5 accuracy.
TOP_CLASSES = 5
# The report lists the rates of at most this many classes.
MAX_LISTED_CLASSES = 1000
# The largest number of classes for a confusion matrix. With more classes, only the most confused
# pairs are listed.
MAX_MATRIX_CLASSES = 50
MAX_CONFUSED_PAIRS = 100
# The number of examples with the largest losses that are listed.
WORST_EXAMPLES = 20

Numbers = npt.NDArray[Any]


class ExampleScores(NamedTuple):
    """The scores of each example of a batch, [B].

    Attributes:
        label: The class of the example.
        chosen: The class of the largest logit, the first of equal ones; -1 if a logit is NaN.
        classes_above: Number of classes that come before the label, by losses.count_classes_above.
        confidence: The probability of the chosen class.
        nats: The cross-entropy of the label.
    """

    label: Any
    chosen: Any
    classes_above: Any
    confidence: Any
    nats: Any


def score_examples(logits_BV: Array, label_B: Array) -> ExampleScores:
    """Return the scores for logits and labels, computed in float32."""
    logits_BV = logits_BV.astype(jnp.float32)
    log_BV = jax.nn.log_softmax(logits_BV)
    is_label_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1) == label_B[:, None]
    return ExampleScores(
        label=label_B,
        chosen=jnp.where(jnp.isnan(logits_BV).any(-1), -1, logits_BV.argmax(-1)),
        classes_above=count_classes_above(logits_BV, label_B),
        confidence=jnp.exp(log_BV.max(-1)),
        nats=-jnp.where(is_label_BV, log_BV, 0.0).sum(-1),
    )


class Classification:
    """An accumulator of the scores of an evaluation with `classes` classes."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self._label_V, self._chosen_V, self._correct_V = np.zeros((3, classes), np.int64)
        # Number of examples by label × V + chosen.
        self._pairs: Counter[int] = Counter()
        self._top1 = self._top5 = 0
        self._count_b, self._correct_b, self._confidence_b = np.zeros((3, CALIBRATION_BINS))
        # (loss, negative index, label, chosen, confidence), with the largest losses first.
        self._worst: list[tuple[Any, ...]] = []

    def add_batch(self, batch: ExampleScores, weight_B: Numbers, index_B: Numbers) -> None:
        """Add the rows of a batch whose weight is above 0; `index_B` are their indices."""
        is_counted_B = np.asarray(weight_B) > 0
        label_B, chosen_B, above_B, confidence_B, nats_B, index_B = (
            np.asarray(array_B)[is_counted_B] for array_B in (*batch, index_B)
        )
        confidence_B = np.nan_to_num(confidence_B, nan=0.0)
        nats_B = np.nan_to_num(nats_B, nan=np.inf, posinf=np.inf)
        is_correct_B, classes, bins = label_B == chosen_B, self._classes, CALIBRATION_BINS
        self._label_V += np.bincount(label_B, minlength=classes)
        # A row with a NaN counts as an example of its class but predicts no class.
        has_choice_B = chosen_B >= 0
        self._chosen_V += np.bincount(chosen_B[has_choice_B], minlength=classes)
        self._correct_V += np.bincount(label_B[is_correct_B], minlength=classes)
        self._pairs.update((label_B * classes + chosen_B)[has_choice_B].tolist())
        self._top1 += int((above_B < 1).sum())
        self._top5 += int((above_B < TOP_CLASSES).sum())
        bin_B = np.clip(np.ceil(confidence_B * bins).astype(int) - 1, 0, bins - 1)
        self._count_b += np.bincount(bin_B, minlength=bins)
        self._correct_b += np.bincount(bin_B[is_correct_B], minlength=bins)
        self._confidence_b += np.bincount(bin_B, confidence_B.astype(np.float64), minlength=bins)
        columns = nats_B, -index_B, label_B, chosen_B, confidence_B
        rows = zip(*(column_B.tolist() for column_B in columns), strict=True)
        self._worst = heapq.nlargest(WORST_EXAMPLES, [*self._worst, *rows])

    def to_record(
        self, names: Sequence[str], locate_example: Callable[[int], str | None] | None
    ) -> dict[str, Any]:
        """Return the report as JSON of bounded size.

        Args:
            names: Names of the first classes. Classes without a name are called by their number.
            locate_example: Function that returns where the example with an index is stored.
        """
        examples = int(self._label_V.sum())
        divisor = max(1, examples)
        classes = [*names[: self._classes], *map(str, range(len(names), self._classes))]
        rates = list(map(self._class_rates, range(self._classes)))
        # As in scikit-learn by default, means are over the classes that occur as a label or as a
        # prediction, and a rate without examples is 0.
        present = [rate for rate in rates if rate["f1"] is not None]
        macro = {
            key: float(np.mean([rate[key] or 0.0 for rate in present] or [0.0]))
            for key in ("precision", "recall", "f1")
        }
        listed = list(zip(classes, rates, strict=True))[:MAX_LISTED_CLASSES]
        return {
            "examples": examples,
            "top1": self._top1 / divisor,
            **({"top5": self._top5 / divisor} if self._classes > TOP_CLASSES else {}),
            "macro": macro,
            "classes": self._classes,
            "per_class": [{"label": name, **rate} for name, rate in listed],
            **self._count_confusion(classes),
            "calibration": self._measure_calibration(divisor),
            "worst": [
                {
                    "example": -index,
                    "where": None if locate_example is None else locate_example(-index),
                    "label": classes[label],
                    "predicted": classes[chosen] if chosen >= 0 else "NaN",
                    "confidence": confidence,
                    "loss": nats if np.isfinite(nats) else None,
                }
                for nats, index, label, chosen, confidence in self._worst
            ],
        }

    def _class_rates(self, class_index: int) -> dict[str, Any]:
        counts = self._label_V, self._chosen_V, self._correct_V
        label, chosen, correct = (int(count_V[class_index]) for count_V in counts)
        return {
            "examples": label,
            "precision": correct / chosen if chosen else None,
            "recall": correct / label if label else None,
            "f1": 2 * correct / (label + chosen) if label + chosen else None,
        }

    def _count_confusion(self, classes: list[str]) -> dict[str, Any]:
        """Return the confusion matrix, or with many classes the most confused pairs."""
        count = self._classes
        if count <= MAX_MATRIX_CLASSES:
            indices = range(count)
            matrix = [
                [self._pairs[label * count + chosen] for chosen in indices] for label in indices
            ]
            return {"confusion": matrix}
        errors = {
            pair: examples
            for pair, examples in self._pairs.items()
            if pair // count != pair % count
        }
        most_frequent = sorted(errors, key=lambda pair: (-errors[pair], pair))[:MAX_CONFUSED_PAIRS]
        return {
            "confused": [
                {
                    "label": classes[pair // count],
                    "predicted": classes[pair % count],
                    "examples": errors[pair],
                }
                for pair in most_frequent
            ]
        }

    def _measure_calibration(self, examples: int) -> dict[str, Any]:
        """Compare confidence and accuracy in bins of confidence: the expected calibration error."""
        error = float(np.abs(self._correct_b - self._confidence_b).sum() / examples)
        bins: list[dict[str, Any]] = []
        for count, confidence, correct in zip(
            self._count_b, self._confidence_b, self._correct_b, strict=True
        ):
            means = {"confidence": confidence / count, "accuracy": correct / count} if count else {}
            bins.append({"examples": int(count), **means})
        return {"ece": error, "bins": bins}
