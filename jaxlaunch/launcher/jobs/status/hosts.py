"""The hosts of a job, one for each pod: node, phase, containers, and how it ended. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.kubernetes.labels import (
    GENERATION_LABEL,
    INDEX_LABEL,
    MAIN_CONTAINER,
    OWN_LABEL,
    REPLICATED_LABEL,
    SLICE_LABEL,
)
from jaxlaunch.launcher.kubernetes.objects import Obj, condition, is_true, pod_template, replicated_jobs
from jaxlaunch.records import checked, log_lines
from jaxlaunch.records.log_lines import Termination
from jaxlaunch.records.members import Members

METRICS_PORT = "metrics"  # of the main container, by name
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclasses.dataclass(frozen=True)
class Container:
    """A container of a pod beside the main one, as the job or somebody's webhook added it."""

    name: str
    is_init: bool
    is_sidecar: bool  # an init container that runs next to the main one: restartPolicy Always
    running: Mapping[str, Any]
    ended: Mapping[str, Any]
    before: Mapping[str, Any]  # how an earlier start of it ended
    memory_limit: str | None


@dataclasses.dataclass(frozen=True)
class Host:
    """One host of one generation: its pod, and the state of the container that matters."""

    number: int
    pod: str
    generation: int
    node: str | None
    is_ready: bool
    unready: str  # why it is not, as its condition says it
    is_leaving: bool  # it is being deleted
    phase: str  # the pod's own: Pending, Running, Succeeded, Failed
    container: str  # whose state the next four are: the main one, or the init container that holds it up
    is_init: bool
    is_sidecar: bool  # an init container that runs next to the main one
    image: str
    waiting: Mapping[str, Any]  # reason, message; empty when it does not wait
    running: Mapping[str, Any]  # startedAt
    ended: Mapping[str, Any]  # reason, exitCode, message, finishedAt
    unscheduled: Mapping[str, Any]  # the PodScheduled condition while it is not true: reason, message
    disruption: Mapping[str, Any]  # the DisruptionTarget condition: reason, message
    reason: str  # the pod's own reason: Evicted, NodeLost …
    message: str
    before: Mapping[str, Any]  # how an earlier start of the container ended: as `ended`
    termination_message: str  # of the main container
    created: str
    seen_by_kubelet: bool  # the node has begun to work on the pod
    ends_at: str  # while it is being deleted: when its grace period is over
    memory_limit: str | None  # of `container`
    beside: tuple[Container, ...]  # all other containers

    @property
    def has_started(self) -> bool:
        """Its main container runs or ran: there is a log."""
        return not self.is_init and bool(self.running or self.ended)

    @property
    def has_ended(self) -> bool:
        """Whether all containers of the pod have ended."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def last_end(self) -> Mapping[str, Any]:
        """How the container ended last, this start of it or an earlier one; empty when it never did."""
        return self.ended or self.before

    @property
    def left_alone(self) -> bool:
        """Whether its agent was told to stop and left, while its gang waits for the pod that takes its place."""
        return self.ended.get("exitCode") == contract.LEFT

    @property
    def ends_gang(self) -> bool:
        """Whether it failed by what its whole gang decided, of a job whose pods are replaced alone otherwise."""
        code = self.ended.get("exitCode", 0)
        return self.phase == "Failed" and contract.DONE < code < contract.OF_THE_KERNEL and code in contract.OUTCOMES

    @property
    def termination_report(self) -> Termination | None:
        """What its agent wrote as the container's termination message."""
        return log_lines.parse_termination_message(self.termination_message)

    @property
    def name(self) -> str:
        """ "host 3 (pod lm-w-0-3-x7k2p)"."""
        return f"host {self.number} (pod {self.pod})"


def _hosts_per_job(one: Obj) -> int:
    """Pods of each Job of a replicated job."""
    spec = one["template"]["spec"]
    return int(spec.get("parallelism") or spec.get("completions") or 1)


def expected(jobset: Obj) -> int:
    """How many hosts the JobSet asks for."""
    return sum(int(one.get("replicas", 1)) * _hosts_per_job(one) for one in replicated_jobs(jobset))


def main_container(spec: Obj) -> Obj:
    """The container of a pod spec that runs the program: ours by its name, else the first."""
    containers = spec.get("containers") or [{}]
    return next((one for one in containers if one.get("name") == MAIN_CONTAINER), containers[0])


def agent_job(spec: Obj) -> AgentJob | None:
    """What the agents of pods of this spec read of the job; None where they have none."""
    texts = (one.get("value") for one in main_container(spec).get("env") or () if one["name"] == contract.JOB)
    text = next(texts, None)
    return checked.read(AgentJob, checked.decode_record(text.replace("$$", "$"))) if text else None


def table(jobset: Obj) -> Members:
    """Which hosts of the JobSet hold ranks before any was lost; of another tool's, each holds one."""
    job = _of_agents(jobset)
    return Members(range(job.sizes[-1] if job.sizes else expected(jobset)), job.processes_per_host)


def moves(jobset: Obj) -> bool:
    """Whether ranks may move from a host to another: the job has spares, or may shrink."""
    return bool(_of_agents(jobset).sizes)


def are_replaced(jobset: Obj) -> bool:
    """Whether a pod that is lost is made again alone, while the others wait for it."""
    return _of_agents(jobset).replaces


def _of_agents(jobset: Obj) -> AgentJob:
    """What its agents read of the job; that of a nameless job of one process each, where there is none."""
    try:
        found = agent_job(pod_template(jobset).get("spec", {}))
    except ValueError:
        found = None
    return found or AgentJob("")


def metrics_port(jobset: Obj) -> int | None:
    """The port of its agents' HTTP server; None of a JobSet of another tool."""
    ports = main_container(pod_template(jobset).get("spec", {})).get("ports") or ()
    return next((int(one["containerPort"]) for one in ports if one.get("name") == METRICS_PORT), None)


def claims(jobset: Obj) -> list[str]:
    """The volume claims that its pods mount."""
    volumes = pod_template(jobset).get("spec", {}).get("volumes") or ()
    return [one["persistentVolumeClaim"]["claimName"] for one in volumes if "persistentVolumeClaim" in one]


def environment(jobset: Obj) -> dict[str, str]:
    """The environment variables of the main container whose values are in the JobSet itself."""
    found = main_container(pod_template(jobset).get("spec", {})).get("env") or ()
    return {one["name"]: one.get("value", "") for one in found if "valueFrom" not in one}


def is_ours(jobset: Obj) -> bool:
    """Whether launcher made the JobSet: by its label or, as anyone may patch that away, its pods' environment, which
    JobSet lets nobody change."""
    metadata = jobset["metadata"]
    is_labelled = (metadata.get("labels") or {}).get(OWN_LABEL) == metadata["name"]
    return is_labelled or contract.JOB in environment(jobset)


def newest(jobset: Obj, pods: Iterable[Obj]) -> list[Host]:
    """The hosts of the last generation that has pods; of one host that is replaced, the newer pod.

    A pod whose labels are no numbers was not made by JobSet, and is left out: anyone may give one the job's label.
    """
    offsets, total = {}, 0
    for one in replicated_jobs(jobset):
        offsets[one["name"]] = total, _hosts_per_job(one)
        total += int(one.get("replicas", 1)) * _hosts_per_job(one)
    main = main_container(pod_template(jobset).get("spec", {})).get("name", MAIN_CONTAINER)
    hosts = [_host(pod, offsets, main) for pod in pods if _has_a_place(pod)]
    last = max((host.generation for host in hosts), default=0)
    newest_of = {host.number: host for host in sorted(hosts, key=lambda host: host.created) if host.generation == last}
    return [newest_of[number] for number in sorted(newest_of)]


def _has_a_place(pod: Obj) -> bool:
    """Whether its labels say where in a gang it is."""
    labels = pod["metadata"].get("labels", {})
    return all(_NUMBER.fullmatch(labels.get(name, "0")) for name in (SLICE_LABEL, INDEX_LABEL, GENERATION_LABEL))


def _host(pod: Obj, offsets: Mapping[str, tuple[int, int]], main: str) -> Host:
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    labels = metadata.get("labels", {})
    offset, per_job = offsets.get(labels.get(REPLICATED_LABEL, ""), (0, 1))
    container, is_init = _telling_container(status, main)
    state = container.get("state") or {}
    limits, sidecars = _memory_limits(spec), _sidecars(spec)
    scheduled = condition(pod, "PodScheduled")
    disruption = condition(pod, "DisruptionTarget")
    return Host(
        number=offset + int(labels.get(SLICE_LABEL, 0)) * per_job + int(labels.get(INDEX_LABEL, 0)),
        pod=metadata["name"],
        generation=int(labels.get(GENERATION_LABEL, 0)),
        node=spec.get("nodeName"),
        is_ready=is_true(pod, "Ready"),
        unready="" if is_true(pod, "Ready") else condition(pod, "Ready").get("message", ""),
        is_leaving="deletionTimestamp" in metadata,
        phase=status.get("phase", "Pending"),
        container=container.get("name", main),
        is_init=is_init,
        is_sidecar=container.get("name") in sidecars,
        image=container.get("image", ""),
        waiting=state.get("waiting") or {},
        running=state.get("running") or {},
        ended=state.get("terminated") or {},
        unscheduled=scheduled if scheduled.get("status") == "False" else {},
        disruption=disruption if disruption.get("status") == "True" else {},
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        before=(container.get("lastState") or {}).get("terminated") or {},
        termination_message=((_status_of(status, main).get("state") or {}).get("terminated") or {}).get("message", ""),
        created=metadata.get("creationTimestamp", ""),
        seen_by_kubelet="startTime" in status or bool(status.get("containerStatuses")),
        ends_at=metadata.get("deletionTimestamp", ""),
        memory_limit=limits.get(container.get("name", main)),
        beside=tuple(_beside(status, container.get("name", main), limits, sidecars)),
    )


def _memory_limits(spec: Obj) -> dict[str, str]:
    """The memory limit of each container that has one."""
    found = (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    limits = {one["name"]: ((one.get("resources") or {}).get("limits") or {}).get("memory") for one in found}
    return {name: str(limit) for name, limit in limits.items() if limit is not None}


def _sidecars(spec: Obj) -> set[str]:
    return {one["name"] for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"}


def _beside(status: Obj, telling: str, limits: Mapping[str, str], sidecars: Set[str]) -> Iterator[Container]:
    """The containers whose state the host itself does not have."""
    for kind in ("initContainerStatuses", "containerStatuses"):
        for one in status.get(kind) or ():
            if one["name"] == telling:
                continue
            state = one.get("state") or {}
            yield Container(
                name=one["name"],
                is_init=kind == "initContainerStatuses",
                is_sidecar=one["name"] in sidecars,
                running=state.get("running") or {},
                ended=state.get("terminated") or {},
                before=(one.get("lastState") or {}).get("terminated") or {},
                memory_limit=limits.get(one["name"]),
            )


def _telling_container(status: Obj, main: str) -> tuple[Obj, bool]:
    """The container whose state shows how far the pod is, and whether it is an init container.

    Once the main container has started, it is that one: an init container that still runs is a sidecar.
    """
    own = _status_of(status, main)
    state = own.get("state") or {}
    if state.get("running") is not None or state.get("terminated") is not None:
        return own, False
    for one in status.get("initContainerStatuses") or ():
        ended = one.get("state", {}).get("terminated")
        if ended is None and not one.get("ready") or ended is not None and ended.get("exitCode"):
            return one, True
    return own, False


def _status_of(status: Obj, main: str) -> Obj:
    """The status of the main container; empty before the kubelet reports one."""
    return next((one for one in status.get("containerStatuses") or () if one["name"] == main), {})
