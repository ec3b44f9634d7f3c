"""`launcher compare` in a terminal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxlaunch.launcher.report import compare
from jaxlaunch.launcher.report.run import RunReader
from jaxlaunch.records.summary import Summary
from tests.launcher import invoke
from tests.launcher.report import made_runs
from tests.launcher.report.test_page import page_data


def test_tables_of_runs_and_differences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    row, two = tmp_path / "one", tmp_path / "two"
    made_runs.run(row)
    made_runs.run(two, codes=(0,), job=made_runs.JOB.replace("steps: 1000", "steps: 500"))
    for run, python in ((row, "3.11.2"), (two, "3.12.1")):
        kept_run = Summary.from_json(json.loads((run / "summary.json").read_text()))
        progress = dataclasses.replace(
            kept_run.of, made_of={"python": python, "jax": "0.10.2", "code": "abc"}
        )
        step = None if run == two else kept_run.step
        (run / "summary.json").write_text(
            json.dumps(dataclasses.replace(kept_run, of=progress, step=step).to_json())
        )
    result = invoke.launcher(capsys, monkeypatch, "compare", str(row), str(two))
    heads, first, second, blank, keys, differs, versions = (
        line.split() for line in result.out.splitlines()[:7]
    )
    assert heads == ["RUN", "STATE", "STEP", "LOSS", "EVAL/LOSS", "GOODPUT", "TIME"]
    assert (first[:3], second[:3]) == (["one", "done", "1000"], ["two", "done", "-"])
    assert first[3:5] == second[3:5] and float(first[3]) < float(first[4])
    assert (blank, keys, differs) == ([], ["KEY", "one", "two"], ["train.steps", "1000", "500"])
    assert versions == ["version", "of", "python", "3.11.2", "3.12.1"]
    alone = invoke.launcher(capsys, monkeypatch, "compare", str(row))
    assert alone.code == 2 and "two runs or more" in alone.err


@pytest.fixture
def timed_run(tmp_path: Path) -> tuple[Path, Path]:
    """Return two runs of three steps: batches of 8; batches of 32 in two starts a day apart."""
    for name, batch, times in (("one", 8, (9.0, 18.0, 27.0)), ("two", 32, (9.0, 18.0, 90_018.0))):
        job = made_runs.JOB.replace("  steps: 1000", f"  steps: 30\n  batch: {batch}")
        made_runs.run(tmp_path / name, codes=(0,), job=job, points=0)
        rows = [
            {
                "step": step,
                "loss": 3.0 - step / 10,
                "top": float(step),
                "time": made_runs.BEGAN + time,
            }
            for step, time in zip((10, 20, 30), times, strict=True)
        ]
        (tmp_path / name / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    path = tmp_path / "two" / "summary.json"
    table_rows = json.loads(path.read_text())
    later = {
        **table_rows["starts"][0],
        "start": 2,
        "uid": "second",
        "started": made_runs.BEGAN + 90_000.0,
    }
    table_rows["starts"].append({**later, "ended": made_runs.BEGAN + 90_035.0})
    table_rows["of"]["uid"] = "second"
    path.write_text(json.dumps(table_rows))
    return tmp_path / "one", tmp_path / "two"


# The first start of the second run took 35 s: there its later start begins on the axis.
X_OF = {
    "step": ([10, 20, 30], [10, 20, 30]),
    "hour": ([9 / 3600, 18 / 3600, 27 / 3600], [9 / 3600, 18 / 3600, (35 + 18) / 3600]),
    "examples": ([80, 160, 240], [320, 640, 960]),
}


@pytest.mark.parametrize("at", X_OF)
def test_axes_of_curves(
    timed_run: tuple[Path, Path],
    at: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = compare.curve_lines([RunReader(run).read_report() for run in timed_run], "top", at)

    assert [(name, y) for name, _, y in lines] == [("one", [10, 20, 30]), ("two", [10, 20, 30])]
    for (_, x, _), expected in zip(lines, X_OF[at], strict=True):
        assert x == pytest.approx(expected, abs=1e-6)
    page = timed_run[0].parent / "both.html"
    options = ("--metric", "top", "--metric", "loss", "--at", at, "-o", str(page))
    result = invoke.launcher(capsys, monkeypatch, "compare", *map(str, timed_run), *options)
    assert result.code == 0
    heads, first, second = (line.split() for line in result.out.splitlines()[:3])
    assert heads[3:5] == ["TOP", "LOSS"] and first[3:5] == second[3:5] == ["30", "0"]
    ends = [line.split() for line in result.out.splitlines() if line.endswith(f" {at}")]
    least, most = min(min(X_OF[at][0]), min(X_OF[at][1])), max(max(X_OF[at][0]), max(X_OF[at][1]))
    assert len(ends) == 2 and ends[0] == ends[1]  # a plot of each metric
    assert [float(end) for end in ends[0][:2]] == pytest.approx([least, most], rel=0.02)
    data = page_data(page.read_text())
    assert (data["at"], data["metric"], [run["batch"] for run in data["runs"]]) == (
        at,
        ["top", "loss"],
        [8, 32],
    )


def test_unknown_metric_or_batch_is_reported(
    timed_run: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = list(map(str, timed_run))
    result = invoke.launcher(capsys, monkeypatch, "compare", *runs, "--metric", "lost")
    assert result.code == 2 and "they have loss, top." in result.err
    job = timed_run[1] / "job.yaml"
    job.write_text(job.read_text().replace("batch: 32", "batch: auto"))
    result = invoke.launcher(capsys, monkeypatch, "compare", *runs, "--at", "examples")
    assert result.code == 2 and "Run two does not say how many examples a step has" in result.err


@pytest.mark.parametrize(
    ("options", "order"),
    [
        # The best checkpoint of the job has the lowest eval/loss.
        ((), ["low", "high", "none", "failed"]),
        (("--metric", "accuracy"), ["high", "low", "none", "failed"]),
        # Nobody says which values of this one are better.
        (("--metric", "odd"), ["failed", "high", "low", "none"]),
    ],
)
def test_table_begins_with_the_best_run(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    order: list[str],
) -> None:
    for name, value in (("failed", 0.1), ("high", 0.9), ("low", 0.2), ("none", None)):
        made_runs.run(tmp_path / name, (83,) if name == "failed" else (0,), points=0)
        row = {"step": 10, "time": made_runs.BEGAN + 9.0}
        (tmp_path / name / "metrics.jsonl").write_text(
            json.dumps({**row, "accuracy": value, "odd": value}) + "\n"
        )
        (tmp_path / name / "eval.jsonl").write_text(json.dumps({**row, "loss": value}) + "\n")
    runs = [str(tmp_path / name) for name in ("failed", "high", "low", "none")]
    result = invoke.launcher(capsys, monkeypatch, "compare", *runs, *options)
    assert [line.split()[0] for line in result.out.splitlines()[1:5]] == order, result.err
