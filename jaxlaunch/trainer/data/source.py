"""The interface that the trainer reads examples by: random access, a length, an identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data.messages import Draws, Item


@runtime_checkable
class Source(Protocol):
    """The interface of what a task's `source` returns: examples with the indexes 0 to len − 1, each of which can be
    read at any time, whatever was read before. Any class with these methods is a source.

    A source may also have a `name`, one or two words that error messages use for it (by default its class), and
    `is_light`, which is true if one thread reads faster than several.

    **Example:**

    ```python
    import jaxlaunch
    import numpy as np


    class Squares:
        def __len__(self):
            return 100

        def __getitem__(self, index):
            return {"x": np.float32(index), "y": np.float32(index**2)}

        def fingerprint(self):
            return "the squares of 0 to 99"


    assert isinstance(Squares(), jaxlaunch.Source)
    ```
    """

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """The stored example with this index, a dict by name, which the task's `example` turns into arrays. Several
        threads call this method at the same time."""
        ...

    def fingerprint(self) -> str:
        """The identity of the data in one readable line, which stays the same as long as the examples and their order
        do. A run that resumes with different data ends with exit code 65."""
        ...


@runtime_checkable
class Ordered(Source, Protocol):
    """A source that says itself which example is at which position, and how often its parts were seen."""

    def indexes(self, start: int, stop: int, *, seed: int, shuffle: bool) -> npt.NDArray[np.int64]:
        """Indexes at positions `start` … `stop` − 1 of the endless sequence: a function of them and of the seed."""
        ...

    def epochs(self, positions: int) -> dict[str, float]:
        """Passes over each part in the first `positions` of the sequence, by its name."""
        ...


@runtime_checkable
class Rowed(Source, Protocol):
    """A source in memory, which gives many examples at once; one by one they cost more than they weigh."""

    def rows(self, index_B: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """What `self[index]` has under each key, for every index in turn: [B, ...], in memory of its own."""
        ...


@runtime_checkable
class Apart(Source, Protocol):
    """A source whose items other processes may read; `workers` of them, none if 0."""

    workers: int

    def items(self, index_B: list[int], position_B: list[int], how: Draws) -> list[Item]:
        """The items under these indexes, drawn as at these positions, of another process. Raises TrainerError."""
        ...


@runtime_checkable
class Parted(Source, Protocol):
    """A source of several parts, of which an evaluation tells the means apart."""

    @property
    def evaluated_parts(self) -> Mapping[str, range]:
        """The indexes of each part by its name; together all."""
        ...


def name_of(source: Source) -> str:
    """The name of `source` in error messages."""
    return str(getattr(source, "name", type(source).__name__))
