"""Filter of a gang's output that hides what surviving ranks print about the failure of another.

When a rank dies, its peers print tracebacks of Gloo, JAX and Orbax before it is known which rank
was the cause. Therefore the output of a rank is held back from the first line that looks like a
traceback. Between the lines of their processes, agents write records when an attempt begins and
when it has a verdict. At the verdict, the held lines of the rank that it names are shown, and those
of other ranks are dropped. If no verdict arrives in time, because the program has logged an
exception and continues or because the agent has died, all held lines are shown. The log files of
the run always have every line.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable

from jaxlaunch import contract
from jaxlaunch.launcher.jobs.logs.lines import Line
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import StartLine, VerdictLine
from jaxlaunch.records.verdict import ExceptionFacts, Failure, Verdict

# First lines of the output of a process whose peer has died: tracebacks of Python and faulthandler,
# warnings about unfinished tasks, and errors of the C++ libraries below JAX (absl) and of C++.
_ECHO_START = re.compile(
    r"Traceback \(most recent call last\):|Exception (ignored )?in |Fatal Python error: "
    r"|[EF]\d{4} \d\d:\d\d:\d\d\.\d+ |terminate called |.*\[[EF] .*\bgloo\b"
    r"|  File \"[^\"]+\", line \d+$"
    r"|Task (exception was never retrieved|was destroyed)|\*\*\* Check failure stack trace: "
)
# faulthandler ends its stacks with the names of all extension modules, several kilobytes.
_EXTENSION_MODULES = "Extension modules: "
# A verdict follows a failure within this time: two seconds for a cause to arrive, and four for the
# stacks of the ranks.
HOLD_S = 7.0
# The processes of an attempt with a verdict are killed within this time.
KILL_S = 15.0


class HeldOutput:
    """Passes lines of agents and ranks to `show`, and holds back what survivors print."""

    def __init__(self, show: Callable[[Line], None], *, hides_echoes: bool) -> None:
        """Create the filter. Without `hides_echoes` every line is shown immediately."""
        self._show, self._hides_echoes = show, hides_echoes
        # The held lines of each rank, and the time of the first.
        self._held_by_rank: dict[int, tuple[float, list[Line]]] = {}
        # The verdict on the newest attempt of each host, and the time at which it arrived.
        self._verdicts: dict[int, tuple[float, Verdict]] = {}
        # Failures whose output was shown. The output of an equal failure is not shown again.
        self._shown_failures: list[Failure] = []

    def handle_line(self, line: Line) -> None:
        """Show a line, hold it back, or leave it out."""
        if line.rank is None:
            self._handle_agent_line(line)
        elif not self._hides_echoes:
            self._show(line)
        elif (verdict := self._newest_verdict(line.host)) is not None:
            if self._explains(line, verdict):
                self._show(line)
        elif line.rank in self._held_by_rank:
            self._held_by_rank[line.rank][1].append(line)
        elif _ECHO_START.match(line.text):
            self._held_by_rank[line.rank] = time.monotonic(), [line]
        else:
            self._show(line)

    def wait_s(self) -> float | None:
        """Return the seconds until `show_due` has lines to show, or None if none are held back."""
        hold_times = [held_at for held_at, _ in self._held_by_rank.values()]
        return max(0.0, min(hold_times) + HOLD_S - time.monotonic()) if hold_times else None

    def show_due(self) -> None:
        """Show the lines that were held back for HOLD_S, since no verdict explains them."""
        now = time.monotonic()
        for rank, (held_at, lines) in list(self._held_by_rank.items()):
            if now - held_at >= HOLD_S:
                del self._held_by_rank[rank]
                for line in lines:
                    self._show(line)

    def end_host(self, host: int) -> None:
        """Show the held lines of a host whose agent has ended or whose programs did not fail."""
        self._verdicts.pop(host, None)
        for line in self._pop_held_lines(host):
            self._show(line)

    def _handle_agent_line(self, line: Line) -> None:
        record = log_lines.parse_line(line.text)
        if isinstance(record, StartLine):
            self._verdicts.pop(line.host, None)
        elif isinstance(record, VerdictLine):
            self._settle_attempt(line.host, record.verdict)
        elif not log_lines.is_for_programs(line.text):
            self._show(line)

    def _settle_attempt(self, host: int, verdict: Verdict) -> None:
        """Show the held lines of a host that explain its verdict, and drop the others."""
        if verdict.code == contract.DONE or contract.outcome_for_code(verdict.code).is_stop:
            # Nothing failed, so the programs have handled the errors that they printed.
            self.end_host(host)
            return
        if verdict.failure in self._shown_failures:
            verdict = dataclasses.replace(verdict, rank=None)
        self._verdicts[host] = time.monotonic(), verdict
        held_lines = self._pop_held_lines(host)
        for line in held_lines:
            if self._explains(line, verdict):
                self._show(line)
        if any(line.rank == verdict.rank for line in held_lines):
            self._shown_failures.append(verdict.failure)

    def _pop_held_lines(self, host: int) -> list[Line]:
        """Remove and return the held lines of a host."""
        ranks = [rank for rank, (_, lines) in self._held_by_rank.items() if lines[0].host == host]
        return [line for rank in ranks for line in self._held_by_rank.pop(rank)[1]]

    def _newest_verdict(self, host: int) -> Verdict | None:
        """Return the verdict on the attempt that is ending on a host, or None."""
        arrived_at, verdict = self._verdicts.get(host, (0.0, None))
        return verdict if time.monotonic() - arrived_at < KILL_S else None

    def _explains(self, line: Line, verdict: Verdict) -> bool:
        """Return whether a line is of the rank that failed, and adds to the verdict's message."""
        if line.rank != verdict.rank or contract.outcome_for_code(verdict.code).is_user_fixable:
            return False
        return adds_to_message(line.text, verdict.failure)


def adds_to_message(text: str, failure: Failure) -> bool:
    """Return whether a line says more about a failure than the message of its verdict."""
    return not (text.startswith(_EXTENSION_MODULES) or _repeats_exception(text, failure))


def _repeats_exception(text: str, failure: Failure) -> bool:
    """Return whether a line of a traceback is the exception in the message of the failure."""
    facts = root_exception(failure)
    if facts is None or not facts.type:
        return False
    # A traceback also names the module of the type, and the verdict may cut the message.
    name, _, message = text.rstrip().partition(": ")
    is_type = name == facts.type or name.endswith(f".{facts.type}")
    is_prefix = message.startswith(facts.message) or facts.message.startswith(message)
    return is_type and is_prefix and bool(message) == bool(facts.message)


def root_exception(failure: Failure) -> ExceptionFacts | None:
    """Return the exception of a failure, or of its cause."""
    if failure.exception is not None or failure.cause is None:
        return failure.exception
    return root_exception(failure.cause)
