"""The pod template: the agent's container under the restricted Pod Security Standard, and what the job adds. Pure."""

from __future__ import annotations

from typing import Any

from launcher import agentjob, bundle, network, placement, platforms, storage
from launcher.bundle import Bundle
from launcher.checks import MAIN_CONTAINER, REPLICATED_JOB
from launcher.merge import merge
from launcher.network import variables
from launcher.profile import Profile
from launcher.schema import JobSpec
from trainer import contract
from trainer.spec import TrainSpec

AGENT = ["python", "-m", "launcher.agent"]

# What the agent learns from its own pod: variable -> field.
_FIELDS = {
    contract.SLICE: "metadata.labels['jobset.sigs.k8s.io/job-index']",
    contract.UID: "metadata.labels['jobset.sigs.k8s.io/jobset-uid']",
    contract.GENERATION: "metadata.labels['jobset.sigs.k8s.io/restart-attempt']",
    contract.POD_UID: "metadata.uid",
    contract.NODE: "spec.nodeName",
}

_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def template(
    job: JobSpec, profile: Profile, labels: dict[str, str], annotations: dict[str, str], archive: Bundle | None
) -> dict[str, Any]:
    """The template of every pod of the job."""
    metadata: dict[str, Any] = {"labels": labels} | ({"annotations": annotations} if annotations else {})
    own: dict[str, Any] = {"metadata": metadata, "spec": _spec(job, profile)}
    parts = (
        storage.patch(job, profile),
        placement.patch(job, profile),
        network.patch(job, profile),
        bundle.patch(archive),
    )
    for part in parts:
        own = merge(own, part)
    if job.init:
        own = merge(own, {"spec": {"initContainers": [_init(job, profile, given) for given in job.init]}})
    merged = merge(own, job.pod)
    assert isinstance(merged, dict)
    return merged


def _spec(job: JobSpec, profile: Profile) -> dict[str, Any]:
    account = job.service_account or profile.service_account
    pull = [{"name": name} for name in dict.fromkeys([*profile.image_pull_secrets, *job.image_pull_secrets])]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(job.grace),
        "enableServiceLinks": False,
        "automountServiceAccountToken": job.service_account is not None,
        **({} if account is None else {"serviceAccountName": account}),
        **({"imagePullSecrets": pull} if pull else {}),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": profile.user,
            "runAsGroup": profile.user,
            "fsGroup": profile.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_main(job, profile)],
    }


def _main(job: JobSpec, profile: Profile) -> dict[str, Any]:
    return {
        "name": MAIN_CONTAINER,
        "image": image(job, profile),
        "command": list(AGENT),
        "env": _environment(job, profile),
        "ports": network.container_ports(job),
        **({"resources": resources} if (resources := _resources(job)) else {}),
        "securityContext": _RESTRICTED,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": storage.mounts(job, profile),
    }


def image(job: JobSpec, profile: Profile) -> str:
    found = job.image or profile.image
    assert found is not None, "refused before"
    return found


def _environment(job: JobSpec, profile: Profile) -> list[dict[str, Any]]:
    """What the agent finds, beside JOB_COMPLETION_INDEX, which the Job controller sets."""
    leader, metrics = network.ports(job)
    told = agentjob.of(
        job, command=job.command, platform=job.accelerator.platform, workdir=bundle.workdir(job), metrics_port=metrics
    )
    values = {
        contract.LEADER: f"{job.name}-{REPLICATED_JOB}-0-0.{job.name}:{leader}",
        contract.HOSTS: str(job.hosts),
        contract.SLICES: str(job.slices),
        contract.JOB: told.to_json(),
    }
    if job.train is not None:
        values[contract.TRAIN_SPEC] = _train(job.train, job, profile).model_dump_json(exclude_unset=True)
    if (folder := storage.run_folder(job, profile)) is not None:
        values[contract.RUN_DIR] = folder
    fields = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in _FIELDS.items()]
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": one.name, "key": one.key}}}
        for name, one in job.secrets.items()
    ]
    return [*variables(values), *fields, *variables(_defaults(job) | job.env), *secrets]


def _train(train: TrainSpec, job: JobSpec, profile: Profile) -> TrainSpec:
    """The job's `train` block, with the folders that the profile has for it."""
    kept = train.checkpoint.model_copy(update={"path": storage.checkpoints(job, profile)})
    told: dict[str, Any] = {"checkpoint": kept}
    if (cache := storage.compile_cache(job, profile)) is not None:
        told["compile_cache"] = cache
    return train.model_copy(update=told)


def _defaults(job: JobSpec) -> dict[str, str]:
    """What a job may set otherwise. JAX falls back to the CPU in silence where its platform is not named."""
    # A numeric user has neither a home nor a name, and the root is read-only.
    defaults = {"HOME": storage.SCRATCH, "USER": "jaxlaunch"}
    if job.accelerator.platform != "cpu":
        defaults["JAX_PLATFORMS"] = f"{job.accelerator.platform},cpu"
    return {name: value for name, value in defaults.items() if name not in job.secrets}


def _resources(job: JobSpec) -> dict[str, Any]:
    """Requests and limits. The processor is not limited: a throttled host holds up the whole gang."""
    asked = {"cpu": job.resources.cpu, "memory": job.resources.memory, "ephemeral-storage": job.resources.ephemeral}
    requests = {name: amount for name, amount in asked.items() if amount is not None}
    if (extended := platforms.RESOURCE.get(job.accelerator.platform)) is not None:
        requests[extended] = str(job.accelerator.per_host)
    limits = {name: amount for name, amount in requests.items() if name != "cpu"}
    return {name: amounts for name, amounts in (("requests", requests), ("limits", limits)) if amounts}


def _init(job: JobSpec, profile: Profile, given: dict[str, Any]) -> dict[str, Any]:
    """An init container as the job writes it, with our image, volumes and security where it says nothing else."""
    ours = {
        "image": image(job, profile),
        "securityContext": _RESTRICTED,
        "volumeMounts": storage.mounts(job, profile),
    }
    return {"name": given["name"]} | ours | given
