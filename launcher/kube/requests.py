"""What a job asks of its cluster in all: sums of Kubernetes quantities, and how people write them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from launcher.fit import requests

_BYTES = ("memory", "ephemeral-storage", "storage")
_UNITS = tuple((Decimal(1024) ** power, f"{letter}i") for power, letter in zip((5, 4, 3, 2, 1), "PTGMK", strict=True))


def pods(jobset: Mapping[str, Any]) -> int:
    """The pods of a JobSet."""
    return sum(_pods(part) for part in jobset["spec"]["replicatedJobs"])


def together(jobset: Mapping[str, Any]) -> dict[str, Decimal]:
    """What all pods of a JobSet ask for, by resource."""
    found: dict[str, Decimal] = {}
    for part in jobset["spec"]["replicatedJobs"]:
        for name, each in requests(part["template"]["spec"]["template"]["spec"]).items():
            found[name] = found.get(name, Decimal(0)) + each * _pods(part)
    return found


def _pods(part: Mapping[str, Any]) -> int:
    return int(part.get("replicas", 1)) * int(part["template"]["spec"].get("parallelism", 1))


def written(name: str, each: Decimal) -> str:
    """A quantity as people write it: `32Gi` of memory, `500m` or `8` of anything else."""
    if name in _BYTES or name.startswith("hugepages-"):
        for unit, suffix in _UNITS:
            if each >= unit and each % unit == 0:
                return f"{each // unit:f}{suffix}"
    whole = each.to_integral_value()
    return f"{whole:f}" if each == whole else f"{(each * 1000).normalize():f}m"


def listed(amounts: Mapping[str, Decimal]) -> str:
    """`cpu 8, memory 32Gi`."""
    return ", ".join(f"{name} {written(name, each)}" for name, each in amounts.items()) or "nothing"
