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
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from jaxlaunch import contract, isolated
from jaxlaunch.launcher.errors import Fault, JobFaultsError, KeyPath
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.job.load import JobFile
from jaxlaunch.launcher.job.schema import JobSpec, Role
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
from jaxlaunch.launcher.manifests.failures import failure_policy, job_spec
from jaxlaunch.launcher.manifests.network import JobNetwork, render_env
from jaxlaunch.launcher.manifests.nodes import JobNodes
from jaxlaunch.launcher.manifests.security import JobSecurity
from jaxlaunch.launcher.manifests.storage import JobStorage
from jaxlaunch.launcher.yaml.reader import LINE_AFTER_FILE


@dataclasses.dataclass(frozen=True)
class ReplicatedJob:
    """The replicated job of a gang in its JobSet, the only one unless the job has roles.

    Attributes:
        jobset: Name of the JobSet.
        name: Name of the replicated job, which is that of the role.
        role: The role, or None if the job has none.
        variables: Environment variables by which the roles know each other.
        crash_limit: The restarts of the JobSet, or None for `restarts.crash` of the only gang.
    """

    jobset: str
    name: str = REPLICATED_JOB
    role: Role | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    crash_limit: int | None = None

    def host_names(self, spec: JobSpec) -> list[str]:
        """Return the DNS names of the pods, in the order of the hosts."""
        indexes = itertools.product(range(spec.slices), range(spec.pods))
        return [f"{self.jobset}-{self.name}-{job}-{pod}.{self.jobset}" for job, pod in indexes]


@dataclasses.dataclass(frozen=True)
class ResolvedJob:
    """A job, or a role of one, combined with the cluster defaults. `spec` is unchanged."""

    spec: JobSpec
    replicated_job: ReplicatedJob
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

    @property
    def replaces_hosts(self) -> bool:
        """Return whether the Job replaces a lost pod, and does not end.

        In a job with roles, the end of a Job would restart all roles or end them.
        """
        role, spec = self.replicated_job.role, self.spec
        if role is None or spec.accelerator.platform == "tpu":
            return spec.replaces_hosts
        return role.may_fail or (spec.restarts.crash > 0 and spec.restarts.in_place > 0)

    def find_faults(self) -> Iterator[Fault]:
        """Yield every fault that prevents the job from running on the cluster."""
        yield from code.find_faults(
            self.code, reserved_names=(MAIN_CONTAINER, *self.network.container_names)
        )
        yield from nodes.find_faults(self.nodes)
        yield from network.find_faults(self.network, self.nodes)
        yield from storage.find_faults(self.storage)


def resolve(
    job: JobSpec, defaults: ClusterDefaults, replicated_job: ReplicatedJob | None = None
) -> ResolvedJob:
    """Combine the job with the cluster defaults, which apply where the job sets nothing."""
    values, replicated_job = defaults.values, replicated_job or ReplicatedJob(job.name)
    platform = job.platform or values.platform
    job_network = network.resolve(job, values, platform)
    job_storage = storage.resolve(job, values, platform)
    keys = ("platform", "image", "queue", "service_account")
    default_keys: dict[KeyPath, KeyPath] = {
        (key,): (key,) for key in keys if not getattr(job, key) and key in values.model_fields_set
    }
    return ResolvedJob(
        spec=job,
        replicated_job=replicated_job,
        labels=values.labels | job.labels,
        annotations=values.annotations | job.annotations,
        network=job_network,
        nodes=nodes.resolve(job, values, platform, job_network.choice),
        storage=job_storage,
        security=security.resolve(
            job,
            values,
            owner=replicated_job.jobset,
            pins_memory=job_network.pinning is not None,
        ),
        code=code.resolve_code(job, values),
        # Roles that need another one start later than the others.
        gang_version=values.gang_scheduling if replicated_job.role is None else None,
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
    parts = resolve_parts(file, defaults)
    located = list[Fault]()
    for part, job in parts:
        located += _locate_faults(job.find_faults(), job, part, defaults)
    if not located:
        files = file.code_files
        bundles = [code.build_bundle(job.code, file.folder, files) for _, job in parts]
        manifests = _render_parts([job for _, job in parts], bundles)
        for (part, job), template in zip(parts, objects.pod_templates(manifests[0]), strict=True):
            faults = pod_rules.find_template_faults(template)
            located += _locate_faults(faults, job, part, defaults)
    if located:
        raise JobFaultsError(list(dict.fromkeys(located)))
    # Set after rendering, so that the digest of the JobSet does not depend on the context.
    if namespace is not None:
        for manifest in manifests:
            manifest["metadata"] = {**manifest["metadata"], "namespace": namespace}
    lead = next(job for part, job in parts if part.spec is file.spec)
    return PreparedJob(lead, manifests)


def resolve_parts(file: JobFile, defaults: ClusterDefaults) -> list[tuple[JobFile, ResolvedJob]]:
    """Return the job, or each of its roles in the order in which they start, with its file."""
    folder_name = file.folder.resolve().name
    parts = [
        (part, ReplicatedJob(file.name) if role is None else ReplicatedJob(file.name, *role))
        for part, role in file.list_parts()
    ]
    jobs = [
        dataclasses.replace(resolve(part.spec, defaults, place), folder_name=folder_name)
        for part, place in parts
    ]
    if file.roles:
        variables, crash_limit = _role_variables(jobs), _crash_limit(jobs)
        jobs = [_connect_role(job, variables, crash_limit) for job in jobs]
    return list(zip((part for part, _ in parts), jobs, strict=True))


def _connect_role(job: ResolvedJob, variables: dict[str, str], crash_limit: int) -> ResolvedJob:
    own_role = {contract.ROLE: job.replicated_job.name}
    replicated_job = dataclasses.replace(
        job.replicated_job, variables=own_role | variables, crash_limit=crash_limit
    )
    return dataclasses.replace(job, replicated_job=replicated_job)


def _crash_limit(jobs: Iterable[ResolvedJob]) -> int:
    """Return maxRestarts of the JobSet: the largest of its roles, which restart together."""
    places = ((job.replicated_job.role, job.spec) for job in jobs)
    # A role that may fail never fails its Job.
    return max(spec.restarts.crash for role, spec in places if role is None or not role.may_fail)


def _role_variables(jobs: Iterable[ResolvedJob]) -> dict[str, str]:
    """Return the variables with the addresses and the run folder of each role."""
    variables = {}
    for job in jobs:
        role, folder = job.replicated_job.name, job.storage.run_folder
        addresses = job.replicated_job.host_names(job.spec)
        variables[contract.role_addresses_variable(role)] = ",".join(addresses)
        if folder is not None:
            variables[contract.role_folder_variable(role)] = folder
    return variables


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


def _locate_faults(
    faults: Iterable[Fault], job: ResolvedJob, file: JobFile, defaults: ClusterDefaults
) -> Iterator[Fault]:
    """Yield each fault with its line in the job file or in the cluster defaults."""
    for fault in faults:
        prefixes = (fault.path[:end] for end in range(len(fault.path), 0, -1))
        keys = job.default_keys
        source = next((keys[path] for path in prefixes if path in keys), None)
        if source is None:
            if job.replicated_job.role is not None:
                message = f"jobs.{job.replicated_job.name}: {fault.message}"
                fault = dataclasses.replace(fault, message=message)
            yield file.source.locate(fault)
        else:
            fault = defaults.source.locate(dataclasses.replace(fault, path=source))
            yield dataclasses.replace(fault, line=LINE_AFTER_FILE + fault.line)


def render(job: ResolvedJob, bundle: Bundle | None = None) -> list[dict[str, Any]]:
    """Return the manifests of a job without roles: the JobSet, and the objects that it needs."""
    return _render_parts([job], [bundle])


def _render_parts(
    jobs: Sequence[ResolvedJob], bundles: Sequence[Bundle | None]
) -> list[dict[str, Any]]:
    # Keys of the whole job are the same in each role.
    first = jobs[0]
    metadata: dict[str, Any] = {"name": first.replicated_job.jobset}
    if first.spec.namespace is not None:
        metadata["namespace"] = first.spec.namespace
    job_label = {JOB_LABEL: first.replicated_job.jobset}
    metadata["labels"] = {**first.labels, **MANAGED_LABELS, **job_label}
    if first.annotations:
        metadata["annotations"] = dict(first.annotations)
    bundle_by_name = {bundle.name: bundle for bundle in bundles if bundle is not None}
    manifests = [_render_jobset(jobs, metadata, bundles)]
    # One policy admits the pods of all roles. Those on the host's network have none.
    policies = (network.render_policy(job.network, metadata) for job in jobs)
    manifests += next(filter(None, policies), [])
    for job in jobs:
        manifests += network.claim_manifests(job.network, job.nodes, metadata)
        manifests += gang.gang_manifests(job.spec, job.gang_version, metadata)
    config_maps = [item.config_map(first.spec.namespace) for item in bundle_by_name.values()]
    return manifests + config_maps


def _render_jobset(
    jobs: Sequence[ResolvedJob], metadata: dict[str, Any], bundles: Sequence[Bundle | None]
) -> dict[str, Any]:
    annotations = metadata.get("annotations", {})
    replicated_jobs = []
    for job, bundle in zip(jobs, bundles, strict=True):
        place, role = job.replicated_job, job.replicated_job.role
        may_fail = role is not None and role.may_fail
        policies = job_spec(job.spec, replaces_hosts=job.replaces_hosts, may_fail=may_fail)
        pods = pod_template(job, metadata, bundle)
        template: dict[str, Any] = {"spec": {**policies, "template": pods}}
        if role is None:
            annotations = annotations | _placement_annotations(job)
        elif placement := _placement_annotations(job):
            # On the JobSet, it would apply to all roles.
            template["metadata"] = {"annotations": placement}
        annotations = annotations | _jobset_annotations(job)
        part = {"name": place.name, "replicas": job.spec.slices, "template": template}
        if role is not None and role.needs:
            part["dependsOn"] = [{"name": name, "status": "Ready"} for name in role.needs]
        replicated_jobs.append(part)
    first, places = jobs[0], [job.replicated_job for job in jobs]
    ending_names = [place.name for place in places if place.role is None or place.role.ends]
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ending_names},
        "failurePolicy": failure_policy(
            [place.name for place in places],
            _crash_limit(jobs),
            has_deadline=first.spec.deadline is not None,
        ),
        "replicatedJobs": replicated_jobs,
    }
    if first.spec.ttl is not None:
        spec["ttlSecondsAfterFinished"] = int(first.spec.ttl)
    labels = metadata["labels"] | _jobset_labels(first)
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


def _placement_annotations(job: ResolvedJob) -> dict[str, str]:
    spec = job.spec
    # Slices of one host share a node pool; each slice of several hosts has its own.
    spans_hosts = spec.accelerator.platform == "tpu" and spec.hosts > 1
    is_placed = spec.placement is not None and spec.placement.required is not None
    if spans_hosts and not is_placed and job.nodes.slice_label is not None:
        return {EXCLUSIVE_TOPOLOGY: job.nodes.slice_label}
    return {}


def _jobset_annotations(job: ResolvedJob) -> dict[str, str]:
    spec = job.spec
    if spec.capacity == "flex-start" and spec.deadline is not None and job.nodes.queue is not None:
        return {MAX_RUN_DURATION: str(int(spec.deadline))}
    return {}


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
    spec, run_folder, place = job.spec, job.storage.run_folder, job.replicated_job
    agent_job = spec.agent_job(
        command=spec.command,
        platform=spec.accelerator.platform,
        workdir=job.code.workdir,
        metrics_port=job.network.ports.metrics,
        search_paths=job.nodes.search_paths,
        pinning=job.network.pinning,
        scratch=storage.disk_folders(job.storage),
    )
    if place.role is not None:
        agent_job = dataclasses.replace(
            agent_job,
            replaces=job.replaces_hosts,
            is_role=True,
            may_fail=place.role.may_fail,
            # The agents must know whether the JobSet will restart their pods.
            crash_limit=agent_job.crash_limit if place.crash_limit is None else place.crash_limit,
        )
    values = {
        contract.LEADER: f"{place.host_names(spec)[0]}:{job.network.ports.leader}",
        contract.HOSTS: str(spec.pods),
        contract.SLICES: str(spec.slices),
        contract.JOB: agent_job.to_json(),
        **place.variables,
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
