"""The collectives of a compiled program: kind, mesh axes, bytes, and what hides them."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlaunch.trainer.numerics.hlo import Computation, Operation, Program, array_bytes

# The names are those of HLO.
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# XLA's GPU compiler marks a start with this if it waits for its end.
_SYNCHRONOUS_START = '"is_sync":true'
_TRANSFER = re.compile(r'rendezvous="([^"]+)".*_xla_megascale_transfer_type="(\w+)"')
_LISTED_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=\{(\{[\d,]+\}(?:, ?\{[\d,]+\})*)\}"
)
_IOTA_GROUPS = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH_GROUPS = re.compile(
    r"replica_groups=@?mesh\w*\[([^\]]*)\](?:, "
    r"?device_ids=\(?\[?([\d,]+)\]?(?:T\(([\d,]+)\))?\)?)? ?\{([^}]*)\}"
)
_MESH_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")
_COMPUTE_KINDS = ("fusion", "custom-call", "dot", "convolution", "while")
Shape = tuple[int, ...]  # sizes of the mesh axes


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step, with all of its executions.

    Attributes:
        name: Name of the operation that starts it.
        kind: One of COLLECTIVES.
        axes: Mesh axes that its groups span.
        group_size: Number of devices that take part together.
        executions: Executions in a step; those in loops are multiplied by the trip counts.
        size_bytes: Bytes of the whole array on one device: after a gather or reduction, or before a
            scatter.
        exposed_share: Share of its time in which the schedule computes nothing else.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    group_size: int
    executions: float
    size_bytes: int
    exposed_share: float

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends for all executions with a ring algorithm."""
        share = (self.group_size - 1) / self.group_size if self.group_size else 0.0
        factor = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return self.size_bytes * factor * self.executions


def find_collectives(
    program: Program, names: Sequence[str], shape: Shape, across: Mapping[str, int]
) -> list[Collective]:
    """Return the collectives of a program.

    `names` and `shape` are the axes of the mesh, whose devices are numbered in its order, and
    their sizes; `across` is the number of slices along each axis that spans several.
    """
    return [
        *_find_scheduled(program, names, shape),
        *_find_fused(program, names, shape),
        *_find_transfers(program, tuple(across), math.prod(across.values())),
    ]


def _scheduled(program: Program) -> Iterator[tuple[Computation, int, Operation, float]]:
    """Yield each operation that is executed: its computation, its place in it, and how often."""
    for name, times in program.executions.items():
        for index, operation in enumerate(program.computations[name]):
            if times:
                yield program.computations[name], index, operation, times


def _find_transfers(program: Program, across: tuple[str, ...], slices: int) -> Iterator[Collective]:
    """Yield collectives between TPU slices, which each device sends to its host."""
    for operations, index, send, times in _scheduled(program):
        if send.kind == "send" and (match := _TRANSFER.search(send.attributes)) is not None:
            rendezvous = f'rendezvous="{match[1]}"'
            receives = (op for op in operations if op.kind == "recv")
            answer = next((op.name for op in receives if rendezvous in op.attributes), "")
            waits = [
                at
                for at, op in enumerate(operations)
                if op.kind == "recv-done" and answer in op.operands
            ]
            exposed = not any(op.cycles for op in operations[index : max(waits, default=index)])
            kind, size_bytes = match[2].lower().replace("_", "-"), array_bytes(send.result)[0]
            yield Collective(send.name, kind, across, slices, times, size_bytes, float(exposed))


def _find_scheduled(program: Program, names: Sequence[str], shape: Shape) -> Iterator[Collective]:
    """Yield collectives of the schedule itself: synchronous ones, and pairs of start and done."""
    for operations, index, operation, times in _scheduled(program):
        kind = operation.kind.removesuffix("-start")
        collective = None
        if kind in COLLECTIVES:
            collective = _read_collective(operation, kind, names, shape, times)
            is_asynchronous = operation.kind != kind and (
                _SYNCHRONOUS_START not in operation.attributes
            )
        elif operation.kind in ("async-start", "call-start"):
            # A TPU7x runs these in parallel to its cores.
            parts = program.fused_operations(operation)
            inner = next((part for part in parts if part.kind in COLLECTIVES), None)
            if inner is not None:
                collective = _read_collective(inner, inner.kind, names, shape, times)
                is_asynchronous = True
        if collective is not None:
            later = operations[index + 1 :]
            is_hidden = is_asynchronous and _computes_until_done(operation, later)
            yield dataclasses.replace(
                collective, name=operation.name, exposed_share=float(not is_hidden)
            )


def _computes_until_done(start: Operation, later: Iterable[Operation]) -> bool:
    """Return whether anything is computed between the start and the end of a collective."""
    for operation in later:
        if start.name in operation.operands and operation.kind.endswith("-done"):
            return False
        if operation.cycles or operation.kind in _COMPUTE_KINDS:
            return True
    return False


def _find_fused(program: Program, names: Sequence[str], shape: Shape) -> Iterator[Collective]:
    """Yield collectives inside fusions. A TPU's asynchronous ones span several fusions."""
    chained: dict[str, tuple[Operation, float]] = {}
    for fusion, times in program.scheduled_operations():
        if fusion.kind != "fusion" or not times:
            continue
        for part in program.fused_operations(fusion):
            if part.kind not in COLLECTIVES:
                continue
            if "chain_id" in part.attributes:
                chained.setdefault(part.read_attribute("channel_id") or part.name, (part, times))
            else:
                # Each device keeps one piece of an all-reduce.
                called = " ".join(fusion.called_computations)
                kind = "reduce-scatter" if "all-reduce-scatter" in called else part.kind
                yield _read_collective(part, kind, names, shape, times)
    for part, times in chained.values():
        collective = _read_collective(part, part.kind, names, shape, times)
        yield dataclasses.replace(collective, exposed_share=0.0)


def _read_collective(
    operation: Operation, kind: str, names: Sequence[str], shape: Shape, times: float
) -> Collective:
    """Return a collective that nothing hides."""
    groups = _read_groups(operation.attributes, math.prod(shape))
    group, axes = 0, tuple[str, ...]()
    if groups.size:
        group = groups.shape[1]
        # The axes along which the members of some group differ.
        places = zip(names, np.unravel_index(groups, shape), strict=True)
        axes = tuple(name for name, along in places if (along != along[:, :1]).any())
    # One operation may send several arrays.
    arrays, count = array_bytes(operation.result), len(operation.operands)
    if operation.kind.endswith("-start") and kind != "all-reduce":
        # The result of the other starts is a tuple of operands and results, followed by further
        # values on a TPU.
        arrays = arrays[:count] if kind == "reduce-scatter" else arrays[count : 2 * count]
    size_bytes = sum(arrays) * (group if operation.kind == "reduce-scatter" else 1)
    return Collective(operation.name, kind, axes, group, times, size_bytes, 1.0)


def _read_groups(attributes: str, devices: int) -> np.ndarray[Any, Any]:
    """Return the groups of devices that communicate, [groups, members], by XLA's three notations.

    Raises ValueError for an unknown notation.
    """
    if (listed := _LISTED_GROUPS.search(attributes)) is not None:
        groups = [_parse_ints(group) for group in re.findall(r"\{([\d,]+)\}", listed[1])]
        return np.array([group for group in groups if len(group) == len(groups[0])])
    if (iota := _IOTA_GROUPS.search(attributes)) is not None:
        return _device_ids(devices, iota[2], iota[3]).reshape(_parse_ints(iota[1]))
    if (mesh := _MESH_GROUPS.search(attributes)) is not None:
        return _read_mesh_groups(mesh, devices)
    if "replica_groups=" in attributes and "replica_groups={}" not in attributes:
        form = attributes[attributes.index("replica_groups=") :]
        raise ValueError(f"groups of devices in a form that is not known here: {form[:120]}")
    # Without groups all devices take part.
    return np.arange(devices).reshape(1, -1)


def _read_mesh_groups(mesh: re.Match[str], devices: int) -> np.ndarray[Any, Any]:
    """Return groups along axes of XLA's own mesh, `mesh['a'=2,'b'=4] {'b'}`, or parts of one."""
    ids = _device_ids(devices, mesh[2] or str(devices), mesh[3])
    shape, is_chosen = [], []
    found_axes = _MESH_AXIS.findall(mesh[4])
    axes = {name: (int(outer or 1), int(size or 0)) for name, outer, size in found_axes}
    for name, extent in re.findall(r"'(\w+)'=(\d+)", mesh[1]):
        outer_size, size = axes.get(name, (1, 1))
        size = size or int(extent)
        shape += [outer_size, size, int(extent) // (outer_size * size)]
        is_chosen += [False, name in axes, False]
    order = sorted(range(len(shape)), key=is_chosen.__getitem__)
    members = math.prod(size for size, is_member in zip(shape, is_chosen, strict=True) if is_member)
    return ids.reshape(shape).transpose(order).reshape(-1, members)


def _device_ids(devices: int, shape: str, order: str | None) -> np.ndarray[Any, Any]:
    ids = np.arange(devices).reshape(_parse_ints(shape))
    return ids.transpose(_parse_ints(order)) if order else ids


def _parse_ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
