"""Stopping, resuming and waiting for a job, and recording its progress on its JobSet.

When a job is stopped, its pods save a checkpoint and end, and its JobSet stays. The agents report
the progress in the log of host 0's pod, which disappears with the pod. It is therefore written to
an annotation on the JobSet.
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
from jaxlaunch.launcher.errors import ApiError, ClusterError, WaitTimeoutError
from jaxlaunch.launcher.jobs.status import agent_report, collect, job_status, roles
from jaxlaunch.launcher.jobs.status.hosts import is_of_jobset
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

# Limit for Kueue to create the Workload of a JobSet.
_WORKLOAD_TIMEOUT_S = 10.0
# A watch may miss a deletion, so the pods are listed this often.
_RELIST_PERIOD_S = 10.0
# Statuses of a write to a JobSet that was deleted, or replaced by another of the same name.
_GONE_STATUSES = (404, 409)
_MAX_REFUSAL_CHARS = 240
# The JobSet is read again this often, for changes that its events do not report.
_WATCH_PERIOD_S = 30.0
# Pause between two reads while pods end.
_SETTLE_PAUSE_S = 2.0
# Attempts to read the pods of a job from a failing server.
_MAX_READS = 3
# Value of `when` in the record of progress, by state. It is "stopped" for all other states.
_WHEN_BY_STATE = {State.DONE: "ended", State.FAILED: "ended", State.QUEUED: "queued"}

Say = Callable[[str], None]


# --- stop and resume ------------------------------------------------------------------------------


class StopResult(NamedTuple):
    """Result of a stop.

    Attributes:
        is_over: Whether all pods have ended.
        pods: Pods in their last known states, trimmed.
    """

    is_over: bool
    pods: tuple[Obj, ...]


def grace_period_s(jobset: Obj) -> float:
    """Return the grace period of the job's pods in seconds, 30 by default as in Kubernetes."""
    return float(pod_template(jobset)["spec"].get("terminationGracePeriodSeconds", 30))


def is_stopped(cluster: Cluster, jobset: Obj) -> bool:
    """Return whether the job was stopped. A JobSet is also suspended while it is in a queue."""
    if not is_suspended(jobset):
        return False
    if QUEUE_LABEL not in jobset["metadata"].get("labels", {}):
        return True
    workloads = _list_workloads(cluster, jobset)
    # Without Kueue, only a stop suspends the JobSet.
    return workloads is None or any(item["spec"].get("active") is False for item in workloads[-1:])


def stop_job(cluster: Cluster, jobset: Obj) -> None:
    """Stop a job: suspend its JobSet or, since Kueue would resume that, deactivate its Workload."""
    _set_active(cluster, jobset, is_active=False)


def resume_job(cluster: Cluster, jobset: Obj) -> None:
    """Let a stopped job continue."""
    _set_active(cluster, jobset, is_active=True)


def _set_active(cluster: Cluster, jobset: Obj, *, is_active: bool) -> None:
    name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    kind, spec = JOBSETS, {"suspend": not is_active}
    if QUEUE_LABEL in jobset["metadata"].get("labels", {}):
        # Kueue may not have created the Workload of a new JobSet yet, or may not be installed.
        deadline = time.monotonic() + _WORKLOAD_TIMEOUT_S
        while (workloads := _list_workloads(cluster, jobset)) == []:
            if time.monotonic() >= deadline:
                break
            time.sleep(0.5)
        if workloads:
            kind, name, spec = WORKLOADS, workloads[-1]["metadata"]["name"], {"active": is_active}
    cluster.merge_patch(kind, name, namespace, {"spec": spec})


def _list_workloads(cluster: Cluster, jobset: Obj) -> list[Obj] | None:
    """Return the Workloads of a job, the newest last, or None if Kueue is not installed."""
    metadata = jobset["metadata"]
    labels = f"{JOB_UID}={metadata['uid']}"
    try:
        workloads = cluster.list(WORKLOADS, metadata["namespace"], labels=labels)
    except ApiError as error:
        if error.status != 404:
            raise
        return None
    return sorted(workloads, key=lambda item: str(item["metadata"].get("creationTimestamp", "")))


class StoppingPods:
    """The pods of a job that is about to be stopped, observed until they have ended.

    The object is created before the stop, so that no termination message is missed.
    """

    def __init__(self, cluster: Cluster, jobset: Obj) -> None:
        self._cluster, self._namespace = cluster, jobset["metadata"]["namespace"]
        self._labels = f"{NAME_LABEL}={jobset['metadata']['name']}"
        self._jobset = jobset
        self._pods_by_uid: dict[str, Obj] = {}
        self._list_pods()

    def wait_until_gone(self, limit_s: float) -> StopResult:
        """Wait until no pod of the job runs, for at most `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        while self._running_uids and time.monotonic() < deadline:
            self._watch_pods(max(0.0, min(_RELIST_PERIOD_S, deadline - time.monotonic())))
            self._list_pods()
        return StopResult(not self._running_uids, tuple(self._pods_by_uid.values()))

    def _list_pods(self) -> None:
        self._listed_pods, self._since = self._cluster.list_with_version(
            PODS, self._namespace, self._labels, trim=trim_pod
        )
        self._pods_by_uid |= {pod["metadata"]["uid"]: pod for pod in self._listed_pods}
        own_pods = [pod for pod in self._listed_pods if is_of_jobset(pod, self._jobset)]
        self._running_uids = _running_pod_uids(own_pods)

    def _watch_pods(self, limit_s: float) -> None:
        events = self._cluster.watch(
            PODS,
            self._namespace,
            labels=self._labels,
            since=self._since,
            objects=self._listed_pods,
            limit_s=limit_s,
        )
        with contextlib.closing(events):
            for event, pod in events:
                # A pod that was deleted while the watch was interrupted has no status in its event.
                if "status" in pod:
                    self._pods_by_uid[pod["metadata"]["uid"]] = trim_pod(pod)
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

    If the leader's log can no longer be read, values from an earlier record of the same attempt are
    kept.

    Args:
        snapshot: The job.
        when: State of the job, a key of ANNOTATION_MOMENTS.
    """
    report = agent_report.merge_reports(snapshot.records, snapshot.hosts)
    earlier_record = snapshot.recorded_progress
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
    if earlier_record is None or earlier_record.attempt != record.attempt:
        return record
    missing_names = [name for name, value in record.run_numbers().items() if value is None]
    return dataclasses.replace(
        record, **{name: getattr(earlier_record, name) for name in missing_names}
    )


def write_progress(cluster: Cluster, snapshot: Snapshot, when: str, say: Say) -> None:
    """Write the progress, that of the lead in a job with roles, to the JobSet if it has changed.

    A failure is only reported to `say`.
    """
    snapshot = roles.lead_part(snapshot)
    record, earlier_record = progress_record(snapshot, when), snapshot.recorded_progress
    if record is None:
        return
    if (
        earlier_record
        and dataclasses.replace(record, at=earlier_record.at).to_json() == earlier_record.to_json()
    ):
        return
    metadata = {"uid": record.uid, "annotations": {ANNOTATION: record.to_json()}}
    try:
        cluster.merge_patch(JOBSETS, snapshot.name, snapshot.namespace, {"metadata": metadata})
    except ClusterError as error:
        if not (isinstance(error, ApiError) and error.status in _GONE_STATUSES):
            reason = error.message[:_MAX_REFUSAL_CHARS]
            say(f"the progress of {snapshot.name} could not be written to its JobSet: {reason}")


class FinalRecords:
    """Records of the leader of a job that is being stopped, read in a thread.

    They are read while the job stops, because the leader's log disappears with its pod.
    """

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
        # After an error, the records read so far are used. The verdict is also in the pods'
        # termination messages.
        with contextlib.suppress(ClusterError):
            if self._leader is not None:
                self._records.extend(
                    collect.follow_records(self._cluster, self._namespace, self._leader)
                )


# --- wait -----------------------------------------------------------------------------------------


def ignore_message(text: str) -> None:
    """Ignore a message. Default for `say`, if something else reports the same."""


def wait_for_end(
    cluster: Cluster, jobset: Obj, limit_s: float | None = None, say: Say = ignore_message
) -> JobStatus:
    """Wait until a job is done, failed or stopped, record its progress, and return its status.

    Args:
        cluster: The cluster.
        jobset: The job's JobSet.
        limit_s: Limit in seconds, or None.
        say: Called with a message if the cluster does not answer, which may last for minutes.

    Raises:
        ClusterError: If the job is deleted or the cluster rejects a request.
        WaitTimeoutError: If the job has not ended within `limit_s`.
    """
    metadata, outage = jobset["metadata"], Outage(cluster, say)
    deadline = None if limit_s is None else time.monotonic() + limit_s
    # A job that was suspended before the wait may have ended, and then it does not change.
    earlier_jobset = None if is_suspended(jobset) else jobset
    with contextlib.suppress(TimeoutError):
        while deadline is None or time.monotonic() < deadline:
            latest_jobset = outage.call_with_retries(
                partial(_wait_for_change, cluster, metadata, earlier_jobset, deadline), deadline
            )
            if not _count_ready(latest_jobset) and not terminal_state(latest_jobset):
                # If the namespace is being deleted, its pods are deleted before the JobSet.
                read_namespace = partial(
                    collect.read_ending_namespace, cluster, metadata["namespace"]
                )
                if outage.call_with_retries(read_namespace, deadline) is not None:
                    raise _namespace_error(metadata)
            if terminal_state(latest_jobset) or is_suspended(latest_jobset):
                read_job = partial(_read_with_pods, cluster, metadata)
                job = outage.call_with_retries(read_job, deadline)
                if isinstance(job, NoSuchJob):
                    raise deleted_error(cluster, metadata)
                if job.ending_namespace is not None:
                    raise _namespace_error(metadata)
                status = job_status.derive_status(job)
                write_progress(cluster, job, _WHEN_BY_STATE.get(status.state, "stopped"), say)
                if status.state in FINAL_STATES:
                    return status
                # The pods still save, after a stop or an eviction from the queue. Their last
                # reports are needed.
                has_live_pods = job.is_suspended and any(not host.has_ended for host in job.hosts)
                if status.state is State.STOPPING or has_live_pods:
                    # `earlier_jobset` stays, so that the same change ends the next wait.
                    time.sleep(_SETTLE_PAUSE_S)
                    continue
            earlier_jobset = latest_jobset
    # The time is over, and the job continues. Its progress is recorded if the cluster answers soon.
    cluster.limit_call_time()
    with contextlib.suppress(ClusterError):
        job = collect.read_snapshot(cluster, metadata["namespace"], metadata["name"])
        if isinstance(job, Snapshot):
            write_progress(cluster, job, "running", say)
    name = metadata["name"]
    raise WaitTimeoutError(f"Job {name} has not ended after {limit_s:.0f} s.", "it continues.")


def _read_with_pods(cluster: Cluster, metadata: Obj) -> Snapshot | NoSuchJob:
    """Read the job. If its pods cannot be read, repeat that a few times."""
    for _ in range(_MAX_READS - 1):
        job = collect.read_snapshot(cluster, metadata["namespace"], metadata["name"])
        if isinstance(job, NoSuchJob) or "pods" not in job.unread_reasons:
            return job
        time.sleep(_SETTLE_PAUSE_S)
    return collect.read_snapshot(cluster, metadata["namespace"], metadata["name"])


def _wait_for_change(
    cluster: Cluster, metadata: Obj, earlier_jobset: Obj | None, deadline: float | None
) -> Obj:
    """Return the JobSet once it has ended, was suspended or resumed, or has fewer ready Jobs.

    It is returned at once if there is no earlier one to compare it with, and unchanged after
    _WATCH_PERIOD_S, or at the deadline if that is earlier.
    """
    if earlier_jobset is None:
        return _read_jobset(cluster, metadata)
    ready_count = _count_ready(earlier_jobset)
    remaining_s = _WATCH_PERIOD_S if deadline is None else deadline - time.monotonic()
    limit_s = max(0.0, min(_WATCH_PERIOD_S, remaining_s))
    fields = f"metadata.name={metadata['name']}"
    events = cluster.watch(JOBSETS, metadata["namespace"], fields=fields, limit_s=limit_s)
    with contextlib.closing(events):
        for event, jobset in events:
            if event == "DELETED" or jobset["metadata"]["uid"] != metadata["uid"]:
                raise deleted_error(cluster, metadata)
            has_suspension_changed = is_suspended(jobset) != is_suspended(earlier_jobset)
            if (
                terminal_state(jobset)
                or has_suspension_changed
                or _count_ready(jobset) < ready_count
            ):
                return jobset
            ready_count = _count_ready(jobset)
    return _read_jobset(cluster, metadata)


def _read_jobset(cluster: Cluster, metadata: Obj) -> Obj:
    jobset = cluster.get(JOBSETS, metadata["name"], metadata["namespace"])
    if jobset is None or jobset["metadata"]["uid"] != metadata["uid"]:
        raise deleted_error(cluster, metadata)
    return jobset


def _count_ready(jobset: Obj) -> int:
    """Return the number of Jobs of the JobSet whose pods are all ready."""
    statuses = jobset.get("status", {}).get("replicatedJobsStatus") or ()
    return sum(int(status.get("ready") or 0) for status in statuses)


def deleted_error(cluster: Cluster, metadata: Obj) -> ClusterError:
    """Return the error that a JobSet was deleted, or that its namespace is being deleted."""
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
