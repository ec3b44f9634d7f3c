"""The status of a job, derived from its snapshot: a state and numbers. Pure functions."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import Action, Limit
from jaxlaunch.launcher.jobs.status import hosts, roles
from jaxlaunch.launcher.jobs.status.snapshot import (
    Snapshot,
    are_members_known,
    are_members_lost,
    has_gang_started,
    is_leader_replaced,
    spare_hosts,
)
from jaxlaunch.launcher.kubernetes.objects import (
    find_condition,
    format_age,
    is_condition_true,
    lead_name,
    parse_time,
    seconds_since,
    terminal_state,
)
from jaxlaunch.records import codec
from jaxlaunch.records.log_lines import ANNOTATION_MOMENTS, BeatLine
from jaxlaunch.records.run_numbers import RunNumbers
from jaxlaunch.records.summary import Summary
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import history

# Part of the message of a Job that its pod failure policy has failed.
_EXIT_CODE_MESSAGE = re.compile(r"failed with exit code (\d{1,3})\b")


class State(enum.StrEnum):
    """State of a job."""

    # Kueue has not admitted the job.
    QUEUED = "Queued"
    # Some pods do not exist yet.
    CREATING = "Creating"
    # Pods wait for nodes.
    PENDING = "Pending"
    # Images are pulled, volumes mounted or containers created.
    STARTING = "Starting"
    # The agents wait for each other at the rendezvous.
    GATHERING = "Gathering"
    # The containers run. If the leader's log was not read, the job may still be GATHERING.
    RUNNING = "Running"
    # The job has failed for good, and its pods stay for a look (hold_on_failure).
    HELD = "Held"
    # A generation has ended, and the next has not started.
    RESTARTING = "Restarting"
    STOPPING = "Stopping"
    STOPPED = "Stopped"
    DELETING = "Deleting"
    DONE = "Done"
    FAILED = "Failed"
    # QUEUED, STOPPING or STOPPED: the objects that would tell could not be read.
    SUSPENDED = "Suspended"
    # The pods could not be read.
    UNKNOWN = "Unknown"


FINAL_STATES = (State.DONE, State.FAILED, State.STOPPED)


@dataclasses.dataclass(frozen=True)
class Restarts:
    """Number of restarts, and the limits for them.

    Attributes:
        total: Restarts in place and with new pods.
        charged: Those that count against `limit`.
        limit: maxRestarts of the failure policy.
        preempted: Preemptions in a row without a newly saved step, or None if not known.
        preempted_limit: Limit for these, or None if there is none.
    """

    total: int
    charged: int
    limit: int
    preempted: int | None
    preempted_limit: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobStatus(RunNumbers):
    """A job as `launcher status` and `launcher list` show it. Unknown fields are None."""

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
    # Hosts with ranks in the order of the ranks, as `0,3,2`. None if ranks never move.
    members: str | None
    # Running hosts without ranks.
    spares: tuple[int, ...]
    committed_age_s: float | None
    # If the numbers are from a record and not from the leader's log: the time (`at`) and the
    # occasion (`when`) of the record.
    as_of: Mapping[str, str] | None
    restart_counts: Restarts
    verdict: Mapping[str, Any] | None
    # Exit code of a job that has ended.
    code: int | None
    nodes: tuple[str, ...]
    age_s: float
    # Time from the creation to the end of a job that has ended.
    lasted_s: float | None
    # Time until which a failed job stays for a look, in the state HELD.
    held_until: str | None = None
    # Duration of the parts of the last restart, by their keys in contract.RESTART_CAUSES.
    restart_seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # Folder of a run on this machine, which has an empty namespace.
    folder: str | None = None
    # Newest start of such a run if it was refused: `start`, `at`, `code` and `message`.
    refused_start: Mapping[str, Any] | None = None
    # The role whose end decided on the result of a job with roles.
    role: str | None = None
    # The roles of such a job by name.
    roles: Mapping[str, JobStatus] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON, with the state as text."""
        roles = {name: status.to_json() for name, status in self.roles.items()}
        fields = dataclasses.asdict(dataclasses.replace(self, roles={}))
        fields |= {"state": self.state.value, "roles": roles}
        fields["restarts"] = fields.pop("restart_counts") | {"by_cause": self.restarts}
        return fields


def add_roles(status: JobStatus, role_statuses: Mapping[str, JobStatus], lead: str) -> JobStatus:
    """Return the status of a job with roles: the hosts of all, and the numbers of the lead."""
    if not role_statuses:
        return status
    ready = [role.ready for role in role_statuses.values() if role.ready is not None]
    counts = [role.restart_counts for role in role_statuses.values()]
    restart_counts = dataclasses.replace(
        status.restart_counts,
        total=sum(count.total for count in counts),
        charged=sum(count.charged for count in counts),
    )
    numbers = {} if lead not in role_statuses else role_statuses[lead].run_numbers()
    return dataclasses.replace(
        status,
        **numbers,
        hosts=sum(role.hosts for role in role_statuses.values()),
        ready=sum(ready) if ready and status.state not in FINAL_STATES else None,
        phase=role_statuses[lead].phase if lead in role_statuses else None,
        restart_counts=restart_counts,
        roles=role_statuses,
    )


def derive_status(snapshot: Snapshot) -> JobStatus:
    """Return the status of one job, of one with roles that of its lead with those of all roles."""
    parts = roles.split_roles(snapshot)
    if not parts:
        return _derive_part_status(snapshot)
    is_over = terminal_state(snapshot.jobset) is not None
    statuses = {name: _derive_part_status(part) for name, part in parts.items()}
    decisive = roles.find_decisive_role(snapshot) or ""
    status = dataclasses.replace(
        statuses[decisive], name=snapshot.name, role=decisive if is_over else None
    )
    if is_over:
        # The pods of the other roles were stopped with the JobSet.
        statuses = {
            name: status
            if name == decisive or roles.has_ended_alone(parts[name])
            else dataclasses.replace(status, state=State.STOPPED, code=None)
            for name, status in statuses.items()
        }
    combined = add_roles(status, statuses, lead_name(snapshot.jobset) or "")
    return dataclasses.replace(combined, restart_counts=status.restart_counts)


def _derive_part_status(snapshot: Snapshot) -> JobStatus:
    report, heartbeat, now = snapshot.report, snapshot.report.heartbeat or BeatLine(), snapshot.now
    state = derive_state(snapshot)
    # If a host with ranks is leaving or lost, the agents' last report is outdated.
    is_report_outdated = any(
        host.is_leaving
        or host.disruption
        or (host.running and not host.is_ready)
        or snapshot.is_on_silent_node(host)
        for host in snapshot.hosts
        if host.number in snapshot.members
    ) or (has_gang_started(snapshot) and are_members_lost(snapshot))
    is_live = (
        state in (State.RUNNING, State.GATHERING)
        and not is_report_outdated
        and not report.is_attempt_over
    )
    ready_hosts = [host for host in snapshot.hosts if host.is_ready and not host.is_leaving]
    connected_hosts = [host for host in ready_hosts if not snapshot.is_on_silent_node(host)]
    # A pod may be ready before its agent has joined the rendezvous.
    if report.stage == "gather":
        connected_hosts = [
            host for host in connected_hosts if host.number not in report.missing_hosts
        ]
    elif state is State.GATHERING and report.heartbeat is None and is_leader_replaced(snapshot):
        connected_hosts = [host for host in connected_hosts if host.number == 0]
    are_members_shown = hosts.can_move_ranks(snapshot.jobset) and are_members_known(snapshot)
    last_end = report.last_end
    # The verdict on a stop is no longer of interest once the job runs again.
    is_resumed = (
        last_end is not None
        and state is State.RUNNING
        and contract.outcome_for_code(last_end.verdict.code).is_stop
    )
    attempt = heartbeat.attempt or (report.attempt_end.attempt if report.attempt_end else None)
    restarts = report.ends_by_cause
    if restarts is None and not snapshot.restarts:
        restarts = {}
    # A job with a `train:` block has its number of steps before the first report.
    steps = codec.read_number(_read_variable(snapshot, contract.TRAIN_SPEC), "steps")
    steps = report.numbers["steps"] or steps
    return JobStatus(
        name=snapshot.name,
        namespace=snapshot.namespace,
        state=state,
        is_ours=snapshot.is_ours,
        queue=snapshot.queue,
        hosts=snapshot.expected_hosts,
        ready=None if "pods" in snapshot.unread_reasons else len(connected_hosts),
        generation=snapshot.restarts,
        attempt=attempt,
        # The phase of most ranks, or "rendezvous" before they start.
        phase=("rendezvous" if report.stage == "gather" else heartbeat.phase) if is_live else None,
        phase_s=_elapsed_s(heartbeat.since, now) if is_live else None,
        missing=tuple(report.missing_hosts),
        members=snapshot.members.to_wire() if are_members_shown else None,
        spares=tuple(spare_hosts(snapshot)),
        committed_age_s=_elapsed_s(heartbeat.committed_at, now),
        as_of=_read_as_of(snapshot),
        restart_counts=_count_restarts(snapshot, restarts, attempt),
        verdict=None if last_end is None or is_resumed else last_end.verdict.to_json(),
        code=exit_code(snapshot, state),
        nodes=tuple(dict.fromkeys(host.node for host in snapshot.hosts if host.node)),
        age_s=seconds_since(snapshot.created_at, now) or 0.0,
        lasted_s=_duration_s(snapshot, state),
        held_until=format_hold_end(heartbeat, state),
        restart_seconds=heartbeat.restart,
        **(report.numbers | {"restarts": restarts, "steps": steps}),
    )


def derive_state(snapshot: Snapshot) -> State:
    """Return the job's state. While it starts, that is the state of its slowest host."""
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
    return _state_of_pods(snapshot)


def _state_of_pods(snapshot: Snapshot) -> State:
    """Return the state of a job whose newest pods are starting or running."""
    if snapshot.report.stage == "hold":
        return State.HELD
    if has_gang_started(snapshot):
        is_waiting = (
            snapshot.report.stage in (None, "gather") and snapshot.report.attempt_end is None
        )
        return State.GATHERING if is_waiting or are_members_lost(snapshot) else State.RUNNING
    if len(snapshot.hosts) < snapshot.expected_hosts:
        return State.CREATING
    if any(host.node is None for host in snapshot.hosts):
        return State.PENDING
    if not all(host.has_started for host in snapshot.hosts):
        return State.STARTING
    return State.GATHERING if snapshot.report.stage == "gather" else State.RUNNING


def _ends_with_namespace(snapshot: Snapshot) -> bool:
    """Return whether the namespace is being deleted, and the job had not ended before that."""
    if snapshot.ending_namespace is None:
        return False
    deleted_at = snapshot.ending_namespace["metadata"].get("deletionTimestamp", "")
    ends = (find_condition(snapshot.jobset, kind) for kind in ("Completed", "Failed"))
    ended_at = max((end.get("lastTransitionTime", "") for end in ends), default="")
    return terminal_state(snapshot.jobset) is None or (
        # In a namespace that is being deleted Jobs fail, since their pods are deleted first.
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
        has_live_pods = any(not host.has_ended for host in snapshot.hosts)
    elif snapshot.jobs:
        # The pods could not be read, but the Jobs count them.
        counts = [job.get("status", {}) for job in snapshot.jobs]
        has_live_pods = any(count.get("active") or count.get("terminating") for count in counts)
    else:
        return State.SUSPENDED
    if has_live_pods:
        return State.STOPPING
    attempt_end = snapshot.report.attempt_end
    may_be_held = hosts.read_agent_job(snapshot.jobset).hold_s
    # The stop of a held job must not hide that it has failed.
    if may_be_held and attempt_end is not None and fails_job(snapshot, attempt_end.verdict):
        return State.FAILED
    return State.STOPPED


def fails_job(snapshot: Snapshot, verdict: Verdict) -> bool:
    """Return whether the JobSet fails, and does not restart its pods, when they end so."""
    outcome = contract.outcome_for_code(verdict.code)
    if outcome.charged_to is not Limit.CRASH:
        return outcome.action is Action.FAIL
    restarts = _count_restarts(snapshot, None, None)
    return restarts.charged >= restarts.limit


def _is_restarting(snapshot: Snapshot) -> bool:
    """Return whether the newest generation with pods has ended or is ending without success."""
    if not snapshot.hosts:
        return snapshot.restarts > 0
    if snapshot.hosts[0].generation < snapshot.restarts:
        return True
    has_failed = any(host.phase == "Failed" for host in snapshot.hosts)
    if snapshot.is_ours and has_failed and not snapshot.replaces_pods:
        # The Job fails as soon as one of its pods has failed.
        return True
    # If lost pods are replaced, the gang is done when host 0's pod has succeeded.
    done_numbers = [host.number for host in snapshot.hosts if host.phase == "Succeeded"]
    is_done = len(done_numbers) == len(snapshot.hosts) or (
        snapshot.replaces_pods and 0 in done_numbers
    )
    return all(host.is_leaving or host.has_ended for host in snapshot.hosts) and not is_done


def _read_as_of(snapshot: Snapshot) -> Mapping[str, str] | None:
    recorded_progress = snapshot.report.recorded_progress
    if recorded_progress is None:
        return None
    return {
        "at": format_utc(recorded_progress.at),
        "when": ANNOTATION_MOMENTS[recorded_progress.when],
    }


def format_utc(at: float) -> str:
    """Return a Unix time in ISO format, in UTC."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def format_hold_end(record: BeatLine | Summary | None, state: State) -> str | None:
    """Return the time until which a job in the state HELD stays, or None for another state."""
    if state is not State.HELD or record is None or record.held_until is None:
        return None
    return format_utc(record.held_until)


def describe_as_of(status: JobStatus, now: datetime) -> str:
    """Return "12:03:11 UTC (7m ago), when it was stopped", or "" if the numbers are current."""
    if status.as_of is None:
        return ""
    at = datetime.fromisoformat(status.as_of["at"])
    day = "" if at.date() == now.astimezone(UTC).date() else f"{at:%Y-%m-%d} "
    age = format_age(_seconds_between(at, now))
    return f"{day}{at:%H:%M:%S} UTC ({age} ago), {status.as_of['when']}"


def list_host_rows(snapshot: Snapshot, limit: int = 64) -> list[tuple[str, ...]]:
    """Return the first `limit` hosts: number, ranks, ready, state, node and pod of each.

    Those that are not ready are first.
    """
    sorted_hosts = sorted(snapshot.hosts, key=lambda host: (host.is_ready, host.number))
    spares, rows = spare_hosts(snapshot), list[tuple[str, ...]]()
    for host in sorted_hosts[:limit]:
        state = host.waiting.get("reason") or host.terminated.get("reason") or host.phase
        state = "Terminating" if host.is_leaving and not host.has_ended else state
        ready = "yes" if host.is_ready else "-" if host.has_ended else "no"
        ranks = snapshot.members.ranks_of(host.number)
        ranks_text = f"{ranks[0]}-{ranks[-1]}" if ranks else "-"
        if host.number in spares:
            ranks_text = "spare"
        elif len(ranks) == 1:
            ranks_text = str(ranks[0])
        rows.append((str(host.number), ranks_text, ready, state, host.node or "-", host.pod))
    return rows


def _elapsed_s(at: float | None, now: datetime) -> float | None:
    return None if at is None else _seconds_between(datetime.fromtimestamp(at, UTC), now)


def _seconds_between(at: datetime, now: datetime) -> float:
    """Return the seconds between two times, at least 0 because clocks may differ."""
    return max(0.0, (now - at).total_seconds())


def _read_variable(snapshot: Snapshot, name: str) -> str:
    return hosts.read_environment(snapshot.jobset).get(name, "")


def _count_restarts(
    snapshot: Snapshot, by_cause: Mapping[str, int] | None, attempt: int | None
) -> Restarts:
    policy = snapshot.jobset.get("spec", {}).get("failurePolicy") or {}
    charged = int(snapshot.jobset.get("status", {}).get("restartsCountTowardsMax", 0))
    heartbeat = snapshot.report.heartbeat
    preempted = None if heartbeat is None else heartbeat.preempted
    if preempted is None and not snapshot.restarts:
        preempted = 0
    limit = codec.read_number(_read_variable(snapshot, contract.JOB), "preempted_limit")
    total = history.restart_count(snapshot.restarts, by_cause, attempt)
    return Restarts(total, charged, int(policy.get("maxRestarts", 0)), preempted, limit)


def exit_code(snapshot: Snapshot, state: State) -> int | None:
    """Return the exit code of a job that has ended: its verdict's, else a container's, else 1."""
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
    matches = [_EXIT_CODE_MESSAGE.search(condition.get("message", "")) for condition in conditions]
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
