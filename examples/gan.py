"""A GAN on handwritten digits: two networks, two optimizers, one step of your own.

This is not a `train:` job, because the built-in step has one loss and one optimizer, but here two
networks are trained in turn. The same is true of everything that alternates, nests or unrolls
updates, such as actors and critics, or meta-learning.

- The state is everything that the next step needs: both networks, both optimizers and the random
  key. All of it is saved, so a run that is killed continues bit for bit.
- A function makes the state under `jax.jit`, after the processes have joined, so no host ever holds
  the part of another one.
- A dataset with `batch=` yields each digit once per epoch, in an order that is a function of the
  seed and the step.
- The step sees the global batch. Its means are over all devices, and it never refers to a single
  device.
- The program reports a picture of samples at each evaluation, which the page of the run shows.
- Metrics whose names end in `loss` must be finite. Otherwise the run ends with exit code 76 and
  names the step. Other metrics may have any value.

`python examples/gan.py` trains on this machine, `launcher run examples/gan.yaml` on two hosts, and
the same file on a cluster.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import jaxlaunch

NOISE, WIDTH = 16, 64
STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 2000


class Digits:
    """1,797 images of 8 × 8 pixels, with values from -1 to 1."""

    def __init__(self):
        self.images = (load_digits().images.reshape(-1, 64) / 8 - 1).astype(np.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"image": self.images[index]}


class Net(nnx.Module):
    def __init__(self, inputs, outputs, rngs):
        self.hidden = nnx.Linear(inputs, WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, outputs, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.leaky_relu(self.hidden(x), 0.2))


def make_state():
    generator, critic = Net(NOISE, 64, nnx.Rngs(0)), Net(64, 1, nnx.Rngs(1))
    return {
        "generator": generator,
        "critic": critic,
        "generator_optimizer": nnx.Optimizer(generator, optax.adam(1e-3, b1=0.5), wrt=nnx.Param),
        "critic_optimizer": nnx.Optimizer(critic, optax.adam(1e-3, b1=0.5), wrt=nnx.Param),
        "key": jax.random.key(2),
    }


def step(state, batch):
    next_key, noise_key = jax.random.split(state["key"])
    noise = jax.random.normal(noise_key, (len(batch["image"]), NOISE))
    generator, critic = state["generator"], state["critic"]
    fake = jnp.tanh(generator(noise))

    def critic_loss(critic):
        real_logit, fake_logit = critic(batch["image"]), critic(jax.lax.stop_gradient(fake))
        accuracy = (jnp.mean(real_logit > 0) + jnp.mean(fake_logit < 0)) / 2
        real_loss, fake_loss = jax.nn.softplus(-real_logit), jax.nn.softplus(fake_logit)
        return jnp.mean(real_loss) + jnp.mean(fake_loss), accuracy

    def generator_loss(generator):
        return jnp.mean(jax.nn.softplus(-critic(jnp.tanh(generator(noise)))))

    critic_gradient = nnx.value_and_grad(critic_loss, has_aux=True)
    (critic_value, accuracy), gradients = critic_gradient(critic)
    state["critic_optimizer"].update(critic, gradients)
    generator_value, gradients = nnx.value_and_grad(generator_loss)(generator)
    state["generator_optimizer"].update(generator, gradients)
    metrics = {
        "critic_loss": critic_value,
        "generator_loss": generator_value,
        "critic_accuracy": accuracy,
    }
    return {**state, "key": next_key}, metrics


@jax.jit
def draw_samples(generator):
    """Return 64 digits side by side in one picture, from the same noise at each evaluation."""
    fake = jnp.tanh(generator(jax.random.normal(jax.random.key(3), (64, NOISE))))
    return (fake.reshape(8, 8, 8, 8).swapaxes(1, 2).reshape(64, 64) + 1) / 2


def evaluate(state):
    """Show samples on the page of `launcher report gan`, and return no metrics."""
    jaxlaunch.report(image={"samples": draw_samples(state["generator"])})
    return {}


if __name__ == "__main__":
    intervals = {"every": max(STEPS // 10, 1), "log_every": max(STEPS // 20, 1)}
    jaxlaunch.run(step, make_state, Digits(), batch=64, steps=STEPS, evaluate=evaluate, **intervals)
