"""Pictures of data: a contact sheet of images by class, histograms of the columns of a table."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images.index import Index
from jaxlaunch.trainer.sources.images.picture import Broken, Picture
from jaxlaunch.trainer.sources.tables import features
from jaxlaunch.trainer.sources.tables.files import Columns

SIDE, GAP, TEXT = 96, 4, 14  # pixels
MOST_CLASSES, OF_CLASS = 20, 10  # of a sheet
MOST_COLUMNS, ACROSS, BINS = 24, 4, 24
WIDE, HIGH = 200, 80  # of a histogram
BACK, INK, BAR = (255, 255, 255), (40, 40, 40), (63, 81, 181)


def of_images(index: Index, classes: Sequence[str], path: str) -> None:
    """Writes a row of images for each class, those of the first classes, as a PNG. Raises DataError."""
    shown = classes[:MOST_CLASSES]
    row = SIDE + TEXT + GAP
    whole = Image.new("RGB", (OF_CLASS * (SIDE + GAP) + GAP, len(shown) * row + GAP), BACK)
    draw = ImageDraw.Draw(whole)
    for number, name in enumerate(shown):
        _write(draw, (GAP, number * row + GAP // 2), name)
        mine = np.flatnonzero(index.label_N == number)
        for at, image in enumerate(mine[:: max(1, len(mine) // OF_CLASS)][:OF_CLASS].tolist()):
            place = (GAP + at * (SIDE + GAP), number * row + TEXT + GAP)
            try:
                small = Image.fromarray(_small(Picture(index.read(image))))
                whole.paste(small, (place[0] + (SIDE - small.width) // 2, place[1] + (SIDE - small.height) // 2))
            except (Broken, OSError):
                draw.rectangle((*place, place[0] + SIDE - 1, place[1] + SIDE - 1), outline=INK)
                _write(draw, (place[0] + GAP, place[1] + SIDE // 2), "broken")
    _save(whole, path)


def _small(picture: Picture) -> npt.NDArray[np.uint8]:
    height, width = picture.size
    scale = SIDE / max(height, width)
    return picture.pixels(None, (max(1, round(height * scale)), max(1, round(width * scale))))


def of_table(table: Columns, names: Sequence[str], path: str) -> None:
    """Writes a histogram for each of the first columns, and of the last, as a PNG. Raises DataError."""
    shown = [*names[: MOST_COLUMNS - 1], *names[MOST_COLUMNS - 1 :][-1:]]
    rows = -(-len(shown) // ACROSS)
    whole = Image.new("RGB", (ACROSS * (WIDE + GAP) + GAP, rows * (HIGH + 2 * TEXT + GAP) + GAP), BACK)
    draw = ImageDraw.Draw(whole)
    for number, name in enumerate(shown):
        left = GAP + number % ACROSS * (WIDE + GAP)
        top = GAP + number // ACROSS * (HIGH + 2 * TEXT + GAP)
        counts, least, most = _counted(table, name)
        _write(draw, (left, top), name[:32])
        bottom, width = top + TEXT + HIGH, WIDE / max(len(counts), 1)
        for at, count in enumerate(counts):
            high = HIGH * count / max(counts)
            draw.rectangle((left + at * width, bottom - high, left + (at + 1) * width - 1, bottom), fill=BAR)
        _write(draw, (left, bottom + 1), f"{least} to {most}"[:32])
    _save(whole, path)


def _counted(table: Columns, name: str) -> tuple[list[int], str, str]:
    """How often values occur in a column, in parts of its range or by the text, and the first and last of them."""
    found = features.numbers(table, name)
    if found is None:
        counts = collections.Counter(str(value) for value in table.values[name] if value)
        ordered = counts.most_common(BINS)
        return [count for _, count in ordered], ordered[0][0], ordered[-1][0]
    known = found[np.isfinite(found)]
    of_bins, edges = np.histogram(known, BINS)
    return of_bins.tolist(), f"{edges[0]:g}", f"{edges[-1]:g}"


def _write(draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str) -> None:
    draw.text(place, text.encode("ascii", "replace").decode(), fill=INK)


def _save(whole: Image.Image, path: str) -> None:
    try:
        whole.save(path, "PNG")
    except OSError as error:
        raise DataError(f"{path} cannot be written: {error.strerror or error}") from error
