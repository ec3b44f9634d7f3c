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
from tests.launcher.apiserver import Handler, Server, drop_connection, hang_request, refuse_with

CANARY = "canary-8d1f0c"
AT = JOBSETS.path("team-a", "x")


@pytest.fixture
def cluster(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv(
        "KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, token=CANARY))
    )
    return Cluster.connect()


def make_jobset(name: str = "x", **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "team-a", **metadata}}


# --- objects --------------------------------------------------------------------------------------


def test_object_is_created_read_patched_and_deleted(server: Server, cluster: Cluster) -> None:
    created = cluster.create(JOBSETS, make_jobset())
    assert cluster.get(JOBSETS, "x") == created
    assert cluster.merge_patch(JOBSETS, "x", "team-a", {"spec": {"suspend": True}})["spec"] == {
        "suspend": True
    }
    assert cluster.delete(JOBSETS, "x", "team-a", uid=created["metadata"]["uid"])
    assert cluster.get(JOBSETS, "x") is None
    assert not cluster.delete(JOBSETS, "x", "team-a")


@pytest.mark.parametrize("ahead_s", [3600.0, 5.0, 0.0, -3600.0])
def test_current_time_is_corrected_for_large_clock_skew(
    server: Server, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    real, server_now = formatdate, time.time() - ahead_s
    monkeypatch.setattr(apiserver, "formatdate", lambda usegmt: real(server_now, usegmt=usegmt))
    cluster.get(JOBSETS, "x")
    off_s = (datetime.now(UTC) - cluster.current_time()).total_seconds()
    assert off_s == pytest.approx(ahead_s if abs(ahead_s) > 30 else 0.0, abs=30)


def test_create_rejects_unknown_fields(server: Server, cluster: Cluster) -> None:
    cluster.create(JOBSETS, make_jobset(), dry_run=True)
    assert server.requests[-1][2] == {
        "fieldManager": "jaxlaunch",
        "fieldValidation": "Strict",
        "dryRun": "All",
    }
    assert not server.stored("jobsets")


def test_object_with_another_uid_is_not_deleted(server: Server, cluster: Cluster) -> None:
    server.put(AT, make_jobset())
    with pytest.raises(ApiError, match="uid") as refused:
        cluster.delete(JOBSETS, "x", "team-a", uid="another")
    assert refused.value.status == 409
    assert server.stored("jobsets") == [AT]


def test_refusal_keeps_server_message(cluster: Cluster) -> None:
    cluster.create(JOBSETS, make_jobset())
    with pytest.raises(ApiError, match='"x" already exists') as refused:
        cluster.create(JOBSETS, make_jobset())
    assert (refused.value.status, refused.value.reason) == (409, "AlreadyExists")


def test_long_list_is_read_in_pages(server: Server, cluster: Cluster) -> None:
    for number in range(7):
        server.put(PODS.path("team-a", f"p{number}"), {"metadata": {"managedFields": [{}]}})
    names = cluster.list(PODS, "team-a", limit=3)
    assert [pod["metadata"]["name"] for pod in names] == [f"p{number}" for number in range(7)]
    assert server.count("GET") == 3
    assert "managedFields" not in names[0]["metadata"]


def test_list_with_expired_continue_token_starts_again(server: Server, cluster: Cluster) -> None:
    for number in range(4):
        server.put(PODS.path("team-a", f"p{number}"), {})
    server.on("GET", "pods", lambda _: False, refuse_with(410))
    assert len(cluster.list(PODS, "team-a", limit=3)) == 4


def test_pages_before_an_expired_token_do_not_count(server: Server, cluster: Cluster) -> None:
    for number in range(7):
        server.put(PODS.path("team-a", f"p{number}"), {})
    server.on("GET", "pods", lambda _: False, refuse_with(410))
    assert len(cluster.list(PODS, "team-a", limit=3, pages=2)) == 6


def test_list_whose_every_token_expires_is_given_up(server: Server, cluster: Cluster) -> None:
    for number in range(4):
        server.put(PODS.path("team-a", f"p{number}"), {})

    def expire_token(handler: Handler) -> bool:
        return "continue" in handler.query and refuse_with(410)(handler)

    server.on("GET", "pods", *[expire_token] * 50)
    with pytest.raises(ApiError) as refused:
        cluster.list(PODS, "team-a", limit=3)
    assert refused.value.status == 410
    assert server.count("GET", "pods") < 20


@pytest.mark.parametrize("date", [None, "yesterday", "Sat, 21 Nov 2026 06:00:00 -0000"])
def test_server_time_is_unknown_without_a_valid_date(
    server: Server, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, date: str | None
) -> None:
    send_header = Handler.send_header

    def send_other_date(handler: Handler, name: str, value: str) -> None:
        value = (date or "") if name == "Date" else value
        if value:
            send_header(handler, name, value)

    monkeypatch.setattr(Handler, "send_header", send_other_date)
    server_time = cluster.server_time()
    assert server_time is None or (date is not None and server_time.tzinfo is not None)
    assert (server_time is None) == (date in (None, "yesterday"))


@pytest.mark.parametrize(
    ("kind", "namespace", "path"),
    [
        (PODS, "a", "/api/v1/namespaces/a/pods"),
        (PODS, None, "/api/v1/pods"),
        (JOBSETS, "a", "/apis/jobset.x-k8s.io/v1alpha2/namespaces/a/jobsets"),
        (NAMESPACES, "a", "/api/v1/namespaces"),
    ],
)
def test_kind_has_api_path(kind: Kind, namespace: str | None, path: str) -> None:
    assert kind.path(namespace) == path
    assert kind.path(namespace, "x", "log") == f"{path}/x/log"


# --- a server that is not well --------------------------------------------------------------------


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_busy_server_is_retried_after_its_delay(
    server: Server, cluster: Cluster, method: str
) -> None:
    server.put(AT, make_jobset())
    server.on(method, "jobsets", refuse_with(429, Retry_After="0"), refuse_with(429))
    if method == "GET":
        assert cluster.get(JOBSETS, "x") is not None
    else:
        assert cluster.create(JOBSETS, make_jobset("y"))
    assert server.count(method, "jobsets") == 3


def test_too_long_retry_delay_is_not_awaited(server: Server, cluster: Cluster) -> None:
    server.on("POST", "jobsets", refuse_with(429, Retry_After="3600"))
    with pytest.raises(ApiError) as refused:
        cluster.create(JOBSETS, make_jobset())
    assert refused.value.status == 429
    assert server.count("POST") == 1


@pytest.mark.parametrize(
    "fault", [refuse_with(500), refuse_with(503), refuse_with(504), drop_connection]
)
def test_idempotent_requests_are_retried(server: Server, cluster: Cluster, fault: Any) -> None:
    server.put(AT, make_jobset())
    server.on("GET", "jobsets", fault)
    assert cluster.get(JOBSETS, "x") is not None


@pytest.mark.parametrize(
    "fault", [refuse_with(500), refuse_with(503), refuse_with(504), drop_connection]
)
def test_possibly_executed_create_is_not_retried(
    server: Server, cluster: Cluster, fault: Any
) -> None:
    server.on("POST", "jobsets", fault)
    with pytest.raises((ApiError, UnreachableError)) as failed:
        cluster.create(JOBSETS, make_jobset())
    assert server.count("POST") == 1
    assert not isinstance(failed.value, UnreachableError) or failed.value.was_sent


def test_failing_server_is_given_up(server: Server, cluster: Cluster) -> None:
    cluster.limit_call_time(2)
    server.on("GET", "jobsets", *[refuse_with(500)] * 50)
    with pytest.raises(ApiError, match="a fault of the test: 500"):
        cluster.get(JOBSETS, "x")


def test_silent_server_is_given_up(server: Server, cluster: Cluster) -> None:
    cluster.limit_call_time(1)
    server.on("GET", "jobsets", *[hang_request] * 50)
    with pytest.raises(UnreachableError, match="stopped answering") as failed:
        cluster.get(JOBSETS, "x")
    assert failed.value.was_sent
    assert "context test" in failed.value.message


def test_endless_slow_answer_is_given_up(server: Server, cluster: Cluster) -> None:
    def dripping(handler: Handler) -> bool:
        handler.begin_stream()
        while not handler.server.closing.wait(0.05):
            handler.chunk({})
        return True

    cluster.limit_call_time(1)
    server.on("GET", "jobsets", *[dripping] * 50)
    with pytest.raises(UnreachableError, match="stopped answering"):
        cluster.get(JOBSETS, "x")


def test_unused_address_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener:  # bound, and not listening: nobody else can take the port
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, url)))
        cluster = Cluster.connect()
        cluster.limit_call_time(1)
        with pytest.raises(
            UnreachableError, match=f"{url} of context test cannot be reached: Connection refused"
        ) as failed:
            cluster.create(JOBSETS, make_jobset())
    assert not failed.value.was_sent
    assert failed.value.exit_code == 3


def test_answer_of_another_server_is_reported(server: Server, cluster: Cluster) -> None:
    def page(handler: Handler) -> bool:
        handler.send(200, b"<html>log in</html>", "text/html")
        return True

    server.on("GET", "jobsets", page)
    with pytest.raises(ClusterError, match="is not from a Kubernetes API server"):
        cluster.get(JOBSETS, "x")


# --- who asks -------------------------------------------------------------------------------------


def test_credentials_are_read_again_after_401(
    server: Server, cluster: Cluster, tmp_path: Path
) -> None:
    server.on("GET", "jobsets", refuse_with(401))
    apiserver.write_kubeconfig(tmp_path, server.url, token="renewed")
    cluster.get(JOBSETS, "x")
    assert [held["authorization"] for held in server.headers] == [
        f"Bearer {CANARY}",
        "Bearer renewed",
    ]


def test_rejected_credentials_are_reported_but_not_shown(server: Server, cluster: Cluster) -> None:
    server.on("GET", "jobsets", refuse_with(401), refuse_with(401))
    with pytest.raises(ApiError) as refused:
        cluster.get(JOBSETS, "x")
    assert f"The server {server.url} does not accept the credentials of context test" in str(
        refused.value
    )
    assert CANARY not in str(refused.value)


def test_impersonation_headers_come_from_kubeconfig(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, **{"as": "alice"}))
    )
    Cluster.connect().get(JOBSETS, "x")
    assert server.headers[-1]["Impersonate-User"] == "alice"


def test_impersonated_groups_are_rejected(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = {"as": "alice", "as-groups": ["few"]}
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, **user)))
    with pytest.raises(ClusterError, match="as-groups"):
        Cluster.connect()


def test_permissions_are_reviewed_in_namespace(server: Server, cluster: Cluster) -> None:
    server.denied.add(("create", "jobsets"))
    assert cluster.is_allowed("get", PODS, "team-a", subresource="log")
    assert not cluster.is_allowed("create", JOBSETS, "team-a")
    attributes = {
        "verb": "get",
        "group": "",
        "resource": "pods",
        "subresource": "log",
        "namespace": "team-a",
    }
    assert server.bodies[0]["spec"]["resourceAttributes"] == attributes


# --- the kubeconfig -------------------------------------------------------------------------------


def test_missing_kubeconfig_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ClusterError, match="does not exist") as failed:
        Cluster.connect()
    assert "`launcher run JOB_FILE` trains on this machine" in str(failed.value)
    assert failed.value.exit_code == 3


def test_unknown_context_lists_existing_ones(server: Server, cluster: Cluster) -> None:
    with pytest.raises(
        ClusterError,
        match="no context prod.\n  hint: its contexts are test. `launcher run JOB_FILE` trains",
    ):
        Cluster.connect("prod")


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "{", "clusters: 3\n"])
def test_invalid_kubeconfig_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(
        ClusterError, match="is not a kubeconfig:(.|\n)* hint: .*`launcher run JOB_FILE` trains"
    ):
        Cluster.connect()


CLUSTERS = "current-context: a\nclusters: [{name: c, cluster: {server: 'http://x'}}]\n"
CONTEXTS = "contexts: [{name: a, context: {cluster: c, user: u}}]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (CLUSTERS + "contexts: [{name: a}]\n", "the cluster of context a is missing"),
        (
            CLUSTERS + "contexts: [{name: a, context: null}]\n",
            "the cluster of context a is missing",
        ),
        (CLUSTERS + "contexts: [{name: a, context: x}]\n", "is not a kubeconfig"),
        (CLUSTERS + "contexts: [a]\n", "is not a kubeconfig"),
        (CLUSTERS.replace("'http://x'", "7") + CONTEXTS, "is c, and its server 7"),
        (CLUSTERS.replace("'http://x'", "null") + CONTEXTS, "is c, and its server None"),
        (CLUSTERS.replace("{server: 'http://x'}", "x") + CONTEXTS, "cannot be used"),
        (f"{CLUSTERS}{CONTEXTS}users: [{{user: {{token: {CANARY}}}}}]", "cannot be used"),
        ("\xff", "is not a kubeconfig"),
    ],
)
def test_damaged_kubeconfig_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    (tmp_path / "config").write_bytes(text.encode("latin-1"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(ClusterError, match=message) as failed:
        Cluster.connect()
    assert CANARY not in str(failed.value)


def test_variable_of_a_plugin_may_have_no_value(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import json, os
print(json.dumps({"status": {"token": f"{os.environ['WHO']}!"}}))
"""
    more = {"env": [{"name": "WHO"}], "provideClusterInfo": True}
    monkeypatch.setenv("KUBECONFIG", str(use_plugin(tmp_path, server, text, **more)))
    Cluster.connect().get(JOBSETS, "x")
    assert server.headers[-1]["authorization"] == "Bearer !"


def test_first_kubeconfig_file_names_the_context(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_text(
        yaml.safe_dump({"current-context": "test", "clusters": [], "contexts": [], "users": []})
    )
    second.mkdir()
    file = apiserver.write_kubeconfig(second, server.url, namespace="of-second")
    document = yaml.safe_load(file.read_text())
    del document["current-context"]
    file.write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", f"{first}:{file}:{tmp_path / 'not-there'}")
    assert Cluster.connect().namespace == "of-second"


def test_proxy_of_kubeconfig_is_used(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = apiserver.write_kubeconfig(tmp_path, "http://nowhere.invalid")
    document = yaml.safe_load(file.read_text())
    document["clusters"][0]["cluster"]["proxy-url"] = server.url
    file.write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", str(file))
    assert Cluster.connect().server_version() == "v1.35.4"


def use_plugin(
    tmp_path: Path, server: Server, text: str, command: str = "./plugin", **fields: Any
) -> Path:
    """Write a kubeconfig whose user asks a program in the same folder."""
    (tmp_path / "plugin").write_text(f"#!{sys.executable}\n{text}")
    (tmp_path / "plugin").chmod(0o755)
    request_file = {"apiVersion": "client.authentication.k8s.io/v1", "command": command, **fields}
    return apiserver.write_kubeconfig(tmp_path, server.url, exec=request_file)


def test_credential_plugin_gives_credentials(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
import json, os, sys
info = json.loads(os.environ["KUBERNETES_EXEC_INFO"])
token = ":".join([os.environ["WHO"], sys.argv[1], info["spec"]["cluster"]["server"]])
answer = {"apiVersion": info["apiVersion"], "kind": "ExecCredential"}
print(json.dumps(answer | {"status": {"token": token}}))
"""
    more = {"args": ["now"], "env": [{"name": "WHO", "value": "me"}], "provideClusterInfo": True}
    monkeypatch.setenv("KUBECONFIG", str(use_plugin(tmp_path, server, text, **more)))
    Cluster.connect().get(JOBSETS, "x")
    assert server.headers[-1]["authorization"] == f"Bearer me:now:{server.url}"


@pytest.mark.parametrize(
    ("text", "command", "message"),
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
def test_failing_credential_plugin_is_reported(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    command: str,
    message: str,
) -> None:
    if "sleep" in text:  # the others may take their time to start, on a busy machine
        monkeypatch.setattr("jaxlaunch.launcher.kubernetes.kubeconfig.PLUGIN_TIMEOUT_S", 1.0)
    monkeypatch.setenv(
        "KUBECONFIG", str(use_plugin(tmp_path, server, text, command, installHint="get it there"))
    )
    with pytest.raises(ClusterError, match=message) as failed:
        Cluster.connect()
    assert CANARY not in str(failed.value)
    assert not server.requests


# --- watches --------------------------------------------------------------------------------------


def test_watch_yields_existing_objects_and_changes(server: Server, cluster: Cluster) -> None:
    server.put(AT, make_jobset())
    events = cluster.watch(JOBSETS, "team-a", limit_s=60)
    assert next(events)[0] == "ADDED"
    server.put(AT, make_jobset() | {"status": {"restarts": 1}})
    event, changed = next(events)
    assert (event, changed["status"]) == ("MODIFIED", {"restarts": 1})
    server.drop(AT)
    assert next(events)[0] == "DELETED"


def test_watch_ends_at_its_limit(server: Server, cluster: Cluster) -> None:
    assert list(cluster.watch(JOBSETS, "team-a", limit_s=1)) == []


def test_log_is_read_line_by_line(server: Server, cluster: Cluster) -> None:
    server.put(PODS.path("team-a", "p", "log"), {"text": "one\ntwo\nthr\u00e9e"})
    assert list(cluster.log("team-a", "p", tail=3, timestamps=True)) == ["one", "two", "thr\u00e9e"]
    assert server.requests[-1][2] == {"container": "main", "tailLines": "3", "timestamps": "true"}


def test_client_is_imported_only_for_clusters() -> None:
    output = (
        "import json, sys, jaxlaunch.launcher.kubernetes.client; print(json.dumps([*sys.modules]))"
    )
    modules = json.loads(
        subprocess.run([sys.executable, "-c", output], capture_output=True, check=True).stdout
    )
    assert not {"kubernetes", "urllib3", "yaml", "pydantic"} & set(modules)


# --- what is waited for ---------------------------------------------------------------------------


def make_patient() -> tuple[list[str], Callable[[str], None], Callable[[Handler], bool]]:
    """What was told, who tells it, and a server that answers only once something was told."""
    messages, is_told = list[str](), threading.Event()

    def say(text: str) -> None:
        messages.append(text)
        is_told.set()

    def slow(handler: Handler) -> bool:
        assert is_told.wait(30)
        return False

    return messages, say, slow


def test_wait_for_server_is_reported_once_a_minute(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url)))
    monkeypatch.setattr("jaxlaunch.launcher.kubernetes.transport.REPORT_AFTER_S", 0.05)
    messages, say, slow = make_patient()
    server.on("GET", "jobsets", slow, slow)
    cluster = Cluster.connect(say=say)
    assert [cluster.get(JOBSETS, "x") for _ in range(2)] == [None, None]
    assert messages == [f"waiting for an answer of the API server {server.url}"]


def test_wait_for_log_names_pod_and_counts_slow_calls(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url)))
    monkeypatch.setattr("jaxlaunch.launcher.kubernetes.transport.REPORT_AFTER_S", 60.0)
    monkeypatch.setattr("jaxlaunch.launcher.kubernetes.transport._SLOW_CALL_S", 0.0)
    messages, say, slow = make_patient()
    cluster = Cluster.connect(say=say)
    assert cluster.get(JOBSETS, "x") is None
    monkeypatch.setattr(
        "jaxlaunch.launcher.kubernetes.transport.REPORT_AFTER_S", 1e-9
    )  # less than that call took
    server.put(PODS.path("team", "lm-0", "log"), {"text": "hello\n"})
    server.on("GET", "/log", slow)
    assert list(cluster.log("team", "lm-0")) == ["hello"]
    assert messages == ["waiting for the log of pod lm-0 from its node"]
