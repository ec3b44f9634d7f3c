"""A pytest plugin that writes how many tests ran, and the name of each that failed, to the file of a variable."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest

FILE = "TEST_FAILURES"


class Failure(NamedTuple):
    """A test that failed."""

    name: str
    reason: str  # when, and the first line of why

    @property
    def cause(self) -> tuple[str, str]:
        """What tests share that fail by one fault: those of a file whose fixture could not be set up."""
        file = self.name.partition("::")[0]
        return (file, self.reason) if self.reason.startswith("(setup)") else (self.name, "")


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    write(report)


@pytest.hookimpl
def pytest_collectreport(report: pytest.CollectReport) -> None:
    write(report)


@pytest.hookimpl
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran = sum(len(terminalreporter.getreports(outcome)) for outcome in ("passed", "failed"))
    _append(f"RAN\t{ran}")


def write(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Appends a line for a failed report."""
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = f": {crash.message.splitlines()[0]}" if crash and crash.message else ""
        _append(f"FAILED\t{report.nodeid}\t({report.when or 'collection'}){reason}")


def _append(line: str) -> None:
    """Of a parallel run only the controller, which hears of every test, writes."""
    path = os.environ.get(FILE)
    if path and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as lines:
            lines.write(f"{line}\n")


def read(path: Path) -> list[Failure]:
    """What such a file names, each once."""
    return list(
        dict.fromkeys(Failure(*fields) for kind, *fields in _lines(path) if kind == "FAILED")
    )


def ran(path: Path) -> int:
    """How many tests ran, by such a file."""
    return sum(int(fields[0]) for kind, *fields in _lines(path) if kind == "RAN")


def _lines(path: Path) -> list[list[str]]:
    return [line.split("\t") for line in path.read_text().splitlines()]
