"""What agents in pods say for readers of the Kubernetes API: words in host 0's log, and termination messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import words
from launcher.agent.herald import Herald, View
from launcher.agent.progress import Status
from launcher.agent.verdict import Verdict, of_code
from tests.gang.agents import Gang, job, launch, program
from trainer import contract

POD = {contract.NODE: "node-7"}


def said(text: str, kind: str) -> list[dict[str, Any]]:
    """Every word of a kind in a log."""
    found = [words.parse(line) for line in text.splitlines()]
    return [word[1] for word in found if word is not None and word[0] == kind]


def log_of_leader(gang: Gang) -> str:
    return (gang.folder / f"agent-{gang.generation}-0.err").read_text()


# --- the format -------------------------------------------------------------------------------------------------------


def test_a_word_is_read_as_it_was_written() -> None:
    assert words.parse(words.word("beat", {"step": 3, "phase": "data"})) == ("beat", {"step": 3, "phase": "data"})


@pytest.mark.parametrize(
    "line",
    ["", "jaxlaunch: ", "jaxlaunch: beat", "jaxlaunch: beat {", "jaxlaunch: beat 3", "jaxlaunch: boast {}", "[0] x"],
)
def test_any_other_line_is_none(line: str) -> None:
    assert words.parse(line) is None


def test_a_program_cannot_pass_for_the_agent() -> None:
    assert not words.is_word("[0] " + words.word("verdict", {}))


def test_a_word_that_was_cut_short_is_still_not_for_people() -> None:
    assert words.is_word(words.word("tail", {"lines": ["a" * 50]})[:40])


@pytest.mark.parametrize("fill", ["x", "\n", "\x00", "é", "🦊"])
@pytest.mark.parametrize("length", [0, 100, 3_000, 50_000])
def test_a_farewell_fits_whatever_the_program_printed(fill: str, length: int) -> None:
    verdict = of_code(83, "rank 1 raised: " + fill * length, rank=1, traceback=fill * length + "\nValueError: last")
    text = words.farewell(verdict.to_json(), host=1, generation=2, attempt=3)
    assert len(text.encode()) <= words.MAX_MESSAGE
    read = words.parse_farewell(text)
    assert read is not None and (read["host"], read["generation"], read["attempt"]) == (1, 2, 3)
    assert read["verdict"]["code"] == 83 and read["verdict"]["message"].startswith("rank 1 raised: ")
    assert read["verdict"]["traceback"].endswith("ValueError: last")


@pytest.mark.parametrize("message", [None, "", "Killed", "[1, 2]", '{"verdict": {}}', '{"jaxlaunch": 1}'])
def test_anothers_termination_message_is_none(message: str | None) -> None:
    assert words.parse_farewell(message) is None


# --- when a word is said ----------------------------------------------------------------------------------------------


class Listener:
    """A herald whose words are kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.herald = Herald(0, self.lines.append)

    def look(self, at: float, **changes: Any) -> None:
        statuses = {rank: Status(phase=phase) for rank, phase in enumerate(changes.pop("phases", ["step"]))}
        given = dict(stage="run", attempt=1, missing=[], refused=[], step=None, committed=None, overdue=None)
        given |= {"seconds": {}, "restarts": {}, "metrics": None, "statuses": statuses, **changes}
        self.herald.look(lambda: View(**given), at)  # type: ignore[arg-type]

    @property
    def beats(self) -> list[dict[str, Any]]:
        return said("\n".join(self.lines), "beat")


def test_a_change_of_phase_is_told_and_the_loop_of_training_is_not() -> None:
    listener = Listener()
    for at, phase in enumerate(["init", "init", "compile", "step", "data", "save", "step"]):
        listener.look(3.0 * at, phases=[phase] * 2)
    assert [beat["phase"] for beat in listener.beats] == ["init", "compile", "step"]


def test_changes_in_a_hurry_are_told_once() -> None:
    listener = Listener()
    for tick in range(10):
        listener.look(0.2 * tick, stage="gather", missing=list(range(10 - tick)))
    assert len(listener.beats) == 1


def test_silence_ends_every_fifteen_seconds() -> None:
    listener = Listener()
    for second in range(61):
        listener.look(float(second), step=second)
    assert [beat["step"] for beat in listener.beats] == [0, 15, 30, 45, 60]


def test_a_beat_of_ten_thousand_ranks_is_short() -> None:
    listener = Listener()
    listener.look(0.0, phases=["step"] * 9_999 + ["data"], missing=list(range(5_000)))
    (beat,) = listener.beats
    assert len(listener.lines[0]) < 2_000
    assert beat["counts"] == {"step": 9_999, "data": 1} and beat["phases"]["data"] == [9_999]
    assert beat["missing_count"] == 5_000


def test_only_a_newer_commit_has_a_time() -> None:
    listener = Listener()
    listener.look(0.0)
    listener.look(20.0, committed=7)
    listener.look(40.0, committed=7)
    none, first, second = listener.beats
    assert (none["committed"], none["committed_at"]) == (None, None)
    assert first["committed"] == 7 and first["committed_at"] == second["committed_at"] > 0


# --- real agents ------------------------------------------------------------------------------------------------------


def test_outside_of_a_pod_no_word_is_said(tmp_path: Path) -> None:
    gang, codes = launch(tmp_path, job(program(tmp_path, "say(phase='step', step=1)")))
    assert codes == [0] and words.PREFIX not in gang.talk + gang.out


CRASH_LATER = """
say(phase="step", step=4 + ATTEMPT)
if RANK == 0: say(committed=1)
print("line of attempt", ATTEMPT)
mark(f"printed-{ATTEMPT}")
wait_for(f"printed-{ATTEMPT}-{1 - RANK}")
if RANK == 1: raise ValueError(f"fault {ATTEMPT}")
time.sleep(3600)
"""


def test_host_0_tells_how_the_gang_stands_and_how_it_ended(tmp_path: Path) -> None:
    gang, codes = launch(tmp_path, job(program(tmp_path, CRASH_LATER), in_place_budget=0), hosts=2, env=POD)
    assert codes == [83, 83]
    log = log_of_leader(gang)
    (verdict,) = said(log, "verdict")
    assert verdict["verdict"]["message"] == "rank 1 raised at step 5: ValueError: fault 1"
    assert (verdict["attempt"], verdict["generation"]) == (1, 0)
    last = said(log, "beat")[-1]
    assert (last["stage"], last["step"], last["committed"]) == ("leave", 5, 1)
    assert not said(log, "past") and not said(log, "tail")
    assert words.PREFIX not in (tmp_path / "agent-0-1.err").read_text()


def test_host_0_names_the_hosts_that_miss(tmp_path: Path) -> None:
    with Gang(tmp_path, job(program(tmp_path, "pass")), hosts=3, env=POD) as gang:
        gang.start(0)
        beat = gang.until("a beat", lambda: said(log_of_leader(gang), "beat"))[0]
        assert beat["stage"] == "gather" and beat["missing_count"] in (2, 3) and set(beat["missing"]) >= {1, 2}


def test_a_later_generation_tells_of_the_earlier_ones(tmp_path: Path) -> None:
    command = program(tmp_path, CRASH_LATER)
    launch(tmp_path, job(command, in_place_budget=1), hosts=2, env=POD)
    gang, _ = launch(tmp_path, job(command, in_place_budget=0), hosts=2, env=POD, generation=1)
    total, *each = said(log := log_of_leader(gang), "past")
    assert (total["attempts"], total["ends"], total["unknown"]) == (2, {"crash": 2}, None)
    assert [(one["attempt"], one["generation"]) for one in each] == [(1, 0), (2, 0)]
    assert each[1]["verdict"]["message"] == "rank 1 raised at step 6: ValueError: fault 2"
    tails = said(log, "tail")
    assert [tail["rank"] for tail in tails] == [1, 0]
    assert [line for line in tails[0]["lines"] if line.startswith("line of")] == [
        "line of attempt 1",
        "line of attempt 2",
    ]
    assert tails[0]["lines"][-1] == "ValueError: fault 2"


def test_without_a_shared_folder_it_is_said_that_nothing_is_known(tmp_path: Path) -> None:
    env = {**POD, contract.RUN_DIR: "gs://bucket/run"}
    gang, _ = launch(tmp_path, job(program(tmp_path, "pass")), env=env, generation=1)
    (past,) = said(log_of_leader(gang), "past")
    assert past["unknown"] == "the job has no folder that outlives its pods"


def test_tails_of_many_ranks_stay_bounded(tmp_path: Path) -> None:
    from launcher.agent.memory import TAIL_BYTES, Memory, log_path

    for rank in range(100):
        path = log_path(tmp_path, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{rank} says {line}\n" for line in range(5_000)))
    tails = Memory(tmp_path, print).tails([73, *range(73), *range(74, 100)])
    assert tails[0][0] == 73 and sum(len(line) + 1 for _, lines in tails for line in lines) <= TAIL_BYTES
    assert len(tails[0][1]) > len(tails[1][1]) and all(lines[-1].endswith("says 4999") for _, lines in tails)


def test_a_verdict_reads_the_same_after_it_was_said() -> None:
    verdict = of_code(83, "rank 1 raised", rank=1, host=0, step=3, traceback="Traceback\nValueError")
    read = words.parse_farewell(words.farewell(verdict.to_json(), 0, 0, 1))
    assert read is not None and Verdict.from_json(json.loads(json.dumps(read["verdict"]))) == verdict
