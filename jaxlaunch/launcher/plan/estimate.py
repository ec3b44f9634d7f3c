"""What a job will need: bytes of a device, whether they fit, what is requested of the cluster. Pure.

Bytes come from the trainer's own shapes (launcher/plan/shapes); here they are compared with the accelerator's memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlaunch.accelerators import KNOWN
from jaxlaunch.launcher.agent.host.environment import MEMORY_SHARE, NEW_MEMORY_SHARE, TRAINER
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.kubernetes import pod_rules
from jaxlaunch.launcher.kubernetes import resources as demand
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.kubernetes.resources import parse_quantity
from jaxlaunch.launcher.manifests.jobset import ResolvedJob
from jaxlaunch.launcher.platforms import table
from jaxlaunch.launcher.platforms.facts import GPU_PRODUCT
from jaxlaunch.launcher.wording import size
from jaxlaunch.trainer.spec import Decoder, TrainSpec

Shapes = Mapping[str, Any]  # what trainer/plan prints
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


def memory(job: JobSpec, node_labels: Mapping[str, Sequence[str]]) -> Memory | None:
    """What the job's devices have for it, on nodes with one of these values of each label; None where neither the job
    nor the accelerator's name says it."""
    known = KNOWN[job.accelerator.type]
    if known.platform == "cpu":
        if job.resources.memory is None:
            return None
        devices, given = job.accelerator.devices_per_host, job.resources.memory
        return Memory((float(parse_quantity(given)) / devices,), f"a host's {given} / {devices}, with the program")
    share = _share(job) if known.platform == "cuda" else 1.0
    told = job.accelerator.memory
    makes = _makes(known.memory_gib, node_labels) if told is None else [float(parse_quantity(told)) / GIB]
    if not makes:
        return None
    sizes = " or ".join(f"{size:g} GiB" for size in makes)
    part = f"{share:.0%} of {sizes}: JAX's part of {job.accelerator.type}" if share < 1 else job.accelerator.type
    return Memory(tuple(size * share * GIB for size in makes), part)


def _makes(sizes: Sequence[float], node_labels: Mapping[str, Sequence[str]]) -> Sequence[float]:
    """The makes that the labels admit, of those that an accelerator comes in: all where no label tells them apart."""
    named = [value for values in node_labels.values() for value in values if value in table.MEMORY_GB]
    found = {min(sizes, key=lambda size: abs(size - table.MEMORY_GB[value])) for value in named}
    return sorted(found) or sizes


def _choice(sizes: Sequence[float], node_labels: Mapping[str, Sequence[str]]) -> str:
    """A label of nodes with the largest make, of those that the job admits."""
    for key, values in node_labels.items():
        for value in values:
            if value in table.MEMORY_GB and _makes(sizes, {key: [value]}) == [sizes[-1]]:
                return f"{key}: {value}"
    return f"{GPU_PRODUCT}: …"


def _share(job: JobSpec) -> float:
    share = job.env.get(MEMORY_SHARE) or job.env.get(NEW_MEMORY_SHARE) or TRAINER["cuda"][MEMORY_SHARE]
    try:
        return float(share)
    except ValueError:
        return float(TRAINER["cuda"][MEMORY_SHARE])


def together(shapes: Shapes, remat: str = "asked") -> tuple[int, int]:
    """Bytes of one device at the peak of a step, or of the samples of an evaluation, at least and at most."""
    held = sum(shapes["device"].values())
    low, high = (max(much, shapes["samples"]) for much in shapes["activations"][remat])
    return held + low, held + high


def verdict(
    job: JobSpec, train: TrainSpec, shapes: Shapes, node_labels: Mapping[str, Sequence[str]] | None = None
) -> Verdict:
    """Whether what a device holds fits into what it has, on nodes with one of these values of each label."""
    have, (low, high) = memory(job, node_labels or {}), together(shapes)
    if have is None:
        kind = job.accelerator.type
        key = "a host has: resources.memory" if kind == "cpu" else f"a {kind} has: accelerator.memory, such as 24Gi"
        return Verdict(None, "whether that fits is not known", f"say how much memory {key}.")
    smallest, largest = have.usable[0], have.usable[-1]
    room = f"{size(smallest)} ({have.of})"
    if low > largest:
        return Verdict(
            False, f"does not fit into {size(largest)} ({have.of})", _cure(train, job.devices, shapes, largest)
        )
    if high <= smallest:
        return Verdict(True, f"fits into {room}")
    if high <= largest:
        kind = job.accelerator.type
        make = f"the {KNOWN[kind].memory_gib[-1]:.0f} GB {kind.upper()}"
        choice = _choice(KNOWN[kind].memory_gib, node_labels or {})
        return Verdict(
            None,
            f"fits {make} only: {size(largest)} ({have.of})",
            f"choose nodes with {make} by node_selector, such as {{{choice}}}.",
        )
    return Verdict(None, f"may not fit into {room}", "the compiler decides how much mp splits: --compile measures it.")


def _cure(train: TrainSpec, devices: int, shapes: Shapes, room: float) -> str:
    """The one change that would make it fit, where one does."""
    if together(shapes, "full")[1] <= room:
        return f"train.remat: full needs {size(together(shapes, 'full')[1])}."
    state = sum(bytes for name, bytes in shapes["device"].items() if name != "batch")
    dp = train.mesh.resolve(devices)[0]
    if state > room / 2 and dp > 1:
        return f"the state alone takes {size(state)}: train.mesh.fsdp splits it, dp copies it."
    if state > room / 2:
        axes = "fsdp, ep or mp" if isinstance(train.model, Decoder) and train.model.experts else "fsdp or mp"
        return f"the state alone takes {size(state)}: ask for more devices under train.mesh.{axes}."
    return "use a smaller batch or more train.accumulate, in addition to train.remat: full."


# --- the cluster ------------------------------------------------------------------------------------------------------


def asked(job: ResolvedJob, jobset: Mapping[str, Any]) -> dict[str, Any]:
    """What will be requested of the cluster."""
    each, all_pods = demand.pod_requests(pod_template(jobset)["spec"]), demand.job_requests(jobset)
    return {
        "platform": job.nodes.platform,
        "queue": job.nodes.queue,
        "pods": demand.count_pods(jobset),
        "per_pod": {name: demand.format_quantity(name, much) for name, much in each.items()},
        "together": {name: demand.format_quantity(name, much) for name, much in all_pods.items()},
    }


def security(jobset: Mapping[str, Any]) -> dict[str, Any]:
    """The Pod Security level that a namespace may enforce, and what keeps the pods from a stricter one."""
    met = pod_rules.strictest_level(pod_template(jobset))
    above = pod_rules.stricter_level(met)
    because = (
        [] if above is None else [str(broken) for broken in pod_rules.find_violations(pod_template(jobset), above)]
    )
    return {"level": met, "because": because}


def ingress(job: ResolvedJob) -> str:
    """Who can connect to the job's pods."""
    ports = (
        f"ports {job.network.ports.leader} (agents) and {job.network.ports.metrics} (metrics), and JAX's coordinator"
    )
    if job.network.chosen == "hostnetwork":
        where = "are on the nodes' own addresses, which no NetworkPolicy protects: close them in the nodes' firewall"
        return f"anyone who reaches the nodes; {ports}, {where}"
    if not job.spec.network_policy:
        return f"anyone whom the namespace's other NetworkPolicies admit; {ports}, are open where there is none"
    named = job.network.prometheus.namespace
    return f"its own hosts, and Prometheus in {'any namespace' if named is None else f'namespace {named}'}"


def checkpoints(train: TrainSpec, folder: str | None, shapes: Shapes) -> dict[str, Any]:
    """What the checkpoints take: one more than are kept while one is being written."""
    one, kept = shapes["checkpoint"], train.checkpoint.kept()
    return {"folder": folder, "bytes": one, "kept": kept, "most": one * (kept + 1)}
