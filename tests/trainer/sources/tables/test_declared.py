"""Columns have the kinds that a job declares; percentages, dates and indexes are recognized."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxlaunch.trainer.data.source import Split
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


def open_rows(path: Path, split: Split = "train", **keys: Any) -> Rows:
    data = {"source": "table", "path": str(path), "missing": "mean"} | keys
    source = open_source(TrainSpec.model_validate({"task": "classify", "data": data}), split)
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
    with pytest.raises(ValueError, match="contains 'S' twice"):
        open_rows(tmp_path / "a.csv", columns={"size": ["S", "M", "S"]})


@pytest.mark.parametrize("values", [["01", "02"], ["5%", "10%"]])
def test_ordinals_have_the_same_texts_in_every_file(tmp_path: Path, values: list[str]) -> None:
    path, declared = tmp_path / "a.csv", {"grade": values}
    path.write_text("grade,label\n{},a\n{},b\nNA,a\n".format(*values))
    rows = open_rows(path, eval_path=str(path), columns=declared)
    features_NF = read_features(rows)
    assert features_NF[:, 0].tolist() == [-1, 1, 0]
    held_out = open_rows(path, "eval", eval_path=str(path), columns=declared)
    np.testing.assert_array_equal(read_features(held_out), features_NF)
    # A prediction reads the table in this way.
    restored = Features.from_json(rows.encoding)
    table = files.read_tables([str(path)], restored.text_columns)
    np.testing.assert_array_equal(restored.read_valid(table), features_NF)


def test_word_for_a_missing_number_may_be_an_ordinal(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("pain,label\nnone,a\nmild,b\nNA,a\n")
    rows = open_rows(tmp_path / "a.csv", columns={"pain": ["none", "mild"]})
    assert read_features(rows)[:, 0].tolist() == [-1, 1, 0]


def test_whole_numbers_are_not_dates(tmp_path: Path) -> None:
    days = [20261231, 20270101]
    (tmp_path / "a.csv").write_text("day,label\n{},a\n,b\n".format(*days))
    with pytest.raises(DataError, match="row 1: its 'day' is '20261231', not a date, 2026-12-31"):
        open_rows(tmp_path / "a.csv", columns={"day": "date"})
    parquet.write_table(pyarrow.table({"day": days, "label": ["a", "b"]}), tmp_path / "b.parquet")
    message = "its column 'day' has whole numbers such as 20261231.* write dates as 2026-12-31"
    with pytest.raises(DataError, match=message):
        open_rows(tmp_path / "b.parquet", columns={"day": "date"})
    dates = {"day": [datetime.date(2026, 12, 31), None], "label": ["a", "b"]}
    parquet.write_table(pyarrow.table(dates), tmp_path / "c.parquet")
    assert len(open_rows(tmp_path / "c.parquet", columns={"day": "date"})) == 2


@pytest.mark.parametrize("first", [0, 2])
def test_index_is_recognized_in_several_files(tmp_path: Path, first: int) -> None:
    for part, start in (("a", 0), ("b", first)):
        lines = [f"{start + row},{part}{row},{'pq'[row]}" for row in range(2)]
        (tmp_path / f"{part}.csv").write_text("\n".join(["Unnamed: 0,x,label", *lines]))
    note = "'Unnamed: 0' is an index, not a feature"
    for columns in (None, {"x": "category"}):
        rows = open_rows(tmp_path / "*.csv", columns=columns)
        assert read_features(rows).shape == (4, 4)
        assert note in rows.notes
    # A declared column is a feature.
    rows = open_rows(tmp_path / "*.csv", columns={"Unnamed: 0": "category"})
    assert read_features(rows).shape == (4, 4 + 2 + first)
    assert note not in rows.notes
