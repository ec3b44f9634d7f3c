from __future__ import annotations

from pathlib import Path

import pytest

from jaxlaunch.launcher.report.run import RunReader
from tests.launcher.report import made_runs


@pytest.mark.parametrize("codes", [(0,), (137, 0), (137, 83, 82, 81, 80), (83,) * 40])
def test_the_strip_adds_up_to_the_clock_and_to_the_seconds_of_the_summary(
    tmp_path: Path, codes: tuple[int, ...]
) -> None:
    by_summary = made_runs.run(tmp_path / "run", codes)

    seen = RunReader(tmp_path / "run").read_report().to_json()

    wall = sum(by_summary.values())
    assert seen["wall_s"] == pytest.approx(wall, rel=0.001)
    assert sum(end - begin for begin, end, _ in seen["strip"]) == pytest.approx(wall, rel=0.001)
    for cause, spent in by_summary.items():
        assert seen["seconds"].get(cause, 0.0) == pytest.approx(spent, abs=0.01 + 0.001 * wall), (
            cause
        )
    assert all(
        before[1] == pytest.approx(after[0])
        for before, after in zip(seen["strip"], seen["strip"][1:], strict=False)
    )


def test_every_verdict_on_the_strip_is_that_of_its_attempt_in_order(tmp_path: Path) -> None:
    made_runs.run(tmp_path / "run", (137, 83, 0))

    attempts = RunReader(tmp_path / "run").read_report().to_json()["attempts"]

    assert [(one["number"], one["code"], one["cause"]) for one in attempts] == [
        (1, 137, "killed"),
        (2, 83, "crash"),
        (3, 0, "done"),
    ]
    assert all(one["from"] < one["to"] for one in attempts)
    assert all(one["to"] <= two["from"] for one, two in zip(attempts, attempts[1:], strict=False))


def test_lost_work_is_the_last_of_the_steps_of_its_attempt(tmp_path: Path) -> None:
    made_runs.run(tmp_path / "run", (137, 0))

    seen = RunReader(tmp_path / "run").read_report().to_json()

    first = [cause for begin, _, cause in seen["strip"] if begin < seen["attempts"][0]["to"] - 1e-6]
    assert first.index("lost_work") > max(at for at, cause in enumerate(first) if cause == "step")


def test_the_time_between_two_starts_is_not_on_the_axis(tmp_path: Path) -> None:
    import dataclasses
    import json

    made_runs.run(tmp_path / "run", (0,))
    path = tmp_path / "run" / "summary.json"
    found = json.loads(path.read_text())
    later = {**found["starts"][0], "start": 2, "uid": "second"}
    for key in ("started", "ended"):
        later[key] += 90_000
    found["starts"].append(later)
    found["of"]["uid"] = "second"
    path.write_text(json.dumps(found))
    record = dataclasses.replace(
        made_runs.attempt(1, 35.0, 0), uid="second", started=later["started"], ended=later["ended"]
    )
    with open(tmp_path / "run" / "attempts.jsonl", "a") as file:
        file.write(json.dumps(record.to_json()) + "\n")

    seen = RunReader(tmp_path / "run").read_report().to_json()

    assert seen["wall_s"] == pytest.approx(2 * 35.0, abs=1)
    assert [start["at"] for start in seen["starts"]] == pytest.approx([0, 35.0], abs=1)
    assert [one["start"] for one in seen["attempts"]] == [1, 2]
