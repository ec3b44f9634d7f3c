"""What the chart makes: by Kubernetes' own schemas, no right too many, no secret, no name twice."""

from __future__ import annotations

import json
import re
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.accelerators import ACCELERATORS
from jaxlaunch.launcher.diagnose.doctor import controllers, namespace
from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.kubernetes import pod_rules
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.launcher.kubernetes.labels import JOB_LABEL
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.manifests import jobset
from jaxlaunch.launcher.manifests.jobset import resolve
from jaxlaunch.launcher.platforms import gke, table
from tests import golden, needs
from tests.helm.charts import CHART, Helm, Object, RefusedError, documents, find_object
from tests.helm.test_chart import EVERYTHING, NEWEST, OLDEST
from tests.launcher.manifests.test_jobset import EXAMPLES, render_file
from tests.lint.release import installed

# Kinds of CRDs, which the schemas of Kubernetes do not know. Kueue's own schemas and webhooks judge
# the first, on a real cluster.
FOREIGN = {"kueue.x-k8s.io/v1beta2", "monitoring.coreos.com/v1"}
# The rights that reach beyond the namespace, all of them to look.
WIDE = {
    "": {"nodes", "namespaces", "services"},
    "scheduling.k8s.io": {"priorityclasses"},
    "node.k8s.io": {"runtimeclasses"},
    "kueue.x-k8s.io": {"clusterqueues", "resourceflavors", "topologies", "workloadpriorityclasses"},
    "admissionregistration.k8s.io": {
        "mutatingwebhookconfigurations",
        "validatingwebhookconfigurations",
    },
    "apiextensions.k8s.io": {"customresourcedefinitions"},
    "discovery.k8s.io": {"endpointslices"},
    "apps": {"deployments"},
}
GOLDEN = Path(__file__).parent / "golden"
CASES = {"nothing": {}, "everything": EVERYTHING}


@pytest.fixture(params=CASES)
def objects(helm: Helm, request: pytest.FixtureRequest) -> list[Object]:
    return helm.render(CASES[request.param])


@pytest.mark.parametrize("case", CASES)
def test_the_chart_renders_to_its_golden_objects(helm: Helm, case: str) -> None:
    """But for the rules and dashboards, which are files of their own."""
    made = {
        path: text
        for path, text in helm.files(CASES[case]).items()
        if not path.startswith("monitoring/")
    }
    golden.compare(list(documents(made)), GOLDEN / f"{case}.yaml")


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_one_of_the_oldest_and_of_the_newest_kubernetes(
    helm: Helm, objects: list[Object], version: str
) -> None:
    kubernetes_objects = [item for item in objects if item["apiVersion"] not in FOREIGN]
    assert len(kubernetes_objects) >= 6
    assert helm.validate(kubernetes_objects, version) == version.removesuffix(".0")


def test_the_schemas_see_what_is_wrong(helm: Helm, objects: list[Object]) -> None:
    role = find_object(objects, "Role", "team-viewer")
    with pytest.raises(RefusedError, match="ruels"):
        helm.validate([role | {"ruels": []}], OLDEST)
    with pytest.raises(RefusedError, match="schema for kind"):
        helm.validate([role | {"kind": "Roll"}], OLDEST)


def test_a_template_makes_one_kind_of_object(helm: Helm) -> None:
    for path, text in helm.files(EVERYTHING).items():
        if path.endswith(".yaml"):
            kinds = {item["kind"].lower() for item in yaml.safe_load_all(text) if item}
            assert len(kinds) == 1, f"{path}: {kinds or 'nothing, though everything is asked for'}"


def test_everything_is_labelled(objects: list[Object]) -> None:
    for item in objects:
        labels = item["metadata"]["labels"]
        assert (
            labels["app.kubernetes.io/instance"] == "team"
            and labels["app.kubernetes.io/managed-by"] == "Helm"
        )
        assert all(isinstance(value, str) and len(value) <= 63 for value in labels.values())


def test_what_needs_a_crd_or_reaches_beyond_the_namespace_but_the_admission_policy_is_off(
    helm: Helm,
) -> None:
    made = helm.render({"defaults": {"image": "i"}})
    assert not [item for item in made if item["apiVersion"] in FOREIGN]
    beyond = {item["kind"] for item in made if item["metadata"].get("namespace") != "ns"}
    assert beyond == {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
    switched_off = helm.render({"admissionPolicy": {"enabled": False}})
    assert all(item["metadata"]["namespace"] == "ns" for item in switched_off)


# --- rights ---------------------------------------------------------------------------------------


def test_no_right_is_a_star_and_none_reads_a_secret(objects: list[Object]) -> None:
    for item in objects:
        assert item["kind"] != "Secret"
        for rule in item.get("rules", []):
            assert "*" not in {*rule["verbs"], *rule["resources"], *rule["apiGroups"]}
            assert "secrets" not in rule["resources"] or rule["verbs"] == ["create"]
    assert not re.search(r"(?i)password|token:|BEGIN [A-Z ]*PRIVATE KEY", json.dumps(objects))


def test_a_submitter_s_rights_are_those_of_the_installed_role(helm: Helm) -> None:
    made = helm.render(EVERYTHING | {"rbac": EVERYTHING["rbac"] | {"gangSecrets": True}})
    # The policy of install.yaml knows by this right whom it judges, that of the chart by name.
    *rules, mark = installed("ClusterRole", "jaxlaunch-user")["rules"]
    assert find_object(made, "Role", "team-submitter")["rules"] == rules
    assert mark == {"apiGroups": ["jaxlaunch.io"], "resources": ["jobs"], "verbs": ["submit"]}
    assert (
        find_object(made, "ClusterRole")["rules"]
        == installed("ClusterRole", "jaxlaunch-cluster-reader")["rules"]
    )


@pytest.mark.parametrize(
    ("asked", "is_judged", "may"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_submitters_may_create_but_never_read_secrets_if_the_policy_judges_them_or_by_request(
    helm: Helm, asked: bool | None, is_judged: bool, may: bool
) -> None:
    made = helm.render({"rbac": {"gangSecrets": asked}, "admissionPolicy": {"enabled": is_judged}})
    secret_rules = [
        rule
        for rule in find_object(made, "Role", "team-submitter")["rules"]
        if "secrets" in rule["resources"]
    ]
    assert (
        secret_rules == [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]}] * may
    )


def test_a_viewer_only_looks(helm: Helm) -> None:
    rules = find_object(helm.render({}), "Role", "team-viewer")["rules"]
    assert {verb for rule in rules for verb in rule["verbs"]} == {"get", "list", "watch"}
    (maps,) = [rule for rule in rules if "configmaps" in rule["resources"]]
    assert maps["resourceNames"] == ["jaxlaunch"]


def test_a_viewer_reads_what_a_job_s_pods_are_given_by_default(helm: Helm) -> None:
    """Without it `launcher doctor` cannot tell whether a job that names no resources gets any."""
    rules = find_object(helm.render({}), "Role", "team-viewer")["rules"]
    assert {"get", "list"} <= {
        verb for rule in rules if "limitranges" in rule["resources"] for verb in rule["verbs"]
    }


def test_a_cluster_reader_s_rights_name_the_objects_whose_names_are_known(helm: Helm) -> None:
    """Those that `launcher doctor` reads by name."""
    rules = {
        resource: rule
        for rule in find_object(helm.render(EVERYTHING), "ClusterRole")["rules"]
        for resource in rule["resources"]
    }
    names_by_resource = {
        "deployments": [controllers.JOBSET_DEPLOYMENT[1], controllers.KUEUE_DEPLOYMENT[1]],
        "customresourcedefinitions": [JOBSETS.resource],
    }
    for resource, names in names_by_resource.items():
        assert (rules[resource]["resourceNames"], rules[resource]["verbs"]) == (names, ["get"])


def test_no_right_reaches_beyond_the_namespace_but_those_listed(objects: list[Object]) -> None:
    for item in objects:
        if item["kind"] == "ClusterRole":
            for rule in item["rules"]:
                (group,) = rule["apiGroups"]
                assert set(rule["resources"]) <= WIDE[group] and set(rule["verbs"]) <= {
                    "get",
                    "list",
                }
    wide = {item["kind"] for item in objects if "namespace" not in item["metadata"]}
    assert wide <= {
        "ClusterRole",
        "ClusterRoleBinding",
        "ClusterQueue",
        "ResourceFlavor",
        "PriorityClass",
        "WorkloadPriorityClass",
        "Namespace",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionPolicyBinding",
    }


def test_bindings_name_who_was_named(helm: Helm) -> None:
    made = helm.render(EVERYTHING)
    group = {"kind": "Group", "name": "oidc:team-a", "apiGroup": "rbac.authorization.k8s.io"}
    account = {"kind": "ServiceAccount", "name": "ci", "namespace": "ns"}
    user = {"kind": "User", "name": "eve@example.com", "apiGroup": "rbac.authorization.k8s.io"}
    assert find_object(made, "RoleBinding", "team-submitter")["subjects"] == [group, account]
    assert find_object(made, "RoleBinding", "team-viewer")["subjects"] == [user]
    assert find_object(made, "ClusterRoleBinding")["subjects"] == [group, account, user]


# --- the admission policy: what it does is shown in tests/cluster/test_chart_admission.py ---------


def expressions(spec: dict[str, Any]) -> dict[str, str]:
    """CEL of each variable."""
    return {variable["name"]: variable["expression"] for variable in spec["variables"]}


def tcpxo_pod(**more: Any) -> dict[str, Any]:
    """The pod template of a job with the network gpudirect-tcpxo, its daemon's image `rxdm:1`."""
    fast = load.parse_job(
        "name: a\nimage: i\naccelerator: {type: h100, per_host: 8}\nnetwork: "
        "gpudirect-tcpxo\ncommand: [a]"
    )
    cluster = defaults.parse_defaults(
        yaml.safe_dump({"platform": "gke", "tcpxo": {"image": "rxdm:1"}} | more)
    )
    return dict(pod_template(jobset.render(resolve(fast, cluster))[0]))


def policy_of(helm: Helm, **values: Any) -> dict[str, Any]:
    spec = find_object(helm.render(values), "ValidatingAdmissionPolicy")["spec"]
    assert isinstance(spec, dict)
    return spec


def test_the_admission_policy_lets_through_what_the_cluster_defaults_make_jobs_need(
    helm: Helm,
) -> None:
    def has(spec: dict[str, Any], text: str) -> bool:
        return text in json.dumps([spec["variables"], spec["validations"]])

    closed = policy_of(helm)
    assert has(closed, "hostNetwork") and has(closed, "hostPID") and has(closed, "hostIPC")
    opened = policy_of(
        helm,
        defaults={
            "network": {"h100": "hostnetwork", "a100": {"profile": "rdma", "resource": "rdma/ib"}}
        },
    )
    assert not has(opened, "hostNetwork") and has(opened, "hostPID") and has(opened, "hostIPC")
    tcpxo = policy_of(helm, defaults={"tcpxo": {"image": "rxdm:1"}})
    mounted = [volume for volume in tcpxo_pod()["spec"]["volumes"] if "hostPath" in volume]
    assert len(mounted) == 4
    for volume in mounted:
        path = json.dumps(json.dumps(volume["hostPath"]["path"]))[1:-1]
        assert has(tcpxo, path) and not has(closed, path)
    for asked in (
        {"gib": {"networks": [f"rdma-{number}" for number in range(8)]}},
        {"network": {"h200": "gpudirect-rdma"}},
    ):
        for path in gke.GIB_FOLDERS.value:
            assert has(policy_of(helm, defaults=asked), json.dumps(json.dumps(path))[1:-1])
    account = json.dumps(json.dumps("trainer"))[1:-1]
    assert has(policy_of(helm, defaults={"service_account": "trainer"}), account) and not has(
        closed, account
    )


def test_the_admission_policy_knows_no_resource_of_a_plugin(helm: Helm) -> None:
    by_variable = expressions(policy_of(helm, defaults={"users": {"plugin": "root"}}))
    assert "google.com/tpu" in by_variable["roots"]
    assert "nvidia.com" not in by_variable["roots"]


@pytest.mark.parametrize("kind", [name for name in ACCELERATORS if name != "plugin"])
def test_the_admission_policy_lets_pods_be_root_that_request_the_accelerator_alone(
    helm: Helm, kind: str
) -> None:
    resource = table.RESOURCE_NAMES.get(ACCELERATORS[kind].platform)
    for user, may in (("root", ["roots"]), ("privileged", ["roots", "privileged"]), (2000, [])):
        spec = policy_of(helm, defaults={"users": {kind: user}})
        cel_by_variable = expressions(spec)
        validations = str(spec["validations"])
        judged = {
            name
            for name in ("roots", "privileged")
            if f"size(variables.{name}) == 0" in validations
        }
        if resource is None:  # cpu: no resource tells its pods from others
            assert judged == {"roots", "privileged"} - set(may)
            continue
        assert judged == {"roots", "privileged"}
        named = {
            name
            for name in judged
            if resource.value
            in json.loads(cel_by_variable[name].split("name in ")[1].split("\n")[0])
        }
        above_zero = 'quantity(string(main.resources.limits[name])).isGreaterThan(quantity("0"))'
        assert all(above_zero in cel_by_variable[name] for name in judged)
        assert named == set(may)
        assert ("IPC_LOCK" in cel_by_variable["capabilities"]) == (user == "root")


def test_the_admission_policy_exempts_the_tcpxo_daemon_as_jobs_have_it_and_no_other_container(
    helm: Helm,
) -> None:
    assert "filter" not in expressions(policy_of(helm))["judged"]
    judged = expressions(policy_of(helm, defaults={"tcpxo": {"image": "rxdm:1"}}))["judged"]
    pod = tcpxo_pod()["spec"]
    (daemon,) = pod["initContainers"]
    host = {
        volume["name"]: volume["hostPath"]["path"]
        for volume in pod["volumes"]
        if "hostPath" in volume
    }
    mounts = {mount["mountPath"]: host[mount["name"]] for mount in daemon["volumeMounts"]}

    def cel(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), sort_keys=True)

    (variable,) = daemon["env"]
    for text in (
        f"c.name == {cel(daemon['name'])} && ",
        f'image.orValue("") == {cel(daemon["image"])}\n',
        f"command.orValue([]) == {cel(daemon['command'])} && ",
        f"args.orValue([]) == {cel(daemon['args'])}\n",
        f'e.name == {cel(variable["name"])} && e.?value.orValue("") == {cel(variable["value"])})',
        f'orValue("") == {cel(mounts)}[',
        f"name in {json.dumps(daemon['securityContext']['capabilities']['add'])})",
        'name in ["nvidia.com/gpu"]',
    ):
        assert text in judged, text
    keys = re.search(r"c\.all\(key, key in (\[.*?\])\)", judged)
    assert keys is not None and daemon.keys() <= set(json.loads(keys[1]))
    assert not {"lifecycle", "startupProbe", "livenessProbe", "envFrom"} & set(json.loads(keys[1]))


def test_the_admission_policy_refuses_what_may_become_root_where_the_level_does_not(
    helm: Helm,
) -> None:
    def refuses(defaults: dict[str, Any], **policy: bool) -> bool:
        made = policy_of(helm, defaults=defaults, admissionPolicy=policy)
        return "size(variables.escalating) == 0" in json.dumps(made["validations"])

    tcpxo = {"tcpxo": {"image": "rxdm:1"}}
    assert (
        refuses({"users": {"v5e": "root"}})
        and refuses(tcpxo)
        and not refuses({})
        and not refuses({"users": {"v5e": 5}})
    )
    assert not refuses({"users": {"cpu": "root"}})
    assert not refuses(tcpxo, root=True) and not refuses(tcpxo, privileged=True)
    for users in ({}, {"h100": "root"}):
        (main,) = tcpxo_pod(users=users)["spec"]["containers"]
        assert main["securityContext"]["allowPrivilegeEscalation"] is False


def test_the_admission_policy_judges_every_submitter_but_no_group_that_controllers_are_in(
    helm: Helm,
) -> None:
    subjects = [
        {"kind": "Group", "name": "system:authenticated"},
        {"kind": "Group", "name": "system:serviceaccounts"},
        {"kind": "Group", "name": "team-a"},
        {"kind": "ServiceAccount", "name": "ci", "namespace": "build"},
    ]
    who, *_ = policy_of(helm, rbac={"submitters": subjects})["matchConditions"]
    assert 'in ["system:serviceaccount:build:ci"]' in who["expression"]
    assert 'in ["team-a"]' in who["expression"]


def test_the_admission_policy_is_for_the_release_s_namespaces_alone(helm: Helm) -> None:
    (expression,) = policy_of(helm, namespaces=["scratch"])["matchConstraints"][
        "namespaceSelector"
    ]["matchExpressions"]
    assert expression == {
        "key": "kubernetes.io/metadata.name",
        "operator": "In",
        "values": ["ns", "scratch"],
    }


# --- networks -------------------------------------------------------------------------------------


def test_only_prometheus_of_the_namespace_that_the_values_name_may_scrape(helm: Helm) -> None:
    for values, named in (
        ({}, "monitoring"),
        ({"defaults": {"prometheus": {"namespace": "metrics"}}}, "metrics"),
    ):
        cluster = defaults.read_config_map(
            find_object(helm.render(values), "ConfigMap"), "the chart's"
        )
        job = load.parse_job("name: a\nimage: i\nhosts: 2\naccelerator: {type: cpu}\ncommand: [a]")
        policy = find_object(jobset.render(resolve(job, cluster)), "NetworkPolicy")
        _, scrapes = policy["spec"]["ingress"]
        (peer,) = scrapes["from"]
        assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": named}}


def test_egress_is_limited_where_asked_and_hosts_still_reach_each_other(helm: Helm) -> None:
    assert [
        item["spec"]["policyTypes"] for item in helm.render({}) if item["kind"] == "NetworkPolicy"
    ] == [["Ingress"]]
    bucket = {"to": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "ports": [{"port": 443}]}
    made = helm.render({"networkPolicy": {"egress": {"enabled": True, "rules": [bucket]}}})
    limited = find_object(made, "NetworkPolicy", "team-egress")
    assert (limited["spec"]["podSelector"], limited["spec"]["policyTypes"]) == ({}, ["Egress"])
    here, dns, more = limited["spec"]["egress"]
    assert (here, more) == ({"to": [{"podSelector": {}}]}, bucket)
    assert {(item["protocol"], item["port"]) for item in dns["ports"]} == {("UDP", 53), ("TCP", 53)}
    labels = {"jobset.sigs.k8s.io/jobset-name": "a"}
    assert [
        item.level for item in namespace.judge_network([limited], labels, {}, has_own_policy=False)
    ] == ["ok"]


# --- pods and namespaces --------------------------------------------------------------------------


def test_the_test_s_pod_is_restricted_and_no_account_mounts_a_token_unasked(helm: Helm) -> None:
    made = helm.render(EVERYTHING)
    pod = find_object(made, "Pod")
    assert pod_rules.strictest_level(pod) == "restricted"
    assert pod["spec"]["containers"][0]["resources"]["limits"] == {"memory": "512Mi"}
    for account in (account for account in made if account["kind"] == "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_the_dashboard_is_off_and_has_no_token_no_right_and_no_more_than_a_restricted_pod(
    helm: Helm,
) -> None:
    assert not [
        item
        for item in helm.render({"defaults": {"image": "i"}})
        if item["kind"] in ("Deployment", "Service")
    ]
    made = helm.render(EVERYTHING)
    template = find_object(made, "Deployment", "team-web")["spec"]["template"]
    assert pod_rules.strictest_level(template) == "restricted"
    spec, (container,) = template["spec"], template["spec"]["containers"]
    assert (
        container["securityContext"]["readOnlyRootFilesystem"] and container["resources"]["limits"]
    )
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("team-web", False)
    assert [volume.keys() for volume in spec["volumes"]] == [{"name", "configMap"}]
    bound = [subject["name"] for item in made for subject in item.get("subjects", [])]
    assert bound and "team-web" not in bound
    labels = template["metadata"]["labels"]
    for selector in (
        find_object(made, "Deployment", "team-web")["spec"]["selector"]["matchLabels"],
        find_object(made, "Service")["spec"]["selector"],
        find_object(made, "NetworkPolicy", "team-web")["spec"]["podSelector"]["matchLabels"],
    ):
        assert (
            selector == {"jaxlaunch.io/web-dashboard": "team"}
            and selector.items() <= labels.items()
        )
    closed = helm.render({"webDashboard": {"enabled": True, "image": "i"}})
    assert find_object(closed, "NetworkPolicy", "team-web")["spec"]["ingress"] == []
    command = find_object(closed, "Deployment")["spec"]["template"]["spec"]["containers"][0][
        "command"
    ]
    assert [word for word in command if word.startswith("--namespace")] == ["--namespace=ns"]


@pytest.mark.parametrize("release", ["a.b", "1st", "a" * 53, "0." + "9" * 51])
def test_the_dashboard_s_service_has_a_name_that_every_release_may_have(
    helm: Helm, release: str
) -> None:
    made = helm.render({"webDashboard": {"enabled": True, "image": "i"}}, release)
    name = find_object(made, "Service")["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name), name
    assert f"--accept-host={name}.ns.svc" in str(
        find_object(made, "Deployment")["spec"]["template"]["spec"]
    )


def test_a_dashboard_without_an_image_is_refused_with_the_values_to_set(helm: Helm) -> None:
    with pytest.raises(RefusedError, match=r"set webDashboard\.image or defaults\.image"):
        helm.render({"webDashboard": {"enabled": True}})


def test_a_namespace_of_the_chart_is_restricted(helm: Helm) -> None:
    made = find_object(helm.render(EVERYTHING), "Namespace", "team-a-scratch")
    assert made["metadata"]["labels"][pod_rules.ENFORCE_LABEL] == "restricted"


RDMA = {"profile": "rdma", "resource": "rdma/ib"}
TPU, H100 = "{type: v5e, topology: 2x4}", "{type: h100, per_host: 8}\nhosts: 2"


@pytest.mark.parametrize(
    ("accelerator", "cluster_values", "expected"),
    [
        (TPU, {"users": {"v5e": "root"}}, "baseline"),
        (TPU, {"users": {"v5e": "privileged"}}, "privileged"),
        ("{type: cpu}", {"users": {"cpu": "root"}}, "baseline"),
        ("{type: mi300x}", {"platform": "generic", "users": {"mi300x": "root"}}, "baseline"),
        (
            "{type: mi300x}",
            {"platform": "generic", "users": {"mi300x": "root"}, "network": {"h100": RDMA}},
            "baseline",
        ),
        (H100, {"users": {"h100": "root"}, "network": {"h100": RDMA}}, "privileged"),
        (H100, {"users": {"h100": 2000}, "network": {"h100": RDMA}}, "restricted"),
        (H100, {"network": {"h100": "hostnetwork"}}, "privileged"),
        (
            H100,
            {"network": {"h100": "gpudirect-tcpxo"}, "tcpxo": {"image": "rxdm:1"}},
            "privileged",
        ),
        ("{type: h200, per_host: 8}", {"network": {"h200": "gpudirect-rdma"}}, "privileged"),
    ],
)
def test_a_namespace_of_the_chart_has_the_level_of_the_jobs_that_the_cluster_defaults_make(
    helm: Helm, accelerator: str, cluster_values: dict[str, Any], expected: str
) -> None:
    spec = load.parse_job(f"name: a\nimage: i\naccelerator: {accelerator}\ncommand: [a]")
    values = {"platform": "gke"} | cluster_values
    cluster = defaults.ClusterDefaults(defaults.Defaults.model_validate(values))
    assert (
        pod_rules.strictest_level(pod_template(jobset.render(resolve(spec, cluster))[0]))
        == expected
    )
    rendered = {"namespaces": ["scratch"], "defaults": values}
    made = find_object(helm.render(rendered), "Namespace", "scratch")
    assert made["metadata"]["labels"][pod_rules.ENFORCE_LABEL] == expected
    assert f"pod-security.kubernetes.io/enforce={expected}\n" in helm.files(rendered)["NOTES.txt"]


@pytest.mark.parametrize(
    "cluster_values",
    [{"tcpxo": {"image": "rxdm:1"}}, {"gib": {"networks": ["a"] * 8}}],
    ids=["tcpxo", "gib"],
)
def test_a_namespace_of_the_chart_admits_the_networks_that_jobs_may_choose_by_the_cluster_defaults(
    helm: Helm, cluster_values: dict[str, Any]
) -> None:
    made = find_object(
        helm.render({"namespaces": ["scratch"], "defaults": cluster_values}), "Namespace", "scratch"
    )
    assert made["metadata"]["labels"][pod_rules.ENFORCE_LABEL] == "privileged"


def test_only_what_cannot_be_made_again_stays(helm: Helm) -> None:
    kept_kinds = [
        item["kind"]
        for item in helm.render(EVERYTHING)
        if (item["metadata"].get("annotations") or {}).get("helm.sh/resource-policy") == "keep"
    ]
    assert sorted(kept_kinds) == ["Namespace", "PersistentVolumeClaim", "PersistentVolumeClaim"]


# --- names ----------------------------------------------------------------------------------------


def identities(objects: list[Object]) -> set[tuple[str, str, str]]:
    keys = [
        (item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"])
        for item in objects
    ]
    assert len(keys) == len(set(keys))
    return set(keys)


def test_no_two_releases_share_an_object(helm: Helm) -> None:
    long = "a" * 53
    places = [
        ("team", "ns"),
        ("team", "other"),
        ("c", "a-b"),
        ("b-c", "a"),
        ("a.b", "x"),
        ("a-b", "x"),
        (long, "n" * 63),
        (long[1:], "n" * 63),
    ]
    values = {**EVERYTHING, "namespaces": []}
    made = [identities(helm.render(values, name, namespace)) for name, namespace in places]
    for one_s, other_s in combinations(made, 2):
        assert not {key for key in one_s & other_s if key[2] != "jaxlaunch"}


def test_two_releases_in_one_namespace_share_nothing_where_one_of_them_has_the_defaults(
    helm: Helm,
) -> None:
    values = {**EVERYTHING, "namespaces": []}
    first = identities(helm.render(values, "first", "ns"))
    second = identities(
        helm.render(
            {**values, "defaults": {**values["defaults"], "enabled": False}}, "second", "ns"
        )
    )
    assert not first & second and len(first) == len(second) + 1


def test_names_are_never_too_long(helm: Helm) -> None:
    label = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"
    for item in helm.render(EVERYTHING, "r" * 53, "n" * 63):
        name = item["metadata"]["name"]
        assert re.fullmatch(label, name) and (
            len(name) <= 63 or name.startswith("r" * 53 + "-dashboard-")
        ), name


# --- monitoring -----------------------------------------------------------------------------------


RULES = CHART / "rules"


def spec_of(helm: Helm, **alerts: Any) -> dict[str, Any]:
    made = find_object(helm.render({"alerts": {"enabled": True, **alerts}}), "PrometheusRule")
    assert isinstance(spec := made["spec"], dict)
    return spec


def rules(spec: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """By the name of what they raise or record."""
    return {
        rule.get("alert") or rule["record"]: rule
        for group in spec["groups"]
        for rule in group["rules"]
    }


def chart_rules() -> dict[str, dict[str, Any]]:
    groups = [
        group
        for path in RULES.glob("*.yaml")
        for group in yaml.safe_load(path.read_text())["groups"]
    ]
    return rules({"groups": groups})


def test_the_operator_s_rules_are_prometheus_own(helm: Helm, tmp_path: Path) -> None:
    spec = spec_of(helm)
    assert rules(spec).keys() == chart_rules().keys()
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    promtool = needs.tool("promtool", package="the Debian package prometheus")
    done = subprocess.run(
        [promtool, "check", "rules", "rules.yaml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_release_s_rules_see_its_own_namespace_alone(helm: Helm) -> None:
    for name, rule in rules(spec_of(helm)).items():
        selectors = re.findall(r"\bnamespace(=~?\"[^\"]*\")", rule["expr"])
        assert set(selectors) <= {'="ns"'}, name
        assert ('namespace="ns"' in rule["expr"]) == ("namespace=~" in chart_rules()[name]["expr"])


def test_an_alert_s_threshold_duration_severity_and_runbook_are_values(helm: Helm) -> None:
    hang = {"JaxlaunchHang": {"for": "10m", "severity": "critical"}}
    plain = rules(spec_of(helm))
    changed = rules(
        spec_of(helm, thresholds={"restarts": 5}, rules=hang, runbooks="https://example.org/")
    )
    assert changed["jaxlaunch:threshold:restarts"]["expr"].startswith("5 * group")
    assert not plain["jaxlaunch:threshold:restarts"]["expr"].startswith("5 * group")
    assert (changed["JaxlaunchHang"]["for"], changed["JaxlaunchHang"]["labels"]["severity"]) == (
        "10m",
        "critical",
    )
    url = changed["JaxlaunchHang"]["annotations"]["runbook_url"]
    assert url == "https://example.org/docs/alerts.md#jaxlaunchhang"
    same = plain.keys() - {"jaxlaunch:threshold:restarts", "JaxlaunchHang"}
    assert all(plain[name]["expr"] == changed[name]["expr"] for name in same)


def test_the_values_know_every_alert_and_every_threshold() -> None:
    alert_schema = yaml.safe_load((CHART / "values.schema.json").read_text())["properties"][
        "alerts"
    ]["properties"]
    prefix = "jaxlaunch:threshold:"
    assert alert_schema["rules"]["properties"].keys() == {
        name for name, rule in chart_rules().items() if "alert" in rule
    }
    thresholds = {name.removeprefix(prefix) for name in chart_rules() if name.startswith(prefix)}
    assert alert_schema["thresholds"]["properties"].keys() == thresholds


def test_each_dashboard_is_a_config_map_that_grafana_s_sidecar_takes(helm: Helm) -> None:
    made = [
        item
        for item in helm.render({"dashboards": {"enabled": True}})
        if "-dashboard-" in item["metadata"]["name"]
    ]
    files = {
        path.name: json.loads(path.read_text()) for path in (CHART / "dashboards").glob("*.json")
    }
    assert {name: json.loads(text) for item in made for name, text in item["data"].items()} == files
    assert len(made) == len(files) >= 3
    assert all(item["metadata"]["labels"]["grafana_dashboard"] == "1" for item in made)


def test_the_operator_finds_the_pods_of_jobs_by_the_port_that_they_name(helm: Helm) -> None:
    monitor = find_object(helm.render(EVERYTHING), "PodMonitor")["spec"]
    pod = pod_template(render_file(EXAMPLES / "generic-gpu.yaml")[0])
    assert monitor["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in ports
    assert (
        f'job="{pod["metadata"]["labels"][monitor["jobLabel"]]}"'
        in (RULES / "alerts.yaml").read_text()
    )
    ended, run = endpoint["relabelings"]
    assert ended["action"] == "drop" and re.fullmatch(ended["regex"], "Failed")
    label = re.sub(r"\W", "_", JOB_LABEL)
    assert run == {"sourceLabels": [f"__meta_kubernetes_pod_label_{label}"], "targetLabel": "run"}
    assert JOB_LABEL in pod["metadata"]["labels"]
