"""Causes of missing Jobs and pods: the API server rejects them, or a controller is late. Pure.

The API server accepts a JobSet without a check of its pods. They are rejected later, when the
JobSet controller creates the Jobs, or the Job controller creates the pods. An event has the reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from jaxlaunch.launcher.diagnose.explain.answer import Answer, unread_answer, waiting_answer
from jaxlaunch.launcher.diagnose.explain.termination import (
    ASK_ABOUT_CONTROLLERS,
    describe_terminating_namespace,
)
from jaxlaunch.launcher.diagnose.text import (
    DOCTOR,
    NextStep,
    Text,
    advise_change,
    describe_event,
    kubectl_command,
    quote_message,
)
from jaxlaunch.launcher.jobs.status.job_status import FINAL_STATES, State, derive_state
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.kubernetes.labels import GENERATION_LABEL, JOBSET_CONTROLLER
from jaxlaunch.launcher.kubernetes.objects import (
    find_condition,
    is_condition_true,
    seconds_since,
)

# A running controller creates the Jobs of a JobSet, or the pods of a Job, within this time.
_CREATION_DELAY_S = 30.0
# A running controller reacts to the end of a pod or a Job within this time.
_CONTROLLER_DELAY_S = 60.0
# The JobSet controller retries a rejected Job within this time. Its pauses grow: on a busy server
# the second attempt comes after a minute.
_RETRY_DELAY_S = 120.0

_CHECK_JOBSET_CONTROLLER = advise_change(
    "check that the controller runs: {pods}; `{doctor}` checks it too.",
    doctor=DOCTOR,
    pods=kubectl_command("-n", "jobset-system", "get", "pods", is_namespaced=False),
)
_CREATION_FAILURES = {
    "JobCreationFailed": Text("Jobs"),
    "HeadlessServiceCreationFailed": Text("headless Service"),
    "PVCCreationFailed": Text("PersistentVolumeClaims"),
}
_SERVICE_URL = re.compile(r"https://(?P<service>[a-z0-9-]+)\.(?P<namespace>[a-z0-9-]+)\.svc\b")


class _Rejection(NamedTuple):
    """Meaning of a message of the API server.

    The named groups of the pattern are the fields of the headline and the arguments of the next
    step, if that is a function.
    """

    pattern: str
    situation: str
    headline: str
    next_step: NextStep | Callable[..., NextStep] | None = None


# The first match counts. "exclusive-placement" must come before "admission", whose pattern matches
# the message of every webhook.
_REJECTIONS = (
    _Rejection(
        r"exceeded quota: (?P<quota>[^,]+), requested: (?P<requested>.+), used: (?P<used>.+), "
        r"limited: (?P<limited>.+)",
        "resource-quota",
        "ResourceQuota {quota} is exceeded: requested {requested}, used {used}, limited {limited}",
        advise_change(
            "request less, delete something else in the namespace, or ask its administrator to "
            "raise the quota."
        ),
    ),
    _Rejection(
        r"failed quota: (?P<quota>[^:]+): must specify (?P<what>.+)",
        "resource-quota",
        "ResourceQuota {quota} requires every pod to specify {what}",
        advise_change("set resources: in job.yaml, and under pod: what resources: has no key for."),
    ),
    _Rejection(
        r"in namespace (?P<namespace>\S+) because it is being terminated",
        "namespace-terminating",
        "namespace {namespace} is being deleted and accepts no new objects",
        lambda namespace: advise_change(
            "use another namespace: -n NAMESPACE. `{get}` shows what blocks it.",
            get=kubectl_command("get", "namespace", namespace, "-o", "yaml", is_namespaced=False),
        ),
    ),
    _Rejection(
        r'(?s)violates PodSecurity "(?P<level>[^"]+)": (?P<what>.+)',
        "pod-security",
        'the namespace enforces Pod Security "{level}": {what}',
    ),
    _Rejection(
        r"(?s)ValidatingAdmissionPolicy '(?P<policy>[^']+)' with binding '[^']+' denied request: "
        r"(?P<what>.+)",
        "admission",
        "ValidatingAdmissionPolicy {policy} denied the request: {what}",
        advise_change("change what the message names, or ask the policy's owner."),
    ),
    _Rejection(
        r"follower pod node selector|leader pod not yet scheduled",
        "exclusive-placement",
        "exclusive placement: the pods of a slice wait until its leader pod has a node",
    ),
    _Rejection(
        r'(?s)admission webhook "(?P<webhook>[^"]+)" denied the request: (?P<what>.+)',
        "admission",
        "webhook {webhook} denied the request: {what}",
        advise_change("change what the message names, or ask the webhook's owner."),
    ),
    _Rejection(
        r'serviceaccount "(?P<account>[^"]+)" not found',
        "service-account",
        "service account {account} does not exist",
        lambda account: advise_change(
            "{create}, or set another as service_account: in job.yaml.",
            create=kubectl_command("create", "serviceaccount", account),
        ),
    ),
    _Rejection(
        r"no PriorityClass with name (?P<name>\S+) was found",
        "priority",
        "PriorityClass {name} does not exist",
    ),
    _Rejection(
        r'RuntimeClass "(?P<name>[^"]+)" not found',
        "runtime-class",
        "RuntimeClass {name} does not exist",
    ),
    _Rejection(
        r"(?P<what>(?:minimum|maximum) \S+ usage per .+|\S+ max limit to request ratio per .+)",
        "limit-range",
        "a LimitRange of the namespace forbids it: {what}",
    ),
)
_WEBHOOK_DOWN = re.compile(r'failed calling webhook "(?P<webhook>[^"]+)"')


def explain_missing_jobs(snapshot: Snapshot) -> Answer | None:
    """Explain why the JobSet controller has not created the Jobs, or why a controller is late."""
    if snapshot.jobs:
        return _explain_late_controller(snapshot)
    if snapshot.is_suspended or "jobs" in snapshot.unread_reasons:
        return None
    event = snapshot.find_event(*_CREATION_FAILURES, kind="JobSet")
    if event is None or snapshot.has_pod_since(event):
        return _explain_unattended(snapshot)
    age_s = seconds_since(snapshot.created_at, snapshot.now)
    not_found_message = f'{JOBSETS.kind}.{JOBSETS.group} "{snapshot.name}" not found'
    # A webhook may deny a Job because it has not seen the new JobSet yet. The controller retries,
    # but its event keeps the message of the first attempt.
    if age_s is not None and age_s < _RETRY_DELAY_S and not_found_message in event["message"]:
        return None
    rejection = explain_rejection(event["message"])
    evidence = (*describe_event(event), *describe_terminating_namespace(snapshot.ending_namespace))
    objects = _CREATION_FAILURES[event["reason"]]
    headline = Text("has no {what}: {why}", what=objects, why=rejection.headline)
    return Answer(rejection.situation, headline, evidence, rejection.next_step)


def _explain_unattended(snapshot: Snapshot) -> Answer | None:
    """Explain that no controller has acted on a new JobSet."""
    age_s = seconds_since(snapshot.created_at, snapshot.now)
    # A JobSet also has no Jobs between two generations.
    if age_s is None or age_s < _CREATION_DELAY_S or snapshot.pods or snapshot.restarts:
        return None
    headline = Text("has no Jobs {age:age} after it was created", age=age_s)
    if "events" in snapshot.unread_reasons:
        return unread_answer(snapshot, "events", headline)
    if (
        manager := snapshot.jobset["spec"].get("managedBy", JOBSET_CONTROLLER)
    ) != JOBSET_CONTROLLER:
        headline += Text(": controller {other} (spec.managedBy) has not acted on it", other=manager)
        step = advise_change(
            "check that it runs; without spec.managedBy the JobSet would be {controller}'s.",
            controller=JOBSET_CONTROLLER,
        )
        return Answer("unattended", headline, next_step=step)
    headline += Text(": the JobSet controller has not acted on it")
    evidence = describe_event(snapshot.newest_warning)
    return Answer("unattended", headline, evidence, _CHECK_JOBSET_CONTROLLER)


def _explain_late_controller(snapshot: Snapshot) -> Answer | None:
    """Explain that a controller has not reacted to a new Job, or to the end of a pod or a Job."""
    if (
        snapshot.is_suspended
        or "events" in snapshot.unread_reasons
        or derive_state(snapshot) in (*FINAL_STATES, State.DELETING)
    ):
        return None
    for describe_delay, step in (
        (_describe_pod_delay, ASK_ABOUT_CONTROLLERS),
        (_describe_job_delay, _CHECK_JOBSET_CONTROLLER),
    ):
        if (headline := describe_delay(snapshot)) is not None:
            evidence = describe_event(snapshot.newest_warning)
            return Answer("unattended", headline, evidence, step)
    return None


def _describe_pod_delay(snapshot: Snapshot) -> Text | None:
    """Return the headline if the Job controller has not reacted to a new Job or a failed pod."""
    is_suspended = any(job.get("spec", {}).get("suspend") for job in snapshot.jobs)
    event = snapshot.find_event("FailedCreate", kind="Job")
    if not snapshot.pods and not is_suspended and event is None:
        metadata = [
            job["metadata"] for job in snapshot.jobs if "startTime" not in job.get("status", {})
        ]
        ages = [
            (seconds_since(job.get("creationTimestamp"), snapshot.now) or 0.0, job["name"])
            for job in metadata
        ]
        age_s, name = max(ages, default=(0.0, ""))
        if age_s >= _CREATION_DELAY_S:
            template = (
                "has no pods {age:age} after its Job {name} was created: the Job controller has "
                "not acted on it"
            )
            return Text(template, age=age_s, name=name)
    has_noticed = any(
        is_condition_true(job, condition)
        for job in snapshot.jobs
        for condition in ("Failed", "FailureTarget", "Complete")
    )
    failed_hosts = [
        host
        for host in snapshot.hosts
        if host.phase == "Failed" and host.terminated.get("finishedAt")
    ]
    if has_noticed or not failed_hosts or not snapshot.is_ours:
        return None
    host = failed_hosts[0]
    late_s = seconds_since(host.terminated["finishedAt"], snapshot.now) or 0.0
    if host.generation != snapshot.restarts or late_s < _CONTROLLER_DELAY_S:
        return None
    template = "waits: {host} failed {late:age} ago, and the Job controller has not acted on that"
    return Text(template, host=host.name, late=late_s)


def _describe_job_delay(snapshot: Snapshot) -> Text | None:
    """Return the headline if the JobSet controller has not reacted to the end of its Jobs."""
    jobs = [
        job
        for job in snapshot.jobs
        if int(job["metadata"].get("labels", {}).get(GENERATION_LABEL, 0)) == snapshot.restarts
    ]
    failed_jobs = [job for job in jobs if is_condition_true(job, "Failed")]
    if not failed_jobs and not (jobs and all(is_condition_true(job, "Complete") for job in jobs)):
        return None
    condition = "Failed" if failed_jobs else "Complete"
    ends = [find_condition(job, condition).get("lastTransitionTime") for job in failed_jobs or jobs]
    late_s = min((seconds_since(end, snapshot.now) or 0.0 for end in ends), default=0.0)
    if late_s < _CONTROLLER_DELAY_S:
        return None
    template = (
        "waits: its Jobs {verb} {late:age} ago, and the JobSet controller has not acted on that"
    )
    return Text(template, verb=Text("failed" if failed_jobs else "completed"), late=late_s)


def explain_missing_pods(snapshot: Snapshot) -> Answer | None:
    """Explain pods that the Job controller cannot create."""
    present_hosts = [host for host in snapshot.hosts if not host.is_leaving]
    event = snapshot.find_event("FailedCreate", kind="Job")
    missing_count = snapshot.expected_hosts - len(present_hosts)
    has_jobs = bool(snapshot.jobs) or "jobs" in snapshot.unread_reasons
    if event is None or snapshot.is_suspended or not has_jobs or missing_count <= 0:
        return None
    if snapshot.has_pod_since(event):
        return None
    # An event that is older than all Jobs is about those before a restart.
    job_starts = [job["metadata"].get("creationTimestamp", "") for job in snapshot.jobs]
    if any(host.has_ended for host in present_hosts) and all(
        event["last"] < start for start in job_starts
    ):
        return None
    rejection = explain_rejection(event["message"])
    # The cause in scheduling.py, why the leader pod has no node, is a better answer.
    if rejection.situation == "exclusive-placement" and any(
        host.unscheduled for host in present_hosts
    ):
        return None
    template = "{missing} of {pods:pod} are rejected: {why}"
    if snapshot.expected_hosts == 1:
        template = "its pod is rejected: {why}"
    pods, reason = snapshot.expected_hosts, rejection.headline
    headline = Text(template, missing=missing_count, pods=pods, why=reason)
    evidence = (*describe_event(event), *describe_terminating_namespace(snapshot.ending_namespace))
    return waiting_answer(rejection.situation, headline, evidence, rejection.next_step)


def explain_rejection(message: str) -> Answer:
    """Explain a message with which the API server rejected an object.

    The headline of the answer is only the reason, and has to be completed.
    """
    if match := _WEBHOOK_DOWN.search(message):
        error = message[match.end() :].strip(": ")
        fields = {"webhook": match["webhook"], "why": error.rpartition(": ")[2] or error}
        template = "webhook {webhook} does not answer: {why}"
        if service := _SERVICE_URL.search(error):
            template = "webhook {webhook} ({service} in {namespace}) does not answer: {why}"
            fields |= service.groupdict()
        return Answer("webhook-down", Text(template, **fields))
    for rejection in _REJECTIONS:
        if match := re.search(rejection.pattern, message):
            fields = match.groupdict()
            step = (
                rejection.next_step(**fields)
                if callable(rejection.next_step)
                else rejection.next_step
            )
            return Answer(rejection.situation, Text(rejection.headline, **fields), next_step=step)
    return Answer("refused", quote_message(message))
