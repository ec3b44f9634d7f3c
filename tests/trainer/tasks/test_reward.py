"""The loss of a reward model against trl's formula, and the jobs that are refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.tasks.reward import Reward

ROWS, TOKENS = 5, 4


def make_batch(reward_B2):
    """Return pairs whose first token says which reward their row has."""
    count = len(reward_B2)
    tokens = np.zeros((count, 2, TOKENS), np.int32)
    tokens[:, :, 0] = np.arange(2 * count).reshape(count, 2)
    return {
        "tokens": jnp.asarray(tokens),
        "mask": jnp.ones((count, 2, TOKENS - 1)),
        "length": jnp.full((count, 2), TOKENS, jnp.int32),
        "weight": jnp.asarray(np.arange(count) < count - 1, jnp.float32),
    }


@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_loss_and_metrics_are_those_of_trl(scale):
    reward_B2 = scale * np.random.default_rng(0).normal(size=(ROWS, 2))
    table = jnp.asarray(reward_B2.reshape(-1, 1), jnp.float32)

    loss = Reward().loss(
        lambda tokens, keys: table[tokens[:, 0]], make_batch(reward_B2), jax.random.key(0)
    )

    # The last row only fills up the batch. In trl: -logsigmoid(chosen - rejected).mean().
    chosen, rejected = reward_B2[:-1].astype(np.float32).astype(np.float64).T
    expected = np.logaddexp(0.0, -(chosen - rejected)).mean()
    assert float(loss.sum / loss.weight) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    means = {name: float(total / weight) for name, (total, weight) in loss.metrics.items()}
    assert means["accuracy"] == pytest.approx((chosen > rejected).mean())
    assert means["margin"] == pytest.approx((chosen - rejected).mean(), rel=1e-5)
    assert means["rewards/chosen"] == pytest.approx(chosen.mean(), rel=1e-5)


PAIRS = {"source": "text", "path": "a.jsonl", "format": "preference"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data": {**PAIRS, "format": "kto"}}, "format: kto has no pairs; give format: preference"),
        ({"data": {**PAIRS, "format": "text"}}, "has no pairs of texts, which reward trains on"),
        ({"model": {"transformers": "f", "classes": 2}}, "classes = 2, and a reward is one number"),
        ({"loss": {"dpo": {"beta": 0.5}}}, "dpo does not apply to the task reward"),
        ({"loss": {"smoothing": 0.1}}, "smoothing does not apply to the task reward"),
    ],
)
def test_jobs_that_train_no_reward_are_refused(keys, message):
    block = {"task": "reward", "model": {"transformers": "f"}, "data": PAIRS, **keys}
    with pytest.raises(ValueError, match=message):
        TrainSpec.model_validate(block)


def test_rows_are_as_long_as_the_model(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "abcd", "chosen": "e", "rejected": "fghi"}\n' * 3)
    model = {"transformers": "f", "length": 8, "vocab": 256}
    data = {**PAIRS, "path": str(path), "eval_split": 0}
    spec = TrainSpec(task="reward", model=model, data=data)
    example = Reward().example(Reward().source(spec, "train")[0])
    assert example["tokens"].shape == (2, 8)
    batch = {name: array[None] for name, array in example.items()}
    assert Reward().check_batch(spec, batch) is None
    batch["tokens"] = np.zeros((1, 2, 9), np.int32)
    assert Reward().check_batch(spec, batch) == (
        0,
        "9 tokens, and train.model.length = 8 allows 8",
    )


def test_model_has_the_head_of_a_reward_and_other_kinds_have_none():
    spec = TrainSpec(task="reward", model={"transformers": "f"}, data=PAIRS)
    assert (spec.model.head, spec.model.classes) == ("sequence_classification", 1)
    spec = TrainSpec(task="reward", model={"kind": "decoder"}, data=PAIRS)
    with pytest.raises(SpecError, match="kind = decoder has no head for a reward"):
        Reward().model(spec, nnx.Rngs(0))
