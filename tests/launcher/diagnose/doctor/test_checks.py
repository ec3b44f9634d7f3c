"""What each check concludes from the objects that it reads."""

from __future__ import annotations

import copy
import datetime
import re
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import pytest

from jaxlaunch.accelerators import OLDEST_DRIVER, PINNED_NCCL
from jaxlaunch.launcher.cli.doctor import count_findings, describe_findings
from jaxlaunch.launcher.diagnose import text
from jaxlaunch.launcher.diagnose.doctor import controllers, finding, namespace, nodes
from jaxlaunch.launcher.diagnose.doctor.checks import CHECKS, JOB, SERVER
from jaxlaunch.launcher.diagnose.doctor.finding import Checkpoints, Finding, Target
from jaxlaunch.launcher.errors import ApiError, UserError
from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.job.defaults import ClusterDefaults, Defaults
from jaxlaunch.launcher.kubernetes import kinds
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import Right
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.manifests import jobset
from jaxlaunch.launcher.manifests.jobset import resolve
from tests.launcher import objects
from tests.launcher.diagnose.words import replace_words

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


def list_levels(results: Any) -> list[str]:
    return [result.level for result in ([results] if isinstance(results, Finding) else results)]


# --- findings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([], 0),
        ([Finding("ok", "a"), Finding("warn", "b"), Finding("unknown", "c")], 0),
        ([finding.user_failure("a", "", "")], 2),
        ([finding.user_failure("a", "", ""), finding.admin_failure("b", "", "")], 3),
    ],
)
def test_exit_code_depends_on_who_must_fix_a_failure(results: list[Finding], code: int) -> None:
    assert finding.exit_code(results) == code


def test_report_names_each_check_once() -> None:
    results = [
        Finding("ok", "it is up", check="server"),
        Finding("fail", "it is off", "nothing works.", "turn it on.", check="queue"),
        Finding("unknown", "who knows", "you may not look.", check="queue"),
    ]
    assert list(describe_findings(results)) == [
        "ok       server           it is up",
        "fail     queue            it is off",
        "                          why: nothing works.",
        "                          fix: turn it on.",
        "                          see: launcher help troubleshooting#queues",
        "unknown                   who knows",
        "                          why: you may not look.",
    ]
    assert count_findings(results) == "1 ok, 0 warnings, 1 failure, 1 unknown"


def test_decisions_do_not_depend_on_wording_of_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    results = [
        controllers.judge_served(kinds.JOBSETS, "JobSet", ["v1"]),
        namespace.judge_namespace("team", None),
        *namespace.judge_rights(
            {Right("create", kinds.JOBSETS): False}, {"submit": [Right("create", kinds.JOBSETS)]}
        ),
    ]
    english = [record.to_json() for record in results]
    monkeypatch.setattr(text, "localize", replace_words)
    translated = [record.to_json() for record in results]
    assert finding.exit_code(results) == 3
    assert [record.keys() for record in translated] == [record.keys() for record in english]
    assert all(
        record["level"] == expected["level"]
        for record, expected in zip(translated, english, strict=True)
    )
    assert all(
        record["what"] != expected["what"]
        for record, expected in zip(translated, english, strict=True)
    )
    assert "not as v1alpha2" not in translated[0]["what"] and "v1alpha2" in translated[0]["what"]


def test_checks_are_documented_in_order() -> None:
    page = (Path(__file__).parents[4] / "docs" / "doctor.md").read_text()
    assert re.findall(r"^\| (\w[\w ]*) \|", page, re.MULTILINE) == ["check", SERVER, JOB, *CHECKS]


# --- server ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("off_s", "level", "why"),
    [(0, "ok", ""), (29, "ok", ""), (-30, "ok", "")]
    + [(60, "warn", "events"), (-60, "warn", "events"), (400, "warn", "token")],
)
def test_clock_skew_up_to_half_a_minute_is_accepted(off_s: int, level: str, why: str) -> None:
    server_time = NOON + datetime.timedelta(seconds=off_s)
    result = controllers.judge_clock(NOON, server_time, NOON + datetime.timedelta(seconds=0.3))
    assert result.level == level and why in result.reason_text


def test_clock_is_unknown_without_a_date_of_the_server() -> None:
    result = controllers.judge_clock(NOON, None, NOON)
    assert result.level == "unknown" and "Date" in result.reason_text


def test_unready_server_is_an_administrator_failure() -> None:
    assert finding.exit_code([controllers.judge_server("v1.35.4", "https://a", False)]) == 3


# --- controllers ----------------------------------------------------------------------------------


def make_crd(**rule: Any) -> dict[str, Any]:
    rules = {"items": {"properties": {"name": {}, **rule}}}
    schema = {
        "properties": {"spec": {"properties": {"failurePolicy": {"properties": {"rules": rules}}}}}
    }
    return {"spec": {"versions": [{"name": "v1alpha2", "schema": {"openAPIV3Schema": schema}}]}}


def make_gang_crd(*fields: str) -> dict[str, Any]:
    """Return JobSet's CRD with these fields of pods."""
    schema: dict[str, Any] = {"properties": {field: {"type": "object"} for field in fields}}
    for step in ("spec", "template", "spec", "template"):
        schema = {"properties": {step: schema}}
    schema = {"properties": {"spec": {"properties": {"replicatedJobs": {"items": schema}}}}}
    return {"spec": {"versions": [{"name": "v1alpha2", "schema": {"openAPIV3Schema": schema}}]}}


GANGS: dict[str, tuple[dict[str, Any], str | None, controllers.GangServices, str, str]] = {
    "Kueue": ({}, "research", controllers.GangServices(kueue=["v1beta2"]), "ok", "Kueue admits"),
    "Volcano": (
        {"metadata": {"annotations": {controllers.VOLCANO_ANNOTATION: "lm"}}},
        None,
        controllers.GangServices(volcano=["v1beta1"]),
        "ok",
        "Volcano places the 4 pods",
    ),
    "Coscheduling": (
        {"metadata": {"labels": {controllers.COSCHEDULING_LABEL: "lm"}}},
        None,
        controllers.GangServices(coscheduling=["v1alpha1"]),
        "ok",
        "Coscheduling places the 4 pods",
    ),
    "nothing, and Kueue is there": (
        {},
        None,
        controllers.GangServices(kueue=["v1beta2"], native=["v1", "v1alpha2"]),
        "warn",
        "queue: in job.yaml",
    ),
    "nothing, and Kubernetes can": (
        {},
        None,
        controllers.GangServices(native=["v1", "v1alpha2"]),
        "warn",
        "gang_scheduling: v1alpha2",
    ),
    "nothing, and Volcano is there": (
        {},
        None,
        controllers.GangServices(native=["v1"], volcano=["v1beta1"]),
        "warn",
        "schedulerName: volcano",
    ),
    "nothing, and Coscheduling is there": (
        {},
        None,
        controllers.GangServices(coscheduling=["v1alpha1"]),
        "warn",
        controllers.COSCHEDULING_LABEL,
    ),
    "nothing at all": (
        {},
        None,
        controllers.GangServices(native=["v1"]),
        "warn",
        "GenericWorkload",
    ),
}


@pytest.mark.parametrize("case", GANGS)
def test_what_admits_a_gang_is_named(case: str) -> None:
    template, queue, services, level, words = GANGS[case]
    (result,) = controllers.judge_gang(services, queue, {"spec": {}, **template}, None, 4)
    assert result.level == level
    assert words in f"{result.summary_text} {result.remedy_text}"


@pytest.mark.parametrize("field", ["workloadRef", "schedulingGroup"])
def test_jobset_that_drops_the_field_of_a_gang_is_recognized(field: str) -> None:
    template, services = {"spec": {field: {}}}, controllers.GangServices()
    other = {"workloadRef": "schedulingGroup", "schedulingGroup": "workloadRef"}[field]
    (result,) = controllers.judge_gang(services, None, template, make_gang_crd(other), 2)
    assert result.level == "fail" and f"does not pass on {field}" in result.summary_text
    for crd in (make_gang_crd(field), None):
        (result,) = controllers.judge_gang(services, None, template, crd, 2)
        assert result.level == "ok" and "places all 2 pods or none" in result.summary_text


def test_old_jobset_is_recognized_by_its_schema() -> None:
    assert list_levels(
        controllers.judge_crd(make_crd(onJobFailureMessagePatterns={"type": "array"}))
    ) == ["ok"]
    assert list_levels(controllers.judge_crd(make_crd())) == ["fail"]
    assert list_levels(controllers.judge_crd(None)) == []


def test_served_versions_are_compared_with_required_one() -> None:
    assert controllers.judge_served(kinds.JOBSETS, "JobSet", ["v1alpha2"]).level == "ok"
    assert (
        "not as v1alpha2" in controllers.judge_served(kinds.JOBSETS, "JobSet", ["v1"]).summary_text
    )
    assert (
        controllers.judge_served(kinds.JOBSETS, "JobSet", []).summary_text
        == "JobSet is not installed"
    )
    assert (
        controllers.judge_kueue([], None).level == "ok"
        and controllers.judge_kueue([], "research").level == "fail"
    )


def make_deployment(available: int, *args: str) -> dict[str, Any]:
    container = {"image": "registry.example/jobset:v0.12.0", "args": list(args)}
    status = {"availableReplicas": available} if available else {}
    return {"spec": {"template": {"spec": {"containers": [container]}}}, "status": status}


def test_controller_is_reported_with_image_and_feature_gates() -> None:
    up = controllers.judge_controller(
        "JobSet",
        make_deployment(1, "--feature-gates=A=true,B=false"),
        controllers.JOBSET_DEPLOYMENT,
    )
    assert up.level == "ok" and up.summary_text.endswith("jobset:v0.12.0, gates A=true,B=false")
    down = controllers.judge_controller("JobSet", make_deployment(0), controllers.JOBSET_DEPLOYMENT)
    assert down.level == "fail" and "default gates" in down.summary_text
    assert (
        controllers.judge_controller("JobSet", None, controllers.JOBSET_DEPLOYMENT).level
        == "unknown"
    )


@pytest.mark.parametrize(
    ("project", "gates", "config", "expected"),
    [
        ("JobSet", "", "{", "RestartJob is off and ElasticJobSet is off; launcher needs neither"),
        (
            "JobSet",
            "ElasticJobSet=true,RestartJob=false",
            "",
            "RestartJob is off and ElasticJobSet is on;",
        ),
        ("JobSet", "AllAlpha=true", "", "RestartJob is on and ElasticJobSet is on;"),
        (
            "JobSet",
            "",
            "featureGates: {RestartJob: true}",
            "RestartJob is on and ElasticJobSet is off;",
        ),
        (
            "Kueue",
            "",
            "",
            "PartialAdmission is on and ElasticJobsViaWorkloadSlices is off; neither is "
            "for JobSets",
        ),
        (
            "Kueue",
            "PartialAdmission=false",
            "",
            "PartialAdmission is off and ElasticJobsViaWorkloadSlices is off;",
        ),
    ],
)
def test_project_features_for_lost_hosts_are_reported(
    project: str, gates: str, config: str, expected: str
) -> None:
    deployment = make_deployment(1, *([f"--feature-gates={gates}"] if gates else []))
    (results,) = controllers.describe_features(project, deployment, [config])
    assert results.level == "ok" and results.summary_text.startswith(f"{project}'s {expected}")
    assert not list(controllers.describe_features(project, None, [config]))


@pytest.mark.parametrize(
    ("config", "queue", "expected"),
    [
        (
            "manageJobsWithoutQueueName: true",
            None,
            ["fail: the job names no queue, and Kueue requires one"],
        ),
        ("manageJobsWithoutQueueName: true", "research", []),
        (
            "integrations: {frameworks: [batch/job]}",
            "research",
            ["fail: Kueue does not manage JobSets"],
        ),
        ("integrations: {frameworks: [batch/job, jobset.x-k8s.io/jobset]}", "research", []),
        ("integrations: {frameworks: [batch/job]}", None, []),
        (
            "featureGates: {TopologyAwareScheduling: false}",
            None,
            ["ok: Kueue's feature gates: TopologyAwareScheduling=f"],
        ),
        ("{", None, []),
        ("text", None, []),
    ],
)
def test_kueue_configuration_is_judged_for_the_job(
    config: str, queue: str | None, expected: list[str]
) -> None:
    results = [
        f"{finding.level}: {finding.summary_text}"
        for finding in controllers.judge_kueue_config(config, queue)
    ]
    assert len(results) == len(expected) and all(map(str.startswith, results, expected))


@pytest.mark.parametrize(
    ("selector", "is_selected"),
    [
        ({}, True),
        ({"matchLabels": {"inject": "true"}}, False),
        ({"matchLabels": {"team": "vision"}}, True),
        ({"matchLabels": {"team": "text"}}, False),
        ({"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "another"}}, True),
        ({"matchExpressions": [{"key": "inject", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "job-name", "operator": "Exists"}]}, True),
    ],
)
def test_webhook_counts_if_it_may_select_an_object_of_the_job(
    selector: dict[str, Any], is_selected: bool
) -> None:
    labels = controllers.created_labels([objects.jobset(2, labels={"team": "vision"})])
    configuration = {"webhooks": [make_webhook("w", "pods", "", objectSelector=selector)]}
    webhooks = controllers.blocking_webhooks([configuration], {}, labels)
    assert bool(webhooks) is is_selected


def test_webhook_for_cluster_scope_does_not_count() -> None:
    webhook = make_webhook("w", "*", "*")
    webhook["rules"][0]["scope"] = "Cluster"
    assert not controllers.blocking_webhooks([{"webhooks": [webhook]}], {}, {})


def test_webhook_with_conditions_may_block() -> None:
    conditions = [{"name": "ours", "expression": "object.metadata.name == 'x'"}]
    configuration = {"webhooks": [make_webhook("w", "pods", "", matchConditions=conditions)]}
    webhooks = controllers.blocking_webhooks([configuration], {}, {})
    (result,) = controllers.judge_webhooks(webhooks, {})
    assert result.level == "warn" and "matchConditions" in result.reason_text


def make_webhook(name: str, resource: str, group: str, **more: Any) -> dict[str, Any]:
    rule = {"apiGroups": [group], "resources": [resource], "operations": ["CREATE"]}
    service = {"service": {"namespace": "system", "name": name}}
    return {"name": name, "rules": [rule], "clientConfig": service, **more}


def test_only_webhooks_for_objects_of_jobs_in_the_namespace_count() -> None:
    elsewhere = {"namespaceSelector": {"matchLabels": {"team": "b"}}}
    updated = make_webhook("updated", "pods", "")
    configuration = {
        "webhooks": [
            make_webhook("jobs", "jobs", "batch"),
            make_webhook("all", "*", "*"),
            make_webhook("scale", "pods/status", ""),
            make_webhook("deployments", "deployments", "apps"),
            make_webhook("ignored", "pods", "", failurePolicy="Ignore"),
            make_webhook("elsewhere", "pods", "", **elsewhere),
            {**updated, "rules": [{**updated["rules"][0], "operations": ["UPDATE", "DELETE"]}]},
            {**make_webhook("url", "pods", ""), "clientConfig": {"url": "https://a"}},
        ]
    }
    webhooks = controllers.blocking_webhooks([configuration], {"team": "a"}, {})
    assert [webhook.name for webhook in webhooks] == ["jobs", "all", "scale", "url"]
    all_webhooks = controllers.blocking_webhooks([configuration], None, {})
    assert [webhook.name for webhook in all_webhooks][-2:] == ["elsewhere", "url"]
    down = list(
        controllers.judge_webhooks(webhooks, {("system", "jobs"): 1, ("system", "scale"): 2})
    )
    assert [finding.summary_text for finding in down] == [
        "webhook all: service system/all has no ready endpoint"
    ]


@pytest.mark.parametrize(
    ("selector", "is_taken"),
    [
        ({}, True),
        ({"matchLabels": {"team": "a"}}, True),
        ({"matchLabels": {"team": "b"}}, False),
        ({"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]}, False),
        ({"matchExpressions": [{"key": "other", "operator": "NotIn", "values": ["a"]}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "Exists"}]}, True),
        ({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}, False),
        ({"matchExpressions": [{"key": "other", "operator": "DoesNotExist"}]}, True),
        ({"matchExpressions": [{"key": "other", "operator": "Exists"}]}, False),
        ({"matchExpressions": [{"key": "other", "operator": "In", "values": ["a"]}]}, False),
        ({"matchLabels": {"other": "a"}}, False),
    ],
)
def test_label_selector_matches_as_in_kubernetes(selector: dict[str, Any], is_taken: bool) -> None:
    assert controllers.selector_matches(selector, {"team": "a"}) is is_taken


def test_endpoint_without_condition_is_ready() -> None:
    conditions: list[dict[str, Any]] = [{}, {"ready": True}, {"ready": False}]
    endpoints = [{}, *({"conditions": condition} for condition in conditions[1:])]
    assert controllers.count_ready_endpoints([{"endpoints": endpoints}, {"endpoints": None}]) == 2


@pytest.mark.parametrize(
    ("status", "message", "level", "whose", "expected"),
    [
        (
            500,
            'Internal error occurred: failed calling webhook "v.kb.io": connection refused',
            "fail",
            "cluster",
            "webhook v.kb.io does not answer",
        ),
        (
            403,
            'pods is forbidden: User "u" cannot create resource "pods" in',
            "unknown",
            "yours",
            "not known",
        ),
        (403, 'violates PodSecurity "x": hostNetwork', "fail", "yours", "Pod Security rejects"),
        (
            403,
            'pods "a" is forbidden: exceeded quota: few, requested: pods=1',
            "fail",
            "cluster",
            "a ResourceQuota rejects",
        ),
        (
            403,
            "failed quota: must specify limits.cpu",
            "fail",
            "cluster",
            "a ResourceQuota rejects",
        ),
        (
            400,
            'strict decoding error: unknown field "spec.x"',
            "fail",
            "cluster",
            "the API server does not know a field",
        ),
        (
            422,
            'admission webhook "p" denied the request: no',
            "fail",
            "yours",
            "the API server rejects",
        ),
    ],
)
def test_rejection_of_dry_run_says_who_must_fix_it(
    status: int, message: str, level: str, whose: str, expected: str
) -> None:
    result = controllers.judge_dry_run(ApiError(message, None, status), "the JobSet")
    assert (result.level, result.whose) == (level, whose)
    assert expected in result.summary_text and message in result.reason_text


def test_rejection_by_admission_policy_keeps_its_message() -> None:
    reason = "JobSet a: hostPID: true is not allowed in namespace team-a. Leave it out."
    message = (
        "jobsets \"a\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied "
        f"request: {reason}"
    )
    result = controllers.judge_dry_run(ApiError(message, None, 422), "the JobSet")
    assert (result.level, result.reason_text) == ("fail", reason)
    assert result.summary_text == "ValidatingAdmissionPolicy p rejects the JobSet"


def test_existing_job_counts_as_accepted() -> None:
    error = ApiError("exists", None, 409, "AlreadyExists")
    assert controllers.judge_dry_run(error, "the JobSet").level == "ok"


# --- queues ---------------------------------------------------------------------------------------


def cluster_queue(*quotas: dict[str, str], **spec: Any) -> dict[str, Any]:
    flavors = [
        {
            "resources": [
                {"name": name, "nominalQuota": quantity} for name, quantity in quota.items()
            ]
        }
        for quota in quotas
    ]
    group = {"coveredResources": list(quotas[0]), "flavors": flavors}
    return {"spec": {"namespaceSelector": {}, "resourceGroups": [group], **spec}}


ENOUGH, LITTLE = {"cpu": "8", "memory": "16Gi"}, {"cpu": "4", "memory": "16Gi"}
REQUESTED = {"cpu": Decimal(8), "memory": Decimal(2**34)}


@pytest.mark.parametrize(
    ("queue", "expected"),
    [
        (cluster_queue(ENOUGH), ["ok: whole covers cpu, memory"]),
        (cluster_queue({"cpu": "4", "memory": "1Gi"}, ENOUGH), ["ok: whole covers"]),
        (
            cluster_queue({"cpu": "8"}),
            ["fail: whole does not cover memory, of which the job requests 16Gi"],
        ),
        (cluster_queue(LITTLE), ["fail: whole is too small: the job requests 8 of cpu (q"]),
        (cluster_queue(LITTLE, cohortName="all"), ["warn: whole is too small"]),
        (cluster_queue(ENOUGH | {"pods": "1"}), ["fail: whole is too small: the job r"]),
        (cluster_queue(ENOUGH, namespaceSelector=None), ["fail: whole does not", "ok: whole"]),
        (cluster_queue(ENOUGH, stopPolicy="Hold"), ["fail: whole is stopped", "ok: whole"]),
        (None, ["fail: whole does not exist"]),
    ],
)
def test_cluster_queue_is_judged_by_its_largest_flavor(queue: Any, expected: list[str]) -> None:
    judged = [
        f"{result.level}: {result.summary_text.removeprefix('ClusterQueue ')}"
        for result in namespace.judge_cluster_queue("whole", queue, {}, REQUESTED, 2)
    ]
    assert len(judged) == len(expected), judged
    assert all(line.startswith(start) for line, start in zip(judged, expected, strict=True)), judged


def test_missing_local_queue_suggests_existing_ones() -> None:
    result = namespace.judge_local_queue("nope", "team-a", None, ["research", "spare"])
    assert result.remedy_text == "use research or spare."
    message = "Can't submit new workloads to clusterQueue"
    condition = {"type": "Active", "status": "False", "message": message}
    idle = {"spec": {"clusterQueue": "c"}, "status": {"conditions": [condition]}}
    assert message in namespace.judge_local_queue("q", "team-a", idle, []).reason_text


# --- the namespace --------------------------------------------------------------------------------

CONTAINER = {"name": "main", "resources": {"requests": {"cpu": "2"}, "limits": {"memory": "1Gi"}}}
TEMPLATE: dict[str, Any] = {"spec": {"containers": [CONTAINER]}}
JOBSET: dict[str, Any] = {
    "spec": {
        "replicatedJobs": [
            {"replicas": 2, "template": {"spec": {"parallelism": 3, "template": TEMPLATE}}}
        ]
    }
}


JOBSET_COUNT = "count/jobsets.jobset.x-k8s.io"


@pytest.mark.parametrize(
    ("hard", "used", "expected"),
    [
        ({"pods": "6", "cpu": "12", "memory": "6Gi"}, {}, "ok"),
        ({"pods": "5"}, {}, "ResourceQuota q allows pods 5, and the job requests 6"),
        (
            {"requests.cpu": "20"},
            {"requests.cpu": "9"},
            "of which 11 is left, and the job requests 12",
        ),
        (
            {"limits.memory": "5Gi"},
            {},
            "ResourceQuota q allows limits.memory 5Gi, and the job requests 6Gi",
        ),
        ({"limits.memory": "1e12"}, {"limits.memory": "1E3"}, "ok"),
        (
            {"limits.memory": "5e9"},
            {},
            "ResourceQuota q allows limits.memory 5e9, and the job requests 6Gi",
        ),
        (
            {"count/jobs.batch": "1"},
            {},
            "ResourceQuota q allows count/jobs.batch 1, and the job requests 2",
        ),
        ({JOBSET_COUNT: "1"}, {JOBSET_COUNT: "1"}, "of which 0 is left"),
        ({"services": "0"}, {}, "ResourceQuota q allows services 0, and the job requests 1"),
        ({"secrets": "0", "requests.nvidia.com/gpu": "0"}, {}, "ok"),
    ],
)
def test_quotas_are_compared_with_requests_of_whole_job(
    hard: dict[str, str], used: dict[str, str], expected: str
) -> None:
    quota = {"metadata": {"name": "q"}, "spec": {"hard": hard}, "status": {"used": used}}
    (result,) = namespace.judge_quotas([quota], JOBSET)
    assert result.level == "ok" if expected == "ok" else expected in result.summary_text


def make_scope(name: str, operator: str = "Exists", *values: str) -> dict[str, Any]:
    term = {"scopeName": name, "operator": operator, "values": list(values)}
    return {"scopeSelector": {"matchExpressions": [term]}}


@pytest.mark.parametrize(
    ("scopes", "pod_spec", "applies"),
    [
        ({}, {}, True),
        ({"scopes": ["BestEffort"]}, {}, False),
        ({"scopes": ["NotBestEffort"]}, {}, True),
        ({"scopes": ["Terminating"]}, {}, False),
        ({"scopes": ["NotTerminating", "BestEffort"]}, {}, False),
        ({"scopes": ["Terminating"]}, {"activeDeadlineSeconds": 60}, True),
        (make_scope("PriorityClass"), {}, False),
        (make_scope("PriorityClass", "In", "high"), {"priorityClassName": "high"}, True),
        (make_scope("PriorityClass", "In", "low"), {"priorityClassName": "high"}, False),
        (make_scope("PriorityClass", "NotIn", "low"), {"priorityClassName": "high"}, True),
        (make_scope("PriorityClass", "DoesNotExist"), {"priorityClassName": "high"}, False),
        (make_scope("CrossNamespacePodAffinity"), {}, True),
    ],
)
def test_quota_counts_only_for_pods_in_its_scopes(
    scopes: dict[str, Any], pod_spec: dict[str, Any], applies: bool
) -> None:
    jobset = copy.deepcopy(JOBSET)
    pod_template(jobset)["spec"].update(pod_spec)
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "0"}, **scopes}}
    (result,) = namespace.judge_quotas([quota], jobset)
    assert (result.level == "fail") is applies


@pytest.mark.parametrize(
    ("enforced", "level", "expected"),
    [
        (None, "ok", "no Pod Security level of its own"),
        ("baseline", "ok", "enforces Pod Security level baseline"),
        ("restricted", "fail", "and the pods meet only baseline"),
        ("strictest", "unknown", "strictest"),
    ],
)
def test_pod_security_level_of_namespace_is_compared_with_pods(
    enforced: str | None, level: str, expected: str
) -> None:
    labels = {} if enforced is None else {"pod-security.kubernetes.io/enforce": enforced}
    result = namespace.judge_pod_security("team-a", labels, TEMPLATE)
    assert result.level == level and expected in result.summary_text


def test_logs_need_the_jobset_too() -> None:
    verbs = {
        right.verb for right in namespace.command_rights()["logs"] if right.kind is kinds.JOBSETS
    }
    assert verbs == {"get", "list", "watch"}


def test_missing_right_names_commands_that_need_it() -> None:
    needed = namespace.command_rights()
    granted = {right: True for rights in needed.values() for right in rights}
    assert list_levels(namespace.judge_rights(granted, needed)) == ["ok"]
    denied = {Right("patch", kinds.JOBSETS): False, Right("create", kinds.JOBSETS): False}
    results = namespace.judge_rights(granted | denied, needed)
    missing = "missing RBAC permissions: {} jobsets.jobset.x-k8s.io"
    assert {(result.reason_text, result.level, result.summary_text) for result in results} == {
        ("needed by launcher submit.", "fail", missing.format("create")),
        ("needed by launcher stop.", "warn", missing.format("patch")),
    }


def test_only_jobs_with_a_secret_need_the_right_to_create_secrets() -> None:
    granted = {right: True for rights in namespace.command_rights().values() for right in rights}
    assert not any(right.kind is kinds.SECRETS for right in granted)
    needed = namespace.command_rights((*namespace.USUAL_KINDS, kinds.SECRETS))
    (result,) = namespace.judge_rights({**granted, Right("create", kinds.SECRETS): False}, needed)
    assert (result.level, result.summary_text) == (
        "fail",
        "missing RBAC permissions: create secrets",
    )
    assert result.reason_text == "needed by launcher submit."


def test_terminating_namespace_is_a_failure() -> None:
    terminating = {"metadata": {"deletionTimestamp": "now"}}
    assert namespace.judge_namespace("a", terminating).level == "fail"


# --- nodes ----------------------------------------------------------------------------------------


def make_node(allocatable: dict[str, str], taint: str = "", **labels: str) -> dict[str, Any]:
    return {
        "metadata": {"labels": {key.replace("_", "/"): value for key, value in labels.items()}},
        "spec": {"taints": [{"key": taint, "effect": "NoSchedule"}] if taint else []},
        "status": {"allocatable": allocatable},
    }


def gpu_pod(*products: str) -> dict[str, Any]:
    term = {"key": "gpu/product", "operator": "In", "values": list(products)}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [term]}]}
    requests = {"requests": {"cpu": "4", "nvidia.com/gpu": "8"}}
    return {
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}},
        "containers": [{"name": "main", "resources": requests}],
    }


BIG = {"cpu": "100", "nvidia.com/gpu": "8"}


NODE_A = make_node(BIG, gpu_product="A")


SMALL_NODE_A = make_node({"cpu": "100", "nvidia.com/gpu": "4"}, gpu_product="A")


@pytest.mark.parametrize(
    ("all_nodes", "pods", "level", "expected"),
    [
        (
            [NODE_A, make_node(BIG, gpu_product="B")],
            2,
            "ok",
            "room for the job's 2 pods on 2 nodes",
        ),
        ([NODE_A], 2, "fail", "room for 1 of the job's 2 pods on 1 node"),
        ([make_node(BIG, gpu_product="C")], 1, "fail", "no node has gpu/product in A, B"),
        ([], 1, "fail", "none of 0 nodes"),
        (
            [make_node(BIG, "busy", gpu_product="A")],
            1,
            "fail",
            "untolerated taints: busy:NoSchedule",
        ),
        ([SMALL_NODE_A], 1, "fail", "a pod requests nvidia.com/gpu 8, the largest node has 4"),
    ],
)
def test_nodes_are_compared_with_labels_taints_and_requests_of_pods(
    all_nodes: list[dict[str, Any]], pods: int, level: str, expected: str
) -> None:
    result = nodes.judge_room(all_nodes, gpu_pod("A", "B"), pods, has_autoscaler=False)
    assert result.level == level and expected in result.summary_text
    if level == "fail":
        assert (
            nodes.judge_room(all_nodes, gpu_pod("A", "B"), pods, has_autoscaler=True).level
            == "warn"
        )


def test_accelerators_are_counted_by_type_label() -> None:
    l4 = make_node(BIG, **{"nvidia.com_gpu.product": "NVIDIA-L4"})
    result = nodes.count_accelerators([l4, l4, make_node({"cpu": "4"})])
    assert result.summary_text == "3 nodes with 16 nvidia.com/gpu NVIDIA-L4"
    product = {"amd.com_gpu.product-name": "AMD_Instinct_MI300X_OAM"}
    result = nodes.count_accelerators([make_node({"cpu": "4", "amd.com/gpu": "8"}, **product)])
    assert result.summary_text == "1 node with 8 amd.com/gpu AMD_Instinct_MI300X_OAM"


def make_driver_node(major: str, product: str = "A") -> dict[str, Any]:
    return make_node(BIG, gpu_product=product, **{"nvidia.com_cuda.driver.major": major})


DRIVER_550 = make_driver_node("550")


@pytest.mark.parametrize(
    ("all_nodes", "image", "level", "expected"),
    [
        (
            [DRIVER_550, make_driver_node("580")],
            "r.example/train:1.2.3-cuda13",
            "warn",
            "drivers 550 (1 node), 580 (1 node): 550 is too old for CUDA 13 of image "
            "train:1.2.3-cuda13, which needs 580",
        ),
        (
            [make_driver_node("470")],
            "train-cuda12@sha256:0",
            "warn",
            "470 is too old for CUDA 12",
        ),
        (
            [DRIVER_550],
            "train:1-cuda12",
            "ok",
            "drivers 550 (1 node); an image needs at least 525 for CUDA 12",
        ),
        (
            [make_driver_node("550", product="C"), make_driver_node("580")],
            "train:1-cuda13",
            "ok",
            "NVIDIA drivers 580 (1 node)",
        ),
        ([DRIVER_550], "r.example/cuda13/train:1", "ok", "NVIDIA drivers 550 (1 node)"),
    ],
)
def test_driver_too_old_for_cuda_of_image_is_named(
    all_nodes: list[dict[str, Any]], image: str, level: str, expected: str
) -> None:
    spec = gpu_pod("A", "B")
    spec["containers"][0]["image"] = image
    (result,) = nodes.judge_drivers(all_nodes, spec)
    assert result.level == level and expected in result.summary_text
    if level == "warn":
        assert ("EXTRA=cuda12" in result.remedy_text) == (image.endswith("cuda13"))


def render_pod(settings: str, users: dict[Any, Any]) -> dict[str, Any]:
    spec = load.parse_job(f"name: a\nimage: i\nplatform: gke\ncommand: [a]\n{settings}")
    rendered = jobset.render(resolve(spec, ClusterDefaults(Defaults(users=users))))[0]
    return dict(pod_template(rendered)["spec"])


V5E = "accelerator: {type: v5e, topology: 2x4}"
RDMA = "accelerator: {type: h100}\nhosts: 2\nnetwork: {profile: rdma, resource: rdma/ib}"


@pytest.mark.parametrize(
    ("settings", "users", "summary", "fix"),
    [
        (
            V5E,
            {"v5e": 1000},
            "whether user 1000 of the pods may open /dev/vfio/0 on the",
            "or users: {v5e: root} in",
        ),
        (V5E, {"v5e": "privileged"}, None, ""),
        (
            RDMA,
            {"h100": 2000},
            "how much memory user 2000 of the pods may pin on the nodes for network rdma",
            "infin",
        ),
        (RDMA, {"h100": "root"}, None, ""),
        (
            RDMA + "\npod: {spec: {securityContext: {runAsUser: 0}}}",
            {},
            "how much memory user 0 of the pods",
            "root",
        ),
    ],
)
def test_device_access_of_non_root_user_is_unknown(
    settings: str, users: dict[Any, Any], summary: str | None, fix: str
) -> None:
    results = list(nodes.judge_device_access(render_pod(settings, users)))
    assert [result.level for result in results] == ([] if summary is None else ["unknown"])
    for result in results:
        assert (
            result.summary_text.startswith(str(summary))
            and fix in result.remedy_text
            and "kubectl debug node/NODE" in result.remedy_text
        )


def test_restricted_namespace_explains_root_of_tpu_pods() -> None:
    for users, rights in ({}, "no capability"), ({"v5e": "root"}, "DAC_OVERRIDE"):
        (result,) = nodes.judge_device_access(render_pod(V5E, users))
        expected = f"root with {rights}, so that they can open /dev/vfio/0"
        assert result.level == "ok" and expected in result.summary_text
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    rejection = namespace.judge_pod_security("team", labels, {"spec": render_pod(V5E, {})})
    assert rejection.level == "fail" and "pods on TPUs are root" in rejection.remedy_text
    assert "users: {v5e: 1000}" in rejection.remedy_text
    template = {"spec": render_pod(V5E, {"v5e": 1000})}
    assert namespace.judge_pod_security("team", labels, template).level == "ok"


@pytest.mark.parametrize(
    ("settings", "level", "words"),
    [
        (
            "{type: h100}\nhosts: 2\nnetwork: gpudirect-tcpxo",
            "ok",
            "NCCL 2.28.7 of the nodes' GPUDirect-TCPXO",
        ),
        (
            "{type: h100}\nhosts: 2\nnetwork: gpudirect-tcpxo\nenv: {LD_PRELOAD: /a.so}",
            "warn",
            "2.32.3 in one of",
        ),
        (
            "{type: h200}\nhosts: 2\nnetwork: gpudirect-rdma",
            "ok",
            "gIB works with NCCL 2.25 or newer",
        ),
        ("{type: h100}\nhosts: 2", None, ""),
    ],
)
def test_nccl_of_network_plugin_is_compared_with_loaded_one(
    settings: str, level: str | None, words: str
) -> None:
    results = list(nodes.judge_nccl(render_pod(f"accelerator: {settings}", {})))
    assert [result.level for result in results] == ([] if level is None else [level])
    assert all(words in result.summary_text for result in results)


def test_nccl_of_images_is_the_pinned_version() -> None:
    for cuda in OLDEST_DRIVER:
        text = (Path(__file__).parents[4] / "requirements" / f"cuda{cuda}.txt").read_text()
        assert f"nvidia-nccl-cu{cuda}=={PINNED_NCCL} " in text


def test_documented_driver_minimum_is_the_checked_one() -> None:
    text = (Path(__file__).parents[4] / "docs" / "kubernetes.md").read_text()
    rows = re.findall(r"^\| `cuda(\d+)` \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert {(int(extra), int(cuda)): int(oldest) for extra, cuda, oldest in rows} == {
        (cuda, cuda): oldest for cuda, oldest in OLDEST_DRIVER.items()
    }


def test_unlabelled_drivers_and_pods_without_gpus_are_skipped() -> None:
    cpu_pod = {"containers": [{"name": "main"}]}
    assert list_levels(nodes.judge_drivers([NODE_A], gpu_pod("A"))) == []
    assert list_levels(nodes.judge_drivers([make_driver_node("470")], cpu_pod)) == []


def test_dns_is_judged_by_ready_endpoints() -> None:
    service = [{"metadata": {"name": "kube-dns"}}]
    for services, ready, level in ([], 0, "unknown"), (service, 0, "fail"), (service, 2, "ok"):
        assert list_levels(nodes.judge_dns(services, ready)) == [level]


# --- what pods name -------------------------------------------------------------------------------


def make_claim(mode: str, phase: str = "Bound") -> dict[str, Any]:
    return {"spec": {"accessModes": [mode]}, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("claim", "hosts", "is_read_only", "level"),
    [
        (make_claim("ReadWriteMany"), 4, False, "ok"),
        (make_claim("ReadWriteOnce"), 4, False, "fail"),
        (make_claim("ReadWriteOnce"), 1, False, "ok"),
        (make_claim("ReadOnlyMany"), 4, True, "ok"),
        (make_claim("ReadOnlyMany"), 4, False, "fail"),
        (make_claim("ReadWriteMany", "Pending"), 4, False, "warn"),
        (make_claim("ReadWriteMany", "Lost"), 4, False, "fail"),
        (None, 1, False, "fail"),
    ],
)
def test_claim_must_be_bound_and_mountable_by_all_hosts(
    claim: Any, hosts: int, is_read_only: bool, level: str
) -> None:
    assert (
        namespace.judge_claim("ckpt", claim, hosts=hosts, is_read_only=is_read_only).level == level
    )


def make_claim_of_size(size: str | None, requested: str = "10Gi") -> dict[str, Any]:
    capacity = {} if size is None else {"capacity": {"storage": size}}
    return {"spec": {"resources": {"requests": {"storage": requested}}}, "status": capacity}


@pytest.mark.parametrize(
    ("claim", "levels", "words"),
    [
        (
            make_claim_of_size("20Gi"),
            ["ok"],
            "of 20Gi has room for 12.0 GiB of checkpoints, 3 kept and one being written",
        ),
        (make_claim_of_size("12Gi"), ["ok"], "12Gi has room"),
        (
            make_claim_of_size("11Gi", requested="20Gi"),
            ["warn"],
            "of 11Gi has no room for 12.0 GiB of checkpoints",
        ),
        (make_claim_of_size(None, requested="1Ti"), ["ok"], "of 1Ti has room"),
        (make_claim_of_size(None), ["warn"], "of 10Gi has no room"),
        ({"spec": {}}, [], ""),
        (None, [], ""),
    ],
)
def test_claim_must_have_room_for_checkpoints(claim: Any, levels: list[str], words: str) -> None:
    results = list(
        namespace.judge_checkpoint_room(
            Checkpoints("ckpt", kept_count=3, bytes=12 * 1024**3), claim
        )
    )
    assert [result.level for result in results] == levels
    assert all(words in result.summary_text for result in results)
    assert all(
        "; if its storage enforces that, " in result.reason_text
        for result in results
        if result.level == "warn"
    )


def test_untraceable_checkpoint_size_is_unknown() -> None:
    def fail_estimate() -> Checkpoints | None:
        raise UserError("trainer: importing mine failed")

    template = {"spec": {"template": {"spec": {"containers": []}}}}
    jobset = {"spec": {"replicatedJobs": [{"template": template}]}}
    target = Target(cast(Cluster, None), "team", [jobset], fail_estimate)
    (result,) = CHECKS["volumes"].run(target)
    assert (result.level, result.reason_text) == ("unknown", "trainer: importing mine failed")


def test_references_of_pods_are_collected_from_all_fields() -> None:
    key = {"valueFrom": {"secretKeyRef": {"name": "s", "key": "token"}}}
    optional = {"valueFrom": {"secretKeyRef": {"name": "o", "key": "k", "optional": True}}}
    spec = {
        "volumes": [
            {"name": "a", "persistentVolumeClaim": {"claimName": "ckpt"}},
            {"name": "b", "persistentVolumeClaim": {"claimName": "data", "readOnly": True}},
            {
                "name": "c",
                "secret": {"secretName": "files", "items": [{"key": "cert", "path": "c"}]},
            },
            {"name": "d", "configMap": {"name": "settings"}},
        ],
        "initContainers": [{"name": "i", "envFrom": [{"secretRef": {"name": "all"}}]}],
        "containers": [
            {"name": "m", "env": [{"name": "A", **key}, {"name": "B", **optional}, {"name": "C"}]}
        ],
    }
    assert namespace.mounted_claims(spec) == {"ckpt": False, "data": True}
    assert dict(namespace.find_references(spec, kinds.SECRETS)) == {
        "files": ("cert",),
        "all": (),
        "s": ("token",),
    }
    assert dict(namespace.find_references(spec, kinds.CONFIGMAPS)) == {"settings": ()}


def test_missing_key_lists_existing_keys_without_values() -> None:
    secret = {"data": {"password": "aHVudGVyMg=="}}
    result = namespace.judge_reference("Secret", namespace.Reference("s", ("token",)), secret)
    assert result.level == "fail" and "it has password" in result.remedy_text
    assert "aHVudGVyMg" not in str(result)


@pytest.mark.parametrize(
    ("secret", "level"),
    [
        ({"type": "kubernetes.io/dockerconfigjson"}, "ok"),
        ({"type": "Opaque"}, "fail"),
        (None, "fail"),
    ],
)
def test_pull_secret_must_be_of_kubelet_type(secret: dict[str, str] | None, level: str) -> None:
    assert namespace.judge_pull_secret("p", secret).level == level
