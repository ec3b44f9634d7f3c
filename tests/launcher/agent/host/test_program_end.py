"""How a rank has ended, by the code of its command and what is known of its program."""

from __future__ import annotations

from typing import Any

import pytest

from jaxlaunch.launcher.agent.host.program_end import ProgramEnd

FAILED, WORKER = {"type": "ValueError", "message": "a"}, {"type": "KeyError", "message": "b"}


def resolve_code(
    command_code: int,
    *,
    below_shell: bool = False,
    has_left: bool = True,
    line: bytes = b"",
    **facts: Any,
) -> int:
    return ProgramEnd(**facts).resolve_code(
        command_code,
        is_below_shell=below_shell,
        has_left=has_left,
        requeue_codes=[42],
        last_line=line,
    )


@pytest.mark.parametrize(
    ("command_code", "facts", "resolved"),
    [
        # Nothing is known of the program.
        (0, {}, 0),
        (3, {}, 3),
        # Its wrapper ends with 0 or translates the code.
        (0, {"code": 3}, 3),
        (1, {"code": 3}, 3),
        (0, {"code": -9}, -9),
        (1, {"code": -11}, -11),
        # The wrapper failed after the program had finished.
        (1, {"code": 0}, 1),
        # A wrapper may ask for a restart, and may stop the program.
        (42, {"code": 3}, 42),
        (0, {"code": -15, "was_signalled": True}, 0),
        (1, {"code": -9, "was_signalled": True}, 1),
        (0, {"code": 3, "was_signalled": True}, 3),
        (0, {"code": -15}, -15),
        # A shell judges what it knows.
        (0, {"code": 3, "below_shell": True}, 0),
        (1, {"code": 3, "below_shell": True}, 1),
        (0, {"code": 3, "below_shell": True, "overrides_shell": True}, 3),
        (1, {"code": -9, "below_shell": True, "ended_first": True, "has_left": False}, -9),
        # A signal in the code of a shell, of sys.exit(-9), and of `setsid --wait`.
        (137, {"ended_first": True, "has_left": False}, -9),
        (247, {"ended_first": True, "has_left": False}, -9),
        (9, {"ended_first": True, "has_left": False, "line": b"setsid: no such program"}, 9),
        (
            9,
            {
                "ended_first": True,
                "has_left": False,
                "line": b"setsid: child 7 did not exit normally",
            },
            -9,
        ),
        (137, {"ended_first": True}, 137),
        (137, {}, 137),
    ],
)
def test_code_of_the_program_is_that_of_the_rank(
    command_code: int, facts: dict[str, Any], resolved: int
) -> None:
    assert resolve_code(command_code, **facts) == resolved


def test_exception_of_the_program_explains_its_rank_before_those_of_others() -> None:
    end = ProgramEnd(other_error=FAILED)
    assert end.find_error(1) is FAILED
    # The code is the program's own, which has raised nothing.
    end.record_child_end(7, 1)
    assert end.find_error(1) is None
    end.task_error = WORKER
    assert end.find_error(1) is WORKER
    end.error = FAILED
    assert end.find_error(1) is FAILED


def test_parent_that_ends_with_0_after_its_child_has_failed_does_not_judge_it() -> None:
    end = ProgramEnd()
    end.take_other_exit(7, 0)
    assert not end.overrides_shell
    end.record_child_end(7, 3)
    for pid, code in ((8, 0), (7, 1)):
        end.take_other_exit(pid, code)
        assert not end.overrides_shell
    end.take_other_exit(7, None)
    assert end.overrides_shell


def test_signal_in_an_exception_of_a_wrapper_is_that_of_the_program() -> None:
    error = {"type": "CalledProcessError", "message": "x died with <Signals.SIGSEGV: 11>."}
    end = ProgramEnd()
    end.take_other_error(error, is_killed=False)
    assert (end.code, end.other_error) == (None, error)
    end.take_other_error(error, is_killed=True)
    assert end.code == -11
