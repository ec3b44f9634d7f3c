"""Looking at a job: which calls are made, and what becomes of those that the server refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher import kinds, listing, placement, world
from launcher.agent import words
from launcher.cluster import Cluster
from launcher.errors import ApiError, ClusterError
from launcher.explain import explain
from launcher.jobset import OWN_LABEL
from launcher.kinds import JOBSETS, PODS, Kind
from launcher.status import State, fold
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Fault, Handler, Server, refuse
from tests.launcher.objects import cluster_queue, jobset, local_queue, node, pending, pod, workload


@pytest.fixture
def cluster(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path, server.url, namespace="team")))
    return Cluster.connect()


def put(server: Server, kind: Kind, *found: objects.Object) -> None:
    for one in found:
        server.put(kind.path("team", one["metadata"]["name"]), one)


def says(server: Server, host: objects.Object, *spoken: tuple[str, objects.Object]) -> None:
    lines = [words.word(kind, said) for kind, said in spoken]
    server.put(PODS.path("team", host["metadata"]["name"], "log"), {"text": "\n".join(["[0] hello", *lines, ""])})


def calls(server: Server) -> int:
    return len([query for _, _, query in server.requests if "continue" not in query])


def test_a_job_that_runs_is_seen_with_what_its_leader_says(server: Server, cluster: Cluster) -> None:
    put(server, JOBSETS, jobset(1))
    put(server, PODS, host := pod(0))
    says(server, host, objects.past(83, "rank 0 raised: X"), objects.beat(attempt=2))
    seen = world.gather(cluster, "team", "lm")
    assert (fold(seen).step, seen.told.before[0].verdict.code) == (40, 83)
    assert calls(server) == 5


def test_the_start_of_a_long_log_is_read_for_what_was_before(server: Server, cluster: Cluster) -> None:
    put(server, JOBSETS, jobset(1))
    put(server, PODS, host := pod(0))
    says(server, host, objects.beat())
    world.gather(cluster, "team", "lm")
    asked = [query for _, at, query in server.requests if at.endswith("/log")]
    assert ["sinceSeconds" in query for query in asked] == [True, False]
    assert "limitBytes" in asked[1]


def test_queues_are_read_only_while_they_hold_the_job_back(server: Server, cluster: Cluster) -> None:
    made = server.put(JOBSETS.path("team", "lm"), jobset(1, queue="research", suspend=True))
    held = workload(objects.condition("QuotaReserved", "False", "Pending", "later"))
    held["metadata"]["labels"] = {placement.JOB_UID: made["metadata"]["uid"]}
    put(server, kinds.WORKLOADS, held)
    put(server, kinds.LOCAL_QUEUES, local_queue())
    server.put(kinds.CLUSTER_QUEUES.path(None, "shared"), cluster_queue())
    seen = world.gather(cluster, "team", "lm")
    assert seen.cluster_queue is not None and seen.nodes is None
    assert explain(seen).headline == "lm waits: queue research (ClusterQueue shared): later"
    assert calls(server) <= 8


def test_nodes_are_read_only_while_pods_have_none_and_in_pages(server: Server, cluster: Cluster) -> None:
    put(server, JOBSETS, jobset(1))
    put(server, PODS, pending(0, "0/600 nodes are available"))
    for number in range(600):
        server.put(kinds.NODES.path(None, f"node-{number}"), node(f"node-{number}"))
    seen = world.gather(cluster, "team", "lm")
    assert seen.nodes is not None and len(seen.nodes) == 600
    assert calls(server) <= 8


@pytest.mark.parametrize("part", ["/events", "/nodes", "/apis/batch/"])
def test_what_may_not_be_read_is_said_and_done_without(server: Server, cluster: Cluster, part: str) -> None:
    put(server, JOBSETS, jobset(1))
    put(server, PODS, pending(0, "0/3 nodes are available: 3 Insufficient cpu."))
    server.on("GET", part, refuse(403))
    found = explain(world.gather(cluster, "team", "lm"))
    assert found.headline.startswith("lm waits: its host unscheduled: ")
    assert "could not be read: a fault of the test: 403" in found.facts[0]


def test_a_node_that_does_not_answer_for_its_log_is_asked_once(server: Server, cluster: Cluster) -> None:
    put(server, JOBSETS, jobset(1))
    put(server, PODS, pod(0))
    server.on("GET", "/log", *[refuse(500)] * 5)
    found = explain(world.gather(cluster, "team", "lm"))
    assert found.headline == "lm runs: 1 of 1 host ready"
    assert sum(at.endswith("/log") for _, at, _ in server.requests) == 1


def test_a_server_without_jobset_is_told_from_a_job_that_is_not_there(server: Server, cluster: Cluster) -> None:
    put(server, JOBSETS, jobset(1))
    assert world.gather(cluster, "team", "ml").neighbours == ("lm",)
    gone = unknown_path()
    server.on("GET", "/jobsets", *[gone] * 3)
    with pytest.raises(ClusterError, match="lacks JobSet"):
        world.gather(cluster, "team", "ml")
    with pytest.raises(ClusterError, match="lacks JobSet"):
        listing.gather(cluster, "team")


def unknown_path() -> Fault:
    def fault(handler: Handler) -> bool:
        handler.fail(404, "NotFound", "the server could not find the requested resource")
        return True

    return fault


def test_no_right_to_jobsets_is_an_error_and_not_an_absent_job(server: Server, cluster: Cluster) -> None:
    server.on("GET", "/jobsets", refuse(403))
    with pytest.raises(ApiError):
        world.gather(cluster, "team", "lm")


def test_a_list_tells_jobs_of_several_namespaces_apart(server: Server, cluster: Cluster) -> None:
    for namespace in ("other", "team"):
        made = jobset(1)
        made["metadata"] |= {"namespace": namespace, "uid": namespace}
        host = pod(0) if namespace == "team" else pending(0)
        host["metadata"] |= {"namespace": namespace, "labels": {**host["metadata"]["labels"], OWN_LABEL: "lm"}}
        server.put(JOBSETS.path(namespace, "lm"), made)
        server.put(PODS.path(namespace, host["metadata"]["name"]), host)
    assert [fold(one).state for one in listing.gather(cluster, "team")] == [State.RUNNING]
    assert [fold(one).state for one in listing.gather(cluster, "other")] == [State.PENDING]


def test_a_list_reads_the_logs_of_the_first_jobs_only(server: Server, cluster: Cluster) -> None:
    for number in range(20):
        made = jobset(1, name=f"lm-{number}")
        made["metadata"]["uid"] = str(number)
        host = pod(0)
        labels = {
            **host["metadata"]["labels"],
            "jaxlaunch.io/job": "x",
            "jobset.sigs.k8s.io/jobset-name": f"lm-{number}",
        }
        host["metadata"] |= {"name": f"lm-{number}-w-0-0-abcde", "labels": labels}
        put(server, JOBSETS, made)
        put(server, PODS, host)
        says(server, host, objects.beat())
    found = [fold(one).step for one in listing.gather(cluster, "team")]
    assert found == [40] * listing.MAX_LOGS + [None] * (20 - listing.MAX_LOGS)
