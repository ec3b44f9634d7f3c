"""Finds the collectives of a compiled program, with their mesh axes, bytes, and exposed share.

A collective has one of several forms: one operation of the schedule, a pair of operations (start
and done), an operation inside a fusion, or a send and a receive between TPU slices. It is hidden if
the device computes something else at the same time, and otherwise exposed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxlaunch.trainer.numerics.hlo import Computation, Operation, Program, array_bytes

# Names of HLO opcodes.
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
# XLA's GPU compiler adds this to a start operation that waits until the collective is complete.
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
# Sizes of the mesh axes.
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step, with all of its executions.

    Attributes:
        name: Name of the operation that starts it.
        kind: The opcode, one of COLLECTIVES.
        axes: Mesh axes that its groups span.
        group_size: Number of devices that take part together.
        executions: Executions in a step; those in loops are multiplied by the trip counts.
        size_bytes: Bytes of the whole array on one device, after a gather or a reduction, or before
            a scatter.
        exposed_share: Share of its time in which the device computes nothing else.
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
    program: Program, names: Sequence[str], shape: Shape, slices_by_axis: Mapping[str, int]
) -> list[Collective]:
    """Return the collectives of a program.

    Args:
        program: The program.
        names: Axes of the mesh, in whose order the devices are numbered.
        shape: Sizes of these axes.
        slices_by_axis: Number of slices along each axis that spans more than one.
    """
    slice_axes, slices = tuple(slices_by_axis), math.prod(slices_by_axis.values())
    return [
        *_find_scheduled(program, names, shape),
        *_find_fused(program, names, shape),
        *_find_transfers(program, slice_axes, slices),
    ]


def _scheduled_operations(
    program: Program,
) -> Iterator[tuple[Computation, int, Operation, float]]:
    """Yield (computation, index in it, operation, executions) for each executed operation."""
    for name, times in program.executions.items():
        for index, operation in enumerate(program.computations[name]):
            if times:
                yield program.computations[name], index, operation, times


def _find_transfers(program: Program, axes: tuple[str, ...], slices: int) -> Iterator[Collective]:
    """Yield collectives between TPU slices, for which each device sends its data to the host."""
    for operations, index, send, times in _scheduled_operations(program):
        if send.kind == "send" and (match := _TRANSFER.search(send.attributes)) is not None:
            rendezvous = f'rendezvous="{match[1]}"'
            receives = (op for op in operations if op.kind == "recv")
            receive = next((op.name for op in receives if rendezvous in op.attributes), "")
            done_indexes = [
                done_index
                for done_index, op in enumerate(operations)
                if op.kind == "recv-done" and receive in op.operands
            ]
            concurrent = operations[index : max(done_indexes, default=index)]
            is_exposed = not any(op.cycles for op in concurrent)
            kind, size_bytes = match[2].lower().replace("_", "-"), array_bytes(send.result)[0]
            yield Collective(send.name, kind, axes, slices, times, size_bytes, float(is_exposed))


def _find_scheduled(program: Program, names: Sequence[str], shape: Shape) -> Iterator[Collective]:
    """Yield collectives of the schedule itself: synchronous ones, and pairs of start and done."""
    for operations, index, operation, times in _scheduled_operations(program):
        kind = operation.kind.removesuffix("-start")
        collective = None
        if kind in COLLECTIVES:
            collective = _read_collective(operation, kind, names, shape, times)
            is_asynchronous = operation.kind != kind and (
                _SYNCHRONOUS_START not in operation.attributes
            )
        elif operation.kind in ("async-start", "call-start"):
            # A TPU7x runs these in parallel to the cores that multiply.
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
    """Yield collectives inside fusions. On TPUs an asynchronous one may span several fusions."""
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
                # In an all-reduce-scatter each device keeps one part of an all-reduce.
                computations = " ".join(fusion.called_computations)
                kind = "reduce-scatter" if "all-reduce-scatter" in computations else part.kind
                yield _read_collective(part, kind, names, shape, times)
    for part, times in chained.values():
        collective = _read_collective(part, part.kind, names, shape, times)
        yield dataclasses.replace(collective, exposed_share=0.0)


def _read_collective(
    operation: Operation, kind: str, names: Sequence[str], shape: Shape, times: float
) -> Collective:
    """Return the collective of an operation, as if it were fully exposed."""
    groups = _read_groups(operation.attributes, math.prod(shape))
    group, axes = 0, tuple[str, ...]()
    if groups.size:
        group = groups.shape[1]
        # The axes along which the members of a group have different coordinates.
        coordinates = zip(names, np.unravel_index(groups, shape), strict=True)
        axes = tuple(name for name, indexes in coordinates if (indexes != indexes[:, :1]).any())
    # One operation may send several arrays.
    arrays, count = array_bytes(operation.result), len(operation.operands)
    if operation.kind.endswith("-start") and kind != "all-reduce":
        # The result of these starts is a tuple of all operands and then all results. On TPUs, other
        # values follow.
        arrays = arrays[:count] if kind == "reduce-scatter" else arrays[count : 2 * count]
    size_bytes = sum(arrays) * (group if operation.kind == "reduce-scatter" else 1)
    return Collective(operation.name, kind, axes, group, times, size_bytes, 1.0)


def _read_groups(attributes: str, devices: int) -> np.ndarray[Any, Any]:
    """Return the groups of devices that communicate, [groups, members].

    XLA has three notations for them. Raises ValueError for any other one.
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
    # Without groups all devices communicate.
    return np.arange(devices).reshape(1, -1)


def _read_mesh_groups(mesh: re.Match[str], devices: int) -> np.ndarray[Any, Any]:
    """Return the groups of a notation such as `mesh['a'=2,'b'=4] {'b'}`: all devices along b.

    A group may also be a part of an axis, `'b':(1)2`: the outer size, and the size of the part.
    """
    ids = _device_ids(devices, mesh[2] or str(devices), mesh[3])
    shape, is_member = [], []
    group_axes = _MESH_AXIS.findall(mesh[4])
    axes = {name: (int(outer or 1), int(size or 0)) for name, outer, size in group_axes}
    for name, extent in re.findall(r"'(\w+)'=(\d+)", mesh[1]):
        outer_size, size = axes.get(name, (1, 1))
        size = size or int(extent)
        shape += [outer_size, size, int(extent) // (outer_size * size)]
        is_member += [False, name in axes, False]
    order = sorted(range(len(shape)), key=is_member.__getitem__)
    members = math.prod(size for size, flag in zip(shape, is_member, strict=True) if flag)
    return ids.reshape(shape).transpose(order).reshape(-1, members)


def _device_ids(devices: int, shape: str, order: str | None) -> np.ndarray[Any, Any]:
    ids = np.arange(devices).reshape(_parse_ints(shape))
    return ids.transpose(_parse_ints(order)) if order else ids


def _parse_ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
