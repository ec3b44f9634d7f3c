"""What is told of a job whose pods, Job, JobSet or namespace are deleted by force or by hand."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlaunch.launcher.diagnose.explain.explanation import Explanation, explain_job
from jaxlaunch.launcher.job.defaults import Defaults
from jaxlaunch.launcher.jobs.status import collect, job_status
from jaxlaunch.launcher.jobs.status.job_status import JobStatus, State
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.command import start_launcher, write_project
from tests.cluster.gangs import Gang, Workspace, make_workspace, program_command, wait_for

SMALL = {"cpu": "20m", "memory": "128Mi"}
HANG = program_command("stumbles.py", "hang")
CLAIM = [{"claim": "checkpoints", "path": "/data"}]


@pytest.fixture(scope="module")
def workspace(cluster: Access, base_image: str) -> Iterator[Workspace]:
    with make_workspace(cluster, base_image) as workspace:
        preparations.make_claim(cluster, workspace.namespace)
        yield workspace


def look_at(gang: Gang) -> tuple[Explanation, JobStatus | None, JobStatus | None]:
    """Return what `explain`, `status` and `list` tell of a job."""
    job = collect.read_snapshot(gang.cluster, gang.namespace, gang.name)
    status = job_status.derive_status(job) if isinstance(job, Snapshot) else None
    jobs = collect.read_snapshots(gang.cluster, gang.namespace)
    rows = [job_status.derive_status(job) for job in jobs if job.name == gang.name]
    return explain_job(job), status, next(iter(rows), None)


def wait_for_attempt(gang: Gang, number: int) -> list[Explanation]:
    """Wait until this attempt trains; return what was told until then."""
    told: list[Explanation] = []

    def is_training() -> bool:
        explanation, status, row = look_at(gang)
        told.append(explanation)
        for shown in (status, row):
            if shown is not None and shown.state is State.GATHERING:
                assert shown.ready != shown.hosts, (shown, explanation)
        is_there = status is not None and status.state is State.RUNNING
        return bool(is_there and status and status.attempt == number and status.step)

    wait_for(f"attempt {number} of {gang.name}", is_training)
    return told


def test_new_host_0_is_joined_by_the_others(workspace: Workspace) -> None:
    gangs = {
        "kept": workspace.start(
            "kept", Defaults(), hosts=3, command=HANG, resources=SMALL, volumes=CLAIM
        ),
        "bare": workspace.start("bare", Defaults(), hosts=3, command=HANG, resources=SMALL),
    }
    for gang in gangs.values():
        wait_for_attempt(gang, 1)
    for gang in gangs.values():
        delete_by_force(workspace, gang.hosts[0].pod)
        told = wait_for_attempt(gang, 2)
        headlines = [explanation.headline for explanation in told]
        assert not [line for line in headlines if "waits for hosts 1, 2" in line], headlines
    # The run folder of `kept` is on its claim; the other hosts of `bare` know that there were some.
    assert read_facts(gangs["kept"]) == (1, False)
    assert read_facts(gangs["bare"]) == (0, True)
    delete_by_force(workspace, gangs["bare"].hosts[1].pod)
    wait_for_attempt(gangs["bare"], 3)


def test_history_survives_a_deleted_job_or_is_said_to_be_lost(workspace: Workspace) -> None:
    gangs = {
        "kept-job": workspace.start(
            "kept-job", Defaults(), command=HANG, resources=SMALL, volumes=CLAIM
        ),
        "bare-job": workspace.start("bare-job", Defaults(), command=HANG, resources=SMALL),
    }
    for gang in gangs.values():
        wait_for_attempt(gang, 1)
    # A Job that is made within seconds of its JobSet is the first one.
    time.sleep(30)
    for name in gangs:
        workspace.access.kubectl("delete", "job", "-n", workspace.namespace, f"{name}-w-0")
    wait_for_attempt(gangs["kept-job"], 2)
    wait_for_attempt(gangs["bare-job"], 1)
    assert read_facts(gangs["kept-job"]) == (1, False)
    assert read_facts(gangs["bare-job"]) == (0, True)


def test_follower_of_a_deleted_jobset_fails(workspace: Workspace, tmp_path: Path) -> None:
    talks = ["sh", "-c", "echo hello; exec sleep 600"]
    gang = workspace.start("gone", Defaults(), command=talks, resources=SMALL)
    gang.wait_until_running()
    arguments = ("logs", "-f", "gone", "-n", workspace.namespace)
    follower = start_launcher(workspace.access, tmp_path, *arguments)
    lines = follower.stdout
    assert lines is not None
    wait_for("the follower shows a line", lambda: "hello" in lines.readline())
    workspace.access.kubectl("delete", "jobset", "-n", workspace.namespace, "gone")
    output, _ = follower.communicate(timeout=120)
    assert follower.returncode == 3, output
    assert "JobSet gone in namespace" in output and "was deleted" in output
    explanation, _, _ = look_at(gang)
    assert explanation.situation == "unknown"


def test_namespace_that_is_being_deleted_is_named_from_the_start(
    cluster: Access, base_image: str, tmp_path: Path
) -> None:
    with make_workspace(cluster, base_image) as workspace:
        gang = workspace.start("lm", Defaults(), hosts=2, command=HANG, resources=SMALL)
        wait_for_attempt(gang, 1)
        folder = write_project(
            tmp_path, workspace.namespace, {}, name="waits", image=base_image, command=HANG
        )
        waiting = start_launcher(cluster, folder, "submit", "job.yaml", "--wait")
        wait_for_attempt(Gang(workspace.cluster, workspace.namespace, "waits"), 1)
        held = f"/api/v1/namespaces/{workspace.namespace}/configmaps"
        metadata = {"name": "held", "finalizers": ["jaxlaunch.test/hold"]}
        config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
        cluster.api.create(held, config_map)
        cluster.kubectl("delete", "namespace", workspace.namespace, "--wait=false")
        doctor = workspace.launcher("doctor")
        assert doctor.returncode in (2, 3), doctor.stdout
        assert f"namespace {workspace.namespace} is being deleted" in doctor.stdout
        told: list[str] = []

        def is_gone() -> bool:
            explanation, status, _ = look_at(gang)
            told.append(explanation.situation)
            assert status is None or status.state is State.DELETING, status
            if explanation.situation == "stuck":
                # The agents were not stopped in the same second, so their Job wants to replace a
                # pod, which this namespace does not accept any more.
                assert "its Job keeps 2 pods" in explanation.headline, explanation
                (command,) = explanation.commands
                assert command[:2] == ("launcher", "delete") and "lm" in command, explanation
                workspace.launcher("delete", "lm", "--yes")
            return status is None

        wait_for("the JobSet is gone", is_gone)
        assert set(told) <= {"namespace-terminating", "stuck", "unknown"}, told
        output, _ = waiting.communicate(timeout=120)
        assert waiting.returncode == 3, output
        assert f"Namespace {workspace.namespace} is being deleted" in output
        cluster.api.merge(f"{held}/held", {"metadata": {"finalizers": None}})


def delete_by_force(workspace: Workspace, pod: str) -> None:
    namespace = ("-n", workspace.namespace)
    workspace.access.kubectl("delete", "pod", *namespace, pod, "--force", "--grace-period=0")


def read_facts(gang: Gang) -> tuple[int, bool]:
    """Return the restarts by cause together, and whether some attempts are unknown."""
    explanation, status, _ = look_at(gang)
    assert status is not None
    is_said = any("are not known" in fact for fact in explanation.facts)
    return sum((status.restarts or {}).values()), is_said
