"""prepare(file, defaults) → manifests: the one way from a job file to what is written to a cluster.

A job is resolved, judged, bundled and rendered. Each subject is a file: what it takes of the job and of the cluster
(resolve), what may be wrong with that (faults), what it adds to the pods (patch). resolve(job, defaults) → ResolvedJob
settles every value that the cluster defaults or the platform fill in; whoever checks, renders or estimates a job
afterwards takes the resolved job and looks at no defaults. A value that no one has given stays None, for the faults.

render(job, bundle) → manifests is pure: no clock, no random, no cluster; and no judgement. A pod that is lost is made
again alone where its peers wait for it; the hosts of a TPU slice do not.
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
    """A job with all that its pods need. `spec` is as the file has it: what a subject has settled is read there."""

    spec: JobSpec
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    network: JobNetwork
    nodes: JobNodes
    storage: JobStorage
    security: JobSecurity
    code: JobCode
    filled: Mapping[KeyPath, KeyPath]  # key of the job → key of the cluster defaults that its value comes from

    def faults(self) -> Iterator[Fault]:
        """Everything that keeps the job from running there, with what to do about it."""
        yield from code.faults(self.code, taken=(MAIN_CONTAINER, *self.network.containers))
        yield from nodes.faults(self.nodes)
        yield from network.faults(self.network, self.nodes)
        yield from storage.faults(self.storage)


def resolve(job: JobSpec, defaults: ClusterDefaults) -> ResolvedJob:
    """The job as this cluster would run it. What the job gives counts before the defaults, and these before ours."""
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

# What the agent learns from its own pod: variable -> field.
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
    """A job that this cluster can run, and its manifests: the JobSet first."""

    job: ResolvedJob
    manifests: list[dict[str, Any]]

    def with_secret(self) -> list[dict[str, Any]]:
        """The manifests with the Secret of the job's gang, new each time: to be sent, and never printed."""
        if not self.job.spec.gang_secret:
            return self.manifests
        return [*self.manifests, security.gang_secret(self.manifests[0]["metadata"])]


def prepare(file: JobFile, defaults: ClusterDefaults, namespace: str | None = None) -> Prepared:
    """The manifests of a job file on a cluster with these defaults, in `namespace` where the job names none.

    Raises JobFaults with everything that keeps the job from running there, and UserError for code that cannot be
    packed.
    """
    job = resolve(file.spec, defaults)
    if found := list(job.faults()):
        raise _located(found, job.filled, file, defaults)
    manifests = render(job, code.bundle(job.code, file.folder))
    if found := list(pod_rules.find_template_faults(objects.pod_template(manifests[0]))):
        raise _located(found, job.filled, file, defaults)
    if namespace is not None:  # after rendering: the same job has one hash, whoever names its namespace
        for manifest in manifests:
            manifest["metadata"] = {**manifest["metadata"], "namespace": namespace}
    return Prepared(job, manifests)


def _located(
    faults: Iterable[Fault], filled: Mapping[KeyPath, KeyPath], file: JobFile, defaults: ClusterDefaults
) -> JobFaults:
    """The faults, each at its line: in the job file, or in the cluster defaults that its value comes from."""
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
    """The manifests of a job without faults: its JobSet, its NetworkPolicy, what its claims are made from, and the
    ConfigMap of what it brings."""
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
    # The digest tells whether a JobSet of this name is this very one.
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
    # A slice of one host shares its node pool with others; only one that spans hosts must have a pool to itself.
    spans_hosts = spec.accelerator.platform == "tpu" and spec.hosts > 1
    is_placed = spec.placement is not None and spec.placement.required is not None
    if spans_hosts and not is_placed and job.nodes.slice_label is not None:
        found[EXCLUSIVE] = job.nodes.slice_label
    if spec.capacity == "flex-start" and spec.deadline is not None and job.nodes.queue is not None:
        found[PROVISIONING] = str(int(spec.deadline))
    return found


def codes(action: Action) -> list[int]:
    """The exit codes that JobSet answers with this action."""
    return sorted(code for code, outcome in OUTCOMES.items() if outcome.action is action)


def _failure_policy(job: ResolvedJob) -> dict[str, Any]:
    """What becomes of the gang, by the message of its Job's failure; the first rule that matches counts.

    The messages are those of Kubernetes' pod failure policy. What no rule matches is restarted, and counted.
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
    else:  # a pod that fails ends its Job at once: JobSet alone decides what follows
        decided = sorted([*codes(Action.FAIL), *codes(Action.RESTART_UNCHARGED)])
        rules = [_disrupted("FailJob"), _exited("FailJob", decided)]
        spec |= {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}
    if job.spec.deadline is not None:
        spec["activeDeadlineSeconds"] = int(job.spec.deadline)  # of each generation; Kueue alone knows the sum
    return spec


def _replaced_alone(job: ResolvedJob) -> dict[str, Any]:
    """A pod that fails is made again, while its peers wait. What a gang decides, which leaves together with a code of
    the table, still ends the Job; a disruption and a pod that was told to leave are not charged.

    The limit is that of each pod: Kubernetes delays what it makes again by 10 s, and doubles that for every failure of
    the same one, not of all.
    """
    decided = sorted(code for code in OUTCOMES if contract.DONE < code < contract.OF_THE_KERNEL)
    rules = [_exited("FailJob", decided), _disrupted("Ignore"), _exited("Ignore", [LEFT])]
    spec = job.spec
    dispensable = spec.pods - min(spec.sizes, default=spec.pods)
    limits: dict[str, Any] = {"backoffLimitPerIndex": spec.restarts.crash, "maxFailedIndexes": dispensable}
    if dispensable:  # host 0 is the last to leave; a pod that never came back has nothing left to do
        limits["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    return {**limits, "podFailurePolicy": {"rules": rules}}


def _disrupted(action: str) -> dict[str, Any]:
    return {"action": action, "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


def _exited(action: str, values: list[int]) -> dict[str, Any]:
    return {"action": action, "onExitCodes": {"containerName": MAIN_CONTAINER, "operator": "In", "values": values}}


def pod_template(job: ResolvedJob, metadata: Mapping[str, Any], brought: Bundle | None) -> dict[str, Any]:
    """The template of every pod of the job, with the labels and annotations of `metadata`."""
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
    # An init container as the job writes it, with the job's image, volumes and security where it gives no others.
    usual = {"image": job.code.image, "securityContext": security.RESTRICTED, "volumeMounts": mounts}
    init = [{"name": given["name"], **usual} | given for given in job.spec.init]
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
    """The variables of the agent, beside JOB_COMPLETION_INDEX, which the Job controller sets."""
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
        {"name": name, "valueFrom": {"secretKeyRef": {"name": one.name, "key": one.key}}}
        for name, one in spec.secrets.items()
    ]
    # What a job may set otherwise. A numeric user has neither a home nor a name, and the root is read-only.
    defaults = {"HOME": storage.SCRATCH, "USER": "jaxlaunch"}
    if spec.accelerator.platform != "cpu":  # JAX falls back to the CPU in silence where its platform is not named
        defaults["JAX_PLATFORMS"] = f"{spec.accelerator.platform},cpu"
    defaults |= job.network.environment
    plain = {name: value for name, value in defaults.items() if name not in spec.secrets} | spec.env
    return [*variables(values), *fields, *variables(plain), *secrets]
