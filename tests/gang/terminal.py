"""Start `launcher run` on a real terminal, and read what it shows."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.gang.runs import LAUNCHER, ROOT

WIDTH = 100


class Screen:
    """What a terminal shows, with all lines that ever were."""

    def __init__(self, width: int = WIDTH) -> None:
        self.lines, self.row, self.column, self.width = [""], 0, 0, width

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
        if self.column == self.width:
            self.column = 0
            self._down()
        line = self.lines[self.row].ljust(self.column)
        self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
        self.column += 1


class Terminal:
    """A `launcher run` whose input and output are a terminal."""

    def __init__(
        self,
        folder: Path,
        document: Mapping[str, Any],
        *args: str,
        env: Mapping[str, str] | None = None,
        width: int = WIDTH,
        launcher: Sequence[str] = LAUNCHER,
    ) -> None:
        (folder / "job.yaml").write_text(yaml.safe_dump(dict(document), sort_keys=False))
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        environ = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(ROOT), **(env or {})}
        self.process = subprocess.Popen(
            [*launcher, "run", "job.yaml", *args],
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
        self._width = width

    def watch(self, look: Callable[[list[str]], object] = lambda lines: None) -> Screen:
        """Show the output on a screen until the end; call `look` with the lines each time."""
        screen, undecoded = Screen(self._width), b""
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
