"""A thousand hosts, which exist in name only: how many calls and how much memory the commands take; ten thousand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import fleet
from tests.cluster.access import Access
from tests.cluster.fleet import Fleet, Place
from tests.cluster.waiting import until

pytestmark = pytest.mark.extended

HOSTS = 1000
WRITES, CALLS, MEMORY_MIB = 4, 8, 200
PATIENCE_S = 1200.0  # until as many pods are made, on a machine that is shared


@pytest.fixture(scope="module")
def place(cluster: Access) -> Iterator[Place]:
    """A node for each of a thousand hosts, all closed for now."""
    if not cluster.is_ours:
        pytest.skip("the nodes are kwok's: not on a cluster that you gave")
    with fleet.place(cluster, HOSTS, fleet.CLOSED) as found:
        yield found


def test_a_thousand_hosts_are_submitted_and_explained_in_a_few_calls(
    place: Place, tmp_path: Path
) -> None:
    thousand = Fleet(place, HOSTS, tmp_path)
    submitted = thousand.costs("submit", thousand.file)
    assert len(submitted.writes) <= WRITES, submitted.writes
    # The dearest question: every pod, every node, and an event of each pod.
    thousand.until("active", PATIENCE_S)
    line = (
        f"all 1000 hosts are unschedulable: untolerated taint {fleet.CLOSED}=true:NoSchedule on "
        "1000 of 1000 nodes"
    )
    until(
        lambda: thousand.seen("explain").out,
        lambda out: line in out.splitlines()[0],
        "the scheduler has tried all",
        PATIENCE_S,
    )
    is_cheap(thousand)
    place.open()
    thousand.until("ready", PATIENCE_S)
    is_cheap(thousand)
    assert "1000 of 1000 hosts ready" in thousand.seen("explain").out.splitlines()[0]


def is_cheap(thousand: Fleet) -> None:
    for command in ("status", "explain"):
        cost = thousand.seen(command)
        assert len(cost.calls) <= CALLS, cost.calls
        assert cost.peak_mib < MEMORY_MIB


def test_ten_thousand_hosts_are_judged_by_the_server_in_one_call_each(
    place: Place, tmp_path: Path
) -> None:
    ten = Fleet(place, 10_000, tmp_path)
    assert "completions: 10000" in ten.costs("render", ten.file).out
    rehearsed = ten.costs("submit", ten.file, "--dry-run=server")
    assert rehearsed.writes == []
    posted = [
        one
        for one in rehearsed.requests
        if one.startswith("POST") and "dryRun=All" in one and "/jobsets" in one
    ]
    assert len(posted) == 1
    found = place.cluster.kubectl("get", "jobsets", "-n", ten.namespace, "-o", "json")
    assert ten.name not in {one["metadata"]["name"] for one in json.loads(found)["items"]}
