"""A job stopped, and resumed: its pods end, saving, while the JobSet and its place in the cluster stay."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from launcher import placement
from launcher.agent import words
from launcher.cluster import Cluster
from launcher.errors import ApiError, UserError
from launcher.jobset import NAME_LABEL, OWN_LABEL, STOPPED_WITH
from launcher.kinds import JOBSETS, PODS, WORKLOADS
from launcher.objects import Obj, template
from trainer import contract

_KUEUE_S = 10.0  # that it takes at most
_LOOK_AGAIN_S = 10.0  # a pod may be gone between a list and a watch


class Stopped(NamedTuple):
    """How a stop went."""

    is_over: bool  # no pod is left
    verdict: Mapping[str, Any] | None  # of the gang that ended; None when no agent said a last word


def own(cluster: Cluster, name: str, namespace: str) -> Obj:
    """The JobSet of that name. Raises UserError when there is none, or one that is not ours to touch."""
    jobset = cluster.get(JOBSETS, name, namespace)
    if jobset is None:
        known = [one["metadata"]["name"] for one in cluster.list(JOBSETS, namespace, labels=OWN_LABEL)]
        hint = f"it has {', '.join(known)}." if known else "it has none of ours; -n names another namespace."
        raise UserError(f"Namespace {namespace} has no job {name}.", hint)
    if not is_ours(jobset):
        raise UserError(f"JobSet {name} in namespace {namespace} is not ours{whose(jobset)}.", "use kubectl.")
    return jobset


def is_ours(jobset: Obj) -> bool:
    metadata = jobset["metadata"]
    return bool(metadata.get("labels", {}).get(OWN_LABEL) == metadata["name"])


def whose(obj: Obj) -> str:
    """What an object says of who made it: `: it was created by kubectl-create at 2026-…`."""
    metadata = obj["metadata"]
    by = next((one.get("manager") for one in metadata.get("managedFields") or ()), None)
    return f": it was created by {by or 'someone'} at {metadata.get('creationTimestamp', 'an unknown time')}"


def grace_s(jobset: Obj) -> float:
    """How long its pods have to save when they are told to go; Kubernetes' own default where it does not say."""
    return float(template(jobset)["spec"].get("terminationGracePeriodSeconds", 30))


def has_finished(jobset: Obj) -> str | None:
    """Completed or Failed; None while it may still run."""
    return jobset.get("status", {}).get("terminalState") or None


def is_stopped(cluster: Cluster, jobset: Obj) -> bool:
    """Whether it was stopped, not merely held back by its queue."""
    if not jobset["spec"].get("suspend"):
        return False
    if placement.QUEUE not in jobset["metadata"].get("labels", {}):
        return True
    workload = _workload(cluster, jobset)
    return workload is not None and workload["spec"].get("active") is False


def stop(cluster: Cluster, jobset: Obj) -> None:
    """Tells every pod of a job to save and end. Kueue would resume a JobSet that is only suspended."""
    _switch(cluster, jobset, on=False)


def resume(cluster: Cluster, jobset: Obj) -> None:
    """Lets a stopped job go on."""
    _switch(cluster, jobset, on=True)


def _switch(cluster: Cluster, jobset: Obj, *, on: bool) -> None:
    name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    workload = _made_workload(cluster, jobset) if placement.QUEUE in jobset["metadata"].get("labels", {}) else None
    if workload is not None:
        cluster.merge(WORKLOADS, workload["metadata"]["name"], namespace, {"spec": {"active": on}})
    else:
        cluster.merge(JOBSETS, name, namespace, {"spec": {"suspend": not on}})
    if on and STOPPED_WITH in jobset["metadata"].get("annotations", {}):
        _annotate(cluster, jobset, None)


def remember(cluster: Cluster, jobset: Obj, words: str) -> None:
    """Writes down how the gang ended that was stopped, for whoever asks when its pods are gone."""
    with contextlib.suppress(ApiError):  # it is stopped all the same: in a queue that takes no right to JobSets
        _annotate(cluster, jobset, words)


def _annotate(cluster: Cluster, jobset: Obj, words: str | None) -> None:
    name, namespace = jobset["metadata"]["name"], jobset["metadata"]["namespace"]
    cluster.merge(JOBSETS, name, namespace, {"metadata": {"annotations": {STOPPED_WITH: words}}})


def _made_workload(cluster: Cluster, jobset: Obj) -> Obj | None:
    """The Workload that Kueue makes of a new JobSet; None where no Kueue does."""
    end = time.monotonic() + _KUEUE_S
    while (found := _workload(cluster, jobset)) is None and time.monotonic() < end:
        time.sleep(0.5)
    return found


def _workload(cluster: Cluster, jobset: Obj) -> Obj | None:
    metadata = jobset["metadata"]
    found = cluster.list(WORKLOADS, metadata["namespace"], labels=f"{placement.JOB_UID}={metadata['uid']}")
    return found[0] if found else None


class Leaving:
    """The pods of a job that is about to be stopped. Made before it is told, it misses none of their last words."""

    def __init__(self, cluster: Cluster, jobset: Obj) -> None:
        self._cluster, self._namespace = cluster, jobset["metadata"]["namespace"]
        self._labels = f"{NAME_LABEL}={jobset['metadata']['name']}"
        self._verdict: Mapping[str, Any] | None = None
        self._left, self._since = self._look()

    def until_gone(self, limit_s: float) -> Stopped:
        """Waits until no pod of the job runs any more."""
        end = time.monotonic() + limit_s
        while self._left and time.monotonic() < end:
            self._hear(max(0.0, min(_LOOK_AGAIN_S, end - time.monotonic())))
            self._left, self._since = self._look()
        return Stopped(not self._left, self._verdict)

    def _look(self) -> tuple[set[str], str]:
        pods, since = self._cluster.listed(PODS, self._namespace, self._labels)
        return _living(pods), since

    def _hear(self, limit_s: float) -> None:
        watched = self._cluster.watch(PODS, self._namespace, labels=self._labels, since=self._since, limit_s=limit_s)
        for event, pod in watched:
            self._verdict = _better(self._verdict, last_words(pod))
            if event == "DELETED" or not _living([pod]):
                self._left.discard(pod["metadata"]["uid"])
            if not self._left:
                return


def _living(pods: Iterable[Obj]) -> set[str]:
    """The uids of pods whose containers may still run."""
    return {pod["metadata"]["uid"] for pod in pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")}


def _better(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Of two agents' words those that say more: one that only lost its leader knows the least."""
    return other if one is None or (other is not None and one["code"] == contract.LOST) else one


def last_words(pod: Obj) -> Mapping[str, Any] | None:
    """The verdict that an agent left at its end."""
    for status in pod.get("status", {}).get("containerStatuses") or ():
        said = words.parse_farewell((status.get("state", {}).get("terminated") or {}).get("message"))
        if said is not None:
            found: Mapping[str, Any] = said["verdict"]
            return found
    return None
