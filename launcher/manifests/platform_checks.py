"""What a job asks for that its platform does not have. Pure.

launcher.checks judges a job by itself; here the cluster's profile has its say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any

from launcher import bundle, network, placement, platforms, pod, podfaults, storage
from launcher.checks import MAIN_CONTAINER
from launcher.errors import Fault, KeyPath
from launcher.profile import Profile
from launcher.schema import Bucket, Ephemeral, JobSpec, Reservation
from launcher.wording import either


def refusals(job: JobSpec, profile: Profile) -> Iterator[Fault]:
    """Everything that keeps the job from running there, with what to do about it."""
    found = [fault for ask in _QUESTIONS for fault in ask(job, profile)]
    yield from found or podfaults.faults(pod.template(job, profile, {}, {}, archive=None))


def _workdir(job: JobSpec, profile: Profile) -> Iterator[Fault]:
    if job.code is None or job.workdir is None or job.workdir.startswith("/"):
        return
    if not PurePosixPath(bundle.workdir(job) or "").is_relative_to(bundle.CODE):
        message = f"workdir = {job.workdir} lies outside of code = {job.code}, and only that folder travels."
        yield Fault(("workdir",), message, "give the path in the image, or a folder below the code.")


def _image(job: JobSpec, profile: Profile) -> Iterator[Fault]:
    if job.image is None and profile.image is None:
        yield Fault(("image",), "image is missing, and the profile has none.", "image: registry.example/train:1.4")


def _accelerator(job: JobSpec, profile: Profile) -> Iterator[Fault]:
    where, kind = placement.platform(job, profile), job.accelerator.type
    if placement.nodes(job, profile) is None:
        have = [name for name, table in platforms.NODES.items() if kind in table]
        hint = f"use platform: {either(have)}, or name their labels under nodes.{kind} in the profile."
        yield Fault(("accelerator", "type"), f"accelerator.type = {kind} is not known on platform = {where}.", hint)


def _capacity(job: JobSpec, profile: Profile) -> Iterator[Fault]:
    if placement.capacity(job, profile) is not None:
        return
    where, is_bought = placement.platform(job, profile), isinstance(job.capacity, Reservation)
    kind, path = ("reservation", ("capacity", "reservation")) if is_bought else (job.capacity, ("capacity",))
    hint = (
        "use on-demand with node_selector:" if is_bought else f"use on-demand, or name its labels under capacity.{kind}"
    )
    message = f"capacity = {kind} is not known on platform = {where}."
    yield Fault(path, message, f"{hint}{' of those nodes.' if is_bought else ' in the profile.'}")


def _placement(job: JobSpec, profile: Profile) -> Iterator[Fault]:
    if job.placement is not None and placement.queue(job, profile) is None:
        yield Fault(("placement",), "placement is Kueue's to keep, and the job has no queue.", "name one with queue:.")


def _network(job: JobSpec, profile: Profile) -> Iterator[Fault]:
    where, path = placement.platform(job, profile), ("network",)
    if job.network == "efa" and where != "eks":
        yield Fault(path, f"network = efa does not exist on platform = {where}.", "it is eks's.")
    elif job.network == "efa":
        yield from _efa(job, profile)
    elif job.network == "gpudirect-tcpxo" and where != "gke":
        yield Fault(path, f"network = gpudirect-tcpxo does not exist on platform = {where}.", "it is gke's.")
    elif job.network == "gpudirect-tcpxo":
        asked = f"{job.accelerator.type} with {job.accelerator.per_host} per host"
        if (job.accelerator.type, job.accelerator.per_host) != ("h100", platforms.TCPXO_GPUS):
            message = f"network = gpudirect-tcpxo does not apply to {asked}."
            yield Fault(path, message, f"it joins whole hosts of h100, {platforms.TCPXO_GPUS} per host.")
        if profile.tcpxo is None:
            message = "network = gpudirect-tcpxo needs the receive daemon's image, and the profile has none."
            yield Fault(path, message, "tcpxo: {image: …} in the profile.")


def _efa(job: JobSpec, profile: Profile) -> Iterator[Fault]:
    counts = network.efa_interfaces(job, profile)
    path: KeyPath = ("network",)
    if len(counts) > 1:
        message = f"network = efa: nodes of {job.accelerator.type} have {either(sorted(counts))} interfaces."
        yield Fault(path, message, f"say which with node_selector: {{{platforms.INSTANCE}: …}}.")
    elif not counts:
        message = f"network = efa: how many interfaces nodes of {job.accelerator.type} have is not known."
        yield Fault(path, message, f"write {{profile: rdma, resource: {platforms.EFA_RESOURCE}, count: …}}.")
    if job.resources.cpu is None and job.resources.memory is None:
        message = "network = efa takes huge pages, which Kubernetes gives only beside cpu or memory."
        yield Fault(path, message, "resources: {cpu: 90, memory: 1500Gi}")


def _buckets(job: JobSpec, profile: Profile) -> Iterator[Fault]:
    where = placement.platform(job, profile)
    for index, volume in enumerate(job.volumes):
        if not isinstance(volume, Bucket) or (where == "gke" and volume.bucket.startswith("gs://")):
            continue
        scheme = volume.bucket.partition("://")[0]
        message = f"volumes.{index}.bucket: {scheme}:// cannot be mounted on platform = {where}."
        hint = "mount a claim of a CSI driver for it, or give its URL to the trainer."
        yield Fault(("volumes", index, "bucket"), message, hint)


def _checkpoints(job: JobSpec, profile: Profile) -> Iterator[Fault]:
    """Checkpoints must outlive their pod and be seen by every host."""
    if job.train is None:
        return
    folder, path = storage.checkpoints(job, profile), ("train", "checkpoint", "path")
    if folder is None:
        hint = "write it, below a volume or as a URL, or give the profile a checkpoint volume."
        yield Fault(path, "train.checkpoint.path is missing, and the profile has no place for checkpoints.", hint)
    elif folder.startswith("/"):
        holder = _holder(job, profile, folder)
        if holder is None:
            message = f"train.checkpoint.path = {folder} lies on no volume: it would be lost with its pod."
            yield Fault(path, message, "mount a claim there: volumes: [{claim: …, path: …}].")
        elif isinstance(holder, Ephemeral) and job.host_count > 1:
            message = f"train.checkpoint.path = {folder} lies on ephemeral space, of which every host has its own."
            yield Fault(path, message, "mount a ReadWriteMany claim there.")
        elif getattr(holder, "read_only", False):
            yield Fault(path, f"train.checkpoint.path = {folder} lies on a read-only volume.", "mount it for writing.")


def _holder(job: JobSpec, profile: Profile, folder: str) -> Any:
    """The innermost volume that holds a folder; of what `pod:` mounts only that it does."""
    mounted: list[tuple[Any, Any]] = [(volume.path, volume) for volume in storage.volumes(job, profile)]
    for container in job.pod.get("spec", {}).get("containers", []):
        mounts = container.get("volumeMounts") if container["name"] == MAIN_CONTAINER else None
        for mount in mounts if isinstance(mounts, list) else []:
            mounted.append((mount.get("mountPath") if isinstance(mount, dict) else None, mount))
    found = [
        (len(place), holder)
        for place, holder in mounted
        if isinstance(place, str) and PurePosixPath(folder).is_relative_to(place)
    ]
    return max(found, key=lambda one: one[0])[1] if found else None


def _relative_paths(job: JobSpec, profile: Profile) -> Iterator[Fault]:
    """Paths relative to the job file, which no pod has."""
    if job.train is None:
        return
    named: dict[KeyPath, Any] = {
        ("train", "data", key): getattr(job.train.data, key, None) for key in ("path", "eval_path", "data_dir")
    }
    named[("train", "checkpoint", "path")] = job.train.checkpoint.path
    named[("train", "compile_cache")] = job.train.compile_cache
    named[("train", "model", "init_from")] = getattr(job.train.model, "init_from", None)
    for path, value in named.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None and "://" not in one and not one.startswith("/"):
                message = f"{'.'.join(map(str, path))} = {one} is relative to the job file, which a pod does not have."
                yield Fault(path, message, "write the path in the pod, below a volume or in the image.")


def _init(job: JobSpec, profile: Profile) -> Iterator[Fault]:
    seen = {MAIN_CONTAINER} | ({network.DAEMON} if job.network == "gpudirect-tcpxo" else set())
    for index, container in enumerate(job.init):
        name = container.get("name")
        if not isinstance(name, str):
            yield Fault(("init", index), f"init.{index} has no name.", "name: prepare")
        elif name in seen:
            yield Fault(("init", index, "name"), f"init.{index}.name = {name} is taken.", "choose another.")
        else:
            seen.add(name)


_QUESTIONS: tuple[Callable[[JobSpec, Profile], Iterator[Fault]], ...] = (
    _workdir,
    _image,
    _accelerator,
    _capacity,
    _placement,
    _network,
    _buckets,
    _checkpoints,
    _relative_paths,
    _init,
)
