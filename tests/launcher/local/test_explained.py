"""What `launcher explain` says of a run on this machine."""

from __future__ import annotations

import errno
from pathlib import Path

from jaxlaunch import contract
from jaxlaunch.launcher.local import run_explanation
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.records.summary import Summary
from jaxlaunch.records.verdict import ExceptionFacts, Failure, FailureKind, verdict_for_code


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
    assert answer.next_move == "fix the program: the traceback shows where; then `launcher run`."
