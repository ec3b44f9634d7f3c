"""The status of a job from its snapshot: one state, and the numbers beside it. Pure."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.jobs.status import hosts, lost_hosts
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import (
    condition,
    format_age,
    is_true,
    parse_time,
    seconds_since,
    terminal_state,
)
from jaxlaunch.records import checked
from jaxlaunch.records.log_lines import WHEN, Beat
from jaxlaunch.runs import history

_EXIT_CODE = re.compile(r"failed with exit code (\d{1,3})\b")  # in the condition of a Job, by its pod failure policy


class State(enum.StrEnum):
    """How far a job is, or how it ended."""

    QUEUED = "Queued"  # Kueue holds it back
    CREATING = "Creating"  # pods are missing
    PENDING = "Pending"  # pods wait for nodes
    STARTING = "Starting"  # images, volumes, containers
    GATHERING = "Gathering"  # agents wait for each other
    RUNNING = "Running"  # its containers run; where the leader's log was not read, they may still wait for each other
    RESTARTING = "Restarting"  # a generation ended, the next is on its way
    STOPPING = "Stopping"
    STOPPED = "Stopped"
    DELETING = "Deleting"
    DONE = "Done"
    FAILED = "Failed"
    SUSPENDED = "Suspended"  # by its queue or by a person, or its pods still save: which could not be read
    UNKNOWN = "Unknown"  # its pods could not be read


OVER = (State.DONE, State.FAILED, State.STOPPED)


@dataclasses.dataclass(frozen=True)
class Restarts:
    """How often the job was restarted, in place or with new pods, and how many restarts count against the limit."""

    total: int
    charged: int  # against the limit
    limit: int  # maxRestarts of the failure policy
    by_cause: Mapping[str, int] | None  # by what ended the attempt before; None: not known
    preempted: int | None  # preemptions in a row without a newly saved step; None: not known
    preempted_limit: int | None  # the limit of these; None: no limit


@dataclasses.dataclass(frozen=True)
class JobStatus:
    """One job, as `launcher status`, a row of `launcher list` and their JSON show it. None: not known."""

    name: str
    namespace: str
    state: State
    is_ours: bool
    queue: str | None
    hosts: int
    ready: int | None
    generation: int
    attempt: int | None
    phase: str | None
    phase_s: float | None
    missing: tuple[int, ...]
    members: str | None  # hosts with ranks, in the order of these, as `0,3,2`; None: each its own always, or not known
    spares: tuple[int, ...]  # hosts that are ready to hold ranks
    step: int | None
    steps: int | None
    committed: int | None
    committed_age_s: float | None
    goodput: float | None
    as_of: Mapping[str, str] | None  # `at` and `when` these numbers were true, where no leader's log has newer ones
    restarts: Restarts
    verdict: Mapping[str, Any] | None
    code: int | None  # the exit code of the job, once it is over
    nodes: tuple[str, ...]
    age_s: float
    lasted_s: float | None  # from the first start to the end
    restart_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)  # the last; by contract.RESTART
    folder: str | None = None  # of a run on this machine, whose namespace is empty

    def to_json(self) -> dict[str, Any]:
        """The fields under their own names, the state as text."""
        return dataclasses.asdict(self) | {"state": self.state.value}


def status_of(snapshot: Snapshot) -> JobStatus:
    """The status of one job."""
    report, beat = snapshot.report, snapshot.report.heartbeat or Beat()
    state = state_of(snapshot)
    is_live = state in (State.RUNNING, State.GATHERING) and not _is_any_lost(snapshot) and not report.is_judged
    return JobStatus(
        name=snapshot.name,
        namespace=snapshot.namespace,
        state=state,
        is_ours=snapshot.is_ours,
        queue=snapshot.queue,
        hosts=snapshot.expected_hosts,
        ready=None
        if "pods" in snapshot.not_read
        else sum(
            host.is_ready and not host.is_leaving and not snapshot.is_on_silent_node(host) for host in snapshot.hosts
        ),
        generation=snapshot.restarts,
        attempt=beat.attempt or (report.verdict.attempt if report.verdict else None),
        phase=_phase(snapshot) if is_live else None,
        phase_s=_age(_utc(beat.since), snapshot.now) if is_live else None,
        missing=tuple(report.missing),
        members=snapshot.members.to_wire()
        if hosts.moves(snapshot.jobset) and lost_hosts.is_table_known(snapshot)
        else None,
        spares=tuple(lost_hosts.spares(snapshot)),
        step=report.step,
        steps=_steps(snapshot),
        committed=report.committed,
        committed_age_s=_age(report.committed_at, snapshot.now),
        goodput=report.goodput,
        as_of=_as_of(snapshot),
        restarts=_restarts(snapshot),
        verdict=_verdict(snapshot, state),
        code=exit_code(snapshot, state),
        nodes=tuple(dict.fromkeys(host.node for host in snapshot.hosts if host.node)),
        age_s=seconds_since(snapshot.created, snapshot.now) or 0.0,
        lasted_s=_lasted(snapshot, state),
        restart_seconds=beat.restart,
    )


def state_of(snapshot: Snapshot) -> State:
    """How far the job is, or how it ended."""
    ended = {"Completed": State.DONE, "Failed": State.FAILED}.get(terminal_state(snapshot.jobset) or "")
    if "deletionTimestamp" in snapshot.jobset["metadata"]:
        return State.DELETING
    if ended is not None:
        return ended
    if snapshot.is_suspended or is_stopped_in_queue(snapshot):
        return _suspended(snapshot)
    if "pods" in snapshot.not_read:
        return State.UNKNOWN
    if _is_restarting(snapshot):
        return State.RESTARTING
    return _progress(snapshot)


def is_stopped_in_queue(snapshot: Snapshot) -> bool:
    """Whether its Workload is deactivated: by `launcher stop`, or by Kueue after too many tries."""
    return snapshot.workload is not None and snapshot.workload.get("spec", {}).get("active") is False


def _suspended(snapshot: Snapshot) -> State:
    """Suspended: by a person, or by Kueue."""
    if snapshot.queue is None or is_stopped_in_queue(snapshot):
        are_left = _are_pods_left(snapshot)
        return State.SUSPENDED if are_left is None else State.STOPPING if are_left else State.STOPPED
    return State.SUSPENDED if "workloads" in snapshot.not_read else State.QUEUED


def _are_pods_left(snapshot: Snapshot) -> bool | None:
    """Whether pods have not ended, by what their Jobs count where they could not be read; None: not known."""
    if "pods" not in snapshot.not_read:
        return any(not host.has_ended for host in snapshot.hosts)
    counts = [one.get("status", {}) for one in snapshot.jobs]
    return any(one.get("active") or one.get("terminating") for one in counts) if counts else None


def _is_restarting(snapshot: Snapshot) -> bool:
    """The last generation has ended or is ending, and its successor's pods are not here."""
    if not snapshot.hosts:
        return snapshot.restarts > 0
    if snapshot.hosts[0].generation < snapshot.restarts:
        return True
    if snapshot.is_ours and any(host.phase == "Failed" for host in snapshot.hosts) and not snapshot.waits_for_pods:
        return True  # its Job fails with the first pod
    return all(host.is_leaving or host.has_ended for host in snapshot.hosts) and not _all_succeeded(snapshot)


def _is_any_lost(snapshot: Snapshot) -> bool:
    """Whether a host is on its way out, or its node does not answer: what the agents reported last is older."""
    return any(
        host.is_leaving or host.disruption or (host.running and not host.is_ready) or snapshot.is_on_silent_node(host)
        for host in snapshot.hosts
        if host.number in snapshot.members
    ) or (lost_hosts.has_begun(snapshot) and lost_hosts.are_members_lost(snapshot))


def _all_succeeded(snapshot: Snapshot) -> bool:
    """Whether the gang is done: of one whose lost pods are made again, host 0 alone says so."""
    done = [host.number for host in snapshot.hosts if host.phase == "Succeeded"]
    return len(done) == len(snapshot.hosts) or (snapshot.waits_for_pods and 0 in done)


def _progress(snapshot: Snapshot) -> State:
    """How far the slowest host is; of a gang that ran, whether it runs without those that are lost."""
    if lost_hosts.has_begun(snapshot):
        waits = snapshot.report.stage in (None, "gather") and snapshot.report.verdict is None
        return State.GATHERING if waits or lost_hosts.are_members_lost(snapshot) else State.RUNNING
    if len(snapshot.hosts) < snapshot.expected_hosts:
        return State.CREATING
    if any(host.node is None for host in snapshot.hosts):
        return State.PENDING
    if not all(host.has_started for host in snapshot.hosts):
        return State.STARTING
    return State.GATHERING if snapshot.report.stage == "gather" else State.RUNNING


def _phase(snapshot: Snapshot) -> str | None:
    """The phase of most ranks; before they start, rendezvous."""
    if snapshot.report.stage == "gather":
        return "rendezvous"
    return (snapshot.report.heartbeat or Beat()).phase


def _as_of(snapshot: Snapshot) -> Mapping[str, str] | None:
    recorded = snapshot.report.recorded
    if recorded is None:
        return None
    return {"at": datetime.fromtimestamp(recorded.at, UTC).isoformat(timespec="seconds"), "when": WHEN[recorded.when]}


def as_of_line(status: JobStatus, now: datetime) -> str:
    """ "12:03:11 UTC (7m ago), when it was stopped", or with the date of a day before; empty of numbers of now."""
    if status.as_of is None:
        return ""
    at = datetime.fromisoformat(status.as_of["at"])
    day = "" if at.date() == now.astimezone(UTC).date() else f"{at:%Y-%m-%d} "
    return f"{day}{at:%H:%M:%S} UTC ({format_age(_age(at, now) or 0.0)} ago), {status.as_of['when']}"


def _utc(at: float | None) -> datetime | None:
    return None if at is None else datetime.fromtimestamp(at, UTC)


def _age(at: datetime | None, now: datetime) -> float | None:
    """Seconds since then; never negative, however the clocks differ."""
    return None if at is None else max(0.0, (now - at).total_seconds())


def _steps(snapshot: Snapshot) -> int | None:
    """The last step of the whole run, where the job has a `train:` block."""
    return checked.number_in(_variable(snapshot, contract.TRAIN_SPEC), "steps")


def _variable(snapshot: Snapshot, name: str) -> str:
    return hosts.environment(snapshot.jobset).get(name, "")


def _restarts(snapshot: Snapshot) -> Restarts:
    policy = snapshot.jobset.get("spec", {}).get("failurePolicy") or {}
    charged = int(snapshot.jobset.get("status", {}).get("restartsCountTowardsMax", 0))
    causes = snapshot.report.ends_by_cause
    if causes is None and not snapshot.restarts:
        causes = {}
    preempted = snapshot.report.preempted
    if preempted is None and not snapshot.restarts:
        preempted = 0
    limit = checked.number_in(_variable(snapshot, contract.JOB), "preempted_limit")
    total = history.restart_count(snapshot.restarts, causes)
    return Restarts(total, charged, int(policy.get("maxRestarts", 0)), causes, preempted, limit)


def _verdict(snapshot: Snapshot, state: State) -> Mapping[str, Any] | None:
    """The verdict that matters now: on the end, or on the attempt before this one."""
    last = snapshot.report.last
    if last is None or (state is State.RUNNING and last.verdict.code == contract.PREEMPTED):
        return None
    return last.verdict.to_json()


def exit_code(snapshot: Snapshot, state: State) -> int | None:
    """The exit code of a run that is over: its verdict's, else that of a container, else 1; None before."""
    if state is State.DONE:
        return contract.DONE
    if state is not State.FAILED:
        return None
    if snapshot.report.verdict is not None and snapshot.report.verdict.verdict.code != contract.DONE:
        return snapshot.report.verdict.verdict.code
    ends = [host.ended for host in snapshot.hosts]
    ends += [one.ended for host in snapshot.hosts for one in host.beside]
    codes = [end["exitCode"] for end in ends if end.get("exitCode")]
    messages = [condition(one, "Failed").get("message", "") for one in (*snapshot.jobs, snapshot.jobset)]
    codes += [int(match[1]) for text in messages if (match := _EXIT_CODE.search(text))]
    return codes[0] if codes else 1


def _lasted(snapshot: Snapshot, state: State) -> float | None:
    """Seconds between the JobSet's creation and its end."""
    kind = {State.DONE: "Completed", State.FAILED: "Failed"}.get(state)
    if kind is None or not is_true(snapshot.jobset, kind):
        return None
    ended = parse_time(condition(snapshot.jobset, kind).get("lastTransitionTime"))
    began = parse_time(snapshot.created)
    return None if ended is None or began is None else max(0.0, (ended - began).total_seconds())
