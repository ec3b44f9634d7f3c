"""The namespace and what pods refer to in it. Pure.

Its Pod Security level, quotas, queue and network policies, the user's rights, and the
PersistentVolumeClaims, Secrets, ConfigMaps and the service account of a job. Of a Secret only its
type and the names of its keys are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Literal, NamedTuple

from jaxlaunch.launcher.diagnose.doctor.controllers import selector_matches
from jaxlaunch.launcher.diagnose.doctor.finding import (
    ASK_ADMIN,
    Checkpoints,
    Finding,
    Findings,
    admin_failure,
    ok_finding,
    unknown_finding,
    user_failure,
    warning_finding,
)
from jaxlaunch.launcher.diagnose.text import Text
from jaxlaunch.launcher.jobs.status.hosts import agent_job
from jaxlaunch.launcher.kubernetes import kinds, resources
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, PODS, WORKLOADS, Kind, Right
from jaxlaunch.launcher.kubernetes.objects import (
    Obj,
    cluster_queue_name,
    covered_resources,
    inactive_state,
    queue_quotas,
)
from jaxlaunch.launcher.kubernetes.pod_rules import (
    ENFORCE_LABEL,
    LEVELS,
    find_violations,
    strictest_level,
)
from jaxlaunch.launcher.kubernetes.resources import format_quantity, parse_quantity
from jaxlaunch.launcher.platforms.runtime import DEVICE_OWNERSHIP, TPU_DEVICES
from jaxlaunch.launcher.wording import format_size, join_choices


def judge_namespace(name: str, namespace: Obj | None) -> Finding:
    """Judge whether objects can be created in the namespace."""
    if namespace is None:
        summary, why = "namespace {name} does not exist", "nothing can be created in it."
        return user_failure(summary, why, "create it, or use another: -n NAMESPACE.", name=name)
    if "deletionTimestamp" in namespace["metadata"]:
        summary, why = "namespace {name} is being deleted", "nothing new can be created in it."
        return user_failure(summary, why, "use another: -n NAMESPACE.", name=name)
    return ok_finding("namespace {name} exists", name=name)


def judge_pod_security(name: str, labels: Mapping[str, str], template: Obj) -> Finding:
    """Judge whether the namespace admits the pods. Otherwise the JobSet is accepted and waits."""
    enforced, met = labels.get(ENFORCE_LABEL), strictest_level(template)
    fields = {"name": name, "enforced": enforced, "met": met}
    if enforced is None:
        summary = (
            "namespace {name} enforces no Pod Security level of its own: the cluster's own default "
            "applies, which cannot be read; the pods meet {met}."
        )
        return ok_finding(summary, **fields)
    summary = "namespace {name} enforces Pod Security level {enforced}"
    level = next((level for level in LEVELS if level == enforced), None)
    if level is None:
        return unknown_finding(summary, "Kubernetes has no such level.", **fields)
    violations = list(map(str, find_violations(template, level)))
    if not violations:
        return ok_finding(summary + ", which the pods meet", **fields)
    fix = "use a namespace that enforces {met}, or a network and volumes that {enforced} allows."
    job = agent_job(template["spec"])
    # Pods on TPUs run as root by default. With another user they would be admitted too.
    if job is not None and job.platform == "tpu" and level == "restricted":
        fix = (
            "use a namespace that enforces {met}: pods on TPUs are root, who is sure to open "
            "{devices}; or, where the nodes' containerd has {setting}, users: {{{accelerator}: "
            "1000}} in the cluster defaults."
        )
        fields |= {"devices": TPU_DEVICES.value, "setting": DEVICE_OWNERSHIP.value}
        fields["accelerator"] = job.accelerator
    why = "the API server accepts the JobSet and rejects its pods: {broken:; }"
    summary += ", and the pods meet only {met}"
    return user_failure(summary, why, fix, **fields, broken=violations)


# --- quotas ---------------------------------------------------------------------------------------


def judge_quotas(quotas: Sequence[Obj], jobset: Obj) -> Findings:
    """Compare ResourceQuotas with the requests of the whole job."""
    requests = _quota_requests(jobset)
    is_tight = False
    for quota in quotas:
        used = quota.get("status", {}).get("used") or {}
        for resource, limit in (quota.get("spec", {}).get("hard") or {}).items():
            need, most = requests.get(resource, Decimal(0)), parse_quantity(str(limit))
            free = most - parse_quantity(str(used.get(resource, "0")))
            if need <= min(most, free):
                continue
            is_tight = True
            plain = resource.removeprefix("requests.").removeprefix("limits.")
            fields = {"quota": quota["metadata"]["name"], "resource": resource, "limit": limit}
            fields["need"] = format_quantity(plain, need)
            fields["left"] = format_quantity(plain, max(free, Decimal(0)))
            summary = "ResourceQuota {quota} allows {resource} {limit}"
            if need > most:
                summary += ", and the job requests {need}"
                why = "some of its pods are never created."
                fix = "request less, or ask the namespace's administrator to raise the quota."
                yield admin_failure(summary, why, fix, **fields)
            else:
                summary += ", of which {left} is left, and the job requests {need}"
                why = "pods are rejected until others end; the gang waits for all of its hosts."
                yield warning_finding(summary, why, "wait, or request less.", **fields)
    if not is_tight:
        summary = "{quotas:ResourceQuota} in the namespace"
        summary += ", with room for the job" if quotas else ""
        yield ok_finding(summary, quotas=len(quotas))


def _quota_requests(jobset: Obj) -> dict[str, Decimal]:
    """Return the requests of a job by the names in ResourceQuotas."""
    requests = resources.job_requests(jobset)
    slices = sum(int(job.get("replicas", 1)) for job in jobset["spec"]["replicatedJobs"])
    counts = {"pods": resources.count_pods(jobset), "count/jobs.batch": slices}
    # The Service gives the hosts their names.
    counts |= {"services": 1, "count/services": 1, f"count/{JOBSETS.resource}": 1}
    counts["count/pods"] = counts["pods"]
    plain = ("cpu", "memory", "ephemeral-storage")
    return {
        **{f"requests.{name}": quantity for name, quantity in requests.items()},
        **{name: quantity for name, quantity in requests.items() if name in plain},
        **{f"limits.{name}": quantity for name, quantity in requests.items() if name != "cpu"},
        **{name: Decimal(count) for name, count in counts.items()},
    }


# --- rights ---------------------------------------------------------------------------------------

ASK_FOR_ROLE = "ask the namespace's administrator for a Role with these verbs"
# Verbs that submit uses on each kind of object of a job. Secrets are never read.
_SUBMIT_VERBS: Mapping[Kind, str] = {
    JOBSETS: "create get",
    kinds.NETWORK_POLICIES: "create get",
    kinds.CONFIGMAPS: "create get patch",
    kinds.SECRETS: "create",
    kinds.RESOURCE_CLAIM_TEMPLATES: "create get",
    kinds.COMPUTE_DOMAINS: "create get",
    **dict.fromkeys(kinds.GANG_KINDS.values(), "create get"),
}
# Kinds of objects of a job without resource claims and without a Secret.
USUAL_KINDS = (JOBSETS, kinds.NETWORK_POLICIES, kinds.CONFIGMAPS)


def command_rights(
    job_kinds: Iterable[Kind] = USUAL_KINDS, *, has_queue: bool = False
) -> dict[str, list[Right]]:
    """Return the permissions that each command needs for a job with objects of these kinds."""

    def list_rights(verbs: str, *objects: Kind) -> list[Right]:
        return [Right(verb, kind) for kind in objects for verb in verbs.split()]

    read_logs = [*list_rights("list watch", PODS), Right("get", PODS, "log")]
    read_job = [
        *list_rights("get", JOBSETS),
        *list_rights("list", kinds.JOBS, PODS, kinds.EVENTS, kinds.RESOURCE_QUOTAS),
    ]
    rights = {
        "submit": [
            right
            for kind in dict.fromkeys(job_kinds)
            for right in list_rights(_SUBMIT_VERBS[kind], kind)
        ],
        "submit --wait": [*list_rights("list watch", JOBSETS), *read_logs],
        "list": list_rights("list", JOBSETS),
        "status and explain": read_job,
        "logs": read_logs,
        "stop": [*list_rights("get patch", JOBSETS), *list_rights("list watch", PODS)],
        "delete": list_rights("get delete", JOBSETS),
    }
    if has_queue:
        rights["submit"] += list_rights("get", kinds.LOCAL_QUEUES)
        rights["status and explain"] += list_rights("list", WORKLOADS)
        rights["stop"] += list_rights("list patch", WORKLOADS)
    return rights


def judge_rights(has: Mapping[Right, bool], needed: Mapping[str, Sequence[Right]]) -> Findings:
    """Report the permissions that each command lacks. Only those of submit are required."""
    for command, rights in needed.items():
        if missing := [str(right) for right in rights if not has[right]]:
            summary, why = "missing RBAC permissions: {missing}", "needed by launcher {command}."
            judge = admin_failure if command == "submit" else warning_finding
            yield judge(summary, why, ASK_FOR_ROLE + ".", missing=missing, command=command)
    if all(has.values()):
        yield ok_finding("all {number} RBAC permissions that the commands need", number=len(has))


# --- queues ---------------------------------------------------------------------------------------


def judge_local_queue(
    name: str, namespace: str, queue: Obj | None, queue_names: Sequence[str]
) -> Finding:
    """Judge whether the LocalQueue exists, by the namespace's `queue_names`, and is active."""
    if queue is None:
        summary = "LocalQueue {name} does not exist in namespace {namespace}"
        why = "Kueue never starts a job of a queue that does not exist."
        fix, fields = f"{ASK_ADMIN} create a LocalQueue in this namespace.", {"name": name}
        if queue_names:
            fix, fields["others"] = "use {others}.", join_choices(queue_names)
        return user_failure(summary, why, fix, **fields, namespace=namespace)
    summary = "LocalQueue {name} is active, on ClusterQueue {behind}"
    active = ok_finding(summary, name=name, behind=cluster_queue_name(queue))
    return _judge_inactive(f"LocalQueue {name}", queue) or active


def _judge_inactive(name: str, queue: Obj) -> Finding | None:
    state = inactive_state(queue)
    if state is None:
        return None
    fields = {"name": name, "policy": state.stop_policy}
    if state.stop_policy is not None:
        summary, why = "{name} is stopped (stopPolicy: {policy})", "Kueue admits nothing from it."
        return admin_failure(summary, why, f"{ASK_ADMIN} resume it.", **fields)
    reason = state.message or state.reason or Text("no reason is given")
    summary, why = "{name} is inactive", "Kueue admits nothing from it: {reason}"
    fix = f"{ASK_ADMIN} fix what the message names."
    return admin_failure(summary, why, fix, **fields, reason=reason)


def judge_cluster_queue(
    name: str,
    queue: Obj | None,
    namespace_labels: Mapping[str, str] | None,
    requests: Mapping[str, Decimal],
    pods: int,
) -> Findings:
    """Judge whether the ClusterQueue is active and open to the namespace, and has enough quota."""
    if queue is None:
        summary, why = "ClusterQueue {name} does not exist", "the job's LocalQueue points to it."
        yield admin_failure(summary, why, f"{ASK_ADMIN} create it.", name=name)
        return
    if (inactive := _judge_inactive(f"ClusterQueue {name}", queue)) is not None:
        yield inactive
    selector, labels = queue["spec"].get("namespaceSelector"), namespace_labels
    if selector is None or (labels is not None and not selector_matches(selector, labels)):
        summary = "ClusterQueue {name} does not accept this namespace"
        why = "its namespaceSelector does not match, so Kueue admits nothing from here."
        yield admin_failure(summary, why, f"{ASK_ADMIN} extend namespaceSelector.", name=name)
    covered = covered_resources(queue)
    missing = [resource for resource in requests if resource not in covered]
    summary = "ClusterQueue {name} does not cover {resource}, of which the job requests {requested}"
    fix = ASK_ADMIN + " add it to coveredResources ({covered})."
    for resource in missing:
        fields = {"name": name, "resource": resource, "covered": list(covered) or Text("none")}
        fields["requested"] = format_quantity(resource, requests[resource])
        yield admin_failure(summary, "Kueue never admits the job.", fix, **fields)
    if not missing:
        # Kueue treats pods as a resource if a ClusterQueue covers them.
        counts = {"pods": Decimal(pods)} if "pods" in covered else {}
        yield _judge_size(name, queue, {**requests, **counts})


def _judge_size(name: str, queue: Obj, requests: Mapping[str, Decimal]) -> Finding:
    """Judge whether the job fits into one flavor of the empty ClusterQueue."""
    covered = covered_resources(queue)
    largest = dict.fromkeys(covered, Decimal(0))
    for quota in queue_quotas(queue):
        largest[quota.resource] = max(largest[quota.resource], parse_quantity(quota.nominal))
    lacking = [
        Text(
            "{requested} of {resource} (quota {quota})",
            requested=format_quantity(resource, requests[resource]),
            resource=resource,
            quota=format_quantity(resource, most),
        )
        for resource, most in largest.items()
        if requests.get(resource, 0) > most
    ]
    if not lacking:
        summary = "ClusterQueue {name} covers {covered}"
        summary += ", all that the job requests" if requests else ""
        return ok_finding(summary, name=name, covered=list(covered) or Text("nothing"))
    summary = "ClusterQueue {name} is too small: the job requests {lacking}"
    fields = {"name": name, "lacking": lacking}
    if queue["spec"].get("cohortName") or queue["spec"].get("cohort"):
        why = "the rest must be borrowed from its cohort."
        fix = "request less, or wait until the cohort has enough."
        return warning_finding(summary, why, fix, **fields)
    fix = f"request less, or {ASK_ADMIN} raise the quota."
    return admin_failure(summary, "the job would wait forever.", fix, **fields)


# Kubernetes reserves the names of its own PriorityClasses, which begin with this.
SYSTEM_PRIORITY_PREFIX = "system-"


def judge_priority(
    kind: Kind, name: str, priority_class: Obj | None, class_names: Sequence[str]
) -> Finding:
    """Judge whether the priority class exists. `class_names` names those of the cluster.

    Those of Kubernetes itself are never proposed: a job with one of them would preempt the pods
    that the cluster runs on.
    """
    fields = {"kind": kind.kind, "name": name}
    if priority_class is not None:
        value = priority_class.get("value")
        return ok_finding("{kind} {name} exists, value {value}", **fields, value=value)
    why, fix = "pods that name it are rejected.", f"{ASK_ADMIN} create it."
    if kind is kinds.WORKLOAD_PRIORITY_CLASSES:
        why = "Kueue does not admit a job that names it."
    others = [other for other in class_names if not other.startswith(SYSTEM_PRIORITY_PREFIX)]
    if others:
        fix, fields["others"] = "use priority: {others}.", join_choices(others)
    else:
        fix = f"leave priority: out, or {fix}"
    return user_failure("{kind} {name} does not exist", why, fix, **fields)


# --- network policies -----------------------------------------------------------------------------

_DIRECTIONS: Mapping[Literal["Ingress", "Egress"], tuple[str, str, str]] = {
    "Ingress": ("ingress", "from", "none admits connections from the job's other hosts"),
    "Egress": ("egress", "to", "none allows connections to the job's other hosts"),
}


def judge_network(
    policies: Sequence[Obj],
    pod_labels: Mapping[str, str],
    namespace_labels: Mapping[str, str] | None,
    has_own: bool,
) -> Findings:
    """Judge whether the policies of the namespace let the job's pods connect to each other.

    If no policy selects a pod, all connections are allowed, and else those that one of them allows.
    `has_own` means that the job has a policy.
    """

    def is_own_peer(peer: Obj) -> bool:
        # The pods' addresses are not known yet, so an address block is assumed to contain them.
        if "ipBlock" in peer:
            return True
        selector, labels = peer.get("namespaceSelector"), namespace_labels
        is_here = selector is None or labels is None or selector_matches(selector, labels)
        return is_here and selector_matches(peer.get("podSelector") or {}, pod_labels)

    is_open = True
    for direction, (word, key, lacking) in _DIRECTIONS.items():
        barring = [
            policy
            for policy in policies
            if direction in _policy_types(policy["spec"])
            and selector_matches(policy["spec"].get("podSelector") or {}, pod_labels)
        ]
        # Whether each rule that reaches the other hosts is limited to some ports. A rule without
        # peers reaches all.
        limited = [
            bool(rule.get("ports"))
            for policy in barring
            for rule in policy["spec"].get(word) or ()
            if not rule.get(key) or any(map(is_own_peer, rule[key]))
        ]
        if not barring or (limited and not all(limited)):
            continue
        is_open = False
        names = ", ".join(sorted(policy["metadata"]["name"] for policy in barring))
        if limited:
            summary = "NetworkPolicy {names} limits the ports between the job's hosts"
            why = "JAX's coordinator listens on another port in each attempt."
            yield unknown_finding(summary, why, names=names)
            continue
        summary = "NetworkPolicy {names} denies {word} of the job's pods, and " + lacking
        why = "the hosts wait for each other at the rendezvous until it times out."
        fix = (
            "add a NetworkPolicy that allows it between pods of one JobSet, or ask the "
            "namespace's administrator."
        )
        if direction == "Ingress" and not has_own:
            fix = "leave out `network_policy: false`: the job's own policy admits its hosts."
        yield user_failure(summary, why, fix, names=names, word=word)
    if is_open:
        yield ok_finding("no NetworkPolicy of the namespace keeps the hosts from each other")


def _policy_types(spec: Obj) -> Sequence[str]:
    """Return the types of a policy, by default ingress, and egress if it has such rules."""
    return spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]


# --- objects that pods refer to -------------------------------------------------------------------

_PULL_TYPES = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")


class Reference(NamedTuple):
    """A Secret or a ConfigMap that pods need, and its required keys, empty for all keys."""

    name: str
    keys: tuple[str, ...] = ()


def mounted_claims(spec: Obj) -> dict[str, bool]:
    """Return the mounted claims, each with whether the pods only read it."""
    claims: dict[str, bool] = {}
    for volume in spec.get("volumes") or []:
        if (source := volume.get("persistentVolumeClaim")) is not None:
            name = source["claimName"]
            claims[name] = claims.get(name, True) and bool(source.get("readOnly"))
    return claims


def find_references(spec: Obj, kind: Kind) -> list[Reference]:
    """Return the Secrets or ConfigMaps, with their keys, that volumes and variables use."""
    prefix = "secret" if kind is kinds.SECRETS else "configMap"
    name_key = "secretName" if kind is kinds.SECRETS else "name"
    uses = [
        (source, source[name_key], [item["key"] for item in source.get("items") or []])
        for volume in spec.get("volumes") or []
        if (source := volume.get(prefix)) is not None
    ]
    for container in [*(spec.get("initContainers") or []), *(spec.get("containers") or [])]:
        for variable in container.get("env") or []:
            if (source := (variable.get("valueFrom") or {}).get(f"{prefix}KeyRef")) is not None:
                uses.append((source, source["name"], [source["key"]]))
        for variables in container.get("envFrom") or []:
            if (source := variables.get(f"{prefix}Ref")) is not None:
                uses.append((source, source["name"], []))
    keys_by_name: dict[str, set[str]] = {}
    for source, name, keys in uses:
        if not source.get("optional"):
            keys_by_name.setdefault(name, set()).update(keys)
    return [Reference(name, tuple(sorted(keys))) for name, keys in keys_by_name.items()]


def judge_claim(name: str, claim: Obj | None, *, hosts: int, is_read: bool) -> Finding:
    """Judge a PersistentVolumeClaim that `hosts` pods mount at once."""
    subject = "PersistentVolumeClaim {name}"
    if claim is None:
        why, fix = "pods stay Pending until it does.", "create it in the job's namespace."
        return user_failure(f"{subject} does not exist", why, fix, name=name)
    modes, phase = claim["spec"].get("accessModes") or [], claim.get("status", {}).get("phase")
    fields = {"name": name, "modes": list(modes), "hosts": hosts, "phase": phase or "Pending"}
    if hosts > 1 and "ReadWriteMany" not in modes and not (is_read and "ReadOnlyMany" in modes):
        why = "it can be attached to one node only: the pods on other nodes wait."
        fix = "use a ReadWriteMany claim (NFS, Filestore, FSx, CephFS), or a bucket's URL."
        return user_failure(
            f"{subject} is {{modes}}, and {{hosts}} hosts mount it", why, fix, **fields
        )
    if phase == "Lost":
        why, fix = "pods cannot mount it.", "restore the volume, or create another claim."
        return admin_failure(f"{subject} is Lost: its volume no longer exists", why, fix, **fields)
    if phase != "Bound":
        why = (
            "pods wait until it is bound; with WaitForFirstConsumer that is when the first pod "
            "is scheduled."
        )
        return warning_finding(
            f"{subject} is {{phase}}", why, "kubectl describe pvc {name}", **fields
        )
    return ok_finding(f"{subject} is Bound, {{modes}}", **fields)


def judge_checkpoint_room(needed: Checkpoints, claim: Obj | None) -> Findings:
    """Judge the size of a PersistentVolumeClaim for checkpoints, if it is known."""
    spec, status = (claim or {}).get("spec", {}), (claim or {}).get("status", {})
    capacity = status.get("capacity") or (spec.get("resources") or {}).get("requests") or {}
    if (size := capacity.get("storage")) is None:
        return
    takes = Text(
        "{size} of checkpoints, {kept} kept and one being written",
        size=format_size(needed.bytes),
        kept=needed.kept_count,
    )
    fields = {"claim": needed.claim, "has": size, "takes": takes}
    if needed.bytes <= parse_quantity(size):
        yield ok_finding("PersistentVolumeClaim {claim} of {has} has room for {takes}", **fields)
        return
    # EFS, NFS and hostPath enforce no size.
    summary = "PersistentVolumeClaim {claim} of {has} has no room for {takes}"
    why = (
        "the claim says {has}; if its storage enforces that, a save that finds the disk full ends "
        "the run with exit code 84."
    )
    fix = "enlarge the claim, or lower train.checkpoint.keep."
    yield warning_finding(summary, why, fix, **fields)


def judge_pull_secret(name: str, secret: Obj | None) -> Finding:
    """Judge an image pull secret."""
    if secret is None:
        why = "images are pulled without credentials, which fails where the registry requires them."
        fix = "kubectl create secret docker-registry {name} …"
        return user_failure("image pull secret {name} does not exist", why, fix, name=name)
    summary = "image pull secret {name} is of type {type}"
    fields = {"name": name, "type": secret.get("type")}
    if secret.get("type") not in _PULL_TYPES:
        fix = "create it with `kubectl create secret docker-registry`."
        return user_failure(summary, f"the kubelet needs {_PULL_TYPES[0]}.", fix, **fields)
    return ok_finding(summary, **fields)


def judge_reference(kind: str, reference: Reference, obj: Obj | None) -> Finding:
    """Judge a Secret or ConfigMap and the keys that pods use."""
    fields = {"kind": kind, "name": reference.name, "keys": reference.keys}
    why = "pods wait in ContainerCreating until it exists."
    if obj is None:
        fix = f"create it, or remove it from {kind.lower()}s."
        return user_failure("{kind} {name} does not exist", why, fix, **fields)
    present = {**(obj.get("data") or {}), **(obj.get("binaryData") or {})}
    if missing := [key for key in reference.keys if key not in present]:
        fields |= {"missing": missing, "present": sorted(present)}
        return user_failure(
            "{kind} {name} has no key {missing}", why, "it has {present}.", **fields
        )
    template = "{kind} {name} exists, with {keys}" if reference.keys else "{kind} {name} exists"
    return ok_finding(template, **fields)
