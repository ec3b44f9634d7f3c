"""What we render is what a real API server takes, with JobSet's and Kueue's webhooks; what it refuses, we refuse first.

JobSet and Kueue take a pod template as it is, so the Job that JobSet would make of it is sent as
well, and its pod.
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
    KINDS,
    PODS,
    PRIORITY_CLASSES,
    SERVICE_ACCOUNTS,
    Kind,
)
from tests.cluster import preparations, waiting
from tests.cluster.access import Access
from tests.launcher.manifests import test_jobset, wrong

Object = dict[str, Any]
GOOD = {path.stem: test_jobset.manifests(path) for path in test_jobset.FILES} | {
    one.name: one.manifests() for one in test_jobset.COMBINATIONS
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
    """The API server, and a namespace of it for each Pod Security level."""

    cluster: Cluster
    namespaces: dict[str, str]

    def take(self, kind: Kind, given: Object, level: str = "privileged") -> Object:
        """What the server makes of it, strictly read; nothing is kept. Raises ApiError with its refusal."""
        metadata = given["metadata"] | {"namespace": self.namespaces[level]}
        return self.cluster.create(kind, given | {"metadata": metadata}, dry_run=True)


@pytest.fixture(scope="module")
def server(cluster: Access) -> Iterator[Server]:
    namespaces = {level: preparations.make_namespace(cluster, level) for level in pod_rules.LEVELS}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", cluster.env["KUBECONFIG"])
        found = Server(Cluster.connect(), namespaces)
    if found.cluster.get(CRDS, COMPUTE_DOMAINS.resource) is None:
        found.cluster.create(CRDS, COMPUTE_DOMAIN_CRD)
    served = partial(found.cluster.served_versions, COMPUTE_DOMAINS.group)
    waiting.until(
        served, lambda versions: COMPUTE_DOMAINS.version in versions, "ComputeDomains are served"
    )
    made = list(look_ups(found))
    yield found
    found.cluster.delete(CRDS, COMPUTE_DOMAINS.resource, "")
    for kind, name in made:
        found.cluster.delete(kind, name, "")
    for name in namespaces.values():
        preparations.remove_namespace(cluster, name)


def look_ups(server: Server) -> Iterator[tuple[Kind, str]]:
    """Makes what the admission of these pods looks up; gives what is outside the namespaces."""
    pods = [pod_of(manifests[0])["spec"] for manifests in GOOD.values()]
    for name in {pod["serviceAccountName"] for pod in pods if "serviceAccountName" in pod}:
        for namespace in server.namespaces.values():
            account = {
                "apiVersion": "v1",
                "kind": "ServiceAccount",
                "metadata": {"name": name, "namespace": namespace},
            }
            server.cluster.create(SERVICE_ACCOUNTS, account)
    for key, kind, more in (
        ("priorityClassName", PRIORITY_CLASSES, {"value": 1}),
        ("runtimeClassName", RUNTIME_CLASSES, {"handler": "runc"}),
    ):
        for name in {pod[key] for pod in pods if key in pod}:
            if server.cluster.get(kind, name) is None:
                about = {
                    "apiVersion": kind.api_version,
                    "kind": kind.kind,
                    "metadata": {"name": name},
                }
                server.cluster.create(kind, about | more)
                yield kind, name


def job_of(jobset: Object) -> Object:
    """The Job that JobSet makes of it, but for its labels."""
    (one,) = jobset["spec"]["replicatedJobs"]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "x"},
        "spec": one["template"]["spec"],
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
def test_what_we_render_is_taken_as_it_is(server: Server, name: str) -> None:
    for manifest in GOOD[name]:
        server.take(KINDS[manifest["kind"]], manifest)
    server.take(JOBS, job_of(GOOD[name][0]))


@pytest.mark.parametrize("name", GOOD)
def test_a_pod_meets_the_security_level_that_we_name_and_no_stricter_one(
    server: Server, name: str
) -> None:
    pod = pod_of(GOOD[name][0])
    met = pod_rules.strictest_level(pod)
    server.take(PODS, pod, met)
    if (stricter := pod_rules.stricter_level(met)) is not None:
        with pytest.raises(ApiError, match=f'violates PodSecurity "{stricter}:latest"'):
            server.take(PODS, pod, stricter)


@pytest.mark.parametrize("one", wrong.TABLE, ids=lambda one: one.lines.replace("\n", ", ")[:60])
def test_what_we_refuse_is_refused_by_the_server_for_the_same_reason(
    server: Server, one: wrong.Wrong
) -> None:
    jobset = wrong.jobset(one.path, one.value)
    with pytest.raises(ApiError) as refused:
        server.take(JOBSETS, jobset)
        server.take(JOBS, job_of(jobset))
    assert one.server in refused.value.message


def test_enough_is_shown() -> None:
    assert len(GOOD) >= 60
    assert len(wrong.TABLE) >= 25
