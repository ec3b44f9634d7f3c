"""Which requested attention is available, and the message if it is not."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from jaxlaunch.trainer import plan, spec
from jaxlaunch.trainer.attention import availability, implementations, splash
from jaxlaunch.trainer.attention.availability import (
    Accelerator,
    resolve_attention,
    resolve_for_plan,
    unavailable_reason,
)
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.plan import Plan
from jaxlaunch.trainer.step.train_step import Step
from tests.trainer import tiny

LM = "lm"
DECODER = {"kind": "decoder", "width": 256, "heads": 4, "layers": 1, "length": 256}


class Long(tiny.Counting):
    """Rows of a splash block's length."""

    def batch(self, step: int) -> dict[str, np.ndarray]:
        rows = super().batch(step)
        start = rows["tokens"][:, :1]
        tokens = ((start + np.arange(splash.LANES + 1)[None]) % 32).astype(np.int32)
        return rows | {"tokens": tokens, "mask": np.ones((tiny.ROWS, splash.LANES), np.float32)}


class Client(NamedTuple):
    platform_version: str


class Device(NamedTuple):
    """A device that is not here."""

    platform: str
    client: Client = Client("")
    compute_capability: str | None = None
    device_kind: str = ""


CPU, TPU, ROCM = Device("cpu"), Device("tpu"), Device("gpu", Client("ROCm 7"))
CUDA = Device("gpu", Client("PJRT C API\ncuda 13000"), "8.0")
TURING = CUDA._replace(compute_capability="7.5")
H100_NAME = "NVIDIA H100 80GB HBM3"
COMPILED_FOR = Device("gpu", Client(f"PJRT C API\n{H100_NAME}"), "9.0", H100_NAME)


def train_spec(
    attention: str, model: dict[str, Any] = DECODER, precision: str = "bf16"
) -> spec.TrainSpec:
    return spec.TrainSpec(task=LM, model=model, attention=attention, precision=precision)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX finds a cuDNN; of a GPU that is older than Hopper, for it sees none."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


@pytest.mark.parametrize(
    ("train", "device", "message"),
    [
        (train_spec("cudnn"), CPU, "there is no CUDA device, the devices are cpu"),
        (train_spec("cudnn"), ROCM, "there is no CUDA device, the devices are gpu"),
        (
            train_spec("cudnn", precision="fp32"),
            CUDA,
            "reads float16 and bfloat16, and train.precision computes in",
        ),
        (
            train_spec("cudnn", DECODER | {"width": 80}),
            CUDA,
            "The head dim must be <= 128 and a multiple of 8",
        ),
        (
            train_spec("cudnn", DECODER | {"score_cap": 50.0}),
            CUDA,
            "cuDNN's kernel does not support score_cap",
        ),
        (
            train_spec("cudnn", DECODER | {"head_size": 256}),
            CUDA,
            "The head dim must be <= 128 and a multiple of 8",
        ),
        (train_spec("cudnn"), TURING, "needs compute capability 8.0 (Ampere), the GPU has 7.5"),
        (train_spec("splash"), CUDA, "it is a kernel for TPU, the devices are gpu"),
        (
            train_spec("splash", DECODER | {"length": 200}),
            TPU,
            "blocks are of 128 positions, which do not divide 200",
        ),
    ],
)
def test_unavailable_attention_falls_back_to_xla_with_a_reason(
    train: spec.TrainSpec, device: Any, message: str, cudnn: None
) -> None:
    reason = str(unavailable_reason(train, device))
    assert message in reason
    note = f"train.attention = {train.attention} is unavailable here: {reason}. Using xla"
    assert resolve_attention(train, device) == (train.model_copy(update={"attention": "xla"}), note)


def test_missing_cudnn_is_reported() -> None:
    device: Any = CUDA
    assert unavailable_reason(train_spec("cudnn"), device) == "cuDNN is not detected"


@pytest.mark.parametrize(
    ("train", "device"),
    [
        (train_spec("auto"), CPU),
        (train_spec("auto"), ROCM),
        (train_spec("auto", {"kind": "mlp"}), CUDA),
        (train_spec("cudnn"), CUDA),
        (train_spec("cudnn", precision="fp16"), CUDA),
        (train_spec("cudnn", {"kind": "vit", "preset": "vit-b16"}), CUDA),
        (train_spec("splash"), TPU),
        (train_spec("cudnn", {"kind": "mlp"}), CPU),
    ],
)
def test_available_attention_is_used(train: spec.TrainSpec, device: Any, cudnn: None) -> None:
    assert resolve_attention(train, device) == (train, None)


@pytest.mark.parametrize(
    ("train", "device", "name"),
    [
        (train_spec("auto"), CUDA, "cudnn"),
        (train_spec("auto"), COMPILED_FOR, "cudnn"),
        (train_spec("auto", precision="fp16"), CUDA, "cudnn"),
        (
            train_spec("auto", {"kind": "vit", "preset": "vit-b16"}),
            CUDA,
            "cudnn",
        ),  # of 197 tokens, and no mask
        (train_spec("auto"), TPU, "splash"),
    ],
)
def test_auto_uses_the_kernel_of_the_accelerator(
    train: spec.TrainSpec, device: Any, name: str, cudnn: None
) -> None:
    resolved, note = resolve_attention(train, device)
    assert resolved == train.model_copy(update={"attention": name})
    assert note == f"train.attention = auto: using {name}"


@pytest.mark.parametrize(
    ("train", "device", "message"),
    [
        (
            train_spec("auto", precision="fp32"),
            CUDA,
            "cudnn is unavailable here: cuDNN's kernel reads float16",
        ),
        (
            train_spec("auto", precision="tf32"),
            CUDA,
            "cudnn is unavailable here: cuDNN's kernel reads float16",
        ),
        (
            train_spec("auto", DECODER | {"width": 80}),
            CUDA,
            "cudnn is unavailable here: The head dim must be",
        ),
        (
            train_spec("auto"),
            TURING,
            "cudnn is unavailable here: cuDNN's kernel needs compute capability 8.0",
        ),
        (
            train_spec("auto", DECODER | {"length": 200}),
            TPU,
            "splash is unavailable here: its blocks are of 128",
        ),
        (
            train_spec("auto", DECODER | {"window": 8}),
            CUDA,
            "cudnn is unavailable here: auto uses it only without a window",
        ),
        (
            train_spec("auto", DECODER | {"score_cap": 9.0}),
            CUDA,
            "cudnn is unavailable here: cuDNN's kernel does not support score_cap",
        ),
        (
            train_spec("auto", precision="fp32"),
            TPU,
            "splash is unavailable here: auto uses it for bfloat16 only",
        ),
        (
            train_spec("auto", precision="fp16"),
            TPU,
            "splash is unavailable here: auto uses it for bfloat16 only",
        ),
    ],
)
def test_auto_falls_back_to_xla_with_a_reason(
    train: spec.TrainSpec, device: Any, message: str, cudnn: None
) -> None:
    actual, note = resolve_attention(train, device)
    assert actual.attention == "xla"
    assert str(note).startswith(f"train.attention = auto: using xla; {message}")


def test_auto_requires_support_for_masks(cudnn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def reads_none(query: Any, key: Any, value: Any, keys: Any, scores: Any) -> Any:
        if keys is not None:
            raise NotImplementedError("No masks.")
        return query

    monkeypatch.setitem(implementations.ATTENTION, "cudnn", reads_none)
    device: Any = CUDA
    assert resolve_attention(train_spec("auto"), device)[0].attention == "xla"
    # A named attention is used as it is.
    assert resolve_attention(train_spec("cudnn"), device)[0].attention == "cudnn"


A100, H100, CLOUD_TPU = Accelerator("cuda", (8, 0)), Accelerator("cuda", (9, 0)), Accelerator("tpu")


@pytest.mark.parametrize(
    ("train", "accelerator", "name"),
    [
        (train_spec("auto"), A100, "fused"),
        (train_spec("auto"), CLOUD_TPU, "fused"),
        (train_spec("auto"), Accelerator("cpu"), "xla"),
        (train_spec("auto"), None, "xla"),
        (train_spec("auto", precision="fp32"), A100, "xla"),
        (train_spec("auto", precision="fp32"), CLOUD_TPU, "xla"),
        (train_spec("auto"), Accelerator("cuda", (7, 5)), "xla"),
        (train_spec("auto", DECODER | {"window": 8}), A100, "xla"),
        (train_spec("auto", DECODER | {"window": 8, "score_cap": 9.0}), CLOUD_TPU, "fused"),
        (train_spec("cudnn", DECODER | {"score_cap": 9.0}), A100, "xla"),
        (train_spec("cudnn"), A100, "fused"),
        (train_spec("cudnn"), None, "fused"),
        (train_spec("cudnn"), Accelerator("cpu"), "xla"),
        (train_spec("cudnn"), CLOUD_TPU, "xla"),
        (train_spec("cudnn", DECODER | {"heads": 1}), A100, "xla"),  # of 256 channels
        (train_spec("cudnn", DECODER | {"heads": 1}), H100, "fused"),
        (train_spec("splash"), A100, "xla"),
        (train_spec("splash", DECODER | {"length": 200}), CLOUD_TPU, "xla"),
    ],
)
def test_plan_uses_the_attention_of_the_devices(
    train: spec.TrainSpec, accelerator: Accelerator | None, name: str
) -> None:
    assert resolve_for_plan(train, accelerator).attention == name


@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("cudnn", "none"),
        ("splash", "dots"),
        ("cudnn", ["query", "mixed"]),
        ("splash", ["query", "mixed"]),
    ],
)
def test_plan_counts_the_residuals_of_the_kernel(
    name: str, remat: Any, cudnn: None, monkeypatch: pytest.MonkeyPatch, standard: None
) -> None:
    monkeypatch.setattr(availability, "unavailable_reason", lambda train, device: None)
    model = tiny.DECODER.model_copy(update={"length": splash.LANES})
    train = tiny.train_spec(Long(), precision="bf16", remat=remat, model=model)
    grid = mesh.build_mesh(train.mesh, jax.devices()[:1])
    specs = [train.model_copy(update={"attention": item}) for item in (name, "fused", "xla")]
    steps = [Step(Long(), spec, grid, 1) for spec in specs]
    saved, counted, all_pairs = (step.residual_bytes(Long().batch(0)) for step in steps)
    # By name, splash keeps a number for each head and position too, which is much for heads of this
    # size alone.
    assert (0.95 if name == "splash" and "mixed" in remat else 0.99) < counted / saved < 1.01
    if remat in ("none", "dots"):
        assert counted < all_pairs / 2


def test_flops_of_auto_equal_those_of_the_kernel(
    cudnn: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = tiny.Counting()
    train = tiny.train_spec(task, attention="auto", precision="bf16", mesh={"dp": -1})
    job = plan.with_synthetic_data(train, task)
    planned = [Plan(job, task, accelerator) for accelerator in (None, A100)]
    counted = [item.to_dict(sharding=False) for item in planned]
    monkeypatch.setattr(availability, "_is_cuda", lambda device: True)
    step = tiny.build(task, attention="auto", precision="bf16")
    assert step.notes == ["train.attention = auto: using cudnn"]
    runs = step.count_flops(step.put_batch(task.batch(0)))
    assert [item["flops_per_step"] for item in counted] == [runs] * 2
    assert len({item["causal_flops_per_step"] for item in counted}) == 1


def test_step_notes_the_fallback(standard: None) -> None:
    step = tiny.compiled_step(tiny.Counting(), attention="cudnn", precision="bf16")
    assert step.notes == [
        "train.attention = cudnn is unavailable here: there is no CUDA device, the devices are "
        "cpu. Using xla"
    ]
    assert tiny.build(tiny.Counting()).notes == []


def test_flops_of_a_kernel_are_counted(cudnn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tiny.Counting()
    monkeypatch.setattr(availability, "_is_cuda", lambda device: True)
    steps = [tiny.build(task, attention=name, precision="bf16") for name in ("xla", "cudnn")]
    plain, kernel = (step.count_flops(step.put_batch(task.batch(0))) for step in steps)
    assert steps[1].notes == [] and plain == kernel


def test_splash_accepts_fewer_rows_than_shards() -> None:
    """As a task's bare loss does in evaluation, one row at a time."""
    row = jax.ShapeDtypeStruct((1, splash.LANES, 4, 64), np.float32)
    with jax.set_mesh(mesh.build_mesh(spec.Mesh(dp=2, fsdp=2, mp=2))):
        attend = partial(
            splash.splash_attention, segment_ids=None, scores=implementations.Scores(True)
        )
        attended = jax.eval_shape(attend, row, row, row)
    assert attended.shape == row.shape


def test_splash_trains_a_scanned_model_on_a_mesh(
    monkeypatch: pytest.MonkeyPatch, standard: None
) -> None:
    monkeypatch.setattr(availability, "unavailable_reason", lambda train, device: None)
    interpreted = partial(splash.splash_attention, interpret=True)
    monkeypatch.setattr(splash, "splash_attention", interpreted)
    model = tiny.DECODER.model_copy(update={"length": splash.LANES})
    keys = {"model": model, "remat": "full", "mesh": {"dp": 2, "fsdp": 2, "mp": 2}}
    losses = {name: tiny.run(Long(), 2, attention=name, **keys)[0] for name in ("xla", "splash")}
    np.testing.assert_allclose(losses["splash"], losses["xla"], rtol=1e-5)
