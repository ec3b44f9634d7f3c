from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainer import spec as specs
from trainer.errors import SpecError
from trainer.spec import TrainSpec
from trainer.task import Loss
from trainer.tasks import lm
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


# --- several examples in a row, and rows that are filled up -----------------------------------------------------------

CONFIGS = [
    specs.Decoder(kind="decoder", layers=1, width=32, heads=4, kv_heads=2, vocab=32, length=16),
    specs.GPT2(kind="gpt2", layers=1, width=32, heads=4, vocab=32, length=16),
]
SHORT, LONG = np.arange(5) % 32, np.arange(12)[::-1] * 3 % 32  # two examples that fill a row of 17 tokens


def summed(config: Any, row: dict[str, Any]) -> tuple[Loss, Any]:
    """The loss of one example, and its gradient by the model's parameters."""
    task = NextToken()
    batch = {name: jnp.asarray(value)[None] for name, value in task.example(row).items()} | {"weight": jnp.ones(1)}
    graph, params = nnx.split(task.model(TrainSpec(task=NAME, model=config), nnx.Rngs(0)))

    def loss(params: Any) -> tuple[jax.Array, Loss]:
        found = task.loss(nnx.merge(graph, params), batch, jax.random.key(0))
        return found.sum, found

    grads, found = jax.jit(jax.grad(loss, has_aux=True))(params)
    return found, grads


def equal(one: tuple[Loss, Any], others: list[tuple[Loss, Any]]) -> None:
    """A row's loss and gradient are the sums of others'."""
    whole = jax.tree.map(lambda *parts: sum(parts), *others)
    for found, wanted in zip(jax.tree.leaves(one), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_a_packed_row_is_its_examples_alone(config: Any) -> None:
    found = summed(config, {"tokens": np.concatenate([SHORT, LONG]), "segments": np.repeat([7, 2], [5, 12])})
    assert found[0].weight == 4 + 11
    equal(found, [summed(config, {"tokens": tokens}) for tokens in (SHORT, LONG)])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.kind)
def test_what_fills_a_row_up_is_neither_seen_nor_predicted(config: Any) -> None:
    filled = {"tokens": np.concatenate([LONG, np.full(5, 9)]), "length": 12}
    found = summed(config, filled)
    assert found[0].weight == 11
    equal(found, [summed(config, {"tokens": LONG})])
    nothing = summed(config, filled | {"length": 0})
    assert nothing[0].weight == 0 and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(nothing))


def test_a_model_of_one_s_own_is_told_of_a_mask_alone() -> None:
    task, told = NextToken(), []

    def listening(tokens_BL: jax.Array, mask_BL: jax.Array) -> jax.Array:
        told.append(mask_BL.shape)
        return uniform(tokens_BL)

    row = task.example({"tokens": np.arange(9), "attention_mask": np.ones(9)})
    batch = {name: value[None] for name, value in row.items()} | {"weight": np.ones(1, np.float32)}
    task.loss(listening, batch, jax.random.key(0))
    assert told == [(1, 8)]
    with pytest.raises(SpecError, match="segments or a length, which a model of your own is not told"):
        task.loss(listening, batch | {"length": np.full(1, 5)}, jax.random.key(0))


def test_a_model_of_another_kind_is_an_error() -> None:
    with pytest.raises(SpecError, match="kind = mlp does not predict tokens; use decoder"):
        NextToken().model(TrainSpec(task=NAME, model={"kind": "mlp"}), nnx.Rngs(0))


@pytest.mark.parametrize(
    ("batch", "width", "count"),
    [(8, 2048, 8), (7, 2048, 1), (2, 512, 2), (64, 16, 64)],  # two chunks of 4096 × 2048 cost more than they save
)
def test_logits_that_fill_a_device_come_in_chunks_unless_the_head_is_about_as_large(
    batch: int, width: int, count: int
) -> None:
    assert lm._chunks("auto", (batch, 512), jnp.zeros((width, 131_072), jnp.int8)) == count
    assert lm._chunks(3, (batch, 512), jnp.zeros((width, 1))) == 3
