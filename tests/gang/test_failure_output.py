"""What a terminal shows of a failed run: some of tests/failure_output, the others are extended."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failure_output import CASES, run_case
from tests.gang.test_storage_faults import has_compiler

# A survivor prints tracebacks, an attempt is repeated, and a program reports nothing.
COVERED = ("a rank is killed", "a rank raises in each attempt", "a rank never steps")


@pytest.mark.parametrize(
    "name",
    [name if name in COVERED else pytest.param(name, marks=pytest.mark.extended) for name in CASES],
)
def test_terminal_ends_with_the_cause_and_repeats_nothing(name: str, tmp_path: Path) -> None:
    if "disk" in name and not has_compiler():
        pytest.skip("needs a C compiler")
    shown = run_case(name, tmp_path)
    assert not shown.find_faults(), "\n".join(shown.lines)
    if name == "a rank is killed":
        # What the terminal does not show is in the log of the rank.
        (log,) = (tmp_path / "runs" / "t" / "starts" / "1" / "logs").glob("rank-0.log")
        assert "Traceback" in log.read_text()
        assert not any("Traceback" in line for line in shown.lines)
