"""Findings about a namespace and the objects in it that a job needs. Pure functions.

They cover the namespace's Pod Security level, quotas, queues and network policies, the user's
permissions, and the PersistentVolumeClaims, Secrets and ConfigMaps to which pods refer. The values
in a Secret are not looked at, only its type and the names of its keys.
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
    pod_template,
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
        summary, reason = "namespace {name} does not exist", "nothing can be created in it."
        return user_failure(summary, reason, "create it, or use another: -n NAMESPACE.", name=name)
    if "deletionTimestamp" in namespace["metadata"]:
        summary, reason = "namespace {name} is being deleted", "nothing new can be created in it."
        return user_failure(summary, reason, "use another: -n NAMESPACE.", name=name)
    return ok_finding("namespace {name} exists", name=name)


def judge_pod_security(name: str, labels: Mapping[str, str], template: Obj) -> Finding:
    """Judge whether the namespace admits the pods.

    If it does not, the API server still accepts the JobSet, which then waits for its pods.
    """
    enforced, pods_level = labels.get(ENFORCE_LABEL), strictest_level(template)
    fields = {"name": name, "enforced": enforced, "met": pods_level}
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
    remedy = "use a namespace that enforces {met}, or a network and volumes that {enforced} allows."
    job = agent_job(template["spec"])
    # Pods on TPUs run as root by default. With another user the namespace would admit them.
    if job is not None and job.platform == "tpu" and level == "restricted":
        remedy = (
            "use a namespace that enforces {met}: pods on TPUs are root, who is sure to open "
            "{devices}; or, where the nodes' containerd has {setting}, users: {{{accelerator}: "
            "1000}} in the cluster defaults."
        )
        fields |= {"devices": TPU_DEVICES.value, "setting": DEVICE_OWNERSHIP.value}
        fields["accelerator"] = job.accelerator
    reason = "the API server accepts the JobSet and rejects its pods: {broken:; }"
    summary += ", and the pods meet only {met}"
    return user_failure(summary, reason, remedy, **fields, broken=violations)


# --- quotas ---------------------------------------------------------------------------------------


def judge_quotas(quotas: Sequence[Obj], jobset: Obj) -> Findings:
    """Compare ResourceQuotas with the requests of the whole job."""
    requests, spec = _quota_requests(jobset), pod_template(jobset).get("spec", {})
    has_room = True
    for quota in quotas:
        if not _has_scopes_of_pod(quota, spec):
            continue
        used_quantities = quota.get("status", {}).get("used") or {}
        for resource, limit in (quota.get("spec", {}).get("hard") or {}).items():
            requested, hard_limit = requests.get(resource, Decimal(0)), parse_quantity(str(limit))
            free = hard_limit - parse_quantity(str(used_quantities.get(resource, "0")))
            if requested <= min(hard_limit, free):
                continue
            has_room = False
            resource_name = resource.removeprefix("requests.").removeprefix("limits.")
            fields = {"quota": quota["metadata"]["name"], "resource": resource, "limit": limit}
            fields["need"] = format_quantity(resource_name, requested)
            fields["left"] = format_quantity(resource_name, max(free, Decimal(0)))
            summary = "ResourceQuota {quota} allows {resource} {limit}"
            if requested > hard_limit:
                summary += ", and the job requests {need}"
                reason = "some of its pods are never created."
                remedy = "request less, or ask the namespace's administrator to raise the quota."
                yield admin_failure(summary, reason, remedy, **fields)
            else:
                summary += ", of which {left} is left, and the job requests {need}"
                reason = "pods are rejected until others end; the gang waits for all of its hosts."
                yield warning_finding(summary, reason, "wait, or request less.", **fields)
    if has_room:
        summary = "{quotas:ResourceQuota} in the namespace"
        summary += ", with room for the job" if quotas else ""
        yield ok_finding(summary, quotas=len(quotas))


def _has_scopes_of_pod(quota: Obj, pod_spec: Obj) -> bool:
    """Return whether a ResourceQuota counts a pod. It must match all scopes of the quota.

    Source: podMatchesScopeFunc of Kubernetes 1.35, pkg/quota/v1/evaluator/core/pods.go.
    """
    requests = resources.pod_requests(pod_spec)
    is_best_effort = not (requests.get("cpu") or requests.get("memory"))
    is_terminating = pod_spec.get("activeDeadlineSeconds") is not None
    priority = {"key": pod_spec["priorityClassName"]} if pod_spec.get("priorityClassName") else {}
    matches = {
        "BestEffort": is_best_effort,
        "NotBestEffort": not is_best_effort,
        "Terminating": is_terminating,
        "NotTerminating": not is_terminating,
    }
    selector = quota.get("spec", {}).get("scopeSelector") or {}
    terms = [{"scopeName": name} for name in quota.get("spec", {}).get("scopes") or ()]
    for term in (*terms, *(selector.get("matchExpressions") or ())):
        name = term["scopeName"]
        if name == "PriorityClass":
            expression = {"operator": "Exists", **term, "key": "key"}
            if not selector_matches({"matchExpressions": [expression]}, priority):
                return False
        # A scope that only other fields decide may match.
        elif not matches.get(name, True):
            return False
    return True


def _quota_requests(jobset: Obj) -> dict[str, Decimal]:
    """Return the requests of a job, by the names that ResourceQuotas have for them."""
    requests = resources.job_requests(jobset)
    pod_count = resources.count_pods(jobset)
    counts = {
        "pods": pod_count,
        "count/pods": pod_count,
        "count/jobs.batch": sum(
            int(job.get("replicas", 1)) for job in jobset["spec"]["replicatedJobs"]
        ),
        f"count/{JOBSETS.resource}": 1,
        # The headless Service that gives the hosts their names.
        "services": 1,
        "count/services": 1,
    }
    unprefixed = ("cpu", "memory", "ephemeral-storage")
    return {
        **{f"requests.{name}": quantity for name, quantity in requests.items()},
        **{name: quantity for name, quantity in requests.items() if name in unprefixed},
        **{f"limits.{name}": quantity for name, quantity in requests.items() if name != "cpu"},
        **{name: Decimal(count) for name, count in counts.items()},
    }


# --- rights ---------------------------------------------------------------------------------------

ASK_FOR_ROLE = "ask the namespace's administrator for a Role with these verbs"
# Verbs that `launcher submit` needs for each kind of object that a job can have. It never reads
# Secrets.
_SUBMIT_VERBS: Mapping[Kind, str] = {
    JOBSETS: "create get",
    kinds.NETWORK_POLICIES: "create get",
    kinds.CONFIGMAPS: "create get patch",
    kinds.SECRETS: "create",
    kinds.RESOURCE_CLAIM_TEMPLATES: "create get",
    kinds.COMPUTE_DOMAINS: "create get",
    **dict.fromkeys(kinds.GANG_KINDS.values(), "create get"),
}
# Kinds of the objects of every job. Some jobs also have resource claims or a Secret.
USUAL_KINDS = (JOBSETS, kinds.NETWORK_POLICIES, kinds.CONFIGMAPS)


def command_rights(
    job_kinds: Iterable[Kind] = USUAL_KINDS, *, has_queue: bool = False
) -> dict[str, list[Right]]:
    """Return the permissions that each command needs for a job with objects of these kinds."""

    def list_rights(verbs: str, *objects: Kind) -> list[Right]:
        return [Right(verb, kind) for kind in objects for verb in verbs.split()]

    def list_stream_rights(subresource: str) -> list[Right]:
        # Kubernetes asks for one or the other, by its version.
        return [Right(verb, PODS, subresource) for verb in ("get", "create")]

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
        # Only `logs -f` watches the JobSet.
        "logs": [*list_rights("get list watch", JOBSETS), *read_logs],
        "exec, shell and copy": [*read_job, *list_stream_rights("exec")],
        "port-forward and profile": [*read_job, *list_stream_rights("portforward")],
        "stop": [*list_rights("get patch", JOBSETS), *list_rights("list watch", PODS)],
        "delete": list_rights("get delete", JOBSETS),
    }
    if has_queue:
        rights["submit"] += list_rights("get", kinds.LOCAL_QUEUES)
        rights["status and explain"] += list_rights("list", WORKLOADS)
        rights["stop"] += list_rights("list patch", WORKLOADS)
    return rights


def judge_rights(
    permissions: Mapping[Right, bool], rights_by_command: Mapping[str, Sequence[Right]]
) -> Findings:
    """Report the permissions that the user lacks for each command. Only submit's are required.

    Args:
        permissions: Whether the user has each right.
        rights_by_command: Rights that each command needs.
    """
    for command, rights in rights_by_command.items():
        if missing_rights := [str(right) for right in rights if not permissions[right]]:
            summary, reason = "missing RBAC permissions: {missing}", "needed by launcher {command}."
            make_finding = admin_failure if command == "submit" else warning_finding
            fields = {"missing": missing_rights, "command": command}
            yield make_finding(summary, reason, ASK_FOR_ROLE + ".", **fields)
    if all(permissions.values()):
        summary = "all {number} RBAC permissions that the commands need"
        yield ok_finding(summary, number=len(permissions))


# --- queues ---------------------------------------------------------------------------------------


def judge_local_queue(
    name: str, namespace: str, queue: Obj | None, queue_names: Sequence[str]
) -> Finding:
    """Judge whether the LocalQueue exists and is active. `queue_names` are the namespace's."""
    if queue is None:
        summary = "LocalQueue {name} does not exist in namespace {namespace}"
        reason = "Kueue never starts a job of a queue that does not exist."
        remedy, fields = f"{ASK_ADMIN} create a LocalQueue in this namespace.", {"name": name}
        if queue_names:
            remedy, fields["others"] = "use {others}.", join_choices(queue_names)
        return user_failure(summary, reason, remedy, **fields, namespace=namespace)
    summary = "LocalQueue {name} is active, on ClusterQueue {behind}"
    active = ok_finding(summary, name=name, behind=cluster_queue_name(queue))
    return _find_inactivity(f"LocalQueue {name}", queue) or active


def _find_inactivity(name: str, queue: Obj) -> Finding | None:
    """Return the failure of a LocalQueue or ClusterQueue that is stopped or inactive."""
    state = inactive_state(queue)
    if state is None:
        return None
    fields = {"name": name, "policy": state.stop_policy}
    if state.stop_policy is not None:
        summary = "{name} is stopped (stopPolicy: {policy})"
        reason = "Kueue admits nothing from it."
        return admin_failure(summary, reason, f"{ASK_ADMIN} resume it.", **fields)
    cause = state.message or state.reason or Text("no reason is given")
    summary, reason = "{name} is inactive", "Kueue admits nothing from it: {reason}"
    remedy = f"{ASK_ADMIN} fix what the message names."
    return admin_failure(summary, reason, remedy, **fields, reason=cause)


def judge_cluster_queue(
    name: str,
    queue: Obj | None,
    namespace_labels: Mapping[str, str] | None,
    requests: Mapping[str, Decimal],
    pods: int,
) -> Findings:
    """Judge whether the ClusterQueue is active and open to the namespace, and has enough quota."""
    if queue is None:
        summary, reason = "ClusterQueue {name} does not exist", "the job's LocalQueue points to it."
        yield admin_failure(summary, reason, f"{ASK_ADMIN} create it.", name=name)
        return
    if (inactive := _find_inactivity(f"ClusterQueue {name}", queue)) is not None:
        yield inactive
    selector, labels = queue["spec"].get("namespaceSelector"), namespace_labels
    if selector is None or (labels is not None and not selector_matches(selector, labels)):
        summary = "ClusterQueue {name} does not accept this namespace"
        reason = "its namespaceSelector does not match, so Kueue admits nothing from here."
        yield admin_failure(summary, reason, f"{ASK_ADMIN} extend namespaceSelector.", name=name)
    covered_names = covered_resources(queue)
    uncovered_names = [resource for resource in requests if resource not in covered_names]
    summary = "ClusterQueue {name} does not cover {resource}, of which the job requests {requested}"
    remedy = ASK_ADMIN + " add it to coveredResources ({covered})."
    for resource in uncovered_names:
        fields = {
            "name": name,
            "resource": resource,
            "covered": list(covered_names) or Text("none"),
        }
        fields["requested"] = format_quantity(resource, requests[resource])
        yield admin_failure(summary, "Kueue never admits the job.", remedy, **fields)
    if not uncovered_names:
        # Kueue treats pods as a resource if a ClusterQueue covers them.
        counts = {"pods": Decimal(pods)} if "pods" in covered_names else {}
        yield _judge_size(name, queue, {**requests, **counts})


def _judge_size(name: str, queue: Obj, requests: Mapping[str, Decimal]) -> Finding:
    """Judge whether the job fits into one flavor of the empty ClusterQueue."""
    covered_names = covered_resources(queue)
    largest = dict.fromkeys(covered_names, Decimal(0))
    for quota in queue_quotas(queue):
        largest[quota.resource] = max(largest[quota.resource], parse_quantity(quota.nominal))
    shortages = [
        Text(
            "{requested} of {resource} (quota {quota})",
            requested=format_quantity(resource, requests[resource]),
            resource=resource,
            quota=format_quantity(resource, largest_quota),
        )
        for resource, largest_quota in largest.items()
        if requests.get(resource, 0) > largest_quota
    ]
    if not shortages:
        summary = "ClusterQueue {name} covers {covered}"
        summary += ", all that the job requests" if requests else ""
        return ok_finding(summary, name=name, covered=list(covered_names) or Text("nothing"))
    summary = "ClusterQueue {name} is too small: the job requests {lacking}"
    fields = {"name": name, "lacking": shortages}
    if queue["spec"].get("cohortName") or queue["spec"].get("cohort"):
        reason = "the rest must be borrowed from its cohort."
        remedy = "request less, or wait until the cohort has enough."
        return warning_finding(summary, reason, remedy, **fields)
    remedy = f"request less, or {ASK_ADMIN} raise the quota."
    return admin_failure(summary, "the job would wait forever.", remedy, **fields)


# Prefix that Kubernetes reserves for the names of its own PriorityClasses.
SYSTEM_PRIORITY_PREFIX = "system-"


def judge_priority(
    kind: Kind, name: str, priority_class: Obj | None, class_names: Sequence[str]
) -> Finding:
    """Judge whether the priority class exists. If not, propose one of the `class_names`.

    The classes of Kubernetes itself are never proposed, because a job with one of them would
    preempt the cluster's own components.
    """
    fields = {"kind": kind.kind, "name": name}
    if priority_class is not None:
        value = priority_class.get("value")
        return ok_finding("{kind} {name} exists, value {value}", **fields, value=value)
    reason, remedy = "pods that name it are rejected.", f"{ASK_ADMIN} create it."
    if kind is kinds.WORKLOAD_PRIORITY_CLASSES:
        reason = "Kueue does not admit a job that names it."
    proposals = [other for other in class_names if not other.startswith(SYSTEM_PRIORITY_PREFIX)]
    if proposals:
        remedy, fields["others"] = "use priority: {others}.", join_choices(proposals)
    else:
        remedy = f"leave priority: out, or {remedy}"
    return user_failure("{kind} {name} does not exist", reason, remedy, **fields)


# --- network policies -----------------------------------------------------------------------------

# For each type of a NetworkPolicy: the key of its rules, which is also the word for the traffic,
# the key of the peers in a rule, and the end of a finding.
_DIRECTIONS: Mapping[Literal["Ingress", "Egress"], tuple[str, str, str]] = {
    "Ingress": ("ingress", "from", "none admits connections from the job's other hosts"),
    "Egress": ("egress", "to", "none allows connections to the job's other hosts"),
}


def judge_network(
    policies: Sequence[Obj],
    pod_labels: Mapping[str, str],
    namespace_labels: Mapping[str, str] | None,
    has_own_policy: bool,
) -> Findings:
    """Judge whether the policies of the namespace let the job's pods connect to each other.

    A pod that no policy selects accepts all connections. A pod that policies select accepts the
    connections that at least one of them allows.

    Args:
        policies: NetworkPolicies of the namespace, with the one that the job brings.
        pod_labels: Labels of the job's pods.
        namespace_labels: Labels of the namespace, or None if they are not known.
        has_own_policy: Whether the job brings a policy.
    """

    def is_own_peer(peer: Obj) -> bool:
        # The pods' addresses are not known yet, so an address block is assumed to contain them.
        if "ipBlock" in peer:
            return True
        selector, labels = peer.get("namespaceSelector"), namespace_labels
        selects_namespace = selector is None or labels is None or selector_matches(selector, labels)
        return selects_namespace and selector_matches(peer.get("podSelector") or {}, pod_labels)

    is_open = True
    for direction, (rules_key, peers_key, denial) in _DIRECTIONS.items():
        selecting_policies = [
            policy
            for policy in policies
            if direction in _policy_types(policy["spec"])
            and selector_matches(policy["spec"].get("podSelector") or {}, pod_labels)
        ]
        # One item for each rule that allows the other hosts: whether it allows only some ports. A
        # rule without peers allows all hosts.
        are_ports_limited = [
            bool(rule.get("ports"))
            for policy in selecting_policies
            for rule in policy["spec"].get(rules_key) or ()
            if not rule.get(peers_key) or any(map(is_own_peer, rule[peers_key]))
        ]
        if not selecting_policies or (are_ports_limited and not all(are_ports_limited)):
            continue
        is_open = False
        names = ", ".join(sorted(policy["metadata"]["name"] for policy in selecting_policies))
        if are_ports_limited:
            summary = "NetworkPolicy {names} limits the ports between the job's hosts"
            reason = "JAX's coordinator listens on another port in each attempt."
            yield unknown_finding(summary, reason, names=names)
            continue
        summary = "NetworkPolicy {names} denies {word} of the job's pods, and " + denial
        reason = "the hosts wait for each other at the rendezvous until it times out."
        remedy = (
            "add a NetworkPolicy that allows it between pods of one JobSet, or ask the "
            "namespace's administrator."
        )
        if direction == "Ingress" and not has_own_policy:
            remedy = "leave out `network_policy: false`: the job's own policy admits its hosts."
        yield user_failure(summary, reason, remedy, names=names, word=rules_key)
    if is_open:
        yield ok_finding("no NetworkPolicy of the namespace keeps the hosts from each other")


def _policy_types(spec: Obj) -> Sequence[str]:
    """Return the types of a policy. The default is Ingress, with Egress if it has egress rules."""
    return spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]


# --- objects that pods refer to -------------------------------------------------------------------

_PULL_SECRET_TYPES = ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg")


class Reference(NamedTuple):
    """A Secret or a ConfigMap that pods need. If `keys` is empty, they need no particular key."""

    name: str
    keys: tuple[str, ...] = ()


def mounted_claims(spec: Obj) -> dict[str, bool]:
    """Return the names of the mounted claims, and for each whether all its mounts are read-only."""
    claims: dict[str, bool] = {}
    for volume in spec.get("volumes") or []:
        if (source := volume.get("persistentVolumeClaim")) is not None:
            name = source["claimName"]
            claims[name] = claims.get(name, True) and bool(source.get("readOnly"))
    return claims


def find_references(spec: Obj, kind: Kind) -> list[Reference]:
    """Return the Secrets or ConfigMaps that volumes and environment variables require."""
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


def judge_claim(name: str, claim: Obj | None, *, hosts: int, is_read_only: bool) -> Finding:
    """Judge a PersistentVolumeClaim that the pods of all `hosts` mount at once."""
    subject = "PersistentVolumeClaim {name}"
    if claim is None:
        reason, remedy = "pods stay Pending until it does.", "create it in the job's namespace."
        return user_failure(f"{subject} does not exist", reason, remedy, name=name)
    modes, phase = claim["spec"].get("accessModes") or [], claim.get("status", {}).get("phase")
    fields = {"name": name, "modes": list(modes), "hosts": hosts, "phase": phase or "Pending"}
    is_sharable = "ReadWriteMany" in modes or (is_read_only and "ReadOnlyMany" in modes)
    if hosts > 1 and not is_sharable:
        reason = "it can be attached to one node only: the pods on other nodes wait."
        remedy = "use a ReadWriteMany claim (NFS, Filestore, FSx, CephFS), or a bucket's URL."
        return user_failure(
            f"{subject} is {{modes}}, and {{hosts}} hosts mount it", reason, remedy, **fields
        )
    if phase == "Lost":
        reason, remedy = "pods cannot mount it.", "restore the volume, or create another claim."
        return admin_failure(
            f"{subject} is Lost: its volume no longer exists", reason, remedy, **fields
        )
    if phase != "Bound":
        reason = (
            "pods wait until it is bound; with WaitForFirstConsumer that is when the first pod "
            "is scheduled."
        )
        return warning_finding(
            f"{subject} is {{phase}}", reason, "kubectl describe pvc {name}", **fields
        )
    return ok_finding(f"{subject} is Bound, {{modes}}", **fields)


def judge_checkpoint_room(checkpoints: Checkpoints, claim: Obj | None) -> Findings:
    """Judge whether a PersistentVolumeClaim is large enough for the checkpoints, if known."""
    spec, status = (claim or {}).get("spec", {}), (claim or {}).get("status", {})
    capacity = status.get("capacity") or (spec.get("resources") or {}).get("requests") or {}
    if (size := capacity.get("storage")) is None:
        return
    content = Text(
        "{size} of checkpoints, {kept} kept and one being written",
        size=format_size(checkpoints.bytes),
        kept=checkpoints.kept_count,
    )
    fields = {"claim": checkpoints.claim, "has": size, "takes": content}
    if checkpoints.bytes <= parse_quantity(size):
        yield ok_finding("PersistentVolumeClaim {claim} of {has} has room for {takes}", **fields)
        return
    # EFS, NFS and hostPath enforce no size.
    summary = "PersistentVolumeClaim {claim} of {has} has no room for {takes}"
    reason = (
        "the claim says {has}; if its storage enforces that, a save that finds the disk full ends "
        "the run with exit code 84."
    )
    remedy = "enlarge the claim, or lower train.checkpoint.keep."
    yield warning_finding(summary, reason, remedy, **fields)


def judge_pull_secret(name: str, secret: Obj | None) -> Finding:
    """Judge whether an image pull secret exists and has the right type."""
    if secret is None:
        reason = (
            "images are pulled without credentials, which fails where the registry requires them."
        )
        remedy = "kubectl create secret docker-registry {name} …"
        return user_failure("image pull secret {name} does not exist", reason, remedy, name=name)
    summary = "image pull secret {name} is of type {type}"
    fields = {"name": name, "type": secret.get("type")}
    if secret.get("type") not in _PULL_SECRET_TYPES:
        remedy = "create it with `kubectl create secret docker-registry`."
        reason = f"the kubelet needs {_PULL_SECRET_TYPES[0]}."
        return user_failure(summary, reason, remedy, **fields)
    return ok_finding(summary, **fields)


def judge_reference(kind: str, reference: Reference, obj: Obj | None) -> Finding:
    """Judge whether a Secret or ConfigMap exists and has the keys that pods use."""
    fields = {"kind": kind, "name": reference.name, "keys": reference.keys}
    reason = "pods wait in ContainerCreating until it exists."
    if obj is None:
        remedy = f"create it, or remove it from {kind.lower()}s."
        return user_failure("{kind} {name} does not exist", reason, remedy, **fields)
    present_keys = {**(obj.get("data") or {}), **(obj.get("binaryData") or {})}
    if missing_keys := [key for key in reference.keys if key not in present_keys]:
        fields |= {"missing": missing_keys, "present": sorted(present_keys)}
        return user_failure(
            "{kind} {name} has no key {missing}", reason, "it has {present}.", **fields
        )
    template = "{kind} {name} exists, with {keys}" if reference.keys else "{kind} {name} exists"
    return ok_finding(template, **fields)
