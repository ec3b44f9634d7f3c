"""A denoising diffusion model (Ho et al. 2020) of 8 × 8 digits, given their class.

Why it needs more than a loss: the loss makes each training example from an image, a random time and
random noise. `rng` is a function of the seed and the step, so a run that resumes draws the same
numbers. The network predicts the noise, and the loss is its mean squared error. Samples are drawn
with the moving average of the weights (`ema`), which evaluation uses by default, because the
weights themselves still fluctuate. Sampling takes T consecutive steps in one lax.scan, which is
compiled once; its carry is the image, and its inputs are the times and keys. A Python loop would
compile T copies of the network. The noise follows the cosine schedule of Nichol and Dhariwal
(2021), a table that NumPy computes once. Channels are normalized in groups, which does not mix
examples as batch statistics would. After `launcher run examples/diffusion.yaml` and `launcher run
examples/digits.yaml`, let the classifier of the second run count how many of 400 samples are
digits: `python examples/diffusion.py runs/diffusion runs/digits`.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxlaunch
from jaxlaunch import Batch, Classify, Loss

T = 200  # steps from an image to noise
_S = np.cos((np.arange(T + 1) / T + 0.008) / 1.008 * np.pi / 2) ** 2
BETA = np.clip(1 - _S[1:] / _S[:-1], 0, 0.999).astype(np.float32)  # noise that each step adds
ALPHA = np.cumprod(1 - BETA).astype(np.float32)  # what is left of the image after each step


class Conv(nnx.Module):
    """A 3 × 3 convolution with zero padding: nine shifted copies side by side, then one product."""

    def __init__(self, width: int, out: int, rngs: nnx.Rngs, **options: Any) -> None:
        self.product = nnx.Linear(9 * width, out, rngs=rngs, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        _, rows, columns, _ = x.shape
        around = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifted = [
            around[:, down : down + rows, right : right + columns]
            for down in range(3)
            for right in range(3)
        ]
        return self.product(jnp.concatenate(shifted, -1))


class Block(nnx.Module):
    """Two convolutions with a residual connection and an offset for the time and the class."""

    def __init__(self, width: int, out: int, condition_width: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List(
            [nnx.GroupNorm(size, num_groups=4, rngs=rngs) for size in (width, out)]
        )
        self.convs = nnx.List([Conv(size, out, rngs) for size in (width, out)])
        self.offset = nnx.Linear(condition_width, out, rngs=rngs)
        self.skip = nnx.Linear(width, out, rngs=rngs)

    def __call__(self, x: jax.Array, condition_BC: jax.Array) -> jax.Array:
        y = self.convs[0](jax.nn.silu(self.norms[0](x))) + self.offset(condition_BC)[:, None, None]
        return self.skip(x) + self.convs[1](jax.nn.silu(self.norms[1](y)))


class UNet(nnx.Module):
    """The noise in images [B, 8, 8, 1] at times [B] of classes [B], with a skip connection."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        condition_width = 4 * width
        self.time = nnx.Linear(32, condition_width, rngs=rngs)
        self.label = nnx.Embed(10, condition_width, rngs=rngs)
        self.enter = Conv(1, width, rngs)
        self.leave = Conv(width, 1, rngs, kernel_init=nnx.initializers.zeros)
        self.half = nnx.Linear(4 * width, 2 * width, rngs=rngs)
        self.double = nnx.Linear(2 * width, 4 * width, rngs=rngs)
        self.down = Block(width, width, condition_width, rngs)
        self.middle = Block(2 * width, 2 * width, condition_width, rngs)
        self.up = Block(2 * width, width, condition_width, rngs)

    def __call__(self, x: jax.Array, time_B: jax.Array, label_B: jax.Array) -> jax.Array:
        angles = time_B[:, None] * np.float32(T) ** -np.linspace(0, 1, 16, dtype=np.float32)
        waves_BF = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        condition_BC = jax.nn.silu(self.time(waves_BF) + self.label(label_B))
        high = self.down(self.enter(x), condition_BC)
        # Of 2 × 2 pixels.
        squares = high.reshape(len(x), 4, 2, 4, 2, -1).swapaxes(2, 3).reshape(len(x), 4, 4, -1)
        low = self.double(self.middle(self.half(squares), condition_BC))
        back = low.reshape(len(x), 4, 4, 2, 2, -1).swapaxes(2, 3).reshape(high.shape)
        return self.leave(self.up(jnp.concatenate([high, back], -1), condition_BC))


class Diffusion(Classify):
    """The mean square error of the predicted noise."""

    def loss(self, model: Any, batch: Batch, rng: jax.Array) -> Loss:
        images = batch["image"].reshape(len(batch["image"]), 8, 8, 1) / 127.5 - 1
        of_time, of_noise = jax.random.split(rng)
        time_B = jax.random.randint(of_time, (len(images),), 0, T)
        noise = jax.random.normal(of_noise, images.shape)
        left = jnp.asarray(ALPHA)[time_B][:, None, None, None]
        noisy_images = jnp.sqrt(left) * images + jnp.sqrt(1 - left) * noise
        predicted_noise = model(noisy_images, time_B, batch["label"])
        error_B = jnp.square(predicted_noise - noise).mean((1, 2, 3))
        return Loss((error_B * batch["weight"]).sum(), batch["weight"].sum())

    def samples(self, model: Any, rng: jax.Array) -> dict[str, jax.Array]:
        """Return four samples of each digit, one row per class, for the page of the run."""
        images = sample(model, jnp.repeat(jnp.arange(10), 4), rng)
        return {"samples": images.reshape(10, 4, 8, 8).swapaxes(1, 2).reshape(80, 32)}


def sample(model: UNet, label_B: jax.Array, key: jax.Array) -> jax.Array:
    """Return images [B, 8, 8] uint8 of these classes, made in T steps; call it under jit."""
    first, *keys = jax.random.split(key, T + 1)
    x = jax.random.normal(first, (len(label_B), 8, 8, 1))

    def step(x: jax.Array, at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        time, key = at
        beta, left = jnp.asarray(BETA)[time], jnp.asarray(ALPHA)[time]
        next_left = jnp.where(time > 0, jnp.asarray(ALPHA)[time - 1], 1.0)
        noise = model(x, jnp.full(len(label_B), time), label_B)
        clean = jnp.clip((x - jnp.sqrt(1 - left) * noise) / jnp.sqrt(left), -1, 1)
        mean = (jnp.sqrt(next_left) * beta * clean + jnp.sqrt(1 - beta) * (1 - next_left) * x) / (
            1 - left
        )
        spread = jnp.sqrt(beta * (1 - next_left) / (1 - left))
        return mean + spread * jax.random.normal(key, x.shape), None

    x, _ = jax.lax.scan(step, x, (jnp.arange(T)[::-1], jnp.stack(keys)))
    return jnp.round((x[..., 0] + 1) * 127.5).astype(jnp.uint8)


def judge(run: str, classifier: str, count: int = 400, sure: float = 0.9) -> None:
    """Print the share of samples, and of held-out digits, that a run's classifier is sure of."""
    model, judging = jaxlaunch.load(run, ema=True).model, jaxlaunch.load(classifier)
    label_B = np.arange(count) % 10
    images = np.asarray(nnx.jit(sample)(model, label_B, jax.random.key(0)))
    held_out = np.concatenate(
        [images["image"][images["weight"] > 0] for images in judging.held_out()]
    )
    sampled = images.reshape(count, *held_out.shape[1:])
    for name, pictures in (("held out", held_out), ("samples", sampled)):
        share_BV = jax.nn.softmax(judging.predict(pictures))
        is_sure = share_BV.max(1) >= sure
        counts = np.bincount(share_BV.argmax(1)[is_sure], minlength=10)
        print(
            f"{name}: {is_sure.mean():.1%} of {len(pictures)} are digits with confidence "
            f">= {sure}: {counts} of 0 to 9"
        )
    print(
        f"samples: {(share_BV.argmax(1) == label_B).mean():.1%} are of the class that was asked for"
    )


if __name__ == "__main__":
    judge(*sys.argv[1:3])
