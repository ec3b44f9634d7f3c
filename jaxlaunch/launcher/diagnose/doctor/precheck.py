"""The checks that `launcher submit` makes before it writes anything: what would keep the job from running.

It judges with the functions of `launcher doctor`, and reads less. A missing object stops the submission; what may
change while the job waits, such as a stopped queue, is only noted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from jaxlaunch.launcher.diagnose.doctor import controllers, namespace, nodes, queues
from jaxlaunch.launcher.diagnose.doctor.finding import Finding, Findings
from jaxlaunch.launcher.diagnose.doctor.target import Obj, Target
from jaxlaunch.launcher.errors import ApiError, ClusterError, UserError
from jaxlaunch.launcher.kubernetes import kinds
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, KINDS, LOCAL_QUEUES, NAMESPACES, PODS
from jaxlaunch.launcher.kubernetes.rights import Right

Answers = Iterator[UserError | str]  # errors stop the submission, texts are notes for the user


def check(cluster: Cluster, manifests: Sequence[Obj], *, replace: bool, watch: bool, force: bool = False) -> list[str]:
    """Notes for the user about the job on this cluster. `watch`: it is waited for, or its logs are followed.

    `force`: that the namespace rejects its pods is a note too.

    Raises UserError with all that would keep it from running; ClusterError when an administrator must fix some of it.
    """
    target = Target(cluster, str(manifests[0]["metadata"]["namespace"]), manifests)
    jobset = controllers.served(JOBSETS, "JobSet", cluster.served(JOBSETS.group))
    if jobset.level == "fail":
        raise ClusterError(f"Cluster of context {cluster.context}: {jobset.what}.", jobset.fix)
    found = [
        *(_error(one) for one in allocation(target) if one.level == "fail"),
        *_namespace(target, force),
        *_rights(target, rights(manifests, replace=replace, watch=watch)),
        *_queue(target),
        *_priority(target),
        *(_note(one) for one in _unrequested(target)),
    ]
    if errors := [one for one in found if isinstance(one, UserError)]:
        raise _all(errors)
    return [one for one in found if isinstance(one, str)]


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


def _namespace(target: Target, force: bool) -> Answers:
    try:
        found = target.cluster.get(NAMESPACES, target.namespace)
    except ApiError as error:
        if error.status != 403:
            raise
        return  # few users may read namespaces
    existence = namespace.exists(target.namespace, found)
    if existence.level == "fail":
        yield _error(existence)
    elif found is not None:
        level = namespace.pod_security(target.namespace, found["metadata"].get("labels") or {}, target.template)
        if level.level == "fail":
            yield _note(level) if force else _error(dataclasses.replace(level, fix=f"{level.fix} --force submits it."))


def _rights(target: Target, needed: Sequence[Right]) -> Answers:
    cluster = target.cluster
    missing = [str(one) for one in needed if not cluster.may(*one[:2], target.namespace, subresource=one.subresource)]
    if missing:
        message = f"Missing RBAC permissions in namespace {target.namespace}: {', '.join(missing)}."
        hint = namespace.ASK_FOR_ROLE.removesuffix(".")
        yield ClusterError(message, f"{hint}; `launcher doctor` lists the permissions of all commands.")


def _queue(target: Target) -> Answers:
    """Kueue would let a job wait for ever in a queue that does not exist."""
    if target.queue is None:
        return
    kueue = controllers.kueue(target.cluster.served(LOCAL_QUEUES.group), target.queue)
    if kueue.level == "fail":
        yield _error(kueue)
        return
    queue = target.cluster.get(LOCAL_QUEUES, target.queue, target.namespace)
    others = [] if queue else target.names(LOCAL_QUEUES, target.namespace)
    finding = queues.local(target.queue, target.namespace, queue, others)
    if finding.level == "fail":
        yield _error(finding) if queue is None else _note(finding)


def _priority(target: Target) -> Answers:
    for kind, name in target.priority_classes:
        try:
            found = target.cluster.get(kind, name)
        except ApiError as error:
            if error.status != 403:
                raise
            yield f"whether {kind.kind} {name} exists is not known: you have no permission to read it."
            continue
        finding = queues.priority(kind.kind, name, found, [] if found else target.names(kind))
        if finding.level == "fail":
            yield _error(finding)


def _unrequested(target: Target) -> Iterator[Finding]:
    if missing := target.unrequested:
        yield nodes.unrequested(missing, is_known=target.defaulted is not None)


def _error(found: Finding) -> UserError:
    kind = ClusterError if found.whose == "cluster" else UserError
    return kind(f"{found.what[0].upper()}{found.what[1:]}: {found.why}", found.fix)


def _note(found: Finding) -> str:
    return f"{found.what}: {found.why}"


def _all(found: Sequence[UserError]) -> UserError:
    """One error for all; a ClusterError when one of them is."""
    kind = ClusterError if any(isinstance(one, ClusterError) for one in found) else UserError
    return found[0] if len(found) == 1 else kind("\n".join(map(str, found)))
