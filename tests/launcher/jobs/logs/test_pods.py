"""`launcher logs` and a fake API server: long lines, and logs that cannot be read."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.jobs.status.hosts import main_container
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, PODS
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import CONTINUATION_MARK
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Fault, Handler, Server
from tests.launcher.invoke import CommandResult, launcher
from tests.launcher.kubernetes.test_port_forward import Pod

Logs = Callable[..., CommandResult]
LONG = 3_000_000  # characters, of a line that the kubelet gives whole


@pytest.fixture
def show_logs(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Logs:
    """`launcher logs lm …` of a job of two hosts that runs."""
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    server.put(JOBSETS.path("team", "lm"), objects.jobset())
    for host in range(2):
        pod = objects.pod(host)
        server.put(PODS.path("team", pod["metadata"]["name"]), pod)
    return lambda *arguments: launcher(capsys, monkeypatch, "logs", "lm", *arguments)


def write_log(server: Server, host: int, *lines: str) -> None:
    """The log of a host: one line each second; one that begins with - has no timestamp."""
    stamped = [
        line[1:] if line.startswith("-") else f"2026-11-21T11:51:{second:02d}.000000000Z {line}"
        for second, line in enumerate(lines)
    ]
    path = PODS.path("team", objects.pod(host)["metadata"]["name"], "log")
    server.put(path, {"text": "".join(f"{line}\n" for line in stamped)})


@pytest.mark.parametrize("length", [130_000, 300_000, LONG])
def test_long_line_is_shown_completely(server: Server, show_logs: Logs, length: int) -> None:
    write_log(server, 0, "[0] a", f"[0] {'x' * length}", "[0] b")
    write_log(server, 1, "[1] c", "[1] d", "[1] e")
    result = show_logs()
    assert result.code == 0 and result.err == ""
    lines = result.out.splitlines()
    assert [line for line in lines if len(line) < 10] == [
        "[0] a",
        "[1] c",
        "[1] d",
        "[0] b",
        "[1] e",
    ]
    long = [line for line in lines if len(line) >= 10]
    assert all(line.startswith(f"[0] {CONTINUATION_MARK}") for line in long[1:])
    assert sum(line.count("x") for line in long) == length


def test_pieces_of_long_line_as_json(server: Server, show_logs: Logs) -> None:
    write_log(server, 0, f"[0] {'x' * LONG}")
    write_log(server, 1, "[1] a")
    objects_value = [json.loads(line) for line in show_logs("-o", "json").out.splitlines()]
    assert len(objects_value) > 3
    assert {(line["time"], line["rank"]) for line in objects_value if line["host"] == 0} == {
        ("2026-11-21T11:51:00.000000000Z", 0)
    }


def test_only_agent_records_are_left_out(server: Server, show_logs: Logs) -> None:
    record = f'{log_lines.PREFIX}{next(iter(log_lines.KINDS))} {{"step": 1}}'
    write_log(server, 0, "[0] a", record, f"[0] {record}")
    write_log(server, 1, record, "agent 1: hello")
    result = show_logs()
    assert (result.out.splitlines(), result.err) == (["[0] a", f"[0] {record}"], "agent 1: hello\n")


def test_kubelet_message_is_shown(server: Server, show_logs: Logs) -> None:
    write_log(server, 0, "[0] a")
    write_log(server, 1, "-unable to retrieve container logs for containerd://4f2a")
    result = show_logs()
    assert (result.code, result.out, result.err) == (
        0,
        "[0] a\n",
        "unable to retrieve container logs for containerd://4f2a\n",
    )


def test_rotated_log_names_volume(server: Server, show_logs: Logs) -> None:
    for host in range(2):
        write_log(server, host)
    result = show_logs()
    assert (result.code, result.out) == (0, "")
    assert "that its kubelet still has; job lm has no run folder on a volume\n" in result.err
    assert show_logs("--grep", "x").err == ""
    job = objects.jobset()
    main_container(pod_template(job)["spec"])["env"].append(
        {"name": contract.RUN_DIR, "value": "/checkpoints/lm"}
    )
    server.put(JOBSETS.path("team", "lm"), job)
    assert "`launcher logs -n team lm --from-volume` reads older ones" in show_logs().err


def answer_as_agent(by_rank: Mapping[str, Sequence[str]]) -> Fault:
    """A port-forward to the agent of a pod, which has these lines."""

    def fault(handler: Handler) -> bool:
        pod = Pod.__new__(Pod)
        pod.rfile = handler.rfile
        pod.wfile = handler.wfile
        pod.head = f"GET\r\n{handler.headers}".strip()
        assert pod.accept().startswith(b"GET /output HTTP/1.1\r\n") and handler.query == {
            "ports": "9400"
        }
        answer = f"HTTP/1.1 200 OK\r\n\r\n{json.dumps(by_rank)}".encode()
        for at in range(0, len(answer), 100):
            pod.say(0, answer[at : at + 100])
        pod.close()
        handler.close_connection = True
        return True

    return fault


def test_rotated_lines_come_from_agent(server: Server, show_logs: Logs) -> None:
    record = f'{log_lines.PREFIX}{next(iter(log_lines.KINDS))} {{"step": 1}}'
    write_log(server, 0, record, "agent 0: two", record)
    write_log(server, 1, "[1] d")
    with_two = [answer_as_agent({"0": ["x", "a", "b"]}), answer_as_agent({"1": ["c", "d"]})]
    server.on("GET", "lm-w-0-0-abcd0/portforward", *with_two[:1] * 3)
    server.on("GET", "lm-w-0-1-abcd1/portforward", *with_two[1:] * 3)
    result = show_logs("--tail", "2")
    assert (result.code, result.out.splitlines()) == (0, ["[0] a", "[0] b", "[1] c", "[1] d"])
    assert (
        result.err.count(
            "has rotated its log: the last lines are shown as its agent has them, without times"
        )
        == 2
    )
    assert "agent 0: two" in result.err
    assert show_logs("--tail", "1").out.splitlines() == ["[0] b", "[1] d"]
    assert server.count("GET", "lm-w-0-1-abcd1/portforward") == 1, (
        "the kubelet has one line of rank 1"
    )
    assert show_logs().out.splitlines() == ["[0] x", "[0] a", "[0] b", "[1] d"]
    assert show_logs("--rank", "0").out == "", "its agent is gone"
    assert show_logs("--since", "1h").out == "[1] d\n"


def test_missing_logs_set_exit_code(server: Server, show_logs: Logs) -> None:
    for host in range(2):
        path = PODS.path("team", objects.pod(host)["metadata"]["name"])
        server.put(path, objects.waiting(host, "ContainerCreating"))
    result = show_logs()
    assert result.code == 3 and "2 of 2 hosts have no log yet" in result.err
    assert show_logs("-n", "team", "--tail", "3").code == 3


def test_unknown_rank_is_refused(show_logs: Logs) -> None:
    result = show_logs("--rank", "7")
    assert result.code == 2 and "--rank 7 does not exist: ranks are 0–1." in result.err


def test_moved_rank_has_lines_of_all_hosts(server: Server, show_logs: Logs, tmp_path: Path) -> None:
    server.put(JOBSETS.path("team", "lm"), objects.jobset(spares=1))
    spare = objects.pod(2)
    server.put(PODS.path("team", spare["metadata"]["name"]), spare)
    beat = f"-{log_lines.format_line(objects.beat(attempt=2, members='0,2'))}"
    write_log(server, 0, "agent 0: leads", "[0] a", beat)
    write_log(server, 1, "agent 1: was lost for a while", "[1] old")
    write_log(server, 2, "agent 2: was a spare", "[1] new")
    result = show_logs("--rank", "1")
    assert result.out.splitlines() == ["old", "new"]
    assert result.err.splitlines() == ["agent 2: was a spare"], (
        "an agent's line belongs to the ranks that it has now"
    )
    assert [
        json.loads(line)["host"] for line in show_logs("--rank", "1", "-o", "json").out.splitlines()
    ] == [2, 1, 2]
    refused = show_logs("--rank", "2")
    assert refused.code == 2 and "--rank 2 does not exist: ranks are 0–1" in refused.err


def call_after_logs(server: Server, action: Callable[[], object]) -> None:
    """Let a thread call `action` soon after a follower has opened the logs of both hosts."""
    opened: set[str] = set()

    def note_opened(handler: Handler) -> bool:
        if handler.at not in opened:
            opened.add(handler.at)
            if len(opened) == 2:
                threading.Timer(0.3, action).start()
        return False

    server.on("GET", "/log", *[note_opened] * 200)


def test_follower_of_deleted_job_fails_and_says_so(
    server: Server, show_logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.jobs.logs.follow.DRAIN_TIMEOUT_S", 0.5)
    for host in range(2):
        write_log(server, host, f"[{host}] a")
    call_after_logs(server, lambda: server.drop(JOBSETS.path("team", "lm")))
    result = show_logs("-f")
    assert sorted(result.out.splitlines()) == ["[0] a", "[1] a"]
    assert result.code == 3 and "JobSet lm in namespace team was deleted" in result.err


def test_follower_reads_on_where_a_stream_ends_before_its_container(
    server: Server, show_logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.jobs.logs.follow.RECONNECT_PAUSE_S", 0.05)
    monkeypatch.setattr("jaxlaunch.launcher.jobs.logs.follow.DRAIN_TIMEOUT_S", 5.0)
    path = JOBSETS.path("team", "lm")
    for host in range(2):
        write_log(server, host, f"[{host}] a")

    pod = objects.over(0, 0)

    def end_container(handler: Handler) -> bool:
        # The kubelet was started again, which had ended the stream.
        if handler.query.get("fieldSelector") != f"metadata.name={pod['metadata']['name']}":
            return False
        write_log(server, 0, "[0] a", "[0] b")
        server.put(PODS.path("team", pod["metadata"]["name"]), pod)
        done = {"status": {"terminalState": "Completed"}}
        server.put(path, apiserver.merge_patch(server.objects[path], done))
        return False

    server.on("GET", "/pods", *[end_container] * 200)
    result = show_logs("-f")
    assert result.code == 0
    assert sorted(result.out.splitlines()) == ["[0] a", "[0] b", "[1] a"]


def test_follower_of_job_that_its_ttl_deletes_ends_well(
    server: Server, show_logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxlaunch.launcher.jobs.logs.follow.DRAIN_TIMEOUT_S", 0.5)
    path = JOBSETS.path("team", "lm")

    def end_job() -> None:
        done = {"status": {"terminalState": "Completed"}}
        server.put(path, apiserver.merge_patch(server.objects[path], done))
        server.drop(path)

    call_after_logs(server, end_job)
    assert show_logs("-f").code == 0
