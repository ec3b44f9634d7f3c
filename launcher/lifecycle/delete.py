"""A job deleted: its JobSet and pods, and all that goes with them."""

from __future__ import annotations

from launcher.cluster import Cluster
from launcher.kinds import CONFIGMAPS, JOBSETS, NETWORK_POLICIES
from launcher.objects import Obj, template


def delete(cluster: Cluster, jobset: Obj) -> list[str]:
    """Begins to delete a job; names what goes, and what stays because other jobs use it.

    Its pods are told to save and end first. What the JobSet owns is the garbage collector's to remove.
    """
    metadata = jobset["metadata"]
    told = [f"{JOBSETS.titled(metadata['name'])} deleted", *_owned(cluster, jobset)]
    cluster.delete(JOBSETS, metadata["name"], metadata["namespace"], uid=metadata["uid"], propagation="Foreground")
    return told


def _owned(cluster: Cluster, jobset: Obj) -> list[str]:
    metadata, told = jobset["metadata"], []
    candidates = [(NETWORK_POLICIES, metadata["name"])]
    for volume in template(jobset)["spec"].get("volumes") or ():
        if "configMap" in volume:
            candidates.append((CONFIGMAPS, volume["configMap"]["name"]))
    for kind, name in candidates:
        found = cluster.get(kind, name, metadata["namespace"])
        owners = [] if found is None else [one["uid"] for one in found["metadata"].get("ownerReferences") or ()]
        if metadata["uid"] in owners:
            kept = f"kept: {len(owners) - 1} more of its jobs are here"
            told.append(f"{kind.titled(name)} {'deleted' if len(owners) == 1 else kept}")
    return told
