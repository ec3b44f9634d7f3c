"""Rows of tables: our MLP next to scikit-learn's, on the same training and held-out rows.

`python -m benchmarks.tabular [--splits 4] [--seeds 5]`. Two of scikit-learn's bundled sets, breast
cancer (classes) and diabetes (a number), are shuffled once for each split; every fifth row is held
out. Ours trains as a run does, with the recipe of docs/tables.md. scikit-learn's MLPClassifier and
MLPRegressor have their defaults, and what ours does by itself is done for them: features, and the
number, less their mean over their deviation in the training rows.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from sklearn import datasets, neural_network

from benchmarks.recipes import run_training
from benchmarks.table import Row, finish_benchmark, log_progress

HELD_OUT_EVERY = 5
RECIPES: dict[str, dict[str, Any]] = {
    "diabetes": {
        "model": {"kind": "mlp", "layers": 1, "width": 100, "classes": 1},
        "loss": {"target": "regression"},
        "batch": 32,
        "epochs": 60,
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 1.0, "clip": None},
    },
    "breast cancer": {
        "model": {"kind": "mlp", "layers": 2, "width": 64, "classes": 2},
        "batch": 32,
        "epochs": 20,
        "optimizer": {"name": "adamw", "lr": 1e-3, "weight_decay": 0.01},
    },
}
SETS = {"diabetes": datasets.load_diabetes, "breast cancer": datasets.load_breast_cancer}


def score_of_jaxlaunch(name: str, x_NF: Any, y_N: Any, seed: int, compiled: str) -> float:
    """Return the accuracy or R² of a run on its held-out rows; `compiled` keeps its programs."""
    with tempfile.TemporaryDirectory() as folder:
        is_held_N = np.arange(len(y_N)) % HELD_OUT_EVERY == 0
        np.savez(f"{folder}/rows.npz", x=x_NF[~is_held_N], y=y_N[~is_held_N])
        np.savez(f"{folder}/held.npz", x=x_NF[is_held_N], y=y_N[is_held_N])
        paths = {"path": f"{folder}/rows.npz", "eval_path": f"{folder}/held.npz"}
        data = {"source": "table", "label": "y", **paths}
        every = {
            "eval": {"every": None},
            "checkpoint": {"every": None},
            "log_every": 10_000,
            "compile_cache": compiled,
        }
        train = {"task": "classify", "data": data, "seed": seed, **every, **RECIPES[name]}
        evaluation = run_training(Path(folder), train)
    if name != "diabetes":
        return float(evaluation["accuracy"])
    # The loss is the squared error over the variance of the training rows.
    held_N, kept_N = y_N[is_held_N], y_N[~is_held_N]
    return float(1 - evaluation["loss"] * np.var(kept_N) / np.var(held_N))


def score_of_sklearn(name: str, x_NF: Any, y_N: Any, seed: int, _: str) -> float:
    """Return the same of scikit-learn."""
    is_held_N = np.arange(len(y_N)) % HELD_OUT_EVERY == 0
    kept_NF = x_NF[~is_held_N]
    z_NF = (x_NF - kept_NF.mean(0)) / kept_NF.std(0)
    kind = neural_network.MLPRegressor if name == "diabetes" else neural_network.MLPClassifier
    if name == "diabetes":
        y_N = (y_N - y_N[~is_held_N].mean()) / y_N[~is_held_N].std()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that its 200 epochs are not enough for it
        model = kind(random_state=seed).fit(z_NF[~is_held_N], y_N[~is_held_N])
    return float(model.score(z_NF[is_held_N], y_N[is_held_N]))


def measure_scores(name: str, splits: int, seeds: int, compiled: str) -> Row:
    """Return scikit-learn's mean score over ours, and both."""
    rows = SETS[name]()
    scores: list[list[float]] = [[], []]
    for split in range(splits):
        count = len(rows.target)
        order_N = (
            np.arange(count) if split == 0 else np.random.default_rng(split).permutation(count)
        )
        for seed in range(seeds):
            for side, scores_of_side in enumerate((score_of_jaxlaunch, score_of_sklearn)):
                scores[side].append(
                    scores_of_side(
                        name, rows.data[order_N], rows.target[order_N].astype(float), seed, compiled
                    )
                )
        formatted_last = [
            f"{np.mean(scores_of_side[-seeds:]):.4f} ± {np.std(scores_of_side[-seeds:]):.4f}"
            for scores_of_side in scores
        ]
        log_progress(
            f"tabular: {name}, split {split}: "
            f"ours {formatted_last[0]}, scikit-learn {formatted_last[1]}"
        )
    mine, other = (float(np.mean(scores_of_side)) for scores_of_side in scores)
    metric = "R²" if name == "diabetes" else "accuracy"
    formatted = [
        f"{np.mean(scores_of_side):.4f} ± {np.std(scores_of_side):.4f}" for scores_of_side in scores
    ]
    detail = (
        f"ours {formatted[0]}, scikit-learn {formatted[1]}; {splits} splits, {seeds} seeds each"
    )
    return Row(f"{name}: {metric} of scikit-learn's MLP over ours", other / mine, 1.01, detail)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=list(SETS))
    arguments = parser.parse_args()
    names = [name for name in SETS if arguments.only in (None, name)]
    with tempfile.TemporaryDirectory() as folder:
        return finish_benchmark(
            [measure_scores(name, arguments.splits, arguments.seeds, folder) for name in names]
        )


if __name__ == "__main__":
    sys.exit(main())
