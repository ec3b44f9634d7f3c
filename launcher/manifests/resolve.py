"""resolve(job, defaults) → ResolvedJob: every value that the cluster defaults or the platform fill in, settled once.

Pure. Whatever checks, renders or estimates a job afterwards takes the resolved job and looks at no defaults. A value
that no one has given stays None, for launcher/manifests/platform_checks to report.
"""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

from jaxlaunch.accelerators import GPUS
from jaxlaunch.launcher.errors import KeyPath
from jaxlaunch.launcher.job.defaults import CheckpointUrl, ClusterDefaults, Defaults, Gib, Prometheus, Tcpxo
from jaxlaunch.launcher.job.schema import JobSpec, Network
from jaxlaunch.launcher.job.volumes import Volume
from jaxlaunch.launcher.manifests import network, placement, volumes
from jaxlaunch.launcher.manifests.network import Ports
from jaxlaunch.launcher.manifests.platforms import gke, table
from jaxlaunch.launcher.manifests.platforms.facts import Nodes, Provisioner
from jaxlaunch.launcher.manifests.platforms.table import Where

CODE = "/code"  # where a pod unpacks the code that a job brings
RUN_FOLDER = ".jaxlaunch"  # below the checkpoints: what must outlive a pod


@dataclasses.dataclass(frozen=True)
class ResolvedJob:
    """A job with all that its pods need. `spec` is as the file has it: what has a field here is read here."""

    spec: JobSpec
    platform: Where
    image: str | None
    image_pull_secrets: tuple[str, ...]
    queue: str | None
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    user: int  # 0: root
    group: int  # of the user, and of what volumes hold
    is_privileged: bool  # the container has every device and capability
    service_account: str | None
    # nodes
    provisioner: Provisioner  # who adds them on EKS
    nodes: Nodes | None  # that have the accelerator; None: the platform has none
    capacity: Nodes | None  # that are of the kind of capacity; None: the platform has none
    node_labels: Mapping[str, tuple[str, ...]]  # all that a node must have, one of several values for a key
    tolerations: tuple[Mapping[str, Any], ...]
    slice_label: str | None  # that nodes of one TPU slice share
    search_paths: Mapping[str, str]  # variable → folder with the driver, which programs find through it alone
    # network
    network: Network
    ports: Ports
    efa_interfaces: tuple[int, ...]  # of the nodes that fit, ascending: one number where they are known
    tcpxo: Tcpxo | None
    gib: Gib
    network_env: dict[str, str]  # of the libraries that communicate, where the job does not set them
    prometheus: Prometheus
    # storage
    volumes: tuple[Volume, ...]
    has_shared_memory: bool
    checkpoints: str | None  # a folder or a URL
    run_folder: str | None  # a folder or a URL, where agents keep what must outlive a pod; None: nowhere
    compile_cache: str | None  # a folder or a URL
    # program
    brings_agent: bool  # the agent travels with the job rather than in its image
    workdir: str | None  # where the program starts in a pod; None: where its image says
    # provenance
    filled: Mapping[KeyPath, KeyPath]  # key of the job → key of the cluster defaults that its value comes from


def resolve(job: JobSpec, defaults: ClusterDefaults) -> ResolvedJob:
    """The job as this cluster would run it. What the job gives counts before the defaults, and these before ours."""
    given = defaults.values
    where, kind = job.platform or given.platform, job.accelerator.type
    connected, user = _network(job, given), given.users.get(kind, given.user)
    number = user if isinstance(user, int) else None  # root and privileged have none
    nodes = placement.nodes(kind, where, given.nodes.get(kind), job.accelerator.per_host)
    capacity = placement.capacity(job.capacity, where, given.provisioner, given.capacity)
    selector = given.node_selector | job.node_selector
    checkpoints, cache = _checkpoints(job, given), _compile_cache(job, given)
    return ResolvedJob(
        spec=job,
        platform=where,
        image=job.image or given.image,
        image_pull_secrets=tuple(dict.fromkeys([*given.image_pull_secrets, *job.image_pull_secrets])),
        queue=job.queue or given.queue,
        labels=given.labels | job.labels,
        annotations=given.annotations | job.annotations,
        user=number or 0,
        group=number or given.user,
        is_privileged=user == "privileged",
        service_account=job.service_account or given.service_account,
        provisioner=given.provisioner,
        nodes=nodes,
        capacity=capacity,
        node_labels=placement.labels(nodes, capacity, selector, job.accelerator, connected),
        tolerations=placement.tolerations(nodes, capacity, [*given.tolerations, *job.tolerations]),
        slice_label=given.slice_label or _slice_label(where),
        search_paths=_search_paths(where, job),
        network=connected,
        ports=network.ports(connected, f"{job.namespace or ''}/{job.name}"),
        efa_interfaces=placement.efa_interfaces(nodes, selector, job.host_count),
        tcpxo=given.tcpxo,
        gib=given.gib or Gib(),
        network_env=_network_env(job, connected, where, given),
        prometheus=given.prometheus,
        volumes=volumes.mounted(job.volumes, (given.checkpoint, checkpoints), (given.compile_cache, cache)),
        has_shared_memory=job.resources.shm is not None or job.accelerator.platform in GPUS,
        checkpoints=checkpoints,
        run_folder=None if checkpoints is None else f"{checkpoints.rstrip('/')}/{RUN_FOLDER}",
        compile_cache=cache,
        brings_agent=_brings_agent(job),
        workdir=_workdir(job),
        filled=dict(_filled(job, given)),
    )


def _network_env(job: JobSpec, connected: Network, where: Where, given: Defaults) -> dict[str, str]:
    # A job sets NCCL's plugins up itself by a variable, or by gIB's folder in its pod or command.
    brings_gib = "NCCL_NET" in {*job.env, *job.secrets} or gke.GIB_FOLDER.value in f"{job.pod} {job.command}"
    has_hugepages, kind = job.resources.hugepages is not None, job.accelerator.type
    return network.environment(connected, where, kind, given.tcpxo, has_hugepages=has_hugepages, brings_gib=brings_gib)


def _filled(job: JobSpec, given: Defaults) -> Iterator[tuple[KeyPath, KeyPath]]:
    """Where the values come from that the cluster defaults give and the job does not."""
    for key in ("platform", "image", "queue", "service_account"):
        if not getattr(job, key) and key in given.model_fields_set:
            yield (key,), (key,)
    if "network" not in job.model_fields_set and job.accelerator.type in given.network:
        yield ("network",), ("network", job.accelerator.type)
    if job.train is not None and job.train.checkpoint.path is None and given.checkpoint is not None:
        yield ("train", "checkpoint", "path"), ("checkpoint",)
    if job.train is not None and "compile_cache" not in job.train.model_fields_set and given.compile_cache is not None:
        yield ("train", "compile_cache"), ("compile_cache",)


def _network(job: JobSpec, given: Defaults) -> Network:
    """The job's; else the cluster's for its accelerator."""
    return job.network if "network" in job.model_fields_set else given.network.get(job.accelerator.type, job.network)


def _checkpoints(job: JobSpec, given: Defaults) -> str | None:
    """The folder of the job's checkpoints, or a URL."""
    if job.train is not None and job.train.checkpoint.path is not None:
        return job.train.checkpoint.path
    if given.checkpoint is None:
        return None
    root = given.checkpoint.url if isinstance(given.checkpoint, CheckpointUrl) else given.checkpoint.path
    return f"{root.rstrip('/')}/{job.name}"


def _compile_cache(job: JobSpec, given: Defaults) -> str | None:
    """The folder of XLA's compilation cache, or a URL; only the built-in trainer has one."""
    if job.train is None:
        return None
    if "compile_cache" in job.train.model_fields_set:
        return job.train.compile_cache
    return None if given.compile_cache is None else given.compile_cache.path


def _slice_label(where: Where) -> str | None:
    known = table.PLATFORMS[where].slice_label
    return None if known is None else known.value


def _search_paths(where: Where, job: JobSpec) -> Mapping[str, str]:
    known = table.PLATFORMS[where].search_paths.get(job.accelerator.platform)
    return {} if known is None else known.value


def _brings_agent(job: JobSpec) -> bool:
    """Whether the agent is in the job's ConfigMap rather than in its image; `auto` decides by whose image it is.

    The built-in trainer needs our package in its image, and the agent with it; the image of the cluster defaults is
    made to hold it. An image that a job names for a command of its own need not: any image with a Python will do.
    """
    if job.agent == "auto":
        return job.command is not None and job.image is not None
    return job.agent == "inject"


def _workdir(job: JobSpec) -> str | None:
    """One that is relative, or is below an absolute `code`, is inside the code, unpacked."""
    if job.code_folder is None:
        return job.workdir
    if job.workdir is not None and posixpath.isabs(job.workdir):
        if not (posixpath.isabs(job.code_folder) and PurePosixPath(job.workdir).is_relative_to(job.code_folder)):
            return job.workdir
    return posixpath.normpath(posixpath.join(CODE, posixpath.relpath(job.workdir or job.code_folder, job.code_folder)))
