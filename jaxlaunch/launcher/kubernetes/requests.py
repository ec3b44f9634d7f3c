"""What all pods of a job request together, and quantities as people write them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from jaxlaunch.launcher.kubernetes.quantity import amount

_BYTES = ("memory", "ephemeral-storage", "storage")
_UNITS = tuple((Decimal(1024) ** power, f"{letter}i") for power, letter in zip((5, 4, 3, 2, 1), "PTGMK", strict=True))


def of_pod(spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """What the scheduler counts for one pod: its containers and sidecars together, or an init container and the
    sidecars that run before it if that is more; and the overhead of its RuntimeClass."""
    beside: dict[str, Decimal] = {}  # the sidecars that run so far
    total: dict[str, Decimal] = {}
    for container in spec.get("initContainers") or ():
        together = _sum(beside, requested_by(container))
        total |= {name: max(each, total.get(name, Decimal(0))) for name, each in together.items()}
        if container.get("restartPolicy") == "Always":
            beside = together
    for container in spec.get("containers") or ():
        beside = _sum(beside, requested_by(container))
    total |= {name: max(each, total.get(name, Decimal(0))) for name, each in beside.items()}
    total |= {name: amount(text) for name, text in requested_by(spec).items()}  # of the pod in place of its containers'
    return _sum(total, spec.get("overhead") or {})


def requested_by(container: Mapping[str, Any]) -> dict[str, str]:
    """The requests of a container as they are written; a limit alone is a request too."""
    resources = container.get("resources") or {}
    both = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: str(text) for name, text in both.items()}


def _sum(some: Mapping[str, Decimal], more: Mapping[str, Any]) -> dict[str, Decimal]:
    return {**some, **{name: some.get(name, Decimal(0)) + amount(str(much)) for name, much in more.items()}}


def pods(jobset: Mapping[str, Any]) -> int:
    """The number of pods of a JobSet."""
    return sum(_pods(part) for part in jobset["spec"]["replicatedJobs"])


def together(jobset: Mapping[str, Any]) -> dict[str, Decimal]:
    """What all pods of a JobSet request, by resource."""
    found: dict[str, Decimal] = {}
    for part in jobset["spec"]["replicatedJobs"]:
        for name, each in of_pod(part["template"]["spec"]["template"]["spec"]).items():
            found[name] = found.get(name, Decimal(0)) + each * _pods(part)
    return found


def _pods(part: Mapping[str, Any]) -> int:
    return int(part.get("replicas", 1)) * int(part["template"]["spec"].get("parallelism", 1))


def written(name: str, each: Decimal) -> str:
    """A quantity of a resource as people write it: `32Gi` of memory, `500m` or `8` of anything else."""
    if name in _BYTES or name.startswith("hugepages-"):
        for unit, suffix in _UNITS:
            if each >= unit and each % unit == 0:
                return f"{each // unit:f}{suffix}"
    whole = each.to_integral_value()
    return f"{whole:f}" if each == whole else f"{(each * 1000).normalize():f}m"


def listed(amounts: Mapping[str, Decimal]) -> str:
    """`cpu 8, memory 32Gi`."""
    return ", ".join(f"{name} {written(name, each)}" for name, each in amounts.items()) or "nothing"
