"""The memory of a host, as its agent reports it and the leader keeps it."""

from __future__ import annotations

from typing import Any

import pytest

from jaxlaunch.launcher.agent.gang.memory import HostMemory
from jaxlaunch.records.codec import MalformedError
from jaxlaunch.records.summary import RankMemory

GIB = 1 << 30


def test_largest_values_of_an_attempt_are_kept() -> None:
    memory = HostMemory().with_use(6 * GIB, 8 * GIB).with_peak(2, 3 * GIB).with_peak(3, GIB)
    memory = memory.with_use(GIB, 8 * GIB).with_peak(2, GIB)
    assert memory == HostMemory(6 << 10, 8 << 10, {2: 3 << 10, 3: 1 << 10})
    assert HostMemory.from_wire(memory.to_wire()) == memory
    row = memory.rank_memory(2, 1)
    assert row == RankMemory(2, 1, 3.0, 6.0, 8.0)
    assert row is not None and row.describe() == "process 3 GiB, host 1: 6 of 8 GiB (75 %)"
    assert memory.rank_memory(4, 1) is None
    assert RankMemory(2, 1, 0.5).describe() == "process 0.5 GiB"


def test_only_growth_that_matters_is_reported() -> None:
    reported = HostMemory(1000, 8000, {0: 1000})
    assert not HostMemory(1010, 8000, {0: 1010}).has_grown_from(reported)
    assert HostMemory(1020, 8000, {0: 1000}).has_grown_from(reported)
    assert HostMemory(1000, 8000, {0: 1020}).has_grown_from(reported)
    assert HostMemory(1000, 8000, {0: 1000, 1: 1}).has_grown_from(reported)


@pytest.mark.parametrize(
    "fields", [{"peaks_mib": {"0": -1}}, {"in_use_mib": "x"}, {"peaks_mib": 3}]
)
def test_malformed_memory_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(MalformedError):
        HostMemory.from_wire(fields)
