"""A gang of plain programs, and the verdict when one of them fails."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from jaxlaunch.launcher.agent.gang import nccl
from tests.found import shows
from tests.gang.agents import (
    Gang,
    is_alive,
    make_job,
    poll_until,
    run_gang,
    run_program,
    write_program,
    write_script,
)
from tests.launcher.agent.host.fake_ras import play, server

FOREVER = "time.sleep(3600)"
SLACK = 3  # times an issue's bounds: the machine may be slow


def test_programs_that_exit_with_0_are_done(tmp_path: Path) -> None:
    gang, codes = run_program(
        tmp_path,
        "say(phase='step', step=7); print('rank', RANK, 'of', SIZE)",
        processes_per_host=2,
        hosts=2,
    )
    assert codes == [0, 0]
    assert sorted(gang.stdout.splitlines()) == [f"[{rank}] rank {rank} of 4" for rank in range(4)]
    assert gang.summary["status"] == "done" and gang.summary["step"] == 7
    assert gang.verdict["message"] == "every process finished"
    assert (gang.run_dir / "starts" / "1" / "logs" / "rank-3.log").read_text() == "rank 3 of 4\n"
    assert not gang.summary["notes"]


def test_gloo_banner_is_not_printed(tmp_path: Path) -> None:
    banner = (
        "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1"
    )
    gang, codes = run_program(tmp_path, f"print({banner!r}); print('[Gloo] said the user')")
    assert codes == [0] and gang.stdout == "[0] [Gloo] said the user\n"


def test_exception_of_a_rank_ends_every_rank(tmp_path: Path) -> None:
    command = write_program(
        tmp_path,
        """
        say(phase="step", step=20)
        mark("up")
        wait_for("go")
        if RANK == 2:
            mark("raised")
            raise KeyError("no such batch")
        time.sleep(3600)
        """,
    )
    with Gang(tmp_path, make_job(command, processes_per_host=2), hosts=2) as gang:
        gang.start().wait_for_marks(*(f"up-{rank}" for rank in range(4)))
        pids = gang.child_pids()
        gang.release("go")
        gang.wait_for_marks("raised-2")
        raised = time.monotonic()
        gang.wait_until_gone(pids)
        assert time.monotonic() - raised <= 3 * SLACK
        codes = gang.wait()
    assert codes == [83, 83]
    verdict = gang.verdict
    assert (verdict["cause"], verdict["rank"], verdict["step"]) == ("crash", 2, 20)
    assert verdict["message"] == "rank 2 raised at step 20: KeyError: 'no such batch'"
    assert "program.py" in verdict["traceback"]
    assert gang.stdout.count("Traceback (most recent call last)") == 1
    assert len(pids) == 4


BLOCK_BYTES = 1 << 28


@pytest.mark.parametrize(
    ("fault", "code", "words"),
    [
        (
            f"block = bytearray({BLOCK_BYTES}); os.kill(os.getpid(), signal.SIGKILL)",
            137,
            "rank 1 was killed by SIGKILL at step 20",
        ),
        ("os._exit(3)", 83, "rank 1's program ended with exit code 3 at step 20"),
        (
            "print('cannot go on'); sys.exit(3)",
            83,
            "rank 1's program ended with exit code 3 at step 20",
        ),
        ("signal.raise_signal(signal.SIGSEGV)", 139, "rank 1 was killed by SIGSEGV"),
    ],
)
def test_rank_that_dies_without_a_report_is_named(
    tmp_path: Path, fault: str, code: int, words: str
) -> None:
    gang, codes = run_program(
        tmp_path, f"say(phase='step', step=20)\nif RANK == 1:\n    {fault}\n{FOREVER}", hosts=2
    )
    assert codes == [code, code]
    assert words in gang.verdict["message"]
    # Although the process has ended, and on another host than the leader.
    memory = gang.attempts[-1]["memory"]
    assert (memory["rank"], memory["host"]) == (1, 1)
    assert (memory["process_gib"] > BLOCK_BYTES / 2**30) is ("block" in fault)


def test_last_output_is_the_traceback_of_a_silent_program(tmp_path: Path) -> None:
    gang, _ = run_program(tmp_path, "print('the disk is full'); os._exit(3)")
    assert gang.verdict["traceback"] == "the disk is full"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("pyhton", "train.py"), "pyhton: command not found; it is not on PATH"),
        (("./absent.sh",), "./absent.sh: No such file or directory in "),
        (("./not-executable",), "./not-executable: Permission denied"),
        (
            ("./no-interpreter",),
            "./no-interpreter: /bin/no-such-shell: bad interpreter: No such file or directory",
        ),
        (
            ("./no-first-line",),
            "./no-first-line: Exec format error; a script begins with a line such as #!/bin/sh",
        ),
        (("sh", "-c", "pyhton train.py; exit $?"), "pyhton: not found"),
        (("sh", "-c", "./not-executable; exit $?"), "./not-executable: Permission denied"),
    ],
)
def test_command_that_cannot_start_is_named_and_not_retried(
    tmp_path: Path, command: tuple[str, ...], words: str
) -> None:
    write_script(tmp_path, "", "not-executable")
    write_script(tmp_path, "#!/bin/no-such-shell\n", "no-interpreter").chmod(0o755)
    write_script(tmp_path, "echo there\n", "no-first-line").chmod(0o755)
    env = {}
    if command[0] == "sh":
        # A shell says "Permission denied" of a name if it may not search a folder of PATH.
        folders = os.environ["PATH"].split(os.pathsep)
        env["PATH"] = os.pathsep.join(folder for folder in folders if os.access(folder, os.X_OK))
    gang, codes = run_gang(tmp_path, make_job(command, in_place_limit=3), env=env)
    assert codes == [70]
    assert gang.verdict["message"].startswith("rank 0 could not be started: ")
    assert words in gang.verdict["message"]
    assert len(gang.attempts) == 1
    assert "has not loaded jaxlaunch" not in gang.stderr or command[0] == "sh"


def test_missing_working_directory_is_named(tmp_path: Path) -> None:
    gang, codes = run_gang(tmp_path, make_job(("true",), workdir=str(tmp_path / "absent")))
    assert codes == [70]
    assert (
        gang.verdict["message"]
        == f"rank 0 could not be started: workdir {tmp_path}/absent: No such file or directory"
    )


def test_hanging_rank_is_named_with_the_stack_of_every_rank(tmp_path: Path) -> None:
    gang, codes = run_program(
        tmp_path,
        """
        def all_gather(): time.sleep(3600)
        def read_batch(): time.sleep(3600)
        say(phase="step", step=20)
        read_batch() if RANK == 3 else all_gather()
        """,
        processes_per_host=2,
        timeouts_s={"step": 2.0},
        hosts=2,
    )
    assert codes == [82, 82]
    verdict, stacks = gang.verdict, gang.summary["stacks"]
    assert verdict["cause"] == "hang"
    assert verdict["rank"] == 3
    assert verdict["host"] == 1
    assert verdict["step"] == 20
    assert "3 ranks in step in all_gather (program.py" in verdict["message"]
    assert "rank 3 in step in read_batch (program.py" in verdict["message"]
    assert sorted(stacks) == ["0", "1", "2", "3"]
    assert all("program.py" in text for text in stacks.values())


def test_nccl_report_is_in_the_verdict_and_the_summary_of_a_hang(tmp_path: Path) -> None:
    command = write_program(tmp_path, f"say(phase='step', step=20)\n{FOREVER}")
    report = "Communicators... (2.05s)\nDEAD\n  Process 34 on node 172.16.64.213 managing GPU 5\n"
    with server(play("SERVER PROTOCOL 2\nOK\n", report)) as address:
        about = make_job(command, platform="cuda", timeouts_s={"step": 1.0})
        gang, codes = run_gang(tmp_path, about, env={nccl.ADDRESS_VARIABLE: address})
    assert codes == [82], gang.stderr
    assert gang.verdict["message"].endswith(
        "; NCCL: process 34 on node 172.16.64.213 managing GPU 5 is dead"
    )
    assert gang.summary["nccl"].startswith(report) and sorted(gang.summary["stacks"]) == ["0"]


@pytest.mark.parametrize("phase", ["compile", "restore", "save"])
def test_phase_that_exceeds_its_timeout_is_named(phase: str, tmp_path: Path) -> None:
    gang, codes = run_program(
        tmp_path, f"say(phase='{phase}', step=20)\n{FOREVER}", timeouts_s={phase: 1.0}
    )
    assert codes == [82]
    assert f"the {phase} timeout of 1 s passed first on rank 0" in gang.verdict["message"]
    if phase == "compile":
        shows("the compile timeout of", gang.verdict["message"])
    else:
        shows("the restore timeout of", gang.verdict["message"])


def test_rank_without_a_first_step_is_named_with_its_stack(tmp_path: Path) -> None:
    gang, codes = run_program(
        tmp_path,
        f"""
        def load_weights(): {FOREVER}
        if RANK == 1: load_weights()
        say(phase="step", step=0)
        {FOREVER}
        """,
        timeouts_s={"first_step": 2.0},
        hosts=2,
    )
    assert codes == [82, 82]
    message = gang.verdict["message"]
    assert message.startswith(
        "rank 1 has not come to its first step (the first_step timeout of 2 s passed first on "
        "rank 1, after 2 s): "
    )
    assert "rank 1 in load_weights (program.py" in message
    assert message.endswith("; a program reports a step by jaxlaunch.report(step=…)")
    shows("has not come to its first step", message)
    assert sorted(gang.summary["stacks"]) == ["0", "1"]


def test_stopped_process_is_the_one_that_hangs(tmp_path: Path) -> None:
    gang, codes = run_program(
        tmp_path,
        "say(phase='step', step=20)\nif RANK == 1: os.kill(os.getpid(), "
        f"signal.SIGSTOP)\n{FOREVER}",
        timeouts_s={"step": 1.0},
        hosts=2,
    )
    assert codes == [82, 82]
    assert gang.verdict["rank"] == 1 and "without a stack" in gang.verdict["message"]


def test_killed_agent_ends_its_processes_and_is_named(tmp_path: Path) -> None:
    command = write_program(tmp_path, f"say(phase='step', step=20); mark('up')\n{FOREVER}")
    with Gang(tmp_path, make_job(command), hosts=3) as gang:
        gang.start().wait_for_marks("up-0", "up-1", "up-2")
        pids = gang.child_pids()
        gang.signal(1, signal.SIGKILL)
        killed = time.monotonic()
        gang.wait_until_gone(pids)
        assert time.monotonic() - killed <= 12 * SLACK
        codes = gang.wait()
    assert codes == [81, -9, 81]
    assert gang.verdict["message"] == "host 1 (rank 1) was lost: connection closed"
    assert (gang.verdict["cause"], gang.verdict["rank"]) == ("lost", 1)


def test_other_hosts_record_the_loss_of_host_0(tmp_path: Path) -> None:
    command = write_program(
        tmp_path, f"say(phase='step', step=20); say(committed=15); mark('up')\n{FOREVER}"
    )
    with Gang(tmp_path, make_job(command), hosts=3) as gang:
        gang.start().wait_for_marks("up-0", "up-1", "up-2")
        pids = gang.child_pids()
        gang.signal(0, signal.SIGKILL)
        codes = gang.wait()
        gang.wait_until_gone(pids)
    assert codes == [-9, 81, 81]
    assert gang.summary["status"] == "failed"
    assert gang.verdict["message"].startswith("host 0 was lost: ")
    assert (gang.verdict["rank"], gang.verdict["step"], gang.summary["step"]) == (0, 20, 20)
    (attempt,) = gang.attempts
    assert (attempt["first_step"], attempt["last_committed"]) == (20, 15)


def test_stopped_agent_is_lost(tmp_path: Path) -> None:
    command = write_program(tmp_path, f"mark('up')\n{FOREVER}")
    with Gang(tmp_path, make_job(command), hosts=2) as gang:
        gang.start().wait_for_marks("up-0", "up-1")
        gang.signal(1, signal.SIGSTOP)
        gang.wait_until("the verdict", lambda: "was lost" in gang.stderr)
        gang.agents[0].wait()
        gang.signal(1, signal.SIGCONT)
        assert gang.wait() == [81, 81]
    assert "host 1 (rank 1) was lost: no message for 10 s" in gang.stderr


def test_orphans_of_a_program_are_killed(tmp_path: Path) -> None:
    gang, codes = run_program(
        tmp_path,
        """
        import subprocess
        orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        print("orphan", orphan.pid)
        os._exit(0)
        """,
    )
    assert codes == [0]
    assert poll_until(lambda: not is_alive(int(gang.stdout.split()[-1])))


def test_closed_standard_output_does_not_end_the_run(tmp_path: Path) -> None:
    command = write_program(tmp_path, "wait_for('go')\nfor _ in range(100): print('x' * 1000)")
    with Gang(tmp_path, make_job(command)) as gang:
        read_end, write_end = os.pipe()
        gang.start(out=write_end)
        os.close(write_end)
        os.close(read_end)
        gang.release("go")
        assert gang.wait() == [0]


def test_warning_explains_why_a_program_does_not_report(tmp_path: Path) -> None:
    interpreter, file = write_program(tmp_path, "print('quiet')")
    gang, codes = run_gang(tmp_path, make_job((interpreter, "-I", file)))
    assert codes == [0]
    assert "has not loaded jaxlaunch" in gang.stderr and "`python -I`" in gang.stderr
    assert any("has not loaded jaxlaunch" in note for note in gang.summary["notes"])


def test_daemon_that_writes_forever_does_not_keep_the_agent(tmp_path: Path) -> None:
    gang, codes = run_program(
        tmp_path,
        """
        import subprocess
        subprocess.Popen(["yes", "the daemon writes"], start_new_session=True)
        print("done", flush=True)
        os._exit(0)
        """,
    )
    assert codes == [0]
