"""A second run finds the programs of the first in their shared cache and reports it as metrics."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.gang.runs import Running, digits_block, make_job, user_cache_env
from tests.site.jaxcache import BEFORE

pytestmark = pytest.mark.computes


def count_cache_lookups(
    folder: Path,
    document: dict[str, Any],
    *,
    until_step: int = 5,
    env: Mapping[str, str | None] | None = None,
) -> dict[str, list[float]]:
    """Return the cache hits and misses of each rank up to a step of a run."""
    with Running(folder, document, env=env) as running:
        running.wait_for_step(until_step)
        text = "".join(running.scrape(host) for host in range(document["hosts"]))
        running.signal(signal.SIGTERM)
        assert running.wait().code == 80
    counts = {
        kind: re.findall(rf"^jaxlaunch_compile_cache_{kind}_total\S* (\S+)$", text, re.M)
        for kind in ("hits", "misses")
    }
    assert all(len(values) == document["hosts"] for values in counts.values()), text
    return {kind: [float(value) for value in values] for kind, values in counts.items()}


def test_runs_that_share_a_cache_compile_once(tmp_path: Path) -> None:
    cache = {"compile_cache": str(tmp_path / "cache"), "steps": 100_000}
    every = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", BEFORE: "inf"}
    document = make_job(digits_block(**cache), env=every)
    first, second = (count_cache_lookups(tmp_path / name, document) for name in ("first", "second"))
    assert sum(first["misses"]) > 0 and sum(second["misses"]) == 0
    assert sum(second["hits"]) >= sum(first["misses"])


def test_later_start_on_other_hosts_finds_the_programs_of_the_run(tmp_path: Path) -> None:
    document = make_job(digits_block(steps=100_000, checkpoint={"every": 5}), hosts=2)
    first = count_cache_lookups(tmp_path, document, env=user_cache_env(tmp_path / "one host"))
    assert sum(first["hits"]) == 0 and sum(first["misses"]) > 0
    saved = max(
        int(step.name)
        for step in (tmp_path / "run" / "checkpoints").iterdir()
        if step.name.isdigit()
    )
    second = count_cache_lookups(
        tmp_path, document, until_step=saved + 2, env=user_cache_env(tmp_path / "another")
    )
    assert min(second["hits"]) > 0, (first, second)
    compiled, available = (program_sizes(tmp_path / host) for host in ("one host", "another"))
    # Those of a restore, which are small.
    new_sizes = [size for name, size in available.items() if name not in compiled]
    assert max(new_sizes, default=0) < max(compiled.values()) / 4, (compiled, available)


def program_sizes(cache: Path) -> dict[str, int]:
    """Return the size in bytes of every compiled program in a cache folder."""
    return {
        file.name: file.stat().st_size
        for file in cache.glob("jaxlaunch/programs/*/*")
        if file.is_file()
    }
