"""The trainer on two real pods loses a process, an agent, a pod: it goes on, and ends as an undisturbed run does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launcher.job.profile import Profile
from tests.cluster import nodes, preparations, processes
from tests.cluster.access import Access
from tests.cluster.gangs import PATIENCE_S, Gang, Place, place
from tests.compiled import QUICK_COMPILES
from tests.gang.runs import digits

SAVED = Profile.model_validate({"checkpoint": {"claim": "checkpoints", "path": "/checkpoints"}})
STEPS, EVERY = 400, 40
TRAIN = digits(steps=STEPS, optimizer={"lr": 1e-3, "schedule": {"name": "constant"}}, checkpoint={"every": EVERY})
JOB: dict[str, Any] = {
    "hosts": 2,
    "resources": {"cpu": "50m", "memory": "1Gi"},  # the node has room for all gangs at once
    "grace": "60s",
    "env": QUICK_COMPILES,
    "train": TRAIN,
}


def nothing(here: Place, pods: Sequence[Any]) -> None:
    """The run that the others are held to."""


def child(here: Place, pods: Sequence[Any]) -> None:
    processes.kill(processes.child(pods[1]))


def agent(here: Place, pods: Sequence[Any]) -> None:
    processes.kill(processes.agent(pods[1]))


def leader(here: Place, pods: Sequence[Any]) -> None:
    processes.kill(processes.agent(pods[0]))


def pod(here: Place, pods: Sequence[Any]) -> None:
    processes.kill(*processes.everything(pods[1]))


def eviction(here: Place, pods: Sequence[Any]) -> None:
    nodes.evict(here.access, here.namespace, pods[1]["metadata"]["name"])


# What is done to a run in its middle; restarts of the pods, those that count, and the cause of the attempt's end.
LOSSES: Mapping[str, tuple[Callable[[Place, Sequence[Any]], None], tuple[int, int], str | None]] = {
    "nothing": (nothing, (0, 0), None),
    "child": (child, (0, 0), "killed"),
    "agent": (agent, (1, 1), "lost"),
    "leader": (leader, (1, 1), "lost"),
    "pod": (pod, (1, 1), "lost"),
    "eviction": (eviction, (1, 0), "preempted"),
}
HURT = [name for name in LOSSES if name != "nothing"]


@pytest.fixture(scope="module")
def here(cluster: Access, image: str) -> Iterator[Place]:
    if not cluster.is_ours:
        pytest.skip("processes of pods are killed on their node, which is not this machine")
    with place(cluster, image) as found:
        yield found


@pytest.fixture(scope="module")
def folder(here: Place) -> Path:
    """The checkpoints of all gangs, by name."""
    return preparations.make_claim(here.access, here.namespace)


@pytest.fixture(scope="module")
def gangs(here: Place, folder: Path) -> Mapping[str, tuple[Gang, list[str]]]:
    """Each, with the uids of its first pods, after its loss."""
    with ThreadPoolExecutor(len(LOSSES)) as pool:
        return dict(zip(LOSSES, pool.map(lambda name: lose(here, folder, name), LOSSES), strict=True))


def lose(here: Place, folder: Path, name: str) -> tuple[Gang, list[str]]:
    restarts = {"in_place": 1 if name in ("child", "agent", "pod") else 0, "crash": 1}
    gang = here.start(name, SAVED, accelerator={"type": "cpu", "per_host": 2}, restarts=restarts, **JOB)
    names = [host.pod for host in gang.runs()]
    pods = sorted(gang.pods, key=lambda pod: names.index(pod["metadata"]["name"]))
    # A kill must leave a checkpoint behind. An eviction takes its time, and saves.
    await_file(folder / name, ".jaxlaunch/metrics.jsonl" if name == "eviction" else "*/jaxlaunch.manifest.json")
    LOSSES[name][0](here, pods)
    return gang, [pod["metadata"]["uid"] for pod in pods]


def await_file(folder: Path, pattern: str) -> None:
    """Returns as soon as there is one: most of the run is still to come."""
    end = time.monotonic() + PATIENCE_S
    while not list(folder.glob(pattern)):
        assert time.monotonic() < end, f"no {pattern} in {folder}"
        time.sleep(0.02)


def losses(folder: Path, name: str) -> dict[int, float]:
    lines = (folder / name / ".jaxlaunch" / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}


@pytest.mark.parametrize("name", LOSSES)
def test_it_ends_with_the_losses_of_an_undisturbed_run(gangs: Any, folder: Path, name: str) -> None:
    for each in (name, "nothing"):
        assert gangs[each][0].ended() == "Completed", gangs[each][0].lines()
    assert gangs[name][0].counters == LOSSES[name][1]
    assert losses(folder, name) == losses(folder, "nothing")
    assert len(losses(folder, name)) == STEPS


def test_a_process_starts_again_in_the_same_pods(gangs: Any) -> None:
    gang, uids = gangs["child"]
    assert gang.ended() == "Completed"
    assert {pod["metadata"]["uid"] for pod in gang.pods} == set(uids)


@pytest.mark.parametrize("name", HURT)
def test_logs_and_explain_tell_how_the_attempt_before_ended(here: Place, gangs: Any, name: str) -> None:
    gang, cause = gangs[name][0], LOSSES[name][2]
    assert gang.ended() == "Completed"
    previous = here.launcher("logs", gang.name, "--previous")
    assert f"attempt 1 of generation 0: {cause} (" in previous.stderr
    assert cause in here.launcher("explain", gang.name).stdout


@pytest.mark.parametrize("name", [name for name in HURT if name != "child"])
def test_the_lines_of_the_pods_that_are_gone_are_told(here: Place, gangs: Any, name: str) -> None:
    assert gangs[name][0].ended() == "Completed"
    told = here.launcher("logs", name, "--previous").stdout.splitlines()
    assert {line[:3] for line in told} <= {"[0]", "[1]"}
    assert any(line.startswith("[0] step ") for line in told)
