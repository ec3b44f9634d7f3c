"""Which nodes would take a pod, as far as labels, taints and sizes say. Pure; what else runs on them is not asked.

The scheduler counts nodes that refuse by reason and names neither taint nor label: this does.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from launcher.objects import Obj
from launcher.quantity import amount

_BARRING = ("NoSchedule", "NoExecute")


@dataclasses.dataclass(frozen=True)
class Fit:
    """How many nodes are left after each question."""

    total: int
    selected: int  # have the labels
    tolerated: int  # ... and no taint that bars it
    large: int  # ... and would hold it if they were empty
    absent: Mapping[str, str]  # labels asked for that no node has with that value
    offered: Mapping[str, Sequence[str]]  # ... and the values that nodes have there
    taints: Mapping[str, int]  # of the selected nodes, what bars it from how many
    short: Mapping[str, tuple[str, str]]  # resource: asked, and the most that a tolerated node has


def fit(spec: Obj, nodes: Sequence[Obj]) -> Fit:
    """Holds the pod of `spec` against every node."""
    wanted: Mapping[str, str] = spec.get("nodeSelector") or {}
    selected = [node for node in nodes if _labels(node).items() >= wanted.items()]
    barred = {id(node): _barring(node, spec.get("tolerations") or ()) for node in selected}
    tolerated = [node for node in selected if not barred[id(node)]]
    asked = requests(spec)
    large = [node for node in tolerated if all(_has(node, name) >= much for name, much in asked.items())]
    absent = {key: value for key, value in wanted.items() if not any(_labels(node).get(key) == value for node in nodes)}
    return Fit(
        total=len(nodes),
        selected=len(selected),
        tolerated=len(tolerated),
        large=len(large),
        absent=absent,
        offered={key: sorted({_labels(node)[key] for node in nodes if key in _labels(node)}) for key in absent},
        taints=Counter(taint for taints in barred.values() for taint in taints),
        short=_short(asked, tolerated, spec),
    )


def requests(spec: Obj) -> dict[str, Decimal]:
    """What one pod asks for: the sum of its containers, or what an init container asks for alone."""
    total: dict[str, Decimal] = {}
    for container in spec.get("containers") or ():
        for name, much in _asked(container).items():
            total[name] = total.get(name, Decimal(0)) + much
    for container in spec.get("initContainers") or ():
        for name, much in _asked(container).items():
            total[name] = max(total.get(name, Decimal(0)), much)
    return total


def _asked(container: Obj) -> dict[str, Decimal]:
    resources = container.get("resources") or {}
    return {
        name: amount(str(much))
        for name, much in {**resources.get("limits", {}), **resources.get("requests", {})}.items()
    }


def _labels(node: Obj) -> Mapping[str, str]:
    labels: Mapping[str, str] = node["metadata"].get("labels") or {}
    return labels


def _has(node: Obj, resource: str) -> Decimal:
    found = (node.get("status", {}).get("allocatable") or {}).get(resource)
    return Decimal(0) if found is None else amount(str(found))


def _short(asked: Mapping[str, Decimal], nodes: Sequence[Obj], spec: Obj) -> dict[str, tuple[str, str]]:
    """Resources of which no single node has enough, as they are written."""
    written = _written(spec)
    found = {}
    for name, much in asked.items():
        largest = max(nodes, key=lambda node: _has(node, name), default=None)
        if largest is not None and _has(largest, name) < much:
            found[name] = written.get(name, str(much)), str((largest["status"].get("allocatable") or {}).get(name, "0"))
    return found


def _written(spec: Obj) -> dict[str, str]:
    """What the containers ask for as the job writes it, where one container alone asks for it."""
    containers = spec.get("containers") or ()
    both = [
        {**one.get("resources", {}).get("limits", {}), **one.get("resources", {}).get("requests", {})}
        for one in containers
    ]
    names = Counter(name for asked in both for name in asked)
    return {name: str(much) for asked in both for name, much in asked.items() if names[name] == 1}


def _barring(node: Obj, tolerations: Iterable[Mapping[str, Any]]) -> list[str]:
    """The taints of a node that keep the pod off, as kubectl writes them."""
    tolerated = list(tolerations)
    taints = [taint for taint in node.get("spec", {}).get("taints") or () if taint.get("effect") in _BARRING]
    return [_title(taint) for taint in taints if not any(_tolerates(one, taint) for one in tolerated)]


def _title(taint: Mapping[str, Any]) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint['key']}{value}:{taint['effect']}"


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and (toleration.get("value") or "") == (taint.get("value") or "")
