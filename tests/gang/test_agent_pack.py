"""The agent as one file in an image that holds nothing else of ours."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from jaxlaunch.launcher.agent.pack import pack_agent
from tests.gang.agents import Gang, job, program


def interpreters() -> list[str]:
    """This Python, and the oldest that the agent promises to run on, where there is one or AGENT_PYTHON names it."""
    found = (os.environ.get("AGENT_PYTHON"), shutil.which("python3.10"), shutil.which("python3.12"))
    works = [path for path in found if path and os.system(f"{path} -I -c '' 2>/dev/null") == 0]
    return [sys.executable, *works]


@pytest.mark.parametrize("python", interpreters())
def test_a_packed_agent_needs_nothing_else_on_the_path(tmp_path: Path, python: str) -> None:
    packed = tmp_path / "agent.pyz"
    packed.write_bytes(pack_agent())
    command = program(tmp_path, "say(phase='step', step=3); print('ran'); raise ValueError('boom')")
    argv = (python, "-I", str(packed))
    with Gang(tmp_path, job((python, *command[1:]), in_place_limit=1), hosts=2, argv=argv) as gang:
        gang.start(0, env={"PYTHONPATH": ""})
        gang.start(1, env={"PYTHONPATH": ""})
        assert gang.wait() == [83, 83], gang.talk
    assert "raised at step 3: ValueError: boom" in gang.verdict["message"]
    assert not gang.summary["notes"]


def test_equal_sources_make_equal_bytes() -> None:
    assert pack_agent() == pack_agent()
