"""JobSet and Kueue: installed, new enough, their controllers and webhooks running. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from jaxlaunch.launcher.diagnose.doctor.finding import ASK_ADMIN, Finding, Findings, fail, fail_admin, ok, unknown
from jaxlaunch.launcher.errors import ApiError
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, LOCAL_QUEUES, Kind
from jaxlaunch.launcher.kubernetes.objects import Obj
from jaxlaunch.launcher.wording import count, either

# Where each project's own manifests put its controller.
JOBSET = ("jobset-system", "jobset-controller-manager")
KUEUE = ("kueue-system", "kueue-controller-manager")
# The field of our failure policy that came last; a JobSet that has it has all that we render.
_NEWEST_FIELD = "spec.failurePolicy.rules[].onJobFailureMessagePatterns"
JOBSET_CONFIG, KUEUE_CONFIG = "jobset-manager-config", "kueue-manager-config"
_INTEGRATION = "jobset.x-k8s.io/jobset"
_INSTALL = f"{ASK_ADMIN} install JobSet 0.10.1 or newer."
# Features of the newest versions for lost and missing hosts, and whether each is on where nobody says it: read in
# JobSet 0.12.0 and Kueue 0.15.0, whose JobSets have no least count of pods, in November 2026.
_FEATURES: Mapping[str, Mapping[str, bool]] = {
    "JobSet": {"RestartJob": False, "ElasticJobSet": False},
    "Kueue": {"PartialAdmission": True, "ElasticJobsViaWorkloadSlices": False},
}
_WITHOUT = {
    "JobSet": "launcher needs neither: it replaces lost hosts, and has ranks move, by itself",
    "Kueue": "neither is for JobSets: a job is admitted whole, with its spares",
}
# What is created for a job, by API group: a webhook on any of them can keep its pods from running.
_CREATED: Mapping[str, tuple[str, ...]] = {
    "jobset.x-k8s.io": ("jobsets",),
    "batch": ("jobs",),
    "": ("pods", "services", "configmaps"),
    "networking.k8s.io": ("networkpolicies",),
    "kueue.x-k8s.io": ("workloads",),
}


def served(kind: Kind, project: str, versions: Sequence[str]) -> Finding:
    """Whether the API server serves a kind at the version that launcher uses."""
    if kind.version in versions:
        return ok(f"{project}: {kind.group} {', '.join(versions)} is served")
    if versions:
        what = f"{project}: {kind.group} is served as {either(versions)}, not as {kind.version}"
        return fail_admin(what, f"the job needs a {kind.kind} of {kind.version}.", f"{ASK_ADMIN} update {project}.")
    return fail_admin(f"{project} is not installed", f"the job needs a {kind.kind}.", f"{ASK_ADMIN} install {project}.")


def crd(found: Obj | None) -> Findings:
    """Whether the installed JobSet has every field that launcher renders."""
    if found is None:
        return
    schemas = {version["name"]: version for version in found["spec"]["versions"]}
    schema: Any = schemas.get(JOBSETS.version, {}).get("schema", {}).get("openAPIV3Schema", {})
    for step in _NEWEST_FIELD.split("."):
        schema = (schema.get("properties") or {}).get(step.removesuffix("[]")) or {}
        schema = schema.get("items", {}) if step.endswith("[]") else schema
    if schema:
        yield ok("JobSet has the failure policy's message patterns (0.10.1)")
    else:
        why = "its failure policy cannot tell exit codes apart, so every eviction would count as a crash."
        yield fail_admin(f"JobSet is older than 0.10.1: it has no {_NEWEST_FIELD}", why, _INSTALL)


def controller(project: str, found: Obj | None, place: tuple[str, str]) -> Finding:
    """Image, feature gates and readiness of a controller."""
    namespace, name = place
    if found is None:
        what = f"version and feature gates of {project} are not known"
        why = f"no Deployment {name} is visible in namespace {namespace}: it has another name, or RBAC hides it."
        return unknown(what, why)
    container, gates = _container(found), _gates(found)
    image = f"{container.get('image', 'no image')}" + (f", gates {', '.join(gates)}" if gates else ", default gates")
    if not found.get("status", {}).get("availableReplicas"):
        why = "its webhooks reject every job, and it creates no pods."
        return fail_admin(
            f"{project}'s controller is down: {image}", why, f"kubectl -n {namespace} describe deploy {name}"
        )
    return ok(f"{project}'s controller is up: {image}")


def _container(deployment: Obj) -> Obj:
    return next(iter(deployment["spec"]["template"]["spec"]["containers"]), {})


def _gates(deployment: Obj) -> list[str]:
    """The feature gates among the arguments of a controller, as `A=true,B=false`."""
    arguments = _container(deployment).get("args") or []
    return [text.partition("=")[2] for text in arguments if text.startswith("--feature-gates=")]


def features(project: str, deployment: Obj | None, configs: Sequence[str]) -> Findings:
    """Which of the project's own ways to deal with lost and missing hosts are on, by its arguments or configuration."""
    if deployment is None:
        return
    words = dict(word.partition("=")[::2] for text in _gates(deployment) for word in text.split(","))
    given = {name: value.strip().lower() == "true" for name, value in words.items()}
    for config in map(_parsed, configs):
        given |= config.get("featureGates") or {}
    states = [
        f"{name} is {'on' if given.get(name, given.get('AllAlpha', False) or usual) else 'off'}"
        for name, usual in _FEATURES[project].items()
    ]
    yield ok(f"{project}'s {' and '.join(states)}; {_WITHOUT[project]}")


# --- webhooks ---------------------------------------------------------------------------------------------------------


_BLOCKS = "the API server rejects what this webhook must admit until it answers."


class Hook(NamedTuple):
    """An admission webhook that must answer before an object of a job is created."""

    name: str
    service: tuple[str, str] | None  # namespace and name; None: called by URL


def hooks(configurations: Sequence[Obj], namespace_labels: Mapping[str, str] | None) -> list[Hook]:
    """The webhooks that must admit what a job creates in a namespace; all of them if its labels are not known."""
    found = []
    for configuration in configurations:
        for hook in configuration.get("webhooks") or []:
            is_here = namespace_labels is None or matches(hook.get("namespaceSelector") or {}, namespace_labels)
            if (
                is_here
                and hook.get("failurePolicy", "Fail") == "Fail"
                and any(map(_covers_jobs, hook.get("rules") or []))
            ):
                service = hook["clientConfig"].get("service")
                found.append(Hook(hook["name"], None if service is None else (service["namespace"], service["name"])))
    return found


def _covers_jobs(rule: Obj) -> bool:
    creates = not {"*", "CREATE"}.isdisjoint(rule.get("operations") or [])
    groups = _CREATED if "*" in rule["apiGroups"] else [group for group in rule["apiGroups"] if group in _CREATED]
    named = {resource.partition("/")[0] for resource in rule["resources"]}
    return creates and any("*" in named or not named.isdisjoint(_CREATED[group]) for group in groups)


def matches(selector: Obj, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes an object with these labels; an empty one takes all."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_meets(term, labels) for term in selector.get("matchExpressions") or [])


def _meets(term: Obj, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(term["key"]), term.get("values") or []
    match term["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
    return value is None


def endpoints(all_hooks: Sequence[Hook], ready: Mapping[tuple[str, str], int]) -> Findings:
    """Webhooks whose service has no endpoint, by `ready` endpoints of each service."""
    down = [(hook.name, hook.service) for hook in all_hooks if hook.service is not None and not ready.get(hook.service)]
    for name, service in down:
        what = f"webhook {name}: service {'/'.join(service)} has no ready endpoint"
        fix = f"kubectl -n {service[0]} get pods; delete the webhook configuration if it was left behind."
        yield fail_admin(what, _BLOCKS, fix)
    if not down:
        yield ok(f"{count(len(all_hooks), 'webhook')} for a job's objects, each with a ready endpoint")


def ready_endpoints(slices: Sequence[Obj]) -> int:
    """The endpoints of EndpointSlices that take connections; one without a condition is ready."""
    listed = [endpoint for one in slices for endpoint in one.get("endpoints") or []]
    return sum((endpoint.get("conditions") or {}).get("ready") is not False for endpoint in listed)


def dry_run(error: ApiError | None, what: str) -> Finding:
    """The API server's answer to a JobSet or a pod that was sent with dryRun=All."""
    if error is None or error.reason == "AlreadyExists":
        return ok(f"the API server accepts {what} (dry run: schema, webhooks, admission)")
    if called := re.search(r'failed calling webhook "([^"]+)"', error.message):
        fix = f"{ASK_ADMIN} start its server, or to delete the webhook configuration if it was left behind."
        return fail_admin(f"webhook {called[1]} does not answer", f"{_BLOCKS} {error.message}", fix)
    if error.status == 403 and "cannot create resource" in error.message:
        return unknown(f"whether the API server accepts {what} is not known", error.message)
    if "unknown field" in error.message:
        return fail_admin(f"the API server does not know a field of {what}", error.message, _INSTALL)
    if "exceeded quota" in error.message or "failed quota" in error.message:
        return fail_admin(
            f"a ResourceQuota rejects {what}", error.message, f"request less, or {ASK_ADMIN} raise the quota."
        )
    if denied := re.search(r"(?s)ValidatingAdmissionPolicy '([^']+)'.* denied request: (.*)", error.message):
        fix = "change that, or ask the cluster administrator."
        return fail(f"ValidatingAdmissionPolicy {denied[1]} rejects {what}", denied[2], fix)
    if "violates PodSecurity" in error.message:
        return fail(f"Pod Security rejects {what}", error.message, "see `launcher plan`, or use another namespace.")
    return fail(
        f"the API server rejects {what}", error.message, "change what it names, or ask the cluster administrator."
    )


def kueue(versions: Sequence[str], queue: str | None) -> Finding:
    """Kueue, which only a job with a queue needs."""
    if queue is not None:
        return served(LOCAL_QUEUES, "Kueue", versions)
    return ok(f"Kueue is {f'served as {either(versions)}' if versions else 'not installed'}; the job names no queue")


def kueue_config(text: str, queue: str | None) -> Findings:
    """What Kueue's own configuration means for a job with this queue, or with none."""
    config = _parsed(text)
    if queue is None and config.get("manageJobsWithoutQueueName"):
        why = "with manageJobsWithoutQueueName, Kueue keeps jobs without a queue suspended forever."
        yield fail("the job names no queue, and Kueue requires one", why, "set --queue, or queue: in job.yaml.")
    frameworks = (config.get("integrations") or {}).get("frameworks")
    if queue is not None and frameworks is not None and _INTEGRATION not in frameworks:
        what = f"Kueue does not manage JobSets: its integrations are {', '.join(frameworks) or 'none'}"
        yield fail_admin(what, "the queue is ignored, and the job starts at once.", f"{ASK_ADMIN} add {_INTEGRATION}.")
    if gates := config.get("featureGates"):
        yield ok(f"Kueue's feature gates: {', '.join(f'{name}={str(on).lower()}' for name, on in gates.items())}")


def _parsed(text: str) -> dict[str, Any]:
    """A configuration file of a controller; empty where it is none."""
    try:
        config = yaml.load(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else {}
