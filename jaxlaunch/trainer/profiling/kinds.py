"""The kind of each operation of a compiled program, read from the program's text. Pure.

The names of operations tell little: `fusion.12` may hold a matrix product or add two vectors. XLA's own text of the
compiled program states what is in it, and which scope of ours it comes from; it is the same on CPU, GPU and TPU.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

MATMUL, ATTENTION, ELEMENTWISE, COLLECTIVES = "matmul", "attention", "elementwise", "collectives"

# Opcodes that hold others, or do nothing: what runs inside them has a name of its own.
_HOLDERS = frozenset("while conditional call tuple get-tuple-element parameter constant bitcast".split())
_COLLECTIVES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast "
    "send recv".split()
)
_HOLDER = re.compile(r"(?:while|conditional|call)(?:\.\d+)?$")
_MATMULS = frozenset(("dot", "convolution", "ragged-dot", "scaled-dot"))
_SCOPE = re.compile(r"(?:^|[/(;])attention(?:$|[/);])")  # of jax.named_scope, as differentiation leaves it
_ATTENTION = re.compile(r"fmha|flash|splash|dot_product_attention", re.IGNORECASE)  # names of kernels
_MATMUL = re.compile(r"gemm|matmul|cutlass|nvjet|xmma|conv(?!ert)|(?:^|[_\W])dot", re.IGNORECASE)
_COLLECTIVE = re.compile("nccl|" + "|".join(_COLLECTIVES - {"send", "recv"}).replace("-", "[-_]?"), re.IGNORECASE)

_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s*(?:ROOT )?%?([\w.\-]+) = (?:\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_CALLS = re.compile(r"calls=%?([\w.\-]+)")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


class _Instruction(NamedTuple):
    name: str
    opcode: str
    op_name: str  # where in our program it comes from
    target: str  # of a custom call
    calls: str  # the computation that it fuses


def of_programs(texts: Iterable[str]) -> dict[str, str | None]:
    """The kind of each operation of compiled programs; None for those that only contain others.

    By `program/operation`, and by the operation alone for readers that do not know the program: the first program's.
    """
    found: dict[str, str | None] = {}
    for text in texts:
        program, computations = _first(_MODULE, text), _computations(text)
        for one in itertools.chain(*computations.values()):
            kind = _kind(one, computations)
            found[f"{program}/{one.name}"] = kind
            found.setdefault(one.name, kind)
    return found


def of_kernel(name: str) -> str | None:
    """The kind of an operation of another program, or of a kernel, of which only the name is known."""
    if _HOLDER.match(name):
        return None
    if _COLLECTIVE.search(name):
        return COLLECTIVES
    if _ATTENTION.search(name):
        return ATTENTION
    return MATMUL if _MATMUL.search(name) else ELEMENTWISE


def _computations(text: str) -> dict[str, list[_Instruction]]:
    found: dict[str, list[_Instruction]] = {}
    inside: list[_Instruction] = []
    for line in text.splitlines():
        if (head := _COMPUTATION.match(line)) is not None:
            inside = found.setdefault(head[1], [])
        elif (one := _INSTRUCTION.match(line)) is not None:
            inside.append(_Instruction(one[1], one[2], *(_first(part, line) for part in (_OP_NAME, _TARGET, _CALLS))))
    return found


def _first(pattern: re.Pattern[str], line: str) -> str:
    found = pattern.search(line)
    return found[1] if found else ""


def _kind(one: _Instruction, computations: Mapping[str, list[_Instruction]]) -> str | None:
    if one.opcode in _HOLDERS:
        return None
    parts = [one, *_within(one, computations)]
    if any(_plain(part.opcode) in _COLLECTIVES for part in parts):
        return COLLECTIVES
    scopes = [one.op_name] if one.op_name else [part.op_name for part in parts]
    if any(map(_SCOPE.search, scopes)) or any(_ATTENTION.search(part.target) for part in parts):
        return ATTENTION
    if any(part.opcode in _MATMULS or (part.target and of_kernel(part.target) == MATMUL) for part in parts):
        return MATMUL
    return ELEMENTWISE


def _within(one: _Instruction, computations: Mapping[str, list[_Instruction]]) -> Iterator[_Instruction]:
    for part in computations.get(one.calls, ()) if one.calls else ():
        yield part
        yield from _within(part, computations)


def _plain(opcode: str) -> str:
    """The opcode of an operation that begins and ends in two: all-gather-start, all-gather-done."""
    return re.sub(r"-(?:start|update|done)$", "", opcode)
