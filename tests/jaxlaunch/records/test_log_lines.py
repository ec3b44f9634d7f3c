"""The lines and the termination message with which an agent reports through the Kubernetes API."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from jaxlaunch.launcher.agent.agent import write_termination_message
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import BeatLine, TailLine, TerminationMessage, VerdictLine
from jaxlaunch.records.verdict import verdict_for_code


def test_line_round_trip() -> None:
    beat = BeatLine(
        at=1.5, attempt=2, step=3, phase="data", phases={"data": [0, 1]}, metrics={"loss": 1.5}
    )
    assert log_lines.parse_line(log_lines.format_line(beat)) == dataclasses.replace(
        beat, missing=[], refused=[]
    )


@pytest.mark.parametrize(
    "line",
    [
        "",
        "jaxlaunch: ",
        "jaxlaunch: beat",
        "jaxlaunch: beat {",
        "jaxlaunch: beat 3",
        "jaxlaunch: boast {}",
        "[0] x",
    ],
)
def test_other_lines_are_ignored(line: str) -> None:
    assert log_lines.parse_line(line) is None


def test_program_output_is_no_agent_line() -> None:
    assert not log_lines.is_for_programs(
        "[0] " + log_lines.format_line(VerdictLine(verdict=verdict_for_code(83, "x")))
    )


def test_truncated_agent_line_is_for_programs() -> None:
    assert log_lines.is_for_programs(
        log_lines.format_line(TailLine(generation=0, rank=0, lines=["a" * 50]))[:40]
    )


@pytest.mark.parametrize("fill", ["x", "\n", "\x00", "é", "🦊"])
@pytest.mark.parametrize("length", [0, 100, 3_000, 50_000])
def test_termination_message_is_bounded(fill: str, length: int) -> None:
    verdict = verdict_for_code(
        83,
        "rank 1 raised: " + fill * length,
        rank=1,
        traceback=fill * length + "\nValueError: last",
    )
    text = log_lines.format_termination_message(
        TerminationMessage(verdict, host=1, generation=2, attempt=3)
    )
    assert len(text.encode()) <= log_lines.MAX_MESSAGE_BYTES
    parsed = log_lines.parse_termination_message(text)
    assert parsed is not None and (parsed.host, parsed.generation, parsed.attempt) == (1, 2, 3)
    assert parsed.verdict.code == 83 and parsed.verdict.message.startswith("rank 1 raised: ")
    assert parsed.verdict.traceback is not None and parsed.verdict.traceback.endswith(
        "ValueError: last"
    )


@pytest.mark.parametrize(
    "message", [None, "", "Killed", "[1, 2]", '{"verdict": {}}', '{"jaxlaunch": 1}']
)
def test_other_termination_message_is_ignored(message: str | None) -> None:
    assert log_lines.parse_termination_message(message) is None


def test_verdict_survives_termination_message() -> None:
    verdict = verdict_for_code(
        83, "rank 1 raised", rank=1, host=0, step=3, traceback="Traceback\nValueError"
    )
    parsed = log_lines.parse_termination_message(
        log_lines.format_termination_message(TerminationMessage(verdict, 0, 0, 1))
    )
    assert parsed is not None and parsed.verdict == verdict


def test_termination_message_excludes_program_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_lines, "TERMINATION_LOG", str(tmp_path / "log"))
    (tmp_path / "log").write_text("x" * 100_000)
    write_termination_message(verdict_for_code(83, "rank 1 raised", rank=1), 0, 0, 1)
    parsed = log_lines.parse_termination_message((tmp_path / "log").read_text())
    assert parsed is not None and parsed.verdict.message == "rank 1 raised"
