"""The safetensors files of a local or remote folder, and their tensors by name.

As in transformers, the weights are in `model.safetensors`, or otherwise in the shards that
`model.safetensors.index.json` lists. All other files in the folder are ignored: shards of an older
save, variants, pickles, the state of an optimizer. The index is only used as a list of shards; the
shards themselves say which tensors they hold. If several shards hold a tensor of the same name,
transformers reads the last one, and here this is an error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterator
from types import EllipsisType
from typing import Any

import jax.numpy as jnp
import numpy as np
from etils import epath
from safetensors import SafetensorError, safe_open

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.huggingface.quantized_tensors import (
    BYTE_DTYPE,
    FP8_DTYPE,
    FP8_SCALE,
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    Fp8Tensor,
    Mxfp4Tensor,
    find_quantized,
)

MODEL_STEM = "model"
INDEX_FILE = f"{MODEL_STEM}.safetensors.index.json"
# If the folder of a model has this file, transformers adds the adapters in it to the weights.
ADAPTER_CONFIG_FILE = "adapter_config.json"
DEFAULT_KEY = "train.model.init_from"
DTYPES: dict[str, Any] = dict(F32=np.float32, F16=np.float16, BF16=jnp.bfloat16, F64=np.float64)
# Dtypes of the parts of quantized tensors.
PART_DTYPES: dict[str, Any] = {FP8_DTYPE: jnp.float8_e4m3fn, BYTE_DTYPE: np.uint8}
# Endings of weight files, for the message about a folder without safetensors.
WEIGHT_ENDINGS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
# The size of the field with the length of the header.
LENGTH_BYTES = 8

Slices = tuple[slice, ...]


class TensorFiles:
    """The tensors of a folder by name.

    Args:
        folder: Folder or URL.
        key: Key of the job that sets the folder, for messages.
        stem: Beginning of the names of the weight files.
        dequantizes: Whether to present tensors in fp8 and MXFP4 as if they were not quantized.

    Raises:
        SpecError: The folder has no weights, a file cannot be read, or two files hold a tensor of
            the same name.
    """

    def __init__(
        self,
        folder: str,
        key: str = DEFAULT_KEY,
        stem: str = MODEL_STEM,
        *,
        dequantizes: bool = False,
    ) -> None:
        self._folder, self._key = folder, key
        self._open: dict[str, Any] = {}
        self._paths: dict[str, str] = {}
        storage: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if remote.is_remote(folder):
            remote.check_url(key, folder)
            storage = remote.convert_errors(f"reading {key} = {folder}", SpecError)
        try:
            with storage:
                for path in self._list_files(stem):
                    self._add_file(path)
        except OSError as error:
            raise SpecError(f"{key} = {folder} cannot be read: {error}") from None
        self._quantized = find_quantized(self._paths.keys() if dequantizes else ())
        self._names = (self._paths.keys() | self._quantized.mxfp4) - self._quantized.parts

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._names))

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def __getitem__(self, name: str) -> Any:
        """Return a lazy tensor, which is read when it is sliced. Raises SpecError."""
        if name in self._quantized.fp8:
            return Fp8Tensor(self._stored_tensor(name), self._stored_tensor(name + FP8_SCALE))
        if name in self._quantized.mxfp4:
            parts = (self._stored_tensor(name + part) for part in (MXFP4_BLOCKS, MXFP4_SCALES))
            return Mxfp4Tensor(*parts)
        return self._stored_tensor(name)

    def _stored_tensor(self, name: str) -> Any:
        path = self._paths[name]
        tensor = self._open_file(path).get_slice(name)
        if tensor.get_dtype() != FP8_DTYPE or remote.is_remote(path):
            return tensor
        # NumPy has no such dtype, so that safetensors cannot read it.
        return TensorFile(path, self._key).get_slice(name)

    def tensor_dtype(self, name: str) -> np.dtype[Any]:
        """Return the stored dtype of a tensor that `is_supported`."""
        dtype: np.dtype[Any] = np.dtype(DTYPES[self[name].get_dtype()])
        return dtype

    def is_supported(self, name: str) -> bool:
        """Return whether a tensor has a dtype that can be read: floats of 16 bits or more."""
        return self[name].get_dtype() in DTYPES

    def close(self) -> None:
        """Close the local files, because their mapped pages count as memory of this process."""
        for path in [path for path in self._open if not remote.is_remote(path)]:
            del self._open[path]

    def _open_file(self, path: str) -> Any:
        if path in self._open:
            return self._open[path]
        try:
            is_remote = remote.is_remote(path)
            self._open[path] = TensorFile(path, self._key) if is_remote else safe_open(path, "np")
        except (OSError, SafetensorError) as error:
            raise SpecError(f"{self._key}: {path} cannot be read: {error}") from None
        return self._open[path]

    def _add_file(self, path: str) -> None:
        names = self._open_file(path).keys()
        for name in names:
            if (other := self._paths.setdefault(name, path)) != path:
                raise SpecError(
                    f"{self._key} = {self._folder}: {other} and {path} both hold {name}; save the "
                    "model again into an empty folder, or keep the shards of one save"
                )

    def _list_files(self, stem: str) -> list[str]:
        """Return the paths of the files with the weights."""
        root = epath.Path(self._folder)
        if stem == MODEL_STEM and (root / ADAPTER_CONFIG_FILE).exists():
            raise SpecError(
                f"{self._key} = {self._folder} holds a model and {ADAPTER_CONFIG_FILE}: "
                "transformers adds these adapters to its weights, and here they are read only as "
                "train.lora.init_from; move the adapters to a folder of their own"
            )
        single, index = root / f"{stem}.safetensors", root / f"{stem}.safetensors.index.json"
        if single.is_file():
            return [str(single)]
        if not index.is_file():
            raise SpecError(self._missing_message(root, single.name, index.name))
        text = index.read_bytes()
        try:
            content = json.loads(text)
        except ValueError as error:
            raise SpecError(f"{self._key}: {index} cannot be read: {error}") from None
        shards = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(shards, dict) or {*map(type, shards.values())} != {str}:
            raise SpecError(f"{self._key}: {index} has no weight_map from tensors to files")
        paths = [root / name for name in sorted(set(shards.values()))]
        if missing := [path.name for path in paths if not path.exists()]:
            raise SpecError(
                f"{self._key} = {self._folder} is incomplete: the folder lacks "
                f"{', '.join(missing[:3])} of {index.name}; copy the missing files"
            )
        return [str(path) for path in paths]

    def _missing_message(self, root: epath.Path, single: str, index: str) -> str:
        other_files: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            files = sorted(path.name for path in root.iterdir())
            other_files = [name for name in files if name.endswith(WEIGHT_ENDINGS)]
        message = (
            f"{self._key} = {self._folder} is not a folder of weights: it has neither {single} nor "
            f"{index}, one of which transformers reads"
        )
        if not other_files:
            return message
        return (
            f"{message}; it has {', '.join(other_files[:5])}. Save the model with save_pretrained "
            "of transformers, which gives the files these names"
        )


class TensorFile:
    """A safetensors file, also in an object store, with the interface of `safe_open`.

    Raises SpecError for an invalid or truncated file, and StorageError.
    """

    def __init__(self, url: str, key: str = DEFAULT_KEY) -> None:
        self._url, self._key = url, key
        with remote.convert_errors(f"reading {url}", SpecError):
            is_remote = remote.is_remote(url)
            size = int(remote.open_filesystem(url).size(url)) if is_remote else os.stat(url).st_size
        self._start = LENGTH_BYTES
        if size > LENGTH_BYTES:
            self._start += int.from_bytes(self.read_range(0, LENGTH_BYTES), "little")
        try:
            is_complete = LENGTH_BYTES < self._start <= size
            header = json.loads(self.read_range(LENGTH_BYTES, self._start)) if is_complete else {}
            self._header = {name: entry for name, entry in header.items() if name != "__metadata__"}
            offsets = sorted(entry["data_offsets"] for entry in self._header.values())
            ends = [end for _, end in offsets]
            if [start for start, _ in offsets] != [0, *ends[:-1]]:
                raise ValueError("the tensors do not follow each other, as safetensors requires")
            end = self._start + ends[-1]
        except (ValueError, TypeError, LookupError, AttributeError):
            raise SpecError(
                f"{key}: {url} is not a safetensors file: its {size} bytes do not begin "
                "with a header"
            ) from None
        if size != end:
            raise SpecError(f"{key}: {url} is cut off or damaged: it has {size} bytes of {end}")

    def keys(self) -> list[str]:
        """Return the names of the tensors."""
        return list(self._header)

    def get_slice(self, name: str) -> RemoteTensor:
        """Return a lazy tensor, whose dtype may not be supported."""
        entry = self._header[name]
        start = self._start + entry["data_offsets"][0]
        return RemoteTensor(self, entry["shape"], entry["dtype"], start)

    def read_range(self, start: int, end: int) -> bytes:
        """Read the bytes `start` to `end - 1`. Raises SpecError, StorageError."""
        if not remote.is_remote(self._url):
            with open(self._url, "rb") as file:
                file.seek(start)
                return file.read(end - start)
        with remote.convert_errors(f"reading {self._url}", SpecError):
            return remote.read_range(self._url, start, end)


@dataclasses.dataclass(frozen=True)
class RemoteTensor:
    """A lazy tensor in an object store. Slicing fetches the rows along the first axis.

    Attributes:
        file: The file of the tensor.
        shape: Shape of the tensor.
        dtype: Name of the dtype in safetensors.
        start: Offset in the file, in bytes.
    """

    file: TensorFile
    shape: list[int]
    dtype: str
    start: int

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return self.shape

    def get_dtype(self) -> str:
        """Return the name of the dtype in safetensors."""
        return self.dtype

    def __getitem__(self, slices: Slices | EllipsisType) -> np.ndarray[Any, Any]:
        slices = (slice(None),) * len(self.shape) if slices is Ellipsis else slices
        dtype = np.dtype((DTYPES | PART_DTYPES)[self.dtype])
        if not self.shape:
            data = self.file.read_range(self.start, self.start + dtype.itemsize)
            scalar: np.ndarray[Any, Any] = np.frombuffer(data, dtype).reshape(())
            return scalar
        rows = range(*slices[0].indices(self.shape[0]))
        row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
        start, end = (self.start + row * row_bytes for row in (rows.start, rows.stop))
        data = self.file.read_range(start, end)
        array: np.ndarray[Any, Any] = np.frombuffer(data, dtype).reshape(len(rows), *self.shape[1:])
        return array[(slice(None), *slices[1:])]
