"""Causes: pods that cannot be scheduled, by resource, taint or label. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxlaunch.launcher.diagnose.explain.answer import Answer, Evidence, waiting_answer
from jaxlaunch.launcher.diagnose.text import (
    HostGroup,
    NextStep,
    Text,
    advise_change,
    advise_wait,
    describe_event,
    host_group,
    kubectl_command,
    quote_message,
)
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import Obj, find_condition, pod_template, seconds_since
from jaxlaunch.launcher.kubernetes.resources import NodeFit, fit_nodes
from jaxlaunch.launcher.wording import shorten_text

_CLAIM_ERROR = re.compile(
    r'persistentvolumeclaim "(?P<claim>[^"]+)" '
    r"(?:(?P<missing>not found)|(?P<deleted>is being deleted)|bound to non-existent \S+ "
    r"(?P<volume>\S+))"
)
_UNBOUND_TEXT = "unbound immediate PersistentVolumeClaims"
_SINGLE_POD_TEXT = "ReadWriteOncePod access mode"
# A scheduler that works on many pods may be behind.
_QUIET_S = 15.0
_INSUFFICIENT = re.compile(r"(\d+) Insufficient ([^,.\s]+(?:\.[^,.\s]+)*)")
_VOLUME_AFFINITY = re.compile(
    r"node\(s\) (?:had volume node affinity conflict|didn't match PersistentVolume's node affinity)"
)

# Events of the Cluster Autoscaler, of Karpenter, and of ProvisioningRequests.
_SCALE_UP_EVENTS = ("TriggeredScaleUp", "Nominated", "ProvisioningRequestAccepted")


_AUTOSCALER_EVENTS = (
    *_SCALE_UP_EVENTS,
    "NotTriggerScaleUp",
    "FailedScaleUp",
    "ScaleUpFailed",
    "NoCompatibleInstanceTypes",
)

_NODES_STEP = advise_change(
    "request what the cluster's nodes have, or ask the cluster administrator to add nodes."
)
_LABELS_STEP = advise_change("check accelerator, capacity and node_selector: in job.yaml.")


def explain_unscheduled(snapshot: Snapshot) -> Answer | None:
    """Explain pods that are Pending without a node."""
    waiting = [host for host in snapshot.hosts if host.unscheduled and not host.is_leaving]
    if not waiting:
        return _explain_ignored_pods(snapshot)
    message = waiting[0].unscheduled.get("message", "")
    group = host_group(waiting, snapshot)
    event = snapshot.find_event(*_AUTOSCALER_EVENTS)
    evidence = describe_event(event)
    if message:
        evidence = (Text("Pod {pod}: {message}", pod=waiting[0].pod, message=message), *evidence)
    if all(host.unscheduled.get("reason") == "SchedulingGated" for host in waiting):
        template = "{hosts} cannot be scheduled yet: the pod has a scheduling gate"
        return waiting_answer("gated", Text(template, hosts=group), evidence)
    if (answer := _explain_claims(snapshot, message, group, evidence)) is not None:
        return answer
    if event is not None and event["reason"] in _SCALE_UP_EVENTS:
        template = "waits for the autoscaler to add nodes: {hosts} {hosts:is|are} pending; {text}"
        headline = Text(template, hosts=group, text=event["message"])
        return Answer("scaling-up", headline, evidence)
    answer = _explain_no_node(snapshot, message, group, evidence)
    # Karpenter's events have the same reason as the scheduler's.
    karpenter_events = (
        event
        for event in snapshot.events
        if event["reason"] == "FailedScheduling" and event["by"] == "karpenter"
    )
    if (event := event or next(karpenter_events, None)) is None:
        return answer
    template = "; the autoscaler adds no node: {message}"
    return answer.append_headline(Text(template, message=event["message"]))


def _explain_ignored_pods(snapshot: Snapshot) -> Answer | None:
    """Explain pods at which no scheduler has looked."""
    waiting = [
        host
        for host in snapshot.hosts
        if host.node is None and not host.is_leaving and not host.has_ended
    ]
    ages_s = (seconds_since(host.created_at, snapshot.now) or 0.0 for host in waiting)
    waited_s = min(ages_s, default=0.0)
    if waited_s < _QUIET_S:
        return None
    group = host_group(waiting, snapshot)
    if (warning := snapshot.newest_warning) is not None and warning["kind"] == "Pod":
        headline = Text("{hosts} cannot be scheduled: {reason}: {message}", **warning, hosts=group)
        step = advise_change("fix what the message names.")
        return waiting_answer("unschedulable", headline, describe_event(warning), step)
    name = pod_template(snapshot.jobset).get("spec", {}).get("schedulerName", "default-scheduler")
    template = "scheduler {name} has not looked at {hosts} in {waited:age}"
    headline = Text(template, name=name, hosts=group, waited=waited_s)
    step = advise_change(
        "check that a scheduler of that name runs; schedulerName under pod: selects another."
    )
    return waiting_answer("unschedulable", headline, next_step=step)


def _explain_claims(
    snapshot: Snapshot, message: str, group: HostGroup, evidence: Evidence
) -> Answer | None:
    """Explain a PersistentVolumeClaim that does not exist, is not bound, or cannot be mounted."""
    claims = hosts.claim_names(snapshot.jobset)
    if match := _CLAIM_ERROR.search(message):
        claim = match["claim"]
        if match["volume"]:
            template = "PersistentVolume {volume} of PersistentVolumeClaim {claim} no longer exists"
            headline = Text(template, volume=match["volume"].strip('".'), claim=claim)
            return waiting_answer("volume-missing", headline, evidence)
        step = advise_change(
            "create the claim {claim} (ReadWriteMany for more than one host), or use another "
            "under volumes:.",
            claim=claim,
        )
        problem = "does not exist" if match["missing"] else "is being deleted"
        headline = Text("PersistentVolumeClaim {claim} " + problem, claim=claim)
        return waiting_answer("claim-missing", headline, evidence, step)
    if _UNBOUND_TEXT in message:
        event = snapshot.find_event(
            "FailedBinding", "ProvisioningFailed", "WaitForFirstConsumer", "ExternalProvisioning"
        )
        claim = ", ".join(claims) or "a claim"
        template, why = "PersistentVolumeClaim {claim} is not bound", ""
        if event is not None:
            claim, why = event["names"][0], event["message"]
            template += ": {why}"
        step = advise_change(
            "{describe}: it needs a StorageClass that provisions, or a matching PersistentVolume.",
            describe=kubectl_command("describe", "pvc", claim),
        )
        headline = Text(template, claim=claim, why=why)
        return waiting_answer("claim-unbound", headline, (*evidence, *describe_event(event)), step)
    if _SINGLE_POD_TEXT in message:
        template = "PersistentVolumeClaim {claims} is ReadWriteOncePod, and another pod uses it"
        return waiting_answer("claim-in-use", Text(template, claims=claims), evidence)
    if _VOLUME_AFFINITY.search(message):
        reason = Text("volume node affinity conflict: no free node can mount the volume")
        return _unschedulable_answer("volume-affinity", group, reason, evidence)
    return None


def _unschedulable_answer(
    situation: str,
    group: HostGroup,
    reason: Text,
    evidence: Evidence,
    next_step: NextStep | None = None,
) -> Answer:
    headline = Text("{hosts} {hosts:is|are} unschedulable: {reason}", hosts=group, reason=reason)
    return waiting_answer(situation, headline, evidence, next_step)


def _explain_no_node(
    snapshot: Snapshot, message: str, group: HostGroup, evidence: Evidence
) -> Answer:
    """Explain that no node fits, by the first requirement that rules out every node."""
    if snapshot.nodes is None:
        return _explain_by_message(message, group, evidence)
    pods = {pod["metadata"]["name"]: pod for pod in snapshot.pods}
    waiting = (host for host in snapshot.hosts if host.unscheduled and not host.is_leaving)
    # Admission may have changed the pod.
    spec = {**pod_template(snapshot.jobset).get("spec", {}), **pods[next(waiting).pod]["spec"]}
    fit = fit_nodes(spec, snapshot.nodes)
    counts = Text(
        "{fit.total:node} in the cluster: {fit.selected} with its labels, {fit.tolerated} of these "
        "without an untolerated taint, {fit.large} of these large enough when empty",
        fit=fit,
    )
    lines = (*evidence, counts)
    if fit.total == 0:
        reason = Text("the cluster has no nodes")
        return _unschedulable_answer("no-nodes", group, reason, lines, _NODES_STEP)
    if fit.selected == 0:
        reason = _describe_missing_label(fit, spec)
        return _unschedulable_answer("node-selector", group, reason, lines, _LABELS_STEP)
    if fit.tolerated == 0:
        return _explain_taint(fit, snapshot.nodes, group, lines)
    if fit.large == 0:
        template = "{requested} {name}, the largest node has {most}"
        parts = [
            Text(template, requested=requested, name=name, most=most)
            for name, (requested, most) in fit.shortages.items()
        ] or [Text("more than any single node has")]
        reason = Text("each host requests {parts:; }", parts=parts)
        return _unschedulable_answer("resource", group, reason, lines, _NODES_STEP)
    return _explain_full_nodes(fit, message, group, lines)


def _describe_missing_label(fit: NodeFit, spec: Obj) -> Text:
    for key, value in fit.missing_labels.items():
        offered = [shorten_text(label) for label in fit.offered_values[key][:5]]
        template = "no node has label {key}={value}; "
        template += "nodes have {key}={offered}" if offered else "no node has a label {key}"
        return Text(template, key=key, value=value, offered=offered)
    labels = [f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items()]
    return Text("no node has all of the labels {labels}", labels=labels)


def _explain_taint(fit: NodeFit, nodes: Sequence[Obj], group: HostGroup, lines: Evidence) -> Answer:
    taint, number = max(fit.untolerated_taints.items(), key=lambda item: item[1])
    more = len(fit.untolerated_taints) - 1
    template = (
        "untolerated taint {taint} (and {more} more)" if more else "untolerated taint {taint}"
    )
    template += " on {number} of {nodes:node}"
    reason = Text(template, taint=taint, more=more, number=number, nodes=fit.selected)
    condition = _CONDITIONS.get(taint.partition(":")[0])
    step = advise_change("add a toleration (tolerations: in job.yaml), or select other nodes.")
    if taint.startswith("node.kubernetes.io/unschedulable"):
        step = advise_change("nodes are cordoned: kubectl uncordon them, or wait.")
    elif condition is not None:
        words = ["describe", "node"]
        unhealthy = next((node for node in nodes if find_condition(node, condition)), None)
        if unhealthy is not None:
            words.append(unhealthy["metadata"]["name"])
            state = find_condition(unhealthy, condition)
            if message := state.get("message") or state.get("reason"):
                reason += Text(": {name}: {message}", name=words[-1], message=message)
        step = advise_wait(
            "wait until such nodes are well, or ask the cluster administrator: {describe}",
            describe=kubectl_command(*words, is_namespaced=False),
        )
    return _unschedulable_answer("taint", group, reason, lines, step)


# Taints that Kubernetes itself sets for a condition of the node, by that condition: no toleration
# makes it well.
_CONDITIONS = {
    "node.kubernetes.io/not-ready": "Ready",
    "node.kubernetes.io/unreachable": "Ready",
    "node.kubernetes.io/network-unavailable": "NetworkUnavailable",
    "node.kubernetes.io/disk-pressure": "DiskPressure",
    "node.kubernetes.io/memory-pressure": "MemoryPressure",
    "node.kubernetes.io/pid-pressure": "PIDPressure",
}


def _explain_full_nodes(fit: NodeFit, message: str, group: HostGroup, lines: Evidence) -> Answer:
    """Explain that nodes which would fit exist, but other pods use them."""
    short = list(dict.fromkeys(name for _, name in _INSUFFICIENT.findall(message)))
    _, _, reasons = _ABOUT_PREEMPTION.split(message)[0].partition(": ")
    # Each part is a number of nodes and a reason.
    rules = [
        part.rstrip(".") for part in re.split(r", (?=\d+ )", reasons) if _RULED_OUT.search(part)
    ]
    if short:
        reason = Text("insufficient free {short: and }", short=short)
        step = advise_wait("wait until other pods end, request less, or add nodes.")
        answer = _unschedulable_answer("resource", group, reason, lines, step)
    elif rules:
        answer = _unschedulable_answer("spread", group, Text("{rules}", rules=rules), lines)
    else:
        answer = _explain_by_message(message, group, lines)
    return answer.append_headline(
        Text("; {nodes:node} would fit a host when empty", nodes=fit.large)
    )


# The reasons by which the scheduler counts nodes, and the situation of each. Kubernetes 1.28 to
# 1.35.
_ABOUT_PREEMPTION = re.compile(r"[.,]? ?(?:no new claims to deallocate,?)? ?preemption:")
_RULED_OUT = re.compile(
    r"topology spread constraints|pod (?:anti-)?affinity rules|existing pods anti-affinity rules"
)
_REASONS = (
    (r"Insufficient \S+", "resource"),
    (r"untolerated taint", "taint"),
    (r"didn't match Pod's node affinity/selector", "node-selector"),
    (r"were unschedulable", "taint"),
    (r"didn't have free ports", "ports"),
    (_RULED_OUT, "spread"),
)


def _explain_by_message(message: str, group: HostGroup, evidence: Evidence) -> Answer:
    """Explain by the scheduler's message, if the nodes are not known or not the reason."""
    situations = (situation for pattern, situation in _REASONS if re.search(pattern, message))
    situation = next(situations, "unschedulable")
    message = _ABOUT_PREEMPTION.split(message)[0]
    step = None if situation == "spread" else _NODES_STEP
    reason = quote_message(message)
    if not message.strip():
        reason = Text("the scheduler has not reported why yet")
    return _unschedulable_answer(situation, group, reason, evidence, step)
