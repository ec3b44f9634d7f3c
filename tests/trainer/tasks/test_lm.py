import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainer.errors import SpecError
from trainer.spec import TrainSpec
from trainer.tasks.lm import NextToken

NAME = "trainer.tasks.lm:NextToken"


def uniform(tokens_BL: jax.Array) -> jax.Array:
    return jnp.zeros((*tokens_BL.shape, 256))


def test_a_uniform_guess_costs_eight_bits_a_byte_and_only_targets_count() -> None:
    raw = {"tokens": np.arange(9), "mask": np.array([1, 1, 1, 1, 1, 0, 0, 0])}
    rows = [NextToken().example(raw), NextToken().example({"tokens": np.arange(9)})]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]} | {"weight": np.ones(2, np.float32)}
    loss = NextToken().loss(uniform, batch, jax.random.key(0))
    assert loss.weight == 5 + 8
    total, weight = loss.metrics["bits_per_byte"]
    np.testing.assert_allclose(total / weight, 8.0, rtol=1e-6)
    padded = NextToken().loss(uniform, batch | {"weight": np.array([1, 0], np.float32)}, jax.random.key(0))
    assert padded.weight == 5


def test_a_model_of_another_kind_is_an_error() -> None:
    with pytest.raises(SpecError, match="kind = mlp does not predict tokens; use decoder"):
        NextToken().model(TrainSpec(task=NAME, model={"kind": "mlp"}), nnx.Rngs(0))
