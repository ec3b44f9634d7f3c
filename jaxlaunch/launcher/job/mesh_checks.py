"""How a job's mesh and batch are laid out over its devices: what does not divide, and what would. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from jaxlaunch.accelerators import KNOWN
from jaxlaunch.contract import BATCH_AXES, MESH_AXES
from jaxlaunch.launcher.errors import Fault, KeyPath
from jaxlaunch.launcher.job.schema import MOST_PODS, JobSpec
from jaxlaunch.launcher.wording import count, either
from jaxlaunch.trainer.spec import TASK_DEFAULTS, CustomModel, Decoder, Published, TrainSpec, said

MESH: KeyPath = ("train", "mesh")
# What mp splits in a built-in model, as in the table of trainer/parallel/sharding.
SPLIT_BY_MP = {
    "mlp": ("width",),
    "decoder": ("heads", "kv_heads", "hidden", "expert_hidden", "vocab"),
    "gpt2": ("heads", "hidden", "vocab"),
    "vit": ("heads", "hidden"),
}

_MOST_OFFERED = 9
_MOST_SIMULATED = 2**14  # devices; beyond, contiguity of rows is the mesh's to prove


def devices(job: JobSpec) -> str:
    """`16 devices (4 hosts × 4)`."""
    per_chip = KNOWN[job.accelerator.type].devices_per_chip
    factors = [count(job.hosts, "host"), str(job.accelerator.per_host)]
    if job.slices > 1:
        factors.insert(0, count(job.slices, "slice"))
    if per_chip > 1:
        factors[-1:] = [count(job.accelerator.per_host, "chip"), str(per_chip)]
    return f"{count(job.devices, 'device')} ({' × '.join(factors)})"


def divisors(number: int, near: int = 1) -> list[int]:
    """The divisors of a number; of very many, those around `near`."""
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    found = sorted({*low, *(number // divisor for divisor in low)})
    nearest = sorted(found, key=lambda divisor: abs(math.log(divisor / max(1, near))))[:_MOST_OFFERED]
    return sorted(nearest)


def mesh_faults(job: JobSpec) -> Iterator[Fault]:
    """Axes that do not divide the devices, or do not multiply to them."""
    if job.train is None:
        return
    sizes = {axis: getattr(job.train.mesh, axis) for axis in MESH_AXES}
    wrong = [axis for axis, size in sizes.items() if size > 0 and job.devices % size]
    for axis in wrong:
        message = f"train.mesh.{axis} = {sizes[axis]} does not divide {devices(job)}."
        options = either(divisors(job.devices, near=sizes[axis]))
        yield Fault((*MESH, axis), message, f"use {options}, or -1 to take what remains.")
    is_open = -1 in sizes.values()
    fixed = math.prod(size for size in sizes.values() if size > 0)
    if wrong or not (job.devices % fixed or (not is_open and fixed != job.devices)):
        return
    # The hint is the one axis to change, or the devices to ask for.
    hint = f"make the axes smaller, or ask for {fixed} devices or a multiple of that."
    cures = [
        f"{axis}: {job.devices * size // fixed}"
        for axis, size in sizes.items()
        if size > 0 and job.devices * size % fixed == 0 and (axis != "ep" or size != 1)
    ]
    if cures and not is_open:
        hint = f"write {either(cures)}; -1 on one axis takes what remains."
    shape = said({axis: size for axis, size in sizes.items() if size > 0})
    makes = "alone needs" if is_open else "needs"
    yield Fault(MESH, f"train.mesh: {shape} {makes} {count(fixed, 'device')}, the job has {devices(job)}.", hint)


def slice_faults(job: JobSpec) -> Iterator[Fault]:
    """dcn axes that do not spread the mesh over the slices. Only of a mesh that fits the devices."""
    if job.train is None or not fits(job):
        return
    sizes, dcn = dict(zip(MESH_AXES, job.train.mesh.resolve(job.devices), strict=True)), job.train.mesh.dcn
    spanned = math.prod(dcn.values())
    if dcn and spanned != job.slices:
        shape = " × ".join(f"{axis} {times}" for axis, times in dcn.items())
        message = f"train.mesh.dcn: {shape} spans {count(spanned, 'slice')}, the job has {job.slices}."
        hint = f"its product must be {job.slices}." if job.slices > 1 else "leave it out, or set slices."
        yield Fault((*MESH, "dcn"), message, hint)
    for axis, times in dcn.items():
        if sizes[axis] % times:
            message = f"train.mesh.dcn.{axis} = {times} does not divide {axis} = {sizes[axis]}."
            yield Fault((*MESH, "dcn", axis), message, f"use {either(divisors(sizes[axis], near=times))}.")


def batch_faults(job: JobSpec) -> Iterator[Fault]:
    """A batch that does not split into equal shards and micro-batches. Only of a mesh that fits the devices."""
    if job.train is None or not fits(job):
        return
    train = job.train
    if not _is_known(train, "batch"):
        return
    sizes = dict(zip(BATCH_AXES, train.mesh.resolve(job.devices), strict=False))
    parts = math.prod(sizes.values()) * train.accumulate
    if train.batch % parts:
        below, above = train.batch // parts * parts, -(-train.batch // parts) * parts
        shape = said(sizes) + (f" × accumulate {train.accumulate}" if train.accumulate > 1 else "")
        message = f"train.batch = {train.batch} is not divisible by {shape} = {parts}."
        yield Fault(("train", "batch"), message, f"use {either([size for size in (below, above) if size])}.")


def model_faults(job: JobSpec) -> Iterator[Fault]:
    """Sizes of a built-in model that do not split over mp or ep. Only of a mesh that fits the devices."""
    if job.train is None or not fits(job) or not _is_known(job.train, "model"):
        return
    model, (_, _, ep, mp) = job.train.model, job.train.mesh.resolve(job.devices)
    yield from _expert_faults(job.train, ep)
    for key in SPLIT_BY_MP.get(model.kind, ()):
        size = getattr(model, key)
        if isinstance(model, Published) and model.is_partial and key not in model.model_fields_set:
            continue  # the folder that it starts from says it
        if size is not None and size % mp:
            message = f"train.model.{key} = {size} does not split over train.mesh.mp = {mp}."
            yield Fault(("train", "model", key), message, f"use a multiple of {mp}, or another mp.")


def _expert_faults(train: TrainSpec, ep: int) -> Iterator[Fault]:
    """Experts that do not split over ep, or none."""
    model = train.model
    experts = model.experts if isinstance(model, Decoder) else None
    is_partial = isinstance(model, Published) and model.is_partial
    if ep == 1 or isinstance(model, CustomModel) or (is_partial and experts is None):
        return
    if experts is None:
        message = f"train.mesh.ep = {ep} splits experts, and train.model has none."
        yield Fault((*MESH, "ep"), message, "give train.model.experts, or use dp or fsdp.")
    elif experts % ep:
        message = f"train.model.experts = {experts} does not split over train.mesh.ep = {ep}."
        yield Fault(("train", "model", "experts"), message, f"use a multiple of {ep}, or another ep.")


def _is_known(train: TrainSpec, key: str) -> bool:
    """Whether `key` will be what the spec says: a task of the user's may bring a default of its own."""
    return train.task in TASK_DEFAULTS or key in train.model_fields_set


def row_faults(job: JobSpec) -> Iterator[Fault]:
    """Processes whose parts of the batch overlap, are not equal or not contiguous (trainer/parallel/mesh.py: rows).

    On TPU the torus decides which devices hold what, and the mesh is the one to tell.
    """
    if KNOWN[job.accelerator.type].platform == "tpu":
        return
    if job.train is None or not fits(job) or job.devices > _MOST_SIMULATED or job.devices % job.processes:
        return
    sizes, dcn = job.train.mesh.resolve(job.devices), job.train.mesh.dcn
    across = [dcn.get(axis, 1) for axis in ("dp", "fsdp", "ep", "mp")]
    if math.prod(across) != job.slices or any(size % times for size, times in zip(sizes, across, strict=True)):
        return
    inside = [size // times for size, times in zip(sizes, across, strict=True)]
    shards: list[int] = []  # of each device in the order of processes: which part of the batch it holds
    for place in itertools.product(*(range(size) for size in (*across, *inside))):
        part = 0
        for axis in range(len(BATCH_AXES)):
            part = part * sizes[axis] + place[axis] * inside[axis] + place[len(sizes) + axis]
        shards.append(part)
    size = job.devices_per_process
    held = [tuple(sorted(set(shards[start : start + size]))) for start in range(0, len(shards), size)]
    torn = [process for process, parts in enumerate(held) if parts[-1] - parts[0] + 1 != len(parts)]
    if torn and sum(map(len, set(held))) != math.prod(sizes[: len(BATCH_AXES)]):
        message = f"train.mesh: process {torn[0]} holds rows of the batch that are not contiguous and overlap others'."
        yield Fault(MESH, message, "let dp, not fsdp, span slices, or give each process fewer devices.")


def fits(job: JobSpec) -> bool:
    """Whether the mesh is one of the job's devices."""
    try:
        return job.train is not None and job.host_count <= MOST_PODS and bool(job.train.mesh.resolve(job.devices))
    except ValueError:
        return False
