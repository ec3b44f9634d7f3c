import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import table
from tests.compiled import QUICK_COMPILES

pytestmark = pytest.mark.extended


def test_gpu_benchmark_runs_at_a_small_size() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--small"]
    environ = os.environ | {"JAX_PLATFORMS": "cpu"} | QUICK_COMPILES
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "PyTorch compile, PyTorch eager, Hugging Face Flax are left out" in done.stderr
    assert done.stderr.count("profile of steps 3-7") == 2 and "matmul" in done.stderr
    rows = table.read_rows(done.stdout)
    assert len(rows) == 6 and all("a second" in row.detail and row.ratio is None for row in rows)
