"""Preparation of a job for a cluster, and rendering of its JobSet.

`prepare` resolves a job, checks it, bundles its code and renders its manifests. Each aspect is a
module (code, network, nodes, security, storage) with functions of three types: `resolve` combines
the job with the cluster defaults and the platform, `find_faults` yields the faults of the result,
and `patch` returns its part of the pod template. After `resolve`, no code reads the defaults; a
value that is not set anywhere is None, which `find_faults` reports if it is required. `render` is
pure: its output does not depend on time, random numbers or the cluster.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxlaunch import contract, isolated
from jaxlaunch.contract import LEFT_GANG, OUTCOMES, Action
from jaxlaunch.launcher.errors import Fault, JobFaultsError, KeyPath
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.job.load import JobFile
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.kubernetes import objects, pod_rules
from jaxlaunch.launcher.kubernetes.labels import (
    EXCLUSIVE_TOPOLOGY,
    GENERATION_LABEL,
    JOB_LABEL,
    MAIN_CONTAINER,
    MANAGED_LABELS,
    MAX_EXEC_TIME,
    MAX_RUN_DURATION,
    PRIORITY_LABEL,
    QUEUE_LABEL,
    REPLICATED_JOB,
    SLICE_LABEL,
    SPEC_HASH,
    SWEEP_LABEL,
    UID_LABEL,
)
from jaxlaunch.launcher.kubernetes.merge import merge_patch
from jaxlaunch.launcher.manifests import code, gang, network, nodes, security, storage
from jaxlaunch.launcher.manifests.code import Bundle, JobCode
from jaxlaunch.launcher.manifests.network import JobNetwork, render_env
from jaxlaunch.launcher.manifests.nodes import JobNodes
from jaxlaunch.launcher.manifests.security import JobSecurity
from jaxlaunch.launcher.manifests.storage import JobStorage
from jaxlaunch.launcher.yaml.reader import LINE_AFTER_FILE


@dataclasses.dataclass(frozen=True)
class ResolvedJob:
    """A job combined with the cluster defaults. `spec` is the unchanged job."""

    spec: JobSpec
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    network: JobNetwork
    nodes: JobNodes
    storage: JobStorage
    security: JobSecurity
    code: JobCode
    # The version of Kubernetes' own gang scheduling, if the cluster uses it.
    gang_version: str | None
    # Keys of the job whose values come from the cluster defaults → their keys there.
    default_keys: Mapping[KeyPath, KeyPath]
    # The name of the folder of the job's file.
    folder_name: str = ""

    def find_faults(self) -> Iterator[Fault]:
        """Yield every fault that prevents the job from running on the cluster."""
        yield from code.find_faults(
            self.code, reserved_names=(MAIN_CONTAINER, *self.network.container_names)
        )
        yield from nodes.find_faults(self.nodes)
        yield from network.find_faults(self.network, self.nodes)
        yield from storage.find_faults(self.storage)


def resolve(job: JobSpec, defaults: ClusterDefaults) -> ResolvedJob:
    """Combine the job with the cluster defaults, which apply where the job sets nothing."""
    values = defaults.values
    platform = job.platform or values.platform
    job_network = network.resolve(job, values, platform)
    job_storage = storage.resolve(job, values, platform)
    keys = ("platform", "image", "queue", "service_account")
    default_keys: dict[KeyPath, KeyPath] = {
        (key,): (key,) for key in keys if not getattr(job, key) and key in values.model_fields_set
    }
    return ResolvedJob(
        spec=job,
        labels=values.labels | job.labels,
        annotations=values.annotations | job.annotations,
        network=job_network,
        nodes=nodes.resolve(job, values, platform, job_network.choice),
        storage=job_storage,
        security=security.resolve(job, values, pins_memory=job_network.pinning is not None),
        code=code.resolve_code(job, values),
        gang_version=values.gang_scheduling,
        default_keys={**default_keys, **job_network.default_keys, **job_storage.default_keys},
    )


# The command of an agent that is part of the image.
AGENT = ["python", *isolated.inline_arguments("jaxlaunch.launcher.agent")]

# Environment variables of the agent, and the fields of its pod from which they are set.
_FIELD_PATHS = {
    contract.SLICE: f"metadata.labels['{SLICE_LABEL}']",
    contract.UID: f"metadata.labels['{UID_LABEL}']",
    contract.GENERATION: f"metadata.labels['{GENERATION_LABEL}']",
    contract.POD_UID: "metadata.uid",
    contract.POD_IP: "status.podIP",
    contract.NODE: "spec.nodeName",
}

API_VERSION = "jobset.x-k8s.io/v1alpha2"

_TARGETS = {"targetReplicatedJobs": [REPLICATED_JOB]}


class PreparedJob(NamedTuple):
    """A job without faults and its manifests, the JobSet first."""

    job: ResolvedJob
    manifests: list[dict[str, Any]]

    def manifests_with_secret(self) -> list[dict[str, Any]]:
        """Return the manifests, with a new Secret of the gang if it has one. Never print them."""
        if not self.job.spec.gang_secret:
            return self.manifests
        return [*self.manifests, security.gang_secret(self.manifests[0]["metadata"])]


def prepare(file: JobFile, defaults: ClusterDefaults, namespace: str | None = None) -> PreparedJob:
    """Return the job and its manifests for a cluster with these defaults.

    `namespace` applies if the job names none. Raises JobFaultsError with all faults, and
    UserError for code that cannot be packed.
    """
    job = dataclasses.replace(resolve(file.spec, defaults), folder_name=file.folder.resolve().name)
    if faults := list(job.find_faults()):
        raise _faults_error(faults, job.default_keys, file, defaults)
    manifests = render(job, code.build_bundle(job.code, file.folder))
    if faults := list(pod_rules.find_template_faults(objects.pod_template(manifests[0]))):
        raise _faults_error(faults, job.default_keys, file, defaults)
    # Set after rendering, so that the digest of the JobSet does not depend on the context.
    if namespace is not None:
        for manifest in manifests:
            manifest["metadata"] = {**manifest["metadata"], "namespace": namespace}
    return PreparedJob(job, manifests)


# Values of `prepare_despite_faults` that neither the job nor the cluster defaults set.
_STAND_IN_IMAGE = "registry.example/none"
_STAND_IN_CHECKPOINTS = "gs://none/checkpoints"


def prepare_despite_faults(
    file: JobFile, defaults: ClusterDefaults
) -> tuple[tuple[Fault, ...], PreparedJob | None]:
    """Return the faults of a job, and the job with stand-ins for a missing image or folder.

    The job is None if it has other faults too. Raises UserError for code that cannot be packed.
    """
    try:
        return (), prepare(file, defaults)
    except JobFaultsError as error:
        faults = error.faults
    spec, paths = file.spec, {fault.path for fault in faults}
    if ("image",) in paths:
        spec = spec.model_copy(update={"image": _STAND_IN_IMAGE})
    if spec.train is not None and storage.CHECKPOINT_KEY in paths:
        folder = spec.train.checkpoint.model_copy(update={"path": _STAND_IN_CHECKPOINTS})
        train = spec.train.model_copy(update={"checkpoint": folder})
        spec = spec.model_copy(update={"train": train})
    try:
        return faults, prepare(dataclasses.replace(file, spec=spec), defaults)
    except JobFaultsError:
        return faults, None


def _faults_error(
    faults: Iterable[Fault],
    default_keys: Mapping[KeyPath, KeyPath],
    file: JobFile,
    defaults: ClusterDefaults,
) -> JobFaultsError:
    """Return an error with the line of each fault in the job file or in the cluster defaults."""
    located = []
    for fault in faults:
        prefixes = (fault.path[:end] for end in range(len(fault.path), 0, -1))
        source = next((default_keys[path] for path in prefixes if path in default_keys), None)
        if source is None:
            located.append(file.source.locate(fault))
        else:
            fault = defaults.source.locate(dataclasses.replace(fault, path=source))
            located.append(dataclasses.replace(fault, line=LINE_AFTER_FILE + fault.line))
    return JobFaultsError(located)


def render(job: ResolvedJob, bundle: Bundle | None = None) -> list[dict[str, Any]]:
    """Return the manifests: the JobSet, and the objects that it needs."""
    metadata: dict[str, Any] = {"name": job.spec.name}
    if job.spec.namespace is not None:
        metadata["namespace"] = job.spec.namespace
    metadata["labels"] = {**job.labels, **MANAGED_LABELS, JOB_LABEL: job.spec.name}
    if job.annotations:
        metadata["annotations"] = dict(job.annotations)
    return [
        _render_jobset(job, metadata, bundle),
        *network.render_policy(job.network, metadata),
        *network.claim_manifests(job.network, job.nodes, metadata),
        *gang.gang_manifests(job.spec, job.gang_version, metadata),
        *([] if bundle is None else [bundle.config_map(job.spec.namespace)]),
    ]


def _render_jobset(
    job: ResolvedJob, metadata: dict[str, Any], bundle: Bundle | None
) -> dict[str, Any]:
    annotations = metadata.get("annotations", {}) | _jobset_annotations(job)
    template = {"spec": {**_job_spec(job), "template": pod_template(job, metadata, bundle)}}
    slices = {"name": REPLICATED_JOB, "replicas": job.spec.slices, "template": template}
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", **_TARGETS},
        "failurePolicy": _failure_policy(job),
        "replicatedJobs": [slices],
    }
    if job.spec.ttl is not None:
        spec["ttlSecondsAfterFinished"] = int(job.spec.ttl)
    labels = metadata["labels"] | _jobset_labels(job)
    jobset_metadata = {**metadata, "labels": labels, "annotations": annotations}
    jobset = {"apiVersion": API_VERSION, "kind": "JobSet", "metadata": jobset_metadata}
    jobset["spec"] = spec
    # `submit` compares the digest, so that an equal JobSet is not created again.
    digest = hashlib.sha256(json.dumps(jobset, sort_keys=True).encode()).hexdigest()
    jobset["metadata"] = {**jobset_metadata, "annotations": {**annotations, SPEC_HASH: digest}}
    return jobset


def _jobset_labels(job: ResolvedJob) -> dict[str, str]:
    if job.nodes.queue is None:
        return {}
    labels = {QUEUE_LABEL: job.nodes.queue}
    if job.spec.priority is not None:
        labels[PRIORITY_LABEL] = job.spec.priority
    if job.spec.deadline is not None:
        labels[MAX_EXEC_TIME] = str(int(job.spec.deadline))
    return labels


def _jobset_annotations(job: ResolvedJob) -> dict[str, str]:
    annotations, spec = {}, job.spec
    # Slices of one host share a node pool; each slice of several hosts has its own.
    spans_hosts = spec.accelerator.platform == "tpu" and spec.hosts > 1
    is_placed = spec.placement is not None and spec.placement.required is not None
    if spans_hosts and not is_placed and job.nodes.slice_label is not None:
        annotations[EXCLUSIVE_TOPOLOGY] = job.nodes.slice_label
    if spec.capacity == "flex-start" and spec.deadline is not None and job.nodes.queue is not None:
        annotations[MAX_RUN_DURATION] = str(int(spec.deadline))
    return annotations


def exit_codes(action: Action) -> list[int]:
    """Return the exit codes to which JobSet responds with this action."""
    return sorted(code for code, outcome in OUTCOMES.items() if outcome.action is action)


def _failure_policy(job: ResolvedJob) -> dict[str, Any]:
    """Return JobSet's rules for a failed Job; the first match applies.

    The patterns match messages of Kubernetes' pod failure policy. After any other failure, all pods
    are restarted, which counts toward `restarts.crash`.
    """

    def exit_code_pattern(action: Action) -> str:
        numbers = "|".join(map(str, exit_codes(action)))
        return f"failed with exit code {numbers if '|' not in numbers else f'({numbers})'} matching"

    free = f"has condition DisruptionTarget|{exit_code_pattern(Action.RESTART_UNCHARGED)}"
    rules = [
        _failure_rule("stopped_from_outside", Action.RESTART_UNCHARGED, free),
        _failure_rule("permanent", Action.FAIL, exit_code_pattern(Action.FAIL)),
    ]
    if job.spec.deadline is not None:
        rules.append(_failure_rule("deadline", Action.FAIL))
    limit = {"maxRestarts": job.spec.restarts.crash, "restartStrategy": "BlockingRecreate"}
    return {**limit, "rules": rules}


def _failure_rule(name: str, action: Action, pattern: str | None = None) -> dict[str, Any]:
    rule = {"name": name, "action": action.value, **_TARGETS}
    if pattern is None:
        return {**rule, "onJobFailureReasons": ["DeadlineExceeded"]}
    patterns = {"onJobFailureMessagePatterns": [pattern]}
    return {**rule, "onJobFailureReasons": ["PodFailurePolicy"], **patterns}


def _job_spec(job: ResolvedJob) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.spec.pods,
        "parallelism": job.spec.pods,
        "podReplacementPolicy": "Failed",
    }
    if job.spec.replaces_hosts:
        spec |= _replacement_spec(job)
    else:
        # A failed pod ends its Job at once, and JobSet decides what follows.
        deciding_codes = sorted([*exit_codes(Action.FAIL), *exit_codes(Action.RESTART_UNCHARGED)])
        rules = [_disruption_rule("FailJob"), _exit_code_rule("FailJob", deciding_codes)]
        spec |= {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}
    if job.spec.deadline is not None:
        # This limits the time of each Job. Only Kueue limits the sum over restarts.
        spec["activeDeadlineSeconds"] = int(job.spec.deadline)
    return spec


def _replacement_spec(job: ResolvedJob) -> dict[str, Any]:
    """Return the keys of a Job that replaces each failed pod alone, while the other hosts wait.

    The pods of a TPU slice are always replaced together. Exit codes on which the gang has agreed
    still end the Job. Disruptions, and pods that the gang has stopped, do not count. The limit
    applies to each pod. Kubernetes delays a replacement by 10 s, doubled for each failure of the
    same pod.
    """
    rules = [
        _exit_code_rule("FailJob", list(contract.GANG_CODES)),
        _disruption_rule("Ignore"),
        _exit_code_rule("Ignore", [LEFT_GANG]),
    ]
    spec = job.spec
    spare_pods = spec.pods - min(spec.trainable_host_counts, default=spec.pods)
    limits: dict[str, Any] = {"backoffLimitPerIndex": spec.restarts.crash}
    limits["maxFailedIndexes"] = spare_pods
    # Host 0 ends last, so its success completes the Job even if other pods were never replaced.
    if spare_pods:
        limits["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return {**limits, "podFailurePolicy": {"rules": rules}}


def _disruption_rule(action: str) -> dict[str, Any]:
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _exit_code_rule(action: str, values: list[int]) -> dict[str, Any]:
    codes = {"containerName": MAIN_CONTAINER, "operator": "In", "values": values}
    return {"action": action, "onExitCodes": codes}


def pod_template(
    job: ResolvedJob, metadata: Mapping[str, Any], bundle: Bundle | None
) -> dict[str, Any]:
    """Return the template of every pod, with the labels and annotations of `metadata`."""
    mounts = storage.volume_mounts(job.storage)
    main = {
        "name": MAIN_CONTAINER,
        "image": job.code.image,
        "command": list(AGENT),
        "env": _pod_environment(job),
        "ports": network.container_ports(job.network),
        **nodes.container_resources(job.nodes),
        "securityContext": security.container_security_context(job.security),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(job.spec.grace),
        "enableServiceLinks": False,
        **security.pod_spec(job.security),
        "containers": [main],
    }
    defaults: dict[str, Any] = {
        "name": "",
        "image": job.code.image,
        "securityContext": security.RESTRICTED,
        "volumeMounts": mounts,
    }
    init = [{**defaults, **container} for container in job.spec.init]
    keys = [key for key in ("labels", "annotations") if key in metadata]
    template = {"metadata": {key: dict(metadata[key]) for key in keys}, "spec": spec}
    for patch in (
        storage.patch(job.storage, owner=job.security.user),
        nodes.patch(job.nodes),
        network.patch(job.network, job.nodes),
        network.claims_patch(job.network, job.nodes),
        gang.gang_patch(job.spec, job.gang_version),
        {} if bundle is None else bundle.patch(),
        security.patch(job.security),
        {"spec": {"initContainers": init}} if init else {},
        job.spec.pod,
    ):
        template = merge_patch(template, patch)
    return template


def _pod_environment(job: ResolvedJob) -> list[dict[str, Any]]:
    """Return the variables of the agent. The Job controller adds JOB_COMPLETION_INDEX."""
    spec, run_folder = job.spec, job.storage.run_folder
    agent_job = spec.agent_job(
        command=spec.command,
        platform=spec.accelerator.platform,
        workdir=job.code.workdir,
        metrics_port=job.network.ports.metrics,
        search_paths=job.nodes.search_paths,
        pinning=job.network.pinning,
        scratch=storage.disk_folders(job.storage),
    )
    values = {
        contract.LEADER: f"{spec.name}-{REPLICATED_JOB}-0-0.{spec.name}:{job.network.ports.leader}",
        contract.HOSTS: str(spec.pods),
        contract.SLICES: str(spec.slices),
        contract.JOB: agent_job.to_json(),
    }
    if spec.train is not None:
        train = storage.with_resolved_folders(job.storage, spec.train)
        values[contract.TRAIN_SPEC] = train.model_dump_json(exclude_unset=True)
    values |= spec.tracking_variables(job.folder_name, job.labels.get(SWEEP_LABEL))
    if run_folder is not None:
        values[contract.RUN_URL if "://" in run_folder else contract.RUN_DIR] = run_folder
    fields = {name: {"fieldRef": {"fieldPath": path}} for name, path in _FIELD_PATHS.items()}
    secrets = {
        name: {"secretKeyRef": {"name": secret.name, "key": secret.key}}
        for name, secret in spec.secrets.items()
    }
    # A job may override these. A numeric user has no home and no name, and the root filesystem is
    # read-only.
    defaults = {"HOME": storage.SCRATCH, "USER": "jaxlaunch"}
    # Without JAX_PLATFORMS, JAX silently falls back to the CPU. Only the image knows the name of a
    # plugin's platform.
    if spec.accelerator.platform not in ("cpu", "plugin"):
        defaults["JAX_PLATFORMS"] = f"{spec.accelerator.platform},cpu"
    defaults |= job.network.environment
    plain = {name: value for name, value in defaults.items() if name not in spec.secrets} | spec.env

    def references(sources: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{"name": name, "valueFrom": source} for name, source in sources.items()]

    return [*render_env(values), *references(fields), *render_env(plain), *references(secrets)]
