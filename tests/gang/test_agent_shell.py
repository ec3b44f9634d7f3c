"""A shell as the command: its Pythons come and go, and how one of them ends is the shell's to judge."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gang.agents import Gang, job, launch, program, script


def shell(folder: Path, line: str, **texts: str) -> tuple[str, ...]:
    """`sh -c LINE`, in which each name of `texts` with a `$` before it runs that program."""
    for name, text in texts.items():
        line = line.replace(f"${name}", " ".join(program(folder, text, f"{name}.py")))
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
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Gang:
    """A gang whose ranks run SCRIPTS, one each, and that was stopped when all of them were up."""
    folder = tmp_path_factory.mktemp("scripts")
    saves, hidden = script(folder, SAVES_ITSELF), script(folder, SAVES_ITSELF, "hidden.py")
    nothing = script(folder, "", "nothing.py")
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
    with Gang(folder, job(command, processes_per_host=len(SCRIPTS), grace_s=60.0)) as gang:
        gang.start().until_marked(*(f"up-{rank}" for rank in range(len(SCRIPTS))))
        gang.signal(0)
        assert gang.wait() == [80], gang.talk
        return gang


@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_stop_reaches_what_an_entrypoint_script_runs_and_gives_it_its_time(
    stopped: Gang, kind: str
) -> None:
    rank = list(SCRIPTS).index(kind)
    found = [
        name for name in ("saved", "next", "trap") if (stopped.marks / f"{name}-{rank}").exists()
    ]
    assert found == SCRIPTS[kind][1], stopped.out


def test_a_stop_of_scripts_ends_with_them_and_not_with_its_grace(stopped: Gang) -> None:
    assert (
        stopped.verdict["message"]
        == "stopped from outside: the program did not report whether it saved"
    )


@pytest.mark.parametrize(
    "fails", ["raise ValueError('handled')", "os._exit(3)", "sys.exit('handled')"]
)
def test_a_failure_that_the_shell_handles_is_none(tmp_path: Path, fails: str) -> None:
    command = shell(tmp_path, "$first || $second", first=fails, second="print('fell back')")
    gang, codes = launch(tmp_path, job(command))
    assert codes == [0] and gang.verdict["cause"] == "done"
    assert "[0] fell back" in gang.out


def test_half_a_line_of_a_first_python_does_not_take_the_first_of_the_next_with_it(
    tmp_path: Path,
) -> None:
    half = """os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), b'{"error": {"type": "Val'); os._exit(1)"""
    command = shell(
        tmp_path, "$first; $second", first=half, second="raise KeyError('the second is heard')"
    )
    gang, codes = launch(tmp_path, job(command))
    assert (
        codes == [83]
        and gang.verdict["message"] == "rank 0 raised: KeyError: 'the second is heard'"
    )
    assert not gang.summary["notes"]


def test_a_failure_that_the_shell_passes_on_is_told_by_its_exception(tmp_path: Path) -> None:
    command = shell(
        tmp_path,
        "$first; exit $?",
        first="say(phase='step', step=3); raise ValueError('not handled')",
    )
    gang, codes = launch(tmp_path, job(command))
    assert codes == [83]
    assert gang.verdict["message"] == "rank 0 raised at step 3: ValueError: not handled"
    assert "first.py" in gang.verdict["traceback"]


def test_a_later_failure_is_not_told_by_an_exception_that_was_handled(tmp_path: Path) -> None:
    command = shell(
        tmp_path, "$first || $second", first="raise ValueError('handled')", second="os._exit(5)"
    )
    gang, codes = launch(tmp_path, job(command))
    assert codes == [83]
    assert gang.verdict["message"] == "rank 0's program ended with exit code 5"


def test_the_end_of_a_first_python_is_not_the_end_of_the_rank_and_the_next_can_hang(
    tmp_path: Path,
) -> None:
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


def test_a_request_for_stacks_does_not_end_a_program_that_has_executed_itself_anew(
    tmp_path: Path,
) -> None:
    command = program(tmp_path, f"OPTIONS, HANGS = ['-I', '-S'], True\n{REEXECUTED}")
    gang, codes = launch(tmp_path, job(command, timeouts_s={"step": 1.0}))
    assert codes == [82]
    assert "SIGUSR1" not in gang.talk and "rank 0 makes no progress" in gang.verdict["message"]
