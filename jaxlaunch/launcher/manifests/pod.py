"""The pod template: the agent's container, and what each subject and the job itself add to it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxlaunch import contract, isolated
from jaxlaunch.launcher.kubernetes.labels import (
    GENERATION_LABEL,
    MAIN_CONTAINER,
    REPLICATED_JOB,
    SLICE_LABEL,
    UID_LABEL,
)
from jaxlaunch.launcher.kubernetes.merge import merge
from jaxlaunch.launcher.manifests import claims, network, nodes, security, storage
from jaxlaunch.launcher.manifests.code import Bundle
from jaxlaunch.launcher.manifests.network import variables
from jaxlaunch.launcher.manifests.resolve import ResolvedJob

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


def template(job: ResolvedJob, metadata: Mapping[str, Any], brought: Bundle | None) -> dict[str, Any]:
    """The template of every pod of the job, with the labels and annotations of `metadata`."""
    mounts = storage.mounts(job.storage)
    main = {
        "name": MAIN_CONTAINER,
        "image": job.code.image,
        "command": list(AGENT),
        "env": _environment(job),
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
        claims.patch(job.network, job.nodes),
        {} if brought is None else brought.patch(),
        security.patch(job.security),
        {"spec": {"initContainers": init}} if init else {},
        job.spec.pod,
    ):
        own = merge(own, part)
    return own


def _environment(job: ResolvedJob) -> list[dict[str, Any]]:
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
    return [*variables(values), *fields, *variables(_defaults(job) | spec.env), *secrets]


def _defaults(job: ResolvedJob) -> dict[str, str]:
    """What a job may set otherwise. JAX falls back to the CPU in silence where its platform is not named."""
    platform = job.spec.accelerator.platform
    # A numeric user has neither a home nor a name, and the root is read-only.
    defaults = {"HOME": storage.SCRATCH, "USER": "jaxlaunch"}
    if platform != "cpu":
        defaults["JAX_PLATFORMS"] = f"{platform},cpu"
    return {
        name: value for name, value in {**defaults, **job.network.environment}.items() if name not in job.spec.secrets
    }
