"""`submit --wait` and `--follow` while a server is away for minutes, which are made short."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.contract import ANNOTATION
from jaxlaunch.launcher.errors import ClusterError, WaitTimeoutError
from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.jobs.lifecycle import ignore_message, wait_for_end
from jaxlaunch.launcher.jobs.logs.follow import DRAIN_TIMEOUT_S
from jaxlaunch.launcher.jobs.status.job_status import State
from jaxlaunch.launcher.kubernetes import transport
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, NAMESPACES, PODS, WORKLOADS
from jaxlaunch.launcher.kubernetes.labels import JOB_UID
from jaxlaunch.launcher.kubernetes.watch import Outage
from jaxlaunch.launcher.manifests.jobset import prepare
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import ProgressAnnotation
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Fault, Handler, Server, drop_connection, refuse_with
from tests.launcher.invoke import CommandResult, launcher
from tests.launcher.relay import Relay

JOB = (
    "name: lm\nimage: i\naccelerator: {type: cpu}\ncommand: [a]\nresources: {cpu: 1, memory: 1Gi}\n"
)
ROLES = """
name: lm
namespace: team
image: i
accelerator: {type: cpu}
jobs:
  trainer: {ends: true, command: [a], needs: {sampler: started}}
  sampler: {command: [a]}
"""
AT = JOBSETS.path("team", "lm")
FIRST, LAST = (
    f"2026-11-21T12:00:0{second}.000000000Z [0] {text}\n"
    for second, text in enumerate(("before", "meanwhile"))
)

SCALE = 40  # the launcher's minutes are so much shorter
WITH_TIME = ("kubernetes.transport", "kubernetes.watch", "jobs.lifecycle", "jobs.logs.follow")

Submit = Callable[..., CommandResult]


class Clock:
    """Replaces the module time: it runs faster, with the limits and pauses of the product."""

    @staticmethod
    def monotonic() -> float:
        return time.monotonic() * SCALE

    @staticmethod
    def sleep(seconds: float) -> None:
        time.sleep(seconds / SCALE)


@pytest.fixture
def start_relay(server: Server) -> Iterator[Relay]:
    relay = Relay("127.0.0.1", server.server_port)
    yield relay
    relay.refuse()


@pytest.fixture
def submit_job(
    start_relay: Relay,
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Submit:
    config = apiserver.write_kubeconfig(tmp_path, f"http://127.0.0.1:{start_relay.port}", "team")
    monkeypatch.setenv("KUBECONFIG", str(config))
    (tmp_path / "job.yaml").write_text(JOB)
    server.put(NAMESPACES.path(None, "team"), {})
    for module in WITH_TIME:
        monkeypatch.setattr(f"jaxlaunch.launcher.{module}.time", Clock)
    monkeypatch.setattr(
        "jaxlaunch.launcher.kubernetes.transport.READ_TIMEOUT_S", transport.READ_TIMEOUT_S * SCALE
    )  # an answer takes its real time
    monkeypatch.setattr(
        "jaxlaunch.launcher.kubernetes.watch.WATCH_DURATION_S", 1
    )  # by the server's clock
    return lambda *arguments: launcher(
        capsys, monkeypatch, "submit", str(tmp_path / "job.yaml"), *arguments
    )


@pytest.fixture
def outage_reported(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once the launcher has reported that the server does not answer."""
    reported, report_outage = threading.Event(), Outage.report_outage

    def report_and_note(outage: Outage) -> None:
        report_outage(outage)
        # While the log is followed, the wait for the end reports nothing.
        is_shown = outage._say is not ignore_message
        if outage._reported_at is not None and is_shown:
            reported.set()

    monkeypatch.setattr(Outage, "report_outage", report_and_note)
    return reported


def server_away(
    server: Server, fault: Fault, status: dict[str, Any], end: threading.Event | None = None
) -> None:
    """Let the server fail until `end` is set; when it is back, the job has code 83."""

    def fails(handler: Handler) -> bool:
        is_submitting = "configmaps" in handler.at  # which a slow machine still asks about
        is_back = end is not None and end.is_set()
        return not is_submitting and not is_back and fault(handler)

    def begins(handler: Handler) -> bool:
        server.put(AT, apiserver.merge_patch(server.objects[AT], {"status": status}))
        pod = objects.over(0, 83, message=objects.farewell(83, "rank 0 raised"))
        server.put(PODS.path("team", pod["metadata"]["name"]), pod)
        server.put(PODS.path("team", pod["metadata"]["name"], "log"), {"text": ""})
        server.on("GET", "", *[fails] * 10_000)
        return False

    server.on("GET", "")
    server.on("POST", "configmaps", begins)


@pytest.mark.parametrize(
    ("option", "fault"),
    [
        ("--wait", drop_connection),
        ("--wait", refuse_with(503)),
        ("--follow", refuse_with(429, Retry_After="0")),
    ],
    ids=["refused", "503", "429"],
)
def test_wait_survives_silent_server(
    server: Server,
    submit_job: Submit,
    outage_reported: threading.Event,
    option: str,
    fault: Fault,
) -> None:
    server_away(server, fault, {"terminalState": "Failed"}, outage_reported)
    result = submit_job(option)
    assert result.code == 83, result.err
    assert re.search(
        r"^launcher: the server has not answered for \d+ s; trying again$", result.err, re.MULTILINE
    )
    assert "VPN" not in result.err
    recorded = json.loads(server.objects[AT]["metadata"]["annotations"]["jaxlaunch.io/progress"])
    assert (recorded["when"], recorded["verdict"]["code"]) == ("ended", 83)


def test_wait_survives_refused_connections(
    server: Server, start_relay: Relay, submit_job: Submit, outage_reported: threading.Event
) -> None:
    """It goes while the log is followed, and the job ends meanwhile."""
    pod = objects.pod(0)
    at = PODS.path("team", pod["metadata"]["name"])

    def begins(handler: Handler) -> bool:
        server.put(at, pod)
        return False

    def outage() -> None:
        start_relay.refuse()
        over = objects.over(0, 83, message=objects.farewell(83, "rank 0 raised"))
        server.put(f"{at}/log", {"text": f"{FIRST}{LAST}"})
        server.put(at, over)
        server.put(
            AT, apiserver.merge_patch(server.objects[AT], {"status": {"terminalState": "Failed"}})
        )
        outage_reported.wait(60)
        start_relay.accept()

    def followed(handler: Handler) -> bool:
        handler.begin_stream()
        handler.raw_chunk(FIRST.encode())
        threading.Thread(target=outage).start()
        handler.server.closing.wait()
        return True

    server.on("POST", "configmaps", begins)
    server.on("GET", "/log", followed)
    result = submit_job("--follow", "--wait")
    assert result.code == 83, result.err
    assert result.out.endswith("[0] before\n[0] meanwhile\n")
    assert re.search(
        r"^launcher: the server has not answered for \d+ s; trying again$", result.err, re.MULTILINE
    )
    assert "launcher: the server answers again\n" in result.err
    assert "VPN" not in result.err


def test_time_limit_during_outage_exits_124(server: Server, submit_job: Submit) -> None:
    server_away(server, drop_connection, {})
    result = submit_job("--wait", "--timeout", "1s")
    assert result.code == 124
    assert "lm has not ended and keeps running" in result.err


def test_lost_server_ends_wait_without_network_advice(
    server: Server, submit_job: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.kubernetes.watch.ERROR_TIMEOUT_S", 60.0)
    server_away(server, drop_connection, {})
    result = submit_job("--wait")
    assert result.code == 3
    assert (
        "lm keeps running. `launcher logs -n team -f lm` shows its lines again" in result.err
        and "VPN" not in result.err
    )


def chatty(handler: Handler) -> bool:
    """The log of a pod that prints all the time."""
    if not handler.query.get("follow"):
        return False
    handler.begin_stream()
    for number in range(2_000):
        handler.raw_chunk(f"2026-11-21T12:00:00.{number:09d}Z [0] line {number}\n".encode())
        if handler.server.closing.wait(0.01):
            break
    handler.raw_chunk(b"2026-11-21T12:00:01.000000000Z [0] the last line\n")
    handler.end_stream()
    return True


def test_follow_obeys_limit_with_constant_output(
    server: Server, submit_job: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "jaxlaunch.launcher.jobs.logs.follow.DRAIN_TIMEOUT_S", DRAIN_TIMEOUT_S * SCALE
    )  # the list of pods takes its real time

    def begins(handler: Handler) -> bool:
        pod = objects.pod(0)
        server.put(PODS.path("team", pod["metadata"]["name"]), pod)
        return False

    server.on("POST", "configmaps", begins)
    server.on("GET", "/log", *[chatty] * 9)
    result = submit_job("--wait", "--follow", "--timeout", "40s")
    assert result.code == 124
    assert "line 0" in result.out and "the last line" not in result.out
    assert (
        "lm has not ended and keeps running" in result.err
        and "not read to the end" not in result.err
    )


def test_eviction_records_progress(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    monkeypatch.setattr("jaxlaunch.launcher.jobs.lifecycle._SETTLE_PAUSE_S", 0.1)
    monkeypatch.setattr("jaxlaunch.launcher.jobs.lifecycle._WATCH_PERIOD_S", 1.0)
    job = server.put(AT, objects.jobset(1, queue="research", suspend=True))
    workload = objects.workload()
    workload["metadata"]["labels"][JOB_UID] = job["metadata"]["uid"]
    server.put(WORKLOADS.path("team", "jobset-lm"), workload)
    name = objects.pod(0)["metadata"]["name"]
    server.put(PODS.path("team", name), objects.pod(0))
    server.put(
        PODS.path("team", name, "log"),
        {"text": f"{log_lines.format_line(objects.beat(step=40))}\n"},
    )
    done = {"status": {"terminalState": "Completed"}}

    def admitted(handler: Handler) -> bool:
        threading.Timer(
            0.2, lambda: server.put(AT, apiserver.merge_patch(server.objects[AT], done))
        ).start()
        return False

    server.on("PATCH", "jobsets", admitted)
    assert wait_for_end(Cluster.connect(), job, 60.0).state is State.DONE
    first = next(body for body in server.bodies if body and ANNOTATION in str(body))
    recorded = ProgressAnnotation.from_json(
        first["metadata"]["annotations"][ANNOTATION], job["metadata"]["uid"]
    )
    assert recorded is not None and (recorded.when, recorded.step) == ("queued", 40)


def test_end_of_wait_records_progress(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    job = server.put(AT, objects.jobset(1))
    name = objects.pod(0)["metadata"]["name"]
    server.put(PODS.path("team", name), objects.pod(0))
    server.put(
        PODS.path("team", name, "log"),
        {"text": f"{log_lines.format_line(objects.beat(step=40))}\n"},
    )
    with pytest.raises(WaitTimeoutError):
        wait_for_end(Cluster.connect(), job, 0.5)
    recorded = json.loads(server.objects[AT]["metadata"]["annotations"][ANNOTATION])
    assert (recorded["when"], recorded["step"]) == ("running", 40)


def test_progress_of_a_job_with_roles_is_that_of_its_lead(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    file = load.read_job_text(ROLES, may_have_roles=True)
    manifest = prepare(file, ClusterDefaults()).manifests[0]
    message = "jobset failed due to one or more job failures (first failed job: lm-sampler-0)"
    manifest["status"] = objects.ended("Failed", message=message)
    # The end of a suspended JobSet is not waited for.
    manifest["spec"]["suspend"] = True
    job = server.put(AT, manifest)
    for role, code in (("sampler", 64), ("trainer", 80)):
        pod = objects.over(0, code, message=objects.farewell(code, "it ended"), part=role)
        server.put(PODS.path("team", pod["metadata"]["name"]), pod)
    assert wait_for_end(Cluster.connect(), job, 60.0).code == 64
    recorded = json.loads(server.objects[AT]["metadata"]["annotations"][ANNOTATION])
    assert (recorded["when"], recorded["verdict"]["code"]) == ("ended", 80)


def test_wait_for_suspended_job_needs_no_change(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    job = server.put(AT, objects.jobset(1, suspend=True))
    assert wait_for_end(Cluster.connect(), job, 600.0).state is State.STOPPED
    assert not any("watch" in query for _, _, query in server.requests)


def test_wait_ends_when_namespace_is_being_deleted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pods go first, so the JobSet may be there for as long as their grace period."""
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    runs = {"replicatedJobsStatus": [{"name": "w", "ready": 1}]}
    job = server.put(AT, objects.jobset(1, status=runs))
    server.put(NAMESPACES.path(None, "team"), {})

    def delete_namespace() -> None:
        ending = {"metadata": {"name": "team", "deletionTimestamp": objects.ago()}}
        server.put(NAMESPACES.path(None, "team"), ending)
        left = {"replicatedJobsStatus": [{"name": "w", "ready": 0}]}
        server.put(AT, {**server.objects[AT], "status": left})

    threading.Timer(0.5, delete_namespace).start()
    began_at = time.monotonic()
    with pytest.raises(ClusterError, match="Namespace team is being deleted, with JobSet lm"):
        wait_for_end(Cluster.connect(), job, 60.0)
    assert time.monotonic() - began_at < 25.0
