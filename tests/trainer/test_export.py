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
from jaxlaunch.trainer.step.state import TrainState
from tests.trainer import peaks
from tests.trainer.references import batch, folder, step, train_spec

STEPS = 3
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
            "mlp cannot be exported, because Hugging Face has no equivalent; convnext, decoder, "
            "gpt2, resnet, vit can",
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
