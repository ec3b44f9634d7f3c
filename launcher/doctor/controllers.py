"""JobSet and Kueue: installed, new enough, their controllers and webhooks up. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

from launcher.errors import ApiError
from launcher.finding import Finding, Findings, clusters, ok, unknown, yours
from launcher.kinds import JOBSETS, LOCAL_QUEUES, Kind
from launcher.objects import Obj
from launcher.wording import count, either

# Where each project's own manifests put its controller.
JOBSET = ("jobset-system", "jobset-controller-manager")
KUEUE = ("kueue-system", "kueue-controller-manager")
# The field of our failure policy that came last; a JobSet that has it has all that we render.
_NEWEST_FIELD = "spec.failurePolicy.rules[].onJobFailureMessagePatterns"
KUEUE_CONFIG = "kueue-manager-config"
_INTEGRATION = "jobset.x-k8s.io/jobset"
_INSTALL = "its owner installs JobSet 0.10 or newer."
# What a job makes exist, by API group: a webhook on any of them stands between us and a running pod.
_OURS: Mapping[str, tuple[str, ...]] = {
    "jobset.x-k8s.io": ("jobsets",),
    "batch": ("jobs",),
    "": ("pods", "services", "configmaps"),
    "networking.k8s.io": ("networkpolicies",),
    "kueue.x-k8s.io": ("workloads",),
}


def served(kind: Kind, project: str, versions: Sequence[str]) -> Finding:
    """Whether the server knows a kind at the version that we speak."""
    if kind.version in versions:
        return ok(f"{project}: {kind.group} {', '.join(versions)} is served")
    if versions:
        what = f"{project}: {kind.group} is served as {either(versions)}, not as {kind.version}"
        return clusters(what, f"a job is made of {kind.kind}s of {kind.version}.", "its owner updates it.")
    return clusters(f"{project} is not installed", f"a job is made of {kind.kind}s.", f"its owner installs {project}.")


def crd(found: Obj | None) -> Findings:
    """Whether the JobSet that is installed has every field we render."""
    if found is None:
        return
    schemas = {version["name"]: version for version in found["spec"]["versions"]}
    schema: Any = schemas.get(JOBSETS.version, {}).get("schema", {}).get("openAPIV3Schema", {})
    for step in _NEWEST_FIELD.split("."):
        schema = (schema.get("properties") or {}).get(step.removesuffix("[]")) or {}
        schema = schema.get("items", {}) if step.endswith("[]") else schema
    if schema:
        yield ok("JobSet has the failure policy's message patterns (0.10)")
    else:
        why = "exit codes would not be told apart, and every eviction would be charged as a crash."
        yield clusters(f"JobSet is older than 0.10: it has no {_NEWEST_FIELD}", why, _INSTALL)


def controller(project: str, found: Obj | None, place: tuple[str, str]) -> Finding:
    """Image, feature gates and readiness of a controller."""
    namespace, name = place
    if found is None:
        what = f"{project}'s release and feature gates are not visible"
        return unknown(what, f"no Deployment {name} is seen in {namespace}: it has another name, or you may not look.")
    container: Obj = next(iter(found["spec"]["template"]["spec"]["containers"]), {})
    gates = [text.partition("=")[2] for text in container.get("args") or [] if text.startswith("--feature-gates=")]
    told = f"{container.get('image', 'no image')}" + (f", gates {', '.join(gates)}" if gates else ", default gates")
    if not found.get("status", {}).get("availableReplicas"):
        why = "its webhooks refuse every job, and nothing turns a JobSet into pods."
        return clusters(
            f"{project}'s controller is down: {told}", why, f"kubectl -n {namespace} describe deploy {name}"
        )
    return ok(f"{project}'s controller is up: {told}")


# --- webhooks ---------------------------------------------------------------------------------------------------------


class Hook(NamedTuple):
    """A webhook that must answer before an object of ours exists."""

    name: str
    service: tuple[str, str] | None  # namespace and name; None: called by URL


def hooks(configurations: Sequence[Obj], namespace_labels: Mapping[str, str] | None) -> list[Hook]:
    """The webhooks that judge what a job makes in a namespace; of one whose labels are not known, all of them."""
    found = []
    for configuration in configurations:
        for hook in configuration.get("webhooks") or []:
            is_here = namespace_labels is None or matches(hook.get("namespaceSelector") or {}, namespace_labels)
            if is_here and hook.get("failurePolicy", "Fail") == "Fail" and any(map(_is_ours, hook.get("rules") or [])):
                service = hook["clientConfig"].get("service")
                found.append(Hook(hook["name"], None if service is None else (service["namespace"], service["name"])))
    return found


def _is_ours(rule: Obj) -> bool:
    creates = not {"*", "CREATE"}.isdisjoint(rule.get("operations") or [])
    groups = _OURS if "*" in rule["apiGroups"] else [group for group in rule["apiGroups"] if group in _OURS]
    named = {resource.partition("/")[0] for resource in rule["resources"]}
    return creates and any("*" in named or not named.isdisjoint(_OURS[group]) for group in groups)


def matches(selector: Obj, labels: Mapping[str, str]) -> bool:
    """Whether a label selector takes an object with these labels; an empty one takes all."""
    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(_holds(term, labels) for term in selector.get("matchExpressions") or [])


def _holds(term: Obj, labels: Mapping[str, str]) -> bool:
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
    """Webhooks whose service has nobody behind it, by `ready` endpoints of each service."""
    down = [hook for hook in all_hooks if hook.service is not None and not ready.get(hook.service)]
    for hook in down:
        assert hook.service is not None
        what = f"webhook {hook.name}: service {'/'.join(hook.service)} has no ready endpoint"
        fix = f"kubectl -n {hook.service[0]} get pods, or delete a configuration that was left behind."
        yield clusters(what, "whatever it would judge is refused until it answers.", fix)
    if not down:
        yield ok(f"{count(len(all_hooks), 'webhook')} judge a job's objects, and each has an endpoint")


def ready_endpoints(slices: Sequence[Obj]) -> int:
    """The endpoints of EndpointSlices that take connections; one that does not say is ready."""
    listed = [endpoint for one in slices for endpoint in one.get("endpoints") or []]
    return sum((endpoint.get("conditions") or {}).get("ready") is not False for endpoint in listed)


def rehearsal(error: ApiError | None, what: str) -> Finding:
    """What the server said to a JobSet or a pod that was only rehearsed (dry run)."""
    if error is None or error.reason == "AlreadyExists":
        return ok(f"the server takes {what} (dry run: schema, webhooks, admission)")
    if called := re.search(r'failed calling webhook "([^"]+)"', error.message):
        why = f"whatever it judges is refused until it answers: {error.message}"
        return clusters(f"webhook {called[1]} does not answer", why, "its owner starts it, or deletes what is left.")
    if error.status == 403 and "cannot create resource" in error.message:
        return unknown(f"whether the server takes {what} is not known", error.message)
    if "unknown field" in error.message:
        return clusters(f"the server does not know a field of {what}", error.message, _INSTALL)
    if "exceeded quota" in error.message or "failed quota" in error.message:
        return clusters(f"a quota refuses {what}", error.message, "ask for less, or its owner raises it.")
    if "violates PodSecurity" in error.message:
        return yours(f"Pod Security refuses {what}", error.message, "see `launcher plan`, or use another namespace.")
    return yours(f"the server refuses {what}", error.message, "change what it names, or ask the cluster's owner.")


def kueue(versions: Sequence[str], queue: str | None) -> Finding:
    """Kueue, which only a job with a queue needs."""
    if queue is not None:
        return served(LOCAL_QUEUES, "Kueue", versions)
    return ok(f"Kueue is {f'served as {either(versions)}' if versions else 'not installed'}, and no queue is named")


def kueue_config(text: str, queue: str | None) -> Findings:
    """What Kueue's own configuration makes of a job with this queue, or with none."""
    try:
        config = yaml.load(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError:
        return
    if not isinstance(config, dict):
        return
    if queue is None and config.get("manageJobsWithoutQueueName"):
        why = "Kueue manages jobs without a queue too (manageJobsWithoutQueueName), and suspends them for ever."
        yield yours("no queue is named, and Kueue wants one", why, "name a queue with --queue, or in the job.")
    frameworks = (config.get("integrations") or {}).get("frameworks")
    if queue is not None and frameworks is not None and _INTEGRATION not in frameworks:
        what = f"Kueue does not manage JobSets: its integrations are {', '.join(frameworks) or 'none'}"
        yield clusters(what, "the queue is ignored, and the job starts at once.", f"its owner adds {_INTEGRATION}.")
    if gates := config.get("featureGates"):
        yield ok(f"Kueue's feature gates: {', '.join(f'{name}={str(on).lower()}' for name, on in gates.items())}")
