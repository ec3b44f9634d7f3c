"""A run folder of version 0.1, tests/fixtures/run_0_1: six steps of a task that is named by its path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.gang.runs import launch, succeed
from tests.launcher.invoke import launcher

ROUNDED = ("of", "goodput")  # times: this version writes them in milliseconds
OLD = Path(__file__).parents[1] / "fixtures" / "run_0_1"


def test_a_run_of_0_1_is_evaluated_refused_other_values_after_its_end_and_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shutil.copytree(OLD, tmp_path / "run")
    evaluated = json.loads(launcher(capsys, monkeypatch, "eval", str(run), "-o", "json").out)
    logged = json.loads((run / "eval.jsonl").read_text())
    assert (evaluated["step"], evaluated["metrics"]["loss"]) == (6, pytest.approx(logged["loss"], rel=1e-5))

    document = yaml.safe_load((OLD / "job.yaml").read_text())
    document["train"]["optimizer"]["lr"] = 0.5
    refused = launch(tmp_path, document)
    assert refused.code == 64
    assert "finished at step 6 with train.optimizer.lr = 0.01; this job says 0.5: use" in refused.verdict["message"]

    document["train"]["steps"] = 9
    resumed = succeed(launch(tmp_path, document))
    assert "changed since step 6 was saved: train.optimizer.lr 0.01 → 0.5, the steps of the run 6 → 9" in resumed.stdout
    rows = [(row["start"], row["code"], row["first_step"], row["last_step"]) for row in resumed.summary["starts"]]
    assert rows == [(1, 0, 1, 6), (2, 64, None, None), (3, 0, 7, 9)]
    first = run / "starts" / "1"
    assert (first / "job.yaml").read_bytes() == (OLD / "job.yaml").read_bytes()
    assert (first / "logs" / "rank-0.log").read_bytes() == (OLD / "logs" / "rank-0.log").read_bytes()
    kept, old = (json.loads((folder / "summary.json").read_text()) for folder in (first, OLD))
    assert {key: kept[key] for key in old if key not in ROUNDED} == {key: old[key] for key in old if key not in ROUNDED}
    assert kept["goodput"]["ratio"] == pytest.approx(old["goodput"]["ratio"], rel=1e-4)
    assert sorted(line["step"] for line in resumed.metrics) == list(range(1, 10))
