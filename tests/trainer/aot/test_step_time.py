"""Seconds of a step without the compiler's cycles, for programs that are counted by hand."""

# ruff: noqa: E501  # the text of programs

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from jaxlaunch.accelerators import ACCELERATORS
from jaxlaunch.trainer.aot import step_time
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.aot.collectives import Collective
from jaxlaunch.trainer.aot.step_time import Rates, Timeline
from jaxlaunch.trainer.numerics.hlo import Program

GROUPS = "replica_groups=[1,2]<=[2], dimensions={0}"
# A gather meanwhile 8 bytes are touched, and one in a loop of 3 turns that nothing hides.
LOOP = f"""%body (b: (s32[], s8[4])) -> (s32[], s8[4]) {{
  %b = (s32[], s8[4]{{0}}) parameter(0)
  %x = s8[4]{{0}} get-tuple-element(%b), index=1
  %t = (s8[4]{{0}}, s8[8]{{0}}) all-gather-start(%x), {GROUPS}
  %e = s8[8]{{0}} all-gather-done(%t)
  %half = s8[4]{{0}} slice(%e), slice={{[0:4]}}
}}

ENTRY %main (p: s8[4]) -> s8[8] {{
  %p = s8[4]{{0}} parameter(0)
  %s = (s8[4]{{0}}, s8[8]{{0}}) all-gather-start(%p), {GROUPS}
  %w = s8[4]{{0}} negate(%p)
  %d = s8[8]{{0}} all-gather-done(%s)
  %u = s8[8]{{0}} negate(%d)
  %c = (s32[], s8[4]{{0}}) tuple(%w, %w)
  %l = (s32[], s8[4]{{0}}) while(%c), condition=%none, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""


def test_collectives_overlap_until_their_done_operation() -> None:
    """At one byte a second: 8 s of work during a gather of 10 s, 16 s, and 3 × (5 + 8) s."""
    timeline = Timeline(Program.from_text(LOOP), Rates(1.0, 1.0), {"s": 10.0, "t": 5.0})
    assert dict(timeline.wait_seconds) == {"s": 2.0, "t": 15.0}
    assert timeline.seconds == 8 + 2 + 16 + 3 * (5 + 8)
    assert step_time.program_bytes(Program.from_text(LOOP)) == 8 + 16 + 3 * 8


def test_fusion_bytes_count_slices_and_updates() -> None:
    text = """%part (a: f32[9,8], i: s32[]) -> f32[1,8] {
  %a = f32[9,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %view = f32[9,8]{1,0} bitcast(%a)
  %one = f32[1,8]{1,0} dynamic-slice(%view, %i, %i), dynamic_slice_sizes={1,8}
  ROOT %twice = f32[1,8]{1,0} add(%one, %one)
}

%place (all: f32[9,8], new: f32[1,8], j: s32[]) -> f32[9,8] {
  %all = f32[9,8]{1,0} parameter(0)
  %new = f32[1,8]{1,0} parameter(1)
  %j = s32[] parameter(2)
  ROOT %put = f32[9,8]{1,0} dynamic-update-slice(%all, %new, %j, %j)
}

ENTRY %main (p: f32[9,8], k: s32[]) -> f32[9,8] {
  %p = f32[9,8]{1,0} parameter(0)
  %k = s32[] parameter(1)
  %read = f32[1,8]{1,0} fusion(%p, %k), kind=kLoop, calls=%part
  %wrote = f32[9,8]{1,0} fusion(%p, %read, %k), kind=kLoop, calls=%place
}
"""
    program, row, index = Program.from_text(text), 32, 4
    named = {operation.name: operation for operation in program.computations["main"]}
    assert step_time.touched_bytes(program, named["read"], named) == row + index + row
    assert step_time.touched_bytes(program, named["wrote"], named) == row + row + index


@pytest.mark.parametrize(("backward", "count"), [("", 2), ("Backward", 5)])
def test_cudnn_attention_flops_halve_under_causal_mask(backward: str, count: int) -> None:
    attributes = (
        f'custom_call_target="__cudnn$fmhaSoftmax{backward}", backend_config={{"mask_type": "%s"}}'
    )
    lines = "".join(
        f"  %{mask} = (bf16[2,4,16,8]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%q, %k, %k), "
        f"{attributes % mask.upper()}\n"
        for mask in ("causal", "no_mask")
    )
    arrays = (
        "  %q = bf16[2,16,4,8]{3,2,1,0} parameter(0)\n  %k = bf16[2,32,4,8]{3,2,1,0} parameter(1)\n"
    )
    program = Program.from_text(f"ENTRY %main (q: bf16[]) -> bf16[] {{\n{arrays}{lines}}}\n")
    counts = program.computations["main"]
    product = 2 * 2 * 16 * 32 * 4 * 8
    assert [step_time.operation_flops(program, operation, counts) for operation in counts] == [
        0,
        0,
        count * product / 2,
        count * product,
    ]


def test_products_inside_fusions_count() -> None:
    like = jax.ShapeDtypeStruct((16, 32), "float32"), jax.ShapeDtypeStruct((32, 8), "float32")
    program = Program.from_text(
        jax.jit(lambda x, w: jax.nn.relu(x @ w)).lower(*like).compile().as_text() or ""
    )
    counted = [
        step_time.operation_flops(program, operation, operations)
        for operations in program.computations.values()
        for operation in operations
    ]
    assert 2 * 16 * 32 * 8 in counted


@pytest.mark.parametrize(
    ("between", "group", "ports"),
    [({"fsdp": 2}, 16, 8), ({"fsdp": 16}, 16, 1), ({"dp": 2}, 16, None)],
)
def test_collective_between_hosts_uses_all_gpu_ports(
    between: dict[str, int], group: int, ports: int | None
) -> None:
    machine = ACCELERATORS["h100"].machine
    assert machine is not None
    item = Collective("g", "all-gather", ("fsdp",), group, 1.0, 16 * 10**9, 1.0)
    program = Program.from_text(
        "ENTRY %main (p: s8[4]) -> s8[4] {\n  %g = s8[4]{0} all-gather(%p)\n}\n"
    )
    model = step_time.StepTimeModel(Chips("h100", 2, 8), between)
    result = model.estimate_step(program, [item], step_time.ComputeCost(None, 0.0, 0.0))
    assert result is not None
    bandwidth = (
        machine.links_bytes_per_s
        if ports is None
        else min(machine.links_bytes_per_s, ports * machine.network_bytes_per_s)
    )
    assert result["exposed"][0] == pytest.approx(15e9 / bandwidth)
    assert result["seconds"] == result["exposed"]


def test_unknown_devices_use_measured_rates() -> None:
    # At 4 FLOP/s and 2 bytes a second, 10 s to start an operation and 100 s to meet: two operations
    # on 8 and 16 bytes, and a gather that sends 6; or the model's FLOPs.
    text = f"""ENTRY %main (p: s8[4]) -> s8[8] {{
  %p = s8[4]{{0}} parameter(0)
  %w = s8[4]{{0}} negate(%p)
  %g = s8[8]{{0}} all-gather(%w), {GROUPS}
  ROOT %u = s8[8]{{0}} negate(%g)
}}
"""
    chips = Chips("cpu", 1, 8)
    gather = Collective("g", "all-gather", ("dp",), 2, 1.0, 12, 1.0)
    few, many = step_time.ComputeCost(8.0, 0.0, 24.0), step_time.ComputeCost(8 * 400.0, 0.0, 24.0)
    model = step_time.StepTimeModel(chips, {}, Rates(4.0, 2.0, start_s=10.0, meeting_s=100.0))
    program = Program.from_text(text)
    assert step_time.StepTimeModel(chips, {}).estimate_step(program, [gather], few) is None
    result = model.estimate_step(program, [gather], few)
    assert result is not None and result["exposed"] == [100 + 2 * 6 / 2] * 2
    assert result["seconds"] == [10 + 8 / 2 + 100 + 2 * 6 / 2 + 10 + 16 / 2] * 2
    result = model.estimate_step(program, [gather], many)
    assert result is not None and result["seconds"] == [400 / 4 + 100 + 2 * 6 / 2] * 2, (
        "convolutions are in these FLOPs alone"
    )


def test_measured_rates_are_per_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes: list[tuple[int, ...]] = []

    def half_a_second(run: Callable[[], jax.Array], least: float) -> float:
        shapes.append(jax.block_until_ready(run()).shape)
        return 0.5

    monkeypatch.setattr(step_time, "_median_s", half_a_second)
    result = step_time.measure_rates(jax.devices(), jnp.dtype("bfloat16"))
    assert sorted(shapes) == [(8,), (8,), (8 * 512, 512), (8 * 2**21,)]
    products, passes = (
        2 * 512**3,
        (4 + 4) * 2**21,
    )  # FLOPs, and bytes of float32 that are read and written
    assert result == Rates(
        products / (0.5 / 8), passes / (0.5 / 2), start_s=0.5 / 256, meeting_s=0.5 / 32
    )
