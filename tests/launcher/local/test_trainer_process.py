from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from jaxlaunch import contract, isolated
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.local import trainer_process

ROOT = str(Path(__file__).parents[3])


def run_failing_program(program: str, code: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the launcher says when a program of the trainer ends like this."""
    source = f"import sys; from jaxlaunch import contract; {program}; sys.exit({code})"
    monkeypatch.setattr(isolated, "build_command", lambda *_: [sys.executable, "-c", source])
    shown: list[str] = []
    with pytest.raises(UserError) as raised:
        trainer_process.run_program(
            "jaxlaunch.trainer.export", environ=os.environ, show=shown.append
        )
    assert raised.value.exit_code == 2
    assert not any(line.startswith("trainer: ") for line in shown)
    return str(raised.value)


def test_refusal_message_has_no_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "print('a warning', file=sys.stderr); contract.refuse('/out already exists; name a new "
        "folder or an empty one', contract.BAD_SPEC)"
    )
    message = run_failing_program(program, contract.BAD_SPEC, monkeypatch)
    assert message == "/out already exists; name a new folder or an empty one"


def test_log_lines_after_a_refusal_do_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "contract.refuse('no usable checkpoint in /c:\\n  step 3: damaged', "
        "contract.NO_CHECKPOINT);"
        " print('bye', file=sys.stderr)"
    )
    assert (
        run_failing_program(program, contract.NO_CHECKPOINT, monkeypatch)
        == "no usable checkpoint in /c: step 3: damaged"
    )


def test_exit_0_without_a_result_is_a_failure() -> None:
    environ = "tests.launcher.local.ends_at_once"
    for events in (
        trainer_process.run_program,
        lambda *args, **keys: list(trainer_process.stream_program(*args, **keys)),
    ):
        with pytest.raises(
            UserError, match=r"^bye\n`python -m .*ends_at_once` ended without a result \(exit 0\)"
        ):
            events(environ, environ=os.environ | {"PYTHONPATH": ROOT})


def test_internal_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "print('Traceback (most recent call last):\\nKeyError: 1', file=sys.stderr)"
    message = run_failing_program(program, contract.STARTUP, monkeypatch)
    assert "Traceback" in message and "(exit 70)" in message


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("", "/shell"),
        ("code: project\n", "{folder}/project:/shell"),
        (
            "code: project\nenv: {PYTHONPATH: 'src:/code/lib:/opt'}\n",
            "{folder}/project:{folder}/project/src:{folder}/project/lib:/opt",
        ),
        (
            "code: project\nworkdir: project/sub\nenv: {PYTHONPATH: src}\n",
            "{folder}/project:{folder}/project/sub/src",
        ),
    ],
)
def test_programs_of_the_trainer_have_the_search_path_of_the_job(
    keys: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/shell")
    text = "name: t\naccelerator: {type: cpu}\ntrain: {task: 'a.b:C'}\n"
    job = jobs.parse_job(text + keys)
    assert job.train is not None
    environ = trainer_process.cpu_environ(job, job.train, tmp_path)
    assert environ["PYTHONPATH"] == expected.format(folder=tmp_path)
