"""How a user's program is called in sentences: the file and line of a function, and of the line that raised."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

OURS = Path(__file__).parents[2]  # the package jaxlaunch
# Whose lines are no fault of the program's: the interpreter's library, what is installed, ours.
NOT_THEIRS = (
    *(f"{path}{os.sep}" for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")),
    f"{OURS}{os.sep}",
)
_FRAME = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)  # of a traceback in a message


def place(function: Any) -> str:
    """`gan.py:31 step`: where a function is defined; its name alone where it has no source, as a method of C's."""
    found = function
    while True:
        if isinstance(found, functools.partial):
            found = found.func
        elif hasattr(found, "__wrapped__"):  # of a decorator, jax.jit's too
            found = found.__wrapped__
        else:
            break
    name = str(getattr(found, "__name__", type(found).__name__))
    code = getattr(inspect.unwrap(getattr(found, "__func__", found)), "__code__", None)
    return name if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno} {name}"


def raised_at(error: BaseException) -> tuple[str, str]:
    """What an exception says, in one line, and where the program raised it: `gan.py:40 in step`, or "".

    What a callback of a compiled step raises comes as JAX's error, whose message holds the traceback as text.
    """
    said = next(iter(str(error).splitlines()), "")
    frames = [(each.filename, each.lineno or 0, each.name) for each in traceback.extract_tb(error.__traceback__)]
    if within := [(file, int(line), name) for file, line, name in _FRAME.findall(str(error))]:
        frames, said = within, str(error).strip().splitlines()[-1]
    theirs = [frame for frame in frames if is_theirs(frame[0])]
    if not theirs:
        return said, ""
    file, line, name = theirs[-1]
    return said, f"{os.path.basename(file)}:{line} in {name}"


def is_theirs(file: str) -> bool:
    """Whether a file is the program's own."""
    return not file.startswith((*NOT_THEIRS, "<frozen"))


def name_of(path: Iterable[Any]) -> str:
    """The dotted name of a leaf of a pytree: `generator.layers.0.kernel`; an nnx variable is one name."""
    found = jax.tree_util.keystr(tuple(path), simple=True, separator=".")
    return found.removesuffix(".value") or "state"


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by name."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def form(leaf: Any) -> str:
    """`float32[4, 8]` of an array; the type of anything else."""
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
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
