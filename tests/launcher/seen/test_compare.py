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
    found = Summary.from_json(json.loads((two / "summary.json").read_text()))
    (two / "summary.json").write_text(json.dumps(dataclasses.replace(found, step=None).to_json()))
    left = invoke.launcher(capsys, monkeypatch, "compare", str(one), str(two))
    heads, first, second, blank, keys, differs = (line.split() for line in left.out.splitlines()[:6])
    assert heads == ["RUN", "STATE", "STEP", "LOSS", "EVAL/LOSS", "GOODPUT", "TIME"]
    assert (first[:3], second[:3]) == (["one", "done", "1000"], ["two", "done", "-"])
    assert first[3:5] == second[3:5] and float(first[3]) < float(first[4])
    assert (blank, keys, differs) == ([], ["KEY", "one", "two"], ["train.steps", "1000", "500"])
    alone = invoke.launcher(capsys, monkeypatch, "compare", str(one))
    assert alone.code == 2 and "two runs or more" in alone.err
