"""Starting again in place, and what outlives it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.gang.agents import Gang, children, job, launch, program

CRASH_TWICE = """
say(phase="step", step=5 * ATTEMPT)
print("attempt", ATTEMPT, "at", os.environ["JAX_COORDINATOR_ADDRESS"])
if ATTEMPT < 3 and RANK == 1:
    raise ValueError(f"fault {ATTEMPT}")
if ATTEMPT < 3:
    time.sleep(3600)
"""


def test_a_fault_that_passes_is_restarted_in_the_same_agents(tmp_path: Path) -> None:
    gang, codes = launch(tmp_path, job(program(tmp_path, CRASH_TWICE), in_place_budget=2), hosts=2)
    assert codes == [0, 0]
    assert gang.summary["restarts"] == {"crash": 2} and gang.verdict["cause"] == "done"
    assert [attempt["cause"] for attempt in gang.attempts] == ["crash", "crash", "done"]
    assert [attempt["attempt"] for attempt in gang.attempts] == [1, 2, 3]
    ports = {line.split()[-1] for line in gang.out.splitlines() if line.startswith("[1] attempt")}
    assert len(ports) == 3


def test_after_the_budget_the_first_error_is_reported(tmp_path: Path) -> None:
    gang, codes = launch(tmp_path, job(program(tmp_path, CRASH_TWICE), in_place_budget=1), hosts=2)
    assert codes == [83, 83]
    assert gang.verdict["message"] == "rank 1 raised at step 5: ValueError: fault 1"
    assert len(gang.attempts) == 2


def test_a_newly_committed_step_gives_the_budget_back(tmp_path: Path) -> None:
    command = program(
        tmp_path,
        """
        say(phase="step", step=ATTEMPT)
        say(committed=ATTEMPT)
        if ATTEMPT < 5: os._exit(3)
        """,
    )
    gang, codes = launch(tmp_path, job(command, in_place_budget=1))
    assert codes == [0]
    assert [attempt["last_committed"] for attempt in gang.attempts] == [1, 2, 3, 4, 5]


def test_a_fault_that_does_not_pass_is_not_tried_again(tmp_path: Path) -> None:
    command = program(
        tmp_path,
        """
        say(hello="trainer")
        say(phase="init")
        say(error={"type": "DataError", "message": "no file matches", "traceback": "", "code": 65})
        os._exit(65)
        """,
    )
    gang, codes = launch(tmp_path, job(command, in_place_budget=3))
    assert codes == [65]
    assert gang.verdict["cause"] == "bad_data" and len(gang.attempts) == 1


def test_three_generations_without_a_newly_committed_step_are_no_progress(tmp_path: Path) -> None:
    command = program(tmp_path, "say(phase='step', step=3); raise ValueError(f'fault {ATTEMPT}')")
    for generation, code in enumerate((83, 83, 79)):
        gang, codes = launch(tmp_path, job(command), generation=generation)
        assert codes == [code]
    assert gang.verdict["cause"] == "no_progress" and "the first error was: rank 0 raised" in gang.verdict["message"]
    assert "fault 1" in gang.verdict["message"]
    assert [attempt["generation"] for attempt in gang.attempts] == [0, 1, 2]
    assert "before: attempt 1 of generation 0: rank 0 raised at step 3: ValueError: fault 1" in gang.talk


def test_the_clock_and_the_counters_go_on_across_generations(tmp_path: Path) -> None:
    command = program(tmp_path, "say(phase='step', step=1); say(committed=ATTEMPT)\nif ATTEMPT == 1: os._exit(3)")
    launch(tmp_path, job(command))
    gang, codes = launch(tmp_path, job(command), generation=1)
    assert codes == [0]
    first, second = (sum(attempt["seconds"].values()) for attempt in gang.attempts)
    total = sum(gang.summary["goodput"]["seconds"].values())
    assert total > first + second > 0 and gang.summary["restarts"] == {"crash": 1}


def test_the_history_of_another_run_is_not_ours(tmp_path: Path) -> None:
    command = program(tmp_path, "say(phase='step', step=3); raise ValueError('a fault')")
    for uid in ("a", "b", "c", "d"):
        gang, codes = launch(tmp_path, job(command), env={"JAXLAUNCH_UID": uid})
        assert codes == [83]
    assert "before:" not in gang.talk and gang.attempts[-1]["attempt"] == 1


def test_a_line_that_was_cut_short_by_a_kill_is_forgotten(tmp_path: Path) -> None:
    command = program(tmp_path, "print('attempt', ATTEMPT); os._exit(3)")
    gang, _ = launch(tmp_path, job(command))
    with (gang.run_dir / "attempts.jsonl").open("a") as file:
        file.write('{"uid": "uid-1", "gener\n')
    gang, codes = launch(tmp_path, job(command), generation=1)
    assert codes == [83] and "attempt 2" in gang.out


def test_without_a_run_folder_the_gang_runs_all_the_same(tmp_path: Path) -> None:
    gang, codes = launch(tmp_path, job(program(tmp_path, "os._exit(3)")), env={"JAXLAUNCH_RUN_DIR": ""})
    assert codes == [83]
    assert not gang.run_dir.exists() and "crash (83)" in gang.talk


def test_a_run_folder_that_cannot_be_written_costs_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    gang, codes = launch(tmp_path, job(program(tmp_path, "print('ran')")), run="file/run")
    assert codes == [0] and "[0] ran" in gang.out
    assert gang.talk.count("cannot be used") == 1


def test_a_log_is_bounded(tmp_path: Path) -> None:
    command = program(tmp_path, "for _ in range(300): print('x' * 65000)")
    gang, codes = launch(tmp_path, job(command))
    assert codes == [0]
    sizes = [path.stat().st_size for path in (gang.run_dir / "logs").iterdir()]
    assert len(sizes) == 2 and sum(sizes) < 17 * 1024 * 1024


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
    print("attempt", attempt, "at", os.environ["JAX_COORDINATOR_ADDRESS"], *sys.argv[1:], flush=True)
    if attempt == 1:
        wait_for("go")
        os._exit(83)
    say(phase="done", step=attempt)
if __name__ == "__main__":
    main()
"""


def fake_trainer(folder: Path, text: str = TRAINER) -> dict[str, str]:
    """A folder in front of the path, whose `trainer` is not ours."""
    package = folder / "fake" / "trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(text)
    return {"JAXLAUNCH_JOB": job(None, in_place_budget=1, workdir=str(package.parent)).to_json()}


def test_a_restart_takes_the_spare_interpreter_with_its_imports_done(tmp_path: Path) -> None:
    with Gang(tmp_path, job(None), env=fake_trainer(tmp_path)) as gang:
        gang.start()
        gang.until("the spare", lambda: gang.out.count("imported") == 2)
        gang.allow("go")
        assert gang.wait() == [0]
    lines = gang.out.splitlines()
    assert [line for line in lines if "attempt" in line][1].startswith("[0] attempt 2 at 127.0.0.1:")
    assert gang.summary["restarts"] == {"crash": 1} and gang.verdict["cause"] == "done"


def test_a_spare_that_fails_only_makes_restarts_cold(tmp_path: Path) -> None:
    with Gang(tmp_path, job(None), env=fake_trainer(tmp_path)) as gang:
        gang.start()
        gang.until("the spare", lambda: gang.out.count("imported") == 2)
        trainers = children(gang.agents[0].pid)
        os.kill(max(trainers), signal.SIGKILL)
        gang.until("the notice", lambda: "restarts will start cold" in gang.talk)
        gang.allow("go")
        assert gang.wait() == [0]


def test_a_job_that_may_not_restart_in_place_keeps_no_spare(tmp_path: Path) -> None:
    env = fake_trainer(tmp_path)
    env["JAXLAUNCH_JOB"] = env["JAXLAUNCH_JOB"].replace('"in_place_budget": 1', '"in_place_budget": 0')
    with Gang(tmp_path, job(None), env=env) as gang:
        gang.start()
        gang.until("the first step", lambda: "attempt 1" in gang.out)
        gang.allow("go")
        assert gang.wait() == [83]
    assert gang.out.count("imported") == 1
