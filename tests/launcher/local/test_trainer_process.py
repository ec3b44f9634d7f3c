from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import trainer_process

ROOT = str(Path(__file__).parents[3])


def says(stderr: str, code: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the launcher says when a program of the trainer ends like this."""
    ended = subprocess.CompletedProcess(["python"], code, "", stderr)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    with pytest.raises(UserError) as raised:
        trainer_process.run("jaxlaunch.trainer.export", environ={})
    assert raised.value.exit_code == 2
    return str(raised.value)


def test_a_refusal_names_no_exit_code_but_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = "a warning\ntrainer: /out already exists; name a new folder or an empty one (exit 64)\n"
    said = says(stderr, contract.BAD_SPEC, monkeypatch)
    assert said == "/out already exists; name a new folder or an empty one"


def test_what_is_logged_behind_a_refusal_does_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = contract.refusal_line("no usable checkpoint in /c:\n  step 3: damaged", contract.NO_CHECKPOINT) + "\nbye\n"
    assert says(stderr, contract.NO_CHECKPOINT, monkeypatch) == "no usable checkpoint in /c: step 3: damaged"


def test_a_program_that_ends_well_without_its_result_has_failed() -> None:
    here = "tests.launcher.local.ends_at_once"
    for asked in (trainer_process.run, lambda *args, **keys: list(trainer_process.events(*args, **keys))):
        with pytest.raises(UserError, match=r"^bye\n`python -m .*ends_at_once` ended without a result \(exit 0\)"):
            asked(here, environ=os.environ | {"PYTHONPATH": ROOT})


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    said = says("Traceback (most recent call last):\nKeyError: 'x'\n", contract.STARTUP, monkeypatch)
    assert "Traceback" in said and "(exit 70)" in said
