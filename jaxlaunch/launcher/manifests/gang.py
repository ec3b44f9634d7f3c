"""Gang scheduling by Kubernetes itself, without Kueue: all pods of a job are placed, or none. Pure.

The scheduler's plugin GangScheduling (KEP 4671) reads a policy from an object to which each pod
refers. In Kubernetes 1.35 it is a Workload of v1alpha1, and the pods have `workloadRef`. Since 1.36
it is a PodGroup, of v1alpha2 and since 1.37 of v1beta1, and the pods have `schedulingGroup`. JobSet
passes on the field that the Kubernetes libraries of its own version have: 0.11 `workloadRef`, 0.12
`schedulingGroup` (their go.mod: k8s.io/api 0.35 and 0.36). The object belongs to the JobSet and
stays while it restarts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.kubernetes.kinds import GANG_KINDS, GANG_WORKLOADS, JOBSETS
from jaxlaunch.launcher.kubernetes.labels import REPLICATED_JOB


def gang_patch(job: JobSpec, version: str | None) -> dict[str, Any]:
    """Return the patch of the pod template that refers to the group of the pods."""
    if version is None or job.pod_count == 1:
        return {}
    if GANG_KINDS[version] == GANG_WORKLOADS:
        return {"spec": {"workloadRef": {"name": job.name, "podGroup": REPLICATED_JOB}}}
    return {"spec": {"schedulingGroup": {"podGroupName": job.name}}}


def gang_manifests(
    job: JobSpec, version: str | None, metadata: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return the Workload or the PodGroup of a job with several pods."""
    if version is None or job.pod_count == 1:
        return []
    kind = GANG_KINDS[version]
    # A job can start without its spares, and an elastic job with its smallest number of hosts.
    policy = {"gang": {"minCount": job.slices * job.min_hosts}}
    spec: dict[str, Any] = {"schedulingPolicy": policy}
    if kind == GANG_WORKLOADS:
        owner = {"apiGroup": JOBSETS.group, "kind": JOBSETS.kind, "name": job.name}
        group = {"name": REPLICATED_JOB, "policy": policy}
        spec = {"controllerRef": owner, "podGroups": [group]}
    manifest = {"apiVersion": kind.api_version, "kind": kind.kind}
    return [{**manifest, "metadata": dict(metadata), "spec": spec}]
