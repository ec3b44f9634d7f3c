"""`explain`, `status`, `logs` and `list` under every single right taken away: unread is not empty."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.jobs.status.job_status import State, exit_code
from jaxlaunch.launcher.kubernetes import kinds
from jaxlaunch.launcher.kubernetes.kinds import (
    CLUSTER_QUEUES,
    EVENTS,
    JOBS,
    JOBSETS,
    LOCAL_QUEUES,
    PODS,
    WORKLOADS,
    Kind,
)
from jaxlaunch.launcher.kubernetes.labels import JOB_LABEL
from jaxlaunch.records import log_lines
from tests.found import shows
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Handler, Server
from tests.launcher.invoke import CommandResult, launcher
from tests.launcher.objects import BEGUN, ended, job_object, jobset, pending, pod, workload

OLD = {"metadata": {"creationTimestamp": "2020-01-01T00:00:00Z"}}
QUEUED = workload(objects.condition("QuotaReserved", "False", "Pending", "later"))
EVICTED = workload(
    objects.condition(
        "Evicted",
        "True",
        "Preempted",
        "Preempted to accommodate a workload (UID: x, JobUID: 0123-4567)",
    ),
    objects.condition(
        "QuotaReserved",
        "False",
        "Pending",
        "insufficient unused quota for cpu in flavor h100, 2 more needed",
    ),
)
FAILED = [objects.over(host, 65, message=objects.farewell(65, "bad data")) for host in range(2)]
OOM = [objects.over(host, 137, "OOMKilled") for host in range(2)]
CREATING = [objects.waiting(host, "ContainerCreating") for host in range(2)]
DRAINED = objects.condition(
    "DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: evicting"
)
LATE = job_object(
    "lm-w-0",
    objects.condition("Failed", "True", "DeadlineExceeded", "was active longer than deadline"),
)
ON = "lm-w-0-0-abcd0"  # the pod of host 0
GENERATION = {"restarts": 3, "restartsCountTowardsMax": 3}
JOB = (JOBS, job_object())
SAVING = (JOBS, apiserver.merge_patch(job_object(), {"status": {"terminating": 2}}))
LOG = Kind("", "", "log", "")  # not an object: what host 0 writes
QUEUES = (LOCAL_QUEUES, objects.local_queue())
SHARED = (CLUSTER_QUEUES, objects.cluster_queue())
HELD = (CLUSTER_QUEUES, objects.cluster_queue(active=False, stopPolicy="Hold"))

Things = list[tuple[kinds.Kind, objects.Object]]


def running(*hosts: int, **parts: Any) -> Things:
    return [(PODS, pod(host, **parts)) for host in hosts]


def old(**keys: Any) -> tuple[kinds.Kind, objects.Object]:
    return JOBSETS, apiserver.merge_patch(jobset(**keys), OLD)


def event(kind: str, name: str, reason: str, message: str) -> tuple[kinds.Kind, objects.Object]:
    return EVENTS, objects.event(kind, name, reason, message, last="2099-01-01T00:00:00Z")


def leader(**fields: Any) -> tuple[kinds.Kind, objects.Object]:
    """What host 0's log says, in place of training at step 40."""
    return LOG, {"text": log_lines.format_line(objects.beat(**fields))}


# What there is of a job, in each of several situations. Its queue is called research, the
# ClusterQueue shared.
SITUATIONS: dict[str, Things] = {
    "not there": [],
    "runs": [(JOBSETS, jobset()), JOB, *running(0, 1)],
    "gathers": [
        (JOBSETS, jobset()),
        JOB,
        *running(0, 1),
        leader(stage="gather", missing=[1], missing_count=1),
    ],
    "hangs": [(JOBSETS, jobset()), JOB, *running(0, 1), leader(overdue="rank 1 is in step for 9m")],
    "again": [
        (JOBSETS, jobset(status=GENERATION)),
        JOB,
        *running(0, 1, generation=3),
        leader(generation=3),
    ],
    "one pod": [old(), JOB, *running(0)],
    "no pod": [old(), JOB],
    "rejected": [
        old(),
        JOB,
        event(
            "Job", "lm-w-0", "FailedCreate", "exceeded quota: q, requested: a, used: b, limited: c"
        ),
    ],
    "no job": [old()],
    "no service": [
        old(),
        event("JobSet", "lm", "HeadlessServiceCreationFailed", "services is full"),
    ],
    "pending": [(JOBSETS, jobset(1)), JOB, (PODS, pending(0, "0/3 nodes are available"))],
    "no claim": [
        (JOBSETS, jobset(1)),
        JOB,
        (PODS, pending(0, 'persistentvolumeclaim "data" not found')),
    ],
    "growing": [
        (JOBSETS, jobset(1)),
        JOB,
        (PODS, pending(0, "0/3 nodes")),
        event("Pod", ON, "TriggeredScaleUp", "1->2"),
    ],
    "no image": [
        (JOBSETS, jobset(1)),
        JOB,
        (PODS, objects.waiting(0, "ErrImagePull", "not found")),
    ],
    "starts": [old(), JOB, *((PODS, one) for one in CREATING)],
    "mounts": [
        old(),
        JOB,
        *((PODS, one) for one in CREATING),
        event("Pod", ON, "FailedMount", "no such volume"),
    ],
    "node lost": [
        (JOBSETS, jobset()),
        JOB,
        *running(0, 1, conditions=[objects.condition("Ready", "False")]),
        event("Pod", ON, "NodeNotReady", "Node is not ready"),
    ],
    "drained": [
        (JOBSETS, jobset()),
        JOB,
        *((PODS, objects.over(host, 143, conditions=[DRAINED])) for host in (0, 1)),
    ],
    "restarts": [(JOBSETS, jobset(status={"restarts": 1})), JOB],
    "queued": [old(queue="research", suspend=True), (WORKLOADS, QUEUED), QUEUES, SHARED],
    "queue stopped": [old(queue="research", suspend=True), (WORKLOADS, QUEUED), QUEUES, HELD],
    "no queue": [old(queue="research", suspend=True), (WORKLOADS, QUEUED)],
    "preempted": [
        old(queue="research", suspend=True),
        (WORKLOADS, EVICTED),
        QUEUES,
        SHARED,
        (
            JOBSETS,
            apiserver.merge_patch(jobset(), {"metadata": {"name": "big", "uid": "0123-4567"}}),
        ),
    ],
    "evicting": [
        old(queue="research", suspend=True),
        (WORKLOADS, EVICTED),
        QUEUES,
        SHARED,
        *running(0, 1),
    ],
    "unseen by Kueue": [old(queue="research", suspend=True)],
    "stopped in its queue": [
        old(queue="research", suspend=True),
        (WORKLOADS, workload(active=False)),
    ],
    "stopped": [(JOBSETS, jobset(suspend=True))],
    "stopping": [(JOBSETS, jobset(suspend=True)), SAVING, *running(0, 1)],
    "deleting": [
        (JOBSETS, apiserver.merge_patch(jobset(), {"metadata": {"deletionTimestamp": BEGUN}})),
        JOB,
        *running(0, is_leaving=True),
    ],
    "done": [
        (JOBSETS, jobset(status=ended("Completed"))),
        JOB,
        *((PODS, objects.over(host, 0)) for host in (0, 1)),
    ],
    "failed": [
        (JOBSETS, jobset(status=ended("Failed", "FailJobSet", "a job failed"))),
        JOB,
        *((PODS, one) for one in FAILED),
    ],
    "oom": [
        (JOBSETS, jobset(status=ended("Failed", "FailJobSet", "a job failed"))),
        JOB,
        *((PODS, one) for one in OOM),
    ],
    "late": [(JOBSETS, jobset(status=ended("Failed", "FailedJobs", "a job failed"))), (JOBS, LATE)],
}
RIGHTS = (
    "get jobsets",
    "list jobsets",
    "list pods",
    "get pods/log",
    "list events",
    "list jobs",
    "list workloads",
    "list nodes",
    "get localqueues",
    "get clusterqueues",
)
VERBS = ("explain", "status", "logs", "list")
# What `explain` says first without a right that is true, although more is known with it: (right,
# situation).
LESS = {
    (
        "list jobsets",
        "preempted",
    ): "was preempted by another job and waits: queue research .* is full",
    ("list pods", "evicting"): "was preempted by another job and waits",
    ("list pods", "done"): "is done: all of # hosts, in #m$",
    ("get pods/log", "done"): "is done: all of # hosts, in #m$",
    ("get pods/log", "one pod"): "is being created: # of # pods exist$",
    ("list events", "growing"): "waits: its host is unschedulable",
    ("list nodes", "pending"): "waits: its host is unschedulable: #/# nodes are available$",
    ("list nodes", "growing"): "waits",
    (
        "get localqueues",
        "queued",
    ): "waits: queue research: later$",  # later is what Kueue itself says
    ("get localqueues", "queue stopped"): "waits: queue research: later$",
    ("get localqueues", "preempted"): "was preempted by job big and waits: queue research is full",
    (
        "get clusterqueues",
        "queue stopped",
    ): r"waits: queue research \(ClusterQueue shared\): later$",
    (
        "get clusterqueues",
        "preempted",
    ): "was preempted by job big and waits: queue research .* is full",
}
# Only the leader's log tells that hosts that run wait for each other, or for a pod that is made
# again.
HIDDEN = ("get pods/log", "gathers"), ("get pods/log", "one pod")
NOT_KNOWN = ("Unknown", "Suspended")  # states that say of themselves that something was not read

Call = Callable[..., CommandResult]


@pytest.fixture
def call(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Call:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    return lambda verb, *options: launcher(
        capsys, monkeypatch, verb, *(() if verb == "list" else ("lm",)), *options
    )


def put(server: Server, situation: str) -> None:
    """What there is of the job, and the log of its leader where it runs."""
    things = SITUATIONS[situation]
    records = next(
        (one["text"] for kind, one in things if kind is LOG), log_lines.format_line(objects.beat())
    )
    for kind, one in things:
        if kind is LOG:
            continue
        obj = apiserver.merge_patch(one, {"metadata": {"namespace": "team"}})
        if kind not in (LOCAL_QUEUES, CLUSTER_QUEUES):
            obj = apiserver.merge_patch(obj, {"metadata": {"labels": {JOB_LABEL: "lm"}}})
        if kind is JOBS:
            obj["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] = "lm"
        place = "team" if kind.namespaced else None
        made = server.put(kind.path(place, one["metadata"]["name"]), obj)
        if kind is JOBSETS:
            made["metadata"]["uid"] = one["metadata"]["uid"]
        if kind is PODS and "nodeName" in one["spec"]:
            server.put(PODS.path("team", one["metadata"]["name"], "log"), {"text": f"{records}\n"})


def forbid(server: Server, right: str) -> None:
    """Refuses every request that needs the right, as an API server does a user who does not have it."""
    verb, kind = right.split()

    def fault(handler: Handler) -> bool:
        if needs(right, handler.at, handler.query):
            handler.fail(
                403, "Forbidden", f'{kind} is forbidden: User "me" cannot {verb} resource "{kind}"'
            )
        return needs(right, handler.at, handler.query)

    server.on("GET", "", *[fault] * 50)


def needs(right: str, path: str, query: Mapping[str, str]) -> bool:
    """Whether a user needs this right for a request."""
    verb, kind = right.split()
    if path.endswith("/log"):
        return kind == "pods/log"
    *_, above, last = path.split("/")
    return (last if verb == "list" else above) == kind


def plain(said: str) -> str:
    """Without the ages, which grow from call to call."""
    return re.sub(r"\d+", "#", said)


def first_line(verb: str, left: CommandResult) -> str:
    """What is read first, without the job's name and without waiting; of a table what is said above it."""
    told = plain(left.out if verb in ("explain", "status") and left.out else left.err).splitlines()
    lines = [
        line for line in told if "waiting for an answer" not in line
    ]  # on a machine that is busy
    return lines[0].removeprefix("lm").removeprefix(": ").strip() if lines else ""


def state(left: CommandResult) -> str:
    """The state in the line of the job, `status` may have its result before that."""
    line = next((line for line in left.out.splitlines() if line.startswith("lm")), "")
    return (line.split() + ["", ""])[1]


FULL: dict[tuple[str, str], tuple[CommandResult, list[tuple[str, str, dict[str, str]]]]] = {}


def with_all_rights(server: Server, call: Call, verb: str, situation: str) -> CommandResult:
    """What the verb says of the situation, and, kept beside it, the requests that it took."""
    if (verb, situation) not in FULL:
        server.requests.clear()
        left = call(verb)
        FULL[verb, situation] = left, list(server.requests)
    return FULL[verb, situation][0]


@pytest.mark.parametrize("right", RIGHTS)
@pytest.mark.parametrize("verb", VERBS)
def test_the_first_line_without_a_right_is_true_or_says_what_may_not_be_read(
    server: Server, call: Call, verb: str, right: str
) -> None:
    for situation in SITUATIONS:
        server.objects.clear()
        server.faults.clear()
        put(server, situation)
        full = with_all_rights(server, call, verb, situation)
        if not any(needs(right, path, query) for _, path, query in FULL[verb, situation][1]):
            continue
        forbid(server, right)
        left = call(verb)
        said, usual = first_line(verb, left), first_line(verb, full)
        is_said = f"{right.split()[1]} is forbidden" in said
        if verb in ("status", "list") and left.out:
            known = state(left)
            assert known in (state(full), *NOT_KNOWN) or (right, situation) in HIDDEN, (
                situation,
                said,
                usual,
            )
        if verb == "explain":
            true = LESS.get((right, situation))
            assert said == usual or is_said or (true and re.match(true, said)), (
                situation,
                said,
                usual,
            )
        elif verb == "logs":
            assert said == usual or is_said, (situation, said, usual)
        elif verb == "list":
            assert plain(left.out + left.err) == plain(full.out + full.err) or is_said, (
                situation,
                said,
                usual,
            )


def test_logs_that_cannot_be_read_are_an_error(server: Server, call: Call) -> None:
    put(server, "runs")
    forbid(server, "get pods/log")
    left = call("logs")
    assert left.code == 3 and "the log of pod lm-w-0-0-abcd0 cannot be read" in left.err


def test_a_list_without_the_right_to_pods_still_lists(server: Server, call: Call) -> None:
    put(server, "runs")
    forbid(server, "list pods")
    left = call("list")
    assert left.out.splitlines()[1].split()[:3] == ["lm", "Unknown", "?/2"]
    assert left.err.startswith("launcher: pods could not be read: ")
    shows("`pods could not be read: …`", left.err)


def test_a_list_of_jobs_whose_logs_may_not_be_read_says_so_once(server: Server, call: Call) -> None:
    put(server, "runs")
    for kind, path in ((JOBSETS, "lm"), (PODS, "lm-w-0-0-abcd0")):
        one = json.loads(json.dumps(server.objects[kind.path("team", path)]).replace("lm", "zz"))
        server.put(kind.path("team", path.replace("lm", "zz")), one)

    def fault(handler: Handler) -> bool:
        if is_log := handler.at.endswith("/log"):
            pod = handler.at.split("/")[-2]
            handler.fail(
                403,
                "Forbidden",
                f'pods "{pod}" is forbidden: User "me" cannot get resource "pods/log"',
            )
        return is_log

    server.on("GET", "", *[fault] * 50)
    left = call("list")
    assert len(left.out.splitlines()) == 3
    assert server.count("GET", "/log") == 2 and left.err.count("could not be read") == 1


def test_a_log_is_followed_although_the_server_fails_once(
    server: Server, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(server, "runs")
    followed: list[str] = []
    monkeypatch.setattr("jaxlaunch.launcher.kubernetes.transport.MAX_TRIES", 1)
    monkeypatch.setattr(
        "jaxlaunch.launcher.jobs.logs.follow.follow_logs",
        lambda cluster, namespace, name, **_: followed.append(name),
    )

    def broken(code: int) -> None:
        def fault(handler: Handler) -> bool:
            if is_pods := handler.at.endswith("/pods"):
                handler.fail(code, "Fault", f"fault {code}")
            return is_pods

        server.faults.clear()
        server.on("GET", "", *[fault] * 50)

    broken(503)
    assert (call("logs", "-f").code, followed) == (0, ["lm"])
    assert call("logs").code == 3
    broken(403)
    assert (call("logs", "-f").code, followed) == (3, ["lm"])


def test_the_exit_code_of_a_job_whose_pods_may_not_be_read_is_that_of_its_condition() -> None:
    message = (
        "Container main for pod team/lm-w-0-0-x failed with exit code 65 matching FailJob "
        "rule at index 1"
    )
    failed = job_object("lm-w-0", objects.condition("Failed", "True", "PodFailurePolicy", message))
    assert (
        exit_code(objects.snapshot(jobset(status=ended("Failed")), jobs=(failed,)), State.FAILED)
        == 65
    )
