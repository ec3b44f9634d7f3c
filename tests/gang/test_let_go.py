"""An error does not lose the save that was begun before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang.runs import digits_block, make_job, run_job

pytestmark = pytest.mark.computes


class BrokenRecord:
    """A map-style dataset whose record 79, the last of step 5, cannot be read."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> dict[str, object]:
        import numpy as np

        if index == 79:
            raise ValueError("a torn record")
        return {"image": np.full((8, 8), index % 10, np.uint8), "label": index % 10}


def test_bad_data_does_not_lose_the_save_before_it(tmp_path: Path) -> None:
    data = {
        "source": "torch",
        "dataset": "test_let_go:BrokenRecord",
        "shuffle": False,
        "prefetch": 0,
    }
    result = run_job(
        tmp_path,
        make_job(digits_block(data=data, checkpoint={"every": 4}, steps=50), hosts=2, per_host=1),
    )
    assert result.code == 65
    assert "a torn record" in result.verdict["message"] and result.verdict["rank"] == 1
    steps = [
        path.name for path in (result.folder / "checkpoints").iterdir() if path.name[0].isdecimal()
    ]
    assert steps == ["4"]  # and no folder of a save cut short
    assert (result.folder / "checkpoints/4/jaxlaunch.manifest.json").exists()
