"""Looking at a job: which calls are made, and what becomes of those that the server refuses."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime, timedelta
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


def put_objects(server: Server, kind: Kind, *snapshot_read: objects.Object) -> None:
    for job in snapshot_read:
        server.put(kind.path("team", job["metadata"]["name"]), job)


def write_log(server: Server, host: objects.Object, *records: log_lines.Line) -> None:
    lines = [log_lines.format_line(record) for record in records]
    server.put(
        PODS.path("team", host["metadata"]["name"], "log"),
        {"text": "\n".join(["[0] hello", *lines, ""])},
    )


def count_calls(server: Server) -> int:
    return len([query for _, _, query in server.requests if "continue" not in query])


def test_running_job_has_records_of_leader(server: Server, cluster: Cluster) -> None:
    put_objects(server, JOBSETS, jobset(1))
    put_objects(server, PODS, host := pod(0))
    write_log(server, host, objects.past(83, "rank 0 raised: X"), objects.beat(attempt=2))
    job = collect.read_snapshot(cluster, "team", "lm")
    assert (derive_status(job).step, job.report.earlier_ends[0].verdict.code) == (40, 83)
    assert count_calls(server) == 6


def test_pods_and_jobs_of_an_earlier_jobset_of_the_name_are_not_its_own(
    server: Server, cluster: Cluster
) -> None:
    """`kubectl delete jobset` leaves the pods to the garbage collector, and they save first."""
    uid = server.put(JOBSETS.path("team", "lm"), jobset(1))["metadata"]["uid"]
    earlier_pod, new_pod = pod(0, generation=2, is_leaving=True), pod(0)
    earlier_pod["metadata"]["name"] = "lm-w-0-0-zzzzz"
    jobs = objects.job_object(), objects.job_object("lm-w-1")
    for obj, owner in (
        *((earlier_pod, "earlier"), (jobs[1], "earlier")),
        *((new_pod, uid), (jobs[0], uid)),
    ):
        own_labels = {labels.NAME_LABEL: "lm", JOB_LABEL: "lm", labels.UID_LABEL: owner}
        obj["metadata"].setdefault("labels", {}).update(own_labels)
    put_objects(server, PODS, earlier_pod, new_pod)
    put_objects(server, kinds.JOBS, *jobs)
    for job in (
        collect.read_snapshot(cluster, "team", "lm"),
        *collect.read_snapshots(cluster, "team"),
    ):
        assert isinstance(job, Snapshot)
        assert [host.pod for host in job.hosts] == [new_pod["metadata"]["name"]]
        assert derive_status(job).state is State.RUNNING
        assert len(job.pods) == 1 and [item["metadata"]["name"] for item in job.jobs] in (
            ["lm-w-0"],
            [],
        )


def test_start_of_long_log_is_read(server: Server, cluster: Cluster) -> None:
    put_objects(server, JOBSETS, jobset(1))
    put_objects(server, PODS, host := pod(0))
    write_log(server, host, objects.beat())
    collect.read_snapshot(cluster, "team", "lm")
    queries = [query for _, at, query in server.requests if at.endswith("/log")]
    assert ["sinceSeconds" in query for query in queries] == [True, False]
    assert "limitBytes" in queries[1]


def test_flooded_log_is_read_until_record(server: Server, cluster: Cluster) -> None:
    put_objects(server, JOBSETS, jobset(1))
    put_objects(server, PODS, host := pod(0))
    server.put(PODS.path("team", host["metadata"]["name"], "log"), {"text": "[0] x\n" * 5_000})
    collect.read_snapshot(cluster, "team", "lm")
    queries = [query for _, at, query in server.requests if at.endswith("/log")]
    assert [query.get("tailLines") for query in queries] == ["4000", "32000", None]


def test_verdict_of_a_held_job_is_read_from_before_the_recent_log(
    server: Server, cluster: Cluster
) -> None:
    put_objects(server, JOBSETS, jobset(1))
    put_objects(server, PODS, host := pod(0))
    hold = objects.beat(stage="hold")
    write_log(server, host, objects.judged(83, "rank 0 raised: X", at=-100), hold)

    def send_recent(handler: Handler) -> bool:
        handler.send(200, f"{log_lines.format_line(hold)}\n".encode(), "text/plain")
        return True

    server.on("GET", "/log", send_recent)
    status = derive_status(collect.read_snapshot(cluster, "team", "lm"))
    assert status.state is State.HELD
    assert status.verdict is not None and status.verdict["code"] == 83


def test_queues_are_read_only_for_held_jobs(server: Server, cluster: Cluster) -> None:
    job_manifest = server.put(JOBSETS.path("team", "lm"), jobset(1, queue="research", suspend=True))
    held_job = workload(objects.condition("QuotaReserved", "False", "Pending", "later"))
    held_job["metadata"]["labels"] = {labels.JOB_UID: job_manifest["metadata"]["uid"]}
    put_objects(server, kinds.WORKLOADS, held_job)
    put_objects(server, kinds.LOCAL_QUEUES, local_queue())
    server.put(kinds.CLUSTER_QUEUES.path(None, "shared"), cluster_queue())
    job = collect.read_snapshot(cluster, "team", "lm")
    assert job.cluster_queue is not None and job.nodes is None
    assert explain_job(job).headline == "lm waits: queue research (ClusterQueue shared): later"
    assert count_calls(server) <= 8


def test_preemptor_is_found_by_uid(server: Server, cluster: Cluster) -> None:
    job_manifest = server.put(JOBSETS.path("team", "lm"), jobset(1, queue="research", suspend=True))
    put_objects(server, JOBSETS, jobset(1, name="urgent") | {"metadata": {"name": "urgent"}})
    server.objects[JOBSETS.path("team", "urgent")]["metadata"]["uid"] = "5c0f1a2b-0000"
    message = (
        "Preempted to accommodate a workload (UID: 1, JobUID: 5c0f1a2b-0000) due to prioritization"
    )
    held_job = workload(objects.condition("Evicted", reason="Preempted", message=message))
    held_job["metadata"]["labels"] = {labels.JOB_UID: job_manifest["metadata"]["uid"]}
    put_objects(server, kinds.WORKLOADS, held_job)
    job = collect.read_snapshot(cluster, "team", "lm")
    assert explain_job(job).headline.startswith("lm was preempted by job urgent and waits")
    assert count_calls(server) <= 8


def test_job_in_ending_namespace_is_deleted_with_it(server: Server, cluster: Cluster) -> None:
    ending = {"metadata": {"name": "team", "deletionTimestamp": objects.ago(minutes=1)}}
    server.put(kinds.NAMESPACES.path(None, "team"), ending)
    put_objects(server, JOBSETS, jobset(1))
    put_objects(server, PODS, host := pod(0))
    write_log(server, host, objects.beat())
    assert explain_job(collect.read_snapshot(cluster, "team", "lm")).headline == (
        "lm is being deleted with its namespace team: 1 pod still terminating"
    )
    # A pod's deletionTimestamp is the end of its grace period.
    until = (datetime.now(UTC) + timedelta(seconds=30)).strftime("%Y-%m-%dT%H:%M:%SZ")
    changes = {"deletionTimestamp": until, "labels": {JOB_LABEL: "lm"}}
    leaving_pod = apiserver.merge_patch(pod(0), {"metadata": changes})
    put_objects(server, PODS, leaving_pod)
    for name in ("lm", None):
        jobs = [collect.read_snapshot(cluster, "team", name)] if name else []
        (job,) = jobs or collect.read_snapshots(cluster, "team")
        assert isinstance(job, Snapshot) and derive_status(job).state is State.DELETING
        answer = explain_job(job)
        assert answer.situation == "namespace-terminating"
        assert answer.headline == (
            "lm is being deleted with its namespace team: 1 pod still terminating"
        )
    # For users who may not read namespaces, what the server refuses to create says so.
    server.on("GET", "/namespaces/team", *[forbid_namespace] * 20)
    assert collect.read_snapshot(cluster, "team", "lm").ending_namespace is None
    server.on("GET", "/namespaces/team", *[forbid_namespace] * 20)
    server.on("DRY", "configmaps", *[refuse_terminating] * 20)
    answer = explain_job(collect.read_snapshot(cluster, "team", "lm"))
    assert answer.situation == "namespace-terminating"


def refuse_terminating(handler: Handler) -> bool:
    """As a server does in a namespace that is being deleted."""
    message = "unable to create new content in namespace team because it is being terminated"
    causes = [{"reason": "NamespaceTerminating", "field": "metadata.namespace"}]
    status = {"kind": "Status", "code": 403, "reason": "Forbidden", "message": message}
    handler.answer(403, {**status, "details": {"causes": causes}})
    return True


def forbid_namespace(handler: Handler) -> bool:
    """As for a user who may read what is in the namespace, and not the namespace."""
    if is_it := handler.at.endswith("/namespaces/team"):
        handler.fail(403, "Forbidden", "namespaces is forbidden")
    return is_it


def test_nodes_are_read_in_pages_for_pending_pods(server: Server, cluster: Cluster) -> None:
    put_objects(server, JOBSETS, jobset(1))
    put_objects(server, PODS, pending(0, "0/600 nodes are available"))
    for number in range(600):
        server.put(kinds.NODES.path(None, f"node-{number}"), node(f"node-{number}"))
    job = collect.read_snapshot(cluster, "team", "lm")
    assert job.nodes is not None and len(job.nodes) == 600
    assert count_calls(server) <= 8


@pytest.mark.parametrize("part", ["/events", "/nodes", "/apis/batch/"])
def test_forbidden_objects_are_named(server: Server, cluster: Cluster, part: str) -> None:
    put_objects(server, JOBSETS, jobset(1))
    put_objects(server, PODS, pending(0, "0/3 nodes are available: 3 Insufficient cpu."))
    server.on("GET", part, refuse_with(403))
    snapshot_read = explain_job(collect.read_snapshot(cluster, "team", "lm"))
    assert snapshot_read.headline.startswith("lm waits: its host is unschedulable: ")
    assert "could not be read: a fault of the test: 403" in snapshot_read.facts[0]


def test_failing_node_is_called_once(server: Server, cluster: Cluster) -> None:
    put_objects(server, JOBSETS, jobset(1))
    put_objects(server, PODS, pod(0))
    ready = {"status": {"conditions": [objects.condition("Ready")]}}
    server.put(kinds.NODES.path(None, "node-1"), node("node-1") | ready)
    server.on("GET", "/log", *[refuse_with(500)] * 5)
    snapshot_read = explain_job(collect.read_snapshot(cluster, "team", "lm"))
    assert snapshot_read.headline.startswith(
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
def test_unavailable_log_names_kubelet(error: ClusterError, why: str) -> None:
    assert collect.explain_unread(error, "n-1").startswith(why)


def test_node_of_suspect_host_is_read(server: Server, cluster: Cluster) -> None:
    ready = objects.condition("Ready", "Unknown", message="Kubelet stopped posting node status.")
    put_objects(server, JOBSETS, jobset(1))
    put_objects(server, PODS, pod(0))
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
    assert count_calls(server) <= 8


@pytest.mark.parametrize(
    "which", ["the leader's", "another's", "another's, of which nobody may read events"]
)
def test_deleted_node_is_named(server: Server, cluster: Cluster, which: str) -> None:
    """The API server's own words; the pod garbage collector has not come yet."""
    put_objects(server, JOBSETS, jobset(2))
    put_objects(server, PODS, leader := pod(0), pod(1, node="node-2"))
    server.put(kinds.NODES.path(None, "node-1"), node("node-1"))
    missing_job, number = ("node-1", 0) if which == "the leader's" else ("node-2", 1)
    if number:
        write_log(server, leader, objects.beat(stage="gather", missing=[1], missing_count=1))
    else:
        server.drop(kinds.NODES.path(None, "node-1"))
        server.on("GET", "/log", missing_node(missing_job))
    removed = objects.event(
        "Node",
        missing_job,
        "RemovingNode",
        f"Node {missing_job} event: Removing Node {missing_job} from Controller",
    )
    server.put(kinds.EVENTS.path("default", "removed"), removed)
    if "events" in which:
        server.on("GET", "/namespaces/default/events", refuse_with(403))
    job = collect.read_snapshot(cluster, "team", "lm")
    assert isinstance(job, Snapshot)
    snapshot_read = explain_job(dataclasses.replace(job, now=objects.NOW))
    when = "" if "events" in which else " at 11:59:30 UTC (30s ago)"
    assert snapshot_read.headline == (
        f"lm waits: node {missing_job} no longer exists: its object was deleted{when}; host "
        f"{number} is on it"
    )
    assert snapshot_read.next_move is not None and snapshot_read.next_move.endswith(
        f"delete pod lm-w-0-{number}-abcd{number} --force"
    )
    assert (derive_status(job).ready, derive_status(job).phase) == (1, None)


def missing_node(name: str) -> Fault:
    """What the API server says of the log of a pod on a node that is deleted."""

    def fault(handler: Handler) -> bool:
        handler.fail(404, "NotFound", f'pods "{name}" not found')
        return True

    return fault


def test_job_without_label_is_listed(server: Server, cluster: Cluster) -> None:
    disowned = jobset(1)
    del disowned["metadata"]["labels"][JOB_LABEL]
    put_objects(server, JOBSETS, disowned, objects.foreign("theirs"))
    assert [(job.name, job.is_ours) for job in collect.read_snapshots(cluster, "team")] == [
        ("lm", True)
    ]


def test_missing_jobset_api_is_no_missing_job(server: Server, cluster: Cluster) -> None:
    put_objects(server, JOBSETS, jobset(1))
    snapshot_read = collect.read_snapshot(cluster, "team", "ml")
    assert isinstance(snapshot_read, NoSuchJob) and snapshot_read.other_jobs == ("lm",)
    missing_job = missing_path()
    server.on("GET", "/jobsets", *[missing_job] * 3)
    with pytest.raises(ClusterError, match="JobSet .* is not installed"):
        collect.read_snapshot(cluster, "team", "ml")
    with pytest.raises(ClusterError, match="JobSet .* is not installed"):
        collect.read_snapshots(cluster, "team")


def missing_path() -> Fault:
    def fault(handler: Handler) -> bool:
        handler.fail(404, "NotFound", "the server could not find the requested resource")
        return True

    return fault


def test_missing_right_is_no_missing_job(server: Server, cluster: Cluster) -> None:
    server.on("GET", "/jobsets", refuse_with(403))
    with pytest.raises(ApiError):
        collect.read_snapshot(cluster, "team", "lm")


def test_list_separates_namespaces(server: Server, cluster: Cluster) -> None:
    for namespace in ("other", "team"):
        job = jobset(1)
        job["metadata"] |= {"namespace": namespace, "uid": namespace}
        host = pod(0) if namespace == "team" else pending(0)
        host["metadata"] |= {
            "namespace": namespace,
            "labels": {**host["metadata"]["labels"], JOB_LABEL: "lm"},
        }
        server.put(JOBSETS.path(namespace, "lm"), job)
        server.put(PODS.path(namespace, host["metadata"]["name"]), host)
    assert [derive_status(job).state for job in collect.read_snapshots(cluster, "team")] == [
        State.RUNNING
    ]
    assert [derive_status(job).state for job in collect.read_snapshots(cluster, "other")] == [
        State.PENDING
    ]


def test_list_reads_first_logs_only(server: Server, cluster: Cluster) -> None:
    for number in range(20):
        job = jobset(1, name=f"lm-{number}")
        job["metadata"]["uid"] = str(number)
        host = pod(0)
        labels = {
            **host["metadata"]["labels"],
            "jaxlaunch.io/job": "x",
            "jobset.sigs.k8s.io/jobset-name": f"lm-{number}",
        }
        host["metadata"] |= {"name": f"lm-{number}-w-0-0-abcde", "labels": labels}
        put_objects(server, JOBSETS, job)
        put_objects(server, PODS, host)
        write_log(server, host, objects.beat())
    snapshot_read = [derive_status(job).step for job in collect.read_snapshots(cluster, "team")]
    assert snapshot_read == [40] * collect.MAX_LOGS + [None] * (20 - collect.MAX_LOGS)
