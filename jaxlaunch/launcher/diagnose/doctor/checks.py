"""The named checks of a cluster, a namespace and what a job needs of them. Reads; creates only with dryRun=All.

Each check reads objects and passes them to a pure function that judges them. One that is not permitted to read yields
`unknown`, and never stops the others.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from jaxlaunch.launcher import troubleshooting
from jaxlaunch.launcher.diagnose.doctor import (
    controllers,
    namespace,
    nodes,
    precheck,
    references,
)
from jaxlaunch.launcher.diagnose.doctor.finding import Finding, Findings, fail_admin, unknown
from jaxlaunch.launcher.diagnose.doctor.target import Obj, Target
from jaxlaunch.launcher.diagnose.text import Text
from jaxlaunch.launcher.errors import ApiError, ClusterError, UserError
from jaxlaunch.launcher.kubernetes import kinds, objects
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import Kind, Right
from jaxlaunch.launcher.kubernetes.labels import NAME_LABEL, OWN_LABEL
from jaxlaunch.launcher.kubernetes.objects import cluster_queue_name, pod_template
from jaxlaunch.launcher.kubernetes.resources import job_requests, pod_requests

# The check that comes before all others.
SERVER = "server"
_SERVER_SECTION = "access-to-the-cluster"


def check_server(cluster: Cluster) -> list[Finding]:
    """The API server itself. If it fails, nothing else can be checked."""
    return list(_guarded(SERVER, lambda: _server(cluster)))


def check_job(target: Target) -> Iterator[Finding]:
    """The findings of every other check, in order."""
    for name, check in CHECKS.items():
        yield from _guarded(name, partial(check.judge, target))


def _guarded(name: str, check: Callable[[], Findings]) -> Findings:
    """The findings of a check under its name; an error of the cluster is one of them."""
    try:
        yield from (dataclasses.replace(finding, check=name) for finding in check())
    except ClusterError as error:
        yield dataclasses.replace(_cluster_failed(name, error), check=name)


def _cluster_failed(name: str, error: ClusterError) -> Finding:
    fields = {"name": name, "message": error.message}
    match error.status if isinstance(error, ApiError) else None:
        case 401:
            return fail_admin("the API server does not accept your credentials", "{message}", "log in again.", **fields)
        case 403:
            return unknown("{name}: you have no permission to read this", "{message}", **fields)
        case None:
            hint = error.hint or Text("try again.")
            return fail_admin("{name}: {message}", "it cannot be checked.", "{hint}", **fields, hint=hint)
    return fail_admin("{name}: the API server fails", "{message}", "ask the cluster administrator.", **fields)


# --- the cluster ------------------------------------------------------------------------------------------------------


def _server(cluster: Cluster) -> Findings:
    version = cluster.server_version()
    yield controllers.ready(version, cluster.server, cluster.ready())


def _clock(target: Target) -> Findings:
    before = datetime.datetime.now(datetime.UTC)
    there = target.cluster.server_time()
    yield controllers.clock(before, there, datetime.datetime.now(datetime.UTC))


def _jobset(target: Target) -> Findings:
    yield controllers.served(kinds.JOBSETS, "JobSet", target.cluster.served(kinds.JOBSETS.group))
    yield from controllers.crd(target.find(kinds.CRDS, kinds.JOBSETS.resource))
    deployment = _deployment(target, controllers.JOBSET)
    yield controllers.controller("JobSet", deployment, controllers.JOBSET)
    yield from controllers.features(
        "JobSet", deployment, _configs(target, controllers.JOBSET, controllers.JOBSET_CONFIG)
    )


def _kueue(target: Target) -> Findings:
    versions = target.cluster.served(kinds.LOCAL_QUEUES.group)
    yield controllers.kueue(versions, target.queue)
    if versions:
        deployment = _deployment(target, controllers.KUEUE)
        configs = _configs(target, controllers.KUEUE, controllers.KUEUE_CONFIG)
        yield controllers.controller("Kueue", deployment, controllers.KUEUE)
        yield from controllers.features("Kueue", deployment, configs)
        for text in configs:
            yield from controllers.kueue_config(text, target.queue)


def _deployment(target: Target, place: tuple[str, str]) -> Obj | None:
    namespace, name = place
    return target.find(kinds.DEPLOYMENTS, name, namespace)


def _configs(target: Target, place: tuple[str, str], name: str) -> Sequence[str]:
    """The files of a controller's ConfigMap."""
    return list((target.find(kinds.CONFIGMAPS, name, place[0]) or {}).get("data", {}).values())


def _webhooks(target: Target) -> Findings:
    listed = [*target.cluster.list(kinds.MUTATING_WEBHOOKS), *target.cluster.list(kinds.VALIDATING_WEBHOOKS)]
    found = controllers.hooks(listed, target.labels)
    services = {hook.service for hook in found if hook.service is not None}
    yield from controllers.endpoints(found, {service: _ready(target, *service) for service in services})


def _ready(target: Target, where: str, service: str) -> int:
    labels = f"kubernetes.io/service-name={service}"
    return controllers.ready_endpoints(target.cluster.list(kinds.ENDPOINT_SLICES, where, labels=labels))


def _dns(target: Target) -> Findings:
    services = target.cluster.list(kinds.SERVICES, "kube-system", labels="k8s-app=kube-dns")
    ready = _ready(target, "kube-system", services[0]["metadata"]["name"]) if services else 0
    yield from nodes.dns(services, ready)


# --- the namespace ----------------------------------------------------------------------------------------------------


def _namespace(target: Target) -> Findings:
    found = target.cluster.get(kinds.NAMESPACES, target.namespace)
    yield namespace.exists(target.namespace, found)
    if found is not None:
        yield namespace.pod_security(target.namespace, target.labels or {}, target.template)


def _rights(target: Target) -> Findings:
    tables = [namespace.COMMANDS, *([namespace.WITH_A_QUEUE] if target.queue else [])]
    if _own(target, kinds.SECRETS):
        tables.append(namespace.WITH_A_GANG_SECRET)
    if _own(target, kinds.RESOURCE_CLAIM_TEMPLATES):
        tables.append(namespace.WITH_CLAIMS)
    if _own(target, kinds.COMPUTE_DOMAINS):
        tables.append(namespace.WITH_A_COMPUTE_DOMAIN)
    needed = dict.fromkeys(right for table in tables for rights in table.values() for right in rights)
    has = {each: target.cluster.may(*each[:2], target.namespace, subresource=each.subresource) for each in needed}
    yield from namespace.rights(has, tables)


def _network(target: Target) -> Findings:
    """Policies apply neither to one host alone nor to the host's network."""
    if target.pods < 2 or target.template["spec"].get("hostNetwork"):
        return
    own = [one for one in target.others if one["kind"] == kinds.NETWORK_POLICIES.kind]
    name = target.jobset["metadata"]["name"]
    try:
        listed = target.cluster.list(kinds.NETWORK_POLICIES, target.namespace)
    except ApiError as error:
        if error.status != 403:
            raise
        what = "whether NetworkPolicies let the hosts connect to each other"
        right = str(Right("list", kinds.NETWORK_POLICIES))
        yield unknown(what, "you have no permission to {right}: {message}", right=right, message=error.message)
        return
    others = [one for one in listed if one["metadata"]["name"] != name or not own]
    pod_labels = {**(target.template.get("metadata") or {}).get("labels", {}), NAME_LABEL: name}
    yield from namespace.network([*others, *own], pod_labels, target.labels, has_own=bool(own))


def _quota(target: Target) -> Findings:
    found = target.cluster.list(kinds.RESOURCE_QUOTAS, target.namespace)
    yield from namespace.quotas(found, target.admitted)


def _queue(target: Target) -> Findings:
    if target.queue is None:
        return
    found = target.cluster.get(kinds.LOCAL_QUEUES, target.queue, target.namespace)
    others = [] if found else target.names(kinds.LOCAL_QUEUES, target.namespace)
    yield namespace.local_queue(target.queue, target.namespace, found, others)
    if found is None:
        return
    name = cluster_queue_name(found) or ""
    try:
        cluster_queue = target.cluster.get(kinds.CLUSTER_QUEUES, name)
    except ApiError as error:
        if error.status != 403:
            raise
        yield namespace.quota_not_visible(name)
        return
    yield from namespace.cluster_queue(name, cluster_queue, target.labels, job_requests(target.admitted), target.pods)


def _priority(target: Target) -> Findings:
    for kind, name in target.priority_classes:
        found = target.cluster.get(kind, name)
        yield namespace.priority(kind.kind, name, found, [] if found else target.names(kind))


# --- the job ----------------------------------------------------------------------------------------------------------


def _dry_run(target: Target) -> Findings:
    """The JobSet, and one of its pods: the API server admits pods only after it has accepted the JobSet."""
    metadata = {**target.jobset["metadata"], "namespace": target.namespace}
    yield _sent_dry(target, kinds.JOBSETS, {**target.jobset, "metadata": metadata}, "the JobSet")
    yield _sent_dry(target, kinds.PODS, _pod(target), "a pod of the job")


def _sent_dry(target: Target, kind: Kind, manifest: Obj, what: str) -> Finding:
    try:
        target.cluster.create(kind, manifest, dry_run=True)
    except ApiError as error:
        return controllers.dry_run(error, what)
    return controllers.dry_run(None, what)


def _pod(target: Target) -> Obj:
    """A pod of the job as its Job would create it; without the labels by which JobSet's webhook would check it."""
    metadata = target.template.get("metadata") or {}
    own = {"name": f"{target.jobset['metadata']['name']}-dry-run", "namespace": target.namespace}
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if key not in (NAME_LABEL, OWN_LABEL)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, **own, "labels": labels},
        "spec": target.template["spec"],
    }


def _nodes(target: Target) -> Findings:
    listed = target.cluster.list(kinds.NODES, keep=objects.trim_node)
    yield nodes.accelerators(listed)
    if missing := target.unrequested:
        yield nodes.unrequested(missing, is_known=target.defaulted is not None)
    spec = pod_template(target.admitted)["spec"]
    if pod_requests(spec):
        yield nodes.place(listed, spec, target.pods, grows=_grows(target))
        yield from nodes.drivers(listed, spec)
    yield from nodes.access(spec)
    yield from nodes.nccl(spec)


def _grows(target: Target) -> bool:
    """Whether an autoscaler adds nodes; True where that may not be read."""
    if target.cluster.served("karpenter.sh"):
        return True
    try:
        return target.cluster.get(kinds.CONFIGMAPS, "cluster-autoscaler-status", "kube-system") is not None
    except ApiError as error:
        if error.status != 403:
            raise
        return True


def _volumes(target: Target) -> Findings:
    for name, is_read in references.claims(target.template["spec"]).items():
        found = target.cluster.get(kinds.CLAIMS, name, target.namespace)
        yield references.claim(name, found, hosts=target.pods, is_read=is_read)
    try:
        needed = target.checkpoints()
    except UserError as error:  # the trainer's own
        yield unknown("volumes: how large a checkpoint of this job is", "{message}", message=error.message)
        return
    if needed is not None:
        yield from references.room(needed, target.cluster.get(kinds.CLAIMS, needed.claim, target.namespace))


def _secrets(target: Target) -> Findings:
    for name in references.pull_secrets(target.template["spec"]):
        yield references.pull_secret(name, target.cluster.get(kinds.SECRETS, name, target.namespace))
    for wanted in references.secrets(target.template["spec"]):
        if wanted.name not in _own(target, kinds.SECRETS):
            found = target.cluster.get(kinds.SECRETS, wanted.name, target.namespace)
            yield references.keys("Secret", wanted, found)


def _own(target: Target, kind: kinds.Kind) -> set[str]:
    """The objects of a kind that the job brings."""
    return {other["metadata"]["name"] for other in target.others if other["kind"] == kind.kind}


def _config_maps(target: Target) -> Findings:
    for wanted in references.config_maps(target.template["spec"]):
        if wanted.name not in _own(target, kinds.CONFIGMAPS):
            found = target.cluster.get(kinds.CONFIGMAPS, wanted.name, target.namespace)
            yield references.keys("ConfigMap", wanted, found)


def _service_account(target: Target) -> Findings:
    if name := target.template["spec"].get("serviceAccountName"):
        yield references.service_account(name, target.cluster.get(kinds.SERVICE_ACCOUNTS, name, target.namespace))


class Check(NamedTuple):
    """A check: what judges, and the section of docs/troubleshooting.md about it, if any."""

    judge: Callable[[Target], Findings]
    section: str | None = None


CHECKS: Mapping[str, Check] = {
    "clock": Check(_clock),
    "jobset": Check(_jobset, "rejected-requests"),
    "kueue": Check(_kueue, "queues"),
    "webhooks": Check(_webhooks, "rejected-requests"),
    "dns": Check(_dns, "rendezvous-and-lost-hosts"),
    "namespace": Check(_namespace, "rejected-requests"),
    "rights": Check(_rights, "access-to-the-cluster"),
    "claims": Check(precheck.allocation),
    "network": Check(_network, "rendezvous-and-lost-hosts"),
    "quota": Check(_quota, "rejected-requests"),
    "queue": Check(_queue, "queues"),
    "priority": Check(_priority, "rejected-requests"),
    "dry run": Check(_dry_run, "rejected-requests"),
    "nodes": Check(_nodes, "pending-pods"),
    "volumes": Check(_volumes, "volumes-secrets-and-configmaps"),
    "secrets": Check(_secrets, "volumes-secrets-and-configmaps"),
    "configmaps": Check(_config_maps, "volumes-secrets-and-configmaps"),
    "service account": Check(_service_account, "rejected-requests"),
}


def see(name: str) -> str | None:
    """Return the link for a check that fails, or None where the page has nothing on it."""
    section = _SERVER_SECTION if name == SERVER else CHECKS[name].section
    return None if section is None else troubleshooting.section(section)
