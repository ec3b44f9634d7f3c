"""`launcher tune`: its request to the trainer, its output, and the job that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.local import trainer_process
from tests.launcher.cli.test_sample import Trainer
from tests.launcher.invoke import Launcher

JOB = """
name: small
accelerator: {type: v5e, topology: 2x2}
train:
  task: lm
  data: {source: synthetic}
  batch: 8
"""


def make_candidate(mesh: dict[str, int], changes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    keys = {
        "mesh": mesh,
        "remat": "none",
        "accumulate": 1,
        "attention": "auto",
        "precision": "bf16",
    }
    return {
        "keys": keys,
        "changes": changes,
        "expected": 0.05,
        "modelled": fields.get("seconds"),
    } | fields


ORIGINAL = make_candidate(
    {"dp": 4}, {}, seconds=0.04, peak=4 * 2**20, compiled={"attention": "splash"}
)
FAST = make_candidate(
    {"fsdp": 4},
    {"train.mesh": {"fsdp": 4}},
    seconds=0.01,
    peak=2**20,
    compiled={"attention": "splash"},
)
BROKEN = make_candidate({"mp": 4}, {"train.mesh": {"mp": 4}}, refused="the rule does not fit")
NOT_COMPILED = [
    make_candidate({"dp": 2, "fsdp": 2}, {}),
    make_candidate({"ep": 4}, {}, refused="it needs 99 of 16 GiB"),
]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return file


def test_tune_writes_best_and_lists_refused(
    run_launcher: Launcher, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(ORIGINAL, FAST, BROKEN, {"left": NOT_COMPILED})
    monkeypatch.setattr(trainer_process, "stream_program", trainer)
    target = job.with_name("faster.yaml")
    arguments = ["tune", str(job), "--most", "3", "--write", str(target)]
    result = run_launcher(*arguments)
    assert result.code == 0, result.err
    assert trainer.asked[-5:] == ("mesh", "remat", "accumulate", "--most", "3")
    best, original, waiting = result.out.splitlines()[1:4]
    assert best.startswith("*  fsdp 4") and "auto: splash" in best and "10 ms" in best
    assert original.startswith("   dp 4") and "not compiled" in waiting
    assert "refused: mp 4, remat none, accumulate 1: the rule does not fit" in result.out
    assert "refused: ep 4, remat none, accumulate 1: it needs 99 of 16 GiB" in result.out
    assert "best: 10 ms, peak 1.0 MiB, 4.00 × as fast" in result.out
    assert load.load_job(target).train.mesh.fsdp == 4
    second = run_launcher("tune", str(job), "--write", str(target))
    assert second.code == 2 and "exists." in second.err


def test_tune_without_improvement_or_compilation(
    run_launcher: Launcher, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_process, "stream_program", Trainer(ORIGINAL, {"left": []}))
    assert "own settings are the best" in run_launcher("tune", str(job)).out
    monkeypatch.setattr(trainer_process, "stream_program", Trainer(BROKEN, {"left": []}))
    result = run_launcher("tune", str(job))
    assert result.code == 2
    assert "None of the 1 candidate compiles: the rule does not fit" in result.err
    result = run_launcher("tune", str(job), "--over", "mesh,batch")
    assert result.code == 2 and "'batch' is not one of mesh, remat" in result.err


@pytest.mark.parametrize(
    ("modelled", "correlation"),
    [((1, 2, 4, 3), "0.80"), ((4, 3, 2, 1), "-1.00"), ((1, 1, 1, 1), None)],
)
def test_measured_candidates_show_rank_correlation(
    run_launcher: Launcher,
    modelled: tuple[int, ...],
    correlation: str | None,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spearman's coefficient by hand: 1 − 6 Σ d² / (n (n² − 1)) = 1 − 6 · 2 / 60."""
    timed = [
        make_candidate({"dp": 4}, {}, seconds=0.01 * at, peak=2**20, modelled=0.5 * modelled_s)
        for at, modelled_s in enumerate(modelled, 1)
    ]
    monkeypatch.setattr(trainer_process, "stream_program", Trainer(*timed, {"left": []}))
    result = run_launcher("tune", str(job), "--measure")
    head, first = result.out.splitlines()[:2]
    assert head.split()[-3:] == ["step", "modelled", "expected"]
    assert first.split()[-6:-2] == [
        "10",
        "ms",
        *(f"{500 * modelled[0]:.3g} ms" if modelled[0] < 2 else "2 s").split(),
    ]
    assert (
        (f"rank correlation of {correlation}" in result.out)
        if correlation
        else "rank correlation" not in result.out
    )
