"""How far a process's memory grows, and a model large enough to be seen in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from flax import nnx

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.gpt2 import GPT2
from jaxlaunch.trainer.step.state import ModelArrays

LARGE = spec.GPT2(
    layers=12, width=512, heads=8, vocab=8192, length=256
)  # 170 MB; its largest array is 0.3 of it

PROGRAM = """
import sys

def kilobytes(key):
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith(key)).split()[1])

{prepare}
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins here: proc(5)
before = kilobytes("VmRSS")
{measured}
print(1024 * (kilobytes("VmHWM") - before))
"""


def large() -> dict[str, np.ndarray]:
    """Made-up parameters of LARGE."""
    draw = np.random.default_rng(0)
    shapes = ModelArrays(nnx.eval_shape(lambda: GPT2(LARGE, nnx.Rngs(0)))).params
    return {name: draw.random(leaf.shape, np.float32) for name, leaf in shapes.items()}


def growth(prepare: str, measured: str, *arguments: str) -> int:
    """Return the bytes by which a process of its own grows at most in `measured`."""
    command = [sys.executable, "-c", PROGRAM.format(prepare=prepare, measured=measured), *arguments]
    environ = os.environ | {"JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]  # the measured programs import `tests`
    return int(
        subprocess.run(
            command, cwd=root, env=environ, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
    )
