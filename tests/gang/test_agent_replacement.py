"""A lost host is replaced alone: the others keep their agents, and the gang starts again in place."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gang.agents import Gang, job, program

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


def replaced(folder: Path, **fields: object) -> Gang:
    return Gang(
        folder, job(program(folder, SAVES), in_place_limit=1, replaces=True, **fields), hosts=HOSTS
    )


def up(gang: Gang, attempt: int) -> None:
    gang.until_marked(*(f"up{attempt}-{rank}" for rank in range(HOSTS)))


def heard(gang: Gang, attempt: int) -> None:
    """Waits until every rank's line of the attempt has passed its agent, which keeps none of it once it is killed; the
    line names what the attempt before saved, whoever leads."""
    line = f"attempt {attempt} after {attempt - 1}\n"
    gang.until(f"'{line}' of every rank", lambda: gang.out.count(line) == HOSTS)


@pytest.mark.parametrize("folder", [True, False], ids=["", "without a run folder"])
def test_lost_hosts_are_replaced_alone_host_0_and_two_at_once_included(
    tmp_path: Path, folder: bool
) -> None:
    with replaced(tmp_path) as gang:
        env = {} if folder else {"JAXLAUNCH_RUN_DIR": ""}
        gang.start(env=env)
        up(gang, 1)
        kept = {host: agent.pid for host, agent in gang.agents.items()}
        for attempt, lost in enumerate([(1,), (0,), (0, 2)], start=2):
            for host in lost:
                gang.signal(host, signal.SIGKILL)
                gang.agents[host].wait()
            gang.start(*lost, env=env)
            up(gang, attempt)
            heard(gang, attempt)
            kept = {host: pid for host, pid in kept.items() if host not in lost}
            assert all(gang.agents[host].pid == pid for host, pid in kept.items())
        gang.allow("end")
        assert gang.wait() == [0, 0, 0]
    if folder:
        assert [(one["cause"], one["rank"]) for one in gang.attempts[:2]] == [
            ("lost", 1),
            ("lost", 0),
        ]
        assert [one["attempt"] for one in gang.attempts] == [1, 2, 3, 4]
        assert {one["generation"] for one in gang.attempts} == {0}
        assert gang.summary["restarts"] == {"lost": 3}


def test_a_host_that_is_told_to_stop_leaves_after_a_save_and_nothing_is_charged(
    tmp_path: Path,
) -> None:
    with replaced(tmp_path) as gang:
        gang.start()
        up(gang, 1)
        for attempt, host in enumerate([2, 0, 1], start=2):
            gang.signal(host)
            assert gang.agents[host].wait() == 143
            gang.start(host)
            up(gang, attempt)
        gang.allow("end")
        assert gang.wait() == [0, 0, 0]
    assert [one["cause"] for one in gang.attempts] == ["preempted"] * 3 + ["done"]
    assert gang.attempts[0]["verdict"]["message"] == "stopped from outside: saved at step 1"


def test_a_gang_that_is_told_to_stop_leaves_as_a_whole(tmp_path: Path) -> None:
    with replaced(tmp_path) as gang:
        gang.start()
        up(gang, 1)
        for host in range(HOSTS):
            gang.signal(host)
        assert set(gang.wait()) <= {80, 143}
    assert gang.summary["status"] == "stopped" and len(gang.attempts) == 1
    assert gang.verdict["message"] == "stopped from outside: saved at step 1"


def test_hosts_wait_no_longer_than_the_timeout_and_leave_with_a_code_of_the_table(
    tmp_path: Path,
) -> None:
    for host in (1, 0):
        with replaced(tmp_path / str(host), timeouts_s={"replace": 1.0}) as gang:
            gang.start()
            up(gang, 1)
            gang.signal(host, signal.SIGKILL)
            assert sorted(gang.wait()) == [-9, 81, 81]
        assert "(timeouts.replace)" in gang.talk


def test_limits_of_restarts_hold_and_a_killed_process_is_no_killed_pod(tmp_path: Path) -> None:
    text = (
        "mark(f'up{ATTEMPT}'); say(phase='step', step=1); os.kill(os.getpid(), 9) if RANK else "
        "time.sleep(99)"
    )
    with Gang(
        tmp_path, job(program(tmp_path, text), in_place_limit=1, replaces=True), hosts=2
    ) as gang:
        gang.start()
        assert gang.wait() == [83, 83]
    assert [one["verdict"]["code"] for one in gang.attempts] == [137, 137]


def test_a_host_0_that_is_lost_again_and_again_uses_up_the_restarts_in_place(
    tmp_path: Path,
) -> None:
    text = "mark(f'up{ATTEMPT}'); say(phase='step', step=1); time.sleep(999)"
    with Gang(
        tmp_path, job(program(tmp_path, text), in_place_limit=1, replaces=True), hosts=2
    ) as gang:
        gang.start()
        for attempt in (1, 2):
            gang.until_marked(f"up{attempt}-0", f"up{attempt}-1")
            gang.signal(0, signal.SIGKILL)
            gang.agents[0].wait()
            gang.start(0)
        assert gang.wait() == [81, 81]
    assert [one["cause"] for one in gang.attempts] == ["lost"] * 3


def test_the_pod_that_follows_a_host_that_stands_still_takes_its_place(tmp_path: Path) -> None:
    with replaced(tmp_path) as gang:
        gang.start()
        up(gang, 1)
        gang.signal(1, signal.SIGSTOP)
        gang.start(1, name="again")
        up(gang, 2)
        gang.signal(1, signal.SIGKILL)
        gang.allow("end")
        assert sorted(gang.wait()) == [-9, 0, 0, 0]


def test_an_agent_that_comes_after_the_end_has_nothing_to_do(tmp_path: Path) -> None:
    with replaced(tmp_path) as gang:
        gang.allow("end")
        assert gang.start().wait() == [0, 0, 0]
        began = time.monotonic()
        assert gang.start(1).agents[1].wait() == 0 and time.monotonic() - began < 600


SHOWS = SAVES.replace(
    'mark(f"up{ATTEMPT}")',
    'mark(f"up{ATTEMPT}"); mark(f"host{os.environ[\'JOB_COMPLETION_INDEX\']}-{ATTEMPT}")',
)


def _agents(gang: Gang) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((gang.run_dir / "agents.json").read_text())
    return found


def test_a_spare_takes_the_ranks_of_a_lost_host_and_the_next_pod_becomes_the_spare(
    tmp_path: Path,
) -> None:
    of = job(program(tmp_path, SHOWS), in_place_limit=1, replaces=True, sizes=(HOSTS,))
    with Gang(tmp_path, of, hosts=HOSTS + 1) as gang:
        gang.start(0, 1, 2).until_marked(*(f"up1-{rank}" for rank in range(HOSTS)))
        gang.start(3)
        gang.until("a spare", lambda: "holds no rank" in gang.talk)
        for attempt, (lost, heir) in enumerate([(1, 3), (3, 1)], start=2):
            gang.signal(lost, signal.SIGKILL)
            gang.agents[lost].wait()
            gang.until_marked(
                *(f"up{attempt}-{rank}" for rank in range(HOSTS)), f"host{heir}-{attempt}-1"
            )
            gang.start(lost)
            gang.until("another spare", lambda of=attempt: gang.talk.count("holds no rank") == of)
        held = {
            0: [0],
            1: [1],
            2: [2],
            3: [],
        }  # the spare's row comes with the next turn of the leader
        gang.until(
            "the spare's row", lambda: {one["host"]: one["ranks"] for one in _agents(gang)} == held
        )
        gang.allow("end")
        assert gang.wait() == [0, 0, 0, 0]
    assert [one["cause"] for one in gang.attempts] == ["lost", "lost", "done"]


def test_a_gang_that_may_shrink_goes_on_with_the_hosts_that_it_has_and_a_size_that_fits(
    tmp_path: Path,
) -> None:
    text = SHOWS.replace("say(committed=ATTEMPT)", "say(committed=ATTEMPT * 10)") + ""
    of = job(
        program(tmp_path, text),
        in_place_limit=9,
        replaces=True,
        sizes=(2, 4),
        timeouts_s={"replace": 0.5},
    )
    with Gang(tmp_path, of, hosts=4) as gang:
        gang.start()
        gang.until_marked(*(f"up1-{rank}" for rank in range(4)))
        gang.signal(2, signal.SIGKILL)
        gang.agents.pop(2).wait()
        gang.until_marked("up2-0", "host1-2-1")
        gang.until("a spare", lambda: "agent 3: holds no rank" in gang.talk)
        gang.allow("end")
        assert gang.wait() == [0, 0, 0]
    assert "continuing with 2 of 4 hosts" in gang.talk and "2 processes on 2 hosts" in gang.talk
