"""Requests of pods, after Kubernetes' documentation of sidecars and of pod overhead."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
from jaxlaunch.launcher.kubernetes import resources
from jaxlaunch.launcher.kubernetes.objects import trim_pod
from tests.launcher import objects


def make_container(cpu: str, *, sidecar: bool = False, **limits: str) -> dict[str, Any]:
    always = {"restartPolicy": "Always"} if sidecar else {}
    return {"name": "c", "resources": {"requests": {"cpu": cpu}, "limits": limits}, **always}


@pytest.mark.parametrize(
    ("spec", "cpu"),
    [
        ({"containers": [make_container("2"), make_container("500m")]}, "2.5"),
        ({"containers": [make_container("2")], "initContainers": [make_container("3")]}, "3"),
        (
            {
                "containers": [make_container("2")],
                "initContainers": [make_container("1", sidecar=True)],
            },
            "3",
        ),
        (
            {
                "containers": [make_container("2")],
                "initContainers": [make_container("1", sidecar=True), make_container("3")],
            },
            "4",
        ),
        (
            {
                "containers": [make_container("2")],
                "initContainers": [make_container("3"), make_container("1", sidecar=True)],
            },
            "3",
        ),
        (
            {
                "containers": [make_container("1")],
                "initContainers": [make_container("1", sidecar=True)] * 2,
            },
            "3",
        ),
        ({"containers": [make_container("2")], "overhead": {"cpu": "250m"}}, "2.25"),
        (
            {
                "containers": [make_container("2")],
                "resources": {"requests": {"cpu": "5"}},
                "overhead": {"cpu": "1"},
            },
            "6",
        ),
        ({"containers": [{"name": "c", "resources": {"limits": {"cpu": "3"}}}]}, "3"),
    ],
)
def test_requests_include_sidecars_and_overhead(spec: dict[str, Any], cpu: str) -> None:
    assert resources.pod_requests(spec)["cpu"] == Decimal(cpu)


def test_sidecar_requests_count_for_node_fit() -> None:
    spec = {
        "containers": [make_container("7")],
        "initContainers": [make_container("2", sidecar=True)],
    }
    fit = resources.fit_nodes(spec, [objects.node(cpu="8")])
    assert (fit.large, fit.shortages) == (0, {"cpu": ("9", "8")})
    memory = {"containers": [make_container("1", memory="30Gi")], "overhead": {"memory": "4Gi"}}
    assert resources.fit_nodes(memory, [objects.node()]).shortages == {"memory": ("34Gi", "32Gi")}


def test_explain_counts_requests_added_by_admission() -> None:
    """The pod has what admission added: a sidecar, a RuntimeClass's overhead, defaults."""
    spec = {
        "containers": [make_container("6")],
        "initContainers": [make_container("2", sidecar=True)],
        "overhead": {"cpu": "1"},
    }
    waits = objects.pending(0, "0/1 nodes are available: 1 Insufficient cpu.")
    waits |= {"spec": trim_pod({"metadata": {"name": "p"}, "spec": spec})["spec"]}
    explanation = explain_job(objects.snapshot(objects.jobset(1), waits, nodes=(objects.node(),)))
    assert "each host requests 9 cpu, the largest node has 8" in explanation.headline
    assert "containers" not in trim_pod({"metadata": {}, "spec": {**spec, "nodeName": "n"}})["spec"]
