"""The environment of a command next to a rank, and how its processes are found."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.host.processes import Standby
from jaxlaunch.launcher.jobs.exec import enter_rank, rank_pod

SLEEP = [sys.executable, "-c", "print(flush=True); import time; time.sleep(600)"]


def start(environ: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(SLEEP, cwd=folder, env=os.environ | environ, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    return process


def test_rank_of_a_run_is_found(tmp_path: Path) -> None:
    uid = secrets.token_hex(8)
    environ = {contract.UID: uid, contract.PROCESS_ID: "3"}
    with start(environ, tmp_path) as command:
        # A command next to the rank is not taken for the rank.
        assert enter_rank.find_rank(3, {contract.UID: uid}) is None
        with start({**environ, contract.PROGRESS: "/tmp/p"}, tmp_path) as process:
            place = enter_rank.find_rank(3, {contract.UID: uid})
            assert place is not None
            assert (place[0], place[1][contract.PROGRESS]) == (str(tmp_path), "/tmp/p")
            assert enter_rank.find_rank(2, {contract.UID: uid}) is None
            assert enter_rank.find_rank(3, {contract.UID: "other"}) is None
            process.kill()
        command.kill()


def test_standby_process_is_found_once_it_is_a_rank(tmp_path: Path) -> None:
    uid, pipe = secrets.token_hex(8), str(tmp_path / "pipe")
    environ = {contract.UID: uid, contract.PROGRESS: pipe}
    child: Any = SimpleNamespace(
        progress=SimpleNamespace(has_hello=True),
        environ=environ,
        activation_path=pipe + contract.ACTIVATION,
    )
    control_read, control_write = os.pipe()
    with start(environ, tmp_path) as process, open(control_read):
        assert enter_rank.find_rank(3, {contract.UID: uid}) is None
        variables = {contract.PROCESS_ID: "3", contract.ATTEMPT: "2"}
        Standby(child, control_write).activate(3, variables)
        place = enter_rank.find_rank(3, {contract.UID: uid})
        process.kill()
    assert place is not None and place[0] == str(tmp_path)
    assert place[1].items() >= {**environ, **variables}.items()


def test_command_neither_reports_nor_joins() -> None:
    dropped = [
        contract.PROGRESS,
        contract.PROGRESS_FD,
        contract.METRICS,
        contract.PROFILE,
        contract.STACKS,
        contract.FIRST_PYTHON,
        contract.REPORTER,
        contract.COORDINATOR,
        contract.COORDINATOR_BIND,
    ]
    environ = {**dict.fromkeys(dropped, "x"), contract.PROCESS_ID: "1", "MINE": "2"}
    hidden = {"PYTHONPATH": "/site", "JAXLAUNCH_BEHIND": "/src"}
    entered = enter_rank.enter_environ(environ | hidden, "abc")
    entered.pop("TERM", None)
    assert entered == {
        contract.PROCESS_ID: "1",
        "MINE": "2",
        "PYTHONPATH": "/site:/src",
        "JAXLAUNCH_ENTRY": "abc",
    }


def test_interrupt_reaches_the_processes_of_one_command(tmp_path: Path) -> None:
    entry = rank_pod.new_entry()
    with (
        start({"JAXLAUNCH_ENTRY": entry}, tmp_path) as process,
        start({"JAXLAUNCH_ENTRY": "other"}, tmp_path) as other,
    ):
        enter_rank.main(["interrupt", entry])
        assert process.wait() == -signal.SIGINT
        assert other.poll() is None
        other.kill()


def test_program_runs_without_jaxlaunch(tmp_path: Path) -> None:
    argv = [sys.executable, "-S", *rank_pod.program_arguments(enter_rank)]
    command = ["enter", "987654", "abc", "xterm", "sh", "-c", "echo $TERM $JAXLAUNCH_ENTRY; exit 4"]
    done = subprocess.run([*argv, *command], capture_output=True, text=True, env={"PATH": "/bin"})
    assert (done.returncode, done.stdout) == (4, "xterm abc\n")
    assert "rank 987654 has no process now" in done.stderr
    # A pipe whose reader has ended ends the command without a message.
    pipe = [*command[:4], "sh", "-c", "yes | head -1"]
    piped = subprocess.run([*argv, *pipe], capture_output=True, text=True)
    assert piped.stdout == "y\n" and "Broken pipe" not in piped.stderr
    missing = subprocess.run(
        [*argv, *command[:4], "no-such-program"], capture_output=True, text=True
    )
    assert missing.returncode == 127
    assert missing.stderr.endswith("\nno-such-program: No such file or directory\n")
