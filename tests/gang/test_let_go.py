"""An error does not cost the save that was begun before it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang.runs import digits, job, launch

pytestmark = pytest.mark.computes


class Breaks:
    """A map-style dataset whose record 79 cannot be read: the last of step 5."""

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> dict[str, object]:
        import numpy as np

        if index == 79:
            raise ValueError("a torn record")
        return {"image": np.full((8, 8), index % 10, np.uint8), "label": index % 10}


def test_bad_data_after_a_save_was_begun_leaves_that_save(tmp_path: Path) -> None:
    data = {"source": "torch", "dataset": "test_let_go:Breaks", "shuffle": False, "prefetch": 0}
    result = launch(
        tmp_path, job(digits(data=data, checkpoint={"every": 4}, steps=50), hosts=2, per_host=1)
    )
    assert result.code == 65
    assert "a torn record" in result.verdict["message"] and result.verdict["rank"] == 1
    steps = [
        path.name for path in (result.folder / "checkpoints").iterdir() if path.name[0].isdecimal()
    ]
    assert steps == ["4"]  # and no folder of a save cut short
    assert (result.folder / "checkpoints/4/jaxlaunch.manifest.json").exists()
