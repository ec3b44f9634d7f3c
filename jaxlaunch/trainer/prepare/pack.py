"""Packs images or a table for `launcher prepare`: `python -m jaxlaunch.trainer.prepare.pack JSON`.

It reads TRAIN_SPEC and prints one JSON object with a description of the packed data and the data
block that reads it. It exits with a code of the contract: SIGINT and SIGTERM end it with 80, and
the next run resumes. Examples are written to array_record files, which appear when they are
complete, so that a run that was killed and started again writes the same bytes. The file
`jaxlaunch.json` next to them has the classes, or the columns of a table with their means and
deviations.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from jaxlaunch import atomic_file
from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.data import records
from jaxlaunch.trainer.data.augment import ArrayImage
from jaxlaunch.trainer.data.source import SPLITS, DataSource, DerivedSource, Split, source_name
from jaxlaunch.trainer.errors import DataError, SpecError, Stopped, StorageError
from jaxlaunch.trainer.sources.array_record import NOTES_FILE
from jaxlaunch.trainer.sources.images.source import ImageSource
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.sources.tables.source import Rows
from jaxlaunch.trainer.spec import ImageData, TrainSpec
from jaxlaunch.trainer.start.process import print_result, read_spec
from jaxlaunch.trainer.text import build, shards

# This file exists until everything is written, and contains the recipe.
IN_PROGRESS_FILE = "jaxlaunch.making"
# Minimum size of the arrays in a file.
MIN_SHARD_BYTES = 16 << 20
# Maximum number of files of a split, because a reader keeps all of them open.
MAX_SHARDS = 256
# Interval between two lines of progress.
PROGRESS_INTERVAL_S = 2.0
StopCheck = Callable[[], bool]


def pack_data(
    spec: TrainSpec, folder: Path, resize: int | None = None, is_stopped: StopCheck = lambda: False
) -> Any:
    """Pack both splits of `spec.data` into `folder` and return the content of NOTES_FILE.

    `resize` is the maximum length of the shorter side of an image. Existing files are kept and
    verified by their digests. Raises DataError, SpecError, Stopped once `is_stopped`, and
    StorageError.
    """
    sources = _open_sources(spec, resize)
    recipe = {
        "data": {split: source.fingerprint() for split, source in sources.items()},
        "resize": resize,
        **_describe_source(spec, sources["train"]),
    }
    try:
        with _lock_folder(folder, recipe) as should_write:
            if should_write:
                files: dict[str, Any] = {}
                for split, source in sources.items():
                    files |= _write_shards(folder, split, source, is_stopped)
                shards.write_json(folder / NOTES_FILE, recipe | {"files": files})
        description: dict[str, Any] = json.loads((folder / NOTES_FILE).read_text())
        for name, entry in description["files"].items():
            path = folder / name
            if not path.exists() or shards.file_digest(path) != entry["sha256"]:
                hint = f"remove {folder}, and run the command again"
                raise DataError(f"{path} is missing or damaged; {hint}")
        return description
    except (OSError, RuntimeError) as error:
        # array_record raises a RuntimeError if the disk is full.
        raise StorageError(
            f"{folder} cannot be written: {error}; make room or name another folder: what is "
            "complete is kept, and the same command resumes from there"
        ) from error


def _open_sources(spec: TrainSpec, resize: int | None) -> dict[Split, DataSource]:
    """Open the sources by split, with images in their original sizes and without augmentation."""
    is_images, setting = isinstance(spec.data, ImageData), f"train.data.source = {spec.data.source}"
    if not spec.data.is_packable:
        raise SpecError(f"{setting} is not packed; images and table are")
    if not is_images and resize is not None:
        problem = f"--resize applies to images, and {setting} has none"
        raise SpecError(f"{problem}; leave it out")
    original_size = {"size": None, "augment": None} if is_images else {}
    unchanged = spec.model_copy(update={"data": spec.data.model_copy(update=original_size)})
    sources: dict[Split, DataSource] = {}
    for split in SPLITS:
        if (source := open_source(unchanged, split)) is not None:
            sources[split] = source if resize is None else _ReducedImages(source, resize)
    return sources


class _ReducedImages(DerivedSource):
    """Images whose shorter side is reduced to at most `side` pixels."""

    def __init__(self, source: DataSource, side: int) -> None:
        super().__init__(source)
        self._side = side

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self._source[index]
        image = ArrayImage(example["image"])
        shorter_side = min(image.size)
        if shorter_side <= self._side:
            return example
        height, width = (max(1, round(length * self._side / shorter_side)) for length in image.size)
        return {**example, "image": image.read_pixels(None, (height, width))}


def _describe_source(spec: TrainSpec, source: DataSource) -> dict[str, Any]:
    inner = source._source if isinstance(source, _ReducedImages) else source
    if isinstance(inner, Rows):
        return {"kind": "table", "target": spec.loss.target, **inner.encoding}
    assert isinstance(inner, ImageSource), "_open_sources opens tables and images only"
    return {"kind": "images", "target": "class", "classes": list(inner.index.classes)}


@contextlib.contextmanager
def _lock_folder(folder: Path, recipe: Mapping[str, Any]) -> Iterator[bool]:
    """Lock the folder and yield whether to write. Raises DataError if it has other content."""
    folder.mkdir(parents=True, exist_ok=True)
    _check_recipe(folder, NOTES_FILE, recipe)
    if (folder / NOTES_FILE).exists():
        # A process that was killed at the end may have left this file.
        (folder / IN_PROGRESS_FILE).unlink(missing_ok=True)
        yield False
        return
    unknown_files = sorted(path.name for path in folder.iterdir())
    if unknown_files and not (folder / IN_PROGRESS_FILE).exists():
        raise DataError(
            f"{folder} holds {unknown_files[0]}, which `launcher prepare` did not write there; use "
            "an empty folder"
        )
    with (folder / IN_PROGRESS_FILE).open("a+") as file:
        # A file system without locks is safe, because drafts have unique names.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        _check_recipe(folder, IN_PROGRESS_FILE, recipe)
        if should_write := not (folder / NOTES_FILE).exists():
            file.truncate(0)
            json.dump(recipe, file)
            file.flush()
            for draft in folder.glob(f"*{atomic_file.DRAFT_SUFFIX}"):
                draft.unlink(missing_ok=True)
        yield should_write
        (folder / IN_PROGRESS_FILE).unlink(missing_ok=True)


def _check_recipe(folder: Path, name: str, recipe: Mapping[str, Any]) -> None:
    try:
        existing = json.loads((folder / name).read_text())
    except (OSError, ValueError):
        # The file is missing, or truncated because its writer was killed.
        return
    for key, value in recipe.items():
        old_value = json.dumps(existing.get(key), sort_keys=True)
        new_value = json.dumps(value, sort_keys=True)
        if old_value != new_value:
            raise DataError(
                f"{folder} holds records with {key} = {old_value[:200]}, and now it is "
                f"{new_value[:200]}; name another folder, or remove it"
            )


def _write_shards(
    folder: Path, split: str, source: DataSource, is_stopped: StopCheck
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Write the missing files of a split, and yield the name and the description of each file."""
    size = len(source) * sum(np.asarray(array).nbytes for array in source[0].values())
    count = min(max(1, -(-size // MIN_SHARD_BYTES)), MAX_SHARDS, len(source))
    reported_at = time.monotonic()
    for shard in range(count):
        first, last = (len(source) * number // count for number in (shard, shard + 1))
        path = folder / f"{split}-{shard:05}-of-{count:05}.array_record"
        if not path.exists():
            records.write(path, _read_examples(source, range(first, last), is_stopped, folder))
        if time.monotonic() - reported_at >= PROGRESS_INTERVAL_S:
            reported_at = time.monotonic()
            message = f"packed {last} of {len(source)} examples of {split}"
            print(message, file=sys.stderr, flush=True)
        size_bytes, digest = path.stat().st_size, shards.file_digest(path)
        entry = {"split": split, "rows": last - first, "size": size_bytes, "sha256": digest}
        yield path.name, entry


def _read_examples(
    source: DataSource, indexes: range, is_stopped: StopCheck, folder: Path
) -> Iterator[dict[str, Any]]:
    threads = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(threads) as pool:
        # Only a few examples are read ahead, because decoded images are large.
        reads = (pool.submit(source.__getitem__, index) for index in indexes)
        pending = collections.deque(itertools.islice(reads, 2 * threads))
        while pending:
            if is_stopped():
                for future in pending:
                    future.cancel()
                raise Stopped(
                    f"stopped while {folder} was written; what is complete is kept, and the same "
                    "command resumes"
                )
            try:
                example = pending.popleft().result()
            except OSError as error:
                subject = f"an example of {source_name(source)} cannot be read"
                raise faults.read_error(subject, error) from error
            yield example
            pending.extend(itertools.islice(reads, 1))


def main() -> int:
    """Pack the data of TRAIN_SPEC, print a report as JSON, and return the exit code."""
    is_stopped = build.follow_parent()
    arguments: dict[str, Any] = json.loads(sys.argv[1])

    def pack() -> dict[str, Any]:
        spec = read_spec(os.environ)[0]
        folder = arguments["to"]
        description = pack_data(spec, Path(folder), arguments["resize"], is_stopped)
        block = {"source": "array_record", "path": f"{folder}/train-*.array_record"}
        if any(entry["split"] == "eval" for entry in description["files"].values()):
            block["eval_path"] = f"{folder}/eval-*.array_record"
        data_block = spec.data.model_dump(mode="json", exclude_unset=True)
        block |= {key: data_block[key] for key in ("size", "augment") if key in data_block}
        return {**description, "data": block}

    return print_result(pack)


if __name__ == "__main__":
    sys.exit(main())
