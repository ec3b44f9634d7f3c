"""`explain`, `status`, `logs` and `list` without each right: unread is not empty."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
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


def running_pod(*hosts: int, **parts: Any) -> Things:
    return [(PODS, pod(host, **parts)) for host in hosts]


def old_pod(**keys: Any) -> tuple[kinds.Kind, objects.Object]:
    return JOBSETS, apiserver.merge_patch(jobset(**keys), OLD)


def event(kind: str, name: str, reason: str, message: str) -> tuple[kinds.Kind, objects.Object]:
    return EVENTS, objects.event(kind, name, reason, message, last="2099-01-01T00:00:00Z")


def leader_log(**fields: Any) -> tuple[kinds.Kind, objects.Object]:
    """What host 0's log says, in place of training at step 40."""
    return LOG, {"text": log_lines.format_line(objects.beat(**fields))}


# What there is of a job, in each of several situations. Its queue is called research, the
# ClusterQueue shared.
SITUATIONS: dict[str, Things] = {
    "not there": [],
    "runs": [(JOBSETS, jobset()), JOB, *running_pod(0, 1)],
    "gathers": [
        (JOBSETS, jobset()),
        JOB,
        *running_pod(0, 1),
        leader_log(stage="gather", missing=[1], missing_count=1),
    ],
    "hangs": [
        (JOBSETS, jobset()),
        JOB,
        *running_pod(0, 1),
        leader_log(overdue="rank 1 is in step for 9m"),
    ],
    "again": [
        (JOBSETS, jobset(status=GENERATION)),
        JOB,
        *running_pod(0, 1, generation=3),
        leader_log(generation=3),
    ],
    "one pod": [old_pod(), JOB, *running_pod(0)],
    "no pod": [old_pod(), JOB],
    "rejected": [
        old_pod(),
        JOB,
        event(
            "Job", "lm-w-0", "FailedCreate", "exceeded quota: q, requested: a, used: b, limited: c"
        ),
    ],
    "no job": [old_pod()],
    "no service": [
        old_pod(),
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
    "starts": [old_pod(), JOB, *((PODS, name) for name in CREATING)],
    "mounts": [
        old_pod(),
        JOB,
        *((PODS, name) for name in CREATING),
        event("Pod", ON, "FailedMount", "no such volume"),
    ],
    "node lost": [
        (JOBSETS, jobset()),
        JOB,
        *running_pod(0, 1, conditions=[objects.condition("Ready", "False")]),
        event("Pod", ON, "NodeNotReady", "Node is not ready"),
    ],
    "drained": [
        (JOBSETS, jobset()),
        JOB,
        *((PODS, objects.over(host, 143, conditions=[DRAINED])) for host in (0, 1)),
    ],
    "restarts": [(JOBSETS, jobset(status={"restarts": 1})), JOB],
    "queued": [old_pod(queue="research", suspend=True), (WORKLOADS, QUEUED), QUEUES, SHARED],
    "queue stopped": [old_pod(queue="research", suspend=True), (WORKLOADS, QUEUED), QUEUES, HELD],
    "no queue": [old_pod(queue="research", suspend=True), (WORKLOADS, QUEUED)],
    "preempted": [
        old_pod(queue="research", suspend=True),
        (WORKLOADS, EVICTED),
        QUEUES,
        SHARED,
        (
            JOBSETS,
            apiserver.merge_patch(jobset(), {"metadata": {"name": "big", "uid": "0123-4567"}}),
        ),
    ],
    "evicting": [
        old_pod(queue="research", suspend=True),
        (WORKLOADS, EVICTED),
        QUEUES,
        SHARED,
        *running_pod(0, 1),
    ],
    "unseen by Kueue": [old_pod(queue="research", suspend=True)],
    "stopped in its queue": [
        old_pod(queue="research", suspend=True),
        (WORKLOADS, workload(active=False)),
    ],
    "stopped": [(JOBSETS, jobset(suspend=True))],
    "stopping": [(JOBSETS, jobset(suspend=True)), SAVING, *running_pod(0, 1)],
    "deleting": [
        (JOBSETS, apiserver.merge_patch(jobset(), {"metadata": {"deletionTimestamp": BEGUN}})),
        JOB,
        *running_pod(0, is_leaving=True),
    ],
    "done": [
        (JOBSETS, jobset(status=ended("Completed"))),
        JOB,
        *((PODS, objects.over(host, 0)) for host in (0, 1)),
    ],
    "failed": [
        (JOBSETS, jobset(status=ended("Failed", "FailJobSet", "a job failed"))),
        JOB,
        *((PODS, name) for name in FAILED),
    ],
    "oom": [
        (JOBSETS, jobset(status=ended("Failed", "FailJobSet", "a job failed"))),
        JOB,
        *((PODS, name) for name in OOM),
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
# The situations of each verb: `logs` and `list` say little of why a job waits or how it ended.
FEW = (
    "not there",
    "runs",
    "again",
    "one pod",
    "no pod",
    "no job",
    "pending",
    "queued",
    "preempted",
    "evicting",
    "stopping",
    "done",
    "failed",
)
VERBS: dict[str, Iterable[str]] = {
    "explain": SITUATIONS,
    "status": SITUATIONS,
    "logs": FEW,
    "list": FEW,
}
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


def put_objects(server: Server, situation: str) -> None:
    """What there is of the job, and the log of its leader where it runs."""
    things = SITUATIONS[situation]
    records = next(
        (name["text"] for kind, name in things if kind is LOG),
        log_lines.format_line(objects.beat()),
    )
    for kind, name in things:
        if kind is LOG:
            continue
        obj = apiserver.merge_patch(name, {"metadata": {"namespace": "team"}})
        if kind not in (LOCAL_QUEUES, CLUSTER_QUEUES):
            obj = apiserver.merge_patch(obj, {"metadata": {"labels": {JOB_LABEL: "lm"}}})
        if kind is JOBS:
            obj["metadata"]["labels"]["jobset.sigs.k8s.io/jobset-name"] = "lm"
        place = "team" if kind.namespaced else None
        objects_value = server.put(kind.path(place, name["metadata"]["name"]), obj)
        if kind is JOBSETS:
            objects_value["metadata"]["uid"] = name["metadata"]["uid"]
        if kind is PODS and "nodeName" in name["spec"]:
            server.put(PODS.path("team", name["metadata"]["name"], "log"), {"text": f"{records}\n"})


def forbid_requests(server: Server, right: str) -> None:
    """Refuse every request that needs the right, as an API server does."""
    verb, kind = right.split()

    def fault(handler: Handler) -> bool:
        if needed_rights(right, handler.at, handler.query):
            handler.fail(
                403, "Forbidden", f'{kind} is forbidden: User "me" cannot {verb} resource "{kind}"'
            )
        return needed_rights(right, handler.at, handler.query)

    server.on("GET", "", *[fault] * 50)


def needed_rights(right: str, path: str, query: Mapping[str, str]) -> bool:
    """Whether a user needs this right for a request."""
    verb, kind = right.split()
    if path.endswith("/log"):
        return kind == "pods/log"
    *_, above, last = path.split("/")
    return (last if verb == "list" else above) == kind


def plain_text(text: str) -> str:
    """Replace the ages, which grow from call to call."""
    return re.sub(r"\d+", "#", text)


def first_line_without(verb: str, without: CommandResult) -> str:
    """Return the first line of the output, without the job's name and notes about waiting."""
    lines_value = plain_text(
        without.out if verb in ("explain", "status") and without.out else without.err
    ).splitlines()
    # On a machine that is busy.
    lines = [line for line in lines_value if not line.startswith("launcher: waiting for ")]
    return lines[0].removeprefix("lm").removeprefix(": ").strip() if lines else ""


def state_without(without: CommandResult) -> str:
    """The state in the line of the job, `status` may have its result before that."""
    line = next((line for line in without.out.splitlines() if line.startswith("lm")), "")
    return (line.split() + ["", ""])[1]


FULL: dict[tuple[str, str], tuple[CommandResult, list[tuple[str, str, dict[str, str]]]]] = {}


def results_with_all_rights(server: Server, call: Call, verb: str, situation: str) -> CommandResult:
    """Return the result of the verb; FULL also has the requests that it sent."""
    if (verb, situation) not in FULL:
        server.requests.clear()
        without = call(verb)
        FULL[verb, situation] = without, list(server.requests)
    return FULL[verb, situation][0]


@pytest.mark.parametrize("right", RIGHTS)
@pytest.mark.parametrize("verb", VERBS)
def test_first_line_without_right_is_honest(
    server: Server, call: Call, verb: str, right: str
) -> None:
    for situation in VERBS[verb]:
        server.objects.clear()
        server.faults.clear()
        put_objects(server, situation)
        full = results_with_all_rights(server, call, verb, situation)
        if not any(
            needed_rights(right, path, query) for _, path, query in FULL[verb, situation][1]
        ):
            continue
        forbid_requests(server, right)
        without = call(verb)
        text, usual = first_line_without(verb, without), first_line_without(verb, full)
        is_said = f"{right.split()[1]} is forbidden" in text
        if verb in ("status", "list") and without.out:
            expected = state_without(without)
            assert expected in (state_without(full), *NOT_KNOWN) or (right, situation) in HIDDEN, (
                situation,
                text,
                usual,
            )
        if verb == "explain":
            true = LESS.get((right, situation))
            assert text == usual or is_said or (true and re.match(true, text)), (
                situation,
                text,
                usual,
            )
        elif verb == "logs":
            assert text == usual or is_said, (situation, text, usual)
        elif verb == "list":
            assert (
                plain_text(without.out + without.err) == plain_text(full.out + full.err) or is_said
            ), (
                situation,
                text,
                usual,
            )


def test_unreadable_logs_are_an_error(server: Server, call: Call) -> None:
    put_objects(server, "runs")
    forbid_requests(server, "get pods/log")
    without = call("logs")
    assert without.code == 3 and "the log of pod lm-w-0-0-abcd0 cannot be read" in without.err


def test_list_without_right_to_pods(server: Server, call: Call) -> None:
    put_objects(server, "runs")
    forbid_requests(server, "list pods")
    without = call("list")
    assert without.out.splitlines()[1].split()[:3] == ["lm", "Unknown", "?/2"]
    assert without.err.startswith("launcher: pods could not be read: ")
    shows("`pods could not be read: …`", without.err)


def test_list_reports_unreadable_logs_once(server: Server, call: Call) -> None:
    put_objects(server, "runs")
    for kind, path in ((JOBSETS, "lm"), (PODS, "lm-w-0-0-abcd0")):
        name = json.loads(json.dumps(server.objects[kind.path("team", path)]).replace("lm", "zz"))
        server.put(kind.path("team", path.replace("lm", "zz")), name)

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
    without = call("list")
    assert len(without.out.splitlines()) == 3
    assert server.count("GET", "/log") == 2 and without.err.count("could not be read") == 1


def test_follow_survives_server_fault(
    server: Server, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_objects(server, "runs")
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


def test_exit_code_comes_from_condition_without_pods() -> None:
    message = (
        "Container main for pod team/lm-w-0-0-x failed with exit code 65 matching FailJob "
        "rule at index 1"
    )
    failed = job_object("lm-w-0", objects.condition("Failed", "True", "PodFailurePolicy", message))
    assert (
        exit_code(objects.snapshot(jobset(status=ended("Failed")), jobs=(failed,)), State.FAILED)
        == 65
    )
