"""The namespace: its Pod Security level, quotas, queue, priority, network policies, and the user's rights in it. Pure.

`launcher submit` and `launcher doctor` judge a namespace here alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Literal

from jaxlaunch.launcher.diagnose.doctor.controllers import matches
from jaxlaunch.launcher.diagnose.doctor.finding import ASK_ADMIN, Finding, Findings, fail, fail_admin, ok, unknown, warn
from jaxlaunch.launcher.diagnose.text import Text
from jaxlaunch.launcher.jobs.status.hosts import agent_job
from jaxlaunch.launcher.kubernetes import kinds, objects, resources
from jaxlaunch.launcher.kubernetes import pod_rules as podsecurity
from jaxlaunch.launcher.kubernetes.kinds import WORKLOAD_PRIORITY_CLASSES, Kind, Right
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.kubernetes.pod_rules import ENFORCE, LEVELS
from jaxlaunch.launcher.kubernetes.resources import parse_quantity
from jaxlaunch.launcher.platforms.runtime import DEVICE_OWNERSHIP, TPU_DEVICES
from jaxlaunch.launcher.wording import either


def exists(name: str, found: Obj | None) -> Finding:
    """Whether objects can be created in the namespace."""
    if found is None:
        fix = "create it, or use another: -n NAMESPACE."
        return fail("namespace {name} does not exist", "nothing can be created in it.", fix, name=name)
    if "deletionTimestamp" in found["metadata"]:
        what, why = "namespace {name} is being deleted", "nothing new can be created in it."
        return fail(what, why, "use another: -n NAMESPACE.", name=name)
    return ok("namespace {name} exists", name=name)


def pod_security(name: str, labels: Mapping[str, str], template: Obj) -> Finding:
    """Whether the namespace admits the pods; where it does not, the JobSet is accepted all the same, and waits."""
    enforced, met = labels.get(ENFORCE), podsecurity.strictest_level(template)
    fields = {"name": name, "enforced": enforced, "met": met}
    if enforced is None:
        why = "the cluster's own default applies, which cannot be read; the pods meet {met}."
        return ok("namespace {name} enforces no Pod Security level of its own: " + why, **fields)
    level = next((each for each in LEVELS if each == enforced), None)
    if level is None:
        what = "namespace {name} enforces Pod Security level {enforced}"
        return unknown(what, "Kubernetes has no such level.", **fields)
    if broken := podsecurity.find_violations(template, level):
        what = "namespace {name} enforces Pod Security level {enforced}, and the pods meet only {met}"
        why = "the API server accepts the JobSet and rejects its pods: {broken:; }"
        return fail(what, why, "{fix}", fix=_looser(template, met, level), broken=list(map(str, broken)), **fields)
    return ok("namespace {name} enforces Pod Security level {enforced}, which the pods meet", **fields)


def _looser(template: Obj, met: str, level: str) -> Text:
    """Return what lets the pods in: of a TPU, whose pods are root by default, also another user."""
    job = agent_job(template["spec"])
    if job is not None and job.platform == "tpu" and level == "restricted":
        return Text(
            "use a namespace that enforces {met}: pods on TPUs are root, who is sure to open {devices}; or, where the "
            "nodes' containerd has {setting}, users: {{{accelerator}: 1000}} in the cluster defaults.",
            met=met,
            devices=TPU_DEVICES.value,
            setting=DEVICE_OWNERSHIP.value,
            accelerator=job.accelerator,
        )
    return Text(
        "use a namespace that enforces {met}, or a network and volumes that {level} allows.", met=met, level=level
    )


# --- quotas -----------------------------------------------------------------------------------------------------------


def quotas(found: Sequence[Obj], jobset: Obj) -> Findings:
    """ResourceQuotas against what the whole job requests."""
    requested = _counted(jobset)
    is_tight = False
    for quota in found:
        used, hard = quota.get("status", {}).get("used") or {}, quota.get("spec", {}).get("hard") or {}
        for resource, limit in hard.items():
            need, most = requested.get(resource, Decimal(0)), parse_quantity(str(limit))
            free = most - parse_quantity(str(used.get(resource, "0")))
            plain = resource.removeprefix("requests.").removeprefix("limits.")
            fields = {"quota": quota["metadata"]["name"], "resource": resource, "limit": limit}
            fields |= {
                "need": resources.format_quantity(plain, need),
                "left": resources.format_quantity(plain, max(free, Decimal(0))),
            }
            what = "ResourceQuota {quota} allows {resource} {limit}"
            if need > most:
                is_tight = True
                why, fix = (
                    "some of its pods are never created.",
                    "ask the namespace's administrator to raise the quota.",
                )
                yield fail_admin(f"{what}, and the job requests {{need}}", why, f"request less, or {fix}", **fields)
            elif need > free:
                is_tight = True
                what += ", of which {left} is left, and the job requests {need}"
                why = "pods are rejected until others end; the gang waits for all of its hosts."
                yield warn(what, why, "wait, or request less.", **fields)
    if not is_tight:
        what = "{quotas:ResourceQuota} in the namespace" + (", with room for the job" if found else "")
        yield ok(what, quotas=len(found))


def _counted(jobset: Obj) -> dict[str, Decimal]:
    """What a job requests, under the names that ResourceQuotas have."""
    together = resources.job_requests(jobset)
    plain = {name: much for name, much in together.items() if name in ("cpu", "memory", "ephemeral-storage")}
    requested = {f"requests.{name}": much for name, much in together.items()} | plain
    limits = {f"limits.{name}": much for name, much in together.items() if name != "cpu"}
    pods = Decimal(resources.count_pods(jobset))
    slices = Decimal(sum(int(part.get("replicas", 1)) for part in jobset["spec"]["replicatedJobs"]))
    objects = {"pods": pods, "count/pods": pods, "count/jobs.batch": slices}
    one = ("services", "count/services", f"count/{kinds.JOBSETS.resource}")  # the Service is for the hosts' names
    return requested | limits | objects | dict.fromkeys(one, Decimal(1))


# --- rights -----------------------------------------------------------------------------------------------------------


ASK_FOR_ROLE = "ask the namespace's administrator for a Role with these verbs"


def _each(verbs: str, kind: Kind) -> Iterator[Right]:
    return (Right(verb, kind) for verb in verbs.split())


# What each command needs to be allowed.
COMMANDS: Mapping[str, tuple[Right, ...]] = {
    "submit": (
        *_each("get create", kinds.JOBSETS),
        *_each("get create", kinds.NETWORK_POLICIES),
        *_each("get create patch", kinds.CONFIGMAPS),
    ),
    "submit --wait": (
        *_each("watch", kinds.JOBSETS),
        *_each("list watch", kinds.PODS),
        Right("get", kinds.PODS, "log"),
    ),
    "list": tuple(_each("list", kinds.JOBSETS)),
    "status and explain": (
        *_each("get", kinds.JOBSETS),
        *_each("list", kinds.JOBS),
        *_each("list", kinds.PODS),
        *_each("list", kinds.EVENTS),
        *_each("list", kinds.RESOURCE_QUOTAS),
    ),
    "logs": (*_each("list watch", kinds.PODS), Right("get", kinds.PODS, "log")),
    "stop": (*_each("get patch", kinds.JOBSETS), *_each("list watch", kinds.PODS)),
    "delete": tuple(_each("get delete", kinds.JOBSETS)),
}
WITH_A_QUEUE: Mapping[str, tuple[Right, ...]] = {
    "submit": tuple(_each("get", kinds.LOCAL_QUEUES)),
    "status and explain": tuple(_each("list", kinds.WORKLOADS)),
    "stop": tuple(_each("list patch", kinds.WORKLOADS)),
}
WITH_A_GANG_SECRET: Mapping[str, tuple[Right, ...]] = {"submit": tuple(_each("create", kinds.SECRETS))}
WITH_CLAIMS: Mapping[str, tuple[Right, ...]] = {"submit": tuple(_each("get create", kinds.RESOURCE_CLAIM_TEMPLATES))}
WITH_A_COMPUTE_DOMAIN: Mapping[str, tuple[Right, ...]] = {"submit": tuple(_each("get create", kinds.COMPUTE_DOMAINS))}


def rights(has: Mapping[Right, bool], tables: Sequence[Mapping[str, tuple[Right, ...]]]) -> Findings:
    """The rights that each command lacks, by the `tables` that apply to the job. Only those of submit are required."""
    for command in COMMANDS:
        needed = [right for table in tables for right in table.get(command, ())]
        if missing := [str(right) for right in needed if not has[right]]:
            what, why = "missing RBAC permissions: {missing}", "needed by launcher {command}."
            judge = fail_admin if command == "submit" else warn
            yield judge(what, why, ASK_FOR_ROLE + ".", missing=missing, command=command)
    if all(has.values()):
        yield ok("all {number} RBAC permissions that the commands need", number=len(has))


# --- queue and priority -----------------------------------------------------------------------------------------------

PODS = "pods"  # a resource to Kueue, where a ClusterQueue covers it


def local_queue(name: str, namespace: str, found: Obj | None, others: Sequence[str]) -> Finding:
    """Whether the LocalQueue exists and is active; `others` are the namespace's LocalQueues."""
    if found is None:
        return fail(
            "LocalQueue {name} does not exist in namespace {namespace}",
            "Kueue never starts a job of a queue that does not exist.",
            "use {others}." if others else f"{ASK_ADMIN} create a LocalQueue in this namespace.",
            name=name,
            namespace=namespace,
            others=either(others) if others else "",
        )
    behind = objects.cluster_queue_name(found)
    return _inactive(f"LocalQueue {name}", found) or ok(
        "LocalQueue {name} is active, on ClusterQueue {behind}", name=name, behind=behind
    )


def _inactive(name: str, queue: Obj) -> Finding | None:
    found = objects.inactive_state(queue)
    if found is None:
        return None
    if found.stop_policy is not None:
        what, fix = "{name} is stopped (stopPolicy: {policy})", f"{ASK_ADMIN} resume it."
        return fail_admin(what, "Kueue admits nothing from it.", fix, name=name, policy=found.stop_policy)
    reason = found.message or found.reason or Text("no reason is given")
    what, why = "{name} is inactive", "Kueue admits nothing from it: {reason}"
    return fail_admin(what, why, f"{ASK_ADMIN} fix what the message names.", name=name, reason=reason)


def cluster_queue(
    name: str,
    found: Obj | None,
    namespace_labels: Mapping[str, str] | None,
    requested: Mapping[str, Decimal],
    pods: int,
) -> Findings:
    """The ClusterQueue: active, open to the namespace, with quota of each resource, and large enough for the job."""
    if found is None:
        fix = f"{ASK_ADMIN} create it."
        yield fail_admin("ClusterQueue {name} does not exist", "the job's LocalQueue points to it.", fix, name=name)
        return
    if (inactive := _inactive(f"ClusterQueue {name}", found)) is not None:
        yield inactive
    selector = found["spec"].get("namespaceSelector")
    if selector is None or (namespace_labels is not None and not matches(selector, namespace_labels)):
        what = "ClusterQueue {name} does not accept this namespace"
        why = "its namespaceSelector does not match, so Kueue admits nothing from here."
        yield fail_admin(what, why, f"{ASK_ADMIN} extend namespaceSelector.", name=name)
    covered = objects.covered_resources(found)
    missing = [resource for resource in requested if resource not in covered]
    for resource in missing:
        yield fail_admin(
            "ClusterQueue {name} does not cover {resource}, of which the job requests {requested}",
            "Kueue never admits the job.",
            ASK_ADMIN + " add it to coveredResources ({covered}).",
            name=name,
            resource=resource,
            requested=resources.format_quantity(resource, requested[resource]),
            covered=list(covered) or Text("none"),
        )
    if not missing:
        yield _large_enough(name, found, {**requested, **({PODS: Decimal(pods)} if PODS in covered else {})})


def _large_enough(name: str, found: Obj, requested: Mapping[str, Decimal]) -> Finding:
    """Whether the job fits into one flavor of the ClusterQueue when nothing else uses it."""
    largest = largest_quota(found)
    over = {resource: most for resource, most in largest.items() if requested.get(resource, 0) > most}
    if not over:
        covered = list(objects.covered_resources(found)) or Text("nothing")
        what = "ClusterQueue {name} covers {covered}" + (", all that the job requests" if requested else "")
        return ok(what, name=name, covered=covered)
    lacking = [
        Text(
            "{requested} of {resource} (quota {quota})",
            requested=resources.format_quantity(resource, requested[resource]),
            resource=resource,
            quota=resources.format_quantity(resource, most),
        )
        for resource, most in over.items()
    ]
    what, fields = "ClusterQueue {name} is too small: the job requests {lacking}", {"name": name, "lacking": lacking}
    if found["spec"].get("cohortName") or found["spec"].get("cohort"):
        why = "the rest must be borrowed from its cohort."
        return warn(what, why, "request less, or wait until the cohort has enough.", **fields)
    return fail_admin(what, "the job would wait forever.", f"request less, or {ASK_ADMIN} raise the quota.", **fields)


def largest_quota(found: Obj) -> dict[str, Decimal]:
    """Resource → the largest nominal quota that one flavor of a ClusterQueue has; 0 for a covered one without any."""
    most = dict.fromkeys(objects.covered_resources(found), Decimal(0))
    for quota in objects.queue_quotas(found):
        most[quota.resource] = max(most[quota.resource], parse_quantity(quota.nominal))
    return most


def quota_not_visible(name: str) -> Finding:
    """A ClusterQueue that the user may not read."""
    why = "you have no permission to read ClusterQueues."
    return unknown("the quota of ClusterQueue {name} is not known", why, name=name)


def priority(kind: str, name: str, found: Obj | None, others: Sequence[str]) -> Finding:
    """Whether the priority class exists; `others` are those of the cluster."""
    if found is not None:
        return ok("{kind} {name} exists, value {value}", kind=kind, name=name, value=found.get("value"))
    fix = "use priority: {others}." if others else f"{ASK_ADMIN} create it."
    is_kueue_s = kind == WORKLOAD_PRIORITY_CLASSES.kind
    why = "Kueue does not admit a job that names it." if is_kueue_s else "pods that name it are rejected."
    listed = either(others) if others else ""
    return fail("{kind} {name} does not exist", why, fix, kind=kind, name=name, others=listed)


# --- network policies -------------------------------------------------------------------------------------------------

_Direction = Literal["Ingress", "Egress"]
_WORDS: Mapping[_Direction, tuple[str, str, str]] = {
    "Ingress": ("ingress", "from", "none admits connections from the job's other hosts"),
    "Egress": ("egress", "to", "none allows connections to the job's other hosts"),
}


def network(
    policies: Sequence[Obj], pod_labels: Mapping[str, str], namespace_labels: Mapping[str, str] | None, has_own: bool
) -> Findings:
    """Whether the policies of the namespace let the job's pods connect to each other; `has_own`: the job brings one.

    Without a policy that selects a pod, everything is allowed; with some, what one of them allows.
    """
    judged = [_judged(way, policies, pod_labels, namespace_labels, has_own) for way in _WORDS]
    found = [one for one in judged if one is not None]
    yield from found
    if not found:
        yield ok("no NetworkPolicy of the namespace keeps the hosts from each other")


def _judged(
    way: _Direction,
    policies: Sequence[Obj],
    pod_labels: Mapping[str, str],
    namespace_labels: Mapping[str, str] | None,
    has_own: bool,
) -> Finding | None:
    """What is wrong with one direction; None when nothing is."""
    barring = [one for one in policies if way in _types(one) and matches(_selector(one), pod_labels)]
    if not barring:
        return None
    word, key, lacking = _WORDS[way]
    limited = [  # whether each rule that reaches the other hosts is of some ports only
        bool(rule.get("ports"))
        for policy in barring
        for rule in policy["spec"].get(word) or ()
        if _reaches(rule.get(key), pod_labels, namespace_labels)
    ]
    if limited and not all(limited):
        return None
    names = ", ".join(sorted(one["metadata"]["name"] for one in barring))
    if limited:
        why = "JAX's coordinator listens on another port in each attempt."
        return unknown("NetworkPolicy {names} limits the ports between the job's hosts", why, names=names)
    what = "NetworkPolicy {names} denies {word} of the job's pods, and " + lacking
    why = "the hosts wait for each other at the rendezvous until it times out."
    fix = "add a NetworkPolicy that allows it between pods of one JobSet, or ask the namespace's administrator."
    if way == "Ingress" and not has_own:
        fix = "leave out `network_policy: false`: the job's own policy admits its hosts."
    return fail(what, why, fix, names=names, word=word)


def _types(policy: Obj) -> Sequence[str]:
    """What it is about; by default ingress, and egress where it has such rules."""
    spec = policy["spec"]
    return spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]


def _selector(policy: Obj) -> Obj:
    return policy["spec"].get("podSelector") or {}


def _reaches(
    peers: Sequence[Obj] | None, pod_labels: Mapping[str, str], namespace_labels: Mapping[str, str] | None
) -> bool:
    """Whether one of these peers is the job's own pods; no peers are all."""
    return not peers or any(_is_own(peer, pod_labels, namespace_labels) for peer in peers)


def _is_own(peer: Obj, pod_labels: Mapping[str, str], namespace_labels: Mapping[str, str] | None) -> bool:
    """A block of addresses may hold the pods', which are not known yet: it counts as one that does."""
    if "ipBlock" in peer:
        return True
    where = peer.get("namespaceSelector")
    is_here = where is None or namespace_labels is None or matches(where, namespace_labels)
    return is_here and matches(peer.get("podSelector") or {}, pod_labels)
