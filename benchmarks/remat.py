"""Memory of each remat policy: temporary bytes of a compiled train step, over those of `none`.

In float32 the losses of a few steps must be bitwise equal to those of `none`, because remat only
repeats computations. In bfloat16 they differ in the fifth digit, because XLA fuses differently and
keeps float32 within a fusion.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import jax
import numpy as np

from benchmarks.table import Row, emit_rows, log_progress
from jaxlaunch.trainer.parallel import mesh
from jaxlaunch.trainer.spec import LM, TrainSpec
from jaxlaunch.trainer.step.train_step import Step
from jaxlaunch.trainer.user_code import load_object

STEPS = 5
SIZES: dict[str, int] = {"layers": 4, "width": 64, "heads": 4, "vocab": 256, "length": 128}
# Each policy keeps less than the previous one.
POLICIES = ("none", "dots", "dots_no_batch", "full")


def make_step(remat: str, **sizes: int) -> tuple[Step, dict[str, np.ndarray[Any, Any]]]:
    """Return a compiled train step on one device, and its batch."""
    train = TrainSpec(
        task=LM, model={"kind": "decoder", **SIZES, **sizes}, mesh={"dp": 1}, batch=8, remat=remat
    )
    step = Step(load_object(LM)(), train, mesh.build_mesh(train.mesh, jax.devices()[:1]), STEPS)
    tokens = np.random.default_rng(0).integers(0, 256, (8, train.model.length + 1), np.int32)  # type: ignore[union-attr]
    batch = {
        "tokens": tokens,
        "mask": np.ones((8, tokens.shape[1] - 1), np.float32),
        "weight": np.ones(8, np.float32),
    }
    step.compile_train(step.put_batch(batch))
    return step, batch


def measure_policy(remat: str, **sizes: int) -> tuple[float, list[float]]:
    """Return the temporary bytes of a step, and the losses of STEPS steps."""
    step, batch = make_step(remat, **sizes)
    state, losses = step.init_state(), []
    for _ in range(STEPS):
        state, metrics = step.train(state, step.put_batch(batch))
        losses.append(float(metrics["loss"]))
    return float(step.compiled_steps["train"].memory_analysis().temp_size_in_bytes), losses


def policy_rows(**sizes: int) -> list[Row]:
    """Return a row for each policy. Raises SystemExit if one changes a loss or keeps too much."""
    results = {remat: measure_policy(remat, **sizes) for remat in POLICIES}
    max_bytes, expected_losses = results["none"]
    rows = []
    for previous, remat in zip(POLICIES, POLICIES[1:], strict=False):
        kept_bytes, losses = results[remat]
        if losses != expected_losses:
            raise SystemExit(
                f"remat {remat}: losses {losses} are not those of none, {expected_losses}"
            )
        if kept_bytes > results[previous][0] or kept_bytes == max_bytes:
            raise SystemExit(
                f"remat {remat} keeps {kept_bytes:.0f} bytes, {previous} {results[previous][0]:.0f}"
            )
        detail = (
            f"{kept_bytes / 2**20:.1f} MiB over {max_bytes / 2**20:.1f} MiB of temporary memory, "
            "losses equal to the bit"
        )
        rows.append(Row(f"remat {remat} over none", kept_bytes / max_bytes, 1.0, detail))
    return rows


def main() -> None:
    log_progress("remat: temporary bytes of a decoder's step")
    os.environ["JAX_PLATFORMS"] = "cpu"
    emit_rows(policy_rows())


if __name__ == "__main__":
    sys.exit(main())
