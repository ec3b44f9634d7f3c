"""What the pod of each host says: where it stands between nothing and its end. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from launcher.agent import words
from launcher.checks import MAIN_CONTAINER
from launcher.objects import Obj, condition, is_true, replicated, template

# By which a pod's place in the gang is known.
REPLICATED_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
GENERATION_LABEL = "jobset.sigs.k8s.io/restart-attempt"
SLICE_LABEL = "jobset.sigs.k8s.io/job-index"
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"


@dataclasses.dataclass(frozen=True)
class Host:
    """One host of one generation: its pod, and the state of the container that matters."""

    number: int
    pod: str
    generation: int
    node: str | None
    is_ready: bool
    is_leaving: bool  # it was told to end
    phase: str  # the pod's own: Pending, Running, Succeeded, Failed
    container: str  # whose state the next four are: the main one, or the init container that holds it up
    is_init: bool
    image: str
    waiting: Mapping[str, Any]  # reason, message; empty when it does not wait
    running: Mapping[str, Any]  # startedAt
    ended: Mapping[str, Any]  # reason, exitCode, message, finishedAt
    unscheduled: Mapping[str, Any]  # the PodScheduled condition while it is not true: reason, message
    disruption: Mapping[str, Any]  # the DisruptionTarget condition: reason, message
    reason: str  # the pod's own reason: Evicted, NodeLost …
    message: str
    oom_before: bool  # an earlier start of the container ended for want of memory
    created: str

    @property
    def has_started(self) -> bool:
        """Its main container runs or ran: there is a log."""
        return not self.is_init and bool(self.running or self.ended)

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def farewell(self) -> dict[str, Any] | None:
        """What its agent said at its end."""
        return words.parse_farewell(self.ended.get("message"))

    @property
    def name(self) -> str:
        return f"host {self.number} (pod {self.pod})"


def size(one: Obj) -> int:
    """Hosts of each Job of a replicated job."""
    spec = one["template"]["spec"]
    return int(spec.get("parallelism") or spec.get("completions") or 1)


def wanted(jobset: Obj) -> int:
    """How many hosts the JobSet asks for."""
    return sum(int(one.get("replicas", 1)) * size(one) for one in replicated(jobset))


def main_container(spec: Obj) -> Obj:
    """The container of a pod spec that runs the program: ours by its name, else the first."""
    containers = spec.get("containers") or [{}]
    return next((one for one in containers if one.get("name") == MAIN_CONTAINER), containers[0])


def claims(jobset: Obj) -> list[str]:
    """The volume claims that its pods mount."""
    volumes = template(jobset).get("spec", {}).get("volumes") or ()
    return [one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one]


def environment(jobset: Obj) -> dict[str, str]:
    """The variables that the program's container is given as they stand."""
    found = main_container(template(jobset).get("spec", {})).get("env") or ()
    return {one["name"]: one.get("value", "") for one in found if "valueFrom" not in one}


def newest(jobset: Obj, pods: Iterable[Obj]) -> list[Host]:
    """The hosts of the last generation that has pods; of one host that is replaced, the newer pod."""
    offsets, total = {}, 0
    for one in replicated(jobset):
        offsets[one["name"]] = total, size(one)
        total += int(one.get("replicas", 1)) * size(one)
    main = main_container(template(jobset).get("spec", {})).get("name", MAIN_CONTAINER)
    hosts = [_host(pod, offsets, main) for pod in pods]
    last = max((host.generation for host in hosts), default=0)
    newest_of = {host.number: host for host in sorted(hosts, key=lambda host: host.created) if host.generation == last}
    return [newest_of[number] for number in sorted(newest_of)]


def _host(pod: Obj, offsets: Mapping[str, tuple[int, int]], main: str) -> Host:
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    labels = metadata.get("labels", {})
    offset, per_job = offsets.get(labels.get(REPLICATED_LABEL, ""), (0, 1))
    said, is_init = _holder(status, main)
    state = said.get("state") or {}
    scheduled = condition(pod, "PodScheduled")
    disruption = condition(pod, "DisruptionTarget")
    return Host(
        number=offset + int(labels.get(SLICE_LABEL, 0)) * per_job + int(labels.get(INDEX_LABEL, 0)),
        pod=metadata["name"],
        generation=int(labels.get(GENERATION_LABEL, 0)),
        node=spec.get("nodeName"),
        is_ready=is_true(pod, "Ready"),
        is_leaving="deletionTimestamp" in metadata,
        phase=status.get("phase", "Pending"),
        container=said.get("name", main),
        is_init=is_init,
        image=said.get("image", ""),
        waiting=state.get("waiting") or {},
        running=state.get("running") or {},
        ended=state.get("terminated") or {},
        unscheduled=scheduled if scheduled.get("status") == "False" else {},
        disruption=disruption if disruption.get("status") == "True" else {},
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        oom_before=((said.get("lastState") or {}).get("terminated") or {}).get("reason") == "OOMKilled",
        created=metadata.get("creationTimestamp", ""),
    )


def _holder(status: Obj, main: str) -> tuple[Obj, bool]:
    """The container whose state tells how far the pod is, and whether it is an init container."""
    for one in status.get("initContainerStatuses") or ():
        ended = one.get("state", {}).get("terminated")
        if ended is None and not one.get("ready") or ended is not None and ended.get("exitCode"):
            return one, True
    found = status.get("containerStatuses") or ()
    return next((one for one in found if one["name"] == main), {}), False
