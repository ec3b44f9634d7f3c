"""Reads one job from a cluster in at most nine calls, or all jobs in a few calls, however many there are.

Only what the situation needs is read: nodes when a pod has none, queues while they hold the job back. What the user may
not read is recorded in the snapshot, and the rest is used. Further pages of five hundred pods, events or nodes are not
counted.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jaxlaunch.launcher.errors import ApiError, ClusterError
from jaxlaunch.launcher.jobs.status import agent_report, hosts, leader_log
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.snapshot import DeletedNode, NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes import objects
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import (
    CLUSTER_QUEUES,
    EVENTS,
    JOBS,
    JOBSETS,
    LOCAL_QUEUES,
    NAMESPACES,
    NODES,
    PODS,
    WORKLOADS,
    Kind,
)
from jaxlaunch.launcher.kubernetes.labels import JOB_UID, NAME_LABEL, OWN_LABEL, QUEUE, REPLICATED_JOB
from jaxlaunch.launcher.kubernetes.objects import Obj, condition, is_suspended, is_true, replicated_jobs, seconds_since
from jaxlaunch.records.log_lines import Line

MAX_PAGES_OF_EVENTS = 10
MAX_LOGS = 16  # leaders whose log is read for a list of all jobs, for the step they are at
LIST_TIMEOUT_S = 2.0  # of each of these logs
_LATE_S = 10.0  # that a pod does not end or begin, after which its node may be at fault
_MAX_MESSAGE = 240  # characters of a refusal
_TERMINATING = "because it is being terminated"  # of the namespace, in events about what is refused
_JOB_UID = re.compile(r"\bJobUID: ([0-9a-f-]{8,})")  # in Kueue's message about a preemption

_Place = tuple[str, str]  # namespace, name


# --- one job ----------------------------------------------------------------------------------------------------------


def snapshot(cluster: Cluster, namespace: str, name: str) -> Snapshot | NoSuchJob:
    """One job. Raises ClusterError when not even its JobSet can be read."""
    return _Reader(cluster, namespace, name).snapshot()


class _Reader:
    """Reads one job once, and records what it could not read."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self._cluster, self._namespace, self._name = cluster, namespace, name
        self._unread: list[str] = []
        self._not_read: dict[str, str] = {}
        self._forbidden: set[str] = set()
        self._has_lost_log = False  # the leader's, which the user may read

    def snapshot(self) -> Snapshot | NoSuchJob:
        """The job as it is now."""
        jobset = self._cluster.get(JOBSETS, self._name, self._namespace)
        now = self._cluster.now()
        events = self._events(jobset)
        if jobset is None:
            return self._none(now, events)
        pods = self._list(PODS, f"{NAME_LABEL}={self._name}", keep=objects.trim_pod)
        newest = hosts.newest(jobset, pods)
        workload = self._workload(jobset)
        is_held = is_suspended(jobset) and workload is not None and not is_true(workload, "Admitted")
        local, cluster_queue = self._queues(jobset) if is_held else (None, None)
        needs_nodes = local is None and any(host.unscheduled for host in newest)
        records = tuple(self._records(jobset, newest, is_queued=local is not None))
        silent, deleted = self._unwell_node(newest, records, now)
        return Snapshot(
            namespace=self._namespace,
            name=self._name,
            now=now,
            jobset=jobset,
            jobs=tuple(self._list(JOBS, f"{NAME_LABEL}={self._name}")),
            pods=tuple(pods),
            events=tuple(events),
            workload=workload,
            ending_namespace=self._ending_namespace() if _may_end(jobset, events, newest) else None,
            preempted_by=self._preemptor(workload) if is_held else None,
            local_queue=local,
            cluster_queue=cluster_queue,
            nodes=self._nodes() if needs_nodes else None,
            silent_node=silent,
            deleted_node=deleted,
            records=records,
            unread=tuple(self._unread),
            not_read=self._not_read,
            forbidden=frozenset(self._forbidden),
        )

    def _list(self, kind: Kind, labels: str, **how: object) -> list[Obj]:
        try:
            return list(self._cluster.list(kind, self._namespace, labels=labels, **how))  # type: ignore[arg-type]
        except ApiError as error:
            self._add_unread(kind.plural, error, kind.plural)
            return []

    def _get(self, kind: Kind, name: str) -> Obj | None:
        try:
            return self._cluster.get(kind, name, self._namespace)
        except ApiError as error:
            self._add_unread(f"{kind.kind} {name}", error, kind.plural)
            return None

    def _add_unread(self, what: str, error: ClusterError, kind: str, node: str | None = None) -> None:
        self._unread.append(_unread(what, error, node))
        if not (isinstance(error, ApiError) and error.status == 404):  # of a kind that is not served there are none
            self._not_read.setdefault(kind, self._unread[-1])
        if isinstance(error, ApiError) and error.status == 403:
            self._forbidden.add(kind)

    def _none(self, now: datetime, events: Sequence[Obj]) -> NoSuchJob:
        """There is no job of that name; its pods and Jobs may be left."""
        names, labels = self._names(), f"{NAME_LABEL}={self._name}"
        left = [("pod", one) for one in self._list(PODS, labels, keep=objects.trim_pod)]
        left += [("Job", one) for one in self._list(JOBS, labels)]
        ending = self._ending_namespace()
        unread = tuple(self._unread)
        return NoSuchJob(self._namespace, self._name, tuple(events), names, ending, unread, now, tuple(left))

    def _names(self) -> tuple[str, ...]:
        """The jobs that there are. Raises ClusterError if the cluster has no JobSet."""
        try:
            return tuple(one["metadata"]["name"] for one in _jobsets(self._cluster, self._namespace))
        except ApiError as error:
            self._add_unread("the names of other jobs", error, JOBSETS.plural)
            return ()

    def _events(self, jobset: Obj | None) -> list[Obj]:
        """Events about this job and what is made of it, since it was created."""
        fields = ",".join(f"reason!={reason}" for reason in objects.QUIET_EVENTS)
        try:
            found = self._cluster.list(
                EVENTS, self._namespace, fields=fields, pages=MAX_PAGES_OF_EVENTS, keep=objects.trim_event
            )
        except ApiError as error:
            self._add_unread("events", error, "events")
            return []
        return objects.fold_events(about(found, self._name, jobset))

    # --- what is read only sometimes ----------------------------------------------------------------------------------

    def _ending_namespace(self) -> Obj | None:
        """The namespace, if it is being deleted. Few users may read it: nothing is concluded where it is not read."""
        try:
            found = self._cluster.get(NAMESPACES, self._namespace)
        except ApiError as error:
            if error.status != 403:
                self._add_unread(f"namespace {self._namespace}", error, NAMESPACES.plural)
            return None
        return found if found is not None and "deletionTimestamp" in found["metadata"] else None

    def _workload(self, jobset: Obj) -> Obj | None:
        if QUEUE not in jobset["metadata"].get("labels", {}):
            return None
        found = self._list(WORKLOADS, f"{JOB_UID}={jobset['metadata']['uid']}")
        return max(found, key=lambda one: one["metadata"].get("creationTimestamp", ""), default=None)

    def _preemptor(self, workload: Obj | None) -> str | None:
        """The JobSet that took its place in the queue, which Kueue names by its uid."""
        messages = [condition(workload or {}, kind).get("message", "") for kind in ("Preempted", "Evicted")]
        uid = next((match[1] for text in messages if (match := _JOB_UID.search(text))), None)
        if uid is None:
            return None
        found = self._list(JOBSETS, "")
        return next((one["metadata"]["name"] for one in found if one["metadata"].get("uid") == uid), None)

    def _queues(self, jobset: Obj) -> tuple[Obj | None, Obj | None]:
        """The LocalQueue and its ClusterQueue; the latter only an administrator may be allowed to read."""
        local = self._get(LOCAL_QUEUES, jobset["metadata"]["labels"][QUEUE])
        named = objects.cluster_queue_name(local)
        return local, None if named is None else self._get(CLUSTER_QUEUES, named)

    def _nodes(self) -> tuple[Obj, ...] | None:
        try:
            return tuple(self._cluster.list(NODES, keep=objects.trim_node))
        except ApiError as error:
            self._add_unread("nodes", error, "nodes")
            return None

    def _unwell_node(
        self, newest: Sequence[Host], records: Sequence[Line], now: datetime
    ) -> tuple[Obj | None, DeletedNode | None]:
        """The node of the first host that may have lost it, if it is not Ready, or deleted. Few users may read it, as
        with a namespace."""
        missing = agent_report.merge(records, newest).missing
        suspects = (host for host in newest if host.number in missing or self._may_be_lost(host, now))
        name = next((host.node for host in suspects if host.node is not None and not host.has_ended), None)
        if name is None:
            return None, None
        try:
            found = self._cluster.get(NODES, name)
        except ClusterError:
            return None, None
        if found is None:
            return None, DeletedNode(name, self._deleted_at(name))
        return (None, None) if is_true(found, "Ready") else (found, None)

    def _deleted_at(self, node: str) -> str | None:
        """When the node's object was deleted, by the event of its controller; few users may read that."""
        fields = f"involvedObject.kind=Node,involvedObject.name={node},reason=RemovingNode"
        try:
            found = self._cluster.list(EVENTS, "default", fields=fields, keep=objects.trim_event)
        except ClusterError:
            return None
        return max((one["last"] for one in found), default=None)

    def _may_be_lost(self, host: Host, now: datetime) -> bool:
        """Whether a node that still works would have said more of a host."""
        if host.is_leaving and (seconds_since(host.ends_at, now) or 0.0) > _LATE_S:
            return True
        if host.running:
            return (self._has_lost_log and host.number == 0) or not (host.is_ready or host.ended)
        return (seconds_since(host.created, now) or 0.0) > _LATE_S

    def _records(self, jobset: Obj, newest: list[Host], is_queued: bool) -> list[Line]:
        """What host 0's agent reports; its earlier attempts only where the queues were not read, to save a call."""
        leader = next((host for host in newest if host.number == 0 and host.has_started), None)
        if leader is None or not hosts.is_ours(jobset):
            return []
        read = leader_log.recent if is_queued else leader_log.full
        try:
            return read(self._cluster, self._namespace, leader)
        except ClusterError as error:
            self._add_unread(f"the log of {leader.pod}", error, "log", leader.node)
            self._has_lost_log = not (isinstance(error, ApiError) and error.status == 403)
            return []


def _may_end(jobset: Obj, events: Iterable[Obj], newest: Iterable[Host]) -> bool:
    """Whether the namespace may be being deleted: it takes its objects with it, pods first, and takes no new ones."""
    if "deletionTimestamp" in jobset["metadata"] or any(host.is_leaving and host.has_ended for host in newest):
        return True
    return any(_TERMINATING in one["message"] for one in events)


def _unread(what: str, error: ClusterError, node: str | None = None) -> str:
    """The message about it; `node` is that of a pod whose log it is."""
    why = error.message if node is None else leader_log.why_unread(error, node)
    return f"{what} could not be read: {why[:_MAX_MESSAGE]}"


def about(events: Iterable[Mapping[str, Any]], name: str, jobset: Obj | None) -> Iterator[Mapping[str, Any]]:
    """The events on a job of that name and on what is made of it: Jobs, pods, claims, its Workload.

    Of a JobSet that is there, only those since it was created: one of the same name may have been before.
    """
    since = "" if jobset is None else jobset["metadata"].get("creationTimestamp", "")
    claims = () if jobset is None else hosts.claims(jobset)
    parts_of = "|".join(re.escape(one["name"]) for one in replicated_jobs(jobset or {})) or REPLICATED_JOB
    job = rf"{re.escape(name)}-(?:{parts_of})-\d+"
    parts = {
        "JobSet": re.escape(name),
        "Job": job,
        "Pod": rf"{job}-\d+-[a-z0-9]{{5}}",
        "Workload": rf"jobset-{re.escape(name)}-[a-z0-9]{{5}}",
    }
    for one in events:
        pattern = parts.get(one["kind"])
        is_its = one["names"][0] in claims if one["kind"] == "PersistentVolumeClaim" else False
        if is_its or (pattern and re.fullmatch(pattern, one["names"][0]) and one["last"] >= since):
            yield one


# --- all jobs ---------------------------------------------------------------------------------------------------------


def snapshots(cluster: Cluster, namespace: str | None) -> list[Snapshot]:
    """Every job that launcher submitted, by namespace and name; None reads all namespaces.

    Raises ClusterError when the JobSets cannot be read.
    """
    unread = dict[str, str]()
    jobsets = [one for one in _jobsets(cluster, namespace) if hosts.is_ours(one)]
    now = cluster.now()
    pods: Mapping[_Place, list[Obj]] = {}
    workloads: Mapping[str, Obj] = {}
    try:
        pods = _pods(cluster, namespace)
    except ApiError as error:
        unread["pods"] = _unread("pods", error)
    try:
        workloads = _workloads(cluster, namespace, jobsets)
    except ApiError as error:
        if error.status != 404:
            unread["workloads"] = _unread("workloads", error)
    found = []
    for jobset in sorted(jobsets, key=_place):
        found.append(
            Snapshot(
                *_place(jobset),
                now,
                jobset,
                pods=tuple(pods.get(_place(jobset), ())),
                workload=workloads.get(jobset["metadata"]["uid"]),
                unread=tuple(unread.values()),
                not_read=unread,
            )
        )
    return _with_steps(cluster, found)


def _with_steps(cluster: Cluster, jobs: Sequence[Snapshot]) -> list[Snapshot]:
    """The same, with the newest records of the first that run: each costs a call."""
    found, calls, unread = [], 0, dict[str, str]()  # the first of those that the server refuses alike stands for all
    for one in jobs:
        leader = next((host for host in one.hosts if host.number == 0 and host.running and not host.is_init), None)
        if leader is not None and calls < MAX_LOGS:
            calls += 1
            try:
                records = leader_log.recent(cluster, one.namespace, leader, LIST_TIMEOUT_S)
                one = dataclasses.replace(one, records=tuple(records))
            except ClusterError as error:  # its step is then not known
                alike = f"{one.namespace} {error.message.replace(leader.pod, '')}"
                why = unread.setdefault(alike, _unread(f"the log of {leader.pod}", error, leader.node))
                one = dataclasses.replace(one, unread=(*one.unread, why), not_read={**one.not_read, "log": why})
        found.append(one)
    return found


def _jobsets(cluster: Cluster, namespace: str | None) -> list[Obj]:
    """The JobSets of a namespace, or of all. Raises ClusterError if the cluster has no JobSet."""
    try:
        return list(cluster.list(JOBSETS, namespace))
    except ApiError as error:
        if error.status != 404:
            raise
        kind = f"{JOBSETS.kind} ({JOBSETS.api_version})"
        hint = "ask the cluster administrator to install JobSet; `launcher doctor` checks it."
        raise ClusterError(f"{kind} is not installed in the cluster of context {cluster.context}.", hint) from None


def _pods(cluster: Cluster, namespace: str | None) -> dict[_Place, list[Obj]]:
    found: dict[_Place, list[Obj]] = defaultdict(list)
    for pod in cluster.list(PODS, namespace, labels=f"{OWN_LABEL},{NAME_LABEL}", keep=objects.trim_pod):
        found[pod["metadata"]["namespace"], pod["metadata"]["labels"][NAME_LABEL]].append(pod)
    return found


def _workloads(cluster: Cluster, namespace: str | None, jobsets: Sequence[Obj]) -> dict[str, Obj]:
    """Kueue's Workloads by the uid of their job; not read where no job names a queue."""
    if not any(QUEUE in jobset["metadata"].get("labels", {}) for jobset in jobsets):
        return {}
    found = cluster.list(WORKLOADS, namespace, labels=JOB_UID)
    return {one["metadata"]["labels"][JOB_UID]: one for one in found}


def _place(obj: Obj) -> _Place:
    return obj["metadata"]["namespace"], obj["metadata"]["name"]
