"""Who holds the lock of a run folder."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local.run_folders import hold_lock


def test_locked_folder_is_rejected_with_holder_pid(tmp_path: Path) -> None:
    with (
        hold_lock(tmp_path),
        pytest.raises(UserError, match=f"is in use by the run with pid {os.getpid()}"),
        hold_lock(tmp_path),
    ):
        pass
    with hold_lock(tmp_path) as lock:
        assert not lock.is_gone
        (tmp_path / ".lock").unlink()
        assert lock.is_gone


# In place of one: it ends when it is told to.
AGENT = "import sys; print('up', flush=True); open(sys.argv[1]).read()"
LAUNCHER = """
import subprocess, sys
from pathlib import Path
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.local import agents
import jaxlaunch.launcher.local.run_folders
agent, folder, pipe = sys.argv[1:]
real = subprocess.Popen
agents.subprocess.Popen = lambda argv, **how: real([sys.executable, "-c", agent, pipe], **how)
with jaxlaunch.launcher.local.run_folders.hold_lock(Path(folder)) as lock:
    job = JobSpec(name="t", command=["true"], accelerator={"type": "cpu"})
    gang = agents.Gang({}, job, 0, lock)
    print(gang._agents[0].stdout.readline().decode(), flush=True)
    agents.os._exit(9)
"""


def test_folder_stays_locked_until_agents_of_killed_launcher_end(
    tmp_path: Path,
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    folder = tmp_path / "run"
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    argv = [sys.executable, "-c", LAUNCHER, AGENT, str(folder), str(pipe)]
    launcher = subprocess.run(argv, env=environ, stdout=subprocess.PIPE, text=True)
    assert (launcher.returncode, launcher.stdout.strip()) == (9, "up")
    with (
        pytest.raises(UserError, match="was killed, and its agents are still ending") as refused,
        hold_lock(folder),
    ):
        pass
    assert "--run-dir" in str(refused.value.hint)
    pipe.write_text("end")
    with (folder / ".lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until the agent has ended
    with hold_lock(folder):
        pass
