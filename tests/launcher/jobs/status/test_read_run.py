"""A run folder as a pod reads it, from the files of agents to the output of `launcher`."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.agent.io.output import RankLog
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.jobs import volume
from jaxlaunch.launcher.jobs.status import read_run
from jaxlaunch.launcher.jobs.volume import RunFiles
from jaxlaunch.records.summary import AttemptProgress, AttemptRecord, Summary
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs import layout
from jaxlaunch.runs.layout import ATTEMPTS, SUMMARY, log_path, start_folder
from jaxlaunch.runs.run_folder import RunFolder, RunStarts

KEPT = 4_000  # bytes of each rank's log


def run_program(folder: Path, **request: Any) -> list[str]:
    """What the program prints, as `python -c` runs it in a pod."""
    arguments = {
        "folder": str(folder),
        "names": layout.READ_NAMES,
        "ranks": None,
        "pattern": None,
        "tail": None,
        "bytes": 1 << 20,
    } | request
    argv = [sys.executable, "-I", "-c", inspect.getsource(read_run), json.dumps(arguments)]
    return subprocess.run(
        argv, capture_output=True, text=True, check=True, timeout=600
    ).stdout.splitlines()


def read_answer(folder: Path, **request: Any) -> RunFiles:
    return volume.parse_answer(run_program(folder, **request), "1234")


def write_run(folder: Path, rank: int, lines: Iterable[str], files: int = KEPT) -> None:
    log = RankLog(start_folder(folder, 1), rank, files, pytest.fail)
    for line in lines:
        log.write_line(line.encode())
    if log._file is not None:  # as the end of an agent closes it
        log._file.close()


def print_answer(folder: Path) -> Path:
    """A run of two attempts, the last of which was stopped at step 40."""
    record = AttemptRecord(
        "1234", 0, 1, "crash", 1, 10, 20, {}, verdict_for_code(83, "rank 1 raised: X"), 1.0, 2.0
    )
    RunFolder(folder, pytest.fail).append_record(record)
    progress = AttemptProgress("1234", 1, 2, started=3.0, at=1_795_000_000.0)
    seconds, restarts = {"init": 1.0, "step": 3.0}, {"crash": 1}
    summary = Summary(
        verdict_for_code(80, "saved at step 40"),
        step=40,
        seconds=seconds,
        restarts=restarts,
        committed=40,
        of=progress,
    )
    RunStarts(RunFolder(folder, pytest.fail), "1234").write_summary(summary)
    write_run(folder, 0, ["one", "two"])
    return folder


def test_answer_has_summary_attempts_and_logs(tmp_path: Path) -> None:
    files = read_answer(print_answer(tmp_path))
    assert files.progress is not None
    assert (files.progress.step, files.progress.committed, files.progress.goodput) == (40, 40, 0.75)
    assert (files.progress.at, files.progress.restarts) == (1_795_000_000.0, {"crash": 1})
    assert files.progress.verdict == verdict_for_code(80, "saved at step 40")
    assert [end.description for end in files.attempts] == [
        "attempt 1 of generation 0: crash (83): rank 1 raised: X"
    ]
    assert [(end.rank, end.lines, end.left_out) for end in files.logs] == [(0, ("one", "two"), 0)]


def test_summary_with_many_stacks_is_read(tmp_path: Path) -> None:
    stacks = {rank: "x" * 15_000 for rank in range(200)}
    progress = AttemptProgress("1234", 1, 2, started=3.0, at=1_795_000_000.0)
    hung = Summary(
        verdict_for_code(82, "rank 1 hangs"),
        step=40,
        seconds={"step": 3.0},
        restarts={"hang": 1},
        committed=37,
        of=progress,
        stacks=stacks,
    )
    RunStarts(RunFolder(tmp_path, pytest.fail), "1234").write_summary(hung)
    assert (tmp_path / SUMMARY).stat().st_size > 2_000_000
    files = read_answer(tmp_path).progress
    assert files is not None and (files.step, files.committed, files.verdict) == (
        40,
        37,
        hung.verdict,
    )


def test_rotated_log_counts_missing_bytes(
    tmp_path: Path,
) -> None:
    lines = [f"line {number}: {'ü' * 20}" for number in range(1_000)]
    for start in range(0, 1_000, 100):  # every agent opens the files again
        write_run(tmp_path, 0, lines[start : start + 100])
    (log,) = read_answer(tmp_path).logs
    assert log.lines == tuple(lines[-len(log.lines) :]) and len(log.lines) > 20
    assert log.left_out == sum(len(line.encode()) + 1 for line in lines[: -len(log.lines)])
    assert (
        KEPT / 2
        <= sum(path.stat().st_size for path in (tmp_path / "starts/1/logs").iterdir())
        <= KEPT + 300
    )


def test_lines_are_selected_by_program(tmp_path: Path) -> None:
    for rank in range(12):
        write_run(tmp_path, rank, [f"{rank} says {number}" for number in range(50)])
    assert [log.rank for log in read_answer(tmp_path).logs] == list(range(12))
    (third,) = read_answer(tmp_path, ranks=[3, 99], pattern="says 4[0-9]", tail=2).logs
    assert (third.rank, third.lines) == (3, ("3 says 48", "3 says 49"))
    assert third.left_out == 8 * len("3 says 40\n")
    assert read_answer(tmp_path, ranks=[]).logs == ()


def test_end_of_log_is_kept(tmp_path: Path) -> None:
    for rank in range(2):
        write_run(tmp_path, rank, [f"line {number:05}" for number in range(10_000)], files=1 << 20)
    for log in read_answer(tmp_path, bytes=2_000).logs:
        assert log.lines[-1] == "line 09999" and 80 < len(log.lines) <= 91
        assert log.left_out == 11 * (10_000 - len(log.lines))


@pytest.mark.parametrize(
    "text",
    ["[]", "{", "[" * 100_000, '{"of": {"uid": "5678"}, "verdict": null}', '{"of": 7}', "null"],
)
def test_invalid_or_foreign_summary_is_ignored(tmp_path: Path, text: str) -> None:
    (tmp_path / SUMMARY).write_text(text)
    (tmp_path / ATTEMPTS).write_text(f"{text}\n{text}\n")
    assert read_answer(tmp_path) == RunFiles(None, (), ())


def test_incomplete_answer_is_refused(
    tmp_path: Path,
) -> None:
    write_run(tmp_path, 0, (os.urandom(30).hex() for _ in range(1_000)), files=1 << 20)
    lines = run_program(tmp_path)
    assert len(lines) > 3
    assert volume.parse_answer(["Welcome!", *lines, "bye"], "1234").logs
    for broken in (
        [],
        ["Traceback"],
        lines[:-1],
        lines[1:],
        [lines[0][:-4] + "####", *lines[1:]],
        [*lines[:-1], read_run.END],
    ):
        with pytest.raises(UserError, match="cannot be used"):
            volume.parse_answer(broken, "1234")


def test_rotation_line_is_recognized(tmp_path: Path) -> None:
    write_run(tmp_path, 0, ["x" * 99] * 100, files=1_000)
    first = log_path(start_folder(tmp_path, 1), 0).read_bytes().splitlines()[0]
    assert read_run.ROTATION_LINE.fullmatch(first), first
