"""Stops, resumes and waits for a job, and writes on its JobSet how far it was.

A stopped job's pods save and end, while its JobSet stays: whoever asks when the pods are gone reads its annotation.
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

# Until Kueue has made a Workload.
_KUEUE_S = 10.0
# A pod may be deleted between a list and a watch.
_LIST_AGAIN_S = 10.0
# Statuses of a write to a JobSet that is gone, or after which one of its name came.
_GONE = (404, 409)
_MAX_REFUSAL = 240  # characters
# For what no event of the JobSet reports.
_LOOK_AGAIN_S = 30.0
# While pods end.
_SETTLES_S = 2.0
# At pods that could not be read.
_LOOKS = 3
# Of a job in another state it is written that it is being stopped.
_WHEN = {State.DONE: "ended", State.FAILED: "ended", State.QUEUED: "queued"}

Say = Callable[[str], None]


# --- stop and resume --------------------------------------------------------------------------------------------------


class Stopped(NamedTuple):
    """How a stop ended."""

    # True if no pod is left.
    is_over: bool
    # Each pod in its last known state, trimmed.
    pods: tuple[Obj, ...]


def grace_s(jobset: Obj) -> float:
    """Return the seconds that its pods have to save and end; Kubernetes' own default where it sets none."""
    return float(pod_template(jobset)["spec"].get("terminationGracePeriodSeconds", 30))


def is_stopped(cluster: Cluster, jobset: Obj) -> bool:
    """Return whether it was stopped, rather than suspended by its queue."""
    if not is_suspended(jobset):
        return False
    if QUEUE not in jobset["metadata"].get("labels", {}):
        return True
    workload = _find_workload(cluster, jobset)
    return workload is not None and workload["spec"].get("active") is False


def stop(cluster: Cluster, jobset: Obj) -> None:
    """Stop a job: by its Workload in a queue, because Kueue would resume a JobSet that is only suspended."""
    _switch(cluster, jobset, on=False)


def resume(cluster: Cluster, jobset: Obj) -> None:
    """Let a stopped job continue."""
    _switch(cluster, jobset, on=True)


def _switch(cluster: Cluster, jobset: Obj, *, on: bool) -> None:
    name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    workload = None
    if QUEUE in jobset["metadata"].get("labels", {}):
        # Kueue makes a Workload of a new JobSet, if there is a Kueue.
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
    """The pods of a job that is to be stopped. Made before the stop, it misses none of their termination messages."""

    def __init__(self, cluster: Cluster, jobset: Obj) -> None:
        self._cluster, self._namespace = cluster, jobset["metadata"]["namespace"]
        self._labels = f"{NAME_LABEL}={jobset['metadata']['name']}"
        self._pods: dict[str, Obj] = {}  # by uid
        self._left, self._since = self._list()

    def until_gone(self, limit_s: float) -> Stopped:
        """Wait until no pod of the job runs any more."""
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
            # Of one that was deleted while the watch was interrupted only its name is known.
            if "status" in pod:
                self._pods[pod["metadata"]["uid"]] = trim_pod(pod)
            if event == "DELETED" or not _living([pod]):
                self._left.discard(pod["metadata"]["uid"])
            if not self._left:
                return


def _living(pods: Iterable[Obj]) -> set[str]:
    """Return the uids of pods whose containers may still run."""
    return {pod["metadata"]["uid"] for pod in pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")}


# --- how far it was ---------------------------------------------------------------------------------------------------


def progress_record(snapshot: Snapshot, when: str) -> Recorded | None:
    """Return how far a job is, by what its pods report now; None where they report nothing.

    `when` is a key of WHEN. What was known before of the same attempt fills in for a leader's log that can no longer be
    read.
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
    """Write it as an annotation, if it says anything new; `say` gets why that was refused."""
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
    """What the leader reports while its job is stopped, heard as it is written: its log goes with its pod."""

    def __init__(self, cluster: Cluster, snapshot: Snapshot) -> None:
        self._cluster, self._namespace, self._records = cluster, snapshot.namespace, list(snapshot.records)
        self._leader = next((host for host in snapshot.hosts if host.number == 0 and host.running), None)
        self._thread = threading.Thread(target=self._listen, name="last words", daemon=True)
        self._thread.start()

    def heard(self, wait_s: float = 2.0) -> tuple[Line, ...]:
        """Return all records so far; wait for the end of the log, `wait_s` seconds at most."""
        self._thread.join(wait_s)
        return tuple(self._records)

    def _listen(self) -> None:
        # What was heard before an error counts; the pods say the verdict themselves.
        with contextlib.suppress(ClusterError):
            if self._leader is not None:
                for record in collect.follow_records(self._cluster, self._namespace, self._leader):
                    self._records.append(record)


# --- wait -------------------------------------------------------------------------------------------------------------


def quietly(text: str) -> None:
    """Say nothing: somebody else does."""


class Timeout(Exception):
    """The job is not over yet."""


def wait(cluster: Cluster, jobset: Obj, limit_s: float | None = None, say: Say = quietly) -> JobStatus:
    """Return the status of a job once it is over: done, failed or stopped. How far it was is written on its JobSet.

    `say` gets that the cluster does not answer, which may last for minutes. Raises Timeout after `limit_s` seconds, and
    ClusterError when it is deleted or the cluster refuses.
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
                # Its queue may have taken its place while its pods still save: what they say last is to be heard.
                is_leaving = job.is_suspended and any(not host.has_ended for host in job.hosts)
                if status.state is State.STOPPING or is_leaving:
                    time.sleep(_SETTLES_S)
                    continue
            jobset = latest
    # Write down how far a job is that runs on, as far as that can be read within seconds.
    cluster.hurry()
    with contextlib.suppress(ClusterError):
        job = collect.snapshot(cluster, metadata["namespace"], metadata["name"])
        if isinstance(job, Snapshot):
            write_progress(cluster, job, "running", say)
    raise Timeout


def _read_with_pods(cluster: Cluster, metadata: Obj) -> Snapshot | NoSuchJob:
    """Read the job; its pods, which have the verdict, again where a server that is unwell did not give them."""
    for _ in range(_LOOKS - 1):
        job = collect.snapshot(cluster, metadata["namespace"], metadata["name"])
        if isinstance(job, NoSuchJob) or "pods" not in job.not_read:
            return job
        time.sleep(_SETTLES_S)
    return collect.snapshot(cluster, metadata["namespace"], metadata["name"])


def _wait_for_change(cluster: Cluster, metadata: Obj, known: Obj, end: float | None) -> Obj:
    """Return the JobSet once it is finished or its suspension differs from the known one's; as it is after a while."""
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
    """wait() in a thread, while the terminal shows something else, such as logs."""

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
        """Return whether result() returns at once."""
        return self._done.done()

    def result(self) -> JobStatus:
        """Return what wait() returns or raise what it raises, once it does."""
        return self._done.result()
