"""The time left is near what a run then takes. The reference is the record of that time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jaxlaunch.launcher.cli.live_block import LiveBlock
from jaxlaunch.launcher.cli.status import status_command
from jaxlaunch.launcher.kubernetes.objects import format_age
from jaxlaunch.launcher.report import remaining
from jaxlaunch.launcher.report.run import RunReader
from jaxlaunch.launcher.report.run_files import CurveFile
from jaxlaunch.records.rank_history import RankHistory
from jaxlaunch.runs.layout import hold_lock
from tests.launcher.report import made_runs

METRICS = Path(__file__).parents[2] / "fixtures/metrics"


@dataclasses.dataclass
class Simulated:
    """A training whose seconds are known; `rows` are what it writes to metrics.jsonl."""

    steps: int
    step_s: float
    eval_every: int | None = None
    eval_s: float = 0.0
    save_every: int | None = None
    save_s: float = 0.0
    compile_s: float = 60.0
    log_every: int = 10
    has_step_s: bool = True
    first_eval_s: float = 5.0

    def run(self, now: float = 0.0, begin: int = 0) -> list[dict[str, Any]]:
        """Return the rows of an attempt that begins after a step."""
        rows, spent = list[dict[str, Any]](), {"eval_s": 0.0, "save_s": 0.0, "wall_s": 0.0}
        # The programs compile before the loop, and the first dispatches are slower.
        now += self.compile_s
        for step in range(begin + 1, self.steps + 1):
            seconds = self.step_s * (10.0 if step <= begin + 2 else 1.0)
            spent["wall_s"], now = spent["wall_s"] + seconds, now + seconds
            if step % self.log_every == 0 or step == self.steps:
                row = {"step": step, "loss": 1.0, "time": now}
                rows.append(row | ({**spent, "step_s": self.step_s} if self.has_step_s else {}))
                spent = dict.fromkeys(spent, 0.0)
            for key, every, pause_s in (
                ("eval_s", self.eval_every, self.eval_s),
                ("save_s", self.save_every, self.save_s),
            ):
                if pause_s and (step == self.steps or (every and step % every == 0)):
                    # The first evaluation compiles its program.
                    first_s = (
                        self.first_eval_s if key == "eval_s" and every and step == every else 0.0
                    )
                    spent[key] += pause_s + first_s
                    spent["wall_s"], now = spent["wall_s"] + pause_s + first_s, now + pause_s
                    now += first_s
        self.ended_at = now
        return rows

    @property
    def job(self) -> dict[str, Any]:
        """The job that says how often it evaluates and saves."""
        train = {"steps": self.steps, "eval": {"every": self.eval_every}}
        return {"train": train | {"checkpoint": {"every": self.save_every}}}


CASES = {
    "digits": Simulated(600, 0.05, 200, 0.3, 200, 0.4, first_eval_s=0.2),
    "LM with evaluations": Simulated(2000, 0.4, 50, 12.0, 100, 6.0),
    "LM with one evaluation of minutes": Simulated(2000, 0.4, 100, 240.0, 500, 6.0),
    "only at the end": Simulated(5000, 0.02, None, 1.0, None, 1.0),
    "a program of one's own": Simulated(1000, 0.3, 20, 0.5, has_step_s=False),
    "a line for each step": Simulated(300, 2.0, 10, 3.0, 50, 9.0, compile_s=600.0, log_every=1),
}


def estimate(
    path: Path, rows: list[dict[str, Any]], job: dict[str, Any], step: int, total: int
) -> float | None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = CurveFile(path)
    file.read_new_rows()
    return remaining.estimate_remaining_s(file, job, step, total)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_time_left_of_simulated_runs(tmp_path: Path, name: str, share: float) -> None:
    case = CASES[name]
    rows = case.run()
    seen = [row for row in rows if row["step"] <= share * case.steps]
    left_s = case.ended_at - seen[-1]["time"]

    shown = estimate(tmp_path / "rows", seen, case.job, seen[-1]["step"], case.steps)

    assert shown == pytest.approx(left_s, rel=0.25)


@pytest.mark.parametrize("killed_at", [0.08, 0.5])
def test_time_left_of_a_run_that_resumes(tmp_path: Path, killed_at: float) -> None:
    """It was killed after its newest save, and an hour later its next attempt compiles again."""
    case = dataclasses.replace(CASES["LM with evaluations"])
    saved = int(killed_at * case.steps) // 100 * 100
    first = [row for row in case.run() if row["step"] <= saved]
    rows = [*first, *case.run(first[-1]["time"] + 3600.0, saved)]
    seen = [row for row in rows if row["step"] <= saved + 50]
    left_s = case.ended_at - seen[-1]["time"]

    shown = estimate(tmp_path / "rows", seen, case.job, seen[-1]["step"], case.steps)

    assert shown == pytest.approx(left_s, rel=0.25)


def test_first_of_two_evaluations_is_not_the_usual_one(tmp_path: Path) -> None:
    """It compiled for 60 s; the second one, like the 36 ahead, takes 2 s."""
    case = Simulated(2000, 0.1, 50, 2.0, first_eval_s=60.0)
    seen = [row for row in case.run() if row["step"] <= 110]

    shown = estimate(tmp_path / "rows", seen, case.job, 110, case.steps)

    assert shown == pytest.approx(case.ended_at - seen[-1]["time"], rel=0.25)


@pytest.mark.parametrize(
    ("name", "eval_every", "save_every", "total", "shares"),
    [
        ("digits", 100, 200, 600, (0.1, 0.3, 0.5, 0.7)),
        ("lm", 40, 100, 400, (0.1, 0.4, 0.7)),
        # Of what is ahead, nobody knows the second kill.
        ("resumed_lm", 400, 100, 2400, (0.1,)),
    ],
)
def test_time_left_of_a_recorded_run(
    tmp_path: Path,
    name: str,
    eval_every: int,
    save_every: int,
    total: int,
    shares: tuple[float, ...],
) -> None:
    """tests/fixtures/README.md says what ran."""
    rows = [json.loads(line) for line in (METRICS / f"{name}.jsonl").read_text().splitlines()]
    job = {"train": {"eval": {"every": eval_every}, "checkpoint": {"every": save_every}}}
    for share in shares:
        seen = [row for row in rows if row["step"] <= total * share]
        left_s = rows[-1]["time"] - seen[-1]["time"]

        shown = estimate(tmp_path / "rows", seen, job, seen[-1]["step"], total)

        assert shown == pytest.approx(left_s, rel=0.25), share


def test_program_that_reports_its_total_has_a_bar_and_time_left(tmp_path: Path) -> None:
    """On the page, in `launcher status` and in the live block: 300 of 1,000 steps of 0.3 s."""
    run = tmp_path / "run"
    program = "name: own\naccelerator: {type: cpu}\ncommand: [python, train.py]\n"
    made_runs.run(run, points=0, job=program)
    case = CASES["a program of one's own"]
    rows = [row for row in case.run() if row["step"] <= 300]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = json.loads((run / "summary.json").read_text())
    summary |= {"verdict": None, "step": 300, "steps": 1000}
    (run / "summary.json").write_text(json.dumps(summary))
    left_s = case.ended_at - rows[-1]["time"]

    with hold_lock(run):
        page = RunReader(run).read_report().to_json()
        status = CliRunner().invoke(status_command, [str(run)]).output
        block = LiveBlock(run)
        block._rows.read_new_rows()
        line, *_ = block._format_lines({"rank_step": 300}, {}, RankHistory(), 0.0)

    assert (page["step"], page["steps"]) == (300, 1000)
    assert page["left_s"] == pytest.approx(left_s, rel=0.25)
    left = f"{format_age(page['left_s'])} left"
    assert f"step 300 of 1000, {left}" in status
    assert line == f"training {'━' * 12}{'╌' * 28} 300/1000, {left}"


def test_time_left_before_the_first_line() -> None:
    """Steps that were seen are enough after three of them; compilation is none."""
    nothing = CurveFile(Path("nowhere"))
    readings = [(0.0, 0), (300.0, 1), (302.0, 2), (304.0, 3)]

    shown = [
        remaining.estimate_remaining_s(nothing, {}, 3, 100, readings[:count]) for count in range(5)
    ]

    assert shown == [None, None, None, None, pytest.approx(194.0)]


@pytest.mark.parametrize(
    ("every", "step", "count"),
    [(None, 0, 1), (None, 1000, 1), (300, 0, 4), (300, 300, 4), (300, 301, 3), (250, 999, 1)],
)
def test_pauses_ahead(every: int | None, step: int, count: int) -> None:
    """A pause is due at each multiple from the step on, and once at the end of 1,000 steps."""
    due = {1000, *(range(every, 1001, every) if every else ())}

    assert remaining.count_pauses(every, step, 1000) == sum(at >= step for at in due) == count


def test_time_left_is_on_the_page_while_the_run_trains(tmp_path: Path) -> None:
    run = tmp_path / "run"
    made_runs.run(run, points=0)
    case = CASES["digits"]
    rows = [row for row in case.run() if row["step"] <= 300]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = made_runs.JOB.replace("steps: 1000", "steps: 600\n  eval: {every: 200}")
    (run / "job.yaml").write_text(job.replace("{best:", "{every: 200, best:"))
    summary = json.loads((run / "summary.json").read_text()) | {"verdict": None, "step": 300}
    (run / "summary.json").write_text(json.dumps(summary))

    with hold_lock(run):
        shown = RunReader(run).read_report().to_json()

    assert shown["sentence"]["state"] == "running"
    assert shown["left_s"] == pytest.approx(case.ended_at - rows[-1]["time"], rel=0.25)
    assert RunReader(run).read_report().to_json()["left_s"] is None
