"""Time of a step: kinds from the program's text, seconds from the trace, and the profiler."""

# ruff: noqa: E501  # the text of programs

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from jaxlaunch.trainer.metrics.progress import Progress
from jaxlaunch.trainer.profiling import breakdown, profiler
from jaxlaunch.trainer.profiling.breakdown import Op
from jaxlaunch.trainer.profiling.profiler import KEPT_TRACES, Profiler
from jaxlaunch.trainer.spec import Profile
from tests.trainer import tiny

PROGRAM = """HloModule jit__update

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%fused (p: f32[8,8], q: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %dot.1 = f32[8,8]{1,0:T(8,128)} dot(%p, %q), metadata={op_name="jit(f)/jvp()/dot_general"}
}

%inner (p: f32[8,8]) -> f32[8,8] {
  ROOT %dot.2 = f32[8,8]{1,0} dot(%p, %p), metadata={op_name="jit(f)/transpose(jvp(attention))/dot_general"}
}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {
  %x = f32[8,8]{1,0} parameter(0)
  %while.1 = (s32[], f32[8,8]{1,0}, /*index=2*/(f32[], s32[])) while(%tuple.1), condition=%c, body=%b
  %fusion.1 = f32[8,8]{1,0} fusion(%x, %x), kind=kOutput, calls=%fused, metadata={op_name="jit(f)/jvp()/dot_general"}
  %fusion.2 = f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%inner
  %fusion.3 = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%add, metadata={op_name="jit(f)/while/attention/div"}
  %fusion.4 = f32[8,8]{1,0} fusion(%x), kind=kLoop, calls=%add, metadata={op_name="jit(f)/self_attention_norm/mul"}
  %cublas = (f32[8,8], s8[9]) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"
  %fmha = (bf16[8,8], u8[0]) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"
  %sort = f32[8,8] custom-call(%x), custom_call_target="__gpu$TopK"
  %ag = (f32[4,8], f32[8,8]) all-gather-start(%x), dimensions={0}
  %ag.done = f32[8,8]{1,0} all-gather-done(%ag)
  %ar = f32[8,8]{1,0} all-reduce(%x), to_apply=%add, metadata={op_name="jit(f)/attention/psum"}
  ROOT %copy.1 = f32[8,8]{1,0} copy(%fusion.1)
}
"""


def test_operation_kind_comes_from_content_and_scope() -> None:
    result = breakdown.program_kinds([PROGRAM])
    names = {
        "matmul": ("fusion.1", "cublas", "dot.1"),
        "attention": ("fusion.2", "fusion.3", "fmha", "dot.2"),
        "elementwise": ("fusion.4", "sort", "copy.1", "sum"),
        "collectives": ("ag", "ag.done", "ar"),
        None: ("while.1", "x"),
    }
    for kind, operations in names.items():
        assert {result[name] for name in operations} == {kind}


def test_same_operation_name_of_two_programs_has_two_kinds() -> None:
    text = "ENTRY %main (x: f32[8]) -> f32[8] {\n  %fusion.1 = f32[8] copy(%x)\n}\n"
    result = breakdown.program_kinds([PROGRAM, f"HloModule jit__updates\n\n{text}"])
    assert result["jit__updates/fusion.1"] == "elementwise"
    assert result["jit__update/fusion.1"] == result["fusion.1"] == "matmul"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", "matmul"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", "matmul"),
        ("cutlass3x_sm90_tensorop", "matmul"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", "attention"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "collectives"),
        ("all_gather.3", "collectives"),
        ("loop_add_fusion", "elementwise"),
        ("input_convert_reduce_fusion", "elementwise"),
        ("cudnn_conv_fprop", "matmul"),
        ("MemcpyD2D", "elementwise"),
        ("while.10", None),
    ],
)
def test_unknown_kernel_is_classified_by_name(kernel: str, kind: str | None) -> None:
    assert breakdown.kernel_kind(kernel) == kind


def ops(*inputs: tuple[str, float, float], device: str = "0") -> list[Op]:
    return [
        Op(f"{kind}.{place}", kind, device, (start, end))
        for place, (kind, start, end) in enumerate(inputs)
    ]


def test_every_moment_counts_once() -> None:
    ran = ops(
        *(("matmul", 0, 4), ("elementwise", 3, 5), ("collectives", 2, 7)),
        *(("attention", 8, 9), ("matmul", 9.5, 30)),
    )
    result = breakdown.break_down(ran, (0, 10), [], steps=2)
    seconds = {"matmul": 2.25, "attention": 0.5, "elementwise": 0.5, "collectives": 1, "host": 0.75}
    assert result.seconds == seconds and result.step_s == sum(seconds.values()) == 5
    assert result.hidden_s == 1.5 and result.top[0] == ("matmul.4", "matmul", 10.25)


def test_seconds_are_mean_over_devices() -> None:
    ran = ops(("matmul", 0, 4)) + ops(("matmul", 0, 2), device="1")
    result = breakdown.break_down(ran, (0, 4), [], steps=1)
    assert (result.devices, result.seconds["matmul"], result.seconds["host"]) == (2, 3, 1)


def test_evaluation_belongs_to_no_step() -> None:
    ran = ops(("matmul", 0, 2), ("elementwise", 2.5, 5.5), ("matmul", 6, 8))
    result = breakdown.break_down(ran, (0, 8), [(2, 6)], steps=2)
    assert (result.step_s, result.seconds["matmul"], result.seconds["elementwise"]) == (2, 2, 0)
    assert {name for name, *_ in result.top} == {"matmul.0", "matmul.2"}


def test_idle_trace_has_no_breakdown() -> None:
    with pytest.raises(ValueError, match="no operation"):
        breakdown.break_down(ops(("matmul", 9, 10)), (0, 8), [], steps=1)


def test_breakdown_line_and_table() -> None:
    result = breakdown.break_down(ops(("matmul", 0, 4), ("collectives", 3, 6)), (0, 8), [], steps=1)
    shares = "matmul 50 %, attention 0 %, elementwise 0 %, collectives 25 %, host 25 %"
    assert result.to_line() == f"8000.000 ms a step: {shares}"
    row = "  collectives   2000.000 ms   25 %  and 1000.000 ms while the device computed"
    assert row in result.to_table()


# --- what JAX writes ------------------------------------------------------------------------------


class Event(NamedTuple):
    name: str
    start_ns: float
    duration_ns: float
    stats: Any = ()


class Line(NamedTuple):
    name: str
    events: list[Event]


class Plane(NamedTuple):
    name: str
    lines: list[Line]


STEP = [Event("train", 0, 10_000, [("step_num", "0")]), Event("jaxlaunch pause", 4000, 1000)]
THREAD = [Event("fusion.1", 0, 500, [("hlo_op", "fusion.1"), ("device_ordinal", "3")])]
HOST = Plane("/host:CPU", [Line("python", STEP), Line("tf_XLAEigen/1", THREAD)])


def read(*planes: Plane) -> breakdown.Trace:
    return breakdown.read_planes(planes, breakdown.program_kinds([PROGRAM]))


def test_cpu_operations_are_read_from_host_threads() -> None:
    result = read(HOST)
    assert result == ([Op("fusion.1", "matmul", "cpu:3", (0, 5e-7))], [(0, 1e-5)], [(4e-6, 5e-6)])


def test_gpu_operations_are_read_from_streams() -> None:
    kernels = [
        Event("nvjet_tst_128x256", 0, 100, [("hlo_op", "fusion.2"), ("hlo_module", "jit__update")]),
        Event("nvjet_tst_128x256", 200, 100, [("correlation_id", "7")]),
    ]
    lines = [Line("Stream #15(Compute)", kernels), Line("XLA Modules", kernels)]
    result = read(HOST, Plane("/device:GPU:0", lines))
    assert [(op.name, op.kind, op.device) for op in result.ops] == [
        ("fusion.2", "attention", "/device:GPU:0"),
        ("nvjet_tst_128x256", "matmul", "/device:GPU:0"),
    ]


def test_tpu_operations_are_read_from_text_line() -> None:
    texts = [
        Event("%while.1 = (s32[]) while(%tuple)", 0, 900),
        Event("%ag.done = f32[8,8]{1,0} all-gather-done(%ag)", 10, 20),
        Event("fusion.1", 40, 20),
    ]
    lines = [Line(name, texts) for name in ("XLA Ops", "Steps", "Async XLA Ops")]
    sparse_core = Plane("/device:TPU:0 SparseCore 1", [Line("XLA Ops", texts)])
    result = read(HOST, Plane("/device:TPU:0", lines), sparse_core)
    kinds = [(op.name, op.kind) for op in result.ops]
    assert kinds == [("ag.done", "collectives"), ("fusion.1", "matmul")]


# --- the loop's part ------------------------------------------------------------------------------


class Reports(Progress):
    """Keeps the reports to an agent."""

    def __init__(self) -> None:
        super().__init__(None)
        self.notes: list[str] = []
        self.profiles: list[dict[str, Any]] = []

    def report_note(self, text: str) -> None:
        self.notes.append(text.partition(":")[0])

    def report_profile(self, values: Any) -> None:
        self.profiles.append(dict(values))


Work = Callable[[int], jax.Array]


def small() -> tuple[Work, list[str]]:
    """Work that takes no time to compile, and its program."""
    compiled = jax.jit(lambda x: (x @ x).sum()).lower(jnp.ones((64, 64))).compile()
    return lambda done: compiled(jnp.full((64, 64), float(done))), [compiled.as_text() or ""]


def decoder() -> tuple[Work, list[str]]:
    """Real steps, on two devices."""
    task = tiny.Counting()
    step = tiny.compiled_step(task, mesh={"fsdp": 2})
    state = step.init_state()

    def work(done: int) -> jax.Array:
        nonlocal state
        state, metrics = step.train(state, step.put_batch(task.batch(done)))
        return metrics["loss"]

    return work, step.hlo_texts()


class Loop:
    """Steps with a profiler between them, as in the real loop."""

    def __init__(
        self,
        folder: Path | None,
        *,
        at: int | None = None,
        steps: int = 2,
        request: Path | None = None,
        start: int = 0,
        counts: Callable[[], tuple[Work, list[str]]] = small,
    ) -> None:
        self.told, self.losses = Reports(), []
        self._work, programs = counts()
        self._start = start
        self._pending: list[jax.Array] = []
        self.profiler = Profiler(
            Profile(at=at, steps=steps),
            rank=0,
            run_dir=None if folder is None else str(folder),
            request=None if request is None else str(request),
            progress=self.told,
            wait_for_steps=self._settle,
            read_programs=lambda: programs,
        )

    def _settle(self) -> None:
        self.losses += map(float, self._pending)
        self._pending.clear()

    def run(self, steps: int) -> None:
        for done in range(self._start, steps):
            if done == 3:
                with self.profiler.pause_context():
                    self._settle()
            self.profiler.before_step(done)
            value = self._work(done)
            self._settle()
            self._pending.append(value)
        self._settle()
        self.profiler.finish_trace(steps)


def summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.usefixtures("standard", "named")
def test_steps_of_job_are_traced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loop = Loop(tmp_path, at=2, steps=3, counts=decoder)
    loop.run(8)
    folder = tmp_path / "profiles" / "step-2" / "rank-0"
    result = summary(folder)
    assert list(folder.rglob("*.xplane.pb"))
    assert (result["first_step"], result["steps"], result["devices"]) == (2, 3, 2)
    kinds = "matmul", "attention", "elementwise", "collectives"
    assert all(result["seconds"][kind] > 0 for kind in kinds)
    assert sum(result["seconds"].values()) == pytest.approx(result["step_s"], rel=1e-6)
    assert loop.told.notes == ["profile of steps 2-4"]
    assert "profile of steps 2-4 on 2 devices of rank 0, in " in capsys.readouterr().out
    assert len(loop.losses) == 8


def test_request_of_agent_is_answered_and_removed(tmp_path: Path) -> None:
    request = tmp_path / "request"
    request.write_text(json.dumps({"id": 4, "steps": 1}))
    loop = Loop(tmp_path, request=request)
    loop.run(3)
    first, last = loop.told.profiles
    assert first == {"id": 4, "state": "tracing", "step": 0, "steps": 1}
    assert (last["id"], last["state"]) == (4, "done")
    assert last["summary"] == summary(Path(last["folder"]))
    assert not request.exists()


def test_profile_at_end_of_run_holds_remaining_steps(tmp_path: Path) -> None:
    Loop(tmp_path, at=3, steps=9).run(5)
    assert summary(tmp_path / "profiles" / "step-3" / "rank-0")["steps"] == 2


@pytest.mark.parametrize(("start", "traced"), [(0, True), (2, True), (3, False)])
def test_attempt_resumed_after_steps_traces_nothing(
    tmp_path: Path, start: int, traced: bool
) -> None:
    Loop(tmp_path, at=2, start=start).run(5)
    assert (tmp_path / "profiles").exists() is traced


def test_steps_of_one_dispatch_are_traced_together(tmp_path: Path) -> None:
    loop = Loop(tmp_path, at=3, steps=5)
    for done in range(0, 40, 8):
        loop.profiler.before_step(done)
        loop.losses.append(float(loop._work(done)))
    loop.profiler.finish_trace(40)
    (folder,) = (tmp_path / "profiles").iterdir()
    assert (folder.name, summary(folder / "rank-0")["steps"]) == ("step-8", 8)


def test_unwritable_folder_fails_only_profile(tmp_path: Path) -> None:
    (tmp_path / "profiles").write_text("a file where a folder should be")
    request = tmp_path / "request"
    request.write_text(json.dumps({"id": 1, "steps": 1}))
    loop = Loop(tmp_path, at=1, request=request)
    loop.run(4)
    assert len(loop.losses) == 4
    assert loop.told.notes == [f"no profile at step {step} of rank 0" for step in (0, 1)]
    assert [profile["state"] for profile in loop.told.profiles] == ["failed"]


def test_unwritable_trace_fails_only_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the failure leaves behind is removed.
    monkeypatch.setattr(jax._src.profiler._profile_state, "profile_session", None)
    loop = Loop(tmp_path, at=1, steps=2)
    loop.profiler.before_step(1)
    folder = tmp_path / "profiles" / "step-1" / "rank-0"
    folder.rmdir()
    folder.write_text("a file where a folder should be")
    loop.profiler.before_step(3)
    loop.profiler.finish_trace(3)
    assert loop.told.notes == ["no profile at step 1 of rank 0"]


def test_unreadable_request_is_noted_once(tmp_path: Path) -> None:
    request = tmp_path / "request"
    request.write_text("{}")
    loop = Loop(tmp_path, request=request)
    loop.run(4)
    assert len(loop.losses) == 4
    assert loop.told.notes == ["rank 0 can no longer be profiled"]


def test_large_trace_leaves_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "MAX_BYTES", 1)
    loop = Loop(tmp_path, at=1, steps=1)
    loop.run(3)
    folder = tmp_path / "profiles" / "step-1" / "rank-0"
    assert [file.name for file in folder.iterdir()] == ["summary.json"]
    assert loop.told.notes[0] == "the trace of rank 0 at step 1 was too large to keep"


def test_trace_without_run_folder_is_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    Loop(None, at=1, steps=1).run(3)
    assert len(list(tmp_path.glob("jaxlaunch-profiles-*/step-1/rank-0/summary.json"))) == 1


def test_oldest_traces_are_removed(tmp_path: Path) -> None:
    for number in range(KEPT_TRACES):
        (tmp_path / "profiles" / f"step-9{number}" / "rank-0").mkdir(parents=True)
    (tmp_path / "profiles" / "step-90" / "rank-1").mkdir()
    Loop(tmp_path, at=1, steps=1).run(3)
    remaining = {folder.parent.name for folder in (tmp_path / "profiles").glob("step-*/rank-0")}
    assert len(remaining) == KEPT_TRACES and "step-1" in remaining
    assert (tmp_path / "profiles" / "step-90" / "rank-1").exists()
