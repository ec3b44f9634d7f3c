"""How a program of the trainer's ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.trainer.start import process


def test_sys_exit_in_user_code_is_located(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def find() -> dict[str, Any]:
        sys.exit(0)

    assert process.print_result(find) == contract.STARTUP
    reports = capsys.readouterr()
    assert not reports.out and "sys.exit(0)" in reports.err
    with pytest.raises(SystemExit) as raised:
        find()
    assert process.describe_exit(raised.value).startswith(f"sys.exit(0) ({__file__}:")
    assert process.describe_exit(ValueError("0")) == ""


STANDBY = """
import json, os, sys
from jaxlaunch import contract
from jaxlaunch.trainer import __main__ as trainer
from jax._src import xla_bridge

def read(train):
    before = set(sys.modules)
    trainer.get_ready({} if train is None else {contract.TRAIN_SPEC: train})
    assert not xla_bridge.backends_are_initialized()
    return sorted(set(sys.modules) - before)

print(json.dumps([read(each) for each in json.loads(sys.argv[1])]))
"""


def test_standby_process_imports_no_user_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit('imported')")
    job_value = {"task": "mine:Task", "data": {"source": "torch", "dataset": "mine:Rows"}}
    ours = {
        "task": "classify",
        "model": {"kind": "mine:Net"},
        "data": {"source": "tfds", "name": "digits"},
    }
    wrong = {"task": "classify", "steps": -1}
    jobs = [None, "no JSON", *map(json.dumps, (job_value, wrong, ours))]
    result = subprocess.run(
        [sys.executable, "-c", STANDBY, json.dumps(jobs)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    *nothing, imported = json.loads(result.stdout)
    source = "jaxlaunch.trainer.sources.tfds"
    assert {source, "tensorflow_datasets"} <= set(imported) and "mine" not in imported
    assert not any(source in module or "mine" in module for module in nothing)
