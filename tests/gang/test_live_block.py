"""`launcher run` on a real terminal: a live block below whole lines, or only lines."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from tests.gang.runs import HERE, LAUNCHER

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
WIDTH = 100


class Screen:
    """What a terminal of WIDTH columns shows, with all lines that ever were."""

    def __init__(self) -> None:
        self.lines, self.row, self.column = [""], 0, 0

    def feed(self, text: str) -> None:
        for part in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]", text):
            if part == "\x1b[2K":
                self.lines[self.row] = ""
            elif part == "\x1b[1A":
                self.row -= 1
                assert self.row >= 0
            elif part.startswith("\x1b"):
                assert part.endswith("m"), part  # a colour
            elif part == "\r":
                self.column = 0
            elif part == "\n":
                self._down()
            else:
                self._put(part)

    def _down(self) -> None:
        self.row += 1
        if self.row == len(self.lines):
            self.lines.append("")

    def _put(self, letter: str) -> None:
        if self.column == WIDTH:
            self.column = 0
            self._down()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1


class Terminal:
    """A `launcher run` whose input and output are a terminal."""

    def __init__(self, folder: Path, *args: str, env: Mapping[str, str] | None = None) -> None:
        (folder / "program.py").write_text(PROGRAM)
        job = {"name": "t", "hosts": 2, "accelerator": {"type": "cpu", "per_host": 1}}
        (folder / "job.yaml").write_text(
            yaml.safe_dump(job | {"command": ["python", "program.py"]})
        )
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
        environ = {
            **os.environ,
            "TERM": "xterm",
            "PYTHONPATH": str(HERE.parent.parent),
            **(env or {}),
        }
        self.process = subprocess.Popen(
            [*LAUNCHER, "run", "job.yaml", *args],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=folder,
            env=environ,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)
        self.descriptor, self.text, self.screens = ours, "", list[list[str]]()

    def watch(self, look: Callable[[list[str]], object] = lambda lines: None) -> Screen:
        """Show the output on a screen until the end; call `look` with the lines each time."""
        screen, undecoded = Screen(), b""
        while True:
            try:
                data = undecoded + os.read(self.descriptor, 65536)
            except OSError:  # the terminal's other end is closed
                break
            if not data:
                break
            text = data.decode(errors="ignore")
            undecoded = data[len(text.encode()) :]
            self.text += text
            screen.feed(text)
            self.screens.append(list(screen.lines))
            look(screen.lines)
        os.close(self.descriptor)
        self.process.wait()
        return screen


def test_live_block_is_below_whole_lines_and_vanishes_at_the_end(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    lines = terminal.watch().lines

    assert terminal.process.returncode == 0, lines
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
    assert last[-2].startswith("launcher: done at step 24: every process finished (exit 0); see ")
    assert last[-1] == "launcher: its page: launcher report t"


@pytest.mark.parametrize(
    ("args", "env"), [(("--plain",), {}), ((), {"NO_COLOR": "1"})], ids=["--plain", "NO_COLOR"]
)
def test_plain_output_has_lines_only(
    tmp_path: Path, args: tuple[str, ...], env: Mapping[str, str]
) -> None:
    terminal = Terminal(tmp_path, *args, env=env)
    terminal.watch()
    assert terminal.process.returncode == 0
    assert "\x1b" not in terminal.text
    assert "its page" not in terminal.text and "starting\r" not in terminal.text
    assert terminal.text.splitlines()[-1].startswith("launcher: done at step 24")


def test_ctrl_c_stops_the_run_and_restores_the_terminal(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    sent: list[int] = []

    def interrupt(lines: list[str]) -> None:
        if not sent and lines[-1].startswith("2 ranks:"):
            sent.append(os.write(terminal.descriptor, b"\x03"))

    lines = terminal.watch(interrupt).lines
    assert sent and terminal.process.returncode == 80, lines
    assert not any(line.startswith(("training", "loss ", "2 ranks:")) for line in lines)
    assert "launcher: saving and stopping; a second signal kills" in lines
    assert lines[-2].startswith("launcher: why: launcher explain t; the same command continues it")
