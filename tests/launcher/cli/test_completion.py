"""Completions by the Tab key, requested as the scripts of the shells do."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from jaxlaunch.launcher.cli.main import cli


def complete_words(words: list[str], prefix: str) -> list[str]:
    completion = ShellComplete(cli, {}, "launcher", "_LAUNCHER_COMPLETE")
    return [item.value for item in completion.get_completions(words, prefix)]


def test_completion_of_runs_topics_and_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs" / "digits").mkdir(parents=True)
    (tmp_path / "runs" / "digits" / "job.yaml").touch()
    (tmp_path / "runs" / "else").mkdir()
    monkeypatch.chdir(tmp_path)
    for command in ("report", "logs", "stop", "compare"):
        assert complete_words([command], "") == ["digits"]
    assert complete_words(["help"], "trou") == ["troubleshooting"]
    assert {"train.mesh.", "train.model."} <= set(complete_words(["run", "job.yaml"], "train.m"))
    assert "train.model.layers=" in complete_words(["run", "job.yaml"], "train.model.l")
    assert complete_words(["run", "job.yaml"], "train.steps=1") == []
