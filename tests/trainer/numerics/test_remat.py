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
    """Return the gradient of a decoder under a policy, and the bytes of its temporaries."""
    options = ModelOptions(remat=keep)
    arrays = ModelArrays(nnx.eval_shape(lambda: Decoder(DECODER, nnx.Rngs(0), options)))

    def loss(params: Any) -> jax.Array:
        return jax.numpy.square(arrays.merge_model(params, {}, jax.random.key(0))(TOKENS)).mean()

    compiled = jax.jit(jax.grad(loss)).lower(params).compile()
    return compiled(params), compiled.memory_analysis().temp_size_in_bytes


def test_policies_keep_the_gradient_and_save_memory() -> None:
    model = Decoder(DECODER, nnx.Rngs(0))
    params, _ = ModelArrays(model).split_model(model)
    expected, most = gradient(params, "none")
    saved = {}
    for keep in ("full", "dots", "dots_no_batch", ["query", "mixed"], "offload"):
        actual, saved[str(keep)] = gradient(params, keep)
        assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
        jax.tree.map(assert_close, actual, expected)
    named = saved["['query', 'mixed']"]
    assert saved["full"] < named < saved["dots_no_batch"] <= saved["dots"] < most


@pytest.mark.parametrize("remat", ["dots", "dots_no_batch", "full", ["query", "mixed"]], ids=str)
def test_policies_do_not_change_the_losses(remat: Any, to_the_bit: None) -> None:
    np.testing.assert_array_equal(run(Counting(), 4, remat=remat)[0], losses_without_remat())


@functools.cache
def losses_without_remat() -> np.ndarray:
    return run(Counting(), 4)[0]


def test_unknown_tensor_error_lists_the_valid_names() -> None:
    with pytest.raises(
        SpecError, match="unknown tensor attn; this model names query, key, value, mixed, gate, up"
    ):
        Decoder(DECODER, nnx.Rngs(0), ModelOptions(remat=["query", "attn"]))


def test_model_without_names_cannot_offload() -> None:
    with pytest.raises(SpecError, match="names no tensors"):
        remat_layer(lambda x: x, "offload", (), scanned=False)
