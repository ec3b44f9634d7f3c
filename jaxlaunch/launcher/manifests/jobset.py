"""From a job file to the manifests of its JobSet.

`prepare` resolves a job, checks it, bundles its code and renders its manifests. Each aspect is a module (code, network,
nodes, security, storage) with three functions: `resolve` combines the job with the cluster defaults and the platform, a
second one yields the faults of the result, and `patch` returns its part of the pod template. After `resolve`, no code
looks at the defaults; a value that nobody has set is None, which the checks report. `render` is pure: its output does
not depend on time, random numbers or the cluster. A lost pod is replaced alone if the other hosts wait for it, which
those of a TPU slice do not.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxlaunch import contract, isolated
from jaxlaunch.contract import LEFT, OUTCOMES, Action
from jaxlaunch.launcher.errors import Fault, JobFaults, KeyPath
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.job.load import JobFile
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.kubernetes import objects, pod_rules
from jaxlaunch.launcher.kubernetes.labels import (
    EXCLUSIVE,
    GENERATION_LABEL,
    LONGEST,
    MAIN_CONTAINER,
    MANAGED,
    OWN_LABEL,
    PRIORITY,
    PROVISIONING,
    QUEUE,
    REPLICATED_JOB,
    SLICE_LABEL,
    SPEC_HASH,
    UID_LABEL,
)
from jaxlaunch.launcher.kubernetes.merge import merge
from jaxlaunch.launcher.manifests import code, network, nodes, security, storage
from jaxlaunch.launcher.manifests.code import Bundle, JobCode
from jaxlaunch.launcher.manifests.network import JobNetwork, variables
from jaxlaunch.launcher.manifests.nodes import JobNodes
from jaxlaunch.launcher.manifests.security import JobSecurity
from jaxlaunch.launcher.manifests.storage import JobStorage
from jaxlaunch.launcher.yaml.reader import AFTER_THE_FILE


@dataclasses.dataclass(frozen=True)
class ResolvedJob:
    """A job with everything that its pods need. `spec` is unchanged; resolved values are in the other fields."""

    spec: JobSpec
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    network: JobNetwork
    nodes: JobNodes
    storage: JobStorage
    security: JobSecurity
    code: JobCode
    # Key of the job → key of the cluster defaults that its value comes from.
    filled: Mapping[KeyPath, KeyPath]

    def faults(self) -> Iterator[Fault]:
        """Yield every fault that prevents the job from running on the cluster."""
        yield from code.faults(self.code, taken=(MAIN_CONTAINER, *self.network.containers))
        yield from nodes.faults(self.nodes)
        yield from network.faults(self.network, self.nodes)
        yield from storage.faults(self.storage)


def resolve(job: JobSpec, defaults: ClusterDefaults) -> ResolvedJob:
    """Combine the job with the cluster defaults, which apply where the job sets nothing."""
    given = defaults.values
    where = job.platform or given.platform
    connected = network.resolve(job, given, where)
    stored = storage.resolve(job, given, where)
    keys = ("platform", "image", "queue", "service_account")
    filled: dict[KeyPath, KeyPath] = {
        (key,): (key,) for key in keys if not getattr(job, key) and key in given.model_fields_set
    }
    return ResolvedJob(
        spec=job,
        labels=given.labels | job.labels,
        annotations=given.annotations | job.annotations,
        network=connected,
        nodes=nodes.resolve(job, given, where, connected.chosen),
        storage=stored,
        security=security.resolve(job, given, pins_memory=connected.pinning is not None),
        code=code.resolve(job, given),
        filled={**filled, **connected.filled, **stored.filled},
    )


AGENT = ["python", *isolated.inline("jaxlaunch.launcher.agent")]

# Environment variables of the agent with fields of its pod.
_FIELDS = {
    contract.SLICE: f"metadata.labels['{SLICE_LABEL}']",
    contract.UID: f"metadata.labels['{UID_LABEL}']",
    contract.GENERATION: f"metadata.labels['{GENERATION_LABEL}']",
    contract.POD_UID: "metadata.uid",
    contract.POD_IP: "status.podIP",
    contract.NODE: "spec.nodeName",
}


API_VERSION = "jobset.x-k8s.io/v1alpha2"

_TARGETS = {"targetReplicatedJobs": [REPLICATED_JOB]}


class Prepared(NamedTuple):
    """A job without faults and its manifests, the JobSet first."""

    job: ResolvedJob
    manifests: list[dict[str, Any]]

    def with_secret(self) -> list[dict[str, Any]]:
        """Return the manifests with a new Secret of the gang, which must never be printed."""
        if not self.job.spec.gang_secret:
            return self.manifests
        return [*self.manifests, security.gang_secret(self.manifests[0]["metadata"])]


def prepare(file: JobFile, defaults: ClusterDefaults, namespace: str | None = None) -> Prepared:
    """Return the job and its manifests for a cluster with these defaults.

    `namespace` applies if the job names none. Raises JobFaults with all faults, and UserError for code that cannot be
    packed.
    """
    job = resolve(file.spec, defaults)
    if found := list(job.faults()):
        raise _located(found, job.filled, file, defaults)
    manifests = render(job, code.bundle(job.code, file.folder))
    if found := list(pod_rules.find_template_faults(objects.pod_template(manifests[0]))):
        raise _located(found, job.filled, file, defaults)
    # The namespace is set after rendering, so that the hash does not depend on where it was named.
    if namespace is not None:
        for manifest in manifests:
            manifest["metadata"] = {**manifest["metadata"], "namespace": namespace}
    return Prepared(job, manifests)


def _located(
    faults: Iterable[Fault], filled: Mapping[KeyPath, KeyPath], file: JobFile, defaults: ClusterDefaults
) -> JobFaults:
    """Add to each fault its line in the job file, or in the cluster defaults that the value comes from."""
    located = []
    for fault in faults:
        prefixes = (fault.path[:end] for end in range(len(fault.path), 0, -1))
        source = next((filled[path] for path in prefixes if path in filled), None)
        if source is None:
            located.append(file.source.locate(fault))
        else:
            fault = defaults.source.locate(dataclasses.replace(fault, path=source))
            located.append(dataclasses.replace(fault, line=AFTER_THE_FILE + fault.line))
    return JobFaults(located)


def render(job: ResolvedJob, brought: Bundle | None = None) -> list[dict[str, Any]]:
    """Return the manifests of a job without faults: JobSet, NetworkPolicy, claim templates and ConfigMap."""
    metadata: dict[str, Any] = {"name": job.spec.name}
    if job.spec.namespace is not None:
        metadata["namespace"] = job.spec.namespace
    metadata["labels"] = {**job.labels, **MANAGED, OWN_LABEL: job.spec.name}
    if job.annotations:
        metadata["annotations"] = dict(job.annotations)
    allocated = network.claim_manifests(job.network, job.nodes, metadata)
    manifests = [_jobset(job, metadata, brought), *network.policy(job.network, metadata), *allocated]
    return manifests if brought is None else [*manifests, brought.config_map(job.spec.namespace)]


def _jobset(job: ResolvedJob, metadata: dict[str, Any], brought: Bundle | None) -> dict[str, Any]:
    labels = metadata["labels"] | _jobset_labels(job)
    annotations = metadata.get("annotations", {}) | _jobset_annotations(job)
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", **_TARGETS},
        "failurePolicy": _failure_policy(job),
    }
    of_slice = {**_job(job), "template": pod_template(job, metadata, brought)}
    slices = {"name": REPLICATED_JOB, "replicas": job.spec.slices, "template": {"spec": of_slice}}
    spec["replicatedJobs"] = [slices]
    if job.spec.ttl is not None:
        spec["ttlSecondsAfterFinished"] = int(job.spec.ttl)
    own = {**metadata, "labels": labels, "annotations": annotations}
    jobset = {"apiVersion": API_VERSION, "kind": "JobSet", "metadata": own, "spec": spec}
    # The digest identifies the JobSet, so that an equal one is not created again.
    digest = hashlib.sha256(json.dumps(jobset, sort_keys=True).encode()).hexdigest()
    return jobset | {"metadata": own | {"annotations": {**annotations, SPEC_HASH: digest}}}


def _jobset_labels(job: ResolvedJob) -> dict[str, str]:
    if job.nodes.queue is None:
        return {}
    deadline = None if job.spec.deadline is None else str(int(job.spec.deadline))
    labels = {QUEUE: job.nodes.queue, PRIORITY: job.spec.priority, LONGEST: deadline}
    return {name: value for name, value in labels.items() if value is not None}


def _jobset_annotations(job: ResolvedJob) -> dict[str, str]:
    found, spec = {}, job.spec
    # A slice of one host shares its node pool; a slice of several hosts needs its own.
    spans_hosts = spec.accelerator.platform == "tpu" and spec.hosts > 1
    is_placed = spec.placement is not None and spec.placement.required is not None
    if spans_hosts and not is_placed and job.nodes.slice_label is not None:
        found[EXCLUSIVE] = job.nodes.slice_label
    if spec.capacity == "flex-start" and spec.deadline is not None and job.nodes.queue is not None:
        found[PROVISIONING] = str(int(spec.deadline))
    return found


def codes(action: Action) -> list[int]:
    """Return the exit codes to which JobSet responds with this action."""
    return sorted(code for code, outcome in OUTCOMES.items() if outcome.action is action)


def _failure_policy(job: ResolvedJob) -> dict[str, Any]:
    """Return the rules for a failed Job, of which the first that matches applies.

    They match the messages of Kubernetes' pod failure policy. Other failures restart the gang and count.
    """
    free = f"has condition DisruptionTarget|{_exit_codes(Action.RESTART_UNCHARGED)}"
    rules = [
        _rule("stopped_from_outside", Action.RESTART_UNCHARGED, "PodFailurePolicy", free),
        _rule("permanent", Action.FAIL, "PodFailurePolicy", _exit_codes(Action.FAIL)),
    ]
    if job.spec.deadline is not None:
        rules.append(_rule("deadline", Action.FAIL, "DeadlineExceeded"))
    return {"maxRestarts": job.spec.restarts.crash, "restartStrategy": "BlockingRecreate", "rules": rules}


def _rule(name: str, action: Action, reason: str, pattern: str | None = None) -> dict[str, Any]:
    rule = {"name": name, "action": action.value, **_TARGETS, "onJobFailureReasons": [reason]}
    return rule if pattern is None else rule | {"onJobFailureMessagePatterns": [pattern]}


def _exit_codes(action: Action) -> str:
    numbers = "|".join(map(str, codes(action)))
    return f"failed with exit code {numbers if '|' not in numbers else f'({numbers})'} matching"


def _job(job: ResolvedJob) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.spec.pods,
        "parallelism": job.spec.pods,
        "podReplacementPolicy": "Failed",
    }
    if job.spec.replaces_hosts:
        spec |= _replaced_alone(job)
    else:
        # A failed pod ends its Job at once, and JobSet decides what follows.
        decided = sorted([*codes(Action.FAIL), *codes(Action.RESTART_UNCHARGED)])
        rules = [_disrupted("FailJob"), _exited("FailJob", decided)]
        spec |= {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}
    if job.spec.deadline is not None:
        # This limits each generation of the Job; only Kueue limits the sum.
        spec["activeDeadlineSeconds"] = int(job.spec.deadline)
    return spec


def _replaced_alone(job: ResolvedJob) -> dict[str, Any]:
    """Return the keys of a Job that replaces each failed pod alone, while the other hosts wait.

    Exit codes on which the gang has agreed still end the Job. Disruptions, and pods that were told to leave, do not
    count. The limit applies per pod. Kubernetes delays a replacement by 10 s, doubled for each failure of the same pod.
    """
    decided = sorted(code for code in OUTCOMES if contract.DONE < code < contract.OF_THE_KERNEL)
    rules = [_exited("FailJob", decided), _disrupted("Ignore"), _exited("Ignore", [LEFT])]
    spec = job.spec
    dispensable = spec.pods - min(spec.sizes, default=spec.pods)
    limits: dict[str, Any] = {"backoffLimitPerIndex": spec.restarts.crash, "maxFailedIndexes": dispensable}
    # Host 0 is the last to leave, so the Job is complete then even if other pods never came back.
    if dispensable:
        limits["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return {**limits, "podFailurePolicy": {"rules": rules}}


def _disrupted(action: str) -> dict[str, Any]:
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _exited(action: str, values: list[int]) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": MAIN_CONTAINER, "operator": "In", "values": values}}


def pod_template(job: ResolvedJob, metadata: Mapping[str, Any], brought: Bundle | None) -> dict[str, Any]:
    """Return the template of every pod of the job, with the labels and annotations of `metadata`."""
    mounts = storage.mounts(job.storage)
    main = {
        "name": MAIN_CONTAINER,
        "image": job.code.image,
        "command": list(AGENT),
        "env": _pod_environment(job),
        "ports": network.container_ports(job.network),
        **nodes.resources(job.nodes),
        "securityContext": security.container(job.security),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(job.spec.grace),
        "enableServiceLinks": False,
        **security.pod(job.security),
        "containers": [main],
    }
    # Defaults for init containers: the job's image and volumes, and the restricted security context.
    usual = {"image": job.code.image, "securityContext": security.RESTRICTED, "volumeMounts": mounts}
    init = [{"name": container["name"], **usual} | container for container in job.spec.init]
    own = {"metadata": {key: dict(metadata[key]) for key in ("labels", "annotations") if key in metadata}, "spec": spec}
    for part in (
        storage.patch(job.storage, owner=job.security.user),
        nodes.patch(job.nodes),
        network.patch(job.network, job.nodes),
        network.claims_patch(job.network, job.nodes),
        {} if brought is None else brought.patch(),
        security.patch(job.security),
        {"spec": {"initContainers": init}} if init else {},
        job.spec.pod,
    ):
        own = merge(own, part)
    return own


def _pod_environment(job: ResolvedJob) -> list[dict[str, Any]]:
    """Return the variables of the agent. The Job controller adds JOB_COMPLETION_INDEX."""
    spec, run_folder = job.spec, job.storage.run_folder
    for_agents = spec.agent_job(
        command=spec.command,
        platform=spec.accelerator.platform,
        workdir=job.code.workdir,
        metrics_port=job.network.ports.metrics,
        search_paths=job.nodes.search_paths,
        pinning=job.network.pinning,
        scratch=storage.on_disk(job.storage),
    )
    values = {
        contract.LEADER: f"{spec.name}-{REPLICATED_JOB}-0-0.{spec.name}:{job.network.ports.leader}",
        contract.HOSTS: str(spec.pods),
        contract.SLICES: str(spec.slices),
        contract.JOB: for_agents.to_json(),
    }
    if spec.train is not None:
        values[contract.TRAIN_SPEC] = storage.trained(job.storage, spec.train).model_dump_json(exclude_unset=True)
    values |= spec.tracking
    if run_folder is not None:
        values[contract.RUN_URL if "://" in run_folder else contract.RUN_DIR] = run_folder
    fields = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in _FIELDS.items()]
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.name, "key": secret.key}}}
        for name, secret in spec.secrets.items()
    ]
    # Defaults that a job may override. A numeric user has no home and no name, and the root filesystem is read-only.
    defaults = {"HOME": storage.SCRATCH, "USER": "jaxlaunch"}
    # Without JAX_PLATFORMS, JAX silently falls back to the CPU.
    if spec.accelerator.platform != "cpu":
        defaults["JAX_PLATFORMS"] = f"{spec.accelerator.platform},cpu"
    defaults |= job.network.environment
    plain = {name: value for name, value in defaults.items() if name not in spec.secrets} | spec.env
    return [*variables(values), *fields, *variables(plain), *secrets]
