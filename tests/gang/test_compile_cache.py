"""A second run finds the programs of the first in the folder that both share, and says so in its metrics."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.gang.runs import Running, digits, job
from tests.site.jaxcache import BEFORE

pytestmark = pytest.mark.computes


def counted(folder: Path, document: dict[str, Any]) -> dict[str, float]:
    """What was found in the cache or not until some step of a run, over both ranks."""
    with Running(folder, document) as running:
        running.until_step(5)
        text = "".join(running.scrape(host) for host in range(2))
        running.signal(signal.SIGTERM)
        assert running.wait().code == 80
    found = {
        kind: re.findall(rf"^jaxlaunch_compile_cache_{kind}_total\S* (\S+)$", text, re.M) for kind in ("hits", "misses")
    }
    assert all(len(values) == 2 for values in found.values()), text
    return {kind: sum(map(float, values)) for kind, values in found.items()}


def test_programs_are_compiled_once_for_all_runs_that_share_a_cache(tmp_path: Path) -> None:
    cache = {"compile_cache": str(tmp_path / "cache"), "steps": 100_000}
    every = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", BEFORE: "inf"}
    document = job(digits(**cache), hosts=2, env=every)
    first, second = (counted(tmp_path / name, document) for name in ("first", "second"))
    assert first["misses"] > 0 and second["misses"] == 0
    assert second["hits"] >= first["misses"]
