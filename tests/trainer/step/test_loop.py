"""A loop inside the compiled step, and the convolutions of a step that has a single turn of it."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.classifiers import ResNet
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.step.update import scan_parts
from tests.trainer.states import RESNET
from tests.trainer.tiny import Pictures, compiled_step


@pytest.mark.parametrize("turns", [1, 3])
def test_single_part_scan_equals_loop(turns: int) -> None:
    parts = {"a": jnp.arange(2.0 * turns).reshape(turns, 2), "b": jnp.ones((turns, 1))}
    end, created = scan_parts(
        lambda sum_, part: (sum_ + part["a"], part["a"] * part["b"]), jnp.zeros(2), parts
    )
    assert end.tolist() == np.asarray(parts["a"]).sum(0).tolist()
    assert created.tolist() == np.asarray(parts["a"]).tolist()


class Convolved(Pictures):
    """Pictures for a ResNet."""

    def model(self, spec: spec.TrainSpec, rngs: nnx.Rngs) -> nnx.Module:
        return ResNet(spec.model, rngs, ModelOptions.from_spec(spec))


def test_convolutions_use_fast_cpu_form() -> None:
    text = (
        compiled_step(Convolved(), model=RESNET.model_copy(update={"channels": 1}))
        ._train_programs[1]
        .hlo_text()
    )
    forms = re.findall(r" convolution\(.*dim_labels=(\S+?)[,\s]", text)
    assert len(forms) > 10
    assert set(forms) == {"b01f_01io->b01f"}
