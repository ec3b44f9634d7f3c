"""render(job, profile, archive) → manifests: the JobSet that runs a job's gang, who may reach it, what it brings.

Pure: no clock, no random, no cluster. Never `Ignore` for a gang: one pod replaced alone would never join its peers.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from launcher import bundle, network, placement, pod
from launcher.bundle import Bundle
from launcher.checks import MAIN_CONTAINER, REPLICATED_JOB
from launcher.errors import UserError
from launcher.profile import Profile
from launcher.refusals import refusals
from launcher.schema import JobSpec
from trainer.contract import OUTCOMES, Action

API_VERSION = "jobset.x-k8s.io/v1alpha2"
NAME_LABEL = "jobset.sigs.k8s.io/jobset-name"  # the JobSet controller puts it on pods
OWN_LABEL = "jaxlaunch.io/job"
SPEC_HASH = "jaxlaunch.io/spec-sha256"
STOPPED_WITH = "jaxlaunch.io/stopped-with"  # how the gang ended that was stopped: its pods are not kept

_TARGETS = {"targetReplicatedJobs": [REPLICATED_JOB]}


def render(job: JobSpec, profile: Profile, archive: Bundle | None = None) -> list[dict[str, Any]]:
    """The manifests of a job: its JobSet, its NetworkPolicy unless it wants none, and the ConfigMap of what it brings.

    Raises UserError for a job that this platform or we cannot run, with everything that is wrong.
    """
    job = _connected(job, profile)
    if found := list(refusals(job, profile)):
        raise UserError("\n".join(f"{fault.message}\n  hint: {fault.hint}" for fault in found))
    assert (job.code is None) == (archive is None or archive.code is None), "bundle.of packs what the job brings"
    manifests = [_jobset(job, profile, archive)]
    policy = network.policy(job, profile, _metadata(job, profile), {NAME_LABEL: job.name})
    if policy is not None:
        manifests.append(policy)
    if archive is not None:
        manifests.append(bundle.config_map(archive, job.namespace))
    return manifests


def _connected(job: JobSpec, profile: Profile) -> JobSpec:
    """The job with the network that the profile has for its accelerator, where it names none."""
    usual = profile.network.get(job.accelerator.type)
    return job if usual is None or "network" in job.model_fields_set else job.model_copy(update={"network": usual})


def _metadata(job: JobSpec, profile: Profile) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": job.name}
    if job.namespace is not None:
        metadata["namespace"] = job.namespace
    metadata["labels"] = _labels(job, profile)
    if annotations := dict(profile.annotations | job.annotations):
        metadata["annotations"] = annotations
    return metadata


def _labels(job: JobSpec, profile: Profile) -> dict[str, str]:
    own = {"app.kubernetes.io/managed-by": "jaxlaunch", OWN_LABEL: job.name}
    return {**profile.labels, **job.labels, **own}


def _jobset(job: JobSpec, profile: Profile, archive: Bundle | None) -> dict[str, Any]:
    metadata = _metadata(job, profile)
    metadata["labels"] = metadata["labels"] | placement.jobset_labels(job, profile)
    spec: dict[str, Any] = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", **_TARGETS},
        "failurePolicy": _failure_policy(job),
        "replicatedJobs": [
            {"name": REPLICATED_JOB, "replicas": job.slices, "template": {"spec": _job(job, profile, archive)}}
        ],
    }
    if job.ttl is not None:
        spec["ttlSecondsAfterFinished"] = int(job.ttl)
    annotations = {**metadata.get("annotations", {}), **placement.jobset_annotations(job, profile)}
    jobset = {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": metadata | {"annotations": annotations},
        "spec": spec,
    }
    return jobset | {"metadata": metadata | {"annotations": {**annotations, SPEC_HASH: _digest(jobset)}}}


def _digest(manifest: dict[str, Any]) -> str:
    """Tells whether a JobSet of this name is this very one."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def codes(action: Action) -> list[int]:
    """The exit codes that JobSet answers with this action."""
    return sorted(code for code, outcome in OUTCOMES.items() if outcome.action is action)


def _failure_policy(job: JobSpec) -> dict[str, Any]:
    """What becomes of the gang, by the message of its Job's failure; the first rule that matches counts.

    The messages are those of Kubernetes' pod failure policy. What no rule matches is restarted, and counted.
    """
    free = f"has condition DisruptionTarget|{_exit_codes(Action.RESTART_UNCHARGED)}"
    rules = [
        _rule("stopped_from_outside", Action.RESTART_UNCHARGED, "PodFailurePolicy", free),
        _rule("permanent", Action.FAIL, "PodFailurePolicy", _exit_codes(Action.FAIL)),
    ]
    if job.deadline is not None:
        rules.append(_rule("deadline", Action.FAIL, "DeadlineExceeded"))
    return {"maxRestarts": job.restarts.crash, "restartStrategy": "BlockingRecreate", "rules": rules}


def _rule(name: str, action: Action, reason: str, pattern: str | None = None) -> dict[str, Any]:
    rule = {"name": name, "action": action.value, **_TARGETS, "onJobFailureReasons": [reason]}
    return rule if pattern is None else rule | {"onJobFailureMessagePatterns": [pattern]}


def _exit_codes(action: Action) -> str:
    numbers = "|".join(map(str, codes(action)))
    return f"failed with exit code {numbers if '|' not in numbers else f'({numbers})'} matching"


def _job(job: JobSpec, profile: Profile, archive: Bundle | None) -> dict[str, Any]:
    """The Job of one slice. A pod that fails ends it at once: JobSet alone decides what follows."""
    told = sorted([*codes(Action.FAIL), *codes(Action.RESTART_UNCHARGED)])
    labels, annotations = _labels(job, profile), dict(profile.annotations | job.annotations)
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.hosts,
        "parallelism": job.hosts,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": MAIN_CONTAINER, "operator": "In", "values": told},
                },
            ]
        },
    }
    if job.deadline is not None:
        spec["activeDeadlineSeconds"] = int(job.deadline)  # of each generation; Kueue alone knows the sum
    return spec | {"template": pod.template(job, profile, labels, annotations, archive)}
