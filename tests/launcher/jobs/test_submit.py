"""`launcher submit`, `stop` and `delete` as a person calls them, against an API server of a dictionary."""

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

from jaxlaunch.launcher.kubernetes.kinds import (
    CONFIGMAPS,
    JOBSETS,
    LIMIT_RANGES,
    LOCAL_QUEUES,
    NAMESPACES,
    NETWORK_POLICIES,
    PODS,
    SECRETS,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
)
from jaxlaunch.launcher.kubernetes.labels import JOB_LABEL, SPEC_HASH
from tests.launcher import apiserver
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
def here(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    server.put(NAMESPACES.path(None, "team-a"), {})
    monkeypatch.setenv(
        "KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, token=CANARY))
    )
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*arguments: str) -> CommandResult:
        left = launcher(capsys, monkeypatch, *arguments)
        assert CANARY not in left.out + left.err
        assert "Traceback" not in left.err
        return left

    return call


def submit(run: Run, *arguments: str) -> CommandResult:
    return run("submit", "job.yaml", *arguments)


def writes(server: Server) -> list[tuple[str, str]]:
    """Method and plural of everything that could change an object."""
    found = [
        (method, path.split("/")[-1 if method == "POST" else -2])
        for method, path, query in server.requests
        if "dryRun" not in query
    ]
    return [one for one in found if one[0] != "GET" and one[1] != "selfsubjectaccessreviews"]


def change(server: Server, path: str, **parts: Any) -> None:
    server.put(path, apiserver.merge_patch(server.objects[path], parts))


# --- what is written ------------------------------------------------------------------------------


def test_what_the_jobset_owns_goes_with_it(server: Server, run: Run) -> None:
    submit(run)
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


def test_what_is_there_already_gets_one_owner_more_and_nothing_else(
    server: Server, run: Run
) -> None:
    submit(run)
    assert run("submit", "job.yaml", "name=y").code == 0
    uid = server.objects[AT[:-1] + "y"]["metadata"]["uid"]
    (query,) = (query for method, _, query in server.requests if method == "PATCH")
    assert query["fieldManager"] == f"jaxlaunch-{uid}" and "force" not in query
    (configmap,) = server.stored("configmaps")
    assert server.objects[configmap]["binaryData"]


def test_the_manifests_are_those_of_render(server: Server, run: Run) -> None:
    rendered = yaml.safe_load(run("render", "job.yaml").out.split("---\n")[0])
    submit(run)
    assert server.objects[AT]["spec"] == rendered["spec"]
    assert server.objects[AT]["metadata"]["annotations"] == rendered["metadata"]["annotations"]


def test_a_dry_run_prints_the_manifests_and_writes_nothing(server: Server, run: Run) -> None:
    left = submit(run, "--dry-run")
    kinds = [one["kind"] for one in yaml.safe_load_all(left.out)]
    assert (left.code, kinds) == (0, ["JobSet", "NetworkPolicy", "ConfigMap"])
    assert writes(server) == []


def test_a_fault_in_the_cluster_s_own_defaults_names_its_configmap_and_line(
    server: Server, run: Run
) -> None:
    text = "image: i\nplatform: gke\nnetwork: {h100: efa}\n"
    server.put(CONFIGMAPS.path("team-a", "jaxlaunch"), defaults(text))
    left = submit(run, "accelerator.type=h100")
    assert left.code == 2 and writes(server) == []
    assert (
        "ConfigMap team-a/jaxlaunch, defaults.yaml:3: network = efa does not exist on "
        "platform = gke." in left.err
    )


def test_a_dry_run_with_a_file_of_defaults_needs_no_cluster(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "defaults.yaml").write_text("platform: gke\n")
    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    assert run("submit", "--dry-run", "job.yaml", "--defaults", "defaults.yaml").code == 0


def test_a_servers_dry_run_asks_it_and_keeps_nothing(server: Server, run: Run) -> None:
    left = submit(run, "--dry-run=server")
    first, second, third = left.out.splitlines()
    assert first == "jobset.jobset.x-k8s.io/x created (server dry run)"
    assert second == "networkpolicy.networking.k8s.io/x created (server dry run)"
    assert third.startswith("configmap/jaxlaunch-") and third.endswith(" created (server dry run)")
    assert all(
        query["dryRun"] == "All"
        for method, path, query in server.requests
        if ("POST", "sets") == (method, path[-4:])
    )
    assert not server.stored("jobsets")


@pytest.mark.parametrize(("output", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_the_jobset_is_printed_as_the_server_has_it(
    run: Run, output: str, read: Callable[[str], Any]
) -> None:
    shown = read(submit(run, "-o", output).out)["metadata"]
    assert shown["uid"]
    assert "managedFields" not in shown


# --- the gang's secret ----------------------------------------------------------------------------

SECRET_AT = SECRETS.path("team-a", "x-gang")


def commit_then_fail(handler: Handler) -> bool:
    """It is done, and a proxy answers that the server took too long."""
    handler.server.put(f"{handler.at}/{handler.body['metadata']['name']}", handler.body)
    return refuse_with(504)(handler)


def used_up(handler: Handler) -> bool:
    """A ResourceQuota of one object of this kind, which the server judges before whether the object exists."""
    plural = handler.at.rpartition("/")[2]
    if not any(path.rpartition("/")[0].endswith(f"/{plural}") for path in handler.server.objects):
        return False
    handler.fail(
        403, "Forbidden", f"{plural} is forbidden: exceeded quota: few, used: count/{plural}=1"
    )
    return True


def test_a_gang_s_secret_is_32_random_bytes_that_the_jobset_owns(server: Server, run: Run) -> None:
    left = submit(run, "gang_secret=true")
    assert (left.code, left.err) == (0, "")
    assert [plural for _, plural in writes(server)] == [
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


def test_several_hosts_have_certificates_of_an_authority_that_only_their_job_has(
    server: Server, run: Run
) -> None:
    left = run("submit", "job.yaml", "hosts=2")
    assert (left.code, left.err) == (0, "")
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
    own, authority, another = (
        x509.load_pem_x509_certificate(held)
        for held in (mine["tls.crt"], mine["ca.crt"], other["ca.crt"])
    )
    own.verify_directly_issued_by(authority)
    with pytest.raises(InvalidSignature):
        own.verify_directly_issued_by(another)
    assert b"PRIVATE" not in mine["ca.crt"]


def test_several_hosts_go_without_certificates_where_the_user_may_not_create_secrets_and_are_told(
    server: Server, run: Run
) -> None:
    server.denied.add(("create", "secrets"))
    left = run("submit", "job.yaml", "hosts=2")
    assert (
        left.code == 0
        and "traffic is not encrypted, since you may not create Secrets in namespace team-a"
        in left.err
    )
    assert SECRET_AT not in server.objects
    left = run("submit", "job.yaml", "name=y")  # a host alone
    assert (left.code, left.err) == (0, "")


def test_submitting_again_keeps_the_gang_s_secret_and_makes_one_that_is_missing(
    server: Server, run: Run
) -> None:
    submit(run, "gang_secret=true")
    before = server.objects[SECRET_AT]["data"]
    assert submit(run, "gang_secret=true").out == "jobset.jobset.x-k8s.io/x unchanged\n"
    assert server.objects[SECRET_AT]["data"] == before
    server.drop(SECRET_AT)
    assert submit(run, "gang_secret=true").code == 0
    assert server.objects[SECRET_AT]["data"] != before


def test_a_gang_s_secret_needs_the_right_to_create_secrets_and_none_to_read_them(
    server: Server, run: Run
) -> None:
    server.denied |= {
        ("get", "secrets"),
        ("list", "secrets"),
        ("patch", "secrets"),
        ("delete", "secrets"),
    }
    assert submit(run, "gang_secret=true").code == 0
    assert not any(method != "POST" for method, path, _ in server.requests if "secrets" in path)
    server.denied.add(("create", "secrets"))
    left = run("submit", "job.yaml", "name=y", "gang_secret=true")
    assert (
        left.code == 3
        and "Missing RBAC permissions in namespace team-a: create secrets." in left.err
    )
    assert run("submit", "job.yaml", "name=y").code == 0


@pytest.mark.parametrize("rehearsed", [(), ("--dry-run=server",)])
def test_a_secret_that_was_there_before_the_jobset_is_refused_before_anything_is_written(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch, rehearsed: tuple[str, ...]
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.jobs.submit.SECRET_TIMEOUT_S", 0.0)
    server.put(SECRET_AT, {"data": {"key": "a2V5"}})
    left = submit(run, "gang_secret=true", *rehearsed)
    assert left.code == 2
    assert (
        "Secret x-gang in namespace team-a was there before JobSet x, so others may know "
        "what it holds." in left.err
    )
    assert "`kubectl -n team-a delete secret x-gang`, then submit again." in left.err
    assert writes(server) == []
    assert server.objects[SECRET_AT]["data"] == {"key": "a2V5"}


def test_a_secret_that_comes_while_the_job_is_submitted_is_refused_and_the_job_taken_back(
    server: Server, run: Run
) -> None:
    def came(handler: Handler) -> bool:
        server.put(SECRET_AT, {"data": {"key": "a2V5"}})
        return False

    server.on("POST", "jobsets", came)
    left = submit(run, "gang_secret=true")
    assert (
        left.code == 2 and server.count("POST", "secrets") == 3
    )  # two dry runs; no JobSet runs on while others try
    assert (
        "JobSet x was deleted again: its pods would have used that." in left.err
        and AT not in server.objects
    )


@pytest.mark.parametrize("fault", [commit_then_drop, commit_then_fail])
def test_a_gang_s_secret_whose_creation_was_not_answered_is_the_gang_s(
    server: Server, run: Run, fault: apiserver.Fault
) -> None:
    server.on("POST", "secrets", fault)
    assert submit(run, "gang_secret=true").code == 0
    assert server.stored("secrets") == [SECRET_AT]


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_job_starts_once_the_secret_of_the_one_before_is_gone(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.jobs.submit._QUIET_WAIT_S", 0.0)
    submit(run, "gang_secret=true")
    before = server.objects[SECRET_AT]["data"]
    change(server, AT, status={"terminalState": "Completed"})
    if not is_replaced:
        server.drop(AT)
    server.requests.clear()

    def collects(handler: Handler) -> bool:
        assert AT not in server.objects
        server.drop(SECRET_AT)
        return False

    finds = [lambda handler: False] * 3  # the first judges the manifest
    server.on("DRY", "secrets", *finds, collects)
    left = submit(run, "gang_secret=true", *(["--replace"] if is_replaced else []))
    assert left.code == 0 and server.count("POST", "jobsets") == 1
    assert left.err.count("waiting for Secret x-gang to go: it is there without JobSet x") == 1
    assert server.objects[SECRET_AT]["data"] != before


@pytest.mark.parametrize("fault", [refuse_with(500), drop_connection])
def test_a_job_that_runs_is_kept_by_a_submission_whose_creation_of_it_is_not_answered(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch, fault: apiserver.Fault
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.jobs.submit.SECRET_TIMEOUT_S", 0.0)
    submit(run, "gang_secret=true")
    before = server.objects[AT]
    server.on("POST", "jobsets", fault)
    left = submit(run, "gang_secret=true")
    assert (left.code, left.out) == (0, "jobset.jobset.x-k8s.io/x unchanged\n")
    assert server.objects[AT] == before
    assert run("stop", "x").code == 0
    assert submit(run, "gang_secret=true").out == "jobset.jobset.x-k8s.io/x resumed\n"


@pytest.mark.parametrize("rehearsed", [(), ("--dry-run=server",)])
def test_a_quota_that_the_gang_s_secret_itself_uses_up_refuses_neither_the_job_nor_its_successor(
    server: Server, run: Run, rehearsed: tuple[str, ...]
) -> None:
    for method in ("DRY", "POST"):
        server.on(method, "secrets", *[used_up] * 20)
    assert submit(run, "gang_secret=true").code == 0
    again = submit(run, "gang_secret=true", *rehearsed)
    assert again.code == 0 and "jobset.jobset.x-k8s.io/x unchanged" in again.out
    assert run("stop", "x").code == 0
    again = submit(run, "gang_secret=true", *rehearsed)
    assert again.code == 0 and "jobset.jobset.x-k8s.io/x resumed" in again.out
    left = run("submit", "job.yaml", "name=y", "gang_secret=true", *rehearsed)
    assert left.code == 3 and "exceeded quota: few" in left.err and server.stored("jobsets") == [AT]
    change(server, AT, status={"terminalState": "Completed"})

    def removed(handler: Handler) -> bool:
        """Seconds later the server's garbage collector deletes what the JobSet owned."""
        threading.Timer(0.2, server.drop, [SECRET_AT]).start()
        return False

    server.on("DELETE", "jobsets", removed)
    left = submit(run, "gang_secret=true", "hosts=2", "--replace", *rehearsed)
    assert left.code == 0 and "jobset.jobset.x-k8s.io/x replaced" in left.out, left.err


# --- again ----------------------------------------------------------------------------------------


def test_what_an_interrupted_submission_left_out_is_added(server: Server, run: Run) -> None:
    submit(run)
    server.drop(POLICY_AT)
    assert submit(run).code == 0
    assert server.stored("networkpolicies") == [POLICY_AT]


def test_a_stopped_job_is_resumed_by_the_same_file(server: Server, run: Run) -> None:
    submit(run)
    assert run("stop", "x").out == "jobset.jobset.x-k8s.io/x stopped\n"
    assert server.objects[AT]["spec"]["suspend"] is True
    left = submit(run)
    assert (left.code, left.out) == (0, "jobset.jobset.x-k8s.io/x resumed\n")
    assert server.objects[AT]["spec"]["suspend"] is False


@pytest.mark.parametrize("arguments", [(), ("--replace",), ("--dry-run=server",)])
def test_a_jobset_that_is_not_ours_is_never_changed(
    server: Server, run: Run, arguments: tuple[str, ...]
) -> None:
    theirs = {
        "metadata": {"name": "x", "managedFields": [{"manager": "kubectl-create"}]},
        "status": {},
    }
    server.put(AT, theirs | {"status": {"terminalState": "Completed"}})
    before = json.dumps(server.objects)
    left = submit(run, *arguments)
    assert left.code == 2
    assert "exists and is not managed by launcher: created by kubectl-create at 2026-" in left.err
    assert json.dumps(server.objects) == before


def test_who_created_it_is_no_controller_that_touched_it_later(server: Server, run: Run) -> None:
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
def test_a_job_whose_label_was_taken_away_remains_ours(
    server: Server, run: Run, command: tuple[str, ...]
) -> None:
    assert submit(run).code == 0
    server.objects[AT]["metadata"]["labels"] = {}
    left = run(*command, "x")
    assert left.code == 0, left.err


@pytest.mark.parametrize("command", ["stop", "delete"])
def test_what_is_not_ours_is_neither_stopped_nor_deleted(
    server: Server, run: Run, command: str
) -> None:
    server.put(AT, {"metadata": {"name": "x"}})
    left = run(command, "x")
    assert left.code == 2
    assert "JobSet x in namespace team-a is not managed by launcher" in left.err
    assert writes(server) == []


def test_a_network_policy_that_is_not_ours_is_refused_before_anything_is_written(
    server: Server, run: Run
) -> None:
    server.put(POLICY_AT, {"metadata": {"name": "x"}})
    left = submit(run)
    assert left.code == 2
    assert "NetworkPolicy x in namespace team-a exists and is not managed by launcher" in left.err
    assert writes(server) == []


def test_a_running_job_is_not_replaced(server: Server, run: Run) -> None:
    submit(run)
    assert submit(run, "hosts=2", "--replace").code == 2
    assert server.count("DELETE") == 0


def forbid(handler: Handler) -> bool:
    handler.fail(403, "Forbidden", "configmaps is forbidden: exceeded quota: few")
    return True


@pytest.mark.parametrize("plural", ["configmaps", "networkpolicies"])
def test_what_the_server_would_refuse_is_known_before_the_jobset_is_there(
    server: Server, run: Run, plural: str
) -> None:
    server.on("DRY", plural, forbid)
    left = submit(run)
    assert left.code == 3 and "exceeded quota: few" in left.err
    assert writes(server) == [] and not server.stored("jobsets")


def test_a_refusal_after_the_jobset_is_there_says_what_exists_and_what_completes_it(
    server: Server, run: Run
) -> None:
    server.on("POST", "configmaps", forbid)
    left = submit(run)
    assert left.code == 3
    assert "exceeded quota: few" in left.err
    assert "JobSet x in namespace team-a exists without jaxlaunch-" in left.err
    assert "Submitting again completes it; `launcher delete -n team-a x` removes it." in left.err
    assert submit(run).out == "jobset.jobset.x-k8s.io/x unchanged\n" and server.stored("configmaps")


def test_a_server_dry_run_of_a_job_that_would_be_replaced_judges_the_new_one(
    server: Server, run: Run
) -> None:
    submit(run)
    change(server, AT, status={"terminalState": "Completed"})
    judged: list[str] = []

    def judge(handler: Handler) -> bool:
        judged.append(handler.body["metadata"]["name"])
        return False

    server.on("DRY", "jobsets", judge, judge)
    left = submit(run, "--replace", "--dry-run=server", "hosts=2")
    assert left.code == 0 and "jobset.jobset.x-k8s.io/x replaced (server dry run)" in left.out
    assert judged[0] == "x" and judged[1] != "x"


def test_a_server_dry_run_of_a_finished_job_s_name_checks_the_change_before_it_refuses_the_name(
    server: Server, run: Run
) -> None:
    submit(run)
    change(server, AT, status={"terminalState": "Completed"})

    def judge(handler: Handler) -> bool:
        if is_new := handler.body["metadata"]["name"] != "x":
            handler.fail(422, "Invalid", "JobSet is invalid: too many hosts")
        return is_new

    left = submit(run, "--dry-run=server", "hosts=2")
    assert left.code == 2 and "has already completed" in left.err
    server.on("DRY", "jobsets", judge, judge)
    left = submit(run, "--dry-run=server", "hosts=2")
    assert left.code == 3 and "too many hosts" in left.err


@pytest.mark.parametrize("plural", ["jobsets", "configmaps", "networkpolicies"])
@pytest.mark.parametrize("rehearsed", [(), ("--dry-run=server",)])
def test_a_quota_that_the_job_itself_uses_up_refuses_neither_it_nor_its_successor(
    server: Server, run: Run, here: Path, plural: str, rehearsed: tuple[str, ...]
) -> None:
    (here / "job.yaml").write_text(JOB + "code: code\n")
    (here / "code").mkdir()
    (here / "code" / "train.py").write_text("1")
    for method in ("DRY", "POST"):
        server.on(method, plural, *[used_up] * 9)
    assert submit(run).code == 0
    again = submit(run, *rehearsed)
    assert again.code == 0 and "jobset.jobset.x-k8s.io/x unchanged" in again.out
    change(server, AT, status={"terminalState": "Completed"})
    (here / "code" / "train.py").write_text("2")

    def collects(handler: Handler) -> bool:
        """The server's garbage collector deletes what the JobSet owned."""
        for path in server.stored("configmaps"):
            server.drop(path)
        return False

    server.on("DELETE", "jobsets", collects)
    left = submit(run, "--replace", *rehearsed)
    assert left.code == 0 and "jobset.jobset.x-k8s.io/x replaced" in left.out, left.err


def test_a_policy_of_another_that_came_meanwhile_is_not_said_to_be_completed_by_submitting_again(
    server: Server, run: Run
) -> None:
    def came(handler: Handler) -> bool:
        server.put(POLICY_AT, {"spec": {}})
        return False

    server.on("POST", "jobsets", came)
    left = submit(run)
    assert left.code == 2 and "exists and is not managed by launcher" in left.err
    assert "JobSet x exists without it; `launcher delete -n team-a x` removes it." in left.err
    assert "Submitting again completes it" not in left.err


# --- a server that is not well --------------------------------------------------------------------


def foreign(made: dict[str, Any], how: str) -> dict[str, Any]:
    """A ConfigMap of the same name as another could have made it."""
    agent = base64.b64decode(made["binaryData"]["agent.pyz"])
    changes: dict[str, dict[str, Any]] = {
        "empty": {"binaryData": None, "immutable": None},
        "other bytes": {"binaryData": {"agent.pyz": base64.b64encode(agent[:-1] + b"!").decode()}},
        "one file more": {"data": {"sitecustomize.py": "import os"}},
        "the same file as text": {"data": {"agent.pyz": "x"}, "binaryData": None},
        "not immutable": {"immutable": None},
        "another tool's": {"metadata": {"labels": {"app.kubernetes.io/managed-by": "Helm"}}},
        "no label": {"metadata": {"labels": None}},
    }
    found = apiserver.merge_patch(made, changes[how])
    found["metadata"] = {
        key: one for key, one in found["metadata"].items() if key != "ownerReferences"
    }
    return found | {
        "metadata": found["metadata"] | {"managedFields": [{"manager": "kubectl-create"}]}
    }


@pytest.fixture
def brought(server: Server, run: Run) -> tuple[str, dict[str, Any]]:
    """Path and contents of the ConfigMap that the job brings, on a server that has none of the job's objects."""
    submit(run)
    (path,) = server.stored("configmaps")
    made = copy.deepcopy(server.objects[path])
    for left in (AT, POLICY_AT, path):
        server.drop(left)
    server.requests.clear()
    return path, made


@pytest.mark.parametrize(
    ("how", "said"),
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
def test_a_configmap_made_beforehand_under_the_digest_s_name_is_read_and_refused(
    server: Server,
    run: Run,
    brought: tuple[str, dict[str, Any]],
    how: str,
    said: str,
    rehearsed: tuple[str, ...],
) -> None:
    path, made = brought
    server.put(path, foreign(made, how))
    left = submit(run, *rehearsed)
    assert left.code == 2 and said in left.err, left.err
    assert (
        f"ConfigMap {made['metadata']['name']} in namespace team-a has the name of one that this "
        "job creates" in left.err
    )
    assert f"kubectl delete configmap {made['metadata']['name']} -n team-a" in left.err
    assert writes(server) == []


def test_a_configmap_of_the_same_contents_is_shared_whoever_labelled_it_further(
    server: Server, run: Run, brought: tuple[str, dict[str, Any]]
) -> None:
    path, made = brought
    server.put(
        path,
        apiserver.merge_patch(
            made, {"metadata": {"labels": {"team": "a"}, "annotations": {"note": "x"}}}
        ),
    )
    assert submit(run).code == 0


def test_a_configmap_made_while_the_job_is_submitted_is_read_too_and_the_job_taken_back(
    server: Server, run: Run, brought: tuple[str, dict[str, Any]]
) -> None:
    path, made = brought

    def came(handler: Handler) -> bool:
        server.put(path, foreign(made, "other bytes"))
        return False

    server.on("POST", "jobsets", came)
    left = submit(run)
    assert left.code == 2 and "its agent.pyz is not this job's" in left.err
    assert "JobSet x was deleted again: its pods would have used that." in left.err
    assert not server.stored("jobsets")
    server.drop(path)
    server.on("POST", "jobsets", came)
    server.on("DELETE", "jobsets", refuse_with(403))
    assert "its agent.pyz is not this job's" in (err := submit(run).err)
    assert "JobSet x exists and its pods use that: delete it now." in err


@pytest.mark.parametrize(
    "faults",
    [
        [refuse_with(429, Retry_After="0")],
        [refuse_with(500)],
        [refuse_with(503)],
        [refuse_with(504)],
        [drop_connection],
        [commit_then_drop],
        [refuse_with(500), drop_connection, commit_then_drop],
    ],
)
@pytest.mark.parametrize("plural", ["jobsets", "networkpolicies"])
def test_a_fault_while_writing_leaves_exactly_one_of_each(
    server: Server, run: Run, faults: list[apiserver.Fault], plural: str
) -> None:
    server.on("POST", plural, *faults)
    left = submit(run)
    assert (left.code, left.out) == (0, "jobset.jobset.x-k8s.io/x created\n")
    assert (server.stored("jobsets"), server.stored("networkpolicies")) == ([AT], [POLICY_AT])
    uid = server.objects[AT]["metadata"]["uid"]
    assert server.objects[POLICY_AT]["metadata"]["ownerReferences"][0]["uid"] == uid


@pytest.mark.parametrize(
    "part", ["jobsets", "selfsubjectaccessreviews", "jobset.x-k8s.io", "configmaps"]
)
def test_a_server_that_never_answers_ends_it_within_bounds(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.kubernetes.transport.TOTAL_TIMEOUT_S", 1.0)
    for method in ("GET", "POST", "PATCH"):
        server.on(method, part, *[hang_request] * 50)
    left = submit(run)
    assert left.code == 3
    assert "stopped answering" in left.err
    assert len(server.stored("jobsets")) <= 1


def test_a_webhook_that_is_down_is_tried_for_a_while_and_named(
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
    left = submit(run)
    assert left.code == 3
    assert 'failed calling webhook "mjobset.kb.io"' in left.err
    assert "is the controller that serves the webhook running" in left.err
    assert server.count("POST", "jobsets") > 1


def interrupted(
    server: Server, fault: Callable[[Handler, Callable[[], None]], bool], here: Path
) -> tuple[int, str]:
    """Exit code and talk of a submission that gets one Ctrl-C at the moment the fault chooses."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxlaunch.launcher.cli.main", "submit", str(here / "job.yaml")],
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


def test_ctrl_c_while_the_jobset_is_sent_says_that_it_may_still_come(
    server: Server, here: Path
) -> None:
    def fault(handler: Handler, interrupt: Callable[[], None]) -> bool:
        interrupt()
        return hang_request(handler)

    code, err = interrupted(server, fault, here)
    assert code == 130
    assert (
        "interrupted: JobSet x in namespace team-a does not exist now, but its creation "
        "had been sent" in err
    )
    assert "Traceback" not in err


def test_ctrl_c_after_the_jobset_was_made_says_that_it_exists(server: Server, here: Path) -> None:
    def fault(handler: Handler, interrupt: Callable[[], None]) -> bool:
        server.put(AT, handler.body)
        interrupt()
        return hang_request(handler)

    code, err = interrupted(server, fault, here)
    assert code == 130
    assert "interrupted: JobSet x in namespace team-a exists without x, jaxlaunch-" in err
    assert "`launcher delete -n team-a x` removes it" in err
    assert server.stored("jobsets") == [AT]


# --- what is asked before -------------------------------------------------------------------------


def test_what_is_wrong_with_the_file_is_said_without_a_cluster(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    left = submit(run, "hosts=-1")
    assert left.code == 2
    assert "hosts=-1 (override)" in left.err


def test_a_cluster_without_jobset_is_said(server: Server, run: Run) -> None:
    del server.groups["jobset.x-k8s.io"]
    left = submit(run)
    assert left.code == 3
    assert "Cluster of context test: JobSet is not installed." in left.err


def test_a_queue_needs_a_kueue_that_we_know(server: Server, run: Run) -> None:
    server.groups["kueue.x-k8s.io"] = ["v1beta1"]
    left = submit(run, "queue=q")
    assert left.code == 3
    assert "Kueue: kueue.x-k8s.io is served as v1beta1, not as v1beta2" in left.err


def test_everything_that_is_in_the_way_is_said_at_once(server: Server, run: Run) -> None:
    server.drop(NAMESPACES.path(None, "team-a"))
    server.denied |= {("create", "jobsets"), ("create", "networkpolicies")}
    server.put(LOCAL_QUEUES.path("team-a", "research"), {})
    server.put(WORKLOAD_PRIORITY_CLASSES.path(None, "high"), {})
    left = submit(run, "queue=reserch", "priority=urgent")
    assert left.code == 3
    assert "Namespace team-a does not exist" in left.err
    assert "create jobsets.jobset.x-k8s.io, create networkpolicies.networking.k8s.io" in left.err
    assert "LocalQueue reserch does not exist in namespace team-a: Kueue never starts" in left.err
    assert "  hint: use research.\n" in left.err
    assert "WorkloadPriorityClass urgent does not exist: " in left.err
    assert "  hint: use priority: high.\n" in left.err
    assert writes(server) == []


def test_a_queue_that_stands_still_is_said_and_joined(server: Server, run: Run) -> None:
    status = {"conditions": [{"type": "Active", "status": "False", "message": "it is stopped"}]}
    server.put(LOCAL_QUEUES.path("team-a", "q"), {"status": status})
    left = submit(run, "queue=q")
    assert left.code == 0
    assert "LocalQueue q is inactive: Kueue admits nothing from it: it is stopped" in left.err


def test_a_job_that_requests_nothing_is_told_so(server: Server, run: Run, here: Path) -> None:
    (here / "job.yaml").write_text(ASKING_NOTHING)
    left = submit(run)
    assert (
        left.code == 0
        and "launcher: the pods request no cpu or memory: the scheduler counts none" in left.err
    )
    limits = [{"type": "Container", "defaultRequest": {"cpu": "1", "memory": "1Gi"}}]
    server.put(LIMIT_RANGES.path("team-a", "limits"), {"spec": {"limits": limits}})
    assert submit(run, "name=y").err == ""


def test_what_a_limit_range_that_may_not_be_read_gives_the_pods_is_not_taken_for_nothing(
    server: Server, run: Run, here: Path
) -> None:
    (here / "job.yaml").write_text(ASKING_NOTHING)
    server.on("GET", "limitranges", *[refuse_with(403)] * 9)
    left = submit(run)
    assert left.code == 0
    assert (
        "launcher: whether the pods request cpu or memory: the job requests no cpu or memory, and"
        in left.err
    )
    assert "the pods request no" not in left.err
    assert server.count("GET", "limitranges") == 1


def test_whoever_may_not_look_is_not_kept_from_submitting(server: Server, run: Run) -> None:
    server.on(
        "GET",
        "namespaces/team-a",
        *[lambda handler: handler.at.endswith("/team-a") and refuse_with(403)(handler)] * 9,
    )
    server.on("GET", "priorityclasses", refuse_with(403))
    server.on("GET", "jaxlaunch-system", refuse_with(403))
    left = submit(run, "priority=high")
    assert left.code == 0
    assert "whether PriorityClass high exists is not known" in left.err


# --- the cluster defaults -------------------------------------------------------------------------


def defaults(text: str) -> dict[str, Any]:
    return {"data": {"defaults.yaml": text}}


def test_the_defaults_of_the_namespace_come_before_the_cluster_s(
    server: Server, run: Run, here: Path
) -> None:
    (here / "job.yaml").write_text(JOB.replace("image: i\n", ""))
    server.put(CONFIGMAPS.path("jaxlaunch-system", "jaxlaunch"), defaults("image: of-all\n"))
    assert "image: of-all" in submit(run, "--dry-run").out
    server.put(CONFIGMAPS.path("team-a", "jaxlaunch"), defaults("image: of-team\n"))
    left = submit(run, "--dry-run")
    assert "image: of-team" in left.out
    assert left.err == "launcher: the cluster defaults are in ConfigMap team-a/jaxlaunch\n"


# --- stop, delete, wait ---------------------------------------------------------------------------


def test_a_job_in_a_queue_is_stopped_where_its_queue_keeps_it(server: Server, run: Run) -> None:
    server.put(LOCAL_QUEUES.path("team-a", "q"), {})
    submit(run, "queue=q")
    uid = server.objects[AT]["metadata"]["uid"]
    workload = WORKLOADS.path("team-a", "jobset-x")
    server.put(
        workload,
        {"metadata": {"labels": {"kueue.x-k8s.io/job-uid": uid}}, "spec": {"active": True}},
    )
    assert run("stop", "x").code == 0
    assert server.objects[workload]["spec"] == {"active": False}
    assert "suspend" not in server.objects[AT]["spec"]
    change(server, AT, spec={"suspend": True})  # as Kueue does
    assert submit(run, "queue=q").out.endswith("resumed\n")
    assert server.objects[workload]["spec"] == {"active": True}


def pod(phase: str, message: str = "") -> dict[str, Any]:
    ended = {"state": {"terminated": {"exitCode": 80, "message": message}}} if message else {}
    status = {"phase": phase, "containerStatuses": [{"name": "main", **ended}]}
    return {"metadata": {"labels": {"jobset.sigs.k8s.io/jobset-name": "x"}}, "status": status}


def test_stop_waits_for_the_pods_and_says_what_was_saved(server: Server, run: Run) -> None:
    submit(run)
    path = PODS.path("team-a", "x-w-0-0-abcde")
    server.put(path, pod("Running"))

    def ends(handler: Handler) -> bool:
        """The kubelet, once the job is suspended."""
        verdict = {"code": 80, "cause": "preempted", "message": "stopped, and saved at step 12"}
        said = json.dumps(
            {"jaxlaunch": 1, "verdict": verdict, "host": 0, "generation": 0, "attempt": 1}
        )
        threading.Timer(
            0.5, lambda: (server.put(path, pod("Running", said)), server.drop(path))
        ).start()
        return False

    server.on("PATCH", "jobsets", ends)
    left = run("stop", "x")
    assert (left.code, left.out) == (0, "jobset.jobset.x-k8s.io/x stopped\n")
    assert left.err == "launcher: stopped, and saved at step 12\n"
    said = json.loads(server.objects[AT]["metadata"]["annotations"]["jaxlaunch.io/progress"])
    assert (said["when"], said["verdict"]["code"], said["verdict"]["message"]) == (
        "stopped",
        80,
        left.err[10:-1],
    )
    shown = run("status", "x")
    assert shown.out.splitlines()[0] == "preempted (80): stopped, and saved at step 12"
    assert re.search(r"as of +\d\d:\d\d:\d\d UTC \(\d+s ago\), when it was stopped", shown.out)


def test_a_stop_whose_progress_may_not_be_written_says_so_once(server: Server, run: Run) -> None:
    submit(run)
    verdict = {"cause": "preempted", "code": 80, "message": "saved at step 12"}
    said = json.dumps(
        {"jaxlaunch": 1, "verdict": verdict, "host": 0, "generation": 0, "attempt": 1}
    )
    server.put(PODS.path("team-a", "x-w-0-0-abcde"), pod("Failed", said))
    server.on("PATCH", "jobsets", lambda handler: False, refuse_with(403))
    left = run("stop", "x")
    assert left.code == 0
    assert left.err.count("how far x was is not on its JobSet: ") == 1


def test_pods_that_do_not_go_are_waited_for_no_longer_than_was_said(
    server: Server, run: Run
) -> None:
    submit(run)
    server.put(PODS.path("team-a", "x-w-0-0-abcde"), pod("Running"))
    left = run("stop", "x", "--timeout", "1s")
    assert left.code == 124
    assert "its pods are not gone after 1s" in left.err


def test_a_job_that_is_over_cannot_be_stopped(server: Server, run: Run) -> None:
    submit(run)
    change(server, AT, status={"terminalState": "Failed"})
    assert run("stop", "x").code == 2


def test_a_running_job_is_deleted_only_on_purpose(server: Server, run: Run) -> None:
    submit(run)
    left = run("delete", "x")
    assert left.code == 2
    assert "--yes" in left.err
    assert server.stored("jobsets") == [AT]


def test_delete_says_what_goes_and_what_stays(server: Server, run: Run) -> None:
    submit(run)
    (configmap,) = server.stored("configmaps")
    change(server, AT, status={"terminalState": "Completed"})
    references = server.objects[configmap]["metadata"]["ownerReferences"]
    change(server, configmap, metadata={"ownerReferences": [*references, {"uid": "another"}]})
    left = run("delete", "x")
    assert left.code == 0
    assert left.out.splitlines() == [
        "jobset.jobset.x-k8s.io/x deleted",
        "networkpolicy.networking.k8s.io/x deleted",
        f"configmap/{configmap.rpartition('/')[2]} kept: 1 more of its jobs are here",
    ]
    assert server.stored("jobsets") == []


def test_a_job_that_is_not_there_is_said_with_those_that_are(server: Server, run: Run) -> None:
    submit(run)
    left = run("delete", "y")
    assert left.code == 2
    assert "Namespace team-a has no job y.\n  hint: it has x." in left.err


def test_a_limit_of_no_wait_is_refused(server: Server, run: Run) -> None:
    left = submit(run, "--timeout", "1s")
    assert left.code == 2
    assert "--timeout needs --wait or --follow." in left.err
    assert writes(server) == []


def test_a_job_that_is_deleted_while_it_is_waited_for_is_said(server: Server, run: Run) -> None:
    def deleted(handler: Handler) -> bool:
        threading.Timer(0.5, lambda: server.drop(AT)).start()
        return False

    server.on("POST", "configmaps", deleted)
    left = submit(run, "--wait")
    assert left.code == 3
    assert "JobSet x in namespace team-a was deleted meanwhile" in left.err


def test_the_end_of_a_wait_is_the_jobs_own(server: Server, run: Run) -> None:
    def ends(handler: Handler) -> bool:
        threading.Timer(
            0.5, lambda: change(server, AT, status={"terminalState": "Completed"})
        ).start()
        return False

    server.on("POST", "configmaps", ends)
    left = submit(run, "--wait")
    assert (left.code, left.out) == (0, "jobset.jobset.x-k8s.io/x created\n")
    assert "x Done" in left.err


def test_what_is_ours_bears_our_label_and_the_digest_of_its_spec(server: Server, run: Run) -> None:
    submit(run)
    metadata = server.objects[AT]["metadata"]
    assert metadata["labels"][JOB_LABEL] == "x"
    assert len(metadata["annotations"][SPEC_HASH]) == 64


def test_a_sweep_is_jobs_of_one_label_that_are_listed_and_stopped_by_its_name(
    server: Server, run: Run
) -> None:
    asked = ("sweep", "job.yaml", "env.SEED=0..2", "--cluster", "--name", "x-seeds")
    printed = run(*asked, "--dry-run")
    assert [
        one["metadata"]["name"]
        for one in yaml.safe_load_all(printed.out)
        if one["kind"] == "JobSet"
    ] == [f"x-seeds-00{seed}" for seed in range(3)]
    assert not server.stored("/jobsets/") and not Path("runs").exists()
    first, again = run(*asked), run(*asked)
    assert (first.code, again.code) == (0, 0), first.err + again.err
    assert first.out.count(" created\n") == 3 and again.out.count(" unchanged\n") == 3
    for seed in range(3):
        jobset = server.objects[JOBSETS.path("team-a", f"x-seeds-00{seed}")]
        assert jobset["metadata"]["labels"]["sweep"] == "x-seeds"
        assert f"'{seed}'" in str(jobset["spec"]).replace('"', "'")
    listed = run("list", "x-seeds")
    assert [row.split()[0] for row in listed.out.splitlines()[1:]] == [
        f"x-seeds-00{seed}" for seed in range(3)
    ]
    refused = run(*asked, "--halving")
    assert refused.code == 2 and "no process follows them" in refused.err
    stopped = run("stop", "x-seeds")
    assert stopped.code == 0 and stopped.out.count("stopping\n") == 3
    assert all(
        server.objects[JOBSETS.path("team-a", f"x-seeds-00{seed}")]["spec"]["suspend"]
        for seed in range(3)
    )


def test_each_job_of_a_sweep_gets_the_secret_of_its_own_gang(server: Server, run: Run) -> None:
    left = run(
        "sweep", "job.yaml", "gang_secret=true", "env.SEED=0,1", "--cluster", "--name", "x-seeds"
    )
    assert left.code == 0, left.err
    first, second = (
        server.objects[server_path] for server_path in sorted(server.stored("/secrets/"))
    )
    assert [one["metadata"]["name"] for one in (first, second)] == [
        "x-seeds-000-gang",
        "x-seeds-001-gang",
    ]
    assert first["data"] != second["data"]
