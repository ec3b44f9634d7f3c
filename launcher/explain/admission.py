"""Pods that the API server refuses: the JobSet stands, and nothing comes of it. Only events say why. Pure."""

from __future__ import annotations

import re

from launcher.causes.answer import Answer, quoted, shown
from launcher.objects import Obj, seconds_since
from launcher.seen import World
from launcher.wording import count

_QUIET_S = 30.0  # until a controller that has done nothing is worth a word

_QUOTA = re.compile(
    r"exceeded quota: (?P<quota>[^,]+), requested: (?P<requested>.+), used: (?P<used>.+), limited: (?P<limited>.+)"
)
_UNSAID = re.compile(r"failed quota: (?P<quota>[^:]+): must specify (?P<what>.+)")
_SECURITY = re.compile(r'violates PodSecurity "(?P<level>[^"]+)": (?P<what>.+)', re.DOTALL)
_DOWN = re.compile(r'failed calling webhook "(?P<webhook>[^"]+)"')
_SERVICE = re.compile(r"https://([a-z0-9-]+)\.([a-z0-9-]+)\.svc\b")
_POLICY = re.compile(
    r"ValidatingAdmissionPolicy '(?P<policy>[^']+)' with binding '[^']+' denied request: (?P<what>.+)", re.DOTALL
)
_DENIED = re.compile(r'admission webhook "(?P<webhook>[^"]+)" denied the request: (?P<what>.+)', re.DOTALL)
_ACCOUNT = re.compile(r'serviceaccount "(?P<account>[^"]+)" not found')
_PRIORITY = re.compile(r"no PriorityClass with name (?P<name>\S+) was found")
_RUNTIME = re.compile(r'RuntimeClass "(?P<name>[^"]+)" not found')
_RANGE = re.compile(r"(?P<what>(?:minimum|maximum) \S+ usage per .+|\S+ max limit to request ratio per .+)")
_FOLLOWER = re.compile(r"follower pod node selector|leader pod not yet scheduled")


def jobs_not_created(world: World) -> Answer | None:
    """The JobSet controller cannot make the Jobs, or has not looked at the JobSet at all."""
    if world.jobs or world.is_suspended:
        return None
    event = world.said("JobCreationFailed", "HeadlessServiceCreationFailed", "PVCCreationFailed", kind="JobSet")
    if event is not None:
        what = {"JobCreationFailed": "Jobs", "PVCCreationFailed": "claims"}.get(event["reason"], "headless Service")
        answer = _reason(event["message"])
        return Answer(answer.situation, f"has no {what}: {answer.headline}", quoted(event), answer.next_move)
    return _unattended(world)


def _unattended(world: World) -> Answer | None:
    assert world.jobset is not None, "asked of a JobSet that is there"
    age = seconds_since(world.jobset["metadata"].get("creationTimestamp"), world.now)
    if age is None or age < _QUIET_S or world.pods:
        return None
    return Answer(
        "unattended",
        f"has no Jobs {age:.0f} s after it was created: the JobSet controller has not acted on it",
        next_move="see that the controller runs: kubectl -n jobset-system get pods; `launcher doctor` looks at it too.",
    )


def pods_not_created(world: World) -> Answer | None:
    """The Job controller cannot make the pods."""
    here = [host for host in world.hosts if not host.is_leaving]
    event = world.said("FailedCreate", kind="Job")
    if event is None or world.is_suspended or not world.jobs or len(here) >= world.wanted:
        return None
    if any(host.has_ended for host in here) and not _is_newer(event, world):
        return None
    answer = _reason(event["message"])
    if answer.situation == "exclusive-placement" and any(host.unscheduled for host in here):
        return None  # what keeps the leader from its node says more
    missing = world.wanted - len(here)
    pods = "its pod is" if world.wanted == 1 else f"{missing} of {count(world.wanted, 'pod')} are"
    return Answer(answer.situation, f"waits: {pods} refused: {answer.headline}", quoted(event), answer.next_move)


def _is_newer(event: Obj, world: World) -> bool:
    """Whether the refusal is of the Jobs that are here, and not of those before a restart."""
    return any(event["last"] >= job["metadata"].get("creationTimestamp", "") for job in world.jobs)


def _reason(message: str) -> Answer:
    """Why the API server refused an object, by its message."""
    for pattern, answer in _ANSWERS:
        if (match := pattern.search(message)) is not None:
            return answer(match)
    return Answer(
        "refused", shown(message), next_move="change what the message names, in job.yaml or in the namespace."
    )


def _quota(match: re.Match[str]) -> Answer:
    said = f"requested {match['requested']}, used {match['used']}, limited {match['limited']}"
    return Answer(
        "resource-quota",
        f"ResourceQuota {match['quota']} is exceeded: {said}",
        next_move="ask for less, end something else in the namespace, or have the quota raised.",
    )


def _unsaid(match: re.Match[str]) -> Answer:
    what = f"ResourceQuota {match['quota']} wants every pod to say {match['what']}"
    return Answer(
        "resource-quota", what, next_move="set resources: in job.yaml, and under pod: what it has no key for."
    )


def _security(match: re.Match[str]) -> Answer:
    headline = f'the namespace enforces Pod Security "{match["level"]}": {shown(match["what"])}'
    move = "leave out what the message names (`launcher plan` says which level a job needs), or use another namespace."
    return Answer("pod-security", headline, next_move=move)


def _down(match: re.Match[str]) -> Answer:
    said = match.string[match.end() :].strip(": ")
    service = _SERVICE.search(said)
    where = f" ({service[1]} in {service[2]})" if service else ""
    return Answer(
        "webhook-down",
        f"webhook {match['webhook']}{where} does not answer: {shown(said.rpartition(': ')[2] or said)}",
        next_move="have the server of that webhook mended; what it holds up goes on by itself.",
    )


def _policy(match: re.Match[str]) -> Answer:
    headline = f"ValidatingAdmissionPolicy {match['policy']} says no: {shown(match['what'])}"
    return Answer("admission", headline, next_move="change what the policy names, or ask who owns it.")


def _denied(match: re.Match[str]) -> Answer:
    headline = f"webhook {match['webhook']} says no: {shown(match['what'])}"
    return Answer("admission", headline, next_move="change what the webhook names, or ask who runs it.")


def _account(match: re.Match[str]) -> Answer:
    move = f"kubectl create serviceaccount {match['account']}, or name another as service_account: in job.yaml."
    return Answer("service-account", f"there is no service account {match['account']}", next_move=move)


def _priority(match: re.Match[str]) -> Answer:
    headline = f"there is no PriorityClass {match['name']}"
    return Answer("priority", headline, next_move="kubectl get priorityclasses shows which there are.")


def _runtime(match: re.Match[str]) -> Answer:
    headline = f"there is no RuntimeClass {match['name']}"
    return Answer("runtime-class", headline, next_move="kubectl get runtimeclasses shows which there are.")


def _range(match: re.Match[str]) -> Answer:
    headline = f"a LimitRange of the namespace forbids it: {shown(match['what'])}"
    return Answer("limit-range", headline, next_move="change resources: in job.yaml to lie within it.")


def _follower(match: re.Match[str]) -> Answer:
    headline = "its followers wait until the leader of each slice has a node"
    return Answer(
        "exclusive-placement", headline, next_move="nothing, if the leader is placed soon; else see why it is not."
    )


_ANSWERS = (
    (_QUOTA, _quota),
    (_UNSAID, _unsaid),
    (_SECURITY, _security),
    (_DOWN, _down),
    (_POLICY, _policy),
    (_FOLLOWER, _follower),
    (_DENIED, _denied),
    (_ACCOUNT, _account),
    (_PRIORITY, _priority),
    (_RUNTIME, _runtime),
    (_RANGE, _range),
)
