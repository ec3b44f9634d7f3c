"""Pods that cannot be scheduled: which resource, taint or label, and how many nodes would fit. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from jaxlaunch.launcher.diagnose.explain.answer import Answer, are, one_line, quoted, which
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.node_fit import Fit, fit
from jaxlaunch.launcher.kubernetes.objects import Obj, age, seconds_since, template
from jaxlaunch.launcher.wording import count, cut

_CLAIM = re.compile(
    r'persistentvolumeclaim "(?P<claim>[^"]+)" (?P<what>not found|is being deleted|bound to non-existent \S+ \S+)'
)
_UNBOUND = "unbound immediate PersistentVolumeClaims"
_SINGLE = "ReadWriteOncePod access mode"
_QUIET_S = 15.0  # a scheduler that works on many pods may be behind
_RESOURCE = re.compile(r"(\d+) Insufficient ([^,.\s]+(?:\.[^,.\s]+)*)")
_AFFINITY = re.compile(r"node\(s\) (?:had volume node affinity conflict|didn't match PersistentVolume's node affinity)")

# Events of the Cluster Autoscaler, of Karpenter, and of ProvisioningRequests.
_GROWS = ("TriggeredScaleUp", "Nominated", "ProvisioningRequestAccepted")
_CANNOT = ("NotTriggerScaleUp", "FailedScaleUp", "ScaleUpFailed", "NoCompatibleInstanceTypes")


def unscheduled(snapshot: Snapshot) -> Answer | None:
    """Some pods are Pending without a node."""
    waiting = [host for host in snapshot.hosts if host.unscheduled and not host.is_leaving]
    if not waiting:
        return _unseen(snapshot)
    message = waiting[0].unscheduled.get("message", "")
    evidence = (*_message(waiting, message), *quoted(snapshot.event(*_GROWS, *_CANNOT)))
    named = which(waiting, snapshot.expected_hosts)
    who = f"{named} {are(waiting)}"
    return (
        _gated(waiting, named, evidence)
        or _claims(snapshot, message, who, evidence)
        or _growing(snapshot, who, evidence)
        or _with_autoscaler(snapshot, _no_node(snapshot, message, who, evidence))
    )


def _unseen(snapshot: Snapshot) -> Answer | None:
    """Pods at which no scheduler has looked."""
    waiting = [host for host in snapshot.hosts if host.node is None and not host.is_leaving and not host.has_ended]
    spent = min((seconds_since(host.created, snapshot.now) or 0.0 for host in waiting), default=0.0)
    if spent < _QUIET_S:
        return None
    who = which(waiting, snapshot.expected_hosts)
    if (warning := snapshot.warning) is not None and warning["kind"] == "Pod":
        headline = f"waits: {who} cannot be scheduled: {warning['reason']}: {one_line(warning['message'])}"
        return Answer("unschedulable", headline, quoted(warning), "fix what the message names.")
    name = template(snapshot.jobset).get("spec", {}).get("schedulerName", "default-scheduler")
    headline = f"waits: scheduler {name} has not looked at {who} in {age(spent)}"
    move = "check that a scheduler of that name runs; schedulerName under pod: selects another."
    return Answer("unschedulable", headline, next_move=move)


def _message(waiting: Sequence[Host], message: str) -> tuple[str, ...]:
    return (f"Pod {waiting[0].pod}: {one_line(message)}",) if message else ()


def _gated(waiting: Sequence[Host], named: str, evidence: tuple[str, ...]) -> Answer | None:
    if any(host.unscheduled.get("reason") != "SchedulingGated" for host in waiting):
        return None
    headline = f"waits: {named} cannot be scheduled yet: the pod has a scheduling gate"
    return Answer("gated", headline, evidence)


def _claims(snapshot: Snapshot, message: str, who: str, evidence: tuple[str, ...]) -> Answer | None:
    """A PersistentVolumeClaim that does not exist or is not bound."""
    if (match := _CLAIM.search(message)) is not None:
        claim, what = match["claim"], match["what"].replace("not found", "does not exist")
        if "non-existent" in what:
            volume = what.rpartition(" ")[2].strip('".')
            headline = f"waits: PersistentVolume {volume} of PersistentVolumeClaim {claim} no longer exists"
            return Answer("volume-missing", headline, evidence)
        move = f"create the claim {claim} (ReadWriteMany for more than one host), or use another under volumes:."
        return Answer("claim-missing", f"waits: PersistentVolumeClaim {claim} {what}", evidence, move)
    if _UNBOUND in message:
        event = snapshot.event("FailedBinding", "ProvisioningFailed", "WaitForFirstConsumer", "ExternalProvisioning")
        claims = ", ".join(hosts.claims(snapshot.jobset)) or "a claim"
        why = f": {one_line(event['message'])}" if event is not None else ""
        claim = event["names"][0] if event is not None else claims
        move = f"kubectl describe pvc {claim}: it needs a StorageClass that provisions, or a matching PersistentVolume."
        headline = f"waits: PersistentVolumeClaim {claim} is not bound{why}"
        return Answer("claim-unbound", headline, (*evidence, *quoted(event)), move)
    if _SINGLE in message:
        claims = ", ".join(hosts.claims(snapshot.jobset))
        headline = f"waits: PersistentVolumeClaim {claims} is ReadWriteOncePod, and another pod uses it"
        return Answer("claim-in-use", headline, evidence)
    if _AFFINITY.search(message):
        headline = f"waits: {who} unschedulable: volume node affinity conflict: no free node can mount the volume"
        return Answer("volume-affinity", headline, evidence)
    return None


def _growing(snapshot: Snapshot, who: str, evidence: tuple[str, ...]) -> Answer | None:
    """An autoscaler adds nodes for it, and no later event says that it cannot."""
    event = snapshot.event(*_GROWS, *_CANNOT)
    if event is None or event["reason"] not in _GROWS:
        return None
    headline = f"waits for the autoscaler to add nodes: {who} pending; {one_line(event['message'])}"
    return Answer("scaling-up", headline, evidence)


def _with_autoscaler(snapshot: Snapshot, answer: Answer) -> Answer:
    """The same answer, with why the autoscaler adds no node, where an event says so."""
    event = snapshot.event(*_GROWS, *_CANNOT) or _karpenter(snapshot)
    if event is None:
        return answer
    headline = f"{answer.headline}; the autoscaler adds no node: {one_line(event['message'])}"
    return Answer(answer.situation, headline, answer.evidence, answer.next_move)


def _karpenter(snapshot: Snapshot) -> Obj | None:
    """An event of Karpenter, whose reason is the scheduler's: FailedScheduling."""
    return next(
        (one for one in snapshot.events if one["reason"] == "FailedScheduling" and one["by"] == "karpenter"), None
    )


def _no_node(snapshot: Snapshot, message: str, who: str, evidence: tuple[str, ...]) -> Answer:
    """No node fits: the first requirement that rules out every node."""
    pods = {pod["metadata"]["name"]: pod for pod in snapshot.pods}
    waiting = next(pods[host.pod]["spec"] for host in snapshot.hosts if host.unscheduled and not host.is_leaving)
    spec = {**template(snapshot.jobset).get("spec", {}), **waiting}  # as admission made it, where that is known
    if snapshot.nodes is None:
        return _by_message(message, who, evidence)
    found = fit(spec, snapshot.nodes)
    lines = (*evidence, f"{count(found.total, 'node')} in the cluster: {_counts(found)}")
    if found.total == 0:
        return Answer("no-nodes", f"waits: {who} unschedulable: the cluster has no nodes", lines, _NODES)
    if found.selected == 0:
        return _unlabelled(found, spec, who, lines)
    if found.tolerated == 0:
        return _tainted(found, snapshot.nodes, who, lines)
    if found.large == 0:
        return _too_large(found, who, lines)
    return _taken(found, message, who, lines, evidence)


_NODES = "request what the cluster's nodes have, or ask the cluster administrator to add nodes."


def _counts(found: Fit) -> str:
    return (
        f"{found.selected} with its labels, {found.tolerated} of these without an untolerated taint, "
        f"{found.large} of these large enough when empty"
    )


def _unlabelled(found: Fit, spec: Obj, who: str, lines: tuple[str, ...]) -> Answer:
    for key, value in found.absent.items():
        offered = ", ".join(cut(one) for one in found.offered[key][:5])
        has = f"nodes have {key}={offered}" if offered else f"no node has a label {key}"
        headline = f"waits: {who} unschedulable: no node has label {key}={value}; {has}"
        return Answer("node-selector", headline, lines, "check accelerator, capacity and node_selector: in job.yaml.")
    labels = ", ".join(f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items())
    headline = f"waits: {who} unschedulable: no node has all of the labels {labels}"
    return Answer("node-selector", headline, lines, "check accelerator, capacity and node_selector: in job.yaml.")


def _tainted(found: Fit, nodes_seen: Sequence[Obj], who: str, lines: tuple[str, ...]) -> Answer:
    taint, nodes = max(found.taints.items(), key=lambda item: item[1])
    more = f" (and {len(found.taints) - 1} more)" if len(found.taints) > 1 else ""
    where = f"{nodes} of {count(found.selected, 'node')}"
    headline = f"waits: {who} unschedulable: untolerated taint {taint}{more} on {where}"
    if taint.startswith("node.kubernetes.io/unschedulable"):
        return Answer("taint", headline, lines, "nodes are cordoned: kubectl uncordon them, or wait.")
    if (kind := _OF_CONDITIONS.get(taint.partition(":")[0])) is not None:
        name, says = next(_unwell(nodes_seen, kind), ("", ""))
        move = f"wait until such nodes are well, or ask the cluster administrator: kubectl describe node {name}".strip()
        return Answer("taint", headline + (f": {name}: {one_line(says)}" if says else ""), lines, move)
    return Answer("taint", headline, lines, "add a toleration (tolerations: in job.yaml), or select other nodes.")


# Taints that Kubernetes itself sets for a condition of the node, by that condition: no toleration makes it well.
_OF_CONDITIONS = {
    "node.kubernetes.io/not-ready": "Ready",
    "node.kubernetes.io/unreachable": "Ready",
    "node.kubernetes.io/network-unavailable": "NetworkUnavailable",
    "node.kubernetes.io/disk-pressure": "DiskPressure",
    "node.kubernetes.io/memory-pressure": "MemoryPressure",
    "node.kubernetes.io/pid-pressure": "PIDPressure",
}


def _unwell(nodes_seen: Sequence[Obj], kind: str) -> Iterator[tuple[str, str]]:
    """The nodes with a condition of this kind that is not as it should be, and what it says."""
    for node in nodes_seen:
        for one in node.get("status", {}).get("conditions", ()):
            if one["type"] == kind:
                yield node["metadata"]["name"], one.get("message") or one.get("reason") or ""


def _too_large(found: Fit, who: str, lines: tuple[str, ...]) -> Answer:
    parts = [f"{requested} {name}, the largest node has {most}" for name, (requested, most) in found.short.items()]
    wants = "; ".join(parts) or "more than any single node has"
    headline = f"waits: {who} unschedulable: each host requests {wants}"
    return Answer("resource", headline, lines, _NODES)


def _taken(found: Fit, message: str, who: str, lines: tuple[str, ...], evidence: tuple[str, ...]) -> Answer:
    """Nodes that would fit exist, but other pods use them."""
    short = dict.fromkeys(name for _, name in _RESOURCE.findall(message))
    nodes = f"{count(found.large, 'node')} would fit a host when empty"
    if short:
        headline = f"waits: {who} unschedulable: insufficient free {' and '.join(short)}; {nodes}"
        return Answer("resource", headline, lines, "wait until other pods end, request less, or add nodes.")
    if (rules := [text for text in _counted(message) if _RULED_OUT.search(text)]) != []:
        return Answer("spread", f"waits: {who} unschedulable: {', '.join(rules)}; {nodes}", lines)
    answer = _by_message(message, who, lines)
    return Answer(answer.situation, f"{answer.headline}; {nodes}", answer.evidence, answer.next_move)


# The reasons by which the scheduler counts nodes -> the situation. Kubernetes 1.28 to 1.35.
_ABOUT_PREEMPTION = re.compile(r"[.,]? ?(?:no new claims to deallocate,?)? ?preemption:")
_RULED_OUT = re.compile(r"topology spread constraints|pod (?:anti-)?affinity rules|existing pods anti-affinity rules")
_REASONS = (
    (re.compile(r"Insufficient \S+"), "resource"),
    (re.compile(r"untolerated taint"), "taint"),
    (re.compile(r"didn't match Pod's node affinity/selector"), "node-selector"),
    (re.compile(r"were unschedulable"), "taint"),
    (re.compile(r"didn't have free ports"), "ports"),
    (_RULED_OUT, "spread"),
)


def _by_message(message: str, who: str, evidence: tuple[str, ...]) -> Answer:
    """The scheduler's own message, where the nodes are not known or do not explain it."""
    situation = next((name for pattern, name in _REASONS if pattern.search(message)), "unschedulable")
    why = one_line(_ABOUT_PREEMPTION.split(message)[0]) or "the scheduler has not reported why yet"
    move = None if situation == "spread" else _NODES
    return Answer(situation, f"waits: {who} unschedulable: {why}", evidence, move)


def _counted(message: str) -> list[str]:
    """The parts of the scheduler's message, each a reason and how many nodes it rules out."""
    _, _, reasons = _ABOUT_PREEMPTION.split(message)[0].partition(": ")
    return [text.rstrip(".") for text in re.split(r", (?=\d+ )", reasons)]
