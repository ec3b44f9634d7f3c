"""API objects in, how the job stands out: one state, and the numbers beside it. Pure."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from launcher import hosts
from launcher.objects import is_true, moment, seconds_since
from launcher.seen import World
from trainer import contract


class State(enum.StrEnum):
    """How far a job is, or how it ended."""

    QUEUED = "Queued"  # Kueue holds it back
    CREATING = "Creating"  # pods are missing
    PENDING = "Pending"  # pods wait for nodes
    STARTING = "Starting"  # images, volumes, containers
    GATHERING = "Gathering"  # agents wait for each other
    RUNNING = "Running"
    RESTARTING = "Restarting"  # a generation ended, the next is on its way
    STOPPING = "Stopping"
    STOPPED = "Stopped"
    DELETING = "Deleting"
    DONE = "Done"
    FAILED = "Failed"


@dataclasses.dataclass(frozen=True)
class Restarts:
    """How often the pods were made anew, and what it was charged to."""

    total: int
    charged: int  # against the budget
    budget: int
    by_cause: Mapping[str, int] | None  # attempts that ended, in place or not; None: nobody can say


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """One job, as a screen, a table's row or JSON shows it. None: not known."""

    name: str
    namespace: str
    state: State
    is_ours: bool
    queue: str | None
    hosts: int
    ready: int
    generation: int
    attempt: int | None
    phase: str | None
    phase_s: float | None
    missing: tuple[int, ...]
    step: int | None
    steps: int | None
    committed: int | None
    committed_age_s: float | None
    goodput: float | None
    restarts: Restarts
    verdict: Mapping[str, Any] | None
    code: int | None  # the exit code that it ends with
    nodes: tuple[str, ...]
    age_s: float
    lasted_s: float | None  # from the first start to the end

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"state": self.state.value}


def fold(world: World) -> JobStatus:
    """How the job stands. There must be one: a JobSet of that name."""
    assert world.jobset is not None, "the caller has looked"
    told, beat = world.told, world.told.beat or {}
    state = state_of(world)
    created = world.jobset["metadata"].get("creationTimestamp")
    is_live = state in (State.RUNNING, State.GATHERING)
    return JobStatus(
        name=world.name,
        namespace=world.namespace,
        state=state,
        is_ours=world.is_ours,
        queue=world.queue,
        hosts=world.wanted,
        ready=sum(host.is_ready for host in world.hosts),
        generation=world.restarts,
        attempt=beat.get("attempt") or (told.verdict.attempt if told.verdict else None),
        phase=_phase(world) if is_live else None,
        phase_s=_since(beat.get("since"), world.now) if is_live else None,
        missing=tuple(told.missing),
        step=told.step,
        steps=_steps(world),
        committed=told.committed,
        committed_age_s=None
        if told.committed_at is None
        else max(0.0, (world.now - told.committed_at).total_seconds()),
        goodput=told.goodput,
        restarts=_restarts(world),
        verdict=_verdict(world, state),
        code=exit_code(world, state),
        nodes=tuple(dict.fromkeys(host.node for host in world.hosts if host.node)),
        age_s=seconds_since(created, world.now) or 0.0,
        lasted_s=_lasted(world, state),
    )


def state_of(world: World) -> State:
    """The one word for where the job is."""
    assert world.jobset is not None, "the caller has looked"
    ended = {"Completed": State.DONE, "Failed": State.FAILED}.get(
        world.jobset.get("status", {}).get("terminalState", "")
    )
    if "deletionTimestamp" in world.jobset["metadata"]:
        return State.DELETING
    if ended is not None:
        return ended
    if world.is_suspended or is_stopped_in_queue(world):
        return _held(world)
    if _is_between(world):
        return State.RESTARTING
    return _on_its_way(world)


def is_stopped_in_queue(world: World) -> bool:
    """Whether its Workload was taken out of the queue: by `launcher stop`, or by Kueue after too many tries."""
    return world.workload is not None and world.workload.get("spec", {}).get("active") is False


def _held(world: World) -> State:
    """Suspended: by a person, or by Kueue."""
    if world.queue is None or is_stopped_in_queue(world):
        return State.STOPPING if _are_pods_left(world) else State.STOPPED
    return State.QUEUED


def _are_pods_left(world: World) -> bool:
    return any(not host.has_ended for host in world.hosts)


def _is_between(world: World) -> bool:
    """The last generation has ended or is ending, and its successor's pods are not here."""
    if not world.hosts:
        return world.restarts > 0
    if world.hosts[0].generation < world.restarts:
        return True
    return all(host.is_leaving or host.has_ended for host in world.hosts) and not _all_succeeded(world)


def _all_succeeded(world: World) -> bool:
    return all(host.phase == "Succeeded" for host in world.hosts)


def _on_its_way(world: World) -> State:
    """How far the slowest host is."""
    if len(world.hosts) < world.wanted:
        return State.CREATING
    if any(host.node is None for host in world.hosts):
        return State.PENDING
    if not all(host.has_started for host in world.hosts):
        return State.STARTING
    return State.GATHERING if world.told.stage == "gather" else State.RUNNING


def _phase(world: World) -> str | None:
    """What most ranks are in; before they start, that hosts are still awaited."""
    if world.told.stage == "gather":
        return "rendezvous"
    return (world.told.beat or {}).get("phase")


def _since(at: float | None, now: datetime) -> float | None:
    return None if at is None else max(0.0, now.timestamp() - at)


def _steps(world: World) -> int | None:
    """The last step of the whole run, where the job says it."""
    assert world.jobset is not None, "the caller has looked"
    try:
        steps = json.loads(hosts.environment(world.jobset).get(contract.TRAIN_SPEC, "{}")).get("steps")
    except ValueError:
        return None
    return steps if isinstance(steps, int) else None


def _restarts(world: World) -> Restarts:
    assert world.jobset is not None, "the caller has looked"
    policy = world.jobset.get("spec", {}).get("failurePolicy") or {}
    charged = int(world.jobset.get("status", {}).get("restartsCountTowardsMax", 0))
    causes = world.told.ends
    if causes is None and not world.restarts:
        causes = {}
    return Restarts(world.restarts, charged, int(policy.get("maxRestarts", 0)), causes)


def _verdict(world: World, state: State) -> Mapping[str, Any] | None:
    """The verdict that matters now: on the end, or on the attempt before this one."""
    last = world.told.last
    if last is None or (state is State.RUNNING and last.verdict.code == contract.PREEMPTED):
        return None
    return last.verdict.to_json()


def exit_code(world: World, state: State) -> int | None:
    """The code of a run that is over: its verdict's, else that of a container, else what JobSet's end amounts to."""
    if state is State.DONE:
        return contract.DONE
    if state is not State.FAILED:
        return None
    if world.told.verdict is not None:
        return world.told.verdict.verdict.code
    codes = [host.ended["exitCode"] for host in world.hosts if host.ended.get("exitCode")]
    return codes[0] if codes else 1


def _lasted(world: World, state: State) -> float | None:
    """Seconds between the JobSet's creation and its end."""
    assert world.jobset is not None, "the caller has looked"
    kind = {State.DONE: "Completed", State.FAILED: "Failed"}.get(state)
    if kind is None or not is_true(world.jobset, kind):
        return None
    conditions = world.jobset["status"]["conditions"]
    ended = moment(next(one for one in conditions if one["type"] == kind).get("lastTransitionTime"))
    began = moment(world.jobset["metadata"].get("creationTimestamp"))
    return None if ended is None or began is None else max(0.0, (ended - began).total_seconds())
