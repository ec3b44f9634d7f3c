"""Which nodes fit a pod by labels, taints and allocatable resources; other pods on them are not counted. Pure.

The scheduler counts the nodes that do not fit by reason, but names neither taint nor label: this does.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.kubernetes.quantity import amount
from jaxlaunch.launcher.kubernetes.requests import of_pod, requested_by, written

_REPELLING = ("NoSchedule", "NoExecute")


@dataclasses.dataclass(frozen=True)
class Fit:
    """How many nodes are left after each filter."""

    total: int
    selected: int  # have the labels
    tolerated: int  # ... and no taint that bars it
    large: int  # ... and would fit it if they were empty
    absent: Mapping[str, str]  # labels of the nodeSelector that no node has with that value
    offered: Mapping[str, Sequence[str]]  # ... and the values that nodes have for them
    taints: Mapping[str, int]  # of the selected nodes: the taint, and how many have it
    short: Mapping[str, tuple[str, str]]  # resource -> requested, and the most that a tolerated node has


def fit(spec: Obj, nodes: Sequence[Obj]) -> Fit:
    """Filters the nodes for the pod of `spec`."""
    wanted: Mapping[str, str] = spec.get("nodeSelector") or {}
    selected = [node for node in nodes if _labels(node).items() >= wanted.items()]
    untolerated = {id(node): _untolerated(node, spec.get("tolerations") or ()) for node in selected}
    tolerated = [node for node in selected if not untolerated[id(node)]]
    requested = of_pod(spec)
    large = [node for node in tolerated if all(_has(node, name) >= much for name, much in requested.items())]
    absent = {key: value for key, value in wanted.items() if not any(_labels(node).get(key) == value for node in nodes)}
    return Fit(
        total=len(nodes),
        selected=len(selected),
        tolerated=len(tolerated),
        large=len(large),
        absent=absent,
        offered={key: sorted({_labels(node)[key] for node in nodes if key in _labels(node)}) for key in absent},
        taints=Counter(taint for taints in untolerated.values() for taint in taints),
        short=_short(requested, tolerated, spec),
    )


def _labels(node: Obj) -> Mapping[str, str]:
    labels: Mapping[str, str] = node["metadata"].get("labels") or {}
    return labels


def _has(node: Obj, resource: str) -> Decimal:
    found = (node.get("status", {}).get("allocatable") or {}).get(resource)
    return Decimal(0) if found is None else amount(str(found))


def _short(requested: Mapping[str, Decimal], nodes: Sequence[Obj], spec: Obj) -> dict[str, tuple[str, str]]:
    """Resources of which no single node has enough, both quantities as written."""
    by_job = _written(spec)
    found = {}
    for name, much in requested.items():
        largest = max(nodes, key=lambda node: _has(node, name), default=None)
        if largest is not None and _has(largest, name) < much:
            text = by_job.get(name, "")
            each = text if text and amount(text) == much else written(name, much)
            found[name] = each, str((largest["status"].get("allocatable") or {}).get(name, "0"))
    return found


def _written(spec: Obj) -> dict[str, str]:
    """Requests of the containers as the job writes them."""
    return {name: text for one in spec.get("containers") or () for name, text in requested_by(one).items()}


def _untolerated(node: Obj, tolerations: Iterable[Mapping[str, Any]]) -> list[str]:
    """The taints of a node that the pod does not tolerate, as kubectl writes them."""
    tolerated = list(tolerations)
    taints = [taint for taint in node.get("spec", {}).get("taints") or () if taint.get("effect") in _REPELLING]
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
