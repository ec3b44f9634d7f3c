"""What can be had of the attention that is asked for, and what is said where it cannot."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from tests.trainer import tiny
from trainer import kernels, spec, splash
from trainer.kernels import fitted, lacks

LM = "trainer.tasks.lm:NextToken"
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


CPU, TPU, ROCM = Device("cpu"), Device("tpu"), Device("gpu", Client("ROCm 7"))
CUDA = Device("gpu", Client("PJRT C API\ncuda 13000"))


def train_spec(attention: str, model: dict[str, Any] = DECODER, precision: str = "bf16") -> spec.TrainSpec:
    return spec.TrainSpec(task=LM, model=model, attention=attention, precision=precision)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX finds a cuDNN; of a GPU that is older than Hopper, for it sees none."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)


@pytest.mark.parametrize(
    ("train", "device", "says"),
    [
        (train_spec("cudnn"), CPU, "there is no CUDA device, the devices are cpu"),
        (train_spec("cudnn"), ROCM, "there is no CUDA device, the devices are gpu"),
        (train_spec("cudnn", precision="fp32"), CUDA, "reads float16 and bfloat16, and train.precision computes in"),
        (
            train_spec("cudnn", DECODER | {"width": 80}),
            CUDA,
            "The head dim must be <= 128 and a multiple of 8",
        ),
        (train_spec("splash"), CUDA, "it is a kernel for TPU, the devices are gpu"),
        (
            train_spec("splash", DECODER | {"length": 200}),
            TPU,
            "blocks are of 128 positions, which do not make 200",
        ),
    ],
)
def test_what_cannot_be_had_is_said(train: spec.TrainSpec, device: Any, says: str, cudnn: None) -> None:
    reason = str(lacks(train, device))
    assert says in reason
    note = f"train.attention = {train.attention} cannot be had here: {reason}. Using xla"
    assert fitted(train, device) == (train.model_copy(update={"attention": "xla"}), note)


def test_a_cudnn_that_jax_does_not_find_is_said() -> None:
    device: Any = CUDA
    assert lacks(train_spec("cudnn"), device) == "cuDNN is not detected"


@pytest.mark.parametrize(
    ("train", "device"),
    [
        (train_spec("auto", precision="fp32"), CPU),
        (train_spec("cudnn"), CUDA),
        (train_spec("cudnn", precision="fp16"), CUDA),
        (train_spec("cudnn", {"kind": "vit", "preset": "vit-b16"}), CUDA),
        (train_spec("splash"), TPU),
        (train_spec("cudnn", {"kind": "mlp"}), CPU),
    ],
)
def test_what_can_be_had_is_used(train: spec.TrainSpec, device: Any, cudnn: None) -> None:
    assert fitted(train, device) == (train, None)


def test_a_step_falls_back_and_says_so(standard: None) -> None:
    step = tiny.compiled(tiny.Counting(), attention="cudnn", precision="bf16")
    assert step.note == (
        "train.attention = cudnn cannot be had here: there is no CUDA device, the devices are cpu. Using xla"
    )
    assert tiny.build(tiny.Counting()).note is None


def test_a_kernel_s_operations_are_counted(cudnn: None, monkeypatch: pytest.MonkeyPatch) -> None:
    task = tiny.Counting()
    monkeypatch.setattr(kernels, "_is_cuda", lambda device: True)
    steps = [tiny.build(task, attention=name, precision="bf16") for name in ("xla", "cudnn")]
    plain, kernel = (step.flops(step.put(task.batch(0))) for step in steps)
    assert steps[1].note is None and plain == kernel


def test_splash_trains_a_scanned_model_on_a_mesh(monkeypatch: pytest.MonkeyPatch, standard: None) -> None:
    monkeypatch.setattr(kernels, "lacks", lambda train, device: None)
    monkeypatch.setattr(splash, "attend", partial(splash.attend, interpret=True))
    model = tiny.DECODER.model_copy(update={"length": splash.LANES})
    keys = {"model": model, "remat": "full", "mesh": {"dp": 2, "fsdp": 2, "mp": 2}}
    losses = {name: tiny.run(Long(), 2, attention=name, **keys)[0] for name in ("xla", "splash")}
    np.testing.assert_allclose(losses["splash"], losses["xla"], rtol=1e-5)
