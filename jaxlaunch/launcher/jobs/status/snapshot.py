"""The objects of one job in a cluster as plain data, and facts derived from them. Pure functions.

collect.py reads a snapshot once. The status and the explanation of the job are derived from it
alone, so tests can build any situation without a cluster.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from functools import cached_property
from typing import NamedTuple

from jaxlaunch.contract import ANNOTATION
from jaxlaunch.launcher.jobs.status import agent_report, hosts
from jaxlaunch.launcher.jobs.status.agent_report import AgentReport
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.kubernetes.labels import QUEUE_LABEL, SUBMITTED_WORDS
from jaxlaunch.launcher.kubernetes.objects import (
    MAX_EVENT_NAMES,
    Obj,
    is_suspended,
    parse_time,
    seconds_since,
    terminal_state,
)
from jaxlaunch.records import members
from jaxlaunch.records.log_lines import Line, ProgressAnnotation
from jaxlaunch.records.members import Members

# Reasons of warnings about a pod that no longer apply once it has a node.
_UNTIL_PLACED = ("FailedScheduling",)
# Reasons of warnings about a pod that no longer apply once its container runs.
_UNTIL_STARTED = (
    "FailedMount",
    "FailedAttachVolume",
    "FailedMapVolume",
    "FailedCreatePodSandBox",
    "Failed",
    "NetworkNotReady",
    "FailedToRetrieveImagePullSecret",
    "InspectFailed",
    "ErrImageNeverPull",
    "BackOff",
)
# A new leader writes its first heartbeat within this time.
_FIRST_HEARTBEAT_S = 15.0
# The JobSet controller creates the Jobs of a new JobSet within this time.
_JOB_CREATION_DELAY_S = 30.0
# The clocks of the API server and of the controllers differ by less than this.
_CLOCK_MARGIN_S = 5.0
# Placeholder in commands for the job file if it is not known.
_UNKNOWN_JOB_FILE = "JOB_FILE"


class DeletedNode(NamedTuple):
    """A node that was deleted although pods are on it.

    Attributes:
        name: Name of the node.
        since: Time of the deletion in the format of the API, if it is known.
    """

    name: str
    since: str | None


@dataclasses.dataclass(frozen=True)
class NoSuchJob:
    """Remains of a job whose JobSet does not exist, and other objects of its namespace."""

    namespace: str
    name: str
    # Folded events of an earlier job of that name, newest first.
    events: tuple[Obj, ...] = ()
    # Names of the namespace's JobSets.
    other_jobs: tuple[str, ...] = ()
    # The namespace, if it is being deleted.
    ending_namespace: Obj | None = None
    # Messages about objects that could not be read.
    unread: tuple[str, ...] = ()
    now: datetime = datetime.max.replace(tzinfo=UTC)
    # Pods and Jobs of an earlier job of that name, each with its kind.
    leftovers: tuple[tuple[str, Obj], ...] = ()


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The objects of one job. An object is None if it does not exist or is not needed."""

    namespace: str
    name: str
    now: datetime
    jobset: Obj
    jobs: tuple[Obj, ...] = ()
    # Trimmed.
    pods: tuple[Obj, ...] = ()
    # Folded, the newest first.
    events: tuple[Obj, ...] = ()
    workload: Obj | None = None
    # The namespace, if it is being deleted.
    ending_namespace: Obj | None = None
    # Name of the JobSet in this namespace for which Kueue evicted the job.
    preempted_by: str | None = None
    local_queue: Obj | None = None
    cluster_queue: Obj | None = None
    nodes: tuple[Obj, ...] | None = None
    # A node of a host that is not Ready.
    silent_node: Obj | None = None
    # A node of a host that no longer exists.
    deleted_node: DeletedNode | None = None
    # Records in the leader's log.
    records: tuple[Line, ...] = ()
    # Messages about objects that could not be read.
    unread: tuple[str, ...] = ()
    # The same by kind: "pods", "jobs", …, or "log" for the leader's log. If a kind is among them,
    # an empty field means that its objects are unknown.
    unread_reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The kinds that could not be read because the user has no permission.
    forbidden: frozenset[str] = frozenset()
    # Progress in the run folder, if it was read.
    volume_progress: ProgressAnnotation | None = None
    # Records in the log of each role's leader. `records` are then empty.
    role_records: Mapping[str, tuple[Line, ...]] = dataclasses.field(default_factory=dict)

    @cached_property
    def hosts(self) -> list[Host]:
        """Hosts of the newest generation that has pods."""
        return hosts.newest_hosts(self.jobset, self.pods)

    @cached_property
    def report(self) -> AgentReport:
        """Merged report of the agents."""
        recorded_progress = self.volume_progress or self.recorded_progress
        return agent_report.merge_reports(
            self.records,
            self.hosts,
            recorded_progress,
            is_over=terminal_state(self.jobset) is not None,
        )

    @property
    def is_job_recreated(self) -> bool:
        """Return whether a Job was created again for another reason than a restart of the JobSet.

        If a Job is deleted, the JobSet controller creates it again and does not count a restart.
        """
        timestamps = [job["metadata"].get("creationTimestamp", "") for job in self.jobs]
        if not timestamps or self.restarts or not self.is_ours:
            return False
        jobset_time, newest_time = parse_time(self.created_at), parse_time(max(timestamps))
        if jobset_time is None or newest_time is None:
            return False
        return (newest_time - jobset_time).total_seconds() > _JOB_CREATION_DELAY_S

    @cached_property
    def members(self) -> Members:
        """Hosts that hold ranks according to the newest heartbeat, or at first without one."""
        initial_members, heartbeat = hosts.initial_members(self.jobset), self.report.heartbeat
        if heartbeat is None or heartbeat.members is None:
            return initial_members
        return members.parse_members(
            heartbeat.members, initial_members.ranks_per_host, self.expected_hosts
        )

    @cached_property
    def replaces_pods(self) -> bool:
        """Return whether failed pods are replaced one by one, until the gang ends."""
        has_pod_replacement = self.is_ours and hosts.has_pod_replacement(self.jobset)
        return has_pod_replacement and not any(host.ends_gang for host in self.hosts)

    @property
    def expected_hosts(self) -> int:
        """Number of hosts that the JobSet requests."""
        return hosts.count_hosts(self.jobset)

    @property
    def is_ours(self) -> bool:
        """Return whether `launcher submit` created the JobSet."""
        return hosts.is_ours(self.jobset)

    @property
    def queue(self) -> str | None:
        """Name of the job's LocalQueue."""
        name: str | None = (self.jobset["metadata"].get("labels") or {}).get(QUEUE_LABEL)
        return name

    @property
    def restarts(self) -> int:
        """Number of restarts of the JobSet, which is also the current generation."""
        return int(self.jobset.get("status", {}).get("restarts", 0))

    @property
    def is_suspended(self) -> bool:
        """Return whether the JobSet is suspended, by Kueue or by `launcher stop`."""
        return is_suspended(self.jobset)

    @property
    def recorded_progress(self) -> ProgressAnnotation | None:
        """Progress that `launcher stop`, `submit --wait` or the leader wrote to the JobSet."""
        metadata = self.jobset["metadata"]
        return ProgressAnnotation.from_json(
            metadata.get("annotations", {}).get(ANNOTATION, ""), metadata.get("uid", "")
        )

    @property
    def submitted_words(self) -> tuple[str, ...]:
        """Arguments with which the job was submitted, or a placeholder if they are not known."""
        text = self.jobset["metadata"].get("annotations", {}).get(SUBMITTED_WORDS, "")
        with contextlib.suppress(ValueError):
            words = json.loads(text)
            if isinstance(words, list) and all(isinstance(word, str) for word in words):
                return tuple(words) or (_UNKNOWN_JOB_FILE,)
        return (_UNKNOWN_JOB_FILE,)

    @property
    def created_at(self) -> str | None:
        """Creation time of the JobSet in the format of the API."""
        timestamp: str | None = self.jobset["metadata"].get("creationTimestamp")
        return timestamp

    def is_on_silent_node(self, host: Host) -> bool:
        """Return whether the host's node does not answer or was deleted.

        The status of its pod is then outdated.
        """
        if host.node is None or host.has_ended:
            return False
        if self.silent_node is not None and self.silent_node["metadata"]["name"] == host.node:
            return True
        return self.deleted_node is not None and self.deleted_node.name == host.node

    # --- events -----------------------------------------------------------------------------------

    @property
    def newest_warning(self) -> Obj | None:
        """Newest Warning event that may still apply."""
        since = min((host.created_at for host in self.hosts), default=self.created_at or "")
        events = (event for event in self.events if event["last"] >= since)
        warnings = (event for event in events if event["type"] == "Warning")
        return next(filter(self._is_current, warnings), None)

    def _is_current(self, event: Obj) -> bool:
        """Return whether a warning is about a problem that the job may still have."""
        if event["kind"] == "Job" and event["reason"] == "FailedCreate":
            return len(self.hosts) < self.expected_hosts
        if event["kind"] != "Pod":
            return True
        hosts = self.hosts
        if event["reason"] in _UNTIL_PLACED:
            hosts = [host for host in hosts if host.node is None]
        if event["reason"] in _UNTIL_STARTED:
            hosts = [host for host in hosts if not host.running]
        return _is_about(event, hosts)

    def find_event(
        self,
        *reasons: str,
        kind: str = "",
        on_hosts: Collection[Host] | None = None,
        by: str = "",
    ) -> Obj | None:
        """Return the newest event that `find_events` yields, or None."""
        return next(self.find_events(*reasons, kind=kind, on_hosts=on_hosts, by=by), None)

    def find_events(
        self,
        *reasons: str,
        kind: str = "",
        on_hosts: Collection[Host] | None = None,
        by: str = "",
    ) -> Iterator[Obj]:
        """Yield the events with one of the reasons, the newest first.

        Args:
            *reasons: Reasons of the event.
            kind: Kind of the object that it is about, or "" for any.
            on_hosts: Hosts of which it must be about one, or None for any.
            by: Component that reported it, or "" for any.
        """
        for event in self.events:
            is_match = event["reason"] in reasons and kind in ("", event["kind"])
            is_match = is_match and by in ("", event["by"])
            if is_match and (on_hosts is None or _is_about(event, on_hosts)):
                yield event

    def has_pod_since(self, event: Obj) -> bool:
        """Return whether a pod was created after the event, so that it does not apply any more."""
        event_time = parse_time(event["last"])
        if event_time is None:
            return False
        pod_times = [parse_time(host.created_at) for host in self.hosts]
        return any(
            pod_time is not None and (pod_time - event_time).total_seconds() > _CLOCK_MARGIN_S
            for pod_time in pod_times
        )


def _is_about(event: Obj, hosts: Collection[Host]) -> bool:
    """Return whether an event is about one of these hosts.

    Where not all names of a folded event are known, it counts if it is not older than their pods.
    """
    if any(host.pod in event["names"] for host in hosts):
        return True
    is_truncated = len(event["names"]) >= MAX_EVENT_NAMES
    return is_truncated and any(host.created_at <= event["last"] for host in hosts)


# --- lost hosts of a gang whose other pods stay, and the hosts that hold ranks --------------------


def has_gang_started(snapshot: Snapshot) -> bool:
    """Return whether the processes of this generation have started once.

    If they have, a missing pod is a lost one, and the gang waits for its replacement. Without the
    leader's log this is inferred from the pods: that of the leader is created first, so the gang
    has started if another pod is older.
    """
    if not snapshot.replaces_pods or not snapshot.hosts:
        return False
    heartbeat, generation = snapshot.report.heartbeat, snapshot.hosts[0].generation
    if heartbeat is not None and heartbeat.stage is not None:
        earlier_ends = snapshot.report.earlier_ends
        has_ended = any(end.generation == generation for end in earlier_ends)
        return heartbeat.stage != "gather" or has_ended or is_leader_replaced(snapshot)
    followers = [host for host in snapshot.hosts if host.number != 0]
    leader = snapshot.hosts[0] if snapshot.hosts[0].number == 0 else None
    if not any(host.has_started for host in followers):
        return False
    if leader is None or leader.has_left_gang:
        return True
    age_s = seconds_since(leader.running.get("startedAt"), snapshot.now) or 0.0
    is_silent = not leader.has_started or age_s < _FIRST_HEARTBEAT_S
    return is_silent and is_leader_replaced(snapshot)


def is_leader_replaced(snapshot: Snapshot) -> bool:
    """Return whether host 0's pod was replaced, while another host kept its pod.

    Kubernetes creates the pod of host 0 before all others, so an older pod shows it.
    """
    leader = next((host for host in snapshot.hosts if host.number == 0), None)
    started_hosts = [host for host in snapshot.hosts if host.number != 0 and host.has_started]
    return leader is not None and any(host.created_at < leader.created_at for host in started_hosts)


def are_members_known(snapshot: Snapshot) -> bool:
    """Return whether the hosts with ranks are known, from a heartbeat or as they were at first."""
    has_heartbeat = (
        snapshot.report.heartbeat is not None and snapshot.report.recorded_progress is None
    )
    return has_heartbeat or not has_gang_started(snapshot)


def lost_hosts(snapshot: Snapshot) -> list[int]:
    """Return the numbers of the hosts without a live pod. After the gang is done there are none."""
    if is_gang_done(snapshot):
        return []
    live_numbers = {host.number for host in snapshot.hosts if host.phase != "Failed"}
    return [number for number in range(snapshot.expected_hosts) if number not in live_numbers]


def is_gang_done(snapshot: Snapshot) -> bool:
    """Return whether all ranks have succeeded. Only then does the leader's pod succeed."""
    return any(host.number == 0 and host.phase == "Succeeded" for host in snapshot.hosts)


def are_members_lost(snapshot: Snapshot) -> bool:
    """Return whether a host with ranks is lost, so that the gang cannot run."""
    return any(number in snapshot.members for number in lost_hosts(snapshot))


def missing_hosts(snapshot: Snapshot) -> list[int]:
    """Return the numbers of the hosts that are lost, have not started or do not answer."""
    late_numbers = [host.number for host in snapshot.hosts if not host.has_started]
    if snapshot.report.stage == "gather":
        suspects = (*cut_off_hosts(snapshot), *unresponsive_hosts(snapshot))
        unheard_numbers = [
            host.number for host in suspects if host.number in snapshot.report.missing_hosts
        ]
    else:
        cut_off_numbers = [host.number for host in cut_off_hosts(snapshot)]
        unheard_numbers = [number for number in cut_off_numbers if number not in snapshot.members]
    return sorted({*lost_hosts(snapshot), *late_numbers, *unheard_numbers})


def cut_off_hosts(snapshot: Snapshot) -> list[Host]:
    """Return the hosts with pods on a node that does not answer or was deleted.

    Without permission to read nodes this is inferred from the pods: the node controller marks them
    as not ready without giving a reason.
    """

    def is_cut_off(host: Host) -> bool:
        is_unexplained = host.running and not host.is_ready and not host.unready_reason
        return snapshot.is_on_silent_node(host) or bool(is_unexplained)

    return list(filter(is_cut_off, snapshot.hosts))


def reachable_hosts(snapshot: Snapshot) -> list[Host]:
    """Return the hosts with ranks whose agents answer although their node does not.

    If the attempt still runs, their agents answer: the leader notices a lost agent sooner than
    Kubernetes notices a lost node.
    """
    if (
        not has_gang_started(snapshot)
        or snapshot.report.stage != "run"
        or snapshot.report.is_attempt_over
    ):
        return []
    deleted_name = None if snapshot.deleted_node is None else snapshot.deleted_node.name

    def is_reachable(host: Host) -> bool:
        if host.number not in snapshot.members or host.node == deleted_name:
            return False
        event = snapshot.find_event("NodeNotReady", kind="Pod", on_hosts=[host])
        return event is not None or snapshot.is_on_silent_node(host)

    return list(filter(is_reachable, cut_off_hosts(snapshot)))


def unresponsive_hosts(snapshot: Snapshot) -> list[Host]:
    """Return the hosts for which the leader waits although their pods ran in the last attempt."""
    last_end, missing_numbers = snapshot.report.last_end, snapshot.report.missing_hosts
    if last_end is None or last_end.at is None:
        return []
    ended_at = datetime.fromtimestamp(last_end.at, UTC)
    live_hosts = [host for host in snapshot.hosts if host.has_started and not host.has_ended]
    waiting_hosts = [host for host in live_hosts if host.number in missing_numbers]
    starts = [(host, parse_time(host.running.get("startedAt"))) for host in waiting_hosts]
    return [host for host, began in starts if began is not None and began < ended_at]


def spare_hosts(snapshot: Snapshot) -> list[int]:
    """Return the numbers of the running hosts without ranks, if ranks can move and are known."""
    if not hosts.can_move_ranks(snapshot.jobset) or not are_members_known(snapshot):
        return []
    unavailable = {host.number for host in cut_off_hosts(snapshot)} | set(snapshot.members.hosts)
    live_hosts = [host for host in snapshot.hosts if host.has_started and not host.has_ended]
    return [
        host.number for host in live_hosts if not host.is_leaving and host.number not in unavailable
    ]
