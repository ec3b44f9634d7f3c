"""The namespace: whether it exists, its Pod Security level and ResourceQuotas, and the user's rights in it. Pure.

`launcher submit` and `launcher doctor` judge a namespace here alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal

from jaxlaunch.launcher.diagnose.doctor.finding import Finding, Findings, fail, fail_admin, ok, unknown, warn
from jaxlaunch.launcher.diagnose.text import Text
from jaxlaunch.launcher.jobs.status.hosts import agent_job
from jaxlaunch.launcher.kubernetes import kinds, requests
from jaxlaunch.launcher.kubernetes import pod_security as podsecurity
from jaxlaunch.launcher.kubernetes.kinds import Kind
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.kubernetes.pod_security import ENFORCE, LEVELS
from jaxlaunch.launcher.kubernetes.quantity import amount
from jaxlaunch.launcher.kubernetes.rights import Right
from jaxlaunch.launcher.platforms.runtime import DEVICE_OWNERSHIP, TPU_DEVICES


def exists(name: str, found: Obj | None) -> Finding:
    """Whether objects can be created in the namespace."""
    if found is None:
        fix = "create it, or use another: -n NAMESPACE."
        return fail("namespace {name} does not exist", "nothing can be created in it.", fix, name=name)
    if "deletionTimestamp" in found["metadata"]:
        what, why = "namespace {name} is being deleted", "nothing new can be created in it."
        return fail(what, why, "use another: -n NAMESPACE.", name=name)
    return ok("namespace {name} exists", name=name)


def pod_security(name: str, labels: Mapping[str, str], template: Obj) -> Finding:
    """Whether the namespace admits the pods; where it does not, the JobSet is accepted all the same, and waits."""
    enforced, met = labels.get(ENFORCE), podsecurity.level(template)
    fields = {"name": name, "enforced": enforced, "met": met}
    if enforced is None:
        why = "the cluster's own default applies, which cannot be read; the pods meet {met}."
        return ok("namespace {name} enforces no Pod Security level of its own: " + why, **fields)
    level = next((each for each in LEVELS if each == enforced), None)
    if level is None:
        what = "namespace {name} enforces Pod Security level {enforced}"
        return unknown(what, "Kubernetes has no such level.", **fields)
    if broken := podsecurity.violations(template, level):
        what = "namespace {name} enforces Pod Security level {enforced}, and the pods meet only {met}"
        why = "the API server accepts the JobSet and rejects its pods: {broken:; }"
        return fail(what, why, "{fix}", fix=_looser(template, met, level), broken=list(map(str, broken)), **fields)
    return ok("namespace {name} enforces Pod Security level {enforced}, which the pods meet", **fields)


def _looser(template: Obj, met: str, level: str) -> Text:
    """Return what lets the pods in: of a TPU, whose pods are root by default, also another user."""
    job = agent_job(template["spec"])
    if job is not None and job.platform == "tpu" and level == "restricted":
        return Text(
            "use a namespace that enforces {met}: pods on TPUs are root, who is sure to open {devices}; or, where the "
            "nodes' containerd has {setting}, users: {{{accelerator}: 1000}} in the cluster defaults.",
            met=met,
            devices=TPU_DEVICES.value,
            setting=DEVICE_OWNERSHIP.value,
            accelerator=job.accelerator,
        )
    return Text(
        "use a namespace that enforces {met}, or a network and volumes that {level} allows.", met=met, level=level
    )


# --- quotas -----------------------------------------------------------------------------------------------------------


def quotas(found: Sequence[Obj], jobset: Obj) -> Findings:
    """ResourceQuotas against what the whole job requests."""
    requested = _counted(jobset)
    is_tight = False
    for quota in found:
        used, hard = quota.get("status", {}).get("used") or {}, quota.get("spec", {}).get("hard") or {}
        for resource, limit in hard.items():
            need, most = requested.get(resource, Decimal(0)), amount(str(limit))
            free = most - amount(str(used.get(resource, "0")))
            plain = resource.removeprefix("requests.").removeprefix("limits.")
            fields = {"quota": quota["metadata"]["name"], "resource": resource, "limit": limit}
            fields |= {"need": requests.written(plain, need), "left": requests.written(plain, max(free, Decimal(0)))}
            what = "ResourceQuota {quota} allows {resource} {limit}"
            if need > most:
                is_tight = True
                why, fix = (
                    "some of its pods are never created.",
                    "ask the namespace's administrator to raise the quota.",
                )
                yield fail_admin(f"{what}, and the job requests {{need}}", why, f"request less, or {fix}", **fields)
            elif need > free:
                is_tight = True
                what += ", of which {left} is left, and the job requests {need}"
                why = "pods are rejected until others end; the gang waits for all of its hosts."
                yield warn(what, why, "wait, or request less.", **fields)
    if not is_tight:
        what = "{quotas:ResourceQuota} in the namespace" + (", with room for the job" if found else "")
        yield ok(what, quotas=len(found))


def _counted(jobset: Obj) -> dict[str, Decimal]:
    """What a job requests, under the names that ResourceQuotas have."""
    together = requests.together(jobset)
    plain = {name: much for name, much in together.items() if name in ("cpu", "memory", "ephemeral-storage")}
    requested = {f"requests.{name}": much for name, much in together.items()} | plain
    limits = {f"limits.{name}": much for name, much in together.items() if name != "cpu"}
    pods = Decimal(requests.pods(jobset))
    slices = Decimal(sum(int(part.get("replicas", 1)) for part in jobset["spec"]["replicatedJobs"]))
    objects = {"pods": pods, "count/pods": pods, "count/jobs.batch": slices}
    one = ("services", "count/services", f"count/{kinds.JOBSETS.resource}")  # the Service is for the hosts' names
    return requested | limits | objects | dict.fromkeys(one, Decimal(1))


# --- rights -----------------------------------------------------------------------------------------------------------


ASK_FOR_ROLE = "ask the namespace's administrator for a Role with these verbs"


def _each(verbs: str, kind: Kind) -> Iterator[Right]:
    return (Right(verb, kind) for verb in verbs.split())


# What each command needs to be allowed.
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
WITH_A_GANG_SECRET: Mapping[str, tuple[Right, ...]] = {"submit": tuple(_each("create", kinds.SECRETS))}
WITH_CLAIMS: Mapping[str, tuple[Right, ...]] = {"submit": tuple(_each("get create", kinds.RESOURCE_CLAIM_TEMPLATES))}
WITH_A_COMPUTE_DOMAIN: Mapping[str, tuple[Right, ...]] = {"submit": tuple(_each("get create", kinds.COMPUTE_DOMAINS))}


def rights(has: Mapping[Right, bool], tables: Sequence[Mapping[str, tuple[Right, ...]]]) -> Findings:
    """The rights that each command lacks, by the `tables` that apply to the job. Only those of submit are required."""
    for command in COMMANDS:
        needed = [right for table in tables for right in table.get(command, ())]
        if missing := [str(right) for right in needed if not has[right]]:
            what, why = "missing RBAC permissions: {missing}", "needed by launcher {command}."
            judge = fail_admin if command == "submit" else warn
            yield judge(what, why, ASK_FOR_ROLE + ".", missing=missing, command=command)
    if all(has.values()):
        yield ok("all {number} RBAC permissions that the commands need", number=len(has))
