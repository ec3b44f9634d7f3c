"""Pictures, texts and tables of a run, as its tracker gets them.

They are those that a program or a task reports (jaxlaunch/samples.py), and the confusion matrix and
the rates of each class of a classification.
"""

from __future__ import annotations

import base64
import io
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxlaunch import contract, regular_files, samples

MAX_FILE_BYTES = 1 << 24
# A program may add to the items of a step, so the file of the newest step is read at this age.
MIN_AGE_S = 5.0
# The names of the classification at a tracker.
CONFUSION, CLASSES = "eval/confusion", "eval/classes"
_PNG_PREFIX = "data:image/png;base64,"
_RATES = ("label", "examples", "precision", "recall", "f1")
# Counts are drawn into the cells of a matrix of at most this many classes.
_MAX_COUNTED_CLASSES = 20
_MATRIX_PIXELS, _MIN_CELL_PIXELS, _MAX_CELL_PIXELS = 600, 12, 60
_LABEL_CHARS = 24
# Colours of an empty cell, and of one with all examples of its label.
_EMPTY_RGB, _FULL_RGB = (255, 255, 255), (8, 69, 148)


class Table(NamedTuple):
    """A table of numbers and texts."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(map(_format_cell, line)) + " |" for line in lines)


class Media(NamedTuple):
    """What a tracker shows of a step in addition to numbers, by name. Images are PNG files."""

    images: Mapping[str, bytes]
    texts: Mapping[str, str]
    tables: Mapping[str, Table]


class MediaReader:
    """Reads the media of a run that its tracker does not have yet."""

    # The names under which the tracker's state has the newest step that was sent.
    REPORTED, CLASSIFICATION = "reported", "classification"

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        # The newest classification, which is read again after it was written.
        self._classification: dict[str, Any] | None = None
        self._classification_at = 0.0

    def read_media(
        self, sent_steps: Mapping[str, int], newest_step: int, *, is_last: bool
    ) -> Iterator[tuple[int, str, Media]]:
        """Yield the step, the name of the source, and the media of each step that is complete.

        Args:
            sent_steps: The newest step that was sent, by source.
            newest_step: The newest step with metrics, or -1 without any. Media of later steps wait
                for their metrics, because trackers take steps in order.
            is_last: Whether the training has ended, so that every step is complete.
        """

        def is_complete(step: int, written_at: float) -> bool:
            if is_last or step < newest_step:
                return True
            has_age = time.time() - written_at > MIN_AGE_S
            return has_age and (step == newest_step or newest_step < 0)

        for step in reversed(samples.list_steps(self._folder / samples.FOLDER)):
            path = self._folder / samples.FOLDER / f"{step}.json"
            is_new = step > sent_steps.get(self.REPORTED, -1)
            if is_new and is_complete(step, _written_at(path)) and (record := self._read(path)):
                yield step, self.REPORTED, convert_reported(record)
        path = self._folder / contract.CLASSIFICATION
        if (written_at := _written_at(path)) != self._classification_at:
            self._classification, self._classification_at = self._read(path), written_at
        if self._classification is not None:
            evaluated_step: Any = self._classification.get("step")
            is_step = type(evaluated_step) is int
            is_new = is_step and evaluated_step > sent_steps.get(self.CLASSIFICATION, -1)
            if is_new and is_complete(evaluated_step, written_at):
                yield (
                    evaluated_step,
                    self.CLASSIFICATION,
                    convert_classification(self._classification),
                )

    def _read(self, path: Path) -> dict[str, Any] | None:
        try:
            data = regular_files.read_bounded(path, MAX_FILE_BYTES, below=self._folder)
            record = json.loads(data)
        except (OSError, ValueError, RecursionError):
            return None
        return record if isinstance(record, dict) else None


def _written_at(path: Path) -> float:
    """Return the Unix time at which a file was written, or 0 if there is none."""
    try:
        return os.stat(path).st_mtime
    except OSError:
        return 0.0


def convert_reported(record: Mapping[str, Any]) -> Media:
    """Return the pictures and texts of a report as `reported/NAME`, without invalid ones."""
    images, texts = dict[str, bytes](), dict[str, str]()
    items = record.get("samples")
    for item in items if isinstance(items, list) else ():
        if not isinstance(item, dict):
            continue
        for kind in ("image", "text"):
            name, value = f"reported/{item.get('name') or kind}", item.get(kind)
            if not isinstance(value, str):
                continue
            if kind == "text":
                texts[name] = value
            elif (png := _decode_png(value)) is not None:
                images[name] = png
    return Media(images, texts, {})


def _decode_png(url: str) -> bytes | None:
    try:
        png = base64.b64decode(url.removeprefix(_PNG_PREFIX), validate=True)
    except ValueError:
        return None
    return png if png.startswith(b"\x89PNG") and len(png) > 24 else None


def convert_classification(record: Mapping[str, Any]) -> Media:
    """Return the confusion matrix as a picture and a table, and the table of the classes.

    With too many classes for a matrix, the table has the pairs that are confused most.
    """
    images, tables = dict[str, bytes](), dict[str, Table]()
    try:
        classes = [[row[key] for key in _RATES] for row in record["per_class"]]
        labels = [str(row[0]) for row in classes]
        tables[CLASSES] = Table(_RATES, classes)
        if "confusion" in record:
            counts_LL = [[int(count) for count in row] for row in record["confusion"]]
            if (png := draw_confusion(labels, counts_LL)) is not None:
                images[CONFUSION] = png
            pairs = [
                [label, predicted, count]
                for label, counts_L in zip(labels, counts_LL, strict=True)
                for predicted, count in zip(labels, counts_L, strict=True)
            ]
        else:
            keys = ("label", "predicted", "examples")
            pairs = [[row[key] for key in keys] for row in record["confused"]]
        tables[CONFUSION] = Table(("label", "predicted", "examples"), pairs)
    except (KeyError, TypeError, ValueError) as error:
        # Another version of the trainer may have written the file.
        print(f"{contract.CLASSIFICATION} cannot be read: {error!r}", flush=True)
    return Media(images, {}, tables)


def draw_confusion(labels: Sequence[str], counts_LL: Sequence[Sequence[int]]) -> bytes | None:
    """Draw a confusion matrix as a PNG file, or return None without Pillow.

    A row is a label and a column a prediction. A cell is as dark as its share of the label's
    examples.
    """
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        return None
    font = ImageFont.load_default()
    texts = [label[:_LABEL_CHARS] for label in labels]
    cell = _MATRIX_PIXELS // max(1, len(labels))
    cell = min(_MAX_CELL_PIXELS, max(_MIN_CELL_PIXELS, cell))
    margin = 8 + max((round(font.getlength(text)) for text in texts), default=0)
    side = margin + cell * len(labels) + 1
    picture = Image.new("RGB", (side, side), _EMPTY_RGB)
    draw = ImageDraw.Draw(picture)
    for row, counts_L in enumerate(counts_LL):
        top, total = margin + row * cell, max(1, sum(counts_L))
        draw.text((4, top + cell / 2), texts[row], "black", font, anchor="lm")
        for column, count in enumerate(counts_L):
            left, share = margin + column * cell, count / total
            bounds = zip(_EMPTY_RGB, _FULL_RGB, strict=True)
            fill = tuple(round(empty + share * (full - empty)) for empty, full in bounds)
            draw.rectangle((left, top, left + cell, top + cell), fill, (208, 208, 208))
            if count and len(labels) <= _MAX_COUNTED_CLASSES:
                colour = "white" if share > 0.5 else "black"
                middle = left + cell / 2, top + cell / 2
                draw.text(middle, str(count), colour, font, anchor="mm")
    # The names of the columns are written from the bottom to the top.
    names = Image.new("RGB", (margin, side - margin), _EMPTY_RGB)
    names_draw = ImageDraw.Draw(names)
    for column, text in enumerate(texts):
        names_draw.text((4, (column + 0.5) * cell), text, "black", font, anchor="lm")
    picture.paste(names.transpose(Image.Transpose.ROTATE_90), (margin, 0))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def _format_cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")
