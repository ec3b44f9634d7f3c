"""A pytest plugin that writes the name of each test that fails to the file of an environment variable."""

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


def write(report: pytest.TestReport | pytest.CollectReport) -> None:
    """Appends a line for a failed report. Of a parallel run only the controller, which hears of every test, writes."""
    path = os.environ.get(FILE)
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        crash = getattr(report.longrepr, "reprcrash", None)
        reason = f": {crash.message.splitlines()[0]}" if crash and crash.message else ""
        with open(path, "a") as lines:
            lines.write(f"FAILED\t{report.nodeid}\t({report.when or 'collection'}){reason}\n")


def read(path: Path) -> list[Failure]:
    """What such a file names, each once."""
    return list(dict.fromkeys(Failure(*line.split("\t")[1:]) for line in path.read_text().splitlines()))
