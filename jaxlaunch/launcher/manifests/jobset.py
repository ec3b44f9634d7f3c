"""render(job, bundle) → manifests: the JobSet that runs a job's gang, who may reach it, what it brings.

Pure: no clock, no random, no cluster; and no judgement, for the job is resolved and accepted. A pod that is lost is
made again alone where its peers wait for it; the hosts of a TPU slice do not.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import LEFT, OUTCOMES, Action
from jaxlaunch.launcher.kubernetes.labels import (
    EXCLUSIVE,
    LONGEST,
    MAIN_CONTAINER,
    MANAGED,
    OWN_LABEL,
    PRIORITY,
    PROVISIONING,
    QUEUE,
    REPLICATED_JOB,
    SPEC_HASH,
)
from jaxlaunch.launcher.manifests import claims, network, pod
from jaxlaunch.launcher.manifests.code import Bundle
from jaxlaunch.launcher.manifests.resolve import ResolvedJob

API_VERSION = "jobset.x-k8s.io/v1alpha2"

_TARGETS = {"targetReplicatedJobs": [REPLICATED_JOB]}


def render(job: ResolvedJob, brought: Bundle | None = None) -> list[dict[str, Any]]:
    """The manifests of a job without faults: its JobSet, its NetworkPolicy, what its claims are made from, and the
    ConfigMap of what it brings."""
    metadata = _metadata(job)
    allocated = claims.objects(job.network, job.nodes, metadata)
    manifests = [_jobset(job, metadata, brought), *network.policy(job.network, metadata), *allocated]
    return manifests if brought is None else [*manifests, brought.config_map(job.spec.namespace)]


def _metadata(job: ResolvedJob) -> dict[str, Any]:
    """Of everything that the job alone makes."""
    metadata: dict[str, Any] = {"name": job.spec.name}
    if job.spec.namespace is not None:
        metadata["namespace"] = job.spec.namespace
    metadata["labels"] = {**job.labels, **MANAGED, OWN_LABEL: job.spec.name}
    if job.annotations:
        metadata["annotations"] = dict(job.annotations)
    return metadata


def _jobset(job: ResolvedJob, metadata: dict[str, Any], brought: Bundle | None) -> dict[str, Any]:
    labels = metadata["labels"] | _jobset_labels(job)
    annotations = metadata.get("annotations", {}) | _jobset_annotations(job)
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", **_TARGETS},
        "failurePolicy": _failure_policy(job),
    }
    of_slice = {**_job(job), "template": pod.template(job, metadata, brought)}
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
    """What Kueue reads of the JobSet's labels."""
    if job.nodes.queue is None:
        return {}
    found = {QUEUE: job.nodes.queue}
    if job.spec.priority is not None:
        found[PRIORITY] = job.spec.priority
    if job.spec.deadline is not None:
        found[LONGEST] = str(int(job.spec.deadline))
    return found


def _jobset_annotations(job: ResolvedJob) -> dict[str, str]:
    """What JobSet and Kueue read of the JobSet's annotations."""
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
    """The Job of one slice."""
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.spec.pods,
        "parallelism": job.spec.pods,
        "podReplacementPolicy": "Failed",
        **(_replaced_alone(job) if job.spec.replaces_hosts else _failed_together()),
    }
    if job.spec.deadline is not None:
        spec["activeDeadlineSeconds"] = int(job.spec.deadline)  # of each generation; Kueue alone knows the sum
    return spec


def _failed_together() -> dict[str, Any]:
    """A pod that fails ends its Job at once: JobSet alone decides what follows."""
    decided = sorted([*codes(Action.FAIL), *codes(Action.RESTART_UNCHARGED)])
    return {"backoffLimit": 0, "podFailurePolicy": {"rules": [_disrupted("FailJob"), _exited("FailJob", decided)]}}


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
