import jax
import numpy as np
from flax import nnx

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.models.gpt2 import GPT2

CONFIG = spec.GPT2(layers=2, width=32, heads=4, vocab=32, length=16)
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 16))


def test_masked_tokens_do_not_influence_logits() -> None:
    model = GPT2(CONFIG, nnx.Rngs(0))
    mask = np.ones((2, 16), np.int32)
    mask[:, :4] = 0
    changed = TOKENS.copy()
    changed[:, :4] = 5
    np.testing.assert_array_equal(model(TOKENS, mask)[:, 4:], model(changed, mask)[:, 4:])


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    logits = GPT2(CONFIG, nnx.Rngs(0))(TOKENS)
    targets = np.random.default_rng(1).integers(0, 32, (2, 16, 1))
    guess = -np.mean(np.take_along_axis(jax.nn.log_softmax(logits), targets, -1))
    np.testing.assert_allclose(guess, np.log(32), rtol=0.05)
