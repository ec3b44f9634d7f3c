"""SIGTERM stops every host, later symptoms are part of it, and no process outlives the deadline."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.gang.agents import PATIENCE_S, Gang, is_alive, make_job, poll_until, write_program

GRACE_S = 8.0  # of which 5 s are kept for leaving

SAVES = """
def stop(*_):
    say(phase="save", step=37)
    say(committed=37)
    say(stopped={"step": 37, "saved": True, "note": "saved step 37"})
    say(error={"type": "Stopped", "message": "stopped", "traceback": "", "code": 80})
    os._exit(80)
signal.signal(signal.SIGTERM, stop)
say(hello="trainer")
say(phase="step", step=37)
mark("up")
time.sleep(3600)
"""


def make_gang(tmp_path: Path, text: str, **fields: object) -> Gang:
    return Gang(
        tmp_path,
        make_job(write_program(tmp_path, text), **({"grace_s": GRACE_S} | fields)),
        hosts=2,
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hosts", "number"),
    [
        ((0,), signal.SIGTERM),
        ((1,), signal.SIGTERM),
        ((1,), signal.SIGINT),
        ((0, 1), signal.SIGTERM),
    ],
)
def test_signal_at_any_agent_is_one_stop_of_every_host_after_a_save(
    tmp_path: Path, hosts: tuple[int, ...], number: int
) -> None:
    with make_gang(tmp_path, SAVES) as gang:
        gang.start().wait_for_marks("up-0", "up-1")
        for host in hosts:
            gang.signal(host, number)
        assert gang.wait() == [80, 80]
    assert gang.summary["status"] == "stopped"
    assert gang.verdict["message"] == "stopped from outside: saved at step 37"
    assert (gang.verdict["cause"], gang.attempts[-1]["last_committed"]) == ("preempted", 37)


def test_rank_that_delays_the_save_is_named_at_the_deadline(tmp_path: Path) -> None:
    deaf = """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    say(phase="data" if RANK == 1 else "step", step=5)
    mark("up")
    time.sleep(3600)
    """
    with make_gang(tmp_path, deaf) as gang:
        gang.start().wait_for_marks("up-0", "up-1")
        pids = gang.child_pids()
        signalled_at = time.monotonic()
        gang.signal(0)
        assert gang.wait() == [80, 80]
        assert time.monotonic() - signalled_at <= 3 * GRACE_S
        assert not any(map(is_alive, pids))
    assert gang.verdict["message"] == "stopped from outside: not saved: rank 1 in data"


def test_stop_reaches_a_program_behind_a_wrapper(tmp_path: Path) -> None:
    command = ("sh", "-c", '"$@"; exit $?', "sh", *write_program(tmp_path, SAVES))
    with Gang(tmp_path, make_job(command, grace_s=GRACE_S)) as gang:
        gang.start().wait_for_marks("up-0")
        gang.signal(0)
        assert gang.wait() == [80]
    assert gang.verdict["message"] == "stopped from outside: saved at step 37"


def test_error_while_saving_is_still_a_stop(tmp_path: Path) -> None:
    fails = SAVES.replace("say(committed=37)", "raise OSError('disk full')")
    with make_gang(tmp_path, fails) as gang:
        gang.start().wait_for_marks("up-0", "up-1")
        gang.signal(1)
        assert gang.wait() == [80, 80]
    assert "not saved: rank" in gang.verdict["message"] and "disk full" in gang.verdict["message"]


def test_program_without_a_handler_ends_by_the_signal(tmp_path: Path) -> None:
    with make_gang(tmp_path, "mark('up'); time.sleep(3600)") as gang:
        gang.start().wait_for_marks("up-0", "up-1")
        gang.signal(0)
        assert gang.wait() == [80, 80]
    assert (
        gang.verdict["message"]
        == "stopped from outside: the program did not report whether it saved"
    )


def test_second_sigterm_kills(tmp_path: Path) -> None:
    deaf = (
        "signal.signal(signal.SIGTERM, lambda *_: mark('told'))\nmark('up')\nwhile True: "
        "time.sleep(1)"
    )
    with make_gang(tmp_path, deaf, grace_s=3600.0) as gang:
        gang.start().wait_for_marks("up-0", "up-1")
        gang.signal(1)
        gang.wait_for_marks("told-0", "told-1")
        signalled_at = time.monotonic()
        # Closer signals count as one.
        gang.wait_until("half a second", lambda: time.monotonic() - signalled_at > 0.6)
        gang.signal(1)
        assert gang.wait() == [80, 80]
    assert gang.verdict["message"].endswith("killed")


def test_stop_before_every_host_has_joined_ends_the_gang(tmp_path: Path) -> None:
    with Gang(tmp_path, make_job(write_program(tmp_path, "")), hosts=3) as gang:
        gang.start(0)
        gang.wait_until("a listening leader", lambda: gang.run_dir.exists())
        gang.start(1)
        gang.wait_until(
            "a metrics port", lambda: len(gang.agents) == 2 and gang.agents[1].poll() is None
        )
        gang.signal(0)
        assert gang.agents[0].wait(PATIENCE_S) == 80


PARENT = """
import os, subprocess, sys
os.environ["JAXLAUNCH_PARENT"] = str(os.getpid())
subprocess.Popen([sys.executable, "-m", "jaxlaunch.launcher.agent"]).wait()
"""


def test_agent_whose_parent_is_killed_stops(tmp_path: Path) -> None:
    gang = Gang(tmp_path, make_job(write_program(tmp_path, SAVES), grace_s=GRACE_S))
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], env=gang.environ(0), cwd=tmp_path
    ) as parent:
        assert poll_until((gang.marks / "up-0").exists)
        parent.kill()
    assert poll_until(lambda: gang.summary["status"] == "stopped")
    assert gang.verdict["message"] == "stopped from outside: saved at step 37"
