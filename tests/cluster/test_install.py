"""k8s/install.yaml on a real cluster: a user with its roles can run every command."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.access import Access
from tests.cluster.command import run_launcher, write_project
from tests.cluster.harness.api import RefusedError
from tests.cluster.preparations import make_claim, make_user
from tests.cluster.waiting import wait_until

pytestmark = pytest.mark.extended

INSTALL = Path(__file__).parents[2] / "k8s" / "install.yaml"
PROGRAM = "import time; print('running', flush=True); time.sleep(600)"


@pytest.fixture
def user(cluster: Access, namespace: str, tmp_path: Path) -> Iterator[Access]:
    """Make a user of a team as install.yaml describes."""
    cluster.kubectl("apply", "--server-side", "--filename", str(INSTALL))
    kubeconfig = make_user(cluster, namespace, [], tmp_path)
    who = f"--serviceaccount={namespace}:{kubeconfig.stem}"
    cluster.kubectl(
        "create",
        "rolebinding",
        "jaxlaunch",
        "-n",
        namespace,
        "--clusterrole",
        "jaxlaunch-user",
        who,
    )
    reader = f"jaxlaunch-{namespace}"
    cluster.kubectl(
        "create", "clusterrolebinding", reader, "--clusterrole", "jaxlaunch-cluster-reader", who
    )
    access = dataclasses.replace(cluster, kubeconfig=kubeconfig)
    wait_until(
        lambda: find_refusal(access, namespace, make_jobset({"hostPID": True})),
        bool,
        "the policy of install.yaml is in force",
    )
    yield access
    cluster.kubectl("delete", "clusterrolebinding", reader)
    cluster.kubectl("delete", "--filename", str(INSTALL))


def make_jobset(pod: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    """Return a JobSet of one pod, which has these fields too."""
    containers = [{"name": "main", "image": "i"}]
    template = {"spec": {"restartPolicy": "Never", "containers": containers, **pod}}
    part = {"name": "w", "replicas": 1, "template": {"spec": {"template": template}}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": "odd", **metadata},
        "spec": {"replicatedJobs": [part]},
    }


def make_secret(name: str, kind: str = "Opaque", **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "type": kind,
        "metadata": {"name": name, **metadata},
    }


PLACES = {
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
    "Secret": "/api/v1/namespaces/{}/secrets",
}
OURS = {"labels": {"app.kubernetes.io/managed-by": "jaxlaunch"}}
ACCOUNT = {"annotations": {"kubernetes.io/service-account.name": "default"}}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a node": (make_jobset({"nodeName": "node-0"}), "nodeName is not allowed"),
    "a system class": (
        make_jobset({"priorityClassName": "system-node-critical"}),
        "priority class system-node-critical is not allowed",
    ),
    "every taint": (
        make_jobset({"tolerations": [{"operator": "Exists"}]}),
        "to tolerate every taint is not allowed",
    ),
    "the control plane": (
        make_jobset({"tolerations": [{"key": "node-role.kubernetes.io/control-plane"}]}),
        "ask the cluster administrator to change ValidatingAdmissionPolicy jaxlaunch",
    ),
    "a token": (
        make_secret("x-gang", "kubernetes.io/service-account-token", **OURS, **ACCOUNT),
        "a token of a ServiceAccount may not be made",
    ),
    "any Secret": (make_secret("x"), "write only the Secrets of gangs"),
    "a class of the cluster": (make_jobset({"priorityClassName": "team-high"}), ""),
    "a toleration": (
        make_jobset({"tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}),
        "",
    ),
    "a service account": (make_jobset({"serviceAccountName": "trainer"}), ""),
    "the Secret of a gang": (make_secret("x-gang", **OURS), ""),
}


def find_refusal(access: Access, namespace: str, manifest: dict[str, Any]) -> str:
    """Return why the server refuses to create an object, in a dry run, or nothing."""
    path = PLACES[manifest["kind"]].format(namespace)
    try:
        access.api.create(f"{path}?dryRun=All", manifest)
    except RefusedError as error:
        return str(error)
    return ""


def test_policy_bounds_what_users_of_the_role_create(
    cluster: Access, user: Access, namespace: str, tmp_path: Path
) -> None:
    said = {name: find_refusal(user, namespace, manifest) for name, (manifest, _) in CASES.items()}
    for name, (manifest, refusal) in CASES.items():
        is_expected = refusal in said[name] if refusal else not said[name]
        assert is_expected, f"{name}: {said[name]}"
        # The policy is for those who have the role in the namespace, and not for administrators.
        assert not find_refusal(cluster, namespace, manifest), name
    rules = [{"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["create"]}]
    other = dataclasses.replace(cluster, kubeconfig=make_user(cluster, namespace, rules, tmp_path))
    assert not find_refusal(other, namespace, CASES["a node"][0])


@pytest.mark.usefixtures("steady_nodes")
def test_gang_of_a_user_is_encrypted_and_no_warning_is_needed(
    cluster: Access, user: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    make_claim(cluster, namespace)
    folder = write_project(
        tmp_path,
        namespace,
        {},
        image=base_image,
        hosts=2,
        command=["python", "-c", "print('over')"],
        volumes=[{"claim": "checkpoints", "path": "/checkpoints"}],
    )
    done = run_launcher(user, folder, "submit", "job.yaml", "--wait")
    assert done.returncode == 0, done.stderr
    assert "encrypted" not in done.stderr
    secrets = cluster.api.get(PLACES["Secret"].format(namespace))["items"]
    assert [secret["metadata"]["name"] for secret in secrets] == ["mine-gang"]
    # A JobSet of the user that reads the volume belongs to the job's.
    logs = run_launcher(user, folder, "logs", "mine", "--from-volume")
    assert logs.returncode == 0 and "over" in logs.stdout, logs.stderr


@pytest.mark.usefixtures("steady_nodes")
def test_user_of_a_team_can_run_every_command(
    cluster: Access, user: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    folder = write_project(
        tmp_path, namespace, {}, image=base_image, command=["python", "-c", PROGRAM]
    )

    def run(*arguments: str, code: int = 0) -> str:
        done = run_launcher(user, folder, *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("submit", "job.yaml", "--dry-run=server")
    assert re.search(
        r"ok +rights +all \d+ RBAC permissions", output := run("doctor", "job.yaml")
    ), output
    run("submit", "job.yaml")
    cluster.kubectl(
        "wait",
        "jobset/mine",
        "-n",
        namespace,
        "--for=jsonpath={.status.replicatedJobsStatus[0].ready}=1",
    )
    for command in ("list", "status mine", "explain mine", "logs mine"):
        run(*command.split())
    run("stop", "mine")
    run("submit", "job.yaml", "--replace")
    run("delete", "mine", "--yes")
