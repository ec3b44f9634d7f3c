"""Stopping, resuming and waiting for a job, and recording its progress on its JobSet.

The pods of a stopped job save and end, while its JobSet stays. An annotation on the JobSet holds the progress, which is
therefore known after the pods are gone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from jaxlaunch.contract import ANNOTATION
from jaxlaunch.launcher.errors import ApiError, ClusterError
from jaxlaunch.launcher.jobs.status import agent_report, collect, job_status
from jaxlaunch.launcher.jobs.status.job_status import OVER, JobStatus, State
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, PODS, WORKLOADS
from jaxlaunch.launcher.kubernetes.labels import JOB_UID, NAME_LABEL, QUEUE
from jaxlaunch.launcher.kubernetes.objects import Obj, is_suspended, pod_template, terminal_state, trim_pod
from jaxlaunch.launcher.kubernetes.watch import Outage
from jaxlaunch.records.log_lines import Beat, Line, Recorded

# Limit for Kueue to create a Workload.
_KUEUE_S = 10.0
# A pod may be deleted between a list and a watch.
_LIST_AGAIN_S = 10.0
# Statuses of a write to a JobSet that no longer exists or was replaced by one of the same name.
_GONE = (404, 409)
_MAX_REFUSAL = 240  # characters
# The JobSet is read again this often, for changes that its events do not report.
_LOOK_AGAIN_S = 30.0
# Pause between two reads while pods end.
_SETTLES_S = 2.0
# Number of attempts to read the pods.
_LOOKS = 3
# How the record names each state. In any other state the job is being stopped.
_WHEN = {State.DONE: "ended", State.FAILED: "ended", State.QUEUED: "queued"}

Say = Callable[[str], None]


# --- stop and resume --------------------------------------------------------------------------------------------------


class Stopped(NamedTuple):
    """Result of a stop."""

    # True if no pod is left.
    is_over: bool
    # Each pod in its last known state, trimmed.
    pods: tuple[Obj, ...]


def grace_s(jobset: Obj) -> float:
    """Return the grace period of the job's pods in seconds, 30 by default as in Kubernetes."""
    return float(pod_template(jobset)["spec"].get("terminationGracePeriodSeconds", 30))


def is_stopped(cluster: Cluster, jobset: Obj) -> bool:
    """Return whether the job was stopped, and not only suspended by its queue."""
    if not is_suspended(jobset):
        return False
    if QUEUE not in jobset["metadata"].get("labels", {}):
        return True
    workload = _find_workload(cluster, jobset)
    return workload is not None and workload["spec"].get("active") is False


def stop(cluster: Cluster, jobset: Obj) -> None:
    """Stop a job. In a queue its Workload is deactivated, because Kueue would resume a suspended JobSet."""
    _switch(cluster, jobset, on=False)


def resume(cluster: Cluster, jobset: Obj) -> None:
    """Let a stopped job continue."""
    _switch(cluster, jobset, on=True)


def _switch(cluster: Cluster, jobset: Obj, *, on: bool) -> None:
    name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    workload = None
    if QUEUE in jobset["metadata"].get("labels", {}):
        # Kueue, if it is installed, creates a Workload for a new JobSet.
        end = time.monotonic() + _KUEUE_S
        while (workload := _find_workload(cluster, jobset)) is None and time.monotonic() < end:
            time.sleep(0.5)
    if workload is not None:
        cluster.merge(WORKLOADS, workload["metadata"]["name"], namespace, {"spec": {"active": on}})
    else:
        cluster.merge(JOBSETS, name, namespace, {"spec": {"suspend": not on}})


def _find_workload(cluster: Cluster, jobset: Obj) -> Obj | None:
    metadata = jobset["metadata"]
    workloads = cluster.list(WORKLOADS, metadata["namespace"], labels=f"{JOB_UID}={metadata['uid']}")
    return workloads[0] if workloads else None


class Leaving:
    """Pods of a job that is about to be stopped. Created before the stop, it misses no termination message."""

    def __init__(self, cluster: Cluster, jobset: Obj) -> None:
        self._cluster, self._namespace = cluster, jobset["metadata"]["namespace"]
        self._labels = f"{NAME_LABEL}={jobset['metadata']['name']}"
        self._pods: dict[str, Obj] = {}  # by uid
        self._left, self._since = self._list()

    def until_gone(self, limit_s: float) -> Stopped:
        """Wait until no pod of the job runs."""
        end = time.monotonic() + limit_s
        while self._left and time.monotonic() < end:
            self._watch(max(0.0, min(_LIST_AGAIN_S, end - time.monotonic())))
            self._left, self._since = self._list()
        return Stopped(not self._left, tuple(self._pods.values()))

    def _list(self) -> tuple[set[str], str]:
        pods, since = self._cluster.listed(PODS, self._namespace, self._labels, keep=trim_pod)
        self._pods |= {pod["metadata"]["uid"]: pod for pod in pods}
        return _living(pods), since

    def _watch(self, limit_s: float) -> None:
        events = self._cluster.watch(PODS, self._namespace, labels=self._labels, since=self._since, limit_s=limit_s)
        for event, pod in events:
            # Only the name is known of a pod that was deleted while the watch was interrupted.
            if "status" in pod:
                self._pods[pod["metadata"]["uid"]] = trim_pod(pod)
            if event == "DELETED" or not _living([pod]):
                self._left.discard(pod["metadata"]["uid"])
            if not self._left:
                return


def _living(pods: Iterable[Obj]) -> set[str]:
    """Return the uids of pods whose containers may still run."""
    return {pod["metadata"]["uid"] for pod in pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")}


# --- progress ---------------------------------------------------------------------------------------------------------


def progress_record(snapshot: Snapshot, when: str) -> Recorded | None:
    """Return the progress that a job's pods report, or None if they report nothing.

    Earlier values of the same attempt fill in for a leader's log that can no longer be read.

    Args:
        snapshot: The job.
        when: State of the job, a key of WHEN.
    """
    report, earlier = agent_report.merge(snapshot.records, snapshot.hosts), snapshot.recorded
    newest = report.verdict if when in ("stopped", "ended") else report.last
    if report.heartbeat is None and newest is None:
        return None
    beat = report.heartbeat or Beat()
    record = Recorded(
        uid=snapshot.jobset["metadata"].get("uid", ""),
        at=snapshot.now.timestamp(),
        when=when,
        attempt=max(beat.attempt, 0 if newest is None else newest.attempt),
        generation=max(beat.generation, 0 if newest is None else newest.generation),
        step=report.step,
        committed=report.committed,
        goodput=report.goodput,
        ends=report.ends_by_cause,
        verdict=None if newest is None else newest.verdict,
    )
    if earlier is None or earlier.attempt != record.attempt:
        return record
    missing = [name for name in ("step", "committed", "goodput", "ends") if getattr(record, name) is None]
    return dataclasses.replace(record, **{name: getattr(earlier, name) for name in missing})


def write_progress(cluster: Cluster, snapshot: Snapshot, when: str, say: Say) -> None:
    """Write the progress as an annotation, if it has changed. `say` is called with the reason of a failure."""
    record, earlier = progress_record(snapshot, when), snapshot.recorded
    if record is None:
        return
    if earlier is not None and dataclasses.replace(record, at=earlier.at).to_json() == earlier.to_json():
        return
    metadata = {"uid": record.uid, "annotations": {ANNOTATION: record.to_json()}}
    try:
        cluster.merge(JOBSETS, snapshot.name, snapshot.namespace, {"metadata": metadata})
    except ClusterError as error:
        if not (isinstance(error, ApiError) and error.status in _GONE):
            say(f"how far {snapshot.name} was is not on its JobSet: {error.message[:_MAX_REFUSAL]}")


class LastWords:
    """Records of the leader while its job stops. They are read at once, because the log disappears with the pod."""

    def __init__(self, cluster: Cluster, snapshot: Snapshot) -> None:
        self._cluster, self._namespace, self._records = cluster, snapshot.namespace, list(snapshot.records)
        self._leader = next((host for host in snapshot.hosts if host.number == 0 and host.running), None)
        self._thread = threading.Thread(target=self._listen, name="last words", daemon=True)
        self._thread.start()

    def heard(self, wait_s: float = 2.0) -> tuple[Line, ...]:
        """Wait at most `wait_s` seconds for the end of the log, and return all records so far."""
        self._thread.join(wait_s)
        return tuple(self._records)

    def _listen(self) -> None:
        # Records before an error are kept. The pods' termination messages have the verdict in any case.
        with contextlib.suppress(ClusterError):
            if self._leader is not None:
                for record in collect.follow_records(self._cluster, self._namespace, self._leader):
                    self._records.append(record)


# --- wait -------------------------------------------------------------------------------------------------------------


def quietly(text: str) -> None:
    """Ignore a message that another part of the program reports."""


class Timeout(Exception):
    """Raised if the job has not ended in time."""


def wait(cluster: Cluster, jobset: Obj, limit_s: float | None = None, say: Say = quietly) -> JobStatus:
    """Wait until a job is done, failed or stopped, write its progress on its JobSet, and return its status.

    Args:
        cluster: The cluster.
        jobset: The job's JobSet.
        limit_s: Limit in seconds, after which a timeout exception of this module is raised.
        say: Called while the cluster does not answer, which may last for minutes.

    Raises:
        ClusterError: If the job is deleted or the cluster rejects a request.
    """
    metadata, outage = jobset["metadata"], Outage(cluster, say)
    end = None if limit_s is None else time.monotonic() + limit_s
    with contextlib.suppress(TimeoutError):
        while end is None or time.monotonic() < end:
            latest = outage.ride(partial(_wait_for_change, cluster, metadata, jobset, end), end)
            if terminal_state(latest) or is_suspended(latest):
                job = outage.ride(partial(_read_with_pods, cluster, metadata), end)
                if isinstance(job, NoSuchJob):
                    raise _deleted(metadata)
                status = job_status.status_of(job)
                write_progress(cluster, job, _WHEN.get(status.state, "stopped"), say)
                if status.state in OVER:
                    return status
                # The queue may have evicted the job while its pods still save. Their last reports are needed.
                is_leaving = job.is_suspended and any(not host.has_ended for host in job.hosts)
                if status.state is State.STOPPING or is_leaving:
                    time.sleep(_SETTLES_S)
                    continue
            jobset = latest
    # The job continues. Its progress is recorded if it can be read within seconds.
    cluster.hurry()
    with contextlib.suppress(ClusterError):
        job = collect.snapshot(cluster, metadata["namespace"], metadata["name"])
        if isinstance(job, Snapshot):
            write_progress(cluster, job, "running", say)
    raise Timeout


def _read_with_pods(cluster: Cluster, metadata: Obj) -> Snapshot | NoSuchJob:
    """Read the job, several times if a failing server does not return its pods, which have the verdict."""
    for _ in range(_LOOKS - 1):
        job = collect.snapshot(cluster, metadata["namespace"], metadata["name"])
        if isinstance(job, NoSuchJob) or "pods" not in job.not_read:
            return job
        time.sleep(_SETTLES_S)
    return collect.snapshot(cluster, metadata["namespace"], metadata["name"])


def _wait_for_change(cluster: Cluster, metadata: Obj, known: Obj, end: float | None) -> Obj:
    """Return the JobSet when it has ended, its suspension has changed, or a while has passed."""
    slice_s = _LOOK_AGAIN_S if end is None else max(0.0, min(_LOOK_AGAIN_S, end - time.monotonic()))
    fields = f"metadata.name={metadata['name']}"
    for event, jobset in cluster.watch(JOBSETS, metadata["namespace"], fields=fields, limit_s=slice_s):
        if event == "DELETED" or jobset["metadata"]["uid"] != metadata["uid"]:
            raise _deleted(metadata)
        if terminal_state(jobset) or is_suspended(jobset) != is_suspended(known):
            return jobset
    latest = cluster.get(JOBSETS, metadata["name"], metadata["namespace"])
    if latest is None or latest["metadata"]["uid"] != metadata["uid"]:
        raise _deleted(metadata)
    return latest


def _deleted(metadata: Obj) -> ClusterError:
    return ClusterError(f"JobSet {metadata['name']} in namespace {metadata['namespace']} was deleted meanwhile.")


class Waiting:
    """Wait for a job in a thread, while the terminal shows something else, such as logs."""

    def __init__(self, cluster: Cluster, jobset: Obj, limit_s: float | None, say: Say = quietly) -> None:
        self._done: concurrent.futures.Future[JobStatus] = concurrent.futures.Future()
        thread = threading.Thread(target=self._run, args=(cluster, jobset, limit_s, say), name="wait", daemon=True)
        thread.start()

    def _run(self, cluster: Cluster, jobset: Obj, limit_s: float | None, say: Say) -> None:
        try:
            self._done.set_result(wait(cluster, jobset, limit_s, say))
        except Exception as error:
            # The caller's thread raises it again in result().
            self._done.set_exception(error)

    def is_over(self) -> bool:
        """Return whether the wait is over, so that result() does not block."""
        return self._done.done()

    def result(self) -> JobStatus:
        """Block until the wait is over, and return its status or raise its exception."""
        return self._done.result()
