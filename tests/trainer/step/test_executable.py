"""How a program that runs once is compiled."""

from __future__ import annotations

import jax
import pytest

from jaxlaunch.trainer.step.executable import once


@pytest.mark.parametrize(("is_quick", "options"), [(False, {"xla_backend_optimization_level": 1}), (True, None)])
def test_a_program_that_runs_once_is_never_optimized_more_than_the_others(
    is_quick: bool, options: dict[str, int] | None
) -> None:
    name = "jax_disable_most_optimizations"
    before = jax.config.read(name)
    jax.config.update(name, is_quick)
    try:
        assert (
            once(jax.make_mesh((1,), ("dp",), devices=jax.devices()[:1], axis_types=(jax.sharding.AxisType.Auto,)))
            == options
        )
    finally:
        jax.config.update(name, before)
