"""Status of a job from its snapshot: one state and its numbers. Pure."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.snapshot import (
    Snapshot,
    are_members_lost,
    has_begun,
    is_leader_new,
    is_table_known,
    spare_hosts,
)
from jaxlaunch.launcher.kubernetes.objects import (
    find_condition,
    format_age,
    is_condition_true,
    parse_time,
    seconds_since,
    terminal_state,
)
from jaxlaunch.records import codec
from jaxlaunch.records.log_lines import ANNOTATION_MOMENTS, BeatLine
from jaxlaunch.records.run_numbers import RunNumbers
from jaxlaunch.runs import history

# A Job's pod failure policy writes this into its condition.
_EXIT_CODE = re.compile(r"failed with exit code (\d{1,3})\b")


class State(enum.StrEnum):
    """Progress of a job, or how it ended."""

    # Kueue has not admitted it.
    QUEUED = "Queued"
    # Pods are missing.
    CREATING = "Creating"
    # Pods wait for nodes.
    PENDING = "Pending"
    # Images are pulled, volumes mounted or containers created.
    STARTING = "Starting"
    # The agents wait for each other.
    GATHERING = "Gathering"
    # The containers run. If the leader's log was not read, the agents may still wait for each
    # other.
    RUNNING = "Running"
    # A generation has ended, and the next has not started.
    RESTARTING = "Restarting"
    STOPPING = "Stopping"
    STOPPED = "Stopped"
    DELETING = "Deleting"
    DONE = "Done"
    FAILED = "Failed"
    # Suspended by its queue or by a user, or still saving: which of these could not be read.
    SUSPENDED = "Suspended"
    # The pods could not be read.
    UNKNOWN = "Unknown"


FINAL_STATES = (State.DONE, State.FAILED, State.STOPPED)


@dataclasses.dataclass(frozen=True)
class Restarts:
    """Number of restarts in place and with new pods, and of those that count against the limit."""

    total: int
    charged: int  # against the limit
    limit: int  # maxRestarts of the failure policy
    preempted: int | None  # preemptions in a row without a newly saved step; None: not known
    preempted_limit: int | None  # the limit of these; None: no limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus(RunNumbers):
    """One job as shown by `launcher status`, `launcher list` and their JSON. None means unknown."""

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
    # Hosts with ranks, in the order of these, as `0,3,2`; None: each its own, or not known.
    members: str | None
    # Hosts that are ready to hold ranks.
    spares: tuple[int, ...]
    committed_age_s: float | None
    # `at` and `when` these numbers were true, where no leader's log has newer ones.
    as_of: Mapping[str, str] | None
    restart_counts: Restarts
    verdict: Mapping[str, Any] | None
    # The exit code of the job, once it is over.
    code: int | None
    nodes: tuple[str, ...]
    age_s: float
    # From the first start to the end.
    lasted_s: float | None
    # Of the last restart, by contract.RESTART_CAUSES.
    restart_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Of a run on this machine, whose namespace is empty.
    folder: str | None = None
    # The newest start of such a run, if it was refused: its `start`, `at`, `code` and `message`.
    refused_start: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON, with the state as text."""
        fields = dataclasses.asdict(self) | {"state": self.state.value}
        fields["restarts"] = fields.pop("restart_counts") | {"by_cause": self.restarts}
        return fields


def derive_status(snapshot: Snapshot) -> JobStatus:
    """Return the status of one job."""
    report, beat, now = snapshot.report, snapshot.report.heartbeat or BeatLine(), snapshot.now
    state = derive_state(snapshot)
    # If a host is being deleted or its node does not answer, the agents' last report is outdated.
    is_any_lost = any(
        host.is_leaving
        or host.disruption
        or (host.running and not host.is_ready)
        or snapshot.is_on_silent_node(host)
        for host in snapshot.hosts
        if host.number in snapshot.members
    ) or (has_begun(snapshot) and are_members_lost(snapshot))
    is_live = state in (State.RUNNING, State.GATHERING) and not is_any_lost and not report.is_judged
    ready = [host for host in snapshot.hosts if host.is_ready and not host.is_leaving]
    reached = [host for host in ready if not snapshot.is_on_silent_node(host)]
    # The pods are ready, and their agents have not joined host 0.
    if report.stage == "gather":
        reached = [host for host in reached if host.number not in report.missing_hosts]
    elif state is State.GATHERING and report.heartbeat is None and is_leader_new(snapshot):
        reached = [host for host in reached if host.number == 0]
    has_table = hosts.can_move_ranks(snapshot.jobset) and is_table_known(snapshot)
    last = report.last_end
    # The relevant verdict is that of the end or of the previous attempt.
    is_resumed = (
        last is not None
        and state is State.RUNNING
        and contract.outcome_for_code(last.verdict.code).is_stop
    )
    attempt = beat.attempt or (report.attempt_end.attempt if report.attempt_end else None)
    restarts = report.ends_by_cause
    if restarts is None and not snapshot.restarts:
        restarts = {}
    # Of a job with a `train:` block, the job says it before the first report.
    steps = codec.read_number(_read_variable(snapshot, contract.TRAIN_SPEC), "steps")
    steps = report.numbers["steps"] or steps
    return JobStatus(
        name=snapshot.name,
        namespace=snapshot.namespace,
        state=state,
        is_ours=snapshot.is_ours,
        queue=snapshot.queue,
        hosts=snapshot.expected_hosts,
        ready=None if "pods" in snapshot.unread_reasons else len(reached),
        generation=snapshot.restarts,
        attempt=attempt,
        # The phase of most ranks, or rendezvous before they start.
        phase=("rendezvous" if report.stage == "gather" else beat.phase) if is_live else None,
        phase_s=_seconds_since(beat.since, now) if is_live else None,
        missing=tuple(report.missing_hosts),
        members=snapshot.members.to_wire() if has_table else None,
        spares=tuple(spare_hosts(snapshot)),
        committed_age_s=_seconds_since(beat.committed_at, now),
        as_of=_read_as_of(snapshot),
        restart_counts=_count_restarts(snapshot, restarts, attempt),
        verdict=None if last is None or is_resumed else last.verdict.to_json(),
        code=exit_code(snapshot, state),
        nodes=tuple(dict.fromkeys(host.node for host in snapshot.hosts if host.node)),
        age_s=seconds_since(snapshot.created_at, now) or 0.0,
        lasted_s=_duration_s(snapshot, state),
        restart_seconds=beat.restart,
        **(report.numbers | {"restarts": restarts, "steps": steps}),
    )


def derive_state(snapshot: Snapshot) -> State:
    """Return the job's state, which is that of its slowest host while it starts."""
    final_state = {"Completed": State.DONE, "Failed": State.FAILED}.get(
        terminal_state(snapshot.jobset) or ""
    )
    if "deletionTimestamp" in snapshot.jobset["metadata"] or _ends_with_namespace(snapshot):
        return State.DELETING
    if final_state is not None:
        return final_state
    if snapshot.is_suspended or is_stopped_in_queue(snapshot):
        return _suspended_state(snapshot)
    if "pods" in snapshot.unread_reasons:
        return State.UNKNOWN
    if _is_restarting(snapshot):
        return State.RESTARTING
    if has_begun(snapshot):
        waits = snapshot.report.stage in (None, "gather") and snapshot.report.attempt_end is None
        return State.GATHERING if waits or are_members_lost(snapshot) else State.RUNNING
    # The slowest host decides.
    if len(snapshot.hosts) < snapshot.expected_hosts:
        return State.CREATING
    if any(host.node is None for host in snapshot.hosts):
        return State.PENDING
    if not all(host.has_started for host in snapshot.hosts):
        return State.STARTING
    return State.GATHERING if snapshot.report.stage == "gather" else State.RUNNING


def _ends_with_namespace(snapshot: Snapshot) -> bool:
    """Return whether the namespace is being deleted, and the job had not ended before."""
    if snapshot.ending_namespace is None:
        return False
    deleted_at = snapshot.ending_namespace["metadata"].get("deletionTimestamp", "")
    ends = (find_condition(snapshot.jobset, kind) for kind in ("Completed", "Failed"))
    ended_at = max((end.get("lastTransitionTime", "") for end in ends), default="")
    return terminal_state(snapshot.jobset) is None or (
        # Jobs fail in a namespace that is being deleted, since their pods go first.
        terminal_state(snapshot.jobset) == "Failed" and ended_at >= deleted_at
    )


def is_stopped_in_queue(snapshot: Snapshot) -> bool:
    """Return whether the Workload is deactivated, by `launcher stop` or by Kueue."""
    return (snapshot.workload or {}).get("spec", {}).get("active") is False


def _suspended_state(snapshot: Snapshot) -> State:
    """Return the state of a job that a user or Kueue has suspended."""
    if snapshot.queue is not None and not is_stopped_in_queue(snapshot):
        return State.SUSPENDED if "workloads" in snapshot.unread_reasons else State.QUEUED
    if "pods" not in snapshot.unread_reasons:
        are_left = any(not host.has_ended for host in snapshot.hosts)
    elif snapshot.jobs:
        # If the pods could not be read, the Jobs' counts are used.
        counts = [job.get("status", {}) for job in snapshot.jobs]
        are_left = any(count.get("active") or count.get("terminating") for count in counts)
    else:
        return State.SUSPENDED
    return State.STOPPING if are_left else State.STOPPED


def _is_restarting(snapshot: Snapshot) -> bool:
    """Return whether the last generation has ended or is ending, and the next has no pods."""
    if not snapshot.hosts:
        return snapshot.restarts > 0
    if snapshot.hosts[0].generation < snapshot.restarts:
        return True
    has_failed = any(host.phase == "Failed" for host in snapshot.hosts)
    if snapshot.is_ours and has_failed and not snapshot.waits_for_pods:
        # The Job fails with its first pod.
        return True
    # If lost pods are replaced, only host 0 shows that the gang is done.
    done = [host.number for host in snapshot.hosts if host.phase == "Succeeded"]
    is_done = len(done) == len(snapshot.hosts) or (snapshot.waits_for_pods and 0 in done)
    return all(host.is_leaving or host.has_ended for host in snapshot.hosts) and not is_done


def _read_as_of(snapshot: Snapshot) -> Mapping[str, str] | None:
    recorded = snapshot.report.recorded
    if recorded is None:
        return None
    return {
        "at": datetime.fromtimestamp(recorded.at, UTC).isoformat(timespec="seconds"),
        "when": ANNOTATION_MOMENTS[recorded.when],
    }


def describe_as_of(status: JobStatus, now: datetime) -> str:
    """Return "12:03:11 UTC (7m ago), when it was stopped", or "" for current numbers."""
    if status.as_of is None:
        return ""
    at = datetime.fromisoformat(status.as_of["at"])
    day = "" if at.date() == now.astimezone(UTC).date() else f"{at:%Y-%m-%d} "
    age = format_age(_seconds_between(at, now))
    return f"{day}{at:%H:%M:%S} UTC ({age} ago), {status.as_of['when']}"


def _seconds_since(at: float | None, now: datetime) -> float | None:
    return None if at is None else _seconds_between(datetime.fromtimestamp(at, UTC), now)


def _seconds_between(at: datetime, now: datetime) -> float:
    """Return the seconds between two times, at least 0 whatever the skew of the clocks."""
    return max(0.0, (now - at).total_seconds())


def _read_variable(snapshot: Snapshot, name: str) -> str:
    return hosts.read_environment(snapshot.jobset).get(name, "")


def _count_restarts(
    snapshot: Snapshot, by_cause: Mapping[str, int] | None, attempt: int | None
) -> Restarts:
    policy = snapshot.jobset.get("spec", {}).get("failurePolicy") or {}
    charged = int(snapshot.jobset.get("status", {}).get("restartsCountTowardsMax", 0))
    beat = snapshot.report.heartbeat
    preempted = None if beat is None else beat.preempted
    if preempted is None and not snapshot.restarts:
        preempted = 0
    limit = codec.read_number(_read_variable(snapshot, contract.JOB), "preempted_limit")
    total = history.restart_count(snapshot.restarts, by_cause, attempt)
    return Restarts(total, charged, int(policy.get("maxRestarts", 0)), preempted, limit)


def exit_code(snapshot: Snapshot, state: State) -> int | None:
    """Return the exit code of an ended run: its verdict's, else a container's, else 1."""
    if state is State.DONE:
        return contract.DONE
    if state is not State.FAILED:
        return None
    attempt_end = snapshot.report.attempt_end
    if attempt_end is not None and attempt_end.verdict.code != contract.DONE:
        return attempt_end.verdict.code
    ends = [host.terminated for host in snapshot.hosts]
    ends += [container.terminated for host in snapshot.hosts for container in host.other_containers]
    codes = [end["exitCode"] for end in ends if end.get("exitCode")]
    conditions = [find_condition(obj, "Failed") for obj in (*snapshot.jobs, snapshot.jobset)]
    matches = [_EXIT_CODE.search(condition.get("message", "")) for condition in conditions]
    codes += [int(match[1]) for match in matches if match]
    return codes[0] if codes else 1


def _duration_s(snapshot: Snapshot, state: State) -> float | None:
    """Return the seconds between the JobSet's creation and its end."""
    kind = {State.DONE: "Completed", State.FAILED: "Failed"}.get(state)
    if kind is None or not is_condition_true(snapshot.jobset, kind):
        return None
    ended_at = parse_time(find_condition(snapshot.jobset, kind).get("lastTransitionTime"))
    began_at = parse_time(snapshot.created_at)
    return None if ended_at is None or began_at is None else _seconds_between(began_at, ended_at)
