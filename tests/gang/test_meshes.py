"""The same losses on every mesh and any number of processes, each process its own interpreter.

The processes of each place start once and train every mesh that is compared there, compiled
quickly. Two meshes are trained as users do, by `train:` and with all of XLA's optimizations.
"""

from __future__ import annotations

import dataclasses
import functools
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.gang.runs import (
    PATIENCE_S,
    USUAL_COMPILES,
    Result,
    Running,
    assert_success,
    digits_block,
    make_job,
    run_job,
    train_each_command,
)

pytestmark = pytest.mark.computes

MNIST_MLP = digits_block(
    model={"kind": "mlp", "layers": 2, "width": 64},
    data={"source": "synthetic", "examples": 512, "eval_examples": 64, "shape": [28, 28]},
    batch=32,
    optimizer={
        "lr": 3e-4,
        "schedule": {"name": "constant"},
    },  # slow: of a loss near 0 only rounding would be compared
)
DECODER = digits_block(
    task="lm",
    model={
        "kind": "decoder",
        "layers": 2,
        "width": 32,
        "heads": 4,
        "kv_heads": 2,
        "vocab": 64,
        "length": 32,
    },
    data={"source": "synthetic", "examples": 256, "eval_examples": 32},
    batch=16,
    optimizer={"lr": 3e-3, "schedule": {"name": "constant"}},
)
MODELS = {
    "mlp": MNIST_MLP,
    "decoder": DECODER,
    "experts": DECODER
    | {
        "model": {
            **DECODER["model"],
            "experts": 4,
            "expert_hidden": 32,
            "dense_layers": [0],
            "balance": 0.01,
        }
    },
    "gpt2": DECODER
    | {"model": {"kind": "gpt2", "layers": 2, "width": 32, "heads": 4, "vocab": 64, "length": 32}},
    "vit": MNIST_MLP
    | {
        "model": {
            "kind": "vit",
            "layers": 2,
            "width": 32,
            "heads": 4,
            "image": [28, 28],
            "channels": 1,
        },
        "optimizer": {"lr": 3e-3, "schedule": {"name": "constant"}},
    },
}
Losses = dict[int, float]
# Compared; few where it is costly: a step of two processes takes ten times one on one device.
STEPS, FEW_STEPS = (20, 4)

# What runs in each place of several processes. All models on all meshes of one process are in
# tests/trainer/step/test_train_step.py.
IN_EVERY_PLACE = [("mlp", "dp8"), ("decoder", "fsdp8"), ("decoder", "dp2-fsdp2-mp2")]
TRANSFORMERS_IN_TWO = [
    ("experts", "ep4-mp2"),
    ("gpt2", "dp4-mp2"),
    ("vit", "fsdp8"),
]
# The optimized program of the decoder is compared there, too.
OVER_SLICES = ["gpt2", "vit"]
MESHES: dict[str, dict[str, Any]] = {
    "one": {"dp": -1},
    "dp8": {"dp": 8},
    "fsdp8": {"fsdp": 8},
    "dp4-mp2": {"dp": 4, "mp": 2},
    "dp2-fsdp2-mp2": {"dp": 2, "fsdp": 2, "mp": 2},
    "ep4-mp2": {"ep": 4, "mp": 2},
    "dp2-of-slices": {"dp": 2, "fsdp": 2, "mp": 2, "dcn": {"dp": 2}},
}
PLACES: dict[str, dict[str, Any]] = {
    "2-processes": {"hosts": 2, "per_host": 4},
    "2-hosts-of-2-processes": {"hosts": 2, "per_host": 4, "processes_per_host": 2},
}
SHAPES = PLACES | {"1-device": {"per_host": 1}, "2-slices": {"slices": 2, "per_host": 4}}
# What each start of the processes trains, one after the other: models and meshes.
TRAINED: dict[str, list[tuple[str, str]]] = {
    **dict.fromkeys(PLACES, IN_EVERY_PLACE),
    "2-processes": [*IN_EVERY_PLACE, *TRANSFORMERS_IN_TWO],
    "1-device": [(name, "one") for name in MODELS],
    "2-slices": [(name, "dp2-of-slices") for name in OVER_SLICES],
}


def step_count(place: str, name: str, mesh: str) -> int:
    """Return the number of compared steps: few except on one device."""
    return STEPS if place == "1-device" else FEW_STEPS


def train_block(name: str, mesh: str, steps: int) -> dict[str, Any]:
    """Return the train block of a model on a mesh, without evaluations."""
    model = MODELS[name]
    return model | {
        "mesh": MESHES[mesh],
        "steps": steps,
        "data": model["data"] | {"eval_examples": 0},
    }


@pytest.fixture(scope="module")
def losses_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Losses]:
    """Return a function for the losses of a model on a mesh, whose place starts only once."""

    @functools.cache  # a place that hangs fails all its tests at once
    def run_place(place: str) -> Result | subprocess.TimeoutExpired:
        folder = tmp_path_factory.mktemp(place)
        blocks = {
            f"{name}-{mesh}": train_block(name, mesh, step_count(place, name, mesh))
            for name, mesh in TRAINED[place]
        }
        with Running(
            folder, make_job(command=train_each_command(folder, blocks), **SHAPES[place])
        ) as running:
            try:
                return dataclasses.replace(running.wait(2 * PATIENCE_S), folder=folder)
            except subprocess.TimeoutExpired as error:
                return error

    def read_losses(place: str, name: str, mesh: str) -> Losses:
        ended = run_place(place)
        if isinstance(ended, subprocess.TimeoutExpired):
            raise ended
        result = assert_success(ended)
        return dataclasses.replace(result, folder=result.folder / f"{name}-{mesh}").losses

    return read_losses


@pytest.fixture(scope="module")
def on_one_device(losses_of: Callable[[str, str, str], Losses]) -> dict[str, Losses]:
    return {name: losses_of("1-device", name, "one") for name in MODELS}


def assert_equal_losses(losses: Losses, expected: Losses, steps: int) -> None:
    assert sorted(losses) == list(range(1, steps + 1))
    for step, loss in losses.items():
        assert loss == pytest.approx(expected[step], rel=1e-5), f"step {step}"


@pytest.mark.parametrize("name", MODELS)
def test_loss_falls_on_one_device(on_one_device: dict[str, Losses], name: str) -> None:
    losses = on_one_device[name]
    assert losses[20] <= 0.8 * losses[1]


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=[] if place == "2-processes" else pytest.mark.extended)
        for place in PLACES
    ],
)
@pytest.mark.parametrize("mesh", [mesh for _, mesh in IN_EVERY_PLACE])
def test_every_mesh_has_the_losses_of_one_device(
    losses_of: Callable[[str, str, str], Losses],
    on_one_device: dict[str, Losses],
    mesh: str,
    place: str,
) -> None:
    name = next(name for name, axes in IN_EVERY_PLACE if axes == mesh)
    assert_equal_losses(
        losses_of(place, name, mesh), on_one_device[name], step_count(place, name, mesh)
    )


@pytest.mark.parametrize(("name", "mesh"), TRANSFORMERS_IN_TWO)
def test_transformer_in_two_processes_has_the_losses_of_one_device(
    losses_of: Callable[[str, str, str], Losses],
    on_one_device: dict[str, Losses],
    name: str,
    mesh: str,
) -> None:
    assert_equal_losses(
        losses_of("2-processes", name, mesh),
        on_one_device[name],
        step_count("2-processes", name, mesh),
    )


@pytest.mark.extended
@pytest.mark.parametrize("name", OVER_SLICES)
def test_mesh_over_two_slices_has_the_losses_of_one_device(
    losses_of: Callable[[str, str, str], Losses], on_one_device: dict[str, Losses], name: str
) -> None:
    mesh = "dp2-of-slices"
    assert_equal_losses(
        losses_of("2-slices", name, mesh), on_one_device[name], step_count("2-slices", name, mesh)
    )


@pytest.fixture(scope="module")
def optimized_losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    folder = tmp_path_factory.mktemp("optimized")
    return assert_success(
        run_job(folder, make_job(DECODER | {"steps": FEW_STEPS}, per_host=1), env=USUAL_COMPILES)
    ).losses


@pytest.mark.extended
def test_optimized_program_has_the_losses_of_one_device(
    tmp_path: Path, optimized_losses: Losses
) -> None:
    train = DECODER | {"mesh": MESHES["dp2-of-slices"], "steps": FEW_STEPS}
    job = make_job(train, **SHAPES["2-slices"])
    result = assert_success(run_job(tmp_path, job, env=USUAL_COMPILES))
    assert_equal_losses(result.losses, optimized_losses, FEW_STEPS)
