"""Causes of pods without a node: claims, labels, taints, resources, the scheduler. Pure functions.

The scheduler's message counts nodes by reason. If the nodes could be read, the cause is found from
them instead: they show which values the nodes have and what the largest of them could hold.
"""

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
# A scheduler with many pods in its queue has looked at each within this time.
_SCHEDULER_DELAY_S = 15.0
_INSUFFICIENT = re.compile(r"(\d+) Insufficient ([^,.\s]+(?:\.[^,.\s]+)*)")
_VOLUME_AFFINITY = re.compile(
    r"node\(s\) (?:had volume node affinity conflict|didn't match PersistentVolume's node affinity)"
)

# Reasons of the events of the Cluster Autoscaler, of Karpenter and of ProvisioningRequests.
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
    waiting_hosts = [host for host in snapshot.hosts if host.unscheduled and not host.is_leaving]
    if not waiting_hosts:
        return _explain_ignored_pods(snapshot)
    message = waiting_hosts[0].unscheduled.get("message", "")
    group = host_group(waiting_hosts, snapshot)
    # Events about the pods of earlier attempts do not count.
    event = snapshot.find_event(*_AUTOSCALER_EVENTS, kind="Pod", on_hosts=waiting_hosts)
    evidence = describe_event(event)
    if message:
        evidence = (
            Text("Pod {pod}: {message}", pod=waiting_hosts[0].pod, message=message),
            *evidence,
        )
    if all(host.unscheduled.get("reason") == "SchedulingGated" for host in waiting_hosts):
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
    event = event or snapshot.find_event(
        "FailedScheduling", kind="Pod", on_hosts=waiting_hosts, by="karpenter"
    )
    if event is None:
        return answer
    template = "; the autoscaler adds no node: {message}"
    return answer.append_to_headline(Text(template, message=event["message"]))


def _explain_ignored_pods(snapshot: Snapshot) -> Answer | None:
    """Explain pods without a node that no scheduler has considered."""
    waiting_hosts = [
        host
        for host in snapshot.hosts
        if host.node is None and not host.is_leaving and not host.has_ended
    ]
    ages_s = (seconds_since(host.created_at, snapshot.now) or 0.0 for host in waiting_hosts)
    waited_s = min(ages_s, default=0.0)
    if waited_s < _SCHEDULER_DELAY_S:
        return None
    group = host_group(waiting_hosts, snapshot)
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
    """Explain a PersistentVolumeClaim that is missing, unbound, in use or on no reachable node."""
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
        headline = _describe_one_of(claims) + Text(" is not bound")
        if event is not None:
            # Events with the same message about several claims are folded into one.
            claims = event["names"]
            template = (
                "PersistentVolumeClaim{claims:|s} {claims: and } {claims:is|are} not bound: {why}"
            )
            headline = Text(template, claims=claims, why=event["message"])
        step = advise_change(
            "{describe}: it needs a StorageClass that provisions, or a matching PersistentVolume.",
            describe=kubectl_command("describe", "pvc", *claims),
        )
        return waiting_answer("claim-unbound", headline, (*evidence, *describe_event(event)), step)
    if _SINGLE_POD_TEXT in message:
        reason = Text(" is ReadWriteOncePod, and another pod uses it")
        return waiting_answer("claim-in-use", _describe_one_of(claims) + reason, evidence)
    if _VOLUME_AFFINITY.search(message):
        reason = Text("volume node affinity conflict: no free node can mount the volume")
        return _unschedulable_answer("volume-affinity", group, reason, evidence)
    return None


def _describe_one_of(claims: Sequence[str]) -> Text:
    """Describe the claim that a message of the scheduler is about, which does not name it."""
    if not claims:
        return Text("a PersistentVolumeClaim of the pods")
    template = "PersistentVolumeClaim {claims}"
    if len(claims) > 1:
        template = "one of the PersistentVolumeClaims {claims: and }"
    return Text(template, claims=list(claims))


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
    """Explain that no node fits, by the first requirement that no node meets."""
    if snapshot.nodes is None:
        return _explain_by_message(message, group, evidence)
    pods = {pod["metadata"]["name"]: pod for pod in snapshot.pods}
    waiting_hosts = (host for host in snapshot.hosts if host.unscheduled and not host.is_leaving)
    # The pod's own spec has priority over the template, since admission may have changed it.
    spec = {
        **pod_template(snapshot.jobset).get("spec", {}),
        **pods[next(waiting_hosts).pod]["spec"],
    }
    fit = fit_nodes(spec, snapshot.nodes)
    counts = Text(
        "{fit.total:node} in the cluster: {fit.selected} with its labels, {fit.tolerated} of these "
        "without an untolerated taint, {fit.large} of these large enough when empty",
        fit=fit,
    )
    details = (*evidence, counts)
    if fit.total == 0:
        reason = Text("the cluster has no nodes")
        return _unschedulable_answer("no-nodes", group, reason, details, _NODES_STEP)
    if fit.selected == 0:
        reason = _describe_missing_label(fit, spec)
        return _unschedulable_answer("node-selector", group, reason, details, _LABELS_STEP)
    if fit.tolerated == 0:
        return _explain_taint(fit, snapshot.nodes, group, details)
    if fit.large == 0:
        template = "{requested} {name}, the largest node has {most}"
        parts = [
            Text(template, requested=requested, name=name, most=most)
            for name, (requested, most) in fit.shortages.items()
        ] or [Text("more than any single node has")]
        reason = Text("each host requests {parts:; }", parts=parts)
        return _unschedulable_answer("resource", group, reason, details, _NODES_STEP)
    return _explain_full_nodes(fit, message, group, details)


def _describe_missing_label(fit: NodeFit, spec: Obj) -> Text:
    for key, value in fit.missing_labels.items():
        offered = [shorten_text(label) for label in fit.offered_values[key][:5]]
        template = "no node has label {key}={value}; "
        template += "nodes have {key}={offered}" if offered else "no node has a label {key}"
        return Text(template, key=key, value=value, offered=offered)
    labels = [f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items()]
    return Text("no node has all of the labels {labels}", labels=labels)


def _explain_taint(
    fit: NodeFit, nodes: Sequence[Obj], group: HostGroup, evidence: Evidence
) -> Answer:
    taint, node_count = max(fit.untolerated_taints.items(), key=lambda item: item[1])
    other_count = len(fit.untolerated_taints) - 1
    template = (
        "untolerated taint {taint} (and {more} more)"
        if other_count
        else "untolerated taint {taint}"
    )
    template += " on {number} of {nodes:node}"
    reason = Text(template, taint=taint, more=other_count, number=node_count, nodes=fit.selected)
    condition = _CONDITION_BY_TAINT.get(taint.partition(":")[0])
    step = advise_change("add a toleration (tolerations: in job.yaml), or select other nodes.")
    if taint.startswith("node.kubernetes.io/unschedulable"):
        step = advise_change("nodes are cordoned: kubectl uncordon them, or wait.")
    elif condition is not None:
        words = ["describe", "node"]
        # Trimmed nodes have only those conditions that indicate a problem.
        unhealthy = next((node for node in nodes if find_condition(node, condition)), None)
        if unhealthy is not None:
            words.append(unhealthy["metadata"]["name"])
            condition_state = find_condition(unhealthy, condition)
            if message := condition_state.get("message") or condition_state.get("reason"):
                reason += Text(": {name}: {message}", name=words[-1], message=message)
        step = advise_wait(
            "wait until such nodes are well, or ask the cluster administrator: {describe}",
            describe=kubectl_command(*words, is_namespaced=False),
        )
    return _unschedulable_answer("taint", group, reason, evidence, step)


# Taints that Kubernetes sets for a condition of the node. Such a node has to recover, so the advice
# is not to tolerate the taint.
_CONDITION_BY_TAINT = {
    "node.kubernetes.io/not-ready": "Ready",
    "node.kubernetes.io/unreachable": "Ready",
    "node.kubernetes.io/network-unavailable": "NetworkUnavailable",
    "node.kubernetes.io/disk-pressure": "DiskPressure",
    "node.kubernetes.io/memory-pressure": "MemoryPressure",
    "node.kubernetes.io/pid-pressure": "PIDPressure",
}


def _explain_full_nodes(fit: NodeFit, message: str, group: HostGroup, evidence: Evidence) -> Answer:
    """Explain that some nodes would fit a host, but not with the pods that are on them now."""
    short_resources = list(dict.fromkeys(name for _, name in _INSUFFICIENT.findall(message)))
    _, _, reasons = _PREEMPTION_PART.split(message)[0].partition(": ")
    # The message is a list of numbers of nodes, each with a reason.
    rules = [
        part.rstrip(".")
        for part in re.split(r", (?=\d+ )", reasons)
        if _PLACEMENT_RULES.search(part)
    ]
    if short_resources:
        reason = Text("insufficient free {short: and }", short=short_resources)
        step = advise_wait("wait until other pods end, request less, or add nodes.")
        answer = _unschedulable_answer("resource", group, reason, evidence, step)
    elif rules:
        answer = _unschedulable_answer("spread", group, Text("{rules}", rules=rules), evidence)
    else:
        answer = _explain_by_message(message, group, evidence)
    return answer.append_to_headline(
        Text("; {nodes:node} would fit a host when empty", nodes=fit.large)
    )


# Beginning of the second part of a scheduler's message, about preemption.
_PREEMPTION_PART = re.compile(r"[.,]? ?(?:no new claims to deallocate,?)? ?preemption:")
_PLACEMENT_RULES = re.compile(
    r"topology spread constraints|pod (?:anti-)?affinity rules|existing pods anti-affinity rules"
)
# Reasons in the messages of the scheduler (Kubernetes 1.28 to 1.35), and the situation of each.
_SITUATION_PATTERNS = (
    (r"Insufficient \S+", "resource"),
    (r"untolerated taint", "taint"),
    (r"didn't match Pod's node affinity/selector", "node-selector"),
    (r"were unschedulable", "taint"),
    (r"didn't have free ports", "ports"),
    (_PLACEMENT_RULES, "spread"),
)


def _explain_by_message(message: str, group: HostGroup, evidence: Evidence) -> Answer:
    """Explain by the scheduler's message, if the nodes are not known or do not show the reason."""
    situations = (
        situation for pattern, situation in _SITUATION_PATTERNS if re.search(pattern, message)
    )
    situation = next(situations, "unschedulable")
    message = _PREEMPTION_PART.split(message)[0]
    step = None if situation == "spread" else _NODES_STEP
    reason = quote_message(message)
    if not message.strip():
        reason = Text("the scheduler has not reported why yet")
    return _unschedulable_answer(situation, group, reason, evidence, step)
