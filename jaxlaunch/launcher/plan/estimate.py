"""Estimates of a job's memory, its checkpoints, and its requests to the cluster.

The trainer traces the shapes of the job's arrays. This module compares their bytes with the memory
of the accelerator, and with the room for checkpoints as far as it is known on this machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

from typing_extensions import TypedDict

from jaxlaunch import contract
from jaxlaunch.accelerators import ACCELERATORS
from jaxlaunch.launcher.agent.host.environment import (
    MEMORY_SHARE,
    NEW_MEMORY_SHARE,
    TRAINER_VARIABLES,
)
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.job.types import Bucket, Claim, Ephemeral, Volume
from jaxlaunch.launcher.kubernetes import pod_rules, resources
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.kubernetes.resources import parse_quantity
from jaxlaunch.launcher.local import run_folders, trainer_process
from jaxlaunch.launcher.manifests.jobset import ResolvedJob
from jaxlaunch.launcher.platforms import table
from jaxlaunch.launcher.platforms.facts import GPU_PRODUCT
from jaxlaunch.launcher.wording import format_size
from jaxlaunch.runs import layout
from jaxlaunch.trainer.spec import TASK_DEFAULTS, Decoder, Mesh, TrainSpec

GIB = 1024**3

# The output of `python -m jaxlaunch.trainer.plan`.
Shapes = Mapping[str, Any]


# --- shapes ---------------------------------------------------------------------------------------


_TRACE_HINT = (
    "the train: block is traced on this machine: the modules and the data that it names must be "
    "here."
)


def trace_shapes(
    job: JobSpec,
    train: TrainSpec,
    base: Path,
    *,
    sharding: bool = False,
    compiled: bool = False,
    show: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Trace the train block of a job, and return the shapes and bytes of its arrays.

    Args:
        job: The job.
        train: Its train block.
        base: The folder at which relative paths of code and data start.
        sharding: Whether to list all parameters with the mesh axes that split them.
        compiled: Whether to compile the steps for the job's devices.
        show: Called with each line about the progress of the compilation.

    Raises:
        UserError: The training would not start. The message is the trainer's.
    """
    accelerator = ACCELERATORS[job.accelerator.type]
    flags = ["--platform", accelerator.platform]
    flags += ["--sharding"] if sharding else []
    flags += ["--compile", describe_chips(job)] if compiled else []
    flags += ["--capability", accelerator.capability] if accelerator.capability else []
    copies = 1 if compiled else _count_copies(train, job.devices)

    def show_progress(line: str) -> None:
        # All other lines are logs of compilers.
        if show is not None and line.startswith(contract.COMPILING_PREFIX):
            show(line)

    shapes = trainer_process.run_program(
        "jaxlaunch.trainer.plan",
        *flags,
        environ=traced_environ(job, train, base, copies),
        # A fault of the compilation says itself what to do.
        hint=None if compiled else _TRACE_HINT,
        show=show_progress,
    )
    for name in ("flops_per_step", "causal_flops_per_step"):
        if shapes[name] is not None:
            shapes[name] *= copies
    return shapes


def describe_chips(job: JobSpec) -> str:
    """Return the job's devices as JSON for trainer/aot/chips."""
    accelerator = job.accelerator
    shape = {"hosts": job.host_count, "per_host": accelerator.per_host, "slices": job.slices}
    return json.dumps({"type": accelerator.type, **shape, "topology": accelerator.topology})


def _count_copies(train: TrainSpec, devices: int) -> int:
    """Return the number of data-parallel copies. Only one of them is traced, which saves minutes.

    The number is 1 if the user's task may set its own mesh or batch.
    """
    is_known = train.task in TASK_DEFAULTS or {"mesh", "batch"} <= train.model_fields_set
    return train.mesh.resolve(devices)[0] if is_known else 1


def traced_environ(job: JobSpec, train: TrainSpec, base: Path, copies: int = 1) -> dict[str, str]:
    """Return the environment for tracing one data-parallel copy on virtual devices."""
    if copies > 1:
        _, fsdp, ep, mp = train.mesh.resolve(job.devices)
        changes = {"mesh": Mesh(fsdp=fsdp, ep=ep, mp=mp), "batch": train.batch // copies}
        train = train.model_copy(update=changes)
    environ = trainer_process.cpu_environ(job, train, base)
    return {**environ, contract.NUM_CPU_DEVICES: str(job.devices // copies)}


# --- memory ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class UsableMemory:
    """Memory of one device that a training may use."""

    # One size for each model of the accelerator, the smallest first.
    sizes_bytes: tuple[float, ...]
    # The share of the device's whole memory, as text.
    description: str


@dataclasses.dataclass(frozen=True)
class FitVerdict:
    """Judgement of whether a training fits into its devices. `fits` is None if unknown."""

    fits: bool | None
    text: str
    hint: str | None = None


def device_memory(job: JobSpec, node_labels: Mapping[str, Sequence[str]]) -> UsableMemory | None:
    """Return the usable memory of the job's devices, on nodes with these labels.

    Returns None if neither the job nor the name of the accelerator determines it.
    """
    kind, accelerator = job.accelerator.type, ACCELERATORS[job.accelerator.type]
    if accelerator.platform == "cpu":
        quantity, devices = job.resources.memory, job.accelerator.devices_per_host
        if quantity is None:
            return None
        description = f"a host's {quantity} / {devices}, with the program"
        return UsableMemory((float(parse_quantity(quantity)) / devices,), description)
    share = 1.0
    if accelerator.platform == "cuda":
        share = float(TRAINER_VARIABLES["cuda"][MEMORY_SHARE])
        with contextlib.suppress(ValueError):
            share = float(job.env.get(MEMORY_SHARE) or job.env.get(NEW_MEMORY_SHARE) or share)
    quantity, partition_gb = job.accelerator.memory, job.accelerator.partition_gb
    if quantity is None and partition_gb is not None:
        sizes_gib: Sequence[float] = [partition_gb * 1e9 / GIB]
    elif quantity is None and job.accelerator.resource is not None:
        # Only the cluster knows the size of this part of a device.
        sizes_gib = []
    elif quantity is None:
        sizes_gib = _admitted_sizes_gib(accelerator.memory_gib, node_labels)
    else:
        sizes_gib = [float(parse_quantity(quantity)) / GIB]
    if not sizes_gib:
        return None
    description = kind
    if share < 1:
        sizes = " or ".join(f"{size_gib:.4g} GiB" for size_gib in sizes_gib)
        description = f"{share:.0%} of {sizes}: JAX's part of {kind}"
    return UsableMemory(tuple(size_gib * share * GIB for size_gib in sizes_gib), description)


def _admitted_sizes_gib(
    sizes_gib: Sequence[float], node_labels: Mapping[str, Sequence[str]]
) -> Sequence[float]:
    """Return the memory sizes of an accelerator that the labels allow: all without such a label."""
    values = {value for values in node_labels.values() for value in values}
    admitted = {
        min(sizes_gib, key=lambda size_gib: abs(size_gib - table.MEMORY_GB_BY_LABEL[value]))
        for value in values & table.MEMORY_GB_BY_LABEL.keys()
    }
    return sorted(admitted) or sizes_gib


def peak_bytes(shapes: Shapes, remat: str = "asked") -> tuple[int, int]:
    """Return the lowest and highest estimate of a device's peak bytes."""
    state = sum(shapes["device"].values())
    low, high = (max(size, shapes["samples"]) for size in shapes["activations"][remat])
    return state + low, state + high


def judge_memory(
    job: JobSpec,
    train: TrainSpec,
    shapes: Shapes,
    node_labels: Mapping[str, Sequence[str]] | None = None,
) -> FitVerdict:
    """Judge whether a training fits into its devices on nodes with these labels."""
    node_labels, kind = node_labels or {}, job.accelerator.type
    memory, (low, high) = device_memory(job, node_labels), peak_bytes(shapes)
    if memory is None:
        key = f"a {kind} has: accelerator.memory, such as 24Gi"
        if kind == "cpu":
            key = "a host has: resources.memory"
        return FitVerdict(None, "whether that fits is not known", f"say how much memory {key}.")
    smallest_bytes, largest_bytes = memory.sizes_bytes[0], memory.sizes_bytes[-1]
    smallest = f"{format_size(smallest_bytes)} ({memory.description})"
    largest = f"{format_size(largest_bytes)} ({memory.description})"
    if low > largest_bytes:
        hint = _suggest_fit(train, job.devices, shapes, largest_bytes)
        return FitVerdict(False, f"does not fit into {largest}", hint)
    if high <= smallest_bytes:
        return FitVerdict(True, f"fits into {smallest}")
    if high > largest_bytes:
        hint = "the compiler decides how much mp splits: --compile measures it."
        return FitVerdict(None, f"may not fit into {smallest}", hint)
    sizes_gib = ACCELERATORS[kind].memory_gib
    model, choice = f"the {sizes_gib[-1]:.0f} GB {kind.upper()}", f"{GPU_PRODUCT}: …"
    for key, value in ((key, value) for key, values in node_labels.items() for value in values):
        is_size = value in table.MEMORY_GB_BY_LABEL
        if is_size and _admitted_sizes_gib(sizes_gib, {key: [value]}) == [sizes_gib[-1]]:
            choice = f"{key}: {value}"
            break
    hint = f"choose nodes with {model} by node_selector, such as {{{choice}}}."
    return FitVerdict(None, f"fits {model} only: {largest}", hint)


def _suggest_fit(train: TrainSpec, devices: int, shapes: Shapes, room_bytes: float) -> str:
    """Return a change that makes the training fit, or else what to reduce."""
    full_bytes = peak_bytes(shapes, "full")[1]
    if full_bytes <= room_bytes:
        return f"train.remat: full needs {format_size(full_bytes)}."
    state_bytes = sum(part for name, part in shapes["device"].items() if name != "batch")
    if state_bytes <= room_bytes / 2:
        return "use a smaller batch or more train.accumulate, in addition to train.remat: full."
    fact = f"the state alone takes {format_size(state_bytes)}"
    if train.mesh.resolve(devices)[0] > 1:
        return f"{fact}: train.mesh.fsdp splits it, dp copies it."
    has_experts = isinstance(train.model, Decoder) and train.model.experts
    axes = "fsdp, ep or mp" if has_experts else "fsdp or mp"
    return f"{fact}: ask for more devices under train.mesh.{axes}."


# --- checkpoints ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Room:
    """Room for checkpoints in a folder."""

    folder: str
    # Including the bytes of existing checkpoints. None if unknown on this machine.
    bytes: int | None
    text: str


def checkpoint_sizes(train: TrainSpec, folder: str | None, shapes: Shapes) -> dict[str, Any]:
    """Return the bytes of one checkpoint, and of all that are kept and one that is written."""
    size_bytes, kept_count = shapes["checkpoint"], train.checkpoint.max_kept_steps()
    most_bytes = size_bytes * (kept_count + 1)
    return {"folder": folder, "bytes": size_bytes, "kept": kept_count, "most": most_bytes}


def checkpoint_room(job: ResolvedJob, base: Path) -> Room:
    """Return the room in the checkpoint folder of a job whose file is in `base`."""
    folder = job.storage.checkpoints
    if folder is None:
        return _local_room(
            str(run_folders.RUNS_FOLDER / job.spec.name / layout.CHECKPOINTS), Path()
        )
    if "://" in folder:
        return Room(folder, None, "a bucket")
    match checkpoint_volume(job):
        case Claim(claim=name):
            return Room(folder, None, f"on claim {name}, whose size `launcher doctor` compares")
        case Ephemeral(ephemeral=quantity):
            return Room(folder, int(parse_quantity(quantity)), f"of the volume's {quantity}")
        case Bucket():
            return Room(folder, None, "a bucket")
    return _local_room(folder, base)


def checkpoint_volume(job: ResolvedJob) -> Volume | None:
    """Return the volume that has the checkpoint folder, the innermost of nested ones."""
    folder = PurePosixPath(job.storage.checkpoints or "")
    volumes = [volume for volume in job.storage.volumes if folder.is_relative_to(volume.path)]
    return max(volumes, key=lambda volume: len(PurePosixPath(volume.path).parts), default=None)


def _local_room(folder: str, base: Path) -> Room:
    """Return the room in a folder of this machine, which may not exist yet.

    Existing checkpoints count as room, because newer ones replace them.
    """
    path = (base / folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    room_bytes = shutil.disk_usage(existing).free
    for step in path.glob("[0-9]*"):
        for top, _, names in os.walk(step) if step.name.isdecimal() else ():
            room_bytes += sum(os.lstat(os.path.join(top, name)).st_size for name in names)
    return Room(folder, room_bytes, "free here")


# --- the cluster ----------------------------------------------------------------------------------


class ClusterRequests(TypedDict):
    """The requests of a job to a cluster."""

    platform: str
    # The LocalQueue of Kueue.
    queue: str | None
    pods: int
    # Quantities by resource, of each pod and of all pods together.
    per_pod: Mapping[str, str]
    together: Mapping[str, str]


class PodSecurity(TypedDict):
    """The strictest Pod Security level that admits the pods, and why none stricter does."""

    level: str
    because: list[str]


def cluster_requests(job: ResolvedJob, jobset: Mapping[str, Any]) -> ClusterRequests:
    """Return the job's requests to the cluster: platform, queue, pods and resources."""

    def format_requests(requests: Mapping[str, Decimal]) -> dict[str, str]:
        return {name: resources.format_quantity(name, number) for name, number in requests.items()}

    return {
        "platform": job.nodes.platform,
        "queue": job.nodes.queue,
        "pods": resources.count_pods(jobset),
        "per_pod": format_requests(resources.pod_requests(pod_template(jobset)["spec"])),
        "together": format_requests(resources.job_requests(jobset)),
    }


def security_level(jobset: Mapping[str, Any]) -> PodSecurity:
    """Return the strictest Pod Security level that admits the pods, and why none stricter does."""
    template = pod_template(jobset)
    level = pod_rules.strictest_level(template)
    stricter = pod_rules.stricter_level(level)
    violations = [] if stricter is None else pod_rules.find_violations(template, stricter)
    return {"level": level, "because": [str(violation) for violation in violations]}


def describe_ingress(job: ResolvedJob) -> str:
    """Describe who can connect to the job's pods."""
    leader, metrics = job.network.ports.leader, job.network.ports.metrics
    ports = f"ports {leader} (agents) and {metrics} (metrics), and JAX's coordinator"
    if job.network.choice == "hostnetwork":
        exposure = "are on the nodes' own addresses, which no NetworkPolicy protects"
        advice = "close them in the nodes' firewall"
        return f"anyone who reaches the nodes; {ports}, {exposure}: {advice}"
    if not job.spec.network_policy:
        admitted = "anyone whom the namespace's other NetworkPolicies admit"
        return f"{admitted}; {ports}, are open where there is none"
    namespace = job.network.prometheus.namespace
    place = "any namespace" if namespace is None else f"namespace {namespace}"
    return f"its own hosts, and Prometheus in {place}"
