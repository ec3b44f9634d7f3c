"""Files as what a trained model reads: images and rows of tables, some at a time, each with the place it is from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data.augment.transform import Transform
from jaxlaunch.trainer.data.sources.images import index, listing, picture
from jaxlaunch.trainer.data.sources.images.index import joined, shown
from jaxlaunch.trainer.data.sources.images.picture import Broken, Picture
from jaxlaunch.trainer.data.sources.tables import files
from jaxlaunch.trainer.data.sources.tables.features import Features
from jaxlaunch.trainer.errors import DataError

Array = np.ndarray[Any, Any]
Told = Callable[[str], None]  # of what cannot be read: refuses it, or leaves it out


class Part(NamedTuple):
    """Some examples: where each is from, and arrays [N, …] by name."""

    places: list[dict[str, Any]]
    arrays: Mapping[str, Array]


def listed(given: Sequence[str], kind: str, broken: Told) -> list[str]:
    """The files: those of a folder by their names, in order. Raises DataError where there is none."""
    is_wanted = files.is_table if kind == "table" else lambda name: listing.kind_of(name) == "files"
    endings = files.ENDINGS if kind == "table" else picture.ENDINGS
    found: list[str] = []
    for each in given:
        if listing.is_folder(each):
            names = [name for name in sorted(listing.walked(each)) if is_wanted(name)]
            if not names:
                raise DataError(f"{shown(each)} holds none of {', '.join(endings)}, which the model reads")
            found += [joined(each, name) for name in names]
        elif remote.is_remote(each) or os.path.lexists(each):
            found.append(each)
        else:
            broken(f"{shown(each)} does not exist")
    return found


def of_images(
    names: Sequence[str], transform: Transform, shape: Sequence[int], size: int, broken: Told
) -> Iterator[Part]:
    """`image` uint8 of `shape`, as an evaluation sees it."""
    channels = shape[2] if len(shape) == 3 else 1

    def pixels(name: str) -> Array | str:
        """Those of a file, or what is wrong with it."""
        try:
            return transform(Picture(index.whole(name), channels)).reshape(shape)
        except Broken as error:
            return f"{shown(name)} {error}"
        except OSError as error:
            return f"{shown(name)} cannot be read: {error.strerror or error}"

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for start in range(0, len(names), size):
            some = names[start : start + size]
            places, images = [], []
            for name, found in zip(some, threads.map(pixels, some), strict=True):
                if isinstance(found, str):
                    broken(found)
                else:
                    places.append({"file": shown(name)})
                    images.append(found)
            if places:
                yield Part(places, {"image": np.stack(images)})


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
