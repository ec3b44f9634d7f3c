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
from jaxlaunch.trainer.sources.tables.files import read_tables
from jaxlaunch.trainer.sources.tables.source import Coder, Rows, column_numbers
from jaxlaunch.trainer.spec import Table, TrainSpec
from jaxlaunch.trainer.tasks.classify import Classify
from tests.trainer.sources.tables.odd_tables import Odd, tables

ROWS = [
    {"size": n * 1.5, "kind": "ab"[n % 2], "when": n, "label": ("cat", "dog")[n % 2]}
    for n in range(10)
]


def opened(path: Path | str, split: str = "train", target: str = "class", **keys: object) -> Rows:
    data = {"source": "table", "path": str(path), **keys}
    spec = TrainSpec.model_validate({"task": "classify", "data": data, "loss": {"target": target}})
    found = open_source(spec, split)  # type: ignore[arg-type]
    assert isinstance(found, Rows)
    return found


def written(folder: Path) -> list[Path]:
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
    np.savez(folder / "t.npz", **{name: np.array([row[name] for row in ROWS]) for name in ROWS[0]})  # type: ignore[arg-type]
    return sorted(folder.iterdir())


def test_six_kinds_of_file_hold_the_same_rows(tmp_path: Path) -> None:
    paths = written(tmp_path)
    assert len(paths) == 6
    found = [opened(path) for path in paths]
    assert len({rows.fingerprint() for rows in found}) == 1
    first = found[0]
    size_N = np.arange(10) * 1.5
    np.testing.assert_allclose(
        first[3]["features"][0], (4.5 - size_N.mean()) / size_N.std(), rtol=1e-6
    )
    assert first[3]["features"][1:3].tolist() == [0.0, 1.0]  # a, b
    assert first.classes == ("cat", "dog") and [int(first[n]["label"]) for n in range(3)] == [
        0,
        1,
        0,
    ]
    np.save(tmp_path / "plain.npy", np.array([[1.0, 5.0, 0.0], [2.0, 6.0, 1.0]]))
    assert opened(tmp_path / "plain.npy", label="2")[1]["label"] == 1


def test_what_is_held_out_is_scaled_by_what_is_trained_on(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n" + "".join(f"{n},{n / 2}\n" for n in range(10)))
    train = opened(tmp_path / "t.csv", target="regression", eval_split=0.2, label="y")
    held = opened(tmp_path / "t.csv", "eval", "regression", eval_split=0.2, label="y")
    kept = np.array([n for n in range(10) if n not in (0, 5)], np.float32)
    assert (len(train), len(held)) == (8, 2)
    np.testing.assert_allclose(held[1]["features"], [(5 - kept.mean()) / kept.std()], rtol=1e-6)
    assert held.scale is not None and float(held.scale.mean) == pytest.approx(kept.mean() / 2)


def test_a_folder_of_datasets_has_its_splits_and_the_names_of_its_classes(tmp_path: Path) -> None:
    about = {"info": {"features": {"label": {"_type": "ClassLabel", "names": ["no", "yes"]}}}}
    schema = pyarrow.schema(
        [("a", pyarrow.float32()), ("label", pyarrow.int64())], {"huggingface": json.dumps(about)}
    )
    for split, rows in (("train", [[1.0, 0], [2.0, 1]]), ("test", [[3.0, 1]])):
        (tmp_path / split).mkdir()
        table = pyarrow.Table.from_pylist([{"a": a, "label": label} for a, label in rows], schema)
        for name in ("data-00000-of-00001.arrow", "cache-1.arrow"):
            with pyarrow.OSFile(str(tmp_path / split / name), "wb") as file:
                with pyarrow.ipc.new_stream(file, schema) as stream:
                    stream.write_table(table)
        (tmp_path / split / "state.json").write_text("{}")
    train, held = opened(tmp_path), opened(tmp_path, "eval")
    assert (len(train), len(held), train.classes) == (2, 1, ("no", "yes"))
    assert int(held[0]["label"]) == 1


def test_several_labels_are_flags_or_numbers_and_a_missing_value_may_take_the_mean(
    tmp_path: Path,
) -> None:
    (tmp_path / "t.csv").write_text("a,k,u,v\n1,x,0,1\n,,1,1\n3,x,1,0\n")
    rows = opened(tmp_path / "t.csv", target="multi_label", label=["u", "v"], missing="mean")
    assert rows[1]["label"].tolist() == [1.0, 1.0] and rows[1]["features"].tolist() == [0.0, 0.0]
    assert opened(
        tmp_path / "t.csv", target="regression", label=["u", "v"], columns=["k"], missing="mean"
    )[0]["label"].shape == (2,)


class Slowly(Classify):
    """A task with an example of its own, which is asked for each row."""

    def example(self, raw: dict[str, Any]) -> dict[str, Any]:
        return super().example(raw)


@pytest.mark.parametrize("target", ["class", "multi_label", "regression"])
def test_the_rows_of_a_batch_are_made_at_once_and_equal_those_made_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    lines = [f"{number},{number % 3 % 2},{number % 2}" for number in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(["a,u,v", *lines]))
    label = ["u", "v"] if target == "multi_label" else "u"
    data = {"source": "table", "path": str(tmp_path / "t.csv"), "label": label}
    spec = TrainSpec.model_validate({"task": "classify", "data": data, "loss": {"target": target}})
    asked: list[int] = []
    one = Rows.__getitem__
    monkeypatch.setattr(
        Rows, "__getitem__", lambda rows, index: asked.append(index) or one(rows, index)
    )  # type: ignore[func-returns-value]
    made = {}
    for task in (Classify(), Slowly()):
        rows = task.source(spec, "train")
        assert isinstance(rows, Rows)
        pipeline = Pipeline(
            rows,
            task.example,
            batch=8,
            rows=range(2, 6),
            seed=3,
            shuffle=True,
            prefetch=1,
            threads=2,
            deterministic=True,
        )
        asked.clear()
        made[type(task)] = [
            pipeline.read_batch(step) for step in (4, 1)
        ]  # of a run that resumes at 4
        assert bool(asked) == (type(task) is Slowly)
    for at_once, one_by_one in zip(*made.values(), strict=True):
        for key, array in one_by_one.items():
            assert array.dtype == at_once[key].dtype and np.array_equal(array, at_once[key]), key
    if target != "class":
        every, task = np.arange(20), Classify()
        task.source(spec, "train")
        rows.label_N[7] = np.inf if target == "regression" else 0.5
        with pytest.raises(DataError, match="example 7 has"):
            Examples(rows, task.example).read(every, every)


def test_a_label_of_evaluation_that_training_has_not_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.csv").write_text("a,label\n1,cat\n2,dog\n")
    (tmp_path / "val.csv").write_text("a,label\n1,cow\n")
    with pytest.raises(DataError, match=r"val.csv.*'cow' is not among the 2 classes"):
        opened(tmp_path / "train.csv", eval_path=str(tmp_path / "val.csv"))
    (tmp_path / "words.csv").write_text("a,code,label\n1,x7,cat\n2,07,dog\n3,y,dog\n")
    (tmp_path / "digits.csv").write_text("a,code,label\n1,07,cat\n")
    held = opened(tmp_path / "words.csv", "eval", eval_path=str(tmp_path / "digits.csv"))
    assert held[0]["features"][1:].tolist() == [
        1.0,
        0.0,
        0.0,
    ]  # 07, x7, y: a text is no number in another file
    (tmp_path / "other.csv").write_text("b,label\n1,cat\n")
    with pytest.raises(DataError, match="other.csv has no column 'a'"):
        opened(tmp_path / "train.csv", eval_path=str(tmp_path / "other.csv"))


@pytest.mark.parametrize("odd", tables(), ids=lambda odd: odd.name)
def test_an_odd_table_is_read_right_or_named(odd: Odd, tmp_path: Path) -> None:
    path = tmp_path / odd.name
    path.write_bytes(odd.content)
    if odd.good is None:
        with pytest.raises(DataError) as refused:
            opened(path, label="y")
        assert odd.name in str(refused.value) and "\n" not in str(refused.value)
        assert not [word for word in odd.bad if word not in str(refused.value)], str(refused.value)
        return
    table = read_tables([str(path)])
    names = Coder(Table(source="table", path=str(path), label="y"), table, "class").names
    columns = [column_numbers(table, name) for name in names]
    found = np.concatenate([each for each in columns if each is not None], axis=1)
    np.testing.assert_allclose(found, odd.good)
    assert len(opened(path, label="y")) == len(odd.good)


def test_several_numbers_are_scaled_where_arrays_of_different_ranks_are_refused(
    tmp_path: Path,
) -> None:
    (tmp_path / "t.csv").write_text("a,x,y\n1,10,2\n2,20,4\n3,60,9\n")
    scale = opened(tmp_path / "t.csv", target="regression", label=["x", "y"]).scale
    assert scale is not None
    with jax.numpy_rank_promotion("raise"):
        label_BK = jnp.array([[10.0, 2.0], [60.0, 9.0]])
        within_BK = scale.normalize(label_BK)
        np.testing.assert_allclose(
            within_BK[0], [-20 / scale.deviation[0], -3 / scale.deviation[1]], rtol=1e-6
        )
        np.testing.assert_allclose(scale.denormalize(within_BK), label_BK, rtol=1e-6)


def test_a_label_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("a,label\n1,\u00e9\n2,x\n".encode("latin-1"))
    with pytest.raises(DataError, match="its column 'label' is not UTF-8 in row 1"):
        opened(tmp_path / "t.csv")


def test_a_number_that_32_bits_do_not_hold_is_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,y\n1,2\n3,1e300\n")
    with pytest.raises(
        DataError, match=r"t\.csv, row 2: its label 'y' is 1e\+300, more than 32 bits hold"
    ):
        opened(tmp_path / "t.csv", target="regression", label="y")
    (tmp_path / "large.csv").write_text(
        "a,y\n1,1e20\n2,3e20\n"
    )  # whose squares 32 bits do not hold
    scale = opened(tmp_path / "large.csv", target="regression", label="y").scale
    assert (
        scale is not None and scale.mean == np.float32(2e20) and scale.deviation == np.float32(1e20)
    )


def test_files_that_number_their_classes_otherwise_are_named(tmp_path: Path) -> None:
    for name, classes in (("a", ["no", "yes"]), ("b", ["yes", "no"])):
        about = {"info": {"features": {"label": {"_type": "ClassLabel", "names": classes}}}}
        table = pyarrow.table({"x": [1.0, 2.0], "label": [0, 1]}).replace_schema_metadata(
            {"huggingface": json.dumps(about)}
        )
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    with pytest.raises(
        DataError, match=r"b\.parquet has other names for the classes in 'label' than .*a\.parquet"
    ):
        opened(f"{tmp_path}/*.parquet")
