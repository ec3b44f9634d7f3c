"""What a terminal shows of a failed run: some of tests/failure_output, which runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.failure_output import run_case
from tests.gang.test_storage_faults import has_compiler

# A survivor prints tracebacks, an attempt is repeated, and a program reports nothing.
COVERED = ("a rank is killed", "a rank raises in each attempt", "a rank never steps")
# One of each kind of output: of the coordinator's death, a long traceback, another program's words,
# a stack, a host's end, and a trainer's error. The others differ from these in the verdict alone.
MORE_COVERED = (
    "rank 0 is killed",
    "an exception has a cause",
    "an error of jax",
    "a module is missing",
    "an exit code",
    "a segmentation fault",
    "a rank hangs",
    "an agent is killed",
    "a command is missing",
    "the disk is full",
    "the loss is not finite",
)


@pytest.mark.parametrize(
    "name",
    [*COVERED, *(pytest.param(name, marks=pytest.mark.extended) for name in MORE_COVERED)],
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
