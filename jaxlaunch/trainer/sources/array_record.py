"""Sources of array_record files, whose records are tf.train.Examples (trainer/data/records)."""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import os
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from array_record.python import array_record_module
from array_record.python.array_record_data_source import ArrayRecordDataSource

from jaxlaunch.trainer.buckets import faults, remote
from jaxlaunch.trainer.data import files, records
from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.data.order import hash_uint64
from jaxlaunch.trainer.data.source import DataSource, DerivedSource, Split
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.spec import ArrayRecord, TrainSpec

# Read one record in the calling thread: handing it to array_record's own threads takes longer than
# reading it.
READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
# Buffer size of one file; array_record's own default is 1 MiB.
READ_BYTES = 1 << 15
# `launcher prepare` writes this file, with metadata, next to the files that it packs.
NOTES_FILE = "jaxlaunch.json"
# A process may often open only 1,024 files. With more files than this, each has one reader.
MAX_OPEN_FILES = 256


def open_source(
    data: ArrayRecord, split: Split, spec: TrainSpec | None = None
) -> DataSource | None:
    """Open the files of `split`, or its records in files that contain both splits."""
    source = _open_records(data, split)
    if source is None or not data.changes_images:
        return source
    # This imports Pillow, which text does not need.
    from jaxlaunch.trainer.data.augment import transform_images

    return transform_images(source, data, split)


def _open_records(data: ArrayRecord, split: Split) -> DataSource | None:
    if split == "eval" and data.eval_path is not None:
        return Records(files.match_files(data.eval_path, "eval_path"))
    if data.eval_path is not None or not data.eval_split:
        return Records(files.match_files(data.path)) if split == "train" else None
    all_records = Records(files.match_files(data.path))
    key_N = all_records.identify_records(
        splits.name_files(files.as_list(data.path), all_records.paths)
    )
    is_held_out_N = splits.choose_held_out(key_N, data.eval_split, data.split_seed)
    splits.check_both_splits(is_held_out_N, data.eval_split, "records")
    part = splits.split_part(is_held_out_N, split, share=data.eval_split, seed=data.split_seed)
    return _RecordSplit(all_records, part)


class Records(DataSource):
    """All records of the files, in order."""

    def __init__(self, paths: list[str]) -> None:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        self.name, self.paths = f"array_record {paths[0]}{more}", paths
        max_idle = max(1, MAX_OPEN_FILES // len(paths))
        self._files = [RecordFile(path, max_idle) for path in paths]
        self._ends = list(itertools.accumulate(file.count for file in self._files))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        file_index = bisect.bisect_right(self._ends, index)
        record_index = index - (self._ends[file_index - 1] if file_index else 0)
        try:
            return records.decode_record(self._files[file_index].read_record(record_index))
        except Exception as error:
            # array_record raises the exceptions of its C++ code, RuntimeError or IndexError.
            location = f"example {index}, record {record_index} of {self.paths[file_index]}"
            raise faults.error_class(error)(f"{location}, cannot be read: {error}") from error

    def identify_records(self, names: Sequence[str]) -> splits.Keys:
        """Return the hash of each record's file name and position. `names` are those of the files.

        Hashes of the contents would require reading all files at every start.
        """
        keys = [np.zeros(0, np.uint64)]
        for name, file in zip(names, self._files, strict=True):
            numbers = np.arange(file.count, dtype=np.uint64)
            keys.append(hash_uint64(numbers ^ np.uint64(splits.hash_text(name)), splits.GOLDEN))
        return np.concatenate(keys)

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata that `launcher prepare` stored, such as class names; empty for other files."""
        return read_notes(tuple(self.paths))

    def fingerprint(self) -> str:
        """Return the number of records and files, and a digest of the files."""
        digest = files.sample_digest(self.paths)
        return f"array_record, {len(self)} records in {len(self.paths)} files, sha256 {digest}"


class _RecordSplit(DerivedSource):
    """The records of a split of files that contain both."""

    def __init__(self, whole: Records, part: splits.SplitPart) -> None:
        super().__init__(whole)
        self._part, self.name = part, f"{whole.name}, {part.label}"

    def __len__(self) -> int:
        return len(self._part.index_K)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._source[self._part.whole_index(index)]

    def fingerprint(self) -> str:
        """Return the fingerprint of the files and the label of the split."""
        return f"{self._source.fingerprint()}, {self._part.label}"


def read_notes(paths: tuple[str, ...]) -> dict[str, Any]:
    """Read the metadata of these files, or return {} if there is none. Raises DataError."""
    folder, first_name = os.path.split(paths[0])
    path = os.path.join(folder, NOTES_FILE)
    names = remote.list_entries(folder) if remote.is_remote(path) else os.listdir(folder or ".")
    if NOTES_FILE not in names:
        return {}
    try:
        notes = _parse_notes(files.mark_file(path))
        return dict(notes) if first_name in notes["files"] else {}
    except (ValueError, TypeError, KeyError) as error:
        hint = "remove it, or the folder, and pack it again"
        raise DataError(f"{path} is damaged: {error}; {hint}") from None


@functools.lru_cache(maxsize=8)
def _parse_notes(mark: tuple[Any, ...]) -> Any:
    """Parse the metadata file of `mark`, and cache the result until the file changes."""
    path = mark[0]
    return json.loads(files.read_bytes(path, 0, files.file_size(path)))


class RecordFile:
    """An array_record file with up to `max_idle` idle readers. Raises DataError for other files."""

    def __init__(self, path: str, max_idle: int) -> None:
        self._path = files.local_path(path)
        try:
            self.count = len(ArrayRecordDataSource(self._path))
        except Exception as error:
            # The C++ code raises RuntimeError, also for a truncated file. Its message for a file
            # that is too small only has the size, which does not help.
            reason = str(error).partition(";")[0]
            detail = "" if "64KB" in reason else f" ({reason})"
            raise DataError(
                f"{path} is not an array_record file, or is truncated{detail}; data.source = "
                "array_record reads only such files"
            ) from error
        # Readers that no thread uses. Each has an open file and its own position in it.
        self._idle: deque[Any] = deque(maxlen=max_idle)

    def read_record(self, number: int) -> bytes:
        """Read a record. Raises RuntimeError or IndexError from array_record."""
        try:
            reader = self._idle.pop()
        except IndexError:
            reader = array_record_module.ArrayRecordReader(
                self._path, options=READER_OPTIONS, file_reader_buffer_size=READ_BYTES
            )
        reader.seek(number)
        record: bytes = reader.read()
        # A reader that failed would fail again, so only a reader that succeeded is reused.
        self._idle.append(reader)
        return record
