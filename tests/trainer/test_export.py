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
SCALED: dict[str, dict[str, Any]] = {
    "qwen2_tiny": {"rope_scaling": YARN},
    "qwen3_tiny": {
        "rope_scaling": {**YARN, "beta_fast": 16.0, "attention_factor": 1.3, "truncate": False}
    },
    "mistral_tiny": {"rope_scaling": {"kind": "linear", "factor": 2.0}},
    "gemma2_tiny": {},
    "gemma3_tiny": {"rope_scaling": {"kind": "linear", "factor": 8.0}},
    "olmo2_tiny": {"biases": ["qkv", "out"]},
    "mixtral_tiny": {"balance": 0.02},
    "qwen3_moe_tiny": {"dense_layers": [1], "experts_normalized": False},
}
ADAMW = {"name": "adamw", "lr": 1e-3, "ema": 0.5, "schedule": {"name": "constant"}}


@functools.cache
def trained(case: str, hf: Path) -> TrainState:
    """The case's model after a few steps of ours, from the weights of its fixture."""
    of_case = step(case, folder(case, hf / case), optimizer=ADAMW)
    rows = of_case.put_batch(batch(case))
    of_case.compile_train(rows)
    state = of_case.init_state()
    for _ in range(STEPS):
        state, _ = of_case.train(state, rows)
    return state


@functools.cache
def untrained(case: str) -> dict[str, Any]:
    """Parameters drawn for the case's model in SCALED, in their deviation near to those of its fixture."""
    shapes = step(case, None, model=SCALED[case]).abstract.params
    draw = np.random.default_rng(0)
    return {
        name: draw.normal(0.0, 0.1, leaf.shape).astype(np.float32) for name, leaf in shapes.items()
    }


def saved(case: str, state: TrainState, to: Path) -> Path:
    """The state as a checkpoint of step 3."""
    train = train_spec(case, None)
    return checkpoint(
        step(case, None, optimizer=ADAMW).builder.to_tree(state),
        train.model.model_dump(mode="json"),
        to,
    )


def checkpoint(tree: dict[str, Any], model: dict[str, Any] | None, to: Path) -> Path:
    store = Store(str(to), keep=1, uid="mine")
    store.claim()
    store.save(STEPS, tree, {"model": model} if model else {})
    store.close()
    return to


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hf")


@pytest.mark.extended
def test_transformers_loads_every_model_and_says_the_same(hf: Path, tmp_path: Path) -> None:
    try:
        environments.find_python("torch")
    except environments.MissingEnvironmentError as error:
        needs.absent(str(error))
    arguments = []
    for case in CASES:
        exported = export(
            str(saved(case, trained(case, hf), tmp_path / case)), str(tmp_path / f"{case}-out")
        )
        assert exported["step"] == STEPS
        arguments += [
            str(tmp_path / f"{case}-out"),
            str(needs.arrays(FIXTURES / case / "io.safetensors")),
        ]
    program = Path(__file__).with_name("transformers_logits.py")
    answers = environments.run_program("torch", str(program), *arguments).splitlines()
    for case, line in zip(CASES, answers, strict=True):
        answer = json.loads(line)
        assert (answer["faults"], answer["dtype"]) == ({}, "torch.float32"), case
        ours = logits(case, dict(trained(case, hf).params))
        assert not np.allclose(ours, references.tensors(case, "io")["logits"], rtol=0, atol=1e-3), (
            "it was trained"
        )
        np.testing.assert_allclose(
            ours, answer["logits"], rtol=0, atol=references.limit(case), err_msg=case
        )


@pytest.mark.extended
def test_transformers_says_the_same_of_every_family_and_rotary_scaling(tmp_path: Path) -> None:
    try:
        environments.find_python("torch")
    except environments.MissingEnvironmentError as error:
        needs.absent(str(error))
    arguments = []
    for case in SCALED:
        save.save_model(
            str(tmp_path / case), train_spec(case, None, model=SCALED[case]).model, untrained(case)
        )
        arguments += [str(tmp_path / case), str(needs.arrays(FIXTURES / case / "io.safetensors"))]
    program = Path(__file__).with_name("transformers_logits.py")
    for case, line in zip(
        SCALED,
        environments.run_program("torch", str(program), *arguments).splitlines(),
        strict=True,
    ):
        answer, ours = json.loads(line), logits(case, untrained(case), SCALED[case])
        assert (answer["faults"], answer["dtype"]) == ({}, "torch.float32"), case
        np.testing.assert_allclose(
            ours, answer["logits"], rtol=0, atol=references.limit(case), err_msg=case
        )


@pytest.mark.parametrize("case", ["gpt2_tiny", "vit_tiny"])
def test_what_is_exported_is_read_back_bit_by_bit(case: str, hf: Path, tmp_path: Path) -> None:
    state = trained(case, hf)
    assert state.ema is not None
    source = str(saved(case, state, tmp_path / "in"))
    for name, ema, wanted in (("weights", False, state.params), ("average", True, state.ema)):
        export(source, str(tmp_path / name), ema=ema)
        found = step(case, tmp_path / name).init_state().params
        assert found.keys() == wanted.keys()
        assert all(np.array_equal(found[each], wanted[each]) for each in found), name


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    state = step(
        "llama_tiny", None, precision={"params": "bfloat16", "compute": "bfloat16"}
    ).init_state()
    source = checkpoint(
        {"params": dict(state.params)},
        train_spec("llama_tiny", None).model.model_dump(),
        tmp_path / "in",
    )
    assert export(str(source), str(tmp_path / "out"))["dtype"] == "bfloat16"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("model", "ema", "error", "says"),
    [
        ({"kind": "mlp"}, False, SpecError, "mlp has no Hugging Face form; convnext, decoder"),
        ({"kind": "gpt2"}, True, SpecError, "step 3 holds no moving average"),
        (None, False, CheckpointError, "step 3 does not record its model"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    model: dict[str, Any] | None, ema: bool, error: type[Exception], says: str, tmp_path: Path
) -> None:
    source = checkpoint({"params": {"kernel": np.ones(3, np.float32)}}, model, tmp_path / "in")
    with pytest.raises(error, match=says):
        export(str(source), str(tmp_path / "out"), ema=ema)
    assert not (tmp_path / "out").exists()


# --- a process of its own -------------------------------------------------------------------------

EXPORTER = """
from jaxlaunch.trainer import export
from jaxlaunch.trainer.checkpoint import reader
source, to = sys.argv[1:]
reader.find_step(source).part_arrays("params")["norm.scale"][:]  # what is imported late is imported
"""


def test_a_model_is_never_whole_in_memory(tmp_path: Path) -> None:
    params = peaks.large()
    source = checkpoint({"params": params}, peaks.LARGE.model_dump(mode="json"), tmp_path / "in")
    peak = peaks.growth(EXPORTER, "export.export(source, to)", str(source), str(tmp_path / "out"))
    size = sum(array.nbytes for array in params.values())
    assert size > 150e6
    assert (
        peak < size
    )  # 0.6 of it on the machine that this was written on: the largest array is 0.3


def test_a_pod_knows_where_its_checkpoints_lie(hf: Path, tmp_path: Path) -> None:
    source = saved("gpt2_tiny", trained("gpt2_tiny", hf), tmp_path / "in")
    train = {"task": "lm", "checkpoint": {"path": str(source)}}
    environ = os.environ | {"JAX_PLATFORMS": "cpu", contract.TRAIN_SPEC: json.dumps(train)}
    command = [sys.executable, "-m", "jaxlaunch.trainer.export", "--to", str(tmp_path / "out")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["architecture"] == "GPT2LMHeadModel"
    again = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert again.returncode == contract.BAD_SPEC
    assert again.stderr == (
        f"trainer: {tmp_path / 'out'} already exists; name a new folder or an empty one (exit 64)\n"
    )
