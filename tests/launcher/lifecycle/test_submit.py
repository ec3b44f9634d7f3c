"""`launcher submit`, `stop` and `delete` as a person calls them, against an API server of a dictionary."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.jobset import OWN_LABEL, SPEC_HASH
from launcher.kinds import (
    CONFIGMAPS,
    JOBSETS,
    LOCAL_QUEUES,
    NAMESPACES,
    NETWORK_POLICIES,
    PODS,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
)
from tests.launcher import apiserver
from tests.launcher.apiserver import Handler, Server, commit_then_drop, drop, hang, refuse
from tests.launcher.cli import Left, launcher

JOB = "name: x\nimage: i\naccelerator: {type: cpu}\ncommand: [python, train.py]\n"
AT, POLICY_AT = JOBSETS.path("team-a", "x"), NETWORK_POLICIES.path("team-a", "x")
CANARY = "canary-3f9a77"

Run = Callable[..., Left]


@pytest.fixture
def here(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    server.put(NAMESPACES.path(None, "team-a"), {})
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path, server.url, token=CANARY)))
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@pytest.fixture
def run(here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    def call(*arguments: str) -> Left:
        left = launcher(capsys, monkeypatch, *arguments)
        assert CANARY not in left.out + left.err
        assert "Traceback" not in left.err
        return left

    return call


def submit(run: Run, *arguments: str) -> Left:
    return run("submit", "job.yaml", *arguments)


def writes(server: Server) -> list[tuple[str, str]]:
    """Method and plural of everything that could change an object."""
    found = [(method, path.split("/")[-1 if method == "POST" else -2]) for method, path, _ in server.requests]
    return [one for one in found if one[0] != "GET" and one[1] != "selfsubjectaccessreviews"]


def change(server: Server, path: str, **parts: Any) -> None:
    server.put(path, apiserver.merged(server.objects[path], parts))


# --- what is written --------------------------------------------------------------------------------------------------


def test_a_job_is_at_most_three_writes_the_jobset_first(server: Server, run: Run) -> None:
    left = submit(run)
    assert (left.code, left.out, left.err) == (0, "jobset.jobset.x-k8s.io/x created\n", "")
    assert writes(server) == [("POST", "jobsets"), ("POST", "networkpolicies"), ("POST", "configmaps")]


def test_what_the_jobset_owns_goes_with_it(server: Server, run: Run) -> None:
    submit(run)
    uid = server.objects[AT]["metadata"]["uid"]
    (configmap,) = server.stored("configmaps")
    for path in (POLICY_AT, configmap):
        (reference,) = server.objects[path]["metadata"]["ownerReferences"]
        assert reference == {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "name": "x", "uid": uid}


def test_what_is_there_already_gets_one_owner_more_and_nothing_else(server: Server, run: Run) -> None:
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


def test_a_dry_run_with_a_profile_needs_no_cluster(run: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "profile.yaml").write_text("platform: gke\n")
    monkeypatch.setenv("KUBECONFIG", "/dev/null")
    assert run("submit", "--dry-run", "job.yaml", "--profile", "profile.yaml").code == 0


def test_a_servers_dry_run_asks_it_and_keeps_nothing(server: Server, run: Run) -> None:
    left = submit(run, "--dry-run=server")
    first, second, third = left.out.splitlines()
    assert first == "jobset.jobset.x-k8s.io/x created (server dry run)"
    assert second == "networkpolicy.networking.k8s.io/x created (server dry run)"
    assert third.startswith("configmap/jaxlaunch-") and third.endswith(" created (server dry run)")
    assert all(
        query["dryRun"] == "All" for method, path, query in server.requests if ("POST", "sets") == (method, path[-4:])
    )
    assert not server.stored("jobsets")


@pytest.mark.parametrize(("output", "read"), [("json", json.loads), ("yaml", yaml.safe_load)])
def test_the_jobset_is_printed_as_the_server_has_it(run: Run, output: str, read: Callable[[str], Any]) -> None:
    shown = read(submit(run, "-o", output).out)["metadata"]
    assert shown["uid"]
    assert "managedFields" not in shown


# --- again ------------------------------------------------------------------------------------------------------------


def test_the_same_job_again_changes_nothing(server: Server, run: Run) -> None:
    submit(run)
    before = json.dumps(server.objects[AT])
    left = submit(run)
    assert (left.code, left.out) == (0, "jobset.jobset.x-k8s.io/x unchanged\n")
    assert "already submitted at 2026-" in left.err
    assert json.dumps(server.objects[AT]) == before


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


def test_another_job_of_the_name_is_refused(server: Server, run: Run) -> None:
    submit(run)
    left = submit(run, "hosts=2")
    assert left.code == 2
    assert "JobSet x in namespace team-a runs, and is another job than this file's" in left.err
    assert server.objects[AT]["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] == 1


@pytest.mark.parametrize("arguments", [(), ("--replace",), ("--dry-run=server",)])
def test_a_jobset_that_is_not_ours_is_never_changed(server: Server, run: Run, arguments: tuple[str, ...]) -> None:
    theirs = {"metadata": {"name": "x", "managedFields": [{"manager": "kubectl-create"}]}, "status": {}}
    server.put(AT, theirs | {"status": {"terminalState": "Completed"}})
    before = json.dumps(server.objects)
    left = submit(run, *arguments)
    assert left.code == 2
    assert "exists and is not ours: it was created by kubectl-create at 2026-" in left.err
    assert json.dumps(server.objects) == before


@pytest.mark.parametrize("command", ["stop", "delete"])
def test_what_is_not_ours_is_neither_stopped_nor_deleted(server: Server, run: Run, command: str) -> None:
    server.put(AT, {"metadata": {"name": "x"}})
    left = run(command, "x")
    assert left.code == 2
    assert "JobSet x in namespace team-a is not ours" in left.err
    assert writes(server) == []


def test_a_network_policy_that_is_not_ours_is_refused_before_anything_is_written(server: Server, run: Run) -> None:
    server.put(POLICY_AT, {"metadata": {"name": "x"}})
    left = submit(run)
    assert left.code == 2
    assert "NetworkPolicy x in namespace team-a exists and is not ours" in left.err
    assert writes(server) == []


def test_a_finished_job_runs_again_only_when_it_is_to_be_replaced(server: Server, run: Run) -> None:
    submit(run)
    first = server.objects[AT]["metadata"]["uid"]
    change(server, AT, status={"terminalState": "Completed"})
    left = submit(run)
    assert left.code == 2
    assert "has Completed already" in left.err and "--replace" in left.err
    left = submit(run, "--replace")
    assert (left.code, left.out) == (0, "jobset.jobset.x-k8s.io/x created\n".replace("created", "replaced"))
    second = server.objects[AT]["metadata"]["uid"]
    assert first != second
    assert [one["uid"] for one in server.objects[POLICY_AT]["metadata"]["ownerReferences"]] == [second]


def test_a_running_job_is_not_replaced(server: Server, run: Run) -> None:
    submit(run)
    assert submit(run, "hosts=2", "--replace").code == 2
    assert server.count("DELETE") == 0


# --- a server that is not well ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "faults",
    [
        [refuse(429, Retry_After="0")],
        [refuse(500)],
        [refuse(503)],
        [refuse(504)],
        [drop],
        [commit_then_drop],
        [refuse(500), drop, commit_then_drop],
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


@pytest.mark.parametrize("part", ["jobsets", "selfsubjectaccessreviews", "jobset.x-k8s.io", "configmaps"])
def test_a_server_that_never_answers_ends_it_within_bounds(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr("launcher.transport.TOTAL_S", 1.0)
    for method in ("GET", "POST", "PATCH"):
        server.on(method, part, *[hang] * 50)
    left = submit(run)
    assert left.code == 3
    assert "stopped answering" in left.err
    assert len(server.stored("jobsets")) <= 1


def test_a_webhook_that_is_down_is_tried_for_a_while_and_named(
    server: Server, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.submit.GIVE_UP_S", 1.0)

    def down(handler: Handler) -> bool:
        handler.fail(500, "InternalError", 'Internal error occurred: failed calling webhook "mjobset.kb.io": refused')
        return True

    server.on("POST", "jobsets", *[down] * 50)
    left = submit(run)
    assert left.code == 3
    assert 'failed calling webhook "mjobset.kb.io"' in left.err
    assert "is the controller up" in left.err
    assert server.count("POST", "jobsets") > 1


def interrupted(server: Server, fault: Callable[[Handler, Callable[[], None]], bool], here: Path) -> tuple[int, str]:
    """Exit code and talk of a submission that gets one Ctrl-C at the moment the fault chooses."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launcher.cli.main", "submit", str(here / "job.yaml")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        start_new_session=True,
        text=True,
    )
    server.on("POST", "jobsets", lambda handler: fault(handler, lambda: process.send_signal(signal.SIGINT)))
    _, err = process.communicate(timeout=60)
    return process.returncode, err


def test_ctrl_c_while_the_jobset_is_sent_says_that_it_may_still_come(server: Server, here: Path) -> None:
    def fault(handler: Handler, interrupt: Callable[[], None]) -> bool:
        interrupt()
        return hang(handler)

    code, err = interrupted(server, fault, here)
    assert code == 130
    assert "interrupted: JobSet x in namespace team-a does not exist now, but had been sent" in err
    assert "Traceback" not in err


def test_ctrl_c_after_the_jobset_was_made_says_that_it_exists(server: Server, here: Path) -> None:
    def fault(handler: Handler, interrupt: Callable[[], None]) -> bool:
        server.put(AT, handler.body)
        interrupt()
        return hang(handler)

    code, err = interrupted(server, fault, here)
    assert code == 130
    assert "interrupted: JobSet x in namespace team-a exists without x, jaxlaunch-" in err
    assert "`launcher delete x` removes it" in err
    assert server.stored("jobsets") == [AT]


# --- what is asked before ---------------------------------------------------------------------------------------------


def test_what_is_wrong_with_the_file_is_said_without_a_cluster(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    left = submit(run, "hosts=-1")
    assert left.code == 2
    assert "hosts=-1 (override)" in left.err


def test_a_cluster_without_jobset_is_said(server: Server, run: Run) -> None:
    del server.groups["jobset.x-k8s.io"]
    left = submit(run)
    assert left.code == 3
    assert "The cluster test lacks JobSet 0.10 or newer: it has no JobSet." in left.err


def test_a_queue_needs_a_kueue_that_we_know(server: Server, run: Run) -> None:
    server.groups["kueue.x-k8s.io"] = ["v1beta1"]
    left = submit(run, "queue=q")
    assert left.code == 3
    assert "it serves kueue.x-k8s.io v1beta1, not v1beta2" in left.err


def test_everything_that_is_in_the_way_is_said_at_once(server: Server, run: Run) -> None:
    server.drop(NAMESPACES.path(None, "team-a"))
    server.denied |= {("create", "jobsets"), ("create", "networkpolicies")}
    server.put(LOCAL_QUEUES.path("team-a", "research"), {})
    server.put(WORKLOAD_PRIORITY_CLASSES.path(None, "high"), {})
    left = submit(run, "queue=reserch", "priority=urgent")
    assert left.code == 3
    assert "has no namespace team-a" in left.err
    assert "create jobsets.jobset.x-k8s.io, create networkpolicies.networking.k8s.io" in left.err
    assert "queue = reserch: namespace team-a has no such LocalQueue.\n  hint: it has research." in left.err
    assert "priority = urgent: the cluster has no such WorkloadPriorityClass.\n  hint: it has high." in left.err
    assert writes(server) == []


@pytest.mark.parametrize("key", ["queue", "priority"])
def test_a_name_that_does_not_exist_is_the_users_to_mend(server: Server, run: Run, key: str) -> None:
    assert submit(run, f"{key}=nobody").code == 2
    assert writes(server) == []


def test_a_queue_that_stands_still_is_said_and_joined(server: Server, run: Run) -> None:
    status = {"conditions": [{"type": "Active", "status": "False", "message": "it is stopped"}]}
    server.put(LOCAL_QUEUES.path("team-a", "q"), {"status": status})
    left = submit(run, "queue=q")
    assert left.code == 0
    assert "queue q is not active, so the job will wait: it is stopped" in left.err


def test_a_pod_that_the_namespace_will_refuse_is_said(server: Server, run: Run) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    change(server, NAMESPACES.path(None, "team-a"), metadata={"labels": labels})
    assert submit(run).err == ""
    left = submit(run, "network=hostnetwork", "name=y")
    assert "enforces Pod Security level restricted, and will refuse the pods: host namespaces" in left.err


def test_whoever_may_not_look_is_not_kept_from_submitting(server: Server, run: Run) -> None:
    server.on(
        "GET", "namespaces/team-a", *[lambda handler: handler.at.endswith("/team-a") and refuse(403)(handler)] * 9
    )
    server.on("GET", "priorityclasses", refuse(403))
    server.on("GET", "jaxlaunch-system", refuse(403))
    left = submit(run, "priority=high")
    assert left.code == 0
    assert "whether PriorityClass high exists is not known" in left.err


# --- the cluster's profile --------------------------------------------------------------------------------------------


def profile(text: str) -> dict[str, Any]:
    return {"data": {"profile.yaml": text}}


def test_the_namespaces_profile_comes_before_the_clusters(server: Server, run: Run, here: Path) -> None:
    (here / "job.yaml").write_text(JOB.replace("image: i\n", ""))
    server.put(CONFIGMAPS.path("jaxlaunch-system", "jaxlaunch"), profile("image: of-all\n"))
    assert "image: of-all" in submit(run, "--dry-run").out
    server.put(CONFIGMAPS.path("team-a", "jaxlaunch"), profile("image: of-team\n"))
    left = submit(run, "--dry-run")
    assert "image: of-team" in left.out
    assert left.err == "launcher: the cluster's profile is ConfigMap team-a/jaxlaunch\n"


def test_a_wrong_profile_is_named(server: Server, run: Run) -> None:
    server.put(CONFIGMAPS.path("team-a", "jaxlaunch"), profile("platform: gce\n"))
    left = submit(run)
    assert left.code == 2
    assert "ConfigMap team-a/jaxlaunch, profile.yaml:1: platform = gce is not one of" in left.err


# --- stop, delete, wait -----------------------------------------------------------------------------------------------


def test_a_job_in_a_queue_is_stopped_where_its_queue_keeps_it(server: Server, run: Run) -> None:
    server.put(LOCAL_QUEUES.path("team-a", "q"), {})
    submit(run, "queue=q")
    uid = server.objects[AT]["metadata"]["uid"]
    workload = WORKLOADS.path("team-a", "jobset-x")
    server.put(workload, {"metadata": {"labels": {"kueue.x-k8s.io/job-uid": uid}}, "spec": {"active": True}})
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
        said = json.dumps({"jaxlaunch": 1, "verdict": verdict, "host": 0, "generation": 0, "attempt": 1})
        threading.Timer(0.5, lambda: (server.put(path, pod("Running", said)), server.drop(path))).start()
        return False

    server.on("PATCH", "jobsets", ends)
    left = run("stop", "x")
    assert (left.code, left.out) == (0, "jobset.jobset.x-k8s.io/x stopped\n")
    assert left.err == "launcher: stopped, and saved at step 12\n"


def test_pods_that_do_not_go_are_waited_for_no_longer_than_was_said(server: Server, run: Run) -> None:
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


def test_waiting_longer_than_was_said_is_124(server: Server, run: Run) -> None:
    left = submit(run, "--wait", "--timeout", "1s")
    assert left.code == 124
    assert "x is not over; it goes on" in left.err


def test_a_limit_of_no_wait_is_refused(server: Server, run: Run) -> None:
    left = submit(run, "--timeout", "1s")
    assert left.code == 2
    assert "--timeout says how long to wait, and nothing is waited for." in left.err
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
        threading.Timer(0.5, lambda: change(server, AT, status={"terminalState": "Completed"})).start()
        return False

    server.on("POST", "configmaps", ends)
    left = submit(run, "--wait")
    assert (left.code, left.out) == (0, "jobset.jobset.x-k8s.io/x created\n")
    assert "x Done" in left.err


def test_what_is_ours_bears_our_label_and_the_digest_of_its_spec(server: Server, run: Run) -> None:
    submit(run)
    metadata = server.objects[AT]["metadata"]
    assert metadata["labels"][OWN_LABEL] == "x"
    assert len(metadata["annotations"][SPEC_HASH]) == 64
