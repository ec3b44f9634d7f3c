"""One state and the numbers beside it, over objects as the API gives them; and what list and status print of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher import hosts
from launcher.cli.list import table
from launcher.cli.status import screen
from launcher.fit import fit
from launcher.objects import age
from launcher.objects import condition as read_condition
from launcher.seen import World
from launcher.status import State, fold
from tests.launcher import objects
from tests.launcher.objects import (
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
    waiting,
    workload,
    world,
)

QUEUED = {"queue": "research", "suspend": True}

STATES: dict[str, tuple[World, State]] = {
    "held by its queue": (world(jobset(2, **QUEUED), workload=workload()), State.QUEUED),
    "held by its queue, ending": (world(jobset(1, **QUEUED), pod(0), workload=workload()), State.QUEUED),
    "stopped": (world(jobset(2, suspend=True)), State.STOPPED),
    "stopping": (world(jobset(2, suspend=True), pod(0), over(1, 80)), State.STOPPING),
    "stopped in its queue": (world(jobset(2, **QUEUED), workload=workload(active=False)), State.STOPPED),
    "about to be stopped in its queue": (
        world(jobset(1, queue="research"), pod(0), workload=workload(active=False)),
        State.STOPPING,
    ),
    "without pods": (world(jobset(2)), State.CREATING),
    "with half its pods": (world(jobset(2), pod(0)), State.CREATING),
    "without nodes": (world(jobset(2), pod(0), pending(1)), State.PENDING),
    "without images": (world(jobset(2), pod(0), waiting(1, "ErrImagePull")), State.STARTING),
    "gathering": (world(jobset(1), pod(0), words=(beat(stage="gather", missing=[1]),)), State.GATHERING),
    "running": (world(jobset(1), pod(0), words=(beat(),)), State.RUNNING),
    "of another tool": (
        world(objects.foreign(), *(pod(host, part="part", container="work") for host in range(6))),
        State.RUNNING,
    ),
    "between generations": (world(jobset(1, status={"restarts": 1}), over(0, 83)), State.RESTARTING),
    "between generations, all pods gone": (world(jobset(1, status={"restarts": 1})), State.RESTARTING),
    "with a pod that ended, before JobSet saw it": (world(jobset(1), over(0, 83)), State.RESTARTING),
    "with pods that all did well, before JobSet saw it": (world(jobset(1), over(0, 0)), State.RUNNING),
    "again": (world(jobset(1, status={"restarts": 1}), over(0, 83), pod(0, generation=1)), State.RUNNING),
    "done": (world(jobset(1, status=objects.ended("Completed")), over(0, 0)), State.DONE),
    "failed": (world(jobset(1, status=objects.ended("Failed")), over(0, 64)), State.FAILED),
    "deleted while it ran": (
        world(jobset(1) | {"metadata": jobset(1)["metadata"] | {"deletionTimestamp": objects.ago(seconds=1)}}, pod(0)),
        State.DELETING,
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_a_job_is_in_one_state(case: str) -> None:
    seen, state = STATES[case]
    assert fold(seen).state is state


def everything() -> World:
    """A job that has been through a lot."""
    return world(
        jobset(2, status={"restarts": 2, "restartsCountTowardsMax": 1}, queue="research"),
        pod(0, generation=2),
        pod(1, generation=2, node="node-2"),
        words=(
            past(82, "rank 1 in data", attempt=2, generation=1),
            beat(
                attempt=3,
                generation=2,
                step=130,
                committed=120,
                committed_at=objects.NOW.timestamp() - 30,
                restarts={"preempted": 1, "hang": 1},
                seconds={"step": 300.0, "lost_work": 60.0, "compile": 40.0},
            ),
        ),
    )


def test_everything_that_is_known_stands_in_it() -> None:
    status = fold(everything())
    assert (status.hosts, status.ready, status.generation, status.attempt) == (2, 2, 2, 3)
    assert (status.phase, status.step, status.committed, status.committed_age_s) == ("step", 130, 120, 30.0)
    assert status.goodput == 0.75
    assert (status.restarts.total, status.restarts.charged, status.restarts.budget) == (2, 1, 5)
    assert status.restarts.by_cause == {"preempted": 1, "hang": 1}
    assert status.verdict is not None and status.verdict["cause"] == "hang"
    assert (status.queue, status.nodes, status.age_s) == ("research", ("node-1", "node-2"), 600.0)


def test_the_screen_begins_with_the_verdict() -> None:
    assert list(screen(fold(everything()), everything())) == [
        "hang (82): rank 1 in data",
        "lm: Running (generation 2, attempt 3)",
        "  hosts      2 of 2 ready, queue research",
        "  phase      step 130",
        "  restarts   2, of which 1 of 5 charged; attempts ended by hang 1, preempted 1",
        "  checkpoint step 120, 30s ago",
        "  goodput    75.0%",
        "  age        10m",
    ]


def test_a_job_that_waits_says_on_its_screen_what_for() -> None:
    seen = world(jobset(1), waiting(0, "InvalidImageName"))
    assert "  why        waits: its host cannot get image registry.example/train:1: that is no image's name" in list(
        screen(fold(seen), seen)
    )


def test_a_container_that_was_killed_for_memory_is_named_where_its_peer_only_says_that_it_is_gone() -> None:
    seen = world(
        jobset(2, status=objects.ended("Failed")),
        over(0, 81, message=farewell(81, "host 1 is gone")),
        over(1, 137, "OOMKilled"),
    )
    first, _, why, *_ = screen(fold(seen), seen)
    assert first == "lost (81): host 1 is gone"
    assert why.startswith("  why        failed: host 1 was OOMKilled")


def test_the_table_is_laid_out_as_kubectl_does() -> None:
    jobs = [
        fold(everything()),
        fold(
            world(
                jobset(
                    2,
                )
            )
        ),
    ]
    assert table(jobs, with_namespace=False, is_wide=False) == [
        "NAME   STATE      HOSTS   STEP   RESTARTS   AGE",
        "lm     Running    2/2     130    2          10m",
        "lm     Creating   0/2     -      0          10m",
    ]
    wide = table(jobs, with_namespace=True, is_wide=True)
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
        "research",
        "node-1,node-2",
    ]


def test_the_last_step_of_the_run_is_what_its_train_block_says() -> None:
    train = {"task": "trainer.tasks.classify:Classify", "steps": 9, "checkpoint": {"path": "/ckpt/lm"}}
    seen = world(
        jobset(1, train=train, command=None, volumes=[{"claim": "c", "path": "/ckpt"}]), pod(0), words=(beat(),)
    )
    assert fold(seen).steps == 9


def test_json_has_every_field_and_no_object_of_ours() -> None:
    found = json.loads(json.dumps(fold(everything()).to_json()))
    assert found["state"] == "Running"
    assert found["restarts"] == {"total": 2, "charged": 1, "budget": 5, "by_cause": {"preempted": 1, "hang": 1}}


@pytest.mark.parametrize(
    ("pods", "code"),
    [
        ((over(0, 64, message=farewell(64)),), 64),
        ((over(0, 42),), 42),
        ((), 1),
        ((over(0, 81, message=farewell(81)), over(1, 83, message=farewell(83))), 83),
    ],
)
def test_a_failed_job_has_the_code_of_its_verdict_or_of_its_container(pods: tuple[Any, ...], code: int) -> None:
    assert fold(world(jobset(2, status=objects.ended("Failed")), *pods)).code == code


def test_a_job_that_is_done_has_code_0_and_one_that_runs_none() -> None:
    assert fold(world(jobset(1, status=objects.ended("Completed")))).code == 0
    assert fold(world(jobset(1), pod(0))).code is None


def test_what_a_verdict_says_of_the_last_commit_is_newer_than_the_beat_before_it() -> None:
    kind, said = judged(80, "stopped", step=130)
    seen = world(
        jobset(1, suspend=True),
        over(0, 80, message=farewell(80)),
        words=(beat(committed=100), (kind, said | {"committed": 130})),
    )
    assert fold(seen).committed == 130


def test_restarts_whose_causes_nobody_can_say_are_counted_all_the_same() -> None:
    status = fold(world(jobset(1, status={"restarts": 2}), pod(0, generation=2)))
    assert (status.restarts.total, status.restarts.by_cause) == (2, None)


def test_hosts_are_numbered_over_slices() -> None:
    made = jobset(2, slices=3)
    pods = [pod(host, slice=part) for part in range(3) for host in range(2)]
    assert hosts.wanted(made) == 6
    assert [host.number for host in hosts.newest(made, pods)] == [0, 1, 2, 3, 4, 5]


def test_of_a_host_that_was_replaced_the_newer_pod_counts() -> None:
    old, new = pod(0), pod(0)
    new["metadata"] |= {"name": "lm-w-0-0-newer", "creationTimestamp": objects.ago(seconds=1)}
    assert [host.pod for host in hosts.newest(jobset(1), [new, old])] == ["lm-w-0-0-newer"]


def test_an_init_container_that_has_not_ended_holds_the_host_up() -> None:
    init = [{"name": "fetch", "ready": False, "state": {"running": {}}}]
    (host,) = hosts.newest(
        jobset(1), [pod(0, state={"waiting": {"reason": "PodInitializing"}}, initContainerStatuses=init)]
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
def test_ages_are_written_as_kubectl_does(seconds: float, text: str) -> None:
    assert age(seconds) == text


def test_nodes_are_asked_for_labels_then_taints_then_room() -> None:
    spec = {
        "nodeSelector": {"pool": "a"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}, {"key": "team", "value": "me", "effect": "NoSchedule"}],
        "containers": [{"resources": {"requests": {"cpu": "4"}, "limits": {"nvidia.com/gpu": "2"}}}],
        "initContainers": [{"resources": {"requests": {"cpu": "6"}}}],
    }
    labels = {"pool": "a"}
    found = fit(
        spec,
        [
            node("other", labels={"pool": "b"}),
            node("barred", labels=labels, taints=("team=you:NoSchedule",)),
            node("small", labels=labels, taints=("gpu=yes:NoSchedule",), cpu="5", nvidia_com__gpu="8"),
            node(
                "good",
                labels=labels,
                taints=("team=me:NoSchedule", "hint:PreferNoSchedule"),
                cpu="6",
                nvidia_com__gpu="2",
            ),
        ],
    )
    assert (found.total, found.selected, found.tolerated, found.large) == (4, 3, 2, 1)
    assert found.taints == {"team=you:NoSchedule": 1}


def test_a_condition_that_was_never_set_is_empty() -> None:
    assert read_condition({"status": {"conditions": [condition("Ready")]}}, "Done") == {}
