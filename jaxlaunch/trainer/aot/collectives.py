"""The collectives of a compiled program: kind, mesh axes, bytes, and whether the schedule hides them behind compute."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlaunch.trainer.aot.program import Operation, Program, sizes

_AT_ONCE = '"is_sync":true'  # XLA's GPU compiler says so of a start that waits for its end
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")  # as HLO names them
Devices = tuple[int, ...]  # the shape of a mesh


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step, with all of its executions."""

    name: str  # of the operation that starts it
    kind: str  # one of COLLECTIVES
    axes: tuple[str, ...]  # the mesh axes that its groups span
    group: int  # devices that take part together
    times: float  # executions in a step, those in loops by their trips
    bytes: int  # of the whole array on one device: gathered, reduced, or before it is scattered
    exposed: float  # share of its time in which the schedule computes nothing else

    @property
    def wire(self) -> float:
        """Bytes that a device sends for all executions, by a ring."""
        share = (self.group - 1) / self.group if self.group else 0.0
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return self.bytes * factor * self.times


def find(program: Program, names: Sequence[str], shape: Devices, across: Mapping[str, int]) -> list[Collective]:
    """The collectives of a program for a mesh of these axes and sizes, whose devices are numbered in its order.

    `across` has the axes along which devices are in other slices, and how many slices those are.
    """
    sent = _sent(program, tuple(across), math.prod(across.values()))
    return [*_direct(program, names, shape), *_fused(program, names, shape), *sent]


def _sent(program: Program, across: tuple[str, ...], slices: int) -> Iterator[Collective]:
    """Those between TPU slices: each device hands its part to its host, and waits for what comes back."""
    for computation, times in program.runs.items():
        operations = program.computations[computation]
        for index, each in enumerate(operations):
            if each.kind == "send" and times and (found := _TRANSFER.search(each.attributes)) is not None:
                name = f'rendezvous="{found[1]}"'
                answer = next((op.name for op in operations if op.kind == "recv" and name in op.attributes), "")
                waits = [at for at, op in enumerate(operations) if op.kind == "recv-done" and answer in op.operands]
                exposed = not any(op.cycles for op in operations[index : max(waits, default=index)])
                kind = found[2].lower().replace("_", "-")
                yield Collective(each.name, kind, across, slices, times, sizes(each.result)[0], float(exposed))


_TRANSFER = re.compile(r'rendezvous="([^"]+)".*_xla_megascale_transfer_type="(\w+)"')


def _direct(program: Program, names: Sequence[str], shape: Devices) -> Iterator[Collective]:
    """Those that the schedule itself lists: at once, or as a start and a done with other work between them."""
    for computation, times in program.runs.items():
        operations = program.computations[computation]
        for index, each in enumerate(operations):
            kind = each.kind.removesuffix("-start")
            if kind in COLLECTIVES and times:
                hidden = each.kind != kind and _works_until_done(each, operations[index + 1 :], program)
                hidden = hidden and _AT_ONCE not in each.attributes
                yield _of(each, kind, names, shape, times, is_hidden=hidden)
            elif each.kind in ("async-start", "call-start") and times:  # a TPU7x's run beside its cores
                inner = next((part for part in program.parts(each) if part.kind in COLLECTIVES), None)
                if inner is not None:
                    hidden = _works_until_done(each, operations[index + 1 :], program)
                    found = _of(inner, inner.kind, names, shape, times, is_hidden=hidden)
                    yield dataclasses.replace(found, name=each.name)


def _works_until_done(start: Operation, later: Iterable[Operation], program: Program) -> bool:
    """Whether something is computed between the start of a collective and the operation that waits for it."""
    for each in later:
        if start.name in each.operands and each.kind.endswith("-done"):
            return False
        if each.cycles or each.kind in ("fusion", "custom-call", "dot", "convolution", "while"):
            return True
    return False


def _fused(program: Program, names: Sequence[str], shape: Devices) -> Iterator[Collective]:
    """Those inside fusions: a TPU's asynchronous ones run along several fusions, the same channel in each."""
    chained: dict[str, tuple[Operation, float]] = {}
    for outer, times in program.scheduled():
        if outer.kind != "fusion" or not times:
            continue
        for each in program.parts(outer):
            if each.kind not in COLLECTIVES:
                continue
            if "chain_id" in each.attributes:
                chained.setdefault(each.attribute("channel_id") or each.name, (each, times))
            else:  # the pieces of an all-reduce that each device keeps one of
                kind = "reduce-scatter" if any("all-reduce-scatter" in name for name in outer.called) else each.kind
                yield _of(each, kind, names, shape, times, is_hidden=False)
    for each, times in chained.values():
        yield _of(each, each.kind, names, shape, times, is_hidden=True)


def _of(
    each: Operation, kind: str, names: Sequence[str], shape: Devices, times: float, *, is_hidden: bool
) -> Collective:
    groups = _groups(each.attributes, int(np.prod(shape)))
    axes = tuple(name for axis, name in enumerate(names) if _varies(groups, shape, axis))
    group = groups.shape[1] if groups.size else 0
    size = _bytes(each, kind) * (group if each.kind == "reduce-scatter" else 1)
    return Collective(each.name, kind, axes, group, times, size, float(not is_hidden))


def _bytes(each: Operation, kind: str) -> int:
    """Of all arrays that one operation sends together: gathered, reduced, or before they are scattered by a start."""
    arrays, count = sizes(each.result), len(each.operands)
    if not each.kind.endswith("-start") or kind == "all-reduce":
        return sum(arrays)
    # The result of other starts is a tuple of operands and results, on a TPU with more behind them.
    return sum(arrays[:count] if kind == "reduce-scatter" else arrays[count : 2 * count])


def _varies(groups: np.ndarray[Any, Any], shape: Devices, axis: int) -> bool:
    """Whether the members of some group differ along an axis of the mesh."""
    if not groups.size:
        return False
    along = np.unravel_index(groups, shape)[axis]
    return bool((along != along[:, :1]).any())


_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]+\}(?:, ?\{[\d,]+\})*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=@?mesh\w*\[([^\]]*)\](?:, ?device_ids=\(?\[?([\d,]+)\]?(?:T\(([\d,]+)\))?\)?)? ?\{([^}]*)\}"
)


def _groups(attributes: str, devices: int) -> np.ndarray[Any, Any]:
    """The groups of devices that communicate, [groups, members], in any of the three forms that XLA writes.

    Raises ValueError for a fourth: whom it joins is not guessed.
    """
    if (listed := _LISTED.search(attributes)) is not None:
        groups = [list(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
        return np.array([group for group in groups if len(group) == len(groups[0])])
    if (iota := _IOTA.search(attributes)) is not None:
        ids = np.arange(devices).reshape(_numbers(iota[2]))
        return (ids.transpose(_numbers(iota[3])) if iota[3] else ids).reshape(_numbers(iota[1]))
    if (mesh := _MESH.search(attributes)) is not None:
        return _of_mesh(mesh, devices)
    if "replica_groups=" in attributes and "replica_groups={}" not in attributes:
        form = attributes[attributes.index("replica_groups=") :]
        raise ValueError(f"groups of devices in a form that is not known here: {form[:120]}")
    return np.arange(devices).reshape(1, -1)  # no groups: all devices together


def _of_mesh(found: re.Match[str], devices: int) -> np.ndarray[Any, Any]:
    """Groups along axes of a mesh of XLA's own: `mesh['a'=2,'b'=4] {'b'}`, an axis also in part, `'b':(1)2`."""
    names, extents = zip(*re.findall(r"'(\w+)'=(\d+)", found[1]), strict=True)
    ids = np.arange(devices)
    if found[2]:
        ids = ids.reshape(_numbers(found[2]))
        ids = (ids.transpose(_numbers(found[3])) if found[3] else ids).reshape(-1)
    shape, chosen = [], []
    of = {name: (int(before or 1), int(size or 0)) for name, before, size in _PART.findall(found[4])}
    for name, extent in zip(names, map(int, extents), strict=True):
        before, size = of.get(name, (1, 1))
        size = size or (extent if name in of else 1)
        chosen += [False, name in of, False]
        shape += [before, size, extent // (before * size)]
    order = sorted(range(len(shape)), key=chosen.__getitem__)
    members = int(np.prod([size for size, is_chosen in zip(shape, chosen, strict=True) if is_chosen]))
    return ids.reshape(shape).transpose(order).reshape(-1, members)


_PART = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
