"""The pod template: the agent's container under the restricted Pod Security Standard, and what the job adds. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.kube.labels import GENERATION_LABEL, MAIN_CONTAINER, REPLICATED_JOB, SLICE_LABEL, UID_LABEL
from jaxlaunch.launcher.kube.merge import merge
from jaxlaunch.launcher.manifests import bundle, gang_secret, network, placement, volumes
from jaxlaunch.launcher.manifests.bundle import Bundle
from jaxlaunch.launcher.manifests.network import variables
from jaxlaunch.launcher.manifests.platforms import runtime, table
from jaxlaunch.launcher.manifests.resolve import ResolvedJob
from jaxlaunch.trainer.spec import TrainSpec

AGENT = ["python", "-m", "jaxlaunch.launcher.agent"]

# What the agent learns from its own pod: variable -> field.
_FIELDS = {
    contract.SLICE: f"metadata.labels['{SLICE_LABEL}']",
    contract.UID: f"metadata.labels['{UID_LABEL}']",
    contract.GENERATION: f"metadata.labels['{GENERATION_LABEL}']",
    contract.POD_UID: "metadata.uid",
    contract.POD_IP: "status.podIP",
    contract.NODE: "spec.nodeName",
}

RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
_OTHERS_FILES = "DAC_OVERRIDE"  # without it root may not write where pods of another user wrote before
_PRIVILEGED = {"privileged": True, "readOnlyRootFilesystem": True}  # which includes every capability


def template(job: ResolvedJob, metadata: Mapping[str, Any], archive: Bundle | None) -> dict[str, Any]:
    """The template of every pod of the job, with the labels and annotations of `metadata`."""
    spec = job.spec
    mounts = volumes.mounts(job.volumes, has_shared_memory=job.has_shared_memory)
    own: dict[str, Any] = {
        "metadata": {key: dict(metadata[key]) for key in ("labels", "annotations") if key in metadata},
        "spec": _spec(job, _main(job, mounts)),
    }
    parts = (
        volumes.patch(job.volumes, has_shared_memory=job.has_shared_memory, shm=spec.resources.shm, user=job.user),
        placement.patch(
            job.node_labels,
            job.tolerations,
            priority_class=spec.priority if job.queue is None else None,
            annotations=placement.topology(spec.placement, spec.slices, spec.hosts),
        ),
        network.patch(job.network, job.efa_interfaces, job.tcpxo, job.gib),
        bundle.patch(archive),
        gang_secret.patch(spec.name) if spec.gang_secret else {},
        {"spec": {"initContainers": [_init(job.image, mounts, given) for given in spec.init]}} if spec.init else {},
        spec.pod,
    )
    for part in parts:
        own = merge(own, part)
    return own


def _spec(job: ResolvedJob, main: dict[str, Any]) -> dict[str, Any]:
    pull = [{"name": name} for name in job.image_pull_secrets]
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": int(job.spec.grace),
        "enableServiceLinks": False,
        "automountServiceAccountToken": job.spec.service_account is not None,
        **({} if job.service_account is None else {"serviceAccountName": job.service_account}),
        **({"imagePullSecrets": pull} if pull else {}),
        "securityContext": {
            "runAsNonRoot": job.user != 0,
            "runAsUser": job.user,
            "runAsGroup": job.group,
            "fsGroup": job.group,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [main],
    }


def _main(job: ResolvedJob, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": MAIN_CONTAINER,
        "image": job.image,
        "command": list(AGENT),
        "env": _environment(job),
        "ports": network.container_ports(job.ports, job.spec.accelerator.platform),
        **({"resources": resources} if (resources := _resources(job.spec)) else {}),
        "securityContext": _security(job),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _security(job: ResolvedJob) -> dict[str, Any]:
    """What the agent's container may do. Capabilities are added for root alone: in a container of another user they are
    in no set that counts, and would only cost the restricted level."""
    if job.is_privileged:
        return dict(_PRIVILEGED)
    if job.user == 0:
        added = [_OTHERS_FILES, *([runtime.PINNING_CAPABILITY.value] if _pins(job) else [])]
        return RESTRICTED | {"capabilities": {"drop": ["ALL"], "add": added}}
    return dict(RESTRICTED)


def _pins(job: ResolvedJob) -> str | None:
    return network.pinning(job.network, job.spec.host_count)


def _environment(job: ResolvedJob) -> list[dict[str, Any]]:
    """The variables of the agent, beside JOB_COMPLETION_INDEX, which the Job controller sets."""
    spec = job.spec
    for_agents = spec.agent_job(
        command=spec.command,
        platform=spec.accelerator.platform,
        workdir=job.workdir,
        metrics_port=job.ports.metrics,
        search_paths=job.search_paths,
        pinning=_pins(job),
        scratch=volumes.on_disk(job.volumes),
    )
    values = {
        contract.LEADER: f"{spec.name}-{REPLICATED_JOB}-0-0.{spec.name}:{job.ports.leader}",
        contract.HOSTS: str(spec.hosts),
        contract.SLICES: str(spec.slices),
        contract.JOB: for_agents.to_json(),
    }
    if spec.train is not None:
        train = _train(spec.train, job.checkpoints, job.compile_cache)
        values[contract.TRAIN_SPEC] = train.model_dump_json(exclude_unset=True)
    if job.run_folder is not None:
        values[contract.RUN_URL if "://" in job.run_folder else contract.RUN_DIR] = job.run_folder
    fields = [{"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in _FIELDS.items()]
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": one.name, "key": one.key}}}
        for name, one in spec.secrets.items()
    ]
    return [*variables(values), *fields, *variables(_defaults(job) | spec.env), *secrets]


def _train(train: TrainSpec, checkpoints: str | None, compile_cache: str | None) -> TrainSpec:
    """The job's `train` block, with the folders that are settled for it."""
    settled: dict[str, Any] = {"checkpoint": train.checkpoint.model_copy(update={"path": checkpoints})}
    if compile_cache is not None:
        settled["compile_cache"] = compile_cache
    return train.model_copy(update=settled)


def _defaults(job: ResolvedJob) -> dict[str, str]:
    """What a job may set otherwise. JAX falls back to the CPU in silence where its platform is not named."""
    platform = job.spec.accelerator.platform
    # A numeric user has neither a home nor a name, and the root is read-only.
    defaults = {"HOME": volumes.SCRATCH, "USER": "jaxlaunch"}
    if platform != "cpu":
        defaults["JAX_PLATFORMS"] = f"{platform},cpu"
    return {name: value for name, value in (defaults | job.network_env).items() if name not in job.spec.secrets}


def _resources(job: JobSpec) -> dict[str, Any]:
    """Requests and limits. The processor is not limited: a throttled host holds up the whole gang."""
    asked = {
        "cpu": job.resources.cpu,
        "memory": job.resources.memory,
        "ephemeral-storage": job.resources.ephemeral,
        "hugepages-2Mi": job.resources.hugepages,
    }
    requests = {name: amount for name, amount in asked.items() if amount is not None}
    if (extended := table.RESOURCE.get(job.accelerator.platform)) is not None:
        requests[extended.value] = str(job.accelerator.per_host)
    limits = {name: amount for name, amount in requests.items() if name != "cpu"}
    return {name: amounts for name, amounts in (("requests", requests), ("limits", limits)) if amounts}


def _init(image: str | None, mounts: list[dict[str, Any]], given: dict[str, Any]) -> dict[str, Any]:
    """An init container as the job writes it, with the job's image, volumes and security where it gives no others."""
    return {"name": given["name"], "image": image, "securityContext": RESTRICTED, "volumeMounts": mounts} | given
