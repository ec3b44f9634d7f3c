"""Each job's pods are taken by the kinds of node that are meant for them, and by no other: the scheduler's own word.

Every kind of tests/cluster/node_kinds is a node here that exists in name only. For each job one pod
may go anywhere but to the kinds that are meant for it, and must stay without a node; one more for
each kind that is meant may go only there, and must get it. The latter take turns, for a node has
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
from tests.cluster.node_kinds.kind import EFFECT, Kind, Platform, unknown
from tests.cluster.waiting import until
from tests.launcher.manifests import test_jobset

pytestmark = pytest.mark.extended

Object = dict[str, Any]
PLATFORMS = {"gke": GKE, "eks": EKS, "eks of managed groups": MANAGED_GROUPS, "generic": GENERIC}
OWNER, KIND, TURN = "jaxlaunch.test/owner", "jaxlaunch.test/kind", "jaxlaunch.test/turn"
PATIENCE_S = 300.0


class Try(NamedTuple):
    """A pod of a job that may go to one kind of node, or to any but those that are meant for the job."""

    where: str
    job: str
    kind: str | None

    @property
    def name(self) -> str:
        return "-".join(f"{self.where} {self.job} {self.kind or 'elsewhere'}".lower().split())


class Nodes(NamedTuple):
    """A namespace, and nodes of every kind for its pods alone."""

    cluster: Access
    namespace: str

    @property
    def path(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def put(self, tries: list[Try], turn: int) -> dict[str, Object]:
        """Makes a pod of each; gives them by name once the scheduler has tried them all."""
        kwok.send(self.cluster.api, [Call("POST", self.path, self.pod(one, turn)) for one in tries])
        until(
            lambda: self.pods(turn),
            lambda seen: all(map(judged, seen.values())),
            "all are tried",
            PATIENCE_S,
        )
        return self.pods(turn)

    def pods(self, turn: int) -> dict[str, Object]:
        found = self.cluster.api.get(
            f"{self.path}?labelSelector={TURN.replace('/', '%2F')}%3D{turn}"
        )
        return {pod["metadata"]["name"]: pod for pod in found["items"]}

    def clear(self, turn: int) -> None:
        for name in self.pods(turn):
            self.cluster.api.delete(f"{self.path}/{name}?gracePeriodSeconds=0")
        until(lambda: self.pods(turn), lambda left: not left, "all are gone", PATIENCE_S)

    def pod(self, one: Try, turn: int) -> Object:
        """What the scheduler reads of the job's pods."""
        platform = PLATFORMS[one.where]
        spec = rendered(platform, one.where, one.job)
        kept = {
            key: spec[key] for key in ("nodeSelector", "affinity", "tolerations") if key in spec
        }
        for key in ("containers", "initContainers"):
            kept[key] = [essential(container) for container in spec.get(key, [])]
        kept["tolerations"] = [*kept["tolerations"], {"key": kwok.TAINT, "operator": "Exists"}]
        selector = {**kept.get("nodeSelector", {}), OWNER: self.namespace}
        wanted = {"key": KIND, "operator": "NotIn", "values": platform.meant_for(one.job)}
        if one.kind is not None:
            wanted = {"key": KIND, "operator": "In", "values": [one.kind]}
        ours = {"key": f"{OWNER}-of", "operator": "In", "values": [one.where.replace(" ", "-")]}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": one.name, "labels": {TURN: str(turn)}},
            "spec": kept
            | {
                "nodeSelector": selector,
                "affinity": narrowed(kept.get("affinity", {}), [wanted, ours]),
            },
        }


def rendered(platform: Platform, where: str, job: str) -> Object:
    """The pods of a job, as the launcher renders them."""
    first = where.partition(" ")[0]
    text = (
        f"name: x\nimage: registry.example/train:1\nplatform: {first}\ncommand: "
        f"[a]\n{platform.jobs[job]}\n"
    )
    manifests = render(
        resolve(load.parse_job(text), defaults.parse_defaults(platform.defaults)), None
    )
    return test_jobset.pod_of(manifests[0])


def essential(container: Object) -> Object:
    """Its name, image and resources, and whether it stays beside the others."""
    return {
        key: container[key]
        for key in ("name", "image", "resources", "restartPolicy")
        if key in container
    }


def narrowed(affinity: Object, terms: list[Object]) -> Object:
    """The affinity, with more to be met."""
    old = affinity.get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    found = [one["matchExpressions"] for one in old.get("nodeSelectorTerms", [])] or [[]]
    required = {"nodeSelectorTerms": [{"matchExpressions": [*one, *terms]} for one in found]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def judged(pod: Object) -> bool:
    return "nodeName" in pod["spec"] or bool(reason(pod))


def reason(pod: Object) -> str:
    """Why the scheduler found no node for it."""
    conditions = pod["status"].get("conditions", [])
    return next((one["message"] for one in conditions if one.get("reason") == "Unschedulable"), "")


def node(kind: Kind, where: str, owner: str) -> Object:
    """A node of this kind, which the pods of others do not tolerate."""
    ours = {OWNER: owner, f"{OWNER}-of": where.replace(" ", "-"), KIND: kind.name}
    made = kwok.node(f"{owner}-{kind.name}", {**kind.labels, **ours}, kind.allocatable, kwok.TAINT)
    made["spec"]["taints"] += [
        {"key": key, "value": value, "effect": EFFECT} for key, value in kind.taints.items()
    ]
    return made


@pytest.fixture(scope="module")
def nodes(cluster: Access) -> Iterator[Nodes]:
    if not cluster.is_ours:
        pytest.skip("the nodes are kwok's: not on a cluster that you gave")
    namespace = preparations.make_namespace(cluster, "privileged")
    made = [
        node(kind, where, namespace)
        for where, platform in PLATFORMS.items()
        for kind in platform.kinds
    ]
    with others.changing():
        try:
            kwok.send(cluster.api, [Call("POST", "/api/v1/nodes", one) for one in made])
            selector = f"{OWNER.replace('/', '%2F')}%3D{namespace}"
            until(
                lambda: unready(cluster, selector),
                lambda left: not left,
                "every node is ready",
                PATIENCE_S,
            )
            yield Nodes(cluster, namespace)
        finally:
            preparations.remove_namespace(cluster, namespace)
            kwok.send(
                cluster.api,
                [Call("DELETE", f"/api/v1/nodes/{one['metadata']['name']}") for one in made],
            )


def unready(cluster: Access, selector: str) -> list[str]:
    """Nodes with a taint of Kubernetes' own, which each has at first."""
    found = cluster.api.get(f"/api/v1/nodes?labelSelector={selector}")["items"]
    own = "node.kubernetes.io/"
    return [
        one["metadata"]["name"]
        for one in found
        if any(taint["key"].startswith(own) for taint in one["spec"].get("taints", []))
    ]


def turns() -> list[list[Try]]:
    """A pod for each kind and each job that it is meant for; in a turn no two for one node."""
    found: list[list[Try]] = []
    for where, platform in PLATFORMS.items():
        for kind in platform.kinds:
            for turn, job in enumerate(kind.takes):
                found += [[]] if turn == len(found) else []
                found[turn].append(Try(where, job, kind.name))
    return found


def test_every_job_s_pods_go_to_the_nodes_that_are_meant_for_them_and_to_no_other(
    nodes: Nodes,
) -> None:
    elsewhere = [
        Try(where, job, None) for where, platform in PLATFORMS.items() for job in platform.jobs
    ]
    first, *others = turns()
    wrong = refused(nodes, first, 1)
    nodes.put(elsewhere, 0)
    for turn, tries in enumerate(others, 2):
        wrong |= refused(nodes, tries, turn)
    # Last, as what was in the way of one may have gone meanwhile.
    wrong |= {
        name: pod["spec"]["nodeName"]
        for name, pod in nodes.pods(0).items()
        if "nodeName" in pod["spec"]
    }
    assert wrong == {}, json.dumps(wrong, indent=2)


def refused(nodes: Nodes, tries: list[Try], turn: int) -> Mapping[str, str]:
    """Those for which the kind of node that is meant for them has no place, and why. What has none is tried once more:
    the scheduler may learn late that a node is ready."""
    found: dict[str, str] = {one.name: "" for one in tries}
    for _ in range(2):
        left = [one for one in tries if one.name in found]
        found = {
            name: reason(pod)
            for name, pod in nodes.put(left, turn).items()
            if "nodeName" not in pod["spec"]
        }
        nodes.clear(turn)
    return found


def test_the_table_is_whole() -> None:
    kinds = [kind for platform in PLATFORMS.values() for kind in platform.kinds]
    assert len(kinds) >= 40 and len({kind.name for kind in kinds}) == len(kinds)
    assert all(kind.source for kind in kinds)
    assert [job for platform in PLATFORMS.values() for job in unknown(platform)] == []
    unused = [
        (where, job)
        for where, platform in PLATFORMS.items()
        for job in platform.jobs
        if not platform.meant_for(job)
    ]
    assert unused == []
