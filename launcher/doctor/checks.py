"""Named checks of a cluster, a namespace and what a job needs of them. Reads; what it creates, it only rehearses.

Each check asks and hands what it was told to a pure judgement in launcher.symptoms. One that may not look says so, and
never stops the others.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from launcher import fit, kinds, placement, slim
from launcher.cluster import ApiError, Cluster
from launcher.demand import pods, together
from launcher.errors import ClusterError
from launcher.finding import Finding, Findings, clusters, unknown
from launcher.jobset import NAME_LABEL, OWN_LABEL
from launcher.kinds import Kind
from launcher.objects import template
from launcher.symptoms import controllers, namespace, nodes, queues, references, server

Obj = dict[str, Any]
SERVER = "server"  # the check that comes before all others


class Patient:
    """A namespace of a cluster, and the manifests of the job that is to run there."""

    def __init__(self, cluster: Cluster, namespace: str, manifests: Sequence[Obj]) -> None:
        self.cluster, self.namespace = cluster, namespace
        self.jobset, self.others = manifests[0], manifests[1:]
        self.template = template(self.jobset)
        self.pods = pods(self.jobset)
        self.queue: str | None = self.jobset["metadata"]["labels"].get(placement.QUEUE)

    @cached_property
    def labels(self) -> Mapping[str, str] | None:
        """The namespace's; None where it cannot be seen."""
        found = self.seen(kinds.NAMESPACES, self.namespace)
        return None if found is None else found["metadata"].get("labels") or {}

    def seen(self, kind: Kind, name: str, where: str | None = None) -> Obj | None:
        """An object, None where there is none or the user may not look."""
        try:
            return self.cluster.get(kind, name, where)
        except ApiError as error:
            if error.status != 403:
                raise
            return None

    def names(self, kind: Kind, where: str | None = None) -> list[str]:
        """The names of a kind, none where the user may not look."""
        try:
            return [one["metadata"]["name"] for one in self.cluster.list(kind, where)]
        except ApiError as error:
            if error.status != 403:
                raise
            return []


def reach(cluster: Cluster) -> list[Finding]:
    """The server itself. Where it fails nothing else can be asked."""
    return list(_guarded(SERVER, lambda: _server(cluster)))


def examine(patient: Patient) -> Iterator[Finding]:
    """The findings of every other check, in order."""
    for name, check in CHECKS.items():
        yield from _guarded(name, partial(check, patient))


def _guarded(name: str, check: Callable[[], Findings]) -> Findings:
    """The findings of a check under its name; what kept it from looking is one of them."""
    try:
        yield from (dataclasses.replace(finding, check=name) for finding in check())
    except ClusterError as error:
        yield dataclasses.replace(_kept_off(name, error), check=name)


def _kept_off(name: str, error: ClusterError) -> Finding:
    match getattr(error, "status", None):
        case 401:
            return clusters("the server does not know who you are", error.message, "log in again.")
        case 403:
            return unknown(f"{name}: you may not look", error.message)
        case None:
            return clusters(f"{name}: {error.message}", "nothing can be asked of it.", error.hint or "try again.")
    return clusters(f"{name}: the server fails at it", error.message, "ask the cluster's owner.")


# --- the cluster ------------------------------------------------------------------------------------------------------


def _server(cluster: Cluster) -> Findings:
    version = cluster.server_version()
    yield server.ready(version, cluster.server, cluster.ready())


def _clock(patient: Patient) -> Findings:
    before = datetime.datetime.now(datetime.UTC)
    there = patient.cluster.server_time()
    yield server.clock(before, there, datetime.datetime.now(datetime.UTC))


def _jobset(patient: Patient) -> Findings:
    yield controllers.served(kinds.JOBSETS, "JobSet", patient.cluster.served(kinds.JOBSETS.group))
    yield from controllers.crd(patient.seen(kinds.CRDS, kinds.JOBSETS.resource))
    yield _controller(patient, "JobSet", controllers.JOBSET)


def _kueue(patient: Patient) -> Findings:
    versions = patient.cluster.served(kinds.LOCAL_QUEUES.group)
    yield controllers.kueue(versions, patient.queue)
    if versions:
        yield _controller(patient, "Kueue", controllers.KUEUE)
        config = patient.seen(kinds.CONFIGMAPS, controllers.KUEUE_CONFIG, controllers.KUEUE[0])
        for text in (config or {}).get("data", {}).values():
            yield from controllers.kueue_config(text, patient.queue)


def _controller(patient: Patient, project: str, place: tuple[str, str]) -> Finding:
    return controllers.controller(project, patient.seen(kinds.DEPLOYMENTS, place[1], place[0]), place)


def _webhooks(patient: Patient) -> Findings:
    listed = [*patient.cluster.list(kinds.MUTATING_WEBHOOKS), *patient.cluster.list(kinds.VALIDATING_WEBHOOKS)]
    found = controllers.hooks(listed, patient.labels)
    services = {hook.service for hook in found if hook.service is not None}
    yield from controllers.endpoints(found, {service: _ready(patient, *service) for service in services})


def _ready(patient: Patient, where: str, service: str) -> int:
    labels = f"kubernetes.io/service-name={service}"
    return controllers.ready_endpoints(patient.cluster.list(kinds.ENDPOINT_SLICES, where, labels=labels))


def _dns(patient: Patient) -> Findings:
    services = patient.cluster.list(kinds.SERVICES, "kube-system", labels="k8s-app=kube-dns")
    ready = _ready(patient, "kube-system", services[0]["metadata"]["name"]) if services else 0
    yield from nodes.dns(services, ready)


# --- the namespace ----------------------------------------------------------------------------------------------------


def _namespace(patient: Patient) -> Findings:
    found = patient.cluster.get(kinds.NAMESPACES, patient.namespace)
    yield namespace.exists(patient.namespace, found)
    if found is not None:
        yield namespace.pod_security(patient.namespace, patient.labels or {}, patient.template)


def _rights(patient: Patient) -> Findings:
    tables = [namespace.COMMANDS, *([namespace.WITH_A_QUEUE] if patient.queue else [])]
    asked = dict.fromkeys(right for table in tables for needed in table.values() for right in needed)
    has = {each: patient.cluster.may(*each[:2], patient.namespace, subresource=each.subresource) for each in asked}
    yield from namespace.rights(has, in_queue=patient.queue is not None)


def _quota(patient: Patient) -> Findings:
    found = patient.cluster.list(kinds.RESOURCE_QUOTAS, patient.namespace)
    yield from namespace.quotas(found, patient.jobset)


def _queue(patient: Patient) -> Findings:
    if patient.queue is None:
        return
    found = patient.cluster.get(kinds.LOCAL_QUEUES, patient.queue, patient.namespace)
    others = [] if found else patient.names(kinds.LOCAL_QUEUES, patient.namespace)
    yield queues.local(patient.queue, patient.namespace, found, others)
    if found is None:
        return
    whole = queues.cluster_queue(found)
    try:
        behind = patient.cluster.get(kinds.CLUSTER_QUEUES, whole)
    except ApiError as error:
        if error.status != 403:
            raise
        yield queues.unseen(whole)
        return
    yield from queues.whole(whole, behind, patient.labels, together(patient.jobset), patient.pods)


def _priority(patient: Patient) -> Findings:
    queued, plain = patient.jobset["metadata"]["labels"].get(placement.PRIORITY), patient.template["spec"]
    for kind, name in (
        (kinds.WORKLOAD_PRIORITY_CLASSES, queued),
        (kinds.PRIORITY_CLASSES, plain.get("priorityClassName")),
    ):
        if name is not None:
            found = patient.cluster.get(kind, name)
            yield queues.priority(kind.kind, name, found, [] if found else patient.names(kind))


# --- the job ----------------------------------------------------------------------------------------------------------


def _rehearsal(patient: Patient) -> Findings:
    """The JobSet as the server would take it, and one of its pods, which nobody asks when the JobSet is made."""
    metadata = {**patient.jobset["metadata"], "namespace": patient.namespace}
    yield _rehearsed(patient, kinds.JOBSETS, {**patient.jobset, "metadata": metadata}, "the JobSet")
    yield _rehearsed(patient, kinds.PODS, _pod(patient), "a pod of the job")


def _rehearsed(patient: Patient, kind: Kind, manifest: Obj, what: str) -> Finding:
    try:
        patient.cluster.create(kind, manifest, dry_run=True)
    except ApiError as error:
        return controllers.rehearsal(error, what)
    return controllers.rehearsal(None, what)


def _pod(patient: Patient) -> Obj:
    """A pod of the job as its Job would make it; without JobSet's labels, which its webhook would hold it to."""
    metadata = patient.template.get("metadata") or {}
    own = {"name": f"{patient.jobset['metadata']['name']}-rehearsal", "namespace": patient.namespace}
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if key not in (NAME_LABEL, OWN_LABEL)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**metadata, **own, "labels": labels},
        "spec": patient.template["spec"],
    }


def _nodes(patient: Patient) -> Findings:
    listed = patient.cluster.list(kinds.NODES, keep=slim.node)
    yield nodes.accelerators(listed)
    if fit.requests(patient.template["spec"]):
        yield nodes.place(listed, patient.template["spec"], patient.pods, grows=_grows(patient))


def _grows(patient: Patient) -> bool:
    """Whether something makes nodes on demand; where that cannot be seen, it may."""
    if patient.cluster.served("karpenter.sh"):
        return True
    try:
        return patient.cluster.get(kinds.CONFIGMAPS, "cluster-autoscaler-status", "kube-system") is not None
    except ApiError as error:
        if error.status != 403:
            raise
        return True


def _volumes(patient: Patient) -> Findings:
    for name, is_read in references.claims(patient.template["spec"]).items():
        found = patient.cluster.get(kinds.CLAIMS, name, patient.namespace)
        yield references.claim(name, found, hosts=patient.pods, is_read=is_read)


def _secrets(patient: Patient) -> Findings:
    for name in references.pull_secrets(patient.template["spec"]):
        yield references.pull_secret(name, patient.cluster.get(kinds.SECRETS, name, patient.namespace))
    for wanted in references.secrets(patient.template["spec"]):
        found = patient.cluster.get(kinds.SECRETS, wanted.name, patient.namespace)
        yield references.keys("Secret", wanted, found)


def _config_maps(patient: Patient) -> Findings:
    brought = {other["metadata"]["name"] for other in patient.others if other["kind"] == "ConfigMap"}
    for wanted in references.config_maps(patient.template["spec"]):
        if wanted.name not in brought:
            found = patient.cluster.get(kinds.CONFIGMAPS, wanted.name, patient.namespace)
            yield references.keys("ConfigMap", wanted, found)


def _service_account(patient: Patient) -> Findings:
    if name := patient.template["spec"].get("serviceAccountName"):
        yield references.service_account(name, patient.cluster.get(kinds.SERVICE_ACCOUNTS, name, patient.namespace))


CHECKS: Mapping[str, Callable[[Patient], Findings]] = {
    "clock": _clock,
    "jobset": _jobset,
    "kueue": _kueue,
    "webhooks": _webhooks,
    "dns": _dns,
    "namespace": _namespace,
    "rights": _rights,
    "quota": _quota,
    "queue": _queue,
    "priority": _priority,
    "dry run": _rehearsal,
    "nodes": _nodes,
    "volumes": _volumes,
    "secrets": _secrets,
    "configmaps": _config_maps,
    "service account": _service_account,
}
