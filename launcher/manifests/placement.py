"""Where pods may run: labels and taints of nodes, kinds of capacity, queues and topologies. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from launcher import platforms
from launcher.platforms import NAME, Nodes
from launcher.profile import Nodes as ProfileNodes
from launcher.profile import Profile
from launcher.schema import JobSpec, Reservation, Toleration

QUEUE = "kueue.x-k8s.io/queue-name"
JOB_UID = "kueue.x-k8s.io/job-uid"  # Kueue puts it on the Workload of a job
PRIORITY = "kueue.x-k8s.io/priority-class"
LONGEST = "kueue.x-k8s.io/max-exec-time-seconds"
TOPOLOGY = "kueue.x-k8s.io/podset-preferred-topology"
PROVISIONING = "provreq.kueue.x-k8s.io/maxRunDurationSeconds"
EXCLUSIVE = "alpha.jobset.sigs.k8s.io/exclusive-topology"

# Kubernetes waits five minutes for a node that is gone; the gang knows after seconds and waits for its pod's end.
_GONE_NODE = tuple(
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}
    for taint in ("not-ready", "unreachable")
)


def platform(job: JobSpec, profile: Profile) -> platforms.Where:
    return job.platform or profile.platform


def queue(job: JobSpec, profile: Profile) -> str | None:
    return job.queue or profile.queue


def nodes(job: JobSpec, profile: Profile) -> Nodes | None:
    """The nodes that have the job's accelerator; None where the platform has none."""
    kind = job.accelerator.type
    own = profile.nodes.get(kind)
    return _of_profile(own) if own is not None else platforms.NODES[platform(job, profile)].get(kind)


def capacity(job: JobSpec, profile: Profile) -> Nodes | None:
    """The nodes of the job's kind of capacity; None where the platform has no such kind."""
    if job.capacity == "on-demand":
        return Nodes()
    known = platforms.CAPACITY[platform(job, profile)]
    if not isinstance(job.capacity, Reservation):
        own = profile.capacity.get(job.capacity)
        return _of_profile(own) if own is not None else known.get(job.capacity)
    bought, name = known.get("reservation"), job.capacity.reservation
    if bought is None:
        return None
    labels = {key: tuple(name if value == NAME else value for value in values) for key, values in bought.labels.items()}
    return Nodes(labels, bought.tolerations)


def jobset_labels(job: JobSpec, profile: Profile) -> dict[str, str]:
    """What Kueue reads off the JobSet."""
    if (name := queue(job, profile)) is None:
        return {}
    found = {QUEUE: name}
    if job.priority is not None:
        found[PRIORITY] = job.priority
    if job.deadline is not None:
        found[LONGEST] = str(int(job.deadline))
    return found


def jobset_annotations(job: JobSpec, profile: Profile) -> dict[str, str]:
    """What JobSet and Kueue read off the JobSet's annotations."""
    found = {}
    # A slice of one host shares its node pool with others; only one that spans hosts must have a pool to itself.
    key = profile.slice_label or platforms.SLICE_LABEL.get(platform(job, profile))
    if job.accelerator.platform == "tpu" and job.hosts > 1 and job.placement is None and key is not None:
        found[EXCLUSIVE] = key
    if job.capacity == "flex-start" and job.deadline is not None and queue(job, profile) is not None:
        found[PROVISIONING] = str(int(job.deadline))
    return found


def patch(job: JobSpec, profile: Profile) -> dict[str, Any]:
    """The pod template's part of it."""
    kinds = [found for found in (nodes(job, profile), capacity(job, profile)) if found is not None]
    wanted = {key: values for kind in kinds for key, values in kind.labels.items()}
    for key, value in (profile.node_selector | job.node_selector).items():
        wanted[key] = (value,)  # the job names one of several, or another
    if job.accelerator.platform == "tpu" and platforms.GKE_TPU in wanted:
        wanted[platforms.GKE_TOPOLOGY] = (str(job.accelerator.topology),)
    if job.network == "gpudirect-tcpxo" and platforms.TCPXO_GPU in wanted.get(platforms.GKE_GPU, ()):
        wanted[platforms.GKE_GPU] = (platforms.TCPXO_GPU,)
    spec: dict[str, Any] = _selection(wanted)
    spec["tolerations"] = [
        *(dict(toleration) for toleration in _GONE_NODE),
        *(dict(toleration) for kind in kinds for toleration in kind.tolerations),
        *_tolerations([*profile.tolerations, *job.tolerations]),
    ]
    if job.priority is not None and queue(job, profile) is None:
        spec["priorityClassName"] = job.priority
    if job.placement is None:
        return {"spec": spec}
    return {"metadata": {"annotations": {TOPOLOGY: job.placement.preferred}}, "spec": spec}


def _selection(wanted: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """A selector for labels with one value; an affinity for those with several."""
    spec: dict[str, Any] = {}
    if single := {key: values[0] for key, values in wanted.items() if len(values) == 1}:
        spec["nodeSelector"] = single
    if several := {key: values for key, values in wanted.items() if len(values) > 1}:
        terms = [{"key": key, "operator": "In", "values": list(values)} for key, values in several.items()]
        required = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
        spec["affinity"] = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    return spec


def _of_profile(own: ProfileNodes) -> Nodes:
    labels = {key: (value,) for key, value in own.node_selector.items()}
    return Nodes(labels, tuple(_tolerations(own.tolerations)))


def _tolerations(given: Iterable[Toleration]) -> list[dict[str, Any]]:
    return [toleration.model_dump(by_alias=True, exclude_none=True) for toleration in given]
