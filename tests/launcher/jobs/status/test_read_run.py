"""A run folder as a pod of its own reads it, from what agents write to what `launcher` makes of the answer."""

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


def answered(folder: Path, **asked: Any) -> list[str]:
    """What the program prints, as `python -c` runs it in a pod."""
    given = {
        "folder": str(folder),
        "names": layout.READ_NAMES,
        "ranks": None,
        "pattern": None,
        "tail": None,
        "bytes": 1 << 20,
    } | asked
    argv = [sys.executable, "-I", "-c", inspect.getsource(read_run), json.dumps(given)]
    return subprocess.run(
        argv, capture_output=True, text=True, check=True, timeout=600
    ).stdout.splitlines()


def read(folder: Path, **asked: Any) -> RunFiles:
    return volume.parse_answer(answered(folder, **asked), "1234")


def write(folder: Path, rank: int, lines: Iterable[str], kept: int = KEPT) -> None:
    log = RankLog(start_folder(folder, 1), rank, kept, pytest.fail)
    for line in lines:
        log.write_line(line.encode())
    if log._file is not None:  # as the end of an agent closes it
        log._file.close()


def told(folder: Path) -> Path:
    """A run of two attempts, the last of which was stopped at step 40."""
    record = AttemptRecord(
        "1234", 0, 1, "crash", 1, 10, 20, {}, verdict_for_code(83, "rank 1 raised: X"), 1.0, 2.0
    )
    RunFolder(folder, pytest.fail).append_record(record)
    of = AttemptProgress("1234", 1, 2, started=3.0, at=1_795_000_000.0)
    seconds, restarts = {"init": 1.0, "step": 3.0}, {"crash": 1}
    summary = Summary(
        verdict_for_code(80, "saved at step 40"),
        step=40,
        seconds=seconds,
        restarts=restarts,
        committed=40,
        of=of,
    )
    RunStarts(RunFolder(folder, pytest.fail), "1234").write_summary(summary)
    write(folder, 0, ["one", "two"])
    return folder


def test_the_summary_the_attempts_and_the_logs_come_back(tmp_path: Path) -> None:
    found = read(told(tmp_path))
    assert found.recorded is not None
    assert (found.recorded.step, found.recorded.committed, found.recorded.goodput) == (40, 40, 0.75)
    assert (found.recorded.at, found.recorded.restarts) == (1_795_000_000.0, {"crash": 1})
    assert found.recorded.verdict == verdict_for_code(80, "saved at step 40")
    assert [one.description for one in found.attempts] == [
        "attempt 1 of generation 0: crash (83): rank 1 raised: X"
    ]
    assert [(one.rank, one.lines, one.left_out) for one in found.logs] == [(0, ("one", "two"), 0)]


def test_the_stacks_of_many_ranks_keep_nothing_of_a_summary_from_being_read(tmp_path: Path) -> None:
    stacks = {rank: "x" * 15_000 for rank in range(200)}
    of = AttemptProgress("1234", 1, 2, started=3.0, at=1_795_000_000.0)
    hung = Summary(
        verdict_for_code(82, "rank 1 hangs"),
        step=40,
        seconds={"step": 3.0},
        restarts={"hang": 1},
        committed=37,
        of=of,
        stacks=stacks,
    )
    RunStarts(RunFolder(tmp_path, pytest.fail), "1234").write_summary(hung)
    assert (tmp_path / SUMMARY).stat().st_size > 2_000_000
    found = read(tmp_path).recorded
    assert found is not None and (found.step, found.committed, found.verdict) == (
        40,
        37,
        hung.verdict,
    )


def test_a_log_that_was_rotated_says_how_much_of_it_is_gone_over_every_start(
    tmp_path: Path,
) -> None:
    lines = [f"line {number}: {'ü' * 20}" for number in range(1_000)]
    for start in range(0, 1_000, 100):  # every agent opens the files anew
        write(tmp_path, 0, lines[start : start + 100])
    (log,) = read(tmp_path).logs
    assert log.lines == tuple(lines[-len(log.lines) :]) and len(log.lines) > 20
    assert log.left_out == sum(len(line.encode()) + 1 for line in lines[: -len(log.lines)])
    assert (
        KEPT / 2
        <= sum(path.stat().st_size for path in (tmp_path / "starts/1/logs").iterdir())
        <= KEPT + 300
    )


def test_what_is_asked_for_is_chosen_where_the_logs_are(tmp_path: Path) -> None:
    for rank in range(12):
        write(tmp_path, rank, [f"{rank} says {number}" for number in range(50)])
    assert [log.rank for log in read(tmp_path).logs] == list(range(12))
    (third,) = read(tmp_path, ranks=[3, 99], pattern="says 4[0-9]", tail=2).logs
    assert (third.rank, third.lines) == (3, ("3 says 48", "3 says 49"))
    assert third.left_out == 8 * len("3 says 40\n")
    assert read(tmp_path, ranks=[]).logs == ()


def test_the_end_of_a_log_is_what_fits(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [f"line {number:05}" for number in range(10_000)], kept=1 << 20)
    for log in read(tmp_path, bytes=2_000).logs:
        assert log.lines[-1] == "line 09999" and 80 < len(log.lines) <= 91
        assert log.left_out == 11 * (10_000 - len(log.lines))


@pytest.mark.parametrize(
    "text",
    ["[]", "{", "[" * 100_000, '{"of": {"uid": "5678"}, "verdict": null}', '{"of": 7}', "null"],
)
def test_a_summary_that_is_no_such_file_or_another_job_s_is_unknown(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / SUMMARY).write_text(text)
    (tmp_path / ATTEMPTS).write_text(f"{text}\n{text}\n")
    assert read(tmp_path) == RunFiles(None, (), ())


def test_an_answer_that_is_not_whole_is_refused_and_other_lines_are_passed_over(
    tmp_path: Path,
) -> None:
    write(tmp_path, 0, (os.urandom(30).hex() for _ in range(1_000)), kept=1 << 20)
    lines = answered(tmp_path)
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


def test_the_reader_knows_the_line_that_a_rotation_writes(tmp_path: Path) -> None:
    write(tmp_path, 0, ["x" * 99] * 100, kept=1_000)
    first = log_path(start_folder(tmp_path, 1), 0).read_bytes().splitlines()[0]
    assert read_run.ROTATION_LINE.fullmatch(first), first
