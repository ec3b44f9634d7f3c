"""JAX as the trainer's tests want it: 8 CPU devices, no silent broadcasting, no silent promotion."""

from collections.abc import Iterator

import jax
import pytest

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # tests compile far longer than they compute
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def standard() -> Iterator[None]:
    """JAX's own ways: flax's layers broadcast, and jax.nn's attention promotes bfloat16 in its backward pass."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
