import functools
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.models.decoder import Decoder
from jaxlaunch.trainer.models.layers import ModelOptions
from jaxlaunch.trainer.numerics.remat import remat_layer
from jaxlaunch.trainer.step.state import ModelArrays
from tests.trainer.tiny import DECODER, Counting, run

TOKENS = np.arange(128).reshape(8, 16) % 32


def gradient(params: Any, keep: Any) -> tuple[Any, int]:
    """The gradient of a decoder under a policy, and the bytes its compiled program keeps meanwhile."""
    arrays = ModelArrays(
        nnx.eval_shape(lambda: Decoder(DECODER, nnx.Rngs(0), ModelOptions(remat=keep)))
    )

    def loss(params: Any) -> jax.Array:
        return jax.numpy.square(arrays.merge_model(params, {}, jax.random.key(0))(TOKENS)).mean()

    compiled = jax.jit(jax.grad(loss)).lower(params).compile()
    return compiled(params), compiled.memory_analysis().temp_size_in_bytes


def test_every_policy_gives_the_same_gradient_for_less_memory() -> None:
    model = Decoder(DECODER, nnx.Rngs(0))
    params, _ = ModelArrays(model).split_model(model)
    expected, most = gradient(params, "none")
    kept = {}
    for keep in ("full", "dots", "dots_no_batch", ["query", "mixed"], "offload"):
        found, kept[str(keep)] = gradient(params, keep)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), found, expected
        )
    assert kept["full"] < kept["['query', 'mixed']"] < kept["dots_no_batch"] <= kept["dots"] < most


@pytest.mark.parametrize("remat", ["dots", "dots_no_batch", "full", ["query", "mixed"]], ids=str)
def test_no_policy_changes_a_loss_by_a_bit(remat: Any, to_the_bit: None) -> None:
    np.testing.assert_array_equal(run(Counting(), 4, remat=remat)[0], losses_without())


@functools.cache
def losses_without() -> np.ndarray:
    return run(Counting(), 4)[0]


def test_an_unknown_tensor_is_an_error_that_lists_the_legal_ones() -> None:
    with pytest.raises(
        SpecError, match="unknown tensor attn; this model names query, key, value, mixed, gate, up"
    ):
        Decoder(DECODER, nnx.Rngs(0), ModelOptions(remat=["query", "attn"]))


def test_a_model_without_names_has_nothing_to_offload() -> None:
    with pytest.raises(SpecError, match="names no tensors"):
        remat_layer(lambda x: x, "offload", (), scanned=False)
