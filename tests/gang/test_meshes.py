"""The same losses on every mesh and any number of processes, each process its own interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gang.runs import Result, digits, job, launch

MNIST_MLP = digits(
    model={"kind": "mlp", "layers": 2, "width": 64},
    data={"source": "synthetic", "examples": 512, "eval_examples": 64, "shape": [28, 28]},
    batch=32,
)
DECODER = digits(
    task="trainer.tasks.lm:NextToken",
    model={"kind": "decoder", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocab": 64, "length": 32},
    data={"source": "synthetic", "examples": 256, "eval_examples": 32},
    batch=16,
    optimizer={"lr": 3e-3, "schedule": {"name": "constant"}},
)
MODELS = {
    "mlp": MNIST_MLP,
    "decoder": DECODER,
    "gpt2": DECODER | {"model": {"kind": "gpt2", "layers": 2, "width": 32, "heads": 4, "vocab": 64, "length": 32}},
    "vit": MNIST_MLP
    | {
        "model": {"kind": "vit", "layers": 2, "width": 32, "heads": 4, "image": [28, 28], "channels": 1},
        "optimizer": {"lr": 3e-3, "schedule": {"name": "constant"}},
    },
}
MESHES = {"dp8": {"dp": 8}, "fsdp8": {"fsdp": 8}, "dp2-fsdp2-mp2": {"dp": 2, "fsdp": 2, "mp": 2}}
PLACES = {
    "1-process": {"hosts": 1, "per_host": 8},
    "2-processes": {"hosts": 2, "per_host": 4},
    "4-processes": {"hosts": 4, "per_host": 2},
    "2-hosts-of-2-processes": {"hosts": 2, "per_host": 4, "processes_per_host": 2},
}


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, float]]:
    folder = tmp_path_factory.mktemp("one")
    results = {}
    for name, train in MODELS.items():
        results[name] = succeed(launch(folder / name, job(train, per_host=1))).losses
    return results


def succeed(result: Result) -> Result:
    assert result.code == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result


def assert_equal_losses(found: dict[int, float], wanted: dict[int, float]) -> None:
    assert sorted(found) == sorted(wanted) == list(range(1, 21))
    for step, loss in wanted.items():
        assert found[step] == pytest.approx(loss, rel=1e-5), f"step {step}"


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_falls_on_one_device(on_one_device: dict[str, dict[int, float]], name: str) -> None:
    losses = on_one_device[name]
    assert losses[20] <= 0.8 * losses[1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_gives_the_losses_of_one_device(
    tmp_path: Path, on_one_device: dict[str, dict[int, float]], mesh: str, place: str
) -> None:
    shape: dict[str, Any] = PLACES[place]
    model, name = (MNIST_MLP, "mlp") if mesh == "dp8" else (DECODER, "decoder")
    result = succeed(launch(tmp_path, job(model | {"mesh": MESHES[mesh]}, **shape)))
    assert_equal_losses(result.losses, on_one_device[name])


@pytest.mark.parametrize("mesh", ["fsdp8", "dp2-fsdp2-mp2"])
def test_an_mlp_gives_the_losses_of_one_device_too(
    tmp_path: Path, on_one_device: dict[str, dict[int, float]], mesh: str
) -> None:
    result = succeed(launch(tmp_path, job(MNIST_MLP | {"mesh": MESHES[mesh]}, hosts=2, per_host=4)))
    assert_equal_losses(result.losses, on_one_device["mlp"])


@pytest.mark.parametrize(
    ("name", "mesh"),
    [  # a decoder under fsdp is in every place above; all three on one process's devices, in tests/trainer/test_step.py
        *[("decoder", mesh) for mesh in ("dp8", "dp4-mp2")],
        *[("gpt2", mesh) for mesh in ("dp8", "fsdp8", "dp4-mp2")],
        *[("vit", mesh) for mesh in ("dp8", "fsdp8", "dp4-mp2")],
    ],
)
def test_a_transformer_in_two_processes_gives_the_losses_of_one_device(
    tmp_path: Path, on_one_device: dict[str, dict[int, float]], name: str, mesh: str
) -> None:
    axes = (MESHES | {"dp4-mp2": {"dp": 4, "mp": 2}})[mesh]
    result = succeed(launch(tmp_path, job(MODELS[name] | {"mesh": axes}, hosts=2, per_host=4)))
    assert_equal_losses(result.losses, on_one_device[name])


@pytest.mark.parametrize("name", ["decoder", "gpt2", "vit"])
def test_a_mesh_over_two_slices_gives_the_losses_of_one_device(
    tmp_path: Path, on_one_device: dict[str, dict[int, float]], name: str
) -> None:
    mesh = {"dp": 2, "fsdp": 2, "mp": 2, "dcn": {"dp": 2}}
    result = succeed(launch(tmp_path, job(MODELS[name] | {"mesh": mesh}, slices=2, per_host=4)))
    assert_equal_losses(result.losses, on_one_device[name])
