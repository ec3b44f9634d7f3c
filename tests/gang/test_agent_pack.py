"""The agent as one file in an image without jaxlaunch."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.agent.pack import drop_docstrings, pack_agent
from tests.gang.agents import Gang, make_job, write_program


def find_interpreters() -> list[str]:
    """Return this Python, and the oldest supported one and $AGENT_PYTHON if they exist."""
    candidates = (
        os.environ.get("AGENT_PYTHON"),
        shutil.which("python3.10"),
        shutil.which("python3.12"),
    )
    working = [
        path for path in candidates if path and os.system(f"{path} -I -c '' 2>/dev/null") == 0
    ]
    return [sys.executable, *working]


@pytest.mark.parametrize("python", find_interpreters())
def test_packed_agent_needs_nothing_else_on_the_path(tmp_path: Path, python: str) -> None:
    packed = tmp_path / "agent.pyz"
    packed.write_bytes(pack_agent())
    command = write_program(
        tmp_path, "say(phase='step', step=3); print('ran'); raise ValueError('boom')"
    )
    argv = (python, "-I", str(packed))
    with Gang(
        tmp_path, make_job((python, *command[1:]), in_place_limit=1), hosts=2, argv=argv
    ) as gang:
        gang.start(0, env={"PYTHONPATH": ""})
        gang.start(1, env={"PYTHONPATH": ""})
        assert gang.wait() == [70, 70], gang.stderr
    assert "raised at step 3: ValueError: boom" in gang.verdict["message"]
    assert not gang.summary["notes"]


def test_packing_is_deterministic() -> None:
    assert pack_agent() == pack_agent()


def test_sources_without_docstrings_keep_their_line_numbers() -> None:
    text = '''"""A module.

Of two paragraphs.
"""

def fail():
    """Fail with a line number."""
    text = """not a
    docstring"""
    raise ValueError(text)


class Empty:
    """A class with nothing else."""
'''
    packed = drop_docstrings(text)
    assert len(packed) < len(text) - 80
    values: dict[str, Any] = {}
    exec(compile(packed, "packed", "exec"), values)
    with pytest.raises(ValueError, match="^not a\n    docstring$") as caught:
        values["fail"]()
    assert caught.traceback[-1].lineno == text.splitlines().index("    raise ValueError(text)")
    assert not values["Empty"].__doc__
