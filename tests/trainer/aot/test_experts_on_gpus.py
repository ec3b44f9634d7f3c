"""A layer of experts compiled by the compiler of GPUs that are not here."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests import needs
from tests.trainer.aot import experts_on_gpus as layer

pytestmark = pytest.mark.extended

ROOT = os.path.abspath(os.path.join(__file__, *[os.pardir] * 4))
ROWS = 2 * layer.LENGTH  # that a device's experts get in the mean: each token goes to two


@pytest.mark.slow
def test_expert_rows_are_multiplied_once_in_blocks() -> None:
    # By arithmetic, of two experts with 2,048 rows each: for gate, up and down and for the
    # gradients of their rows 2.5 blocks of 1,024, for those of the matrices 1.5 of 2,048. All
    # rows with both matrices would be thrice as much.
    path = os.pathsep.join((ROOT, str(needs.packages("cuda12"))))
    environ = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    options = subprocess.run(
        [sys.executable, "-m", layer.__name__], env=environ, capture_output=True, text=True
    )
    assert options.returncode == 0, options.stderr[-2000:]
    of_a_row = 2 * layer.WIDTH * layer.HIDDEN
    in_blocks = 2 * (6 * 2.5 * 1024 + 3 * 1.5 * 2048) * of_a_row
    assert float(options.stdout) == pytest.approx(
        in_blocks, rel=1e-3
    )  # a router's products are the rest
    assert in_blocks < 9 * ROWS * 1.4 * of_a_row
