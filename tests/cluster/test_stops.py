"""Stops of pods from outside are not charged, and the run resumes from its save."""

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
from tests.cluster.gangs import (
    Gang,
    Workspace,
    make_workspace,
    program_command,
    read_verdicts,
    wait_for,
)
from tests.cluster.harness.places import NODE

SEAT = "jaxlaunch.test/seat"  # a resource of the node that our jobs alone ask for
COUNTED = re.compile(r"begins at step (\d+)")
SAVED = Defaults.model_validate({"checkpoint": {"claim": "checkpoints", "path": "/checkpoints"}})


def evict(workspace: Workspace, gang: Gang) -> None:
    nodes.evict_pod(workspace.access, workspace.namespace, gang.hosts[1].pod)


def evict_leader(workspace: Workspace, gang: Gang) -> None:
    nodes.evict_pod(workspace.access, workspace.namespace, gang.hosts[0].pod)


def delete(workspace: Workspace, gang: Gang) -> None:
    workspace.cluster.delete(PODS, gang.hosts[1].pod, workspace.namespace)


def delete_by_force(workspace: Workspace, gang: Gang) -> None:
    pods = f"/api/v1/namespaces/{workspace.namespace}/pods"
    workspace.access.api.delete(f"{pods}/{gang.hosts[1].pod}?gracePeriodSeconds=0")
    # The kubelet gives it two seconds at most: nothing else is stopped meanwhile.
    wait_for(
        "it starts anew or is over", lambda: gang.counters[0] or gang.status.get("terminalState")
    )


def drain(workspace: Workspace, gang: Gang) -> None:
    """Run kubectl drain for these pods alone."""
    with nodes.cordon(workspace.access, NODE):
        for host in gang.hosts:
            nodes.evict_pod(workspace.access, workspace.namespace, host.pod)


def taint(workspace: Workspace, gang: Gang) -> None:
    pods = [host.pod for host in gang.hosts]
    with nodes.taint(workspace.access, NODE, f"jaxlaunch.test/{workspace.namespace}", pods):
        wait_for("the taint is noticed", lambda: all(host.disruption for host in gang.hosts))


def suspend(workspace: Workspace, gang: Gang) -> None:
    """Suspend the JobSet, which removes the pods, and resume it."""
    workspace.cluster.merge_patch(
        JOBSETS, gang.name, workspace.namespace, {"spec": {"suspend": True}}
    )
    wait_for("no pod is left", lambda: not gang.pods)
    workspace.cluster.merge_patch(
        JOBSETS, gang.name, workspace.namespace, {"spec": {"suspend": False}}
    )


def suspend_by_kueue(workspace: Workspace, gang: Gang) -> None:
    uid = gang.jobset["metadata"]["uid"]
    (workload,) = workspace.cluster.list(WORKLOADS, workspace.namespace, labels=f"{JOB_UID}={uid}")
    name = workload["metadata"]["name"]
    workspace.cluster.merge_patch(WORKLOADS, name, workspace.namespace, {"spec": {"active": False}})
    wait_for("no pod is left", lambda: not gang.pods)
    workspace.cluster.merge_patch(WORKLOADS, name, workspace.namespace, {"spec": {"active": True}})


def preempt(workspace: Workspace, gang: Gang) -> None:
    """Start a job of higher priority that takes a seat and soon ends."""
    important_gang = workspace.start(
        "more",
        Defaults(),
        priority=workspace.namespace,
        command=["true"],
        **job_with_seats(1),
        **COMMON,
    )
    assert important_gang.wait_for_end() == "Completed"


def job_with_seats(hosts: int) -> dict[str, Any]:
    container = {"name": "main", "resources": {"requests": {SEAT: "1"}, "limits": {SEAT: "1"}}}
    return {"hosts": hosts, "pod": {"spec": {"containers": [container]}}}


COMMON: dict[str, Any] = {
    "restarts": {"in_place": 0, "crash": 0},
    "grace": "20s",
    "resources": {"cpu": "10m"},
}
# What happens, and how many restarts may come of it; never one that counts. The Job controller may
# see how a pod of a suspended Job ended before it calls the Job suspended.
STOPS: Mapping[str, tuple[Callable[[Workspace, Gang], None], set[int]]] = {
    "tainted": (taint, {1}),  # first: while no pod is new
    "deleted-by-force": (delete_by_force, {1}),
    "evicted": (evict, {1}),
    "evicted-leader": (evict_leader, {1}),
    "evicted-stubborn": (evict, {1}),  # a program that ignores SIGTERM
    "evicted-slice": (evict, {1}),
    "deleted": (delete, {1}),
    "drained": (drain, {1}),
    "preempted": (preempt, {1}),
    "suspended": (suspend, {0, 1}),
    "suspended-by-kueue": (suspend_by_kueue, {0, 1}),
}

# Two hosts each; those of a slice are a Job of their own.
SHAPES = {
    "preempted": job_with_seats(2),
    "suspended-by-kueue": {"queue": "queue", "hosts": 2},
    "evicted-slice": {"slices": 2},
}


@pytest.fixture(scope="module")
def workspace(cluster: Access, base_image: str) -> Iterator[Workspace]:
    if not cluster.is_ours:
        pytest.skip("nodes are drained and tainted: not on a cluster that you gave")
    with (
        make_workspace(cluster, base_image) as workspace,
        nodes.offer_resource(cluster, NODE, SEAT, 2),
    ):
        folder = preparations.make_claim(cluster, workspace.namespace)
        for name in STOPS:
            (folder / name).mkdir(mode=0o777)
            (folder / name).chmod(0o777)
        preparations.make_queue(cluster, workspace.namespace, {"cpu": "1"})
        version = "scheduling.k8s.io/v1"
        priority = {
            "apiVersion": version,
            "kind": "PriorityClass",
            "metadata": {"name": workspace.namespace},
            "value": 1000,
        }
        cluster.api.create(f"/apis/{version}/priorityclasses", priority)
        yield workspace
        cluster.api.delete(f"/apis/{version}/priorityclasses/{workspace.namespace}")


@pytest.fixture(scope="module")
def gangs(workspace: Workspace) -> Mapping[str, Gang]:
    """Start gangs that count steps, and stop each in its way."""
    started = {}
    for name in STOPS:
        command = program_command(
            "counts.py", f"/checkpoints/{name}", *(["stubborn"] if "stubborn" in name else [])
        )
        keys = SHAPES.get(name, {"hosts": 2})
        started[name] = workspace.start(name, SAVED, command=command, **keys, **COMMON)
    for gang in started.values():
        gang.wait_until_running()
        wait_for(f"{gang.name} counts", lambda gang=gang: len(first_steps(gang)) == 2)
    for name, (happens, _) in STOPS.items():
        happens(workspace, started[name])
    return started


def first_steps(gang: Gang) -> list[int]:
    """Return the step at which each rank of the newest generation began."""
    return [int(match[1]) for line in gang.read_lines() if (match := COUNTED.search(line.text))]


@pytest.mark.parametrize("name", STOPS)
def test_stop_from_outside_is_not_charged(gangs: Mapping[str, Gang], name: str) -> None:
    gang = gangs[name]
    assert gang.wait_for_end() == "Completed", read_verdicts(gang.hosts)
    restarts, charged = gang.counters
    assert restarts in STOPS[name][1] and charged == 0
    assert len(first_steps(gang)) == 2 and all(step > 0 for step in first_steps(gang))
