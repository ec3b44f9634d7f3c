"""Models of transformers: training, resume and export, with torch, torchax and transformers 5."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import environments, needs

pytestmark = pytest.mark.extended

SCENARIOS = Path(__file__).with_name("scenarios.py")
# With sinks, windows and stacked experts.
FAMILIES = ("gpt_oss",)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    packages = str(needs.packages("torchax"))
    environ = {**os.environ, **environments.LAZY, "PYTHONPATH": packages}
    folder = tmp_path_factory.mktemp("models")
    command = [sys.executable, str(SCENARIOS), str(folder), *FAMILIES]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    rows = map(json.loads, done.stdout.splitlines())
    return {row["model_type"]: row for row in rows}


@pytest.mark.parametrize("family", FAMILIES)
def test_model_trains_resumes_to_the_bit_and_loads_in_transformers(results, family):
    result = results[family]

    assert len(result["losses"]) == 4
    assert result["losses"][-1] < result["losses"][0]
    assert result["resumed"] == result["losses"]
    assert result["equal_exports"]
    assert result["moved"] > 1e-4
    assert result["config"]["model_type"] == family
