"""What a compiled step says to other devices, read from its text."""

# ruff: noqa: E501  # the text of programs

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from jaxlaunch.trainer.step.train_step import Step

_KINDS = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
_LINE = re.compile(rf"= (\(.*?\)|\S+) ({_KINDS})(?:-start)?\(")
_NEIGHBOURS = re.compile(
    r"replica_groups=(\[\d+,2\]<=\[\d+\][,}]|\{\{0,1\}[,}]|mesh\[[^\]]*'(axis_\d)'=2(,'axis_\d'=1)*\] \{'\2'\})"
)
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


class Collective(NamedTuple):
    """One array of one collective; several may travel in one."""

    kind: str
    shape: tuple[int, ...]  # of the result, on one device
    in_layer: bool  # inside the scan over the layers
    is_backward: bool
    is_of_neighbours: bool  # each device with the next: the groups of a last mesh axis of 2


def count_collectives(step: Step) -> list[Collective]:
    """Every collective of the compiled train step."""
    return list(_read(step._train_programs[1]._compiled.as_text()))


def _read(text: str) -> Iterator[Collective]:
    for line in text.splitlines():
        result = _LINE.search(line)
        if result is None:
            continue
        name = re.search(r'op_name="([^"]*)"', line)
        place = name[1] if name else ""
        # The one loop of a step with a single micro-batch is over layers. What travels in one has
        # all names, by colons.
        in_layer, is_backward = "while/body" in place, "transpose(" in place
        near = _NEIGHBOURS.search(line) is not None
        for shape in _SHAPE.findall(re.sub(r"\{[^}]*\}", "", result[1])):
            yield Collective(
                result[2], tuple(int(n) for n in shape.split(",") if n), in_layer, is_backward, near
            )
