"""Pods have no credentials of the cluster, and no command prints a secret."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster import forked
from tests.cluster.access import Access
from tests.cluster.command import PATIENCE_S, run_launcher, write_project
from tests.cluster.waiting import wait_until

# Says that it has the secret without saying it, and what of the cluster it can reach.
PROGRAM = """
import hashlib, json, os, sys
paths = [
    os.path.join(folder, name)
    for folder, _, names in os.walk("/var/run/secrets")
    for name in names
]
token = hashlib.sha256(os.environ["TOKEN"].encode()).hexdigest()
print(json.dumps({"token": token, "found": paths}))
sys.exit(int(sys.argv[1]))
"""
CANARY = "canary-7Hq2-in-the-secret"
OURS = "canary-9Zk4-in-the-environment"
KEY = "canary-3Rt8-of-the-user"
# Whose agents know each other by a Secret that `submit` makes.
GANG = ("gang_secret=true", "hosts=2")
KINDS = (
    "jobsets,jobs,pods,configmaps,networkpolicies,services,events,"
    "roles,rolebindings,serviceaccounts"
)


@pytest.fixture
def folder(
    cluster: Access, namespace: str, checkpoints: Path, base_image: str, tmp_path: Path
) -> Path:
    """Write a job that needs a secret, which the namespace has."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "hub"},
        "stringData": {"token": CANARY},
    }
    cluster.api.create(f"/api/v1/namespaces/{namespace}/secrets", secret)
    document = {
        "image": base_image,
        "command": ["python", "-c", PROGRAM, "0"],
        "secrets": {"TOKEN": {"name": "hub", "key": "token"}},
        "volumes": [{"claim": "checkpoints", "path": "/checkpoints"}],
    }
    return write_project(tmp_path, namespace, {}, **document)


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[subprocess.CompletedProcess[str]]]:
    """Collect the output of commands and check that none contains a secret."""
    monkeypatch.setenv("TOKEN", OURS)
    monkeypatch.setenv("WANDB_API_KEY", OURS)
    outputs: list[subprocess.CompletedProcess[str]] = []
    yield outputs
    secret = [
        word
        for canary in (CANARY, OURS, KEY)
        for word in (canary, base64.b64encode(canary.encode()).decode())
    ]
    for output in outputs:
        told = output.stdout + output.stderr
        assert not [word for word in secret if word in told], f"{' '.join(output.args)}:\n{told}"


@pytest.mark.usefixtures("steady_nodes")
def test_no_command_prints_a_secret(
    cluster: Access,
    namespace: str,
    checkpoints: Path,
    folder: Path,
    outputs: list[subprocess.CompletedProcess[str]],
) -> None:
    def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = run_launcher(cluster, folder, *arguments)
        outputs.append(done)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    for command in ("validate", "render", "plan"):
        run(command, "job.yaml")
    # It looks whether the key is there.
    assert "hub" in run("doctor", "job.yaml", "--output", "json").stdout
    run("submit", "job.yaml", "--dry-run")
    run("submit", "job.yaml", "--dry-run=server", "--output", "yaml")
    result = run("submit", "job.yaml", *GANG, "--wait", "--follow", "--output", "json")
    assert hashlib.sha256(CANARY.encode()).hexdigest() in result.stdout  # the program has it
    assert '"found": []' in result.stdout
    for command in ("status", "explain", "logs"):
        run(command, "mine", "--namespace", namespace)
        run(command, "mine", "--namespace", namespace, "--output", "json")
    run("list", "--namespace", namespace, "--output", "wide")
    path = f"/api/v1/namespaces/{namespace}/secrets/mine-gang"
    keys = [cluster.api.get(path)["data"]["key"]]
    objects = cluster.kubectl("get", KINDS, "--namespace", namespace, "--output", "yaml")
    assert "mine-gang" in objects and keys[0] not in objects
    assert "secretKeyRef" in objects
    assert CANARY not in objects and OURS not in objects
    run(
        "submit",
        "job.yaml",
        *GANG,
        "--replace",
        "--wait",
        "--follow",
        "command.3=1",
        "restarts.crash=0",
        "restarts.in_place=0",
        code=83,
    )
    for command in ("status", "explain", "logs"):
        run(command, "mine", "--namespace", namespace)
    run("logs", "mine", "--namespace", namespace, "--previous")
    keys.append(cluster.api.get(path)["data"]["key"])
    assert keys[0] != keys[1] and all(len(base64.b64decode(key)) == 32 for key in keys)
    assert not [
        key
        for key in keys
        for result_of_command in outputs
        if key in result_of_command.stdout + result_of_command.stderr
    ]
    run("delete", "mine", "--namespace", namespace)
    run("status", "mine", "--namespace", namespace, code=2)
    secrets = path.rpartition("/")[0]
    wait_until(
        lambda: [
            result_of_command["metadata"]["name"]
            for result_of_command in cluster.api.get(secrets)["items"]
        ],
        lambda names: "mine-gang" not in names,
        "the gang's Secret is deleted with its JobSet",
    )
    for file in checkpoints.rglob("*"):
        assert file.is_dir() or CANARY.encode() not in file.read_bytes(), file


def test_secrets_of_job_file_and_kubeconfig_are_not_printed(
    cluster: Access, namespace: str, folder: Path, outputs: list[subprocess.CompletedProcess[str]]
) -> None:
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    for user in config["users"]:
        user["user"] = {"token": KEY}
    (folder / "config").write_text(json.dumps(config))
    for arguments in (
        ["submit", "job.yaml"],
        ["status", "mine"],
        ["doctor", "job.yaml"],
        ["list"],
        ["logs", "mine"],
    ):
        env = cluster.env | {"KUBECONFIG": str(folder / "config")}
        done = forked.run_forked(arguments, cwd=folder, env=env, timeout=PATIENCE_S)
        outputs.append(done)
        assert done.returncode == 3, done.stdout + done.stderr
    for arguments in (["validate", "job.yaml"], ["submit", "job.yaml"], ["render", "job.yaml"]):
        outputs.append(
            refused := run_launcher(cluster, folder, *arguments, f"env.WANDB_API_KEY={OURS}")
        )
        assert refused.returncode == 2, refused.stderr


def test_pod_has_no_rights_in_the_cluster(cluster: Access, namespace: str, folder: Path) -> None:
    rights = ("roles", "rolebindings", "serviceaccounts", "secrets")
    pods_before = [
        cluster.kubectl("get", kind, "--namespace", namespace, "--output", "name")
        for kind in rights
    ]
    done = run_launcher(cluster, folder, "submit", "job.yaml", "--wait", "--follow")
    assert done.returncode == 0, done.stderr
    assert '"found": []' in done.stdout  # no token is mounted
    assert [
        cluster.kubectl("get", kind, "--namespace", namespace, "--output", "name")
        for kind in rights
    ] == pods_before
    (pod,) = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    assert pod["spec"]["automountServiceAccountToken"] is False
    assert not [volume for volume in pod["spec"]["volumes"] if "projected" in volume]
    account = f"system:serviceaccount:{namespace}:{pod['spec']['serviceAccountName']}"
    for verb, kind in (
        ("get", "pods"),
        ("list", "secrets"),
        ("get", "jobsets"),
        ("create", "pods"),
    ):
        command = ["auth", "can-i", verb, kind, "--namespace", namespace, "--as", account]
        answer = subprocess.run(
            [cluster.kubectl_path, *command], env=cluster.env, capture_output=True, text=True
        )
        assert answer.stdout.strip() == "no", f"{verb} {kind}: {answer.stdout}{answer.stderr}"
