"""The record format of array_record files: a dict of arrays as bytes that describe themselves.

    b"JLR1" | length of the header, 4 bytes little-endian | header, JSON | the arrays' bytes, one after another

The header is `[[key, dtype, shape], ...]` in the order of the arrays, which are C-contiguous and little-endian. No
pickle: reading a record runs nothing.

    from trainer.data import records
    records.write("train-0.array_record", ({"image": image_HW, "label": label} for image_HW, label in mine))
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

MAGIC = b"JLR1"
HEADER = struct.Struct("<4sI")


def write(path: str | os.PathLike[str], examples: Iterable[Mapping[str, Any]]) -> int:
    """Writes one array_record file and returns how many records it holds; the file appears when it is whole."""
    from array_record.python import array_record_module

    count = 0
    unfinished = f"{os.fspath(path)}.{os.getpid()}.tmp"
    writer = array_record_module.ArrayRecordWriter(unfinished, "group_size:1")  # one: records are read at random
    try:
        for example in examples:
            writer.write(encode(example))
            count += 1
        writer.close()
        os.replace(unfinished, path)
    except BaseException:
        if writer.is_open():
            writer.close()
        os.unlink(unfinished)
        raise
    return count


def encode(example: Mapping[str, Any]) -> bytes:
    """One record. Raises TypeError for what is not an array of numbers, booleans or fixed-width strings."""
    header, content = [], []
    for key, value in example.items():
        array = np.asarray(value)
        if array.dtype.kind not in "biufcSU":
            raise TypeError(f"{key} is of {array.dtype}; a record holds numbers, booleans and strings")
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(array.shape)
        header.append([key, array.dtype.str, array.shape])
        content.append(array.tobytes())
    described = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([HEADER.pack(MAGIC, len(described)), described, *content])


def decode(record: bytes) -> dict[str, npt.NDArray[Any]]:
    """The arrays of one record, read-only views of it. Raises ValueError when it is not one, or not whole."""
    if len(record) < HEADER.size or record[:4] != MAGIC:
        raise ValueError(f"not a record of trainer.data.records: it begins with {record[:8]!r}, not {MAGIC!r}")
    offset = HEADER.size + HEADER.unpack_from(record)[1]
    arrays = {}
    for key, dtype_name, shape in json.loads(record[HEADER.size : offset]):
        dtype, count = np.dtype(dtype_name), math.prod(shape)
        if offset + count * dtype.itemsize > len(record):
            raise ValueError(f"{key} ends at byte {offset + count * dtype.itemsize}, the record at {len(record)}")
        arrays[key] = np.frombuffer(record, dtype, count, offset).reshape(shape)
        offset += count * dtype.itemsize
    if offset != len(record):
        raise ValueError(f"the arrays end at byte {offset}, the record at {len(record)}")
    return arrays
