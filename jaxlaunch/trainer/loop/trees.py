"""The leaves of a pytree in sentences: their names, shapes and types, and where two trees differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax


@runtime_checkable
class ArrayLike(Protocol):
    """An array of any library."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


def name_of(path: Iterable[Any]) -> str:
    """The dotted name of a leaf of a pytree: `generator.layers.0.kernel`; an nnx variable is one name."""
    found = jax.tree_util.keystr(tuple(path), simple=True, separator=".")
    return found.removesuffix(".value") or "state"


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by name."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def form(leaf: Any) -> str:
    """`float32[4, 8]` of an array; the type of anything else."""
    if not isinstance(leaf, ArrayLike):
        return kind(leaf)
    return f"{leaf.dtype}[{', '.join(map(str, leaf.shape))}]"


def kind(found: Any) -> str:
    """`a dict`, `a tuple of 3`, `None`."""
    if found is None:
        return "None"
    name = type(found).__name__
    words = f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
    return f"{words} of {len(found)}" if isinstance(found, tuple | list) else words


def listed(names: Iterable[Any], most: int = 5) -> str:
    """The first few names."""
    every = list(map(str, names))
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def differing(then: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first leaf whose shape or dtype is another, or that one of them alone has, as words; None: there is none."""
    for name in [*then, *(name for name in now if name not in then)]:
        if name not in now:
            return f"no {name} ({form(then[name])})"
        if name not in then:
            return f"{name} ({form(now[name])}), which is new"
        if form(then[name]) != form(now[name]):
            return f"{name} as {form(now[name])}, not {form(then[name])}"
    return None
