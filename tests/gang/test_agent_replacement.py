"""A lost host is replaced alone: the others keep their agents, and the gang restarts in place."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gang.agents import Gang, make_job, write_program

# Each attempt saves its number as a step; the last one ends.
SAVES = """
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
say(hello="trainer")
say(phase="step", step=ATTEMPT)
say(committed=ATTEMPT)
print("attempt", ATTEMPT, "after", os.environ.get("JAXLAUNCH_SAVED"), flush=True)
mark(f"up{ATTEMPT}")
while not stop and not os.path.exists(f"{os.environ['MARKS']}/end"):
    time.sleep(0.01)
if stop:
    say(stopped={"step": ATTEMPT, "saved": True})
    os._exit(80)
say(phase="done", step=ATTEMPT)
os._exit(0)
"""
HOSTS = 3


def make_gang(folder: Path, **fields: object) -> Gang:
    return Gang(
        folder,
        make_job(write_program(folder, SAVES), in_place_limit=1, replaces=True, **fields),
        hosts=HOSTS,
    )


def wait_until_up(gang: Gang, attempt: int) -> None:
    gang.wait_for_marks(*(f"up{attempt}-{rank}" for rank in range(HOSTS)))


def wait_until_printed(gang: Gang, attempt: int) -> None:
    """Wait until every rank's line of the attempt has passed its agent.

    The line names the step that the previous attempt saved.
    """
    line = f"attempt {attempt} after {attempt - 1}\n"
    gang.wait_until(f"'{line}' of every rank", lambda: gang.stdout.count(line) == HOSTS)


@pytest.mark.parametrize("has_run_folder", [True, False], ids=["", "without a run folder"])
def test_only_lost_hosts_are_replaced(tmp_path: Path, has_run_folder: bool) -> None:
    with make_gang(tmp_path) as gang:
        env = {} if has_run_folder else {"JAXLAUNCH_RUN_DIR": ""}
        gang.start(env=env)
        wait_until_up(gang, 1)
        surviving_pids = {host: agent.pid for host, agent in gang.agents.items()}
        for attempt, lost in enumerate([(1,), (0,), (0, 2)], start=2):
            for host in lost:
                gang.signal(host, signal.SIGKILL)
                gang.agents[host].wait()
            gang.start(*lost, env=env)
            wait_until_up(gang, attempt)
            wait_until_printed(gang, attempt)
            surviving_pids = {host: pid for host, pid in surviving_pids.items() if host not in lost}
            assert all(gang.agents[host].pid == pid for host, pid in surviving_pids.items())
        gang.release("end")
        assert gang.wait() == [0, 0, 0]
    if has_run_folder:
        assert [(record["cause"], record["rank"]) for record in gang.attempts[:2]] == [
            ("lost", 1),
            ("lost", 0),
        ]
        assert [record["attempt"] for record in gang.attempts] == [1, 2, 3, 4]
        assert {record["generation"] for record in gang.attempts} == {0}
        assert gang.summary["restarts"] == {"lost": 3}


def test_preempted_host_leaves_after_a_save_without_a_charge(tmp_path: Path) -> None:
    with make_gang(tmp_path) as gang:
        gang.start()
        wait_until_up(gang, 1)
        for attempt, host in enumerate([2, 0, 1], start=2):
            gang.signal(host)
            assert gang.agents[host].wait() == 143
            gang.start(host)
            wait_until_up(gang, attempt)
        gang.release("end")
        assert gang.wait() == [0, 0, 0]
    assert [record["cause"] for record in gang.attempts] == ["preempted"] * 3 + ["done"]
    assert gang.attempts[0]["verdict"]["message"] == "stopped from outside: saved at step 1"


def test_gang_whose_hosts_are_all_stopped_leaves_as_a_whole(tmp_path: Path) -> None:
    with make_gang(tmp_path) as gang:
        gang.start()
        wait_until_up(gang, 1)
        for host in range(HOSTS):
            gang.signal(host)
        assert set(gang.wait()) <= {80, 143}
    assert gang.summary["status"] == "stopped" and len(gang.attempts) == 1
    assert gang.verdict["message"] == "stopped from outside: saved at step 1"


def test_hosts_leave_after_the_replace_timeout(tmp_path: Path) -> None:
    for host in (1, 0):
        with make_gang(tmp_path / str(host), timeouts_s={"replace": 1.0}) as gang:
            gang.start()
            wait_until_up(gang, 1)
            gang.signal(host, signal.SIGKILL)
            assert sorted(gang.wait()) == [-9, 81, 81]
        assert "(timeouts.replace)" in gang.stderr


def test_killed_process_counts_against_the_restarts_in_place(tmp_path: Path) -> None:
    text = (
        "mark(f'up{ATTEMPT}'); say(phase='step', step=1); os.kill(os.getpid(), 9) if RANK else "
        "time.sleep(99)"
    )
    with Gang(
        tmp_path, make_job(write_program(tmp_path, text), in_place_limit=1, replaces=True), hosts=2
    ) as gang:
        gang.start()
        assert gang.wait() == [83, 83]
    assert [attempt["verdict"]["code"] for attempt in gang.attempts] == [137, 137]


def test_repeated_loss_of_host_0_uses_up_the_restarts_in_place(tmp_path: Path) -> None:
    text = "mark(f'up{ATTEMPT}'); say(phase='step', step=1); time.sleep(999)"
    with Gang(
        tmp_path, make_job(write_program(tmp_path, text), in_place_limit=1, replaces=True), hosts=2
    ) as gang:
        gang.start()
        for attempt in (1, 2):
            gang.wait_for_marks(f"up{attempt}-0", f"up{attempt}-1")
            gang.signal(0, signal.SIGKILL)
            gang.agents[0].wait()
            gang.start(0)
        assert gang.wait() == [81, 81]
    assert [record["cause"] for record in gang.attempts] == ["lost"] * 3


def test_new_pod_replaces_a_frozen_host(tmp_path: Path) -> None:
    with make_gang(tmp_path) as gang:
        gang.start()
        wait_until_up(gang, 1)
        gang.signal(1, signal.SIGSTOP)
        gang.start(1, name="again")
        wait_until_up(gang, 2)
        gang.signal(1, signal.SIGKILL)
        gang.release("end")
        assert sorted(gang.wait()) == [-9, 0, 0, 0]


def test_agent_that_starts_after_the_end_exits(tmp_path: Path) -> None:
    with make_gang(tmp_path) as gang:
        gang.release("end")
        assert gang.start().wait() == [0, 0, 0]
        started_at = time.monotonic()
        assert gang.start(1).agents[1].wait() == 0 and time.monotonic() - started_at < 600


SAVES_AND_SHOWS_HOST = SAVES.replace(
    'mark(f"up{ATTEMPT}")',
    'mark(f"up{ATTEMPT}"); mark(f"host{os.environ[\'JOB_COMPLETION_INDEX\']}-{ATTEMPT}")',
)


def _read_agents(gang: Gang) -> list[dict[str, Any]]:
    agents: list[dict[str, Any]] = json.loads((gang.run_dir / "agents.json").read_text())
    return agents


def test_spare_takes_the_ranks_of_a_lost_host_and_the_next_pod_becomes_the_spare(
    tmp_path: Path,
) -> None:
    job = make_job(
        write_program(tmp_path, SAVES_AND_SHOWS_HOST),
        in_place_limit=1,
        replaces=True,
        sizes=(HOSTS,),
    )
    with Gang(tmp_path, job, hosts=HOSTS + 1) as gang:
        gang.start(0, 1, 2).wait_for_marks(*(f"up1-{rank}" for rank in range(HOSTS)))
        gang.start(3)
        gang.wait_until("a spare", lambda: "holds no rank" in gang.stderr)
        for attempt, (lost, heir) in enumerate([(1, 3), (3, 1)], start=2):
            gang.signal(lost, signal.SIGKILL)
            gang.agents[lost].wait()
            gang.wait_for_marks(
                *(f"up{attempt}-{rank}" for rank in range(HOSTS)), f"host{heir}-{attempt}-1"
            )
            gang.start(lost)
            gang.wait_until(
                "another spare",
                lambda attempt=attempt: gang.stderr.count("holds no rank") == attempt,
            )
        # The spare's row comes with the next turn of the leader.
        expected_ranks = {0: [0], 1: [1], 2: [2], 3: []}
        gang.wait_until(
            "the spare's row",
            lambda: {row["host"]: row["ranks"] for row in _read_agents(gang)} == expected_ranks,
        )
        gang.release("end")
        assert gang.wait() == [0, 0, 0, 0]
    assert [row["cause"] for row in gang.attempts] == ["lost", "lost", "done"]


def test_elastic_gang_continues_with_a_size_that_fits(tmp_path: Path) -> None:
    text = (
        SAVES_AND_SHOWS_HOST.replace("say(committed=ATTEMPT)", "say(committed=ATTEMPT * 10)") + ""
    )
    job = make_job(
        write_program(tmp_path, text),
        in_place_limit=9,
        replaces=True,
        sizes=(2, 4),
        timeouts_s={"replace": 0.5},
    )
    with Gang(tmp_path, job, hosts=4) as gang:
        gang.start()
        gang.wait_for_marks(*(f"up1-{rank}" for rank in range(4)))
        gang.signal(2, signal.SIGKILL)
        gang.agents.pop(2).wait()
        gang.wait_for_marks("up2-0", "host1-2-1")
        gang.wait_until("a spare", lambda: "agent 3: holds no rank" in gang.stderr)
        gang.release("end")
        assert gang.wait() == [0, 0, 0]
    assert "continuing with 2 of 4 hosts" in gang.stderr and "2 processes on 2 hosts" in gang.stderr
