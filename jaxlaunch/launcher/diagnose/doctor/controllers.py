"""Findings about the API server, JobSet, Kueue and webhooks. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import yaml

from jaxlaunch.launcher.diagnose.doctor.finding import (
    ASK_ADMIN,
    Finding,
    Findings,
    admin_failure,
    ok_finding,
    unknown_finding,
    user_failure,
    warning_finding,
)
from jaxlaunch.launcher.diagnose.text import Text
from jaxlaunch.launcher.errors import ApiError
from jaxlaunch.launcher.kubernetes.kinds import (
    GANG_KINDS,
    JOBSETS,
    LOCAL_QUEUES,
    Kind,
    manifest_kind,
)
from jaxlaunch.launcher.kubernetes.labels import RESERVED_DOMAINS
from jaxlaunch.launcher.kubernetes.objects import (
    MAX_SKEW_S,
    Obj,
    clock_skew_s,
    replicated_jobs,
)
from jaxlaunch.launcher.wording import join_choices

# Namespace and name of each controller in its project's own manifests.
JOBSET_DEPLOYMENT = ("jobset-system", "jobset-controller-manager")
KUEUE_DEPLOYMENT = ("kueue-system", "kueue-controller-manager")
# The newest field of the rendered failure policy. A JobSet with this field has all others.
_NEWEST_FIELD = "spec.failurePolicy.rules[].onJobFailureMessagePatterns"
JOBSET_CONFIG, KUEUE_CONFIG = "jobset-manager-config", "kueue-manager-config"
_INTEGRATION = "jobset.x-k8s.io/jobset"
_INSTALL = f"{ASK_ADMIN} install JobSet 0.10.1 or newer."
# Feature gates for lost and missing hosts, with their defaults in JobSet 0.12.0 and Kueue 0.15.0
# (read in November 2026). In these versions a JobSet cannot state a minimum number of pods.
_FEATURES: Mapping[str, Mapping[str, bool]] = {
    "JobSet": {"RestartJob": False, "ElasticJobSet": False},
    "Kueue": {"PartialAdmission": True, "ElasticJobsViaWorkloadSlices": False},
}
_FEATURE_NOTES = {
    "JobSet": "launcher needs neither: it replaces lost hosts, and has ranks move, by itself",
    "Kueue": "neither is for JobSets: a job is admitted whole, with its spares",
}
# Resources that are created for most jobs, by API group. A webhook on any of them can keep the pods
# from running.
_CREATED_RESOURCES: Mapping[str, tuple[str, ...]] = {
    "jobset.x-k8s.io": ("jobsets",),
    "batch": ("jobs",),
    "": ("pods", "services", "configmaps"),
    "networking.k8s.io": ("networkpolicies",),
    "kueue.x-k8s.io": ("workloads",),
}
# Labels without a domain that the Job controller sets on pods.
_JOB_POD_LABELS = ("controller-uid", "job-name")
# A server rejects tokens and certificates if the clocks differ by more than this.
MAX_TOKEN_SKEW_S = 300
_WEBHOOK_BLOCKS = "the API server rejects what this webhook must admit until it answers."


def judge_server(version: str, server: str, is_ready: bool) -> Finding:
    """Judge the API server by its answer to /readyz."""
    if is_ready:
        return ok_finding("Kubernetes {version} at {server}", version=version, server=server)
    remedy = f"{ASK_ADMIN} check /readyz?verbose."
    summary = "the API server (Kubernetes {version}) is not ready"
    return admin_failure(summary, "requests may fail.", remedy, version=version)


def judge_clock(sent_at: datetime, server_time: datetime | None, received_at: datetime) -> Finding:
    """Judge the skew of the server's clock.

    Args:
        sent_at: This machine's time before the request.
        server_time: Time in the server's response, or None if it has none.
        received_at: This machine's time after the response.
    """
    if server_time is None:
        summary = "whether this machine's clock and the server's agree is not known"
        return unknown_finding(summary, "the server's answer has no valid header Date.")
    skew_s = abs(clock_skew_s(sent_at, server_time, received_at))
    if skew_s <= MAX_SKEW_S:
        return ok_finding("this machine's clock and the server's agree")
    reason = "ages of objects and events are wrong."
    if skew_s > MAX_TOKEN_SKEW_S:
        reason = "tokens and certificates may be rejected."
    summary = "this machine's clock and the server's are {skew:.0f} s apart"
    return warning_finding(summary, reason, "set the clock: timedatectl set-ntp true", skew=skew_s)


def judge_served(kind: Kind, project: str, versions: Sequence[str]) -> Finding:
    """Judge whether the API server serves a kind at the version that launcher uses."""
    fields = {"project": project, "kind": kind, "versions": list(versions)}
    if kind.version in versions:
        return ok_finding("{project}: {kind.group} {versions} is served", **fields)
    if versions:
        summary = "{project}: {kind.group} is served as {choices}, not as {kind.version}"
        reason = "the job needs a {kind.kind} of {kind.version}."
        remedy = ASK_ADMIN + " update {project}."
        return admin_failure(summary, reason, remedy, **fields, choices=join_choices(versions))
    summary, reason = "{project} is not installed", "the job needs a {kind.kind}."
    return admin_failure(summary, reason, ASK_ADMIN + " install {project}.", **fields)


def _has_field(crd: Obj, field: str) -> bool:
    """Return whether the schema of JobSets has a field, such as `spec.failurePolicy.rules[]`."""
    schemas = {version["name"]: version for version in crd["spec"]["versions"]}
    schema: Any = schemas.get(JOBSETS.version, {}).get("schema", {}).get("openAPIV3Schema", {})
    for name in field.split("."):
        schema = (schema.get("properties") or {}).get(name.removesuffix("[]")) or {}
        schema = schema.get("items", {}) if name.endswith("[]") else schema
    return bool(schema)


def judge_crd(crd: Obj | None) -> Findings:
    """Judge whether the installed JobSet has every field that launcher renders."""
    if crd is None:
        return
    if _has_field(crd, _NEWEST_FIELD):
        yield ok_finding("JobSet has the failure policy's message patterns (0.10.1)")
    else:
        summary = "JobSet is older than 0.10.1: it has no {field}"
        reason = (
            "its failure policy cannot tell exit codes apart, so every eviction would count "
            "as a crash."
        )
        yield admin_failure(summary, reason, _INSTALL, field=_NEWEST_FIELD)


def judge_controller(project: str, deployment: Obj | None, location: tuple[str, str]) -> Finding:
    """Judge whether a controller is available, and report its image and feature gates.

    `location` is the namespace and the name of its Deployment.
    """
    fields: dict[str, Any] = {"project": project, "namespace": location[0], "name": location[1]}
    if deployment is None:
        summary = "version and feature gates of {project} are not known"
        reason = (
            "no Deployment {name} is visible in namespace {namespace}: it has another name, or "
            "RBAC hides it."
        )
        return unknown_finding(summary, reason, **fields)
    image = _first_container(deployment).get("image") or Text("no image")
    gates = _feature_gates(deployment)
    template = "{image}, gates {gates}" if gates else "{image}, default gates"
    fields["version"] = Text(template, image=image, gates=gates)
    if not deployment.get("status", {}).get("availableReplicas"):
        summary = "{project}'s controller is down: {version}"
        reason = "its webhooks reject every job, and it creates no pods."
        return admin_failure(
            summary, reason, "kubectl -n {namespace} describe deploy {name}", **fields
        )
    return ok_finding("{project}'s controller is up: {version}", **fields)


def _first_container(deployment: Obj) -> Obj:
    return next(iter(deployment["spec"]["template"]["spec"]["containers"]), {})


def _feature_gates(deployment: Obj) -> list[str]:
    """Return the feature gates among the arguments of a controller, as `A=true,B=false`."""
    arguments = _first_container(deployment).get("args") or []
    return [text.partition("=")[2] for text in arguments if text.startswith("--feature-gates=")]


def describe_features(project: str, deployment: Obj | None, configs: Sequence[str]) -> Findings:
    """Report which of the project's features for lost hosts are on."""
    if deployment is None:
        return
    gates: dict[str, bool] = {}
    for gate in ",".join(_feature_gates(deployment)).split(","):
        name, _, value = gate.partition("=")
        gates[name] = value.strip().lower() == "true"
    for config in map(_parse_config, configs):
        gates |= config.get("featureGates") or {}
    states = []
    for name, default in _FEATURES[project].items():
        is_on = gates.get(name, gates.get("AllAlpha", False) or default)
        states.append(Text("{name} is on" if is_on else "{name} is off", name=name))
    summary = "{project}'s {states: and }; " + _FEATURE_NOTES[project]
    yield ok_finding(summary, project=project, states=states)


# --- webhooks -------------------------------------------------------------------------------------


class Webhook(NamedTuple):
    """An admission webhook that must answer before an object of a job is created."""

    name: str
    # Namespace and name, or None for a webhook that is called by URL.
    service: tuple[str, str] | None
    # Whether it has matchConditions, so that it may be called for none of the objects.
    is_conditional: bool = False


# The labels of a job's objects that are known before they are created, by API group and resource.
ObjectLabels = Mapping[tuple[str, str], Sequence[Mapping[str, str]]]


def created_labels(manifests: Sequence[Obj]) -> ObjectLabels:
    """Return the labels of a job's manifests, and of the Jobs and pods of its JobSet."""
    labels: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    for manifest in manifests:
        kind = manifest_kind(manifest)
        labels.setdefault((kind.group, kind.plural), []).append(_labels_of(manifest))
        for job in replicated_jobs(manifest) if kind is JOBSETS else ():
            template = job["template"]
            labels.setdefault(("batch", "jobs"), []).append(_labels_of(template))
            labels.setdefault(("", "pods"), []).append(_labels_of(template["spec"]["template"]))
    return labels


def _labels_of(obj: Obj) -> Mapping[str, str]:
    labels: Mapping[str, str] = (obj.get("metadata") or {}).get("labels") or {}
    return labels


def blocking_webhooks(
    configurations: Sequence[Obj],
    namespace_labels: Mapping[str, str] | None,
    object_labels: ObjectLabels,
) -> list[Webhook]:
    """Return the webhooks that must admit a job's objects in a namespace with these labels."""
    webhooks = []
    hooks = [hook for config in configurations for hook in config.get("webhooks") or []]
    for hook in hooks:
        selector = hook.get("namespaceSelector") or {}
        selects_namespace = namespace_labels is None or selector_matches(selector, namespace_labels)
        is_required = hook.get("failurePolicy", "Fail") == "Fail"
        if selects_namespace and is_required and _selects_objects(hook, object_labels):
            service = hook["clientConfig"].get("service")
            service_key = None if service is None else (service["namespace"], service["name"])
            webhooks.append(Webhook(hook["name"], service_key, bool(hook.get("matchConditions"))))
    return webhooks


def _selects_objects(hook: Obj, object_labels: ObjectLabels) -> bool:
    """Return whether the rules and the objectSelector select an object of a job."""
    selector = hook.get("objectSelector") or {}
    usual_resources = {
        (group, resource) for group, created in _CREATED_RESOURCES.items() for resource in created
    }
    return any(
        _covers_creation(rule, *resource)
        # The labels of some objects, such as a Workload of Kueue, are not known.
        and (
            resource not in object_labels
            or any(_may_select(selector, labels) for labels in object_labels[resource])
        )
        for rule in hook.get("rules") or []
        for resource in usual_resources | object_labels.keys()
    )


def _may_select(selector: Obj, labels: Mapping[str, str]) -> bool:
    """Return whether a selector may match once controllers have added their labels."""

    def is_known(key: str) -> bool:
        domain, slash, _ = key.partition("/")
        is_added = key in _JOB_POD_LABELS or (slash and domain in RESERVED_DOMAINS)
        return key in labels or not is_added

    match_labels = selector.get("matchLabels") or {}
    terms = selector.get("matchExpressions") or []
    known_selector = {
        "matchLabels": {key: value for key, value in match_labels.items() if is_known(key)},
        "matchExpressions": [term for term in terms if is_known(term["key"])],
    }
    return selector_matches(known_selector, labels)


def _covers_creation(rule: Obj, group: str, plural: str) -> bool:
    """Return whether a rule covers the creation of a namespaced object."""
    if rule.get("scope") == "Cluster" or {"*", "CREATE"}.isdisjoint(rule.get("operations") or []):
        return False
    resources = {resource.partition("/")[0] for resource in rule["resources"]}
    has_group = not {"*", group}.isdisjoint(rule["apiGroups"])
    return has_group and not {"*", plural}.isdisjoint(resources)


def selector_matches(selector: Obj, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector matches. An empty selector matches everything."""

    def is_met(term: Obj) -> bool:
        value, values = labels.get(term["key"]), term.get("values") or []
        match term["operator"]:
            case "In":
                return value in values
            case "NotIn":
                return value not in values
            case "Exists":
                return value is not None
        return value is None

    if any(labels.get(key) != value for key, value in (selector.get("matchLabels") or {}).items()):
        return False
    return all(map(is_met, selector.get("matchExpressions") or []))


def judge_webhooks(
    webhooks: Sequence[Webhook], ready_endpoints: Mapping[tuple[str, str], int]
) -> Findings:
    """Judge webhooks by the number of ready endpoints of each service (namespace and name)."""
    summary = "webhook {name}: service {namespace}/{service} has no ready endpoint"
    remedy = (
        "kubectl -n {namespace} get pods; delete the webhook configuration if it was left behind."
    )
    is_down = False
    for name, service, is_conditional in webhooks:
        if service is not None and not ready_endpoints.get(service):
            is_down = True
            fields = {"name": name, "namespace": service[0], "service": service[1]}
            if is_conditional:
                reason = "its matchConditions decide whether that keeps the job's objects out."
                yield warning_finding(summary, reason, remedy, **fields)
            else:
                yield admin_failure(summary, _WEBHOOK_BLOCKS, remedy, **fields)
    if not is_down:
        summary = "{hooks:webhook} for a job's objects, each with a ready endpoint"
        yield ok_finding(summary, hooks=len(webhooks))


def count_ready_endpoints(slices: Sequence[Obj]) -> int:
    """Count the ready endpoints of EndpointSlices. One without the condition is ready."""
    return sum(
        (endpoint.get("conditions") or {}).get("ready") is not False
        for endpoint_slice in slices
        for endpoint in endpoint_slice.get("endpoints") or []
    )


def judge_dry_run(refusal: ApiError | None, subject: str) -> Finding:
    """Judge the API server's answer to the dry run of a JobSet or a pod, None if it accepts it."""
    if refusal is None or refusal.reason == "AlreadyExists":
        summary = "the API server accepts {subject} (dry run: schema, webhooks, admission)"
        return ok_finding(summary, subject=subject)
    message, fields = refusal.message, {"subject": subject, "message": refusal.message}
    if match := re.search(r'failed calling webhook "([^"]+)"', message):
        remedy = (
            f"{ASK_ADMIN} start its server, or to delete the webhook configuration if it was "
            "left behind."
        )
        summary, reason = "webhook {webhook} does not answer", _WEBHOOK_BLOCKS + " {message}"
        return admin_failure(summary, reason, remedy, webhook=match[1], **fields)
    if refusal.status == 403 and "cannot create resource" in message:
        summary = "whether the API server accepts {subject} is not known"
        return unknown_finding(summary, "{message}", **fields)
    if "unknown field" in message:
        summary = "the API server does not know a field of {subject}"
        return admin_failure(summary, "{message}", _INSTALL, **fields)
    if "exceeded quota" in message or "failed quota" in message:
        remedy = f"request less, or {ASK_ADMIN} raise the quota."
        return admin_failure("a ResourceQuota rejects {subject}", "{message}", remedy, **fields)
    pattern = r"(?s)ValidatingAdmissionPolicy '([^']+)'.* denied request: (.*)"
    if match := re.search(pattern, message):
        summary = "ValidatingAdmissionPolicy {policy} rejects {subject}"
        remedy = "change that, or ask the cluster administrator."
        fields |= {"policy": match[1], "denial": match[2]}
        return user_failure(summary, "{denial}", remedy, **fields)
    if "violates PodSecurity" in message:
        remedy = "see `launcher plan`, or use another namespace."
        return user_failure("Pod Security rejects {subject}", "{message}", remedy, **fields)
    remedy = "change what it names, or ask the cluster administrator."
    return user_failure("the API server rejects {subject}", "{message}", remedy, **fields)


# --- Kueue ----------------------------------------------------------------------------------------


def judge_kueue(versions: Sequence[str], queue: str | None) -> Finding:
    """Judge whether Kueue is installed, which only a job with a queue needs."""
    if queue is not None:
        return judge_served(LOCAL_QUEUES, "Kueue", versions)
    if not versions:
        return ok_finding("Kueue is not installed; the job names no queue")
    summary = "Kueue is served as {versions}; the job names no queue"
    return ok_finding(summary, versions=join_choices(versions))


def judge_kueue_config(text: str, queue: str | None) -> Findings:
    """Judge Kueue's configuration for a job with this queue, or without a queue."""
    config = _parse_config(text)
    if queue is None and config.get("manageJobsWithoutQueueName"):
        summary = "the job names no queue, and Kueue requires one"
        reason = (
            "with manageJobsWithoutQueueName, Kueue keeps jobs without a queue suspended forever."
        )
        yield user_failure(summary, reason, "set --queue, or queue: in job.yaml.")
    frameworks = (config.get("integrations") or {}).get("frameworks")
    if queue is not None and frameworks is not None and _INTEGRATION not in frameworks:
        summary = "Kueue does not manage JobSets: its integrations are {frameworks}"
        reason = "the queue is ignored, and the job starts at once."
        remedy = f"{ASK_ADMIN} add {_INTEGRATION}."
        yield admin_failure(summary, reason, remedy, frameworks=list(frameworks) or Text("none"))
    if gates := config.get("featureGates"):
        states = [f"{name}={str(is_on).lower()}" for name, is_on in gates.items()]
        yield ok_finding("Kueue's feature gates: {gates}", gates=states)


# --- gang scheduling ------------------------------------------------------------------------------

_POD_SPEC = "spec.replicatedJobs[].template.spec.template.spec"
# The schedulers Volcano and Coscheduling find the PodGroup of a pod by these.
VOLCANO_ANNOTATION = "scheduling.k8s.io/group-name"
COSCHEDULING_LABEL = "scheduling.x-k8s.io/pod-group"


class GangServices(NamedTuple):
    """API versions that the cluster serves for gang scheduling.

    Attributes:
        kueue: Versions of Kueue's group.
        native: Versions of scheduling.k8s.io, among them those with Workloads or PodGroups.
        volcano: Versions of Volcano's group.
        coscheduling: Versions of the group of scheduler-plugins.
    """

    kueue: Sequence[str] = ()
    native: Sequence[str] = ()
    volcano: Sequence[str] = ()
    coscheduling: Sequence[str] = ()


def find_gang_field(template: Mapping[str, Any]) -> str | None:
    """Return the field of the pod spec that names the pod's Workload or PodGroup, or None."""
    fields = ("workloadRef", "schedulingGroup")
    return next((field for field in fields if field in template["spec"]), None)


def judge_gang(
    services: GangServices,
    queue: str | None,
    template: Mapping[str, Any],
    crd: Obj | None,
    pods: int,
) -> Findings:
    """Report what admits the pods of a job together: Kueue, Kubernetes, another scheduler, or none.

    Args:
        services: API versions for gang scheduling that the cluster serves.
        queue: LocalQueue of the job, if it has one.
        template: Pod template of the job.
        crd: The JobSet CRD, or None if the user may not read it.
        pods: Number of pods.
    """
    metadata, field = template.get("metadata") or {}, find_gang_field(template)
    if field is not None and crd is not None and not _has_field(crd, f"{_POD_SPEC}.{field}"):
        summary = "JobSet does not pass on {field}, by which Kubernetes schedules a gang"
        reason = (
            "Kubernetes 1.35 needs JobSet 0.11, and Kubernetes 1.36 needs JobSet 0.12 or newer."
        )
        remedy = f"{ASK_ADMIN} install it, or leave gang_scheduling out of the cluster defaults."
        yield admin_failure(summary, reason, remedy, field=field)
    elif field is not None:
        summary = (
            "Kubernetes places all {pods} pods or none (pods' {field}), if its scheduler has the "
            "feature gate GangScheduling"
        )
        yield ok_finding(summary, pods=pods, field=field)
    if queue is not None:
        yield ok_finding("Kueue admits all {pods} pods at once, by quota", pods=pods)
    elif VOLCANO_ANNOTATION in (metadata.get("annotations") or {}):
        yield ok_finding("Volcano places the {pods} pods by their PodGroup", pods=pods)
    elif COSCHEDULING_LABEL in (metadata.get("labels") or {}):
        yield ok_finding("Coscheduling places the {pods} pods by their PodGroup", pods=pods)
    elif field is None:
        reason = "those that fit take their nodes, and wait there for the others."
        summary = "nothing admits the {pods} pods together"
        advice = _advise_gang_scheduling(services)
        yield warning_finding(summary, reason, "{way}", pods=pods, way=advice)


def _advise_gang_scheduling(services: GangServices) -> Text:
    """Return how to use the best gang scheduler of this cluster, or how to get one."""
    if services.kueue:
        return Text("name a LocalQueue of Kueue: queue: in job.yaml, or in the cluster defaults.")
    if versions := [version for version in GANG_KINDS if version in services.native]:
        return Text("gang_scheduling: {version} in the cluster defaults.", version=versions[-1])
    if services.volcano:
        return Text(
            "under pod:, schedulerName: volcano and the annotation {key} with a PodGroup of "
            "Volcano's, which you create.",
            key=VOLCANO_ANNOTATION,
        )
    if services.coscheduling:
        return Text(
            "under pod:, the label {key} with a PodGroup of scheduler-plugins, which you create.",
            key=COSCHEDULING_LABEL,
        )
    return Text(
        f"{ASK_ADMIN} install Kueue, or enable the feature gates GenericWorkload and "
        "GangScheduling (Kubernetes 1.36 or newer)."
    )


def _parse_config(text: str) -> dict[str, Any]:
    """Parse a configuration file of a controller. An invalid file gives an empty mapping."""
    try:
        config = yaml.load(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError:
        return {}
    return config if isinstance(config, dict) else {}
