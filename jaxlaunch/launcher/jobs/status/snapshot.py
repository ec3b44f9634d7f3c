"""The objects of one job in a cluster as plain data, and facts that follow from them. Pure."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Collection, Mapping
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

# Warnings about a pod that no longer apply once it has a node, or once its container runs.
_UNTIL_PLACED = ("FailedScheduling",)
_UNTIL_STARTED = (
    *("FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox", "Failed"),
    *("NetworkNotReady", "FailedToRetrieveImagePullSecret", "InspectFailed", "ErrImageNeverPull"),
    "BackOff",
)


# A new leader writes its first heartbeat within this time.
_FIRST_BEAT_S = 15.0
# JobSet makes the Jobs of a new JobSet within this time.
_JOB_DELAY_S = 30.0
# Stands for the job file in a command if it is not known.
_UNKNOWN_JOB_FILE = "JOB_FILE"


class DeletedNode(NamedTuple):
    """A node whose object no longer exists, while pods are on it."""

    name: str
    # Time in the format of the API, or None if it is not known.
    since: str | None


@dataclasses.dataclass(frozen=True)
class NoSuchJob:
    """The absence of a JobSet of that name, and related objects of the namespace."""

    namespace: str
    name: str
    # Folded events of an earlier job of that name, newest first.
    events: tuple[Obj, ...] = ()
    # Names of the namespace's JobSets.
    other_jobs: tuple[str, ...] = ()
    # The namespace, if it is being deleted.
    ending_namespace: Obj | None = None
    # What could not be read, and why.
    unread: tuple[str, ...] = ()
    now: datetime = datetime.max.replace(tzinfo=UTC)
    # Pods and Jobs of an earlier job of that name, each with its kind.
    leftovers: tuple[tuple[str, Obj], ...] = ()


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The trimmed objects of one job. None means that an object does not exist or is not needed."""

    namespace: str
    name: str
    now: datetime
    jobset: Obj
    jobs: tuple[Obj, ...] = ()
    pods: tuple[Obj, ...] = ()  # trimmed
    events: tuple[Obj, ...] = ()  # folded, the newest first
    workload: Obj | None = None
    # The namespace, if it is being deleted.
    ending_namespace: Obj | None = None
    # Name of the JobSet in this namespace for which Kueue evicted the job.
    preempted_by: str | None = None
    local_queue: Obj | None = None
    cluster_queue: Obj | None = None
    nodes: tuple[Obj, ...] | None = None
    # Node of a host, if it is not Ready.
    silent_node: Obj | None = None
    # Node of a host, if it no longer exists.
    deleted_node: DeletedNode | None = None
    # Records of the leader's log.
    records: tuple[Line, ...] = ()
    # What could not be read, and why.
    unread: tuple[str, ...] = ()
    # Why a kind could not be read, such as pods; log is the leader's. Empty is unknown then.
    unread_reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # The unread kinds that the user has no permission to read.
    forbidden: frozenset[str] = frozenset()
    # Progress according to the run folder, if it was read.
    volume_progress: ProgressAnnotation | None = None

    @cached_property
    def hosts(self) -> list[Host]:
        """Hosts of the last generation that has pods."""
        return hosts.newest_hosts(self.jobset, self.pods)

    @cached_property
    def report(self) -> AgentReport:
        """Report of the agents from the leader's log and the termination messages."""
        recorded = self.volume_progress or self.recorded_progress
        return agent_report.merge_reports(
            self.records, self.hosts, recorded, is_over=terminal_state(self.jobset) is not None
        )

    @property
    def is_job_new(self) -> bool:
        """Return whether a Job was made again for another reason than a restart of the JobSet.

        JobSet makes the Jobs of a deleted one within seconds, and does not count that.
        """
        began_at, jobs = self.created_at, [job["metadata"] for job in self.jobs]
        created = [metadata.get("creationTimestamp", "") for metadata in jobs]
        if began_at is None or not created or self.restarts or not self.is_ours:
            return False
        first, newest = parse_time(began_at), parse_time(max(created))
        if first is None or newest is None:
            return False
        return (newest - first).total_seconds() > _JOB_DELAY_S

    @cached_property
    def members(self) -> Members:
        """Hosts that hold ranks according to the leader's log, or at the start of the gang."""
        table, beat = hosts.initial_members(self.jobset), self.report.heartbeat
        if beat is None or beat.members is None:
            return table
        return members.parse_members(beat.members, table.ranks_per_host, self.expected_hosts)

    @cached_property
    def waits_for_pods(self) -> bool:
        """Return whether a failed pod is replaced alone, and the gang has not ended."""
        are_replaced = self.is_ours and hosts.has_pod_replacement(self.jobset)
        return are_replaced and not any(host.ends_gang for host in self.hosts)

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
        """Number of generations before the current one, as counted by JobSet."""
        return int(self.jobset.get("status", {}).get("restarts", 0))

    @property
    def is_suspended(self) -> bool:
        """Return whether the JobSet is suspended, by Kueue or by `launcher stop`."""
        return is_suspended(self.jobset)

    @property
    def recorded_progress(self) -> ProgressAnnotation | None:
        """Progress that `launcher stop`, `submit --wait` or the leader recorded on the JobSet."""
        metadata = self.jobset["metadata"]
        return ProgressAnnotation.from_json(
            metadata.get("annotations", {}).get(ANNOTATION, ""), metadata.get("uid", "")
        )

    @property
    def submitted_words(self) -> tuple[str, ...]:
        """The words with which the job was submitted, or a placeholder if they are not known."""
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
        """Return whether the host's node does not answer or is deleted, so its pod is outdated."""
        names = {None if self.silent_node is None else self.silent_node["metadata"]["name"]}
        names.add(None if self.deleted_node is None else self.deleted_node.name)
        return host.node is not None and host.node in names and not host.has_ended

    # --- events -----------------------------------------------------------------------------------

    @property
    def newest_warning(self) -> Obj | None:
        """Newest Warning event that still applies to a current pod or another object of the job."""
        since = min((host.created_at for host in self.hosts), default=self.created_at or "")
        events = (event for event in self.events if event["last"] >= since)
        warnings = (event for event in events if event["type"] == "Warning")
        return next(filter(self._is_current, warnings), None)

    def _is_current(self, event: Obj) -> bool:
        """Return whether a warning may still apply."""
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
        self, *reasons: str, kind: str = "", on_hosts: Collection[Host] | None = None
    ) -> Obj | None:
        """Return the newest event with one of the reasons, of a kind or about some hosts."""
        for event in self.events:
            is_match = event["reason"] in reasons and kind in ("", event["kind"])
            if is_match and (on_hosts is None or _is_about(event, on_hosts)):
                return event
        return None


def _is_about(event: Obj, hosts: Collection[Host]) -> bool:
    """Return whether an event, which names only some of its pods, is about these hosts."""
    is_cut = len(event["names"]) >= MAX_EVENT_NAMES
    return bool(hosts) and (is_cut or any(host.pod in event["names"] for host in hosts))


# --- lost hosts of a gang whose other pods stay, and the hosts that hold ranks --------------------


def has_begun(snapshot: Snapshot) -> bool:
    """Return whether the processes have started before, so that a missing pod is a lost one.

    Without the leader's log this is inferred from the leader's pod, which Kubernetes creates before
    all others.
    """
    if not snapshot.waits_for_pods or not snapshot.hosts:
        return False
    beat, generation = snapshot.report.heartbeat, snapshot.hosts[0].generation
    if beat is not None and beat.stage is not None:
        ends = snapshot.report.earlier_ends
        has_ended = any(end.generation == generation for end in ends)
        return beat.stage != "gather" or has_ended or is_leader_new(snapshot)
    followers = [host for host in snapshot.hosts if host.number != 0]
    leader = snapshot.hosts[0] if snapshot.hosts[0].number == 0 else None
    if not any(host.has_started for host in followers):
        return False
    if leader is None or leader.has_left_gang:
        return True
    age_s = seconds_since(leader.running.get("startedAt"), snapshot.now) or 0.0
    is_silent = not leader.has_started or age_s < _FIRST_BEAT_S
    return is_silent and is_leader_new(snapshot)


def is_leader_new(snapshot: Snapshot) -> bool:
    """Return whether host 0's pod was made again, while another host kept its pod.

    Kubernetes creates the pod of host 0 before all others.
    """
    leader = next((host for host in snapshot.hosts if host.number == 0), None)
    started = [host for host in snapshot.hosts if host.number != 0 and host.has_started]
    return leader is not None and any(host.created_at < leader.created_at for host in started)


def is_table_known(snapshot: Snapshot) -> bool:
    """Return whether the hosts with ranks are known, also without a missing leader."""
    has_said = snapshot.report.heartbeat is not None and snapshot.report.recorded is None
    return has_said or not has_begun(snapshot)


def lost_hosts(snapshot: Snapshot) -> list[int]:
    """Return the hosts without a live pod. A finished gang has none."""
    if is_gang_done(snapshot):
        return []
    alive = {host.number for host in snapshot.hosts if host.phase != "Failed"}
    return [number for number in range(snapshot.expected_hosts) if number not in alive]


def is_gang_done(snapshot: Snapshot) -> bool:
    """Return whether the gang is done. The leader's pod succeeds when all ranks have."""
    return any(host.number == 0 and host.phase == "Succeeded" for host in snapshot.hosts)


def are_members_lost(snapshot: Snapshot) -> bool:
    """Return whether a host with ranks is lost, so that the gang waits or is about to."""
    return any(number in snapshot.members for number in lost_hosts(snapshot))


def missing_hosts(snapshot: Snapshot) -> list[int]:
    """Return the hosts that are lost, whose new pod has not started, or that do not answer."""
    late = [host.number for host in snapshot.hosts if not host.has_started]
    if snapshot.report.stage == "gather":
        suspects = (*cut_off_hosts(snapshot), *unresponsive_hosts(snapshot))
        unheard = [host.number for host in suspects if host.number in snapshot.report.missing_hosts]
    else:
        cut_off = [host.number for host in cut_off_hosts(snapshot)]
        unheard = [number for number in cut_off if number not in snapshot.members]
    return sorted({*lost_hosts(snapshot), *late, *unheard})


def cut_off_hosts(snapshot: Snapshot) -> list[Host]:
    """Return the hosts with pods on a node that does not answer or is deleted.

    This is known from the node, if it could be read, or from its pods, which the node controller
    then marks as not ready without a reason.
    """

    def is_cut_off(host: Host) -> bool:
        is_unexplained = host.running and not host.is_ready and not host.unready_reason
        return snapshot.is_on_silent_node(host) or bool(is_unexplained)

    return list(filter(is_cut_off, snapshot.hosts))


def reachable_hosts(snapshot: Snapshot) -> list[Host]:
    """Return the hosts with ranks whose agents answer although their node does not.

    Their attempt runs, and the leader notices a lost agent sooner than Kubernetes notices a lost
    node.
    """
    if not has_begun(snapshot) or snapshot.report.stage != "run" or snapshot.report.is_judged:
        return []
    deleted = None if snapshot.deleted_node is None else snapshot.deleted_node.name

    def is_reachable(host: Host) -> bool:
        if host.number not in snapshot.members or host.node == deleted:
            return False
        event = snapshot.find_event("NodeNotReady", kind="Pod", on_hosts=[host])
        return event is not None or snapshot.is_on_silent_node(host)

    return list(filter(is_reachable, cut_off_hosts(snapshot)))


def unresponsive_hosts(snapshot: Snapshot) -> list[Host]:
    """Return the hosts that the leader waits for and that ran before the last attempt ended."""
    last, missing = snapshot.report.last_end, snapshot.report.missing_hosts
    if last is None or last.at is None:
        return []
    ended_at = datetime.fromtimestamp(last.at, UTC)
    live = [host for host in snapshot.hosts if host.has_started and not host.has_ended]
    waiting_hosts = [host for host in live if host.number in missing]
    starts = [(host, parse_time(host.running.get("startedAt"))) for host in waiting_hosts]
    return [host for host, began in starts if began is not None and began < ended_at]


def spare_hosts(snapshot: Snapshot) -> list[int]:
    """Return the running hosts without ranks, or nothing if ranks cannot move or are unknown."""
    if not hosts.can_move_ranks(snapshot.jobset) or not is_table_known(snapshot):
        return []
    unavailable = {host.number for host in cut_off_hosts(snapshot)} | set(snapshot.members.hosts)
    live = [host for host in snapshot.hosts if host.has_started and not host.has_ended]
    return [host.number for host in live if not host.is_leaving and host.number not in unavailable]
