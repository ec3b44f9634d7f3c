"""The Pod Security level of what render makes, and each rule by itself."""

from __future__ import annotations

from typing import Any

import pytest

from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.kubernetes import pod_rules
from jaxlaunch.launcher.kubernetes.merge import merge_patch
from jaxlaunch.launcher.kubernetes.pod_rules import find_violations, strictest_level
from jaxlaunch.launcher.manifests import jobset
from jaxlaunch.launcher.manifests.jobset import resolve

JOB = """
name: one
image: registry.example/train:1.4
hosts: 2
accelerator: {type: h100, per_host: 8}
volumes:
- {claim: c, path: /c}
- {ephemeral: 1Gi, path: /e}
- {secret: s, path: /s}
- {configmap: m, path: /m}
command: [python, train.py]
agent: image
"""

EFA = (
    "network: efa\nresources: {cpu: 8}\n"
    "node_selector: {node.kubernetes.io/instance-type: p5.48xlarge}"
)
WRITABLE_ROOT = (
    "pod: {spec: {containers: [{name: main, securityContext: {readOnlyRootFilesystem: false}}]}}"
)


def render_template(settings: str = "", cluster: str = "") -> dict[str, Any]:
    manifest = jobset.render(
        resolve(jobs.parse_job(JOB + settings), defaults.parse_defaults(cluster or "{}"))
    )[0]
    rendered: dict[str, Any] = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return rendered


@pytest.mark.parametrize(
    ("settings", "cluster", "met", "reasons"),
    [
        ("", "", "restricted", set()),
        ("init: [{name: fetch, command: [true]}]", "", "restricted", set()),
        (EFA, "platform: eks", "restricted", set()),
        ("network: hostnetwork", "", "privileged", {"host namespaces", "hostPort"}),
        ("network: {profile: rdma, resource: rdma/ib}", "", "restricted", set()),
        ("network: {profile: rdma, resource: rdma/ib}", "users: {h100: root}", "privileged",
         {"non-default capabilities"}),
        ("", "users: {h100: root}", "baseline",
         {"runAsNonRoot != true", "runAsUser=0", "unrestricted capabilities"}),
        ("", "users: {h100: privileged}", "privileged", {"privileged"}),
        ("", "users: {h100: 2000, cpu: root}", "restricted", set()),
        ("network: gpudirect-tcpxo", "platform: gke\ntcpxo: {image: daemon:1}", "privileged",
         {"non-default capabilities", "hostPath volumes"}),
        (WRITABLE_ROOT, "", "restricted", set()),
        ("pod: {spec: {volumes: [{name: n, nfs: {server: a, path: /b}}]}}", "", "baseline",
         {"restricted volume types"}),
        ("pod: {spec: {securityContext: {runAsNonRoot: false, runAsUser: 0}}}", "", "baseline",
         {"runAsNonRoot != true", "runAsUser=0"}),
        ("pod: {spec: {containers: [{name: side, image: i}]}}", "", "baseline",
         {"allowPrivilegeEscalation != false", "unrestricted capabilities"}),
    ],
)  # fmt: skip
def test_job_meets_level_of_its_network_and_pod(
    settings: str, cluster: str, met: pod_rules.Level, reasons: set[str]
) -> None:
    rendered = render_template(settings, cluster)
    assert strictest_level(rendered) == met
    refusing = pod_rules.stricter_level(met) or "restricted"
    assert {violation.reason for violation in find_violations(rendered, refusing)} == reasons


MAIN = {
    "name": "main",
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}
CLEAN: dict[str, Any] = {
    "spec": {
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [MAIN],
    }
}


def make_container(**security: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", "securityContext": security}]}}


def make_volume(**source: Any) -> dict[str, Any]:
    return {"spec": {"volumes": [{"name": "v", **source}]}}


def make_port(host_port: int) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "main", "ports": [{"hostPort": host_port}]}]}}


ADDS_CHOWN = make_container(capabilities={"add": ["CHOWN"]})
ROOT = make_container(runAsUser=0, runAsNonRoot=False)


@pytest.mark.parametrize(
    ("patch", "met", "expected"),
    [
        ({"spec": {"hostPID": True}}, "privileged", "host namespaces (hostPID=true)"),
        (
            make_container(privileged=True),
            "privileged",
            'privileged (container "main" is privileged)',
        ),
        (ADDS_CHOWN, "baseline", 'unrestricted capabilities (container "main" adds CH'),
        (make_container(capabilities={"add": ["NET_BIND_SERVICE"]}), "restricted", ""),
        (make_volume(hostPath={"path": "/"}), "privileged", 'volumes (volume "v")'),
        (make_volume(), "restricted", ""),
        (make_port(80), "privileged", '"main" uses 80'),
        (make_port(0), "restricted", ""),
        (make_container(seccompProfile={"type": "Unconfined"}), "privileged", "seccompProfile"),
        (
            make_container(allowPrivilegeEscalation=True),
            "baseline",
            "allowPrivilegeEscalation != false",
        ),
        (make_container(capabilities={"drop": ["NET_RAW"]}), "baseline", "must drop ALL"),
        (make_container(runAsUser=0), "baseline", 'runAsUser=0 (container "main" has runAsUser=0)'),
        (make_container(runAsNonRoot=False), "baseline", "runAsNonRoot != true"),
        ({"spec": {"hostUsers": False, **ROOT["spec"]}}, "restricted", ""),
        ({"spec": {"securityContext": {"seccompProfile": None}}}, "baseline", "seccompProfile"),
    ],
)
def test_each_rule_names_the_violation(
    patch: dict[str, Any], met: pod_rules.Level, expected: str
) -> None:
    patched = merge_patch(CLEAN, patch)
    assert strictest_level(patched) == met
    enforced = pod_rules.stricter_level(met)
    violations = find_violations(patched, enforced) if enforced else []
    assert len(violations) == bool(enforced) and expected in "".join(map(str, violations))


def test_weaker_rule_is_not_reported_with_the_stricter_one() -> None:
    patched = merge_patch(CLEAN, {"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}})
    assert [violation.reason for violation in find_violations(patched, "restricted")] == [
        "restricted volume types"
    ]


def test_namespace_admits_its_level_and_stricter_ones() -> None:
    assert pod_rules.is_admitted("baseline", "restricted") and pod_rules.is_admitted(
        "privileged", "privileged"
    )
    assert not pod_rules.is_admitted("restricted", "baseline")
