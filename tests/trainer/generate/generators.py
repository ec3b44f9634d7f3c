"""Generators of small models."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from jaxlaunch.trainer import spec
from jaxlaunch.trainer.generate.generator import Generator
from jaxlaunch.trainer.generate.network import Network
from jaxlaunch.trainer.parallel import mesh


def drawn(network: Network, seed: int = 0, deviation: float = 0.3) -> dict[str, Any]:
    """Random parameters, large enough for logits that differ."""
    rng = np.random.default_rng(seed)
    return {
        name: jax.device_put(
            rng.normal(0.0, deviation, like.shape).astype(np.float32), like.sharding
        )
        for name, like in network.abstract.items()
    }


def one_device() -> jax.sharding.Mesh:
    return mesh.build_mesh(spec.Mesh(), jax.devices()[:1])


def generator(model: Any, ends: tuple[int, ...] = (), **axes: int) -> Generator:
    """A generator of the model with drawn weights, on the first of the 8 devices or on a mesh of these axes."""
    asked = spec.Mesh(**axes)
    network = Network(
        model, mesh.build_mesh(asked, jax.devices()[: asked.dp * asked.fsdp * asked.ep * asked.mp])
    )
    return Generator(network, network.unstack_params(drawn(network)), ends)


@functools.cache
def bytes_model(ends: tuple[int, ...] = ()) -> Generator:
    """One that speaks bytes."""
    return generator(
        spec.Decoder(layers=1, width=32, heads=2, hidden=32, vocab=256, length=64), ends
    )
