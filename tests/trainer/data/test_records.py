from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_data_source import ArrayRecordDataSource

from trainer.data import records


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.float32(1.5),
        np.zeros((0, 4), np.int16),
        np.array([True, False]),
        np.array("a cat"),
        np.arange(3, dtype=">i4"),
        np.arange(6).reshape(2, 3).T,
    ],
)
def test_a_record_gives_back_what_was_put_in(array: np.ndarray) -> None:
    found = records.decode(records.encode({"x": array, "n": 7}))
    assert list(found) == ["x", "n"] and found["n"] == 7
    assert found["x"].shape == array.shape
    assert np.array_equal(found["x"], array)


def test_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="x is of object"):
        records.encode({"x": [1, "two", None, object()]})


def test_what_is_not_a_record_or_not_whole_is_refused() -> None:
    whole = records.encode({"x": np.arange(4, dtype=np.int32)})
    for broken in (b"", b"hello there", whole[:-1], whole + b"\0"):
        with pytest.raises(ValueError, match="not a record|the record at"):
            records.decode(broken)


def test_a_file_holds_the_records_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.array_record"
    assert records.write(path, ({"x": np.int32(i)} for i in range(5))) == 5
    data = ArrayRecordDataSource(str(path))
    assert [int(records.decode(data[i])["x"]) for i in range(5)] == list(range(5))


def test_a_file_that_could_not_be_finished_does_not_appear(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        records.write(tmp_path / "a.array_record", iter([{"x": 1}, {"x": object()}]))
    assert list(tmp_path.iterdir()) == []
