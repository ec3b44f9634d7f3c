"""What agents in pods write for readers of the Kubernetes API: lines in host 0's log, and termination messages."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from jaxlaunch import contract
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import BeatLine, PastLine, TailLine, VerdictLine
from tests.gang.agents import Gang, job, launch, program

L = TypeVar("L", PastLine, TailLine, BeatLine, VerdictLine)
POD = {contract.NODE: "node-7"}


def lines(text: str, kind: type[L]) -> list[L]:
    """Every line of a kind in a log."""
    return [
        found for found in map(log_lines.parse_line, text.splitlines()) if isinstance(found, kind)
    ]


def log_of_leader(gang: Gang) -> str:
    return (gang.folder / f"agent-{gang.generation}-0.err").read_text()


def test_outside_of_a_pod_no_line_is_written(tmp_path: Path) -> None:
    gang, codes = launch(tmp_path, job(program(tmp_path, "say(phase='step', step=1)")))
    assert codes == [0] and log_lines.PREFIX not in gang.talk + gang.out


CRASH_LATER = """
say(phase="step", step=4 + ATTEMPT)
if RANK == 0: say(committed=1)
print("line of attempt", ATTEMPT)
mark(f"printed-{ATTEMPT}")
wait_for(f"printed-{ATTEMPT}-{1 - RANK}")
if RANK == 1: raise ValueError(f"fault {ATTEMPT}")
time.sleep(3600)
"""


def test_host_0_writes_the_state_of_the_gang_and_how_it_ended(tmp_path: Path) -> None:
    gang, codes = launch(
        tmp_path, job(program(tmp_path, CRASH_LATER), in_place_limit=0), hosts=2, env=POD
    )
    assert codes == [83, 83]
    log = log_of_leader(gang)
    (verdict,) = lines(log, VerdictLine)
    assert verdict.verdict.message == "rank 1 raised at step 5: ValueError: fault 1"
    assert (verdict.attempt, verdict.generation) == (1, 0)
    last = lines(log, BeatLine)[-1]
    assert (last.stage, last.step, last.committed) == ("leave", 5, 1)
    assert not lines(log, PastLine) and not lines(log, TailLine)
    assert log_lines.PREFIX not in (tmp_path / "agent-0-1.err").read_text()


def test_a_later_generation_writes_the_attempts_of_earlier_ones(tmp_path: Path) -> None:
    command = program(tmp_path, CRASH_LATER)
    launch(tmp_path, job(command, in_place_limit=1), hosts=2, env=POD)
    gang, _ = launch(tmp_path, job(command, in_place_limit=0), hosts=2, env=POD, generation=1)
    total, *each = lines(log := log_of_leader(gang), PastLine)
    assert (total.attempts, total.ends, total.unknown) == (2, {"crash": 2}, None)
    assert [(one.attempt, one.generation) for one in each] == [(1, 0), (2, 0)]
    assert (
        each[1].verdict is not None
        and each[1].verdict.message == "rank 1 raised at step 6: ValueError: fault 2"
    )
    tails = lines(log, TailLine)
    assert [tail.rank for tail in tails] == [1, 0]
    assert [line for line in tails[0].lines if line.startswith("line of")] == [
        "line of attempt 1",
        "line of attempt 2",
    ]
    assert tails[0].lines[-1] == "ValueError: fault 2"
