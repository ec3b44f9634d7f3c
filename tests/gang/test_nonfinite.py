"""A loss that is no number ends the run, and never reaches a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.found import shows
from tests.gang.runs import digits, job, launch

pytestmark = pytest.mark.computes

BATCH = 16


@pytest.mark.parametrize(
    "step", [5, 6]
)  # 4 may still be on its way to storage then; 6 is to be saved itself
def test_a_loss_that_is_not_finite_ends_the_run_and_is_never_saved(
    tmp_path: Path, step: int
) -> None:
    wrong = {"count": 512, "wrong": BATCH * step - 1}
    data = {"source": "torch", "dataset": "mine:Pairs", "args": wrong, "shuffle": False}
    train = digits(data=data, batch=BATCH, checkpoint={"every": 2})
    result = launch(tmp_path, job(train, hosts=2, per_host=1))
    assert result.code == 76, result.stderr[-3000:]
    verdict = result.verdict
    assert (verdict["cause"], verdict["code"]) == ("not_finite", 76)
    assert f"step {step}: loss nan" in verdict["message"]
    shows("step 120: loss nan with gradient norm nan", verdict["message"])
    mine = Path(__file__).with_name("mine.py")
    said = (
        f"mine:Pairs: example {wrong['wrong']}, at position {wrong['wrong']}, has image "
        f"nan ({mine}:"
    )
    assert f"Its batch is not finite: {said}" in verdict["message"]
    assert len((result.folder / "attempts.jsonl").read_text().splitlines()) == 1
    assert (
        sorted(result.losses) == list(range(1, step))
        and np.isfinite(list(result.losses.values())).all()
    )
    folders = sorted(
        path.name for path in (result.folder / "checkpoints").iterdir() if path.name.isdecimal()
    )
    assert folders == ["2", "4"]
    manifest = json.loads((result.folder / "checkpoints/4/jaxlaunch.manifest.json").read_text())
    assert manifest["manifest"]["step"] == 4
    for path in (result.folder / "checkpoints").glob("[0-9]*"):
        arrays = jax.tree.leaves(stored(path / "state"))
        assert arrays and all(np.isfinite(array).all() for array in arrays)


def stored(folder: Path) -> Any:
    """The arrays of a checkpoint as NumPy's, whatever devices they were saved from."""
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.metadata(folder).item_metadata.tree
        return checkpointer.restore(
            folder, jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), saved)
        )
