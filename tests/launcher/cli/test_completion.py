"""What the Tab key offers, asked as the scripts for bash, zsh and fish ask."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from jaxlaunch.launcher.cli.main import cli


def offered(words: list[str], begun: str) -> list[str]:
    completion = ShellComplete(cli, {}, "launcher", "_LAUNCHER_COMPLETE")
    return [item.value for item in completion.get_completions(words, begun)]


def test_runs_topics_and_keys_are_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "job.yaml").touch()
    (tmp_path / "runs" / "else").mkdir()
    monkeypatch.chdir(tmp_path)
    for command in ("report", "logs", "stop", "compare"):
        assert offered([command], "") == ["digits"]
    assert offered(["help"], "trou") == ["troubleshooting"]
    assert {"train.mesh.", "train.model."} <= set(offered(["run", "job.yaml"], "train.m"))
    assert "train.model.layers=" in offered(["run", "job.yaml"], "train.model.l")
    assert offered(["run", "job.yaml"], "train.steps=1") == []
