"""Statistics of columns and labels in float64, against exact sums; missing values and changes."""

from __future__ import annotations

import json
import math
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.sources.tables.features import fit_statistics
from jaxlaunch.trainer.sources.tables.source import Rows
from jaxlaunch.trainer.spec import TrainSpec


def open_rows(path: Path, target: str = "regression", split: str = "train", **keys: Any) -> Rows:
    data = {"source": "table", "path": str(path), **keys}
    spec = TrainSpec.model_validate({"task": "classify", "data": data, "loss": {"target": target}})
    rows = open_source(spec, split)  # type: ignore[arg-type]
    assert isinstance(rows, Rows)
    return rows


def exact_statistics(values: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return mean and deviation, summed without rounding."""
    numbers = [Fraction(value) for value in values.tolist()]
    mean = sum(numbers, Fraction(0)) / len(numbers)
    variance = sum(((number - mean) ** 2 for number in numbers), Fraction(0)) / len(numbers)
    return float(mean), math.sqrt(variance)


@pytest.mark.parametrize("columns", [1, 2])
def test_labels_far_from_zero_have_exact_statistics(tmp_path: Path, columns: int) -> None:
    # A running sum in float32 gives a mean of 98,977 and a deviation of 1,023 here.
    random = np.random.default_rng(0)
    label_NK = (100_000 + 3 * random.standard_normal((1_000_000, columns))).astype(np.float32)
    np.savez(tmp_path / "t.npz", x=np.zeros(len(label_NK)), y=label_NK)
    rows = open_rows(tmp_path / "t.npz", label="y")
    assert rows.scale is not None
    mean_K, deviation_K = np.atleast_1d(rows.scale.mean), np.atleast_1d(rows.scale.deviation)
    for column in range(columns):
        # The sums of whole multiples of 2^-7 are exact in integers.
        steps_N = (label_NK[:, column].astype(np.float64) * 128).astype(np.int64)
        total, squares = int(steps_N.sum()), int(np.square(steps_N - 12_800_000).sum())
        middle = total / len(steps_N) - 12_800_000
        mean = total / len(steps_N) / 128
        deviation = math.sqrt(squares / len(steps_N) - middle**2) / 128
        assert mean_K[column] == pytest.approx(mean, rel=1e-7)
        assert deviation_K[column] == pytest.approx(deviation, rel=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1e5, 1e9, -1e12, 1e15])
def test_features_far_from_zero_have_exact_statistics(offset: float) -> None:
    random = np.random.default_rng(1)
    x_NK = offset + np.stack([random.standard_normal(10_000), random.exponential(9, 10_000)], 1)
    x_NK[::7, 1] = np.nan
    mean_K, deviation_K = fit_statistics(x_NK)
    for column in range(2):
        values = x_NK[:, column][~np.isnan(x_NK[:, column])]
        mean, deviation = exact_statistics(values)
        assert mean_K[column] == pytest.approx(mean, rel=1e-15, abs=1e-12)
        assert deviation_K[column] == pytest.approx(deviation, rel=1e-9)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-300, -7.3e8, 1e100, 0.0])
@pytest.mark.parametrize("count", [1, 3, 10, 997])
def test_constant_column_has_deviation_1(value: float, count: int) -> None:
    mean_K, deviation_K = fit_statistics(np.full((count, 2), value))
    assert mean_K.tolist() == [value] * 2 and deviation_K.tolist() == [1.0] * 2
    rounded = np.full((count, 1), value)
    rounded[0] = np.nextafter(value, 2 * value + 1)
    if value > 1e-290:
        assert fit_statistics(rounded)[1].tolist() == [1.0]


def test_later_value_of_a_constant_column_stays_small(tmp_path: Path) -> None:
    lines = ["a,b,y", *(f"0.1,{number},{number % 2}" for number in range(10))]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    (tmp_path / "later.csv").write_text("a,b,y\n0.2,3,1\n0.1,4,0\n")
    paths = {"label": "y", "eval_path": str(tmp_path / "later.csv")}
    later = open_rows(tmp_path / "t.csv", "class", "eval", **paths)
    assert later[0]["features"][0] == pytest.approx(0.1) and later[1]["features"][0] == 0.0
    assert open_rows(tmp_path / "t.csv", "class", **paths)[0]["features"][0] == 0.0
    constant = open_rows(tmp_path / "t.csv", label=["a", "b"], columns=["y"]).scale
    assert constant is not None and constant.deviation.tolist()[0] == 1.0


def test_label_whose_spread_32_bits_lose_is_refused(tmp_path: Path) -> None:
    stamps = 1.7e9 + np.arange(100.0)
    np.savez(tmp_path / "t.npz", x=np.arange(100.0), y=stamps)
    with pytest.raises(DataError, match="label y varies by 28.8661 .* have steps of 128; subtract"):
        open_rows(tmp_path / "t.npz", label="y")
    np.savez(tmp_path / "t.npz", x=np.arange(100.0), y=stamps - 1.7e9)
    assert len(open_rows(tmp_path / "t.npz", label="y")) == 100


def test_missing_text_is_no_category(tmp_path: Path) -> None:
    rows = [{"k": text, "y": number % 2} for number, text in enumerate(["None", "a", "nan"] * 3)]
    missing = [{"k": None, "y": 0}, {"k": "", "y": 1}, {"y": 1}]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, [*rows, *missing])))
    read = open_rows(tmp_path / "t.jsonl", "class", label="y", missing="mean")
    features = np.stack([read[at]["features"] for at in range(len(read))])
    assert features[:3].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert features[-3:].tolist() == [[0, 0, 0]] * 3
    with pytest.raises(DataError, match="row 10: its 'k' has no value"):
        open_rows(tmp_path / "t.jsonl", "class", label="y")
    with pytest.raises(DataError, match="row 10: its label 'k' is empty"):
        open_rows(tmp_path / "t.jsonl", "class", label="k")


def test_column_of_digits_in_one_file_stays_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("zip,y\n01234,0\n1234,1\n")
    (tmp_path / "b.csv").write_text("zip,y\nA12,0\nB7,1\nC3,0\nD4,1\n,0\n")
    (tmp_path / "c.csv").write_text("zip,y\n,1\n,0\n")
    rows = open_rows(tmp_path / "*.csv", "class", label="y", missing="mean")
    (column,) = rows.encoding["columns"]
    assert column["values"] == ["01234", "1234", "A12", "B7", "C3", "D4"]
    assert rows[0]["features"].tolist() == [1.0, 0, 0, 0, 0, 0]
    assert [rows[at]["features"].sum() for at in (6, 7, 8)] == [0.0] * 3


def test_rewritten_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("x,y\n1,2\n2,4\n")
    assert [float(open_rows(path, label="y")[at]["label"]) for at in (0, 1)] == [2.0, 4.0]
    path.write_text("x,y\n1,7\n2,9\n")
    assert [float(open_rows(path, label="y")[at]["label"]) for at in (0, 1)] == [7.0, 9.0]
    stat = path.stat()
    path.write_text("x,y\n1,5\n2,6\n")
    # Some tools give a file its old time back.
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert float(open_rows(path, label="y")[0]["label"]) == 5.0
