"""What a job needs that its platform and the cluster defaults do not give it. Pure.

launcher/job/checks judges a job by itself; here the resolved job is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from jaxlaunch.accelerators import GPUS
from jaxlaunch.launcher.errors import Fault, KeyPath
from jaxlaunch.launcher.job import checks
from jaxlaunch.launcher.job.schema import Reservation
from jaxlaunch.launcher.job.volumes import Bucket, Ephemeral
from jaxlaunch.launcher.kube.labels import MAIN_CONTAINER
from jaxlaunch.launcher.manifests import network
from jaxlaunch.launcher.manifests.platforms import eks, gke, table
from jaxlaunch.launcher.manifests.platforms.facts import GKE_GPU, INSTANCE
from jaxlaunch.launcher.manifests.resolve import CODE, ResolvedJob
from jaxlaunch.launcher.wording import count, either


def faults(job: ResolvedJob) -> Iterator[Fault]:
    """Everything that keeps the job from running there, with what to do about it."""
    for check in _CHECKS:
        yield from check(job)


def _workdir(job: ResolvedJob) -> Iterator[Fault]:
    code, workdir = job.spec.code_folder, job.spec.workdir
    if code is None or workdir is None or workdir.startswith("/"):
        return
    if not PurePosixPath(job.workdir or "").is_relative_to(CODE):
        message = f"workdir = {workdir} is outside of code = {code}, and only that folder is shipped."
        yield Fault(("workdir",), message, "give the path in the image, or a folder below the code.")


def _image(job: ResolvedJob) -> Iterator[Fault]:
    if job.image is None:
        message = "image is missing, and the cluster defaults have none."
        yield Fault(("image",), message, "image: registry.example/train:1.4")


def _accelerator(job: ResolvedJob) -> Iterator[Fault]:
    kind = job.spec.accelerator.type
    if job.nodes is None:
        have = [name for name, known in table.NODES.items() if kind in known]
        hint = f"use platform: {either(have)}, or name their labels under nodes.{kind} in the cluster defaults."
        message = f"accelerator.type = {kind} is not known on platform = {job.platform}."
        yield Fault(("accelerator", "type"), message, hint)
        return
    if job.spec.accelerator.platform not in GPUS:
        return
    asked = job.spec.accelerator.per_host
    has = {one: table.LARGEST[one] for values in job.node_labels.values() for one in values if one in table.LARGEST}
    if job.nodes.labels.get(INSTANCE) == () and not has:
        has = {one: table.LARGEST[one] for one in table.NODES[job.platform][kind].labels[INSTANCE]}
    chosen = next((one for one in job.spec.node_selector.values() if one in has), None)
    if has and max(has.values()) < asked and chosen is not None:
        message = f"node_selector: {chosen} has {count(has[chosen], 'GPU')}, and accelerator.per_host = {asked}."
        yield Fault(("node_selector",), message, f"use accelerator.per_host: {has[chosen]}, or another machine type.")
    elif has and max(has.values()) < asked:
        message = f"accelerator.per_host = {asked}: the largest {kind} machine of platform = {job.platform} has "
        hint = "use more hosts with fewer devices each."
        yield Fault(("accelerator", "per_host"), f"{message}{max(has.values())}.", hint)


def _another_kind(job: ResolvedJob) -> Iterator[Fault]:
    """A node_selector that chooses nodes of another accelerator than the job asks for."""
    kind, known = job.spec.accelerator.type, table.NODES[job.platform]
    if job.nodes is None or kind not in known or job.nodes.source is None:
        return
    for key, own in known[kind].labels.items():
        for value in job.node_labels.get(key, ()):
            others = [name for name, nodes in known.items() if value in nodes.labels.get(key, ())]
            if value not in own and others:
                message = f"node_selector: {key} = {value} is {either(others)}, and accelerator.type = {kind}."
                yield Fault(("node_selector",), message, f"choose {either(own)}, or accelerator.type: {others[0]}.")


def _capacity(job: ResolvedJob) -> Iterator[Fault]:
    if job.capacity is not None:
        yield from _deadline(job)
        yield from _part_of_reservation(job)
    elif isinstance(job.spec.capacity, Reservation):
        message = f"capacity = reservation is not known on platform = {job.platform}."
        yield Fault(("capacity", "reservation"), message, "use on-demand with node_selector: of those nodes.")
    else:
        kind = job.spec.capacity
        hint = f"use on-demand, or name its labels under capacity.{kind} in the cluster defaults."
        yield Fault(("capacity",), f"capacity = {kind} is not known on platform = {job.platform}.", hint)


def _deadline(job: ResolvedJob) -> Iterator[Fault]:
    """flex-start takes its nodes away after some days, whatever runs there."""
    longest, deadline = gke.LONGEST_FLEX_START_S.value, job.spec.deadline
    if job.spec.capacity == "flex-start" and job.platform == "gke" and deadline is not None and deadline > longest:
        days = longest // 86_400
        message = f"deadline = {deadline / 86_400:g} days: nodes of capacity = flex-start last at most {days} days."
        yield Fault(("deadline",), message, f"write deadline: {days}d or less, or another capacity.")


def _part_of_reservation(job: ResolvedJob) -> Iterator[Fault]:
    capacity = job.spec.capacity
    if not isinstance(capacity, Reservation):
        return
    name = capacity.reservation
    if job.platform == "eks" and job.provisioner == "karpenter" and not name.startswith(eks.RESERVATION_ID.value):
        message = f"capacity.reservation = {name} is not an id, by which Karpenter labels reserved nodes."
        hint = f"write {eks.RESERVATION_ID.value}…, or provisioner: managed in the cluster defaults for node groups."
        yield Fault(("capacity", "reservation"), message, hint)
    for part in gke.IN_RESERVATION:
        if getattr(capacity, part) is not None and job.platform != "gke":
            message = f"capacity.{part} is not known on platform = {job.platform}."
            yield Fault(("capacity", part), message, "leave it out: reservation names it whole.")
    if capacity.sub_block is not None and capacity.block is None:
        message = f"capacity.sub_block = {capacity.sub_block} is part of a block, and capacity.block is missing."
        yield Fault(("capacity", "sub_block"), message, "block: …")


def _slices(job: ResolvedJob) -> Iterator[Fault]:
    """GKE makes Multislice of slices that span hosts."""
    spec = job.spec
    if job.platform == "gke" and spec.accelerator.platform == "tpu" and spec.slices > 1 and spec.hosts == 1:
        message = (
            f"slices = {spec.slices}: GKE connects only slices of several hosts, "
            f"and {spec.accelerator.type} {spec.accelerator.topology} is one host."
        )
        yield Fault(("slices",), message, "use a larger accelerator.topology, or slices: 1.")


def _one_kind(job: ResolvedJob) -> Iterator[Fault]:
    """A gang is as fast as its slowest host and as large as its smallest: all its nodes are of one kind."""
    kind = job.spec.accelerator.type
    if job.nodes is None or job.spec.host_count == 1 or kind in table.ALIKE:
        return
    for key in job.nodes.labels:
        if len(values := job.node_labels.get(key, ())) > 1:
            hosts = count(job.spec.host_count, "host")
            message = f"{hosts} of {kind} could be {either(values)}, which differ in memory or network."
            hint = f"choose one: node_selector: {{{key}: {values[0]}}}, or nodes.{kind} in the cluster defaults."
            yield Fault(("accelerator", "type"), message, hint)


def _placement(job: ResolvedJob) -> Iterator[Fault]:
    if job.spec.placement is not None and job.queue is None:
        yield Fault(("placement",), "placement is done by Kueue, and the job has no queue.", "name one with queue:.")


def _network(job: ResolvedJob) -> Iterator[Fault]:
    if (wrong := checks.network_fault(job.network, job.spec.accelerator.type, job.platform)) is not None:
        yield wrong
    elif job.network == "efa":
        yield from _efa(job)
    elif isinstance(job.network, str) and job.network in _WHOLE_HOSTS:
        yield from _gpudirect(job, job.network)


# GPUDirect's networks of GKE: accelerators, and how many of them a host must have.
_WHOLE_HOSTS: Mapping[str, tuple[Sequence[str], int]] = {
    "gpudirect-tcpxo": (["h100"], gke.TCPXO_GPUS.value),
    "gpudirect-rdma": (list(gke.GIB_TUNER), gke.GIB_GPUS.value),
}


def _gpudirect(job: ResolvedJob, network: str) -> Iterator[Fault]:
    path: KeyPath = ("network",)
    kinds, gpus = _WHOLE_HOSTS[network]
    kind, per_host = job.spec.accelerator.type, job.spec.accelerator.per_host
    gpu = gke.TCPX_GPU.value
    if kind not in kinds or per_host != gpus:
        hint = f"it joins whole hosts of {either(kinds)}, {gpus} per host."
        if gke.COMPUTE_DOMAIN_GPU.value in job.node_labels.get(GKE_GPU, ()):
            hint += f" That of {kind} also needs a ComputeDomain, which jaxlaunch does not create: add both with pod:."
        yield Fault(path, f"network = {network} does not apply to {kind} with {per_host} per host.", hint)
    elif network == "gpudirect-tcpxo" and job.node_labels.get(GKE_GPU) == (gpu,):
        message = f"network = {network} does not exist on nodes of {gpu}, whose GPUDirect-TCPX is not supported."
        yield Fault(path, message, f"choose {GKE_GPU}: {gke.TCPXO_GPU.value}, or network: default.")
    if network == "gpudirect-tcpxo" and job.tcpxo is None:
        message = f"network = {network} needs the receive daemon's image, and the cluster defaults have none."
        yield Fault(path, message, "tcpxo: {image: …} in the cluster defaults.")


def _efa(job: ResolvedJob) -> Iterator[Fault]:
    """Each fault is of the key that the hint changes: the network may be of the cluster defaults."""
    kind, counts, resources = job.spec.accelerator.type, job.efa_interfaces, job.spec.resources
    if not counts:
        message = f"network = efa: how many interfaces nodes of {kind} have is not known."
        yield Fault(("network",), message, f"write {{profile: rdma, resource: {eks.EFA_RESOURCE.value}, count: …}}.")
    if resources.hugepages is not None and resources.cpu is None and resources.memory is None:
        message = (
            f"resources.hugepages = {resources.hugepages}: Kubernetes gives them only together with cpu or memory."
        )
        yield Fault(("resources",), message, "resources: {cpu: 90, memory: 1500Gi, hugepages: 5Gi}")


def _buckets(job: ResolvedJob) -> Iterator[Fault]:
    for index, volume in enumerate(job.spec.volumes):
        if not isinstance(volume, Bucket) or (job.platform == "gke" and volume.bucket.startswith("gs://")):
            continue
        scheme = volume.bucket.partition("://")[0]
        message = f"volumes.{index}.bucket: {scheme}:// cannot be mounted on platform = {job.platform}."
        hint = "mount a claim of a CSI driver for it, or give its URL to the trainer."
        yield Fault(("volumes", index, "bucket"), message, hint)


def _checkpoints(job: ResolvedJob) -> Iterator[Fault]:
    """Checkpoints must outlive their pod and be seen by every host."""
    if job.spec.train is None:
        return
    folder, path = job.checkpoints, ("train", "checkpoint", "path")
    if folder is None:
        message = "train.checkpoint.path is missing, and the cluster defaults have no place for checkpoints."
        yield Fault(
            path, message, "write it, below a volume or as a URL, or give the cluster defaults a checkpoint volume."
        )
    elif folder.startswith("/"):
        holder = _holder(job, folder)
        own = next((index for index, volume in enumerate(job.spec.volumes) if volume is holder), None)
        at: KeyPath = ("volumes", own) if own is not None and path in job.filled else path
        if holder is None:
            message = f"train.checkpoint.path = {folder} is on no volume: it would be lost with its pod."
            yield Fault(path, message, "mount a claim there: volumes: [{claim: …, path: …}].")
        elif isinstance(holder, Ephemeral) and job.spec.host_count > 1:
            message = f"train.checkpoint.path = {folder} is on ephemeral storage, which every host has for itself."
            yield Fault(at, message, "mount a ReadWriteMany claim there.")
        elif getattr(holder, "read_only", False):
            yield Fault(at, f"train.checkpoint.path = {folder} is on a read-only volume.", "mount it for writing.")


def _holder(job: ResolvedJob, folder: str) -> Any:
    """The innermost volume that holds a folder; of what `pod:` mounts only that it does."""
    mounted: list[tuple[Any, Any]] = [(volume.path, volume) for volume in job.volumes]
    for container in job.spec.pod.get("spec", {}).get("containers", []):
        mounts = container.get("volumeMounts") if container["name"] == MAIN_CONTAINER else None
        for mount in mounts if isinstance(mounts, list) else []:
            mounted.append((mount.get("mountPath") if isinstance(mount, dict) else None, mount))
    found = [
        (len(place), holder)
        for place, holder in mounted
        if isinstance(place, str) and PurePosixPath(folder).is_relative_to(place)
    ]
    return max(found, key=lambda one: one[0])[1] if found else None


def _relative_paths(job: ResolvedJob) -> Iterator[Fault]:
    """Paths relative to the job file, which no pod has."""
    if job.spec.train is None:
        return
    named: dict[KeyPath, Any] = {
        ("train", "data", key): getattr(job.spec.train.data, key, None) for key in ("path", "eval_path", "data_dir")
    }
    for name, part in getattr(job.spec.train.data, "parts", {}).items():
        named |= {("train", "data", "parts", name, key): getattr(part, key) for key in ("path", "eval_path")}
    if (tokenizer := getattr(job.spec.train.data, "tokenizer", "bytes")) != "bytes":
        named[("train", "data", "tokenizer")] = tokenizer
    named[("train", "checkpoint", "path")] = job.spec.train.checkpoint.path
    named[("train", "compile_cache")] = job.spec.train.compile_cache
    for block in ("model", "lora"):
        named[("train", block, "init_from")] = getattr(getattr(job.spec.train, block), "init_from", None)
    for path, value in named.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None and "://" not in one and not one.startswith("/"):
                message = f"{'.'.join(map(str, path))} = {one} is relative to the job file, which a pod does not have."
                yield Fault(path, message, "write the path in the pod, below a volume or in the image.")


def _init(job: ResolvedJob) -> Iterator[Fault]:
    seen = {MAIN_CONTAINER} | ({network.DAEMON} if job.network == "gpudirect-tcpxo" else set())
    for index, container in enumerate(job.spec.init):
        name = container.get("name")
        if not isinstance(name, str):
            yield Fault(("init", index), f"init.{index} has no name.", "name: prepare")
        elif name in seen:
            yield Fault(("init", index, "name"), f"init.{index}.name = {name} is taken.", "choose another.")
        else:
            seen.add(name)


_CHECKS: tuple[Callable[[ResolvedJob], Iterator[Fault]], ...] = (
    _workdir,
    _image,
    _accelerator,
    _another_kind,
    _capacity,
    _slices,
    _one_kind,
    _placement,
    _network,
    _buckets,
    _checkpoints,
    _relative_paths,
    _init,
)
