"""Causes: lost hosts and nodes, restarts, missing hosts, hangs, and the ranks' phases. Pure."""

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
    has_begun,
    is_gang_done,
    is_leader_new,
    missing_hosts,
    reachable_hosts,
    spare_hosts,
    unresponsive_hosts,
)
from jaxlaunch.launcher.kubernetes.objects import pod_template, seconds_since
from jaxlaunch.records.verdict import render_numbers

# So many charged restarts without a committed step make a crash loop.
_CRASH_LOOP_RESTARTS = 2
# A probe that failed within this time is reported as failing.
_RECENT_S = 60.0
# The taint of a node that does not answer, and for how long pods tolerate it that say nothing of
# it.
_UNREACHABLE = "node.kubernetes.io/unreachable"
_DEFAULT_TOLERATION_S = 300.0
# A rendezvous that takes longer than this is reported as slow.
_LATE_S = 15.0
# Agents join a new host 0 within this time. The cluster's DNS may give its old address for 30 s.
_REJOIN_S = 60.0


# --- disruptions and restarts ---------------------------------------------------------------------


def explain_disruption(snapshot: Snapshot) -> Answer | None:
    """Explain pods that were removed: by an eviction, a drain, a preemption or a lost node."""
    last_ends = _describe_last_ends(snapshot)
    if (excess := failures.explain_excess_eviction(snapshot)) is not None:
        template = "is restarting: {why}; that counts against the limit of restarts.crash"
        headline = Text(template, why=excess.headline)
        return dataclasses.replace(
            excess, headline=headline, evidence=(*excess.evidence, *last_ends)
        )
    removed_hosts = [
        host for host in snapshot.hosts if host.disruption or host.reason in _REMOVAL_REASONS
    ]
    # A gang that waited in vain for the replacement of a lost pod was not disrupted: the restart
    # counts.
    has_surrendered = hosts.has_pod_replacement(snapshot.jobset) and any(
        host.ends_gang and host.terminated.get("exitCode") == contract.LOST
        for host in snapshot.hosts
    )
    if not removed_hosts or has_surrendered:
        return None
    host = removed_hosts[0]
    reason = host.disruption.get("reason") or host.reason
    message = host.disruption.get("message") or host.message
    why, step = _describe_removal(host, reason, message)
    group = host_group(removed_hosts, snapshot)
    headline = Text("was interrupted: {hosts} {hosts:was|were} {why}", hosts=group, why=why)
    template = "Pod {pod}: {reason}: {message}"
    evidence = (Text(template, pod=host.pod, reason=reason, message=message), *last_ends)
    stuck = termination.find_stuck(snapshot)
    if (blocker := stuck or _find_unending(snapshot, removed_hosts)) is not None:
        situation = "disrupted" if stuck is None else "stuck"
        headline += Text("; {what}", what=blocker.description)
        return Answer(situation, headline, evidence, blocker.next_step)
    template = "; it restarts, which does not count against the restart limits"
    if snapshot.waits_for_pods:
        template = (
            "; {hosts:that pod is|those pods are} made again, which does not count against the "
            "restart limits"
        )
    return Answer("disrupted", headline + Text(template, hosts=group), evidence, step)


_REMOVAL_REASONS = ("Evicted", "NodeLost", "Preempting")


def _describe_removal(host: Host, reason: str, message: str) -> tuple[Text, NextStep | None]:
    """Return why a pod was removed, if the kubelet says so with the resource, and the next step."""
    low, used = _LOW_RESOURCE.search(message), _USED_RESOURCE.search(message)
    if low is None:
        template = _DISRUPTIONS.get(reason, "disrupted ({reason})")
        return Text(template, node=host.node, reason=reason), None
    template = "evicted by the kubelet of node {node}, which was low on {what}"
    why = Text(template, node=host.node, what=low["what"])
    if used is None:
        return why, None
    step = advise_wait(
        "wait; the kubelet evicts first what uses more than it requests: request under resources: "
        "in job.yaml what it uses."
    )
    return why + Text("; it used {used}, and requests {request}", **used.groupdict()), step


_LOW_RESOURCE = re.compile(r"The node was low on resource: (?P<what>[\w-]+)\.")
_USED_RESOURCE = re.compile(
    r"Container (?P<name>\S+) was using (?P<used>\w+), request is (?P<request>\w+),"
)
_DISRUPTIONS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "EvictionByEvictionAPI": "evicted (kubectl drain, or another use of the eviction API)",
    "DeletionByTaintManager": "on node {node}, which does not answer or got a NoExecute taint",
    "DeletionByPodGC": "on node {node}, which no longer exists",
    "TerminationByKubelet": "terminated by the kubelet (node pressure or node shutdown)",
    "Evicted": "evicted by the kubelet (node pressure)",
    "NodeLost": "on a node that is lost",
}


def _find_unending(snapshot: Snapshot, removed_hosts: list[Host]) -> StuckObject | None:
    """Return what keeps deleted pods from ending: a node that does not answer."""
    event = snapshot.find_event("NodeNotReady", kind="Pod", on_hosts=removed_hosts)
    stranded = [
        host for host in removed_hosts if host.is_leaving and host.running and not host.is_ready
    ]
    if not stranded or not (event or snapshot.is_on_silent_node(stranded[0])):
        return None
    node = stranded[0].node or ""
    why = _describe_silent_node(snapshot, node)
    description = Text("{pods:that pod|those pods} cannot end, since {why}", pods=stranded, why=why)
    return StuckObject(description, _wait_for_node(node))


def _wait_for_node(
    node: str, beginning: str = "wait: Kubernetes", pods: str = "them", **fields: Any
) -> NextStep:
    """Return the advice about pods on a node that does not answer."""
    return advise_wait(
        beginning + f" makes {pods} again elsewhere only when the node is back or deleted; if it "
        "is gone for good: {delete}",
        delete=kubectl_command("delete", "node", node, is_namespaced=False),
        **fields,
    )


def explain_unhealthy(snapshot: Snapshot) -> Answer | None:
    """Explain a container that the kubelet restarts again and again, for a probe or a hook."""
    event = snapshot.find_event("Unhealthy", "FailedPostStartHook", kind="Pod")
    if event is None or not snapshot.restarts:
        return None
    is_probe = event["reason"] == "Unhealthy"
    is_old = (seconds_since(event["last"], snapshot.now) or 0.0) > _RECENT_S
    if is_old or (is_probe and not is_liveness_failure(event)):
        return None
    cause = Text("liveness probe" if is_probe else "postStart hook")
    headline = Text("is restarted again and again: its {what} fails", what=cause)
    if message := event["message"].removeprefix(LIVENESS_PREFIX).lstrip(": "):
        headline += Text(": {message}", message=message)
    step = advise_change("fix or remove the {what}; jobs need none.", what=cause)
    evidence = (*describe_event(event), *_describe_last_ends(snapshot))
    return Answer("unhealthy", headline, evidence, step)


def explain_restart(snapshot: Snapshot) -> Answer | None:
    """Explain that a generation ended, and the pods of the next one do not exist yet."""
    if derive_status(snapshot).state is not State.RESTARTING:
        return None
    headline, last = Text("is restarting"), snapshot.report.attempt_end
    if has_oom := failures.is_oom(snapshot):
        headline += Text(": {oom}", oom=failures.describe_oom(snapshot))
    elif last is not None:
        template = " after {result}: {message}"
        headline += Text(template, result=last.result, message=last.verdict.message)
    elif (failed := failures.first_failed_host(snapshot)) is not None:
        template = ": {host} ended with exit code {code}"
        headline += Text(template, host=failed.name, code=failed.terminated["exitCode"])
    if remaining := [host for host in snapshot.hosts if not host.has_ended]:
        headline += Text("; {pods:pod} still terminating", pods=len(remaining))
    event = snapshot.find_event(*_JOB_FAILURES, "DeadlineExceeded", kind="Job")
    evidence = (*_describe_last_ends(snapshot), *describe_event(event))
    cut_off = [host for host in cut_off_hosts(snapshot) if host.is_leaving]
    stuck = termination.find_stuck(snapshot) or (
        _stuck_on_lost_node(snapshot, cut_off[0]) if cut_off else None
    )
    if stuck is not None:
        headline += Text(": {what}", what=stuck.description)
        return Answer("stuck", headline, evidence, stuck.next_step)
    step = advise_reading_logs(snapshot)
    return Answer("oom" if has_oom else "restarting", headline, evidence, step)


def _node_headline(snapshot: Snapshot, node: Text, stranded: list[Host]) -> Text:
    group = host_group(stranded, snapshot)
    return Text("waits: {node}; {hosts} {hosts:is|are} on it", node=node, hosts=group)


_JOB_FAILURES = ("BackoffLimitExceeded", "PodFailurePolicy")


def explain_crash_loop(snapshot: Snapshot) -> Answer | None:
    """Explain a job that was restarted several times and has saved nothing."""
    status, last = derive_status(snapshot), snapshot.report.last_end
    if (
        status.restart_counts.charged < _CRASH_LOOP_RESTARTS
        or "log" in snapshot.unread_reasons
        or snapshot.report.committed_step is not None
    ):
        return None
    last_step = None if last is None else last.verdict.step
    if status.state is State.RUNNING and last_step is not None and (status.step or 0) > last_step:
        return None
    template = (
        "crashes and restarts without saving a checkpoint: {restarts.charged} of "
        "{restarts.limit} restarts are used up"
    )
    headline = Text(template, restarts=status.restart_counts)
    limit = failures.describe_earlier_excess(snapshot)
    if last is not None:
        template = "; last: {result}: {message}"
        headline += Text(template, result=last.result, message=last.verdict.message)
        limit = limit or failures.describe_full_shm(snapshot, last.verdict)
    if limit is not None:
        headline += Text("; {limit}", limit=limit)
    event = snapshot.find_event(*_JOB_FAILURES, kind="Job")
    evidence = (*_describe_last_ends(snapshot), *describe_event(event))
    return Answer("crash-loop", headline, evidence, advise_reading_logs(snapshot))


# --- lost nodes -----------------------------------------------------------------------------------


def explain_node_lost(snapshot: Snapshot) -> Answer | None:
    """Explain a node that does not answer: its pods stay until it comes back or is deleted."""
    event = snapshot.find_event("NodeNotReady", kind="Pod")
    unready = [
        host
        for host in snapshot.hosts
        if host.running and not host.is_ready and not host.is_leaving
    ]
    if event is None:
        # Lost nodes are reported by events only.
        if "events" not in snapshot.unread_reasons or not unready:
            return None
        template = "runs, but {hosts} {hosts:is|are} not ready"
        headline = Text(template, hosts=host_group(unready, snapshot))
        return unread_answer(snapshot, "events", headline)
    lost = [host for host in unready if host.pod in event["names"]]
    if not lost:
        return None
    headline = Text(
        "waits: {nodes:node|nodes} {nodes} {nodes:is|are} NotReady, with {hosts} on "
        "{nodes:it|them}",
        nodes=list(dict.fromkeys(host.node or "" for host in lost)),
        hosts=host_group(lost, snapshot),
    )
    return Answer("node-lost", headline, describe_event(event))


def explain_silent_node(snapshot: Snapshot) -> Answer | None:
    """Explain a node that does not answer by what its object reports."""
    node, stranded = snapshot.silent_node, _stranded_hosts(snapshot)
    if node is None or not stranded:
        return None
    tolerations = pod_template(snapshot.jobset)["spec"].get("tolerations", ())
    limits_s = [
        toleration["tolerationSeconds"]
        for toleration in tolerations
        if toleration.get("key") in (None, _UNREACHABLE)
        and toleration.get("effect") in (None, "NoExecute")
        and "tolerationSeconds" in toleration
    ]
    step = _wait_for_node(
        node["metadata"]["name"],
        "wait: Kubernetes evicts its pods after {tolerated:age}, but",
        tolerated=min(limits_s, default=_DEFAULT_TOLERATION_S),
    )
    evidence = describe_event(snapshot.find_event("NodeNotReady", kind="Pod"))
    why = termination.describe_silence(node, snapshot.now)
    return Answer("node-lost", _node_headline(snapshot, why, stranded), evidence, step)


def explain_deleted_node(snapshot: Snapshot) -> Answer | None:
    """Explain pods that still have phase Running on a node that no longer exists."""
    node, stranded = snapshot.deleted_node, _stranded_hosts(snapshot)
    if node is None or not stranded:
        return None
    headline = _node_headline(snapshot, termination.describe_deletion(node, snapshot.now), stranded)
    return Answer("node-lost", headline, next_step=termination.wait_for_collection(stranded[0].pod))


def _stranded_hosts(snapshot: Snapshot) -> list[Host]:
    """Return the hosts on the silent or deleted node that are not deleted themselves."""
    return [
        host for host in snapshot.hosts if snapshot.is_on_silent_node(host) and not host.is_leaving
    ]


# --- lost hosts, of a gang whose processes have run in these pods ---------------------------------

# What may hold up the pod that takes the place of a lost one.
_POD_CAUSES: tuple[Cause, ...] = (
    admission.explain_missing_pods,
    scheduling.explain_unscheduled,
    containers.explain_image_pull,
    containers.explain_not_started,
)


def explain_lost_host(snapshot: Snapshot) -> Answer | None:
    """Explain that a pod is missing, or a host holds no rank yet."""
    state = derive_state(snapshot)
    if state not in (State.RUNNING, State.GATHERING) or not has_begun(snapshot):
        return None
    missing = missing_hosts(snapshot)
    if state is State.RUNNING:
        return None if snapshot.report.is_judged else _explain_partial_run(snapshot, missing)
    if (answer := _explain_new_leader(snapshot)) is not None:
        return answer
    return _explain_missing_hosts(snapshot, missing) if missing else None


def _explain_new_leader(snapshot: Snapshot) -> Answer | None:
    """Explain that host 0 was made again, and the others, which kept their pods, are joining it."""
    report, leader = snapshot.report, snapshot.hosts[0]
    joining = [number for number in report.missing_hosts if number != 0]
    if report.heartbeat is None:
        joining = [host.number for host in snapshot.hosts if host.number != 0]
    elif report.stage != "gather":
        return None
    if not joining or not leader.has_started or not is_leader_new(snapshot):
        return None
    age_s = seconds_since(leader.running.get("startedAt"), snapshot.now) or 0.0
    by_number = {host.number: host for host in snapshot.hosts}
    present = [by_number[number] for number in joining if number in by_number]
    is_quick = all(host.has_started and not host.has_ended for host in present)
    if age_s > _REJOIN_S or len(present) < len(joining) or not is_quick:
        return None
    headline = Text(
        "starts again: host 0 was made again, and {joining} {numbers:is|are} joining it",
        joining=render_numbers(joining),
        numbers=joining,
    )
    step = advise_wait("wait: they join within seconds, and all ranks start again.")
    return Answer("host-lost", headline, _describe_last_end(snapshot), step)


def explain_blocked_completion(snapshot: Snapshot) -> Answer | None:
    """Explain a Job that is not complete, after its ranks are done, because a node is silent."""
    cut_off = cut_off_hosts(snapshot)
    if not cut_off or not snapshot.waits_for_pods or not is_gang_done(snapshot):
        return None
    stuck = termination.find_stuck(snapshot) or _stuck_on_lost_node(snapshot, cut_off[0])
    template = "has finished, but its Job is not complete before pod {pod} has ended: {what}"
    headline = Text(template, pod=cut_off[0].pod, what=stuck.description)
    return Answer("stuck", headline, _describe_last_ends(snapshot), stuck.next_step)


def _explain_missing_hosts(snapshot: Snapshot, missing: list[int]) -> Answer:
    """Explain that the other hosts keep their pods."""
    needed = [host for host in missing if host in snapshot.members] or missing
    spares = spare_hosts(snapshot)
    if 0 not in needed and len(spares) >= len(needed):
        # For the seconds until the processes start again, the gang waits for no pod.
        spares = spares[: len(needed)]
        headline = Text(
            "is about to start again without {needed}: {names} {spares:takes its ranks|take "
            "their ranks}",
            needed=render_numbers(needed),
            names=render_numbers(spares),
            spares=spares,
        )
        return Answer("spare-used", headline, _describe_last_end(snapshot))
    blocker = _explain_pod_blocker(snapshot, needed)
    headline = Text(
        "waits for {needed}{leads} to come back: {why}; the other {present:host} "
        "{present:keeps its pod|keep their pods}",
        needed=render_numbers(needed),
        leads=Text(", which leads," if needed == [0] else ""),
        why=blocker.headline,
        present=snapshot.expected_hosts - len(missing),
    )
    if hosts.can_move_ranks(snapshot.jobset) and 0 not in needed and not spares:
        headline += Text("; no spare is left")
    return dataclasses.replace(blocker, headline=headline)


def _explain_partial_run(snapshot: Snapshot, missing: list[int]) -> Answer | None:
    """Explain a job that runs without some hosts, or although a node does not answer."""
    if reachable := reachable_hosts(snapshot):
        return _explain_lost_kubelet(snapshot, reachable)
    members, initial = snapshot.members, hosts.initial_members(snapshot.jobset)
    activity = describe_phase(derive_status(snapshot))
    spares = spare_hosts(snapshot)
    names = render_numbers(spares)
    if len(members) < len(initial):
        template = "runs with {members} of {initial:host}: {activity}"
        headline = Text(template, members=len(members), initial=len(initial), activity=activity)
        if not missing:
            headline += Text("; {names} will hold ranks after the next save", names=names)
            return Answer("shrunk", headline)
        blocker = _explain_pod_blocker(snapshot, missing)
        template = "; it waits for {missing} to grow again: {why}"
        headline += Text(template, missing=render_numbers(missing), why=blocker.headline)
        return dataclasses.replace(blocker, situation="shrunk", headline=headline)
    if not missing:
        return None
    blocker = _explain_pod_blocker(snapshot, missing)
    template = "{names} {spares:is a spare|are spares}" if spares else "no spare is ready"
    headline = Text(
        "runs: {activity}, with its ranks on {members}; {left}, since {missing} {numbers:is|are} "
        "missing: {why}",
        activity=activity,
        members=render_numbers(members.hosts),
        left=Text(template, names=names, spares=spares),
        missing=render_numbers(missing),
        numbers=missing,
        why=blocker.headline,
    )
    return dataclasses.replace(blocker, situation="spare-used", headline=headline)


def _explain_lost_kubelet(snapshot: Snapshot, reachable: list[Host]) -> Answer:
    """Explain that only the kubelet of a node is gone: nothing is lost before it is back."""
    status, node = derive_status(snapshot), reachable[0].node or ""
    step = EMPTY_TEXT if status.step is None else Text(", at {step}", step=_describe_step(status))
    headline = Text(
        "runs{step}: {silence}, but {hosts:the agent|the agents} of {hosts} on it {hosts:does|do}",
        step=step,
        silence=_describe_silent_node(snapshot, node),
        hosts=host_group([host for host in reachable if host.node == node], snapshot),
    )
    next_step = advise_ask(
        "have the kubelet of node {node} started again: it then ends the pods that Kubernetes has "
        "evicted meanwhile, as a drain does.",
        node=node,
    )
    evidence = describe_event(snapshot.find_event("NodeNotReady", kind="Pod"))
    return Answer("node-lost", headline, evidence, next_step)


def _describe_silent_node(snapshot: Snapshot, name: str) -> Text:
    """Return what is known of a node that does not answer."""
    node = snapshot.silent_node
    if node is not None and node["metadata"]["name"] == name:
        return termination.describe_silence(node, snapshot.now)
    return Text("node {name} is NotReady", name=name)


def _explain_pod_blocker(snapshot: Snapshot, missing: list[int]) -> Answer:
    """Explain what holds up the pods of missing hosts; the headline is a clause.

    The evidence begins with how the last attempt ended.
    """
    last_end = _describe_last_end(snapshot)
    if (answer := first_answer(_POD_CAUSES, snapshot)) is not None:
        clause, evidence = answer.clause or answer.headline, (*last_end, *answer.evidence)
        return Answer("host-lost", clause, evidence, answer.next_step)
    present = [host for host in snapshot.hosts if host.number in missing and host.phase != "Failed"]
    if cut_off := [host for host in cut_off_hosts(snapshot) if host in present]:
        stuck = termination.find_stuck(snapshot) or _stuck_on_lost_node(snapshot, cut_off[0])
        evidence = (*last_end, *describe_event(snapshot.find_event("NodeNotReady", kind="Pod")))
        return Answer("host-lost", stuck.description, evidence, stuck.next_step)
    if unresponsive := [host for host in unresponsive_hosts(snapshot) if host in present]:
        host = unresponsive[0]
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
    if present:
        return Answer("host-lost", Text("{host} is starting", host=present[0].name), last_end)
    template = (
        "{missing:its pod does|their pods do} not exist yet, since Kubernetes makes it again "
        "10 s after it failed"
    )
    return Answer("host-lost", Text(template, missing=missing), last_end)


def _describe_last_end(snapshot: Snapshot) -> Evidence:
    last = snapshot.report.last_end
    return () if last is None else (quote_message(last.description),)


def _stuck_on_lost_node(snapshot: Snapshot, host: Host) -> StuckObject:
    """Return what is known of the lost node of a pod that still has phase Running."""
    node = snapshot.deleted_node
    if node is not None and node.name == host.node:
        return StuckObject(
            termination.describe_deletion(node, snapshot.now),
            termination.wait_for_collection(host.pod),
        )
    name = host.node or ""
    silence = _describe_silent_node(snapshot, name)
    description = Text("{silence}, with pod {pod} on it", silence=silence, pod=host.pod)
    return StuckObject(description, _wait_for_node(name, pods="that pod"))


# --- running pods ---------------------------------------------------------------------------------


def explain_rendezvous(snapshot: Snapshot) -> Answer | None:
    """Explain that the agents wait for each other."""
    report, beat = snapshot.report, snapshot.report.heartbeat
    if report.stage != "gather" or beat is None:
        return None
    missing = report.missing_hosts
    refused = tuple(map(quote_message, beat.refused))
    if not missing:
        return Answer("gathering", Text("is about to start: all hosts are connected"), refused)
    leaders = (host.running.get("startedAt") for host in snapshot.hosts if host.number == 0)
    waited_s = seconds_since(next(leaders, None), snapshot.now) or 0.0
    if (last := report.last_end) is not None and last.at is not None:
        # Host 0 has waited since the end of the attempt before.
        waited_s = min(waited_s, max(0.0, snapshot.now.timestamp() - last.at))
    is_late = waited_s >= _LATE_S
    template = "waits at rendezvous for {waited:age}" if is_late else "waits at rendezvous"
    more = (beat.missing_count or len(missing)) - len(missing)
    template += ": {missing} and {more} more" if more else ": {missing}"
    headline = Text(
        template + " of {expected} missing",
        waited=waited_s,
        missing=render_numbers(missing),
        more=more,
        expected=snapshot.expected_hosts,
    )
    pods = [host for host in snapshot.hosts if host.number in missing][:8]
    evidence = (*map(_describe_pod, pods), *refused)
    # Host 0 leads, and so it runs.
    is_nameless = 0 in missing and is_late
    if is_nameless:
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
    if is_nameless:
        step = advise_run(
            "{logs}; ask the cluster administrator whether the cluster's DNS (CoreDNS) runs.",
            logs=launcher_command("logs", JOB_NAME),
        )
    elif pods and not is_late:
        step = advise_wait("wait: agents connect within seconds of their start.")
    elif pods:
        step = advise_run(
            "{logs}; can it resolve and reach host 0? `{doctor}` checks the cluster's DNS.",
            logs=kubectl_command("logs", pods[0].pod),
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
    beat = snapshot.report.heartbeat
    if snapshot.report.attempt_end is not None or beat is None or not beat.overdue:
        return None
    headline = Text("hangs: {overdue}", overdue=beat.overdue)
    return Answer("hang", headline, _describe_phases(snapshot))


def explain_running(snapshot: Snapshot) -> Answer | None:
    """Explain that it runs; an earlier failure is part of the answer."""
    status, report = derive_status(snapshot), snapshot.report
    if status.state is not State.RUNNING:
        return None
    if report.heartbeat is None:
        headline = Text("runs: {ready}", ready=_describe_ready(snapshot, status))
        if (why := snapshot.unread_reasons.get("log")) is not None:
            headline += Text("; what they do is unknown: {why}", why=why)
        return Answer("running", headline)
    last, last_ends = report.last_end, _describe_last_ends(snapshot)
    if last is not None and report.is_judged:
        template = "has ended attempt {last.attempt}: {last.result}: {last.verdict.message}"
        situation = "running" if last.verdict.code == contract.DONE else "restarting"
        next_step = advise_reading_logs(snapshot)
        return Answer(situation, Text(template, last=last), last_ends, next_step)
    headline, situation = Text("runs"), "running"
    if last is not None and last.attempt + 1 == report.heartbeat.attempt:
        message, situation = last.verdict.message[:200], "restarted"
        headline += Text(" again after {result}: {message}", result=last.result, message=message)
    ended = _describe_ended_ranks(snapshot)
    if status.phase is None and status.ready is not None and status.ready < status.hosts:
        activity = _describe_ready(snapshot, status)
    else:
        activity = describe_phase(status, is_partly=ended is not EMPTY_TEXT)
    if (joining := _describe_joining(snapshot)) is not EMPTY_TEXT:
        activity = joining + _describe_proxies(snapshot)
    headline += Text(": {what}{ended}", what=activity, ended=ended)
    step = PREPARING_STEP if status.phase == "prepare" else None
    return Answer(situation, headline, (*last_ends, *_describe_phases(snapshot)), step)


def _describe_joining(snapshot: Snapshot) -> Text:
    """Return "rank 1 waits in jax.distributed.initialize for rank 0", or an empty text."""
    beat = snapshot.report.heartbeat
    joining = [] if beat is None else list(beat.phases.get("joining", ()))
    if beat is None or not joining:
        return EMPTY_TEXT
    if beat.counts["joining"] == sum(beat.counts.values()):
        return describe_phase(derive_status(snapshot))
    others = [rank for phase in ("unsaid", "ended") for rank in beat.phases.get(phase, ())]
    template = "{names} {ranks:waits|wait} in jax.distributed.initialize"
    text = Text(template, names=render_numbers(joining, "rank"), ranks=joining)
    return text + (
        Text(" for {names}", names=render_numbers(others, "rank")) if others else EMPTY_TEXT
    )


def _describe_proxies(snapshot: Snapshot) -> Text:
    """Return the variables of the pods that name a proxy, which may keep them from joining."""
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
        # Programs that report nothing.
        case "unsaid" | None if status.steps is not None:
            template = "its processes start: imports, devices, JAX's own initialization{at}"
        case "unsaid" | None:
            template = "its program reports no steps{at}"
        case _:
            template = "in {phase}{at}{spent}"
    return Text(template, phase=status.phase, at=at, spent=spent)


def _describe_ended_ranks(snapshot: Snapshot) -> Text:
    """Return "; rank 1 has ended, rank 0 still runs"."""
    beat = snapshot.report.heartbeat
    if beat is None:
        return EMPTY_TEXT
    total, number = sum(beat.counts.values()), beat.counts.get("ended", 0)
    if not 0 < number < total:
        return EMPTY_TEXT
    ended = list(beat.phases.get("ended", ()))
    running = [rank for phase, ranks in beat.phases.items() if phase != "ended" for rank in ranks]
    if len(ended) < number or len(running) < total - number:
        return Text("; {number:rank} of {total} have ended", number=number, total=total)
    return Text(
        "; {ended_names} {ended:has|have} ended, {running_names} still {running:runs|run}",
        ended_names=render_numbers(ended, "rank"),
        running_names=render_numbers(running, "rank"),
        ended=ended,
        running=running,
    )


def _describe_phases(snapshot: Snapshot) -> Evidence:
    """Return how many ranks are in which phase, if they differ."""
    beat = snapshot.report.heartbeat
    if beat is None or len(beat.counts) < 2:
        return ()
    templates = dict.fromkeys(beat.counts, "{number:rank} in {phase} ({ranks})")
    templates |= {
        "ended": "{number:rank} ended ({ranks})",
        "joining": "{number:rank} in jax.distributed.initialize ({ranks})",
        "unsaid": "{number:rank} running ({ranks})",
    }
    parts = [
        Text(templates[phase], number=number, phase=phase, ranks=list(beat.phases.get(phase, ())))
        for phase, number in beat.counts.items()
    ]
    return (Text("{parts:; }", parts=parts),)


def _describe_last_ends(snapshot: Snapshot) -> Evidence:
    """Return the last verdicts, the newest first."""
    report = snapshot.report
    ends = [*report.earlier_ends, *filter(None, [report.attempt_end])]
    return tuple(quote_message(end.description) for end in reversed(ends[-3:]))
