"""What is kept in the run folder."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.records.summary import AttemptProgress, AttemptRecord, Summary
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import history, run_folder
from jaxlaunch.runs.layout import AGENTS, ATTEMPTS, SUMMARY, log_path, start_folder
from jaxlaunch.runs.run_folder import (
    MAX_ATTEMPTS_BYTES,
    MAX_JSON_BYTES,
    TAIL_BYTES,
    RunFolder,
    RunStarts,
    read_agents,
)
from tests import mutate


def test_log_tails_are_bounded(tmp_path: Path) -> None:
    for rank in range(100):
        path = log_path(start_folder(tmp_path, 3), rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{rank} says {line}\n" for line in range(5_000)))
    tails = RunFolder(tmp_path, print).read_log_tails(3, [73, *range(73), *range(74, 100)])
    assert (
        tails[0][0] == 73
        and sum(len(line) + 1 for _, lines in tails for line in lines) <= TAIL_BYTES
    )
    assert len(tails[0][1]) > len(tails[1][1]) and all(
        lines[-1].endswith("says 4999") for _, lines in tails
    )


def attempt_record(attempt: int) -> AttemptRecord:
    verdict = Verdict("crash", 83, "rank 1 raised")
    return AttemptRecord(
        "uid", 0, attempt, "crash", None, None, None, {"step": 1.5}, verdict, 1.0, 2.0
    )


def test_torn_line_keeps_next_record(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, print)
    folder.append_record(attempt_record(1))
    with (tmp_path / ATTEMPTS).open("ab") as file:
        file.write(b'{"uid": "uid", "gener\xc3')
    folder.append_record(attempt_record(2))
    folder.append_record(attempt_record(3))
    assert [entry.attempt for entry in folder.read_records("uid")] == [1, 2, 3]
    assert (tmp_path / ATTEMPTS).read_bytes().count(b"\n") == 4


def test_last_record_is_replaced_although_a_torn_line_follows_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, print)
    for attempt in (1, 2):
        folder.append_record(attempt_record(attempt))
    with (tmp_path / ATTEMPTS).open("ab") as file:
        file.write(b'{"uid": "uid", "gener\xc3')
    record = dataclasses.replace(attempt_record(2), last_committed=40)
    folder.replace_last_record(record)
    assert folder.read_records("uid") == [attempt_record(1), record]


@pytest.mark.parametrize(
    "change",
    [
        {"attempt": "1"},
        {"generation": True},
        {"seconds": 3},
        {"seconds": {"step": "x"}},
        {"verdict": {"code": 83}},
        {"verdict": {"cause": "crash", "code": "83", "message": ""}},
        {"last_committed": 1.5},
        {"ended": 1e300},
    ],
    ids=str,
)
def test_record_with_invalid_field_is_left_out(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = RunFolder(tmp_path, print)
    folder.append_record(attempt_record(1))
    with (tmp_path / ATTEMPTS).open("a") as file:
        file.write(json.dumps({**attempt_record(2).to_json(), **change}) + "\n")
    folder.append_record(attempt_record(3))
    assert [entry.attempt for entry in folder.read_records("uid")] == [1, 3]


@pytest.mark.parametrize("name", [ATTEMPTS, SUMMARY])
def test_irregular_file_is_ignored_and_noted(tmp_path: Path, name: str) -> None:
    for make in (os.mkfifo, lambda path: os.symlink("/dev/zero", path), os.mkdir):
        messages: list[str] = []
        folder = RunFolder(tmp_path, messages.append)
        make(tmp_path / name)  # type: ignore[operator]
        assert folder.read_records("uid") == [] and folder.read_json(SUMMARY) == {}
        assert len(messages) == (name == ATTEMPTS), messages
        (tmp_path / name).rmdir() if (tmp_path / name).is_dir() else (tmp_path / name).unlink()


def test_folder_that_cannot_be_searched_has_no_starts_and_is_noted(tmp_path: Path) -> None:
    # root may search every folder, so the error is of another kind.
    messages: list[str] = []
    folder = RunFolder(tmp_path / ("x" * 300), messages.append)
    assert folder.list_starts() == []
    assert ["File name too long" in message for message in messages] == [True]


@pytest.mark.parametrize(
    "text", ["[" * 9_000, "{}", "[1]", '[{"host": 0}]', '[{"host": 0, "address": 1, "pid": 1}]']
)
def test_invalid_agents_file_lists_none(tmp_path: Path, text: str) -> None:
    (tmp_path / AGENTS).write_text(text)
    assert read_agents(tmp_path) == []


def test_end_of_large_attempts_file_is_read(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, print)
    folder.append_record(attempt_record(1))
    with (tmp_path / ATTEMPTS).open("ab") as file:
        file.write(b"[" * MAX_ATTEMPTS_BYTES + b"\n")
        file.truncate(1 << 40)  # a terabyte of zeros, without a block of it
    folder.append_record(attempt_record(2))
    assert [entry.attempt for entry in folder.read_records("uid")] == [2]


def test_file_with_too_many_values_is_ignored(tmp_path: Path) -> None:
    for data in (
        b"[" * MAX_JSON_BYTES,
        b"[" + b"[]," * (MAX_JSON_BYTES // 3 - 9) + b"0]",
        b"1" * (2 * MAX_JSON_BYTES),
    ):
        (tmp_path / SUMMARY).write_bytes(data)
        tracemalloc.start()
        assert RunFolder(tmp_path, print).read_summary() is None
        assert tracemalloc.get_traced_memory()[1] < 64 * 1024 * 1024
        tracemalloc.stop()


def test_summary_with_many_stacks_is_read(tmp_path: Path) -> None:
    progress = AttemptProgress("uid", 0, 1, 1.0, 2.0)
    stacks = {rank: '  File "train.py", line 3, in f\n' * 60 for rank in range(4_000)}
    summary = Summary(None, step=1, seconds={"step": 1.0}, restarts={}, stacks=stacks, of=progress)
    RunStarts(folder := RunFolder(tmp_path, print), "uid").write_summary(summary)
    summary_read = folder.read_summary("uid")
    assert summary_read is not None and summary_read.stacks == stacks


def test_corrupted_records_and_summaries_never_raise(
    tmp_path: Path,
) -> None:
    folder, chance = RunFolder(tmp_path, print), random.Random(19)
    progress = AttemptProgress(
        "uid", 1, 4, 1.0, 2.0, {"step": 1.0}, 3, 5, 0.5, attempt_record(4).verdict
    )
    summary = Summary(
        None,
        step=5,
        seconds={"step": 1.0},
        restarts={"crash": 3},
        committed=5,
        metrics={"loss": 1.0},
        notes=["a note"],
        stacks={0: "a stack"},
        of=progress,
    ).to_json()
    seeds = [json.dumps(attempt_record(number).to_json()).encode() for number in (1, 2, 3)]
    whole = json.dumps(summary).encode()
    for _ in range(60):
        (tmp_path / ATTEMPTS).write_bytes(b"\n".join(mutate.mutated_lines(seeds, 100, chance)))
        (tmp_path / SUMMARY).write_bytes(mutate.mutate_message(whole, chance))
        records = run_folder.settle_records(folder, "uid")
        if records:
            json.dumps(
                history.decide_next(records, 3, all_hosts_alive=True).verdict.to_json(),
                allow_nan=False,
            )
            assert sum(history.restarts_by_cause(records, 10**9).values()) == len(records)
        summary_read = folder.read_summary()
        assert summary_read is None or summary_read.to_json()["of"] is None or summary_read.of
