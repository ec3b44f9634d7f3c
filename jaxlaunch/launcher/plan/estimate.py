"""Estimates of what a job needs: memory of a device, room for checkpoints, and requests to the cluster.

Bytes come from the shapes of the job's arrays, traced by the trainer; here they are compared with
the memory of the accelerator, and with the room for checkpoints as far as this machine can tell.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from jaxlaunch import contract
from jaxlaunch.accelerators import ACCELERATORS
from jaxlaunch.launcher.agent.host.environment import (
    MEMORY_SHARE,
    NEW_MEMORY_SHARE,
    TRAINER_VARIABLES,
)
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.job.types import Bucket, Claim, Ephemeral, Volume
from jaxlaunch.launcher.kubernetes import pod_rules
from jaxlaunch.launcher.kubernetes import resources as demand
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

# The output of trainer/plan.
Shapes = Mapping[str, Any]


# --- shapes ---------------------------------------------------------------------------------------


def trace_shapes(
    job: JobSpec,
    train: TrainSpec,
    base: Path,
    *,
    sharding: bool = False,
    compiled: bool = False,
    show: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Return the output of `python -m jaxlaunch.trainer.plan` for a job's train block.

    Its code and data are relative to `base`. `show` gets the progress of a compilation, line by
    line. Raises UserError with the trainer's own message where the training would not start.
    """
    flags = ["--sharding"] if sharding else []
    flags += ["--compile", describe_chips(job)] if compiled else []
    accelerator = ACCELERATORS[job.accelerator.type]
    flags += ["--platform", accelerator.platform]
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
        hint="the trainer says so of the train block, here.",
        show=show_progress,
    )
    for name in ("flops_per_step", "causal_flops_per_step"):
        if shapes[name] is not None:
            shapes[name] *= copies
    return shapes


def describe_chips(job: JobSpec) -> str:
    """Return the job's devices, as trainer/aot/chips reads them."""
    accelerator = job.accelerator
    return json.dumps(
        {
            "type": accelerator.type,
            "hosts": job.host_count,
            "per_host": accelerator.per_host,
            "slices": job.slices,
            "topology": accelerator.topology,
        }
    )


def _count_copies(train: TrainSpec, devices: int) -> int:
    """Return how many equal parts dp makes: one is traced, because ten thousand virtual devices would take minutes.

    It is one where the user's task may bring a mesh or a batch of its own.
    """
    if not (train.task in TASK_DEFAULTS or {"mesh", "batch"} <= train.model_fields_set):
        return 1
    return train.mesh.resolve(devices)[0]


def traced_environ(job: JobSpec, train: TrainSpec, base: Path, copies: int = 1) -> dict[str, str]:
    """Return the environment of the job, with the train block and the virtual devices of one of the copies."""
    if copies > 1:
        _, fsdp, ep, mp = train.mesh.resolve(job.devices)
        train = train.model_copy(
            update={"mesh": Mesh(fsdp=fsdp, ep=ep, mp=mp), "batch": train.batch // copies}
        )
    return {
        **trainer_process.cpu_environ(job, train, base),
        contract.NUM_CPU_DEVICES: str(job.devices // copies),
    }


# --- memory ---------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class UsableMemory:
    """Memory of one device that a training may use, for each model of the accelerator."""

    usable: tuple[float, ...]  # bytes, the smallest make first
    # The memory that this is a part of, as text.
    description: str


@dataclasses.dataclass(frozen=True)
class FitVerdict:
    """The answer whether a training fits its devices. `fits` is None if that is not known."""

    fits: bool | None
    text: str
    hint: str | None = None


def device_memory(job: JobSpec, node_labels: Mapping[str, Sequence[str]]) -> UsableMemory | None:
    """Return the usable memory of the job's devices, on nodes with one of these values of each label.

    It is None if neither the job nor the accelerator's name determines it.
    """
    accelerator = ACCELERATORS[job.accelerator.type]
    if accelerator.platform == "cpu":
        quantity, devices = job.resources.memory, job.accelerator.devices_per_host
        if quantity is None:
            return None
        return UsableMemory(
            (float(parse_quantity(quantity)) / devices,),
            f"a host's {quantity} / {devices}, with the program",
        )
    share = _memory_share(job) if accelerator.platform == "cuda" else 1.0
    quantity = job.accelerator.memory
    if quantity is None:
        sizes_gib = _admitted_sizes_gib(accelerator.memory_gib, node_labels)
    else:
        sizes_gib = [float(parse_quantity(quantity)) / GIB]
    if not sizes_gib:
        return None
    sizes = " or ".join(f"{size_gib:g} GiB" for size_gib in sizes_gib)
    description = (
        f"{share:.0%} of {sizes}: JAX's part of {job.accelerator.type}"
        if share < 1
        else job.accelerator.type
    )
    return UsableMemory(tuple(size_gib * share * GIB for size_gib in sizes_gib), description)


def _admitted_sizes_gib(
    sizes_gib: Sequence[float], node_labels: Mapping[str, Sequence[str]]
) -> Sequence[float]:
    """Return the memory sizes of an accelerator that the labels admit, or all if no label distinguishes them."""
    label_values = [
        value for values in node_labels.values() for value in values if value in table.MEMORY_GB
    ]
    admitted = {
        min(sizes_gib, key=lambda size_gib: abs(size_gib - table.MEMORY_GB[value]))
        for value in label_values
    }
    return sorted(admitted) or sizes_gib


def _memory_share(job: JobSpec) -> float:
    share = (
        job.env.get(MEMORY_SHARE)
        or job.env.get(NEW_MEMORY_SHARE)
        or TRAINER_VARIABLES["cuda"][MEMORY_SHARE]
    )
    try:
        return float(share)
    except ValueError:
        return float(TRAINER_VARIABLES["cuda"][MEMORY_SHARE])


def peak_bytes(shapes: Shapes, remat: str = "asked") -> tuple[int, int]:
    """Return bytes of one device at the peak of a step, or of the samples of an evaluation, at least and at most."""
    state = sum(shapes["device"].values())
    low, high = (
        max(activations, shapes["samples"]) for activations in shapes["activations"][remat]
    )
    return state + low, state + high


def judge_memory(
    job: JobSpec,
    train: TrainSpec,
    shapes: Shapes,
    node_labels: Mapping[str, Sequence[str]] | None = None,
) -> FitVerdict:
    """Judge whether what a device holds fits into what it has, on nodes with one of these values of each label."""
    node_labels, kind = node_labels or {}, job.accelerator.type
    memory, (low, high) = device_memory(job, node_labels), peak_bytes(shapes)
    if memory is None:
        key = (
            "a host has: resources.memory"
            if kind == "cpu"
            else f"a {kind} has: accelerator.memory, such as 24Gi"
        )
        return FitVerdict(None, "whether that fits is not known", f"say how much memory {key}.")
    smallest_bytes, largest_bytes = memory.usable[0], memory.usable[-1]
    if low > largest_bytes:
        hint = _suggest_fit(train, job.devices, shapes, largest_bytes)
        return FitVerdict(
            False, f"does not fit into {format_size(largest_bytes)} ({memory.description})", hint
        )
    room = f"{format_size(smallest_bytes)} ({memory.description})"
    if high <= smallest_bytes:
        return FitVerdict(True, f"fits into {room}")
    if high <= largest_bytes:
        sizes_gib = ACCELERATORS[kind].memory_gib
        largest_model = f"the {sizes_gib[-1]:.0f} GB {kind.upper()}"
        largest_labels = (
            f"{key}: {value}"
            for key, values in node_labels.items()
            for value in values
            if value in table.MEMORY_GB
            and _admitted_sizes_gib(sizes_gib, {key: [value]}) == [sizes_gib[-1]]
        )
        choice = next(largest_labels, f"{GPU_PRODUCT}: …")
        hint = f"choose nodes with {largest_model} by node_selector, such as {{{choice}}}."
        return FitVerdict(
            None,
            f"fits {largest_model} only: {format_size(largest_bytes)} ({memory.description})",
            hint,
        )
    return FitVerdict(
        None,
        f"may not fit into {room}",
        "the compiler decides how much mp splits: --compile measures it.",
    )


def _suggest_fit(train: TrainSpec, devices: int, shapes: Shapes, room_bytes: float) -> str:
    """Return the change that would make the training fit, or the best advice."""
    full_bytes = peak_bytes(shapes, "full")[1]
    if full_bytes <= room_bytes:
        return f"train.remat: full needs {format_size(full_bytes)}."
    state_bytes = sum(part for name, part in shapes["device"].items() if name != "batch")
    if state_bytes > room_bytes / 2:
        if train.mesh.resolve(devices)[0] > 1:
            return (
                f"the state alone takes {format_size(state_bytes)}: train.mesh.fsdp splits it, "
                "dp copies it."
            )
        axes = (
            "fsdp, ep or mp"
            if isinstance(train.model, Decoder) and train.model.experts
            else "fsdp or mp"
        )
        return (
            f"the state alone takes {format_size(state_bytes)}: ask for more devices under "
            f"train.mesh.{axes}."
        )
    return "use a smaller batch or more train.accumulate, in addition to train.remat: full."


# --- checkpoints ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes for checkpoints, including those already in the folder, or None if unknown on this machine."""

    folder: str
    bytes: int | None
    text: str


def checkpoint_sizes(train: TrainSpec, folder: str | None, shapes: Shapes) -> dict[str, Any]:
    """Return the bytes of the checkpoints. While one is being written, there is one more than are kept."""
    size_bytes, kept_count = shapes["checkpoint"], train.checkpoint.max_kept_steps()
    return {
        "folder": folder,
        "bytes": size_bytes,
        "kept": kept_count,
        "most": size_bytes * (kept_count + 1),
    }


def checkpoint_room(job: ResolvedJob, base: Path) -> Room:
    """Return the room in the checkpoint folder of a job whose file is in `base`, or in that of `launcher run`."""
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
    """Return the volume that the checkpoint folder is on: of nested ones the innermost."""
    folder = PurePosixPath(job.storage.checkpoints or "")
    volumes = [volume for volume in job.storage.volumes if folder.is_relative_to(volume.path)]
    return max(volumes, key=lambda volume: len(PurePosixPath(volume.path).parts), default=None)


def _local_room(folder: str, base: Path) -> Room:
    """Return the room in a folder of this machine, which may not exist yet.

    The checkpoints in it count as room: they are deleted as newer ones come.
    """
    path = (base / folder).absolute()
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    steps = (
        [child for child in path.glob("[0-9]*") if child.name.isdecimal()] if path.is_dir() else []
    )
    files = (
        os.path.join(top, name)
        for step in steps
        for top, _, names in os.walk(step)
        for name in names
    )
    held_bytes = sum(os.lstat(file).st_size for file in files)
    return Room(folder, shutil.disk_usage(existing).free + held_bytes, "free here")


# --- the cluster ----------------------------------------------------------------------------------


def cluster_requests(job: ResolvedJob, jobset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the requests to the cluster."""
    per_pod, total = demand.pod_requests(pod_template(jobset)["spec"]), demand.job_requests(jobset)
    return {
        "platform": job.nodes.platform,
        "queue": job.nodes.queue,
        "pods": demand.count_pods(jobset),
        "per_pod": {name: demand.format_quantity(name, number) for name, number in per_pod.items()},
        "together": {name: demand.format_quantity(name, number) for name, number in total.items()},
    }


def security_level(jobset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Pod Security level that a namespace may enforce, and what keeps the pods from a stricter one."""
    level = pod_rules.strictest_level(pod_template(jobset))
    stricter = pod_rules.stricter_level(level)
    violations = (
        [] if stricter is None else pod_rules.find_violations(pod_template(jobset), stricter)
    )
    return {"level": level, "because": [str(violation) for violation in violations]}


def describe_ingress(job: ResolvedJob) -> str:
    """Return who can connect to the job's pods."""
    leader, metrics = job.network.ports.leader, job.network.ports.metrics
    ports = f"ports {leader} (agents) and {metrics} (metrics), and JAX's coordinator"
    if job.network.chosen == "hostnetwork":
        exposure = (
            "are on the nodes' own addresses, which no NetworkPolicy protects: close them "
            "in the nodes' firewall"
        )
        return f"anyone who reaches the nodes; {ports}, {exposure}"
    if not job.spec.network_policy:
        return (
            f"anyone whom the namespace's other NetworkPolicies admit; {ports}, are open where "
            "there is none"
        )
    namespace = job.network.prometheus.namespace
    return (
        "its own hosts, and Prometheus in "
        f"{'any namespace' if namespace is None else f'namespace {namespace}'}"
    )
