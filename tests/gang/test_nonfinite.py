"""A loss that is not finite ends the run, and never reaches a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.found import shows
from tests.gang.runs import digits_block, make_job, run_job

pytestmark = pytest.mark.computes

BATCH = 16


# In step 5, step 4 may still be on its way to storage; step 6 is to be saved itself.
@pytest.mark.parametrize(("step", "hosts"), [(5, 1), (6, 2)])
def test_loss_that_is_not_finite_ends_the_run_and_is_not_saved(
    tmp_path: Path, step: int, hosts: int
) -> None:
    args = {"count": 512, "wrong": BATCH * step - 1}
    data = {"source": "torch", "dataset": "mine:Pairs", "args": args, "shuffle": False}
    train = digits_block(data=data, batch=BATCH, checkpoint={"every": 2})
    result = run_job(tmp_path, make_job(train, hosts=hosts, per_host=1))
    assert result.code == 76, result.stderr[-3000:]
    verdict = result.verdict
    assert (verdict["cause"], verdict["code"]) == ("not_finite", 76)
    assert f"loss nan with gradient norm nan in step {step}; the" in verdict["message"]
    assert "step 4 is the newest saved one" in verdict["message"]
    shows("loss nan with gradient norm nan in step 120", verdict["message"])
    mine = Path(__file__).with_name("mine.py")
    batch_note = (
        f"mine:Pairs: example {args['wrong']}, at position {args['wrong']}, has image nan ({mine}:"
    )
    assert f"Its batch is not finite: {batch_note}" in verdict["message"]
    assert len((result.folder / "attempts.jsonl").read_text().splitlines()) == 1
    assert sorted(result.losses) == list(range(1, step))
    assert np.isfinite(list(result.losses.values())).all()
    folders = sorted(
        path.name for path in (result.folder / "checkpoints").iterdir() if path.name.isdecimal()
    )
    assert folders == ["2", "4"]
    manifest = json.loads((result.folder / "checkpoints/4/jaxlaunch.manifest.json").read_text())
    assert manifest["manifest"]["step"] == 4
    for path in (result.folder / "checkpoints").glob("[0-9]*"):
        arrays = jax.tree.leaves(read_arrays(path / "state"))
        assert arrays and all(np.isfinite(array).all() for array in arrays)


def read_arrays(folder: Path) -> Any:
    """Return the arrays of a checkpoint as NumPy arrays, whatever devices saved them."""
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(folder).item_metadata.tree
        return checkpointer.restore(
            folder, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), saved)
        )
