"""A denoising diffusion model (Ho et al. 2020) of 8 × 8 digits, given their class.

The task needs more than a loss function. The loss makes each training example from an image, a
random time and random noise. `rng` is a function of the seed and the step, so a run that resumes
draws the same numbers. The network predicts the noise, and the loss is the mean squared error of
this prediction.

Sampling takes T consecutive steps in one lax.scan, which is compiled once. The carry of the scan is
the image, and its inputs are the times and the random keys. A Python loop would compile T copies of
the network. Samples are drawn with the moving average of the weights (`ema`), which evaluation uses
by default, because the weights themselves still fluctuate.

The noise follows the cosine schedule of Nichol and Dhariwal (2021), a table that NumPy computes
once. Channels are normalized in groups, which does not mix examples as batch statistics would.

After `launcher run examples/diffusion.yaml` and `launcher run examples/digits.yaml`, let the
classifier of the second run judge 400 samples of the first one:
`python examples/diffusion.py runs/diffusion runs/digits`.
"""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxlaunch
from jaxlaunch import Batch, Classify, Loss

# The number of steps from an image to noise.
T = 200
_SCHEDULE = np.cos((np.arange(T + 1) / T + 0.008) / 1.008 * np.pi / 2) ** 2
# The variance of the noise that each step adds, and the part of the image that is left after it.
BETA = np.clip(1 - _SCHEDULE[1:] / _SCHEDULE[:-1], 0, 0.999).astype(np.float32)
ALPHA_BAR = np.cumprod(1 - BETA).astype(np.float32)


class Conv(nnx.Module):
    """A 3 × 3 convolution with zero padding: nine shifted copies side by side, then one product."""

    def __init__(self, width: int, out: int, rngs: nnx.Rngs, **options: Any) -> None:
        self.product = nnx.Linear(9 * width, out, rngs=rngs, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        _, rows, columns, _ = x.shape
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifted = [
            padded[:, down : down + rows, right : right + columns]
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
    """Predicts the noise in images [B, 8, 8, 1] from their times [B] and classes [B]."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        condition_width = 4 * width
        self.time = nnx.Linear(32, condition_width, rngs=rngs)
        self.label = nnx.Embed(10, condition_width, rngs=rngs)
        self.conv_in = Conv(1, width, rngs)
        self.conv_out = Conv(width, 1, rngs, kernel_init=nnx.initializers.zeros)
        self.downsample = nnx.Linear(4 * width, 2 * width, rngs=rngs)
        self.upsample = nnx.Linear(2 * width, 4 * width, rngs=rngs)
        self.down = Block(width, width, condition_width, rngs)
        self.middle = Block(2 * width, 2 * width, condition_width, rngs)
        self.up = Block(2 * width, width, condition_width, rngs)

    def __call__(self, x: jax.Array, time_B: jax.Array, label_B: jax.Array) -> jax.Array:
        angles = time_B[:, None] * np.float32(T) ** -np.linspace(0, 1, 16, dtype=np.float32)
        time_BF = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        condition_BC = jax.nn.silu(self.time(time_BF) + self.label(label_B))
        high = self.down(self.conv_in(x), condition_BC)
        # Each square of 2 × 2 pixels becomes one pixel with four times the channels, and back.
        squares = high.reshape(len(x), 4, 2, 4, 2, -1).swapaxes(2, 3).reshape(len(x), 4, 4, -1)
        low = self.upsample(self.middle(self.downsample(squares), condition_BC))
        upsampled = low.reshape(len(x), 4, 4, 2, 2, -1).swapaxes(2, 3).reshape(high.shape)
        return self.conv_out(self.up(jnp.concatenate([high, upsampled], -1), condition_BC))


class Diffusion(Classify):
    """The mean squared error of the predicted noise."""

    def loss(self, model: Any, batch: Batch, rng: jax.Array) -> Loss:
        images = batch["image"].reshape(len(batch["image"]), 8, 8, 1) / 127.5 - 1
        time_key, noise_key = jax.random.split(rng)
        time_B = jax.random.randint(time_key, (len(images),), 0, T)
        noise = jax.random.normal(noise_key, images.shape)
        alpha_bar = jnp.asarray(ALPHA_BAR)[time_B][:, None, None, None]
        noisy_images = jnp.sqrt(alpha_bar) * images + jnp.sqrt(1 - alpha_bar) * noise
        predicted_noise = model(noisy_images, time_B, batch["label"])
        error_B = jnp.square(predicted_noise - noise).mean((1, 2, 3))
        return Loss((error_B * batch["weight"]).sum(), batch["weight"].sum())

    def samples(self, model: Any, rng: jax.Array) -> dict[str, jax.Array]:
        """Return four samples of each digit, one row per class, for the page of the run."""
        images = sample(model, jnp.repeat(jnp.arange(10), 4), rng)
        return {"samples": images.reshape(10, 4, 8, 8).swapaxes(1, 2).reshape(80, 32)}


def sample(model: UNet, label_B: jax.Array, key: jax.Array) -> jax.Array:
    """Return samples [B, 8, 8] of these classes, as uint8. Call it under jit."""
    first_key, *step_keys = jax.random.split(key, T + 1)
    x = jax.random.normal(first_key, (len(label_B), 8, 8, 1))

    def denoise(x: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        time, key = inputs
        beta, alpha_bar = jnp.asarray(BETA)[time], jnp.asarray(ALPHA_BAR)[time]
        next_alpha_bar = jnp.where(time > 0, jnp.asarray(ALPHA_BAR)[time - 1], 1.0)
        noise = model(x, jnp.full(len(label_B), time), label_B)
        clean = jnp.clip((x - jnp.sqrt(1 - alpha_bar) * noise) / jnp.sqrt(alpha_bar), -1, 1)
        mean = (
            jnp.sqrt(next_alpha_bar) * beta * clean + jnp.sqrt(1 - beta) * (1 - next_alpha_bar) * x
        ) / (1 - alpha_bar)
        deviation = jnp.sqrt(beta * (1 - next_alpha_bar) / (1 - alpha_bar))
        return mean + deviation * jax.random.normal(key, x.shape), None

    x, _ = jax.lax.scan(denoise, x, (jnp.arange(T)[::-1], jnp.stack(step_keys)))
    return jnp.round((x[..., 0] + 1) * 127.5).astype(jnp.uint8)


def judge_samples(
    run: str, classifier_run: str, count: int = 400, min_confidence: float = 0.9
) -> None:
    """Print the share of samples, and of held-out digits, that a classifier is confident about."""
    model, classifier = jaxlaunch.load(run, ema=True).model, jaxlaunch.load(classifier_run)
    label_B = np.arange(count) % 10
    samples = np.asarray(nnx.jit(sample)(model, label_B, jax.random.key(0)))
    held_out = np.concatenate(
        [batch["image"][batch["weight"] > 0] for batch in classifier.held_out()]
    )
    samples = samples.reshape(count, *held_out.shape[1:])
    for name, images in (("held out", held_out), ("samples", samples)):
        prob_BV = jax.nn.softmax(classifier.predict(images))
        is_confident = prob_BV.max(1) >= min_confidence
        counts = np.bincount(prob_BV.argmax(1)[is_confident], minlength=10)
        print(
            f"{name}: {is_confident.mean():.1%} of {len(images)} are digits with confidence "
            f">= {min_confidence}: {counts} of 0 to 9"
        )
    print(
        f"samples: {(prob_BV.argmax(1) == label_B).mean():.1%} are of the class that was asked for"
    )


if __name__ == "__main__":
    judge_samples(*sys.argv[1:3])
