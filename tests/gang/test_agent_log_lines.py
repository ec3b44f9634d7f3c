"""What agents in pods write for readers of the Kubernetes API: lines in the log of host 0."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from jaxlaunch import contract
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import BeatLine, PastLine, TailLine, VerdictLine
from tests.gang.agents import Gang, make_job, run_gang, run_program, write_program

Line = TypeVar("Line", PastLine, TailLine, BeatLine, VerdictLine)
POD = {contract.NODE: "node-7"}


def parse_lines(text: str, kind: type[Line]) -> list[Line]:
    """Return every line of a kind in a log."""
    return [line for line in map(log_lines.parse_line, text.splitlines()) if isinstance(line, kind)]


def read_leader_log(gang: Gang) -> str:
    return (gang.folder / f"agent-{gang.generation}-0.err").read_text()


def test_no_line_is_written_outside_of_a_pod(tmp_path: Path) -> None:
    gang, codes = run_program(tmp_path, "say(phase='step', step=1)")
    assert codes == [0] and log_lines.PREFIX not in gang.stderr + gang.stdout


CRASH_LATER = """
say(phase="step", step=4 + ATTEMPT)
if RANK == 0: say(committed=1)
print("line of attempt", ATTEMPT)
mark(f"printed-{ATTEMPT}")
wait_for(f"printed-{ATTEMPT}-{1 - RANK}")
if RANK == 1: raise ValueError(f"fault {ATTEMPT}")
time.sleep(3600)
"""


def test_host_0_writes_the_state_of_the_gang_and_its_verdict(tmp_path: Path) -> None:
    gang, codes = run_program(tmp_path, CRASH_LATER, in_place_limit=0, hosts=2, env=POD)
    assert codes == [83, 83]
    log = read_leader_log(gang)
    (verdict,) = parse_lines(log, VerdictLine)
    assert verdict.verdict.message == "rank 1 raised at step 5: ValueError: fault 1"
    assert (verdict.attempt, verdict.generation) == (1, 0)
    last = parse_lines(log, BeatLine)[-1]
    assert (last.stage, last.step, last.committed) == ("leave", 5, 1)
    assert not parse_lines(log, PastLine) and not parse_lines(log, TailLine)
    assert log_lines.PREFIX not in (tmp_path / "agent-0-1.err").read_text()


def test_later_generation_writes_the_attempts_of_earlier_ones(tmp_path: Path) -> None:
    command = write_program(tmp_path, CRASH_LATER)
    run_gang(tmp_path, make_job(command, in_place_limit=1), hosts=2, env=POD)
    gang, _ = run_gang(
        tmp_path, make_job(command, in_place_limit=0), hosts=2, env=POD, generation=1
    )
    total, *past_attempts = parse_lines(log := read_leader_log(gang), PastLine)
    assert (total.attempts, total.ends, total.unknown) == (2, {"crash": 2}, None)
    assert [(attempt.attempt, attempt.generation) for attempt in past_attempts] == [(1, 0), (2, 0)]
    assert past_attempts[1].verdict is not None
    assert past_attempts[1].verdict.message == "rank 1 raised at step 6: ValueError: fault 2"
    tails = parse_lines(log, TailLine)
    assert [tail.rank for tail in tails] == [1, 0]
    assert [line for line in tails[0].lines if line.startswith("line of")] == [
        "line of attempt 1",
        "line of attempt 2",
    ]
    assert tails[0].lines[-1] == "ValueError: fault 2"
