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


def draw_params(network: Network, seed: int = 0, deviation: float = 0.3) -> dict[str, Any]:
    """Random parameters, large enough for logits that differ."""
    rng = np.random.default_rng(seed)
    params = {}
    for name, like in network.abstract.items():
        array = rng.normal(0.0, deviation, like.shape).astype(np.float32)
        params[name] = jax.device_put(array, like.sharding)
    return params


def one_device() -> jax.sharding.Mesh:
    return mesh.build_mesh(spec.Mesh(), jax.devices()[:1])


def generator(model: Any, ends: tuple[int, ...] = (), **axes: int) -> Generator:
    """A generator with drawn weights, on the first device or on a mesh of these axes."""
    requests = spec.Mesh(**axes)
    count = requests.dp * requests.fsdp * requests.ep * requests.mp
    network = Network(model, mesh.build_mesh(requests, jax.devices()[:count]))
    return Generator(network, network.unstack_params(draw_params(network)), ends)


@functools.cache
def bytes_model(ends: tuple[int, ...] = ()) -> Generator:
    """One that speaks bytes."""
    model = spec.Decoder(layers=1, width=32, heads=2, hidden=32, vocab=256, length=64)
    return generator(model, ends)
