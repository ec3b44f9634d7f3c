"""JAX as the trainer's tests want it: 8 CPU devices, no silent broadcasting, and for who asks no silent promotion."""

from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def strict() -> Iterator[None]:
    """Dtypes are never promoted silently. Not for all tests: optax raises floats to integer powers."""
    with jax.numpy_dtype_promotion("strict"):
        yield
