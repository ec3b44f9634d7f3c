"""What a compiled step says to other devices, read from its text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from trainer.step import Step

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_LINE = re.compile(rf"= (\(.*?\)|\S+) ({_KINDS})(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


class Collective(NamedTuple):
    """One array of one collective; several may travel in one."""

    kind: str
    shape: tuple[int, ...]  # of the result, on one device
    in_layer: bool  # inside the scan over the layers
    is_backward: bool


def of(step: Step) -> list[Collective]:
    """Every collective of the compiled train step."""
    return list(_read(step._train[1]._compiled.as_text()))


def _read(text: str) -> Iterator[Collective]:
    for line in text.splitlines():
        found = _LINE.search(line)
        if found is None:
            continue
        name = re.search(r'op_name="([^"]*)"', line)
        where = name[1] if name else ""
        # The first loop is over micro-batches, the second over layers.
        in_layer, is_backward = where.count("while/body") >= 2, "transpose(" in where
        for shape in _SHAPE.findall(re.sub(r"\{[^}]*\}", "", found[1])):
            yield Collective(found[2], tuple(int(n) for n in shape.split(",") if n), in_layer, is_backward)
