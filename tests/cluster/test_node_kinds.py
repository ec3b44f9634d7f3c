"""The scheduler puts the pods of each job only on the kinds of node for that job.

Every kind of tests/cluster/node_kinds is a node here that exists in name only. For each job one pod
may go anywhere but to the kinds for this job, and must stay without a node. One more pod for each
of these kinds may go only there, and must get a node. The latter take turns, for a node has
room for one at a time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.manifests.jobset import render, resolve
from tests.cluster import nodes as others
from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.harness import kwok
from tests.cluster.harness.api import Call
from tests.cluster.node_kinds.eks import EKS, MANAGED_GROUPS
from tests.cluster.node_kinds.generic import GENERIC
from tests.cluster.node_kinds.gke import GKE
from tests.cluster.node_kinds.kind import EFFECT, Kind, Platform, find_unknown_jobs
from tests.cluster.waiting import wait_until
from tests.launcher.manifests import test_jobset

pytestmark = pytest.mark.extended

Object = dict[str, Any]
PLATFORMS = {"gke": GKE, "eks": EKS, "eks of managed groups": MANAGED_GROUPS, "generic": GENERIC}
OWNER, KIND, TURN = "jaxlaunch.test/owner", "jaxlaunch.test/kind", "jaxlaunch.test/turn"
PATIENCE_S = 300.0


class Attempt(NamedTuple):
    """A pod of a job that may go to one kind of node, or to any other than the job's kinds."""

    platform: str
    job: str
    kind: str | None

    @property
    def name(self) -> str:
        return "-".join(f"{self.platform} {self.job} {self.kind or 'elsewhere'}".lower().split())


class Nodes(NamedTuple):
    """A namespace, and nodes of every kind for its pods alone."""

    cluster: Access
    namespace: str

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def put(self, tries: list[Attempt], turn: int) -> dict[str, Object]:
        """Make a pod for each attempt; return them by name once the scheduler has tried all."""
        kwok.send_calls(
            self.cluster.api,
            [Call("POST", self.path, self.pod(attempt, turn)) for attempt in tries],
        )
        wait_until(
            lambda: self.pods(turn),
            lambda seen: all(map(is_judged, seen.values())),
            "all are tried",
            PATIENCE_S,
        )
        return self.pods(turn)

    def pods(self, turn: int) -> dict[str, Object]:
        items = self.cluster.api.get(
            f"{self.path}?labelSelector={TURN.replace('/', '%2F')}%3D{turn}"
        )
        return {pod["metadata"]["name"]: pod for pod in items["items"]}

    def clear(self, turn: int) -> None:
        for name in self.pods(turn):
            self.cluster.api.delete(f"{self.path}/{name}?gracePeriodSeconds=0")
        wait_until(lambda: self.pods(turn), lambda left: not left, "all are gone", PATIENCE_S)

    def pod(self, attempt: Attempt, turn: int) -> Object:
        """Return the parts of the job's pod that the scheduler reads."""
        platform = PLATFORMS[attempt.platform]
        spec = render_pod(platform, attempt.platform, attempt.job)
        fields = {
            key: spec[key] for key in ("nodeSelector", "affinity", "tolerations") if key in spec
        }
        for key in ("containers", "initContainers"):
            fields[key] = [essential_fields(container) for container in spec.get(key, [])]
        fields["tolerations"] = [*fields["tolerations"], {"key": kwok.TAINT, "operator": "Exists"}]
        selector = {**fields.get("nodeSelector", {}), OWNER: self.namespace}
        expression = {"key": KIND, "operator": "NotIn", "values": platform.meant_for(attempt.job)}
        if attempt.kind is not None:
            expression = {"key": KIND, "operator": "In", "values": [attempt.kind]}
        ours = {
            "key": f"{OWNER}-of",
            "operator": "In",
            "values": [attempt.platform.replace(" ", "-")],
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": attempt.name, "labels": {TURN: str(turn)}},
            "spec": fields
            | {
                "nodeSelector": selector,
                "affinity": narrow_affinity(fields.get("affinity", {}), [expression, ours]),
            },
        }


def render_pod(platform: Platform, platform_name: str, job: str) -> Object:
    """Return the pods of a job as the launcher renders them."""
    first = platform_name.partition(" ")[0]
    text = (
        f"name: x\nimage: registry.example/train:1\nplatform: {first}\ncommand: "
        f"[a]\n{platform.jobs[job]}\n"
    )
    manifests = render(
        resolve(load.parse_job(text), defaults.parse_defaults(platform.defaults)), None
    )
    return test_jobset.pod_spec(manifests[0])


def essential_fields(container: Object) -> Object:
    """Return a container's name, image and resources, and whether it is a sidecar."""
    return {
        key: container[key]
        for key in ("name", "image", "resources", "restartPolicy")
        if key in container
    }


def narrow_affinity(affinity: Object, terms: list[Object]) -> Object:
    """Return the affinity with further terms."""
    old = affinity.get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms_of_pod = [term["matchExpressions"] for term in old.get("nodeSelectorTerms", [])] or [[]]
    required = {
        "nodeSelectorTerms": [{"matchExpressions": [*term, *terms]} for term in terms_of_pod]
    }
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def is_judged(pod: Object) -> bool:
    return "nodeName" in pod["spec"] or bool(unschedulable_reason(pod))


def unschedulable_reason(pod: Object) -> str:
    """Return why the scheduler found no node for the pod."""
    conditions = pod["status"].get("conditions", [])
    return next(
        (
            condition["message"]
            for condition in conditions
            if condition.get("reason") == "Unschedulable"
        ),
        "",
    )


def make_node(kind: Kind, platform_name: str, owner: str) -> Object:
    """Return a node of this kind that other tests' pods do not tolerate."""
    ours = {OWNER: owner, f"{OWNER}-of": platform_name.replace(" ", "-"), KIND: kind.name}
    document = kwok.make_node(
        f"{owner}-{kind.name}", {**kind.labels, **ours}, kind.allocatable, kwok.TAINT
    )
    document["spec"]["taints"] += [
        {"key": key, "value": value, "effect": EFFECT} for key, value in kind.taints.items()
    ]
    return document


@pytest.fixture(scope="module")
def nodes(cluster: Access) -> Iterator[Nodes]:
    if not cluster.is_ours:
        pytest.skip("the nodes are kwok's: not on a cluster that you gave")
    namespace = preparations.make_namespace(cluster, "privileged")
    documents = [
        make_node(kind, platform_name, namespace)
        for platform_name, platform in PLATFORMS.items()
        for kind in platform.kinds
    ]
    with others.change_nodes():
        try:
            kwok.send_calls(
                cluster.api, [Call("POST", "/api/v1/nodes", document) for document in documents]
            )
            selector = f"{OWNER.replace('/', '%2F')}%3D{namespace}"
            wait_until(
                lambda: unready_nodes(cluster, selector),
                lambda left: not left,
                "every node is ready",
                PATIENCE_S,
            )
            yield Nodes(cluster, namespace)
        finally:
            preparations.remove_namespace(cluster, namespace)
            kwok.send_calls(
                cluster.api,
                [
                    Call("DELETE", f"/api/v1/nodes/{document['metadata']['name']}")
                    for document in documents
                ],
            )


def unready_nodes(cluster: Access, selector: str) -> list[str]:
    """Return nodes with a taint of Kubernetes' own, which each has at first."""
    items = cluster.api.get(f"/api/v1/nodes?labelSelector={selector}")["items"]
    prefix = "node.kubernetes.io/"
    return [
        item["metadata"]["name"]
        for item in items
        if any(taint["key"].startswith(prefix) for taint in item["spec"].get("taints", []))
    ]


def plan_turns() -> list[list[Attempt]]:
    """Return pods for each kind and each of its jobs, in turns without two for one node."""
    turns: list[list[Attempt]] = []
    for platform_name, platform in PLATFORMS.items():
        for kind in platform.kinds:
            for turn, job in enumerate(kind.takes):
                turns += [[]] if turn == len(turns) else []
                turns[turn].append(Attempt(platform_name, job, kind.name))
    return turns


def test_pods_go_to_the_intended_kinds_of_node_only(nodes: Nodes) -> None:
    elsewhere = [
        Attempt(platform_name, job, None)
        for platform_name, platform in PLATFORMS.items()
        for job in platform.jobs
    ]
    first, *other_turns = plan_turns()
    wrong = find_refused(nodes, first, 1)
    nodes.put(elsewhere, 0)
    for turn, tries in enumerate(other_turns, 2):
        wrong |= find_refused(nodes, tries, turn)
    # Last, as what was in the way of one may have gone meanwhile.
    wrong |= {
        name: pod["spec"]["nodeName"]
        for name, pod in nodes.pods(0).items()
        if "nodeName" in pod["spec"]
    }
    assert wrong == {}, json.dumps(wrong, indent=2)


def find_refused(nodes: Nodes, tries: list[Attempt], turn: int) -> Mapping[str, str]:
    """Return the attempts without a place on their kind of node, and why.

    A pod without a place is tried again: the scheduler may learn late that a node is ready.
    """
    reasons: dict[str, str] = {attempt.name: "" for attempt in tries}
    for _ in range(2):
        remaining = [attempt for attempt in tries if attempt.name in reasons]
        reasons = {
            name: unschedulable_reason(pod)
            for name, pod in nodes.put(remaining, turn).items()
            if "nodeName" not in pod["spec"]
        }
        nodes.clear(turn)
    return reasons


def test_table_covers_every_job_and_kind() -> None:
    kinds = [kind for platform in PLATFORMS.values() for kind in platform.kinds]
    assert len(kinds) >= 40 and len({kind.name for kind in kinds}) == len(kinds)
    assert all(kind.source for kind in kinds)
    assert [job for platform in PLATFORMS.values() for job in find_unknown_jobs(platform)] == []
    unused = [
        (platform_name, job)
        for platform_name, platform in PLATFORMS.items()
        for job in platform.jobs
        if not platform.meant_for(job)
    ]
    assert unused == []
