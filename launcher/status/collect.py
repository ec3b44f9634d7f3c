"""Looks at one job on a cluster: every object that status and explain ask about, in at most eight calls.

Only what the situation calls for is read: nodes when a pod has none, queues while one holds the job back. What may not
be read is said, and does without. Further pages of five hundred pods, events or nodes are not counted.
"""

from __future__ import annotations

from datetime import UTC, datetime

from launcher import hear, hosts, slim
from launcher.cluster import Cluster
from launcher.errors import ApiError, ClusterError
from launcher.hosts import Host
from launcher.jobset import NAME_LABEL, OWN_LABEL
from launcher.kinds import CLUSTER_QUEUES, EVENTS, JOBS, JOBSETS, LOCAL_QUEUES, NODES, PODS, WORKLOADS, Kind
from launcher.objects import Obj, is_true
from launcher.placement import JOB_UID, QUEUE
from launcher.seen import World
from launcher.testimony import Word

MAX_PAGES_OF_EVENTS = 10
_MAX_SAID = 240  # characters of a refusal


def gather(cluster: Cluster, namespace: str, name: str) -> World:
    """All there is to see of a job. Raises ClusterError when not even its JobSet can be looked for."""
    return _Look(cluster, namespace, name).world()


def jobsets(cluster: Cluster, namespace: str | None, labels: str = "") -> list[Obj]:
    """The JobSets of a namespace, or of all. Raises ClusterError that says so where the server knows no such kind."""
    try:
        return list(cluster.list(JOBSETS, namespace, labels=labels))
    except ApiError as error:
        if error.status != 404:
            raise
        wanted = f"{JOBSETS.kind} ({JOBSETS.api_version})"
        raise ClusterError(f"The cluster {cluster.context} lacks {wanted}.", "its owner installs it.") from None


class _Look:
    """One look; remembers what it could not read."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self._cluster, self._namespace, self._name = cluster, namespace, name
        self._unread: list[str] = []

    def world(self) -> World:
        now = datetime.now(UTC)
        jobset = self._cluster.get(JOBSETS, self._name, self._namespace)
        events = self._events(jobset)
        if jobset is None:
            return self._nothing(now, events)
        pods = self._list(PODS, f"{NAME_LABEL}={self._name}", keep=slim.pod)
        newest = hosts.newest(jobset, pods)
        workload = self._workload(jobset)
        is_held = bool(jobset["spec"].get("suspend")) and workload is not None
        local, of_all = self._queues(jobset) if is_held and not is_true(workload or {}, "Admitted") else (None, None)
        needs_nodes = local is None and any(host.unscheduled for host in newest)
        return World(
            namespace=self._namespace,
            name=self._name,
            now=now,
            jobset=jobset,
            jobs=tuple(self._list(JOBS, f"{NAME_LABEL}={self._name}")),
            pods=tuple(pods),
            events=tuple(events),
            workload=workload,
            local_queue=local,
            cluster_queue=of_all,
            nodes=self._nodes() if needs_nodes else None,
            words=tuple(self._words(jobset, newest, is_queued=local is not None)),
            unread=tuple(self._unread),
        )

    def _nothing(self, now: datetime, events: list[Obj]) -> World:
        """What is there instead of the job."""
        names = tuple(one["metadata"]["name"] for one in jobsets(self._cluster, self._namespace))
        unread = tuple(self._unread)
        return World(self._namespace, self._name, now, events=tuple(events), neighbours=names, unread=unread)

    def _list(self, kind: Kind, labels: str, **how: object) -> list[Obj]:
        try:
            return list(self._cluster.list(kind, self._namespace, labels=labels, **how))  # type: ignore[arg-type]
        except ApiError as error:
            self._missed(kind.plural, error)
            return []

    def _missed(self, what: str, error: ClusterError) -> None:
        self._unread.append(f"{what} could not be read: {error.message[:_MAX_SAID]}")

    # --- what is read only sometimes ----------------------------------------------------------------------------------

    def _events(self, jobset: Obj | None) -> list[Obj]:
        """What was said about this job and what is made of it, since it was created."""
        fields = ",".join(f"reason!={reason}" for reason in slim.QUIET)
        try:
            found = self._cluster.list(
                EVENTS, self._namespace, fields=fields, pages=MAX_PAGES_OF_EVENTS, keep=slim.event
            )
        except ApiError as error:
            self._missed("events", error)
            return []
        return slim.folded(slim.about(found, self._name, jobset))

    def _workload(self, jobset: Obj) -> Obj | None:
        if QUEUE not in jobset["metadata"].get("labels", {}):
            return None
        found = self._list(WORKLOADS, f"{JOB_UID}={jobset['metadata']['uid']}")
        return max(found, key=lambda one: one["metadata"].get("creationTimestamp", ""), default=None)

    def _queues(self, jobset: Obj) -> tuple[Obj | None, Obj | None]:
        """The LocalQueue and its ClusterQueue; the latter only an administrator may be allowed to see."""
        local = self._get(LOCAL_QUEUES, jobset["metadata"]["labels"][QUEUE])
        named = (local or {}).get("spec", {}).get("clusterQueue")
        return local, None if named is None else self._get(CLUSTER_QUEUES, named)

    def _get(self, kind: Kind, name: str) -> Obj | None:
        try:
            return self._cluster.get(kind, name, self._namespace)
        except ApiError as error:
            self._missed(f"{kind.kind} {name}", error)
            return None

    def _nodes(self) -> tuple[Obj, ...] | None:
        try:
            return tuple(self._cluster.list(NODES, keep=slim.node))
        except ApiError as error:
            self._missed("nodes", error)
            return None

    def _words(self, jobset: Obj, newest: list[Host], is_queued: bool) -> list[Word]:
        """What host 0's agent says, and of what was before unless the queues were looked at in its place."""
        leader = next((host for host in newest if host.number == 0 and host.has_started), None)
        if leader is None or OWN_LABEL not in jobset["metadata"].get("labels", {}):
            return []
        ask = hear.newest if is_queued else hear.all_known
        try:
            return ask(self._cluster, self._namespace, leader)
        except ClusterError as error:
            self._missed(f"the log of {leader.pod}", error)
            return []
