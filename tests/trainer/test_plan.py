"""Plans of trainings against published numbers, allocated memory, and XLA's numbers."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from typing import Any

import jax
import pytest

from jaxlaunch.contract import BAD_DATA, BAD_SPEC
from jaxlaunch.trainer import plan, spec
from jaxlaunch.trainer.plan import Plan
from jaxlaunch.trainer.tasks.classify import Classify
from jaxlaunch.trainer.tasks.lm import NextToken
from tests.trainer import states, tiny


def make_plan(task: Any, **keys: Any) -> dict[str, Any]:
    train = tiny.train_spec(task, **keys)
    return Plan(plan.with_synthetic_data(train, task), task).to_dict(sharding=True)


# The memory of a program is assigned before LLVM compiles it: without LLVM's optimizations the same
# bytes.
QUICK = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": "--xla_cpu_parallel_codegen_split_count=1",
}


def child(train: dict[str, Any], *flags: str, devices: int = 8) -> subprocess.CompletedProcess[str]:
    environ = QUICK | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "TRAIN_SPEC": json.dumps(train),
    }
    return subprocess.run(
        [sys.executable, "-m", "jaxlaunch.trainer.plan", *flags],
        env=os.environ | environ,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("model", "task", "parameters"),
    [
        (spec.GPT2(preset="gpt2-124m"), NextToken, 124_439_808),
        (spec.Decoder(preset="llama-1b"), NextToken, 1_235_814_400),
        (spec.Decoder(preset="llama-8b"), NextToken, 8_030_261_248),
        (spec.ViT(preset="vit-b16"), Classify, 86_567_656),
    ],
)  # of the models' own cards
def test_published_model_has_published_size(
    model: Any, task: Any, parameters: int, standard: None
) -> None:
    train = spec.TrainSpec(
        task="tests:Tiny", model=model, batch=8, mesh=spec.Mesh(fsdp=8), precision="bf16"
    )
    planned = Plan(plan.with_synthetic_data(train, task()), task())
    assert sum(leaf.size for leaf in jax.tree.leaves(planned.step.abstract.params)) == parameters


def test_convolutional_network_is_planned_for_data_size() -> None:
    data = {"source": "images", "path": "photos", "size": [32, 48]}
    train = spec.TrainSpec(task="classify", model=spec.ResNet(), data=data)
    assert plan.with_synthetic_data(train, Classify()).data.shape == [32, 48, 3]


def test_model_of_transformers_is_planned_without_its_data() -> None:
    model = spec.TransformersModel(init_from="olmo")
    data = {"source": "text", "path": "none"}
    train = spec.TrainSpec(task="lm", model=model, data=data)
    assert plan.with_synthetic_data(train, NextToken()).data.source == "synthetic"


def test_sampling_bytes_hold_weights_and_cache() -> None:
    options = spec.Eval(every=5, samples=spec.Samples(prompts=[[1, 2], [3], "ab"], max_tokens=6))
    result = make_plan(tiny.Counting(), precision="bf16", mesh={"dp": 4, "mp": 2}, eval=options)
    config = tiny.DECODER
    weights = sum(
        math.prod(jax.tree.leaves(row["shape"]))
        // math.prod(2 for axes in row["split"] if axes)
        * 2
        for row in result["sharding"]
    )
    cached = (
        2 * (2 + 6) * config.kv_head_count // 2 * config.head_channels * config.layers * 2
    )  # one row a device, bf16
    assert result["samples"] == weights + cached
    assert make_plan(tiny.Counting(), mesh={"dp": -1})["samples"] == 0


def test_absent_kernel_keeps_no_attention_matrix(standard: None) -> None:
    plain, kernel = (
        make_plan(tiny.Counting(), attention=attention, precision="bf16", mesh={"dp": -1})
        for attention in ("xla", "cudnn")
    )
    config = tiny.DECODER
    pairs = (
        tiny.ROWS // 8 * config.layers * config.heads * config.length**2
    )  # in an array of them, on a device
    spared = plain["activations"]["none"][1] - kernel["activations"]["none"][1]
    assert pairs * 4 <= spared <= pairs * 16  # scores or shares, in two bytes or four
    assert kernel["flops_per_step"] == plain["flops_per_step"]


@pytest.mark.parametrize(("model", "mesh"), list(zip(states.MODELS, states.MESHES, strict=True)))
def test_planned_bytes_match_device(model: str, mesh: str) -> None:
    """The others of six models on six meshes: `python -m tests.trainer.states`."""
    planned, held = states.state_bytes(model, mesh)
    assert planned == held and held["parameters"] > 0


def test_parameters_are_listed_with_sharding() -> None:
    listed = {
        row["name"]: row
        for row in make_plan(tiny.Counting(), mesh={"fsdp": 4, "mp": 2})["sharding"]
    }
    up = listed["blocks.mlp.up"]
    assert up["axes"] == ["layers", "embed", "hidden"]
    assert up["split"] == [[], ["fsdp"], ["mp"]]
    assert up["bytes"] == 4 * up["shape"][0] * up["shape"][1] * up["shape"][2] // 8


def test_micro_batches_lower_activations_and_count_gradients_twice() -> None:
    plans = [
        make_plan(tiny.Counting(), mesh={"dp": 4, "mp": 2}, accumulate=count) for count in (1, 4)
    ]
    once, twice = (planned["device"] for planned in plans)
    assert once["gradients"] == once["parameters"] and twice["gradients"] == 2 * once["gradients"]
    whole, micro = (planned["activations"] for planned in plans)
    assert micro["none"][1] < whole["none"][1] / 3
    assert whole["full"][1] < whole["none"][1] and whole["asked"] == whole["none"]


TRAIN: dict[str, Any] = {
    "task": "lm",
    "model": {"kind": "decoder", "layers": 6, "width": 128, "heads": 4, "length": 128},
    "data": {"source": "text", "path": "/on/the/cluster/alone.txt"},
    "precision": "fp32",
    "batch": 32,
}


CHIPS = json.dumps({"type": "cpu", "hosts": 1, "per_host": 8})


@pytest.mark.extended
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_estimate_is_near_compiled_memory(remat: str) -> None:
    result = json.loads(
        child({**TRAIN, "mesh": {"fsdp": 4}, "remat": remat}, "--compile", CHIPS, devices=4).stdout
    )
    estimated = result["device"]["gradients"] + result["activations"]["asked"][1]
    assert 0.6 < estimated / result["compiled"]["memory"]["train"]["temp"] < 1.5


def test_mp_residuals_are_within_range() -> None:
    result = json.loads(child({**TRAIN, "mesh": {"dp": 2, "mp": 4}}, "--compile", CHIPS).stdout)
    low, high = (result["device"]["gradients"] + end for end in result["activations"]["asked"])
    assert low < result["compiled"]["memory"]["train"]["temp"] < high


def test_wrong_spec_and_missing_data_have_exit_codes() -> None:
    absent = child({"task": "classify", "data": {"source": "array_record", "path": "/no"}})
    wrong = child({**TRAIN, "mesh": {"mp": 3}})
    assert (absent.returncode, wrong.returncode) == (BAD_DATA, BAD_SPEC)
    assert "devices, there are 8" in wrong.stderr and wrong.stdout == ""


def test_plan_without_jit_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plan"])
    with jax.disable_jit():
        assert plan.main() == BAD_SPEC
    assert "JAX_DISABLE_JIT is set" in capsys.readouterr().err


def test_epochs_of_absent_data_are_planned() -> None:
    schedule = {"name": "wsd", "warmup": 100, "decay": 900}
    options = child(
        {
            **TRAIN,
            "epochs": 2,
            "mesh": {"dp": 8},
            "optimizer": {"name": "adamw", "schedule": schedule},
        }
    )
    assert options.returncode == 0 and json.loads(options.stdout)["parameters"] > 0
