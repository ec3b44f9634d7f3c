from __future__ import annotations

from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.report.run import RunReader
from tests.launcher.report import made_runs


@pytest.mark.parametrize("codes", [(0,), (137, 0), (137, 83, 82, 81, 80), (83,) * 40])
def test_strip_sums_match_clock_and_summary(tmp_path: Path, codes: tuple[int, ...]) -> None:
    by_summary = made_runs.run(tmp_path / "run", codes)

    timeline = RunReader(tmp_path / "run").read_report().to_json()

    wall = sum(by_summary.values())
    assert timeline["wall_s"] == pytest.approx(wall, rel=0.001)
    assert sum(end - begin for begin, end, _ in timeline["strip"]) == pytest.approx(wall, rel=0.001)
    for cause, spent in by_summary.items():
        assert timeline["seconds"].get(cause, 0.0) == pytest.approx(
            spent, abs=0.01 + 0.001 * wall
        ), cause
    assert all(
        earlier[1] == pytest.approx(later[0])
        for earlier, later in zip(timeline["strip"], timeline["strip"][1:], strict=False)
    )


def test_attempts_keep_verdicts_in_order(tmp_path: Path) -> None:
    made_runs.run(tmp_path / "run", (137, 83, 0))

    attempts = RunReader(tmp_path / "run").read_report().to_json()["attempts"]

    assert [(attempt["number"], attempt["code"], attempt["cause"]) for attempt in attempts] == [
        (1, 137, "killed"),
        (2, 83, "crash"),
        (3, 0, "done"),
    ]
    assert all(attempt["from"] < attempt["to"] for attempt in attempts)
    assert all(
        attempt["to"] <= two["from"] for attempt, two in zip(attempts, attempts[1:], strict=False)
    )


def test_end_of_attempt_has_its_cost_and_the_step_after_it(tmp_path: Path) -> None:
    """The costs are those in the sentence of the page. The last attempt costs no restart."""
    made_runs.run(tmp_path / "run", (137, 83, 81, 0))

    data = RunReader(tmp_path / "run").read_report().to_json()

    # 3 s of lost steps, 2 s until the next attempt, and 11.5 s until its first step.
    assert [attempt["end"] for attempt in data["attempts"]] == [
        ["rank 1 killed", "16 s lost", "resumed at step 100"],
        ["rank 1 failed", "16 s lost", "resumed at step 200"],
        ["lost host", "16 s lost", "resumed at step 300"],
        [],
    ]
    assert "1 kill and 1 crash and 1 lost host cost 50 s." in data["sentence"]["text"]


def test_lost_work_comes_last(tmp_path: Path) -> None:
    made_runs.run(tmp_path / "run", (137, 0))

    timeline = RunReader(tmp_path / "run").read_report().to_json()

    first = [
        cause
        for begin, _, cause in timeline["strip"]
        if begin < timeline["attempts"][0]["to"] - 1e-6
    ]
    assert first.index("lost_work") > max(at for at, cause in enumerate(first) if cause == "step")


def test_time_between_starts_is_not_on_axis(tmp_path: Path) -> None:
    import dataclasses
    import json

    made_runs.run(tmp_path / "run", (0,))
    path = tmp_path / "run" / "summary.json"
    position = json.loads(path.read_text())
    later = {**position["starts"][0], "start": 2, "uid": "second"}
    for key in ("started", "ended"):
        later[key] += 90_000
    position["starts"].append(later)
    position["of"]["uid"] = "second"
    path.write_text(json.dumps(position))
    record = dataclasses.replace(
        made_runs.attempt(1, 35.0, 0), uid="second", started=later["started"], ended=later["ended"]
    )
    with open(tmp_path / "run" / "attempts.jsonl", "a") as file:
        file.write(json.dumps(record.to_json()) + "\n")

    timeline = RunReader(tmp_path / "run").read_report().to_json()

    assert timeline["wall_s"] == pytest.approx(2 * 35.0, abs=1)
    assert [start["at"] for start in timeline["starts"]] == pytest.approx([0, 35.0], abs=1)
    assert [attempt["start"] for attempt in timeline["attempts"]] == [1, 2]


def test_hung_rank_and_those_that_wait_have_their_own_letters(tmp_path: Path) -> None:
    """It hung in the last 12 s; before that, and in its first half, all ranks were in a step."""
    wall_s = sum(made_runs.run(tmp_path / "run", (contract.HANG,)).values())
    made_runs.ranks(tmp_path / "run", 4, wall_s, slow=3)
    made_runs.hang(tmp_path / "run", 2, 12.0, "in step in read (tasks.py:12)")

    data = RunReader(tmp_path / "run").read_report().to_json()["heat"]

    (hang,) = data["hangs"]
    assert (hang["rank"], hang["place"]) == (2, "in step in read (tasks.py:12)")
    assert hang["to"] - hang["from"] == pytest.approx(12.0)
    assert (data["letters"]["h"], data["letters"]["w"]) == ("hung", "waits")
    for begin, end, letters, _ in data["columns"]:
        middle = (begin + end) / 2
        if hang["from"] < begin and end < hang["to"]:
            assert letters == "w2hw"
        elif end < hang["from"]:
            assert letters == ("s4" if middle < wall_s / 2 - 1 else letters) and "h" not in letters
