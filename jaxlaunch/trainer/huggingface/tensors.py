"""The tensors of a Hugging Face folder by name, here or in gs:// or s3://, each read when it is sliced.

Of an object in a store, only the rows that are asked for are fetched, by ranges.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import SpecError

INDEX = "model.safetensors.index.json"
KEY = "train.model.init_from"
DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "F64": np.float64}
HEADER = 8  # bytes of the header's length


class Files:
    """The tensors of a folder by name. Raises SpecError when there are none, or a file cannot be read."""

    def __init__(self, folder: str, key: str = KEY) -> None:
        self._key = key
        if remote.is_remote(folder):
            remote.check(key, folder)
            with remote.storage(f"reading {key} = {folder}", SpecError):
                self._places = _places(folder, key)
        else:
            self._places = _places(folder, key)
        self._open: dict[str, Any] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __getitem__(self, name: str) -> Any:
        """The tensor `name`, read when it is sliced. Raises SpecError when its file cannot be read."""
        path = self._places[name]
        try:
            if path not in self._open:
                self._open[path] = _opened(path, self._key)
            return self._open[path].get_slice(name)
        except (OSError, SafetensorError) as error:
            raise SpecError(f"{self._key}: {path} cannot be read: {error}") from None

    def dtype(self, name: str) -> np.dtype[Any]:
        """The dtype of the tensor `name` in its file. Raises SpecError for one that is no float."""
        found = self[name].get_dtype()
        if found not in DTYPES:
            raise SpecError(f"{self._key}: {name} is {found}; {', '.join(DTYPES)} are supported")
        dtype: np.dtype[Any] = np.dtype(DTYPES[found])
        return dtype

    def close(self) -> None:
        """Closes the files: the pages that were read are mapped, and count as this process's memory, until then."""
        self._open = {path: file for path, file in self._open.items() if isinstance(file, Object)}


def _opened(path: str, key: str) -> Any:
    return Object(path, key) if remote.is_remote(path) else safe_open(path, "np")


def _places(folder: str, key: str) -> dict[str, str]:
    """Tensor -> file. Without an index all safetensors files of the folder are opened."""
    where = epath.Path(folder)
    try:
        if (where / INDEX).exists():
            weights = json.loads((where / INDEX).read_text())["weight_map"]
            return {name: str(where / file) for name, file in weights.items()}
        found: dict[str, str] = {}
        for path in sorted(map(str, where.glob("*.safetensors"))):
            found |= dict.fromkeys(_opened(path, key).keys(), path)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise SpecError(f"{key} = {folder} cannot be read: {error}") from None
    if not found:
        raise SpecError(f"{key} = {folder}: there is no folder here with safetensors files in it")
    return found


class Object:
    """A file of safetensors in a store: its header, and parts of its tensors.

    Raises SpecError for a file that is none, or is cut off; StorageError.
    """

    def __init__(self, url: str, key: str = KEY) -> None:
        self._url, self._key = url, key
        with remote.storage(f"reading {url}", SpecError):
            size = int(remote.filesystem(url).size(url))
        self._start = HEADER + (int.from_bytes(self.read(0, HEADER), "little") if size > HEADER else 0)
        try:
            header = json.loads(self.read(HEADER, self._start)) if HEADER < self._start <= size else {}
            self._header = {name: about for name, about in header.items() if name != "__metadata__"}
            end = self._start + max(about["data_offsets"][1] for about in self._header.values())
        except (ValueError, TypeError, LookupError, AttributeError):
            raise SpecError(
                f"{key}: {url} is not a safetensors file: its {size} bytes do not begin with a header"
            ) from None
        if size < end:
            raise SpecError(f"{key}: {url} is cut off: it has {size} bytes of {end}")

    def keys(self) -> list[str]:
        """The names of its tensors."""
        return list(self._header)

    def get_slice(self, name: str) -> Part:
        """The tensor `name`. Raises SpecError where it is not in the file, and for a dtype that is no float."""
        if name not in self._header:
            raise SpecError(f"{self._key}: {name} is not in {self._url}, where {INDEX} says it is")
        about = self._header[name]
        if about["dtype"] not in DTYPES:
            raise SpecError(
                f"{self._key}: {name} in {self._url} is {about['dtype']}; {', '.join(DTYPES)} are supported"
            )
        return Part(self, about["shape"], np.dtype(DTYPES[about["dtype"]]), self._start + about["data_offsets"][0])

    def read(self, start: int, end: int) -> bytes:
        """Its bytes from `start` to `end`. Raises SpecError, StorageError."""
        with remote.storage(f"reading {self._url}", SpecError):
            found: bytes = remote.filesystem(self._url).cat_file(self._url, start=start, end=end)
        return found


class Part:
    """A tensor in a store: a slice of it fetches the rows along its first axis that hold it."""

    def __init__(self, of: Object, shape: list[int], dtype: np.dtype[Any], start: int) -> None:
        self._of, self._shape, self._dtype, self._start = of, shape, dtype, start

    def get_shape(self) -> list[int]:
        """Sizes of its axes."""
        return self._shape

    def get_dtype(self) -> str:
        """Its dtype, as safetensors calls it."""
        return next(name for name, dtype in DTYPES.items() if np.dtype(dtype) == self._dtype)

    def __getitem__(self, where: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        rows = range(*where[0].indices(self._shape[0]))
        each = math.prod(self._shape[1:]) * self._dtype.itemsize
        data = self._of.read(self._start + rows.start * each, self._start + rows.stop * each)
        array = np.frombuffer(data, self._dtype).reshape(len(rows), *self._shape[1:])
        return array[(slice(None), *where[1:])]
