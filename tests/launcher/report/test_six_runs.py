"""What the pages of six runs that went wrong say first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher.report import six_runs
from tests.launcher.report.test_page import page_data

FIRST_WORDS = {
    "hang": "Rank 2 has not ended its step for 40 s, in step in read (tasks.py:12); the other "
    "ranks wait for it.",
    "slow": "Rank 2 is 2.1 % slower than the others, which wait for it: it spends 2.4 % of each "
    "step on data and its own Python code, the others 0.3 %.",
    "killed": "failed after 2 min 0 s at step 600: rank 2 was killed by SIGKILL",
    "nan": "failed after 2 min 0 s at step 600: rank 0 raised in step: NotFiniteError: the",
    "oom": "failed after 2 min 0 s at step 600: rank 1 was OOMKilled",
    "full": "failed after 2 min 0 s at step 600: rank 0 raised in save: StorageError: No space",
}


@pytest.mark.parametrize("name", six_runs.SHOWN)
def test_page_begins_with_what_went_wrong(tmp_path: Path, name: str) -> None:
    data = page_data(six_runs.render_page(tmp_path / name, name))

    assert FIRST_WORDS[name] in " ".join(data["sentence"].values())
    used = "8 of 8 GiB (100 %)" if name == "oom" else "2.4 of 8 GiB (30 %)"
    assert ["most memory", f"host {used}"] in data["facts"]
    assert "host_limit_gib" in data["curves"] and "host_limit_gib" not in data["drawn"]
    letters = [column[2] for column in data["heat"]["columns"] if column[0] >= 80.0]
    # A rank has the colour of a hang before any timeout has passed.
    assert set(letters) == ({"w2hw"} if name == "hang" else {"s4"})
    assert json.dumps(data["heat"]["slow"]) == json.dumps(
        [{"rank": 2, "own": 24, "usual": 3}] if name == "slow" else []
    )
