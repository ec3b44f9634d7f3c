"""The checks that `launcher submit` makes before it writes anything: what would keep the job from running.

It judges with the functions of `launcher doctor`, and reads less. A missing object stops the submission; what may
change while the job waits, such as a stopped queue, is only noted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxlaunch.launcher.diagnose.doctor import controllers, namespace, nodes
from jaxlaunch.launcher.diagnose.doctor.finding import Finding, Findings, fail_admin, unknown
from jaxlaunch.launcher.diagnose.doctor.target import Obj, Target
from jaxlaunch.launcher.errors import ApiError, ClusterError, UserError
from jaxlaunch.launcher.kubernetes import kinds
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, KINDS, LOCAL_QUEUES, NAMESPACES, PODS, Right


def check(cluster: Cluster, manifests: Sequence[Obj], *, replace: bool, watch: bool, force: bool = False) -> list[str]:
    """Return notes for the user about the job on this cluster.

    Args:
        cluster: The cluster.
        manifests: The job's objects, the JobSet first.
        replace: Whether an earlier JobSet may be deleted.
        watch: Whether the job is waited for, or its logs are followed.
        force: Whether a job is submitted whose pods the namespace rejects.

    Raises:
        UserError: With all that would keep the job from running.
        ClusterError: The same, where an administrator must fix some of it.
    """
    target = Target(cluster, str(manifests[0]["metadata"]["namespace"]), manifests)
    jobset = controllers.served(JOBSETS, "JobSet", cluster.served(JOBSETS.group))
    if jobset.level == "fail":
        raise ClusterError(f"Cluster of context {cluster.context}: {jobset.what}.", jobset.fix)
    findings = [
        *allocation(target),
        *_namespace(target, force),
        *_rights(target, rights(manifests, replace=replace, watch=watch)),
        *_queue(target),
        *_priority(target),
    ]
    if missing := target.unrequested:
        findings.append(nodes.unrequested(missing, is_known=target.defaulted is not None))
    if failing := [finding for finding in findings if finding.level == "fail"]:
        raise _error(failing)
    return [f"{finding.what}: {finding.why}" for finding in findings if finding.level != "ok"]


def allocation(target: Target) -> Findings:
    """Whether the cluster serves what the job claims devices by."""
    for kind in dict.fromkeys(KINDS[one["kind"]] for one in target.others):
        if kind in kinds.ALLOCATED:
            yield controllers.served(kind, kinds.ALLOCATED[kind], target.cluster.served(kind.group))


def rights(manifests: Sequence[Obj], *, replace: bool, watch: bool) -> list[Right]:
    """The permissions that submitting needs."""
    needed = [Right("create", JOBSETS), Right("get", JOBSETS)]
    for manifest in manifests[1:]:
        kind = KINDS[manifest["kind"]]
        needed.append(Right("create", kind))
        if kind is not kinds.SECRETS:  # which is never read
            needed.append(Right("get", kind))
        if kind is kinds.CONFIGMAPS:
            needed.append(Right("patch", kind))
    if replace:
        needed.append(Right("delete", JOBSETS))
    if watch:
        needed += [Right(verb, kind) for kind in (JOBSETS, PODS) for verb in ("list", "watch")]
        needed.append(Right("get", PODS, "log"))
    return needed


def _namespace(target: Target, force: bool) -> Findings:
    try:
        found = target.cluster.get(NAMESPACES, target.namespace)
    except ApiError as error:
        if error.status != 403:
            raise
        # Few users may read namespaces.
        return
    yield namespace.exists(target.namespace, found)
    if found is not None and "deletionTimestamp" not in found["metadata"]:
        level = namespace.pod_security(target.namespace, found["metadata"].get("labels") or {}, target.template)
        if level.level == "fail":
            forced = dataclasses.replace(level, remedy=level.remedy + " --force submits it.")
            yield _as_note(level) if force else forced


def _as_note(finding: Finding) -> Finding:
    return dataclasses.replace(finding, level="warn")


def _rights(target: Target, needed: Sequence[Right]) -> Findings:
    cluster = target.cluster
    missing = [
        str(right)
        for right in needed
        if not cluster.may(right.verb, right.kind, target.namespace, subresource=right.subresource)
    ]
    if missing:
        what = "missing RBAC permissions in namespace {namespace}"
        fix = namespace.ASK_FOR_ROLE + "; `launcher doctor` lists the permissions of all commands."
        yield fail_admin(what, "{missing}.", fix, namespace=target.namespace, missing=missing)


def _queue(target: Target) -> Findings:
    """Judge the queue: Kueue would let a job wait for ever in one that does not exist."""
    if target.queue is None:
        return
    kueue = controllers.kueue(target.cluster.served(LOCAL_QUEUES.group), target.queue)
    yield kueue
    if kueue.level == "fail":
        return
    queue = target.cluster.get(LOCAL_QUEUES, target.queue, target.namespace)
    others = [] if queue else target.names(LOCAL_QUEUES, target.namespace)
    finding = namespace.local_queue(target.queue, target.namespace, queue, others)
    # A queue that is stopped now may run again while the job waits.
    yield _as_note(finding) if finding.level == "fail" and queue is not None else finding


def _priority(target: Target) -> Findings:
    for kind, name in target.priority_classes:
        try:
            found = target.cluster.get(kind, name)
        except ApiError as error:
            if error.status != 403:
                raise
            what, why = "whether {kind} {name} exists is not known", "you have no permission to read it."
            yield unknown(what, why, kind=kind.kind, name=name)
            continue
        yield namespace.priority(kind.kind, name, found, [] if found else target.names(kind))


def _error(failing: Sequence[Finding]) -> UserError:
    """Return one error for all; a ClusterError where the administrator must fix one of them."""
    errors = [
        (ClusterError if finding.whose == "cluster" else UserError)(
            f"{finding.what[0].upper()}{finding.what[1:]}: {finding.why}", finding.fix
        )
        for finding in failing
    ]
    if len(errors) == 1:
        return errors[0]
    kind = ClusterError if any(isinstance(error, ClusterError) for error in errors) else UserError
    return kind("\n".join(map(str, errors)))
