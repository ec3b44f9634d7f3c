"""The command line in this process: what it prints, and the code it leaves with."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from jaxlaunch.launcher.cli.main import main


@dataclass(frozen=True)
class Left:
    code: int
    out: str
    err: str


def launcher(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> Left:
    """Runs `launcher ARGUMENTS` to its end."""
    monkeypatch.setattr(sys, "argv", ["launcher", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    said = capsys.readouterr()
    return Left(int(left.value.code or 0), said.out, said.err)
