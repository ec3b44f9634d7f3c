"""What a Python below the agent knows of the processes that it ends."""

from __future__ import annotations

import os
import signal
import subprocess

from jaxlaunch.launcher.agent.site import reporter


def test_killed_child_is_ending_once_its_pipe_is_closed() -> None:
    # A pool sends SIGTERM to a worker at this moment, often before the worker is a zombie.
    for _ in range(40):
        with subprocess.Popen(("sh", "-c", "kill -9 $$"), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None and process.stdout.read() == b""
            assert reporter._is_ending(process.pid)
            assert process.wait() == -signal.SIGKILL


def test_running_process_is_not_ending() -> None:
    assert not reporter._is_ending(os.getpid())
    assert not reporter._is_ending(2**22 + 1)
