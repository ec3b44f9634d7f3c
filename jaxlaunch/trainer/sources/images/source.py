"""Images as they lie, by number: pixels of one size, and a label."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data.augment import Transform
from jaxlaunch.trainer.data.order import Share
from jaxlaunch.trainer.data.source import DataSource
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import build, index, listing
from jaxlaunch.trainer.sources.images.index import Index
from jaxlaunch.trainer.sources.images.picture import Broken, Picture
from jaxlaunch.trainer.spec import Images

Split = Literal["train", "eval"]


def source(data: Images, split: Split) -> Pictures | None:
    """The images of `split`; None where nothing is held out. Raises DataError."""
    whole = indexed(data, data.path, "train", "path", data.classes)
    if split == "train" and (data.eval_path is not None or whole.has_splits or not data.eval_split):
        return Pictures(data, split, whole)
    if split == "eval" and (data.eval_path is not None or whole.has_splits):
        patterns, key = (data.path, "path") if data.eval_path is None else (data.eval_path, "eval_path")
        part: Split = "eval" if data.eval_path is None else "train"
        held_out = indexed(data, patterns, part, key, data.classes or whole.classes or None)
        if data.eval_path not in (None, data.path):
            _check_apart(whole, held_out)
        return Pictures(data, split, held_out) if len(held_out) or data.eval_path is not None else None
    if not data.eval_split:
        return None
    share = Share(data.eval_split, len(whole))
    if not share.kept:
        raise DataError(f"data.eval_split = {data.eval_split} of {len(whole)} images leaves none to train on")
    if split == "eval":
        return Pictures(data, split, whole, share.held_out_index, share.held_out, f"held out {data.eval_split}")
    return Pictures(data, split, whole, share.kept_index, share.kept, f"all but {data.eval_split}")


def indexed(data: Images, patterns: str | list[str], split: Split, key: str, classes: build.Classes) -> Index:
    """The index of what the patterns name of a split, made now or earlier. Raises DataError, StorageError."""
    listed = [patterns] if isinstance(patterns, str) else patterns
    absolute = [each if remote.is_remote(each) else os.path.abspath(each) for each in listed]
    described = [absolute, split, key, classes, data.image, data.label, data.channels, data.on_broken]

    def made(folder: Path) -> Index:
        """The index of the files that are there now; `folder` takes what has to lie beside it."""
        found = listing.found(absolute, split, key)
        whole = build.built(data, found, classes, folder)
        return whole if data.on_broken == "stop" else without_broken(whole, data.channels, key)

    return index.kept(described, lambda: listing.marked(absolute, key), made)


def _check_apart(trained: Index, evaluated: Index) -> None:
    """Raises DataError for an image file that is both trained on and evaluated: the accuracy would be too good."""
    if trained.file_N is None and evaluated.file_N is None:
        of_training = {trained.file(number) for number in range(len(trained))}
        both = [name for number in range(len(evaluated)) if (name := evaluated.file(number)) in of_training]
        if both:
            raise DataError(
                f"data.path and data.eval_path both name {index.shown(both[0])}, one of {len(both)} images of the "
                f"{len(evaluated)} that are evaluated; take them out of one, or set both to the same path"
            )


def transform(data: Images, split: Split) -> Transform:
    """What makes the pixels of an example of an image."""
    return Transform(data.augment, data.shape, split)


class Pictures(DataSource):
    """`image` uint8 [H, W, C] and `label` int32; the k-th image is `pick(k)` of the index."""

    def __init__(
        self,
        data: Images,
        split: Split,
        whole: Index,
        pick: Callable[[int], int] = int,
        length: int | None = None,
        label: str = "",
    ) -> None:
        self.index, self.workers = whole, data.workers
        self.opener = f"{__name__}:opened", (data.model_dump_json(), split)
        self._data, self._pick, self._label = data, pick, label
        self._length = len(whole) if length is None else length
        self._transform = transform(data, split)
        self.takes_rng = self.may_draw = self._transform.draws
        first = data.path if isinstance(data.path, str) else data.path[0]
        self.name = f"images of {index.shown(first)}{f', {label}' if label else ''}"

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        image = self._pick(number)
        try:
            pixels = self._transform(Picture(self.index.read(image), self._data.channels), rng)
        except Broken as error:
            raise DataError(
                f"{self.name}: example {number}, {self.index.where(image)}, {error}; fix or remove it, or set "
                "data.on_broken: skip"
            ) from None
        return {"image": pixels, "label": self.index.label_N[image]}

    def where(self, number: int) -> str:
        """The file of an example, and where in it the image is."""
        return self.index.where(self._pick(number))

    def fingerprint(self) -> str:
        """Number of images and classes, and a digest of names, labels and some of the bytes."""
        classes = len(self.index.classes) or int(self.index.label_N.max(initial=-1)) + 1
        said = f"images, {len(self.index)} of {classes} classes, sha256 {self.index.digest}"
        return f"{said}, {self._label}" if self._label else said


def opened(data: str, split: Split) -> Pictures:
    """The source of a data block that is given as JSON: what a worker process opens."""
    found = source(Images.model_validate(json.loads(data)), split)
    assert found is not None, "the process that asks has it open"
    return found


# --- broken images ---

SMALL = (8, 8)  # a JPEG is decoded at an eighth for it, which takes a third of the time and meets the same damage
MOST_SAID = 10


def without_broken(index: Index, channels: int, key: str) -> Index:
    """The index of the images that can be decoded; says which were left out. Raises DataError where none can be."""
    broken = dict(faults(index, channels))
    for number, what in list(broken.items())[:MOST_SAID]:
        print(f"left out: {index.where(number)} {what}", file=sys.stderr)
    if broken:
        print(f"data.{key}: left out {len(broken)} of {len(index)} images, which cannot be decoded", file=sys.stderr)
    if len(broken) == len(index):
        raise DataError(f"data.{key}: none of the {len(index)} images can be decoded")
    is_whole_N = np.ones(len(index), bool)
    is_whole_N[list(broken)] = False
    return index.only(is_whole_N, [f"{index.where(number)} {what}" for number, what in broken.items()])


def faults(index: Index, channels: int = 3) -> Iterator[tuple[int, str]]:
    """The images that cannot be decoded, and what is wrong with each."""

    def fault(number: int) -> str | None:
        try:
            Picture(index.read(number), channels).pixels(None, SMALL)
        except Broken as error:
            return str(error)
        except (FileNotFoundError, PermissionError) as error:
            return f"cannot be read: {error.strerror}"
        return None

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for number, what in enumerate(threads.map(fault, range(len(index)), chunksize=1)):
            if what is not None:
                yield number, what
