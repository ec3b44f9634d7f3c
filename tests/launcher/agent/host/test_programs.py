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
    ("line", "told"),
    [
        ("echo ready; sleep 60; true", ["sleep"]),
        ("echo ready; (sleep 60; true); true", ["sleep"]),
        ("trap 'exit 3' TERM; echo ready; sleep 60; true", ["sh", "sleep"]),
        ("trap 'exit 3' TERM; sleep 60 & echo ready; wait; true", ["sh"]),
        ("echo ready; exec sleep 60", ["sleep"]),
    ],
)
def test_a_signal_to_a_shell_is_meant_for_what_it_runs_and_for_itself_where_it_has_a_trap(
    line: str, told: list[str]
) -> None:
    def names(pid: int) -> list[str]:
        found = []
        for each in process_tree.find_targets_below(pid, signal.SIGTERM):
            with open(f"/proc/{each}/comm") as comm:
                found.append(comm.read().strip())
        return found

    with running("sh", "-c", line) as pid:
        assert poll_until(lambda: names(pid) == told)


def test_a_program_with_workers_gets_its_signal_itself() -> None:
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


def test_a_handler_is_seen_and_its_absence() -> None:
    text = (
        "import signal, time; signal.signal(10, print); print('ready', flush=True); time.sleep(60)"
    )
    with running("python3", "-c", text) as pid:
        assert process_tree.has_handler(pid, signal.SIGUSR1) and not process_tree.has_handler(
            pid, signal.SIGUSR2
        )
