"""Columns have the kinds that a job declares; percentages, dates and indexes are recognized."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.inspect_data import inspect_path
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.sources.tables import files
from jaxlaunch.trainer.sources.tables.features import Features
from jaxlaunch.trainer.sources.tables.source import Rows
from jaxlaunch.trainer.spec import TrainSpec

CSV = """Unnamed: 0,zip,size,rate,visit,label
0,01234,S,5 %,2024-05-01,a
1,1234,L,7.5%,2024-05-03,b
2,01234,M,10%,,a
"""


def open_rows(path: Path, **keys: Any) -> Rows:
    data = {"source": "table", "path": str(path), "missing": "mean"} | keys
    source = open_source(TrainSpec.model_validate({"task": "classify", "data": data}), "train")
    assert isinstance(source, Rows)
    return source


def read_features(rows: Rows) -> np.ndarray[Any, Any]:
    return np.stack([rows[index]["features"] for index in range(len(rows))])


def test_kinds_of_columns_are_recognized_and_stated(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    rows = open_rows(tmp_path / "a.csv")
    # zip is a number; sizes L, M and S are one-hot; rate and visit are numbers.
    assert read_features(rows).shape == (3, 1 + 3 + 1 + 1)
    assert rows.notes[0] == "'Unnamed: 0' is an index, not a feature"
    assert "'rate' is read as percentages" in rows.notes
    report = inspect_path(str(tmp_path / "a.csv"), None, None)
    kinds = {name: column["kind"] for name, column in report["columns"].items()}
    assert kinds["rate"] == "percentages" and kinds["Unnamed: 0"] == "index"
    assert report["columns"]["rate"]["most"] == 10 and "columns" not in report["data"]
    lines = [{"day": "2024-05-01T12:00:00Z", "y": 0}, {"day": "2024-05-02", "y": 1}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = files.read_tables([str(tmp_path / "b.jsonl")])
    assert np.diff(table.values["day"]).tolist() == [12 * 3600]
    assert table.readings == {"day": "dates"}


@pytest.mark.parametrize(
    "names", [["10%", "5 %", "10%"], ["2024-05-01", "2024-04-01", "2024-05-01"]]
)
def test_percentages_and_dates_are_names_of_classes(tmp_path: Path, names: list[str]) -> None:
    for part in ("a", "b"):
        lines = [json.dumps({"x": number, "label": name}) for number, name in enumerate(names)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(lines))
    rows = open_rows(tmp_path / "*.jsonl")
    assert rows.classes == tuple(sorted(set(names)))
    assert [rows[index]["label"] for index in range(6)] == 2 * [
        sorted(set(names)).index(name) for name in names
    ]
    assert not any("is read as" in note for note in rows.notes)


def test_job_declares_kinds_of_columns(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(CSV)
    declared = {"zip": "category", "size": ["S", "M", "L"], "visit": "date"}
    rows = open_rows(tmp_path / "a.csv", columns=declared)
    features_NF = read_features(rows)
    assert features_NF[:, :2].tolist() == [[1, 0], [0, 1], [1, 0]]
    # The ranks 0, 2 and 1, standardized.
    np.testing.assert_allclose(features_NF[:, 2], [-(1.5**0.5), 1.5**0.5, 0], atol=1e-6)
    # A prediction reads the kinds from the encoding.
    encoded = json.loads(json.dumps(dict(rows.encoding)))
    restored = Features.from_json(encoded)
    table = files.read_tables([str(tmp_path / "a.csv")], restored.text_columns)
    np.testing.assert_array_equal(restored.read_valid(table), features_NF)
    (tmp_path / "a.csv").write_text(CSV.replace(",L,", ",XL,"))
    with pytest.raises(DataError, match="row 2: its 'size' is 'XL', not one of S, M, L"):
        open_rows(tmp_path / "a.csv", columns=declared)
    (tmp_path / "a.csv").write_text(CSV.replace("2024-05-01", "1 May"))
    with pytest.raises(DataError, match="row 1: its 'visit' is '1 May', not a date"):
        open_rows(tmp_path / "a.csv", columns=declared)
    with pytest.raises(DataError, match="has no column 'sizes' .did you mean 'size'"):
        open_rows(tmp_path / "a.csv", columns={"sizes": "category"})
