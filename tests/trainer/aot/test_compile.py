"""Steps compiled by the compiler of TPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from jaxlaunch.contract import BAD_SPEC
from jaxlaunch.trainer.aot.chips import Chips
from jaxlaunch.trainer.errors import SpecError
from tests import needs
from tests.trainer.aot import cases
from tests.trainer.references import FIXTURES

pytestmark = pytest.mark.extended

RECORDED = (
    FIXTURES / "collectives.json"
)  # as the libtpu of tests/requirements/libtpu.txt compiles them
ROOT = os.path.abspath(os.path.join(__file__, *[os.pardir] * 4))


@pytest.fixture(scope="module")
def compiled_results() -> dict[str, Any]:
    """What the planner says of each case, compiled one after the other in one process."""
    path = os.pathsep.join((ROOT, str(needs.packages("libtpu"))))
    environ = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    options = subprocess.run(
        [sys.executable, "-m", cases.__name__], env=environ, capture_output=True, text=True
    )
    assert options.returncode == 0, options.stderr[-2000:]
    counts: dict[str, Any] = json.loads(options.stdout)
    return counts | {"one chip": counts["too large"]["change"]}


@pytest.mark.slow
def test_every_case_fits_and_uses_its_kernel(compiled_results: dict[str, Any]) -> None:
    fit = {name: result for name, result in compiled_results.items() if name != "too large"}
    assert all(result["fits"] and result["peak"] > 0 for result in fit.values()), fit
    attention = {name: result["attention"] for name, result in fit.items()}
    assert attention == {name: "xla" if name == "images" else "splash" for name in fit}
    assert "which do not divide 17" in compiled_results["images"]["notes"][0]
    assert compiled_results["one chip"]["kernels"] > 0 and not compiled_results["images"]["kernels"]


@pytest.mark.slow
def test_collectives_match_recorded_ones(compiled_results: dict[str, Any]) -> None:
    """Compare with the recorded results; GOLDEN=write records them again."""
    listed = {
        name: sorted(map(_line, result["collectives"]))
        for name, result in compiled_results.items()
        if result["fits"]
    }
    if os.environ.get("GOLDEN") == "write":
        RECORDED.write_text(json.dumps(listed, indent=1) + "\n")
    recorded = json.loads(RECORDED.read_text())
    assert {name: listed[name] for name in recorded} == recorded


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['kind']} over {' and '.join(row['axes'])}: {row['times']:g} a step, "
        f"{row['bytes']:.0f} bytes"
    )


@pytest.mark.slow
def test_collectives_span_only_mesh_axes(compiled_results: dict[str, Any]) -> None:
    def crossed(name: str) -> set[tuple[str, str]]:
        return {
            (row["kind"], axis)
            for row in compiled_results[name]["collectives"]
            for axis in row["axes"]
        }

    assert crossed("one chip") == set()
    assert {("all-gather", "fsdp"), ("all-gather", "mp"), ("reduce-scatter", "mp")} <= crossed(
        "fsdp and mp"
    )
    assert ("all-reduce", "dp") in crossed("two slices") and crossed("images") == {
        ("all-reduce", "dp")
    }
    assert any(axis == "ep" for _, axis in crossed("experts"))


@pytest.mark.slow
def test_gradients_cross_slices_once_per_step(compiled_results: dict[str, Any]) -> None:
    """Each device sends its fsdp share of every gradient, in bfloat16."""
    (between,) = (
        row for row in compiled_results["two slices"]["collectives"] if row["axes"] == ["dp"]
    )
    model = cases.DECODER
    layer = 4 * model["width"] ** 2 + 3 * model["width"] * model["hidden"] + 2 * model["width"]
    parameters = model["layers"] * layer + 2 * model["vocab"] * model["width"] + model["width"]
    share = 4  # fsdp
    assert parameters * 2 / share <= between["bytes"] <= parameters * 4 / share


@pytest.mark.slow
def test_too_large_program_is_reported_with_fitting_change(
    compiled_results: dict[str, Any],
) -> None:
    large = compiled_results["too large"]
    assert not large["fits"] and "exceeds available HBM" in large["says"]
    assert large["change"]["set"]["train.remat"] == "full" and large["change"]["fits"]


def test_missing_compiler_error_names_extra() -> None:
    chips = json.dumps({"type": "v5e", "hosts": 1, "per_host": 1, "topology": "1x1"})
    train = {
        "task": "lm",
        "model": cases.DECODER,
        "data": {"source": "synthetic"},
        "batch": 8,
        "steps": 3,
    }
    environ = os.environ | {"TRAIN_SPEC": json.dumps(train), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jaxlaunch.trainer.plan", "--compile", chips]
    options = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert options.returncode == BAD_SPEC and "[train,plan-tpu]" in options.stderr


def test_gpu_without_a_description_is_refused_with_advice() -> None:
    words = "only of a100, h100, h200, b200; after the job file, accelerator.type=NAME compiles"
    with pytest.raises(SpecError, match=words):
        Chips("gpu", 1, 1).make_devices()
