"""Whether NetworkPolicies let the hosts of a job reach each other, as `launcher doctor` sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.diagnose.doctor import namespace
from jaxlaunch.launcher.diagnose.doctor.checks import CHECKS
from jaxlaunch.launcher.diagnose.doctor.finding import Finding, Target
from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import NAMESPACES, NETWORK_POLICIES
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.kubernetes.resources import job_requests
from jaxlaunch.launcher.manifests.jobset import render, resolve
from tests.launcher import apiserver
from tests.launcher.apiserver import Server

LABELS = {"jobset.sigs.k8s.io/jobset-name": "lm", "team": "a"}
DENIES = {"podSelector": {}, "policyTypes": ["Ingress"]}  # as the chart's
LM, OTHER = (
    {"podSelector": {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": name}}}
    for name in ("lm", "other")
)


def make_policy(name: str = "p", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "spec": {"podSelector": {}, **spec}}


def make_ingress(*peers: Any, **rule: Any) -> dict[str, Any]:
    return make_policy(ingress=[{"from": list(peers), **rule}])


DENY = make_policy("deny", policyTypes=["Ingress"])
EGRESS = make_policy("out", policyTypes=["Egress"])


@pytest.mark.parametrize(
    ("policies", "levels"),
    [
        ([], ["ok"]),
        ([DENY], ["fail"]),
        ([DENY, make_ingress(LM)], ["ok"]),
        ([DENY, make_ingress(OTHER)], ["fail"]),
        ([DENY, make_ingress()], ["ok"]),
        (
            [
                DENY,
                make_ingress(
                    {"podSelector": {}, "namespaceSelector": {"matchLabels": {"name": "b"}}}
                ),
            ],
            ["fail"],
        ),
        ([DENY, make_ingress({"namespaceSelector": {"matchLabels": {"name": "a"}}})], ["ok"]),
        ([DENY, make_ingress({"ipBlock": {"cidr": "10.0.0.0/8"}})], ["ok"]),
        ([DENY, make_ingress(LM, ports=[{"port": 9401}])], ["unknown"]),
        (
            [
                make_policy(
                    "others", podSelector={"matchLabels": {"team": "b"}}, policyTypes=["Ingress"]
                )
            ],
            ["ok"],
        ),
        ([EGRESS], ["fail"]),
        ([EGRESS, make_policy(egress=[{"to": [LM]}], policyTypes=["Egress"])], ["ok"]),
        ([make_policy(egress=[{"to": [OTHER]}])], ["fail", "fail"]),
    ],
)
def test_job_of_several_hosts_needs_a_policy_for_its_pods(policies: Any, levels: list[str]) -> None:
    assert [
        finding.level
        for finding in namespace.judge_network(policies, LABELS, {"name": "a"}, has_own_policy=True)
    ] == levels


def run_checks(
    server: Server, folder: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any
) -> list[Finding]:
    """What doctor says of a job in a namespace with the chart's default deny."""
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(folder, server.url, "team")))
    server.put(NAMESPACES.path(None, "team"), {})
    server.put(NETWORK_POLICIES.path("team", "default-deny"), {"spec": DENIES})
    job = {
        "name": "lm",
        "image": "i",
        "accelerator": {"type": "cpu"},
        "command": ["true"],
        "agent": "image",
        **keys,
    }
    manifests = render(resolve(load.parse_job(json.dumps(job)), ClusterDefaults()))
    return list(CHECKS["network"].run(Target(Cluster.connect(), "team", manifests)))


def test_job_without_policy_fails_under_default_deny(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (results,) = run_checks(server, tmp_path, monkeypatch, hosts=2, network_policy=False)
    assert (
        results.level == "fail"
        and "NetworkPolicy default-deny denies ingress" in results.summary_text
    )
    assert "`network_policy: false`" in results.remedy_text
    (results,) = run_checks(server, tmp_path, monkeypatch, hosts=2)
    assert results.level == "ok"


@pytest.mark.parametrize("keys", [{"hosts": 1}, {"hosts": 2, "network": "hostnetwork"}])
def test_policies_do_not_matter_to_single_hosts_or_host_network(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    assert run_checks(server, tmp_path, monkeypatch, network_policy=False, **keys) == []


def test_unreadable_policies_name_the_missing_right(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.on("GET", "networkpolicies", apiserver.refuse_with(403))
    (results,) = run_checks(server, tmp_path, monkeypatch, hosts=2)
    assert results.level == "unknown"
    assert (
        "you have no permission to list networkpolicies.networking.k8s.io: " in results.reason_text
    )


def test_runtime_class_adds_overhead_and_node_labels(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    scheduling = {"nodeSelector": {"kata": "yes"}}
    overhead = {"podFixed": {"memory": "2Gi", "cpu": "250m"}}
    server.put(
        "/apis/node.k8s.io/v1/runtimeclasses/kata", {"overhead": overhead, "scheduling": scheduling}
    )
    job = {
        "name": "lm",
        "image": "i",
        "accelerator": {"type": "cpu"},
        "command": ["true"],
        "hosts": 2,
    }
    pod = {"spec": {"runtimeClassName": "kata"}}
    read = load.parse_job(
        json.dumps({**job, "agent": "image", "pod": pod, "resources": {"cpu": 1, "memory": "30Gi"}})
    )
    target = Target(Cluster.connect(), "team", render(resolve(read, ClusterDefaults())))
    assert {
        name: str(quantity) for name, quantity in job_requests(target.admitted_jobset).items()
    } == {
        "cpu": "2.500",
        "memory": str(64 * 1024**3),
    }
    assert pod_template(target.admitted_jobset)["spec"]["nodeSelector"] == {"kata": "yes"}
