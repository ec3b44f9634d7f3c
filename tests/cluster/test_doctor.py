"""A healthy namespace passes; each sickness, produced for real, is found by name, with the right exit code."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.access import Access
from tests.cluster.command import launcher
from tests.cluster.harness.kwok import TAINT, fake_nodes
from tests.cluster.preparations import (
    KUEUE,
    make_namespace,
    make_queue,
    make_user,
    remove_namespace,
)
from tests.cluster.waiting import has, until

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
class Examined:
    code: int
    findings: list[dict[str, str]]
    text: str

    def level(self, check: str, what: str) -> str:
        """The level of the finding of a check that says this."""
        found = [each for each in self.findings if each["check"] == check and what in each["what"]]
        assert len(found) == 1, f"{check} does not say {what!r} once:\n{self.text}"
        return found[0]["level"]

    def failing(self) -> set[str]:
        return {each["check"] for each in self.findings if each["level"] == "fail"}


def examine(cluster: Access, folder: Path, namespace: str, **job: object) -> Examined:
    (folder / "job.yaml").write_text(yaml.safe_dump({**JOB, "namespace": namespace, **job}))
    done = launcher(cluster, folder, "doctor", "job.yaml", "-o", "json")
    assert done.stdout, done.stderr
    assert CANARY not in done.stdout + done.stderr
    return Examined(done.returncode, json.loads(done.stdout), done.stdout)


def create(cluster: Access, namespace: str, plural: str, kind: str, name: str, **body: Any) -> None:
    path = f"/api/v1/namespaces/{namespace}/{plural}"
    cluster.api.create(path, {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **body})


# --- health ---------------------------------------------------------------------------------------


def test_a_healthy_namespace_passes_and_nothing_is_left_in_it(
    cluster: Access, namespace: str, checkpoints: Path, tmp_path: Path
) -> None:
    make_queue(cluster, namespace, {"cpu": "1", "memory": "1Gi"})
    active(cluster, namespace, "queue")
    create(cluster, namespace, "secrets", "Secret", "token", stringData={"token": CANARY})
    found = examine(
        cluster,
        tmp_path,
        namespace,
        queue="queue",
        volumes=[{"claim": "checkpoints", "path": "/checkpoints"}],
        secrets={"TOKEN": {"name": "token", "key": "token"}},
    )
    assert (found.code, found.failing()) == (0, set()), found.text
    assert {each["check"] for each in found.findings} >= {
        "server",
        "clock",
        "jobset",
        "kueue",
        "webhooks",
        "dry run",
    }
    assert found.level("queue", "covers cpu, memory, all that the job requests") == "ok"
    for path in (
        "/api/v1/namespaces/{}/pods",
        "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
    ):
        assert cluster.api.get(path.format(namespace))["items"] == []


def test_a_namespace_is_examined_without_a_job(
    cluster: Access, namespace: str, tmp_path: Path
) -> None:
    done = launcher(cluster, tmp_path, "doctor", "-n", namespace)
    assert done.returncode == 0, done.stdout
    assert (
        f"namespace {namespace} enforces Pod Security level restricted, which the pods meet"
        in done.stdout
    )
    assert " 0 failures" in done.stderr


def active(cluster: Access, namespace: str, name: str, status: str = "True") -> None:
    path = f"/apis/{KUEUE}/namespaces/{namespace}/localqueues/{name}"
    until(lambda: cluster.api.get(path), has("Active", status), f"queue {name}")


@pytest.fixture(scope="module")
def bare(cluster: Access) -> Iterator[str]:
    """A namespace in which nothing is made."""
    name = make_namespace(cluster, "restricted")
    yield name
    remove_namespace(cluster, name)


# --- what a job names -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("job", "check", "what"),
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
def test_what_a_job_names_and_the_cluster_lacks_is_the_users_to_mend(
    cluster: Access, bare: str, tmp_path: Path, job: Mapping[str, object], check: str, what: str
) -> None:
    found = examine(cluster, tmp_path, bare, **job)
    assert found.level(check, what) == "fail"
    assert found.code == 2, found.text


# --- what the cluster's owner must mend -----------------------------------------------------------


def test_a_user_without_rights_learns_which_and_the_rest_is_unknown(
    cluster: Access, namespace: str, tmp_path: Path
) -> None:
    make_queue(cluster, namespace, {"cpu": "1", "memory": "1Gi"})
    rules = [{"apiGroups": ["kueue.x-k8s.io"], "resources": ["localqueues"], "verbs": ["get"]}]
    theirs = dataclasses.replace(cluster, kubeconfig=make_user(cluster, namespace, rules, tmp_path))
    found = examine(theirs, tmp_path, namespace, queue="queue")
    assert found.code == 3 and found.failing() == {"rights"}, found.text
    missing = next(
        each["what"] for each in found.findings if each.get("why") == "needed by launcher submit."
    )
    assert "create jobsets.jobset.x-k8s.io" in missing and "localqueues" not in missing
    unknown = {each["check"] for each in found.findings if each["level"] == "unknown"}
    assert unknown >= {"webhooks", "dns", "namespace", "quota", "queue", "dry run", "nodes"}


@pytest.mark.parametrize(
    ("quota", "what"),
    [
        ({"cpu": "1"}, "does not cover memory, of which the job requests 128Mi"),
        ({"cpu": "30m", "memory": "1Gi"}, "is too small: the job requests 40m of cpu (quota 30m)"),
    ],
)
def test_a_queue_that_could_never_admit_the_job_is_named(
    cluster: Access, namespace: str, tmp_path: Path, quota: dict[str, str], what: str
) -> None:
    make_queue(cluster, namespace, quota)
    active(cluster, namespace, "queue")
    found = examine(cluster, tmp_path, namespace, queue="queue")
    assert found.code == 3 and found.level("queue", what) == "fail"


@pytest.fixture(params=["jobsets", "pods"])
def deaf(cluster: Access, namespace: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """A webhook on one kind, for this namespace alone, behind whose service nobody is."""
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


def test_a_webhook_that_nobody_answers_is_named(
    cluster: Access, namespace: str, deaf: str, tmp_path: Path
) -> None:
    found = until(
        lambda: examine(
            cluster, tmp_path, namespace
        ),  # the server takes a moment to know a new webhook
        lambda found: "dry run" in found.failing(),
        "the webhook's failure",
    )
    assert found.code == 3
    assert (
        found.level("webhooks", f"webhook {deaf}: service {namespace}/nobody has no ready endpoint")
        == "fail"
    )
    assert found.level("dry run", f"webhook {deaf} does not answer") == "fail"


def test_nodes_that_have_the_accelerator_and_a_taint_are_told_apart_from_none(
    cluster: Access, namespace: str, tmp_path: Path
) -> None:
    pool = {"jaxlaunch.test/pool": namespace}
    labels = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", **pool}
    h100: dict[str, Any] = {"accelerator": {"type": "h100", "per_host": 8}, "node_selector": labels}
    with fake_nodes(cluster.api, 1, labels, {"nvidia.com/gpu": "8"}):
        found = examine(cluster, tmp_path, namespace, **h100)
        assert found.level("nodes", f"untolerated taints: {TAINT}=true:NoSchedule") == "fail"
        tolerant = [{"key": TAINT, "operator": "Exists"}]
        few = examine(cluster, tmp_path, namespace, **h100, tolerations=tolerant)
        assert few.level("nodes", "room for 1 of the job's 2 pods on 1 node") == "fail"
        enough = examine(cluster, tmp_path, namespace, **h100, tolerations=tolerant, hosts=1)
        assert enough.level("nodes", "room for the job's 1 pod on 1 node") == "ok"
        assert "8 nvidia.com/gpu NVIDIA-H100-80GB-HBM3" in enough.text
