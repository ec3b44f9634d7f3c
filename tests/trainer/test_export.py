"""A checkpoint, exported, in the hands of other people's programs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlaunch import contract
from jaxlaunch.trainer.checkpoint.store import Store
from jaxlaunch.trainer.errors import CheckpointError, SpecError
from jaxlaunch.trainer.export import export
from jaxlaunch.trainer.huggingface import save
from jaxlaunch.trainer.step.state import TrainState
from tests import environments, needs
from tests.trainer import peaks, references
from tests.trainer.references import FIXTURES, batch, folder, logits, step, train_spec

CASES = ("llama_tiny", "llama3_tiny", "gpt2_tiny", "vit_tiny")
STEPS = 3
# Models as they were read, with other rotary scalings than their fixtures have: only transformers
# can say them.
YARN = {"kind": "yarn", "factor": 4.0, "original_length": 32}
YARN_OPTIONS = {"beta_fast": 16.0, "attention_factor": 1.3, "truncate": False}
SCALED: dict[str, dict[str, Any]] = {
    "qwen2_tiny": {"rope_scaling": YARN},
    "qwen3_tiny": {"rope_scaling": {**YARN, **YARN_OPTIONS}},
    "mistral_tiny": {"rope_scaling": {"kind": "linear", "factor": 2.0}},
    "gemma2_tiny": {},
    "gemma3_tiny": {"rope_scaling": {"kind": "linear", "factor": 8.0}},
    "olmo2_tiny": {"biases": ["qkv", "out"]},
    "mixtral_tiny": {"balance": 0.02},
    "qwen3_moe_tiny": {"dense_layers": [1], "experts_normalized": False},
}
ADAMW = {"name": "adamw", "lr": 1e-3, "ema": 0.5, "schedule": {"name": "constant"}}


@functools.cache
def train_case(case: str, hf_folder: Path) -> TrainState:
    """The case's model after a few steps of ours, from the weights of its fixture."""
    of_case = step(case, folder(case, hf_folder / case), optimizer=ADAMW)
    rows = of_case.put_batch(batch(case))
    of_case.compile_train(rows)
    state = of_case.init_state()
    for _ in range(STEPS):
        state, _ = of_case.train(state, rows)
    return state


@functools.cache
def draw_params(case: str) -> dict[str, Any]:
    """Return random parameters of the case's model in SCALED, similar to its fixture's."""
    shapes = step(case, None, model=SCALED[case]).abstract.params
    draw = np.random.default_rng(0)
    draw = draw.normal
    return {name: draw(0.0, 0.1, leaf.shape).astype(np.float32) for name, leaf in shapes.items()}


def save_checkpoint(case: str, state: TrainState, target: Path) -> Path:
    """The state as a checkpoint of step 3."""
    train = train_spec(case, None)
    tree = step(case, None, optimizer=ADAMW).builder.to_tree(state)
    return write_checkpoint(tree, train.model.model_dump(mode="json"), target)


def write_checkpoint(tree: dict[str, Any], model: dict[str, Any] | None, target: Path) -> Path:
    store = Store(str(target), keep=1, uid="mine")
    store.claim()
    store.save(STEPS, tree, {"model": model} if model else {})
    store.close()
    return target


@pytest.fixture(scope="module")
def hf_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.mark.extended
def test_transformers_loads_exports_with_equal_logits(hf_folder: Path, tmp_path: Path) -> None:
    try:
        environments.find_python("torch")
    except environments.MissingEnvironmentError as error:
        needs.absent(str(error))
    arguments = []
    for case in CASES:
        checkpoints = save_checkpoint(case, train_case(case, hf_folder), tmp_path / case)
        out = str(tmp_path / f"{case}-out")
        assert export(str(checkpoints), out)["step"] == STEPS
        arguments += [out, str(needs.arrays(FIXTURES / case / "io.safetensors"))]
    program = Path(__file__).with_name("transformers_logits.py")
    answers = environments.run_program("torch", str(program), *arguments).splitlines()
    for case, line in zip(CASES, answers, strict=True):
        answer = json.loads(line)
        assert (answer["faults"], answer["dtype"]) == ({}, "torch.float32"), case
        ours = logits(case, dict(train_case(case, hf_folder).params))
        untrained = references.tensors(case, "io")["logits"]
        assert not np.allclose(ours, untrained, rtol=0, atol=1e-3)
        np.testing.assert_allclose(
            ours, answer["logits"], rtol=0, atol=references.limit(case), err_msg=case
        )


@pytest.mark.extended
def test_transformers_agrees_for_every_family(tmp_path: Path) -> None:
    try:
        environments.find_python("torch")
    except environments.MissingEnvironmentError as error:
        needs.absent(str(error))
    arguments = []
    for case in SCALED:
        model: Any = train_spec(case, None, model=SCALED[case]).model
        save.save_model(str(tmp_path / case), model, draw_params(case))
        arguments += [str(tmp_path / case), str(needs.arrays(FIXTURES / case / "io.safetensors"))]
    program = Path(__file__).with_name("transformers_logits.py")
    lines = environments.run_program("torch", str(program), *arguments).splitlines()
    for case, line in zip(SCALED, lines, strict=True):
        answer, ours = json.loads(line), logits(case, draw_params(case), SCALED[case])
        assert (answer["faults"], answer["dtype"]) == ({}, "torch.float32"), case
        np.testing.assert_allclose(
            ours, answer["logits"], rtol=0, atol=references.limit(case), err_msg=case
        )


@pytest.mark.parametrize("case", ["gpt2_tiny", "vit_tiny"])
def test_export_round_trips_bit_by_bit(case: str, hf_folder: Path, tmp_path: Path) -> None:
    state = train_case(case, hf_folder)
    assert state.ema is not None
    source = str(save_checkpoint(case, state, tmp_path / "in"))
    for name, ema, expected in (("weights", False, state.params), ("average", True, state.ema)):
        export(source, str(tmp_path / name), ema=ema)
        params = step(case, tmp_path / name).init_state().params
        assert params.keys() == expected.keys()
        assert all(np.array_equal(params[item], expected[item]) for item in params), name


def test_export_keeps_bfloat16(tmp_path: Path) -> None:
    precision = {"params": "bfloat16", "compute": "bfloat16"}
    state = step("llama_tiny", None, precision=precision).init_state()
    model = train_spec("llama_tiny", None).model.model_dump()
    source = write_checkpoint({"params": dict(state.params)}, model, tmp_path / "in")
    assert export(str(source), str(tmp_path / "out"))["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("model", "ema", "error", "message"),
    [
        (
            {"kind": "mlp"},
            False,
            SpecError,
            "mlp has no Hugging Face form; convnext, decoder, gpt2, resnet, vit have one",
        ),
        ({"kind": "gpt2"}, True, SpecError, "step 3 holds no moving average"),
        (None, False, CheckpointError, "step 3 does not record its model"),
    ],
)
def test_unsupported_exports_are_rejected(
    model: dict[str, Any] | None, ema: bool, error: type[Exception], message: str, tmp_path: Path
) -> None:
    tree = {"params": {"kernel": np.ones(3, np.float32)}}
    source = write_checkpoint(tree, model, tmp_path / "in")
    with pytest.raises(error, match=message):
        export(str(source), str(tmp_path / "out"), ema=ema)
    assert not (tmp_path / "out").exists()


# --- a process of its own -------------------------------------------------------------------------

EXPORTER = """
from jaxlaunch.trainer import export
from jaxlaunch.trainer.checkpoint import reader
source, to = sys.argv[1:]
reader.find_step(source).part_arrays("params")["norm.scale"][:]  # what is imported late is imported
"""


def test_export_never_holds_the_whole_model(tmp_path: Path) -> None:
    params = peaks.large()
    model = peaks.LARGE.model_dump(mode="json")
    source = write_checkpoint({"params": params}, model, tmp_path / "in")
    peak = peaks.growth(EXPORTER, "export.export(source, to)", str(source), str(tmp_path / "out"))
    size = sum(array.nbytes for array in params.values())
    assert size > 150e6
    # The measured peak was 0.6 of the size; the largest array is 0.3 of it.
    assert peak < size


def test_export_finds_the_checkpoints_of_a_pod(hf_folder: Path, tmp_path: Path) -> None:
    source = save_checkpoint("gpt2_tiny", train_case("gpt2_tiny", hf_folder), tmp_path / "in")
    train = {"task": "lm", "checkpoint": {"path": str(source)}}
    environ = os.environ | {"JAX_PLATFORMS": "cpu", contract.TRAIN_SPEC: json.dumps(train)}
    command = [sys.executable, "-m", "jaxlaunch.trainer.export", "--to", str(tmp_path / "out")]
    completed = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr
    assert json.loads(completed.stdout)["architecture"] == "GPT2LMHeadModel"
    repeated = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert repeated.returncode == contract.BAD_SPEC
    assert repeated.stderr == (
        f"trainer: {tmp_path / 'out'} already exists; name a new folder or an empty one (exit 64)\n"
    )
