import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.optim import schedules
from jaxlaunch.trainer.spec import Optimizer, Schedule
from jaxlaunch.trainer.spec.optimizer import SCHEDULE_NAMES

FIXTURES = Path(__file__).parents[2] / "fixtures" / "schedules"
DOCS = Path(__file__).parents[3] / "docs" / "optimizers.md"
REFERENCE = load_file(FIXTURES / "schedules.safetensors")
BASE_LR = json.loads((FIXTURES / "config.json").read_text())["base_lr"]
STEPS = np.arange(101)
FINAL = {"exponential": 0.01}  # of those that need one, the one in the documented table


def rates(schedule: Schedule, total_steps: int, lr: float = BASE_LR) -> np.ndarray:
    return np.asarray(
        jax.jit(
            jax.vmap(schedules.build_schedule(Optimizer(lr=lr, schedule=schedule), total_steps))
        )(STEPS)
    )


@pytest.mark.parametrize(
    ("name", "schedule", "total_steps"),
    [
        ("constant", Schedule(name="constant"), 100),
        ("constant_warmup", Schedule(name="constant", warmup=10), 100),
        ("cosine_warmup", Schedule(name="cosine", warmup=10), 100),
        ("linear_warmup", Schedule(name="linear", warmup=10), 90),
        ("wsd", Schedule(name="wsd", warmup=10, decay=20), 90),
        (
            "wsd_linear_min",
            Schedule(name="wsd", warmup=10, decay=20, shape="linear", start=0.1, final=0.1),
            90,
        ),
    ],
)
def test_schedule_equals_hugging_face(name: str, schedule: Schedule, total_steps: int) -> None:
    np.testing.assert_allclose(
        rates(schedule, total_steps), REFERENCE[name], rtol=0, atol=1e-6 * BASE_LR
    )


def test_every_reference_schedule_is_compared() -> None:
    compared = test_schedule_equals_hugging_face.pytestmark[0].args[1]  # type: ignore[attr-defined]
    assert {case[0] for case in compared} == set(REFERENCE)


def test_exponential_decay_is_geometric() -> None:
    result = rates(Schedule(name="exponential", warmup=10, final=0.02), total_steps=90, lr=3.0)
    decay = 3.0 * 0.02 ** (
        np.minimum(STEPS - 10, 80) / 80
    )  # float64; optax's decay_rate is `final`, over 80 steps
    np.testing.assert_allclose(result, np.where(STEPS < 10, 0.3 * STEPS, decay), rtol=2e-6)


@pytest.mark.parametrize("name", SCHEDULE_NAMES[1:])
def test_rate_stays_at_final_share(name: str) -> None:
    result = rates(Schedule(name=name, warmup=5, final=0.25), total_steps=80, lr=2.0)
    np.testing.assert_allclose(result[80:], 0.5, rtol=1e-6)
    assert result.max() == result[5] == 2.0


def test_wsd_decays_over_last_tenth_by_default() -> None:
    result = rates(Schedule(name="wsd"), total_steps=80, lr=1.0)
    assert (result[:73] == 1.0).all() and result[73] < 1.0


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_short_run_sees_start_of_warmup(name: str) -> None:
    result = rates(Schedule(name=name, warmup=200, final=FINAL.get(name)), total_steps=100, lr=1.0)
    np.testing.assert_allclose(result, STEPS / 200, rtol=1e-6)


def test_rate_is_float32_scalar() -> None:
    rate = jax.jit(schedules.build_schedule(Optimizer(), 100))(jnp.int32(3))
    assert rate.shape == () and rate.dtype == jnp.float32


def test_too_long_decay_is_refused_with_numbers() -> None:
    schedule = Schedule(name="wsd", warmup=60, decay=50)
    message = r"train\.optimizer\.schedule\.warmup = 60 and decay = 50 do not fit in 100 steps"
    with pytest.raises(SpecError, match=message):
        schedules.build_schedule(Optimizer(schedule=schedule), 100)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_schedule_matches_documented_table(name: str) -> None:
    rows = re.findall(rf"^\| (step|{name}) \|((?: [\d.]+ \|)+)$", DOCS.read_text(), re.MULTILINE)
    (_, steps), (_, documented) = (
        (label, [float(cell) for cell in cells.split("|")[:-1]]) for label, cells in rows
    )
    schedule = Schedule(
        name=name, warmup=10, decay=20 if name == "wsd" else None, final=FINAL.get(name)
    )
    result = rates(schedule, total_steps=100, lr=1.0)
    np.testing.assert_allclose(result[np.int32(steps)], documented, rtol=0, atol=6e-5)
