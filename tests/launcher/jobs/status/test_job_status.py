"""The state of a job with its numbers, from objects of the API to `list` and `status`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.cli.list import format_table
from jaxlaunch.launcher.cli.status import describe_job
from jaxlaunch.launcher.client.job_view import ClusterView
from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.jobs.exec import rank_pod
from jaxlaunch.launcher.jobs.status import collect, hosts
from jaxlaunch.launcher.jobs.status.job_status import State, derive_status
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.labels import REPLICATED_LABEL
from jaxlaunch.launcher.kubernetes.objects import find_condition as read_condition
from jaxlaunch.launcher.kubernetes.objects import format_age
from jaxlaunch.launcher.kubernetes.resources import fit_nodes
from jaxlaunch.launcher.manifests.jobset import prepare
from tests.launcher import objects
from tests.launcher.objects import (
    Object,
    beat,
    condition,
    farewell,
    jobset,
    judged,
    node,
    over,
    past,
    pending,
    pod,
    snapshot,
    waiting,
    workload,
)

QUEUED = {"queue": "research", "suspend": True}

STATES: dict[str, tuple[Snapshot, State]] = {
    "held by its queue": (snapshot(jobset(2, **QUEUED), workload=workload()), State.QUEUED),
    "held by its queue, ending": (
        snapshot(jobset(1, **QUEUED), pod(0), workload=workload()),
        State.QUEUED,
    ),
    "stopped": (snapshot(jobset(2, suspend=True)), State.STOPPED),
    "stopping": (snapshot(jobset(2, suspend=True), pod(0), over(1, 80)), State.STOPPING),
    "stopped in its queue": (
        snapshot(jobset(2, **QUEUED), workload=workload(active=False)),
        State.STOPPED,
    ),
    "about to be stopped in its queue": (
        snapshot(jobset(1, queue="research"), pod(0), workload=workload(active=False)),
        State.STOPPING,
    ),
    "without pods": (snapshot(jobset(2)), State.CREATING),
    "with half its pods": (snapshot(jobset(2), pod(0)), State.CREATING),
    "without nodes": (snapshot(jobset(2), pod(0), pending(1)), State.PENDING),
    "without images": (snapshot(jobset(2), pod(0), waiting(1, "ErrImagePull")), State.STARTING),
    "gathering": (
        snapshot(jobset(1), pod(0), records=(beat(stage="gather", missing=[1]),)),
        State.GATHERING,
    ),
    "running": (snapshot(jobset(1), pod(0), records=(beat(),)), State.RUNNING),
    "failed, and held": (snapshot(jobset(1), pod(0), records=(beat(stage="hold"),)), State.HELD),
    "failed, and no longer held": (
        snapshot(jobset(1), over(0, 83), records=(beat(stage="hold"),)),
        State.RESTARTING,
    ),
    "of another tool": (
        snapshot(
            objects.foreign(), *(pod(host, part="part", container="work") for host in range(6))
        ),
        State.RUNNING,
    ),
    "between generations": (
        snapshot(jobset(1, status={"restarts": 1}), over(0, 83)),
        State.RESTARTING,
    ),
    "between generations, all pods gone": (
        snapshot(jobset(1, status={"restarts": 1})),
        State.RESTARTING,
    ),
    "with a pod that ended, before JobSet saw it": (
        snapshot(jobset(1), over(0, 83)),
        State.RESTARTING,
    ),
    "with one of two pods failed, before JobSet saw it": (
        snapshot(
            jobset(2, restarts={"in_place": 0}),
            pod(0),
            over(1, 137),
            records=(beat(phase="compile"),),
        ),
        State.RESTARTING,
    ),
    "with one of two pods lost, which is replaced alone": (
        snapshot(jobset(2), pod(0), over(1, 137), records=(beat(phase="compile"),)),
        State.GATHERING,
    ),
    "with one of two pods lost, after a verdict of the whole gang": (
        snapshot(jobset(2), pod(0), over(1, 83), records=(beat(phase="compile"),)),
        State.RESTARTING,
    ),
    "with one of two pods drained, which left alone": (
        snapshot(
            jobset(2),
            pod(0),
            over(1, 143, message=farewell(80, "stopped", attempt=1)),
            records=(beat(),),
        ),
        State.GATHERING,
    ),
    "with the pod of the leader lost": (snapshot(jobset(2), pod(1), records=()), State.GATHERING),
    "with a spare in the place of a lost host": (
        snapshot(jobset(2, spares=1), pod(0), pod(2), records=(beat(attempt=2, members="0,2"),)),
        State.RUNNING,
    ),
    "with all hosts done but one that was lost": (
        snapshot(
            jobset(2, spares=1),
            over(0, 0),
            over(1, 143),
            over(2, 0),
            records=(beat(attempt=2, members="0,2"),),
        ),
        State.RUNNING,
    ),
    "with the pod of the leader that left, and its log with it": (
        snapshot(jobset(2), over(0, 143, message=farewell(80, "stopped")), pod(1)),
        State.GATHERING,
    ),
    "with one of two hosts done, whose Job deletes the other": (
        snapshot(jobset(2), over(0, 0), records=(beat(),)),
        State.RUNNING,
    ),
    "with pods that all did well, before JobSet saw it": (
        snapshot(jobset(1), over(0, 0)),
        State.RUNNING,
    ),
    "again": (
        snapshot(jobset(1, status={"restarts": 1}), over(0, 83), pod(0, generation=1)),
        State.RUNNING,
    ),
    "done": (snapshot(jobset(1, status=objects.ended("Completed")), over(0, 0)), State.DONE),
    "failed": (snapshot(jobset(1, status=objects.ended("Failed")), over(0, 64)), State.FAILED),
    "deleted while it ran": (
        snapshot(
            jobset(1)
            | {"metadata": jobset(1)["metadata"] | {"deletionTimestamp": objects.ago(seconds=1)}},
            pod(0),
        ),
        State.DELETING,
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_state(case: str) -> None:
    job, state = STATES[case]
    assert derive_status(job).state is state


def complete_snapshot() -> Snapshot:
    """A job that has been through a lot."""
    return snapshot(
        jobset(2, status={"restarts": 2, "restartsCountTowardsMax": 1}, queue="research"),
        pod(0, generation=2),
        pod(1, generation=2, node="node-2"),
        records=(
            past(82, "rank 1 in data", attempt=2, generation=1),
            beat(
                attempt=3,
                generation=2,
                step=130,
                committed=120,
                committed_at=objects.NOW.timestamp() - 30,
                restarts={"preempted": 1, "hang": 1},
                preempted=1,
                seconds={"step": 300.0, "lost_work": 60.0, "compile": 40.0},
                metrics={"learning_rate": 0.001, "note": "warm", "loss": 2.25, "grad_norm": None},
            ),
        ),
    )


def test_status_has_all_numbers() -> None:
    status = derive_status(complete_snapshot())
    assert (status.hosts, status.ready, status.generation, status.attempt) == (2, 2, 2, 3)
    assert (status.phase, status.step, status.committed, status.committed_age_s) == (
        "step",
        130,
        120,
        30.0,
    )
    assert status.goodput == 0.75
    assert (
        status.restart_counts.total,
        status.restart_counts.charged,
        status.restart_counts.limit,
    ) == (2, 1, 5)
    assert status.restarts == {"preempted": 1, "hang": 1}
    assert status.verdict is not None and status.verdict["cause"] == "hang"
    assert (status.queue, status.nodes, status.age_s) == ("research", ("node-1", "node-2"), 600.0)


def test_screen_begins_with_verdict() -> None:
    assert list(describe_job(ClusterView(complete_snapshot()))) == [
        "hang (82): rank 1 in data",
        "lm: Running (generation 2, attempt 3)",
        "  hosts      2 of 2 ready, queue research",
        "  phase      step 130",
        "  restarts   2, of which 0 in the same pods; 1 of 5 (restarts.crash); attempts ended by "
        "hang 1, preempted 1; 1 of 20 free restarts in a row without a newly saved step",
        "  checkpoint step 120, 30s ago",
        "  goodput    75.0%",
        "  metrics    loss 2.25, learning_rate 0.001",
        "  age        10m",
    ]


NOW_S = objects.NOW.timestamp()


@pytest.mark.parametrize(
    ("fields", "lines"),
    [
        ({"phase": "compile", "since": NOW_S - 42, "step": None}, ["phase compile for 42s"]),
        ({"phase": "save", "since": NOW_S - 7}, ["phase save for 7s, at step 40"]),
        ({"phase": "save", "since": None}, ["phase save, at step 40"]),
        ({"phase": None}, ["phase step 40"]),
        ({"committed": 30}, ["phase step 40", "checkpoint step 30, before these pods"]),
        ({"committed": 30, "committed_at": NOW_S - 9}, ["checkpoint step 30, 9s ago"]),
        (
            {"restart": {"start": 1.5, "first_step": 2.25, "import": 0.004}},
            ["last start 3.75 s until its first step: start 1.50, first_step 2.25"],
        ),
    ],
    ids=str,
)
def test_screen_has_phase_checkpoint_and_last_start(
    fields: dict[str, Any], lines: list[str]
) -> None:
    job = snapshot(jobset(1), pod(0), records=(beat(**fields),))
    rows = [" ".join(line.split()) for line in describe_job(ClusterView(job))]
    assert "hosts 1 of 1 ready" in rows
    assert [row for row in rows if row in lines] == lines


def test_screen_names_reason_of_wait() -> None:
    job = snapshot(jobset(1), waiting(0, "InvalidImageName"))
    assert (
        "  why        waits: its host cannot pull image registry.example/train:1: that is not a "
        "valid image name" in list(describe_job(ClusterView(job)))
    )


def test_oom_killed_container_is_named() -> None:
    job = snapshot(
        jobset(2, status=objects.ended("Failed")),
        over(0, 81, message=farewell(81, "host 1 is gone")),
        over(1, 137, "OOMKilled"),
    )
    first, _, why, *_ = describe_job(ClusterView(job))
    assert first == "lost (81): host 1 is gone"
    assert why.startswith("  why        failed: host 1 was OOMKilled")


def test_table_layout() -> None:
    jobs = [
        derive_status(complete_snapshot()),
        derive_status(
            snapshot(
                jobset(
                    2,
                )
            )
        ),
    ]
    rows = [(job.name, [job]) for job in jobs]
    assert format_table(rows, with_namespace=False, is_wide=False) == [
        "NAME   STATE      HOSTS   STEP   RESTARTS   AGE",
        "lm     Running    2/2     130    2          10m",
        "lm     Creating   0/2     -      0          10m",
    ]
    wide = format_table(rows, with_namespace=True, is_wide=True)
    assert wide[1].split() == [
        "team",
        "lm",
        "Running",
        "2/2",
        "130",
        "2",
        "10m",
        "step",
        "120",
        "75.0%",
        "2.25",
        "research",
        "node-1,node-2",
    ]


def test_total_steps_come_from_train_block() -> None:
    train = {"task": "classify", "steps": 9, "checkpoint": {"path": "/ckpt/lm"}}
    job = snapshot(
        jobset(1, train=train, command=None, volumes=[{"claim": "c", "path": "/ckpt"}]),
        pod(0),
        records=(beat(),),
    )
    assert derive_status(job).steps == 9


LOSSES: dict[str, Snapshot] = {
    "a verdict that is newer than the heartbeat": snapshot(
        jobset(2), pod(0), pod(1), records=(beat(phase="compile"), judged(81, "host 1 was lost"))
    ),
    "a pod that failed": snapshot(
        jobset(2), pod(0), over(1, 137), records=(beat(phase="compile"),)
    ),
    "a pod that is deleted": snapshot(
        jobset(2), pod(0), pod(1, is_leaving=True), records=(beat(phase="compile"),)
    ),
    "a pod that is evicted": snapshot(
        jobset(2),
        pod(0),
        pod(
            1,
            conditions=[
                condition("Ready"),
                condition("DisruptionTarget", reason="EvictionByEvictionAPI"),
            ],
        ),
        records=(beat(phase="compile"),),
    ),
    "a node that does not answer": snapshot(
        jobset(2),
        pod(0),
        pod(1, conditions=[condition("Ready", "False")]),
        records=(beat(phase="compile"),),
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_stale_phase_is_not_shown(loss: str) -> None:
    job = LOSSES[loss]
    status = derive_status(job)
    assert (status.phase, status.phase_s) == (None, None)
    assert not any("compile" in line for line in describe_job(ClusterView(job)))


def test_phase_of_next_attempt_is_shown() -> None:
    records = judged(81, "host 1 was lost"), beat(attempt=2, phase="compile")
    assert derive_status(snapshot(jobset(1), pod(0), records=records)).phase == "compile"
    gathering = past(81, "host 1 was lost"), beat(attempt=1, generation=0, stage="gather")
    assert derive_status(snapshot(jobset(1), pod(0), records=gathering)).phase == "rendezvous"


def test_json_has_plain_fields() -> None:
    fields = json.loads(json.dumps(derive_status(complete_snapshot()).to_json()))
    assert fields["state"] == "Running"
    assert fields["restarts"] == {
        "total": 2,
        "charged": 1,
        "limit": 5,
        "by_cause": {"preempted": 1, "hang": 1},
    } | {
        "preempted": 1,
        "preempted_limit": 20,
    }


@pytest.mark.parametrize(
    ("pods", "code"),
    [
        ((over(0, 64, message=farewell(64)),), 64),
        ((over(0, 42),), 42),
        ((), 1),
        ((over(0, 81, message=farewell(81)), over(1, 83, message=farewell(83))), 83),
        (
            (
                over(
                    0,
                    0,
                    message=farewell(0),
                    beside=[{"name": "proxy", "state": {"terminated": {"exitCode": 7}}}],
                ),
            ),
            7,
        ),
    ],
)
def test_exit_code_of_failed_job(pods: tuple[Any, ...], code: int) -> None:
    assert derive_status(snapshot(jobset(2, status=objects.ended("Failed")), *pods)).code == code


def test_exit_code_of_done_and_running_job() -> None:
    assert derive_status(snapshot(jobset(1, status=objects.ended("Completed")))).code == 0
    assert derive_status(snapshot(jobset(1), pod(0))).code is None


def test_verdict_updates_committed_step() -> None:
    end = dataclasses.replace(judged(80, "stopped", step=130), committed=130)
    job = snapshot(
        jobset(1, suspend=True),
        over(0, 80, message=farewell(80)),
        records=(beat(committed=100), end),
    )
    assert derive_status(job).committed == 130


def test_restarts_of_unknown_cause_count() -> None:
    status = derive_status(snapshot(jobset(1, status={"restarts": 2}), pod(0, generation=2)))
    assert (status.restart_counts.total, status.restarts) == (2, None)


def test_hosts_are_numbered_across_slices() -> None:
    job = jobset(2, slices=3)
    pods = [pod(host, slice=part) for part in range(3) for host in range(2)]
    assert hosts.count_hosts(job) == 6
    assert [host.number for host in hosts.newest_hosts(job, pods)] == [0, 1, 2, 3, 4, 5]


def test_newer_pod_of_host_counts() -> None:
    old, new = pod(0), pod(0)
    new["metadata"] |= {"name": "lm-w-0-0-newer", "creationTimestamp": objects.ago(seconds=1)}
    assert [host.pod for host in hosts.newest_hosts(jobset(1), [new, old])] == ["lm-w-0-0-newer"]


@pytest.mark.parametrize(
    "text",
    ["[1]", "[" * 9_000, '{"steps": "x"}', '{"steps": -1}', '{"processes_per_host": []}', "x"],
)
def test_foreign_jobset_has_default_settings(text: str) -> None:
    job = jobset(1)
    env = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][
        0
    ].setdefault("env", [])
    env[:] = [{"name": name, "value": text} for name in (contract.TRAIN_SPEC, contract.JOB)]
    assert derive_status(snapshot(job)).steps is None
    assert hosts.initial_members(job).ranks_per_host == 1


@pytest.mark.parametrize("label", ["restart-attempt", "job-index"])
def test_pod_with_forged_label_is_no_host(label: str) -> None:
    stranger = pod(1)
    stranger["metadata"]["labels"][f"jobset.sigs.k8s.io/{label}"] = "x"
    job = snapshot(jobset(1), pod(0), stranger)
    assert [host.number for host in job.hosts] == [0]
    assert derive_status(job).ready == 1


def test_running_init_container_delays_host() -> None:
    init = [{"name": "fetch", "ready": False, "state": {"running": {}}}]
    (host,) = hosts.newest_hosts(
        jobset(1),
        [pod(0, state={"waiting": {"reason": "PodInitializing"}}, initContainerStatuses=init)],
    )
    assert (host.container, host.is_init, host.has_started) == ("fetch", True, False)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (119, "119s"),
        (120, "2m"),
        (200, "3m20s"),
        (660, "11m"),
        (10_799, "179m"),
        (10_800, "3h"),
        (18_600, "5h10m"),
        (200_000, "2d"),
    ],
)
def test_age_format(seconds: float, text: str) -> None:
    assert format_age(seconds) == text


def test_node_check_order() -> None:
    spec = {
        "nodeSelector": {"pool": "a"},
        "tolerations": [
            {"key": "gpu", "operator": "Exists"},
            {"key": "team", "value": "me", "effect": "NoSchedule"},
        ],
        "containers": [
            {"resources": {"requests": {"cpu": "4"}, "limits": {"nvidia.com/gpu": "2"}}}
        ],
        "initContainers": [{"resources": {"requests": {"cpu": "6"}}}],
    }
    labels = {"pool": "a"}
    fields = fit_nodes(
        spec,
        [
            node("other", labels={"pool": "b"}),
            node("barred", labels=labels, taints=("team=you:NoSchedule",)),
            node(
                "small", labels=labels, taints=("gpu=yes:NoSchedule",), cpu="5", nvidia_com__gpu="8"
            ),
            node(
                "good",
                labels=labels,
                taints=("team=me:NoSchedule", "hint:PreferNoSchedule"),
                cpu="6",
                nvidia_com__gpu="2",
            ),
        ],
    )
    assert (fields.total, fields.selected, fields.tolerated, fields.large) == (4, 3, 2, 1)
    assert fields.untolerated_taints == {"team=you:NoSchedule": 1}


def test_missing_condition_is_empty() -> None:
    assert read_condition({"status": {"conditions": [condition("Ready")]}}, "Done") == {}


def test_verdict_comes_from_main_container() -> None:
    sidecar = [{"name": "proxy", "ready": False, "state": {"running": {}}}]
    (host,) = hosts.newest_hosts(
        jobset(1), [over(0, 83, message=farewell(83, "it ended"), initContainerStatuses=sidecar)]
    )
    assert host.termination_report is not None and host.termination_report.verdict.code == 83


@pytest.mark.parametrize("state", [{"running": {}}, {"terminated": {"exitCode": 137}}])
def test_sidecar_does_not_hide_end(state: dict[str, Any]) -> None:
    sidecar = [{"name": "proxy", "ready": False, "state": state}]
    (host,) = hosts.newest_hosts(jobset(1), [over(0, 83, initContainerStatuses=sidecar)])
    assert not host.is_init and host.has_started and host.terminated["exitCode"] == 83


@pytest.mark.parametrize(("end", "expected"), [("Completed", "2, done"), ("Failed", "2, failed")])
def test_finished_job_is_not_unready(end: str, expected: str) -> None:
    job = objects.snapshot(objects.jobset(2, status=objects.ended(end)))
    assert f"  hosts      {expected}" in describe_job(ClusterView(job))


@pytest.mark.parametrize("status", ["Completed", "Failed"])
def test_finished_job_has_no_missing_hosts(status: str) -> None:
    job = derive_status(snapshot(jobset(2, status=objects.ended(status))))
    _, row = format_table([(job.name, [job])], False, False)
    assert row.split()[2] == "2"


# --- roles ----------------------------------------------------------------------------------------

ROLES = """
name: lm
namespace: team
image: registry.example/train:1
accelerator: {type: cpu}
jobs:
  trainer: {hosts: 2, ends: true, command: [x], needs: {sampler: started}}
  sampler: {command: [x]}
  evaluator: {may_fail: true, command: [x]}
"""


def roles_snapshot(
    *pods: Object, jobs: Sequence[Object] = (), status: Object | None = None, text: str = ROLES
) -> Any:
    file = load.read_job_text(text, may_have_roles=True)
    manifest = prepare(file, ClusterDefaults()).manifests[0]
    manifest["metadata"] |= {"uid": "1234", "creationTimestamp": objects.BEGUN}
    manifest["status"] = status or {}
    return Snapshot("team", "lm", objects.NOW, manifest, jobs=tuple(jobs), pods=pods)


def role_job(role: str, *conditions: Object) -> Object:
    job = objects.job_object(f"lm-{role}-0", *conditions)
    job["metadata"]["labels"] = {REPLICATED_LABEL: role}
    return job


FAILED_EVALUATOR = objects.over(
    0, 0, message=objects.farewell(contract.CRASH, "boom"), part="evaluator"
)
RUNNING = [objects.pod(host, part="trainer") for host in range(2)]
RUNNING_SAMPLER = objects.pod(part="sampler")


def test_role_that_may_fail_has_failed_while_the_job_runs() -> None:
    jobs = [role_job("evaluator", objects.condition("Complete"))]
    snapshot = roles_snapshot(*RUNNING, RUNNING_SAMPLER, FAILED_EVALUATOR, jobs=jobs)
    status = derive_status(snapshot)
    assert (status.state, status.role, status.name) == (State.RUNNING, None, "lm")
    assert (status.hosts, status.ready) == (4, 3)
    states = {name: role.state for name, role in status.roles.items()}
    assert states == {
        "sampler": State.RUNNING,
        "evaluator": State.FAILED,
        "trainer": State.RUNNING,
    }
    assert status.roles["evaluator"].code == contract.CRASH
    explanation = explain_job(snapshot)
    assert explanation.headline.startswith("lm (role trainer) ")
    assert any(fact.startswith("role evaluator: ") for fact in explanation.facts)


def test_commands_enter_the_role_that_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = roles_snapshot(*RUNNING, RUNNING_SAMPLER)
    monkeypatch.setattr(collect, "read_snapshot", lambda *place: snapshot)
    cluster: Any = object()
    assert rank_pod.find_pod(cluster, "team", "lm", 1, None).pod == RUNNING[1]["metadata"]["name"]
    records = {"sampler": (beat(stage="hold"),), "trainer": (beat(),)}
    snapshot = dataclasses.replace(snapshot, role_records=records)
    pod = rank_pod.find_pod(cluster, "team", "lm", None, None)
    assert pod.pod == RUNNING_SAMPLER["metadata"]["name"]


def test_job_waits_for_its_first_role_that_does_not_run() -> None:
    snapshot = roles_snapshot(objects.waiting(0, "ImagePullBackOff", part="sampler"))
    assert explain_job(snapshot).headline.startswith("lm (role sampler) ")


def test_failed_job_has_the_verdict_of_the_role_that_failed_first() -> None:
    message = "jobset failed due to one or more job failures (first failed job: lm-sampler-0)"
    failed = objects.over(
        0, contract.BAD_SPEC, message=objects.farewell(contract.BAD_SPEC, "bad"), part="sampler"
    )
    jobs = [role_job("sampler", objects.condition("Failed"))]
    # `launcher list` reads no Jobs.
    for known_jobs in (jobs, []):
        status = derive_status(
            roles_snapshot(
                *RUNNING, failed, jobs=known_jobs, status=objects.ended("Failed", message=message)
            )
        )
        assert (status.state, status.role, status.code) == (
            State.FAILED,
            "sampler",
            contract.BAD_SPEC,
        )
        assert (status.verdict or {})["message"] == "bad"
        assert status.roles["trainer"].state is State.STOPPED


def test_done_job_has_stopped_its_other_roles() -> None:
    jobs = [role_job("trainer", objects.condition("Complete"))]
    done = [objects.over(host, 0, part="trainer") for host in range(2)]
    status = derive_status(roles_snapshot(*done, jobs=jobs, status=objects.ended("Completed")))
    assert (status.state, status.role, status.code) == (State.DONE, "trainer", 0)
    assert status.roles["sampler"].state is State.STOPPED
    assert status.roles["trainer"].state is State.DONE


def test_job_is_not_done_before_all_roles_that_end_it() -> None:
    jobs = [role_job("trainer", objects.condition("Complete")), role_job("sampler")]
    done = [objects.over(host, 0, part="trainer") for host in range(2)]
    text = ROLES.replace("sampler: {command", "sampler: {ends: true, command")
    status = derive_status(roles_snapshot(*done, RUNNING_SAMPLER, jobs=jobs, text=text))
    assert (status.state, status.code) == (State.RUNNING, None)
    assert status.roles["trainer"].state is State.DONE
