"""Encodes arrays by name as records of array_record files, without TensorFlow.

A record is a tf.train.Example. Strings are stored in a bytes_list, a single integer or boolean in
an int64_list, and a single float32 in a float_list. Any other array is one entry of a bytes_list:
its bytes, C-contiguous and little-endian, as `tf.io.decode_raw` reads them. The feature
`jaxlaunch/arrays` has the dtype and shape of each array as JSON, {key: [dtype, shape]}, with the
dtype in NumPy's notation (`<f4`). The records of other writers do not have this feature.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxlaunch import atomic_file

# Strings of numpy may contain lone surrogates.
SURROGATE_ERRORS = "surrogatepass"
# The feature with the dtype and shape of each array.
ARRAYS_FEATURE = "jaxlaunch/arrays"


def write(path: str | os.PathLike[str], examples: Iterable[Mapping[str, Any]]) -> int:
    """Write an array_record file for `data.source: array_record`; it appears when it is complete.

    **Arguments:**

    - `path`: path of the file, such as `train-0.array_record`.
    - `examples`: dicts of arrays by name, of any shape: numbers, booleans and fixed-width strings.

    **Returns:**

    The number of examples in the file.

    **Raises:**

    `TypeError` for other values, `ValueError` for the reserved name `jaxlaunch/arrays`.

    **Example:**

    ```python
    import jaxlaunch
    import numpy as np

    examples = [
        {"image": np.full((8, 8), label, np.uint8), "label": np.int32(label)} for label in range(10)
    ]
    assert jaxlaunch.write_records("train-0.array_record", examples) == 10
    ```
    """
    from array_record.python import array_record_module

    # Import before the examples are drawn, because threads may decode images while they are drawn.
    _example_module()
    count = 0
    with atomic_file.open_draft(Path(path)) as draft:
        # Each group has one record, because records are read at random.
        writer = array_record_module.ArrayRecordWriter(str(draft), "group_size:1")
        try:
            for example in examples:
                writer.write(encode_example(example))
                count += 1
        finally:
            writer.close()
    return count


@functools.cache
def _example_module() -> Any:
    """Import the module of tf.train.Example.

    The package of this module replaces `builtins.__import__` while it is imported, by a function
    that rejects relative imports. If a thread decoded an image at that time, Pillow's own imports
    would raise ValueError.
    """
    from tensorflow_datasets.proto import tf_example_pb2

    return tf_example_pb2


def encode_example(example: Mapping[str, Any]) -> bytes:
    """Return one record, a serialized tf.train.Example. Raises TypeError, ValueError."""
    record = _example_module().Example()
    features = record.features.feature
    if ARRAYS_FEATURE in example:
        problem = "describes the other keys of a record; rename it"
        raise ValueError(f"the key {ARRAYS_FEATURE} {problem}")
    array_specs = {}
    for key, value in example.items():
        array = np.asarray(value)
        kind, is_scalar, feature = array.dtype.kind, array.ndim == 0, features[key]
        if kind not in "biufcSU":
            rule = "a record holds numbers, booleans and strings"
            raise TypeError(f"{key} is of {array.dtype}; {rule}")
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
        if kind in "SU":
            texts = array.ravel().tolist()
            if kind == "U":
                texts = [text.encode(errors=SURROGATE_ERRORS) for text in texts]
            feature.bytes_list.value.extend(texts)
        elif is_scalar and (kind in "bi" or (kind == "u" and array.itemsize < 8)):
            feature.int64_list.value.append(int(array))
        elif is_scalar and array.dtype == np.float32:
            feature.float_list.value.append(float(array))
        else:
            feature.bytes_list.value.append(array.tobytes())
        array_specs[key] = [array.dtype.str, array.shape]
    features[ARRAYS_FEATURE].bytes_list.value.append(json.dumps(array_specs).encode())
    return bytes(record.SerializeToString(deterministic=True))


def decode_record(record: bytes) -> dict[str, Any]:
    """Return the values of one record by key, as arrays of their original shapes and dtypes.

    In a record of another writer, numbers are int64 or float32, and strings are bytes. A feature
    with one value becomes a scalar, and a feature with several becomes a vector, or a list of
    bytes. Raises ValueError if the record is not a tf.train.Example, or is truncated.
    """
    try:
        features = _example_module().Example.FromString(record).features.feature
    except Exception as error:
        # This is protobuf's DecodeError.
        raise ValueError(f"not a tf.train.Example, or not complete: {error}") from None
    if not features:
        raise ValueError("not a tf.train.Example: it has no features")
    if ARRAYS_FEATURE in features:
        specs = _parse_specs(features[ARRAYS_FEATURE].bytes_list.value[0])
        return {key: _decode_array(key, features[key], dtype, shape) for key, dtype, shape in specs}
    example: dict[str, Any] = {}
    for key, feature in features.items():
        values = _feature_values(feature)
        value = values[0] if len(values) == 1 else values
        dtype = {"int64_list": np.int64, "float_list": np.float32}.get(feature.WhichOneof("kind"))
        example[key] = value if dtype is None else np.array(value, dtype)
    return example


# Most records have the same arrays, and parsing the JSON takes longer than reading the arrays.
@functools.lru_cache(maxsize=4096)
def _parse_specs(text: bytes) -> tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]:
    specs = json.loads(text).items()
    return tuple((key, np.dtype(dtype), tuple(shape)) for key, (dtype, shape) in specs)


def _decode_array(
    key: str, feature: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Return the array of a feature, read-only if it is a view of the record's bytes."""
    if dtype.kind in "SU":
        texts = list(feature.bytes_list.value)
        if dtype.kind == "U":
            texts = [text.decode(errors=SURROGATE_ERRORS) for text in texts]
        array = np.array(texts, dtype)
    elif feature.WhichOneof("kind") == "bytes_list":
        array = np.frombuffer(feature.bytes_list.value[0], dtype)
    else:
        array = np.array(_feature_values(feature), dtype)
    if array.size != math.prod(shape):
        raise ValueError(f"{key} holds {array.size} values, but its shape is {list(shape)}")
    return array.reshape(shape)


def _feature_values(feature: Any) -> list[Any]:
    kind = feature.WhichOneof("kind")
    return [] if kind is None else list(getattr(feature, kind).value)
