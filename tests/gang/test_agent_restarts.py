"""Restarts in place, and what is kept across them."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.contract import Requeue
from jaxlaunch.launcher.jobs.exec import enter_rank
from tests.gang.agents import (
    Gang,
    child_pids,
    make_job,
    poll_until,
    run_gang,
    run_program,
    write_program,
)

CRASH_TWICE = """
say(phase="step", step=5 * ATTEMPT)
print("attempt", ATTEMPT, "at", os.environ["JAX_COORDINATOR_ADDRESS"])
if ATTEMPT < 3 and RANK == 1:
    raise ValueError(f"fault {ATTEMPT}")
if ATTEMPT < 3:
    time.sleep(3600)
"""


def test_transient_fault_is_restarted_in_place(tmp_path: Path) -> None:
    gang, codes = run_program(tmp_path, CRASH_TWICE, in_place_limit=2, hosts=2)
    assert codes == [0, 0]
    assert gang.summary["restarts"] == {"crash": 2} and gang.verdict["cause"] == "done"
    assert [attempt["cause"] for attempt in gang.attempts] == ["crash", "crash", "done"]
    assert [attempt["attempt"] for attempt in gang.attempts] == [1, 2, 3]
    ports = {
        line.split()[-1] for line in gang.stdout.splitlines() if line.startswith("[1] attempt")
    }
    assert len(ports) == 3


EMPTIES_TEMPORARY_FOLDER = """
import shutil
say(phase="step", step=5 * ATTEMPT)
if ATTEMPT == 1:
    shutil.rmtree(os.path.dirname(os.environ["JAXLAUNCH_PROGRESS"]))
    os._exit(3)
"""


def test_restart_after_a_program_emptied_the_temporary_folder(tmp_path: Path) -> None:
    gang, codes = run_program(tmp_path, EMPTIES_TEMPORARY_FOLDER, in_place_limit=1)
    assert codes == [0], gang.stderr
    assert "Traceback" not in gang.stderr and gang.summary["restarts"] == {"crash": 1}
    assert gang.summary["step"] == 10


CRASH_ONCE = """
if ATTEMPT == 1:
    raise ValueError("fault 1")
mark("up")
wait_for("go")
"""


def test_restart_is_counted_while_the_next_attempt_runs(tmp_path: Path) -> None:
    with Gang(tmp_path, make_job(write_program(tmp_path, CRASH_ONCE), in_place_limit=1)) as gang:
        gang.start().wait_for_marks("up-0")
        gang.wait_until("the summary of attempt 2", lambda: gang.summary["of"]["attempt"] == 2)
        assert gang.summary["restarts"] == {"crash": 1}
        gang.release("go")
        assert gang.wait() == [0]
    assert gang.summary["restarts"] == {"crash": 1}


FAIL_RANK_1 = """
mark("up")
if RANK == 1:
    os._exit(3 + ATTEMPT)
time.sleep(3600)
"""


def test_only_the_last_attempt_is_held_and_a_signal_ends_it(tmp_path: Path) -> None:
    job = make_job(write_program(tmp_path, FAIL_RANK_1), crash_limit=1, hold_s=3600.0)
    first, codes = run_gang(tmp_path, job, 2)
    assert codes == [83, 83] and "held" not in first.stderr
    with Gang(tmp_path, job, 2, generation=1) as gang:
        gang.start().wait_until("the hold", lambda: "held until" in gang.stderr)
        assert (gang.verdict["code"], gang.summary["status"]) == (83, "failed")
        assert gang.summary["held_until"] > gang.summary["of"]["at"] + 3000

        def find_places() -> list[int]:
            return [
                rank for rank in (0, 1) if enter_rank.find_rank(rank, {"MARKS": str(gang.marks)})
            ]

        gang.wait_until("a place of each rank", lambda: find_places() == [0, 1])
        gang.signal(1)
        assert gang.wait() == [83, 83]
        assert poll_until(lambda: not find_places())
    assert len(gang.attempts) == 2 and gang.verdict["code"] == 83


def test_hold_ends_by_itself(tmp_path: Path) -> None:
    gang, codes = run_program(tmp_path, "sys.exit(3)", crash_limit=0, hold_s=0.05)
    assert codes == [83] and "held until" in gang.stderr


def test_permanent_fault_is_not_retried(tmp_path: Path) -> None:
    gang, codes = run_program(
        tmp_path,
        """
        say(hello="trainer")
        say(phase="init")
        say(error={"type": "DataError", "message": "no file matches", "traceback": "", "code": 65})
        os._exit(65)
        """,
        in_place_limit=3,
    )
    assert codes == [65]
    assert gang.verdict["cause"] == "bad_data" and len(gang.attempts) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "raise ValueError('option reduce=nccl')",
            "rank 0 raised: ValueError: option reduce=nccl; another attempt failed",
        ),
        (
            "import no_such_module",
            "rank 0 raised: ModuleNotFoundError: No module named 'no_such_module'; another attempt",
        ),
        (None, "No such file or directory); another attempt failed in the same way and saved no "),
    ],
)
def test_program_that_fails_twice_alike_at_its_start_is_not_retried(
    tmp_path: Path, text: str | None, words: str
) -> None:
    command = write_program(tmp_path, text or "")
    if text is None:
        (tmp_path / "program.py").unlink()  # the interpreter cannot open it
    gang, codes = run_gang(tmp_path, make_job(command, in_place_limit=3))
    assert codes == [70] and len(gang.attempts) == 2
    assert gang.verdict["cause"] == "startup" and words in gang.verdict["message"]
    assert "program.py" in gang.verdict["traceback"]
    assert gang.verdict["traceback"].count("Traceback") == (text is not None)
    # The first error is told once, and the second attempt refers to it.
    assert gang.stderr.count(" (83): ") == 1
    assert "attempt 2 failed as attempt 1 did" in gang.stderr


def test_another_job_in_the_same_folder_is_another_start(tmp_path: Path) -> None:
    run_program(
        tmp_path,
        "say(phase='step', step=57); say(committed=57); print('one')",
        env={"JAXLAUNCH_UID": "first"},
    )
    text = "say(hello='trainer'); say(phase='init'); print('two', flush=True); os._exit(78)"
    refused = write_program(tmp_path, text, name="refused.py")
    gang, codes = run_gang(tmp_path, make_job(refused), env={"JAXLAUNCH_UID": "second"})
    assert codes == [78]
    assert (gang.summary["status"], gang.summary["of"]["uid"]) == ("done", "first")
    rows = [
        (row["uid"], row["code"], row["first_step"], row["last_step"])
        for row in gang.summary["starts"]
    ]
    assert rows == [("first", 0, 57, 57), ("second", 78, None, None)]
    starts = [gang.run_dir / "starts" / str(number) for number in (1, 2)]
    first = json.loads((starts[0] / "summary.json").read_text())
    assert (first["status"], first["step"], first["of"]["uid"]) == ("done", 57, "first")
    refused = json.loads((starts[1] / "summary.json").read_text())
    assert (refused["status"], refused["of"]["uid"]) == ("failed", "second")
    assert [(start / "logs" / "rank-0.log").read_text() for start in starts] == ["one\n", "two\n"]
    assert [attempt["uid"] for attempt in gang.attempts] == ["first", "second"]


def test_clock_and_counters_continue_across_generations(tmp_path: Path) -> None:
    command = write_program(
        tmp_path, "say(phase='step', step=1); say(committed=ATTEMPT)\nif ATTEMPT == 1: os._exit(3)"
    )
    run_gang(tmp_path, make_job(command))
    gang, codes = run_gang(tmp_path, make_job(command), generation=1)
    assert codes == [0]
    first, second = (sum(attempt["seconds"].values()) for attempt in gang.attempts)
    total = sum(gang.summary["goodput"]["seconds"].values())
    assert total > first + second > 0 and gang.summary["restarts"] == {"crash": 1}


def test_history_of_another_run_is_not_used(tmp_path: Path) -> None:
    command = write_program(tmp_path, "say(phase='step', step=3); raise ValueError('a fault')")
    for uid in ("a", "b", "c", "d"):
        gang, codes = run_gang(tmp_path, make_job(command), env={"JAXLAUNCH_UID": uid})
        assert codes == [83]
    assert "previous attempt" not in gang.stderr and gang.attempts[-1]["attempt"] == 1


def test_gang_runs_without_a_run_folder(tmp_path: Path) -> None:
    gang, codes = run_program(tmp_path, "os._exit(3)", env={"JAXLAUNCH_RUN_DIR": ""})
    assert codes == [83]
    assert not gang.run_dir.exists() and "crash (83)" in gang.stderr


def test_run_folder_that_cannot_be_written_does_not_fail_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    gang, codes = run_gang(
        tmp_path, make_job(write_program(tmp_path, "print('ran')")), run="file/run"
    )
    assert codes == [0] and "[0] ran" in gang.stdout
    assert gang.stderr.count("cannot be used") == 1


# A stand-in for the built-in trainer: like it, a package whose main file does the imports.
TRAINER = """
import json, os, sys, time
print("imported", flush=True)
def main():
    attempt = int(os.environ["JAXLAUNCH_ATTEMPT"])
    def say(**message):
        os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\\n")
    def wait_for(name):
        while not os.path.exists(f"{os.environ['MARKS']}/{name}"): time.sleep(0.01)
    say(hello="trainer")
    say(phase="step", step=attempt)
    address = os.environ["JAX_COORDINATOR_ADDRESS"]
    print("attempt", attempt, "at", address, *sys.argv[1:], flush=True)
    if attempt == 1:
        wait_for("go")
        os._exit(83)
    say(phase="done", step=attempt)
if __name__ == "__main__":
    main()
"""


# An agent that runs it: in place of ours it cannot be found, whatever the folders of the job hold.
AGENT = """
from jaxlaunch.launcher.agent import __main__
from jaxlaunch.launcher.agent.host import processes
processes.TRAINER_MODULE = "stand_in"
__main__.main()
"""
AGENT_ARGV = (sys.executable, "-c", AGENT)


def write_fake_trainer(folder: Path, text: str = TRAINER) -> dict[str, str]:
    """Write the stand-in where the job's processes start; return the job's variable."""
    package = folder / "fake" / "stand_in"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(text)
    return {
        "JAXLAUNCH_JOB": make_job(None, in_place_limit=1, workdir=str(package.parent)).to_json()
    }


def test_restart_takes_the_standby_process(tmp_path: Path) -> None:
    with Gang(tmp_path, make_job(None), env=write_fake_trainer(tmp_path), argv=AGENT_ARGV) as gang:
        gang.start()
        gang.wait_until("the standby process", lambda: gang.stdout.count("imported") == 2)
        gang.release("go")
        assert gang.wait() == [0]
    lines = gang.stdout.splitlines()
    assert [line for line in lines if "attempt" in line][1].startswith(
        "[0] attempt 2 at 127.0.0.1:"
    )
    assert gang.summary["restarts"] == {"crash": 1} and gang.verdict["cause"] == "done"


def test_repeatedly_killed_standby_process_only_slows_restarts(tmp_path: Path) -> None:
    with Gang(tmp_path, make_job(None), env=write_fake_trainer(tmp_path), argv=AGENT_ARGV) as gang:
        gang.start()
        for killed in range(3):
            gang.wait_until(
                "another standby process",
                lambda killed=killed: gang.stdout.count("imported") == 2 + killed,
            )
            os.kill(max(child_pids(gang.agents[0].pid)), signal.SIGKILL)
            gang.wait_until(
                "the notice",
                lambda killed=killed: gang.stderr.count("ended with -9; ") == 1 + killed,
            )
        assert gang.stderr.count("another is started") == 2
        assert "restarts will take longer" in gang.stderr
        gang.release("go")
        assert gang.wait() == [0]


@pytest.mark.parametrize("host", [0, 1])
def test_eviction_for_excess_storage_is_charged_and_names_the_key(
    tmp_path: Path, host: int
) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch" / "block").write_bytes(os.urandom(2**21))
    command = write_program(tmp_path, "say(phase='step', step=4); mark('up'); time.sleep(3600)")
    job = make_job(
        command, in_place_limit=3, ephemeral_bytes=2**20, scratch={str(tmp_path / "scratch"): None}
    )
    with Gang(tmp_path, job, hosts=2) as gang:
        gang.start().wait_for_marks("up-0", "up-1")
        gang.signal(host)
        assert gang.wait() == [84, 84]
    assert (
        f"host {host} uses 2 MiB of ephemeral storage, over its limit of 1 MiB"
        in gang.verdict["message"]
    )
    assert "(resources.ephemeral)" in gang.verdict["message"] and len(gang.attempts) == 1


AT_A_STEP = """
for step in range(1, 6):
    say(phase="step", step=step)
if {commits} and ATTEMPT == 1:
    say(committed=3)
{end}
"""
REPEATED_ENDS = {
    "exception": ("raise ValueError(f'bad batch {os.getpid()} {ATTEMPT * chr(65)}')", "bad batch"),
    "exit": ("os._exit(3)", "exit code 3"),
    "signal": ("os.kill(os.getpid(), signal.SIGSEGV); time.sleep(9)", "SIGSEGV"),
}


@pytest.mark.parametrize("kind", REPEATED_ENDS)
def test_same_failure_at_the_same_step_ends_the_run(tmp_path: Path, kind: str) -> None:
    end, words = REPEATED_ENDS[kind]
    text = AT_A_STEP.format(end=end, commits=kind == "exception")
    gang, codes = run_program(tmp_path, text, in_place_limit=3, hosts=2)
    assert codes == [70, 70] and len(gang.attempts) == 2
    message = gang.verdict["message"]
    assert words in message and message.endswith("failed in the same way and saved no new step")
    assert (gang.verdict["step"], gang.verdict["failure"]["cause"]["step"]) == (5, 5)
    if kind == "exception":
        assert " A'" not in message and message.count(" A;") == 1, "the first error is reported"
    # Each attempt said its own end once.
    assert gang.stderr.count(words) == 1


@pytest.mark.parametrize("kind", REPEATED_ENDS)
def test_same_failure_in_new_pods_ends_the_run(tmp_path: Path, kind: str) -> None:
    end, words = REPEATED_ENDS[kind]
    job = make_job(write_program(tmp_path, AT_A_STEP.format(end=end, commits=True)))
    first, codes = run_gang(tmp_path, job)
    assert codes == [139 if kind == "signal" else 83]
    gang, codes = run_gang(tmp_path, job, generation=1)
    assert codes == [70] and len(gang.attempts) == 2
    assert words in gang.verdict["message"] and gang.verdict["cause"] == "startup"


def test_other_failure_or_new_commit_is_restarted(tmp_path: Path) -> None:
    gang, codes = run_program(
        tmp_path,
        """
        say(phase="step", step=5)
        if ATTEMPT == 1:
            raise ValueError("a")
        if ATTEMPT == 2:
            raise KeyError("b")
        if ATTEMPT in (3, 4):
            say(committed=ATTEMPT)
            raise ValueError("c")
        """,
        in_place_limit=3,
    )
    assert codes == [0]
    assert [attempt["cause"] for attempt in gang.attempts] == ["crash"] * 4 + ["done"]


REQUEUE = """
say(phase="step", step=1)
if ATTEMPT <= {count} and (RANK == 1 or {all_ranks}):
    sys.exit({code})
if ATTEMPT <= {count}:
    mark("waits")
    time.sleep(3600)
"""
CODES = {42: Requeue.FREE, 43: Requeue.FREE_NEW_PODS, 99: Requeue.CHARGED}


@pytest.mark.parametrize("all_ranks", [True, False])
def test_free_code_restarts_in_place_without_being_counted(tmp_path: Path, all_ranks: bool) -> None:
    text = REQUEUE.format(count=3, code=42, all_ranks=all_ranks)
    fields: dict[str, Any] = {"requeue_codes": CODES, "in_place_limit": 1, "grace_s": 0.5}
    gang, codes = run_program(tmp_path, text, hosts=2, **fields)
    assert codes == [0, 0]
    assert [attempt["cause"] for attempt in gang.attempts] == ["requeued"] * 3 + ["done"]
    verdict = gang.attempts[0]["verdict"]
    assert verdict["traceback"] is None and (verdict["code"], verdict["failure"]["exit_code"]) == (
        85,
        42,
    )
    assert "ended with exit code 42 at step 1, which asks for another run" in gang.stderr
    assert "restarting in place: not counted toward restarts.in_place" in gang.stderr


@pytest.mark.parametrize(
    ("code", "in_place_limit", "exit_code", "attempts"),
    [
        (43, 3, 85, 1),
        (42, 0, 85, 1),
        (99, 2, 86, 3),
        (99, 0, 86, 1),
        # Ten restarts without a newly committed step are enough.
        (42, 1, 79, 10),
        # Without a meaning, it is a failure that repeats.
        (41, 3, 70, 2),
    ],
)
def test_code_that_asks_for_a_restart_is_counted(
    tmp_path: Path, code: int, in_place_limit: int, exit_code: int, attempts: int
) -> None:
    text = REQUEUE.format(count=99, code=code, all_ranks=True)
    fields: dict[str, Any] = {"requeue_codes": CODES, "preempted_limit": 10}
    gang, codes = run_program(tmp_path, text, in_place_limit=in_place_limit, **fields)
    assert codes == [exit_code] and len(gang.attempts) == attempts
    assert f"exit code {code}" in gang.verdict["message"]


def test_code_waits_for_ranks_that_still_save(tmp_path: Path) -> None:
    gang, codes = run_program(
        tmp_path,
        """
        if ATTEMPT == 1 and RANK == 0:
            time.sleep(2)
            mark("saved")
        if ATTEMPT == 1:
            sys.exit(42)
        """,
        hosts=2,
        in_place_limit=1,
        requeue_codes=CODES,
    )
    assert codes == [0, 0] and (gang.marks / "saved-0").exists()
    assert [attempt["cause"] for attempt in gang.attempts] == ["requeued", "done"]


def test_exception_is_no_request_for_a_restart(tmp_path: Path) -> None:
    text = "raise ValueError('a bug')"
    codes_of_job = {1: Requeue.FREE}
    gang, codes = run_program(tmp_path, text, in_place_limit=1, requeue_codes=codes_of_job)
    assert codes == [70] and "a bug" in gang.verdict["message"]
