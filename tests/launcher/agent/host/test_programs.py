"""Which process of a wrapper is the program, by real processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.contract import Role, pid_namespace
from jaxlaunch.launcher.agent.host import process_tree
from tests.gang.agents import poll_until


@contextmanager
def running(*command: str) -> Iterator[int]:
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process.pid
        finally:
            for pid in [*process_tree.find_targets_below(process.pid, signal.SIGTERM), process.pid]:
                process_tree.send_signal(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("line", "reported"),
    [
        ("echo ready; sleep 60; true", ["sleep"]),
        ("echo ready; (sleep 60; true); true", ["sleep"]),
        ("trap 'exit 3' TERM; echo ready; sleep 60; true", ["sh", "sleep"]),
        ("trap 'exit 3' TERM; sleep 60 & echo ready; wait; true", ["sh"]),
        ("echo ready; exec sleep 60", ["sleep"]),
    ],
)
def test_signal_targets_commands_and_shells_with_traps(line: str, reported: list[str]) -> None:
    def names(pid: int) -> list[str]:
        result = []
        for item in process_tree.find_targets_below(pid, signal.SIGTERM):
            with open(f"/proc/{item}/comm") as comm:
                result.append(comm.read().strip())
        return result

    with running("sh", "-c", line) as pid:
        assert poll_until(lambda: names(pid) == reported)


def test_signal_targets_a_program_with_workers() -> None:
    text = (
        "import subprocess, time; subprocess.Popen(['sleep', '60']); print('ready', "
        "flush=True); time.sleep(60)"
    )
    with running("python3", "-c", text) as pid:
        assert list(process_tree.find_targets_below(pid, signal.SIGTERM)) == [
            pid
        ] and process_tree.find_children(pid)
        for child in process_tree.find_children(pid):
            process_tree.send_signal(child, signal.SIGKILL)


def test_signal_handler_is_detected() -> None:
    text = (
        "import signal, time; signal.signal(10, print); print('ready', flush=True); time.sleep(60)"
    )
    with running("python3", "-c", text) as pid:
        assert process_tree.has_handler(pid, signal.SIGUSR1) and not process_tree.has_handler(
            pid, signal.SIGUSR2
        )


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        (
            "{0}/readable:{0}/closed:{0}/absent",
            "command not found; it is not on PATH, where this user may not read {0}/closed",
        ),
        (
            "{0}/closed:{0}/readable:{0}/closed/bin",
            "command not found; it is not on PATH, where this user may not read {0}/closed and "
            "{0}/closed/bin",
        ),
        # exec of a file that is not executable is answered like this, too.
        ("{0}/closed:{0}/with-file", "Permission denied"),
        ("{0}/with-file", "Permission denied"),
    ],
)
def test_command_behind_a_folder_that_may_not_be_read_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, fault: str
) -> None:
    for name in ("readable", "closed", "with-file"):
        (tmp_path / name).mkdir()
    (tmp_path / "with-file" / "pyhton").touch()
    read_status = os.stat

    def read_status_as_user(file: Any, **options: Any) -> os.stat_result:
        # Root may search every folder, so the answer for another user is simulated.
        if str(file).startswith(str(tmp_path / "closed")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), file)
        return read_status(file, **options)

    monkeypatch.setattr(os, "stat", read_status_as_user)
    error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    path = path.format(tmp_path)
    explanation = process_tree.explain_exec_error("pyhton", error, path)
    assert explanation == f"pyhton: {fault.format(tmp_path)}"
    explanation = process_tree.explain_exec_error("./pyhton", error, path)
    assert explanation == "./pyhton: Permission denied"


# A process that starts a child in another session, which prints its pid, and waits for it.
STARTS = """
import subprocess, sys, time
child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
subprocess.run([sys.executable, "-c", child], start_new_session=True)
time.sleep(60)
"""
MARKER = "JAXLAUNCH_STACKS=/nowhere/of-this-test"


@pytest.fixture
def wrapper(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[process_tree.ProcessTree, int]]:
    """Return the tree of a process that has started another in a session of its own."""
    monkeypatch.setenv(*MARKER.split("="))
    command = (sys.executable, "-c", STARTS)
    with subprocess.Popen(
        command, start_new_session=True, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        yield process_tree.ProcessTree(process.pid, MARKER), child
        for pid in (child, process.pid):
            process_tree.send_signal(pid, signal.SIGKILL)


def offer_program(tree: process_tree.ProcessTree, pid: int, role: Role) -> bool:
    return tree.offer_program(pid, role, pid_namespace())


def test_python_with_the_highest_role_is_the_program(
    wrapper: tuple[process_tree.ProcessTree, int],
) -> None:
    tree, child = wrapper
    assert tree.is_program
    assert offer_program(tree, tree.pid, Role.STARTED) and tree.is_program
    assert offer_program(tree, child, Role.IMPORTED_JAX) and not tree.is_program
    # Of equals it is the one that started the other, and what it starts does not become it again.
    assert offer_program(tree, tree.pid, Role.IMPORTED_JAX) and tree.is_program
    assert not offer_program(tree, child, Role.IMPORTED_JAX)
    assert offer_program(tree, child, Role.JOINED)
    assert not offer_program(tree, tree.pid, Role.REPORTS)
    assert tree.program_pid == child


def test_program_in_another_session_is_stopped_and_killed(
    wrapper: tuple[process_tree.ProcessTree, int],
) -> None:
    tree, child = wrapper
    offer_program(tree, tree.pid, Role.STARTED)
    offer_program(tree, child, Role.JOINED)
    tree.stop()
    # It has no handler. The wrapper waits for it, and then continues.
    assert poll_until(lambda: tree.has_lost_program)
    assert process_tree.is_running(tree.pid)
    assert tree.has_killed_processes()
    tree.kill()
    assert poll_until(lambda: not tree.has_killed_processes())
    assert not process_tree.is_running(tree.pid)


def test_helper_that_only_imports_jax_gives_the_role_back(
    wrapper: tuple[process_tree.ProcessTree, int],
) -> None:
    tree, child = wrapper
    offer_program(tree, tree.pid, Role.STARTED)
    offer_program(tree, child, Role.IMPORTED_JAX)
    process_tree.send_signal(child, signal.SIGKILL)
    assert poll_until(lambda: tree.is_program)
    assert not tree.has_lost_program


def test_program_that_has_ended_before_its_role_is_read_is_lost(
    wrapper: tuple[process_tree.ProcessTree, int],
) -> None:
    tree, child = wrapper
    process_tree.send_signal(child, signal.SIGKILL)
    assert poll_until(lambda: not process_tree.is_running(child))
    # In another namespace the pid says nothing.
    other_namespace = (pid_namespace() or 0) + 1
    assert tree.offer_program(child, Role.JOINED, other_namespace) and not tree.has_lost_program
    assert offer_program(tree, child, Role.JOINED) and tree.has_lost_program
