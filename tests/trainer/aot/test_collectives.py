"""Reading of a compiled program's text: loops, groups of devices, and hidden collectives."""

# ruff: noqa: E501  # the text of programs

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest

from jaxlaunch.trainer.aot.collectives import Collective, find_collectives
from jaxlaunch.trainer.numerics.hlo import Program, array_bytes

AXES, SHAPE = ("dp", "fsdp", "ep", "mp"), (2, 2, 1, 2)

# A loop of three trips by its condition, one of five by its attribute inside it, and a fusion that
# both call.
LOOPS = """HloModule jit_step, is_scheduled=true

%work (a.1: f32[8]) -> f32[8] {
  %a.1 = f32[8]{0} parameter(0)
  ROOT %double = f32[8]{0} add(%a.1, %a.1)
}

%inner (b: (s32[], f32[8])) -> (s32[], f32[8]) {
  %b = (s32[], f32[8]{0}) parameter(0)
  %x = f32[8]{0} get-tuple-element(%b), index=1
  %used = f32[8]{0} fusion(%x), kind=kLoop, calls=%work, backend_config={"window_config":{"estimated_cycles":"10"}}
}

%inner_end (b2: (s32[], f32[8])) -> pred[] {
  %b2 = (s32[], f32[8]{0}) parameter(0)
}

%body (c: (s32[], s32[], f32[8])) -> (s32[], s32[], f32[8]) {
  %c = (s32[], s32[], f32[8]{0}) parameter(0)
  %t = (s32[], f32[8]{0}) tuple(%c)
  %again = (s32[], f32[8]) while(%t), condition=%inner_end, body=%inner, backend_config={"known_trip_count":{"n":"5"}}
}

%end (d: (s32[], s32[], f32[8])) -> pred[] {
  %d = (s32[], s32[], f32[8]{0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%d), index=0
  %n = s32[]{:T(128)} get-tuple-element(%d), index=1
  ROOT %less = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %zero = s32[] constant(0)
  %three = s32[] constant(3)
  %kept = s32[] copy(%three)
  %all = (s32[], s32[], f32[8]{0}) tuple(%zero, %kept, %p)
  %loop = (s32[], s32[], f32[8]{0}) while(%all), condition=%end, body=%body
  ROOT %last = f32[8]{0} get-tuple-element(%loop), index=2
}
"""


def test_operations_in_loops_are_multiplied_by_trip_counts() -> None:
    result = Program.from_text(LOOPS)
    assert result.executions == {"main": 1, "body": 3, "end": 4, "inner": 15, "inner_end": 18}
    assert (
        sum(operation.cycles * times for operation, times in result.scheduled_operations()) == 150
    )


def test_program_without_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        Program.from_text("HloModule empty\n")


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [
        ("bf16[1,512,2048]{2,1,0:T(8,128)(2,1)S(1)}", [2_097_152]),
        ("(f32[8]{0}, u32[], pred[3])", [32, 4, 3]),
        ("f8e4m3fn[16]", [16]),
        ("s4[16]{0}", [8]),
    ],
)
def test_array_bytes_of_shapes(shape: str, sizes: list[int]) -> None:
    assert array_bytes(shape) == sizes


def collectives_in_loop(
    *lines: str, fused: str = "", across: Mapping[str, int] = MappingProxyType({})
) -> list[Collective]:
    """The collectives of a program of these lines on the mesh of 8 devices."""
    body = "\n".join(f"  {line}" for line in lines)
    return find_collectives(
        Program.from_text(f"{fused}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"),
        AXES,
        SHAPE,
        across,
    )


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("mp",)),
        ("replica_groups={{0,2},{1,3},{4,6},{5,7}}", ("fsdp",)),
        ("replica_groups=[4,2]<=[8]", ("mp",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("dp",)),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ("dp", "mp")),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("mp",)),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}", ("dp", "fsdp")),
        ("replica_groups=mesh['axis_0'=8] {'axis_0':(2)2}", ("fsdp",)),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}",
            ("fsdp", "mp"),
        ),
        (
            "replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_1'}",
            ("dp",),
        ),
        ("replica_groups={}", AXES[:2] + AXES[3:]),
    ],
)
def test_replica_groups_are_read_in_every_notation(groups: str, axes: tuple[str, ...]) -> None:
    (item,) = collectives_in_loop(
        "%p = f32[8]{0} parameter(0)", f"%r = f32[8]{{0}} all-reduce(%p), {groups}, to_apply=%add"
    )
    members = int(np.prod([size for axis, size in zip(AXES, SHAPE, strict=True) if axis in axes]))
    assert (item.axes, item.group_size, item.exposed_share) == (axes, members, 1.0)
    assert item.wire_bytes == pytest.approx(2 * 32 * (members - 1) / members)


def test_collective_is_hidden_by_work_before_its_end() -> None:
    start = (
        "%s = (f32[4]{0}, f32[8]{0}) all-gather-start(%p), replica_groups=[4,2]<=[8], "
        "dimensions={0}"
    )
    done = "%d = f32[8]{0} all-gather-done(%s)"
    work = "%w = f32[4]{0} fusion(%p), kind=kLoop, calls=%nothing"
    (hidden,), (exposed,) = (
        collectives_in_loop(start, work, done),
        collectives_in_loop(start, done, work),
    )
    (at_once,) = collectives_in_loop(
        f'{start}, backend_config={{"collective_backend_config":{{"is_sync":true}}}}', work, done
    )
    assert (hidden.exposed_share, exposed.exposed_share, at_once.exposed_share) == (0.0, 1.0, 1.0)
    assert (hidden.kind, hidden.size_bytes, hidden.wire_bytes) == ("all-gather", 32, 16)


def test_arrays_of_one_operation_are_summed() -> None:
    groups = "replica_groups=[4,2]<=[8], dimensions={0}"
    pairs = "((f32[4]{0}, f32[16]{0}), (f32[8]{0}, f32[32]{0}))"
    (gathered,) = collectives_in_loop(
        f"%s = {pairs} all-gather-start(%p, %q), {groups}", "%d = f32[] all-gather-done(%s)"
    )
    pairs = "((f32[8]{0}, f32[32]{0}), (f32[4]{0}, f32[16]{0}))"
    (scattered,) = collectives_in_loop(
        f"%s = {pairs} reduce-scatter-start(%p, %q), {groups}", "%d = f32[] reduce-scatter-done(%s)"
    )
    (permuted,) = collectives_in_loop(
        f"%s = (f32[8]{{0}}, f32[8]{{0}}, u32[], u32[]) collective-permute-start(%p), {groups}"
    )
    assert (gathered.size_bytes, scattered.size_bytes, permuted.size_bytes) == (160, 160, 32)


def test_wrapped_collective_has_name_of_its_start() -> None:
    """By which what waits for it is found."""
    fused = (
        "%run (q: f32[4]) -> f32[8] {\n  %g = f32[8]{0} all-gather(%q), "
        "replica_groups=[4,2]<=[8]\n}\n"
    )
    lines = (
        "%s = ((f32[4]{0}), f32[8]{0}) async-start(%p), calls=%run",
        "%d = f32[8]{0} async-done(%s)",
    )
    (item,) = collectives_in_loop(*lines, fused=fused)
    assert (item.name, item.kind, item.size_bytes, item.exposed_share) == (
        "s",
        "all-gather",
        32,
        1.0,
    )


def test_chained_fusions_count_as_one_hidden_collective() -> None:
    gather = (
        "%g = f32[8]{0} all-gather(%q), channel_id=7, replica_groups=[4,2]<=[8], "
        'frontend_attributes={chain_id="1"}'
    )
    fused = "".join(
        f"%{name} (q: f32[4]) -> f32[8] {{\n  {gather}\n}}\n" for name in ("begin", "rest")
    )
    lines = (
        f"%{name} = f32[8]{{0}} fusion(%p), kind=kCustom, calls=%{name}"
        for name in ("begin", "rest")
    )
    assert collectives_in_loop(*lines, fused=fused) == [
        Collective("g", "all-gather", ("mp",), 2, 1.0, 32, 0.0)
    ]


def test_fused_all_reduce_scatter_is_reduce_scatter() -> None:
    fused = (
        "%all-reduce-scatter.1 (q: f32[8]) -> f32[4] {\n  %r = f32[8]{0} all-reduce(%q), "
        "replica_groups=[4,2]<=[8]\n}\n"
    )
    (item,) = collectives_in_loop(
        "%f = f32[4]{0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1", fused=fused
    )
    assert (item.kind, item.size_bytes, item.wire_bytes) == ("reduce-scatter", 32, 16)


def test_transfers_between_slices_span_slice_axes() -> None:
    attributes = 'frontend_attributes={_xla_host_transfer_rendezvous="r_0",_xla_megascale_transfer_type="ALL_REDUCE"}'
    work = '%w = f32[8]{0} fusion(%p), calls=%nothing, backend_config={"estimated_cycles":"5"}'
    send = (
        "%s = (f32[8]{0}, u32[], token[]) send(%p, %t), channel_id=1, is_host_transfer=true, "
        f"{attributes}"
    )
    recv = (
        "%v = (f32[8]{0}, u32[], token[]) recv(%t), channel_id=1, is_host_transfer=true, "
        f"{attributes}"
    )
    done = "%e = (f32[8]{0}, token[]) recv-done(%v), channel_id=1"
    (item,) = collectives_in_loop(send, recv, work, done, across={"dp": 2})
    assert item == Collective("s", "all-reduce", ("dp",), 2, 1.0, 32, 0.0)
