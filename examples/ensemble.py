"""An ensemble by vmap, per-example gradients, and Monte Carlo dropout.

Why vmap: it turns code for one into code for many. The members of an ensemble are stored in one
array with a leading axis, so four small products become one large product, and one job trains them
all, without a loop or a second program. Over the examples instead of the members, the same call
computes the gradient of each example, which a mean hides: an example with a large gradient is hard
or mislabelled, and differential privacy clips each of them. Over random keys it draws several
dropout masks of one network during evaluation; the more their answers differ, the less certain the
network is (Gal and Ghahramani 2016). The three can be nested: each vmap adds an axis. in_axes=None
marks the arguments that must not be mapped.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from jaxlaunch import Batch, Classify, Loss

Weights = tuple[jax.Array, jax.Array]
MASKS = 8  # of an evaluation
RATE = 0.2


class Members(nnx.Module):
    """The weights of `members` networks with one hidden layer, stacked along a leading axis."""

    def __init__(self, members: int, width: int, rngs: nnx.Rngs) -> None:
        def one(key: jax.Array) -> Weights:
            first, last = jax.random.split(key)
            init = jax.nn.initializers.he_normal()
            return init(first, (64, width)), init(last, (width, 10))

        first, last = jax.vmap(one)(jax.random.split(rngs.params(), members))
        self.first, self.last = nnx.Param(first), nnx.Param(last)


def predict(weights: Weights, image_P: jax.Array, key: jax.Array) -> jax.Array:
    """The logits [10] of one network for one image under one dropout mask."""
    hidden = jax.nn.relu(image_P @ weights[0])
    is_kept = jax.random.bernoulli(key, 1 - RATE, hidden.shape)
    return jnp.where(is_kept, hidden / (1 - RATE), 0) @ weights[1]


def nats(weights: Weights, image_P: jax.Array, label: jax.Array, key: jax.Array) -> jax.Array:
    """The loss of one example."""
    return -jax.nn.log_softmax(predict(weights, image_P, key))[label]


class Ensemble(Classify):
    """The sum of the members' losses, with metrics of mean, disagreement and gradients."""

    def loss(self, model: Any, batch: Batch, rng: jax.Array) -> Loss:
        images_BP = batch["image"].reshape(len(batch["image"]), -1).astype(jnp.float32)
        images_BP = jax.nn.standardize(images_BP, epsilon=1e-6)
        label_B = batch["label"]
        weight_B = batch["weight"]
        weights = (model.first[...], model.last[...])
        members = len(weights[0])
        keys_BM = jax.random.split(rng, (len(images_BP), members))
        of_members = jax.vmap(nats, (0, None, None, 0))
        nats_BM = jax.vmap(of_members, (None, 0, 0, 0))(weights, images_BP, label_B, keys_BM)
        total = weight_B.sum()
        metrics = self.uncertainty(jax.lax.stop_gradient(weights), images_BP, batch, rng)
        return Loss((nats_BM.sum(1) * weight_B).sum(), total, metrics)

    def uncertainty(
        self, weights: Weights, images_BP: jax.Array, batch: Batch, rng: jax.Array
    ) -> Any:
        """Return sums and weights: accuracy, spread over masks and members, gradient norms."""
        label_B, weight_B = batch["label"], batch["weight"]
        by_mask = jax.vmap(predict, (None, None, 0))  # [S, 10] of one network and one image
        by_member = jax.vmap(by_mask, (0, None, None))  # [M, S, 10]
        by_image = jax.vmap(by_member, (None, 0, None))
        chance_BMSV = jax.nn.softmax(by_image(weights, images_BP, jax.random.split(rng, MASKS)))
        mean_BV = chance_BMSV.mean((1, 2))
        first = jax.tree.map(lambda leaf: leaf[0], weights)
        grads = jax.vmap(jax.grad(nats), (None, 0, 0, None))(first, images_BP, label_B, rng)
        norm_B = jax.vmap(optax.tree.norm)(grads)
        measured = {
            "accuracy": (mean_BV.argmax(-1) == label_B).astype(jnp.float32),
            "spread": chance_BMSV.std((1, 2)).max(-1),
            "example_gradient": norm_B,
        }
        return {
            name: ((value_B * weight_B).sum(), weight_B.sum()) for name, value_B in measured.items()
        }
