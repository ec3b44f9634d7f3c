"""Long series are reduced equally over the whole run, on every surface."""

from __future__ import annotations

import json
import random
import re
from itertools import groupby
from pathlib import Path

import pytest

from jaxlaunch.launcher.cli import live_block
from jaxlaunch.launcher.report import compare, curves, page, plots, run_files
from jaxlaunch.launcher.report.curves import Curve, Intervals
from jaxlaunch.launcher.report.run import RunReader
from jaxlaunch.launcher.report.server import RunCatalog, Server
from tests.launcher.report import made_runs
from tests.launcher.report.serving import serving
from tests.launcher.report.test_page import page_data
from tests.launcher.report.test_server import get, rows_of

STEPS = 100_000
SPIKES = [10_000 * tenth + 4_321 for tenth in range(10)]


def spiky_run(folder: Path) -> Path:
    """Make a run with a low noise and a spike in each tenth of its steps."""
    made_runs.run(folder, points=0)
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, STEPS + 1):
            loss = 9.0 + step / STEPS if step in SPIKES else 1.0 + step % 7 / 100
            time = made_runs.BEGAN + step / 2000
            file.write(f'{{"step": {step}, "loss": {loss}, "time": {time}}}\n')
    return folder


def count_by_tenth(steps: list[int], last: int = STEPS) -> list[int]:
    return [sum(step * 10 // (last + 1) == tenth for step in steps) for tenth in range(10)]


def has_equal_tenths(steps: list[int], last: int = STEPS) -> bool:
    return all(0.05 <= count / len(steps) <= 0.2 for count in count_by_tenth(steps, last))


def test_ten_spikes_of_a_long_run_are_on_every_surface(tmp_path: Path) -> None:
    run = spiky_run(tmp_path / "runs" / "spiky")
    report = RunReader(run).read_report()
    data = page_data(text := page.render_page("run", "spiky", report.to_json()))
    comparison = compare.compare_runs([report, report], (), "step")
    with serving(Server(RunCatalog(tmp_path / "runs", None))) as server:
        served = page_data(get(server, rows_of(server)["spiky"]["page"])[1])
    ((_, xs, ys), _) = compare.curve_lines([report, report], "loss", "step")
    shown = {
        "page": data["curves"]["loss"],
        "dashboard": served["curves"]["loss"],
        "compare": comparison["runs"][1]["curves"]["loss"],
        "terminal": [[int(x) for x in xs], [], ys],
    }

    for name, (steps, _, values) in shown.items():
        at_spikes = [step for step, value in zip(steps, values, strict=True) if value > 5]
        assert at_spikes == SPIKES, name
        assert has_equal_tenths(steps), (name, count_by_tenth(steps))
        assert (steps[0], steps[-1]) == (1, STEPS), name
    assert len(text) < 1_000_000
    spark = live_block._draw_sparkline(report.metrics.curves["loss"])
    assert [spark[40 * spike // STEPS] > "▃" for spike in SPIKES] == [True] * 10
    assert spark.count("▁") == 30
    # The spikes are ten groups of dots in the upper half of the plot.
    rows = plots.draw_plot([("spiky", xs, ys)], "step")[1:7]
    columns = [any(row[8:][at : at + 1] > "\u2800" for row in rows) for at in range(60)]
    assert len([key for key, _ in groupby(columns) if key]) == 10


@pytest.mark.parametrize("every", [1, 10])
def test_every_length_is_reduced_equally(every: int) -> None:
    curve = Curve()
    for index in range(1, 12_001):
        curve.add_item((index * every, 0.0, float(index % 17)))
        if index > 1000 and index % 500 == 0:
            steps = [int(step) for step, _, _ in curve.points]
            assert len(steps) <= curves.MAX_POINTS
            assert has_equal_tenths(steps, index * every), (index, count_by_tenth(steps))
            reduced = [int(step) for step, _, _ in curve.reduce_points(300)]
            assert len(reduced) <= 300 and has_equal_tenths(reduced, index * every)


def test_reduced_curve_keeps_the_extremes_of_any_steps() -> None:
    """The reference is the list of all points; steps may jump, repeat and go back."""
    rng = random.Random(1)
    for _ in range(20):
        step, points, curve = 0, list[curves.Point](), Curve(limit=rng.choice((100, 2000)))
        for _ in range(rng.randrange(5_000)):
            step = max(0, step + rng.choice((1, 1, 1, 10, 100_000, 0, -3)))
            point = (float(step), 0.0, rng.gauss(0, 1))
            if points and points[-1][0] == step:
                # Another value of the newest step, as a file has when its last line is read again.
                point = points.pop()
            points.append(point)
            curve.add_item(point)
        if points:
            values, kept = ([point[2] for point in row] for row in (points, curve.points))
            assert (min(values), max(values)) == (min(kept), max(kept))
            assert (points[0], points[-1]) == (curve.points[0], curve.points[-1])
            assert len(kept) <= 2000


def test_seconds_of_intervals_are_summed_equally(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = run_files.CurveFile(path)
    for part in range(3):
        with open(path, "a") as stream:
            for step in range(1 + 2_000 * part, 1 + 2_000 * (part + 1)):
                seconds = {"wall_s": 1.0, "data_s": 0.25, "save_s": 0.5 * (step % 100 == 0)}
                stream.write(json.dumps({"step": step, "time": float(step), **seconds}) + "\n")
        file.read_new_rows()
        file.read_new_rows()

    items = file.intervals.items
    assert isinstance(file.intervals, Intervals) and len(items) <= curves.MAX_INTERVALS
    assert has_equal_tenths([int(item[0]) for item in items], 6_000)
    assert sum(item[2] for item in items) == 6_000
    assert sum(item[3]["data"] for item in items) == 1_500
    assert sum(item[3]["save"] for item in items) == 30
    assert [int(step) for step, _, _ in file.pauses["save_s"].points] == list(
        range(100, 6_001, 100)
    )


def test_page_of_many_long_curves_is_small(tmp_path: Path) -> None:
    made_runs.run(tmp_path / "run", points=0)
    rng = random.Random(1)
    with open(tmp_path / "run" / "metrics.jsonl", "w") as file:
        for step in range(1, 3_001):
            values = {f"metric/{at}": rng.gauss(0, 1) for at in range(40)}
            file.write(json.dumps({"step": step, "time": made_runs.BEGAN, **values}) + "\n")

    report = RunReader(tmp_path / "run").read_report()

    data = report.to_json()
    assert len(page.render_page("run", "run", data)) < 1_000_000
    assert all(has_equal_tenths(steps, 3_000) for steps, _, _ in data["curves"].values())
    text = page.render_page("compare", "Compare", compare.compare_runs([report] * 4, (), "step"))
    assert len(text) < 1_000_000 and re.search("metric/39", text)


def test_each_curve_of_a_comparison_has_its_mark() -> None:
    """Three equal curves at other heights: in a pipe, too, each is told from the others."""
    xs = [float(x) for x in range(100)]
    lines = [(name, xs, [height + x / 100 for x in xs]) for height, name in enumerate("abc")]

    *rows, _, names = plots.draw_plot(lines, "step")

    assert names == "● a  ○ b  ■ c"
    assert [sum(row.count(mark) for row in rows) >= 5 for mark in "●○■"] == [True] * 3
    columns = [[row.index(mark) for row in rows if mark in row] for mark in "●○■"]
    assert max(columns[0]) - min(columns[0]) > 40
    assert "○" not in "".join(plots.draw_plot(lines[:1], "step")[:-1])
