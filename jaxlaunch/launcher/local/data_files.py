"""What can be said of a job's data where its file is checked, from names and sizes alone. Reads no content."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.wording import count, size
from jaxlaunch.trainer.spec import ArrayRecord, Images, Mixture, Table, Text, Tfds

ROWS = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".gz", ".zst")  # files of many documents
LARGE = 1 << 20  # bytes of plain text that is several documents
MOST_FILES = 100_000  # of a folder of images that are counted
Block = Text | ArrayRecord | Images | Table


def notes(job: JobSpec, folder: Path) -> Iterator[str]:
    """A sentence about each set of files that is named relative to the job's folder, or absolute and on no volume."""
    data = None if job.train is None else job.train.data
    if isinstance(data, Text | ArrayRecord):
        yield from _of_block(job, "train.data", data, folder)
    elif isinstance(data, Mixture):
        total = sum(part.weight for part in data.parts.values())
        for name, block in data.blocks().items():
            weight = data.parts[name].weight
            share = f"{100 * weight / total:.4g} % of the examples" if weight else "only evaluated"
            if isinstance(block, Tfds):
                yield f"train.data.parts.{name}: {block.name}, {share}."
            else:
                yield from _of_block(job, f"train.data.parts.{name}", block, folder, f"; {share}")
    if isinstance(data, Text | Mixture) and data.tokenizer != "bytes" and _is_here(job, data.tokenizer):
        if not (folder / data.tokenizer).exists():
            yield f"train.data.tokenizer = {data.tokenizer} does not exist here, in {folder}."


def _of_block(job: JobSpec, where: str, block: Block, folder: Path, share: str = "") -> Iterator[str]:
    for key in ("path", "eval_path"):
        given = getattr(block, key)
        patterns = [given] if isinstance(given, str) else given or []
        share = share if key == "path" else ""
        if not patterns or not all(_is_here(job, each) for each in patterns):
            if share:
                yield f"{where}.{key}: {' '.join(patterns)}{share}."
            continue
        is_deep = isinstance(block, Images | Table)
        found = {path: os.path.getsize(path) for each in patterns for path in _files(folder / each, is_deep)}
        more = " or more" if len(found) >= MOST_FILES else ""
        said = f"{where}.{key}: {count(len(found), 'file')}{more} here, {size(sum(found.values()))}{share}"
        if not found:
            yield f"{where}.{key}: {' '.join(patterns)} matches no file here, in {folder}."
        elif not any(found.values()):
            yield f"{said}: every file that matches is empty."
        elif key == "path" and block.eval_path is None and len(found) == 1 and _is_cut(block, *found.items()):
            yield f"{said}; its end is held out, by eval_split = {block.eval_split}."
        else:
            yield f"{said}."


def _is_here(job: JobSpec, path: str) -> bool:
    mounts = [PurePosixPath(volume.path) for volume in job.volumes]
    return "://" not in path and not any(PurePosixPath(path).is_relative_to(mount) for mount in mounts)


def _files(pattern: Path, is_deep: bool) -> list[str]:
    if pattern.is_dir():
        names = pattern.rglob("*") if is_deep else pattern.iterdir()
        return [str(path) for path in itertools.islice((path for path in names if path.is_file()), MOST_FILES)]
    found = [str(pattern)] if pattern.is_file() else glob.glob(str(pattern), recursive=True)
    return [path for path in found if os.path.isfile(path)]


def _is_cut(block: Block, file: tuple[str, int]) -> bool:
    """Whether the only file is one text, of which the end is held out."""
    is_text = getattr(block, "format", "") == "text" and not file[0].lower().endswith(ROWS)
    is_stream = isinstance(block, Text) and not block.is_prepared
    return is_text and bool(block.eval_split) and (is_stream or file[1] <= LARGE)
