"""Looking at a job: which calls are made, and what becomes of those that the server refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
from jaxlaunch.launcher.errors import ApiError, ClusterError, UnreachableError
from jaxlaunch.launcher.jobs.status import collect
from jaxlaunch.launcher.jobs.status.job_status import State, derive_status
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes import kinds, labels
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, PODS, Kind
from jaxlaunch.launcher.kubernetes.labels import JOB_LABEL
from jaxlaunch.records import log_lines
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Fault, Handler, Server, refuse_with
from tests.launcher.objects import cluster_queue, jobset, local_queue, node, pending, pod, workload


@pytest.fixture
def cluster(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv(
        "KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, namespace="team"))
    )
    return Cluster.connect()


def put(server: Server, kind: Kind, *found: objects.Object) -> None:
    for one in found:
        server.put(kind.path("team", one["metadata"]["name"]), one)


def write_log(server: Server, host: objects.Object, *records: log_lines.Line) -> None:
    lines = [log_lines.format_line(record) for record in records]
    server.put(
        PODS.path("team", host["metadata"]["name"], "log"),
        {"text": "\n".join(["[0] hello", *lines, ""])},
    )


def calls(server: Server) -> int:
    return len([query for _, _, query in server.requests if "continue" not in query])


def test_a_job_that_runs_is_read_with_the_records_of_its_leader(
    server: Server, cluster: Cluster
) -> None:
    put(server, JOBSETS, jobset(1))
    put(server, PODS, host := pod(0))
    write_log(server, host, objects.past(83, "rank 0 raised: X"), objects.beat(attempt=2))
    job = collect.read_snapshot(cluster, "team", "lm")
    assert (derive_status(job).step, job.report.earlier_ends[0].verdict.code) == (40, 83)
    assert calls(server) == 5


def test_the_start_of_a_long_log_is_read_for_what_was_before(
    server: Server, cluster: Cluster
) -> None:
    put(server, JOBSETS, jobset(1))
    put(server, PODS, host := pod(0))
    write_log(server, host, objects.beat())
    collect.read_snapshot(cluster, "team", "lm")
    queries = [query for _, at, query in server.requests if at.endswith("/log")]
    assert ["sinceSeconds" in query for query in queries] == [True, False]
    assert "limitBytes" in queries[1]


def test_of_a_program_that_floods_the_log_its_end_is_read_until_it_has_a_record(
    server: Server, cluster: Cluster
) -> None:
    put(server, JOBSETS, jobset(1))
    put(server, PODS, host := pod(0))
    server.put(PODS.path("team", host["metadata"]["name"], "log"), {"text": "[0] x\n" * 5_000})
    collect.read_snapshot(cluster, "team", "lm")
    queries = [query for _, at, query in server.requests if at.endswith("/log")]
    assert [query.get("tailLines") for query in queries] == ["4000", "32000", None]


def test_queues_are_read_only_while_they_hold_the_job_back(
    server: Server, cluster: Cluster
) -> None:
    made = server.put(JOBSETS.path("team", "lm"), jobset(1, queue="research", suspend=True))
    held = workload(objects.condition("QuotaReserved", "False", "Pending", "later"))
    held["metadata"]["labels"] = {labels.JOB_UID: made["metadata"]["uid"]}
    put(server, kinds.WORKLOADS, held)
    put(server, kinds.LOCAL_QUEUES, local_queue())
    server.put(kinds.CLUSTER_QUEUES.path(None, "shared"), cluster_queue())
    job = collect.read_snapshot(cluster, "team", "lm")
    assert job.cluster_queue is not None and job.nodes is None
    assert explain_job(job).headline == "lm waits: queue research (ClusterQueue shared): later"
    assert calls(server) <= 8


def test_the_job_that_took_its_place_is_found_by_the_uid_that_kueue_names(
    server: Server, cluster: Cluster
) -> None:
    made = server.put(JOBSETS.path("team", "lm"), jobset(1, queue="research", suspend=True))
    put(server, JOBSETS, jobset(1, name="urgent") | {"metadata": {"name": "urgent"}})
    server.objects[JOBSETS.path("team", "urgent")]["metadata"]["uid"] = "5c0f1a2b-0000"
    message = (
        "Preempted to accommodate a workload (UID: 1, JobUID: 5c0f1a2b-0000) due to prioritization"
    )
    held = workload(objects.condition("Evicted", reason="Preempted", message=message))
    held["metadata"]["labels"] = {labels.JOB_UID: made["metadata"]["uid"]}
    put(server, kinds.WORKLOADS, held)
    job = collect.read_snapshot(cluster, "team", "lm")
    assert explain_job(job).headline.startswith("lm was preempted by job urgent and waits")
    assert calls(server) <= 8


def test_the_namespace_is_read_only_where_the_job_is_deleted_or_refused(
    server: Server, cluster: Cluster
) -> None:
    ending = {"metadata": {"name": "team", "deletionTimestamp": objects.ago(minutes=1)}}
    server.put(kinds.NAMESPACES.path(None, "team"), ending)
    put(server, JOBSETS, jobset(1))
    assert collect.read_snapshot(cluster, "team", "lm").ending_namespace is None
    leaving = {"metadata": {"deletionTimestamp": objects.ago(minutes=1)}}
    put(server, JOBSETS, apiserver.merge_patch(jobset(1), leaving))
    assert explain_job(collect.read_snapshot(cluster, "team", "lm")).headline.startswith(
        "lm is being deleted with its namespace"
    )
    server.on("GET", "/namespaces/team", *[lambda handler: refuse_namespace(handler)] * 20)
    assert (
        explain_job(collect.read_snapshot(cluster, "team", "lm")).headline
        == "lm is being deleted: its pods have ended"
    )


def refuse_namespace(handler: Handler) -> bool:
    """As for a user who may read what is in the namespace, and not the namespace."""
    if is_it := handler.at.endswith("/namespaces/team"):
        handler.fail(403, "Forbidden", "namespaces is forbidden")
    return is_it


def test_nodes_are_read_only_while_pods_have_none_and_in_pages(
    server: Server, cluster: Cluster
) -> None:
    put(server, JOBSETS, jobset(1))
    put(server, PODS, pending(0, "0/600 nodes are available"))
    for number in range(600):
        server.put(kinds.NODES.path(None, f"node-{number}"), node(f"node-{number}"))
    job = collect.read_snapshot(cluster, "team", "lm")
    assert job.nodes is not None and len(job.nodes) == 600
    assert calls(server) <= 8


@pytest.mark.parametrize("part", ["/events", "/nodes", "/apis/batch/"])
def test_what_may_not_be_read_is_named_and_the_rest_is_used(
    server: Server, cluster: Cluster, part: str
) -> None:
    put(server, JOBSETS, jobset(1))
    put(server, PODS, pending(0, "0/3 nodes are available: 3 Insufficient cpu."))
    server.on("GET", part, refuse_with(403))
    found = explain_job(collect.read_snapshot(cluster, "team", "lm"))
    assert found.headline.startswith("lm waits: its host is unschedulable: ")
    assert "could not be read: a fault of the test: 403" in found.facts[0]


def test_a_node_that_fails_to_give_a_log_is_called_once(server: Server, cluster: Cluster) -> None:
    put(server, JOBSETS, jobset(1))
    put(server, PODS, pod(0))
    ready = {"status": {"conditions": [objects.condition("Ready")]}}
    server.put(kinds.NODES.path(None, "node-1"), node("node-1") | ready)
    server.on("GET", "/log", *[refuse_with(500)] * 5)
    found = explain_job(collect.read_snapshot(cluster, "team", "lm"))
    assert found.headline.startswith(
        "lm runs: 1 of 1 host ready; what they do is unknown: the log of lm-w-0-0-"
    )
    assert sum(at.endswith("/log") for _, at, _ in server.requests) == 1


HUNG = (
    'Get "https://10.77.0.1:10250/containerLogs/team/lm-w-0-0-abcd0/main?tail=1": net/http: TLS '
    "handshake timeout "
    "(GET /api/v1/namespaces/team/pods/lm-w-0-0-abcd0/log)"
)


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            ApiError(HUNG, None, 500),
            "the kubelet of node n-1 does not answer the API server: net/http: TLS handshake",
        ),
        (
            ApiError(
                HUNG.replace(
                    "net/http: TLS handshake timeout", "tls: failed to verify certificate"
                ),
                None,
                500,
            ),
            "the kubelet of node n-1 is not trusted by the API server: tls: failed to verify "
            "certificate",
        ),
        (
            UnreachableError("The API server stopped answering.", sent=True),
            "the kubelet of node n-1 has not sent it to the",
        ),
        (
            UnreachableError("The API server cannot be reached."),
            "The API server cannot be reached.",
        ),
        (ApiError("pods is forbidden", None, 403), "pods is forbidden"),
    ],
)
def test_a_log_that_a_kubelet_does_not_give_is_no_fault_of_the_api_server(
    error: ClusterError, why: str
) -> None:
    assert collect.explain_unread(error, "n-1").startswith(why)


def test_the_node_of_a_host_that_may_be_lost_is_read_and_named(
    server: Server, cluster: Cluster
) -> None:
    ready = objects.condition("Ready", "Unknown", message="Kubelet stopped posting node status.")
    put(server, JOBSETS, jobset(1))
    put(server, PODS, pod(0))
    server.put(
        kinds.NODES.path(None, "node-1"), node("node-1") | {"status": {"conditions": [ready]}}
    )
    server.on("GET", "/log", refuse_with(500))
    job = collect.read_snapshot(cluster, "team", "lm")
    assert explain_job(job).headline == (
        "lm waits: node node-1 has not answered: Kubelet stopped posting node status; its "
        "host is on it"
    )
    assert isinstance(job, Snapshot) and derive_status(job).ready == 0
    assert calls(server) <= 8


@pytest.mark.parametrize(
    "which", ["the leader's", "another's", "another's, of which nobody may read events"]
)
def test_a_node_that_is_deleted_is_named_while_its_pods_read_as_running(
    server: Server, cluster: Cluster, which: str
) -> None:
    """The API server's own words; the pod garbage collector has not come yet."""
    put(server, JOBSETS, jobset(2))
    put(server, PODS, leader := pod(0), pod(1, node="node-2"))
    server.put(kinds.NODES.path(None, "node-1"), node("node-1"))
    gone, number = ("node-1", 0) if which == "the leader's" else ("node-2", 1)
    if number:
        write_log(server, leader, objects.beat(stage="gather", missing=[1], missing_count=1))
    else:
        server.drop(kinds.NODES.path(None, "node-1"))
        server.on("GET", "/log", no_node(gone))
    removed = objects.event(
        "Node", gone, "RemovingNode", f"Node {gone} event: Removing Node {gone} from Controller"
    )
    server.put(kinds.EVENTS.path("default", "removed"), removed)
    if "events" in which:
        server.on("GET", "/namespaces/default/events", refuse_with(403))
    job = collect.read_snapshot(cluster, "team", "lm")
    assert isinstance(job, Snapshot)
    found = explain_job(dataclasses.replace(job, now=objects.NOW))
    when = "" if "events" in which else " at 11:59:30 UTC (30s ago)"
    assert found.headline == (
        f"lm waits: node {gone} no longer exists: its object was deleted{when}; host "
        f"{number} is on it"
    )
    assert found.next_move is not None and found.next_move.endswith(
        f"delete pod lm-w-0-{number}-abcd{number} --force"
    )
    assert (derive_status(job).ready, derive_status(job).phase) == (1, None)


def no_node(name: str) -> Fault:
    """What the API server says of the log of a pod on a node that is deleted."""

    def fault(handler: Handler) -> bool:
        handler.fail(404, "NotFound", f'pods "{name}" not found')
        return True

    return fault


def test_a_job_whose_label_was_taken_away_is_still_listed(server: Server, cluster: Cluster) -> None:
    disowned = jobset(1)
    del disowned["metadata"]["labels"][JOB_LABEL]
    put(server, JOBSETS, disowned, objects.foreign("theirs"))
    assert [(one.name, one.is_ours) for one in collect.read_snapshots(cluster, "team")] == [
        ("lm", True)
    ]


def test_a_server_without_jobset_differs_from_a_job_that_does_not_exist(
    server: Server, cluster: Cluster
) -> None:
    put(server, JOBSETS, jobset(1))
    found = collect.read_snapshot(cluster, "team", "ml")
    assert isinstance(found, NoSuchJob) and found.other_jobs == ("lm",)
    gone = unknown_path()
    server.on("GET", "/jobsets", *[gone] * 3)
    with pytest.raises(ClusterError, match="JobSet .* is not installed"):
        collect.read_snapshot(cluster, "team", "ml")
    with pytest.raises(ClusterError, match="JobSet .* is not installed"):
        collect.read_snapshots(cluster, "team")


def unknown_path() -> Fault:
    def fault(handler: Handler) -> bool:
        handler.fail(404, "NotFound", "the server could not find the requested resource")
        return True

    return fault


def test_no_right_to_jobsets_is_an_error_and_not_an_absent_job(
    server: Server, cluster: Cluster
) -> None:
    server.on("GET", "/jobsets", refuse_with(403))
    with pytest.raises(ApiError):
        collect.read_snapshot(cluster, "team", "lm")


def test_a_list_tells_jobs_of_several_namespaces_apart(server: Server, cluster: Cluster) -> None:
    for namespace in ("other", "team"):
        made = jobset(1)
        made["metadata"] |= {"namespace": namespace, "uid": namespace}
        host = pod(0) if namespace == "team" else pending(0)
        host["metadata"] |= {
            "namespace": namespace,
            "labels": {**host["metadata"]["labels"], JOB_LABEL: "lm"},
        }
        server.put(JOBSETS.path(namespace, "lm"), made)
        server.put(PODS.path(namespace, host["metadata"]["name"]), host)
    assert [derive_status(one).state for one in collect.read_snapshots(cluster, "team")] == [
        State.RUNNING
    ]
    assert [derive_status(one).state for one in collect.read_snapshots(cluster, "other")] == [
        State.PENDING
    ]


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
        write_log(server, host, objects.beat())
    found = [derive_status(one).step for one in collect.read_snapshots(cluster, "team")]
    assert found == [40] * collect.MAX_LOGS + [None] * (20 - collect.MAX_LOGS)
