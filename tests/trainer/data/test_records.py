import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_data_source import ArrayRecordDataSource
from tensorflow_datasets.proto import tf_example_pb2

from jaxlaunch.trainer.data import records


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
        np.uint64(2**63 + 1),
        np.array(["grün", "blau"]),
        np.array([b"a", b"\1b"]),
    ],
)
def test_record_round_trip(array: np.ndarray) -> None:
    result = records.decode_record(records.encode_example({"x": array, "n": 7}))
    assert result.keys() == {"x", "n"} and result["n"] == 7
    assert result["x"].shape == array.shape
    assert result["x"].dtype == np.asarray(array).dtype.newbyteorder("<")
    assert np.array_equal(result["x"], array)


def test_objects_are_refused() -> None:
    with pytest.raises(TypeError, match="x is of object"):
        records.encode_example({"x": [1, "two", None, object()]})


def test_invalid_or_truncated_record_is_refused() -> None:
    whole = records.encode_example({"x": np.arange(4, dtype=np.int32)})
    for broken in (b"", b"hello there", whole[:-1], whole + b"\0"):
        with pytest.raises(ValueError, match="not a tf.train.Example"):
            records.decode_record(broken)


def test_record_is_a_valid_tf_example() -> None:
    record = records.encode_example(
        {"image": np.arange(6, dtype=np.uint8).reshape(2, 3), "label": 7, "text": "grün"}
    )
    features = tf_example_pb2.Example.FromString(record).features.feature
    assert features["image"].bytes_list.value == [bytes(range(6))]
    (arrays,) = features["jaxlaunch/arrays"].bytes_list.value
    actual = json.loads(arrays)
    assert actual == {"image": ["|u1", [2, 3]], "label": ["<i8", []], "text": ["<U4", []]}
    assert features["label"].int64_list.value == [7]
    assert features["text"].bytes_list.value == ["grün".encode()]


def test_example_of_another_writer_is_decoded() -> None:
    example = tf_example_pb2.Example()
    example.features.feature["label"].int64_list.value.append(5)
    example.features.feature["box"].float_list.value.extend([0.5, 1.5])
    example.features.feature["png"].bytes_list.value.append(b"\0png\0")
    result = records.decode_record(example.SerializeToString())
    assert (
        result["label"].shape == () and result["label"] == 5 and result["label"].dtype == np.int64
    )
    assert result["box"].tolist() == [0.5, 1.5] and result["box"].dtype == np.float32
    assert result["png"] == b"\0png\0"


def test_keys_and_texts_are_preserved() -> None:
    example = {
        "image": np.zeros((2, 2), np.uint8),
        "image/shape": np.array([2, 2]),
        "image/dtype": "uint8",
    }
    result = records.decode_record(records.encode_example(example | {"text": "\ud800"}))
    assert result["image/shape"].tolist() == [2, 2]
    assert result["image/dtype"] == "uint8"
    assert result["text"] == "\ud800"
    assert records.decode_record(records.encode_example({})) == {}
    with pytest.raises(ValueError, match="the key jaxlaunch/arrays describes"):
        records.encode_example({"jaxlaunch/arrays": 1})


def test_file_has_the_records_in_order(tmp_path: Path) -> None:
    path = tmp_path / "a.array_record"
    assert records.write(path, ({"x": np.int32(i)} for i in range(5))) == 5
    data = ArrayRecordDataSource(str(path))
    assert [int(records.decode_record(data[i])["x"]) for i in range(5)] == list(range(5))


def test_unfinished_file_does_not_appear(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        records.write(tmp_path / "a.array_record", iter([{"x": 1}, {"x": object()}]))
    assert list(tmp_path.iterdir()) == []


def test_encoder_is_imported_before_threads_start(tmp_path: Path) -> None:
    records._example_module.cache_clear()

    def drawn() -> Iterator[dict[str, np.int64]]:
        assert records._example_module.cache_info().currsize == 1
        yield {"x": np.int64(1)}

    assert records.write(tmp_path / "a.array_record", drawn()) == 1
