"""Files as what a trained model reads: images and rows of tables, some at a time, each with the place it is from."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data.augment import Transform
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.evaluation import pictures
from jaxlaunch.trainer.evaluation.pictures import Item
from jaxlaunch.trainer.sources.images import listing, picture
from jaxlaunch.trainer.sources.images.index import joined, shown
from jaxlaunch.trainer.sources.images.picture import Broken, Picture
from jaxlaunch.trainer.sources.tables import files
from jaxlaunch.trainer.sources.tables.features import Features

Array = np.ndarray[Any, Any]
Told = Callable[[str], None]  # of what cannot be read: refuses it, or leaves it out


class Part(NamedTuple):
    """Some examples: where each is from, and arrays [N, …] by name."""

    places: list[dict[str, Any]]
    arrays: Mapping[str, Array]


def listed(given: Sequence[str], kind: str, broken: Told) -> list[str]:
    """The files: those of a folder by their names, in order. Raises DataError where there is none."""
    endings = files.ENDINGS if kind == "table" else (*picture.ENDINGS, ".tar", *listing.TABLES)
    found: list[str] = []
    for each in given:
        if listing.is_folder(each):
            there = sorted(listing.walked(each))
            names = [name for name in there if files.is_table(name)] if kind == "table" else _images_of(there)
            if not names:
                raise DataError(f"{shown(each)} holds none of {', '.join(endings)}, which the model reads")
            found += [joined(each, name) for name in names]
        elif remote.is_remote(each) or os.path.lexists(each):
            found.append(each)
        else:
            broken(f"{shown(each)} does not exist")
    return found


def _images_of(names: list[str]) -> list[str]:
    """Those of a folder that are images; where there are none, those that hold images."""
    plain = [name for name in names if listing.kind_of(name) == "files"]
    return plain or [name for name in names if listing.kind_of(name) in ("tar", "table")]


def of_images(
    names: Sequence[str], transform: Transform, shape: Sequence[int], size: int, broken: Told
) -> Iterator[Part]:
    """`image` uint8 of `shape`, as an evaluation sees it."""
    channels = shape[2] if len(shape) == 3 else 1

    def pixels(item: Item) -> Array | str:
        """Those of an image, or what is wrong with it."""
        try:
            return transform(Picture(item.read(), channels)).reshape(shape)
        except Broken as error:
            return f"{item.name} {error}"
        except OSError as error:
            return f"{item.name} cannot be read: {error.strerror or error}"

    every = _items(names, broken)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        while some := list(itertools.islice(every, size)):
            places, images = [], []
            for item, found in zip(some, threads.map(pixels, some), strict=True):
                if isinstance(found, str):
                    broken(found)
                else:
                    places.append({"file": item.name})
                    images.append(found)
            if places:
                yield Part(places, {"image": np.stack(images)})


def _items(names: Sequence[str], broken: Told) -> Iterator[Item]:
    for name in names:
        try:
            yield from pictures.items(name)
        except DataError as error:
            broken(str(error))
        except OSError as error:
            broken(f"{shown(name)} cannot be read: {error.strerror or error}")


def of_tables(names: Sequence[str], described: Mapping[str, Any], size: int, broken: Told) -> Iterator[Part]:
    """`features` float32 [N, F] of the rows, which are numbered from 1 in each file."""
    features = Features.of(described)
    for name in names:
        try:
            table = files.read([name], features.texts)
            x_NF, wrong = features.read(table)
        except DataError as error:
            broken(str(error))
            continue
        except OSError as error:
            broken(f"{shown(name)} cannot be read: {error.strerror or error}")
            continue
        for row in sorted(wrong):
            broken(f"{table.where(row)}: {wrong[row]}")
        good = [row for row in range(len(table)) if row not in wrong]
        for start in range(0, len(good), size):
            rows = good[start : start + size]
            yield Part([{"file": shown(name), "row": row + 1} for row in rows], {"features": x_NF[rows]})
