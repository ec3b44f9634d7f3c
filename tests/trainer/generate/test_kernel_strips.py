"""Kernels in strips, by which a CPU multiplies few rows faster, are the kernels that they were cut from."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxlaunch.trainer.generate import kernel_strips
from tests.trainer.generate.generators import drawn, generator
from tests.trainer.tiny import DECODER, EXPERTS, GPT2


@pytest.mark.parametrize("rows", [1, 3, kernel_strips.FEW, kernel_strips.FEW + 1])
def test_a_product_of_few_or_many_rows_is_that_with_the_whole_kernel(rows: int) -> None:
    rng = np.random.default_rng(0)
    x_RD, kernel_DO = (rng.normal(size=shape).astype(np.float32) for shape in ((rows, 24), (24, 48)))
    kernel_SDW = kernel_strips.cut(jax.numpy.asarray(kernel_DO))
    assert kernel_SDW.shape == (3, 24, kernel_strips.WIDTH)
    assert np.array_equal(kernel_strips.whole(kernel_SDW), kernel_DO)
    np.testing.assert_allclose(kernel_strips.product(jax.numpy.asarray(x_RD), kernel_SDW), x_RD @ kernel_DO, atol=1e-5)


@pytest.mark.parametrize("model", [DECODER, GPT2, EXPERTS], ids=["decoder", "gpt2", "experts"])
def test_the_parameters_come_back_as_they_were_given(model: object) -> None:
    made = generator(model)
    assert any(each.ndim == 3 and each.shape[2] == kernel_strips.WIDTH for each in made.weights.layers[0].values())
    found, given = made.network.stacked(made.weights), drawn(made.network)
    assert found.keys() == given.keys()
    assert all(np.array_equal(found[name], given[name]) for name in given)
