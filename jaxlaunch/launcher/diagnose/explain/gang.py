"""Causes in the life of a gang: lost hosts and nodes, restarts, rendezvous, hangs. Pure functions.

If lost pods are replaced, the other pods of a gang stay and wait for the new one. Their agents end
the processes and start them again when the gang is complete, or a spare takes the ranks of the lost
host. Otherwise the loss of a pod ends the generation, and all pods are created again. A pod on a
node that does not answer keeps its phase Running, so such a node is found by its own object, by an
event, or by a pod that is not ready without a reason.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain import (
    admission,
    containers,
    failures,
    scheduling,
    termination,
)
from jaxlaunch.launcher.diagnose.explain.answer import (
    LIVENESS_PREFIX,
    Answer,
    Cause,
    Evidence,
    advise_reading_logs,
    first_answer,
    is_liveness_failure,
    unread_answer,
)
from jaxlaunch.launcher.diagnose.explain.situations import SITUATIONS
from jaxlaunch.launcher.diagnose.explain.termination import StuckObject
from jaxlaunch.launcher.diagnose.text import (
    DOCTOR,
    EMPTY_TEXT,
    JOB_NAME,
    PREPARE,
    NextStep,
    Text,
    advise_ask,
    advise_change,
    advise_run,
    advise_wait,
    describe_event,
    host_group,
    kubectl_command,
    launcher_command,
    quote_message,
)
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.job_status import JobStatus, State, derive_state, derive_status
from jaxlaunch.launcher.jobs.status.snapshot import (
    Snapshot,
    cut_off_hosts,
    has_gang_started,
    is_gang_done,
    is_leader_replaced,
    missing_hosts,
    reachable_hosts,
    spare_hosts,
    unresponsive_hosts,
)
from jaxlaunch.launcher.kubernetes.objects import pod_template, seconds_since
from jaxlaunch.records.verdict import render_numbers

# After this many restarts that count against the limit, without a saved step, a job crash-loops.
_CRASH_LOOP_RESTARTS = 2
# A probe is reported as failing if it has failed within this time.
_RECENT_PROBE_S = 60.0
# Taint of a node that does not answer. By default a pod is evicted after it has had it for 5 min.
_UNREACHABLE_TAINT = "node.kubernetes.io/unreachable"
_DEFAULT_TOLERATION_S = 300.0
# A rendezvous that takes longer than this is reported as slow.
_SLOW_RENDEZVOUS_S = 15.0
# The other agents join a new host 0 within this time. For 30 s DNS may return its old address.
_REJOIN_S = 60.0
# Reasons of a pod's status if its removal has no condition DisruptionTarget.
_REMOVAL_REASONS = ("Evicted", "NodeLost", "Preempting")
# Reasons of the events about a failed Job.
_JOB_FAILURES = ("BackoffLimitExceeded", "PodFailurePolicy")


# --- disruptions and restarts ---------------------------------------------------------------------


def explain_disruption(snapshot: Snapshot) -> Answer | None:
    """Explain pods that were removed by an eviction, a drain, a preemption or a lost node."""
    last_ends = _describe_last_ends(snapshot)
    if (eviction := failures.explain_excess_eviction(snapshot)) is not None:
        template = "is restarting: {why}; that counts against the limit of restarts.crash"
        headline = Text(template, why=eviction.headline)
        return dataclasses.replace(
            eviction, headline=headline, evidence=(*eviction.evidence, *last_ends)
        )
    removed_hosts = [
        host for host in snapshot.hosts if host.disruption or host.reason in _REMOVAL_REASONS
    ]
    # If the gang has ended because a lost pod was not replaced in time, the restart counts against
    # the limit, and the disruption is not the cause.
    has_replacement_timed_out = hosts.has_pod_replacement(snapshot.jobset) and any(
        host.ends_gang and host.terminated.get("exitCode") == contract.LOST
        for host in snapshot.hosts
    )
    if not removed_hosts or has_replacement_timed_out:
        return None
    host = removed_hosts[0]
    reason = host.disruption.get("reason") or host.reason
    message = host.disruption.get("message") or host.message
    removal, step = _describe_removal(host, reason, message)
    group = host_group(removed_hosts, snapshot)
    headline = Text("was interrupted: {hosts} {hosts:was|were} {why}", hosts=group, why=removal)
    template = "Pod {pod}: {reason}: {message}"
    evidence = (Text(template, pod=host.pod, reason=reason, message=message), *last_ends)
    stuck_object = termination.find_stuck_object(snapshot)
    if (blocker := stuck_object or _find_blocking_node(snapshot, removed_hosts)) is not None:
        situation = "disrupted" if stuck_object is None else "stuck"
        headline += Text("; {what}", what=blocker.description)
        return Answer(situation, headline, evidence, blocker.next_step)
    template = "; it restarts, which does not count against the restart limits"
    if snapshot.replaces_pods:
        template = (
            "; {hosts:that pod is|those pods are} created again, which does not count toward the "
            "restart limits"
        )
    return Answer("disrupted", headline + Text(template, hosts=group), evidence, step)


def _describe_removal(host: Host, reason: str, message: str) -> tuple[Text, NextStep | None]:
    """Return how a pod was removed, and the next step if the kubelet's message implies one."""
    pressure, usage = _PRESSURE.search(message), _USAGE.search(message)
    if pressure is None:
        template = _DISRUPTIONS.get(reason, "disrupted ({reason})")
        return Text(template, node=host.node, reason=reason), None
    template = "evicted by the kubelet of node {node}, which was low on {what}"
    text = Text(template, node=host.node, what=pressure["what"])
    if usage is None:
        return text, None
    step = advise_wait(
        "wait; the kubelet evicts first what uses more than it requests: request under resources: "
        "in job.yaml what it uses."
    )
    return text + Text("; it used {used}, and requests {request}", **usage.groupdict()), step


_PRESSURE = re.compile(r"The node was low on resource: (?P<what>[\w-]+)\.")
_USAGE = re.compile(
    r"Container (?P<name>\S+) was using (?P<used>\w+), request is (?P<request>\w+),"
)
# Reasons of the condition DisruptionTarget or of the pod's status, and how the pod was removed.
_DISRUPTIONS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "EvictionByEvictionAPI": "evicted (kubectl drain, or another use of the eviction API)",
    "DeletionByTaintManager": "on node {node}, which does not answer or got a NoExecute taint",
    "DeletionByPodGC": "on node {node}, which no longer exists",
    "TerminationByKubelet": "terminated by the kubelet (node pressure or node shutdown)",
    "Evicted": "evicted by the kubelet (node pressure)",
    "NodeLost": "on a node that is lost",
}


def _find_blocking_node(snapshot: Snapshot, removed_hosts: list[Host]) -> StuckObject | None:
    """Return the silent node on which deleted pods cannot end, as a stuck object."""
    event = snapshot.find_event("NodeNotReady", kind="Pod", on_hosts=removed_hosts)
    stranded_hosts = [
        host for host in removed_hosts if host.is_leaving and host.running and not host.is_ready
    ]
    if not stranded_hosts or not (event or snapshot.is_on_silent_node(stranded_hosts[0])):
        return None
    node = stranded_hosts[0].node or ""
    reason = _describe_silent_node(snapshot, node)
    description = Text(
        "{pods:that pod|those pods} cannot end, since {why}", pods=stranded_hosts, why=reason
    )
    return StuckObject(description, _advise_waiting_for_node(node))


def _advise_waiting_for_node(
    node: str, beginning: str = "wait: Kubernetes", pods: str = "them", **fields: Any
) -> NextStep:
    """Return the advice to wait for a node that does not answer, or to delete it.

    Args:
        node: Name of the node.
        beginning: Beginning of the advice, up to the verb.
        pods: Word for the pods on the node.
        **fields: Fields of `beginning`.
    """
    return advise_wait(
        beginning + f" makes {pods} again elsewhere only when the node is back or deleted; if it "
        "is gone for good: {delete}",
        delete=kubectl_command("delete", "node", node, is_namespaced=False),
        **fields,
    )


def explain_unhealthy(snapshot: Snapshot) -> Answer | None:
    """Explain a container that the kubelet restarts because a liveness probe or a hook fails."""
    events = snapshot.find_events("Unhealthy", "FailedPostStartHook", kind="Pod")
    # After the failure of another probe the kubelet does not restart the container.
    event = next(
        (item for item in events if item["reason"] != "Unhealthy" or is_liveness_failure(item)),
        None,
    )
    if event is None or not snapshot.restarts:
        return None
    is_probe = event["reason"] == "Unhealthy"
    if (seconds_since(event["last"], snapshot.now) or 0.0) > _RECENT_PROBE_S:
        return None
    cause = Text("liveness probe" if is_probe else "postStart hook")
    headline = Text("is restarted again and again: its {what} fails", what=cause)
    if message := event["message"].removeprefix(LIVENESS_PREFIX).lstrip(": "):
        headline += Text(": {message}", message=message)
    step = advise_change("fix or remove the {what}; jobs need none.", what=cause)
    evidence = (*describe_event(event), *_describe_last_ends(snapshot))
    return Answer("unhealthy", headline, evidence, step)


def explain_restart(snapshot: Snapshot) -> Answer | None:
    """Explain that a generation has ended, and the pods of the next one do not exist yet."""
    if derive_status(snapshot).state is not State.RESTARTING:
        return None
    headline, last_end = Text("is restarting"), snapshot.report.attempt_end
    if has_oom := failures.is_oom(snapshot):
        headline += Text(": {oom}", oom=failures.describe_oom(snapshot))
    elif last_end is not None:
        template = " after {result}: {message}"
        headline += Text(template, result=last_end.result, message=last_end.verdict.message)
    elif (failed_host := failures.first_failed_host(snapshot)) is not None:
        template = ": {host} ended with exit code {code}"
        headline += Text(template, host=failed_host.name, code=failed_host.terminated["exitCode"])
    if remaining_hosts := [host for host in snapshot.hosts if not host.has_ended]:
        headline += Text("; {pods:pod} still terminating", pods=len(remaining_hosts))
    event = snapshot.find_event(*_JOB_FAILURES, "DeadlineExceeded", kind="Job")
    evidence = (*_describe_last_ends(snapshot), *describe_event(event))
    cut_off = [host for host in cut_off_hosts(snapshot) if host.is_leaving]
    stuck_object = termination.find_stuck_object(snapshot) or (
        _stuck_on_lost_node(snapshot, cut_off[0]) if cut_off else None
    )
    if stuck_object is not None:
        headline += Text(": {what}", what=stuck_object.description)
        return Answer("stuck", headline, evidence, stuck_object.next_step)
    step = advise_reading_logs(snapshot)
    return Answer("oom" if has_oom else "restarting", headline, evidence, step)


def explain_crash_loop(snapshot: Snapshot) -> Answer | None:
    """Explain a job that was restarted several times and has not saved a step."""
    status, last_end = derive_status(snapshot), snapshot.report.last_end
    if (
        status.restart_counts.charged < _CRASH_LOOP_RESTARTS
        or "log" in snapshot.unread_reasons
        or snapshot.report.committed_step is not None
    ):
        return None
    last_step = None if last_end is None else last_end.verdict.step
    if status.state is State.RUNNING and last_step is not None and (status.step or 0) > last_step:
        return None
    template = (
        "crashes and restarts without saving a checkpoint: {restarts.charged} of "
        "{restarts.limit} restarts are used up"
    )
    headline = Text(template, restarts=status.restart_counts)
    limit_note = failures.describe_earlier_excess(snapshot)
    if last_end is not None:
        template = "; last: {result}: {message}"
        headline += Text(template, result=last_end.result, message=last_end.verdict.message)
        limit_note = limit_note or failures.describe_full_shm(snapshot, last_end.verdict)
    if limit_note is not None:
        headline += Text("; {limit}", limit=limit_note)
    event = snapshot.find_event(*_JOB_FAILURES, kind="Job")
    evidence = (*_describe_last_ends(snapshot), *describe_event(event))
    return Answer("crash-loop", headline, evidence, advise_reading_logs(snapshot))


# --- lost nodes -----------------------------------------------------------------------------------


def explain_node_lost(snapshot: Snapshot) -> Answer | None:
    """Explain a node that does not answer: its pods stay until it comes back or is deleted."""
    event = snapshot.find_event("NodeNotReady", kind="Pod")
    unready_hosts = [
        host
        for host in snapshot.hosts
        if host.running and not host.is_ready and not host.is_leaving
    ]
    if event is None:
        # Only an event tells whether a pod is not ready because its node is lost.
        if "events" not in snapshot.unread_reasons or not unready_hosts:
            return None
        template = "runs, but {hosts} {hosts:is|are} not ready"
        headline = Text(template, hosts=host_group(unready_hosts, snapshot))
        return unread_answer(snapshot, "events", headline)
    lost_hosts = [host for host in unready_hosts if host.pod in event["names"]]
    if not lost_hosts:
        return None
    headline = Text(
        "waits: {nodes:node|nodes} {nodes} {nodes:is|are} NotReady, with {hosts} on "
        "{nodes:it|them}",
        nodes=list(dict.fromkeys(host.node or "" for host in lost_hosts)),
        hosts=host_group(lost_hosts, snapshot),
    )
    return Answer("node-lost", headline, describe_event(event))


def explain_silent_node(snapshot: Snapshot) -> Answer | None:
    """Explain a node that does not answer, if its object could be read."""
    node, stranded_hosts = snapshot.silent_node, _stranded_hosts(snapshot)
    if node is None or not stranded_hosts:
        return None
    tolerations = pod_template(snapshot.jobset)["spec"].get("tolerations", ())
    limits_s = [
        toleration["tolerationSeconds"]
        for toleration in tolerations
        if toleration.get("key") in (None, _UNREACHABLE_TAINT)
        and toleration.get("effect") in (None, "NoExecute")
        and "tolerationSeconds" in toleration
    ]
    step = _advise_waiting_for_node(
        node["metadata"]["name"],
        "wait: Kubernetes evicts its pods after {tolerated:age}, but",
        tolerated=min(limits_s, default=_DEFAULT_TOLERATION_S),
    )
    evidence = describe_event(snapshot.find_event("NodeNotReady", kind="Pod"))
    description = termination.describe_silence(node, snapshot.now)
    return Answer(
        "node-lost", _describe_lost_node(snapshot, description, stranded_hosts), evidence, step
    )


def explain_deleted_node(snapshot: Snapshot) -> Answer | None:
    """Explain pods that still have phase Running on a node that no longer exists."""
    node, stranded_hosts = snapshot.deleted_node, _stranded_hosts(snapshot)
    if node is None or not stranded_hosts:
        return None
    headline = _describe_lost_node(
        snapshot, termination.describe_deletion(node, snapshot.now), stranded_hosts
    )
    return Answer(
        "node-lost",
        headline,
        next_step=termination.advise_waiting_for_collection(stranded_hosts[0].pod),
    )


def _describe_lost_node(snapshot: Snapshot, node: Text, stranded_hosts: list[Host]) -> Text:
    group = host_group(stranded_hosts, snapshot)
    return Text("waits: {node}; {hosts} {hosts:is|are} on it", node=node, hosts=group)


def _stranded_hosts(snapshot: Snapshot) -> list[Host]:
    """Return the hosts on a silent or deleted node whose pods are not being deleted."""
    return [
        host for host in snapshot.hosts if snapshot.is_on_silent_node(host) and not host.is_leaving
    ]


# --- lost hosts, of a gang whose processes have run in these pods ---------------------------------

# Causes that delay the replacement of a lost pod.
_POD_CAUSES: tuple[Cause, ...] = (
    admission.explain_missing_pods,
    scheduling.explain_unscheduled,
    containers.explain_image_pull,
    containers.explain_not_started,
)


def explain_lost_host(snapshot: Snapshot) -> Answer | None:
    """Explain what a gang does, after it has started, without some of its hosts."""
    state = derive_state(snapshot)
    if state not in (State.RUNNING, State.GATHERING) or not has_gang_started(snapshot):
        return None
    missing_numbers = missing_hosts(snapshot)
    if state is State.RUNNING:
        if snapshot.report.is_attempt_over:
            return None
        return _explain_partial_run(snapshot, missing_numbers)
    if (answer := _explain_new_leader(snapshot)) is not None:
        return answer
    return _explain_missing_hosts(snapshot, missing_numbers) if missing_numbers else None


def _explain_new_leader(snapshot: Snapshot) -> Answer | None:
    """Explain that the pod of host 0 was replaced, and the other hosts are joining the new one."""
    report, leader = snapshot.report, snapshot.hosts[0]
    joining = [number for number in report.missing_hosts if number != 0]
    if report.heartbeat is None:
        joining = [host.number for host in snapshot.hosts if host.number != 0]
    elif report.stage != "gather":
        return None
    if not joining or not leader.has_started or not is_leader_replaced(snapshot):
        return None
    age_s = seconds_since(leader.running.get("startedAt"), snapshot.now) or 0.0
    hosts_by_number = {host.number: host for host in snapshot.hosts}
    present_hosts = [hosts_by_number[number] for number in joining if number in hosts_by_number]
    are_running = all(host.has_started and not host.has_ended for host in present_hosts)
    if age_s > _REJOIN_S or len(present_hosts) < len(joining) or not are_running:
        return None
    headline = Text(
        "starts again: host 0 was created again, and {joining} {numbers:is|are} joining it",
        joining=render_numbers(joining),
        numbers=joining,
    )
    step = advise_wait("wait: they join within seconds, and all ranks start again.")
    return Answer("host-lost", headline, _describe_last_end(snapshot), step)


def explain_blocked_completion(snapshot: Snapshot) -> Answer | None:
    """Explain that the ranks are done, but a pod on a lost node keeps the Job from completing."""
    cut_off = cut_off_hosts(snapshot)
    if not cut_off or not snapshot.replaces_pods or not is_gang_done(snapshot):
        return None
    stuck_object = termination.find_stuck_object(snapshot) or _stuck_on_lost_node(
        snapshot, cut_off[0]
    )
    template = "has finished, but its Job is not complete before pod {pod} has ended: {what}"
    headline = Text(template, pod=cut_off[0].pod, what=stuck_object.description)
    return Answer("stuck", headline, _describe_last_ends(snapshot), stuck_object.next_step)


def _explain_missing_hosts(snapshot: Snapshot, missing_numbers: list[int]) -> Answer:
    """Explain that the gang waits for missing hosts, or is about to continue with spares."""
    needed_numbers = [number for number in missing_numbers if number in snapshot.members]
    needed_numbers = needed_numbers or missing_numbers
    spares = spare_hosts(snapshot)
    if 0 not in needed_numbers and len(spares) >= len(needed_numbers):
        # There are enough spares, so the processes start again within seconds.
        spares = spares[: len(needed_numbers)]
        headline = Text(
            "is about to start again without {needed}: {names} {spares:takes its ranks|take "
            "their ranks}",
            needed=render_numbers(needed_numbers),
            names=render_numbers(spares),
            spares=spares,
        )
        return Answer("spare-used", headline, _describe_last_end(snapshot))
    blocker = _explain_pod_blocker(snapshot, needed_numbers)
    headline = Text(
        "waits for {needed}{leads} to come back: {why}; the other {present:host} "
        "{present:keeps its pod|keep their pods}",
        needed=render_numbers(needed_numbers),
        leads=Text(", which leads," if needed_numbers == [0] else ""),
        why=blocker.headline,
        present=snapshot.expected_hosts - len(missing_numbers),
    )
    if hosts.can_move_ranks(snapshot.jobset) and 0 not in needed_numbers and not spares:
        headline += Text("; no spare is left")
    return dataclasses.replace(blocker, headline=headline)


def _explain_partial_run(snapshot: Snapshot, missing_numbers: list[int]) -> Answer | None:
    """Explain a job that runs without some of its hosts, or on a node that does not answer."""
    if running_hosts := reachable_hosts(snapshot):
        return _explain_lost_kubelet(snapshot, running_hosts)
    members, initial = snapshot.members, hosts.initial_members(snapshot.jobset)
    activity = describe_phase(derive_status(snapshot))
    spares = spare_hosts(snapshot)
    names = render_numbers(spares)
    if len(members) < len(initial):
        template = "runs with {members} of {initial:host}: {activity}"
        headline = Text(template, members=len(members), initial=len(initial), activity=activity)
        if not missing_numbers:
            headline += Text("; {names} will hold ranks after the next save", names=names)
            return Answer("shrunk", headline)
        blocker = _explain_pod_blocker(snapshot, missing_numbers)
        template = "; it waits for {missing} to grow again: {why}"
        headline += Text(template, missing=render_numbers(missing_numbers), why=blocker.headline)
        return dataclasses.replace(blocker, situation="shrunk", headline=headline)
    if not missing_numbers:
        return None
    blocker = _explain_pod_blocker(snapshot, missing_numbers)
    template = "{names} {spares:is a spare|are spares}" if spares else "no spare is ready"
    headline = Text(
        "runs: {activity}, with its ranks on {members}; {left}, since {missing} {numbers:is|are} "
        "missing: {why}",
        activity=activity,
        members=render_numbers(members.hosts),
        left=Text(template, names=names, spares=spares),
        missing=render_numbers(missing_numbers),
        numbers=missing_numbers,
        why=blocker.headline,
    )
    return dataclasses.replace(blocker, situation="spare-used", headline=headline)


def _explain_lost_kubelet(snapshot: Snapshot, running_hosts: list[Host]) -> Answer:
    """Explain that a node's kubelet does not answer, but the agents on the node do.

    The job continues until the kubelet is back and ends the pods that were evicted meanwhile.
    """
    status, node = derive_status(snapshot), running_hosts[0].node or ""
    step = EMPTY_TEXT if status.step is None else Text(", at {step}", step=_describe_step(status))
    headline = Text(
        "runs{step}: {silence}, but {hosts:the agent|the agents} of {hosts} on it {hosts:does|do}",
        step=step,
        silence=_describe_silent_node(snapshot, node),
        hosts=host_group([host for host in running_hosts if host.node == node], snapshot),
    )
    next_step = advise_ask(
        "have the kubelet of node {node} started again: it then ends the pods that Kubernetes has "
        "evicted meanwhile, as a drain does.",
        node=node,
    )
    evidence = describe_event(snapshot.find_event("NodeNotReady", kind="Pod"))
    return Answer("node-lost", headline, evidence, next_step)


def _describe_silent_node(snapshot: Snapshot, name: str) -> Text:
    """Return the description of a node that does not answer, from its object if it was read."""
    node = snapshot.silent_node
    if node is not None and node["metadata"]["name"] == name:
        return termination.describe_silence(node, snapshot.now)
    return Text("node {name} is NotReady", name=name)


def _explain_pod_blocker(snapshot: Snapshot, missing_numbers: list[int]) -> Answer:
    """Explain why the pods of missing hosts are not back, with a clause as the headline.

    The evidence begins with the end of the last attempt.
    """
    last_end = _describe_last_end(snapshot)
    if (answer := first_answer(_POD_CAUSES, snapshot)) is not None:
        clause, evidence = answer.clause or answer.headline, (*last_end, *answer.evidence)
        return Answer("host-lost", clause, evidence, answer.next_step)
    present_hosts = [
        host for host in snapshot.hosts if host.number in missing_numbers and host.phase != "Failed"
    ]
    if cut_off := [host for host in cut_off_hosts(snapshot) if host in present_hosts]:
        stuck_object = termination.find_stuck_object(snapshot) or _stuck_on_lost_node(
            snapshot, cut_off[0]
        )
        evidence = (*last_end, *describe_event(snapshot.find_event("NodeNotReady", kind="Pod")))
        return Answer("host-lost", stuck_object.description, evidence, stuck_object.next_step)
    if silent_hosts := [host for host in unresponsive_hosts(snapshot) if host in present_hosts]:
        host = silent_hosts[0]
        template = (
            "its agent does not answer, and pod {host.pod} still reads as running on node "
            "{host.node}"
        )
        step = advise_wait(
            "wait: Kubernetes notices within about a minute that a node is gone; if the node is "
            "well, {delete} has the Job make another pod.",
            delete=kubectl_command("delete", "pod", host.pod),
        )
        return Answer("host-lost", Text(template, host=host), last_end, step)
    if present_hosts:
        return Answer("host-lost", Text("{host} is starting", host=present_hosts[0].name), last_end)
    template = (
        "{missing:its pod does|their pods do} not exist yet, since Kubernetes makes it again "
        "10 s after it failed"
    )
    return Answer("host-lost", Text(template, missing=missing_numbers), last_end)


def _describe_last_end(snapshot: Snapshot) -> Evidence:
    last_end = snapshot.report.last_end
    return () if last_end is None else (quote_message(last_end.description),)


def _stuck_on_lost_node(snapshot: Snapshot, host: Host) -> StuckObject:
    """Return the description and the next step for a pod that is Running on a lost node."""
    node = snapshot.deleted_node
    if node is not None and node.name == host.node:
        return StuckObject(
            termination.describe_deletion(node, snapshot.now),
            termination.advise_waiting_for_collection(host.pod),
        )
    name = host.node or ""
    silence = _describe_silent_node(snapshot, name)
    description = Text("{silence}, with pod {pod} on it", silence=silence, pod=host.pod)
    return StuckObject(description, _advise_waiting_for_node(name, pods="that pod"))


# --- running pods ---------------------------------------------------------------------------------


def explain_rendezvous(snapshot: Snapshot) -> Answer | None:
    """Explain that the agents wait for each other."""
    report, heartbeat = snapshot.report, snapshot.report.heartbeat
    if report.stage != "gather" or heartbeat is None:
        return None
    missing_numbers = report.missing_hosts
    refusals = tuple(map(quote_message, heartbeat.refused))
    if not missing_numbers:
        return Answer("gathering", Text("is about to start: all hosts are connected"), refusals)
    leaders = (host.running.get("startedAt") for host in snapshot.hosts if host.number == 0)
    waited_s = seconds_since(next(leaders, None), snapshot.now) or 0.0
    if (last_end := report.last_end) is not None and last_end.at is not None:
        # In a new attempt of the same pods, host 0 has waited since the end of the last attempt.
        waited_s = min(waited_s, max(0.0, snapshot.now.timestamp() - last_end.at))
    is_late = waited_s >= _SLOW_RENDEZVOUS_S
    template = "waits at rendezvous for {waited:age}" if is_late else "waits at rendezvous"
    unlisted_count = (heartbeat.missing_count or len(missing_numbers)) - len(missing_numbers)
    template += ": {missing} and {more} more" if unlisted_count else ": {missing}"
    headline = Text(
        template + " of {expected} missing",
        waited=waited_s,
        missing=render_numbers(missing_numbers),
        more=unlisted_count,
        expected=snapshot.expected_hosts,
    )
    listed_hosts = [host for host in snapshot.hosts if host.number in missing_numbers][:8]
    evidence = (*map(_describe_pod, listed_hosts), *refusals)
    # Host 0 runs the rendezvous. If it is missing there, it cannot resolve its own name.
    is_dns_suspect = 0 in missing_numbers and is_late
    if is_dns_suspect:
        headline += Text(
            "; not even host 0 reaches itself by the name that all hosts use: most likely DNS "
            "does not answer"
        )
    event = snapshot.find_event("HeadlessServiceCreationFailed", kind="JobSet")
    if event is not None:
        rejection = admission.explain_rejection(event["message"])
        template = "; its headless Service, which names the hosts, is gone, and rejected: {why}"
        headline += Text(template, why=rejection.headline)
        next_step = rejection.next_step or SITUATIONS[rejection.situation].next_step
        return Answer("rendezvous", headline, (*describe_event(event), *evidence), next_step)
    if is_dns_suspect:
        step = advise_run(
            "{logs}; ask the cluster administrator whether the cluster's DNS (CoreDNS) runs.",
            logs=launcher_command("logs", JOB_NAME),
        )
    elif listed_hosts and not is_late:
        step = advise_wait("wait: agents connect within seconds of their start.")
    elif listed_hosts:
        step = advise_run(
            "{logs}; can it resolve and reach host 0? `{doctor}` checks the cluster's DNS.",
            logs=kubectl_command("logs", listed_hosts[0].pod),
            doctor=DOCTOR,
        )
    else:
        step = advise_wait("their pods do not exist yet: wait.")
    return Answer("rendezvous", headline, evidence, step)


def _describe_pod(host: Host) -> Text:
    """Return the phase, reason and node of the pod of a host."""
    template, reason = "{host.name}: {host.phase}", (host.waiting or host.terminated).get("reason")
    if reason:
        template += ", {reason}"
    if host.node:
        template += " on {host.node}"
    return Text(template, host=host, reason=reason)


def explain_hang(snapshot: Snapshot) -> Answer | None:
    """Explain that a rank exceeded one of its timeouts."""
    heartbeat = snapshot.report.heartbeat
    if snapshot.report.attempt_end is not None or heartbeat is None or not heartbeat.overdue:
        return None
    headline = Text("hangs: {overdue}", overdue=heartbeat.overdue)
    return Answer("hang", headline, _describe_phases(snapshot))


def explain_running(snapshot: Snapshot) -> Answer | None:
    """Explain that the job runs, and the failure of the attempt before, if there was one."""
    status, report = derive_status(snapshot), snapshot.report
    if status.state is not State.RUNNING:
        return None
    if report.heartbeat is None:
        headline = Text("runs: {ready}", ready=_describe_ready(snapshot, status))
        if (reason := snapshot.unread_reasons.get("log")) is not None:
            headline += Text("; what they do is unknown: {why}", why=reason)
        return Answer("running", headline)
    last_end, last_ends = report.last_end, _describe_last_ends(snapshot)
    if last_end is not None and report.is_attempt_over:
        template = "has ended attempt {last.attempt}: {last.result}: {last.verdict.message}"
        situation = "running" if last_end.verdict.code == contract.DONE else "restarting"
        next_step = advise_reading_logs(snapshot)
        return Answer(situation, Text(template, last=last_end), last_ends, next_step)
    headline, situation = Text("runs"), "running"
    if last_end is not None and last_end.attempt + 1 == report.heartbeat.attempt:
        message, situation = last_end.verdict.message[:200], "restarted"
        headline += Text(
            " again after {result}: {message}", result=last_end.result, message=message
        )
    ended_note = _describe_ended_ranks(snapshot)
    if status.phase is None and status.ready is not None and status.ready < status.hosts:
        activity = _describe_ready(snapshot, status)
    else:
        activity = describe_phase(status, is_partly=ended_note is not EMPTY_TEXT)
    if (joining := _describe_joining(snapshot)) is not EMPTY_TEXT:
        activity = joining + _describe_proxies(snapshot)
    headline += Text(": {what}{ended}", what=activity, ended=ended_note)
    step = PREPARING_STEP if status.phase == "prepare" else None
    return Answer(situation, headline, (*last_ends, *_describe_phases(snapshot)), step)


def _describe_joining(snapshot: Snapshot) -> Text:
    """Return "rank 1 waits in jax.distributed.initialize for rank 0", or an empty text."""
    heartbeat = snapshot.report.heartbeat
    joining = [] if heartbeat is None else list(heartbeat.phases.get("joining", ()))
    if heartbeat is None or not joining:
        return EMPTY_TEXT
    if heartbeat.counts["joining"] == sum(heartbeat.counts.values()):
        return describe_phase(derive_status(snapshot))
    absent_ranks = [
        rank for phase in ("unsaid", "ended") for rank in heartbeat.phases.get(phase, ())
    ]
    template = "{names} {ranks:waits|wait} in jax.distributed.initialize"
    text = Text(template, names=render_numbers(joining, "rank"), ranks=joining)
    if absent_ranks:
        text += Text(" for {names}", names=render_numbers(absent_ranks, "rank"))
    return text


def _describe_proxies(snapshot: Snapshot) -> Text:
    """Return the proxy variables of the pods, which may keep ranks from joining each other."""
    containers = pod_template(snapshot.jobset).get("spec", {}).get("containers", [])
    environ = {
        variable["name"]: variable.get("value", "")
        for variable in (containers[0].get("env", []) if containers else [])
    }
    if not (proxies := contract.find_proxies(environ)):
        return EMPTY_TEXT
    return Text("; {proxies:, } {proxies:names|name} a proxy", proxies=proxies)


PREPARING_STEP = advise_wait(
    "wait: its text is tokenized and packed, once; of hosts that share data.data_dir one works, "
    "and its log says how far it is. `{prepare}` does it beforehand.",
    prepare=PREPARE,
)


def _describe_ready(snapshot: Snapshot, status: JobStatus) -> Text:
    """Return "1 of 2 hosts ready; host 1 (pod …): containers with unready status: [main]"."""
    text = Text("{ready} of {hosts:host} ready", ready=status.ready, hosts=status.hosts)
    late = next((host for host in snapshot.hosts if host.unready_reason), None)
    if late is not None:
        text += Text("; {host}: {why}", host=late.name, why=late.unready_reason)
    return text


def _describe_step(status: JobStatus) -> Text:
    template = "step {status.step} of {status.steps}" if status.steps else "step {status.step}"
    return Text(template, status=status)


def describe_phase(status: JobStatus, *, is_partly: bool = False) -> Text:
    """Return "training at step 120 of 300" or "in compile for 2m".

    Args:
        status: Status of a job that runs.
        is_partly: Whether some of its ranks have ended, and others have not.
    """
    at = EMPTY_TEXT if status.step is None else Text(" at {step}", step=_describe_step(status))
    spent = EMPTY_TEXT if status.phase_s is None else Text(" for {spent:age}", spent=status.phase_s)
    match status.phase:
        case "step":
            template = "training{at}"
        case "ended":
            template = "its processes end{at}" if is_partly else "its processes have ended{at}"
        case "prepare":
            template = "preparing its text{spent}"
        case "joining":
            template = "its processes wait for each other in jax.distributed.initialize{spent}"
        # The ranks have reported no phase. A known number of steps shows that they will.
        case "unsaid" | None if status.steps is not None:
            template = "its processes start: imports, devices, JAX's own initialization{at}"
        case "unsaid" | None:
            template = "its program reports no steps{at}"
        case _:
            template = "in {phase}{at}{spent}"
    return Text(template, phase=status.phase, at=at, spent=spent)


def _describe_ended_ranks(snapshot: Snapshot) -> Text:
    """Return "; rank 1 has ended, rank 0 still runs"."""
    heartbeat = snapshot.report.heartbeat
    if heartbeat is None:
        return EMPTY_TEXT
    total, ended_count = sum(heartbeat.counts.values()), heartbeat.counts.get("ended", 0)
    if not 0 < ended_count < total:
        return EMPTY_TEXT
    ended_ranks = list(heartbeat.phases.get("ended", ()))
    running_ranks = [
        rank for phase, ranks in heartbeat.phases.items() if phase != "ended" for rank in ranks
    ]
    if len(ended_ranks) < ended_count or len(running_ranks) < total - ended_count:
        return Text("; {number:rank} of {total} have ended", number=ended_count, total=total)
    return Text(
        "; {ended_names} {ended:has|have} ended, {running_names} still {running:runs|run}",
        ended_names=render_numbers(ended_ranks, "rank"),
        running_names=render_numbers(running_ranks, "rank"),
        ended=ended_ranks,
        running=running_ranks,
    )


def _describe_phases(snapshot: Snapshot) -> Evidence:
    """Return the number of ranks in each phase, if not all are in the same."""
    heartbeat = snapshot.report.heartbeat
    if heartbeat is None or len(heartbeat.counts) < 2:
        return ()
    templates = dict.fromkeys(heartbeat.counts, "{number:rank} in {phase} ({ranks})")
    templates |= {
        "ended": "{number:rank} ended ({ranks})",
        "joining": "{number:rank} in jax.distributed.initialize ({ranks})",
        "unsaid": "{number:rank} running ({ranks})",
    }
    parts = [
        Text(
            templates[phase],
            number=number,
            phase=phase,
            ranks=list(heartbeat.phases.get(phase, ())),
        )
        for phase, number in heartbeat.counts.items()
    ]
    return (Text("{parts:; }", parts=parts),)


def _describe_last_ends(snapshot: Snapshot) -> Evidence:
    """Return the ends of the last three attempts, the newest first."""
    report = snapshot.report
    ends = [*report.earlier_ends, *filter(None, [report.attempt_end])]
    return tuple(quote_message(end.description) for end in reversed(ends[-3:]))
