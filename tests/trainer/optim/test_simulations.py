"""Every optimizer by name against its formula in float64: tests/trainer/optim/simulations.py."""

import pytest

from jaxlaunch.trainer.spec import OPTIMIZERS
from tests.trainer.optim.simulations import COVERING, RULES, VARIANTS, Setting, largest_distance

CASES = [
    (variant, COVERING[(at + more) % 6]) for at, variant in enumerate(VARIANTS) for more in (0, 3)
]
CASES += [("schedule-free b1", COVERING[1])]  # with a resume


def test_every_optimizer_has_formula() -> None:
    assert RULES.keys() == OPTIMIZERS.keys()


@pytest.mark.parametrize(("variant", "setting"), CASES, ids=str)
def test_optimizer_follows_formula(variant: str, setting: Setting) -> None:
    far = largest_distance(variant, setting)
    assert max(far.values()) <= 5e-6, far
