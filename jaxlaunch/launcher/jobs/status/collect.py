"""Reading one job from a cluster with at most ten calls, or all jobs with a few calls.

Only the objects that the situation requires are read: nodes if a pod has no node, and queues if the
job is not admitted. An object that the user may not read is noted in the snapshot, and the others
are used. Lists of more than five hundred pods, events or nodes take further calls. The agents'
reports are read from the log of the leader, which is the agent in host 0's pod.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jaxlaunch.launcher.errors import ApiError, ClusterError, UnreachableError
from jaxlaunch.launcher.jobs.status import agent_report, hosts, roles
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.snapshot import DeletedNode, NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import (
    CLUSTER_QUEUES,
    CONFIGMAPS,
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
from jaxlaunch.launcher.kubernetes.labels import (
    JOB_LABEL,
    JOB_UID,
    MANAGED_LABELS,
    NAME_LABEL,
    QUEUE_LABEL,
    REPLICATED_JOB,
)
from jaxlaunch.launcher.kubernetes.objects import (
    QUIET_EVENTS,
    Obj,
    cluster_queue_name,
    find_condition,
    fold_events,
    is_condition_true,
    is_suspended,
    replicated_jobs,
    seconds_since,
    terminal_state,
    trim_event,
    trim_node,
    trim_pod,
)
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import BeatLine, Line, PastLine, TailLine, VerdictLine

MAX_PAGES_OF_EVENTS = 10
# `launcher list` reads the logs of this many leaders, for their current steps.
MAX_LOGS = 16
# Timeout for each of these logs.
LIST_TIMEOUT_S = 2.0
# `launcher list` reads this many namespaces, to see whether they are being deleted.
MAX_NAMESPACES = 16
# The node of a pod is read if the pod takes longer than this to start or to end.
_LATE_POD_S = 10.0
_MAX_MESSAGE_CHARS = 240
# Kueue's message about a preemption has the uid of the other job.
_PREEMPTOR_UID = re.compile(r"\bJobUID: ([0-9a-f-]{8,})")

# Namespace and name of a job.
_JobKey = tuple[str, str]


# --- one job --------------------------------------------------------------------------------------


def read_snapshot(cluster: Cluster, namespace: str, name: str) -> Snapshot | NoSuchJob:
    """Read one job. Raises ClusterError if its JobSet cannot be read."""
    return _Reader(cluster, namespace, name).read_snapshot()


class _Reader:
    """Reads one job once, and records the objects that could not be read."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self._cluster, self._namespace, self._name = cluster, namespace, name
        self._labels = f"{NAME_LABEL}={name}"
        self._unread: list[str] = []
        self._unread_reasons: dict[str, str] = {}
        self._forbidden: set[str] = set()
        # Whether the leader's log could not be read although the user may read it.
        self._has_lost_log = False
        # Whether the user may not read the namespace.
        self._is_namespace_hidden = False

    def read_snapshot(self) -> Snapshot | NoSuchJob:
        jobset = self._cluster.get(JOBSETS, self._name, self._namespace)
        now = self._cluster.current_time()
        # Read before anything else, since a namespace disappears soon after its JobSets.
        ending_namespace = None if jobset is None else self._ending_namespace()
        events = self._read_events(jobset)
        if jobset is None:
            return self._no_such_job(now, events)
        pods = self._list_owned(PODS, jobset, trim=trim_pod)
        role_hosts = {
            role: hosts.newest_hosts(
                hosts.select_role(jobset, role),
                [pod for pod in pods if hosts.is_of_role(pod, role)],
            )
            for role in hosts.list_roles(jobset)
        }
        newest_hosts = [*itertools.chain(*role_hosts.values())]
        newest_hosts = newest_hosts or hosts.newest_hosts(jobset, pods)
        workload = self._find_workload(jobset)
        is_admitted = workload is None or is_condition_true(workload, "Admitted")
        is_held = is_suspended(jobset) and not is_admitted
        local_queue = cluster_queue = None
        if is_held:
            local_queue = self._get_object(LOCAL_QUEUES, jobset["metadata"]["labels"][QUEUE_LABEL])
            # Often only administrators may read a ClusterQueue.
            if (queue_name := cluster_queue_name(local_queue)) is not None:
                cluster_queue = self._get_object(CLUSTER_QUEUES, queue_name)
        is_queued = local_queue is not None
        role_records = {
            role: tuple(self._read_records(jobset, part, is_queued=is_queued))
            for role, part in role_hosts.items()
        }
        records: tuple[Line, ...] = ()
        if not role_hosts:
            records = tuple(self._read_records(jobset, newest_hosts, is_queued=is_queued))
        silent_node, deleted_node = self._find_unhealthy_node(newest_hosts, records, now)
        if self._is_namespace_hidden and not is_held and _may_be_terminating(jobset, newest_hosts):
            ending_namespace = probe_ending_namespace(self._cluster, self._namespace)
        needs_nodes = local_queue is None and any(host.unscheduled for host in newest_hosts)
        return Snapshot(
            namespace=self._namespace,
            name=self._name,
            now=now,
            jobset=jobset,
            jobs=tuple(self._list_owned(JOBS, jobset)),
            pods=tuple(pods),
            events=tuple(events),
            workload=workload,
            ending_namespace=ending_namespace,
            preempted_by=self._find_preemptor(workload) if is_held else None,
            local_queue=local_queue,
            cluster_queue=cluster_queue,
            nodes=self._list_nodes() if needs_nodes else None,
            silent_node=silent_node,
            deleted_node=deleted_node,
            records=records,
            role_records=role_records,
            unread=tuple(self._unread),
            unread_reasons=self._unread_reasons,
            forbidden=frozenset(self._forbidden),
        )

    def _list_objects(self, kind: Kind, labels: str, **options: object) -> list[Obj]:
        try:
            return list(self._cluster.list(kind, self._namespace, labels=labels, **options))  # type: ignore[arg-type]
        except ApiError as error:
            self._add_unread(kind.plural, error, kind.plural)
            return []

    def _list_owned(self, kind: Kind, jobset: Obj, **options: object) -> list[Obj]:
        """Return the pods or Jobs of the JobSet, without those of an earlier one of its name."""
        objects = self._list_objects(kind, self._labels, **options)
        return [obj for obj in objects if hosts.is_of_jobset(obj, jobset)]

    def _get_object(self, kind: Kind, name: str) -> Obj | None:
        try:
            return self._cluster.get(kind, name, self._namespace)
        except ApiError as error:
            self._add_unread(f"{kind.kind} {name}", error, kind.plural)
            return None

    def _add_unread(
        self, subject: str, error: ClusterError, kind: str, node: str | None = None
    ) -> None:
        self._unread.append(_describe_unread(subject, error, node))
        # A kind that is not served has no objects.
        if not (isinstance(error, ApiError) and error.status == 404):
            self._unread_reasons.setdefault(kind, self._unread[-1])
        if isinstance(error, ApiError) and error.status == 403:
            self._forbidden.add(kind)

    def _no_such_job(self, now: datetime, events: Sequence[Obj]) -> NoSuchJob:
        """Return what is left of a deleted job, and the names of other jobs."""
        other_names: tuple[str, ...] = ()
        try:
            jobsets = _list_jobsets(self._cluster, self._namespace)
            other_names = tuple(jobset["metadata"]["name"] for jobset in jobsets)
        except ApiError as error:
            self._add_unread("the names of other jobs", error, JOBSETS.plural)
        leftovers = [("pod", pod) for pod in self._list_objects(PODS, self._labels, trim=trim_pod)]
        leftovers += [("Job", job) for job in self._list_objects(JOBS, self._labels)]
        ending_namespace = self._ending_namespace()
        if self._is_namespace_hidden:
            ending_namespace = probe_ending_namespace(self._cluster, self._namespace)
        unread = tuple(self._unread)
        return NoSuchJob(
            self._namespace,
            self._name,
            tuple(events),
            other_names,
            ending_namespace,
            unread,
            now,
            tuple(leftovers),
        )

    def _read_events(self, jobset: Obj | None) -> list[Obj]:
        """Return the folded events about this job and its objects."""
        fields = ",".join(f"reason!={reason}" for reason in QUIET_EVENTS)
        try:
            events = self._cluster.list(
                EVENTS, self._namespace, fields=fields, pages=MAX_PAGES_OF_EVENTS, trim=trim_event
            )
        except ApiError as error:
            self._add_unread("events", error, "events")
            return []
        return fold_events(job_events(events, self._name, jobset))

    # --- objects that only some situations require ------------------------------------------------

    def _ending_namespace(self) -> Obj | None:
        """Return the namespace if it is being deleted. None also if it cannot be read."""
        try:
            namespace = self._cluster.get(NAMESPACES, self._namespace)
        except ApiError as error:
            self._is_namespace_hidden = error.status == 403
            if error.status != 403:
                self._add_unread(f"namespace {self._namespace}", error, NAMESPACES.plural)
            return None
        is_ending = namespace is not None and "deletionTimestamp" in namespace["metadata"]
        return namespace if is_ending else None

    def _find_workload(self, jobset: Obj) -> Obj | None:
        if QUEUE_LABEL not in jobset["metadata"].get("labels", {}):
            return None
        workloads = self._list_objects(WORKLOADS, f"{JOB_UID}={jobset['metadata']['uid']}")
        workloads.sort(key=lambda item: item["metadata"].get("creationTimestamp", ""))
        return workloads[-1] if workloads else None

    def _find_preemptor(self, workload: Obj | None) -> str | None:
        """Return the name of the JobSet that preempted the job, found by its uid."""
        conditions = [find_condition(workload or {}, kind) for kind in ("Preempted", "Evicted")]
        uid_matches = [
            _PREEMPTOR_UID.search(condition.get("message", "")) for condition in conditions
        ]
        uid = next((match[1] for match in uid_matches if match), None)
        jobsets = [] if uid is None else self._list_objects(JOBSETS, "")
        metadata = [jobset["metadata"] for jobset in jobsets]
        return next((item["name"] for item in metadata if item.get("uid") == uid), None)

    def _list_nodes(self) -> tuple[Obj, ...] | None:
        try:
            return tuple(self._cluster.list(NODES, trim=trim_node))
        except ApiError as error:
            self._add_unread("nodes", error, "nodes")
            return None

    def _find_unhealthy_node(
        self, newest_hosts: Sequence[Host], records: Sequence[Line], now: datetime
    ) -> tuple[Obj | None, DeletedNode | None]:
        """Return the node of the first suspect host if it is not Ready, or if it was deleted.

        Few users may read nodes, so errors are ignored.
        """
        missing_hosts = agent_report.merge_reports(records, newest_hosts).missing_hosts
        placed_hosts = (
            host for host in newest_hosts if host.node is not None and not host.has_ended
        )
        suspects = filter(
            lambda host: host.number in missing_hosts or self._may_be_lost(host, now), placed_hosts
        )
        name = next((host.node for host in suspects), None)
        if name is None:
            return None, None
        try:
            node = self._cluster.get(NODES, name)
        except ClusterError:
            return None, None
        if node is not None:
            return (None, None) if is_condition_true(node, "Ready") else (node, None)
        # An event of the node controller has the time of the deletion, if the user may read it.
        fields = f"involvedObject.kind=Node,involvedObject.name={name},reason=RemovingNode"
        events = list[Obj]()
        with contextlib.suppress(ClusterError):
            events = list(self._cluster.list(EVENTS, "default", fields=fields, trim=trim_event))
        return None, DeletedNode(name, max((event["last"] for event in events), default=None))

    def _may_be_lost(self, host: Host, now: datetime) -> bool:
        """Return whether the state of a host suggests that its node is lost."""
        if host.is_leaving and (seconds_since(host.ends_at, now) or 0.0) > _LATE_POD_S:
            return True
        if host.running:
            has_lost_log = self._has_lost_log and host.number == 0
            return has_lost_log or not (host.is_ready or host.terminated)
        return (seconds_since(host.created_at, now) or 0.0) > _LATE_POD_S

    def _read_records(self, jobset: Obj, newest_hosts: list[Host], is_queued: bool) -> list[Line]:
        """Return the leader's records, for a job in a queue without those of earlier attempts.

        This keeps the number of calls within the limit, since the queues were read.
        """
        leader = next(
            (host for host in newest_hosts if host.number == 0 and host.has_started), None
        )
        if leader is None or not hosts.is_ours(jobset):
            return []
        read_log = read_recent_records if is_queued else read_all_records
        try:
            return read_log(self._cluster, self._namespace, leader)
        except ClusterError as error:
            self._add_unread(f"the log of {leader.pod}", error, "log", leader.node)
            self._has_lost_log = not (isinstance(error, ApiError) and error.status == 403)
            return []


def _may_be_terminating(jobset: Obj, newest_hosts: Sequence[Host]) -> bool:
    """Return whether the job looks as if its namespace is being deleted, pods before Jobs."""
    if "deletionTimestamp" in jobset["metadata"]:
        return True
    if terminal_state(jobset) == "Completed":
        return False
    live_hosts = [host for host in newest_hosts if host.has_started and not host.is_leaving]
    return len(live_hosts) < hosts.count_hosts(jobset) or any(host.has_ended for host in live_hosts)


def read_ending_namespace(cluster: Cluster, name: str) -> Obj | None:
    """Return a namespace if it is being deleted, else None. Raises ApiError.

    If the user may not read the namespace, `probe_ending_namespace` decides.
    """
    try:
        namespace = cluster.get(NAMESPACES, name)
    except ApiError as error:
        if error.status != 403:
            raise
        return probe_ending_namespace(cluster, name)
    is_ending = namespace is not None and "deletionTimestamp" in namespace["metadata"]
    return namespace if is_ending else None


def probe_ending_namespace(cluster: Cluster, name: str) -> Obj | None:
    """Return a namespace that the user may not read if it is being deleted, without its status.

    A dry run shows it: in such a namespace the server rejects the creation of all objects.
    """
    metadata = {"name": f"jaxlaunch-{secrets.token_hex(6)}", "namespace": name}
    probe = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {**metadata, "labels": dict(MANAGED_LABELS)},
    }
    try:
        cluster.create(CONFIGMAPS, probe, dry_run=True)
    except ApiError as error:
        causes = [cause.get("reason") for cause in error.details.get("causes") or ()]
        if "NamespaceTerminating" in causes:
            return {"metadata": {"name": name}, "status": {}}
    return None


def _describe_unread(subject: str, error: ClusterError, node: str | None = None) -> str:
    """Return the message about an unread object. For the log of a pod, `node` is its node."""
    reason = error.message if node is None else explain_unread(error, node)
    return f"{subject} could not be read: {reason[:_MAX_MESSAGE_CHARS]}"


def job_events(
    events: Iterable[Mapping[str, Any]], name: str, jobset: Obj | None
) -> Iterator[Mapping[str, Any]]:
    """Yield the events about a job of that name, its Jobs, pods, claims and Workload.

    If the JobSet exists, events before its creation are left out, since they are about an earlier
    JobSet of the same name. Events about claims are kept, since claims outlive jobs.
    """
    since = "" if jobset is None else jobset["metadata"].get("creationTimestamp", "")
    claims = () if jobset is None else hosts.claim_names(jobset)
    job_names = "|".join(re.escape(part["name"]) for part in replicated_jobs(jobset or {}))
    job_names = job_names or REPLICATED_JOB
    job = rf"{re.escape(name)}-(?:{job_names})-\d+"
    patterns = {
        "JobSet": re.escape(name),
        "Job": job,
        "Pod": rf"{job}-\d+-[a-z0-9]{{5}}",
        "Workload": rf"jobset-{re.escape(name)}-[a-z0-9]{{5}}",
    }
    for event in events:
        object_name, pattern = event["names"][0], patterns.get(event["kind"])
        is_claim = event["kind"] == "PersistentVolumeClaim" and object_name in claims
        if is_claim or (pattern and re.fullmatch(pattern, object_name) and event["last"] >= since):
            yield event


# --- all jobs -------------------------------------------------------------------------------------


def read_snapshots(cluster: Cluster, namespace: str | None) -> list[Snapshot]:
    """Read all of launcher's jobs in one or all namespaces, sorted by namespace and name.

    Raises ClusterError if the JobSets cannot be read.
    """
    unread = dict[str, str]()
    jobsets = [jobset for jobset in _list_jobsets(cluster, namespace) if hosts.is_ours(jobset)]
    now = cluster.current_time()
    pods: dict[_JobKey, list[Obj]] = defaultdict(list)
    workloads: dict[str, Obj] = {}
    try:
        for pod in cluster.list(PODS, namespace, labels=f"{JOB_LABEL},{NAME_LABEL}", trim=trim_pod):
            pods[pod["metadata"]["namespace"], pod["metadata"]["labels"][NAME_LABEL]].append(pod)
    except ApiError as error:
        unread["pods"] = _describe_unread("pods", error)
    try:
        # Only jobs with a queue have a Workload.
        if any(QUEUE_LABEL in jobset["metadata"].get("labels", {}) for jobset in jobsets):
            queued_workloads = cluster.list(WORKLOADS, namespace, labels=JOB_UID)
            workloads = {
                workload["metadata"]["labels"][JOB_UID]: workload for workload in queued_workloads
            }
    except ApiError as error:
        if error.status != 404:
            unread["workloads"] = _describe_unread("workloads", error)
    jobs = []
    for jobset in jobsets:
        job_key = jobset["metadata"]["namespace"], jobset["metadata"]["name"]
        jobs.append(
            Snapshot(
                *job_key,
                now,
                jobset,
                pods=tuple(pod for pod in pods.get(job_key, ()) if hosts.is_of_jobset(pod, jobset)),
                workload=workloads.get(jobset["metadata"]["uid"]),
                unread=tuple(unread.values()),
                unread_reasons=unread,
            )
        )
    jobs.sort(key=lambda job: (job.namespace, job.name))
    return _add_records(cluster, _add_ending_namespaces(cluster, jobs))


def _add_ending_namespaces(cluster: Cluster, jobs: Sequence[Snapshot]) -> list[Snapshot]:
    """Add the namespaces that are being deleted to the jobs.

    Up to MAX_NAMESPACES are read, first those of jobs that look as if theirs is being deleted.
    """
    names = [job.namespace for job in jobs if _may_be_terminating(job.jobset, job.hosts)]
    names = list(dict.fromkeys([*names, *(job.namespace for job in jobs)]))
    namespaces = dict[str, Obj | None]()
    for name in names[:MAX_NAMESPACES]:
        with contextlib.suppress(ClusterError):
            namespace = cluster.get(NAMESPACES, name)
            if namespace is not None and "deletionTimestamp" in namespace["metadata"]:
                namespaces[name] = namespace
    return [
        dataclasses.replace(job, ending_namespace=namespaces.get(job.namespace)) for job in jobs
    ]


def _add_records(cluster: Cluster, jobs: Sequence[Snapshot]) -> list[Snapshot]:
    """Add the newest records of their leaders to the first MAX_LOGS running jobs."""
    results, log_count = [], 0
    # Logs that fail with the same error share the message about the first, which is shown once.
    messages = dict[str, str]()
    for job in jobs:
        role = roles.find_decisive_role(job)
        part = roles.decisive_part(job)
        leaders = (host for host in part.hosts if host.number == 0)
        leader = next((host for host in leaders if host.running and not host.is_init), None)
        if leader is not None and log_count < MAX_LOGS:
            log_count += 1
            try:
                records = read_recent_records(cluster, job.namespace, leader, LIST_TIMEOUT_S)
                if role is None:
                    job = dataclasses.replace(job, records=tuple(records))
                else:
                    job = dataclasses.replace(job, role_records={role: tuple(records)})
            except ClusterError as error:
                # The step of this job is unknown.
                error_key = f"{job.namespace} {error.message.replace(leader.pod, '')}"
                message = _describe_unread(f"the log of {leader.pod}", error, leader.node)
                message = messages.setdefault(error_key, message)
                reasons = {**job.unread_reasons, "log": message}
                unread = (*job.unread, message)
                job = dataclasses.replace(job, unread=unread, unread_reasons=reasons)
        results.append(job)
    return results


def _list_jobsets(cluster: Cluster, namespace: str | None) -> list[Obj]:
    """Return the JobSets of one or all namespaces. Raises ClusterError if JobSet is missing."""
    try:
        return list(cluster.list(JOBSETS, namespace))
    except ApiError as error:
        if error.status != 404:
            raise
        kind = f"{JOBSETS.kind} ({JOBSETS.api_version})"
        hint = "ask the cluster administrator to install JobSet; `launcher doctor` checks it."
        raise ClusterError(
            f"{kind} is not installed in the cluster of context {cluster.context}.", hint
        ) from None


# --- the leader's log -----------------------------------------------------------------------------

# Records of a running leader are looked for in this part of its log. It writes one every 15 s.
_RECENT_LOG_S = 45
# Number of last lines that are read first. If the program has written so much that they contain no
# record, eight times as many are read.
_FIRST_TAIL_LINES = 4_000
# Number of last lines that are read from the log of an ended leader.
_ENDED_TAIL_LINES = 400
# Number of last lines in which the history of a run is read: of a job that writes three lines with
# each heartbeat, these are some three days.
MAX_HISTORY_LINES = 50_000
# Timeout for a log, so that the snapshot does not wait for a node that does not answer.
LOG_TIMEOUT_S = 8.0
# The API server's message if a node's kubelet did not return a log.
_KUBELET_ERROR = re.compile(r'"https://[^/"]+/containerLogs/[^"]*": (?P<why>.+?)(?: \(GET \S+\))?$')
# Part at the beginning of a leader's log that has the ends of earlier attempts.
_HEAD_BYTES = 256 * 1024


def explain_unread(error: ClusterError, node: str | None) -> str:
    """Return why a log could not be read, which the API server gets from the node's kubelet."""
    match = _KUBELET_ERROR.search(error.message) if isinstance(error, ApiError) else None
    if match is not None:
        problem = "is not trusted by" if match["why"].startswith("tls: ") else "does not answer"
        return f"the kubelet of node {node} {problem} the API server: {match['why']}"
    if isinstance(error, UnreachableError) and error.was_sent:
        return f"the kubelet of node {node} has not sent it to the API server in time"
    return error.message


def read_recent_records(
    cluster: Cluster, namespace: str, leader: Host, timeout_s: float = LOG_TIMEOUT_S
) -> list[Line]:
    """Return the leader's newest heartbeats or its verdict, both in a hold. Raises ClusterError."""
    if leader.terminated:
        return _read_part(cluster, namespace, leader, timeout_s, tail=_ENDED_TAIL_LINES)[0]
    for power in itertools.count():
        max_lines = _FIRST_TAIL_LINES * 8**power
        records, lines = _read_part(
            cluster, namespace, leader, timeout_s, since_s=_RECENT_LOG_S, tail=max_lines
        )
        if records or lines < max_lines:
            break
    is_held = any(isinstance(record, BeatLine) and record.stage == "hold" for record in records)
    if is_held and not any(isinstance(record, VerdictLine) for record in records):
        # The verdict was written once, before the hold.
        return _read_part(cluster, namespace, leader, timeout_s, tail=_FIRST_TAIL_LINES)[0]
    return records


def read_all_records(cluster: Cluster, namespace: str, leader: Host) -> list[Line]:
    """Return the records of earlier attempts and the recent ones. A long log takes two calls."""
    records = read_recent_records(cluster, namespace, leader)
    if any(isinstance(record, PastLine) for record in records):
        return records
    head, _ = _read_part(cluster, namespace, leader, LOG_TIMEOUT_S, limit_bytes=_HEAD_BYTES)
    return [*head, *records]


def read_history(
    cluster: Cluster, namespace: str, leader: Host, timeout_s: float
) -> Iterator[Line]:
    """Yield all records in the newest part of the leader's log. Raises ClusterError.

    The part has at most MAX_HISTORY_LINES lines, and the kubelet returns only the newest file of a
    log.
    """
    lines = cluster.log(
        namespace,
        leader.pod,
        container=leader.container,
        tail=MAX_HISTORY_LINES,
        timeout_s=timeout_s,
    )
    for text in lines:
        if (record := log_lines.parse_line(text)) is not None:
            yield record


def follow_records(cluster: Cluster, namespace: str, leader: Host) -> Iterator[Line]:
    """Yield the leader's new records until its log ends. Raises ClusterError."""
    container = leader.container
    lines = cluster.log(namespace, leader.pod, container=container, follow=True, since_s=1)
    return _parse_records(lines)


def _read_part(
    cluster: Cluster, namespace: str, leader: Host, timeout_s: float, **options: Any
) -> tuple[list[Line], int]:
    """Return the records in a part of the leader's log, and the number of lines of that part."""
    options |= {"container": leader.container, "timeout_s": timeout_s}
    lines = list(cluster.log(namespace, leader.pod, **options))
    return list(_parse_records(lines)), len(lines)


def _parse_records(lines: Iterable[str]) -> Iterator[Line]:
    for line in lines:
        record = log_lines.parse_line(line)
        # Lines that are repeated from an earlier log are not needed, and may be many.
        if record is not None and not isinstance(record, TailLine):
            yield record
