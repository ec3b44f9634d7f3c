"""What a job will hold before anything is held: bytes of a device, whether they fit, what the cluster is asked. Pure.

Bytes come from the trainer's own shapes (launcher.shapes); here they meet the memory of the accelerator.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from launcher import demand, podsecurity, storage
from launcher.accelerators import KNOWN
from launcher.agent.environment import MEMORY_SHARE, NEW_MEMORY_SHARE, TRAINER
from launcher.fit import requests
from launcher.objects import template
from launcher.placement import platform, queue
from launcher.profile import Profile
from launcher.quantity import amount
from launcher.schema import JobSpec

Shapes = Mapping[str, Any]  # what trainer.plan prints
GIB = 1024**3


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a training may use of one device, of each make that the accelerator comes in."""

    usable: tuple[float, ...]  # bytes, the smallest make first
    of: str  # what that is a part of


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a training fits its devices: None where that is not known."""

    fits: bool | None
    says: str
    hint: str | None = None


def memory(job: JobSpec) -> Memory | None:
    """What the job's devices have for it; None where a CPU job does not say how much memory a host has."""
    known = KNOWN[job.accelerator.type]
    if known.platform == "cpu":
        if job.resources.memory is None:
            return None
        devices, given = job.accelerator.devices_per_host, job.resources.memory
        return Memory((float(amount(given)) / devices,), f"a host's {given} / {devices}, with the program")
    share = _share(job) if known.platform == "cuda" else 1.0
    sizes = " or ".join(f"{size:g} GiB" for size in known.memory_gib)
    part = f"{share:.0%} of {sizes}: JAX's part of {job.accelerator.type}" if share < 1 else job.accelerator.type
    return Memory(tuple(size * share * GIB for size in known.memory_gib), part)


def _share(job: JobSpec) -> float:
    said = job.env.get(MEMORY_SHARE) or job.env.get(NEW_MEMORY_SHARE) or TRAINER["cuda"][MEMORY_SHARE]
    try:
        return float(said)
    except ValueError:
        return float(TRAINER["cuda"][MEMORY_SHARE])


def together(shapes: Shapes, remat: str = "asked") -> tuple[int, int]:
    """Bytes of one device at the height of a step, at least and at most."""
    held = sum(shapes["device"].values())
    low, high = shapes["activations"][remat]
    return held + low, held + high


def verdict(job: JobSpec, shapes: Shapes) -> Verdict:
    """Whether what a device holds fits into what it has."""
    have, (low, high) = memory(job), together(shapes)
    if have is None:
        return Verdict(None, "whether that fits is not known", "say how much memory a host has: resources.memory.")
    smallest, largest = have.usable[0], have.usable[-1]
    room = f"{size(smallest)} ({have.of})"
    if low > largest:
        return Verdict(False, f"does not fit into {size(largest)} ({have.of})", _cure(job, shapes, largest))
    if high <= smallest:
        return Verdict(True, f"fits into {room}")
    if high <= largest:
        return Verdict(None, f"fits only into {size(largest)} ({have.of})", "name those nodes with node_selector.")
    return Verdict(None, f"may not fit into {room}", "how much mp splits, the compiler decides: --compile counts it.")


def _cure(job: JobSpec, shapes: Shapes, room: float) -> str:
    """The one change that would make it fit, where one does."""
    assert job.train is not None
    if together(shapes, "full")[1] <= room:
        return f"train.remat: full needs {size(together(shapes, 'full')[1])}."
    state = sum(bytes for name, bytes in shapes["device"].items() if name != "batch")
    dp, _, _ = job.train.mesh.resolve(job.devices)
    if state > room / 2 and dp > 1:
        return f"the state alone takes {size(state)}: train.mesh.fsdp splits it, dp copies it."
    if state > room / 2:
        return f"the state alone takes {size(state)}: ask for more devices under train.mesh.fsdp or mp."
    return "use a smaller batch or more train.accumulate, beside train.remat: full."


def size(number: float) -> str:
    """`131.2 MiB`."""
    if number < 1000:
        return f"{number:.0f} B"
    units = ("KiB", "MiB", "GiB")
    power = next((power for power in (1, 2) if number / 1024**power < 1000), 3)
    return f"{number / 1024**power:.1f} {units[power - 1]}"


# --- the cluster ------------------------------------------------------------------------------------------------------


def asked(job: JobSpec, profile: Profile, jobset: Mapping[str, Any]) -> dict[str, Any]:
    """What the cluster will be asked for."""
    each, all_pods = requests(template(jobset)["spec"]), demand.together(jobset)
    return {
        "platform": platform(job, profile),
        "queue": queue(job, profile),
        "pods": demand.pods(jobset),
        "per_pod": {name: demand.written(name, much) for name, much in each.items()},
        "together": {name: demand.written(name, much) for name, much in all_pods.items()},
    }


def security(jobset: Mapping[str, Any]) -> dict[str, Any]:
    """The Pod Security level that a namespace may enforce, and what keeps the pods from a stricter one."""
    met = podsecurity.level(template(jobset))
    above = podsecurity.stricter(met)
    because = [] if above is None else [str(broken) for broken in podsecurity.violations(template(jobset), above)]
    return {"level": met, "because": because}


def checkpoints(job: JobSpec, profile: Profile, shapes: Shapes) -> dict[str, Any]:
    """What the checkpoints take: one more than are kept while one is being written."""
    assert job.train is not None
    one, kept = shapes["checkpoint"], job.train.checkpoint.keep
    return {"folder": storage.checkpoints(job, profile), "bytes": one, "kept": kept, "most": one * (kept + 1)}
