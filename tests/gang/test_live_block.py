"""`launcher run` on a real terminal: a live block below whole lines, or only lines."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from tests.gang.terminal import WIDTH, Terminal

PROGRAM = """
import os, sys, time
import jaxlaunch
rank = os.environ["JAX_PROCESS_ID"]
for step in range(1, 25):
    jaxlaunch.report(step=step, loss=1 / step)
    print(f"step {step} " + "x" * 150, flush=True)
    time.sleep(0.2)
print("\\x1b[2K\\x1b[1A\\rtraining ━━━━ 999/999, goodput 100 %", flush=True)
sys.stdout.write("no newline at the end")
"""


def start_terminal(folder: Path, *args: str, env: Mapping[str, str] | None = None) -> Terminal:
    """Start the program on two hosts."""
    (folder / "program.py").write_text(PROGRAM)
    job = {"name": "t", "hosts": 2, "accelerator": {"type": "cpu", "per_host": 1}}
    return Terminal(folder, job | {"command": ["python", "program.py"]}, *args, env=env)


def test_live_block_is_below_whole_lines_and_vanishes_at_the_end(tmp_path: Path) -> None:
    # NO_COLOR is about colours alone.
    terminal = start_terminal(tmp_path, env={"NO_COLOR": "1"})
    lines = terminal.watch().lines

    assert terminal.process.returncode == 0, lines
    assert not re.search(r"\x1b\[[0-9;]*m", terminal.text)
    shown = "\n".join(lines)
    for step in range(1, 25):
        whole = f"[0] step {step} {'x' * 150}"
        assert f"{whole[:WIDTH]}\n{whole[WIDTH:]}\n" in shown  # as a terminal wraps it
    forged = [line for line in lines if "999/999" in line]
    assert forged and all(line.startswith("[0] ") for line in forged)
    assert "\n[0] no newline at the end\n" in shown
    assert not any(line.startswith(("training", "loss ", "2 ranks:")) for line in lines)
    assert not any(line.startswith("[1]") for line in lines)  # rank 0 speaks alone
    blocks = [screen[-3:] for screen in terminal.screens if screen[-1].startswith("2 ranks:")]
    step, loss, ranks = blocks[-1]
    assert re.fullmatch(r"training, step \d+", step)
    assert re.fullmatch(r"loss 0\.\d+ █[▁▂▃▄▅▆▇█]*▁", loss)
    assert re.fullmatch(r"2 ranks: .+, goodput \d+%", ranks)
    assert any("2 training" in block[-1] for block in blocks)
    last = [line for line in lines if line.startswith("launcher: ")]
    # The path of the summary is below, if it does not fit in the row.
    assert last[-2].startswith("launcher: done at step 24: every process finished (exit 0); see")
    assert last[-1] == "launcher: its page: launcher report t"


def test_plain_output_has_lines_only(tmp_path: Path) -> None:
    terminal = start_terminal(tmp_path, "--plain")
    terminal.watch()
    assert terminal.process.returncode == 0
    assert "\x1b" not in terminal.text
    assert "its page" not in terminal.text and "starting\r" not in terminal.text
    assert terminal.text.splitlines()[-1].startswith("launcher: done at step 24")


def test_ctrl_c_stops_the_run_and_restores_the_terminal(tmp_path: Path) -> None:
    terminal = start_terminal(tmp_path)
    sent: list[int] = []

    def interrupt(lines: list[str]) -> None:
        if not sent and lines[-1].startswith("2 ranks:"):
            sent.append(os.write(terminal.descriptor, b"\x03"))

    lines = terminal.watch(interrupt).lines
    assert sent and terminal.process.returncode == 80, lines
    assert not any(line.startswith(("training", "loss ", "2 ranks:")) for line in lines)
    assert "launcher: saving and stopping; a second signal kills" in lines
    assert lines[-2].startswith(
        "launcher: why: launcher explain t; the same command starts it again"
    )
