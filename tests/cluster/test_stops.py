"""Whatever ends pods from outside is not charged, and the run goes on from what it saved."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from jaxlaunch.launcher.job.defaults import Defaults
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, PODS, WORKLOADS
from jaxlaunch.launcher.kubernetes.labels import JOB_UID
from tests.cluster import nodes, preparations
from tests.cluster.access import Access
from tests.cluster.gangs import Gang, Place, place, program, until, verdicts
from tests.cluster.harness.places import NODE

SEAT = "jaxlaunch.test/seat"  # a resource of the node that our jobs alone ask for
COUNTED = re.compile(r"begins at step (\d+)")
SAVED = Defaults.model_validate({"checkpoint": {"claim": "checkpoints", "path": "/checkpoints"}})


def evicted(here: Place, gang: Gang) -> None:
    nodes.evict(here.access, here.namespace, gang.hosts[1].pod)


def evicted_leader(here: Place, gang: Gang) -> None:
    nodes.evict(here.access, here.namespace, gang.hosts[0].pod)


def deleted(here: Place, gang: Gang) -> None:
    here.cluster.delete(PODS, gang.hosts[1].pod, here.namespace)


def deleted_by_force(here: Place, gang: Gang) -> None:
    pods = f"/api/v1/namespaces/{here.namespace}/pods"
    here.access.api.delete(f"{pods}/{gang.hosts[1].pod}?gracePeriodSeconds=0")
    # The kubelet gives it two seconds at most: nothing else is stopped meanwhile.
    until("it starts anew or is over", lambda: gang.counters[0] or gang.status.get("terminalState"))


def drained(here: Place, gang: Gang) -> None:
    """kubectl drain, of these pods alone."""
    with nodes.cordoned(here.access, NODE):
        for host in gang.hosts:
            nodes.evict(here.access, here.namespace, host.pod)


def tainted(here: Place, gang: Gang) -> None:
    pods = [host.pod for host in gang.hosts]
    with nodes.tainted(here.access, NODE, f"jaxlaunch.test/{here.namespace}", pods):
        until("the taint is noticed", lambda: all(host.disruption for host in gang.hosts))


def suspended(here: Place, gang: Gang) -> None:
    """JobSet takes the pods away, and gives them back."""
    here.cluster.merge_patch(JOBSETS, gang.name, here.namespace, {"spec": {"suspend": True}})
    until("no pod is left", lambda: not gang.pods)
    here.cluster.merge_patch(JOBSETS, gang.name, here.namespace, {"spec": {"suspend": False}})


def suspended_by_kueue(here: Place, gang: Gang) -> None:
    uid = gang.jobset["metadata"]["uid"]
    (workload,) = here.cluster.list(WORKLOADS, here.namespace, labels=f"{JOB_UID}={uid}")
    name = workload["metadata"]["name"]
    here.cluster.merge_patch(WORKLOADS, name, here.namespace, {"spec": {"active": False}})
    until("no pod is left", lambda: not gang.pods)
    here.cluster.merge_patch(WORKLOADS, name, here.namespace, {"spec": {"active": True}})


def preempted(here: Place, gang: Gang) -> None:
    """A job that matters more takes a seat, and is soon done."""
    more = here.start(
        "more", Defaults(), priority=here.namespace, command=["true"], **seated(1), **COMMON
    )
    assert more.ended() == "Completed"


def seated(hosts: int) -> dict[str, Any]:
    container = {"name": "main", "resources": {"requests": {SEAT: "1"}, "limits": {SEAT: "1"}}}
    return {"hosts": hosts, "pod": {"spec": {"containers": [container]}}}


COMMON: dict[str, Any] = {
    "restarts": {"in_place": 0, "crash": 0},
    "grace": "20s",
    "resources": {"cpu": "10m"},
}
# What happens, and how many restarts may come of it; never one that counts. The Job controller may
# see how a pod of a suspended Job ended before it calls the Job suspended.
STOPS: Mapping[str, tuple[Callable[[Place, Gang], None], set[int]]] = {
    "tainted": (tainted, {1}),  # first: while no pod is new
    "deleted-by-force": (deleted_by_force, {1}),
    "evicted": (evicted, {1}),
    "evicted-leader": (evicted_leader, {1}),
    "evicted-stubborn": (evicted, {1}),  # a program that ignores SIGTERM
    "evicted-slice": (evicted, {1}),
    "deleted": (deleted, {1}),
    "drained": (drained, {1}),
    "preempted": (preempted, {1}),
    "suspended": (suspended, {0, 1}),
    "suspended-by-kueue": (suspended_by_kueue, {0, 1}),
}

# Two hosts each; those of a slice are a Job of their own.
SHAPES = {
    "preempted": seated(2),
    "suspended-by-kueue": {"queue": "queue", "hosts": 2},
    "evicted-slice": {"slices": 2},
}


@pytest.fixture(scope="module")
def here(cluster: Access, base_image: str) -> Iterator[Place]:
    if not cluster.is_ours:
        pytest.skip("nodes are drained and tainted: not on a cluster that you gave")
    with place(cluster, base_image) as found, nodes.offering(cluster, NODE, SEAT, 2):
        folder = preparations.make_claim(cluster, found.namespace)
        for name in STOPS:
            (folder / name).mkdir(mode=0o777)
            (folder / name).chmod(0o777)
        preparations.make_queue(cluster, found.namespace, {"cpu": "1"})
        version = "scheduling.k8s.io/v1"
        priority = {
            "apiVersion": version,
            "kind": "PriorityClass",
            "metadata": {"name": found.namespace},
            "value": 1000,
        }
        cluster.api.create(f"/apis/{version}/priorityclasses", priority)
        yield found
        cluster.api.delete(f"/apis/{version}/priorityclasses/{found.namespace}")


@pytest.fixture(scope="module")
def gangs(here: Place) -> Mapping[str, Gang]:
    """All count, and what is to happen to each has happened."""
    started = {}
    for name in STOPS:
        command = program(
            "counts.py", f"/checkpoints/{name}", *(["stubborn"] if "stubborn" in name else [])
        )
        more = SHAPES.get(name, {"hosts": 2})
        started[name] = here.start(name, SAVED, command=command, **more, **COMMON)
    for gang in started.values():
        gang.runs()
        until(f"{gang.name} counts", lambda gang=gang: len(begun(gang)) == 2)
    for name, (happens, _) in STOPS.items():
        happens(here, started[name])
    return started


def begun(gang: Gang) -> list[int]:
    """The step at which each rank of the newest generation began."""
    return [int(found[1]) for line in gang.lines() if (found := COUNTED.search(line.text))]


@pytest.mark.parametrize("name", STOPS)
def test_what_stops_a_run_from_outside_is_not_charged(gangs: Mapping[str, Gang], name: str) -> None:
    gang = gangs[name]
    assert gang.ended() == "Completed", verdicts(gang.hosts)
    restarts, charged = gang.counters
    assert restarts in STOPS[name][1] and charged == 0
    assert len(begun(gang)) == 2 and all(step > 0 for step in begun(gang))
