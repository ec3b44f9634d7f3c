"""What a set of images holds: classes, sizes, formats, files that are broken or there twice."""

from __future__ import annotations

import collections
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from jaxlaunch.trainer.inspect import sheet
from jaxlaunch.trainer.sources.images import scan
from jaxlaunch.trainer.sources.images.index import Index
from jaxlaunch.trainer.sources.images.picture import Broken, Picture
from jaxlaunch.trainer.sources.images.source import indexed
from jaxlaunch.trainer.spec import Images

LISTED = 10  # broken or duplicate files that are named
USUAL = 224  # pixels, where images are of several sizes


class Seen(NamedTuple):
    """One image: what is wrong with it or its size and format, and a digest of its bytes."""

    wrong: str | None
    size: tuple[int, int] | None
    form: str
    digest: bytes


def looked(path: str, place: str, label: str | None, pictures: str | None) -> dict[str, Any]:
    """What is there, and the data block that reads it. Raises DataError."""
    data = Images(source="images", path=place, label=label)
    train = indexed(data, place, "train", "path", None)
    splits = {"train": train}
    if train.has_splits and len(held := indexed(data, place, "eval", "path", train.classes or None)):
        splits["eval"] = held
    seen = [(index, number, each) for index in splits.values() for number, each in enumerate(_seen(index))]
    broken = [f"{index.where(number)} {each.wrong}" for index, number, each in seen if each.wrong]
    sizes = np.array([each.size for *_, each in seen if each.size])
    twice = _twice(seen)
    block: dict[str, Any] = {"source": "images", "path": path}
    if len(sizes):
        is_one = len(np.unique(sizes, axis=0)) == 1
        block["size"] = (sizes[0].tolist() if sizes[0][0] != sizes[0][1] else int(sizes[0][0])) if is_one else USUAL
    block |= {"label": label} if label else {}
    block |= {} if "eval" in splits else {"eval_split": 0.1}
    block |= {"on_broken": "skip"} if broken else {}
    classes = [*train.classes] or [str(number) for number in range(int(train.label_N.max()) + 1)]
    if pictures is not None:
        sheet.of_images(train, classes, pictures)
    return {
        "kind": "images",
        "splits": {split: len(index) for split, index in splits.items()},
        "classes": {
            split: dict(zip(classes, np.bincount(index.label_N, minlength=len(classes)).tolist(), strict=False))
            for split, index in splits.items()
        },
        "formats": dict(collections.Counter(each.form for *_, each in seen if each.form).most_common()),
        "sizes": _spread(sizes),
        "left_out": train.left_out,
        "broken": {"count": len(broken), "first": broken[:LISTED]},
        "duplicates": {"count": len(twice), "first": twice[:LISTED]},
        "data": block,
        "model": {"classes": len(classes)},
    }


def _seen(index: Index) -> Iterator[Seen]:
    def of(number: int) -> Seen:
        """Reads and decodes one image, at an eighth where it can be."""
        try:
            data = index.read(number)
        except Broken as error:
            return Seen(str(error), None, "", b"")
        except (FileNotFoundError, PermissionError) as error:
            return Seen(f"cannot be read: {error.strerror}", None, "", b"")
        digest = hashlib.sha256(data).digest()[:16]
        try:
            picture = Picture(data)
            size, form = picture.size, " ".join(picture.about)
            picture.pixels(None, scan.SMALL)
        except Broken as error:
            return Seen(str(error), None, "", digest)
        return Seen(None, size, form, digest)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        yield from threads.map(of, range(len(index)))


def _twice(seen: list[tuple[Index, int, Seen]]) -> list[str]:
    """Images whose bytes another has, before them."""
    first: dict[bytes, tuple[Index, int]] = {}
    found = []
    for index, number, each in seen:
        if each.digest and not each.wrong:
            other, at = first.setdefault(each.digest, (index, number))
            if other is not index or at != number:
                found.append(f"{index.where(number)} is {other.where(at)}")
    return found


def _spread(sizes: np.ndarray[Any, Any]) -> dict[str, list[int]]:
    """Least, median and most height and width."""
    if not len(sizes):
        return {}
    found = (sizes.min(0), np.median(sizes, axis=0), sizes.max(0))
    return {name: [int(side) for side in each] for name, each in zip(("least", "median", "most"), found, strict=True)}
