"""Finds what a run would refuse in its files, without JAX: `python -m jaxlaunch.trainer.check`.

`launcher validate` runs this program for weights and data that are on this machine. It reads the
config.json of `model.init_from`, whole tables up to MAX_TABLE_BYTES, and the first row of other
data with fields. It imports no module of the user and writes nothing. The arguments are `model`,
`data` or both; it prints one JSON object.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pydantic

from jaxlaunch import contract
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.errors import TrainerError
from jaxlaunch.trainer.huggingface import folder
from jaxlaunch.trainer.sources import labeled_texts
from jaxlaunch.trainer.sources.images import build, listing
from jaxlaunch.trainer.sources.mixture import report_part
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.sources.tables.files import find_tables
from jaxlaunch.trainer.spec import Images, Mixture, Source, Table, Text, TrainSpec
from jaxlaunch.trainer.spec.data import LABEL_FORMAT
from jaxlaunch.trainer.text import chats, documents, layouts

# Larger tables are not read, because `validate` must not take longer than a few seconds.
MAX_TABLE_BYTES = 64 * 1024**2


def main() -> int:
    """Print the faults of the job in TRAIN_SPEC, and return the exit code."""
    faults: list[str] = []
    # The launcher has validated the job; only the defaults of a user's task are missing.
    with contextlib.suppress(pydantic.ValidationError):
        spec = TrainSpec.model_validate_json(os.environ[contract.TRAIN_SPEC])
        faults += find_faults(spec, sys.argv[1:])
    print(json.dumps({"faults": faults}))
    return contract.DONE


def find_faults(spec: TrainSpec, subjects: list[str]) -> Iterator[str]:
    """Yield the message of each fault in the `model` and the `data` of a job."""
    if "model" in subjects:
        try:
            folder.resolve_spec(spec)
        except TrainerError as error:
            yield str(error)
    if "data" in subjects:
        try:
            _check_data(spec)
        except (TrainerError, OSError) as error:
            yield str(error)


def _check_data(spec: TrainSpec) -> None:
    """Raise DataError for files, columns and fields that the job names and that are missing."""
    data = spec.data
    sources = data.part_sources() if isinstance(data, Mixture) else {"": data}
    for name, source in sources.items():
        with report_part(name) if name else contextlib.nullcontext():
            _check_source(source)
    tables = [source for source in sources.values() if isinstance(source, Table)]
    paths = [path for table in tables for path in find_tables(table.path, "train", "path")[0]]
    if paths and sum(map(files.file_size, paths)) <= MAX_TABLE_BYTES:
        open_source(spec, "train")


def _check_source(source: Source) -> None:
    if isinstance(source, Images):
        _check_image_columns(source)
    elif isinstance(source, Text) and (source.is_prepared or source.is_read_at_start):
        for path in documents.find_files(source.path):
            if documents.file_kind(path) != "text":
                part = documents.split_units([path])[0][0]
                next(_read_rows(part, source), None)


def _read_rows(part: documents.Part, source: Text) -> Iterator[Any]:
    """Yield the rows of a part, after a check of their fields or of their layout."""
    if source.format == "text":
        return documents.read_rows(part, source.field or documents.DEFAULT_FIELD, dict)
    if source.format == LABEL_FORMAT:
        return labeled_texts.read_rows(part, source)
    field = None if source.field == chats.MESSAGES_FIELD else source.field
    columns = layouts.list_columns(source.format, field)
    read_row = partial(layouts.read_row, row_format=source.format, field=field)
    return documents.read_rows(part, field, read_row, columns)


def _check_image_columns(images: Images) -> None:
    """Raise DataError for a column that the first row of a list of images does not have."""
    for path in files.as_list(images.path):
        if path.lower().endswith(listing.LIST_SUFFIXES) and os.path.isfile(path):
            for _, row in itertools.islice(build.read_rows(path), 1):
                build.check_row_columns(images, path, row)


if __name__ == "__main__":
    sys.exit(main())
