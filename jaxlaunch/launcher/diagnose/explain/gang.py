"""Pods that run: missing hosts, the phase of the ranks, hangs, and restarts. Pure."""

from __future__ import annotations

import dataclasses
import re

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain import admission, containers, images, scheduling, unread
from jaxlaunch.launcher.diagnose.explain.answer import (
    LIVENESS,
    Answer,
    Cause,
    are,
    first,
    is_liveness,
    one_line,
    quoted,
    were,
    which,
)
from jaxlaunch.launcher.diagnose.explain.ended import Stuck, collection, deletion, silence, stuck
from jaxlaunch.launcher.diagnose.explain.memory import (
    evicted_for_excess,
    excess_before,
    full_shared_memory,
    is_oom,
    oom_sentence,
)
from jaxlaunch.launcher.diagnose.explain.situations import next_move
from jaxlaunch.launcher.jobs.status import hosts, lost_hosts
from jaxlaunch.launcher.jobs.status.agent_report import AttemptEnd
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.status.job_status import JobStatus, State, state_of, status_of
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.objects import Obj, age, seconds_since, template
from jaxlaunch.launcher.wording import count
from jaxlaunch.records.messages import names

_LOOPS = 2  # charged restarts without a committed step that make a crash loop
_RECENT_S = 60.0  # since a probe failed
_UNREACHABLE = "node.kubernetes.io/unreachable"  # the taint of a node that does not answer
_USUAL_S = 300.0  # for which Kubernetes has pods tolerate it that say nothing of it
_LATE_S = 15.0  # of a rendezvous, after which the headline says how long it takes


def disrupted(snapshot: Snapshot) -> Answer | None:
    """Pods that were removed from outside: eviction, drain, preemption, a lost node; and for their own excess."""
    if (own := evicted_for_excess(snapshot)) is not None:
        headline = f"is restarting: {own.headline}; that counts against the limit of restarts.crash"
        return Answer(own.situation, headline, (*own.evidence, *_before(snapshot)), own.next_move)
    taken = [host for host in snapshot.hosts if host.disruption or host.reason in ("Evicted", "NodeLost", "Preempting")]
    if not taken or _gave_up(snapshot):
        return None
    host = taken[0]
    reason = host.disruption.get("reason") or host.reason
    message = host.disruption.get("message") or host.message
    why = _short_of(message) or _DISRUPTIONS.get(reason, f"disrupted ({reason})")
    who = f"{which(taken, snapshot.expected_hosts)} {were(taken)}"
    headline = f"was interrupted: {who} {why.format(node=host.node)}"
    evidence = (f"Pod {host.pod}: {reason}: {one_line(message)}", *_before(snapshot))
    if (held := stuck(snapshot)) is not None:
        return Answer("stuck", f"{headline}; {held.what}", evidence, held.move)
    if (cut_off := _cut_off(snapshot, taken)) is not None:
        return Answer("disrupted", f"{headline}; {cut_off.what}", evidence, cut_off.move)
    again = (
        f"{'that pod is' if len(taken) == 1 else 'those pods are'} made again"
        if snapshot.waits_for_pods
        else "it restarts"
    )
    counts = f"{again}, which does not count against the restart limits"
    move = _REQUEST if "it used" in why else None
    return Answer("disrupted", f"{headline}; {counts}", evidence, move)


def _gave_up(snapshot: Snapshot) -> bool:
    """Whether the gang waited in vain for the pod that takes the place of a lost one, which counts."""
    codes = [host.ended.get("exitCode") for host in snapshot.hosts if host.ends_gang]
    return hosts.are_replaced(snapshot.jobset) and contract.LOST in codes


def _cut_off(snapshot: Snapshot, taken: list[Host]) -> Stuck | None:
    """Pods that were deleted on a node that does not answer, and so cannot end: by the node, or by what events say."""
    event, node = snapshot.event("NodeNotReady", kind="Pod", of=taken), snapshot.silent_node
    there = [host for host in taken if host.is_leaving and host.running and not host.is_ready]
    if not there or not (event or snapshot.is_on_silent_node(there[0])):
        return None
    where = there[0].node or ""
    why = f"node {where} is NotReady" if node is None else silence(node, snapshot.now)
    what = f"{'that pod' if len(there) == 1 else 'those pods'} cannot end, since {why}"
    return Stuck(what, f"wait: Kubernetes {_ELSEWHERE.format(pods='them', node=where)}")


_ELSEWHERE = (
    "makes {pods} again elsewhere only when the node is back or deleted; "
    "if it is gone for good: kubectl delete node {node}"
)
_LOW = re.compile(r"The node was low on resource: (?P<what>[\w-]+)\.")
_USED = re.compile(r"Container (?P<name>\S+) was using (?P<used>\w+), request is (?P<request>\w+),")
_REQUEST = (
    "wait; the kubelet evicts first what uses more than it requests: request under resources: in job.yaml what it uses."
)


def _short_of(message: str) -> str:
    """Of which resource the kubelet of the node had too little, as it writes that; empty of other messages."""
    low, used = _LOW.search(message), _USED.search(message)
    if low is None:
        return ""
    own = "" if used is None else f"; it used {used['used']}, and requests {used['request']}"
    return f"evicted by the kubelet of node {{node}}, which was low on {low['what']}{own}"


_DISRUPTIONS = {
    "PreemptionByScheduler": "preempted by a pod of higher priority",
    "EvictionByEvictionAPI": "evicted (kubectl drain, or another use of the eviction API)",
    "DeletionByTaintManager": "on node {node}, which does not answer or got a NoExecute taint",
    "DeletionByPodGC": "on node {node}, which no longer exists",
    "TerminationByKubelet": "terminated by the kubelet (node pressure or node shutdown)",
    "Evicted": "evicted by the kubelet (node pressure)",
    "NodeLost": "on a node that is lost",
}


def unhealthy(snapshot: Snapshot) -> Answer | None:
    """The kubelet stops the container again and again, for a probe or a hook that the job or somebody's webhook set."""
    event = snapshot.event("Unhealthy", "FailedPostStartHook", kind="Pod")
    if event is None or not snapshot.restarts or (seconds_since(event["last"], snapshot.now) or 0.0) > _RECENT_S:
        return None
    if event["reason"] == "Unhealthy" and not is_liveness(event):
        return None
    what = "liveness probe" if event["reason"] == "Unhealthy" else "postStart hook"
    said = one_line(event["message"].removeprefix(LIVENESS).lstrip(": "))
    headline = f"is restarted again and again: its {what} fails{f': {said}' if said else ''}"
    move = f"fix or remove the {what}; jobs need none."
    return Answer("unhealthy", headline, (*quoted(event), *_before(snapshot)), move)


def node_lost(snapshot: Snapshot) -> Answer | None:
    """A node does not answer: its pods stay until it comes back or is deleted."""
    event = snapshot.event("NodeNotReady", kind="Pod")
    lost = [
        host
        for host in snapshot.hosts
        if event and host.pod in event["names"] and host.running and not host.is_ready and not host.is_leaving
    ]
    if event is None:
        return _unready(snapshot)
    if not lost:
        return None
    nodes = list(dict.fromkeys(host.node or "" for host in lost))
    are, it = (f"node {nodes[0]} is", "it") if len(nodes) == 1 else (f"nodes {', '.join(nodes)} are", "them")
    headline = f"waits: {are} NotReady, with {which(lost, snapshot.expected_hosts)} on {it}"
    return Answer("node-lost", headline, quoted(event))


def silent_node(snapshot: Snapshot) -> Answer | None:
    """By what the node itself reports, where it could be read."""
    node, there = snapshot.silent_node, _stranded(snapshot)
    if node is None or not there:
        return None
    elsewhere = _ELSEWHERE.format(pods="them", node=node["metadata"]["name"])
    move = f"wait: Kubernetes evicts its pods after {_tolerated(snapshot.jobset)}, but {elsewhere}"
    evidence = quoted(snapshot.event("NodeNotReady", kind="Pod"))
    return Answer("node-lost", _wait_for(silence(node, snapshot.now), there, snapshot), evidence, move)


def deleted_node(snapshot: Snapshot) -> Answer | None:
    """Pods that read as running and ready, on a node that is no more: nobody reports of them until they are deleted."""
    node, there = snapshot.deleted_node, _stranded(snapshot)
    if node is None or not there:
        return None
    return Answer("node-lost", _wait_for(deletion(node, snapshot.now), there, snapshot), (), collection(there[0].pod))


def _stranded(snapshot: Snapshot) -> list[Host]:
    """The hosts on the node that does not answer or is deleted, but for those that are deleted themselves."""
    return [host for host in snapshot.hosts if snapshot.is_on_silent_node(host) and not host.is_leaving]


def _wait_for(node: str, there: list[Host], snapshot: Snapshot) -> str:
    return f"waits: {node}; {which(there, snapshot.expected_hosts)} {are(there)} on it"


def _tolerated(jobset: Obj) -> str:
    """For how long its pods tolerate a node that does not answer: the least of what their tolerations say."""
    given = [
        one["tolerationSeconds"]
        for one in template(jobset)["spec"].get("tolerations", ())
        if one.get("key") in (None, _UNREACHABLE) and one.get("effect") in (None, "NoExecute")
        if "tolerationSeconds" in one
    ]
    return age(min(given, default=_USUAL_S))


def _unready(snapshot: Snapshot) -> Answer | None:
    """Where events could not be read, no more than that hosts that run are not ready is known of a lost node."""
    here = [host for host in snapshot.hosts if host.running and not host.is_ready and not host.is_leaving]
    if "events" not in snapshot.not_read or not here:
        return None
    return unread.reasons(snapshot, "events", f"runs, but {which(here, snapshot.expected_hosts)} {are(here)} not ready")


def restarting(snapshot: Snapshot) -> Answer | None:
    """A generation ended, and the pods of the next do not exist yet."""
    status = status_of(snapshot)
    if status.state is not State.RESTARTING:
        return None
    left = [host for host in snapshot.hosts if not host.has_ended]
    last = snapshot.report.verdict
    after = f" after {last.result}: {one_line(last.verdict.message)}" if last else ""
    ended = next((host for host in snapshot.hosts if host.ended.get("exitCode")), None)
    if last is None and ended is not None:
        after = f": {ended.name} ended with exit code {ended.ended['exitCode']}"
    if is_oom(snapshot):
        after = f": {oom_sentence(snapshot)}"
    ends = f"; {count(len(left), 'pod')} still terminating" if left else ""
    situation = "oom" if is_oom(snapshot) else "restarting"
    event = snapshot.event("BackoffLimitExceeded", "PodFailurePolicy", "DeadlineExceeded", kind="Job")
    headline = f"is restarting{after}{ends}"
    cut = [host for host in lost_hosts.cut_off(snapshot) if host.is_leaving]
    if (held := stuck(snapshot) or (_of_its_node(snapshot, cut[0]) if cut else None)) is not None:
        return Answer("stuck", f"{headline}: {held.what}", (*_before(snapshot), *quoted(event)), held.move)
    return Answer(situation, headline, (*_before(snapshot), *quoted(event)), next_move("restarting", snapshot.name))


def crash_loop(snapshot: Snapshot) -> Answer | None:
    """It was restarted several times, and never got further."""
    status, last = status_of(snapshot), snapshot.report.last
    if (
        status.restarts.charged < _LOOPS
        or "log" in snapshot.not_read
        or snapshot.report.committed is not None
        or _is_beyond(status, last)
    ):
        return None
    used = f"{status.restarts.charged} of {status.restarts.limit} restarts are used up"
    why = f"; last: {last.result}: {one_line(last.verdict.message)}" if last else ""
    beyond = excess_before(snapshot) or (full_shared_memory(snapshot, last.verdict) if last else None)
    why += f"; {beyond}" if beyond else ""
    headline = f"crashes and restarts without saving a checkpoint: {used}{why}"
    event = snapshot.event("BackoffLimitExceeded", "PodFailurePolicy", kind="Job")
    return Answer("crash-loop", headline, (*_before(snapshot), *quoted(event)))


def _is_beyond(status: JobStatus, last: AttemptEnd | None) -> bool:
    """Whether it runs, and is at a later step than the one at which it ended last."""
    before = None if last is None else last.verdict.step
    return status.state is State.RUNNING and status.step is not None and before is not None and status.step > before


def gathering(snapshot: Snapshot) -> Answer | None:
    """The agents wait for each other."""
    report, beat = snapshot.report, snapshot.report.heartbeat
    if report.stage != "gather" or beat is None:
        return None
    missing, total = report.missing, beat.missing_count or len(report.missing)
    refused = tuple(one_line(text) for text in beat.refused)
    if not missing:
        return Answer("gathering", "is about to start: all hosts are connected", refused)
    began = next((host.running.get("startedAt") for host in snapshot.hosts if host.number == 0), None)
    waited = seconds_since(began, snapshot.now) or 0.0
    span = f" for {age(waited)}" if waited >= _LATE_S else ""
    listed = names(missing) if total == len(missing) else f"{names(missing)} and {total - len(missing)} more"
    headline = f"waits at rendezvous{span}: {listed} of {snapshot.expected_hosts} missing"
    evidence = (*_pods_of(snapshot, missing), *refused)
    is_nameless = 0 in missing and waited >= _LATE_S  # host 0 leads, and so it runs
    if is_nameless:
        headline += "; not even host 0 reaches itself by the name that all hosts use: most likely DNS does not answer"
    event = snapshot.event("HeadlessServiceCreationFailed", kind="JobSet")
    if event is not None:
        rejected = admission.reason(event["message"])
        move = rejected.next_move or next_move(rejected.situation, snapshot.name)
        headline += f"; its headless Service, which names the hosts, is gone, and rejected: {rejected.headline}"
        return Answer("rendezvous", headline, (*quoted(event), *evidence), move)
    move = _NAMELESS.format(name=snapshot.name) if is_nameless else _next_for_missing(snapshot, missing)
    return Answer("rendezvous", headline, evidence, move)


def _pods_of(snapshot: Snapshot, missing: list[int]) -> tuple[str, ...]:
    """Phase, reason and node of the pods of missing hosts."""
    return tuple(
        f"{host.name}: {host.phase}{_why(host.waiting or host.ended)}" + (f" on {host.node}" if host.node else "")
        for host in snapshot.hosts
        if host.number in missing
    )[:8]


def _why(state: object) -> str:
    reason = state.get("reason") if isinstance(state, dict) else None
    return f", {reason}" if reason else ""


_NAMELESS = "launcher logs {name}; ask the cluster administrator whether the cluster's DNS (CoreDNS) runs."


def _next_for_missing(snapshot: Snapshot, missing: list[int]) -> str:
    pod = next((host.pod for host in snapshot.hosts if host.number in missing), None)
    if pod is None:
        return "their pods do not exist yet: wait."
    return f"kubectl logs {pod}; can it resolve and reach host 0? `launcher doctor` checks the cluster's DNS."


# What may hold up the pod that takes the place of a lost one.
_HELD: tuple[Cause, ...] = (
    admission.pods_not_created,
    scheduling.unscheduled,
    images.not_pulled,
    containers.not_started,
)


def lost_host(snapshot: Snapshot) -> Answer | None:
    """A pod is missing, or a host holds no rank yet, of a gang whose processes have run in these pods."""
    state = state_of(snapshot)
    if state not in (State.RUNNING, State.GATHERING) or not lost_hosts.has_begun(snapshot):
        return None
    away = lost_hosts.away(snapshot)
    if state is State.RUNNING:
        return None if snapshot.report.is_judged else _running(snapshot, away)
    return _waiting(snapshot, away) if away else None


def kept_from_done(snapshot: Snapshot) -> Answer | None:
    """All ranks are done, and a host on a node that does not answer keeps the Job, and so the JobSet, from being so."""
    cut = lost_hosts.cut_off(snapshot)
    if not cut or not snapshot.waits_for_pods or not lost_hosts.is_done(snapshot):
        return None
    held = stuck(snapshot) or _of_its_node(snapshot, cut[0])
    headline = f"has finished, but its Job is not complete before pod {cut[0].pod} has ended: {held.what}"
    return Answer("stuck", headline, _before(snapshot), held.move)


def _waiting(snapshot: Snapshot, away: list[int]) -> Answer:
    """The hosts that are there keep their pods."""
    needed = [host for host in away if host in snapshot.members] or away
    spares = lost_hosts.spares(snapshot)
    if 0 not in needed and len(spares) >= len(needed):
        return _taken_over(snapshot, needed, spares[: len(needed)])
    there = snapshot.expected_hosts - len(away)
    kept = f"the other {count(there, 'host')} {'keeps its pod' if there == 1 else 'keep their pods'}"
    leads = ", which leads," if needed == [0] else ""
    has_none = hosts.moves(snapshot.jobset) and 0 not in needed and not spares
    held = _held(snapshot, needed)
    headline = f"waits for {names(needed)}{leads} to come back: {held.headline}; {kept}"
    headline += "; no spare is left" if has_none else ""
    return dataclasses.replace(held, headline=headline)


def _taken_over(snapshot: Snapshot, needed: list[int], spares: list[int]) -> Answer:
    """For the seconds until the processes start again: the gang waits for no pod."""
    last = snapshot.report.last
    take, whose = ("takes", "its") if len(spares) == 1 else ("take", "their")
    headline = f"is about to start again without {names(needed)}: {names(spares)} {take} {whose} ranks"
    return Answer("spare-used", headline, () if last is None else (one_line(last.title),))


def _running(snapshot: Snapshot, away: list[int]) -> Answer | None:
    """It runs without the hosts that are away: they hold no rank now; or although the node of one does not answer."""
    if heard := lost_hosts.heard(snapshot):
        return _without_kubelet(snapshot, heard)
    members, most, spares = snapshot.members, hosts.table(snapshot.jobset), lost_hosts.spares(snapshot)
    does = doing(status_of(snapshot), is_partly=False)
    if len(members) < len(most):
        headline = f"runs with {len(members)} of {count(len(most), 'host')}: {does}"
        if not away:
            return Answer("shrunk", f"{headline}; {names(spares)} will hold ranks after the next save")
        held = _held(snapshot, away)
        headline += f"; it waits for {names(away)} to grow again: {held.headline}"
        return dataclasses.replace(held, situation="shrunk", headline=headline)
    if not away:
        return None
    held = _held(snapshot, away)
    left = f"{names(spares)} {'is a spare' if len(spares) == 1 else 'are spares'}" if spares else "no spare is ready"
    headline = f"runs: {does}, with its ranks on {names(members.hosts)}; {left}, since {names(away)} "
    headline += f"{'is' if len(away) == 1 else 'are'} missing: {held.headline}"
    return dataclasses.replace(held, situation="spare-used", headline=headline)


def _without_kubelet(snapshot: Snapshot, heard: list[Host]) -> Answer:
    """Only the kubelet of a node is gone: nothing is lost before it is back."""
    there = [host for host in heard if host.node == heard[0].node]
    status, node, (agents, do) = status_of(snapshot), heard[0].node, _AGENTS[len(there) > 1]
    at = "" if status.step is None else f", at step {status.step}" + (f" of {status.steps}" if status.steps else "")
    hosts_there = which(there, snapshot.expected_hosts)
    headline = f"runs{at}: {_silence(snapshot, node or '')}, but {agents} of {hosts_there} on it {do}"
    event = snapshot.event("NodeNotReady", kind="Pod")
    return Answer("node-lost", headline, quoted(event), _KUBELET.format(node=node))


_AGENTS = (("the agent", "does"), ("the agents", "do"))
_KUBELET = (
    "have the kubelet of node {node} started again: it then ends the pods that Kubernetes has evicted meanwhile, as a "
    "drain does."
)


def _silence(snapshot: Snapshot, name: str) -> str:
    """What is known of a node that does not answer."""
    node = snapshot.silent_node
    is_known = node is not None and node["metadata"]["name"] == name
    return silence(node, snapshot.now) if node is not None and is_known else f"node {name} is NotReady"


def _held(snapshot: Snapshot, away: list[int]) -> Answer:
    """What holds up the pods of hosts that are away; the evidence begins with how the last attempt ended."""
    last = snapshot.report.last
    ended = () if last is None else (one_line(last.title),)
    answer = first(_HELD, snapshot)
    if answer is not None:
        alone = f"is starting: {names(away)}: "
        headline = answer.headline.removeprefix("waits: ").replace(alone, f"{names(away)} is starting: ")
        return dataclasses.replace(
            answer, situation="host-lost", headline=headline, evidence=(*ended, *answer.evidence)
        )
    here = [host for host in snapshot.hosts if host.number in away and host.phase != "Failed"]
    if cut := [host for host in lost_hosts.cut_off(snapshot) if host in here]:
        held = stuck(snapshot) or _of_its_node(snapshot, cut[0])
        return Answer("host-lost", held.what, (*ended, *quoted(snapshot.event("NodeNotReady", kind="Pod"))), held.move)
    if mute := [host for host in lost_hosts.mute(snapshot) if host in here]:
        what = f"its agent does not answer, and pod {mute[0].pod} still reads as running on node {mute[0].node}"
        return Answer("host-lost", what, ended, _MUTE.format(pod=mute[0].pod))
    if here:
        return Answer("host-lost", f"{here[0].name} is starting", ended)
    do = "its pod does" if len(away) == 1 else "their pods do"
    return Answer("host-lost", f"{do} not exist yet, since Kubernetes makes it again 10 s after it failed", ended)


_MUTE = (
    "wait: Kubernetes notices within about a minute that a node is gone; if the node is well, "
    "kubectl delete pod {pod} has the Job make another pod."
)


def _of_its_node(snapshot: Snapshot, host: Host) -> Stuck:
    """Of a pod that reads as running, and can neither run nor end: what is known of its node."""
    deleted = snapshot.deleted_node
    if deleted is not None and deleted.name == host.node:
        return Stuck(deletion(deleted, snapshot.now), collection(host.pod))
    why = _silence(snapshot, host.node or "")
    move = f"wait: Kubernetes {_ELSEWHERE.format(pods='that pod', node=host.node)}"
    return Stuck(f"{why}, with pod {host.pod} on it", move)


def hanging(snapshot: Snapshot) -> Answer | None:
    """A rank exceeded one of its timeouts."""
    beat = snapshot.report.heartbeat
    if snapshot.report.verdict is not None or beat is None or not beat.overdue:
        return None
    return Answer("hang", f"hangs: {one_line(beat.overdue)}", _ranks(snapshot))


def running(snapshot: Snapshot) -> Answer | None:
    """It runs; an earlier failure is part of the answer."""
    status = status_of(snapshot)
    if status.state is not State.RUNNING:
        return None
    if snapshot.report.heartbeat is None:
        return Answer("running", f"runs: {_ready(snapshot, status)}{unread.log(snapshot)}")
    last = snapshot.report.last
    if last is not None and snapshot.report.is_judged:
        headline = f"has ended attempt {last.attempt}: {last.result}: {one_line(last.verdict.message)}"
        situation = "running" if last.verdict.code == contract.DONE else "restarting"
        return Answer(situation, headline, _before(snapshot), next_move("restarting", snapshot.name))
    again = _again(snapshot)
    situation = "restarted" if again else "running"
    move = PREPARING if status.phase == "prepare" else None
    some = _some_ended(snapshot)
    is_short = status.phase is None and status.ready is not None and status.ready < status.hosts
    what = _ready(snapshot, status) if is_short else doing(status, is_partly=bool(some))
    headline = f"runs{again}: {what}{some}"
    return Answer(situation, headline, (*_before(snapshot), *_ranks(snapshot)), move)


PREPARING = (
    "wait: its text is tokenized and packed, once; of hosts that share data.data_dir one works, and its log says how "
    "far it is. `launcher prepare` does it beforehand."
)
_SILENT = ("unsaid", None)  # programs that report nothing


def _ready(snapshot: Snapshot, status: JobStatus) -> str:
    """ "1 of 2 hosts ready; host 1 (pod …): containers with unready status: [main]"."""
    late = next((host for host in snapshot.hosts if host.unready), None)
    why = "" if late is None else f"; {late.name}: {one_line(late.unready)}"
    return f"{status.ready} of {count(status.hosts, 'host')} ready{why}"


def doing(status: JobStatus, *, is_partly: bool) -> str:
    """ "training at step 120 of 300", "in compile for 2m"."""
    of = f" of {status.steps}" if status.steps else ""
    at = f" at step {status.step}{of}" if status.step is not None else ""
    if status.phase == "step":
        return f"training{at}"
    if status.phase == "ended":
        return f"its processes end{at}" if is_partly else f"its processes have ended{at}"
    if status.phase == "prepare":
        return "preparing its text" + (f" for {age(status.phase_s)}" if status.phase_s is not None else "")
    if status.phase in _SILENT and status.steps is not None:
        return f"its processes start: imports, devices, JAX's own initialization{at}"
    if status.phase in _SILENT:
        return f"its program reports no steps{at}"
    spent = f" for {age(status.phase_s)}" if status.phase_s is not None else ""
    return f"in {status.phase}{at}{spent}"


def _in(phase: str) -> str:
    return {"ended": "ended", "unsaid": "running"}.get(phase, f"in {phase}")


def _again(snapshot: Snapshot) -> str:
    """ " again after hang (82): …", in the attempt right after a failure."""
    last, beat = snapshot.report.last, snapshot.report.heartbeat
    if last is None or beat is None or last.attempt + 1 != beat.attempt:
        return ""
    return f" again after {last.result}: {one_line(last.verdict.message)[:200]}"


def _some_ended(snapshot: Snapshot) -> str:
    """ "; rank 1 has ended, rank 0 still runs"."""
    beat = snapshot.report.heartbeat
    if beat is None or not 0 < (many := beat.counts.get("ended", 0)) < sum(beat.counts.values()):
        return ""
    left = [rank for phase, ranks in beat.phases.items() if phase != "ended" for rank in ranks]
    ended = list(beat.phases.get("ended", ()))
    if len(ended) < many or len(left) < sum(beat.counts.values()) - many:
        return f"; {count(many, 'rank')} of {sum(beat.counts.values())} have ended"
    over = f"{names(ended, 'rank')} {'has' if len(ended) == 1 else 'have'} ended"
    return f"; {over}, {names(left, 'rank')} still {'runs' if len(left) == 1 else 'run'}"


def _ranks(snapshot: Snapshot) -> tuple[str, ...]:
    """How many ranks are in which phase, where they differ."""
    beat = snapshot.report.heartbeat
    if beat is None or len(beat.counts) < 2:
        return ()
    parts = (
        f"{count(many, 'rank')} {_in(phase)} ({', '.join(map(str, beat.phases.get(phase, ())))})"
        for phase, many in beat.counts.items()
    )
    return ("; ".join(parts),)


def _before(snapshot: Snapshot) -> tuple[str, ...]:
    """The last verdicts, the newest first."""
    known: list[AttemptEnd] = [
        *snapshot.report.earlier,
        *([snapshot.report.verdict] if snapshot.report.verdict else []),
    ]
    return tuple(one_line(one.title) for one in reversed(known[-3:]))
