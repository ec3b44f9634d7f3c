"""One call to the API server, against a real HTTP server that misbehaves on request."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.errors import ClusterError
from jaxlaunch.launcher.kubernetes.client import ApiError, Cluster, UnreachableError
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, NAMESPACES, PODS, Kind
from tests.launcher import apiserver
from tests.launcher.apiserver import Handler, Server, drop, hang, refuse

CANARY = "canary-8d1f0c"
AT = JOBSETS.path("team-a", "x")


@pytest.fixture
def cluster(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path, server.url, token=CANARY)))
    return Cluster.connect()


def jobset(name: str = "x", **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "team-a", **metadata}}


# --- objects --------------------------------------------------------------------------------------


def test_an_object_is_created_found_changed_and_deleted(server: Server, cluster: Cluster) -> None:
    made = cluster.create(JOBSETS, jobset())
    assert cluster.get(JOBSETS, "x") == made
    assert cluster.merge_patch(JOBSETS, "x", "team-a", {"spec": {"suspend": True}})["spec"] == {
        "suspend": True
    }
    assert cluster.delete(JOBSETS, "x", "team-a", uid=made["metadata"]["uid"])
    assert cluster.get(JOBSETS, "x") is None
    assert not cluster.delete(JOBSETS, "x", "team-a")


@pytest.mark.parametrize("ahead_s", [3600.0, 5.0, 0.0, -3600.0])
def test_the_time_is_the_server_s_where_the_clocks_are_far_apart(
    server: Server, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    real, there = formatdate, time.time() - ahead_s
    monkeypatch.setattr(apiserver, "formatdate", lambda usegmt: real(there, usegmt=usegmt))
    cluster.get(JOBSETS, "x")
    off_s = (datetime.now(UTC) - cluster.current_time()).total_seconds()
    assert off_s == pytest.approx(ahead_s if abs(ahead_s) > 30 else 0.0, abs=30)


def test_a_create_lets_the_server_refuse_fields_that_it_does_not_know(
    server: Server, cluster: Cluster
) -> None:
    cluster.create(JOBSETS, jobset(), dry_run=True)
    assert server.requests[-1][2] == {
        "fieldManager": "jaxlaunch",
        "fieldValidation": "Strict",
        "dryRun": "All",
    }
    assert not server.stored("jobsets")


def test_another_object_of_the_same_name_is_not_deleted(server: Server, cluster: Cluster) -> None:
    server.put(AT, jobset())
    with pytest.raises(ApiError, match="uid") as refused:
        cluster.delete(JOBSETS, "x", "team-a", uid="another")
    assert refused.value.status == 409
    assert server.stored("jobsets") == [AT]


def test_a_refusal_keeps_the_servers_words(cluster: Cluster) -> None:
    cluster.create(JOBSETS, jobset())
    with pytest.raises(ApiError, match='"x" already exists') as refused:
        cluster.create(JOBSETS, jobset())
    assert (refused.value.status, refused.value.reason) == (409, "AlreadyExists")


def test_a_long_list_comes_in_pages(server: Server, cluster: Cluster) -> None:
    for number in range(7):
        server.put(PODS.path("team-a", f"p{number}"), {"metadata": {"managedFields": [{}]}})
    found = cluster.list(PODS, "team-a", limit=3)
    assert [one["metadata"]["name"] for one in found] == [f"p{number}" for number in range(7)]
    assert server.count("GET") == 3
    assert "managedFields" not in found[0]["metadata"]


def test_a_list_whose_rest_was_forgotten_begins_again(server: Server, cluster: Cluster) -> None:
    for number in range(4):
        server.put(PODS.path("team-a", f"p{number}"), {})
    server.on("GET", "pods", lambda _: False, refuse(410))
    assert len(cluster.list(PODS, "team-a", limit=3)) == 4


@pytest.mark.parametrize(
    ("kind", "namespace", "path"),
    [
        (PODS, "a", "/api/v1/namespaces/a/pods"),
        (PODS, None, "/api/v1/pods"),
        (JOBSETS, "a", "/apis/jobset.x-k8s.io/v1alpha2/namespaces/a/jobsets"),
        (NAMESPACES, "a", "/api/v1/namespaces"),
    ],
)
def test_a_kind_knows_its_path(kind: Kind, namespace: str | None, path: str) -> None:
    assert kind.path(namespace) == path
    assert kind.path(namespace, "x", "log") == f"{path}/x/log"


# --- a server that is not well --------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_server_that_is_busy_is_asked_again_when_it_says(
    server: Server, cluster: Cluster, method: str
) -> None:
    server.put(AT, jobset())
    server.on(method, "jobsets", refuse(429, Retry_After="0"), refuse(429))
    if method == "GET":
        assert cluster.get(JOBSETS, "x") is not None
    else:
        assert cluster.create(JOBSETS, jobset("y"))
    assert server.count(method, "jobsets") == 3


def test_a_server_that_is_busy_for_longer_than_anyone_waits_is_not_asked_again(
    server: Server, cluster: Cluster
) -> None:
    server.on("POST", "jobsets", refuse(429, Retry_After="3600"))
    with pytest.raises(ApiError) as refused:
        cluster.create(JOBSETS, jobset())
    assert refused.value.status == 429
    assert server.count("POST") == 1


@pytest.mark.parametrize("fault", [refuse(500), refuse(503), refuse(504), drop])
def test_what_changes_nothing_is_asked_again(server: Server, cluster: Cluster, fault: Any) -> None:
    server.put(AT, jobset())
    server.on("GET", "jobsets", fault)
    assert cluster.get(JOBSETS, "x") is not None


@pytest.mark.parametrize("fault", [refuse(500), refuse(503), refuse(504), drop])
def test_a_create_that_may_have_happened_is_not_sent_again(
    server: Server, cluster: Cluster, fault: Any
) -> None:
    server.on("POST", "jobsets", fault)
    with pytest.raises((ApiError, UnreachableError)) as failed:
        cluster.create(JOBSETS, jobset())
    assert server.count("POST") == 1
    assert not isinstance(failed.value, UnreachableError) or failed.value.was_sent


def test_a_server_that_stays_unwell_is_given_up(server: Server, cluster: Cluster) -> None:
    cluster.limit_call_time(2)
    server.on("GET", "jobsets", *[refuse(500)] * 50)
    with pytest.raises(ApiError, match="a fault of the test: 500"):
        cluster.get(JOBSETS, "x")


def test_a_server_that_never_answers_is_given_up(server: Server, cluster: Cluster) -> None:
    cluster.limit_call_time(1)
    server.on("GET", "jobsets", *[hang] * 50)
    with pytest.raises(UnreachableError, match="stopped answering") as failed:
        cluster.get(JOBSETS, "x")
    assert failed.value.was_sent
    assert "context test" in failed.value.message


def test_an_answer_that_drips_for_ever_is_given_up(server: Server, cluster: Cluster) -> None:
    def dripping(handler: Handler) -> bool:
        handler.begin_stream()
        while not handler.server.closing.wait(0.05):
            handler.chunk({})
        return True

    cluster.limit_call_time(1)
    server.on("GET", "jobsets", *[dripping] * 50)
    with pytest.raises(UnreachableError, match="stopped answering"):
        cluster.get(JOBSETS, "x")


def test_nobody_at_the_address_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # bound, and not listening: nobody else can take the port
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path, url)))
        cluster = Cluster.connect()
        cluster.limit_call_time(1)
        with pytest.raises(
            UnreachableError, match=f"{url} of context test cannot be reached: Connection refused"
        ) as failed:
            cluster.create(JOBSETS, jobset())
    assert not failed.value.was_sent
    assert failed.value.exit_code == 3


def test_what_is_no_api_server_is_said(server: Server, cluster: Cluster) -> None:
    def page(handler: Handler) -> bool:
        handler.send(200, b"<html>log in</html>", "text/html")
        return True

    server.on("GET", "jobsets", page)
    with pytest.raises(ClusterError, match="is not from a Kubernetes API server"):
        cluster.get(JOBSETS, "x")


# --- who asks -------------------------------------------------------------------------------------


def test_new_credentials_are_read_when_the_server_no_longer_takes_the_old(
    server: Server, cluster: Cluster, tmp_path: Path
) -> None:
    server.on("GET", "jobsets", refuse(401))
    apiserver.kubeconfig(tmp_path, server.url, token="renewed")
    cluster.get(JOBSETS, "x")
    assert [held["authorization"] for held in server.headers] == [
        f"Bearer {CANARY}",
        "Bearer renewed",
    ]


def test_credentials_that_the_server_does_not_take_are_said_and_not_shown(
    server: Server, cluster: Cluster
) -> None:
    server.on("GET", "jobsets", refuse(401), refuse(401))
    with pytest.raises(ApiError) as refused:
        cluster.get(JOBSETS, "x")
    assert f"The server {server.url} does not accept the credentials of context test" in str(
        refused.value
    )
    assert CANARY not in str(refused.value)


def test_the_user_acts_as_another_when_the_kubeconfig_says_so(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "KUBECONFIG", str(apiserver.kubeconfig(tmp_path, server.url, **{"as": "alice"}))
    )
    Cluster.connect().get(JOBSETS, "x")
    assert server.headers[-1]["Impersonate-User"] == "alice"


def test_groups_to_act_as_are_refused_rather_than_left_out(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = {"as": "alice", "as-groups": ["few"]}
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path, server.url, **user)))
    with pytest.raises(ClusterError, match="as-groups"):
        Cluster.connect()


def test_rights_are_asked_for_in_a_namespace(server: Server, cluster: Cluster) -> None:
    server.denied.add(("create", "jobsets"))
    assert cluster.is_allowed("get", PODS, "team-a", subresource="log")
    assert not cluster.is_allowed("create", JOBSETS, "team-a")
    asked = {
        "verb": "get",
        "group": "",
        "resource": "pods",
        "subresource": "log",
        "namespace": "team-a",
    }
    assert server.bodies[0]["spec"]["resourceAttributes"] == asked


# --- the kubeconfig -------------------------------------------------------------------------------


def test_no_kubeconfig_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ClusterError, match="does not exist") as failed:
        Cluster.connect()
    assert "`launcher run JOB_FILE` trains on this machine" in str(failed.value)
    assert failed.value.exit_code == 3


def test_a_context_that_is_not_there_is_said_with_those_that_are(
    server: Server, cluster: Cluster
) -> None:
    with pytest.raises(
        ClusterError,
        match="no context prod.\n  hint: its contexts are test. `launcher run JOB_FILE` trains",
    ):
        Cluster.connect("prod")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "{", "clusters: 3\n"])
def test_what_is_no_kubeconfig_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(
        ClusterError, match="is not a kubeconfig:(.|\n)* hint: .*`launcher run JOB_FILE` trains"
    ):
        Cluster.connect()


def test_the_first_of_several_files_names_the_context(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text(
        yaml.safe_dump({"current-context": "test", "clusters": [], "contexts": [], "users": []})
    )
    second.mkdir()
    file = apiserver.kubeconfig(second, server.url, namespace="of-second")
    document = yaml.safe_load(file.read_text())
    del document["current-context"]
    file.write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", f"{first}:{file}:{tmp_path / 'not-there'}")
    assert Cluster.connect().namespace == "of-second"


def test_a_proxy_of_the_kubeconfig_is_used(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = apiserver.kubeconfig(tmp_path, "http://nowhere.invalid")
    document = yaml.safe_load(file.read_text())
    document["clusters"][0]["cluster"]["proxy-url"] = server.url
    file.write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", str(file))
    assert Cluster.connect().server_version() == "v1.35.4"


def plugin(
    tmp_path: Path, server: Server, text: str, command: str = "./plugin", **fields: Any
) -> Path:
    """A kubeconfig whose user asks a program beside it."""
    (tmp_path / "plugin").write_text(f"#!{sys.executable}\n{text}")
    (tmp_path / "plugin").chmod(0o755)
    asked = {"apiVersion": "client.authentication.k8s.io/v1", "command": command, **fields}
    return apiserver.kubeconfig(tmp_path, server.url, exec=asked)


def test_a_credential_plugin_is_asked(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import json, os, sys
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
token = ":".join([os.environ["WHO"], sys.argv[1], info["spec"]["cluster"]["server"]])
print(json.dumps({"apiVersion": info["apiVersion"], "kind": "ExecCredential", "status": {"token": token}}))
"""
    more = {"args": ["now"], "env": [{"name": "WHO", "value": "me"}], "provideClusterInfo": True}
    monkeypatch.setenv("KUBECONFIG", str(plugin(tmp_path, server, text, **more)))
    Cluster.connect().get(JOBSETS, "x")
    assert server.headers[-1]["authorization"] == f"Bearer me:now:{server.url}"


@pytest.mark.parametrize(
    ("text", "command", "said"),
    [
        ("", "./missing", "cannot be run: No such file or directory\\.\n  hint: get it there"),
        (
            "import sys; sys.exit('log in first')",
            "./plugin",
            "ended with exit code 1: log in first",
        ),
        (f"print('{CANARY}')", "./plugin", "answered without a token or a certificate"),
        ("import time; time.sleep(60)", "./plugin", "gave no answer within 1 s"),
    ],
)
def test_a_credential_plugin_that_gives_nothing_is_said(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    command: str,
    said: str,
) -> None:
    if "sleep" in text:  # the others may take their time to start, on a busy machine
        monkeypatch.setattr("jaxlaunch.launcher.kubernetes.kubeconfig.PLUGIN_TIMEOUT_S", 1.0)
    monkeypatch.setenv(
        "KUBECONFIG", str(plugin(tmp_path, server, text, command, installHint="get it there"))
    )
    with pytest.raises(ClusterError, match=said) as failed:
        Cluster.connect()
    assert CANARY not in str(failed.value)
    assert not server.requests


# --- what goes on ---------------------------------------------------------------------------------


def test_a_watch_tells_what_there_is_and_what_changes(server: Server, cluster: Cluster) -> None:
    server.put(AT, jobset())
    events = cluster.watch(JOBSETS, "team-a", limit_s=60)
    assert next(events)[0] == "ADDED"
    server.put(AT, jobset() | {"status": {"restarts": 1}})
    event, found = next(events)
    assert (event, found["status"]) == ("MODIFIED", {"restarts": 1})
    server.drop(AT)
    assert next(events)[0] == "DELETED"


def test_a_watch_ends_when_it_was_to_end(server: Server, cluster: Cluster) -> None:
    assert list(cluster.watch(JOBSETS, "team-a", limit_s=1)) == []


def test_a_log_comes_line_by_line(server: Server, cluster: Cluster) -> None:
    server.put(PODS.path("team-a", "p", "log"), {"text": "one\ntwo\nthr\u00e9e"})
    assert list(cluster.log("team-a", "p", tail=3, timestamps=True)) == ["one", "two", "thr\u00e9e"]
    assert server.requests[-1][2] == {"container": "main", "tailLines": "3", "timestamps": "true"}


def test_the_client_is_not_imported_before_a_cluster_is_meant() -> None:
    told = (
        "import json, sys, jaxlaunch.launcher.kubernetes.client; print(json.dumps([*sys.modules]))"
    )
    modules = json.loads(
        subprocess.run([sys.executable, "-c", told], capture_output=True, check=True).stdout
    )
    assert not {"kubernetes", "urllib3", "yaml", "pydantic"} & set(modules)


# --- what is waited for ---------------------------------------------------------------------------


def patient() -> tuple[list[str], Callable[[str], None], Callable[[Handler], bool]]:
    """What was told, who tells it, and a server that answers only once something was told."""
    told, is_told = list[str](), threading.Event()

    def say(text: str) -> None:
        told.append(text)
        is_told.set()

    def slow(handler: Handler) -> bool:
        assert is_told.wait(30)
        return False

    return told, say, slow


def test_who_waits_for_the_server_is_told_so_once_a_minute(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path, server.url)))
    monkeypatch.setattr("jaxlaunch.launcher.kubernetes.transport.REPORT_AFTER_S", 0.05)
    told, say, slow = patient()
    server.on("GET", "jobsets", slow, slow)
    cluster = Cluster.connect(say=say)
    assert [cluster.get(JOBSETS, "x") for _ in range(2)] == [None, None]
    assert told == [f"waiting for an answer of the API server {server.url}"]


def test_who_waits_for_a_log_is_told_of_which_pod_and_of_slow_calls_in_a_row(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path, server.url)))
    monkeypatch.setattr("jaxlaunch.launcher.kubernetes.transport.REPORT_AFTER_S", 60.0)
    monkeypatch.setattr("jaxlaunch.launcher.kubernetes.transport._SLOW_CALL_S", 0.0)
    told, say, slow = patient()
    cluster = Cluster.connect(say=say)
    assert cluster.get(JOBSETS, "x") is None
    monkeypatch.setattr(
        "jaxlaunch.launcher.kubernetes.transport.REPORT_AFTER_S", 1e-9
    )  # less than that call took
    server.put(PODS.path("team", "lm-0", "log"), {"text": "hello\n"})
    server.on("GET", "/log", slow)
    assert list(cluster.log("team", "lm-0")) == ["hello"]
    assert told == ["waiting for the log of pod lm-0 from its node"]
