import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python import array_record_module

from jaxlaunch.trainer.data import records
from jaxlaunch.trainer.errors import DataError, StorageError
from jaxlaunch.trainer.sources import array_record
from jaxlaunch.trainer.spec import ArrayRecord


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard, numbers in enumerate([range(4), range(4, 4), range(4, 10)]):
        records.write(
            tmp_path / f"part-{shard}.array_record", ({"x": np.int32(i)} for i in numbers)
        )
    return tmp_path


def open_records(split: Any, **data: Any) -> Any:
    return array_record.open_source(ArrayRecord(source="array_record", **data), split)


def read_values(source: Any) -> list[int]:
    return [int(source[i]["x"]) for i in range(len(source))]


def test_records_are_read_in_file_order(folder: Path) -> None:
    assert read_values(open_records("train", path=f"{folder}/*.array_record")) == list(range(10))
    assert open_records("eval", path=f"{folder}/*.array_record") is None


def test_share_of_the_records_is_held_out(folder: Path) -> None:
    held_out, rest = (
        read_values(open_records(s, path=f"{folder}/*", eval_split=0.2)) for s in ("eval", "train")
    )
    assert 1 <= len(held_out) <= 5 and sorted(held_out + rest) == list(range(10))
    other = read_values(open_records("eval", path=f"{folder}/*", eval_split=0.2, split_seed=1))
    assert other != held_out


def test_eval_path_gives_the_evaluation_records(folder: Path) -> None:
    pair = {"path": f"{folder}/part-0*", "eval_path": [f"{folder}/part-2*"]}
    assert read_values(open_records("train", **pair)) == list(range(4))
    assert read_values(open_records("eval", **pair)) == list(range(4, 10))


def test_truncated_file_is_reported(folder: Path) -> None:
    path = folder / "part-2.array_record"
    os.truncate(path, 1000)
    words = "part-2.array_record is not an array_record file, or is truncated"
    with pytest.raises(DataError, match=words):
        open_records("train", path=f"{folder}/*")


@pytest.mark.parametrize("lines", [0, 10, 30_000])
def test_file_of_another_format_is_reported(lines: int, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("1,2,3\n" * lines)
    with pytest.raises(DataError, match="data.csv is not an array_record file") as raised:
        open_records("train", path=f"{tmp_path}/data.csv")
    assert "64KB" not in str(raised.value)


def test_undecodable_record_is_reported_with_file_and_number(folder: Path) -> None:
    writer = array_record_module.ArrayRecordWriter(
        str(folder / "part-3.array_record"), "group_size:1"
    )
    writer.write(records.encode_example({"x": 10}))
    writer.write(b"a record of another kind")
    writer.close()
    source = open_records("train", path=f"{folder}/*")
    with pytest.raises(
        DataError,
        match=r"example 11, record 1 of .*part-3.array_record, cannot be read: not a "
        r"tf.train.Example",
    ):
        source[11]


def test_threads_read_the_same_records(folder: Path) -> None:
    source = open_records("train", path=f"{folder}/*.array_record")
    expected = np.random.default_rng(0).integers(0, 10, 2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda index: int(source[index]["x"]), expected)) == expected


def test_damaged_record_does_not_break_later_reads(tmp_path: Path) -> None:
    path, noise = tmp_path / "some.array_record", np.random.default_rng(0)
    records.write(path, ({"x": noise.integers(0, 256, 5000, np.uint8)} for _ in range(4)))
    sound = [
        item["x"].tolist()
        for item in map(open_records("train", path=str(path)).__getitem__, range(4))
    ]
    with path.open("r+b") as file:
        file.seek(7000)  # in the second
        file.write(bytes(range(100)))
    source = open_records("train", path=str(path))
    words = "example 1, record 1 of .*some.array_record, cannot be read: Corrupted"
    with pytest.raises(DataError, match=words):
        source[1]
    actual = [source[index]["x"].tolist() for index in (0, 2, 3)]
    assert actual == [sound[index] for index in (0, 2, 3)]


def test_storage_failure_of_a_record_is_temporary(folder: Path) -> None:
    class Away:
        def read_record(self, record: int) -> bytes:
            raise TimeoutError("the server does not answer")

    source = open_records("train", path=f"{folder}/*")
    source._files[2] = Away()
    with pytest.raises(
        StorageError,
        match="example 5, record 1 of .*part-2.array_record, cannot be read: the server",
    ):
        source[5]


def test_fingerprint_depends_on_the_data_not_the_folder(
    folder: Path, tmp_path_factory: Any
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in folder.iterdir():
        (elsewhere / path.name).write_bytes(path.read_bytes())
    first = open_records("train", path=f"{folder}/*").fingerprint()
    assert open_records("train", path=f"{elsewhere}/*").fingerprint() == first
    records.write(elsewhere / "part-0.array_record", ({"x": np.int32(i + 100)} for i in range(4)))
    assert open_records("train", path=f"{elsewhere}/*").fingerprint() != first
    assert open_records("train", path=f"{folder}/*", eval_split=0.2).fingerprint() != first
