"""Write the number of tests and the name of each failed one to a variable's file (a plugin)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

FILE_VARIABLE = "TEST_FAILURES"


class Failure(NamedTuple):
    """A test that failed."""

    name: str
    reason: str  # when, and the first line of why

    @property
    def cause(self) -> tuple[str, str]:
        """What tests share that fail by one fault: the file whose fixture could not be set up."""
        file = self.name.partition("::")[0]
        return (file, self.reason) if self.reason.startswith("(setup)") else (self.name, "")


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    write_failure(report)


@pytest.hookimpl
def pytest_collectreport(report: pytest.CollectReport) -> None:
    write_failure(report)


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran = sum(len(terminalreporter.getreports(outcome)) for outcome in ("passed", "failed"))
    _append_line(f"RAN\t{ran}")


def write_failure(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Append a line for a failed report."""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = f": {crash.message.splitlines()[0]}" if crash and crash.message else ""
        _append_line(f"FAILED\t{report.nodeid}\t({report.when or 'collection'}){reason}")


def _append_line(line: str) -> None:
    """Append a line, in a parallel run only in the controller, which hears of every test."""
    path = os.environ.get(FILE_VARIABLE)
    if path and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as lines:
            lines.write(f"{line}\n")


def read_failures(path: Path) -> list[Failure]:
    """Return what such a file names, each once."""
    return list(
        dict.fromkeys(Failure(*fields) for kind, *fields in _read_lines(path) if kind == "FAILED")
    )


def count_tests(path: Path) -> int:
    """Return how many tests ran."""
    return sum(int(fields[0]) for kind, *fields in _read_lines(path) if kind == "RAN")


def _read_lines(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()]
