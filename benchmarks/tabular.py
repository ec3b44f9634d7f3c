"""Rows of tables: our MLP beside scikit-learn's, on the same training rows and the same held-out ones.

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
from benchmarks.table import Row, finish, log

HELD = 5  # every fifth row, as eval_split 0.2 takes them
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


def ours(name: str, x_NF: Any, y_N: Any, seed: int, compiled: str) -> float:
    """The accuracy, or R², of a run of ours on its held-out rows; `compiled` keeps its programs for the next run."""
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/rows.npz", x=x_NF, y=y_N)
        data = {
            "source": "table",
            "path": f"{folder}/rows.npz",
            "label": "y",
            "eval_split": 1 / HELD,
        }
        every = {
            "eval": {"every": None},
            "checkpoint": {"every": None},
            "log_every": 10_000,
            "compile_cache": compiled,
        }
        train = {"task": "classify", "data": data, "seed": seed, **every, **RECIPES[name]}
        found = run_training(Path(folder), train)
    if name != "diabetes":
        return float(found["accuracy"])
    is_held_N = np.arange(len(y_N)) % HELD == 0
    # The loss is the squared error over the variance of the training rows.
    held_N, kept_N = y_N[is_held_N], y_N[~is_held_N]
    return float(1 - found["loss"] * np.var(kept_N) / np.var(held_N))


def theirs(name: str, x_NF: Any, y_N: Any, seed: int, _: str) -> float:
    """The same of scikit-learn."""
    is_held_N = np.arange(len(y_N)) % HELD == 0
    kept_NF = x_NF[~is_held_N]
    z_NF = (x_NF - kept_NF.mean(0)) / kept_NF.std(0)
    kind = neural_network.MLPRegressor if name == "diabetes" else neural_network.MLPClassifier
    if name == "diabetes":
        y_N = (y_N - y_N[~is_held_N].mean()) / y_N[~is_held_N].std()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that its 200 epochs are not enough for it
        model = kind(random_state=seed).fit(z_NF[~is_held_N], y_N[~is_held_N])
    return float(model.score(z_NF[is_held_N], y_N[is_held_N]))


def measured(name: str, splits: int, seeds: int, compiled: str) -> Row:
    """scikit-learn's mean score over ours, and both."""
    rows = SETS[name]()
    scores: list[list[float]] = [[], []]
    for split in range(splits):
        count = len(rows.target)
        order_N = (
            np.arange(count) if split == 0 else np.random.default_rng(split).permutation(count)
        )
        for seed in range(seeds):
            for side, each in enumerate((ours, theirs)):
                scores[side].append(
                    each(
                        name, rows.data[order_N], rows.target[order_N].astype(float), seed, compiled
                    )
                )
        said = [f"{np.mean(each[-seeds:]):.4f} ± {np.std(each[-seeds:]):.4f}" for each in scores]
        log(f"tabular: {name}, split {split}: ours {said[0]}, scikit-learn {said[1]}")
    mine, other = (float(np.mean(each)) for each in scores)
    what = "R²" if name == "diabetes" else "accuracy"
    both = [f"{np.mean(each):.4f} ± {np.std(each):.4f}" for each in scores]
    detail = f"ours {both[0]}, scikit-learn {both[1]}; {splits} splits, {seeds} seeds each"
    return Row(f"{name}: {what} of scikit-learn's MLP over ours", other / mine, 1.01, detail)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--splits", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", choices=list(SETS))
    given = parser.parse_args()
    names = [name for name in SETS if given.only in (None, name)]
    with tempfile.TemporaryDirectory() as folder:
        return finish([measured(name, given.splits, given.seeds, folder) for name in names])


if __name__ == "__main__":
    sys.exit(main())
