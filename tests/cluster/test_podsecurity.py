"""The launcher's reasons against a Pod Security level compared with the server's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.kubernetes import pod_rules
from jaxlaunch.launcher.kubernetes.merge import merge_patch
from jaxlaunch.launcher.manifests import jobset
from jaxlaunch.launcher.manifests.jobset import resolve
from tests.cluster.access import Access
from tests.cluster.harness.api import RefusedError

JOB = """
name: judged
image: registry.example/none
accelerator: {type: h100, per_host: 8}
command: ["true"]
agent: image
"""
TCPXO = "platform: gke\ntcpxo: {image: registry.example/daemon}"
# Without which the server takes no privileged container.
ESCALATION = {"allowPrivilegeEscalation": True}
# What our job files cannot ask for, merged into the template of one that asks for nothing.
BY_HAND: dict[str, Any] = {
    "pid": {"hostPID": True, "hostIPC": True},
    "privileged": {
        "containers": [{"name": "main", "securityContext": {"privileged": True, **ESCALATION}}]
    },
    "seccomp": {"securityContext": {"seccompProfile": {"type": "Unconfined"}}},
    "no seccomp": {"securityContext": {"seccompProfile": None}},
    "root": {"securityContext": {"runAsUser": 0, "runAsNonRoot": False}},
    "nfs": {"volumes": [{"name": "n", "nfs": {"server": "a", "path": "/"}}]},
    "host path": {"volumes": [{"name": "h", "hostPath": {"path": "/"}}]},
    "sidecar": {
        "containers": [
            {"name": "side", "image": "i", "ports": [{"containerPort": 80, "hostPort": 80}]}
        ]
    },
}
RENDERED = {
    "plain": ("", ""),
    "init": ("init: [{name: first, command: ['true']}]", ""),
    "volumes": (
        "volumes: [{claim: c, path: /c}, {ephemeral: 1Gi, path: /e}, {secret: s, path: /s}]",
        "",
    ),
    "hostnetwork": ("network: hostnetwork", ""),
    "rdma": ("network: {profile: rdma, resource: rdma/ib}", ""),
    "rdma of root": ("network: {profile: rdma, resource: rdma/ib}", "users: {h100: root}"),
    "user root": ("", "users: {h100: root}"),
    "user privileged": ("", "users: {h100: privileged}"),
    "tcpxo": ("network: gpudirect-tcpxo", TCPXO),
}


def pod_template(name: str) -> dict[str, Any]:
    snippet, reasons_of_template = RENDERED.get(name, ("", ""))
    manifest = jobset.render(
        resolve(jobs.parse_job(JOB + snippet), defaults.parse_defaults(reasons_of_template or "{}"))
    )[0]
    template = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    return merge_patch(template, {"spec": BY_HAND[name]}) if name in BY_HAND else template


def server_reasons(cluster: Access, namespace: str, name: str, spec: dict[str, Any]) -> set[str]:
    """Return the reasons of Pod Security's refusal, none if the pod passes."""
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name.replace(" ", "-")},
        "spec": spec["spec"],
    }
    try:
        cluster.api.create(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
    except RefusedError as error:
        match = re.search(
            r'violates PodSecurity \\"\w+:latest\\": (.*?)","reason"', str(error)
        ) or re.search(r'violates PodSecurity "\w+:latest": (.*)', str(error))
        assert match is not None, error
        return split_reasons(match[1])
    return set()


def split_reasons(text: str) -> set[str]:
    """Return the parts outside of parentheses: `a (why: "x, y"), b (…)` gives {a, b}."""
    while "(" in text:
        text = re.sub(r" ?\([^()]*\)", "", text)
    return {reason.strip().strip('"') for reason in text.split(",")}


@pytest.mark.parametrize("namespace", ["baseline", "restricted"], indirect=True)
def test_reasons_equal_those_of_the_server(
    cluster: Access, namespace: str, request: pytest.FixtureRequest
) -> None:
    enforced: pod_rules.Level = request.node.callspec.params["namespace"]
    pods = {name: pod_template(name) for name in (*RENDERED, *BY_HAND)}
    ours = {
        name: {violation.reason for violation in pod_rules.find_violations(pod, enforced)}
        for name, pod in pods.items()
    }
    assert ours == {
        name: server_reasons(cluster, namespace, name, pod) for name, pod in pods.items()
    }
    admitted = {
        name
        for name, pod in pods.items()
        if pod_rules.is_admitted(enforced, pod_rules.strictest_level(pod))
    }
    assert admitted == {name for name, broken in ours.items() if not broken}
