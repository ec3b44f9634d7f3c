"""`launcher compare` in a terminal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxlaunch.records.summary import Summary
from tests.launcher import invoke
from tests.launcher.seen import made_runs


def test_a_table_has_each_run_and_another_the_keys_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    made_runs.run(one)
    made_runs.run(two, codes=(0,), job=made_runs.JOB.replace("steps: 1000", "steps: 500"))
    for run, python in ((one, "3.11.2"), (two, "3.12.1")):
        kept = Summary.from_json(json.loads((run / "summary.json").read_text()))
        of = dataclasses.replace(kept.of, made_of={"python": python, "jax": "0.10.2", "code": "abc"})
        step = None if run == two else kept.step
        (run / "summary.json").write_text(json.dumps(dataclasses.replace(kept, of=of, step=step).to_json()))
    left = invoke.launcher(capsys, monkeypatch, "compare", str(one), str(two))
    heads, first, second, blank, keys, differs, versions = (line.split() for line in left.out.splitlines()[:7])
    assert heads == ["RUN", "STATE", "STEP", "LOSS", "EVAL/LOSS", "GOODPUT", "TIME"]
    assert (first[:3], second[:3]) == (["one", "done", "1000"], ["two", "done", "-"])
    assert first[3:5] == second[3:5] and float(first[3]) < float(first[4])
    assert (blank, keys, differs) == ([], ["KEY", "one", "two"], ["train.steps", "1000", "500"])
    assert versions == ["version", "of", "python", "3.11.2", "3.12.1"]
    alone = invoke.launcher(capsys, monkeypatch, "compare", str(one))
    assert alone.code == 2 and "two runs or more" in alone.err
