"""Inspects a folder or file of data: `python -m jaxlaunch.trainer.inspect_data JSON`.

Prints one JSON object with the kind of data, its contents, and the data block that reads it. For
rows of text, the contents are their layouts; for images, classes, sizes, formats, broken files and
duplicates; for a table, rows, columns and missing values. On request it also draws images of each
class, or a histogram of each column.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from jaxlaunch.spelling import suggest_name
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import build, listing, picture, proposal
from jaxlaunch.trainer.sources.images.index import Index, join_path
from jaxlaunch.trainer.sources.images.picture import BrokenImageError, Picture
from jaxlaunch.trainer.sources.images.source import CHECK_SIZE, index_images
from jaxlaunch.trainer.sources.mixture import Mixture
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.sources.tables import files as table_files
from jaxlaunch.trainer.sources.tables.features import (
    MAX_TEXT_VALUES,
    column_numbers,
    find_index_columns,
    is_missing_value,
)
from jaxlaunch.trainer.sources.tables.files import Columns
from jaxlaunch.trainer.spec import MLP, Images, TrainSpec
from jaxlaunch.trainer.spec import Mixture as MixtureBlock
from jaxlaunch.trainer.start.process import print_result, read_spec
from jaxlaunch.trainer.text.inspect_rows import inspect_rows


def main() -> int:
    """Print a report on the data that the arguments name, and return the exit code."""
    arguments: dict[str, Any] = json.loads(sys.argv[1])

    def inspect_data() -> dict[str, Any]:
        return inspect_path(**arguments) if arguments else inspect_mixture(read_spec(os.environ)[0])

    return print_result(inspect_data)


def inspect_mixture(spec: TrainSpec) -> dict[str, Any]:
    """Return the size and the share of each part of a mixture. Raises DataError, SpecError."""
    assert isinstance(spec.data, MixtureBlock), "the launcher inspects other data by its path"
    train, held_out = open_source(spec, "train"), open_source(spec, "eval")
    assert isinstance(train, Mixture), "a part has a weight"
    eval_ranges = {} if held_out is None else held_out.evaluated_parts
    ranges_by_split = {"train": train.evaluated_parts, "eval": eval_ranges}
    epochs = train.epochs_by_part(len(train))
    total = sum(part.weight for part in spec.data.parts.values())
    parts = {
        name: {
            "source": part.source,
            **{split: len(ranges.get(name, ())) for split, ranges in ranges_by_split.items()},
            "share": part.weight / total,
            "epochs": epochs.get(name, 0.0),
        }
        for name, part in spec.data.parts.items()
    }
    splits = {split: sum(map(len, ranges.values())) for split, ranges in ranges_by_split.items()}
    return {"kind": "mixture", "splits": splits, "parts": parts}


def inspect_path(path: str, label: str | None, pictures: str | None) -> dict[str, Any]:
    """Return a report on rows of text, images or a table. Raises DataError for other data."""
    location = path if remote.is_remote(path) else os.path.abspath(path)
    if label is None and pictures is None:
        report = inspect_rows(path, location, (*build.LABEL_NAMES, "file_name"))
        if report is not None:
            return report
    inspect = inspect_images if _holds_images(location) else inspect_table
    return inspect(path, location, label, pictures)


def _holds_images(location: str) -> bool:
    """Return whether the files contain images, by their names or else by the first file."""
    if os.path.splitext(location)[1].lower() in (".npy", ".npz"):
        return False
    try:
        image_listing = listing.list_files(location, "train")
    except DataError:
        is_table = False
        with contextlib.suppress(DataError):
            names = table_files.find_tables(location, "train", "path")[0]
            is_table = all(map(table_files.is_table, names))
        if not is_table:
            raise DataError(
                f"{location} holds neither images ({', '.join(picture.IMAGE_SUFFIXES)}, .tar) nor "
                f"a table ({', '.join(table_files.ENDINGS)}) nor rows of text in a known "
                "layout; text is source: text, and a class of yours source: torch"
            ) from None
        return False
    if not image_listing.names or image_listing.kind not in ("list", "table"):
        return True
    first = join_path(image_listing.root, image_listing.names[0])
    if image_listing.kind == "list":
        row = next((row for _, row in build.read_rows(first)), {})
        names = [value.lower() for value in row.values() if isinstance(value, str)]
        return any(name.endswith(picture.IMAGE_SUFFIXES) for name in names)
    return _has_image_column(first)


def _has_image_column(path: str) -> bool:
    import pyarrow
    from pyarrow import parquet

    local_path = files.local_path(path)
    try:
        if path.lower().endswith(".parquet"):
            schema = parquet.read_schema(local_path)
        else:
            schema = files.arrow_batches(pyarrow.memory_map(local_path))[0]
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is truncated or damaged: {error}") from None
    return any(build.holds_bytes(field.type) for field in schema)


# Number of broken or duplicate files in the report.
SHOWN_FILES = 10


class InspectedImage(NamedTuple):
    """The size and format of an image, or its fault, and a digest of its bytes."""

    fault: str | None
    size: tuple[int, int] | None
    format: str
    mode: str
    digest: bytes


def inspect_images(
    path: str, location: str, label: str | None, pictures: str | None
) -> dict[str, Any]:
    """Return a report on images and the data block that reads them. Raises DataError."""
    data = Images(source="images", path=location, label=label)
    train = index_images(data, location, "train", "path", None)
    splits = {"train": train}
    if train.has_splits:
        held_out = index_images(data, location, "eval", "path", train.classes or None)
        splits |= {"eval": held_out} if len(held_out) else {}
    inspected = [
        (index, number, image)
        for index in splits.values()
        for number, image in enumerate(_read_images(index))
    ]
    broken = [
        f"{index.locate_image(number)} {image.fault}"
        for index, number, image in inspected
        if image.fault
    ]
    sizes = np.array([image.size for *_, image in inspected if image.size])
    duplicates = _duplicate_images(inspected)
    size_range: dict[str, list[int]] = {}
    if len(sizes):
        sides = {"least": sizes.min(0), "median": np.median(sizes, axis=0), "most": sizes.max(0)}
        size_range = {name: list(map(int, size)) for name, size in sides.items()}
    classes = [*train.classes] or [str(number) for number in range(int(train.label_N.max()) + 1)]
    modes = {image.mode for *_, image in inspected if image.size}
    proposed_keys = proposal.propose_training(sizes, modes, len(train), len(classes))
    block: dict[str, Any] = {"source": "images", "path": path, **proposed_keys["data"]}
    block |= {"label": label} if label else {}
    block |= {} if "eval" in splits else {"eval_split": 0.1}
    block |= {"on_broken": "skip"} if broken else {}
    if pictures is not None:
        draw_images(train, classes, pictures)
    counts = {
        split: np.bincount(index.label_N, minlength=len(classes)).tolist()
        for split, index in splits.items()
    }
    formats = collections.Counter(
        f"{image.format} {image.mode}" for *_, image in inspected if image.size
    )
    return {
        "kind": "images",
        "splits": {split: len(index) for split, index in splits.items()},
        "classes": {split: dict(zip(classes, row, strict=False)) for split, row in counts.items()},
        "formats": dict(formats.most_common()),
        "sizes": size_range,
        "left_out": train.left_out,
        "broken": {"count": len(broken), "first": broken[:SHOWN_FILES]},
        "duplicates": {"count": len(duplicates), "first": duplicates[:SHOWN_FILES]},
        **proposed_keys,
        "data": block,
    }


def _read_images(index: Index) -> Iterator[InspectedImage]:
    def read_image(number: int) -> InspectedImage:
        """Read and decode one image, at an eighth of its size if its format allows."""
        try:
            data = index.read_image(number)
        except BrokenImageError as error:
            return InspectedImage(str(error), None, "", "", b"")
        except (FileNotFoundError, PermissionError) as error:
            return InspectedImage(f"cannot be read: {error.strerror}", None, "", "", b"")
        digest = hashlib.sha256(data).digest()[:16]
        try:
            picture = Picture(data)
            size, format_and_mode = picture.size, picture.format_and_mode
            picture.read_pixels(None, CHECK_SIZE)
        except BrokenImageError as error:
            return InspectedImage(str(error), None, "", "", digest)
        return InspectedImage(None, size, *format_and_mode, digest)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        yield from threads.map(read_image, range(len(index)))


def _duplicate_images(inspected: list[tuple[Index, int, InspectedImage]]) -> list[str]:
    first_by_digest: dict[bytes, tuple[Index, int]] = {}
    duplicates = []
    for index, number, image in inspected:
        if image.digest and not image.fault:
            first_index, first_number = first_by_digest.setdefault(image.digest, (index, number))
            if first_index is not index or first_number != number:
                original = first_index.locate_image(first_number)
                duplicates.append(f"{index.locate_image(number)} is {original}")
    return duplicates


# A label with more different numbers is a target of regression.
MAX_LABELS = 100
# Largest number of weights in the first layer of a proposed MLP, and its smallest width.
MAX_FIRST_WEIGHTS, MIN_WIDTH = 2**22, 16
# Number of values of a column in the report.
SHOWN_VALUES = 20


def inspect_table(
    path: str, location: str, label: str | None, pictures: str | None
) -> dict[str, Any]:
    """Return a report on a table and the data block that reads it. Raises DataError."""
    paths, has_splits = table_files.find_tables(location, "train", "path")
    table = table_files.read_tables(paths)
    splits = {"train": len(table)}
    if has_splits and (held_out_paths := table_files.find_tables(location, "eval", "path")[0]):
        splits["eval"] = len(table_files.read_tables(held_out_paths))
    columns = {name: _describe_column(table, name) for name in [*table.values, *table.unusable]}
    label = label or next((name for name in build.LABEL_NAMES if name in table.values), None)
    label = label or [*table.values][-1]
    if label not in table.values:
        raise DataError(
            f"{path} has no column {label!r} of numbers or texts"
            f"{suggest_name(label, table.values)}; it has {', '.join(table.values)}"
        )
    block: dict[str, Any] = {"source": "table", "path": path, "label": label}
    for name in find_index_columns(table):
        columns[name] = {"kind": "index", "missing": 0, "refused": "the row numbers of pandas"}
    features = [
        name
        for name, column in columns.items()
        if name and name != label and column["kind"] != "index"
    ]
    usable = [name for name in features if "refused" not in columns[name]]
    if len(usable) < len(features):
        block["columns"] = usable
    if any(columns[name]["missing"] for name in usable):
        block["missing"] = "mean"
    block |= {} if "eval" in splits else {"eval_split": 0.2}
    target, outputs = _detect_target(table, label, columns[label], block)
    if pictures is not None:
        draw_table(table, [*usable, label], pictures)
    rows = zip(*(values.tolist() for values in table.values.values()), strict=True)
    distinct_rows = {tuple(map(str, row)) for row in rows}
    return {
        "kind": "table",
        "splits": splits,
        "columns": columns,
        "duplicates": {"count": len(table) - len(distinct_rows), "first": []},
        "data": block,
        "model": {"classes": outputs, **_propose_width(columns[name] for name in usable)},
        "loss": {"target": target},
    }


def _propose_width(columns: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return a smaller width for the MLP if its first layer would have too many weights."""
    inputs = sum(
        column["different"] if column["kind"] == "texts" else math.prod(column.get("shape", ()))
        for column in columns
    )
    width = MLP().width
    if inputs * width <= MAX_FIRST_WEIGHTS:
        return {}
    return {"width": max(MIN_WIDTH, 2 ** int(math.log2(MAX_FIRST_WEIGHTS / inputs)))}


def _describe_column(table: Columns, name: str) -> dict[str, Any]:
    if name in table.unusable:
        return {"kind": "other", "missing": 0, "refused": table.unusable[name]}
    try:
        numbers = column_numbers(table, name)
    except DataError as error:
        return {"kind": "mixed", "missing": 0, "refused": str(error)}
    if numbers is None:
        texts = ("" if value is None else str(value) for value in table.values[name])
        counts = collections.Counter(texts)
        missing = counts.pop("", 0)
        description: dict[str, Any] = {
            "kind": "texts",
            "missing": missing,
            "different": len(counts),
        }
        if len(counts) > MAX_TEXT_VALUES:
            return description | {"refused": f"has {len(counts)} different texts"}
        return description | {"values": dict(counts.most_common(SHOWN_VALUES))}
    finite_numbers, values = numbers[np.isfinite(numbers)], table.values[name]
    missing = int(len(numbers) - np.isfinite(numbers).all(1).sum())
    description = {
        "kind": table.readings.get(
            name, "numbers" if values.dtype.kind == "O" else str(values.dtype)
        ),
        "missing": missing,
    }
    description |= {"shape": list(values.shape[1:])} if values.ndim > 1 else {}
    if not len(finite_numbers):
        return description | {"refused": "has no value"}
    return description | {
        "least": float(finite_numbers.min()),
        "mean": float(finite_numbers.mean()),
        "most": float(finite_numbers.max()),
    }


def _detect_target(
    table: Columns, label: str, label_description: dict[str, Any], block: dict[str, Any]
) -> tuple[str, int]:
    """Return the kind of target and the number of outputs, and add the classes to `block`."""
    numbers = column_numbers(table, label)
    if numbers is None:
        return "class", label_description["different"]
    finite_numbers = numbers[np.isfinite(numbers)]
    distinct_labels = np.unique(finite_numbers)
    classes = table.classes.get(label)
    if classes is not None:
        return "class", len(classes)
    texts = table.texts.get(label)
    is_whole = (distinct_labels == np.trunc(distinct_labels)).all()
    if numbers.shape[1] > 1 or len(distinct_labels) > MAX_LABELS or not is_whole:
        return "regression", numbers.shape[1]
    if texts is not None:
        return "class", len({text for text in texts if not is_missing_value(text)})
    if distinct_labels.tolist() != list(range(len(distinct_labels))):
        block["classes"] = [int(label_value) for label_value in distinct_labels]
    return "class", len(distinct_labels)


# Sizes in a picture, in pixels.
IMAGE_SIDE, GAP, TEXT_HEIGHT = 96, 4, 14
HISTOGRAM_WIDTH, HISTOGRAM_HEIGHT = 200, 80
# Number of classes, which are rows of a picture, and of images of each.
SHEET_CLASSES, SHEET_IMAGES = 20, 10
MAX_COLUMNS, HISTOGRAMS_PER_ROW, BINS = 24, 4, 24
BACKGROUND_COLOR, TEXT_COLOR, BAR_COLOR = (255, 255, 255), (40, 40, 40), (63, 81, 181)


def draw_images(index: Index, classes: Sequence[str], path: str) -> None:
    """Write a PNG with a row of images for each of the first classes. Raises DataError."""
    shown_classes = classes[:SHEET_CLASSES]
    row_height = IMAGE_SIDE + TEXT_HEIGHT + GAP
    size = (SHEET_IMAGES * (IMAGE_SIDE + GAP) + GAP, len(shown_classes) * row_height + GAP)
    sheet = Image.new("RGB", size, BACKGROUND_COLOR)
    draw = ImageDraw.Draw(sheet)
    for number, name in enumerate(shown_classes):
        _draw_text(draw, (GAP, number * row_height + GAP // 2), name)
        members = np.flatnonzero(index.label_N == number)
        images = members[:: max(1, len(members) // SHEET_IMAGES)][:SHEET_IMAGES].tolist()
        for column, image in enumerate(images):
            left = GAP + column * (IMAGE_SIDE + GAP)
            top = number * row_height + TEXT_HEIGHT + GAP
            try:
                picture = Picture(index.read_image(image))
                scale = IMAGE_SIDE / max(picture.size)
                height, width = (max(1, round(side * scale)) for side in picture.size)
                small = Image.fromarray(picture.read_pixels(None, (height, width)))
                margins = (IMAGE_SIDE - small.width) // 2, (IMAGE_SIDE - small.height) // 2
                sheet.paste(small, (left + margins[0], top + margins[1]))
            except (BrokenImageError, OSError):
                corner = left + IMAGE_SIDE - 1, top + IMAGE_SIDE - 1
                draw.rectangle((left, top, *corner), outline=TEXT_COLOR)
                _draw_text(draw, (left + GAP, top + IMAGE_SIDE // 2), "broken")
    _save_picture(sheet, path)


def draw_table(table: Columns, names: Sequence[str], path: str) -> None:
    """Write a PNG with histograms of the first columns and of the last. Raises DataError."""
    shown_names = [*names[: MAX_COLUMNS - 1], *names[MAX_COLUMNS - 1 :][-1:]]
    rows = -(-len(shown_names) // HISTOGRAMS_PER_ROW)
    cell_width, cell_height = HISTOGRAM_WIDTH + GAP, HISTOGRAM_HEIGHT + 2 * TEXT_HEIGHT + GAP
    size = HISTOGRAMS_PER_ROW * cell_width + GAP, rows * cell_height + GAP
    sheet = Image.new("RGB", size, BACKGROUND_COLOR)
    draw = ImageDraw.Draw(sheet)
    for number, name in enumerate(shown_names):
        left_edge = GAP + number % HISTOGRAMS_PER_ROW * cell_width
        top_edge = GAP + number // HISTOGRAMS_PER_ROW * cell_height
        counts, least, most = _count_values(table, name)
        _draw_text(draw, (left_edge, top_edge), name[:32])
        bottom = top_edge + TEXT_HEIGHT + HISTOGRAM_HEIGHT
        width = HISTOGRAM_WIDTH / max(len(counts), 1)
        for bin_index, count in enumerate(counts):
            bar_left = left_edge + bin_index * width
            bar_height = HISTOGRAM_HEIGHT * count / max(counts)
            bar = (bar_left, bottom - bar_height, bar_left + width - 1, bottom)
            draw.rectangle(bar, fill=BAR_COLOR)
        _draw_text(draw, (left_edge, bottom + 1), f"{least} to {most}"[:32])
    _save_picture(sheet, path)


def _count_values(table: Columns, name: str) -> tuple[list[int], str, str]:
    numbers = column_numbers(table, name)
    if numbers is None:
        counts = collections.Counter(str(value) for value in table.values[name] if value)
        ordered = counts.most_common(BINS)
        return [count for _, count in ordered], ordered[0][0], ordered[-1][0]
    finite_numbers = numbers[np.isfinite(numbers)]
    bin_counts, edges = np.histogram(finite_numbers, BINS)
    return bin_counts.tolist(), f"{edges[0]:g}", f"{edges[-1]:g}"


def _draw_text(draw: ImageDraw.ImageDraw, corner: tuple[int, int], text: str) -> None:
    draw.text(corner, text.encode("ascii", "replace").decode(), fill=TEXT_COLOR)


def _save_picture(sheet: Image.Image, path: str) -> None:
    try:
        sheet.save(path, "PNG")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main())
