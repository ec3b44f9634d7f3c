"""Nodes and the cluster's DNS: is there a place for the pods, and do they find each other. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal

from launcher import fit
from launcher.finding import Finding, Findings, clusters, ok, unknown, warn, yours
from launcher.objects import Obj
from launcher.platforms import GKE_GPU, GKE_TPU, GPU_PRODUCT, INSTANCE, RESOURCE
from launcher.quantity import amount
from launcher.wording import count, either

_KINDS = (GKE_TPU, GKE_GPU, GPU_PRODUCT, INSTANCE)  # the label that names an accelerator, the most telling first


def place(nodes: Sequence[Obj], spec: Obj, pods: int, *, grows: bool) -> Finding:
    """Whether nodes of the labels, taints and size that the pods need exist; `grows`: more may be made on demand."""
    affine = [node for node in nodes if _in_affinity(spec, node)]
    found = fit.fit(spec, affine)
    if found.large:
        return _enough(affine, spec, found, pods, grows)
    what = f"none of {count(len(nodes), 'node')} would take a pod of the job: {_why(found, nodes, affine, spec)}"
    if grows:
        return warn(what, "pods wait until the autoscaler has made such nodes.", "see that a node pool can make them.")
    why = "pods stay Pending, and nothing was seen that makes nodes."
    return yours(what, why, "see accelerator, node_selector and tolerations, or ask for such nodes.")


def _enough(nodes: Sequence[Obj], spec: Obj, found: fit.Fit, pods: int, grows: bool) -> Finding:
    """Room for all pods at once, if nothing else ran."""
    room = sum(_holds(node, fit.requests(spec)) for node in nodes if fit.fit(spec, [node]).large)
    if room >= pods:
        return ok(f"{count(found.large, 'node')} would take the job's {count(pods, 'pod')} if they were empty")
    what = f"{count(found.large, 'node')} would take {room} of the job's {count(pods, 'pod')}, were they empty"
    why = "a gang starts with all of its hosts or not at all."
    return (warn if grows else yours)(what, why, "ask for fewer hosts, or for more nodes.")


def _holds(node: Obj, asked: Mapping[str, Decimal]) -> int:
    """Pods that an empty node has room for."""
    has = node.get("status", {}).get("allocatable") or {}
    rooms = [amount(str(has.get("pods", "110")))]
    rooms += [amount(str(has.get(name, "0"))) // much for name, much in asked.items() if much]
    return int(min(rooms))


def _why(found: fit.Fit, nodes: Sequence[Obj], affine: Sequence[Obj], spec: Obj) -> str:
    """The first question that leaves no node."""
    if nodes and not affine:
        return f"no node has {' or '.join(_wanted(term) for term in _terms(spec))}"
    if not found.selected:
        absent = [f"{key}={value}" for key, value in found.absent.items()]
        offered = [f"nodes have {key}={either(values)}" for key, values in found.offered.items() if values]
        return "; ".join([f"no node has {' and '.join(absent) or 'all of its labels'}", *offered])
    if not found.tolerated:
        return f"taints keep it off: {', '.join(found.taints)}"
    return ", ".join(
        f"it asks {name} {asked}, the most of a node is {most}" for name, (asked, most) in found.short.items()
    )


def _terms(spec: Obj) -> Sequence[Obj]:
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return [term for each in required.get("nodeSelectorTerms") or [] for term in each.get("matchExpressions") or []]


def _in_affinity(spec: Obj, node: Obj) -> bool:
    """Whether a node has one of the values that the job's accelerator goes by; other operators are not judged."""
    labels = node["metadata"].get("labels") or {}
    return all(labels.get(term["key"]) in term["values"] for term in _terms(spec) if term["operator"] == "In")


def _wanted(term: Obj) -> str:
    return f"{term['key']} in {', '.join(term.get('values') or [])}"


def accelerators(nodes: Sequence[Obj]) -> Finding:
    """What accelerators the nodes have, for one who asks without a job."""
    counted: dict[str, Decimal] = {}
    for node in nodes:
        labels, has = node["metadata"].get("labels") or {}, node.get("status", {}).get("allocatable") or {}
        for resource in RESOURCE.values():
            if much := amount(str(has.get(resource, "0"))):
                kind = next((labels[key] for key in _KINDS if key in labels), "of no kind that a label names")
                counted[f"{resource} {kind}"] = counted.get(f"{resource} {kind}", Decimal(0)) + much
    listed = ", ".join(f"{much:f} {kind}" for kind, much in sorted(counted.items())) or "no accelerators"
    return ok(f"{count(len(nodes), 'node')} with {listed}")


def dns(services: Sequence[Obj], ready: int) -> Findings:
    """The cluster's DNS, by which hosts find host 0."""
    if not services:
        what = "whether pods resolve each other's names is not known"
        yield unknown(what, "no Service labelled k8s-app=kube-dns is in kube-system; the DNS may live elsewhere.")
    elif not ready:
        name = services[0]["metadata"]["name"]
        why = "no host finds host 0, and the rendezvous never ends."
        yield clusters(f"the cluster's DNS {name} has no ready endpoint", why, "kubectl -n kube-system get pods")
    else:
        yield ok(f"the cluster's DNS has {count(ready, 'ready endpoint')}; that pods reach it, only a pod can say")
