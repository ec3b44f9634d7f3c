"""A healthy namespace passes `doctor`; each real fault is found with the right exit code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.access import Access
from tests.cluster.command import run_launcher
from tests.cluster.harness.kwok import TAINT, fake_nodes
from tests.cluster.preparations import (
    KUEUE,
    make_namespace,
    make_queue,
    make_user,
    remove_namespace,
)
from tests.cluster.waiting import has_condition, wait_until

CANARY = "canary-7c1f2b"
JOB = {
    "name": "sick",
    "image": "localhost/pybase:1",
    "hosts": 2,
    "accelerator": {"type": "cpu"},
    "resources": {"cpu": "20m", "memory": "64Mi"},
    "command": ["true"],
}


@dataclasses.dataclass(frozen=True)
class DoctorResult:
    code: int
    findings: list[dict[str, str]]
    text: str

    def level(self, check: str, text: str) -> str:
        """Return the level of a check's finding that contains this text."""
        findings = [
            finding
            for finding in self.findings
            if finding["check"] == check and text in finding["what"]
        ]
        assert len(findings) == 1, f"{check} does not say {text!r} once:\n{self.text}"
        return findings[0]["level"]

    def failing(self) -> set[str]:
        return {finding["check"] for finding in self.findings if finding["level"] == "fail"}


def run_doctor(cluster: Access, folder: Path, namespace: str, **job: object) -> DoctorResult:
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "namespace": namespace, **job}))
    done = run_launcher(cluster, folder, "doctor", "job.yaml", "-o", "json")
    assert done.stdout, done.stderr
    assert CANARY not in done.stdout + done.stderr
    return DoctorResult(done.returncode, json.loads(done.stdout), done.stdout)


def create_object(
    cluster: Access, namespace: str, plural: str, kind: str, name: str, **body: Any
) -> None:
    path = f"/api/v1/namespaces/{namespace}/{plural}"
    cluster.api.create(path, {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **body})


# --- health ---------------------------------------------------------------------------------------


def test_healthy_namespace_passes_and_stays_unchanged(
    cluster: Access, namespace: str, checkpoints: Path, tmp_path: Path
) -> None:
    make_queue(cluster, namespace, {"cpu": "1", "memory": "1Gi"})
    is_active(cluster, namespace, "queue")
    create_object(cluster, namespace, "secrets", "Secret", "token", stringData={"token": CANARY})
    result = run_doctor(
        cluster,
        tmp_path,
        namespace,
        queue="queue",
        volumes=[{"claim": "checkpoints", "path": "/checkpoints"}],
        secrets={"TOKEN": {"name": "token", "key": "token"}},
    )
    assert (result.code, result.failing()) == (0, set()), result.text
    assert {finding["check"] for finding in result.findings} >= {
        "server",
        "clock",
        "jobset",
        "kueue",
        "webhooks",
        "dry run",
    }
    assert result.level("queue", "covers cpu, memory, all that the job requests") == "ok"
    for path in (
        "/api/v1/namespaces/{}/pods",
        "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
    ):
        assert cluster.api.get(path.format(namespace))["items"] == []


def test_namespace_is_checked_without_a_job(
    cluster: Access, namespace: str, tmp_path: Path
) -> None:
    done = run_launcher(cluster, tmp_path, "doctor", "-n", namespace)
    assert done.returncode == 0, done.stdout
    assert (
        f"namespace {namespace} enforces Pod Security level restricted, which the pods meet"
        in done.stdout
    )
    assert " 0 failures" in done.stderr


def is_active(cluster: Access, namespace: str, name: str, status: str = "True") -> None:
    path = f"/apis/{KUEUE}/namespaces/{namespace}/localqueues/{name}"
    wait_until(lambda: cluster.api.get(path), has_condition("Active", status), f"queue {name}")


@pytest.fixture(scope="module")
def bare_namespace(cluster: Access) -> Iterator[str]:
    """Yield a namespace in which nothing is made."""
    name = make_namespace(cluster, "restricted")
    yield name
    remove_namespace(cluster, name)


# --- what a job names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "check", "text"),
    [
        ({"queue": "nope"}, "queue", "LocalQueue nope does not exist"),
        ({"priority": "nope"}, "priority", "PriorityClass nope does not exist"),
        (
            {"network": "hostnetwork"},
            "namespace",
            "enforces Pod Security level restricted, and the pods meet only privileged",
        ),
        ({"network": "hostnetwork"}, "dry run", "Pod Security rejects a pod of the job"),
        (
            {"volumes": [{"claim": "nope", "path": "/nope"}]},
            "volumes",
            "PersistentVolumeClaim nope does not exist",
        ),
        ({"image_pull_secrets": ["nope"]}, "secrets", "image pull secret nope does not exist"),
        ({"secrets": {"T": {"name": "nope", "key": "k"}}}, "secrets", "Secret nope does not exist"),
        (
            {"volumes": [{"configmap": "nope", "path": "/nope"}]},
            "configmaps",
            "ConfigMap nope does not exist",
        ),
        ({"service_account": "nope"}, "service account", "service account nope does not exist"),
        (
            {"accelerator": {"type": "h100"}, "hosts": 1},
            "nodes",
            "nvidia.com/gpu.product in NVIDIA-H100-80GB-HBM3",
        ),
        ({"node_selector": {"no/such": "label"}}, "nodes", "no node has no/such=label"),
        ({"resources": {"cpu": 4000}}, "nodes", "a pod requests cpu 4000"),
        ({"pod": {"spec": {"hostUsers": "yes"}}}, "dry run", "the API server rejects the JobSet"),
    ],
)
def test_missing_objects_of_a_job_are_failures(
    cluster: Access,
    bare_namespace: str,
    tmp_path: Path,
    job: Mapping[str, object],
    check: str,
    text: str,
) -> None:
    result = run_doctor(cluster, tmp_path, bare_namespace, **job)
    assert result.level(check, text) == "fail"
    assert result.code == 2, result.text


# --- what the cluster's owner must fix ------------------------------------------------------------


def test_missing_rights_are_named_and_other_checks_unknown(
    cluster: Access, namespace: str, tmp_path: Path
) -> None:
    make_queue(cluster, namespace, {"cpu": "1", "memory": "1Gi"})
    rules = [{"apiGroups": ["kueue.x-k8s.io"], "resources": ["localqueues"], "verbs": ["get"]}]
    theirs = dataclasses.replace(cluster, kubeconfig=make_user(cluster, namespace, rules, tmp_path))
    result = run_doctor(theirs, tmp_path, namespace, queue="queue")
    assert result.code == 3 and result.failing() == {"rights"}, result.text
    missing = next(
        finding["what"]
        for finding in result.findings
        if finding.get("why") == "needed by launcher submit."
    )
    assert "create jobsets.jobset.x-k8s.io" in missing and "localqueues" not in missing
    unknown = {finding["check"] for finding in result.findings if finding["level"] == "unknown"}
    assert unknown >= {"webhooks", "dns", "namespace", "quota", "queue", "dry run", "nodes"}


@pytest.mark.parametrize(
    ("quota", "text"),
    [
        ({"cpu": "1"}, "does not cover memory, of which the job requests 128Mi"),
        ({"cpu": "30m", "memory": "1Gi"}, "is too small: the job requests 40m of cpu (quota 30m)"),
    ],
)
def test_queue_that_could_never_admit_the_job_is_named(
    cluster: Access, namespace: str, tmp_path: Path, quota: dict[str, str], text: str
) -> None:
    make_queue(cluster, namespace, quota)
    is_active(cluster, namespace, "queue")
    result = run_doctor(cluster, tmp_path, namespace, queue="queue")
    assert result.code == 3 and result.level("queue", text) == "fail"


@pytest.fixture(params=["jobsets", "pods"])
def dead_webhook(cluster: Access, namespace: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """Add a webhook on one kind for this namespace whose service has no endpoint."""
    group = {"jobsets": "jobset.x-k8s.io", "pods": ""}[request.param]
    service = {"namespace": namespace, "name": "nobody", "path": "/"}
    hook = {
        "name": f"{request.param}.deaf.test",
        "clientConfig": {"service": service, "caBundle": ""},
        "rules": [
            {
                "apiGroups": [group],
                "apiVersions": ["*"],
                "resources": [request.param],
                "operations": ["CREATE"],
            }
        ],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "sideEffects": "None",
        "admissionReviewVersions": ["v1"],
        "failurePolicy": "Fail",
        "timeoutSeconds": 2,
    }
    path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
    kind = {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
    }
    cluster.api.create(path, {**kind, "metadata": {"name": namespace}, "webhooks": [hook]})
    yield str(hook["name"])
    cluster.api.delete(f"{path}/{namespace}")


def test_webhook_without_an_endpoint_is_named(
    cluster: Access, namespace: str, dead_webhook: str, tmp_path: Path
) -> None:
    result = wait_until(
        lambda: run_doctor(
            cluster, tmp_path, namespace
        ),  # the server takes a moment to know a new webhook
        lambda result: "dry run" in result.failing(),
        "the webhook's failure",
    )
    assert result.code == 3
    assert (
        result.level(
            "webhooks", f"webhook {dead_webhook}: service {namespace}/nobody has no ready endpoint"
        )
        == "fail"
    )
    assert result.level("dry run", f"webhook {dead_webhook} does not answer") == "fail"


def test_tainted_nodes_with_the_accelerator_differ_from_none(
    cluster: Access, namespace: str, tmp_path: Path
) -> None:
    pool = {"jaxlaunch.test/pool": namespace}
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", **pool}
    h100: dict[str, Any] = {"accelerator": {"type": "h100", "per_host": 8}, "node_selector": labels}
    with fake_nodes(cluster.api, 1, labels, {"nvidia.com/gpu": "8"}):
        result = run_doctor(cluster, tmp_path, namespace, **h100)
        assert result.level("nodes", f"untolerated taints: {TAINT}=true:NoSchedule") == "fail"
        tolerant = [{"key": TAINT, "operator": "Exists"}]
        few = run_doctor(cluster, tmp_path, namespace, **h100, tolerations=tolerant)
        assert few.level("nodes", "room for 1 of the job's 2 pods on 1 node") == "fail"
        enough = run_doctor(cluster, tmp_path, namespace, **h100, tolerations=tolerant, hosts=1)
        assert enough.level("nodes", "room for the job's 1 pod on 1 node") == "ok"
        assert "8 nvidia.com/gpu NVIDIA-H100-80GB-HBM3" in enough.text
