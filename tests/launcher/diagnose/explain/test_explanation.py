"""Explanations of jobs, from objects and messages of Kubernetes, Kueue and autoscalers."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.contract import ANNOTATION
from jaxlaunch.launcher.diagnose import text
from jaxlaunch.launcher.diagnose.explain import situations
from jaxlaunch.launcher.diagnose.explain.explanation import MAX_EVIDENCE, diagnose_job, explain_job
from jaxlaunch.launcher.diagnose.explain.situations import SITUATIONS
from jaxlaunch.launcher.jobs.status.snapshot import DeletedNode, NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes.objects import fold_events, trim_event, trim_node
from jaxlaunch.launcher.manifests import nodes
from jaxlaunch.records.log_lines import PastLine, ProgressAnnotation
from jaxlaunch.records.summary import RankMemory
from jaxlaunch.records.verdict import (
    ExceptionFacts,
    Failure,
    FailureKind,
    Numbers,
    RendezvousFacts,
    verdict_for_code,
)
from tests.found import shows
from tests.launcher import objects
from tests.launcher.commands import parse_command
from tests.launcher.diagnose.words import replace_words
from tests.launcher.objects import (
    ago,
    beat,
    cluster_queue,
    condition,
    ended,
    event,
    farewell,
    job_object,
    jobset,
    judged,
    local_queue,
    node,
    over,
    past,
    pending,
    pod,
    snapshot,
    waiting,
    workload,
)

ROOT = Path(__file__).parents[4]
QUEUED = {"queue": "research", "suspend": True}
EXCESS = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. "
NOTHING_FITS = (
    "0/3 nodes are available: 1 Insufficient cpu, 2 node(s) had untolerated taint(s). "
    "preemption: no."
)


SPARE = jobset(3, spares=1)
ELASTIC = jobset(
    {"min": 2, "max": 3},  # type: ignore[arg-type]
    command=None,
    train={
        "task": "classify",
        "model": {"kind": "mlp"},
        "data": {"source": "synthetic"},
        "mesh": {"dp": -1},
        "batch": 12,
        "steps": 90,
    },
)


CLAIMS = [{"claim": "ckpt", "path": "/ckpt"}, {"claim": "data", "path": "/data"}]


def with_metadata(obj: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return obj | {"metadata": obj["metadata"] | fields}


def pod_event(reason: str, message: str, **fields: Any) -> dict[str, Any]:
    return event("Pod", "lm-w-0-0-abcd0", reason, message, **fields)


def job_event(reason: str, message: str, **fields: Any) -> dict[str, Any]:
    return event("Job", "lm-w-0", reason, message, **fields)


def jobset_event(reason: str, message: str, **fields: Any) -> dict[str, Any]:
    return event("JobSet", "lm", reason, message, **fields)


def make_later_pod(later_pod: dict[str, Any]) -> dict[str, Any]:
    """A pod that was made after the others."""
    later_pod["metadata"]["creationTimestamp"] = ago(seconds=9)
    return later_pod


def make_waiting_workload(
    message: str, *more: dict[str, Any], reason: str = "Pending"
) -> dict[str, Any]:
    return workload(condition("QuotaReserved", "False", reason, message), *more)


def reject_pods(message: str) -> Snapshot:
    """Pods that the API server does not take."""
    text = f'Error creating: pods "lm-w-0-0-x7k2p" is forbidden: {message}'
    return snapshot(jobset(2), events=(job_event("FailedCreate", text, count=7),))


def make_evicted_pod(host: int, code: int, message: str) -> dict[str, Any]:
    """A pod that the kubelet evicted for its own excess."""
    evicted_pod = over(host, code)
    return evicted_pod | {
        "status": evicted_pod["status"]
        | {"phase": "Failed", "reason": "Evicted", "message": message}
    }


LOW = (
    "The node was low on resource: memory. Threshold quantity: 100Mi, available: 52104Ki. "
    "Container main was using 1803264Ki, request is 128Mi, has larger consumption of memory. "
)
ENDING = {
    "metadata": {"name": "team", "deletionTimestamp": ago(minutes=2)},
    "status": {
        "phase": "Terminating",
        "conditions": [
            condition(
                "NamespaceDeletionContentFailure", "False", "ContentDeleted", "All content deleted"
            ),
            condition(
                "NamespaceContentRemaining",
                reason="SomeResourcesRemain",
                message="pods. has 1 resource instances",
            ),
            condition("NamespaceFinalizersRemaining", message="a.io/b in 1 resource instances"),
        ],
    },
}


def make_unscheduled(
    message: str, *nodes: dict[str, Any], events: tuple[dict[str, Any], ...] = (), **job: Any
) -> Snapshot:
    return snapshot(jobset(1, **job), pending(0, message), nodes=nodes, events=events)


def add_progress(job: dict[str, Any], when: str = "stopped", **numbers: Any) -> dict[str, Any]:
    """The JobSet, with how far its job was seven minutes ago."""
    at = (objects.NOW - timedelta(minutes=7)).timestamp()
    text = ProgressAnnotation("1234", at, when, 3, 0, **numbers).to_json()
    metadata = job["metadata"]
    return job | {
        "metadata": {**metadata, "annotations": {**metadata["annotations"], ANNOTATION: text}}
    }


def fail_hook(code: int, message: str = "") -> Snapshot:
    """A job whose postStart hook failed, and how its container ended then."""
    hook = pod_event("FailedPostStartHook", "PostStartHook failed")
    return snapshot(
        jobset(1, status=ended("Failed", "FailedJobs")),
        over(0, code, message=message),
        events=(hook,),
    )


def make_new(job: dict[str, Any], seconds: int = 2) -> dict[str, Any]:
    """The JobSet, created just now, or so many seconds ago."""
    return with_metadata(job, creationTimestamp=ago(seconds=seconds))


UNSEEN = jobset_event(
    "JobCreationFailed",
    'job "lm-w-0" creation failed with error: admission webhook "mjob.kb.io" denied the request: '
    'JobSet.jobset.x-k8s.io "lm" not found',
    last=ago(seconds=1),
)


def container_status(name: str, code: int | None = None, reason: str = "Error") -> dict[str, Any]:
    """The status of a container next to the main one, which runs or has ended."""
    end = {"exitCode": code, "reason": reason}
    return {
        "name": name,
        "state": {"running": {"startedAt": ago(minutes=5)}}
        if code is None
        else {"terminated": end},
    }


def limit_memory(kind: str, name: str, memory: str, **more: Any) -> dict[str, Any]:
    return {kind: [{"name": name, "resources": {"limits": {"memory": memory}}, **more}]}


def silent_node(name: str = "node-1", status: str = "Unknown") -> dict[str, Any]:
    ready = condition(
        "Ready",
        status,
        "NodeStatusUnknown",
        "Kubelet stopped posting node status.",
        lastTransitionTime=ago(minutes=3),
    )
    return {"metadata": {"name": name}, "status": {"conditions": [ready]}}


def make_unhealthy_node(taint: str, kind: str, status: str, message: str) -> dict[str, Any]:
    """Return a node with a condition that indicates a problem, and the taint for it."""
    other_conditions = [
        condition(other_kind, "False", message="is as it should be")
        for other_kind in ("PIDPressure", "MemoryPressure")
    ]
    unhealthy_node = node(taints=(f"{taint}:NoSchedule",))
    unhealthy_node["status"]["conditions"] = [
        *other_conditions,
        condition(kind, status, message=message),
    ]
    return trim_node(unhealthy_node)


NO_NETWORK = (  # as a kubelet with containerd says it
    "container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady "
    "message:Network plugin returns error: cni plugin not initialized"
)


def make_leaving_pod(host: int, minutes: int = 2, **parts: Any) -> dict[str, Any]:
    """A pod that should have ended so long ago, with the finalizer that every pod of a Job has."""
    leaving_pod = pod(host, **parts)
    finalizers = ["batch.kubernetes.io/job-tracking"]
    return with_metadata(leaving_pod, deletionTimestamp=ago(minutes=minutes), finalizers=finalizers)


DONE_LONG_AGO = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": ago(minutes=2)}}
ENDED_WITH_4 = {"terminated": {"exitCode": 4, "reason": "Error"}}
TAINTED_OUT = [
    condition(
        "DisruptionTarget", reason="DeletionByTaintManager", message="Taint manager: deleting"
    )
]
CUT_OFF = [*TAINTED_OUT, condition("Ready", "False")]
NODE_NOT_READY = pod_event("NodeNotReady", "Node is not ready")
CLAIM = (
    'PodResourceClaim imex: resource claim template "t": resourceclaimtemplate.resource.k8s.io '
    '"t" not found'
)


NOT_JOINED = Failure(
    FailureKind.NOT_JOINED,
    rendezvous=RendezvousFacts(Numbers((0, 1), 2), waited_s=5.0, timeout="timeouts.gather"),
)
CANNOT_JOIN = Failure(
    FailureKind.CANNOT_JOIN,
    detail="name not resolved",
    rendezvous=RendezvousFacts(address="lm-w-0-0.lm:9401"),
)


FAILED = jobset(1, status=ended("Failed"))
FAILED_JOBS = jobset(1, status=ended("Failed", "FailedJobs"))
QUEUED_JOB = jobset(1, **QUEUED)
RESTARTED = jobset(1, status={"restarts": 1})
HOST_1_LOST = (past(81), beat(stage="gather", missing=[1]))


def make_case(
    headline: str, *pods: dict[str, Any], job: dict[str, Any] | None = None, **parts: Any
) -> tuple[Snapshot, str]:
    """Return a job in some situation, by default with one host, and the pattern of its headline."""
    return snapshot(jobset(1) if job is None else job, *pods, **parts), headline


CASES: dict[str, tuple[Snapshot, str]] = {
    # --- the end ----------------------------------------------------------------------------------
    "done": make_case("^lm is done, in 5m$", over(0, 0), job=jobset(1, status=ended("Completed"))),
    "done with steps": make_case(
        "^lm is done: all of 2 hosts, step 300, in 5m$",
        over(0, 0),
        over(1, 0),
        job=jobset(2, status=ended("Completed")),
        records=(beat(step=300),),
    ),
    "failed with a verdict": make_case(
        r"^lm failed: bad_spec \(exit 64\): train.lr is negative$",
        over(0, 64, message=farewell(64, "train.lr is negative")),
        job=jobset(1, status=ended("Failed", "FailJobSetFailurePolicyAction")),
    ),
    "failed, and held for a look": make_case(
        r"^lm failed: crash \(exit 83\): rank 1 raised: X; it is held until 12:30 UTC$",
        pod(0),
        records=(
            judged(83, "rank 1 raised: X"),
            beat(stage="hold", held_until=(objects.NOW + timedelta(minutes=30)).timestamp()),
        ),
    ),
    "given up after restarts": make_case(
        r"^lm failed after 5 restarts: crash \(exit 83\): rank 0 raised: X$",
        over(0, 83, message=farewell(83, "rank 0 raised: X"), generation=5),
        job=jobset(
            1, status=ended("Failed", "ReachedMaxRestarts", restarts=5, restartsCountTowardsMax=5)
        ),
    ),
    "failed without a word": make_case(
        r"^lm failed: host 0 \(pod lm-w-0-0-abcd0\) ended with exit code 42 \(Error\)$",
        over(0, 42),
        job=FAILED,
    ),
    "failed and its pods are gone": make_case(
        "^lm failed: jobset failed; no pod is left that could say why$",
        job=jobset(1, status=ended("Failed", "FailedJobs", "jobset failed")),
    ),
    "killed, and nobody says by whom": make_case(
        r"was killed by SIGKILL \(exit 137\), probably out of memory; its memory limit is 4Gi$",
        over(0, 137),
        job=jobset(1, status=ended("Failed"), resources={"memory": "4Gi"}),
    ),
    "killed for its liveness probe": make_case(
        r"^lm failed: host 0 \(pod lm-w-0-0-abcd0\) was killed by SIGKILL \(exit 137\): its "
        r"liveness probe fails$",
        over(0, 137),
        job=jobset(1, status=ended("Failed"), resources={"memory": "4Gi"}),
        events=(pod_event("Unhealthy", "Liveness probe failed: "),),
    ),
    "killed for its liveness probe, while another one fails": make_case(
        "liveness probe fails$",
        over(0, 137),
        job=jobset(1, status=ended("Failed"), resources={"memory": "4Gi"}),
        events=(
            pod_event("Unhealthy", "Liveness probe failed: ", last=ago(seconds=40)),
            pod_event("Unhealthy", "Readiness probe failed: ", last=ago(seconds=20)),
            event(
                "Pod", "lm-w-0-0-zzzzz", "Unhealthy", "Startup probe failed", last=ago(seconds=9)
            ),
        ),
    ),
    "killed for memory, whole": make_case(
        "^lm failed: its host was OOMKilled; its memory limit is 4Gi$",
        over(0, 137, "OOMKilled"),
        job=jobset(1, status=ended("Failed"), resources={"memory": "4Gi"}),
    ),
    "killed for memory, one process": make_case(
        "^lm failed: rank 1 was OOMKilled at step 7; its memory limit is 4Gi$",
        over(0, 137, message=farewell(137, "killed", rank=1, step=7)),
        over(1, 137, "OOMKilled", message=farewell(137, "killed", rank=1, step=7)),
        job=jobset(2, status=ended("Failed"), resources={"memory": "4Gi"}),
    ),
    "deadline": make_case(
        "^lm failed: its deadline of 120m was exceeded$",
        job=FAILED,
        jobs=(
            job_object(
                "lm-w-0", condition("Failed", reason="DeadlineExceeded"), activeDeadlineSeconds=7200
            ),
        ),
    ),
    "deadline of all generations": make_case(
        "^lm failed: the job's deadline of 90 s passed: saved at step 37$",
        over(0, 77, message=farewell(77, "the job's deadline of 90 s passed: saved at step 37")),
        job=FAILED,
    ),
    "deleting": make_case(
        "^lm is being deleted: 1 pod still terminating$",
        pod(0, is_leaving=True),
        job=with_metadata(jobset(1), deletionTimestamp=ago(seconds=3)),
    ),
    "its namespace goes, and its Job keeps the pods": make_case(
        "^lm is being deleted with its namespace team, but is blocked: its Job keeps 2 pods that "
        "ended, since ",
        *(over(host, 137, is_leaving=True) for host in range(2)),
        job=jobset(2),
        ending_namespace=ENDING,
    ),
    "its namespace goes, and its Job has kept a pod for minutes": make_case(
        "^lm is being deleted with its namespace team, but is blocked: its Job keeps 1 pod that "
        "ended, since ",
        make_leaving_pod(0, phase="Failed"),
        job=jobset(1),
        ending_namespace=ENDING,
    ),
    "stopped": make_case(
        "^lm is stopped; step 120 is saved$",
        over(0, 80, message=farewell(80)),
        job=jobset(1, suspend=True),
        records=(beat(committed=120),),
    ),
    "stopped, and its pods are gone": make_case(
        "^lm is stopped; step 37 is saved$",
        job=add_progress(jobset(1, suspend=True), step=40, committed=37),
    ),
    "stopped without a checkpoint, and its pods are gone": make_case(
        "^lm is stopped; stopped by SIGTERM: nothing was saved$",
        job=add_progress(
            jobset(1, suspend=True),
            verdict=verdict_for_code(80, "stopped by SIGTERM: nothing was saved"),
        ),
    ),
    "failed, its pods are gone, and how it ended is on record": make_case(
        r"^lm failed: hang \(exit 82\): rank 1 hangs$",
        job=add_progress(FAILED, "ended", verdict=verdict_for_code(82, "rank 1 hangs")),
    ),
    "failed after it was stopped and resumed, and its pods are gone": make_case(
        "^lm failed: (?!.*saved at step 40)",
        job=add_progress(FAILED, verdict=verdict_for_code(80, "saved at step 40")),
    ),
    "done with steps, and its pods are gone": make_case(
        "^lm is done, step 300, in 5m$",
        job=add_progress(jobset(1, status=ended("Completed")), "ended", step=300),
    ),
    "stopping": make_case(
        "^lm is stopping: 1 pod still saving$", pod(0), job=jobset(1, suspend=True)
    ),
    "stopped in its queue": make_case(
        "^lm is stopped$", job=QUEUED_JOB, workload=workload(active=False)
    ),
    "put back into its queue after a while": make_case(
        r"^lm was evicted because its pods were not ready in time \(PodsReadyTimeout\), 2 times by "
        r"now; Kueue puts it back into queue research in 90s$",
        job=QUEUED_JOB,
        workload=workload(
            condition(
                "Evicted",
                reason="PodsReadyTimeout",
                message="Exceeded the PodsReady timeout team/lm",
            ),
            requeueState={
                "count": 2,
                "requeueAt": (objects.NOW + timedelta(seconds=90)).isoformat(),
            },
        ),
        local_queue=local_queue(),
    ),
    "given up by its queue": make_case(
        "^lm was deactivated by Kueue",
        job=QUEUED_JOB,
        workload=workload(
            condition("Evicted", reason="DeactivatedDueToRequeuingLimitExceeded"), active=False
        ),
    ),
    # --- the queue --------------------------------------------------------------------------------
    "quota": make_case(
        r"^lm waits: queue research \(ClusterQueue shared\) is full: 200m more cpu is needed in "
        r"flavor h100; 7800m of 8 is used$",
        job=QUEUED_JOB,
        workload=make_waiting_workload(
            "couldn't assign flavors to pod set w: "
            "insufficient unused quota for cpu in flavor h100, 200m more needed"
        ),
        local_queue=local_queue(),
        cluster_queue=cluster_queue("8", "7800m"),
    ),
    "quota, and no right to see the queue": make_case(
        "^lm waits: queue research is full: 200m more cpu is needed in flavor h100$",
        job=QUEUED_JOB,
        workload=make_waiting_workload(
            "insufficient unused quota for cpu in flavor h100, 200m more needed"
        ),
    ),
    "quota that is never enough": make_case(
        "^lm waits: queue research can never admit it: it requests 1800m cpu, flavor real has "
        "1 in total$",
        job=QUEUED_JOB,
        workload=make_waiting_workload(
            "couldn't assign flavors to pod set w: "
            "insufficient quota for cpu in flavor real, previously considered "
            "podsets requests (0) + current podset request (1800m) > maximum capacity (1)"
        ),
    ),
    "quota that is not there": make_case(
        "^lm waits: queue research does not cover nvidia.com/gpu$",
        job=QUEUED_JOB,
        workload=make_waiting_workload(
            "couldn't assign flavors to pod set w: resource nvidia.com/gpu unavailable in "
            "ClusterQueue"
        ),
    ),
    "no such queue": make_case(
        "^lm waits: LocalQueue research does not exist$",
        job=QUEUED_JOB,
        workload=make_waiting_workload("LocalQueue research doesn't exist", reason="Inadmissible"),
    ),
    "no such cluster queue": make_case(
        "^lm waits: ClusterQueue shared does not exist$",
        job=QUEUED_JOB,
        workload=make_waiting_workload("ClusterQueue shared doesn't exist", reason="Inadmissible"),
    ),
    "stopped cluster queue": make_case(
        r"^lm waits: ClusterQueue shared is stopped \(stopPolicy: Hold\)$",
        job=QUEUED_JOB,
        workload=make_waiting_workload("ClusterQueue shared is inactive", reason="Inadmissible"),
        local_queue=local_queue(active=False, reason="ClusterQueueIsInactive"),
        cluster_queue=cluster_queue(active=False, stopPolicy="Hold"),
    ),
    "broken cluster queue": make_case(
        "^lm waits: ClusterQueue shared is inactive: FlavorNotFound$",
        job=QUEUED_JOB,
        workload=make_waiting_workload("ClusterQueue shared is inactive", reason="Inadmissible"),
        local_queue=local_queue(active=False, reason="ClusterQueueIsInactive"),
        cluster_queue=cluster_queue(
            active=False, message="references missing ResourceFlavor(s): h100."
        ),
    ),
    "stopped queue that may not be job": make_case(
        "^lm waits: LocalQueue research is stopped$",
        job=QUEUED_JOB,
        workload=make_waiting_workload("LocalQueue research is stopped", reason="Inadmissible"),
    ),
    "preempted, still saving": make_case(
        "^lm was preempted by another job; 1 pod still saving$",
        pod(0, is_leaving=True),
        job=QUEUED_JOB,
        workload=make_waiting_workload(
            "Preempted", condition("Evicted", reason="Preempted", message="to make room")
        ),
    ),
    "preempted, waits again": make_case(
        "^lm was preempted by another job and waits: queue research is full: 4 more cpu is needed "
        "in flavor h100$",
        job=QUEUED_JOB,
        workload=make_waiting_workload(
            "insufficient unused quota for cpu in flavor h100, 4 more needed",
            condition("Evicted", reason="Preempted"),
        ),
    ),
    "an admission check": make_case(
        "^lm waits: quota is reserved in queue research, but admission check nodes has not "
        "passed: Prov",
        job=QUEUED_JOB,
        workload=workload(
            condition("QuotaReserved"),
            admissionChecks=[
                {
                    "name": "nodes",
                    "state": "Pending",
                    "message": "Provisioning Request wasn't accepted",
                }
            ],
        ),
    ),
    "admitted": make_case(
        "^lm is admitted by queue research and about to start$",
        job=QUEUED_JOB,
        workload=workload(condition("QuotaReserved", "True")),
    ),
    "not taken by Kueue": make_case(
        "^lm is suspended, and Kueue has created no Workload for it in queue research$",
        job=QUEUED_JOB,
        jobs=(),
    ),
    # --- Jobs and pods that are refused -----------------------------------------------------------
    "webhook down before the Jobs": make_case(
        r"^lm has no Jobs: webhook mjob.kb.io \(kueue-webhook in kueue-system\) does not answer: "
        r"connection refused$",
        jobs=(),
        events=(
            jobset_event(
                "JobCreationFailed",
                'job "lm-w-0" creation failed with error: Internal error occurred: failed '
                "calling webhook "
                '"mjob.kb.io": failed to call webhook: Post '
                '"https://kueue-webhook.kueue-system.svc:443/x": '
                "dial tcp 10.0.0.1:443: connect: connection refused",
            ),
        ),
    ),
    "webhook down before an earlier attempt": make_case(
        "^lm (?!has no Jobs)",
        make_later_pod(over(0, 1)),
        jobs=(),
        events=(
            jobset_event(
                "JobCreationFailed",
                'failed calling webhook "mjob.kb.io": connection refused',
                last=ago(minutes=5),
            ),
        ),
    ),
    "a webhook that has not seen a new JobSet": make_case(
        "^lm is being created: ", job=make_new(jobset(1)), jobs=(), events=(UNSEEN,)
    ),
    "a webhook that had not seen a JobSet when the controller tried last": make_case(
        "^lm is being created: ",
        job=make_new(jobset(1), seconds=60),
        jobs=(),
        events=(UNSEEN,),
    ),
    "a webhook that does not see a JobSet": make_case(
        "^lm has no Jobs: webhook mjob.kb.io denied the request: JobSet.jobset.x-k8s.io "
        '"lm" not found$',
        jobs=(),
        events=(UNSEEN,),
    ),
    "webhook without a server": (
        reject_pods(
            'failed calling webhook "mpod.kb.io": failed to call webhook: no endpoints available '
            'for service "jobset"'
        ),
        "^lm waits: 2 of 2 pods are rejected: webhook mpod.kb.io does not answer: no endpoints "
        "available for service",
    ),
    "unattended": make_case(
        "^lm has no Jobs 10m after it was created: the JobSet controller", jobs=()
    ),
    "exceeded quota": (
        reject_pods(
            "exceeded quota: few, requested: pods=1,requests.cpu=4, used: pods=5,requests.cpu=9, "
            "limited: pods=5"
        ),
        "rejected: ResourceQuota few is exceeded: requested pods=1,requests.cpu=4, used "
        "pods=5,requests.cpu=9, limited",
    ),
    "quota that wants limits": (
        reject_pods("failed quota: strict: must specify limits.cpu for: main"),
        "rejected: ResourceQuota strict requires every pod to specify limits.cpu for: main$",
    ),
    "Pod Security": (
        reject_pods(
            'violates PodSecurity "restricted:latest": runAsNonRoot != true (pod must not set it)'
        ),
        'rejected: the namespace enforces Pod Security "restricted:latest": runAsNonRoot != true',
    ),
    "a policy": (
        reject_pods(
            "ValidatingAdmissionPolicy 'billing' with binding 'all' denied request: say who pays"
        ),
        "rejected: ValidatingAdmissionPolicy billing denied the request: say who pays$",
    ),
    "a webhook's no": make_case(
        "rejected: webhook pods.corp denied the request: no team label$",
        job=jobset(2),
        events=(
            job_event(
                "FailedCreate", 'admission webhook "pods.corp" denied the request: no team label'
            ),
        ),
    ),
    "a webhook's no before the pods were made": make_case(
        "^lm (?!.*rejected)",
        make_later_pod(pod(0)),
        job=jobset(2),
        events=(
            job_event(
                "FailedCreate",
                'admission webhook "pods.corp" denied the request: no team label',
                last=ago(minutes=5),
            ),
        ),
    ),
    "followers of an exclusive placement": make_case(
        "^lm waits: 1 of 2 pods are rejected: exclusive placement: the pods of a slice wait",
        pod(0, node="node-1"),
        job=jobset(2),
        events=(
            job_event(
                "FailedCreate",
                'admission webhook "vpod.kb.io" denied the request: follower pod node '
                "selector not set",
            ),
        ),
    ),
    "no service account": (
        reject_pods(
            'error looking up service account team/robot: serviceaccount "robot" not found'
        ),
        "rejected: service account robot does not exist$",
    ),
    "no priority class": (
        reject_pods("no PriorityClass with name urgent was found"),
        "rejected: PriorityClass urgent does not exist$",
    ),
    "no runtime class": (
        reject_pods('pod rejected: RuntimeClass "kata" not found'),
        "rejected: RuntimeClass kata does not exist$",
    ),
    "a limit range": (
        reject_pods("maximum memory usage per Container is 64Gi, but limit is 128Gi"),
        "a LimitRange of the namespace forbids it: maximum memory usage per Container is 64Gi, but "
        "limit is 128Gi$",
    ),
    "refused by what nobody knows": (
        reject_pods("the moon is full"),
        "rejected: .*the moon is full$",
    ),
    # --- nodes ------------------------------------------------------------------------------------
    "no node is large enough": (
        make_unscheduled(
            NOTHING_FITS,
            node(cpu="8"),
            node("big", taints=("gpu=yes:NoSchedule",), cpu="64"),
            resources={"cpu": 32},
        ),
        "^lm waits: its host is unschedulable: each host requests 32 cpu, the largest node has 8$",
    ),
    "nodes are taken": (
        make_unscheduled(
            "0/2 nodes are available: 2 Insufficient cpu.", node(), node("b"), resources={"cpu": 4}
        ),
        "^lm waits: its host is unschedulable: insufficient free cpu; 2 nodes would fit a host "
        "when empty$",
    ),
    "no device": (
        make_unscheduled(
            "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
            node(),
            pod={
                "spec": {
                    "containers": [
                        {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "8"}}}
                    ]
                }
            },
        ),
        "^lm waits: its host is unschedulable: each host requests 8 nvidia.com/gpu, the largest "
        "node has 0$",
    ),
    "tainted": (
        make_unscheduled(
            NOTHING_FITS,
            node(taints=("team=b:NoSchedule",)),
            node("b", taints=("team=b:NoSchedule", "x:NoExecute")),
        ),
        "^lm waits: its host is unschedulable: untolerated taint team=b:NoSchedule .and 1 more. on "
        "2 of 2 nodes$",
    ),
    "cordoned": (
        make_unscheduled("", node(taints=("node.kubernetes.io/unschedulable:NoSchedule",))),
        "untolerated taint node.kubernetes.io/unschedulable:NoSchedule on 1 of 1 node$",
    ),
    "a node whose network plugin has no configuration": (
        make_unscheduled(
            "", make_unhealthy_node("node.kubernetes.io/not-ready", "Ready", "False", NO_NETWORK)
        ),
        "^lm waits: its host is unschedulable: untolerated taint "
        f"node.kubernetes.io/not-ready:NoSchedule on 1 of 1 node: node-1: {NO_NETWORK}$",
    ),
    "a node whose disk is full": (
        make_unscheduled(
            "",
            make_unhealthy_node(
                "node.kubernetes.io/disk-pressure",
                "DiskPressure",
                "True",
                "kubelet has disk pressure",
            ),
        ),
        "disk-pressure:NoSchedule on 1 of 1 node: node-1: kubelet has disk pressure$",
    ),
    "a label that no node has": (
        make_unscheduled("", node(labels={"disk": "hdd"}), node_selector={"disk": "ssd"}),
        "^lm waits: its host is unschedulable: no node has label disk=ssd; nodes have disk=hdd$",
    ),
    "labels that no node has together": (
        make_unscheduled(
            "",
            node(labels={"a": "1"}),
            node("b", labels={"b": "1"}),
            node_selector={"a": "1", "b": "1"},
        ),
        "no node has all of the labels a=1, b=1$",
    ),
    "no nodes": (
        make_unscheduled("no nodes available to schedule pods"),
        "^lm waits: its host is unschedulable: the cluster has no",
    ),
    "nodes that may not be job": make_case(
        "^lm waits: its host is unschedulable: 0/3 nodes are available: 1 Insufficient cpu, 2 node",
        pending(0, NOTHING_FITS),
        nodes=None,
    ),
    "ports": (
        make_unscheduled(
            "0/1 nodes are available: 1 node(s) didn't have free ports for the "
            "requested pod ports.",
            node(),
        ),
        "didn't have free ports for the requested pod ports.; 1 node would fit a host when empty$",
    ),
    "new nodes are coming": (
        make_unscheduled(
            NOTHING_FITS,
            node(),
            events=(
                pod_event("TriggeredScaleUp", "pod triggered scale-up: [{pool-1 0->1 (max: 4)}]"),
            ),
        ),
        r"^lm waits for the autoscaler to add nodes: its host is pending; pod triggered scale-up: "
        r"\[\{pool-1 0->1",
    ),
    "new nodes came for pods of an earlier attempt": (
        make_unscheduled(
            "0/2 nodes are available: 2 Insufficient cpu.",
            node(),
            events=(
                event("Pod", "lm-w-0-0-zzzzz", "TriggeredScaleUp", "pod triggered scale-up"),
                event("Pod", "lm-w-0-0-zzzzz", "FailedScheduling", "no type", by="karpenter"),
            ),
            resources={"cpu": 4},
        ),
        "^lm waits: its host is unschedulable: insufficient free cpu; 1 node would fit a host "
        "when empty$",
    ),
    "new nodes came for many pods of an earlier attempt": (
        snapshot(
            jobset(1, resources={"cpu": 4}),
            make_later_pod(pending(0, "0/2 nodes are available: 2 Insufficient cpu.")),
            nodes=(node(),),
            events=tuple(
                event(
                    "Pod",
                    f"lm-w-0-{host}-zzzzz",
                    "TriggeredScaleUp",
                    "pod triggered scale-up",
                    last=ago(minutes=5),
                )
                for host in range(9)
            ),
        ),
        "^lm waits: its host is unschedulable: insufficient free cpu",
    ),
    "no new nodes can come": (
        make_unscheduled(
            NOTHING_FITS,
            node(cpu="8"),
            events=(
                pod_event("TriggeredScaleUp", "pod triggered scale-up", last=ago(minutes=5)),
                pod_event(
                    "NotTriggerScaleUp",
                    "pod didn't trigger scale-up: 1 max node group size reached",
                ),
            ),
            resources={"cpu": 32},
        ),
        "32 cpu, .*; the autoscaler adds no node: pod didn't trigger scale-up: 1 max node group "
        "size reached$",
    ),
    "Karpenter cannot": (
        make_unscheduled(
            NOTHING_FITS,
            node(),
            events=(
                pod_event(
                    "FailedScheduling", "no instance type satisfied resources", by="karpenter"
                ),
            ),
            resources={"cpu": 32},
        ),
        "; the autoscaler adds no node: no instance type satisfied resources$",
    ),
    "some hosts wait": make_case(
        "^lm waits: hosts 1 and 3 are unschedulable: insufficient free cpu",
        pod(0),
        pending(1, "0/1 nodes are available: 1 Insufficient cpu."),
        pod(2),
        pending(3),
        job=jobset(4),
        nodes=(node(),),
    ),
    "a gate": make_case(
        "^lm waits: its host cannot be scheduled yet",
        pending(0, "waiting for gates", "SchedulingGated"),
    ),
    "no claim": (
        make_unscheduled(
            '0/1 nodes are available: persistentvolumeclaim "ckpt" not found.', node()
        ),
        "^lm waits: PersistentVolumeClaim ckpt does not exist$",
    ),
    "an unbound claim": (
        make_unscheduled(
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            node(),
            events=(
                event(
                    "PersistentVolumeClaim",
                    "ckpt",
                    "ProvisioningFailed",
                    'storageclass "fast" not found',
                ),
            ),
            volumes=[{"claim": "ckpt", "path": "/ckpt"}],
        ),
        '^lm waits: PersistentVolumeClaim ckpt is not bound: storageclass "fast" not found$',
    ),
    "unbound claims": (
        make_unscheduled(
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            node(),
            events=tuple(
                event("PersistentVolumeClaim", claim, "FailedBinding", "no storage class is set")
                for claim in ("ckpt", "data")
            ),
            volumes=CLAIMS,
        ),
        "^lm waits: PersistentVolumeClaims ckpt and data are not bound: no storage class is set$",
    ),
    "unbound claims without events": (
        make_unscheduled(
            "0/1 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            node(),
            volumes=CLAIMS,
        ),
        "^lm waits: one of the PersistentVolumeClaims ckpt and data is not bound$",
    ),
    "a claim of one pod": (
        make_unscheduled(
            "0/1 nodes are available: 1 node has pod using PersistentVolumeClaim with the same "
            "name and ReadWriteOncePod access mode.",
            node(),
            volumes=CLAIMS,
        ),
        "^lm waits: one of the PersistentVolumeClaims ckpt and data is ReadWriteOncePod, and "
        "another pod uses it$",
    ),
    "a volume elsewhere": (
        make_unscheduled(
            "0/2 nodes are available: 2 node(s) didn't match PersistentVolume's node affinity.",
            node(),
        ),
        "^lm waits: its host is unschedulable: volume node affinity conflict",
    ),
    # --- images -----------------------------------------------------------------------------------
    "no image": make_case(
        "^lm waits: host 0 cannot pull image registry.example/train:1: the image does not exist$",
        waiting(0, "ImagePullBackOff", 'Back-off pulling image "registry.example/train:1"'),
        pod(1),
        job=jobset(2),
        events=(pod_event("Failed", "Failed to pull image: code = NotFound: train:1: not found"),),
    ),
    "no image, and a newer event that only repeats it": make_case(
        "^lm waits: its host cannot pull image registry.example/train:1: the image does not exist$",
        waiting(0, "ImagePullBackOff", "Back-off pulling image"),
        events=(
            pod_event("Failed", "Failed to pull image: manifest unknown", last=ago(seconds=40)),
            pod_event("Failed", "Error: ErrImagePull", last=ago(seconds=40)),
            pod_event("Failed", "Error: ImagePullBackOff", last=ago(seconds=5)),
        ),
    ),
    "no pull secrets": make_case(
        "cannot pull image registry.example/train:1: Secrets mine and yours of "
        "image_pull_secrets do not exist$",
        waiting(0, "ImagePullBackOff", "Back-off pulling image"),
        events=(
            pod_event(
                "FailedToRetrieveImagePullSecret",
                "Unable to retrieve some image pull secrets (mine, yours); attempting to pull the "
                "image may not succeed.",
            ),
        ),
    ),
    "no right to the image": make_case(
        "the registry requires credentials, or the image does not exist$",
        waiting(0, "ErrImagePull", "pull access denied, authorization failed: 403 Forbidden"),
    ),
    "no registry": make_case(
        "the node cannot reach the registry$",
        waiting(0, "ErrImagePull", "dial tcp: lookup registry.example: no such host"),
    ),
    "a limited registry": make_case(
        "the registry's rate limit is reached$",
        waiting(0, "ErrImagePull", "429 Too Many Requests: toomanyrequests"),
    ),
    "no image's name": make_case(
        "that is not a valid image name$", waiting(0, "InvalidImageName", "x")
    ),
    "an image that may not be pulled": make_case(
        "imagePullPolicy is Never$", waiting(0, "ErrImageNeverPull", "x")
    ),
    # --- containers -------------------------------------------------------------------------------
    "no secret": make_case(
        "^lm waits: its host cannot start: Secret token does not exist$",
        waiting(0, "CreateContainerConfigError", 'secret "token" not found'),
    ),
    "no key in a secret": make_case(
        "Secret token has no key t$",
        waiting(0, "CreateContainerConfigError", "couldn't find key t in Secret team/token"),
    ),
    "no config map": make_case(
        "ConfigMap settings does not exist$",
        waiting(0, "CreateContainerConfigError", 'configmap "settings" not found'),
    ),
    "root": make_case(
        "runs as root, and the pod has runAsNonRoot$",
        waiting(
            0, "CreateContainerConfigError", "container has runAsNonRoot and image will run as root"
        ),
    ),
    "a volume of a secret that is not there": make_case(
        "^lm waits: its host cannot start: Secret s does not exist$",
        waiting(0, "ContainerCreating"),
        events=(
            pod_event(
                "FailedMount", 'MountVolume.SetUp failed for volume "s" : secret "s" not found'
            ),
        ),
    ),
    "a volume that cannot be mounted": make_case(
        "^lm waits: its host cannot mount a volume: Multi-Attach error for volume pvc-1$",
        waiting(0, "ContainerCreating"),
        events=(pod_event("FailedAttachVolume", "Multi-Attach error for volume pvc-1"),),
    ),
    "a node's network": make_case(
        "^lm waits: the node cannot create the pod sandbox of its host: cni plugin not "
        "initialized$",
        waiting(0, "ContainerCreating"),
        events=(pod_event("FailedCreatePodSandBox", "cni plugin not initialized"),),
    ),
    "no such command": make_case(
        "^lm cannot start on host 0: command python: executable file not found in",
        over(0, 128, "StartError", 'exec: "python": executable file not found in $PATH: unknown'),
        pod(1),
        job=jobset(2),
    ),
    "an image without the agent": make_case(
        "^lm cannot start on its host: image \\S+ does not contain jaxlaunch$",
        over(
            0,
            1,
            "Error",
            "/bin/python: Error while finding … (ModuleNotFoundError: No module named 'jaxlaunch')",
        ),
    ),
    "an init container": make_case(
        "^lm cannot start on its host: init container fetch ended with exit code 3$",
        pod(
            0,
            state={"waiting": {"reason": "PodInitializing"}},
            initContainerStatuses=[
                {"name": "fetch", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}
            ],
        ),
    ),
    "a sidecar that fails again and again": make_case(
        "^lm cannot start on its host: init container proxy ended with exit code 3$",
        pod(
            0,
            state={"waiting": {"reason": "PodInitializing"}},
            initContainerStatuses=[
                {
                    "name": "proxy",
                    "state": {
                        "waiting": {
                            "reason": "CrashLoopBackOff",
                            "message": "back-off 10s restarting",
                        }
                    },
                    "lastState": {"terminated": {"exitCode": 3, "reason": "Error"}},
                }
            ],
        ),
    ),
    "an image on its way": make_case(
        "^lm is starting: its host: pulling image registry.example/train:1 for 10m$",
        waiting(0, "ContainerCreating"),
        events=(pod_event("Pulling", 'Pulling image "registry.example/train:1"'),),
    ),
    "containers on their way": make_case(
        "^lm is starting: its host: creating volumes and containers for 10m$",
        waiting(0, "ContainerCreating"),
    ),
    # --- the gang ---------------------------------------------------------------------------------
    "hosts are missing": make_case(
        "^lm waits at rendezvous for 9m: hosts 1, 3 of 4 missing$",
        *map(pod, range(4)),
        job=jobset(4),
        records=(beat(stage="gather", missing=[1, 3], missing_count=2),),
    ),
    "many hosts are missing": make_case(
        "and 24 more of 64 missing$",
        *map(pod, range(64)),
        job=jobset(64),
        records=(beat(stage="gather", missing=list(range(1, 17)), missing_count=40),),
    ),
    "everyone is there": make_case(
        "^lm is about to start: all hosts are connected$", pod(0), records=(beat(stage="gather"),)
    ),
    "it hangs": make_case(
        "^lm hangs: rank 3 in data at step 12 for 11m$",
        pod(0),
        records=(beat(overdue="rank 3 in data at step 12 for 11m"),),
    ),
    "it trains": make_case("^lm runs: training at step 40$", pod(0), records=(beat(),)),
    "it prepares its text": make_case(
        "^lm runs: preparing its text for 60s$", pod(0), records=(beat(phase="prepare", step=None),)
    ),
    "it compiles": make_case(
        "^lm runs: in compile for 60s$", pod(0), records=(beat(phase="compile", step=None),)
    ),
    "it trains again": make_case(
        r"^lm runs again after hang \(82\): rank 1 in data: training at step 40$",
        pod(0),
        records=(past(82, "rank 1 in data"), beat(attempt=2)),
    ),
    "it trains, and went wrong long ago": make_case(
        "^lm runs: training at step 40$",
        pod(0),
        records=(past(82, "rank 1"), past(83, "rank 2", attempt=2), beat(attempt=4)),
    ),
    "its program is silent": make_case(
        "^lm runs: its program reports no steps$",
        pod(0),
        records=(beat(phase="unsaid", step=None),),
    ),
    "its processes join": make_case(
        "^lm runs: its processes wait for each other in jax.distributed.initialize for 60s; "
        "HTTPS_PROXY, http_proxy name a proxy$",
        pod(0),
        job=jobset(1, env={"HTTPS_PROXY": "http://p:1", "http_proxy": "http://p:1"}),
        records=(
            beat(phase="joining", step=None, phases={"joining": [0, 1]}, counts={"joining": 2}),
        ),
    ),
    "a rank does not join": make_case(
        "^lm runs: rank 1 waits in jax.distributed.initialize for rank 0$",
        pod(0),
        records=(
            beat(
                phase="unsaid",
                step=None,
                phases={"unsaid": [0], "joining": [1]},
                counts={"unsaid": 1, "joining": 1},
            ),
        ),
    ),
    "no log of it": make_case("^lm runs: 2 of 2 hosts ready$", *map(pod, (0, 1)), job=jobset(2)),
    "between two generations": make_case(
        r"^lm is restarting after crash \(83\): rank 0 raised: X$",
        over(0, 83, message=farewell(83, "rank 0 raised: X")),
        job=jobset(1, status={"restarts": 1, "restartsCountTowardsMax": 1}),
    ),
    "between two generations, for memory": make_case(
        "^lm is restarting: its host was OOMKilled; it has no memory limit",
        over(0, 137, "OOMKilled"),
        job=RESTARTED,
    ),
    "a crash loop": make_case(
        r"^lm crashes and restarts without saving a checkpoint: 3 of 5 restarts are used up; last: "
        r"crash \(83\)",
        pod(0, generation=3),
        job=jobset(1, status={"restarts": 3, "restartsCountTowardsMax": 3}),
        records=(
            past(83, "rank 0 raised: X", attempt=3, generation=2),
            beat(attempt=4, generation=3),
        ),
    ),
    "beyond a crash loop": make_case(
        "^lm runs: training at step 40$",
        pod(0, generation=3),
        job=jobset(1, status={"restarts": 3, "restartsCountTowardsMax": 3}),
        records=(past(83, "X", attempt=3, generation=2, step=30), beat(attempt=5, generation=3)),
    ),
    "a process killed for memory long ago": make_case(
        r"^lm failed: bad_data \(exit 65\): no such file$",
        over(0, 65, "OOMKilled", message=farewell(65, "no such file")),
        job=FAILED,
    ),
    "a container killed for memory, and a peer that lost it": make_case(
        "^lm failed: host 1 was OOMKilled; its memory limit is 4Gi$",
        over(0, 81, message=farewell(81, "host 1 is gone")),
        over(1, 137, "OOMKilled"),
        job=jobset(2, status=ended("Failed"), resources={"memory": "4Gi"}),
    ),
    "evicted": make_case(
        r"^lm was interrupted: host 0 was evicted \(kubectl drain, or .*API\); it restarts, which "
        r"does not count",
        over(
            0,
            80,
            conditions=[
                condition("DisruptionTarget", reason="EvictionByEvictionAPI", message="evicting")
            ],
        ),
        pod(1, is_leaving=True),
        job=jobset(2),
    ),
    "evicted for its own excess, and restarting": make_case(
        r"^lm is restarting: host 1 was evicted: Pod ephemeral .* containers 1Gi "
        r"\(resources.ephemeral\); that counts",
        make_evicted_pod(1, 137, EXCESS),
        pod(0, is_leaving=True),
        job=jobset(2),
    ),
    "evicted for its own excess, and given up": make_case(
        r'^lm failed after 5 restarts: its host was evicted: Usage .* exceeds the limit "1Gi" '
        r"\(volumes: ephemeral\)$",
        make_evicted_pod(0, 84, 'Usage of EmptyDir volume "volume-0" exceeds the limit "1Gi". '),
        job=jobset(1, status=ended("Failed", "ReachedMaxRestarts", restarts=5)),
    ),
    "a loop of evictions for its own excess": make_case(
        r"^lm crashes and restarts .*; Pod lm-w-0-0-abcd0 was evicted: Pod ephemeral .* 1Gi "
        r"\(resources.ephemeral\)$",
        pod(0, generation=2),
        job=jobset(1, status={"restarts": 2, "restartsCountTowardsMax": 2}),
        events=(pod_event("Evicted", EXCESS),),
    ),
    "two nodes are lost": make_case(
        "^lm waits: nodes node-0, node-1 are NotReady, with all 2 hosts on them$",
        *(
            pod(host, node=f"node-{host}", conditions=[condition("Ready", "False")])
            for host in range(2)
        ),
        job=jobset(2),
        events=tuple(
            event("Pod", f"lm-w-0-{host}-abcd{host}", "NodeNotReady", "not ready")
            for host in range(2)
        ),
    ),
    "a verdict on the attempt of the newest heartbeat": make_case(
        r"^lm has ended attempt 1: lost \(81\): host 1 was lost$",
        pod(0),
        records=(beat(phase="compile"), judged(81, "host 1 was lost")),
    ),
    "one of two pods failed, and no agent has said why yet": make_case(
        r"^lm is restarting: host 1 \(pod \S+\) ended with exit code 1; 1 pod still terminating$",
        pod(0),
        over(1, 1),
        job=jobset(2, restarts={"in_place": 0}),
        records=(beat(phase="compile"),),
    ),
    # a lost host, whose gang keeps its other pods
    "a lost pod, which Kubernetes has not made again": make_case(
        "^lm waits for host 1 to come back: its pod does not exist yet, since Kubernetes makes it "
        "again 10 s after it failed; the other 2 hosts keep their pods$",
        *map(pod, (0, 2)),
        job=jobset(3),
        records=(beat(stage="gather", missing=[1]), judged(81, "host 1 was lost")),
    ),
    "a lost pod, made again, that no node takes": make_case(
        "^lm waits for host 1 to come back: host 1 is unschedulable: 0/3 nodes .*; the other 2 "
        "hosts keep their ",
        pod(0),
        pending(1, NOTHING_FITS),
        pod(2),
        job=jobset(3),
        records=(past(81), beat(stage="gather")),
    ),
    "a lost pod, made again, that starts": make_case(
        "^lm waits for host 1 to come back: host 1 is starting: creating volumes .*; the other 1 "
        "host keeps its pod$",
        pod(0),
        waiting(1, "ContainerCreating"),
        job=jobset(2),
        records=(past(81), beat(stage="gather")),
    ),
    "the pod of the leader is lost": make_case(
        "^lm waits for host 0, which leads, to come back: its pod does not exist yet, .*; the "
        "other 2 hosts keep ",
        *map(pod, (1, 2)),
        job=jobset(3),
    ),
    "the pod of the leader left, and its log with it": make_case(
        "^lm waits for host 0, which leads, to come back: its pod does not exist yet, .*; the "
        "other 3 hosts keep ",
        over(0, 143, message=farewell(80, "stopped")),
        *map(pod, (1, 2, 3)),
        job=SPARE,
    ),
    "the pod of the leader is made again": make_case(
        "^lm waits for host 0, which leads, to come back: host 0 is unschedulable: ",
        make_later_pod(pending(0, NOTHING_FITS)),
        pod(1),
        job=jobset(2),
    ),
    "a spare holds the ranks of a lost host": make_case(
        "^lm runs: training at step 40, with its ranks on hosts 0, 3, 2; no spare is ready, since "
        "host 1 is missing: its pod does not exist yet, ",
        *map(pod, (0, 2, 3)),
        job=SPARE,
        records=(past(81), beat(attempt=2, members="0,3,2")),
    ),
    "a lost host, whose node Kubernetes has not noticed yet": make_case(
        "^lm waits for host 1 to come back: its agent does not answer, and pod lm-w-0-1-abcd1 "
        "still reads as running on node node-1; the other 2 hosts keep their pods$",
        *map(pod, range(3)),
        job=jobset(3),
        records=HOST_1_LOST,
    ),
    "a lost host, whose next pod runs and has not said hello yet": make_case(
        "^lm waits at rendezvous for 5m20s: host 1 of 2 missing$",
        pod(0),
        pod(1, state={"running": {"startedAt": ago(seconds=2)}}),
        job=jobset(2),
        records=HOST_1_LOST,
    ),
    "the node of a lost host does not answer": make_case(
        "^lm waits for host 1 to come back: node node-2 has not answered since .*, with pod "
        "lm-w-0-1-abcd1 on it; the other 2 hosts keep their pods$",
        pod(0),
        pod(1, node="node-2"),
        pod(2),
        job=jobset(3),
        silent_node=silent_node("node-2"),
        records=HOST_1_LOST,
    ),
    "the node of a lost host does not answer, and keeps its pod": make_case(
        "^lm waits for host 1 to come back: pod lm-w-0-1-abcd1 should have ended 2m ago, and node "
        "node-2 has not .*; the other 2 hosts keep their pods$",
        pod(0),
        make_leaving_pod(1, node="node-2", conditions=CUT_OFF),
        pod(2),
        job=jobset(3),
        silent_node=silent_node("node-2"),
        records=HOST_1_LOST,
    ),
    "a spare holds the ranks of a host whose node nobody may read": make_case(
        "^lm runs: training at step 40, with its ranks on hosts 0, 3, 2; no spare is ready, since "
        "host 1 is missing: node node-2 is NotReady, with pod lm-w-0-1-abcd1 on it$",
        pod(0),
        pod(1, node="node-2", conditions=[condition("Ready", "False")]),
        *map(pod, (2, 3)),
        job=SPARE,
        records=(past(81), beat(attempt=2, members="0,3,2")),
    ),
    "a spare holds the ranks of a host whose node keeps its pod": make_case(
        "with its ranks on hosts 0, 3, 2; no spare is ready, since host 1 is missing: pod "
        "lm-w-0-1-abcd1 should have ended 2m ago, and node node-2 has not answered since ",
        pod(0),
        make_leaving_pod(1, node="node-2", conditions=CUT_OFF),
        *map(pod, (2, 3)),
        job=SPARE,
        silent_node=silent_node("node-2"),
        records=(past(81), beat(attempt=2, members="0,3,2")),
    ),
    "a spare holds the ranks of a host whose node is deleted": make_case(
        "no spare is ready, since host 1 is missing: node node-2 no longer exists: its object was "
        "deleted at ",
        pod(0),
        pod(1, node="node-2"),
        *map(pod, (2, 3)),
        job=SPARE,
        deleted_node=DeletedNode("node-2", ago(minutes=1)),
        records=(past(81), beat(attempt=2, members="0,3,2")),
    ),
    "fewer hosts, as the node of one does not answer": make_case(
        "^lm runs with 2 of 3 hosts: .* of 90; it waits for host 1 to grow again: node node-2 has "
        "not answered since ",
        pod(0),
        pod(1, node="node-2"),
        pod(2),
        job=ELASTIC,
        silent_node=silent_node("node-2"),
        records=(past(81), beat(attempt=2, members="0,2")),
    ),
    "a kubelet that is gone alone": make_case(
        "^lm runs, at step 40: node node-2 has not answered since .*, but the agent of host 1 "
        "on it does$",
        pod(0),
        pod(1, node="node-2"),
        job=jobset(2),
        silent_node=silent_node("node-2"),
        records=(beat(),),
    ),
    "a kubelet that is gone alone, its pod deleted": make_case(
        "^lm runs, at step 40: node node-2 is NotReady, but the agent of host 1 on it does$",
        pod(0),
        make_leaving_pod(1, node="node-2", conditions=CUT_OFF),
        job=jobset(2),
        events=(event("Pod", "lm-w-0-1-abcd1", "NodeNotReady", "Node is not ready"),),
        records=(beat(),),
    ),
    "no replacement came, as the node of a lost host keeps its pod": make_case(
        r"^lm is restarting after lost \(81\): host 1 was lost; 1 pod still terminating: node "
        r"node-2 has not answered since .*, with pod lm-w-0-1-abcd1 on it$",
        over(0, 81, message=farewell(81, "host 1 was lost")),
        make_leaving_pod(1, 0, node="node-2", conditions=CUT_OFF),
        job=jobset(2),
        silent_node=silent_node("node-2"),
    ),
    "all are done, and a node keeps the pod of a host that is lost": make_case(
        "^lm has finished, but its Job is not complete before pod lm-w-0-1-abcd1 has ended: pod "
        "lm-w-0-1-abcd1 should have ended 2m ago, and node node-2 has not answered since ",
        over(0, 0),
        make_leaving_pod(1, node="node-2", conditions=CUT_OFF),
        over(2, 0),
        over(3, 0),
        job=SPARE,
        silent_node=silent_node("node-2"),
    ),
    "a spare is about to take the ranks of a host": make_case(
        "^lm is about to start again without host 1: host 3 takes its ranks$",
        pod(0),
        over(1, 143),
        *map(pod, (2, 3)),
        job=SPARE,
        records=(beat(members="0-2"), judged(80)),
    ),
    "two hosts are lost, and there is one spare": make_case(
        "^lm waits for hosts 1, 2 to come back: their pods do not exist yet, .*; the other 2 hosts "
        "keep their pods$",
        *map(pod, (0, 3)),
        job=SPARE,
        records=(past(81), beat(stage="gather", missing=[1, 2])),
    ),
    "a host is missing, and another's volumes could not be mounted at first": make_case(
        "^lm waits for host 1 to come back: host 1 is starting: creating volumes and containers; "
        "the other 1 host ",
        pod(0),
        make_later_pod(waiting(1, "ContainerCreating")),
        job=jobset(2),
        records=HOST_1_LOST,
        events=(pod_event("FailedMount", 'configmap "data" not found', last=ago(seconds=1)),),
    ),
    "another host is lost, and no spare is left": make_case(
        "^lm waits for host 3 to come back: its pod does not .*; the other 2 hosts keep their "
        "pods; no spare is left$",
        *map(pod, (0, 2)),
        job=SPARE,
        records=(past(81), beat(stage="gather", members="0,3,2", attempt=2)),
    ),
    "fewer hosts for a while": make_case(
        "^lm runs with 2 of 3 hosts: training at step 40 of 90; it waits for host 1 to grow again: "
        "host 1 is unsched",
        pod(0),
        pending(1, NOTHING_FITS),
        pod(2),
        job=ELASTIC,
        records=(past(81), beat(attempt=2, members="0,2")),
    ),
    "fewer hosts, and one that is back": make_case(
        "^lm runs with 2 of 3 hosts: training at step 40 of 90; host 1 will hold ranks after "
        "the next save$",
        *(pod(host) for host in range(3)),
        job=ELASTIC,
        records=(past(81), beat(attempt=2, members="0,2")),
    ),
    "a host that left its gang after a drain": make_case(
        "^lm waits for host 1 to come back: its pod does not exist yet, ",
        pod(0),
        over(1, 143, message=farewell(80, "stopped")),
        job=jobset(2),
        records=(beat(), judged(80)),
    ),
    "evicted by a node that is low on memory": make_case(
        "^lm was interrupted: its host was evicted by the kubelet of node node-1, which was low on "
        "memory; it used 1803264Ki, and requests 128Mi; it restarts, which does not count against "
        "the restart limits$",
        make_evicted_pod(0, 137, LOW),
    ),
    "a pod that is not ready, and nobody says why": make_case(
        "^lm runs: 1 of 2 hosts ready$",
        pod(0),
        pod(1, conditions=[condition("Ready", "False")]),
        job=jobset(2),
        records=(beat(phase="compile"),),
    ),
    "a node is lost": make_case(
        "^lm waits: node node-2 is NotReady, with host 1 on it$",
        pod(0),
        pod(1, node="node-2", conditions=[condition("Ready", "False")]),
        job=jobset(2),
        events=(event("Pod", "lm-w-0-1-abcd1", "NodeNotReady", "Node is not ready"),),
    ),
    # --- others -----------------------------------------------------------------------------------
    "a finalizer keeps a pod": make_case(
        "^lm is being deleted, but is blocked: finalizer a.io/b has kept pod "
        "lm-w-0-0-abcd0 for 9m$",
        with_metadata(pod(0), deletionTimestamp=ago(minutes=9), finalizers=["a.io/b"]),
        job=with_metadata(jobset(1), deletionTimestamp=ago(minutes=10)),
    ),
    "a silent node keeps a pod": make_case(
        "^lm is restarting; 1 pod still terminating: pod lm-w-0-0-abcd0 should have ended 9m ago, "
        "and node node-1",
        with_metadata(pod(0), deletionTimestamp=ago(minutes=9)),
        job=RESTARTED,
    ),
    "a finalizer keeps the JobSet alone": make_case(
        "is blocked: finalizer team.io/keep has kept JobSet lm for 10m$",
        job=with_metadata(
            jobset(1),
            deletionTimestamp=ago(minutes=10),
            finalizers=["foregroundDeletion", "team.io/keep"],
        ),
    ),
    "a namespace on its way out": make_case(
        "^lm waits: its pod is rejected: namespace team is being deleted and accepts no "
        "new objects$",
        events=(
            job_event(
                "FailedCreate",
                "pods is forbidden: unable to create new content in namespace team because it "
                "is being terminated",
            ),
        ),
    ),
    "a namespace that takes its jobs with it": make_case(
        "^lm is being deleted with its namespace team: 1 pod still terminating$",
        pod(0, is_leaving=True),
        job=with_metadata(jobset(1), deletionTimestamp=ago(seconds=10)),
        ending_namespace=ENDING,
    ),
    "a claim without its volume": make_case(
        "^lm waits: PersistentVolume pv-1 of PersistentVolumeClaim ckpt no longer exists$",
        pending(
            0,
            '0/1 nodes: persistentvolumeclaim "ckpt" bound to non-existent persistentvolume "pv-1"',
        ),
    ),
    "preempted by a job that is known": make_case(
        "^lm was preempted by job urgent and waits: ",
        job=QUEUED_JOB,
        workload=make_waiting_workload("later", condition("Evicted", reason="Preempted")),
        preempted_by="urgent",
    ),
    "all that it started has ended": make_case(
        "^lm runs: its processes have ended at step 40$",
        *map(pod, (0, 1)),
        job=jobset(2),
        records=(beat(phase="ended", counts={"ended": 2}, phases={"ended": [0, 1]}),),
    ),
    "most of what it started has ended": make_case(
        "^lm runs: its processes end at step 40; ranks 0, 2 have ended, rank 1 still runs$",
        *map(pod, range(3)),
        job=jobset(3),
        records=(
            beat(
                phase="ended", counts={"ended": 2, "step": 1}, phases={"ended": [0, 2], "step": [1]}
            ),
        ),
    ),
    "another controller": make_case(
        r"^lm has no Jobs 10m after it was created: controller their.test/own \(spec.managedBy\) "
        r"has not acted on it$",
        job={**jobset(1), "spec": {**jobset(1)["spec"], "managedBy": "their.test/own"}},
        jobs=(),
    ),
    "without Jobs between generations": make_case(
        "^lm is restarting$", job=jobset(1, status={"restarts": 2}), jobs=()
    ),
    "no such scheduler": make_case(
        "^lm waits: scheduler mine has not looked at its host in 10m$",
        pod(0, node=None),
        job=jobset(1, pod={"spec": {"schedulerName": "mine"}}),
    ),
    "a kubelet that is slow": make_case(
        "^lm is starting: its host: creating volumes and containers for 10m$",
        waiting(0, "ContainerCreating"),
        events=(
            pod_event(
                "FailedMount",
                'MountVolume.SetUp failed for volume "jaxlaunch" : failed to sync configmap '
                "cache: timed out",
            ),
        ),
    ),
    "single claim": (
        make_unscheduled(
            "0/1 nodes are available: 1 node(s) unavailable due to PersistentVolumeClaim with "
            "ReadWriteOncePod access mode already in-use by another pod.",
            node(),
            volumes=[{"claim": "data", "path": "/data"}],
        ),
        "^lm waits: PersistentVolumeClaim data is ReadWriteOncePod, and another pod uses it$",
    ),
    "no pull secret": make_case(
        "cannot pull image registry.example/train:1: Secret mine of image_pull_secrets "
        "does not exist$",
        waiting(0, "ImagePullBackOff", "Back-off pulling image"),
        events=(
            pod_event("Failed", "Failed to pull image: unauthorized"),
            pod_event(
                "FailedToRetrieveImagePullSecret",
                "Unable to retrieve some image pull secrets (mine); attempting to pull the "
                "image may not succeed.",
            ),
        ),
    ),
    "another platform": make_case(
        "cannot pull image registry.example/train:1: the image is not built for the node's CPU "
        "architecture$",
        waiting(0, "ErrImagePull", "no match for platform in manifest sha256:01: not found"),
    ),
    "unhealthy": make_case(
        "^lm is restarted again and again: its liveness probe fails: no answer$",
        pod(0, generation=1),
        job=RESTARTED,
        events=(pod_event("Unhealthy", "Liveness probe failed: no answer"),),
    ),
    "unhealthy, while another probe fails": make_case(
        "^lm is restarted again and again: its liveness probe fails: no answer$",
        pod(0, generation=1),
        job=RESTARTED,
        events=(
            pod_event("Unhealthy", "Liveness probe failed: no answer", last=ago(seconds=20)),
            pod_event("Unhealthy", "Readiness probe failed: no answer", last=ago(seconds=5)),
        ),
    ),
    "a hook, again": make_case(
        "^lm is restarted again and again: its postStart hook fails: PostStartHook failed$",
        pod(0, generation=1),
        job=RESTARTED,
        events=(pod_event("FailedPostStartHook", "PostStartHook failed"),),
    ),
    "a hook": (
        fail_hook(137),
        r"^lm failed: the postStart hook of host 0 \(pod lm-w-0-0-abcd0\) failed: "
        r"PostStartHook failed$",
    ),
    "a hook, and an agent that was stopped for it": (
        fail_hook(80, farewell(80, "stopped from outside before every host had joined")),
        r"^lm failed: the postStart hook of host 0 \(pod lm-w-0-0-abcd0\) failed: "
        r"PostStartHook failed$",
    ),
    "a hook of an earlier attempt": make_case(
        "^lm failed: preempted ",
        over(0, 80, message=farewell(80, "stopped from outside")),
        job=jobset(1, status=ended("Failed", "FailedJobs")),
        events=(event("Pod", "lm-w-0-0-zzzzz", "FailedPostStartHook", "PostStartHook failed"),),
    ),
    "a hook, and an error of the program": (
        fail_hook(83, farewell(83, "rank 0 raised: X")),
        r"^lm failed: crash \(exit 83\): rank 0 raised: X$",
    ),
    "rejected by its node": make_case(
        r"^lm failed: node node-1 rejected host 0 \(pod lm-w-0-0-abcd0\): OutOfcpu: Pod was "
        r"rejected: not enough cpu$",
        pod(
            0,
            state={},
            phase="Failed",
            reason="OutOfcpu",
            message="Pod was rejected: not enough cpu",
        ),
        job=FAILED_JOBS,
    ),
    "a node that is gone": make_case(
        "^lm was interrupted: its host was on node node-1, which no longer exists; it restarts",
        pod(
            0,
            conditions=[
                condition("DisruptionTarget", "True", "DeletionByPodGC", "PodGC: node not found")
            ],
        ),
    ),
    "a host that cannot join": make_case(
        r"did not join within 5 s \(timeouts.gather\); host 1 \(pod lm-w-0-1-abcd1\): cannot join "
        r"host 0 at \S+: name not resolved$",
        over(0, 81, message=farewell(81, NOT_JOINED)),
        over(1, 81, message=farewell(81, CANNOT_JOIN)),
        job=jobset(2, status=ended("Failed", "FailJobSet")),
    ),
    "DNS that does not answer": make_case(
        "^lm waits at rendezvous for 9m: hosts 0, 1 of 2 missing; not even host 0 reaches itself "
        "by the name that all hosts use: most likely DNS does not answer$",
        *map(pod, (0, 1)),
        job=jobset(2),
        records=(beat(stage="gather", missing=[0, 1], missing_count=2),),
    ),
    "no pods yet": make_case("^lm is being created: 0 of 2 pods exist$", job=jobset(2), events=()),
    # --- a controller or a node that is silent ----------------------------------------------------
    "the Job controller is silent": make_case(
        "^lm has no pods 10m after its Job lm-w-0 was created: the Job controller has not "
        "acted on it$",
        job=jobset(2),
        jobs=(job_object(is_seen=False),),
    ),
    "the Job controller misses a failure": make_case(
        r"^lm waits: host 0 \(pod lm-w-0-0-abcd0\) failed 2m ago, and the Job controller has not "
        r"acted on that$",
        pod(0, state={"terminated": {"exitCode": 3, "finishedAt": ago(minutes=2)}}, phase="Failed"),
    ),
    "the JobSet controller misses a failure": make_case(
        "^lm waits: its Jobs failed 2m ago, and the JobSet controller has not acted on that$",
        over(0, 3),
        jobs=(job_object("lm-w-0", condition("Failed", lastTransitionTime=ago(minutes=2))),),
    ),
    "the garbage collector is silent": make_case(
        "^lm is being deleted, but is blocked: the garbage collector has not deleted its Job "
        "lm-w-0 in 5m$",
        pod(0),
        job=with_metadata(jobset(1), deletionTimestamp=ago(minutes=5)),
    ),
    "the Job controller keeps a pod that has ended": make_case(
        "pod lm-w-0-0-abcd0 has ended, and the Job controller has not counted it for 2m$",
        make_leaving_pod(0, phase="Failed"),
        job=RESTARTED,
    ),
    "a dead node keeps a pod": make_case(
        "^lm was interrupted: its host was on node node-1, which does not answer or got a "
        "NoExecute taint; pod "
        "lm-w-0-0-abcd0 should have ended 2m ago, and node node-1 has not answered since 11:57:00 "
        "UTC \\(3m ago\\): "
        "Kubelet stopped posting node status$",
        make_leaving_pod(0, conditions=TAINTED_OUT),
        silent_node=silent_node(),
    ),
    "a dead node keeps a pod, as events say too": make_case(
        "lm-w-0-0-abcd0 should have ended 2m ago, and node node-1 has not answered since 11:57:00 "
        "UTC \\(3m ago\\): "
        "Kubelet stopped posting node status$",
        make_leaving_pod(0, conditions=CUT_OFF),
        silent_node=silent_node(),
        events=(NODE_NOT_READY,),
    ),
    "a dead node, its pods deleted just now": make_case(
        "^lm was interrupted: its host was on node node-1, which does not answer or got a "
        "NoExecute taint; that pod "
        "cannot end, since node node-1 has not answered since 11:57:00 UTC \\(3m ago\\): Kubelet "
        "stopped posting node "
        "status$",
        make_leaving_pod(0, 0, conditions=CUT_OFF),
        silent_node=silent_node(),
        events=(NODE_NOT_READY,),
    ),
    "a dead node that nobody may read, its pods deleted just now": make_case(
        "which does not answer or got a NoExecute taint; those pods cannot end, since node node-1 "
        "is NotReady$",
        *(make_leaving_pod(host, 0, conditions=CUT_OFF) for host in range(2)),
        job=jobset(2),
        events=(NODE_NOT_READY,),
    ),
    "a dead node, its pods not deleted yet": make_case(
        "^lm waits: node node-2 has not answered since 11:57:00 UTC \\(3m ago\\): Kubelet stopped "
        "posting node status; "
        "host 1 is on it$",
        pod(0),
        pod(1, node="node-2"),
        job=jobset(2),
        silent_node=silent_node("node-2"),
    ),
    "a kubelet that does not begin": make_case(
        "^lm is starting: its host: the kubelet of node node-1 has not begun with it in 10m$",
        waiting(0, "ContainerCreating", is_seen=False, containerStatuses=[]),
    ),
    "a warning while it is created": make_case(
        "^lm is being created: 1 of 2 pods exist; the newest warning: Odd: it is odd$",
        pod(0),
        job=jobset(2),
        events=(job_event("Odd", "it is odd"),),
    ),
    "a resource claim that cannot be made": make_case(
        "^lm waits: its host cannot be scheduled: FailedResourceClaimCreation: PodResourceClaim "
        "imex: .*not found$",
        pod(0, node=None, state={}, conditions=[]),
        events=(pod_event("FailedResourceClaimCreation", CLAIM),),
    ),
    # --- other containers -------------------------------------------------------------------------
    "a sidecar failed": make_case(
        "^lm failed: container proxy of its host ended with exit code 7; the program "
        "itself finished$",
        over(
            0, 0, message=farewell(0, "the process finished"), beside=[container_status("proxy", 7)]
        ),
        job=FAILED_JOBS,
    ),
    "a sidecar failed, and the program runs": make_case(
        "^lm runs, but container ship of host 1 was OOMKilled; its memory limit is 40Mi: "
        "the job fails",
        pod(0),
        pod(
            1,
            beside=[container_status("ship", 137, "OOMKilled")],
            spec=limit_memory("containers", "ship", "40Mi"),
        ),
        job=jobset(2),
        records=(beat(),),
    ),
    "a sidecar does not end": make_case(
        r"^lm does not end: its program ended 2m ago \(exit 0\), but container mesh of its host "
        r"still runs$",
        pod(0, state=DONE_LONG_AGO, phase="Running", beside=[container_status("mesh")]),
    ),
    "a sidecar does not end, and the program failed": make_case(
        r"^lm does not end: its program ended 2m ago \(exit 83\), but container mesh of its host "
        r"still runs$",
        pod(
            0,
            state={"terminated": DONE_LONG_AGO["terminated"] | {"exitCode": 83}},
            phase="Running",
            beside=[container_status("mesh")],
        ),
    ),
    "a native sidecar ends with the program": make_case(
        "^lm is done, in 5m$",
        over(0, 0, initContainerStatuses=[container_status("mesh", 137)]),
        job=jobset(1, status=ended("Completed")),
    ),
    "a native sidecar ends again and again": make_case(
        "^lm runs, but sidecar proxy of its host ends again and again: exit code 4$",
        pod(
            0,
            conditions=[
                condition("Ready", "False", message="containers with unready status: [proxy]")
            ],
            initContainerStatuses=[
                {"name": "proxy", "state": {"waiting": {}}, "lastState": ENDED_WITH_4}
            ],
            spec={"initContainers": [{"name": "proxy", "restartPolicy": "Always"}]},
        ),
        records=(beat(),),
    ),
    "a pod's own deadline": make_case(
        r"^lm failed: host 0 \(pod lm-w-0-0-abcd0\) was ended by its own activeDeadlineSeconds: "
        r"Pod was active",
        over(0, 137, reason="Error")
        | {
            "status": over(0, 137)["status"]
            | {"reason": "DeadlineExceeded", "message": "Pod was active too long"}
        },
        job=FAILED_JOBS,
    ),
    "not ready, and why": make_case(
        r"^lm runs: 0 of 1 host ready; host 0 \(pod lm-w-0-0-abcd0\): containers with unready "
        r"status: \[main\]$",
        pod(
            0,
            conditions=[
                condition("Ready", "False", message="containers with unready status: [main]")
            ],
        ),
    ),
    "an init container runs": make_case(
        "^lm is starting: its host: init container fetch has run for 5m$",
        waiting(0, "PodInitializing", initContainerStatuses=[container_status("fetch")]),
    ),
    "a native sidecar is not ready": make_case(
        "^lm is starting: its host: sidecar mesh has not been ready for 5m$",
        waiting(
            0,
            "PodInitializing",
            initContainerStatuses=[container_status("mesh")],
            spec={"initContainers": [{"name": "mesh", "restartPolicy": "Always"}]},
        ),
    ),
    "an init container was OOMKilled": make_case(
        "^lm failed: init container fetch of its host was OOMKilled; its memory limit is 40Mi$",
        waiting(
            0,
            "PodInitializing",
            phase="Failed",
            initContainerStatuses=[container_status("fetch", 137, "OOMKilled")],
            spec=limit_memory("initContainers", "fetch", "40Mi"),
        ),
        job=jobset(1, status=ended("Failed", "FailedJobs"), resources={"memory": "64Gi"}),
    ),
    "too little memory to start": make_case(
        "^lm failed: it cannot start on its host: its memory limit of 4Mi is too low for the "
        "container runtime",
        over(
            0,
            128,
            "StartError",
            "cannot start a stopped process: unknown",
            spec=limit_memory("containers", "main", "4Mi"),
        ),
        job=FAILED_JOBS,
    ),
    "the container runtime fails": make_case(
        "^lm failed: it cannot start on its host: the container runtime failed: cgroup: "
        "device busy$",
        over(
            0,
            128,
            "StartError",
            "cgroup: device busy",
            spec=limit_memory("containers", "main", "4Gi"),
        ),
        job=FAILED_JOBS,
    ),
    # --- ranks ------------------------------------------------------------------------------------
    "one rank has ended": make_case(
        "^lm runs: its program reports no steps; rank 1 has ended, rank 0 still runs$",
        *map(pod, (0, 1)),
        job=jobset(2),
        records=(
            beat(
                phase="unsaid",
                step=None,
                phases={"unsaid": [0], "ended": [1]},
                counts={"unsaid": 1, "ended": 1},
            ),
        ),
    ),
    "a trainer that starts": make_case(
        "^lm runs: its processes start: imports, devices, JAX's own initialization$",
        pod(0),
        job=jobset(1, command=None, train={"task": "my.tasks:Mine", "batch": 1, "steps": 9}),
        records=(beat(phase="unsaid", step=None, phases={"unsaid": [0]}, counts={"unsaid": 1}),),
    ),
    "no room in shared memory": make_case(
        r"^lm failed: killed \(exit 135\): rank 0 was killed by SIGBUS; most often /dev/shm is "
        r"full, which is 1Mi",
        over(0, 135, message=farewell(135, "rank 0 was killed by SIGBUS")),
        job=jobset(
            1, status=ended("Failed", "FailedJobs"), resources={"memory": "1Gi", "shm": "1Mi"}
        ),
    ),
    # --- the scheduler's rules, and Kueue's reasons -----------------------------------------------
    "topology spread": (
        make_unscheduled(
            "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 node(s) didn't match "
            "pod topology spread constraints (missing required label). no new claims to "
            "deallocate, preemption: 0/3 nodes are available: 3 Preemption is not helpful for "
            "scheduling.",
            node("a"),
            node("b"),
            node("c", taints=("x=y:NoSchedule",)),
        ),
        r"unschedulable: 2 node\(s\) didn't match pod topology spread constraints \(missing "
        r"required label\); 2 nodes would fit a host when empty$",
    ),
    "anti-affinity, nodes unknown": make_case(
        r"unschedulable: 0/2 nodes are available: 2 node\(s\) didn't match pod "
        r"anti-affinity rules$",
        pending(
            0,
            "0/2 nodes are available: 2 node(s) didn't match pod anti-affinity rules. "
            "preemption: no.",
        ),
    ),
    "a closed queue": make_case(
        "^lm waits: queue research is closed to namespace team: its namespaceSelector "
        "does not match$",
        job=QUEUED_JOB,
        workload=make_waiting_workload("Workload namespace doesn't match ClusterQueue selector"),
    ),
    "drained": make_case(
        r"^lm was evicted because the ClusterQueue was stopped \(stopPolicy: HoldAndDrain\) and "
        r"waits: ClusterQueue shared is stopped",
        job=QUEUED_JOB,
        workload=make_waiting_workload(
            "ClusterQueue shared is stopped", condition("Evicted", reason="ClusterQueueStopped")
        ),
        local_queue=local_queue(),
        cluster_queue=cluster_queue(active=False, stopPolicy="HoldAndDrain"),
    ),
    "no node replaces one that failed": make_case(
        r"^lm was evicted because nodes failed, and Kueue found no replacement \(NodeFailures, TAS",
        job=QUEUED_JOB,
        workload=make_waiting_workload(
            "", condition("Evicted", reason="NodeFailures", message="no node")
        ),
    ),
    **{
        f"Kueue's reason {reason}": (
            snapshot(QUEUED_JOB, workload=make_waiting_workload("it says why", reason=reason)),
            rf"^lm waits: queue research {words} \({reason}\): it says why$",
        )
        for reason, words in {
            "Misconfigured": "or the job is misconfigured",
            "ExceedsMaxQuota": "can never admit it",
            "Suspended": "is stopped by its administrator",
            "AdmissionGated": "does not admit it yet",
            "WaitingForPodsReady": "admits one job after the other",
            "WaitingForQuota": "is full",
            "TopologyPlacementFailed": "has no room in one topology domain",
            "DRAResourcesUnresolved": "cannot resolve its resource claims",
        }.items()
    },
    "another tool's": make_case(
        "^lm is being created: 3 of 6 pods exist$",
        *(pod(host, part="part", container="work", slice=0) for host in range(3)),
        job=objects.foreign(),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_headline_names_the_situation(case: str) -> None:
    job, expected = CASES[case]
    assert re.search(expected, explain_job(job).headline), explain_job(job).headline


@pytest.mark.parametrize("case", CASES)
def test_decisions_do_not_depend_on_wording(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job, _ = CASES[case]
    english = explain_job(job)
    monkeypatch.setattr(text, "localize", replace_words)
    other = explain_job(job)
    for field in ("situation", "action", "commands", "see"):
        assert getattr(other, field) == getattr(english, field)
    assert other.headline != english.headline and len(other.evidence) == len(english.evidence)
    assert (other.next_move is None) is (english.next_move is None)


@pytest.mark.parametrize("case", CASES)
def test_every_proposed_command_parses_and_names_its_file(case: str) -> None:
    explanation = explain_job(CASES[case][0])
    lines = [shlex.join(words) for words in explanation.commands]
    for quoted in re.findall(r"`((?:launcher|kubectl) [^`]+)`", explanation.next_move or ""):
        assert quoted in lines or not is_launched(job=CASES[case][0]), quoted
    for words in explanation.commands:
        parse_command(words)
    if explanation.action == "resubmit" and is_launched(CASES[case][0]):
        assert any(words[1] == "submit" for words in explanation.commands), explanation.next_move


def is_launched(job: Snapshot | NoSuchJob) -> bool:
    return isinstance(job, Snapshot) and job.is_ours


def test_texts_are_rendered_only_after_the_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> str:
        raise AssertionError("a text was rendered")

    monkeypatch.setattr(text.Renderer, "render", refuse)
    assert all(diagnose_job(job).answer.situation in SITUATIONS for job, _ in CASES.values())


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (
            text.launcher_command("logs", text.JOB_NAME, "--previous"),
            "launcher logs -n team lm --previous",
        ),
        (text.launcher_command("list"), "launcher list -n team"),
        (text.SUBMIT, "launcher submit -n team lm.yaml 'name=a b'"),
        (text.SUBMIT_AGAIN, "launcher submit -n team lm.yaml 'name=a b' --replace"),
        (text.PLAN, "launcher plan lm.yaml 'name=a b'"),
        (
            text.kubectl_command("describe", "pod", "lm-w-0-0"),
            "kubectl -n team describe pod lm-w-0-0",
        ),
        (
            text.kubectl_command("uncordon", "node-1", is_namespaced=False),
            "kubectl uncordon node-1",
        ),
    ],
)
def test_commands_name_the_namespace_of_their_object(command: text.Command, line: str) -> None:
    sentence = text.Text("see `{command}`.", command=command)
    words = ("lm.yaml", "name=a b")
    assert text.Renderer("lm", "team", job_words=words).render(sentence) == f"see `{line}`."
    assert " -n " not in text.Renderer("lm").render(sentence)


def test_every_wait_and_failure_has_a_next_move() -> None:
    for case, (job, _) in CASES.items():
        explanation = explain_job(job)
        assert explanation.next_move or re.search(
            r"\bruns\b|about to start|preempted|is admitted", explanation.headline
        ), case


@pytest.mark.parametrize(
    ("error", "move"),
    [
        (13, "let the pods' user"),
        (28, "make room on the file system that it writes to"),
        (30, "let it write below /tmp, or mount a volume there"),
    ],
)
def test_errors_of_files_have_their_own_next_moves(error: int, move: str) -> None:
    raised = Failure(
        FailureKind.EXCEPTION, rank=0, exception=ExceptionFacts("OSError", "no", errno=error)
    )
    failed = over(0, 83, message=farewell(83, raised))
    next_move = explain_job(snapshot(FAILED_JOBS, failed)).next_move or ""
    assert (
        next_move.startswith(move)
        and "`launcher submit -n team lm.yaml hosts=2 --replace`" in next_move
    )


@pytest.mark.parametrize(
    ("volume", "kind", "subject"),
    [
        ({"secret": {"secretName": "known"}}, "secret", "Secret known"),
        ({"configMap": {"name": "known"}}, "config", "ConfigMap known"),
        ({"projected": {"sources": []}}, "secret", "its Secret"),
    ],
)
def test_missing_key_names_object_of_the_volume(
    volume: dict[str, object], kind: str, subject: str
) -> None:
    message = (
        f'MountVolume.SetUp failed for volume "part" : references non-existent {kind} key: none'
    )
    job, waiting_pod = jobset(1), waiting(0, "ContainerCreating")
    pods = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    pods["volumes"] = [*pods.get("volumes", ()), {"name": "part", **volume}]
    explanation = explain_job(
        snapshot(
            job,
            waiting_pod,
            events=(event("Pod", waiting_pod["metadata"]["name"], "FailedMount", message),),
        )
    )
    assert explanation.headline == f"lm waits: its host cannot start: {subject} has no key none"


@pytest.mark.parametrize(
    ("tolerations", "duration"),
    [
        (nodes.LOST_NODE_TOLERATIONS, "30s"),
        ((*nodes.LOST_NODE_TOLERATIONS, {"operator": "Exists", "tolerationSeconds": 5}), "5s"),
        (({"key": "a.io/b", "effect": "NoExecute", "tolerationSeconds": 5},), "5m"),
        ((), "5m"),
    ],
)
def test_wait_for_silent_node_is_the_toleration_of_pods(
    tolerations: tuple[object, ...], duration: str
) -> None:
    job = jobset(2)
    job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["tolerations"] = [
        *tolerations
    ]
    explanation = explain_job(
        snapshot(job, pod(0), pod(1, node="node-2"), silent_node=silent_node("node-2"))
    )
    assert explanation.situation == "node-lost"
    assert (explanation.next_move or "").startswith(
        f"wait: Kubernetes evicts its pods after {duration}, but makes them again"
    )


@pytest.mark.parametrize(
    ("saved_step", "move"),
    [(37, "hosts=2 --replace`: it resumes from step 37."), (None, "")],
)
def test_resume_step_is_named_only_if_a_step_is_saved(saved_step: int | None, move: str) -> None:
    failed = over(0, 71, message=farewell(71, "the loss is nan"))
    job = snapshot(FAILED_JOBS, failed, records=(beat(committed=saved_step),))
    next_move = explain_job(job).next_move or ""
    assert next_move.endswith(move) and ("resumes" in next_move) is bool(move)


@pytest.mark.parametrize(
    ("reason", "progress", "is_of_now"),
    [
        *(
            ("FailedScheduling", progress, progress == "pending")
            for progress in ("pending", "creating", "runs")
        ),
        *(("FailedMount", progress, progress == "creating") for progress in ("creating", "runs")),
        ("Unhealthy", "runs", True),
    ],
)
def test_warning_is_evidence_while_it_may_be_true(
    reason: str, progress: str, is_of_now: bool
) -> None:
    """Of host 1, by how far its pod is; host 0 runs."""
    pods = {
        "pending": pending(1, NOTHING_FITS),
        "creating": waiting(1, "ContainerCreating"),
        "runs": pod(1),
    }[progress]
    warning = event("Pod", "lm-w-0-1-abcd1", reason, "a warning", last=ago(seconds=1))
    job = snapshot(jobset(2), pod(0), pods, events=(warning,), records=(beat(),))
    assert (job.newest_warning is not None) is is_of_now
    assert not any("a warning" in line for line in explain_job(job).evidence) or is_of_now


def test_evidence_is_bounded() -> None:
    lines = "\n".join(f"  File 'x.py', line {number}" for number in range(5000))
    texts = tuple(pod_event(f"Reason{number}", "x" * 10_000) for number in range(500))
    job = snapshot(
        FAILED, over(0, 70, message=farewell(70, "x" * 9_000, traceback=lines)), events=texts
    )
    explanation = explain_job(job)
    assert len(explanation.evidence) <= MAX_EVIDENCE
    assert len(json.dumps(explanation.to_json())) < 20_000


def test_traceback_tail_is_the_first_evidence() -> None:
    text = "Traceback (most recent call last):\n  File 'x.py', line 3\nValueError: no"
    job = snapshot(FAILED, over(0, 70, message=farewell(70, "raised", traceback=text)))
    assert explain_job(job).evidence[:3] == tuple(text.splitlines())


def test_agent_report_is_no_evidence_of_failed_hook() -> None:
    assert not [
        line
        for line in explain_job(CASES["a hook, and an agent that was stopped for it"][0]).evidence
        if "{" in line
    ]


def test_facts_show_restarts_by_cause_and_checkpoint_age() -> None:
    job = snapshot(
        jobset(1, status={"restarts": 3, "restartsCountTowardsMax": 1}),
        pod(0, generation=3),
        records=(
            beat(
                attempt=5,
                generation=3,
                committed=120,
                committed_at=objects.NOW.timestamp() - 90,
                restarts={"preempted": 2, "crash": 1},
                preempted=2,
            ),
        ),
    )
    assert explain_job(job).facts == (
        "restarts: 3, of which 0 in the same pods; 1 of 5 (restarts.crash); attempts ended by "
        "crash 1, preempted 2; 2 of 20 free restarts in a row without a newly saved step",
        "last good checkpoint: step 120, 90s ago",
    )


def test_recorded_numbers_come_with_their_time() -> None:
    queued = jobset(1, **QUEUED, status={"restarts": 1})
    numbers = {"step": 40, "committed": 37, "goodput": 0.81, "restarts": {"preempted": 2}}
    explanation = explain_job(
        snapshot(add_progress(queued, "queued", **numbers), workload=workload())
    )
    assert explanation.facts == (
        "restarts: 2, of which 1 in the same pods; 0 of 5 (restarts.crash); attempts ended by "
        "preempted 2",
        "as of 11:53:00 UTC (7m ago), when its queue suspended it: step 40, last good checkpoint: "
        "step 37, goodput 81.0%",
    )


def test_facts_name_what_is_unknown() -> None:
    summary = PastLine(attempt=1, unknown="no shared folder")
    job = snapshot(
        jobset(1), pod(0), records=(summary, beat()), unread=("nodes could not be read: forbidden",)
    )
    assert explain_job(job).facts == (
        "earlier attempts are not known: no shared folder",
        "nodes could not be read: forbidden",
    )


def test_jobset_of_another_tool_is_explained_without_steps() -> None:
    explanation = explain_job(
        snapshot(
            objects.foreign(), *(pod(host, part="part", container="work") for host in range(6))
        )
    )
    assert "not submitted by launcher" in " ".join(explanation.facts)


def test_terminating_namespace_is_explained_by_its_status() -> None:
    deleted_jobset = with_metadata(jobset(1), deletionTimestamp=ago(seconds=10))
    explanation = explain_job(
        snapshot(deleted_jobset, pod(0, is_leaving=True), ending_namespace=ENDING)
    )
    assert explanation.situation == "namespace-terminating" and "-n NAMESPACE" in (
        explanation.next_move or ""
    )
    lines = (
        "Namespace team is Terminating: pods. has 1 resource",
        "Namespace team is Terminating: a.io/b in 1 resource",
    )
    assert [line.removesuffix(" instances") for line in explanation.evidence] == list(lines)
    explanation_of_deleted = explain_job(NoSuchJob("team", "lm", ending_namespace=ENDING))
    assert (
        explanation_of_deleted.headline
        == "job lm not found in namespace team, which is being deleted"
    )
    assert "pods. has 1 resource instances" in explanation_of_deleted.evidence[0]


def test_attempts_before_a_deleted_job_are_said_to_be_unknown() -> None:
    made_again = job_object()
    made_again["metadata"]["creationTimestamp"] = ago(minutes=1)
    facts = explain_job(snapshot(jobset(1), pod(0), jobs=(made_again,))).facts
    assert any("its Job was deleted then and created again" in fact for fact in facts), facts
    kept = jobset(1, volumes=[{"claim": "data", "path": "/data"}])
    for job, jobs in ((kept, (made_again,)), (jobset(1), (job_object(),))):
        assert not explain_job(snapshot(job, pod(0), jobs=jobs)).facts


def test_unknown_name_suggests_similar_names() -> None:
    job = NoSuchJob("team", "lm-smal", other_jobs=("lm-small", "other"))
    assert explain_job(job).headline == "job lm-smal not found in namespace team"
    shows("job … not found in namespace", explain_job(job).headline)
    assert explain_job(job).next_move == "did you mean lm-small?"


def test_deleted_job_is_explained_by_events_and_leftovers() -> None:
    events = fold_events(
        [trim_event(jobset_event("AllJobsCompleted", "jobset completed", last=ago(minutes=5)))]
    )
    assert explain_job(NoSuchJob("team", "lm", tuple(events), now=objects.NOW)).headline == (
        f"job lm not found in namespace team: a job of this name completed at {ago(minutes=5)}, "
        "and was deleted since, by its ttl or by hand"
    )
    later_pod = NoSuchJob("team", "lm", tuple(events), leftovers=(("pod", pod(0)),))
    assert explain_job(later_pod).headline == (
        "job lm not found in namespace team: it was deleted, and 1 pod still terminates"
    )
    metadata = {
        **pod(0)["metadata"],
        "deletionTimestamp": ago(minutes=5),
        "finalizers": ["their.test/keep"],
    }
    leftovers = (("pod", {**pod(0), "metadata": metadata}),)
    assert explain_job(NoSuchJob("team", "lm", now=objects.NOW, leftovers=leftovers)).headline == (
        "job lm not found in namespace team: it is deleted, and finalizer their.test/keep has kept "
        "pod lm-w-0-0-abcd0 for 5m"
    )


def test_events_of_other_jobs_are_ignored() -> None:
    text = (
        'Error creating: pods "lm-w-0-0-x7k2p" is forbidden: exceeded quota: few, requested: a, '
        "used: b, limited: c"
    )
    job = snapshot(
        jobset(1),
        events=(
            job_event("FailedCreate", text, last=ago(hours=1)),
            event("Job", "lm-w-0-w-0", "FailedCreate", text),
            event("Job", "lm-small-w-0", "FailedCreate", text),
        ),
    )
    assert job.events == ()


def test_events_of_a_thousand_pods_fold_into_one() -> None:
    texts = tuple(
        event("Pod", f"lm-w-0-{host}-abcd0", "FailedScheduling", NOTHING_FITS)
        for host in range(1000)
    )
    (folded,) = snapshot(jobset(1000), events=texts).events
    assert (folded["count"], len(folded["names"])) == (1000, 8)


def test_leader_verdict_has_precedence_over_that_of_a_host() -> None:
    job = snapshot(
        jobset(2, status=ended("Failed")),
        over(0, 83, message=farewell(83, "rank 0 raised: X")),
        over(1, 81, message=farewell(81, "the leader is gone")),
    )
    assert explain_job(job).headline == "lm failed: crash (exit 83): rank 0 raised: X"


def test_memory_of_the_rank_that_was_killed_is_a_fact() -> None:
    """The leader's log has it, although the verdict is that of the termination messages."""
    killed = judged(137, "rank 1 was killed by SIGKILL", rank=1)
    memory = RankMemory(1, 1, 0.5, 0.9, 8.0)
    job = snapshot(
        jobset(2, status=ended("Failed")),
        over(0, 137, message=farewell(137, "rank 1 was killed by SIGKILL", rank=1)),
        records=(beat(), dataclasses.replace(killed, memory=memory)),
    )
    fact = "most memory of rank 1: process 0.5 GiB, host 1: 0.9 of 8 GiB (11 %)"
    assert fact in explain_job(job).facts


def test_verdict_of_earlier_attempt_is_not_current() -> None:
    job = snapshot(
        jobset(1),
        pod(0),
        records=(beat(-30), judged(82, "rank 1 in data", at=-20), beat(-5, attempt=2)),
    )
    assert job.report.attempt_end is None
    assert [end.attempt for end in job.report.earlier_ends] == [1]


def test_every_situation_has_a_meaning_and_is_documented() -> None:
    sources = (ROOT / "jaxlaunch" / "launcher" / "diagnose" / "explain").glob("*.py")
    code = "".join(path.read_text() for path in sources if path.name != "situations.py")
    assert set(re.findall(r'(?:Answer|waits)\(\s*"([a-z-]+)"', code)) <= SITUATIONS.keys()
    assert {explain_job(job).situation for job, _ in CASES.values()} <= SITUATIONS.keys()
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert situations.render_page(page) == page


def test_missing_code_configmap_is_created_by_submitting_again() -> None:
    message = (
        'MountVolume.SetUp failed for volume "code" : configmap "jaxlaunch-029450a6a2bf" not found'
    )
    waiting_pod = waiting(0, "ContainerCreating")
    explanation = explain_job(
        snapshot(
            jobset(1),
            waiting_pod,
            events=(event("Pod", waiting_pod["metadata"]["name"], "FailedMount", message),),
        )
    )
    assert explanation.situation == "configmap-missing"
    assert explanation.next_move is not None and explanation.next_move.startswith(
        "`launcher submit -n team lm.yaml hosts=2` creates it"
    )


def test_missing_gang_secret_is_created_by_submitting_again() -> None:
    message = 'MountVolume.SetUp failed for volume "gang-secret" : secret "lm-gang" not found'
    waiting_pod = waiting(1, "ContainerCreating")
    events = (event("Pod", waiting_pod["metadata"]["name"], "FailedMount", message),)
    explanation = explain_job(snapshot(jobset(2), pod(0), waiting_pod, events=events))
    assert explanation.headline.endswith("host 1 cannot start: Secret lm-gang does not exist")
    assert (explanation.next_move or "").startswith(
        "`launcher submit -n team lm.yaml hosts=2 --replace` creates one for all hosts"
    )
