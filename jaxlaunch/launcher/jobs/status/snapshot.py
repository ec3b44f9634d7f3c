"""What a cluster holds of one job, as plain data, and what follows from it. Pure; `collect` reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from functools import cached_property
from typing import NamedTuple

from jaxlaunch.contract import ANNOTATION
from jaxlaunch.launcher.jobs.status import agent_report, hosts
from jaxlaunch.launcher.jobs.status.agent_report import AgentReport
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.kubernetes.labels import QUEUE
from jaxlaunch.launcher.kubernetes.objects import MAX_NAMED, Obj, is_suspended, terminal_state
from jaxlaunch.records import members
from jaxlaunch.records.log_lines import Line, Recorded
from jaxlaunch.records.members import Members

# Warnings about a pod that are over once it has a node, or once its container runs.
_UNTIL_PLACED = ("FailedScheduling",)
_UNTIL_STARTED = (
    *("FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox", "NetworkNotReady"),
    *("Failed", "FailedToRetrieveImagePullSecret", "InspectFailed", "ErrImageNeverPull", "BackOff"),
)


class DeletedNode(NamedTuple):
    """A node whose object no longer exists, while pods are on it."""

    name: str
    since: str | None  # as the API writes times; None: not known


@dataclasses.dataclass(frozen=True)
class NoSuchJob:
    """There is no JobSet of that name; what the namespace holds instead."""

    namespace: str
    name: str
    events: tuple[Obj, ...] = ()  # folded, the newest first: of a job of that name that is gone
    other_jobs: tuple[str, ...] = ()  # names of the namespace's JobSets
    ending_namespace: Obj | None = None  # where it is being deleted
    unread: tuple[str, ...] = ()  # what could not be read, and why
    now: datetime = datetime.max.replace(tzinfo=UTC)
    left: tuple[tuple[str, Obj], ...] = ()  # pods and Jobs of a job of that name, each with its kind


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The objects of one job, cut down to what is used of them. None: not there, or not needed and so not read."""

    namespace: str
    name: str
    now: datetime
    jobset: Obj
    jobs: tuple[Obj, ...] = ()
    pods: tuple[Obj, ...] = ()  # as launcher/kubernetes/kept_fields leaves them
    events: tuple[Obj, ...] = ()  # folded, the newest first
    workload: Obj | None = None
    ending_namespace: Obj | None = None  # where it is being deleted
    preempted_by: str | None = None  # the JobSet of this namespace for which Kueue evicted it
    local_queue: Obj | None = None
    cluster_queue: Obj | None = None
    nodes: tuple[Obj, ...] | None = None
    silent_node: Obj | None = None  # that of a host, which is not Ready
    deleted_node: DeletedNode | None = None  # that of a host
    records: tuple[Line, ...] = ()  # of the leader's log
    unread: tuple[str, ...] = ()  # what could not be read, and why
    # Why a kind could not be read, such as pods; log is the leader's. Empty is unknown then.
    not_read: Mapping[str, str] = dataclasses.field(default_factory=dict)
    forbidden: frozenset[str] = frozenset()  # of these kinds, those that the user has no permission to read
    on_volume: Recorded | None = None  # by the files of its run folder, where they were read

    @cached_property
    def hosts(self) -> list[Host]:
        """The hosts of the last generation that has pods."""
        return hosts.newest(self.jobset, self.pods)

    @cached_property
    def report(self) -> AgentReport:
        """What the agents reported in the leader's log and in termination messages."""
        known = self.on_volume or self.recorded
        return agent_report.merge(self.records, self.hosts, known, is_over=terminal_state(self.jobset) is not None)

    @cached_property
    def members(self) -> Members:
        """Which hosts hold ranks, as the leader says in its log; before it did, as at the start of the gang."""
        table, beat = hosts.table(self.jobset), self.report.heartbeat
        if beat is None or beat.members is None:
            return table
        return members.from_wire(beat.members, table.each, self.expected_hosts)

    @cached_property
    def waits_for_pods(self) -> bool:
        """Whether a pod that failed is made again alone, and the gang has not ended."""
        are_replaced = self.is_ours and hosts.are_replaced(self.jobset)
        return are_replaced and not any(host.ends_gang for host in self.hosts)

    @property
    def expected_hosts(self) -> int:
        """How many hosts the JobSet asks for."""
        return hosts.expected(self.jobset)

    @property
    def is_ours(self) -> bool:
        """Whether `launcher submit` made the JobSet."""
        return hosts.is_ours(self.jobset)

    @property
    def queue(self) -> str | None:
        """The LocalQueue that the job names."""
        return self._labels.get(QUEUE)

    @property
    def restarts(self) -> int:
        """Generations that ended before the current one; JobSet counts them."""
        return int(self.jobset.get("status", {}).get("restarts", 0))

    @property
    def is_suspended(self) -> bool:
        """Whether the JobSet is suspended, by Kueue or by `launcher stop`."""
        return is_suspended(self.jobset)

    @property
    def recorded(self) -> Recorded | None:
        """How far the job was, as `launcher stop`, `submit --wait` or its leader wrote down on the JobSet."""
        metadata = self.jobset["metadata"]
        return Recorded.from_json(metadata.get("annotations", {}).get(ANNOTATION, ""), metadata.get("uid", ""))

    def is_on_silent_node(self, host: Host) -> bool:
        """Whether the host is on the node that is known not to answer or to be deleted: what its pod reports is older
        than that."""
        names = {None if self.silent_node is None else self.silent_node["metadata"]["name"]}
        names.add(None if self.deleted_node is None else self.deleted_node.name)
        return host.node is not None and host.node in names and not host.has_ended

    @property
    def warning(self) -> Obj | None:
        """The newest Warning event that is not over, about the pods that are here or another object of the job."""
        since = min((host.created for host in self.hosts), default=self.created or "")
        return next(
            (one for one in self.events if one["type"] == "Warning" and one["last"] >= since and self._is_of_now(one)),
            None,
        )

    def _is_of_now(self, event: Obj) -> bool:
        """Whether what an event warns of may still be so."""
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

    @property
    def created(self) -> str | None:
        """When the JobSet was created, as the API writes times."""
        found: str | None = self.jobset["metadata"].get("creationTimestamp")
        return found

    def event(self, *reasons: str, kind: str = "", of: Collection[Host] | None = None) -> Obj | None:
        """The newest event with one of these reasons, about objects of that kind; `of`: the pods of these hosts."""
        return next(
            (
                one
                for one in self.events
                if one["reason"] in reasons and kind in ("", one["kind"]) and (of is None or _is_about(one, of))
            ),
            None,
        )

    @property
    def _labels(self) -> dict[str, str]:
        return self.jobset["metadata"].get("labels") or {}


def _is_about(event: Obj, hosts: Collection[Host]) -> bool:
    """Whether an event is about the pod of one of these hosts; one that is about many pods names only some of them."""
    return bool(hosts) and (len(event["names"]) >= MAX_NAMED or any(host.pod in event["names"] for host in hosts))
