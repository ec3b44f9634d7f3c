"""`launcher tune`: what it asks the trainer for, what it prints, and the job that it writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.local import trainer_process
from tests.launcher.cli.test_sample import Trainer
from tests.launcher.invoke import launcher

JOB = """
name: small
accelerator: {type: v5e, topology: 2x2}
train:
  task: lm
  data: {source: synthetic}
  batch: 8
"""


def point(mesh: dict[str, int], changes: dict[str, Any], **said: Any) -> dict[str, Any]:
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
        "modelled": said.get("seconds"),
    } | said


OWN = point({"dp": 4}, {}, seconds=0.04, peak=4 * 2**20, compiled={"attention": "splash"})
FAST = point(
    {"fsdp": 4},
    {"train.mesh": {"fsdp": 4}},
    seconds=0.01,
    peak=2**20,
    compiled={"attention": "splash"},
)
BROKEN = point({"mp": 4}, {"train.mesh": {"mp": 4}}, refused="the rule does not fit")
LEFT = [point({"dp": 2, "fsdp": 2}, {}), point({"ep": 4}, {}, refused="it needs 99 of 16 GiB")]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return file


def test_the_best_is_proposed_and_written_and_what_was_refused_is_named(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(OWN, FAST, BROKEN, {"left": LEFT})
    monkeypatch.setattr(trainer_process, "stream_program", trainer)
    target = job.with_name("faster.yaml")
    asked = ["tune", str(job), "--most", "3", "--write", str(target)]
    left = launcher(capsys, monkeypatch, *asked)
    assert left.code == 0, left.err
    assert trainer.asked[-5:] == ("mesh", "remat", "accumulate", "--most", "3")
    best, own, waiting = left.out.splitlines()[1:4]
    assert best.startswith("*  fsdp 4") and "auto: splash" in best and "10 ms" in best
    assert own.startswith("   dp 4") and "not compiled" in waiting
    assert "refused: mp 4, remat none, accumulate 1: the rule does not fit" in left.out
    assert "refused: ep 4, remat none, accumulate 1: it needs 99 of 16 GiB" in left.out
    assert "best: 10 ms, peak 1.0 MiB, 4.00 × as fast" in left.out
    assert load.load_job(target).train.mesh.fsdp == 4
    again = launcher(capsys, monkeypatch, "tune", str(job), "--write", str(target))
    assert again.code == 2 and "exists." in again.err


def test_a_job_that_nothing_improves_and_one_of_which_nothing_compiles_each_say_so(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_process, "stream_program", Trainer(OWN, {"left": []}))
    assert "own settings are the best" in launcher(capsys, monkeypatch, "tune", str(job)).out
    monkeypatch.setattr(trainer_process, "stream_program", Trainer(BROKEN, {"left": []}))
    left = launcher(capsys, monkeypatch, "tune", str(job))
    assert left.code == 2 and "None of the 1 candidate compiles: the rule does not fit" in left.err
    left = launcher(capsys, monkeypatch, "tune", str(job), "--over", "mesh,batch")
    assert left.code == 2 and "'batch' is not one of mesh, remat" in left.err


@pytest.mark.parametrize(
    ("modelled", "said"), [((1, 2, 4, 3), "0.80"), ((4, 3, 2, 1), "-1.00"), ((1, 1, 1, 1), None)]
)
def test_what_was_measured_is_listed_with_what_was_modelled_and_how_well_their_orders_agree(
    modelled: tuple[int, ...],
    said: str | None,
    job: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Spearman's coefficient by hand: 1 − 6 Σ d² / (n (n² − 1)) = 1 − 6 · 2 / 60."""
    timed = [
        point({"dp": 4}, {}, seconds=0.01 * at, peak=2**20, modelled=0.5 * each)
        for at, each in enumerate(modelled, 1)
    ]
    monkeypatch.setattr(trainer_process, "stream_program", Trainer(*timed, {"left": []}))
    left = launcher(capsys, monkeypatch, "tune", str(job), "--measure")
    head, first = left.out.splitlines()[:2]
    assert head.split()[-3:] == ["step", "modelled", "expected"]
    assert first.split()[-6:-2] == [
        "10",
        "ms",
        *(f"{500 * modelled[0]:.3g} ms" if modelled[0] < 2 else "2 s").split(),
    ]
    assert (
        (f"rank correlation of {said}" in left.out) if said else "rank correlation" not in left.out
    )
