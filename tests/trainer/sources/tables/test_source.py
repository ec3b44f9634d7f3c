"""Tables of seven kinds of file read as the same rows, and odd ones right or not at all."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from jaxlaunch.trainer.data.examples import Examples
from jaxlaunch.trainer.data.pipeline import Pipeline
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.sources.tables.features import column_numbers
from jaxlaunch.trainer.sources.tables.files import read_tables
from jaxlaunch.trainer.sources.tables.source import Rows, TableEncoder
from jaxlaunch.trainer.spec import Table, TrainSpec
from jaxlaunch.trainer.tasks.classify import Classify
from tests.trainer.sources.tables.odd_tables import Odd, tables

ROWS = [
    {"size": n * 1.5, "kind": "ab"[n % 2], "when": n, "label": ("cat", "dog")[n % 2]}
    for n in range(10)
]


SETTINGS: dict[str, Any] = {"seed": 3, "shuffle": True, "prefetch": 1, "threads": 2}
SETTINGS["deterministic"] = True


def open_rows(
    path: Path | str, split: str = "train", target: str = "class", **keys: object
) -> Rows:
    data = {"source": "table", "path": str(path), **keys}
    spec = TrainSpec.model_validate({"task": "classify", "data": data, "loss": {"target": target}})
    result = open_source(spec, split)  # type: ignore[arg-type]
    assert isinstance(result, Rows)
    return result


def write_formats(folder: Path) -> list[Path]:
    table = pyarrow.Table.from_pylist(ROWS)
    lines = ["size,kind,when,label", *(",".join(map(str, row.values())) for row in ROWS)]
    (folder / "t.csv").write_text("\n".join(lines))
    (folder / "t.tsv").write_text("\n".join(lines).replace(",", "\t"))
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    parquet.write_table(table, folder / "t.parquet")
    with (
        pyarrow.OSFile(str(folder / "t.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as stream,
    ):
        stream.write_table(table)
    columns = {name: np.array([row[name] for row in ROWS]) for name in ROWS[0]}
    np.savez(folder / "t.npz", **columns)  # type: ignore[arg-type]
    columns |= {
        key: np.char.encode(a, "utf-8") for key, a in columns.items() if a.dtype.kind == "U"
    }
    np.savez(folder / "t_bytes.npz", **columns)  # type: ignore[arg-type]
    return sorted(folder.iterdir())


def test_all_file_formats_give_the_same_rows(tmp_path: Path) -> None:
    paths = write_formats(tmp_path)
    assert len(paths) == 7
    result = [open_rows(path) for path in paths]
    assert len({rows.fingerprint() for rows in result}) == 1
    first = result[0]
    size_N = np.arange(10) * 1.5
    np.testing.assert_allclose(
        first[3]["features"][0], (4.5 - size_N.mean()) / size_N.std(), rtol=1e-6
    )
    assert first[3]["features"][1:3].tolist() == [0.0, 1.0]  # a, b
    assert first.classes == ("cat", "dog")
    assert [int(first[n]["label"]) for n in range(3)] == [0, 1, 0]
    np.save(tmp_path / "plain.npy", np.array([[1.0, 5.0, 0.0], [2.0, 6.0, 1.0]]))
    assert open_rows(tmp_path / "plain.npy", label="2")[1]["label"] == 1


def test_held_out_rows_use_the_training_scale(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{n},{n / 2}\n" for n in range(40)))
    train = open_rows(tmp_path / "t.csv", target="regression", eval_split=0.2, label="y")
    held_out = open_rows(tmp_path / "t.csv", "eval", "regression", eval_split=0.2, label="y")
    stored, absent = (
        np.array([2 * float(rows[at]["label"]) for at in range(len(rows))])
        for rows in (train, held_out)
    )
    assert sorted([*stored, *absent]) == [*range(40)] and 3 < len(absent) < 14
    np.testing.assert_allclose(
        held_out[1]["features"], [(absent[1] - stored.mean()) / stored.std()], rtol=1e-6
    )
    assert held_out.scale is not None and float(held_out.scale.mean) == pytest.approx(
        stored.mean() / 2
    )


def test_datasets_folder_keeps_splits_and_class_names(tmp_path: Path) -> None:
    about = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}}}}
    schema = pyarrow.schema(
        [("a", pyarrow.float32()), ("label", pyarrow.int64())], {"huggingface": json.dumps(about)}
    )
    for split, rows in (("train", [[1.0, 0], [2.0, 1]]), ("test", [[3.0, 1]])):
        (tmp_path / split).mkdir()
        table = pyarrow.Table.from_pylist([{"a": a, "label": label} for a, label in rows], schema)
        for name in ("data-00000-of-00001.arrow", "cache-1.arrow"):
            path = str(tmp_path / split / name)
            with pyarrow.ipc.new_stream(path, schema) as stream:
                stream.write_table(table)
        (tmp_path / split / "state.json").write_text("{}")
    train, held_out = open_rows(tmp_path), open_rows(tmp_path, "eval")
    assert (len(train), len(held_out), train.classes) == (2, 1, ("no", "yes"))
    assert int(held_out[0]["label"]) == 1


def test_several_labels_and_missing_values_are_read(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,k,u,v\n1,x,0,1\n,,1,1\n3,x,1,0\n")
    rows = open_rows(tmp_path / "t.csv", target="multi_label", label=["u", "v"], missing="mean")
    assert rows[1]["label"].tolist() == [1.0, 1.0] and rows[1]["features"].tolist() == [0.0, 0.0]
    assert open_rows(
        tmp_path / "t.csv", target="regression", label=["u", "v"], columns=["k"], missing="mean"
    )[0]["label"].shape == (2,)


class Slowly(Classify):
    """A task with an example of its own, which is asked for each row."""

    def example(self, raw: dict[str, Any]) -> dict[str, Any]:
        return super().example(raw)


@pytest.mark.parametrize("target", ["class", "multi_label", "regression"])
def test_batch_function_equals_single_examples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    lines = [f"{number},{number % 3 % 2},{number % 2}" for number in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["a,u,v", *lines]))
    label = ["u", "v"] if target == "multi_label" else "u"
    data = {"source": "table", "path": str(tmp_path / "t.csv"), "label": label}
    spec = TrainSpec.model_validate({"task": "classify", "data": data, "loss": {"target": target}})
    asked: list[int] = []
    first = Rows.__getitem__
    monkeypatch.setattr(
        Rows, "__getitem__", lambda rows, index: asked.append(index) or first(rows, index)
    )  # type: ignore[func-returns-value]
    built = {}
    for task in (Classify(), Slowly()):
        rows = task.source(spec, "train")
        assert isinstance(rows, Rows)
        pipeline = Pipeline(rows, task.example, batch=8, rows=range(2, 6), **SETTINGS)
        asked.clear()
        built[type(task)] = [
            pipeline.read_batch(step) for step in (4, 1)
        ]  # of a run that resumes at 4
        assert bool(asked) == (type(task) is Slowly)
    for at_once, one_by_one in zip(*built.values(), strict=True):
        for key, array in one_by_one.items():
            assert array.dtype == at_once[key].dtype and np.array_equal(array, at_once[key]), key
    if target != "class":
        every, task = np.arange(20), Classify()
        task.source(spec, "train")
        rows.label_N[7] = np.inf if target == "regression" else 0.5
        with pytest.raises(DataError, match="example 7 has"):
            Examples(rows, task.example).read(every, every)


def test_unknown_evaluation_label_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,label\n1,cat\n2,dog\n")
    (tmp_path / "val.csv").write_text("a,label\n1,cow\n")
    with pytest.raises(DataError, match=r"val.csv.*'cow' is not among the 2 classes"):
        open_rows(tmp_path / "train.csv", eval_path=str(tmp_path / "val.csv"))
    (tmp_path / "words.csv").write_text("a,code,label\n1,x7,cat\n2,07,dog\n3,y,dog\n")
    (tmp_path / "digits.csv").write_text("a,code,label\n1,07,cat\n")
    held_out = open_rows(tmp_path / "words.csv", "eval", eval_path=str(tmp_path / "digits.csv"))
    assert held_out[0]["features"][1:].tolist() == [
        1.0,
        0.0,
        0.0,
    ]  # 07, x7, y: a text is not a number in another file
    (tmp_path / "other.csv").write_text("b,label\n1,cat\n")
    with pytest.raises(DataError, match="other.csv has no column 'a'"):
        open_rows(tmp_path / "train.csv", eval_path=str(tmp_path / "other.csv"))


@pytest.mark.parametrize("odd", tables(), ids=lambda odd: odd.name)
def test_odd_table_is_read_or_reported(odd: Odd, tmp_path: Path) -> None:
    path = tmp_path / odd.name
    path.write_bytes(odd.content)
    if odd.good is None:
        with pytest.raises(DataError) as refused:
            open_rows(path, label="y")
        assert odd.name in str(refused.value) and "\n" not in str(refused.value)
        assert not [word for word in odd.bad if word not in str(refused.value)], str(refused.value)
        return
    table = read_tables([str(path)])
    names = TableEncoder(Table(source="table", path=str(path), label="y"), table, "class").names
    columns = [column_numbers(table, name) for name in names]
    result = np.concatenate([item for item in columns if item is not None], axis=1)
    np.testing.assert_allclose(result, odd.good)
    assert len(open_rows(path, label="y")) == len(odd.good)


def test_scaling_works_without_rank_promotion(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,x,y\n1,10,2\n2,20,4\n3,60,9\n")
    scale = open_rows(tmp_path / "t.csv", target="regression", label=["x", "y"]).scale
    assert scale is not None
    with jax.numpy_rank_promotion("raise"):
        label_BK = jnp.array([[10.0, 2.0], [60.0, 9.0]])
        within_BK = scale.normalize(label_BK)
        np.testing.assert_allclose(
            within_BK[0], [-20 / scale.deviation[0], -3 / scale.deviation[1]], rtol=1e-6
        )
        np.testing.assert_allclose(scale.denormalize(within_BK), label_BK, rtol=1e-6)


def test_label_without_utf8_is_reported(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("a,label\n1,\u00e9\n2,x\n".encode("latin-1"))
    with pytest.raises(DataError, match="its column 'label' is not UTF-8 in row 1"):
        open_rows(tmp_path / "t.csv")


def test_number_beyond_float32_is_reported(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n1,2\n3,1e300\n")
    words = r"t\.csv, row 2: its label 'y' is 1e\+300, more than 32 bits can hold"
    with pytest.raises(DataError, match=words):
        open_rows(tmp_path / "t.csv", target="regression", label="y")
    (tmp_path / "large.csv").write_text(
        "a,y\n1,1e20\n2,3e20\n"
    )  # whose squares 32 bits do not hold
    scale = open_rows(tmp_path / "large.csv", target="regression", label="y").scale
    assert scale is not None
    assert scale.mean == np.float32(2e20)
    assert scale.deviation == np.float32(1e20)


def test_files_with_different_class_names_are_reported(tmp_path: Path) -> None:
    for name, classes in (("a", ["no", "yes"]), ("b", ["yes", "no"])):
        about = {"info": {"features": {"label": {"_type": "ClassLabel", "names": classes}}}}
        table = pyarrow.table({"x": [1.0, 2.0], "label": [0, 1]}).replace_schema_metadata(
            {"huggingface": json.dumps(about)}
        )
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    words = r"b\.parquet has other names for the classes in 'label' than .*a\.parquet"
    with pytest.raises(DataError, match=words):
        open_rows(f"{tmp_path}/*.parquet")
