"""Which lines of a failed attempt a terminal shows."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.jobs.logs.lines import Line, parse_line
from jaxlaunch.launcher.local import held_output
from jaxlaunch.launcher.local.held_output import HeldOutput
from jaxlaunch.records.log_lines import StartLine, VerdictLine, format_line
from jaxlaunch.records.verdict import (
    ExceptionFacts,
    Failure,
    FailureKind,
    Verdict,
    verdict_for,
    verdict_for_code,
)

RAISED = Failure(FailureKind.EXCEPTION, rank=1, exception=ExceptionFacts("ValueError", "bad batch"))
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "train.py", line 3',
    "ValueError: bad batch",
)
ECHO = ("Traceback (most recent call last):", "  in gloo", "ValueError: Gloo: Connection closed")


def raised(code: int = contract.CRASH) -> Verdict:
    return verdict_for_code(code, RAISED, rank=1, host=1)


class Terminal:
    """What is shown of lines of two hosts with a rank each."""

    def __init__(self, *, hides_echoes: bool = True) -> None:
        self.shown: list[str] = []
        self.output = HeldOutput(
            lambda line: self.shown.append(line.text_with_rank()), hides_echoes=hides_echoes
        )

    def print(self, rank: int, *texts: str) -> Terminal:
        for text in texts:
            self.output.handle_line(Line(rank, rank, text))
        return self

    def record(self, host: int, record: StartLine | VerdictLine) -> Terminal:
        self.output.handle_line(parse_line(host, format_line(record)))
        return self

    def judge(self, verdict: Verdict) -> Terminal:
        for host in (0, 1):
            self.record(host, VerdictLine(attempt=1, verdict=verdict))
        return self

    def start(self) -> Terminal:
        for host in (0, 1):
            self.record(host, StartLine(attempt=2))
        return self


def prefixed(rank: int, texts: Sequence[str]) -> list[str]:
    return [f"[{rank}] {text}" for text in texts]


def test_only_the_cause_is_shown_and_its_exception_only_by_the_verdict() -> None:
    terminal = Terminal().start().print(0, "step 1").print(1, "step 1")
    terminal.print(0, *ECHO).print(1, *TRACEBACK)
    assert terminal.shown == ["[0] step 1", "[1] step 1"]
    terminal.judge(raised()).print(0, *ECHO).print(1, "more of the cause")
    assert terminal.shown[2:] == prefixed(1, (*TRACEBACK[:2], "more of the cause"))


def test_same_failure_is_shown_once_and_the_next_attempt_again() -> None:
    terminal = Terminal().start().print(1, *TRACEBACK).judge(raised())
    assert terminal.shown == prefixed(1, TRACEBACK[:2])
    terminal.start().print(0, "step 1").print(1, *TRACEBACK).judge(raised())
    assert terminal.shown[2:] == ["[0] step 1"]
    other = dataclasses.replace(RAISED, exception=ExceptionFacts("KeyError", "'x'"))
    terminal.start().print(1, *TRACEBACK[:2], "KeyError: 'x'")
    terminal.judge(verdict_for_code(contract.CRASH, other, rank=1))
    assert terminal.shown[3:] == prefixed(1, TRACEBACK[:2])


@pytest.mark.parametrize(
    "verdict",
    [
        verdict_for(Failure(FailureKind.SIGNAL, signal=9), rank=1, host=1),
        raised(contract.BAD_DATA),
    ],
)
def test_survivors_and_what_a_person_can_fix_need_no_traceback(verdict: Verdict) -> None:
    terminal = Terminal().start().print(0, *ECHO).judge(verdict).print(0, "Fatal Python error: Abo")
    assert terminal.shown == []


def test_handled_exception_is_shown_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    terminal = Terminal().start()
    assert terminal.output.wait_s() is None
    terminal.print(0, *ECHO, "step 2")
    assert terminal.output.wait_s() == held_output.HOLD_S and terminal.shown == []
    now += held_output.HOLD_S
    terminal.output.show_due()
    assert terminal.shown == prefixed(0, (*ECHO, "step 2"))
    assert terminal.print(0, "step 3").shown[-1] == "[0] step 3"


def test_output_is_shown_if_the_agent_dies_before_a_verdict() -> None:
    terminal = Terminal().start().print(0, *ECHO).print(1, *TRACEBACK)
    terminal.output.end_host(1)
    assert terminal.shown == prefixed(1, TRACEBACK)
    # The verdict of the other agents does not hide what an agent that comes again prints.
    terminal.judge(raised()).record(1, StartLine(attempt=2)).print(1, "step 1")
    assert terminal.shown[-1] == "[1] step 1"


@pytest.mark.parametrize("code", [contract.DONE, contract.PREEMPTED])
def test_exception_that_a_program_logs_before_it_ends_well_is_shown(code: int) -> None:
    terminal = Terminal().start().print(0, *ECHO).judge(verdict_for_code(code, "it ended"))
    assert terminal.print(0, "bye").shown == prefixed(0, (*ECHO, "bye"))


def test_lost_start_of_an_attempt_hides_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    terminal = Terminal().start().judge(raised()).print(0, "an echo")
    now += held_output.KILL_S
    assert terminal.print(0, "step 1").shown == ["[0] step 1"]


def test_files_get_every_line_but_no_records() -> None:
    terminal = Terminal(hides_echoes=False).start().print(0, *ECHO).judge(raised()).print(0, "more")
    terminal.output.handle_line(Line(0, None, "agent 0: restarting"))
    assert terminal.shown == [*prefixed(0, (*ECHO, "more")), "agent 0: restarting"]
