"""The trainer on two real pods loses a process, an agent, a pod: it recovers with equal losses."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxlaunch.launcher.job.defaults import Defaults
from tests.cluster import nodes, preparations, processes
from tests.cluster.access import Access
from tests.cluster.gangs import PATIENCE_S, PROGRAMS, Gang, Workspace, make_workspace, wait_for
from tests.compiled import QUICK_COMPILES
from tests.gang.runs import digits_block

pytestmark = pytest.mark.extended

SAVED = Defaults.model_validate({"checkpoint": {"claim": "checkpoints", "path": "/checkpoints"}})
STEPS, EVERY = 120, 10
TRAIN = digits_block(
    task="held:HeldClassify",
    steps=STEPS,
    optimizer={"lr": 1e-3, "schedule": {"name": "constant"}},
    checkpoint={"every": EVERY},
)
JOB: dict[str, Any] = {
    "hosts": 2,
    "accelerator": {"type": "cpu", "per_host": 2},
    "resources": {"cpu": "50m", "memory": "1Gi"},  # the node has room for all gangs at once
    "grace": "60s",
    "code": str(PROGRAMS),
    "train": TRAIN,
}
Strike = Callable[[], None]


def job_keys(steps: int, lr: float) -> dict[str, Any]:
    """Return a job without its hosts, of one device each, that saves every EVERY steps."""
    schedule = {"lr": lr, "schedule": {"name": "constant"}}
    return {
        "accelerator": {"type": "cpu", "per_host": 1},
        "resources": JOB["resources"],
        "grace": "30s",
        "code": str(PROGRAMS),
        "train": digits_block(
            task="held:HeldClassify",
            batch=24,
            steps=steps,
            optimizer=schedule,
            checkpoint={"every": EVERY},
        ),
    }


def strike_trainer(workspace: Workspace, pods: Sequence[Any]) -> Strike:
    return partial(processes.kill_processes, processes.find_trainer(pods[1]))


def strike_agent(workspace: Workspace, pods: Sequence[Any]) -> Strike:
    return partial(processes.kill_processes, processes.find_agent(pods[1]))


def strike_leader(workspace: Workspace, pods: Sequence[Any]) -> Strike:
    return partial(processes.kill_processes, processes.find_agent(pods[0]))


def strike_pod(workspace: Workspace, pods: Sequence[Any]) -> Strike:
    return partial(processes.kill_processes, *processes.find_processes(pods[1]))


def strike_by_eviction(workspace: Workspace, pods: Sequence[Any]) -> Strike:
    return partial(
        nodes.evict_pod, workspace.access, workspace.namespace, pods[1]["metadata"]["name"]
    )


class Loss(NamedTuple):
    """A loss, and its expected traces once the run continues."""

    aim: Callable[[Workspace, Sequence[Any]], Strike]
    counters: tuple[int, int]  # restarts of the pods, and those that count
    ended: str  # the attempt
    cause: str  # of its end


# By job: how often its processes may restart in their pods, and what it loses, one after the other.
GANGS: Mapping[str, tuple[int, Mapping[str, Loss]]] = {
    "nothing": (0, {}),  # the run that the others are held to
    "in-place": (
        1,
        {
            "child": Loss(strike_trainer, (0, 0), "attempt 1 of generation 0", "killed"),
            "agent": Loss(strike_agent, (0, 0), "attempt 2 of generation 0", "lost"),
            "pod": Loss(strike_pod, (0, 0), "attempt 3 of generation 0", "lost"),
            "leader": Loss(strike_leader, (0, 0), "attempt 4 of generation 0", "lost"),
            "drained": Loss(strike_by_eviction, (0, 0), "attempt 5 of generation 0", "preempted"),
        },
    ),
    "anew": (
        0,
        {
            "all": Loss(strike_leader, (1, 1), "attempt 1 of generation 0", "lost"),
            "eviction": Loss(strike_by_eviction, (2, 1), "attempt 2 of generation 1", "preempted"),
        },
    ),
}
GANG_OF = {name: gang for gang, (_, losses) in GANGS.items() for name in losses}
HURT = list(GANG_OF)


class Observation(NamedTuple):
    """What was observed after a run recovered from a loss."""

    counters: tuple[int, int]
    uids_before_loss: set[str]  # of its pods
    uids: set[str]
    previous: subprocess.CompletedProcess[str]  # logs --previous
    explained: str


@pytest.fixture(scope="module")
def workspace(cluster: Access, image: str) -> Iterator[Workspace]:
    if not cluster.is_ours:
        pytest.skip("processes of pods are killed on their node, which is not this machine")
    with make_workspace(cluster, image) as workspace:
        yield workspace


@pytest.fixture(scope="module")
def folder(workspace: Workspace) -> Path:
    """Return the checkpoints of all gangs, by name."""
    return preparations.make_claim(workspace.access, workspace.namespace)


@pytest.fixture(scope="module")
def gangs(workspace: Workspace, folder: Path) -> Mapping[str, Mapping[str, Observation]]:
    """Return the observations after its losses for each gang, which has ended well."""
    with ThreadPoolExecutor(len(GANGS)) as pool:
        return dict(
            zip(
                GANGS,
                pool.map(lambda name: run_with_losses(workspace, folder, name), GANGS),
                strict=True,
            )
        )


def run_with_losses(workspace: Workspace, folder: Path, name: str) -> Mapping[str, Observation]:
    """Start the job and strike it once for each loss. It is held while it is observed."""
    in_place, losses = GANGS[name]
    run, hold, observations = folder / name, folder / f"{name}.hold", {}
    env = QUICK_COMPILES | {"HOLD": f"/checkpoints/{hold.name}"}
    gang = workspace.start(
        name, SAVED, restarts={"in_place": in_place, "crash": len(losses)}, env=env, **JOB
    )
    for number, (loss_name, loss) in enumerate(losses.items()):
        wait_for_checkpoint(run, after=0)  # the first loss waits for it
        hold.touch()
        pods = wait_for_pods(gang)
        strike = loss.aim(workspace, pods)
        hold.unlink()
        strike()
        wait_for(
            f"{name} records the loss of its {loss_name}",
            lambda number=number: read_attempts(run) > number,
        )
        wait_for_checkpoint(run, after=newest_step(run))
        hold.touch()
        observations[loss_name] = Observation(
            gang.counters,
            {pod["metadata"]["uid"] for pod in pods},
            {pod["metadata"]["uid"] for pod in wait_for_pods(gang)},
            workspace.launcher("logs", name, "--previous"),
            workspace.launcher("explain", name).stdout,
        )
    hold.unlink(missing_ok=True)
    assert gang.wait_for_end() == "Completed", gang.read_lines()
    return observations


def wait_for_pods(gang: Gang) -> Sequence[Any]:
    """Return the pods of the newest generation by host, once they run."""
    names = [host.pod for host in gang.wait_until_running(gang.counters[0])]
    pods_by_name = {pod["metadata"]["name"]: pod for pod in gang.pods}
    return [pods_by_name[name] for name in names]


def wait_for_checkpoint(run: Path, after: int) -> None:
    """Wait for a later checkpoint."""
    end = time.monotonic() + PATIENCE_S
    while newest_step(run) <= after:
        assert time.monotonic() < end, f"no checkpoint after step {after} in {run}"
        time.sleep(0.02)


def newest_step(run: Path) -> int:
    """Return the step of the newest complete checkpoint, or 0."""
    return max((int(file.parent.name) for file in run.glob("*/jaxlaunch.manifest.json")), default=0)


def read_attempts(run: Path) -> int:
    """Return the finished attempts of the run folder."""
    file = run / ".jaxlaunch" / "attempts.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def read_losses(folder: Path, name: str) -> dict[int, float]:
    lines = (folder / name / ".jaxlaunch" / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}


def assert_as_undisturbed(folder: Path, name: str) -> None:
    assert read_losses(folder, name) == read_losses(folder, "nothing")
    assert len(read_losses(folder, name)) == STEPS


@pytest.mark.parametrize("name", ["nothing", *HURT])
def test_run_has_the_losses_of_an_undisturbed_one(
    workspace: Workspace, gangs: Any, folder: Path, name: str
) -> None:
    gang = GANG_OF.get(name, "nothing")
    assert_as_undisturbed(folder, gang)
    if gang == "nothing":
        assert Gang(workspace.cluster, workspace.namespace, gang).counters == (0, 0)
    else:
        assert gangs[gang][name].counters == GANGS[gang][1][name].counters


@pytest.mark.parametrize("name", ["agent", "pod", "leader", "drained"])
def test_only_the_lost_pod_is_replaced(gangs: Any, name: str) -> None:
    observation = gangs["in-place"][name]
    assert len(observation.uids) == 2 and len(observation.uids_before_loss & observation.uids) == 1


def test_process_restarts_in_the_same_pods(gangs: Any) -> None:
    observation = gangs["in-place"]["child"]
    assert observation.uids_before_loss == observation.uids and len(observation.uids) == 2


@pytest.mark.parametrize("name", HURT)
def test_logs_and_explain_report_the_end_of_the_previous_attempt(gangs: Any, name: str) -> None:
    loss, observation = GANGS[GANG_OF[name]][1][name], gangs[GANG_OF[name]][name]
    assert f"{loss.ended}: {loss.cause} (" in observation.previous.stderr
    assert loss.cause in observation.explained


@pytest.mark.parametrize("name", [name for name in HURT if name != "child"])
def test_lines_of_deleted_pods_are_shown(gangs: Any, name: str) -> None:
    lines = gangs[GANG_OF[name]][name].previous.stdout.splitlines()
    assert {line[:3] for line in lines} <= {"[0]", "[1]"}
    assert any(line.startswith("[0] step ") for line in lines)
