"""Accuracy on tables, compared with scikit-learn's MLP on the same training and held-out rows.

`python -m benchmarks.tabular [--splits 4] [--seeds 5]` uses two datasets of scikit-learn, breast
cancer (two classes) and diabetes (a number). They are shuffled for each split, and every fifth row
is held out. Our MLP is trained by a run with the recipe of docs/tables.md. scikit-learn's
MLPClassifier and MLPRegressor have their defaults, but features and numbers are standardized by the
mean and deviation of the training rows, as our trainer does by default.
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
DATASETS = {"diabetes": datasets.load_diabetes, "breast cancer": datasets.load_breast_cancer}


def score_jaxlaunch(name: str, x_NF: Any, y_N: Any, seed: int, compile_cache: str) -> float:
    """Return the accuracy or R² of a run on its held-out rows."""
    with tempfile.TemporaryDirectory() as folder:
        is_held_out_N = np.arange(len(y_N)) % HELD_OUT_EVERY == 0
        np.savez(f"{folder}/rows.npz", x=x_NF[~is_held_out_N], y=y_N[~is_held_out_N])
        np.savez(f"{folder}/held.npz", x=x_NF[is_held_out_N], y=y_N[is_held_out_N])
        paths = {"path": f"{folder}/rows.npz", "eval_path": f"{folder}/held.npz"}
        data = {"source": "table", "label": "y", **paths}
        intervals = {
            "eval": {"every": None},
            "checkpoint": {"every": None},
            "log_every": 10_000,
            "compile_cache": compile_cache,
        }
        train = {"task": "classify", "data": data, "seed": seed, **intervals, **RECIPES[name]}
        evaluation = run_training(Path(folder), train)
    if name != "diabetes":
        return float(evaluation["accuracy"])
    # The loss is the squared error over the variance of the training rows.
    held_out_y_N, train_y_N = y_N[is_held_out_N], y_N[~is_held_out_N]
    return float(1 - evaluation["loss"] * np.var(train_y_N) / np.var(held_out_y_N))


def score_sklearn(name: str, x_NF: Any, y_N: Any, seed: int, _: str) -> float:
    """Return the accuracy or R² of scikit-learn's MLP on the held-out rows."""
    is_held_out_N = np.arange(len(y_N)) % HELD_OUT_EVERY == 0
    train_x_NF = x_NF[~is_held_out_N]
    z_NF = (x_NF - train_x_NF.mean(0)) / train_x_NF.std(0)
    model_class = (
        neural_network.MLPRegressor if name == "diabetes" else neural_network.MLPClassifier
    )
    if name == "diabetes":
        y_N = (y_N - y_N[~is_held_out_N].mean()) / y_N[~is_held_out_N].std()
    with warnings.catch_warnings():
        # It warns that it has not converged in its 200 epochs.
        warnings.simplefilter("ignore")
        model = model_class(random_state=seed).fit(z_NF[~is_held_out_N], y_N[~is_held_out_N])
    return float(model.score(z_NF[is_held_out_N], y_N[is_held_out_N]))


def measure_scores(name: str, splits: int, seeds: int, compile_cache: str) -> Row:
    """Return the ratio of scikit-learn's mean score to ours."""
    rows = DATASETS[name]()
    scores: list[list[float]] = [[], []]
    for split in range(splits):
        count = len(rows.target)
        order_N = (
            np.arange(count) if split == 0 else np.random.default_rng(split).permutation(count)
        )
        for seed in range(seeds):
            x_NF, y_N = rows.data[order_N], rows.target[order_N].astype(float)
            for side, score in enumerate((score_jaxlaunch, score_sklearn)):
                scores[side].append(score(name, x_NF, y_N, seed, compile_cache))
        formatted_last = [
            f"{np.mean(side_scores[-seeds:]):.4f} ± {np.std(side_scores[-seeds:]):.4f}"
            for side_scores in scores
        ]
        log_progress(
            f"tabular: {name}, split {split}: "
            f"ours {formatted_last[0]}, scikit-learn {formatted_last[1]}"
        )
    mine, other = (float(np.mean(side_scores)) for side_scores in scores)
    metric = "R²" if name == "diabetes" else "accuracy"
    formatted = [
        f"{np.mean(side_scores):.4f} ± {np.std(side_scores):.4f}" for side_scores in scores
    ]
    detail = (
        f"ours {formatted[0]}, scikit-learn {formatted[1]}; {splits} splits, {seeds} seeds each"
    )
    return Row(f"{name}: {metric} of scikit-learn's MLP over ours", other / mine, 1.01, detail)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=list(DATASETS))
    arguments = parser.parse_args()
    names = [name for name in DATASETS if arguments.only in (None, name)]
    with tempfile.TemporaryDirectory() as folder:
        return finish_benchmark(
            [measure_scores(name, arguments.splits, arguments.seeds, folder) for name in names]
        )


if __name__ == "__main__":
    sys.exit(main())
