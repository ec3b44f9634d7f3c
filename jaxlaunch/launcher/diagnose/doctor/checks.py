"""Checks of a cluster and a namespace for what would keep a job from running.

A check reads objects from the API server and passes them to a pure function of a neighboring
module, which judges them. Nothing is written: objects are created only as dry runs. If the user
may not read an object, the finding is `unknown`, and the other checks continue. `launcher doctor`
runs all checks. `launcher submit` runs a part of them before it writes anything.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
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
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.kubernetes import kinds, labels
from jaxlaunch.launcher.kubernetes.client import Cluster, ignore_forbidden
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, LOCAL_QUEUES, Right, manifest_kind
from jaxlaunch.launcher.kubernetes.objects import cluster_queue_name, pod_template, trim_node
from jaxlaunch.launcher.kubernetes.resources import job_requests, pod_requests

# Names of the checks that need no target and are therefore not in CHECKS.
SERVER, JOB = "server", "job"
# Sections of docs/troubleshooting.md.
_SERVER_SECTION = "access-to-the-cluster"
_VOLUMES_SECTION = "volumes-secrets-and-configmaps"


def check_server(cluster: Cluster) -> list[Finding]:
    """Return the findings about the API server. If one is a failure, no other check can run."""

    def read_server() -> Findings:
        version = cluster.server_version()
        yield controllers.judge_server(version, cluster.server, cluster.is_ready())

    return list(_run_check(SERVER, read_server))


def list_job_faults(faults: Sequence[Fault]) -> list[Finding]:
    """Return a finding for each fault of a job.yaml that is merged with the cluster defaults."""
    return [
        dataclasses.replace(
            user_failure(
                "{where}: {what}",
                "`launcher submit` refuses the job.",
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
    """Yield the findings of all checks in CHECKS, in that order."""
    for name, check in CHECKS.items():
        yield from _run_check(name, partial(check.run, target))


def _run_check(name: str, check: Callable[[], Findings]) -> Findings:
    """Yield the findings of a check with its name. A ClusterError becomes a finding too."""
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
                summary, reason = "{name}: {message}", "it cannot be checked."
                finding = admin_failure(summary, reason, "{hint}", **fields)
            case _:
                summary, remedy = "{name}: the API server fails", "ask the cluster administrator."
                finding = admin_failure(summary, "{message}", remedy, **fields)
        yield dataclasses.replace(finding, check=name)


# --- before a submission --------------------------------------------------------------------------


def check_submission(
    cluster: Cluster, manifests: Sequence[Obj], *, replace: bool, watch: bool, force: bool = False
) -> list[str]:
    """Return notes for the user about the job on this cluster.

    A missing object stops the submission. A problem that may disappear while the job waits, such
    as a stopped queue, is only noted.

    Args:
        cluster: The cluster.
        manifests: The job's objects, the JobSet first.
        replace: Whether an earlier JobSet may be deleted.
        watch: Whether the command will wait for the job or follow its logs.
        force: Whether to submit a job even if the namespace rejects its pods.

    Raises:
        UserError: If something would keep the job from running. The message has all problems.
        ClusterError: The same, if an administrator must fix at least one of them.
    """
    if names := hosts.list_roles(manifests[0]):
        options = {"replace": replace, "watch": watch, "force": force}
        parts = [[dict(hosts.select_role(manifests[0], name)), *manifests[1:]] for name in names]
        role_notes = [check_submission(cluster, part, **options) for part in parts]
        return list(dict.fromkeys(itertools.chain(*role_notes)))
    target = Target(cluster, str(manifests[0]["metadata"]["namespace"]), manifests)
    versions = cluster.served_versions(JOBSETS.group)
    jobset_finding = controllers.judge_served(JOBSETS, "JobSet", versions)
    if jobset_finding.level == "fail":
        message = f"Cluster of context {cluster.context}: {jobset_finding.summary_text}."
        raise ClusterError(message, jobset_finding.remedy_text)
    findings = [
        *check_allocation(target),
        *_check_submission_namespace(target, force=force),
        *_check_submission_rights(target, replace=replace, watch=watch),
        *_check_submission_queue(target),
        *_check_priority(target),
    ]
    if missing_resources := target.unrequested_resources:
        is_known = target.defaulted_resources is not None
        findings.append(
            nodes.judge_missing_requests(missing_resources, are_limit_ranges_known=is_known)
        )
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
        needs_admin = any(isinstance(error, ClusterError) for error in errors)
        raise (ClusterError if needs_admin else UserError)("\n".join(map(str, errors)))
    notes = [finding for finding in findings if finding.level != "ok"]
    return [f"{finding.summary_text}: {finding.reason_text}" for finding in notes]


def _check_submission_namespace(target: Target, *, force: bool) -> Findings:
    # Few users may read namespaces.
    with ignore_forbidden():
        existence, *pod_security = _check_namespace(target)
        yield existence
        for finding in pod_security:
            if finding.level == "fail":
                remedy = finding.remedy + " --force submits it."
                yield _to_warning(finding) if force else dataclasses.replace(finding, remedy=remedy)


def _check_submission_rights(target: Target, *, replace: bool, watch: bool) -> Findings:
    rights = submit_rights(target.manifests, replace=replace, watch=watch)
    permissions = _ask_permissions(target, rights)
    if missing_rights := [
        str(right) for right, is_granted in permissions.items() if not is_granted
    ]:
        yield admin_failure(
            "missing RBAC permissions in namespace {namespace}",
            "{missing}.",
            f"{namespace.ASK_FOR_ROLE}; `launcher doctor` lists the permissions of all commands.",
            namespace=target.namespace,
            missing=missing_rights,
        )


def _check_submission_queue(target: Target) -> Findings:
    if target.queue is None:
        return
    # A job in a queue that does not exist would wait forever.
    versions = target.cluster.served_versions(LOCAL_QUEUES.group)
    kueue_finding = controllers.judge_kueue(versions, target.queue)
    yield kueue_finding
    if kueue_finding.level != "fail":
        finding, queue = _judge_local_queue(target, target.queue)
        # A stopped queue may be resumed while the job waits.
        is_stopped = finding.level == "fail" and queue is not None
        yield _to_warning(finding) if is_stopped else finding


def _to_warning(finding: Finding) -> Finding:
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
    location, config_map_name = controllers.JOBSET_DEPLOYMENT, controllers.JOBSET_CONFIG
    yield from _judge_controller(target, "JobSet", location, config_map_name)[0]


def _check_kueue(target: Target) -> Findings:
    versions = target.cluster.served_versions(LOCAL_QUEUES.group)
    yield controllers.judge_kueue(versions, target.queue)
    if versions:
        location, config_map_name = controllers.KUEUE_DEPLOYMENT, controllers.KUEUE_CONFIG
        findings, config_files = _judge_controller(target, "Kueue", location, config_map_name)
        yield from findings
        for text in config_files:
            yield from controllers.judge_kueue_config(text, target.queue)


def _check_gang(target: Target) -> Findings:
    """Check that the pods of a job are admitted together. A single pod needs nothing."""
    if target.pod_count < 2:
        return
    served_versions = target.cluster.served_versions
    services = controllers.GangServices(
        kueue=served_versions(LOCAL_QUEUES.group),
        native=served_versions(kinds.POD_GROUPS.group),
        volcano=served_versions(kinds.VOLCANO_GROUPS.group),
        coscheduling=served_versions(kinds.COSCHEDULING_GROUPS.group),
    )
    crd = None
    if controllers.find_gang_field(target.template) is not None:
        crd = target.find_object(kinds.CRDS, JOBSETS.resource)
    yield from controllers.judge_gang(
        services, target.queue, target.template, crd, target.pod_count
    )


def _judge_controller(
    target: Target, project: str, location: tuple[str, str], config_map_name: str
) -> tuple[list[Finding], list[str]]:
    """Return the findings about a controller, and the files of its ConfigMap.

    Args:
        target: Target of the checks.
        project: Name of the project.
        location: Namespace and name of the controller's Deployment.
        config_map_name: Name of its ConfigMap.
    """
    controller_namespace, deployment_name = location
    config_map = target.find_object(kinds.CONFIGMAPS, config_map_name, controller_namespace) or {}
    config_files = list(config_map.get("data", {}).values())
    deployment = target.find_object(kinds.DEPLOYMENTS, deployment_name, controller_namespace)
    features = controllers.describe_features(project, deployment, config_files)
    return [controllers.judge_controller(project, deployment, location), *features], config_files


def _check_webhooks(target: Target) -> Findings:
    configurations = [
        *target.cluster.list(kinds.MUTATING_WEBHOOKS),
        *target.cluster.list(kinds.VALIDATING_WEBHOOKS),
    ]
    webhooks = controllers.blocking_webhooks(
        configurations, target.namespace_labels, controllers.created_labels(target.manifests)
    )
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
    job_kinds = (manifest_kind(manifest) for manifest in target.manifests)
    rights_by_command = namespace.command_rights(
        (*namespace.USUAL_KINDS, *job_kinds), has_queue=target.queue is not None
    )
    permissions = _ask_permissions(target, itertools.chain(*rights_by_command.values()))
    yield from namespace.judge_rights(permissions, rights_by_command)


def _ask_permissions(target: Target, rights: Iterable[Right]) -> dict[Right, bool]:
    """Return whether the user has each permission, according to the API server."""
    is_allowed = partial(target.cluster.is_allowed, namespace=target.namespace)
    return {
        right: is_allowed(right.verb, right.kind, subresource=right.subresource)
        for right in dict.fromkeys(rights)
    }


def check_allocation(target: Target) -> Findings:
    """Check that the cluster serves the kinds with which the job claims devices."""
    for kind in dict.fromkeys(manifest_kind(manifest) for manifest in target.manifests[1:]):
        if (project := kinds.OPTIONAL_PROJECTS.get(kind)) is not None:
            yield controllers.judge_served(
                kind, project, target.cluster.served_versions(kind.group)
            )


def _check_network(target: Target) -> Findings:
    # A single host connects to no other, and policies do not apply in the network of the node.
    if target.pod_count < 2 or target.template["spec"].get("hostNetwork"):
        return
    kind = kinds.NETWORK_POLICIES
    own_policies = [manifest for manifest in target.manifests if manifest["kind"] == kind.kind]
    try:
        policies = target.cluster.list(kind, target.namespace)
    except ApiError as error:
        if error.status != 403:
            raise
        summary = "whether NetworkPolicies let the hosts connect to each other"
        reason = "you have no permission to {right}: {message}"
        fields = {"right": str(Right("list", kind)), "message": error.message}
        yield unknown_finding(summary, reason, **fields)
        return
    if own_policies:
        # A policy with the job's name is its own, from an earlier submission.
        policies = [policy for policy in policies if policy["metadata"]["name"] != target.name]
    pod_labels = (target.template.get("metadata") or {}).get("labels", {})
    yield from namespace.judge_network(
        [*policies, *own_policies],
        {**pod_labels, labels.NAME_LABEL: target.name},
        target.namespace_labels,
        has_own_policy=bool(own_policies),
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
        reason = "you have no permission to read ClusterQueues."
        yield unknown_finding("the quota of ClusterQueue {name} is not known", reason, name=name)
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
    """Check the WorkloadPriorityClass of the job and the PriorityClass of its pods."""
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
            reason = "you have no permission to read it."
            yield unknown_finding(summary, reason, kind=kind.kind, name=name)
            continue
        class_names = [] if priority_class else target.list_names(kind)
        yield namespace.judge_priority(kind, name, priority_class, class_names)


# --- the job --------------------------------------------------------------------------------------


def _check_dry_run(target: Target) -> Findings:
    """Send the JobSet and one of its pods as dry runs.

    The server admits pods after it has accepted their JobSet, so the pod is sent separately.
    """
    jobset_metadata = {**target.jobset["metadata"], "namespace": target.namespace}
    jobset = {**target.jobset, "metadata": jobset_metadata}
    # The pod is sent without the labels by which JobSet's webhook recognizes pods and checks them.
    template_metadata = target.template.get("metadata") or {}
    pod_labels = dict(template_metadata.get("labels") or {})
    for label in (labels.NAME_LABEL, labels.JOB_LABEL):
        pod_labels.pop(label, None)
    pod_metadata = {
        **template_metadata,
        "namespace": target.namespace,
        "name": f"{target.name}-dry-run",
        "labels": pod_labels,
    }
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": pod_metadata,
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
    cluster_nodes = target.cluster.list(kinds.NODES, trim=trim_node)
    yield nodes.count_accelerators(cluster_nodes)
    if missing_resources := target.unrequested_resources:
        yield nodes.judge_missing_requests(
            missing_resources, are_limit_ranges_known=target.defaulted_resources is not None
        )
    spec = pod_template(target.admitted_jobset)["spec"]
    if pod_requests(spec):
        has_autoscaler = _has_autoscaler(target.cluster)
        yield nodes.judge_room(cluster_nodes, spec, target.pod_count, has_autoscaler=has_autoscaler)
        yield from nodes.judge_drivers(cluster_nodes, spec)
    yield from nodes.judge_device_access(spec)
    yield from nodes.judge_nccl(spec)


def _has_autoscaler(cluster: Cluster) -> bool:
    """Return whether an autoscaler may add nodes. True if the user may not read its status."""
    if cluster.served_versions("karpenter.sh"):
        return True
    with ignore_forbidden():
        status = cluster.get(kinds.CONFIGMAPS, "cluster-autoscaler-status", "kube-system")
        return status is not None
    return True


def _check_volumes(target: Target) -> Findings:
    for name, is_read_only in namespace.mounted_claims(target.template["spec"]).items():
        claim = target.cluster.get(kinds.CLAIMS, name, target.namespace)
        yield namespace.judge_claim(name, claim, hosts=target.pod_count, is_read_only=is_read_only)
    try:
        checkpoints = target.checkpoints()
    except UserError as error:
        # The trainer rejects the configuration.
        summary = "volumes: how large a checkpoint of this job is"
        yield unknown_finding(summary, "{message}", message=error.message)
        return
    if checkpoints is not None:
        claim = target.cluster.get(kinds.CLAIMS, checkpoints.claim, target.namespace)
        yield from namespace.judge_checkpoint_room(checkpoints, claim)


def _check_secrets(target: Target) -> Findings:
    for secret in target.template["spec"].get("imagePullSecrets") or []:
        obj = target.cluster.get(kinds.SECRETS, secret["name"], target.namespace)
        yield namespace.judge_pull_secret(secret["name"], obj)
    yield from _check_references(target, kinds.SECRETS)


def _check_references(target: Target, kind: kinds.Kind) -> Findings:
    """Check the objects of a kind that pods use and that are not among the job's manifests."""
    for reference in namespace.find_references(target.template["spec"], kind):
        if reference.name not in target.manifest_names(kind):
            obj = target.cluster.get(kind, reference.name, target.namespace)
            yield namespace.judge_reference(kind.kind, reference, obj)


def _check_service_account(target: Target) -> Findings:
    if name := target.template["spec"].get("serviceAccountName"):
        if target.cluster.get(kinds.SERVICE_ACCOUNTS, name, target.namespace) is None:
            summary = "service account {name} does not exist"
            reason = "the API server rejects pods that name it."
            yield user_failure(summary, reason, "create it, or set another.", name=name)
        else:
            yield ok_finding("service account {name} exists", name=name)


class Check(NamedTuple):
    """A check: its function, and its section of docs/troubleshooting.md, if any."""

    run: Callable[[Target], Findings]
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
