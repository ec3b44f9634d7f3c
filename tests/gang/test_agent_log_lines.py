"""What agents in pods write for readers of the Kubernetes API: lines in host 0's log, and termination messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang import log_lines
from tests.gang.agents import Gang, job, launch, program

POD = {contract.NODE: "node-7"}


def lines(text: str, kind: str) -> list[dict[str, Any]]:
    """The fields of every line of a kind in a log."""
    found = map(log_lines.parse, text.splitlines())
    return [parsed[1] for parsed in found if parsed is not None and parsed[0] == kind]


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
    gang, codes = launch(tmp_path, job(program(tmp_path, CRASH_LATER), in_place_limit=0), hosts=2, env=POD)
    assert codes == [83, 83]
    log = log_of_leader(gang)
    (verdict,) = lines(log, "verdict")
    assert verdict["verdict"]["message"] == "rank 1 raised at step 5: ValueError: fault 1"
    assert (verdict["attempt"], verdict["generation"]) == (1, 0)
    last = lines(log, "beat")[-1]
    assert (last["stage"], last["step"], last["committed"]) == ("leave", 5, 1)
    assert not lines(log, "past") and not lines(log, "tail")
    assert log_lines.PREFIX not in (tmp_path / "agent-0-1.err").read_text()


def test_host_0_names_the_hosts_that_are_missing(tmp_path: Path) -> None:
    with Gang(tmp_path, job(program(tmp_path, "pass")), hosts=3, env=POD) as gang:
        gang.start(0)
        beat = gang.until("a beat", lambda: lines(log_of_leader(gang), "beat"))[0]
        assert beat["stage"] == "gather" and beat["missing_count"] in (2, 3) and set(beat["missing"]) >= {1, 2}


def test_a_later_generation_writes_the_attempts_of_earlier_ones(tmp_path: Path) -> None:
    command = program(tmp_path, CRASH_LATER)
    launch(tmp_path, job(command, in_place_limit=1), hosts=2, env=POD)
    gang, _ = launch(tmp_path, job(command, in_place_limit=0), hosts=2, env=POD, generation=1)
    total, *each = lines(log := log_of_leader(gang), "past")
    assert (total["attempts"], total["ends"], total["unknown"]) == (2, {"crash": 2}, None)
    assert [(one["attempt"], one["generation"]) for one in each] == [(1, 0), (2, 0)]
    assert each[1]["verdict"]["message"] == "rank 1 raised at step 6: ValueError: fault 2"
    tails = lines(log, "tail")
    assert [tail["rank"] for tail in tails] == [1, 0]
    assert [line for line in tails[0]["lines"] if line.startswith("line of")] == [
        "line of attempt 1",
        "line of attempt 2",
    ]
    assert tails[0]["lines"][-1] == "ValueError: fault 2"


def test_without_a_shared_folder_the_reason_for_unknown_attempts_is_written(tmp_path: Path) -> None:
    env = {**POD, contract.RUN_DIR: "gs://bucket/run"}
    gang, _ = launch(tmp_path, job(program(tmp_path, "pass")), env=env, generation=1)
    (past,) = lines(log_of_leader(gang), "past")
    assert past["unknown"] == "the job has no run folder on storage that outlives its pods"
