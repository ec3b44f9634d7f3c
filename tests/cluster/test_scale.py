"""The number of calls and the memory of the commands for jobs of 1,000 and 10,000 fake hosts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import fleet
from tests.cluster.access import Access
from tests.cluster.fleet import Fleet, FleetNamespace
from tests.cluster.waiting import wait_until

pytestmark = pytest.mark.extended

HOSTS = 1000
WRITES, CALLS, MEMORY_MIB = 4, 8, 200
PATIENCE_S = 1200.0  # until as many pods are made, on a machine that is shared


@pytest.fixture(scope="module")
def fleet_namespace(cluster: Access) -> Iterator[FleetNamespace]:
    """Make a node for each of a thousand hosts, all closed for now."""
    if not cluster.is_ours:
        pytest.skip("the nodes are kwok's: not on a cluster that you gave")
    with fleet.make_fleet_namespace(cluster, HOSTS, fleet.CLOSED_TAINT) as namespace:
        yield namespace


def test_thousand_hosts_need_few_calls(fleet_namespace: FleetNamespace, tmp_path: Path) -> None:
    thousand = Fleet(fleet_namespace, HOSTS, tmp_path)
    submitted = thousand.measure("submit", thousand.file)
    assert len(submitted.writes) <= WRITES, submitted.writes
    # The dearest question: every pod, every node, and an event of each pod.
    thousand.wait_for_pods("active", PATIENCE_S)
    line = (
        "all 1000 hosts are unschedulable: "
        f"untolerated taint {fleet.CLOSED_TAINT}=true:NoSchedule on 1000 of 1000 nodes"
    )
    wait_until(
        lambda: thousand.measure_command("explain").out,
        lambda out: line in out.splitlines()[0],
        "the scheduler has tried all",
        PATIENCE_S,
    )
    is_cheap(thousand)
    fleet_namespace.open()
    thousand.wait_for_pods("ready", PATIENCE_S)
    is_cheap(thousand)
    assert "1000 of 1000 hosts ready" in thousand.measure_command("explain").out.splitlines()[0]


def is_cheap(thousand: Fleet) -> None:
    for command in ("status", "explain"):
        cost = thousand.measure_command(command)
        assert len(cost.calls) <= CALLS, cost.calls
        assert cost.peak_mib < MEMORY_MIB


def test_ten_thousand_hosts_are_checked_in_one_call_each(
    fleet_namespace: FleetNamespace, tmp_path: Path
) -> None:
    ten = Fleet(fleet_namespace, 10_000, tmp_path)
    assert "completions: 10000" in ten.measure("render", ten.file).out
    rehearsed = ten.measure("submit", ten.file, "--dry-run=server")
    assert rehearsed.writes == []
    posted = [
        request
        for request in rehearsed.requests
        if request.startswith("POST") and "dryRun=All" in request and "/jobsets" in request
    ]
    assert len(posted) == 1
    jobsets = fleet_namespace.cluster.kubectl("get", "jobsets", "-n", ten.namespace, "-o", "json")
    assert ten.name not in {request["metadata"]["name"] for request in json.loads(jobsets)["items"]}
