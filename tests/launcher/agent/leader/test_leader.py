"""What a message costs the leader, and what it makes of one that no agent would send. No process is started."""

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
from jaxlaunch.launcher.agent.gang.protocol import HostHandshake
from jaxlaunch.launcher.agent.leader import reporter, server
from jaxlaunch.launcher.agent.leader.attempt import Attempt
from jaxlaunch.launcher.agent.leader.gang import CLOSE_TIMEOUT_S
from jaxlaunch.records.log_lines import ProgressAnnotation
from jaxlaunch.records.summary import AttemptRecord, Summary
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs.layout import AGENTS
from jaxlaunch.runs.run_folder import RunFolder, RunStarts
from tests.launcher.agent.leader.gangs import STEPPING, UID, Gang, opcodes, reset

ECHO = {
    "type": "ValueError",
    "message": "Gloo: Connection closed by peer",
    "traceback": "T",
    "code": None,
}
HANG = {"phase": "step", "limit_s": 5.0, "elapsed_s": 5.0, "first_rank": 4}


def beats(of: Gang) -> list[int]:
    of.beat(3)
    return [
        of.beat(3, step=4),
        of.beat(3, step=5),
        of.beat(3, committed=5),
        of.send(3, "beat", ranks={}, metrics=None),
    ]


def echoes(of: Gang) -> list[int]:
    for host in range(3, len(of.hosts)):
        of.event(host, "error", error=ECHO)
    return [of.event(2, "error", error=ECHO), of.event(2, "exit", exit=1, text="x"), of.beat(2)]


def stacks(of: Gang) -> list[int]:
    of.event(2, "hang", hang=HANG)
    of.send(3, "stacks", rank=6, status=STEPPING.to_wire(), text="t")
    return [of.send(3, "stacks", rank=7, status=STEPPING.to_wire(), text="t"), of.beat(2)]


def ends(of: Gang) -> list[int]:
    of.event(2, "exit", exit=-9)
    of.send(2, "gone")
    return [of.beat(3, exit=-9), of.event(3, "exit", exit=-9), of.send(3, "gone"), of.close(3)]


def notes(of: Gang) -> list[int]:
    return [of.send(3, "note", text="a note")]


@pytest.mark.extended
@pytest.mark.parametrize(
    "messages", [beats, echoes, stacks, ends, notes], ids=lambda one: one.__name__
)
def test_what_a_message_costs_does_not_depend_on_how_many_hosts_there_are(
    gang: Callable[..., Gang], messages: Callable[[Gang], list[int]]
) -> None:
    few, many = messages(gang(6)), messages(gang(300))
    assert all(count > 0 for count in few)
    assert all(large <= 1.5 * small for small, large in zip(few, many, strict=True)), (few, many)


def test_a_tick_looks_at_those_whose_turn_it_is_and_not_at_every_rank(
    gang: Callable[..., Gang],
) -> None:
    costs = []
    for hosts in (100, 300):
        of = gang(hosts)
        (tick,) = of.loop.ticks
        costs.append(opcodes(tick))
    assert costs[1] <= 4 * costs[0], costs


def test_a_beat_asks_for_no_verdict_until_something_has_come_that_one_could_be_of(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    decide = Attempt.decide_verdict
    monkeypatch.setattr(
        Attempt,
        "decide_verdict",
        lambda self, now, heard: asked.append(now) or decide(self, now, heard),
    )
    of = gang(3)
    for host in of.hosts:
        of.beat(host)
        of.beat(host, step=4)
    assert not asked
    of.event(2, "error", error=ECHO)
    of.beat(1, step=5)
    assert len(asked) == 2 and not of.ended


def test_each_of_many_hosts_is_told_the_state_of_all_once_in_two_seconds(
    gang: Callable[..., Gang],
) -> None:
    of = gang(server.MANY_HOSTS)
    (tick,) = of.loop.ticks
    for _ in range(round(2.0 / server.TICK_INTERVAL_S)):
        tick()
    told = [
        [json.loads(line)["type"] for line in sock.recv(65536).splitlines()]
        for sock, _ in of.hosts.values()
    ]
    assert all(
        kinds.count("ping") == 1 for kinds in told[1:]
    )  # of host 0 the first lines were read when it joined


def test_hosts_that_come_late_together_are_listed_by_one_write(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Any] = []
    write = RunFolder.write_json
    monkeypatch.setattr(
        RunFolder,
        "write_json",
        lambda self, name, of: written.append((name, of)) or write(self, name, of),
    )
    job = AgentJob(
        "t", ("true",), processes_per_host=1, in_place_limit=0, replaces=True, sizes=(2,)
    )
    of = gang(40, joined=2, job=job)
    (tick,) = of.loop.ticks
    for host in range(2, 40):
        of.join(host)
    before = len([of for name, of in written if name == AGENTS])
    for _ in range(2 * round(server.STATE_INTERVAL_S / server.TICK_INTERVAL_S)):
        tick()
    listed = [of for name, of in written if name == AGENTS]
    assert (before, len(listed)) == (1, 2)
    assert [one["host"] for one in listed[-1]] == list(range(40))


def test_hosts_are_listed_with_the_ranks_that_they_hold_after_each_start(
    gang: Callable[..., Gang], tmp_path: Path
) -> None:
    timeouts_s = {"replace": 0.0}
    job = AgentJob(
        "t",
        ("true",),
        processes_per_host=1,
        in_place_limit=3,
        replaces=True,
        sizes=(2, 3),
        timeouts_s=timeouts_s,
    )
    of = gang(3, joined=2, job=job)

    def ranks() -> dict[int, list[int]]:
        return {
            row["host"]: row["ranks"] for row in json.loads((tmp_path / "0" / AGENTS).read_text())
        }

    (tick,) = of.loop.ticks
    tick()
    of.join(2)
    for _ in range(round(server.STATE_INTERVAL_S / server.TICK_INTERVAL_S)):
        tick()
    assert ranks() == {0: [0], 1: [1], 2: []}
    of.event(1, "error", error={"type": "ValueError", "message": "boom"})
    for host in range(3):
        of.send(host, "gone")
    assert of.leader._gang.attempt_number == 2
    assert ranks() == {0: [0], 1: [1], 2: [2]}
    of.event(0, "error", attempt=2, error={"type": "ValueError", "message": "another"})
    for host in (0, 2):
        of.send(host, "gone", attempt=2)
    of.close(1)
    tick()
    assert of.leader._gang.attempt_number == 3
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
    ],
    ids=json.dumps,
)
def test_a_message_of_another_form_ends_its_link_and_not_the_leader(
    gang: Callable[..., Gang], message: dict[str, Any]
) -> None:
    of = gang(3)
    of.beat(2)
    of.raw(1, json.dumps({"attempt": 1, **message, "epoch": of.epoch, "n": 0}).encode() + b"\n")
    assert any("invalid message" in text for text in of.said), of.said
    of.beat(2)
    of.event(2, "error", error={"type": "ValueError", "message": "boom"})
    # On a busy machine the lost host is the verdict before the exception arrives.
    assert any("boom" in text or "host 1 (ranks 2 to 3) was lost" in text for text in of.said), (
        of.said
    )


@pytest.mark.parametrize(
    "line", [b"[" * 100_000, b"\x00", b"3", b'{"type": 3}', b'{"type":' + b"[" * 50_000, b"{}"]
)
def test_a_line_that_is_no_message_ends_its_link_and_not_the_leader(
    gang: Callable[..., Gang], line: bytes
) -> None:
    of = gang(3)
    sock, fd = of.hosts[1]
    sock.sendall(line + b"\n")
    for _ in range(10):  # a line may be longer than what is read at once
        if fd in of.loop.ready:
            of.read(fd)
    assert fd not in of.loop.ready
    of.event(2, "error", error={"type": "ValueError", "message": "boom"})
    assert any("boom" in text or "host 1 (ranks 2 to 3) was lost" in text for text in of.said), (
        of.said
    )


def test_a_hello_of_another_form_is_closed_and_the_host_may_still_join(
    gang: Callable[..., Gang],
) -> None:
    of = gang(3, joined=2)
    of.join(2, spec=3)
    assert of.hosts[2][1] not in of.loop.ready
    of.join(2)
    assert any("starting attempt 1" in text for text in of.said)


def test_a_connection_that_is_reset_before_it_is_accepted_does_not_end_the_leader(
    gang: Callable[..., Gang],
) -> None:
    of = gang(3, joined=2)
    reset(socket.create_connection(of.address))
    of.read(of.listener)
    of.join(2)
    assert any("starting attempt 1" in text for text in of.said)


def test_a_host_that_is_killed_after_its_hello_has_not_joined(gang: Callable[..., Gang]) -> None:
    of = gang(3, joined=2)
    greeting = of.greeting(HostHandshake(UID.encode()), 2, of.connect(2))
    sock, fd = of.hosts[2]
    sock.sendall(greeting)
    reset(sock)
    of.read(fd)
    assert 2 not in of.leader._peers and not of.said
    of.join(2)
    assert any("starting attempt 1" in text for text in of.said)


def test_a_host_that_is_lost_while_another_is_refused_does_not_end_the_leader(
    gang: Callable[..., Gang],
) -> None:
    of = gang(5, joined=4)
    for host in (1, 2):
        reset(of.hosts[host][0])
    of.join(4, spec="another")
    assert any("has a different job" in text for text in of.said), of.said
    of.join(3, pod="another")


def test_a_verdict_is_in_the_summary_before_any_host_is_told(
    gang: Callable[..., Gang], tmp_path: Path
) -> None:
    of = gang(3)
    of.event(2, "error", error={"type": "ValueError", "message": "boom"})
    found = RunFolder(tmp_path / "0", of.said.append).read_summary(UID)
    assert found is not None and found.of is not None and found.of.judged is not None
    assert "boom" in found.of.judged.message and found.of.attempt == 1


def test_a_disk_that_takes_seconds_to_sync_does_not_stop_the_leader_each_second(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = gang(3)
    own, waits = of.leader._reporter, list[float]()
    own.save_state(time.monotonic())
    writer = SimpleNamespace(keep=lambda summary, wait_s: waits.append(wait_s))
    monkeypatch.setattr(own, "_summary_writer", writer)
    for second in range(1, 4):
        own.save_state(time.monotonic() + 2 * second)
    assert waits == [0.0, 0.0, 0.0]
    own._written = None
    own.save_state(time.monotonic())
    assert waits[3:] == [reporter.LOCAL_WRITE_INTERVAL_S]


def test_a_report_to_the_hosts_says_what_the_attempt_itself_has_spent(
    gang: Callable[..., Gang],
) -> None:
    of = gang(3)
    said = of.leader._reporter.state.gang_state(1e6)
    assert (
        said["of"]["attempt"] == 1 and said["of"]["generation"] == 0 and said["of"]["started"] > 0
    )
    assert set(said["of"]["seconds"]) == set(said["seconds"])


def test_a_deadline_that_passes_when_the_run_has_ended_stops_nothing(
    gang: Callable[..., Gang],
) -> None:
    of = gang(1)
    of.event(0, "error", error={"type": "ValueError", "message": "boom"})
    of.send(0, "gone")
    said, machine = list(of.said), of.leader._gang
    machine._config = dataclasses.replace(
        of.place, job=dataclasses.replace(of.place.job, deadline_s=0.001)
    )
    machine._deadline_at = 0.001
    machine.on_tick(1e9)
    assert of.said == said


@pytest.mark.parametrize(
    ("variables", "is_given_up"),
    [({}, True), ({contract.RUN_URL: "gs://bucket/run"}, False)],
    ids=["none", "bucket"],
)
def test_a_late_generation_is_given_up_where_no_checkpoints_are_kept_and_not_where_their_bucket_is_out_of_reach(
    gang: Callable[..., Gang], variables: dict[str, str], is_given_up: bool
) -> None:
    job = AgentJob("t", processes_per_host=2, crash_limit=5, preempted_limit=20)
    of = gang(2, joined=0, job=job, variables={contract.GENERATION: "25", **variables})
    assert of.place.run_dir is None and (of.leader._gang.verdict is not None) is is_given_up


def test_every_host_may_leave_before_the_end_is_written_on_the_jobset(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = gang(3)
    order: list[str] = []
    send = of.leader._send_message
    monkeypatch.setattr(
        of.leader._reporter,
        "_annotator",
        SimpleNamespace(keep=lambda known: order.append(known.when), is_busy=False),
    )
    monkeypatch.setattr(
        of.leader,
        "_send_message",
        lambda hosts, kind, **fields: (order.append(kind), send(hosts, kind, **fields)),
    )
    of.event(2, "error", error={"type": "ValueError", "message": "boom"})
    for host in range(3):
        of.send(host, "gone")
    assert order == ["verdict", "ping", "leave", "left"]


def test_the_leader_leaves_when_the_end_is_on_the_jobset_or_that_takes_too_long(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    for wait_s in (reporter.ANNOTATE_WAIT_S, 0.0):
        monkeypatch.setattr(reporter, "ANNOTATE_WAIT_S", wait_s)
        of = gang(1)
        keeper = SimpleNamespace(keep=lambda known: None, is_busy=True)
        monkeypatch.setattr(of.leader._reporter, "_annotator", keeper)
        of.event(0, "error", error={"type": "ValueError", "message": "boom"})
        of.send(0, "gone")
        (tick,) = of.loop.ticks
        if wait_s:
            tick()
            assert not of.ended
            keeper.is_busy = False
        tick()
        assert of.ended


def test_the_time_for_hosts_to_leave_begins_when_the_end_is_on_storage(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = gang(3)
    written: list[float] = []
    write = RunStarts.write_summary

    def slowly(starts: RunStarts, summary: Summary) -> None:
        write(starts, summary)
        written.append(time.monotonic())

    monkeypatch.setattr(RunStarts, "write_summary", slowly)
    of.event(2, "error", error={"type": "ValueError", "message": "boom"})
    for host in range(3):
        of.send(host, "gone")
    assert of.leader._gang._stage_deadline >= written[-1] + CLOSE_TIMEOUT_S


def test_what_is_written_on_the_jobset_when_pods_leave_counts_the_restart_that_follows(
    gang: Callable[..., Gang], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = gang(1)
    written: list[ProgressAnnotation] = []
    monkeypatch.setattr(
        of.leader._reporter, "_annotator", SimpleNamespace(keep=written.append, is_busy=False)
    )
    of.event(0, "error", error={"type": "ValueError", "message": "boom"})
    of.send(0, "gone")
    assert [dict(known.restarts or {}) for known in written] == [{"crash": 1}]


def test_an_attempt_that_host_1_has_ended_while_the_leader_stood_still_keeps_that_end(
    gang: Callable[..., Gang], tmp_path: Path
) -> None:
    of, folder = gang(2), RunFolder(tmp_path / "0", pytest.fail)
    lost = verdict_for_code(contract.LOST, "host 0 was lost: no message for 10 s", rank=0, host=0)
    theirs = AttemptRecord(UID, 0, 1, "lost", 0, None, None, {}, lost, 1.0, 2.0)
    folder.append_record(theirs)
    ours = verdict_for_code(
        contract.LOST, "host 1 (ranks 2 to 3) was lost: connection closed", rank=2
    )
    assert of.leader._reporter.record_attempt(ours, 1.0) == theirs and folder.read_records(UID) == [
        theirs
    ]


def test_a_gang_with_a_spare_starts_when_the_host_that_leads_is_there(
    gang: Callable[..., Gang],
) -> None:
    """Rank 0 is always where the others look for JAX's coordinator, also when host 0 comes back last."""
    job = AgentJob(
        "t", ("true",), processes_per_host=1, in_place_limit=0, replaces=True, sizes=(2, 3)
    )
    of = gang(4, joined=0, job=job)
    for host in (3, 1, 2):
        of.join(host)
    assert not [line for line in of.said if "starting" in line]
    of.join(0)
    assert of.said[-1] == "starting attempt 1: 3 processes on 3 hosts"
    told = [json.loads(line) for line in of.hosts[3][0].recv(65536).splitlines()]
    assert [one["members"] for one in told if one["type"] == "start"] == ["0-2"]


@pytest.mark.parametrize(
    "is_gone_first", [True, False], ids=["killed while it saves", "told to leave"]
)
def test_a_pod_that_is_deleted_costs_its_gang_no_other_pod(
    gang: Callable[..., Gang], is_gone_first: bool
) -> None:
    """Also one that is deleted with force, and so is killed before every host has saved."""
    of = gang(
        3, job=AgentJob("t", ("true",), processes_per_host=1, in_place_limit=3, replaces=True)
    )
    of.send(1, "stop", excess=None)
    staying = (0, 2) if is_gone_first else (0, 1, 2)
    if is_gone_first:
        of.close(1)
    for host in staying:
        of.send(host, "beat", ranks={str(host): {**STEPPING.to_wire(), "exit": 0}}, metrics=None)
    of.loop.ticks[0]()
    for host in staying:
        of.send(host, "gone")
    assert of.said[-1] == "keeping 2 of 3 hosts, until host 1 is replaced" and not of.ended
    for host in (0, 2):
        told = [json.loads(line)["type"] for line in of.hosts[host][0].recv(65536).splitlines()]
        assert "verdict" in told and "leave" not in told


def test_a_restart_is_at_the_step_that_is_saved_until_it_trains_one(
    gang: Callable[..., Gang],
) -> None:
    of = gang(1, job=AgentJob("t", ("true",), processes_per_host=1, in_place_limit=3))
    of.beat(0, step=25, committed=20, first_committed=10)
    of.event(0, "error", error={"type": "ValueError", "message": "boom"})
    of.send(0, "gone")
    assert of.said[-1].startswith("starting attempt 2")
    of.send(0, "beat", ranks={"0": {"phase": "init", "step": 0}}, metrics=None, attempt=2)
    assert of.leader._reporter.state.build_view().step == 20
    of.send(0, "beat", ranks={"0": {"phase": "step", "step": 21}}, metrics=None, attempt=2)
    assert of.leader._reporter.state.build_view().step == 21


def test_a_spare_with_another_job_is_refused_and_the_gang_continues(
    gang: Callable[..., Gang],
) -> None:
    job = AgentJob(
        "t", ("true",), processes_per_host=1, in_place_limit=0, replaces=True, sizes=(2,)
    )
    of = gang(3, joined=2, job=job)
    of.join(2, spec="another")
    assert any("has a different job" in text for text in of.said), of.said
    assert of.leader._gang.verdict is None and of.leader._gang.stage.name == "RUN"
    told = [json.loads(line)["type"] for line in of.hosts[1][0].recv(65536).splitlines()]
    assert "start" in told and "verdict" not in told


def test_a_report_about_an_attempt_whose_processes_never_started_changes_nothing(
    gang: Callable[..., Gang],
) -> None:
    of = gang(3, joined=2)
    of.send(1, "stop", excess=None)
    assert of.leader._gang.stage.name == "KILL"
    of.beat(1)
    of.event(1, "error", error={"type": "ValueError", "message": "boom"})
    assert not any("invalid message" in text for text in of.said), of.said


def test_a_spare_beats_without_ranks_and_stays_connected(gang: Callable[..., Gang]) -> None:
    job = AgentJob(
        "t", ("true",), processes_per_host=1, in_place_limit=0, replaces=True, sizes=(2,)
    )
    of = gang(3, joined=2, job=job)
    of.join(2)
    of.send(2, "beat", ranks={}, metrics=None)
    assert 2 in of.leader._peers and not any("invalid" in text for text in of.said), of.said
