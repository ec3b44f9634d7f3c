"""Gang scheduling by Kubernetes' own scheduler: the hosts of a job get their nodes together.

The Kubernetes of this cluster is 1.35, whose pods refer to a Workload by `workloadRef`. The JobSet
of this cluster passes on the field of Kubernetes 1.36 instead, so here the Job is created that
JobSet 0.11 would create, from the rendered template. The nodes are fake: nothing runs on them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.kubernetes.kinds import GANG_WORKLOADS, manifest_kind
from jaxlaunch.launcher.manifests.jobset import prepare
from tests.cluster.access import Access
from tests.cluster.waiting import wait_until

POOL = "jaxlaunch.test/pool"
# A new node has a taint until a controller has seen it.
JOB = """
name: {name}
image: registry.example/none:1
hosts: 2
accelerator: {{type: cpu}}
resources: {{cpu: 3}}
node_selector: {{jaxlaunch.test/pool: {namespace}-{name}}}
tolerations: [{{key: jaxlaunch.test/pool}}, {{key: node.kubernetes.io/not-ready}}]
command: [none]
"""


@pytest.fixture(autouse=True)
def gang_scheduler(cluster: Access) -> None:
    """Skip where the cluster that is up was started without the feature gate."""
    served = cluster.api.get("/apis")["groups"]
    versions = [entry["groupVersion"] for group in served for entry in group["versions"]]
    if GANG_WORKLOADS.api_version not in versions:
        pytest.skip("the cluster was started without the feature gate GenericWorkload")


@pytest.fixture
def nodes(cluster: Access) -> Iterator[list[str]]:
    """The names of fake nodes, which are deleted after the test."""
    names: list[str] = []
    yield names
    for name in names:
        cluster.api.delete(f"/api/v1/nodes/{name}")


def add_node(cluster: Access, nodes: list[str], pool: str) -> None:
    """Add a node with room for one host of a job."""
    name = f"{pool}-{len(nodes)}"
    resources = {"cpu": "4", "memory": "8Gi", "pods": "10", "ephemeral-storage": "10Gi"}
    ready = {"type": "Ready", "status": "True", "reason": "Fake", "message": ""}
    node = {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": {POOL: pool},
            "annotations": {"kwok.x-k8s.io/node": "fake"},
        },
        "spec": {"taints": [{"key": POOL, "effect": "NoSchedule"}]},
        "status": {"capacity": resources, "allocatable": resources, "conditions": [ready]},
    }
    cluster.api.create("/api/v1/nodes", node)
    nodes.append(name)


def create_job(cluster: Access, namespace: str, name: str, cluster_defaults: str) -> None:
    """Create the Job of a job with two hosts, and its Workload."""
    text = JOB.format(name=name, namespace=namespace)
    ready = prepare(
        load.read_job_text(text), defaults.parse_defaults(cluster_defaults), namespace=namespace
    )
    template = ready.manifests[0]["spec"]["replicatedJobs"][0]["template"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **template}
    cluster.api.create(f"/apis/batch/v1/namespaces/{namespace}/jobs", job)
    for manifest in ready.manifests[1:]:
        if manifest["kind"] == GANG_WORKLOADS.kind:
            cluster.api.create(manifest_kind(manifest).path(namespace), manifest)


def read_pods(cluster: Access, namespace: str, name: str) -> list[Any]:
    selector = f"labelSelector=batch.kubernetes.io/job-name%3D{name}"
    listed: list[Any] = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods?{selector}")["items"]
    return listed


def count_placed(cluster: Access, namespace: str, name: str) -> int:
    return sum("nodeName" in pod["spec"] for pod in read_pods(cluster, namespace, name))


def test_job_whose_second_host_does_not_fit_holds_no_node(
    cluster: Access, namespace: str, nodes: list[str]
) -> None:
    for name in ("gang", "plain"):
        add_node(cluster, nodes, f"{namespace}-{name}")
    create_job(cluster, namespace, "gang", "gang_scheduling: v1alpha1")
    wait_until(
        lambda: read_pods(cluster, namespace, "gang"), lambda pods: len(pods) == 2, "two pods"
    )
    # The scheduler has come to the pods of this job, which came later, and so to those of the gang.
    create_job(cluster, namespace, "plain", "{}")
    wait_until(lambda: count_placed(cluster, namespace, "plain"), bool, "a placed pod")
    wait_until(
        lambda: [
            condition
            for pod in read_pods(cluster, namespace, "plain")
            for condition in pod["status"].get("conditions", [])
            if condition.get("reason") == "Unschedulable"
        ],
        bool,
        "a pod that does not fit",
    )
    assert count_placed(cluster, namespace, "plain") == 1
    assert count_placed(cluster, namespace, "gang") == 0
    add_node(cluster, nodes, f"{namespace}-gang")
    wait_until(
        lambda: count_placed(cluster, namespace, "gang"), lambda count: count == 2, "a placed gang"
    )
