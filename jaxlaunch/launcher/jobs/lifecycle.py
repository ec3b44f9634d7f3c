"""Stopping, resuming and waiting for a job, and recording its progress on its JobSet.

The pods of a stopped job save and end, while its JobSet stays. An annotation on the JobSet holds
the progress, which is therefore known after the pods are gone.
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
from jaxlaunch.launcher.jobs.status.job_status import FINAL_STATES, JobStatus, State
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, PODS, WORKLOADS
from jaxlaunch.launcher.kubernetes.labels import JOB_UID, NAME_LABEL, QUEUE_LABEL
from jaxlaunch.launcher.kubernetes.objects import (
    Obj,
    is_suspended,
    pod_template,
    terminal_state,
    trim_pod,
)
from jaxlaunch.launcher.kubernetes.watch import Outage
from jaxlaunch.records.log_lines import BeatLine, Line, ProgressAnnotation

# Limit for Kueue to create a Workload.
_WORKLOAD_TIMEOUT_S = 10.0
# A pod may be deleted between a list and a watch.
_RELIST_PERIOD_S = 10.0
# Statuses of a write to a JobSet that no longer exists or was replaced by one of the same name.
_GONE_STATUSES = (404, 409)
_MAX_REFUSAL_CHARS = 240
# The JobSet is read again this often, for changes that its events do not report.
_WATCH_PERIOD_S = 30.0
# Pause between two reads while pods end.
_SETTLE_PAUSE_S = 2.0
# Number of attempts to read the pods.
_MAX_READS = 3
# How the record names each state. In any other state the job is being stopped.
_RECORDED_WHEN = {State.DONE: "ended", State.FAILED: "ended", State.QUEUED: "queued"}

Say = Callable[[str], None]


# --- stop and resume ------------------------------------------------------------------------------


class StopResult(NamedTuple):
    """Result of a stop."""

    # True if no pod is left.
    is_over: bool
    # Each pod in its last known state, trimmed.
    pods: tuple[Obj, ...]


def grace_period_s(jobset: Obj) -> float:
    """Return the grace period of the job's pods in seconds, 30 by default as in Kubernetes."""
    return float(pod_template(jobset)["spec"].get("terminationGracePeriodSeconds", 30))


def is_stopped(cluster: Cluster, jobset: Obj) -> bool:
    """Return whether the job was stopped, and not only suspended by its queue."""
    if not is_suspended(jobset):
        return False
    if QUEUE_LABEL not in jobset["metadata"].get("labels", {}):
        return True
    workload = _find_workload(cluster, jobset)
    return workload is not None and workload["spec"].get("active") is False


def stop_job(cluster: Cluster, jobset: Obj) -> None:
    """Stop a job. In a queue this deactivates its Workload: Kueue would resume the JobSet."""
    _set_active(cluster, jobset, is_active=False)


def resume_job(cluster: Cluster, jobset: Obj) -> None:
    """Let a stopped job continue."""
    _set_active(cluster, jobset, is_active=True)


def _set_active(cluster: Cluster, jobset: Obj, *, is_active: bool) -> None:
    name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    kind, spec = JOBSETS, {"suspend": not is_active}
    if QUEUE_LABEL in jobset["metadata"].get("labels", {}):
        # Kueue, if it is installed, creates a Workload for a new JobSet.
        deadline = time.monotonic() + _WORKLOAD_TIMEOUT_S
        while (workload := _find_workload(cluster, jobset)) is None and time.monotonic() < deadline:
            time.sleep(0.5)
        if workload is not None:
            kind, name, spec = WORKLOADS, workload["metadata"]["name"], {"active": is_active}
    cluster.merge_patch(kind, name, namespace, {"spec": spec})


def _find_workload(cluster: Cluster, jobset: Obj) -> Obj | None:
    metadata = jobset["metadata"]
    labels = f"{JOB_UID}={metadata['uid']}"
    return next(iter(cluster.list(WORKLOADS, metadata["namespace"], labels=labels)), None)


class StoppingPods:
    """Pods of a job, created before it is stopped so that no termination message is missed."""

    def __init__(self, cluster: Cluster, jobset: Obj) -> None:
        self._cluster, self._namespace = cluster, jobset["metadata"]["namespace"]
        self._labels = f"{NAME_LABEL}={jobset['metadata']['name']}"
        self._pods: dict[str, Obj] = {}  # by uid
        self._running_uids, self._since = self._list_pods()

    def wait_until_gone(self, limit_s: float) -> StopResult:
        """Wait until no pod of the job runs."""
        deadline = time.monotonic() + limit_s
        while self._running_uids and time.monotonic() < deadline:
            self._watch_pods(max(0.0, min(_RELIST_PERIOD_S, deadline - time.monotonic())))
            self._running_uids, self._since = self._list_pods()
        return StopResult(not self._running_uids, tuple(self._pods.values()))

    def _list_pods(self) -> tuple[set[str], str]:
        pods, since = self._cluster.list_with_version(
            PODS, self._namespace, self._labels, trim=trim_pod
        )
        self._pods |= {pod["metadata"]["uid"]: pod for pod in pods}
        return _running_pod_uids(pods), since

    def _watch_pods(self, limit_s: float) -> None:
        events = self._cluster.watch(
            PODS, self._namespace, labels=self._labels, since=self._since, limit_s=limit_s
        )
        for event, pod in events:
            # Only the name is known of a pod that was deleted while the watch was interrupted.
            if "status" in pod:
                self._pods[pod["metadata"]["uid"]] = trim_pod(pod)
            if event == "DELETED" or not _running_pod_uids([pod]):
                self._running_uids.discard(pod["metadata"]["uid"])
            if not self._running_uids:
                return


def _running_pod_uids(pods: Iterable[Obj]) -> set[str]:
    """Return the uids of pods whose containers may still run."""
    ended_phases = ("Succeeded", "Failed")
    live_pods = [pod for pod in pods if pod.get("status", {}).get("phase") not in ended_phases]
    return {pod["metadata"]["uid"] for pod in live_pods}


# --- progress -------------------------------------------------------------------------------------


def progress_record(snapshot: Snapshot, when: str) -> ProgressAnnotation | None:
    """Return the progress that a job's pods report, or None if they report nothing.

    Earlier values of the same attempt fill in for a leader's log that can no longer be read.

    Args:
        snapshot: The job.
        when: State of the job, a key of ANNOTATION_MOMENTS.
    """
    report = agent_report.merge_reports(snapshot.records, snapshot.hosts)
    earlier = snapshot.recorded_progress
    attempt_end = report.attempt_end if when in ("stopped", "ended") else report.last_end
    if report.heartbeat is None and attempt_end is None:
        return None
    heartbeat = report.heartbeat or BeatLine()
    record = ProgressAnnotation(
        uid=snapshot.jobset["metadata"].get("uid", ""),
        at=snapshot.now.timestamp(),
        when=when,
        attempt=max(heartbeat.attempt, 0 if attempt_end is None else attempt_end.attempt),
        generation=max(heartbeat.generation, 0 if attempt_end is None else attempt_end.generation),
        verdict=None if attempt_end is None else attempt_end.verdict,
        **report.numbers,
    )
    if earlier is None or earlier.attempt != record.attempt:
        return record
    missing = [name for name, value in record.run_numbers().items() if value is None]
    return dataclasses.replace(record, **{name: getattr(earlier, name) for name in missing})


def write_progress(cluster: Cluster, snapshot: Snapshot, when: str, say: Say) -> None:
    """Write the progress as an annotation if it has changed. `say` gets the reason of a failure."""
    record, earlier = progress_record(snapshot, when), snapshot.recorded_progress
    if record is None:
        return
    if earlier and dataclasses.replace(record, at=earlier.at).to_json() == earlier.to_json():
        return
    metadata = {"uid": record.uid, "annotations": {ANNOTATION: record.to_json()}}
    try:
        cluster.merge_patch(JOBSETS, snapshot.name, snapshot.namespace, {"metadata": metadata})
    except ClusterError as error:
        if not (isinstance(error, ApiError) and error.status in _GONE_STATUSES):
            reason = error.message[:_MAX_REFUSAL_CHARS]
            say(f"the progress of {snapshot.name} could not be written to its JobSet: {reason}")


class FinalRecords:
    """Records of the leader while its job stops, because its log disappears with the pod."""

    def __init__(self, cluster: Cluster, snapshot: Snapshot) -> None:
        self._cluster = cluster
        self._namespace = snapshot.namespace
        self._records = list(snapshot.records)
        leaders = (host for host in snapshot.hosts if host.number == 0 and host.running)
        self._leader = next(leaders, None)
        self._thread = threading.Thread(target=self._follow_log, name="final records", daemon=True)
        self._thread.start()

    def read_records(self, wait_s: float = 2.0) -> tuple[Line, ...]:
        """Wait at most `wait_s` seconds for the end of the log, and return all records so far."""
        self._thread.join(wait_s)
        return tuple(self._records)

    def _follow_log(self) -> None:
        # Records before an error are kept. The pods' termination messages have the verdict in any
        # case.
        with contextlib.suppress(ClusterError):
            if self._leader is not None:
                self._records.extend(
                    collect.follow_records(self._cluster, self._namespace, self._leader)
                )


# --- wait -----------------------------------------------------------------------------------------


def ignore_message(text: str) -> None:
    """Ignore a message that another part of the program reports."""


class WaitTimeoutError(Exception):
    """Raised if the job has not ended in time."""


def wait_for_end(
    cluster: Cluster, jobset: Obj, limit_s: float | None = None, say: Say = ignore_message
) -> JobStatus:
    """Wait until a job is done, failed or stopped, record its progress, and return its status.

    Args:
        cluster: The cluster.
        jobset: The job's JobSet.
        limit_s: Limit in seconds, after which a timeout exception of this module is raised.
        say: Called while the cluster does not answer, which may last for minutes.

    Raises:
        ClusterError: If the job is deleted or the cluster rejects a request.
    """
    metadata, outage = jobset["metadata"], Outage(cluster, say)
    deadline = None if limit_s is None else time.monotonic() + limit_s
    with contextlib.suppress(TimeoutError):
        while deadline is None or time.monotonic() < deadline:
            latest = outage.call_with_retries(
                partial(_wait_for_change, cluster, metadata, jobset, deadline), deadline
            )
            if not _count_ready(latest) and not terminal_state(latest):
                # In a namespace that is being deleted pods go before the JobSet.
                read_namespace = partial(
                    collect.read_ending_namespace, cluster, metadata["namespace"]
                )
                if outage.call_with_retries(read_namespace, deadline) is not None:
                    raise _namespace_error(metadata)
            if terminal_state(latest) or is_suspended(latest):
                read_job = partial(_read_with_pods, cluster, metadata)
                job = outage.call_with_retries(read_job, deadline)
                if isinstance(job, NoSuchJob):
                    raise deleted_error(cluster, metadata)
                if job.ending_namespace is not None:
                    raise _namespace_error(metadata)
                status = job_status.derive_status(job)
                write_progress(cluster, job, _RECORDED_WHEN.get(status.state, "stopped"), say)
                if status.state in FINAL_STATES:
                    return status
                # The queue may have evicted the job while its pods still save. Their last reports
                # are needed.
                is_leaving = job.is_suspended and any(not host.has_ended for host in job.hosts)
                if status.state is State.STOPPING or is_leaving:
                    time.sleep(_SETTLE_PAUSE_S)
                    continue
            jobset = latest
    # The job continues. Its progress is recorded if it can be read within seconds.
    cluster.limit_call_time()
    with contextlib.suppress(ClusterError):
        job = collect.read_snapshot(cluster, metadata["namespace"], metadata["name"])
        if isinstance(job, Snapshot):
            write_progress(cluster, job, "running", say)
    raise WaitTimeoutError


def _read_with_pods(cluster: Cluster, metadata: Obj) -> Snapshot | NoSuchJob:
    """Read the job, several times if a failing server does not return its pods."""
    for _ in range(_MAX_READS - 1):
        job = collect.read_snapshot(cluster, metadata["namespace"], metadata["name"])
        if isinstance(job, NoSuchJob) or "pods" not in job.unread_reasons:
            return job
        time.sleep(_SETTLE_PAUSE_S)
    return collect.read_snapshot(cluster, metadata["namespace"], metadata["name"])


def _wait_for_change(
    cluster: Cluster, metadata: Obj, earlier_jobset: Obj, deadline: float | None
) -> Obj:
    """Return the JobSet when it has ended, lost pods or was suspended, or a while has passed."""
    ready_count = _count_ready(earlier_jobset)
    remaining_s = _WATCH_PERIOD_S if deadline is None else deadline - time.monotonic()
    fields, limit_s = (
        f"metadata.name={metadata['name']}",
        max(0.0, min(_WATCH_PERIOD_S, remaining_s)),
    )
    events = cluster.watch(JOBSETS, metadata["namespace"], fields=fields, limit_s=limit_s)
    for event, jobset in events:
        if event == "DELETED" or jobset["metadata"]["uid"] != metadata["uid"]:
            raise deleted_error(cluster, metadata)
        is_changed = is_suspended(jobset) != is_suspended(earlier_jobset)
        if terminal_state(jobset) or is_changed or _count_ready(jobset) < ready_count:
            return jobset
        ready_count = _count_ready(jobset)
    latest = cluster.get(JOBSETS, metadata["name"], metadata["namespace"])
    if latest is None or latest["metadata"]["uid"] != metadata["uid"]:
        raise deleted_error(cluster, metadata)
    return latest


def _count_ready(jobset: Obj) -> int:
    """Return the number of the JobSet's Jobs whose pods are all ready."""
    statuses = jobset.get("status", {}).get("replicatedJobsStatus") or ()
    return sum(int(status.get("ready") or 0) for status in statuses)


def deleted_error(cluster: Cluster, metadata: Obj) -> ClusterError:
    """Return the error that a JobSet was deleted, with its namespace if that is the reason."""
    name, namespace = metadata["name"], metadata["namespace"]
    with contextlib.suppress(ApiError):
        if collect.read_ending_namespace(cluster, namespace) is not None:
            return _namespace_error(metadata)
    hint = f"`launcher explain -n {namespace} {name}` shows what is left of it."
    return ClusterError(f"JobSet {name} in namespace {namespace} was deleted.", hint)


def _namespace_error(metadata: Obj) -> ClusterError:
    message = f"Namespace {metadata['namespace']} is being deleted, with JobSet {metadata['name']}."
    return ClusterError(message, "submit the job to another namespace: -n NAMESPACE.")


class BackgroundWait:
    """Wait for a job in a thread, while the terminal shows something else, such as logs."""

    def __init__(
        self, cluster: Cluster, jobset: Obj, limit_s: float | None, say: Say = ignore_message
    ) -> None:
        self._future: concurrent.futures.Future[JobStatus] = concurrent.futures.Future()

        def run_wait() -> None:
            try:
                self._future.set_result(wait_for_end(cluster, jobset, limit_s, say))
            except Exception as error:
                # The caller's thread raises it again in result().
                self._future.set_exception(error)

        threading.Thread(target=run_wait, name="wait", daemon=True).start()

    def is_over(self) -> bool:
        """Return whether the wait is over, so that result() does not block."""
        return self._future.done()

    def result(self) -> JobStatus:
        """Block until the wait is over, and return its status or raise its exception."""
        return self._future.result()
