"""`jaxlaunch.report` of a program in an image that holds nothing else of ours."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from jaxlaunch.launcher.agent.pack import pack
from tests.gang.agents import Gang, job, script

PYTHON = os.path.realpath(sys.executable)  # behind the virtual environment, which has our package

REPORTS = """
import os, subprocess, sys, time
import jaxlaunch
assert jaxlaunch.__file__.startswith(os.path.dirname(os.environ["JAXLAUNCH_STACKS"])), jaxlaunch.__file__
for step in range(1, 6):
    jaxlaunch.report(step=step, loss=1 / step)
jaxlaunch.report(step=5, phase="save", committed=4)
other = "import jaxlaunch; jaxlaunch.report(step=99)"
subprocess.run([sys.executable, "-c", other], check=True)  # not the rank's own process: it reports nothing
jaxlaunch.report(step=6, text="in any image")
time.sleep(600)
"""


def test_a_program_that_hangs_is_named_with_its_step(tmp_path: Path) -> None:
    packed = tmp_path / "agent.pyz"
    packed.write_bytes(pack())
    command = (PYTHON, str(script(tmp_path, REPORTS)))
    hangs = job(command, timeouts_s={"step": 2.0}, in_place_limit=0)
    with Gang(tmp_path, hangs, hosts=2, argv=(PYTHON, "-I", str(packed))) as gang:
        gang.start(env={"PYTHONPATH": ""})
        assert gang.wait() == [82, 82], gang.talk
    assert "the step timeout of 2 s passed first on rank" in gang.verdict["message"]
    assert "no progress at step 6 " in gang.verdict["message"]
    assert "2 ranks in step in <module> (script.py:11)" in gang.verdict["message"]
    assert gang.summary["metrics"] == {"loss": 0.2}
    looks = json.loads((gang.run_dir / "ranks.json").read_text())["columns"]
    assert looks[-1][1:] == ["s2", "0x2,"]  # both in the step that hung
    assert '"text": "in any image"' in (gang.run_dir / "reported" / "6.json").read_text()
    assert (gang.summary["step"], gang.summary["of"]["last_committed"]) == (6, 4)
