"""Decodes every image of an index once, to know which cannot be."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images.index import Index
from jaxlaunch.trainer.sources.images.picture import Broken, Picture

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
        """What is wrong with one."""
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
