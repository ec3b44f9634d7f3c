"""The hosts of a job, read from its JobSet and its pods. Pure functions.

A host is a position in the job with a number from 0. In each generation it has a pod, and another
one if its pod is replaced. Its state is that of the deciding container of the pod: the main
container, or before that has started, the init container that delays it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.kubernetes.labels import (
    GENERATION_LABEL,
    INDEX_LABEL,
    JOB_LABEL,
    MAIN_CONTAINER,
    REPLICATED_LABEL,
    SLICE_LABEL,
    UID_LABEL,
)
from jaxlaunch.launcher.kubernetes.objects import (
    Obj,
    find_condition,
    is_condition_true,
    lead_name,
    pod_template,
    replicated_jobs,
)
from jaxlaunch.records import codec, log_lines
from jaxlaunch.records.log_lines import TerminationMessage
from jaxlaunch.records.members import Members

# Name of the main container's port at which the agent serves metrics.
METRICS_PORT = "metrics"
_NUMBER = re.compile(r"[0-9]{1,9}")


@dataclasses.dataclass(frozen=True)
class Container:
    """A container of a pod other than the deciding one.

    Attributes:
        name: Name of the container.
        is_init: Whether it is an init container.
        is_sidecar: Whether it is an init container with restartPolicy Always, which runs next to
            the main container.
        running: State of a running container, else empty.
        terminated: State of a container that has ended, else empty.
        last_terminated: The same of an earlier start of the container.
        memory_limit: Memory limit, if it has one.
    """

    name: str
    is_init: bool
    is_sidecar: bool
    running: Mapping[str, Any]
    terminated: Mapping[str, Any]
    last_terminated: Mapping[str, Any]
    memory_limit: str | None


@dataclasses.dataclass(frozen=True)
class Host:
    """A host in one generation: its pod, and the state of its deciding container."""

    number: int
    pod: str
    generation: int
    node: str | None
    is_ready: bool
    # Message of the condition Ready while it is not True.
    unready_reason: str
    # Whether the pod is being deleted.
    is_leaving: bool
    # Phase of the pod: Pending, Running, Succeeded or Failed.
    phase: str
    # Name of the deciding container. The states, the image and the memory limit below are its own.
    container: str
    is_init: bool
    # Whether it is an init container with restartPolicy Always, which is not ready yet.
    is_sidecar: bool
    image: str
    # State of a container that waits (reason and message), else empty.
    waiting: Mapping[str, Any]
    # State of a running container (startedAt), else empty.
    running: Mapping[str, Any]
    # State of a container that has ended (reason, exitCode, message and finishedAt), else empty.
    terminated: Mapping[str, Any]
    # Condition PodScheduled if it is False (reason and message), else empty.
    unscheduled: Mapping[str, Any]
    # Condition DisruptionTarget if it is True (reason and message), else empty.
    disruption: Mapping[str, Any]
    # Reason in the status of the pod itself, such as Evicted or NodeLost, and its message.
    reason: str
    message: str
    # The state `terminated` of an earlier start of the container.
    last_terminated: Mapping[str, Any]
    # Message of the main container's terminated state.
    termination_message: str
    created_at: str
    # Whether the kubelet has started to work on the pod.
    is_seen_by_kubelet: bool
    # End of the grace period of a pod that is being deleted, else empty.
    ends_at: str
    memory_limit: str | None
    # All other containers of the pod.
    other_containers: tuple[Container, ...]

    @property
    def has_started(self) -> bool:
        """Return whether the main container has started, so that it has a log."""
        return not self.is_init and bool(self.running or self.terminated)

    @property
    def has_ended(self) -> bool:
        """Return whether all containers of the pod have ended."""
        return self.phase in ("Succeeded", "Failed")

    @property
    def last_end(self) -> Mapping[str, Any]:
        """Terminated state of this or an earlier start of the container, or an empty dict."""
        return self.terminated or self.last_terminated

    @property
    def has_left_gang(self) -> bool:
        """Return whether its agent was stopped alone, so that the gang waits for another pod."""
        return self.terminated.get("exitCode") == contract.LEFT_GANG

    @property
    def ends_gang(self) -> bool:
        """Return whether its failure ends the whole gang even if lost pods are replaced."""
        return self.phase == "Failed" and self.terminated.get("exitCode") in contract.GANG_CODES

    @property
    def termination_report(self) -> TerminationMessage | None:
        """The agent's parsed termination message, or None if the pod has none."""
        return log_lines.parse_termination_message(self.termination_message)

    @property
    def name(self) -> str:
        """Name for messages, such as "host 3 (pod lm-w-0-3-x7k2p)"."""
        return f"host {self.number} (pod {self.pod})"


def _hosts_per_job(job: Obj) -> int:
    spec = job["template"]["spec"]
    return int(spec.get("parallelism") or spec.get("completions") or 1)


def count_hosts(jobset: Obj) -> int:
    """Return the number of hosts that the JobSet requests."""
    return sum(int(job.get("replicas", 1)) * _hosts_per_job(job) for job in replicated_jobs(jobset))


def list_roles(jobset: Obj) -> list[str]:
    """Return the roles of a job in the order in which they start, empty if it has none."""
    names = [str(job["name"]) for job in replicated_jobs(jobset)]
    return names if len(names) > 1 and is_ours(jobset) else []


def select_role(jobset: Obj, role: str) -> Obj:
    """Return the JobSet as if it had this role alone, whose hosts begin with 0."""
    jobs = [job for job in replicated_jobs(jobset) if job["name"] == role]
    return {**jobset, "spec": {**jobset["spec"], "replicatedJobs": jobs}}


def select_lead(jobset: Obj) -> Obj:
    """Return the JobSet as if it had its lead alone, or that of a job without roles itself."""
    names = list_roles(jobset)
    return select_role(jobset, lead_name(jobset) or names[0]) if names else jobset


def is_of_role(obj: Obj, role: str) -> bool:
    """Return whether a pod or a Job is of this role."""
    return (obj["metadata"].get("labels") or {}).get(REPLICATED_LABEL) == role


def main_container(spec: Obj) -> Obj:
    """Return the container of a pod spec that runs the program: by its name, else the first."""
    containers = spec.get("containers") or [{}]
    return _find_by_name(containers, MAIN_CONTAINER) or containers[0]


def _find_by_name(items: Iterable[Obj], name: str) -> Obj:
    """Return the item of that name, or an empty object."""
    return next((item for item in items if item.get("name") == name), {})


def jobset_main_container(jobset: Obj) -> Obj:
    """Return the container of a JobSet's pods that runs the program."""
    return main_container(pod_template(jobset).get("spec", {}))


def agent_job(spec: Obj) -> AgentJob | None:
    """Return the agents' job settings in a pod spec, or None if it has no agent."""
    text = _find_by_name(main_container(spec).get("env") or (), contract.JOB).get("value")
    if not text:
        return None
    return codec.read_record(AgentJob, codec.parse_record(text.replace("$$", "$")))


def initial_members(jobset: Obj) -> Members:
    """Return the hosts that hold ranks at first.

    In a JobSet that launcher did not create, every host holds one rank.
    """
    job = read_agent_job(jobset)
    size = job.sizes[-1] if job.sizes else count_hosts(jobset)
    return Members(range(size), job.processes_per_host)


def can_move_ranks(jobset: Obj) -> bool:
    """Return whether ranks may move between hosts, because the job has spares or may shrink."""
    return bool(read_agent_job(jobset).sizes)


def has_pod_replacement(jobset: Obj) -> bool:
    """Return whether a lost pod is replaced alone, while the other pods wait for it."""
    return read_agent_job(jobset).replaces


def read_agent_job(jobset: Obj) -> AgentJob:
    """Return the agents' job settings, or the defaults if the JobSet has none or invalid ones."""
    with contextlib.suppress(ValueError):
        return agent_job(pod_template(jobset).get("spec", {})) or AgentJob("")
    return AgentJob("")


def metrics_port(jobset: Obj) -> int | None:
    """Return the port of the agents' HTTP server, or None if launcher did not create the JobSet."""
    port = _find_by_name(jobset_main_container(jobset).get("ports") or (), METRICS_PORT)
    return int(port["containerPort"]) if port else None


def claim_names(jobset: Obj) -> list[str]:
    """Return the names of the PersistentVolumeClaims that the pods mount."""
    volumes = pod_template(jobset).get("spec", {}).get("volumes") or ()
    claims = [volume.get("persistentVolumeClaim") for volume in volumes]
    return [claim["claimName"] for claim in claims if claim is not None]


def read_environment(jobset: Obj) -> dict[str, str]:
    """Return the environment variables of the main container that have a literal value."""
    variables = jobset_main_container(jobset).get("env") or ()
    by_value = [variable for variable in variables if "valueFrom" not in variable]
    return {variable["name"]: variable.get("value", "") for variable in by_value}


def has_run_folder(jobset: Obj) -> bool:
    """Return whether the job has a run folder, on a volume or in a bucket."""
    environment = read_environment(jobset)
    return bool(environment.get(contract.RUN_DIR) or environment.get(contract.RUN_URL))


def has_run_volume(jobset: Obj) -> bool:
    """Return whether the job has a run folder on a volume."""
    environment = read_environment(jobset)
    return bool(environment.get(contract.RUN_DIR)) and not environment.get(contract.RUN_URL)


def is_ours(jobset: Obj) -> bool:
    """Return whether launcher created the JobSet.

    It is recognized by its label or by a variable of its pods. Anyone may remove the label, but
    JobSet does not allow changes of the variables.
    """
    metadata = jobset["metadata"]
    is_labelled = (metadata.get("labels") or {}).get(JOB_LABEL) == metadata["name"]
    return is_labelled or contract.JOB in read_environment(jobset)


def is_of_jobset(obj: Obj, jobset: Obj) -> bool:
    """Return whether a pod or a Job is of this JobSet, and not of an earlier one of its name.

    Kubernetes may delete the pods of a JobSet after the JobSet itself.
    """
    uid = (obj["metadata"].get("labels") or {}).get(UID_LABEL)
    jobset_uid = jobset["metadata"].get("uid")
    return uid is None or jobset_uid is None or uid == jobset_uid


def newest_hosts(jobset: Obj, pods: Iterable[Obj]) -> list[Host]:
    """Return the hosts of the newest generation that has pods, in the order of their numbers.

    A host whose pod was replaced has the newer pod. Anyone may set the job's label on a pod, so
    pods whose other labels are not numbers are ignored: JobSet did not create them.
    """
    offsets, host_count = {}, 0
    for job in replicated_jobs(jobset):
        offsets[job["name"]] = host_count, _hosts_per_job(job)
        host_count += int(job.get("replicas", 1)) * _hosts_per_job(job)
    main = jobset_main_container(jobset).get("name", MAIN_CONTAINER)
    hosts = []
    for pod in pods:
        labels = pod["metadata"].get("labels", {})
        numbers = [labels.get(name, "0") for name in (SLICE_LABEL, INDEX_LABEL, GENERATION_LABEL)]
        is_selected = labels.get(REPLICATED_LABEL) in (None, *offsets)
        if is_selected and is_of_jobset(pod, jobset) and all(map(_NUMBER.fullmatch, numbers)):
            hosts.append(_read_host(pod, offsets, main))
    newest_generation = max((host.generation for host in hosts), default=0)
    hosts.sort(key=lambda host: host.created_at)
    by_number = {host.number: host for host in hosts if host.generation == newest_generation}
    return [by_number[number] for number in sorted(by_number)]


def _read_host(pod: Obj, offsets: Mapping[str, tuple[int, int]], main: str) -> Host:
    metadata, spec, status = pod["metadata"], pod.get("spec", {}), pod.get("status", {})
    labels = metadata.get("labels", {})
    offset, hosts_per_job = offsets.get(labels.get(REPLICATED_LABEL, ""), (0, 1))
    # Empty before the kubelet reports a status of the container.
    main_status = _find_by_name(status.get("containerStatuses") or (), main)
    container, is_init = _deciding_container(status, main_status)
    name = container.get("name", main)
    init_containers = spec.get("initContainers") or ()
    sidecars = {item["name"] for item in init_containers if item.get("restartPolicy") == "Always"}
    limits = {
        item["name"]: ((item.get("resources") or {}).get("limits") or {}).get("memory")
        for item in (*init_containers, *(spec.get("containers") or ()))
    }
    memory_limits = {key: str(limit) for key, limit in limits.items() if limit is not None}
    other_containers = [
        Container(
            name=other["name"],
            is_init=kind == "initContainerStatuses",
            is_sidecar=other["name"] in sidecars,
            running=_state_details(other, "running"),
            terminated=_state_details(other, "terminated"),
            last_terminated=_state_details(other, "terminated", "lastState"),
            memory_limit=memory_limits.get(other["name"]),
        )
        for kind in ("initContainerStatuses", "containerStatuses")
        for other in status.get(kind) or ()
        if other["name"] != name
    ]
    scheduled = find_condition(pod, "PodScheduled")
    disruption = find_condition(pod, "DisruptionTarget")
    is_ready = is_condition_true(pod, "Ready")
    return Host(
        number=offset
        + int(labels.get(SLICE_LABEL, 0)) * hosts_per_job
        + int(labels.get(INDEX_LABEL, 0)),
        pod=metadata["name"],
        generation=int(labels.get(GENERATION_LABEL, 0)),
        node=spec.get("nodeName"),
        is_ready=is_ready,
        unready_reason="" if is_ready else find_condition(pod, "Ready").get("message", ""),
        is_leaving="deletionTimestamp" in metadata,
        phase=status.get("phase", "Pending"),
        container=name,
        is_init=is_init,
        is_sidecar=container.get("name") in sidecars,
        image=container.get("image", ""),
        waiting=_state_details(container, "waiting"),
        running=_state_details(container, "running"),
        terminated=_state_details(container, "terminated"),
        unscheduled=scheduled if scheduled.get("status") == "False" else {},
        disruption=disruption if disruption.get("status") == "True" else {},
        reason=status.get("reason", ""),
        message=status.get("message", ""),
        last_terminated=_state_details(container, "terminated", "lastState"),
        termination_message=_state_details(main_status, "terminated").get("message", ""),
        created_at=metadata.get("creationTimestamp", ""),
        is_seen_by_kubelet="startTime" in status or bool(status.get("containerStatuses")),
        ends_at=metadata.get("deletionTimestamp", ""),
        memory_limit=memory_limits.get(name),
        other_containers=tuple(other_containers),
    )


def _state_details(container: Obj, name: str, key: str = "state") -> Obj:
    """Return the details of the state `name` of a container, empty if it is in another state."""
    details: Obj = (container.get(key) or {}).get(name) or {}
    return details


def _deciding_container(status: Obj, main: Obj) -> tuple[Obj, bool]:
    """Return the status of the deciding container, and whether it is an init container.

    It is the main container once that has started. Any init container that still runs is then a
    sidecar. Before that, it is the first init container that has not ended well or is not ready.
    """
    state = main.get("state") or {}
    if state.get("running") is not None or state.get("terminated") is not None:
        return main, False
    for container in status.get("initContainerStatuses") or ():
        terminated = container.get("state", {}).get("terminated")
        is_delaying = (
            not container.get("ready") if terminated is None else terminated.get("exitCode")
        )
        if is_delaying:
            return container, True
    return main, False
