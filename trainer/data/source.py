"""What the trainer reads from: random access, a length, an identity."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Source(Protocol):
    """A set of examples under indexes 0 … len − 1; reading one does not depend on what was read before.

    A source may also have `name`, a word or two that error messages call it by; without one its class names it.
    """

    def __len__(self) -> int:
        """How many examples there are."""
        ...

    def __getitem__(self, index: int, /) -> dict[str, Any]:
        """Example `index`, as stored. Called from several threads at once."""
        ...

    def fingerprint(self) -> str:
        """The identity of the data in one readable line: equal while the examples and their order are equal."""
        ...


def called(source: Source) -> str:
    """What error messages call `source`."""
    return str(getattr(source, "name", type(source).__name__))
