"""The record of a classification against formulas, and scikit-learn where it has them."""

from __future__ import annotations

import json
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxlaunch.trainer.tasks import classification
from jaxlaunch.trainer.tasks.classification import Classification, score_examples

RNG = np.random.default_rng(0)


def classification_record(logits: np.ndarray, labels: np.ndarray, batch: int = 7) -> dict[str, Any]:
    """Return the record of all rows in batches, the last filled up with rows of weight 0."""
    result = Classification(logits.shape[1])
    for start in range(0, len(labels), batch):
        at = np.arange(start, start + batch)
        index, weight = at % len(labels), (at < len(labels)).astype(np.float32)
        result.add_batch(
            score_examples(jnp.asarray(logits[index]), jnp.asarray(labels[index])), weight, index
        )
    record = result.to_record([f"c{number}" for number in range(3)], "file {}".format)
    return dict(json.loads(json.dumps(record, allow_nan=False)))


@pytest.fixture(scope="module")
def rows() -> tuple[np.ndarray, np.ndarray]:
    logits = RNG.normal(0, 2, (101, 8)).astype(np.float32)
    logits[:, 6] = -20.0  # never chosen
    logits[::9] = np.round(logits[::9])  # ties
    return logits, RNG.integers(0, 7, 101)  # no row has the label 7


def test_rates_and_confusion_match_counting(rows: tuple[np.ndarray, np.ndarray]) -> None:
    logits, labels = rows
    chosen, result = logits.argmax(-1), classification_record(logits, labels)
    square = [[int(((labels == a) & (chosen == b)).sum()) for b in range(8)] for a in range(8)]
    assert result["confusion"] == square and result["examples"] == 101
    for number, rate in enumerate(result["per_class"]):
        pair = int(((labels == number) & (chosen == number)).sum())
        called, present = int((chosen == number).sum()), int((labels == number).sum())
        assert (
            rate["label"] == (f"c{number}" if number < 3 else str(number))
            and rate["examples"] == present
        )
        assert rate["precision"] == (pair / called if called else None)
        assert rate["recall"] == (pair / present if present else None)
        assert rate["f1"] == (2 * pair / (called + present) if called + present else None)
    ranks = [
        np.argsort(-row, kind="stable").tolist().index(label)
        for row, label in zip(logits, labels, strict=True)
    ]
    assert result["top1"] == np.mean([rank < 1 for rank in ranks])
    assert result["top5"] == pytest.approx(np.mean([rank < 5 for rank in ranks]))
    metrics = pytest.importorskip("sklearn.metrics")
    assert 7 in chosen and 6 not in chosen
    scores = metrics.precision_recall_fscore_support(
        labels, chosen, average="macro", zero_division=0
    )
    assert list(result["macro"].values()) == pytest.approx(scores[:3])


def test_calibration_and_worst_examples_are_recorded(
    rows: tuple[np.ndarray, np.ndarray],
) -> None:
    logits, labels = rows
    result = classification_record(logits, labels)
    exact = logits.astype(np.float64)
    chances = np.exp(exact) / np.exp(exact).sum(-1, keepdims=True)
    confidence, is_right = chances.max(-1), logits.argmax(-1) == labels
    error = 0.0
    for number in range(15):
        inside = (confidence > number / 15) & (confidence <= (number + 1) / 15)
        assert result["calibration"]["bins"][number]["examples"] == inside.sum()
        if inside.any():
            error += inside.mean() * abs(is_right[inside].mean() - confidence[inside].mean())
    assert result["calibration"]["ece"] == pytest.approx(error, rel=1e-5)
    nats = -np.log(chances[np.arange(101), labels])
    worst = np.argsort(-nats, kind="stable")[: classification.WORST_EXAMPLES]
    assert [row["example"] for row in result["worst"]] == worst.tolist()
    assert [row["where"] for row in result["worst"]] == [f"file {number}" for number in worst]
    assert [row["loss"] for row in result["worst"]] == pytest.approx(nats[worst].tolist(), rel=1e-4)


def test_rows_with_nan_are_never_right() -> None:
    labels = np.arange(12) % 6
    logits = np.eye(6, dtype=np.float32)[labels] * 5
    # Of all logits, of the label's, and of another one.
    logits[0], logits[1, 1], logits[2, 0] = math.nan, math.nan, math.nan
    result = classification_record(logits, labels)
    assert result["top1"] == result["top5"] == 9 / 12
    assert [rate["recall"] for rate in result["per_class"]] == [0.5, 0.5, 0.5, 1.0, 1.0, 1.0]
    assert [rate["precision"] for rate in result["per_class"]] == [1.0] * 6
    assert np.trace(result["confusion"]) == np.sum(result["confusion"]) == 9
    assert [row["predicted"] for row in result["worst"][:3]] == ["NaN"] * 3


def test_record_of_many_classes_is_bounded() -> None:
    labels = np.arange(3000) % 2000
    logits = RNG.normal(0, 1, (3000, 2000)).astype(np.float32)
    logits[5] = math.nan
    result = classification_record(logits, labels, 1000)
    assert (
        len(result["per_class"]) == 1000
        and "confusion" not in result
        and len(result["confused"]) == 100
    )
    assert result["worst"][0] | {"predicted": None} == {
        "example": 5,
        "where": "file 5",
        "label": "5",
        "predicted": None,
        "confidence": 0.0,
        "loss": None,
    }
    assert len(json.dumps(result)) < 200_000
