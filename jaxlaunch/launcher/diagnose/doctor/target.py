"""What the checks look at: a namespace of a cluster, and the manifests of the job that is to run there."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from jaxlaunch.launcher.errors import ApiError
from jaxlaunch.launcher.kubernetes import labels
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import (
    LIMIT_RANGES,
    NAMESPACES,
    PRIORITY_CLASSES,
    RUNTIME_CLASSES,
    WORKLOAD_PRIORITY_CLASSES,
    Kind,
)
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.kubernetes.resources import count_pods, pod_requests

Obj = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """What a job's checkpoints take of a PersistentVolumeClaim: those that are kept, and one that is being written."""

    claim: str
    kept: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Target:
    """A namespace, and a job's manifests, the JobSet first."""

    cluster: Cluster
    namespace: str
    manifests: Sequence[Obj]
    checkpoints: Callable[[], Checkpoints | None] = lambda: None  # traced on demand; None: on no claim, or not known
    is_example: bool = False  # the smallest job there is, in place of one of the user's

    @property
    def jobset(self) -> Obj:
        """The job's JobSet."""
        return self.manifests[0]

    @property
    def others(self) -> Sequence[Obj]:
        """What the job consists of beside its JobSet."""
        return self.manifests[1:]

    @cached_property
    def template(self) -> Mapping[str, Any]:
        """The pod template of the job."""
        return pod_template(self.jobset)

    @cached_property
    def admitted(self) -> Obj:
        """The job's JobSet, its pods with what their RuntimeClass adds: overhead, node labels and tolerations."""
        name = self.template["spec"].get("runtimeClassName")
        found = self.find(RUNTIME_CLASSES, name) if name else None
        if found is None:
            return self.jobset
        made = copy.deepcopy(self.jobset)
        spec, scheduling = pod_template(made)["spec"], found.get("scheduling") or {}
        spec["overhead"] = (found.get("overhead") or {}).get("podFixed") or {}
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **(scheduling.get("nodeSelector") or {})}
        spec["tolerations"] = [*(spec.get("tolerations") or ()), *(scheduling.get("tolerations") or ())]
        return made

    @cached_property
    def pods(self) -> int:
        """How many pods the job has."""
        return count_pods(self.jobset)

    @property
    def queue(self) -> str | None:
        """The LocalQueue that the job names."""
        name: str | None = self.jobset["metadata"]["labels"].get(labels.QUEUE)
        return name

    @property
    def priority_classes(self) -> Iterator[tuple[Kind, str]]:
        """The priority classes that the job names: Kueue's for its turn in the queue, Kubernetes' for its pods."""
        if (name := self.jobset["metadata"]["labels"].get(labels.PRIORITY)) is not None:
            yield WORKLOAD_PRIORITY_CLASSES, name
        if (name := self.template["spec"].get("priorityClassName")) is not None:
            yield PRIORITY_CLASSES, name

    @property
    def unrequested(self) -> list[str]:
        """Of cpu and memory, what neither the pods request nor a LimitRange that may be read gives them."""
        missing = [name for name in ("cpu", "memory") if name not in pod_requests(pod_template(self.admitted)["spec"])]
        return [name for name in missing if not self.is_example and name not in (self.defaulted or ())]

    @cached_property
    def defaulted(self) -> set[str] | None:
        """What LimitRanges of the namespace set where a container sets nothing; None where they may not be read."""
        try:
            found = self.cluster.list(LIMIT_RANGES, self.namespace)
        except ApiError as error:
            if error.status != 403:
                raise
            return None
        each = [limit for one in found for limit in one["spec"].get("limits") or () if limit.get("type") == "Container"]
        return {name for limit in each for key in ("default", "defaultRequest", "max") for name in limit.get(key) or ()}

    @cached_property
    def labels(self) -> Mapping[str, str] | None:
        """The namespace's labels; None where it does not exist or may not be read."""
        found = self.find(NAMESPACES, self.namespace)
        return None if found is None else found["metadata"].get("labels") or {}

    def find(self, kind: Kind, name: str, namespace: str | None = None) -> Obj | None:
        """An object; None where it does not exist or the user may not read it."""
        try:
            return self.cluster.get(kind, name, namespace)
        except ApiError as error:
            if error.status != 403:
                raise
            return None

    def names(self, kind: Kind, namespace: str | None = None) -> list[str]:
        """The names of all objects of a kind; none where the user may not list them."""
        try:
            return [one["metadata"]["name"] for one in self.cluster.list(kind, namespace)]
        except ApiError as error:
            if error.status != 403:
                raise
            return []
