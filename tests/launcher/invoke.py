"""The command line in this process: its output and its exit code."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from jaxlaunch.launcher.cli.main import main


@dataclass(frozen=True)
class CommandResult:
    code: int
    out: str
    err: str


Launcher = Callable[..., CommandResult]


def launcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> CommandResult:
    """Run `launcher ARGUMENTS` to its end."""
    monkeypatch.setattr(sys, "argv", ["launcher", *arguments])
    # This process lives on, and collects what a command leaves, such as its connections.
    monkeypatch.setattr(gc, "freeze", lambda: None)
    with pytest.raises(SystemExit) as exit_info:
        main()
    output = capsys.readouterr()
    return CommandResult(int(exit_info.value.code or 0), output.out, output.err)
