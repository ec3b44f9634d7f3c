"""Until a submitted job is over: done, failed, stopped or deleted."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from functools import partial

from jaxlaunch.launcher.errors import ClusterError
from jaxlaunch.launcher.jobs import record
from jaxlaunch.launcher.jobs.status import collect, job_status
from jaxlaunch.launcher.jobs.status.job_status import OVER, JobStatus, State
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.kubernetes.objects import Obj, is_suspended, terminal_state
from jaxlaunch.launcher.kubernetes.watch import Outage

_LOOK_AGAIN_S = 30.0  # for what no event of the JobSet reports
_SETTLES_S = 2.0  # while pods end
_LOOKS = 3  # at pods that could not be read
_WHEN = {State.DONE: "ended", State.FAILED: "ended", State.QUEUED: "queued"}  # else it is being stopped


Say = Callable[[str], None]


def quietly(text: str) -> None:
    """Says nothing: somebody else does."""


class Timeout(Exception):
    """The job is not over yet."""


def wait(cluster: Cluster, jobset: Obj, limit_s: float | None = None, say: Say = quietly) -> JobStatus:
    """The status of a job once it is over; `say` gets that the cluster does not answer, which may last for minutes.

    Raises Timeout after `limit_s` seconds, and ClusterError when it is deleted or the cluster refuses.
    """
    end = None if limit_s is None else time.monotonic() + limit_s
    try:
        return _over(cluster, jobset, end, say)
    except TimeoutError:
        _record(cluster, jobset["metadata"], say)
        raise Timeout from None


def _record(cluster: Cluster, metadata: Obj, say: Say) -> None:
    """Writes down how far a job is that runs on, as far as that can be read within seconds."""
    cluster.hurry()
    with contextlib.suppress(ClusterError):
        job = collect.snapshot(cluster, metadata["namespace"], metadata["name"])
        if isinstance(job, Snapshot):
            record.write(cluster, job, "running", say)


def _over(cluster: Cluster, jobset: Obj, end: float | None, say: Say) -> JobStatus:
    """The status of a job once it is over; how far it was is written on its JobSet. Raises TimeoutError at `end`."""
    metadata, outage = jobset["metadata"], Outage(cluster, say)
    while end is None or time.monotonic() < end:
        found = outage.ride(partial(_changed, cluster, metadata, jobset, end), end)
        if terminal_state(found) or is_suspended(found):
            job = outage.ride(partial(_seen, cluster, metadata), end)
            if isinstance(job, NoSuchJob):
                raise _deleted(metadata)
            status = job_status.status_of(job)
            record.write(cluster, job, _WHEN.get(status.state, "stopped"), say)
            if status.state in OVER:
                return status
            if status.state is State.STOPPING or _is_leaving(job):
                time.sleep(_SETTLES_S)
                continue
        jobset = found
    raise TimeoutError


def _is_leaving(job: Snapshot) -> bool:
    """Whether its queue took its place, and its pods still save: what they say last is to be heard."""
    return job.is_suspended and any(not host.has_ended for host in job.hosts)


def _seen(cluster: Cluster, metadata: Obj) -> Snapshot | NoSuchJob:
    """The job; its pods, which have the verdict, are tried again where a server that is unwell did not give them."""
    for _ in range(_LOOKS - 1):
        job = collect.snapshot(cluster, metadata["namespace"], metadata["name"])
        if isinstance(job, NoSuchJob) or "pods" not in job.not_read:
            return job
        time.sleep(_SETTLES_S)
    return collect.snapshot(cluster, metadata["namespace"], metadata["name"])


def _changed(cluster: Cluster, metadata: Obj, known: Obj, end: float | None) -> Obj:
    """The JobSet once it is finished or its suspension differs from the known one's; as it is after a while."""
    slice_s = _LOOK_AGAIN_S if end is None else max(0.0, min(_LOOK_AGAIN_S, end - time.monotonic()))
    fields = f"metadata.name={metadata['name']}"
    for event, found in cluster.watch(JOBSETS, metadata["namespace"], fields=fields, limit_s=slice_s):
        if event == "DELETED" or found["metadata"]["uid"] != metadata["uid"]:
            raise _deleted(metadata)
        if terminal_state(found) or is_suspended(found) != is_suspended(known):
            return found
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
        except Exception as error:  # raised again by result()
            self._done.set_exception(error)

    def is_over(self) -> bool:
        """Whether result() returns at once."""
        return self._done.done()

    def result(self) -> JobStatus:
        """What wait() returns or raises, once it does."""
        return self._done.result()
