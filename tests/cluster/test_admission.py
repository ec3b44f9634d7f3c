"""A real API server admits what the launcher renders; what it refuses, the launcher refuses first.

JobSet and Kueue accept any pod template, so the Job that JobSet would make of it is sent as well,
and its pod.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest

from jaxlaunch.launcher.errors import ApiError
from jaxlaunch.launcher.kubernetes import pod_rules
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import (
    COMPUTE_DOMAINS,
    CRDS,
    JOBS,
    JOBSETS,
    PODS,
    PRIORITY_CLASSES,
    SERVICE_ACCOUNTS,
    Kind,
    manifest_kind,
)
from tests.cluster import preparations, waiting
from tests.cluster.access import Access
from tests.launcher.manifests import rejected_jobs, test_jobset

Object = dict[str, Any]
GOOD = {path.stem: test_jobset.render_file(path) for path in test_jobset.FILES} | {
    case.name: case.manifests() for case in test_jobset.COMBINATIONS
}
# The form of NVIDIA's API, resource.nvidia.com/v1beta1, as its DRA driver installs it.
_CHANNEL = {
    "type": "object",
    "required": ["resourceClaimTemplate"],
    "properties": {
        "allocationMode": {"type": "string", "enum": ["All", "Single"], "default": "Single"},
        "resourceClaimTemplate": {
            "type": "object",
            "required": ["name"],
            "properties": {"name": {"type": "string"}},
        },
    },
}
_DOMAIN = {
    "type": "object",
    "required": ["channel"],
    "properties": {
        "channel": _CHANNEL,
        "numNodes": {"type": "integer", "minimum": 0, "default": 0},
    },
}
COMPUTE_DOMAIN_CRD = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": COMPUTE_DOMAINS.resource},
    "spec": {
        "group": COMPUTE_DOMAINS.group,
        "scope": "Namespaced",
        "names": {
            "plural": COMPUTE_DOMAINS.plural,
            "singular": "computedomain",
            "kind": COMPUTE_DOMAINS.kind,
        },
        "versions": [
            {
                "name": COMPUTE_DOMAINS.version,
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": _DOMAIN}}},
            }
        ],
    },
}
RUNTIME_CLASSES = Kind("node.k8s.io", "v1", "runtimeclasses", "RuntimeClass", namespaced=False)


class Server(NamedTuple):
    """The API server, with a namespace for each Pod Security level."""

    cluster: Cluster
    namespaces: dict[str, str]

    def admit(self, kind: Kind, manifest: Object, level: str = "privileged") -> Object:
        """Return what the server makes of an object in a strict dry run. Raises ApiError."""
        metadata = manifest["metadata"] | {"namespace": self.namespaces[level]}
        return self.cluster.create(kind, manifest | {"metadata": metadata}, dry_run=True)


@pytest.fixture(scope="module")
def server(cluster: Access) -> Iterator[Server]:
    namespaces = {level: preparations.make_namespace(cluster, level) for level in pod_rules.LEVELS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", cluster.env["KUBECONFIG"])
        server = Server(Cluster.connect(), namespaces)
    if server.cluster.get(CRDS, COMPUTE_DOMAINS.resource) is None:
        server.cluster.create(CRDS, COMPUTE_DOMAIN_CRD)
    served = partial(server.cluster.served_versions, COMPUTE_DOMAINS.group)
    waiting.wait_until(
        served, lambda versions: COMPUTE_DOMAINS.version in versions, "ComputeDomains are served"
    )
    cluster_objects = list(make_dependencies(server))
    yield server
    server.cluster.delete(CRDS, COMPUTE_DOMAINS.resource, "")
    for kind, name in cluster_objects:
        server.cluster.delete(kind, name, "")
    for name in namespaces.values():
        preparations.remove_namespace(cluster, name)


def make_dependencies(server: Server) -> Iterator[tuple[Kind, str]]:
    """Make what the admission of these pods looks up; yield what is outside the namespaces."""
    pods = [pod_of(manifests[0])["spec"] for manifests in GOOD.values()]
    for name in {pod["serviceAccountName"] for pod in pods if "serviceAccountName" in pod}:
        for namespace in server.namespaces.values():
            account = {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": name, "namespace": namespace},
            }
            server.cluster.create(SERVICE_ACCOUNTS, account)
    for key, kind, fields in (
        ("priorityClassName", PRIORITY_CLASSES, {"value": 1}),
        ("runtimeClassName", RUNTIME_CLASSES, {"handler": "runc"}),
    ):
        for name in {pod[key] for pod in pods if key in pod}:
            if server.cluster.get(kind, name) is None:
                manifest = {
                    "apiVersion": kind.api_version,
                    "kind": kind.kind,
                    "metadata": {"name": name},
                }
                server.cluster.create(kind, manifest | fields)
                yield kind, name


def job_of(jobset: Object) -> Object:
    """Return the Job that JobSet makes of it, without its labels."""
    (job,) = jobset["spec"]["replicatedJobs"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "x"},
        "spec": job["template"]["spec"],
    }


def pod_of(jobset: Object) -> Object:
    template = job_of(jobset)["spec"]["template"]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        **template,
        "metadata": template["metadata"] | {"name": "x"},
    }


@pytest.mark.parametrize("name", GOOD)
def test_rendered_manifests_are_admitted_unchanged(server: Server, name: str) -> None:
    for manifest in GOOD[name]:
        server.admit(manifest_kind(manifest), manifest)
    server.admit(JOBS, job_of(GOOD[name][0]))


@pytest.mark.parametrize("name", GOOD)
def test_pod_meets_the_reported_security_level_and_no_stricter_one(
    server: Server, name: str
) -> None:
    pod = pod_of(GOOD[name][0])
    met = pod_rules.strictest_level(pod)
    server.admit(PODS, pod, met)
    if (stricter := pod_rules.stricter_level(met)) is not None:
        with pytest.raises(ApiError, match=f'violates PodSecurity "{stricter}:latest"'):
            server.admit(PODS, pod, stricter)


@pytest.mark.parametrize(
    "case", rejected_jobs.TABLE, ids=lambda case: case.lines.replace("\n", ", ")[:60]
)
def test_server_refuses_for_the_same_reason(
    server: Server, case: rejected_jobs.RejectedJob
) -> None:
    jobset = rejected_jobs.broken_jobset(case.path, case.value)
    with pytest.raises(ApiError) as refused:
        server.admit(JOBSETS, jobset)
        server.admit(JOBS, job_of(jobset))
    assert case.server in refused.value.message


def test_good_jobs_cover_every_platform() -> None:
    assert len(GOOD) >= 60
    assert len(rejected_jobs.TABLE) >= 25
