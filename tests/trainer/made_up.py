"""A model of made-up weights, planned and exported, and the memory that takes: a command.

`python -m tests.trainer.made_up FOLDER`: FOLDER must have room for the model, 16 GB for llama-8b,
the default of `--preset`; it is empty again at the end. Its `config.json` is written first, and the
plan is of `init_from` alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from flax import nnx

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.huggingface import config_json
from jaxlaunch.trainer.step.state import ModelArrays
from jaxlaunch.trainer.tasks.lm import NextToken


@dataclasses.dataclass(frozen=True)
class MadeUp:
    """A parameter that is nowhere: what is asked of it is made when it is asked for."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, place: Any) -> np.ndarray[Any, Any]:
        return np.full(np.broadcast_to(np.int8(0), self.shape)[place].shape, 0.01, self.dtype)


def params(model: Any, dtype: Any = ml_dtypes.bfloat16) -> dict[str, MadeUp]:
    """The model's parameters by name, in no memory."""
    train = spec.TrainSpec(task="tests:MadeUp", model=model)
    shapes = ModelArrays(nnx.eval_shape(lambda: NextToken().model(train, nnx.Rngs(0)))).params
    return {name: MadeUp(leaf.shape, np.dtype(dtype)) for name, leaf in shapes.items()}


def largest(item: dict[str, MadeUp]) -> int:
    """Bytes of the largest tensor that an export writes: one layer of a stack."""
    of_layer = [
        leaf.shape[1:] if name.startswith("blocks.") else leaf.shape for name, leaf in item.items()
    ]
    return max(int(np.prod(shape)) for shape in of_layer) * next(iter(item.values())).dtype.itemsize


def plan_of(folder: str, devices: int = 8) -> tuple[dict[str, Any], int]:
    """Return the plan of a training from the folder, and the peak memory of its process."""
    train = {"task": "lm", "model": {"init_from": folder, "length": 2048}, "batch": devices}
    train |= {"mesh": {"fsdp": devices}, "precision": "bf16", "remat": "full"}
    environ = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "TRAIN_SPEC": json.dumps(train),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "jaxlaunch.trainer.plan"],
        env=os.environ | environ,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    message = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    assert status == 0
    return json.loads(message), 1024 * used.ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.trainer.made_up", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--preset", default="llama-8b")
    options = parser.parse_args()
    from tests.trainer import peaks

    model = spec.Decoder(preset=options.preset)
    item, source, to = params(model), options.folder / "in", options.folder / "out"
    size = sum(int(np.prod(leaf.shape)) for leaf in item.values())
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(config_json.render_config(model)))
    plan, memory = plan_of(str(source))
    print(f"{size:,} parameters; largest tensor {largest(item) / 1e6:.0f} MB", flush=True)
    print(
        f"plan: {plan['parameters']:,} parameters, its process {memory / 1e6:.0f} MB at most",
        flush=True,
    )
    assert plan["parameters"] == size
    peak = peaks.growth(
        PREPARE, "save.save_model(sys.argv[2], model, each)", model.model_dump_json(), str(to)
    )
    files = sorted(to.glob("*.safetensors"))
    written = sum(file.stat().st_size for file in files)
    print(
        f"export: {written / 1e9:.2f} GB in {len(files)} files, {peak / 1e6:.0f} MB at most above "
        "its start: ",
        end="",
    )
    print(f"{peak / largest(item):.2f} of the largest tensor")
    shutil.rmtree(source)
    shutil.rmtree(to)


# What is imported late is imported before memory is measured.
PREPARE = """
from tests.trainer import made_up
from jaxlaunch.trainer import spec
from jaxlaunch.trainer.huggingface import save
model = spec.Decoder.model_validate_json(sys.argv[1])
each = made_up.params(model)
small = spec.Decoder(layers=1, width=8, heads=2, vocab=8, length=8)
save.save_model(sys.argv[2] + "-small", small, made_up.params(small))
import shutil; shutil.rmtree(sys.argv[2] + "-small")
"""

if __name__ == "__main__":
    main()
