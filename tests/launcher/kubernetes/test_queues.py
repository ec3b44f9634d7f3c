"""The state and the quotas of LocalQueues and ClusterQueues."""

from __future__ import annotations

from typing import Any

import pytest

from jaxlaunch.launcher.kubernetes.objects import (
    InactiveQueue,
    Quota,
    cluster_queue_name,
    covered_resources,
    inactive_state,
    queue_quotas,
)
from tests.launcher.objects import cluster_queue, condition, local_queue


@pytest.mark.parametrize(
    ("queue", "expected"),
    [
        (local_queue(), None),
        ({"spec": {}}, None),
        (local_queue(stopPolicy="Hold"), InactiveQueue("Hold", "", "")),  # Active is still True
        (
            cluster_queue(active=False, message="m", stopPolicy="Hold"),
            InactiveQueue("Hold", "FlavorNotFound", "m"),
        ),
        (local_queue(active=False, reason="Broken"), InactiveQueue(None, "Broken", "")),
        (
            cluster_queue(active=False, message="no flavor"),
            InactiveQueue(None, "FlavorNotFound", "no flavor"),
        ),
        ({"status": {"conditions": [condition("Active", "False")]}}, InactiveQueue(None, "", "")),
    ],
)
def test_queue_is_inactive_if_stopped_or_condition_is_false(
    queue: dict[str, Any], expected: InactiveQueue | None
) -> None:
    assert inactive_state(queue) == expected


def test_local_queue_names_its_cluster_queue() -> None:
    assert cluster_queue_name(local_queue()) == "shared"
    assert cluster_queue_name({}) is None and cluster_queue_name(None) is None


def test_quotas_are_read_by_flavor_with_reservations() -> None:
    assert list(queue_quotas(cluster_queue("8", "6"))) == [Quota("h100", "cpu", "8", "6")]
    unused = cluster_queue("8") | {"status": {}}
    assert list(queue_quotas(unused)) == [Quota("h100", "cpu", "8", "0")]
    assert list(queue_quotas({})) == []


def test_resource_without_quota_is_covered() -> None:
    queue = {"spec": {"resourceGroups": [{"coveredResources": ["cpu", "memory"], "flavors": []}]}}
    assert covered_resources(queue) == ["cpu", "memory"]
