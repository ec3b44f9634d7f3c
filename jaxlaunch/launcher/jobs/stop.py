"""Stops and resumes a job: its pods save and end, while its JobSet stays."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import NamedTuple

from jaxlaunch.launcher.kubernetes import labels, objects
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, PODS, WORKLOADS
from jaxlaunch.launcher.kubernetes.labels import NAME_LABEL
from jaxlaunch.launcher.kubernetes.objects import Obj, is_suspended, pod_template

_KUEUE_S = 10.0  # until Kueue has made a Workload
_LOOK_AGAIN_S = 10.0  # a pod may be deleted between a list and a watch


class Stopped(NamedTuple):
    """How a stop ended."""

    is_over: bool  # no pod is left
    pods: tuple[Obj, ...]  # each as it was seen last, as launcher/kubernetes/kept_fields leaves it


def grace_s(jobset: Obj) -> float:
    """Seconds that its pods have to save and end; Kubernetes' own default where it sets none."""
    return float(pod_template(jobset)["spec"].get("terminationGracePeriodSeconds", 30))


def is_stopped(cluster: Cluster, jobset: Obj) -> bool:
    """Whether it was stopped, rather than suspended by its queue."""
    if not is_suspended(jobset):
        return False
    if labels.QUEUE not in jobset["metadata"].get("labels", {}):
        return True
    workload = _workload(cluster, jobset)
    return workload is not None and workload["spec"].get("active") is False


def stop(cluster: Cluster, jobset: Obj) -> None:
    """Stops a job: by its Workload in a queue, because Kueue would resume a JobSet that is only suspended."""
    _switch(cluster, jobset, on=False)


def resume(cluster: Cluster, jobset: Obj) -> None:
    """Lets a stopped job continue."""
    _switch(cluster, jobset, on=True)


def _switch(cluster: Cluster, jobset: Obj, *, on: bool) -> None:
    name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    workload = _made_workload(cluster, jobset) if labels.QUEUE in jobset["metadata"].get("labels", {}) else None
    if workload is not None:
        cluster.merge(WORKLOADS, workload["metadata"]["name"], namespace, {"spec": {"active": on}})
    else:
        cluster.merge(JOBSETS, name, namespace, {"spec": {"suspend": not on}})


def _made_workload(cluster: Cluster, jobset: Obj) -> Obj | None:
    """The Workload that Kueue makes of a new JobSet; None where no Kueue does."""
    end = time.monotonic() + _KUEUE_S
    while (found := _workload(cluster, jobset)) is None and time.monotonic() < end:
        time.sleep(0.5)
    return found


def _workload(cluster: Cluster, jobset: Obj) -> Obj | None:
    metadata = jobset["metadata"]
    found = cluster.list(WORKLOADS, metadata["namespace"], labels=f"{labels.JOB_UID}={metadata['uid']}")
    return found[0] if found else None


class Leaving:
    """The pods of a job that is to be stopped. Made before the stop, it misses none of their termination messages."""

    def __init__(self, cluster: Cluster, jobset: Obj) -> None:
        self._cluster, self._namespace = cluster, jobset["metadata"]["namespace"]
        self._labels = f"{NAME_LABEL}={jobset['metadata']['name']}"
        self._pods: dict[str, Obj] = {}  # by uid
        self._left, self._since = self._look()

    def until_gone(self, limit_s: float) -> Stopped:
        """Waits until no pod of the job runs any more."""
        end = time.monotonic() + limit_s
        while self._left and time.monotonic() < end:
            self._hear(max(0.0, min(_LOOK_AGAIN_S, end - time.monotonic())))
            self._left, self._since = self._look()
        return Stopped(not self._left, tuple(self._pods.values()))

    def _look(self) -> tuple[set[str], str]:
        pods, since = self._cluster.listed(PODS, self._namespace, self._labels, keep=objects.trim_pod)
        self._pods |= {pod["metadata"]["uid"]: pod for pod in pods}
        return _living(pods), since

    def _hear(self, limit_s: float) -> None:
        watched = self._cluster.watch(PODS, self._namespace, labels=self._labels, since=self._since, limit_s=limit_s)
        for event, pod in watched:
            if "status" in pod:  # else it was deleted while the watch was interrupted: only its name is known
                self._pods[pod["metadata"]["uid"]] = objects.trim_pod(pod)
            if event == "DELETED" or not _living([pod]):
                self._left.discard(pod["metadata"]["uid"])
            if not self._left:
                return


def _living(pods: Iterable[Obj]) -> set[str]:
    """The uids of pods whose containers may still run."""
    return {pod["metadata"]["uid"] for pod in pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")}
