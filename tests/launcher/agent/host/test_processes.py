"""What a host does with the reports of its processes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang import progress
from jaxlaunch.launcher.agent.host.processes import Processes
from jaxlaunch.launcher.agent.host.rank_reports import ProgramMetrics
from jaxlaunch.runs.journal import Journal


@pytest.mark.parametrize("is_launched", [True, False])
def test_refusal_is_logged_and_shown_outside_of_launcher_run(is_launched: bool) -> None:
    line = json.dumps(contract.refusal_record("no data:\n  in /d", contract.BAD_DATA)).encode()
    message = progress.read_line(line, 3)
    child, log = SimpleNamespace(rank=3), MagicMock()
    processes: Any = object.__new__(Processes)
    processes._config, processes._is_paused = SimpleNamespace(is_launched=is_launched), False
    processes._stdout, processes._logs = MagicMock(is_behind=False), {3: log}
    processes.children, processes._on_report = {3: child}, MagicMock()
    processes._take_report(child, message)
    log.write_line.assert_called_once_with(b"trainer: no data: in /d (exit 65)")
    shown = [] if is_launched else [call(b"[3] trainer: no data: in /d (exit 65)")]
    assert processes._stdout.write_line.mock_calls == shown
    processes._on_report.assert_called_once_with(child, message)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (ValueError("out of range"), "ValueError: out of range"),
    ],
)
def test_end_of_the_metrics_files_is_always_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, words: str
) -> None:
    monkeypatch.setattr(Journal, "merge_step", MagicMock(side_effect=error))
    messages: list[str] = []
    metrics = ProgramMetrics(tmp_path, lambda text: None, messages.append)
    metrics.add_step(1, {"loss": 0.5})
    metrics.finish()
    assert messages == [f"no more metrics.jsonl: {words}"]
