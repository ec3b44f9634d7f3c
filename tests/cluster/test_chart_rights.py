"""The chart's Roles: every verb on every kind, as a bound user, is answered or forbidden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.harness.api import Api, Call, RefusedError
from tests.cluster.releases import Release, chart_values
from tests.helm.charts import Helm

VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
# Kinds in a namespace, by API; a subresource is read and created.
WITHIN = {
    "/api/v1": "pods configmaps secrets services endpoints serviceaccounts "
    "persistentvolumeclaims events "
    "resourcequotas limitranges replicationcontrollers pods/log pods/exec pods/attach "
    "pods/portforward pods/eviction "
    "pods/ephemeralcontainers serviceaccounts/token",
    "/apis/jobset.x-k8s.io/v1alpha2": "jobsets jobsets/status",
    "/apis/batch/v1": "jobs cronjobs",
    "/apis/apps/v1": "deployments daemonsets statefulsets replicasets controllerrevisions",
    "/apis/networking.k8s.io/v1": "networkpolicies ingresses",
    "/apis/rbac.authorization.k8s.io/v1": "roles rolebindings",
    "/apis/kueue.x-k8s.io/v1beta2": "localqueues workloads workloads/status",
    "/apis/policy/v1": "poddisruptionbudgets",
    "/apis/coordination.k8s.io/v1": "leases",
    "/apis/autoscaling/v2": "horizontalpodautoscalers",
    "/apis/discovery.k8s.io/v1": "endpointslices",
    "/apis/authorization.k8s.io/v1": "localsubjectaccessreviews",
}
OUTSIDE = {
    "/api/v1": "nodes namespaces persistentvolumes",
    "/apis/scheduling.k8s.io/v1": "priorityclasses",
    "/apis/node.k8s.io/v1": "runtimeclasses",
    "/apis/storage.k8s.io/v1": "storageclasses",
    "/apis/rbac.authorization.k8s.io/v1": "clusterroles clusterrolebindings",
    "/apis/apiextensions.k8s.io/v1": "customresourcedefinitions",
    "/apis/admissionregistration.k8s.io/v1": "validatingwebhookconfigurations "
    "mutatingwebhookconfigurations "
    "validatingadmissionpolicies validatingadmissionpolicybindings",
    "/apis/kueue.x-k8s.io/v1beta2": "clusterqueues resourceflavors workloadpriorityclasses",
    "/apis/authorization.k8s.io/v1": "subjectaccessreviews",
}
# What each may do in the namespace, and nothing else anywhere.
SUBMITTER = {
    "jobsets": "get list watch create patch delete",
    "networkpolicies": "get list create delete",
    "configmaps": "get create patch",
    "pods": "get list watch",
    "pods/log": "get",
    "pods/portforward": "get create",
    "pods/exec": "get create",
    "jobs": "get list",
    "events": "get list",
    "resourcequotas": "get list",
    "limitranges": "get list",
    "persistentvolumeclaims": "get list",
    "serviceaccounts": "get list",
    "localqueues": "get list",
    "workloads": "get list patch",
    "secrets": "create",  # of a gang alone: the policy that comes with the role sees to it
}
VIEWER = {
    "jobsets": "get list watch",
    "pods": "get list watch",
    "pods/log": "get",
    "jobs": "get list",
    "events": "get list",
    "resourcequotas": "get list",
    "limitranges": "get list",
    "persistentvolumeclaims": "get list",
    "serviceaccounts": "get list",
    "localqueues": "get list",
    "workloads": "get list",
}
# What a reader of the cluster may only get, and of which it may get only the objects with these
# names.
GOTTEN = {"namespaces", "runtimeclasses"}
NAMED = {
    "customresourcedefinitions": (
        "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/jobsets.jobset.x-k8s.io"
    ),
    "deployments": "/apis/apps/v1/namespaces/jobset-system/deployments/jobset-controller-manager",
}
ROLES: Mapping[str, Mapping[str, str]] = {"submitters": SUBMITTER, "viewers": VIEWER}


class Attempt(NamedTuple):
    """One verb on one kind for an object that does not exist, in a dry run if it would write."""

    resource: str
    verb: str
    call: Call

    @classmethod
    def of(cls, base: str, resource: str, verb: str, namespace: str | None) -> Attempt:
        plural, _, subresource = resource.partition("/")
        path = f"{base}/namespaces/{namespace}/{plural}" if namespace else f"{base}/{plural}"
        path_of_object = f"{path}/absent" + (f"/{subresource}" if subresource else "")
        calls = {
            "get": Call("GET", path_of_object),
            "list": Call("GET", path),
            "watch": Call(
                "GET", f"{path}?watch=1&timeoutSeconds=1&fieldSelector=metadata.name%3Dabsent"
            ),
            "create": Call("POST", f"{path_of_object if subresource else path}?dryRun=All", {}),
            "update": Call("PUT", f"{path_of_object}?dryRun=All", {}),
            "patch": Call(
                "PATCH", f"{path_of_object}?dryRun=All", {}, "application/merge-patch+json"
            ),
            "delete": Call("DELETE", f"{path_of_object}?dryRun=All"),
            "deletecollection": Call("DELETE", f"{path}?dryRun=All"),
        }
        return cls(resource, verb, calls[verb])


def list_attempts(kinds: Mapping[str, str], namespace: str | None) -> Iterator[Attempt]:
    for base, resources in kinds.items():
        for resource in resources.split():
            for verb in ("get", "create", "update", "patch") if "/" in resource else VERBS:
                yield Attempt.of(base, resource, verb, namespace)


def allowed_attempts(api: Api, tried: list[Attempt]) -> set[tuple[str, str]]:
    """Return the attempts that were not forbidden."""
    allowed = set()
    for attempt in tried:
        try:
            api.call(*attempt.call)
        except RefusedError as error:
            if error.status == 403:
                continue
        allowed.add((attempt.resource, attempt.verb))
    return allowed


@pytest.fixture
def release(helm: Helm, cluster: Access, namespace: str) -> Iterator[Release]:
    release = Release(helm, cluster, namespace)
    bound = {role: [{"kind": "User", "name": f"{role}-{namespace}"}] for role in ROLES}
    release.install(chart_values(cluster, rbac=bound))
    yield release
    release.uninstall()


@pytest.mark.parametrize("role", ROLES)
def test_bound_user_may_do_only_what_is_listed(
    cluster: Access,
    namespace: str,
    release: Release,
    role: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp(role)
    api = preparations.impersonate(cluster, f"{role}-{namespace}", namespace, folder).api
    listed = {(resource, verb) for resource, verbs in ROLES[role].items() for verb in verbs.split()}
    attempts = list(list_attempts(WITHIN, namespace))
    assert listed <= {(attempt.resource, attempt.verb) for attempt in attempts}
    assert len(attempts) >= 200
    assert allowed_attempts(api, attempts) == listed
    assert allowed_attempts(api, list(list_attempts(WITHIN, "default"))) == set()
    assert allowed_attempts(api, list(list_attempts(OUTSIDE, None))) == set()
    defaults = api.get(f"/api/v1/namespaces/{namespace}/configmaps/jaxlaunch")
    assert "claim: team-checkpoints" in defaults["data"]["defaults.yaml"]


def test_unbound_user_may_do_nothing(
    cluster: Access, namespace: str, release: Release, tmp_path_factory: pytest.TempPathFactory
) -> None:
    api = preparations.impersonate(
        cluster, "mallory", namespace, tmp_path_factory.mktemp("mallory")
    ).api
    assert allowed_attempts(api, list(list_attempts(WITHIN, namespace))) == set()


def test_cluster_reader_may_only_read_what_is_listed(
    cluster: Access, namespace: str, helm: Helm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    release, user = Release(helm, cluster, namespace), f"reader-{namespace}"
    release.install(
        chart_values(
            cluster, rbac={"viewers": [{"kind": "User", "name": user}], "clusterReader": True}
        )
    )
    try:
        api = preparations.impersonate(
            cluster, user, namespace, tmp_path_factory.mktemp("reader")
        ).api
        allowed = allowed_attempts(api, list(list_attempts(OUTSIDE, None)))
        hidden = {
            "persistentvolumes",
            "storageclasses",
            "clusterroles",
            "clusterrolebindings",
            "subjectaccessreviews",
        }
        hidden |= {"validatingadmissionpolicies", "validatingadmissionpolicybindings", *NAMED}
        kinds = {
            resource for resources in OUTSIDE.values() for resource in resources.split()
        } - hidden
        listed = {(kind, "list") for kind in kinds - GOTTEN}
        assert allowed == {(kind, "get") for kind in kinds} | listed
        elsewhere = allowed_attempts(api, list(list_attempts(WITHIN, "default")))
        assert elsewhere == {
            (kind, verb) for kind in ("services", "endpointslices") for verb in ("get", "list")
        }
        for path in NAMED.values():
            assert allowed_attempts(api, [Attempt(path, "get", Call("GET", path))])
    finally:
        release.uninstall()
