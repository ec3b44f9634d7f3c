"""Mixtures of tables: scaled together, classes by name, equal for every process."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow
import pytest
from pyarrow import parquet

from jaxlaunch.trainer.data.pipeline import Pipeline
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.sources.tables.source import TableMixture
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.tasks.classify import Classify

SIZES = {"ours": np.arange(12) * 1.5, "theirs": np.arange(6) * 10.0}  # the column that is a number


SETTINGS: dict[str, Any] = {"seed": 3, "shuffle": True, "prefetch": 1, "threads": 2}
SETTINGS["deterministic"] = True


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Write a CSV, and Parquet of `datasets` with columns and classes in another order."""
    rows = [f"{size},{'uv'[at % 2]},{'pq'[at % 2]}" for at, size in enumerate(SIZES["ours"])]
    (tmp_path / "ours.csv").write_text("\n".join(["size,kind,label", *rows]))
    about = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["q", "p"]}}}}
    columns = {"label": [1 - at % 2 for at in range(6)], "kind": ["v"] * 6, "size": SIZES["theirs"]}
    parquet.write_table(
        pyarrow.table(columns).replace_schema_metadata({"huggingface": json.dumps(about)}),
        tmp_path / "theirs.parquet",
    )
    return tmp_path


def make_spec(root: Path, target: str = "class", **keys: Any) -> TrainSpec:
    parts = {
        "ours": {"source": "table", "weight": 3, "path": f"{root}/ours.csv", "eval_split": 0.25},
        "theirs": {"source": "table", "weight": 1, "path": f"{root}/theirs.parquet"},
    }
    data = {"source": "mixture", "parts": parts, **keys}
    return TrainSpec.model_validate({"task": "classify", "data": data, "loss": {"target": target}})


def read_batches(
    task: Classify, source: TableMixture, processes: int, start: int = 0
) -> list[bytes]:
    """Features and labels of each step of the batches that so many processes read."""
    size, read = 8 // processes, []
    for process in range(processes):
        rows = range(process * size, (process + 1) * size)
        pipeline = Pipeline(source, task.example, batch=8, rows=rows, **SETTINGS)
        read.append([pipeline.read_batch(step) for step in range(start, 6)])
    return [
        b"".join(
            np.concatenate([part[key] for part in step]).tobytes() for key in ("features", "label")
        )
        for step in zip(*read, strict=True)
    ]


def find_rows(locate: Callable[[int], str | None], count: int) -> npt.NDArray[np.int64]:
    """Return the rows of ours.csv among the first examples, from 0."""
    places = (re.fullmatch(r".*ours.csv, row (\d+)", str(locate(at))) for at in range(count))
    return np.array([int(place[1]) - 1 for place in places if place])


def test_rows_are_scaled_by_all_parts_on_any_number_of_processes(root: Path) -> None:
    task = Classify()
    train, held_out = task.source(make_spec(root), "train"), task.source(make_spec(root), "eval")
    assert isinstance(train, TableMixture) and isinstance(held_out, TableMixture)
    stored = find_rows(train.locate_example, 12)
    absent = find_rows(held_out.locate_example, len(held_out))
    assert sorted([*stored, *absent]) == [*range(12)]
    assert {*(absent % 2)} == {0, 1}
    trained = np.concatenate([SIZES["ours"][stored], SIZES["theirs"]])
    labels = [*(stored % 2), *(np.arange(6) % 2)]  # q is 1 in both
    for at, (size, label) in enumerate(zip(trained, labels, strict=True)):
        kind = [0.0, 1.0] if at >= len(stored) or label else [1.0, 0.0]
        expected = [(size - trained.mean()) / trained.std(), *kind]
        np.testing.assert_allclose(train[at]["features"], expected, rtol=1e-5)
        assert int(train[at]["label"]) == label
    assert {name: len(rows) for name, rows in held_out.evaluated_parts.items()} == {
        "ours": len(absent)
    }
    size = SIZES["ours"][absent[1]]
    np.testing.assert_allclose(
        held_out[1]["features"][0], (size - trained.mean()) / trained.std(), rtol=1e-5
    )
    assert train.classes == ("p", "q")
    assert str(train.locate_example(len(stored) + 1)).endswith("theirs.parquet, row 2")
    index_B = np.array([10, 0, len(train) - 1, 3])
    for key, array in train.read_rows(index_B).items():
        assert np.array_equal(array, np.stack([train[index][key] for index in index_B]))
    counted = train.example_indices(0, 400, seed=3, shuffle=True) < len(stored)
    assert all(abs(counted[:n].sum() - n * 0.75) <= 1 for n in range(1, 401))
    once = read_batches(task, train, 1)
    assert read_batches(task, train, 2) == once
    assert read_batches(task, train, 4, start=2) == once[2:]
    described = task.describe_inputs(make_spec(root))
    assert described is not None
    assert described["classes"] == ["p", "q"]
    assert described["shape"] == [3]


def test_regression_labels_share_one_unit(root: Path) -> None:
    task = Classify()
    train = task.source(make_spec(root, "regression", label="size", columns=["kind"]), "train")
    assert isinstance(train, TableMixture) and train.scale is not None
    stored = find_rows(train.locate_example, 12)
    trained = np.concatenate([SIZES["ours"][stored], SIZES["theirs"]])
    assert float(train.scale.mean) == pytest.approx(trained.mean())
    assert train[len(train) - 1]["label"] == 50


def test_percentages_are_names_of_classes_in_parts(root: Path) -> None:
    block = make_spec(root).data.model_dump(mode="json")["parts"]
    for name in block:
        block[name] |= {"path": f"{root}/{name}.csv", "eval_split": None}
        (root / f"{name}.csv").write_text("size,label\n1,5%\n2,10%\n3,5%\n")
    source = open_source(make_spec(root, parts=block), "train")
    assert isinstance(source, TableMixture)
    assert source.classes == ("10%", "5%")
    assert [source[index]["label"] for index in range(6)] == [1, 0, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("second", "keys", "message"),
    [
        (
            "size,kind,label\n1,u,p\n2,v,s\n",
            {},
            "theirs has the 2 classes 'p', 's', and .*ours the 2 classes 'p', 'q'",
        ),
        (
            "size,label\n1,p\n2,q\n",
            {},
            "theirs has nothing in the column 'kind', and .*ours has texts there",
        ),
        (
            "size,kind,label,more\n1,u,p,3\n2,v,q,4\n",
            {},
            "theirs has numbers in the column 'more', .*ours has nothing",
        ),
        (
            "size,kind,label\n1,7,p\n2,8,q\n",
            {},
            "theirs has numbers in the column 'kind', and .*ours has texts there",
        ),
        ("size,kind,label\n1,u,p\n,v,q\n", {}, r"theirs\.csv, row 2: its 'size' has no value"),
        ("size,kind,label\n", {}, r"parts\.theirs: .*theirs\.csv has no rows"),
        (
            "size,kind\n1,u\n",
            {},
            r"parts\.theirs: .*theirs\.csv has no column with a usual name of a label",
        ),
        (
            "size,kind,label\n1,u,p\n2,v,s\n",
            {"classes": ["p", "q"]},
            r"the label 's' is not among the 2 classes",
        ),
    ],
)
def test_incompatible_tables_are_reported(root: Path, second: str, keys: Any, message: str) -> None:
    (root / "theirs.csv").write_text(second)
    block = make_spec(root).data.model_dump(mode="json")["parts"]
    block["theirs"]["path"] = f"{root}/theirs.csv"
    with pytest.raises(DataError, match=message) as refused:
        open_source(make_spec(root, parts=block, **keys), "train")
    assert "\n" not in str(refused.value)
    if "'more'" in message:  # columns that are named have to agree, and no others
        actual = open_source(make_spec(root, parts=block, columns=["size", "kind"]), "train")
        assert actual is not None
