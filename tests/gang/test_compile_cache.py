"""A second run finds the programs of the first in the folder that both share, and says so in its metrics."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gang.runs import Running, digits, job, own_cache
from tests.site.jaxcache import BEFORE

pytestmark = pytest.mark.computes


def counted(
    folder: Path,
    document: dict[str, Any],
    *,
    until: int = 5,
    env: Mapping[str, str | None] | None = None,
) -> dict[str, list[float]]:
    """What each of two ranks found in the cache or not, until some step of a run."""
    with Running(folder, document, env=env) as running:
        running.until_step(until)
        text = "".join(running.scrape(host) for host in range(2))
        running.signal(signal.SIGTERM)
        assert running.wait().code == 80
    found = {
        kind: re.findall(rf"^jaxlaunch_compile_cache_{kind}_total\S* (\S+)$", text, re.M)
        for kind in ("hits", "misses")
    }
    assert all(len(values) == 2 for values in found.values()), text
    return {kind: [float(value) for value in values] for kind, values in found.items()}


def test_programs_are_compiled_once_for_all_runs_that_share_a_cache(tmp_path: Path) -> None:
    cache = {"compile_cache": str(tmp_path / "cache"), "steps": 100_000}
    every = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", BEFORE: "inf"}
    document = job(digits(**cache), hosts=2, env=every)
    first, second = (counted(tmp_path / name, document) for name in ("first", "second"))
    assert sum(first["misses"]) > 0 and sum(second["misses"]) == 0
    assert sum(second["hits"]) >= sum(first["misses"])


def test_without_a_key_every_rank_of_a_later_start_on_other_hosts_finds_what_the_run_compiled(
    tmp_path: Path,
) -> None:
    document = job(digits(steps=100_000, checkpoint={"every": 5}), hosts=2)
    first = counted(tmp_path, document, env=own_cache(tmp_path / "one host"))
    assert sum(first["hits"]) == 0 and sum(first["misses"]) > 0
    saved = max(
        int(step.name)
        for step in (tmp_path / "run" / "checkpoints").iterdir()
        if step.name.isdigit()
    )
    second = counted(tmp_path, document, until=saved + 2, env=own_cache(tmp_path / "another"))
    assert min(second["hits"]) > 0, (first, second)
    compiled, found = (programs(tmp_path / host) for host in ("one host", "another"))
    anew = [
        size for name, size in found.items() if name not in compiled
    ]  # those of a restore, which are small
    assert max(anew, default=0) < max(compiled.values()) / 4, (compiled, found)


def programs(cache: Path) -> dict[str, int]:
    """The size of every compiled program in a cache folder, bytes."""
    return {
        file.name: file.stat().st_size
        for file in cache.glob("jaxlaunch/programs/*/*")
        if file.is_file()
    }
