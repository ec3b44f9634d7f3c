"""`launcher sweep` without a run: which runs it makes, what it refuses, and which run is best."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxlaunch.launcher.cli import output, sweep
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.sweep import runner
from jaxlaunch.launcher.sweep.table import SweepTable
from jaxlaunch.runs.layout import hold_lock
from tests.launcher.invoke import CommandResult, launcher
from tests.launcher.report import made_runs

Call = Callable[..., CommandResult]

COMMAND = "name: made\naccelerator: {type: cpu}\ncommand: [python, train.py]\n"


@pytest.fixture
def call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Call:
    """Return a function that runs a command in the folder of a job. No run may start."""
    monkeypatch.setattr(runner.SweepRunner, "_start_run", lambda self, member: 1 / 0)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KUBECONFIG", raising=False)
    (tmp_path / "job.yaml").write_text(made_runs.JOB)
    return lambda *arguments: launcher(capsys, monkeypatch, *arguments)


def test_dry_run_lists_each_combination_and_creates_nothing(call: Call, tmp_path: Path) -> None:
    result = call("sweep", "job.yaml", "train.seed=0..1", "train.batch=8,16", "--dry-run")
    assert result.code == 0, result.err
    assert [line.split() for line in result.out.splitlines()[1:]] == [
        ["made-sweep-000", "train.seed=0", "train.batch=8"],
        ["made-sweep-001", "train.seed=0", "train.batch=16"],
        ["made-sweep-002", "train.seed=1", "train.batch=8"],
        ["made-sweep-003", "train.seed=1", "train.batch=16"],
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["name=mine"], "name cannot be swept, because the sweep sets it for each run."),
        (["labels.sweep=mine"], "labels.sweep cannot be swept, because the sweep sets it"),
        (["--metric", "accuracy"], "Which values of accuracy are better?"),
        (["--halving", "--rungs", "half"], "--rungs half is not a list of rising numbers above 0"),
        (["--halving", "--rungs", "0.5,0.25"], "--rungs 0.5,0.25 is not a list of rising numbers"),
        (["--halving", "--rungs", "0.5,0.5"], "--rungs 0.5,0.5 is not a list of rising numbers"),
        (["--halving", "--rungs", "0,0.5"], "--rungs 0,0.5 is not a list of rising numbers"),
        (["--halving", "--cluster"], "--halving stops runs of this machine"),
    ],
    ids=str,
)
def test_sweep_is_refused_before_anything_is_created(
    call: Call, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = call("sweep", "job.yaml", "train.seed=0,1", *arguments)
    assert result.code == 2
    assert message in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


def test_progress_of_a_narrow_terminal_is_wrapped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that do not fit in half of the terminal's rows are counted."""
    monkeypatch.setenv("COLUMNS", "24")
    monkeypatch.setenv("LINES", "8")
    lines = [f"digits-sweep-{number:03}: 120/600, loss 0.25" for number in range(3)]
    sweep._show_progress(lines)
    shown = capsys.readouterr().err
    output.show_status()
    assert shown.removeprefix("\r\x1b[2K").splitlines() == [
        "digits-sweep-000:",
        "  120/600, loss 0.25",
        "digits-sweep-001:",
        "  120/600, loss 0.25",
        "and 1 more",
    ]


def test_program_of_unknown_length_needs_rungs_in_steps(call: Call, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(COMMAND)
    result = call("sweep", "job.yaml", "env.SEED=0,1", "--halving")
    assert result.code == 2
    assert "give --rungs in steps, such as 100,200." in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["job.yaml"]


@pytest.mark.parametrize(
    ("options", "best"),
    [
        ([], "made-sweep-001, eval/loss 0.25"),
        (["--metric", "eval/loss", "--mode", "max"], "made-sweep-000, eval/loss 0.5"),
        (["--metric", "accuracy", "--mode", "max"], "made-sweep-000, accuracy 0.9"),
        (["--metric", "accuracy", "--mode", "min"], "made-sweep-001, accuracy 0.8"),
        (["--metric", "loss"], "made-sweep-000, loss 1"),
    ],
    ids=str,
)
def test_best_of_the_finished_runs_is_named(
    call: Call, tmp_path: Path, options: list[str], best: str
) -> None:
    """The third run failed, so that it is not the best although its values are."""
    runs = tmp_path / "runs" / "made-sweep"
    for number, (code, eval_loss, accuracy, loss) in enumerate(
        [(0, 0.5, 0.9, 1.0), (0, 0.25, 0.8, 2.0), (83, 0.1, 1.0, 0.5)]
    ):
        folder = runs / f"made-sweep-00{number}"
        made_runs.run(folder, (code,), points=1)
        place = {"step": 1000, "time": made_runs.BEGAN + 1.0}
        row = json.dumps(place | {"loss": loss, "accuracy": accuracy}) + "\n"
        (folder / "metrics.jsonl").write_text(row)
        (folder / "eval.jsonl").write_text(json.dumps(place | {"loss": eval_loss}) + "\n")
    result = call("sweep", "job.yaml", "train.seed=0..2", *options)
    assert result.code == 1, result.err
    *table, best_line, job_line = result.out.splitlines()
    first = best.partition(",")[0]
    (second,) = {"made-sweep-000", "made-sweep-001"} - {first}
    assert [line.split()[:3] for line in table[1:]] == [
        [first, "done", "1000/1000"],
        [second, "done", "1000/1000"],
        ["made-sweep-002", "failed", "1000/1000"],
    ]
    assert best_line == f"best of 2 runs that are done: {best}"
    assert job_line == f"  cat runs/made-sweep/{best.partition(',')[0]}/job.yaml"


def test_as_many_runs_at_a_time_as_the_cpus_allow_and_one_on_gpus(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[runner.SweepPlan] = []
    monkeypatch.setattr(runner.SweepRunner, "run_members", lambda self, _: plans.append(self._plan))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    for accelerator, options, parallel in (
        ("{type: h100, per_host: 2}", [], 1),
        ("{type: h100, per_host: 2}", ["--simulate"], 9),
        ("{type: cpu}\nhosts: 2", [], 4),
        ("{type: cpu}\nhosts: 10", [], 1),
        ("{type: cpu}\nhosts: 2", ["--parallel", "3"], 3),
    ):
        (tmp_path / "job.yaml").write_text(COMMAND.replace("{type: cpu}", accelerator))
        name = f"sweep-{len(plans)}"
        result = call("sweep", "job.yaml", "env.SEED=0,1", "--name", name, *options)
        assert result.code == 0, result.err
        assert plans[-1].parallel == parallel, accelerator
        member = SweepTable(tmp_path / "runs" / name).members[f"{name}-001"]
        command = list(plans[-1].make_command(member))
        assert ("--simulate" in command) is ("--simulate" in options)
        assert {"env.SEED=1", f"name={name}-001"} <= {*command}
    (tmp_path / "job.yaml").write_text(COMMAND.replace("train.py", "other.py"))
    with pytest.raises(UserError, match="job.yaml has changed since the sweep began"):
        plans[-1].make_command(member)


def test_line_of_a_run_has_its_steps_metric_and_time_left(tmp_path: Path) -> None:
    made_runs.sweep(tmp_path)
    table = SweepTable(tmp_path)
    member, *_, waiting = table.members.values()
    summary = json.loads((member.folder / "summary.json").read_text())
    (member.folder / "summary.json").write_text(
        json.dumps(summary | {"verdict": None, "step": 250})
    )
    row = {"step": 250, "loss": 1.0, "step_s": 0.5, "time": made_runs.BEGAN}
    (member.folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    plan = runner.SweepPlan(
        parallel=1,
        metric="eval/loss",
        is_higher_better=False,
        rungs=[],
        may_pause=False,
        make_command=lambda _: [],
    )
    sweep_runner = runner.SweepRunner(table, [member], plan, print)
    with hold_lock(member.folder):
        line = sweep_runner.describe_progress(member)
    assert line == f"{member.name}: 250/1000, eval/loss 0.9, 6m15s left"
    assert sweep_runner.describe_progress(waiting) == f"{waiting.name}: starting"
