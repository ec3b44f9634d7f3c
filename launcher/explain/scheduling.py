"""Pods that no node takes: which resource, which taint, which label, how many nodes would do. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from launcher import hosts
from launcher.causes.answer import Answer, quoted, shown, which
from launcher.fit import Fit, fit
from launcher.hosts import Host
from launcher.objects import Obj, template
from launcher.seen import World
from launcher.wording import count, cut

_CLAIM = re.compile(
    r'persistentvolumeclaim "(?P<claim>[^"]+)" (?P<what>not found|is being deleted|bound to non-existent \S+ \S+)'
)
_UNBOUND = "unbound immediate PersistentVolumeClaims"
_RESOURCE = re.compile(r"(\d+) Insufficient ([^,.\s]+(?:\.[^,.\s]+)*)")
_AFFINITY = re.compile(r"node\(s\) (?:had volume node affinity conflict|didn't match PersistentVolume's node affinity)")

# Events of those who make nodes: the Cluster Autoscaler, Karpenter, and what sets off either.
_GROWS = ("TriggeredScaleUp", "Nominated", "ProvisioningRequestAccepted")
_CANNOT = ("NotTriggerScaleUp", "FailedScaleUp", "ScaleUpFailed", "NoCompatibleInstanceTypes")


def unscheduled(world: World) -> Answer | None:
    """Some pods have no node."""
    waiting = [host for host in world.hosts if host.unscheduled and not host.is_leaving]
    if not waiting:
        return None
    message = waiting[0].unscheduled.get("message", "")
    evidence = (*_said(waiting, message), *quoted(world.said(*_GROWS, *_CANNOT)))
    who = which(waiting, world.wanted)
    return (
        _gated(waiting, who, evidence)
        or _claims(world, message, who, evidence)
        or _growing(world, who, evidence)
        or _ungrown(world, _no_node(world, message, who, evidence))
    )


def _said(waiting: Sequence[Host], message: str) -> tuple[str, ...]:
    return (f"Pod {waiting[0].pod}: {shown(message)}",) if message else ()


def _gated(waiting: Sequence[Host], who: str, evidence: tuple[str, ...]) -> Answer | None:
    if any(host.unscheduled.get("reason") != "SchedulingGated" for host in waiting):
        return None
    headline = f"waits: {who} may not be scheduled yet: a scheduling gate holds the pod"
    return Answer(
        "gated", headline, evidence, "whoever set the gate must lift it; Kueue does so when it places the job."
    )


def _claims(world: World, message: str, who: str, evidence: tuple[str, ...]) -> Answer | None:
    """A volume claim that is missing or not bound."""
    if (match := _CLAIM.search(message)) is not None:
        claim, what = match["claim"], match["what"].replace("not found", "does not exist")
        move = f"make the claim {claim} (ReadWriteMany for more than one host), or name another under volumes:."
        return Answer("claim-missing", f"waits: volume claim {claim} {what}", evidence, move)
    if _UNBOUND in message:
        event = world.said("FailedBinding", "ProvisioningFailed", "WaitForFirstConsumer", "ExternalProvisioning")
        claims = ", ".join(hosts.claims(world.jobset or {})) or "a claim"
        said = f": {shown(event['message'])}" if event is not None else ""
        claim = event["names"][0] if event is not None else claims
        move = f"kubectl describe pvc {claim}: it needs a storage class that provisions, or a volume that matches."
        headline = f"waits: volume claim {claim} is not bound{said}"
        return Answer("claim-unbound", headline, (*evidence, *quoted(event)), move)
    if _AFFINITY.search(message):
        headline = f"waits: {who} cannot be where its volume is: no free node reaches it"
        return Answer("volume-affinity", headline, evidence, "use a volume that every zone reaches, or fewer hosts.")
    return None


def _growing(world: World, who: str, evidence: tuple[str, ...]) -> Answer | None:
    """The cluster is making nodes for it, and nothing since says that it cannot."""
    event = world.said(*_GROWS, *_CANNOT)
    if event is None or event["reason"] not in _GROWS:
        return None
    headline = f"waits for nodes that are being made: {who} pending; {shown(event['message'])}"
    return Answer(
        "scaling-up", headline, evidence, "wait: nodes take minutes; without any after that, see the autoscaler."
    )


def _ungrown(world: World, answer: Answer) -> Answer:
    """The same, with why no node is being made for it, where somebody says so."""
    event = world.said(*_GROWS, *_CANNOT) or _karpenter(world)
    if event is None:
        return answer
    headline = f"{answer.headline}; the autoscaler makes no node: {shown(event['message'])}"
    return Answer(answer.situation, headline, answer.evidence, answer.next_move)


def _karpenter(world: World) -> Obj | None:
    """Karpenter refuses with the scheduler's reason, FailedScheduling."""
    return next((one for one in world.events if one["reason"] == "FailedScheduling" and one["by"] == "karpenter"), None)


def _no_node(world: World, message: str, who: str, evidence: tuple[str, ...]) -> Answer:
    """No node takes it: the first thing that rules every node out."""
    spec = template(world.jobset or {}).get("spec", {})
    if world.nodes is None:
        return _by_message(message, who, evidence)
    found = fit(spec, world.nodes)
    lines = (*evidence, f"of {count(found.total, 'node')}: {_counts(found)}")
    if found.total == 0:
        return Answer("no-nodes", f"waits: {who} unscheduled: the cluster has no nodes", lines, _NODES)
    if found.selected == 0:
        return _unlabelled(found, spec, who, lines)
    if found.tolerated == 0:
        return _tainted(found, who, lines)
    if found.large == 0:
        return _too_large(found, who, lines)
    return _taken(found, message, who, lines, evidence)


_NODES = "ask for what the cluster has, or have nodes added."


def _counts(found: Fit) -> str:
    return f"{found.selected} have its labels, {found.tolerated} no taint against it, {found.large} room when empty"


def _unlabelled(found: Fit, spec: Obj, who: str, lines: tuple[str, ...]) -> Answer:
    for key, value in found.absent.items():
        offered = ", ".join(cut(one) for one in found.offered[key][:5])
        has = f"they have {offered}" if offered else "none has that label at all"
        headline = f"waits: {who} unscheduled: no node has label {key}={value}; {has}"
        return Answer("node-selector", headline, lines, "check accelerator, capacity and node_selector: in job.yaml.")
    labels = ", ".join(f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items())
    headline = f"waits: {who} unscheduled: no node has all of {labels}"
    return Answer("node-selector", headline, lines, "check accelerator, capacity and node_selector: in job.yaml.")


def _tainted(found: Fit, who: str, lines: tuple[str, ...]) -> Answer:
    taint, nodes = max(found.taints.items(), key=lambda item: item[1])
    more = f" and {len(found.taints) - 1} others" if len(found.taints) > 1 else ""
    headline = f"waits: {who} unscheduled: taint {taint}{more} bars it from {nodes} of {count(found.selected, 'node')}"
    if taint.startswith("node.kubernetes.io/unschedulable"):
        return Answer("taint", headline, lines, "nodes are cordoned: kubectl uncordon them, or wait.")
    return Answer("taint", headline, lines, "add a toleration (tolerations: in job.yaml), or select other nodes.")


def _too_large(found: Fit, who: str, lines: tuple[str, ...]) -> Answer:
    parts = [f"{asked} {name}, the largest node has {most}" for name, (asked, most) in found.short.items()]
    wants = "; ".join(parts) or "what no single node has all of"
    headline = f"waits: {who} unscheduled: each asks for {wants}"
    return Answer("resource", headline, lines, _NODES)


def _taken(found: Fit, message: str, who: str, lines: tuple[str, ...], evidence: tuple[str, ...]) -> Answer:
    """Nodes that would do exist, and something else on them is in the way."""
    short = dict.fromkeys(name for _, name in _RESOURCE.findall(message))
    nodes = f"{count(found.large, 'node')} would hold a host when empty"
    if short:
        headline = f"waits: {who} unscheduled: not enough {' and '.join(short)} is free; {nodes}"
        return Answer("resource", headline, lines, "wait until something ends, ask for less, or have nodes added.")
    answer = _by_message(message, who, lines)
    return Answer(answer.situation, f"{answer.headline}; {nodes}", answer.evidence, answer.next_move)


# What the scheduler counts nodes by -> the situation. Kubernetes 1.28 to 1.35.
_REASONS = (
    (re.compile(r"Insufficient \S+"), "resource"),
    (re.compile(r"untolerated taint"), "taint"),
    (re.compile(r"didn't match Pod's node affinity/selector"), "node-selector"),
    (re.compile(r"were unschedulable"), "taint"),
    (re.compile(r"didn't have free ports"), "ports"),
)


def _by_message(message: str, who: str, evidence: tuple[str, ...]) -> Answer:
    """The scheduler's own words, where the nodes say no more."""
    situation = next((name for pattern, name in _REASONS if pattern.search(message)), "unschedulable")
    said = shown(message.partition(" preemption:")[0]) or "the scheduler has not said why yet"
    return Answer(situation, f"waits: {who} unscheduled: {said}", evidence, _NODES)
