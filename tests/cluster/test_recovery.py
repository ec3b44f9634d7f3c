"""The trainer on two real pods loses a process, an agent, a pod: it goes on, and ends as an undisturbed run does."""

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
from tests.cluster.gangs import PATIENCE_S, PROGRAMS, Gang, Place, place, until
from tests.compiled import QUICK_COMPILES
from tests.gang.runs import digits_block

pytestmark = pytest.mark.extended

SAVED = Defaults.model_validate({"checkpoint": {"claim": "checkpoints", "path": "/checkpoints"}})
STEPS, EVERY = 120, 10
TRAIN = digits_block(
    task="held:Held",
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


def of_hosts(steps: int, lr: float) -> dict[str, Any]:
    """A job without its hosts, two or three of one device each, that saves every EVERY steps."""
    schedule = {"lr": lr, "schedule": {"name": "constant"}}
    return {
        "accelerator": {"type": "cpu", "per_host": 1},
        "resources": JOB["resources"],
        "grace": "30s",
        "code": str(PROGRAMS),
        "train": digits_block(
            task="held:Held", batch=24, steps=steps, optimizer=schedule, checkpoint={"every": EVERY}
        ),
    }


def child(here: Place, pods: Sequence[Any]) -> Strike:
    return partial(processes.kill, processes.child(pods[1]))


def agent(here: Place, pods: Sequence[Any]) -> Strike:
    return partial(processes.kill, processes.agent(pods[1]))


def leader(here: Place, pods: Sequence[Any]) -> Strike:
    return partial(processes.kill, processes.agent(pods[0]))


def pod(here: Place, pods: Sequence[Any]) -> Strike:
    return partial(processes.kill, *processes.everything(pods[1]))


def eviction(here: Place, pods: Sequence[Any]) -> Strike:
    return partial(nodes.evict, here.access, here.namespace, pods[1]["metadata"]["name"])


class Loss(NamedTuple):
    """What is done to a run, and what is known of it once the run goes on."""

    aim: Callable[[Place, Sequence[Any]], Strike]
    counters: tuple[int, int]  # restarts of the pods, and those that count
    ended: str  # the attempt
    cause: str  # of its end


# By job: how often its processes may restart in their pods, and what it loses, one after the other.
GANGS: Mapping[str, tuple[int, Mapping[str, Loss]]] = {
    "nothing": (0, {}),  # the run that the others are held to
    "in-place": (
        1,
        {
            "child": Loss(child, (0, 0), "attempt 1 of generation 0", "killed"),
            "agent": Loss(agent, (0, 0), "attempt 2 of generation 0", "lost"),
            "pod": Loss(pod, (0, 0), "attempt 3 of generation 0", "lost"),
            "leader": Loss(leader, (0, 0), "attempt 4 of generation 0", "lost"),
            "drained": Loss(eviction, (0, 0), "attempt 5 of generation 0", "preempted"),
        },
    ),
    "anew": (
        0,
        {
            "all": Loss(leader, (1, 1), "attempt 1 of generation 0", "lost"),
            "eviction": Loss(eviction, (2, 1), "attempt 2 of generation 1", "preempted"),
        },
    ),
}
GANG_OF = {name: gang for gang, (_, losses) in GANGS.items() for name in losses}
HURT = list(GANG_OF)


class After(NamedTuple):
    """What was seen when a run had gone on after a loss."""

    counters: tuple[int, int]
    before: set[str]  # uids of its pods
    now: set[str]
    previous: subprocess.CompletedProcess[str]  # logs --previous
    explained: str


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
def gangs(here: Place, folder: Path) -> Mapping[str, Mapping[str, After]]:
    """Of each, which has ended well, what was seen after its losses."""
    with ThreadPoolExecutor(len(GANGS)) as pool:
        return dict(zip(GANGS, pool.map(lambda name: lose(here, folder, name), GANGS), strict=True))


def lose(here: Place, folder: Path, name: str) -> Mapping[str, After]:
    """Starts the job and strikes it once for each loss. It is held while it is looked at, so that its end waits."""
    in_place, losses = GANGS[name]
    run, hold, seen = folder / name, folder / f"{name}.hold", {}
    env = QUICK_COMPILES | {"HOLD": f"/checkpoints/{hold.name}"}
    gang = here.start(
        name, SAVED, restarts={"in_place": in_place, "crash": len(losses)}, env=env, **JOB
    )
    for number, (which, loss) in enumerate(losses.items()):
        await_checkpoint(run, after=0)  # the first loss waits for it
        hold.touch()
        pods = pods_of(gang)
        strike = loss.aim(here, pods)
        hold.unlink()
        strike()
        until(f"{name} records the loss of its {which}", lambda number=number: ended(run) > number)
        await_checkpoint(run, after=newest(run))
        hold.touch()
        seen[which] = After(
            gang.counters,
            {pod["metadata"]["uid"] for pod in pods},
            {pod["metadata"]["uid"] for pod in pods_of(gang)},
            here.launcher("logs", name, "--previous"),
            here.launcher("explain", name).stdout,
        )
    hold.unlink(missing_ok=True)
    assert gang.ended() == "Completed", gang.lines()
    return seen


def pods_of(gang: Gang) -> Sequence[Any]:
    """Those of the newest generation, by host, once they run."""
    names = [host.pod for host in gang.runs(gang.counters[0])]
    there = {pod["metadata"]["name"]: pod for pod in gang.pods}
    return [there[name] for name in names]


def await_checkpoint(run: Path, after: int) -> None:
    """Returns as soon as there is a later one."""
    end = time.monotonic() + PATIENCE_S
    while newest(run) <= after:
        assert time.monotonic() < end, f"no checkpoint after step {after} in {run}"
        time.sleep(0.02)


def newest(run: Path) -> int:
    """The step of its newest whole checkpoint; 0 where there is none."""
    return max((int(file.parent.name) for file in run.glob("*/jaxlaunch.manifest.json")), default=0)


def ended(run: Path) -> int:
    """Attempts that ended, as the run folder has them."""
    file = run / ".jaxlaunch" / "attempts.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def losses(folder: Path, name: str) -> dict[int, float]:
    lines = (folder / name / ".jaxlaunch" / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines) if "loss" in line}


def assert_as_undisturbed(folder: Path, name: str) -> None:
    assert losses(folder, name) == losses(folder, "nothing")
    assert len(losses(folder, name)) == STEPS


@pytest.mark.parametrize("name", ["nothing", *HURT])
def test_it_ends_with_the_losses_of_an_undisturbed_run(
    here: Place, gangs: Any, folder: Path, name: str
) -> None:
    gang = GANG_OF.get(name, "nothing")
    assert_as_undisturbed(folder, gang)
    if gang == "nothing":
        assert Gang(here.cluster, here.namespace, gang).counters == (0, 0)
    else:
        assert gangs[gang][name].counters == GANGS[gang][1][name].counters


@pytest.mark.parametrize("name", ["agent", "pod", "leader", "drained"])
def test_a_lost_pod_is_replaced_alone(gangs: Any, name: str) -> None:
    after = gangs["in-place"][name]
    assert len(after.now) == 2 and len(after.before & after.now) == 1


def test_a_process_starts_again_in_the_same_pods(gangs: Any) -> None:
    after = gangs["in-place"]["child"]
    assert after.before == after.now and len(after.now) == 2


@pytest.mark.parametrize("name", HURT)
def test_logs_and_explain_tell_how_the_attempt_before_ended(gangs: Any, name: str) -> None:
    loss, after = GANGS[GANG_OF[name]][1][name], gangs[GANG_OF[name]][name]
    assert f"{loss.ended}: {loss.cause} (" in after.previous.stderr
    assert loss.cause in after.explained


@pytest.mark.parametrize("name", [name for name in HURT if name != "child"])
def test_the_lines_of_the_pods_that_are_gone_are_told(gangs: Any, name: str) -> None:
    told = gangs[GANG_OF[name]][name].previous.stdout.splitlines()
    assert {line[:3] for line in told} <= {"[0]", "[1]"}
    assert any(line.startswith("[0] step ") for line in told)
