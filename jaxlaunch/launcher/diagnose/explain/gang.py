"""Causes: lost hosts and nodes, restarts, missing hosts, hangs, and the ranks' phases. Pure."""

from __future__ import annotations

import dataclasses
import re

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain import admission, containers, scheduling
from jaxlaunch.launcher.diagnose.explain.answer import (
    LIVENESS_PREFIX,
    Answer,
    Cause,
    Evidence,
    first_answer,
    is_liveness_failure,
    unread_answer,
)
from jaxlaunch.launcher.diagnose.explain.failures import (
    describe_earlier_excess,
    describe_full_shm,
    describe_oom,
    explain_excess_eviction,
    is_oom,
)
from jaxlaunch.launcher.diagnose.explain.situations import SITUATIONS
from jaxlaunch.launcher.diagnose.explain.termination import (
    StuckObject,
    describe_deletion,
    describe_silence,
    find_stuck,
    wait_for_collection,
)
from jaxlaunch.launcher.diagnose.text import (
    EMPTY_TEXT,
    JOB_NAME,
    HostGroup,
    NextStep,
    Text,
    advise_ask,
    advise_change,
    advise_run,
    advise_wait,
    describe_event,
    kubectl_command,
    launcher_command,
)
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.job_status import JobStatus, State, derive_state, derive_status
from jaxlaunch.launcher.jobs.status.snapshot import (
    Snapshot,
    cut_off_hosts,
    has_begun,
    is_gang_done,
    missing_hosts,
    reachable_hosts,
    spare_hosts,
    unresponsive_hosts,
)
from jaxlaunch.launcher.kubernetes.objects import pod_template, seconds_since
from jaxlaunch.records.verdict import render_numbers

# So many charged restarts without a committed step make a crash loop.
_CRASH_LOOP_RESTARTS = 2
# A probe that failed within this time is said to fail.
_RECENT_S = 60.0
# The taint of a node that does not answer, and for how long pods tolerate it that say nothing of
# it.
_UNREACHABLE = "node.kubernetes.io/unreachable"
_DEFAULT_TOLERATION_S = 300.0
# A rendezvous that takes longer than this is said to take long.
_LATE_S = 15.0
_KUBERNETES_LEAD = Text("wait: Kubernetes")


# --- disruptions and restarts ---------------------------------------------------------------------


def explain_disruption(snapshot: Snapshot) -> Answer | None:
    """Explain pods that were removed: by an eviction, a drain, a preemption or a lost node."""
    if (excess := explain_excess_eviction(snapshot)) is not None:
        template = "is restarting: {why}; that counts against the limit of restarts.crash"
        headline = Text(template, why=excess.headline)
        return Answer(
            excess.situation,
            headline,
            (*excess.evidence, *_describe_last_ends(snapshot)),
            excess.next_step,
        )
    removed_hosts = [
        host
        for host in snapshot.hosts
        if host.disruption or host.reason in ("Evicted", "NodeLost", "Preempting")
    ]
    surrendered_hosts = [
        host
        for host in snapshot.hosts
        if host.ends_gang and host.terminated.get("exitCode") == contract.LOST
    ]
    # A gang that waited in vain for the pod that takes the place of a lost one was not disrupted:
    # that counts.
    if not removed_hosts or (hosts.has_pod_replacement(snapshot.jobset) and surrendered_hosts):
        return None
    host = removed_hosts[0]
    reason = host.disruption.get("reason") or host.reason
    message = host.disruption.get("message") or host.message
    why, step = _describe_pressure(host, message) or (
        Text(_DISRUPTIONS.get(reason, "disrupted ({reason})"), node=host.node, reason=reason),
        None,
    )
    group = HostGroup.from_hosts(removed_hosts, snapshot.expected_hosts)
    headline = Text("was interrupted: {hosts} {hosts:was|were} {why}", hosts=group, why=why)
    evidence = (
        Text("Pod {pod}: {reason}: {message}", pod=host.pod, reason=reason, message=message),
        *_describe_last_ends(snapshot),
    )
    if (stuck := find_stuck(snapshot)) is not None:
        return Answer(
            "stuck", headline + Text("; {what}", what=stuck.description), evidence, stuck.next_step
        )
    if (stuck := _find_unending(snapshot, removed_hosts)) is not None:
        return Answer(
            "disrupted",
            headline + Text("; {what}", what=stuck.description),
            evidence,
            stuck.next_step,
        )
    restart_text = (
        "{hosts:that pod is|those pods are} made again"
        if snapshot.waits_for_pods
        else "it restarts"
    )
    headline += Text(
        "; " + restart_text + ", which does not count against the restart limits", hosts=group
    )
    return Answer("disrupted", headline, evidence, step)


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


def _describe_pressure(host: Host, message: str) -> tuple[Text, NextStep | None] | None:
    """Return which resource the node ran out of, by the kubelet's message, and the next step."""
    low, used = _LOW_RESOURCE.search(message), _USED_RESOURCE.search(message)
    if low is None:
        return None
    why = Text(
        "evicted by the kubelet of node {node}, which was low on {what}",
        node=host.node,
        what=low["what"],
    )
    if used is None:
        return why, None
    step = advise_wait(
        "wait; the kubelet evicts first what uses more than it requests: request under resources: "
        "in job.yaml what it uses."
    )
    return why + Text("; it used {used}, and requests {request}", **used.groupdict()), step


def _find_unending(snapshot: Snapshot, removed_hosts: list[Host]) -> StuckObject | None:
    """Return what keeps deleted pods from ending: a node that does not answer."""
    event = snapshot.find_event("NodeNotReady", kind="Pod", on_hosts=removed_hosts)
    node = snapshot.silent_node
    cut_off = [
        host for host in removed_hosts if host.is_leaving and host.running and not host.is_ready
    ]
    if not cut_off or not (event or snapshot.is_on_silent_node(cut_off[0])):
        return None
    name = cut_off[0].node or ""
    why = (
        Text("node {node} is NotReady", node=name)
        if node is None
        else describe_silence(node, snapshot.now)
    )
    description = Text("{pods:that pod|those pods} cannot end, since {why}", pods=cut_off, why=why)
    return StuckObject(description, _wait_for_node(name, _KUBERNETES_LEAD))


def _wait_for_node(node: str, lead: Text, pods: str = "them") -> NextStep:
    """Return what becomes of pods on a node that does not answer."""
    return advise_wait(
        "{lead} makes {pods} again elsewhere only when the node is back or deleted; if it is gone "
        "for good: {delete}",
        lead=lead,
        pods=Text(pods),
        delete=kubectl_command("delete", "node", node, is_namespaced=False),
    )


def explain_unhealthy(snapshot: Snapshot) -> Answer | None:
    """Explain a container that the kubelet restarts again and again, for a probe or a hook."""
    event = snapshot.find_event("Unhealthy", "FailedPostStartHook", kind="Pod")
    if (
        event is None
        or not snapshot.restarts
        or (seconds_since(event["last"], snapshot.now) or 0.0) > _RECENT_S
    ):
        return None
    if event["reason"] == "Unhealthy" and not is_liveness_failure(event):
        return None
    cause = Text("liveness probe" if event["reason"] == "Unhealthy" else "postStart hook")
    headline = Text("is restarted again and again: its {what} fails", what=cause)
    if message := event["message"].removeprefix(LIVENESS_PREFIX).lstrip(": "):
        headline += Text(": {message}", message=message)
    step = advise_change("fix or remove the {what}; jobs need none.", what=cause)
    return Answer(
        "unhealthy", headline, (*describe_event(event), *_describe_last_ends(snapshot)), step
    )


def explain_restart(snapshot: Snapshot) -> Answer | None:
    """Explain that a generation ended, and the pods of the next do not exist yet."""
    if derive_status(snapshot).state is not State.RESTARTING:
        return None
    remaining = [host for host in snapshot.hosts if not host.has_ended]
    last, why = snapshot.report.attempt_end, EMPTY_TEXT
    failed = next((host for host in snapshot.hosts if host.terminated.get("exitCode")), None)
    if is_oom(snapshot):
        why = Text(": {oom}", oom=describe_oom(snapshot))
    elif last is not None:
        why = Text(" after {result}: {message}", result=last.result, message=last.verdict.message)
    elif failed is not None:
        why = Text(
            ": {host} ended with exit code {code}",
            host=failed.name,
            code=failed.terminated["exitCode"],
        )
    headline = Text("is restarting{why}", why=why)
    if remaining:
        headline += Text("; {pods:pod} still terminating", pods=len(remaining))
    event = snapshot.find_event(
        "BackoffLimitExceeded", "PodFailurePolicy", "DeadlineExceeded", kind="Job"
    )
    evidence = (*_describe_last_ends(snapshot), *describe_event(event))
    cut_off = [host for host in cut_off_hosts(snapshot) if host.is_leaving]
    stuck = find_stuck(snapshot) or (_stuck_on_lost_node(snapshot, cut_off[0]) if cut_off else None)
    if stuck is not None:
        return Answer(
            "stuck", headline + Text(": {what}", what=stuck.description), evidence, stuck.next_step
        )
    situation = "oom" if is_oom(snapshot) else "restarting"
    return Answer(situation, headline, evidence, SITUATIONS["restarting"].next_step)


def explain_crash_loop(snapshot: Snapshot) -> Answer | None:
    """Explain a job that was restarted several times, and never got further."""
    status, last = derive_status(snapshot), snapshot.report.last_end
    if (
        status.restart_counts.charged < _CRASH_LOOP_RESTARTS
        or "log" in snapshot.unread_reasons
        or snapshot.report.committed_step is not None
    ):
        return None
    last_step = None if last is None else last.verdict.step
    is_running = status.state is State.RUNNING and status.step is not None
    if is_running and last_step is not None and (status.step or 0) > last_step:
        return None
    headline = Text(
        "crashes and restarts without saving a checkpoint: {charged} of {limit} restarts "
        "are used up",
        charged=status.restart_counts.charged,
        limit=status.restart_counts.limit,
    )
    limit = describe_earlier_excess(snapshot)
    if last is not None:
        headline += Text(
            "; last: {result}: {message}", result=last.result, message=last.verdict.message
        )
        limit = limit or describe_full_shm(snapshot, last.verdict)
    if limit is not None:
        headline += Text("; {limit}", limit=limit)
    event = snapshot.find_event("BackoffLimitExceeded", "PodFailurePolicy", kind="Job")
    return Answer("crash-loop", headline, (*_describe_last_ends(snapshot), *describe_event(event)))


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
        # Where events could not be read, no more is known of a lost node.
        if "events" not in snapshot.unread_reasons or not unready:
            return None
        group = HostGroup.from_hosts(unready, snapshot.expected_hosts)
        return unread_answer(
            snapshot, "events", Text("runs, but {hosts} {hosts:is|are} not ready", hosts=group)
        )
    lost = [host for host in unready if host.pod in event["names"]]
    if not lost:
        return None
    headline = Text(
        "waits: {nodes:node|nodes} {nodes} {nodes:is|are} NotReady, with {hosts} on "
        "{nodes:it|them}",
        nodes=list(dict.fromkeys(host.node or "" for host in lost)),
        hosts=HostGroup.from_hosts(lost, snapshot.expected_hosts),
    )
    return Answer("node-lost", headline, describe_event(event))


def explain_silent_node(snapshot: Snapshot) -> Answer | None:
    """Explain a node that does not answer by what its object reports."""
    node, stranded = snapshot.silent_node, _stranded_hosts(snapshot)
    if node is None or not stranded:
        return None
    tolerated_s = min(
        (
            toleration["tolerationSeconds"]
            for toleration in pod_template(snapshot.jobset)["spec"].get("tolerations", ())
            if toleration.get("key") in (None, _UNREACHABLE)
            and toleration.get("effect") in (None, "NoExecute")
            if "tolerationSeconds" in toleration
        ),
        default=_DEFAULT_TOLERATION_S,
    )
    lead = Text(
        "wait: Kubernetes evicts its pods after {tolerated:age}, but", tolerated=tolerated_s
    )
    step = _wait_for_node(node["metadata"]["name"], lead)
    evidence = describe_event(snapshot.find_event("NodeNotReady", kind="Pod"))
    return _waits_for_node(describe_silence(node, snapshot.now), stranded, snapshot, evidence, step)


def explain_deleted_node(snapshot: Snapshot) -> Answer | None:
    """Explain pods that still have phase Running on a node that no longer exists."""
    node, stranded = snapshot.deleted_node, _stranded_hosts(snapshot)
    if node is None or not stranded:
        return None
    step = wait_for_collection(stranded[0].pod)
    return _waits_for_node(describe_deletion(node, snapshot.now), stranded, snapshot, (), step)


def _stranded_hosts(snapshot: Snapshot) -> list[Host]:
    """Return the hosts on the silent or deleted node that are not deleted themselves."""
    return [
        host for host in snapshot.hosts if snapshot.is_on_silent_node(host) and not host.is_leaving
    ]


def _waits_for_node(
    node: Text, stranded: list[Host], snapshot: Snapshot, evidence: Evidence, next_step: NextStep
) -> Answer:
    group = HostGroup.from_hosts(stranded, snapshot.expected_hosts)
    headline = Text("waits: {node}; {hosts} {hosts:is|are} on it", node=node, hosts=group)
    return Answer("node-lost", headline, evidence, next_step)


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
    away = missing_hosts(snapshot)
    if state is State.RUNNING:
        return None if snapshot.report.is_judged else _explain_partial_run(snapshot, away)
    return _explain_missing_hosts(snapshot, away) if away else None


def explain_blocked_completion(snapshot: Snapshot) -> Answer | None:
    """Explain a Job that is not complete although all ranks are done: one of its nodes is silent."""
    cut_off = cut_off_hosts(snapshot)
    if not cut_off or not snapshot.waits_for_pods or not is_gang_done(snapshot):
        return None
    stuck = find_stuck(snapshot) or _stuck_on_lost_node(snapshot, cut_off[0])
    template = "has finished, but its Job is not complete before pod {pod} has ended: {what}"
    return Answer(
        "stuck",
        Text(template, pod=cut_off[0].pod, what=stuck.description),
        _describe_last_ends(snapshot),
        stuck.next_step,
    )


def _explain_missing_hosts(snapshot: Snapshot, away: list[int]) -> Answer:
    """Explain that the hosts that are there keep their pods."""
    needed = [host for host in away if host in snapshot.members] or away
    spares = spare_hosts(snapshot)
    if 0 not in needed and len(spares) >= len(needed):
        # For the seconds until the processes start again, the gang waits for no pod.
        last, spares = snapshot.report.last_end, spares[: len(needed)]
        headline = Text(
            "is about to start again without {needed}: {names} {spares:takes its ranks|take "
            "their ranks}",
            needed=render_numbers(needed),
            names=render_numbers(spares),
            spares=spares,
        )
        return Answer(
            "spare-used", headline, () if last is None else (Text("{end}", end=last.description),)
        )
    blocker = _explain_pod_blocker(snapshot, needed)
    present = snapshot.expected_hosts - len(away)
    headline = Text(
        "waits for {needed}{leads} to come back: {why}; the other {present:host} "
        "{present:keeps its pod|keep their pods}",
        needed=render_numbers(needed),
        leads=Text(", which leads," if needed == [0] else ""),
        why=blocker.headline,
        present=present,
    )
    if hosts.can_move_ranks(snapshot.jobset) and 0 not in needed and not spares:
        headline += Text("; no spare is left")
    return dataclasses.replace(blocker, headline=headline)


def _explain_partial_run(snapshot: Snapshot, away: list[int]) -> Answer | None:
    """Explain a job that runs without some hosts, or although a node does not answer."""
    if heard := reachable_hosts(snapshot):
        return _explain_lost_kubelet(snapshot, heard)
    members = snapshot.members
    most = hosts.initial_members(snapshot.jobset)
    spares = spare_hosts(snapshot)
    doing = describe_phase(derive_status(snapshot))
    if len(members) < len(most):
        template = "runs with {members} of {most:host}: {doing}"
        headline = Text(template, members=len(members), most=len(most), doing=doing)
        if not away:
            return Answer(
                "shrunk",
                headline
                + Text(
                    "; {spares} will hold ranks after the next save", spares=render_numbers(spares)
                ),
            )
        blocker = _explain_pod_blocker(snapshot, away)
        headline += Text(
            "; it waits for {away} to grow again: {why}",
            away=render_numbers(away),
            why=blocker.headline,
        )
        return dataclasses.replace(blocker, situation="shrunk", headline=headline)
    if not away:
        return None
    blocker = _explain_pod_blocker(snapshot, away)
    spares_template = "{names} {spares:is a spare|are spares}" if spares else "no spare is ready"
    headline = Text(
        "runs: {doing}, with its ranks on {members}; {left}, since {away} {numbers:is|are} "
        "missing: {why}",
        doing=doing,
        members=render_numbers(members.hosts),
        left=Text(spares_template, names=render_numbers(spares), spares=spares),
        away=render_numbers(away),
        numbers=away,
        why=blocker.headline,
    )
    return dataclasses.replace(blocker, situation="spare-used", headline=headline)


def _explain_lost_kubelet(snapshot: Snapshot, heard: list[Host]) -> Answer:
    """Explain that only the kubelet of a node is gone: nothing is lost before it is back."""
    status, node = derive_status(snapshot), heard[0].node or ""
    group = HostGroup.from_hosts(
        [host for host in heard if host.node == node], snapshot.expected_hosts
    )
    headline = Text(
        "runs{step}: {silence}, but {hosts:the agent|the agents} of {hosts} on it {hosts:does|do}",
        step=EMPTY_TEXT
        if status.step is None
        else Text(", at {step}", step=_describe_step(status)),
        silence=_describe_silent_node(snapshot, node),
        hosts=group,
    )
    step = advise_ask(
        "have the kubelet of node {node} started again: it then ends the pods that Kubernetes has "
        "evicted meanwhile, as a drain does.",
        node=node,
    )
    return Answer(
        "node-lost", headline, describe_event(snapshot.find_event("NodeNotReady", kind="Pod")), step
    )


def _describe_silent_node(snapshot: Snapshot, name: str) -> Text:
    """Return what is known of a node that does not answer."""
    node = snapshot.silent_node
    if node is not None and node["metadata"]["name"] == name:
        return describe_silence(node, snapshot.now)
    return Text("node {name} is NotReady", name=name)


def _explain_pod_blocker(snapshot: Snapshot, away: list[int]) -> Answer:
    """Explain what holds up the pods of hosts that are away; the headline is a clause.

    The evidence begins with how the last attempt ended.
    """
    last = snapshot.report.last_end
    end_lines: Evidence = () if last is None else (Text("{end}", end=last.description),)
    if (answer := first_answer(_POD_CAUSES, snapshot)) is not None:
        return Answer(
            "host-lost",
            answer.clause or answer.headline,
            (*end_lines, *answer.evidence),
            answer.next_step,
        )
    present = [host for host in snapshot.hosts if host.number in away and host.phase != "Failed"]
    if cut_off := [host for host in cut_off_hosts(snapshot) if host in present]:
        stuck = find_stuck(snapshot) or _stuck_on_lost_node(snapshot, cut_off[0])
        evidence = (*end_lines, *describe_event(snapshot.find_event("NodeNotReady", kind="Pod")))
        return Answer("host-lost", stuck.description, evidence, stuck.next_step)
    if mute := [host for host in unresponsive_hosts(snapshot) if host in present]:
        template = (
            "its agent does not answer, and pod {host.pod} still reads as running on node "
            "{host.node}"
        )
        step = advise_wait(
            "wait: Kubernetes notices within about a minute that a node is gone; if the node is "
            "well, {delete} has the Job make another pod.",
            delete=kubectl_command("delete", "pod", mute[0].pod),
        )
        return Answer("host-lost", Text(template, host=mute[0]), end_lines, step)
    if present:
        return Answer("host-lost", Text("{host} is starting", host=present[0].name), end_lines)
    template = (
        "{away:its pod does|their pods do} not exist yet, since Kubernetes makes it again "
        "10 s after it failed"
    )
    return Answer("host-lost", Text(template, away=away), end_lines)


def _stuck_on_lost_node(snapshot: Snapshot, host: Host) -> StuckObject:
    """Return what is known of the lost node of a pod that still has phase Running."""
    node = snapshot.deleted_node
    if node is not None and node.name == host.node:
        return StuckObject(describe_deletion(node, snapshot.now), wait_for_collection(host.pod))
    description = Text(
        "{silence}, with pod {pod} on it",
        silence=_describe_silent_node(snapshot, host.node or ""),
        pod=host.pod,
    )
    return StuckObject(description, _wait_for_node(host.node or "", _KUBERNETES_LEAD, "that pod"))


# --- running pods ---------------------------------------------------------------------------------


def explain_rendezvous(snapshot: Snapshot) -> Answer | None:
    """Explain that the agents wait for each other."""
    report, beat = snapshot.report, snapshot.report.heartbeat
    if report.stage != "gather" or beat is None:
        return None
    missing, total = report.missing_hosts, beat.missing_count or len(report.missing_hosts)
    refused = tuple(Text("{line}", line=line) for line in beat.refused)
    if not missing:
        return Answer("gathering", Text("is about to start: all hosts are connected"), refused)
    began = next(
        (host.running.get("startedAt") for host in snapshot.hosts if host.number == 0), None
    )
    waited_s = seconds_since(began, snapshot.now) or 0.0
    headline = Text(
        "waits at rendezvous{span}: {missing}{more} of {expected} missing",
        span=EMPTY_TEXT if waited_s < _LATE_S else Text(" for {waited:age}", waited=waited_s),
        missing=render_numbers(missing),
        more=EMPTY_TEXT
        if total == len(missing)
        else Text(" and {more} more", more=total - len(missing)),
        expected=snapshot.expected_hosts,
    )
    pods = [host for host in snapshot.hosts if host.number in missing][:8]
    evidence = (*map(_describe_pod, pods), *refused)
    # Host 0 leads, and so it runs.
    is_nameless = 0 in missing and waited_s >= _LATE_S
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
        evidence = (*describe_event(event), *evidence)
        return Answer(
            "rendezvous",
            headline,
            evidence,
            rejection.next_step or SITUATIONS[rejection.situation].next_step,
        )
    if is_nameless:
        step = advise_run(
            "{logs}; ask the cluster administrator whether the cluster's DNS (CoreDNS) runs.",
            logs=launcher_command("logs", JOB_NAME),
        )
    elif pods:
        step = advise_run(
            "{logs}; can it resolve and reach host 0? `launcher doctor` checks the cluster's DNS.",
            logs=kubectl_command("logs", pods[0].pod),
        )
    else:
        step = advise_wait("their pods do not exist yet: wait.")
    return Answer("rendezvous", headline, evidence, step)


def _describe_pod(host: Host) -> Text:
    """Return the phase, reason and node of the pod of a host."""
    reason = (host.waiting or host.terminated).get("reason")
    line = (
        "{host.name}: {host.phase}"
        + (", {reason}" if reason else "")
        + (" on {host.node}" if host.node else "")
    )
    return Text(line, host=host, reason=reason)


def explain_hang(snapshot: Snapshot) -> Answer | None:
    """Explain that a rank exceeded one of its timeouts."""
    beat = snapshot.report.heartbeat
    if snapshot.report.attempt_end is not None or beat is None or not beat.overdue:
        return None
    return Answer(
        "hang", Text("hangs: {overdue}", overdue=beat.overdue), _describe_phases(snapshot)
    )


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
    last = report.last_end
    if last is not None and report.is_judged:
        template = "has ended attempt {last.attempt}: {last.result}: {last.verdict.message}"
        situation = "running" if last.verdict.code == contract.DONE else "restarting"
        step = SITUATIONS["restarting"].next_step
        return Answer(situation, Text(template, last=last), _describe_last_ends(snapshot), step)
    is_again = last is not None and last.attempt + 1 == report.heartbeat.attempt
    again_text = EMPTY_TEXT
    if last is not None and is_again:
        again_text = Text(
            " again after {result}: {message}",
            result=last.result,
            message=last.verdict.message[:200],
        )
    ended_text = _describe_ended_ranks(snapshot)
    is_short = status.phase is None and status.ready is not None and status.ready < status.hosts
    activity = (
        _describe_ready(snapshot, status)
        if is_short
        else describe_phase(status, is_partly=ended_text is not EMPTY_TEXT)
    )
    headline = Text("runs{again}: {what}{ended}", again=again_text, what=activity, ended=ended_text)
    evidence = (*_describe_last_ends(snapshot), *_describe_phases(snapshot))
    step = PREPARING_STEP if status.phase == "prepare" else None
    return Answer("restarted" if is_again else "running", headline, evidence, step)


PREPARING_STEP = advise_wait(
    "wait: its text is tokenized and packed, once; of hosts that share data.data_dir one works, "
    "and its log says how far it is. `launcher prepare` does it beforehand."
)


def _describe_ready(snapshot: Snapshot, status: JobStatus) -> Text:
    """Return "1 of 2 hosts ready; host 1 (pod …): containers with unready status: [main]"."""
    text = Text("{ready} of {hosts:host} ready", ready=status.ready, hosts=status.hosts)
    late = next((host for host in snapshot.hosts if host.unready_reason), None)
    return (
        text
        if late is None
        else text + Text("; {host}: {why}", host=late.name, why=late.unready_reason)
    )


def _describe_step(status: JobStatus) -> Text:
    return Text(
        "step {status.step} of {status.steps}" if status.steps else "step {status.step}",
        status=status,
    )


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
    total = 0 if beat is None else sum(beat.counts.values())
    if beat is None or not 0 < (number := beat.counts.get("ended", 0)) < total:
        return EMPTY_TEXT
    running_ranks = [
        rank for phase, ranks in beat.phases.items() if phase != "ended" for rank in ranks
    ]
    ended_ranks = list(beat.phases.get("ended", ()))
    if len(ended_ranks) < number or len(running_ranks) < total - number:
        return Text("; {number:rank} of {total} have ended", number=number, total=total)
    return Text(
        "; {ended_names} {ended:has|have} ended, {left_names} still {left:runs|run}",
        ended_names=render_numbers(ended_ranks, "rank"),
        left_names=render_numbers(running_ranks, "rank"),
        ended=ended_ranks,
        left=running_ranks,
    )


def _describe_phases(snapshot: Snapshot) -> Evidence:
    """Return how many ranks are in which phase, where they differ."""
    beat = snapshot.report.heartbeat
    if beat is None or len(beat.counts) < 2:
        return ()
    phases = {"ended": "{number:rank} ended ({ranks})", "unsaid": "{number:rank} running ({ranks})"}
    parts = [
        Text(
            phases.get(phase, "{number:rank} in {phase} ({ranks})"),
            number=number,
            phase=phase,
            ranks=list(beat.phases.get(phase, ())),
        )
        for phase, number in beat.counts.items()
    ]
    return (Text("{parts:; }", parts=parts),)


def _describe_last_ends(snapshot: Snapshot) -> Evidence:
    """Return the last verdicts, the newest first."""
    ends = [
        *snapshot.report.earlier_ends,
        *([snapshot.report.attempt_end] if snapshot.report.attempt_end else []),
    ]
    return tuple(Text("{end}", end=end.description) for end in reversed(ends[-3:]))
