"""The interface that the trainer reads examples by: random access, a length, an identity."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data.messages import Draws, Item


@runtime_checkable
class Source(Protocol):
    """What a task's `source` returns: examples under the indexes 0 to len − 1, of which each can be read at any time,
    whatever was read before. A protocol: any class with these methods is one.

    A source may also have `name`, one or two words by which error messages call it (by default its class), and
    `is_light`, true where one thread reads faster than several.

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
        """How many examples there are."""
        ...

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Example `index` as it is stored, a dict by name, of which the task's `example` makes arrays. Called from
        several threads at once."""
        ...

    def fingerprint(self) -> str:
        """The identity of the data in one readable line, equal while the examples and their order are equal. A run that
        resumes on other data ends with exit code 65."""
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
