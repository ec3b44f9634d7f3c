"""Quantities, the requests of pods and jobs, and the nodes that fit them. Pure.

The scheduler's message only counts unfit nodes by reason. `fit_nodes` also names the taints, the
labels and the resources.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from jaxlaunch.launcher.kubernetes.objects import Obj

_SCALE = (
    {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1)}
    | {letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", start=1)}
    | {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)}
)
# The form that a job file may use.
QUANTITY_PATTERN = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(" + "|".join(_SCALE) + ")")
# The API server also accepts signs, exponents, and no digit before or after the point. The client's
# parser accepts more, such as NaN and 1_000.
_ANY_QUANTITY = re.compile(
    r"[+-]?([0-9]{1,30}\.?[0-9]{0,30}|\.[0-9]{1,30})([eE][+-]?[0-9]{1,2}|" + "|".join(_SCALE) + ")"
)
_BYTE_RESOURCES = ("memory", "ephemeral-storage", "storage")
_UNITS = tuple((_SCALE[suffix], suffix) for suffix in ("Pi", "Ti", "Gi", "Mi", "Ki"))


def parse_quantity(text: str) -> Decimal:
    """Parse a quantity as the API server does: 32Gi, 500m, 1e12. Raises ValueError."""
    if match := QUANTITY_PATTERN.fullmatch(text):
        return Decimal(match[1]) * _SCALE[match[2]]
    if not _ANY_QUANTITY.fullmatch(text):
        raise ValueError(f"{text} is not a quantity")
    # Imported here, because it imports the whole client, which `render` does not need.
    from kubernetes.utils import quantity

    return Decimal(quantity.parse_quantity(text))


def format_quantity(resource: str, quantity: Decimal) -> str:
    """Format a quantity in its usual unit: `32Gi` of memory, `500m` or `8` of other resources."""
    if resource in _BYTE_RESOURCES or resource.startswith("hugepages-"):
        for unit, suffix in _UNITS:
            if quantity >= unit and quantity % unit == 0:
                return f"{quantity // unit:f}{suffix}"
    rounded = quantity.to_integral_value()
    return f"{rounded:f}" if quantity == rounded else f"{(quantity * 1000).normalize():f}m"


# --- requests -------------------------------------------------------------------------------------


def pod_requests(spec: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return the requests that the scheduler counts for one pod, by resource.

    They are the sum of containers and sidecars, or those of an init container and the sidecars
    before it if that is more, plus the overhead of the RuntimeClass.
    """
    # Requests of the sidecars that have started, and at last those of all containers.
    running: dict[str, Decimal] = {}
    peaks: list[dict[str, Decimal]] = []
    for container in spec.get("initContainers") or ():
        peaks.append(_add_quantities(running, container_requests(container)))
        if container.get("restartPolicy") == "Always":
            running = peaks[-1]
    for container in spec.get("containers") or ():
        running = _add_quantities(running, container_requests(container))
    total: dict[str, Decimal] = {}
    for peak in (*peaks, running):
        for name, quantity in peak.items():
            total[name] = max(quantity, total.get(name, Decimal(0)))
    # Requests of the pod itself replace those of its containers.
    total |= {name: parse_quantity(text) for name, text in container_requests(spec).items()}
    return _add_quantities(total, spec.get("overhead") or {})


def container_requests(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the requests of a container as written. A limit alone is also a request."""
    resources = container.get("resources") or {}
    requests = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: str(text) for name, text in requests.items()}


def _add_quantities(
    quantities: Mapping[str, Decimal], added: Mapping[str, Any]
) -> dict[str, Decimal]:
    sums = dict(quantities)
    for name, text in added.items():
        sums[name] = sums.get(name, Decimal(0)) + parse_quantity(str(text))
    return sums


def count_pods(jobset: Mapping[str, Any]) -> int:
    """Return the number of pods of a JobSet."""
    return sum(_replicated_pods(job) for job in jobset["spec"]["replicatedJobs"])


def job_requests(jobset: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return the requests of all pods of a JobSet, by resource."""
    total: dict[str, Decimal] = {}
    for job in jobset["spec"]["replicatedJobs"]:
        for name, quantity in pod_requests(job["template"]["spec"]["template"]["spec"]).items():
            total[name] = total.get(name, Decimal(0)) + quantity * _replicated_pods(job)
    return total


def _replicated_pods(job: Mapping[str, Any]) -> int:
    return int(job.get("replicas", 1)) * int(job["template"]["spec"].get("parallelism", 1))


# --- nodes ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class NodeFit:
    """Number of nodes that are left after each filter.

    Attributes:
        total: All nodes.
        selected: Nodes with the labels of the nodeSelector.
        tolerated: Selected nodes without an untolerated taint.
        large: Tolerated nodes that would fit the pod if they were empty.
        missing_labels: Labels of the nodeSelector that no node has with that value.
        offered_values: Values that nodes have for these labels.
        untolerated_taints: Number of selected nodes with each untolerated taint.
        shortages: Requested quantity and the largest one of a tolerated node, by resource.
    """

    total: int
    selected: int
    tolerated: int
    large: int
    missing_labels: Mapping[str, str]
    offered_values: Mapping[str, Sequence[str]]
    untolerated_taints: Mapping[str, int]
    shortages: Mapping[str, tuple[str, str]]


def fit_nodes(spec: Obj, nodes: Sequence[Obj]) -> NodeFit:
    """Filter nodes for a pod by labels, taints and size. Other pods do not count."""
    selector: Mapping[str, str] = spec.get("nodeSelector") or {}
    selected = [node for node in nodes if _node_labels(node).items() >= selector.items()]
    node_taints = [_untolerated_taints(node, spec.get("tolerations") or ()) for node in selected]
    tolerated = [node for node, taints in zip(selected, node_taints, strict=True) if not taints]
    requests = pod_requests(spec)
    large = [
        node
        for node in tolerated
        if all(allocatable_quantity(node, name) >= quantity for name, quantity in requests.items())
    ]
    values = {key: {_node_labels(node).get(key) for node in nodes} - {None} for key in selector}
    missing_labels = {key: value for key, value in selector.items() if value not in values[key]}
    return NodeFit(
        total=len(nodes),
        selected=len(selected),
        tolerated=len(tolerated),
        large=len(large),
        missing_labels=missing_labels,
        offered_values={key: sorted(map(str, values[key])) for key in missing_labels},
        untolerated_taints=Counter(taint for taints in node_taints for taint in taints),
        shortages=_find_shortages(spec, requests, tolerated),
    )


def _find_shortages(
    spec: Obj, requests: Mapping[str, Decimal], nodes: Sequence[Obj]
) -> dict[str, tuple[str, str]]:
    """Return the requests that are too large for every node, with the largest node's quantity."""
    written_requests = {
        name: text
        for container in spec.get("containers") or ()
        for name, text in container_requests(container).items()
    }
    shortages = {}
    for name, quantity in requests.items() if nodes else ():
        largest = max(nodes, key=lambda node: allocatable_quantity(node, name))
        if allocatable_quantity(largest, name) < quantity:
            # The notation of the job is kept if it means the same.
            text = written_requests.get(name, "")
            if not text or parse_quantity(text) != quantity:
                text = format_quantity(name, quantity)
            allocatable = (largest["status"].get("allocatable") or {}).get(name, "0")
            shortages[name] = (text, str(allocatable))
    return shortages


def _node_labels(node: Obj) -> Mapping[str, str]:
    labels: Mapping[str, str] = node["metadata"].get("labels") or {}
    return labels


def allocatable_quantity(node: Obj, resource: str, default: str = "0") -> Decimal:
    """Return the allocatable quantity of a resource on a node."""
    allocatable = node.get("status", {}).get("allocatable") or {}
    return parse_quantity(str(allocatable.get(resource, default)))


def _untolerated_taints(node: Obj, tolerations: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the taints of a node that the pod does not tolerate, as kubectl writes them."""
    return [
        f"{taint['key']}{'=' + taint['value'] if taint.get('value') else ''}:{taint['effect']}"
        for taint in node.get("spec", {}).get("taints") or ()
        if taint.get("effect") in ("NoSchedule", "NoExecute")
        and not any(_matches_taint(toleration, taint) for toleration in tolerations)
    ]


def _matches_taint(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    values = [obj.get("value") or "" for obj in (toleration, taint)]
    return toleration.get("key") == taint["key"] and values[0] == values[1]
