"""Which process of a wrapper is the program, by real processes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

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
