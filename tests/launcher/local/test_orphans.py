"""What agents that were killed left running."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.local import agents, bookkeeping
from jaxlaunch.records.summary import AttemptProgress, Summary
from jaxlaunch.runs.run_folder import RunFolder, RunStarts

SHELL = ["sh", "-c", "sleep 600 & echo $!; wait"]


@contextmanager
def start_process(uid: str, *argv: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process of run `uid`, and the number of the one below it."""
    environ = os.environ | {contract.UID: uid}
    with subprocess.Popen(argv or SHELL, env=environ, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield started, int(started.stdout.readline())
        finally:
            started.kill()
            agents.kill_orphans(uid)


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_only_orphans_of_the_run_are_killed(tmp_path: Path) -> None:
    with (
        start_process("uid-of-another") as (_, other),
        start_process("uid-of-this") as (wrapper, program),
    ):
        wrapper.kill()
        wrapper.wait()
        assert is_alive(program) and agents.kill_orphans("uid-of-this") == 1
        assert not is_alive(program) and is_alive(other)
        assert agents.kill_orphans("uid-of-this") == agents.kill_orphans("") == 0


def test_processes_of_a_living_agent_are_kept(tmp_path: Path) -> None:
    packed = tmp_path / agents.PACKED_NAME.format("0123")
    packed.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    program = f"exec {sys.executable} -I {packed}"
    with (
        start_process("uid-of-this") as (_, below),
        start_process("uid-of-this", "sh", "-c", program) as (agent, _),
    ):
        assert agents.kill_orphans("uid-of-this") == 0 and is_alive(below)
        agent.kill()
        agent.wait()
        assert agents.kill_orphans("uid-of-this") == 2 and not is_alive(below)


@pytest.mark.parametrize("saves_in_time", [True, False])
def test_next_agent_of_a_host_waits_for_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saves_in_time: bool
) -> None:
    packed = tmp_path / agents.PACKED_NAME.format("0123")
    packed.write_text("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    entries = [f"{contract.UID}=uid-of-this".encode(), b"HOST=1"]
    monkeypatch.setenv("HOST", "0")
    with start_process("uid-of-this") as (_, other_host):
        monkeypatch.setenv("HOST", "1")
        program = f"exec {sys.executable} -I {packed}"
        with (
            start_process("uid-of-this") as (_, below),
            start_process("uid-of-this", "sh", "-c", program) as (agent, agent_pid),
        ):

            def end_agent(seconds: float) -> None:
                if agent.poll() is None:
                    assert is_alive(below)
                    agent.kill()
                    agent.wait()

            if saves_in_time:
                monkeypatch.setattr(time, "sleep", end_agent)
            agents.await_agents(entries, 600.0 if saves_in_time else 0.0)
            assert not is_alive(below) and not is_alive(agent_pid) and is_alive(other_host)


def test_orphans_of_a_killed_run_end_before_the_next_start(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path, print)
    uid = AttemptProgress("uid-of-this", 0, 1, 1.0, 2.0)
    RunStarts(folder, uid.uid).write_summary(
        Summary(None, step=None, seconds={"step": 0.0}, restarts={}, of=uid)
    )
    with start_process("uid-of-this") as (wrapper, program):
        wrapper.kill()
        bookkeeping.begin_start(tmp_path, "uid-of-the-next", "name: t\n", None, print)
        assert not is_alive(program)
