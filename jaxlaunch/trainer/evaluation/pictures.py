"""The images of files, each as what reads its bytes: whole files, members of tars, rows of Parquet and Arrow."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import held, index, listing
from jaxlaunch.trainer.sources.images.index import shown
from jaxlaunch.trainer.sources.images.picture import ENDINGS


class Item(NamedTuple):
    """An image that is not read yet; `name` is the file, and what in it the image is called."""

    name: str
    read: Callable[[], bytes]


def items(path: str) -> Iterator[Item]:
    """The images of a file. Raises DataError where it is damaged or holds none, OSError and StorageError."""
    kind = listing.kind_of(path)
    if kind not in ("tar", "table"):
        yield Item(shown(path), partial(index.whole, path))
        return
    count = 0
    for each in _of_tar(path) if kind == "tar" else _of_table(path):
        count += 1
        yield each
    if not count:
        raise DataError(f"{shown(path)} holds no image")


def _of_tar(path: str) -> Iterator[Item]:
    size = files.file_size(path)
    with held.opened_tar(path) as tar:
        for each in tar:
            name = os.path.basename(each.name)
            if each.isreg() and not name.startswith(".") and name.lower().endswith(ENDINGS):
                if each.offset_data + each.size > size:
                    raise DataError(f"{shown(path)} is truncated: it ends within {shown(each.name)}")
                read = partial(files.read_bytes, path, each.offset_data, each.size)
                yield Item(f"{shown(path)}, {shown(each.name)}", read)


def _of_table(path: str) -> Iterator[Item]:
    """The rows of the column that holds images; a row without one is empty bytes, which are no image."""
    import pyarrow

    from jaxlaunch.trainer.sources.images import columns

    here = files.local_path(path)
    try:
        row = 0
        for batch in _batches(path, here, columns.image_of):
            column = batch.column(0)
            if pyarrow.types.is_struct(column.type):
                at = column.type.get_field_index("bytes")
                column = column.flatten()[at]
            for value in column:
                row += 1
                yield Item(f"{shown(path)}, row {row}", partial(bytes, value.as_py() or b""))
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the file system's
            raise
        raise DataError(f"{shown(path)} is truncated or damaged: {error}") from None


def _batches(path: str, here: str, image_of: Callable[[str | None, str, Any], str]) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    if path.lower().endswith(".parquet"):
        file = parquet.ParquetFile(here)
        yield from file.iter_batches(ROWS, columns=[image_of(None, path, file.schema_arrow)])
        return
    schema, batches = files.arrow_batches(pyarrow.memory_map(here))
    name = image_of(None, path, schema)
    yield from (batch.select([name]) for batch in batches)


ROWS = 256  # of a Parquet file that are in memory at once
