"""Jobs and pods that the API server rejects, while the JobSet itself was accepted. Only events say why. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from jaxlaunch.launcher.diagnose.explain import unread
from jaxlaunch.launcher.diagnose.explain.answer import Answer, one_line, quoted
from jaxlaunch.launcher.diagnose.explain.ended import KUBE_CONTROLLERS, terminating
from jaxlaunch.launcher.jobs.status.job_status import OVER, State, state_of
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.kubernetes.labels import GENERATION_LABEL, JOBSET_CONTROLLER
from jaxlaunch.launcher.kubernetes.objects import Obj, age, condition, is_true, seconds_since
from jaxlaunch.launcher.wording import count

_QUIET_S = 30.0  # that the JobSet controller has before its silence is reported
_ACTS_S = 60.0  # that a controller has for what follows from an end
_UNSEEN_S = 120.0  # the controller's tries come at growing intervals: on a busy server the second one is a minute later

_JOBSET_CONTROLLER = (
    "check that the controller runs: kubectl -n jobset-system get pods; `launcher doctor` checks it too."
)
_SERVICE = re.compile(r"https://([a-z0-9-]+)\.([a-z0-9-]+)\.svc\b")


class _Rejection(NamedTuple):
    """What a message of the API server means; `headline` and `next_move` are filled from the pattern's groups."""

    pattern: re.Pattern[str]
    situation: str
    headline: str
    next_move: str | None = None


# In this order: JobSet's own webhook denies followers in the form of any other webhook.
_REJECTIONS = (
    _Rejection(
        re.compile(
            r"exceeded quota: (?P<quota>[^,]+), requested: (?P<requested>.+), used: (?P<used>.+), "
            r"limited: (?P<limited>.+)"
        ),
        "resource-quota",
        "ResourceQuota {quota} is exceeded: requested {requested}, used {used}, limited {limited}",
        "request less, delete something else in the namespace, or ask its administrator to raise the quota.",
    ),
    _Rejection(
        re.compile(r"failed quota: (?P<quota>[^:]+): must specify (?P<what>.+)"),
        "resource-quota",
        "ResourceQuota {quota} requires every pod to specify {what}",
        "set resources: in job.yaml, and under pod: what resources: has no key for.",
    ),
    _Rejection(
        re.compile(r"in namespace (?P<namespace>\S+) because it is being terminated"),
        "namespace-terminating",
        "namespace {namespace} is being deleted and accepts no new objects",
        "use another namespace: -n NAMESPACE. `kubectl get namespace {namespace} -o yaml` shows what blocks it.",
    ),
    _Rejection(
        re.compile(r'violates PodSecurity "(?P<level>[^"]+)": (?P<what>.+)', re.DOTALL),
        "pod-security",
        'the namespace enforces Pod Security "{level}": {what}',
    ),
    _Rejection(
        re.compile(
            r"ValidatingAdmissionPolicy '(?P<policy>[^']+)' with binding '[^']+' denied request: (?P<what>.+)",
            re.DOTALL,
        ),
        "admission",
        "ValidatingAdmissionPolicy {policy} denied the request: {what}",
        "change what the message names, or ask the policy's owner.",
    ),
    _Rejection(
        re.compile(r"follower pod node selector|leader pod not yet scheduled"),
        "exclusive-placement",
        "exclusive placement: the pods of a slice wait until its leader pod has a node",
    ),
    _Rejection(
        re.compile(r'admission webhook "(?P<webhook>[^"]+)" denied the request: (?P<what>.+)', re.DOTALL),
        "admission",
        "webhook {webhook} denied the request: {what}",
        "change what the message names, or ask the webhook's owner.",
    ),
    _Rejection(
        re.compile(r'serviceaccount "(?P<account>[^"]+)" not found'),
        "service-account",
        "service account {account} does not exist",
        "kubectl create serviceaccount {account}, or set another as service_account: in job.yaml.",
    ),
    _Rejection(
        re.compile(r"no PriorityClass with name (?P<name>\S+) was found"),
        "priority",
        "PriorityClass {name} does not exist",
    ),
    _Rejection(
        re.compile(r'RuntimeClass "(?P<name>[^"]+)" not found'),
        "runtime-class",
        "RuntimeClass {name} does not exist",
    ),
    _Rejection(
        re.compile(r"(?P<what>(?:minimum|maximum) \S+ usage per .+|\S+ max limit to request ratio per .+)"),
        "limit-range",
        "a LimitRange of the namespace forbids it: {what}",
    ),
)
_DOWN = re.compile(r'failed calling webhook "(?P<webhook>[^"]+)"')


def jobs_not_created(snapshot: Snapshot) -> Answer | None:
    """The JobSet controller cannot create the Jobs, or has not acted on the JobSet at all."""
    if snapshot.jobs:
        return _unfollowed(snapshot)
    if snapshot.is_suspended or "jobs" in snapshot.not_read:
        return None
    event = snapshot.event("JobCreationFailed", "HeadlessServiceCreationFailed", "PVCCreationFailed", kind="JobSet")
    if event is None:
        return _unattended(snapshot)
    if _is_unseen(snapshot, event):
        return None
    what = {"JobCreationFailed": "Jobs", "PVCCreationFailed": "PersistentVolumeClaims"}.get(
        event["reason"], "headless Service"
    )
    answer = reason(event["message"])
    evidence = (*quoted(event), *terminating(snapshot.ending_namespace))
    return Answer(answer.situation, f"has no {what}: {answer.headline}", evidence, answer.next_move)


def _is_unseen(snapshot: Snapshot, event: Obj) -> bool:
    """Whether a webhook denied a Job because it had not seen the new JobSet yet: the controller tries again."""
    spent = seconds_since(snapshot.created, snapshot.now)
    is_new = spent is not None and spent < _UNSEEN_S
    return is_new and f'{JOBSETS.kind}.{JOBSETS.group} "{snapshot.name}" not found' in event["message"]


def _unattended(snapshot: Snapshot) -> Answer | None:
    spent = seconds_since(snapshot.created, snapshot.now)
    if spent is None or spent < _QUIET_S or snapshot.pods or snapshot.restarts:  # between two generations
        return None
    if "events" in snapshot.not_read:
        return unread.reasons(snapshot, "events", f"has no Jobs {age(spent)} after it was created")
    headline = f"has no Jobs {age(spent)} after it was created"
    if (other := snapshot.jobset["spec"].get("managedBy", JOBSET_CONTROLLER)) != JOBSET_CONTROLLER:
        move = f"check that it runs; without spec.managedBy the JobSet would be {JOBSET_CONTROLLER}'s."
        return Answer(
            "unattended", f"{headline}: controller {other} (spec.managedBy) has not acted on it", next_move=move
        )
    headline += ": the JobSet controller has not acted on it"
    return Answer("unattended", headline, quoted(snapshot.warning), _JOBSET_CONTROLLER)


def _unfollowed(snapshot: Snapshot) -> Answer | None:
    """A controller has not acted on what another one, or a kubelet, did long ago."""
    if snapshot.is_suspended or "events" in snapshot.not_read or state_of(snapshot) in (*OVER, State.DELETING):
        return None
    if (fault := _of_job_controller(snapshot)) is not None:
        return Answer("unattended", fault, quoted(snapshot.warning), KUBE_CONTROLLERS)
    if (fault := _of_jobset_controller(snapshot)) is not None:
        return Answer("unattended", fault, quoted(snapshot.warning), _JOBSET_CONTROLLER)
    return None


def _of_job_controller(snapshot: Snapshot) -> str | None:
    """That it has not made the pods of a Job, or has not noticed that one failed."""
    held = [one for one in snapshot.jobs if one.get("spec", {}).get("suspend")]
    if not snapshot.pods and not held and snapshot.event("FailedCreate", kind="Job") is None:
        new = [one for one in snapshot.jobs if "startTime" not in one.get("status", {})]
        late_s, job = max(((_late_s(snapshot, one), one["metadata"]["name"]) for one in new), default=(0.0, ""))
        if late_s >= _QUIET_S:
            return f"has no pods {age(late_s)} after its Job {job} was created: the Job controller has not acted on it"
    is_noticed = any(is_true(one, kind) for one in snapshot.jobs for kind in ("Failed", "FailureTarget", "Complete"))
    failed = [host for host in snapshot.hosts if host.phase == "Failed" and host.ended.get("finishedAt")]
    if is_noticed or not failed or not snapshot.is_ours or failed[0].generation != snapshot.restarts:
        return None
    late_s = seconds_since(failed[0].ended["finishedAt"], snapshot.now) or 0.0
    if late_s < _ACTS_S:
        return None
    return f"waits: {failed[0].name} failed {age(late_s)} ago, and the Job controller has not acted on that"


def _late_s(snapshot: Snapshot, job: Obj) -> float:
    return seconds_since(job["metadata"].get("creationTimestamp"), snapshot.now) or 0.0


def _of_jobset_controller(snapshot: Snapshot) -> str | None:
    """That it has neither restarted Jobs that are over nor ended the JobSet."""
    of_these = [one for one in snapshot.jobs if _generation(one) == snapshot.restarts]
    failed = [one for one in of_these if is_true(one, "Failed")]
    is_done = bool(of_these) and all(is_true(one, "Complete") for one in of_these)
    if not failed and not is_done:
        return None
    ends = [condition(one, "Failed" if failed else "Complete").get("lastTransitionTime") for one in failed or of_these]
    late_s = min((seconds_since(at, snapshot.now) or 0.0 for at in ends), default=0.0)
    if late_s < _ACTS_S:
        return None
    verb = "failed" if failed else "completed"
    return f"waits: its Jobs {verb} {age(late_s)} ago, and the JobSet controller has not acted on that"


def _generation(job: Obj) -> int:
    return int(job["metadata"].get("labels", {}).get(GENERATION_LABEL, 0))


def pods_not_created(snapshot: Snapshot) -> Answer | None:
    """The Job controller cannot create the pods."""
    here = [host for host in snapshot.hosts if not host.is_leaving]
    event = snapshot.event("FailedCreate", kind="Job")
    has_jobs = bool(snapshot.jobs) or "jobs" in snapshot.not_read
    if event is None or snapshot.is_suspended or not has_jobs or len(here) >= snapshot.expected_hosts:
        return None
    if any(host.has_ended for host in here) and not _is_newer(event, snapshot):
        return None
    answer = reason(event["message"])
    if answer.situation == "exclusive-placement" and any(host.unscheduled for host in here):
        return None  # why the leader has no node is the better answer
    missing = snapshot.expected_hosts - len(here)
    pods = "its pod is" if snapshot.expected_hosts == 1 else f"{missing} of {count(snapshot.expected_hosts, 'pod')} are"
    evidence = (*quoted(event), *terminating(snapshot.ending_namespace))
    return Answer(answer.situation, f"waits: {pods} rejected: {answer.headline}", evidence, answer.next_move)


def _is_newer(event: Obj, snapshot: Snapshot) -> bool:
    """Whether the event is about the current Jobs, and not about those before a restart."""
    return any(event["last"] >= job["metadata"].get("creationTimestamp", "") for job in snapshot.jobs)


def reason(message: str) -> Answer:
    """Why the API server rejected an object, by its message: the headline is only that."""
    if (match := _DOWN.search(message)) is not None:
        return _webhook_down(match)
    for pattern, situation, headline, next_move in _REJECTIONS:
        if (match := pattern.search(message)) is not None:
            groups = {name: one_line(text) for name, text in match.groupdict().items()}
            move = None if next_move is None else next_move.format(**groups)
            return Answer(situation, headline.format(**groups), next_move=move)
    return Answer("refused", one_line(message))


def _webhook_down(match: re.Match[str]) -> Answer:
    error = match.string[match.end() :].strip(": ")
    service = _SERVICE.search(error)
    where = f" ({service[1]} in {service[2]})" if service else ""
    return Answer(
        "webhook-down",
        f"webhook {match['webhook']}{where} does not answer: {one_line(error.rpartition(': ')[2] or error)}",
    )
