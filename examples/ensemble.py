"""An ensemble by vmap, per-example gradients, and Monte Carlo dropout.

vmap turns code for one item into code for many:

- Over the members of an ensemble. Their weights are stored in one array with a leading axis, so
  four small products become one large product, and one job trains all members without a loop.
- Over the examples of a batch, to compute the gradient of each example, which a mean hides. An
  example with a large gradient is hard or mislabelled, and differential privacy clips each of them.
- Over random keys, to draw several dropout masks of one network during evaluation. The more the
  predictions differ, the less certain the network is (Gal and Ghahramani 2016).

The three can be nested: each vmap adds an axis. in_axes=None marks the arguments that are not
mapped.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxlaunch import Batch, Classify, Loss

Weights = tuple[jax.Array, jax.Array]
# The number of dropout masks in an evaluation.
MASKS = 8
DROPOUT_RATE = 0.2


class Members(nnx.Module):
    """The weights of `members` networks with one hidden layer, stacked along a leading axis."""

    def __init__(self, members: int, width: int, rngs: nnx.Rngs) -> None:
        def init_member(key: jax.Array) -> Weights:
            first_key, last_key = jax.random.split(key)
            init = jax.nn.initializers.he_normal()
            return init(first_key, (64, width)), init(last_key, (width, 10))

        first, last = jax.vmap(init_member)(jax.random.split(rngs.params(), members))
        self.first, self.last = nnx.Param(first), nnx.Param(last)


def predict(weights: Weights, image_P: jax.Array, key: jax.Array) -> jax.Array:
    """Return the logits [10] of one network for one image under one dropout mask."""
    hidden = jax.nn.relu(image_P @ weights[0])
    is_kept = jax.random.bernoulli(key, 1 - DROPOUT_RATE, hidden.shape)
    return jnp.where(is_kept, hidden / (1 - DROPOUT_RATE), 0) @ weights[1]


def example_loss(
    weights: Weights, image_P: jax.Array, label: jax.Array, key: jax.Array
) -> jax.Array:
    """Return the cross-entropy of one example."""
    return -jax.nn.log_softmax(predict(weights, image_P, key))[label]


class Ensemble(Classify):
    """The sum of the members' losses, with metrics of accuracy, uncertainty and gradients."""

    def loss(self, model: Any, batch: Batch, rng: jax.Array) -> Loss:
        images_BP = batch["image"].reshape(len(batch["image"]), -1).astype(jnp.float32)
        images_BP = jax.nn.standardize(images_BP, epsilon=1e-6)
        label_B = batch["label"]
        weight_B = batch["weight"]
        weights = (model.first[...], model.last[...])
        members = len(weights[0])
        keys_BM = jax.random.split(rng, (len(images_BP), members))
        member_losses = jax.vmap(example_loss, (0, None, None, 0))
        batch_losses = jax.vmap(member_losses, (None, 0, 0, 0))
        loss_BM = batch_losses(weights, images_BP, label_B, keys_BM)
        metrics = self.measure_uncertainty(jax.lax.stop_gradient(weights), images_BP, batch, rng)
        return Loss((loss_BM.sum(1) * weight_B).sum(), weight_B.sum(), metrics)

    def measure_uncertainty(
        self, weights: Weights, images_BP: jax.Array, batch: Batch, rng: jax.Array
    ) -> Any:
        """Return sums and weights: accuracy, spread over masks and members, gradient norms."""
        label_B, weight_B = batch["label"], batch["weight"]
        # The axes are B examples, M members, S dropout masks and V classes.
        predict_SV = jax.vmap(predict, (None, None, 0))
        predict_MSV = jax.vmap(predict_SV, (0, None, None))
        predict_BMSV = jax.vmap(predict_MSV, (None, 0, None))
        logits_BMSV = predict_BMSV(weights, images_BP, jax.random.split(rng, MASKS))
        prob_BMSV = jax.nn.softmax(logits_BMSV)
        mean_BV = prob_BMSV.mean((1, 2))
        first_member = jax.tree.map(lambda leaf: leaf[0], weights)
        example_gradients = jax.vmap(jax.grad(example_loss), (None, 0, 0, None))
        gradients = example_gradients(first_member, images_BP, label_B, rng)
        values_B = {
            "accuracy": (mean_BV.argmax(-1) == label_B).astype(jnp.float32),
            "spread": prob_BMSV.std((1, 2)).max(-1),
            "example_gradient": jax.vmap(optax.tree.norm)(gradients),
        }
        return {
            name: ((value_B * weight_B).sum(), weight_B.sum()) for name, value_B in values_B.items()
        }
