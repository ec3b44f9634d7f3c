"""Values that travel between processes as JSON and NumPy arrays, and never as pickles.

A file is a zip archive: `value.json` has the value, with dicts as {"fields": …} and arrays as
{"array": N}, and `N.npy` has an array. A user who can write the file can choose the value, but can
run no code in its reader.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TREE = "value.json"
# Kinds of NumPy's types that .npy describes: bool, whole, unsigned, real and complex numbers.
_ARRAY_KINDS = "biufc"


def write_value(path: Path, value: Any) -> None:
    """Write a value. The file is complete as soon as it has its name.

    Raises:
        TypeError: If a part of the value is neither JSON nor an array of numbers.
    """
    arrays = list[Any]()
    tree = _encode_value(value, arrays)
    draft = path.with_suffix(f".draft-{os.getpid()}")
    with zipfile.ZipFile(draft, "w") as archive:
        archive.writestr(_TREE, json.dumps(tree))
        for index, array in enumerate(arrays):
            import numpy as np

            with archive.open(f"{index}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, array, allow_pickle=False)
    draft.replace(path)


def read_value(path: Path) -> Any:
    """Return the value that `write_value` wrote, with lists in place of tuples."""
    with zipfile.ZipFile(path) as archive:
        return _decode_value(json.loads(archive.read(_TREE)), archive)


def _encode_value(value: Any, arrays: list[Any]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_encode_value(item, arrays) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"fields": {key: _encode_value(item, arrays) for key, item in value.items()}}
    # The import is cheap, because the program that has an array has imported NumPy.
    if hasattr(value, "dtype") and hasattr(value, "__array__"):
        import numpy as np

        array = np.asarray(value)
        if array.dtype.kind not in _ARRAY_KINDS:
            raise TypeError(f"an array of {array.dtype} cannot be passed on: convert it to float32")
        arrays.append(array)
        return {"array": len(arrays) - 1}
    kinds = "None, numbers, texts, lists, dicts with texts as keys, and arrays"
    raise TypeError(f"a value of type {type(value).__name__} cannot be passed on: only {kinds} can")


def _decode_value(tree: Any, archive: zipfile.ZipFile) -> Any:
    if isinstance(tree, list):
        return [_decode_value(item, archive) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if "fields" in tree:
        return {key: _decode_value(item, archive) for key, item in tree["fields"].items()}
    import numpy as np

    with archive.open(f"{tree['array']}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)
