"""What `launcher explain` says of a run on this machine."""

from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.local import run_explanation, run_folders
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.records.summary import RankMemory, Summary
from jaxlaunch.records.verdict import ExceptionFacts, Failure, FailureKind, verdict_for_code
from jaxlaunch.runs import layout
from tests.launcher.commands import parse_command
from tests.launcher.report import made_runs


def test_file_error_of_local_run_does_not_mention_pods(tmp_path: Path) -> None:
    facts = ExceptionFacts("PermissionError", "[Errno 13] Permission denied: 'out'", errno.EACCES)
    verdict = verdict_for_code(contract.STARTUP, Failure(FailureKind.EXCEPTION, exception=facts))
    answer = run_explanation.explain_run(
        Run(
            "mine",
            tmp_path,
            Summary(verdict, step=None, seconds={}, restarts={}, committed=None),
            None,
        ),
        None,
    )
    again = f"launcher run {tmp_path}/job.yaml --run-dir {tmp_path}"
    assert answer.next_move == f"fix the program: the traceback shows where; then `{again}`."
    assert answer.commands == (tuple(again.split()),)


def test_memory_of_a_killed_rank_is_a_fact(tmp_path: Path) -> None:
    made_runs.run(tmp_path / "run", codes=(contract.KILLED,), points=1)
    path = tmp_path / "run" / layout.ATTEMPTS
    memory = dataclasses.asdict(RankMemory(3, 1, 7.0, 7.9, 8.0))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"memory": memory}) + "\n")
    answer = run_explanation.explain_run(run_folders.open_run(tmp_path / "run"), None)
    fact = "most memory of rank 3: process 7 GiB, host 1: 7.9 of 8 GiB (99 %)"
    assert fact in answer.facts


def test_command_of_local_run_is_the_one_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, here = tmp_path / "runs" / "mine", tmp_path / "else"
    here.mkdir()
    (tmp_path / "job.yaml").write_text(
        "name: mine\naccelerator: {type: cpu}\ncommand: [sh, -c, echo no; exit 3]\n"
        "restarts: {in_place: 0, crash: 0}\n"
    )
    command = [sys.executable, "-m", "jaxlaunch.launcher.cli.main"]
    run = [*command, "run", "job.yaml", "grace=5s"]
    started = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert folder.is_dir(), started.stderr
    for cwd, expected in (
        (tmp_path, "launcher run job.yaml grace=5s"),
        (here, f"launcher run {tmp_path}/job.yaml grace=5s --run-dir {folder}"),
    ):
        monkeypatch.chdir(cwd)
        run_folder = run_folders.open_run(folder)
        answer = run_explanation.explain_run(run_folder, None)
        assert f"`{expected}`" in (answer.next_move or "")
        for words in answer.commands:
            parse_command(words)
    (logs,) = [words for words in answer.commands if words[1] == "logs"]
    shown = subprocess.run([*command, *logs[1:]], cwd=here, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
