"""Wrong values are refused, and the refusal names the key."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helm.charts import Helm, RefusedError

# Values, and the key that the refusal names.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"default": {}}, "default"),
    ({"defaults": {"platfrom": "gke"}}, "platfrom"),
    ({"defaults": {"platform": "gce"}}, "/defaults/platform"),
    ({"defaults": {"image": 7}}, "/defaults/image"),
    ({"defaults": {"image": "two words"}}, "/defaults/image"),
    ({"defaults": {"image_pull_secrets": "registry"}}, "/defaults/image_pull_secrets"),
    ({"defaults": {"image_pull_secrets": ["Not_A_Name"]}}, "/defaults/image_pull_secrets/0"),
    ({"defaults": {"queue": "No Queue"}}, "/defaults/queue"),
    ({"defaults": {"checkpoint": {"claim": "a", "url": "gs://team-b"}}}, "/defaults/checkpoint"),
    ({"defaults": {"checkpoint": {"url": "http://b"}}}, "/defaults/checkpoint"),
    ({"defaults": {"compile_cache": {"path": "/cache"}}}, "/defaults/compile_cache"),
    ({"defaults": {"user": 0}}, "/defaults/user"),
    ({"defaults": {"nodes": {"h1000": {}}}}, "h1000"),
    ({"defaults": {"nodes": {"h100": {"selector": {}}}}}, "/defaults/nodes/h100"),
    ({"defaults": {"network": {"h100": "infiniband"}}}, "/defaults/network/h100"),
    ({"defaults": {"capacity": {"cheap": {}}}}, "cheap"),
    ({"defaults": {"tcpxo": {"image": "i", "networks": ["one"]}}}, "/defaults/tcpxo"),
    ({"defaults": {"tolerations": [{"operator": "Maybe"}]}}, "/defaults/tolerations/0/operator"),
    ({"defaults": {"prometheus": {"port": 1}}}, "port"),
    ({"defaults": {"enabled": "yes"}}, "/defaults/enabled"),
    ({"commonLabels": {"team": 7}}, "/commonLabels/team"),
    ({"commonLabels": {"team": "a b"}}, "/commonLabels/team"),
    ({"namespaces": ["Team"]}, "/namespaces/0"),
    ({"namespaces": ["a", "a"]}, "/namespaces"),
    ({"rbac": {"submitters": [{"kind": "Team", "name": "a"}]}}, "/rbac/submitters/0/kind"),
    ({"rbac": {"submitters": [{"kind": "Group"}]}}, "/rbac/submitters/0"),
    (
        {"rbac": {"viewers": [{"kind": "User", "name": "a", "namespace": "b"}]}},
        "/rbac/viewers/0/namespace",
    ),
    ({"rbac": {"admins": []}}, "admins"),
    (
        {"admissionPolicy": {"serviceAccounts": ["Not_A_Name"]}},
        "/admissionPolicy/serviceAccounts/0",
    ),
    ({"admissionPolicy": {"hostPaths": ["relative"]}}, "/admissionPolicy/hostPaths/0"),
    (
        {"admissionPolicy": {"exempt": [{"kind": "Team", "name": "a"}]}},
        "/admissionPolicy/exempt/0/kind",
    ),
    ({"rbac": {"clusterReader": 1}}, "/rbac/clusterReader"),
    ({"serviceAccount": {"annotations": {"a": 1}}}, "/serviceAccount/annotations/a"),
    ({"serviceAccount": {"automount": True}}, "automount"),
    ({"kueue": {"enabled": "true"}}, "/kueue/enabled"),
    ({"kueue": {"flavors": []}}, "/kueue/flavors"),
    ({"kueue": {"flavors": [{"name": "a.b", "quota": {}}]}}, "/kueue/flavors/0/name"),
    (
        {"kueue": {"flavors": [{"name": "a", "quota": {"cpu": "many"}}]}},
        "/kueue/flavors/0/quota/cpu",
    ),
    ({"kueue": {"flavors": [{"name": "a"}]}}, "/kueue/flavors/0"),
    (
        {"kueue": {"preemption": {"withinClusterQueue": "Always"}}},
        "/kueue/preemption/withinClusterQueue",
    ),
    ({"priorityClasses": [{"name": "high"}]}, "/priorityClasses/0"),
    ({"priorityClasses": [{"name": "high", "value": 2000000000}]}, "/priorityClasses/0/value"),
    ({"priorityClasses": {"high": 1}}, "/priorityClasses"),
    ({"resourceQuota": {"requests.cpu": "-1"}}, "/resourceQuota/requests.cpu"),
    ({"resourceDefaults": {"request": {}}}, "request"),
    ({"networkPolicy": {"enabled": None, "egress": True}}, "egress"),
    ({"networkPolicy": {"egress": {"rules": [{"from": []}]}}}, "from"),
    ({"storage": {"checkpoints": {"size": "big"}}}, "/storage/checkpoints/size"),
    ({"storage": {"checkpoints": {"path": "relative"}}}, "/storage/checkpoints/path"),
    (
        {"storage": {"checkpoints": {"accessModes": ["ReadOnlyMany"]}}},
        "/storage/checkpoints/accessModes/0",
    ),
    ({"storage": {"compileCache": {"storageClass": 3}}}, "/storage/compileCache/storageClass"),
    ({"podMonitor": {"intervalSeconds": 0}}, "/podMonitor/intervalSeconds"),
    ({"alerts": {"thresholds": {"restarts": "5"}}}, "/alerts/thresholds/restarts"),
    ({"alerts": {"thresholds": {"restart": 5}}}, "restart"),
    ({"alerts": {"rules": {"JaxlaunchHanging": {}}}}, "JaxlaunchHanging"),
    ({"alerts": {"rules": {"JaxlaunchHang": {"for": "soon"}}}}, "/alerts/rules/JaxlaunchHang/for"),
    (
        {"alerts": {"rules": {"JaxlaunchHang": {"severity": "loud"}}}},
        "/alerts/rules/JaxlaunchHang/severity",
    ),
    ({"alerts": {"runbooks": "wiki"}}, "/alerts/runbooks"),
    ({"dashboards": {"labels": []}}, "/dashboards/labels"),
    ({"webDashboard": {"enabled": "yes"}}, "/webDashboard/enabled"),
    ({"webDashboard": {"namespaces": ["Team"]}}, "/webDashboard/namespaces/0"),
    ({"webDashboard": {"hosts": ["https://jobs.example.org"]}}, "/webDashboard/hosts/0"),
    ({"webDashboard": {"hosts": ["jobs.example.org:8443"]}}, "/webDashboard/hosts/0"),
    ({"webDashboard": {"host": "jobs.example.org"}}, "host"),
    ({"test": {"apiServer": {"host": "10.0.0.1", "port": 70000}}}, "/test/apiServer"),
    ({"test": {"resources": {"requests": {"cpu": "fast"}}}}, "/test/resources/requests/cpu"),
]


@pytest.mark.parametrize(
    ("values", "key"), WRONG, ids=[f"{number}-{key}" for number, (_, key) in enumerate(WRONG)]
)
def test_a_wrong_value_is_refused_by_its_key(helm: Helm, values: dict[str, Any], key: str) -> None:
    with pytest.raises(RefusedError) as refused:
        helm.render(values)
    assert key.replace("/", ".").lstrip(".") in str(refused.value).replace("/", "."), refused.value


def test_enough_is_refused() -> None:
    assert len(WRONG) >= 30


def test_a_parent_chart_s_global_values_are_let_through(helm: Helm) -> None:
    assert helm.render({"global": {"imageRegistry": "registry.example"}}) == helm.render({})
