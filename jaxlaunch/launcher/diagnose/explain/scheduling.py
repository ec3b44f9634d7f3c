"""Causes: pods that cannot be scheduled, by resource, taint or label. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from jaxlaunch.launcher.diagnose.explain.answer import Answer, Evidence, waiting_answer
from jaxlaunch.launcher.diagnose.text import (
    HostGroup,
    Text,
    advise_change,
    advise_wait,
    describe_event,
    kubectl_command,
)
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import Obj, pod_template, seconds_since
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
_NO_SCALE_UP_EVENTS = (
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
    group = HostGroup.from_hosts(waiting, snapshot.expected_hosts)
    evidence = describe_event(snapshot.find_event(*_SCALE_UP_EVENTS, *_NO_SCALE_UP_EVENTS))
    if message:
        evidence = (Text("Pod {pod}: {message}", pod=waiting[0].pod, message=message), *evidence)
    if all(host.unscheduled.get("reason") == "SchedulingGated" for host in waiting):
        headline = Text(
            "{hosts} cannot be scheduled yet: the pod has a scheduling gate", hosts=group
        )
        return waiting_answer("gated", headline, evidence)
    return (
        _explain_claims(snapshot, message, group, evidence)
        or _explain_scale_up(snapshot, group, evidence)
        or _add_autoscaler_reason(snapshot, _explain_no_node(snapshot, message, group, evidence))
    )


def _explain_ignored_pods(snapshot: Snapshot) -> Answer | None:
    """Explain pods at which no scheduler has looked."""
    waiting = [
        host
        for host in snapshot.hosts
        if host.node is None and not host.is_leaving and not host.has_ended
    ]
    waited_s = min(
        (seconds_since(host.created_at, snapshot.now) or 0.0 for host in waiting), default=0.0
    )
    if waited_s < _QUIET_S:
        return None
    group = HostGroup.from_hosts(waiting, snapshot.expected_hosts)
    if (warning := snapshot.newest_warning) is not None and warning["kind"] == "Pod":
        headline = Text(
            "{hosts} cannot be scheduled: {reason}: {message}", **{**warning, "hosts": group}
        )
        return waiting_answer(
            "unschedulable",
            headline,
            describe_event(warning),
            advise_change("fix what the message names."),
        )
    name = pod_template(snapshot.jobset).get("spec", {}).get("schedulerName", "default-scheduler")
    headline = Text(
        "scheduler {name} has not looked at {hosts} in {waited:age}",
        name=name,
        hosts=group,
        waited=waited_s,
    )
    step = advise_change(
        "check that a scheduler of that name runs; schedulerName under pod: selects another."
    )
    return waiting_answer("unschedulable", headline, next_step=step)


def _explain_claims(
    snapshot: Snapshot, message: str, group: HostGroup, evidence: Evidence
) -> Answer | None:
    """Explain a PersistentVolumeClaim that does not exist, is not bound, or cannot be mounted."""
    if (match := _CLAIM_ERROR.search(message)) is not None:
        claim = match["claim"]
        if match["volume"]:
            headline = Text(
                "PersistentVolume {volume} of PersistentVolumeClaim {claim} no longer exists",
                volume=match["volume"].strip('".'),
                claim=claim,
            )
            return waiting_answer("volume-missing", headline, evidence)
        step = advise_change(
            "create the claim {claim} (ReadWriteMany for more than one host), or use another "
            "under volumes:.",
            claim=claim,
        )
        problem = Text("does not exist" if match["missing"] else "is being deleted")
        headline = Text("PersistentVolumeClaim {claim} {what}", claim=claim, what=problem)
        return waiting_answer("claim-missing", headline, evidence, step)
    if _UNBOUND_TEXT in message:
        event = snapshot.find_event(
            "FailedBinding", "ProvisioningFailed", "WaitForFirstConsumer", "ExternalProvisioning"
        )
        claim = ", ".join(hosts.claim_names(snapshot.jobset)) or "a claim"
        headline = Text("PersistentVolumeClaim {claim} is not bound", claim=claim)
        if event is not None:
            claim = event["names"][0]
            headline = Text(
                "PersistentVolumeClaim {claim} is not bound: {why}",
                claim=claim,
                why=event["message"],
            )
        step = advise_change(
            "{describe}: it needs a StorageClass that provisions, or a matching PersistentVolume.",
            describe=kubectl_command("describe", "pvc", claim),
        )
        return waiting_answer("claim-unbound", headline, (*evidence, *describe_event(event)), step)
    if _SINGLE_POD_TEXT in message:
        headline = Text(
            "PersistentVolumeClaim {claims} is ReadWriteOncePod, and another pod uses it",
            claims=hosts.claim_names(snapshot.jobset),
        )
        return waiting_answer("claim-in-use", headline, evidence)
    if _VOLUME_AFFINITY.search(message):
        reason = Text("volume node affinity conflict: no free node can mount the volume")
        return waiting_answer("volume-affinity", _unschedulable_text(group, reason), evidence)
    return None


def _unschedulable_text(group: HostGroup, reason: Text) -> Text:
    return Text("{hosts} {hosts:is|are} unschedulable: {reason}", hosts=group, reason=reason)


def _explain_scale_up(snapshot: Snapshot, group: HostGroup, evidence: Evidence) -> Answer | None:
    """Explain that an autoscaler adds nodes, where no later event says that it cannot."""
    event = snapshot.find_event(*_SCALE_UP_EVENTS, *_NO_SCALE_UP_EVENTS)
    if event is None or event["reason"] not in _SCALE_UP_EVENTS:
        return None
    headline = Text(
        "waits for the autoscaler to add nodes: {hosts} {hosts:is|are} pending; {message}",
        hosts=group,
        message=event["message"],
    )
    return Answer("scaling-up", headline, evidence)


def _add_autoscaler_reason(snapshot: Snapshot, answer: Answer) -> Answer:
    """Return the answer with why the autoscaler adds no node, where an event says so."""
    # Events of Karpenter have the reason of the scheduler's.
    of_karpenter = (
        event
        for event in snapshot.events
        if event["reason"] == "FailedScheduling" and event["by"] == "karpenter"
    )
    event = snapshot.find_event(*_SCALE_UP_EVENTS, *_NO_SCALE_UP_EVENTS) or next(of_karpenter, None)
    if event is None:
        return answer
    return answer.append_headline(
        Text("; the autoscaler adds no node: {message}", message=event["message"])
    )


def _explain_no_node(
    snapshot: Snapshot, message: str, group: HostGroup, evidence: Evidence
) -> Answer:
    """Explain that no node fits, by the first requirement that rules out every node."""
    pods = {pod["metadata"]["name"]: pod for pod in snapshot.pods}
    waiting = next(
        pods[host.pod]["spec"]
        for host in snapshot.hosts
        if host.unscheduled and not host.is_leaving
    )
    # As admission made it, where that is known.
    spec = {**pod_template(snapshot.jobset).get("spec", {}), **waiting}
    if snapshot.nodes is None:
        return _explain_by_message(message, group, evidence)
    nodes = fit_nodes(spec, snapshot.nodes)
    counts = Text(
        "{total:node} in the cluster: {selected} with its labels, {tolerated} of these without an "
        "untolerated taint, {large} of these large enough when empty",
        total=nodes.total,
        selected=nodes.selected,
        tolerated=nodes.tolerated,
        large=nodes.large,
    )
    lines = (*evidence, counts)
    if nodes.total == 0:
        return waiting_answer(
            "no-nodes",
            _unschedulable_text(group, Text("the cluster has no nodes")),
            lines,
            _NODES_STEP,
        )
    if nodes.selected == 0:
        return waiting_answer(
            "node-selector",
            _unschedulable_text(group, _describe_missing_label(nodes, spec)),
            lines,
            _LABELS_STEP,
        )
    if nodes.tolerated == 0:
        return _explain_taint(nodes, snapshot.nodes, group, lines)
    if nodes.large == 0:
        parts = [
            Text(
                "{requested} {name}, the largest node has {most}",
                requested=requested,
                name=name,
                most=most,
            )
            for name, (requested, most) in nodes.shortages.items()
        ]
        reason = Text(
            "each host requests {parts:; }", parts=parts or [Text("more than any single node has")]
        )
        return waiting_answer("resource", _unschedulable_text(group, reason), lines, _NODES_STEP)
    return _explain_full_nodes(nodes, message, group, lines)


def _describe_missing_label(nodes: NodeFit, spec: Obj) -> Text:
    for key, value in nodes.missing_labels.items():
        template = "no node has label {key}={value}; no node has a label {key}"
        if offered := [shorten_text(label) for label in nodes.offered_values[key][:5]]:
            template = "no node has label {key}={value}; nodes have {key}={offered}"
        return Text(template, key=key, value=value, offered=offered)
    labels = [f"{key}={value}" for key, value in (spec.get("nodeSelector") or {}).items()]
    return Text("no node has all of the labels {labels}", labels=labels)


def _explain_taint(
    fitting: NodeFit, nodes: Sequence[Obj], group: HostGroup, lines: Evidence
) -> Answer:
    taint, number = max(fitting.untolerated_taints.items(), key=lambda item: item[1])
    template = "untolerated taint {taint} on {number} of {nodes:node}"
    if len(fitting.untolerated_taints) > 1:
        template = "untolerated taint {taint} (and {more} more) on {number} of {nodes:node}"
    reason = Text(
        template,
        taint=taint,
        more=len(fitting.untolerated_taints) - 1,
        number=number,
        nodes=fitting.selected,
    )
    key = taint.partition(":")[0]
    step = advise_change("add a toleration (tolerations: in job.yaml), or select other nodes.")
    if taint.startswith("node.kubernetes.io/unschedulable"):
        step = advise_change("nodes are cordoned: kubectl uncordon them, or wait.")
    elif key in _CONDITIONS:
        name, message = next(_unhealthy_nodes(nodes, _CONDITIONS[key]), ("", ""))
        reason += Text(": {name}: {message}", name=name, message=message) if message else Text("")
        step = advise_wait(
            "wait until such nodes are well, or ask the cluster administrator: {describe}",
            describe=kubectl_command(
                "describe", "node", *([name] if name else []), is_namespaced=False
            ),
        )
    return waiting_answer("taint", _unschedulable_text(group, reason), lines, step)


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


def _unhealthy_nodes(nodes: Sequence[Obj], kind: str) -> Iterator[tuple[str, str]]:
    """Yield the nodes with a condition of this kind, and its message."""
    for node in nodes:
        for state in node.get("status", {}).get("conditions", ()):
            if state["type"] == kind:
                yield node["metadata"]["name"], state.get("message") or state.get("reason") or ""


def _explain_full_nodes(nodes: NodeFit, message: str, group: HostGroup, lines: Evidence) -> Answer:
    """Explain that nodes which would fit exist, but other pods use them."""
    short = list(dict.fromkeys(name for _, name in _INSUFFICIENT.findall(message)))
    fitting = Text("; {nodes:node} would fit a host when empty", nodes=nodes.large)
    if short:
        reason = Text("insufficient free {short: and }", short=short)
        step = advise_wait("wait until other pods end, request less, or add nodes.")
        return waiting_answer("resource", _unschedulable_text(group, reason) + fitting, lines, step)
    if rules := [text for text in _counted_reasons(message) if _RULED_OUT.search(text)]:
        return waiting_answer(
            "spread", _unschedulable_text(group, Text("{rules}", rules=rules)) + fitting, lines
        )
    return _explain_by_message(message, group, lines).append_headline(fitting)


# The reasons by which the scheduler counts nodes, and the situation of each. Kubernetes 1.28 to
# 1.35.
_ABOUT_PREEMPTION = re.compile(r"[.,]? ?(?:no new claims to deallocate,?)? ?preemption:")
_RULED_OUT = re.compile(
    r"topology spread constraints|pod (?:anti-)?affinity rules|existing pods anti-affinity rules"
)
_REASONS = (
    (re.compile(r"Insufficient \S+"), "resource"),
    (re.compile(r"untolerated taint"), "taint"),
    (re.compile(r"didn't match Pod's node affinity/selector"), "node-selector"),
    (re.compile(r"were unschedulable"), "taint"),
    (re.compile(r"didn't have free ports"), "ports"),
    (_RULED_OUT, "spread"),
)


def _explain_by_message(message: str, group: HostGroup, evidence: Evidence) -> Answer:
    """Explain by the scheduler's message, if the nodes are not known or not the reason."""
    situation = next(
        (name for pattern, name in _REASONS if pattern.search(message)), "unschedulable"
    )
    message = _ABOUT_PREEMPTION.split(message)[0]
    reason = (
        Text("{message}", message=message)
        if message.strip()
        else Text("the scheduler has not reported why yet")
    )
    return waiting_answer(
        situation,
        _unschedulable_text(group, reason),
        evidence,
        None if situation == "spread" else _NODES_STEP,
    )


def _counted_reasons(message: str) -> list[str]:
    """Return the parts of the scheduler's message, each a number of nodes and a reason."""
    _, _, reasons = _ABOUT_PREEMPTION.split(message)[0].partition(": ")
    return [text.rstrip(".") for text in re.split(r", (?=\d+ )", reasons)]
