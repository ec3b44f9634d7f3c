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


def opened(split: Any, **data: Any) -> Any:
    return array_record.open_source(ArrayRecord(source="array_record", **data), split)


def values(source: Any) -> list[int]:
    return [int(source[i]["x"]) for i in range(len(source))]


def test_records_follow_file_after_file(folder: Path) -> None:
    assert values(opened("train", path=f"{folder}/*.array_record")) == list(range(10))
    assert opened("eval", path=f"{folder}/*.array_record") is None


def test_a_share_is_held_out_and_the_rest_is_trained_on(folder: Path) -> None:
    held_out, rest = (
        values(opened(s, path=f"{folder}/*", eval_split=0.2)) for s in ("eval", "train")
    )
    assert held_out == [0, 5] and sorted(held_out + rest) == list(range(10))


def test_files_of_their_own_evaluate(folder: Path) -> None:
    both = {"path": f"{folder}/part-0*", "eval_path": [f"{folder}/part-2*"]}
    assert values(opened("train", **both)) == list(range(4))
    assert values(opened("eval", **both)) == list(range(4, 10))


def test_a_path_that_matches_nothing_says_what_is_there(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"matches no file; .* holds part-0.array_record, part-1.array_record"
    ):
        opened("train", path=f"{folder}/train-*")


def test_a_file_cut_short_is_named(folder: Path) -> None:
    path = folder / "part-2.array_record"
    os.truncate(path, 1000)
    with pytest.raises(
        DataError, match="part-2.array_record is not an array_record file, or is truncated"
    ):
        opened("train", path=f"{folder}/*")


@pytest.mark.parametrize("lines", [0, 10, 30_000])
def test_a_file_of_another_kind_is_called_that_whatever_its_size(
    lines: int, tmp_path: Path
) -> None:
    (tmp_path / "data.csv").write_text("1,2,3\n" * lines)
    with pytest.raises(DataError, match="data.csv is not an array_record file") as raised:
        opened("train", path=f"{tmp_path}/data.csv")
    assert "64KB" not in str(raised.value)


def test_a_record_that_does_not_decode_is_named_by_file_and_number(folder: Path) -> None:
    writer = array_record_module.ArrayRecordWriter(
        str(folder / "part-3.array_record"), "group_size:1"
    )
    writer.write(records.encode_example({"x": 10}))
    writer.write(b"a record of another kind")
    writer.close()
    source = opened("train", path=f"{folder}/*")
    with pytest.raises(
        DataError,
        match=r"example 11, record 1 of .*part-3.array_record, cannot be read: not a "
        r"tf.train.Example",
    ):
        source[11]


def test_threads_read_at_once_what_one_reads(folder: Path) -> None:
    source = opened("train", path=f"{folder}/*.array_record")
    wanted = np.random.default_rng(0).integers(0, 10, 2000).tolist()
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda index: int(source[index]["x"]), wanted)) == wanted


def test_records_are_read_after_one_that_is_damaged(tmp_path: Path) -> None:
    path, noise = tmp_path / "some.array_record", np.random.default_rng(0)
    records.write(path, ({"x": noise.integers(0, 256, 5000, np.uint8)} for _ in range(4)))
    sound = [
        each["x"].tolist() for each in map(opened("train", path=str(path)).__getitem__, range(4))
    ]
    with path.open("r+b") as file:
        file.seek(7000)  # in the second
        file.write(bytes(range(100)))
    source = opened("train", path=str(path))
    with pytest.raises(
        DataError, match="example 1, record 1 of .*some.array_record, cannot be read: Corrupted"
    ):
        source[1]
    assert [source[index]["x"].tolist() for index in (0, 2, 3)] == [
        sound[index] for index in (0, 2, 3)
    ]


def test_a_record_that_storage_does_not_give_may_be_read_later(folder: Path) -> None:
    class Away:
        def read_record(self, record: int) -> bytes:
            raise TimeoutError("the server does not answer")

    source = opened("train", path=f"{folder}/*")
    source._files[2] = Away()
    with pytest.raises(
        StorageError,
        match="example 5, record 1 of .*part-2.array_record, cannot be read: the server",
    ):
        source[5]


def test_the_fingerprint_follows_the_data_and_not_the_folder(
    folder: Path, tmp_path_factory: Any
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in folder.iterdir():
        (elsewhere / path.name).write_bytes(path.read_bytes())
    first = opened("train", path=f"{folder}/*").fingerprint()
    assert opened("train", path=f"{elsewhere}/*").fingerprint() == first
    records.write(elsewhere / "part-0.array_record", ({"x": np.int32(i + 100)} for i in range(4)))
    assert opened("train", path=f"{elsewhere}/*").fingerprint() != first
    assert opened("train", path=f"{folder}/*", eval_split=0.2).fingerprint() != first
