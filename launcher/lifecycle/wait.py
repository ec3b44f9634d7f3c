"""Until a submitted job is over: done, failed, stopped or deleted."""

from __future__ import annotations

import threading
import time

from launcher import status, world
from launcher.cluster import Cluster
from launcher.errors import ClusterError
from launcher.kinds import JOBSETS
from launcher.objects import Obj
from launcher.status import JobStatus, State
from launcher.stop import has_finished

_LOOK_AGAIN_S = 30.0  # at what no event of the JobSet tells
_SETTLES_S = 2.0  # pods that are about to end

OVER = (State.DONE, State.FAILED, State.STOPPED)


class Timeout(Exception):
    """The job is not over yet."""


def wait(cluster: Cluster, jobset: Obj, limit_s: float | None = None) -> JobStatus:
    """How a job stands once it is over.

    Raises Timeout after `limit_s` seconds, and ClusterError when it is deleted meanwhile or the cluster stays silent.
    """
    metadata = jobset["metadata"]
    end = None if limit_s is None else time.monotonic() + limit_s
    while end is None or time.monotonic() < end:
        found = _changed(cluster, metadata, jobset, end)
        if has_finished(found) or found["spec"].get("suspend"):
            stands = status.fold(world.gather(cluster, metadata["namespace"], metadata["name"]))
            if stands.state in OVER:
                return stands
            if stands.state is State.STOPPING:
                time.sleep(_SETTLES_S)
                continue
        jobset = found
    raise Timeout


def _changed(cluster: Cluster, metadata: Obj, known: Obj, end: float | None) -> Obj:
    """The JobSet once it is finished or its suspension differs from the known one's; as it is after a while."""
    slice_s = _LOOK_AGAIN_S if end is None else max(0.0, min(_LOOK_AGAIN_S, end - time.monotonic()))
    fields = f"metadata.name={metadata['name']}"
    for event, found in cluster.watch(JOBSETS, metadata["namespace"], fields=fields, limit_s=slice_s):
        if event == "DELETED" or found["metadata"]["uid"] != metadata["uid"]:
            raise _deleted(metadata)
        if has_finished(found) or bool(found["spec"].get("suspend")) != bool(known["spec"].get("suspend")):
            return found
    latest = cluster.get(JOBSETS, metadata["name"], metadata["namespace"])
    if latest is None or latest["metadata"]["uid"] != metadata["uid"]:
        raise _deleted(metadata)
    return latest


def _deleted(metadata: Obj) -> ClusterError:
    return ClusterError(f"JobSet {metadata['name']} in namespace {metadata['namespace']} was deleted meanwhile.")


class Waiting:
    """wait() beside something else that takes the terminal, such as logs."""

    def __init__(self, cluster: Cluster, jobset: Obj, limit_s: float | None) -> None:
        self._result: JobStatus | Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(cluster, jobset, limit_s), name="wait", daemon=True)
        self._thread.start()

    def _run(self, cluster: Cluster, jobset: Obj, limit_s: float | None) -> None:
        try:
            self._result = wait(cluster, jobset, limit_s)
        except Exception as error:  # raised again where somebody asks
            self._result = error

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> JobStatus:
        """What wait() returns or raises, once it does."""
        self._thread.join()
        if isinstance(self._result, Exception):
            raise self._result
        assert self._result is not None
        return self._result
