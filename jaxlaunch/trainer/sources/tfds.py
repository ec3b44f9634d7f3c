"""A split of a dataset of tensorflow-datasets, read at random without TensorFlow."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import numpy as np

from jaxlaunch import user_cache
from jaxlaunch.trainer.data.source import DataSource
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.prepare import prepared
from jaxlaunch.trainer.spec import Tfds

SAMPLES = 16  # examples that go into the fingerprint


def source(data: Tfds, split: Literal["train", "eval"]) -> Split | None:
    """The dataset's split for training or evaluation, prepared first if need be; None when the job has none.

    Slices work: `train[:90%]`. Raises DataError for an unknown split, and where the data cannot be prepared.
    """
    name = data.split if split == "train" else data.eval_split
    return None if name is None else Split(data.name, name, data.data_dir or str(user_cache.home("tfds")))


class Split(DataSource):
    """The examples as the builder's features decode them: images as uint8 arrays, labels as integers."""

    def __init__(self, dataset: str, split: str, folder: str) -> None:
        self.name = f"tfds {dataset} {split}"
        builder = prepared(dataset, folder)
        self._title = f"tfds {builder.info.full_name} {split}"
        try:
            self._data = builder.as_data_source(split=split)
        except ValueError as error:
            known = ", ".join(sorted(builder.info.splits))
            raise DataError(
                f"{dataset} has no split {split!r}; it has {known}, and slices such as train[:90%]"
            ) from error
        except NotImplementedError as error:
            raise DataError(
                f"{dataset} is stored in {folder} as {builder.info.file_format}, which has no random access; "
                "prepare it with file_format='array_record', or set data.data_dir to another folder"
            ) from error

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        record: dict[str, Any] = self._data[index]
        return record

    def fingerprint(self) -> str:
        """Dataset, version and split, number of examples, and a digest of SAMPLES decoded ones."""
        # Decoded, for the files are not the same everywhere: another version of zlib packs a PNG differently.
        hashed = hashlib.sha256()
        for index in np.linspace(0, len(self) - 1, min(SAMPLES, len(self)), dtype=int):
            _feed(hashed, self[int(index)])
        return f"{self._title}, {len(self)} examples, sha256 {hashed.hexdigest()[:12]}"


def _feed(hashed: Any, value: Any) -> None:
    if isinstance(value, dict):
        for key in sorted(value):
            hashed.update(key.encode())
            _feed(hashed, value[key])
    else:
        array = np.asarray(value)
        hashed.update(f"{array.dtype.kind} {array.shape}".encode())
        hashed.update(repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes())
