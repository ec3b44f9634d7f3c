"""When host 0 writes a line for programs, and what is in it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.leader.publishers import GangView, PodLog
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import BeatLine, PastLine, TailLine
from jaxlaunch.records.summary import AttemptRecord
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs.run_folder import RunFolder


class Recorded:
    """A pod log whose lines are kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.pod_log = PodLog(0, self.lines.append)

    def look(self, at: float, **changes: Any) -> None:
        statuses = [Status(phase=phase) for phase in changes.pop("phases", ["step"])]
        value = dict(stage="run", attempt=1, members="0", missing=[], refused=[], overdue=None)
        value |= {"step": None, "committed": None}
        value |= {
            "seconds": {},
            "restarts": {},
            "preempted": 0,
            "metrics": None,
            "restart": {},
            "statuses": statuses,
            **changes,
        }
        self.pod_log.write_beat(lambda: GangView(**value), at)  # type: ignore[arg-type]

    @property
    def beats(self) -> list[BeatLine]:
        return [
            beat for beat in map(log_lines.parse_line, self.lines) if isinstance(beat, BeatLine)
        ]


def test_phase_change_is_written_except_within_the_loop() -> None:
    recorded = Recorded()
    for at, phase in enumerate(["init", "init", "compile", "step", "data", "save", "step"]):
        recorded.look(3.0 * at, phases=[phase] * 2)
    assert [beat.phase for beat in recorded.beats] == ["init", "compile", "step"]


def test_quick_phase_changes_are_written_once() -> None:
    recorded = Recorded()
    for tick in range(10):
        recorded.look(0.2 * tick, stage="gather", missing=list(range(10 - tick)))
    assert len(recorded.beats) == 1


def test_beat_is_written_every_fifteen_seconds() -> None:
    recorded = Recorded()
    for second in range(61):
        recorded.look(float(second), step=second)
    assert [beat.step for beat in recorded.beats] == [0, 15, 30, 45, 60]


def test_beat_of_ten_thousand_ranks_is_short() -> None:
    recorded = Recorded()
    recorded.look(0.0, phases=["step"] * 9_999 + ["data"], missing=list(range(5_000)))
    (beat,) = recorded.beats
    assert len(recorded.lines[0]) < 2_000
    assert beat.counts == {"step": 9_999, "data": 1} and beat.phases["data"] == [9_999]
    assert beat.missing_count == 5_000


def test_only_a_newer_commit_has_a_time() -> None:
    recorded = Recorded()
    recorded.look(0.0)
    recorded.look(20.0, committed=7)
    recorded.look(40.0, committed=7)
    none, first, second = recorded.beats
    assert (none.committed, none.committed_at) == (None, None)
    assert first.committed == 7 and first.committed_at == second.committed_at is not None


def test_malformed_beat_fields_are_rejected() -> None:
    recorded = Recorded()
    recorded.look(0.0)
    (beat,) = recorded.beats
    kind, _, text = recorded.lines[-1].removeprefix(log_lines.PREFIX).partition(" ")
    for field in dataclasses.fields(beat):
        line = f"{log_lines.PREFIX}{kind} {json.dumps(json.loads(text) | {field.name: True})}"
        assert log_lines.parse_line(line) is None, field.name


def test_log_tail_names_the_host_of_the_rank(tmp_path: Path) -> None:
    (tmp_path / "starts" / "1" / "logs").mkdir(parents=True)
    (tmp_path / "starts" / "1" / "logs" / "rank-1.log").write_text("step 7\n")
    lost = verdict_for_code(contract.LOST, "host 1 was lost", rank=1, host=1)
    usual = AttemptRecord("uid", 0, 1, "lost", 1, None, None, {}, lost, 1.0, 2.0)
    for members, host in (("0,3,2", 3), (None, None)):
        lines: list[str] = []
        folder = RunFolder(tmp_path, pytest.fail)
        PodLog(1, lines.append).write_past(
            [dataclasses.replace(usual, members=members)], folder, 1, 1, 3
        )
        (tail,) = [item for item in map(log_lines.parse_line, lines) if isinstance(item, TailLine)]
        assert (tail.rank, list(tail.lines), tail.host) == (1, ["step 7"], host)


def test_attempts_before_a_new_leader_are_said_to_be_unknown() -> None:
    """A host 0 without storage that was made again learns from the others that there were some."""
    lost = verdict_for_code(contract.LOST, "host 1 was lost", rank=1, host=1)
    own = AttemptRecord("uid", 0, 1, "lost", 1, None, None, {}, lost, 1.0, 2.0)
    nowhere = RunFolder(None, pytest.fail)
    for records, attempts, is_known in (([], 1, False), ([own], 1, True), ([own], 3, False)):
        lines: list[str] = []
        PodLog(0, lines.append).write_past(records, nowhere, 1, 1, 3, attempts=attempts)
        total, *_ = [
            item for item in map(log_lines.parse_line, lines) if isinstance(item, PastLine)
        ]
        assert (total.unknown is None) is is_known, (records, attempts)
    lines = []
    PodLog(0, lines.append).write_past([], nowhere, 1, 1, 3)
    assert not lines
