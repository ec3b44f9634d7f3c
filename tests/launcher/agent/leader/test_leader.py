"""The cost of messages for the leader, and its reactions. No process is started."""

from __future__ import annotations

import dataclasses
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.gang.memory import HostMemory
from jaxlaunch.launcher.agent.gang.protocol import HostHandshake
from jaxlaunch.launcher.agent.leader import reporter, server
from jaxlaunch.launcher.agent.leader.attempt import Attempt
from jaxlaunch.launcher.agent.leader.gang import CLOSE_TIMEOUT_S, Stage
from jaxlaunch.launcher.agent.leader.publishers import PodLog
from jaxlaunch.records.log_lines import BeatLine, ProgressAnnotation, parse_line
from jaxlaunch.records.summary import AttemptRecord, RankMemory, Summary
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs.layout import AGENTS
from jaxlaunch.runs.run_folder import RunFolder, RunStarts
from tests.launcher.agent.leader.gangs import STEPPING, UID, Gang, opcodes, reset

ECHO = {"type": "ValueError", "message": "Gloo: Connection closed by peer", "traceback": "T"}
HANG = {"phase": "step", "limit_s": 5.0, "elapsed_s": 5.0, "first_rank": 4}


SPARE_JOB = AgentJob(
    "t", ("true",), processes_per_host=1, in_place_limit=0, replaces=True, sizes=(2, 3)
)


def beats(harness: Gang) -> list[int]:
    harness.beat(3)
    return [
        harness.beat(3, step=4),
        harness.beat(3, step=5),
        harness.beat(3, committed=5),
        harness.send(3, "beat", ranks={}, metrics=None),
    ]


def echoes(harness: Gang) -> list[int]:
    for host in range(3, len(harness.hosts)):
        harness.event(host, "error", error=ECHO)
    return [
        harness.event(2, "error", error=ECHO),
        harness.event(2, "exit", exit=1, text="x"),
        harness.beat(2),
    ]


def stacks(harness: Gang) -> list[int]:
    harness.event(2, "hang", hang=HANG)
    harness.send(3, "stacks", rank=6, status=STEPPING.to_wire(), text="t")
    return [harness.send(3, "stacks", rank=7, status=STEPPING.to_wire(), text="t"), harness.beat(2)]


def ends(harness: Gang) -> list[int]:
    harness.event(2, "exit", exit=-9)
    harness.send(2, "gone")
    return [
        harness.beat(3, exit=-9),
        harness.event(3, "exit", exit=-9),
        harness.send(3, "gone"),
        harness.close(3),
    ]


def notes(harness: Gang) -> list[int]:
    return [harness.send(3, "note", text="a note")]


@pytest.mark.extended
@pytest.mark.parametrize(
    "messages", [beats, echoes, stacks, ends, notes], ids=lambda value: value.__name__
)
def test_cost_of_a_message_is_independent_of_the_number_of_hosts(
    gang: Callable[..., Gang], messages: Callable[[Gang], list[int]]
) -> None:
    few, many = messages(gang(6)), messages(gang(300))
    assert all(count > 0 for count in few)
    assert all(large <= 1.5 * small for small, large in zip(few, many, strict=True)), (few, many)


def test_cost_of_a_tick_is_independent_of_the_number_of_ranks(gang: Callable[..., Gang]) -> None:
    costs = []
    for hosts in (100, 300):
        harness = gang(hosts)
        (tick,) = harness.loop.ticks
        costs.append(opcodes(tick))
    assert costs[1] <= 4 * costs[0], costs


def test_beat_without_symptoms_needs_no_verdict(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[float] = []
    decide = Attempt.decide_verdict

    def record_request(self: Attempt, now: float, heard: Any) -> Any:
        requests.append(now)
        return decide(self, now, heard)

    monkeypatch.setattr(Attempt, "decide_verdict", record_request)
    harness = gang(3)
    for host in harness.hosts:
        harness.beat(host)
        harness.beat(host, step=4)
    assert not requests
    harness.event(2, "error", error=ECHO)
    harness.beat(1, step=5)
    assert len(requests) == 2 and not harness.verdicts


def test_many_hosts_get_the_state_every_two_seconds(gang: Callable[..., Gang]) -> None:
    harness = gang(server.MANY_HOSTS)
    (tick,) = harness.loop.ticks
    for _ in range(round(2.0 / server.TICK_INTERVAL_S)):
        tick()
    reported = [
        [json.loads(line)["type"] for line in sock.recv(65536).splitlines()]
        for sock, _ in harness.hosts.values()
    ]
    # The first lines of host 0 were read when it joined.
    assert all(kinds.count("ping") == 1 for kinds in reported[1:])


def test_late_hosts_are_listed_in_one_write(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[Any] = []
    write = RunFolder.write_json

    def record_write(folder: RunFolder, name: str, value: Any) -> None:
        listed.extend([value] if name == AGENTS else [])
        write(folder, name, value)

    monkeypatch.setattr(RunFolder, "write_json", record_write)
    harness = gang(40, joined=2, job=dataclasses.replace(SPARE_JOB, sizes=(2,)))
    (tick,) = harness.loop.ticks
    for host in range(2, 40):
        harness.join(host)
    previous = len(listed)
    for _ in range(2 * round(server.STATE_INTERVAL_S / server.TICK_INTERVAL_S)):
        tick()
    assert (previous, len(listed)) == (1, 2)
    assert [item["host"] for item in listed[-1]] == list(range(40))


def test_agents_file_lists_ranks_after_each_start(
    gang: Callable[..., Gang], tmp_path: Path
) -> None:
    job = dataclasses.replace(SPARE_JOB, in_place_limit=3, timeouts_s={"replace": 0.0})
    harness = gang(3, joined=2, job=job)

    def ranks() -> dict[int, list[int]]:
        rows = json.loads((tmp_path / "0" / AGENTS).read_text())
        return {row["host"]: row["ranks"] for row in rows}

    (tick,) = harness.loop.ticks
    tick()
    harness.join(2)
    for _ in range(round(server.STATE_INTERVAL_S / server.TICK_INTERVAL_S)):
        tick()
    assert ranks() == {0: [0], 1: [1], 2: []}
    harness.fail(1)
    for host in range(3):
        harness.send(host, "gone")
    assert harness.leader._gang.attempt_number == 2
    assert ranks() == {0: [0], 1: [1], 2: [2]}
    harness.fail(0, "another", attempt=2)
    for host in (0, 2):
        harness.send(host, "gone", attempt=2)
    harness.close(1)
    tick()
    assert harness.leader._gang.attempt_number == 3
    assert ranks() == {0: [0], 2: [1]}


@pytest.mark.parametrize(
    "message",
    [
        {"type": "event"},
        {"type": "event", "kind": "error", "rank": 2, "status": {}, "error": "boom"},
        {"type": "event", "kind": "error", "rank": 2, "status": {"step": "x"}},
        {"type": "event", "kind": "error", "rank": 2, "status": []},
        {"type": "event", "kind": ["error"], "rank": 2, "status": {}},
        {"type": "event", "kind": "exit", "rank": 0, "status": {}},
        {"type": "event", "kind": "exit", "rank": 99, "status": {}},
        {"type": "event", "kind": "exit", "rank": "2", "status": {}},
        {"type": "event", "kind": "exit", "rank": 2, "status": {}, "exit": "x"},
        {"type": "beat", "ranks": [], "metrics": None},
        {"type": "beat", "ranks": {"2": 3}, "metrics": None},
        {"type": "beat", "ranks": {"0": {"step": 3}}, "metrics": None},
        {"type": "beat", "ranks": {"2-9": {"step": 3}}, "metrics": None},
        {"type": "beat", "ranks": {"3-2": {"step": 3}}, "metrics": None},
        {"type": "beat", "ranks": {"two": {"step": 3}}, "metrics": None},
        {"type": "beat", "ranks": {"2": {"step": 2**70}}, "metrics": None},
        {"type": "beat", "ranks": {"2": {"stopped": "yes"}}, "metrics": None},
        {"type": "beat", "ranks": {}, "metrics": ["loss"]},
        {"type": "stacks", "rank": 2, "status": {}},
        {"type": "nccl"},
        {"type": "note"},
        {"type": "memory"},
        {"type": "memory", "memory": {"peaks_mib": {"0": -1}}},
        {"type": "memory", "memory": {"peaks_mib": {"0": 5}}},
    ],
    ids=json.dumps,
)
def test_malformed_message_closes_only_its_connection(
    gang: Callable[..., Gang], message: dict[str, Any]
) -> None:
    harness = gang(3)
    harness.beat(2)
    line = json.dumps({"attempt": 1, **message, "epoch": harness.epoch, "n": 0})
    harness.raw(1, line.encode() + b"\n")
    assert any("invalid message" in text for text in harness.messages), harness.messages
    harness.beat(2)
    harness.fail(2)
    assert_verdict(harness)


def assert_verdict(harness: Gang) -> None:
    # On a busy machine the lost host is the verdict before the exception arrives.
    texts = ("boom", "host 1 (ranks 2 to 3) was lost")
    assert any(text in line for text in texts for line in harness.messages), harness.messages


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b"\x00", b"3", b'{"type": 3}', b'{"type":' + b"[" * 50_000, b"{}"]
)
def test_invalid_line_closes_only_its_connection(gang: Callable[..., Gang], line: bytes) -> None:
    harness = gang(3)
    sock, fd = harness.hosts[1]
    sock.sendall(line + b"\n")
    for _ in range(10):  # a line may be longer than what is read at once
        if fd in harness.loop.ready:
            harness.read(fd)
    assert fd not in harness.loop.ready
    harness.fail(2)
    assert_verdict(harness)


def test_host_may_join_after_a_malformed_hello(gang: Callable[..., Gang]) -> None:
    harness = gang(3, joined=2)
    harness.join(2, spec=3)
    assert harness.hosts[2][1] not in harness.loop.ready
    harness.join(2)
    assert harness.has_started


def test_reset_before_accept_does_not_end_the_leader(gang: Callable[..., Gang]) -> None:
    harness = gang(3, joined=2)
    reset(socket.create_connection(harness.address))
    harness.read(harness.listener)
    harness.join(2)
    assert harness.has_started


def test_host_killed_after_its_hello_has_not_joined(gang: Callable[..., Gang]) -> None:
    harness = gang(3, joined=2)
    greeting = harness.greeting(HostHandshake(UID.encode()), 2, harness.connect(2))
    sock, fd = harness.hosts[2]
    sock.sendall(greeting)
    reset(sock)
    harness.read(fd)
    assert 2 not in harness.leader._peers and not harness.messages
    harness.join(2)
    assert harness.has_started


def test_loss_during_a_refusal_does_not_end_the_leader(gang: Callable[..., Gang]) -> None:
    harness = gang(5, joined=4)
    for host in (1, 2):
        reset(harness.hosts[host][0])
    harness.join(4, spec="another")
    assert any("has a different job" in text for text in harness.messages), harness.messages
    harness.join(3, pod="another")


def test_verdict_is_stored_before_hosts_receive_it(
    gang: Callable[..., Gang], tmp_path: Path
) -> None:
    harness = gang(3)
    harness.fail(2)
    result = RunFolder(tmp_path / "0", harness.messages.append).read_summary(UID)
    assert result is not None and result.of is not None and result.of.judged is not None
    assert "boom" in result.of.judged.message and result.of.attempt == 1


def test_summary_has_the_total_that_rank_0_reports(
    gang: Callable[..., Gang], tmp_path: Path
) -> None:
    harness = gang(2)
    harness.beat(1, total=7)
    harness.beat(0, total=600)
    harness.fail(1)
    result = RunFolder(tmp_path / "0", harness.messages.append).read_summary(UID)
    assert result is not None and result.steps == 600


def test_slow_disk_does_not_block_the_leader(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = gang(3)
    reports, waits = harness.leader._reporter, list[float]()
    reports.save_state(time.monotonic())
    writer = SimpleNamespace(enqueue=lambda summary, wait_s: waits.append(wait_s))
    monkeypatch.setattr(reports, "_summary_writer", writer)
    for second in range(1, 4):
        reports.save_state(time.monotonic() + 2 * second)
    assert waits == [0.0, 0.0, 0.0]
    reports._written_state = None
    reports.save_state(time.monotonic())
    assert waits[3:] == [reporter.LOCAL_WRITE_INTERVAL_S]


def test_state_message_has_the_seconds_of_the_attempt(gang: Callable[..., Gang]) -> None:
    state = gang(3).leader._reporter.state.gang_state(1e6)
    progress = state["of"]
    assert (progress["attempt"], progress["generation"]) == (1, 0) and progress["started"] > 0
    assert set(progress["seconds"]) == set(state["seconds"])


def test_deadline_after_the_end_stops_nothing(gang: Callable[..., Gang]) -> None:
    harness = gang(1)
    harness.fail(0)
    harness.send(0, "gone")
    messages, machine = list(harness.messages), harness.leader._gang
    job = dataclasses.replace(harness.place.job, deadline_s=0.001)
    machine._config = dataclasses.replace(harness.place, job=job)
    machine._deadline_at = 0.001
    machine.on_tick(1e9)
    assert harness.messages == messages


def held_gang(
    gang: Callable[..., Gang],
    crash_limit: int,
    deadline_at: float | None = None,
    variables: dict[str, str] | None = None,
    **fields: Any,
) -> Gang:
    """Return a gang of two hosts with a hold of 1,000 s, whose only attempt has failed."""
    job = AgentJob("t", ("true",), processes_per_host=2, in_place_limit=0, hold_s=1000.0)
    job = dataclasses.replace(job, crash_limit=crash_limit, **fields)
    harness = gang(2, job=job, variables=variables)
    harness.leader._gang._deadline_at = deadline_at
    harness.fail(1)
    for host in range(2):
        harness.send(host, "gone")
    return harness


@pytest.mark.parametrize("ending", ["time", "stop", "deadline"])
def test_hold_ends_by_its_time_a_stop_or_the_deadline(
    gang: Callable[..., Gang], ending: str
) -> None:
    now = time.monotonic()
    harness = held_gang(gang, 0, now + 500 if ending == "deadline" else None)
    machine = harness.leader._gang
    assert machine.stage is Stage.HOLD and not harness.verdicts
    machine.on_tick(now + 400)
    assert machine.stage is Stage.HOLD
    if ending == "stop":
        harness.send(1, "stop")
    else:
        machine.on_tick(now + (600 if ending == "deadline" else 1100))
    assert machine.stage is Stage.LEAVE
    for host in range(2):
        harness.close(host)
    assert [verdict.code for verdict in harness.verdicts] == [contract.CRASH]


def test_hold_is_in_recent_lines_of_the_log_and_no_stall(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, lines, checks = held_gang(gang, 0), list[str](), list[float]()
    reports = harness.leader._reporter
    notifier = SimpleNamespace(check_progress=lambda view, now: checks.append(now))
    monkeypatch.setattr(reports, "_notifier", notifier)
    monkeypatch.setattr(reports, "_pod_log", PodLog(0, lines.append))
    for second in range(61):
        reports.report_progress(float(second))
    stages = [beat.stage for beat in map(parse_line, lines) if isinstance(beat, BeatLine)]
    assert len(stages) >= 4 and set(stages) == {"hold"}
    assert not checks


def test_host_that_joins_during_a_hold_stays(gang: Callable[..., Gang]) -> None:
    harness = held_gang(gang, 0)
    harness.close(1)
    harness.join(1)
    assert 1 in harness.leader._peers and harness.leader._gang.stage is Stage.HOLD


def test_attempt_before_the_last_is_not_held(gang: Callable[..., Gang]) -> None:
    assert held_gang(gang, 1).leader._gang.stage is Stage.LEAVE
    # A role that may fail gets no other attempt.
    assert held_gang(gang, 1, is_role=True, may_fail=True).leader._gang.stage is Stage.HOLD


@pytest.mark.parametrize(
    ("variables", "is_role", "shell", "stop"),
    [
        ({}, True, "lm", "lm"),
        ({contract.PARENT: "1", contract.RUN_DIR: "/runs/a/trainer"}, False, "a/trainer", "a"),
        ({contract.PARENT: "1", contract.RUN_DIR: "/runs/a"}, False, "a", "a"),
    ],
    ids=["cluster", "local", "local job started by a role"],
)
def test_commands_of_a_hold_name_the_job_of_a_role(
    gang: Callable[..., Gang],
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    is_role: bool,
    shell: str,
    stop: str,
) -> None:
    monkeypatch.setenv(contract.ROLE, "trainer")
    harness = held_gang(gang, 0, variables=variables, name="lm-trainer", is_role=is_role)
    words = f"`launcher shell {shell} --rank 2` enters it, `launcher stop {stop}` ends it"
    assert any(words in message for message in harness.messages), harness.messages


@pytest.mark.parametrize(
    ("variables", "is_given_up"),
    [({}, True), ({contract.RUN_URL: "gs://bucket/run"}, False)],
    ids=["none", "bucket"],
)
def test_late_generation_is_given_up_only_without_checkpoints(
    gang: Callable[..., Gang], variables: dict[str, str], is_given_up: bool
) -> None:
    job = AgentJob("t", processes_per_host=2, crash_limit=5, preempted_limit=20)
    harness = gang(2, joined=0, job=job, variables={contract.GENERATION: "25", **variables})
    assert harness.place.run_dir is None
    assert (harness.leader._gang.verdict is not None) is is_given_up


def test_hosts_leave_before_the_annotation_is_written(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = gang(3)
    order: list[str] = []
    send = harness.leader._send_message

    def record_message(hosts: Any, kind: str, **fields: Any) -> None:
        order.append(kind)
        send(hosts, kind, **fields)

    keeper = SimpleNamespace(enqueue=lambda progress: order.append(progress.when), is_busy=False)
    monkeypatch.setattr(harness.leader._reporter, "_annotator", keeper)
    monkeypatch.setattr(harness.leader, "_send_message", record_message)
    harness.fail(2)
    for host in range(3):
        harness.send(host, "gone")
    assert order == ["verdict", "ping", "leave", "left"]


def test_leader_waits_for_the_annotation_within_a_limit(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    for wait_s in (reporter.ANNOTATE_WAIT_S, 0.0):
        monkeypatch.setattr(reporter, "ANNOTATE_WAIT_S", wait_s)
        harness = gang(1)
        keeper = SimpleNamespace(enqueue=lambda progress: None, is_busy=True)
        monkeypatch.setattr(harness.leader._reporter, "_annotator", keeper)
        harness.fail(0)
        harness.send(0, "gone")
        (tick,) = harness.loop.ticks
        if wait_s:
            tick()
            assert not harness.verdicts
            keeper.is_busy = False
        tick()
        assert harness.verdicts


def test_time_to_leave_begins_after_the_end_is_stored(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = gang(3)
    written: list[float] = []
    write = RunStarts.write_summary

    def slowly(starts: RunStarts, summary: Summary) -> None:
        write(starts, summary)
        written.append(time.monotonic())

    monkeypatch.setattr(RunStarts, "write_summary", slowly)
    harness.fail(2)
    for host in range(3):
        harness.send(host, "gone")
    assert harness.leader._gang._stage_deadline >= written[-1] + CLOSE_TIMEOUT_S


def test_annotation_of_leaving_pods_counts_the_next_restart(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = gang(1)
    written: list[ProgressAnnotation] = []
    keeper = SimpleNamespace(enqueue=written.append, is_busy=False)
    monkeypatch.setattr(harness.leader._reporter, "_annotator", keeper)
    harness.fail(0)
    harness.send(0, "gone")
    assert [dict(progress.restarts or {}) for progress in written] == [{"crash": 1}]


def test_record_of_host_1_is_kept_after_a_stall(gang: Callable[..., Gang], tmp_path: Path) -> None:
    harness, folder = gang(2), RunFolder(tmp_path / "0", pytest.fail)
    lost = verdict_for_code(contract.LOST, "host 0 was lost: no message for 10 s", rank=0, host=0)
    theirs = AttemptRecord(UID, 0, 1, "lost", 0, None, None, {}, lost, 1.0, 2.0)
    folder.append_record(theirs)
    ours = verdict_for_code(contract.LOST, "host 1 was lost: connection closed", rank=2)
    assert harness.leader._reporter.record_attempt(ours, 1.0) == theirs
    assert folder.read_records(UID) == [theirs]


def test_memory_of_other_hosts_is_in_the_summary_and_the_record(
    gang: Callable[..., Gang], tmp_path: Path
) -> None:
    """A rank of host 1 that was killed at the limit ran out of memory."""
    harness, folder = gang(2), RunFolder(tmp_path / "0", pytest.fail)
    for host, in_use_mib, peaks in ((0, 2048, {0: 512, 1: 600}), (1, 8000, {2: 7168, 3: 100})):
        memory = HostMemory(in_use_mib, 8192, peaks).to_wire()
        harness.send(host, "memory", memory=memory)
    full, other = RankMemory(2, 1, 7.0, 7.812, 8.0), RankMemory(1, 0, 0.586, 2.0, 8.0)
    summary = harness.leader._reporter.state.build_summary(None)
    assert list(summary.memory) == [full, other]
    assert Summary.from_json(json.loads(json.dumps(summary.to_json()))).memory == [full, other]
    killed = verdict_for_code(contract.KILLED, "rank 2 was killed by SIGKILL", rank=2)
    assert harness.leader._reporter.record_attempt(killed, 1.0).memory == full
    (record,) = folder.read_records(UID)
    assert record.memory == full
    # Nothing is known of a rank whose host has not reported.
    assert harness.leader._gang.attempt.memory.find_rank(9) is None


def test_gang_with_a_spare_needs_host_0(gang: Callable[..., Gang]) -> None:
    """Rank 0 is always where the others look for JAX's coordinator."""
    harness = gang(4, joined=0, job=SPARE_JOB)
    for host in (3, 1, 2):
        harness.join(host)
    assert not [line for line in harness.messages if "starting" in line]
    harness.join(0)
    assert harness.messages[-1] == "starting attempt 1: 3 processes on 3 hosts"
    reported = [json.loads(line) for line in harness.hosts[3][0].recv(65536).splitlines()]
    assert [item["members"] for item in reported if item["type"] == "start"] == ["0-2"]


@pytest.mark.parametrize(
    "is_gone_first", [True, False], ids=["killed while it saves", "told to leave"]
)
def test_deleted_pod_does_not_end_other_pods(
    gang: Callable[..., Gang], is_gone_first: bool
) -> None:
    """Also one that is deleted with force, and so is killed before every host has saved."""
    harness = gang(3, job=dataclasses.replace(SPARE_JOB, in_place_limit=3, sizes=()))
    harness.send(1, "stop", excess=None)
    staying = (0, 2) if is_gone_first else (0, 1, 2)
    if is_gone_first:
        harness.close(1)
    for host in staying:
        ranks = {str(host): {**STEPPING.to_wire(), "exit": 0}}
        harness.send(host, "beat", ranks=ranks, metrics=None)
    harness.loop.ticks[0]()
    for host in staying:
        harness.send(host, "gone")
    assert harness.messages[-1] == "keeping 2 of 3 hosts, until host 1 is replaced"
    assert not harness.verdicts
    for host in (0, 2):
        lines = harness.hosts[host][0].recv(65536).splitlines()
        reported = [json.loads(line)["type"] for line in lines]
        assert "verdict" in reported and "leave" not in reported


@pytest.mark.parametrize("is_role", [True, False])
def test_gang_of_a_role_continues_in_new_pods(gang: Callable[..., Gang], is_role: bool) -> None:
    """The pods of other roles stay, so its last pod is replaced too."""
    job = dataclasses.replace(SPARE_JOB, in_place_limit=3, sizes=(), is_role=is_role)
    harness = gang(1, job=job)
    harness.send(0, "stop", excess=None)
    harness.send(0, "beat", ranks={"0": {**STEPPING.to_wire(), "exit": 0}}, metrics=None)
    harness.loop.ticks[0]()
    harness.send(0, "gone")
    assert harness.leader._gang.stage.name == "LEAVE"
    assert harness.leader._gang._leaves_alone is is_role


def test_restart_shows_the_saved_step_until_it_trains(gang: Callable[..., Gang]) -> None:
    harness = gang(1, job=AgentJob("t", ("true",), processes_per_host=1, in_place_limit=3))
    harness.beat(0, step=25, committed=20, first_committed=10)
    harness.fail(0)
    harness.send(0, "gone")
    assert harness.messages[-1].startswith("starting attempt 2")
    harness.send(0, "beat", ranks={"0": {"phase": "init", "step": 0}}, metrics=None, attempt=2)
    assert harness.leader._reporter.state.build_view().step == 20
    harness.send(0, "beat", ranks={"0": {"phase": "step", "step": 21}}, metrics=None, attempt=2)
    assert harness.leader._reporter.state.build_view().step == 21


def test_spare_with_another_job_is_refused(gang: Callable[..., Gang]) -> None:
    job = dataclasses.replace(SPARE_JOB, sizes=(2,))
    harness = gang(3, joined=2, job=job)
    harness.join(2, spec="another")
    assert any("has a different job" in text for text in harness.messages), harness.messages
    assert harness.leader._gang.verdict is None and harness.leader._gang.stage.name == "RUN"
    reported = [json.loads(line)["type"] for line in harness.hosts[1][0].recv(65536).splitlines()]
    assert "start" in reported and "verdict" not in reported


def test_report_about_an_unstarted_attempt_is_ignored(gang: Callable[..., Gang]) -> None:
    harness = gang(3, joined=2)
    harness.send(1, "stop", excess=None)
    assert harness.leader._gang.stage.name == "KILL"
    harness.beat(1)
    harness.fail(1)
    assert not any("invalid message" in text for text in harness.messages), harness.messages


def test_spare_without_ranks_stays_connected(gang: Callable[..., Gang]) -> None:
    job = dataclasses.replace(SPARE_JOB, sizes=(2,))
    harness = gang(3, joined=2, job=job)
    harness.join(2)
    harness.send(2, "beat", ranks={}, metrics=None)
    assert 2 in harness.leader._peers and not any("invalid" in text for text in harness.messages), (
        harness.messages
    )
