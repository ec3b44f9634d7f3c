"""A shell as the command, which starts Pythons and judges how they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang.agents import Gang, make_job, run_gang, run_program, write_program, write_script


def shell_command(folder: Path, line: str, **programs: str) -> tuple[str, ...]:
    """Return `sh -c LINE` in which `$NAME` runs the program of that name."""
    for name, text in programs.items():
        line = line.replace(f"${name}", " ".join(write_program(folder, text, f"{name}.py")))
    return ("sh", "-c", f"{line}\nexit $?")


# Entrypoint scripts, each the process of a rank: `$python` saves when it is told, `$hidden` is the
# same without our hook, `$ends` ends at once, `$next` is to run after what was told. What is to be
# marked, by each of them.
SCRIPTS = {
    "exec": ("#!/bin/sh\nexec $python", ["saved"]),
    "the last command of a shell": ("#!/bin/sh\n$ends\n$python\nexit $?", ["saved"]),
    "hidden behind a python that has ended": ("#!/bin/sh\n$ends\n$hidden\nexit $?", ["saved"]),
    "hidden": ("#!/bin/sh\n$hidden\nexit $?", ["saved"]),
    "bash -e": ("#!/bin/bash -e\n$python\n$next\nexit 0", ["saved", "next"]),
    "background and wait": ("#!/bin/sh\n$python &\nwait $!\nexit $?", ["saved"]),
    "a trap that passes it on": (
        "#!/bin/sh\ntrap 'kill -TERM $pid; wait $pid; touch $trap' TERM\n$python & pid=$!\nwait "
        "$pid\nexit 0",
        ["saved", "trap"],
    ),
    "a trap that passes it on and does not wait": (
        "#!/bin/bash\ntrap 'touch $trap; kill -TERM $pid' TERM\n$hidden & pid=$!\nwait "
        "$pid\nexit 0",
        ["saved", "trap"],
    ),
    "a trap that does not pass it on": (
        "#!/bin/sh\ntrap 'touch $trap' TERM\n$python &\nwait $!\nexit 0",
        ["saved", "trap"],
    ),
    "a trap before a python": (
        "#!/bin/sh\ntrap 'touch $trap; exit 0' TERM\n$python\nsleep 3600",
        ["saved", "trap"],
    ),
    "a trap after a python": (
        "#!/bin/sh\n$ends\ntrap 'touch $trap; exit 0' TERM\ntouch $up\nwhile true; do "
        "sleep 3600; done",
        ["trap"],
    ),
    "a trap for the end": (
        "#!/bin/bash\ntrap 'ls $saved && sleep 0.5 && touch $trap' EXIT\n$python\nexit 0",
        ["saved", "trap"],
    ),
    "a pipeline": ("#!/bin/sh\n$python | cat\nexit $?", ["saved"]),
    "a hidden pipeline": ("#!/bin/bash\n$hidden | cat\nexit $?", ["saved"]),
    "a python while another is told": ("#!/bin/sh\n$python\n$python\nexit $?", ["saved"]),
    "a group of its own": ("#!/bin/bash -m\n$hidden\nexit $?", ["saved"]),
}
SAVES_ITSELF = """
import os, signal, sys, time
MARK = os.environ["MARKS"] + "/%s-" + os.environ["JAX_PROCESS_ID"]
def stop(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(20):
        print("saving", flush=True)
        time.sleep(0.02)
    open(MARK % "saved", "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
open(MARK % "up", "w").close()
while True: time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def stopped_gang(tmp_path_factory: pytest.TempPathFactory) -> Gang:
    """Stop a gang whose ranks run SCRIPTS, one each, when all of them are up."""
    folder = tmp_path_factory.mktemp("scripts")
    saves = write_script(folder, SAVES_ITSELF)
    hidden = write_script(folder, SAVES_ITSELF, "hidden.py")
    nothing = write_script(folder, "", "nothing.py")
    for rank, (text, _) in enumerate(SCRIPTS.values()):
        text = text.replace("$python", f"python3 {saves}").replace(
            "$hidden", f"python3 -S -I {hidden}"
        )
        text = text.replace("$ends", f"python3 {nothing}")
        for name in ("next", "trap", "up", "saved"):
            text = text.replace(
                f"${name}", f"{'touch ' if name == 'next' else ''}{folder}/marks/{name}-{rank}"
            )
        (folder / str(rank)).write_text(f"{text}\n")
        (folder / str(rank)).chmod(0o755)
    command = ("sh", "-c", f"exec {folder}/$JAX_PROCESS_ID")
    with Gang(folder, make_job(command, processes_per_host=len(SCRIPTS), grace_s=60.0)) as gang:
        gang.start().wait_for_marks(*(f"up-{rank}" for rank in range(len(SCRIPTS))))
        gang.signal(0)
        assert gang.wait() == [80], gang.stderr
        return gang


@pytest.mark.parametrize("kind", SCRIPTS)
def test_stop_reaches_the_programs_of_an_entrypoint_script(stopped_gang: Gang, kind: str) -> None:
    rank = list(SCRIPTS).index(kind)
    marks = [
        name
        for name in ("saved", "next", "trap")
        if (stopped_gang.marks / f"{name}-{rank}").exists()
    ]
    assert marks == SCRIPTS[kind][1], stopped_gang.stdout


def test_stop_ends_with_the_scripts_before_the_grace_period(stopped_gang: Gang) -> None:
    assert (
        stopped_gang.verdict["message"]
        == "stopped from outside: the program did not report whether it saved"
    )


@pytest.mark.parametrize(
    "fails", ["raise ValueError('handled')", "os._exit(3)", "sys.exit('handled')"]
)
def test_failure_that_the_shell_handles_is_ignored(tmp_path: Path, fails: str) -> None:
    command = shell_command(tmp_path, "$first || $second", first=fails, second="print('fell back')")
    gang, codes = run_gang(tmp_path, make_job(command))
    assert codes == [0] and gang.verdict["cause"] == "done"
    assert "[0] fell back" in gang.stdout


def test_truncated_line_does_not_damage_the_first_line_of_the_next_program(tmp_path: Path) -> None:
    half = (
        """os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), b'{"error": {"type": "Val'); """
        "os._exit(1)"
    )
    command = shell_command(
        tmp_path, "$first; $second", first=half, second="raise KeyError('the second is heard')"
    )
    gang, codes = run_gang(tmp_path, make_job(command))
    assert codes == [83]
    assert gang.verdict["message"] == "rank 0 raised: KeyError: 'the second is heard'"
    assert not gang.summary["notes"]


def test_failure_that_the_shell_passes_on_is_reported_by_its_exception(tmp_path: Path) -> None:
    command = shell_command(
        tmp_path,
        "$first; exit $?",
        first="say(phase='step', step=3); raise ValueError('not handled')",
    )
    gang, codes = run_gang(tmp_path, make_job(command))
    assert codes == [83]
    assert gang.verdict["message"] == "rank 0 raised at step 3: ValueError: not handled"
    assert "first.py" in gang.verdict["traceback"]


def test_handled_exception_does_not_explain_a_later_failure(tmp_path: Path) -> None:
    command = shell_command(
        tmp_path, "$first || $second", first="raise ValueError('handled')", second="os._exit(5)"
    )
    gang, codes = run_gang(tmp_path, make_job(command))
    assert codes == [83]
    assert gang.verdict["message"] == "rank 0's program ended with exit code 5"


def test_second_program_of_a_rank_can_hang(tmp_path: Path) -> None:
    second = "say(phase='step', step=2)\ntime.sleep(3600)"
    command = shell_command(
        tmp_path, "$first; $second", first="say(phase='data', step=1)", second=second
    )
    gang, codes = run_gang(tmp_path, make_job(command, timeouts_s={"step": 1.0}), hosts=2)
    assert codes == [82, 82]
    assert "makes no progress" in gang.verdict["message"] and "second.py" in gang.verdict["message"]


@pytest.mark.parametrize("ends", ["", "\nos._exit(0)", "\nraise ValueError('handled')"])
def test_phase_of_an_ended_program_does_not_hang(tmp_path: Path, ends: str) -> None:
    command = shell_command(
        tmp_path, "$first; sleep 2; true", first=f"say(phase='step', step=2){ends}"
    )
    _, codes = run_gang(tmp_path, make_job(command, timeouts_s={"step": 1.0}))
    assert codes == [0]


REEXECUTE = """
if len(sys.argv) == 1:
    say(phase="step", step=1)
    os.execv(sys.executable, [sys.executable, *OPTIONS, __file__, "again"])
mark("again")
say(phase="step", step=2)
if HANGS:
    time.sleep(3600)
raise ValueError("executed anew")
"""


def test_program_that_executes_itself_again_still_reports(tmp_path: Path) -> None:
    gang, codes = run_program(tmp_path, f"OPTIONS, HANGS = [], False\n{REEXECUTE}")
    assert codes == [83]
    assert gang.verdict["message"] == "rank 0 raised at step 2: ValueError: executed anew"


def test_request_for_stacks_does_not_end_a_program_that_executed_itself_again(
    tmp_path: Path,
) -> None:
    gang, codes = run_program(
        tmp_path, f"OPTIONS, HANGS = ['-I', '-S'], True\n{REEXECUTE}", timeouts_s={"step": 1.0}
    )
    assert codes == [82]
    assert "SIGUSR1" not in gang.stderr and "rank 0 makes no progress" in gang.verdict["message"]
