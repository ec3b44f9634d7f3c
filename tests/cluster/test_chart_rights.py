"""The chart's Roles, tried: every verb on every kind, in the name of who is bound, is answered or forbidden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.harness.api import Api, Call, Refused
from tests.cluster.releases import Release, values
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
    "customresourcedefinitions": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/jobsets.jobset.x-k8s.io",
    "deployments": "/apis/apps/v1/namespaces/jobset-system/deployments/jobset-controller-manager",
}
ROLES: Mapping[str, Mapping[str, str]] = {"submitters": SUBMITTER, "viewers": VIEWER}


class Try(NamedTuple):
    """One verb on one kind, as a request of an object that does not exist; a rehearsal where it would change any."""

    what: str
    verb: str
    call: Call

    @classmethod
    def of(cls, base: str, resource: str, verb: str, namespace: str | None) -> Try:
        plural, _, subresource = resource.partition("/")
        path = f"{base}/namespaces/{namespace}/{plural}" if namespace else f"{base}/{plural}"
        one = f"{path}/absent" + (f"/{subresource}" if subresource else "")
        calls = {
            "get": Call("GET", one),
            "list": Call("GET", path),
            "watch": Call(
                "GET", f"{path}?watch=1&timeoutSeconds=1&fieldSelector=metadata.name%3Dabsent"
            ),
            "create": Call("POST", f"{one if subresource else path}?dryRun=All", {}),
            "update": Call("PUT", f"{one}?dryRun=All", {}),
            "patch": Call("PATCH", f"{one}?dryRun=All", {}, "application/merge-patch+json"),
            "delete": Call("DELETE", f"{one}?dryRun=All"),
            "deletecollection": Call("DELETE", f"{path}?dryRun=All"),
        }
        return cls(resource, verb, calls[verb])


def tries(kinds: Mapping[str, str], namespace: str | None) -> Iterator[Try]:
    for base, resources in kinds.items():
        for resource in resources.split():
            for verb in ("get", "create", "update", "patch") if "/" in resource else VERBS:
                yield Try.of(base, resource, verb, namespace)


def answered(api: Api, tried: list[Try]) -> set[tuple[str, str]]:
    """What was not forbidden."""
    found = set()
    for each in tried:
        try:
            api.call(*each.call)
        except Refused as error:
            if error.status == 403:
                continue
        found.add((each.what, each.verb))
    return found


@pytest.fixture
def release(helm: Helm, cluster: Access, namespace: str) -> Iterator[Release]:
    found = Release(helm, cluster, namespace)
    bound = {role: [{"kind": "User", "name": f"{role}-{namespace}"}] for role in ROLES}
    found.install(values(cluster, rbac=bound))
    yield found
    found.uninstall()


@pytest.mark.parametrize("role", ROLES)
def test_who_is_bound_may_do_what_is_listed_and_nothing_else(
    cluster: Access,
    namespace: str,
    release: Release,
    role: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp(role)
    api = preparations.impersonating(cluster, f"{role}-{namespace}", namespace, folder).api
    listed = {(what, verb) for what, verbs in ROLES[role].items() for verb in verbs.split()}
    within = list(tries(WITHIN, namespace))
    assert listed <= {(each.what, each.verb) for each in within}
    assert len(within) >= 200
    assert answered(api, within) == listed
    assert answered(api, list(tries(WITHIN, "default"))) == set()
    assert answered(api, list(tries(OUTSIDE, None))) == set()
    defaults = api.get(f"/api/v1/namespaces/{namespace}/configmaps/jaxlaunch")
    assert "claim: team-checkpoints" in defaults["data"]["defaults.yaml"]


def test_who_is_not_bound_may_do_nothing(
    cluster: Access, namespace: str, release: Release, tmp_path_factory: pytest.TempPathFactory
) -> None:
    api = preparations.impersonating(
        cluster, "mallory", namespace, tmp_path_factory.mktemp("mallory")
    ).api
    assert answered(api, list(tries(WITHIN, namespace))) == set()


def test_a_cluster_reader_sees_what_is_listed_and_changes_nothing(
    cluster: Access, namespace: str, helm: Helm, tmp_path_factory: pytest.TempPathFactory
) -> None:
    release, user = Release(helm, cluster, namespace), f"reader-{namespace}"
    release.install(
        values(cluster, rbac={"viewers": [{"kind": "User", "name": user}], "clusterReader": True})
    )
    try:
        api = preparations.impersonating(
            cluster, user, namespace, tmp_path_factory.mktemp("reader")
        ).api
        seen = answered(api, list(tries(OUTSIDE, None)))
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
        assert seen == {(kind, "get") for kind in kinds} | listed
        elsewhere = answered(api, list(tries(WITHIN, "default")))
        assert elsewhere == {
            (kind, verb) for kind in ("services", "endpointslices") for verb in ("get", "list")
        }
        for path in NAMED.values():
            assert answered(api, [Try(path, "get", Call("GET", path))])
    finally:
        release.uninstall()
