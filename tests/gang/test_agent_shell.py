"""A shell as the command: its Pythons come and go, and how one of them ends is the shell's to judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang.agents import Gang, job, launch, program

PREPARE = "print('prepared')"
SAVES_ITSELF = """
import signal, sys, time, os
def stop(*_):
    open(f"{os.environ['MARKS']}/saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
open(f"{os.environ['MARKS']}/up-0", "w").close()
while True: time.sleep(0.05)
"""


def shell(folder: Path, line: str, **texts: str) -> tuple[str, ...]:
    """`sh -c LINE`, in which each name of `texts` with a `$` before it runs that program."""
    for name, text in texts.items():
        line = line.replace(f"${name}", " ".join(program(folder, text, f"{name}.py")))
    return ("sh", "-c", f"{line}\nexit $?")


def test_a_stop_reaches_the_program_that_a_shell_runs_after_its_first_python(tmp_path: Path) -> None:
    (tmp_path / "hidden.py").write_text(SAVES_ITSELF)
    command = shell(tmp_path, f"$prepare; python3 -S -I {tmp_path}/hidden.py", prepare=PREPARE)
    with Gang(tmp_path, job(command, grace_s=30.0)) as gang:
        gang.start().until_marked("up-0")
        gang.signal(0)
        gang.until_marked("saved")
        assert gang.wait() == [80]


def test_a_stop_reaches_a_program_that_only_a_shell_knows(tmp_path: Path) -> None:
    (tmp_path / "hidden.py").write_text(SAVES_ITSELF)
    with Gang(tmp_path, job(shell(tmp_path, f"python3 -S -I {tmp_path}/hidden.py"), grace_s=30.0)) as gang:
        gang.start().until_marked("up-0")
        gang.signal(0)
        gang.until_marked("saved")
        assert gang.wait() == [80]


@pytest.mark.parametrize("fails", ["raise ValueError('handled')", "os._exit(3)", "sys.exit('handled')"])
def test_a_failure_that_the_shell_handles_is_none(tmp_path: Path, fails: str) -> None:
    command = shell(tmp_path, "$first || $second", first=fails, second="print('fell back')")
    gang, codes = launch(tmp_path, job(command))
    assert codes == [0] and gang.verdict["cause"] == "done"
    assert "[0] fell back" in gang.out


def test_half_a_line_of_a_first_python_does_not_take_the_first_of_the_next_with_it(tmp_path: Path) -> None:
    half = """os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), b'{"error": {"type": "Val'); os._exit(1)"""
    command = shell(tmp_path, "$first; $second", first=half, second="raise KeyError('the second is heard')")
    gang, codes = launch(tmp_path, job(command))
    assert codes == [83] and gang.verdict["message"] == "rank 0 raised: KeyError: 'the second is heard'"
    assert not gang.summary["notes"]


def test_a_failure_that_the_shell_passes_on_is_told_by_its_exception(tmp_path: Path) -> None:
    command = shell(tmp_path, "$first; exit $?", first="say(phase='step', step=3); raise ValueError('not handled')")
    gang, codes = launch(tmp_path, job(command))
    assert codes == [83]
    assert gang.verdict["message"] == "rank 0 raised at step 3: ValueError: not handled"
    assert "first.py" in gang.verdict["traceback"]


def test_a_later_failure_is_not_told_by_an_exception_that_was_handled(tmp_path: Path) -> None:
    command = shell(tmp_path, "$first || $second", first="raise ValueError('handled')", second="os._exit(5)")
    gang, codes = launch(tmp_path, job(command))
    assert codes == [83]
    assert gang.verdict["message"] == "rank 0's program ended with exit code 5"


def test_the_end_of_a_first_python_is_not_the_end_of_the_rank_and_the_next_can_hang(tmp_path: Path) -> None:
    second = "say(phase='step', step=2)\ntime.sleep(3600)"
    command = shell(tmp_path, "$first; $second", first="say(phase='data', step=1)", second=second)
    gang, codes = launch(tmp_path, job(command, timeouts_s={"step": 1.0}), hosts=2)
    assert codes == [82, 82]
    assert "makes no progress" in gang.verdict["message"] and "second.py" in gang.verdict["message"]


@pytest.mark.parametrize("ends", ["", "\nos._exit(0)", "\nraise ValueError('handled')"])
def test_the_phase_of_a_python_that_has_ended_does_not_hang(tmp_path: Path, ends: str) -> None:
    command = shell(tmp_path, "$first; sleep 2; true", first=f"say(phase='step', step=2){ends}")
    _, codes = launch(tmp_path, job(command, timeouts_s={"step": 1.0}))
    assert codes == [0]


REEXECUTED = """
if len(sys.argv) == 1:
    say(phase="step", step=1)
    os.execv(sys.executable, [sys.executable, *OPTIONS, __file__, "again"])
mark("again")
say(phase="step", step=2)
if HANGS:
    time.sleep(3600)
raise ValueError("executed anew")
"""


def test_a_program_that_executes_itself_anew_is_still_heard(tmp_path: Path) -> None:
    command = program(tmp_path, f"OPTIONS, HANGS = [], False\n{REEXECUTED}")
    gang, codes = launch(tmp_path, job(command))
    assert codes == [83]
    assert gang.verdict["message"] == "rank 0 raised at step 2: ValueError: executed anew"


def test_a_request_for_stacks_does_not_end_a_program_that_has_executed_itself_anew(tmp_path: Path) -> None:
    command = program(tmp_path, f"OPTIONS, HANGS = ['-I', '-S'], True\n{REEXECUTED}")
    gang, codes = launch(tmp_path, job(command, timeouts_s={"step": 1.0}))
    assert codes == [82]
    assert "SIGUSR1" not in gang.talk and "rank 0 makes no progress" in gang.verdict["message"]
