"""`launcher submit`, `stop` and `delete` with a fake API server."""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.exceptions import InvalidSignature

from jaxlaunch.launcher.cli import submit
from jaxlaunch.launcher.errors import ApiError
from jaxlaunch.launcher.jobs.exec.rank_pod import RankPod
from jaxlaunch.launcher.kubernetes.kinds import (
    CONFIGMAPS,
    JOBSETS,
    LIMIT_RANGES,
    LOCAL_QUEUES,
    NAMESPACES,
    NETWORK_POLICIES,
    PODS,
    RESOURCE_CLAIM_TEMPLATES,
    SECRETS,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
)
from jaxlaunch.launcher.kubernetes.labels import JOB_LABEL, SPEC_HASH, SUBMITTED_WORDS
from jaxlaunch.records import log_lines
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import (
    Handler,
    Server,
    commit_then_drop,
    drop_connection,
    hang_request,
    refuse_with,
)
from tests.launcher.invoke import CommandResult, launcher

ASKING_NOTHING = "name: x\nimage: i\naccelerator: {type: cpu}\ncommand: [python, train.py]\n"
JOB = ASKING_NOTHING + "resources: {cpu: 1, memory: 1Gi}\n"
AT, POLICY_AT = JOBSETS.path("team-a", "x"), NETWORK_POLICIES.path("team-a", "x")
CANARY = "canary-3f9a77"

Run = Callable[..., CommandResult]


@pytest.fixture
def project_folder(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    server.put(NAMESPACES.path(None, "team-a"), {})
    monkeypatch.setenv(
        "KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, token=CANARY))
    )
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture
def run(
    project_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    def call(*arguments: str) -> CommandResult:
        result = launcher(capsys, monkeypatch, *arguments)
        assert CANARY not in result.out + result.err
        assert "Traceback" not in result.err
        return result

    return call


def submit_job(run: Run, *arguments: str) -> CommandResult:
    return run("submit", "job.yaml", *arguments)


def list_writes(server: Server) -> list[tuple[str, str]]:
    """Method and plural of everything that could change an object."""
    requests = [
        (method, path.split("/")[-1 if method == "POST" else -2])
        for method, path, query in server.requests
        if "dryRun" not in query
    ]
    return [
        entry for entry in requests if entry[0] != "GET" and entry[1] != "selfsubjectaccessreviews"
    ]


def change_object(server: Server, path: str, **parts: Any) -> None:
    server.put(path, apiserver.merge_patch(server.objects[path], parts))


# --- what is written ------------------------------------------------------------------------------


def test_jobset_owns_other_objects(server: Server, run: Run) -> None:
    submit_job(run)
    uid = server.objects[AT]["metadata"]["uid"]
    (configmap,) = server.stored("configmaps")
    for path in (POLICY_AT, configmap):
        (reference,) = server.objects[path]["metadata"]["ownerReferences"]
        assert reference == {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "name": "x",
            "uid": uid,
        }


def test_shared_config_map_gets_another_owner(server: Server, run: Run) -> None:
    submit_job(run)
    assert run("submit", "job.yaml", "name=y").code == 0
    uid = server.objects[AT[:-1] + "y"]["metadata"]["uid"]
    (query,) = (query for method, _, query in server.requests if method == "PATCH")
    assert query["fieldManager"] == f"jaxlaunch-{uid}" and "force" not in query
    (configmap,) = server.stored("configmaps")
    assert server.objects[configmap]["binaryData"]


def test_submit_lists_shipped_code_by_size(project_folder: Path, run: Run) -> None:
    folder = project_folder / "mine"
    (folder / "data").mkdir(parents=True)
    (folder / "train.py").write_text("pass\n")
    (folder / "data" / "words.txt").write_text("word\n" * 2048)
    result = submit_job(run, "code=mine")
    message = r"code: 2 files of 10 KiB, packed to \d+ bytes; "
    message += r"the largest: data/words\.txt \(10 KiB\), train\.py \(5 bytes\)\n"
    assert re.search(message, result.err)


def test_manifests_equal_render(server: Server, run: Run) -> None:
    rendered = yaml.safe_load(run("render", "job.yaml").out.split("---\n")[0])
    submit_job(run)
    assert server.objects[AT]["spec"] == rendered["spec"]
    annotations = dict(server.objects[AT]["metadata"]["annotations"])
    assert json.loads(annotations.pop(SUBMITTED_WORDS)) == ["job.yaml"]
    assert annotations == rendered["metadata"]["annotations"]


def test_jobs_of_sweep_record_their_words(server: Server, run: Run) -> None:
    """The dashboard shows the keys of a sweep, and `explain` the command of each job."""
    result = run("sweep", "job.yaml", "restarts.crash=1,2", "--name", "swept", "--cluster")
    assert result.code == 0, result.err
    words = {}
    for path in server.stored("/jobsets/"):
        metadata = server.objects[path]["metadata"]
        assert metadata["labels"]["sweep"] == "swept"
        words[metadata["name"]] = json.loads(metadata["annotations"][SUBMITTED_WORDS])
    assert words == {
        "swept-000": ["job.yaml", "restarts.crash=1", "name=swept-000", "labels.sweep=swept"],
        "swept-001": ["job.yaml", "restarts.crash=2", "name=swept-001", "labels.sweep=swept"],
    }


def test_dry_run_prints_manifests(server: Server, run: Run) -> None:
    result = submit_job(run, "--dry-run")
    kinds = [entry["kind"] for entry in yaml.safe_load_all(result.out)]
    assert (result.code, kinds) == (0, ["JobSet", "NetworkPolicy", "ConfigMap"])
    assert list_writes(server) == []


def test_fault_in_cluster_defaults_names_line(server: Server, run: Run) -> None:
    text = "image: i\nplatform: gke\nnetwork: {h100: efa}\n"
    server.put(CONFIGMAPS.path("team-a", "jaxlaunch"), defaults_config_map(text))
    result = submit_job(run, "accelerator.type=h100")
    assert result.code == 2 and list_writes(server) == []
    assert (
        "ConfigMap team-a/jaxlaunch, defaults.yaml:3: network = efa does not exist on "
        "platform = gke." in result.err
    )


def test_dry_run_with_defaults_file_needs_no_cluster(
    run: Run, project_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project_folder / "defaults.yaml").write_text("platform: gke\n")
    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    assert run("submit", "--dry-run", "job.yaml", "--defaults", "defaults.yaml").code == 0


@pytest.mark.parametrize("has_kubeconfig", [True, False])
def test_dry_run_without_a_cluster_renders(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_kubeconfig: bool
) -> None:
    path = str(tmp_path / "nothing")
    if has_kubeconfig:
        path = str(apiserver.write_kubeconfig(tmp_path, "http://127.0.0.1:9", "team-a"))
    monkeypatch.setenv("KUBECONFIG", path)
    monkeypatch.setattr(submit, "_DRY_RUN_TIMEOUT_S", 0.2)
    result = submit_job(run, "--dry-run")
    assert result.code == 0 and "no cluster answers, so the manifests are without its" in result.err
    assert result.out == run("render", "job.yaml").out
    assert submit_job(run, "--dry-run", "--context", "nothing").code == 3


def test_server_dry_run_writes_nothing(server: Server, run: Run) -> None:
    result = submit_job(run, "--dry-run=server")
    first, second, third = result.out.splitlines()
    assert first == "jobset.jobset.x-k8s.io/x created (server dry run)"
    assert second == "networkpolicy.networking.k8s.io/x created (server dry run)"
    assert third.startswith("configmap/jaxlaunch-") and third.endswith(" created (server dry run)")
    assert all(
        query["dryRun"] == "All"
        for method, path, query in server.requests
        if (method, path[-4:]) == ("POST", "sets")
    )
    assert not server.stored("jobsets")


@pytest.mark.parametrize(("output", "parse"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_submit_prints_stored_jobset(run: Run, output: str, parse: Callable[[str], Any]) -> None:
    printed = parse(submit_job(run, "-o", output).out)["metadata"]
    assert printed["uid"]
    assert "managedFields" not in printed


# --- the gang's secret ----------------------------------------------------------------------------

SECRET_AT = SECRETS.path("team-a", "x-gang")


def commit_then_fail(handler: Handler) -> bool:
    """It is done, and a proxy answers that the server took too long."""
    handler.server.put(f"{handler.at}/{handler.body['metadata']['name']}", handler.body)
    return refuse_with(504)(handler)


def exceed_quota(handler: Handler) -> bool:
    """Apply a ResourceQuota of one object, which counts before the object's existence does."""
    plural = handler.at.rpartition("/")[2]
    if not any(path.rpartition("/")[0].endswith(f"/{plural}") for path in handler.server.objects):
        return False
    handler.fail(
        403, "Forbidden", f"{plural} is forbidden: exceeded quota: few, used: count/{plural}=1"
    )
    return True


def test_gang_secret_is_random_and_owned(server: Server, run: Run) -> None:
    result = submit_job(run, "gang_secret=true")
    assert (result.code, result.err) == (0, "")
    assert [plural for _, plural in list_writes(server)] == [
        "jobsets",
        "networkpolicies",
        "configmaps",
        "secrets",
    ]
    secret = server.objects[SECRET_AT]
    assert len(base64.b64decode(secret["data"]["key"])) == 32
    (reference,) = secret["metadata"]["ownerReferences"]
    assert reference["uid"] == server.objects[AT]["metadata"]["uid"]
    run("submit", "job.yaml", "name=y", "gang_secret=true")
    assert server.objects[SECRETS.path("team-a", "y-gang")]["data"] != secret["data"]
    assert secret["data"]["key"] not in json.dumps(server.objects[AT])


def test_hosts_have_certificates_of_job_authority(server: Server, run: Run) -> None:
    result = run("submit", "job.yaml", "hosts=2")
    assert (result.code, result.err) == (0, "")
    run("submit", "job.yaml", "name=y", "hosts=2")
    mine, other = (
        {
            name: base64.b64decode(held)
            for name, held in server.objects[SECRETS.path("team-a", f"{job}-gang")]["data"].items()
        }
        for job in ("x", "y")
    )
    assert mine.keys() == {"key", "tls.crt", "tls.key", "ca.crt"} and not set(mine.values()) & set(
        other.values()
    )
    own_names, authority, another = (
        x509.load_pem_x509_certificate(held)
        for held in (mine["tls.crt"], mine["ca.crt"], other["ca.crt"])
    )
    own_names.verify_directly_issued_by(authority)
    with pytest.raises(InvalidSignature):
        own_names.verify_directly_issued_by(another)
    assert b"PRIVATE" not in mine["ca.crt"]


def test_hosts_without_secret_right_have_no_certificates(server: Server, run: Run) -> None:
    server.denied.add(("create", "secrets"))
    result = run("submit", "job.yaml", "hosts=2")
    assert (
        result.code == 0
        and "traffic is not encrypted, since you may not create Secrets in namespace team-a"
        in result.err
    )
    assert SECRET_AT not in server.objects
    result = run("submit", "job.yaml", "name=y")  # a host alone
    assert (result.code, result.err) == (0, "")


def test_resubmission_keeps_or_recreates_secret(server: Server, run: Run) -> None:
    submit_job(run, "gang_secret=true")
    previous = server.objects[SECRET_AT]["data"]
    assert submit_job(run, "gang_secret=true").out == "jobset.jobset.x-k8s.io/x unchanged\n"
    assert server.objects[SECRET_AT]["data"] == previous
    server.drop(SECRET_AT)
    assert submit_job(run, "gang_secret=true").code == 0
    assert server.objects[SECRET_AT]["data"] != previous


def test_secret_needs_only_create_right(server: Server, run: Run) -> None:
    server.denied |= {
        ("get", "secrets"),
        ("list", "secrets"),
        ("patch", "secrets"),
        ("delete", "secrets"),
    }
    assert submit_job(run, "gang_secret=true").code == 0
    assert not any(method != "POST" for method, path, _ in server.requests if "secrets" in path)
    server.denied.add(("create", "secrets"))
    result = run("submit", "job.yaml", "name=y", "gang_secret=true")
    assert (
        result.code == 3
        and "Missing RBAC permissions in namespace team-a: create secrets." in result.err
    )
    assert run("submit", "job.yaml", "name=y").code == 0


@pytest.mark.parametrize("rehearsed", [(), ("--dry-run=server",)])
def test_existing_secret_is_refused(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch, rehearsed: tuple[str, ...]
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.jobs.submit.SECRET_TIMEOUT_S", 0.0)
    server.put(SECRET_AT, {"data": {"key": "a2V5"}})
    result = submit_job(run, "gang_secret=true", *rehearsed)
    assert result.code == 2
    assert (
        "Secret x-gang in namespace team-a existed before JobSet x, so others may know "
        "what it holds." in result.err
    )
    assert "`kubectl -n team-a delete secret x-gang`, then submit again." in result.err
    assert list_writes(server) == []
    assert server.objects[SECRET_AT]["data"] == {"key": "a2V5"}


def test_concurrent_secret_withdraws_job(server: Server, run: Run) -> None:
    def came(handler: Handler) -> bool:
        server.put(SECRET_AT, {"data": {"key": "a2V5"}})
        return False

    server.on("POST", "jobsets", came)
    result = submit_job(run, "gang_secret=true")
    assert (
        result.code == 2 and server.count("POST", "secrets") == 3
    )  # two dry runs; no JobSet runs on while others try
    assert (
        "JobSet x was deleted again: its pods would have used that." in result.err
        and AT not in server.objects
    )


@pytest.mark.parametrize("fault", [commit_then_drop, commit_then_fail])
def test_unanswered_secret_creation_counts(
    server: Server, run: Run, fault: apiserver.Fault
) -> None:
    server.on("POST", "secrets", fault)
    assert submit_job(run, "gang_secret=true").code == 0
    assert server.stored("secrets") == [SECRET_AT]


@pytest.mark.parametrize("is_replaced", [True, False])
def test_job_waits_for_earlier_secret(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.jobs.submit._QUIET_WAIT_S", 0.0)
    submit_job(run, "gang_secret=true")
    previous = server.objects[SECRET_AT]["data"]
    change_object(server, AT, status={"terminalState": "Completed"})
    if not is_replaced:
        server.drop(AT)
    server.requests.clear()

    def collects(handler: Handler) -> bool:
        assert AT not in server.objects
        server.drop(SECRET_AT)
        return False

    finds = [lambda handler: False] * 3  # the first judges the manifest
    server.on("DRY", "secrets", *finds, collects)
    result = submit_job(run, "gang_secret=true", *(["--replace"] if is_replaced else []))
    assert result.code == 0 and server.count("POST", "jobsets") == 1
    assert result.err.count("waiting for Secret x-gang to go: it is there without JobSet x") == 1
    assert server.objects[SECRET_AT]["data"] != previous


@pytest.mark.parametrize("fault", [refuse_with(500), drop_connection])
def test_unanswered_creation_keeps_running_job(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch, fault: apiserver.Fault
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.jobs.submit.SECRET_TIMEOUT_S", 0.0)
    submit_job(run, "gang_secret=true")
    previous = server.objects[AT]
    server.on("POST", "jobsets", fault)
    result = submit_job(run, "gang_secret=true")
    assert (result.code, result.out) == (0, "jobset.jobset.x-k8s.io/x unchanged\n")
    assert server.objects[AT] == previous
    assert run("stop", "x").code == 0
    assert submit_job(run, "gang_secret=true").out == "jobset.jobset.x-k8s.io/x resumed\n"


@pytest.mark.parametrize("rehearsed", [(), ("--dry-run=server",)])
def test_quota_used_by_secret_allows_resubmission(
    server: Server, run: Run, rehearsed: tuple[str, ...]
) -> None:
    for method in ("DRY", "POST"):
        server.on(method, "secrets", *[exceed_quota] * 20)
    assert submit_job(run, "gang_secret=true").code == 0
    second = submit_job(run, "gang_secret=true", *rehearsed)
    assert second.code == 0 and "jobset.jobset.x-k8s.io/x unchanged" in second.out
    assert run("stop", "x").code == 0
    second = submit_job(run, "gang_secret=true", *rehearsed)
    assert second.code == 0 and "jobset.jobset.x-k8s.io/x resumed" in second.out
    result = run("submit", "job.yaml", "name=y", "gang_secret=true", *rehearsed)
    assert (
        result.code == 3
        and "exceeded quota: few" in result.err
        and server.stored("jobsets") == [AT]
    )
    change_object(server, AT, status={"terminalState": "Completed"})

    def removed(handler: Handler) -> bool:
        """Seconds later the server's garbage collector deletes what the JobSet owned."""
        threading.Timer(0.2, server.drop, [SECRET_AT]).start()
        return False

    server.on("DELETE", "jobsets", removed)
    result = submit_job(run, "gang_secret=true", "hosts=2", "--replace", *rehearsed)
    assert result.code == 0 and "jobset.jobset.x-k8s.io/x replaced" in result.out, result.err


# --- again ----------------------------------------------------------------------------------------


def test_resubmission_completes_interrupted_one(server: Server, run: Run) -> None:
    submit_job(run)
    server.drop(POLICY_AT)
    assert submit_job(run).code == 0
    assert server.stored("networkpolicies") == [POLICY_AT]


def test_same_file_resumes_stopped_job(server: Server, run: Run) -> None:
    submit_job(run)
    assert run("stop", "x").out == "jobset.jobset.x-k8s.io/x stopped\n"
    assert server.objects[AT]["spec"]["suspend"] is True
    result = submit_job(run)
    assert (result.code, result.out) == (0, "jobset.jobset.x-k8s.io/x resumed\n")
    assert server.objects[AT]["spec"]["suspend"] is False


@pytest.mark.parametrize("arguments", [(), ("--replace",), ("--dry-run=server",)])
def test_foreign_jobset_is_not_changed(
    server: Server, run: Run, arguments: tuple[str, ...]
) -> None:
    foreign = {
        "metadata": {"name": "x", "managedFields": [{"manager": "kubectl-create"}]},
        "status": {},
    }
    server.put(AT, foreign | {"status": {"terminalState": "Completed"}})
    previous = json.dumps(server.objects)
    result = submit_job(run, *arguments)
    assert result.code == 2
    assert "exists and is not managed by launcher: created by kubectl-create at 2026-" in result.err
    assert json.dumps(server.objects) == previous


def test_creator_is_no_controller(server: Server, run: Run) -> None:
    managers = [
        {"manager": "kueue", "operation": "Apply", "time": "2026-11-21T06:00:00Z"},
        {"manager": "argocd", "operation": "Update", "time": "2026-11-21T07:00:00Z"},
        {"manager": "kubectl-create", "operation": "Update", "time": "2026-11-21T06:00:00Z"},
        {
            "manager": "alice-tool",
            "operation": "Update",
            "time": "2026-11-21T05:00:00Z",
            "subresource": "status",
        },
    ]
    server.put(AT, {"metadata": {"name": "x", "managedFields": managers}})
    assert (
        "is not managed by launcher: created by kubectl-create at 2026-" in run("delete", "x").err
    )


@pytest.mark.parametrize("command", [("stop",), ("delete", "--yes")])
def test_job_without_label_remains_ours(server: Server, run: Run, command: tuple[str, ...]) -> None:
    assert submit_job(run).code == 0
    server.objects[AT]["metadata"]["labels"] = {}
    result = run(*command, "x")
    assert result.code == 0, result.err


@pytest.mark.parametrize("command", ["stop", "delete"])
def test_foreign_jobset_is_not_stopped_or_deleted(server: Server, run: Run, command: str) -> None:
    server.put(AT, {"metadata": {"name": "x"}})
    result = run(command, "x")
    assert result.code == 2
    assert "JobSet x in namespace team-a is not managed by launcher" in result.err
    assert list_writes(server) == []


def test_foreign_network_policy_is_refused(server: Server, run: Run) -> None:
    server.put(POLICY_AT, {"metadata": {"name": "x"}})
    result = submit_job(run)
    assert result.code == 2
    assert "NetworkPolicy x in namespace team-a exists and is not managed by launcher" in result.err
    assert list_writes(server) == []


CLAIMS_AT = RESOURCE_CLAIM_TEMPLATES.path("team-a", "x-adapters")


@pytest.fixture
def claims(server: Server, run: Run) -> dict[str, Any]:
    """Return the claim template of a job that is not there any more, as it left it behind."""
    server.groups["resource.k8s.io"] = ["v1"]
    assert submit_job(run, *EFA).code == 0
    template = server.objects[CLAIMS_AT]
    for path in list(server.stored("team-a/")):
        server.drop(path)
    server.requests.clear()
    return template


EFA = ("hosts=2", "accelerator.type=h100", "network=efa-dra", "gang_secret=false", "platform=eks")
EFA += ("node_selector={node.kubernetes.io/instance-type: p5.48xlarge}",)


def test_claim_template_of_earlier_job_is_replaced(
    server: Server, run: Run, claims: dict[str, Any]
) -> None:
    server.put(CLAIMS_AT, claims)
    result = submit_job(run, *EFA)
    assert result.code == 0, result.err
    (owner,) = server.objects[CLAIMS_AT]["metadata"]["ownerReferences"]
    assert owner["uid"] == server.objects[AT]["metadata"]["uid"]


def test_leftover_without_delete_right_is_left_to_the_server(
    server: Server, run: Run, claims: dict[str, Any]
) -> None:
    def collect_garbage(handler: Handler) -> bool:
        server.drop(CLAIMS_AT)
        return refuse_with(403)(handler)

    server.put(CLAIMS_AT, claims)
    server.on("DELETE", "resourceclaimtemplates", collect_garbage)
    assert submit_job(run, *EFA).code == 0
    assert CLAIMS_AT in server.objects


@pytest.mark.parametrize("rehearsed", [(), ("--dry-run=server",)])
def test_foreign_claim_template_is_refused(
    server: Server, run: Run, claims: dict[str, Any], rehearsed: tuple[str, ...]
) -> None:
    server.put(CLAIMS_AT, {"metadata": {"name": "x-adapters"}})
    result = submit_job(run, *EFA, *rehearsed)
    assert result.code == 2
    assert "ResourceClaimTemplate x-adapters in namespace team-a exists and is not" in result.err
    assert "  hint: use another name.\n" in result.err
    assert list_writes(server) == []


def test_running_job_is_not_replaced(server: Server, run: Run) -> None:
    submit_job(run)
    assert submit_job(run, "hosts=2", "--replace").code == 2
    assert server.count("DELETE") == 0


def forbid_request(handler: Handler) -> bool:
    handler.fail(403, "Forbidden", "configmaps is forbidden: exceeded quota: few")
    return True


@pytest.mark.parametrize("plural", ["configmaps", "networkpolicies"])
def test_refusal_is_detected_before_writes(server: Server, run: Run, plural: str) -> None:
    server.on("DRY", plural, forbid_request)
    result = submit_job(run)
    assert result.code == 3 and "exceeded quota: few" in result.err
    assert list_writes(server) == [] and not server.stored("jobsets")


def test_late_refusal_names_existing_objects(server: Server, run: Run) -> None:
    server.on("POST", "configmaps", forbid_request)
    result = submit_job(run)
    assert result.code == 3
    assert "exceeded quota: few" in result.err
    assert "JobSet x in namespace team-a exists without jaxlaunch-" in result.err
    assert "Submitting again completes it; `launcher delete -n team-a x` removes it." in result.err
    assert submit_job(run).out == "jobset.jobset.x-k8s.io/x unchanged\n" and server.stored(
        "configmaps"
    )


def test_server_dry_run_checks_replacement(server: Server, run: Run) -> None:
    submit_job(run)
    change_object(server, AT, status={"terminalState": "Completed"})
    judged: list[str] = []

    def judge(handler: Handler) -> bool:
        judged.append(handler.body["metadata"]["name"])
        return False

    server.on("DRY", "jobsets", judge, judge)
    result = submit_job(run, "--replace", "--dry-run=server", "hosts=2")
    assert result.code == 0 and "jobset.jobset.x-k8s.io/x replaced (server dry run)" in result.out
    assert judged[0] == "x" and judged[1] != "x"


def test_server_dry_run_checks_change_before_name(server: Server, run: Run) -> None:
    submit_job(run)
    change_object(server, AT, status={"terminalState": "Completed"})

    def judge(handler: Handler) -> bool:
        if is_new := handler.body["metadata"]["name"] != "x":
            handler.fail(422, "Invalid", "JobSet is invalid: too many hosts")
        return is_new

    result = submit_job(run, "--dry-run=server", "hosts=2")
    assert result.code == 2 and "has already completed" in result.err
    server.on("DRY", "jobsets", judge, judge)
    result = submit_job(run, "--dry-run=server", "hosts=2")
    assert result.code == 3 and "too many hosts" in result.err


@pytest.mark.parametrize("plural", ["jobsets", "configmaps", "networkpolicies"])
@pytest.mark.parametrize("rehearsed", [(), ("--dry-run=server",)])
def test_quota_used_by_job_allows_resubmission(
    server: Server, run: Run, project_folder: Path, plural: str, rehearsed: tuple[str, ...]
) -> None:
    (project_folder / "job.yaml").write_text(JOB + "code: code\n")
    (project_folder / "code").mkdir()
    (project_folder / "code" / "train.py").write_text("1")
    for method in ("DRY", "POST"):
        server.on(method, plural, *[exceed_quota] * 9)
    assert submit_job(run).code == 0
    second = submit_job(run, *rehearsed)
    assert second.code == 0 and "jobset.jobset.x-k8s.io/x unchanged" in second.out
    change_object(server, AT, status={"terminalState": "Completed"})
    (project_folder / "code" / "train.py").write_text("2")

    def collects(handler: Handler) -> bool:
        """The server's garbage collector deletes what the JobSet owned."""
        for path in server.stored("configmaps"):
            server.drop(path)
        return False

    server.on("DELETE", "jobsets", collects)
    result = submit_job(run, "--replace", *rehearsed)
    assert result.code == 0 and "jobset.jobset.x-k8s.io/x replaced" in result.out, result.err


def test_concurrent_foreign_policy_is_reported(server: Server, run: Run) -> None:
    def came(handler: Handler) -> bool:
        server.put(POLICY_AT, {"spec": {}})
        return False

    server.on("POST", "jobsets", came)
    result = submit_job(run)
    assert result.code == 2 and "exists and is not managed by launcher" in result.err
    assert "JobSet x exists without it; `launcher delete -n team-a x` removes it." in result.err
    assert "Submitting again completes it" not in result.err


# --- a server that is not well --------------------------------------------------------------------


def foreign_config_map(config_map: dict[str, Any], how: str) -> dict[str, Any]:
    """A ConfigMap of the same name as another could have made it."""
    agent = base64.b64decode(config_map["binaryData"]["agent.pyz"])
    changes: dict[str, dict[str, Any]] = {
        "empty": {"binaryData": None, "immutable": None},
        "other bytes": {"binaryData": {"agent.pyz": base64.b64encode(agent[:-1] + b"!").decode()}},
        "one file more": {"data": {"sitecustomize.py": "import os"}},
        "the same file as text": {"data": {"agent.pyz": "x"}, "binaryData": None},
        "not immutable": {"immutable": None},
        "another tool's": {"metadata": {"labels": {"app.kubernetes.io/managed-by": "Helm"}}},
        "no label": {"metadata": {"labels": None}},
    }
    requests = apiserver.merge_patch(config_map, changes[how])
    requests["metadata"] = {
        key: entry for key, entry in requests["metadata"].items() if key != "ownerReferences"
    }
    return requests | {
        "metadata": requests["metadata"] | {"managedFields": [{"manager": "kubectl-create"}]}
    }


@pytest.fixture
def submit_with_code(server: Server, run: Run) -> tuple[str, dict[str, Any]]:
    """Return path and contents of the job's ConfigMap; the server has none of its objects."""
    submit_job(run)
    (path,) = server.stored("configmaps")
    config_map = copy.deepcopy(server.objects[path])
    for result in (AT, POLICY_AT, path):
        server.drop(result)
    server.requests.clear()
    return path, config_map


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("empty", "but it lacks agent.pyz: created by kubectl-create at 2026-"),
        ("other bytes", "but its agent.pyz is not this job's ("),
        ("one file more", "but it holds sitecustomize.py too"),
        (
            "the same file as text",
            "but its agent.pyz is not this job's (1 bytes, sha256 2d711642b726 in place of ",
        ),
        (
            "not immutable",
            "but it is not immutable, so that anyone who may write ConfigMaps could "
            "exchange the code",
        ),
        (
            "another tool's",
            "but its label app.kubernetes.io/managed-by is Helm, so launcher did not make it",
        ),
        ("no label", "but its label app.kubernetes.io/managed-by is missing"),
    ],
)
@pytest.mark.parametrize("rehearsed", [(), ("--dry-run=server",)])
def test_foreign_config_map_is_refused(
    server: Server,
    run: Run,
    submit_with_code: tuple[str, dict[str, Any]],
    how: str,
    message: str,
    rehearsed: tuple[str, ...],
) -> None:
    path, config_map = submit_with_code
    server.put(path, foreign_config_map(config_map, how))
    result = submit_job(run, *rehearsed)
    assert result.code == 2 and message in result.err, result.err
    name = config_map["metadata"]["name"]
    conflict = f"ConfigMap {name} in namespace team-a has the name of one that this job creates"
    assert conflict in result.err
    assert f"kubectl delete configmap {name} -n team-a" in result.err
    assert list_writes(server) == []


def test_equal_config_map_is_shared(
    server: Server, run: Run, submit_with_code: tuple[str, dict[str, Any]]
) -> None:
    path, config_map = submit_with_code
    server.put(
        path,
        apiserver.merge_patch(
            config_map, {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "x"}}}
        ),
    )
    assert submit_job(run).code == 0


def test_concurrent_config_map_withdraws_job(
    server: Server, run: Run, submit_with_code: tuple[str, dict[str, Any]]
) -> None:
    path, config_map = submit_with_code

    def came(handler: Handler) -> bool:
        server.put(path, foreign_config_map(config_map, "other bytes"))
        return False

    server.on("POST", "jobsets", came)
    result = submit_job(run)
    assert result.code == 2 and "its agent.pyz is not this job's" in result.err
    assert "JobSet x was deleted again: its pods would have used that." in result.err
    assert not server.stored("jobsets")
    server.drop(path)
    server.on("POST", "jobsets", came)
    server.on("DELETE", "jobsets", refuse_with(403))
    assert "its agent.pyz is not this job's" in (err := submit_job(run).err)
    assert "JobSet x exists and its pods use that: delete it now." in err


@pytest.mark.parametrize(
    "faults",
    [
        [refuse_with(429, Retry_After="0")],
        [refuse_with(503)],
        [drop_connection],
        [refuse_with(500), commit_then_drop],
    ],
)
@pytest.mark.parametrize("plural", ["jobsets", "networkpolicies"])
def test_faults_leave_one_object_each(
    server: Server, run: Run, faults: list[apiserver.Fault], plural: str
) -> None:
    server.on("POST", plural, *faults)
    result = submit_job(run)
    assert (result.code, result.out) == (0, "jobset.jobset.x-k8s.io/x created\n")
    assert (server.stored("jobsets"), server.stored("networkpolicies")) == ([AT], [POLICY_AT])
    uid = server.objects[AT]["metadata"]["uid"]
    assert server.objects[POLICY_AT]["metadata"]["ownerReferences"][0]["uid"] == uid


@pytest.mark.parametrize(
    "part", ["jobsets", "selfsubjectaccessreviews", "jobset.x-k8s.io", "configmaps"]
)
def test_silent_server_ends_submission(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.kubernetes.transport.TOTAL_TIMEOUT_S", 1.0)
    for method in ("GET", "POST", "PATCH"):
        server.on(method, part, *[hang_request] * 50)
    result = submit_job(run)
    assert result.code == 3
    assert "stopped answering" in result.err
    assert len(server.stored("jobsets")) <= 1


def test_missing_webhook_is_retried_and_named(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.jobs.submit.RETRY_TIMEOUT_S", 1.0)

    def down(handler: Handler) -> bool:
        handler.fail(
            500,
            "InternalError",
            'Internal error occurred: failed calling webhook "mjobset.kb.io": refused',
        )
        return True

    server.on("POST", "jobsets", *[down] * 50)
    result = submit_job(run)
    assert result.code == 3
    assert 'failed calling webhook "mjobset.kb.io"' in result.err
    assert "is the controller that serves the webhook running" in result.err
    assert server.count("POST", "jobsets") > 1


def submit_interrupted(
    server: Server, fault: Callable[[Handler, Callable[[], None]], bool], project_folder: Path
) -> tuple[int, str]:
    """Exit code and talk of a submission that gets one Ctrl-C at the moment the fault chooses."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jaxlaunch.launcher.cli.main",
            "submit",
            str(project_folder / "job.yaml"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        start_new_session=True,
        text=True,
    )
    server.on(
        "POST",
        "jobsets",
        lambda handler: fault(handler, lambda: process.send_signal(signal.SIGINT)),
    )
    _, err = process.communicate(timeout=600)
    return process.returncode, err


def test_ctrl_c_during_creation_names_uncertainty(server: Server, project_folder: Path) -> None:
    def fault(handler: Handler, interrupt: Callable[[], None]) -> bool:
        interrupt()
        return hang_request(handler)

    code, err = submit_interrupted(server, fault, project_folder)
    assert code == 130
    assert (
        "interrupted: JobSet x in namespace team-a does not exist now, but its creation "
        "had been sent" in err
    )
    assert "Traceback" not in err


def test_ctrl_c_after_creation_names_jobset(server: Server, project_folder: Path) -> None:
    def fault(handler: Handler, interrupt: Callable[[], None]) -> bool:
        server.put(AT, handler.body)
        interrupt()
        return hang_request(handler)

    code, err = submit_interrupted(server, fault, project_folder)
    assert code == 130
    assert "interrupted: JobSet x in namespace team-a exists without x, jaxlaunch-" in err
    assert "`launcher delete -n team-a x` removes it" in err
    assert server.stored("jobsets") == [AT]


# --- what is asked before -------------------------------------------------------------------------


def test_file_errors_need_no_cluster(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    result = submit_job(run, "hosts=-1")
    assert result.code == 2
    assert "hosts=-1 (override)" in result.err


def test_missing_jobset_api_is_reported(server: Server, run: Run) -> None:
    del server.groups["jobset.x-k8s.io"]
    result = submit_job(run)
    assert result.code == 3
    assert "Cluster of context test: JobSet is not installed." in result.err


def test_queue_needs_known_kueue(server: Server, run: Run) -> None:
    server.groups["kueue.x-k8s.io"] = ["v1beta1"]
    result = submit_job(run, "queue=q")
    assert result.code == 3
    assert "Kueue: kueue.x-k8s.io is served as v1beta1, not as v1beta2" in result.err


def test_all_obstacles_are_reported_together(server: Server, run: Run) -> None:
    server.drop(NAMESPACES.path(None, "team-a"))
    server.denied |= {("create", "jobsets"), ("create", "networkpolicies")}
    server.put(LOCAL_QUEUES.path("team-a", "research"), {})
    server.put(WORKLOAD_PRIORITY_CLASSES.path(None, "high"), {})
    result = submit_job(run, "queue=reserch", "priority=urgent")
    assert result.code == 3
    assert "Namespace team-a does not exist" in result.err
    assert "create jobsets.jobset.x-k8s.io, create networkpolicies.networking.k8s.io" in result.err
    assert "LocalQueue reserch does not exist in namespace team-a: Kueue never starts" in result.err
    assert "  hint: use research.\n" in result.err
    assert "WorkloadPriorityClass urgent does not exist: " in result.err
    assert "  hint: use priority: high.\n" in result.err
    assert list_writes(server) == []


def test_stopped_queue_is_reported_and_joined(server: Server, run: Run) -> None:
    status = {"conditions": [{"type": "Active", "status": "False", "message": "it is stopped"}]}
    server.put(LOCAL_QUEUES.path("team-a", "q"), {"status": status})
    result = submit_job(run, "queue=q")
    assert result.code == 0
    assert "LocalQueue q is inactive: Kueue admits nothing from it: it is stopped" in result.err


def test_job_without_requests_is_warned(server: Server, run: Run, project_folder: Path) -> None:
    (project_folder / "job.yaml").write_text(ASKING_NOTHING)
    result = submit_job(run)
    assert (
        result.code == 0
        and "launcher: the pods request no cpu or memory: the scheduler reserves none" in result.err
    )
    limits = [{"type": "Container", "defaultRequest": {"cpu": "1", "memory": "1Gi"}}]
    server.put(LIMIT_RANGES.path("team-a", "limits"), {"spec": {"limits": limits}})
    assert submit_job(run, "name=y").err == ""


def test_unreadable_limit_range_is_not_ignored(
    server: Server, run: Run, project_folder: Path
) -> None:
    (project_folder / "job.yaml").write_text(ASKING_NOTHING)
    server.on("GET", "limitranges", *[refuse_with(403)] * 9)
    result = submit_job(run)
    assert result.code == 0
    assert (
        "launcher: whether the pods request cpu or memory: the job requests no cpu or memory, and"
        in result.err
    )
    assert "the pods request no" not in result.err
    assert server.count("GET", "limitranges") == 1


def test_missing_read_rights_allow_submission(server: Server, run: Run) -> None:
    server.on(
        "GET",
        "namespaces/team-a",
        *[lambda handler: handler.at.endswith("/team-a") and refuse_with(403)(handler)] * 9,
    )
    server.on("GET", "priorityclasses", refuse_with(403))
    server.on("GET", "jaxlaunch-system", refuse_with(403))
    result = submit_job(run, "priority=high")
    assert result.code == 0
    assert "whether PriorityClass high exists is not known" in result.err


# --- the cluster defaults -------------------------------------------------------------------------


def defaults_config_map(text: str) -> dict[str, Any]:
    return {"data": {"defaults.yaml": text}}


def test_namespace_defaults_precede_cluster_defaults(
    server: Server, run: Run, project_folder: Path
) -> None:
    (project_folder / "job.yaml").write_text(JOB.replace("image: i\n", ""))
    server.put(
        CONFIGMAPS.path("jaxlaunch-system", "jaxlaunch"), defaults_config_map("image: of-all\n")
    )
    assert "image: of-all" in submit_job(run, "--dry-run").out
    server.put(CONFIGMAPS.path("team-a", "jaxlaunch"), defaults_config_map("image: of-team\n"))
    result = submit_job(run, "--dry-run")
    assert "image: of-team" in result.out
    assert result.err == "launcher: the cluster defaults are in ConfigMap team-a/jaxlaunch\n"


# --- stop, delete, wait ---------------------------------------------------------------------------


def test_queued_job_is_stopped_by_workload(server: Server, run: Run) -> None:
    server.put(LOCAL_QUEUES.path("team-a", "q"), {})
    submit_job(run, "queue=q")
    uid = server.objects[AT]["metadata"]["uid"]
    workload = WORKLOADS.path("team-a", "jobset-x")
    server.put(
        workload,
        {"metadata": {"labels": {"kueue.x-k8s.io/job-uid": uid}}, "spec": {"active": True}},
    )
    assert run("stop", "x").code == 0
    assert server.objects[workload]["spec"] == {"active": False}
    assert "suspend" not in server.objects[AT]["spec"]
    change_object(server, AT, spec={"suspend": True})  # as Kueue does
    assert submit_job(run, "queue=q").out.endswith("resumed\n")
    assert server.objects[workload]["spec"] == {"active": True}


def make_pod(phase: str, message: str = "") -> dict[str, Any]:
    ended = {"state": {"terminated": {"exitCode": 80, "message": message}}} if message else {}
    status = {"phase": phase, "containerStatuses": [{"name": "main", **ended}]}
    return {"metadata": {"labels": {"jobset.sigs.k8s.io/jobset-name": "x"}}, "status": status}


def test_stop_waits_and_reports_saved_step(server: Server, run: Run) -> None:
    submit_job(run)
    path = PODS.path("team-a", "x-w-0-0-abcde")
    server.put(path, make_pod("Running"))

    def ends(handler: Handler) -> bool:
        """The kubelet, once the job is suspended."""
        verdict = {"code": 80, "cause": "preempted", "message": "stopped, and saved at step 12"}
        message = json.dumps(
            {"jaxlaunch": 1, "verdict": verdict, "host": 0, "generation": 0, "attempt": 1}
        )
        threading.Timer(
            0.5, lambda: (server.put(path, make_pod("Running", message)), server.drop(path))
        ).start()
        return False

    server.on("PATCH", "jobsets", ends)
    result = run("stop", "x")
    assert (result.code, result.out) == (0, "jobset.jobset.x-k8s.io/x stopped\n")
    assert result.err == "launcher: stopped, and saved at step 12\n"
    message = json.loads(server.objects[AT]["metadata"]["annotations"]["jaxlaunch.io/progress"])
    assert (message["when"], message["verdict"]["code"], message["verdict"]["message"]) == (
        "stopped",
        80,
        result.err[10:-1],
    )
    printed = run("status", "x")
    assert printed.out.splitlines()[0] == "preempted (80): stopped, and saved at step 12"
    assert re.search(r"as of +\d\d:\d\d:\d\d UTC \(\d+s ago\), when it was stopped", printed.out)


@pytest.mark.parametrize("may_execute", [True, False])
def test_stop_of_a_held_job_leaves_it_failed(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch, may_execute: bool
) -> None:
    options = "name=lm", "hold_on_failure=1h", "restarts={crash: 0, in_place: 0}"
    submit_job(run, *options)
    jobset_path, pod = JOBSETS.path("team-a", "lm"), objects.pod()
    path = PODS.path("team-a", pod["metadata"]["name"])
    records = objects.judged(83, "rank 0 raised"), objects.beat(stage="hold")
    text = "".join(f"{log_lines.format_line(record)}\n" for record in records)
    server.put(path, pod)
    server.put(f"{path}/log", {"text": text})
    ended_pod = objects.over(0, 83, message=objects.farewell(83, "rank 0 raised"))

    def fail_job(_: object) -> bool:
        server.put(path, ended_pod)
        change_object(server, jobset_path, status={"terminalState": "Failed"})
        return True

    def delete_pod(_: object) -> bool:
        """The Job controller and the kubelet, once the job is suspended."""
        server.put(path, ended_pod)
        server.drop(path)
        return False

    def refuse_command(_: object) -> bool:
        server.on("PATCH", "jobsets", delete_pod)
        raise ApiError("pods/exec is forbidden", None, 403)

    monkeypatch.setattr(RankPod, "end_hold", fail_job if may_execute else refuse_command)
    assert json.loads(run("status", "lm", "-o", "json").out)["state"] == "Held"
    assert run("stop", "lm").err == "launcher: rank 0 raised\n"
    assert server.objects[jobset_path]["spec"].get("suspend", False) is not may_execute
    status = json.loads(run("status", "lm", "-o", "json").out)
    assert (status["state"], status["code"]) == ("Failed", 83)
    assert run("explain", "lm").out.startswith("lm failed: crash (exit 83): rank 0 raised")


def test_unwritable_progress_is_reported_once(server: Server, run: Run) -> None:
    submit_job(run)
    verdict = {"cause": "preempted", "code": 80, "message": "saved at step 12"}
    message = json.dumps(
        {"jaxlaunch": 1, "verdict": verdict, "host": 0, "generation": 0, "attempt": 1}
    )
    server.put(PODS.path("team-a", "x-w-0-0-abcde"), make_pod("Failed", message))
    server.on("PATCH", "jobsets", lambda handler: False, refuse_with(403))
    result = run("stop", "x")
    assert result.code == 0
    assert result.err.count("the progress of x could not be written to its JobSet: ") == 1


def test_stop_wait_is_bounded(server: Server, run: Run) -> None:
    submit_job(run)
    server.put(PODS.path("team-a", "x-w-0-0-abcde"), make_pod("Running"))
    result = run("stop", "x", "--timeout", "1s")
    assert result.code == 124
    assert "its pods are not gone after 1s" in result.err


def test_finished_job_cannot_be_stopped(server: Server, run: Run) -> None:
    submit_job(run)
    change_object(server, AT, status={"terminalState": "Failed"})
    assert run("stop", "x").code == 2


def test_running_job_is_deleted_only_with_option(server: Server, run: Run) -> None:
    submit_job(run)
    result = run("delete", "x")
    assert result.code == 2
    assert "--yes" in result.err
    assert server.stored("jobsets") == [AT]


def test_delete_needs_no_right_to_read_other_objects(server: Server, run: Run) -> None:
    submit_job(run)
    change_object(server, AT, status={"terminalState": "Completed"})
    for plural in ("networkpolicies", "configmaps"):
        server.on("GET", plural, *[refuse_with(403)] * 9)
    result = run("delete", "x")
    assert (result.code, result.out) == (0, "jobset.jobset.x-k8s.io/x deleted\n"), result.err
    assert server.stored("jobsets") == []


def test_delete_of_queued_job_asks_without_the_right_to_read_its_workload(
    server: Server, run: Run
) -> None:
    server.put(LOCAL_QUEUES.path("team-a", "q"), {})
    submit_job(run, "queue=q")
    change_object(server, AT, spec={"suspend": True})
    server.on("GET", "workloads", *[refuse_with(403)] * 9)
    result = run("delete", "x")
    assert result.code == 2 and "add --yes to delete it" in result.err
    assert run("delete", "x", "--yes").code == 0


def test_delete_waits_without_the_right_to_watch(server: Server, run: Run) -> None:
    submit_job(run)
    change_object(server, AT, status={"terminalState": "Completed"})

    def refuse_watch(handler: Handler) -> bool:
        return "watch" in handler.query and refuse_with(403)(handler)

    def delete_later(handler: Handler) -> bool:
        threading.Timer(0.5, lambda: server.drop(AT)).start()
        handler.answer(200, server.objects[AT])
        return True

    server.on("GET", "jobsets", *[refuse_watch] * 50)
    server.on("DELETE", "jobsets", delete_later)
    result = run("delete", "x")
    assert result.code == 0, result.err
    assert not server.stored("jobsets")


def test_missing_job_is_named_without_the_right_to_list(server: Server, run: Run) -> None:
    server.on("GET", "jobsets", lambda _: False, refuse_with(403))
    result = run("delete", "y")
    assert result.code == 2
    assert "Namespace team-a has no job y.\n" in result.err


def test_queued_job_is_stopped_where_kueue_was_removed(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.jobs.lifecycle._WORKLOAD_TIMEOUT_S", 0.0)
    server.put(LOCAL_QUEUES.path("team-a", "q"), {})
    submit_job(run, "queue=q")
    server.on("GET", "workloads", *[refuse_with(404)] * 9)
    result = run("stop", "x")
    assert result.code == 0, result.err
    assert server.objects[AT]["spec"]["suspend"] is True


def test_job_that_is_deleted_while_it_is_stopped_is_reported(server: Server, run: Run) -> None:
    submit_job(run)

    def delete_job(handler: Handler) -> bool:
        server.drop(AT)
        return False

    server.on("GET", "jobsets", lambda _: False, delete_job)
    result = run("stop", "x")
    assert result.code == 3 and "JobSet x in namespace team-a was deleted." in result.err


def test_delete_lists_deleted_and_kept_objects(server: Server, run: Run) -> None:
    submit_job(run)
    (configmap,) = server.stored("configmaps")
    change_object(server, AT, status={"terminalState": "Completed"})
    references = server.objects[configmap]["metadata"]["ownerReferences"]
    change_object(
        server, configmap, metadata={"ownerReferences": [*references, {"uid": "another"}]}
    )
    result = run("delete", "x")
    assert result.code == 0
    assert result.out.splitlines() == [
        "jobset.jobset.x-k8s.io/x deleted",
        "networkpolicy.networking.k8s.io/x deleted",
        f"configmap/{configmap.rpartition('/')[2]} kept: 1 more of its jobs are here",
    ]
    assert server.stored("jobsets") == []


def test_unknown_job_lists_existing_jobs(server: Server, run: Run) -> None:
    submit_job(run)
    result = run("delete", "y")
    assert result.code == 2
    assert "Namespace team-a has no job y.\n  hint: it has x." in result.err


def test_zero_wait_limit_is_refused(server: Server, run: Run) -> None:
    result = submit_job(run, "--timeout", "1s")
    assert result.code == 2
    assert "--timeout needs --wait or --follow." in result.err
    assert list_writes(server) == []


def test_deletion_during_wait_is_reported(server: Server, run: Run) -> None:
    def deleted(handler: Handler) -> bool:
        threading.Timer(0.5, lambda: server.drop(AT)).start()
        return False

    server.on("POST", "configmaps", deleted)
    result = submit_job(run, "--wait")
    assert result.code == 3
    assert "JobSet x in namespace team-a was deleted" in result.err


def test_wait_exits_with_code_of_job(server: Server, run: Run) -> None:
    def ends(handler: Handler) -> bool:
        threading.Timer(
            0.5, lambda: change_object(server, AT, status={"terminalState": "Completed"})
        ).start()
        return False

    server.on("POST", "configmaps", ends)
    result = submit_job(run, "--wait")
    assert (result.code, result.out) == (0, "jobset.jobset.x-k8s.io/x created\n")
    assert "x Done" in result.err


def test_objects_have_label_and_digest(server: Server, run: Run) -> None:
    submit_job(run)
    metadata = server.objects[AT]["metadata"]
    assert metadata["labels"][JOB_LABEL] == "x"
    assert len(metadata["annotations"][SPEC_HASH]) == 64


def test_sweep_is_listed_and_stopped_by_name(server: Server, run: Run) -> None:
    requests = ("sweep", "job.yaml", "env.SEED=0..2", "--cluster", "--name", "x-seeds")
    printed = run(*requests, "--dry-run")
    assert [
        entry["metadata"]["name"]
        for entry in yaml.safe_load_all(printed.out)
        if entry["kind"] == "JobSet"
    ] == [f"x-seeds-00{seed}" for seed in range(3)]
    assert not server.stored("/jobsets/") and not Path("runs").exists()
    first, second = run(*requests), run(*requests)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert first.out.count(" created\n") == 3 and second.out.count(" unchanged\n") == 3
    for seed in range(3):
        jobset = server.objects[JOBSETS.path("team-a", f"x-seeds-00{seed}")]
        assert jobset["metadata"]["labels"]["sweep"] == "x-seeds"
        assert f"'{seed}'" in str(jobset["spec"]).replace('"', "'")
    listed = run("list", "x-seeds")
    assert [row.split()[0] for row in listed.out.splitlines()[1:]] == [
        f"x-seeds-00{seed}" for seed in range(3)
    ]
    refused = run(*requests, "--halving")
    assert refused.code == 2 and "no process watches them" in refused.err
    stopped = run("stop", "x-seeds")
    assert stopped.code == 0 and stopped.out.count("stopping\n") == 3
    assert all(
        server.objects[JOBSETS.path("team-a", f"x-seeds-00{seed}")]["spec"]["suspend"]
        for seed in range(3)
    )


@pytest.mark.parametrize("words", [("-n", "absent"), ("priority=absent",)], ids=" ".join)
def test_refused_sweep_is_not_recorded(server: Server, run: Run, words: tuple[str, ...]) -> None:
    result = run("sweep", "job.yaml", "env.SEED=0,1", *words, "--cluster", "--name", "x-seeds")
    assert result.code in (2, 3) and "absent" in result.err
    assert not list_writes(server) and not Path("runs").exists()


def test_sweep_jobs_have_own_secrets(server: Server, run: Run) -> None:
    result = run(
        "sweep", "job.yaml", "gang_secret=true", "env.SEED=0,1", "--cluster", "--name", "x-seeds"
    )
    assert result.code == 0, result.err
    first, second = (
        server.objects[server_path] for server_path in sorted(server.stored("/secrets/"))
    )
    assert [entry["metadata"]["name"] for entry in (first, second)] == [
        "x-seeds-000-gang",
        "x-seeds-001-gang",
    ]
    assert first["data"] != second["data"]


def test_sweep_submits_to_the_namespace_of_its_option(server: Server, run: Run) -> None:
    server.put(NAMESPACES.path(None, "team-b"), {})
    result = run("sweep", "job.yaml", "env.SEED=0,1", "-n", "team-b", "--name", "x-seeds")
    assert result.code == 0, result.err
    assert sorted(server.stored("/jobsets/")) == [
        JOBSETS.path("team-b", f"x-seeds-00{seed}") for seed in range(2)
    ]
    assert "(namespace team-b)" in result.err
