"""Predicts for files: `python -m jaxlaunch.trainer.evaluation.predict FOLDER FILES...`.

FOLDER holds checkpoints, or is an export of a model of images or of a table. Neither the data nor,
for a task of ours, the job of the training is needed: how a file becomes what the model reads is
next to the weights. With TRAIN_SPEC the task may be a user's. Prints one JSON object; exits with a
code of the contract.

Files are read some at a time, each example with the place it is from, and become rows of a table:
.csv, .jsonl or .parquet, a file that appears when all rows are in it.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from etils import epath

from jaxlaunch import atomic_file, contract, programs
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.checkpoint import saved_files
from jaxlaunch.trainer.data import files as data_files
from jaxlaunch.trainer.data.augment import Transform
from jaxlaunch.trainer.data.files import printable_path
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.evaluation import task_model
from jaxlaunch.trainer.evaluation.task_model import TaskModel
from jaxlaunch.trainer.huggingface import folder as folders
from jaxlaunch.trainer.sources import labeled_texts
from jaxlaunch.trainer.sources.images import build, index, listing, picture
from jaxlaunch.trainer.sources.images.index import join_path
from jaxlaunch.trainer.sources.images.picture import BrokenImageError, Picture
from jaxlaunch.trainer.sources.tables import files as tables
from jaxlaunch.trainer.sources.tables.features import Features
from jaxlaunch.trainer.spec.augment import Augment
from jaxlaunch.trainer.spec.data import TEXT_KINDS
from jaxlaunch.trainer.start.process import print_result
from jaxlaunch.trainer.text import documents
from jaxlaunch.trainer.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

# The number of rows in the result if no file is written, and of skipped inputs that are listed.
SHOWN_ROWS = 20
# The number of rows of a Parquet file that are in memory at a time.
COLUMN_ROWS = 256
Kind = Literal["images", "table", "text"]
Row = dict[str, Any]
Array = np.ndarray[Any, Any]
# Receives the description of an unreadable input, and raises DataError or records it as skipped.
Skip = Callable[[str], None]


def main() -> int:
    """Predict for files, print the result as JSON, and return the exit code."""
    options = programs.read_options(
        programs.Predict, "jaxlaunch.trainer.evaluation.predict", __doc__
    )
    return print_result(lambda: predict_files(options))


def predict_files(options: programs.Predict) -> dict[str, Any]:
    """Write the table of predictions, or return its first rows, and return a summary.

    Raises a TrainerError.
    """
    if options.output is not None:
        _check_output(options.output)
    if remote.is_remote(options.folder):
        remote.check_url("the folder of weights", options.folder)
    saved_inputs = saved_files.read_inputs(options.folder)
    inputs = saved_inputs or folders.describe_text_classifier(options.folder)
    if inputs is None:
        raise SpecError(
            f"{options.folder} has no {saved_files.INPUTS_FILE}, which describes the files: "
            "only trainings with images, tables or labeled texts write it; to predict for "
            "arrays, use jaxlaunch.load in Python"
        )
    notes: list[str] = []
    skipped: list[str] = []
    kind: Kind = inputs["kind"]

    def skip_fault(fault: str) -> None:
        if not options.skip_broken:
            raise DataError(f"{fault}; fix or remove it, or leave such out with --skip-broken")
        skipped.append(fault)

    paths = _list_files(options.files, kind, skip_fault)
    if kind == "text":
        text_tokenizer = _load_tokenizer(options.folder, reads_bytes=saved_inputs is not None)
        inputs = {**inputs, "tokenizer": text_tokenizer}
    model = load_model(options, inputs, notes.append)
    batch_size = min(model.spec.batch, task_model.MAX_BATCH)
    read_batches = {"table": _read_tables, "text": _read_texts, "images": _read_images}[kind]
    rows = (
        row
        for batch in read_batches(paths, inputs, batch_size, skip_fault)
        for row in _output_rows(batch, model.predict(batch.arrays), inputs, options.top)
    )
    count, shown_rows = _write_table(options.output, rows)
    notes += [f"left out: {fault}" for fault in skipped[:SHOWN_ROWS]]
    result = {"step": model.step, "examples": count, "rows": shown_rows}
    return result | {"skipped": len(skipped), "notes": notes}


def _list_files(names: Sequence[str], kind: Kind, skip: Skip) -> list[str]:
    """Return the paths of all files, with folders replaced by the readable files in them.

    Raises DataError for a folder without readable files.
    """
    paths: list[str] = []
    for name in names:
        if listing.is_folder(name):
            members = sorted(listing.walk_files(name))
            if kind == "text":
                endings: tuple[str, ...] = (*TEXT_KINDS,)
                readable = [name for name in members if documents.file_kind(name) != "text"]
            elif kind == "table":
                endings = tables.ENDINGS
                readable = [member for member in members if tables.is_table(member)]
            else:
                # Containers of images are only read if there are no images.
                endings = (*picture.IMAGE_SUFFIXES, ".tar", *listing.TABLE_SUFFIXES)
                kinds = {member: listing.file_kind(member) for member in members}
                readable = [member for member in members if kinds[member] == "files"]
                readable = readable or [name for name in members if kinds[name] in ("tar", "table")]
            if not readable:
                problem = f"holds none of {', '.join(endings)}, which the model reads"
                raise DataError(f"{printable_path(name)} {problem}")
            paths += [join_path(name, member) for member in readable]
        elif remote.is_remote(name) or os.path.lexists(name):
            paths.append(name)
        else:
            skip(f"{printable_path(name)} does not exist")
    return paths


# --- the model ------------------------------------------------------------------------------------


def load_model(
    options: programs.Predict, inputs: Mapping[str, Any], note: Callable[[str], None]
) -> TaskModel:
    """Load the model from a folder of checkpoints or an export. Raises a TrainerError."""
    folder, step = options.folder, options.step
    if (train := os.environ.get(contract.TRAIN_SPEC)) is not None:
        return task_model.load_task_model(folder, train, step=step, ema=options.ema, note=note)
    return task_model.load_without_job(folder, inputs, step=step, ema=options.ema, note=note)


# --- examples -------------------------------------------------------------------------------------


class ExampleBatch(NamedTuple):
    """A batch of examples.

    Attributes:
        origins: Columns of the result that say where each example is from.
        arrays: Arrays [N, …] by their keys in an example.
    """

    origins: list[Row]
    arrays: dict[str, Array]


class ImageItem(NamedTuple):
    """An image that has not been read yet.

    Attributes:
        name: Path of its file, and its name in the file if that is a container.
        read: Function that returns the encoded image.
    """

    name: str
    read: Callable[[], bytes]


def _read_images(
    paths: Sequence[str], inputs: Mapping[str, Any], size: int, skip: Skip
) -> Iterator[ExampleBatch]:
    """Yield batches of images in the model's shape, as uint8, transformed as in an evaluation."""
    shape = inputs["shape"]
    channels = shape[2] if len(shape) == 3 else 1
    transform = Transform(Augment(eval_crop=inputs["eval_crop"]), (shape[0], shape[1]), "eval")

    def find_images() -> Iterator[ImageItem]:
        for path in paths:
            with _skip_unreadable(path, skip):
                yield from _find_images(path)

    def read_pixels(item: ImageItem) -> Array | str:
        """Return the pixels of an image, or a sentence if it cannot be read."""
        try:
            return transform(Picture(item.read(), channels)).reshape(shape)
        except BrokenImageError as error:
            return f"{item.name} {error}"
        except OSError as error:
            return f"{item.name} cannot be read: {error.strerror or error}"

    items = find_images()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        while chunk := list(itertools.islice(items, size)):
            origins, images = [], []
            for item, pixels in zip(chunk, threads.map(read_pixels, chunk), strict=True):
                if isinstance(pixels, str):
                    skip(pixels)
                else:
                    origins.append({"file": item.name})
                    images.append(pixels)
            if origins:
                yield ExampleBatch(origins, {"image": np.stack(images)})


@contextlib.contextmanager
def _skip_unreadable(path: str, skip: Skip) -> Iterator[None]:
    try:
        yield
    except DataError as error:
        skip(str(error))
    except OSError as error:
        skip(f"{printable_path(path)} cannot be read: {error.strerror or error}")


def _find_images(path: str) -> Iterator[ImageItem]:
    """Yield the images of a file: the file itself, members of a tar, or rows of Parquet and Arrow.

    Raises DataError if the file is damaged or holds no image, and OSError or StorageError if it
    cannot be read.
    """
    kind = listing.file_kind(path)
    if kind not in ("tar", "table"):
        yield ImageItem(printable_path(path), partial(index.read_file, path))
        return
    item: ImageItem | None = None
    for item in _tar_images(path) if kind == "tar" else _table_images(path):
        yield item
    if item is None:
        raise DataError(f"{printable_path(path)} holds no image")


def _tar_images(path: str) -> Iterator[ImageItem]:
    size_bytes = data_files.file_size(path)
    with build.open_tar(path) as tar:
        for member in tar:
            name, member_path = os.path.basename(member.name), printable_path(member.name)
            is_image = name.lower().endswith(picture.IMAGE_SUFFIXES) and not name.startswith(".")
            if not (member.isreg() and is_image):
                continue
            if member.offset_data + member.size > size_bytes:
                raise DataError(
                    f"{printable_path(path)} is truncated: it ends within {member_path}"
                )
            read = partial(data_files.read_bytes, path, member.offset_data, member.size)
            yield ImageItem(f"{printable_path(path)}, {member_path}", read)


def _table_images(path: str) -> Iterator[ImageItem]:
    """Yield the images in the rows of a Parquet or Arrow file. A null becomes an empty image."""
    import pyarrow
    from pyarrow import parquet

    local = data_files.local_path(path)
    try:
        batches: Iterator[Any]
        if path.lower().endswith(".parquet"):
            file = parquet.ParquetFile(local)
            name = build.find_image_column(None, path, file.schema_arrow)
            batches = file.iter_batches(COLUMN_ROWS, columns=[name])
        else:
            schema, batches = data_files.arrow_batches(pyarrow.memory_map(local))
            name = build.find_image_column(None, path, schema)
            batches = (batch.select([name]) for batch in batches)
        row = 0
        for batch in batches:
            column = batch.column(0)
            if pyarrow.types.is_struct(column.type):
                column = column.flatten()[column.type.get_field_index("bytes")]
            for value in column:
                row += 1
                read = partial(bytes, value.as_py() or b"")
                yield ImageItem(f"{printable_path(path)}, row {row}", read)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if isinstance(error, OSError) and error.errno is not None:
            # Errors with an errno come from the file system.
            raise
        raise DataError(f"{printable_path(path)} is truncated or damaged: {error}") from None


def _read_tables(
    paths: Sequence[str], inputs: Mapping[str, Any], size: int, skip: Skip
) -> Iterator[ExampleBatch]:
    """Yield batches of rows as `features`, float32 [N, F]. Rows are numbered from 1 in a file."""
    features = Features.from_json(inputs)
    for path in paths:
        contents = None
        with _skip_unreadable(path, skip):
            table = tables.read_tables([path], features.text_columns)
            contents = table, *features.read_features(table)
        if contents is None:
            continue
        table, x_NF, faults = contents
        for row in sorted(faults):
            skip(f"{table.locate_row(row)}: {faults[row]}")
        valid = [row for row in range(len(table)) if row not in faults]
        for start in range(0, len(valid), size):
            rows = valid[start : start + size]
            origins: list[Row] = [{"file": printable_path(path), "row": row + 1} for row in rows]
            yield ExampleBatch(origins, {"features": x_NF[rows]})


def _load_tokenizer(folder: str, *, reads_bytes: bool) -> Tokenizer:
    """Load the tokenizer that was saved with the checkpoints or exported with the model.

    Without one, a model of ours reads bytes. Raises SpecError for other models.
    """
    files = saved_files.read_saved_tokenizer(folder)
    files = files or saved_files.read_tokenizer(epath.Path(folder))
    if saved_files.TOKENIZER_FILE in files:
        return HuggingFaceTokenizer(folder, files)
    if not reads_bytes:
        raise SpecError(
            f"{folder} has no {saved_files.TOKENIZER_FILE}, by which its texts become tokens; save "
            "it there with AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers"
        )
    return ByteTokenizer()


def _read_texts(
    paths: Sequence[str], inputs: Mapping[str, Any], size: int, skip: Skip
) -> Iterator[ExampleBatch]:
    """Yield batches of texts as `tokens`, int32 [N, L], and their `length`, int32 [N]."""
    (length,), field = inputs["shape"], inputs["field"]
    for path in paths:
        rows: list[tuple[int, str]] = []
        with _skip_unreadable(path, skip):
            documents.check_rows([path], "texts")
            parts = itertools.chain.from_iterable(documents.split_units([path]))
            values = (row for part in parts for row, _ in documents.read_rows(part, field, dict))
            for number, row in enumerate(values, 1):
                try:
                    rows.append((number, labeled_texts.read_text(row, field)))
                except documents.UnfitRowError as error:
                    skip(f"{printable_path(path)}, row {number}: {error}")
        for start in range(0, len(rows), size):
            chunk = rows[start : start + size]
            ids, _ = inputs["tokenizer"].encode_whole([text for _, text in chunk], length)
            origins = [{"file": printable_path(path), "row": number} for number, _ in chunk]
            tokens_NL = np.stack([np.pad(ids_T, (0, length - len(ids_T))) for ids_T in ids])
            counts_N = np.array([len(ids_T) for ids_T in ids], np.int32)
            yield ExampleBatch(origins, {"tokens": tokens_NL, "length": counts_N})


# --- the table ------------------------------------------------------------------------------------

TABLE_ENDINGS = (".csv", ".jsonl", ".parquet")
# The number of rows in a row group of a Parquet file.
GROUP_ROWS = 4096


def _output_rows(
    batch: ExampleBatch, outputs: Any, inputs: Mapping[str, Any], top: int
) -> Iterator[Row]:
    """Yield a row of the table for each example: its origin, followed by the prediction."""
    outputs_BV = np.asarray(outputs, np.float64)
    if inputs["target"] in ("regression", "multi_label"):
        names, numbers = inputs.get("label"), range(outputs_BV.shape[1])
        if inputs["target"] == "regression":
            names, values_BV = names or [f"value_{number + 1}" for number in numbers], outputs_BV
        else:
            names = names or [*map(str, numbers)]
            # This form of the sigmoid does not overflow.
            values_BV = 0.5 * (1.0 + np.tanh(0.5 * outputs_BV))
        for origin, value_V in zip(batch.origins, values_BV, strict=True):
            yield origin | dict(zip(names, value_V.tolist(), strict=True))
        return
    probs_BV = np.exp(outputs_BV - outputs_BV.max(-1, keepdims=True))
    probs_BV /= probs_BV.sum(-1, keepdims=True)
    classes = inputs.get("classes", ())
    for origin, prob_V in zip(batch.origins, probs_BV, strict=True):
        row = dict(origin)
        # The sort is stable, so that of equally likely labels the first one comes first.
        for rank, label in enumerate(np.argsort(-prob_V, kind="stable")[:top].tolist(), 1):
            suffix = "" if rank == 1 else f"_{rank}"
            row[f"label{suffix}"] = classes[label] if label < len(classes) else str(label)
            row[f"probability{suffix}"] = float(prob_V[label])
        yield row


def _check_output(path: str) -> None:
    """Raise SpecError if no table can be written to the path."""
    if "://" in path:
        raise SpecError(f"{path} is not a local file; write to a local one, and copy it from there")
    if os.path.splitext(path)[1] not in TABLE_ENDINGS:
        raise SpecError(f"{path} has an unknown ending; {', '.join(TABLE_ENDINGS)} can be written")
    folder = Path(path).absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        reason = f"{folder} is not a folder that this user can write to"
        raise SpecError(f"{path} cannot be written: {reason}")


def _write_table(path: str | None, rows: Iterator[Row]) -> tuple[int, list[Row]]:
    """Write the rows to `path`; return their number and, without a path, the first rows."""
    first = next(rows, None)
    if first is None:
        raise DataError("none of the files and rows can be read; all of them were skipped")
    rows = itertools.chain([first], rows)
    if path is None:
        shown_rows = list(itertools.islice(rows, SHOWN_ROWS))
        return len(shown_rows) + sum(1 for _ in rows), shown_rows
    # After all rows have been written, the next number of the counter is the number of rows.
    counter = itertools.count()
    counted_rows = (row for row, _ in zip(rows, counter, strict=False))
    with atomic_file.open_draft(Path(path)) as draft:
        if path.endswith(".parquet"):
            _write_parquet(draft, counted_rows)
        else:
            with draft.open("w", encoding="utf-8", newline="") as file:
                if path.endswith(".jsonl"):
                    file.writelines(
                        json.dumps(row, ensure_ascii=False) + "\n" for row in counted_rows
                    )
                else:
                    table = csv.DictWriter(file, [*first])
                    table.writeheader()
                    table.writerows(counted_rows)
    return next(counter), []


def _write_parquet(path: Path, rows: Iterable[Row]) -> None:
    import pyarrow
    from pyarrow import parquet

    rows = iter(rows)
    with contextlib.ExitStack() as stack:
        writer = None
        while group := list(itertools.islice(rows, GROUP_ROWS)):
            table = pyarrow.Table.from_pylist(group)
            writer = writer or stack.enter_context(parquet.ParquetWriter(path, table.schema))
            writer.write_table(table)


if __name__ == "__main__":
    sys.exit(main())
