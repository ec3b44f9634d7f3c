"""Deletes a job: its JobSet and pods, and the objects that they own."""

from __future__ import annotations

from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import CONFIGMAPS, JOBSETS, NETWORK_POLICIES
from jaxlaunch.launcher.kubernetes.objects import Obj, template


def delete(cluster: Cluster, jobset: Obj) -> list[str]:
    """Starts to delete a job. Lines that name what is deleted, and what stays because other jobs use it.

    Its pods save and end first (SIGTERM). What the JobSet owns is removed by Kubernetes' garbage collector.
    """
    metadata = jobset["metadata"]
    lines = [f"{JOBSETS.titled(metadata['name'])} deleted", *_owned(cluster, jobset)]
    cluster.delete(JOBSETS, metadata["name"], metadata["namespace"], uid=metadata["uid"], propagation="Foreground")
    return lines


def _owned(cluster: Cluster, jobset: Obj) -> list[str]:
    metadata, lines = jobset["metadata"], []
    candidates = [(NETWORK_POLICIES, metadata["name"])]
    for volume in template(jobset)["spec"].get("volumes") or ():
        if "configMap" in volume:
            candidates.append((CONFIGMAPS, volume["configMap"]["name"]))
    for kind, name in candidates:
        found = cluster.get(kind, name, metadata["namespace"])
        owners = [] if found is None else [one["uid"] for one in found["metadata"].get("ownerReferences") or ()]
        if metadata["uid"] in owners:
            kept = f"kept: {len(owners) - 1} more of its jobs are here"
            lines.append(f"{kind.titled(name)} {'deleted' if len(owners) == 1 else kept}")
    return lines
