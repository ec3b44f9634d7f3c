"""Kueue holds the job back, or took its place away: which queue, which quota, and how much is missing. Pure."""

from __future__ import annotations

import re

from launcher.causes.answer import Answer, quoted, shown
from launcher.objects import Obj, condition, is_true, seconds_since
from launcher.seen import World
from launcher.status import is_stopped_in_queue

_UNUSED = re.compile(
    r"insufficient unused quota for (?P<resource>\S+) in flavor (?P<flavor>[^,]+), (?P<more>\S+) more needed"
)
_NEVER = re.compile(
    r"insufficient quota for (?P<resource>\S+) in flavor (?P<flavor>[^,]+), previously considered podsets requests "
    r"\((?P<before>[^)]*)\) \+ current podset request \((?P<asked>[^)]*)\) > maximum capacity \((?P<most>[^)]*)\)"
)
_UNCOVERED = re.compile(r"resource (?P<resource>\S+) unavailable in ClusterQueue")
_PATIENCE = "wait for its turn, or ask for less; a job of higher priority goes first."
_QUIET_S = 10.0  # Kueue takes a JobSet within a second


def suspended_by_queue(world: World) -> Answer | None:
    """A JobSet with a queue that is not admitted."""
    if world.queue is None or is_stopped_in_queue(world) or not world.is_suspended:
        return None
    if world.workload is None:
        return _not_taken(world)
    return (
        _inactive(world)
        or _ending(world)
        or _checks(world)
        or _no_quota(world, condition(world.workload, "QuotaReserved").get("message", ""))
    )


def _not_taken(world: World) -> Answer | None:
    assert world.jobset is not None, "asked of a JobSet that is there"
    age = seconds_since(world.jobset["metadata"].get("creationTimestamp"), world.now) or 0.0
    headline = f"is suspended, and Kueue has made no Workload of it for queue {world.queue}"
    if age < _QUIET_S:
        return Answer("queued", f"was just put into queue {world.queue}: Kueue has not answered yet")
    move = "see that Kueue runs and has JobSet among its frameworks: `launcher doctor` looks at it."
    return Answer("queue-silent", headline, _events(world), move)


def _inactive(world: World) -> Answer | None:
    """The LocalQueue or its ClusterQueue is missing, stopped or broken."""
    assert world.workload is not None, "the caller has looked"
    message = condition(world.workload, "QuotaReserved").get("message", "")
    if (match := re.fullmatch(r"(LocalQueue|ClusterQueue) (\S+) doesn't exist", message)) is not None:
        move = "kubectl get localqueues shows which there are; name one as queue: in job.yaml."
        if match[1] == "ClusterQueue":
            move = f"ask who runs the cluster: LocalQueue {world.queue} points to it."
        return Answer("queue-missing", f"waits: {match[1]} {match[2]} does not exist", _words(world), move)
    for queue, kind in ((world.cluster_queue, "ClusterQueue"), (world.local_queue, "LocalQueue")):
        if queue is not None and condition(queue, "Active").get("status") == "False":
            return _not_active(world, kind, queue)
    if re.search(r"is (inactive|stopped)$", message):
        return Answer("queue-stopped", f"waits: {message}", _words(world), "ask who runs the queue to resume it.")
    return None


def _not_active(world: World, kind: str, queue: Obj) -> Answer:
    name, active = queue["metadata"]["name"], condition(queue, "Active")
    if queue.get("spec", {}).get("stopPolicy", "None") != "None":
        headline, move = f"waits: {kind} {name} is stopped", "ask who runs the queue to resume it."
    else:
        headline = f"waits: {kind} {name} admits nothing: {active.get('reason', '')}"
        move = "what its message names must be made or mended by who runs the cluster."
    evidence = (f"{kind} {name}: Active=False: {shown(active.get('message', ''))}", *_words(world))
    return Answer("queue-stopped", headline, evidence, move)


def _ending(world: World) -> Answer | None:
    """It lost its place, and its pods still save."""
    left = [host for host in world.hosts if not host.has_ended]
    if not left or not is_true(world.workload or {}, "Evicted"):
        return None
    return Answer("preempted", f"{_lost(world)}; {len(left)} of its pods still save and end", _words(world))


def _checks(world: World) -> Answer | None:
    """Quota is reserved; a check beside it, such as new nodes, is not passed."""
    assert world.workload is not None, "the caller has looked"
    if not is_true(world.workload, "QuotaReserved"):
        return None
    checks = world.workload.get("status", {}).get("admissionChecks") or ()
    waits = [one for one in checks if one.get("state") != "Ready"]
    if not waits:
        return Answer("queued", f"is admitted by queue {world.queue} and about to start", _words(world))
    names = ", ".join(one["name"] for one in waits)
    evidence = tuple(f"{one['name']}: {one.get('state')}: {shown(one.get('message', ''))}" for one in waits)
    said = next((f": {shown(one['message'])}" for one in waits if one.get("message")), "")
    headline = f"waits: quota is reserved in queue {world.queue}, and admission check {names} is not passed{said}"
    return Answer("admission-check", headline, evidence, "what the check waits for is in its words; often new nodes.")


def _no_quota(world: World, message: str) -> Answer:
    """The quota does not allow it now, or never will."""
    lead = f"{_lost(world)} and waits: " if is_true(world.workload or {}, "Evicted") else "waits: "
    where = f"queue {world.queue}" + (f" (ClusterQueue {_cluster_queue(world)})" if _cluster_queue(world) else "")
    evidence = (*_words(world), *_numbers(world))
    if (match := _NEVER.search(message)) is not None:
        resource, asked, most = match["resource"], match["asked"], match["most"]
        headline = f"{where} can never admit it: it asks for {asked} {resource}, {match['flavor']} has {most} in all"
        move = "ask for less, or use another queue."
        return Answer("quota-never", lead + headline, evidence, move)
    if (match := _UNUSED.search(message)) is not None:
        headline = f"{where} is full: {match['more']} more {match['resource']} is needed in flavor {match['flavor']}"
        headline += _usage(world, match["flavor"], match["resource"])
        return Answer("quota", lead + headline, evidence, _PATIENCE)
    if (match := _UNCOVERED.search(message)) is not None:
        headline = f"{where} does not cover {match['resource']}"
        move = "have the resource added to the ClusterQueue, or ask for none of it."
        return Answer("quota-uncovered", lead + headline, evidence, move)
    if message:
        return Answer("queued", f"{lead}{where}: {shown(message)}", evidence, _PATIENCE)
    return Answer("queued", f"{lead}its turn in {where} has not come", evidence, _PATIENCE)


def _lost(world: World) -> str:
    """How it lost its place in the queue."""
    evicted = condition(world.workload or {}, "Evicted")
    return {
        "Preempted": "was preempted by another job",
        "PodsReadyTimeout": "did not get all its pods ready in Kueue's time",
        "ClusterQueueStopped": "lost its place because the ClusterQueue was stopped",
        "LocalQueueStopped": "lost its place because the LocalQueue was stopped",
        "AdmissionCheck": "lost its place because an admission check failed",
        "NodeFailures": "lost its place because nodes failed",
    }.get(evicted.get("reason", ""), f"lost its place in the queue ({evicted.get('reason', '')})")


def _words(world: World) -> tuple[str, ...]:
    """The Workload's own conditions that say no."""
    workload = world.workload or {}
    said = [condition(workload, kind) for kind in ("QuotaReserved", "Evicted", "Requeued")]
    return tuple(
        f"Workload {workload['metadata']['name']}: {one['type']}={one['status']}: {shown(one['message'])}"
        for one in said
        if one.get("message") and (one["type"], one["status"]) not in (("QuotaReserved", "True"), ("Requeued", "True"))
    )


def _events(world: World) -> tuple[str, ...]:
    return quoted(world.said("CreateWorkloadFailed", "ErrWorkloadCompose", kind="JobSet"))


def _cluster_queue(world: World) -> str | None:
    found = (world.local_queue or {}).get("spec", {}).get("clusterQueue")
    return None if found is None else str(found)


def _numbers(world: World) -> tuple[str, ...]:
    """The quota of each resource beside what is used of it."""
    lines = []
    for flavor, resource, nominal in _nominal(world):
        used = _used(world, flavor, resource)
        lines.append(f"quota of {resource} in flavor {flavor}: {used} used of {nominal}")
    pending = (world.cluster_queue or {}).get("status", {}).get("pendingWorkloads")
    if pending is not None:
        lines.append(f"ClusterQueue {_cluster_queue(world)}: {pending} jobs wait in it")
    return tuple(lines)


def _nominal(world: World) -> list[tuple[str, str, str]]:
    """Flavor, resource and nominal quota of the ClusterQueue, in its order."""
    groups = (world.cluster_queue or {}).get("spec", {}).get("resourceGroups") or ()
    return [
        (flavor["name"], resource["name"], str(resource["nominalQuota"]))
        for group in groups
        for flavor in group["flavors"]
        for resource in flavor["resources"]
    ]


def _used(world: World, flavor: str, resource: str) -> str:
    usage = (world.cluster_queue or {}).get("status", {}).get("flavorsReservation") or ()
    found: Obj = next((one for one in usage if one["name"] == flavor), {})
    return str(next((one["total"] for one in found.get("resources", ()) if one["name"] == resource), "0"))


def _usage(world: World, flavor: str, resource: str) -> str:
    """ "; 900m of 1 is used", where the ClusterQueue could be read."""
    quota = next((most for name, what, most in _nominal(world) if (name, what) == (flavor, resource)), None)
    return "" if quota is None else f"; {_used(world, flavor, resource)} of {quota} is used"
