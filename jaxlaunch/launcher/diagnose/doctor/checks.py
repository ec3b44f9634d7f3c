"""Named checks of a cluster, a namespace and what a job needs. All creations are dry runs.

Each check reads objects and passes them to a pure function that judges them. Missing permissions
yield `unknown` and do not stop the other checks. `launcher doctor` runs all checks. Before it
writes anything, `launcher submit` runs those that show what would keep the job from running.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from jaxlaunch.launcher import troubleshooting
from jaxlaunch.launcher.diagnose.doctor import controllers, namespace, nodes
from jaxlaunch.launcher.diagnose.doctor.finding import (
    Finding,
    Findings,
    Obj,
    Target,
    admin_failure,
    ok_finding,
    unknown_finding,
    user_failure,
)
from jaxlaunch.launcher.diagnose.text import Text
from jaxlaunch.launcher.errors import ApiError, ClusterError, Fault, UserError
from jaxlaunch.launcher.kubernetes import kinds, labels
from jaxlaunch.launcher.kubernetes.client import Cluster, ignore_forbidden
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, LOCAL_QUEUES, Right, manifest_kind
from jaxlaunch.launcher.kubernetes.objects import cluster_queue_name, pod_template, trim_node
from jaxlaunch.launcher.kubernetes.resources import job_requests, pod_requests

# Names of the first two checks.
SERVER, JOB = "server", "job"
_SERVER_SECTION = "access-to-the-cluster"


def check_server(cluster: Cluster) -> list[Finding]:
    """Return the findings about the API server. After a failure nothing else can be checked."""

    def read_server() -> Findings:
        version = cluster.server_version()
        yield controllers.judge_server(version, cluster.server, cluster.is_ready())

    return list(_run_check(SERVER, read_server))


def list_job_faults(faults: Sequence[Fault]) -> list[Finding]:
    """Return a finding for each fault of the job with the cluster defaults."""
    why = "`launcher submit` refuses the job."
    return [
        dataclasses.replace(
            user_failure(
                "{where}: {what}",
                why,
                "{hint}",
                where=fault.location,
                what=fault.message.rstrip("."),
                hint=fault.hint or "correct it.",
            ),
            check=JOB,
        )
        for fault in faults
    ]


def check_target(target: Target) -> Findings:
    """Yield the findings of every other check, in order."""
    for name, check in CHECKS.items():
        yield from _run_check(name, partial(check.judge, target))


def _run_check(name: str, check: Callable[[], Findings]) -> Findings:
    """Yield the findings of a check under its name. An error of the cluster is also a finding."""
    try:
        yield from (dataclasses.replace(finding, check=name) for finding in check())
    except ClusterError as error:
        fields = {"name": name, "message": error.message, "hint": error.hint or Text("try again.")}
        match error.status if isinstance(error, ApiError) else None:
            case 401:
                summary = "the API server does not accept your credentials"
                finding = admin_failure(summary, "{message}", "log in again.", **fields)
            case 403:
                summary = "{name}: you have no permission to read this"
                finding = unknown_finding(summary, "{message}", **fields)
            case None:
                summary, why = "{name}: {message}", "it cannot be checked."
                finding = admin_failure(summary, why, "{hint}", **fields)
            case _:
                summary, fix = "{name}: the API server fails", "ask the cluster administrator."
                finding = admin_failure(summary, "{message}", fix, **fields)
        yield dataclasses.replace(finding, check=name)


# --- before a submission --------------------------------------------------------------------------


def check_submission(
    cluster: Cluster, manifests: Sequence[Obj], *, replace: bool, watch: bool, force: bool = False
) -> list[str]:
    """Return notes for the user about the job on this cluster.

    A missing object stops the submission; what may change while the job waits, such as a stopped
    queue, is only noted.

    Args:
        cluster: The cluster.
        manifests: The job's objects, the JobSet first.
        replace: Whether an earlier JobSet may be deleted.
        watch: Whether the job is waited for, or its logs are followed.
        force: Whether a job is submitted whose pods the namespace rejects.

    Raises:
        UserError: With all that would keep the job from running.
        ClusterError: The same, if an administrator must fix some of it.
    """
    target = Target(cluster, str(manifests[0]["metadata"]["namespace"]), manifests)
    jobset = controllers.judge_served(JOBSETS, "JobSet", cluster.served_versions(JOBSETS.group))
    if jobset.level == "fail":
        raise ClusterError(
            f"Cluster of context {cluster.context}: {jobset.summary_text}.", jobset.remedy_text
        )
    findings = [
        *check_allocation(target),
        *_check_submission_namespace(target, force=force),
        *_check_submission_rights(target, replace=replace, watch=watch),
        *_check_submission_queue(target),
        *_check_priority(target),
    ]
    if unrequested := target.unrequested_resources:
        is_known = target.defaulted_resources is not None
        findings.append(nodes.judge_missing_requests(unrequested, are_limit_ranges_known=is_known))
    errors = [
        (ClusterError if finding.whose == "cluster" else UserError)(
            f"{finding.summary_text[0].upper()}{finding.summary_text[1:]}: {finding.reason_text}",
            finding.remedy_text,
        )
        for finding in findings
        if finding.level == "fail"
    ]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        is_admins = any(isinstance(error, ClusterError) for error in errors)
        raise (ClusterError if is_admins else UserError)("\n".join(map(str, errors)))
    notes = [finding for finding in findings if finding.level != "ok"]
    return [f"{finding.summary_text}: {finding.reason_text}" for finding in notes]


def _check_submission_namespace(target: Target, *, force: bool) -> Findings:
    # Few users may read namespaces.
    with ignore_forbidden():
        exists, *security = _check_namespace(target)
        yield exists
        for finding in (finding for finding in security if finding.level == "fail"):
            remedy = finding.remedy + " --force submits it."
            yield _as_note(finding) if force else dataclasses.replace(finding, remedy=remedy)


def _check_submission_rights(target: Target, *, replace: bool, watch: bool) -> Findings:
    has = _ask_permissions(target, submit_rights(target.manifests, replace=replace, watch=watch))
    if missing := [str(right) for right, is_granted in has.items() if not is_granted]:
        summary = "missing RBAC permissions in namespace {namespace}"
        fix = namespace.ASK_FOR_ROLE + "; `launcher doctor` lists the permissions of all commands."
        fields = {"namespace": target.namespace, "missing": missing}
        yield admin_failure(summary, "{missing}.", fix, **fields)


def _check_submission_queue(target: Target) -> Findings:
    if target.queue is None:
        return
    # In a queue that does not exist, a job would wait forever.
    versions = target.cluster.served_versions(LOCAL_QUEUES.group)
    kueue = controllers.judge_kueue(versions, target.queue)
    yield kueue
    if kueue.level != "fail":
        finding, queue = _judge_local_queue(target, target.queue)
        # A stopped queue may be resumed while the job waits.
        is_stopped = finding.level == "fail" and queue is not None
        yield _as_note(finding) if is_stopped else finding


def _as_note(finding: Finding) -> Finding:
    return dataclasses.replace(finding, level="warn")


def submit_rights(manifests: Sequence[Obj], *, replace: bool, watch: bool) -> list[Right]:
    """Return the permissions that are required to submit these manifests."""
    rights = namespace.command_rights(manifest_kind(manifest) for manifest in manifests)
    commands = ("submit", *(["delete"] if replace else []), *(["submit --wait"] if watch else []))
    return list(dict.fromkeys(right for command in commands for right in rights[command]))


# --- the cluster ----------------------------------------------------------------------------------


def _check_clock(target: Target) -> Findings:
    sent_at = datetime.datetime.now(datetime.UTC)
    server_time = target.cluster.server_time()
    yield controllers.judge_clock(sent_at, server_time, datetime.datetime.now(datetime.UTC))


def _check_jobset(target: Target) -> Findings:
    yield controllers.judge_served(JOBSETS, "JobSet", target.cluster.served_versions(JOBSETS.group))
    yield from controllers.judge_crd(target.find_object(kinds.CRDS, JOBSETS.resource))
    place, config = controllers.JOBSET_DEPLOYMENT, controllers.JOBSET_CONFIG
    yield from _judge_controller(target, "JobSet", place, config)[0]


def _check_kueue(target: Target) -> Findings:
    versions = target.cluster.served_versions(LOCAL_QUEUES.group)
    yield controllers.judge_kueue(versions, target.queue)
    if versions:
        place, config = controllers.KUEUE_DEPLOYMENT, controllers.KUEUE_CONFIG
        findings, configs = _judge_controller(target, "Kueue", place, config)
        yield from findings
        for text in configs:
            yield from controllers.judge_kueue_config(text, target.queue)


def _check_gang(target: Target) -> Findings:
    """Check what admits the pods of a job together. A single pod needs nothing."""
    if target.pod_count < 2:
        return
    served = target.cluster.served_versions
    services = controllers.GangServices(
        kueue=served(LOCAL_QUEUES.group),
        native=served(kinds.POD_GROUPS.group),
        volcano=served(kinds.VOLCANO_GROUPS.group),
        coscheduling=served(kinds.COSCHEDULING_GROUPS.group),
    )
    crd = None
    if controllers.find_gang_field(target.template) is not None:
        crd = target.find_object(kinds.CRDS, JOBSETS.resource)
    yield from controllers.judge_gang(
        services, target.queue, target.template, crd, target.pod_count
    )


def _judge_controller(
    target: Target, project: str, place: tuple[str, str], config: str
) -> tuple[list[Finding], list[str]]:
    """Return the findings about a controller, and the files of its ConfigMap."""
    configmap = target.find_object(kinds.CONFIGMAPS, config, place[0]) or {}
    configs = list(configmap.get("data", {}).values())
    deployment = target.find_object(kinds.DEPLOYMENTS, place[1], place[0])
    features = controllers.describe_features(project, deployment, configs)
    return [controllers.judge_controller(project, deployment, place), *features], configs


def _check_webhooks(target: Target) -> Findings:
    configurations = [
        *target.cluster.list(kinds.MUTATING_WEBHOOKS),
        *target.cluster.list(kinds.VALIDATING_WEBHOOKS),
    ]
    webhooks = controllers.blocking_webhooks(configurations, target.namespace_labels)
    services = {hook.service for hook in webhooks if hook.service is not None}
    ready = {service: _count_ready_endpoints(target, *service) for service in services}
    yield from controllers.judge_webhooks(webhooks, ready)


def _count_ready_endpoints(target: Target, service_namespace: str, service: str) -> int:
    selector = f"kubernetes.io/service-name={service}"
    slices = target.cluster.list(kinds.ENDPOINT_SLICES, service_namespace, labels=selector)
    return controllers.count_ready_endpoints(slices)


def _check_dns(target: Target) -> Findings:
    system, ready = "kube-system", 0
    services = target.cluster.list(kinds.SERVICES, system, labels="k8s-app=kube-dns")
    if services:
        ready = _count_ready_endpoints(target, system, services[0]["metadata"]["name"])
    yield from nodes.judge_dns(services, ready)


# --- the namespace --------------------------------------------------------------------------------


def _check_namespace(target: Target) -> Findings:
    namespace_object = target.cluster.get(kinds.NAMESPACES, target.namespace)
    yield namespace.judge_namespace(target.namespace, namespace_object)
    if namespace_object is not None and "deletionTimestamp" not in namespace_object["metadata"]:
        yield namespace.judge_pod_security(
            target.namespace, namespace_object["metadata"].get("labels") or {}, target.template
        )


def _check_rights(target: Target) -> Findings:
    own_kinds = (manifest_kind(manifest) for manifest in target.manifests)
    needed = namespace.command_rights(
        (*namespace.USUAL_KINDS, *own_kinds), has_queue=target.queue is not None
    )
    has = _ask_permissions(target, (right for rights in needed.values() for right in rights))
    yield from namespace.judge_rights(has, needed)


def _ask_permissions(target: Target, rights: Iterable[Right]) -> dict[Right, bool]:
    """Ask the API server for each permission whether the user has it."""
    ask = partial(target.cluster.is_allowed, namespace=target.namespace)
    return {
        right: ask(right.verb, right.kind, subresource=right.subresource)
        for right in dict.fromkeys(rights)
    }


def check_allocation(target: Target) -> Findings:
    """Check whether the cluster serves the kinds by which the job claims devices."""
    for kind in dict.fromkeys(manifest_kind(manifest) for manifest in target.manifests[1:]):
        if (project := kinds.OPTIONAL_PROJECTS.get(kind)) is not None:
            yield controllers.judge_served(
                kind, project, target.cluster.served_versions(kind.group)
            )


def _check_network(target: Target) -> Findings:
    # Policies matter neither to a single host nor in the host's network.
    if target.pod_count < 2 or target.template["spec"].get("hostNetwork"):
        return
    kind = kinds.NETWORK_POLICIES
    own_policies = [manifest for manifest in target.manifests if manifest["kind"] == kind.kind]
    try:
        listed = target.cluster.list(kind, target.namespace)
    except ApiError as error:
        if error.status != 403:
            raise
        summary = "whether NetworkPolicies let the hosts connect to each other"
        why = "you have no permission to {right}: {message}"
        fields = {"right": str(Right("list", kind)), "message": error.message}
        yield unknown_finding(summary, why, **fields)
        return
    other_policies = [
        policy for policy in listed if policy["metadata"]["name"] != target.name or not own_policies
    ]
    pod_labels = (target.template.get("metadata") or {}).get("labels", {})
    yield from namespace.judge_network(
        [*other_policies, *own_policies],
        {**pod_labels, labels.NAME_LABEL: target.name},
        target.namespace_labels,
        has_own=bool(own_policies),
    )


def _check_quotas(target: Target) -> Findings:
    quotas = target.cluster.list(kinds.RESOURCE_QUOTAS, target.namespace)
    yield from namespace.judge_quotas(quotas, target.admitted_jobset)


def _check_queue(target: Target) -> Findings:
    if target.queue is None:
        return
    finding, queue = _judge_local_queue(target, target.queue)
    yield finding
    if queue is None:
        return
    name = cluster_queue_name(queue) or ""
    try:
        cluster_queue = target.cluster.get(kinds.CLUSTER_QUEUES, name)
    except ApiError as error:
        if error.status != 403:
            raise
        why = "you have no permission to read ClusterQueues."
        yield unknown_finding("the quota of ClusterQueue {name} is not known", why, name=name)
        return
    requests = job_requests(target.admitted_jobset)
    yield from namespace.judge_cluster_queue(
        name, cluster_queue, target.namespace_labels, requests, target.pod_count
    )


def _judge_local_queue(target: Target, name: str) -> tuple[Finding, Obj | None]:
    queue = target.cluster.get(LOCAL_QUEUES, name, target.namespace)
    queue_names = [] if queue else target.list_names(LOCAL_QUEUES, target.namespace)
    return namespace.judge_local_queue(name, target.namespace, queue, queue_names), queue


def _check_priority(target: Target) -> Findings:
    """Check Kueue's priority class, for the place in the queue, and Kubernetes', for the pods."""
    names_by_kind = {
        kinds.WORKLOAD_PRIORITY_CLASSES: target.jobset["metadata"]["labels"].get(
            labels.PRIORITY_LABEL
        ),
        kinds.PRIORITY_CLASSES: target.template["spec"].get("priorityClassName"),
    }
    for kind, name in names_by_kind.items():
        if name is None:
            continue
        try:
            priority_class = target.cluster.get(kind, name)
        except ApiError as error:
            if error.status != 403:
                raise
            summary = "whether {kind} {name} exists is not known"
            why = "you have no permission to read it."
            yield unknown_finding(summary, why, kind=kind.kind, name=name)
            continue
        class_names = [] if priority_class else target.list_names(kind)
        yield namespace.judge_priority(kind, name, priority_class, class_names)


# --- the job --------------------------------------------------------------------------------------


def _check_dry_run(target: Target) -> Findings:
    """Send the JobSet and one of its pods, which the server would admit only after the JobSet."""
    place = {"namespace": target.namespace}
    jobset = {**target.jobset, "metadata": {**target.jobset["metadata"], **place}}
    # The pod is the one that its Job would create, without the labels by which JobSet's webhook
    # would check it.
    metadata = target.template.get("metadata") or {}
    pod_labels = dict(metadata.get("labels") or {})
    for label in (labels.NAME_LABEL, labels.JOB_LABEL):
        pod_labels.pop(label, None)
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, **place, "name": f"{target.name}-dry-run", "labels": pod_labels},
        "spec": target.template["spec"],
    }
    for kind, manifest, subject in (
        (JOBSETS, jobset, "the JobSet"),
        (kinds.PODS, pod, "a pod of the job"),
    ):
        refusal = None
        try:
            target.cluster.create(kind, manifest, dry_run=True)
        except ApiError as error:
            refusal = error
        yield controllers.judge_dry_run(refusal, subject)


def _check_nodes(target: Target) -> Findings:
    listed = target.cluster.list(kinds.NODES, trim=trim_node)
    yield nodes.count_accelerators(listed)
    if missing := target.unrequested_resources:
        yield nodes.judge_missing_requests(
            missing, are_limit_ranges_known=target.defaulted_resources is not None
        )
    spec = pod_template(target.admitted_jobset)["spec"]
    if pod_requests(spec):
        grows = _has_autoscaler(target.cluster)
        yield nodes.judge_room(listed, spec, target.pod_count, has_autoscaler=grows)
        yield from nodes.judge_drivers(listed, spec)
    yield from nodes.judge_device_access(spec)
    yield from nodes.judge_nccl(spec)


def _has_autoscaler(cluster: Cluster) -> bool:
    """Return whether an autoscaler may add nodes, also if that may not be read."""
    if cluster.served_versions("karpenter.sh"):
        return True
    with ignore_forbidden():
        status = cluster.get(kinds.CONFIGMAPS, "cluster-autoscaler-status", "kube-system")
        return status is not None
    return True


def _check_volumes(target: Target) -> Findings:
    for name, is_read in namespace.mounted_claims(target.template["spec"]).items():
        claim = target.cluster.get(kinds.CLAIMS, name, target.namespace)
        yield namespace.judge_claim(name, claim, hosts=target.pod_count, is_read=is_read)
    try:
        needed = target.checkpoints()
    except UserError as error:
        # The trainer rejects the configuration.
        summary = "volumes: how large a checkpoint of this job is"
        yield unknown_finding(summary, "{message}", message=error.message)
        return
    if needed is not None:
        claim = target.cluster.get(kinds.CLAIMS, needed.claim, target.namespace)
        yield from namespace.judge_checkpoint_room(needed, claim)


def _check_secrets(target: Target) -> Findings:
    for secret in target.template["spec"].get("imagePullSecrets") or []:
        obj = target.cluster.get(kinds.SECRETS, secret["name"], target.namespace)
        yield namespace.judge_pull_secret(secret["name"], obj)
    yield from _check_references(target, kinds.SECRETS)


_VOLUMES_SECTION = "volumes-secrets-and-configmaps"


def _check_references(target: Target, kind: kinds.Kind) -> Findings:
    """Check the objects of a kind that pods refer to and that are not among the job's manifests."""
    for reference in namespace.find_references(target.template["spec"], kind):
        if reference.name not in target.own_names(kind):
            obj = target.cluster.get(kind, reference.name, target.namespace)
            yield namespace.judge_reference(kind.kind, reference, obj)


def _check_service_account(target: Target) -> Findings:
    if name := target.template["spec"].get("serviceAccountName"):
        if target.cluster.get(kinds.SERVICE_ACCOUNTS, name, target.namespace) is None:
            summary = "service account {name} does not exist"
            why = "the API server rejects pods that name it."
            yield user_failure(summary, why, "create it, or set another.", name=name)
        else:
            yield ok_finding("service account {name} exists", name=name)


class Check(NamedTuple):
    """A check: its function, and its section of docs/troubleshooting.md, if any."""

    judge: Callable[[Target], Findings]
    section: str | None = None


CHECKS: Mapping[str, Check] = {
    "clock": Check(_check_clock),
    "jobset": Check(_check_jobset, "rejected-requests"),
    "kueue": Check(_check_kueue, "queues"),
    "gang": Check(_check_gang, "pending-pods"),
    "webhooks": Check(_check_webhooks, "rejected-requests"),
    "dns": Check(_check_dns, "rendezvous-and-lost-hosts"),
    "namespace": Check(_check_namespace, "rejected-requests"),
    "rights": Check(_check_rights, "access-to-the-cluster"),
    "claims": Check(check_allocation),
    "network": Check(_check_network, "rendezvous-and-lost-hosts"),
    "quota": Check(_check_quotas, "rejected-requests"),
    "queue": Check(_check_queue, "queues"),
    "priority": Check(_check_priority, "rejected-requests"),
    "dry run": Check(_check_dry_run, "rejected-requests"),
    "nodes": Check(_check_nodes, "pending-pods"),
    "volumes": Check(_check_volumes, _VOLUMES_SECTION),
    "secrets": Check(_check_secrets, _VOLUMES_SECTION),
    "configmaps": Check(partial(_check_references, kind=kinds.CONFIGMAPS), _VOLUMES_SECTION),
    "service account": Check(_check_service_account, "rejected-requests"),
}


def section_link(name: str) -> str | None:
    """Return the documentation link for a failed check, or None if it has no section."""
    if name == JOB:
        return None
    section = _SERVER_SECTION if name == SERVER else CHECKS[name].section
    return None if section is None else troubleshooting.section_command(section)
