"""The namespace: there, its Pod Security level, its quotas, and which rights the user has in it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

from launcher import demand, kinds, podsecurity
from launcher.finding import Finding, Findings, clusters, ok, unknown, warn, yours
from launcher.kinds import Kind
from launcher.objects import Obj
from launcher.podsecurity import ENFORCE, LEVELS
from launcher.precheck import Right
from launcher.quantity import amount
from launcher.wording import count


def exists(name: str, found: Obj | None) -> Finding:
    if found is None:
        return yours(f"namespace {name} does not exist", "nothing can be made in it.", "use another: -n.")
    if "deletionTimestamp" in found["metadata"]:
        return yours(f"namespace {name} is being deleted", "nothing new can be made in it.", "use another: -n.")
    return ok(f"namespace {name} exists")


def pod_security(name: str, labels: Mapping[str, str], template: Obj) -> Finding:
    """Whether the namespace admits the pods; JobSet is accepted all the same, and hangs."""
    enforced, met = labels.get(ENFORCE), podsecurity.level(template)
    if enforced is None:
        why = f"the cluster's own default applies, which cannot be read; the pods meet {met}."
        return ok(f"namespace {name} enforces no Pod Security level of its own: {why}")
    level = next((each for each in LEVELS if each == enforced), None)
    if level is None:
        return unknown(f"namespace {name} enforces the level {enforced}", "it is none of Kubernetes'.")
    if broken := podsecurity.violations(template, level):
        what = f"namespace {name} enforces {level}, and the pods meet {met}"
        why = f"they are refused, while the JobSet is accepted and hangs: {'; '.join(map(str, broken))}"
        return yours(what, why, f"use a namespace that enforces {met}, or a network and volumes that need no more.")
    return ok(f"namespace {name} enforces {level}, which the pods meet")


# --- quotas -----------------------------------------------------------------------------------------------------------


def quotas(found: Sequence[Obj], jobset: Obj) -> Findings:
    """ResourceQuotas against what the whole job asks for."""
    asked = _counted(jobset)
    is_tight = False
    for quota in found:
        used, hard = quota.get("status", {}).get("used") or {}, quota.get("spec", {}).get("hard") or {}
        for resource, limit in hard.items():
            need, most = asked.get(resource, Decimal(0)), amount(str(limit))
            free = most - amount(str(used.get(resource, "0")))
            name = f"quota {quota['metadata']['name']} gives {resource} {limit}"
            plain = resource.removeprefix("requests.").removeprefix("limits.")
            if need > most:
                is_tight = True
                what = f"{name}, and the job asks {demand.written(plain, need)}"
                yield clusters(what, "some of its pods are never made.", "ask for less, or its owner raises it.")
            elif need > free:
                is_tight = True
                what = f"{name}, of which {demand.written(plain, max(free, Decimal(0)))} is left for the job's "
                why = "pods are refused until others end; the gang waits for all of its hosts."
                yield warn(f"{what}{demand.written(plain, need)}", why, "wait, or ask for less.")
    if not is_tight:
        yield ok(f"{count(len(found), 'quota')} in the namespace" + (" leave room for the job" if found else ""))


def _counted(jobset: Obj) -> dict[str, Decimal]:
    """What a job asks for, under the names that quotas have."""
    together = demand.together(jobset)
    plain = {name: much for name, much in together.items() if name in ("cpu", "memory", "ephemeral-storage")}
    asked = {f"requests.{name}": much for name, much in together.items()} | plain
    limits = {f"limits.{name}": much for name, much in together.items() if name != "cpu"}
    pods = Decimal(demand.pods(jobset))
    slices = Decimal(sum(int(part.get("replicas", 1)) for part in jobset["spec"]["replicatedJobs"]))
    objects = {"pods": pods, "count/pods": pods, "count/jobs.batch": slices}
    one = ("services", "count/services", f"count/{kinds.JOBSETS.resource}")  # the Service is for the hosts' names
    return asked | limits | objects | dict.fromkeys(one, Decimal(1))


# --- rights -----------------------------------------------------------------------------------------------------------


def _each(verbs: str, kind: Kind) -> Iterator[Right]:
    return (Right(verb, kind) for verb in verbs.split())


# What each command asks of the server.
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


def rights(has: Mapping[Right, bool], *, in_queue: bool) -> Findings:
    """What each command may not do. Only submit must."""
    for command, needed in COMMANDS.items():
        all_needed = (*needed, *(WITH_A_QUEUE.get(command, ()) if in_queue else ()))
        if missing := [str(right) for right in all_needed if not has[right]]:
            what = f"you may not: {', '.join(missing)}"
            fix = "ask the namespace's owner for a Role with these verbs."
            judge = clusters if command == "submit" else warn
            yield judge(what, f"{command} needs it.", fix)
    if all(has.values()):
        yield ok(f"all {len(has)} rights that the commands use")
